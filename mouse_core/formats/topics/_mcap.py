"""MCAP files, read record by record: whole chunks are checked before anything in them is believed."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from mouse_core.files.reading import damaged, reading
from mouse_core.formats._files.on_disk import MCAP as MAGIC

_MOST_RECORD = 1 << 28
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = _READ = 2, 3, 4, 5, 6, 15
_PIECE = 1 << 20


class Channel(NamedTuple):
    """What a recording says of the messages of a topic.

    Args:
        topic: It.
        type: Of its messages.
        encoding: Of its messages: "cdr", "ros1", "json", "protobuf".
        schema: What the definition is written in.
        definition: Of the type.
    """

    topic: str
    type: str
    encoding: str
    schema: str
    definition: str


Messages = Iterator[tuple[Channel, int, memoryview]]
"""Messages in the order of the file: of what, when they were recorded in nanoseconds, and their bytes."""


def mcap_messages(path: str | os.PathLike[str]) -> Messages:
    """All messages of an MCAP file.

    Raises:
        DataError: A damaged file, or one that was cut.
    """
    with reading(path), open(path, "rb") as file:
        yield from _Reader(file, os.fspath(path)).messages()


class _Reader:
    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size
        self._schemas: dict[int, tuple[str, str, str]] = {}
        self._channels: dict[int, Channel] = {}

    def messages(self) -> Messages:
        crc, ended = 0, False
        head = self._file.read(len(MAGIC))
        if head != MAGIC:
            raise damaged(self._path, f"expected an MCAP file, found one that begins with {head!r}")
        crc = zlib.crc32(head)
        while not ended:
            place = self._file.tell()
            head = self._file.read(9)
            if len(head) < 9:
                raise damaged(
                    self._path,
                    "expected the record that ends the data, found the file's end: recording was cut; 'mcap recover' "
                    "of the MCAP tools keeps what is whole",
                    at=f"byte {place}",
                )
            kind, length = struct.unpack("<BQ", head)
            most = self._size - place - 9
            if length > (min(_MOST_RECORD, most) if kind in _READ else most):
                raise damaged(
                    self._path, f"expected a record of at most {most} bytes, found {length}", at=f"byte {place}"
                )
            crc_of_data, crc = crc, zlib.crc32(head, crc)
            if kind not in _READ:  # an attachment may be larger than memory
                for first in range(0, length, _PIECE):
                    crc = zlib.crc32(self._file.read(min(_PIECE, length - first)), crc)
                continue
            content = self._file.read(length)
            crc = zlib.crc32(content, crc)
            with reading(self._path, at=f"record at byte {place}"):
                if kind == _DATA_END:
                    (said,) = struct.unpack_from("<I", content)
                    if said and said != crc_of_data:
                        raise damaged(self._path, "the CRC of the data does not match")
                    ended = True
                elif kind == _FOOTER:
                    ended = True
                elif kind == _CHUNK:
                    yield from self._records(self._unpacked(content))
                else:
                    yield from self._record(kind, memoryview(content))
        self._file.seek(-len(MAGIC), os.SEEK_END)
        if self._file.read() != MAGIC:
            raise damaged(self._path, "expected the mark that ends an MCAP file, found none: it was cut")

    def _unpacked(self, content: bytes) -> memoryview:
        """The records of a chunk."""
        _, _, size, crc = struct.unpack_from("<QQQI", content)
        compression, place = _text(content, 28)
        (length,) = struct.unpack_from("<Q", content, place)
        packed = memoryview(content)[place + 8 :]
        if length != len(packed) or size > _MOST_RECORD:
            raise damaged(
                self._path,
                f"expected a chunk of {len(packed)} bytes that become at most {_MOST_RECORD}, "
                f"found {length} that become {size}",
            )
        data = unpacked(packed, compression, size)
        if len(data) != size:
            raise damaged(self._path, f"expected a chunk that becomes {size} bytes, found more or fewer")
        if crc and zlib.crc32(data) != crc:
            raise damaged(self._path, "the CRC of the chunk does not match")
        return data

    def _records(self, data: memoryview) -> Messages:
        place = 0
        while place < len(data):
            kind, length = struct.unpack_from("<BQ", data, place)
            place += 9
            if length > len(data) - place or kind not in (_SCHEMA, _CHANNEL, _MESSAGE):
                raise damaged(self._path, f"expected a message in a chunk, found record {kind} of {length} bytes")
            yield from self._record(kind, data[place : place + length])
            place += length

    def _record(self, kind: int, content: memoryview) -> Messages:
        if kind == _MESSAGE:
            number, _, time, _ = struct.unpack_from("<HIQQ", content)
            if number not in self._channels:
                raise damaged(self._path, f"expected the channel {number} before its messages, found none")
            yield self._channels[number], time, content[22:]
        elif kind == _SCHEMA:
            (number,) = struct.unpack_from("<H", content)
            name, place = _text(content, 2)
            encoding, place = _text(content, place)
            self._schemas[number] = name, encoding, _text(content, place)[0] if "msg" in encoding else ""
        elif kind == _CHANNEL:
            number, schema = struct.unpack_from("<HH", content)
            topic, place = _text(content, 4)
            encoding, _ = _text(content, place)
            if schema and schema not in self._schemas:
                raise damaged(self._path, f"expected the schema {schema} before its channel, found none")
            name, written, definition = self._schemas.get(schema, ("", "", ""))
            found = Channel(topic, name, encoding, written, definition)
            if self._channels.setdefault(number, found) != found:
                raise damaged(self._path, f"expected one meaning of channel {number}, found {topic!r} besides")


def unpacked(packed: memoryview, compression: str, most: int) -> memoryview:
    """Decompressed bytes; at most one more than ``most``.

    Args:
        packed: Compressed ones.
        compression: "zstd", "lz4" (its frames), or nothing.
        most: How many there are to be.
    """
    if not compression:
        return packed
    if compression not in ("zstd", "lz4"):
        raise ValueError(f"expected chunks compressed by zstd or lz4, found {compression!r}")
    found = bytearray()
    with pa.CompressedInputStream(pa.BufferReader(packed), compression) as stream:
        while len(found) <= most and (more := stream.read(min(_PIECE, most + 1 - len(found)))):
            found += more
    return memoryview(found)


def _text(content: Any, place: int) -> tuple[str, int]:
    """A text with its length before it, and where it ends."""
    (length,) = struct.unpack_from("<I", content, place)
    stop = place + 4 + length
    if stop > len(content):
        raise ValueError(f"expected a text of {length} bytes, found the record's end")
    return bytes(content[place + 4 : stop]).decode(), stop
