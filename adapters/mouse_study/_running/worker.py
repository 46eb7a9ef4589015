"""The process of one run: ``python -m mouse_study._running.worker``, told on its input which one it is."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mouse_core.digest import StreamDigest
from mouse_core.errors import ConfigError, DataError, StateError
from mouse_core.files.locking import alone
from mouse_core.replay.ground.checkpoint import read_checkpoint, write_checkpoint
from mouse_study._files import write_json
from mouse_study._names import found
from mouse_study._running import facts, states, values
from mouse_study._running.records import FILE, Records
from mouse_study._running.stores import make_store, open_store
from mouse_study.training import Context, Training, kind_of

_BEGAN = time.perf_counter()
_MEMORY_EVERY = 50  # steps
_OURS = ("step", "wait", "compute", "memory", "setup")
_VERSION = 1


class Worker:
    """One run, from its checkpoint on.

    Args:
        request: The study's declaration and which run it is, as ``jobs`` writes them.
        folder: The run's.
    """

    def __init__(self, request: Mapping[str, Any], folder: Path) -> None:
        self.request, self.folder = request, folder
        self.declared: Mapping[str, Any] = request["study"]
        self.steps = int(self.declared["steps"])
        self.step = 0
        self.stopping = False
        self.digest = StreamDigest()
        self.loaders = _Loaders()
        self.fingerprint: str | None = None
        self.first_step: float | None = None
        # Of the processes before this one, until their last checkpoint.
        self.before: Mapping[str, Any] = {"seconds": 0.0, "compile_seconds": 0.0, "peak_memory": 0, "versions": {}}
        self.compiling = facts.Compiling(kind_of(request["framework"]))

    def run(self) -> None:
        """Take all steps that are left, or as many as there are before somebody says stop."""
        context = self._context()
        train = found(self.declared["frameworks"][context.framework], f"frameworks: {context.framework}")
        if context.kind == "torch":  # which has a generator to seed, and threads to count
            import torch

            torch.set_num_threads(self.declared["threads"])
        values.seed_global_generators(context.seed)
        training = train(context)
        if not isinstance(training, Training):
            raise ConfigError(f"{train.__qualname__}: expected it to give a Training, found {type(training).__name__}")
        self.loaders = _Loaders(context.made, training.batches)
        with _batches(training, context) as batches:
            self.parts = {"state": training.state, "loaders": self.loaders.more}
            if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
                self.parts["batches"] = batches
            self.begun = {name: states.Begun(part, name) for name, part in self.parts.items()}
            self.fingerprint = _fingerprint(batches)
            size = self._restore() if training.state is not None else 0
            self.note("partial")
            self.records = Records(self.folder / FILE, size)
            try:
                self._take_steps(training, _next_batch(batches))
            finally:
                self.records.close()
        if self.step == self.steps:
            digest = training.digest() if training.digest else self._digest()
            self.note("done", digest=digest)

    def _context(self) -> Context:
        name = self.request["variant"]
        options = dict(self.declared["variants"][name])
        own = options.pop("batches", {})
        batches = self.declared["batches"]
        if set(batches) == {"function"}:
            batches = found(batches["function"], "batches")(options)
        store = self.declared["store"]
        return Context(
            variant=name,
            options=options,
            framework=self.request["framework"],
            seed=self.request["seed"],
            steps=self.steps,
            folder=self.folder,
            batches={**batches, **own},
            opened=None if store is None else lambda: open_store(store, Path(self.request["folder"])),
            digest=bool(self.declared["digest"]),
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
            if (memory := facts.memory_now()) is not None and (step % _MEMORY_EVERY == 0 or step + 1 == self.steps):
                row["memory"] = float(memory)
            self.records.add(step, row)
            self.step = step + 1
            if self.stopping or self._is_due(step, self.declared["checkpoint_every"]):
                self._checkpoint()

    def _take_step(self, training: Training, step: int, next_batch: Callable[[], tuple[Any, ...]]) -> dict[str, float]:
        """What the step reported, and how long it waited and took; the digest is counted to neither."""
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
                "batches: expected arrays by name, whose digest shows that runs were given the same data, found "
                f"{type(batch).__name__}: {' '.join(str(error).split()):.200}; digest=False declares a study without"
            ) from error

    def _is_due(self, step: int, every: int | None) -> bool:
        """Whether something is done after this step: every so many, and after the last."""
        return step + 1 == self.steps or (every is not None and (step + 1) % every == 0)

    # ------------------------------------------------------------------ checkpoints

    def _checkpoint(self) -> None:
        """Save all that is needed to go on; without a state only the records reach the disk."""
        size = self.records.settle()
        if self.parts["state"] is None:
            return
        saved = {
            "version": _VERSION,
            "step": self.step,
            "records": size,
            "facts": self.facts(),
            "digest": self.digest.state_dict(),
            "parts": {name: states.taken(part, name, self.begun[name]) for name, part in self.parts.items()},
            "generators": values.global_generators(),
        }
        write_checkpoint(self.folder / "checkpoint", saved)
        self.note("partial")

    def _restore(self) -> int:
        """Go on from the checkpoint, if there is one; how many bytes of the records hold."""
        file = self.folder / "checkpoint"
        if not file.exists():
            return 0
        saved = read_checkpoint(file)
        if saved["version"] != _VERSION:
            raise StateError(f"{file}: expected version {_VERSION}, found {saved['version']}, of another mouse-data")
        for name, part in self.parts.items():
            states.give(part, saved["parts"][name], name)
        values.set_global_generators(saved["generators"])
        self.step, self.before = saved["step"], saved["facts"]
        self.first_step = self.before["first_step_seconds"]
        self.digest = StreamDigest.from_state(saved["digest"])
        print(f"goes on at step {self.step}", flush=True)  # noqa: T201  into the run's log
        return int(saved["records"])

    # ------------------------------------------------------------------ facts

    def facts(self) -> dict[str, Any]:
        """What is known by now of all processes that this run had."""
        compiled = self.compiling.seconds
        known = compiled is not None and self.before["compile_seconds"] is not None
        return {
            "seconds": self.before["seconds"] + time.perf_counter() - _BEGAN,
            "compile_seconds": self.before["compile_seconds"] + compiled if known else None,
            "first_step_seconds": self.first_step,
            "peak_memory": max(self.before["peak_memory"] or 0, facts.peak_memory() or 0) or None,
            "versions": facts.versions(self.before["versions"]),
            "undigested": self.before.get("undigested") or self.loaders.undigested(),
        }

    def note(self, status: str, **more: Any) -> None:
        """Write down how far the run is."""
        noted = {
            "status": status,
            "steps": self.step,
            **self.facts(),
            "fingerprint": self.fingerprint,
            "machine": facts.machine(self.declared["threads"]),
            **more,
        }
        write_json(self.folder / "run.json", noted)

    def _digest(self) -> str | None:
        return self.loaders.with_theirs(self.digest) if self.declared["digest"] else None


class _Loaders:
    """The loaders of ``Context.loader()`` that a training made for itself, beside the one that the run is given.

    Args:
        made: All that were made, to which those are added that are made later.
        batches: Where the run's batches come from: a loader, or its ``next_batch``.
    """

    def __init__(self, made: list[Any] | None = None, batches: Any = None) -> None:
        self._made = [] if made is None else made
        self._begun_with = len(self._made)
        self.more = [loader for loader in self._made if loader is not _loader_of(batches)]

    def undigested(self) -> str | None:
        """Of what the study has given no digest is kept; None: of nothing."""
        later = len(self._made) - self._begun_with
        if later:
            return f"{later} loader{'s' * (later > 1)} made after the first step had begun"
        if any(not _digests(loader) for loader in self.more):
            return "loaders made with digest=False"
        return None

    def with_theirs(self, digest: StreamDigest) -> str | None:
        """The digest of all that was given: that of the batches alone, if these loaders gave nothing."""
        theirs = [loader.digest for loader in self.more if _digests(loader)]
        if not any(one.windows for one in theirs):
            return digest.hexdigest() if digest.windows else None
        said = ", ".join(str(one) for one in (digest, *theirs))  # in which order they were made tells them apart
        return hashlib.sha256(said.encode()).hexdigest()[:32]


def _loader_of(batches: Any) -> Any:
    """The loader whose ``next_batch`` is given; anything else as it is."""
    owner = getattr(batches, "__self__", None)
    return owner if getattr(owner, "next_batch", None) == batches else batches


def _digests(loader: Any) -> bool:
    try:
        return loader.digest is not None
    except ConfigError:
        return False


@contextmanager
def _batches(training: Training, context: Context) -> Iterator[Any]:
    """Where batches come from; None where the training has none. What is made here is closed."""
    if training.batches is not None or context.opened is None:
        yield _loader_of(training.batches)
        return
    with replace(context, digest=False, made=[]).loader() as loader:  # of which this process digests every batch
        yield loader


def _next_batch(batches: Any) -> Callable[[], tuple[Any, ...]]:
    """The function that gives the arguments of the next step."""
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
    """What a step or an evaluation gave, by name."""
    given = values if isinstance(values, Mapping) else {name: values}
    if name == "loss" and name not in given:
        raise ConfigError(f"step: expected a loss, found only {sorted(given)}")
    if ours := sorted(set(given) & set(_OURS)):
        raise ConfigError(f"step: expected others than {', '.join(_OURS)}, which are recorded anyway, found {ours}")
    return {key: _number(value, key) for key, value in given.items()}


def _number(value: Any, name: str) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name}: expected a number, or an array of one, found {type(value).__name__}") from error


# ---------------------------------------------------------------------- the process


def _end_with(parent: int) -> None:
    """End this process, and those that it started, as soon as the one that started it has ended."""

    def wait() -> None:
        while os.read(parent, 4096):
            pass
        if os.name == "posix":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Do what the first line of the input asks for."""
    request = json.loads(sys.stdin.buffer.readline())
    _end_with(sys.stdin.fileno())
    folder = Path(request["folder"])
    if request["run"] is None:
        with alone(folder / "store.lock", "store", wait=True):
            make_store(request["study"]["store"], folder)
        return 0
    own = folder / "runs" / request["run"]
    # A process of a study that was killed may not have seen it yet.
    with alone(own / "lock", "study", wait=True):
        worker = Worker(request, own)
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
