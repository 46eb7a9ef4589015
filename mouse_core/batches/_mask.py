"""The field that says which steps of a window are there, and what the others become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows, WindowsPart
from mouse_core.errors import ConfigError
from mouse_core.spec import FieldSpec
from mouse_core.store._fields import FieldReader

MASK = "mask"

_LENGTHS, _THERE, _REST = "lengths", "there", "rest"


def remember_lengths(windows: Windows, lengths: npt.NDArray[np.int64]) -> None:
    """Note how many steps of each window are there, int64 ``[n]``."""
    windows.known[_LENGTHS] = lengths


def steps_there(windows: WindowsPart) -> npt.NDArray[np.bool_]:
    """Which steps of each window are there, bool ``[n, S]``."""
    known = windows.block.known
    if _THERE not in known:
        known[_THERE] = np.arange(windows.block.length) < known[_LENGTHS][:, None]
    there: npt.NDArray[np.bool_] = known[_THERE][windows.begin : windows.end]
    return there


class _Rest:
    """The steps that are not there in the windows of a block, and the last before each that is, int64 ``[m]``.

    Both are counted from the first window of the batch; ``first`` is the first of each batch, and the end.
    """

    def __init__(self, windows: Windows) -> None:
        lengths, length = windows.known[_LENGTHS], windows.length
        missing = length - lengths
        bounds = np.asarray(windows.bounds)
        # The step behind the last one of each window, among those of its batch.
        end = (np.arange(len(lengths)) - np.repeat(bounds[:-1], np.diff(bounds))) * length + lengths
        before = np.concatenate([[0], np.cumsum(missing)])
        self.last = np.repeat(end - 1, missing)
        self.steps = np.arange(len(self.last)) + np.repeat(end - before[:-1], missing)
        self.first: list[int] = before[bounds].tolist()
        self.nbytes = self.last.nbytes + self.steps.nbytes


def _rest_of(windows: WindowsPart) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    known = windows.block.known
    rest: _Rest | None = known.get(_REST)
    if rest is None:
        rest = known[_REST] = _Rest(windows.block)
    begin, end = rest.first[windows.number : windows.number + 2]
    return rest.steps[begin:end], rest.last[begin:end]


class _NoColumn:
    """In place of a column that values are read from."""

    is_plain = False


class MaskReader(FieldReader):
    """Gives the field ``mask`` of windows that were located with their lengths."""

    def __init__(self) -> None:
        boolean: np.dtype[np.generic] = np.dtype(np.bool_)
        self.spec = FieldSpec(MASK, boolean, (), "", boolean)
        self.column: Any = _NoColumn()
        self.highest = None

    @property
    def is_bounded(self) -> bool:
        """Never."""
        return False

    @property
    def identity(self) -> list[Any]:
        """Its name; the rest the sampler says."""
        return [MASK]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """Every dtype holds 0 and 1."""

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """Booleans."""
        return self.spec.dtype

    def read(
        self,
        windows: WindowsPart,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[np.generic] | None = None,
        _: Any = None,
    ) -> npt.NDArray[Any]:
        """Which steps are there, ``[n, S]``; see ``FieldReader.read``."""
        there = steps_there(windows)
        if out is None:
            return there.astype(dtype)
        out[...] = there
        return out

    def check(self, values: npt.NDArray[Any], windows: WindowsPart) -> None:
        """Nothing can be wrong."""


def fill_rest(batch: Mapping[str, npt.NDArray[Any]], windows: WindowsPart, fill: float | None) -> None:
    """Overwrite the steps that are not there, in every field but the mask.

    Args:
        batch: Arrays ``[n, S, ...]``, C-contiguous. What was read in these steps lies behind the episode.
        windows: The windows.
        fill: With what; None: with the last step that is there.
    """
    missing, last = _rest_of(windows)
    if not len(missing):
        return
    for name, values in batch.items():
        if name != MASK and values.size:
            rows = values.reshape(len(windows) * windows.block.length, -1)
            # A row as one item is copied five times as fast as its values.
            steps = _as_items(rows)
            if fill is None:
                steps[missing] = steps.take(last)
            else:
                steps[missing] = _as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]


def _as_items(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows ``[n, k]`` as one item each, ``[n]``; the same memory."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def check_fill(fill: float, dtypes: Mapping[str, np.dtype[np.generic]]) -> None:
    """Raise ConfigError unless all dtypes hold ``fill``, by the fields' names."""
    for name, dtype in dtypes.items():
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.asarray(fill).astype(dtype)
        if dtype.kind != "f" and name != MASK and held != fill:
            raise ConfigError(f"pad: expected a number that {name} ({dtype}) holds, found {fill}")
