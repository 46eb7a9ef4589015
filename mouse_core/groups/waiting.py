"""Rollouts whose groups are not sealed yet, in a log that survives crashes, and in memory if there is room.

Sealing a group writes its rollouts to a Parquet file, which groups of one environment share. At any moment a rollout is
in the log or in a file; a restart ignores rollouts in the log that are also in a file::

    add 3 of 4 rollouts   log: 3 rollouts                      no file
    add the fourth        log: 3 rollouts                      file: 4 rollouts, whose uids are known
    nothing waits         log: empty                           file: 4 rollouts
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.threads import THREADS, in_order
from mouse_core.files.log import Log
from mouse_core.files.writing import beside, storing, sync_files, write_partial
from mouse_core.groups import files
from mouse_core.groups.records import NO_COLUMNS, Columns, GroupKey, RolloutRecord, Versions, nbytes_of

# A log with more bytes than the first number is rewritten when most of its rollouts are sealed; the second number is
# the number of rollouts to rewrite at a time, because not all need to be in memory.
_REWRITE_BYTES, _REWRITE_ROLLOUTS = 64 * 2**20, 256
# The largest numbers of groups and of tokens in a file. Small files cost time for each file, and a large file is read
# completely for one group.
_SHARING, _TOKENS = 16, 2**17
# Files that are converted and synced together: enough to share the cost of a call, and few enough that the disk works
# while the next files are encoded.
_TOGETHER = 8


class RolloutCache:
    """A cache of the newest rollouts by uid, up to a number of bytes. All its rollouts are also in a file or a log.

    Args:
        room: The approximate largest size in bytes.

    Attributes:
        nbytes: The approximate size of the rollouts in bytes.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._rollouts: OrderedDict[str, tuple[RolloutRecord, int]] = OrderedDict()
        self.nbytes = 0

    def __reduce__(self) -> Any:
        return RolloutCache, (self._room,)

    def put(self, rollouts: Iterable[RolloutRecord]) -> None:
        """Add rollouts; if the cache is too large, the oldest rollouts are removed."""
        for rollout in rollouts:
            nbytes = nbytes_of(rollout)
            self.drop([rollout.rollout_uid])
            self._rollouts[rollout.rollout_uid] = rollout, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._room:
                self.nbytes -= self._rollouts.popitem(last=False)[1][1]

    def get(self, uid: str) -> RolloutRecord | None:
        """Return a rollout; None if it is not in the cache."""
        return self._rollouts.get(uid, (None, 0))[0]

    def drop(self, uids: Iterable[str]) -> None:
        """Remove rollouts from the cache."""
        for uid in uids:
            self.nbytes -= self._rollouts.pop(uid, (None, 0))[1]


@dataclass(slots=True)
class Unsealed:
    """The properties of a rollout whose group is not sealed yet.

    Args:
        rollout_uid: The uid of the rollout.
        tokens: The number of tokens.
        begin: The offset of the rollout's record in the log; -1 if the log has no record of the rollout.
    """

    rollout_uid: str
    tokens: int
    begin: int = -1


def _unsealed(rollout: RolloutRecord, begin: int = -1) -> Unsealed:
    return Unsealed(rollout.rollout_uid, sum([len(turn.tokens) for turn in rollout.turns]), begin)


@dataclass(slots=True)
class WaitingGroup:
    """The unsealed rollouts of a group, and the time at which the first of these rollouts arrived, in seconds since
    1970.
    """

    since: float
    rollouts: list[Unsealed] = field(default_factory=list)


@dataclass(frozen=True)
class SealingPlan:
    """The changes that new rollouts cause: which groups are sealed, and which rollouts wait.

    Args:
        sealed: The groups to seal.
        groups: The new state of each group that changes; the state has no rollouts if no rollout of the group waits.
        new: The new rollouts by uid.
    """

    sealed: list[tuple[GroupKey, list[Unsealed]]]
    groups: dict[GroupKey, WaitingGroup]
    new: Mapping[str, RolloutRecord] = field(default_factory=dict)

    @property
    def logged(self) -> list[RolloutRecord]:
        """The new rollouts whose groups are not sealed; these rollouts are written to the log."""
        sealed = {one.rollout_uid for _, group in self.sealed for one in group}
        return [rollout for uid, rollout in self.new.items() if uid not in sealed]


class Waiting:
    """The groups that are not sealed yet, and their log.

    Args:
        root: The buffer's folder.
        cache: The cache of rollouts in memory.
        sealed: Uids of sealed rollouts, which may still be in the log.
        declared: The declared columns.
        group_size: Number of rollouts of a full group, which is sealed at once.
        min_group_size: Least number of rollouts with which a group older than ``seal_timeout`` is sealed.
        seal_timeout: Seconds after a group's first rollout until the group is sealed.
        compression: The compression codec of pages.
        sync: Whether to wait until data are on disk.

    Attributes:
        groups: The waiting groups.
        by_uid: The waiting rollouts by uid.

    Raises:
        DataError: The log is damaged.
        StorageError: The log cannot be read.
    """

    def __init__(
        self,
        root: Path,
        cache: RolloutCache,
        sealed: Iterable[str] = (),
        declared: Columns = NO_COLUMNS,
        *,
        group_size: int,
        min_group_size: int,
        seal_timeout: float,
        compression: str,
        sync: bool,
    ) -> None:
        self._root, self._cache, self._declared = root, cache, declared
        self._group_size, self._min_group_size, self._seal_timeout = group_size, min_group_size, seal_timeout
        self._compression, self._sync = compression, sync
        self.groups: dict[GroupKey, WaitingGroup] = {}
        self.by_uid: dict[str, Unsealed] = {}
        self._logged = 0
        gone = set(sealed)

        def restore(begin: int, record: bytes) -> None:
            files.refuse_missing(root, declared, NO_COLUMNS, int.from_bytes(record[4:8], "little"))
            times, rollouts = _decode(record, declared)
            self._logged += len(rollouts)
            for time, rollout in zip(times, rollouts, strict=True):
                if rollout.rollout_uid not in gone:
                    gone.add(rollout.rollout_uid)
                    own = self.by_uid[rollout.rollout_uid] = _unsealed(rollout, begin)
                    self.groups.setdefault(rollout.key, WaitingGroup(time)).rollouts.append(own)
                    cache.put([rollout])

        self._log = Log(root / files.STATE / "waiting.log", restore)

    @property
    def count(self) -> int:
        """The number of waiting rollouts."""
        return len(self.by_uid)

    # ------------------------------------------------------------------ plans

    def plan(self, rollouts: Sequence[RolloutRecord], now: float) -> SealingPlan:
        """Return the plan for new rollouts, without any change."""
        groups: dict[GroupKey, WaitingGroup] = {}
        sealed: list[tuple[GroupKey, list[Unsealed]]] = []
        for rollout in rollouts:
            key = rollout.key
            group = groups.get(key)
            if group is None:
                old = self.groups.get(key)
                group = groups[key] = WaitingGroup(now if old is None else old.since, list(old.rollouts) if old else [])
            elif not group.rollouts:
                group.since = now
            group.rollouts.append(_unsealed(rollout))
            if len(group.rollouts) >= self._group_size:
                sealed.append((key, group.rollouts))
                group.rollouts = []
        for key, group in groups.items():
            if self._due_at(group) <= now:
                sealed.append((key, group.rollouts))
                group.rollouts = []
        return SealingPlan(sealed, groups, {rollout.rollout_uid: rollout for rollout in rollouts})

    def all(self) -> SealingPlan:
        """Return a plan that seals all groups."""
        return _sealing(self.groups)

    def ahead(self, versions: Versions) -> SealingPlan:
        """Return a plan that seals the groups whose policy version is newer than the version that was set last."""
        return _sealing({key: group for key, group in self.groups.items() if versions.is_ahead(key.policy_version)})

    def due(self, now: float) -> SealingPlan:
        """Return a plan that seals the groups that have waited long enough."""
        return _sealing({key: group for key, group in self.groups.items() if self._due_at(group) <= now})

    def _due_at(self, group: WaitingGroup) -> float:
        """Return the time at which a group is sealed if no more rollouts arrive."""
        if len(group.rollouts) >= self._group_size:
            return -math.inf
        return group.since + self._seal_timeout if len(group.rollouts) >= self._min_group_size else math.inf

    def next_due(self, keys: Iterable[GroupKey] | None = None) -> float:
        """Return the earliest time at which a group is sealed; only groups in ``keys`` count, if ``keys`` is given.
        Return infinity if there are no groups.
        """
        groups = self.groups.values() if keys is None else (self.groups[key] for key in keys if key in self.groups)
        return min(map(self._due_at, groups), default=math.inf)

    # ------------------------------------------------------------------ rollouts

    def load(
        self, groups: Sequence[Sequence[Unsealed]], new: Mapping[str, RolloutRecord] | None = None
    ) -> list[list[RolloutRecord]]:
        """Return the rollouts of groups, from ``new``, from memory, or from the log.

        Raises:
            DataError: The log is damaged.
            StorageError: The log cannot be read.
        """
        found: dict[str, RolloutRecord] = {}
        missing: dict[str, int] = {}
        for one in chain.from_iterable(groups):
            rollout = (new or {}).get(one.rollout_uid) or self._cache.get(one.rollout_uid)
            if rollout is None:
                missing[one.rollout_uid] = one.begin
            else:
                found[one.rollout_uid] = rollout
        for begin in sorted(set(missing.values())):
            rollouts = _decode(self._log.read(begin), self._declared)[1]
            found.update((one.rollout_uid, one) for one in rollouts if one.rollout_uid in missing)
        return [[found[one.rollout_uid] for one in group] for group in groups]

    def rollout(self, uid: str) -> RolloutRecord:
        """Return a waiting rollout; raises the errors of ``load``."""
        return self.load([[self.by_uid[uid]]])[0][0]

    # ------------------------------------------------------------------ changes

    def carry_out(self, plan: SealingPlan, number: int) -> list[files.GroupFile]:
        """Write rollouts of groups that are not sealed to the log, and write the sealed groups to files.

        Args:
            plan: The result of ``plan`` or of another method that returns a plan.
            number: How many groups were sealed before.

        Returns:
            The properties of the sealed groups, in the plan's order.

        Raises:
            DataError: The log is damaged.
            StorageError: The log or a file cannot be read or written; nothing has changed.
        """
        begin = self._log.size
        if logged := plan.logged:
            times = [plan.groups[rollout.key].since for rollout in logged]
            self._log.append(_encode(times, logged, self._declared), sync=self._sync)
        try:
            parts = self._write(plan, number) if plan.sealed else []
        except BaseException:
            self._log.cut(begin)
            raise
        for key, group in plan.groups.items():
            self.groups.pop(key, None)
            if group.rollouts:
                self.groups[key] = group
                for one in group.rollouts:
                    if one.begin < 0:
                        one.begin = begin
                        self.by_uid[one.rollout_uid] = one
                        self._logged += 1
        for one in chain.from_iterable(group for _, group in plan.sealed):
            self.by_uid.pop(one.rollout_uid, None)
        return parts

    def tidy(self) -> None:
        """Rewrite or empty the log if most of its rollouts are sealed.

        Raises:
            StorageError: The log cannot be written; it is unchanged.
        """
        if not self.count:
            if self._log.size:
                self._log.cut(0)
                self._logged = 0
        elif self._log.size > _REWRITE_BYTES and 2 * self.count < self._logged:
            pairs = [(group.since, one) for group in self.groups.values() for one in group.rollouts]
            chunks = [pairs[first : first + _REWRITE_ROLLOUTS] for first in range(0, len(pairs), _REWRITE_ROLLOUTS)]
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

    # ------------------------------------------------------------------ files

    def _write(self, plan: SealingPlan, number: int) -> list[files.GroupFile]:
        """Write the sealed groups to files; groups of one environment share files. Either all files are written or
        none.
        """
        folders = [str(self._root / files.folder_name(name)) for name in {key.environment for key, _ in plan.sealed}]
        made = [folder for folder in folders if not os.path.isdir(folder)]
        shared = _shared(plan.sealed, number)
        parts: list[files.GroupFile] = []
        syncing: list[Future[None]] = []
        with storing(f"folder {self._root}"):
            for folder in made:
                os.makedirs(folder, exist_ok=True)
        synced = [*([str(self._root)] if made else []), *folders]
        with files.writing_files(self._root, synced, sync=self._sync) as paths:
            if len(shared) == 1:
                for written, path in map(self._write_file, self._files(shared, plan.new)):
                    parts += written
                    paths.append(path)
                if self._sync:
                    sync_files(list(map(beside, paths)))
                return parts
            # Written files are synced to the disk while the next files are encoded.
            with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as disk:
                for written, path in in_order(pool, self._write_file, self._files(shared, plan.new)):
                    parts += written
                    paths.append(path)
                    waiting = len(paths) - _TOGETHER * len(syncing)
                    if self._sync and (waiting == _TOGETHER or len(paths) == len(shared)):
                        syncing.append(disk.submit(sync_files, list(map(beside, paths[-waiting:]))))
            for future in syncing:
                future.result()
        return sorted(parts, key=attrgetter("number"))

    def _files(
        self, shared: Sequence[list[tuple[int, Sequence[Unsealed]]]], new: Mapping[str, RolloutRecord]
    ) -> Iterator[tuple[list[int], list[list[RolloutRecord]], pa.Table]]:
        """Yield, for each file, the indices of its groups, the groups' rollouts, and the rollouts as Arrow."""
        for together in (shared[at : at + _TOGETHER] for at in range(0, len(shared), _TOGETHER)):
            loaded = self.load([group for file in together for _, group in file], new)
            rows = files.rollouts_to_table(list(chain.from_iterable(loaded)), self._declared)
            ends = list(accumulate(map(len, loaded), initial=0))
            cuts = accumulate(map(len, together), initial=0)
            for file, (begin, end) in zip(together, pairwise(cuts), strict=True):
                table = pa.Table.from_batches([rows.slice(ends[begin], ends[end] - ends[begin])])
                yield [place for place, _ in file], loaded[begin:end], table

    def _write_file(
        self, file: tuple[list[int], list[list[RolloutRecord]], pa.Table]
    ) -> tuple[list[files.GroupFile], str]:
        """Write a temporary file; return the properties of its groups, and the final path."""
        numbers, groups, rows = file
        parts, content = files.encode_groups(
            groups, rows, self._compression, numbers=numbers, declared=len(self._declared)
        )
        path = str(parts[0].path(self._root))
        write_partial(path, content)
        return parts, path


def _shared(
    groups: Sequence[tuple[GroupKey, Sequence[Unsealed]]], number: int
) -> list[list[tuple[int, Sequence[Unsealed]]]]:
    """Return the groups of each file, with their indices, which begin at ``number``."""
    shared: list[list[tuple[int, Sequence[Unsealed]]]] = []
    last: dict[str, tuple[list[tuple[int, Sequence[Unsealed]]], int]] = {}
    for place, (key, group) in enumerate(groups, number):
        file, held = last.get(key.environment, ([], 0))
        tokens = sum([one.tokens for one in group])
        if not file or len(file) == _SHARING or held + tokens > _TOKENS:
            file, held = [], 0
            shared.append(file)
        file.append((place, group))
        last[key.environment] = file, held + tokens
    return shared


def _age(item: tuple[GroupKey, WaitingGroup]) -> tuple[float, GroupKey]:
    """Return the sort key of a group: older groups are first, and groups that arrived in the same call are sorted by
    name.
    """
    return item[1].since, item[0]


def _sealing(groups: dict[GroupKey, WaitingGroup]) -> SealingPlan:
    # The order does not change after a restart.
    sealed = [(key, group.rollouts) for key, group in sorted(groups.items(), key=_age)]
    return SealingPlan(sealed, {key: WaitingGroup(group.since) for key, group in groups.items()})


def _encode(times: Sequence[float], rollouts: Sequence[RolloutRecord], declared: Columns) -> bytes:
    # Columns are never removed, so the number of columns identifies the columns.
    since = np.asarray(times, "<f8")
    head = len(since).to_bytes(4, "little") + len(declared).to_bytes(4, "little")
    return head + since.tobytes() + bytes(files.rollouts_to_table(rollouts, declared).serialize())


def _decode(record: bytes, declared: Columns) -> tuple[list[float], list[RolloutRecord]]:
    begin = 8 + 8 * int.from_bytes(record[:4], "little")
    known = declared.first(int.from_bytes(record[4:8], "little"))
    rows = pa.ipc.read_record_batch(pa.py_buffer(record[begin:]), files.rollouts_with(known))
    times = np.frombuffer(record[8:begin], "<f8").tolist()
    return times, files.table_to_rollouts(rows, declared=declared)
