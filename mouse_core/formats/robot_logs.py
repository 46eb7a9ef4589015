"""Reads robot recordings (MCAP files and bags) as rows: topics become columns, and ticks of a clock become steps.

The messages of a recording are aligned to the ticks in two passes over its files. The first pass reads only times: it
selects a message for each column and tick, and raises an error if no message is within the tolerance. The second pass
decodes the selected messages, and keeps each value in memory until the last tick that uses it.

The parts of this module in order: recordings and their messages, layouts, decoding of messages, alignment to ticks, and
the reader.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import check_choice, check_number, check_seconds
from mouse_core.columns.episode_rows import Columns, placeholder
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, read_bytes, reading, yaml_object
from mouse_core.formats import columns
from mouse_core.formats._files.on_disk import BAG as METADATA
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout
from mouse_core.formats.layouts import Aligned, Paths, loaded, natural_key
from mouse_core.images.pixels import decode_image
from mouse_core.metadata import DatasetMetadata

# Largest size of a record of an MCAP file, including attachments, and of a decompressed chunk.
_MOST_RECORD, _MOST_CHUNK = 1 << 30, 1 << 28
_PIECE = 1 << 20


class Channel(NamedTuple):
    """The topic and type of messages.

    Args:
        topic: Name of the topic.
        type: Name of the type of the messages.
        encoding: Encoding of the messages: "cdr", "json", "protobuf" and so on.
        schema: Language in which the definition of the type is written.
        definition: Definition of the fields of the type.
    """

    topic: str
    type: str
    encoding: str
    schema: str
    definition: str


Messages = Iterator[tuple[Channel, int, memoryview]]
"""Messages in the order of the file. Each item is a tuple of the channel, the time of recording in nanoseconds, and the
bytes of the message.
"""


def mcap_messages(path: str | os.PathLike[str]) -> Messages:
    """Yield all messages of an MCAP file.

    Raises:
        DataError: The file is damaged or truncated.
        ImportError: The package mcap is not installed.
    """
    try:
        from mcap import records
        from mcap.exceptions import EndOfFile
        from mcap.stream_reader import StreamReader
    except ImportError as error:
        raise ImportError(f"{os.fspath(path)}: MCAP files need mcap: pip install 'mouse-data[robots]'") from error
    schemas = {0: ("", "", "")}  # name, language, definition; number 0 stands for no schema
    channels: dict[int, Channel] = {}
    with reading(path), open(path, "rb") as file:
        most = min(os.fstat(file.fileno()).st_size, _MOST_RECORD)
        reader = StreamReader(file, emit_chunks=True, validate_crcs=True, record_size_limit=most)
        try:
            for outer in reader.records:
                for record in _chunk_records(outer) if isinstance(outer, records.Chunk) else (outer,):
                    if isinstance(record, records.Message):
                        yield channels[record.channel_id], record.log_time, memoryview(record.data)
                    elif isinstance(record, records.Schema):
                        text = record.data.decode() if "msg" in record.encoding else ""
                        schemas[record.id] = record.name, record.encoding, text
                    elif isinstance(record, records.Channel):
                        name, *schema = schemas[record.schema_id]
                        channel = Channel(record.topic, name, record.message_encoding, *schema)
                        if channels.setdefault(record.id, channel) != channel:
                            raise DataError(
                                f"expected one definition of channel {record.id}, found a second: {record.topic!r}"
                            )
        except (EndOfFile, struct.error) as error:
            why = "found the file's end: it is truncated; 'mcap recover' of the MCAP tools keeps its complete part"
            raise damaged(path, f"expected a complete record, {why}", at=f"byte {file.tell()}") from error
        except KeyError as error:
            raise damaged(path, f"expected the schema or channel {error} before its use, found none") from error


def _chunk_records(chunk: Any) -> Iterator[Any]:
    """Yield the records of a chunk. The function is 8 times as fast as the package mcap, and limits the decompressed
    size.
    """
    from mcap.data_stream import ReadDataStream
    from mcap.opcode import Opcode
    from mcap.records import Channel, Message, Schema

    kinds: dict[int, Any] = {Opcode.SCHEMA: Schema, Opcode.CHANNEL: Channel}
    size = chunk.uncompressed_size
    data = unpacked(memoryview(chunk.data), chunk.compression, min(size, _MOST_CHUNK))
    if len(data) != size:
        raise DataError(
            f"expected a chunk that decompresses to {size} bytes (limit {_MOST_CHUNK}), found {len(data)} bytes or more"
        )
    if chunk.uncompressed_crc not in (0, zlib.crc32(data)):
        raise DataError("the CRC of a chunk does not match")
    begin = 0
    while begin < size:
        opcode, length = struct.unpack_from("<BQ", data, begin)
        begin, content = begin + 9 + length, data[begin + 9 : begin + 9 + length]
        if begin > size:
            raise DataError(f"expected a record of {length} bytes in a chunk, found the chunk's end")
        if opcode == Opcode.MESSAGE:
            number, sequence, time, published = struct.unpack_from("<HIQQ", content)
            yield Message(number, time, content[22:], published, sequence)  # type: ignore[arg-type]
        elif opcode in kinds:
            yield kinds[opcode].read(ReadDataStream(io.BytesIO(content)))


def unpacked(packed: memoryview, compression: str, most: int) -> memoryview:
    """Return decompressed bytes; decompression stops after ``most + 1`` bytes.

    Args:
        packed: Compressed bytes.
        compression: "zstd", "lz4" (the frame format of LZ4), or "" for uncompressed bytes.
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


_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Recording:
    """The files of a recording.

    Args:
        path: Path of the file or folder in error messages.
        files: The files in the order of recording.
    """

    path: Path
    files: tuple[Path, ...]

    def messages(self) -> Messages:
        """Yield the messages in the order of the files.

        Raises:
            DataError: A file is damaged.
        """
        for file in self.files:
            for channel, time, data in mcap_messages(file):
                if time >= 1 << 63:
                    raise damaged(file, f"{channel.topic}: expected nanoseconds below 2**63, found {time}")
                yield channel, time, data


@dataclass(frozen=True)
class Topic:
    """Summary of a topic in a recording.

    Args:
        name: Name of the topic.
        type: Type of its messages.
        encoding: Encoding of its messages: "cdr", "json", "protobuf" and so on.
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
    """Return the topics of an MCAP file or a bag of ROS 2, sorted by name.

    In a folder of recordings, only the first recording is read.

    Raises:
        ConfigError: The path has no recording.
        DataError: A file is damaged.
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
    """Return all recordings at a path: a file, a bag, or a folder of them, in the order of the numbers in their names.

    Args:
        root: The path.
        files: File name pattern of the recordings in a folder.

    Raises:
        ConfigError: The path has no recordings.
        DataError: The metadata of a bag are damaged, or a link points outside of the folder.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    if root.is_file():
        return [_recording(root, [root])]
    if (root / METADATA).is_file():
        return [_bag(root)]
    found = [
        one
        for one in root.glob(files or "*")
        if not one.name.startswith(".") and (one.suffix in (".mcap", ".db3") or (one / METADATA).is_file())
    ]
    if not found:
        raise ConfigError(f"{root}: expected {files or 'MCAP files or bags of ROS 2'}, found none")
    check_inside(found, root)
    return [
        _bag(one) if one.is_dir() else _recording(one, [one])
        for one in sorted(found, key=lambda one: natural_key(one.name))
    ]


def _bag(folder: Path) -> Recording:
    file = folder / METADATA
    found = yaml_object(file, read_bytes(file, most_bytes=_MOST_BYTES))
    with reading(file):
        said = found["rosbag2_bagfile_information"]
        files = [folder / PurePosixPath(str(name)).name for name in said["relative_file_paths"]]
        mode = str(said.get("compression_mode") or "none").lower()
    for one in files:
        if not one.is_file():
            raise damaged(one, f"expected a file that {METADATA} lists, found none")
    check_inside(files, folder)
    return _recording(folder, files, mode)


def _recording(path: Path, files: Sequence[Path], mode: str = "none") -> Recording:
    """Return the ``Recording`` that consists of the given files. Raise ConfigError for SQLite files, and for files that
    rosbag2 compressed.
    """
    if not files or mode != "none" or any(file.suffix in (".db3", ".zstd") for file in files):
        raise ConfigError(
            f"{path}: expected MCAP files that rosbag2 did not compress, found {[file.name for file in files[:4]]} "
            f"(compression_mode {mode!r}); rosbags-convert --src {path} --dst NEW --dst-storage mcap writes such files "
            "(pip install rosbags)"
        )
    return Recording(path, tuple(files))


ROLES = ("observation", "action", "reward", "terminated", "truncated", "metadata", "episode")
_PATH = re.compile(r"(?P<topic>[^.\[\]\s]+)(?P<fields>(?:\.\w+|\[[^\[\]]+\])*)")
_PART = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


class Stretch(NamedTuple):
    """A slice of values, from index ``first`` to ``stop - 1``; None stands for the beginning or the end of the
    values.
    """

    first: int | None
    stop: int | None


@dataclass(frozen=True)
class Place:
    """The path of a value in the messages of a topic.

    Args:
        text: The path as written in the layout.
        topic: The topic.
        parts: The parsed path: names of fields, indices ``[3]``, slices ``[2:5]``, and tuples of names ``[a, b]``.
    """

    text: str
    topic: str
    parts: tuple[str | int | Stretch | tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a message must contain; otherwise the path cannot be read."""
        return next((part for part in self.parts if is_names(part)), ())


@dataclass(frozen=True)
class Column:
    """A path of a layout. The values at this path, at all ticks, become a column.

    Args:
        role: The layout's role: "observation", "action", ...
        name: The part of the column name that follows the role; empty if the role has a single path.
        place: The path.
        match: "nearest" or "hold".
        tolerance: Largest distance in time, in seconds.
    """

    role: str
    name: str
    place: Place
    match: str
    tolerance: float

    @property
    def source(self) -> tuple[str, tuple[str, ...]]:
        """The topic, and the names that its messages must contain."""
        return self.place.topic, self.place.names


@dataclass(frozen=True, kw_only=True)
class TopicLayout(Aligned):
    """Selects the values of topics that become columns, and the times that become steps.

    A path is a topic and fields of its messages: ``/joint_states.position``, ``/tf.transforms[0].transform``,
    ``/imu.orientation_covariance[0:3]``. ``/joint_states.position[shoulder, elbow]`` selects two values by their names
    in the message's list ``name``; a message without one of these names is skipped. The path of a message selects all
    numbers of the message in order, without the header. The path of an image selects the pixels. The path of a text
    selects the text. Several paths are given as a list, or as a mapping from names to paths.

    Every recording is an episode with a step for each tick of a clock. At each tick, the message of a topic is either
    the nearest message in time or the last message before the tick (``match``). The message is at most ``tolerance``
    seconds away from the tick. If a topic has no such message, ``gaps`` determines whether an error is raised or the
    episode ends. Missing values are never replaced by older values.

    Args:
        observation: Observed values.
        action: Commanded values.
        reward: A number per step; without ``reward``, rewards are 0.
        terminated: A flag. The value of the flag in the last step states whether the episode terminated.
        truncated: A flag. The value of the flag in the last step states whether the episode was truncated.
        metadata: Values of additional columns, ``metadata_<name>``.
        rate: Ticks per second.
        clock: Topic whose message times are the ticks; an alternative to ``rate``.
        tolerance: Largest distance in seconds between a message and a tick; or a mapping by role or topic, such as
            ``{"action": 0.1, "/task": inf}``.
        match: "nearest" for the nearest message, which can be later than the tick, or "hold" for the last message
            before the tick; or a mapping by role or topic.
        stamps: Which time of a message is used: "log" for the time of recording, or "header" for the time in the
            message's header, if any.
        gaps: What happens at a tick without a message within the tolerance: "refuse" raises an error; "cut" ends the
            episode and begins another episode after the gap.
        trim: Largest number of seconds that are left out at each end of a recording, if a topic has no messages there.
            A longer gap raises an error. ``trim`` applies only to ``gaps="refuse"``.
        episode: Path of a number or flag. While the value is 0, there is no episode; when the value changes, a new
            episode begins.
        alignment: Whether the action and reward at a tick belong to the transition after the tick's observation
            ("outgoing") or before it ("arrived"); or a mapping with the keys ``action`` and ``reward``.
        ending: The kind of end of an episode in which neither ``terminated`` nor ``truncated`` is set: "truncated"
            (``done`` 2) or "terminal" (``done`` 1).
        files: File name pattern of the recordings in a folder, such as ``"episode_*.mcap"``.
    """

    observation: Paths = None
    action: Paths = None
    reward: str | None = None
    terminated: str | None = None
    truncated: str | None = None
    metadata: Paths = None
    rate: float | None = None
    clock: str | None = None
    tolerance: float | Mapping[str, float]
    match: str | Mapping[str, str] = "nearest"
    stamps: str = "log"
    gaps: str = "refuse"
    trim: float = 1.0
    episode: str | None = None
    alignment: str | Mapping[str, str] = "outgoing"
    ending: str = "truncated"
    files: str | None = None

    def __post_init__(self) -> None:
        if self.observation is None:
            raise ConfigError("layout: observation: expected a path, found none")
        if (self.rate is None) == (self.clock is None):
            raise ConfigError("layout: expected either rate (ticks a second) or clock (a topic), found both or neither")
        if self.rate is not None:
            check_number("layout: rate", self.rate, above=True)
        if self.clock is not None and place_of("clock", self.clock).parts:
            raise ConfigError(f"layout: clock: expected a topic, found {self.clock!r}")
        check_choice("layout: stamps", self.stamps, ("log", "header"))
        check_choice("layout: gaps", self.gaps, ("refuse", "cut"))
        check_seconds("layout: trim", self.trim)
        if self.files is not None and (not isinstance(self.files, str) or not self.files or "/" in self.files):
            raise ConfigError(f"layout: files: expected names of recordings in the folder, found {self.files!r:.80}")
        self.check_alignment()
        self.columns()

    def columns(self) -> list[Column]:
        """Return all columns of the layout; if a role has a single path, the attribute ``name`` of its column is empty.

        Raises:
            ConfigError: A path, a tolerance or ``match`` is invalid.
        """
        places = []
        for role in ROLES:
            value = getattr(self, role)
            if value is not None:
                named = _named(role, value)
                if role not in ("observation", "action", "metadata") and [*named] != [""]:
                    raise ConfigError(f"layout: {role}: expected one path, found {value!r:.80}")
                places += [(role, name, place_of(role, path)) for name, path in named.items()]
        names = {place.topic for _, _, place in places} | {role for role, _, _ in places}
        for name in ("tolerance", "match"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and (others := [key for key in value if key not in names]):
                raise ConfigError(f"layout: {name}: expected roles or topics of the layout, found {others[:8]}")
        chosen = []
        for role, name, place in places:
            tolerance, match = self._of("tolerance", role, place), self._of("match", role, place)
            check_seconds("layout: tolerance", tolerance)
            check_choice("layout: match", match, ("nearest", "hold"))
            chosen.append(Column(role, name, place, match, float(tolerance)))
        return chosen

    def _of(self, name: str, role: str, place: Place) -> Any:
        """Return ``tolerance`` or ``match`` for a path: its topic's value or, if there is none, its role's value."""
        value = getattr(self, name)
        if not isinstance(value, Mapping):
            return value
        option = value.get(place.topic, value.get(role))
        if option is None and name == "match":
            return "nearest"
        if option is None:
            raise ConfigError(f"layout: {name}: expected a value for {role} or {place.topic}, found {dict(value)}")
        return option


def _named(role: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {_name(value) if role == "metadata" else "": value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) and name for name in value):
        return dict(value)
    if isinstance(value, Sequence) and value and all(isinstance(path, str) for path in value):
        found = {_name(path): path for path in value}
        if len(found) == len(value):
            return found
    raise ConfigError(
        f"layout: {role}: expected a path, different paths, or a mapping of names to paths, found {value!r:.80}"
    )


def _name(path: str) -> str:
    """Return the default name of a path: ``arm_state_position`` for ``/arm/state.position``."""
    return re.sub(r"\W+", "_", path).strip("_")


def place_of(role: str, path: Any) -> Place:
    """Parse a path.

    Raises:
        ConfigError: The value is not a path.
    """
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None:
        raise ConfigError(f"layout: {role}: expected a path as '/joint_states.position', found {path!r:.80}")
    parts = tuple(name or _bracket(inner) for name, inner in _PART.findall(match["fields"]))
    if sum(map(is_names, parts)) > 1:
        raise ConfigError(f"layout: {role}: expected names in one pair of brackets, found {path!r:.80}")
    return Place(path, match["topic"], parts)


def is_names(part: Any) -> TypeGuard[tuple[str, ...]]:
    """Whether a part of a path is a tuple of names."""
    return isinstance(part, tuple) and not isinstance(part, Stretch)


def _bracket(inner: str) -> int | Stretch | tuple[str, ...]:
    if re.fullmatch(r"\d{1,9}", inner):
        return int(inner)
    if stretch := re.fullmatch(r"(\d{0,9}):(\d{0,9})", inner):
        return Stretch(*(int(edge) if edge else None for edge in stretch.groups()))
    return tuple(name.strip() for name in inner.split(","))


# Letters of the module struct; np.dtype understands them too.
_LETTERS = {
    "bool": "?", "byte": "B", "char": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
# Converted through a text such as "<i8", so that the dtype is int64, not longlong.
_DTYPES = {name: np.dtype(np.dtype(letter).str) for name, letter in _LETTERS.items()}
TEXT = "string"
_MOST_TEXT, _MOST_FIELDS, _MOST_COUNT, _MOST_DEPTH = 1 << 20, 10_000, 1 << 24, 32
_SEPARATOR = re.compile(r"^={20,}\s*$", re.MULTILINE)
_FIELD = re.compile(
    r"(?P<kind>[A-Za-z][\w/]*)(<=\d+)?(?P<many>\[(?P<bound><=)?(?P<count>\d{0,9})\])?\s+(?P<name>[A-Za-z]\w*)\s*(?P<rest>.*)"
)
_HEAD = 4  # number of bytes in front of the values of a message

Decode = Callable[[Any], dict[str, Any]]
"""A function from a message's bytes to its fields by name: NumPy numbers and arrays, texts, messages, and lists."""


def decoder(name: str, encoding: str, schema: str, definition: str) -> Decode:
    """Return the function that decodes the messages of a topic.

    Args:
        name: Type of the messages.
        encoding: Encoding of the messages.
        schema: Language of the definition.
        definition: The definition, for ``parse_definitions``.

    Raises:
        DataError: The encoding is not "cdr" or the language is not "ros2msg", or the definition is invalid.
    """
    if (encoding, schema) != ("cdr", "ros2msg"):
        raise DataError(
            f"{name}: expected messages in CDR with a definition as in .msg files (ros2msg), found {encoding!r} with a "
            f"definition in {schema!r}; read them with the library that wrote them, and write these topics again"
        )
    definitions = parse_definitions(name, definition)
    return partial(_decode, definitions, next(iter(definitions)))


def _decode(definitions: Definitions, name: str, data: Any) -> dict[str, Any]:
    # The first two bytes state the encoding of the rest, the next two its options.
    kind = bytes(data[:2])
    if len(data) < 4 or kind not in (b"\0\0", b"\0\1"):
        raise DataError(f"expected a message in plain CDR, found a message that begins with {bytes(data[:4]).hex()!r}")
    return _MessageReader(definitions, memoryview(data), "<" if kind == b"\0\1" else ">").message(name)


class _MessageReader:
    """Reads a message in CDR, value by value. Numbers begin at multiples of their size, counted from byte 4.

    Args:
        definitions: Definitions of the message type and of the types it contains.
        data: Bytes of the message.
        order: Byte order, "<" or ">".
    """

    def __init__(self, definitions: Definitions, data: memoryview, order: Any) -> None:
        self._definitions, self._data, self._order, self._position = definitions, data, order, _HEAD

    def message(self, name: str) -> dict[str, Any]:
        """Read a message at the current position.

        A message takes at least one byte, so the number of bytes limits the length of a list of messages.
        """
        return {field: self._value(kind) for field, kind in self._definitions[name]}

    def _value(self, kind: Kind) -> Any:
        """Read the value of a field: a single value, or a list."""
        if kind.many is None:
            return self._single_value(kind.name)
        count = int(self._number("uint32")) if kind.many < 0 else kind.many
        if kind.name in _LETTERS:
            return self._numbers(kind.name, count)
        if count > len(self._data) - self._position:
            raise DataError(f"expected {count} values of {kind.name}, found the message's end")
        return [self._single_value(kind.name) for _ in range(count)]

    def _single_value(self, name: str) -> Any:
        if name == TEXT:
            return self._text()
        return self._number(name) if name in _LETTERS else self.message(name)

    def _advance(self, size: int) -> int:
        """Move the position forward by ``size`` bytes, and return the position before the move."""
        first, self._position = self._position, self._position + size
        if self._position > len(self._data):
            raise DataError(f"expected {size} bytes at byte {first}, found the message's end at {len(self._data)}")
        return first

    def _align(self, size: int) -> None:
        """Move to the next multiple of ``size``: for a size of 4, from 5 to 8, since -5 % 4 is 3."""
        self._position += -(self._position - _HEAD) % size

    def _number(self, name: str) -> Any:
        dtype = _DTYPES[name]
        self._align(dtype.itemsize)
        first = self._advance(dtype.itemsize)
        return dtype.type(struct.unpack_from(self._order + _LETTERS[name], self._data, first)[0])

    def _numbers(self, name: str, count: int) -> Any:
        dtype = _DTYPES[name]
        if count:
            self._align(dtype.itemsize)
        first = self._advance(dtype.itemsize * count)
        return np.frombuffer(self._data, dtype.newbyteorder(self._order), count, first)

    def _text(self) -> str:
        length = int(self._number("uint32"))
        first = self._advance(length)
        text = bytes(self._data[first : first + length])
        if length:  # a CDR text ends in a zero byte
            if text[-1]:
                raise DataError(f"expected a text that ends in a zero at byte {first + length - 1}, found none")
            text = text[:-1]
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"expected text in UTF-8 at byte {first}: {error.reason}") from error


# --- definitions --------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """The type of a field.

    Args:
        name: "string", a number type such as "float64", or the type of a message.
        many: Length of a list, -1 for any length; None if the field is a single value.
    """

    name: str
    many: int | None


Fields = tuple[tuple[str, Kind], ...]
Definitions = Mapping[str, Fields]
"""The type of a dict from message types (``package/Name``) to the fields of these messages; the requested message type
is first.
"""


def plain_name(name: str) -> str:
    """Return ``package/Name`` for ``package/msg/Name``."""
    return name.replace("/msg/", "/")


def parse_definitions(name: str, text: str) -> Definitions:
    """Parse the definition of a message type, and of the types that the message type contains.

    Args:
        name: The type.
        text: The definition as stored in MCAP: the fields of the type, then other types. A line of ``=`` and a line
            ``MSG: type`` precede each other type.

    Raises:
        DataError: A definition is missing or invalid.
    """
    if len(text) > _MOST_TEXT:
        raise DataError(f"{name}: expected a definition of at most {_MOST_TEXT} bytes, found {len(text)}")
    first, *others = _SEPARATOR.split(text)
    texts = {plain_name(name): first}
    for other in others:
        head, _, rest = other.strip().partition("\n")
        if not head.startswith("MSG:"):
            raise DataError(f"{name}: expected 'MSG: type' above a definition, found {head!r:.80}")
        texts[plain_name(head.removeprefix("MSG:").strip())] = rest
    definitions: dict[str, Fields] = {}
    _add_definition(plain_name(name), texts, definitions, ())
    return definitions


def _add_definition(
    name: str, texts: Mapping[str, str], definitions: dict[str, Fields], above: tuple[str, ...]
) -> None:
    """Add the fields of a type, and of all types in it, to ``definitions``; ``above`` lists the outer types."""
    if name in above or len(above) > _MOST_DEPTH:
        raise DataError(
            f"{name}: expected message types nested in at most {_MOST_DEPTH} levels, and no type that contains itself"
        )
    if name in definitions:
        return
    if name not in texts:
        raise DataError(f"{name}: expected a definition of this message, found none in the recording")
    definitions[name] = fields = _parse_fields(name, texts)
    if sum(map(len, definitions.values())) > _MOST_FIELDS:
        raise DataError(f"{name}: expected at most {_MOST_FIELDS} fields")
    for _, kind in fields:
        if kind.name not in _LETTERS and kind.name != TEXT:
            _add_definition(kind.name, texts, definitions, (*above, name))


def _parse_fields(name: str, texts: Mapping[str, str]) -> Fields:
    """Parse the lines of a definition to fields.

    Constants are left out; an empty message has a dummy field of one byte.
    """
    fields = []
    for line in texts[name].splitlines():
        declaration = line.partition("#")[0].strip()
        if not declaration:
            continue
        match = _FIELD.fullmatch(declaration)
        if match is None:
            raise DataError(f"{name}: expected a field as 'float64[] position', found {declaration!r:.80}")
        if match["rest"].startswith("="):  # a constant
            continue
        fields.append((match["name"], _field_type(name, match)))
    if len({field for field, _ in fields}) < len(fields):
        raise DataError(f"{name}: expected fields of different names, found {[field for field, _ in fields][:20]}")
    return tuple(fields) or (("structure_needs_at_least_one_member", Kind("uint8", None)),)


def _field_type(name: str, match: re.Match[str]) -> Kind:
    """Return the type of a parsed field of message ``name``; the name of a message type is ``package/Name``."""
    count = None
    if match["many"]:
        fixed = match["count"] and not match["bound"]
        count = int(match["count"]) if fixed else -1
        if count == 0 or count > _MOST_COUNT:
            raise DataError(f"{name}: {match['name']}: expected 1 to {_MOST_COUNT} values, found {count}")
    kind = plain_name(match["kind"])
    is_known = "/" in kind or kind in _LETTERS or kind == TEXT
    return Kind(kind if is_known else f"{name.rpartition('/')[0]}/{kind}", count)


# Encodings of images: dtype, number of channels, and whether blue comes before red.
_PIXELS = {
    "rgb8": ("u1", 3, False), "bgr8": ("u1", 3, True), "rgba8": ("u1", 4, False), "bgra8": ("u1", 4, True),
    "mono8": ("u1", 1, False), "8UC1": ("u1", 1, False), "8UC3": ("u1", 3, False), "8UC4": ("u1", 4, False),
    "mono16": ("u2", 1, False), "16UC1": ("u2", 1, False), "32FC1": ("f4", 1, False),
}  # fmt: skip
_IMAGE = {"height", "width", "encoding", "step", "data"}
_COMPRESSED = {"format", "data"}
_VIDEOS = ("h264", "h265", "hevc", "vp8", "vp9", "av1")
_NAMES = ("name", "joint_names", "names")


def is_of(message: Mapping[str, Any], names: tuple[str, ...], place: Place) -> bool:
    """Whether a message contains all names of a path."""
    if not names:
        return True
    value: Any = message
    for part in place.parts:
        if is_names(part):
            return False
        parent, value = value, _step(value, part, place)
        present = names_beside(parent)
        if present is not None and isinstance(part, str) and part not in _NAMES:
            return set(names) <= set(present)
    return False


def names_beside(message: Any) -> list[str] | None:
    """Return the list ``name`` of a message, which names the items of its lists of numbers; None if the message has no
    such list.
    """
    for key in _NAMES:
        names = message.get(key) if isinstance(message, Mapping) else None
        if isinstance(names, list) and all(isinstance(one, str) for one in names) and names:
            return names
    return None


def value_at(message: Mapping[str, Any], place: Place) -> tuple[Any, tuple[str, ...]]:
    """Return the value at a path, and the names of its numbers in the message; no names are returned if the path
    contains names.

    Raises:
        DataError: The path has no value, or its value cannot be a column.
    """
    value: Any = message
    names: list[str] | None = None
    for part in place.parts:
        if is_names(part):
            if names is None:
                raise DataError(f"{place.text}: expected names for the items of the value, found none")
            value = _by_name(value, names, part, place)
            names = None
            continue
        parent, value = value, _step(value, part, place)
        names = names_beside(parent) if isinstance(part, str) else None
    if isinstance(value, str):
        return value, ()
    if isinstance(value, Mapping) and set(value) >= _IMAGE:
        return _image(value, place), ()
    if isinstance(value, Mapping) and set(value) >= _COMPRESSED and isinstance(value["format"], str):
        return _compressed(value, place), ()
    numbers = _numbers(value, place)
    return numbers, tuple(names) if names is not None and len(names) == numbers.size and numbers.ndim else ()


def _step(value: Any, part: Any, place: Place) -> Any:
    """Return a field of a message, or an element or a slice of a list."""
    if isinstance(part, str):
        if not isinstance(value, Mapping) or part not in value:
            present = list(value)[:20] if isinstance(value, Mapping) else "a value"
            raise DataError(f"{place.text}: expected a field {part!r}, found {present}")
        return value[part]
    if isinstance(value, str | Mapping) or not hasattr(value, "__getitem__"):
        raise DataError(f"{place.text}: expected several values, found one")
    last = part if isinstance(part, int) else (part.stop or 0) - 1
    part = slice(part.first, part.stop) if isinstance(part, Stretch) else part
    if last >= len(value):
        raise DataError(f"{place.text}: expected at least {last + 1} values, found {len(value)}")
    return value[part]


def _by_name(values: Any, names: list[str], wanted: tuple[str, ...], place: Place) -> Any:
    """Return the items of a list with the names ``wanted``."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != len(names):
        raise DataError(f"{place.text}: expected a value for each of {names[:20]}")
    if missing := [name for name in wanted if names.count(name) != 1]:
        raise DataError(
            f"{place.text}: expected each selected name once in {names[:20]}, found {missing} missing or twice"
        )
    return [values[names.index(name)] for name in wanted]


def _numbers(value: Any, place: Place) -> npt.NDArray[Any]:
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value)):
        leaves = list(_leaves(value, place))
        if not leaves:
            raise DataError(f"{place.text}: expected numbers, found none")
        return np.concatenate([np.atleast_1d(leaf) for leaf in leaves])
    numbers = _array(value)
    if numbers.dtype.kind not in "biuf" or numbers.dtype.itemsize > 8:
        raise DataError(f"{place.text}: expected numbers, found {type(value).__name__} of {numbers.dtype}")
    return numbers


def _array(value: Any) -> npt.NDArray[Any]:
    """Return numbers in their dtype and in native byte order."""
    numbers = np.asarray(value)
    return numbers.astype(numbers.dtype.newbyteorder("="))


def _leaves(value: Any, place: Place) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers of a message without its header."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name != "header":
                yield from _leaves(one, place)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, place)
    else:
        numbers = _array(value)
        if numbers.dtype.kind not in "biuf":
            raise DataError(f"{place.text}: expected only numbers, found {value!r:.80} among them; name the fields")
        yield numbers


def _image(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    encoding = message["encoding"]
    if encoding not in _PIXELS:
        raise DataError(f"{place.text}: expected an image in one of {list(_PIXELS)}, found {encoding!r}")
    letters, channels, swapped = _PIXELS[encoding]
    dtype = np.dtype(letters).newbyteorder(">" if message.get("is_bigendian") else "<")
    height, width, step = (int(message[name]) for name in ("height", "width", "step"))
    row = width * channels * dtype.itemsize
    data = _octets(message["data"], place)
    if height < 1 or width < 1 or step < row or len(data) != height * step:
        raise DataError(
            f"{place.text}: expected {height} rows of {step} bytes, of which {row} are pixels, found {len(data)} bytes"
        )
    pixels = np.ascontiguousarray(data.reshape(height, step)[:, :row]).view(dtype).reshape(height, width, channels)
    if swapped:
        pixels = pixels[:, :, [2, 1, 0, *range(3, channels)]]
    return pixels.astype(dtype.newbyteorder("="))


def _octets(data: Any, place: Place) -> npt.NDArray[np.uint8]:
    """Return bytes in a message."""
    try:
        return np.asarray(data, np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{place.text}: expected bytes, found {data!r:.80}") from error


def _compressed(message: Mapping[str, Any], place: Place) -> npt.NDArray[Any]:
    kind = message["format"]
    if "compressedDepth" in kind:
        raise DataError(f"{place.text}: expected JPEG or PNG, found {kind!r}, which has an additional header")
    if kind.lower() in _VIDEOS:
        raise DataError(
            f"{place.text}: expected JPEG or PNG, found {kind!r}, a video frame that depends on other frames"
        )
    wide = "16UC1" in kind or "mono16" in kind
    data = _octets(message["data"], place).tobytes()
    try:
        return decode_image(data, dtype=np.uint16 if wide else np.uint8)
    except ValueError as error:
        raise DataError(f"{place.text}: {error}") from error


def stamp_of(message: Mapping[str, Any]) -> int | None:
    """Return the time in a message's header, in nanoseconds; None if the message has no header."""
    stamp = message.get("header", {}).get("stamp") if isinstance(message.get("header"), Mapping) else None
    if not isinstance(stamp, Mapping):
        return None
    seconds, rest = stamp.get("sec"), stamp.get("nanosec")
    if not isinstance(seconds, int | np.integer) or not isinstance(rest, int | np.integer) or seconds < 0:
        raise DataError(f"header.stamp: expected seconds and nanoseconds, found {stamp!r:.80}")
    if not seconds and not rest:
        raise DataError("header.stamp: expected a time, found 0, which means that no writer set it; pass stamps='log'")
    return int(seconds) * 10**9 + int(rest)


Times = npt.NDArray[np.int64]
Source = tuple[str, tuple[str, ...]]
"""A topic, and the names that its messages must contain."""

# A damaged time would create endless ticks. The number of ticks is limited to this number, plus this number for each
# message.
_MOST_EMPTY, _MOST_A_MESSAGE = 1 << 20, 1000


@dataclass(frozen=True)
class StepBlock:
    """Consecutive steps of an episode.

    Args:
        values: Values by column, with a value for each step.
        seconds: Time of each step since the episode's first step.
        begins, ends: Whether the block contains the first step of the episode, and whether it contains the last step.
    """

    values: Mapping[Column, list[Any]]
    seconds: npt.NDArray[np.float64]
    begins: bool
    ends: bool


class AlignedRecording:
    """The steps of a recording.

    Args:
        recording: The recording.
        layout: The layout.
        names: By path, the names of the numbers in earlier recordings. The names in this recording are added to this
            dict.

    Raises:
        DataError: A file is damaged, a topic has no messages, or no message is within the tolerance of a tick and
            ``gaps`` is "refuse".
    """

    def __init__(self, recording: Recording, layout: TopicLayout, names: dict[str, tuple[str, ...]]) -> None:
        self.recording, self.layout, self._names = recording, layout, names
        self.columns = layout.columns()
        self._decoders: dict[Channel, Decode] = {}
        self._places = {column.source: column.place for column in self.columns}
        if layout.clock is not None:
            self._places.setdefault((layout.clock, ()), Place(layout.clock, layout.clock, ()))
        self._topics = {topic for topic, _ in self._places}
        self._times, self._ordinals, numbers = self._read_times()
        self.ticks, self.runs = self._aligned_ticks(numbers)

    @property
    def left_out(self) -> int:
        """Number of ticks that belong to no episode."""
        return len(self.ticks) - sum(stop - first for first, stop in self.runs)

    def _message(self, channel: Channel, data: memoryview) -> Mapping[str, Any]:
        if channel not in self._decoders:
            _, kind, encoding, schema, definition = channel
            self._decoders[channel] = decoder(kind, encoding, schema, definition)
        return self._decoders[channel](data)

    def _read_times(self) -> tuple[dict[Source, Times], dict[Source, npt.NDArray[np.int64]], list[float]]:
        """Return the times of each source's messages, the indices of these messages, and the values of ``episode``."""
        times: dict[Source, list[int]] = {source: [] for source in self._places}
        ordinals: dict[Source, list[int]] = {source: [] for source in self._places}
        episode = next((column for column in self.columns if column.role == "episode"), None)
        stamped, numbers = self.layout.stamps == "header", []
        topics = set()
        for ordinal, (channel, time, data) in enumerate(self.recording.messages()):
            topics.add(channel.topic)
            for source in self._places if channel.topic in self._topics else ():
                if source[0] != channel.topic:
                    continue
                wanted = episode is not None and episode.source == source
                with reading(str(self.recording.path), at=f"{channel.topic} at {time} ns"):
                    message = self._message(channel, data) if stamped or source[1] or wanted else {}
                    if not is_of(message, source[1], self._places[source]):
                        continue
                    if episode is not None and wanted:
                        numbers.append(_number(value_at(message, episode.place)[0], episode.place))
                    stamp = stamp_of(message) if stamped else None
                times[source].append(time if stamp is None else stamp)
                ordinals[source].append(ordinal)
        for (topic, names), some in times.items():
            if not some:
                which = f" with the names {list(names)}" if names else ""
                raise damaged(
                    self.recording.path, f"{topic}: expected messages{which}, found topics {sorted(topics)[:20]}"
                )
        as_arrays = {source: np.array(some, np.int64) for source, some in times.items()}
        return as_arrays, {source: np.array(some, np.int64) for source, some in ordinals.items()}, numbers

    def _aligned_ticks(self, numbers: list[float]) -> tuple[Times, list[tuple[int, int]]]:
        """Return the ticks, and two indices for each episode: the index of its first tick, and the index of the tick
        after its last tick.
        """
        order = {source: np.argsort(times, kind="stable") for source, times in self._times.items()}
        ascending = {source: self._times[source][places] for source, places in order.items()}
        with reading(str(self.recording.path)):
            if self.layout.clock is not None:
                ticks = np.unique(ascending[self.layout.clock, ()])
            else:
                ticks = ticks_of([ascending[column.source] for column in self.columns], float(self.layout.rate or 0))
        self._indices: dict[Column, npt.NDArray[np.int64]] = {}
        whole, running = np.ones(len(ticks), bool), np.ones(len(ticks))
        away = {}
        for column in self.columns:
            places, away[column] = matched(ascending[column.source], ticks, column.match, column.tolerance)
            self._indices[column] = np.where(places < 0, -1, order[column.source][places])
            whole &= places >= 0
            if column.role == "episode":
                running = np.where(places >= 0, np.array(numbers)[self._indices[column]], np.nan)
        if self.layout.gaps == "refuse":
            self._check_gaps(ticks, whole, running, away)
        runs = runs_of(whole, np.nan_to_num(running))
        if not runs and not whole.any():
            lacking = {column: self._indices[column] < 0 for column in self.columns}
            worst = max(self.columns, key=lambda column: int(lacking[column].sum()))
            fewest = np.where(lacking[worst], sum(lacking.values()), len(self.columns) + 1)
            self._raise_missing(worst, ticks, int(np.argmin(fewest)), away, "no step has a message of every topic")
        if not runs:
            raise damaged(self.recording.path, f"expected an episode of two steps, found none in {len(ticks)} ticks")
        return ticks, runs

    def _check_gaps(
        self, ticks: Times, whole: npt.NDArray[np.bool_], running: npt.NDArray[Any], away: Mapping[Column, Times]
    ) -> None:
        """Raise DataError for a tick without a value, unless the tick is between episodes or can be trimmed."""
        lacking = np.flatnonzero(~whole & (running != 0))
        complete = np.flatnonzero(whole)
        if not len(lacking) or not len(complete):
            return
        first, last = int(complete[0]), int(complete[-1])
        for tick in lacking.tolist():
            if first < tick < last:
                self._raise_missing(None, ticks, tick, away, "gaps='cut' ends the episode there")
        for tick, edge, what in ((lacking[0], first, "beginning"), (lacking[-1], last, "end")):
            seconds = abs(int(ticks[tick]) - int(ticks[edge])) / 1e9
            inside = tick < first if what == "beginning" else tick > last
            if inside and seconds > self.layout.trim:
                hint = (
                    f"trim={seconds:.3g} leaves out this part of a recording's {what}; gaps='cut' leaves out every "
                    "tick that lacks a message of a topic"
                )
                self._raise_missing(None, ticks, int(tick), away, hint)

    def _raise_missing(
        self, lacking: Column | None, ticks: Times, tick: int, away: Mapping[Column, Times], hint: str
    ) -> None:
        """Raise DataError for the column ``lacking``, by default the first column without a message at the tick."""
        column = lacking or next(one for one in self.columns if self._indices[one][tick] < 0)
        seconds, since = away[column][tick] / 1e9, (ticks[tick] - ticks[0]) / 1e9
        which = "last one before" if column.match == "hold" else "nearest"
        if column.match == "hold" and ticks[tick] < self._times[column.source].min():
            which = "first one after"
        raise damaged(
            self.recording.path,
            f"{column.place.text}: expected a message within {column.tolerance:g} s of the step at {since:.3f} s "
            f"({ticks[tick]} ns), found the {which} {seconds:.3f} s away; {hint}",
        )

    def pieces(self, size: Callable[[Mapping[Column, Any]], int]) -> Iterator[StepBlock]:
        """Yield all episodes in pieces.

        Args:
            size: A function that takes the values of the first step, and returns the largest number of steps in a
                piece.
        """
        steps = np.concatenate([np.arange(first, stop) for first, stop in self.runs])
        taken = {column: places[steps] for column, places in self._indices.items()}
        # A step is complete when the last of its messages is read and all steps before it are complete.
        needed = [self._ordinals[column.source][places] for column, places in taken.items()]
        ready = np.maximum.accumulate(np.max(needed, axis=0)).tolist()
        last_use = {
            column: dict(zip(places.tolist(), range(len(steps)), strict=True)) for column, places in taken.items()
        }
        at = {column: places.tolist() for column, places in taken.items()}
        first_of = {first for first, _ in self.runs}
        last_of = {stop - 1 for _, stop in self.runs}
        held: dict[Column, dict[int, Any]] = {column: {} for column in self.columns}
        rows: list[Mapping[Column, Any]] = []
        begin, most, number, origin = 0, 0, 0, 0
        for ordinal in self._read_values(last_use, held):
            while number < len(ready) and ready[number] <= ordinal:
                row = {column: held[column][at[column][number]] for column in self.columns}
                for column in self.columns:
                    if last_use[column][at[column][number]] == number:
                        del held[column][at[column][number]]
                if steps[number] in first_of:
                    origin, begin = int(self.ticks[steps[number]]), number
                rows.append(row)
                most = most or size(row)
                number += 1
                ends = bool(steps[number - 1] in last_of)
                if ends or len(rows) >= most:
                    some = self.ticks[steps[begin:number]]
                    begins = bool(steps[begin] in first_of)
                    values = {column: [one[column] for one in rows] for column in self.columns}
                    yield StepBlock(values, (some - origin) / 1e9, begins, ends)
                    rows, begin = [], number
        if number < len(ready):
            raise damaged(
                self.recording.path, "expected the messages of the first pass, found fewer: the file was changed"
            )

    def _read_values(
        self, wanted: Mapping[Column, Mapping[int, int]], held: Mapping[Column, dict[int, Any]]
    ) -> Iterator[int]:
        """Decode the selected values and store them in ``held``; yield the index of each message after it was read."""
        seen = dict.fromkeys(self._places, 0)
        by_source: dict[Source, list[Column]] = {}
        for column in self.columns:
            by_source.setdefault(column.source, []).append(column)
        for ordinal, (channel, time, data) in enumerate(self.recording.messages()):
            message: Mapping[str, Any] | None = None
            for source in self._places if channel.topic in self._topics else ():
                ordinals, place = self._ordinals[source], seen[source]
                if source[0] != channel.topic or place >= len(ordinals) or ordinals[place] != ordinal:
                    continue
                seen[source] += 1
                for column in by_source.get(source, ()):
                    if place in wanted[column]:
                        with reading(str(self.recording.path), at=f"{channel.topic} at {time} ns"):
                            message = message or self._message(channel, data)
                            held[column][place] = self._value(message, column.place)
            yield ordinal

    def _value(self, message: Mapping[str, Any], place: Place) -> Any:
        value, names = value_at(message, place)
        if names and self._names.setdefault(place.text, names) != names:
            before = self._names[place.text]
            raise DataError(
                f"{place.text}: expected the same names of values as before, {list(before)[:20]}, found "
                f"{list(names)[:20]}; {place.text}[{before[0]}, ...] selects values by name"
            )
        return value


def _number(value: Any, place: Place) -> float:
    if isinstance(value, str) or np.size(value) != 1:
        raise DataError(f"{place.text}: expected a number or flag, found {value!r:.80}")
    return float(np.asarray(value).reshape(()))


def ticks_of(times: Sequence[Times], rate: float) -> Times:
    """Return ticks at a rate, from the first message to the last.

    One tick is at the first message of the topic that starts last. The other ticks lie before and after this tick; all
    ticks have equal distances.

    Example with 20 ticks per second: a topic has messages at 0 and 90 ms, and another topic starts at 40 ms. The ticks
    are at 40 and 90 ms. There is no tick at -10 ms, before the first message.

    Args:
        times: Times of the messages of each topic, in nanoseconds.
        rate: Ticks per second.

    Raises:
        ValueError: The number of ticks would be far larger than the number of messages, for example because a time is
            damaged.
    """
    first, last = min(int(some.min()) for some in times), max(int(some.max()) for some in times)
    anchor = max(int(some.min()) for some in times)
    # Computed with Python integers, as floats do not resolve nanoseconds since 1970.
    before, after = int((anchor - first) * rate // 1e9), int((last - anchor) * rate // 1e9)
    if before + after > _MOST_EMPTY + _MOST_A_MESSAGE * sum(map(len, times)):
        raise ValueError(
            f"expected about one tick for each message, found {before + after} ticks at {rate} per second in "
            f"{(last - first) / 1e9:.3f} s"
        )
    steps = np.round(np.arange(-before, after + 1) * (1e9 / rate)).astype(np.int64)
    return anchor + steps


def matched(times: Times, ticks: Times, match: str, tolerance: float) -> tuple[Times, Times]:
    """Return, for each tick, the index of a topic's message and its distance in time; both are int64 ``[ticks]``.

    Example with messages at 10, 20 and 30: for a tick at 19, "nearest" selects the second message and "hold" selects
    the first. For a tick at 15, "nearest" selects the first message, because "nearest" prefers the earlier of two
    equally near messages.

    Args:
        times: Times of the messages in nanoseconds, ascending, with at least one message.
        ticks: The ticks, in nanoseconds.
        match: "nearest" or "hold".
        tolerance: Largest distance, in seconds.

    Returns:
        The index of the message, or -1 for a tick without a message within the tolerance; and the distance in
        nanoseconds to the nearest message. For "hold", the distance is to the last message before the tick, or to the
            first message if no message is before the tick.
    """
    # The last message up to the tick: the last of several at one time, -1 before the first message.
    last = np.searchsorted(times, ticks, side="right") - 1
    index = np.maximum(last, 0)
    if match == "nearest":
        after = np.minimum(last + 1, len(times) - 1)
        nearer = times[after] - ticks < ticks - times[index]
        index = np.where(nearer, after, index)
    distance = np.abs(times[index] - ticks)
    inside = distance <= (np.inf if np.isinf(tolerance) else tolerance * 1e9)
    if match == "hold":
        inside &= last >= 0
    return np.where(inside, index, -1), distance


def runs_of(whole: npt.NDArray[np.bool_], numbers: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the index of each episode's first tick, and the index after its last tick; an episode has two or more
    ticks.

    Args:
        whole: For each tick, whether every column has a value at the tick.
        numbers: Number of the episode at each tick; 0 for a tick outside of episodes.
    """
    running = np.where(whole, numbers, 0)
    edges = np.flatnonzero(np.diff(running, prepend=0, append=0))
    return [(int(first), int(stop)) for first, stop in pairwise(edges) if running[first] and stop - first > 1]


_SHOWN = 12


def read_robot_logs(
    path: str | os.PathLike[str],
    *,
    layout: TopicLayout | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read MCAP files and bags of ROS 2 as rows, with a step for every tick of a clock.

    Messages are encoded as CDR. An episode of T ticks has T rows. A row holds the observation at a tick, and the action
    and reward of the tick before. The action and reward of the last tick are left out, because no observation follows.
    ``metadata_timestamp`` holds the seconds since the episode's first step. ``done`` of the last row is 1 if
    ``terminated`` is set there, 2 if ``truncated`` is set there, else the layout's ``ending``. Images are decoded to
    pixels; depth images keep the recorded unit.

    Args:
        path: An MCAP file, a bag (a folder of rosbag2 with MCAP files and ``metadata.yaml``), or a folder of files or
            bags, which are read in the order of the numbers in their names.
        layout: A ``TopicLayout``, its arguments as a mapping, or a YAML file with them.
        batch_rows: Largest number of rows of a batch.

    Returns:
        The rows. ``format_metadata["files"]`` lists the recordings.

    Raises:
        ConfigError: The layout is missing or invalid, or the path has no recordings.
        DataError: A file is damaged, messages do not fit the layout, or no message is within the tolerance of a tick;
            the error names recording, topic and time.
    """
    columns.check_batch_rows(batch_rows)
    root = Path(path)
    if layout is None:
        topics = topics_in(root)
        shown = ", ".join(f"{one.name} ({one.type}, {one.rate:.3g} Hz)" for one in topics[:_SHOWN])
        more = f" and {len(topics) - _SHOWN} more" if len(topics) > _SHOWN else ""
        raise ConfigError(
            f"{root}: format (--format): expected a layout that assigns topics to columns, found none for {shown}{more}"
        )
    options = loaded(TopicLayout, layout)
    recordings = recordings_of(root, options.files)
    names: dict[str, tuple[str, ...]] = {}
    first = AlignedRecording(recordings[0], options, names)
    schema = columns.schema_of(columns.ordered(next(_rows(first, options, 1))))

    def batches() -> Iterator[pa.RecordBatch]:
        for number, recording in enumerate(recordings):
            opened = AlignedRecording(recording, options, names) if number else first
            yield from columns.to_batches(_rows(opened, options, batch_rows), schema, where=str(recording.path))

    return RowStream(
        os.fspath(path),
        "robot_logs",
        schema,
        batches,
        rows=len(first.ticks) - first.left_out if len(recordings) == 1 else None,
        notes=tuple(_notes(first, options)),
        format_metadata={"files": [str(recording.path) for recording in recordings]},
        metadata=in_stored_layout(
            DatasetMetadata("arrived", frames_per_second=[] if options.rate is None else [options.rate]), schema
        ),
    )


def _notes(first: AlignedRecording, layout: TopicLayout) -> Iterator[str]:
    clock = f"a message of {layout.clock}" if layout.clock is not None else f"a tick of {layout.rate:g} a second"
    yield f"A step is {clock}; times are those of {'headers' if layout.stamps == 'header' else 'recording'}."
    ways = {(column.match, column.tolerance) for column in first.columns}
    for match, tolerance in sorted(ways):
        paths = [
            column.place.text for column in first.columns if (column.match, column.tolerance) == (match, tolerance)
        ]
        which = "the nearest message" if match == "nearest" else "the last message before the step"
        yield f"{', '.join(paths)}: {which}, at most {tolerance:g} s away."
    if first.left_out:
        yield (
            f"{first.recording.path}: {first.left_out} of {len(first.ticks)} ticks are left out, because a topic is "
            "out of tolerance or no episode runs there."
        )
    if layout.reward is None:
        yield "There are no rewards: reward is 0."
    if layout.terminated is None and layout.truncated is None:
        yield f"The layout states no ends of episodes: all episodes count as {layout.ending}."


def _rows(recording: AlignedRecording, layout: TopicLayout, batch_rows: int) -> Iterator[Columns]:
    before: Columns = {}
    step = 0

    def size(row: Mapping[Column, Any]) -> int:
        return columns.rows_at_once(sum(getattr(value, "nbytes", 64) for value in row.values()), most=batch_rows)

    for piece in recording.pieces(size):
        count = len(piece.seconds)
        begins = np.arange(count) < int(piece.begins)
        seen, leaving, arrived = _columns(piece, layout)
        rows = columns.one_later(leaving, before, begins)
        for name, values in arrived.items():
            rows[name] = np.concatenate([placeholder(values), values[1:]]) if piece.begins else values
        rows["done"] = np.zeros(count, np.int64)
        if piece.ends:
            rows["done"][-1] = _ending(piece, layout)
        rows |= seen
        rows["episode_step"] = columns.step_numbers(begins, step)
        step = int(rows["episode_step"][-1]) + 1
        yield columns.ordered(rows)


def _columns(piece: StepBlock, layout: TopicLayout) -> tuple[Columns, Columns, Columns]:
    """Return three dicts of columns: the observations; the actions and results after each observation; and the actions
    and results before each observation.
    """
    by_role: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for column, values in piece.values.items():
        by_role.setdefault(column.role, {})[column.name] = _stacked(column, values)
    seen = columns.named("observation", _alone(by_role["observation"]))
    groups: dict[bool, Columns] = {True: {}, False: {}}
    moved = layout.arrived()
    if "action" in by_role:
        groups["action" in moved] |= columns.named("action", _alone(by_role["action"]))
    reward = by_role.get("reward", {"": np.zeros(len(piece.seconds))})
    groups["reward" in moved]["reward"] = columns.one_each({"reward": _alone(reward)}, "reward")
    metadata = {"timestamp": piece.seconds} | by_role.get("metadata", {})
    for name, values in metadata.items():
        (groups["action" in moved] if columns.travels_with_action(name) else seen)[f"metadata_{name}"] = values
    return seen, groups[False], groups[True]


def _alone(values: Mapping[str, Any]) -> Any:
    return values[""] if [*values] == [""] else values


def _stacked(column: Column, values: list[Any]) -> npt.NDArray[Any]:
    if any(isinstance(value, str) for value in values):
        texts = np.empty(len(values), object)
        texts[:] = values
        return texts
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise DataError(f"{column.place.text}: expected values of equal shape, found {sorted(shapes)[:4]}")
    return np.stack(values)


def _ending(piece: StepBlock, layout: TopicLayout) -> int:
    for code, role in ((1, "terminated"), (2, "truncated")):
        for column, values in piece.values.items():
            if column.role == role and np.any(np.asarray(values[-1])):
                return code
    return 1 if layout.ending == "terminal" else 2


__all__ = ["Topic", "TopicLayout", "read_robot_logs", "topics_in"]
