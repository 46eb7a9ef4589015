"""The steps of windows that are not there, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows
from mouse_core.errors import ConfigError
from mouse_core.sampling.plan import MASK


class Absent:
    """The steps that are not there in the windows of a block, and the last before each that is.

    Windows of 4 steps with lengths 4, 2 and 3, in batches with bounds 0, 2, 3: of the first batch steps 6 and 7 are not
    there, for which step 5 stands, and of the second step 3, for which step 2 stands. Steps are counted from the first
    window of the batch. So ``steps`` is 6, 7, 3, ``last`` 5, 5, 2, and ``first``, of each batch and the end, 0, 2, 3.

    Args:
        windows: With lengths.
    """

    def __init__(self, windows: Windows) -> None:
        assert windows.lengths is not None
        lengths, length, bounds = windows.lengths, windows.length, np.asarray(windows.bounds)
        missing = length - lengths
        # The step behind the last one of each window, among those of its batch.
        end = (np.arange(len(lengths)) - np.repeat(bounds[:-1], np.diff(bounds))) * length + lengths
        before = np.concatenate([[0], np.cumsum(missing)])
        self.last = np.repeat(end - 1, missing)
        self.steps = np.arange(len(self.last)) + np.repeat(end - before[:-1], missing)
        self.first: list[int] = before[bounds].tolist()

    def fill(self, batch: Mapping[str, npt.NDArray[Any]], number: int, fill: float | None) -> None:
        """Overwrite these steps of batch ``number``, in every field but the mask.

        Args:
            batch: Arrays ``[n, S, ...]``, C-contiguous. What was read in these steps lies behind the episode.
            number: Which of the batches it is.
            fill: With what; None: with the last step that is there.
        """
        begin, end = self.first[number : number + 2]
        missing, last = self.steps[begin:end], self.last[begin:end]
        if not len(missing):
            return
        for name, values in batch.items():
            if name != MASK and values.size:
                rows = values.reshape(values.shape[0] * values.shape[1], -1)
                # A row as one item is copied five times as fast as its values.
                steps = as_items(rows)
                if fill is None:
                    steps[missing] = steps.take(last)
                else:
                    steps[missing] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]


def as_items(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows ``[n, k]`` as one item each, ``[n]``; the same memory."""
    return rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]


def check_fill(fill: float, dtypes: Mapping[str, np.dtype[np.generic]]) -> None:
    """Raise ConfigError unless all dtypes hold ``fill``, by the fields' names."""
    try:
        float(fill)
    except OverflowError:
        raise ConfigError("pad: expected a number that a float holds, found a larger one") from None
    for name, dtype in dtypes.items():
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.asarray(fill).astype(dtype)
        if dtype.kind != "f" and name != MASK and held != fill:
            raise ConfigError(f"pad: expected a number that {name} ({dtype}) holds, found {fill}")
