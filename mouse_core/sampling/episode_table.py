"""The table of episodes: where they begin in streams of time steps, and which windows lie in them.

A store has one stream and never changes; a replay buffer has one for each environment, of which the oldest steps are
overwritten as new ones come. The windows are the same for both: a ``WindowRule`` says how many an episode of so many
steps has, and a ``WindowView`` numbers those of all episodes, so that a sampler draws from ``0 .. count - 1`` and a
binary search finds the window of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.sampling.plan import WindowRule

Int64s = npt.NDArray[np.int64]


class SortedSearch:
    """Finds for many numbers at once the last of some sorted ones that is not larger, several times as fast as halving.

    The numbers 0, 3, 5 of 12 have one in 4: in buckets of 2 the last that is not larger than 0, 2, 4, 6, 8, 10 is
    number 0, 0, 1, 2, 2, 2 of them. For 5, in the bucket of 4, it is at least number 1, and as number 2 is not larger
    than 5 either, number 2.

    Args:
        numbers: Int64 ``[n]``, ascending, 0 first.
        end: What is looked for is smaller, and not negative.
    """

    def __init__(self, numbers: Int64s, end: int) -> None:
        self._shift = max(0, (end // len(numbers)).bit_length() - 2)
        bucket = np.arange(0, max(end, 1), 1 << self._shift)
        self._first = np.searchsorted(numbers, bucket, side="right") - 1
        self._next = np.append(numbers[1:], np.iinfo(np.int64).max)

    def find(self, numbers: Int64s) -> Int64s:
        """Which it is of each, int64 ``[n]``."""
        found: Int64s = self._first[numbers >> self._shift]
        (behind,) = np.nonzero(self._next[found] <= numbers)
        while len(behind):
            found[behind] += 1
            behind = behind[self._next[found[behind]] <= numbers[behind]]
        return found


Bools = npt.NDArray[np.bool_]

SPAN = 1 << 40
"""Numbers of environment e lie in ``e * SPAN .. (e + 1) * SPAN - 1``, so that the sorted rows of all environments are
one sorted array. More steps than this are a million a second for twelve days."""

_VIEWS_KEPT = 4


class Windows(NamedTuple):
    """Windows within episodes.

    Attributes:
        env: The environment of each, int64 ``[n]``.
        start: Its first step, which may lie before the episode.
        begin, end: The first step of the episode that still exists, and the one behind its last.
        traj_id: The episode's id.
    """

    env: Int64s
    start: Int64s
    begin: Int64s
    end: Int64s
    traj_id: Int64s


class EpisodeTable:
    """The episodes of some streams of time steps.

    Every environment is a stream of steps ``0, 1, 2, ...`` of which the newest ``steps`` exist. An episode is a stretch
    of it, from its begin up to the next one's. A table ``[environments, columns]`` holds the begins of those that are
    alive, a row of it sorted.

    Args:
        num_envs: Environments, E.
        steps: Time steps that exist at most.
        first: The number of the first one.
    """

    def __init__(self, num_envs: int, steps: int, *, first: int = 0) -> None:
        self.num_envs = num_envs
        self.steps = steps
        self.end = first
        self._base = first
        self._envs = np.arange(num_envs, dtype=np.int64)
        self._envs_twice = np.tile(self._envs, 2)
        self._spans = self._envs * SPAN
        self._room = 16
        self._begins = self._unfilled()
        self._ids = np.zeros((num_envs, self._room), np.int64)
        self._counts = np.zeros(num_envs, np.int64)
        self._views: dict[WindowRule, WindowView] = {}
        # How episodes are found where none comes any more.
        self._search: SortedSearch | None = None

    @classmethod
    def of_begins(cls, begins: Int64s, end: int) -> EpisodeTable:
        """One stream of ``end`` steps, all of which exist.

        Args:
            begins: The steps at which episodes begin, int64 ``[n]``, ascending, 0 first.
            end: How many steps, at least 1.
        """
        table = cls(1, end)
        table._room = len(begins)
        table._begins, table._ids = begins[None].copy(), np.arange(len(begins))[None]
        table._counts, table.end = np.array([len(begins)]), end
        table._search = _sorted_search(begins, end)
        return table

    def _unfilled(self) -> Int64s:
        """A table in which nothing is filled in: larger than any number of its environment."""
        return np.repeat((self._spans + (SPAN - 1))[:, None], self._room, axis=1)

    @property
    def begin(self) -> int:
        """The oldest time step there is."""
        return max(self.end - self.steps, self._base)

    def view(self, rule: WindowRule) -> WindowView:
        """The windows there are, as long as nothing but new steps comes."""
        view = self._views.get(rule)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.pop(next(iter(self._views)))
            view = self._views[rule] = WindowView(self, rule)
        return view

    def longest(self) -> int:
        """Steps of the longest episode there is; looks at all of them."""
        first = self._oldest()
        envs, columns = ragged(self._counts - first)
        begin, end, _ = self._there(envs, columns + first[envs])
        return int((end - begin).max(initial=0))

    def episode_of(self, env: Int64s, step: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Begin, also where it is overwritten, end and id of the episodes of some steps that exist."""
        column = self._column(env, step)
        return *self._bounds(env, column), self._ids[env, column]

    def _column(self, env: Int64s, step: Int64s) -> Int64s:
        if self._search is not None:
            return self._search.find(step)
        at: Any = 0 if self.num_envs == 1 else env
        place = self._begins.reshape(-1).searchsorted(self._spans[at] + step, side="right")
        column: Int64s = place - 1 - at * self._room
        return column

    def _oldest(self) -> Int64s:
        """The column of the oldest episode alive of every environment, int64 ``[E]``."""
        found = self._begins.reshape(-1).searchsorted(self._spans + self.begin, side="right")
        first: Int64s = np.maximum(found - 1 - self._envs * self._room, 0)
        return first

    def _bounds(self, env: Int64s, column: Int64s) -> tuple[Int64s, Int64s]:
        """First step, which may be gone, and the one behind the last, of some episodes."""
        at: Any = 0 if self.num_envs == 1 else env
        flat, place, spans = self._begins.reshape(-1), at * self._room + column, self._spans[at]
        begin = flat[place] - spans
        after = flat.take(place + 1, mode="clip") - spans
        end = np.where(column + 1 == self._counts[at], self.end, after)
        return begin, end

    def _there(self, env: Int64s, column: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Of some episodes the first step that there is, the one behind the last, and how many before it are gone."""
        begin, end = self._bounds(env, column)
        first = np.maximum(begin, self.begin)
        return first, end, first - begin


class WindowView:
    """The windows of one rule, numbered: one environment after another, episode by episode.

    Args:
        table: Where the episodes are.
        rule: Which windows they have.
    """

    def __init__(self, table: EpisodeTable, rule: WindowRule) -> None:
        self.rule = rule
        self._table = table
        self._windows = _RunningCounts(table, rule.count)
        self._episodes = _RunningCounts(table, rule.has_any)

    @property
    def count(self) -> int:
        """How many windows there are."""
        return self._windows.total

    @property
    def episode_count(self) -> int:
        """How many episodes have windows."""
        return self._episodes.total

    def at(self, ranks: Int64s) -> Windows:
        """The windows of these ranks, int64 ``[n]`` in ``0 .. count - 1``."""
        env, column, number = self._windows.find(ranks)
        return self._made(env, column, self._table._there(env, column), number)

    def in_episodes(self, ranks: Int64s, uniform: npt.NDArray[np.float64]) -> Windows:
        """A window of each of the episodes of these ranks.

        Args:
            ranks: Int64 ``[n]`` in ``0 .. episode_count - 1``.
            uniform: Which of its windows, float64 ``[n]`` in ``[0, 1)``.
        """
        env, column, _ = self._episodes.find(ranks)
        begin, end, lost = there = self._table._there(env, column)
        counts = self.rule.count(end - begin, lost)
        number = np.minimum((uniform * counts).astype(np.int64), counts - 1)
        return self._made(env, column, there, number)

    def _made(self, env: Int64s, column: Int64s, there: tuple[Int64s, Int64s, Int64s], number: Int64s) -> Windows:
        begin, end, lost = there
        return Windows(env, self.rule.starts(begin, end, number, lost), begin, end, self._table._ids[env, column])


class _RunningCounts:
    """How many windows (or episodes that have one) lie before each episode, and which episode a rank falls in.

    What an episode has is counted once, when it has ended. But the head of the oldest may be overwritten and the newest
    still grows: what these two have is counted anew whenever steps have come.

    Episodes of 5, 4 and 3 steps have 3, 2 and 1 windows of 3 steps, so before them lie 0, 3 and 5. Two steps of the
    first are overwritten, and 2 of its windows with them: rank r is number r + 2 of all there ever were. So rank 0 is
    number 2, which lies in the first episode (0 <= 2 < 3), of whose windows that are left it is number 2 - 0 - 2 = 0;
    and rank 1 is number 3, in the second (3 <= 3 < 5), of which it is window 3 - 3 = 0.

    Args:
        table: Where the episodes are.
        count: How many there are in episodes of so many steps, of which others are lost.
    """

    def __init__(self, table: EpisodeTable, count: Callable[..., Int64s]) -> None:
        self._table = table
        self._count = count
        self._at = -1  # the end of the streams when all was counted
        self._closed = np.zeros(table.num_envs, np.int64)  # how many episodes have ended and are counted
        # What lies before each episode, up to the first that is not counted; shifted as the begins are.
        self._before = table._unfilled()
        self._before[:, 0] = table._spans
        # The end of each environment's share of all ranks; and of every environment the place of the oldest episode in
        # the flat table, what is gone of it, and what leads from a rank to the number among all there ever were.
        self._ends = self._oldest = self._gone = self._shift = self._closed
        self._search: SortedSearch | None = None

    @property
    def total(self) -> int:
        """How many there are now."""
        self._settle()
        return int(self._ends[-1])

    def find(self, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Environment, column and number within the episode of these ranks among all there are."""
        self._settle()
        alone = self._table.num_envs == 1
        env: Int64s = np.zeros(len(ranks), np.int64) if alone else self._ends.searchsorted(ranks, side="right")
        at: Any = 0 if alone else env
        number = ranks + self._shift[at]
        flat = self._before.reshape(-1)
        place = flat.searchsorted(number, side="right") - 1 if self._search is None else self._search.find(number)
        number -= flat[place]
        number -= np.where(place == self._oldest[at], self._gone[at], 0)
        return env, place - at * self._table._room, number

    def _settle(self) -> None:
        table = self._table
        if self._at == table.end:
            return
        newest = table._counts - 1
        self._add_ended(newest)
        oldest, envs = table._oldest(), table._envs
        begin, end, lost = table._there(table._envs_twice, np.concatenate([oldest, newest]))
        of_oldest, of_newest = self._count(end - begin, lost).reshape(2, -1)
        self._oldest = envs * table._room + oldest
        flat, several = self._before.reshape(-1), newest > oldest
        before, behind = flat[self._oldest], flat[self._oldest + several]
        there = of_oldest + several * (flat[self._oldest + newest - oldest] - behind + of_newest)
        self._ends = np.cumsum(there)
        self._gone = several * (behind - before - of_oldest)
        self._shift = before + self._gone - self._ends + there
        if table._search is not None:
            self._search = _sorted_search(flat[: int(newest[0]) + 1], int(there[0]))
        self._at = table.end

    def _add_ended(self, newest: Int64s) -> None:
        """Count the episodes before the newest that are not counted yet."""
        table, more = self._table, newest - self._closed
        if not more.any():
            return
        if table.num_envs == 1:
            first, last = int(self._closed[0]), int(newest[0])
            counts = self._count(np.diff(table._begins[0, first : last + 1]))
            self._before[0, first + 1 : last + 1] = self._before[0, first] + np.cumsum(counts)
        else:
            envs, columns = ragged(more)
            columns += self._closed[envs]
            begin, end = table._bounds(envs, columns)
            running = np.concatenate([[0], np.cumsum(self._count(end - begin))])
            first_of = (np.cumsum(more) - more)[envs]
            self._before[envs, columns + 1] = self._before[envs, self._closed[envs]] + running[1:] - running[first_of]
        self._closed = newest


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs ``(e, 0 .. counts[e] - 1)`` in order: of ``[2, 0, 1]`` it is ``(0, 0), (0, 1), (2, 0)``."""
    envs = np.repeat(np.arange(len(counts)), counts)
    return envs, np.arange(len(envs)) - (np.cumsum(counts) - counts)[envs]


def _sorted_search(numbers: Int64s, end: int) -> SortedSearch:

    return SortedSearch(numbers, end)
