"""Which rows of a ring make up which episode: kept as rows come in, and never looked for among the rows.

Every environment is a stream of time steps ``0, 1, 2, ...`` of which the newest ``steps`` exist. An episode is a
stretch of it, from its begin up to the next one's. A table holds the begins of the episodes that are alive: a write
adds those that it brings, and what the ring overwrites drops out at the other end. Windows are counted in running sums
over the table, so that the window of a rank is found by one binary search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.replay._episodes.counts import SPAN, View, WindowRule, ragged

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

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


class Episodes:
    """The episodes in a ring of time steps, of some environments side by side.

    Args:
        num_envs: Environments, E.
        steps: Time steps that the ring holds.
        first: The first time step that will be written.
        next_ids: The next id of every environment where episodes are numbered, int64 ``[E]``; by default
            ``0 .. E - 1``.
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
        self._begins = self._empty()
        self._ids = np.zeros((num_envs, self._room), np.int64)
        self._counts = np.zeros(num_envs, np.int64)
        # Whether the last step of an environment ended its episode: the next one begins with its next step.
        self._ended = np.ones(num_envs, np.bool_)
        self._next_ids = self._envs.copy() if next_ids is None else next_ids.copy()
        self._views: dict[WindowRule, View] = {}
        self._changes = 0

    def _empty(self) -> Int64s:
        """A table in which nothing is filled in: larger than any number of its environment."""
        return np.repeat((self._spans + (SPAN - 1))[:, None], self._room, axis=1)

    @property
    def begin(self) -> int:
        """The oldest time step there is."""
        return max(self.end - self.steps, self._base)

    @property
    def next_ids(self) -> Int64s:
        """The next id of every environment, int64 ``[E]``."""
        return self._next_ids

    @property
    def changes(self) -> int:
        """How often begins of episodes were changed otherwise than by ``extend``."""
        return self._changes

    # ------------------------------------------------------------------ writing

    def extend(self, ends: Bools | None, ids: Int64s | None) -> None:
        """Add time steps.

        Args:
            ends: Whether a step is its episode's last, ``[n, E]``; None: none is.
            ids: The id of each step's episode, ``[n, E]``: another one begins where it changes. None: episodes are
                numbered.
        """
        n = len(ends) if ends is not None else len(ids) if ids is not None else 0
        if not n:
            return
        if n == 1 and self.num_envs == 1:
            self._extend_by_one(ends is not None and bool(ends[0, 0]), None if ids is None else int(ids[0, 0]))
            return
        new = np.zeros((n, self.num_envs), np.bool_)
        new[0] = self._ended
        if ends is not None:
            new[1:] = ends[:-1]
        if ids is not None:
            new[1:] |= ids[1:] != ids[:-1]
            (open_,) = np.nonzero(~self._ended)
            new[0, open_] = ids[0, open_] != self._ids[open_, self._counts[open_] - 1]
        envs, steps = np.nonzero(new.T)
        if len(envs):
            # How many begins of the same environment come before this one.
            counts = np.bincount(envs, minlength=self.num_envs)
            rank = np.arange(len(envs)) - (np.cumsum(counts) - counts)[envs]
            self._make_room(int((self._counts + counts).max()), counts)
            columns = self._counts[envs] + rank
            self._begins[envs, columns] = self._spans[envs] + self.end + steps
            if ids is None:
                self._ids[envs, columns] = self._next_ids[envs] + rank * self.num_envs
                self._next_ids += counts * self.num_envs
            else:
                self._ids[envs, columns] = ids[steps, envs]
            self._counts += counts
        self._ended = np.zeros(self.num_envs, np.bool_) if ends is None else ends[-1].copy()
        self.end += n

    def cut(self, envs: Bools) -> None:
        """An episode begins with the next step of these environments, ``[E]``."""
        self._ended = self._ended | envs

    def _extend_by_one(self, end: bool, traj_id: int | None) -> None:
        count = self._counts.item(0)
        if self._ended.item(0) or (traj_id is not None and self._ids.item(0, count - 1) != traj_id):
            if count == self._room:
                self._make_room(count + 1, np.ones(1, np.int64))
                count = self._counts.item(0)
            if traj_id is None:
                traj_id = self._next_ids.item(0)
                self._next_ids[0] = traj_id + 1
            self._begins[0, count] = self.end
            self._ids[0, count] = traj_id
            self._counts[0] = count + 1
        self._ended[0] = end
        self.end += 1

    def _make_room(self, wanted: int, more: Int64s) -> None:
        """Drop dead episodes, and widen the table where that leaves it more than half full."""
        if wanted <= self._room:
            return
        first = self._first()
        alive = self._counts - first
        while 2 * int((alive + more).max()) > self._room:
            self._room *= 2
        begins, ids = self._begins, self._ids
        self._begins, self._ids = self._empty(), np.zeros((self.num_envs, self._room), np.int64)
        envs, columns = ragged(alive)
        self._begins[envs, columns] = begins[envs, columns + first[envs]]
        self._ids[envs, columns] = ids[envs, columns + first[envs]]
        self._counts = alive
        self._views.clear()

    def _first(self) -> Int64s:
        """The column of the oldest episode alive of every environment."""
        found = self._begins.reshape(-1).searchsorted(self._spans + self.begin, side="right")
        first: Int64s = np.maximum(found - 1 - self._envs * self._room, 0)
        return first

    def change_ends(self, env: int, steps: Int64s, ends: Bools) -> None:
        """Steps that exist end their episodes from now on, or do not; for episodes that are numbered.

        Args:
            env: Their environment.
            steps: Which, ascending, each once.
            ends: Whether they do, ``[n]``.
        """
        first, begins, ids = self._alive(env)
        inside = steps + 1 < self.end
        cuts = np.union1d(begins, steps[inside] + 1)
        known = np.isin(cuts, begins)
        kept = known.copy()
        kept[cuts.searchsorted(steps[inside] + 1)] = ends[inside]
        if not inside[-1]:
            self._ended[env] = ends[-1]
        ids = ids[begins.searchsorted(cuts, side="right") - 1]
        new = kept & ~known
        ids[new] = self._next_ids[env] + self.num_envs * np.arange(int(new.sum()))
        self._next_ids[env] += self.num_envs * int(new.sum())
        self._replace(env, first, cuts[kept], ids[kept])

    def change_ids(self, env: int, steps: Int64s, ids: Int64s) -> None:
        """Steps that exist belong to other episodes from now on, ``ids`` ``[n]``; for episodes that have ids alone."""
        first, begins, known = self._alive(env)
        # Cut out every changed step, give it its id, and join neighbours of one id.
        cuts = np.union1d(begins, np.concatenate([steps, steps + 1]))
        cuts = cuts[(cuts >= begins[0]) & (cuts < self.end)]
        cut_ids = known[begins.searchsorted(cuts, side="right") - 1]
        cut_ids[cuts.searchsorted(steps)] = ids
        kept = np.concatenate([[True], cut_ids[1:] != cut_ids[:-1]])
        self._replace(env, first, cuts[kept], cut_ids[kept])

    def _alive(self, env: int) -> tuple[int, Int64s, Int64s]:
        """Column of the first episode alive, and the begins and ids of all of them."""
        first, count = int(self._first()[env]), int(self._counts[env])
        return first, self._begins[env, first:count] - self._spans[env], self._ids[env, first:count]

    def _replace(self, env: int, first: int, begins: Int64s, ids: Int64s) -> None:
        count = int(self._counts[env])
        if np.array_equal(begins + self._spans[env], self._begins[env, first:count]):
            self._ids[env, first:count] = ids
            return
        more = np.zeros(self.num_envs, np.int64)
        more[env] = max(len(begins) - (count - first), 0)
        self._make_room(int((self._counts + more).max()), more)
        self._begins[env] = self._spans[env] + SPAN - 1
        self._begins[env, : len(begins)] = begins + self._spans[env]
        self._ids[env, : len(ids)] = ids
        self._counts[env] = len(begins)
        self._views.clear()
        self._changes += 1

    # ------------------------------------------------------------------ windows

    def count(self, rule: WindowRule) -> int:
        """How many windows there are."""
        return int(self._view(rule).of_windows().cumulative[-1])

    def count_episodes(self, rule: WindowRule) -> int:
        """How many episodes have windows."""
        return int(self._view(rule).of_episodes().cumulative[-1])

    def windows(self, rule: WindowRule, ranks: Int64s) -> Windows:
        """The windows of these ranks, int64 ``[n]`` in ``0 .. count(rule) - 1``: one environment after another."""
        env, column, number = self._view(rule).of_windows().find(ranks)
        return self._at(rule, env, column, number)

    def windows_of(self, rule: WindowRule, ranks: Int64s, uniform: npt.NDArray[np.float64]) -> Windows:
        """A window of each of the episodes of these ranks.

        Args:
            rule: Which windows there are.
            ranks: Int64 ``[n]`` in ``0 .. count_episodes(rule) - 1``.
            uniform: Which of its windows, float64 ``[n]`` in ``[0, 1)``.
        """
        env, column, _ = self._view(rule).of_episodes().find(ranks)
        begin, end = self._bounds(env, column)
        counts = rule.count(end - begin)
        number = np.minimum((uniform * counts).astype(np.int64), counts - 1)
        return self._at(rule, env, column, number)

    def longest(self) -> int:
        """Steps of the longest episode there is; looks at all of them."""
        envs, columns = ragged(self._counts - self._first())
        begin, end = self._bounds(envs, columns + self._first()[envs])
        return int((end - begin).max(initial=0))

    def episode_of(self, env: Int64s, step: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Begin, also where it is overwritten, end and id of the episodes of some steps that exist."""
        column = self._begins.reshape(-1).searchsorted(self._spans[env] + step, side="right") - 1 - env * self._room
        return *self._bounds(env, column, whole=True), self._ids[env, column]

    def _at(self, rule: WindowRule, env: Int64s, column: Int64s, number: Int64s) -> Windows:
        begin, end = self._bounds(env, column)
        return Windows(env, rule.starts(begin, end, number), begin, end, self._ids[env, column])

    def _bounds(self, env: Int64s, column: Int64s, *, whole: bool = False) -> tuple[Int64s, Int64s]:
        flat, place = self._begins.reshape(-1), env * self._room + column
        spans = self._spans[env]
        begin = flat[place] - spans
        after = flat.take(place + 1, mode="clip") - spans
        end = np.where(column + 1 == self._counts[env], self.end, after)
        return begin if whole else np.maximum(begin, self.begin), end

    def _view(self, rule: WindowRule) -> View:
        view = self._views.get(rule)
        if view is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.pop(next(iter(self._views)))
            view = self._views[rule] = View(rule, self._spans, self._room)
        if view.at != self.end:
            self._count_new(view)
        return view

    def _count_new(self, view: View) -> None:
        """Count the windows of the episodes that ended since the last time, of the oldest and of those under way."""
        closed = self._counts - 1
        more = closed - view.known
        if more.any():
            envs, columns = ragged(more)
            columns += view.known[envs]
            begin, end = self._bounds(envs, columns, whole=True)
            counts = view.rule.count(end - begin)
            view.windows.append(envs, columns, counts, more)
            view.episodes.append(envs, columns, (counts > 0).astype(np.int64), more)
            view.known = closed
        first = self._first()
        begin, end = self._bounds(self._envs_twice, np.concatenate([first, closed]))
        oldest, newest = view.rule.count(end - begin).reshape(2, -1)
        view.settle(self.end, first, closed, oldest, np.where(closed > first, newest, 0))

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Int64s]:
        """All there is to know, as long as there are episodes: arrays ``[n]``."""
        first = self._first()
        envs, columns = ragged(self._counts - first)
        columns += first[envs]
        return {
            "steps": np.array([self.num_envs, self.steps, self._base, self.end]),
            "counts": self._counts - first,
            "begins": self._begins[envs, columns] - self._spans[envs],
            "ids": self._ids[envs, columns],
            "ended": self._ended.astype(np.int64),
            "next_ids": self._next_ids.copy(),
        }

    @staticmethod
    def of_state(state: Mapping[str, Int64s]) -> Episodes:
        """The episodes that ``state`` was taken from.

        Raises:
            ValueError: Arrays that do not fit each other.
        """
        num_envs, steps, base, end = state["steps"].tolist()
        counts, begins = state["counts"], state["begins"]
        if not (num_envs >= 1 and steps >= 1 and 0 <= base <= end < SPAN):
            raise ValueError(f"expected a ring of steps, found {state['steps'].tolist()}")
        if any(len(state[name]) != num_envs for name in ("counts", "ended", "next_ids")) or counts.min() < 0:
            raise ValueError(f"expected numbers for {num_envs} environments")
        if not len(begins) == len(state["ids"]) == counts.sum():
            raise ValueError(
                f"expected {counts.sum()} episodes, found {len(begins)} begins and {len(state['ids'])} ids"
            )
        made = Episodes(num_envs, steps, first=base, next_ids=state["next_ids"].astype(np.int64))
        envs, columns = ragged(counts)
        same = envs[1:] == envs[:-1]
        if len(begins) and (begins.min() < base or begins.max() >= end or (np.diff(begins)[same] <= 0).any()):
            raise ValueError("expected begins that ascend within the ring")
        if (counts > 0).any() != (end > base) or (
            len(begins) and (begins[columns == 0] > max(end - steps, base)).any()
        ):
            raise ValueError("expected episodes for all steps there are")
        made._make_room(int(counts.max()), counts)
        made._begins[envs, columns] = begins + made._spans[envs]
        made._ids[envs, columns] = state["ids"]
        made._counts, made._ended, made.end = counts.astype(np.int64), state["ended"] != 0, end
        return made
