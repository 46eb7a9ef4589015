"""How the segments of a store differ from those that it had earlier."""

from __future__ import annotations

from collections.abc import Sequence

from mouse_core._arrow.column import Growth
from mouse_core.store._segments import Segment


def growth_of(before: Sequence[Segment], after: Sequence[Segment]) -> Growth | None:
    """What was appended to some segments that others continue; None where it is more than appended rows."""
    kept = _same(before, after)
    appended = after[kept:]
    # Segments of datasets may say more about the shapes of rows, and many files are many chunks.
    grew = all(segment.extent is not None for segment in appended) and not any(
        len(segment.chunk_starts) > 2 for segment in (*appended, *before[kept:])
    )
    return Growth(kept, appended, before[kept:]) if grew else None


def continues(before: Sequence[Segment], after: Sequence[Segment]) -> bool:
    """Whether segments are some earlier ones, with rows behind them; of no segments it is not known.

    The last may have grown. In a folder the last ones may lie in other files by now: sealed, or merged.
    """
    kept = _same(before, after)
    replaced, coming = before[kept:], after[kept:]
    if not before or not replaced:
        return bool(before)
    if not coming or not coming[0].begins_as(replaced[0]):
        return False
    return len(replaced) == 1 or _folders(replaced) == _folders(coming) != {None}


def _folders(segments: Sequence[Segment]) -> set[object]:
    """What stands for the folders that they lie in, each of which has its rows in one order."""
    return {None if segment.place is None else segment.place[0] for segment in segments}


def _same(before: Sequence[Segment], after: Sequence[Segment]) -> int:
    """How many segments both begin with."""
    most = min(len(before), len(after))
    for known in (most, len(before) - 1):
        if 0 <= known <= most and after[:known] == before[:known]:
            return known
    return next(number for number in range(most) if before[number] is not after[number])
