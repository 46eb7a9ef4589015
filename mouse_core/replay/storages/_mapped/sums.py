"""Checksums of the rows of a mapped buffer: a number for each row and file, in a file of their own.

They are made of many rows at a time, when these are flushed, so writing costs nothing more. The checksum of a row in a
file comes from its bytes there and from the row's number: an older row that is found in its place is not taken for it.

A row of 8 bytes has two words of 32 bits, 7 and 9, say. With the weights 3 and 5 they are ``3 * 7 + 5 * 9 = 66``, of
which the upper 32 of 64 bits count, plus the row's number times an odd number. The weights in use have 64 bits, so two
rows have the same checksum once in some 2 ** 32 times (Lemire and Kaser, "Strongly universal string hashing is fast",
2014). Long rows are hashed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core.errors import DataError, StateError
from mouse_core.replay.ground.memory import FieldBlock, RowMemory
from mouse_core.replay.ground.protocols import Slots
from mouse_core.replay.storages._mapped.values import MappedValues

Sums = npt.NDArray[np.uint64]

_WEIGHED = 512  # rows of up to so many bytes in a file are weighed, longer ones hashed
_TOGETHER = 1 << 19  # about so many bytes at a time, which stay close to the processor
_WEIGHTS = np.array([xxhash.xxh3_64_intdigest(bytes([word])) | 1 for word in range(_WEIGHED // 4)], np.uint64)
_OF_NUMBER = np.uint64(0x9E3779B97F4A7C15)
_UPPER = np.uint64(32)


class RowSums:
    """The checksums of rows in mapped files. The storage's lock is held around every call, and ``at`` comes first."""

    def __init__(self) -> None:
        self._unseen: npt.NDArray[np.bool_] | None = None  # what was there when the files were opened, and not read yet

    def at(self, files: Sequence[Path], memory: RowMemory, values: MappedValues, sums: Sums) -> None:
        """Be those of these rows.

        Args:
            files: The files of the rows.
            memory: The rows in them.
            values: What differs in length.
            sums: Memory for the checksums, uint64 ``[places, files]``, the last column for ``values`` where there are.
        """
        self._files, self._memory, self._values, self._sums = list(files), memory, values, sums

    def make(self, places: Slots, numbers: Slots) -> None:
        """Keep the checksums of the rows with these numbers at these places, int64 ``[n]``."""
        for some in self._pieces(places):
            self._sums[places[some]] = self._of(places[some], numbers[some])
        self._saw(places)

    def wrong(self, places: Slots, numbers: Slots) -> npt.NDArray[np.bool_]:
        """Which checksums are not those of the rows that are there, bool ``[n, files]``."""
        found = np.zeros((len(places), self._sums.shape[1]), np.bool_)
        for some in self._pieces(places):
            found[some] = self._sums[places[some]] != self._of(places[some], numbers[some])
        return found

    def watch(self, places: Slots, total: int) -> None:
        """From now on look at these, of ``total`` places, when they are read for the first time."""
        self._unseen = None
        if len(places):
            self._unseen = np.zeros(total, np.bool_)
            self._unseen[places] = True

    def check(self, places: Slots, numbers: Callable[[Slots], Slots], summed: int) -> None:
        """Raise StateError, naming row and file, where a row that is read for the first time is not what was written.

        Args:
            places: Of the rows that are read.
            numbers: Which rows lie in some places.
            summed: Rows from this number on have no checksums; they were written since the files were opened.
        """
        if self._unseen is None:
            return
        flat = places.reshape(-1)
        new = np.unique(flat[self._unseen[flat]])
        if not len(new):
            return
        known = new[numbers(new) < summed]
        rows, columns = np.nonzero(self.wrong(known, numbers(known)))
        if len(rows):
            file = dict(enumerate(self._files)).get(int(columns[0]), self._values.path)
            row = numbers(known[rows[:1]])[0]
            raise StateError(f"{file}: expected row {row} as it was written, found it, or its checksum, damaged")
        self._saw(new)

    def _saw(self, places: Slots) -> None:
        if self._unseen is not None:
            self._unseen[places] = False
            if not self._unseen.any():
                self._unseen = None

    def _pieces(self, places: Slots) -> list[slice]:
        step = max(1, _TOGETHER // sum(block.raw.itemsize for block, _ in self._memory.blocks))
        return [slice(begin, begin + step) for begin in range(0, len(places), step)]

    def _of(self, places: Slots, numbers: Slots) -> Sums:
        found = np.empty((len(places), self._sums.shape[1]), np.uint64)
        for column, (block, rows) in enumerate(self._memory.blocks):
            found[:, column] = _sums_of(block, rows, places)
        varying = self._memory.schema.varying
        if varying:
            # The values of a row one behind the other: where each of them lies is in its file of rows.
            refs = [self._memory.by_key[key][places] for key in varying]
            for row in range(len(places)):
                digest = xxhash.xxh3_64()
                with suppress(DataError):  # a place that is none, in a damaged row
                    for value in (value for column in refs for value in self._values.read(column[row])):
                        digest.update(value.data)
                found[row, -1] = digest.intdigest()
        found += (numbers.astype(np.uint64) * _OF_NUMBER)[:, None]
        return found


def _sums_of(block: FieldBlock, rows: npt.NDArray[np.void], places: Slots) -> Sums:
    """The checksums of the bytes of rows in one file, uint64 ``[n]``, without their numbers."""
    size = block.raw.itemsize
    # Rows that lie side by side are looked at where they lie.
    begin, end = int(places[0]), int(places[-1]) + 1
    follow = end - begin == len(places) and bool((np.diff(places) == 1).all())
    raw = rows[begin:end] if follow else rows[places]
    if size > _WEIGHED:
        every = raw.view(np.uint8).data
        hashes = [xxhash.xxh3_64_intdigest(every[at : at + size]) for at in range(0, size * len(places), size)]
        return np.array(hashes, np.uint64)
    taken = raw.view(np.uint8).reshape(-1, size)
    if size % 4:
        taken = np.pad(taken, ((0, 0), (0, -size % 4)))
    words = taken.view(np.uint32).astype(np.uint64)
    return (words @ _WEIGHTS[: words.shape[1]]) >> _UPPER
