"""Decoding images and encoding them without loss, through Pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

# Modes that are pixels of 8 bits a channel as they stand.
_PLAIN_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


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
