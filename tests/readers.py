"""Processes that read HDF5 and zarr, or render templates, forked from one that has imported what they import.

Every file of these kinds that is opened starts an interpreter, of which importing NumPy and h5py, or zarr, is nearly
all: a quarter and half a second of processor time, a thousand times in the tests. The first of a kind is started as
everywhere, and those of programs that tests run; further ones are forked, and find the modules in `sys.modules`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.programs import Interpreter

IMPORTED = {
    "h5_child.py": "import h5py, numpy",
    "zarr_child.py": "import zarr, zipfile, numcodecs.blosc, numpy",
    "rendering_child.py": "import jinja2.sandbox, jinja2.ext",
}


class Forked:
    """What is used of a `subprocess.Popen`, of a process that was forked."""

    def __init__(self, interpreter: Interpreter, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._interpreter = interpreter
        self.returncode: int | None = None
        stdin, given = os.pipe()
        answered, stdout = os.pipe()
        options = {"environment": dict(environment), "folder": os.getcwd(), "path": []}
        ends = [stdin, stdout, os.open(os.devnull, os.O_WRONLY)]
        try:
            self.pid = interpreter.fork(arguments, ends, **options)
        finally:
            for end in ends:
                os.close(end)
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(answered, "rb")

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._interpreter.ended(self.pid, now=True)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            with suppress(OSError):  # of an interpreter that was closed before
                self.returncode = self._interpreter.ended(self.pid)
        return self.returncode or 0


class Starting:
    """Stands for the module `subprocess` where readers are started."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self) -> None:
        self._interpreters: dict[str, Interpreter | None] = {}

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        executable, safe, program, *arguments = command
        assert (executable, safe) == (sys.executable, "-P")
        name = Path(program).name
        if name not in self._interpreters:
            self._interpreters[name] = None
        else:
            interpreter = self._interpreters[name] or Interpreter(IMPORTED[name], env)
            self._interpreters[name] = interpreter
            if interpreter.owner == os.getpid():  # and not a process that a test forked
                return Forked(interpreter, [program, *arguments], env)
        return subprocess.Popen(command, env=env, **options)

    def close(self) -> None:
        for interpreter in self._interpreters.values():
            if interpreter is not None:
                interpreter.close()
