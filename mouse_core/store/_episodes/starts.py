"""Where episodes begin among recorded steps: found by looking once at the columns that say so, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock

Int64s = npt.NDArray[np.int64]
Read = Callable[[str, Int64s, int], npt.NDArray[Any]]

# Rows are read in windows of so many, so many windows at a time; and fewer where these lie among more bytes of a file:
# its record batches may have all columns, and are to be in memory still when the next column is read.
_LENGTH = 4096
_WINDOWS = 64
_BYTES = 16 << 20


class Segment(Protocol):
    """Rows that never change."""

    @property
    def num_rows(self) -> int:
        """How many."""
        ...

    @property
    def sealed_bytes(self) -> int:
        """What they take in files of which some rows are read at a time; 0 elsewhere."""
        ...

    @property
    def recording(self) -> object:
        """What rows have in common that go on from each other; an episode begins where it changes."""
        ...

    @property
    def recorded(self) -> Segment:
        """The same rows without columns that are computed."""
        ...


class _Found(NamedTuple):
    """What a segment says.

    Args:
        starts: Its rows that begin an episode for reasons within the segment, int64 ``[n]``.
        ended: Whether its last row ends an episode.
        first, last: The times of its first and last rows; -1 where they are not known.
    """

    starts: Int64s
    ended: bool
    first: int
    last: int


# A segment never changes, and a store that grows keeps those that it has.
_known: WeakKeyDictionary[Segment, dict[tuple[int, ...], _Found]] = WeakKeyDictionary()
_lock = ProcessLock()


def episode_starts(
    segments: Sequence[Segment], rows: int, fields: Collection[str], read: Read, alive: tuple[int, ...] = (0,)
) -> Int64s:
    """The rows at which episodes begin, int64 ``[n]``, ascending, 0 first.

    An episode begins behind a row whose ``done`` ends one, and, where times are known, at a row whose time is 0 or not
    larger than that of the row before: so an episode that was broken off ends where the next one begins. An episode
    also begins with a dataset that was loaded on its own, and behind it, unless its time is the next one. Rows that say
    neither, as prompts and pictures do, are an episode each.

    Args:
        segments: What holds the rows.
        rows: How many rows count.
        fields: Names of the fields that there are, of which ``done`` and ``time`` count.
        read: The values of a field in the windows of a length that begin at some rows, one after another.
        alive: The codes of ``done`` that end no episode.

    Raises:
        DataError: A value that its field does not allow.
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
    """What the rows ``begin .. end - 1`` say, all of a segment or its first ones."""
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
        breaks = np.concatenate([[ended], done[:-1]])
        ended = bool(done[-1])
        if "time" in fields:
            time = read("time", firsts, length)
            if row == begin:
                first = last = int(time[0])
                breaks[1:] |= _begins(time[:-1], time[1:])
            else:
                breaks |= _begins(np.concatenate([[last], time[:-1]]), time)
            last = int(time[-1])
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
    """How many rows are read together: of 20 KB each 838, in place of 262,144."""
    each = segment.sealed_bytes // max(1, segment.num_rows)
    return min(_WINDOWS * _LENGTH, max(1, _BYTES // each)) if each else _WINDOWS * _LENGTH


def _begins(before: npt.NDArray[Any], time: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether steps of these times begin an episode, behind steps of those."""
    found: npt.NDArray[np.bool_] = (time == 0) | ((time >= 0) & (before >= 0) & (time <= before))
    return found


def _is_cut(before: _Found, after: _Found, same_recording: bool) -> bool:
    """Whether an episode begins with a segment behind another one."""
    follows = same_recording or 0 <= before.last == after.first - 1
    return not follows or before.ended or bool(_begins(np.array([before.last]), np.array([after.first]))[0])
