"""What a rollout buffer has on disk and in memory, and how that changes; one thread at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, MissingRowError, StorageError
from mouse_core.files.log import Log
from mouse_core.files.writing import (
    beside,
    make_folder,
    publish,
    remove,
    remove_leftovers,
    storing,
    sync_files,
    sync_folders,
    write_partial,
)
from mouse_core.groups.batch_maker import Making
from mouse_core.groups.columns import Columns, RolloutColumn
from mouse_core.groups.examples import examples_digest
from mouse_core.groups.files import GroupFile, read_groups
from mouse_core.groups.index import (
    BatchFiles,
    Told,
    encode_given_up,
    encode_parts,
    encode_ready,
    encode_version,
    open_index,
)
from mouse_core.groups.late import (
    Chunk,
    LateColumns,
    LatePlaces,
    Readiness,
    checked_chunk,
    encode_file,
    encode_files,
    encode_record,
    joined,
    late_folder,
    late_log,
    values_of,
)
from mouse_core.groups.records import RolloutRecord, refuse_other, same_values
from mouse_core.groups.stored import StoredGroup
from mouse_core.groups.versions import Versions
from mouse_core.groups.waiting import Plan, RolloutCache, Rules, Waiting, write_groups

# Files that are read in one go.
_TOGETHER = 32


class IncomingRollouts:
    """Looks at rollouts against those that are there, and at values against the rollouts that they are of.

    Args:
        root: The folder.
        declared: The folder's columns.
        uids: Of all rollouts, with the places of their groups in ``parts``, -1 for those that are not sealed.
        parts: The files of the sealed groups.
        waiting: The rollouts that are not sealed.
    """

    def __init__(
        self, root: Path, declared: Columns, uids: Mapping[str, int], parts: Sequence[GroupFile], waiting: Waiting
    ) -> None:
        self._root, self._declared, self._uids, self._parts, self._waiting = root, declared, uids, parts, waiting

    def rollouts(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[dict[str, RolloutRecord], list[int]]:
        """Those that are new, by uid, and how many of each request these are.

        Others are compared with what is there; files of sealed groups are read for that, and one that is gone is not
        compared with.

        Raises:
            DataError: One that is there with other content, or a damaged file.
            StorageError: A file cannot be read.
        """
        new: dict[str, RolloutRecord] = {}
        again: dict[int, dict[str, list[RolloutRecord]]] = {}
        counts = []
        for given in requests:
            before = len(new)
            for rollout in given:
                place = self._uids.get(rollout.rollout_uid)
                if place is not None:
                    again.setdefault(place, {}).setdefault(rollout.rollout_uid, []).append(rollout)
                else:
                    refuse_other(rollout, new.setdefault(rollout.rollout_uid, rollout), "add_rollouts")
            counts.append(len(new) - before)
        for there in self._there(again):
            for rollout in again.get(self._uids[there.rollout_uid], {}).pop(there.rollout_uid, ()):
                refuse_other(rollout, there, "add_rollouts")
        return new, counts

    def _there(self, again: Mapping[int, Mapping[str, Any]]) -> Iterator[RolloutRecord]:
        """The rollouts of some groups, by their places, and of those that wait some by uid, as they came."""
        if waiting := again.get(-1):
            yield from self._waiting.load([[self._waiting.by_uid[uid] for uid in waiting]])[0]
        parts = [self._parts[place] for place in again if place >= 0]
        sealed = [part for part in parts if part.path(self._root).exists()]
        for first in range(0, len(sealed), _TOGETHER):
            for rollouts in read_groups(sealed[first : first + _TOGETHER], self._root):
                yield from rollouts

    def chunk(self, name: str, given: Any) -> Chunk | None:
        """Values by uid as they are stored, if there are any; rewards that came with their rollouts are left out.

        Args:
            name: The column.
            given: A dict of them.

        Raises:
            DataError: A column that is not a late one, a rollout that is not there, or a value that is not one of the
                column, or another one than the rollout came with.
        """
        column = self._declared.get(name) if isinstance(name, str) else None
        if column is None or not column.late:
            known = [one.name for one in self._declared.late]
            raise DataError(f"add_column: expected the name of a late column, one of {known}, found {name!r:.80}")
        if not isinstance(given, Mapping):
            raise DataError(f"add_column {name!r}: expected a dict of values by uid, found {given!r:.100}")
        if not given:
            return None
        if not given.keys() <= self._uids.keys():
            unknown = next(uid for uid in given if uid not in self._uids)
            raise DataError(f"add_column {name!r}: expected uids of rollouts that are there, found {unknown!r:.100}")
        counts = None if column.per == "example" else [self._count(uid, column.per) for uid in given]
        chunk = checked_chunk(column, given, counts)
        return self._without_own(chunk) if name == "reward" else chunk

    def _without_own(self, rewards: Chunk) -> Chunk:
        """Rewards of rollouts that came without; DataError: one that came with another one."""
        places = [self._uids[uid] for uid in rewards.uids]
        some = {place for place in set(places) if place < 0 or any(r is not None for r in self._parts[place].rewards)}
        if not some:
            return rewards
        own = [self._reward(uid) if place in some else None for uid, place in zip(rewards.uids, places, strict=True)]
        dtype = np.dtype(rewards.column.dtype)
        for row, reward in enumerate(own):
            if reward is not None and dtype.type(reward) != (late := rewards.values[row].as_py()):
                where = f"add_column 'reward', rollout {rewards.uids[row]!r}"
                raise DataError(f"{where}: expected the one that it came with, {reward}, found {late}")
        return rewards.take([row for row, reward in enumerate(own) if reward is None])

    def _count(self, uid: str, per: str) -> int:
        """How many tokens or turns a rollout has."""
        place = self._uids[uid]
        if place < 0:
            own = self._waiting.by_uid[uid]
            return own.turns if per == "turn" else own.tokens
        part = self._parts[place]
        return (part.turns if per == "turn" else part.tokens)[part.uids.index(uid)]

    def _reward(self, uid: str) -> float | None:
        """The reward that a rollout came with."""
        place = self._uids[uid]
        if place < 0:
            return self._waiting.by_uid[uid].reward
        part = self._parts[place]
        return part.rewards[part.uids.index(uid)]


# More than so many bytes of a column at once are a file at once.
_MANY_BYTES = 2**20
# What the log may have, and memory with it, before files are made of it; and about the size of a file, which is read
# whole when one of its values is asked for.
_LOG_BYTES = 32 * 2**20
_FILE_BYTES = 16 * 2**20


class LateStore:
    """The late columns of a folder, for its one writer.

    Args:
        root: The folder.
        declared: Its columns.
        compression: Of the pages.
        sync: Whether to wait for the disk.

    Attributes:
        places: Where the values lie.

    Raises:
        DataError: Damage; the message names the file.
        StorageError: Something cannot be read or written.
    """

    def __init__(self, root: Path, declared: Columns, *, compression: str, sync: bool) -> None:
        self._root, self._compression, self._sync = root, compression, sync
        for column in declared.late:
            with storing(f"folder {late_folder(root, column)}"):
                make_folder(late_folder(root, column), sync=sync)
            remove_leftovers(late_folder(root, column), only_writer=True)
        self._log = Log(late_log(root)) if declared.late else None
        try:
            self.places = LatePlaces(root, declared, [] if self._log is None else self._log.records)
        except BaseException:
            self.close()
            raise
        if self._log is not None:
            self._log.records = []
            self._note([])

    def add(self, chunks: Sequence[Chunk], arrived: Callable[[Chunk], None]) -> list[int]:
        """Write values of one or several columns; what is there already is left out.

        Args:
            chunks: The values.
            arrived: Is told what was new, once that is on the disk.

        Returns:
            How many of each were new.

        Raises:
            DataError: A rollout has another value of the column; the message names it. Nothing was written.
            StorageError: They cannot be written; nothing was, or, where there are several chunks, some.
        """
        self._refuse_twice(chunks)
        unknown = list(map(self._unknown, chunks))
        many: list[Chunk] = []
        few: list[Chunk] = []
        for chunk in unknown:
            if chunk.uids:
                (many if chunk.nbytes > _MANY_BYTES else few).append(chunk)
        for chunk in many:
            self._note(self._write(chunk))
            arrived(chunk)
        if few and self._log is not None:
            self._log.append(encode_record(few), sync=self._sync)
            for chunk in few:
                self.places.add_chunk(chunk)
                arrived(chunk)
            # The log says the same, and can be made smaller another time.
            with contextlib.suppress(StorageError):
                self._tidy()
        return [len(chunk.uids) for chunk in unknown]

    def _refuse_twice(self, chunks: Sequence[Chunk]) -> None:
        """Raise DataError where several chunks have a value of the same column for the same rollout."""
        seen: dict[str, set[str]] = {}
        for chunk in chunks if len(chunks) > 1 else ():
            others = seen.setdefault(chunk.column.name, set())
            for uid in others.intersection(chunk.uids):
                raise DataError(f"add_column {chunk.column.name!r}: expected rollout {uid!r} once, found it twice")
            others.update(chunk.uids)

    def _unknown(self, chunk: Chunk) -> Chunk:
        """Those values that are not there yet."""
        places = self.places.places[chunk.column.name]
        known = places.keys() & set(chunk.uids) if places else set()
        if not known:
            return chunk
        name, given = chunk.column.name, values_of(chunk.column, chunk.values)
        rows = []
        for row, uid in enumerate(chunk.uids):
            if uid not in known:
                rows.append(row)
                continue
            there = self.places.value(name, uid)
            if not same_values(there, given[row]):
                raise DataError(
                    f"add_column {name!r}, rollout {uid!r}: expected the value that it has, "
                    f"{_shown(there)}, found {_shown(given[row])}"
                )
        return chunk.take(rows)

    def _note(self, paths: Sequence[Path]) -> None:
        """Note that files are there; what cannot be noted is with the next ones."""
        self.places.unnoted += paths
        if self.places.unnoted and self._log is not None:
            with contextlib.suppress(StorageError):
                self._log.append(encode_files(self.places.unnoted), sync=self._sync)
                self.places.unnoted.clear()

    def _write(self, chunk: Chunk) -> list[Path]:
        """Write files of a chunk, all of them or none; which ones."""
        folder = late_folder(self._root, chunk.column)
        written: list[tuple[Chunk, str]] = []
        with storing(f"late columns in {folder}"):
            try:
                for piece in chunk.cut(_FILE_BYTES):
                    name, content = encode_file(piece, self._compression)
                    written.append((piece, os.path.join(folder, name)))
                    write_partial(written[-1][1], content)
                paths = [path for _, path in written]
                if self._sync:
                    sync_files([beside(path) for path in paths])
                publish(paths)
                if self._sync:
                    sync_folders([folder])
            except BaseException:
                for _, path in written:
                    remove(path)
                remove_leftovers(folder, only_writer=True)
                raise
        for piece, path in written:
            self.places.add_file(chunk.column, Path(path), piece.uids)
        files = [Path(path) for _, path in written]
        self.places.files += files
        return files

    def _tidy(self) -> None:
        """Make files of what the log has, where that is much."""
        if self._log is None or self._log.size <= _LOG_BYTES:
            return
        by_column: dict[RolloutColumn, list[tuple[int, Chunk]]] = {}
        for number, chunk in self.places.in_memory():
            by_column.setdefault(chunk.column, []).append((number, chunk))
        for pairs in by_column.values():
            self._write(joined([chunk for _, chunk in pairs]))
            for number, _ in pairs:
                self.places.forget(number)
        # Whoever reads the log now has the old file, and all that it says.
        self._log.rewrite([encode_files(self.places.files)])

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _shown(value: Any) -> str:
    return f"{np.asarray(value).reshape(-1)[:4].tolist()}"


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
        memory_bytes: About how much memory rollouts may take that are in files.

    Attributes:
        parts: The files of the sealed groups, in order.
        uids: Of all rollouts, with the places of their groups in ``parts``, -1 for those that are not sealed.
        versions: Of the policies that rollouts are of, and those that were said to be the latest.
        told: The latter, in order.
        lost: The groups of versions that a trainer went back behind, by their uids.
        given_up: Uids of rollouts that nobody waits for any more.
        duplicates: How many came again since the folder was opened.
        refused: How many were given since in calls that were refused.
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
        memory_bytes: int,
    ) -> None:
        self._root, self._making, self._declared = root, making, declared
        self._compression, self._sync = compression, sync
        index, self._index_log = open_index(root)
        self.parts = index.parts
        self.batches = BatchFiles(
            root,
            index.batches,
            index.told,
            self._index_log,
            compression=compression,
            sync=sync,
            digest=examples_digest if digest else None,
        )
        self.uids = {uid: place for place, part in enumerate(self.parts) for uid in part.uids}
        self._number = max((part.number for part in self.parts), default=-1) + 1
        self._kept = RolloutCache(memory_bytes)
        self.waiting = Waiting(root, rules, self._kept, self.uids, declared)
        self.uids.update(dict.fromkeys(self.waiting.by_uid, -1))
        self.told, self.lost = index.told, set[str]()
        self.versions = Versions()
        for told in self.told:
            if self.versions.tell(told.version) or told is self.told[0]:
                self._lose(told)
        keys = [*(part.key for part in self.parts if part.place not in self.lost), *self.waiting.groups]
        for version in {key.policy_version for key in keys}:
            self.versions.note(version)
        self.given_up = index.given_up
        self.duplicates = self.refused = 0
        self._given = IncomingRollouts(root, declared, self.uids, self.parts, self.waiting)
        self.waiting.tidy()
        self._store = LateStore(root, declared, compression=compression, sync=sync)
        self._late = LateColumns(root, self._store.places)
        self.readiness = Readiness(self._store.places, self.given_up)
        self._unnoted: list[GroupFile] = []
        self._ready = self._all_ready(index.ready)
        if making is not None:
            for told in self.told if making.takes_groups else self.told[-1:]:
                making.set_policy_version(told.version)
            self._resume(making)

    def _all_ready(self, noted: Sequence[str]) -> list[GroupFile]:
        """The groups that wait for nothing, in the order in which they became ready, as far as that was noted."""
        ready = {part.place: part for number, part in enumerate(self.parts) if self.readiness.add(number, part)}
        never_waited = [place for place, part in ready.items() if not self.readiness.awaits(part)]
        noted_before = dict.fromkeys([*never_waited, *noted])
        known = [place for place in noted_before if place in ready]
        others = [place for place in ready if place not in noted_before]
        self._note_ready([ready[place] for place in others])
        return [ready[place] for place in (*known, *others)]

    def _lose(self, told: Told) -> None:
        """Note that the groups of later versions that were sealed by then are of a policy that is not trained on."""
        before = [part for part in self.parts if part.number < told.sealed]
        ahead = {part.key.policy_version: self.versions.is_ahead(part.key.policy_version) for part in before}
        self.lost.update(part.place for part in before if ahead[part.key.policy_version])

    def _groups(self, parts: Sequence[GroupFile]) -> list[StoredGroup]:
        """What the batch maker is given: none of a version that is lost."""
        there = [part for part in parts if part.place not in self.lost] if self.lost else parts
        return [StoredGroup.of(self._root, part, self._late, self.given_up, self._kept) for part in there]

    def _resume(self, making: Making) -> None:
        """Have the batch maker be as if the folder had just been opened."""
        making.resume(self._groups(self._ready), self.batches.stored)

    def add(self, requests: Sequence[Sequence[RolloutRecord]]) -> tuple[list[int], Plan | None]:
        """Add what several callers gave, with one wait for the disk.

        Returns:
            How many of each were new, and what was done for them, if anything was.

        Raises:
            DataError: One that is there with other content, or a damaged file; nothing was added.
            StorageError: They cannot be written, or one that is there cannot be read; nothing was added.
        """
        new, counts = self._given.rollouts(requests)
        plan = self.waiting.plan(list(new.values()), time.time()) if new else None
        if plan is not None:
            self.carry_out(plan)
        self.duplicates += sum(map(len, requests)) - sum(counts)
        return counts, plan

    def carry_out(self, plan: Plan) -> None:
        """Write what a plan says, then let it be so; after an error everything is as it was."""
        if not plan.sealed and not plan.new:
            return
        begin = self.waiting.log(plan, sync=self._sync)
        parts = []
        if plan.sealed:
            try:
                parts = write_groups(
                    self._root,
                    plan.sealed,
                    partial(self.waiting.load, new=plan.new),
                    number=self._number,
                    compression=self._compression,
                    sync=self._sync,
                    declared=self._declared,
                )
            except BaseException:
                self.waiting.undo(begin)
                raise
        self.waiting.apply(plan, begin)
        self._kept.put(plan.logged if self._making is None else plan.new.values())
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
        """Go on with groups that are in files now, the first of which is that of this place."""
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
            self._kept.drop(uid for part in parts for uid in part.uids)
        with contextlib.suppress(StorageError):
            self.waiting.tidy()

    # ------------------------------------------------------------------ what is said

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
        told = Told(version, self._number, len(self.batches.stored))
        self._index_log.append(encode_version(version, told.sealed), sync=self._sync)
        self.told.append(told)
        goes_back = self.versions.tell(version)
        if goes_back:
            self._lose(told)
        if self._making is not None:
            self._making.set_policy_version(version)
            if goes_back:
                self._making.lose(self.lost)
                if self._making.takes_groups:
                    self._resume(self._making)

    def give_up(self, uids: Sequence[str]) -> int:
        """Note that nobody waits for some rollouts any more, and that they are not to be drawn; how many are new.

        Raises:
            MissingRowError: One is not there; nothing has changed.
            StorageError: It cannot be noted; nothing has changed.
        """
        for uid in uids:
            if uid not in self.uids:
                raise MissingRowError(f"give_up: expected the uids of some of {len(self.uids)}, found {uid!r:.100}")
        new = [uid for uid in dict.fromkeys(uids) if uid not in self.given_up]
        if new:
            self._index_log.append(encode_given_up(new), sync=self._sync)
            places = self._places(new).tolist()
            were_ready = any(place >= 0 and place not in self.readiness.waiting for place in places)
            ready = self.readiness.give_up(new, places)
            self.given_up.update(new)
            self._are_ready([self.parts[place] for place in ready])
            if were_ready and self._making is not None and self._making.takes_groups:
                self._resume(self._making)
        return len(new)

    # ------------------------------------------------------------------ late columns

    def add_columns(self, requests: Sequence[tuple[str, Any]]) -> list[int]:
        """Add what several callers gave, each values of a column by uid; how many of each were new.

        Raises:
            DataError: A column that is not a late one, a rollout that is not there, or a value that is not one of the
                column or not the one that the rollout has. Nothing was added.
            StorageError: They cannot be written; nothing was added, or, where there are several, some.
        """
        counts = [0] * len(requests)
        given = [self._given.chunk(name, values) for name, values in requests]
        chunks = {place: chunk for place, chunk in enumerate(given) if chunk is not None}
        for place, count in zip(chunks, self._store.add(list(chunks.values()), self._arrived), strict=True):
            counts[place] = count
        return counts

    def _places(self, uids: Sequence[str]) -> npt.NDArray[np.int64]:
        """The places of the groups that rollouts are in."""
        return np.fromiter(map(self.uids.__getitem__, uids), np.int64, len(uids))

    def _arrived(self, chunk: Chunk) -> None:
        """Count in values that are on the disk."""
        uids = chunk.uids if not self.given_up else [uid for uid in chunk.uids if uid not in self.given_up]
        ready = self.readiness.arrived(chunk.column.name, self._places(uids))
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
        versions = [example.policy_version for example in made.examples]
        behind = [self.versions.behind(version) if version else None for version in versions]
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
            return self._late.fill([self.waiting.rollout(uid)])[0]
        part = self.parts[place]
        return self._late.fill([read_groups([part], self._root)[0][part.uids.index(uid)]])[0]

    def counts(self) -> tuple[int, int]:
        """How many rollouts the batch maker has not been given yet, and how many of these wait for late columns."""
        queued = 0 if self._making is None else self._making.num_later
        return self.waiting.count + self.readiness.num_rollouts + queued, self.readiness.num_rollouts

    def summary(self) -> dict[str, float]:
        """Numbers for a log; see ``RolloutBuffer.summary``."""
        counts = {
            "stored": len(self.uids),
            "unsealed": self.waiting.count,
            "awaiting_columns": self.readiness.num_rollouts,
            "queued": 0 if self._making is None else self._making.num_later,
            "given_up": len(self.given_up),
        }
        found = {} if self._making is None else self._making.summary()
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
        """Close the logs; what waits is in them."""
        self._store.close()
        self.waiting.close()
        self._index_log.close()
