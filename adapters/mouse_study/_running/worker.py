"""The process of one run: ``python -m mouse_study._running.worker``, which reads the run from its standard input."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mouse_core import DatasetStore
from mouse_core.digest import StreamDigest
from mouse_core.errors import ConfigError, DataError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.checksum import json_with_digest
from mouse_core.files.locking import Held
from mouse_core.files.log import Log
from mouse_core.files.writing import making, write_file
from mouse_study._running import states
from mouse_study._running.folder import RECORDS, RUN
from mouse_study.study import Context, Training, found

# Import names of packages; the versions of those that a run imported are recorded.
_FRAMEWORKS = ("torch", "tensordict", "torchrl", "jax", "jaxlib", "flax", "optax", "grain", "gymnasium")
_NOTED = {"mouse_core": "mouse-data"} | {name: name for name in ("numpy", "pyarrow", *_FRAMEWORKS)}


def memory_now() -> int | None:
    """Return the memory of this process in bytes; None if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes."""
    try:
        # On Linux, a child inherits the peak of its parent, except in this line of the file.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def versions(before: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of Python and of imported packages; if the version in ``before`` was different, the text
    contains both versions."""
    found = {"python": platform.python_version()}
    for module, package in _NOTED.items():
        if module in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:  # used from a source folder without installation
                found[package] = str(getattr(sys.modules[module], "__version__", "of a source folder"))
    for package, other in before.items():
        now = found.get(package, other)
        if now != other.rpartition(", then ")[2]:
            found[package] = f"{other}, then {now}"
        else:
            found[package] = other
    return found


def described_machine(threads: int) -> dict[str, Any]:
    """Describe the hardware and system of this process, without the host name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    described: dict[str, Any] = {"system": f"{platform.system()} {platform.release()}", "processor": platform.machine()}
    described |= {"cores": cores, "threads": threads, "device": "cpu"}
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if jax is not None:
        described["device"] = jax.devices()[0].device_kind
    elif torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        described["device"] = torch.cuda.get_device_name()
    return described


def open_store(declared: Mapping[str, Any], folder: Path) -> Any:
    """Open the store that a study declares; the store of a function is in the study's folder."""

    options = dict(declared)
    if "function" in options:
        return DatasetStore.open(folder / "store")
    return DatasetStore.open(options.pop("path"), **options)


def make_store(declared: Mapping[str, Any], folder: Path) -> None:
    """Call the function that creates the study's store, and save the store, unless the store is already saved."""
    from mouse_core.store import Store

    target = folder / "store"
    if target.exists():
        return
    made = found(declared["function"], "store")()
    if not isinstance(made, Store):
        raise ConfigError(
            f"store: expected a function that returns a DatasetStore, found {type(made).__name__}; for batches "
            "from another source, the training function returns Training(batches=...)"
        )
    with making(target, "store") as partial:
        made.to_dataset().save_to_disk(partial)


_BEGAN = time.perf_counter()
_MEMORY_EVERY = 50  # steps
_OURS = ("step", "wait", "compute", "memory", "setup")
_VERSION = 1


class Worker:
    """A run in this process, resumed from its checkpoint.

    Args:
        declared: The study's declaration.
        folder: The folder of the study.
        run: The name of the run.
    """

    def __init__(self, declared: Mapping[str, Any], folder: Path, run: str) -> None:
        self.declared, self.study, self.name = declared, folder, run
        self.folder = folder / "runs" / run
        self.steps = int(self.declared["steps"])
        self.step = 0
        self.stopping = False
        self.digest = StreamDigest()
        self.fingerprint: str | None = None
        self.first_step: float | None = None
        # Times from earlier processes of this run, up to their last checkpoint.
        self.before: Mapping[str, Any] = {"seconds": 0.0, "peak_memory": 0, "versions": {}}

    def run(self) -> None:
        """Take all remaining steps, or the steps until a request to stop."""
        context = self._context()
        train = found(self.declared["frameworks"][context.framework], f"frameworks: {context.framework}")
        if context.kind == "torch":  # torch has a generator to seed, and a number of threads to set
            import torch

            torch.set_num_threads(self.declared["threads"])
        states.seed_global_generators(context.seed)
        training = train(context)
        if not isinstance(training, Training):
            raise ConfigError(f"{train.__qualname__}: expected a Training as result, found {type(training).__name__}")
        with _batches(training, context) as batches:
            self.parts = {"state": training.state}
            if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
                self.parts["batches"] = batches
            self.begun = {name: states.InitialState(part, name) for name, part in self.parts.items()}
            self.fingerprint = _fingerprint(batches)
            size = self._restore() if training.state is not None else 0
            self.note("partial")
            self.records = Log(self.folder / RECORDS, lambda *_: None)
            try:
                self.records.cut(size)  # later values were recorded after the checkpoint, and will be recorded again
                self._take_steps(training, _next_batch(batches))
            finally:
                self.records.close()
        if self.step == self.steps:
            self.note("done", digest=self.digest.hexdigest() if self.digest.windows else None)

    def _context(self) -> Context:
        variant, framework, seed = self.name.split("/")
        options = dict(self.declared["variants"][variant])
        own = options.pop("batches", {})
        store = self.declared["store"]
        return Context(
            variant=variant,
            options=options,
            framework=framework,
            seed=int(seed),
            steps=self.steps,
            folder=self.folder,
            batches={**self.declared["batches"], **own},
            opened=None if store is None else lambda: open_store(store, self.study),
        )

    def _take_steps(self, training: Training, next_batch: Callable[[], tuple[Any, ...]]) -> None:
        setup = time.perf_counter() - _BEGAN
        for step in range(self.step, self.steps):
            if self.stopping:
                return
            row = self._take_step(training, step, next_batch)
            if setup:
                row["setup"], setup = setup, 0.0
            if training.evaluate is not None and self._is_due(step, self.declared["evaluate_every"]):
                row |= _numbers(training.evaluate(), "evaluation")
            if (memory := memory_now()) is not None and (step % _MEMORY_EVERY == 0 or step + 1 == self.steps):
                row["memory"] = float(memory)
            is_due = self.stopping or self._is_due(step, self.declared["checkpoint_every"])
            self.records.append(json.dumps({"step": step, **row}).encode(), sync=is_due)
            self.step = step + 1
            if is_due and self.parts["state"] is not None:
                self._checkpoint()

    def _take_step(self, training: Training, step: int, next_batch: Callable[[], tuple[Any, ...]]) -> dict[str, float]:
        """Take one step; return its reported numbers, and its waiting and computing times without the digest."""
        asked = time.perf_counter()
        batch = next_batch()
        given = time.perf_counter()
        if self.declared["digest"]:
            for one in batch:
                self.digest += self._digest_of(step, one)
        began = time.perf_counter()
        row = _numbers(training.step(*batch), "loss")
        compute = time.perf_counter() - began
        if self.first_step is None:
            self.first_step = compute
        return {**row, "wait": given - asked, "compute": compute}

    def _digest_of(self, step: int, batch: Any) -> StreamDigest:
        try:
            return StreamDigest.of(step, batch)
        except (TypeError, DataError, RecursionError) as error:
            raise ConfigError(
                "batches: expected a dict from names to arrays, because the study computes a digest of each batch, "
                f"found {type(batch).__name__}: {' '.join(str(error).split()):.200}; to run without digests, pass "
                "digest=False to the Study"
            ) from error

    def _is_due(self, step: int, every: int | None) -> bool:
        """Whether an action is due after this step: every ``every`` steps, and after the last step."""
        return step + 1 == self.steps or (every is not None and (step + 1) % every == 0)

    # ------------------------------------------------------------------ checkpoints

    def _checkpoint(self) -> None:
        """Save a checkpoint; all records must be on the disk."""
        saved = {
            "version": _VERSION,
            "step": self.step,
            "records": self.records.size,
            "facts": self.facts(),
            "digest": self.digest.state_dict(),
            "parts": {name: states.taken(part, name, self.begun[name]) for name, part in self.parts.items()},
            "generators": states.global_generators(),
        }
        write_checkpoint(self.folder / "checkpoint", saved)
        self.note("partial")

    def _restore(self) -> int:
        """Restore the checkpoint, if it exists; return the number of valid bytes in the file of records."""
        file = self.folder / "checkpoint"
        if not file.exists():
            return 0
        saved = read_checkpoint(file)
        if saved["version"] != _VERSION:
            raise StateError(
                f"{file}: expected version {_VERSION}, found {saved['version']}, of another version of mouse-data"
            )
        for name, part in self.parts.items():
            states.give(part, saved["parts"][name], name)
        states.set_global_generators(saved["generators"])
        self.step, self.before = saved["step"], saved["facts"]
        self.first_step = self.before["first_step_seconds"]
        self.digest = StreamDigest.from_state(saved["digest"])
        print(f"goes on at step {self.step}", flush=True)  # noqa: T201  into the run's log
        return int(saved["records"])

    # ------------------------------------------------------------------ facts

    def facts(self) -> dict[str, Any]:
        """Return the facts of this run so far, over all of its processes."""
        return {
            "seconds": self.before["seconds"] + time.perf_counter() - _BEGAN,
            "first_step_seconds": self.first_step,
            "peak_memory": max(self.before["peak_memory"] or 0, peak_memory() or 0) or None,
            "versions": versions(self.before["versions"]),
        }

    def note(self, status: str, **more: Any) -> None:
        """Write the status of the run."""
        noted = {
            "status": status,
            "steps": self.step,
            **self.facts(),
            "fingerprint": self.fingerprint,
            "machine": described_machine(self.declared["threads"]),
            **more,
        }
        write_file(self.folder / RUN, json_with_digest({"run": noted}))


def _loader_of(batches: Any) -> Any:
    """If an object is the method ``next_batch`` of a loader, return the loader; return other objects unchanged."""
    owner = getattr(batches, "__self__", None)
    return owner if getattr(owner, "next_batch", None) == batches else batches


@contextmanager
def _batches(training: Training, context: Context) -> Iterator[Any]:
    """Yield the loader of the training, or None if the training has no loader; afterwards, close the loader if this
    function created it."""
    if training.batches is not None or context.opened is None:
        yield _loader_of(training.batches)
        return
    with context.loader() as loader:
        yield loader


def _next_batch(batches: Any) -> Callable[[], tuple[Any, ...]]:
    """Return a function that returns the arguments of the next step: the batch, or no arguments."""
    if batches is None:
        return lambda: ()
    following = batches.next_batch if hasattr(batches, "next_batch") else batches
    if not callable(following):
        raise ConfigError(f"batches: expected a loader or a function without arguments, found {type(batches).__name__}")
    return lambda: (following(),)


def _fingerprint(batches: Any) -> str | None:
    found = getattr(getattr(batches, "source", None), "fingerprint", None)
    return found if isinstance(found, str) else None


def _numbers(values: Any, name: str) -> dict[str, float]:
    """Return the numbers that a step or an evaluation returned, by name."""
    given = values if isinstance(values, Mapping) else {name: values}
    if name == "loss" and name not in given:
        raise ConfigError(f"step: expected a number 'loss' in the returned dict, found only {sorted(given)}")
    if ours := sorted(set(given) & set(_OURS)):
        raise ConfigError(
            f"step: expected names other than {', '.join(_OURS)}, which are recorded anyway, found {ours}"
        )
    return {key: _number(value, key) for key, value in given.items()}


def _number(value: Any, name: str) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name}: expected a number, or an array with one element, found {type(value).__name__}"
        ) from error


# ---------------------------------------------------------------------- the process


def _end_with(parent: int) -> None:
    """End this process and its children as soon as the parent process has ended."""

    def wait() -> None:
        while os.read(parent, 4096):
            pass
        if os.name == "posix":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Execute the request in the first line of the input."""
    request = json.loads(sys.stdin.buffer.readline())
    _end_with(sys.stdin.fileno())
    declared, folder, run = request["study"], Path(request["folder"]), request["run"]
    if run is None:
        with Held(folder / "store.lock", "store", wait=True):
            make_store(declared["store"], folder)
        return 0
    worker = Worker(declared, folder, run)
    # The process of a killed study may still be running.
    with Held(worker.folder / "lock", "study", wait=True):
        signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
        try:
            worker.run()
        except BaseException as error:
            traceback.print_exc()
            said = " ".join(str(error).split())
            worker.note("failed", error=f"{type(error).__name__}: {said}" if said else type(error).__name__)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
