"""RolloutBuffer: takes in rollouts, seals them by groups into files, and stores batches made of them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_seconds
from mouse_core._base.locks import ProcessLock
from mouse_core._base.threads import Alarm
from mouse_core._base.tracing import refuse_traced
from mouse_core.digest import StreamDigest, asked_for
from mouse_core.errors import ClosedError, ConfigError, DataError, ForkError, TimedOutError
from mouse_core.files.locking import Descriptor, lock, this_process, unlock
from mouse_core.files.writing import make_folder, storing
from mouse_core.groups.batch_maker import BatchMaker, Making
from mouse_core.groups.columns import Columns, RolloutColumn
from mouse_core.groups.files import BATCHES, STATE, check_codec, declare
from mouse_core.groups.folder import Folder
from mouse_core.groups.late import Awaited
from mouse_core.groups.records import RLExample, RolloutRecord, uids_of, with_columns
from mouse_core.groups.stored import Range, StoredRollouts, select_rollouts
from mouse_core.groups.versions import version_name
from mouse_core.groups.waiting import SealingRules
from mouse_core.spec import check_count


@dataclass(slots=True, eq=False)
class _Request:
    given: Any
    answer: Any = None
    error: BaseException | None = None
    served: bool = False


class Requests:
    """Serves what threads ask for at the same time in one call."""

    def __init__(self) -> None:
        self._queue: list[_Request] = []
        self._guard = ProcessLock()
        self._turn = ProcessLock()

    def serve(self, given: Any, handle: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """The answer to one request.

        Args:
            given: What is asked for.
            handle: From several requests to their answers. If it fails for several, each is tried alone, so that an
                error reaches whom it is about.

        Raises:
            Exception: What ``handle`` raised. What interrupts this thread, such as KeyboardInterrupt, is raised here
                alone; the others that were to be served serve themselves.
        """
        request = _Request(given)
        with self._guard:
            self._queue.append(request)
        # Whoever comes first serves all that have come until then; the others find themselves served.
        with self._turn:
            if not request.served:
                with self._guard:
                    requests, self._queue = self._queue, []
                if request not in requests:
                    requests.insert(0, request)  # whoever took it was interrupted, by Ctrl-C perhaps
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


# Who waits looks so often whether the buffer is still the folder's: whoever takes it over can wake nobody here.
_LOOK_SECONDS = 0.5
# Bytes that the file is read to; it says who the owner is, and where.
_LONGEST = 1024


class Owner(Descriptor):
    """The right to write to a folder.

    It passes to whoever takes it last: a writer that was believed dead, and is not, finds out at its next step and
    changes nothing any more. A lock alone could not do that; it would keep the new writer out.

    Args:
        path: A file that says who the owner is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = os.getpid()
        self._token = uuid.uuid4().hex.encode()
        with storing(f"file {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Become the owner, once the present one has finished its step; keep all others out meanwhile."""
        lock(self._file, wait=True)
        try:
            with storing(f"file {self._path}"):
                named = self._token + b"\n" + this_process().encode()
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, named)
                os.ftruncate(self._file, len(named))
            yield
        finally:
            self._unlock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep all others out while something is written.

        Raises:
            ClosedError: Someone else has taken the folder, or it has been closed here.
            ForkError: This is a forked child.
        """
        if self._file < 0:
            raise ClosedError(f"rollout buffer: expected an open one, found {str(self._path.parent.parent)!r} closed")
        if os.getpid() != self._process:
            raise ForkError(
                f"rollout buffer: expected to be used in process {self._process}, found the forked child {os.getpid()}"
            )
        lock(self._file, wait=True)
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            token, _, owner = os.read(self._file, _LONGEST).partition(b"\n")
            if token != self._token:
                by = f", by {owner.decode(errors='replace')}" if owner else ""
                raise ClosedError(
                    f"rollout buffer: expected to own {str(self._path.parent.parent)!r}, found it opened anew since{by}"
                )
            yield
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._file >= 0:
            unlock(self._file)


# How long to wait before sealing is tried again, after the disk was full.
_RETRY_SECONDS = 5.0


class RolloutBuffer:
    """Rollouts on disk, group by group, and batches made of them.

    A group is the rollouts of one policy version on one problem. It is sealed, which means written to a Parquet file,
    when it is full, when it is older than a time-out, or on ``flush()``; groups that are sealed together share files.
    What ``add_rollouts`` has returned for is on the disk: a buffer that is made again for the same folder, also after a
    crash, has every such rollout once, and gives none to a batch that a stored batch has had.

    A folder has one buffer at a time. Making another one, in this process or elsewhere, takes the folder over, and the
    one before raises ``ClosedError``. Threads may share a buffer.

    Args:
        root_path: The folder, made if it is not there.
        group_size: Rollouts of a full group.
        min_group_size: Rollouts that a group needs to be sealed by the time-out; one alone cannot be scored.
        seal_timeout: Seconds after a group's first rollout until the group is sealed as it is.
        compression: Of messages, tokens and what else can be long: "zstd", "snappy", "gzip", "brotli", "lz4", "none".
        batch_maker: What batches are made by; without, there are none.
        capacity: The most rollouts that may wait for their groups; with more, the oldest groups are sealed as they are.
        columns: What rollouts may have beside what all have; None: what was declared for the folder. More may be
            declared when it is opened again; groups that are sealed do not wait for them, so late ones have a ``fill``.
        max_ahead: How many rollouts may wait for their groups, for late columns or to be drawn, where producers are to
            be held back; see ``add_rollouts``. None: any number. The batch maker then says how many are ``available``.
        memory_bytes: About how much memory rollouts may take that wait for their groups or, in a ``GrpoBatchMaker``, to
            be drawn. Others are read back from the log, or from their groups' files, when they are needed.
        sync: Whether to wait for the disk. Without, a crash of the process loses nothing; one of the machine does.
        digest: Whether a digest of the batches runs along, off by default: some 60 us an example; see ``digest``.

    Raises:
        ConfigError: An argument that cannot be used.
        DataError: A file in the folder is damaged, or is gone and had what no other file has; the message names it.
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
        capacity: int | None = None,
        *,
        columns: Iterable[RolloutColumn] | None = None,
        max_ahead: int | None = None,
        memory_bytes: int = 2**30,
        sync: bool = True,
        digest: bool = False,
    ) -> None:
        rules = SealingRules(group_size, min_group_size, seal_timeout, capacity)
        check_codec(compression)
        self._root = Path(root_path)
        self._making = None if batch_maker is None else Making(batch_maker)
        self._lock, self._requests, self._column_requests = ProcessLock(), Requests(), Requests()
        self._max_ahead = None if max_ahead is None else check_count("max_ahead", max_ahead)
        if max_ahead is not None and not hasattr(batch_maker, "available"):
            raise ConfigError(
                f"max_ahead: expected a batch_maker with an attribute 'available', found {batch_maker!r:.100}"
            )
        self._changed = threading.Condition(self._lock)
        self._is_lacking = False  # whether the last batch that was asked for could not be made
        with storing(f"folder {self._root}"):
            make_folder(self._root / STATE, sync=bool(sync))
            make_folder(self._root / BATCHES, sync=bool(sync))
        self._owner = Owner(self._root / STATE / "owner")
        try:
            with self._owner.taking():
                self._columns = declare(self._root, columns, sync=bool(sync))
                self._folder = Folder(
                    self._root,
                    rules,
                    self._making,
                    self._columns,
                    compression=compression,
                    sync=bool(sync),
                    digest=digest,
                    memory_bytes=check_count("memory_bytes", memory_bytes, 0),
                )
        except BaseException:
            self._owner.close()
            raise
        self._alarm = Alarm(self, RolloutBuffer._seal_due, "rollout-buffer-timeout")
        self._alarm.set(self._folder.waiting.next_due())

    # ------------------------------------------------------------------ what is there

    def __repr__(self) -> str:
        return (
            f"RolloutBuffer({str(self._root)!r}, groups={len(self._folder.parts)}, rollouts={len(self)}, "
            f"waiting={self._folder.waiting.count}, batches={len(self._folder.batches.stored)})"
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
        """The batch maker, if there is one."""
        return None if self._making is None else self._making.maker

    @property
    def num_ahead(self) -> int:
        """Rollouts that wait for their groups or for late columns, and examples that batches could be made of now."""
        return self._ahead()

    def _ahead(self) -> int:
        with self._lock:
            return self._folder.counts()[0] + int(getattr(self.batch_maker, "available", 0))

    def __len__(self) -> int:
        """Return the number of rollouts, sealed or waiting."""
        return len(self._folder.uids)

    def __contains__(self, rollout_uid: object) -> bool:
        return rollout_uid in self._folder.uids

    def contains(self, rollout_uids: Iterable[str]) -> list[bool]:
        """Return whether each rollout is there, sealed or waiting: so a producer that is back knows what arrived."""
        return [uid in self._folder.uids for uid in uids_of(rollout_uids)]

    @property
    def num_groups(self) -> int:
        """The number of sealed groups."""
        return len(self._folder.parts)

    @property
    def num_waiting(self) -> int:
        """The number of rollouts whose groups are not sealed yet."""
        return self._folder.waiting.count

    @property
    def digest(self) -> StreamDigest:
        """The digest of all stored batches: the sum of ``examples_digest(i, batch)`` over their numbers ``i``.

        It is kept with them, and begins anew after one that was stored without or whose file is gone. ConfigError: The
        buffer was made without ``digest=True``.
        """
        return asked_for(self._folder.batches.digest, "buffer")

    def rollouts(
        self,
        *,
        environment: str | None = None,
        policy_version: str | int | Collection[str | int] | None = None,
        example_id: str | int | Collection[str | int] | None = None,
        since: float | None = None,
        until: float | None = None,
        tokens: Range | None = None,
        rewards: Range | None = None,
    ) -> StoredRollouts:
        """Return the rollouts that are sealed so far; see ``open_rollouts``."""
        with self._lock:
            parts = list(self._folder.parts)
        return select_rollouts(
            self._root, parts, environment, policy_version, example_id, since, until, tokens, rewards
        )

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """Return a rollout, sealed or waiting, with the late columns that it has; only the file of its group is read.

        Raises:
            MissingRowError: There is no such rollout.
            DataError: The file is damaged; the message names it.
            StorageError: It cannot be read.
        """
        with self._lock:
            return self._folder.rollout(rollout_uid)

    def waiting_for(self) -> dict[str, Awaited]:
        """Return the rollouts that lack each late column: the work left for its writer, also after a restart."""
        with self._lock:
            return self._folder.readiness.awaited(self._folder.waiting.by_uid.values())

    def summary(self) -> dict[str, float]:
        """Return numbers for a log: the batch maker's ``summary``, if it has one, and how many rollouts there are.

        "stored" is all of them, "unsealed" those whose groups are not sealed, "awaiting_columns" those of sealed groups
        that wait for late columns, "queued" those that a batch maker of one's own is given with the next batch, and
        "given_up" those that nobody waits for any more. "received" is "stored" and, since the folder was opened, what
        came again or in calls that were refused. Each of them is counted once: in "unsealed", "awaiting_columns",
        "queued", "held", "used" or one "left/<reason>"; see ``GrpoBatchMaker.summary``.
        """
        with self._lock:
            return self._folder.summary()

    @property
    def batches(self) -> list[str]:
        """The ids of all stored batches, in order; old files may have been deleted since."""
        with self._lock:
            return [batch.batch_id for batch in self._folder.batches.stored]

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """Return a stored batch.

        Raises:
            MissingFieldError: There is no such batch.
            DataError: Its file is damaged.
            StorageError: It cannot be read.
        """
        return self._folder.batches.read_batch(batch_id)

    def batch_metadata(self, batch_id: str) -> dict[str, Any]:
        """Return the batch maker's metadata of a stored batch.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.batch_metadata(batch_id)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """Return how many versions each example of a batch was behind the newest when made, ``[B]``; NaN: unknown.

        The newest is that of all rollouts that had been added. Numbers are subtracted; of other versions those between
        are counted. Where a trainer went back behind an example's version since, the example is as many versions apart
        from the newest as lie on both lines: of 5, where ``set_policy_version`` told 3 and then 4, that is 2 + 1.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.batch_staleness(batch_id)

    # ------------------------------------------------------------------ adding

    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:
        """Add one rollout; return whether it was new. See ``add_rollouts``."""
        return self.add_rollouts([rollout], timeout=timeout) == 1

    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:
        """Add rollouts; when this returns, they are on the disk.

        A rollout whose uid has been added before is left out, so a call whose answer was lost can be repeated. With
        other content (but ``created`` and ``replica_id``) it is refused, unless the file that has it is gone. Calls of
        several threads at once share their waiting for the disk.

        With ``max_ahead`` a call waits while there are so many ahead (``num_ahead``), and is then carried out whole.
        After a batch that could not be made nobody waits until one is made, unless as many wait for late columns.

        Args:
            rollouts: What to add.
            timeout: Seconds to wait for room; None: as long as it takes.

        Returns:
            How many were new.

        Raises:
            DataError: No rollout, text that is not Unicode, a column that was not declared or has other values, a
                version beyond what ``set_policy_version`` told, a uid that was added with other content, or what the
                batch maker refuses; nothing was added.
            StorageError: They cannot be written. Those that were there before are still there; nothing was added.
            TimedOutError: There was no room in time; nothing was added.
            ClosedError, ForkError: The buffer is closed, or this is a forked child.
        """
        given = list(rollouts)
        if not given:
            return 0
        try:
            for number, rollout in enumerate(given):
                if not isinstance(rollout, RolloutRecord):
                    raise DataError(f"add_rollouts: expected a RolloutRecord at {number}, found {rollout!r:.100}")
                given[number] = with_columns(rollout, self._columns)
                self._folder.versions.refuse_ahead(rollout.policy_version, rollout.rollout_uid)
                if self._making is not None:
                    self._making.ask("check_rollout", rollout)
            if self._max_ahead is not None:
                self._wait_for_room(self._max_ahead, timeout)
            new: int = self._requests.serve(given, self._add)
        except DataError:
            with self._lock:
                self._folder.refused += len(given)
            raise
        return new

    def _wait_for_room(self, limit: int, timeout: float | None) -> None:
        """Wait until fewer than ``limit`` rollouts are ahead; never where a batch that was asked for lacks some.

        What waits for late columns goes on to be bounded even so: more rollouts are not what it lacks.
        """
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        with self._changed:
            while not self._is_lacking or self._folder.counts()[1] >= limit:
                if (ahead := self._ahead()) < limit:
                    return
                left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimedOutError(
                        f"add_rollouts: expected room within {timeout:g} s, found {ahead} rollouts ahead of "
                        f"max_ahead {limit}; batches make room, and nothing was added"
                    )
                with self._step():
                    pass  # an error where the buffer is not the folder's any more
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _wake(self) -> None:
        """Let those that wait for room look again."""
        with self._changed:
            self._changed.notify_all()

    def _add(self, requests: Sequence[Sequence[RolloutRecord]]) -> list[int]:
        """Add what several callers gave, with one wait for the disk; how many of each were new."""
        with self._step():
            counts, plan = self._folder.add(requests)
            if plan is not None:
                self._alarm.set(self._folder.waiting.next_due(plan.groups))
        return counts

    def add_column(self, name: str, values: Mapping[str, Any]) -> int:
        """Add a late column's values to rollouts that are there, sealed or not; on return they are on the disk.

        A rollout that has the same value already is left out, so a call that failed can be repeated. A group is given
        to the batch maker when all its rollouts have the late columns that were declared when it was sealed.

        Args:
            name: A ``RolloutColumn`` with ``late=True``; "reward" is the reward of rollouts that were added without.
            values: By uid: ``[n, *shape]`` over the tokens, or the turns, of all turns, or one value, ``shape``.

        Returns:
            How many were new.

        Raises:
            DataError: No late column, a uid that is not there, a value that is not one of the column, or another one
                than the rollout has; the message names it, and nothing was added.
            StorageError, ClosedError, ForkError: As ``add_rollouts``.
        """
        new: int = self._column_requests.serve((name, values), self._add_columns)
        return new

    def _add_columns(self, requests: Sequence[tuple[str, Any]]) -> list[int]:
        with self._step():
            counts = self._folder.add_columns(requests)
            self._wake()
        return counts

    def flush(self) -> int:
        """Seal every group that waits, whatever its size; return how many there were.

        Raises:
            StorageError: They cannot be written; they still wait.
            ClosedError, ForkError: As ``add_rollouts``.
        """
        with self._step():
            plan = self._folder.waiting.all()
            self._folder.carry_out(plan)
        return len(plan.sealed)

    def _seal_due(self) -> None:
        """Seal the groups that have waited long enough; called by the alarm."""
        try:
            with self._step():
                try:
                    self._folder.carry_out(self._folder.waiting.due(time.time()))
                finally:
                    retry = time.time() + _RETRY_SECONDS
                    due = self._folder.waiting.next_due()
                    self._alarm.set(due if due > time.time() else retry)
        except Exception:
            # Nobody is there to be told. The rollouts are in the log; whoever adds to a full disk is told.
            return

    # ------------------------------------------------------------------ batches

    def set_policy_version(self, version: str | int) -> None:
        """Set the latest policy version, in the folder and for the batch maker.

        Staleness is measured from it, and rollouts of later versions are refused. Say it again whenever the policy
        changes. Where a trainer goes back to an older one, as from a checkpoint, rollouts of later versions that are
        there are of a policy that is not trained on any more: they stay in their files, and are never drawn, also not
        once the new policy reaches their version. Batches that have some are stale: see ``batch_staleness``.

        Raises:
            DataError: Neither a str nor an int.
            StorageError: It cannot be noted; nothing has changed.
            ClosedError, ForkError: As ``add_rollouts``.
        """
        with self._step():
            self._folder.set_policy_version(version_name(version))

    def give_up(self, rollout_uids: Iterable[str]) -> int:
        """Give up rollouts, sealed or not, as those that a judge does not score; return how many are new.

        It is noted in the folder. Their groups are ready without them, and scored as if they did not exist; their files
        stay. A batch maker of one's own that has been given one may use it all the same, until a restart.

        Raises:
            DataError, MissingRowError: Something else than several uids, or one is not there; nothing has changed.
            StorageError: It cannot be noted; nothing has changed.
            ClosedError, ForkError: As ``add_rollouts``.
        """
        with self._step():
            count = self._folder.give_up(uids_of(rollout_uids))
            self._wake()
        return count

    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Let the batch maker make a batch, and store it.

        When this returns the batch is on the disk, and its rollouts count as used, also after a restart. A batch that
        could not be written is not lost: it is what the next call stores.

        Args:
            batch_size: How many examples.

        Returns:
            The batch's id, for ``read_batch``; None while there are too few rollouts.

        Raises:
            ConfigError: There is no batch maker, or ``batch_size`` is below 1.
            DataError: What the maker made is not a batch, or does not say of which rollouts; see ``BatchMaker``.
            StorageError: The batch cannot be written.
            ClosedError, ForkError: As ``add_rollouts``.
        """
        size = check_count("batch_size", batch_size)
        with self._step():
            batch_id = self._folder.batch(size)
            self._is_lacking = batch_id is None
            self._wake()
        return batch_id

    def batch_at(self, index: int, batch_size: int | None = None) -> str | None:
        """Return the id of a stored batch; several callers get the same one.

        Args:
            index: How many were stored before it.
            batch_size: Make the one that comes next, of so many examples, if it is that; None: make none.

        Raises:
            ConfigError: As ``create_and_store_batch``; a batch is to be made that others would have to come before.
            DataError, StorageError, ClosedError, ForkError: As ``create_and_store_batch``.
        """
        number = check_count("index", index, 0)
        with self._lock:
            stored = self._folder.batches.stored
            if number < len(stored):
                return stored[number].batch_id
            if batch_size is None:
                return None
            if number > len(stored):
                raise ConfigError(f"index: expected at most {len(stored)}, the batch that comes next, found {number}")
            return self.create_and_store_batch(batch_size)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Close the buffer; rollouts in the log go on waiting when the folder is opened again. May be called twice."""
        self._alarm.close()
        with self._lock:
            self._owner.close()
            self._folder.close()
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Keep other threads, and other owners of the folder, out while something changes."""
        refuse_traced("rollout buffer")
        with self._lock, self._owner.step():
            yield
