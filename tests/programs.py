"""Programs in processes of their own, forked from one that has imported already what several of them import.

Importing PyTorch and TensorDict takes 2.7 seconds of processor time, of the 4 that most such programs take, and
importing datasets one of the 2 of others. A program that is run here finds them in `sys.modules`, and is otherwise as
one that `python` was started with: its own process, arguments, folder, environment and output, from its first line to
the interpreter's exit.
"""

import atexit
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

# The interpreter that is forked. A request is a line of JSON with a number, which may come with files. The answer
# repeats this number, and has another: of a child that runs a program with these files, or how a child ended, 999 if it
# has not.
SERVER = """
import gc, json, os, socket, sys, types, warnings
preload, asked = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    exec(preload, {})
gc.freeze()
codes = {}
while True:
    line, files, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    if not line:
        os._exit(0)
    request = json.loads(line)
    if "ended" in request:
        child = request["ended"]
        if child not in codes:  # an interrupted process asks again
            ended, status = os.waitpid(child, os.WNOHANG if request["now"] else 0)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        answer = codes.get(child, 999)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads of the libraries that wait for work
            answer = os.fork()
        if not answer:
            break
        codes.pop(answer, None)
        for file in files:
            os.close(file)
    asked.send(b"%d %d" % (request["number"], answer))
asked.close()
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = request["arguments"]
sys.path[:0] = request["path"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = sys.argv[0]
with open(main.__file__, encoding="utf-8") as source:
    code = compile(source.read(), main.__file__, "exec")
del request, source
exec(code, main.__dict__)
"""


class Interpreter:
    """An interpreter that is forked for each program.

    Args:
        preload: What it runs once: imports.
        environment: Its environment; by default this one.
    """

    def __init__(self, preload: str, environment: Mapping[str, str] | None = None) -> None:
        self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self.owner, self._numbers = threading.Lock(), os.getpid(), itertools.count()
        # Programs of a second or two of arithmetic, several side by side: threads of one that wait for each other by
        # spinning hold up all others, and made one of 8 seconds take minutes. Read once, as the library is loaded.
        known = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"} if environment is None else environment
        command = [sys.executable, "-P", "-c", SERVER, preload, str(end.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(end.fileno(),), stdin=subprocess.DEVNULL, env=known)
        end.close()

    def _ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        with self._lock:
            number = next(self._numbers)
            socket.send_fds(self._socket, [json.dumps({**request, "number": number}).encode()], files)
            while answer := self._socket.recv(64):
                asked, value = map(int, answer.split())
                if asked == number:  # and not the answer to a request that was interrupted
                    return value
        raise AssertionError("the interpreter that is forked has ended")

    def fork(self, arguments: Sequence[str], files: Sequence[int], **options: Any) -> int:
        """The number of a process that runs a program.

        Args:
            arguments: The script and its arguments.
            files: For the process: its standard input, output and maybe errors.
            options: ``folder``, ``environment``, and ``path``, where it looks for modules first.
        """
        return self._ask({"arguments": list(arguments), **options}, files)

    def ended(self, process: int, *, now: bool = False) -> int | None:
        """How a process ended; None with ``now`` if it has not, instead of waiting."""
        answer = self._ask({"ended": process, "now": now})
        return None if answer == 999 else answer

    def run(
        self, script: Path, *arguments: str, folder: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        command = [str(script), *arguments]
        places = [str(script.parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        with tempfile.TemporaryDirectory(prefix="mouse-tests-") as kept, ExitStack() as stack:
            told = [Path(kept) / name for name in ("out", "error")]
            files = [
                stack.enter_context(open(name, mode)) for name, mode in ((os.devnull, "r"), *((t, "w") for t in told))
            ]
            options = {"folder": str(folder), "environment": dict(environment), "path": places}
            child = self.fork(command, [file.fileno() for file in files], **options)
            ends = os.pidfd_open(child)
            is_late = not select.select([ends], [], [], seconds)[0]
            os.close(ends)
            if is_late:
                os.kill(child, 9)
            status = self.ended(child)
            out, error = (file.read_text() for file in told)
            if is_late:
                raise subprocess.TimeoutExpired(command, seconds, out, error)
            assert status is not None
            return subprocess.CompletedProcess(command, status, out, error)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = "import torch, tensordict, jax"
DATA = "import pyarrow.parquet, datasets"


@cache
def interpreter(preload: str) -> Interpreter:
    made = Interpreter(preload)
    atexit.register(made.close)
    return made


def run_program(
    script: Path,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    frameworks: bool = False,
    data: bool = False,
    seconds: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a script as `python script arguments` would.

    Args:
        script: The file.
        arguments: Its arguments.
        folder: Where; by default here.
        environment: Its environment; by default this one.
        frameworks: Whether it imports PyTorch, and maybe JAX; it finds both imported then.
        data: Whether it imports Arrow and datasets, and no framework; it finds these imported then.
        seconds: When it is given up.
    """
    folder = folder or Path.cwd()
    environment = dict(os.environ if environment is None else environment)
    if (frameworks or data) and sys.platform == "linux":
        forked = interpreter(FRAMEWORKS if frameworks else DATA)
        return forked.run(script, *arguments, folder=folder, environment=environment, seconds=seconds)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def run_code(code: str, *arguments: object, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c code arguments` would from the root of the repository, with datasets imported before."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="mouse-tests-") as folder:
        script = Path(folder) / "code.py"
        script.write_text(code, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": path}
        return run_program(script, *map(str, arguments), environment=environment, data=True, seconds=seconds)


def run_module(name: str, *arguments: object, seconds: float = 500) -> str:
    """Run a module as `python -m name arguments` would, and return what it printed; it must succeed."""
    code = f"import runpy; runpy.run_module({name!r}, run_name='__main__')"
    done = run_code(code, *arguments, seconds=seconds)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_example(script: str, *options: str, seconds: float = 600) -> dict[str, str]:
    """Run a script of the examples, and return the printed values by name, in their order."""
    done = run_program(EXAMPLES / script, *options, frameworks=True, seconds=seconds)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())
