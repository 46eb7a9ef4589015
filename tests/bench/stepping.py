"""What a digest costs a training loop: ``python -m tests.bench.stepping``.

Loops with a step of 2 ms take turns of 50 steps: with and without a digest, and with 0, 1 and 2 workers. The step
either computes in the calling thread, as a small network on the processor does, or waits, as for a device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mouse_core import DatasetStore, PrefetchBatchifier
from tests.bench import generate
from tests.bench.workloads import NARROW

_STEPS = 50


def steps_of(milliseconds: float) -> dict[str, Callable[[], None]]:
    """A step that computes for so long where nothing else runs, and one that waits for so long."""
    values = np.ones(20_000)
    for _ in range(2):  # the first one warms up
        begin = time.thread_time()
        for _ in range(1000):
            np.sqrt(values, out=values)  # without the interpreter's lock, as a framework computes
        calls = round(milliseconds / (time.thread_time() - begin))

    def compute() -> None:
        for _ in range(calls):
            np.sqrt(values, out=values)

    return {"computes": compute, "waits": lambda: time.sleep(milliseconds / 1e3)}


def turn_of(loader: Any, step: Callable[[], None]) -> tuple[float, float, float]:
    """Of some steps the microseconds that one takes: by the wall clock, in waiting for its batch, of processor time."""
    waited, begin, used = 0.0, time.perf_counter(), time.process_time()
    for _ in range(_STEPS):
        asked = time.perf_counter()
        loader.next_batch()
        waited += time.perf_counter() - asked
        step()
    taken = time.perf_counter() - begin, waited, time.process_time() - used
    return tuple(1e6 * seconds / _STEPS for seconds in taken)  # type: ignore[return-value]


def main() -> None:
    """Print a line for each number of workers: without a digest, and how much more with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--milliseconds", type=float, default=2.0)
    given = parser.parse_args()
    store = DatasetStore()
    store.extend(generate.rows_of(generate.STATE, np.arange(100_000)))
    kinds = [(workers, digest) for workers in (0, 1, 2) for digest in (False, True)]
    for name, step in steps_of(given.milliseconds).items():
        loaders: dict[Any, Any] = {
            kind: PrefetchBatchifier(store, 64, 32, num_workers=kind[0], digest=kind[1], dtypes=NARROW)
            for kind in kinds
        }
        found: dict[Any, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for turn in range(given.turns + 1):
            for kind in kinds if turn % 2 else kinds[::-1]:
                measured = turn_of(loaders[kind], step)
                if turn:  # the first one warms up
                    found[kind].append(measured)
        for loader in loaders.values():
            loader.close()
        for workers in (0, 1, 2):
            plain, more = np.array(found[workers, False]), np.array(found[workers, True])
            us, added = np.median(plain, axis=0), np.median(more - plain, axis=0)
            said = [
                f"{what} {one:6.0f} {extra:+5.0f} us ({100 * extra / us[0]:+.1f}%)"
                for what, one, extra in zip(("step", "wait", "processor"), us, added, strict=True)
            ]
            print(f"a step that {name}, num_workers={workers}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
