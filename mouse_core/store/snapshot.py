"""Snapshots: immutable views of a store, from which windows are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column import Growth
from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Stretches, Windows
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.episodes import EpisodeIndex, restarts, step_begins
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Alignment, Field, Layout, Spec, check_choice, codes_called
from mouse_core.store._segments import TASKS, Segment, blocks, continues, growth_of, is_single, run_starts
from mouse_core.store.fields import FieldReader, SnapshotConfig, bind_fields, kinds_of, rows_without, stored_types

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata

Int64s = npt.NDArray[np.int64]
Read = Callable[[str, Int64s, int], npt.NDArray[Any]]

# Length and number of the windows that are read together. Fewer windows if their rows span more bytes of a file,
# because a record batch may hold all columns, and must still be in memory when the next column is read.
_LENGTH = 4096
_WINDOWS = 64
_BYTES = 16 << 20


class _Found(NamedTuple):
    """The episode boundaries and times of a segment.

    Args:
        starts: The rows that begin an episode according to the segment's own values, int64 ``[n]``.
        ended: Whether the last row ends an episode.
        first, last: The times of the first and last row; -1 if unknown.
    """

    starts: Int64s
    ended: bool
    first: int
    last: int


# Cached by segment: a segment never changes, and a growing store keeps its segments.
_known: WeakKeyDictionary[Segment, dict[tuple[int, ...], _Found]] = WeakKeyDictionary()
_lock = ProcessLock()


def episode_starts(
    segments: Sequence[Segment], rows: int, fields: Collection[str], read: Read, alive: tuple[int, ...] = (0,)
) -> Int64s:
    """Return the rows at which episodes begin, int64 ``[n]``, ascending, 0 first.

    An episode begins after a row whose ``done`` ends an episode. If times are known, an episode also begins at a row
    whose time is 0 or not larger than the time of the previous row. By these rules, an interrupted episode ends where
    the next episode begins. An episode also begins at the first row of a separately loaded dataset, and at the first
    row after the dataset, unless the time continues. If rows have neither ``done`` nor ``time``, such as prompts and
    images, each row is an episode.

    Args:
        segments: The segments that hold the rows.
        rows: Number of leading rows to use.
        fields: Names of the existing fields; only ``done`` and ``time`` are used.
        read: Function that returns the values of a field in windows of a given length that begin at given rows,
            concatenated.
        alive: The codes of ``done`` that do not end an episode.

    Raises:
        DataError: A value is outside the bounds of its field.
    """
    if "done" not in fields and "time" not in fields:
        return np.arange(rows)
    parts = [np.zeros(1, np.int64)]
    begin, before, recording = 0, None, None
    if "done" not in fields:
        alive = ()
    for segment in segments:
        end = min(begin + segment.num_rows, rows)
        found = _look(segment, begin, end, fields, read, alive)
        if before is not None and _is_cut(before, found, recording is segment.recorded.recording):
            parts.append(np.array([begin]))
        parts.append(found.starts + begin)
        begin, before, recording = end, found, segment.recorded.recording
    return np.concatenate(parts)


def _look(
    segment: Segment, begin: int, end: int, fields: Collection[str], read: Read, alive: tuple[int, ...]
) -> _Found:
    """Read the episode boundaries of the rows ``begin .. end - 1``, which are all rows or the first rows of a
    segment.
    """
    whole = end - begin == segment.num_rows
    segment = segment.recorded
    with _lock:
        found = _known.get(segment, {}).get(alive) if whole else None
    if found is not None:
        return found
    starts: list[Int64s] = []
    ended, first, last = False, -1, -1
    row, most = begin, _rows_at_a_time(segment)
    while row < end:
        length = min(_LENGTH, most, end - row)
        firsts = np.arange(row, min(end - length, row + (max(1, most // length) - 1) * length) + 1, length)
        codes = read("done", firsts, length) if alive else np.zeros(len(firsts) * length, np.int64)
        done = codes != 0 if alive in ((0,), ()) else ~np.isin(codes, alive)
        times = read("time", firsts, length) if "time" in fields else None
        breaks = step_begins(done, ended, times=times, time_before=last)
        ended = bool(done[-1])
        if times is not None:
            first, last = int(times[0]) if row == begin else first, int(times[-1])
        if row == begin:
            breaks[0] = False
        starts.append(np.nonzero(breaks)[0] + (row - begin))
        row += len(firsts) * length
    found = _Found(np.concatenate(starts), ended, first, last)
    if whole:
        with _lock:
            _known.setdefault(segment, {})[alive] = found
    return found


def _rows_at_a_time(segment: Segment) -> int:
    """Return how many rows to read together, at most 262,144. For example, if a row has 20 KB, 838 rows are read
    together.
    """
    each = segment.sealed_bytes // max(1, segment.num_rows)
    return min(_WINDOWS * _LENGTH, max(1, _BYTES // each)) if each else _WINDOWS * _LENGTH


def _is_cut(before: _Found, after: _Found, same_recording: bool) -> bool:
    """Return whether an episode begins where one segment follows another."""
    follows = same_recording or 0 <= before.last == after.first - 1
    return not follows or before.ended or bool(restarts(before.last, after.first))


_SAMPLED_ROWS = 8
Sampler = TypeVar("Sampler")


class Snapshot:
    """An immutable view of a store's rows. Later changes of the store do not affect a snapshot.

    ``Store.snapshot()`` creates a snapshot. Reading is thread-safe. A pickled snapshot contains the paths of datasets
    on disk, and the rows that exist only in memory.

    Args:
        segments: The segments that hold the rows.
        config: The configuration of the store.
        num_rows: Number of leading rows of the segments that belong to the snapshot; None: all.
        budget: The memory limit for dense copies.
        store_rows: The number of store rows from which this snapshot was taken; the snapshot of a view selects some of
            these rows. A loader's state contains this number, from which ``Store.snapshot(store_rows)`` creates the
            same snapshot again. None means ``num_rows``.

    Raises:
        ConfigError: The store has fewer rows.
    """

    if_empty = "store: expected rows, found an empty store"
    """Error message of an operation that needs rows, if the store is empty."""

    #: See ``Store.has_shares``.
    has_shares = False

    def __init__(
        self,
        segments: Sequence[Segment],
        config: SnapshotConfig,
        num_rows: int | None = None,
        budget: DenseBudget | None = None,
        *,
        store_rows: int | None = None,
    ) -> None:
        total = sum(segment.num_rows for segment in segments)
        self.num_rows = total if num_rows is None else num_rows
        if not 0 <= self.num_rows <= total:
            raise ConfigError(f"snapshot: expected a number of rows in 0..{total}, found {num_rows}")
        # Later rows of the segments must not have any effect, not even on a shape.
        ends = np.cumsum([segment.num_rows for segment in segments]).tolist()
        self.segments = tuple(
            segment
            for segment, end in zip(segments, ends, strict=True)
            if segment.num_rows and end - segment.num_rows < self.num_rows
        )
        self.config = config
        self.budget = budget
        self.store_rows = self.num_rows if store_rows is None else store_rows

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Snapshot(num_rows={self.num_rows}, fields={list(self.readers)}, alignment={self.alignment!r})"

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self.config.alignment

    def of_rows(self, rows: Any) -> Snapshot:
        """Return a snapshot of the store's first ``rows`` rows, created from this snapshot.

        Raises:
            ConfigError: The store has fewer rows.
        """
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
            raise ConfigError(f"snapshot: expected a number of rows, found {rows!r:.200}")
        if rows == self.store_rows:
            return self
        if self.config.made:
            made, known = list(self.config.made), self.store_rows
            raise ConfigError(f"snapshot: expected {known} rows, for which {made} were computed, found {rows!r:.200}")
        return Snapshot(self.segments, self.config, int(rows), budget=self.budget)

    def with_columns(self, segments: Sequence[Segment], config: SnapshotConfig) -> Snapshot:
        """Return a snapshot of the same rows with other columns; ``segments`` must have the same numbers of rows as the
        present segments.
        """
        return Snapshot(segments, config, self.num_rows, self.budget, store_rows=self.store_rows)

    def delivering(self, layout: Layout | None = None, *, transitions: bool = False) -> Snapshot:
        """Return a snapshot of the same rows with the fields of a layout; with None, the current layout is kept.

        Args:
            layout: "stored" or "mouse".
            transitions: Whether to add a field ``next_<name>`` for each observation, with the value of the next row.

        Raises:
            ConfigError: The layout is unknown.
        """
        config = self.config
        if layout not in (None, config.layout):
            check_choice("layout", layout, get_args(Layout))
            config = config.in_layout(layout, stored_types(self.segments))
        config = config.with_next() if transitions else config
        return self if config is self.config else self.with_columns(self.segments, config)

    def sampled_by(self, sampler: Sampler) -> Sampler:
        """Return the sampler for this snapshot. If all rows come from one store, this is ``sampler`` itself."""
        return sampler

    def lacking(self, reader: FieldReader) -> str | None:
        """Return a text that names a dataset in which a field has no value; None if the field has values in every
        dataset.
        """
        return rows_without(self.segments, self.num_rows, reader.spec.column)

    @memo
    def readers(self) -> dict[str, FieldReader]:
        """The readers of the snapshot's fields, by name."""
        return self._bound(self.config.fields)

    def grown_from(self, before: Snapshot) -> Growth | None:
        """Return the rows appended since an earlier snapshot; None if this snapshot does not extend the earlier
        snapshot.

        The field readers of the earlier snapshot are then reused, in constant time.
        """
        same = self.config == before.config and self.begins_as(before)
        grown = growth_of(before.segments, self.segments) if same else None
        if grown is not None and "readers" not in self.__dict__:
            fields, types = self.config.fields, self.config.types
            # Only a column that was null throughout may have become a field.
            absent = {name: one for name, one in fields.items() if name not in before.readers and one.column in types}
            late = self._bound(absent) if absent else {}
            names = [name for name in fields if name in late or name in before.readers]
            readers = {name: late[name] if name in late else before.readers[name].forward(grown) for name in names}
            self.__dict__.setdefault("readers", readers)
        return grown

    def begins_as(self, before: Snapshot) -> bool:
        """Return whether the first rows certainly equal the rows of an earlier snapshot; False if this is unknown."""
        plain = type(self) is type(before) is Snapshot  # in other classes rows are inserted between others
        return plain and self.num_rows >= before.num_rows and continues(before.segments, self.segments)

    def _bound(self, fields: Mapping[str, Field]) -> dict[str, FieldReader]:
        return bind_fields(self.segments, fields, self.config.types, rows=self.num_rows, budget=self.budget)

    @memo
    def spec(self) -> Spec:
        """The fields' dtypes and shapes, and the alignment."""
        return Spec({name: reader.spec for name, reader in self.readers.items()}, self.alignment)

    @memo
    def backings(self) -> tuple[Any, ...]:
        """The ``readahead.RemoteMemory`` of each remote segment."""
        return tuple({id(one.backing): one.backing for one in self.segments if one.backing is not None}.values())

    def locate(
        self,
        starts: npt.NDArray[np.int64],
        length: int,
        bounds: Sequence[int] | None = None,
        lengths: npt.NDArray[np.int64] | None = None,
    ) -> Windows:
        """Locate the windows of ``length`` rows that begin at ``starts`` (int64 ``[n]``).

        ``bounds`` has the index of the first window of each batch, followed by the number of windows; by default, all
        windows are one batch. The caller ensures ``0 <= start < num_rows``. Steps beyond the end of the snapshot repeat
        the last row. ``lengths`` has the number of steps of each window that exist in the snapshot, int64 ``[n]``; by
        default ``length``.
        """
        beyond = len(starts) > 0 and int(starts.max()) + length > self.num_rows
        if self.has_row_numbers:
            rows = starts[:, None] + np.arange(length)
            physical = self._physical(np.minimum(rows, self.num_rows - 1) if beyond else rows)
            return Windows(self.chunks, starts, length, bounds, physical, lengths)
        stretches = self._stretches_beyond(length) if beyond else self._stretches
        return Windows(stretches, starts, length, bounds, None, lengths)

    @property
    def metadata(self) -> DatasetMetadata:
        """The metadata of a snapshot. If the alignment is "arrived", the alignment in the metadata is None, because
        "arrived" can be an assumption instead of a stated alignment.
        """
        from mouse_core.metadata import DatasetMetadata

        return DatasetMetadata("outgoing" if self.alignment == "outgoing" else None)

    @memo
    def episode_starts(self) -> npt.NDArray[np.int64]:
        """The rows at which episodes begin, int64 ``[n]``, ascending; the first access reads all rows once.

        An episode begins after a row whose ``done`` is not 0 (if codes have labels: whose label is not "alive"). With a
        field ``time``, an episode also begins at a row whose time is 0 or not larger than the time of the previous row.
        An episode also begins where a loaded dataset begins or ends, unless the time continues by 1. If rows have
        neither ``done`` nor ``time``, every row is an episode.

        Raises:
            DataError: A value of ``done`` is not a valid code.
        """

        alive = codes_called(self.config.fields["done"], "alive") or (0,)
        return episode_starts(self.segments, self.num_rows, self.readers, self.stored, alive)

    @memo
    def episodes(self) -> EpisodeIndex:
        """The episode index."""
        return EpisodeIndex.of_begins(self.episode_starts, self.num_rows)

    @memo
    def recording_starts(self) -> dict[int, tuple[Segment, Segment]]:
        """The rows at which another recording begins, each with the segment that ends before the row and the segment
        that begins at the row."""
        rows = np.cumsum(self.rows_of_segments).tolist()
        return {
            row: (before, after)
            for row, (before, after) in zip(rows, pairwise(self.segments), strict=False)
            if before.recorded.recording is not after.recorded.recording
        }

    def unseen_joins(self) -> list[int]:
        """The rows at which an episode begins only because a dataset was loaded separately; no column marks these
        rows.
        """
        return [row for row, joined in self.recording_starts.items() if shows_no_join(*joined, self.config)]

    def stretch_starts(self, column: str) -> npt.NDArray[np.int64]:
        """Return the rows at which a column's value changes, int64 ``[n]``, ascending, 0 first. The name "" stands for
        the task column.

        Raises:
            ConfigError: The column does not exist, or no column holds the task of a row.
        """
        types = {name: data_type for segment in self.segments for name, data_type in segment.types.items()}
        fields = self.config.fields
        ends: tuple[int, ...] = ()
        name: str | None = column
        if column:
            name = fields[column].column if column not in types and column in fields else column
            if name not in types or not is_single(types[name]):
                single = [known for known, data_type in types.items() if is_single(data_type)]
                raise ConfigError(
                    f"boundary: expected one of the columns {single}, which have one number or text per row, "
                    f"found {column!r}"
                )
        else:
            ends = codes_called(fields["done"], "task")
            name = next((task for task in TASKS if task in types), None)
            if name is None and not ends:
                raise ConfigError(
                    f"boundary: expected a column with tasks, one of {list(TASKS)}, or a column 'done' with a label "
                    f"that contains 'task', found the columns {list(types)}; boundary=Column(name) accepts any column"
                )
        starts = [np.zeros(1, np.int64)]
        if name is not None:
            starts.append(run_starts(self.segments, self.num_rows, name))
        for at, stop in blocks(0, self.num_rows) if ends else ():
            done = self.stored("done", np.array([at]), stop - at)
            starts.append(np.nonzero(np.isin(done, ends))[0] + at + 1)
        found = np.unique(np.concatenate(starts))
        return found[found < self.num_rows]

    def stored(
        self, field: str, starts: npt.NDArray[np.int64], length: int = 1, dtype: np.dtype[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Return a field's values in windows of ``length`` rows at ``starts``, ``[n * length, ...]``; by default in the
        stored dtype.
        """
        reader = self.readers[field]
        kind = reader.stored_dtype(reader.spec.dtype) if dtype is None else dtype
        values = reader.read(self.locate(starts, length).part(0), kind)
        return values.reshape(-1, *values.shape[2:])

    @memo
    def fingerprint(self) -> str:
        """A digest of the schema, the number of rows and a few rows, in constant time. Equal data give equal digests on
        every host.
        """
        from mouse_core._base.identity import canonical  # loaded on demand

        columns = {reader.spec.column for reader in self.readers.values()}
        digest = hashlib.sha256()
        # Derived values follow from the other columns and the derivations.
        made = {name: how for name, how in self.config.made.items() if name in columns}
        kinds = kinds_of(self.config.types, columns, self.segments) | made
        columns -= made.keys()
        digest.update(json.dumps([self.num_rows, self.alignment, kinds], sort_keys=True).encode())
        sampled = np.unique(np.linspace(0, max(self.num_rows - 1, 0), _SAMPLED_ROWS).astype(np.int64)).tolist()
        for row in sampled if self.num_rows else ():
            values = self.rows([row], columns)
            digest.update(b"".join(canonical(*values.get(name, [None])) for name in sorted(columns)))
        return digest.hexdigest()[:32]

    def rows(self, numbers: Sequence[int], columns: Set[str] | None = None) -> dict[str, list[Any]]:
        """Return stored rows as lists of Python values by column; a value is None if the row's segment lacks the
        column.

        Args:
            numbers: Row indices in ``0..num_rows - 1``, in any order. Consecutive rows are read together.
            columns: Names of the columns to read; by default all columns of any of the rows.
        """
        found: dict[str, list[Any]] = {}
        (breaks,) = np.nonzero(np.diff(numbers) != 1)
        edges = [0, *(breaks + 1).tolist(), len(numbers)]
        for begin, end in pairwise(edges) if len(numbers) else ():
            at, last = numbers[begin], numbers[begin] + end - begin
            while at < last:
                segment = int(np.searchsorted(self._starts, at, side="right")) - 1
                first = int(self._starts[segment])
                count = min(last, int(self._starts[segment + 1])) - at
                table = self.segments[segment].take(at - first, count)
                done = begin + at - numbers[begin]
                for name in table.schema.names if columns is None else columns & {*table.schema.names}:
                    found.setdefault(name, []).extend([None] * (done - len(found[name])))
                    found[name] += table.column(name).to_pylist()
                at += count
        return {name: values + [None] * (len(numbers) - len(values)) for name, values in found.items()}

    @memo
    def rows_of_segments(self) -> list[int]:
        """Return the number of rows of each segment."""
        return [segment.num_rows for segment in self.segments]

    @memo
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.rows_of_segments], dtype=np.int64)

    @memo
    def _physical_starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *(int(segment.chunk_starts[-1]) for segment in self.segments)], dtype=np.int64)

    @memo
    def has_row_numbers(self) -> bool:
        """Whether some rows must be located one by one through row indices, as after a shuffle."""
        return any(segment.has_indices and segment.runs is None for segment in self.segments)

    @memo
    def chunks(self) -> Stretches:
        """The first rows of the tables' chunks."""
        if len(self.segments) == 1:  # there may be tens of millions of chunks: not copied
            return Stretches(self.segments[0].chunk_starts.astype(np.int64, copy=False))
        starts = zip(self.segments, self._physical_starts[:-1].tolist(), strict=True)
        parts = [segment.chunk_starts[:-1] + first for segment, first in starts]
        return Stretches(np.concatenate([*parts, self._physical_starts[-1:]]).astype(np.int64, copy=False))

    def pieces_of(self, length: int) -> int:
        """Return the approximate number of contiguous pieces of a window of ``length`` rows. Cuts at the ends of long
        chunks are not counted.
        """
        return 1 + length * len(self._stretches) // max(self.num_rows, 1)

    @memo
    def _stretches(self) -> Stretches:
        """The snapshot's rows as stretches: runs of rows, each contiguous in one chunk."""
        sizes = zip(self.segments, self.rows_of_segments, strict=True)
        whole = all(not segment.has_indices and segment.num_rows == rows for segment, rows in sizes)
        if self.has_row_numbers or whole:
            return self.chunks
        parts, chunk = [], 0
        for segment, rows in zip(self.segments, self.rows_of_segments, strict=True):
            runs = Stretches(segment.chunk_starts) if segment.runs is None else segment.runs
            begins, chunks, first = _stretches(runs, chunk)
            there = begins < rows
            parts.append((begins[there], chunks[there], first[there]))
            chunk += len(segment.chunk_starts) - 1
        starts = [first + begins for first, (begins, _, _) in zip(self._starts[:-1].tolist(), parts, strict=True)]
        _, of_chunks, of_rows = zip(*parts, strict=True)
        starts.append(self._starts[-1:])
        return Stretches(
            np.concatenate(starts), np.concatenate(of_chunks), np.concatenate(of_rows), self.chunks.longest
        )

    @memo
    def _beyond(self) -> dict[int, Stretches]:
        return {}

    def _stretches_beyond(self, length: int) -> Stretches:
        """Return stretches for windows that extend beyond the snapshot: missing steps repeat the last row."""
        known = self._beyond.get(length)
        if known is None:
            starts, chunk, row = _stretches(self._stretches, 0)
            there = starts < self.num_rows
            starts, chunk, row = starts[there], chunk[there], row[there]
            last = np.full(length - 1, 1)
            made = Stretches(
                np.concatenate([starts, self.num_rows + np.arange(length)]),
                np.concatenate([chunk, chunk[-1] * last]),
                np.concatenate([row, (row[-1] + self.num_rows - 1 - starts[-1]) * last]),
                self.chunks.longest,
            )
            known = self._beyond.setdefault(length, made)
        return known

    def _physical(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row index in the segment's table for each of ``rows`` of the snapshot, in the same shape."""
        if len(self.segments) == 1:
            return self.segments[0].row_numbers(rows.reshape(-1)).reshape(rows.shape)
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        physical = rows - self._starts[owner] + self._physical_starts[owner]
        for number in np.unique(owner).tolist():
            segment = self.segments[number]
            if segment.has_indices:
                mine = owner == number
                local = segment.row_numbers(rows[mine] - int(self._starts[number]))
                physical[mine] = local + int(self._physical_starts[number])
        return physical

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Snapshot, store_rows=self.store_rows)
        return make, (self.segments, self.config, self.num_rows, self.budget)


def _stretches(
    chunks: Stretches, first: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return, for each stretch, the first row, the chunk (counted from ``first``), and the position of the first row in
    that chunk.
    """
    n = len(chunks)
    chunk, row = chunks.located(np.arange(n), np.zeros(n, np.int64))
    return chunks.starts[:-1], chunk + first, row


def shows_no_join(before: Segment, after: Segment, config: SnapshotConfig) -> bool:
    """Return whether an episode begins at the border of two recordings although no value in a row marks the start of an
    episode there.
    """
    starts = []
    try:
        for appended in (None, object()):  # appended rows continue each other
            rows = [Segment(before.take(before.num_rows - 1)), Segment(after.take(0))]
            rows[0].extent = rows[1].extent = appended
            starts.append(len(Snapshot(rows, config).episode_starts))
    except DataError:  # reading these rows raises the error
        return True
    return starts == [2, 1]
