"""What a RolloutBuffer says of the rollouts and batches it has stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.digest import StreamDigest
from mouse_core.digest.states import asked_for
from mouse_core.groups._folder import Folder
from mouse_core.groups.stored.readiness import Awaited
from mouse_core.groups.stored.reading import Chosen, Range, StoredRollouts, select_rollouts
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.records import RolloutRecord, uids_of


class StoredInBuffer:
    """A buffer's stored rollouts and batches."""

    _folder: Folder
    _lock: ProcessLock
    _root: Path

    def __len__(self) -> int:
        """Rollouts, sealed or waiting."""
        return len(self._folder.uids)

    def __contains__(self, rollout_uid: object) -> bool:
        return rollout_uid in self._folder.uids

    def contains(self, rollout_uids: Iterable[str]) -> list[bool]:
        """Which rollouts are there, sealed or waiting, for each uid: so a producer that is back knows what arrived."""
        return [uid in self._folder.uids for uid in uids_of(rollout_uids)]

    @property
    def num_groups(self) -> int:
        """Sealed groups."""
        return len(self._folder.parts)

    @property
    def num_waiting(self) -> int:
        """Rollouts whose groups are not sealed yet."""
        return self._folder.waiting.count

    @property
    def digest(self) -> StreamDigest:
        """What batches were stored, in 128 bits: ``examples_digest(i, batch)`` of each with its number, added up.

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
        """The rollouts sealed so far; see ``open_rollouts``."""
        with self._lock:
            parts = list(self._folder.parts)
        chosen = Chosen(since, until, tokens, rewards)
        return select_rollouts(self._root, parts, environment, policy_version, example_id, chosen)

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """A rollout, sealed or waiting, with the late columns that it has; only the file of its group is read.

        Raises:
            MissingRowError: There is no such rollout.
            DataError: The file is damaged; the message names it.
            StorageError: It cannot be read.
        """
        with self._lock:
            return self._folder.rollout(rollout_uid)

    def waiting_for(self) -> dict[str, Awaited]:
        """Which rollouts each late column is awaited of: what is left to do for who writes it, also after a restart."""
        with self._lock:
            return self._folder.readiness.awaited(self._folder.waiting.by_uid.values())

    def summary(self) -> dict[str, float]:
        """Numbers for a log: those of the batch maker's ``summary``, if it has one, and how many rollouts there are.

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
        """A stored batch.

        Raises:
            MissingFieldError: There is no such batch.
            DataError: Its file is damaged.
            StorageError: It cannot be read.
        """
        return self._folder.batches.read(batch_id)

    def batch_metadata(self, batch_id: str) -> dict[str, Any]:
        """What the batch maker said of a stored batch.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.metadata(batch_id)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How many versions older than the newest the examples of a batch were when it was made, ``[B]``; NaN: unknown.

        The newest is that of all rollouts that had been added. Numbers are subtracted; of other versions those between
        are counted. Where a trainer went back behind an example's version since, the example is as many versions apart
        from the newest as lie on both lines: of 5, where ``set_policy_version`` told 3 and then 4, that is 2 + 1.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.staleness(batch_id)
