"""Which sealed groups have all the late columns that they wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mouse_core.groups._files.part import GroupFile
from mouse_core.groups._files.waiting import Unsealed
from mouse_core.groups.stored.late import LatePlaces


@dataclass(frozen=True)
class Awaited:
    """The rollouts that a late column is awaited of.

    Args:
        uids: Of the rollouts, the sealed ones first, each in the order they came.
        oldest: When the first of them was created, in seconds since 1970; None where there are none.
    """

    uids: tuple[str, ...] = ()
    oldest: float | None = None

    def __len__(self) -> int:
        return len(self.uids)


class Readiness:
    """How many values each sealed group still waits for.

    A group waits for the late columns that had been declared when it was sealed. A reward that came with a rollout is
    there.

    Args:
        late: Where values of late columns lie.
        given_up: Uids of rollouts that nothing is awaited of.

    Attributes:
        waiting: The groups that wait, by their places in the order in which they were sealed.
        num_rollouts: How many rollouts these have.
    """

    def __init__(self, late: LatePlaces, given_up: Set[str] = frozenset()) -> None:
        self._late, self._given_up = late, given_up
        names = list(late.declared)
        self._late_from = {column.name: names.index(column.name) for column in late.declared.late}
        self.waiting: dict[int, GroupFile] = {}
        self._missing: dict[int, int] = {}
        self.num_rollouts = 0

    def awaits(self, part: GroupFile) -> list[str]:
        """The late columns that a group was to have when it was sealed."""
        return [name for name, place in self._late_from.items() if place < part.declared]

    def add(self, place: int, part: GroupFile) -> bool:
        """Take in a sealed group; whether it is ready."""
        missing = sum(len(self._lacking(part, name)) for name in self.awaits(part))
        if missing:
            self.waiting[place], self._missing[place] = part, missing
            self.num_rollouts += len(part.uids)
        return not missing

    def _lacking(self, part: GroupFile, name: str) -> list[int]:
        """Which rollouts of a group lack a column."""
        there = self._late.places[name]
        lacking = [row for row, uid in enumerate(part.uids) if uid not in there and uid not in self._given_up]
        return [row for row in lacking if part.rewards[row] is None] if name == "reward" else lacking

    def arrived(self, name: str, places: npt.NDArray[np.int64]) -> list[int]:
        """Count in values of a column.

        Args:
            name: The column.
            places: Of the groups that the rollouts are in, below 0 where they are in none; one for each value.

        Returns:
            The places of the groups that are ready with them, in the order in which they were sealed.
        """
        ready = []
        found, counts = np.unique(places[places >= 0], return_counts=True)
        for place, count in zip(found.tolist(), counts.tolist(), strict=True):
            part = self.waiting.get(place)
            if part is None or self._late_from[name] >= part.declared:
                continue
            self._missing[place] -= count
            if not self._missing[place]:
                ready.append(place)
                del self.waiting[place], self._missing[place]
                self.num_rollouts -= len(part.uids)
        return ready

    def give_up(self, uids: Sequence[str], places: Sequence[int]) -> list[int]:
        """Await nothing of some rollouts any more.

        Args:
            uids: They, which are not among those given up yet.
            places: Of the groups that they are in, below 0 where they are in none.

        Returns:
            The places of the groups that are ready with that, in the order in which they were sealed.
        """
        lacking: dict[int, int] = {}
        for uid, place in zip(uids, places, strict=True):
            if (part := self.waiting.get(place)) is not None:
                row = part.uids.index(uid)
                own = sum(row in self._lacking(part, name) for name in self.awaits(part))
                lacking[place] = lacking.get(place, 0) + own
        ready = []
        for place, count in sorted(lacking.items()):
            self._missing[place] -= count
            if not self._missing[place]:
                ready.append(place)
                self.num_rollouts -= len(self.waiting.pop(place).uids)
                del self._missing[place]
        return ready

    def awaited(self, unsealed: Iterable[Unsealed]) -> dict[str, Awaited]:
        """Whose values are awaited, by column.

        Args:
            unsealed: The rollouts whose groups are not sealed.
        """
        found: dict[str, list[tuple[str, float]]] = {name: [] for name in self._late_from}
        for _, part in sorted(self.waiting.items()):
            for name in self.awaits(part):
                found[name] += [(part.uids[row], part.created[row]) for row in self._lacking(part, name)]
        for rollout in unsealed:
            for name, rollouts in found.items():
                has_own = name == "reward" and rollout.reward is not None
                there = has_own or rollout.rollout_uid in self._late.places[name]
                if not there and rollout.rollout_uid not in self._given_up:
                    rollouts.append((rollout.rollout_uid, rollout.created))
        return {name: _awaited(rollouts) for name, rollouts in found.items()}


def _awaited(rollouts: Sequence[tuple[str, float]]) -> Awaited:
    return Awaited(tuple([uid for uid, _ in rollouts]), min((created for _, created in rollouts), default=None))
