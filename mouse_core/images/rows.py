"""Reading the encoded images of a column's rows, where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import RowError, convert
from mouse_core.images.decoding import Encoded, Wanted, decode_rows
from mouse_core.images.pixels import decode_image


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
        runs: Rows of an image column (binary, or ``{bytes, path}``), the row of ``out`` that the first goes to,
            and the folders that a path may lie in.
        shape: ``(H, W, C)`` of an image.
        out: ``[rows, H * W * C]`` of any dtype.
        fill: What a null becomes; None: an error.
        pixel: The dtype of pixels.

    Raises:
        RowError: A null without ``fill``, an image that cannot be read, or one of another shape.
        ValueError: The array is damaged.
    """
    encoded: list[Encoded] = []
    for values, row, roots in runs:
        if not values.null_count and pa.types.is_struct(values.type):
            inner = values.field("bytes")
        else:
            inner = values
        if not inner.null_count and not pa.types.is_struct(inner.type) and not pa.types.is_null(inner.type):
            encoded.append(_bytes_of(inner, row))
        else:
            _fill_one_by_one(values, row, Wanted(shape, pixel), roots, out, fill)
    decode_rows(encoded, shape, out, pixel)


def _bytes_of(values: pa.Array, row: int) -> Encoded:
    """Return the position of a binary value's bytes in memory."""
    _, ends, data = values.buffers()
    wide = pa.types.is_large_binary(values.type)
    every: npt.NDArray[Any] = np.frombuffer(ends, np.int64 if wide else np.int32)[
        values.offset : values.offset + len(values) + 1
    ]
    size = 0 if data is None else data.size
    if every[0] < 0 or every[-1] > size or (every[1:] < every[:-1]).any():
        raise ValueError(f"expected encoded images in {size} bytes, found {every[0]}..{every[-1]}; it is damaged")
    octets = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return Encoded(octets, every.astype(np.int64), row)


def _fill_one_by_one(
    values: pa.Array, first: int, wanted: Wanted, roots: Sequence[str], out: npt.NDArray[Any], fill: float | None
) -> None:
    """Fill rows of which some are null, or are stored in separate files."""
    for row, value in enumerate(values.to_pylist(), first):
        if value is None:
            if fill is None:
                raise RowError(row, "expected a value, found null")
            out[row] = fill
            continue
        try:
            found = decode_image(value, shape=wanted.shape, dtype=wanted.pixel, image_roots=roots)
            out[row] = convert(found.reshape(-1), out.dtype)
        except ValueError as error:
            raise RowError(row, str(error)) from error
