"""Producers and the buffer that they share, each a process that is killed again and again.

A producer notes which rollouts it was told to be on the disk; a buffer makes batches. In the end every rollout that was
acknowledged is there, once, and no rollout is in two batches.

    python -m tests.core.groups_shared_crash FOLDER KILLS [SEED]

kills each of the two so many times.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from mouse_core.collect import StoreServer
from mouse_core.groups import (
    GrpoBatchMaker,
    RolloutBuffer,
    RolloutClient,
    RolloutRecord,
    SharedBuffer,
    Turn,
    open_rollouts,
)
from tests.core.killing import ended, forked
from tests.waiting import wait_until

PRODUCERS, GROUP = 2, 4


def made(producer: int, number: int) -> RolloutRecord:
    answer = Turn("4", "assistant", [number, producer], [-0.5, -0.5])  # type: ignore[arg-type]
    uid = f"p{producer}-{number}"
    return RolloutRecord("math", f"{producer}-{number // GROUP}", "1", uid, (answer,), reward_of(uid))


def reward_of(uid: str) -> float:
    return float(uid.partition("-")[2])


def produce(folder: Path, told: Path, producer: int) -> None:
    """Add rollouts until the end, from the first that nobody said was on the disk."""
    note = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = max(numbers(told), default=-1) + 1
    with RolloutClient(folder, f"producer-{producer}", timeout_s=60) as client:
        while True:
            # Three a call: groups are of rollouts of two calls.
            client.add_rollouts([made(producer, number + place) for place in range(3)])
            os.write(note, f"{number}\n{number + 1}\n{number + 2}\n".encode())
            number += 3


def opened(folder: Path) -> RolloutBuffer:
    maker = GrpoBatchMaker(rng_seed=1)
    return RolloutBuffer(folder, GROUP, seal_timeout=1e6, batch_maker=maker, max_ahead=200, sync=False)


def serve(folder: Path, told: Path) -> None:
    """Have the buffer, and make batches, until the end."""
    note = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with opened(folder) as buffer, StoreServer(SharedBuffer(buffer)):
        while True:
            batch_id = buffer.create_and_store_batch(16)
            if batch_id is None:
                time.sleep(0.01)
            else:
                os.write(note, f"{batch_id}\n".encode())


def numbers(told: Path) -> list[int]:
    """What a producer noted; it may have been killed in the middle of a line."""
    return [int(line) for line in told.read_text().split("\n")[:-1]] if told.exists() else []


def noted(folder: Path, *names: str) -> int:
    """How many bytes were noted of what was acknowledged."""
    paths = [folder / name for name in names] if names else [one for one in folder.iterdir() if one.is_file()]
    return sum(path.stat().st_size for path in paths if path.exists())


def check(folder: Path, root: Path) -> None:
    """What was acknowledged is there, once, and as it was."""
    with opened(root) as buffer:
        buffer.flush()
        batches = buffer.batches
        used = Counter(one.rollout_uid for name in batches for one in buffer.read_batch(name))
        assert not used or set(used.values()) == {1}, f"{used.most_common(3)} were used more than once"
        stored = open_rollouts(root)
        found = Counter(stored.uids)
        assert set(found.values()) == {1}, f"{found.most_common(3)} are there more than once"
        for producer in range(PRODUCERS):
            told = {f"p{producer}-{number}" for number in numbers(folder / f"producer-{producer}")}
            assert told <= found.keys(), f"{sorted(told - found.keys())[:3]} are lost"
        for one in stored:
            assert one.reward == reward_of(one.rollout_uid), f"{one.rollout_uid} has another reward"
        told_batches = (folder / "buffer").read_text().split("\n")[:-1]
        assert set(told_batches) <= set(batches), "batches are lost"
        print(f"{len(found)} rollouts, {len(batches)} batches: none lost, none twice", flush=True)


def main(folder: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Kill each so many times; how many kills there were."""
    rng, root = random.Random(seed), folder / "rollouts"
    work: dict[str, tuple[Any, ...]] = {
        "buffer": (serve, root, folder / "buffer"),
        **{f"producer-{n}": (produce, root, folder / f"producer-{n}", n) for n in range(PRODUCERS)},
    }
    running = {name: forked(partial(*what)) for name, what in work.items()}
    left = ["producer", "buffer"] * kills
    rng.shuffle(left)
    counts: Counter[str] = Counter()
    for victim in left:
        # When something was acknowledged since the last one, at any moment behind that.
        before = noted(folder)
        assert wait_until(lambda: noted(folder) > before)  # noqa: B023
        time.sleep(rng.random() * 0.05)
        name = f"producer-{rng.randrange(PRODUCERS)}" if victim == "producer" else victim
        os.kill(running[name], signal.SIGKILL)
        status = os.waitpid(running[name], 0)[1]
        assert status == signal.SIGKILL, f"{name} ended by itself, with status {status}"
        counts[victim] += 1
        running[name] = forked(partial(*work[name]))
    # Each has its turn once more.
    for name in running:
        size = noted(folder, name)
        assert wait_until(lambda: noted(folder, name) > size)  # noqa: B023
    for child in running.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended(partial(check, folder, root))
    return dict(counts)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:4])))
