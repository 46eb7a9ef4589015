"""In whatever order batches are asked for, and by however many threads, they are what the oracle says."""

import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mouse_core import BatchSource, DatasetStore
from mouse_core.batches import _planner
from mouse_core.batches import source as _source
from mouse_core.batches._planner import Planner
from mouse_core.sampling import WindowSampler
from mouse_core.store import _segments
from mouse_core.store.snapshot import Snapshot
from tests.core.oracle import assert_same, field_arrays, windows
from tests.core.test_batches import configurations
from tests.core.worlds import CUSTOM_RULES, Part, World, build, numbered, parts, worlds


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
        built = build(world, wanted, Path(folder))
        assume(built.rows)
        options = data.draw(configurations(len(built.rows)))
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
            source = BatchSource(built.store, epoch_start=begin, shard=shard, **options)
            arrays = field_arrays(built.rows, widths=world.widths, custom=CUSTOM_RULES)
            sampler, length = source.sampler, source.sequence_length
            for index in (begin + index for index in order):
                starts = sampler.starts(source.seed, index, source.snapshot, begin)
                mine = starts[len(starts) * shard[0] // shard[1] : len(starts) * (shard[0] + 1) // shard[1]]
                batch = source[index]
                assert_same(batch, windows(arrays, mine, length), (index, order))
                for values in batch.values():  # what is done to it stays with it
                    values[...] = 0


@pytest.mark.parametrize("sampling", ["random", "sequential"])
@pytest.mark.parametrize("threads", [2, 4])
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
            wrong: list[Any] = []
            begin = threading.Barrier(threads)

            def work(
                order: list[int], source: BatchSource = source, wrong: list[Any] = wrong, begin: Any = begin
            ) -> None:
                begin.wait()
                try:
                    for index in order:
                        batch = source[index]
                        starts = source.sampler.starts(0, index, source.snapshot, 0)
                        if not np.array_equal(batch["reward"], starts[:, None] + np.arange(4)):
                            wrong.append(index)
                        for values in batch.values():
                            values[...] = 0
                except BaseException as error:
                    wrong.append(error)

            running = [threading.Thread(target=work, args=(order.tolist(),)) for order in asked]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            assert not wrong


class Counting:
    """A sampler that counts what it is asked."""

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
