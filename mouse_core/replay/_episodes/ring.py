"""The episodes in a ring of time steps: kept as rows come in, and never looked for among the rows.

A write adds the episodes that begin in it to the table, and what the ring overwrites drops out at the other end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mouse_core.sampling.episode_table import SPAN, Bools, EpisodeTable, Int64s, ragged


class EpisodeRing(EpisodeTable):
    """The episodes in a ring of time steps, of some environments side by side.

    Args:
        num_envs: Environments, E.
        steps: Time steps that the ring holds.
        first: The first time step that will be written.
        next_ids: The next id of every environment where episodes are numbered, int64 ``[E]``; by default
            ``0 .. E - 1``.
    """

    def __init__(self, num_envs: int, steps: int, *, first: int = 0, next_ids: Int64s | None = None) -> None:
        super().__init__(num_envs, steps, first=first)
        # Whether the last step of an environment ended its episode: the next one begins with its next step.
        self._ended = np.ones(num_envs, np.bool_)
        self._next_ids = self._envs.copy() if next_ids is None else next_ids.copy()
        self._changes = 0

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

    def begin_earlier(self, begins: Int64s) -> None:
        """The oldest episodes began with these steps, ``[E]``, which are overwritten."""
        self._begins[self._envs, self._oldest()] = begins + self._spans
        self._base = min(self._base, int(begins.min()))

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
        first, count = int(self._oldest()[env]), int(self._counts[env])
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

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Int64s]:
        """All there is to know, as long as there are episodes: arrays ``[n]``."""
        first = self._oldest()
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
    def of_state(state: Mapping[str, Int64s]) -> EpisodeRing:
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
        made = EpisodeRing(num_envs, steps, first=base, next_ids=state["next_ids"].astype(np.int64))
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
