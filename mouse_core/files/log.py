"""A file that records are appended to, and that is read when it is opened.

Every record has its length, its checksum and the checksum of these two before it, little-endian in 8, 4 and 4 bytes::

    b"abc"  ->  03 00 00 00 00 00 00 00 | c2 41 24 35 | checksum of these 12 bytes | 61 62 63

A crash can only leave the last record torn. It was never acknowledged, so it is dropped; damage before it is an error.

Torn by a crash and cut later look the same. So a log may have a note beside it, ``<name>.size``, of how many bytes were
acknowledged, which is lowered before the log gets shorter and raised after it got longer::

    append 20 bytes to 100   a crash here leaves 100..120 bytes, of which the note says 100: the rest is dropped
    note 120                 119 bytes are damage from here on, and so is a log that is gone
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mouse_core.errors import DataError
from mouse_core.files.locking import Descriptor, this_boot
from mouse_core.files.writing import beside, publish, remove, storing, sync_folders, write_all

# Length of the record, its checksum, and the checksum of these two: a length that cannot be trusted would hide
# everything behind it.
_HEADER = struct.Struct("<QII")
_BLOCK = 2**20
# Of the note: how many bytes waited for the disk, how many were written, since which start of the machine these are not
# lost with it, and a checksum.
_NOTE = struct.Struct("<QQQI")


def _frame(record: bytes) -> bytes:
    length_and_sum = _HEADER.pack(len(record), zlib.crc32(record), 0)[:-4]
    return length_and_sum + zlib.crc32(length_and_sum).to_bytes(4, "little") + record


class Log(Descriptor):
    """Records in the order they were appended. The folder has one writer at a time.

    Args:
        path: The file, made if it is not there.
        visit: Is given each record that is there, and where it begins; None: all are in ``records``.
        noted: Whether a note beside it tells how long it is, so that a log that was cut, or is gone, is found.

    Raises:
        DataError: A record that is not what was written, or some are missing.
        StorageError: The file cannot be read or written.
    """

    def __init__(self, path: Path, visit: Callable[[int, bytes], None] | None = None, *, noted: bool = False) -> None:
        self.path = path
        self._note, self._boot = Descriptor(), this_boot()
        self._synced = 0
        self.records: list[bytes] = []
        self.size = 0
        self._named = False  # a process that made it may have died before its name was on the disk
        with storing(f"log {path}"):
            remove(beside(path))
            acknowledged = _acknowledged(path) if noted else 0
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                with path.open("rb") as file:
                    for begin, record in _records(path, file):
                        self.size = begin + _HEADER.size + len(record)
                        if visit is None:
                            self.records.append(record)
                        else:
                            visit(begin, record)
                _refuse_missing(path, acknowledged, self.size)
                if self.size < os.fstat(self._file).st_size:
                    os.ftruncate(self._file, self.size)
                if noted:
                    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
                    self._note = Descriptor(os.open(note_path(path), flags, 0o644))
                    self._synced = min(_noted(path)[0], self.size)
                    self._say(self._synced, self.size)
            except BaseException:
                self.close()
                raise

    def append(self, record: bytes, *, sync: bool) -> None:
        """Add a record; after an error the log is as it was.

        Args:
            record: What to add.
            sync: Whether to wait until it is on the disk.

        Raises:
            StorageError: It cannot be written.
        """
        frame = _frame(record)
        with storing(f"log {self.path}"):
            try:
                os.lseek(self._file, self.size, os.SEEK_SET)
                write_all(self._file, frame)
                if sync:
                    os.fsync(self._file)
                    self._name()
            except BaseException:
                self.cut(self.size)
                raise
        self.size += len(frame)
        # It is in the log all the same where that cannot be noted.
        with suppress(OSError):
            self._say(self.size if sync else self._synced, self.size)

    def cut(self, size: int) -> None:
        """Drop everything after the first ``size`` bytes.

        Raises:
            StorageError: That cannot be done; the log is as it was.
        """
        with storing(f"log {self.path}"):
            self._say(min(self._synced, size), size)
            os.ftruncate(self._file, size)
        self.size = size

    def read(self, begin: int) -> bytes:
        """The record that begins at a byte.

        Raises:
            DataError: It is not what was written.
            StorageError: It cannot be read.
        """
        with storing(f"log {self.path}"), self.path.open("rb") as file:
            file.seek(begin)
            for _, record in _records(self.path, file, begin):
                return record
        raise DataError(f"log {self.path}: expected a record at byte {begin}, found its end")

    def rewrite(self, records: Iterable[bytes]) -> list[int]:
        """Replace all records by these, at once; where each of them begins.

        Args:
            records: They, which may be made one by one of those that are there.

        Raises:
            StorageError: They cannot be written; the log is as it was. That its name is on the disk the next ``append``
                sees to, where it cannot be seen to now.
        """
        places, size, new = [], 0, beside(self.path)
        with storing(f"log {self.path}"):
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
            try:
                for record in records:
                    frame = _frame(record)
                    write_all(file, frame)
                    places.append(size)
                    size += len(frame)
                os.fsync(file)
                self._say(0, 0)
                publish([self.path])
            except BaseException:
                os.close(file)
                remove(new)
                raise
            # The name is the new file's from here on, whatever fails.
            before, self._file, self.size, self._named = self._file, file, size, False
            os.close(before)
            with suppress(OSError):
                self._name()
                self._say(size, size)
        return places

    def _say(self, synced: int, written: int) -> None:
        """Note how many bytes were acknowledged."""
        self._synced = synced
        if self._note.file >= 0:
            note = _NOTE.pack(synced, written, self._boot, 0)[:-4]
            os.lseek(self._note.file, 0, os.SEEK_SET)
            write_all(self._note.file, note + zlib.crc32(note).to_bytes(4, "little"))

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._note.close()
        super().close()

    def _name(self) -> None:
        """Wait until the file's name is on the disk."""
        if not self._named:
            sync_folders([self.path.parent])
            self._named = True


def note_path(path: Path) -> Path:
    """Where the note of a log lies."""
    return path.with_name(f"{path.name}.size")


def _noted(path: Path) -> tuple[int, int]:
    """How many bytes of a log waited for the disk, and how many were acknowledged; 0 where nothing is noted."""
    try:
        note = note_path(path).read_bytes()
    except FileNotFoundError:
        return 0, 0
    if len(note) != _NOTE.size or zlib.crc32(note[:-4]) != int.from_bytes(note[-4:], "little"):
        return 0, 0
    synced, written, boot, _ = _NOTE.unpack(note)
    return synced, written if boot and boot == this_boot() else synced


def _acknowledged(path: Path) -> int:
    return _noted(path)[1]


def _refuse_missing(path: Path, acknowledged: int, size: int) -> None:
    """Raise DataError where a log has fewer bytes than were acknowledged."""
    if size < acknowledged:
        found = f"{size} whole ones" if path.exists() else "no file"
        raise DataError(
            f"log {path}: expected {acknowledged} bytes, which were acknowledged, found {found}: records are missing. "
            f"Put it back from a copy, or remove {note_path(path)} to go on with what is left"
        )


def read_log(path: Path) -> list[bytes]:
    """The records of a log that someone else may be appending to.

    Raises:
        DataError: A record that is not what was written.
        StorageError: The file cannot be read.
    """
    return follow_log(path)[0]


def follow_log(path: Path, position: int = 0) -> tuple[list[bytes], int]:
    """The whole records from a position on, and where the last of them ends; someone else may be appending.

    Args:
        path: The file; there are no records where it is not there.
        position: Where a record begins: 0, or what an earlier call returned.

    Raises:
        DataError: A record that is not what was written.
        StorageError: The file cannot be read.
    """
    with storing(f"log {path}"):
        while True:
            acknowledged, records, end = _acknowledged(path), list[bytes](), position
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(position)
                for begin, record in _records(path, file, position):
                    records.append(record)
                    end = begin + _HEADER.size + len(record)
            # Whoever makes it shorter notes that before.
            if end >= acknowledged or acknowledged == _acknowledged(path):
                _refuse_missing(path, acknowledged, end)
                return records, end


def _records(path: Path, file: BinaryIO, position: int = 0) -> Iterator[tuple[int, bytes]]:
    """The whole records of a file that is read from byte ``position`` on, and where each begins."""
    size = os.fstat(file.fileno()).st_size
    while position + _HEADER.size <= size:
        header = file.read(_HEADER.size)
        length, checksum, header_sum = _HEADER.unpack(header)
        if zlib.crc32(header[:-4]) != header_sum:
            if not any(header) and not any(map(any, iter(partial(file.read, _BLOCK), b""))):
                return  # room that was made for a record and never filled
            raise DataError(f"log {path}: expected a record at byte {position}, found damage")
        end = position + _HEADER.size + length
        if end > size:
            return
        record = file.read(length)
        if zlib.crc32(record) != checksum:
            if end == size:
                return
            raise DataError(f"log {path}: expected the record at byte {position} as it was written, found damage")
        yield position, record
        position = end
