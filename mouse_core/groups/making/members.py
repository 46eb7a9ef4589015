"""What a batch maker knows of the groups of rollouts that came, whether their rollouts are in memory or in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import MissingFieldError
from mouse_core.groups._files.part import Part, part_of
from mouse_core.groups.stored.reading import StoredGroup
from mouse_core.groups.types.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.types.records import RolloutRecord, check_rewarded
from mouse_core.groups.types.versions import version_order

OLDER_GROUPS = ("drop", "until_as_large", "keep")
"""What becomes of a problem's group of an older policy version when rollouts of a newer one come."""

Problem = tuple[str, str]


@dataclass(slots=True, eq=False)
class Piece:
    """Rollouts of one group that came together.

    Args:
        part: What is known of them.
        places: Which of them count: all that were not given up.
        rewards: What all earned; None only where one was given up.
        group: The stored group that they are, or else
        record: the one rollout, while it has not left.

    Attributes:
        serial: How many rollouts came before them.
        arrival: How many of their environment came before them.
        before: How many bytes of rollouts came before them.
        members: The group that they are of, where it is wanted.
        uses: How many batches each has been in, by its place.
        gone: The places of those that have left for good.
    """

    part: Part
    places: Sequence[int]
    rewards: Sequence[float | None]
    group: StoredGroup | None = None
    record: RolloutRecord | None = None
    serial: int = 0
    arrival: int = 0
    before: int = 0
    members: Members | None = None
    uses: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    _declared: Columns = NO_COLUMNS
    _numbers: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of_rollout(cls, rollout: RolloutRecord) -> Piece:
        """A rollout that is in no file."""
        return cls(part_of([rollout]), (0,), (check_rewarded(rollout),), record=rollout, _declared=rollout.declared)

    @classmethod
    def of_group(cls, group: StoredGroup) -> Piece:
        """A group in its file. Those that were given up count for nothing."""
        places: Sequence[int] = range(len(group.uids))
        if group.given_up:
            places = [place for place in places if group.uids[place] not in group.given_up]
        return cls(group.part, places, group.rewards, group)

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
        left = self.gone.union(self.part.untrained)
        return [place for place in self.places if place not in left]

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
    """A group of one version of the policy.

    Args:
        version: The version.
        order: By which versions are compared.
        number: Of the group.
        count: How many of its rollouts came.
        pieces: These.
        first: What the first one earned, to see whether others earned the same.
        is_equal: Whether they all did.
        present: How many of its rollouts are among those to draw from.
        is_wanted: Whether they are still wanted.
    """

    version: str
    order: tuple[Any, ...]
    number: int
    count: int = 0
    pieces: list[Piece] = field(default_factory=list)
    first: tuple[float | None, int] | None = None
    is_equal: bool = True
    present: int = 0
    is_wanted: bool = True

    def note(self, piece: Piece, *, by_turn: bool) -> None:
        """See what rollouts earned that came.

        Args:
            piece: They.
            by_turn: Whether turns are compared, too.
        """
        piece.members = self
        earned = piece.part.earned if by_turn else ()
        for place in piece.places:
            own = (piece.rewards[place], earned[place] if earned else 0)
            if self.first is None:
                self.first = own
            elif own != self.first:
                self.is_equal = False
                return


class WantedGroups:
    """The groups that are wanted of each problem: those of its latest policy version, and others as is chosen.

    Args:
        older: One of ``OLDER_GROUPS``.
    """

    def __init__(self, older: str) -> None:
        self._older = older
        self._groups: dict[Problem, list[Members]] = {}
        self._next = 0

    def __iter__(self) -> Any:
        return (members for groups in self._groups.values() for members in groups)

    def count_in(self, piece: Piece) -> tuple[Members | None, list[Members]]:
        """Let rollouts come.

        Returns:
            Their group, a new one if need be, or None if it is not wanted; and the groups that are no longer wanted.
        """
        environment, example_id, version = piece.part.key
        groups = self._groups.setdefault((environment, example_id), [])
        place = next((place for place, one in enumerate(groups) if one.version == version), len(groups))
        if place == len(groups):
            order = version_order(version)
            if self._older != "keep" and groups and order < groups[-1].order:
                return None, []
            groups.append(Members(version, order, self._next))
            self._next += 1
        own = groups[place]
        own.count += len(piece.part.uids)
        if self._older == "keep" or not place:
            return own, []
        # Unless all are kept, versions stand in their order, of equal ones the one that came last behind.
        gone = [one for one in groups[:place] if self._older == "drop" or one.count <= own.count]
        self._groups[environment, example_id] = [one for one in groups if one not in gone]
        return own, gone

    def drop(self, unwanted: Callable[[str], bool]) -> list[Members]:
        """Drop the groups of all versions that a function names; they."""
        gone = []
        for problem, groups in list(self._groups.items()):
            gone += [one for one in groups if unwanted(one.version)]
            kept = [one for one in groups if not unwanted(one.version)]
            if kept:
                self._groups[problem] = kept
            else:
                del self._groups[problem]
        return gone
