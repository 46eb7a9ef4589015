"""SharedBuffer: answers the clients of a rollout buffer."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mouse_core.collect.wire import decoded
from mouse_core.errors import ConfigError, DataError, MissingRowError, MouseError, TimedOutError
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.sharing.wire import decode_rollouts, encode_rollouts

# Who waits for room looks so often whether the server is being closed.
_LOOK_SECONDS = 0.2

Answer = dict[str, Any]


class SharedBuffer:
    """A ``RolloutBuffer`` for a ``mouse_core.collect.StoreServer``, whose clients are ``RolloutClient``.

    The process that has the buffer may use it meanwhile, from any thread.

    Args:
        buffer: It. It is not closed with the server; the next one takes a ``SharedBuffer`` of its own.

    Raises:
        ConfigError: Something else.

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
            "add_column": self._add_column,
            "waiting_for": self._waiting_for,
            "rollouts": self._rollouts,
            "contains": lambda call, body: {"result": buffer.contains(_texts(call, "uids"))},
            "give_up": lambda call, body: {"result": buffer.give_up(_texts(call, "uids"))},
            "flush": lambda call, body: {"result": buffer.flush()},
            "summary": lambda call, body: {"result": buffer.summary()},
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
        """How many calls of each client were answered."""
        return dict(self._calls)

    def answer(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        """What a client is answered: plain values, and bytes as "body". Errors are among them, and change nothing.

        Args:
            call: What is asked for: ``{"call": name, "client": name}`` and what goes with it.
            body: The bytes of rollouts or of values.

        Raises:
            ConnectionError: It waited for room, and is to ask again: the server is being closed.
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
        except Exception as error:  # whoever sent it must not wait for ever
            return {"error": "WorkerError", "message": f"buffer: expected to answer, found {error!r}"}

    def _look(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        counts = {name: getattr(self.buffer, name) for name in ("num_waiting", "num_ahead", "num_groups")}
        return {"columns": self.buffer.columns.to_json(), "size": len(self.buffer), **counts}

    def _add_rollouts(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        # Columns are only ever added: how many the client knew says which.
        rollouts = decode_rollouts(body, self.buffer.columns.first(int(call.get("declared", 0))))
        timeout = call.get("timeout")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise ConfigError(f"timeout: expected seconds, at least 0, or None, found {timeout!r:.80}")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_SECONDS if deadline is None else max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
            try:
                return {"result": self.buffer.add_rollouts(rollouts, timeout=left)}
            except TimedOutError:
                if self._is_closing.is_set():
                    raise ConnectionAbortedError("the server is being closed") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _add_column(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        uids, name = _texts(call, "uids"), call.get("name")
        values = decoded(call.get("values"), body).get("values", [])
        if len(values) != len(uids):
            raise DataError(f"add_column {name!r}: expected a value for each of {len(uids)} uids, found {len(values)}")
        return {"result": self.buffer.add_column(str(name), dict(zip(uids, values, strict=True)))}

    def _waiting_for(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        awaited = {name: [one.uids, one.oldest] for name, one in self.buffer.waiting_for().items()}
        return {"body": [memoryview(json.dumps(awaited).encode())]}

    def _rollouts(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        uids = _texts(call, "uids")
        missing = [uid for uid, there in zip(uids, self.buffer.contains(uids), strict=True) if not there]
        if missing and len(uids) > 1:
            raise MissingRowError(
                f"rollouts: expected the uids of some of {len(self.buffer)}, found {len(missing)} of {len(uids)} that "
                f"are not there, {missing[0]!r:.100} first; contains(uids) says which are"
            )
        rollouts = [self.buffer.rollout(uid) for uid in uids]
        declared = self.buffer.columns
        groups = [rollout.group_uid for rollout in rollouts]
        return {"columns": declared.to_json(), "groups": groups, "body": [encode_rollouts(rollouts, declared)]}

    def _set_policy_version(self, call: Mapping[str, Any], body: memoryview) -> Answer:
        self.buffer.set_policy_version(call.get("version"))  # type: ignore[arg-type]
        return {}

    def interrupt(self) -> None:
        """Let nobody wait for room any more."""
        self._is_closing.set()

    def close(self) -> None:
        """Nothing is held; the buffer stays open."""


def _texts(call: Mapping[str, Any], name: str) -> list[str]:
    given = call.get(name)
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise DataError(f"{name}: expected a list of texts, found {given!r:.80}")
    return given
