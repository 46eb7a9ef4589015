"""Mini-batches, trajectories and previous states, against plain loops over rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, MissingFieldError, SchemaError, StateError
from mouse_core.errors import RolloutError
from mouse_core.randomness import Key, Purpose
from mouse_core.rollouts import (
    MiniBatch,
    RolloutField,
    RolloutStorage,
    permutation,
    split_and_pad_trajectories,
    unpad_trajectories,
)
from tests.core.rollout_cases import MOTION, motion_transition, trajectories
from tests.raising import assert_raises

STEPS, ENVS = 6, 5


def motion(
    steps: int = STEPS, envs: int = ENVS, *, seed: int = 0, hidden: Any = None, **options: Any
) -> RolloutStorage:
    random = np.random.default_rng(seed)
    storage = RolloutStorage.motion_mimic("rl", envs, steps, **{**MOTION, **options}, seed=seed)
    for _ in range(steps):
        transition = motion_transition(random, envs, **options)
        if hidden:
            transition.hidden_states = hidden(random)
        storage.add_transitions(transition)
    storage.compute_returns(random.normal(size=envs), 0.99, 0.95)
    return storage


def numbered(steps: int, envs: int, dones: Any = None, **options: Any) -> RolloutStorage:
    storage = RolloutStorage(envs, steps, {"number": RolloutField((), "int64")}, **options)
    dones = np.zeros((steps, envs)) if dones is None else dones
    for row in range(steps):
        storage.add_transitions(
            {"number": row * envs + np.arange(envs), "rewards": np.zeros(envs), "dones": dones[row]}
        )
    return storage


@given(
    steps=st.integers(1, 9),
    envs=st.integers(1, 9),
    parts=st.integers(1, 12),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_row_comes_once_in_each_epoch(
    steps: int, envs: int, parts: int, epochs: int, drop_last: bool, seed: int
) -> None:
    storage, rows = numbered(steps, envs, seed=seed), steps * envs
    if parts > rows:
        assert_raises(ConfigError, "num_mini_batches: expected at most", storage.mini_batch_generator, parts)
        return
    batches = list(storage.mini_batch_generator(parts, epochs, drop_last=drop_last))
    assert len(batches) == parts * epochs
    for epoch in range(epochs):
        own = [batch["number"] for batch in batches[epoch * parts : (epoch + 1) * parts]]
        sizes = [len(numbers) for numbers in own]
        assert set(sizes) == {rows // parts} if drop_last else max(sizes) - min(sizes) <= 1
        seen = np.concatenate(own)
        assert len(set(seen)) == len(seen) == (rows // parts * parts if drop_last else rows)
        np.testing.assert_array_equal(seen, permutation(seed, epoch, rows)[: len(seen)])
    for batch in batches:
        np.testing.assert_array_equal(batch.rows, batch["number"])


def test_orders_are_those_of_the_random_words_new_in_every_epoch_and_for_every_seed() -> None:
    orders = [tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(20)]
    assert len(set(orders)) == 60
    assert all(sorted(order) == list(range(50)) for order in orders)
    storage = numbered(5, 10)
    first = [tuple(batch["number"]) for batch in storage.mini_batch_generator(2, 2)]
    again = [tuple(batch["number"]) for batch in storage.mini_batch_generator(2, 2)]
    assert len({*first, *again}) == 8
    words = Key(7, Purpose.ROLLOUTS, 3).bits(6)
    assert list(permutation(7, 3, 6)) == sorted(range(6), key=lambda row: (int(words[row]) >> 3, row))
    assert Purpose.ROLLOUTS == 5
    assert list(permutation(7, 3, 1)) == [0]
    assert list(permutation(0, 0, 12)) == [3, 6, 2, 4, 8, 1, 9, 0, 5, 10, 11, 7]


def test_a_run_that_is_resumed_has_the_same_orders() -> None:
    storage = numbered(3, 4, seed=9)
    for _ in storage.mini_batch_generator(2, 3):
        pass
    state = storage.state_dict()
    assert state == {"seed": 9, "epoch": 3, "num_envs": 4, "num_transitions_per_env": 3}
    expected = [list(batch["number"]) for batch in storage.mini_batch_generator(2, 2)]
    other = numbered(3, 4)
    other.load_state_dict(state)
    assert [list(batch["number"]) for batch in other.mini_batch_generator(2, 2)] == expected
    for wrong in (
        {**state, "num_envs": 5},
        {**state, "epoch": -1},
        {**state, "seed": 1.5},
        {**state, "more": 1},
        {"seed": 9},
        None,
    ):
        assert_raises(StateError, "state: expected", other.load_state_dict, wrong)
    assert other.state_dict() == storage.state_dict()


def test_the_tuple_has_the_known_order() -> None:
    storage = motion(apply_dagger_actions=True, rnd_state_shape=(6,), amp_cfg=AMP)
    flat = {name: storage[name].reshape(STEPS * ENVS, *storage[name].shape[2:]) for name in storage.spec}
    for batch in storage.mini_batch_generator(4, 2):
        references, privileged = "reference_observations", "privileged_reference_observations"
        expected = (
            *("observations", (references, f"{references}_mask")),
            *("privileged_observations", (privileged, f"{privileged}_mask")),
            *("actions", "values", "advantages", "returns", "actions_log_prob", "mu", "sigma", "dagger_actions"),
            *(None, None, "rnd_state"),
        )
        found = tuple(batch)
        assert len(found) == len(batch) == 18
        for value, name in zip(found, expected, strict=False):
            for part, of in zip(value, name, strict=True) if isinstance(name, tuple) else [(value, name)]:
                if of:
                    np.testing.assert_array_equal(part, flat[of][batch.rows], err_msg=of)
        assert found[12] == (None, None)
        assert found[13] is None
        assert found[15] is batch.obs_prev_state
        assert found[16] is batch.ref_obs_prev_state
        assert found[17] is batch.ref_obs_prev_mask
        np.testing.assert_array_equal(batch["rewards"], flat["rewards"][batch.rows])
        np.testing.assert_array_equal(batch.old_mu, flat["mu"][batch.rows])


def test_what_is_not_there_is_none_and_mini_batches_are_copies() -> None:
    nothing = dict.fromkeys(("ref_obs_shape", "privileged_obs_shape", "privileged_ref_obs_shape"))
    storage = RolloutStorage.motion_mimic("rl", 3, 2, **{**MOTION, **nothing})
    random = np.random.default_rng(0)
    for _ in range(2):
        given_ = {name: value for name, value in motion_transition(random, 3) if name in storage.spec}
        storage.add_transitions(given_)
    storage.compute_returns(np.zeros(3), 0.9, 0.9)
    batch = next(storage.mini_batch_generator(1))
    found = tuple(batch)
    assert found[2] is found[0]
    assert [place for place, value in enumerate(found) if value is None] == [1, 3, 11, 13, 14, 15, 16, 17]
    assert batch.obs_prev_mask is None
    assert found[12] == (None, None)
    recurrent = tuple(next(storage.recurrent_mini_batch_generator(1)))
    assert [place for place, value in enumerate(recurrent) if value is None] == [1, 3, 11, 14, 15, 16, 17]
    storage = motion()
    batch = next(storage.mini_batch_generator(2))
    assert batch.critic_ref_obs.shape == (15, 2, 2)
    fields = {name: values for name, values in batch.fields.items() if "privileged" not in name}
    plain = MiniBatch(fields)
    assert tuple(plain)[3] == (plain.ref_obs, plain.ref_mask)
    storage = motion()
    batch = next(storage.mini_batch_generator(1))
    before = batch.obs.copy()
    storage.observations[:] = 7.0
    np.testing.assert_array_equal(batch.obs, before)


def obs_state(obs: np.ndarray) -> np.ndarray:
    return obs[..., :2] * 2.0 + 1.0


def ref_state(reference: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    obs, mask = reference
    return obs[..., 1:] - 1.0, mask & (obs[..., 0] > -0.5)


AMP = {"amp_obs_extractor": obs_state, "amp_ref_obs_extractor": ref_state}


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_pairs_never_cross_an_episode(steps: int) -> None:
    storage = motion(steps, amp_cfg=AMP)
    flats = list(storage.mini_batch_generator(3, 2))
    recurrent = list(storage.recurrent_mini_batch_generator(2, 1))
    seen = 0
    for batch in flats + recurrent:
        assert batch.obs_prev_state.shape == (*batch.rows.shape, 2)
        for place, number in np.ndenumerate(batch.rows):
            row, env = divmod(int(number), ENVS)
            there = row > 0 and not storage.dones[row - 1, env, 0]
            seen += there
            assert batch.obs_prev_mask[place] == there
            if not there:
                assert not batch.ref_obs_prev_mask[place]
                assert not batch.obs_prev_state[place].any()
                assert not batch.ref_obs_prev_state[place].any()
                continue
            np.testing.assert_array_equal(batch.obs_prev_state[place], obs_state(storage.observations[row - 1, env]))
            reference = storage.reference_observations[row - 1, env], storage.reference_observations_mask[row - 1, env]
            state, mask = ref_state(reference)
            np.testing.assert_array_equal(batch.ref_obs_prev_state[place], state)
            assert batch.ref_obs_prev_mask[place] == mask
    assert steps == 1 or seen


def test_extractors_of_other_kinds_and_those_that_lose_rows() -> None:
    class Config:
        amp_obs_extractor = staticmethod(obs_state)

        @staticmethod
        def amp_ref_obs_extractor(reference: Any) -> Any:
            return reference[0]

    batch = next(motion(amp_cfg=Config).mini_batch_generator(1))
    expected = next(motion(amp_cfg=AMP | {"amp_ref_obs_extractor": lambda pair: pair}).mini_batch_generator(1))
    np.testing.assert_array_equal(batch.ref_obs_prev_mask, expected.ref_obs_prev_mask)
    np.testing.assert_array_equal(batch.ref_obs_prev_state, expected.ref_obs_prev_state)
    columns = motion(amp_cfg=AMP | {"amp_ref_obs_extractor": lambda pair: (pair[0], pair[1][:, None])})
    mask = next(columns.mini_batch_generator(1)).ref_obs_prev_mask
    np.testing.assert_array_equal(mask[:, 0], expected.ref_obs_prev_mask)
    lost = {"amp_obs_extractor": lambda obs: obs[:3], "amp_ref_obs_extractor": ref_state}
    with pytest.raises(SchemaError, match=r"amp_obs_extractor: expected an array of 30 rows, found shape \[3, 5\]"):
        motion(amp_cfg=lost).mini_batch_generator(1)
    with pytest.raises(SchemaError, match="amp_ref_obs_extractor: expected an array of 30 rows"):
        motion(amp_cfg=AMP | {"amp_ref_obs_extractor": lambda pair: pair[0].sum()}).mini_batch_generator(1)


@pytest.mark.parametrize("length", [1, 2, 4, 20])
def test_histories_never_cross_an_episode(length: int) -> None:
    storage = motion(9)
    for batch in storage.mini_batch_generator(
        3, 1, histories={"observations": length, "reference_observations": length, "rewards": 2}
    ):
        frames, mask = batch.histories["observations"]
        _, available = batch.histories["reference_observations"]
        assert frames.shape == (15, length, 5)
        assert batch.histories["rewards"][0].shape == (15, 2, 1)
        np.testing.assert_array_equal(frames[:, -1], batch.obs)
        assert mask[:, -1].all()
        for place, number in enumerate(batch.rows):
            row, env = divmod(int(number), ENVS)
            first = max([t + 1 for t in range(row) if storage.dones[t, env, 0]], default=0)
            for back in range(length):
                there = row - back >= first
                assert mask[place, length - 1 - back] == there
                expected = storage.observations[row - back, env] if there else 0.0
                np.testing.assert_array_equal(frames[place, length - 1 - back], expected * np.ones(5))
                expected_mask = there and storage.reference_observations_mask[row - back, env]
                assert available[place, length - 1 - back] == expected_mask


@given(
    steps=st.integers(1, 8), envs=st.integers(1, 5), ends=st.sampled_from([0.0, 0.2, 0.7, 1.0]), seed=st.integers(0, 99)
)
def test_split_and_pad_and_back(steps: int, envs: int, ends: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    dones = (random.random((steps, envs, 1)) < ends).astype(np.uint8)
    values = random.normal(size=(steps, envs, 3))
    padded, masks = split_and_pad_trajectories(values, dones)
    expected = trajectories(dones)
    assert padded.shape == (steps, len(expected), 3)
    assert masks.dtype == bool
    for place, (env, first, last) in enumerate(expected):
        np.testing.assert_array_equal(padded[: last - first, place], values[first:last, env])
        assert not padded[last - first :, place].any()
        np.testing.assert_array_equal(masks[:, place], np.arange(steps) < last - first)
    np.testing.assert_array_equal(unpad_trajectories(padded, masks), values)
    np.testing.assert_array_equal(unpad_trajectories(padded, masks, num_envs=envs), values)

    more, more_masks = split_and_pad_trajectories(values, dones[..., 0], num_trajectories=len(expected) + 2)
    np.testing.assert_array_equal(more[:, :-2], padded)
    assert not more_masks[:, -2:].any()
    assert not more[:, -2:].any()
    np.testing.assert_array_equal(unpad_trajectories(more, more_masks), values)


def test_no_trajectories_of_wrong_shapes() -> None:
    values, dones = np.zeros((4, 3, 2)), np.zeros((4, 3))
    assert_raises(SchemaError, "values: expected", split_and_pad_trajectories, values, dones[:3])
    assert_raises(SchemaError, r"dones: expected \[T, N\]", split_and_pad_trajectories, values, np.zeros((4, 3, 2)))
    with pytest.raises(SchemaError, match="num_trajectories: expected at least 3, found 2"):
        split_and_pad_trajectories(values, dones, num_trajectories=2)
    padded, masks = split_and_pad_trajectories(values, dones)
    assert_raises(SchemaError, "padded: expected", unpad_trajectories, padded[:, 1:], masks)
    with pytest.raises(SchemaError, match="masks: expected a multiple of 4 rows"):
        unpad_trajectories(padded, masks & (np.arange(4)[:, None] < 3))


PADDED = [
    *("observations", "reference_observations", "reference_observations_mask", "privileged_observations"),
    *("privileged_reference_observations", "privileged_reference_observations_mask", "rnd_state"),
]


def gru(random: np.random.Generator) -> Any:
    return random.normal(size=(2, ENVS, 3)), random.normal(size=(1, ENVS, 4))


def lstm(random: np.random.Generator) -> Any:
    return tuple((random.normal(size=(2, ENVS, 3)), random.normal(size=(2, ENVS, 3))) for _ in range(2))


def mixed(random: np.random.Generator) -> Any:
    return [random.normal(size=(ENVS, 3)), {"c": random.normal(size=(2, ENVS, 1)), "h": [random.normal(size=ENVS)]}]


HIDDEN = {
    "gru": gru,
    "lstm": lstm,
    "mixed": mixed,
    "actor only": lambda random: (random.normal(size=(1, ENVS, 3)), None),
}


def leaves(tree: Any) -> list[np.ndarray]:
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, list | tuple) else [tree]


@pytest.mark.parametrize(
    ("hidden", "parts", "shuffle"),
    [("gru", 1, True), ("lstm", 2, False), ("mixed", 2, True), ("actor only", 5, True)],
)
def test_recurrent_mini_batches(parts: int, shuffle: bool, hidden: str) -> None:
    more: dict[str, Any] = {"apply_dagger_actions": True, "rnd_state_shape": (6,), "seed": parts}
    storage = motion(hidden=HIDDEN[hidden], amp_cfg=AMP, **more)
    seen: list[int] = []
    for batch in storage.recurrent_mini_batch_generator(parts, 2, shuffle=shuffle):
        envs = [int(env) for env in batch.rows[0]]
        seen += envs
        np.testing.assert_array_equal(batch.rows, np.arange(STEPS)[:, None] * ENVS + envs)
        for name in ("actions", "values", "advantages", "returns", "actions_log_prob", "mu", "sigma", "dagger_actions"):
            np.testing.assert_array_equal(batch[name], storage[name][:, envs], err_msg=name)
        own = [(envs[env], first, last) for env, first, last in trajectories(storage.dones[:, envs])]
        assert batch.masks.shape == (STEPS, len(own))
        for name in PADDED:
            assert batch[name].shape[:2] == batch.masks.shape
            for place, (env, first, last) in enumerate(own):
                np.testing.assert_array_equal(batch[name][: last - first, place], storage[name][first:last, env])
                assert not batch[name][last - first :, place].any()
        for place, (_, first, last) in enumerate(own):
            np.testing.assert_array_equal(batch.masks[:, place], np.arange(STEPS) < last - first)
        found, stored = leaves(batch.hidden_states), leaves(storage.hidden_states)
        assert len(found) == len(stored)
        for state, array in zip(found, stored, strict=True):
            env_axis = 1 if array.ndim > 3 else 0
            expected = [np.take(array[first], env, axis=env_axis) for env, first, _ in own]
            np.testing.assert_array_equal(state, np.stack(expected, axis=env_axis))
        assert tuple(batch)[12] is batch.hidden_states
        assert tuple(batch)[13] is batch.masks
        np.testing.assert_array_equal(
            unpad_trajectories(batch.obs, batch.masks), storage.observations[:, envs], strict=True
        )
    for epoch in (seen[:ENVS], seen[ENVS:]):
        assert sorted(epoch) == list(range(ENVS))
        assert shuffle or epoch == list(range(ENVS))


def test_hidden_states_keep_their_structure() -> None:
    storage = motion(hidden=lstm)
    actor, critic = storage.hidden_states
    assert isinstance(actor, tuple)
    assert actor[0].shape == (STEPS, 2, ENVS, 3)
    assert len(critic) == 2
    batch = next(storage.mini_batch_generator(2))
    row, env = divmod(int(batch.rows[3]), ENVS)
    np.testing.assert_array_equal(batch.hidden_states[1][0][:, 3], critic[0][row][:, env])
    kept = actor[0]
    storage.clear()
    assert storage.hidden_states is None
    random = np.random.default_rng(0)
    storage.add_transitions(row_with(random, hidden_states=lstm(random)))
    assert storage.hidden_states[0][0] is kept
    with pytest.raises(SchemaError, match=r"hidden_states\[0\]: expected an array as in the earlier rows"):
        storage.add_transitions(row_with(random, hidden_states=gru(random)))
    with pytest.raises(SchemaError, match="found none in row 1"):
        storage.add_transitions(row_with(random, hidden_states=(None, None)))
    storage.clear()
    storage.add_transitions(row_with(random, hidden_states=gru(random)))
    assert storage.hidden_states[0].shape == (STEPS, 2, ENVS, 3)


@pytest.mark.parametrize("empty", [1, 2])
@pytest.mark.parametrize("reused", [False, True])
def test_no_hidden_states_before_the_first_step(empty: int, reused: bool) -> None:
    """A policy that has not acted yet has none, and says (None, None); they are what it begins with: zeros."""
    storage = motion(hidden=lstm)
    if not reused:
        storage = RolloutStorage.motion_mimic("rl", ENVS, STEPS, **MOTION)
    storage.clear()
    random = np.random.default_rng(3)
    given = [(None, None)] * empty + [lstm(random) for _ in range(STEPS - empty)]
    for number, states in enumerate(given):
        assert (storage.hidden_states is None) == (number <= empty)
        storage.add_transitions(row_with(random, hidden_states=states))
    for place, part in ((0, 0), (0, 1), (1, 0), (1, 1)):
        found = storage.hidden_states[place][part]
        assert not found[:empty].any()
        np.testing.assert_array_equal(found[empty:], [states[place][part] for states in given[empty:]])


def test_a_critic_may_have_its_first_state_later_and_a_preset_no_reference_motion() -> None:
    random = np.random.default_rng(3)
    storage = RolloutStorage.motion_mimic("rl", ENVS, STEPS, **MOTION)
    states = lstm(random)
    storage.add_transitions(row_with(random, hidden_states=(states[0], None)))
    storage.add_transitions(row_with(random, hidden_states=states))
    assert storage.hidden_states is not None
    assert not storage.hidden_states[1][0][0].any()
    np.testing.assert_array_equal(storage.hidden_states[1][0][1], states[1][0])
    with pytest.raises(
        MissingFieldError, match=r"hidden_states\[1\]: expected a value in every row, found none in row 2"
    ):
        storage.add_transitions(row_with(random, hidden_states=(states[0], None)))
    assert storage.step == 2
    storage = RolloutStorage.motion_mimic("rl", 3, 2, (5,), actions_shape=(4,))
    assert storage.spec["observations"].shape == (5,)
    assert "reference_observations" not in storage.spec
    with pytest.raises(ConfigError, match="actions_shape: expected the shape of actions, found None"):
        RolloutStorage.motion_mimic("rl", 3, 2, (5,))


def row_with(random: np.random.Generator, **more: Any) -> dict[str, Any]:
    return dict(motion_transition(random, ENVS)) | more


@pytest.mark.parametrize("drop_last", [False, True])
def test_environments_that_remain(drop_last: bool) -> None:
    batches = list(motion().recurrent_mini_batch_generator(2, 1, drop_last=drop_last))
    assert [batch.rows.shape[1] for batch in batches] == ([2, 2] if drop_last else [3, 2])


@pytest.mark.parametrize("privileged_references", [True, False])
@pytest.mark.parametrize("references", [True, False])
@pytest.mark.parametrize("privileged", [True, False])
def test_the_generator_for_distillation(privileged: bool, references: bool, privileged_references: bool) -> None:
    shapes = {
        **MOTION,
        "ref_obs_shape": MOTION["ref_obs_shape"] if references else None,
        "privileged_obs_shape": MOTION["privileged_obs_shape"] if privileged else None,
        "privileged_ref_obs_shape": MOTION["privileged_ref_obs_shape"] if privileged_references else None,
    }
    storage = RolloutStorage.motion_mimic("distillation", ENVS, STEPS, **shapes)
    random = np.random.default_rng(0)
    assert_raises(RolloutError, "generator: expected 6 rows, found 0", storage.generator)
    for _ in range(STEPS):
        made = motion_transition(random, ENVS, training_type="distillation")
        storage.add_transitions({name: value for name, value in made if name in storage.spec})
    rows = list(storage.generator())
    assert len(rows) == STEPS
    for row, found in enumerate(rows):
        names = ["observations", "privileged_observations" if privileged else "observations"]
        names += ["reference_observations", "privileged_reference_observations"]
        names += ["actions", "privileged_actions", "dones"]
        there = (True, True, references, references and privileged_references, True, True, True)
        for name, values, expected in zip(names, found, there, strict=True):
            if not expected:
                assert values is None, name
            elif "reference" in name:
                np.testing.assert_array_equal(values[0], storage[name][row], name)
                np.testing.assert_array_equal(values[1], storage[f"{name}_mask"][row], name)
            else:
                np.testing.assert_array_equal(values, storage[name][row], name)
    for reader in (storage.mini_batch_generator, storage.recurrent_mini_batch_generator):
        assert_raises(ConfigError, "expected a storage for reinforcement learning", reader, 1)
    assert_raises(ConfigError, "generator: expected a storage for distillation", motion().generator)


def test_reading_out_of_turn() -> None:
    storage = motion()
    for reader in (storage.mini_batch_generator, storage.recurrent_mini_batch_generator):
        for number in (0, -1, 1.5, True):
            assert_raises(ConfigError, "num_mini_batches: expected an integer of at least 1", reader, number)
            assert_raises(ConfigError, "num_epochs: expected an integer of at least 1", reader, 1, number)
        assert_raises(ConfigError, "num_mini_batches: expected at most", reader, 1000)
        batches = reader(2)
        next(batches)
        storage.compute_returns(np.zeros(ENVS), 0.9, 0.9)
        assert_raises(RolloutError, "found a changed rollout", next, batches)
    with pytest.raises(ConfigError, match=r"histories: expected fields among .*, found 'nonsense'"):
        storage.mini_batch_generator(1, histories={"nonsense": 2})
    with pytest.raises(ConfigError, match=r"histories\['observations'\]: expected an integer of at least 1"):
        storage.mini_batch_generator(1, histories={"observations": 0})
    storage.clear()
    assert_raises(RolloutError, "mini_batch_generator: expected 6 rows, found 0", storage.mini_batch_generator, 1)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        storage.add_transitions(motion_transition(random, ENVS))
    assert_raises(RolloutError, "expected returns, found none for these rows", storage.mini_batch_generator, 1)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_mini_batch_is_a_mapping_of_the_fields_there_are(recurrent: bool) -> None:
    storage = motion()
    generator = storage.recurrent_mini_batch_generator if recurrent else storage.mini_batch_generator
    batch = next(generator(1, 1))
    names = list(batch.fields)
    assert list(batch.keys()) == list(dict(batch)) == list({**batch}) == names
    assert [id(values) for values in batch.values()] == [id(batch[name]) for name in names]
    assert "observations" in batch
    assert "obs" not in batch
    assert batch.get("nothing") is None
    assert all(dict(batch.items())[name] is batch[name] for name in names)
    assert batch == batch
    assert batch in {batch}
    with pytest.raises(MissingFieldError, match="found 'observation'; did you mean 'observations'"):
        batch["observation"]
    with pytest.raises(KeyError, match=r"found 'obs'; batch\.obs is an attribute"):
        batch["obs"]
