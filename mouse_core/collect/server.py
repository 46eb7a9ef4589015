"""StoreServer, which writes the rows of clients on this machine to a store or a rollout buffer."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from mouse_core.collect.shared import SharedStore
from mouse_core.collect.wire import reachable, receive, send
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import remove, storing
from mouse_core.store.dataset_store import DatasetStore

SOCKET = "server.socket"
"""The name of the socket in the folder of a store."""
# A client that was killed and restarted may connect before the connection of the old one is seen to be closed.
_PATIENCE_S = 5.0
# Seconds for a connection to send its hello, and to send or receive more of a message that has begun.
_HELLO_S, _STALL_S = 10.0, 60.0
_HELLO_BYTES = 4096
_MOST_IDLE = 256
_PAUSE_S = 0.05


@runtime_checkable
class Shared(Protocol):
    """The target of a server's calls: ``SharedStore``, or ``mouse_core.groups.SharedBuffer``."""

    @property
    def path(self) -> str | None:
        """The folder of the store; None for a store in memory."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of writes or calls of each client."""

    def answer(self, call: Mapping[str, Any], body: memoryview) -> dict[str, Any]:
        """Answer a call: plain values, with errors among them, and bytes as "body", a list of memoryviews.

        Raises:
            ConnectionError: The server is closing, and the client repeats the call when the server is back.
        """

    def interrupt(self) -> None:
        """End all waiting."""

    def close(self) -> None:
        """Release resources; the store or buffer stays open."""


class IdleConnections:
    """The idle connections of a server, up to a number.

    With too many, the one that is idle longest is shut down: its client connects again with the next call.

    Args:
        most: The most idle connections.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[socket.socket, None] = {}  # the longest idle first
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Add a connection that is idle from now on."""
        with self._lock:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None
            while len(self._waiting) > self._most:
                self._shut_down()

    def remove(self, connection: socket.socket) -> bool:
        """Remove a connection, as a call begins or the connection ends; False if it was shut down."""
        with self._lock:
            return self._waiting.pop(connection, self) is None

    def make_room(self) -> None:
        """Shut down the connection that is idle longest, if any."""
        with self._lock:
            if self._waiting:
                self._shut_down()

    def _shut_down(self) -> None:
        connection = next(iter(self._waiting))
        del self._waiting[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class StoreServer:
    """Takes the rows of clients, in other processes of this machine, into a store.

    A thread for each client writes what it sends and answers when the rows are in the store, as if it had called
    ``extend`` there; so who sends faster than the store takes rows waits. A process may write to the store itself
    meanwhile, take snapshots and train. Clients wait for a server that is started again at the same address, and what
    they send twice is written once: see ``SharedStore``.

    Only processes of the same user reach it; nothing that is sent is run. Memory for what is sent is taken as it comes.
    Of many connections that wait for a call, those that wait longest are closed; their clients connect again by
    themselves.

    Args:
        store: A store that may be written to, in memory or opened with ``mode="a"``; or what else answers clients, as
            ``mouse_core.groups.SharedBuffer(buffer)``. It is not closed with the server.
        address: The path of a socket; by default ``server.socket`` in the folder of the store, or in a new one.

    Raises:
        ConfigError: Nothing of these, a server at this address, or a system without Unix sockets.
        StorageError: The socket cannot be made.

    Example:
        >>> from mouse_core import DatasetStore
        >>> from mouse_core.collect import StoreClient, StoreServer
        >>> store = DatasetStore()
        >>> with StoreServer(store) as server, StoreClient(server.address, "actor-0") as client:
        ...     client.extend({"action": [0, 1], "reward": [0.0, 1.0], "done": [0, 1]})
        >>> len(store)
        2
    """

    def __init__(self, store: DatasetStore | Shared, address: str | os.PathLike[str] | None = None) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("server: expected a system with Unix sockets, found none")
        self._shared: Shared = store if isinstance(store, Shared) else SharedStore(store)
        self._own_folder: str | None = None
        if address is None and self._shared.path is None:
            self._own_folder = tempfile.mkdtemp(prefix="mouse-")
            address = os.path.join(self._own_folder, SOCKET)
        elif address is None:
            address = os.path.join(self._shared.path or "", SOCKET)
        self.address = os.path.abspath(os.fspath(address))
        self._process = os.getpid()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._idle = IdleConnections(_MOST_IDLE)
        self._names: dict[str, threading.Thread] = {}
        self._change = threading.Condition()
        self._is_open = True
        try:
            self._listener = self._listening()
        except BaseException:
            self._shared.close()
            raise
        self._accepting = threading.Thread(target=self._accept, name="store-server", daemon=True)
        self._accepting.start()

    def __repr__(self) -> str:
        return f"StoreServer({self._shared!r}, address={self.address!r}, clients={self.clients})"

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with storing(f"server {self.address}"), reachable(self.address) as path:
                if os.path.lexists(self.address):
                    with socket.socket(socket.AF_UNIX) as other:
                        if not other.connect_ex(path):
                            raise ConfigError(f"server: expected a free address, found a server at {self.address!r}")
                    os.unlink(self.address)  # of one that died
                before = os.umask(0o177)
                try:
                    listener.bind(path)
                finally:
                    os.umask(before)
                listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
        return listener

    @property
    def clients(self) -> dict[str, int]:
        """The number of writes by each client that the store has ever received; for a rollout buffer, the number of
        calls by each client since serving began.
        """
        return self._shared.counts

    # ------------------------------------------------------------------ its threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                with self._change:
                    if not self._is_open:
                        return
                # Of open files there are too many; those who connect wait meanwhile.
                self._idle.make_room()
                time.sleep(_PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="store-client", daemon=True)
            with self._change:
                if not self._is_open:
                    connection.close()
                    return
                self._connections[thread] = connection
            self._idle.add(connection)
            try:
                thread.start()
            except RuntimeError:  # of threads there are too many
                self._drop(connection, thread)

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            connection.settimeout(_HELLO_S)
            call, body = receive(connection, most_text=_HELLO_BYTES, most_bytes=0)
            refused = self._named(call, thread)
            _send(connection, refused or self._shared.answer(call, body))
            while not refused:
                connection.settimeout(None)
                self._idle.add(connection)
                if not connection.recv(1, socket.MSG_PEEK) or not self._idle.remove(connection):
                    return
                connection.settimeout(_STALL_S)
                call, body = receive(connection)
                if self._names.get(str(call.get("client"))) is not thread:
                    raise DataError("call: expected the name that the connection has")
                _send(connection, self._shared.answer(call, body))
        except (OSError, DataError, MemoryError):
            pass  # it is gone, or is none of ours
        finally:
            self._drop(connection, thread)

    def _drop(self, connection: socket.socket, thread: threading.Thread) -> None:
        self._idle.remove(connection)
        connection.close()
        with self._change:
            self._connections.pop(thread, None)
            self._names = {name: other for name, other in self._names.items() if other is not thread}
            self._change.notify_all()

    def _named(self, call: dict[str, Any], thread: threading.Thread) -> dict[str, Any] | None:
        """Give the name in a hello to a connection; what to answer where another one has it, or there is none."""
        name = call.get("client")
        if call.get("call") != "hello" or not isinstance(name, str):
            return {"error": "ConfigError", "message": "call: expected one who said hello", "count": 0}
        with self._change:
            if not self._change.wait_for(lambda: self._names.get(name, thread) is thread, _PATIENCE_S):
                message = f"client: expected a name that no other client has, found {name!r}, which is connected"
                return {"error": "ConfigError", "message": message, "count": 0}
            self._names[name] = thread
        return None

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Answer what is being written, and let go of the clients; the store stays open. May be called twice."""
        with self._change:
            was_open, self._is_open = self._is_open, False
        if not was_open or self._process != os.getpid():
            return
        # Nobody else finds it from here on; a listener that is shut down wakes whoever waits for clients.
        remove(self.address)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        with self._change:
            connections = dict(self._connections)
        for connection in connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        self._shared.interrupt()
        for thread in connections:
            thread.join()
        self._shared.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    body = reply.pop("body", ())
    try:
        send(connection, reply, body)
    except DataError as error:  # too large to be sent
        send(connection, {"error": "DataError", "message": str(error)})
