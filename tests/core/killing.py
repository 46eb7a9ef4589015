"""Children that die where a test wants them to."""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def killed_at(calls: Iterable[str], step: int, half: bool) -> None:
    """Let this process be killed at one of the calls of ``os`` that change files.

    Args:
        calls: Names in ``os``; those that the system lacks do not count, nor does an ``open`` that makes no file.
        step: At which of them, from 1.
        half: Whether half of it is done then, if it is a write.
    """
    count = 0

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            count += 1
            if count == step:
                if half and name in ("write", "pwrite"):
                    call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            # A killed process leaves what it wrote to the system, whether or not that has reached the disk.
            return None if name in ("fsync", "fdatasync") else call(*arguments, **options)

        return counted

    for name in calls:
        if hasattr(os, name):
            setattr(os, name, counting(name, getattr(os, name)))


def dies_of_threads() -> None:
    """Let an error in a thread of this process end it with 1, as one elsewhere does."""

    def died(thread: Any) -> None:
        traceback.print_exception(thread.exc_value)
        os._exit(1)

    threading.excepthook = died


def forked(work: Callable[[], None]) -> int:
    """A child that does some work and ends without any of Python's leave-taking; its process.

    It ends with 1 and says on standard error what went wrong, if something did, else with 0.
    """
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def in_child(work: Callable[[], None]) -> None:
    """Do some work in a forked child, and wait for its end; fail where the work fails."""
    assert os.waitpid(forked(work), 0)[1] == 0, "a forked child failed, see above"


def ended(work: Callable[[], None]) -> bool:
    """Work in a child, whose threads are not ours; whether it came to its end, or else was killed."""
    status = os.waitpid(forked(work), 0)[1]
    assert status in (0, signal.SIGKILL), f"a process ended with status {status}, see above"
    return status == 0


def kill_at_every(
    folder: Path,
    first: int,
    stride: int,
    *,
    steps: Iterable[str],
    run: Callable[[Path, Callable[..., None]], None],
    check: Callable[[Path, list[Any]], None],
    check_end: Callable[[Path], None] | None = None,
) -> int:
    """Kill a run at every ``stride``-th step from ``first`` until one comes to its end; return the number of kills.

    Args:
        folder: Has a folder for each run.
        steps: The calls of ``os`` that are steps; see ``killed_at``.
        run: Called with a folder, and with what notes what was acknowledged: JSON values.
        check: Called with the folder and all that was noted.
        check_end: Called once a folder's run came to its end after it was killed twice.
    """
    # What is slow the first time is done before the first fork, and its threads have ended by then.
    run(folder / "warm", lambda *values: None)
    while threading.active_count() > 1:
        time.sleep(0.01)
    kills, step = 0, first
    while True:
        root, told = folder / str(step), folder / f"{step}.told"

        def killed(step: int, half: bool, root: Path = root, told: Path = told) -> bool:
            def work() -> None:
                write, file = os.write, os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                killed_at(steps, step, half)
                run(root, lambda *values: write(file, (json.dumps(values) + "\n").encode()))

            return not ended(work)

        def checked(root: Path = root, told: Path = told) -> None:
            check(root, [json.loads(line) for line in told.read_text().splitlines()])

        was_killed = killed(step, step % 2 == 0)
        assert ended(checked), f"step {step}: see above"
        if not was_killed:
            return kills
        kills += 1
        if check_end is not None:
            # Start again, be killed while that is going on, and in the end be left alone.
            kills += killed(step // 3 + 1, step % 2 == 1)
            assert not killed(-1, False)
            assert ended(checked), f"step {step}: see above"
            assert ended(lambda root=root: check_end(root)), f"step {step}: see above"  # type: ignore[misc]
        step += stride
