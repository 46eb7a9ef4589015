"""Rollouts, and values of late columns, as they are given to a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import DataError
from mouse_core.groups._files.part import Part
from mouse_core.groups._files.parts import read_groups
from mouse_core.groups._files.waiting import Waiting
from mouse_core.groups.stored.chunks import Chunk, checked_chunk
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.records import RolloutRecord
from mouse_core.groups.types.same import refuse_other

# Files that are read in one go.
_TOGETHER = 32


class Given:
    """Looks at rollouts against those that are there, and at values against the rollouts that they are of.

    Args:
        root: The folder.
        declared: The folder's columns.
        uids: Of all rollouts, with the places of their groups in ``parts``, -1 for those that are not sealed.
        parts: The files of the sealed groups.
        waiting: The rollouts that are not sealed.
    """

    def __init__(
        self, root: Path, declared: Columns, uids: Mapping[str, int], parts: Sequence[Part], waiting: Waiting
    ) -> None:
        self._root, self._declared, self._uids, self._parts, self._waiting = root, declared, uids, parts, waiting

    def rollouts(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[dict[str, RolloutRecord], list[int]]:
        """Those that are new, by uid, and how many of each request these are.

        Others are compared with what is there; files of sealed groups are read for that, and one that is gone is not
        compared with.

        Raises:
            DataError: One that is there with other content, or a damaged file.
            StorageError: A file cannot be read.
        """
        new: dict[str, RolloutRecord] = {}
        again: dict[int, dict[str, list[RolloutRecord]]] = {}
        counts = []
        for given in requests:
            before = len(new)
            for rollout in given:
                place = self._uids.get(rollout.rollout_uid)
                if place is not None:
                    again.setdefault(place, {}).setdefault(rollout.rollout_uid, []).append(rollout)
                else:
                    refuse_other(rollout, new.setdefault(rollout.rollout_uid, rollout), "add_rollouts")
            counts.append(len(new) - before)
        for there in self._there(again):
            for rollout in again.get(self._uids[there.rollout_uid], {}).pop(there.rollout_uid, ()):
                refuse_other(rollout, there, "add_rollouts")
        return new, counts

    def _there(self, again: Mapping[int, Mapping[str, Any]]) -> Iterator[RolloutRecord]:
        """The rollouts of some groups, by their places, and of those that wait some by uid, as they came."""
        if waiting := again.get(-1):
            yield from self._waiting.load([[self._waiting.by_uid[uid] for uid in waiting]])[0]
        parts = [self._parts[place] for place in again if place >= 0]
        sealed = [part for part in parts if part.path(self._root).exists()]
        for first in range(0, len(sealed), _TOGETHER):
            for rollouts in read_groups(sealed[first : first + _TOGETHER], self._root):
                yield from rollouts

    def chunk(self, name: str, given: Any) -> Chunk | None:
        """Values by uid as they are stored, if there are any; rewards that came with their rollouts are left out.

        Args:
            name: The column.
            given: A dict of them.

        Raises:
            DataError: A column that is not a late one, a rollout that is not there, or a value that is not one of the
                column, or another one than the rollout came with.
        """
        column = self._declared.get(name) if isinstance(name, str) else None
        if column is None or not column.late:
            known = [one.name for one in self._declared.late]
            raise DataError(f"add_column: expected the name of a late column, one of {known}, found {name!r:.80}")
        if not isinstance(given, Mapping):
            raise DataError(f"add_column {name!r}: expected a dict of values by uid, found {given!r:.100}")
        if not given:
            return None
        if not given.keys() <= self._uids.keys():
            unknown = next(uid for uid in given if uid not in self._uids)
            raise DataError(f"add_column {name!r}: expected uids of rollouts that are there, found {unknown!r:.100}")
        counts = None if column.per == "example" else [self._count(uid, column.per) for uid in given]
        chunk = checked_chunk(column, given, counts)
        return self._without_own(chunk) if name == "reward" else chunk

    def _without_own(self, rewards: Chunk) -> Chunk:
        """Rewards of rollouts that came without; DataError: one that came with another one."""
        places = [self._uids[uid] for uid in rewards.uids]
        some = {place for place in set(places) if place < 0 or any(r is not None for r in self._parts[place].rewards)}
        if not some:
            return rewards
        own = [self._reward(uid) if place in some else None for uid, place in zip(rewards.uids, places, strict=True)]
        dtype = np.dtype(rewards.column.dtype)
        for row, reward in enumerate(own):
            if reward is not None and dtype.type(reward) != (late := rewards.values[row].as_py()):
                where = f"add_column 'reward', rollout {rewards.uids[row]!r}"
                raise DataError(f"{where}: expected the one that it came with, {reward}, found {late}")
        return rewards.take([row for row, reward in enumerate(own) if reward is None])

    def _count(self, uid: str, per: str) -> int:
        """How many tokens or turns a rollout has."""
        place = self._uids[uid]
        if place < 0:
            own = self._waiting.by_uid[uid]
            return own.turns if per == "turn" else own.tokens
        part = self._parts[place]
        return (part.turns if per == "turn" else part.tokens)[part.uids.index(uid)]

    def _reward(self, uid: str) -> float | None:
        """The reward that a rollout came with."""
        place = self._uids[uid]
        if place < 0:
            return self._waiting.by_uid[uid].reward
        part = self._parts[place]
        return part.rewards[part.uids.index(uid)]
