"""What a rollout buffer has on disk and in memory, and how that changes; one thread at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, MissingRowError, StorageError
from mouse_core.groups._files.batches import BatchFiles
from mouse_core.groups._files.index import encode_parts, encode_ready, open_index
from mouse_core.groups._files.parts import Part, read_groups
from mouse_core.groups._files.waiting import Plan, Rules, Waiting
from mouse_core.groups._files.writing import write_groups
from mouse_core.groups.examples.batches import examples_digest
from mouse_core.groups.making.feeding import Making
from mouse_core.groups.stored.arriving import LateStore
from mouse_core.groups.stored.chunks import Chunk, checked_chunk
from mouse_core.groups.stored.late import LateColumns
from mouse_core.groups.stored.readiness import Readiness
from mouse_core.groups.stored.reading import StoredGroup
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.records import RolloutRecord
from mouse_core.groups.types.versions import staleness


class Folder:
    """Sealed groups, rollouts that wait for theirs, and batches.

    Args:
        root: The folder, which is this process's.
        rules: When a group is sealed.
        making: What makes batches, if anything does.
        declared: Columns that the rollouts may have beside those of all.
        compression: Of the pages.
        sync: Whether to wait for the disk.
        digest: Whether a digest of the batches runs along.

    Attributes:
        parts: The files of the sealed groups, in order.
        uids: Of all rollouts, with the places of their groups in ``parts``, -1 for those that are not sealed.
        versions: Of the policies that all rollouts are of.
        waiting: The rollouts whose groups are not sealed.
        readiness: The sealed groups that wait for late columns.
        batches: Those that were stored.

    Raises:
        DataError: A damaged file.
        StorageError: The folder cannot be read or written.
    """

    def __init__(
        self,
        root: Path,
        rules: Rules,
        making: Making | None,
        declared: Columns,
        *,
        compression: str,
        sync: bool,
        digest: bool,
    ) -> None:
        self._root, self._making, self._declared = root, making, declared
        self._compression, self._sync = compression, sync
        index, self._index_log = open_index(root)
        self.parts = index.parts
        self.batches = BatchFiles(
            root,
            index.batches,
            self._index_log,
            compression=compression,
            sync=sync,
            digest=examples_digest if digest else None,
        )
        self.uids = {uid: place for place, part in enumerate(self.parts) for uid in part.uids}
        self._number = max((part.number for part in self.parts), default=-1) + 1
        self.waiting = Waiting(root, rules, self.uids, declared)
        self.uids.update(dict.fromkeys(self.waiting.by_uid, -1))
        self.versions = {part.key.policy_version for part in self.parts}
        self.versions.update(key.policy_version for key in self.waiting.groups)
        self.waiting.tidy()
        self._store = LateStore(root, declared, compression=compression, sync=sync)
        self._late = LateColumns(root, self._store.places)
        self.readiness = Readiness(self._store.places)
        self._unnoted: list[Part] = []
        ready = self._all_ready(index.ready)
        if making is not None:
            making.resume(self._groups(ready), self.batches.stored)

    def _all_ready(self, noted: Sequence[str]) -> list[Part]:
        """The groups that wait for nothing, in the order in which they became ready, as far as that was noted."""
        ready = {part.place: part for number, part in enumerate(self.parts) if self.readiness.add(number, part)}
        never_waited = [place for place, part in ready.items() if not self.readiness.awaits(part)]
        noted_before = dict.fromkeys([*never_waited, *noted])
        known = [place for place in noted_before if place in ready]
        others = [place for place in ready if place not in noted_before]
        self._note_ready([ready[place] for place in others])
        return [ready[place] for place in (*known, *others)]

    def _groups(self, parts: Sequence[Part]) -> list[StoredGroup]:
        return [StoredGroup.of(self._root, part, self._late) for part in parts]

    def add(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[list[int], Plan | None]:
        """Add what several callers gave, with one wait for the disk.

        Returns:
            How many of each were new, and what was done for them, if anything was.

        Raises:
            StorageError: They cannot be written; nothing was added.
        """
        new: dict[str, RolloutRecord] = {}
        counts = []
        for given in requests:
            before = len(new)
            for rollout in given:
                if rollout.rollout_uid not in self.uids:
                    new.setdefault(rollout.rollout_uid, rollout)
            counts.append(len(new) - before)
        if not new:
            return counts, None
        plan = self.waiting.plan(list(new.values()), time.time())
        self.carry_out(plan)
        return counts, plan

    def carry_out(self, plan: Plan) -> None:
        """Write what a plan says, then let it be so; after an error everything is as it was."""
        if not plan.sealed and not plan.logged:
            return
        size = self.waiting.log(plan, sync=self._sync)
        parts = []
        if plan.sealed:
            try:
                parts = write_groups(
                    self._root,
                    plan.sealed,
                    number=self._number,
                    compression=self._compression,
                    sync=self._sync,
                    declared=self._declared,
                )
            except BaseException:
                self.waiting.undo(size)
                raise
        self.waiting.apply(plan)
        self.uids.update((rollout.rollout_uid, -1) for rollout in plan.logged)
        first = len(self.parts)
        self.uids.update((uid, place) for place, part in enumerate(parts, first) for uid in part.uids)
        self.versions.update(rollout.policy_version for rollout in plan.logged)
        self.versions.update(part.key.policy_version for part in parts)
        self.parts.extend(parts)
        self._number += len(parts)
        if parts:
            # The files say the same, and a log can be made smaller another time.
            with contextlib.suppress(StorageError):
                self._index_log.append(encode_parts(parts), sync=False)
            if self._declared.late:
                self._are_ready([part for place, part in enumerate(parts, first) if self.readiness.add(place, part)])
            elif self._making is not None:
                self._making.feed(rollout for group in plan.sealed for rollout in group)
            with contextlib.suppress(StorageError):
                self.waiting.tidy()

    # ------------------------------------------------------------------ late columns

    def add_columns(self, requests: Sequence[tuple[str, Any]]) -> list[int]:
        """Add what several callers gave, each values of a column by uid; how many of each were new.

        Raises:
            DataError: A column that is not a late one, a rollout that is not there, or a value that is not one of the
                column or not the one that the rollout has. Nothing was added.
            StorageError: They cannot be written; nothing was added, or, where there are several, some.
        """
        counts = [0] * len(requests)
        chunks = {place: self._chunk(name, given) for place, (name, given) in enumerate(requests) if len(given)}
        for place, count in zip(chunks, self._store.add(list(chunks.values()), self._arrived), strict=True):
            counts[place] = count
        return counts

    def _chunk(self, name: str, given: Any) -> Chunk:
        """Values by uid as they are stored; rewards that came with their rollouts are left out."""
        column = self._declared.get(name) if isinstance(name, str) else None
        if column is None or not column.late:
            known = [one.name for one in self._declared.late]
            raise DataError(f"add_column: expected the name of a late column, one of {known}, found {name!r:.80}")
        if not isinstance(given, Mapping):
            raise DataError(f"add_column {name!r}: expected a dict of values by uid, found {given!r:.100}")
        if not given.keys() <= self.uids.keys():
            unknown = next(uid for uid in given if uid not in self.uids)
            raise DataError(f"add_column {name!r}: expected uids of rollouts that are there, found {unknown!r:.100}")
        counts = None if column.per == "example" else [self._count(uid, column.per) for uid in given]
        chunk = checked_chunk(column, given, counts)
        return self._without_own(chunk) if name == "reward" else chunk

    def _without_own(self, rewards: Chunk) -> Chunk:
        """Rewards of rollouts that came without; DataError: one that came with another one."""
        places = self._places(rewards.uids).tolist()
        some = {place for place in set(places) if place < 0 or any(r is not None for r in self.parts[place].rewards)}
        if not some:
            return rewards
        own = [self._reward(uid) if place in some else None for uid, place in zip(rewards.uids, places, strict=True)]
        dtype = np.dtype(rewards.column.dtype)
        for row, reward in enumerate(own):
            if reward is not None and dtype.type(reward) != (late := rewards.values[row].as_py()):
                where = f"add_column 'reward', rollout {rewards.uids[row]!r}"
                raise DataError(f"{where}: expected the one that it came with, {reward}, found {late}")
        return rewards.take([row for row, reward in enumerate(own) if reward is None])

    def _places(self, uids: Sequence[str]) -> npt.NDArray[np.int64]:
        """The places of the groups that rollouts are in."""
        return np.fromiter(map(self.uids.__getitem__, uids), np.int64, len(uids))

    def _count(self, uid: str, per: str) -> int:
        """How many tokens or turns a rollout has."""
        place = self.uids[uid]
        if place < 0:
            turns = self.waiting.by_uid[uid].turns
            return len(turns) if per == "turn" else sum(len(turn.tokens) for turn in turns)
        part = self.parts[place]
        return (part.turns if per == "turn" else part.tokens)[part.uids.index(uid)]

    def _reward(self, uid: str) -> float | None:
        """The reward that a rollout came with."""
        place = self.uids[uid]
        if place < 0:
            return self.waiting.by_uid[uid].reward
        part = self.parts[place]
        return part.rewards[part.uids.index(uid)]

    def _arrived(self, chunk: Chunk) -> None:
        """Count in values that are on the disk."""
        ready = self.readiness.arrived(chunk.column.name, self._places(chunk.uids))
        self._are_ready([self.parts[place] for place in ready])

    def _are_ready(self, parts: Sequence[Part]) -> None:
        """Let the batch maker have groups that wait for nothing more."""
        with contextlib.suppress(StorageError):
            self._note_ready(parts)
        if self._making is not None:
            self._making.feed_later(self._groups(parts))

    def _note_ready(self, parts: Sequence[Part] = ()) -> None:
        """Note that groups are ready, in this order; what cannot be noted is with the next ones."""
        self._unnoted.extend(parts)
        if self._unnoted:
            self._index_log.append(encode_ready(self._unnoted), sync=False)
            self._unnoted.clear()

    def making(self, caller: str) -> Making:
        """The batch maker; ConfigError: there is none."""
        if self._making is None:
            raise ConfigError(f"{caller}: expected a buffer with a batch_maker, found none")
        return self._making

    def batch(self, size: int) -> str | None:
        """Let the batch maker make a batch, and store it; its id, or None while there are too few rollouts."""
        making = self.making("create_and_store_batch")
        made = making.batch(size, self.uids)
        if made is None:
            return None
        # A batch is of groups in the order in which they became ready, so that must be known before.
        self._note_ready()
        behind = staleness([example.policy_version for example in made.examples], self.versions)
        batch_id = self.batches.store(made.examples, made.metadata, made.uids, behind)
        making.stored(made)
        return batch_id

    def rollout(self, uid: str) -> RolloutRecord:
        """A rollout, with the late columns that it has.

        Raises:
            MissingRowError: There is no such rollout.
            DataError, StorageError: The file of its group is damaged, or cannot be read.
        """
        if uid not in self.uids:
            raise MissingRowError(f"rollout: expected the uid of one of {len(self.uids)}, found {uid!r:.100}")
        place = self.uids[uid]
        if place < 0:
            return self._late.fill([self.waiting.by_uid[uid]])[0]
        part = self.parts[place]
        return self._late.fill([read_groups([part], self._root)[0][part.uids.index(uid)]])[0]

    def counts(self) -> tuple[int, int]:
        """How many rollouts the batch maker has not been given yet, and how many of these wait for late columns."""
        queued = 0 if self._making is None else self._making.num_later
        return self.waiting.count + self.readiness.num_rollouts + queued, self.readiness.num_rollouts

    def close(self) -> None:
        """Close the logs; what waits is in them."""
        self._store.close()
        self.waiting.close()
        self._index_log.close()
