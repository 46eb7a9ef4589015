"""RLDS episodes as rows and back."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, EpisodeError, MissingFieldError
from mouse_core.formats.base import rows_digest
from mouse_core.formats.rlds import convert_rlds_to_trajectories, read_rlds, write_rlds
from mouse_core.metadata import DatasetMetadata
from tests.core.formats.recording import Counting, check_rows, record, rlds_episode

LENGTHS = (4, -3, 1, -1, 9, 2)


def stacked(episode: dict[str, Any]) -> dict[str, Any]:
    def stack(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: stack([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], tuple):
            return tuple(stack(list(items)) for items in zip(*values, strict=True))
        return np.stack([np.asarray(value) for value in values])

    return {"steps": stack(episode["steps"])}


@pytest.mark.parametrize(
    ("kind", "form"),
    [("vector", "lists"), ("discrete", "bare"), ("image", "generator"), ("nested", "stacked"), ("vector", "stacked")],
)
def test_rows_are_what_the_environment_returned(kind: str, form: str) -> None:
    logs = list(record(Counting(LENGTHS, kind), 6))
    episodes: Any = [rlds_episode(log) for log in logs]
    if form == "stacked":
        episodes = [stacked(episode) for episode in episodes]
    elif form == "generator":
        episodes = partial(map, lambda episode: {"steps": iter(episode["steps"])}, episodes)
    elif form == "bare":
        episodes = [episode["steps"] for episode in episodes]
    stream = read_rlds(episodes, batch_rows=5)
    table = stream.to_table()
    check_rows(table, logs, reward_dtype="float64")
    assert {read_rlds(episodes, batch_rows=size).digest() for size in (1, 3, 100)} == {rows_digest(table)}
    discounts = table.column("metadata_discount").to_pylist()
    assert discounts[:5] == pytest.approx([1.0, 0.9, 0.9, 0.9, 0.9])
    assert max(batch.num_rows for batch in stream) <= 6


def test_what_can_be_read_once_is_refused() -> None:
    episodes = [rlds_episode(log) for log in record(Counting(LENGTHS), 6)]
    stepwise = [episode | {"steps": iter(episode["steps"])} for episode in episodes]
    for given_, message in (
        (iter(episodes), "a generator can be read only once; pass lists, or a function"),
        (stepwise, "episode 0: its steps are a generator"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_rlds(given_)
    again = read_rlds(lambda: iter(episodes))
    assert again.digest() == again.digest() == read_rlds(episodes).digest()


@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
def test_there_and_back(kind: str) -> None:
    rows = read_rlds([rlds_episode(log) for log in record(Counting(LENGTHS, kind), 6)])
    assert read_rlds(lambda: write_rlds(rows)).digest() == rows.digest()
    steps = next(write_rlds(rows))["steps"]
    flags = [[bool(step[name]) for step in steps] for name in ("is_first", "is_last", "is_terminal")]
    assert flags == [[True, *[False] * 4], [*[False] * 4, True], [*[False] * 4, True]]


@pytest.mark.parametrize("final", ["drop", "mark"])
def test_an_episode_without_its_last_observation(final: str) -> None:
    logs = list(record(Counting((4, 1, 3)), 3))
    episodes = [rlds_episode(log, complete=False) for log in logs]
    with pytest.raises(ConfigError, match=r"final='drop'.*final='mark'"):
        list(read_rlds(episodes))
    for size in (1, 2, 3, 100):
        table = read_rlds(episodes, final=final, batch_rows=size).to_table()
        for log in logs:
            # RLDS cannot say how such an episode ended.
            log.terminated[-1] = False
        check_rows(table, logs, final=final)
    if final == "mark":
        back = list(write_rlds(read_rlds(episodes, final="mark")))
        assert [len(episode["steps"]) for episode in back] == [4, 1, 3]
        assert not any(step["is_last"] for episode in back for step in episode["steps"])


@pytest.mark.parametrize("final", ["drop", "mark"])
def test_a_last_step_that_is_a_transition(final: str) -> None:
    logs = list(record(Counting((4, -1, 3)), 3))
    episodes = [rlds_episode(log, complete=False) for log in logs]
    for log, episode in zip(logs, episodes, strict=True):
        episode["steps"][-1] |= {"is_last": True, "is_terminal": log.done == 1}
    for size in (1, 2, 100):
        stream = read_rlds(episodes, final=final, last_step="transition", batch_rows=size)
        check_rows(stream.to_table(), logs, final=final)
        assert not stream.notes
    for episode in episodes:
        steps = range(len(episode["steps"]))
        said = [{"language_instruction": "pick", "timestamp": k / 10, "score": np.ones(3) * k} for k in steps]
        episode["steps"] = [step | more for step, more in zip(episode["steps"], said, strict=True)]
    if final == "mark":  # only what is missing is missing
        for size in (1, 2, 100):
            rows = read_rlds(episodes, final=final, last_step="transition", batch_rows=size).to_table()
            assert set(rows.column("metadata_language_instruction").to_pylist()) == {"pick"}
            step = np.array(rows.column("episode_step").to_pylist())
            several = np.repeat([True, False, True], [len(log) + 1 for log in logs])
            stamps = np.array(rows.column("metadata_timestamp").to_pylist())
            np.testing.assert_allclose(stamps[several], step[several] / 10)
            scores = np.array(rows.column("metadata_score").to_pylist())[:, 0]
            last = np.array(rows.column("observation_missing").to_pylist()) == 1
            assert (scores[last] == step[last] - 1).all()
    (note,) = read_rlds(episodes).notes
    assert f"holds the reward {logs[0].rewards[-1]:g} and an action" in note
    nothing = {"action": np.zeros(2), "reward": 0.0}
    assert not read_rlds([{"steps": [*episodes[0]["steps"][:-1], episodes[0]["steps"][-1] | nothing]}]).notes
    with pytest.raises(ConfigError, match=r"final='drop'.*final='mark'"):
        read_rlds(episodes, last_step="transition")
    with pytest.raises(ConfigError, match=r"last_step: expected one of .*'transition'.*, found 'action'"):
        read_rlds(episodes, last_step="action")


def test_more_features_of_steps_and_episodes() -> None:
    (log,) = record(Counting((3,)), 1)
    episode = rlds_episode(log)
    for number, step in enumerate(episode["steps"]):
        step |= {"log_prob": -float(number), "language": f"do {number}", "pose": {"x": np.float32(number)}}
    episode |= {"episode_metadata": {"file": "a.h5", "score": np.float32(0.5)}}
    table = read_rlds([episode]).to_table()
    assert table.column("metadata_log_prob").to_pylist() == [0, 0, -1, -2]
    assert table.column("metadata_language").to_pylist() == ["do 0", "do 1", "do 2", "do 3"]
    assert table.column("metadata_pose_x").to_pylist() == [0, 1, 2, 3]
    assert table.column("metadata_episode_episode_metadata_file").to_pylist() == ["a.h5"] * 4
    back = next(write_rlds(table))
    assert [step["log_prob"] for step in back["steps"]] == [0, -1, -2, 0]
    assert [step["language"] for step in back["steps"]] == ["do 0", "do 1", "do 2", "do 3"]
    assert {name: value for name, value in back.items() if name != "steps"} == {
        "episode_metadata_file": "a.h5",
        "episode_metadata_score": np.float32(0.5),
    }
    assert back["episode_metadata_score"].dtype == np.float32
    assert read_rlds([back]).digest() == rows_digest(table)


@st.composite
def rlds_episodes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Episodes in which every value is another one."""
    numbers = iter(range(1, 100_000))
    episodes = []
    nested, with_about = draw(st.booleans()), draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        length, terminal = draw(st.integers(1, 4)), draw(st.booleans())
        discount = np.float32(draw(st.sampled_from([1.0, 0.99, 0.5])))
        steps = []
        for place in range(length):
            observation: Any = np.array([next(numbers), 0.5], np.float32)
            last = place == length - 1
            steps.append(
                {
                    "observation": {"eye": observation, "ear": np.int64(next(numbers))} if nested else observation,
                    "action": np.array([next(numbers)], np.float32),
                    "reward": np.float32(next(numbers)),
                    "discount": np.float32(0.0 if terminal and place >= length - 2 else discount),
                    "is_first": place == 0,
                    "is_last": last,
                    "is_terminal": terminal and last,
                    "policy_entropy": np.float64(next(numbers)),
                    "language": f"do {next(numbers)}",
                    "frame": np.int32(next(numbers)),
                }
            )
        about = {"file": f"{next(numbers)}.h5", "score": np.float32(next(numbers)), "seed": next(numbers)}
        episodes.append({"steps": steps, **(about if with_about else {})})
    return episodes


@given(rlds_episodes(), st.sampled_from([1, 2, 100]))
def test_what_comes_back_is_what_went_in(episodes: list[dict[str, Any]], batch_rows: int) -> None:
    back = list(write_rlds(read_rlds(episodes, batch_rows=batch_rows)))
    assert len(back) == len(episodes)
    for found, given_ in zip(back, episodes, strict=True):
        assert found.keys() == given_.keys()
        assert all(found[name] == given_[name] for name in given_ if name != "steps")
        expected = [dict(step) for step in given_["steps"]]
        # Neither is kept; the discount of a truncated step is.
        expected[-1] |= {"action": np.zeros(1, np.float32), "reward": np.float32(0), "policy_entropy": np.float64(0)}
        if len(expected) == 1 and not expected[-1]["is_terminal"]:
            expected[-1]["discount"] = np.float32(1)
        for one, other in zip(found["steps"], expected, strict=True):
            assert one.keys() == other.keys()
            for name, value in other.items():
                check_equal(one[name], value)
    again = list(write_rlds(read_rlds(back)))
    for one, other in zip(again, back, strict=True):
        check_equal(one, other)


def check_equal(found: Any, expected: Any) -> None:
    """Equal in structure, dtype and value."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            check_equal(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    else:
        assert np.asarray(found).dtype.kind == np.asarray(expected).dtype.kind
        np.testing.assert_array_equal(found, expected)


def test_a_truncated_step_is_not_the_end_of_what_is_worth_something() -> None:
    logs = list(record(Counting((3, -3, -1)), 3))
    rows = read_rlds([rlds_episode(log) for log in logs]).to_table()
    for table, discount in ((rows, 0.9), (rows.drop_columns(["metadata_discount"]), 1.0)):
        back = list(write_rlds(table))
        last = [episode["steps"][-1] for episode in back]
        assert [bool(step["is_terminal"]) for step in last] == [True, False, False]
        assert [float(step["discount"]) for step in last] == pytest.approx([0.0, discount, discount])
        pairs = [pair for pair in convert_rlds_to_trajectories(back) if pair.is_boundary()]
        assert [float(pair.discount) for pair in pairs] == pytest.approx([0.0, discount, discount])


def test_what_varies_within_an_episode_stays_with_its_steps() -> None:
    rows = read_rlds([rlds_episode(log) for log in record(Counting((2,)), 1)]).to_table()
    table = rows.append_column("metadata_episode_return", pa.array([0.0, 1.0, 2.0]))
    (back,) = write_rlds(table)
    assert list(back) == ["steps"]
    assert [float(step["episode_return"]) for step in back["steps"]] == [0.0, 1.0, 2.0]
    assert read_rlds([back]).digest() == rows_digest(table)


def test_stores_and_tables_can_be_written() -> None:
    rows = read_rlds([rlds_episode(log) for log in record(Counting(LENGTHS), 6)])
    table, store = rows.to_table(), rows.to_store()
    assert (store.snapshot().spec["observation"].shape, store.snapshot().spec["action"].shape) == ((3,), (2,))
    assert store.columns["action"] == pa.list_(pa.float64(), 2)
    for source in (table, store, store.to_dataset()):
        assert read_rlds(list(write_rlds(source))).digest() == rows.digest()
    without = table.drop_columns(["episode_step", "metadata_discount"])
    back = list(write_rlds(without))
    assert [len(episode["steps"]) for episode in back] == [abs(length) + 1 for length in LENGTHS]
    assert [float(episode["steps"][-2]["discount"]) for episode in back] == [float(length < 0) for length in LENGTHS]
    with pytest.raises(ConfigError, match=r"from_dataset: expected a .* found int"):
        next(write_rlds(3))
    with pytest.raises(ValueError, match="alignment 'arrived'"):
        next(write_rlds(rows.replace(metadata=DatasetMetadata("outgoing"))))


@pytest.mark.parametrize(
    ("place", "values", "kind", "message"),
    [
        (1, {"is_first": True}, EpisodeError, "step 1: expected is_first at the first step"),
        (0, {"is_first": False}, EpisodeError, "step 0: expected is_first at the first step"),
        (1, {"is_last": True}, EpisodeError, "step 1: expected is_last at the last step only"),
        (2, {"is_terminal": True}, EpisodeError, "step 2: expected is_terminal only where is_last"),
        (2, {"observation": np.zeros(4, np.float32)}, DataError, r"step 2: .*shape \[3\].*found \[4\]"),
        (2, {"reward": np.zeros(2)}, DataError, "step 2: .*shape"),
        (2, {"reward": None}, MissingFieldError, "step 2: expected features"),
        (None, {"reward": "x"}, DataError, "reward: expected one number"),
        (None, {"observation": np.zeros(3)}, DataError, "column 'observation': expected .*float"),
    ],
)
def test_what_does_not_fit_is_named(place: int | None, values: Any, kind: type[Exception], message: str) -> None:
    episodes = [rlds_episode(log) for log in record(Counting((3, 3, 3)), 3)]
    for number, step in enumerate(episodes[1]["steps"]):
        if place in (number, None):
            step.update(values)
            [step.pop(name) for name, value in values.items() if value is None]
    with pytest.raises(kind, match=f"episode 1.*{message}") as caught:
        list(read_rlds(episodes, path="/data/x"))
    assert "/data/x" in str(caught.value)


def test_nothing_there() -> None:
    for empty in ([], [{"steps": []}], lambda: iter(())):
        with pytest.raises(DataError, match="expected episodes with steps, found none"):
            read_rlds(empty)
    with pytest.raises(ConfigError, match="iterable of RLDS episodes"):
        read_rlds(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected one of"):
        read_rlds([], final="keep")
    with pytest.raises(DataError, match="expected 'steps'"):
        read_rlds([{"step": []}])
