"""Rollouts whose groups are not sealed yet: in a log that a crash does not lose, and in memory if there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.files.log import Log
from mouse_core.groups._files.arrow import rollouts_to_table, rollouts_with, table_to_rollouts
from mouse_core.groups._files.declared import refuse_missing
from mouse_core.groups._files.kept import RolloutCache
from mouse_core.groups._files.names import STATE
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.records import GroupKey, RolloutRecord
from mouse_core.groups.types.versions import Versions
from mouse_core.spec import check_count

# A log larger than this is written anew once most of it is about rollouts that have left.
_REWRITE_BYTES = 64 * 2**20
# It is written so many rollouts at a time, as they need not all be in memory.
_TOGETHER = 256


@dataclass(slots=True)
class Unsealed:
    """What is known of a rollout whose group is not sealed yet; it is in the log, and may be in memory.

    Args:
        rollout_uid: Its uid.
        reward: What it earned; None: that comes later.
        created: When, in seconds since 1970.
        tokens: How many it has.
        turns: How many it has.
        begin: Where the record of the log begins that it is in.
    """

    rollout_uid: str
    reward: float | None
    created: float
    tokens: int
    turns: int
    begin: int = -1

    @classmethod
    def of(cls, rollout: RolloutRecord, begin: int = -1) -> Unsealed:
        """What is known of a rollout."""
        tokens = sum([len(turn.tokens) for turn in rollout.turns])
        return cls(rollout.rollout_uid, rollout.reward, rollout.created, tokens, len(rollout.turns), begin)


@dataclass(slots=True)
class WaitingGroup:
    """Rollouts of one group, and when the first of them came, in seconds since 1970."""

    since: float
    rollouts: list[Unsealed] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What becomes of some new rollouts.

    Args:
        sealed: Groups that are complete with them.
        groups: What waits afterwards, for the groups that change: their new state, empty if nothing waits.
        new: The new rollouts by uid.
    """

    sealed: list[tuple[GroupKey, list[Unsealed]]]
    groups: dict[GroupKey, WaitingGroup]
    new: Mapping[str, RolloutRecord] = field(default_factory=dict)

    @property
    def logged(self) -> list[RolloutRecord]:
        """The new rollouts that wait."""
        sealed = {one.rollout_uid for _, group in self.sealed for one in group}
        return [rollout for uid, rollout in self.new.items() if uid not in sealed]


@dataclass(frozen=True)
class Rules:
    """When a group is sealed.

    Args:
        full: With so many rollouts.
        enough: With so many, once it is older than ``timeout``.
        timeout: Seconds.
        capacity: The most rollouts that wait, over all groups; beyond it the oldest groups are sealed.
    """

    full: int
    enough: int
    timeout: float
    capacity: int | None

    @classmethod
    def checked(cls, group_size: int, min_group_size: int, seal_timeout: float, capacity: int | None) -> Rules:
        """The rules that a buffer's arguments make; ConfigError: one that cannot be used."""
        full, enough = check_count("group_size", group_size), check_count("min_group_size", min_group_size)
        if isinstance(seal_timeout, bool) or not isinstance(seal_timeout, int | float) or not seal_timeout >= 0:
            raise ConfigError(f"seal_timeout: expected seconds, at least 0, found {seal_timeout!r}")
        return cls(full, enough, float(seal_timeout), None if capacity is None else check_count("capacity", capacity))

    def due(self, group: WaitingGroup) -> float:
        """When the group is to be sealed if no more rollouts come."""
        if len(group.rollouts) >= self.full:
            return -math.inf
        return group.since + self.timeout if len(group.rollouts) >= self.enough else math.inf


class Waiting:
    """The groups that wait.

    Args:
        root: The buffer's folder.
        rules: When a group is sealed.
        kept: The rollouts that are in memory.
        sealed: Uids of rollouts that have been sealed, which the log may still have.
        declared: Columns that the rollouts may have beside those of all.

    Attributes:
        groups: They.
        by_uid: Their rollouts.

    Raises:
        DataError: The log is damaged.
        StorageError: It cannot be read.
    """

    def __init__(
        self, root: Path, rules: Rules, kept: RolloutCache, sealed: Iterable[str] = (), declared: Columns = NO_COLUMNS
    ) -> None:
        self.rules, self._kept, self._declared = rules, kept, declared
        self.groups: dict[GroupKey, WaitingGroup] = {}
        self.by_uid: dict[str, Unsealed] = {}
        self._logged = 0
        gone = set(sealed)

        def found(begin: int, record: bytes) -> None:
            refuse_missing(root, declared, NO_COLUMNS, int.from_bytes(record[4:8], "little"))
            times, rollouts = _decode(record, declared)
            self._logged += len(rollouts)
            for time, rollout in zip(times, rollouts, strict=True):
                if rollout.rollout_uid not in gone:
                    gone.add(rollout.rollout_uid)
                    own = self.by_uid[rollout.rollout_uid] = Unsealed.of(rollout, begin)
                    self.groups.setdefault(rollout.key, WaitingGroup(time)).rollouts.append(own)
                    kept.put([rollout])

        self._log = Log(root / STATE / "waiting.log", found, noted=True)

    @property
    def count(self) -> int:
        """How many rollouts wait."""
        return len(self.by_uid)

    def plan(self, rollouts: Sequence[RolloutRecord], now: float) -> Plan:
        """What becomes of new rollouts; changes nothing."""
        groups: dict[GroupKey, WaitingGroup] = {}
        sealed: list[tuple[GroupKey, list[Unsealed]]] = []
        for rollout in rollouts:
            key = rollout.key
            group = groups.get(key)
            if group is None:
                old = self.groups.get(key)
                group = WaitingGroup(now) if old is None else WaitingGroup(old.since, list(old.rollouts))
                groups[key] = group
            elif not group.rollouts:
                group.since = now
            group.rollouts.append(Unsealed.of(rollout))
            if len(group.rollouts) >= self.rules.full:
                sealed.append((key, group.rollouts))
                group.rollouts = []
        for key, group in groups.items():
            if self.rules.due(group) <= now:
                sealed.append((key, group.rollouts))
                group.rollouts = []
        count = self.count + len(rollouts) - sum(len(group) for _, group in sealed)
        if self.rules.capacity is not None and count > self.rules.capacity:
            sealed += self._oldest(groups, count - self.rules.capacity)
        return Plan(sealed, groups, {rollout.rollout_uid: rollout for rollout in rollouts})

    def _oldest(self, groups: dict[GroupKey, WaitingGroup], excess: int) -> list[tuple[GroupKey, list[Unsealed]]]:
        """Take the oldest groups, those with enough rollouts first, until so many rollouts are out."""
        everyone = [(key, group) for key, group in (self.groups | groups).items() if group.rollouts]
        everyone.sort(key=lambda item: (len(item[1].rollouts) < self.rules.enough, *_age(item)))
        sealed = []
        for key, group in everyone:
            if excess <= 0:
                break
            excess -= len(group.rollouts)
            sealed.append((key, group.rollouts))
            groups[key] = WaitingGroup(group.since)
        return sealed

    def all(self) -> Plan:
        """A plan that seals everything."""
        return self._seal(self.groups)

    def ahead(self, versions: Versions) -> Plan:
        """A plan that seals what is of versions newer than the one that is said to be the latest."""
        return self._seal({key: group for key, group in self.groups.items() if versions.is_ahead(key.policy_version)})

    def due(self, now: float) -> Plan:
        """A plan that seals what has waited long enough."""
        return self._seal({key: group for key, group in self.groups.items() if self.rules.due(group) <= now})

    def _seal(self, groups: dict[GroupKey, WaitingGroup]) -> Plan:
        # In an order that a restart does not change.
        sealed = [(key, group.rollouts) for key, group in sorted(groups.items(), key=_age)]
        return Plan(sealed, {key: WaitingGroup(group.since) for key, group in groups.items()})

    def next_due(self, keys: Iterable[GroupKey] | None = None) -> float:
        """When the first group, or the first of some, is to be sealed; infinity if none is."""
        groups = self.groups.values() if keys is None else (self.groups[key] for key in keys if key in self.groups)
        return min(map(self.rules.due, groups), default=math.inf)

    # ------------------------------------------------------------------ rollouts

    def load(
        self, groups: Sequence[Sequence[Unsealed]], new: Mapping[str, RolloutRecord] | None = None
    ) -> list[list[RolloutRecord]]:
        """The rollouts of some groups: new ones, those that are in memory, and others from the log.

        Raises:
            DataError: The log is damaged.
            StorageError: It cannot be read.
        """
        there = new or {}
        found: dict[str, RolloutRecord] = {}
        begins = set()
        for one in chain.from_iterable(groups):
            rollout = there.get(one.rollout_uid) or self._kept.get(one.rollout_uid)
            if rollout is None:
                begins.add(one.begin)
            else:
                found[one.rollout_uid] = rollout
        wanted = {one.rollout_uid for one in chain.from_iterable(groups)} if begins else set()
        for begin in sorted(begins):
            rollouts = _decode(self._log.read(begin), self._declared)[1]
            found.update((one.rollout_uid, one) for one in rollouts if one.rollout_uid in wanted)
        return [[found[one.rollout_uid] for one in group] for group in groups]

    def rollout(self, uid: str) -> RolloutRecord:
        """One of those that wait; errors as of ``load``."""
        return self.load([[self.by_uid[uid]]])[0][0]

    # ------------------------------------------------------------------ changes

    def log(self, plan: Plan, *, sync: bool) -> int:
        """Write what will wait to the log; the log's size before, for ``undo`` and ``apply``.

        Raises:
            StorageError: It cannot be written; the log is as it was.
        """
        before = self._log.size
        if logged := plan.logged:
            times = [plan.groups[rollout.key].since for rollout in logged]
            self._log.append(_encode(times, logged, self._declared), sync=sync)
        return before

    def undo(self, size: int) -> None:
        """Take back what ``log`` wrote."""
        self._log.cut(size)

    def apply(self, plan: Plan, begin: int) -> None:
        """Let the plan's groups be what waits; what it sealed is on the disk.

        Args:
            plan: It.
            begin: Where its record begins in the log.
        """
        for key, group in plan.groups.items():
            self.groups.pop(key, None)
            if group.rollouts:
                self.groups[key] = group
                for one in group.rollouts:
                    if one.begin < 0:
                        one.begin = begin
                        self.by_uid[one.rollout_uid] = one
                        self._logged += 1
        for _, sealed in plan.sealed:
            for one in sealed:
                self.by_uid.pop(one.rollout_uid, None)

    def tidy(self) -> None:
        """Make the log smaller where that is due.

        Raises:
            StorageError: It cannot be written; the log is as it was.
        """
        if not self.count:
            if self._log.size:
                self._log.cut(0)
                self._logged = 0
        elif self._log.size > _REWRITE_BYTES and 2 * self.count < self._logged:
            pairs = [(group.since, one) for group in self.groups.values() for one in group.rollouts]
            chunks = [pairs[first : first + _TOGETHER] for first in range(0, len(pairs), _TOGETHER)]
            begins = self._log.rewrite(map(self._record_of, chunks))
            for begin, chunk in zip(begins, chunks, strict=True):
                for _, one in chunk:
                    one.begin = begin
            self._logged = self.count

    def _record_of(self, pairs: Sequence[tuple[float, Unsealed]]) -> bytes:
        (rollouts,) = self.load([[one for _, one in pairs]])
        return _encode([since for since, _ in pairs], rollouts, self._declared)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _age(item: tuple[GroupKey, WaitingGroup]) -> tuple[float, GroupKey]:
    """By which older groups come first, those of one call by their names."""
    return item[1].since, item[0]


def _encode(times: Sequence[float], rollouts: Sequence[RolloutRecord], declared: Columns) -> bytes:
    # Columns are only ever added: how many there were says which.
    since = np.asarray(times, "<f8")
    head = len(since).to_bytes(4, "little") + len(declared).to_bytes(4, "little")
    return head + since.tobytes() + bytes(rollouts_to_table(rollouts, declared).serialize())


def _decode(record: bytes, declared: Columns) -> tuple[list[float], list[RolloutRecord]]:
    begin = 8 + 8 * int.from_bytes(record[:4], "little")
    known = declared.first(int.from_bytes(record[4:8], "little"))
    rows = pa.ipc.read_record_batch(pa.py_buffer(record[begin:]), rollouts_with(known))
    times = np.frombuffer(record[8:begin], "<f8").tolist()
    return times, table_to_rollouts(rows, declared=declared)
