"""Requests of a process that was forked from one that had made some, by a process started afresh for it.

The client's threads are not there in the forked one, and what they held cannot be let go. ``Helper`` is what the forked
process has; the other is this module run as a program, which answers until its input ends.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from mouse_core.errors import StorageError

# Requests that are worked on at a time; each may be of many ranges.
_THREADS = 32
_HEAD = 8


class Helper:
    """A process that makes requests of a client.

    Args:
        client: What makes the client there, and what of.
    """

    def __init__(self, *client: Any) -> None:
        command = [sys.executable, "-c", "from mouse_core.remote.clients.helping import main; main()"]
        # What a program prints must not be read as answers, nor its paths be lost.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock, self._number = threading.Lock(), 0
        _send(self._into, (sys.path, client))
        threading.Thread(target=self._read, daemon=True, name="mouse-remote").start()

    @property
    def _into(self) -> BinaryIO:
        assert self._process.stdin is not None
        return self._process.stdin  # type: ignore[return-value]

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the client returns; what it raises is raised."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = future
            _send(self._into, (self._number, method, arguments))
        return future.result()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                number, result, error = _receive(self._process.stdout)  # type: ignore[arg-type]
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
        except (EOFError, OSError, ValueError):
            for future in list(self._waiting.values()):
                future.set_exception(StorageError("the process that reads elsewhere has ended"))


def _send(stream: BinaryIO, value: Any) -> None:
    content = pickle.dumps(value)
    stream.write(len(content).to_bytes(_HEAD, "little") + content)
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    head = stream.read(_HEAD)
    if len(head) < _HEAD:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def main() -> None:
    """Answer requests until the input ends."""
    paths, (kind, url, options) = _receive(sys.stdin.buffer)
    sys.path[:] = paths
    from mouse_core.remote.clients.options import StorageOptions

    client, lock, answers = kind(url, StorageOptions(options)), threading.Lock(), sys.stdout.buffer

    def work(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        result, error = None, None
        try:
            result = getattr(client, method)(*arguments)
            if method == "get_all":
                result = [bytes(one) for one in result]
        except Exception as failed:
            error = failed
        with lock:
            _send(answers, (number, result, error))

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            while True:
                pool.submit(work, *_receive(sys.stdin.buffer))
        except EOFError:
            pass
