"""A program that is forked cannot be told from one that was started."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_program

SCRIPT = """
import atexit, os, sys, threading
assert sys.modules["__main__"].__dict__ is globals()
atexit.register(print, "the end")
print(__name__, __file__, sys.argv, os.getcwd(), sys.path[0], os.environ["WHERE"], "HOME" in os.environ)
print(sys.stdin.read() == "", threading.active_count(), file=sys.stderr)
if "kill" in sys.argv:
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
threading.Thread(target=print, args=("a thread",)).start()
if "raise" in sys.argv:
    raise ValueError("as asked")
sys.exit(3 if "exit" in sys.argv else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 1), ("exit", 3), ("kill", -signal.SIGKILL)])
def test_a_forked_program_is_as_one_that_was_started(how: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"WHERE": "here", "PYTHONPATH": str(tmp_path)}
    both = [
        run_program(script, how, "more", folder=tmp_path, environment=environment, frameworks=frameworks)
        for frameworks in (False, True)
    ]
    assert [done.returncode for done in both] == [status, status]
    started, forked = both
    assert forked.stdout == started.stdout
    assert ("the end" in forked.stdout) == (how != "kill")
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        run_program(script, frameworks=True, seconds=1)
    assert int(str(raised.value.stdout)) > 0
    script.write_text("print('the next one')")
    assert run_program(script, frameworks=True).stdout == "the next one\n"
