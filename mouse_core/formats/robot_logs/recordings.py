"""Recordings: MCAP files, and bags of ROS 2 (folders of MCAP or SQLite files with metadata.yaml)."""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, read_bytes, reading
from mouse_core.formats._files.on_disk import BAG as METADATA
from mouse_core.formats._files.on_disk import MCAP as MAGIC
from mouse_core.formats.layouts.reading import natural_key

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


SUFFIXES = (".mcap", ".db3")
_MOST_BYTES, _MOST_VALUE = 4 << 20, 1 << 28
_LIMIT_LENGTH = 0  # sqlite3.SQLITE_LIMIT_LENGTH


@dataclass(frozen=True)
class Recording:
    """The files of a recording.

    Args:
        path: The file, or the folder, for messages.
        files: The files in order.
        packed: Whether each message is compressed.
    """

    path: Path
    files: tuple[Path, ...]
    packed: bool = False

    def messages(self, topics: Collection[str] | None = None) -> Messages:
        """Yield the messages of some topics, by default of all, in the order of the files.

        Raises:
            DataError: A damaged file.
        """
        for file in self.files:
            for channel, time, data in _sqlite_messages(file) if file.suffix == ".db3" else mcap_messages(file):
                if topics is not None and channel.topic not in topics:
                    continue
                if time >= 1 << 63:
                    raise damaged(file, f"{channel.topic}: expected nanoseconds below 2**63, found {time}")
                if self.packed:
                    with reading(file, at=channel.topic):
                        data = unpacked(data, "zstd", _MOST_VALUE)
                        if len(data) > _MOST_VALUE:
                            raise DataError(f"expected a message of at most {_MOST_VALUE} bytes")
                yield channel, time, data


@dataclass(frozen=True)
class Topic:
    """Summary of a topic in a recording.

    Args:
        name: Name of the topic.
        type: Type of its messages.
        encoding: Encoding of its messages: "cdr", "ros1", "json", "protobuf".
        messages: Number of messages.
        seconds: Time from the first message to the last.
    """

    name: str
    type: str
    encoding: str
    messages: int
    seconds: float

    @property
    def rate(self) -> float:
        """Messages per second; 0 for a single message."""
        return (self.messages - 1) / self.seconds if self.seconds else 0.0


def topics_in(path: str | os.PathLike[str]) -> list[Topic]:
    """Return the topics of an MCAP file or a bag of ROS 2, by name; for a folder, those of its first recording.

    Raises:
        ConfigError: A path without a recording.
        DataError: A damaged file.
    """
    topics: dict[str, tuple[Channel, int, int, int]] = {}
    for channel, time, _ in recordings_of(Path(path))[0].messages():
        before = topics.get(channel.topic, (channel, 0, time, time))
        topics[channel.topic] = (channel, before[1] + 1, min(before[2], time), max(before[3], time))
    return [
        Topic(name, channel.type, channel.encoding, count, (last - first) / 1e9)
        for name, (channel, count, first, last) in sorted(topics.items())
    ]


def recordings_of(root: Path, files: str | None = None) -> list[Recording]:
    """Return all recordings at a path: a file, a bag, or those in a folder, ordered by the numbers in their names.

    Args:
        root: The path.
        files: Pattern of the recordings of a folder.

    Raises:
        ConfigError: A path without recordings.
        DataError: A damaged description, or a link that leads out of the folder.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    if root.is_file():
        return [Recording(root, (root,))]
    if (root / METADATA).is_file():
        return [_bag(root)]
    found = [
        one
        for one in root.glob(files or "*")
        if not one.name.startswith(".") and (one.suffix in SUFFIXES or (one / METADATA).is_file())
    ]
    if not found:
        raise ConfigError(f"{root}: expected {files or 'MCAP files or bags of ROS 2'}, found none")
    check_inside(found, root)
    return [
        _bag(one) if one.is_dir() else Recording(one, (one,))
        for one in sorted(found, key=lambda one: natural_key(one.name))
    ]


def _bag(folder: Path) -> Recording:
    import yaml  # type: ignore[import-untyped]

    file = folder / METADATA
    text = read_bytes(file, most_bytes=_MOST_BYTES)
    with reading(file):
        said = yaml.safe_load(text.decode())
        said = said["rosbag2_bagfile_information"]
        names = [PurePosixPath(str(name)).name for name in said["relative_file_paths"]]
        mode = str(said.get("compression_mode") or "none").lower()
        if not names or mode not in ("none", "message"):
            raise ConfigError(
                f"{file}: expected files that are not compressed as a whole, found {names[:4]} and {mode!r}; "
                "'ros2 bag convert' writes them anew, and so does 'zstd -d' for each"
            )
        others = [name for name in names if Path(name).suffix not in SUFFIXES]
        if others:
            raise damaged(file, f"expected files of MCAP or SQLite, found {others[:4]}")
    files = tuple(folder / name for name in names)
    for one in files:
        if not one.is_file():
            raise damaged(one, f"expected a file, as {METADATA} has it, found none")
    check_inside(files, folder)
    return Recording(folder, files, mode == "message")


def _sqlite_messages(file: Path) -> Messages:
    """Yield the messages of an SQLite file of rosbag2."""
    with reading(file):
        left = file.with_name(f"{file.name}-wal")
        if left.is_file() and left.stat().st_size:
            raise damaged(
                file, f"expected a recording that was closed, found {left.name} beside it; 'ros2 bag reindex'"
            )
        # Read-only and without locks: nothing is written beside the file.
        address = f"file:{quote(os.path.abspath(file))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as opened:
            opened.setlimit(_LIMIT_LENGTH, _MOST_VALUE)
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"):
                opened.execute(f"PRAGMA {pragma}")
            tables = _tables(opened)
            if not {"topics", "messages"} <= set(tables):
                raise damaged(file, f"expected the tables topics and messages, found {sorted(tables)[:8]}")
            channels = _channels(opened, "message_definitions" in tables)
            query = "SELECT topic_id, timestamp, data FROM messages ORDER BY id"
            for number, time, data in opened.execute(query):
                if number not in channels or not isinstance(time, int) or time < 0 or not isinstance(data, bytes):
                    raise damaged(file, f"expected a message of topics {sorted(channels)[:8]}, found one of {number!r}")
                yield channels[number], time, memoryview(data)


def _tables(opened: sqlite3.Connection) -> list[str]:
    """Return the names of plain tables; views and virtual tables run code of the file's author."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
    found = [(name, " ".join(str(said).upper().split())) for name, said in opened.execute(query)]
    return [
        name for name, said in found if said.startswith("CREATE TABLE") and " AS (" not in said.replace("AS(", "AS (")
    ]


def _channels(opened: sqlite3.Connection, defined: bool) -> dict[int, Channel]:
    query = "SELECT topic_type, encoding, encoded_message_definition FROM message_definitions"
    rows: Iterator[Any] = opened.execute(query) if defined else iter(())
    said = {name: (encoding, text) for name, encoding, text in rows if isinstance(text, str)}
    found = {}
    for number, name, kind, encoding in opened.execute("SELECT id, name, type, serialization_format FROM topics"):
        if not all(isinstance(one, str) for one in (name, kind, encoding)):
            raise DataError(f"expected a topic's name, type and format, found {(name, kind, encoding)!r:.80}")
        found[number] = Channel(name, kind, encoding, *said.get(kind, ("", "")))
    return found
