"""Missing steps of windows: the mask, padding, and packing (which leaves missing steps out)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Pieces, Windows, cut_at_stretches, in_rows, join_steps
from mouse_core._base.checks import is_whole
from mouse_core._base.memo import memo
from mouse_core._base.memory import ArrayMemory
from mouse_core.dtypes import convert
from mouse_core.errors import ConfigError
from mouse_core.sampling.lengths import sequence_fields, sequence_specs
from mouse_core.sampling.plan import MASK
from mouse_core.spec import FieldSpec

Batch = dict[str, npt.NDArray[Any]]
Int64s = npt.NDArray[np.int64]


class Absent:
    """The missing steps in the windows of a block, and the present steps whose values replace the missing steps.

    Example: three windows of 4 steps have the lengths 4, 2 and 3; the first two windows are one batch, and the third
    window is another batch. Counted from the first window, the steps 6, 7 and 11 are missing, and copies of the steps
    5, 5 and 10 replace these steps: ``missing`` is 6, 7, 11, ``source`` is 5, 5, 10, and ``first`` is 0, 8, 12.

    Args:
        length: Number of steps in a window.
        first: The first step of each batch, followed by the number of all steps.
        missing: The missing steps, in ascending order, int64 ``[m]``.
        target, source: ``target`` contains the steps that are replaced, in ascending order; ``source`` contains, for
            each of them, the step whose copy replaces it.
    """

    def __init__(self, length: int, first: Int64s, missing: Int64s, target: Int64s, source: Int64s) -> None:
        self.length, self.missing, self.target, self.source = length, missing, target, source
        self.first: list[int] = first.tolist()
        # The position in ``missing`` and ``target`` of the first entry of each batch, and the end.
        self._missing: list[int] = np.searchsorted(missing, first).tolist()
        self._replaced: list[int] = self._missing if target is missing else np.searchsorted(target, first).tolist()

    @classmethod
    def of(cls, windows: Windows) -> Absent:
        """Return the missing steps of windows with the given lengths. Copies of the last present step of a window
        replace the window's missing steps.
        """
        length = windows.length
        lengths = np.full(len(windows), length) if windows.lengths is None else windows.lengths
        absent = length - lengths
        end = np.arange(len(lengths)) * length + lengths  # the step after the last present step of each window
        source = np.repeat(end - 1, absent)
        missing = np.arange(len(source)) + np.repeat(end - (np.cumsum(absent) - absent), absent)
        return cls(length, np.asarray(windows.bounds) * length, missing, missing, source)

    def there(self, number: int, count: int = 1) -> npt.NDArray[np.bool_]:
        """Return the mask of present steps in the windows of the given batches, bool ``[n, S]``, as a new array."""
        begin = self.first[number]
        present = np.ones(self.first[number + count] - begin, np.bool_)
        present[self.missing[self._missing[number] : self._missing[number + count]] - begin] = False
        return present.reshape(-1, self.length)

    def fill(self, values: npt.NDArray[Any], number: int, fill: float | None, count: int = 1) -> None:
        """Overwrite the missing steps of a field in ``count`` batches; ``values`` is modified in place.

        Args:
            values: The windows of the batches in order, ``[n, S, ...]``, C-contiguous. Before the call, missing steps
                contain values from outside the episode.
            number: The index of the first batch in the block.
            fill: The value of missing steps; None: missing steps are overwritten with copies of the steps in
                ``source``.
            count: The number of batches.
        """
        begin, end = self._replaced[number], self._replaced[number + count]
        missing = self.missing[self._missing[number] : self._missing[number + count]]
        if not values.size or (begin == end and not len(missing)):
            return
        rows, first = values.reshape(values.shape[0] * values.shape[1], -1), self.first[number]
        # Copying a row as one item is five times as fast as copying its values.
        steps = as_items(rows)
        if begin < end and (fill is None or self.target is not self.missing):
            steps[self.target[begin:end] - first] = steps.take(self.source[begin:end] - first)
        if fill is not None:
            steps[missing - first] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]


def as_items(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of rows ``[n, k]`` with one item per row, ``[n]``; the view shares the memory of ``rows``."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def check_fill(fill: float, dtypes: Mapping[str, np.dtype[np.generic]]) -> None:
    """Raise ConfigError unless the dtypes of all fields can represent ``fill``."""
    try:
        float(fill)
    except OverflowError:
        raise ConfigError("pad: expected a number that a float can represent, found a larger number") from None
    for name, dtype in dtypes.items():
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.asarray(fill).astype(dtype)
        if dtype.kind != "f" and name != MASK and held != fill:
            raise ConfigError(f"pad: expected a number that {name} ({dtype}) can represent, found {fill}")


class PackedWindows(Windows):
    """The present steps of windows, concatenated; each step is treated as a window of one step.

    Pieces (runs of rows in one chunk) are found window by window. Example: two windows of 3 and 2 steps begin at the
    rows 10 and 40, each within one chunk, so there are two pieces, of 3 and 2 rows. The row of each step, here 10, 11,
    12, 40, 41, is computed only for fields that are read row by row.

    Args:
        whole: The windows; their ``lengths`` may be None.
    """

    def __init__(self, whole: Windows) -> None:
        self.whole = whole
        self.each = np.full(len(whole.rows), whole.length) if whole.lengths is None else whole.lengths
        before = np.concatenate([[0], np.cumsum(self.each)])
        self.bounds = before[np.asarray(whole.bounds)].tolist()
        self.length, self.stretches, self.lengths = 1, whole.stretches, None

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def planned(self) -> Windows:
        """See ``Windows.planned``."""
        return self.whole

    @property
    def nbytes(self) -> int:
        """The approximate size of the windows in bytes."""
        return self.whole.nbytes

    @memo
    def rows(self) -> npt.NDArray[np.int64]:
        """The index of the snapshot's row for each step, int64 ``[steps]``."""
        before = np.cumsum(self.each) - self.each
        rows: npt.NDArray[np.int64] = np.arange(len(self)) + np.repeat(self.whole.rows - before, self.each)
        return rows

    @memo
    def physical(self) -> npt.NDArray[np.int64] | None:
        """See ``Windows``."""
        return None if self.whole.physical is None else self.whole.physical[self.whole.there][:, None]

    @memo
    def pieces(self) -> Pieces:
        """See ``Windows.pieces``."""
        whole = self.whole
        if whole.physical is None:
            stretch, row, size, window = cut_at_stretches(whole.stretches, whole.rows, self.each)
            chunk, row = whole.stretches.located(stretch, row)
        else:
            steps, there = whole.steps(np.arange(len(whole))), whole.there.reshape(-1)
            there_only = type(steps)(*(part[there] for part in steps))
            chunk, row, size, window = join_steps(there_only, whole.length)
        return in_rows(chunk, row, size, window, whole.bounds)


@dataclass(frozen=True, eq=False)
class Packing:
    """The packing of a batch's windows: the present steps of all windows are concatenated.

    Args:
        capacity: The number of rows in a batch, including padding rows of zeros; None: the number of present steps.
        from_steps: Whether the input batches contain only present steps, ``[T, 1, ...]``, instead of all steps, ``[b,
            S, ...]``.
        replaced: A dict from each dtype that a framework lacks to the dtype that replaces it.
        memory: The object that allocates large new arrays.
    """

    capacity: int | None
    from_steps: bool
    replaced: Mapping[np.dtype[Any], np.dtype[Any]] = field(default_factory=dict)
    memory: ArrayMemory = field(default_factory=ArrayMemory, repr=False)

    @property
    def identity(self) -> list[Any]:
        """Return the values that identify the packing in the fingerprint. The padding is not included, because it
        depends on the number of shards.
        """
        return ["packed"]

    def spec(self, fields: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
        """Return the fields of a packed batch.

        Raises:
            ConfigError: A stored field has the name of a field that packing adds.
        """
        made = sequence_specs(masked=self.capacity is not None)
        for name in made.keys() & fields.keys() - {MASK}:
            raise ConfigError(
                f"packed: expected a store without a field {name!r}, since batches get this field, found this field"
            )
        made = {name: one.replace(dtype=self._held(one.dtype)) for name, one in made.items()}
        return {name: one for name, one in fields.items() if name != MASK} | made

    def _held(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return self.replaced.get(dtype, dtype)

    def rows(self, lengths: npt.NDArray[np.int64]) -> int:
        """Return the number of rows of a packed batch, for windows of the given lengths."""
        return int(lengths.sum()) if self.capacity is None else self.capacity

    def __call__(self, batch: Any, lengths: npt.NDArray[np.int64], out: Any) -> Any:
        """Pack a batch of windows, or each of its views.

        Args:
            batch: The gathered batch after all stages.
            lengths: Number of present steps in each window, int64 ``[b]``; 0 for a window of another shard.
            out: A dict from field to the array to which the result is written, or a sequence of such dicts, one for
                each view; None: new arrays.

        Raises:
            DataError: The number of rows exceeds the capacity.
        """
        if not isinstance(batch, tuple):
            return self._packed(batch, lengths, out)
        targets = [None] * len(batch) if out is None else out
        return tuple(self._packed(view, lengths, target) for view, target in zip(batch, targets, strict=True))

    def _packed(self, view: Batch, lengths: npt.NDArray[np.int64], out: Mapping[str, npt.NDArray[Any]] | None) -> Batch:
        made = sequence_fields(lengths, self.capacity)
        if self.replaced:
            made = {name: convert(values, self._held(values.dtype)) for name, values in made.items()}
        total, rows = int(lengths.sum()), self.rows(lengths)
        there: Any = None
        batch: Batch = {}
        for name, values in view.items():
            if name == MASK:
                continue
            if self.from_steps:
                steps = values.reshape(total, *values.shape[2:])
            else:
                there = np.arange(values.shape[1]) < lengths[:, None] if there is None else there
                steps = values[there]
            if out is None and rows == total:
                batch[name] = steps
                continue
            shape = (rows, *steps.shape[1:])
            batch[name] = self.memory.empty(shape, steps.dtype) if out is None else out[name]
            batch[name][:total] = steps
            batch[name][total:] = 0
        if out is None:
            return batch | made
        for name, values in made.items():
            out[name][...] = values
        return {name: out[name] for name in (*batch, *made)}


def check_packed(packed: Any) -> int | None:
    """Return the requested capacity, or None if no capacity is requested; raise ConfigError if ``packed`` is
    invalid."""
    if packed is True:
        return None
    if not is_whole(packed) or packed < 1:
        raise ConfigError(
            f"packed: expected True, False or the number of rows to pad each batch to, found {packed!r:.80}"
        )
    return int(packed)
