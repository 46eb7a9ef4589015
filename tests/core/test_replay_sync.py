"""What mapped rows promise: checksums find damage, ``sync`` says what a crash of the machine leaves."""

import os
import random
import shutil
import signal
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, MouseError, StateError
from mouse_core.replay import ArrayStorage, MemmapStorage, ReplayBuffer
from tests.core.power_cut import Disk
from tests.raising import assert_raises

BOOT, FORMAT = 7 * 8, 7  # where the head says when the machine was started, and which format it has


def small(first: int, n: int) -> dict[str, Any]:
    numbers = np.arange(first, first + n)
    return {"number": numbers, "deep": {"values": numbers[:, None] / 3 + np.arange(5)}, "flag": numbers % 3 == 0}


def large(first: int, n: int) -> dict[str, Any]:
    pixels = (np.arange(first, first + n)[:, None] * 7 + np.arange(1500)) % 251
    return {"number": np.arange(first, first + n), "pixels": pixels.astype(np.uint8)}


def ragged(first: int, n: int) -> dict[str, Any]:
    numbers = range(first, first + n)
    return {"number": np.arange(first, first + n), "note": [f"{number} " * (number % 9 + 1) for number in numbers]}


KINDS: dict[str, Callable[[int, int], dict[str, Any]]] = {"small": small, "large": large, "ragged": ragged}


def numbers_of(storage: MemmapStorage, rows: Callable[[int, int], dict[str, Any]]) -> list[int]:
    if not len(storage):
        return []
    found = storage.get(np.arange(len(storage)))
    for slot, number in enumerate(found["number"].tolist()):
        for name, values in rows(number, 1).items():
            one, other = (
                (values, found[name]) if not isinstance(values, dict) else (values["values"], found[name]["values"])
            )
            assert np.array_equal(other[slot], one[0]), f"row {number}: {name}"
    return sorted(found["number"].tolist())


def restarted(folder: Path) -> None:
    with open(folder / "head", "r+b") as file:
        file.seek(BOOT)
        boot = int.from_bytes(file.read(8), "little")
        file.seek(BOOT)
        file.write(struct.pack("<q", boot + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_the_place_of_another_or_damaged_is_an_error_that_names_the_file(kind: str, tmp_path: Path) -> None:
    rows, good = KINDS[kind], tmp_path / "good"
    storage = MemmapStorage(40, good)
    for first in range(0, 70, 10):  # the ring comes round
        storage.append(rows(first, 10))
    storage.put(np.array([3]), rows(1000, 1))
    storage.close()
    rng, messages = random.Random(3), []
    for path in sorted(good.glob("*-*")):
        for _ in range(12):
            bad = tmp_path / "bad"
            shutil.copytree(good, bad)
            content = bytearray(path.read_bytes())
            place = rng.randrange(len(content))
            content[place] ^= 1 << rng.randrange(8)
            (bad / path.name).write_bytes(content)
            storage = MemmapStorage(None, bad)
            try:
                expected = [*range(30, 70), 1000]
                expected.remove(30 + (3 - 30) % 40)
                assert numbers_of(storage, rows) == sorted(expected)  # it is in a row that is in no use, or a gap
                storage.verify()
            except StateError as error:
                messages.append((str(error), path.name))
                assert_raises(StateError, "to match its checksum|found damage", storage.verify)
            shutil.rmtree(bad)
    assert len(messages) > 10
    for message, name in messages:
        assert message.startswith(f"{bad / name}: expected row" if "sums" not in name else f"{bad}"), message
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(KINDS[kind](0, 40))
    storage.close()
    for path in (tmp_path / "m").glob("*-*"):
        if path.name.startswith(("rows", "sums")):
            content = path.read_bytes()
            size = len(content) // 40
            path.write_bytes(content[:size] * 2 + content[2 * size :])
    assert_raises(StateError, "expected row 1 to match its checksum", MemmapStorage(None, tmp_path / "m").verify)


def test_a_row_in_the_place_of_another_is_an_error(tmp_path: Path) -> None:
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(small(0, 40))
    storage.close()
    path = tmp_path / "m" / "rows-0-0"
    content = path.read_bytes()
    size = len(content) // 40
    path.write_bytes(content[:size] * 2 + content[2 * size :])
    storage = MemmapStorage(None, tmp_path / "m")
    assert storage.get(np.array([0]))["number"].tolist() == [0]
    assert_raises(StateError, "rows-0-0: expected row 1 to match", storage.read, "number", np.array([[0, 1], [2, 3]]))
    assert storage.get(np.array([2]))["number"].tolist() == [2]
    storage.put(np.array([1]), small(7, 1))  # which replaces what is damaged
    assert storage.read("number", slice(0, 4)).tolist() == [0, 7, 2, 3]
    storage.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_flushed_rows_outlive_the_machine(kind: str, tmp_path: Path) -> None:
    """Of all that was written since, any pages may have reached the disk, and any may not."""
    rows, folder, rng = KINDS[kind], tmp_path / "m", random.Random(5)
    storage = MemmapStorage(60, folder, sync="flush")
    first = 0
    for turn in range(6):
        for _ in range(rng.randrange(4)):
            n = rng.choice((1, 5, 30))
            storage.append(rows(first, n))
            first += n
        storage.flush()
        flushed, before = first, files_of(folder)
        n = rng.choice((0, 1, 17, 40, 90))
        storage.append(rows(first, n))
        first += n
        after = files_of(folder)
        for machine in range(4):
            found = tmp_path / f"{turn}-{machine}"
            found.mkdir()
            for name in before.keys() | after.keys():
                pages = any_pages(before.get(name), after.get(name), rng)
                if pages is not None:
                    (found / name).write_bytes(pages)
            restarted(found)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                again = MemmapStorage(60, found)
            numbers = numbers_of(again, rows)
            assert numbers == list(range(numbers[0], numbers[-1] + 1) if numbers else [])
            promised = range(max(first - 60, 0), flushed)
            assert set(promised) <= set(numbers), f"{promised}, found {numbers}"
            assert again.synced in (0, again.written)
            again.append(rows(5000, 1))
            assert 5000 in numbers_of(MemmapStorage(None, found), rows)
            shutil.rmtree(found)


def test_flushed_rows_outlive_the_machine_while_they_move_to_other_files(tmp_path: Path) -> None:
    """The files that the head on the disk names are removed once it names others there."""
    root = tmp_path / "disk"
    root.mkdir()
    disk, array = Disk(root), ReplayBuffer(ArrayStorage(60))
    array.extend(ragged(100, 50))
    with disk.watched():
        storage = MemmapStorage(60, root / "m", sync="flush")
        storage.append(ragged(0, 20))
        storage.flush()
        disk.promise(range(20))
        ReplayBuffer(storage).load_state_dict(array.state_dict())
        storage.flush()
        disk.promise(range(100, 150))
    promises = [frozenset(), frozenset(range(20)), frozenset(range(100, 150))]
    for moment, machine in disk.machines(tmp_path / "machines"):
        if moment.promised:
            restarted(machine / "m")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                found = frozenset(numbers_of(MemmapStorage(60, machine / "m"), ragged))
            assert found in promises[len(moment.promised) :], moment.change


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def any_pages(before: bytes | None, after: bytes | None, rng: random.Random) -> bytes | None:
    """What a disk may have of a file that was on it, and was changed since: the old or the new of every page."""
    if before is None or after is None:
        return before or after
    size, made = max(len(before), len(after)), b""
    for begin in range(0, size, 4096):
        made += rng.choice([before.ljust(size, b"\0"), after.ljust(size, b"\0")])[begin : begin + 4096]
    return made


def test_rows_that_nobody_flushed_are_gone_and_a_warning_says_so(tmp_path: Path) -> None:
    storage = MemmapStorage(40, tmp_path / "m")
    storage.append(small(0, 10))
    storage.flush()
    storage.append(small(10, 5))
    restarted(tmp_path / "m")
    with pytest.warns(UserWarning, match="restarted before 5 of 15 rows were on the disk; they are lost"):
        again = MemmapStorage(None, tmp_path / "m")
    assert numbers_of(again, small) == list(range(10))
    assert again.append(small(10, 1)) == (10, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers_of(MemmapStorage(None, tmp_path / "m"), small) == list(range(11))


@pytest.mark.parametrize("sync", ["none", "flush", "append"])
def test_stats_say_what_is_synced(sync: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(MemmapStorage(40, tmp_path / "m", sync=sync))
    storage = buffer.storage

    def known() -> tuple[int, int]:
        found = buffer.stats()
        assert found["synced"] == storage.synced
        return found["written"], found["synced"]

    buffer.extend(small(0, 10))
    assert known() == (10, 10 if sync == "append" else 0)
    storage.flush()
    assert known() == (10, 0 if sync == "none" else 10)
    buffer.append(
        {name: values[0] for name, values in small(10, 1).items() if name != "deep"} | {"deep": {"values": np.zeros(5)}}
    )
    assert known() == (11, {"none": 0, "flush": 10, "append": 11}[sync])
    state = buffer.state_dict()
    buffer.empty()
    assert known() == (0, 0)
    buffer.load_state_dict(state)
    assert known() == (11, 11 if sync == "append" else 0)
    storage.close()
    assert known()[1] == (0 if sync == "none" else 11)


@pytest.mark.parametrize("what", ["rows", "values", "sums", "head"])
def test_flush_waits_for_every_file(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(40, tmp_path / "m", sync="flush")
    storage.append(ragged(0, 10))
    synced, sync = [], os.fsync

    def noting(file: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    monkeypatch.setattr(os, "fsync", noting)
    storage.flush()
    assert any(name.startswith(what) for name in synced), synced
    assert synced[-1] == "head"  # which says so when all others are there


def die_making_files(folder: Path, files: int) -> None:
    """Be killed when so many files have been made or lengthened."""
    room, calls = os.posix_fallocate, iter(range(files))

    def killed(*arguments: Any) -> None:
        room(*arguments)
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    buffer = ReplayBuffer(MemmapStorage(50, folder))
    state = buffer.state_dict()
    os.posix_fallocate = killed
    while True:
        buffer.load_state_dict(state)
        buffer.extend(ragged(0, 40))


def test_who_goes_on_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    storage = MemmapStorage(50, folder)
    storage.append(ragged(0, 50))
    left = 0
    for turn in range(1, 9):
        child = os.fork()
        if not child:
            try:
                die_making_files(folder, turn)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        left += len(list(folder.iterdir())) > 6
        storage.append(ragged(0, 1))
        names = {path.name.split("-")[0] for path in folder.iterdir()}
        assert names == {"head", "lock", "rows", "schema", "sums", "values"}
        assert len(list(folder.iterdir())) < 7
        numbers_of(storage, ragged)
    assert left > 3


def of_format(folder: Path, number: int) -> None:
    with open(folder / "head", "r+b") as file:
        file.seek(FORMAT)
        file.write(str(number).encode())


def test_checkpoints_go_between_storages_and_other_formats_are_refused(tmp_path: Path) -> None:
    array = ReplayBuffer(ArrayStorage(40))
    array.extend(large(0, 60))
    mapped = ReplayBuffer(MemmapStorage(40, tmp_path / "m", sync="append"))
    mapped.load_state_dict(array.state_dict())
    assert numbers_of(MemmapStorage(None, tmp_path / "m"), large) == list(range(20, 60))
    assert issubclass(StateError, MouseError)
    storage = MemmapStorage(9, tmp_path / "rows", sync="flush")
    storage.append(small(0, 5))
    other = ArrayStorage(9)
    other.append(small(0, 5))
    other.empty()
    storage.load(other.state())
    assert len(MemmapStorage(9, tmp_path / "rows", sync="flush")) == 0
    assert_raises(ConfigError, "sync: expected one of", MemmapStorage, 40, tmp_path / "s", sync="always")
    assert not (tmp_path / "s").exists()
    of_format(tmp_path / "m", 3)
    assert_raises(StateError, "head: expected a MemmapStorage of format 1, found", MemmapStorage, None, tmp_path / "m")
