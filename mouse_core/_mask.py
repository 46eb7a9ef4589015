"""The field that says which steps of a window are there, and what the others become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._binding import FieldReader
from mouse_core._windows import Windows, WindowsPart
from mouse_core.errors import ConfigError
from mouse_core.spec import FieldSpec

MASK = "mask"

_LENGTHS = "lengths"


def remember_lengths(windows: Windows, lengths: npt.NDArray[np.int64]) -> None:
    """Note how many steps of each window are there, int64 ``[n]``."""
    windows.known[_LENGTHS] = lengths


def steps_there(windows: WindowsPart) -> npt.NDArray[np.bool_]:
    """Which steps of each window are there, bool ``[n, S]``."""
    lengths = windows.block.known[_LENGTHS][windows.begin : windows.end]
    there: npt.NDArray[np.bool_] = np.arange(windows.block.length) < lengths[:, None]
    return there


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

    def travel_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
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
    n, length = len(windows), windows.block.length
    lengths = windows.block.known[_LENGTHS][windows.begin : windows.end]
    if lengths.min(initial=length) == length:
        return
    missing = np.flatnonzero(~steps_there(windows))
    last = np.repeat(np.arange(n) * length + lengths - 1, length - lengths)
    for name, values in batch.items():
        if name != MASK:
            steps = values.reshape(n * length, *values.shape[2:])
            steps[missing] = steps[last] if fill is None else fill


def check_fill(fill: float, dtypes: Mapping[str, np.dtype[np.generic]]) -> None:
    """Raise ConfigError unless all dtypes hold ``fill``, by the fields' names."""
    for name, dtype in dtypes.items():
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.asarray(fill).astype(dtype)
        if dtype.kind != "f" and name != MASK and held != fill:
            raise ConfigError(f"pad: expected a number that {name} ({dtype}) holds, found {fill}")
