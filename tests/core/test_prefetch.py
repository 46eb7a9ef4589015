"""The loader: order, errors that stay, closing, being abandoned, forking, and leaving the interpreter."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import (
    BatchSource,
    ClosedError,
    DatasetStore,
    FieldSpec,
    MouseError,
    PrefetchBatchifier,
    Spec,
    WorkerError,
)
from mouse_core.prefetch import Delivery, Loader
from tests.core.oracle import assert_same
from tests.raising import assert_raises
from tests.waiting import wait_until


def store_of(rows: int = 200) -> DatasetStore:
    return DatasetStore().from_dataset(
        pa.table({"action": np.arange(rows) % 3, "reward": np.arange(rows) * 0.5, "done": np.zeros(rows, np.int64)})
    )


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mouse-")]


def left_threads() -> bool:
    for seconds in (0.5, 1, 2, 60):
        if not our_threads():
            return False
        gc.collect()
        if wait_until(lambda: not our_threads(), seconds):
            return False
    return True


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    assert not left_threads(), f"an earlier test left threads: {our_threads()}"
    yield
    assert not left_threads(), our_threads()


class Held:
    def __init__(self, source: BatchSource, blocked: set[int]) -> None:
        self.source = source
        self.gates = {index: threading.Event() for index in blocked}
        self.begun: list[int] = []
        self.made: list[int] = []

    def __call__(self, source: BatchSource) -> Callable[[int], Any]:
        return self.make

    def make(self, index: int) -> Any:
        self.begun.append(index)
        if index in self.gates:
            self.gates[index].wait(120)
        self.made.append(index)
        return self.source[index]

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_batches_come_in_order_whoever_is_slow(workers: int) -> None:
    source = BatchSource(store_of(), 5, 4)
    held = Held(source, {0, 3})
    with Loader(source, delivery=Delivery(held), num_workers=workers, prefetch=4) as loader:
        got: list[Any] = []
        consumer = threading.Thread(target=lambda: got.extend(loader.next_batch() for _ in range(12)))
        consumer.start()
        if workers > 1:
            # Others are computed meanwhile, but nothing overtakes batch 0.
            assert wait_until(lambda: len(held.begun) >= min(workers, 4))
        assert not got
        held.open()
        consumer.join()
        for index, batch in enumerate(got):
            assert_same(batch, source[index], index)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (2, 7), (4, 1)])
def test_no_more_is_computed_than_was_asked_for(workers: int, prefetch: int) -> None:
    source = BatchSource(store_of(), 5, 4)
    held = Held(source, set())
    with Loader(source, delivery=Delivery(held), num_workers=workers, prefetch=prefetch) as loader:
        for taken in range(1, 5):
            loader.next_batch()
            assert wait_until(lambda taken=taken: len(held.begun) >= taken + prefetch)
            time.sleep(0.02)
            assert sorted(held.begun) == list(range(taken + prefetch))


def test_nothing_begins_before_it_is_used_and_an_abandoned_loader_leaks_no_thread() -> None:
    options: dict[str, Any] = {"seed": 3, "shard": (1, 2), "dtypes": {"reward": "float64"}}
    loader = PrefetchBatchifier(store := store_of(), 5, 4, num_workers=3, **options)
    source = BatchSource(store, 5, 4, **options)
    assert loader.source.fingerprint == source.fingerprint
    assert loader.spec == loader.source.spec == source.spec
    assert loader.state_dict()["next_index"] == 0
    assert not our_threads()
    assert_same(loader.next_batch(), source[0])
    assert our_threads()
    loader.close()
    for _ in range(2):
        loader = PrefetchBatchifier(store_of(), 5, 4, num_workers=3)
        loader.next_batch()
        reference = weakref.ref(loader)
        del loader
        assert wait_until(lambda reference=reference: gc.collect() is not None and reference() is None)
    for batch in PrefetchBatchifier(store_of(), 5, 4):
        assert batch["reward"].shape == (4, 5)
        break
    gc.collect()
    assert wait_until(lambda: not our_threads())


def test_with_closes_also_after_an_error_and_without_workers_there_are_no_threads() -> None:
    before = threading.active_count()
    with PrefetchBatchifier(store_of(), 5, 4, num_workers=0) as loader:
        for _ in range(5):
            loader.next_batch()
        assert threading.active_count() == before
    loader = PrefetchBatchifier(store_of(), 5, 4)

    def use() -> None:
        with loader:
            loader.next_batch()
            raise KeyError("mine")

    assert_raises(KeyError, "mine", use)
    assert_raises(ClosedError, "expected", loader.next_batch)


@pytest.mark.parametrize(
    ("sampling", "workers"), [("random", 0), ("last", 2), ("sequential", 2), ("batch", 0), ("blocks", 2)]
)
def test_a_for_loop_is_an_epoch(sampling: str, workers: int) -> None:
    options: dict[str, Any] = {"sequence_length": 5, "batch_size": 3, "sampling": sampling, "drop_last": False}
    source = BatchSource(store_of(), **options)
    with PrefetchBatchifier(store_of(), num_workers=workers, **options) as loader:
        assert len(loader) == len(source)
        index = 0
        for _ in range(3):
            count = 0
            for batch in loader:
                assert_same(batch, source[index], index)
                index += 1
                count += 1
            assert count == len(source)
        # A loop that is left early goes on where it was, up to the end of that epoch.
        for batch in loader:
            assert_same(batch, source[index])
            index += 1
            break
        rest = list(loader)
        assert len(rest) == len(source) - 1 or len(source) == 1
        for batch in rest:
            assert_same(batch, source[index])
            index += 1


def failing(source: BatchSource, at: int, error: Exception) -> Callable[[BatchSource], Callable[[int], Any]]:
    def make(index: int) -> Any:
        if index == at:
            raise error
        return source[index]

    return lambda _: make


@pytest.mark.parametrize(
    ("error", "workers", "at"),
    [
        *((error, workers, 6) for error in (ValueError("broken"), StopIteration("early")) for workers in (0, 1, 4)),
        *((KeyError("lost"), 0, 0), (OSError("disk"), 1, 0), (MemoryError(), 4, 0), (RuntimeError("x"), 0, 6)),
    ],
    ids=str,
)
def test_any_error_surfaces_where_it_happened(workers: int, at: int, error: Exception) -> None:
    source = BatchSource(store_of(), 5, 4)
    with Loader(source, delivery=Delivery(failing(source, at, error)), num_workers=workers, prefetch=5) as loader:
        for index in range(at):
            assert_same(loader.next_batch(), source[index], index)
        for _ in range(3):
            with pytest.raises(WorkerError, match=f"batch {at}: {type(error).__name__}") as caught:
                loader.next_batch()
            assert caught.value.__cause__ is error
            assert loader.state_dict()["next_index"] == at
        with pytest.raises(WorkerError):
            list(loader)  # a StopIteration must not end the loop as if the epoch were over


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_handing_over_skips_nothing_and_errors_are_gone_after_refresh(workers: int) -> None:
    source = BatchSource(store_of(), 5, 4)
    calls = []

    def hand_over(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("the device is lost")
        return batch

    with Loader(source, delivery=Delivery(lambda source: source.__getitem__, hand_over), num_workers=workers) as loader:
        for index in range(2):
            assert_same(loader.next_batch(), source[index], index)
        for _ in range(2):
            assert_raises(WorkerError, "batch 2: RuntimeError: the device is lost", loader.next_batch)
        assert loader.state_dict()["next_index"] == 2
        loader.load_state_dict(loader.state_dict())
        assert_same(loader.next_batch(), source[2])
    store = store_of()
    source = BatchSource(store, 5, 4)
    broken = [True]

    def maker(source: BatchSource) -> Callable[[int], Any]:
        def make(index: int) -> Any:
            if broken[0]:
                raise ValueError("broken")
            return source[index]

        return make

    with Loader(source, store, delivery=Delivery(maker), num_workers=workers) as loader:
        assert_raises(WorkerError, "broken", loader.next_batch)
        broken[0] = False
        assert_raises(WorkerError, "broken", loader.next_batch)
        loader.refresh()
        assert_same(loader.next_batch(), source[0])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rows_that_come_in_turn(workers: int) -> None:
    store = store_of()
    with PrefetchBatchifier(store, 5, 4, num_workers=workers) as loader:
        begin, threads = 0, None
        for batches in (3, 7, 12, 1):
            source = loader.source
            assert source.epoch_start == begin
            for index in range(begin, begin + batches):
                assert_same(loader.next_batch(), source[index], index)
            begin += batches
            threads = our_threads() if threads is None else threads
            assert our_threads() == threads
            store.extend({"action": [1, 2], "reward": [1.0, 2.0], "done": [0, 0]})
            loader.refresh()
            assert loader.source.snapshot.num_rows == len(store)


def test_close_while_a_batch_is_being_computed() -> None:
    source = BatchSource(store_of(), 5, 4)
    held = Held(source, {1})
    loader = Loader(source, delivery=Delivery(held), num_workers=2, prefetch=4)
    loader.next_batch()
    assert wait_until(lambda: 1 in held.begun)
    loader.close()
    assert 1 not in held.made, "it waited for the batch"
    assert_raises(ClosedError, "expected", loader.next_batch)
    held.open()  # whoever was still computing ends now


def test_close_wakes_whoever_waits() -> None:
    source = BatchSource(store_of(), 5, 4)
    held = Held(source, {0})
    loader = Loader(source, delivery=Delivery(held), num_workers=1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            loader.next_batch()
        except MouseError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert wait_until(lambda: 0 in held.begun)
    loader.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert [type(error) for error in raised] == [ClosedError]
    held.open()


def test_closed_loaders_hold_no_batches() -> None:
    source = BatchSource(store_of(), 5, 4)
    references: list[weakref.ref[Any]] = []

    class Kept(dict[str, Any]):
        pass

    def make(index: int) -> Any:
        batch = Kept(source[index])
        references.append(weakref.ref(batch))
        return batch

    loader = Loader(source, delivery=Delivery(lambda _: make), num_workers=1, prefetch=4)
    loader.next_batch()
    assert wait_until(lambda: len(references) == 5)
    loader.close()  # with a full queue
    assert wait_until(lambda: not our_threads())
    assert wait_until(lambda: not any(reference() for reference in references))


PROGRAMS = {
    "loader = PrefetchBatchifier(store, 5, 4, num_workers=4, prefetch=9); [loader.next_batch() for _ in range(50)]": 0,
    "loader = PrefetchBatchifier(store, 5, 4); loader.next_batch(); loader.me = loader": 0,
    "loaders = [iter(PrefetchBatchifier(store, 5, 4)) for _ in range(8)]; [next(loader) for loader in loaders]": 0,
    "loader = PrefetchBatchifier(store, 300, 200); kept = [loader.next_batch() for _ in 'abc']; raise SystemExit(3)": 3,
    """
bad = DatasetStore().from_dataset(pa.table({"action": [0] * n, "reward": [0.0] * n, "done": [7] * n}))
loader = PrefetchBatchifier(bad, 5, 4, num_workers=3)
try:
    loader.next_batch()
except RuntimeError:
    pass
del loader
gc.collect()
end = time.monotonic() + 60
while threading.enumerate() != [threading.main_thread()]:
    assert time.monotonic() < end, threading.enumerate()
    time.sleep(0.01)
""": 0,
}

# Each program is a fork of an interpreter that has imported all and has one thread, and leaves as an interpreter does.
LEAVING = f"""
import gc, os, sys, threading, time
import numpy as np, pyarrow as pa
from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
n = 400
store = DatasetStore().from_dataset(pa.table({{"action": [0] * n, "reward": [1.0] * n, "done": [0] * n}}))
BatchSource(store, 5, 4)[0]  # which imports what is imported on use
codes = []
for program in {list(PROGRAMS)}:
    child = os.fork()
    if not child:
        exec(program)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(codes)
"""


def test_the_interpreter_leaves_quietly() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LEAVING]  # Python 3.12 warns of forks
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, str(list(PROGRAMS.values())), "")


class Made:
    spec = Spec({"a": FieldSpec("a", np.dtype(np.int64), ())}, "arrived")
    fingerprint = "made"

    def __init__(self, make: Callable[[int], int]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return {"a": np.full((1, 1), self.make(index))}


def numbers(loader: Any, count: int) -> list[int]:
    return [int(loader.next_batch()["a"].item()) for _ in range(count)]


def test_the_error_of_the_earliest_batch_comes_first() -> None:
    """Batch 4 fails at once, batch 2 later: the caller still gets 0 and 1, and then the error of batch 2."""
    late = threading.Event()

    def make(index: int) -> int:
        if index == 4:
            late.set()
            raise ValueError("four")
        if index == 2:
            late.wait(60)
            time.sleep(0.05)
            raise ValueError("two")
        return index

    with PrefetchBatchifier(Made(make), num_workers=4, prefetch=6) as loader:
        assert numbers(loader, 2) == [0, 1]
        for _ in range(3):
            assert_raises(WorkerError, "batch 2: ValueError: two", loader.next_batch)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_batches_before_a_failed_one_are_delivered(workers: int) -> None:
    failed = threading.Event()
    if workers == 1:
        failed.set()

    def make(index: int) -> int:
        if index == 3:
            failed.set()
            raise ValueError("three")
        if index == 2:
            failed.wait(60)
        return index

    with PrefetchBatchifier(Made(make), num_workers=workers, prefetch=4) as loader:
        assert numbers(loader, 3) == [0, 1, 2]
        assert_raises(WorkerError, "batch 3: ValueError: three", loader.next_batch)
