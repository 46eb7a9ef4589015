"""Processes that read HDF5 and zarr, or render templates, forked from one that has imported what they import.

Every file of these kinds that is opened starts an interpreter, of which importing NumPy and h5py, or zarr, is nearly
all: a quarter and half a second of processor time, a thousand times in the tests. The first of a kind is started as
everywhere, and those of programs that tests run; further ones are forked, and find the modules in `sys.modules`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Answers a line of JSON, which comes with the ends of two pipes, by the number of a child that runs the program with
# them, and the number of a child that has ended, or is about to, by how it did.
SERVER = """
import gc, importlib, json, os, runpy, socket, sys
asked = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.freeze()
while True:
    line, ends, _, _ = socket.recv_fds(asked, 1 << 20, 2)
    if not line:
        os._exit(0)
    request = json.loads(line)
    if "wait" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
    elif "poll" in request:
        ended, status = os.waitpid(request["poll"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if ended else 999
    else:
        answer = os.fork()
        if not answer:
            break
        for end in ends:
            os.close(end)
    asked.send(b"%d" % answer)
asked.close()
for number, end in enumerate(ends):
    os.dup2(end, number)
    os.close(end)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = request["arguments"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

IMPORTED = {
    "h5_child.py": ("h5py", "numpy"),
    "zarr_child.py": ("zarr", "zipfile", "numcodecs.blosc", "numpy"),
    "rendering_child.py": ("jinja2.sandbox", "jinja2.ext"),
}


class Server:
    """A process that is forked for each that is asked for.

    Args:
        imported: The modules that it imports.
        environment: Its environment.
    """

    def __init__(self, imported: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self.owner = os.getpid()
        command = [sys.executable, "-P", "-c", SERVER, str(end.fileno()), *imported]
        self._process = subprocess.Popen(
            command, pass_fds=(end.fileno(),), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        end.close()

    def ask(self, request: Mapping[str, Any], ends: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], ends)
            answer = self._socket.recv(64)
        assert answer, "the process that is forked has ended"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Forked:
    """What is used of a `subprocess.Popen`, of a process that was forked."""

    def __init__(self, server: Server, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._server = server
        self.returncode: int | None = None
        stdin, given = os.pipe()
        answered, stdout = os.pipe()
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
        try:
            self.pid = server.ask(request, (stdin, stdout))
        finally:
            os.close(stdin)
            os.close(stdout)
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(answered, "rb")

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.returncode is None:
            answer = self._server.ask({"poll": self.pid})
            self.returncode = None if answer == 999 else answer
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            with suppress(OSError):  # of a server that was closed before
                self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode or 0


class Starting:
    """Stands for the module `subprocess` where readers are started."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self) -> None:
        self._servers: dict[str, Server | None] = {}

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        executable, safe, program, *arguments = command
        assert (executable, safe) == (sys.executable, "-P")
        name = Path(program).name
        if name not in self._servers:
            self._servers[name] = None
        else:
            server = self._servers[name] or Server(IMPORTED[name], env)
            self._servers[name] = server
            if server.owner == os.getpid():  # and not a process that a test forked
                return Forked(server, [program, *arguments], env)
        return subprocess.Popen(command, env=env, **options)

    def close(self) -> None:
        for server in self._servers.values():
            if server is not None:
                server.close()
