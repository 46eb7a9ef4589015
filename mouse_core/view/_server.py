"""The viewer's server: on this machine alone, for who knows its address, and only to be read."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mouse_core.collect.server import IdleConnections
from mouse_core.errors import ChangedError, MouseError
from mouse_core.view._answers import Answers

_PAGE = Path(__file__).with_name("page")
_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
# All files that there are. Nothing else is looked for on the disk.
_FILES = {name: (_PAGE / name, _SCRIPT) for name in ("view.js", "pane.js", "list.js", "charts.js", "episode.js")}
_FILES |= {name: (_PAGE / name, _SCRIPT) for name in ("batches.js", "findings.js", "tools.js", "stored.js")}
_FILES |= {"view.css": (_PAGE / "view.css", _STYLE)}
_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>mouse view</title><link rel="icon" href="data:,"><link rel="stylesheet" href="view.css">
<script src="plotly.min.js" defer></script><script type="module" src="view.js"></script></head>
<body><noscript>This page is made of scripts.</noscript></body></html>
"""
# Scripts come from here alone, and none stands in the page. Plotly sets styles of its elements.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)


_MOST_IDLE = 64


def plotly_script() -> Path:
    """The script of Plotly, in its package.

    Raises:
        ImportError: It is not installed.
    """
    spec = find_spec("plotly")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    script = folder / "package_data" / "plotly.min.js" if folder is not None else None
    if script is None or not script.is_file():
        raise ImportError("the page needs Plotly, which draws its plots: pip install 'mouse-data[view]'")
    return script


class Server:
    """Answers over HTTP on the loopback interface, from threads of its own, until it is closed.

    An address has a token that nobody can guess; whoever has none is told nothing, nor is a page of another name that
    leads here, as ``Host`` says.

    Args:
        answers: What it answers.
        port: The port; 0: any that is free.
        framed: Whether pages of this machine, as a notebook is, may show it in a frame.

    Raises:
        ImportError: Plotly is not installed.
        OSError: The port is taken.
    """

    def __init__(self, answers: Answers, *, port: int = 0, framed: bool = False) -> None:
        self._answers = answers
        token = secrets.token_urlsafe(18)
        ancestors = "http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:" if framed else "'none'"
        files = {name: (path, kind) for name, (path, kind) in _FILES.items()}
        files["plotly.min.js"] = (plotly_script(), _SCRIPT)
        handler = type(
            "Handler",
            (_Handler,),
            {"answers": answers, "token": token, "files": files, "policy": _POLICY.format(ancestors=ancestors)},
        )
        self._server = _Listener(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="mouse-view")
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is closed."""
        self._thread.join()

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._answers.close()


class _Listener(ThreadingHTTPServer):
    """Accepts connections, and keeps some of those that ask for nothing."""

    daemon_threads = True
    request_queue_size = socket.SOMAXCONN

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.idle = IdleConnections(_MOST_IDLE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread."""
        self.idle.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the other side went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close it."""
        self.idle.remove(request)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Listener

    answers: Answers
    token: str
    files: dict[str, tuple[Path, str]]
    policy: str
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "mouse", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer."""
        if not self.server.idle.remove(self.connection):
            self.close_connection = True
            return
        try:
            self._do_get()
        finally:
            self.server.idle.add(self.connection)

    def _do_get(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host", "") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._say(HTTPStatus.FORBIDDEN, "expected this machine's address as Host, found another")
            return
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "expected a path, found what is none")
            return
        _, token, *rest = [*asked.path.split("/"), ""]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            self._say(HTTPStatus.FORBIDDEN, "expected the token of this viewer in the address, found none or another")
            return
        name = "/".join(rest).removesuffix("/") if rest else ""
        try:
            self._answer(name, dict(parse_qsl(asked.query)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page went on to something else
        except ChangedError as error:
            self._say(HTTPStatus.CONFLICT, str(error))
        except (MouseError, ImportError, OSError) as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))

    def _answer(self, name: str, asked: dict[str, str]) -> None:
        if not name:
            self._send(HTTPStatus.OK, _HTML.encode(), "text/html; charset=utf-8")
        elif name in self.files:
            path, kind = self.files[name]
            self._send(HTTPStatus.OK, path.read_bytes(), kind)
        elif name in self.answers.known:
            found = json.dumps(self.answers.known[name](asked), allow_nan=False)
            self._send(HTTPStatus.OK, found.encode(), "application/json")
        elif name in self.answers.pictures:
            self._send(HTTPStatus.OK, *self.answers.pictures[name](asked), kept=True)
        else:
            self._say(HTTPStatus.NOT_FOUND, "expected the name of something to show, found another")

    def _say(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps({"error": " ".join(message.split())}).encode()
        self._send(status, body, "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, kept: bool = False) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            # Addresses of pictures name the rows as they are; all else may change.
            "Cache-Control": "private, max-age=600" if kept else "no-store",
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the address has the token."""
