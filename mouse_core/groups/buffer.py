"""RolloutBuffer: adds rollouts, seals groups of rollouts into files, and stores batches that a batch maker creates."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, Self

from mouse_core._base.checks import check_seconds
from mouse_core._base.locks import ProcessLock
from mouse_core._base.threads import Alarm
from mouse_core._base.tracing import refuse_traced
from mouse_core.errors import (
    ClosedError,
    ConfigError,
    DataError,
    ForkError,
    MissingRowError,
    StorageError,
    TimedOutError,
)
from mouse_core.files.locking import Descriptor, lock, this_process, unlock
from mouse_core.files.writing import make_folder, storing, write_at
from mouse_core.groups import stored
from mouse_core.groups.files import BATCHES, STATE, GroupFile, check_codec, declare, read_groups
from mouse_core.groups.records import (
    Columns,
    RLExample,
    RolloutColumn,
    RolloutRecord,
    Versions,
    refuse_other,
    uids_of,
    version_name,
    with_columns,
)
from mouse_core.groups.waiting import RolloutCache, SealingPlan, Waiting
from mouse_core.spec import check_count


class BatchMaker(Protocol):
    """Creates batches from the rollouts that it receives.

    A ``RolloutBuffer`` passes the rollouts of sealed groups to the maker, one group after another, and stores the
    batches. After a restart, the buffer again passes all rollouts that no stored batch has used, in the same order. A
    batch names its used rollouts by the ``rollout_uid`` of its examples and by the list "rollout_uids" in its metadata.
    If an example has no uid and the list is missing, the buffer raises DataError. A maker may have a method
    ``check_rollout(rollout)``: ``add_rollouts`` calls this method before anything is stored, and raises the errors of
    the method. A maker may have a method ``set_policy_version(version)``, which receives the policy version of the
    buffer, also after a restart.

    A maker with the methods ``add_group`` and ``resume``, such as ``GrpoBatchMaker``, receives ``StoredGroup`` objects
    instead of rollouts, and reads only the rollouts that it draws. After a restart, the buffer calls ``resume`` with
    all groups and with the uids of the rollouts of every stored batch.
    """

    def add_rollout(self, rollout: RolloutRecord) -> None:
        """Receive a rollout of a sealed group."""

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Return a batch of ``batch_size`` examples, or None if too few examples are available."""

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> Mapping[str, Any]:
        """Return metadata to store with a batch: numbers and text by name.

        If examples have no ``rollout_uid``, the metadata must contain a list "rollout_uids" with the uids of the
        rollouts that the batch used.
        """


# Key of a batch's metadata: the uids of the rollouts that the batch used.
_UIDS = "rollout_uids"
# Number of groups whose rollouts are read together.
_TOGETHER = 32


class Making:
    """A batch maker, the groups that the maker has not received yet, and the batch that is not stored yet.

    Args:
        maker: The batch maker; None: groups are ignored.

    Attributes:
        takes_groups: Whether the maker receives stored groups; otherwise the maker receives rollouts.
    """

    def __init__(self, maker: BatchMaker | None) -> None:
        self.maker: Any = maker
        self.takes_groups = hasattr(maker, "add_group")
        self._coming: deque[RolloutRecord] = deque()
        self._ready: deque[stored.StoredGroup] = deque()
        self._batch: list[RLExample] | None = None

    def resume(self, groups: Sequence[stored.StoredGroup], batches: Sequence[stored.StoredBatch]) -> None:
        """Restore the maker from a folder's groups and stored batches.

        Raises:
            DataError: A file is damaged.
        """
        if self.takes_groups:
            self._batch = None
            self.maker.resume(groups, [batch.uids for batch in batches])
            return
        if self.maker is None:
            return
        used = {uid for batch in batches for uid in batch.uids}
        left = [group for group in groups if not used.issuperset(group.uids)]
        for group, rollouts in zip(left, stored.read_ahead(left), strict=True):
            self._feed(group, [rollout for rollout in rollouts if rollout.rollout_uid not in used])

    def feed(self, groups: Sequence[stored.StoredGroup]) -> None:
        """Pass sealed groups to the maker, each rollout once, even if the maker raises an error for a rollout."""
        if self.takes_groups:
            for group in groups:
                self.maker.add_group(group)
        elif self.maker is not None:
            self._ready.extend(groups)
            self._feed_ready()

    @property
    def num_later(self) -> int:
        """The number of rollouts that the maker has not received yet."""
        return sum(len(group.uids) for group in self._ready)

    def lose(self, group_uids: Container[str]) -> None:
        """Drop the groups with the given uids, whose policy version is lost, before the maker receives these groups."""
        self._ready = deque(group for group in self._ready if group.group_uid not in group_uids)

    def _feed_ready(self) -> None:
        """Read the ready groups, and pass their rollouts to the maker."""
        self._feed_coming()
        while self._ready:
            together = list(islice(self._ready, _TOGETHER))
            for rollouts in stored.read_wanted([(group, range(len(group.uids)), ()) for group in together]):
                self._feed(self._ready.popleft(), rollouts)

    def _feed(self, group: stored.StoredGroup, rollouts: Iterable[RolloutRecord]) -> None:
        """Pass the rollouts of a group to the maker, and remove them from the cache."""
        self._coming.extend(rollouts)
        if group.cache is not None:
            group.cache.drop(group.uids)
        self._feed_coming()

    def _feed_coming(self) -> None:
        while self._coming:
            self.maker.add_rollout(self._coming.popleft())

    def ask(self, name: str, *given: Any) -> Any:
        """Call an optional method of the maker: ``check_rollout``, ``set_policy_version`` or ``summary``."""
        call = getattr(self.maker, name, None)
        return None if call is None else call(*given)

    def batch(
        self, size: int, known: Container[str]
    ) -> tuple[Sequence[RLExample], Mapping[str, Any], tuple[str, ...]] | None:
        """Return the next batch; None if too few rollouts are available. Until ``stored`` is called, every call returns
        the same batch.

        Args:
            size: The number of examples.
            known: The uids of the buffer's rollouts.

        Returns:
            The examples, the maker's metadata, and the uids of the rollouts that the batch used.

        Raises:
            ConfigError: The buffer has no batch maker.
            DataError: The batch does not consist of examples or does not name its rollouts (later calls raise the same
                error), or a file is damaged.
            StorageError: A group cannot be read.
        """
        if self.maker is None:
            raise ConfigError("create_and_store_batch: expected a buffer with a batch_maker, found none")
        self._feed_ready()
        if self._batch is None:
            self._batch = self.maker.create_batch(size)
        if self._batch is None:
            return None
        for place, example in enumerate(self._batch):
            if not isinstance(example, RLExample):
                raise DataError(f"create_batch: expected an RLExample at index {place}, found {example!r:.100}")
        metadata = self.maker.get_batch_metadata(self._batch)
        if not isinstance(metadata, Mapping):
            raise DataError(f"get_batch_metadata: expected a dict, found {metadata!r:.100}")
        return self._batch, metadata, self._uids(self._batch, metadata.get(_UIDS), known)

    def _uids(self, batch: Sequence[RLExample], listed: Any, known: Container[str]) -> tuple[str, ...]:
        """Return the uids of the rollouts that a batch used, from its examples and from the list ``listed`` of its
        metadata.
        """
        uids = [example.rollout_uid for example in batch if example.rollout_uid]
        if isinstance(listed, list | tuple) and listed and all(isinstance(uid, str) and uid for uid in listed):
            named = set(uids)
            uids += [uid for uid in listed if uid not in named]
        elif len(uids) < len(batch):
            raise DataError(
                "create_batch: expected the uids of the rollouts in the batch, because without uids a restart would "
                f"reuse the rollouts; found an example without rollout_uid, and no {_UIDS!r} in the batch's metadata"
            )
        for uid in uids:
            if uid not in known:
                raise DataError(
                    f"create_batch: expected only rollouts of this buffer in the batch, found rollout_uid {uid!r}"
                )
        return tuple(uids)

    def stored(self) -> None:
        """Mark the batch as stored, so that the next call of ``batch`` creates a new batch."""
        self._batch = None


@dataclass(slots=True, eq=False)
class _Request:
    given: Any
    answer: Any = None
    error: BaseException | None = None
    served: bool = False


class Requests:
    """Combines the requests of several threads into one call."""

    def __init__(self) -> None:
        self._queue: list[_Request] = []
        self._guard = ProcessLock()
        self._turn = ProcessLock()

    def serve(self, given: Any, handle: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Return the answer to one request.

        Args:
            given: The request.
            handle: A function that takes several requests and returns their answers. If ``handle`` fails for several
                requests, each request is handled separately, so that the error reaches the thread whose request caused
                it.

        Raises:
            Exception: The error of ``handle``. An interrupt of this thread, such as KeyboardInterrupt, is raised only
                in this thread; the other threads then handle their own requests.
        """
        request = _Request(given)
        with self._guard:
            self._queue.append(request)
        # The first thread handles all pending requests; the other threads receive their answers.
        with self._turn:
            if not request.served:
                with self._guard:
                    requests, self._queue = self._queue, []
                if request not in requests:
                    requests.insert(0, request)  # the thread that handled it was interrupted, for example by Ctrl-C
                self._serve(requests, handle)
        if request.error is not None:
            raise request.error
        return request.answer

    def _serve(self, requests: list[_Request], handle: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        if len(requests) > 1:
            try:
                answers = handle([request.given for request in requests])
            except Exception:
                answers = None
            if answers is not None:
                for request, answer in zip(requests, answers, strict=True):
                    request.answer, request.served = answer, True
                return
        for request in requests:
            try:
                (request.answer,) = handle([request.given])
            except Exception as error:
                request.error = error
            request.served = True


# Seconds after which a thread that waits for room checks again whether another process has taken over the folder.
_LOOK_SECONDS = 0.5
# Largest size in bytes of the file that names the owner.
_LONGEST = 1024


class Owner(Descriptor):
    """The ownership of a folder. The owner is the process that took the folder last, and only the owner may write.

    An earlier owner that still runs raises ClosedError at its next step, and changes nothing. A lock alone would not
    allow a new owner to take over.

    Args:
        path: A file that names the owner.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = os.getpid()
        self._token = uuid.uuid4().hex.encode()
        with storing(f"file {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take the ownership after the present owner has finished its step, and hold the lock while the context is
        open.
        """
        lock(self._file, wait=True)
        try:
            with storing(f"file {self._path}"):
                named = self._token + b"\n" + this_process().encode()
                write_at(self._file, named, 0)
                os.ftruncate(self._file, len(named))
            yield
        finally:
            self._unlock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock while files are written.

        Raises:
            ClosedError: Another buffer has taken the folder, or this buffer was closed.
            ForkError: The caller is a forked child process.
        """
        if self._file < 0:
            raise ClosedError(
                f"rollout buffer: expected an open buffer, found {str(self._path.parent.parent)!r} closed"
            )
        if os.getpid() != self._process:
            raise ForkError(
                f"rollout buffer: expected a call in process {self._process}, found a call in "
                f"the forked child process {os.getpid()}"
            )
        lock(self._file, wait=True)
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            token, _, owner = os.read(self._file, _LONGEST).partition(b"\n")
            if token != self._token:
                by = f", by {owner.decode(errors='replace')}" if owner else ""
                raise ClosedError(
                    f"rollout buffer: expected this buffer to own {str(self._path.parent.parent)!r}, found that "
                    f"another buffer opened the folder{by}"
                )
            yield
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._file >= 0:
            unlock(self._file)


# Number of files that are read together; seconds until sealing is tried again after an error, such as a full disk.
_RETRY_SECONDS = 5.0


class RolloutBuffer(stored.BatchFiles):
    """Stores rollouts on disk in groups, and batches of rollouts.

    A group is the rollouts of one policy version on one problem. To seal a group means to write it to a Parquet file. A
    group is sealed when it is full, when it is older than ``seal_timeout``, or on ``flush()``. Groups that are sealed
    together share files. When ``add_rollouts`` returns, its rollouts are on disk. A new buffer for the same folder,
    also after a crash, contains each rollout that is on disk exactly once, and the rollouts of stored batches count as
    used.

    A folder has one buffer at a time. A new buffer, in this or another process, takes the folder over, and the earlier
    buffer raises ``ClosedError``. Threads may share a buffer.

    Args:
        root_path: The folder, which is created if it is missing.
        group_size: Number of rollouts of a full group.
        min_group_size: Least number of rollouts with which ``seal_timeout`` seals a group; a single rollout cannot be
            scored.
        seal_timeout: Seconds after a group's first rollout until the group is sealed even if it is not full.
        compression: The compression of messages, tokens and other long columns: "zstd", "snappy", "gzip", "brotli",
            "lz4", "none".
        batch_maker: The maker of batches; None: no batches are created.
        columns: The declared columns that rollouts may have; None: the columns that an earlier buffer declared for the
            folder. More columns may be declared when the folder is opened again.
        max_ahead: Largest number of rollouts whose groups are not sealed yet, or that can still be drawn; above this
            number, ``add_rollouts`` blocks producers. None: no limit. With ``max_ahead`` the batch maker needs the
            attribute ``available``.
        memory_bytes: Approximate memory for rollouts whose groups are not sealed yet or, with a ``GrpoBatchMaker``,
            that can still be drawn. Further rollouts are read from the log or from the files of their groups when they
            are needed.
        sync: Whether to wait until data are on disk. If False, a crash of the machine may lose data; a crash of the
            process loses nothing.

    Raises:
        ConfigError: An argument is invalid.
        DataError: A file in the folder is damaged, or a missing file held data that exist in no other file; the message
            names the file.
        StorageError: The folder cannot be read or written.
    """

    def __init__(
        self,
        root_path: str | Path,
        group_size: int = 8,
        min_group_size: int = 2,
        seal_timeout: float = 30.0,
        compression: str = "zstd",
        batch_maker: BatchMaker | None = None,
        *,
        columns: Iterable[RolloutColumn] | None = None,
        max_ahead: int | None = None,
        memory_bytes: int = 2**30,
        sync: bool = True,
    ) -> None:
        sealing: dict[str, Any] = {
            "group_size": check_count("group_size", group_size),
            "min_group_size": check_count("min_group_size", min_group_size),
            "seal_timeout": check_seconds("seal_timeout", seal_timeout),
        }
        super().__init__(Path(root_path))
        self._making, self._sync, self._compression = Making(batch_maker), bool(sync), check_codec(compression)
        self._lock, self._requests = ProcessLock(), Requests()
        self._max_ahead = None if max_ahead is None else check_count("max_ahead", max_ahead)
        if max_ahead is not None and not hasattr(batch_maker, "available"):
            raise ConfigError(
                f"max_ahead: expected a batch_maker with an attribute 'available', found {batch_maker!r:.100}"
            )
        self._changed = threading.Condition(self._lock)
        self._is_lacking = False  # whether the last requested batch could not be created
        with storing(f"folder {self._root}"):
            make_folder(self._root / STATE, sync=self._sync)
            make_folder(self._root / BATCHES, sync=self._sync)
        self._owner = Owner(self._root / STATE / "owner")
        try:
            with self._owner.taking():
                self._columns = declare(self._root, columns, sync=self._sync)
                self._open(sealing, check_count("memory_bytes", memory_bytes, 0))
        except BaseException:
            self._owner.close()
            raise
        self._alarm = Alarm(self, RolloutBuffer._seal_due, "rollout-buffer-timeout")
        self._alarm.set(self._waiting.next_due())

    def _open(self, sealing: dict[str, Any], memory_bytes: int) -> None:
        """Read the files and logs of the folder, which this process owns, and restore the batch maker."""
        index, self._index_log = stored.open_index(self._root)
        self._parts = index.parts  # the sealed groups, in order
        self._stored = index.batches
        # The uids of all rollouts, each with the number of its sealed group; -1: not sealed.
        self._uids = {uid: place for place, part in enumerate(self._parts) for uid in part.uids}
        self._number = max((part.number for part in self._parts), default=-1) + 1
        self._cache = RolloutCache(memory_bytes)
        options: dict[str, Any] = {**sealing, "compression": self._compression, "sync": self._sync}
        self._waiting = Waiting(self._root, self._cache, self._uids, self._columns, **options)
        self._uids.update(dict.fromkeys(self._waiting.by_uid, -1))
        # uids of groups of lost versions, from which the trainer went back to an older version
        self._lost: set[str] = set()
        self._versions = Versions()
        for change in index.changes:
            if self._versions.set_latest(change.version) or change is index.changes[0]:
                self._mark_lost(change)
        keys = [*(part.key for part in self._parts if part.place not in self._lost), *self._waiting.groups]
        for version in {key.policy_version for key in keys}:
            self._versions.note(version)
        # number of duplicate rollouts, and of rollouts in failed calls, since the folder was opened
        self._duplicates = self._refused = 0
        self._waiting.tidy()
        for change in index.changes if self._making.takes_groups else index.changes[-1:]:
            self._making.ask("set_policy_version", change.version)
        self._resume()

    def _mark_lost(self, change: stored.VersionChange) -> None:
        """Mark sealed groups as lost if their version is newer than the version to which the trainer went back."""
        before = [part for part in self._parts if part.number < change.sealed]
        ahead = {part.key.policy_version: self._versions.is_ahead(part.key.policy_version) for part in before}
        self._lost.update(part.place for part in before if ahead[part.key.policy_version])

    def _groups(self, parts: Sequence[GroupFile]) -> list[stored.StoredGroup]:
        """Return all groups except groups of lost versions."""
        return [stored.StoredGroup(self._root, part, self._cache) for part in parts if part.place not in self._lost]

    def _resume(self) -> None:
        """Restore the batch maker from the groups and the stored batches."""
        self._making.resume(self._groups(self._parts), self._stored)

    # ------------------------------------------------------------------ what is there

    def __repr__(self) -> str:
        return (
            f"RolloutBuffer({str(self._root)!r}, groups={len(self._parts)}, rollouts={len(self)}, "
            f"waiting={self._waiting.count}, batches={len(self._stored)})"
        )

    @property
    def root_path(self) -> Path:
        """The folder."""
        return self._root

    @property
    def columns(self) -> Columns:
        """The declared columns of the folder, by name."""
        return self._columns

    @property
    def batch_maker(self) -> BatchMaker | None:
        """The batch maker; None without one."""
        maker: BatchMaker | None = self._making.maker
        return maker

    @property
    def num_ahead(self) -> int:
        """The number of rollouts whose groups are not sealed yet, plus the number of examples that are available for
        batches.
        """
        return self._ahead()

    def _ahead(self) -> int:
        with self._lock:
            coming = self._waiting.count + self._making.num_later  # which the batch maker has not received yet
            return coming + int(getattr(self.batch_maker, "available", 0))

    def __len__(self) -> int:
        """Return the number of rollouts, sealed or not."""
        return len(self._uids)

    def __contains__(self, rollout_uid: object) -> bool:
        return rollout_uid in self._uids

    def contains(self, rollout_uids: Iterable[str]) -> list[bool]:
        """Return whether each rollout is stored, sealed or not, so that a restarted producer knows which rollouts
        arrived.
        """
        return [uid in self._uids for uid in uids_of(rollout_uids)]

    @property
    def num_groups(self) -> int:
        """The number of sealed groups."""
        return len(self._parts)

    @property
    def num_waiting(self) -> int:
        """The number of rollouts whose groups are not sealed yet."""
        return self._waiting.count

    def rollouts(
        self, *, environment: str | None = None, policy_version: stored.Wanted = None, example_id: stored.Wanted = None
    ) -> stored.StoredRollouts:
        """Return the rollouts that are sealed so far; see ``open_rollouts`` for arguments and errors."""
        with self._lock:
            parts = list(self._parts)
        return stored.StoredRollouts(self._root, parts, environment, policy_version, example_id)

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """Return a rollout, sealed or not; only the file of its group is read.

        Raises:
            MissingRowError: The buffer does not contain the rollout.
            DataError: The file is damaged; the message names it.
            StorageError: The file cannot be read.
        """
        with self._lock:
            if rollout_uid not in self._uids:
                raise MissingRowError(
                    f"rollout: expected the uid of one of {len(self._uids)}, found {rollout_uid!r:.100}"
                )
            place = self._uids[rollout_uid]
            if place < 0:
                return self._waiting.rollout(rollout_uid)
            part = self._parts[place]
            return read_groups([part], self._root)[0][part.uids.index(rollout_uid)]

    def summary(self) -> dict[str, float]:
        """Return numbers for a log: the batch maker's ``summary``, if the maker has this method, and counts of
        rollouts.

        "stored" counts all rollouts, and "unsealed" counts the rollouts of groups that are not sealed. "queued" counts
        rollouts that a custom batch maker has not received yet, because an earlier call raised an error. "received" is
        "stored" plus duplicates and rollouts of failed calls since the folder was opened. Each received rollout is
        counted once: in "unsealed", "queued", "held", "used" or one "left/<reason>"; see ``GrpoBatchMaker.summary``.
        """
        with self._lock:
            counts = {
                "stored": len(self._uids),
                "unsealed": self._waiting.count,
                "queued": self._making.num_later,
            }
            found: dict[str, float] = dict(self._making.ask("summary") or {})
            says = found.keys() >= {"received", "held", "used"}
            used = set() if says and not self._lost else {uid for batch in self._stored for uid in batch.uids}
            lost = [uid for part in self._parts if part.place in self._lost for uid in part.uids]
            used_before = sum(uid in used for uid in lost)
            if says:
                found["used"] += used_before
            else:
                # The maker does not count the rollouts that it received.
                sealed = [uid for part in self._parts if part.place not in self._lost for uid in part.uids]
                found["used"] = used_before + sum(uid in used for uid in sealed)
                found["held"] = len(sealed) + used_before - counts["queued"] - found["used"]
            left = {"lost_versions": len(lost) - used_before, "duplicate": self._duplicates, "refused": self._refused}
            for name, count in left.items():
                found[f"left/{name}"] = found.get(f"left/{name}", 0) + count
            found["received"] = len(self._uids) + self._duplicates + self._refused
            return {**found, **counts}

    @property
    def batches(self) -> list[str]:
        """The ids of all stored batches, in order, including batches whose files were deleted."""
        with self._lock:
            return [batch.batch_id for batch in self._stored]

    # ------------------------------------------------------------------ adding

    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:
        """Add one rollout; return whether it was new. See ``add_rollouts``."""
        return self.add_rollouts([rollout], timeout=timeout) == 1

    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:
        """Add rollouts; when the call returns, the rollouts are on disk.

        A rollout whose uid was added before is skipped, so a call can be repeated if its result was lost. Different
        content under the same uid (except ``created`` and ``replica_id``) raises DataError, unless the file with the
        first content is missing. Concurrent calls of several threads share one sync to the disk.

        With ``max_ahead`` a call waits while ``num_ahead`` is at least ``max_ahead``, and then adds all its rollouts.
        After a batch could not be created for lack of rollouts, calls add their rollouts without waiting, until a batch
        is created.

        Args:
            rollouts: The rollouts to add.
            timeout: Seconds to wait for room; None: no limit.

        Returns:
            The number of new rollouts.

        Raises:
            DataError: An argument is not a rollout; text is not Unicode; a column is not declared or has invalid
                values; a version is newer than the version of ``set_policy_version``; a uid was added before with other
                content; or the batch maker raised DataError. Nothing was added.
            StorageError: The rollouts cannot be written; nothing was added.
            TimedOutError: ``num_ahead`` did not fall below ``max_ahead`` in time; nothing was added.
            ClosedError, ForkError: The buffer is closed, or the caller is a forked child process.
        """
        given = list(rollouts)
        if not given:
            return 0
        try:
            for number, rollout in enumerate(given):
                if not isinstance(rollout, RolloutRecord):
                    raise DataError(f"add_rollouts: expected a RolloutRecord at index {number}, found {rollout!r:.100}")
                given[number] = with_columns(rollout, self._columns)
                self._versions.refuse_ahead(rollout.policy_version, rollout.rollout_uid)
                self._making.ask("check_rollout", rollout)
            if self._max_ahead is not None:
                self._wait_for_room(self._max_ahead, timeout)
            new: int = self._requests.serve(given, self._add)
        except DataError:
            with self._lock:
                self._refused += len(given)
            raise
        return new

    def _wait_for_room(self, limit: int, timeout: float | None) -> None:
        """Wait until ``num_ahead`` is below ``limit``; return at once if the last batch could not be created for lack
        of rollouts.
        """
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        with self._changed:
            while not self._is_lacking:
                if (ahead := self._ahead()) < limit:
                    return
                left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimedOutError(
                        f"add_rollouts: expected room within {timeout:g} s, found {ahead} waiting rollouts "
                        f"with max_ahead={limit}; nothing was added; create batches to make room"
                    )
                with self._step():
                    pass  # raises if another buffer has taken over the folder
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _wake(self) -> None:
        """Wake the threads that wait for room."""
        with self._changed:
            self._changed.notify_all()

    def _add(self, requests: Sequence[Sequence[RolloutRecord]]) -> list[int]:
        """Add the rollouts of several callers, with one sync to the disk; return the number of new rollouts of each
        caller.

        A rollout whose uid was added before is compared with the stored rollout, unless its file is missing.
        """
        with self._step():
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
            if new:
                plan = self._waiting.plan(list(new.values()), time.time())
                self._carry_out(plan)
                self._alarm.set(self._waiting.next_due(plan.groups))
            self._duplicates += sum(map(len, requests)) - sum(counts)
            return counts

    def _there(self, again: Mapping[int, Iterable[str]]) -> Iterator[RolloutRecord]:
        """Yield the stored rollouts of the groups in ``again``. A key of ``again`` is the index of a sealed group, or
        -1 for rollouts that are not sealed.
        """
        if waiting := again.get(-1):
            yield from self._waiting.load([[self._waiting.by_uid[uid] for uid in waiting]])[0]
        parts = [self._parts[place] for place in again if place >= 0]
        sealed = [part for part in parts if part.path(self._root).exists()]
        for first in range(0, len(sealed), _TOGETHER):
            for rollouts in read_groups(sealed[first : first + _TOGETHER], self._root):
                yield from rollouts

    def _carry_out(self, plan: SealingPlan) -> None:
        """Carry out a sealing plan. Raises the errors of ``Waiting.carry_out``; after an error nothing has changed."""
        if not plan.sealed and not plan.new:
            return
        parts = self._waiting.carry_out(plan, self._number)
        self._cache.put(plan.logged if self._making.maker is None else plan.new.values())
        self._uids.update(dict.fromkeys(plan.new, -1))
        first = len(self._parts)
        self._uids.update((uid, place) for place, part in enumerate(parts, first) for uid in part.uids)
        for version in {rollout.policy_version for rollout in plan.new.values()}:
            self._versions.note(version)
        self._parts.extend(parts)
        self._number += len(parts)
        if parts:
            self._sealed(parts)

    def _sealed(self, parts: Sequence[GroupFile]) -> None:
        """Register groups that were written to files."""
        # The files have the same content, so an error of the log loses nothing.
        with contextlib.suppress(StorageError):
            self._index_log.append(stored.encode_parts(parts), sync=False)
        self._making.feed(self._groups(parts))
        if not self._making.takes_groups:
            self._cache.drop(uid for part in parts for uid in part.uids)
        with contextlib.suppress(StorageError):
            self._waiting.tidy()

    def flush(self) -> int:
        """Seal every waiting group of any size; return how many groups were sealed.

        Raises:
            StorageError: The groups cannot be written; the groups stay unsealed.
            ClosedError, ForkError: See ``add_rollouts``.
        """
        with self._step():
            plan = self._waiting.all()
            self._carry_out(plan)
        return len(plan.sealed)

    def _seal_due(self) -> None:
        """Seal the groups that have waited long enough; called by the alarm."""
        try:
            with self._step():
                try:
                    self._carry_out(self._waiting.due(time.time()))
                finally:
                    retry = time.time() + _RETRY_SECONDS
                    due = self._waiting.next_due()
                    self._alarm.set(due if due > time.time() else retry)
        except Exception:
            # No caller waits for this. The rollouts are in the log, and the next call that writes raises the error.
            return

    # ------------------------------------------------------------------ versions

    def set_policy_version(self, version: str | int) -> None:
        """Set the latest policy version, in the folder and for the batch maker.

        Staleness is measured from this version, and rollouts of later versions raise DataError. Call this method
        whenever the policy changes. If a trainer goes back to an older version, for example from a checkpoint, the
        stored rollouts of later versions belong to an abandoned policy. Rollouts of an abandoned policy stay in their
        files and are never drawn, even when the new policy reaches their version number.

        Raises:
            DataError: The version is neither a str nor an int.
            StorageError: The change cannot be written; nothing has changed.
            ClosedError, ForkError: See ``add_rollouts``.
        """
        latest = version_name(version)
        with self._step():
            if latest == self._versions.latest:
                return
            # All groups of later versions are lost. Incomplete groups are sealed first, because later rollouts of these
            # versions belong to another policy. The maker is then restored as after a restart.
            self._carry_out(self._waiting.ahead(Versions(latest=latest)))
            change = stored.VersionChange(latest, self._number)
            self._index_log.append(stored.encode("version", [latest], [change.sealed]), sync=self._sync)
            goes_back = self._versions.set_latest(latest)
            if goes_back:
                self._mark_lost(change)
            self._making.ask("set_policy_version", latest)
            if goes_back:
                self._making.lose(self._lost)
                if self._making.takes_groups:
                    self._resume()

    # ------------------------------------------------------------------ batches

    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Create a batch with the batch maker, and store the batch.

        When the call returns, the batch is on disk, and its rollouts count as used, also after a restart. If a batch
        cannot be written, the next call stores the same batch.

        Args:
            batch_size: The number of examples.

        Returns:
            The batch's id, for ``read_batch``; None if too few rollouts are available.

        Raises:
            ConfigError: The buffer has no batch maker, or ``batch_size`` is below 1.
            DataError: The maker did not return a batch, or did not name the rollouts of the batch; see ``BatchMaker``.
            StorageError: The batch cannot be written.
            ClosedError, ForkError: See ``add_rollouts``.
        """
        size = check_count("batch_size", batch_size)
        with self._step():
            made = self._making.batch(size, self._uids)
            self._is_lacking = made is None
            if made is None:
                self._wake()
                return None
            examples, metadata, uids = made
            versions = [example.policy_version for example in examples]
            behind = [self._versions.behind(version) if version else None for version in versions]
            options: dict[str, Any] = {"compression": self._compression, "sync": self._sync}
            batch = stored.write_batch(self._root, self._index_log, examples, metadata, uids, behind, **options)
            self._stored.append(batch)
            self._making.stored()
            self._wake()
        return batch.batch_id

    def batch_at(self, index: int, batch_size: int | None = None) -> str | None:
        """Return the id of the stored batch with the index ``index``. All callers receive the same id.

        Args:
            index: The number of batches that were stored before the batch.
            batch_size: The number of examples of the batch that is created if ``index`` is the next batch; None: create
                no batch.

        Raises:
            ConfigError: An error of ``create_and_store_batch``, or batches before ``index`` do not exist.
            DataError, StorageError, ClosedError, ForkError: See ``create_and_store_batch``.
        """
        number = check_count("index", index, 0)
        with self._lock:
            if number < (count := len(self._stored)) or batch_size is None:
                return super().batch_at(number)
            if number > count:
                raise ConfigError(f"index: expected at most {count}, the index of the next batch, found {number}")
            return self.create_and_store_batch(batch_size)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Close the buffer; a second call does nothing. Unsealed rollouts stay in the log for the next buffer."""
        self._alarm.close()
        with self._lock:
            self._owner.close()
            self._waiting.close()
            self._index_log.close()
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Hold the locks that exclude other threads and other owners of the folder during a change."""
        refuse_traced("rollout buffer")
        with self._lock, self._owner.step():
            yield
