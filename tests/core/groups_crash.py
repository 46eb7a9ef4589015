"""A process that is killed between any two of its steps, again and again, as a program of its own.

Every step is a call that changes files. A run is a forked child that counts them and kills itself at one of them, or
in the middle of a write. Nothing the child does is undone by Python: the signal is SIGKILL.

    python -m tests.core.groups_crash FOLDER FIRST STRIDE
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

from mouse_core.groups import GrpoBatchMaker, RolloutBuffer, RolloutRecord, open_rollouts
from tests.core.groups_cases import group, rollout
from tests.core.killing import killed_at

STEPS = ("write", "pwrite", "replace", "fsync", "unlink", "ftruncate", "mkdir", "open")


def script() -> Iterator[tuple[str, Any]]:
    """What the process does, in order: rollouts it adds, and batches it asks for."""
    yield "add", group(0, 3)
    yield "add", [*group(3, 1), *group(10, 5, example="b"), rollout(20, environment="c")]
    yield "batch", 3
    yield "add", [*group(15, 3, example="b"), *group(21, 3, environment="c"), rollout(0)]
    yield "batch", 4
    yield "add", group(30, 2, example="d")
    yield "flush", None
    yield "add", group(32, 2, example="d")
    yield "batch", 5
    # So many groups at once that threads write them.
    yield "add", [item for number in range(5) for item in group(50 + 4 * number, 4, environment=f"e{number}")]
    yield "batch", 8


ADDED = {item.rollout_uid: item for what, given in script() if what == "add" for item in given}


def opened(root: Path, *, sync: bool = False) -> RolloutBuffer:
    return RolloutBuffer(root, group_size=4, seal_timeout=1e6, batch_maker=GrpoBatchMaker(rng_seed=1), sync=sync)


def run(root: Path, tell: Callable[[str, Any], None]) -> None:
    """All steps of the script; ``tell`` is told what has been acknowledged."""
    with opened(root, sync=True) as buffer:
        for what, given in script():
            if what == "add":
                buffer.add_rollouts(given)
                tell("added", [item.rollout_uid for item in given])
            elif what == "flush":
                buffer.flush()
                tell("sealed", sorted(buffer.rollouts().uids))
            elif (batch_id := buffer.create_and_store_batch(given)) is not None:
                tell("batch", [batch_id, [example.rollout_uid for example in buffer.read_batch(batch_id)]])


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
    """What was acknowledged is there, once, and as it was; no rollout is in two batches."""
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    with opened(root) as buffer:
        batches = {name: [x.rollout_uid for x in buffer.read_batch(name)] for name in buffer.batches}
        for what, given in lines:
            if what == "added":
                assert all(uid in buffer for uid in given), f"step {step}: of {given} some are lost"
            elif what == "sealed":
                assert set(given) <= set(buffer.rollouts().uids), f"step {step}: sealed rollouts are lost"
            else:
                assert batches[given[0]] == given[1], f"step {step}: batch {given[0]} is lost"
        used = Counter(uid for uids in batches.values() for uid in uids)
        assert not used or max(used.values()) == 1, f"step {step}: {used.most_common(3)} were repeated"
        assert len(buffer) == len(set(buffer.rollouts().uids)) + buffer.num_waiting


def check_end(root: Path, step: int) -> None:
    """After the script came to its end: everything there was, once, and every rollout that is worth something used."""
    with opened(root) as buffer:
        buffer.flush()
        for size in (6, 1):
            while buffer.create_and_store_batch(size):
                pass
        used = Counter(x.rollout_uid for name in buffer.batches for x in buffer.read_batch(name))
    stored: list[RolloutRecord] = list(open_rollouts(root))
    found = Counter(item.rollout_uid for item in stored)
    assert found == Counter(ADDED.keys()), f"step {step}: {found} instead of every rollout once"
    assert all(item == ADDED[item.rollout_uid] for item in stored), f"step {step}: a rollout has changed"
    assert set(used.values()) == {1}, f"step {step}: {used}"
    assert len(used) >= len(ADDED) - 2, f"step {step}: only {sorted(used)} were ever drawn"
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
        if not os.fork():
            check(root, told, step)
            os._exit(0)
        assert os.wait()[1] == 0, f"step {step}: see above"
        if ended:
            break
        kills += 1
        # Start again, be killed while that is going on, and in the end be left alone.
        child(root, told, step // 3 + 1, half=step % 2 == 1)
        assert child(root, told, -1, half=False)
        if not os.fork():
            check(root, told, step)
            check_end(root, step)
            os._exit(0)
        assert os.wait()[1] == 0, f"step {step}: see above"
        step += stride
    return kills


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
