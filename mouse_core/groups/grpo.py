"""GrpoBatchMaker: batches of rollouts that are scored relative to the other rollouts of their group.

Rollouts arrive in slices. A slice is a sealed group of a buffer, or a single rollout. Slices that are scored together
form a scored group. The reward of a rollout that is drawn or removed still counts in the scores of the other rollouts
of its group::

    rewards of a group   0  1  1  0     advantages (RLOO)   -2/3  2/3  2/3  -2/3
    rollout 1 is drawn   0  -  1  0     advantages          -2/3   -   2/3  -2/3
    all are drawn        the group is removed, and added again with all rewards if a slice joins it
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups import scoring
from mouse_core.groups.examples import make_examples
from mouse_core.groups.files import GroupFile, part_of
from mouse_core.groups.records import (
    RLExample,
    RolloutRecord,
    Versions,
    other_one,
    refuse_other,
    refuse_undeclared,
    version_name,
    version_order,
)
from mouse_core.groups.stored import StoredGroup, read_wanted
from mouse_core.randomness import Key, Purpose, as_exponential, check_seed
from mouse_core.spec import check_choice, check_count

_OLDER_GROUPS = ("drop", "keep")
# Reasons for which rollouts are removed or not accepted; the name of a retention is a further reason.
_REASONS = (
    "environment_name",
    "duplicate",
    "refused",
    "untrained",
    "max_staleness",
    "older_groups",
    "lost_versions",
    "filter_zero_variance",
)

# ---------------------------------------------------------------------- groups

# For each scored rollout of a slice: its position in the group's file, and whether it can still be drawn.
_ROW = np.dtype(
    [
        ("place", np.int64),
        ("reward", np.float64),
        ("created", np.float64),
        ("tokens", np.int64),
        ("uses", np.int64),
        ("present", np.bool_),
        ("advantage", np.float64),
    ]
)


@dataclass(slots=True, eq=False)
class GroupSlice:
    """Rollouts of one group that arrived together.

    Args:
        part: The indexed properties of the rollouts.
        rows: The scored rollouts, ``[n]`` of ``_ROW``: rollouts that have tokens in the loss.
        present: The number of scored rollouts that were not removed.
        group_uid: The uid of the sealed group of the rollouts; "" if the rollouts are in no sealed group.
        group: The stored group of the rollouts, or None.
        record: Without a stored group, the single rollout of the slice; None after the rollout was removed.

    Attributes:
        serial: How many rollouts arrived before the slice.
        environment, version: The indices of the environment and of the version.
        arrival: How many rollouts of the same environment arrived before the slice.
        members: The scored group of the slice, if that group is kept.
    """

    part: GroupFile
    rows: npt.NDArray[Any]
    present: int
    group_uid: str
    group: StoredGroup | None = None
    record: RolloutRecord | None = None
    serial: int = 0
    environment: int = 0
    version: int = 0
    arrival: int = 0
    members: ScoredGroup | None = None

    def leave(self, indices: Sequence[int]) -> None:
        """Remove rows permanently; their rewards still count in scores."""
        self.rows["present"][indices] = False
        self.present -= len(indices)
        self.forget(self.rows["place"][indices].tolist())

    def forget(self, places: Sequence[int] | None = None) -> None:
        """Release rollouts from memory."""
        self.record = None
        if self.group is not None and self.group.cache is not None:
            uids = self.part.uids
            self.group.cache.drop(uids if places is None else [uids[place] for place in places])


def _slice(part: GroupFile, group_uid: str, **more: Any) -> GroupSlice:
    _check_rewarded(part.uids, part.rewards)
    rows = [
        (place, part.rewards[place], part.created[place], part.tokens[place], 0, True, 0.0)
        for place in range(len(part.uids))
        if place not in part.untrained
    ]
    return GroupSlice(part, np.array(rows, _ROW), len(rows), group_uid, **more)


def _check_rewarded(uids: Sequence[str], rewards: Sequence[float | None]) -> None:
    if None in rewards:
        uid = uids[rewards.index(None)]
        raise DataError(f"rollout {uid!r}: expected a reward of the rollout or of one of its turns, found none")


def _slice_of_group(group: StoredGroup) -> GroupSlice:
    return _slice(group.part, group.group_uid, group=group)


@dataclass(slots=True, eq=False)
class ScoredGroup:
    """Rollouts of one policy version that are scored relative to each other.

    Args:
        version: The version.
        number: The index of the group.
        pieces: The slices that arrived.
        least, most: The smallest and the largest reward.
        is_wanted: Whether the rule ``older_groups`` keeps the group.
    """

    version: str
    number: int
    pieces: list[GroupSlice] = field(default_factory=list)
    least: float = math.inf
    most: float = -math.inf
    is_wanted: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether the group has no scored rollout."""
        return self.most < self.least

    @property
    def is_equal(self) -> bool:
        """Whether all rollouts have equal rewards, up to rounding."""
        return self.is_empty or scoring.are_equal(self.least, self.most)

    @property
    def is_present(self) -> bool:
        """Whether a rollout of the group can still be drawn."""
        return any(piece.present for piece in self.pieces)

    @property
    def present(self) -> int:
        """The number of rollouts that were not removed."""
        return sum([piece.present for piece in self.pieces])

    def join(self, piece: GroupSlice) -> None:
        """Record the rewards of a slice of the group."""
        piece.members = self
        if len(piece.rows):
            rewards = piece.rows["reward"].tolist()
            self.least, self.most = min(self.least, *rewards), max(self.most, *rewards)


class WantedGroups:
    """The groups of each problem to keep: groups of the latest policy version, and older groups according to ``older``.

    Args:
        older: One of ``_OLDER_GROUPS``.
        pool: Whether all sealed groups of a problem and a version are scored together as one group.

    Raises:
        ConfigError: ``older`` is invalid.
    """

    def __init__(self, older: str, pool: bool) -> None:
        check_choice("older_groups", older, _OLDER_GROUPS)
        self._older, self._pool = older, pool
        # By environment and problem, the groups of each version, and of these by the uid of the sealed group; "" is the
        # group of all rollouts without a sealed group.
        self._problems: dict[tuple[str, str], dict[str, dict[str, ScoredGroup]]] = {}
        self._next = 0

    def __iter__(self) -> Iterator[ScoredGroup]:
        problems = self._problems.values()
        return (group for versions in problems for groups in versions.values() for group in groups.values())

    def add(self, piece: GroupSlice) -> tuple[ScoredGroup | None, list[ScoredGroup]]:
        """Return two values: the group of a slice (None if the slice is rejected), and a list of the groups that are no
        longer kept.
        """
        environment, example_id, version = piece.part.key
        versions = self._problems.setdefault((environment, example_id), {})
        if version not in versions:
            if self._older == "drop" and versions and version_order(version) < version_order([*versions][-1]):
                return None, []
            versions[version] = {}
        groups, uid = versions[version], "" if self._pool else piece.group_uid
        members = groups.get(uid)
        if members is None:
            members = groups[uid] = ScoredGroup(version, self._next)
            self._next += 1
        if self._older == "keep" or not len(piece.rows):
            return members, []
        # Versions are in their order here, as older ones are rejected.
        older = [*versions][: [*versions].index(version)]
        return members, [group for one in older for group in versions.pop(one).values()]

    def drop(self, unwanted: Callable[[str], bool]) -> list[ScoredGroup]:
        """Remove and return the groups of all versions for which a function returns True."""
        gone: list[ScoredGroup] = []
        for problem, versions in list(self._problems.items()):
            for version in filter(unwanted, list(versions)):
                gone += versions.pop(version).values()
            if not versions:
                del self._problems[problem]
        return gone


# Shared properties of a slice's rows, and the number of its rows.
_SLICE = np.dtype([(name, np.int64) for name in ("serial", "group", "environment", "version", "arrival", "count")])


class CandidateTable:
    """A table of rollouts in order of arrival: all rollouts of each group from which a rollout can still be drawn. The
    column ``present`` is False for rollouts that were drawn or removed.

    Args:
        pieces: The slices, ``[k]``.
        slices: The shared properties of each slice's rows, ``[k]`` of ``_SLICE``.
        rows: The rows of all slices, ``[n]`` of ``_ROW``.
    """

    def __init__(self, pieces: npt.NDArray[Any], slices: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        self.pieces, self.rows, self._slices = pieces, rows, slices
        self._piece_of = np.repeat(np.arange(len(pieces)), slices["count"])
        self._begins = np.cumsum(slices["count"]) - slices["count"]

    def column(self, name: str, rows: Any = slice(None)) -> npt.NDArray[np.int64]:
        """Return a column of ``_SLICE`` for each row, or for the given rows."""
        values: npt.NDArray[np.int64] = self._slices[name][self._piece_of[rows]]
        return values

    def at(self, row: int) -> tuple[GroupSlice, int]:
        """Return the slice of a row, and the row's index in the slice."""
        number = int(self._piece_of[row])
        return self.pieces[number], row - int(self._begins[number])

    def without(self, groups: Sequence[int]) -> CandidateTable:
        """Return the table without the rows of the given groups."""
        kept = np.isin(self._slices["group"], groups, invert=True)
        slices, rows = self._slices.compress(kept), self.rows.compress(kept[self._piece_of])
        return CandidateTable(self.pieces[kept], slices, rows)

    def merged(self, new: CandidateTable) -> CandidateTable:
        """Merge this table with another table, in order of arrival."""
        at = np.searchsorted(self._slices["serial"], new._slices["serial"])
        at_rows = np.repeat(np.append(self._begins, len(self.rows))[at], new._slices["count"])
        slices, rows = np.insert(self._slices, at, new._slices), np.insert(self.rows, at_rows, new.rows)
        return CandidateTable(np.insert(self.pieces, at, new.pieces), slices, rows)


def _candidates(pieces: Sequence[GroupSlice], advantage: scoring.Advantage) -> CandidateTable:
    """Return the table of the rollouts in all slices of some groups, with advantages."""
    pieces = sorted(pieces, key=attrgetter("serial"))
    numbers: list[int] = []
    for piece in pieces:
        number = piece.members.number  # type: ignore[union-attr]
        numbers += piece.serial, number, piece.environment, piece.version, piece.arrival, len(piece.rows)
    # Joining many short arrays as bytes is far faster than ``np.concatenate``.
    rows = np.frombuffer(bytearray().join([piece.rows for piece in pieces]), _ROW)  # type: ignore[misc]
    slices = np.fromiter(numbers, np.int64, len(numbers)).view(_SLICE)
    table = CandidateTable(np.fromiter(pieces, np.object_, len(pieces)), slices, rows)
    if pieces:
        rows["advantage"] = scoring.checked_worth(advantage, rows["reward"], table.column("group"))
    return table


# ---------------------------------------------------------------------- draws


def draw(
    seed: int,
    index: int,
    size: int,
    count: int,
    weights: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.int64]:
    """Draw a sample without replacement; return the positions of its elements in random order.

    Args:
        seed, index: The sample depends only on the seed, the index and the other arguments.
        size: The number of drawn elements.
        count: The number of elements to draw from.
        weights: The weight of each element, ``[count]``; None: all are equally likely.
    """
    words: npt.NDArray[Any] = Key(seed, Purpose.GROUPS, index=index).bits(count)
    if weights is not None:
        # Take the elements with the smallest exponential random times, with the weights as rates: Efraimidis and
        # Spirakis, "Weighted random sampling with a reservoir" (2006).
        words = as_exponential((~words >> np.uint64(11)).astype(np.float64) * 2.0**-53) / weights
    # The smallest words in their order are a random sample in random order.
    places = np.argpartition(words, size)[:size] if size < count else np.arange(count)
    return places[np.argsort(words[places], kind="stable")]


def metadata_of(batch: Sequence[RLExample], drawn: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    """Return the metadata of a batch.

    Args:
        batch: The examples of the batch.
        drawn: For each rollout uid, the reward of the rollout and its staleness at the time of the draw.
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
    """Creates batches of rollouts that are scored relative to the other rollouts of their group.

    A group that a ``RolloutBuffer`` sealed is scored separately from other groups of its problem and policy version.
    Rollouts outside a sealed group form one group for each environment, problem and policy version. The advantage of a
    rollout is computed by ``advantage`` from the rewards of its group, in double precision, by default as in RLOO.
    Rollouts without a token in the loss are not scored and do not affect scores. A batch is a sample without
    replacement from the rollouts that may be drawn. The sample depends only on the seed, the number of earlier batches,
    and these rollouts.

    Rollouts in the files of a ``RolloutBuffer`` are read when they are drawn, unless they are still in memory.

    Args:
        environment_name: The only environment whose rollouts are accepted; None: all environments.
        rng_seed: The seed, in ``[0, 2**64)``; None: 0.
        advantage: ``Rloo()`` (the default, if None), ``Grpo()``, ``DrGrpo()``, or a custom function; see ``Advantage``.
        filter_zero_variance: Whether to leave out groups in which all rewards are equal, up to rounding, because their
            advantages are zero. With a custom ``advantage`` function, no group is left out unless the function has an
            attribute ``compares``. Rollouts of other groups fill the batch, so the batch size does not change.
        retention: The rule that determines which rollouts are kept, and with which weight each rollout is drawn: a
            function, ``TopK(...)``, or a list of several rules, whose weights are multiplied; see ``Retention``.
        older_groups: The rule for a problem's older groups, when rollouts of a newer policy version arrive.
            "drop": the first newer rollout removes the older group. "keep": both may be drawn, each group is scored
            separately, and rollouts of older versions are accepted even after newer rollouts. None: "keep" if
            ``retention`` or ``max_staleness`` is given, else "drop". Versions that are numbers are compared as numbers.
        max_staleness: The largest staleness of a rollout. Staleness is the number of versions that the rollout is
            behind the latest version: the version that ``set_policy_version`` set last or, if this method was never
            called, the latest version seen. The staleness is the difference of the two versions if they are numeric,
            else the number of later versions that were seen.
        max_uses: The largest number of batches in which the same rollout may be used.
        pool_groups: Whether sealed groups of the same environment, problem and policy version are scored as one group.
            The advantage of a rollout then depends on the groups that arrived before its batch was drawn.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        environment_name: str | None = None,
        rng_seed: int | None = None,
        *,
        advantage: scoring.Advantage | None = None,
        filter_zero_variance: bool = True,
        retention: scoring.Retention | Sequence[scoring.Retention] = (),
        older_groups: str | None = None,
        max_staleness: int | None = None,
        max_uses: int = 1,
        pool_groups: bool = False,
    ) -> None:
        if environment_name is not None and (not isinstance(environment_name, str) or not environment_name):
            raise ConfigError(f"environment_name: expected a name or None, found {environment_name!r}")
        self._environment = environment_name
        self._seed = check_seed(0 if rng_seed is None else rng_seed)
        self._advantage: scoring.Advantage = scoring.Rloo() if advantage is None else advantage
        if not callable(self._advantage) or isinstance(self._advantage, type):
            raise ConfigError(f"advantage: expected a function of rewards and groups, found {advantage!r:.80}")
        self._leaves_equal = bool(filter_zero_variance) and scoring.compared(self._advantage) != "nothing"
        self._retention = scoring.retentions(retention)
        self._max_uses = check_count("max_uses", max_uses, 1)
        self._older = older_groups or ("keep" if self._retention or max_staleness is not None else "drop")
        self._pools = bool(pool_groups)
        self._max_staleness = None if max_staleness is None else check_count("max_staleness", max_staleness, 0)
        self._versions = Versions()
        self._last: dict[str, tuple[float, int]] = {}
        self._begin()

    def _begin(self) -> None:
        """Remove all rollouts; keep the known versions."""
        self._wanted = WantedGroups(self._older, self._pools)
        self._pool: dict[int, ScoredGroup] = {}  # groups with drawable rollouts, by number
        self._drawable = 0  # rollouts of these that have not left
        self._known_table = _candidates([], self._advantage)
        self._changed: set[int] = set()  # groups that were added, extended or removed since the table was created
        self._environments: dict[str, int] = {}  # the index of each environment
        self._counts = Counter(rollouts=0, groups=0, groups_equal=0)  # of all rollouts that arrived
        self._received = self._used = self._draws = 0
        self._left: Counter[str] = Counter(dict.fromkeys(_REASONS, 0))
        self._arrived: Counter[str] = Counter()
        self._serial = 0
        self._newest = -math.inf
        self._alone: dict[str, GroupSlice] = {}  # rollouts that are not in a file, by uid

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Arrays that were unpickled from shared memory may be read-only, so copy them.
        self._known_table.rows = self._known_table.rows.copy()
        for group in self._wanted:
            for piece in group.pieces:
                piece.rows = piece.rows.copy()

    def __repr__(self) -> str:
        rollouts = sum(len(piece.rows) for group in self._pool.values() for piece in group.pieces)
        return f"GrpoBatchMaker(environment_name={self._environment!r}, rollouts={rollouts}, at={self._draws})"

    # ------------------------------------------------------------------ coming

    def check_rollout(self, rollout: RolloutRecord) -> None:
        """Raise DataError for a rollout that ``add_rollout`` would reject: it has no reward, its version is newer than
        the latest version, or its uid was added with other content.

        A ``RolloutBuffer`` calls this method before it stores a rollout.
        """
        if not isinstance(rollout, RolloutRecord):
            raise DataError(f"add_rollout: expected a RolloutRecord, found {rollout!r:.100}")
        _check_rewarded([rollout.rollout_uid], [rollout.reward])
        self._versions.refuse_ahead(rollout.policy_version, rollout.rollout_uid)
        before = self._alone.get(rollout.rollout_uid)
        if before is None:
            return
        if before.record is not None:
            refuse_other(rollout, before.record, "add_rollout")
            return
        # For a removed rollout, compare the properties that are still known.
        part, known = part_of([rollout]), ("key", "rewards", "tokens")
        differing = [name for name in known if getattr(part, name) != getattr(before.part, name)]
        if differing:
            called = {"key": "group", "rewards": "reward"}
            raise other_one(rollout.rollout_uid, [called.get(name, name) for name in differing], "add_rollout")

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Add a rollout. A rollout is ignored if it belongs to another environment, is a duplicate, is stale, or has an
        older version.

        ``older_groups`` determines whether a rollout with an older version than other rollouts of its problem is added.

        Raises:
            DataError: The argument is not a rollout; the rollout has no reward, undeclared columns, or a version newer
                than the version of ``set_policy_version``; or a rollout with this uid was added with other content (for
                drawn or removed rollouts, only group, rewards and lengths are compared).
        """
        try:
            self.check_rollout(rollout)
            refuse_undeclared(rollout)
            piece = _slice(part_of([rollout]), rollout.group_uid, record=rollout)
        except DataError:
            self._received += 1
            self._left["refused"] += 1
            raise
        if rollout.rollout_uid in self._alone:
            self._received += 1
            self._left["duplicate"] += 1
            return
        self._alone[rollout.rollout_uid] = piece
        self._come(piece)

    def add_group(self, group: StoredGroup) -> None:
        """Add a stored group."""
        self._come(_slice_of_group(group))

    def resume(self, groups: Sequence[StoredGroup], batches: Sequence[Sequence[str]]) -> None:
        """Restore the state before a restart.

        Args:
            groups: All sealed groups, in order.
            batches: For every stored batch, in order, the uids of its rollouts.
        """
        self._begin()
        self._draws = len(batches)
        uses = Counter(uid for uids in batches for uid in uids)
        pieces = list(map(_slice_of_group, groups))
        for piece in pieces:
            self._arrive(piece)
            if self._environment in (None, piece.part.key.environment):
                self._note(piece.part.key.policy_version)
        # All groups are counted before any is added, because a newer group of the same problem follows most groups.
        counted = []
        for piece in pieces:
            if uses:
                piece.rows["uses"] = [uses[piece.part.uids[place]] for place in piece.rows["place"].tolist()]
                piece.leave(np.flatnonzero(piece.rows["uses"] >= self._max_uses).tolist())
            counted.append((piece, self._count_in(piece)))
        for piece, members in counted:
            if members is not None and members.is_wanted:
                self._take(piece, members)
            elif members is not None:
                self._left["older_groups"] += piece.present

    def _come(self, piece: GroupSlice) -> None:
        self._arrive(piece)
        members = self._count_in(piece)
        if members is None:
            piece.forget()
        else:
            self._take(piece, members)

    def _arrive(self, piece: GroupSlice) -> None:
        """Set ``serial`` and ``arrival`` of a slice, and count its rollouts."""
        environment, count = piece.part.key.environment, len(piece.part.uids)
        self._newest = max(self._newest, *piece.part.created)
        piece.serial, piece.arrival = self._serial, self._arrived[environment]
        self._serial += count
        self._received += count
        self._arrived[environment] += count

    def _count_in(self, piece: GroupSlice) -> ScoredGroup | None:
        """Return the group of a slice, or a new group if the slice is the first of its group; None if the slice is
        rejected.
        """
        environment, _, version = piece.part.key
        count = len(piece.part.uids)
        if self._environment not in (None, environment):
            self._left["environment_name"] += count
            return None
        self._used += len(piece.rows) - piece.present
        self._left["untrained"] += count - len(piece.rows)
        self._note(version)
        piece.environment = self._environments.setdefault(environment, len(self._environments))
        piece.version = self._versions.place(version)
        self._counts["rollouts"] += count
        is_stale = self._stale(version)
        members, gone = (None, []) if is_stale else self._wanted.add(piece)
        if members is None:
            self._left["max_staleness" if is_stale else "older_groups"] += piece.present
        else:
            was_empty, was_equal = members.is_empty, not members.is_empty and members.is_equal
            members.join(piece)
            if not members.is_empty:
                self._counts["groups"] += was_empty
                self._counts["groups_equal"] += members.is_equal - was_equal
        self._forget(gone, "older_groups")
        return members

    def _take(self, piece: GroupSlice, members: ScoredGroup) -> None:
        """Add a slice of a kept group. A group without drawable rollouts waits for more slices."""
        members.pieces.append(piece)
        if not self._is_left_out(members) and members.is_present:
            joining = [piece] if members.number in self._pool else members.pieces
            self._drawable += sum([one.present for one in joining])
            self._pool[members.number] = members
            self._changed.add(members.number)

    def _is_left_out(self, members: ScoredGroup) -> bool:
        """Whether a group is left out because all its rewards are equal."""
        return self._leaves_equal and members.is_equal

    # ------------------------------------------------------------------ leaving

    def _let_go(self, piece: GroupSlice, indices: Sequence[int]) -> None:
        """Remove rollouts of a slice permanently."""
        piece.leave(indices)
        if piece.members is not None and piece.members.number in self._pool:
            self._drawable -= len(indices)
            if not piece.members.is_present:
                del self._pool[piece.members.number]
                self._changed.add(piece.members.number)

    def _forget(self, gone: Sequence[ScoredGroup], reason: str) -> None:
        """Remove groups that are no longer kept."""
        for members in gone:
            members.is_wanted = False
            if self._pool.pop(members.number, None) is not None:
                self._drawable -= members.present
                self._changed.add(members.number)
            for piece in members.pieces:
                self._left[reason] += piece.present
                piece.forget()
                # A group of a lost version has the number of the version, and must not count as a group of the new
                # version with that number.
                if piece.group is None and reason != "lost_versions":
                    self._alone.pop(piece.part.uids[0], None)

    # ------------------------------------------------------------------ versions

    def set_policy_version(self, version: str | int) -> None:
        """Set the latest version, from which staleness is measured. After this call, adding a rollout of a newer
        version raises DataError.

        Call this method whenever the policy changes. If a trainer goes back to a checkpoint, stored rollouts of later
        versions belong to an abandoned policy: these rollouts are never drawn, even when another policy reaches their
        version number.

        Raises:
            DataError: The version is neither a str nor an int.
        """
        if self._versions.set_latest(version_name(version)):
            self._forget(self._wanted.drop(self._versions.is_ahead), "lost_versions")
        self._forget_stale()

    def _note(self, version: str) -> None:
        if self._versions.note(version):
            self._forget_stale()

    def _forget_stale(self) -> None:
        if self._max_staleness is not None:
            self._forget(self._wanted.drop(self._stale), "max_staleness")

    def _stale(self, version: str) -> bool:
        return self._max_staleness is not None and self._versions.behind(version) > self._max_staleness

    # ------------------------------------------------------------------ candidates

    def _table(self) -> CandidateTable:
        """Return the table of the rollouts in the pool, with scores."""
        if self._changed:
            groups = [self._pool[number] for number in self._changed if number in self._pool]
            known = self._known_table.without(list(self._changed))
            new = _candidates([piece for group in groups for piece in group.pieces], self._advantage)
            self._known_table = known.merged(new) if len(known.rows) else new
            self._changed.clear()
        return self._known_table

    def rows(self) -> scoring.HeldRollouts:
        """Return the properties of the rollouts, which are the argument of a ``Retention``."""
        return self._held(self._table())

    def _held(self, table: CandidateTable) -> scoring.HeldRollouts:
        rows, environment = table.rows, table.column("environment")
        arrived = np.array([self._arrived[name] for name in self._environments], np.int64)
        return scoring.HeldRollouts(
            present=rows["present"],
            reward=rows["reward"],
            advantage=rows["advantage"],
            group=table.column("group"),
            environment=environment,
            environments=tuple(self._environments),
            staleness=self._versions.all_behind()[table.column("version")],
            age=self._newest - rows["created"],
            newer=arrived[environment] - 1 - table.column("arrival") - rows["place"],
            tokens=rows["tokens"],
            uses=rows["uses"],
        )

    def _eligible(self) -> tuple[CandidateTable, npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return three values: the table of candidates, the indices of the rows that can be drawn (in order of
        arrival), and the weights of these rows.
        """
        table = self._table()
        weights = np.ones(len(table.rows))
        held = self._held(table) if self._retention and len(weights) else None
        for retention in self._retention if held is not None else ():
            weights *= scoring.weights_of(retention, held)  # type: ignore[arg-type]
            gone = np.flatnonzero(table.rows["present"] & (weights == 0))
            table.rows["present"][gone] = False
            for row in gone.tolist():
                piece, index = table.at(row)
                self._let_go(piece, [index])
            if len(gone):
                self._left[scoring.name_of(retention)] += len(gone)
        rows = np.flatnonzero(table.rows["present"])
        return table, rows, weights[rows]

    @property
    def available(self) -> int:
        """The number of examples that are available for a batch."""
        return len(self._eligible()[1]) if self._retention else self._drawable

    # ------------------------------------------------------------------ batches

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Return a batch, or None if fewer than ``batch_size`` rollouts can be drawn.

        Raises:
            ConfigError: ``batch_size`` is below 1.
            DataError: An ``advantage`` or a ``retention`` returned invalid values, or a file is damaged.
            StorageError: A file cannot be read. Nothing was drawn.
        """
        size = check_count("batch_size", batch_size, 1)
        table, rows, weights = self._eligible()
        if len(rows) < size:
            return None
        likely = None if (weights == weights[0]).all() else weights
        chosen = rows[draw(self._seed, self._draws, size, len(rows), likely)]
        members = [table.at(row) for row in chosen.tolist()]
        records = _records(members)
        worth: Any = table.rows["advantage"][chosen]
        if hasattr(self._advantage, "of_batch"):
            worth = self._advantage.of_batch(records, worth)
        batch = make_examples(records, worth)
        behind = self._versions.all_behind()[table.column("version", chosen)]
        earned = zip(table.rows["reward"][chosen].tolist(), behind.tolist(), strict=True)
        self._last = dict(zip([record.rollout_uid for record in records], earned, strict=True))
        table.rows["uses"][chosen] += 1
        gone = table.rows["uses"][chosen] >= self._max_uses
        table.rows["present"][chosen[gone]] = False
        for (piece, index), leaves in zip(members, gone.tolist(), strict=True):
            piece.rows["uses"][index] += 1
            if leaves:
                self._let_go(piece, [index])
        self._used += int(gone.sum())
        self._draws += 1
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """Return the metadata of a batch: its size, tokens, uids, and rollouts by environment and version. The
        metadata of the last batch also has "rewards", and "staleness", the staleness of each example at the time of its
        draw.
        """
        return metadata_of(batch, self._last)

    def summary(self) -> dict[str, float]:
        """Return counts for a log, by name.

        "rollouts", "groups" and "groups_equal" (groups whose rewards are all equal) count all received data, also from
        before a restart. "available" counts the rollouts that can be drawn; ``rows()`` returns the rewards, lengths and
        staleness of these rollouts.

        "received" counts all rollouts passed to the maker, including duplicates and rejected rollouts. Each rollout is
        counted once: in "held" (may still be drawn), in "used" (drawn ``max_uses`` times), or in one "left/<reason>".
        The reason is an option ("environment_name", "max_staleness", "older_groups", "filter_zero_variance"), the name
        of a retention, "duplicate", "refused", "untrained" (no token in the loss) or "lost_versions" (see
        ``set_policy_version``). "left/filter_zero_variance" decreases if rollouts with other rewards join a group. A
        restart resets the counts of duplicates and rejected rollouts.
        """
        available = self.available
        held = equal = 0
        for group in self._wanted:
            # Rollouts with other rewards may join a group of equal rewards, which can then be drawn.
            if self._is_left_out(group):
                equal += group.present
            else:
                held += group.present
        left = {f"left/{name}": count for name, count in {**self._left, "filter_zero_variance": equal}.items()}
        counted = {"received": self._received, "held": held, "used": self._used}
        return {**self._counts, **counted, **left, "available": available}


def _records(members: Sequence[tuple[GroupSlice, int]]) -> list[RolloutRecord]:
    """Return the rollouts at the given rows of slices; rollouts that are not in memory are read."""
    rows: dict[GroupSlice, list[int]] = {}
    for row, (piece, _) in enumerate(members):
        if piece.group is not None:
            rows.setdefault(piece, []).append(row)
    found: list[Any] = [piece.record for piece, _ in members]
    wanted: list[Any] = []
    for piece, own in rows.items():
        chosen = [int(piece.rows["place"][members[row][1]]) for row in own]
        others = [place for place in piece.rows["place"][piece.rows["present"]].tolist() if place not in chosen]
        wanted.append((piece.group, chosen, others))
    for own, records in zip(rows.values(), read_wanted(wanted), strict=True):
        for row, record in zip(own, records, strict=True):
            found[row] = record
    return found
