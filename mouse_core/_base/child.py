"""A program in another process that answers requests; if the program crashes, hangs or exhausts memory, only its
process is affected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from mouse_core._base.locks import ProcessLock

_START = 120.0
"""Largest time in seconds until a script has imported its libraries, which can take long on a busy machine."""


class Child:
    """The process of a Python script that answers each line of JSON with a line of JSON; bytes can follow the answer's
    line. The first line of the script, ``{}``, says that the script has imported its libraries.

    In an answer, each of the ``values`` has an entry ``sizes``: the lengths of the value's byte strings, which follow
    the line.

    Args:
        script: The file of the script.
        *arguments: Arguments of the script.
    """

    def __init__(self, script: Path, *arguments: str) -> None:
        self._lock, self.owner, self._is_ready = ProcessLock(), os.getpid(), False
        self._process: Any = subprocess.Popen(
            [sys.executable, "-P", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The process computes nothing, and idle threads would take address space.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )

    @property
    def is_running(self) -> bool:
        """Whether the process of the script was started by the current process and has not ended."""
        return self.owner == os.getpid() and self._process.poll() is None

    @property
    def is_closed(self) -> bool:
        """Whether the process was ended by ``close``."""
        return bool(self._process.stdin.closed)

    def ask(self, request: dict[str, Any] | None, seconds: float) -> tuple[dict[str, Any], list[list[bytearray]]]:
        """Send ``request`` unless it is None, and return the next answer and the byte strings of each value in the
        answer.

        If another exception interrupts the call, the process is killed, so that no later call returns this answer.

        Args:
            request: The request.
            seconds: The time after which the process is killed, without the time that its start takes.

        Raises:
            TimeoutError: There was no answer in time.
            EOFError: The process ended; the message is its exit code.
        """
        line = b"" if request is None else json.dumps(request).encode() + b"\n"
        with self._lock:
            if not self._is_ready:
                self._answer(b"", _START)
                self._is_ready = True
            return self._answer(line, seconds)

    def _answer(self, line: bytes, seconds: float) -> tuple[dict[str, Any], list[list[bytearray]]]:
        process, overdue = self._process, threading.Event()

        def give_up() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), give_up)
        timer.daemon = True
        try:
            timer.start()
            process.stdin.write(line)
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())  # of nothing at the end
            values = answer.get("values", ())
            return answer, [[_exactly(process.stdout, size) for size in value["sizes"]] for value in values]
        except (BrokenPipeError, EOFError, json.JSONDecodeError):
            pass  # the process has ended, possibly in the middle of a line
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            timer.cancel()
        process.wait()
        raise TimeoutError if overdue.is_set() else EOFError(process.returncode)

    def close(self) -> None:
        """End the process."""
        if self.owner == os.getpid():
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    stream.close()
            self._process.kill()
            self._process.wait()


def _exactly(stream: Any, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = stream.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]
    return buffer
