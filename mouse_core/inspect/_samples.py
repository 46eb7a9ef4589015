"""A few episodes to look at, kept while all rows pass by: the first one, and those of the highest and lowest return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.formats.columns.blocks import bytes_a_row

_HEAD = 160
_TAIL = 40
_MOST_BYTES = 12 << 20
_FEWEST = 8


@dataclass(frozen=True)
class Sample:
    """Rows of one episode.

    Args:
        label: Why it was chosen.
        number: Which episode it is, from 0.
        transitions: How many it has.
        total: Its return.
        rows: Its first rows, and its last.
        places: The number of each of these rows in the episode, ``[n]``.
    """

    label: str
    number: int
    transitions: int
    total: float
    rows: pa.Table
    places: npt.NDArray[np.int64]

    @property
    def gap(self) -> tuple[int, int] | None:
        """The first and the last row that was left out; None where all are here."""
        (jumps,) = np.nonzero(np.diff(self.places) != 1)
        return (int(self.places[jumps[0]]) + 1, int(self.places[jumps[0] + 1]) - 1) if len(jumps) else None


class _Kept:
    """The beginning and the end of an episode that may be of any length."""

    def __init__(self) -> None:
        self.count = 0
        self._most = 0
        self._head: list[pa.RecordBatch] = []
        self._tail: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch) -> None:
        # By the first rows alone: if later ones were smaller, a head that grew would take rows from behind a gap.
        self._most = self._most or _most_rows(rows)
        head, tail = self._most - self._most // 5, self._most // 5
        room = max(head - self.count, 0)
        if room and rows.num_rows:
            self._head.append(_copied(rows, 0, min(room, rows.num_rows)))
        if rows.num_rows > room:
            first = max(room, rows.num_rows - tail)
            self._tail.append(_copied(rows, first, rows.num_rows))
            while sum(part.num_rows for part in self._tail) - self._tail[0].num_rows >= tail:
                del self._tail[0]
        self.count += rows.num_rows

    def result(self) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """The rows, and the number of each in the episode."""
        head, tail = (sum(part.num_rows for part in parts) for parts in (self._head, self._tail))
        places = np.concatenate([np.arange(head), np.arange(self.count - tail, self.count)])
        return pa.Table.from_batches(self._head + self._tail), places


class Samples:
    """Chooses as it goes; holds a few episodes, and of those a bounded part."""

    def __init__(self) -> None:
        self._open = _Kept()
        self._number = 0
        self._first: Sample | None = None
        self._best: Sample | None = None
        self._worst: Sample | None = None

    def add(
        self,
        rows: pa.RecordBatch,
        begins: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        returns: npt.NDArray[np.float64],
    ) -> None:
        """Take in some rows.

        Args:
            rows: The rows.
            begins: Which of them begin an episode, as numbers.
            lengths, returns: Transitions and return of every episode that ended before one of these.
        """
        if not len(begins):
            self._open.add(rows)
            return
        edges = begins.tolist()
        pieces = list(pairwise(edges))
        if self._open.count or edges[0]:
            self._open.add(rows.slice(0, edges[0]))
        spans = ([None] if self._open.count else []) + pieces
        wanted = set()
        if len(returns):
            wanted = {0, int(np.nanargmax(returns)), int(np.nanargmin(returns))} if not np.isnan(returns).all() else {0}
        for place in sorted(wanted):
            span = spans[place]
            kept = self._open
            if span is not None:
                kept = _Kept()
                kept.add(rows.slice(span[0], span[1] - span[0]))
            self._offer(self._number + place, int(lengths[place]), float(returns[place]), kept)
        self._number += len(returns)
        self._open = _Kept()
        self._open.add(rows.slice(edges[-1]))

    def finish(self, length: int, total: float) -> list[Sample]:
        """The episodes chosen; ``length`` and ``total`` are those of the one that came last."""
        if self._open.count:
            self._offer(self._number, length, total, self._open)
        found: list[Sample] = []
        for label, sample in (
            ("first episode", self._first),
            ("highest return", self._best),
            ("lowest return", self._worst),
        ):
            if sample is None:
                continue
            same = next((place for place, other in enumerate(found) if other.number == sample.number), None)
            if same is None:
                found.append(replace(sample, label=label))
            else:
                found[same] = replace(found[same], label=f"{found[same].label}, {label}")
        return found

    def _offer(self, number: int, length: int, total: float, kept: _Kept) -> None:
        first = self._first is None
        best = self._best is None or total > self._best.total
        worst = self._worst is None or total < self._worst.total
        if not (first or best or worst):
            return
        rows, places = kept.result()
        sample = Sample("", number, length, total, rows, places)
        self._first = sample if first else self._first
        self._best = sample if best else self._best
        self._worst = sample if worst else self._worst


def _most_rows(rows: pa.RecordBatch) -> int:
    return int(np.clip(_MOST_BYTES // bytes_a_row(rows), _FEWEST, _HEAD + _TAIL))


def _copied(rows: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
    # A slice would keep the whole batch in memory. Not by take(): pyarrow's ends the process on slices of nested
    # fixed-size lists.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows.slice(first, end - first))
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
