"""The threads of the JAX loader: they end without noise, and hold so many batches."""

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

from mouse_core import BatchSource
from mouse_core.testing import example_store
from mouse_jax import PrefetchBatchifier
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 4, "seed": 5}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    if not wait_until(lambda: set(threading.enumerate()) <= before, 0.5):
        gc.collect()
    assert wait_until(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before


@pytest.mark.parametrize("prefetch", [1, 4])
def test_so_many_batches_are_alive_and_no_more(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
from mouse_core import ClosedError
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
    def ask(loader=left):
        try:
            loader.next_batch()
        except ClosedError:
            pass
    threading.Thread(target=ask, daemon=True).start()
    slow.wait()
    type(left.source).__getitem__ = get
"""
AN_EXIT = """
    left = globals()[f"left_{workers}"] = begun()
print("end", flush=True)
raise SystemExit(0)
"""
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
print("end", flush=True)
sys.exit(status != 7)
"""


#: Programs that end after saying so, in silence, each as often as it takes to see that it does.
PROGRAMS: dict[str, tuple[str, int]] = {
    "left open": (SCRIPT.format(ending=LEFT_OPEN), 1),
    "in the making": (SCRIPT.format(ending=IN_THE_MAKING), 1),
    "an exit": (SCRIPT.format(ending=AN_EXIT), 1),
    # A thread that comes back from compiled code after the interpreter's end aborts the process.
    "dropped": (DROPPED, 4),
    "forked": (FORK, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in ("left open", "forked"))) for name in PROGRAMS]
)
def test_the_interpreter_ends_in_silence(name: str, tmp_path: Path) -> None:
    program, times = PROGRAMS[name]
    path = tmp_path / "script.py"
    path.write_text(program)
    for _ in range(times):
        command = [sys.executable, "-X", "dev", "-W", "ignore", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("end\n")
