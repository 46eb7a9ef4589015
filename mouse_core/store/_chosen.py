"""Some of a snapshot's episodes as a snapshot: its segments share the memory of the others, and what is known of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError
from mouse_core.store._segments import Segment, SegmentView, are_too_short
from mouse_core.store.fields import SnapshotConfig
from mouse_core.store.snapshot import Snapshot

# Pieces of a column that are looked at together.
_LOOKED_AT = 64


class ChosenSegment(SegmentView):
    """Stretches of another segment's rows, in an order of their own; nothing is copied.

    Args:
        whole: The other segment.
        firsts, sizes: Where each stretch begins in it, and how many rows it has, at least one: int64 ``[n]``.
    """

    def __init__(self, whole: Segment, firsts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        super().__init__(whole, int(sizes.sum()))
        self.firsts, self.sizes, self.begins, self.has_indices = firsts, sizes, np.cumsum(sizes) - sizes, True

    @memo
    def indices(self) -> pa.Table | None:
        """Row numbers into the table, int64; made for whoever needs them one by one."""
        return pa.table({"indices": self.row_numbers(np.arange(self.num_rows))})

    @memo
    def origin(self) -> Any:
        """The corresponding rows of the origin of the underlying segment; None if it has no origin."""
        if self.whole.origin is None:
            return None
        stretches = [np.arange(first, first + size) for first, size in zip(self.firsts, self.sizes, strict=True)]
        return self.whole.origin.select(np.concatenate(stretches))

    @memo
    def runs(self) -> Stretches | None:
        """The selected stretches, cut at chunk boundaries; None if they are so short that row numbers take less."""
        whole = self.whole.runs if self.whole.has_indices else Stretches(self.whole.chunk_starts)
        if whole is None or are_too_short(len(self.sizes), self.num_rows):
            return None
        stretch, row, size, _ = cut_at_stretches(whole, self.firsts, self.sizes)
        return Stretches(np.concatenate([[0], np.cumsum(size)]), *whole.located(stretch, row), whole.longest)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The table's rows behind the segment's ``rows`` (int64 ``[n]``)."""
        stretch = self.begins.searchsorted(rows, side="right") - 1
        return self.whole.row_numbers(self.firsts[stretch] + rows - self.begins[stretch])

    def begins_as(self, other: Segment) -> bool:
        """Whether the rows of both are the same, as far as both have them: only the last stretch of one may be longer.

        Stretches (0, 5), (9, 3) begin as (0, 5), (9, 1) does, and as (0, 5), (9, 3), (20, 4); not as (0, 4), (9, 3).
        """
        if self is other or not isinstance(other, ChosenSegment):
            return self is other
        both = min(len(self.firsts), len(other.firsts))
        short, long = (self, other) if self.sizes[both - 1] <= other.sizes[both - 1] else (other, self)
        return (
            self.whole.begins_as(other.whole)
            and bool((self.firsts[:both] == other.firsts[:both]).all())
            and bool((self.sizes[: both - 1] == other.sizes[: both - 1]).all())
            and (len(short.firsts) == both or short.sizes[both - 1] == long.sizes[both - 1])
        )

    def has_value(self, name: str, rows: int) -> bool:
        """Whether some value among the first ``rows`` rows is not null."""
        return not rows or self.first_value(name, rows) is not None

    def take(self, row: int, count: int = 1) -> pa.Table:
        """Some rows that follow each other, as a table; by default one."""
        first, last = (self.begins.searchsorted([row, row + count - 1], side="right") - 1).tolist()
        lows = np.maximum(row - self.begins[first : last + 1], 0)
        highs = np.minimum(row + count - self.begins[first : last + 1], self.sizes[first : last + 1])
        parts = zip((self.firsts[first : last + 1] + lows).tolist(), (highs - lows).tolist(), strict=True)
        return pa.concat_tables([self.whole.take(begin, size) for begin, size in parts])

    def _find_first(self, name: str) -> int | None:
        if self.whole.first_value(name, self.whole.num_rows) is None:
            return None
        if self.whole.has_indices:
            return super()._find_first(name)
        # Not in the table, which may lie elsewhere and is more than these rows; most often the first row has one.
        part, begin = self.whole.part(name), 0
        cut = cut_at_stretches(Stretches(self.whole.chunk_starts), self.firsts, self.sizes)[:3]
        pieces = list(zip(*(some.tolist() for some in cut), strict=True))
        edges = [0, 1, *range(1 + _LOOKED_AT, len(pieces), _LOOKED_AT), len(pieces)]
        for first, end in pairwise(edges):
            for values in part.slices(pieces[first:end]):
                if values.null_count < len(values):
                    return begin + int(np.argmin(values.is_null()))
                begin += len(values)
        return None

    def _listed(self, row: int, count: int) -> list[int]:
        listed: list[int] = self.row_numbers(np.arange(row, row + count)).tolist()
        return listed

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenSegment, (self.whole, self.firsts, self.sizes)


class ChosenSnapshot(Snapshot):
    """Some of another snapshot's episodes, in their order.

    Args:
        segments: What holds their rows, and no others.
        config, budget, store_rows: As of the other snapshot.
        starts: The rows at which they begin, int64 ``[n]``, ascending, 0 first.
        root: The fingerprint of the rows that they were chosen from, which are all of a store's.
        of_root: Those of these rows at which they begin, int64 ``[n]``, through however many choices they went.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        config: SnapshotConfig,
        budget: DenseBudget | None,
        store_rows: Any,
        starts: npt.NDArray[np.int64],
        root: str,
        of_root: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(segments, config, None, budget, store_rows=store_rows)
        self.__dict__["episode_starts"] = starts
        self.root, self.of_root = root, of_root

    def of_rows(self, rows: Any) -> Snapshot:
        """These rows, if the store had so many; others are for its store to choose from."""
        if rows != self.store_rows:
            raise ConfigError(
                f"snapshot: expected the number of rows that its episodes were chosen from, {self.store_rows}, found "
                f"{rows!r:.200}; a loader over the view itself has others to choose from"
            )
        return self

    def with_columns(self, segments: Sequence[Segment], config: SnapshotConfig) -> Snapshot:
        """Return a snapshot of the same rows with other columns; see ``Snapshot``."""
        of_store = (self.budget, self.store_rows)
        return ChosenSnapshot(segments, config, *of_store, self.episode_starts, self.root, self.of_root)

    def grown_from(self, before: Snapshot) -> None:
        """Nothing is taken over but what segments know: episodes come in between, or are no longer chosen."""
        return None

    @memo
    def fingerprint(self) -> str:
        """A digest of which rows these are of what, and of what is computed beside them."""
        made = sorted(self.config.made.items())
        sizes = np.diff(self.episode_starts, append=self.num_rows)
        chosen = hashlib.sha256(self.root.encode() + self.of_root.tobytes() + sizes.tobytes()).hexdigest()[:32]
        return hashlib.sha256(json.dumps([chosen, made]).encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple[Any, ...]:
        of_store = (self.config, self.budget, self.store_rows)
        return ChosenSnapshot, (self.segments, *of_store, self.episode_starts, self.root, self.of_root)
