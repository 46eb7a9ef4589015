"""Places of a finding: the first place and the episodes, in memory that does not grow with the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mouse_core.inspect._checks.finding import Finding

# Of more episodes than these the first are named.
MOST = 1000


def some(episodes: npt.NDArray[np.int64] | Iterable[int]) -> tuple[int, ...]:
    """Numbers of episodes, each once, ascending; of very many the first."""
    found = episodes if isinstance(episodes, np.ndarray) else np.array(list(episodes), np.int64)
    return tuple(np.unique(found)[:MOST].tolist())


class Places:
    """Fed with places in their order.

    Args:
        column: The column that they are of; None: of none.
    """

    def __init__(self, column: str | None = None) -> None:
        self.column = column
        self._first: tuple[int, int] | None = None
        self._episodes: list[int] = []
        self._dimensions: set[int] = set()

    def add(
        self,
        episode: npt.NDArray[np.int64],
        step: npt.NDArray[np.int64],
        dimensions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take in places, ``[n]`` each; ``dimensions`` of the column that it is so in, each once."""
        if not len(episode):
            return
        if self._first is None:
            self._first = int(episode[0]), int(step[0])
        if dimensions is not None:
            self._dimensions.update(dimensions[: 2 - len(self._dimensions)].tolist())
        if len(self._episodes) < MOST:
            last = self._episodes[-1] if self._episodes else -1
            self._episodes += [number for number in np.unique(episode).tolist() if number > last]

    def told(self, finding: Finding) -> Finding:
        """Return the finding with its places."""
        if self._first is None:
            return finding
        (dimension,) = self._dimensions if len(self._dimensions) == 1 else (finding.dimension,)
        episode, step = self._first
        return replace(finding, dimension=dimension, episode=episode, step=step, episodes=tuple(self._episodes[:MOST]))
