"""Offsets in seconds, and LeRobot's delta timestamps, value by value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    MissingFieldError,
    PrefetchBatchifier,
    Seconds,
    WorkerError,
)
from mouse_core.formats.lerobot import read_lerobot
from mouse_core.sampling import EpisodeWindows
from tests.core.test_lerobot import FPS, Robot
from tests.core.test_windows_by_field import episode_of, rows_of
from tests.raising import assert_raises

SHIFT = {"arrived": 1, "outgoing": 0}


def store_of(lengths: list[int], times: Any, alignment: Any = "arrived", rows: slice = slice(None)) -> DatasetStore:
    columns = {**rows_of(lengths), "timestamp": np.asarray(times, np.float64)}
    store = DatasetStore(alignment=alignment, fields=[Field("timestamp")])
    store.extend({name: values[rows] for name, values in columns.items()})
    return store


def expected_row(
    times: list[float], episode: tuple[int, int], anchor: int, seconds: float, tolerance: float, shift: int
) -> tuple[int, bool]:
    begin, end = episode
    candidates = list(range(begin, end - shift)) or [begin]
    wanted = times[anchor] + seconds
    nearest = min(candidates, key=lambda row: (abs(times[row] - wanted), row))
    there = end - begin > shift and abs(times[nearest] - wanted) <= tolerance
    return min(nearest + shift, end - 1), there


@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    steps=st.one_of(st.none(), st.integers(1, 4)),
    alignment=st.sampled_from(["arrived", "outgoing"]),
    offsets=st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.5]), min_size=1, max_size=4),
    tolerance=st.sampled_from([0.0, 0.25, 0.5]),
    pad=st.sampled_from([True, 3]),
    seed=st.integers(0, 99),
)
def test_the_nearest_row_by_time(
    data: st.DataObject,
    lengths: list[int],
    steps: int | None,
    alignment: str,
    offsets: list[float],
    tolerance: float,
    pad: Any,
    seed: int,
) -> None:
    times: list[float] = []
    for length in lengths:  # in quarters of a second, which are exact, with gaps
        gaps = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=length, max_size=length))
        times += np.cumsum(gaps).tolist()
    if sum(lengths) < (steps or 1):
        return
    seconds = Seconds(offsets, tolerance, holes="mask")
    # Of windows with steps those within episodes, in an order that takes padding of its own.
    sampling: Any = "random" if steps is None else EpisodeWindows(steps, 4)
    windows = {"obs_discrete": seconds, "reward": seconds}
    source = BatchSource(
        store_of(lengths, times, alignment), steps, 4, sampling=sampling, windows=windows, pad=pad, seed=seed
    )
    batch = source[0]
    for window, start in enumerate(source.plan(0).starts.tolist()):
        episode = episode_of(lengths, start)
        for step in range(steps or 1):
            anchor = min(start + step, episode[1] - 1)
            for place, offset in enumerate(offsets):
                for name, shift in (("obs_discrete", 0), ("reward", SHIFT[alignment])):
                    row, there = expected_row(times, episode, anchor, offset, tolerance, shift)
                    there = there and start + step < episode[1]
                    at = (window, place) if steps is None else (window, step, place)
                    assert batch[f"{name}_mask"][at] == there, (name, start, step, offset)
                    assert batch[name][at] == (row if there or pad is True else pad), (name, start, step, offset)


def test_a_hole_is_refused_at_its_own_batch_and_no_other() -> None:
    lengths, times = [30], np.arange(30) * 0.1
    times[20:] += 5.0  # rows are missing between 19 and 20
    store = store_of(lengths, times)
    options: dict[str, Any] = {"sampling": "sequential", "drop_last": False, "seed": 4}
    source = BatchSource(store, batch_size=1, windows={"obs_discrete": Seconds([-0.1])}, **options)
    places = [int(source.plan(index).starts[0]) for index in range(len(source))]
    for index, row in enumerate(places):
        if row != 20:
            assert source[index]["obs_discrete"].tolist() == [[max(0, row - 1)]]
            assert source[index]["obs_discrete_mask"].tolist() == [[row > 0]]
    with pytest.raises(DataError, match=r"within 0\.0001 s of .* from row 20, found the nearest"):
        source[places.index(20)]
    with PrefetchBatchifier(source, num_workers=0) as loader:
        for _ in range(places.index(20)):
            loader.next_batch()
        assert_raises(WorkerError, "from row 20", loader.next_batch)
    masked = BatchSource(store, batch_size=30, windows={"obs_discrete": Seconds([-0.1], holes="mask")})
    starts, there = masked.plan(0).starts, masked[0]["obs_discrete_mask"][:, 0]
    np.testing.assert_array_equal(there, ~np.isin(starts, (0, 20)))


def test_times_of_rows_that_come_later_and_clocks_that_go_back() -> None:
    lengths, times = [10, 10], np.tile(np.arange(10) * 0.1, 2)
    store = store_of(lengths, times, rows=slice(0, 12))
    windows = {"obs_discrete": Seconds([-0.2, 0.3])}
    with PrefetchBatchifier(store, batch_size=16, windows=windows, num_workers=0) as loader:
        loader.next_batch()
        more = {**rows_of(lengths), "timestamp": times}
        store.extend({name: values[12:] for name, values in more.items()})
        loader.refresh()
        batch, starts = loader.next_batch(), loader.source.plan(1).starts.tolist()
    for start, rows, mask in zip(starts, batch["obs_discrete"], batch["obs_discrete_mask"], strict=True):
        begin, end = episode_of(lengths, start)
        assert rows.tolist() == [max(begin, start - 2), min(end - 1, start + 3)]
        assert mask.tolist() == [start - 2 >= begin, start + 3 < end]
    seconds = {"obs_discrete": Seconds([0.0])}
    assert BatchSource(store_of([3, 2], [5, 6, 7, 0, 1]), batch_size=5, windows=seconds)[0]["obs_discrete_mask"].all()
    with pytest.raises(DataError, match=r"timestamp: .* ascend .* found 1 s at row 4 after 4 s"):
        BatchSource(store_of([2, 4], [5, 6, 3, 4, 1, 2]), batch_size=2, windows=seconds)[0]


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_no_seconds_is_the_anchors_own_row_where_stamps_repeat(alignment: Any) -> None:
    """With stamps 0, 0, 1, 1, 1 the reward of row 3 is its own, and the last arrived row has none."""
    store, shift = store_of([5], [0, 0, 1, 1, 1], alignment), SHIFT[alignment]
    windows = {"obs_discrete": Seconds([0.0]), "reward": Seconds([0.0])}
    batch = BatchSource(store, batch_size=5, sampling="last", windows=windows)[0]
    assert batch["obs_discrete"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert batch["obs_discrete_mask"].all()
    assert batch["reward"][:, 0].tolist() == [min(row + shift, 4) for row in range(5)]
    assert batch["reward_mask"][:, 0].tolist() == [True, True, True, True, not shift]


@pytest.mark.parametrize("rate", [30, 50])
def test_coarse_stamps_are_as_near_as_they_can_be(rate: int) -> None:
    """Stamps in float32 of 40 minutes: from 1,024 s on they are further from each other than the default tolerance."""
    count = 40 * 60 * rate
    step = np.arange(count)
    store = DatasetStore(fields=[Field("timestamp")])
    store.extend(
        {
            "action": step,
            "reward": np.zeros(count),
            "done": (step == count - 1).astype(int),
            "observation_discrete": step,
            "timestamp": (step / rate).astype(np.float32),
        }
    )
    # Of four digits, as people write them down: 0.5333 s is not quite the time of 16 frames either.
    windows = {"obs_discrete": Seconds([-1 / rate, 0, 1 / rate]), "action": Seconds([round(16 / rate, 4)])}
    batch = BatchSource(store, batch_size=count, sampling="last", fields=[*windows], windows=windows)[0]
    np.testing.assert_array_equal(batch["obs_discrete"], np.clip(step[:, None] + [-1, 0, 1], 0, count - 1))
    assert batch["obs_discrete_mask"].sum() == 3 * count - 2
    np.testing.assert_array_equal(batch["action"][:, 0], np.clip(step + 17, 0, count - 1))  # a row later: it arrived
    assert batch["action_mask"].sum() == count - 17


def source_of(seconds: Seconds, **options: Any) -> BatchSource:
    return BatchSource(store_of([5], range(5)), batch_size=1, windows={"action": seconds}, **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Seconds([]), "at least one"),
        (lambda: Seconds(["a"]), "numbers of seconds"),
        (lambda: Seconds([np.nan]), "numbers of seconds"),
        (lambda: Seconds([0.0], -1.0), "tolerance"),
        (lambda: Seconds([0.0], holes="fill"), "holes"),  # type: ignore[arg-type]
        (lambda: source_of(Seconds([0.0], clock="t")), "'t'"),
        (lambda: source_of(Seconds([0.0], clock="obs_continuous")), "one time stamp per row"),
        (lambda: source_of(Seconds([0.0]), pad=False), "action_mask"),
    ],
)
def test_what_seconds_cannot_be(make: Any, says: str) -> None:
    assert_raises((ConfigError, MissingFieldError), says, make)


def lerobot_rows(frame: int, deltas: list[float], first: int, end: int) -> tuple[list[int], list[bool]]:
    """What LeRobot delivers for ``delta_timestamps``: frames by the rate, held at the episode's ends.

    As its dataset reader says: of seconds it makes ``round(delta * fps)`` frames, delivers the frame of that number
    where the episode has it and else its first or last, and marks in ``<key>_is_pad`` where it had none.
    """
    asked = [frame + round(delta * FPS) for delta in deltas]
    return [max(first, min(end - 1, row)) for row in asked], [not first <= row < end for row in asked]


DELTAS = {
    "obs_continuous": [-0.3, -0.1, 0.0],
    "action": [number / FPS for number in range(-1, 6)],
    "reward": [0.0, 0.4],
}


@pytest.mark.parametrize("kind", ["rows", "seconds"])
@pytest.mark.parametrize("alignment", ["outgoing", "arrived"])
def test_lerobots_delta_timestamps_value_by_value(kind: str, alignment: Any, tmp_path: Path) -> None:
    """Of frames as they were recorded, and of the arrived rows that they are read as, whose actions are a row later."""
    robot = Robot(lengths=(5, 3, 7, 4, 12))
    first = np.concatenate([[0], np.cumsum(robot.lengths)])
    fields = [Field("timestamp"), Field("action", dtype="float32")]
    if alignment == "outgoing":
        store = DatasetStore(alignment="outgoing", fields=fields)
        store.extend(
            {
                "observation": robot.state,
                "action": robot.action,
                "reward": robot.reward,
                "done": robot.done.astype(np.int64),
                "episode_step": robot.frame,
                "timestamp": robot.frame / FPS,
            }
        )
        row_of = list(range(len(robot.frame)))
    else:
        stream = read_lerobot(robot.write(tmp_path / "robot", files=((0, 1), (2, 3), (4,))), final="mark")
        store = DatasetStore(fields=[Field("timestamp", column="time_stamp"), fields[1]])
        rows = [row for batch in stream.batches() for row in batch.to_pylist()]
        for row in rows:
            row["time_stamp"] = row["episode_step"] / FPS
            row["observation"] = row.pop("observation.state")
        store.extend({name: [row[name] for row in rows] for name in rows[0]})
        # Every episode has a row more, so frame t of episode e is row t + e.
        row_of = [frame + int(robot.episode[frame]) for frame in range(len(robot.frame))]
    windows: dict[str, Any] = {name: [round(delta * FPS) for delta in deltas] for name, deltas in DELTAS.items()}
    if kind == "seconds":
        windows = {name: Seconds(deltas) for name, deltas in DELTAS.items()}
    source = BatchSource(store, batch_size=len(store), sampling="last", windows=windows)
    batch = source[0]
    assert source.plan(0).starts.tolist() == list(range(len(store)))
    recorded = {"obs_continuous": robot.state, "action": robot.action, "reward": robot.reward}
    for frame, row in enumerate(row_of):
        episode = int(robot.episode[frame])
        for name, deltas in DELTAS.items():
            frames, padded = lerobot_rows(frame, deltas, int(first[episode]), int(first[episode + 1]))
            np.testing.assert_array_equal(batch[f"{name}_mask"][row], ~np.array(padded), f"{name} of frame {frame}")
            np.testing.assert_array_equal(batch[name][row], recorded[name][frames], f"{name} of frame {frame}")
