"""What is in a column: counted batch by batch, in memory that does not grow with the data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.formats.columns.values import UInt64s, Values
from mouse_core.inspect._histogram import Histogram
from mouse_core.inspect.report import ColumnReport

# So many places of a vector are kept apart; wider rows are counted as a whole.
_MOST_PLACES = 1024
_MOST_TEXTS = 1000
_PIECE = 1 << 20
_PLACE_HISTOGRAMS = 16
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


class ColumnCounter:
    """Statistics of one column.

    Args:
        name: The column's name.
        data_type: Its Arrow type.
        histogram: Whether to keep a histogram of all values, and one for each place of a short vector.
    """

    def __init__(self, name: str, data_type: pa.DataType, *, histogram: bool) -> None:
        self.name = name
        self.data_type = data_type
        self.rows = self.nulls = self.nans = self.infinite = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self.least_length: int | None = None
        self.most_length: int | None = None
        self.texts: Counter[str] = Counter()
        self.texts_complete = True
        self.constant = True
        self.histogram = Histogram() if histogram else None
        self.place_histograms: list[Histogram] = []
        self.places: _Places | None = None
        self._total = _Moments(1)
        self._first_hash: int | None = None
        self._kind = "other"
        self._value_type = ""

    def add(self, values: Values, hashes: UInt64s | None) -> None:
        """Count some rows."""
        self._kind, self._value_type = values.kind.kind, values.kind.value_type
        self.rows += values.rows
        self.nulls += values.nulls
        if not values.rows:
            return
        if hashes is not None and self.constant:
            if self._first_hash is None:
                self._first_hash = int(hashes[0])
            self.constant = bool((hashes == np.uint64(self._first_hash)).all())
        if values.numbers is not None:
            self._add_numbers(values)
        elif values.kind.kind != "image":
            self._add_texts(values.array)

    def _add_numbers(self, values: Values) -> None:
        numbers = values.numbers
        assert numbers is not None
        if values.shape is not None:
            self.shapes.add(values.shape)
            size = int(np.prod(values.shape, dtype=np.int64))
            self._add_length(size, size)
        elif values.lengths is not None:
            there = values.lengths if values.present is None else values.lengths[values.present]
            if len(there):
                self._add_length(int(there.min()), int(there.max()))
        self._add_finite(self._finite(numbers))
        if numbers.size and values.shape is not None and len(values.shape) == 1 and values.shape[0] <= _MOST_PLACES:
            self._add_places(numbers)

    def _finite(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers without NaN and infinite ones, which are counted."""
        if numbers.dtype.kind != "f":
            return numbers
        finite = np.isfinite(numbers)
        if finite.all():
            return numbers
        nans = int(np.isnan(numbers).sum())
        self.nans += nans
        self.infinite += int((~finite).sum()) - nans
        return np.asarray(numbers[finite])

    def _add_finite(self, numbers: npt.NDArray[Any]) -> None:
        if not numbers.size:
            return
        low, high = numbers.min().item(), numbers.max().item()
        self.low, self.high = _lower(self.low, low), _higher(self.high, high)
        flat = numbers.reshape(-1)
        for first in range(0, flat.size, _PIECE):  # in pieces: they are widened to float64
            self._total.add(flat[first : first + _PIECE, None])
        if self.histogram is not None:
            self.histogram.add(numbers)

    def _add_places(self, numbers: npt.NDArray[Any]) -> None:
        width = numbers.shape[1]
        if self.places is None:
            self.places = _Places(width)
            if self.histogram is not None and width <= _PLACE_HISTOGRAMS:
                self.place_histograms = [Histogram() for _ in range(width)]
        if self.places.width != width:
            return
        self.places.add(numbers)
        for place, histogram in enumerate(self.place_histograms):
            column = numbers[:, place]
            histogram.add(column[np.isfinite(column)] if column.dtype.kind == "f" else column)

    def _add_length(self, least: int, most: int) -> None:
        self.least_length, self.most_length = _lower(self.least_length, least), _higher(self.most_length, most)

    def _add_texts(self, array: pa.Array) -> None:
        # Values of no type that can be measured are counted by what they look like, as long as there are few.
        if not self.texts_complete:
            return
        counts = None if pa.types.is_nested(array.type) else array.value_counts()
        if counts is not None and len(counts) <= _MOST_TEXTS:
            for entry in counts.to_pylist():
                if entry["values"] is not None:
                    self.texts[str(entry["values"])[:200]] += entry["counts"]
        self.texts_complete = counts is not None and max(len(counts), len(self.texts)) <= _MOST_TEXTS

    def result(self) -> ColumnReport:
        """What was counted so far."""
        if len(self.shapes) == 1 and self.least_length == self.most_length:
            shape: list[int] | str | None = list(next(iter(self.shapes)))
        elif self.least_length is not None and self._kind == "list":
            shape = f"{self.least_length} to {self.most_length} values"
        else:
            shape = [] if self._kind == "scalar" else None
        named = self._kind if self._kind in ("image", "null") else str(self.data_type)
        places = None
        if self.places is not None:
            places = self.places.result() | {"histograms": [_bars(histogram) for histogram in self.place_histograms]}
        return ColumnReport(
            name=self.name,
            dtype=_NAMES.get(self._value_type, self._value_type) or named,
            shape=shape,
            rows=self.rows,
            nulls=self.nulls,
            nans=self.nans,
            infinite=self.infinite,
            low=self.low,
            high=self.high,
            mean=self._total.mean_of(0),
            deviation=self._total.deviation_of(0),
            constant=self.constant and self.rows > 1 and self._first_hash is not None,
            values=dict(self.texts.most_common(20)) if self.texts_complete and self.texts else None,
            histogram=_bars(self.histogram) if self.histogram is not None else None,
            places=places,
        )


def _lower(one: Any, other: Any) -> Any:
    return other if one is None else min(one, other)


def _higher(one: Any, other: Any) -> Any:
    return other if one is None else max(one, other)


def _bars(histogram: Histogram) -> dict[str, list[Any]]:
    edges, counts = histogram.bars()
    return {"edges": edges, "counts": counts}


class _Moments:
    """Mean and variance of numbers that come in batches (Chan, Golub and LeVeque, 1979).

    Args:
        width: How many there are in a row, each of which is averaged apart.
    """

    def __init__(self, width: int) -> None:
        self.count = np.zeros(width, np.int64)
        self.mean = np.zeros(width)
        self.squares = np.zeros(width)

    def add(self, numbers: npt.NDArray[Any], there: npt.NDArray[np.bool_] | None = None) -> None:
        """Take in ``[n, width]``; ``there`` says which of them count."""
        if there is None and numbers.dtype == np.uint8 and numbers.shape[1] == 1:
            # Pixels: there are only 256 values, and counting them is faster than adding them up.
            often = np.bincount(numbers.reshape(-1), minlength=256)
            values = np.arange(256.0)
            count = np.full(1, len(numbers), np.int64)
            mean = np.full(1, (often * values).sum() / len(numbers))
            squares = np.full(1, (often * (values - mean) ** 2).sum())
        elif there is None:
            count = np.full(self.count.shape, len(numbers), np.int64)
            mean = numbers.mean(axis=0, dtype=np.float64)
            squares = numbers.var(axis=0, dtype=np.float64) * count
        else:
            count = there.sum(axis=0)
            known = np.where(there, numbers, 0).astype(np.float64)
            mean = known.sum(axis=0) / np.maximum(count, 1)
            squares = (np.where(there, known - mean, 0) ** 2).sum(axis=0)
        total = self.count + count
        share = count / np.maximum(total, 1)
        change = mean - self.mean
        self.squares += squares + change**2 * self.count * share
        self.mean += change * share
        self.count = total

    def mean_of(self, place: int) -> float | None:
        return float(self.mean[place]) if self.count[place] else None

    def deviation_of(self, place: int) -> float | None:
        return float(np.sqrt(self.squares[place] / self.count[place])) if self.count[place] else None


class _Places:
    """The same for every place of a vector.

    Args:
        width: How many there are.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.low = np.full(width, np.inf)
        self.high = np.full(width, -np.inf)
        self.moments = _Moments(width)

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Take in ``[n, width]``."""
        there = np.isfinite(numbers) if numbers.dtype.kind == "f" else None
        if there is None or there.all():
            there, low, high = None, numbers, numbers
        else:
            low, high = (np.where(there, numbers, unknown) for unknown in (np.inf, -np.inf))
        self.low = np.minimum(self.low, low.min(axis=0))
        self.high = np.maximum(self.high, high.max(axis=0))
        self.moments.add(numbers, there)

    def result(self) -> dict[str, list[Any]]:
        known = self.moments.count > 0
        extremes = {"low": self.low, "high": self.high}
        return {
            **{name: np.where(known, values, np.array(None)).tolist() for name, values in extremes.items()},
            "mean": [self.moments.mean_of(place) for place in range(self.width)],
            "deviation": [self.moments.deviation_of(place) for place in range(self.width)],
        }
