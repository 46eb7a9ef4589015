"""Durable logs: what was appended is there after a process was killed, nothing else ever is, and damage is an error."""

import errno
import mmap
import os
import random
import signal
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import DataError, StorageError
from mouse_core.errors import StoreWarning
from mouse_core.files import locking
from mouse_core.files.locking import Descriptor
from mouse_core.files.log import Log, MappedLog, note_path, read_log, read_mapped_log
from mouse_core.files.writing import sync_folders
from mouse_core.store.disk.tail import TailFile
from tests.core.killing import forked
from tests.core.power_cut import Disk

FIRST, HEAD = 24, 24


@given(steps=st.lists(st.one_of(st.none(), st.binary(max_size=40_000))))
def test_records_since_the_last_clear_are_there(
    steps: list[bytes | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("frames") / "records"
    written = MappedLog(path)
    expected: list[bytes] = []
    for step in steps:
        if step is None:
            written.clear()
            expected = []
        elif step:
            written.append(step)
            expected.append(step)
        assert written.is_empty == (not expected)
    written.sync()
    written.close()
    assert read_mapped_log(path) == expected


def test_a_record_counts_once_its_length_is_there(tmp_path: Path) -> None:
    path = tmp_path / "records"
    written = MappedLog(path)
    written.append(b"older" * 50)
    written.append(b"older" * 50)
    written.clear()
    written.append(b"first")
    begin = FIRST + HEAD + 5
    before = path.read_bytes()
    written.append(b"second" * 20)
    after = path.read_bytes()
    for moment in range(begin + 8, begin + 200):
        path.write_bytes(before[: begin + 8] + after[begin + 8 : moment] + before[moment:])
        assert read_mapped_log(path) == [b"first"]
    path.write_bytes(after)
    assert read_mapped_log(path) == [b"first", b"second" * 20]


def test_damage_is_an_error_and_what_a_power_cut_leaves_is_none(tmp_path: Path) -> None:
    path = tmp_path / "records"
    written = MappedLog(path)
    for number in range(20):
        written.append(bytes([number]) * 40)
    whole, bits = path.read_bytes(), random.Random(0)
    for _ in range(50):
        at = bits.randrange(FIRST, FIRST + 20 * (HEAD + 40))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        with suppress(DataError):
            found = read_mapped_log(path)  # it was a bit of what fills up, or a length of 0
            assert found == [bytes([number]) * 40 for number in range(len(found))]
        damaged[8:16] = bytes(8)  # of another start of the machine
        path.write_bytes(damaged)
        found = read_mapped_log(path)
        assert found == [bytes([number]) * 40 for number in range(len(found))]


def test_a_damaged_file_is_named_and_one_that_was_not_finished_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "records"
    MappedLog(path).append(b"first")
    content = bytearray(path.read_bytes())
    content[FIRST + HEAD] ^= 1
    wrong = (content, "expected an intact record at byte 24"), (b"anything" * 10, "expected a mapped log")
    for damaged, message in wrong:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{path}: {message}"):
            read_mapped_log(path)
    for unfinished in (b"", bytes(100), b"mouserec"):
        path.write_bytes(unfinished)
        assert read_mapped_log(path) == []


def test_records_from_before_a_clear_do_not_come_back(tmp_path: Path) -> None:
    """As where the first pages reached the disk before the machine stopped, and the others did not."""
    path, contents = tmp_path / "records", []
    written = MappedLog(path)
    for record in (b"older" * 10, b"newer" * 10):
        written.clear()
        for _ in range(20):
            written.append(record)
        contents.append(path.read_bytes())
    older, newer = contents
    page = FIRST + 5 * (HEAD + 50)
    path.write_bytes(newer[:8] + bytes(8) + newer[16:page] + older[page:])
    assert read_mapped_log(path) == [b"newer" * 10] * 5


def record_of(number: int) -> bytes:
    return b"%d " % number * (1 + number * 7 % 400)


def lives(path: Path, told: mmap.mmap, *, is_mapped: bool) -> None:
    """Append records, and tell of each how many there are; of a mapped log only since it was cleared."""
    log = MappedLog(path) if is_mapped else Log(path)
    first = number = 0 if isinstance(log, MappedLog) else len(log.records)
    while True:
        if isinstance(log, MappedLog):
            if number - first == 40:
                told[8:16] = number.to_bytes(8, "little")
                log.clear()
                first = number
            log.append(record_of(number))
        else:
            log.append(record_of(number), sync=number % 50 == 0)
        number += 1
        told[:8] = number.to_bytes(8, "little")


def kills(folder: Path, count: int, *, is_mapped: bool) -> int:
    """Kill a writer at random moments; how many records were there last."""
    rng, told, number, left = random.Random(count), mmap.mmap(-1, 16), 0, 0
    for turn in range(count):
        path = folder / (f"mapped-{turn}" if is_mapped else "log")
        process = forked(partial(lives, path, told, is_mapped=is_mapped))
        deadline = time.monotonic() + 10
        while int.from_bytes(told[:8], "little") == number and time.monotonic() < deadline:
            time.sleep(0.0005)  # it has not begun
        time.sleep(rng.expovariate(300))
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        number, cleared = (int.from_bytes(told[at : at + 8], "little") for at in (0, 8))
        found = read_mapped_log(path) if is_mapped else read_log(path)
        left = max(left, number)
        if is_mapped:
            # A clear may be on its way, and a record.
            firsts = [cleared] if cleared < number else [cleared, cleared - 40]
            assert any(found == list(map(record_of, range(max(first, 0), first + len(found)))) for first in firsts)
            assert len(found) >= number - cleared or not found
            number = 0
            told[:16] = bytes(16)
        else:
            assert number <= len(found) <= number + 1
            assert found == list(map(record_of, range(len(found))))
            number = len(found)
            told[:8] = number.to_bytes(8, "little")
    return left


@pytest.mark.parametrize("is_mapped", [False, True])
def test_records_survive_kills(is_mapped: bool, tmp_path: Path) -> None:
    assert kills(tmp_path, 8, is_mapped=is_mapped) > 8


def test_a_damaged_log_is_an_error_and_its_note_does_no_harm(tmp_path: Path) -> None:
    """Flip bits of a log, cut it, or remove it: each is an error."""
    rng, path, records = random.Random(60), tmp_path / "log", [record_of(number) for number in range(20)]
    log = Log(path)
    for record in records:
        log.append(record, sync=False)
    log.close()
    whole = path.read_bytes()
    for _ in range(60):
        damaged, at = bytearray(whole), rng.randrange(len(whole))
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(rng.choice((damaged, whole[:at])))
        for opened in (read_log, Log):
            with pytest.raises(DataError, match=f"log {path}: expected"):
                opened(path)
    path.unlink()
    with pytest.raises(DataError, match="found no file"):
        read_log(path)
    note = tmp_path / "log.size"
    noted = note.read_bytes()
    path.write_bytes(whole)
    for at in range(8 * len(noted)):
        damaged = bytearray(noted)
        damaged[at // 8] ^= 1 << at % 8
        note.write_bytes(damaged)
        assert read_log(path) == records


def test_rewritten_records_are_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        log.append(b"older" * 9, sync=False)
        assert log.rewrite([b"first", b"second"]) == [0, 29]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="expected 59 bytes of records, found 29 bytes of undamaged records"):
        read_log(path)
    path.write_bytes(whole)
    assert read_log(path) == [b"first", b"second"]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_sync_brings_records_to_the_disk(is_mapped: bool, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root, by_page=is_mapped)
    with disk.watched():
        log = MappedLog(root / "log") if is_mapped else Log(root / "log")
        sync_folders([root])
        for record in (b"first", b"second" * 999):
            if isinstance(log, MappedLog):
                log.append(record)
                log.sync()
            else:
                log.append(record, sync=True)
            disk.promise(record)
    for moment, machine in disk.machines(tmp_path / "machines"):
        if moment.promised:
            found = (read_mapped_log if is_mapped else read_log)(machine / "log")
            assert found[: len(moment.promised)] == moment.promised, moment.change


class ForgetfulDisk:
    """The bytes of a log on a disk; after a sync, also one that fails, the system counts all bytes as written."""

    def __init__(self, memory: Any = None) -> None:
        self.memory, self.content, self.fails = memory, bytearray(), False
        self._changed: list[tuple[int, bytes]] = []

    def __getitem__(self, place: slice) -> bytes:
        return self.memory[place]

    def __setitem__(self, place: slice, content: bytes) -> None:
        self.memory[place] = content
        self._changed.append((place.start or 0, content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def pwrite(self, write: Any, name: str, file: int, content: Any, begin: int) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{file}")) == name:
            self._changed.append((begin, bytes(content)))
        return write(file, content, begin)

    def sync(self, file: int) -> None:
        changed, self._changed = self._changed, []
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for begin, content in changed:
            self.content[len(self.content) :] = bytes(max(begin + len(content) - len(self.content), 0))
            self.content[begin : begin + len(content)] = content


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="files are told by their descriptors")
@pytest.mark.parametrize("reopens", [False, True])
def test_a_log_writes_again_what_a_failed_sync_lost(
    reopens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = ForgetfulDisk(), os.pwrite
    monkeypatch.setattr(os, "pwrite", partial(disk.pwrite, write, "log"))
    monkeypatch.setattr(os, "fsync", disk.sync)
    log = Log(tmp_path / "log")
    for number in range(4):
        log.append(record_of(number), sync=number == 1)
    disk.fails = True
    for _ in range(2):
        with pytest.raises(StorageError, match="log"):
            log.append(b"refused", sync=True)
    disk.fails = False
    if reopens:
        log.close()
        log = Log(tmp_path / "log")
    log.append(b"last", sync=True)
    (tmp_path / "disk").write_bytes(disk.content)
    assert read_log(tmp_path / "disk") == read_log(log.path) == [*map(record_of, range(4)), b"last"]
    # The system may have dropped the bytes from memory, too.
    log.append(b"lost", sync=False)
    disk.fails = True
    with pytest.raises(StorageError, match="log"):
        log.append(b"refused", sync=True)
    disk.fails = False
    write(log._file, bytes(28), log.size - 28)
    with pytest.raises(DataError, match=f"expected an intact record at byte {log.size - 28}"):
        log.append(b"refused", sync=True)
    log.close()


@pytest.mark.parametrize("clears", [False, True])
def test_a_mapped_log_writes_again_what_a_failed_sync_lost(
    clears: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MappedLog(tmp_path / "log")
    disk = ForgetfulDisk(log._memory)
    log._memory = disk  # type: ignore[assignment]
    disk[:FIRST] = disk[:FIRST]
    monkeypatch.setattr(os, "fdatasync", disk.sync)
    log.append(b"first")
    log.sync()
    if clears:
        log.clear()
    log.append(b"second")
    disk.fails = True
    for _ in range(2):
        with pytest.raises(StorageError, match="log"):
            log.sync()
    disk.fails = False
    log.append(b"third")
    log.sync()
    (tmp_path / "disk").write_bytes(disk.content)
    assert read_mapped_log(tmp_path / "disk") == [b"first"] * (not clears) + [b"second", b"third"]


def test_descriptors_that_an_interrupt_kept_from_opening_close_in_silence() -> None:
    kinds = [Descriptor]
    for kind in kinds:
        kinds += kind.__subclasses__()
        kind.__new__(kind).__del__()
    assert {Log, MappedLog, TailFile} <= set(kinds)


@pytest.mark.parametrize(
    ("later", "is_refused"), [([], False), ([False] * 3, False), ([True], False), ([True, False], True)]
)
@pytest.mark.parametrize("is_noted", [False, True])
def test_the_first_lost_page_ends_a_log_unless_it_was_synced(
    later: list[bool], is_refused: bool, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a record that follows a synced record proves that the power was not cut during the sync."""
    log = Log(tmp_path / "log")
    log.append(b"a" * 3500, sync=True)
    begin = log.size
    log.append(b"b" * 1500, sync=False)
    noted = note_path(log.path).read_bytes()
    for sync in later:
        log.append(b"c", sync=sync)
    log.close()
    note_path(log.path).write_bytes(noted if is_noted else b"")
    (tmp_path / "boot").write_text("2" * 15)
    monkeypatch.setattr(locking, "_BOOT", tmp_path / "boot")
    content = bytearray(log.path.read_bytes())
    content[begin:4096] = bytes(4096 - begin)  # of the second record, only its second page reached the disk
    assert any(content[4096:])
    log.path.write_bytes(content)
    if is_refused:
        for opened in (read_log, Log):
            with pytest.raises(DataError, match=f"expected an intact record at byte {begin}, found a damaged record"):
                opened(log.path)
        return
    assert read_log(log.path) == [b"a" * 3500]
    with pytest.warns(StoreWarning, match="its last 1524 bytes") if is_noted else nullcontext():
        Log(log.path).close()
    assert log.path.stat().st_size == begin


def test_of_a_mapped_log_only_synced_records_are_promised_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "records"
    log = MappedLog(path)
    for number in range(9):
        log.append(bytes([number]) * 40)
        if number == 5:
            log.sync()
    content = bytearray(path.read_bytes())
    content[8:16] = bytes(8)  # of another start of the machine
    for number in range(9):
        begin = FIRST + number * (HEAD + 40)
        for damage in (bytes(HEAD + 40), b"x"):
            damaged = bytearray(content)
            damaged[begin + 8 : begin + 8 + len(damage)] = damage
            damaged[begin : begin + len(damage[:8])] = damage[:8]
            path.write_bytes(damaged)
            if number < 6:
                with pytest.raises(DataError, match=f"expected an intact record at byte {begin}"):
                    read_mapped_log(path)
            else:
                assert read_mapped_log(path) == [bytes([number]) * 40 for number in range(number)]
    content[16] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="expected the seed of the checksums twice"):
        read_mapped_log(path)


def test_a_copy_of_records_behind_a_log_is_not_read(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log, MappedLog(tmp_path / "mapped") as mapped:
        for record in (b"a", b"", b"bc"):
            log.append(record, sync=True)
            mapped.append(record)
    for name, head in (("log", 0), ("mapped", 24)):
        content = (tmp_path / name).read_bytes()
        end = head + 3 * 24 + 3
        (tmp_path / name).write_bytes(content[:end] + content[head:end] + bytes(99))
    assert read_log(tmp_path / "log") == [b"a", b"", b"bc"]
    with pytest.raises(DataError, match=f"an intact record at byte {end}"):
        read_mapped_log(tmp_path / "mapped")
