"""GrpoBatchMaker: batches of rollouts that are scored against the others of their group."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.groups.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.examples import make_examples
from mouse_core.groups.files import GroupFile, part_of
from mouse_core.groups.records import (
    RLExample,
    RolloutRecord,
    check_rewarded,
    other_one,
    refuse_other,
    refuse_undeclared,
)
from mouse_core.groups.retention import HeldRollouts, Retention, functions, name_of, weights_of
from mouse_core.groups.scoring import Advantage, BatchAdvantage, Rloo, are_equal, checked_worth, compared
from mouse_core.groups.stored import StoredGroup, read_wanted
from mouse_core.groups.versions import Versions, version_name, version_order
from mouse_core.randomness import Key, Purpose, as_exponential, check_seed
from mouse_core.spec import check_count

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
            [self.group.late.value(column.name, uid) for uid in self.part.uids]  # type: ignore[union-attr]
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
        if self.group is not None and self.group.cache is not None:
            uids = self.part.uids
            self.group.cache.drop(uids if places is None else [uids[place] for place in places])


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


class Tally:
    """Counts what comes to a batch maker, by environment."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    @property
    def environments(self) -> list[str]:
        """Of all that came, in order."""
        return list(self._counts)

    def count(self, piece: GroupSlice, members: Members | None, was_equal: bool | None) -> None:
        """Count rollouts.

        Args:
            piece: They.
            members: Their group, where it is wanted.
            was_equal: Whether all of it had earned the same before they came; None: none of it was scored.
        """
        counts = self._counts.setdefault(piece.part.key.environment, Counter())
        counts["rollouts"] += len(piece.part.uids) - piece.given_up
        if members is not None and not members.is_empty:
            counts["groups"] += was_equal is None
            counts["groups_equal"] += members.is_equal - bool(was_equal)

    def summary(self, groups: Iterable[Members], behind: Callable[[str], int]) -> dict[str, float]:
        """Of all that came, and behind the name of each environment, where there are several, of that; NaN of nothing.

        Args:
            groups: Those that are there.
            behind: How many versions a version is behind.
        """
        found: dict[str, float] = {}
        values: dict[str, dict[str, list[float]]] = {
            name: {"reward": [], "tokens": [], "staleness": []} for name in self._counts
        }
        for members in groups:
            for piece in members.pieces:
                own = values[piece.part.key.environment]
                own["reward"] += [piece.rewards[place] or 0.0 for place in piece.places]
                present = piece.present
                own["tokens"] += [piece.part.tokens[place] for place in present]
                own["staleness"] += [behind(members.version)] * len(present)
        whole = sum(self._counts.values(), Counter())
        names = ("reward", "tokens", "staleness")
        together = {name: [one for own in values.values() for one in own[name]] for name in names}
        parts = [("", whole, together)]
        if len(self._counts) > 1:
            parts += [(f"{name}/", counts, values[name]) for name, counts in self._counts.items()]
        for prefix, counts, own in parts:
            found |= {f"{prefix}{what}": counts[what] for what in ("rollouts", "groups", "groups_equal")}
            found[f"{prefix}groups_equal_share"] = counts["groups_equal"] / max(counts["groups"], 1)
            for what, numbers in own.items():
                array = np.array(numbers, np.float64)
                for call in ("mean", "std", "min", "max"):
                    found[f"{prefix}{what}_{call}"] = float(getattr(array, call)()) if len(array) else math.nan
        return found


# A maker without rollouts is small where it is sent to another process.
_FIRST_ROWS = 64
# Rows of more groups than these that have left do not wait for the next batch.
_MOST_LEFT = 4096
_COLUMNS: dict[str, Any] = {
    "reward": np.float64,
    "advantage": np.float64,
    "weight": np.float64,
    "group": np.int64,
    "environment": np.int64,
    "version": np.int64,
    "serial": np.int64,
    "arrival": np.int64,
    "created": np.float64,
    "tokens": np.int64,
    "uses": np.int64,
    "present": np.bool_,
    "place": np.int64,
    "piece": np.object_,
}


class Pool:
    """The rollouts of groups of which some can be drawn, in the order they came.

    One that has left keeps its reward while others of its group are there. A group of which all have left leaves the
    pool, and is there again, with all its rollouts, when another one of it comes.

    Args:
        advantage: What they are worth.
    """

    def __init__(self, advantage: Advantage) -> None:
        self._advantage = advantage
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(_FIRST_ROWS, dtype) for name, dtype in _COLUMNS.items()
        }
        self._count = 0
        self._left: set[int] = set()  # numbers of groups whose rows are no longer wanted
        self._is_sorted = self._is_scored = True

    def __len__(self) -> int:
        return self._count

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Where arrays come through shared memory they cannot be written to.
        self.__dict__.update(state, _columns={name: np.array(values) for name, values in state["_columns"].items()})

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of every row, ``[n]``: "present" is whether one has not left, "serial" its number among all that
        came, and "arrival" that among those of its environment.
        """
        return self._columns[name][: self._count]

    # ------------------------------------------------------------------ groups

    def add(self, pieces: Sequence[GroupSlice], environment: int, version: int) -> None:
        """Add rollouts of one group.

        Args:
            pieces: They.
            environment, version: The numbers of these.
        """
        if len(self._left) > _MOST_LEFT:
            self.settle()
        for piece in pieces:
            if piece.members is not None and piece.members.number in self._left:
                self.settle()
            self._add(piece, environment, version)

    def _add(self, piece: GroupSlice, environment: int, version: int) -> None:
        members, part, places = piece.members, piece.part, piece.places
        assert members is not None
        begin, end = self._count, self._count + len(places)
        if end > len(self._columns["reward"]):
            more = max(end, 2 * len(self._columns["reward"])) - len(self._columns["reward"])
            self._columns = {
                name: np.concatenate([old, np.zeros(more, old.dtype)]) for name, old in self._columns.items()
            }
        self._is_sorted &= not begin or bool(self._columns["serial"][begin - 1] < piece.serial)
        present = set(piece.present)
        values: dict[str, Any] = {
            "reward": [piece.rewards[place] for place in places],
            "created": [part.created[place] for place in places],
            "tokens": [part.tokens[place] for place in places],
            "uses": [piece.uses.get(place, 0) for place in places],
            "present": [place in present for place in places],
            "place": places,
            "serial": [piece.serial + place for place in places],
            "arrival": [piece.arrival + place for place in places],
        }
        # One row is what comes of rollouts that are in no file; NumPy takes it faster as a number.
        rows: Any = begin if end == begin + 1 else slice(begin, end)
        for name, several in values.items():
            self._columns[name][rows] = several[0] if end == begin + 1 else several
        same = {"weight": 1.0, "group": members.number, "environment": environment, "version": version, "piece": piece}
        for name, value in same.items():
            self._columns[name][rows] = value
        self._count = end
        members.present += len(present)
        self._is_scored = False

    def release(self, row: int) -> None:
        """Let a rollout leave; its reward still counts."""
        piece, place = self._columns["piece"][row], int(self._columns["place"][row])
        if self._columns["present"][row]:
            self._columns["present"][row] = False
            piece.let_go([place])
            piece.members.present -= 1
            if not piece.members.present:
                self._left.add(piece.members.number)

    def row_of(self, serial: int) -> int:
        """The row of a rollout."""
        if not self._is_sorted:
            self.settle()
        return int(np.searchsorted(self.column("serial"), serial))

    def drop(self, members: Members) -> None:
        """Forget a group."""
        if members.present:
            members.present = 0
            self._left.add(members.number)

    def settle(self) -> None:
        """Let go of the rows of groups that have left, and put others that were there before where they were."""
        rows: npt.NDArray[Any] | None = None
        if self._left:
            gone = np.isin(self.column("group"), np.fromiter(self._left, np.int64))
            rows = np.flatnonzero(~gone) if gone.any() else None
            self._left.clear()
        if not self._is_sorted:
            rows = np.arange(self._count) if rows is None else rows
            rows = rows[np.argsort(self.column("serial")[rows])]
            self._is_sorted = True
        if rows is not None:
            for values in self._columns.values():
                values[: len(rows)] = values[rows]
            self._columns["piece"][len(rows) : self._count] = None
            self._count = len(rows)
            self._is_scored = False

    def scored(self) -> npt.NDArray[np.float64]:
        """The advantage of every row, float64 ``[n]``."""
        if not self._is_scored:
            worth = checked_worth(self._advantage, self.column("reward"), self.column("group"))
            self._columns["advantage"][: self._count] = worth
            self._is_scored = True
        return self.column("advantage")


# Why rollouts leave, or are not taken; a retention's name is another reason.
_REASONS = (
    "environment_name",
    "duplicate",
    "refused",
    "given_up",
    "untrained",
    "max_staleness",
    "older_groups",
    "lost_versions",
    "filter_zero_variance",
    "capacity_bytes",
)


class CandidatePool:
    """Rollouts by their groups.

    Args:
        advantage: What they are worth.
        environment: The only one whose rollouts are taken; None: all are.
        older: One of ``OLDER_GROUPS``.
        pool: Whether sealed groups of one problem and version are scored as one.
        leaves_equal: Whether none can be drawn of a group that earned the same.
        by_turn: Whether that is told by turns, too.
        max_staleness: How many versions behind rollouts may be; None: any number.
        capacity: How many bytes of rollouts may come before the oldest of them leave; None: any number.

    Attributes:
        pool: Those that may be drawn.
        versions: Of the policy.
        received: How many rollouts came, whatever became of them.
        used: How many left as batches have had them.
        left: How many others left, by the reason. Each that came is held, used, or left for one reason.

    Raises:
        ConfigError: ``older`` is something else.
    """

    def __init__(
        self,
        advantage: Advantage,
        *,
        environment: str | None,
        older: str,
        pool: bool,
        leaves_equal: bool,
        by_turn: bool,
        max_staleness: int | None,
        capacity: int | None,
    ) -> None:
        if older not in OLDER_GROUPS:
            raise ConfigError(f"older_groups: expected one of {list(OLDER_GROUPS)}, found {older!r}")
        self._advantage, self._environment, self._older, self._pool = advantage, environment, older, pool
        self._leaves_equal, self._by_turn = leaves_equal, by_turn
        self._max_staleness, self._capacity = max_staleness, capacity
        self.versions = Versions()
        self.begin()

    def begin(self) -> None:
        """Be as if nothing had come; versions stay known."""
        self.pool, self._wanted, self._tally = Pool(self._advantage), WantedGroups(self._older, self._pool), Tally()
        self.received = self.used = 0
        self.left: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self._arrived: Counter[str] = Counter()
        self._serial = self._nbytes = 0
        self._newest = -math.inf
        self._in_capacity: deque[GroupSlice] = deque()
        self._alone: dict[str, GroupSlice] = {}  # rollouts that are in no file, by their uids

    @property
    def environments(self) -> list[str]:
        """The names of the environments that rollouts came of, by their numbers."""
        return self._tally.environments

    # ------------------------------------------------------------------ coming

    def refuse_other(self, rollout: RolloutRecord) -> None:
        """Raise DataError for a rollout that came with other content before.

        Of one that has left, as one that was drawn, it is compared what is still known.
        """
        before = self._alone.get(rollout.rollout_uid)
        if before is None:
            return
        if before.record is not None:
            refuse_other(rollout, before.record, "add_rollout")
            return
        part, other = part_of([rollout]), before.part
        known = {
            "key": "group",
            "rewards": "reward",
            "tokens": "tokens",
            "turns": "turns",
            "earned": "rewards of turns",
        }
        differing = [called for name, called in known.items() if getattr(part, name) != getattr(other, name)]
        if differing:
            raise other_one(rollout.rollout_uid, differing, "add_rollout")

    def refuse(self) -> None:
        """Count a rollout that is refused."""
        self.received += 1
        self.left["refused"] += 1

    def come(self, piece: GroupSlice) -> None:
        """Let rollouts come. One that is in no file comes once; of those in files somebody else sees to it."""
        if piece.group is None:
            if piece.part.uids[0] in self._alone:
                self.received += 1
                self.left["duplicate"] += 1
                return
            self._alone[piece.part.uids[0]] = piece
        self._arrive(piece)
        members = self._count_in(piece)
        if members is None:
            piece.forget()
        else:
            self._take(piece, members)
        self._leave()

    def restore(self, pieces: Sequence[GroupSlice], settle: Callable[[GroupSlice], None]) -> None:
        """Let all come that came before a restart, with nothing there.

        Args:
            pieces: They, in the order in which they came.
            settle: Says what became of them.
        """
        for piece in pieces:
            self._arrive(piece)
            if self._environment in (None, piece.part.key.environment):
                self._note(piece.part.key.policy_version)
        # All are counted before one is taken: most groups are followed by a newer one of the same problem.
        counted = []
        for piece in pieces:
            settle(piece)
            counted.append((piece, self._count_in(piece)))
        for piece, members in counted:
            if members is not None and members.is_wanted:
                self._take(piece, members)
            elif members is not None:
                self._left("older_groups", piece)
        self._leave()

    def _arrive(self, piece: GroupSlice) -> None:
        """Number rollouts in the order in which they come."""
        environment, count = piece.part.key.environment, len(piece.part.uids)
        self._newest = max(self._newest, *piece.part.created)
        piece.serial, piece.arrival, piece.before = self._serial, self._arrived[environment], self._nbytes
        self._serial += count
        self.received += count
        self._arrived[environment] += count
        if self._environment in (None, environment):
            self._nbytes += piece.part.nbytes

    def _count_in(self, piece: GroupSlice) -> Members | None:
        """The group that rollouts join, a new one if need be; None if it is not wanted."""
        environment, _, version = piece.part.key
        if self._environment not in (None, environment):
            self.left["environment_name"] += len(piece.part.uids)
            return None
        self.used += sum(place in piece.gone for place in piece.places)
        self.left["given_up"] += piece.given_up
        self.left["untrained"] += len(piece.part.uids) - piece.given_up - len(piece.places)
        self._note(version)
        is_stale = self._stale(version)
        members, gone = (None, []) if is_stale else self._wanted.count_in(piece)
        was_equal = None
        if members is not None:
            was_equal = None if members.is_empty else members.is_equal
            members.note(piece, by_turn=self._by_turn)
        else:
            self._left("max_staleness" if is_stale else "older_groups", piece)
        self._tally.count(piece, members, was_equal)
        self._forget(gone, "older_groups")
        return members

    def _left(self, reason: str, piece: GroupSlice) -> None:
        """Count rollouts that could still be drawn as gone for a reason."""
        self.left[reason] += len(piece.present)

    def _take(self, piece: GroupSlice, members: Members) -> None:
        """Take rollouts of a group that is wanted. Those of a group of which none can be drawn wait for more of it."""
        is_there = members.present > 0
        members.pieces.append(piece)
        if self._capacity is not None:
            self._in_capacity.append(piece)
        if self._is_left_out(members):
            return
        coming = [piece] if is_there else members.pieces
        if is_there or any(one.present for one in coming):
            environment, _, version = piece.part.key
            self.pool.add(coming, self.environments.index(environment), self.versions.place(version))

    def _is_left_out(self, members: Members) -> bool:
        """Whether nothing can be learnt of a group."""
        return self._leaves_equal and members.is_equal

    # ------------------------------------------------------------------ leaving

    def _leave(self) -> None:
        """Let the oldest leave where more came with and behind them than there may be."""
        while self._in_capacity and self._capacity is not None:
            piece = self._in_capacity[0]
            since = self._nbytes - piece.before
            if since <= max(self._capacity, piece.part.nbytes):
                return
            self._in_capacity.popleft()
            places, members = piece.present, piece.members
            if members is not None and members.is_wanted:
                self.left["capacity_bytes"] += len(places)
                for place in places if members.present else ():
                    self.pool.release(self.pool.row_of(piece.serial + place))
                piece.let_go(places)

    def _forget(self, gone: Sequence[Members], reason: str) -> None:
        """Forget groups that are not wanted any more."""
        for members in gone:
            members.is_wanted = False
            self.pool.drop(members)
            for piece in members.pieces:
                self._left(reason, piece)
                piece.forget()
                # One of a version that is lost has the version's number, and must not come as one of the new version.
                if piece.group is None and reason != "lost_versions":
                    self._alone.pop(piece.part.uids[0], None)

    def weigh(self, retentions: Sequence[Retention]) -> None:
        """Weigh all rows; what has no weight leaves."""
        rows = self.rows()
        if not len(rows):
            return
        weights = np.ones(len(rows))
        for retention in retentions:
            weights *= weights_of(retention, rows)
            gone = np.flatnonzero(self.pool.column("present") & (weights == 0))
            for row in gone.tolist():
                self.pool.release(row)
            if len(gone):
                self.left[name_of(retention)] += len(gone)
        self.pool.column("weight")[:] = weights

    # ------------------------------------------------------------------ versions

    def set_policy_version(self, version: str) -> None:
        """Say which version is the latest; groups of later ones are lost."""
        if self.versions.tell(version):
            self._forget(self._wanted.drop(self.versions.is_ahead), "lost_versions")
        self._forget_stale()

    def _note(self, version: str) -> None:
        if self.versions.note(version):
            self._forget_stale()

    def _forget_stale(self) -> None:
        if self._max_staleness is not None:
            self._forget(self._wanted.drop(self._stale), "max_staleness")

    def _stale(self, version: str) -> bool:
        return self._max_staleness is not None and self.versions.behind(version) > self._max_staleness

    # ------------------------------------------------------------------ what is known

    def rows(self) -> HeldRollouts:
        """What is known of the rollouts of groups of which some can be drawn."""
        self.pool.settle()
        column, names = self.pool.column, self.environments
        arrived = np.array([self._arrived[name] for name in names], np.int64)
        return HeldRollouts(
            present=column("present"),
            reward=column("reward"),
            advantage=self.pool.scored(),
            group=column("group"),
            environment=column("environment"),
            environments=tuple(names),
            staleness=self.versions.all_behind()[column("version")],
            age=self._newest - column("created"),
            newer=arrived[column("environment")] - 1 - column("arrival"),
            tokens=column("tokens"),
            uses=column("uses"),
            columns=NumbersOfRows(column("piece"), column("place")),
        )

    def summary(self) -> dict[str, float]:
        """Numbers for a log; see ``GrpoBatchMaker.summary``."""
        found = self._tally.summary(self._wanted, self.versions.behind)
        there = [0, 0]
        for one in self._wanted:
            there[self._is_left_out(one)] += sum(len(piece.present) for piece in one.pieces)
        # Groups that earned the same may be joined by others, and are drawn from then.
        left = {**self.left, "filter_zero_variance": there[True]}
        counts = {"received": self.received, "held": there[False], "used": self.used}
        return {**found, **counts, **{f"left/{name}": count for name, count in left.items()}}


def draw(
    seed: int,
    index: int,
    size: int,
    count: int,
    weights: npt.NDArray[np.float64] | None,
    environments: npt.NDArray[np.int64],
    names: Sequence[str],
    shares: Mapping[str, float] | None,
) -> npt.NDArray[np.int64]:
    """Places of a sample without replacement, in random order.

    Args:
        seed, index: What is drawn is a function of these two, and of what there is to draw from.
        size: How many are drawn.
        count: How many there are to draw from.
        weights: How likely each is drawn, ``[count]``; None: all are equally likely.
        environments: The environment of each, as a place in ``names``, ``[count]``.
        names: The environments' names.
        shares: How much of the sample is of which; empty: as much of each; None: as it comes.
    """
    words: npt.NDArray[Any] = Key(seed, Purpose.GROUPS, index=index).bits(count)
    if weights is not None:
        # The smallest of exponential times with these rates: Efraimidis and Spirakis, "Weighted random sampling with a
        # reservoir" (2006).
        words = as_exponential((~words >> np.uint64(11)).astype(np.float64) * 2.0**-53) / weights
    if shares is None:
        return _smallest(words, size)
    there = sorted(set(environments.tolist()), key=names.__getitem__)
    members = {number: np.flatnonzero(environments == number) for number in there}
    wanted = shares or dict.fromkeys(names, 1.0)
    quotas = share_out(size, [wanted[names[number]] for number in there], [len(members[number]) for number in there])
    drawn = [
        members[number][_smallest(words[members[number]], quota)] for number, quota in zip(there, quotas, strict=True)
    ]
    every = np.concatenate(drawn)
    return every[np.argsort(words[every], kind="stable")]


def share_out(size: int, shares: Sequence[float], limits: Sequence[int]) -> list[int]:
    """``size`` cut in proportion to ``shares``, at most ``limits`` each; what one cannot take the others get.

    The limits' sum is at least ``size``. Remainders go to the largest fractions, the first of equal ones.
    """
    quotas = [0] * len(shares)
    rest = size
    while rest:
        open_ = [place for place, limit in enumerate(limits) if quotas[place] < limit]
        total = math.fsum(shares[place] for place in open_)
        exact = {place: rest * shares[place] / total for place in open_}
        whole = {place: int(exact[place]) for place in open_}
        spare = rest - sum(whole.values())
        for place in sorted(open_, key=lambda place: (whole[place] - exact[place], place))[:spare]:
            whole[place] += 1
        for place in open_:
            taken = min(whole[place], limits[place] - quotas[place])
            quotas[place] += taken
            rest -= taken
    return quotas


def _smallest(words: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """The places of the ``count`` smallest words, in their order: a random sample in random order."""
    if count < len(words):
        places = np.argpartition(words, count)[:count] if count else np.zeros(0, np.int64)
        return places[np.argsort(words[places], kind="stable")]
    return np.argsort(words, kind="stable")


def shares_of(balance: bool | Mapping[str, float]) -> dict[str, float] | None:
    """The environments' shares; empty: equal ones; None: no balance.

    Raises:
        ConfigError: Something else than a bool, or shares.
    """
    if isinstance(balance, Mapping):
        for name, share in balance.items():
            if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 <= share < math.inf:
                raise ConfigError(f"balance: expected a share of at least 0 for {name!r:.80}, found {share!r:.80}")
        if not any(balance.values()):
            raise ConfigError(f"balance: expected a share above 0, found {dict(balance)}")
        return dict(balance)
    if not isinstance(balance, bool):
        raise ConfigError(f"balance: expected True, False or shares by environment, found {balance!r}")
    return {} if balance else None


def metadata_of(batch: Sequence[RLExample], drawn: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    """What a batch is made of.

    Args:
        batch: Its examples.
        drawn: Of rollouts by uid the reward, and how many versions behind it was when it was drawn.
    """
    versions = Counter(example.policy_version for example in batch)
    known = [drawn[example.rollout_uid] for example in batch if example.rollout_uid in drawn]
    of_all = {"rewards": [reward for reward, _ in known], "staleness": [behind for _, behind in known]}
    return {
        "batch_size": len(batch),
        "num_tokens": sum(len(example) for example in batch),
        "num_loss_tokens": sum(int(np.count_nonzero(example.loss_mask)) for example in batch),
        "environments": dict(sorted(Counter(example.environment for example in batch).items())),
        "policy_versions": {version: versions[version] for version in sorted(versions, key=version_order)},
        "rollout_uids": [example.rollout_uid for example in batch],
        **(of_all if len(known) == len(batch) else {}),
    }


class GrpoBatchMaker:
    """Makes batches of rollouts that are scored against the others of their group.

    A group that a ``RolloutBuffer`` sealed is scored by itself, whatever else has its problem and policy version. Of
    rollouts that no buffer sealed, a group is those of one environment, problem and policy version. What a rollout is
    worth is an ``advantage`` of its group's rewards, in double precision, by default that of RLOO. Rollouts without a
    token in the loss are not scored, and no other is compared with them. A batch is a sample without replacement of the
    rollouts of groups of which something can be learnt, and a function of the seed, the number of batches before it,
    and what is there.

    Rollouts that a ``RolloutBuffer`` has in files are read when they are drawn, unless they are still in its memory.

    Args:
        environment_name: Take the rollouts of this environment and leave out all others; None: take all.
        rng_seed: In ``[0, 2**64)``; None: 0.
        advantage: ``Rloo()`` (None), ``Grpo()``, ``DrGrpo()``, ``ReinforcePlusPlus()``, ``RewardToGo()``, or a function
            of one's own; see ``Advantage``.
        filter_zero_variance: Whether groups are left out whose rollouts all earned the same, rounding apart. Nothing is
            learnt of them where rollouts are compared with the others of their group, as by all advantages here; a
            function of one's own has none left out, unless it ``compares``. A batch is filled up with others, so it is
            never smaller for it.
        retention: Which rollouts are kept, and how likely each is drawn: ``Lengths(...)``, ``Rewards(...)``,
            ``TopK(...)``, ``Recency(...)``, ``Newest(...)``, ``MaxAge(...)``, a function of one's own, or several,
            whose weights are multiplied; see ``Retention``.
        older_groups: What becomes of a problem's group of an older version when rollouts of a newer one come. "drop":
            the first of them ends the older group, whatever its size. "until_as_large": the older group may be drawn
            until the newer one has as many rollouts; each is scored on its own. "keep": both may be drawn, and rollouts
            of older versions are taken also after newer ones. None: "keep" with a ``retention`` or ``max_staleness``,
            which then say what is too old, else "drop". Versions compare as numbers where they are numbers.
        max_staleness: Leave out rollouts that are more versions than this behind the one that ``set_policy_version``
            told, or, where none was told, the latest one seen: by the difference where versions are numbers, else by
            how many are between.
        max_uses: How many batches a rollout may be in.
        balance: Whether every environment gets the same share of a batch; or their shares by name, others getting
            none. What one lacks the others give.
        capacity_bytes: Rollouts leave behind which more came than so many bytes, about, with them; None: none does.
        pool_groups: Whether sealed groups of one environment, problem and policy version are scored as one. What a
            rollout is worth then depends on which of them came before its batch was drawn.

    Raises:
        ConfigError: An argument that cannot be used.
    """

    def __init__(
        self,
        environment_name: str | None = None,
        rng_seed: int | None = None,
        *,
        advantage: Advantage | None = None,
        filter_zero_variance: bool = True,
        retention: Retention | Sequence[Retention] = (),
        older_groups: str | None = None,
        max_staleness: int | None = None,
        max_uses: int = 1,
        balance: bool | Mapping[str, float] = False,
        capacity_bytes: int | None = None,
        pool_groups: bool = False,
    ) -> None:
        if environment_name is not None and (not isinstance(environment_name, str) or not environment_name):
            raise ConfigError(f"environment_name: expected a name or None, found {environment_name!r}")
        self._environment = environment_name
        self._seed = check_seed(0 if rng_seed is None else rng_seed)
        self._advantage: Advantage = Rloo() if advantage is None else advantage
        if not callable(self._advantage) or isinstance(self._advantage, type):
            raise ConfigError(f"advantage: expected a function of rewards and groups, found {advantage!r:.80}")
        compares = compared(self._advantage)
        self._retention = functions("retention", retention)
        self._max_uses = check_count("max_uses", max_uses, 1)
        self._shares = shares_of(balance)
        self._holding = CandidatePool(
            self._advantage,
            environment=environment_name,
            older=older_groups or ("keep" if self._retention or max_staleness is not None else "drop"),
            pool=bool(pool_groups),
            leaves_equal=bool(filter_zero_variance) and compares != "nothing",
            by_turn=compares == "turns",
            max_staleness=None if max_staleness is None else check_count("max_staleness", max_staleness, 0),
            capacity=None if capacity_bytes is None else check_count("capacity_bytes", capacity_bytes, 1),
        )
        self._draws = 0
        self._last: dict[str, tuple[float, int]] = {}

    def __repr__(self) -> str:
        rollouts = len(self._holding.pool)
        return f"GrpoBatchMaker(environment_name={self._environment!r}, rollouts={rollouts}, at={self._draws})"

    # ------------------------------------------------------------------ rollouts

    def check_rollout(self, rollout: RolloutRecord) -> None:
        """Raise DataError for a rollout that ``add_rollout`` would refuse: one of a version that is not there yet, or
        of the uid of another one that was added.

        A ``RolloutBuffer`` asks before it stores one.
        """
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"add_rollout: expected a RolloutRecord, found {rollout!r:.100}")
        self._holding.versions.refuse_ahead(rollout.policy_version, rollout.rollout_uid)
        self._holding.refuse_other(rollout)

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Take a rollout, unless it is of another environment, has been taken, is stale, or of an older version.

        ``older_groups`` says whether a rollout of an older version than others of its problem is taken.

        Raises:
            DataError: Not a rollout, one without a reward, one with columns that were not declared, one of a version
                beyond the one that ``set_policy_version`` was told, or one that came before with other content (of one
                that was drawn or has left, as far as that is known: group, rewards, lengths).
        """
        try:
            self.check_rollout(rollout)
            refuse_undeclared(rollout)
            piece = GroupSlice.of_rollout(rollout)
        except DataError:
            self._holding.refuse()
            raise
        self._holding.come(piece)

    def add_group(self, group: StoredGroup) -> None:
        """Take a stored group; see ``ResumableBatchMaker``."""
        self._holding.come(GroupSlice.of_group(group))

    def set_policy_version(self, version: str | int) -> None:
        """Say which version is the latest. It counts for staleness, and rollouts of later ones are refused from now on.

        Say it again whenever the policy changes. Rollouts of later versions that are there belong to a policy that is
        not trained on, as where a trainer goes back to a checkpoint: they are never drawn, also not once another policy
        reaches their version.

        Raises:
            DataError: Neither a str nor an int.
        """
        self._holding.set_policy_version(version_name(version))

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Become what it was before a restart; see ``ResumableBatchMaker``."""
        self._holding.begin()
        self._draws = len(batches)
        uses = Counter(uid for uids in batches for uid in uids)

        def settle(piece: GroupSlice) -> None:
            piece.uses = {place: uses[uid] for place, uid in enumerate(piece.part.uids) if uid in uses}
            piece.gone.update(place for place, count in piece.uses.items() if count >= self._max_uses)

        self._holding.restore(list(map(GroupSlice.of_group, groups)), settle)

    # ------------------------------------------------------------------ batches

    @property
    def available(self) -> int:
        """How many examples a batch could be made of now."""
        return len(self._eligible())

    def rows(self) -> HeldRollouts:
        """What is known of the rollouts, as a ``Retention`` is given it."""
        return self._holding.rows()

    def _eligible(self) -> npt.NDArray[np.int64]:
        """The rows that may be drawn, in the order they came."""
        holding = self._holding
        if self._retention:
            holding.weigh(self._retention)
        holding.pool.settle()
        chosen = holding.pool.column("present").copy()
        if self._shares:
            allowed = np.array([self._shares.get(name, 0.0) > 0 for name in holding.environments], np.bool_)
            chosen &= allowed[holding.pool.column("environment")]
        return np.flatnonzero(chosen)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """A batch, or None while there are fewer than ``batch_size`` rollouts to draw from.

        Raises:
            ConfigError: ``batch_size`` is below 1.
            DataError: An ``advantage`` or a ``retention`` that does not give what it should; a damaged file.
            StorageError: A file cannot be read. Nothing was drawn.
        """
        size = check_count("batch_size", batch_size, 1)
        rows = self._eligible()
        if len(rows) < size:
            return None
        pool, names = self._holding.pool, self._holding.environments
        given = pool.column("weight")[rows]
        weights = None if (given == given[0]).all() else given
        environments = pool.column("environment")[rows]
        drawn = draw(self._seed, self._draws, size, len(rows), weights, environments, names, self._shares)
        chosen = rows[drawn]
        worth: Any = pool.scored()[chosen]
        pieces, places = pool.column("piece")[chosen].tolist(), pool.column("place")[chosen].tolist()
        records = _records(pieces, places)
        if isinstance(self._advantage, BatchAdvantage):
            worth = self._advantage.of_batch(records, worth)
        batch = make_examples(records, worth)
        behind = self._holding.versions.all_behind()[pool.column("version")[chosen]].tolist()
        earned = zip(pool.column("reward")[chosen].tolist(), behind, strict=True)
        self._last = dict(zip([record.rollout_uid for record in records], earned, strict=True))
        pool.column("uses")[chosen] += 1
        uses = pool.column("uses")[chosen].tolist()
        for row, piece, place, count in zip(chosen.tolist(), pieces, places, uses, strict=True):
            piece.uses[place] = count
            if count >= self._max_uses:
                pool.release(row)
                self._holding.used += 1
        self._draws += 1
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What a batch is made of: its size, tokens, uids, how many rollouts of which environment and version, and of
        the last batch the rewards and how many versions behind each was when it was drawn ("staleness").
        """
        return metadata_of(batch, self._last)

    def summary(self) -> dict[str, float]:
        """Numbers for a log.

        Of all that ever came, also before a restart: "rollouts", "groups", "groups_equal" (whose rollouts all earned
        the same), their share "groups_equal_share"; of what is there: "available", and of the rewards of all groups
        that are wanted, and the tokens and the staleness of rollouts that can be drawn, "<name>_mean", "_std", "_min"
        and "_max", NaN where there are none; each for all and after "<environment>/" for each.

        "received" is how many rollouts were given, again or in vain, too. Each of them is counted once: in "held",
        which a batch may still have, in "used", which batches had ``max_uses`` times, or in one "left/<reason>", whose
        reason is an option ("environment_name", "max_staleness", "older_groups", "filter_zero_variance",
        "capacity_bytes"), the name of a retention, "duplicate", "refused", "given_up", "untrained" (no token in the
        loss) or "lost_versions" (see ``set_policy_version``). "left/filter_zero_variance" goes down where others join
        a group that earned the same. A restart forgets what was a duplicate or refused.
        """
        available = self.available
        return {**self._holding.summary(), "available": available}


def _records(pieces: Sequence[GroupSlice], places: Sequence[int]) -> list[RolloutRecord]:
    """The rollouts at some places of pieces; those that are in no memory are read."""
    rows: dict[GroupSlice, list[int]] = {}
    for row, piece in enumerate(pieces):
        if piece.group is not None:
            rows.setdefault(piece, []).append(row)
    found: list[Any] = [piece.record for piece in pieces]
    wanted: list[Any] = []
    for piece, own in rows.items():
        chosen = [places[row] for row in own]
        others = [place for place in piece.present if place not in chosen]
        wanted.append((piece.group, chosen, others))
    for own, records in zip(rows.values(), read_wanted(wanted), strict=True):
        for row, record in zip(own, records, strict=True):
            found[row] = record
    return found
