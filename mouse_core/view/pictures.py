"""Converts images of steps to PNG or JPEG files for a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column_types import column_type
from mouse_core.errors import ConfigError, DataError
from mouse_core.images.pixels import check_image, decode_image, encode_png
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot

# Largest number of pixels of an image.
_MOST_PIXELS = 1 << 24
_SIGNS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def picture(snapshot: Snapshot, name: str, row: int) -> tuple[bytes, str]:
    """Return an image of a step, as the bytes of a PNG or JPEG file and the media type of the file.

    Args:
        snapshot: The rows.
        name: A column of images (encoded, or uint8 ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``), or a field of images,
            for example of video frames.
        row: The row of the step.

    Raises:
        ConfigError: The column ``name`` does not exist, or the row has no image.
        DataError: The image cannot be decoded, is too large, or is outside of the allowed folders.
    """
    try:
        return _picture(snapshot, name, row)
    except DataError as error:
        raise DataError(f"{name}: {error} in row {row}") from error


def _picture(snapshot: Snapshot, name: str, row: int) -> tuple[bytes, str]:
    types = stored_types(snapshot.segments)
    if name not in types or column_type(types[name]).kind == "video":
        return png(_of_field(snapshot, name, row)), "image/png"
    value = snapshot.rows([row], {name}).get(name, [None])[0]
    if value is None or (isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") is None):
        raise ConfigError(f"{name}: expected an image, found none in row {row}")
    if isinstance(value, Mapping | bytes):
        return _encoded(value, _roots(snapshot, row))
    return png(np.asarray(value, np.uint8)), "image/png"


def png(pixels: npt.NDArray[Any]) -> bytes:
    """Return pixels as a PNG: ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``. If the array is a stack of frames, only the
    last frame is used. If numbers exceed 255, as for depth, all numbers are scaled so that the largest number is white.

    Raises:
        DataError: The array has another shape.
    """
    if pixels.ndim == 3 and pixels.shape[0] <= 4 < pixels.shape[2]:
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or not pixels.size or pixels.shape[0] * pixels.shape[1] > _MOST_PIXELS:
        raise DataError(f"expected an image of at most {_MOST_PIXELS} pixels, found an array {list(pixels.shape)}")
    if pixels.shape[2] not in (1, 3, 4):
        pixels = pixels[:, :, -1:]
    pixels = np.nan_to_num(pixels) if pixels.dtype.kind == "f" else pixels
    if pixels.dtype != np.uint8 and (pixels.max() > 255 or pixels.min() < 0):
        pixels = np.clip(pixels, 0, None) / max(float(pixels.max()), 1e-300) * 255
    return encode_png(np.ascontiguousarray(pixels.astype(np.uint8)))


def _encoded(value: Mapping[str, Any] | bytes, roots: tuple[str, ...]) -> tuple[bytes, str]:
    held = value.get("bytes") if isinstance(value, Mapping) else value
    kind = next((kind for sign, kind in _SIGNS.items() if held is not None and held.startswith(sign)), None)
    if kind is not None and held is not None:
        check_image({"bytes": held, "path": None}, None)
        if kind == "image/jpeg" or held[24] <= 8:  # bits per channel: with more bits, the largest value becomes white
            return bytes(held), kind
    try:
        pixels = decode_image(value, image_roots=roots, max_pixels=_MOST_PIXELS)
    except DataError:
        pixels = decode_image(value, image_roots=roots, max_pixels=_MOST_PIXELS, dtype=np.int64)
    return png(pixels), "image/png"


def _of_field(snapshot: Snapshot, name: str, row: int) -> npt.NDArray[Any]:
    readers = {one.spec.column: one for one in snapshot.readers.values() if one.spec.image_shape is not None}
    reader = snapshot.readers.get(name) or readers.get(name)
    if reader is None or reader.spec.image_shape is None:
        raise ConfigError(f"expected a column or a field of images, found {name!r:.80}")
    return snapshot.stored(reader.spec.name, np.array([row])).reshape(reader.spec.image_shape)


def _roots(snapshot: Snapshot, row: int) -> tuple[str, ...]:
    """Return the folders from which the images that a row names by path may be read."""
    for segment in snapshot.segments:
        if row < segment.num_rows:
            return tuple(segment.image_roots)
        row -= segment.num_rows
    return ()


def shown(value: Any) -> list[str]:
    """Return a step's value as texts of limited length, one text for each dimension."""
    if isinstance(value, list):
        found = [text for item in value[:_MOST_VALUES] for text in shown(item)]
        return found[:_MOST_VALUES]
    if isinstance(value, bytes):
        return [f"{len(value):,} bytes"]
    if isinstance(value, float):
        return [f"{value:.7g}"]
    if isinstance(value, Mapping) or not isinstance(value, str | int | None):
        return [f"{value!r}"[:_MOST_CHARACTERS]]
    return ["" if value is None else str(value)[:_MOST_CHARACTERS]]


_MOST_VALUES = 1024
_MOST_CHARACTERS = 4000
