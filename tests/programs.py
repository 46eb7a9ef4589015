"""Programs in processes of their own, forked from one that has imported already what several of them import.

Importing PyTorch and TensorDict takes 2.7 seconds of processor time, of the 4 that most such programs take, and
importing datasets one of the 2 of others. A program that is run here finds them in `sys.modules`, and is otherwise as
one that `python` was started with: its own process, arguments, folder, environment and output, from its first line to
the interpreter's exit.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# The interpreter that is forked: a line of JSON for each program, answered by the child's number and then its status.
SERVER = """
import gc, json, os, sys, types, warnings
preload, told, answers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    exec(preload, {})
gc.freeze()

def next_program():
    lines = os.fdopen(told, "rb", closefd=False)
    while line := lines.readline():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads of the libraries that wait for work
            child = os.fork()
        if not child:
            return json.loads(line)
        os.write(answers, b"%d\\n" % child)
        os.write(answers, b"%d\\n" % os.waitpid(child, 0)[1])
    os._exit(0)

asked = next_program()
os.close(told), os.close(answers)
for number, path in ((1, asked["out"]), (2, asked["error"])):
    file = os.open(path, os.O_WRONLY)
    os.dup2(file, number)
    os.close(file)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = asked["arguments"]
sys.path[:] = [asked["beside"], *asked["path"], *sys.path[1:]]
main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__file__ = asked["arguments"][0]
with open(main.__file__, encoding="utf-8") as source:
    code = compile(source.read(), main.__file__, "exec")
del asked, source
exec(code, main.__dict__)
"""


class Interpreter:
    """An interpreter that waits for programs.

    Args:
        preload: What it runs once: imports.
    """

    def __init__(self, preload: str) -> None:
        answers, self._answers_end = os.pipe()
        told_end, self._told = os.pipe()
        # Programs of a second or two of arithmetic, several side by side: threads of one that wait for each other by
        # spinning hold up all others, and made one of 8 seconds take minutes. Read once, as the library is loaded.
        environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, preload, str(told_end), str(self._answers_end)],
            pass_fds=(told_end, self._answers_end),
            env=environment,
        )
        os.close(told_end)
        os.close(self._answers_end)
        self._answers = answers
        self._waiting = b""

    def _answer(self, seconds: float) -> int | None:
        """The next number that it says; None when it takes longer."""
        while b"\n" not in self._waiting:
            if not select.select([self._answers], [], [], seconds)[0]:
                return None
            read = os.read(self._answers, 4096)
            assert read, "the interpreter that is forked has ended"
            self._waiting += read
        line, _, self._waiting = self._waiting.partition(b"\n")
        return int(line)

    def run(
        self, script: Path, *arguments: str, folder: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(prefix="mouse-tests-") as kept:
            out, error = Path(kept) / "out", Path(kept) / "error"
            out.touch()
            error.touch()
            asked = {
                "arguments": [str(script), *arguments],
                "beside": str(script.parent),
                "path": [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part],
                "folder": str(folder),
                "environment": dict(environment),
                "out": str(out),
                "error": str(error),
            }
            os.write(self._told, json.dumps(asked).encode() + b"\n")
            child = self._answer(600)
            assert child is not None
            status = self._answer(seconds)
            if status is None:
                os.kill(child, 9)
                self._answer(60)
                raise subprocess.TimeoutExpired([str(script), *arguments], seconds, out.read_text(), error.read_text())
            return subprocess.CompletedProcess(
                [str(script), *arguments], os.waitstatus_to_exitcode(status), out.read_text(), error.read_text()
            )

    def close(self) -> None:
        os.close(self._told)
        self._process.wait()
        os.close(self._answers)


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
