"""NumPy arrays read from a stream of bytes, some rows at a time."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from mouse_core.errors import DataError


class NpyRows:
    """The rows of an array in the format of ``numpy.save``, taken one stretch after the other.

    Args:
        file: A stream of bytes at the beginning of the array.
        where: What messages name.

    Raises:
        DataError: It is no array of numbers.
    """

    def __init__(self, file: BinaryIO | Any, *, where: str) -> None:
        self._file = file
        self._where = where
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise DataError(f"{where}: expected an array of version 1.0 or 2.0, found {version}")
        shape, fortran, dtype = readers[version](file)
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or any(size < 0 for size in shape):
            raise DataError(f"{where}: expected an array of numbers, found {dtype} {list(shape)}")
        if fortran and len(shape) > 1:
            raise DataError(f"{where}: expected an array in C order, found one in Fortran order")
        self.shape: tuple[int, ...] = tuple(int(size) for size in shape)
        self.dtype: np.dtype[Any] = dtype
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        self.place = 0

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def read(self, count: int) -> npt.NDArray[Any]:
        """The next ``count`` rows, ``[count, ...]``.

        Raises:
            DataError: There are fewer bytes than the array's shape says.
        """
        count = min(count, len(self) - self.place)
        values = np.frombuffer(self._bytes(count * self.row_bytes), self.dtype)
        self.place += count
        return values.reshape(count, *self.shape[1:])

    def skip(self, count: int) -> None:
        """Leave out some rows."""
        while count:
            some = min(count, max(1, (1 << 22) // max(self.row_bytes, 1)))
            self.read(some)
            count -= some

    def end(self) -> None:
        """Read on to the end of the stream, where compressed files have the CRC of what was read.

        Raises:
            DataError: There are more bytes than the array's shape says.
        """
        if self._file.read(1):
            raise DataError(f"{self._where}: expected the end after {len(self)} rows, found more bytes")

    def _bytes(self, size: int) -> bytes:
        parts = []
        left = size
        while left:
            part = self._file.read(min(left, 1 << 24))
            if not part:
                raise DataError(
                    f"{self._where}: expected {len(self)} rows of {self.row_bytes} bytes, found the end in row "
                    f"{self.place + (size - left) // max(self.row_bytes, 1)}"
                )
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
