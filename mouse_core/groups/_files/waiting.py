"""Rollouts whose groups are not sealed yet: in memory, and in a log that a crash does not lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.files.log import Log
from mouse_core.groups._files.arrow.rollouts import rollouts_to_table, rollouts_with, table_to_rollouts
from mouse_core.groups._files.names import STATE
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.records import GroupKey, RolloutRecord
from mouse_core.spec import check_count

# A log larger than this is written anew once most of it is about rollouts that have left.
_REWRITE_BYTES = 64 * 2**20


@dataclass(slots=True)
class WaitingGroup:
    """Rollouts of one group, and when the first of them came, in seconds since 1970."""

    since: float
    rollouts: list[RolloutRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What becomes of some new rollouts.

    Args:
        sealed: Groups that are complete with them.
        groups: What waits afterwards, for the groups that change: their new state, empty if nothing waits.
        logged: The new rollouts that wait.
    """

    sealed: list[list[RolloutRecord]]
    groups: dict[GroupKey, WaitingGroup]
    logged: list[RolloutRecord]


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
        sealed: Uids of rollouts that have been sealed, which the log may still have.
        declared: Columns that the rollouts may have beside those of all.

    Raises:
        DataError: The log is damaged.
        StorageError: It cannot be read.
    """

    def __init__(self, root: Path, rules: Rules, sealed: Iterable[str] = (), declared: Columns = NO_COLUMNS) -> None:
        self.rules, self._declared = rules, declared
        self.groups: dict[GroupKey, WaitingGroup] = {}
        self.count = 0
        self.by_uid: dict[str, RolloutRecord] = {}
        self._log = Log(root / STATE / "waiting.log")
        self._logged = 0
        gone = set(sealed)
        for record in self._log.records:
            times, rollouts = _decode(record, declared)
            self._logged += len(rollouts)
            for time, rollout in zip(times, rollouts, strict=True):
                if rollout.rollout_uid not in gone:
                    gone.add(rollout.rollout_uid)
                    self.by_uid[rollout.rollout_uid] = rollout
                    self.groups.setdefault(rollout.key, WaitingGroup(time)).rollouts.append(rollout)
                    self.count += 1
        self._log.records = []

    def plan(self, rollouts: Sequence[RolloutRecord], now: float) -> Plan:
        """What becomes of new rollouts; changes nothing."""
        groups: dict[GroupKey, WaitingGroup] = {}
        sealed: list[list[RolloutRecord]] = []
        for rollout in rollouts:
            key = rollout.key
            group = groups.get(key)
            if group is None:
                old = self.groups.get(key)
                group = WaitingGroup(now) if old is None else WaitingGroup(old.since, list(old.rollouts))
                groups[key] = group
            elif not group.rollouts:
                group.since = now
            group.rollouts.append(rollout)
            if len(group.rollouts) >= self.rules.full:
                sealed.append(group.rollouts)
                group.rollouts = []
        for group in groups.values():
            if self.rules.due(group) <= now:
                sealed.append(group.rollouts)
                group.rollouts = []
        count = self.count + len(rollouts) - sum(map(len, sealed))
        if self.rules.capacity is not None and count > self.rules.capacity:
            sealed += self._oldest(groups, count - self.rules.capacity)
        left = {id(rollout) for group in groups.values() for rollout in group.rollouts}
        return Plan(sealed, groups, [rollout for rollout in rollouts if id(rollout) in left])

    def _oldest(self, groups: dict[GroupKey, WaitingGroup], excess: int) -> list[list[RolloutRecord]]:
        """Take the oldest groups, those with enough rollouts first, until so many rollouts are out."""
        everyone = [(key, group) for key, group in (self.groups | groups).items() if group.rollouts]
        everyone.sort(key=lambda item: (len(item[1].rollouts) < self.rules.enough, *_age(item)))
        sealed: list[list[RolloutRecord]] = []
        for key, group in everyone:
            if excess <= 0:
                break
            excess -= len(group.rollouts)
            sealed.append(group.rollouts)
            groups[key] = WaitingGroup(group.since)
        return sealed

    def all(self) -> Plan:
        """A plan that seals everything."""
        return self._seal(self.groups)

    def due(self, now: float) -> Plan:
        """A plan that seals what has waited long enough."""
        return self._seal({key: group for key, group in self.groups.items() if self.rules.due(group) <= now})

    def _seal(self, groups: dict[GroupKey, WaitingGroup]) -> Plan:
        # In an order that a restart does not change.
        sealed = [group.rollouts for _, group in sorted(groups.items(), key=_age)]
        return Plan(sealed, {key: WaitingGroup(group.since) for key, group in groups.items()}, [])

    def next_due(self, keys: Iterable[GroupKey] | None = None) -> float:
        """When the first group, or the first of some, is to be sealed; infinity if none is."""
        groups = self.groups.values() if keys is None else (self.groups[key] for key in keys if key in self.groups)
        return min(map(self.rules.due, groups), default=math.inf)

    def log(self, plan: Plan, *, sync: bool) -> int:
        """Write what will wait to the log; the log's size before, for ``undo``.

        Raises:
            StorageError: It cannot be written; the log is as it was.
        """
        before = self._log.size
        if plan.logged:
            times = [plan.groups[rollout.key].since for rollout in plan.logged]
            self._log.append(_encode(times, plan.logged, self._declared), sync=sync)
        return before

    def undo(self, size: int) -> None:
        """Take back what ``log`` wrote."""
        self._log.cut(size)

    def apply(self, plan: Plan) -> None:
        """Let the plan's groups be what waits; what it sealed is on the disk."""
        for key, group in plan.groups.items():
            before = self.groups.pop(key, None)
            self.count += len(group.rollouts) - (len(before.rollouts) if before else 0)
            if group.rollouts:
                self.groups[key] = group
        for sealed in plan.sealed:
            for rollout in sealed:
                self.by_uid.pop(rollout.rollout_uid, None)
        self.by_uid.update((rollout.rollout_uid, rollout) for rollout in plan.logged)
        self._logged += len(plan.logged)

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
            pairs = [(group.since, rollout) for group in self.groups.values() for rollout in group.rollouts]
            times, rollouts = zip(*pairs, strict=True)
            self._log.rewrite([_encode(times, rollouts, self._declared)])
            self._logged = self.count

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
