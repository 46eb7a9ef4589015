"""The index of a video's frames and their positions in the file, stored beside the video.

An index is an Arrow file of one row. Its columns are the properties of the video, some of them lists with one number
per packet; ``mouse_video`` in the schema's metadata is its version. It is memory-mapped, at 37 bytes per frame.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError, SchemaError
from mouse_core.files.checksum import checksum
from mouse_core.files.reading import reading
from mouse_core.files.writing import StrPath, replacing
from mouse_core.video._demuxing import CODECS, LARGEST_SIDE, demux

SUFFIX = ".index.arrow"
_VERSION, _KEY = 1, b"mouse_video"
_SCHEMA = pa.schema(
    [
        ("bytes", pa.int64()),
        ("ends", pa.uint64()),
        ("digest", pa.string()),
        ("codec", pa.string()),
        ("header", pa.binary()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("pixel_format", pa.string()),
        ("colours", pa.list_(pa.int32())),
        ("time_base", pa.list_(pa.int64())),
        ("own_sets", pa.bool_()),
        ("pts", pa.list_(pa.int64())),
        ("position", pa.list_(pa.int64())),
        ("size", pa.list_(pa.int32())),
        ("start", pa.list_(pa.int32())),
        ("referenced", pa.list_(pa.uint8())),
        ("checksum", pa.list_(pa.uint64())),
        ("packet", pa.list_(pa.int32())),
    ],
    metadata={_KEY: str(_VERSION).encode()},
)
_ARRAYS = ("pts", "position", "size", "start", "referenced", "checksum", "packet")
# Number of bytes at each end of a file whose checksum distinguishes files of equal size: the tables of an MP4 begin or
# end there.
_END_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """The frames of one video file, numbered from 0 in the order in which they are shown.

    ``index_video`` creates it. Arrays have one value for each packet in decoding order, except ``packet``.

    Args:
        path: The video.
        digest: Digest of all values below and of the bytes of all packets, in hexadecimal digits; independent of path.
        codec: FFmpeg's name of the codec: "h264", "hevc", "av1", "vp9" or "mjpeg".
        header: Data that a decoder takes before the first packet.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        pixel_format: FFmpeg's name of the pixel format, such as "yuv420p" or "gray12le".
        colours: FFmpeg's numbers of the colour matrix and range, if the container has them and the packets do not;
            else ().
        time_base: Seconds of one unit of ``pts``.
        own_sets: Whether packets contain parameters that are not in ``header``.
        pts: Time at which the frame of each packet is shown, int64.
        position: Position of each packet in the file in bytes, int64.
        size: Size of each packet in bytes, int32.
        start: Packet at which decoding of each packet begins, int32.
        referenced: 1 for a packet that other packets may need, uint8.
        checksum: XXH3 of the bytes of each packet, uint64.
        packet: The packet of each frame, int32 ``[frames]``.
    """

    path: str
    digest: str
    codec: str
    header: bytes
    height: int
    width: int
    pixel_format: str
    colours: tuple[int, ...]
    time_base: Fraction
    own_sets: bool
    pts: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    size: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    referenced: npt.NDArray[np.uint8]
    checksum: npt.NDArray[np.uint64]
    packet: npt.NDArray[np.int32]

    def __len__(self) -> int:
        """The number of frames."""
        return len(self.packet)

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """Times at which frames are shown, in seconds, float64 ``[frames]``."""
        return np.asarray(self.pts[self.packet] * float(self.time_base), np.float64)

    def __repr__(self) -> str:
        return f"VideoIndex({self.path!r}, {len(self)} frames, {self.codec} {self.height}x{self.width})"


def index_video(path: StrPath, *, sidecar: StrPath | None = None) -> VideoIndex:
    """Return the index of a video: the stored index, or a new one from one pass through the file, which is stored.

    An index of another file, or a damaged index, is replaced. If no index can be written, it is only returned.

    Args:
        path: An MP4 file with H.264, HEVC, AV1, VP9 or Motion JPEG; of several video streams the first is used.
        sidecar: The path of the index; by default beside the video, with ".index.arrow" appended to its name. If that
            folder is read-only, the default is "videos" in the cache folder
            (``mouse_core.remote.mirror.cache_folder``).

    Raises:
        ImportError: There is no index yet, and PyAV is not installed.
        ConfigError: There is no such file.
        DataError: The file is damaged, or of another kind; the message names the file and the position.
        SchemaError: The index was written by a newer version of this library.
    """
    video = Path(path)
    place = _place_of(video) if sidecar is None else Path(sidecar)
    with reading(video):
        ends = _ends_of(video)
    row = _read(place, ends)
    if row is None:
        row = {**demux(video), "bytes": ends[0], "ends": ends[1]}
        row["digest"] = _digest(row)
        with suppress(OSError):
            if sidecar is None:
                place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place, sync=False) as partial, pa.OSFile(str(partial), "wb") as sink:
                columns = [pa.array([row[field.name]], field.type) for field in _SCHEMA]
                with pa.ipc.new_file(sink, _SCHEMA) as writer:
                    writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    known = {name: value for name, value in row.items() if name not in ("bytes", "ends")}
    known |= {"time_base": Fraction(*row["time_base"]), "colours": tuple(row["colours"])}
    return VideoIndex(path=str(video), **known)


def _place_of(video: Path) -> Path:
    """Return the default path of a video's index."""
    beside = Path(f"{video}{SUFFIX}")
    if beside.exists() or os.access(beside.parent, os.W_OK) or not video.exists():
        return beside
    from mouse_core.remote.mirror.mirror import cache_folder  # loaded where there is no room beside

    name = hashlib.sha256(os.fsencode(video.resolve())).hexdigest()[:32]
    return cache_folder() / "videos" / f"{name}{SUFFIX}"


def _ends_of(video: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and a checksum of its two ends."""
    with video.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_END_BYTES)
        stream.seek(max(0, size - _END_BYTES))
        return size, checksum(first + stream.read(_END_BYTES))


def _digest(row: dict[str, Any]) -> str:
    """Return the digest of an index without its own digest, and without colours that are not set."""
    whole = hashlib.sha256()
    for field in _SCHEMA:
        value = row[field.name] if field.name != "digest" else "1"
        if field.name == "colours" and not value:
            continue
        content = np.ascontiguousarray(value).tobytes() if field.name in _ARRAYS else repr(value).encode()
        whole.update(f"{field.name} {len(content)} ".encode() + content)
    return whole.hexdigest()[:32]


def _read(place: Path, ends: tuple[int, int]) -> dict[str, Any] | None:
    """Return the row of a stored index, with mapped arrays; None if it is missing, damaged or of another file."""
    if not place.is_file():
        return None
    try:
        with reading(place), pa.memory_map(str(place)) as source:
            reader = pa.ipc.open_file(source)
            version = int((reader.schema.metadata or {}).get(_KEY, b"0"))
            if version > _VERSION:
                raise SchemaError(
                    f"{place}: expected an index of version {_VERSION} at most, found version {version}; "
                    "it was written by a newer mouse-data"
                )
            batch = reader.get_batch(0)
            if not reader.schema.equals(_SCHEMA) or version != _VERSION or len(batch) != 1:
                return None
            row = {
                name: column[0].values.to_numpy(zero_copy_only=True) if name in _ARRAYS else column[0].as_py()
                for name, column in zip(_SCHEMA.names, batch.columns, strict=True)
            }
        own = (row["bytes"], row["ends"]) == ends and row["digest"] == _digest(row)
        return row if own and _fits(row) else None
    except DataError:
        return None


def _fits(row: dict[str, Any]) -> bool:
    """Whether an index has values that this module writes, and all its numbers lie within the file and the index.

    Data that others made may bring indexes along, and so the name of a decoder, or frames of any size.
    """
    if any(value is None for value in row.values()) or None in (*row["time_base"], *row["colours"]):
        return False
    count, sides = len(row["pts"]), (row["height"], row["width"])
    if row["codec"] not in CODECS or not 0 < min(sides) <= max(sides) <= LARGEST_SIDE:
        return False
    if not count or len(row["time_base"]) != 2 or min(row["time_base"]) < 1:
        return False
    if len(row["colours"]) not in (0, 2) or not all(0 <= number < 256 for number in row["colours"]):
        return False
    if any(len(row[name]) != count for name in _ARRAYS if name != "packet"):
        return False
    position, size, start, packet = (row[name] for name in ("position", "size", "start", "packet"))
    inside = position.min() >= 0 and size.min() > 0 and (row["bytes"] - size >= position).all()
    back = start.min() >= 0 and (start <= np.arange(count)).all()
    shown = len(packet) and packet.min() >= 0 and packet.max() < count
    return bool(inside and back and shown)
