"""Where examples stand in rows, and how their values get there."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.types.example import RLExample

FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "advantage": np.float32,
    "generator_log_probs": np.float32,
}
"""What every example has, by name."""

Fields = dict[str, Sequence[npt.NDArray[Any]]]

# Bytes of what packed rows have for each token.
_BYTES = 22
# From here on NumPy has the system give large pages, and the copies themselves are what takes long.
_MANY_BYTES = 4 << 20


class Layout:
    """Where examples stand in rows. What stands side by side is copied as it is, and what is between is filled.

    Args:
        shape: Rows, and tokens of a row.
        row_of, begin_of: Where each example begins, ``[n]``.
        taken: How many of its tokens are there, ``[n]``.
        cut: Whether some have more.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        row_of: npt.NDArray[np.int64],
        begin_of: npt.NDArray[np.int64],
        taken: npt.NDArray[np.int64],
        cut: bool,
    ) -> None:
        self._shape = shape
        begins = row_of * shape[1] + begin_of
        # Where one without tokens stands, another may begin.
        order = np.argsort(2 * begins + (taken > 0), kind="stable")
        begins = begins[order]
        # Of each example in this order its tokens, and how much is to be filled behind it.
        counts = np.empty((len(order), 2), np.int64)
        counts[:, 0] = taken[order]
        ends = begins + counts[:, 0]
        counts[:-1, 1], counts[-1, 1] = begins[1:], shape[0] * shape[1]
        counts[:, 1] -= ends
        behind = counts[:, 1] > 0
        self._filled: list[int] = counts[behind, 1].tolist()
        self._gap_begins: list[int] = ends[behind].tolist()
        # What stands where: examples by their numbers, and the gaps, which are numbered on from there.
        sequence = np.empty(counts.shape, np.int64)
        sequence[:, 0], sequence[:, 1] = order, len(order) - 1 + np.cumsum(behind)
        pieces = sequence[counts > 0].tolist()
        self._pick = itemgetter(*pieces) if len(pieces) > 1 else tuple
        self._order, self._counts, self._taken, self._row_of = order, counts.reshape(-1), taken, row_of
        self._nothing: dict[tuple[Any, ...], list[npt.NDArray[Any]]] = {}
        self._cut = cut

    def place(self, values: Sequence[npt.NDArray[Any]], fill: float) -> npt.NDArray[Any]:
        """The first values of each example where it stands, and a fill elsewhere.

        Args:
            values: Of each example, ``[tokens, *shape]``.
            fill: A value.
        """
        inner, dtype = values[0].shape[1:], values[0].dtype
        if self._cut:
            values = [one[:size] for one, size in zip(values, self._taken.tolist(), strict=True)]
        shape = (*self._shape, *inner)
        pieces = self._pick([*values, *self._nothing_of(inner, dtype, fill)])
        return side_by_side(pieces, math.prod(shape) * dtype.itemsize).reshape(shape)

    def _nothing_of(self, inner: tuple[int, ...], dtype: np.dtype[Any], fill: float) -> list[npt.NDArray[Any]]:
        """What stands in the gaps."""
        key = (inner, dtype, float(fill))
        found = self._nothing.get(key)
        if found is None:
            widest = np.full((max(self._filled, default=0), *inner), fill, dtype)
            self._nothing[key] = found = [widest[:gap] for gap in self._filled]
        return found

    def place_all(self, fields: Fields, pad_token: int) -> Arrays:
        """What every example has where it stands, and where there is something."""
        # Memory that the system has just given costs as much as the copy. What has been given back once in one piece
        # malloc keeps: so the next batch takes up that of this one.
        np.empty(math.prod(self._shape) * _BYTES, np.uint8)
        arrays = {name: self.place(values, pad_token if name == "tokens" else 0) for name, values in fields.items()}
        return arrays | {"mask": self._repeat(np.ones_like(self._taken), np.bool_)}

    def segments(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The number of each example among those of its row, from 1, ``[n]``, and that of each token, 0 elsewhere."""
        rows = self._row_of[self._order]
        numbers = np.empty_like(rows)
        numbers[self._order] = np.arange(1, len(rows) + 1) - np.searchsorted(rows, rows)
        return numbers, self._repeat(numbers, np.int32)

    def positions(self, begin_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The place of each token in its example, and 0 elsewhere, int32."""
        places = self._repeat(begin_of, np.int32)
        np.subtract(np.arange(self._shape[1], dtype=np.int32), places, out=places)
        flat = places.reshape(-1)
        for begin, gap in zip(self._gap_begins, self._filled, strict=True):
            flat[begin : begin + gap] = 0
        return places

    def _repeat(self, numbers: npt.NDArray[np.int64], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """One number of each example for each of its tokens, and 0 elsewhere."""
        each = np.zeros(len(self._counts), dtype)
        each[::2] = numbers[self._order]
        return np.repeat(each, self._counts).reshape(self._shape)


def fields_of(examples: Sequence[RLExample]) -> Fields:
    """What every example has: by name that of each."""
    return {  # each attribute by its name, as that takes a third of what ``getattr`` does
        "tokens": [example.tokens for example in examples],
        "loss_mask": [example.loss_mask for example in examples],
        "advantage": [example.advantage for example in examples],
        "generator_log_probs": [example.generator_log_probs for example in examples],
    }


def side_by_side(arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> npt.NDArray[Any]:
    """Arrays of one dtype one behind the other, as of ``np.concatenate``.

    To join them as bytes costs less than half of what NumPy does for each of many short arrays.

    Args:
        arrays: They.
        nbytes: Of all of them.
    """
    if 0 < nbytes < _MANY_BYTES:
        pieces: Any = arrays
        try:
            return np.frombuffer(bytearray().join(pieces), arrays[0].dtype).reshape(-1, *arrays[0].shape[1:])
        except TypeError:
            pass  # one does not lie in one piece
    return np.concatenate(arrays)


def best_fit(sizes: npt.NDArray[np.int64], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each example its row, and where it begins there, each ``[n]``; those of a row by size, then in order."""
    order = np.argsort(-sizes, kind="stable")
    bits = len(sizes).bit_length()
    # What is left in each row, times 2**bits, and the row's number: the most of all, the others in order, and before
    # them what is too little for all. As examples become shorter it is mostly the most that takes one.
    most, rooms, fresh = -1, [-2], length << bits
    taken = []
    needs = (sizes[order] << bits).tolist()
    for needed in needs:
        if most < needed:
            room = fresh
            fresh += 1
        elif rooms[-1] < needed:
            room = most
            most = rooms.pop()
        else:
            room = rooms.pop(bisect_left(rooms, needed))
        taken.append(room)
        room -= needed
        if room > most:
            rooms.append(most)
            most = room
        elif room >= needs[-1]:
            insort(rooms, room)
    held = np.empty_like(sizes)
    held[order] = np.fromiter(taken, np.int64, len(taken))
    return held & ((1 << bits) - 1), length - (held >> bits)
