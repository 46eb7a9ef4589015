"""StoreClient: writes rows to a store that another process has open; and what it shares with others."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import pyarrow as pa

from mouse_core._base.checks import as_record, columns_of
from mouse_core.collect.shared import error_of
from mouse_core.collect.wire import encoded, reachable, receive, send
from mouse_core.errors import ClosedError, ConfigError, DataError, ForkError, StorageError
from mouse_core.spec import Alignment, check_alignment

if TYPE_CHECKING:
    from mouse_core.about.dataset import About

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
# A server may wait for the end of a connection before, whose name a client has, before it answers a hello.
_HELLO_S = 10.0


@runtime_checkable
class Channel(Protocol):
    """Brings calls to a ``SharedStore``, wherever that is."""

    def connect(self, timeout_s: float) -> None:
        """Reach it anew; called before the first call, and after one that failed.

        Raises:
            OSError: It is not reached now, and may be later.
        """

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        """What ``SharedStore.answer`` answers to a call with these bytes, one part behind the other.

        Bytes that are part of the answer are its "body", a memoryview.

        Raises:
            OSError: It was not answered, and may have been carried out.
        """

    def close(self) -> None:
        """Let go; may be called twice."""


class _Socket:
    """A channel to a ``StoreServer``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def __repr__(self) -> str:
        return self._address

    def connect(self, timeout_s: float) -> None:
        self.close()
        path = self._address
        if os.path.isdir(path):
            path = os.path.join(path, "server.socket")
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(timeout_s)
            with reachable(path) as short:
                made.connect(short)
        except BaseException:
            made.close()
            raise
        made.settimeout(max(timeout_s, _HELLO_S))
        self._socket = made

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        if self._socket is None:
            raise ConnectionError("not connected")
        send(self._socket, call, parts)
        reply, body = receive(self._socket)
        self._socket.settimeout(None)  # only a hello is answered soon: a write takes as long as others do before it
        return {**reply, "body": body}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Client:
    """Calls to what a ``StoreServer`` serves, or to whatever a channel leads to, each made until it is answered.

    Args:
        address: As in ``StoreClient``.
        name: Tells this client from all others.
        timeout_s: How long to wait for the other side to come (back), in seconds.

    Raises:
        ConfigError, StorageError: As ``StoreClient``.
    """

    def __init__(self, address: str | os.PathLike[str] | Channel, name: str, *, timeout_s: float) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ConfigError(f"name: expected one of up to 200 letters, found {name!r:.80}")
        self.name = name
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise ConfigError(f"timeout_s: expected seconds from 0, found {timeout_s!r:.80}")
        self._timeout = float(timeout_s)
        self._channel = _channel_to(address)
        self._process, self._is_open = os.getpid(), True
        self._token = os.urandom(8).hex()
        self._is_connected = False
        self._call({"call": "hello"}, ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._channel!r}, name={self.name!r})"

    def _call(self, call: dict[str, Any], parts: Sequence[memoryview] = ()) -> Mapping[str, Any]:
        """Ask until it is answered."""
        if not self._is_open:
            raise ClosedError(f"client {self.name!r}: expected an open one, found it closed")
        if self._process != os.getpid():
            raise ForkError(
                f"client {self.name!r}: expected process {self._process}, found a forked child; make one there"
            )
        call |= {"client": self.name, "token": self._token}
        sent, begin, pause = False, time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                if not self._is_connected:
                    self._connect()
                if call["call"] == "hello":
                    return {}
                self._prepare(call, sent=sent)
                sent = True
                reply = self._channel.exchange(call, parts)
            except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError) as error:
                # A full queue of a server that is busy is a BlockingIOError.
                self._is_connected = False
                if time.monotonic() - begin > self._timeout:
                    known = "; whether it was carried out is not known" if sent and parts else ""
                    raise StorageError(
                        f"client {self.name!r}: expected an answer of {self._channel!r} within {self._timeout:g} s, "
                        f"found {error!r}{known}"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                return self._answered(reply)

    def _prepare(self, call: dict[str, Any], *, sent: bool) -> None:
        """See to what a call says, each time before it is sent."""

    def _connect(self) -> None:
        self._channel.connect(self._timeout)
        self._answered(self._channel.exchange({"call": "hello", "client": self.name, "token": self._token}, ()))
        self._is_connected = True

    def _answered(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        error = error_of(reply)
        if error is not None:
            raise error
        return reply

    def close(self) -> None:
        """Let go of the server; all that was answered is done. May be called twice."""
        self._is_open = False
        if self._process == os.getpid():
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreClient(Client):
    """Writes rows to a store that another process has open, of a ``StoreServer`` or whatever a channel leads to.

    A call returns when the rows are in the store. Where the other side goes away, the client waits for it to come back
    and sends again what was not answered; that is written once. Rows of a call lie together in the store, unless its
    disk was full in between. A client is used by one thread at a time.
    A name is taken over by the next client that has it: what the one before sends is an error from then on.

    Args:
        address: The server's ``address``, or the folder of its store; or a ``Channel``.
        name: Tells this client from all others, also when it is started again: ``written`` says then how many of its
            calls are in the store, from which on it goes on.
        timeout_s: How long to wait for the other side to come (back), in seconds.

    Raises:
        ConfigError: A name that another client has, or an argument out of range.
        StorageError: Nobody answered in time.
    """

    def __init__(self, address: str | os.PathLike[str] | Channel, name: str, *, timeout_s: float = 30.0) -> None:
        self._count = 0
        super().__init__(address, name, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"StoreClient({self._channel!r}, name={self.name!r}, written={self.written})"

    @property
    def written(self) -> int:
        """How many calls of clients of this name wrote rows to the store, as the last answer said."""
        return self._count

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step; see ``DatasetStore.append``. Many at once are cheaper.

        Raises:
            SchemaError, DataError, StorageError, ClosedError: As ``extend``.
        """
        record = as_record(row)
        if record is None:
            raise DataError(f"append: expected a dict, found {row!r:.200}")
        self.extend({name: _alone(value) for name, value in record.items()})

    def extend(self, columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add many steps at once; see ``DatasetStore.extend``.

        Args:
            columns: As there, of numbers, text, bytes, and lists and dicts of such; an image as the bytes of its file.

        Raises:
            MissingFieldError, SchemaError, DataError: As there. The store is unchanged.
            StorageError: The store's disk is full, or nobody answered in time. Then it is not known whether the rows
                are in the store; ``written`` says so once the other side is there again.
            ClosedError, ForkError: The client was closed, or belongs to the parent process.
        """
        fields, rows = columns_of(columns)
        if not rows:
            return
        described, parts = encoded(fields)
        self._call({"call": "write", "number": None, "columns": described}, parts)

    def flush(self) -> None:
        """``flush()`` of the store: readers see the rows, and they are on the disk as its ``sync`` says.

        Raises:
            StorageError, ClosedError, ForkError: As ``extend``.
        """
        self._call({"call": "flush"}, ())

    def describe(self, about: About) -> None:
        """Say something of the rows that are sent; see ``DatasetStore.describe``. Recorders do it by themselves.

        Raises:
            ConfigError, SchemaError, StorageError, ClosedError: As there, and as ``extend``.
        """
        self._call({"call": "describe", "about": about.to_json()}, ())

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The store's columns, by name; see ``DatasetStore.columns``. Each time it is asked."""
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self._call({"call": "look"}, ())["columns"])))
        return dict(zip(schema.names, schema.types, strict=True))

    @property
    def alignment(self) -> Alignment:
        """The store's alignment. Each time it is asked."""
        return check_alignment(self._call({"call": "look"}, ())["alignment"])

    def _prepare(self, call: dict[str, Any], *, sent: bool) -> None:
        if call["call"] == "write" and not (sent and self._count == call["number"]):
            # Else only its answer was lost, and these rows are compared with those that are there.
            call["number"] = self._count + 1

    def _answered(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        count = reply.get("count")
        if isinstance(count, int) and ("error" not in reply or count):
            self._count = count
        return super()._answered(reply)


def _channel_to(address: str | os.PathLike[str] | Channel) -> Channel:
    if isinstance(address, str | os.PathLike):
        return _Socket(os.path.abspath(os.fspath(address)))
    if not isinstance(address, Channel):
        raise ConfigError(f"address: expected the path of a server, or a Channel, found {address!r:.80}")
    return address


def _alone(value: Any) -> Any:
    """A value as the only one of a column."""
    is_array = hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, str | bytes)
    return value[None] if is_array else [value]
