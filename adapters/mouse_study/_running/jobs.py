"""Executes runs concurrently, each in a process. A killed process is restarted, and all processes end when this process
ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mouse_core.errors import ConfigError, DataError, MouseError
from mouse_core.files.locking import Held
from mouse_core.files.log import follow_log
from mouse_core.spec import check_count
from mouse_study._running.folder import RECORDS, collect, run_facts, settle
from mouse_study.results import FILE as RESULTS
from mouse_study.results import Results

if TYPE_CHECKING:
    from mouse_study.study import Study


@dataclass(frozen=True)
class Progress:
    """The state of a run ("waiting", "running", "done", "failed" or "stopped"), its steps, last loss and error."""

    state: str
    step: int = 0
    loss: float | None = None
    error: str = ""


@contextmanager
def shown(runs: int, steps: int, bar: bool | None) -> Iterator[Callable[[Mapping[str, Progress]], None]]:
    """Yield a function that prints a line on stderr for each run that began or ended, and advances a progress bar.

    Args:
        runs: The number of runs.
        steps: The number of steps of each run.
        bar: Whether to show the bar; None: only if stderr is a terminal.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    states: dict[str, str] = {}
    steps_done = 0

    def show(every: Mapping[str, Progress]) -> None:
        nonlocal steps_done
        for name, now in every.items():
            if now.state != states.get(name, "waiting"):
                states[name] = now.state
                at = f" at step {now.step}" if 0 < now.step < steps else ""
                loss = "" if now.loss is None or now.state == "running" else f", loss {now.loss:.6g}"
                error = f": {now.error}" if now.error else ""
                print(f"{name}: {now.state}{at}{loss}{error}", file=sys.stderr, flush=True)  # noqa: T201
        total = sum(now.step for now in every.values())
        progress.update(total - steps_done)
        steps_done = total

    enabled = sys.stderr.isatty() if bar is None else bar
    with tqdm(desc="study", total=runs * steps, unit="steps", disable=not enabled) as progress:
        yield show


_OF_A_RUN = "MOUSE_STUDY_RUN"  # an environment variable of the processes of runs
_LOOKED_AT_EVERY = 0.1  # seconds
_TIME_TO_SAVE = 30.0  # seconds that runs may take to save their state after a request to end
_LOG_TAIL = 2000  # bytes


def run_study(study: Study, folder: Path, *, jobs: int, only: Sequence[str], progress: bool | None) -> Results:
    """Run the runs of a study to their end; see ``Study.run``."""
    if _OF_A_RUN in os.environ:
        raise ConfigError(
            "study: expected a call of Study.run in the first process only, found a call in a process that the study "
            "started, and that imports your file; put the call under if __name__ == '__main__':"
        )
    check_count("jobs", jobs, lowest=1)
    names = selected(study.runs, only)
    folder.mkdir(parents=True, exist_ok=True)
    with Held(folder / "lock", "study"):
        declared = settle(study, folder)
        if "function" in (declared["store"] or {}):
            _make_store(declared, folder)
        pool = _Pool(declared, folder, names, jobs)
        try:
            with shown(len(names), study.steps, progress) as show:
                pool.work(show)
        except KeyboardInterrupt:
            print("study: interrupted; runs save their state, and the same command goes on", file=sys.stderr)  # noqa: T201
            raise
        finally:
            pool.stop()
            results = collect(folder)
            results.write(folder / RESULTS)
        return results


def selected(runs: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the runs that match patterns.

    Raises:
        ConfigError: A pattern matches no run.
    """
    if not only:
        return list(runs)
    chosen: set[str] = set()
    for pattern in only:
        parts = pattern.split("/")
        fits = [run for run in runs if all(map(fnmatchcase, run.split("/"), parts)) and len(parts) <= 3]
        if not fits:
            raise ConfigError(f"only: expected VARIANT/FRAMEWORK/SEED of a run, such as {runs[0]}, found {pattern!r}")
        chosen |= set(fits)
    return [run for run in runs if run in chosen]


class _Pool:
    """The processes of the runs.

    Args:
        declared: The study's declaration.
        folder: The folder of the study.
        names: The runs, in order.
        jobs: The number of concurrent runs.
    """

    def __init__(self, declared: dict[str, Any], folder: Path, names: Sequence[str], jobs: int) -> None:
        self._declared, self._folder, self._jobs = declared, folder, jobs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._begun_at: dict[str, int] = {}  # step at which a run's process began
        self._positions: dict[str, int] = {}  # position of the next record of a run in its file
        self._runs = {name: self._at_rest(name) for name in names}
        self._waiting = [name for name, now in self._runs.items() if now.state != "done"]

    def work(self, show: Callable[[dict[str, Progress]], None]) -> None:
        """Start and watch runs until all have ended."""
        while self._waiting or self._processes:
            while self._waiting and len(self._processes) < self._jobs:
                self._start(self._waiting.pop(0))
            show(self._runs)
            time.sleep(_LOOKED_AT_EVERY)
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    self._runs[name] = self._at_work(name)
                else:
                    self._ended(name, process.returncode)
        show(self._runs)

    def stop(self) -> None:
        """Send the processes the signal to save their state and end; kill processes that take too long."""
        for process in self._processes.values():
            process.terminate()
        try:
            until = time.monotonic() + _TIME_TO_SAVE
            for process in self._processes.values():
                process.wait(max(0.0, until - time.monotonic()))
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            pass  # after a second Ctrl-C, runs are killed, and continue later from their last checkpoints
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
                _close(process)
            self._processes.clear()

    def _start(self, name: str) -> None:
        own = self._own(name)
        own.mkdir(parents=True, exist_ok=True)
        self._begun_at[name] = self._at_rest(name).step
        self._processes[name] = start(self._declared, self._folder, name, own / "log.txt")
        self._runs[name] = Progress("running", self._begun_at[name])

    def _ended(self, name: str, status: int) -> None:
        _close(self._processes.pop(name))
        now, log = replace(self._at_rest(name), loss=self._at_work(name).loss), self._own(name) / "log.txt"
        if now.state == "waiting":  # the process was ended by a signal and wrote no status
            if now.step > self._begun_at[name]:
                self._waiting.insert(0, name)
            else:
                now = replace(now, state="stopped", error=f"ended by {_words(status)}; see {log}")
        elif now.state == "failed":
            now = replace(now, error=f"{now.error}; see {log}")
        self._runs[name] = now

    def _at_work(self, name: str) -> Progress:
        try:
            records, end = follow_log(self._own(name) / RECORDS, self._positions.get(name, 0))
        except DataError:  # the run has removed the records after its checkpoint
            records, end = [], 0
        self._positions[name] = end
        if not records:
            return self._runs[name]
        last = json.loads(records[-1])
        return Progress("running", last["step"] + 1, last["loss"])

    def _at_rest(self, name: str) -> Progress:
        """Return the state and the step of a run's checkpoint."""
        facts = run_facts(self._own(name))
        state = facts.get("status", "partial")
        return Progress(
            "waiting" if state == "partial" else state, facts.get("steps", 0), error=facts.get("error") or ""
        )

    def _own(self, name: str) -> Path:
        return self._folder / "runs" / name


def start(declared: dict[str, Any], folder: Path, run: str | None, log: Path) -> subprocess.Popen[bytes]:
    """Start the process of a run; if ``run`` is None, start the process that creates the store. The process ends when
    this process ends."""
    request = {"study": declared, "folder": str(folder.resolve()), "run": run}
    with open(log, "ab") as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} begins\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mouse_study._running.worker"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(declared),
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the process has ended, which is detected later
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    return process


def _environment(declared: dict[str, Any]) -> dict[str, str]:
    threads = str(declared["threads"])
    eigen = "--xla_cpu_multi_thread_eigen=false" if threads == "1" else ""
    pinned = {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PJRT_NPROC"), threads),
        "VECLIB_MAXIMUM_THREADS": threads,
        "XLA_FLAGS": " ".join(filter(None, [os.environ.get("XLA_FLAGS"), eigen])),
        # Importable modules of this process are importable in the runs, too.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        _OF_A_RUN: "1",
    }
    return {**os.environ, **pinned, **declared["environment"]}


def _make_store(declared: dict[str, Any], folder: Path) -> None:
    if (folder / "store").exists():
        return
    log = folder / "store.log.txt"
    process = start(declared, folder, None, log)
    try:
        status = process.wait()
    finally:
        process.kill()
        process.wait()
        _close(process)
    if status:
        lines = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").splitlines()
        raise MouseError(
            f"store: the function that creates the store failed with {lines[-1]} (exit status {status}); see {log}"
        )


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
