"""Decodes single frames of many videos. The pixels equal, bit for bit, a decoding of the file from its beginning."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_count
from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import checksum
from mouse_core.files.reading import damaged, reading
from mouse_core.video.index import VideoIndex, new_decoder, pyav

Key = tuple[str, bytes, tuple[int, ...], int, int]
Take = Callable[[int, npt.NDArray[Any]], None]

# Two packets with at most this number of bytes between them (such as sound) are read by one call.
_GAP = 64 << 10
# Approximate largest number of bytes that one call reads.
_PIECE = 8 << 20
# Opening a pipe does not wait for its other end.
_READ = os.O_RDONLY | os.O_NONBLOCK
_MOST_DECODERS = 8


class Decoders:
    """The decoders of a thread (one decoder for each kind of file), and the thread's converter of pixel formats."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, Any] = OrderedDict()
        self._reformatter = pyav().video.reformatter.VideoReformatter()

    def of(self, index: VideoIndex) -> Any:
        """Return a decoder in its initial state, for a kind of file."""
        decoder = None if index.own_sets else self._held.pop(_key(index), None)
        return new_decoder(index.codec, index.header, index.colours) if decoder is None else decoder

    def keep(self, index: VideoIndex, decoder: Any) -> None:
        """Keep a decoder that raised no error, for later files of the same kind."""
        if index.own_sets:  # the decoder would apply these parameters to the next file
            return
        decoder.flush_buffers()
        self._held[_key(index)] = decoder
        if len(self._held) > _MOST_DECODERS:
            self._held.popitem(last=False)

    def converted(self, frame: Any, form: str, height: int, width: int) -> Any:
        """Convert a frame to another pixel format and size, as ``frame.reformat`` does."""
        sizes = {} if (frame.height, frame.width) == (height, width) else {"height": height, "width": width}
        return self._reformatter.reformat(frame, format=form, **sizes, threads=1)


def _key(index: VideoIndex) -> Key:
    return index.codec, index.header, tuple(index.colours), index.height, index.width


def decode_group(
    decoders: Decoders, index: VideoIndex, frames: Sequence[int], take: Take | None, like: Any = None, crop: Any = None
) -> None:
    """Decode frames that can all be decoded from the same key frame.

    Args:
        decoders: The decoders of the thread.
        index: The index of the video.
        frames: Indices of the frames, without duplicates.
        take: A function that is called with the position of each frame in ``frames`` and the frame's pixels. With None,
            frames are only decoded.
        like: An array ``[..., H, W, C]`` with the size and dtype of the pixels, uint8 or uint16.
        crop: Part of a frame, ``(top, left, height, width)``; None for the complete frame.

    Raises:
        DataError: The file has changed, or the decoder does not return a frame.
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
        raise named(min(places), "expected a frame, found no frame from the decoder")
    # Frames that are decoded after a broken frame may depend on it, and some of them are shown before it.
    if last >= broken:
        behind = min(packet for packet in packets if packet >= broken)
        if behind == broken:
            raise named(broken, "expected a complete frame, found a frame with a missing part")
        lost = f"a part of {_shown(index, broken)} is missing"
        raise named(behind, f"expected all frames on which this frame may depend to be complete, but {lost}")
    decoders.keep(index, decoder)


def _needed(index: VideoIndex, start: int, last: int, wanted: Collection[int]) -> list[int]:
    """Return the packets that must be decoded to get the frames of the requested packets. ``start`` is the packet at
    which decoding begins.
    """
    span = slice(start, last + 1)
    others = zip(index.start[span].tolist(), index.referenced[span].tolist(), strict=True)
    return [start + k for k, (of, referred) in enumerate(others) if (of >= start and referred) or start + k in wanted]


def _shown(index: VideoIndex, packet: int) -> str:
    """Return the name of a packet's frame for error messages."""
    frames = np.flatnonzero(index.packet == packet)
    return f"frame {frames[0]}" if len(frames) else f"packet {packet}"


def _decoded(
    decoder: Any, index: VideoIndex, chosen: Sequence[int], named: Callable[[int, object], DataError]
) -> Iterator[Any]:
    """Decode packets and yield frames; ``pts`` of a frame is set to the index of its packet."""
    packet_of = pyav().Packet
    # Most packets are adjacent, and a slice of an array is faster than single items.
    side_by_side = chosen[-1] - chosen[0] == len(chosen) - 1
    at: Any = slice(chosen[0], chosen[-1] + 1) if side_by_side else chosen
    begins, sizes, sums = (values[at].tolist() for values in (index.position, index.size, index.checksum))
    contents = _contents(index, chosen, begins, sizes)
    for number, content, size, written in zip(chosen, contents, sizes, sums, strict=True):
        if len(content) != size or checksum(content) != written:
            raise named(number, "expected the bytes that were indexed, found different bytes: the video was changed")
        # Packets are copied with zeros behind them: decoders read past the end, and these bytes affect broken frames.
        packet = packet_of(size)
        packet.update(content)
        packet.pts = packet.dts = number
        yield from decoder.decode(packet)
    yield from decoder.decode(None)


def _contents(
    index: VideoIndex, chosen: Sequence[int], begins: Sequence[int], sizes: Sequence[int]
) -> Iterator[memoryview]:
    """Yield the bytes of some packets in order; packets close to each other are read with a single call."""
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
        with reading(index.path):  # named as all errors of files are
            raise error
    finally:
        if file >= 0:
            os.close(file)


def _read(file: int, begin: int, size: int) -> bytes:
    """Read bytes of a file; at its end, fewer bytes than requested are returned."""
    os.lseek(file, begin, os.SEEK_SET)
    found = os.read(file, size)
    while len(found) < size and (more := os.read(file, size - len(found))):
        found += more
    return found


def _pixels(decoders: Decoders, index: VideoIndex, frame: Any, like: Any, crop: Any) -> npt.NDArray[Any]:
    """Return the pixels of a frame or of its crop, resized to the size of ``like``, ``[H, W, C]``."""
    height, width, channels = like.shape[-3:]
    if like.dtype == np.uint16:
        if frame.format.name != index.pixel_format:
            raise DataError(f"expected pixels as {index.pixel_format}, found {frame.format.name}")
        # A conversion would scale the numbers to the range of 16 bits.
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
    """Return the pixels of a frame in a packed pixel format, ``[H, W, C]``."""
    plane, each = frame.planes[0], np.dtype(dtype).itemsize
    strides = plane.line_size, channels * each, each
    return np.ndarray((frame.height, frame.width, channels), dtype, plane, 0, strides)


def _cropped(pixels: npt.NDArray[Any], crop: Any) -> npt.NDArray[Any]:
    if crop is None:
        return pixels
    top, left, height, width = crop
    return pixels[top : top + height, left : left + width]


_NO_FRAME = -1
Crop = tuple[int, int, int, int]
# Frames that are decoded together: the video, the numbers of the frames in order, and the rows of ``out`` for each.
_Task = tuple[VideoIndex, list[int], list[list[int]]]


def decoder_version() -> str:
    """Return the versions of the decoder and the colour converter, and a checksum of a converted test image.

    The last bit of a pixel may depend on both versions and on the processor, because vector instructions of different
    processors round colours differently. The checksum of the test image, 8 hexadecimal digits, shows such differences.

    Raises:
        ImportError: PyAV is not installed.
    """
    versions = pyav().library_versions
    said = [f"{name} {'.'.join(map(str, versions[name]))}" for name in ("libavcodec", "libswscale")]
    return " ".join([*said, _converted()])


def _converted() -> str:
    """Return a digest of three separate conversions of small test images: to RGB, to RGB at half the size, to grey."""
    height, width = 16, 32
    decoders, found = Decoders(), hashlib.sha256()
    for form in ("yuv420p", "yuv422p"):
        frame = pyav().VideoFrame(width, height, form)
        for number, plane in enumerate(frame.planes):
            frame.planes[number].update(bytes((k * k // 7 + 29 * number) % 256 for k in range(plane.buffer_size)))
        for wanted, size in (("rgb24", (height, width)), ("rgb24", (height // 2, width // 2)), ("gray", (8, 24))):
            found.update(lines(decoders.converted(frame, wanted, *size), "u1", 3 if wanted == "rgb24" else 1).tobytes())
    return found.hexdigest()[:8]


class Decoder(Protocol):
    """Interface of decoders of video frames: ``FrameDecoder``, or a user-defined class, for example for a GPU.

    ``Field(decoder=...)`` selects the decoder of a field. Several threads may call a decoder at once, and a decoder is
    pickled for other processes. A decoder must return the requested frame or raise an error. Different decoders, and
    different versions of a decoder, may return pixels that differ only in their last bits.
    """

    @property
    def version(self) -> str:
        """A text that differs between two versions of the decoder if the last bits of their pixels can differ. The
        state of a loader contains this text.
        """
        ...

    def decode(
        self,
        videos: Sequence[VideoIndex],
        video: npt.ArrayLike,
        frame: npt.ArrayLike,
        out: npt.NDArray[Any],
        *,
        crop: Crop | None = None,
        resize: bool = False,
    ) -> None:
        """Write frames into ``out``; see ``FrameDecoder.decode``."""
        ...


class FrameDecoder:
    """Decodes frames at any position of videos.

    Requested frames of a file that depend on the same key frame are decoded together: their bytes are read with a
    single call and decoded by the thread's decoder for files of this kind. Only requested frames are converted to
    pixels. The pixels equal, bit for bit, the pixels that PyAV returns (``frame.to_ndarray(format="rgb24")``) if the
    file is decoded from its beginning.

    Several threads may use a decoder at once. A pickled decoder contains only its options.

    Args:
        threads: Number of threads that decode the frames of a call. With 1, the calling thread decodes them.

    Raises:
        ConfigError: ``threads`` is below 1.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.threads = check_count("threads", threads)
        self._lock = ProcessLock()  # a thread may hold it where a process is forked
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FrameDecoder, threads=self.threads), ()

    @property
    def version(self) -> str:
        """``decoder_version()``."""
        return decoder_version()

    def decode(
        self,
        videos: Sequence[VideoIndex],
        video: npt.ArrayLike,
        frame: npt.ArrayLike,
        out: npt.NDArray[Any],
        *,
        crop: Crop | None = None,
        resize: bool = False,
    ) -> None:
        """Write frames into ``out``.

        Args:
            videos: The indexes of the videos.
            video: For each row of ``out``, the index of its video in ``videos``, integers ``[n]``.
            frame: For each row of ``out``, the index of its frame, integers ``[n]``; -1 leaves the row unchanged.
            out: Array for the pixels: uint8 ``[n, H, W, 3]`` for colours (RGB), uint8 ``[n, H, W, 1]`` for greys, or
                uint16 ``[n, H, W, 1]`` for the unchanged pixel values of grey videos.
            crop: Part of a frame, ``(top, left, height, width)``; by default the complete frame.
            resize: Whether frames are resized (with swscale's defaults) if ``out`` has another H and W. If False,
                frames of another size raise DataError. Frames of uint16 are never resized.

        Raises:
            ImportError: PyAV is not installed.
            ConfigError: The lengths, shapes or dtypes of the arrays contradict each other.
            DataError: A video or frame does not exist, frames have another size or kind than ``out``, a file has
                changed since it was indexed, or a frame cannot be decoded. The message names file and frame. Other rows
                of ``out`` may already be written.
        """
        which, frames = np.asarray(video), np.asarray(frame)
        _check(which, frames, out)
        tasks = list(_tasks(videos, which, frames))
        for index in {id(index): index for index, _, _ in tasks}.values():
            _check_video(index, out, crop, resize=resize)
        failed: list[tuple[tuple[str, int], Exception]] = []
        attempt = partial(self._attempt, out, crop, failed)
        if self.threads == 1 or len(tasks) < 2:
            for task in tasks:
                attempt(task)
        else:
            try:  # the longest task first, so that no thread waits for a long task that began last
                list(self._threads().map(attempt, sorted(tasks, key=_packets, reverse=True)))
            except BaseException:  # after an interrupt no task begins, and no thread writes to ``out`` any more
                self.close()
                raise
        if failed:
            try:
                raise min(failed, key=itemgetter(0))[1]
            finally:
                failed.clear()  # the error's stack frames hold a reference to it

    def close(self) -> None:
        """End the threads and delete their decoders; the next call creates new threads and decoders."""
        with self._lock:
            pool, owner = self._pool, self._owner
            self._forget()
        if pool is not None and owner == os.getpid():
            pool.shutdown(cancel_futures=True)

    def _forget(self) -> None:
        self._owner = os.getpid()
        self._here = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._owner != os.getpid():  # a forked child does not have the parent's threads
                self._forget()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "mouse-video")
            return self._pool

    def _attempt(
        self,
        out: npt.NDArray[Any],
        crop: Crop | None,
        failed: list[tuple[tuple[str, int], Exception]],
        task: _Task,
    ) -> None:
        """Decode the frames of a task. An error is added to ``failed``, with the row of the task's first frame."""
        decoders = getattr(self._here, "decoders", None)
        if decoders is None or self._here.owner != os.getpid():
            decoders = self._here.decoders = Decoders()
            self._here.owner = os.getpid()
        index, frames, rows = task

        def take(place: int, pixels: npt.NDArray[Any]) -> None:
            for row in rows[place]:
                out[row] = pixels

        try:
            decode_group(decoders, index, frames, take, out, crop)
        except Exception as error:
            failed.append(((index.path, frames[0]), error))


def _packets(task: _Task) -> int:
    """Return approximately how many packets must be decoded to get the frames of a task."""
    index, frames, _ = task
    return int(index.packet[frames[-1]] - index.start[index.packet[frames[0]]])


def undecodable(index: VideoIndex) -> dict[int, str]:
    """Return the frames that cannot be decoded, with a reason for each.

    The result also contains all other frames that depend on the same key frame.

    Raises:
        ImportError: PyAV is not installed.
    """
    found: dict[int, str] = {}
    decoders, begins = Decoders(), index.start[index.packet]
    for begin in np.unique(begins):
        frames = np.flatnonzero(begins == begin).tolist()
        try:
            decode_group(decoders, index, frames, None)
        except DataError as error:
            found |= dict.fromkeys(frames, str(error))
    return found


def _check(which: Any, frames: Any, out: Any) -> None:
    if which.shape != frames.shape or which.ndim != 1 or which.dtype.kind not in "iu" or frames.dtype.kind not in "iu":
        raise ConfigError(
            f"video, frame: expected two arrays of integers [n], found {which.dtype} {list(which.shape)} and "
            f"{frames.dtype} {list(frames.shape)}"
        )
    kinds = {(np.dtype(np.uint8), 3), (np.dtype(np.uint8), 1), (np.dtype(np.uint16), 1)}
    if out.ndim != 4 or len(out) != len(frames) or (out.dtype, out.shape[3]) not in kinds:
        raise ConfigError(
            f"out: expected [{len(frames)}, H, W, 3] of uint8 or [{len(frames)}, H, W, 1] of uint8 or uint16, found "
            f"{list(out.shape)} of {out.dtype}"
        )


def _check_video(index: VideoIndex, out: Any, crop: Crop | None, *, resize: bool) -> None:
    """Raise DataError unless the frames of a video, or their crops, fit ``out``."""
    top, left, height, width = (0, 0, index.height, index.width) if crop is None else crop
    inside = min(top, left) >= 0 and top + height <= index.height and left + width <= index.width
    if min(height, width) < 1 or not inside:
        raise DataError(
            f"{index.path}: expected a crop (top, left, height, width) inside of {index.height}x{index.width}, found "
            f"{(top, left, height, width)}"
        )
    if out.shape[1:3] != (height, width) and not (resize and out.dtype == np.uint8):
        raise DataError(f"{index.path}: expected frames of {out.shape[1]}x{out.shape[2]}, found {height}x{width}")
    # Greys of more than 8 bits are numbers (such as depth), which are delivered unchanged or not at all.
    wide = index.pixel_format.startswith("gray") and index.pixel_format != "gray"
    if wide != (out.dtype == np.uint16):
        wanted = (
            "grey pixels of more than 8 bits" if out.dtype == np.uint16 else "8 bits per channel (depth needs uint16)"
        )
        raise DataError(f"{index.path}: expected {wanted}, found {index.pixel_format}")


def _tasks(videos: Sequence[VideoIndex], which: Any, frames: Any) -> Iterator[_Task]:
    """Yield tasks: groups of frames that are decoded together."""
    groups: dict[tuple[int, int], dict[int, list[int]]] = {}
    for row, (video, frame) in enumerate(zip(which.tolist(), frames.tolist(), strict=True)):
        if frame == _NO_FRAME:
            continue
        if not 0 <= video < len(videos):
            raise DataError(f"video: expected an index from 0 to {len(videos) - 1}, found {video}")
        index = videos[video]
        if not 0 <= frame < len(index):
            raise DataError(f"{index.path}: expected frames 0 to {len(index) - 1}, found frame {frame}")
        begin = int(index.start[index.packet[frame]])
        groups.setdefault((video, begin), {}).setdefault(frame, []).append(row)
    for (video, _), rows in sorted(groups.items(), key=lambda item: item[0]):
        wanted = sorted(rows)
        yield videos[video], wanted, [rows[frame] for frame in wanted]
