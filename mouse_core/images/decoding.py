"""Decodes the images of a batch, and measures the time that threads spend on this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import RowError, convert
from mouse_core.images.pixels import decode_image, decode_into

T = TypeVar("T")


class _Spent(threading.local):
    """Seconds that the calling thread has spent on decoding images."""

    seconds = 0.0


_spent = _Spent()


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
    began, pixels, is_direct = perf_counter(), np.empty(shape, pixel), out.dtype == pixel
    for row, image in encoded:
        try:
            decode_into(image, out[row].reshape(shape) if is_direct else pixels)
            if not is_direct:
                out[row] = convert(pixels.reshape(-1), out.dtype)
        except ValueError as error:
            raise RowError(row, str(error)) from error
    _spent.seconds += perf_counter() - began


def _bytes_of(values: pa.Array) -> list[memoryview]:
    """Return views of the bytes of each binary value."""
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


class DecodeClock:
    """Adds up the seconds that threads spend on decoding images in the functions that ``timing`` returns."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def timing(self, make: Callable[[int], T]) -> Callable[[int], T]:
        """Return a function that calls ``make`` and adds the seconds spent on decoding images to ``seconds``."""

        def timed(index: int) -> T:
            before = _spent.seconds
            try:
                return make(index)
            finally:
                with self._lock:
                    self.seconds += _spent.seconds - before

        return timed
