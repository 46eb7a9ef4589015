"""A file that records are appended to, and that is read when it is opened.

Every record has its length, its checksum and the checksum of these two before it, little-endian in 8, 4 and 4 bytes::

    b"abc"  ->  03 00 00 00 00 00 00 00 | c2 41 24 35 | checksum of these 12 bytes | 61 62 63

A crash can only leave the last record torn. It was never acknowledged, so it is dropped; damage before it is an error.
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
from mouse_core.files.locking import Descriptor
from mouse_core.files.writing import beside, publish, remove, storing, sync_folders, write_all

# Length of the record, its checksum, and the checksum of these two: a length that cannot be trusted would hide
# everything behind it.
_HEADER = struct.Struct("<QII")
_BLOCK = 2**20


def _frame(record: bytes) -> bytes:
    length_and_sum = _HEADER.pack(len(record), zlib.crc32(record), 0)[:-4]
    return length_and_sum + zlib.crc32(length_and_sum).to_bytes(4, "little") + record


class Log(Descriptor):
    """Records in the order they were appended. The folder has one writer at a time.

    Args:
        path: The file, made if it is not there.
        visit: Is given each record that is there, and where it begins; None: all are in ``records``.

    Raises:
        DataError: A record that is not what was written.
        StorageError: The file cannot be read or written.
    """

    def __init__(self, path: Path, visit: Callable[[int, bytes], None] | None = None) -> None:
        self.path = path
        self.records: list[bytes] = []
        self.size = 0
        self._named = False  # a process that made it may have died before its name was on the disk
        with storing(f"log {path}"):
            remove(beside(path))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                with path.open("rb") as file:
                    for begin, record in _records(path, file):
                        self.size = begin + _HEADER.size + len(record)
                        if visit is None:
                            self.records.append(record)
                        else:
                            visit(begin, record)
                if self.size < os.fstat(self._file).st_size:
                    os.ftruncate(self._file, self.size)
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

    def cut(self, size: int) -> None:
        """Drop everything after the first ``size`` bytes.

        Raises:
            StorageError: That cannot be done; the log is as it was.
        """
        with storing(f"log {self.path}"):
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
        return places

    def _name(self) -> None:
        """Wait until the file's name is on the disk."""
        if not self._named:
            sync_folders([self.path.parent])
            self._named = True


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
    records = []
    with storing(f"log {path}"):
        if not path.exists():
            return [], position
        with path.open("rb") as file:
            file.seek(position)
            for begin, record in _records(path, file, position):
                records.append(record)
                position = begin + _HEADER.size + len(record)
    return records, position


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
