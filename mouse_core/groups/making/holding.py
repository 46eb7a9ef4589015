"""The rollouts that came to a batch maker, and those of them that may be drawn."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.groups._files.part import part_of
from mouse_core.groups.making.functions.retention import HeldRollouts, Retention, name_of, weights_of
from mouse_core.groups.making.functions.scoring import Advantage, checked_worth
from mouse_core.groups.making.members import OLDER_GROUPS, GroupSlice, Members, NumbersOfRows, WantedGroups
from mouse_core.groups.types.records import RolloutRecord
from mouse_core.groups.types.same import other_one, refuse_other
from mouse_core.groups.types.versions import Versions


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
