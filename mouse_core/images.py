"""Decoding images and encoding them without loss, through Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

# Modes that are pixels of 8 bits a channel as they stand.
_PLAIN_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_PNG_MODES = {channels: mode for mode, channels in _PLAIN_MODES.items()}
# Chunks that say nothing about the pixels, and their sizes.
_PNG_PASSED = {b"pHYs": 9, b"gAMA": 4, b"sRGB": 1}


def decode_image(value: object) -> npt.NDArray[np.uint8]:
    """Turn one stored image into pixels, uint8 ``[H, W, C]`` with C 1 to 4.

    Args:
        value: A PIL image, a ``{bytes, path}`` mapping as ``datasets`` stores it (``path`` is opened where there
            are no bytes), encoded bytes, or an array or nested list ``[H, W]`` or ``[H, W, C]`` of values 0..255.
            Bilevel images become 0 and 255, palette images RGB or RGBA.

    Raises:
        ValueError: The value is no image, cannot be decoded, or has a mode of other than 8 bits a channel.
    """
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview | str) or hasattr(value, "mode"):
        return _from_pillow(value)
    return _check_pixels(np.asarray(value))


def decode_into(encoded: bytes | memoryview, out: npt.NDArray[np.uint8]) -> None:
    """Decode one encoded image into ``out``, uint8 ``[H, W, C]``.

    Raises:
        ValueError: As ``decode_image``, or the image has another shape.
    """
    pixels = _from_png(encoded, out.shape)
    if pixels is None:
        pixels = _from_pillow(encoded)
        if pixels.shape != out.shape:
            raise ValueError(f"expected shape {list(out.shape)}, found {list(pixels.shape)}")
    out[...] = pixels


def encode_png(value: object) -> bytes:
    """Encode one image (as ``decode_image`` takes it) as PNG, without loss."""
    image_module = _pillow()
    pixels = decode_image(value)
    stream = io.BytesIO()
    image_module.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def encoded_shape(value: Mapping[str, Any]) -> tuple[int, int, int]:
    """The shape ``(H, W, C)`` of the image in a ``{bytes, path}`` mapping, from its header; no pixels are decoded.

    Raises:
        ValueError: It does not begin like an image, or has a mode of other than 8 bits a channel.
    """
    encoded: Any = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        with _pillow().open(encoded if isinstance(encoded, str) else io.BytesIO(encoded)) as image:
            mode, (width, height) = _delivered_mode(image), image.size
    except (OSError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a readable image, found {_shown(encoded)}") from error
    return height, width, _channels(mode)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("encoded images need Pillow: pip install 'mouse-data[images]'") from error
    return Image


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
        image = _pillow().frombytes(mode, shape[1::-1], b"".join(data), "zip", mode)
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


def _from_pillow(value: Any) -> npt.NDArray[np.uint8]:
    image_module = _pillow()
    try:
        if hasattr(value, "mode"):
            image = value
        else:
            image = image_module.open(value if isinstance(value, str) else io.BytesIO(value))
        mode = _delivered_mode(image)
        channels = _channels(mode)
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, EOFError) as error:
        # The first line of Pillow's own message may hold a memory address.
        reason = "" if isinstance(error, image_module.UnidentifiedImageError) else f": {error}"
        raise ValueError(f"expected a readable image, found {_shown(value)}{reason}") from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _delivered_mode(image: Any) -> str:
    """The mode an image is delivered in: bilevel as grey, palettes as the colours they stand for."""
    if image.mode == "1":
        return "L"
    if image.mode in ("P", "PA"):
        return "RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB"
    return str(image.mode)


def _channels(mode: str) -> int:
    if mode not in _PLAIN_MODES:
        raise ValueError(f"expected an image of mode {list(_PLAIN_MODES)}, found mode {mode!r}")
    return _PLAIN_MODES[mode]


def _check_pixels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.ndim not in (2, 3) or array.dtype.kind not in "iub" or (array.ndim == 3 and array.shape[2] > 4):
        raise ValueError(
            f"expected an image as integers [H, W] or [H, W, C] with C up to 4, found {array.dtype} {list(array.shape)}"
        )
    if array.dtype != np.uint8 and array.size and (array.min() < 0 or array.max() > 255):
        raise ValueError(f"expected pixels 0..255, found {int(array.min())}..{int(array.max())}")
    return array.astype(np.uint8).reshape(*array.shape[:2], -1)


def _shown(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes that are no image"
    return repr(value) if isinstance(value, str) else type(value).__name__
