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
from mouse_core.statistics.moments import Moments

# So many places of a vector are kept apart; wider rows are counted as a whole.
_MOST_PLACES = 1024
_MOST_TEXTS = 1000
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
        self.constant = self.whole = True
        self.histogram = Histogram() if histogram else None
        self.place_histograms: list[Histogram] = []
        self.places: Moments | None = None
        self._total = Moments(1)
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
        if self.whole and numbers.dtype.kind == "f":
            self.whole = bool((np.trunc(numbers) == numbers).all())
        self.low, self.high = _lower(self.low, low), _higher(self.high, high)
        flat = numbers.reshape(-1)
        if flat.dtype == np.uint8:
            # Pixels: there are only 256 values, and counting them is faster than adding them up.
            self._total.add_counts(np.bincount(flat, minlength=256)[None])
        else:
            self._total.add(flat[:, None])
        if self.histogram is not None:
            self.histogram.add(numbers)

    def _add_places(self, numbers: npt.NDArray[Any]) -> None:
        width = numbers.shape[1]
        if self.places is None:
            self.places = Moments(width)
            if self.histogram is not None and width <= _PLACE_HISTOGRAMS:
                self.place_histograms = [Histogram() for _ in range(width)]
        if len(self.places.count) != width:
            return
        self.places.add(np.ascontiguousarray(numbers))
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
        total, places = _by_place(self._total), None
        if self.places is not None:
            places = _by_place(self.places) | {"histograms": [_bars(histogram) for histogram in self.place_histograms]}
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
            mean=total["mean"][0],
            deviation=total["deviation"][0],
            constant=self.constant and self.rows > 1 and self._first_hash is not None,
            whole=self.whole and self.low is not None,
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


def _by_place(moments: Moments) -> dict[str, list[Any]]:
    """Lowest, highest, mean and deviation of every place; None where no number came."""
    found = {"low": moments.low, "high": moments.high, "mean": moments.mean, "deviation": moments.deviation}
    known = moments.count > 0
    return {name: np.where(known, values, np.array(None)).tolist() for name, values in found.items()}
