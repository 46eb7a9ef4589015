"""Cropping images, over the array API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import is_numpy_array

from mouse_core.augment.draws import Crop
from mouse_core.dtypes import namespace

Empty = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
"""Gives memory for a new array of a shape and dtype, as ``np.empty`` does."""


def crop_images(images: Any, crop: Crop, empty: Empty = np.empty) -> Any:
    """``out[b, s, y, x] = images[b, s, rows[b, t, y], columns[b, t, x]]``, t being s, or 0 for one crop a row.

    Args:
        images: ``[B, S, H, W, C]``, of any dtype; NumPy, torch or JAX.
        crop: Arrays of the same kind; see ``Crop``.
        empty: Gives memory for a new NumPy array.

    Returns:
        ``[B, S, H', W', C]``, a new array.
    """
    if is_numpy_array(images):
        return _copy_parts(images, crop, empty)
    xp = namespace(images)
    batch, length, _, width, channels = images.shape
    height_out, width_out = crop.rows.shape[2], crop.columns.shape[2]
    rows = xp.broadcast_to(crop.rows[..., None, None], (batch, length, height_out, width, channels))
    taken = xp.take_along_axis(images, rows, axis=2)
    columns = xp.broadcast_to(crop.columns[:, :, None, :, None], (batch, length, height_out, width_out, channels))
    return xp.take_along_axis(taken, columns, axis=3)


def _copy_parts(images: npt.NDArray[Any], crop: Crop, empty: Empty) -> npt.NDArray[Any]:
    """The same by copying rectangles, since rows and columns are ranges, cut off at the borders of the image."""
    batch, length, height, width, channels = images.shape
    times = crop.rows.shape[1]
    height_out, width_out = crop.rows.shape[2], crop.columns.shape[2]
    cropped = empty((batch, length, height_out, width_out, channels), images.dtype)
    # All images of one crop together: [B * T, S / T, H, W, C].
    sources = images.reshape(batch * times, -1, height, width, channels)
    targets = cropped.reshape(batch * times, -1, height_out, width_out, channels)
    pixels = height * width * channels
    tops, lefts = _first(crop.rows), _first(crop.columns)
    for source, target, top, left in zip(sources, targets, tops, lefts, strict=True):
        y, x = max(0, -top), max(0, -left)
        y_end, x_end = min(height_out, height - top), min(width_out, width - left)
        if width == width_out and height == height_out:
            # One run of pixels for each image is several times faster than one for each of its rows. What it brings
            # from the other side of the image is overwritten below.
            moved = (top * width + left) * channels
            begin, end = max(0, -moved), min(pixels, pixels - moved)
            target.reshape(-1, pixels)[:, begin:end] = source.reshape(-1, pixels)[:, begin + moved : end + moved]
        else:
            target[:, y:y_end, x:x_end] = source[:, top + y : top + y_end, left + x : left + x_end]
        # Beyond the border of the image, its outermost pixels are repeated.
        if x:
            target[:, y:y_end, :x] = target[:, y:y_end, x : x + 1]
        if x_end < width_out:
            target[:, y:y_end, x_end:] = target[:, y:y_end, x_end - 1 : x_end]
        if y:
            target[:, :y] = target[:, y : y + 1]
        if y_end < height_out:
            target[:, y_end:] = target[:, y_end - 1 : y_end]
    return cropped


def _first(places: npt.NDArray[np.int64]) -> list[int]:
    """Where each range would begin, were it not cut off at 0."""
    places = places.reshape(-1, places.shape[-1])
    before = np.maximum((places == 0).sum(axis=1) - 1, 0)
    first: list[int] = (places[np.arange(len(places)), before] - before).tolist()
    return first
