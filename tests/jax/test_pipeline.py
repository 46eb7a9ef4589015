"""The pipeline under the JAX loader: failure that stays, closing, ends without noise, and how much it holds."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mouse_core import BatchSource, ClosedError, ForkError
from mouse_core.testing import example_columns, example_store
from mouse_jax import PrefetchBatchifier
from mouse_jax.prefetch import GrainPrefetcher
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 4, "seed": 5}
AHEAD = (1, 2, 3, 4, 9)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    if not wait_until(lambda: set(threading.enumerate()) <= before, 0.5):
        gc.collect()
    assert wait_until(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("ahead", AHEAD)
def test_items_come_in_order_whoever_is_first(workers: int, ahead: int) -> None:
    def gather(index: int) -> int:
        time.sleep(0.003 * (index % 3 == 0))
        return index

    prefetcher = GrainPrefetcher(gather, 5, workers=workers, ahead=ahead)
    assert [prefetcher.get() for _ in range(30)] == list(range(5, 35))
    prefetcher.close()


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration("ends grain's stream"), SystemExit(3)])
@pytest.mark.parametrize("ahead", [1, 4])
def test_an_error_comes_at_its_place_and_stays(error: BaseException, ahead: int) -> None:
    def fail(index: int) -> int:
        if index >= 12:
            raise error
        return index

    prefetcher = GrainPrefetcher(fail, 10, workers=2, ahead=ahead)
    assert [prefetcher.get(), prefetcher.get()] == [10, 11]
    for _ in range(3):
        with pytest.raises(type(error)) as raised:
            prefetcher.get()
        assert raised.value is error
    prefetcher.close()
    with pytest.raises(type(error)):
        prefetcher.get()


def test_after_an_error_nothing_more_is_computed() -> None:
    asked: list[int] = []

    def fail(index: int) -> int:
        asked.append(index)
        raise ValueError(index)

    prefetcher = GrainPrefetcher(fail, 0, workers=1, ahead=9)
    with pytest.raises(ValueError, match="0"):
        prefetcher.get()
    time.sleep(0.1)
    prefetcher.close()
    assert asked == [0]


def test_none_is_an_item() -> None:
    """grain drops elements that are None."""
    prefetcher = GrainPrefetcher(lambda index: None, 0, workers=2, ahead=4)
    assert [prefetcher.get() for _ in range(3)] == [None] * 3
    prefetcher.close()


class Item:
    """Something whose life can be watched."""


@pytest.mark.slow
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 8])
def test_so_many_items_are_alive_and_no_more(workers: int, ahead: int) -> None:
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0
    lock = threading.Lock()

    def gather(index: int) -> Item:
        nonlocal most
        item = Item()
        with lock:
            alive.add(item)
            most = max(most, len(alive))
        return item

    prefetcher = GrainPrefetcher(gather, 0, workers=workers, ahead=ahead)
    for number in range(40):
        delivered = prefetcher.get()
        if number % 8 == 0:
            time.sleep(0.02)  # the pipeline fills up
        assert delivered in alive
    assert wait_until(lambda: len(alive) >= ahead + 1), "it does not compute ahead as far as it should"
    assert most <= max(ahead, 2) + 2, "the pipeline's, the one that it hands over and the one before"
    prefetcher.close()
    del delivered
    gc.collect()
    assert wait_until(lambda: not alive)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_so_many_batches_are_alive_and_no_more(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in host memory, from gathering to the last array of a batch that JAX lets go."""
    alive = 0
    most = 0
    lock = threading.Lock()
    get = BatchSource.__getitem__

    def gone() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def counted(self: BatchSource, index: int) -> Any:
        nonlocal alive, most
        batch = get(self, index)
        memory = np.empty(batch["reward"].nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64  # so aligned, JAX keeps the memory itself
        reward = memory[start : start + batch["reward"].nbytes].view(np.float32).reshape(batch["reward"].shape)
        reward[...] = batch["reward"]
        with lock:
            alive += 1
            most = max(most, alive)
        weakref.finalize(memory, gone)
        return {**batch, "reward": reward}

    monkeypatch.setattr(BatchSource, "__getitem__", counted)
    with PrefetchBatchifier(example_store(), **OPTIONS, prefetch=prefetch, num_workers=8) as loader:
        for number in range(40):
            batch = loader.next_batch()
            if number % 8 == 0:
                time.sleep(0.02)
            jax.block_until_ready(batch)
            del batch
        time.sleep(0.05)
        assert 0 < most <= prefetch + 2


@pytest.mark.parametrize("ahead", [1, 4])
def test_closing_does_not_wait_for_what_takes_long(ahead: int) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), threading.Event()

    def slow(index: int) -> int:
        begun.set()
        go_on.wait(60)
        made.set()
        return index

    prefetcher = GrainPrefetcher(slow, 0, workers=2, ahead=ahead)
    heard: list[str] = []

    def ask() -> None:
        try:
            heard.append(f"item {prefetcher.get()}")
        except ClosedError:
            heard.append("closed")

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    assert begun.wait(60)
    prefetcher.close()
    waited = made.is_set()
    go_on.set()
    caller.join(60)
    assert heard in (["closed"], ["item 0"]), "who waits while another thread closes must not wait for ever"
    assert not waited, "it waited for the batch"


def test_dropped_in_the_middle_while_a_batch_is_made() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(index: int) -> int:
        if index == 3:
            begun.set()
            go_on.wait(60)
        return index

    prefetcher = GrainPrefetcher(slow, 0, workers=2, ahead=4)
    prefetcher.get()
    assert begun.wait(60)
    watched = weakref.ref(prefetcher)
    del prefetcher
    assert watched() is None, "its threads hold on to it"
    go_on.set()


def test_a_loader_in_a_circle_is_collected() -> None:
    loader = PrefetchBatchifier(example_store(), **OPTIONS)
    loader.next_batch()
    circle: dict[str, Any] = {"loader": loader}
    circle["self"] = circle
    watched = weakref.ref(loader)
    del circle, loader
    gc.collect()
    assert watched() is None


SCRIPT = """
import threading, time
from mouse_core.testing import example_store
from mouse_jax import PrefetchBatchifier
store = example_store()
kept = []
for prefetch, workers in ((4, 2), (1, 1)):
    def begun():
        loader = PrefetchBatchifier(store, sequence_length=8, batch_size=4, prefetch=prefetch, num_workers=workers)
        kept.append(loader.next_batch())
        return loader
{ending}
print("end", flush=True)
"""

LEFT_OPEN = """
    left = globals()[f"left_{workers}"] = begun()
    begun().close()
    dropped = begun()
    del dropped
    circle = begun()
    circle.me = circle
    del circle
    thread = threading.Thread(target=begun().next_batch)
    thread.start()
    thread.join()
    untouched = begun()
time.sleep(0.2)  # queues fill up
"""
IN_THE_MAKING = """
    left = globals()[f"left_{workers}"] = begun()
    get, slow = type(left.source).__getitem__, threading.Event()
    def never_ends(*arguments):
        slow.set()
        threading.Event().wait(3600)
        return get(*arguments)
    type(left.source).__getitem__ = never_ends
    left.next_batch()
    slow.wait()
    type(left.source).__getitem__ = get
"""
ERROR = """
    left = globals()[f"left_{workers}"] = begun()
print("end", flush=True)
raise SystemExit(0)
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script and see that it ends after saying so, in silence."""
    path = folder / "script.py"
    path.write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "ignore", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    done = subprocess.CompletedProcess(path, process.returncode, output, errors)
    assert process.returncode == 0, errors
    assert not errors
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [LEFT_OPEN, *(pytest.param(one, marks=pytest.mark.long) for one in (IN_THE_MAKING, ERROR))],
    ids=["left open", "in the making", "error"],
)
def test_the_interpreter_ends_in_silence(ending: str, tmp_path: Path) -> None:
    run(SCRIPT.format(ending=ending), tmp_path)


DROPPED = """
import numpy as np
from mouse_core import DatasetStore
from mouse_jax import PrefetchBatchifier
store = DatasetStore()
n = 50_000
codes = {"action": np.arange(n) % 4, "done": np.zeros(n, np.int64)}
store.extend({**codes, "reward": np.ones(n), "observation": np.ones((n, 17))})
def train():
    loader = PrefetchBatchifier(store, prefetch=4)
    for _ in range(200):
        loader.next_batch()
train()
print("end", flush=True)
"""


@pytest.mark.long
@pytest.mark.slow
def test_the_interpreter_waits_for_threads_of_a_dropped_loader(tmp_path: Path) -> None:
    """One that comes back from compiled code after the interpreter's end aborts the process."""
    for _ in range(4):
        run(DROPPED, tmp_path)


FORK = """
import os, sys
from mouse_core import ForkError
from mouse_core.testing import example_store
from mouse_jax import PrefetchBatchifier
loader = PrefetchBatchifier(example_store(), sequence_length=8, batch_size=4)
loader.next_batch()
child = os.fork()
if child == 0:
    try:
        loader.next_batch()
    except ForkError:
        del loader
        os._exit(7)
    os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
loader.next_batch()
print(status, flush=True)
sys.exit(status != 7)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork on this system")
def test_a_forked_child_is_told(tmp_path: Path) -> None:
    assert issubclass(ForkError, RuntimeError)
    run(FORK, tmp_path)


def test_refresh_ends_the_old_threads() -> None:
    store = example_store(60)
    with PrefetchBatchifier(store, **OPTIONS) as loader:
        for round_ in range(5):
            loader.next_batch()
            store.extend(example_columns(10, first=60 + 10 * round_))
            loader.refresh()
        loader.next_batch()
        assert wait_until(lambda: sum("grain" in thread.name for thread in threading.enumerate()) <= 3)
