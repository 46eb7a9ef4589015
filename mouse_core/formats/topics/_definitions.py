"""Definitions of messages, as recordings hold them and .msg files say them, and those of the commonest messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

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


class Kind(NamedTuple):
    """What a field is.

    Args:
        name: "float64" and the like, "string", or the type of a message.
        many: How many; None: one, -1: as many as there are.
    """

    name: str
    many: int | None


Fields = tuple[tuple[str, Kind], ...]
Definitions = Mapping[str, Fields]
"""The fields of messages by their types, as ``package/Name``; the first is the one that was asked for."""


def plain_name(name: str) -> str:
    """``package/msg/Name`` as ``package/Name``."""
    return name.replace("/msg/", "/")


def parse_definitions(name: str, text: str, given: Mapping[str, str] | None = None) -> Definitions:
    """What a recording says of a type of messages, and of those that these hold.

    Args:
        name: The type.
        text: As MCAP and rosbag2 keep it: the fields, and after lines of ``=`` other types, each headed ``MSG: type``.
            Empty: it is among the given, or the commonest.
        given: Definitions by type, which come before those that are known here.

    Raises:
        DataError: No such definitions.
    """
    if len(text) > _MOST_TEXT:
        raise DataError(f"{name}: expected a definition of at most {_MOST_TEXT} bytes, found {len(text)}")
    texts = {plain_name(one): words for one, words in {**COMMON, **(given or {})}.items()}
    first, *others = _SEPARATOR.split(text)
    if first.strip() or others:
        texts[plain_name(name)] = first
    for other in others:
        head, _, rest = other.strip().partition("\n")
        if not head.startswith("MSG:"):
            raise DataError(f"{name}: expected 'MSG: type' above a definition, found {head!r:.80}")
        texts[plain_name(head.removeprefix("MSG:").strip())] = rest
    found: dict[str, Fields] = {}
    _add(plain_name(name), texts, found, ())
    return found


def _add(name: str, texts: Mapping[str, str], found: dict[str, Fields], above: tuple[str, ...]) -> None:
    if name in above or len(above) > _MOST_DEPTH:
        raise DataError(f"{name}: expected messages in messages at most {_MOST_DEPTH} deep, none of them in itself")
    if name in found:
        return
    if name not in texts:
        raise DataError(
            f"{name}: expected a definition of this message, found none in the recording; give one in the layout's "
            "definitions"
        )
    found[name] = fields = _fields(name, texts)
    if sum(map(len, found.values())) > _MOST_FIELDS:
        raise DataError(f"{name}: expected at most {_MOST_FIELDS} fields")
    for _, kind in fields:
        if kind.name not in SIZES and kind.name != TEXT:
            _add(kind.name, texts, found, (*above, name))


def _fields(name: str, texts: Mapping[str, str]) -> Fields:
    found = []
    for line in texts[name].splitlines():
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _FIELD.fullmatch(said)
        if match is None:
            raise DataError(f"{name}: expected a field as 'float64[] position', found {said!r:.80}")
        if match["rest"].startswith("="):  # a constant
            continue
        found.append((match["name"], _kind(name, match, texts)))
    if len({field for field, _ in found}) < len(found):
        raise DataError(f"{name}: expected fields of different names, found {[field for field, _ in found][:20]}")
    return tuple(found) or (("structure_needs_at_least_one_member", Kind("uint8", None)),)


def _kind(name: str, match: re.Match[str], texts: Mapping[str, str]) -> Kind:
    count = None
    if match["many"]:
        fixed = match["count"] and not match["bound"]
        count = int(match["count"]) if fixed else -1
        if count == 0 or count > _MOST_COUNT:
            raise DataError(f"{name}: {match['name']}: expected 1 to {_MOST_COUNT} values, found {count}")
    kind = plain_name(match["kind"])
    if kind in SIZES or kind == TEXT:
        return Kind(kind, count)
    if kind in ("time", "duration"):  # of ROS 1
        return Kind("builtin_interfaces/Time" if kind == "time" else "builtin_interfaces/Duration", count)
    if "/" not in kind:
        beside = f"{name.rpartition('/')[0]}/{kind}"
        kind = "std_msgs/Header" if kind == "Header" and beside not in texts else beside
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
"""Definitions of messages that recordings of ROS 2 before Iron do not hold, by type."""
