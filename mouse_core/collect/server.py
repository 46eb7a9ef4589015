"""StoreServer: takes what clients on this machine send, into a store or a rollout buffer."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
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
"""What the socket is called in the folder of a store."""
_WAITING = 128
# A client that was killed and started again may be there before the old one's connection is seen to be closed.
_PATIENCE_S = 5.0


@runtime_checkable
class Shared(Protocol):
    """What a server serves: ``SharedStore``, and ``mouse_core.groups.SharedBuffer``."""

    @property
    def path(self) -> str | None:
        """The folder that it lies in, where it lies in one."""

    @property
    def counts(self) -> dict[str, int]:
        """How much came of each client."""

    def answer(self, call: Mapping[str, Any], body: memoryview) -> dict[str, Any]:
        """What a client is answered: plain values, errors among them, and bytes as "body", a list of memoryviews.

        Raises:
            ConnectionError: The server is closed, and the client is to ask again when it is back.
        """

    def interrupt(self) -> None:
        """Let nobody wait any more."""

    def close(self) -> None:
        """Let go; what is served stays open."""


class StoreServer:
    """Takes the rows of clients, in other processes of this machine, into a store.

    A thread for each client writes what it sends and answers when the rows are in the store, as if it had called
    ``extend`` there; so who sends faster than the store takes rows waits. A process may write to the store itself
    meanwhile, take snapshots and train. Clients wait for a server that is started again at the same address, and what
    they send twice is written once: see ``SharedStore``.

    Only processes of the same user reach it; nothing that is sent is run.

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
                listener.listen(_WAITING)
        except BaseException:
            listener.close()
            raise
        return listener

    @property
    def clients(self) -> dict[str, int]:
        """How many writes of each client are in the store, of all that there ever were; of a rollout buffer how many
        calls each has made since it is served.
        """
        return self._shared.counts

    # ------------------------------------------------------------------ its threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="store-client", daemon=True)
            with self._change:
                if not self._is_open:
                    connection.close()
                    return
                self._connections[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            while True:
                call, body = receive(connection)
                refused = self._named(call.get("client"), thread) if call.get("call") == "hello" else None
                reply = refused or self._answer(call, body, thread)
                send(connection, reply, reply.pop("body", ()))
        except (OSError, DataError):
            pass  # it is gone, or is none of ours
        finally:
            connection.close()
            with self._change:
                self._connections.pop(thread, None)
                self._names = {name: other for name, other in self._names.items() if other is not thread}
                self._change.notify_all()

    def _answer(self, call: dict[str, Any], body: memoryview, thread: threading.Thread) -> dict[str, Any]:
        if self._names.get(str(call.get("client"))) is not thread:
            return {"error": "ConfigError", "message": "call: expected one who said hello", "count": 0}
        return self._shared.answer(call, body)

    def _named(self, name: Any, thread: threading.Thread) -> dict[str, Any] | None:
        """Give a name to a connection; what to answer where another one has it."""
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
