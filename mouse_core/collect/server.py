"""StoreServer: receives calls of clients in other processes on this machine, and writes to a store.

One thread accepts connections, and one thread for each client answers its calls. A connection begins with a "hello",
which names the client; a name belongs to one connection at a time.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any, Self

from mouse_core.collect.shared import SharedStore
from mouse_core.collect.wire import reachable, receive, send
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import remove, storing
from mouse_core.store.dataset_store import DatasetStore

SOCKET = "server.socket"
"""The name of the socket in the folder of a store."""
# Seconds that a hello waits for its name: a restarted client may connect before the server sees that its old connection
# is closed.
_PATIENCE_S = 5.0
# Seconds for a connection to send its hello, and to send or receive more of a message that has begun.
_HELLO_S, _STALL_S = 10.0, 60.0
_HELLO_BYTES = 4096
_PAUSE_S = 0.05


class StoreServer:
    """Writes the rows of clients in other processes on this machine to a store.

    For each client, a thread writes the client's rows, and answers when the rows are in the store. As a result, a
    client waits if it sends rows faster than the store can write them. The server's process may also write to the
    store, take snapshots and train. Clients wait until a server is restarted at the same address. Rows that a client
    sends twice are written once; see ``SharedStore``.

    Only processes of the same user can connect; the server never executes data that it receives. Memory for a message
    is allocated as its bytes arrive. If the process cannot open more files, new clients wait.

    Args:
        store: A writable store, in memory or opened with ``mode="a"``. The store stays open when the server is closed.
        address: The path of a socket; by default ``server.socket`` in the folder of the store, or in a temporary
            folder for a store in memory.

    Raises:
        ConfigError: ``store`` has another type, another server uses the address, or the system has no Unix sockets.
        StorageError: The socket cannot be created.

    Example:
        >>> from mouse_core import DatasetStore
        >>> from mouse_core.collect import StoreClient, StoreServer
        >>> store = DatasetStore()
        >>> with StoreServer(store) as server, StoreClient(server.address, "actor-0") as client:
        ...     client.extend({"action": [0, 1], "reward": [0.0, 1.0], "done": [0, 1]})
        >>> len(store)
        2
    """

    def __init__(self, store: DatasetStore, address: str | os.PathLike[str] | None = None) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("server: expected a system with Unix sockets, found none")
        self._shared = SharedStore(store)
        self._temporary_folder: str | None = None
        if address is None and self._shared.path is None:
            self._temporary_folder = tempfile.mkdtemp(prefix="mouse-")
            address = os.path.join(self._temporary_folder, SOCKET)
        elif address is None:
            address = os.path.join(self._shared.path or "", SOCKET)
        self.address = os.path.abspath(os.fspath(address))
        self._process = os.getpid()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._names: dict[str, threading.Thread] = {}
        self._change = threading.Condition()
        self._is_open = True
        try:
            self._listener = self._make_listener()
        except BaseException:
            self._shared.close()
            raise
        self._accept_thread = threading.Thread(target=self._accept, name="store-server", daemon=True)
        self._accept_thread.start()

    def __repr__(self) -> str:
        return f"StoreServer({self._shared!r}, address={self.address!r}, clients={self.clients})"

    def _make_listener(self) -> socket.socket:
        """Create the socket at the address, for processes of this user only. The socket of a server that died is
        replaced.
        """
        listener = socket.socket(socket.AF_UNIX)
        try:
            with storing(f"server {self.address}"), reachable(self.address) as path:
                if os.path.lexists(self.address):
                    self._remove_socket(path)
                listener.bind(path)
                # No process can connect before ``listen``. A umask would also change the files of other threads.
                os.chmod(path, 0o600)
                listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
        return listener

    def _remove_socket(self, path: str) -> None:
        """Remove the socket of a server that died; raise ConfigError for a server that lives, or another file."""
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"server: expected a free address, found a file at {self.address!r}")
        with socket.socket(socket.AF_UNIX) as other:
            code = other.connect_ex(path)
        if code == errno.ECONNREFUSED:
            os.unlink(path)
        elif code:
            raise OSError(code, os.strerror(code))
        else:
            raise ConfigError(f"server: expected a free address, found a server at {self.address!r}")

    @property
    def clients(self) -> dict[str, int]:
        """How many writes of each client the store has ever received."""
        return self._shared.counts

    # ------------------------------------------------------------------ threads

    def _accept(self) -> None:
        """Accept connections until the server is closed, and start a thread for each."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                with self._change:
                    if not self._is_open:
                        return
                time.sleep(_PAUSE_S)  # too many files are open; new clients wait in the queue of the socket
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="store-client", daemon=True)
            with self._change:
                if not self._is_open:
                    connection.close()
                    return
                self._connections[thread] = connection
            try:
                thread.start()
            except RuntimeError:  # too many threads
                self._drop(connection, thread)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the calls of one client until its connection ends."""
        thread = threading.current_thread()
        try:
            connection.settimeout(_HELLO_S)
            call, body = receive(connection, most_text=_HELLO_BYTES, most_bytes=0)
            error = self._claim_name(call, thread)
            send(connection, error or self._shared.answer(call, body))
            while not error:
                connection.settimeout(None)
                if not connection.recv(1, socket.MSG_PEEK):
                    return
                connection.settimeout(_STALL_S)
                call, body = receive(connection)
                if self._names.get(str(call.get("client"))) is not thread:
                    raise DataError("call: expected the client name of this connection")
                send(connection, self._shared.answer(call, body))
        except (OSError, DataError, MemoryError):
            pass  # the client is gone, or is no StoreClient
        finally:
            self._drop(connection, thread)

    def _drop(self, connection: socket.socket, thread: threading.Thread) -> None:
        """Close a connection, and release the name of its client."""
        connection.close()
        with self._change:
            self._connections.pop(thread, None)
            self._names = {name: other for name, other in self._names.items() if other is not thread}
            self._change.notify_all()

    def _claim_name(self, call: dict[str, Any], thread: threading.Thread) -> dict[str, Any] | None:
        """Reserve, for a connection, the client name in the connection's "hello"; return an error answer if the name is
        missing or in use.
        """
        name = call.get("client")
        if call.get("call") != "hello" or not isinstance(name, str):
            return {"error": "ConfigError", "message": "call: expected a hello with the client name", "count": 0}
        with self._change:
            if not self._change.wait_for(lambda: self._names.get(name, thread) is thread, _PATIENCE_S):
                message = f"client: expected a unique name, found {name!r}, the name of a connected client"
                return {"error": "ConfigError", "message": message, "count": 0}
            self._names[name] = thread
        return None

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Complete the calls in progress, and close all connections; the store stays open. A second call does
        nothing.
        """
        with self._change:
            was_open, self._is_open = self._is_open, False
        if not was_open or self._process != os.getpid():
            return
        # Remove the socket, so that no new client connects; shutting the listener down wakes the thread in ``accept``.
        remove(self.address)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accept_thread.join()
        with self._change:
            connections = dict(self._connections)
        for connection in connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        for thread in connections:
            thread.join()
        self._shared.close()
        if self._temporary_folder is not None:
            shutil.rmtree(self._temporary_folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
