"""A process that writes late columns and is killed between any two of its steps, as a program of its own.

As in ``groups_crash``: a run is a forked child that kills itself at one of its calls that change files, or in the
middle of a write.

    python -m tests.core.groups_late_crash FOLDER FIRST STRIDE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutColumn, RolloutRecord, Turn, late, open_rollouts
from tests.core.groups_crash import STEPS
from tests.core.killing import killed_at

# Small values go into the log, which is made files of soon; large ones are files at once.
COLUMNS = [
    RolloutColumn("reward", per="example", dtype="float64", late=True),
    RolloutColumn("reference", late=True),
    RolloutColumn("embedding", per="example", shape=(50_000,), late=True),
]
COUNT = 24


def rollout(number: int) -> RolloutRecord:
    answer = Turn("4", "assistant", [number, 1, 2], [-0.5] * 3)  # type: ignore[arg-type]
    return RolloutRecord("math", str(number // 4), "1", f"r{number}", (answer,), None, float(number))


def value(name: str, number: int) -> Any:
    if name == "reward":
        return float(number)
    return np.arange(3, dtype=np.float32) + number if name == "reference" else np.full(50_000, number, np.float32)


def script() -> Iterator[tuple[str, Any]]:
    """What the process does, in order: rollouts it adds, columns it writes, and batches it asks for."""
    numbers = list(range(COUNT))
    yield "add", numbers[:8]
    yield "reward", numbers[:3]
    yield "embedding", numbers[:8]
    yield "reference", numbers[2:8]
    yield "add", [*numbers[8:14], 0]
    yield "reward", numbers[2:10]
    yield "reference", numbers[:2]
    yield "batch", 3
    yield "reference", numbers[8:14]
    yield "add", numbers[12:]
    yield "embedding", numbers[8:]
    yield "reward", numbers[10:]
    yield "batch", 5
    yield "reference", numbers[12:]
    yield "batch", 8


def opened(root: Path, *, sync: bool = False) -> RolloutBuffer:
    maker = GrpoBatchMaker(rng_seed=1)
    return RolloutBuffer(root, group_size=4, seal_timeout=1e6, batch_maker=maker, columns=COLUMNS, sync=sync)


def drawn(buffer: RolloutBuffer) -> list[list[str]]:
    return [[example.rollout_uid for example in buffer.read_batch(name)] for name in buffer.batches]


def run(root: Path, tell: Callable[[str, Any], None]) -> None:
    """All steps of the script; ``tell`` is told what has been acknowledged."""
    late._LOG_BYTES = 400
    with opened(root, sync=True) as buffer:
        for what, given in script():
            if what == "add":
                buffer.add_rollouts(map(rollout, given))
            elif what != "batch":
                buffer.add_column(what, {f"r{number}": value(what, number) for number in given})
            elif buffer.create_and_store_batch(given) is not None:
                given = drawn(buffer)
            tell(what, given)


def child(root: Path, told: Path, step: int, half: bool) -> bool:
    """Run in a fork; whether it came to its end."""
    pid = os.fork()
    if not pid:
        write, file = os.write, os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        killed_at(STEPS, step, half)
        run(root, lambda *values: write(file, (json.dumps(values) + "\n").encode()))  # type: ignore[arg-type]
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"step {step}: the process ended with status {status}"
    return status == 0


def check(root: Path, told: Path, step: int) -> None:
    """What was acknowledged is there, once, and as it was; what is awaited is what is not there."""
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    with opened(root) as buffer:
        batches, awaited = drawn(buffer), buffer.waiting_for()
        for what, given in lines:
            if what == "add":
                assert all(f"r{number}" in buffer for number in given), f"step {step}: of {given} some are lost"
            elif what != "batch":
                assert not {f"r{number}" for number in given}.intersection(awaited[what].uids), f"step {step}: {what}"
            elif isinstance(given, list):
                assert batches[: len(given)] == given, f"step {step}: batches are lost or others"
        for number in range(COUNT):
            if f"r{number}" in buffer:
                found = buffer.rollout(f"r{number}")
                there = {**found.turns[0].columns, **found.columns}
                for name in (column.name for column in COLUMNS):
                    assert (name in there) != (f"r{number}" in awaited[name].uids), f"step {step}: {name} of {number}"
                    assert name not in there or np.array_equal(there[name], value(name, number)), f"step {step}: {name}"
        used = Counter(uid for batch in batches for uid in batch)
        assert not used or max(used.values()) == 1, f"step {step}: {used.most_common(3)} were repeated"


def check_end(root: Path, step: int) -> None:
    """After the script came to its end: every rollout and value is there once, and all were drawn."""
    with opened(root) as buffer:
        assert not any(map(len, buffer.waiting_for().values())), f"step {step}: values are lost"
        buffer.create_and_store_batch(4)
        told = drawn(buffer)
    with opened(root) as buffer:
        assert drawn(buffer) == told
        while buffer.create_and_store_batch(1):
            pass
        used = Counter(uid for batch in drawn(buffer) for uid in batch)
    assert used == Counter([f"r{number}" for number in range(COUNT)]), f"step {step}: {used}"
    assert sorted(open_rollouts(root).uids) == sorted(used)
    assert not list(root.rglob("*.partial"))


def main(folder: Path, first: int, stride: int) -> int:
    """Kill at every ``stride``-th step from ``first``; the number of kills."""
    # What is slow the first time is done before the first fork, and its threads have ended by then.
    run(folder / "warm", lambda *values: None)
    while threading.active_count() > 1:
        time.sleep(0.01)
    kills, step = 0, first
    while True:
        root, told = folder / str(step), folder / f"{step}.told"
        ended = child(root, told, step, half=step % 2 == 0)
        checked(check, root, told, step)
        if ended:
            return kills
        # Start again, be killed while that is going on, and in the end be left alone.
        kills += 1 + (not child(root, told, step // 3 + 1, half=step % 2 == 1))
        assert child(root, told, -1, half=False)
        checked(check, root, told, step)
        checked(check_end, root, step)
        step += stride


def checked(work: Callable[..., None], *arguments: Any) -> None:
    """Do it in a child, whose threads are not ours."""
    if not os.fork():
        work(*arguments)
        os._exit(0)
    assert os.wait()[1] == 0, "see above"


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
