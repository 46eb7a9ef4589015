"""The server of the viewer, which shows stores on a page in a browser or a notebook on this machine."""

from __future__ import annotations

import hmac
import html
import json
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ChangedError, MouseError
from mouse_core.store.views import Store
from mouse_core.view.answers import Answers
from mouse_core.view.opening import Shown, shown_of

_PAGE = Path(__file__).with_name("page")
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_MODULES = ("view", "pane", "list", "charts", "episode", "batches", "tools")
# All files of the page. No other file on disk is served.
_FILES = {f"{name}.js": (_PAGE / f"{name}.js", _SCRIPT) for name in _MODULES}
_FILES["view.css"] = (_PAGE / "view.css", _STYLE)
_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>mouse view</title><link rel="icon" href="data:,"><link rel="stylesheet" href="view.css">
<script src="plotly.min.js" defer></script><script type="module" src="view.js"></script></head>
<body><noscript>This page is made of scripts.</noscript></body></html>
"""
# Scripts come only from this server, and none is inline in the page. Plotly sets styles of its elements.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    # Pages of this machine, such as a notebook, may show the viewer in a frame.
    "frame-ancestors http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"
)


def plotly_script() -> Path:
    """Return the path of Plotly's script in the installed package.

    Raises:
        ImportError: Plotly is not installed.
    """
    spec = find_spec("plotly")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    script = folder / "package_data" / "plotly.min.js" if folder is not None else None
    if script is None or not script.is_file():
        raise ImportError("the page needs Plotly, which draws its plots: pip install 'mouse-data[view]'")
    return script


class Viewer:
    """A page that shows stores, until the viewer is closed; ``view`` creates a viewer.

    In a notebook, the page is shown in the output of the cell. Background threads serve the page over HTTP on the
    loopback interface. The address of the page contains a random token. The server sends no data if a request lacks the
    token, or if the request's header ``Host`` has another host name.

    Args:
        shown: The stores and sources.
        port: The port; 0 for any free port.
        height: Height of the page in a notebook, in pixels.

    Raises:
        ImportError: Plotly is not installed.
        OSError: The port is in use.
    """

    def __init__(self, shown: Sequence[Shown], *, port: int = 0, height: int = 800) -> None:
        self._height = height
        self._server = _Listener(port, Answers(shown))
        self._url = f"http://127.0.0.1:{self._server.server_port}/{self._server.token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="mouse-view")
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with a random token.

        Every user of this machine who knows the address can read the shown data.
        """
        return self._url

    def wait(self) -> None:
        """Wait until the viewer is closed, or the user presses Ctrl-C.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C.
        """
        self._thread.join()

    def close(self) -> None:
        """Stop the server."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Viewer({self.url!r})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe src="{html.escape(self.url)}" style="{style}" title="mouse view"></iframe>'


class _Listener(ThreadingHTTPServer):
    """HTTP server with a thread for each connection.

    Args:
        port: The port; 0 for any free port.
        answers: The answers to the requests.
    """

    daemon_threads = True
    request_queue_size = socket.SOMAXCONN

    def __init__(self, port: int, answers: Answers) -> None:
        self.answers, self.token = answers, secrets.token_urlsafe(18)
        self.files = {**_FILES, "plotly.min.js": (plotly_script(), _SCRIPT)}
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client closed the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handler of a connection."""

    server: _Listener

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "mouse", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer a request."""
        port = self.server.server_port
        if self.headers.get("Host", "") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._say(HTTPStatus.FORBIDDEN, "expected this machine's address as Host, found another address")
            return
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "expected a valid path, found an invalid path")
            return
        _, token, *rest = [*asked.path.split("/"), ""]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._say(
                HTTPStatus.FORBIDDEN, "expected the token of this viewer in the address, found none or another token"
            )
            return
        name = "/".join(rest).removesuffix("/") if rest else ""
        try:
            self._answer(name, dict(parse_qsl(asked.query)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page no longer needs the answer
        except ChangedError as error:
            self._say(HTTPStatus.CONFLICT, str(error))
        except (MouseError, ImportError, OSError) as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))

    def _answer(self, name: str, asked: dict[str, str]) -> None:
        files, answers = self.server.files, self.server.answers
        if not name:
            self._send(HTTPStatus.OK, _HTML.encode(), "text/html; charset=utf-8")
        elif name in files:
            path, kind = files[name]
            self._send(HTTPStatus.OK, path.read_bytes(), kind)
        elif name in answers.known:
            found = json.dumps(answers.known[name](asked), allow_nan=False)
            self._send(HTTPStatus.OK, found.encode(), "application/json")
        elif name in answers.pictures:
            self._send(HTTPStatus.OK, *answers.pictures[name](asked), kept=True)
        else:
            self._say(HTTPStatus.NOT_FOUND, "expected the name of a page or an answer, found an unknown name")

    def _say(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"error": " ".join(message.split())}).encode()
        self._send(status, body, "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, kept: bool = False) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            # URLs of images contain the generation of the rows, so images never change; all other answers may change.
            "Cache-Control": "private, max-age=600" if kept else "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing, because an address contains the token."""


def view(
    *stores: Store | BatchSource,
    names: tuple[str, ...] | list[str] = (),
    port: int = 0,
    height: int = 800,
) -> Viewer:
    """Show the episodes of stores step by step, and the windows of batches, on a page of this machine.

    The table of episodes, ``Store.episodes``, is computed once. Otherwise only the rows that the page shows are read.
    Rows that are added later are shown too. The page is served on the loopback interface. The page does not change the
    data, and loads no files from other hosts.

    Args:
        *stores: Stores, views of stores, mixtures, or a ``BatchSource``. Batches of a ``BatchSource`` are shown as the
            loader delivers them: augmented, padded, with masks and offsets.
        names: The names that the page shows.
        port: The port; 0 for any free port.
        height: Height of the page in a notebook, in pixels.

    Returns:
        The viewer. Open its ``url`` in a browser; a notebook shows the viewer if it is the last line of a cell.

    Raises:
        ConfigError: No store is given, or an argument is not a store.
        ImportError: Plotly is not installed; the extra ``view`` installs Plotly.
        OSError: The port is in use.

    Example:
        >>> from mouse_core.testing import example_store
        >>> with view(example_store()) as viewer:  # doctest: +SKIP
        ...     print(viewer.url)
    """
    called = [*names, *(f"store {place + 1}" for place in range(len(names), len(stores)))]
    return Viewer(shown_of(zip(called, stores, strict=False)), port=port, height=height)
