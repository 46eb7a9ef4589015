"""The mirror of objects elsewhere: what is read of it is what they have, whatever becomes of file and network."""

import errno
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mouse_core.errors import ChangedError, ConfigError, DataError, StorageError
from mouse_core.remote.mirror import Mirror, cache_folder
from mouse_core.remote.mirror.mirror import Pace
from mouse_core.remote.mirror.table import SparseFile, Table
from tests.core.killing import forked
from tests.core.mirror_cases import Objects, ask, places, ranges, read, read_batches


def on_disk(folder: Path) -> int:
    return next(folder.glob("*/bytes")).stat().st_blocks * 512


def test_batches_are_what_the_objects_have(tmp_path: Path) -> None:
    objects, mirror = Objects(count=12, size=700_001), Mirror(tmp_path, cache_bytes=4 << 20)
    assert read_batches(mirror, objects, seed=0, first=0, last=60) > 500_000
    counted = mirror.counters()
    assert counted["evicted"]
    assert counted["fetched"] == objects.fetched
    assert max(counted["kept"], on_disk(tmp_path)) <= 5 << 20


def test_private_copies(tmp_path: Path) -> None:
    objects = Objects(size=9_000_000, count=2)
    mirror = Mirror(tmp_path, cache_bytes=4 << 20)
    _, other = mirror.add(objects, objects.infos())
    content = objects.piece(1, 0, other.info.size)
    assert read(other, 0, len(content)) == content
    begins, ends = other.address + np.array([70_000, 5, 5]), other.address + np.array([70_010, 5, 200_000])
    assert other.backing.read(begins, ends) == [content[70_000:70_010], b"", content[5:200_000]]
    again = pickle.loads(pickle.dumps(mirror)).add(objects, objects.infos())
    assert read(again[0], 7, 9) == objects.piece(0, 7, 9)


def test_what_was_fetched_is_there_for_the_next_run(tmp_path: Path) -> None:
    first = Objects()
    read_batches(Mirror(tmp_path), first, seed=1, first=0, last=20)
    again = Objects()
    read_batches(Mirror(tmp_path), again, seed=1, first=0, last=20)
    assert first.fetched
    assert not again.fetched
    other = Objects(url="memory://other", seed=5)
    read_batches(Mirror(tmp_path), other, seed=1, first=0, last=5)
    read_batches(Mirror(tmp_path), again, seed=1, first=0, last=20)
    assert other.fetched
    assert not again.fetched


def test_a_damaged_cache_is_not_believed(tmp_path: Path) -> None:
    objects = Objects()
    read_batches(Mirror(tmp_path), objects, seed=2, first=0, last=20)
    with next(tmp_path.glob("*/bytes")).open("r+b") as file:
        for block in range(0, 30, 3):
            file.seek(block * 65536)
            file.write(b"\xff" * 65536)
    mirror = Mirror(tmp_path)
    read_batches(mirror, objects, seed=2, first=0, last=20)
    assert mirror.counters()["damaged"]
    with next(tmp_path.glob("*/objects")).open("ab") as lines:
        lines.write(b"3f 2a torn by a power c")
    read_batches(Mirror(tmp_path), objects, seed=3, first=0, last=5)
    # Somebody needed room.
    next(tmp_path.glob("*/bytes")).unlink()
    read_batches(Mirror(tmp_path), objects, seed=3, first=0, last=5)


def test_an_object_that_changed_is_said_and_is_another_one(tmp_path: Path) -> None:
    objects, mirror = Objects(), Mirror(tmp_path)
    before = mirror.add(objects, objects.infos())
    assert read(before[0], 0, 10) == objects.piece(0, 0, 10)
    objects.version, objects.seed = "second", 9
    backing = before[0].backing
    where = ranges(before, [(0, 300_000, 300_010)])
    ask(before, [(0, 300_000, 300_010)], 0)
    for _ in range(2):
        with pytest.raises(ChangedError, match="expected version first, found second"):
            backing.wait(*where)
    assert read(mirror.add(objects, objects.infos())[0], 0, 10) == objects.piece(0, 0, 10)


def test_errors_that_pass_are_tried_again(tmp_path: Path) -> None:
    objects = Objects(failures=[StorageError("503"), StorageError("timed out")])
    mirror = Mirror(tmp_path)
    assert read(mirror.add(objects, objects.infos())[0], 0, 4) == objects.piece(0, 0, 4)
    assert mirror.counters()["retries"] == 2
    objects.failures = [StorageError("503")]
    impatient = Mirror(tmp_path, patience=0).add(objects, objects.infos())[1]
    with pytest.raises(StorageError, match="503"):
        read(impatient, 0, 4)
    assert read(impatient, 0, 4) == objects.piece(1, 0, 4)
    objects.count = 3
    with pytest.raises(DataError, match="expected an object, found none"):
        read(mirror.add(objects, [*objects.infos(), *Objects().infos()[3:]])[3], 0, 4)


def test_what_is_wrong_with_one_object_is_said_of_that_one(tmp_path: Path) -> None:
    """Several objects are asked for with one call."""
    objects, mirror = Objects(), Mirror(tmp_path)
    there = mirror.add(objects, objects.infos())
    objects.count = 3
    for batch, number in enumerate([0, 1, 2, 3]):
        ask(there, [(number, 70_000, 70_010), (3, 5, 9)], batch)
    with pytest.raises(DataError, match="3: expected an object, found none"):
        there[0].backing.wait(*ranges(there, [(0, 70_000, 70_010), (3, 5, 9)]))
    for number in range(3):
        there[0].backing.wait(*ranges(there, [(number, 70_000, 70_010)]))
        assert read(there[number], 70_000, 70_010) == objects.piece(number, 70_000, 70_010)


def test_many_objects_that_come_one_after_the_other(tmp_path: Path) -> None:
    mirror, there = Mirror(tmp_path), []
    for number in range(5):
        # Beyond the first GB the file is made longer, and mapped once more.
        objects = Objects(1, (3 << 30) if number == 3 else 100_000, seed=number, url=f"memory://{number}")
        there.append((objects, *mirror.add(objects, objects.infos())))
    for objects, one in there:
        last = one.info.size
        assert read(one, last - 30, last) == objects.piece(0, last - 30, last)
        assert read(one, 50, 60) == objects.piece(0, 50, 60)
    assert on_disk(tmp_path) < 2 << 20


def test_options_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (5, "1GB", 1e9):
        with pytest.raises(ConfigError, match=f"cache_bytes: expected an integer of at least 4194304, found {wrong!r}"):
            Mirror(tmp_path, cache_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fail: expected one of \['raise', 'retry'\], found 'never'"):
        Mirror(tmp_path, fail="never")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write to this folder"):
        Mirror(tmp_path / "file" / "cache")
    monkeypatch.setenv("MOUSE_CACHE", str(tmp_path / "there"))
    assert cache_folder() == tmp_path / "there"
    assert Mirror().folder == tmp_path / "there"
    assert (tmp_path / "there" / "mirror-1" / "bytes").exists()


def test_what_is_read_last_is_let_go_of_first(tmp_path: Path) -> None:
    """Half of the data is kept, and what the next 240 batches read is known: what stays is what they read."""
    objects, mirror = Objects(count=8, size=1_500_000), Mirror(tmp_path, cache_bytes=6 << 20)
    read_batches(mirror, objects, seed=0, first=0, last=100, ahead=240)
    before = mirror.counters()
    read_batches(mirror, objects, seed=0, first=100, last=300, ahead=240)
    hits, fetched = hits_since(mirror.counters(), before)
    assert hits > 0.66  # 0.5, had it been chosen without knowing
    assert fetched < 0.42  # whole blocks would go before the rest of them is read: 2.8 times as much as is read


def test_the_order_in_which_pages_go(tmp_path: Path) -> None:
    """At time 100, of pages that were used at 40, 70 and 95, and of others that are read at 109, 112 and 130."""
    table, last, next_use = Table(tmp_path), [95, 70, 40], [112, 130, 109]
    with table.lock:
        table.grow(8, lambda blocks: None)
        table.claim_for(1, np.arange(6), np.full(6, 1), lambda one: True)
        table.arrived(1, np.arange(6), np.full(6, 1), np.zeros((6, 16), np.uint32))
    first = table.clock
    for now in range(101):
        for block, used in enumerate(last):
            if now == used:
                table.use(np.array([16 * block]), np.array([0]))
        table.tick(now < 100)
    for block, used in enumerate(next_use, 3):
        table.ask(np.array([16 * block]), first + used)
    wanted = {40: 2, 70: 1, 130: 4, 112: 3, 109: 5, 95: 0}
    for count in range(1, 7):
        gone, masks = table.needed_last(1, count, table.clock, lambda one: True)
        assert (gone.tolist(), set(masks.tolist())) == (sorted(list(wanted.values())[:count]), {1})
    # What is read until 112 stays, and so what may be late.
    gone, _ = table.needed_last(1, 6, first + 112, lambda one: True)
    assert gone.tolist() == [0, 1, 2, 4]
    table.evict(1, np.array([2, 4]), np.array([1, 1]))
    gone, _ = table.needed_last(1, 2, table.clock, lambda one: True)
    assert gone.tolist() == [1, 3]


def test_what_is_asked_for_and_never_read_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loaders that were given up, and of batches that were passed over."""
    monkeypatch.setattr("mouse_core.remote.mirror.mirror._MOST", 64)
    pace = Pace()
    pace.choose()
    for batch in range(3 * 64):
        pace.ahead(batch, np.array([batch]), np.array([16 * batch, 1 << 40]), batch)
    assert (len(pace._uses) <= 65, pace.pages_ahead) == (True, 2 * 64)
    pace.read(np.array([3 * 64 - 2]), np.array([16 * (3 * 64 - 2), 1 << 40]), 3 * 64)
    assert (len(pace._uses), pace.pages_ahead) == (2, 2)  # those of the last batch


def hits_since(after: Mapping[str, float], before: Mapping[str, float]) -> tuple[float, float]:
    """The share of pages read that were there, and bytes fetched for each read."""
    read, wanted, fetched = (after[name] - before[name] for name in ("read", "wanted", "fetched"))
    return 1 - wanted / read, fetched / read


def test_whoever_copies_is_told_that_pages_went_meanwhile(tmp_path: Path) -> None:
    """And only of its own: others of the same block go before them."""
    objects = Objects(count=1, size=8 << 20)
    (there,) = Mirror(tmp_path, cache_bytes=4 << 20).add(objects, objects.infos())
    stays, goes = ((np.array([there.address + at]), np.array([there.address + at + 4096])) for at in (0, 40_960))
    for _ in range(3):
        went = there.backing.wait(*goes)
        for begin in range(1 << 20, 8 << 20, 1 << 17):
            stayed = there.backing.wait(*stays)
            read(there, begin, begin + (1 << 17))
            assert there.backing.still(stayed)
        read(there, 40_960, 45_056)
        assert not there.backing.still(went)  # though it came again
    assert read(there, 0, 50_000) == objects.piece(0, 0, 50_000)


def test_a_cache_that_is_smaller_than_what_is_asked_for_ahead_does_not_thrash(tmp_path: Path) -> None:
    """64 batches are asked for ahead, of which a dozen fit; of 24 MB of objects, nearly every block is among them."""
    objects, mirror = Objects(count=8, size=3_000_000), Mirror(tmp_path, cache_bytes=4 << 20)
    read_batches(mirror, objects, seed=0, first=0, last=120, ahead=64)
    needed = sum(-(-end // 4096) - begin // 4096 for n in range(120) for _, begin, end in places(objects, 0, n)) * 4096
    assert objects.fetched < 1.5 * needed


SPAWN = multiprocessing.get_context("spawn")
KEPT = 4 << 20


def read_in_a_process(folder: str, seed: int, first: int, last: int, cache_bytes: int | None, said: str) -> None:
    objects, mirror = Objects(size=3_000_000, latency=0.001), Mirror(folder, cache_bytes=cache_bytes)
    read_batches(mirror, objects, seed, first, last)
    Path(said).write_text(str(objects.fetched))


def started(folder: Path, number: int, *, seed: int, last: int, cache_bytes: int | None = None) -> SPAWN.Process:  # type: ignore[name-defined]
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
    child = forked(lambda: read_batches(mirror, objects, seed=1, first=0, last=20))
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
    with pytest.raises(StorageError, match="expected free space on its disk, found a full disk"):
        read_batches(Mirror(tmp_path / "two"), objects, seed=0, first=0, last=40)
