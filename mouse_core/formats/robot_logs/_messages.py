"""Decode messages of robot logs: CDR (ROS 2), the binary layout of ROS 1, and JSON.

``parse_definitions`` parses the text of a message definition (``float64[] position``) to fields. A ``_Reader`` reads a
message field by field. No code is generated from a definition.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mouse_core.errors import DataError

SIZES = {
    "bool": 1, "byte": 1, "char": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8, "float32": 4, "float64": 8,
}  # fmt: skip
TEXT = "string"
_MOST_TEXT, _MOST_FIELDS, _MOST_COUNT, _MOST_DEPTH = 1 << 20, 10_000, 1 << 24, 32
_SEPARATOR = re.compile(r"^={20,}\s*$", re.MULTILINE)
_FIELD = re.compile(
    r"(?P<kind>[A-Za-z][\w/]*)(<=\d+)?(?P<many>\[(?P<bound><=)?(?P<count>\d{0,9})\])?\s+(?P<name>[A-Za-z]\w*)\s*(?P<rest>.*)"
)
_LETTERS = {
    "bool": "?", "byte": "B", "char": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
_DTYPES = {"bool": "?", "byte": "u1", "char": "u1"} | {
    name: f"{'f' if name[0] == 'f' else name[0]}{size}" for name, size in SIZES.items() if name[-1].isdigit()
}
_SCALARS = {name: np.dtype(letters).type for name, letters in _DTYPES.items()}
_ENCODINGS = {"cdr": ("ros2msg", ""), "ros1": ("ros1msg", ""), "json": None}


Decode = Callable[[Any], dict[str, Any]]
"""Decodes the bytes of a message to its fields by name: NumPy numbers and arrays, texts, messages, and lists of these.

Numbers of JSON messages are Python numbers.
"""


def decoder(name: str, encoding: str, schema: str, definition: str, given: Mapping[str, str] | None = None) -> Decode:
    """Return the function that decodes the messages of a topic.

    Args:
        name: Type of the messages.
        encoding: "cdr", "ros1" or "json".
        schema: Language of the definition: "ros2msg", "ros1msg" or "".
        definition: The definition, for ``parse_definitions``.
        given: Other definitions by type.

    Raises:
        DataError: An unsupported encoding, or an invalid definition.
    """
    if encoding not in _ENCODINGS:
        raise DataError(
            f"expected messages in one of {list(_ENCODINGS)}, found {encoding!r}; read them with the library that "
            "wrote them, and write those topics again"
        )
    schemas = _ENCODINGS[encoding]
    if schemas is None:
        return _from_json
    if schema not in schemas and name not in (given or {}):
        raise DataError(
            f"{name}: expected a definition as in .msg files, found one in {schema!r}; give one in the layout's "
            "definitions"
        )
    definitions = parse_definitions(name, definition if schema in schemas else "", given)
    return partial(_decode, definitions, next(iter(definitions)), encoding == "ros1")


def _from_json(data: Any) -> dict[str, Any]:
    try:
        message = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected JSON: {error}") from error
    if not isinstance(message, dict):
        raise DataError(f"expected a JSON object, found {type(message).__name__}")
    return message


def _decode(definitions: Definitions, name: str, is_ros1: bool, data: Any) -> dict[str, Any]:
    """Decode a binary message; ROS 1 messages have no header and no alignment."""
    if is_ros1:
        return _Reader(definitions, memoryview(data), 0, "<", aligned=False).message(name)
    # The first two bytes are the encoding of the rest, the next two its options.
    kind = bytes(data[:2])
    if len(data) < 4 or kind not in (b"\0\0", b"\0\1"):
        raise DataError(f"expected a message in plain CDR, found one that begins with {bytes(data[:4]).hex()!r}")
    return _Reader(definitions, memoryview(data), 4, "<" if kind == b"\0\1" else ">", aligned=True).message(name)


class _Reader:
    """Reads a message, value by value.

    Args:
        definitions: Definitions of the message and the messages in it.
        data: Bytes of the message.
        origin: Position of the first value; numbers are aligned relative to it.
        order: Byte order, "<" or ">".
        aligned: Whether numbers are at multiples of their size.
    """

    def __init__(self, definitions: Definitions, data: memoryview, origin: int, order: str, *, aligned: bool) -> None:
        self._definitions, self._data, self._order = definitions, data, order
        self._origin, self._aligned, self._position = origin, aligned, origin

    def message(self, name: str) -> dict[str, Any]:
        """Read a message at the current position. It has at least one byte, which limits the length of a list."""
        return {field: self._value(kind) for field, kind in self._definitions[name]}

    def _value(self, kind: Kind) -> Any:
        """Read the value of a field: a single one, or a list."""
        if kind.many is None:
            return self._single_value(kind.name)
        count = int(self._number("uint32")) if kind.many < 0 else kind.many
        if kind.name in SIZES:
            return self._numbers(kind.name, count)
        if count > len(self._data) - self._position:
            raise DataError(f"expected {count} values of {kind.name}, found the message's end")
        return [self._single_value(kind.name) for _ in range(count)]

    def _single_value(self, name: str) -> Any:
        if name == TEXT:
            return self._text()
        return self._number(name) if name in SIZES else self.message(name)

    def _advance(self, size: int) -> int:
        """Move the position forward by ``size`` bytes, and return the position before the move."""
        first, self._position = self._position, self._position + size
        if self._position > len(self._data):
            raise DataError(f"expected {size} bytes at byte {first}, found the message's end at {len(self._data)}")
        return first

    def _align(self, size: int) -> None:
        """Move to the next multiple of ``size``: from 5 to 8 for a size of 4, since -5 % 4 is 3."""
        if self._aligned:
            self._position += -(self._position - self._origin) % size

    def _number(self, name: str) -> Any:
        size = SIZES[name]
        self._align(size)
        return _SCALARS[name](struct.unpack_from(self._order + _LETTERS[name], self._data, self._advance(size))[0])

    def _numbers(self, name: str, count: int) -> Any:
        size = SIZES[name]
        if count:
            self._align(size)
        first = self._advance(size * count)
        return np.frombuffer(self._data, self._order + _DTYPES[name], count, first)

    def _text(self) -> str:
        length = int(self._number("uint32"))
        first = self._advance(length)
        text = bytes(self._data[first : first + length])
        if self._aligned and length:  # a CDR text ends in a zero byte
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
        many: Number of values: None for a single one, -1 for a list of any length.
    """

    name: str
    many: int | None


Fields = tuple[tuple[str, Kind], ...]
Definitions = Mapping[str, Fields]
"""Fields of messages by type, as ``package/Name``, beginning with the requested type."""


def plain_name(name: str) -> str:
    """Return ``package/Name`` for ``package/msg/Name``."""
    return name.replace("/msg/", "/")


def parse_definitions(name: str, text: str, given: Mapping[str, str] | None = None) -> Definitions:
    """Parse the definition of a type of messages, and of the types that it contains.

    Args:
        name: The type.
        text: The definition as in MCAP and rosbag2: the fields, then other types, each behind a line of ``=`` and a
            line ``MSG: type``. If empty, the definition comes from ``given`` or ``COMMON``.
        given: Definitions by type; they override ``COMMON``.

    Raises:
        DataError: A missing or invalid definition.
    """
    if len(text) > _MOST_TEXT:
        raise DataError(f"{name}: expected a definition of at most {_MOST_TEXT} bytes, found {len(text)}")
    texts = {plain_name(known): definition for known, definition in {**COMMON, **(given or {})}.items()}
    first, *others = _SEPARATOR.split(text)
    if first.strip() or others:
        texts[plain_name(name)] = first
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
    """Add the fields of a type, and of the types in it, to ``definitions``; ``above`` has the types that contain it."""
    if name in above or len(above) > _MOST_DEPTH:
        raise DataError(f"{name}: expected messages in messages at most {_MOST_DEPTH} deep, none of them in itself")
    if name in definitions:
        return
    if name not in texts:
        raise DataError(
            f"{name}: expected a definition of this message, found none in the recording; give one in the layout's "
            "definitions"
        )
    definitions[name] = fields = _parse_fields(name, texts)
    if sum(map(len, definitions.values())) > _MOST_FIELDS:
        raise DataError(f"{name}: expected at most {_MOST_FIELDS} fields")
    for _, kind in fields:
        if kind.name not in SIZES and kind.name != TEXT:
            _add_definition(kind.name, texts, definitions, (*above, name))


def _parse_fields(name: str, texts: Mapping[str, str]) -> Fields:
    """Parse the lines of a definition to fields; constants are left out, and an empty message has one dummy byte."""
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
        fields.append((match["name"], _field_type(name, match, texts)))
    if len({field for field, _ in fields}) < len(fields):
        raise DataError(f"{name}: expected fields of different names, found {[field for field, _ in fields][:20]}")
    return tuple(fields) or (("structure_needs_at_least_one_member", Kind("uint8", None)),)


def _field_type(name: str, match: re.Match[str], texts: Mapping[str, str]) -> Kind:
    """Return the type of a parsed field of message ``name``, with the full name ``package/Name`` of a message type."""
    count = None
    if match["many"]:
        fixed = match["count"] and not match["bound"]
        count = int(match["count"]) if fixed else -1
        if count == 0 or count > _MOST_COUNT:
            raise DataError(f"{name}: {match['name']}: expected 1 to {_MOST_COUNT} values, found {count}")
    kind = plain_name(match["kind"])
    if kind in SIZES or kind == TEXT:
        return Kind(kind, count)
    if kind in ("time", "duration"):  # built-in types of ROS 1
        return Kind("builtin_interfaces/Time" if kind == "time" else "builtin_interfaces/Duration", count)
    if "/" not in kind:
        in_same_package = f"{name.rpartition('/')[0]}/{kind}"
        kind = "std_msgs/Header" if kind == "Header" and in_same_package not in texts else in_same_package
    return Kind(kind, count)


_STAMPED = "std_msgs/Header header\n"
_LAYOUT = "std_msgs/MultiArrayLayout layout\n"
_NUMBERS = {
    name: ("float" if name.startswith("F") else "uint" if name.startswith("U") else "int") + re.sub(r"\D", "", name)
    for name in (
        "Float32", "Float64", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64",
    )
}  # fmt: skip
COMMON: Mapping[str, str] = {
    "builtin_interfaces/Time": "int32 sec\nuint32 nanosec",
    "builtin_interfaces/Duration": "int32 sec\nuint32 nanosec",
    "std_msgs/Header": "builtin_interfaces/Time stamp\nstring frame_id",
    "std_msgs/Empty": "",
    "std_msgs/Bool": "bool data",
    "std_msgs/String": "string data",
    "std_msgs/MultiArrayDimension": "string label\nuint32 size\nuint32 stride",
    "std_msgs/MultiArrayLayout": "MultiArrayDimension[] dim\nuint32 data_offset",
    **{f"std_msgs/{name}": f"{kind} data" for name, kind in _NUMBERS.items()},
    **{f"std_msgs/{name}MultiArray": f"{_LAYOUT}{kind}[] data" for name, kind in _NUMBERS.items()},
    "geometry_msgs/Vector3": "float64 x\nfloat64 y\nfloat64 z",
    "geometry_msgs/Point": "float64 x\nfloat64 y\nfloat64 z",
    "geometry_msgs/Quaternion": "float64 x\nfloat64 y\nfloat64 z\nfloat64 w",
    "geometry_msgs/Pose": "Point position\nQuaternion orientation",
    "geometry_msgs/PoseWithCovariance": "Pose pose\nfloat64[36] covariance",
    "geometry_msgs/Twist": "Vector3 linear\nVector3 angular",
    "geometry_msgs/TwistWithCovariance": "Twist twist\nfloat64[36] covariance",
    "geometry_msgs/Wrench": "Vector3 force\nVector3 torque",
    "geometry_msgs/Transform": "Vector3 translation\nQuaternion rotation",
    "geometry_msgs/PointStamped": f"{_STAMPED}Point point",
    "geometry_msgs/PoseStamped": f"{_STAMPED}Pose pose",
    "geometry_msgs/TwistStamped": f"{_STAMPED}Twist twist",
    "geometry_msgs/WrenchStamped": f"{_STAMPED}Wrench wrench",
    "geometry_msgs/TransformStamped": f"{_STAMPED}string child_frame_id\nTransform transform",
    "tf2_msgs/TFMessage": "geometry_msgs/TransformStamped[] transforms",
    "nav_msgs/Odometry": f"{_STAMPED}string child_frame_id\ngeometry_msgs/PoseWithCovariance pose\n"
    "geometry_msgs/TwistWithCovariance twist",
    "sensor_msgs/JointState": f"{_STAMPED}string[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort",
    "sensor_msgs/Image": f"{_STAMPED}uint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\n"
    "uint8[] data",
    "sensor_msgs/CompressedImage": f"{_STAMPED}string format\nuint8[] data",
    "sensor_msgs/Imu": f"{_STAMPED}geometry_msgs/Quaternion orientation\nfloat64[9] orientation_covariance\n"
    "geometry_msgs/Vector3 angular_velocity\nfloat64[9] angular_velocity_covariance\n"
    "geometry_msgs/Vector3 linear_acceleration\nfloat64[9] linear_acceleration_covariance",
    "sensor_msgs/Joy": f"{_STAMPED}float32[] axes\nint32[] buttons",
    "sensor_msgs/Range": f"{_STAMPED}uint8 radiation_type\nfloat32 field_of_view\nfloat32 min_range\n"
    "float32 max_range\nfloat32 range",
    "trajectory_msgs/JointTrajectoryPoint": "float64[] positions\nfloat64[] velocities\nfloat64[] accelerations\n"
    "float64[] effort\nbuiltin_interfaces/Duration time_from_start",
    "trajectory_msgs/JointTrajectory": f"{_STAMPED}string[] joint_names\nJointTrajectoryPoint[] points",
}
"""Definitions of common messages by type, for recordings of ROS 2 before Iron, which have no definitions."""
