"""Encoded images and what is wanted of them, cut into what is given to a process at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Images for one process at a time: enough for a cheap answer, few enough to share a batch evenly.
_TASK_IMAGES, _TASK_BYTES = 32, 8 << 20


class Encoded(NamedTuple):
    """Encoded images side by side, and the rows they go to.

    Args:
        data: Their bytes, uint8.
        ends: Where each begins, and the end of the last, int64 ``[n + 1]``.
        row: The first of the ``n`` rows they go to.
    """

    data: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    row: int


class Wanted(NamedTuple):
    """What every image must be.

    Args:
        shape: ``(H, W, C)``.
        pixel: The dtype of its pixels.
    """

    shape: tuple[int, int, int]
    pixel: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of an image's pixels."""
        return self.shape[0] * self.shape[1] * self.shape[2] * self.pixel.itemsize


def tasks(images: Sequence[Encoded], wanted: Wanted) -> Iterator[list[Encoded]]:
    """The images as what is given to a process at a time: several short runs, or a part of a long one."""
    most = max(1, min(_TASK_IMAGES, _TASK_BYTES // wanted.nbytes))
    task, room = [], most
    for run in images:
        first, count = 0, len(run.ends) - 1
        while first < count:
            end = min(first + room, count)
            task.append(Encoded(run.data, run.ends[first : end + 1], run.row + first))
            room -= end - first
            first = end
            if not room:
                yield task
                task, room = [], most
    if task:
        yield task


def row_of(task: Sequence[Encoded], number: int) -> int:
    """The row that image ``number`` of a task goes to."""
    return [row for run in task for row in range(run.row, run.row + len(run.ends) - 1)][number]
