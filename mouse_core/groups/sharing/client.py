"""RolloutClient: producers and judges of a rollout buffer that another process of this machine has."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mouse_core.collect.client import Channel, Client
from mouse_core.collect.wire import encoded
from mouse_core.errors import DataError
from mouse_core.groups.sharing.wire import decode_rollouts, encode_rollouts
from mouse_core.groups.stored.readiness import Awaited
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.records import RolloutRecord, of_group, uids_of, with_columns, with_late
from mouse_core.groups.types.versions import version_name


class RolloutClient(Client):
    """Adds rollouts and late columns to a ``RolloutBuffer`` that another process of this machine has open.

    That process serves it, ``StoreServer(SharedBuffer(buffer))``. What is answered is on the disk, as if the buffer had
    been called there. Where the other side goes away, a call waits for it to come back and is made again, which changes
    nothing for what has arrived. A client is used by one thread at a time. Trainers read batches from the folder:
    ``RolloutStream(folder, ...)``.

    Args:
        address: The server's ``address``, or the buffer's folder.
        name: Tells this client from all others; None: one that no other has.
        timeout_s: How long to wait for the other side to come (back), in seconds.

    Raises:
        ConfigError: A name that another client has, or an argument out of range.
        StorageError: Nobody answered in time.
    """

    def __init__(
        self, address: str | os.PathLike[str] | Channel, name: str | None = None, *, timeout_s: float = 30.0
    ) -> None:
        self._declared: Columns | None = None
        super().__init__(address, f"{os.getpid()}-{uuid.uuid4().hex}" if name is None else name, timeout_s=timeout_s)

    def _look(self) -> Mapping[str, Any]:
        found = self._call({"call": "look"})
        self._declared = Columns.from_json(found["columns"], f"client {self.name!r}")
        return found

    @property
    def columns(self) -> Columns:
        """The buffer's columns, by name. Each time it is asked."""
        self._look()
        assert self._declared is not None
        return self._declared

    @property
    def num_ahead(self) -> int:
        """As of the buffer. Each time it is asked."""
        return int(self._look()["num_ahead"])

    def __len__(self) -> int:
        return int(self._look()["size"])

    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:
        """Add one rollout; whether it was new. See ``add_rollouts``."""
        return self.add_rollouts([rollout], timeout=timeout) == 1

    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:
        """Add rollouts; see ``RolloutBuffer.add_rollouts``. When this returns, they are on the disk.

        Args:
            rollouts: What to add.
            timeout: Seconds to wait for room; None: as long as it takes.

        Returns:
            How many were new: fewer than arrived now, where a call was made again whose answer was lost.

        Raises:
            DataError, TimedOutError: As there; nothing was added.
            StorageError: As there; or nobody answered in time, and it is not known whether they were added. Adding them
                again does no harm.
            ClosedError, ForkError: The client was closed, or belongs to the parent process; the buffer was closed.
        """
        given = list(rollouts)
        declared = self._columns_for(given)
        for number, rollout in enumerate(given):
            if not isinstance(rollout, RolloutRecord):
                raise DataError(f"add_rollouts: expected a RolloutRecord at {number}, found {rollout!r:.100}")
            given[number] = with_columns(rollout, declared)
        if not given:
            return 0
        call = {"call": "add_rollouts", "declared": len(declared), "timeout": timeout}
        return int(self._call(call, [encode_rollouts(given, declared)])["result"])

    def _columns_for(self, rollouts: Sequence[RolloutRecord]) -> Columns:
        """The columns as they were known, or as they are now where rollouts have others."""
        if self._declared is not None:
            names = [name for rollout in rollouts for name in getattr(rollout, "columns", ())]
            names += [name for one in rollouts for turn in getattr(one, "turns", ()) for name in turn.columns]
            if self._declared.keys() >= set(names):
                return self._declared
        return self.columns

    def add_column(self, name: str, values: Mapping[str, Any]) -> int:
        """Add a late column's values by uid; see ``RolloutBuffer.add_column``. How many were new.

        Raises:
            DataError: As there; nothing was added.
            StorageError, ClosedError, ForkError: As ``add_rollouts``.
        """
        if not isinstance(values, Mapping):
            raise DataError(f"add_column {name!r}: expected a dict of values by uid, found {values!r:.100}")
        described, parts = encoded({"values": list(values.values())})
        call = {"call": "add_column", "name": name, "uids": list(map(str, values)), "values": described}
        return int(self._call(call, parts)["result"])

    def waiting_for(self) -> dict[str, Awaited]:
        """Which rollouts each late column is awaited of; see ``RolloutBuffer.waiting_for``."""
        awaited = json.loads(bytes(self._call({"call": "waiting_for"})["body"]))
        return {name: Awaited(tuple(uids), oldest) for name, (uids, oldest) in awaited.items()}

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """A rollout, sealed or waiting, with the late columns that it has. Several at once: ``rollouts``.

        Raises:
            MissingRowError: There is no such rollout.
            DataError, StorageError: As of ``RolloutBuffer.rollout``, and of ``add_rollouts``.
        """
        return self.rollouts([rollout_uid])[0]

    def rollouts(self, rollout_uids: Sequence[str]) -> list[RolloutRecord]:
        """Rollouts by their uids; errors as those of ``rollout``. Which of them are there: ``contains``."""
        found = self._call({"call": "rollouts", "uids": uids_of(rollout_uids)})
        declared = Columns.from_json(found["columns"], f"client {self.name!r}")
        # A reward that came late is a column of its own, too.
        rollouts = [with_late(rollout, {}, declared) for rollout in decode_rollouts(found["body"], declared)]
        return list(map(of_group, rollouts, found["groups"]))

    def contains(self, rollout_uids: Iterable[str]) -> list[bool]:
        """Which rollouts are there, sealed or waiting, for each uid: so a producer that is back knows what arrived."""
        return list(self._call({"call": "contains", "uids": uids_of(rollout_uids)})["result"])

    def __contains__(self, rollout_uid: object) -> bool:
        return isinstance(rollout_uid, str) and self.contains([rollout_uid])[0]

    def give_up(self, rollout_uids: Iterable[str]) -> int:
        """Wait for some rollouts no more; see ``RolloutBuffer.give_up``. How many are new."""
        return int(self._call({"call": "give_up", "uids": uids_of(rollout_uids)})["result"])

    def set_policy_version(self, version: str | int) -> None:
        """Say which version of the policy is the latest; see ``RolloutBuffer.set_policy_version``."""
        self._call({"call": "set_policy_version", "version": version_name(version)})

    def flush(self) -> int:
        """Seal every group that waits; how many there were."""
        return int(self._call({"call": "flush"})["result"])

    def summary(self) -> dict[str, float]:
        """Numbers for a log; see ``RolloutBuffer.summary``."""
        found: dict[str, float] = self._call({"call": "summary"})["result"]
        return found
