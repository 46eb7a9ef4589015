"""Decoding images and encoding them without loss, through Pillow."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.images._pillow import (
    MAX_PIXELS,
    PLAIN_MODES,
    check_header,
    in_range,
    left_out,
    open_encoded,
    pillow,
    pixels_of,
    shape_of,
    turn_of,
    understood,
)
from mouse_core.images.files import open_inside

_PNG_MODES = {channels: mode for mode, channels in PLAIN_MODES.items()}
# Chunks that say nothing about the pixels, and their sizes.
_PNG_PASSED = {b"pHYs": 9, b"gAMA": 4, b"sRGB": 1}
_BYTE = np.dtype(np.uint8)


def decode_image(
    value: object,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: npt.DTypeLike = np.uint8,
    image_roots: Sequence[str] = (),
    max_pixels: int = MAX_PIXELS,
) -> npt.NDArray[Any]:
    """Turn one stored image into pixels ``[H, W, C]`` with C 1 to 4.

    Encoded images are PNG, JPEG, WebP, GIF, BMP or TIFF of one frame. Their values arrive as they are: bilevel images
    become 0 and 255, palette images RGB or RGBA, greys of 16 or 32 bits and PNGs of 16 bits a channel the numbers they
    hold, if ``dtype`` holds these. What EXIF says of their orientation is done. Nothing is decoded before their header
    is found to be right.

    Args:
        value: A PIL image, a ``{bytes, path}`` mapping as ``datasets`` stores it (``path`` is opened where there
            are no bytes), encoded bytes, a path, or an array or nested list ``[H, W]`` or ``[H, W, C]`` of integers.
        shape: ``(H, W, C)`` that the image must have; by default any.
        dtype: An integer dtype; "uint8" for pixels 0..255, "uint16" for depth.
        image_roots: Folders (absolute, without links) in which paths may lie. By default none is opened.
        max_pixels: The most pixels of an image that is decoded without a ``shape``.

    Raises:
        DataError: The value is no image, cannot be decoded, is of another shape or size, holds values beyond
            ``dtype``, or is a path that may not be opened.
    """
    wanted = np.dtype(dtype)
    if not is_encoded(value):
        return _of_shape(_check_pixels(value, wanted), shape)
    with _opened(value, image_roots) as (image, source):
        turn = 1 if source is None else turn_of(image)
        check_header(image, turn, shape, max_pixels)
        pixels = pixels_of(image, turn, wanted, source=source, channels=None if shape is None else shape[2])
    return _of_shape(pixels, shape)  # chunks behind the pixels may have changed what the header promised


def _of_shape(pixels: npt.NDArray[Any], shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    if shape is not None and pixels.shape != tuple(shape):
        raise DataError(f"expected shape {list(shape)}, found {list(pixels.shape)}")
    return pixels


def decode_into(encoded: bytes | memoryview, out: npt.NDArray[Any]) -> None:
    """Decode one encoded image into ``out``, ``[H, W, C]`` of an integer dtype.

    Raises:
        DataError: As ``decode_image``, or the image has another shape.
    """
    pixels = _from_png(encoded, out.shape) if out.dtype == _BYTE else None
    out[...] = decode_image(encoded, shape=out.shape, dtype=out.dtype) if pixels is None else pixels


def encode_png(value: object, *, dtype: npt.DTypeLike = np.uint8, image_roots: Sequence[str] = ()) -> bytes:
    """Encode one image (as ``decode_image`` takes it) as PNG, without loss.

    Raises:
        DataError: As ``decode_image``, or several channels of more than 8 bits.
    """
    pixels = decode_image(value, dtype=dtype, image_roots=image_roots)
    if pixels.shape[2] > 1 and pixels.dtype != _BYTE:
        pixels = in_range(pixels, _BYTE)  # Pillow writes no wider ones
    stream = io.BytesIO()
    pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def encode_jpeg(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Encode pixels ``[H, W, C]`` of uint8, C being 1 or 3, as JPEG, which loses something at any quality up to 100."""
    stream = io.BytesIO()
    image = pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(stream, format="JPEG", quality=quality)
    return stream.getvalue()


def image_shape(
    value: object,
    *,
    dtype: npt.DTypeLike = np.uint8,
    image_roots: Sequence[str] = (),
    max_pixels: int = MAX_PIXELS,
) -> tuple[int, int, int]:
    """The shape ``(H, W, C)`` of an image as ``decode_image`` takes it; of encoded ones only the header is read.

    Raises:
        DataError: It does not begin like an image, has more pixels than ``max_pixels``, or is an array of something
            else.
    """
    if not is_encoded(value):
        shape = _check_pixels(value, np.dtype(dtype)).shape
        return shape[0], shape[1], shape[2]
    with _opened(value, image_roots) as (image, source):
        turn = 1 if source is None else turn_of(image)
        check_header(image, turn, None, max_pixels)
        return shape_of(image, turn)


def check_image(
    value: Mapping[str, Any],
    shape: tuple[int, ...] | None,
    *,
    dtype: npt.DTypeLike = np.uint8,
    image_roots: Sequence[str] = (),
) -> None:
    """Raise DataError unless ``decode_image`` takes a value, as far as its header says; pixels are decoded only where
    their values may be too large, or a palette's colours count.
    """
    with _opened(value, image_roots) as (image, _):
        undecided = image.mode not in PLAIN_MODES or left_out(image) is not None
        turn = turn_of(image)
        check_header(image, turn, shape, MAX_PIXELS)
    if undecided:
        decode_image(value, shape=shape, dtype=dtype, image_roots=image_roots)


def is_encoded(value: object) -> bool:
    """Whether a value is for Pillow: bytes, a path, a ``{bytes, path}`` mapping, or a PIL image."""
    return isinstance(value, Mapping | bytes | bytearray | memoryview | str) or _is_pillow_image(value)


def _is_pillow_image(value: object) -> bool:
    # Tensors have a method of this name.
    return isinstance(getattr(value, "mode", None), str)


@contextmanager
def _opened(value: Any, roots: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """The image that an encoded value is, and what it was opened from. Errors in here are ours."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    with understood(_shown(value)):
        if _is_pillow_image(value):
            yield value, None
        elif isinstance(value, str):
            with (
                open_inside(value, roots) as file,
                understood(f"path {value!r}, {_no_image(os.fstat(file.fileno()).st_size)}"),
            ):
                yield open_encoded(file), file
        else:
            yield open_encoded(value), value


def _from_png(encoded: bytes | memoryview, shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
    """The pixels of a PNG of just a header for ``shape``, data and an end; None for all others, damaged ones included.

    Pillow's decoder is handed the data, which for small images takes half as long as having Pillow read the file.
    """
    header = _png_header(shape)
    if bytes(encoded[: len(header)]) != header:
        return None
    encoded = bytes(encoded)
    place, data = len(header), []
    while (kind := encoded[place + 4 : place + 8]) != b"IEND":
        size = int.from_bytes(encoded[place : place + 4])
        end = place + 8 + size
        if kind == b"IDAT":  # whose checksum Pillow does not look at either
            data.append(encoded[place + 8 : end])
        elif data or size != _PNG_PASSED.get(kind) or encoded[end : end + 4] != _checksum(encoded[place + 4 : end]):
            return None
        place = end + 4
    mode = _PNG_MODES[shape[2]]
    try:
        image = pillow().frombytes(mode, shape[1::-1], b"".join(data), "zip", mode)
    except (OSError, ValueError):
        return None
    return np.frombuffer(image.tobytes(), np.uint8).reshape(shape)


@lru_cache(maxsize=16)
def _png_header(shape: tuple[int, ...]) -> bytes:
    """What a PNG of 8 bits a channel begins with that is not interlaced."""
    height, width, channels = shape
    header = b"IHDR" + struct.pack(">2I5B", width, height, 8, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + _checksum(header)


def _checksum(chunk: bytes) -> bytes:
    return zlib.crc32(chunk).to_bytes(4)


def _check_pixels(value: object, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:  # what a framework's arrays raise: on a device, with a gradient
        raise DataError(f"expected an image as an array, found {type(value).__name__}: {error}") from error
    if array.ndim not in (2, 3) or array.dtype.kind not in "iub" or (array.ndim == 3 and array.shape[2] > 4):
        raise DataError(
            f"expected an image as integers [H, W] or [H, W, C] with C up to 4, found {array.dtype} {list(array.shape)}"
        )
    return in_range(array, dtype).reshape(*array.shape[:2], -1)


def _no_image(size: int) -> str:
    return f"{size} bytes that are no image"


def _shown(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return _no_image(len(value))
    return f"path {value!r}" if isinstance(value, str) else type(value).__name__
