"""The episode index, which records where episodes begin and end in streams of time steps, and which windows lie in each
episode.

A store has one stream, whose steps are never overwritten. A replay buffer has one stream for each environment, and the
ring of the buffer overwrites the oldest steps when new steps are added. Both use the same ``EpisodeIndex``, which
records the episodes while rows are added, and never searches the rows.

A ``WindowRule`` determines the windows of an episode from its number of steps. A ``WindowView`` gives every window of
all episodes an index, its rank: a sampler draws a rank from ``0 .. count - 1``, and a binary search finds the window
with this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SPAN = 1 << 40
"""The steps of environment e have the indices ``e * SPAN .. (e + 1) * SPAN - 1``, so that the sorted starts of episodes
of all environments form a single sorted array. At a million steps per second, an environment reaches the limit after
twelve days.
"""

_VIEWS_KEPT = 4


def step_begins(
    ends: Bools | None = None,
    end_before: Any = None,
    *,
    ids: npt.NDArray[Any] | None = None,
    id_before: Any = None,
    times: npt.NDArray[Any] | None = None,
    time_before: Any = -1,
) -> Bools:
    """Return whether each step begins an episode: True if the previous step ends an episode, if the previous step has
    another id, or if the time restarts.

    Three examples: for ``ends`` False, True, False, the result is False, False, True (or True, False, True if
    ``end_before`` is True); for ``ids`` 4, 4, 7, the result is False, False, True; and for ``times`` 3, 0, 1, the
    result is False, True, False.

    Args:
        ends: Whether each step is the last step of its episode, ``[n, ...]``.
        ids: The id of each step's episode, ``[n, ...]``.
        times: The index of each step in its episode, ``[n, ...]``; below 0: unknown.
        end_before, id_before, time_before: The end flag, id and time of the step before the first step, ``[...]``;
            None, or a time of -1: unknown.

    Returns:
        Bool ``[n, ...]``.
    """
    shown = next(values for values in (ends, ids, times) if values is not None)
    found = np.zeros(shown.shape, np.bool_)
    if ends is not None:
        found[1:] = ends[:-1]
    if end_before is not None:
        found[:1] = end_before
    if ids is not None:
        found[1:] |= ids[1:] != ids[:-1]
        if id_before is not None:
            found[:1] |= ids[:1] != id_before
    if times is not None:
        found[1:] |= restarts(times[:-1], times[1:])
        found[:1] |= restarts(time_before, times[:1])
    return found


def sums_by_episode(
    begins: Bools, values: npt.NDArray[Any], open_sum: Any, open_steps: int
) -> tuple[npt.NDArray[Any], Int64s]:
    """Sum the values of each episode in a block of steps; the block continues earlier blocks.

    Example: an open episode has 2 steps with the sum 10. The values of the block are 1, 2, 3, and the step with value 3
    begins an episode. The sums are 10 + 1 + 2 = 13 (of 4 steps) and 3 (of 1 step).

    Args:
        begins: Mask of the steps that begin an episode, ``[n]``, with at least one step.
        values: The values, ``[n, ...]``.
        open_sum, open_steps: The sum so far, and the number of steps so far, of the episode that was unfinished at the
            end of the previous block.

    Returns:
        Sum and number of steps of the open episode, if it has steps, and of each episode that begins in the block. The
        last episode can continue in the next block.
    """
    starts = np.flatnonzero(begins)
    is_new = len(starts) > 0 and starts[0] == 0
    edges = starts if is_new else np.append(0, starts)
    sums, steps = np.add.reduceat(values, edges, axis=0), np.diff(edges, append=len(begins))
    if not is_new:
        sums[0] += open_sum
        steps[0] += open_steps
    elif open_steps:
        sums, steps = np.concatenate([np.array([open_sum], sums.dtype), sums]), np.append(open_steps, steps)
    return sums, steps


def restarts(before: Any, time: Any) -> Any:
    """Return whether each step begins an episode: True if the time of the step is 0, or not larger than the time of the
    previous step. Times below 0 are treated as unknown.
    """
    return (time == 0) | ((time >= 0) & (before >= 0) & (time <= before))


@dataclass(frozen=True)
class WindowRule:
    """The rule that defines the windows of an episode.

    An episode of 5 steps has three windows of 3 steps, which begin at its steps 0, 1 and 2. With ``right=1``, the
    episode also has a window that begins at step 3 and whose last step does not exist. With ``tiled=True``, the episode
    has one window, at step 0; with ``strict=False``, it also has a window at step 3.

    Args:
        length: Steps in a window, L.
        left: Largest number of steps of a window that lie before the episode.
        right: Largest number of steps of a window that lie after the episode.
        strict: Whether episodes of fewer than L steps have no windows. Otherwise, the windows of such an episode are as
            long as the episode.
        tiled: Whether windows follow each other without overlap, from the episode's first step on; otherwise a window
            begins at every step.
        before, behind: How many steps at an episode's beginning, and at its end, belong to no window. With
            ``before=1``, the episode of 5 steps has windows of 3 steps that begin at steps 1 and 2.
        every: Use only each ``every``-th window of an episode, starting with the first window. For example, 2 selects
            the windows that begin at steps 0 and 2. If the first steps of an episode were overwritten, the selection
            among its other windows is unchanged. If fewer than L steps are left and ``strict`` is False, the episode
            has one window, at the first selected step that still exists.
    """

    length: int
    left: int = 0
    right: int = 0
    strict: bool = True
    tiled: bool = False
    before: int = 0
    behind: int = 0
    every: int = 1

    def count(self, steps: Int64s, lost: Int64s | int = 0) -> Int64s:
        """Return the number of windows of episodes with ``steps`` existing steps, after ``lost`` steps were
        overwritten, int64."""
        if self.before or self.behind:
            steps = np.maximum(steps - (self.before + self.behind), 0)
        if self.tiled:
            tiles: Int64s = steps // self.length if self.strict else -(-steps // self.length)
            return tiles
        places = self._places(steps)
        if self.every == 1:
            return places
        skipped = self._skipped(steps, lost)
        counts: Int64s = np.maximum(-((skipped - places) // self.every), 0)
        if self.strict:
            return counts
        # If no window fits any more, the window that begins at the first counted step remains, if this step exists.
        return np.maximum(counts, skipped - self._lead(steps) < steps)

    def _places(self, steps: Int64s) -> Int64s:
        """Return the number of steps at which windows can begin if ``every`` is 1."""
        size = np.minimum(steps, self.length)
        counts = steps - size + 1
        if self.left or self.right:
            counts += np.minimum(self.left, size - 1) + np.minimum(self.right, size - 1)
        places: Int64s = np.where(steps >= (self.length if self.strict else 1), counts, 0)
        return places

    def _lead(self, steps: Int64s) -> Int64s:
        """Return how many of the steps in ``_places`` lie before the episode."""
        lead: Int64s = np.minimum(self.left, np.minimum(steps, self.length) - 1)
        return lead

    def _skipped(self, steps: Int64s, lost: Int64s | int) -> Int64s:
        """Return how many of the steps in ``_places`` are before the first step that ``every`` selects."""
        return -(self._lead(steps + lost) + lost - self._lead(steps)) % self.every

    def has_any(self, steps: Int64s, lost: Int64s | int = 0) -> Int64s:
        """Return 1 for each episode of ``steps`` steps that has a window, and 0 for other episodes."""
        return (self.count(steps, lost) > 0).astype(np.int64)

    def starts(self, begin: Int64s, end: Int64s, number: Int64s, lost: Int64s | int = 0) -> Int64s:
        """Return the first step of the window with index ``number`` in the episode ``begin .. end - 1``. If ``left`` is
        above 0, the first windows begin before the episode."""
        steps = end - begin - (self.before + self.behind)
        if self.tiled:
            number = number * self.length
        elif self.every > 1:
            number = number * self.every + self._skipped(steps, lost)
        if self.left:
            number = number - self._lead(steps)
        return begin + self.before + number

    def begins(self, number: Int64s, steps: Int64s, lost: Int64s) -> Bools:
        """Return whether a window begins at step ``number`` of an episode. Call this method only if ``left`` is 0, so
        that no window begins before its episode."""
        places = self._places(steps)
        found: Bools = number < places
        if self.every > 1:
            skipped = self._skipped(steps, lost)
            found &= (number - skipped) % self.every == 0
            if not self.strict:
                found |= (skipped >= places) & (number == skipped)
        return found


class Windows(NamedTuple):
    """Windows within episodes.

    Attributes:
        env: The environment of each window, int64 ``[n]``.
        start: The window's first step, which can lie before the episode.
        begin, end: The first step of the episode that still exists, and the step after the episode's last step.
        traj_id: The episode's id.
    """

    env: Int64s
    start: Int64s
    begin: Int64s
    end: Int64s
    traj_id: Int64s


class EpisodeIndex:
    """The episodes in the streams of time steps of several environments.

    Every environment has a stream of steps ``0, 1, 2, ...``. Only the newest ``steps`` steps of each stream exist. An
    episode is a run of steps from its start up to the start of the next episode. A table ``[environments, columns]``
    contains the starts of the existing episodes; each row of the table is sorted. ``extend`` adds the episodes that
    begin in new steps; overwritten episodes are removed when the table needs room.

    Step t of environment e lies in slot ``t % steps * num_envs + e`` of a storage: in a ring of 100 steps and 2
    environments, step 298 of environment 1 lies in slot 98 * 2 + 1 = 197.

    Args:
        num_envs: Number of environments, E.
        steps: Largest number of time steps of an environment that exist at the same time.
        first: The index of the first step.
        next_ids: The next id in every environment, if the index assigns the ids of episodes, int64 ``[E]``; by default
            ``0 .. E - 1``. Episodes of environment e have the ids e, e + E, e + 2 * E, ...

    Attributes:
        end: The index of the next step.
        next_ids: As above.
    """

    def __init__(self, num_envs: int, steps: int, *, first: int = 0, next_ids: Int64s | None = None) -> None:
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
        self._search: SortedSearch | None = None  # only if no steps will be added
        # Whether the last step of an environment ended its episode, so that its next step begins an episode.
        self._ended = np.ones(num_envs, np.bool_)
        self.next_ids = self._envs.copy() if next_ids is None else next_ids.copy()

    @classmethod
    def of_begins(cls, begins: Int64s, end: int) -> EpisodeIndex:
        """Return the index of one stream of ``end`` steps, all of which exist.

        Args:
            begins: The steps at which episodes begin, int64 ``[n]``, ascending, 0 first.
            end: Number of steps, at least 1.
        """
        index = cls(1, end)
        index._room = len(begins)
        index._begins, index._ids = begins[None].copy(), np.arange(len(begins))[None]
        index._counts, index.end = np.array([len(begins)]), end
        index._search = SortedSearch(begins, end)
        return index

    def _unfilled(self) -> Int64s:
        """Return an empty table, in which each entry is larger than the index of any step of its environment."""
        return np.repeat((self._spans + (SPAN - 1))[:, None], self._room, axis=1)

    # ------------------------------------------------------------------ reading

    @property
    def begin(self) -> int:
        """The oldest time step that exists."""
        return max(self.end - self.steps, self._base)

    def view(self, rule: WindowRule) -> WindowView:
        """Return the view of a rule's windows."""
        view = self._views.get(rule)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.pop(next(iter(self._views)))
            view = self._views[rule] = WindowView(self, rule)
        return view

    def longest(self) -> int:
        """Return the number of steps of the longest episode; the call takes time proportional to the number of
        episodes."""
        first = self._oldest()
        envs, columns = ragged(self._counts - first)
        begin, end, _ = self._there(envs, columns + first[envs])
        return int((end - begin).max(initial=0))

    def episode_of(self, step: Int64s, env: Int64s | int = 0) -> tuple[Int64s, Int64s, Int64s]:
        """Return the start, the end and the id of each step's episode, in the shape of ``step``; the step at the start
        can be overwritten already.
        """
        column = self._search.find(step) if self._search is not None else self._column(step, env)
        return *self._bounds(env, column), self._ids[env, column]

    def steps_of(self, slots: Int64s) -> tuple[Int64s, Int64s]:
        """Return the step in each slot of a storage, and the environment of the step, each in the shape of
        ``slots``."""
        place, env = (slots, np.zeros_like(slots)) if self.num_envs == 1 else np.divmod(slots, self.num_envs)
        return self.begin + (place - self.begin) % self.steps, env

    def slots_of(self, step: Int64s, env: Int64s | int) -> Int64s:
        """Return the slot of each step in a storage."""
        slots: Int64s = step % self.steps * self.num_envs + env
        return slots

    def _column(self, step: Int64s, env: Int64s | int) -> Int64s:
        at: Any = 0 if self.num_envs == 1 else env
        place = self._begins.reshape(-1).searchsorted(self._spans[at] + step, side="right")
        column: Int64s = place - 1 - at * self._room
        return column

    def _oldest(self) -> Int64s:
        """Return the column of the oldest existing episode of every environment, int64 ``[E]``."""
        found = self._begins.reshape(-1).searchsorted(self._spans + self.begin, side="right")
        first: Int64s = np.maximum(found - 1 - self._envs * self._room, 0)
        return first

    def _bounds(self, env: Int64s | int, column: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first step of each episode, which can be overwritten already, and the step after the last step."""
        at: Any = 0 if self.num_envs == 1 else env
        flat, place, spans = self._begins.reshape(-1), at * self._room + column, self._spans[at]
        begin = flat[place] - spans
        after = flat.take(place + 1, mode="clip") - spans
        end = np.where(column + 1 == self._counts[at], self.end, after)
        return begin, end

    def _there(self, env: Int64s, column: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return for each episode the first existing step, the step after the last step, and the number of overwritten
        steps."""
        begin, end = self._bounds(env, column)
        first = np.maximum(begin, self.begin)
        return first, end, first - begin

    # ------------------------------------------------------------------ writing

    def extend(self, ends: Bools | None, ids: Int64s | None) -> None:
        """Add time steps.

        Args:
            ends: Whether each step is the last of its episode, ``[n, E]``; None: no step is.
            ids: The id of each step's episode, ``[n, E]``; an episode begins where the id changes. If ``ids`` is None,
                each new episode gets the next id.
        """
        n = len(ends) if ends is not None else len(ids) if ids is not None else 0
        if not n:
            return
        if n == 1 and self.num_envs == 1:
            self._extend_by_one(ends is not None and bool(ends[0, 0]), None if ids is None else int(ids[0, 0]))
            return
        new = step_begins(
            ends, self._ended, ids=ids, id_before=None if ids is None else self._ids[self._envs, self._counts - 1]
        )
        envs, steps = np.nonzero(new.T)
        if len(envs):
            # Number of earlier begins in the same environment: for envs 0, 0, 1, 1, 1 it is 0, 1, 0, 1, 2.
            counts = np.bincount(envs, minlength=self.num_envs)
            rank = np.arange(len(envs)) - (np.cumsum(counts) - counts)[envs]
            self._make_room(int((self._counts + counts).max()), counts)
            columns = self._counts[envs] + rank
            self._begins[envs, columns] = self._spans[envs] + self.end + steps
            if ids is None:
                self._ids[envs, columns] = self.next_ids[envs] + rank * self.num_envs
                self.next_ids += counts * self.num_envs
            else:
                self._ids[envs, columns] = ids[steps, envs]
            self._counts += counts
        self._ended = np.zeros(self.num_envs, np.bool_) if ends is None else ends[-1].copy()
        self.end += n

    def begin_earlier(self, begins: Int64s) -> None:
        """Set the start of each environment's oldest episode to the given steps, ``[E]``, which are already
        overwritten.
        """
        self._begins[self._envs, self._oldest()] = begins + self._spans
        self._base = min(self._base, int(begins.min()))

    def cut(self, envs: Bools) -> None:
        """Begin an episode with the next step of each environment in the mask ``envs``, bool ``[E]``."""
        self._ended = self._ended | envs

    def _extend_by_one(self, end: bool, traj_id: int | None) -> None:
        count = self._counts.item(0)
        if self._ended.item(0) or (traj_id is not None and self._ids.item(0, count - 1) != traj_id):
            if count == self._room:
                self._make_room(count + 1, np.ones(1, np.int64))
                count = self._counts.item(0)
            if traj_id is None:
                traj_id = self.next_ids.item(0)
                self.next_ids[0] = traj_id + 1
            self._begins[0, count] = self.end
            self._ids[0, count] = traj_id
            self._counts[0] = count + 1
        self._ended[0] = end
        self.end += 1

    def _make_room(self, wanted: int, more: Int64s) -> None:
        """Remove overwritten episodes; if the table is still more than half full, add columns to the table."""
        if wanted <= self._room:
            return
        first = self._oldest()
        alive = self._counts - first
        while 2 * int((alive + more).max()) > self._room:
            self._room *= 2
        begins, ids = self._begins, self._ids
        self._begins, self._ids = self._unfilled(), np.zeros((self.num_envs, self._room), np.int64)
        envs, columns = ragged(alive)
        self._begins[envs, columns] = begins[envs, columns + first[envs]]
        self._ids[envs, columns] = ids[envs, columns + first[envs]]
        self._counts = alive
        self._views.clear()

    def ends(self, step: Int64s, env: Int64s) -> Bools:
        """Whether each step is known to be the last of its episode. For the newest step, the result is True only if
        ``extend`` marked the step as an end.
        """
        _, end, _ = self.episode_of(step, env)
        found: Bools = (end == step + 1) & ((end < self.end) | self._ended[env])
        return found

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Int64s]:
        """Return the state as arrays ``[n]``, with one value per episode."""
        first = self._oldest()
        envs, columns = ragged(self._counts - first)
        columns += first[envs]
        return {
            "steps": np.array([self.num_envs, self.steps, self._base, self.end]),
            "counts": self._counts - first,
            "begins": self._begins[envs, columns] - self._spans[envs],
            "ids": self._ids[envs, columns],
            "ended": self._ended.astype(np.int64),
            "next_ids": self.next_ids.copy(),
        }

    @staticmethod
    def of_state(state: Mapping[str, Int64s]) -> EpisodeIndex:
        """Return the episode index that ``state`` describes.

        Raises:
            ValueError: The arrays contradict each other.
        """
        num_envs, steps, base, end = state["steps"].tolist()
        counts, begins = state["counts"], state["begins"]
        if not (num_envs >= 1 and steps >= 1 and 0 <= base <= end < SPAN):
            raise ValueError(
                f"expected [num_envs, steps, base, end] with num_envs and steps >= 1 and base <= end, found "
                f"{state['steps'].tolist()}"
            )
        if any(len(state[name]) != num_envs for name in ("counts", "ended", "next_ids")) or counts.min() < 0:
            raise ValueError(f"expected counts, ended and next_ids with one number for each of {num_envs} environments")
        if not len(begins) == len(state["ids"]) == counts.sum():
            raise ValueError(
                f"expected {counts.sum()} episodes, found {len(begins)} starts and {len(state['ids'])} ids"
            )
        made = EpisodeIndex(num_envs, steps, first=base, next_ids=state["next_ids"].astype(np.int64))
        envs, columns = ragged(counts)
        same = envs[1:] == envs[:-1]
        if len(begins) and (begins.min() < base or begins.max() >= end or (np.diff(begins)[same] <= 0).any()):
            raise ValueError("expected ascending starts of episodes within the ring")
        if (counts > 0).any() != (end > base) or (
            len(begins) and (begins[columns == 0] > max(end - steps, base)).any()
        ):
            raise ValueError("expected episodes for all existing steps")
        made._make_room(int(counts.max()), counts)
        made._begins[envs, columns] = begins + made._spans[envs]
        made._ids[envs, columns] = state["ids"]
        made._counts, made._ended, made.end = counts.astype(np.int64), state["ended"] != 0, end
        return made


class WindowView:
    """The windows of one rule in all episodes, indexed in the order of environments, then of episodes.

    Args:
        table: The index of the episodes.
        rule: The rule that defines the windows of an episode.
    """

    def __init__(self, table: EpisodeIndex, rule: WindowRule) -> None:
        self.rule = rule
        self._table = table
        self._windows = _RunningCounts(table, rule.count)
        self._episodes = _RunningCounts(table, rule.has_any)

    @property
    def count(self) -> int:
        """The number of windows."""
        return self._windows.total

    @property
    def episode_count(self) -> int:
        """The number of episodes that have windows."""
        return self._episodes.total

    def at(self, ranks: Int64s) -> Windows:
        """Return the windows with the indices ``ranks``, int64 ``[n]`` in ``0 .. count - 1``."""
        env, column, number = self._windows.find(ranks)
        return self._made(env, column, self._table._there(env, column), number)

    def in_episodes(self, ranks: Int64s, uniform: npt.NDArray[np.float64]) -> Windows:
        """Return one window of each episode whose index is in ``ranks``.

        Args:
            ranks: Indices among the episodes that have windows, int64 ``[n]`` in ``0 .. episode_count - 1``.
            uniform: Position of the window among the windows of its episode, float64 ``[n]`` in ``[0, 1)``.
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
    """For each episode, counts how many windows (or how many episodes with windows) lie before it. A search in these
    counts finds the episode of the window with a given rank.

    The windows of an episode are counted once, when the episode has ended. The windows of the oldest and of the newest
    episode are counted again after steps were added, because steps of the oldest episode can be overwritten, and the
    newest episode grows.

    Example: episodes of 5, 4 and 3 steps have 3, 2 and 1 windows of 3 steps, so 0, 3 and 5 windows lie before them. Two
    steps of the first episode are overwritten, so 2 of its windows are gone, and rank r is window r + 2 of all windows
    that ever existed. Rank 0 is window 2, in the first episode (0 <= 2 < 3): its remaining window 2 - 0 - 2 = 0. Rank 1
    is window 3, in the second episode (3 <= 3 < 5): its window 3 - 3 = 0.

    Args:
        table: The index of the episodes.
        count: The function that returns the number of windows of each episode; its arguments are how many steps of the
            episode exist, and how many were overwritten.
    """

    def __init__(self, table: EpisodeIndex, count: Callable[..., Int64s]) -> None:
        self._table = table
        self._count = count
        self._at = -1  # the end of the streams at the last count
        self._closed = np.zeros(table.num_envs, np.int64)  # number of ended episodes that are counted
        # Number of windows before each episode, up to the first uncounted one; shifted by SPAN for each environment.
        self._before = table._unfilled()
        self._before[:, 0] = table._spans
        # For each environment: the end of its ranks; the position of its oldest episode in the flat table; the number
        # of lost windows of that episode; and the difference between a rank and its number among all windows that ever
        # existed.
        self._ends = self._oldest = self._gone = self._shift = self._closed
        self._search: SortedSearch | None = None

    @property
    def total(self) -> int:
        """The current number of windows, or of episodes."""
        self._settle()
        return int(self._ends[-1])

    def find(self, ranks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the environment, the column, and the index within the episode, for each rank."""
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
        # All arrays have one value per environment. Example: episodes of 5, 4 and 3 steps have 3, 2 and 1 windows of 3
        # steps, and 2 steps of the first are overwritten. The oldest is column 0 with 1 window left, the newest is
        # column 2 with 1 window.
        newest = table._counts - 1
        self._add_ended(newest)
        oldest, envs = table._oldest(), table._envs
        begin, end, lost = table._there(table._envs_twice, np.concatenate([oldest, newest]))
        of_oldest, of_newest = self._count(end - begin, lost).reshape(2, -1)
        self._oldest = envs * table._room + oldest
        flat, several = self._before.reshape(-1), newest > oldest
        # Number of windows that ever lay before the oldest episode, and before the episode behind it: 0 and 3. If the
        # oldest is also the newest, ``several`` is False and both numbers are equal.
        before, behind = flat[self._oldest], flat[self._oldest + several]
        # Windows of the oldest episode, of the episodes between (5 - 3 = 2), and of the newest: 1 + 2 + 1 = 4 exist.
        there = of_oldest + several * (flat[self._oldest + newest - oldest] - behind + of_newest)
        self._ends = np.cumsum(there)
        # The oldest episode lost 3 - 0 - 1 = 2 windows, so rank 0 is window 2 of all that ever existed.
        self._gone = several * (behind - before - of_oldest)
        self._shift = before + self._gone - self._ends + there
        if table._search is not None:
            self._search = SortedSearch(flat[: int(newest[0]) + 1], int(there[0]))
        self._at = table.end

    def _add_ended(self, newest: Int64s) -> None:
        """Count the windows of the ended episodes that are not counted yet."""
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
            # One running sum over all environments; its value at the first episode of each environment is subtracted.
            running = np.concatenate([[0], np.cumsum(self._count(end - begin))])
            first_of = (np.cumsum(more) - more)[envs]
            self._before[envs, columns + 1] = self._before[envs, self._closed[envs]] + running[1:] - running[first_of]
        self._closed = newest


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return pairs ``(e, 0 .. counts[e] - 1)`` in order: for ``[2, 0, 1]``, ``(0, 0), (0, 1), (2, 0)``."""
    envs = np.repeat(np.arange(len(counts)), counts)
    return envs, np.arange(len(envs)) - (np.cumsum(counts) - counts)[envs]


class SortedSearch:
    """For each of many values, finds the last number in a sorted array that is not larger than the value; several times
    as fast as a binary search.

    Example: the numbers 0, 3, 5 with ``end`` 12 have buckets of 2. The last number not larger than 0, 2, 4, 6, 8, 10
    has the position 0, 0, 1, 2, 2, 2. The value 5 lies in the bucket of 4, so its position is at least 1; the number at
    position 2 is not larger than 5 either, so the position is 2.

    Args:
        numbers: Int64 ``[n]``, ascending, 0 first.
        end: All values are in ``[0, end)``.
    """

    def __init__(self, numbers: Int64s, end: int) -> None:
        self._shift = max(0, (end // len(numbers)).bit_length() - 2)
        bucket = np.arange(0, max(end, 1), 1 << self._shift)
        self._first = np.searchsorted(numbers, bucket, side="right") - 1
        self._next = np.append(numbers[1:], np.iinfo(np.int64).max)

    def find(self, numbers: Int64s) -> Int64s:
        """Return, for each value, the position of the last sorted number that is not larger than the value, int64
        ``[n]``."""
        found: Int64s = self._first[numbers >> self._shift]
        (behind,) = np.nonzero(self._next[found] <= numbers)
        while len(behind):
            found[behind] += 1
            behind = behind[self._next[found[behind]] <= numbers[behind]]
        return found
