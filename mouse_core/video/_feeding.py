"""Frames of one group of a video: packets read, checked, fed to a decoder, and pixels copied out."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.video._demuxing import new_decoder, pyav
from mouse_core.video.index import VideoIndex

Key = tuple[str, bytes, tuple[int, ...], int, int]
Take = Callable[[int, npt.NDArray[Any]], None]

# Bytes between two packets, of sound for example, that are rather read along than left out.
_GAP = 64 << 10
# About how many bytes are read with one call at most.
_PIECE = 8 << 20
# Does not wait for the other end of a pipe.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MOST_DECODERS = 8


class Decoders:
    """The decoders of one thread, each for all files of its kind, and the one that converts their pixels."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, Any] = OrderedDict()
        self._reformatters: dict[tuple[Any, ...], Any] = {}

    def of(self, index: VideoIndex) -> Any:
        """A decoder that has seen nothing yet."""
        decoder = None if _is_own(index) else self._held.pop(_key(index), None)
        return new_decoder(index.codec, index.header, index.colours) if decoder is None else decoder

    def keep(self, index: VideoIndex, decoder: Any) -> None:
        """Take back a decoder with which nothing went wrong."""
        if _is_own(index):
            return
        decoder.flush_buffers()
        self._held[_key(index)] = decoder
        if len(self._held) > _MOST_DECODERS:
            self._held.popitem(last=False)

    def converted(self, frame: Any, form: str, height: int, width: int) -> Any:
        """A frame in another pixel format and size, as ``frame.reformat`` makes it."""
        # Before PyAV 17 one that has converted other colours may stay with them.
        sizes = frame.height - height, frame.width - width
        key = frame.format.name, int(frame.colorspace), int(frame.color_range), *sizes
        reformatter = self._reformatters.get(key)
        if reformatter is None:
            if len(self._reformatters) >= _MOST_DECODERS:
                self._reformatters.clear()
            reformatter = self._reformatters[key] = pyav().video.reformatter.VideoReformatter()
        wanted = {"format": form} | ({"height": height, "width": width} if any(sizes) else {})
        try:
            return reformatter.reformat(frame, **wanted, threads=1)
        except TypeError:  # before PyAV 17, which never used threads here
            return reformatter.reformat(frame, **wanted)


def _is_own(index: VideoIndex) -> bool:
    """Whether parameters that packets bring would stay in the decoder for the next file; those of JPEG are tables."""
    return index.own_sets or index.codec == "mjpeg"


def _key(index: VideoIndex) -> Key:
    return index.codec, index.header, tuple(index.colours), index.height, index.width


def decode_group(
    decoders: Decoders, index: VideoIndex, frames: Sequence[int], take: Take | None, like: Any = None, crop: Any = None
) -> None:
    """Decode some frames that begin at one packet.

    Args:
        decoders: The thread's.
        index: Of the video.
        frames: Their numbers, each once.
        take: Called with the place of each in ``frames``, and its pixels; with None they only are decoded.
        like: Pixels wanted: an array ``[..., H, W, C]`` of uint8 or uint16.
        crop: Which part of a frame, ``(top, left, height, width)``; None: all of it.

    Raises:
        DataError: The file has changed, or the decoder gives no such frame.
    """
    packets = index.packet[frames].tolist()
    places = {packet: place for place, packet in enumerate(packets)}
    start, last = int(index.start[packets[0]]), max(packets)

    def named(packet: int, reason: object) -> DataError:
        return damaged(index.path, reason, at=_shown(index, packet))

    decoder = decoders.of(index)
    fed, broken = start, len(index.pts)
    try:
        for frame in _decoded(decoder, index, _needed(index, start, last, places), named):
            fed = frame.pts if frame.pts is not None else fed
            if frame.is_corrupt:
                broken = min(broken, fed)
            place = places.pop(fed, None)
            if place is None or fed >= broken:
                continue
            if (frame.height, frame.width) != (index.height, index.width):
                sizes = f"{index.height}x{index.width}, found {frame.height}x{frame.width}"
                raise DataError(f"expected frames of {sizes}")
            if take is not None:
                take(place, _pixels(decoders, index, frame, like, crop))
    except DataError as error:
        if index.path in str(error):
            raise
        raise named(fed, error) from error
    except pyav().error.FFmpegError as error:
        raise named(min(places, default=fed), f"cannot be decoded: {error}") from error
    if places:
        raise named(min(places), "expected a frame, found none that the decoder gives")
    # Those that are decoded behind it may refer to it, and some of them are shown before it.
    if last >= broken:
        behind = min(packet for packet in packets if packet >= broken)
        if behind == broken:
            raise named(broken, "expected a whole frame, found one of which a part is missing")
        lost = f"a part of {_shown(index, broken)} is missing"
        raise named(behind, f"expected all frames to be whole that it may refer to, found that {lost}")
    decoders.keep(index, decoder)


def _needed(index: VideoIndex, start: int, last: int, wanted: Collection[int]) -> list[int]:
    """The packets that a decoder takes for those that are wanted, of a group that begins at one of them."""
    span = slice(start, last + 1)
    others = zip(index.start[span].tolist(), index.referenced[span].tolist(), strict=True)
    return [start + k for k, (of, referred) in enumerate(others) if (of >= start and referred) or start + k in wanted]


def _shown(index: VideoIndex, packet: int) -> str:
    """What a packet is called in messages."""
    frames = np.flatnonzero(index.packet == packet)
    return f"frame {frames[0]}" if len(frames) else f"packet {packet}"


def _decoded(
    decoder: Any, index: VideoIndex, chosen: Sequence[int], named: Callable[[int, object], DataError]
) -> Iterator[Any]:
    """The frames that a decoder gives for some packets; ``pts`` of each is its packet."""
    packet_of = pyav().Packet
    # Most lie side by side, and a part of an array is had sooner than some of its items.
    side_by_side = chosen[-1] - chosen[0] == len(chosen) - 1
    at: Any = slice(chosen[0], chosen[-1] + 1) if side_by_side else chosen
    begins, sizes, sums = (values[at].tolist() for values in (index.position, index.size, index.checksum))
    contents = _contents(index, chosen, begins, sizes)
    for number, content, size, checksum in zip(chosen, contents, sizes, sums, strict=True):
        if len(content) != size or xxhash.xxh3_64_intdigest(content) != checksum:
            raise named(number, "expected the bytes that were there when it was indexed, found others")
        # A copy, behind which there are zeros: decoders read on, and what they find is seen in a broken frame.
        packet = packet_of(size)
        packet.update(content)
        packet.pts = packet.dts = number
        yield from decoder.decode(packet)
    yield from decoder.decode(None)


def _contents(
    index: VideoIndex, chosen: Sequence[int], begins: Sequence[int], sizes: Sequence[int]
) -> Iterator[memoryview]:
    """The bytes of some packets, in their order; those that lie together are read at once."""
    first, count = 0, len(chosen)
    file = -1
    try:
        file = os.open(index.path, _READ)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise damaged(index.path, "expected a regular file, found a pipe or a device")
        while first < count:
            end, stop = first + 1, begins[first] + sizes[first]
            while end < count and 0 <= begins[end] - stop <= _GAP and stop - begins[first] < _PIECE:
                end, stop = end + 1, begins[end] + sizes[end]
            memory = memoryview(_read(file, begins[first], stop - begins[first]))
            for place in range(first, end):
                at = begins[place] - begins[first]
                yield memory[at : at + sizes[place]]
            first = end
    except OSError as error:
        with reading(index.path):  # as every error of a file is named
            raise error
    finally:
        if file >= 0:
            os.close(file)


def _read(file: int, begin: int, size: int) -> bytes:
    """Bytes of a file, fewer where it ends."""
    os.lseek(file, begin, os.SEEK_SET)
    found = os.read(file, size)
    while len(found) < size and (more := os.read(file, size - len(found))):
        found += more
    return found


def _pixels(decoders: Decoders, index: VideoIndex, frame: Any, like: Any, crop: Any) -> npt.NDArray[Any]:
    """A frame, or a part of it, in the size of ``like``, ``[H, W, C]``."""
    height, width, channels = like.shape[-3:]
    if like.dtype == np.uint16:
        if frame.format.name != index.pixel_format:
            raise DataError(f"expected pixels as {index.pixel_format}, found {frame.format.name}")
        # Converting would scale the numbers to all of 16 bits.
        return _cropped(lines(frame, ">u2" if frame.format.name.endswith("be") else "<u2", 1), crop)
    form = "rgb24" if channels == 3 else "gray"
    if crop is None:
        return lines(decoders.converted(frame, form, height, width), "u1", channels)
    part = _cropped(lines(decoders.converted(frame, form, frame.height, frame.width), "u1", channels), crop)
    if part.shape[:2] == (height, width):
        return part
    picture = pyav().VideoFrame.from_ndarray(
        np.ascontiguousarray(part if channels == 3 else part[:, :, 0]), format=form
    )
    return lines(decoders.converted(picture, form, height, width), "u1", channels)


def lines(frame: Any, dtype: str, channels: int) -> npt.NDArray[Any]:
    """What a packed frame holds, ``[H, W, C]``."""
    plane, each = frame.planes[0], np.dtype(dtype).itemsize
    strides = plane.line_size, channels * each, each
    return np.ndarray((frame.height, frame.width, channels), dtype, plane, 0, strides)


def _cropped(pixels: npt.NDArray[Any], crop: Any) -> npt.NDArray[Any]:
    if crop is None:
        return pixels
    top, left, height, width = crop
    return pixels[top : top + height, left : left + width]
