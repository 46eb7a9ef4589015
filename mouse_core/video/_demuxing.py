"""Index of a video's packets, from one pass through its container without decoding."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mouse_core.errors import DataError
from mouse_core.files.checksum import checksum
from mouse_core.files.reading import damaged, reading
from mouse_core.video._pictures import Picture, picture_reader

LARGEST_SIDE = 8192
"""Pixels a side that a video may have at most."""

# Of other containers some have playlists of other files read, and some have packets in pieces.
_CONTAINER, _STRICT = "mov", {"err_detect": "explode"}
# How files of others begin: what they are called, where, and the bytes there.
_OTHERS = (
    ("Matroska or WebM", 0, b"\x1aE\xdf\xa3"),
    ("AVI", 8, b"AVI "),
    ("FLV", 0, b"FLV\x01"),
    ("Ogg", 0, b"OggS"),
    ("MPEG-PS", 0, b"\0\0\x01\xba"),
    ("MPEG-TS", 188, b"G"),  # what begins each of its packets of 188 bytes, the first of which is looked at, too
)
# Side data without which a packet means something else.
_NEEDED = ("new_extradata", "param_change", "encryption_info")

# FFmpeg's number of a matrix of colours of which nothing is said; of a range it is 0.
_UNSAID = 2
# "strict" has H.264 wait for as many frames as its profile allows to come late where the file does not say how many do:
# otherwise the first of them are lost.
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
    """The package PyAV."""
    try:
        import av
    except ImportError as error:
        raise ImportError("camera videos need PyAV: pip install 'mouse-data[video]'") from error
    return av


def demux(file: Path) -> dict[str, Any]:
    """Return the contents of an index by name, as plain numbers, bytes and arrays.

    Raises:
        ImportError: PyAV is not installed.
        DataError: The file is no video of a supported codec and container.
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
            raise DataError(f"expected sides of 1 to {LARGEST_SIDE} pixels, found {context.height}x{context.width}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as memory:
            packets = list(_packets(file, container.demux(video), memory, about))
            colours = [int(context.colorspace), int(context.color_range)]
        found = _arrays(file, packets) if packets else {"packet": ()}
        if not len(found["packet"]):
            raise damaged(file, "expected frames, found none")
        # Whether these are from the container is seen in a decoder that has not seen it.
        own = [] if colours == [_UNSAID, 0] else _first_colours(file, about)
        about["colours"] = colours if own and own != _first_colours(file, {**about, "colours": colours}) else []
    return {**about, **found}


def new_decoder(codec: str, header: bytes, colours: Sequence[int]) -> Any:
    """A decoder of PyAV.

    Args:
        codec: As FFmpeg calls it.
        header: What it is told before the first packet.
        colours: What a container says of the matrix and the range of colours, as numbers of FFmpeg; () where nothing.
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
    """The matrix and the range of colours of the first frame that a decoder gives; [] where it gives none."""
    decoder = new_decoder(about["codec"], about["header"], about.get("colours", ()))
    av = pyav()
    with _opened(av, file) as container, suppress(av.error.FFmpegError):
        for packet in container.demux(video=0):
            for frame in decoder.decode(packet if packet.size else None):
                return [int(frame.colorspace), int(frame.color_range)]
    return []


def _check_container(file: Path) -> None:
    """Raise DataError for a container of another kind; what is damaged is found by going through it."""
    with reading(file), file.open("rb") as stream:
        head = stream.read(_OTHERS[-1][1] + 1)
    for name, place, sign in _OTHERS:
        if head[place:].startswith(sign) and (name != "MPEG-TS" or head.startswith(sign)):
            raise damaged(
                file,
                f"expected MP4 or MOV, found {name}; where its codec is one that is read (H.264, HEVC, AV1, VP9, "
                "Motion JPEG), ffmpeg -i INPUT -map 0:v:0 -c copy OUTPUT.mp4 puts the same frames into one",
            )


def _opened(av: Any, file: Path) -> Any:
    # From the root on, lest a name is taken for an address.
    return av.open(str(file.absolute()), format=_CONTAINER, options=_STRICT)


def _packets(file: Path, demuxed: Any, memory: memoryview, about: dict[str, Any]) -> Iterator[_Packet]:
    read = picture_reader(about["codec"], about["header"])
    for number, packet in enumerate(demuxed):
        if not packet.size:  # what ends the stream
            continue
        where = f"packet {number}"
        if packet.pts is None:
            raise damaged(file, "expected a time of its own, found none", at=where)
        # Most have none at all, and asking for each kind takes long.
        if any(True for _ in packet.iter_sidedata()) and any(map(packet.has_sidedata, _NEEDED)):
            raise damaged(file, "expected one description of all frames, found another from here on", at=where)
        begin = -1 if packet.pos is None else packet.pos
        with memoryview(packet) as content, memory[begin : begin + packet.size] as there:
            written = checksum(content)
            if begin < 0 or len(there) != len(content) or checksum(there) != written:
                raise damaged(file, "expected its bytes side by side in the file, as in MP4", at=where)
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
        raise damaged(file, f"expected a time of its own, found that of frame {twice[0]}", at=f"frame {twice[0] + 1}")
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
    """For each packet at which one decoding begins, and whether none ever shows it.

    Pictures that lead in an entry are decoded from the one before it: of packets I P C b b P, b leading in C, that is
    0 0 2 0 0 2.
    """
    start: list[int] = []
    hidden: list[bool] = []
    seen: set[bytes] = set()
    current = before = 0
    no_leading = True
    for number, picture in enumerate(pictures):
        if number == 0 and not picture.entry:
            raise damaged(file, "expected a frame that needs no other, found one that does", at="packet 0")
        if picture.entry:
            before, no_leading = current, picture.cut or number == 0
            # A decoder that begins here has the header's sets and those in this packet; one that began before may have
            # others instead, which came on the way.
            current = number if seen <= picture.sets else current
        elif picture.gap:
            current = 0
        seen |= picture.sets
        hidden.append((picture.leading and no_leading) or not picture.shown)
        start.append(before if picture.leading else current)
    return np.array(start, np.int32), hidden
