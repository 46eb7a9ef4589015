"""Image files of rows that are being laid out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.files.reading import damaged
from mouse_core.formats.pictures.changing import IMAGE
from mouse_core.images.pixels import check_image


class HeldImages:
    """Image files, and numbers that stand for them while rows are laid out; 0 stands for none.

    Args:
        name: For messages.
        shape: ``(H, W, C)`` that each must have.
        dtype: Of pixels, uint8 or uint16.
        behind: How many of the rows that were taken last are still asked for when others are taken.
    """

    def __init__(self, name: str, shape: tuple[int, int, int], dtype: npt.DTypeLike, *, behind: int = 2) -> None:
        self._name, self._shape, self._dtype, self._behind = name, shape, np.dtype(dtype), behind
        self._held, self._first = pa.array([], IMAGE), 1

    def add(
        self, column: pa.Array, file: str | os.PathLike[str], called: Callable[[int], str]
    ) -> npt.NDArray[np.int64]:
        """Take the images of some rows, and give a number for each.

        Args:
            column: As a file has it: ``{bytes, path}``, or binary. Paths count for nothing: a dataset must not reach
                outside of its folder.
            file: For messages.
            called: What messages call a row.

        Raises:
            DataError: One is not there, or is none of that shape, as far as its header says; names file and row.
        """
        for row, why in self.unreadable(column):
            raise damaged(file, why, at=called(row))
        encoded = _files(column)
        made = pa.StructArray.from_arrays([encoded, pa.nulls(len(encoded), pa.string())], fields=list(IMAGE))
        kept = self._held.slice(max(0, len(self._held) - self._behind))
        self._first += len(self._held) - len(kept)
        self._held = pa.concat_arrays([kept, made])
        return self._first + len(kept) + np.arange(len(encoded))

    def unreadable(self, column: pa.Array) -> Iterator[tuple[int, str]]:
        """Rows whose image is not there, or none of the shape, as far as its header says, and why."""
        for row, one in enumerate(_files(column)):
            try:
                value = {"bytes": memoryview(one.as_buffer() if one.is_valid else b"")}
                check_image(value, self._shape, dtype=self._dtype)
            except ValueError as error:
                yield row, f"{self._name}: {error}"

    def column_of(self, numbers: npt.NDArray[np.int64]) -> pa.StructArray:
        """The images that some numbers stand for; nulls for 0."""
        return self._held.take(pa.array(numbers - self._first, mask=numbers == 0))


def _files(column: pa.Array) -> pa.Array:
    """The image files of a column that has them, or ``{bytes, path}``."""
    encoded = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
    return encoded.cast(pa.binary())
