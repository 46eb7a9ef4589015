"""Statistics of a store: count, mean, deviation, range and quantiles of its fields, by dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core._base.memory import ArrayMemory
from mouse_core._base.threads import THREADS, in_order
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.spec import Field
from mouse_core.statistics.counting import Counted, Layout, Moments, PartialMoments, Sketch, Tally, count, layout_of
from mouse_core.store.fields import FieldReader, bind_fields, meant_by
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

Int64s = npt.NDArray[np.int64]

# Column that marks rows without a recorded observation, and the number of its rows that are read together.
_MISSING = "observation_missing"
_MARKS = 1 << 18


class Block(NamedTuple):
    """Rows of a field that are counted together. The reader ``with_nulls`` returns NaN for a null, and not the value
    that replaces nulls.
    """

    name: str
    layout: Layout
    begin: int
    end: int
    dropped: Int64s
    with_nulls: FieldReader | None


def count_block(snapshot: Snapshot, memory: ArrayMemory, block: Block) -> Counted:
    """Return the counts of a block's rows. If the rows cannot be read in place, they are first copied to memory that is
    reused.
    """
    reader = snapshot.readers[block.name]
    windows = snapshot.locate(np.array([block.begin]), block.end - block.begin).part(0)
    dtype = dtype_of(reader)
    found = reader.seen(windows, dtype)
    if found is None:
        found = reader.read(windows, dtype, memory.empty((1, windows.every.length, *reader.spec.shape), dtype))
    (rows,) = found
    if block.with_nulls is not None:
        there = ~np.isnan(block.with_nulls.read(windows, np.dtype(np.float64))[0])
        if not there.all():
            rows = np.where(there, rows.astype(np.float64), np.nan)
    first, end = np.searchsorted(block.dropped, (block.begin, block.end))
    if end > first:
        rows = np.delete(rows, block.dropped[first:end] - block.begin, axis=0)
    return count(block.layout, rows)


def dtype_of(reader: FieldReader) -> np.dtype[np.generic]:
    """Return the dtype in which a field's values are counted: the stored dtype, or float64 if the stored dtype cannot
    represent all values.
    """
    return reader.stored_dtype(np.dtype(np.float64))


def reader_with_nulls(snapshot: Snapshot, reader: FieldReader) -> FieldReader | None:
    """Return a reader that returns NaN for nulls. Return None for images, and for fields that need no such reader
    because their nulls are never counted.
    """
    field = reader.field
    if field.fill is None or not np.isfinite(field.fill) or field.image:
        return None
    double, shape = np.dtype(np.float64), reader.column.shape
    plain = replace(field, dtype=double, vector_dtype=None, shape=shape, dim=None, fill=np.nan, bounds=None, labels=())
    types = snapshot.config.types
    return bind_fields(snapshot.segments, {field.name: plain}, types, rows=snapshot.num_rows).get(field.name)


class MissingRows:
    """Finds the rows of a snapshot in which a field has a placeholder instead of a recorded value.

    Args:
        snapshot: The rows.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._missing: tuple[int, Int64s] | None = None

    def dropped(self, name: str, begin: int) -> Int64s:
        """Return the rows in which a field has no recorded value, ascending. The result can omit rows before
        ``begin``.
        """
        snapshot = self._snapshot
        if snapshot.readers[name].field.is_of_transition:
            arrived = snapshot.alignment == "arrived" and "done" in snapshot.readers
            return snapshot.episode_starts if arrived else np.empty(0, np.int64)
        if _MISSING not in snapshot.config.types or not snapshot.readers[name].spec.column.startswith("observation"):
            return np.empty(0, np.int64)
        if self._missing is None or begin < self._missing[0]:
            self._missing = begin, self._marked(begin)
        return self._missing[1]

    def _marked(self, begin: int) -> Int64s:
        """Return the rows without a recorded observation, from row ``begin`` on."""
        snapshot = self._snapshot
        said = {_MISSING: Field(_MISSING, dtype=np.int64, shape=(), fill=0)}
        types, rows = snapshot.config.types, snapshot.num_rows
        bound = bind_fields(snapshot.segments, said, types, rows=rows, budget=snapshot.budget)
        found = [np.empty(0, np.int64)]
        for first in range(begin, rows if bound else 0, _MARKS):
            windows = snapshot.locate(np.array([first]), min(_MARKS, rows - first)).part(0)
            found.append(first + np.flatnonzero(bound[_MISSING].read(windows, np.dtype(np.int64))))
        return np.concatenate(found)


def weighed(parts: Sequence[PartialMoments], weights: Sequence[float], shares: Sequence[float]) -> PartialMoments:
    """Join the moments and quantiles of a field over several parts of the rows, such as the members of a mixture.

    Args:
        parts: The counts of the field in each part of the rows.
        weights: The weight of a row of each part, above 0.
        shares: The shares of the quantiles.

    Returns:
        The joined counts, to which no rows can be added.
    """
    first, counts = parts[0], np.stack([part.all.moments.count for part in parts])
    # Total weight of each part, [P, width]: 30 rows of weight 2 count as much as 60 rows of weight 1.
    sizes = counts * np.asarray(weights, np.float64)[:, None]
    moments = _moments([part.all.moments for part in parts], sizes)
    spreads = [part.all.spread for part in parts]
    known = [spread for spread in spreads if spread]
    said, error = None, 0.0
    if shares and len(known) == len(parts):
        ends = zip(moments.low.tolist(), moments.high.tolist(), strict=True)
        found = [
            _quantiles([spread[place] for spread in known], weights, shares, *low_high)
            for place, low_high in enumerate(ends)
        ]
        values = np.stack([one for one, _ in found], axis=1)
        said = {share: one.reshape(first.layout.shape) for share, one in zip(shares, values, strict=True)}
        error = max((wrong for _, wrong in found), default=0.0)
    return PartialMoments(first.layout, None, Counted(moments, None), first.is_image, said, said_error=error)


def _moments(parts: Sequence[Moments], sizes: Floats) -> Moments:
    """Return the mean, the deviation and the range of weighted parts.

    Example: means 2 and 6 with weights 3 and 1 give the mean 3; with deviations of 0, the variance is (3 * 1 + 1 * 9) /
    4 = 3.
    """
    made = Moments(sizes.shape[1])
    made.count = np.sum([one.count for one in parts], axis=0)
    made.low, made.high = (
        np.min([one.low for one in parts], axis=0),
        np.max([one.high for one in parts], axis=0),
    )
    portion = sizes / np.where(sizes.any(axis=0), sizes.sum(axis=0), 1.0)
    means = np.stack([one.mean for one in parts])
    variances = np.stack([one.squares / np.maximum(one.count, 1) for one in parts])
    mean = (portion * means).sum(axis=0)
    variance = (portion * (variances + (means - mean) ** 2)).sum(axis=0)
    same = made.low == made.high
    made.mean, made.squares = np.where(same, made.low, mean), np.where(same, 0.0, variance * made.count)
    return made


def _quantiles(
    spread: Sequence[Sketch | Tally], weights: Sequence[float], shares: Sequence[float], low: float, high: float
) -> tuple[Floats, float]:
    """Return quantiles of one dimension, and the largest error of their ranks as a share of all numbers.

    The share of a number is the sum of the smaller numbers' weights plus half of its own weight, divided by the sum of
    all weights: numbers 1, 2 and 3 with weights 1, 1 and 2 are the quantiles 1/8, 3/8 and 3/4.
    """
    kept = [_numbers(one) for one in spread]
    values = np.concatenate([numbers for numbers, _ in kept])
    counting = np.concatenate([each * weight for (_, each), weight in zip(kept, weights, strict=True)])
    if not counting.sum():
        return np.full(len(shares), np.nan), 0.0
    order = np.argsort(values, kind="stable")
    values, counting = values[order], counting[order]
    total = counting.sum()
    middles = (np.cumsum(counting) - counting / 2) / total
    scale = 2.0 if max(abs(low), abs(high)) > 1e300 else 1.0  # see Sketch.quantiles
    asked = np.asarray(shares, np.float64)
    found = np.interp(asked, [0.0, *middles, 1.0], np.array([low, *values, high]) / scale) * scale
    wrong = sum(one.error * weight for one, weight in zip(spread, weights, strict=True) if isinstance(one, Sketch))
    return np.clip(found, low, high), float((wrong + counting.max() / 2) / total)


def _numbers(one: Sketch | Tally) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Return the numbers that a sketch kept, and how many numbers each kept number represents."""
    if isinstance(one, Tally):
        there = np.flatnonzero(one.counts)
        return there.astype(np.float64), one.counts[there].astype(np.float64)
    lengths = [len(level) for level in one.levels]
    return np.concatenate([np.empty(0), *one.levels]), np.repeat(2.0 ** np.arange(len(lengths)), lengths)


Floats = npt.NDArray[np.float64]

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Default shares of the quantiles, as in LeRobot."""


@dataclass(frozen=True, eq=False)
class FieldStatistics:
    """Statistics of a field for each dimension of a step, or for each channel of images.

    Args:
        count: The number of finite values, int64; for images, the number of images; 0 if a file does not contain the
            number.
        mean, std, min, max: float64. ``std`` is the population standard deviation, as in ``numpy.std``. If no value was
            counted, these statistics are NaN or infinite.
        quantiles: A dict from each share to its quantile, float64; empty if no quantiles were computed.
        rank_error: The largest error of the rank of a quantile, as a share of all numbers.
        is_image: Whether the field has images, so that the statistics are per channel.
    """

    count: Int64s
    mean: Floats
    std: Floats
    min: Floats
    max: Floats
    quantiles: Mapping[float, Floats]
    rank_error: float = 0.0
    is_image: bool = False


class Statistics(Mapping[str, FieldStatistics]):
    """Statistics by field, from ``statistics`` or ``load``.

    Args:
        parts: The counts, by field.
        shares: The shares of the quantiles.
        rows: The number of rows that were counted; if the statistics come from a file, the largest count of a field.
        fingerprint: The fingerprint of the snapshot; empty if unknown.
        content: The fingerprint of the rows alone, which does not depend on the rows' source; empty if unknown.
    """

    def __init__(
        self, parts: Mapping[str, PartialMoments], shares: Sequence[float], rows: int, fingerprint: str, content: str
    ) -> None:
        self.parts, self.shares = dict(parts), tuple(shares)
        self.rows, self.fingerprint, self.content = rows, fingerprint, content

    def __getitem__(self, name: str) -> FieldStatistics:
        if name not in self.parts:
            raise MissingFieldError(f"statistics: expected one of {list(self.parts)}, found {name!r}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        return f"Statistics(rows={self.rows}, fields={list(self)})"

    @memo
    def _found(self) -> dict[str, FieldStatistics]:
        return {name: _statistics_of(part, self.shares) for name, part in self.parts.items()}

    def update(self, store: Store | Snapshot) -> Statistics:
        """Return the statistics of a store whose first rows are the counted rows; the result is bit-identical to
        ``statistics(store)``.

        Only the later rows are read, plus the rows of at most one incomplete block (about a million numbers) before the
        later rows. Before that, the number of earlier rows and a few of these rows are compared with the counted rows,
        as when a loader's state is loaded.

        Raises:
            ConfigError: The rows differ, or the statistics belong to a mixture or come from a file and have no data for
                ``update``.
        """
        snapshot = _snapshot_of(store)
        known = [name for name, part in self.parts.items() if part.whole is not None]
        if not known or self.rows > snapshot.num_rows or _content(snapshot, self.rows) != self.content:
            raise ConfigError(
                f"statistics: expected a snapshot that begins with the {self.rows} rows of the statistics, found "
                + (f"{snapshot.num_rows} other rows" if known else "statistics that cannot be updated")
            )
        return _counted(snapshot, known, self.shares, before=self)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the statistics to a dataset's folder: ``meta/stats.json``, as in LeRobot.

        Fields keep their names, except LeRobot's ``next.reward`` and ``next.done``. Images have values of 0 to 1 in
        shape ``[C, 1, 1]``. The statistics of dimensions without counted values are null. Other entries of an existing
        ``stats.json`` are kept.

        Args:
            folder: The folder of the dataset.

        Raises:
            StorageError: The file cannot be written.
        """
        from mouse_core.statistics._files import save

        save(self.parts, self._found, Path(folder))

    @staticmethod
    def load(folder: str | PathLike[str]) -> Statistics:
        """Read the statistics that ``save`` or LeRobot wrote.

        The file has moments and quantiles, but no data for ``update``. To include new rows, call ``statistics(store)``,
        which counts all rows.

        Raises:
            ConfigError: The folder has no ``meta/stats.json``.
            DataError: The file is damaged; the message names the file.
        """
        from mouse_core.statistics._files import load

        parts, rows = load(Path(folder))
        return Statistics(parts, (), rows, "", "")


def statistics(
    store: Store | Snapshot,
    fields: Sequence[str] | None = None,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> Statistics:
    """Compute the statistics of a store in one pass over all rows, in constant memory.

    Mean and standard deviation differ from float64 results by at most ``1e-6`` of the standard deviation; minimum and
    maximum are exact. NaN and infinities are ignored. With alignment "arrived", the first row of an episode has no
    action and no reward, so the statistics of these fields exclude this row. The statistics of observations exclude
    rows with ``observation_missing``. Nulls that a field fills are excluded, except in images. The statistics depend
    only on the rows, not on their layout in files or on threads. In a mixture, each row is weighted by the share of its
    member. A mixture whose ``Schedule`` has several stages is not supported, because its shares change.

    Args:
        store: A store or a snapshot.
        fields: Names of the fields; by default all.
        quantiles: Shares from 0 to 1. Without quantiles, the call takes only a fifth of the time. Fields with more than
            1,024 numbers per row have no quantiles.

    Raises:
        ConfigError: The store has no rows, a share is out of range, or the shares of a mixture change.
        MissingFieldError: A field does not exist.
        DataError: A value is outside the bounds of its field.
    """
    snapshot = _snapshot_of(store)
    names = list(snapshot.readers) if fields is None else [fields] if isinstance(fields, str) else list(fields)
    for name in names:
        if name not in snapshot.readers:
            hint = meant_by(name, snapshot.readers, snapshot.config.types)
            raise MissingFieldError(f"statistics: expected fields among {list(snapshot.readers)}, found {name!r}{hint}")
    shares = tuple(float(share) for share in quantiles)
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"quantiles: expected numbers from 0 to 1, found {list(shares)}")
    return _counted(snapshot, names, shares)


def _snapshot_of(store: Store | Snapshot) -> Snapshot:
    snapshot = store if isinstance(store, Snapshot) else store.snapshot() if isinstance(store, Store) else None
    if snapshot is None:
        raise ConfigError(f"store: expected a Store or a Snapshot, found {type(store).__name__}")
    if not snapshot.num_rows:
        raise ConfigError(snapshot.if_empty)
    return snapshot


def _content(snapshot: Snapshot, rows: int) -> str:
    """Return the fingerprint of the first rows of a snapshot."""
    return Snapshot(snapshot.segments, snapshot.config, rows, budget=snapshot.budget).fingerprint


def _counted(
    snapshot: Snapshot,
    names: Sequence[str],
    shares: tuple[float, ...],
    *,
    before: Statistics | None = None,
) -> Statistics:
    """Return the statistics of a snapshot's fields; if statistics of its first rows are given, only the later rows are
    counted."""
    n, marks = snapshot.num_rows, MissingRows(snapshot)
    rows: Any = snapshot
    stretches: list[tuple[int, int, float]] = rows.rows_by_share() if snapshot.has_shares else [(0, n, 1.0)]
    planned = [_planned(snapshot, names, shares, before, marks, begin, end) for begin, end, _ in stretches]
    found = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mouse-statistics") as pool:
        counting = partial(count_block, snapshot, ArrayMemory())
        for parts, blocks in planned:
            for block, counted in zip(blocks, in_order(pool, counting, blocks), strict=True):
                parts[block.name] = parts[block.name].with_stretch(counted, block.end - block.begin)
            found.append({name: part.summed() for name, part in parts.items()})
    if not snapshot.has_shares:
        return Statistics(found[0], shares, n, snapshot.fingerprint, _content(snapshot, n))
    weights = [weight for *_, weight in stretches]
    parts = {name: weighed([one[name] for one in found], weights, shares) for name in names}
    return Statistics(parts, shares, n, snapshot.fingerprint, "")


def _planned(
    snapshot: Snapshot,
    names: Sequence[str],
    shares: tuple[float, ...],
    before: Statistics | None,
    marks: MissingRows,
    begin: int,
    end: int,
) -> tuple[dict[str, PartialMoments], list[Block]]:
    """Return the counts of the rows ``begin .. end - 1`` that are known from earlier statistics, and the blocks that
    are not counted yet."""
    parts, blocks, n = {}, [], end - begin
    for name in names:
        reader = snapshot.readers[name]
        layout = layout_of(reader.spec, dtype_of(reader), quantiles=bool(shares))
        known = None if before is None else before.parts[name]
        done, whole = 0, Counted.nothing(layout)
        if before is not None and known is not None and known.whole is not None and known.layout == layout:
            done, whole = before.rows // layout.block_rows * layout.block_rows, deepcopy(known.whole)
        parts[name] = PartialMoments(layout, whole, Counted.nothing(layout), reader.spec.image_shape is not None)
        dropped, with_nulls = marks.dropped(name, begin + done), reader_with_nulls(snapshot, reader)
        blocks += [
            Block(name, layout, begin + first, begin + last, dropped, with_nulls)
            for first, last in layout.stretches(done, n)
        ]
    return parts, blocks


def _statistics_of(part: PartialMoments, shares: Sequence[float]) -> FieldStatistics:
    counted, shape = part.all, part.layout.shape
    moments = counted.moments
    spread = counted.spread or ()
    values = (np.where(moments.count, moments.mean, np.nan), moments.deviation, moments.low, moments.high)
    mean, std, low, high = (one.reshape(shape) for one in values)
    quantiles = {share: found.reshape(shape) for share, found in counted.quantiles(shares).items()}
    return FieldStatistics(
        moments.count.reshape(shape) * part.has_count,
        mean,
        std,
        low,
        high,
        quantiles or part.said or {},
        max((one.rank_error for one in spread), default=part.said_error),
        part.is_image,
    )
