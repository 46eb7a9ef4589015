"""A dataset Hub on the loopback interface, complete enough for the real ``huggingface_hub`` and ``datasets``.

It keeps repositories as chains of immutable commits in memory, so that a test can ask what every single
commit looked like from outside, let somebody else commit at the worst moment, or make any request fail.
Only what those clients call is spoken; anything else answers 404 and is recorded in ``unknown``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from tests.core.hub_http import Handler
from tests.core.hub_state import READ_TOKEN, USER, WRITE_TOKEN, Commit, File, HubState

__all__ = ["READ_TOKEN", "USER", "WRITE_TOKEN", "Commit", "File", "HubServer", "running_hub"]


class HubServer(HubState):
    """The server, and what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()
