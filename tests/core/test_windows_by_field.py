"""Fields at offsets around an anchor, in rows and in seconds: which are there, and what the others become."""

import re
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, reject
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
    StateError,
    WorkerError,
)
from mouse_core.formats.lerobot import read_lerobot
from mouse_core.sampling import EpisodeWindows, RandomWindows
from mouse_core.testing import SourceConformance, example_store
from tests.core.oracle import assert_same
from tests.core.test_lerobot import FPS, Robot
from tests.raising import assert_raises

OFFSETS = st.one_of(
    st.lists(st.integers(-5, 7), min_size=1, max_size=5),
    st.builds(lambda first, count: list(range(first, first + count)), st.integers(-6, 4), st.integers(1, 6)),
)
ALIGNED = {"arrived": 1, "outgoing": 0}


def rows_of(lengths: list[int], first: int = 0) -> dict[str, Any]:
    count = sum(lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    number = np.arange(first, first + count)
    last = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    return {
        "action": (number[:, None] * 10 + np.arange(3)).astype(np.float32),
        "reward": number.astype(np.float32),
        "done": np.where(last, 1 + steps % 2, 0),
        "episode_step": steps,
        "observation": (number[:, None] * 100.0 + np.arange(2)),
        "observation_discrete": number,
    }


def store_of(rows: dict[str, Any], kind: str, alignment: Any = "arrived") -> DatasetStore:
    """A store of columns: as rows, a table, two tables, parts of both, or indices into a table read row by row."""
    store, count = DatasetStore(alignment=alignment), len(rows["reward"])
    if kind == "indices":
        from datasets import Dataset

        back = Dataset.from_dict({name: values[::-1].tolist() for name, values in rows.items()})
        return store.from_dataset(back.select(list(range(count))[::-1]))
    half = {"rows": 0, "table": count}.get(kind, count // 2)
    for part in (slice(0, half), slice(half, None)):
        values = {name: array[part] for name, array in rows.items()}
        if kind in ("rows", "parts") and part.start == half:
            store.extend(values)
        elif len(values["reward"]):
            store.from_dataset(pa.table({name: _listed(array) for name, array in values.items()}))
    return store


def _listed(array: np.ndarray) -> Any:
    if array.ndim == 1:
        return pa.array(array)
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


def episode_of(lengths: list[int], row: int) -> tuple[int, int]:
    ends = np.cumsum(lengths).tolist()
    return next((begin, end) for begin, end in pairwise([0, *ends]) if begin <= row < end)


TRANSITION = ("action", "reward", "done")
FIELDS = (*TRANSITION, "time", "obs_continuous", "obs_discrete")
COLUMN = {"obs_continuous": "observation", "obs_discrete": "observation_discrete", "time": "episode_step"}


def expected_of(
    lengths: list[int],
    starts: list[int],
    steps: int | None,
    windows: Mapping[str, list[int]],
    *,
    alignment: str,
    boundary: str,
    pad: Any,
) -> dict[str, np.ndarray]:
    rows = rows_of(lengths)
    fill = None if isinstance(pad, bool) or pad is None else pad
    found: dict[str, list[Any]] = {}

    def put(name: str, value: Any) -> None:
        found.setdefault(name, []).append(value)

    for start in starts:
        for step in range(steps or 1):
            anchor, there = start + step, True
            if boundary == "episode" and anchor >= episode_of(lengths, start)[1]:
                anchor, there = episode_of(lengths, start)[1] - 1, False
            if boundary == "episode" and steps is not None:
                put("mask", there)
            begin, end = episode_of(lengths, anchor)
            for name in FIELDS:
                values = rows[COLUMN.get(name, name)]
                if name not in windows:
                    value = values[anchor]
                    put(name, value if there or fill is None else np.full_like(value, fill))
                    continue
                shift = ALIGNED[alignment] if name in TRANSITION else 0
                delivered, mask = [], []
                for offset in windows[name]:
                    row = anchor + offset + shift
                    is_there = there and begin + shift <= row < end
                    nearest = min(max(row, begin + shift), end - 1)
                    value = values[max(nearest, begin) if begin + shift < end else end - 1]
                    delivered.append(value if is_there or fill is None else np.full_like(value, fill))
                    mask.append(is_there)
                put(name, np.stack(delivered))
                put(f"{name}_mask", np.array(mask))
    axes = (len(starts),) if steps is None else (len(starts), steps)
    return {name: np.stack(values).reshape(*axes, *np.shape(values[0])) for name, values in found.items()}


@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=8),
    kind=st.sampled_from(["rows", "tables", "parts", "indices"]),
    alignment=st.sampled_from(["arrived", "outgoing"]),
    options=st.fixed_dictionaries(
        {
            "sequence_length": st.one_of(st.none(), st.integers(1, 5)),
            "batch_size": st.sampled_from([1, 2, 4, 6]),
            "sampling": st.sampled_from(["random", "sequential", "batch", "blocks", "last"]),
            "boundary": st.sampled_from(["stream", "episode"]),
            "pad": st.sampled_from([True, False, 0, 7, -1, None]),
            "windows": st.dictionaries(st.sampled_from(FIELDS), OFFSETS, min_size=1, max_size=4),
            "seed": st.integers(0, 2**64 - 1),
        }
    ),
    shards=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    index=st.integers(0, 20),
)
def test_rows_around_anchors_are_those_of_the_oracle(
    lengths: list[int], kind: str, alignment: str, options: dict[str, Any], shards: tuple[int, int], index: int
) -> None:
    store, steps = store_of(rows_of(lengths), kind, alignment), options["sequence_length"]
    uneven = options["batch_size"] % 2 or options["sampling"] == "sequential"
    try:
        whole = BatchSource(store, **options)
        source = BatchSource(store, **options, shard=shards, uneven="pad" if uneven else "refuse")
    except ConfigError as error:  # too few rows, or no anchor that has all of them, and nothing else
        if not re.search("expected an episode of at least|windows of .* steps|rows", str(error)):
            raise
        reject()
    if options["sampling"] == "sequential":
        index %= len(source)
    starts = whole.plan(index).starts.tolist()
    asked = {name: options[name] for name in ("windows", "boundary", "pad")}
    wanted = expected_of(lengths, starts, steps, alignment=alignment, **asked)
    found = whole[index]
    assert list(found) == list(whole.spec)
    assert_same(found, {name: wanted[name].astype(found[name].dtype) for name in found}, "whole")
    assert set(found) == set(wanted)
    for name, field in whole.spec.items():
        axes = (len(starts),) if steps is None else (len(starts), steps)
        assert found[name].shape == (*axes, *field.shape)
        assert found[name].dtype == field.dtype
    if options["pad"] is False:
        assert all(found[f"{name}_mask"].all() for name in options["windows"])
    # A shard has its rows, and what it has of another's is masked.
    part, rank, count = source[index], *shards
    first, end = len(starts) * rank // count, len(starts) * (rank + 1) // count
    for name in found:
        own = part[name][: end - first]
        np.testing.assert_array_equal(own, found[name][first:end], name)
        if name.endswith("_mask") and name in part:
            assert not part[name][end - first :].any()
    # Gathered by a plan, into given memory, in stored dtypes.
    plan = source.plan(index)
    assert_same(source.gather(plan), part, "gathered")
    memory = source.layout(len(plan.starts)).arrays(bytearray(source.layout(len(plan.starts)).nbytes))
    source.gather(plan, memory)
    assert_same(memory, part, "into memory")
    stored = source.gather(plan, stored=True)
    for name, values in stored.items():
        assert values.dtype == source.spec[name].stored_dtype
        np.testing.assert_array_equal(values.astype(source.spec[name].dtype), part[name], name)


def test_rows_that_come_later_are_seen_after_a_refresh() -> None:
    """The end of the snapshot is an end of its last episode until there are more rows of it."""
    rows = rows_of([6, 9])
    rows["done"][-1] = 0
    store = DatasetStore()
    store.extend({name: values[:10] for name, values in rows.items()})
    options: dict[str, Any] = {"batch_size": 8, "windows": {"reward": range(4), "obs_discrete": [-1, 0, 1]}, "seed": 1}
    with PrefetchBatchifier(store, num_workers=0, **options) as loader:
        for _ in range(5):
            loader.next_batch()
        store.extend({name: values[10:] for name, values in rows.items()})
        loader.refresh()
        found = [loader.next_batch() for _ in range(6)]
        source = BatchSource(store, epoch_start=5, **options)
        assert_same(found[0], source[5])
        for number, batch in enumerate(found):
            starts = source.plan(5 + number).starts.tolist()
            wanted = expected_of(
                [6, 9], starts, None, {"reward": [0, 1, 2, 3], "obs_discrete": [-1, 0, 1]},
                alignment="arrived", boundary="stream", pad=True,
            )  # fmt: skip
            for name in ("reward", "reward_mask", "obs_discrete", "obs_discrete_mask"):
                np.testing.assert_array_equal(batch[name], wanted[name], name)


def test_a_sampler_of_ones_own_names_the_anchors_and_names_may_be_refused() -> None:
    store = example_store()
    single = BatchSource(store, sampling=RandomWindows(1, 4), windows={"action": range(3)})
    assert single.spec.batch_dims == 1
    assert single[0]["action"].shape == (4, 3)
    several = BatchSource(store, sampling=RandomWindows(5, 4), windows={"action": range(3)}, pad=2)
    assert several.spec.batch_dims == 2
    assert several[0]["action"].shape == (4, 5, 3)
    batch = several[0]
    assert (batch["action"][~batch["action_mask"]] == 2).all()
    store = DatasetStore(fields=[Field("action_mask")])
    store.extend({**rows_of([5]), "action_mask": np.ones(5)})
    assert_raises(ConfigError, "action_mask", BatchSource, store, batch_size=2, windows={"action": [0]})
    store = DatasetStore()
    store.extend({**rows_of([5]), "gripper": np.ones(5)})
    with pytest.raises(MissingFieldError, match=r"found 'gripper'; make a field .*fields=\[Field\('gripper'\)\]"):
        BatchSource(store, batch_size=2, windows={"gripper": [0]})


def test_encoded_images_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where anchors share rows: of windows of 6 steps with 4 frames each, 9 rows and not 24."""
    from mouse_core.images import encode_png
    from mouse_core.images import pixels as image_rows

    rng = np.random.default_rng(0)
    count = 40
    pictures = rng.integers(0, 256, (count, 4, 5, 3), dtype=np.uint8)
    rows = rows_of([count])
    table = pa.table(
        {
            **{name: _listed(values) for name, values in rows.items()},
            "observation_image": [{"bytes": encode_png(picture), "path": None} for picture in pictures],
        }
    )
    source = BatchSource(
        DatasetStore().from_dataset(table), 6, 4, fields=["obs_image"], windows={"obs_image": range(-3, 1)}, seed=2
    )
    looked_at: list[int] = []
    plain = image_rows.fill_images

    def counting(images: Any, *arguments: Any, **options: Any) -> None:
        looked_at.extend(len(values) for values, *_ in images)
        plain(images, *arguments, **options)

    monkeypatch.setattr(image_rows, "fill_images", counting)
    batch, starts = source[0], source.plan(0).starts
    for window, start in enumerate(starts.tolist()):
        for step in range(6):
            for place, offset in enumerate(range(-3, 1)):
                wanted = pictures[max(0, start + step + offset)].reshape(-1)
                np.testing.assert_array_equal(batch["obs_image"][window, step, place], wanted)
    distinct = {max(0, int(start) + step) for start in starts for step in range(-3, 6)}
    assert sum(looked_at) == len(distinct)


class First:
    sequence_length = batch_size = 1

    def __init__(self, begin: int, length: int) -> None:
        self.begin, self.length = begin, length

    def batches_per_epoch(self, snapshot: Any) -> int:
        return self.length

    def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> np.ndarray:
        return np.array([self.begin + index % self.length])


@pytest.mark.parametrize(
    ("column", "alignment", "offsets"),
    [
        *(("reward", "arrived", range(4)), ("reward", "outgoing", range(-3, 1)), ("reward", "arrived", range(8))),
        *(("observation_image", "outgoing", range(8)), ("observation_image", "arrived", range(-3, 1))),
    ],
)
def test_what_is_wrong_in_another_episode_does_not_matter(column: str, alignment: Any, offsets: range) -> None:
    from mouse_core.images import encode_png

    rows = rows_of([3, 3, 4])
    pictures = np.random.default_rng(0).integers(0, 256, (10, 4, 5, 3), dtype=np.uint8)
    columns: dict[str, Any] = {name: values.tolist() for name, values in rows.items()}
    columns["observation_image"] = [{"bytes": encode_png(picture), "path": None} for picture in pictures]
    for row in (1, 7):
        wrong = {"reward": None, "observation_image": {"bytes": b"broken", "path": None}}
        columns[column][row] = wrong[column]
    table = pa.table({**columns, "action": _listed(rows["action"]), "observation": _listed(rows["observation"])})
    store = DatasetStore(alignment=alignment).from_dataset(table)
    field = column.replace("observation", "obs")
    first, broken = (
        BatchSource(store, batch_size=1, sampling=First(begin, 3), fields=[field], windows={field: offsets})
        for begin in (3, 0)
    )
    shift = ALIGNED[alignment] if field in TRANSITION else 0
    for index in range(3):
        for batch in (first[index], first.gather(first.plan(index))):
            nearest = [min(max(3 + index + offset + shift, 3 + shift), 5) for offset in offsets]
            whole = pictures.reshape(10, -1) if field == "obs_image" else rows[column]
            np.testing.assert_array_equal(batch[field][0], whole[nearest])
    with pytest.raises(DataError):
        _ = [broken[index] for index in range(3)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"windows": [0, 1]}, "offsets by field"),
        ({"windows": {"action": 3}}, r"write \[3\]"),
        ({"windows": {"action": []}}, "at least one offset"),
        ({"windows": {"action": [0.5]}}, r"Seconds\(\[\.\.\.\]\)"),
        ({"windows": {"action": [True]}}, "integers"),
        ({"windows": {"action": "01"}}, "a list of offsets"),
        ({"windows": {"actoin": [0]}}, "actoin"),
        ({"windows": {"reward": [0]}, "fields": ["action"]}, "expected only fields of the batches"),
        ({"windows": {"action": [0]}, "pad": "edge"}, "pad"),
        ({"windows": {"action": [0]}, "pad": 0.5}, "pad"),
        ({"windows": {"action": [0]}, "pad": 10**400}, "a float can represent"),
        ({"windows": {"action": [0]}, "pad": 10**400, "boundary": "episode"}, "a float can represent"),
        ({"windows": {"action": {0, 1}}}, "a list of offsets"),
        ({"windows": {"action": {0: 1}}}, "a list of offsets"),
        ({"windows": {"action": [0]}, "weighting": "trajectory"}, "expected 'episode', found 'stream'"),
        ({"windows": {"action": range(-3, 20)}, "pad": False}, "at least 24 steps"),
        ({"windows": {"action": [0]}, "pad": False, "sequence_length": 2}, "boundary='episode'"),
        ({"windows": {"action": [0]}, "pad": False, "sampling": RandomWindows(1, 4)}, "custom sampler"),
        ({"windows": {"action": [0]}, "views": 2, "pad": -1}, "augment or views"),
        ({"windows": {"action": [0]}, "dtypes": {"reward_mask": "int64"}}, "reward_mask"),
    ],
)
def test_what_cannot_be_is_said_when_the_source_is_made(options: dict[str, Any], says: str) -> None:
    assert_raises((ConfigError, MissingFieldError), says, BatchSource, example_store(), batch_size=4, **options)


def test_fields_say_that_they_belong_to_transitions_and_masks_have_dtypes() -> None:
    rows = {**rows_of([6]), "grip": np.arange(6.0), "pose": np.arange(6.0)}
    store = DatasetStore(fields=[Field("grip", transition=True), Field("pose"), Field("reward", transition=False)])
    store.extend(rows)
    source = BatchSource(store, batch_size=3, windows={name: [0] for name in ("grip", "pose", "action", "reward")})
    starts, batch = source.plan(0).starts, source[0]
    np.testing.assert_array_equal(batch["pose"][:, 0], starts)
    np.testing.assert_array_equal(batch["reward"][:, 0], starts)
    np.testing.assert_array_equal(batch["grip"][:, 0], np.minimum(starts + 1, 5))
    np.testing.assert_array_equal(batch["action"][:, 0, 0], 10 * np.minimum(starts + 1, 5))
    source = BatchSource(example_store(), batch_size=4, windows={"action": range(8)}, dtypes={"action_mask": "float32"})
    assert source[0]["action_mask"].dtype == np.float32 == source.spec["action_mask"].dtype
    assert set(np.unique(source[0]["action_mask"])) == {0.0, 1.0}
    tracemalloc.start()
    try:
        source = BatchSource(example_store(), batch_size=2, windows={"action": [0, 1, 20_000_000]})
        assert source[0]["action_mask"][:, 2].tolist() == [False, False]
        assert source.fingerprint
        assert tracemalloc.get_traced_memory()[1] < 1 << 27
    finally:
        tracemalloc.stop()


class TestAround(SourceConformance):
    def make(self) -> Any:
        windows = {"obs_continuous": [-1, 0], "action": range(5), "obs_image": [-3, -2, -1, 0]}
        return BatchSource(example_store(), batch_size=4, windows=windows, seed=3)


class TestAroundSteps(SourceConformance):
    def make(self) -> Any:
        windows = {"obs_continuous": [-4, -2, 0], "action": range(5), "done": [0]}
        return BatchSource(example_store(), 8, 4, windows=windows, seed=3, boundary="episode", pad=0)


def test_of_whatever_is_a_store() -> None:
    from mouse_core.mixtures import Mixture

    lengths = {"a": [4, 7], "b": [3, 9, 2]}
    members = {name: store_of(rows_of(one), "rows") for name, one in lengths.items()}
    rows = [0, *np.cumsum([sum(one) for one in lengths.values()]).tolist()]
    for pad in (True, False):
        source = BatchSource(
            Mixture(members), batch_size=16, windows={"obs_discrete": [-1, 0, 1], "action": [0]}, pad=pad
        )
        batch, starts = source[0], source.plan(0).starts.tolist()
        for place, start in enumerate(starts):
            member = int(start >= rows[1])
            begin, end = episode_of(list(lengths.values())[member], start - rows[member])
            row = start - rows[member]
            assert batch["obs_discrete"][place].tolist() == [max(begin, row - 1), row, min(end - 1, row + 1)]
            assert batch["action_mask"][place].tolist() == [row + 1 < end]
            assert batch["member"][place] == member
        assert pad or batch["obs_discrete_mask"].all()


def test_without_offsets_batches_are_rows_and_fingerprints_say_what_is_asked_for() -> None:
    store = example_store()
    rows = BatchSource(store, batch_size=4, windows={}, sampling="sequential", seed=5)
    steps = BatchSource(store, 1, 4, "sequential", seed=5)
    assert list(rows.spec) == list(steps.spec)
    assert rows.spec.batch_dims == 1
    for index in range(3):
        for name, values in rows[index].items():
            np.testing.assert_array_equal(values, steps[index][name][:, 0])
    assert rows.fingerprint != steps.fingerprint
    windows = BatchSource(store, 3, 4, windows={})
    assert windows.fingerprint == BatchSource(store, 3, 4).fingerprint
    assert windows[0]["reward"].shape == (4, 3)
    state = PrefetchBatchifier(store, batch_size=4, windows={}, sampling="sequential").state_dict()
    assert_raises(StateError, r"\[B\]", PrefetchBatchifier(store, 1, 4, "sequential").load_state_dict, state)
    store = example_store()
    windows = {"action": range(4), "obs_continuous": [-1, 0]}
    options: list[dict[str, Any]] = [
        {},
        {"windows": windows},
        {"windows": {**windows, "action": range(5)}},
        {"windows": {**windows, "action": [0, 1, 3, 2]}},
        {"windows": {"action": range(4)}},
        {"windows": windows, "pad": 0},
        {"windows": windows, "pad": False},
        {"windows": windows, "sequence_length": 1},
        {"windows": windows, "sequence_length": 3},
    ]
    found = [BatchSource(store, batch_size=4, **one).fingerprint for one in options]
    assert len(set(found)) == len(options)
    assert BatchSource(store, batch_size=4, windows=dict(windows), pad=True).fingerprint == found[1]


SHIFT = {"arrived": 1, "outgoing": 0}


def timed(lengths: list[int], times: Any, alignment: Any = "arrived", rows: slice = slice(None)) -> DatasetStore:
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
        timed(lengths, times, alignment), steps, 4, sampling=sampling, windows=windows, pad=pad, seed=seed
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
    store = timed(lengths, times)
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
    store = timed(lengths, times, rows=slice(0, 12))
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
    assert BatchSource(timed([3, 2], [5, 6, 7, 0, 1]), batch_size=5, windows=seconds)[0]["obs_discrete_mask"].all()
    with pytest.raises(DataError, match=r"timestamp: .* ascend .* found 1 s at row 4 after 4 s"):
        BatchSource(timed([2, 4], [5, 6, 3, 4, 1, 2]), batch_size=2, windows=seconds)[0]


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_no_seconds_is_the_anchors_own_row_where_stamps_repeat(alignment: Any) -> None:
    """With stamps 0, 0, 1, 1, 1 the reward of row 3 is its own, and the last arrived row has none."""
    store, shift = timed([5], [0, 0, 1, 1, 1], alignment), SHIFT[alignment]
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
    return BatchSource(timed([5], range(5)), batch_size=1, windows={"action": seconds}, **options)


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
