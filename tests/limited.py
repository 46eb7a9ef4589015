"""Programs that have so much memory and no more, by a control group of their own."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_TRIES, _PAUSE = 50, 0.1


def can_limit() -> bool:
    """Whether this process may make groups whose memory is limited."""
    return _place() is not None


@contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A group of processes that have ``nbytes`` of memory together, the pages of files that they read among them.

    Gives the file that a process writes its number to that enters; it must have ended by the end. What it had before
    does not count.
    """
    found = _place()
    assert found is not None, "ask can_limit"
    place, limit = found
    group = place / f"mouse-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(nbytes))
        yield group / "cgroup.procs"
    finally:
        for rest in range(_TRIES, -1, -1):  # a helper of the program's may end a little later
            try:
                group.rmdir()
                break
            except OSError:
                if not rest:
                    raise
                time.sleep(_PAUSE)


def run_limited(command: Sequence[str], nbytes: int) -> str:
    """What a program prints that has ``nbytes`` of memory from its beginning; it must succeed."""
    with limited(nbytes) as group:
        whole = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group), *command]
        done = subprocess.run(whole, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _place() -> tuple[Path, str] | None:
    """Where groups of either version are made, and which file of one limits its memory."""
    if os.access(_GROUPS / "memory", os.W_OK) and (_GROUPS / "memory" / "memory.limit_in_bytes").exists():
        return _GROUPS / "memory", "memory.limit_in_bytes"
    controllers = _GROUPS / "cgroup.subtree_control"
    if os.access(_GROUPS, os.W_OK) and controllers.exists() and "memory" in controllers.read_text().split():
        return _GROUPS, "memory.max"
    return None
