"""Read the messages of MCAP files (https://mcap.dev/spec).

A file is a sequence of records: an opcode (1 byte), a length (8 bytes) and the content. Chunks contain compressed
records. Lengths, sizes and checksums are checked before a content is used: a chunk is decompressed to the size that it
announces and no further, and its CRC is compared before its records are read.

The package ``mcap`` is not used here, as it trusts the file. Its reader returns fewer bytes than a record announces
without an error, reads the rest of the file for a message that is announced too short, and decompresses a chunk to any
size.
"""

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
    """The topic and type of messages.

    Args:
        topic: Name of the topic.
        type: Name of the messages' type.
        encoding: Encoding of the messages: "cdr", "ros1", "json", "protobuf".
        schema: Language of the definition.
        definition: Definition of the type.
    """

    topic: str
    type: str
    encoding: str
    schema: str
    definition: str


Messages = Iterator[tuple[Channel, int, memoryview]]
"""Messages in the order of the file: the channel, the time of recording in nanoseconds, and the bytes."""


def mcap_messages(path: str | os.PathLike[str]) -> Messages:
    """Yield all messages of an MCAP file.

    Raises:
        DataError: A file that is damaged or truncated.
    """
    with reading(path), open(path, "rb") as file:
        yield from _Reader(file, os.fspath(path)).messages()


class _Reader:
    """A file, and the schemas and channels that its records have defined so far."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size
        self._schemas = {0: ("", "", "")}  # name, language, definition; number 0 stands for no schema
        self._channels: dict[int, Channel] = {}

    def messages(self) -> Messages:
        head = self._file.read(len(MAGIC))
        if head != MAGIC:
            raise damaged(self._path, f"expected an MCAP file, found one that begins with {head!r}")
        crc, kind = zlib.crc32(head), 0
        while kind not in (_DATA_END, _FOOTER):
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
            crc_before, crc = crc, zlib.crc32(head, crc)
            if kind not in _READ:  # an attachment may be larger than memory
                for first in range(0, length, _PIECE):
                    crc = zlib.crc32(self._file.read(min(_PIECE, length - first)), crc)
                continue
            content = self._file.read(length)
            crc = zlib.crc32(content, crc)
            with reading(self._path, at=f"record at byte {place}"):
                if kind == _DATA_END and struct.unpack_from("<I", content)[0] not in (0, crc_before):
                    raise damaged(self._path, "the CRC of the data does not match")
                if kind == _CHUNK:
                    yield from self._chunk_messages(content)
                elif kind in (_SCHEMA, _CHANNEL, _MESSAGE):
                    yield from self._record_messages(kind, memoryview(content))
        # The index behind the data is not read.
        self._file.seek(-len(MAGIC), os.SEEK_END)
        if self._file.read() != MAGIC:
            raise damaged(self._path, "expected the mark that ends an MCAP file, found none: it was cut")

    def _chunk_messages(self, content: bytes) -> Messages:
        """Decompress a chunk and yield its messages."""
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
        begin = 0
        while begin < size:
            kind, length = struct.unpack_from("<BQ", data, begin)
            begin += 9
            if length > size - begin or kind not in (_SCHEMA, _CHANNEL, _MESSAGE):
                raise damaged(self._path, f"expected a message in a chunk, found record {kind} of {length} bytes")
            yield from self._record_messages(kind, data[begin : begin + length])
            begin += length

    def _record_messages(self, kind: int, content: memoryview) -> Messages:
        """Yield the message of a record, or note its schema or channel."""
        if kind == _MESSAGE:
            number, _, time, _ = struct.unpack_from("<HIQQ", content)
            if number not in self._channels:
                raise damaged(self._path, f"expected the channel {number} before its messages, found none")
            yield self._channels[number], time, content[22:]
        elif kind == _SCHEMA:
            (number,) = struct.unpack_from("<H", content)
            name, place = _text(content, 2)
            language, place = _text(content, place)
            self._schemas[number] = name, language, _text(content, place)[0] if "msg" in language else ""
        else:
            number, schema = struct.unpack_from("<HH", content)
            topic, place = _text(content, 4)
            encoding, _ = _text(content, place)
            if schema not in self._schemas:
                raise damaged(self._path, f"expected the schema {schema} before its channel, found none")
            name, language, definition = self._schemas[schema]
            channel = Channel(topic, name, encoding, language, definition)
            if self._channels.setdefault(number, channel) != channel:
                raise damaged(self._path, f"expected one meaning of channel {number}, found {topic!r} besides")


def unpacked(packed: memoryview, compression: str, most: int) -> memoryview:
    """Return decompressed bytes, at most one more than ``most``.

    Args:
        packed: Compressed bytes.
        compression: "zstd", "lz4" (its frames), or "" for none.
        most: Expected number of bytes.
    """
    if not compression:
        return packed
    if compression not in ("zstd", "lz4"):
        raise ValueError(f"expected chunks compressed by zstd or lz4, found {compression!r}")
    data = bytearray()
    with pa.CompressedInputStream(pa.BufferReader(packed), compression) as stream:
        while len(data) <= most and (more := stream.read(min(_PIECE, most + 1 - len(data)))):
            data += more
    return memoryview(data)


def _text(content: Any, place: int) -> tuple[str, int]:
    """Return a text that follows its length (4 bytes), and the position behind it."""
    (length,) = struct.unpack_from("<I", content, place)
    stop = place + 4 + length
    if stop > len(content):
        raise ValueError(f"expected a text of {length} bytes, found the record's end")
    return bytes(content[place + 4 : stop]).decode(), stop
