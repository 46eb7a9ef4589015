"""Where episodes begin among recorded steps: found by looking once at the columns that say so, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows
from mouse_core._base.locks import ProcessLock
from mouse_core.store._segments import Segment
from mouse_core.store.fields import FieldReader

Int64s = npt.NDArray[np.int64]
Locate = Callable[[Int64s, int], Windows]

# Rows are read in windows of so many, so many windows at a time.
_LENGTH = 4096
_WINDOWS = 64


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
_known: WeakKeyDictionary[Segment, _Found] = WeakKeyDictionary()
_lock = ProcessLock()


def episode_starts(
    segments: Sequence[Segment], rows: int, readers: Mapping[str, FieldReader], locate: Locate
) -> Int64s:
    """The rows at which episodes begin, int64 ``[n]``, ascending, 0 first.

    An episode begins behind a row whose ``done`` is not 0, and, where times are known, at a row whose time is 0 or not
    larger than that of the row before: so an episode that was broken off ends where the next one begins.

    Args:
        segments: What holds the rows.
        rows: How many rows count.
        readers: Those of the fields ``done`` and, if it is there, ``time``.
        locate: Where the windows of some first rows and of a length lie.

    Raises:
        DataError: A value that its field does not allow.
    """
    parts = [np.zeros(1, np.int64)]
    begin, before = 0, None
    for segment in segments:
        end = min(begin + segment.num_rows, rows)
        found = _look(segment, begin, end, readers, locate)
        if before is not None and (before.ended or _begins(np.array([before.last]), np.array([found.first]))[0]):
            parts.append(np.array([begin]))
        parts.append(found.starts + begin)
        begin, before = end, found
    return np.concatenate(parts)


def _look(segment: Segment, begin: int, end: int, readers: Mapping[str, FieldReader], locate: Locate) -> _Found:
    """What the rows ``begin .. end - 1`` say, all of a segment or its first ones."""
    whole = end - begin == segment.num_rows
    with _lock:
        found = _known.get(segment) if whole else None
    if found is not None:
        return found
    starts: list[Int64s] = []
    ended, first, last = False, -1, -1
    row = begin
    while row < end:
        length = min(_LENGTH, end - row)
        windows = locate(np.arange(row, min(end - length, row + (_WINDOWS - 1) * length) + 1, length), length)
        n = len(windows) * length
        done = _read(readers["done"], windows) != 0
        breaks = np.concatenate([[ended], done[:-1]])
        ended = bool(done[-1])
        if "time" in readers:
            time = _read(readers["time"], windows)
            if row == begin:
                first = last = int(time[0])
                breaks[1:] |= _begins(time[:-1], time[1:])
            else:
                breaks |= _begins(np.concatenate([[last], time[:-1]]), time)
            last = int(time[-1])
        if row == begin:
            breaks[0] = False
        starts.append(np.nonzero(breaks)[0] + (row - begin))
        row += n
    found = _Found(np.concatenate(starts), ended, first, last)
    if whole:
        with _lock:
            _known[segment] = found
    return found


def _read(reader: FieldReader, windows: Windows) -> npt.NDArray[Any]:
    dtype = reader.stored_dtype(reader.spec.dtype)
    return reader.read(windows.part(0), dtype).reshape(-1)


def _begins(before: npt.NDArray[Any], time: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether steps of these times begin an episode, behind steps of those."""
    found: npt.NDArray[np.bool_] = (time == 0) | ((time >= 0) & (before >= 0) & (time <= before))
    return found
