"""What a rollout storage holds, and how it is filled."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, DataError, FieldSpec, MissingFieldError, MouseError, SchemaError, Spec
from mouse_core.errors import RolloutError, RolloutFullError
from mouse_core.replay import ArrayStorage, ReplayBuffer, SliceSampler
from mouse_core.rollouts import RolloutField, RolloutStorage, Transition
from tests.core import rollout_cases as oracle
from tests.core.rollout_cases import MOTION, motion_transition
from tests.raising import assert_raises

STEPS, ENVS = 5, 4
RL = {"values": (1,), "actions_log_prob": (1,), "mu": (4,), "sigma": (4,), "returns": (1,), "advantages": (1,)}
EVERYTHING = {
    "observations": (5,),
    "reference_observations": (3,),
    "reference_observations_mask": (),
    "privileged_observations": (7,),
    "privileged_reference_observations": (2, 2),
    "privileged_reference_observations_mask": (),
    "actions": (4,),
    "rewards": (1,),
    "dones": (1,),
}


def storage_of(training_type: str = "rl", **options: Any) -> RolloutStorage:
    return RolloutStorage.motion_mimic(training_type, ENVS, STEPS, **{**MOTION, **options})  # type: ignore[arg-type]


def filled(**options: Any) -> tuple[RolloutStorage, list[Transition]]:
    random = np.random.default_rng(0)
    storage = storage_of(**options)
    transitions = [motion_transition(random, ENVS, **options) for _ in range(STEPS)]
    for transition in transitions:
        storage.add_transitions(transition)
    return storage, transitions


def contents(storage: RolloutStorage) -> dict[str, Any]:
    return {name: storage[name].copy() for name in storage.spec if name in storage} | {"step": storage.step}


@pytest.mark.parametrize("rnd_state_shape", [None, (6,)])
@pytest.mark.parametrize("apply_dagger_actions", [False, True])
@pytest.mark.parametrize("training_type", ["rl", "distillation"])
def test_the_preset_holds_what_is_configured(
    training_type: str, apply_dagger_actions: bool, rnd_state_shape: tuple[int, ...] | None
) -> None:
    storage = storage_of(training_type, apply_dagger_actions=apply_dagger_actions, rnd_state_shape=rnd_state_shape)
    expected = EVERYTHING | (RL if training_type == "rl" else {"privileged_actions": (4,)})
    expected |= {"dagger_actions": (4,)} if apply_dagger_actions else {}
    expected |= {"rnd_state": (6,)} if rnd_state_shape else {}
    for name in {*EVERYTHING, *RL, "privileged_actions", "dagger_actions", "rnd_state"}:
        if name in expected:
            assert getattr(storage, name).shape == (STEPS, ENVS, *expected[name]), name
            assert storage[name] is getattr(storage, name)
            assert storage.spec[name].shape == expected[name]
        else:
            assert getattr(storage, name) is None, name
            assert name not in storage
    assert set(storage.spec) == set(expected)
    assert storage.spec.alignment == "outgoing"
    assert storage.hidden_states is None
    assert storage.dones.dtype == np.uint8
    assert storage.reference_observations_mask.dtype == bool
    assert storage.training_type == training_type


@pytest.mark.parametrize("nothing", [None, (None,), [None]])
def test_what_is_not_configured_is_not_allocated(nothing: Any) -> None:
    storage = storage_of(ref_obs_shape=nothing, privileged_obs_shape=nothing, rnd_state_shape=nothing)
    for name in ("reference_observations", "reference_observations_mask", "privileged_observations", "rnd_state"):
        assert getattr(storage, name) is None
    # Privileged references need references.
    assert storage.privileged_reference_observations is None
    assert storage.privileged_reference_observations_mask is None
    assert storage_of(privileged_ref_obs_shape=nothing).privileged_reference_observations is None
    without = storage_of(privileged_obs_shape=nothing)
    assert without.privileged_reference_observations.shape == (STEPS, ENVS, 2, 2)


def test_fields_are_what_the_spec_says() -> None:
    storage = RolloutStorage.motion_mimic("rl", 3, 2, (5,), None, None, None, (4,), True, (6,), None, "cpu")
    assert storage.dagger_actions.shape == (2, 3, 4)
    assert storage.rnd_state.shape == (2, 3, 6)
    storage = RolloutStorage(2, 3, {"obs": (4,)}, seed=5)
    storage.add_transitions({"obs": np.ones((2, 4)), "rewards": np.ones(2), "dones": [0, 0]})
    found = "RolloutStorage(1 of 3 rows, num_envs=2, fields=['obs', 'rewards', 'dones'], seed=5)"
    assert repr(storage) == found
    storage = RolloutStorage(
        num_envs=4096,
        num_transitions_per_env=24,
        fields={
            "observations": (8,),
            "actions": RolloutField((), "int64"),
            "pixels": FieldSpec("pixels", np.dtype("uint8"), (2, 2)),
            "goal": RolloutField((3,), mask=True, optional=True),
            "values": (),
            "rewards": RolloutField((1,), "float64"),
        },
        seed=0,
    )
    assert storage.actions.shape == (24, 4096)
    assert storage.actions.dtype == np.int64
    assert storage.pixels.shape == (24, 4096, 2, 2)
    assert storage.rewards.dtype == np.float64
    for name in ("rewards", "dones", "values", "returns", "advantages"):
        assert storage[name].shape == (24, 4096, 1)
    assert storage.goal.shape == (24, 4096, 3)
    assert not storage.goal_mask.any()
    assert storage.mu is None
    with pytest.raises(AttributeError, match="no attribute or field 'nonsense'"):
        storage.nonsense  # noqa: B018
    with pytest.raises(MissingFieldError, match=r"expected one of .*found 'nonsense'"):
        storage["nonsense"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("a", (1,))], "fields: expected a dict"),
        ({"_a": (1,)}, "expected names that do not begin with _"),
        ({"": (1,)}, "expected names"),
        ({3: (1,)}, "expected names"),
        ({"a": 3}, r"fields\['a'\]: expected a shape"),
        ({"a": (0,)}, r"fields\['a'\]: expected a shape of positive sizes"),
        ({"a": "12"}, "expected a shape"),
        ({"returns": (1,)}, "returns cannot be requested; the storage computes it"),
        ({"hidden_states": (1,)}, "hidden_states cannot be requested"),
        ({"action_mean": (1,)}, "it is another name of mu"),
        ({"rewards": (2, 2)}, "expected one number for each row"),
        ({"dones": RolloutField((2,), "uint8")}, r"one number for each row.* found \(2,\); agents .*num_envs=N \* A"),
        (
            {"rewards": (2,), "values": ()},
            r"fields\['values'\]: expected the shape of the rewards, \(2,\), found \(1,\)",
        ),
        ({"rewards": RolloutField((), "int32")}, "expected a floating dtype, found int32"),
        ({"dones": RolloutField((), "float32")}, "expected a boolean or integer dtype"),
        ({"dones": RolloutField((), "uint8", optional=True)}, "expected a field without optional and mask"),
        ({"a": RolloutField((), mask=True), "a_mask": ()}, "a_mask exists already"),
        (
            Spec({"a": FieldSpec("a", np.dtype("float32"), ())}),
            "expected a spec of alignment 'outgoing', found 'arrived'",
        ),
    ],
)
def test_fields_that_cannot_be(fields: Any, message: str) -> None:
    assert_raises(ConfigError, message, RolloutStorage, 2, 3, fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": 0}, "num_envs: expected an integer of at least 1, found 0"),
        ({"num_transitions_per_env": 1.5}, "num_transitions_per_env: expected an integer of at least 1, found 1.5"),
        ({"seed": -1}, "seed: expected an integer"),
        ({"device": "cuda"}, "device: expected 'cpu' or None"),
        ({"amp_cfg": {"amp_obs_extractor": abs}}, "expected a function as amp_ref_obs_extractor, found None"),
        ({"amp_cfg": {"amp_obs_extractor": abs, "amp_ref_obs_extractor": abs}}, "expected a field 'observations'"),
    ],
)
def test_arguments_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutStorage(**{"num_envs": 2, "num_transitions_per_env": 3, "fields": {}, **change})


def test_rows_are_copied_pickled_and_none_beyond_the_last_is_taken() -> None:
    storage, transitions = filled(apply_dagger_actions=True, rnd_state_shape=(6,))
    assert storage.step == STEPS
    for row, transition in enumerate(transitions):
        for name, value in transition:
            np.testing.assert_array_equal(storage[name][row], np.reshape(value, storage[name][row].shape), err_msg=name)
    transitions[0].observations[:] = 99.0
    assert not (storage.observations[0] == 99.0).any()
    storage, transitions = filled()
    before = contents(storage)
    for kind in (RolloutFullError, RolloutError, OverflowError, MouseError):
        assert_raises(kind, "expected at most 5 rows, found one more row", storage.add_transitions, transitions[0])
    np.testing.assert_equal(contents(storage), before)
    storage.clear()
    assert storage.step == 0
    storage.add_transitions(transitions[3])
    np.testing.assert_array_equal(storage.observations[0], transitions[3].observations)
    storage, transitions = filled()
    for other in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        np.testing.assert_equal(contents(other), contents(storage))
        other.clear()
        other.add_transitions(transitions[2])
        assert storage.step == STEPS


def test_names_that_transitions_have_for_fields() -> None:
    transition = Transition(action_mean=1, critic_observations=2)
    transition.action_sigma, transition.critic_reference_observations = 3, 4
    transition.critic_reference_observations_mask = 5
    assert dict(transition) == {
        "mu": 1,
        "privileged_observations": 2,
        "sigma": 3,
        "privileged_reference_observations": 4,
        "privileged_reference_observations_mask": 5,
    }
    assert (transition.mu, transition.action_mean, transition.privileged_observations) == (1, 1, 2)
    assert transition.values is None
    assert transition.critic_reference_observations_mask == 5
    with pytest.raises(AttributeError, match="nonsense"):
        transition.nonsense  # noqa: B018
    assert_raises(ConfigError, "expected one value for mu, found a second value as", Transition, mu=1, action_mean=2)
    assert repr(Transition(mu=1, values=2)) == "Transition(mu, values)"
    transition.clear()
    assert transition.mu is None
    assert RolloutStorage.Transition is Transition
    assert dict(pickle.loads(pickle.dumps(Transition(mu=1)))) == {"mu": 1}


def small(**fields: Any) -> RolloutStorage:
    return RolloutStorage(2, 3, fields)


ROW: dict[str, Any] = {"rewards": [0.5, 1.5], "dones": [False, True]}


def test_columns_kinds_and_masks_of_values() -> None:
    storage = small(actions=RolloutField((), "int32"), flag=RolloutField((), "bool"))
    storage.add_transitions(
        {"rewards": [1, 2], "dones": [0.0, 2.0], "actions": np.array([3, 4]), "flag": [True, False]}
    )
    transition = Transition(rewards=[[1.0], [2.0]], dones=np.array([[1], [0]]), actions=[5, 6], flag=[True, False])
    storage.add_transitions(transition)
    np.testing.assert_array_equal(storage.rewards[:2, :, 0], [[1, 2], [1, 2]])
    np.testing.assert_array_equal(storage.dones[:2, :, 0], [[0, 2], [1, 0]])
    np.testing.assert_array_equal(storage.actions[:2], [[3, 4], [5, 6]])
    storage = small(goal=RolloutField((1,), mask=True, optional=True), map=RolloutField((), mask=True))
    storage.add_transitions({**ROW, "map": [1.0, 2.0]})
    storage.add_transitions({**ROW, "map": ([3.0, 4.0], [True, False]), "goal": [5.0, 6.0], "goal_mask": [[0], [1]]})
    storage.add_transitions({**ROW, "map": [5.0, 6.0], "map_mask": np.array([0.0, 1.0])})
    np.testing.assert_array_equal(storage.map, [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(storage.map_mask, [[1, 1], [1, 0], [0, 1]])
    np.testing.assert_array_equal(storage.goal[..., 0], [[0, 0], [5, 6], [0, 0]])
    np.testing.assert_array_equal(storage.goal_mask, [[0, 0], [0, 1], [0, 0]])
    assert all("goal" in batch.fields for batch in storage.mini_batch_generator(1, 1))
    storage.clear()
    for _ in range(3):
        storage.add_transitions({**ROW, "map": [1.0, 2.0]})
    assert not storage.goal_mask.any()
    # Delivered all the same, so that training code need not ask.
    for batch in storage.mini_batch_generator(1, 1):
        assert batch["goal"].shape == (6, 1)
        assert not batch["goal_mask"].any()


def test_optional_fields_are_in_all_rows_or_in_none() -> None:
    storage = small(extra=RolloutField((), optional=True))
    storage.add_transitions({**ROW, "extra": [1.0, 2.0]})
    with pytest.raises(
        MissingFieldError, match="extra: expected a value in every row or in none, found no value in row 1"
    ):
        storage.add_transitions(ROW)
    storage.clear()
    storage.add_transitions(ROW)
    with pytest.raises(
        SchemaError, match="extra: expected a value in every row or in none, found the first value in row 1"
    ):
        storage.add_transitions({**ROW, "extra": [1.0, 2.0]})
    assert storage.step == 1
    storage = small(observations=(1,))
    observations = np.ones((2, 1))
    storage.add_transitions({**ROW, "observations": observations, "critic_observations": observations})
    with pytest.raises(SchemaError, match="found also the unknown field 'privileged_observations'"):
        storage.add_transitions({**ROW, "observations": observations, "critic_observations": observations + 1})


def motion(**changes: Any) -> Callable[[], Any]:
    return lambda: dict(motion_transition(np.random.default_rng(1), ENVS)) | changes


NAN = np.array([0.0, np.nan, 1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (motion(rewards=NAN), DataError, "rewards: expected finite numbers, found nan at environment 1, row 1"),
        (motion(rewards=[0.0, 0.0, -np.inf, 0.0]), DataError, "rewards: expected finite numbers"),
        (motion(values=NAN), DataError, "values: expected finite numbers, found nan at environment 1, row 1"),
        (motion(actions_log_prob=NAN), DataError, "actions_log_prob: expected finite numbers"),
        (
            motion(dones=[0, 1, 2, 3]),
            DataError,
            r"dones: expected 0 \(alive\), 1 \(terminal\) or 2 \(truncated\), found 3",
        ),
        (motion(dones=NAN), DataError, "dones: expected 0"),
        (motion(rewards=np.zeros(3)), SchemaError, r"rewards: expected shape \[4, 1\] or \[4\], found \[3\]"),
        (motion(observations=np.zeros(5)), SchemaError, r"observations: expected shape \[4, 5\], found \[5\]"),
        (motion(observations=np.zeros((1, 5))), SchemaError, r"observations: expected shape \[4, 5\], found \[1, 5\]"),
        (motion(observations=np.zeros((4, 5), complex)), SchemaError, "observations: expected numbers, found complex"),
        (motion(observations=[[1.0], [1.0, 2.0]]), SchemaError, "observations: expected an array of shape"),
        (motion(observations=object()), SchemaError, "observations: expected"),
        (motion(reference_observations_mask=[0.5] * 4), DataError, "_mask: expected True or False, found 0.5"),
        (motion(reference_observations_mask=[True]), SchemaError, "reference_observations_mask: expected shape"),
        (motion(reference_observations=None), MissingFieldError, r"\['reference_observations'\] missing"),
        (motion(bogus=np.zeros(4)), SchemaError, "found also the unknown field 'bogus'"),
        (motion(dagger_actions=np.zeros((4, 4))), SchemaError, "found also the unknown field 'dagger_actions'"),
        (motion(returns=np.zeros(4)), SchemaError, "found also the unknown field 'returns'"),
        (motion(sigma=None), MissingFieldError, r"\['sigma'\] missing"),
        (dict, MissingFieldError, "missing"),
        (lambda: 3, ConfigError, "expected a Transition or a dict, found int"),
        (motion(hidden_states=np.zeros((1, 4, 2))), SchemaError, r"hidden_states: expected \(actor, critic\)"),
        (
            motion(hidden_states=(np.zeros((1, 3, 2)), None)),
            SchemaError,
            r"hidden_states\[0\]: expected 4 environments",
        ),
        (motion(hidden_states=(np.zeros((1, 4, 2)), None)), SchemaError, "found the first hidden states in row 1"),
    ],
)
def test_bad_rows_change_nothing(make: Callable[[], Any], kind: type[MouseError], message: str) -> None:
    storage = storage_of()
    storage.add_transitions(motion_transition(np.random.default_rng(0), ENVS))
    before = contents(storage)
    assert_raises(kind, message, storage.add_transitions, make())
    np.testing.assert_equal(contents(storage), before)
    assert storage.hidden_states is None
    storage.add_transitions(motion()())
    assert storage.step == 2


def test_a_replay_buffer_draws_from_the_same_arrays() -> None:
    storage, _ = filled()
    storage.dones[:] = 0
    storage.dones[2, 1] = 1
    names = ("observations", "rewards", "dones")
    rows = ArrayStorage(arrays={name: storage[name] for name in names}, ndim=2)
    assert rows.num_envs == ENVS
    assert all(np.shares_memory(rows.read(name, slice(None)), storage[name]) for name in names)
    buffer = ReplayBuffer(rows, SliceSampler(sequence_length=3, end_key="dones", pad=False), batch_size=100, seed=0)
    batch = buffer.sample()
    step, env = np.divmod(batch["index"], ENVS)
    for name in names:
        np.testing.assert_array_equal(batch[name], storage[name][step, env], err_msg=name)
    assert (np.diff(step) == 1).all()
    assert (np.diff(env) == 0).all()
    # The episode of environment 1 that begins with row 3 is too short, and no slice goes on into it.
    assert {(step, env) for step, env in zip(step[:, 0], env[:, 0], strict=True) if env == 1} == {(0, 1)}


@pytest.mark.parametrize("rows", [1, 3, STEPS])
def test_statistics(rows: int) -> None:
    random = np.random.default_rng(rows)
    storage = storage_of()
    assert_raises(RolloutError, "expected at least one row", storage.get_statistics)
    for _ in range(rows):
        storage.add_transitions(motion_transition(random, ENVS))
    before = contents(storage)
    length, reward = storage.get_statistics()
    lengths = [last - first for _, first, last in oracle.trajectories(storage.dones[:rows])]
    assert length == pytest.approx(sum(lengths) / len(lengths))
    assert reward == pytest.approx(storage.rewards[:rows].astype(np.float64).mean(), abs=1e-6)
    np.testing.assert_equal(contents(storage), before)
    assert storage.get_statistics() == (length, reward)


@pytest.mark.parametrize(
    ("shape", "truncation", "normalize"),
    [
        ((1, 1), True, True),
        ((1, 3), False, True),
        ((4, 4), True, False),
        ((24, 6), False, False),
        ((24, 6), True, True),
    ],
)
def test_compute_returns(shape: tuple[int, int], truncation: bool, normalize: bool) -> None:
    case = oracle.random_case(7, *shape, dtype="float32")
    storage = RolloutStorage(shape[1], shape[0], {"values": ()})
    for row in range(shape[0]):
        storage.add_transitions({name: getattr(case, name)[row] for name in ("rewards", "dones", "values")})
    ends = {"time_outs": case.time_outs, "final_values": case.final_values[..., 0]} if truncation else {}
    arrays = [storage.returns, storage.advantages]
    storage.compute_returns(case.last_values, 0.99, 0.95, normalize_advantage=normalize, **ends)
    advantages = oracle.gae(case, 0.99, 0.95, truncation=truncation)
    np.testing.assert_allclose(storage.returns, advantages + case.values, rtol=1e-5, atol=1e-5)
    if normalize:
        deviation = advantages.std(ddof=1) if advantages.size > 1 else 0.0
        advantages = (advantages - advantages.mean()) / (deviation + 1e-8)
    np.testing.assert_allclose(storage.advantages, advantages, rtol=1e-4, atol=1e-5)
    assert arrays[0] is storage.returns
    assert arrays[1] is storage.advantages


def test_presets_fields_and_integers_that_cannot_be() -> None:
    assert_raises(ConfigError, "training_type: expected one of", storage_of, "imitation")
    assert_raises(ConfigError, "obs_shape: expected a shape", storage_of, obs_shape=None)
    for wrong in ("flaot32", "datetime64[s]"):
        assert_raises(ConfigError, "RolloutField: expected a", RolloutField, (), wrong)
    storage = small(actions=RolloutField((), "uint8"), flag=RolloutField((), "bool"))
    good = {**ROW, "actions": [1, 2], "flag": [True, False]}
    with pytest.raises(DataError, match=r"actions: expected 0..255 \(uint8\), found 256"):
        storage.add_transitions({**good, "actions": [256, 0]})
    with pytest.raises(DataError, match=r"actions: expected 0..255 \(uint8\), found -1"):
        storage.add_transitions({**good, "actions": [-1, 0]})
    with pytest.raises(SchemaError, match="actions: expected uint8, found float64"):
        storage.add_transitions({**good, "actions": [0.5, 0]})
    assert_raises(SchemaError, "flag: expected bool, found int64", storage.add_transitions, {**good, "flag": [0, 1]})
    with pytest.raises(DataError, match="dones: expected 0 or 1, found 2"):
        RolloutStorage(2, 3, {"dones": RolloutField((), "bool")}).add_transitions({**ROW, "dones": [0, 2]})
    for large in (1e300, -3.5e38):
        with pytest.raises(DataError, match=r"rewards: expected values that float32 can represent, found .*e\+"):
            storage.add_transitions({**good, "rewards": np.array([0.0, large])})
    assert storage.step == 0


def test_codes_of_truncation() -> None:
    storage = small(values=())
    for dones in ([0, 2], [1, 0], [2, 0]):
        storage.add_transitions({**ROW, "dones": dones, "values": [1.0, 2.0]})
    with pytest.raises(
        ConfigError, match=r"expected time_outs and final_values, .* 2 \(truncated\) at environment 1, row 0"
    ):
        storage.compute_returns(np.zeros(2), 0.9, 0.9)
    storage.compute_returns(
        np.zeros(2),
        0.9,
        0.9,
        time_outs=storage.dones == 2,
        final_values=np.full((3, 2), 10.0),
        normalize_advantage=False,
    )
    np.testing.assert_allclose(storage.returns[0, 1], 1.5 + 9.0)
    np.testing.assert_allclose(storage.returns[1, 0], 0.5)
    np.testing.assert_allclose(storage.returns[2, 0], 0.5 + 9.0)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"gamma": 1.5}, ConfigError, "gamma: expected a number from 0 to 1, found 1.5"),
        ({"lam": float("nan")}, ConfigError, "lam: expected a number from 0 to 1"),
        ({"gamma": "x"}, ConfigError, "gamma: expected a number"),
        ({"last_values": np.zeros(3)}, SchemaError, r"last_values: expected shape \[4, 1\] or \[4\], found \[3\]"),
        ({"last_values": NAN}, DataError, "last_values: expected finite numbers, found nan at environment 1"),
        ({"last_values": None}, SchemaError, "last_values: expected"),
        ({"time_outs": np.zeros((STEPS, ENVS))}, ConfigError, "final_values: expected values together with time_outs"),
        ({"final_values": np.zeros((STEPS, ENVS))}, ConfigError, "time_outs: expected values together with"),
        (
            {"time_outs": np.zeros((ENVS, STEPS)), "final_values": np.zeros((STEPS, ENVS))},
            SchemaError,
            r"time_outs: expected shape \[5, 4, 1\] or \[5, 4\], found \[4, 5\]",
        ),
        (
            {"time_outs": np.ones((STEPS, ENVS), bool), "final_values": np.zeros((STEPS, ENVS))},
            DataError,
            "time_outs: expected true values only where dones mark the end of an episode, found True at environment",
        ),
    ],
)
def test_bad_arguments_of_returns_change_nothing(arguments: Any, kind: type[MouseError], message: str) -> None:
    storage, _ = filled()
    storage.dones[-1] = 0
    storage.compute_returns(np.zeros(ENVS), 0.9, 0.9)
    before = contents(storage)
    with pytest.raises(kind, match=message):
        storage.compute_returns(**{"last_values": np.zeros(ENVS), "gamma": 0.9, "lam": 0.9, **arguments})
    np.testing.assert_equal(contents(storage), before)


def test_returns_out_of_turn_without_checks_and_of_values_that_are_not_needed() -> None:
    storage = storage_of()
    with pytest.raises(RolloutError, match="compute_returns: expected 5 rows, found 0"):
        storage.compute_returns(np.zeros(ENVS), 0.9, 0.9)
    distilled, _ = filled(training_type="distillation")
    assert_raises(MissingFieldError, "expected a field 'values'", distilled.compute_returns, np.zeros(ENVS), 0.9, 0.9)
    storage = RolloutStorage(2, 1, {"values": ()}, validate=False)
    storage.add_transitions({"rewards": [np.nan, 1.0], "dones": [0, 1], "values": [0.0, 0.0]})
    storage.compute_returns(np.zeros(2), 0.9, 0.9, normalize_advantage=False)
    np.testing.assert_array_equal(storage.returns[0, :, 0], [np.nan, 1.0])
    storage, _ = filled()
    storage.dones[:] = 1
    finals = np.where(np.arange(STEPS)[:, None] == 2, 1.0, np.nan) * np.ones(ENVS)
    time_outs = np.isfinite(finals)
    storage.compute_returns(np.full(ENVS, np.nan), 0.9, 0.9, time_outs=time_outs, final_values=finals)
    assert np.isfinite(storage.returns).all()
    with pytest.raises(DataError, match=r"final_values: expected finite numbers at time_outs, found nan at .*, row 2"):
        storage.compute_returns(
            np.zeros(ENVS), 0.9, 0.9, time_outs=time_outs, final_values=np.full((STEPS, ENVS), np.nan)
        )
