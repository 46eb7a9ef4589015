"""Records in a file that is mapped: adding one costs no call of the system, and survives the process.

Behind a header of 24 bytes each record has its length and a checksum before it, little-endian in 8 and 4 bytes, and
zeros behind it up to a multiple of 8; a length of 0 is the end. Its length is written last, as one word::

    b"abc"  ->  03 00 00 00 00 00 00 00 | checksum | 61 62 63 | 00        and the next length: 00 00 00 00 00 00 00 00

The header says what the file is, on which machine since which start it is written, and how often it was cleared, from
which checksums begin: records from before that are none, also where a power cut left only some pages.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import mapped, open_file, origin, set_aside, sync_mapped
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import storing

_MAGIC = b"mouserec"
_HEADER = struct.Struct("<8sQQ")
_WORD: Callable[[int], bytes] = struct.Struct("<Q").pack
_SUM: Callable[[int], bytes] = struct.Struct("<I").pack
_FIRST = _HEADER.size
_BYTES = 1 << 14
_ZEROS = bytes(16)


class MappedRecords(Descriptor):
    """A new file of records, which one process writes.

    Args:
        path: The file.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cleared = 0
        self._end = _FIRST
        with storing(f"records {path}"):
            self._file = open_file(path, create=True)
            try:
                set_aside(self._file, _BYTES)
                self._bytes = _BYTES
                self._memory = mapped(self._file, _BYTES, write=True)
            except BaseException:
                os.close(self._file)
                self._file = -1
                os.unlink(path)
                raise
        self._memory[:_FIRST] = _HEADER.pack(_MAGIC, origin(self._file), 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return self._end == _FIRST

    def append(self, record: bytes) -> None:
        """Add a record.

        Raises:
            StorageError: The disk has no room for it.
        """
        begin = self._end
        end = begin + 12 + len(record)
        padding = -end % 8
        end += padding
        if end + 8 > self._bytes:
            self._grow(end + 8)
        memory = self._memory
        content = _SUM(zlib.crc32(record, self._cleared)) + record + _ZEROS[: padding + 8]
        memory[begin + 8 : end + 8] = content
        memory[begin : begin + 8] = _WORD(len(record))
        self._end = end

    def clear(self) -> None:
        """Drop all records."""
        self._memory[_FIRST : _FIRST + 8] = _ZEROS[:8]
        self._cleared = (self._cleared + 1) % (1 << 32)
        self._memory[16:24] = _WORD(self._cleared)
        self._end = _FIRST

    def sync(self) -> None:
        """Wait until all records are on the disk.

        Raises:
            StorageError: They are not.
        """
        with storing(f"records {self.path}"):
            sync_mapped(self._file, self._memory)

    def _grow(self, least: int) -> None:
        size = max(2 * self._bytes, -(-least // _BYTES) * _BYTES)
        with storing(f"records {self.path}"):
            set_aside(self._file, size, begin=self._bytes)
            memory = mapped(self._file, size, write=True)
        self._memory.close()
        self._memory, self._bytes = memory, size

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file >= 0:
            self._memory.close()
        super().close()


def read_mapped_records(path: Path) -> list[bytes]:
    """The records of a file that nobody writes.

    Raises:
        DataError: It is damaged. After a restart of the machine it may have lost its end, which is none.
    """
    with reading(path):
        content = path.read_bytes()
        file = open_file(path, write=False)
        try:
            here = origin(file)
        finally:
            os.close(file)
    if len(content) < _FIRST + 8 or not any(content[:_FIRST]):
        return []  # who made it died before it was one
    magic, written, cleared = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise damaged(path, f"expected a file of records, found {magic!r}")
    records, at = [], _FIRST
    while length := int.from_bytes(content[at : at + 8], "little"):
        record = content[at + 12 : at + 12 + length]
        if len(record) < length or zlib.crc32(record, cleared) != int.from_bytes(content[at + 8 : at + 12], "little"):
            if here and here == written:
                raise damaged(path, "expected the record that was written, found another", at=f"byte {at}")
            break
        records.append(record)
        at += 12 + length
        at += -at % 8
    return records
