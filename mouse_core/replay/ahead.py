"""The rows behind drawn ones: what transforms that look along time need of a draw of single transitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mouse_core.replay.protocols import Draw, Slots, Storage


def look_ahead(draw: Draw, storage: Storage, steps: int) -> Draw:
    """A draw of rows as one of slices, each of which is a drawn row and the ``steps`` rows behind it in its stream.

    The ends of episodes are not looked at; the transform does. Nothing is read across the write seam: behind the newest
    row of a stream there is nothing, however old the rows are that lie there. Such places repeat the newest row, and
    are masked.

    Args:
        draw: Of rows: ``index`` is ``[batch]``.
        storage: What was drawn from, in the order it was written.
        steps: How many rows behind each, at least 1.

    Returns:
        A draw with ``index`` ``[batch, 1 + steps]`` and a mask; the other fields are those of ``draw``.
    """
    slots, known = rows_behind(draw.index, storage, steps)
    if draw.mask is not None:
        known = known & draw.mask[:, None]
    return replace(draw, index=slots, mask=known)


def rows_behind(
    index: Slots, storage: Storage, steps: int
) -> tuple[Slots, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
    """The slots of rows and of the ``steps`` rows behind each in its stream.

    Returns:
        Slots, int64 ``[batch, 1 + steps]``, and which of them are there, bool of the same shape; the others repeat the
        slot of the newest row.
    """
    written, capacity, stride = storage.written, storage.capacity, storage.num_envs
    # Row n lies in slot n % capacity, and the newest is row written - 1.
    age = (written - 1 - index) % capacity
    offset = np.minimum(np.arange(steps + 1) * stride, age[:, None] // stride * stride)
    known = np.arange(steps + 1) * stride <= age[:, None]
    return (index[:, None] + offset) % capacity, known
