"""A page in a real browser: Chromium without a window, if this machine has one."""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)


def _started(folder: Path, address: str) -> subprocess.Popen[bytes]:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--window-size=1400,1000", f"--user-data-dir={folder / 'profile'}"]
    with (folder / "browser.txt").open("w") as said:
        return subprocess.Popen([*command, "--remote-debugging-port=0", address], stdout=said, stderr=said)


class Tab:
    """A page in Chromium that is driven: clicked, typed into, asked. Over its protocol, of which this is all we need.

    Args:
        port: The browser's.
        path: Of the page's socket.
    """

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass
        self._number = 0
        self.said: list[Any] = []

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        body = json.dumps({"id": self._number, "method": method, "params": parameters}).encode()
        # A text in one frame, with a mask of zeros.
        self._socket.sendall(struct.pack(">BBQ4x", 0x81, 0xFF, len(body)) + body)
        while True:
            said = json.loads(self._message())
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            self.said.append(said)

    def _message(self) -> bytes:
        parts, last = [], False
        while not last:
            first, size = self._file.read(2)
            last = bool(first & 0x80)
            if size >= 126:
                size = int.from_bytes(self._file.read(2 if size == 126 else 8))
            parts.append(self._file.read(size))
        return b"".join(parts)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true in the page; its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never came true: {script}; the page says: {self.run(_TEXT)}"
            time.sleep(0.03)
        return found

    def drag_until(self, place: str, *corners: float, script: str) -> None:
        """Drag until an expression is true, again where a page that is still drawing lost it, as a person would."""
        for _ in range(6):
            self.drag(place, *corners)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                if self.run(script):
                    return
                time.sleep(0.03)
        self.until(script)

    def click(self, place: str) -> None:
        """Click the middle of an element, as a mouse does."""
        self.drag(place, 0.5, 0.5, 0.5, 0.5)

    def drag(self, place: str, x0: float, y0: float, x1: float, y1: float) -> None:
        """Drag the mouse over an element, between places that are shares of its box."""
        self.until(f"document.querySelector({json.dumps(place)}) !== null")
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(place)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        places = [(box[0] + x * box[2], box[1] + y * box[3]) for x, y in ((x0, y0), ((x0 + x1) / 2, y1), (x1, y1))]
        self._mouse("mouseMoved", places[0], 0)
        self._mouse("mousePressed", places[0], 1)
        if places[0] != places[-1]:
            for one in places[1:]:
                self._mouse("mouseMoved", one, 1)
        self._mouse("mouseReleased", places[-1], 0)

    def _mouse(self, kind: str, place: tuple[float, float], buttons: int) -> None:
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", buttons=buttons, clickCount=1
        )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, file: Path, *, width: int, height: int, dark: bool = False) -> None:
        """What is seen in a window of this size, as a PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        time.sleep(1)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


_TEXT = "document.body.innerText.slice(0, 400)"


@contextmanager
def tab(address: str, folder: Path) -> Iterator[Tab]:
    """A page in Chromium, to be driven."""
    browser, opened = _started(folder, address), None
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"ws://127.0.0.1:(\d+)/", (folder / "browser.txt").read_text())):
            assert time.monotonic() < end, (folder / "browser.txt").read_text()[-2000:]
            time.sleep(0.05)
        port = int(found[1])
        while True:
            with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in json.load(answer) if one["type"] == "page"]
            if pages:
                break
            assert time.monotonic() < end, "the browser has no page"
            time.sleep(0.05)
        opened = Tab(port, f"/devtools/page/{pages[0]['id']}")
        yield opened
    finally:
        if opened is not None:
            opened.close()
        browser.kill()
        browser.wait()
