"""Durable logs: records are appended to a file, and are read when the file is opened again.

A header precedes each record: the length of the record, the number of bytes of the log that were synced when the
record was appended, the checksum of the record, and a checksum of these three numbers, little-endian in 8, 8, 4 and 4
bytes::

    b"abc"  ->  03 00 00 00 00 00 00 00 | 00 00 00 00 00 00 00 00 | 50 39 2f 89 | checksum of these 20 bytes | 61 62 63

The seed of a record's checksum is the position of the header, so a copy of a record at another position is damaged.

A crash can leave an incomplete record, and a power cut can lose any page that was not synced, even if a later page
survives. Therefore the first damaged record is the end of the log, unless the damaged bytes were promised. If promised
bytes are damaged, reading raises DataError. Two kinds of bytes are promised:

- synced bytes. A later header, or the note (see below), contains the number of synced bytes. Example: the record at
  byte 100 is damaged, and a record at byte 900 has the number 300; then the damage is an error. If the number were 100,
  byte 100 would be the end of the log, and the record at byte 900 would be dropped.
- acknowledged bytes, until the machine is restarted. If the last start of the machine lost acknowledged bytes, opening
  the log emits a StoreWarning.

If a sync fails, the operating system can count the bytes as written, so that a later sync succeeds without them.
Therefore, after a failed sync, the next sync writes all bytes again that were not synced.

The two kinds of logs are:

- ``Log`` is a file that grows with each record. A file without its last records looks like a shorter log. Therefore a
  second file, the note ``<name>.size``, contains the numbers of synced and of acknowledged bytes. The numbers are
  reduced before the log is shortened, and increased after a record was appended::

      append 20 bytes to 100   after a crash here, the log has 100..120 bytes; bytes after the noted 100 are dropped
      write 120 to the note    from now on, a log of 119 bytes is damaged, and a missing log raises DataError too

  The note is not synced when its numbers increase, so after a power cut the numbers can be too small.
- ``MappedLog`` is a log in mapped memory. Appending a record needs no system call, and takes 1 microsecond instead of
  8. The length of a record is written last, as one word; a length of 0 marks the end of the log. Only the process that
  created a mapped log appends to that log. Other processes read the log after that process has ended.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mouse_core.errors import DataError, StoreWarning
from mouse_core.files.checksum import checksum
from mouse_core.files.locking import Descriptor, this_boot
from mouse_core.files.mapped import mapped, open_file, origin, set_aside, sync_mapped
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import beside, publish, remove, storing, sync_folders, write_at

# Length of the record, number of synced bytes, checksum of the record, and the checksum of these numbers.
_HEADER = struct.Struct("<QQII")
# The note: number of synced bytes, number of acknowledged bytes, the boot in which they were acknowledged, a checksum.
_NOTE = struct.Struct("<QQQI")
# The header of a mapped log: the magic, the origin of the file, and the seed of the checksums.
_MAPPED = struct.Struct("<8sQQ")
_MAGIC = b"mouserec"
_LEAST_BYTES = 1 << 14
_ZEROS = bytes(8)


def _sum(content: bytes, seed: int = 0) -> int:
    """Return the lower half of the checksum of ``content``."""
    return checksum(content, seed) & 0xFFFFFFFF


def _sum_at(record: bytes, position: int, seed: int) -> int:
    """Return the checksum of a record at byte ``position``; at any other byte, the record is damaged."""
    return _sum(record, seed << 32 ^ position)


def _frame(record: bytes, position: int, synced: int, seed: int = 0) -> bytes:
    numbers = _HEADER.pack(len(record), synced, _sum_at(record, position, seed), 0)[:-4]
    return numbers + _sum(numbers, seed).to_bytes(4, "little") + record


def _was_synced(content: bytes, position: int, seed: int) -> bool:
    """Whether, according to a header, byte ``position`` of the log was synced; ``content`` has the bytes of the log
    from this byte on.
    """
    for shift in range(8):
        # A header at byte ``shift + 8 * i`` of ``content`` has the number of synced bytes in ``words[i + 1]``.
        words = np.frombuffer(content, "<u8", (len(content) - shift) // 8, shift)[1:]
        for i in np.flatnonzero((words > position) & (words <= position + len(content))).tolist():
            begin = shift + 8 * i
            header = content[begin : begin + _HEADER.size]
            if _sum(header[:-4], seed) == int.from_bytes(header[-4:], "little"):
                return True
    return False


def _records(
    path: Path, file: BinaryIO, position: int = 0, *, seed: int = 0, keeps_all: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield the start of each undamaged record, and the record, from byte ``position`` on, up to the end of the log.

    Args:
        path: The file, for messages.
        file: The file at ``position``.
        position: The start of a record.
        seed: The seed of the checksums.
        keeps_all: Whether bytes that were not synced are promised, too; then a length of 0 marks the end of the log.

    Raises:
        DataError: A record is damaged, and its bytes were promised.
    """
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, _, record_sum, header_sum = _HEADER.unpack(header)
        if _sum(header[:-4], seed) == header_sum:
            record = file.read(length)
            if len(record) == length and _sum_at(record, position, seed) == record_sum:
                yield position, record
                position += _HEADER.size + length
                continue
        file.seek(position)
        if (keeps_all and length) or _was_synced(file.read(), position, seed):
            raise DataError(f"log {path}: expected an intact record at byte {position}, found a damaged record")
        return


def _whole(path: Path, file: Any, begin: int, end: int, seed: int = 0) -> bytes:
    """Return bytes ``begin..end`` of a log, which are records; raise DataError if a record is damaged."""
    file.seek(begin)
    records, position = _records(path, file, begin, seed=seed), begin
    while position < end:
        at, record = next(records, (-1, b""))
        if at < 0:
            raise DataError(f"log {path}: expected an intact record at byte {position}, found a damaged record")
        position = at + _HEADER.size + len(record)
    file.seek(begin)
    content: bytes = file.read(end - begin)
    return content


# ---------------------------------------------------------------------- a file that grows


class Log(Descriptor):
    """A log with one writer at a time, and any number of readers; see ``read_log`` and ``follow_log``.

    Args:
        path: The file; created if it is missing.
        visit: Function that is called with the start of each record, and the record; None: all records are stored in
            ``records``.

    Raises:
        DataError: Promised records are damaged or missing.
        StorageError: The file cannot be read or written.
    """

    def __init__(self, path: Path, visit: Callable[[int, bytes], None] | None = None) -> None:
        self.path = path
        self._note, self._boot = Descriptor(), this_boot()
        self._synced = 0
        self.records: list[bytes] = []
        self.size = 0
        self._is_named = False  # whether the file's name is known to be on disk
        self._failed = True  # whether the last sync failed, perhaps in the process that wrote the log before
        with storing(f"log {path}"):
            remove(beside(path))
            synced, acknowledged, written = _noted(path)
            self._file = _open(path)
            try:
                with path.open("rb") as file:
                    for begin, record in _records(path, file):
                        self.size = begin + _HEADER.size + len(record)
                        if visit is None:
                            self.records.append(record)
                        else:
                            visit(begin, record)
                _check_size(path, self.size, acknowledged)
                if self.size < written:
                    warnings.warn(
                        f"log {path}: its last {written - self.size} bytes of {written} are dropped: the file was "
                        "copied, or the machine was restarted, and these bytes were not synced",
                        StoreWarning,
                        stacklevel=3,
                    )
                if self.size < os.fstat(self._file).st_size:
                    os.ftruncate(self._file, self.size)
                    os.fsync(self._file)  # a dropped record must not survive a power cut behind a new record
                self._note = Descriptor(_open(note_path(path)))
                self._acknowledge(min(synced, self.size), self.size)
            except BaseException:
                self.close()
                raise

    def append(self, record: bytes, *, sync: bool) -> None:
        """Append a record; after an error the log is unchanged.

        Args:
            record: The record.
            sync: Whether to wait until the record is on disk.

        Raises:
            StorageError: The record cannot be written.
        """
        frame = _frame(record, self.size, self._synced)
        with storing(f"log {self.path}"):
            try:
                write_at(self._file, frame, self.size)
                if sync:
                    self._sync()
                    self._sync_name()
            except BaseException:
                self.cut(self.size)
                raise
        self.size += len(frame)
        # The record is in the log even if the note cannot be written.
        with suppress(OSError):
            self._acknowledge(self.size if sync else self._synced, self.size)

    def cut(self, size: int) -> None:
        """Shorten the log to its first ``size`` bytes; after a StorageError the log is unchanged."""
        with storing(f"log {self.path}"):
            is_synced = size < self._synced
            self._acknowledge(min(self._synced, size), size)
            os.ftruncate(self._file, size)
            if is_synced:
                with suppress(OSError):
                    os.fsync(self._file)  # as in ``__init__``
        self.size = size

    def read(self, begin: int) -> bytes:
        """Return the record that begins at byte ``begin``.

        Raises:
            DataError: The record is damaged.
            StorageError: The file cannot be read.
        """
        with storing(f"log {self.path}"), self.path.open("rb") as file:
            file.seek(begin)
            for _, record in _records(self.path, file, begin):
                return record
        raise DataError(f"log {self.path}: expected a record at byte {begin}, found the end of the log")

    def rewrite(self, records: Iterable[bytes]) -> list[int]:
        """Replace all records atomically, and return the start of each new record.

        Args:
            records: The new records; an iterator can create them from the old records.

        Raises:
            StorageError: The records cannot be written; the log is unchanged.
        """
        places, size, new = [], 0, beside(self.path)
        with storing(f"log {self.path}"):
            file = _open(new, os.O_TRUNC)
            try:
                for record in records:
                    frame = _frame(record, size, 0)
                    write_at(file, frame, size)
                    places.append(size)
                    size += len(frame)
                os.fsync(file)
                self._acknowledge(0, 0)
                publish([self.path])
            except BaseException:
                os.close(file)
                remove(new)
                raise
            # From here on, the name refers to the new file. If the name cannot be synced now, ``append`` syncs it.
            before, self._file, self.size, self._is_named = self._file, file, size, False
            os.close(before)
            with suppress(OSError):
                self._sync_name()
                self._acknowledge(size, size)
        return places

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._note.close()
        super().close()

    def _acknowledge(self, synced: int, written: int) -> None:
        """Write the note, which has the number of synced bytes and the number of acknowledged bytes.

        If the number of synced bytes decreases, the note is synced, too. Otherwise, after a power cut, the old, larger
        number and the shorter log would look as if records were missing.
        """
        is_smaller, self._synced = synced < self._synced, synced
        if self._note.file >= 0:
            note = _NOTE.pack(synced, written, self._boot, 0)[:-4]
            write_at(self._note.file, note + _sum(note).to_bytes(4, "little"), 0)
            if is_smaller:
                os.fsync(self._note.file)

    def _sync(self) -> None:
        """Wait until all bytes are on disk; if the last sync failed, write the unsynced bytes again."""
        if self._failed and self._synced < self.size:
            with self.path.open("rb") as file:
                write_at(self._file, _whole(self.path, file, self._synced, self.size), self._synced)
        self._failed = True
        os.fsync(self._file)
        self._failed = False

    def _sync_name(self) -> None:
        if not self._is_named:
            sync_folders([self.path.parent])
            self._is_named = True


def _open(path: str | os.PathLike[str], flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)


def note_path(path: Path) -> Path:
    """Return the path of a log's note."""
    return path.with_name(f"{path.name}.size")


def _noted(path: Path) -> tuple[int, int, int]:
    """Return how many bytes of a log were synced, how many must be present, and how many were acknowledged; zeros if
    there is no valid note.
    """
    try:
        note = note_path(path).read_bytes()
    except FileNotFoundError:
        return 0, 0, 0
    if len(note) != _NOTE.size or _sum(note[:-4]) != int.from_bytes(note[-4:], "little"):
        return 0, 0, 0
    synced, written, boot, _ = _NOTE.unpack(note)
    return synced, written if boot and boot == this_boot() else synced, written


def _check_size(path: Path, size: int, acknowledged: int) -> None:
    """Raise DataError if the undamaged records of a log have fewer bytes than its acknowledged records."""
    if size < acknowledged:
        found = f"{size} bytes of undamaged records" if path.exists() else "no file"
        raise DataError(
            f"log {path}: expected {acknowledged} bytes of records, found {found}: records are damaged or missing. "
            f"Restore the log from a copy, or remove {note_path(path)} to continue with the remaining records"
        )


def read_log(path: Path) -> list[bytes]:
    """Return the records of a log to which another process may be appending; raises the errors of ``follow_log``."""
    return follow_log(path)[0]


def follow_log(path: Path, position: int = 0) -> tuple[list[bytes], int]:
    """Return the complete records from a position on, and the end of the last record; another process may be appending.

    Args:
        path: The file; a missing file has no records.
        position: The start of a record: 0, or a position that an earlier call returned.

    Raises:
        DataError: A record is damaged.
        StorageError: The file cannot be read.
    """
    with storing(f"log {path}"):
        while True:
            acknowledged, records, end = _noted(path)[1], list[bytes](), position
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(position)
                for begin, record in _records(path, file, position):
                    records.append(record)
                    end = begin + _HEADER.size + len(record)
            # A writer that shortens the log changes the note first.
            if end >= acknowledged or acknowledged == _noted(path)[1]:
                _check_size(path, end, acknowledged)
                return records, end


# ---------------------------------------------------------------------- mapped memory


class MappedLog(Descriptor):
    """A new log in mapped memory, which one process writes.

    The records follow a header of 24 bytes, and a length of 0 follows the last record. The header has the magic, the
    origin of the file (see ``origin``), and the number of times that the log was cleared. The number of clears is the
    seed of the checksums. As a result, a record that was written before a ``clear`` is never read as a new record, even
    if only some pages survive a power cut.

    Args:
        path: The file.

    Raises:
        StorageError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seed = self._synced = 0
        self._end = _MAPPED.size
        self._failed = False  # whether the last sync failed
        with storing(f"log {path}"):
            self._file = open_file(path, create=True)
            try:
                set_aside(self._file, _LEAST_BYTES)
                self._bytes = _LEAST_BYTES
                self._memory = mapped(self._file, _LEAST_BYTES, write=True)
            except BaseException:
                super().close()
                os.unlink(path)
                raise
        self._memory[: _MAPPED.size] = _MAPPED.pack(_MAGIC, origin(self._file), 0)

    @property
    def is_empty(self) -> bool:
        """Whether the log has no record."""
        return self._end == _MAPPED.size

    def append(self, record: bytes) -> None:
        """Append a record.

        Raises:
            StorageError: The disk has no room for the record.
        """
        begin = self._end
        frame = _frame(record, begin, self._synced, self._seed)
        end = begin + len(frame)
        if end + 8 > self._bytes:
            self._grow(end + 8)
        memory = self._memory
        memory[begin + 8 : end + 8] = frame[8:] + _ZEROS
        memory[begin : begin + 8] = frame[:8]
        self._end = end

    def clear(self) -> None:
        """Remove all records."""
        self._end = _MAPPED.size
        self._memory[self._end : self._end + 8] = _ZEROS
        self._seed, self._synced = (self._seed + 1) % (1 << 32), 0
        self._memory[16:24] = _twice(self._seed).to_bytes(8, "little")

    def sync(self) -> None:
        """Wait until all records are on disk; raises StorageError if syncing fails."""
        with storing(f"log {self.path}"):
            if self._failed:
                self._write_again()
            self._failed = True
            sync_mapped(self._file, self._memory)
        self._failed, self._synced = False, self._end

    def _write_again(self) -> None:
        memory, begin, end = self._memory, max(self._synced, _MAPPED.size), self._end
        memory[begin : end + 8] = _whole(self.path, memory, begin, end, self._seed) + _ZEROS
        memory[: _MAPPED.size] = memory[: _MAPPED.size]

    def _grow(self, least: int) -> None:
        size = max(2 * self._bytes, -(-least // _LEAST_BYTES) * _LEAST_BYTES)
        with storing(f"log {self.path}"):
            set_aside(self._file, size, begin=self._bytes)
            memory = mapped(self._file, size, write=True)
        self._memory.close()
        self._memory, self._bytes = memory, size

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file >= 0:
            self._memory.close()
        super().close()


def read_mapped_log(path: Path) -> list[bytes]:
    """Return the records of a mapped log whose writer has ended.

    Raises:
        DataError: A record is damaged, and its bytes were promised. After a restart of the machine, and in a copy, only
            synced bytes are promised.
    """
    with reading(path), path.open("rb") as file:
        head = file.read(_MAPPED.size)
        if len(head) < _MAPPED.size or not any(head):
            return []  # the writer ended before it wrote the header
        magic, written, seed = _MAPPED.unpack(head)
        if magic != _MAGIC:
            raise damaged(path, f"expected a mapped log, found {magic!r}")
        if seed != _twice(seed >> 32):
            raise damaged(path, f"expected the seed of the checksums twice, found {seed:016x}")
        keeps_all = bool(written) and written == origin(file.fileno())
        return [record for _, record in _records(path, file, _MAPPED.size, seed=seed >> 32, keeps_all=keeps_all)]


def _twice(seed: int) -> int:
    """Return the number that a mapped log's header stores for a 32-bit seed: both halves are the seed, to detect
    flipped bits.
    """
    return seed << 32 | seed
