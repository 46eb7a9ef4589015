"""Trainings that tests of studies run: with NumPy alone, which takes no second to import."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import DatasetStore, PrefetchBatchifier
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.testing import example_store
from mouse_study import Context, Study, Training

BATCHES = {"sequence_length": 4, "batch_size": 2, "num_workers": 1}


def made_store() -> DatasetStore:
    return example_store(200)


def once(context: Context, name: str) -> bool:
    """Whether this is the first time that a run asks."""
    mark = context.folder / name
    first = not mark.exists()
    mark.touch()
    return first


def train(context: Context) -> Training:
    """A regression whose steps draw from a generator of its own and from NumPy's global one."""
    random = np.random.default_rng(context.seed)
    state: dict[str, Any] = {"weights": random.normal(size=3), "taken": 0}
    first = once(context, "begun")

    def step(batch: Any) -> dict[str, Any]:
        if state["taken"] == context.options.get("fails_at") and first:
            raise ValueError("a training that\nfails")
        if state["taken"] == context.options.get("killed_at") and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if state["taken"] == context.options.get("interrupts_at") and first:
            os.kill(int((context.folder.parents[4] / "parent").read_text()), signal.SIGINT)
            time.sleep(1.0)  # meanwhile it is told to end
        x = np.asarray(batch["obs_continuous"])[..., :3].reshape(-1, 3)
        noise = random.normal() + np.random.normal()  # noqa: NPY002
        error = x @ state["weights"] - np.asarray(batch["reward"]).reshape(-1) + noise
        state["weights"] = state["weights"] - context.options.get("rate", 1e-3) * (x.T @ error) / len(error)
        state["taken"] += 1
        return {"loss": np.mean(error**2), "size": np.abs(state["weights"]).max()}

    return Training(step, state=(state, random), evaluate=lambda: {"taken": state["taken"]})


def train_on_its_own(context: Context) -> Training:
    """Batches of a loader that the study does not make, which are the same."""
    loader = PrefetchBatchifier(made_store(), seed=context.seed, **BATCHES)
    return replace(train(context), batches=loader)


def train_without_state(context: Context) -> Training:
    return replace(train_on_its_own(context), state=None)


def train_without_batches(context: Context) -> Training:
    random = np.random.default_rng(context.seed)
    return Training(lambda: random.normal() ** 2, state=random)


def train_online(context: Context) -> Training:
    """Learns from a replay buffer, into which it writes what it did."""
    random = np.random.default_rng(context.seed)
    buffer = ReplayBuffer(ArrayStorage(30), batch_size=4, seed=context.seed)
    state = {"mean": 0.0, "taken": 0}
    first = once(context, "begun")

    def act() -> None:
        buffer.append({"reward": random.normal(state["mean"])})

    def step(batch: Any) -> np.floating[Any]:
        if state["taken"] == context.options.get("killed_at") and first:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = batch["reward"] - state["mean"]
        state["mean"] += 0.1 * float(errors.mean())
        state["taken"] += 1
        act()
        return np.square(errors).mean()

    for _ in range(20):
        act()
    return Training(step, state=(state, buffer, random), batches=buffer.sample)


def study(**options: Any) -> Study:
    told: dict[str, Any] = {
        "name": "small",
        "frameworks": {"numpy": train_on_its_own},
        "steps": 20,
        "evaluate_every": 8,
        "checkpoint_every": 6,
        **options,
    }
    return Study(**told)


def main(folder: Path, **options: Any) -> None:
    (folder.parent / "parent").write_text(str(os.getpid()))
    study(**options).run(folder)
