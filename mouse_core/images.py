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


def check_header(value: Mapping[str, Any]) -> None:
    """Raise ValueError if a ``{bytes, path}`` mapping does not begin like an image; pixels are not decoded."""
    source = io.BytesIO(value["bytes"]) if value.get("bytes") is not None else value.get("path")
    try:
        with _pillow().open(source):
            pass
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"expected a readable image, found {_shown(value.get('bytes') or value.get('path'))}"
        ) from error


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
        if image.mode == "1":
            image = image.convert("L")
        elif image.mode in ("P", "PA"):
            image = image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")
        mode = image.mode
        pixels = np.asarray(image) if mode in _PLAIN_MODES else None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ValueError(f"expected a readable image, found {_shown(value)}: {error}") from error
    if pixels is None:
        raise ValueError(f"expected an image of mode {list(_PLAIN_MODES)}, found mode {mode!r}")
    return pixels.reshape(*pixels.shape[:2], _PLAIN_MODES[mode])


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
        return f"{len(value)} bytes that are none"
    return repr(value) if isinstance(value, str) else type(value).__name__
