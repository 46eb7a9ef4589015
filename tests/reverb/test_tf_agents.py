"""RLDS into a Reverb server that runs, through TF-Agents' own observers and replay buffer.

Errors and their messages are tested with a stand-in of an observer in tests/core/formats/test_trajectories.py.
`make test-reverb` makes the environment in which these packages run; elsewhere the tests are skipped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mouse_core.errors import SchemaError
from mouse_core.formats import rlds

reverb = pytest.importorskip("reverb")
tf = pytest.importorskip("tensorflow")
pytest.importorskip("tf_agents")

from tf_agents.replay_buffers import reverb_replay_buffer, reverb_utils, rlds_to_reverb  # noqa: E402
from tf_agents.specs import tensor_spec  # noqa: E402
from tf_agents.trajectories import trajectory  # noqa: E402

pytestmark = pytest.mark.reverb

TABLE = "table"
SPEC = trajectory.Trajectory(
    tensor_spec.TensorSpec((), tf.int32, "step_type"),
    tensor_spec.TensorSpec((2,), tf.float32),
    tensor_spec.TensorSpec((1,), tf.float32),
    (),
    tensor_spec.TensorSpec((), tf.int32, "step_type"),
    tensor_spec.TensorSpec((), tf.float32),
    tensor_spec.BoundedTensorSpec((), tf.float32, [0.0], [1.0], "discount"),
)

SIGNATURE = tensor_spec.add_outer_dim(SPEC)


def steps(flags: str, *, width: int = 2, **more: Any) -> dict[str, Any]:
    """Stacked steps, one for each letter: first, mid, last, a last one that is terminal too, or o, first and last."""
    n = len(flags)
    numbers = np.arange(1, n + 1, dtype=np.float32)
    return {
        "observation": np.stack([numbers + place for place in range(width)], axis=1),
        "action": 10 * numbers[:, None] + 1,
        "reward": numbers,
        "discount": np.ones(n, np.float32),
        "is_first": np.array([flag in "fo" for flag in flags]),
        "is_last": np.array([flag in "lLo" for flag in flags]),
        "is_terminal": np.array([flag == "L" for flag in flags]),
        **{name: np.array(values) for name, values in more.items()},
    }


# By name: the steps of the episodes, the types of the steps in trajectories, and their discounts.
VALID: dict[str, tuple[list[dict[str, Any]], list[tuple[int, int]], list[float]]] = {
    "complete": ([steps("fmL")], [(0, 1), (1, 2), (2, 0)], [1, 1, 0]),
    "truncated": ([steps("fml")], [(0, 1), (1, 2), (2, 0)], [1, 1, 1]),
    "single step": ([steps("o")], [(2, 2)], [1]),
    "extra feature": ([steps("o", extra=[True])], [(2, 2)], [1]),
    "several": (
        [steps("fmL"), steps("o"), steps("fml")],
        [(0, 1), (1, 2), (2, 0), (2, 2), (0, 1), (1, 2), (2, 0)],
        [1, 1, 0, 1, 1, 1, 1],
    ),
}


def as_lists(episodes: list[dict[str, Any]]) -> Any:
    return [{"steps": one} for one in episodes]


def as_datasets(episodes: list[dict[str, Any]]) -> Any:
    """As TF-Agents wants them: a tf.data.Dataset of episodes whose steps are one, too."""
    return tf.data.Dataset.from_tensor_slices({"steps": [tf.data.Dataset.from_tensor_slices(one) for one in episodes]})


FORMS = pytest.mark.parametrize("form", [as_lists, as_datasets], ids=["lists", "tf.data"])
NAMES = pytest.mark.parametrize("name", VALID)
Form = Callable[[list[dict[str, Any]]], Any]


class Live:
    """A server with one table, and an observer that writes to it."""

    def __init__(self, signature: Any, kind: Any = reverb_utils.ReverbAddTrajectoryObserver, **options: Any) -> None:
        self.server = reverb.Server([self.table(signature)])
        self.client = reverb.Client(f"localhost:{self.server.port}")
        whole = kind is reverb_utils.ReverbAddEpisodeObserver
        length = {"max_sequence_length": 10} if whole else {"sequence_length": 2}
        self.observer = kind(self.client, TABLE, **{**length, **options})

    @staticmethod
    def table(signature: Any) -> Any:
        return reverb.Table(
            TABLE,
            sampler=reverb.selectors.Fifo(),
            remover=reverb.selectors.Fifo(),
            max_size=1000,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )

    def items(self) -> int:
        self.observer.flush()
        return int(self.client.server_info()[TABLE].current_size)

    def taken(self, count: int) -> list[list[Any]]:
        """The first items, as they lie there: columns by columns."""
        self.observer.flush()
        return [list(next(iter(self.client.sample(TABLE, 1, emit_timesteps=False))).data) for _ in range(count)]

    def stop(self) -> None:
        self.observer.close()
        self.server.stop()


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def make(signature: Any = SIGNATURE, *args: Any, **options: Any) -> Live:
        made.append(Live(signature, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def info(step: Any, following: Any) -> dict[str, Any]:
    return {"action": step["action"]}


@NAMES
@FORMS
def test_the_spec_is_that_of_tf_agents(name: str, form: Form) -> None:
    data = form(VALID[name][0])
    spec = rlds.to_tensor_specs(rlds.create_trajectory_data_spec(data))
    assert spec == SPEC
    assert isinstance(spec, trajectory.Trajectory)
    assert spec == rlds_to_reverb.create_trajectory_data_spec(as_datasets(VALID[name][0]))
    outer = rlds.to_tensor_specs(rlds.create_trajectory_data_spec(data), outer_dims=(None,))
    assert outer == SIGNATURE


def test_specs_of_nested_data_and_text() -> None:
    one = steps("fmL", language=["a", "b", "c"])
    one["observation"] = {"eye": one["observation"], "both": (np.zeros(3, np.uint8), np.array(["x", "y", "z"]))}
    spec = rlds.create_trajectory_data_spec(as_lists([one])).replace(
        policy_info={"seen": rlds.create_trajectory_data_spec(as_lists([one])).reward}
    )
    found = rlds.to_tensor_specs(spec, outer_dims=(None,))
    assert found.observation["eye"] == tf.TensorSpec((None, 2), tf.float32)
    assert found.observation["both"] == (tf.TensorSpec((None,), tf.uint8), tf.TensorSpec((None,), tf.string))
    assert found.policy_info == {"seen": tf.TensorSpec((None,), tf.float32)}
    with pytest.raises(SchemaError, match="reward: expected a FieldSpec, found 3"):
        rlds.to_tensor_specs(spec.replace(reward=3))


@NAMES
@FORMS
@pytest.mark.parametrize("policy", [None, info], ids=["no policy", "policy"])
def test_trajectories_are_those_of_tf_agents(name: str, form: Form, policy: Any) -> None:
    episodes, types, discounts = VALID[name]
    found = list(rlds.convert_rlds_to_trajectories(form(episodes), policy))
    assert [(int(one.step_type), int(one.next_step_type)) for one in found] == types
    assert [float(one.discount) for one in found] == discounts
    theirs = rlds_to_reverb.convert_rlds_to_trajectories(as_datasets(episodes), policy)
    for one, other in zip(found, theirs.as_numpy_iterator(), strict=True):
        assert one._fields == other._fields
        tf.nest.assert_same_structure(one._asdict(), other._asdict())
        for mine, its in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert np.asarray(mine).dtype == its.dtype
            np.testing.assert_array_equal(mine, its)
        for question in ("is_first", "is_mid", "is_last", "is_boundary"):
            assert bool(getattr(one, question)()) == bool(getattr(other, question)()), question


def test_a_policy_sees_what_else_a_step_has() -> None:
    (found,) = rlds.convert_rlds_to_trajectories(
        as_lists(VALID["extra feature"][0]), lambda step, _: {"action": step["action"], "extra": step["extra"]}
    )
    assert found.policy_info["extra"]
    np.testing.assert_array_equal(found.policy_info["action"], found.action)


@NAMES
@FORMS
@pytest.mark.parametrize("policy", [None, info], ids=["no policy", "policy"])
def test_what_is_pushed_is_what_tf_agents_pushes(name: str, form: Form, policy: Any, live: Callable[..., Live]) -> None:
    """As many, and item by item the same; with a policy's info too, of which the table's signature knows nothing."""
    episodes, types, _ = VALID[name]
    ours, theirs = live(), live()
    assert rlds.push_rlds_to_reverb(form(episodes), ours.observer, policy) == len(types)
    assert rlds_to_reverb.push_rlds_to_reverb(as_datasets(episodes), theirs.observer, policy) == len(types)
    assert ours.items() == theirs.items() == sum(2 for kind in types if kind == (2, 0))
    for one, other in zip(ours.taken(ours.items()), theirs.taken(theirs.items()), strict=True):
        for mine, its in zip(one, other, strict=True):
            assert mine.dtype == its.dtype
            np.testing.assert_array_equal(mine, its)


def changed(**values: Any) -> dict[str, Any]:
    return {**steps("fmL"), **values}


def test_what_the_table_does_not_hold_is_refused_before_anything_is_pushed(live: Callable[..., Live]) -> None:
    server = live()
    for episode, message in (
        (steps("fmL", width=1), r"observation: expected float32 \[2\], found float32 \[1\] in trajectory 0"),
        (changed(observation={"eye": np.ones((3, 2), np.float32)}), r"expected float32 \[2\], found \['eye'\]"),
        (changed(action=np.ones((3, 1))), r"observer: action: expected float32 \[1\], found float64 \[1\]"),
    ):
        with pytest.raises(SchemaError, match=message):
            rlds.push_rlds_to_reverb(as_lists([episode]), server.observer)
        assert (server.items(), server.observer._cached_steps) == (0, 0)
    with pytest.raises(SchemaError, match=r"expected a table signature whose shapes begin with the axis of the seq"):
        rlds.push_rlds_to_reverb(as_lists([steps("fmL")]), live(SPEC).observer)
    assert rlds.push_rlds_to_reverb(as_lists([steps("fmL")]), server.observer) == 3
    assert server.items() == 2
    free = live(None)
    assert rlds.push_rlds_to_reverb(as_lists([changed(action=np.ones((3, 1)))]), free.observer) == 3
    assert free.items() == 2


def test_a_signature_with_the_policys_info_is_compared(live: Callable[..., Live]) -> None:
    spec = rlds.create_trajectory_data_spec(as_lists([steps("fmL")]))
    signature = rlds.to_tensor_specs(spec.replace(policy_info={"action": spec.action}), outer_dims=(None,))
    server = live(signature)
    with pytest.raises(SchemaError, match=r"observer: policy_info: expected \['action'\], found 0 values"):
        rlds.push_rlds_to_reverb(as_lists([steps("fmL")]), server.observer)
    assert rlds.push_rlds_to_reverb(as_lists([steps("fmL")]), server.observer, info) == 3
    assert server.items() == 2


@pytest.mark.parametrize(
    ("kind", "options", "items"),
    [
        (reverb_utils.ReverbAddTrajectoryObserver, {}, 4),
        (reverb_utils.ReverbAddTrajectoryObserver, {"stride_length": 2}, 2),
        (reverb_utils.ReverbAddTrajectoryObserver, {"pad_end_of_episodes": True}, 5),
        (reverb_utils.ReverbTrajectorySequenceObserver, {}, 6),
        (reverb_utils.ReverbAddEpisodeObserver, {}, 3),
    ],
)
def test_every_observer(kind: Any, options: dict[str, Any], items: int, live: Callable[..., Live]) -> None:
    """Where an episode ends is known to all: no item of the first two kinds has steps of two episodes."""
    ours, theirs = (live(SIGNATURE, kind, **options), live(SIGNATURE, kind, **options))
    episodes = VALID["several"][0]
    assert rlds.push_rlds_to_reverb(as_lists(episodes), ours.observer) == 7
    assert rlds_to_reverb.push_rlds_to_reverb(as_datasets(episodes), theirs.observer) == 7
    assert ours.items() == theirs.items() == items
    for one, other in zip(ours.taken(items), theirs.taken(items), strict=True):
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_a_replay_buffer_of_tf_agents_samples_it() -> None:
    data = as_lists(VALID["several"][0])
    spec = rlds.create_trajectory_data_spec(data)
    server = reverb.Server([Live.table(rlds.to_tensor_specs(spec, outer_dims=(None,)))])
    buffer = reverb_replay_buffer.ReverbReplayBuffer(
        rlds.to_tensor_specs(spec), sequence_length=2, table_name=TABLE, local_server=server
    )
    observer = reverb_utils.ReverbAddTrajectoryObserver(buffer.py_client, TABLE, sequence_length=2)
    assert rlds.push_rlds_to_reverb(data, observer) == 7
    observer.flush()
    sample, _ = next(iter(buffer.as_dataset(sample_batch_size=1, num_steps=2)))
    assert isinstance(sample, trajectory.Trajectory)
    np.testing.assert_array_equal(sample.observation, [[[1, 2], [2, 3]]])
    transition = trajectory.to_transition(sample)
    np.testing.assert_array_equal(transition.next_time_step.reward, [[1]])
    observer.close()
    server.stop()


def test_rows_go_to_reverb_as_the_episodes_they_came_from(live: Callable[..., Live]) -> None:
    """By way of rows, which know of no action at a last step: all else is the same, its discount included."""
    data = as_lists(VALID["several"][0])
    through, straight = live(), live()
    assert rlds.push_rlds_to_reverb(rlds.write_rlds(rlds.read_rlds(data)), through.observer) == 7
    assert rlds.push_rlds_to_reverb(data, straight.observer) == 7
    kinds, rewards, discounts = SPEC._fields.index("step_type"), -2, -1
    for one, other in zip(through.taken(4), straight.taken(4), strict=True):
        np.testing.assert_array_equal(one[kinds], other[kinds])
        np.testing.assert_array_equal(one[discounts], other[discounts])
        last = other[kinds] == 2
        np.testing.assert_array_equal(one[rewards][~last], other[rewards][~last])


def test_the_example() -> None:
    from examples.rlds_to_reverb import main

    samples = main()
    assert len(samples) == 3
    for sample in samples:
        assert sample.observation.shape == (4, 2, 2)
        # One step after the other, within an episode.
        np.testing.assert_array_equal(np.diff(sample.observation[:, :, 1], axis=1), np.ones((4, 1)))
