"""RLDS to trajectories, on the cases that the users of TF-Agents know, and on those that it lets pass."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mouse_core.errors import EpisodeError, MouseError, SchemaError
from mouse_core.formats.rlds import (
    Trajectory,
    convert_rlds_to_trajectories,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
    to_tensor_specs,
)

Step = dict[str, Any]


def step(
    value: float, *, first: bool = False, last: bool = False, terminal: bool = False, nested: bool = False
) -> Step:
    observation: Any = np.array([value, -value], np.float32)
    observation = {"eye": observation, "ear": np.int64(value)} if nested else observation
    made = {"observation": observation, "action": np.int64(value + 100), "reward": np.float32(value / 2)}
    return {**made, "discount": np.float32(0.5), "is_first": first, "is_last": last, "is_terminal": terminal}


def episode(start: int, length: int, *, terminal: bool = True, nested: bool = False) -> dict[str, list[Step]]:
    steps = [step(start + index, first=index == 0, nested=nested) for index in range(length)]
    steps[-1].update(is_last=True, is_terminal=terminal)
    return {"steps": steps}


COMPLETE, TRUNCATED, SINGLE = episode(0, 3), episode(10, 3, terminal=False), episode(20, 1)
SINGLE_TRUNCATED = episode(30, 1, terminal=False)


def types(data: Any) -> list[tuple[int, int]]:
    return [(int(one.step_type), int(one.next_step_type)) for one in convert_rlds_to_trajectories(data)]


@pytest.mark.parametrize(
    ("data", "expected", "discounts"),
    [
        ([COMPLETE], [(0, 1), (1, 2), (2, 0)], [0.5, 0.5, 0.0]),
        ([TRUNCATED], [(0, 1), (1, 2), (2, 0)], [0.5, 0.5, 0.5]),
        ([SINGLE], [(2, 2)], [0.0]),
        ([SINGLE_TRUNCATED], [(2, 2)], [0.5]),
        ([episode(0, 2)], [(0, 2), (2, 0)], [0.5, 0.0]),
        (
            [COMPLETE, SINGLE, SINGLE_TRUNCATED, TRUNCATED],
            [(0, 1), (1, 2), (2, 0), (2, 2), (2, 2), (0, 1), (1, 2), (2, 0)],
            [0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5],
        ),
    ],
)
def test_types_and_discounts(data: Any, expected: Any, discounts: Any) -> None:
    assert types(data) == expected
    pairs = list(convert_rlds_to_trajectories(data))
    assert [float(pair.discount) for pair in pairs] == discounts
    for pair, one in zip(pairs, [one for item in data for one in item["steps"]], strict=True):
        assert isinstance(pair, Trajectory)
        assert np.array_equal(pair.observation, one["observation"])
        assert (pair.action, pair.reward, pair.policy_info) == (one["action"], one["reward"], ())
        assert (pair.step_type.dtype, pair.discount.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("form", ["stacked", "generators", "steps"])
def test_episodes_in_other_forms(form: str) -> None:
    data = [COMPLETE, SINGLE, TRUNCATED]

    def stacked(one: Any) -> Any:
        return {"steps": {key: np.stack([item[key] for item in one["steps"]]) for key in one["steps"][0]}}

    def generator() -> Iterator[Any]:
        for one in data:
            yield {"steps": iter(one["steps"])}

    given: Any = {"stacked": map(stacked, data), "steps": [one["steps"] for one in data], "generators": generator()}
    assert types(given[form]) == types(data)


def test_policy_info_sees_both_steps() -> None:
    seen = []

    def info(now: Step, following: Step) -> Any:
        seen.append((float(now["observation"][0]), float(following["observation"][0]), bool(following["is_first"])))
        return {"sum": now["reward"] + following["reward"], "extra": now["extra"]}

    data = [{"steps": [{**one, "extra": True} for one in item["steps"]]} for item in (COMPLETE, SINGLE)]
    pairs = list(convert_rlds_to_trajectories(data, info))
    assert all(pair.policy_info["extra"] for pair in pairs)
    assert seen == [(0, 1, False), (1, 2, False), (2, 20, True), (20, 0, True)]
    assert [float(pair.policy_info["sum"]) for pair in pairs] == [0.5, 1.5, 11.0, 10.0]


SPEC = create_trajectory_data_spec([COMPLETE])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"action": SPEC.reward}, r"observer: action: expected float32 \[\], found int64 \[\]"),
    ({"observation": SPEC.observation.replace(shape=(3,))}, r"observation: expected float32 \[3\], found float32"),
    ({"observation": {"eye": SPEC.observation}}, r"expected \['observation/eye'\], found \['observation'\]"),
    ({"policy_info": {"sum": SPEC.reward}}, r"expected \['policy_info/sum'\], found nothing"),
]


@pytest.mark.parametrize(
    ("changes", "at", "message"),
    [
        ({1: {"is_terminal": True}}, 1, "terminal"),
        ({3: {"is_last": False, "is_terminal": False}}, 3, "is_last not set"),  # mid before first
        ({1: {"is_last": True}}, 1, "is_first not set"),  # last before mid
        ({0: {"is_last": True}}, 0, "is_first not set"),
        ({1: {"is_first": True}}, 0, "is_last not set"),
        ({2: {"is_first": True}}, 1, "is_last not set"),
    ],
)
def test_incorrect_episodes(changes: dict[int, Any], at: int, message: str) -> None:
    second = episode(10, 4)
    for place, flags in changes.items():
        second["steps"][place].update(flags)
    data = [COMPLETE, second, TRUNCATED]
    taken: list[Trajectory] = []
    with pytest.raises(EpisodeError, match=f"^episode 1, step {at}: .*{message}") as caught:
        push_rlds_to_reverb(data, taken.append)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.episode, caught.value.step) == (1, at)
    assert [int(one.action) for one in taken] == [100, 101, 102, *range(110, 110 + at)]
    given: list[int] = []
    with pytest.raises(EpisodeError):
        given.extend(int(one.action) for one in convert_rlds_to_trajectories(data))
    assert given == [int(one.action) for one in taken]


def test_the_last_episode_must_end() -> None:
    with pytest.raises(EpisodeError, match=r"^episode 0, step 1: expected is_last, because the next step has is_first"):
        list(convert_rlds_to_trajectories([{"steps": COMPLETE["steps"][:2]}]))


@pytest.mark.parametrize("function", [create_trajectory_data_spec, convert_rlds_to_trajectories])
def test_nothing_to_convert(function: Any) -> None:
    for empty in ([], [{"steps": []}], iter(())):
        with pytest.raises(ValueError, match="expected episodes with steps, found none"):
            function(empty)
        with pytest.raises(ValueError, match="found none"):
            push_rlds_to_reverb(empty, lambda one: None)
    lacking = [{"steps": [{key: value for key, value in step(0).items() if key not in ("reward", "is_last")}]}]
    with pytest.raises(ValueError, match=r"found no \['reward', 'is_last'\]") as caught:
        function(lacking)
    assert isinstance(caught.value, MouseError)
    with pytest.raises(ValueError, match=r"iterable of RLDS episodes"):
        function(7)
    with pytest.raises(ValueError, match=r"episode 0: expected an iterable of steps.* found features of a single step"):
        function(COMPLETE["steps"])


def test_the_spec() -> None:
    spec = create_trajectory_data_spec([episode(0, 2, nested=True)])
    assert isinstance(spec, Trajectory)
    assert (spec.step_type.dtype, spec.step_type.shape) == (np.int32, ())
    assert (spec.observation["eye"].dtype, spec.observation["eye"].shape) == (np.float32, (2,))
    assert (spec.observation["ear"].dtype, spec.action.dtype, spec.reward.dtype) == (np.int64, np.int64, np.float32)
    assert spec.policy_info == ()


class Observer:
    def __init__(self, spec: Any) -> None:
        self.data_spec = spec
        self.taken: list[Trajectory] = []

    def __call__(self, one: Trajectory) -> None:
        self.taken.append(one)


def test_the_observers_spec_is_compared() -> None:
    data = [COMPLETE, SINGLE]
    fitting = Observer(SPEC)
    assert push_rlds_to_reverb(iter(data), fitting) == len(fitting.taken) == 4
    for wrong, message in WRONG:
        observer = Observer(SPEC._replace(**wrong))
        with pytest.raises(ValueError, match=message):
            push_rlds_to_reverb(data, observer)
        assert observer.taken == []

    with pytest.raises(RuntimeError, match="full"):
        push_rlds_to_reverb(data, Mock(spec=[], side_effect=RuntimeError("full")))
    with_info = Observer(SPEC._replace(policy_info={"sum": SPEC.reward}))
    asked: list[tuple[Any, Any]] = []

    def info(now: Any, following: Any) -> dict[str, Any]:
        asked.append((now["action"], following["action"]))
        return {"sum": now["reward"]}

    assert push_rlds_to_reverb(data, with_info, info) == len(asked) == 4  # comparing asks for nothing more


def test_replay_buffers_take_trajectories() -> None:
    from mouse_core.replay import ArrayStorage, ReplayBuffer

    buffer = ReplayBuffer(ArrayStorage(100))
    data = [episode(0, 3, nested=True), episode(20, 1, nested=True)]
    assert push_rlds_to_reverb(data, buffer.observer()) == len(buffer) == 4
    rows = buffer[:]
    assert rows["step_type"].tolist() == [0, 1, 2, 2]
    assert rows["observation"]["ear"].tolist() == [0, 1, 2, 20]
    assert rows["discount"].tolist() == [0.5, 0.5, 0.0, 0.0]


class Shape(tuple):  # type: ignore[type-arg]
    """A shape as TensorFlow's specs have it, sizes that are not known among them."""

    rank = property(len)


@dataclass(frozen=True)
class Spec:
    dtype: Any
    shape: Any


class ReverbStandIn:
    """Writes items of two steps, none over the end of an episode; `make test-reverb` has TF-Agents' own observers."""

    def __init__(self, signature: Any) -> None:
        self._signature = signature
        self.asked = 0
        self.cached: list[Trajectory] = []
        self.items: list[list[Trajectory]] = []

    def get_table_signature(self) -> Any:
        self.asked += 1
        return self._signature

    def __call__(self, one: Trajectory) -> None:
        self.cached.append(one)
        if len(self.cached) >= 2:
            self.items.append(self.cached[-2:])
        if one.is_boundary():
            self.cached.clear()


def signature_of(data: Any, **other: Any) -> Any:
    def outer(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: outer(item) for name, item in value.items()}
        return value if isinstance(value, tuple) else Spec(value.dtype, Shape((None, *value.shape)))

    return Trajectory(*map(outer, create_trajectory_data_spec(data).replace(**other)))


@pytest.mark.parametrize("nested", [False, True])
def test_an_observer_of_tf_agents_is_asked_for_its_signature(nested: bool) -> None:
    data = [episode(0, 3, nested=nested), episode(10, 1, nested=nested), episode(20, 2, nested=nested)]
    observer = ReverbStandIn(signature_of(data))
    assert push_rlds_to_reverb(data, observer) == 6
    assert observer.asked == 1
    assert [[int(one.action) - 100 for one in item] for item in observer.items] == [[0, 1], [1, 2], [20, 21]]
    free = ReverbStandIn(None)
    assert push_rlds_to_reverb(data, free) == 6
    assert len(free.items) == 3


def test_what_a_signature_does_not_hold_is_not_pushed() -> None:
    for wrong, message in WRONG:
        observer = ReverbStandIn(signature_of([COMPLETE], **wrong))
        with pytest.raises(SchemaError, match=message):
            push_rlds_to_reverb([COMPLETE], observer)
        assert not observer.cached
    observer = ReverbStandIn(SPEC)
    with pytest.raises(SchemaError, match=r"step_type: expected a table signature whose .* axis of the sequence"):
        push_rlds_to_reverb([COMPLETE], observer)


def test_a_later_trajectory_is_compared_too() -> None:
    other = episode(10, 3)
    other["steps"][1]["reward"] = np.float64(3)
    observer = ReverbStandIn(signature_of([COMPLETE]))
    with pytest.raises(SchemaError, match=r"reward: expected float32 \[\], found float64 \[\] in trajectory 4"):
        push_rlds_to_reverb([COMPLETE, other], observer)
    assert [int(one.action) for one in observer.cached] == [110]
    assert len(observer.items) == 2


def test_a_size_that_is_not_known_may_be_any() -> None:
    signature = signature_of([COMPLETE])
    for shape in (Shape((None, None)), type("Unknown", (), {"rank": None})()):
        observer = ReverbStandIn(signature.replace(observation=Spec(np.float32, shape)))
        assert push_rlds_to_reverb([COMPLETE], observer) == 3


def test_a_policys_info_goes_into_a_table_that_knows_of_none() -> None:
    """As TF-Agents pushes it; a table that expects some gets what it expects, or nothing."""
    data = [COMPLETE]
    observer = ReverbStandIn(signature_of(data))
    assert push_rlds_to_reverb(data, observer, lambda now, _: {"sum": now["reward"]}) == 3
    assert [float(one.policy_info["sum"]) for one in observer.items[0]] == [0.0, 0.5]
    info = {"sum": create_trajectory_data_spec(data).action}
    strict = ReverbStandIn(signature_of(data, policy_info=info))
    with pytest.raises(SchemaError, match=r"policy_info/sum: expected int64 \[\], found float32 \[\]"):
        push_rlds_to_reverb(data, strict, lambda now, _: {"sum": now["reward"]})
    assert push_rlds_to_reverb(data, strict, lambda now, _: {"sum": now["action"]}) == 3


def test_where_in_its_episode_a_trajectory_is() -> None:
    found = list(convert_rlds_to_trajectories([episode(0, 4), SINGLE]))
    asked = [(one.is_first(), one.is_mid(), one.is_last(), one.is_boundary()) for one in found]
    assert [tuple(map(bool, one)) for one in asked] == [
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
        (False, False, True, True),
    ]
    stacked = Trajectory(*([np.stack([one[i] for one in found]) for i in range(3)]), (), *(np.zeros(5),) * 3)
    assert stacked.is_first().tolist() == [True, False, False, False, False]
    assert found[0].replace(action=7).action == 7


def test_tensor_specs_need_tensorflow() -> None:
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("TensorFlow is installed")
    with pytest.raises(ImportError, match="to_tensor_specs needs TensorFlow: pip install tensorflow"):
        to_tensor_specs(create_trajectory_data_spec([COMPLETE]))
