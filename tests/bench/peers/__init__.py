"""What people use now, each in its fastest documented way, on the same data and windows."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator

from mouse_core.bench import Contender
from tests.bench.task import Task

PEERS = ("of_datasets", "of_torch", "of_flashbax", "of_cpprb", "of_grain")


def peers(task: Task, chosen: tuple[str, ...] = PEERS, notes: list[str] | None = None) -> Iterator[Contender]:
    """The contenders of some peers; one that is not installed or cannot do the task leaves a note instead."""
    for name in chosen:
        try:
            module = importlib.import_module(f"tests.bench.peers.{name}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from module.contenders(task)
        except ImportError as error:
            if notes is not None:
                notes.append(f"{name.removeprefix('of_')} did not take part: {error}")
