"""A page in a real browser: Chromium without a window, if this machine has one."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)


def in_browser(page: str, folder: Path) -> Any:
    """Open a page in Chromium and wait for what it sends to `/found`."""
    answers: queue.Queue[bytes] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(page.encode() if self.path == "/" else b"")

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(b"")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *ignored: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--window-size=1400,1000", f"--user-data-dir={folder / 'profile'}"]
        command += ["--remote-debugging-port=0", f"http://127.0.0.1:{server.server_port}/"]
        with (folder / "browser.txt").open("w") as said:
            browser = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            return json.loads(answers.get(timeout=100))
        except queue.Empty:
            pytest.fail((folder / "browser.txt").read_text()[-2000:])
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
