"""The metadata of Arrow files, which are FlatBuffers: tables that know where their fields are.

Nothing in them is believed: what lies outside of the bytes that were read is a ``DataError``.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError


class Flat:
    """A table of a FlatBuffer: at its place the distance to a list of where its fields are.

    Args:
        memory: The buffer.
        at: Where the table begins.
    """

    def __init__(self, memory: Any, at: int) -> None:
        self.memory, self.at = memory, at
        self._fields = at - self._number("<i", at)
        self._size = self._number("<H", self._fields)

    def _number(self, kind: str, at: int) -> int:
        if at < 0:
            raise DataError(f"expected metadata of Arrow, found a reference to byte {at}")
        try:
            return int(struct.unpack_from(kind, self.memory, at)[0])
        except struct.error as error:
            raise DataError(f"expected metadata of Arrow, found a reference behind its end ({error})") from error

    def _place(self, number: int) -> int:
        """Where a field is; 0 if it is not there."""
        entry = 4 + 2 * number
        found = self._number("<H", self._fields + entry) if entry + 2 <= self._size else 0
        return self.at + found if found else 0

    def number(self, number: int, kind: str) -> int:
        """A field that is a number; 0 if it is not there."""
        place = self._place(number)
        return self._number(kind, place) if place else 0

    def table(self, number: int) -> Flat | None:
        """A field that is a table."""
        place = self._place(number)
        return Flat(self.memory, place + self._number("<I", place)) if place else None

    def rows(self, number: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A field that is a list of numbers, or of records, over the buffer's memory."""
        place = self._place(number)
        if not place:
            return np.zeros(0, dtype)
        place += self._number("<I", place)
        count = self._number("<I", place)
        if place + 4 + count * dtype.itemsize > len(self.memory):
            raise DataError(f"expected {count} entries in the metadata of Arrow, found it to end before")
        return np.frombuffer(self.memory, dtype, count, place + 4)

    @classmethod
    def root(cls, memory: Any) -> Flat:
        """The table that a buffer is made for."""
        (at,) = struct.unpack_from("<I", memory, 0) if len(memory) >= 4 else (-1,)
        return cls(memory, at)
