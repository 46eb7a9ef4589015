"""Samples runs of consecutive rows from all parts of the data, in bounded memory, and finds the lowest and highest
values of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

# Number of consecutive rows in a piece of the sample; a piece covers most events of a second or two.
PIECE = 128
_MOST_ROWS = 65_536
_MOST_NUMBERS = 4_000_000
_WIDEST = 1024


@dataclass(frozen=True)
class SampledColumn:
    """The sampled rows of a column, and its extremes over all rows.

    Args:
        name: The name of the column.
        values: The sampled rows, float64 ``[n, width]``.
        low, high: Lowest and highest values over all rows, float64 ``[width]``.
        low_at, high_at: The episode and step of the lowest and of the highest values, ``[width, 2]``; -1 if unknown.
        names: Names of the dimensions in the data, or None.
        continuous: Whether the column's numbers are floats, not integers.
    """

    name: str
    values: Floats
    low: Floats
    high: Floats
    low_at: Int64s
    high_at: Int64s
    names: Sequence[str] | None
    continuous: bool

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return int(self.values.shape[1])


@dataclass(frozen=True)
class Sampled:
    """A sample of rows from all parts of the data. The sample consists of pieces, which are runs of adjacent rows.

    Args:
        columns: The columns by name.
        row: The index of each sampled row among all rows, int64 ``[n]``.
        episode, step: Episode and step of each sampled row.
        rows: Number of rows in the data, sampled or not.
    """

    columns: Mapping[str, SampledColumn]
    row: Int64s
    episode: Int64s
    step: Int64s
    rows: int

    def thinned(self, most: int) -> Sampled:
        """Return a sample of about `most` rows, in complete pieces from all parts of the data."""
        stride = -(-len(self.row) // most)
        if stride <= 1:
            return self
        pieces = np.cumsum(np.diff(self.row // PIECE, prepend=-1) != 0) - 1
        kept = pieces % stride == 0
        columns = {name: replace(one, values=one.values[kept]) for name, one in self.columns.items()}
        return replace(self, columns=columns, row=self.row[kept], episode=self.episode[kept], step=self.step[kept])

    def where(self, place: int) -> tuple[int, int]:
        """Return the episode and the step of a sampled row."""
        return int(self.episode[place]), int(self.step[place])


class RowSample:
    """Samples every ``stride``-th piece, which is a run of adjacent rows. When the sample has too many pieces, the
    stride is doubled.
    """

    def __init__(self) -> None:
        self._stride = 1
        self._most = 0
        self._kept: list[dict[str, npt.NDArray[Any]]] = []
        self.extremes: dict[str, Extremes] = {}
        self._count = 0
        self._widths: dict[str, int] = {}
        self._continuous: dict[str, bool] = {}

    def add(
        self,
        numbers: Mapping[str, npt.NDArray[Any]],
        *,
        row: int,
        episode: Int64s,
        step: Int64s,
        real: Mapping[str, Bools],
        bounds: Mapping[str, tuple[Floats, Floats]],
    ) -> None:
        """Add rows.

        Args:
            numbers: Columns, ``[n, ...]`` each.
            row: The index of the first row.
            episode, step: Episode and step of each row.
            real: For each column with placeholder rows, a mask of the rows with real values.
            bounds: The lowest and the highest value of each dimension up to and including these rows, if known.
        """
        flat = {name: found.reshape(len(found), -1) for name, found in numbers.items()}
        flat = {name: found for name, found in flat.items() if self._takes(name, found)}
        for name, found in flat.items():
            extremes = self.extremes.setdefault(name, Extremes(found.shape[1]))
            extremes.add(found, episode, step, real.get(name), bounds.get(name))
        rows = np.arange(row, row + len(episode))
        kept = np.flatnonzero((rows // PIECE) % self._stride == 0)
        if not len(kept):
            return
        part = {name: _without(found[kept], real.get(name), kept) for name, found in flat.items()}
        self._kept.append({**part, " row": rows[kept], " episode": episode[kept], " step": step[kept]})
        self._count += len(kept)
        numbers_a_row = sum(self._widths.values()) + 3
        self._most = max(8 * PIECE, min(_MOST_ROWS, _MOST_NUMBERS // numbers_a_row))
        while self._count > self._most:
            self._stride *= 2
            stays = [(part[" row"] // PIECE) % self._stride == 0 for part in self._kept]
            thinned = [(part, some) for part, some in zip(self._kept, stays, strict=True) if some.any()]
            self._kept = [{name: found[some] for name, found in part.items()} for part, some in thinned]
            self._count = sum(len(part[" row"]) for part in self._kept)

    def _takes(self, name: str, found: npt.NDArray[Any]) -> bool:
        """Whether a column has numbers, but not too many per row, and these rows have as many as the column's first
        rows.
        """
        width = self._widths.setdefault(name, found.shape[1] if found.shape[1] <= _WIDEST else 0)
        self._continuous.setdefault(name, found.dtype.kind == "f")
        return 0 < width == int(found.shape[1])

    def result(self, rows: int, names: Mapping[str, Sequence[str]]) -> Sampled:
        """Return the sample. ``rows`` is the number of rows in the data; ``names`` maps a column to the names of its
        dimensions.
        """
        whole = [name for name in self._widths if self._kept and all(name in part for part in self._kept)]
        columns = {}
        for name in whole:
            values = np.concatenate([part[name] for part in self._kept]).astype(np.float64)
            said = names.get(name)
            columns[name] = SampledColumn(
                name,
                values,
                **vars(self.extremes[name]),
                names=said if said is not None and len(said) == values.shape[1] else None,
                continuous=self._continuous[name],
            )
        row, episode, step = (
            np.concatenate([part[name] for part in self._kept]) if self._kept else np.zeros(0, np.int64)
            for name in (" row", " episode", " step")
        )
        return Sampled(columns, row, episode, step, rows)


def _without(found: npt.NDArray[Any], real: Bools | None, kept: Int64s) -> npt.NDArray[Any]:
    """Return the numbers, with NaN in placeholder rows."""
    if real is None or real[kept].all():
        return found
    found = found.astype(np.float64)
    found[~real[kept]] = np.nan
    return found


class Extremes:
    """The lowest and the highest value of each dimension of a column, and the episode and step of each of these
    values.
    """

    def __init__(self, width: int) -> None:
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)
        self.low_at, self.high_at = np.full((width, 2), -1), np.full((width, 2), -1)

    def add(
        self,
        found: npt.NDArray[Any],
        episode: Int64s,
        step: Int64s,
        real: Bools | None,
        bounds: tuple[Floats, Floats] | None,
    ) -> None:
        """Add rows without placeholders; ``bounds`` has the extremes of these rows, if known."""
        if real is not None and not real.all():
            found, episode, step = found[real], episode[real], step[real]
        if not len(found):
            return
        low, high = bounds if bounds is not None else _bounds(found)
        for place in np.flatnonzero(low < self.low):
            at = int(np.argmax(found[:, place] == low[place]))
            self.low[place], self.low_at[place] = low[place], (episode[at], step[at])
        for place in np.flatnonzero(high > self.high):
            at = int(np.argmax(found[:, place] == high[place]))
            self.high[place], self.high_at[place] = high[place], (episode[at], step[at])


def _bounds(found: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the lowest and the highest finite number of each dimension."""
    low, high = found.min(axis=0), found.max(axis=0)
    if found.dtype.kind == "f" and not (np.isfinite(low).all() and np.isfinite(high).all()):
        there = np.isfinite(found)
        low = np.where(there, found, np.inf).min(axis=0)
        high = np.where(there, found, -np.inf).max(axis=0)
    return low, high


def quantiles(values: Floats, shares: tuple[float, ...]) -> list[Floats]:
    """Return quantiles of finite values, without interpolation.

    Each quantile is an array ``[width]``, with NaN for a dimension without finite values.
    """
    if not len(values):
        return [np.full(values.shape[1], np.nan) for _ in shares]
    there = np.isfinite(values)
    ordered = np.sort(np.where(there, values, np.inf), axis=0)
    count = there.sum(axis=0)
    found = []
    for share in shares:
        place = np.clip(np.round(share * (count - 1)).astype(int), 0, max(len(values) - 1, 0))
        chosen = ordered[place, np.arange(values.shape[1])]
        found.append(np.where(count > 0, chosen, np.nan))
    return found
