"""RolloutClient and SharedBuffer: access to a rollout buffer from other processes."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from mouse_core._base.checks import check_seconds
from mouse_core.collect.client import Channel, Client
from mouse_core.collect.wire import read_batch
from mouse_core.errors import ConfigError, DataError, MouseError, TimedOutError
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.files import rollouts_to_table, rollouts_with, table_to_rollouts
from mouse_core.groups.records import Columns, RolloutRecord, uids_of, version_name, with_columns


class RolloutClient(Client):
    """Adds rollouts to a ``RolloutBuffer`` that another process on this machine has open.

    The other process serves the buffer with a ``StoreServer(SharedBuffer(buffer))``. When a call returns, its data is
    on disk, as for a direct call of the buffer. If the server stops, a call waits for a new server and is repeated;
    data that already arrived is not added twice. A client may be used by one thread at a time. Trainers read batches
    from
    the folder: ``RolloutStream(folder, ...)``.

    Args:
        address: The server's ``address``, or the buffer's folder.
        name: The unique name of this client; None: a new unique name.
        timeout_s: The largest number of seconds to wait until a server starts or restarts.

    Raises:
        ConfigError: Another client has the same name, or an argument is out of range.
        StorageError: No server answered in time.
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
        """The buffer's columns by name; each access sends a request."""
        self._look()
        assert self._declared is not None
        return self._declared

    @property
    def num_ahead(self) -> int:
        """``num_ahead`` of the buffer; each access sends a request."""
        return int(self._look()["num_ahead"])

    def __len__(self) -> int:
        return int(self._look()["size"])

    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:
        """Add one rollout; return whether it was new. See ``add_rollouts``."""
        return self.add_rollouts([rollout], timeout=timeout) == 1

    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:
        """Add rollouts; see ``RolloutBuffer.add_rollouts``. When the call returns, the rollouts are on disk.

        Args:
            rollouts: The rollouts to add.
            timeout: Seconds to wait for room; None: no limit.

        Returns:
            The number of new rollouts. This number is smaller than the number of added rollouts if the call was
            repeated because its answer was lost.

        Raises:
            DataError, TimedOutError: See ``RolloutBuffer.add_rollouts``; nothing was added.
            StorageError: See ``RolloutBuffer.add_rollouts``; also if no server answered in time, so that the result is
                unknown. Adding the rollouts again is safe.
            ClosedError, ForkError: The client or the buffer was closed, or the client belongs to the parent process.
        """
        given = list(rollouts)
        declared = self._columns_for(given)
        for number, rollout in enumerate(given):
            if not isinstance(rollout, RolloutRecord):
                raise DataError(f"add_rollouts: expected a RolloutRecord at index {number}, found {rollout!r:.100}")
            given[number] = with_columns(rollout, declared)
        if not given:
            return 0
        call = {"call": "add_rollouts", "declared": len(declared), "timeout": timeout}
        return int(self._call(call, [memoryview(rollouts_to_table(given, declared).serialize())])["result"])

    def _columns_for(self, rollouts: Sequence[RolloutRecord]) -> Columns:
        """Return the known columns; if rollouts have other columns, request the columns again."""
        if self._declared is not None:
            names = [name for rollout in rollouts for name in getattr(rollout, "columns", ())]
            names += [name for one in rollouts for turn in getattr(one, "turns", ()) for name in turn.columns]
            if self._declared.keys() >= set(names):
                return self._declared
        return self.columns

    def contains(self, rollout_uids: Iterable[str]) -> list[bool]:
        """Return whether each rollout is stored, sealed or not, so that a restarted producer knows which rollouts
        arrived.
        """
        return list(self._call({"call": "contains", "uids": uids_of(rollout_uids)})["result"])

    def __contains__(self, rollout_uid: object) -> bool:
        return isinstance(rollout_uid, str) and self.contains([rollout_uid])[0]

    def set_policy_version(self, version: str | int) -> None:
        """Set the latest policy version; see ``RolloutBuffer.set_policy_version``."""
        self._call({"call": "set_policy_version", "version": version_name(version)})

    def flush(self) -> int:
        """Seal every waiting group; return how many groups were sealed."""
        return int(self._call({"call": "flush"})["result"])


# Seconds after which a call that waits for room checks again whether the server is being closed.
_LOOK_SECONDS = 0.2

Answer = dict[str, Any]


class SharedBuffer:
    """Serves a ``RolloutBuffer`` through a ``mouse_core.collect.StoreServer`` to ``RolloutClient`` objects.

    The process that owns the buffer may also use it directly, from any thread.

    Args:
        buffer: The buffer, which stays open when the server closes. Each server needs its own ``SharedBuffer``.

    Raises:
        ConfigError: ``buffer`` is not a ``RolloutBuffer``.

    Example:
        >>> import tempfile
        >>> from mouse_core.collect import StoreServer
        >>> from mouse_core.groups import RolloutBuffer, RolloutClient, RolloutRecord, SharedBuffer, Turn
        >>> folder = tempfile.mkdtemp()
        >>> with RolloutBuffer(folder) as buffer, StoreServer(SharedBuffer(buffer)), RolloutClient(folder) as client:
        ...     turn = Turn("4", "assistant", [2], [-0.1])
        ...     client.add_rollouts([RolloutRecord("sums", "2 + 2", 1, "u1", [turn], 1.0)])
        1
    """

    def __init__(self, buffer: RolloutBuffer) -> None:
        if not isinstance(buffer, RolloutBuffer):
            raise ConfigError(f"buffer: expected a RolloutBuffer, found {buffer!r:.80}")
        self.buffer = buffer
        self._calls: Counter[str] = Counter()
        self._is_closing = threading.Event()
        self._answers: Mapping[str, Callable[[Mapping[str, Any], memoryview], Answer]] = {
            "hello": self._look,
            "look": self._look,
            "add_rollouts": self._add_rollouts,
            "contains": lambda call, body: {"result": buffer.contains(_texts(call, "uids"))},
            "flush": lambda call, body: {"result": buffer.flush()},
            "set_policy_version": self._set_policy_version,
        }

    def __repr__(self) -> str:
        return repr(self.buffer)

    @property
    def path(self) -> str:
        """The buffer's folder."""
        return str(self.buffer.root_path)

    @property
    def counts(self) -> dict[str, int]:
        """The number of answered calls of each client."""
        return dict(self._calls)

    def answer(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        """Answer a call with plain values; bytes are under the key "body". An error is also sent as an answer.

        Args:
            call: The request: ``{"call": name, "client": name}`` with the arguments of the call.
            body: The bytes of rollouts or values.

        Raises:
            ConnectionError: The server is being closed while the call waits for room; the client repeats the call.
        """
        try:
            kind = self._answers.get(str(call.get("call")))
            if kind is None:
                raise ConfigError(f"call: expected one of {sorted(self._answers)}, found {call.get('call')!r:.80}")
            found = kind(call, body)
            self._calls[str(call.get("client"))] += 1
            return found
        except MouseError as error:
            return {"error": type(error).__name__, "message": str(error.args[0] if error.args else error)}
        except ConnectionError:
            raise
        except Exception as error:  # the client needs an answer
            return {"error": "WorkerError", "message": f"buffer: cannot answer the call: {error!r}"}

    def _look(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        columns = self.buffer.columns.to_json()
        return {"columns": columns, "size": len(self.buffer), "num_ahead": self.buffer.num_ahead}

    def _add_rollouts(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        # Columns are never removed, so the number of columns that the client knew identifies the columns.
        declared = self.buffer.columns.first(int(call.get("declared", 0)))
        try:
            rollouts = table_to_rollouts(read_batch(body, rollouts_with(declared)), declared=declared)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"rollouts: cannot decode the rollouts that a client sent: {error}") from error
        timeout = call.get("timeout")
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        while True:
            left = _LOOK_SECONDS if deadline is None else max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
            try:
                return {"result": self.buffer.add_rollouts(rollouts, timeout=left)}
            except TimedOutError:
                if self._is_closing.is_set():
                    raise ConnectionAbortedError("the server is being closed") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _set_policy_version(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        self.buffer.set_policy_version(call.get("version"))  # type: ignore[arg-type]
        return {}

    def interrupt(self) -> None:
        """Wake the calls that wait for room; these calls fail, and their clients repeat the calls."""
        self._is_closing.set()

    def close(self) -> None:
        """Do nothing; the buffer stays open."""


def _texts(call: Mapping[str, Any], name: str) -> list[str]:
    given = call.get(name)
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise DataError(f"{name}: expected a list of texts, found {given!r:.80}")
    return given
