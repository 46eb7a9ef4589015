"""Recordings of robots, written by the writers of MCAP and rosbags from messages whose every value is known."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

T0 = 1_700_000_000_000_000_000
Log = list[tuple[str, int, Any]]
"""Topic, when it was recorded in nanoseconds, message."""


@cache
def typestore() -> Any:
    typesys = pytest.importorskip("rosbags.typesys")
    return typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)


def message(kind: str, **values: Any) -> Any:
    """A message; ``stamp`` is of its header, what is not said is 0 or nothing."""
    return _made(kind.replace("/", "/msg/"), values)


def _made(kind: str, values: dict[str, Any]) -> Any:
    stamp = values.pop("stamp") if isinstance(values.get("stamp"), int) else None
    made = {}
    for name, (sort, what) in typestore().fielddefs[kind][1]:
        if name in values:
            value = values[name]
            made[name] = _made(what, value) if sort == 2 and isinstance(value, dict) else value
        elif name == "header" and stamp is not None:
            made[name] = _made(what, {"stamp": {"sec": stamp // 10**9, "nanosec": stamp % 10**9}})
        else:
            made[name] = _nothing(sort, what)
    return typestore().types[kind](**made)


def _nothing(sort: int, what: Any) -> Any:
    if sort == 1:
        return "" if what[0] == "string" else 0
    if sort == 2:
        return _made(what, {})
    inner, count = what
    if inner[0] == 1 and inner[1][0] != "string":
        dtype = {"bool": "bool", "byte": "uint8", "char": "uint8", "octet": "uint8"}.get(inner[1][0], inner[1][0])
        return np.zeros(count if sort == 3 else 0, dtype)
    return [_nothing(*inner) for _ in range(count if sort == 3 else 0)]


def joints(at: int, values: Iterable[float], names: Iterable[str] = ("a", "b")) -> Any:
    return message("sensor_msgs/JointState", stamp=at, name=list(names), position=np.array(list(values), float))


def numbers(values: Iterable[float]) -> Any:
    return message("std_msgs/Float64MultiArray", data=np.array(list(values), float))


def image(at: int, pixels: np.ndarray, encoding: str = "rgb8", **more: Any) -> Any:
    height, width = pixels.shape[:2]
    data = np.ascontiguousarray(pixels)
    step = data.nbytes // height
    values = {"height": height, "width": width, "encoding": encoding, "step": step, "data": data.reshape(-1).view("u1")}
    return message("sensor_msgs/Image", stamp=at, **values | more)


def write_mcap(path: Path, log: Log, *, compression: str = "ZSTD", chunk_size: int = 2048, **options: Any) -> Path:
    """By the package mcap, in the order of the log."""
    from mcap.writer import CompressionType, Writer

    with path.open("wb") as file:
        kind = getattr(CompressionType, compression)
        writer = Writer(file, compression=kind, chunk_size=chunk_size, enable_data_crcs=True, **options)
        writer.start(profile="ros2", library="tests")
        channels: dict[str, int] = {}
        for topic, time, one in log:
            name = one.__msgtype__
            if topic not in channels:
                text = typestore().generate_msgdef(name, ros_version=2)[0]
                schema = writer.register_schema(name, "ros2msg", text.encode())
                channels[topic] = writer.register_channel(topic, "cdr", schema)
            data = bytes(typestore().serialize_cdr(one, name))
            writer.add_message(channels[topic], log_time=time, publish_time=time, data=data)
        writer.finish()
    return path


def write_bag(path: Path, log: Log, *, storage: str = "sqlite3", compressed: bool = False) -> Path:
    """By rosbags, a folder with metadata.yaml."""
    from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

    plugin = StoragePlugin.MCAP if storage == "mcap" else StoragePlugin.SQLITE3
    writer = Writer(path, version=9, storage_plugin=plugin)
    if compressed:
        writer.set_compression(CompressionMode.MESSAGE, CompressionFormat.ZSTD)
    with writer:
        connections: dict[str, Any] = {}
        for topic, time, one in log:
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, one.__msgtype__, typestore=typestore())
            writer.write(connections[topic], time, typestore().serialize_cdr(one, one.__msgtype__))
    return path
