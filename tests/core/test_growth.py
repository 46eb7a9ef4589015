"""Sources that follow a growing store: the same batches as those of a source made afresh over the same rows."""

import gc
import pickle
import tempfile
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier, Snapshot
from tests.core.oracle import assert_same
from tests.core.worlds import Part, World, add_part, build, parts, worlds
from tests.waiting import together


def afresh(source: BatchSource) -> BatchSource:
    """The same over a snapshot that nothing is known of."""
    snapshot = pickle.loads(pickle.dumps(source.snapshot))
    options = {"seed": source.seed, "epoch_start": source.epoch_start}
    return BatchSource(snapshot, sampling=source.sampler, **options)


def assert_as_afresh(source: BatchSource, indices: range) -> None:
    fresh = afresh(source)
    assert source.spec == fresh.spec
    assert source.fingerprint == fresh.fingerprint
    assert len(source) == len(fresh)
    for index in indices:
        assert_same(source[index], fresh[index], index)
        assert_same(source.gather(source.plan(index)), fresh[index], index)


@settings(max_examples=8)
@given(world=worlds(), wanted=parts(max_parts=2), more=parts(max_parts=3), used=st.lists(st.booleans(), min_size=4))
def test_a_source_follows_its_store_and_what_comes_later_never_changes_a_batch(
    world: World, wanted: list[Part], more: list[Part], used: list[bool]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = build(world, wanted, Path(folder) / "first")
        rows, options = len(built.rows), (max(1, len(built.rows) // 2), 3)
        if not rows:
            return
        sources = [BatchSource(built.store, *options, seed=1)]
        before = [sources[0][index] for index in range(3)]
        for number, part in enumerate(more):
            if used[number % len(used)]:
                assert_as_afresh(sources[-1], range(5 * number, 5 * number + 3))
            add_part(world, built, part, Path(folder) / f"more-{number}")
            sources.append(sources[-1].with_snapshot(built.store.snapshot(), epoch_start=5 * number))
        for number, source in enumerate(sources):
            assert_as_afresh(source, range(5 * number, 5 * number + 3))
        # The same rows as the store saw them then, taken from the store as it is now.
        cut = BatchSource(built.store.snapshot(rows), *options, seed=1)
        assert len(sources[0].snapshot) == len(cut.snapshot) == rows
        assert built.store.snapshot().num_rows == len(built.store) == len(built.rows)
        for index, batch in enumerate(before):
            assert_same(sources[0][index], batch, index)
            assert_same(cut[index], batch, index)


def a_row(number: int) -> dict[str, Any]:
    """Regular at first, then with nulls and short rows."""
    late = number % 997 > 600
    return {
        "action": number % 3,
        "reward": 0.5 * number,
        "done": int(number % 50 == 49),
        "episode_step": None if late and number % 7 == 0 else number % 50,
        "observation": np.arange(number, number + (2 if late and number % 11 == 0 else 3), dtype=np.float32),
        "metadata_q_star": None if number < 300 else np.array([number, 1.0, 2.0]),
        "note": f"row {number}",
    }


def a_store() -> DatasetStore:
    return DatasetStore(max_action_dim=3, max_obs_continuous_dim=3)


def test_rows_appended_one_by_one() -> None:
    """Through blocks that are opened, become irregular and are sealed; with a source that is not asked each time."""
    store = a_store()
    first = a_row(0)
    store.from_dataset(pa.table({name: [value] * 40 for name, value in first.items() if value is not None}))
    sources = [BatchSource(store, 16, 4, seed=2)]
    sources[0][0]
    for number in range(2600):
        row = a_row(number)
        store.append(row if "metadata_q_star" in store.columns else {name: row[name] for name in store.columns})
        if number % 37 == 36:
            sources.append(sources[-1].with_snapshot(store.snapshot(), epoch_start=0))
            if number % 74 > 37:
                sources[-1][number]
    for source in sources[:: max(1, len(sources) // 6)]:
        assert_as_afresh(source, range(6))


def test_a_reader_of_a_folder_whose_rows_become_irregular(tmp_path: Path) -> None:
    """What it keeps of the columns of a file holds until the first null, and the first row of another length."""
    options = {"max_action_dim": 3, "max_obs_continuous_dim": 3}
    with DatasetStore.open(tmp_path, "a", **options) as store:
        store.extend([a_row(number) for number in range(300, 340)])
        store.flush()
        reader = DatasetStore.open(tmp_path, **options)
        sources = [BatchSource(reader, 16, 4, seed=2)]
        for number in range(340, 740, 8):
            store.extend([a_row(number + one) for one in range(8)])
            store.flush()
            sources.append(sources[-1].with_snapshot(reader.snapshot(), epoch_start=0))
            if number % 3 == 0:
                sources[-1][number]
        for source in sources[::10]:
            assert_as_afresh(source, range(4))


def afterwards(rows: int) -> tuple[Any, ...]:
    store = a_store()
    for number in range(rows):
        store.append(a_row(number + 700))
    return store.snapshot().segments


def test_what_is_growth() -> None:
    store = a_store()
    for number in range(5):
        store.append(a_row(number))
    before = store.snapshot()
    assert store.snapshot().grown_from(before) == (1, (), ())
    store.append(a_row(5))
    grown = store.snapshot()
    assert grown.grown_from(before) == (0, grown.segments, before.segments)
    store.from_dataset(pa.table({name: [value] for name, value in a_row(400).items()}))
    others = (grown, Snapshot((), grown.config)), (before, grown), (Snapshot(afterwards(9), grown.config), before)
    for later, earlier in (*others, (store.snapshot(), grown)):
        assert later.grown_from(earlier) is None


def test_followers_in_other_threads() -> None:
    """One thread appends and takes snapshots while others draw from the sources that it made, old and new ones."""
    store = a_store()
    for number in range(700, 760):
        store.append(a_row(number))
    sources = [BatchSource(store, 8, 4, seed=3)]

    done = threading.Event()

    def append() -> None:
        try:
            for number in range(1500):
                store.append(a_row(number))
                if number % 25 == 0:
                    sources.append(sources[-1].with_snapshot(store.snapshot(), epoch_start=0))
        finally:
            done.set()

    def read(step: int) -> None:
        index = 0
        while not done.is_set():
            known = list(sources)
            source = known[-1 - (index * step) % len(known)]
            assert_same(source[index], afresh(source)[index], index)
            index += 1

    together([append, *(partial(read, step) for step in (0, 1, 3))])


def test_rows_that_nobody_has_are_let_go_of_at_once(tmp_path: Path) -> None:
    """And not when Python looks for circles: a writer keeps the files of rows that somebody has."""
    with DatasetStore.open(tmp_path, "a") as store:
        store.extend([a_row(number) for number in range(60)])
    gc.collect()
    gc.disable()
    try:
        with PrefetchBatchifier(DatasetStore.open(tmp_path), 8, 4, num_workers=2) as loader:
            loader.next_batch()
            snapshot = weakref.ref(loader.source.snapshot)
            assert snapshot() is not None
            loader.refresh()
        del loader
        assert snapshot() is None
    finally:
        gc.enable()
