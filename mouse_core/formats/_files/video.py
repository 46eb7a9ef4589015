"""Decode the videos of a camera in order, each frame once, and find the frame that is shown at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.video.decoding import lines

Floats = npt.NDArray[np.float64]

# A video with larger sides is not decoded.
_LARGEST_SIDE = 8192
# Seconds between a time and its frame that LeRobot allows.
_TOLERANCE = 1e-4


def allowance(times: Floats, tick: float, frames_per_second: float, tolerance: float | None = None) -> Floats:
    """Return the seconds that may lie between times of rows and their frames: the rounding of the numbers.

    Args:
        times: Times in seconds, which were float32.
        tick: Seconds of the unit in which the video's times are counted. One of 1/1000 s rounds 30 frames a second, and
            one of 1/15360 s does not.
        frames_per_second: Frames per second of the recording.
        tolerance: Seconds that the caller allows; by default as many as LeRobot allows.
    """
    ticks = 1 / (frames_per_second * tick)
    rounded = tick / 2 if abs(ticks - round(ticks)) > 1e-6 * ticks else 0.0
    allowed = (_TOLERANCE if tolerance is None else tolerance) + rounded + np.abs(times) * 2.0**-23
    # The default is never so large that a neighbouring frame would fit.
    return np.minimum(allowed, 0.25 / frames_per_second) if tolerance is None else allowed


def nearest(shown: Floats, times: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the frame nearest to each time; frames are shown at the ascending times ``shown``."""
    behind = np.clip(np.searchsorted(shown, times), 1, max(1, len(shown) - 1))
    return np.where(times - shown[behind - 1] <= shown[behind % len(shown)] - times, behind - 1, behind % len(shown))


def missed(time: float, found: float, frames_per_second: float, more: str = "") -> str:
    """Return the message for a frame that is not near enough, with the tolerance that would accept it."""
    away = abs(found - time)
    hint = (
        f"; tolerance={np.ceil(away * 1e4 + 1) / 1e4:g} (--tolerance) takes it" if away < 1 / frames_per_second else ""
    )
    return f"expected a frame at {time:.4f} s, found the nearest at {found:.4f} s{more}{hint}"


class Camera:
    """Reads the frames of one camera from one or more files.

    Args:
        name: Name for messages.
        shape: ``(H, W, C)`` of a frame, C being 1 or 3.
        frames_per_second: Frames per second of the recording.
        wide: Whether pixels are numbers of 16 bits, such as depth; colours are bytes.
        tolerance: See ``allowance``.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        frames_per_second: float,
        *,
        wide: bool = False,
        tolerance: float | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = np.dtype(np.uint16 if wide else np.uint8)
        self._rate, self._tolerance = frames_per_second, tolerance
        self._file: Path | None = None
        self._container: Any = None
        self._frames: Iterator[Any] = iter(())
        # The current frame and the next frame, each with its time, or None; and the time of the frame before.
        self._held: tuple[float, Any] | None = None
        self._ahead: tuple[float, Any] | None = None
        self._passed = -np.inf

    def take(self, file: Path, times: Floats) -> npt.NDArray[Any]:
        """Return the frames at some times; ascending times cost least.

        Args:
            file: The video.
            times: Seconds from the beginning of the video, ``[n]``.

        Returns:
            Pixels, ``[n, H, W, C]`` of ``dtype``.

        Raises:
            ImportError: PyAV is not installed.
            DataError: The video is damaged, of another size, or lacks a frame, or has pixels of more bits.
        """
        found = np.empty((len(times), *self.shape), self.dtype)
        with reading(file):
            for place in np.argsort(times, kind="stable").tolist():
                time = float(times[place])
                if file != self._file or self._held is None or time - self._passed < self._held[0] - time:
                    self._open(file)
                found[place] = self._pixels(file, self._at(file, time)).reshape(self.shape)
        return found

    def _open(self, file: Path) -> None:
        try:
            import av
        except ImportError as error:
            raise ImportError("camera videos need PyAV: pip install 'mouse-data[video]'") from error
        self.close()
        if not file.is_file():
            raise damaged(file, "expected a video, found none")
        self._container = av.open(str(file), options={"err_detect": "explode"})
        if not self._container.streams.video:
            raise damaged(file, "expected a video stream, found none")
        stream = self._container.streams.video[0]
        height, width = self.shape[:2]
        if (stream.height, stream.width) != (height, width) or max(height, width) > _LARGEST_SIDE:
            raise damaged(file, f"expected frames of {height}x{width}, found {stream.height}x{stream.width}")
        stream.codec_context.options = {"err_detect": "explode"}
        stream.thread_type = "AUTO"
        self._file, self._frames = file, self._container.decode(stream)
        self._tick = float(stream.time_base)
        self._held, self._ahead, self._passed = self._next(file), self._next(file), -np.inf

    def _next(self, file: Path) -> tuple[float, Any] | None:
        frame = next(self._frames, None)
        if frame is None or frame.time is None:
            return None
        if frame.is_corrupt:
            # Frames that refer to it, some of them earlier ones, are wrong too, and nothing shows which.
            raise damaged(file, f"expected whole frames, found one at {frame.time:.4f} s of which a part is missing")
        return float(frame.time), frame

    def _at(self, file: Path, time: float) -> Any:
        """Return the frame that is shown nearest to a time."""
        while self._held and self._ahead and abs(self._held[0] - time) > abs(self._ahead[0] - time):
            self._held, self._ahead, self._passed = self._ahead, self._next(file), self._held[0]
        if self._held is None:
            raise damaged(file, f"expected a frame at {time:.4f} s, found none")
        found, frame = self._held
        if abs(found - time) > allowance(np.array(time), self._tick, self._rate, self._tolerance):
            raise damaged(file, missed(time, found, self._rate))
        if (frame.height, frame.width) != self.shape[:2]:
            raise damaged(file, f"expected frames of {list(self.shape[:2])}, found {frame.height}x{frame.width}")
        return frame

    def _pixels(self, file: Path, frame: Any) -> npt.NDArray[Any]:
        """Return the pixels of a frame; greys are the recorded numbers."""
        bits = max(component.bits for component in frame.format.components)
        grey = frame.format.name.startswith("gray")
        if bits <= 8 or (not grey and self.dtype == np.uint8):
            bytes_: npt.NDArray[np.uint8] = frame.to_ndarray(format="gray" if self.shape[2] == 1 else "rgb24")
            return bytes_
        if not grey or bits > 16 or self.dtype == np.uint8:
            wanted = "gray of up to 16 bits" if self.dtype != np.uint8 else "8 bits a pixel, as meta/info.json has it"
            raise damaged(file, f"{self.name}: expected {wanted}, found {frame.format.name}")
        # Converting would scale the numbers to all of 16 bits.
        return lines(frame, ">u2" if frame.format.name.endswith("be") else "<u2", 1).astype(np.uint16)

    def close(self) -> None:
        """Close the file."""
        container, self._container, self._file = self._container, None, None
        self._frames, self._held, self._ahead = iter(()), None, None
        if container is not None:
            container.close()


def frame_shape(shape: object, names: object, where: str) -> tuple[int, int, int]:
    """Return ``(H, W, C)`` of frames from a shape and the names of its dimensions.

    Raises:
        DataError: No shape of a picture.
    """
    sizes = list(shape) if isinstance(shape, list) else []
    if len(sizes) != 3 or not all(isinstance(size, int) and 0 < size <= _LARGEST_SIDE for size in sizes):
        raise DataError(f"{where}: expected a shape [height, width, channels], found {shape!r:.80}")
    first = str(names[0]) if isinstance(names, list) and names else ""
    channels_first = first.startswith("channel") or (sizes[0] in (1, 3) and sizes[2] not in (1, 3))
    height, width, channels = (*sizes[1:], sizes[0]) if channels_first else sizes
    if channels not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels, found {channels}")
    return height, width, channels
