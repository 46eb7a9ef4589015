"""What a batch maker knows of the groups of rollouts that came, whether their rollouts are in memory or in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import MissingFieldError
from mouse_core.groups._files.part import GroupFile, part_of
from mouse_core.groups.making.functions.advantages import are_equal
from mouse_core.groups.stored.reading import StoredGroup
from mouse_core.groups.types.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.types.records import RolloutRecord, check_rewarded
from mouse_core.groups.types.versions import version_order

OLDER_GROUPS = ("drop", "until_as_large", "keep")
"""What becomes of a problem's group of an older policy version when rollouts of a newer one come."""

Problem = tuple[str, str]


@dataclass(slots=True, eq=False)
class GroupSlice:
    """Rollouts of one group that came together.

    Args:
        part: What is known of them.
        places: Which of them are scored: all that the policy wrote, and that were not given up.
        rewards: What all earned; None only where one was given up.
        group: The stored group that they are, or else
        record: the one rollout, while it has not left.
        group_uid: The sealed group that they are of, where one was named.

    Attributes:
        serial: How many rollouts came before them.
        arrival: How many of their environment came before them.
        before: How many bytes of rollouts came before them.
        members: The group that they are of, where it is wanted.
        uses: How many batches each has been in, by its place.
        gone: The places of those that have left for good.
    """

    part: GroupFile
    places: Sequence[int]
    rewards: Sequence[float | None]
    group: StoredGroup | None = None
    record: RolloutRecord | None = None
    group_uid: str = ""
    serial: int = 0
    arrival: int = 0
    before: int = 0
    members: Members | None = None
    uses: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    _declared: Columns = NO_COLUMNS
    _numbers: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of_rollout(cls, rollout: RolloutRecord) -> GroupSlice:
        """A rollout that is in no file."""
        part, rewards = part_of([rollout]), (check_rewarded(rollout),)
        places = () if part.untrained else (0,)
        return cls(part, places, rewards, None, rollout, rollout.group_uid, _declared=rollout.declared)

    @classmethod
    def of_group(cls, group: StoredGroup) -> GroupSlice:
        """A group in its file. Those that were given up, or have no token in the loss, are scored as if not there."""
        places: Sequence[int] = range(len(group.uids))
        if group.given_up or group.part.untrained:
            given_up, untrained = group.given_up, group.part.untrained
            places = [place for place in places if place not in untrained and group.uids[place] not in given_up]
        return cls(group.part, places, group.rewards, group, group_uid=group.group_uid)

    @property
    def given_up(self) -> int:
        """How many of them were given up."""
        return 0 if self.group is None else len(self.group.given_up)

    @property
    def declared(self) -> Columns:
        """The columns that were declared for them."""
        return self._declared if self.group is None else self.group.late.declared

    def numbers(self, column: RolloutColumn) -> npt.NDArray[Any]:
        """What all have of a column of one number per example, by their places."""
        if column.name in self._numbers:
            return self._numbers[column.name]
        late = column.late and self.group is not None
        values: Sequence[Any] = (
            self.group.late.values(column.name, self.part.uids)  # type: ignore[union-attr]
            if late
            else self.part.column(column.name)
        )
        found = np.array([column.padding if value is None else value for value in values], column.dtype)
        if not late or not any(value is None for value in values):  # what is late may come
            self._numbers[column.name] = found
        return found

    @property
    def present(self) -> list[int]:
        """The places of those that can be drawn, now or some day."""
        return [place for place in self.places if place not in self.gone]

    def let_go(self, places: Sequence[int]) -> None:
        """Let some leave for good; what they earned counts all the same."""
        self.gone.update(places)
        self.forget(places)

    def forget(self, places: Sequence[int] | None = None) -> None:
        """Let go of some in memory, or of all."""
        self.record = None
        if self.group is not None and self.group.kept is not None:
            uids = self.part.uids
            self.group.kept.drop(uids if places is None else [uids[place] for place in places])


class NumbersOfRows(Mapping[str, npt.NDArray[Any]]):
    """The columns of one number per example of several rollouts, by name, each made when it is asked for.

    Args:
        pieces: What each rollout is a part of, ``[n]``.
        places: Where in it, ``[n]``.
    """

    def __init__(self, pieces: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> None:
        self._pieces, self._places = pieces, places
        self._made: dict[str, npt.NDArray[Any]] = {}

    @memo
    def _bounds(self) -> list[int]:
        """Where rollouts of another piece begin, and how many there are."""
        begins = np.flatnonzero(self._pieces[1:] != self._pieces[:-1]) + 1
        return [0, *begins.tolist(), len(self._pieces)] if len(self._pieces) else []

    @memo
    def _declared(self) -> dict[str, RolloutColumn]:
        declared = {id(one): one for one in (self._pieces[begin].declared for begin in self._bounds[:-1])}
        columns = (column for one in declared.values() for column in one.of("example"))
        return {column.name: column for column in columns if not column.shape and column.name != "reward"}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A column, ``[n]`` of its dtype.

        Raises:
            MissingFieldError: It is not declared, or not one number per example.
        """
        if name not in self._made:
            column = self._declared.get(name)
            if column is None:
                known = list(self._declared)
                raise MissingFieldError(f"rows: expected a column of one number per example, {known}, found {name!r}")
            runs = [self._pieces[a].numbers(column)[self._places[a:b]] for a, b in pairwise(self._bounds)]
            self._made[name] = np.concatenate(runs)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


@dataclass(slots=True, eq=False)
class Members:
    """Rollouts of one version of the policy that are scored against each other.

    Args:
        version: The version.
        number: Of the group.
        pieces: Those of its rollouts that came.
        least, most: The rewards of these lie between.
        earned: What the turns of the first one earned, to see whether those of others earned the same.
        is_equal: Whether they all did, rounding apart.
        present: How many of its rollouts are among those to draw from.
        is_wanted: Whether they are still wanted.
    """

    version: str
    number: int
    pieces: list[GroupSlice] = field(default_factory=list)
    least: float = math.inf
    most: float = -math.inf
    earned: int | None = None
    is_equal: bool = True
    present: int = 0
    is_wanted: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether no rollout came that is scored."""
        return self.most < self.least

    def note(self, piece: GroupSlice, *, by_turn: bool) -> None:
        """See what rollouts earned that came.

        Args:
            piece: They.
            by_turn: Whether turns are compared, too.
        """
        piece.members = self
        earned = piece.part.earned if by_turn else ()
        for place in piece.places:
            reward, own = piece.rewards[place] or 0.0, earned[place] if earned else 0
            self.least, self.most = min(self.least, reward), max(self.most, reward)
            self.earned = own if self.earned is None else self.earned
            self.is_equal &= own == self.earned
        self.is_equal &= self.is_empty or are_equal(self.least, self.most)


@dataclass(slots=True, eq=False)
class VersionGroups:
    """The groups of one policy version on one problem.

    Args:
        version: The version.
        order: By which versions are compared.
        count: How many rollouts came that are scored.
        groups: By the uid of the sealed group; "" is that of all rollouts that were sealed in none.
    """

    version: str
    order: tuple[Any, ...]
    count: int = 0
    groups: dict[str, Members] = field(default_factory=dict)


class WantedGroups:
    """The groups that are wanted of each problem: those of its latest policy version, and others as is chosen.

    Args:
        older: One of ``OLDER_GROUPS``.
        pool: Whether sealed groups of one problem and version are scored as one.
    """

    def __init__(self, older: str, pool: bool) -> None:
        self._older, self._pool = older, pool
        self._versions: dict[Problem, list[VersionGroups]] = {}
        self._next = 0

    def __iter__(self) -> Iterator[Members]:
        return (group for versions in self._versions.values() for one in versions for group in one.groups.values())

    def count_in(self, piece: GroupSlice) -> tuple[Members | None, list[Members]]:
        """Let rollouts come.

        Returns:
            Their group, a new one if need be, or None if it is not wanted; and the groups that are no longer wanted.
        """
        environment, example_id, version = piece.part.key
        versions = self._versions.setdefault((environment, example_id), [])
        place = next((place for place, one in enumerate(versions) if one.version == version), len(versions))
        if place == len(versions):
            order = version_order(version)
            if self._older != "keep" and versions and order < versions[-1].order:
                return None, []
            versions.append(VersionGroups(version, order))
        own = versions[place]
        own.count += len(piece.places)
        uid = "" if self._pool else piece.group_uid
        members = own.groups.get(uid)
        if members is None:
            members = own.groups[uid] = Members(version, self._next)
            self._next += 1
        if self._older == "keep" or not place or not piece.places:
            return members, []
        # Unless all are kept, versions stand in their order, of equal ones the one that came last behind.
        gone = [one for one in versions[:place] if self._older == "drop" or one.count <= own.count]
        self._versions[environment, example_id] = [one for one in versions if one not in gone]
        return members, [group for one in gone for group in one.groups.values()]

    def drop(self, unwanted: Callable[[str], bool]) -> list[Members]:
        """Drop the groups of all versions that a function names; they."""
        gone: list[Members] = []
        for problem, versions in list(self._versions.items()):
            gone += [group for one in versions if unwanted(one.version) for group in one.groups.values()]
            kept = [one for one in versions if not unwanted(one.version)]
            if kept:
                self._versions[problem] = kept
            else:
                del self._versions[problem]
        return gone
