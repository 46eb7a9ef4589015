"""The index of a video, which contains the position of each frame in the file. The index is stored next to the video.

An index is an Arrow file with a single row. Its columns are properties of the video; in some columns, the value is a
list with a number for each packet. ``mouse_video`` in the schema's metadata is the format version of the index. An
index is memory-mapped, and takes 37 bytes per frame.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError, SchemaError
from mouse_core.files.checksum import checksum
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import StrPath, replacing

# H.264 profiles whose parameter sets describe the colours.
_WITH_COLOURS = {44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 144, 244}
# All numbers that are read lie in the first bytes of a unit of the stream.
_MOST_BYTES = 1024


class _Bits:
    """Reads the bits of a NAL unit of H.264, without emulation prevention bytes."""

    def __init__(self, unit: bytes) -> None:
        content = unit[:_MOST_BYTES].replace(b"\0\0\3", b"\0\0")
        # The number of bits that were not read yet, and their value.
        self._left, self._value = 8 * len(content), int.from_bytes(content)

    def read(self, count: int) -> int:
        """Read an unsigned integer of ``count`` bits."""
        self._left -= count
        if self._left < 0:
            raise DataError("expected a complete H.264 header (NAL unit), found its end too early")
        found = self._value >> self._left
        self._value ^= found << self._left
        return found

    def count(self) -> int:
        """Read an unsigned Exp-Golomb number. For example, 00101 (two zeros, then 101) is 5 - 1 = 4."""
        return self.read(2 * (self._left - self._value.bit_length()) + 1) - 1

    def whole(self) -> int:
        """Read a signed Exp-Golomb number. The unsigned numbers 0 1 2 3 4 stand for 0 1 -1 2 -2."""
        found = self.count()
        return (found + 1) // 2 if found % 2 else -(found // 2)


def sets_of(header: bytes) -> Iterator[bytes]:
    """Yield the parameter sets in the header of an MP4 file."""
    place = 5
    for _ in range(2):  # parameter sets of sequences, then of pictures
        count = header[place] & 31 if place < len(header) else 0
        place += 1
        for _ in range(count):
            begin = place + 2
            place = begin + int.from_bytes(header[place:begin])
            yield header[begin:place]


def _sequence(unit: bytes) -> tuple[int, int, bool]:
    """Return three values of a sequence parameter set (SPS): its id, the number of bits of a frame number, and whether
    colour planes are coded separately.
    """
    bits = _Bits(unit[1:])
    profile = bits.read(8)
    bits.read(16)
    number, planes = bits.count(), False
    if profile in _WITH_COLOURS:
        colours = bits.count()
        planes = colours == 3 and bool(bits.read(1))
        bits.count()
        bits.count()
        bits.read(1)
        if bits.read(1):
            for place in range(12 if colours == 3 else 8):
                if bits.read(1):
                    _skip_scales(bits, 16 if place < 6 else 64)
    return number, bits.count() + 4, planes


def _skip_scales(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.whole()) % 256
        last = following or last


CODECS = ("h264", "hevc", "av1")
"""Supported codecs, by FFmpeg's names."""


class Picture(NamedTuple):
    """The properties of the picture in a packet.

    Args:
        entry: Whether the packet is an entry: decoding can begin at this packet, with the same result as decoding from
            the file's beginning.
        leading: Whether the picture is stored after an entry, is shown before this entry, and cannot be decoded if
            decoding begins at this entry.
        cut: Whether the picture is an entry, and the leading pictures after this entry are never shown.
        referenced: Whether other pictures may depend on this picture.
        layer: The temporal layer. Pictures of higher layers may depend on this picture, even if no picture of the same
            layer depends on it.
        sets: The parameter sets in the packet that are not in the file header.
        shown: Whether the packet contains a picture that is shown.
        gap: Whether earlier pictures that this picture needs may be missing. The decoder replaces missing pictures by
            pictures that depend on all earlier packets.
    """

    entry: bool
    leading: bool = False
    cut: bool = False
    referenced: bool = True
    layer: int = 0
    sets: frozenset[bytes] = frozenset()
    shown: bool = True
    gap: bool = False


def picture_reader(codec: str, header: bytes) -> Callable[[memoryview], Picture]:
    """Return a function that describes the picture of a packet.

    The function must be called with all packets of a file in order.

    Args:
        codec: FFmpeg's name of the codec.
        header: The data that precede all packets ("extradata").

    Raises:
        DataError: The codec is not supported, or the packets do not have the form of packets in MP4.
    """
    if codec in ("h264", "hevc"):
        place = 4 if codec == "h264" else 21
        if len(header) <= place or header[0] != 1:
            raise DataError(f"expected {codec} with a length before each NAL unit, as in MP4, found start codes")
        width = (header[place] & 3) + 1
        units = _H264(header).picture if codec == "h264" else _Hevc(header).picture
        return lambda packet: units(_units(packet, width))
    if codec != "av1":
        raise DataError(
            f"expected {', '.join(CODECS[:-1])} or {CODECS[-1]}, found {codec}; ffmpeg -i INPUT -c:v libx264 "
            "-qp 0 -g 2 OUTPUT.mp4 converts videos without loss"
        )
    return _av1


def _units(packet: memoryview, width: int) -> Iterator[memoryview]:
    """Yield the NAL units of a packet. In the packet, the length of each unit precedes the unit."""
    place = 0
    while place < len(packet):
        begin = place + width
        place = begin + int.from_bytes(packet[begin - width : begin])
        if place > len(packet) or place <= begin:
            raise DataError(f"expected units within a packet of {len(packet)} bytes, found a unit up to byte {place}")
        yield packet[begin:place]


class _H264:
    """Describes packets of H.264; for this, it tracks the frame numbers in the file."""

    def __init__(self, header: bytes) -> None:
        self._header = header
        self._sequences: dict[int, tuple[int, bool]] = {}
        self._pictures: dict[int, int] = {}
        self._before = 0
        for unit in sets_of(header):
            self._learn(unit)

    def _learn(self, unit: bytes) -> None:
        """Store the values of a parameter set."""
        if unit and unit[0] & 31 == 7:
            number, width, planes = _sequence(unit)
            self._sequences[number] = width, planes
        elif unit and unit[0] & 31 == 8:
            bits = _Bits(unit[1:])
            self._pictures[bits.count()] = bits.count()

    def _is_gap(self, unit: memoryview) -> bool:
        """Return whether frames are missing before a packet, judged by the frame number in its first slice."""
        bits = _Bits(bytes(unit[1:32]))
        bits.count()  # the position in the picture where the slice begins
        bits.count()  # kind of the slice
        sequence = self._sequences.get(self._pictures.get(bits.count(), -1))
        if sequence is None:
            raise DataError("expected a slice with known parameter sets, found a slice without them")
        width, planes = sequence
        if planes:
            bits.read(2)
        number, before = bits.read(width), self._before
        if unit[0] >> 5 & 3:
            self._before = number
        # A frame has the number after the last referenced frame's: 0 1 2b 2b 2 3, where b marks unreferenced frames.
        return unit[0] & 31 != 5 and number != (before + 1) % (1 << width)

    def picture(self, units: Iterator[memoryview]) -> Picture:
        """Return the properties of a packet's picture."""
        entry = referenced = shown = gap = False
        sets = []
        for unit in units:
            kind = unit[0] & 31
            if kind in (1, 2, 5):  # slices
                entry = entry or kind == 5
                referenced = referenced or unit[0] >> 5 & 3 != 0
                gap = gap or (not shown and self._is_gap(unit))
                shown = True
            elif kind in (7, 8, 13, 15):
                sets += [bytes(unit)]
                self._learn(sets[-1])
        new = frozenset(one for one in sets if one not in self._header)
        # A packet with parameter sets is never left out.
        return Picture(entry, referenced=referenced or entry or bool(new), sets=new, shown=shown, gap=gap)


class _Hevc:
    """Describes packets of HEVC."""

    def __init__(self, header: bytes) -> None:
        self._header, self._ended = header, False

    def picture(self, units: Iterator[memoryview]) -> Picture:
        """Return the properties of a packet's picture."""
        entry = leading = cut = shown = False
        referenced, layer = True, 0
        sets, ends = [], False
        for unit in units:
            kind = unit[0] >> 1 & 63
            if len(unit) < 2 or unit[0] & 1 or unit[1] >> 3:  # another view or quality of the same picture
                continue
            if kind < 32:  # slices; a packet has one picture, and its slices agree in these values
                entry, leading = 16 <= kind <= 21, kind in (8, 9)
                # An entry after the end of a sequence is like an entry at the beginning of a file.
                cut = 16 <= kind <= 18 or self._ended
                referenced, layer = kind > 14 or kind % 2 == 1, (unit[1] & 7) - 1
                shown, ends = True, False
            elif kind in (32, 33, 34):
                sets += [bytes(unit)]
            elif kind in (36, 37):  # the end of a sequence, and the end of the stream
                self._ended = ends = True
        self._ended = ends or (self._ended and not shown)
        new = frozenset(one for one in sets if one not in self._header)
        return Picture(entry, leading, cut, referenced or bool(new) or ends, layer, new, shown)


def _av1(packet: memoryview) -> Picture:
    """Describe a packet of AV1. An entry is a key frame that is shown and follows a sequence header."""
    place, sequence = 0, False
    while place < len(packet):
        kind, extended, sized = packet[place] >> 3 & 15, packet[place] >> 2 & 1, packet[place] >> 1 & 1
        place += 1 + extended
        size, place = _leb128(packet, place) if sized else (len(packet) - place, place)
        if place + size > len(packet):
            raise DataError(
                f"expected units within a packet of {len(packet)} bytes, found a unit up to byte {place + size}"
            )
        if kind == 1:
            sequence = True
        elif kind in (3, 6) and size:  # show_existing_frame, frame_type (2 bits), show_frame
            return Picture(sequence and packet[place] >> 4 == 0b0001)
        place += size
    return Picture(False)


def _leb128(packet: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(packet[place : place + 8]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise DataError("expected the length of a unit, found none")


LARGEST_SIDE = 8192
"""Largest width and height of a video in pixels."""

# Other containers are rejected: some are playlists of other files, and some cut packets into pieces.
_CONTAINER, _STRICT = "mov", {"err_detect": "explode"}
# Signs of other containers: name, position, and the bytes there.
_OTHERS = (
    ("Matroska or WebM", 0, b"\x1aE\xdf\xa3"),
    ("AVI", 8, b"AVI "),
    ("FLV", 0, b"FLV\x01"),
    ("Ogg", 0, b"OggS"),
    ("MPEG-PS", 0, b"\0\0\x01\xba"),
    ("MPEG-TS", 188, b"G"),  # first byte of each packet of 188 bytes; the first packet is checked too
)
# Kinds of side data that change the meaning of a packet.
_NEEDED = ("new_extradata", "param_change", "encryption_info")

# FFmpeg's number of an unspecified matrix of colours; 0 is an unspecified range.
_UNSAID = 2
# If the file does not state the number of late frames, the decoder of H.264 with "strict" waits for as many as the
# profile allows; otherwise it would lose the first late frames.
_OPTIONS = {"h264": {"strict": "strict"}, "av1": {"max_frame_delay": "1"}}


class _Packet(NamedTuple):
    """The position and content of a packet."""

    pts: int
    position: int
    size: int
    checksum: int
    shown: bool
    picture: Picture


def pyav() -> Any:
    """Return the package PyAV. The ImportError names the extra to install."""
    try:
        import av
    except ImportError as error:
        raise ImportError("camera videos need PyAV: pip install 'mouse-data[video]'") from error
    return av


def demux(file: Path) -> dict[str, Any]:
    """Read a video; return the contents of its index by name, as plain numbers, bytes and arrays.

    Raises:
        ImportError: PyAV is not installed.
        DataError: The file is not a video with a supported codec and container.
        ConfigError: The file does not exist.
    """
    av = pyav()
    _check_container(file)
    with reading(file), file.open("rb") as stream, _opened(av, file) as container:
        if not container.streams.video:
            raise DataError("expected a video stream, found none")
        video = container.streams.video[0]
        context = video.codec_context
        about = {
            "codec": context.codec.canonical_name,
            "header": bytes(context.extradata or b""),
            "height": context.height,
            "width": context.width,
            "pixel_format": context.pix_fmt or "",
            "time_base": [video.time_base.numerator, video.time_base.denominator],
        }
        if not 0 < min(context.height, context.width) <= max(context.height, context.width) <= LARGEST_SIDE:
            raise DataError(
                f"expected a height and width of 1 to {LARGEST_SIDE} pixels, found {context.height}x{context.width}"
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as memory:
            packets = list(_packets(file, container.demux(video), memory, about))
            colours = [int(context.colorspace), int(context.color_range)]
        found = _arrays(file, packets) if packets else {"packet": ()}
        if not len(found["packet"]):
            raise damaged(file, "expected frames, found none")
        # Decoding without the container shows whether the colours are stated by the container or by the packets.
        own = [] if colours == [_UNSAID, 0] else _first_colours(file, about)
        about["colours"] = colours if own and own != _first_colours(file, {**about, "colours": colours}) else []
    return {**about, **found}


def new_decoder(codec: str, header: bytes, colours: Sequence[int]) -> Any:
    """Return a new decoder of PyAV.

    Args:
        codec: FFmpeg's name of the codec.
        header: Data that the decoder receives before the first packet.
        colours: FFmpeg's numbers of the colour matrix and the colour range that are stored in the container; () if none
            are stored.
    """
    # FFmpeg's own decoder of AV1 needs hardware.
    decoder = pyav().CodecContext.create("libdav1d" if codec == "av1" else codec, "r")
    decoder.extradata = header or None
    decoder.thread_count = 1
    decoder.options = {"err_detect": "explode", **_OPTIONS.get(codec, {})}
    if len(colours):
        decoder.colorspace, decoder.color_range = colours
    return decoder


def _first_colours(file: Path, about: dict[str, Any]) -> list[int]:
    """Return the colour matrix and the colour range of the first decoded frame; [] if no frame can be decoded."""
    decoder = new_decoder(about["codec"], about["header"], about.get("colours", ()))
    av = pyav()
    with _opened(av, file) as container, suppress(av.error.FFmpegError):
        for packet in container.demux(video=0):
            for frame in decoder.decode(packet if packet.size else None):
                return [int(frame.colorspace), int(frame.color_range)]
    return []


def _check_container(file: Path) -> None:
    """Raise DataError unless the file is a container of a supported kind."""
    with reading(file), file.open("rb") as stream:
        head = stream.read(_OTHERS[-1][1] + 1)
    for name, place, sign in _OTHERS:
        if head[place:].startswith(sign) and (name != "MPEG-TS" or head.startswith(sign)):
            raise damaged(
                file,
                f"expected MP4 or MOV, found {name}; if its codec is H.264, HEVC or AV1, ffmpeg -i INPUT "
                "-map 0:v:0 -c copy OUTPUT.mp4 copies the frames into an MP4 file",
            )


def _opened(av: Any, file: Path) -> Any:
    # An absolute path, so that FFmpeg does not take a name for an address.
    return av.open(str(file.absolute()), format=_CONTAINER, options=_STRICT)


def _packets(file: Path, demuxed: Any, memory: memoryview, about: dict[str, Any]) -> Iterator[_Packet]:
    read = picture_reader(about["codec"], about["header"])
    for number, packet in enumerate(demuxed):
        if not packet.size:  # the packet that ends the stream
            continue
        where = f"packet {number}"
        if packet.pts is None:
            raise damaged(file, "expected a time for each packet, found a packet without a time", at=where)
        # Most packets have no side data, and testing for each kind takes long.
        if any(True for _ in packet.iter_sidedata()) and any(map(packet.has_sidedata, _NEEDED)):
            raise damaged(file, "expected the same codec settings for all frames, found new settings", at=where)
        begin = -1 if packet.pos is None else packet.pos
        with memoryview(packet) as content, memory[begin : begin + packet.size] as there:
            written = checksum(content)
            if begin < 0 or len(there) != len(content) or checksum(there) != written:
                raise damaged(file, "expected the packet's bytes next to each other in the file, as in MP4", at=where)
            yield _Packet(packet.pts, begin, packet.size, written, not packet.is_discard, read(content))


def _arrays(file: Path, packets: list[_Packet]) -> dict[str, Any]:
    pictures = [packet.picture for packet in packets]
    start, hidden = _starts(file, pictures)
    gap = any(picture.gap for picture in pictures)
    pts = np.array([packet.pts for packet in packets], np.int64)
    shown = np.flatnonzero([packet.shown and not out for packet, out in zip(packets, hidden, strict=True)])
    order = shown[np.argsort(pts[shown], kind="stable")]
    twice = np.flatnonzero(pts[order[1:]] == pts[order[:-1]])
    if len(twice):
        raise damaged(
            file,
            f"expected a different time for each frame, found the time of frame {twice[0]} again",
            at=f"frame {twice[0] + 1}",
        )
    top = max(picture.layer for picture in pictures)
    return {
        "own_sets": any(picture.sets for picture in pictures),
        "pts": pts,
        "position": np.array([packet.position for packet in packets], np.int64),
        "size": np.array([packet.size for packet in packets], np.int32),
        "start": start,
        "referenced": np.array([gap or one.referenced or one.layer < top for one in pictures], np.uint8),
        "checksum": np.array([packet.checksum for packet in packets], np.uint64),
        "packet": order.astype(np.int32),
    }


def _starts(file: Path, pictures: list[Picture]) -> tuple[Any, list[bool]]:
    """Return, for each packet, the packet at which its decoding begins, and whether its picture is never shown.

    Leading pictures of an entry are decoded from the entry before it. Example: for packets I P C b b P, where I and C
    are entries and b are leading pictures of C, the result is 0 0 2 0 0 2.
    """
    start: list[int] = []
    hidden: list[bool] = []
    seen: set[bytes] = set()
    current = before = 0
    no_leading = True
    for number, picture in enumerate(pictures):
        if number == 0 and not picture.entry:
            raise damaged(file, "expected a key frame, found a frame that needs other frames", at="packet 0")
        if picture.entry:
            before, no_leading = current, picture.cut or number == 0
            # A decoder that begins at this packet has the parameter sets of the header and of this packet; a decoder
            # that began earlier may have other sets, from packets between.
            current = number if seen <= picture.sets else current
        elif picture.gap:
            current = 0
        seen |= picture.sets
        hidden.append((picture.leading and no_leading) or not picture.shown)
        start.append(before if picture.leading else current)
    return np.array(start, np.int32), hidden


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
# Number of bytes at each end of a file in the checksum that distinguishes files of equal size. The tables of an MP4
# file lie at one of its ends.
_END_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """The frames of a video file, numbered from 0 in the order of display.

    ``index_video`` creates an index. Each array except ``packet`` has a value for each packet, in decoding order.

    Args:
        path: The video.
        digest: Digest of all values below and of the bytes of all packets, in hexadecimal digits. The digest does not
            depend on ``path``.
        codec: FFmpeg's name of the codec: "h264", "hevc" or "av1".
        header: Data that a decoder receives before the first packet.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        pixel_format: FFmpeg's name of the pixel format, such as "yuv420p" or "gray12le".
        colours: FFmpeg's numbers of the colour matrix and range, if these are stored only in the container; otherwise
            ().
        time_base: Unit of ``pts`` in seconds.
        own_sets: Whether packets contain parameters that are not in ``header``.
        pts: Display time of the frame of each packet, int64.
        position: Position of each packet in the file in bytes, int64.
        size: Size of each packet in bytes, int32.
        start: Index of the packet at which the decoding of each packet begins, int32.
        referenced: 1 for each packet that other packets may need, else 0, uint8.
        checksum: Checksum of the bytes of each packet, uint64.
        packet: Index of the packet of each frame, int32 ``[frames]``.
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
        """Display times of the frames in seconds, float64 ``[frames]``."""
        return np.asarray(self.pts[self.packet] * float(self.time_base), np.float64)

    def __repr__(self) -> str:
        return f"VideoIndex({self.path!r}, {len(self)} frames, {self.codec} {self.height}x{self.width})"


def index_video(path: StrPath, *, sidecar: StrPath | None = None) -> VideoIndex:
    """Return the stored index of a video. If no index is stored, read the file once, and create and store the index.

    The stored index is replaced if it is damaged or belongs to another file. If the index cannot be written, it is
    returned without being stored.

    Args:
        path: An MP4 file with H.264, HEVC or AV1. If the file has several video streams, the first stream is used.
        sidecar: The path of the index. By default, the path of the video with ".index.arrow" appended; if the folder of
            the video is read-only, a file in the folder "videos" of the cache folder
            (``mouse_core.remote.mirror.cache_folder``).

    Raises:
        ImportError: No index is stored, and PyAV is not installed.
        ConfigError: No file exists at ``path``.
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
    from mouse_core.remote.mirror.mirror import cache_folder  # rarely needed

    name = hashlib.sha256(os.fsencode(video.resolve())).hexdigest()[:32]
    return cache_folder() / "videos" / f"{name}{SUFFIX}"


def _ends_of(video: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and a checksum of its first and last bytes."""
    with video.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(_END_BYTES)
        stream.seek(max(0, size - _END_BYTES))
        return size, checksum(first + stream.read(_END_BYTES))


def _digest(row: dict[str, Any]) -> str:
    """Return the digest of the values of an index. The value ``digest`` is excluded, and ``colours`` too if it is
    empty.
    """
    whole = hashlib.sha256()
    for field in _SCHEMA:
        value = row[field.name] if field.name != "digest" else "1"
        if field.name == "colours" and not value:
            continue
        content = np.ascontiguousarray(value).tobytes() if field.name in _ARRAYS else repr(value).encode()
        whole.update(f"{field.name} {len(content)} ".encode() + content)
    return whole.hexdigest()[:32]


def _read(place: Path, ends: tuple[int, int]) -> dict[str, Any] | None:
    """Return the row of a stored index, memory-mapped; None if the index is missing, damaged or of another file."""
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
            batch.validate(full=True)  # a damaged offset would be read outside of the file
            row = {
                name: column[0].values.to_numpy(zero_copy_only=True) if name in _ARRAYS else column[0].as_py()
                for name, column in zip(_SCHEMA.names, batch.columns, strict=True)
            }
        own = (row["bytes"], row["ends"]) == ends and row["digest"] == _digest(row)
        return row if own and _fits(row) else None
    except DataError:
        return None


def _fits(row: dict[str, Any]) -> bool:
    """Whether an index has only values that this module can write, and all positions lie within the file and the index.

    This check is needed because the index in an untrusted dataset can contain any decoder name or frame size.
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
