"""Images of steps, made small enough to stand in a page."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import column_type
from mouse_core.images.pixels import decode_image, encode_png

_MOST_PIXELS = 128
# Larger pictures are not decoded to be made small.
_MOST_DECODED = 1 << 24


def picture_columns(schema: pa.Schema) -> list[str]:
    """Names of the columns that hold pictures: encoded ones, and arrays of bytes that look like some."""
    found = []
    for field in schema:
        kind = column_type(field.type)
        if (kind.kind == "image" and field.name.startswith("observation")) or (
            kind.kind == "list" and kind.depth in (2, 3) and kind.value_type == "uint8"
        ):
            found.append(field.name)
    return found


def thumbnail(value: Any) -> str | None:
    """A picture as a ``data:`` address of a small PNG; None where it cannot be shown.

    Args:
        value: What ``to_pylist`` gives for a row: encoded bytes, ``{bytes, path}`` or nested lists. Files that a path
            names are not opened: the page would carry them away.
    """
    if isinstance(value, dict):
        value = value.get("bytes")
    if value is None:
        return None
    try:
        is_file = isinstance(value, bytes)
        pixels = decode_image(value, max_pixels=_MOST_DECODED) if is_file else _as_pixels(np.asarray(value, np.uint8))
        encoded = encode_png(_smaller(pixels)) if pixels is not None and pixels.size else None
    except (ValueError, ImportError, OSError):
        return None
    if encoded is None:
        return None
    return "data:image/png;base64," + base64.b64encode(encoded).decode()


def _as_pixels(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """``[H, W, C]`` with 1 or 3 channels; of a stack of frames the last one."""
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        return None
    if array.shape[0] <= 4 < array.shape[2]:
        array = np.moveaxis(array, 0, 2)
    if array.shape[2] == 3:
        return array
    return array[:, :, -1:]


def _smaller(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The mean of square blocks of pixels, as large as it takes to fit."""
    size = -(-max(pixels.shape[:2]) // _MOST_PIXELS)
    if size <= 1:
        return pixels
    height, width = (max(side // size, 1) for side in pixels.shape[:2])
    cut = pixels[: height * size, : width * size]
    rows, columns = cut.shape[0] // height, cut.shape[1] // width
    blocks = cut.reshape(height, rows, width, columns, pixels.shape[2])
    return np.asarray(blocks.mean(axis=(1, 3)).round().astype(np.uint8))
