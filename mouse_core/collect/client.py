"""The class ``StoreClient``, which writes rows to a store of another process."""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import pyarrow as pa

from mouse_core._base.checks import as_record, columns_of
from mouse_core.collect.shared import error_of
from mouse_core.collect.wire import encoded, reachable, receive, send
from mouse_core.errors import ClosedError, ConfigError, DataError, ForkError, StorageError
from mouse_core.spec import Alignment, check_alignment

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
# A server answers a hello only after the earlier connection of the same name has ended.
_HELLO_S = 10.0


@runtime_checkable
class Channel(Protocol):
    """A transport of calls to a ``SharedStore``."""

    def connect(self, timeout_s: float) -> None:
        """Connect to the process of the ``SharedStore``. The client calls this method before its first call and after a
        failed call.

        Raises:
            OSError: The process cannot be reached now; a later attempt may succeed.
        """

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        """Send a call whose body is the concatenated ``parts``, and return the answer of ``SharedStore.answer``.

        Raises:
            OSError: No answer arrived; the call may have been carried out.
        """

    def close(self) -> None:
        """Close the connection; a second call does nothing."""


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
        reply, _ = receive(self._socket)
        self._socket.settimeout(None)  # only a hello is answered quickly; a write waits for earlier writes
        return reply

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class StoreClient:
    """Writes rows to a store that another process has open, through a ``StoreServer`` or a channel.

    A call returns when the rows are in the store. If the server stops, the client waits until the server restarts, and
    repeats unanswered calls; the rows of each call are written once. The rows of a call are contiguous in the store,
    unless the store's disk became full during the call. Only one thread at a time may use a client. If another client
    connects with the same name, later calls of the earlier client raise ConfigError.

    Args:
        address: The server's ``address``, or the folder of its store; or a ``Channel``.
        name: The name of this client, unique among all clients and the same after a restart. After a restart,
            ``written`` is the number of the client's writes that the store contains.
        timeout_s: Seconds to wait until a server starts or restarts.

    Raises:
        ConfigError: Another client has the same name, or an argument is out of range.
        StorageError: No answer arrived in time.
    """

    def __init__(self, address: str | os.PathLike[str] | Channel, name: str, *, timeout_s: float = 30.0) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ConfigError(f"name: expected a text of 1 to 200 characters, found {name!r:.80}")
        self.name = name
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise ConfigError(f"timeout_s: expected a number of seconds, 0 or more, found {timeout_s!r:.80}")
        self._timeout = float(timeout_s)
        self._channel = _channel_to(address)
        self._process, self._is_open = os.getpid(), True
        self._token = os.urandom(8).hex()
        self._is_connected = False
        self._count = 0
        self._call({"call": "hello"})

    def __repr__(self) -> str:
        return f"StoreClient({self._channel!r}, name={self.name!r}, written={self.written})"

    @property
    def written(self) -> int:
        """How many writes of this client the store contains, according to the server's last answer."""
        return self._count

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step; see ``DatasetStore.append``. To add many steps, ``extend`` is faster.

        Raises:
            SchemaError, DataError, StorageError, ClosedError: See ``extend``.
        """
        record = as_record(row)
        if record is None:
            raise DataError(f"append: expected a dict, found {row!r:.200}")
        self.extend({name: _one_row(value) for name, value in record.items()})

    def extend(self, columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Add many steps at once; see ``DatasetStore.extend``.

        Args:
            columns: See ``DatasetStore.extend``. Values are numbers, text, bytes, and lists and dicts of these; an
                image is the bytes of its file.

        Raises:
            MissingFieldError, SchemaError, DataError: See ``DatasetStore.extend``. The store is unchanged.
            StorageError: The store's disk is full, or no answer arrived in time. Without an answer it is unknown
                whether the rows are in the store; read ``written`` when the server runs again.
            ClosedError, ForkError: The client was closed, or belongs to the parent process.
        """
        fields, rows = columns_of(columns)
        if not rows:
            return
        described, parts = encoded(fields)
        self._call({"call": "write", "number": None, "columns": described}, parts)

    def flush(self) -> None:
        """Call ``flush()`` of the store: the rows become visible to readers, and durable according to the store's
        ``sync``.

        Raises:
            StorageError, ClosedError, ForkError: See ``extend``.
        """
        self._call({"call": "flush"})

    def describe(self, metadata: DatasetMetadata) -> None:
        """Add metadata of the rows; see ``DatasetStore.describe``. Recorders call this method.

        Raises:
            ConfigError, SchemaError, StorageError, ClosedError: See ``DatasetStore.describe`` and ``extend``.
        """
        self._call({"call": "describe", "metadata": metadata.to_json()})

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The store's columns by name; each access sends a request. See ``DatasetStore.columns``."""
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self._call({"call": "look"})["columns"])))
        return dict(zip(schema.names, schema.types, strict=True))

    @property
    def alignment(self) -> Alignment:
        """The store's alignment; each access sends a request."""
        return check_alignment(self._call({"call": "look"})["alignment"])

    def _call(self, call: dict[str, Any], parts: Sequence[memoryview] = ()) -> Mapping[str, Any]:
        """Send a call, and repeat the call until it is answered."""
        if not self._is_open:
            raise ClosedError(f"client {self.name!r}: expected an open client, found a closed client")
        if self._process != os.getpid():
            raise ForkError(
                f"client {self.name!r}: expected process {self._process}, found a forked child; create a client "
                "in the child"
            )
        call |= {"client": self.name, "token": self._token}
        sent, begin, pause = False, time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                if not self._is_connected:
                    self._connect()
                if call["call"] == "hello":
                    return {}
                if call["call"] == "write" and not (sent and self._count == call["number"]):
                    # A write that was sent and counted keeps its number, because only its answer was lost. The server
                    # compares the repeated rows with the stored rows.
                    call["number"] = self._count + 1
                sent = True
                reply = self._channel.exchange(call, parts)
            except (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError) as error:
                # If the queue of a busy server is full, the socket raises BlockingIOError.
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

    def _connect(self) -> None:
        self._channel.connect(self._timeout)
        self._answered(self._channel.exchange({"call": "hello", "client": self.name, "token": self._token}, ()))
        self._is_connected = True

    def _answered(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        count = reply.get("count")
        if isinstance(count, int) and ("error" not in reply or count):
            self._count = count
        error = error_of(reply)
        if error is not None:
            raise error
        return reply

    def close(self) -> None:
        """Disconnect; a second call does nothing. The effects of answered calls remain."""
        self._is_open = False
        if self._process == os.getpid():
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _channel_to(address: str | os.PathLike[str] | Channel) -> Channel:
    if isinstance(address, str | os.PathLike):
        return _Socket(os.path.abspath(os.fspath(address)))
    if not isinstance(address, Channel):
        raise ConfigError(f"address: expected the path of a server, or a Channel, found {address!r:.80}")
    return address


def _one_row(value: Any) -> Any:
    """Return a column with one value."""
    is_array = hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, str | bytes)
    return value[None] if is_array else [value]
