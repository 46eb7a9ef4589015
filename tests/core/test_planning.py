"""Planning many batches together and copying several at a time: nothing of it shows."""

import threading
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore
from mouse_core.store.snapshot import Snapshot
from tests.core.worlds import numbered

ROWS = 300


@pytest.fixture(scope="module")
def store() -> DatasetStore:
    return numbered(ROWS)


@pytest.mark.parametrize("sampling", ["random", "last", "sequential", "batch", "blocks"])
@pytest.mark.parametrize("boundary", [0, 5])
def test_any_order_of_asking_gives_the_same(store: DatasetStore, sampling: str, boundary: int) -> None:
    options: dict[str, Any] = {"sampling": sampling, "seed": 4, "drop_last": False, "epoch_start": boundary}
    alone = [BatchSource(store, 4, 3, **options)[boundary + index] for index in range(40)]
    orders = [[*range(40)], [*range(39, -1, -1)], np.random.default_rng(0).permutation(40).tolist() * 2]
    for order in orders:
        source = BatchSource(store, 4, 3, **options)
        for index in order:
            batch = source[boundary + index]
            assert list(batch) == list(alone[index])
            for name, values in alone[index].items():
                np.testing.assert_array_equal(batch[name], values)


def test_what_is_done_to_a_batch_stays_with_it(store: DatasetStore) -> None:
    """Batches that were copied together share a stretch of memory, but no byte of it."""
    source, other = BatchSource(store, 4, 3), BatchSource(store, 4, 3)
    wanted = [{name: values.copy() for name, values in other[index].items()} for index in range(80)]
    for index in (*range(80), *range(80), 70, 3, 3):
        batch = source[index]
        for name, values in batch.items():
            np.testing.assert_array_equal(values, wanted[index][name])
            values[...] = 77


def owner(values: Any) -> Any:
    """What keeps the memory of an array alive."""
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


def test_threads_that_ask_in_turn(store: DatasetStore) -> None:
    other = BatchSource(store, 4, 3)
    wanted = [other[index]["reward"] for index in range(400)]
    for threads in (2, 5):
        source, wrong, handed = BatchSource(store, 4, 3), [], iter(range(400))
        lock = threading.Lock()

        def work(source: Any = source, wrong: list[int] = wrong, handed: Any = handed, lock: Any = lock) -> None:
            def following() -> int | None:
                with lock:
                    return next(handed, None)

            for index in iter(following, None):
                batch = source[index]
                if not np.array_equal(batch["reward"], wanted[index]):
                    wrong.append(index)
                for values in batch.values():
                    values[...] = 0

        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not wrong


def test_a_code_that_is_not_allowed_fails_its_own_batch_alone() -> None:
    store = DatasetStore()
    done = np.zeros(200, np.int64)
    done[123] = 7
    columns = {"action": np.zeros(200, np.int64), "reward": np.zeros(200, np.float32), "done": done}
    store.from_dataset(Dataset.from_dict(columns))
    source = BatchSource(store, 5, 2, sampling="sequential")
    failed = []
    for index in (*range(20), *range(20)):
        holds = any(start <= 123 < start + 5 for start in source.plan(index).starts.tolist())
        if holds:
            with pytest.raises(DataError, match=r"done: expected one of 0 .* found 7 at row 123"):
                source[index]
            failed.append(index)
        else:
            source[index]
    assert len(failed) == 2


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


def test_a_simple_sampler_works_and_fails_where_it_fails(store: DatasetStore) -> None:
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
                starts = (np.arange(1 + index % 3) * 7 + index) % (ROWS - 4)
                np.testing.assert_array_equal(source[index]["reward"], starts[:, None] + np.arange(4))
