"""Decodes and encodes images with Pillow."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import RowError, convert
from mouse_core.errors import DataError, MouseError
from mouse_core.images.files import open_inside

MAX_PIXELS = 1 << 26
"""Largest number of pixels in an image that is decoded without a given shape."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Pillow's modes with 8 bits per channel and their number of channels; and its modes with one wider channel.
PLAIN_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Keys under which a file may store its orientation.
_TURNS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
_ORIENTATION = 0x0112
# TIFF's tags of the tile size, and the largest tile size in small images.
_TILE_SIDES, _USUAL_TILE = (322, 323), 1024


@cache
def pillow() -> Any:
    """Return Pillow's module ``Image`` after registering the supported formats."""
    try:
        from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 (they are found once imported)
    except ImportError as error:
        raise ImportError("encoded images need Pillow: pip install 'mouse-data[images]'") from error
    return Image


@contextmanager
def understood(found: str) -> Iterator[None]:
    """Context manager that converts errors of Pillow to a DataError.

    Args:
        found: A description of the value that cannot be decoded, for the message.
    """
    try:
        yield
    except (MouseError, ImportError, MemoryError):
        raise
    except Exception as error:  # any error of a decoder
        # The first line of Pillow's own message may hold a memory address.
        known = not isinstance(error, pillow().UnidentifiedImageError) and str(error)
        reason = f": {str(error).splitlines()[0]}" if known else ""
        raise DataError(f"expected a readable image, found {found}{reason}") from error


def open_encoded(source: Any) -> Any:
    """Open a file or bytes with a single image; only the header is read.

    Args:
        source: The bytes of the image, or a file.
    """
    stream = source if hasattr(source, "read") else io.BytesIO(source)
    image = pillow().open(stream, formats=FORMATS)
    # Further images in a JPEG file (an MPO) are other versions of the first.
    if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
        raise DataError(f"expected a single image, found {image.format} with several frames")
    if image.format == "TIFF":
        sides = [image.tag_v2.get(tag, 0) for tag in _TILE_SIDES]
        most = max(_USUAL_TILE, *image.size)
        if max(sides) > most:
            raise DataError(f"expected tiles with sides of at most {most} pixels, found {sides}")
    return image


class _Picture:
    """An image that Pillow opened. ``pixels`` decodes the image; all other methods read only the header.

    Args:
        image: Pillow's image.
        encoded: Whether the image comes from bytes or a file. If False, the caller passed an image of Pillow.
    """

    def __init__(self, image: Any, *, encoded: bool) -> None:
        self._image = image
        if image.mode in ("P", "PA"):
            self._channels = 4 if image.mode == "PA" or "transparency" in image.info else 3
        elif image.mode == "1" or image.mode in _WIDE_MODES:
            self._channels = 1
        elif image.mode in PLAIN_MODES:
            self._channels = PLAIN_MODES[image.mode]
        else:
            wanted = [*PLAIN_MODES, "1", "P", "PA", *_WIDE_MODES[:3]]
            raise DataError(f"expected an image of mode {wanted}, found mode {image.mode!r}")
        # EXIF's orientation, 1 to 8; Pillow itself turns TIFF images.
        self._turn = 1
        if encoded and image.format != "TIFF" and any(key in image.info for key in _TURNS):
            with suppress(Exception):  # damaged EXIF data do not affect the pixels
                turn = image.getexif().get(_ORIENTATION, 1)
                self._turn = turn if turn in range(1, 9) else 1
        # Pillow reduces several channels of 16 bits to 8 bits.
        tiles = getattr(image, "tile", None)
        arguments = tiles[0][3] if tiles and image.mode in PLAIN_MODES else None
        raw = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
        if isinstance(raw, str) and ";16" in raw:
            raise DataError(
                f"expected a grey image, or 8 bits per channel, found {image.format} with 16 bits per channel"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(H, W, C)`` of the decoded image."""
        width, height = self._image.size if self._turn < 5 else self._image.size[::-1]
        return height, width, self._channels

    @property
    def is_plain(self) -> bool:
        """Whether the header alone determines the number of channels, and each channel has 8 bits."""
        return self._image.mode in PLAIN_MODES

    def check(self, shape: tuple[int, ...] | None, max_pixels: int) -> None:
        """Raise DataError unless the header states ``shape``.

        If ``shape`` is None, any shape of at most ``max_pixels`` pixels is accepted.
        """
        found = self.shape
        if shape is None:
            if found[0] * found[1] > max_pixels:
                raise DataError(
                    f"expected an image of at most {max_pixels:,} pixels, found {found[0]} x {found[1]}; "
                    "declare a larger shape in the field to allow it"
                )
        # The colours of a palette may all be greys, or all opaque.
        elif found[:2] != tuple(shape[:2]) or (found[2] != shape[2] and self._image.mode not in ("P", "PA")):
            raise DataError(f"expected shape {list(shape)}, found {list(found)}")

    def pixels(self, dtype: np.dtype[Any], channels: int | None) -> npt.NDArray[Any]:
        """Return the pixels, ``[H, W, C]`` of ``dtype``, after applying the EXIF orientation.

        Args:
            dtype: An integer dtype.
            channels: Wanted number of channels, used only if the image has a palette. If the colours of the palette
                need more channels, the result has more channels.

        Raises:
            DataError: ``dtype`` cannot represent a value, or Pillow would change the values of the image.
        """
        image = self._image
        array: npt.NDArray[Any]
        if image.mode in PLAIN_MODES or image.mode in _WIDE_MODES:
            array = np.asarray(image)
        elif image.mode == "1":
            array = np.asarray(image.convert("L"))
        else:
            array = self._palette_colours(channels)
        array = array.reshape(*array.shape[:2], -1)
        if array.dtype != dtype:
            array = in_range(array.astype(array.dtype.newbyteorder("="), copy=False), dtype)
        if self._turn in (3, 4, 6, 7):
            array = array[::-1]
        if self._turn in (2, 3, 7, 8):
            array = array[:, ::-1]
        return array.swapaxes(0, 1) if self._turn >= 5 else array

    def _palette_colours(self, channels: int | None) -> npt.NDArray[np.uint8]:
        """Return the palette's colours with the given number of channels if these can represent all colours; otherwise
        as RGB or RGBA.
        """
        mode = "RGBA" if self._channels == 4 or channels in (2, 4) else "RGB"
        colours: npt.NDArray[np.uint8] = np.asarray(self._image.convert(mode))
        opaque = colours.shape[2] == 3 or bool((colours[:, :, 3] == 255).all())
        grey = bool((colours[:, :, :1] == colours[:, :, 1:3]).all())
        if channels == 3 and opaque:
            return colours[:, :, :3]
        if channels == 1 and opaque and grey:
            return colours[:, :, :1]
        return colours[:, :, 2:] if channels == 2 and grey else colours


def in_range(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Convert values to ``dtype``; raise DataError if a value is out of range."""
    highest = int(np.iinfo(dtype).max)
    if array.dtype.kind in "iu" and array.size and (array.min() < 0 or array.max() > highest):
        raise DataError(f"expected pixels 0..{highest}, found {int(array.min())}..{int(array.max())}")
    try:
        return convert(array, dtype)
    except RowError as error:
        raise DataError(f"expected pixels 0..{highest}: {error}") from error


_PNG_MODES = {channels: mode for mode, channels in PLAIN_MODES.items()}
# PNG chunks that do not change the pixels, with their sizes.
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
    """Decode a stored image to pixels ``[H, W, C]``, where C is 1 to 4.

    Encoded images are PNG, JPEG, WebP, GIF, BMP or TIFF files with a single frame. Pixel values are not scaled. Bilevel
    images become 0 and 255, and palette images become RGB or RGBA. Grey values of 16 or 32 bits are returned unchanged
    if ``dtype`` can represent them. The EXIF orientation is applied. The header is validated before the image is
    decoded.

    Args:
        value: A PIL image; a ``{bytes, path}`` mapping as in ``datasets`` (``path`` is opened if there are no bytes);
            encoded bytes; a path; or an array or nested list ``[H, W]`` or ``[H, W, C]`` of integers.
        shape: Shape ``(H, W, C)`` that the image must have; by default any shape is accepted.
        dtype: An integer dtype; "uint8" for pixels 0..255, "uint16" for depth.
        image_roots: Allowed folders (absolute, without links) of paths. By default no path is opened.
        max_pixels: Largest number of pixels of an image that is decoded without a ``shape``.

    Raises:
        DataError: The value is not an image, cannot be decoded, has another shape or size, has values that ``dtype``
            cannot represent, or is a path outside the allowed folders.
    """
    wanted = np.dtype(dtype)
    if not is_encoded(value):
        pixels = _check_pixels(value, wanted)
    else:
        with _opened(value, image_roots) as picture:
            picture.check(shape, max_pixels)
            pixels = picture.pixels(wanted, None if shape is None else shape[2])
    # Chunks behind the pixels may change the shape in the header.
    if shape is not None and pixels.shape != tuple(shape):
        raise DataError(f"expected shape {list(shape)}, found {list(pixels.shape)}")
    return pixels


def decode_into(encoded: bytes | memoryview, out: npt.NDArray[Any]) -> None:
    """Decode an encoded image into ``out``, ``[H, W, C]`` of an integer dtype.

    Raises:
        DataError: ``decode_image`` would not accept the image, or its shape differs from the shape of ``out``.
    """
    pixels = _from_png(encoded, out.shape) if out.dtype == _BYTE else None
    out[...] = decode_image(encoded, shape=out.shape, dtype=out.dtype) if pixels is None else pixels


def fill_images(
    runs: Sequence[tuple[pa.Array, int, Sequence[str]]],
    shape: tuple[int, int, int],
    out: npt.NDArray[Any],
    *,
    fill: float | None,
    pixel: np.dtype[Any],
) -> None:
    """Decode rows of images into rows of ``out``.

    Args:
        runs: Runs of rows. Each run consists of some rows of an image column (binary, or ``{bytes, path}``), the index
            of the first of these rows in ``out``, and the allowed folders of paths.
        shape: The shape ``(H, W, C)`` of every image.
        out: ``[rows, H * W * C]`` of any dtype.
        fill: Pixel value for rows that are null; if ``fill`` is None, a null raises an error.
        pixel: The dtype of pixels.

    Raises:
        RowError: A row is null and ``fill`` is None, or an image cannot be read or has another shape.
        ValueError: The Arrow array is damaged.
    """
    encoded: list[tuple[int, memoryview]] = []
    for values, first, roots in runs:
        is_struct = pa.types.is_struct(values.type)
        inner = values.field("bytes") if is_struct and not values.null_count else values
        if not inner.null_count and not pa.types.is_struct(inner.type) and not pa.types.is_null(inner.type):
            encoded += enumerate(_bytes_of(inner), first)
            continue
        for row, value in enumerate(values.to_pylist(), first):  # some images are null, or are separate files
            if value is None:
                if fill is None:
                    raise RowError(row, "expected a value, found null")
                out[row] = fill
                continue
            try:
                found = decode_image(value, shape=shape, dtype=pixel, image_roots=roots)
                out[row] = convert(found.reshape(-1), out.dtype)
            except ValueError as error:
                raise RowError(row, str(error)) from error
    pixels, is_direct = np.empty(shape, pixel), out.dtype == pixel
    for row, image in encoded:
        try:
            decode_into(image, out[row].reshape(shape) if is_direct else pixels)
            if not is_direct:
                out[row] = convert(pixels.reshape(-1), out.dtype)
        except ValueError as error:
            raise RowError(row, str(error)) from error


def _bytes_of(values: pa.Array) -> list[memoryview]:
    """Return, for each value of a binary array, a view of its bytes."""
    _, ends, data = values.buffers()
    wide = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    every: npt.NDArray[Any] = np.frombuffer(ends, wide)[values.offset : values.offset + len(values) + 1]
    size = 0 if data is None else data.size
    if every[0] < 0 or every[-1] > size or (every[1:] < every[:-1]).any():
        raise ValueError(
            f"expected images within {size} bytes, found positions {every[0]}..{every[-1]}; the array is damaged"
        )
    octets = memoryview(b"" if data is None else data)
    return [octets[begin:end] for begin, end in pairwise(every.tolist())]


def encode_png(value: object, *, dtype: npt.DTypeLike = np.uint8, image_roots: Sequence[str] = ()) -> bytes:
    """Encode an image (in any form that ``decode_image`` accepts) as PNG, without loss.

    Raises:
        DataError: ``decode_image`` would not accept the image, or it has several channels of more than 8 bits.
    """
    pixels = decode_image(value, dtype=dtype, image_roots=image_roots)
    if pixels.shape[2] > 1 and pixels.dtype != _BYTE:
        pixels = in_range(pixels, _BYTE)  # Pillow cannot write wider channels
    stream = io.BytesIO()
    pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def encode_jpeg(pixels: npt.NDArray[np.uint8], quality: int) -> bytes:
    """Encode pixels ``[H, W, C]`` of uint8 as JPEG, where C is 1 or 3. JPEG is lossy at every quality, even at 100."""
    stream = io.BytesIO()
    image = pillow().fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(stream, format="JPEG", quality=quality)
    return stream.getvalue()


def image_shape(
    value: object,
    *,
    dtype: npt.DTypeLike = np.uint8,
    image_roots: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Return the shape ``(H, W, C)`` of an image in any form that ``decode_image`` accepts; only the header is read.

    Raises:
        DataError: The value has no valid image header, the image has more than ``MAX_PIXELS`` pixels, or the value is
            an array that is not an image.
    """
    if not is_encoded(value):
        shape = _check_pixels(value, np.dtype(dtype)).shape
        return shape[0], shape[1], shape[2]
    with _opened(value, image_roots) as picture:
        picture.check(None, MAX_PIXELS)
        return picture.shape


def check_image(
    value: Mapping[str, Any],
    shape: tuple[int, ...] | None,
    *,
    dtype: npt.DTypeLike = np.uint8,
    image_roots: Sequence[str] = (),
) -> None:
    """Raise DataError if the header shows that ``decode_image`` would not accept a value.

    The pixels are decoded only in two cases: the header does not show that the pixel values are small enough, or the
    result depends on the colours of a palette.
    """
    with _opened(value, image_roots) as picture:
        picture.check(shape, MAX_PIXELS)
    if not picture.is_plain:
        decode_image(value, shape=shape, dtype=dtype, image_roots=image_roots)


def is_encoded(value: object) -> bool:
    """Whether a value has a type that Pillow can read: bytes, a path, a ``{bytes, path}`` mapping, or a PIL image."""
    return isinstance(value, Mapping | bytes | bytearray | memoryview | str) or _is_pillow_image(value)


def _is_pillow_image(value: object) -> bool:
    # Tensors also have an attribute of this name.
    return isinstance(getattr(value, "mode", None), str)


@contextmanager
def _opened(value: Any, roots: Sequence[str]) -> Iterator[_Picture]:
    """Context manager that opens an encoded image, and converts errors of Pillow to errors of this library."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    with understood(_shown(value)):
        if _is_pillow_image(value):
            yield _Picture(value, encoded=False)
        elif isinstance(value, str):
            with (
                open_inside(value, roots) as file,
                understood(f"path {value!r}, {_no_image(os.fstat(file.fileno()).st_size)}"),
            ):
                yield _Picture(open_encoded(file), encoded=True)
        else:
            yield _Picture(open_encoded(value), encoded=True)


def _from_png(encoded: bytes | memoryview, shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a plain PNG of ``shape``. Return None if the PNG has chunks that affect pixels, or if the
    file has another format or shape.

    The data are passed directly to Pillow's decoder, which for small images takes half the time of Pillow's reader.
    """
    header = _png_header(shape)
    if bytes(encoded[: len(header)]) != header:
        return None
    encoded = bytes(encoded)
    place, data = len(header), []
    while (kind := encoded[place + 4 : place + 8]) != b"IEND":
        size = int.from_bytes(encoded[place : place + 4])
        end = place + 8 + size
        if kind == b"IDAT":  # Pillow does not verify this checksum either
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
    """Return the first bytes of a PNG with 8 bits per channel and no interlacing."""
    height, width, channels = shape
    header = b"IHDR" + struct.pack(">2I5B", width, height, 8, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + _checksum(header)


def _checksum(chunk: bytes) -> bytes:
    return zlib.crc32(chunk).to_bytes(4)


def _check_pixels(value: object, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:  # errors of a framework's arrays on a device or with a gradient
        raise DataError(f"expected an image as an array, found {type(value).__name__}: {error}") from error
    if array.ndim not in (2, 3) or array.dtype.kind not in "iub" or (array.ndim == 3 and array.shape[2] > 4):
        raise DataError(
            f"expected an image as integers [H, W] or [H, W, C] with C up to 4, found {array.dtype} {list(array.shape)}"
        )
    return in_range(array, dtype).reshape(*array.shape[:2], -1)


def _no_image(size: int) -> str:
    return f"{size} bytes that are not an image"


def _shown(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return _no_image(len(value))
    return f"path {value!r}" if isinstance(value, str) else type(value).__name__
