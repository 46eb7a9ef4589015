"""Offsets: the rows that a field delivers around an anchor, within the anchor's episode; see ``BatchSource``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows
from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.sampling.plan import remembered
from mouse_core.store.fields import FieldReader
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Holes = Literal["refuse", "mask"]

_FURTHEST = 1 << 31


@dataclass(frozen=True)
class Seconds:
    """Offsets in seconds: each offset selects the row of the anchor's episode with the nearest time stamp.

    Args:
        offsets: K times relative to the anchor's time stamp, in seconds, in any order.
        tolerance: The largest allowed distance, in seconds, between a row's time stamp and the requested time. The
            distance between neighbouring numbers of the stored dtype is added to the tolerance: 0.00012 s for float32
            at 1,024 s.
        clock: The field of time stamps, in seconds; time stamps never decrease within an episode.
        holes: What happens if no row is within the tolerance because rows are missing inside an episode. "refuse":
            DataError is raised. "mask": the nearest row is delivered and masked, like rows beyond the ends of the
            episode.

    Raises:
        ConfigError: ``offsets`` or ``tolerance`` are not finite numbers, ``tolerance`` is below 0, or ``holes`` is
            unknown.

    Example:
        >>> Seconds([-0.1, 0.0]).offsets
        (-0.1, 0.0)
    """

    offsets: Sequence[float]
    tolerance: float = 1e-4
    clock: str = "timestamp"
    holes: Holes = "refuse"

    def __post_init__(self) -> None:
        numbers, tolerance = _listed("Seconds", self.offsets), self.tolerance
        if not all(_is_number(number) and math.isfinite(number) for number in (*numbers, tolerance)):
            raise ConfigError(
                f"Seconds: expected finite numbers of seconds, found offsets {numbers!r} and tolerance {tolerance!r}"
            )
        if tolerance < 0:
            raise ConfigError(f"Seconds: expected a tolerance of 0 or more, found {tolerance!r}")
        if self.holes not in get_args(Holes):
            raise ConfigError(f"Seconds: holes: expected one of {list(get_args(Holes))}, found {self.holes!r}")
        object.__setattr__(self, "offsets", tuple(map(float, numbers)))
        object.__setattr__(self, "tolerance", float(tolerance))


Offsets = tuple[int, ...] | Seconds


@dataclass(frozen=True)
class FieldWindows:
    """The argument ``windows`` of a source, checked: offsets by field.

    Args:
        offsets: A dict from field to K distances from the anchor, in rows or seconds.
        pad: The value of missing rows. True: copies of the nearest row of the episode replace missing rows. A number is
            the value of all elements of missing rows. False: only anchors without missing rows are drawn.
        batch_dims: The number of batch axes, which precede the axes of a field: 1 for ``[B]``, 2 for ``[B, S]``.
        has_axis: Whether fields have an axis of length K; if not, K is 1.
    """

    offsets: Mapping[str, Offsets]
    pad: bool | float
    batch_dims: int
    has_axis: bool = True

    def axes(self, name: str) -> tuple[int, ...]:
        """Return the lengths of the axes between the batch axes and the axes of a field: ``(K,)``, or ``()``."""
        return (self.count(name),) if name in self.offsets and self.has_axis else ()

    @property
    def fill(self) -> float | None:
        """The value of missing rows; None: copies of the nearest row."""
        return None if isinstance(self.pad, bool) else self.pad

    def count(self, name: str) -> int:
        """Return the number of rows of a field for each anchor, K."""
        offsets = self.offsets[name]
        return len(offsets.offsets if isinstance(offsets, Seconds) else offsets)

    @property
    def runs(self) -> int:
        """The number of runs of rows that are read for an anchor, summed over all fields."""
        found = (
            len(one.offsets) if isinstance(one, Seconds) else len(runs_of(one)[0]) for one in self.offsets.values()
        )
        return sum(found)

    def identity(self, name: str) -> str:
        """Return a text that identifies the offsets of a field."""
        offsets = self.offsets[name]
        shown = repr(offsets) if isinstance(offsets, Seconds) else f"offsets {_shown(offsets)}"
        alone = "" if self.has_axis else ", alone"
        return f"{shown}, pad={self.pad!r}, of [{', '.join('BS'[: self.batch_dims])}]{alone}"

    def reach(self, shifts: Mapping[str, int]) -> tuple[int, int]:
        """Return how many rows before and after an anchor must exist in the anchor's episode for the offsets of all
        fields.

        Args:
            shifts: A dict from field to the number of rows from the anchor to the row at offset 0.

        Raises:
            ConfigError: Offsets are in seconds, so the number of rows is unknown.
        """
        before = behind = 0
        for name, offsets in self.offsets.items():
            if isinstance(offsets, Seconds):
                raise ConfigError(
                    f"pad: when windows[{name!r}] is in seconds, expected True or a fill number, found False; "
                    f"{name}_mask marks the padded steps"
                )
            before = max(before, -min(offsets))
            behind = max(behind, max(offsets) + shifts[name])
        return before, behind


def field_windows(windows: Any, pad: Any, batch_dims: int) -> FieldWindows:
    """Check the arguments ``windows`` and ``pad`` of a source.

    Raises:
        ConfigError: ``windows`` is not a mapping of names to offsets, or ``pad`` is neither a bool nor a number.
    """
    if not isinstance(windows, Mapping):
        raise ConfigError(f"windows: expected offsets by field, as in {{'action': range(8)}}, found {windows!r:.80}")
    pad = True if pad is None else pad
    if not isinstance(pad, bool | int | float | np.number):
        raise ConfigError(f"pad: expected True, False or a number, found {pad!r}")
    try:
        pad = pad if isinstance(pad, bool) else float(pad)
    except OverflowError:
        raise ConfigError("pad: expected a number that a float can represent, found a larger number") from None
    return FieldWindows({name: _offsets_of(name, offsets) for name, offsets in windows.items()}, pad, batch_dims)


def mask_of(name: str) -> str:
    """Return the name of the field that masks the rows of ``name``."""
    return f"{name}_mask"


def runs_of(offsets: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
    """Split offsets into runs of equal length. Return the first offset of each run, and the length of a run.

    Offsets -4, -3, -2, -1, 0, 1 are one run of 6 offsets. Offsets -4, -3, 0, 1, 2, 3 are two and then four consecutive
    offsets, so the result is three runs of 2 offsets, which begin at -4, 0 and 2. Offsets -4, 0, 2 are three runs of 1
    offset.
    """
    breaks = [0, *(place for place, (one, next_) in enumerate(pairwise(offsets), 1) if next_ != one + 1), len(offsets)]
    unit = math.gcd(*(end - begin for begin, end in pairwise(breaks)))
    return np.array(offsets[::unit], np.int64), unit


def _offsets_of(name: Any, offsets: Any) -> Offsets:
    if isinstance(offsets, Seconds):
        return offsets
    where = f"windows[{name!r}]"
    listed = _listed(where, offsets)
    for offset in listed:
        if not is_whole(offset) or abs(int(offset)) >= _FURTHEST:
            hint = "; Seconds([...]) takes seconds" if isinstance(offset, float) else ""
            raise ConfigError(f"{where}: expected numbers of rows as integers, found {offset!r}{hint}")
    return tuple(int(offset) for offset in listed)


def _listed(where: str, offsets: Any) -> tuple[Any, ...]:
    # Sets have no order, and for a mapping the values would be lost.
    if isinstance(offsets, str | bytes | Set | Mapping) or not isinstance(offsets, Iterable):
        hint = f"; write [{offsets!r}]" if _is_number(offsets) else ""
        raise ConfigError(f"{where}: expected a list of offsets, found {offsets!r:.80}{hint}")
    listed = tuple(offsets)
    if not listed:
        raise ConfigError(f"{where}: expected at least one offset, found none")
    return listed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _shown(offsets: tuple[int, ...]) -> str:
    """Return offsets as text; consecutive offsets are abbreviated to the first and the last."""
    # Compare lengths instead of building the range: the range between two offsets may exceed memory.
    counted = offsets[-1] - offsets[0] + 1 == len(offsets) > 2
    if counted and offsets == tuple(range(offsets[0], offsets[-1] + 1)):
        return f"{offsets[0]}..{offsets[-1]}"
    return ", ".join(map(str, offsets))


# Number of rows in a window of time stamps, and number of windows that are read together.
_LENGTH, _WINDOWS = 4096, 64


@dataclass(frozen=True, eq=False)
class Anchors:
    """The anchors of a block. Every step of every window is an anchor.

    Args:
        row: The row of the snapshot at each anchor, int64 ``[a]``; for a missing step, the row of the last present
            step.
        begin, end: The first row of the anchor's episode, and the row after its last row, int64 ``[a]``.
        there: Whether each anchor is present, bool ``[a]``; None: all anchors are present.
        rows: The number of rows of the snapshot.
    """

    row: Int64s
    begin: Int64s
    end: Int64s
    there: Bools | None
    rows: int

    @classmethod
    def of(cls, windows: Windows, snapshot: Snapshot) -> Anchors:
        """Return the anchors of windows whose rows are located."""
        table, length, starts = snapshot.episodes, windows.length, windows.rows
        begin, end, _ = table.episode_of(starts)
        if length == 1 and windows.lengths is None:
            return cls(starts, begin, end, None, snapshot.num_rows)
        steps = np.arange(length)
        if windows.lengths is None:
            there, row = None, (starts[:, None] + steps).reshape(-1)
        else:
            there = (steps < windows.lengths[:, None]).reshape(-1)
            row = (starts[:, None] + np.minimum(steps, windows.lengths[:, None] - 1)).reshape(-1)
        begin, end = (np.repeat(bound, length) for bound in (begin, end))
        # Windows of the stream may continue in the next episode.
        (across,) = np.nonzero(row >= end)
        if len(across):
            begin[across], end[across], _ = table.episode_of(row[across])
        return cls(row, begin, end, there, snapshot.num_rows)


class Clock(NamedTuple):
    """The time stamps of a snapshot.

    Args:
        times: The time stamp of every row, in seconds, float64 ``[rows]``.
        dtype: The dtype of the stored time stamps.
    """

    times: npt.NDArray[np.float64]
    dtype: np.dtype[np.generic]

    def spacing(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.floating[Any]] | float:
        """Return the distance between a time stamp and the next number that the stored dtype can represent: for float32
        at 1,024 s, 0.00012 s.
        """
        if self.dtype.kind != "f":
            return 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            return np.spacing(times.astype(self.dtype))


class OffsetRows(NamedTuple):
    """The rows of a snapshot that are read for anchors, and the positions of rows that are replaced or missing.

    Args:
        start: The first row of each run, int64 ``[runs]``.
        unit: The number of rows of a run.
        target: Positions, among all rows that are read, of rows that are replaced, int64 ``[m]``, in ascending order.
        source: For each ``target``, the position of the row that replaces it, int64 ``[m]``.
        missing: Positions of missing rows, int64 ``[n]``, in ascending order.
        refused: A pair (position, error message) for each row that cannot be delivered, in ascending order of the
            positions.
    """

    start: Int64s
    unit: int
    target: Int64s
    source: Int64s
    missing: Int64s
    refused: Sequence[tuple[int, str]] = ()


def rows_of(anchors: Anchors, offsets: Sequence[int], shift: int, *, single: bool = False) -> OffsetRows:
    """Return the rows at the offsets around anchors; no delivered row lies outside the anchor's episode.

    Example: an episode has the rows 10..14, and the rows 13, 14, 15, 16 are requested. Rows 15 and 16 belong to the
    next episode, so they are missing: all four rows are read, and copies of row 14 replace rows 15 and 16. If rows
    17..20 are requested, all are missing: rows 14..17 are read instead, and copies of row 14 replace rows 15..17.

    Args:
        anchors: The anchors.
        offsets: K offsets in rows.
        shift: See ``OffsetBlocks``; the first ``shift`` rows of an episode have no value.
        single: Whether each row is read individually. Reading runs is faster, but runs may include rows of other
            episodes.
    """
    firsts, unit = (np.array(offsets, np.int64), 1) if single else runs_of(offsets)
    start = anchors.row[:, None] + (firsts + shift)
    anchor, run = np.nonzero(_beyond(anchors, firsts, firsts + (shift + unit)))
    asked, begin, end = start[anchor, run], anchors.begin[anchor] + shift, anchors.end[anchor]
    # An episode of one row has no transition: its row is read, and all requested rows are missing.
    lowest = np.minimum(begin, end - 1)
    # Each run contains the row of the episode that replaces missing rows, and lies within the snapshot.
    least, most = np.maximum(lowest - (unit - 1), 0), np.minimum(end - 1, max(anchors.rows - unit, 0))
    read = start[anchor, run] = np.clip(asked, least, most)
    slot = (anchor * len(firsts) + run) * unit
    lead, tail = np.clip(begin - asked, 0, unit), np.clip(end - asked, 0, unit)
    missing, source = _edges(slot, lead, tail, unit, lowest - read, end - 1 - read)
    # A row that is read individually needs no replacement.
    target, source = (missing, source) if unit > 1 else (missing[:0], source[:0])
    # Only at the ends of the snapshot are present rows read at positions other than the requested ones.
    (cut,) = np.nonzero((asked != read) & (lead < tail))
    if len(cut):
        steps = np.arange(unit)
        which, step = np.nonzero((steps >= lead[cut, None]) & (steps < tail[cut, None]))
        belongs = slot[cut][which] + step
        target = np.concatenate([missing, belongs])
        source = np.concatenate([source, belongs + (asked - read)[cut][which]])
        order = np.argsort(target, kind="stable")
        target, source = target[order], source[order]
    if anchors.there is not None:
        there = np.repeat(anchors.there, len(firsts) * unit)
        there[missing] = False
        (missing,) = np.nonzero(~there)
    return OffsetRows(start.reshape(-1), unit, target, source, missing)


def _beyond(anchors: Anchors, firsts: Int64s, ends: Int64s) -> Bools:
    """Return whether each run has rows outside the anchor's episode, ``[a, runs]``; ``firsts`` and ``ends`` are the
    bounds of a run relative to the anchor.
    """
    beyond = np.zeros((len(anchors.row), len(firsts)), np.bool_)
    if firsts.min() < 0:
        beyond |= (anchors.row - anchors.begin)[:, None] < -firsts
    if ends.max() > 1:
        beyond |= (anchors.end - anchors.row)[:, None] < ends
    return beyond


def _edges(slot: Int64s, lead: Int64s, tail: Int64s, unit: int, lowest: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
    """Return two arrays int64 ``[m]``: the positions of missing rows, in ascending order, and the positions of the rows
    that replace them. Positions are counted over the rows of all runs.

    Example: a run of 4 rows has the positions 8..11. Its first and last row are missing (``lead`` 1, ``tail`` 3), and
    its second and third row replace them (``lowest`` 1, ``last`` 2). So the positions 8 and 11 are missing, and the
    rows at 9 and 10 replace the missing rows.
    """
    counts = np.stack([lead, unit - tail], axis=1).reshape(-1)
    firsts = np.stack([slot, slot + tail], axis=1).reshape(-1)
    firsts -= np.cumsum(counts) - counts
    source = np.repeat(np.stack([slot + lowest, slot + last], axis=1).reshape(-1), counts)
    missing: Int64s = np.arange(len(source)) + np.repeat(firsts, counts)
    return missing, source


def rows_at(anchors: Anchors, seconds: Seconds, shift: int, clock: Clock) -> OffsetRows:
    """Return, for each anchor and each offset in seconds, the row of the anchor's episode with the nearest time stamp.

    Example: for the time stamps 0.0, 0.1, 0.2, the anchor at 0.1 and the offset 0.04, the requested time is 0.14, and
    the nearest row has the time stamp 0.1. If two rows are equally near, the earlier row is delivered. If several rows
    have the anchor's time stamp, the anchor itself is delivered.

    Args:
        anchors: The anchors.
        seconds: The offsets, and the tolerance.
        shift: See ``OffsetBlocks``: the delivered row is ``shift`` rows after the nearest row, so the last ``shift``
            rows of an episode have no value.
        clock: The time stamps.
    """
    times = clock.times
    begin, end = (bound[:, None] for bound in (anchors.begin, anchors.end))
    # The end of the rows that have a row ``shift`` rows later. For an episode of one row, the row is kept and marked as
    # missing.
    last = np.maximum(end - shift, begin + 1)
    now, anchor_row = times[anchors.row][:, None], anchors.row[:, None]
    wanted = now + np.asarray(seconds.offsets)
    low, high = (np.broadcast_to(bound, wanted.shape).copy() for bound in (begin, last))
    while (open_ := low < high).any():  # bisection for the first row that is not earlier than each time
        middle = (low + high) // 2
        before = open_ & (times[np.minimum(middle, last - 1)] < wanted)
        low = np.where(before, middle + 1, low)
        high = np.where(open_ & ~before, middle, high)
    after = np.minimum(low, last - 1)
    ahead = np.maximum(after - 1, begin)
    row = np.where(np.abs(times[ahead] - wanted) <= np.abs(times[after] - wanted), ahead, after)
    own = times[row] == now
    row = np.where(own, np.minimum(anchor_row, last - 1), row)
    # Two float32 time stamps near 1,025 s are 0.00012 s apart, and each may be rounded by half of that distance. So the
    # row at +0.5333 s may exist without a time stamp within 0.0001 s.
    tolerance = seconds.tolerance + np.nan_to_num(clock.spacing(np.maximum(np.abs(wanted), np.abs(now))))
    near = (np.abs(times[row] - wanted) <= tolerance) & (end - begin > shift) & ~(own & (anchor_row >= last))
    if anchors.there is not None:
        near &= anchors.there[:, None]
    refused: list[tuple[int, str]] = []
    if seconds.holes == "refuse":
        inside = ~near & (wanted > times[begin]) & (wanted < times[last - 1]) & (end - begin > shift)
        if anchors.there is not None:
            inside &= anchors.there[:, None]
        for place in np.nonzero(inside.reshape(-1))[0].tolist():
            anchor, offset = divmod(place, wanted.shape[1])
            found = float(times[row[anchor, offset]])
            refused.append(
                (
                    place,
                    f"{seconds.clock}: expected a row within {tolerance[anchor, offset]:g} s of "
                    f"{float(wanted[anchor, offset]):.6f} s, {seconds.offsets[offset]:+g} s from row "
                    f"{int(anchors.row[anchor])}, found the nearest at {found:.6f} s (row {int(row[anchor, offset])}); "
                    "a larger tolerance accepts this row, and holes='mask' masks it",
                )
            )
    delivered = np.minimum(row + shift, end - 1)
    nothing = np.zeros(0, np.int64)
    return OffsetRows(delivered.reshape(-1), 1, nothing, nothing, np.nonzero(~near.reshape(-1))[0], refused)


def clock_of(snapshot: Snapshot, seconds: Seconds) -> FieldReader:
    """Return the reader of the field of time stamps, ``seconds.clock``.

    Raises:
        MissingFieldError: The field ``clock`` does not exist.
        ConfigError: Each row of the field has several numbers.
    """
    reader = snapshot.readers.get(seconds.clock)
    if reader is None:
        raise MissingFieldError(
            f"Seconds: expected a field {seconds.clock!r} of time stamps, found {list(snapshot.readers)}; clock= names "
            f"another field, and DatasetStore(fields=[Field({seconds.clock!r})]) makes a field of a column"
        )
    if reader.column.width != 1:
        raise ConfigError(f"Seconds: expected one time stamp per row, found the shape {list(reader.spec.shape)}")
    return reader


def times_of(snapshot: Snapshot, seconds: Seconds) -> Clock:
    """Return the time stamps of all rows of a snapshot; time stamps are read only once per snapshot.

    Raises:
        DataError: A value is outside the bounds of the field, or time stamps decrease within an episode.
    """
    return remembered(snapshot, ("times", seconds.clock), lambda: _clock(snapshot, clock_of(snapshot, seconds)))


def _clock(snapshot: Snapshot, reader: FieldReader) -> Clock:
    times = _times(snapshot, reader)
    back = np.nonzero(times[1:] < times[:-1])[0] + 1
    back = back[~np.isin(back, snapshot.episode_starts)]
    if len(back):
        row = int(back[0])
        raise DataError(
            f"{reader.spec.name}: expected time stamps that ascend within an episode, found {times[row]:g} s at row "
            f"{row} after {times[row - 1]:g} s"
        )
    return Clock(times, reader.column.reading.dtype)


def _times(snapshot: Snapshot, reader: FieldReader) -> npt.NDArray[np.float64]:
    times, row = np.empty(snapshot.num_rows), 0
    while row < len(times):
        length = min(_LENGTH, len(times) - row)
        last = min(len(times) - length, row + (_WINDOWS - 1) * length)
        found = snapshot.stored(reader.spec.name, np.arange(row, last + 1, length), length, times.dtype).reshape(-1)
        times[row : row + len(found)] = found
        row += len(found)
    return times
