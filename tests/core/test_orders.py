"""In whatever order batches are asked for, and by however many threads, they are what the oracle says.

Nothing shows that many batches are planned and copied together.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, DatasetStore
from mouse_core.batches import _planner
from mouse_core.batches import source as _source
from mouse_core.batches._planner import Planner
from mouse_core.sampling import WindowSampler
from mouse_core.store import _segments
from mouse_core.store.snapshot import Snapshot
from tests.core.oracle import assert_same, field_arrays, windows
from tests.core.test_batches import configurations
from tests.core.worlds import CUSTOM_RULES, Part, World, build, numbered, parts, worlds
from tests.waiting import together


@st.composite
def orders(draw: st.DrawFn) -> list[int]:
    """Stretches forwards, backwards, with steps between, in pairs swapped, as of several workers; and shuffled ones."""
    asked: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        first, count = draw(st.integers(0, 90)), draw(st.integers(1, 40))
        how = draw(st.sampled_from(["steps", "swapped", "shuffled", "two"]))
        stretch = list(range(first, first + count))
        if how == "steps":
            step = draw(st.sampled_from([1, 1, -1, 2, 3, 4, -2, 7, 64, 65, 0]))
            stretch = list(range(first, first + step * count, step)) if step else [first] * count
        elif how == "swapped":
            stretch = [index ^ 1 for index in stretch]
        elif how == "shuffled":
            stretch = draw(st.permutations(stretch)) * 2
        else:  # two workers that take turns, one of them far ahead
            far = draw(st.sampled_from([1, 5, 300]))
            stretch = [
                index for pair in zip(stretch, (index + far for index in stretch), strict=True) for index in pair
            ]
        asked += [index for index in stretch if index >= 0]
    return asked


@given(
    data=st.data(),
    world=worlds(),
    wanted=parts(max_parts=3),
    order=orders(),
    most=st.sampled_from([1, 6, 40, 8192]),
    kept=st.sampled_from([0, 3000, 1 << 25]),
    runs=st.sampled_from([0, 1 << 21]),
)
def test_any_order_gives_what_the_oracle_says(
    data: st.DataObject, world: World, wanted: list[Part], order: list[int], most: int, kept: int, runs: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dense_bytes = data.draw(st.sampled_from([100, 2000, 1 << 20]) | st.just(0))
        built = build(world, wanted, Path(folder), dense_bytes=dense_bytes)
        assume(built.rows)
        options = data.draw(configurations(len(built.rows)))
        dtypes = data.draw(st.sampled_from([{}, {"obs_continuous": "float32", "time": "float64", "done": "int8"}]))
        begin = data.draw(st.sampled_from([0, 0, 3]))
        shard = data.draw(st.sampled_from([(0, 1), (0, 1), (1, 2)]))
        assume(options["batch_size"] % shard[1] == 0)
        short = len(built.rows) // options["sequence_length"] % options["batch_size"]  # the last batch of an epoch
        assume(options["sampling"] != "sequential" or options["drop_last"] or short % shard[1] == 0)
        with (
            patch.object(_planner, "_KEPT_BYTES", kept),
            patch.object(_source, "planned_windows", lambda *_: most),
            patch.multiple(_segments, _MOST_RUNS=runs, _LOOKED_AT=16),
        ):
            arrays = field_arrays(built.rows, widths=world.widths, custom=CUSTOM_RULES, dtypes=dtypes)
            dtypes = {name: dtype for name, dtype in dtypes.items() if name in arrays}
            source = BatchSource(built.store, epoch_start=begin, shard=shard, dtypes=dtypes, **options)
            sampler, length = source.sampler, source.sequence_length
            for index in (begin + index for index in order):
                starts = sampler.starts(source.seed, index, source.snapshot, begin)
                mine = starts[len(starts) * shard[0] // shard[1] : len(starts) * (shard[0] + 1) // shard[1]]
                batch = source[index]
                assert_same(batch, windows(arrays, mine, length), (index, order))
                for values in batch.values():  # what is done to it stays with it
                    values[...] = 0
            assert built.store._budget.used <= dense_bytes


@pytest.mark.parametrize(("sampling", "threads"), [("random", 2), ("random", 4), ("sequential", 3)])
def test_threads_in_any_order(sampling: str, threads: int) -> None:
    store = numbered(700)
    rng = np.random.default_rng(threads)
    turns = np.array_split(np.arange(300) ^ 1, threads)
    for asked in (
        [np.arange(number, 400, threads) for number in range(threads)],
        [rng.permutation(300) for _ in range(threads)],
        [*turns[:-1], turns[-1][::-1]],
    ):
        with patch.object(_source, "planned_windows", lambda *_: 90):
            source = BatchSource(store, 4, 3, sampling=sampling, drop_last=False)

            def work(order: list[int], source: BatchSource = source) -> None:
                for index in order:
                    batch = source[index]
                    starts = source.sampler.starts(0, index, source.snapshot, 0)
                    assert np.array_equal(batch["reward"], starts[:, None] + np.arange(4)), index
                    for values in batch.values():
                        values[...] = 0

            together([partial(work, order.tolist()) for order in asked])


class Counting:
    sequence_length, batch_size = 4, 3

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        return 100

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Any:
        self.asked.append(index)
        return np.arange(3) + index % 50


@pytest.mark.parametrize("order", ["shuffled", "backwards", "swapped", "every fourth"])
def test_batches_in_other_orders_are_planned_together(order: str) -> None:
    """Each batch is drawn about once, and planned in few blocks."""
    store = DatasetStore()
    store.extend({"action": np.zeros(90), "reward": np.zeros(90), "done": np.zeros(90, np.int64)})
    sampler: WindowSampler = Counting()
    with patch.object(_source, "planned_windows", lambda *_: 300):  # blocks of 100 batches
        source = BatchSource(store, sampling=sampler)
        indices = {
            "shuffled": np.random.default_rng(0).permutation(400).tolist() * 2,
            "backwards": list(range(400))[::-1],
            "swapped": [index ^ 1 for index in range(400)],
            "every fourth": list(range(1, 400, 4)),
        }[order]
        with patch.object(Planner, "block", autospec=True, side_effect=Planner.block) as made:
            for index in indices:
                source[index]
        assert made.call_count <= 4 * (_planner._ALONE_FIRST + 1)
        assert len(sampler.asked) <= 520  # type: ignore[attr-defined]


def test_batches_nobody_comes_for_are_dropped() -> None:
    store = DatasetStore()
    store.extend({"action": np.zeros(900), "reward": np.zeros(900), "done": np.zeros(900, np.int64)})
    source = BatchSource(store, 4, 3)
    for first in range(0, 100_000, 1000):
        for index in range(first, first + 3):
            source[index]
        assert len(source._pipeline._ready) <= 2 * 64
    assert len(source._pipeline.blocks.kept) <= 48


def owner(values: Any) -> Any:
    while isinstance(values, np.ndarray) and values.base is not None:
        values = values.base
    return values


def test_kept_fields_do_not_keep_all_that_was_copied_with_them() -> None:
    """A field of every fiftieth batch: of several megabytes that were copied together for a few, then of its own."""
    rows = 20_000
    store = DatasetStore()
    codes = {"action": np.arange(rows) % 4, "done": np.zeros(rows, np.int64)}
    store.extend({**codes, "reward": np.arange(rows, dtype=np.float32), "observation": np.ones((rows, 17), np.float32)})
    source, wanted = BatchSource(store, 8, 32), BatchSource(store, 8, 32)
    kept = {index: batch["reward"] for index in range(4000) if (batch := source[index]) and index % 50 == 0}

    def pinned() -> list[int]:
        owners = {id(found): found for found in map(owner, kept.values())}
        return [found.nbytes if isinstance(found, np.ndarray) else found.size for found in owners.values()]

    own = sum(values.nbytes for values in source[0].values())
    assert sum(pinned()) <= 9 * max(pinned()) + len(kept) * own
    before = sum(pinned())
    for index in range(4000, 6000):
        batch = source[index]
        if index % 50 == 0:
            kept[index] = batch["reward"]
    assert sum(pinned()) - before <= 40 * own, "each keeps its own batch, no more"
    for index in (0, 3950, 4000, 5950):
        np.testing.assert_array_equal(kept[index], wanted[index]["reward"])


class Plain:
    """A sampler that knows nothing of planning together, and fails at one index."""

    sequence_length, batch_size = 4, 3

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        return 10

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Any:
        if index == 37:
            raise OSError("no starts today")
        if index == 40:
            return [0.5]
        return (np.arange(1 + index % 3) * 7 + index) % (snapshot.num_rows - 4)


def test_a_simple_sampler_works_and_fails_where_it_fails() -> None:
    store = numbered(300)
    for order in (range(60), range(59, -1, -1)):
        source = BatchSource(store, sampling=Plain())
        for index in order:
            if index == 37:
                with pytest.raises(OSError, match="no starts today"):
                    source[index]
            elif index == 40:
                with pytest.raises(ConfigError, match="for batch 40"):
                    source[index]
            else:
                starts = (np.arange(1 + index % 3) * 7 + index) % 296
                np.testing.assert_array_equal(source[index]["reward"], starts[:, None] + np.arange(4))
