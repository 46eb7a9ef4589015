"""One store, many readers: threads that share a source, processes that inherit one, columns of gigabytes."""

import dataclasses
import os
import signal
import threading
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore, Field
from tests.core.killing import in_child
from tests.core.oracle import assert_same
from tests.waiting import together


def many_chunks(rows: int = 3000, chunk: int = 7) -> pa.Table:
    numbers = np.arange(rows)
    table = pa.table(
        {
            "action": numbers % 3,
            "reward": numbers * 0.5,
            "done": np.zeros(rows, np.int64),
            "observation": pa.array([[n * 1.0] * (1 + n // 500 % 3) for n in range(rows)]),
            "episode_step": pa.array([None if n % 50 == 3 else n for n in range(rows)]),
        }
    )
    return pa.Table.from_batches(table.to_batches(max_chunksize=chunk))


@pytest.mark.parametrize("attempt", range(2))
def test_many_threads_share_a_fresh_source(attempt: int) -> None:
    """What a source learns about its columns on first use, it learns from several threads at once."""
    table = many_chunks()
    reference = BatchSource(DatasetStore(max_obs_continuous_dim=3).from_dataset(table), 20, 16, seed=attempt)
    wanted = [reference[index] for index in range(48)]
    source = BatchSource(DatasetStore(max_obs_continuous_dim=3).from_dataset(table), 20, 16, seed=attempt)

    def read(first: int) -> None:
        for index in range(first, 48, 4):
            assert_same(source[index], wanted[index], index)

    together([partial(read, number % 4) for number in range(8)])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_forked_at_any_moment_can_read() -> None:
    """While threads of the parent use the same store, and perhaps hold one of its locks."""
    stores = [DatasetStore(max_obs_continuous_dim=3).from_dataset(many_chunks()) for _ in range(12)]
    wanted, at, stop = BatchSource(stores[0], 20, 16)[3]["reward"], [1], threading.Event()

    def use() -> None:
        index = 0
        while not stop.is_set():
            BatchSource(stores[at[0]], 20, 16)[index % 50]
            index += 1

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for at[0] in range(1, 12):

            def read(store: DatasetStore = stores[at[0]]) -> None:
                signal.alarm(20)
                np.testing.assert_array_equal(BatchSource(store, 20, 16)[3]["reward"], wanted)

            in_child(read)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Interrupted(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that interrupt")
def test_an_interrupt_leaves_no_lock_taken() -> None:
    """Whether it comes when a store's lock was just taken, or is about to be freed."""

    def interrupted(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        for number in range(200):
            store = DatasetStore()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-6 * number)
                while True:
                    with store.lock:
                        pass
            except Interrupted:
                pass
            other = threading.Thread(target=store.append, args=({"action": 0, "reward": 1.0, "done": 0},), daemon=True)
            other.start()
            other.join(timeout=20)
            assert len(store) == 1, f"the lock is taken for ever after interrupt {number}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_columns_of_several_gigabytes() -> None:
    """Three gigabytes of zeros, which take no memory until they are read, around marks where offsets grow long."""
    rows, width = 3_000_000, 1000
    try:
        pixels = np.zeros(rows * width, np.uint8)
    except MemoryError:
        pytest.skip("the system does not promise memory that is not there")
    frames = pixels.reshape(rows, width)
    begin = pixels.ctypes.data
    # Rows across multiples of 2**30 in memory, and around offsets of 2**31 in the column.
    edges = [(place - begin) // width for place in range((begin >> 30) + 1 << 30, begin + pixels.nbytes, 1 << 30)]
    edges += [(1 << 31) // width, 0, rows - 1]
    for mark, edge in enumerate(edges, start=1):
        frames[max(0, edge - 2) : edge + 2] = mark
    table = pa.table(
        {
            "action": np.zeros(rows, np.int8),
            "reward": np.arange(rows, dtype=np.float32),
            "done": np.zeros(rows, np.int8),
            "frame": pa.FixedSizeListArray.from_arrays(pa.array(pixels), width),
        }
    )

    @dataclasses.dataclass(frozen=True)
    class AtEdges:
        sequence_length: int = 40
        batch_size: int = len(edges)

        def batches_per_epoch(self, snapshot: object) -> int:
            return 1

        def starts(self, seed: int, index: int, snapshot: object, epoch_start: int) -> np.ndarray:
            return np.clip(np.array(edges) - 20 + index % 3, 0, rows - 40)

    for dtype in ("uint8", "int64"):
        store = DatasetStore(fields=[Field("frame", dtype=dtype)]).from_dataset(table)
        source = BatchSource(store, sampling=AtEdges())
        for index in range(3):
            batch, at = source[index], source.plan(index).starts[:, None] + np.arange(40)
            assert np.array_equal(batch["reward"], at)
            assert np.array_equal(batch["frame"], frames[at])
            assert batch["frame"].dtype == dtype
            assert batch["frame"].max() == len(edges)
