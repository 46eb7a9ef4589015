"""The folder of a rollout buffer: its files and logs, what is known of them in memory, and how both change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError, DataError, MissingRowError, StorageError
from mouse_core.groups.batch_maker import Making
from mouse_core.groups.columns import Columns
from mouse_core.groups.examples import examples_digest
from mouse_core.groups.files import GroupFile, read_groups
from mouse_core.groups.index import BatchStore, ToldVersion, encode, encode_parts, open_index
from mouse_core.groups.late import Chunk, LateStore, Readiness, checked_chunk
from mouse_core.groups.records import RolloutRecord, refuse_other
from mouse_core.groups.stored import StoredGroup
from mouse_core.groups.versions import Versions
from mouse_core.groups.waiting import RolloutCache, SealingPlan, SealingRules, Waiting

# Files that are read in one go.
_TOGETHER = 32


class Folder:
    """Sealed groups, rollouts that wait for theirs, late columns and batches; one thread at a time.

    Args:
        root: The folder, which this process owns.
        rules: When a group is sealed.
        making: The batch maker, if there is one.
        declared: The declared columns.
        compression: The codec of pages.
        sync: Whether to wait for the disk.
        digest: Whether a digest of the batches runs along.
        memory_bytes: About how much memory rollouts may take that are in files.

    Attributes:
        parts: The sealed groups, in order.
        uids: The uids of all rollouts, with the places of their groups in ``parts``; -1: not sealed.
        versions: The policy versions of rollouts, and the told ones.
        lost: Uids of the groups of versions that a trainer went back behind.
        given_up: Uids of rollouts that were given up.
        duplicates: How many rollouts came again since the folder was opened.
        refused: How many rollouts came since in calls that were refused.
        waiting: The rollouts whose groups are not sealed.
        readiness: The sealed groups that wait for late columns.
        batches: The stored batches.

    Raises:
        DataError: A damaged file.
        StorageError: The folder cannot be read or written.
    """

    def __init__(
        self,
        root: Path,
        rules: SealingRules,
        making: Making | None,
        declared: Columns,
        *,
        compression: str,
        sync: bool,
        digest: bool,
        memory_bytes: int,
    ) -> None:
        self._root, self._making, self._declared, self._sync = root, making, declared, sync
        index, self._index_log = open_index(root)
        self.parts = index.parts
        self.batches = BatchStore(
            root,
            index.batches,
            index.told,
            self._index_log,
            compression=compression,
            sync=sync,
            digest_of=examples_digest if digest else None,
        )
        self.uids = {uid: place for place, part in enumerate(self.parts) for uid in part.uids}
        self._number = max((part.number for part in self.parts), default=-1) + 1
        self._cache = RolloutCache(memory_bytes)
        self.waiting = Waiting(root, rules, self._cache, self.uids, declared, compression=compression, sync=sync)
        self.uids.update(dict.fromkeys(self.waiting.by_uid, -1))
        self.lost: set[str] = set()
        self.versions = Versions()
        for told in index.told:
            if self.versions.tell(told.version) or told is index.told[0]:
                self._lose(told)
        keys = [*(part.key for part in self.parts if part.place not in self.lost), *self.waiting.groups]
        for version in {key.policy_version for key in keys}:
            self.versions.note(version)
        self.given_up = index.given_up
        self.duplicates = self.refused = 0
        self.waiting.tidy()
        self._store = LateStore(root, declared, compression=compression, sync=sync)
        self._late = self._store.columns
        self.readiness = Readiness(self._late, self.given_up)
        self._unnoted: list[GroupFile] = []
        self._ready = self._all_ready(index.ready)
        if making is not None:
            for told in index.told if making.takes_groups else index.told[-1:]:
                making.ask("set_policy_version", told.version)
            self._resume(making)

    def _all_ready(self, noted: Sequence[str]) -> list[GroupFile]:
        """Return the groups that wait for nothing, in the order in which they became ready, as far as that is known."""
        ready = {part.place: part for number, part in enumerate(self.parts) if self.readiness.add(number, part)}
        never_waited = [place for place, part in ready.items() if not self.readiness.awaits(part)]
        noted_before = dict.fromkeys([*never_waited, *noted])
        known = [place for place in noted_before if place in ready]
        others = [place for place in ready if place not in noted_before]
        self._note_ready([ready[place] for place in others])
        return [ready[place] for place in (*known, *others)]

    def _lose(self, told: ToldVersion) -> None:
        """Note that the groups of later versions that were sealed by then are of a policy that is not trained."""
        before = [part for part in self.parts if part.number < told.sealed]
        ahead = {part.key.policy_version: self.versions.is_ahead(part.key.policy_version) for part in before}
        self.lost.update(part.place for part in before if ahead[part.key.policy_version])

    def _groups(self, parts: Sequence[GroupFile]) -> list[StoredGroup]:
        """Return the groups that the batch maker is given: none of a version that is lost."""
        there = [part for part in parts if part.place not in self.lost]
        return [StoredGroup.of(self._root, part, self._late, self.given_up, self._cache) for part in there]

    def _resume(self, making: Making) -> None:
        """Let the batch maker be as if the folder had just been opened."""
        making.resume(self._groups(self._ready), self.batches.stored)

    # ------------------------------------------------------------------ adding

    def add(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[list[int], SealingPlan | None]:
        """Add the rollouts of several callers, with one wait for the disk.

        A rollout that is there is compared with its content, unless the file that has it is gone.

        Returns:
            How many of each were new, and what was done for them, if anything was.

        Raises:
            DataError: A rollout is there with other content, or a file is damaged; nothing was added.
            StorageError: Rollouts cannot be written, or one that is there cannot be read; nothing was added.
        """
        new: dict[str, RolloutRecord] = {}
        again: dict[int, dict[str, list[RolloutRecord]]] = {}
        counts = []
        for given in requests:
            before = len(new)
            for rollout in given:
                place = self.uids.get(rollout.rollout_uid)
                if place is not None:
                    again.setdefault(place, {}).setdefault(rollout.rollout_uid, []).append(rollout)
                else:
                    refuse_other(rollout, new.setdefault(rollout.rollout_uid, rollout), "add_rollouts")
            counts.append(len(new) - before)
        for there in self._there(again):
            for rollout in again.get(self.uids[there.rollout_uid], {}).pop(there.rollout_uid, ()):
                refuse_other(rollout, there, "add_rollouts")
        plan = self.waiting.plan(list(new.values()), time.time()) if new else None
        if plan is not None:
            self.carry_out(plan)
        self.duplicates += sum(map(len, requests)) - sum(counts)
        return counts, plan

    def _there(self, again: Mapping[int, Iterable[str]]) -> Iterator[RolloutRecord]:
        """Yield the rollouts of groups, by their places, and of those that wait some by uid, as they came."""
        if waiting := again.get(-1):
            yield from self.waiting.load([[self.waiting.by_uid[uid] for uid in waiting]])[0]
        parts = [self.parts[place] for place in again if place >= 0]
        sealed = [part for part in parts if part.path(self._root).exists()]
        for first in range(0, len(sealed), _TOGETHER):
            for rollouts in read_groups(sealed[first : first + _TOGETHER], self._root):
                yield from rollouts

    def carry_out(self, plan: SealingPlan) -> None:
        """Do what a plan says; errors as those of ``Waiting.carry_out``, after which everything is as it was."""
        if not plan.sealed and not plan.new:
            return
        parts = self.waiting.carry_out(plan, self._number)
        self._cache.put(plan.logged if self._making is None else plan.new.values())
        self.uids.update(dict.fromkeys(plan.new, -1))
        first = len(self.parts)
        self.uids.update((uid, place) for place, part in enumerate(parts, first) for uid in part.uids)
        for version in {rollout.policy_version for rollout in plan.new.values()}:
            self.versions.note(version)
        self.parts.extend(parts)
        self._number += len(parts)
        if parts:
            self._sealed(parts, first)

    def _sealed(self, parts: Sequence[GroupFile], first: int) -> None:
        """Go on with groups that are in files now; ``first`` is the place of the first one."""
        # The files say the same, and a log can be made smaller another time.
        with contextlib.suppress(StorageError):
            self._index_log.append(encode_parts(parts), sync=False)
        ready = [part for place, part in enumerate(parts, first) if self.readiness.add(place, part)]
        if self._declared.late:
            self._are_ready(ready)
        else:
            self._ready += ready
            if self._making is not None:
                self._making.feed(self._groups(ready))
        if self._making is None or not self._making.takes_groups:
            self._cache.drop(uid for part in parts for uid in part.uids)
        with contextlib.suppress(StorageError):
            self.waiting.tidy()

    # ------------------------------------------------------------------ versions, given up

    def set_policy_version(self, version: str) -> None:
        """Note which version is the latest, and tell the batch maker.

        Where it goes back, groups of later versions are lost, those included that were not full, which are sealed: what
        comes of these versions from then on is of another policy. The maker begins anew, as it would after a restart.

        Raises:
            StorageError: It cannot be noted; nothing has changed, but that groups of later versions are sealed.
        """
        if version == self.versions.told:
            return
        self.carry_out(self.waiting.ahead(Versions(told=version)))
        told = ToldVersion(version, self._number, len(self.batches.stored))
        self._index_log.append(encode("told", [version], [told.sealed]), sync=self._sync)
        self.batches.told.append(told)
        goes_back = self.versions.tell(version)
        if goes_back:
            self._lose(told)
        if self._making is not None:
            self._making.ask("set_policy_version", version)
            if goes_back:
                self._making.lose(self.lost)
                if self._making.takes_groups:
                    self._resume(self._making)

    def give_up(self, uids: Sequence[str]) -> int:
        """Give up rollouts, which are not drawn any more; return how many are new.

        Raises:
            MissingRowError: One is not there; nothing has changed.
            StorageError: It cannot be noted; nothing has changed.
        """
        for uid in uids:
            if uid not in self.uids:
                raise MissingRowError(f"give_up: expected the uids of some of {len(self.uids)}, found {uid!r:.100}")
        new = [uid for uid in dict.fromkeys(uids) if uid not in self.given_up]
        if new:
            self._index_log.append(encode("given_up", new), sync=self._sync)
            places = {self.uids[uid] for uid in new}
            were_ready = any(place >= 0 and place not in self.readiness.waiting for place in places)
            self.given_up.update(new)
            self._are_ready([self.parts[place] for place in self.readiness.settle(places)])
            if were_ready and self._making is not None and self._making.takes_groups:
                self._resume(self._making)
        return len(new)

    # ------------------------------------------------------------------ late columns

    def add_columns(self, requests: Sequence[tuple[str, Any]]) -> list[int]:
        """Add the values of several callers, each of a column by uid; return how many of each were new.

        Raises:
            DataError: A column that is not a late one, a rollout that is not there, or a value that is not one of the
                column or not the one that the rollout has. Nothing was added.
            StorageError: They cannot be written; nothing was added, or, where there are several, some.
        """
        counts = [0] * len(requests)
        given = [self._chunk(name, values) for name, values in requests]
        chunks = {place: chunk for place, chunk in enumerate(given) if chunk is not None}
        for place, count in zip(chunks, self._store.add(list(chunks.values()), self._arrived), strict=True):
            counts[place] = count
        return counts

    def _chunk(self, name: str, given: Any) -> Chunk | None:
        """Check values by uid, if there are any; rewards that came with their rollouts are left out."""
        column = self._declared.get(name) if isinstance(name, str) else None
        if column is None or not column.late:
            known = [one.name for one in self._declared.late]
            raise DataError(f"add_column: expected the name of a late column, one of {known}, found {name!r:.80}")
        if not isinstance(given, Mapping):
            raise DataError(f"add_column {name!r}: expected a dict of values by uid, found {given!r:.100}")
        if not given:
            return None
        if not given.keys() <= self.uids.keys():
            unknown = next(uid for uid in given if uid not in self.uids)
            raise DataError(f"add_column {name!r}: expected uids of rollouts that are there, found {unknown!r:.100}")
        if column.per != "example":
            return checked_chunk(column, given, [self._known(uid)[column.per] for uid in given])
        chunk = checked_chunk(column, given, None)
        if name != "reward":
            return chunk
        rows, dtype = [], np.dtype(column.dtype)
        for row, uid in enumerate(chunk.uids):
            own = self._known(uid)["reward"]
            if own is None:
                rows.append(row)
            elif dtype.type(own) != (late := chunk.values[row].as_py()):
                where = f"add_column 'reward', rollout {uid!r}"
                raise DataError(f"{where}: expected the one that it came with, {own}, found {late}")
        return chunk.take(rows)

    def _known(self, uid: str) -> dict[str, Any]:
        """Return the reward that a rollout came with, and how many values it has of a column per "turn" or "token"."""
        place = self.uids[uid]
        if place < 0:
            own = self.waiting.by_uid[uid]
            return {"reward": own.reward, "turn": own.turns, "token": own.tokens}
        part = self.parts[place]
        row = part.uids.index(uid)
        return {"reward": part.rewards[row], "turn": part.turns[row], "token": part.tokens[row]}

    def _arrived(self, chunk: Chunk) -> None:
        """Go on with values that are on the disk."""
        ready = self.readiness.settle(map(self.uids.__getitem__, chunk.uids))
        self._are_ready([self.parts[place] for place in ready])

    def _are_ready(self, parts: Sequence[GroupFile]) -> None:
        """Let the batch maker have groups that wait for nothing more."""
        with contextlib.suppress(StorageError):
            self._note_ready(parts)
        self._ready += parts
        if self._making is not None:
            self._making.feed(self._groups(parts), later=True)

    def _note_ready(self, parts: Sequence[GroupFile] = ()) -> None:
        """Note that groups are ready, in this order; what cannot be noted is with the next ones."""
        self._unnoted.extend(parts)
        if self._unnoted:
            self._index_log.append(encode("ready", [part.place for part in self._unnoted]), sync=False)
            self._unnoted.clear()

    def making(self, caller: str) -> Making:
        """Return the batch maker; ConfigError: there is none."""
        if self._making is None:
            raise ConfigError(f"{caller}: expected a buffer with a batch_maker, found none")
        return self._making

    def batch(self, size: int) -> str | None:
        """Let the batch maker make a batch, and store it; return its id, or None while there are too few rollouts."""
        making = self.making("create_and_store_batch")
        made = making.batch(size, self.uids)
        if made is None:
            return None
        # A batch is of groups in the order in which they became ready, so that must be known before.
        self._note_ready()
        examples, metadata, uids = made
        versions = [example.policy_version for example in examples]
        behind = [self.versions.behind(version) if version else None for version in versions]
        batch_id = self.batches.store(examples, metadata, uids, behind)
        making.stored(uids)
        return batch_id

    def rollout(self, uid: str) -> RolloutRecord:
        """Return a rollout with the late columns that it has.

        Raises:
            MissingRowError: There is no such rollout.
            DataError, StorageError: The file of its group is damaged, or cannot be read.
        """
        if uid not in self.uids:
            raise MissingRowError(f"rollout: expected the uid of one of {len(self.uids)}, found {uid!r:.100}")
        place = self.uids[uid]
        if place < 0:
            return self._late.fill([self.waiting.rollout(uid)])[0]
        part = self.parts[place]
        return self._late.fill([read_groups([part], self._root)[0][part.uids.index(uid)]])[0]

    def counts(self) -> tuple[int, int]:
        """Return how many rollouts the batch maker does not have yet, and how many of these wait for late columns."""
        queued = 0 if self._making is None else self._making.num_later
        return self.waiting.count + self.readiness.num_rollouts + queued, self.readiness.num_rollouts

    def summary(self) -> dict[str, float]:
        """Return numbers for a log; see ``RolloutBuffer.summary``."""
        counts = {
            "stored": len(self.uids),
            "unsealed": self.waiting.count,
            "awaiting_columns": self.readiness.num_rollouts,
            "queued": 0 if self._making is None else self._making.num_later,
            "given_up": len(self.given_up),
        }
        found: dict[str, float] = {} if self._making is None else dict(self._making.ask("summary") or {})
        says = found.keys() >= {"received", "held", "used"}
        used = set() if says and not self.lost else {uid for batch in self.batches.stored for uid in batch.uids}
        lost = [uid for part in self._ready if part.place in self.lost for uid in part.uids]
        used_before = sum(uid in used for uid in lost)
        if says:
            found["used"] += used_before
        else:
            # The maker does not say what became of those that it was given.
            ready = [uid for part in self._ready if part.place not in self.lost for uid in part.uids]
            given_up = sum(uid in self.given_up and uid not in used for uid in ready)
            found |= {"used": used_before + sum(uid in used for uid in ready), "left/given_up": given_up}
            found["held"] = len(ready) + used_before - counts["queued"] - found["used"] - given_up
        left = {"lost_versions": len(lost) - used_before, "duplicate": self.duplicates, "refused": self.refused}
        for name, count in left.items():
            found[f"left/{name}"] = found.get(f"left/{name}", 0) + count
        found["received"] = len(self.uids) + self.duplicates + self.refused
        return {**found, **counts}

    def close(self) -> None:
        """Close the logs."""
        self._store.close()
        self.waiting.close()
        self._index_log.close()
