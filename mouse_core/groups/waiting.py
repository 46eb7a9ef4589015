"""Sealed groups on their way into files."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mouse_core._base.threads import THREADS, in_order
from mouse_core.errors import ConfigError
from mouse_core.files.log import Log
from mouse_core.files.writing import (
    beside,
    publish,
    remove,
    remove_leftovers,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.groups.arrow import rollouts_to_table, rollouts_with, table_to_rollouts, without_empty
from mouse_core.groups.columns import NO_COLUMNS, Columns
from mouse_core.groups.files import (
    DECLARED,
    PLACES,
    ROWS,
    STATE,
    GroupFile,
    digest_of,
    encode_table,
    folder_name,
    parts_of,
    refuse_missing,
    writing_options,
)
from mouse_core.groups.records import GroupKey, RolloutRecord, nbytes_of
from mouse_core.groups.versions import Versions
from mouse_core.spec import check_count


class RolloutCache:
    """Rollouts by uid, those that came last, as many as there is room for; a file has each of them.

    Args:
        room: About how many bytes they may take.

    Attributes:
        nbytes: How many they take.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._rollouts: OrderedDict[str, tuple[RolloutRecord, int]] = OrderedDict()
        self.nbytes = 0

    def __reduce__(self) -> Any:
        return RolloutCache, (self._room,)

    def __len__(self) -> int:
        return len(self._rollouts)

    def put(self, rollouts: Iterable[RolloutRecord]) -> None:
        """Keep some; those that came first leave for them."""
        for rollout in rollouts:
            nbytes = nbytes_of(rollout)
            self.drop([rollout.rollout_uid])
            self._rollouts[rollout.rollout_uid] = rollout, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._room:
                self.nbytes -= self._rollouts.popitem(last=False)[1][1]

    def get(self, uid: str) -> RolloutRecord | None:
        """A rollout, if it is here."""
        found = self._rollouts.get(uid)
        return None if found is None else found[0]

    def drop(self, uids: Iterable[str]) -> None:
        """Let go of some."""
        for uid in uids:
            found = self._rollouts.pop(uid, None)
            if found is not None:
                self.nbytes -= found[1]


# A log larger than this is written anew once most of it is about rollouts that have left.
_REWRITE_BYTES = 64 * 2**20
# It is written so many rollouts at a time, as they need not all be in memory.
_TOGETHER_WAITING = 256


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

        self._log = Log(root / STATE / "waiting.log", found)

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
            chunks = [pairs[first : first + _TOGETHER_WAITING] for first in range(0, len(pairs), _TOGETHER_WAITING)]
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


# The most groups that share a file, and the most tokens of those that do: of a small file most of the time goes into
# what every file takes, and of a large one all is read where one group is wanted.
_SHARING = 16
_TOKENS = 2**17
# Files whose columns are made together, and that are synced together: enough to spread what that costs, few enough for
# the disk to be at work while the next ones are encoded.
_TOGETHER = 8

_Numbered = tuple[int, Sequence[Unsealed]]


class _File(NamedTuple):
    """Groups of one environment on their way into a file."""

    numbers: list[int]
    groups: list[list[RolloutRecord]]
    rows: pa.Table


class _Written(NamedTuple):
    """Groups that are in a file, and where this belongs."""

    parts: list[GroupFile]
    path: str


def write_groups(
    root: Path,
    groups: Sequence[tuple[GroupKey, Sequence[Unsealed]]],
    load: Callable[[Sequence[Sequence[Unsealed]]], list[list[RolloutRecord]]],
    *,
    number: int,
    compression: str,
    sync: bool,
    declared: Columns = NO_COLUMNS,
) -> list[GroupFile]:
    """Write groups to files, those of an environment together, all of them or none; in the order they were given.

    Args:
        root: The buffer's folder.
        groups: Which ones, and their rollouts.
        load: Gives the rollouts of some groups, which are in memory while they are written.
        number: Of the first group.
        compression: Of the pages.
        sync: Whether to wait until all is on the disk.
        declared: Columns that the rollouts may have beside those of all.

    Raises:
        StorageError: They cannot be written; no file is left. What ``load`` raises.
    """
    environments = dict.fromkeys(key.environment for key, _ in groups)
    folders = {environment: str(root / folder_name(environment)) for environment in environments}
    options = writing_options(rollouts_with(declared), compression, declared)
    write = partial(_write, folders=folders, options=options, declared=len(declared))
    written: list[_Written] = []
    with storing(f"groups in {root}"):
        try:
            made = [folder for folder in folders.values() if not os.path.isdir(folder)]
            for folder in made:
                os.makedirs(folder, exist_ok=True)
            shared = _shared(groups, number)
            _write_all(write, _files(shared, load, declared), len(shared), written, sync=sync)
            # From here on the rollouts are stored: readers see the files, and a restart finds them.
            publish(file.path for file in written)
            if sync:
                sync_folders([*([root] if made else []), *folders.values()])
        except BaseException:
            for file in written:
                remove(file.path)
            for folder in folders.values():
                remove_leftovers(folder, only_writer=True)
            raise
    return sorted(chain.from_iterable(file.parts for file in written), key=attrgetter("number"))


def _shared(groups: Sequence[tuple[GroupKey, Sequence[Unsealed]]], number: int) -> list[list[_Numbered]]:
    """Which groups share a file, with their numbers, of which the first one is given."""
    files: list[list[_Numbered]] = []
    last: dict[str, tuple[list[_Numbered], int]] = {}
    for place, (key, group) in enumerate(groups, number):
        file, held = last.get(key.environment, ([], 0))
        tokens = sum([one.tokens for one in group])
        if not file or len(file) == _SHARING or held + tokens > _TOKENS:
            file, held = [], 0
            files.append(file)
        file.append((place, group))
        last[key.environment] = file, held + tokens
    return files


def _files(
    shared: Sequence[list[_Numbered]],
    load: Callable[[Sequence[Sequence[Unsealed]]], list[list[RolloutRecord]]],
    declared: Columns,
) -> Iterator[_File]:
    """The files with the rollouts and columns of their groups, one after the other."""
    for together in (shared[at : at + _TOGETHER] for at in range(0, len(shared), _TOGETHER)):
        loaded = load([group for file in together for _, group in file])
        cuts = list(accumulate(map(len, together), initial=0))
        ends = list(accumulate(map(len, loaded), initial=0))
        rows = rollouts_to_table(list(chain.from_iterable(loaded)), declared)
        for file, (begin, end) in zip(together, pairwise(cuts), strict=True):
            table = without_empty(rows.slice(ends[begin], ends[end] - ends[begin]), declared)
            yield _File([place for place, _ in file], loaded[begin:end], table)


def _write_all(
    write: Callable[[_File], _Written], files: Iterator[_File], count: int, written: list[_Written], *, sync: bool
) -> None:
    """Write files beside where they belong, in threads; what has been written reaches the disk meanwhile."""
    if count == 1:
        written += map(write, files)
        if sync:
            sync_files([beside(file.path) for file in written])
        return
    syncing: list[Future[None]] = []

    def sync_from(place: int) -> int:
        if sync and place < len(written):
            syncing.append(disk.submit(sync_files, [beside(file.path) for file in written[place:]]))
        return len(written)

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
        synced = 0
        for file in in_order(pool, write, files):
            written.append(file)
            if len(written) - synced >= _TOGETHER:
                synced = sync_from(synced)
        sync_from(synced)
    for future in syncing:
        future.result()


def _write(file: _File, *, folders: Mapping[str, str], options: Mapping[str, Any], declared: int) -> _Written:
    """Write a file beside where it belongs."""
    sizes = map(len, file.groups)
    noted = {PLACES: " ".join(map(str, file.numbers)).encode(), ROWS: " ".join(map(str, sizes)).encode()}
    if declared:
        noted[DECLARED] = str(declared).encode()
    content = encode_table(file.rows, options, noted)
    parts = parts_of(file.groups, name=f"part-{digest_of(content)}.parquet", numbers=file.numbers, declared=declared)
    path = os.path.join(folders[parts[0].key.environment], parts[0].name)
    write_partial(path, content)
    return _Written(parts, path)
