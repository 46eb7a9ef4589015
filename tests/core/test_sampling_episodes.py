"""Windows within episodes: laws against a list of rows, how often each comes, and streams that must never change."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    AugmentTokensConfig,
    BatchSource,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    PrefetchBatchifier,
    StateError,
)
from mouse_core.episodes import SortedSearch
from mouse_core.errors import StoreWarning
from mouse_core.replay import NextView, ReplayBuffer
from mouse_core.sampling import EpisodeWindows, PaddedSampler
from tests.core.statistics import check_frequencies
from tests.core.test_windows_by_field import store_of as stored
from tests.raising import assert_raises


def rows_of(lengths: list[int], first: int = 0, *, ends: bool = True, time: bool = True) -> dict[str, Any]:
    count = sum(lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    done = np.concatenate([np.arange(length) == length - 1 for length in lengths]).astype(np.int64)
    rows: dict[str, Any] = {"action": np.zeros(count, np.int64), "reward": np.arange(first, first + count, dtype=float)}
    rows["done"] = done * (1 + steps % 2) if ends else np.zeros(count, np.int64)
    return {**rows, "episode_step": steps} if time else rows


def store_of(lengths: list[int], kind: str = "rows", **options: Any) -> DatasetStore:
    return stored(rows_of(lengths, **options), kind)


def episodes_of(lengths: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


lengths_of = st.lists(st.integers(1, 12), min_size=1, max_size=10)


@given(
    lengths=lengths_of,
    length=st.integers(1, 7),
    batch_size=st.sampled_from([1, 2, 4, 6]),
    sampling=st.sampled_from(["random", "sequential", "batch", "blocks", "last"]),
    trajectory=st.booleans(),
    pad=st.sampled_from([True, False, 0, None]),
    kind=st.sampled_from(["rows", "table", "parts", "indices"]),
    seed=st.integers(0, 2**64 - 1),
)
def test_windows_lie_in_one_episode(
    lengths: list[int], length: int, batch_size: int, sampling: str, trajectory: bool, pad: Any, kind: str, seed: int
) -> None:
    options: dict[str, Any] = {"sampling": sampling, "boundary": "episode", "pad": pad, "seed": seed}
    if trajectory and sampling == "random":
        options["weighting"] = "trajectory"
    store = store_of(lengths, kind)
    short = pad is not False
    tiles = sum(-(-steps // length) if short else steps // length for steps in lengths)
    if tiles < (batch_size if sampling in ("sequential", "last") else 1):
        assert_raises(ConfigError, "sampling: expected", BatchSource, store, length, batch_size, **options)
        return
    source = BatchSource(store, length, batch_size, **options)
    episodes = episodes_of(lengths)
    assert store.snapshot().episode_starts.tolist() == [begin for begin, _ in episodes]
    if sampling != "last":
        assert len(source) == (tiles // batch_size if sampling == "sequential" else -(-tiles // batch_size))
    for index in (0, 1, 7):
        batch, starts = source[index], source.plan(index).starts.tolist()
        assert batch["mask"].dtype == bool
        assert batch["mask"].shape == (batch_size, length)
        for start, rewards, mask, time in zip(
            starts, batch["reward"].tolist(), batch["mask"].tolist(), batch["time"].tolist(), strict=True
        ):
            begin, end = next(episode for episode in episodes if episode[0] <= start < episode[1])
            there = min(length, end - start)
            assert short or there == length
            assert mask == [True] * there + [False] * (length - there)
            last = start + there - 1
            filled = 0 if pad == 0 and pad is not False else last
            assert rewards == [*range(start, start + there), *[filled] * (length - there)]
            assert time[:there] == list(range(start - begin, start - begin + there))
            if sampling != "random":
                assert (start - begin) % length == 0
            else:
                assert there == length or start == begin
    whole = source[3]
    for count in (1, 2):
        if batch_size % count == 0:
            parts = [source.with_options(shard=(rank, count))[3] for rank in range(count)]
            for name, values in whole.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again[3]["reward"], whole["reward"])
    assert again.fingerprint == source.fingerprint
    # A plan made elsewhere, without its windows.
    np.testing.assert_array_equal(source.gather(pickle.loads(pickle.dumps(source.plan(3))))["mask"], whole["mask"])


@given(
    lengths=lengths_of, length=st.integers(1, 5), pad=st.booleans(), sampling=st.sampled_from(["sequential", "batch"])
)
def test_an_epoch_has_every_window_once(lengths: list[int], length: int, pad: bool, sampling: str) -> None:
    every = [
        start
        for begin, end in episodes_of(lengths)
        for start in range(begin, end, length)
        if pad or start + length <= end
    ]
    if not every:
        return
    source = BatchSource(store_of(lengths), length, 3, sampling, boundary="episode", pad=pad, drop_last=False)
    batches = -(-3 * len(every) // 3) if sampling == "batch" else 3 * len(source)
    stream = [start for index in range(batches) for start in source.plan(index).starts.tolist()]
    for epoch in range(3):
        assert sorted(stream[epoch * len(every) : (epoch + 1) * len(every)]) == every


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("weighting", ["step", "trajectory"])
def test_weighting(weighting: Any, pad: bool) -> None:
    lengths, length = [3, 4, 9, 30, 2, 12], 4
    source = BatchSource(store_of(lengths), length, 3000, boundary="episode", weighting=weighting, pad=pad, seed=5)
    drawn = np.concatenate([source.plan(index).starts for index in range(12)])
    expected = np.zeros(sum(lengths))
    for begin, end in episodes_of(lengths):
        count = max(end - begin - length + 1, 1 if pad else 0)
        expected[begin : begin + count] = 1.0 if weighting == "step" else 1.0 / max(count, 1)
    check_frequencies(np.bincount(drawn, minlength=len(expected)), expected / expected.sum())


def test_times_say_where_an_episode_was_broken_off() -> None:
    for kind in ("rows", "table", "parts", "indices"):
        joins = [7] if kind == "parts" else []
        store = store_of([4, 1, 6, 3], kind, ends=False)
        assert store.snapshot().episode_starts.tolist() == [0, 4, 5, 11]
        untimed = store_of([4, 1, 6, 3], kind, ends=False, time=False)
        assert untimed.snapshot().episode_starts.tolist() == [0, *joins]
        ended = store_of([4, 1, 6, 3], kind, time=False)
        assert ended.snapshot().episode_starts.tolist() == sorted([0, 4, 5, 11, *joins])
    assert store_of([3, 3], "parts", time=False).snapshot().episode_starts.tolist() == [0, 3]
    # Times that are not known say nothing; larger steps of time are no boundary.
    rows = rows_of([9])
    rows["episode_step"] = [0, 2, None, None, 4, 4, None, 0, 1]
    store = DatasetStore().from_dataset(pa.table(rows))
    assert store.snapshot().episode_starts.tolist() == [0, 5, 7]


def untimed(first: int, done: int = 0) -> Dataset:
    rows = {"observation": [[float(row)] for row in range(first, first + 4)], "done": [0, 0, 0, done]}
    return Dataset.from_dict({**rows, "action": [0] * 4, "reward": [0.0] * 4})


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_dataset_that_was_loaded_on_its_own_begins_an_episode(on_disk: bool, tmp_path: Path) -> None:
    row = {"observation": [400.0], "done": 0, "action": 0, "reward": 0.0}
    expected = [0, 4, 8, 12, 16, 18]
    with DatasetStore.open(tmp_path / "rows", "a") if on_disk else DatasetStore() as store:
        store.from_dataset(untimed(0)).from_dataset(untimed(100, 1)).from_dataset(
            {"a": untimed(200), "b": untimed(300)}
        )
        store.extend([row, row])
        store.from_dataset(untimed(500))
        stores = [store.snapshot(), pickle.loads(pickle.dumps(store.snapshot()))]
        store.flush()
        if on_disk:
            stores += [DatasetStore.open(tmp_path / "rows").snapshot()]
        for snapshot in stores:
            assert snapshot.episode_starts.tolist() == expected
        starts = BatchSource(store, 3, 300, boundary="episode", pad=False).plan(0).starts
        assert set(starts.tolist()) == {0, 1, 4, 5, 8, 9, 12, 13, 18, 19}
        batch = ReplayBuffer(store, transform=NextView(takes="arrived"), batch_size=300).sample()
        steps = (batch["next"]["obs_continuous"] - batch["obs_continuous"])[batch["mask"], 0]
        assert set(steps.tolist()) <= {1.0, 0.0}
        with pytest.warns(StoreWarning, match="joins two episodes at row 4, and at 3 other rows"):
            store.save(tmp_path / "saved")


def test_small_datasets_are_put_together_and_many_segments_found(tmp_path: Path) -> None:
    files = []
    for name, done in (("ended", 1), ("open", 0)):
        with DatasetStore.open(tmp_path / name, "a") as store:
            for first in range(0, 48, 4):
                store.from_dataset(untimed(first, done))
        with DatasetStore.open(tmp_path / name, "a") as store:
            assert store.snapshot().episode_starts.tolist() == list(range(0, 48, 4))
        files.append(len(list((tmp_path / name / "segments").iterdir())))
    assert files[0] < files[1] == 12
    lengths = np.random.default_rng(0).integers(1, 400, 3000).tolist()
    rows = rows_of(lengths)
    table = pa.table(rows)
    store = DatasetStore().from_dataset(table.slice(0, 300_001)).from_dataset(table.slice(300_001))
    expected = [begin for begin, _ in episodes_of(lengths)]
    assert store.snapshot().episode_starts.tolist() == expected
    part = store.snapshot(300_500)
    assert part.episode_starts.tolist() == [begin for begin in expected if begin < 300_500]


def test_new_rows_belong_to_the_episode_that_was_under_way() -> None:
    rows = rows_of([6, 8])
    store = DatasetStore()
    store.extend({name: values[:9] for name, values in rows.items()})
    with PrefetchBatchifier(store, 8, 2, "sequential", boundary="episode", num_workers=1) as loader:
        assert sorted(loader.next_batch()["mask"].sum(axis=1).tolist()) == [3, 6]
        store.extend({name: values[9:] for name, values in rows.items()})
        loader.refresh()
        assert sorted(loader.next_batch()["mask"].sum(axis=1).tolist()) == [6, 8]
        assert store.snapshot().episode_starts.tolist() == [0, 6]
        state = loader.state_dict()
        later = loader.next_batch()
    with PrefetchBatchifier(store, 8, 2, "sequential", boundary="episode", num_workers=0) as loader:
        loader.load_state_dict(state)
        np.testing.assert_array_equal(loader.next_batch()["reward"], later["reward"])
    for options in ({}, {"boundary": "episode", "pad": False}, {"boundary": "episode", "pad": 0}):
        with (
            PrefetchBatchifier(store, 6, 2, "batch", boundary="episode") as loader,
            PrefetchBatchifier(store, 6, 2, "batch", **options) as other,
            pytest.raises(StateError, match="state: expected a state of this dataset and configuration; "),
        ):
            other.load_state_dict(loader.state_dict())


def test_codes_that_do_not_exist_are_named_and_options_part_of_the_fingerprint() -> None:
    store = store_of([9, 3, 5])
    prints = [
        BatchSource(store, 4, 2, **options).fingerprint
        for options in (
            {},
            {"boundary": "episode"},
            {"boundary": "episode", "weighting": "trajectory"},
            {"boundary": "episode", "pad": False},
            {"boundary": "episode", "pad": 0},
            {"boundary": "episode", "sampling": "batch"},
        )
    ]
    assert len(set(prints)) == len(prints)
    rows = rows_of([9])
    rows["done"][6] = 5
    store = DatasetStore().from_dataset(pa.table(rows))
    assert_raises(DataError, r"done: expected one of .* found 5 at row 6", BatchSource, store, 4, 2, boundary="episode")


def test_the_mask_is_a_field_like_others() -> None:
    store = store_of([9, 3, 5])
    source = BatchSource(store, 4, 2, boundary="episode", fields=["reward"], dtypes={"mask": "float32"})
    assert list(source.spec) == ["reward", "mask"]
    assert source.spec["mask"].dtype == np.float32
    assert source[0]["mask"].dtype == np.float32
    plain = BatchSource(store, 4, 2, boundary="episode")
    layout = plain.layout(2)
    slab = np.empty(layout.nbytes, np.uint8)
    written = plain.gather(plain.plan(5), layout.arrays(slab))
    np.testing.assert_array_equal(written["mask"], plain[5]["mask"])
    views = BatchSource(
        store, 4, 2, boundary="episode", views=2, augment=AugmentTokensConfig(permute_action="both", max_num_actions=4)
    )
    for view in views[5]:
        np.testing.assert_array_equal(view["mask"], plain[5]["mask"])
    assert "mask" not in BatchSource(store, 4, 2).spec
    filled = BatchSource(store, 4, 2, boundary="episode", pad=1)[5]
    np.testing.assert_array_equal(filled["mask"], plain[5]["mask"])
    assert (filled["reward"][~filled["mask"]] == 1).all()
    assert not filled["mask"].all()
    assert isinstance(EpisodeWindows(4, 2), PaddedSampler)
    own = DatasetStore(fields=[Field("mask")])
    own.extend({**rows_of([5]), "mask": np.zeros(5)})
    with pytest.raises(ConfigError, match="boundary, uneven: expected a store without a field 'mask'"):
        BatchSource(own, 4, 1, boundary="episode")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"boundary": "episodes"}, "boundary: expected one of"),
        ({"weighting": "trajectory"}, "boundary: with weighting='trajectory', expected 'episode'"),
        ({"pad": False}, "boundary: with pad=False, expected 'episode'"),
        ({"boundary": "episode", "weighting": "length"}, "weighting: expected one of"),
        (
            {"boundary": "episode", "weighting": "trajectory", "sampling": "batch"},
            "weighting: with sampling 'batch', expected 'step'",
        ),
        ({"boundary": "episode", "pad": "zero"}, "pad: expected True, False or a number"),
        ({"boundary": "episode", "pad": 0.5}, "pad: expected a number that action"),
        ({"boundary": "episode", "pad": np.nan}, "pad: expected a number that action"),
        ({"boundary": "episode", "pad": 0, "views": 2}, "pad: with augment or views, expected True or False"),
        ({"boundary": "episode", "pad": False, "sequence_length": 10}, "at least 10 steps, found episodes of at most"),
        ({"boundary": "episode", "sampling": "everywhere"}, "sampling: expected one of"),
        (
            {"boundary": "episode", "sampling": EpisodeWindows(4, 2)},
            "boundary, weighting, pad: can be passed only when",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BatchSource(store_of([9, 3, 5]), **{"sequence_length": 4, "batch_size": 2, **options})


def test_the_streams_never_change() -> None:
    store = store_of([9, 6, 11, 2, 30, 1])
    found = {
        f"{sampling} {weighting} {pad}": [
            BatchSource(store, 5, 3, sampling, 2, boundary="episode", weighting=weighting, pad=pad)
            .plan(index)
            .starts.tolist()
            for index in range(2)
        ]
        for sampling, weighting, pad in (
            ("random", "step", True),
            ("random", "step", False),
            ("random", "trajectory", True),
            ("sequential", "step", True),
            ("batch", "step", False),
            ("last", "step", True),
        )
    }
    assert found == GOLDEN
    assert Counter(len(batch) for stream in found.values() for batch in stream) == {3: 12}


GOLDEN: dict[str, Any] = {
    "random step True": [[36, 48, 3], [51, 52, 48]],
    "random step False": [[35, 47, 3], [51, 51, 47]],
    "random trajectory True": [[26, 58, 4], [58, 58, 58]],
    "sequential step True": [[28, 25, 15], [5, 58, 53]],
    "batch step False": [[48, 38, 28], [9, 15, 0]],
    "last step True": [[48, 53, 58], [48, 53, 58]],
}


@given(
    steps=st.lists(st.sampled_from([0, 0, 1, 2, 3, 50, 1000]), max_size=40),
    more=st.integers(1, 500),
    looked_up=st.lists(st.floats(0, 1, exclude_max=True), max_size=30),
)
def test_many_numbers_are_found_among_sorted_ones(steps: list[int], more: int, looked_up: list[float]) -> None:
    numbers = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    end = int(numbers[-1]) + more
    asked = np.array([int(part * end) for part in looked_up] + [0, end - 1], np.int64)
    expected = [max(place for place, number in enumerate(numbers) if number <= one) for one in asked.tolist()]
    assert SortedSearch(numbers, end).find(asked).tolist() == expected
