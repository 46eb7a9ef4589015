"""SharedStore: writes the rows of several clients to one store, each write exactly once.

A client numbers its writes: 1, 2, 3. A log in the store's folder records which writes are in the store. Before rows are
written, a record is added to the log. It contains the client, the number of the write, the number of rows written to
the store so far, and the number of rows in the write::

    actor-1, write 7: 100 rows after row 5,200      the process dies
    the store is opened again, and has 5,260 rows   so the store has 60 of the 100 rows

When actor-1 repeats the unanswered write 7, the other 40 rows are written. The log also records the number of rows when
the folder is opened (``store.disk.folder.note_opened``): rows that the store's owner appends later belong to no client.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core import errors
from mouse_core._base.checks import UNREADABLE
from mouse_core.collect.wire import decoded
from mouse_core.errors import ConfigError, DataError, MouseError, StorageError
from mouse_core.files.checksum import RunningDigest
from mouse_core.files.log import Log
from mouse_core.metadata import DatasetMetadata
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.disk.folder import CLIENTS

_MOST_RECORDS = 10_000


@dataclass(frozen=True)
class _Write:
    """The record of a client's last write.

    Args:
        client: The name of the client.
        number: The number of the write, from 1.
        begin: Number of rows that the store had received before this write, or before the last attempt of this write.
        rows: The number of rows.
        digest: The digest of the columns' description and bytes.
        done: The number of this write's rows in the store. None: the rows that the store received after ``begin``
            belong to this write, up to the number ``rows``.
        before: How many rows of this write were written by earlier attempts.
    """

    client: str
    number: int
    begin: int
    rows: int
    digest: str
    done: int | None = None
    before: int = 0

    def settled(self, written: int) -> _Write:
        """Return the write with ``done`` set. ``written`` is the total number of rows that the store has received. No
        other writer has written since ``begin``.

        Example: a write of 100 rows begins after row 5,200. If 5,260 rows were written, 60 of the rows are in the
        store; with 5,300 or more, all 100.
        """
        there = self.before + min(max(written - self.begin, 0), self.rows - self.before)
        return replace(self, done=there if self.done is None else min(self.done, there))

    @property
    def count(self) -> int:
        """The number of the client's writes that are in the store."""
        return self.number if self.done == self.rows else self.number - 1


class SharedStore:
    """Writes the rows of named clients to a store, each write exactly once; any thread may call it.

    For a store in a folder, the records of the clients are in the same folder, so they are kept after the process ends,
    like the rows. Any thread of this process may also write rows directly to the store.

    A name belongs to the client that last sent "hello", so that a killed client can be restarted. Later calls of an
    earlier client with this name raise ConfigError.

    Args:
        store: A writable store, in memory or opened with ``mode="a"``.

    Raises:
        ConfigError: ``store`` is not a writable store.
        DataError: The records of the clients are damaged.
        StorageError: The records cannot be read or written.
    """

    def __init__(self, store: DatasetStore) -> None:
        if not isinstance(store, DatasetStore):
            raise ConfigError(f"store: expected a DatasetStore to write to, found {store!r:.80}")
        self.store = store
        self._lock = threading.Lock()
        self._log = None if store.path is None else Log(Path(store.path) / CLIENTS)
        self._last = {} if self._log is None else _last_of(self._log, store.written)
        # failed writes, with the number of their stored rows, that are not in the log yet
        self._owed: list[_Write] = []
        self._tokens: dict[str, str] = {}  # the token of each name's client
        self._outdated: set[tuple[str, str]] = set()  # names and tokens of earlier clients
        self._records = _MOST_RECORDS  # the log is rewritten before the first write
        if self._last:
            self._rewrite()

    def __repr__(self) -> str:
        return repr(self.store)

    @property
    def path(self) -> str | None:
        """The store's folder; None without a folder."""
        return None if self.store.path is None else str(self.store.path)

    @property
    def counts(self) -> dict[str, int]:
        """The number of each client's writes that are in the store."""
        return {name: write.count for name, write in dict(self._last).items()}

    def answer(self, call: Mapping[str, Any], body: memoryview) -> dict[str, Any]:
        """Return the answer to a call as plain values. If the answer is an error, the store is unchanged.

        Args:
            call: ``{"call": name, "client": name}``, where the call's name is "hello", "write", "flush", "describe" or
                "look", with a ``token`` that distinguishes clients of the same name. A "write" contains its ``number``
                and the description of its ``columns``; a "describe" contains ``metadata``.
            body: The bytes of the columns.
        """
        client = call.get("client")
        try:
            if not isinstance(client, str) or not 0 < len(client) <= 200:
                raise ConfigError(f"client: expected a name of 1 to 200 characters, found {client!r:.80}")
            self._check_name(client, str(call.get("token", "")), is_hello=call.get("call") == "hello")
            if call.get("call") == "write":
                number = call.get("number")
                if isinstance(number, bool) or not isinstance(number, int):
                    raise ConfigError(f"write: expected the sequence number of a write, found {number!r:.80}")
                self._write(client, number, call.get("columns"), body)
            elif call.get("call") == "flush":
                self.flush()
            elif call.get("call") == "describe":
                self.store.describe(DatasetMetadata.from_json(call.get("metadata"), label=f"client {client!r}"))
            elif call.get("call") not in ("hello", "look"):
                known = "'hello', 'write', 'flush', 'describe' or 'look'"
                raise ConfigError(f"call: expected {known}, found {call.get('call')!r:.80}")
            return {"count": self._count(client)} | (self._look() if call.get("call") == "look" else {})
        except MouseError as error:
            return self._refusal(client, type(error).__name__, str(error))
        except Exception as error:  # the client must get an answer
            return self._refusal(client, "WorkerError", f"writer: the rows could not be written: {error!r}")

    def _look(self) -> dict[str, str]:
        """Return the store's columns and alignment as plain values, for a recorder."""
        columns = pa.schema(list(self.store.columns.items())).serialize().to_pybytes()
        return {"columns": base64.b64encode(columns).decode(), "alignment": self.store.alignment}

    def flush(self) -> None:
        """Call ``store.flush()``, after flushing the log of clients, according to the store's ``sync``."""
        with self._lock:
            if self._last and self.store.sync != "none":
                # The log is flushed first, so that the client of every row on disk is known.
                self._note(next(reversed(self._last.values())), sync=True)
            self.store.flush()

    def close(self) -> None:
        """Close the log; the store stays open."""
        with self._lock:
            if self._log is not None:
                with suppress(StorageError):
                    self._note()
                self._log.close()

    def _refusal(self, client: Any, kind: str, message: str) -> dict[str, Any]:
        return {"error": kind, "message": message, "count": self._count(client) if isinstance(client, str) else 0}

    def _count(self, client: str) -> int:
        last = self._last.get(client)
        return 0 if last is None else last.count

    def _check_name(self, client: str, token: str, *, is_hello: bool) -> None:
        """Assign a name to the client that sends "hello" with a new token; raise ConfigError for later calls of the
        client that had the name before.
        """
        with self._lock:
            has = self._tokens.setdefault(client, token)
            if is_hello and has != token and (client, token) not in self._outdated:
                self._outdated.add((client, has))
                self._tokens[client] = token
            elif has != token:
                raise ConfigError(
                    f"client: expected a unique name, found {client!r}, the name of another connected client"
                )

    def _write(self, client: str, number: int, described: Any, body: memoryview) -> None:
        columns = decoded(described, body)
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"extend: expected columns of equal length, found {lengths}")
        rows = next(iter(lengths.values()))
        hashed = RunningDigest(json.dumps(described).encode())
        hashed.update(body)
        digest = hashed.hexdigest()
        with self._lock:
            count, last = self._count(client), self._last.get(client)
            again = last is not None and (last.number, last.rows, last.digest) == (number, rows, digest)
            if again and number == count:
                return  # the call was repeated because its answer was lost
            if number != count + 1:
                other = "others" if number == count else f"number {number}"
                has = f"client {client!r}: expected the rows of its write number {count + 1}, found {other}"
                raise ConfigError(f"{has}; does another client have the same name?")
            done = (last.done or 0) if again and last is not None else 0
            if done:
                columns = {name: values[done:] for name, values in columns.items()}
            with self.store.lock:  # no other rows come between the log entry and the rows
                write = _Write(client, number, self.store.written, rows, digest, before=done)
                self._note(write)
                try:
                    self.store.extend(columns)
                except BaseException:
                    # On a full disk, some rows may be written. Their number is recorded now, so that rows of later
                    # writers do not count as the missing rows.
                    settled = write.settled(self.store.written)
                    self._keep(settled)
                    self._owed.append(settled)
                    with suppress(StorageError):
                        self._note()
                    raise
            self._keep(replace(write, done=rows))

    def _keep(self, write: _Write) -> None:
        self._last.pop(write.client, None)
        self._last[write.client] = write  # the newest write is the last item

    def _note(self, *writes: _Write, sync: bool = False) -> None:
        """Append to the log the records that the log does not contain yet, and then ``writes``."""
        if self._log is None:
            return
        if self._records >= _MOST_RECORDS:
            self._rewrite()
        for write in [*self._owed, *writes]:
            self._log.append(json.dumps(asdict(write)).encode(), sync=sync or self.store.sync == "append")
            self._records += 1
        self._owed.clear()

    def _rewrite(self) -> None:
        """Rewrite the log with the last write of each client.

        The rows of these writes are flushed first: otherwise, a power cut could lose rows of these writes, and the log
        would no longer contain the earlier writes.
        """
        assert self._log is not None
        self.store.flush()
        self._log.rewrite(json.dumps(asdict(write)).encode() for write in self._last.values())
        self._records = 0


def _last_of(log: Log, written: int) -> dict[str, _Write]:
    """Return the last write of each client, with the number of its rows in the store."""
    last: dict[str, list[_Write]] = {}

    def settle(written: int) -> None:
        for client, writes in last.items():
            # A power cut can lose the rows of several writes: the last write that began with all earlier rows counts.
            begun = [write for write in writes if write.begin <= written] or writes[:1]
            last[client] = [begun[-1].settled(written)]

    for record in log.records:
        try:
            said = json.loads(record)
            if said.keys() == {"opened"}:
                # At the time of this record, the rows of earlier writes are in the store; later rows belong to no
                # earlier write.
                settle(int(said["opened"]))
                continue
            write = _Write(**said)
        except UNREADABLE as error:
            raise DataError(f"log {log.path}: expected a client's write, found {record!r:.80}") from error
        writes = last[write.client] = last.pop(write.client, [])  # the newest write is of the last client
        writes.append(write)
    log.records = []
    settle(written)
    return {client: write for client, (write,) in last.items()}


def error_of(reply: Mapping[str, Any]) -> MouseError | None:
    """Return the error in an answer as an exception of the error's class; None if the answer contains no error."""
    if "error" not in reply:
        return None
    kind = getattr(errors, str(reply["error"]), MouseError)
    if not (isinstance(kind, type) and issubclass(kind, MouseError)):
        kind = MouseError
    return kind(str(reply.get("message")))
