"""Writes videos with frequent key frames, so that single frames can be read fast."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, MouseError
from mouse_core.files.writing import StrPath, storing
from mouse_core.video.index import LARGEST_SIDE, pyav

# The encoder of each codec, and the defaults of its options.
_ENCODERS = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1"}
_CRF = {"h264": 23.0, "hevc": 28.0, "av1": 30.0}
_MOST_CRF = {"h264": 51, "hevc": 51, "av1": 63}
_PRESETS = {"libx264": "medium", "libx265": "medium", "libsvtav1": "8"}
_QUIET = "log-level=none"
# Smallest height and width: below these x265 has no block, and SVT-AV1 accesses memory out of bounds.
_LEAST_SIDES = {"hevc": (16, 16), "av1": (4, 32)}
# In narrower frames, a line of x265's CU tree has fewer than the four blocks that its assembly code writes.
_LEAST_TREE_WIDTH = 64
_FULL_RANGE = 2


@dataclass(frozen=True)
class VideoCodec:
    """The encoding of video frames.

    The text form of a codec is the name and the non-default options, separated by colons: ``"h264:gop=2:crf=20"``.

    Args:
        codec: "h264", "hevc" or "av1".
        gop: Number of frames from a key frame to the next key frame. To read a frame, all frames from the previous key
            frame on are decoded. A low ``gop`` makes random reads fast, and a high ``gop`` makes files small.
        crf: The loss of quality, from 0 (smallest loss) to 51 for H.264 and HEVC, or to 63 for AV1. The default is 23
            for H.264, 28 for HEVC and 30 for AV1.
        pix_fmt: FFmpeg's pixel format: "yuv420p", "yuv444p", "gray", "gray12le". The default is "yuv420p" for colours,
            "gray" for grey frames if the codec supports it, and "gray12le" for grey frames of uint16. "gray12le" can
            represent values up to 4,095.
        preset: The encoder's preset; a slower preset gives smaller files.
        lossless: Whether encoding preserves every bit of pixels in ``pix_fmt``. Grey pixels are then exact in "gray"
            and "gray12le". Colours are exact only in "gbrp", which only HEVC supports.

    Raises:
        ConfigError: The codec, an option or a value is not supported; the message lists what is supported.
    """

    codec: str = "h264"
    gop: int = 2
    crf: float | None = None
    pix_fmt: str | None = None
    preset: str | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        if self.codec not in _ENCODERS:
            raise ConfigError(f"video: expected a codec, one of {list(_ENCODERS)}, found {self.codec!r}")
        if type(self.gop) is not int or self.gop < 1:
            raise ConfigError(f"video: gop: expected a number of frames, 1 or more, found {self.gop!r}")
        most = _MOST_CRF[self.codec]
        if self.crf is not None and not 0 <= self.crf <= most:
            raise ConfigError(f"video: crf: expected a number from 0 to {most} for {self.codec}, found {self.crf!r}")
        if self.crf is not None and self.lossless:
            raise ConfigError("video: expected crf or lossless, found both")
        if self.preset is not None and not re.fullmatch(r"\w+", self.preset):
            raise ConfigError(f"video: preset: expected the name of a preset, found {self.preset!r}")

    @classmethod
    def parse(cls, text: str) -> VideoCodec:
        """Create a codec from its text form."""
        codec, *options = text.split(":")
        given: dict[str, Any] = {}
        kinds = {"gop": int, "crf": float, "pix_fmt": str, "preset": str}
        for option in options:
            name, equals, value = option.partition("=")
            try:
                if name == "lossless" and not equals:
                    given[name] = True
                    continue
                if not equals or name in given:
                    raise KeyError
                given[name] = kinds[name](value)
            except (KeyError, ValueError) as error:
                wanted = ["gop=2", "crf=23", "pix_fmt=yuv420p", "preset=medium", "lossless"]
                raise ConfigError(f"video: expected options like {wanted}, each once, found {option!r}") from error
        return cls(codec, **given)

    def __str__(self) -> str:
        said = [self.codec]
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            if value != one.default or one.name == "gop":
                said.append(
                    one.name
                    if value is True
                    else f"{one.name}={value:g}"
                    if one.name == "crf"
                    else f"{one.name}={value}"
                )
        return ":".join(said)

    def pixel_format(self, shape: tuple[int, int, int], dtype: npt.DTypeLike) -> str:
        """Return the pixel format for frames ``(H, W, C)`` of uint8, or for grey frames of uint16.

        Raises:
            ImportError: PyAV is not installed, or has no encoder for the codec.
            ConfigError: The codec does not support the pixel format, or the pixel format cannot represent such frames.
        """
        wide, grey = np.dtype(dtype) != np.uint8, shape[2] == 1
        formats = _formats(self.codec)
        found = self.pix_fmt
        if found is None and wide:
            found = "gray12le"
        elif found is None:
            found = "gray" if grey and "gray" in formats else "yuv420p"
        if found not in formats:
            why = f" for pixels of {np.dtype(dtype)}; hevc supports gray12le, and png stores any pixels" if wide else ""
            raise ConfigError(
                f"video: pix_fmt: expected one of {sorted(formats)} of {self.codec}, found {found!r}{why}"
            )
        self._check_sides(shape)
        if found.startswith("gray") != grey and (wide or not grey):
            raise ConfigError(
                f"video: pix_fmt: expected a format of {'grey' if wide else 'colour'} pixels, found {found!r}"
            )
        made = pyav().VideoFormat(found, 16, 16)
        if wide != (grey and made.components[0].bits > 8):
            raise ConfigError(f"video: pix_fmt: expected a format for pixels of {np.dtype(dtype)}, found {found!r}")
        odd = [
            side
            for side, part in zip(shape, (made.chroma_height(16), made.chroma_width(16)), strict=False)
            if side % 2 and part < 16
        ]
        if odd:
            full = "yuv444p" if "yuv444p" in formats else "another codec"
            raise ConfigError(
                f"video: {found}: expected even height and width, found {shape[0]}x{shape[1]}; {full} accepts any size"
            )
        return found

    def _check_sides(self, shape: tuple[int, int, int]) -> None:
        """Raise ConfigError if frames are too large or too small, or have a wrong number of channels."""
        if max(shape[:2]) > LARGEST_SIDE or shape[2] not in (1, 3):
            raise ConfigError(
                f"video: expected frames with 1 or 3 channels and sides up to {LARGEST_SIDE}, found {shape}"
            )
        height, width = _LEAST_SIDES.get(self.codec, (1, 1))
        if shape[0] < height or shape[1] < width:
            raise ConfigError(
                f"video: {self.codec}: expected frames of at least {height}x{width} (height x width), found "
                f"{shape[0]}x{shape[1]}; h264 accepts any size"
            )

    def options(self, width: int) -> dict[str, str]:
        """Return the encoder's options for frames of the given width."""
        encoder = _ENCODERS[self.codec]
        crf = _CRF[self.codec] if self.crf is None else self.crf
        said = {"crf": f"{crf:g}"}
        if encoder == "libx265":
            tree = ":cutree=0" if width < _LEAST_TREE_WIDTH else ""
            said["x265-params"] = f"open-gop=0:{_QUIET}{tree}" + (":lossless=1" if self.lossless else "")
        elif self.lossless:
            said = {"qp": "0"} if encoder == "libx264" else {"svtav1-params": "lossless=1"}
        return {"g": str(self.gop), "preset": self.preset or _PRESETS[encoder], **said}


def _pyav() -> Any:
    """Return the package PyAV; raise ImportError with the name of the extra for encoding if the package is missing."""
    try:
        return pyav()
    except ImportError as error:
        raise ImportError("writing videos needs PyAV: pip install 'mouse-data[encode]'") from error


@cache
def _formats(codec: str) -> frozenset[str]:
    """Return the pixel formats that the encoder of a codec accepts."""
    av, name = _pyav(), _ENCODERS[codec]
    try:
        return frozenset(one.name for one in av.Codec(name, "w").video_formats)
    except ValueError as error:
        raise ImportError(
            f"video: expected the encoder {name} in PyAV, found none; PyAV's own wheels include it"
        ) from error


class VideoWriter:
    """Writes an MP4 file; frame ``i`` is shown at ``i / frames_per_second`` seconds.

    Args:
        path: The file; an existing file is overwritten.
        codec: The encoding of frames.
        shape: ``(H, W, C)`` of every frame, where C is 1 or 3.
        dtype: "uint8", or "uint16" for grey frames.
        frames_per_second: Number of frames that are shown in a second.

    Raises:
        ImportError: PyAV is not installed, or has no encoder for the codec.
        ConfigError: The codec does not accept frames of this shape or dtype.
        StorageError: The file cannot be written.
    """

    def __init__(
        self,
        path: StrPath,
        codec: VideoCodec,
        shape: tuple[int, int, int],
        *,
        dtype: npt.DTypeLike = np.uint8,
        frames_per_second: float = 30,
    ) -> None:
        self.path, self.codec, self.shape, self.dtype = os.fspath(path), codec, shape, np.dtype(dtype)
        self.pixel_format = codec.pixel_format(shape, dtype)
        self._reformatter = pyav().video.reformatter.VideoReformatter()  # one for all frames
        self._largest = (1 << pyav().VideoFormat(self.pixel_format, 16, 16).components[0].bits) - 1
        rate = Fraction(frames_per_second).limit_denominator(1001)
        #: Number of written frames, and number of their bytes in the file so far.
        self.frames = self.bytes = 0
        with self._said():
            self._container = pyav().open(self.path, "w", format="mp4")
            options = codec.options(shape[1])
            self._stream = self._container.add_stream(_ENCODERS[codec.codec], rate=rate, options=options)
            self._stream.height, self._stream.width = shape[:2]
            self._stream.pix_fmt = self.pixel_format
            self._stream.codec_context.time_base = 1 / rate
            if self.pixel_format.startswith("gray"):
                self._stream.codec_context.color_range = _FULL_RANGE  # greys use the full range, from black to white

    def write(self, frames: npt.NDArray[Any]) -> None:
        """Add frames, ``[n, H, W, C]``.

        Raises:
            DataError: The frames have another shape or dtype, or values that ``pixel_format`` cannot represent.
            StorageError: The file cannot be written.
        """
        if frames.shape[1:] != self.shape or frames.dtype != self.dtype:
            wanted = f"{self.dtype} {list(self.shape)}"
            raise DataError(f"{self.path}: expected frames of {wanted}, found {frames.dtype} {list(frames.shape[1:])}")
        if self.dtype != np.uint8 and frames.size and frames.max() > self._largest:
            raise DataError(
                f"{self.path}: expected pixel values up to {self._largest}, the largest value in "
                f"{self.pixel_format}, found "
                f"{frames.max()}; png can store any value"
            )
        with self._said():
            for frame in frames:
                made = self._frame(frame)
                made.pts, made.time_base = self.frames, self._stream.codec_context.time_base
                self._mux(self._stream.encode(made))
                self.frames += 1

    def close(self) -> None:
        """Write the frames that are still in the encoder, and the tables of the file; close the file.

        Raises:
            StorageError: The file cannot be written.
        """
        with self._said():
            self._mux(self._stream.encode())
            self._container.close()

    def discard(self) -> None:
        """Close the file without completing it."""
        try:
            self._container.close()
        except (OSError, ValueError):
            pass

    def _mux(self, packets: Any) -> None:
        for packet in packets:
            self.bytes += packet.size
            self._container.mux(packet)

    def _frame(self, pixels: npt.NDArray[Any]) -> Any:
        av = pyav()
        height, width, channels = self.shape
        if self.dtype == np.uint8:
            plain = np.ascontiguousarray(pixels[:, :, 0] if channels == 1 else pixels)
            frame = av.VideoFrame.from_ndarray(plain, format="gray" if channels == 1 else "rgb24")
            if frame.format.name == self.pixel_format:
                return frame
            return self._reformatter.reformat(frame, format=self.pixel_format)
        # Converting would scale the numbers.
        frame = av.VideoFrame(width, height, self.pixel_format)
        plane = frame.planes[0]
        lines = np.zeros((plane.buffer_size // plane.line_size, plane.line_size // 2), "<u2")
        lines[:height, :width] = pixels[:, :, 0]
        plane.update(lines)
        return frame

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Convert errors of the operating system and of the encoder to errors of this library."""
        try:
            with storing(f"video {self.path}"):
                yield
        except (ValueError, RuntimeError, ArithmeticError) as error:
            if isinstance(error, MouseError):
                raise
            frames = f"{self.shape[0]}x{self.shape[1]}"
            raise ConfigError(
                f"video: {self.codec}: expected options that the encoder accepts for frames of {frames}, found: {error}"
            ) from error
