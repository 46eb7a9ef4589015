"""A file that records are appended to, and that is read as a whole when it is opened.

Every record has its length, its checksum and the checksum of these two before it, little-endian in 8, 4 and 4 bytes::

    b"abc"  ->  03 00 00 00 00 00 00 00 | c2 41 24 35 | checksum of these 12 bytes | 61 62 63

A crash can only leave the last record torn. It was never acknowledged, so it is dropped; damage before it is an error.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from mouse_core.errors import DataError
from mouse_core.files.locking import Descriptor
from mouse_core.files.writing import beside, publish, remove, storing, sync_folders, write_all, write_partial

# Length of the record, its checksum, and the checksum of these two: a length that cannot be trusted would hide
# everything behind it.
_HEADER = struct.Struct("<QII")


def _frame(record: bytes) -> bytes:
    length_and_sum = _HEADER.pack(len(record), zlib.crc32(record), 0)[:-4]
    return length_and_sum + zlib.crc32(length_and_sum).to_bytes(4, "little") + record


class Log(Descriptor):
    """Records in the order they were appended. The folder has one writer at a time.

    Args:
        path: The file, made if it is not there.

    Raises:
        DataError: A record that is not what was written.
        StorageError: The file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._named = False  # a process that made it may have died before its name was on the disk
        with storing(f"log {path}"):
            remove(beside(path))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                content = path.read_bytes()
                self.records, self.size = _parse(path, content)
                if self.size < len(content):
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

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace all records by these, at once.

        Raises:
            StorageError: They cannot be written; the log is as it was, or has these records and not yet its name on
                the disk, which the next ``append`` sees to.
        """
        content = b"".join(map(_frame, records))
        with storing(f"log {self.path}"):
            partial = write_partial(self.path, content)
            file = -1
            try:
                file = os.open(partial, os.O_RDWR | getattr(os, "O_BINARY", 0))
                os.fsync(file)
                publish([self.path])
            except BaseException:
                if file >= 0:
                    os.close(file)
                remove(partial)
                raise
            # The name is the new file's from here on, whatever fails.
            before, self._file, self.size, self._named = self._file, file, len(content), False
            os.close(before)
            self._name()

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
    with storing(f"log {path}"):
        return _parse(path, path.read_bytes())[0] if path.exists() else []


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
        if not path.exists():
            return [], position
        with path.open("rb") as file:
            file.seek(position)
            records, read = _parse(path, file.read(), position)
    return records, position + read


def _parse(path: Path, content: bytes, first: int = 0) -> tuple[list[bytes], int]:
    """The records of what is read from byte ``first`` on, and where in it the last whole one ends."""
    records, position = [], 0
    while position + _HEADER.size <= len(content):
        length, checksum, header_sum = _HEADER.unpack_from(content, position)
        begin = position + _HEADER.size
        if zlib.crc32(content[position : begin - 4]) != header_sum:
            if not any(content[position:]):
                break  # room that was made for a record and never filled
            raise DataError(f"log {path}: expected a record at byte {first + position}, found damage")
        record = content[begin : begin + length]
        if len(record) < length:
            break
        if zlib.crc32(record) != checksum:
            if begin + length == len(content):
                break
            raise DataError(
                f"log {path}: expected the record at byte {first + position} as it was written, found damage"
            )
        records.append(record)
        position = begin + length
    return records, position
