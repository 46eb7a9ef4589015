"""Counting windows within episodes by running sums, so that the window of a rank is found by a binary search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

SPAN = 1 << 40
"""Numbers of environment e lie in ``e * SPAN .. (e + 1) * SPAN - 1``, so that the sorted rows of all environments are
one sorted array. More steps than this are a million a second for twelve days."""


@dataclass(frozen=True)
class WindowRule:
    """Which windows an episode has.

    Args:
        length: Steps in a window, L.
        left: How many of its steps may lie before the episode.
        right: How many of its steps may lie behind the episode.
        strict: Whether episodes of fewer than L steps have none; otherwise their windows are as long as they are.
        tiled: Whether windows lie side by side from the episode's first step on, instead of beginning anywhere.
    """

    length: int
    left: int = 0
    right: int = 0
    strict: bool = True
    tiled: bool = False

    def count(self, steps: Int64s) -> Int64s:
        """Windows of episodes of so many steps, int64 of the same shape."""
        if self.tiled:
            tiles: Int64s = steps // self.length if self.strict else -(-steps // self.length)
            return tiles
        size = np.minimum(steps, self.length)
        counts = steps - size + 1
        if self.left or self.right:
            counts += np.minimum(self.left, size - 1) + np.minimum(self.right, size - 1)
        kept: Int64s = np.where(steps >= (self.length if self.strict else 1), counts, 0)
        return kept

    def starts(self, begin: Int64s, end: Int64s, number: Int64s) -> Int64s:
        """The first step of window ``number`` of the episode ``begin .. end - 1``; with ``left`` maybe before it."""
        if self.tiled:
            number = number * self.length
        elif self.left:
            number = number - np.minimum(self.left, np.minimum(end - begin, self.length) - 1)
        return begin + number


class View:
    """What is counted for one rule."""

    def __init__(self, rule: WindowRule, spans: Int64s, room: int) -> None:
        self.rule = rule
        self.at = -1
        self.known = np.zeros(len(spans), np.int64)
        self.windows = Sums(spans, room)
        self.episodes = Sums(spans, room)
        nothing = np.zeros(len(spans), np.int64)
        self._edges = (nothing, nothing, nothing, nothing)

    def settle(self, at: int, first: Int64s, last: Int64s, oldest: Int64s, newest: Int64s) -> None:
        """Say which columns are alive when ``at`` steps were written, and the windows of the oldest and newest."""
        self.at, self._edges = at, (first, last, oldest, newest)

    def of_windows(self) -> Sums:
        """The sums of windows."""
        if self.windows.at != self.at:
            self.windows.close(self.at, *self._edges)
        return self.windows

    def of_episodes(self) -> Sums:
        """The sums of episodes that have windows."""
        if self.episodes.at != self.at:
            first, last, oldest, newest = self._edges
            self.episodes.close(self.at, first, last, (oldest > 0).astype(np.int64), (newest > 0).astype(np.int64))
        return self.episodes


class Sums:
    """Running sums over the episodes of every environment, and which episode a rank among the living belongs to.

    The oldest episode may be cut and the newest grows, so these two are counted anew; between them it is the sums.
    """

    def __init__(self, spans: Int64s, room: int) -> None:
        self.at = -1
        self._room = room
        # The sum before each column, up to the last one known; shifted as the begins are.
        self._sums = np.repeat((spans + (SPAN - 1))[:, None], room, axis=1)
        self._sums[:, 0] = spans
        self._first = self._oldest = np.zeros(len(spans), np.int64)
        self.cumulative = np.zeros(len(spans) + 1, np.int64)

    def append(self, envs: Int64s, columns: Int64s, values: Int64s, more: Int64s) -> None:
        """Add episodes: ``more`` of every environment, int64 ``[E]``, environment by environment."""
        running = np.concatenate([[0], np.cumsum(values)])
        begin = np.cumsum(more) - more
        known = self._sums[envs, columns[begin[envs]]]
        self._sums[envs, columns + 1] = known + running[1:] - running[begin[envs]]

    def close(self, at: int, first: Int64s, last: Int64s, oldest: Int64s, newest: Int64s) -> None:
        """Say which columns are alive, ``first .. last``, and the values of these two; ``newest`` 0 if they are one."""
        self.at = at
        envs = np.arange(len(first))
        between = np.where(last > first, self._sums[envs, last] - self._sums[envs, np.minimum(first + 1, last)], 0)
        self._first, self._oldest = first, oldest
        np.cumsum(oldest + between + newest, out=self.cumulative[1:])

    def find(self, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Environment, column and number within the episode of these ranks among all that is counted."""
        env: Int64s = self.cumulative[1:].searchsorted(ranks, side="right")
        number = ranks - self.cumulative[env]
        first, oldest = self._first[env], self._oldest[env]
        flat, origin = self._sums.reshape(-1), env * self._room
        wanted = flat.take(origin + first + 1, mode="clip") + (number - oldest)
        column = flat.searchsorted(wanted, side="right") - 1 - origin
        cut = number < oldest
        column = np.where(cut, first, column)
        return env, column, np.where(cut, number, wanted - flat[origin + column])


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs ``(e, 0 .. counts[e] - 1)`` in order."""
    envs = np.repeat(np.arange(len(counts)), counts)
    return envs, np.arange(len(envs)) - (np.cumsum(counts) - counts)[envs]
