"""Processes that share a mirror: each byte is fetched once, and who is killed leaves nothing wrong."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mouse_core.errors import StorageError
from mouse_core.remote.mirror import Mirror
from mouse_core.remote.mirror.table import SparseFile
from tests.core.mirror_cases import Objects, read_batches

SPAWN = multiprocessing.get_context("spawn")
KEPT = 4 << 20


def read_in_a_process(folder: str, seed: int, first: int, last: int, cache_bytes: int | None, said: str) -> None:
    """Read batches, and write down how many bytes were fetched."""
    objects, mirror = Objects(size=3_000_000, latency=0.001), Mirror(folder, cache_bytes=cache_bytes)
    read_batches(mirror, objects, seed, first, last)
    Path(said).write_text(str(objects.fetched))


def started(folder: Path, number: int, *, seed: int, last: int, cache_bytes: int | None = None) -> SPAWN.Process:  # type: ignore[name-defined]
    """A process that reads batches."""
    arguments = (str(folder), seed, 0, last, cache_bytes, str(folder / f"said-{number}"))
    process = SPAWN.Process(target=read_in_a_process, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_each_byte_is_fetched_once_by_all_processes(tmp_path: Path) -> None:
    alone = Objects(size=3_000_000)
    read_batches(Mirror(tmp_path / "alone"), alone, seed=4, first=0, last=60)
    there = [started(tmp_path, number, seed=4, last=60) for number in range(3)]
    for process in there:
        process.join()
        assert process.exitcode == 0
    # What lies between two pages that are asked for comes with them, and may come twice.
    assert sum(int((tmp_path / f"said-{number}").read_text()) for number in range(3)) <= 1.2 * alone.fetched


@pytest.mark.slow
def test_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    chance = random.Random(0)
    there = {number: started(tmp_path, number, seed=number, last=10**6, cache_bytes=KEPT) for number in range(2)}
    for kill in range(6):
        time.sleep(0.5 + chance.random() * 0.3)
        victim = kill % 2
        assert there[victim].exitcode is None, "a batch was wrong"
        os.kill(there[victim].pid or 0, signal.SIGKILL)
        there[victim].join()
        there[victim] = started(tmp_path, victim, seed=kill, last=10**6, cache_bytes=KEPT)
    mirror = Mirror(tmp_path, cache_bytes=KEPT)
    read_batches(mirror, Objects(size=3_000_000), seed=9, first=0, last=40)
    for process in there.values():
        assert process.exitcode is None, "a batch was wrong"
        process.kill()
        process.join()
    # What they claimed or were letting go of is taken over, and no room is lost.
    read_batches(mirror, Objects(size=3_000_000), seed=10, first=0, last=40)
    assert mirror.counters()["damaged"] == 0
    assert next(tmp_path.glob("*/bytes")).stat().st_blocks * 512 <= KEPT + (1 << 20)


def test_a_forked_child_reads_beside_its_parent(tmp_path: Path) -> None:
    objects, mirror = Objects(), Mirror(tmp_path, cache_bytes=KEPT)
    read_batches(mirror, objects, seed=0, first=0, last=10)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            read_batches(mirror, objects, seed=1, first=0, last=20)
            status = 0
        finally:
            os._exit(status)
    read_batches(mirror, objects, seed=2, first=0, last=20)
    assert os.waitpid(child, 0)[1] == 0


def test_a_full_disk_keeps_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SparseFile.write

    def write_until_full(self: SparseFile, parts: list[tuple[memoryview, int]]) -> None:
        while parts:
            if os.fstat(self.file).st_blocks * 512 + len(parts[-1][0]) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(self, [parts.pop()])

    monkeypatch.setattr(SparseFile, "write", write_until_full)
    objects, room = Objects(count=8, size=1_500_000), 3 << 20
    mirror = Mirror(tmp_path / "one", cache_bytes=1 << 30)
    read_batches(mirror, objects, seed=0, first=0, last=40)
    assert mirror.counters()["evicted"]
    assert mirror.counters()["kept"] <= room
    room = 0
    with pytest.raises(StorageError, match="expected room on its disk, found it full"):
        read_batches(Mirror(tmp_path / "two"), objects, seed=0, first=0, last=40)
