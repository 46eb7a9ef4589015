"""What is counted of a field, block by block of rows that do not depend on how the rows came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_ml_float
from mouse_core.spec import FieldSpec
from mouse_core.statistics.moments import Floats, Moments
from mouse_core.statistics.quantiles import Sketch, Tally

# So many numbers make a block, about; a block has a power of two of rows. Behind the last whole block the rows are
# counted in so many pieces of one.
_BLOCK, _PIECES = 1 << 20, 16
# Of longer rows there are no quantiles, images aside.
MOST_PLACES = 1024


class Layout(NamedTuple):
    """How the numbers of a field lie in a row.

    Args:
        shape: That statistics have: of a step, or ``(C,)`` of an image.
        beside: How many numbers of a row go to each place: the pixels of an image, else 1.
        counted: "bytes", which are counted one by one, "numbers", which are sketched, or "" without quantiles.
    """

    shape: tuple[int, ...]
    beside: int
    counted: str

    @property
    def width(self) -> int:
        """How many places there are."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        fitting = max(64, _BLOCK // max(1, self.width * self.beside))
        return 1 << (fitting.bit_length() - 1)

    @property
    def piece_rows(self) -> int:
        """Rows of a piece of the block that is not whole yet."""
        return self.block_rows // _PIECES

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Rows that are counted together, from the beginning of a block or of a piece of the last one.

        Of 300 rows in blocks of 128 and pieces of 8 these are two blocks, five pieces from row 256 on, and 4 rows.
        """
        whole = end // self.block_rows * self.block_rows
        for first in range(begin, whole, self.block_rows):
            yield first, first + self.block_rows
        for first in range(max(begin, whole), end, self.piece_rows):
            yield first, min(first + self.piece_rows, end)


def layout_of(field: FieldSpec, stored: np.dtype[Any], *, quantiles: bool) -> Layout:
    """How a field is counted that is stored in some dtype."""
    image = field.image_shape
    shape = field.shape if image is None else image[2:]
    beside = 1 if image is None else image[0] * image[1]
    if image is not None and stored == np.uint8:
        return Layout(shape, beside, "bytes")  # pixels are counted one by one anyway
    few = int(np.prod(shape, dtype=np.int64)) <= MOST_PLACES
    return Layout(shape, beside, "numbers" if quantiles and few else "")


@dataclass
class Counted:
    """What was counted of some rows of a field.

    Args:
        moments: By place.
        spread: How the numbers are spread, by place; None where that is not known.
    """

    moments: Moments
    spread: Sequence[Sketch | Tally] | None

    @staticmethod
    def nothing(layout: Layout) -> Counted:
        """What is counted of no rows."""
        kinds: dict[str, Any] = {"bytes": Tally, "numbers": Sketch}
        spread = [kinds[layout.counted]() for _ in range(layout.width)] if layout.counted else None
        return Counted(Moments(layout.width), spread)

    def copy(self) -> Counted:
        """The same, to which more may be added."""
        spread = None if self.spread is None else [one.copy() for one in self.spread]
        return Counted(self.moments.copy(), spread)

    def merge(self, other: Counted) -> None:
        """Take in what was counted of other rows; how they are spread is known where it is of both."""
        self.moments.merge(other.moments)
        kinds = {type(one) for counted in (self, other) for one in counted.spread or ()}
        if self.spread is None or other.spread is None or len(kinds) > 1:
            self.spread = None
            return
        for mine, more in zip(self.spread, other.spread, strict=True):
            mine.merge(more)  # type: ignore[arg-type]  # of one kind

    def quantiles(self, shares: Sequence[float]) -> dict[float, Floats]:
        """Quantiles by place, float64 ``[width]`` each; none where it is not known how numbers are spread."""
        if not shares or not self.spread:
            return {}
        ends = zip(self.spread, self.moments.low.tolist(), self.moments.high.tolist(), strict=True)
        found = np.stack([one.quantiles(shares, low, high) for one, low, high in ends], axis=1)
        return dict(zip(shares, found, strict=True))


class PartialMoments(NamedTuple):
    """What was counted of a field.

    Args:
        layout: How.
        whole: Of its whole blocks, so that more rows can follow; None where that is not known.
        all: Of all rows; while they are counted, of those behind the last whole piece.
        is_image: Whether they are images.
        said_error: The share by which the ranks of those quantiles may be wrong.
        pieces: Of the whole pieces behind the whole blocks, so that few rows are read again; None: not known.
        said: Quantiles by share that a file says, where nothing else is known of how numbers are spread; None: none.
        has_count: Whether it is known how many numbers they were; a file may not say it.
    """

    layout: Layout
    whole: Counted | None
    all: Counted
    is_image: bool
    said: Mapping[float, Floats] | None = None
    has_count: bool = True
    pieces: Counted | None = None
    said_error: float = 0.0

    def with_stretch(self, found: Counted, rows: int) -> PartialMoments:
        """With what was counted of the next stretch, of so many rows."""
        known = {self.layout.block_rows: self.whole, self.layout.piece_rows: self.pieces}.get(rows)
        if known is None:
            return self._replace(all=found)
        known.merge(found)
        return self

    def summed(self) -> PartialMoments:
        """With what was counted of all rows."""
        total = Counted.nothing(self.layout) if self.whole is None else self.whole.copy()
        for one in (self.pieces, self.all):
            if one is not None:
                total.merge(one)
        return self._replace(all=total)


def count(layout: Layout, rows: npt.NDArray[Any]) -> Counted:
    """What is counted of a block of rows ``[n, ...]``."""
    made = Counted.nothing(layout)
    if not len(rows):
        return made
    numbers = np.ascontiguousarray(rows).reshape(-1, layout.width)
    if layout.counted == "bytes":
        tallies: Any = made.spread
        for place, tally in enumerate(tallies):
            tally.add(numbers[:, place])
        made.moments.add_counts(np.stack([tally.counts for tally in tallies]))
    else:
        made.moments.add(numbers)
        if made.spread is not None:
            _sketch(made.spread, numbers)
    made.moments.weigh(layout.beside)
    return made


def _sketch(spread: Sequence[Any], numbers: npt.NDArray[Any]) -> None:
    if is_ml_float(numbers.dtype) or numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    places = np.sort(np.ascontiguousarray(numbers.T), axis=1)
    for sketch, ordered in zip(spread, places, strict=True):
        if ordered.dtype.kind == "f":  # NaN comes last
            ordered = ordered[ordered.searchsorted(-np.inf, "right") : ordered.searchsorted(np.inf, "left")]
        sketch.add(ordered)
