"""Replay buffers beside those of TorchRL, cpprb and flashbax: the same rows, written and drawn by each.

A row is a transition: observation and next observation of 17 numbers, an action of 6, reward and done, all float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.replay import ArrayStorage, PrioritizedReplayBuffer, ReplayBuffer, SliceSampler
from tests.bench.measuring import Contender, in_turn
from tests.bench.results import Settings, Table, compare, contenders, peers

Rows = dict[str, npt.NDArray[np.float32]]

BATCH = 256
SLICES, LENGTH = 32, 64
EPISODE = 200
BY_PRIORITY, WRITING = ("prioritized", "updates"), ("add", "extend")
_WIDTHS = {"obs": 17, "next_obs": 17, "action": 6, "reward": 0, "done": 0}
_PEERS = ("of_cpprb", "of_torchrl", "of_flashbax")
_CHUNK = 100_000


def make_rows(count: int, *, first: int = 0, widths: dict[str, int] | None = None) -> Rows:
    """``count`` rows of a stream of episodes of 200 steps, of which these are the ones from ``first``."""
    random = np.random.default_rng([7, first])
    rows = {
        name: random.standard_normal((count, width) if width else count, np.float32)
        for name, width in (widths or _WIDTHS).items()
    }
    rows["done"] = ((np.arange(first, first + count) + 1) % EPISODE == 0).astype(np.float32)
    return rows


def chunks(count: int) -> Iterator[Rows]:
    """The same rows, a few at a time."""
    for first in range(0, count, _CHUNK):
        yield make_rows(min(_CHUNK, count - first), first=first)


def small_rows(count: int) -> dict[str, npt.NDArray[Any]]:
    """Rows as devices have them: an observation of 8 numbers, reward, action and done."""
    rows = make_rows(count, widths={"obs": 8, "reward": 0})
    return {**rows, "action": np.zeros(count, np.int32), "done": rows["done"] > 0}


def priorities(rows: int) -> npt.NDArray[np.float64]:
    """One for each row."""
    return np.abs(np.random.default_rng(3).standard_normal(rows)) + 0.01


def updated(rows: int) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.float64]]]:
    """Indices and priorities ``[256]`` to set in turn; the indices come again, each time with other priorities."""
    random = np.random.default_rng(4)
    index, priority = random.integers(0, rows, (1000, BATCH)), np.abs(random.standard_normal((997, BATCH))) + 0.01
    return [index[turn % 1000] for turn in range(4000)], [priority[turn % 997] for turn in range(4000)]


def written(work: str) -> list[dict[str, Any]]:
    """What is written in turn: rows one by one, or 256 at once."""
    if work == "extend":
        return [make_rows(BATCH, first=number * BATCH) for number in range(20)]
    whole = make_rows(1000)
    return [{name: values[number] for name, values in whole.items()} for number in range(1000)]


def tables(settings: Settings) -> list[Table]:
    """All of it; what each of them does is a function here and in the modules of peers, which may lack some."""
    many, episodes = f"{settings.rows:,} rows", "steps within episodes"
    # Rings that are soon full: memory that was never written to costs page faults, and that is all one would measure.
    works = {
        "prioritized": (f"{BATCH} of {many} by priority", settings.rows),
        "updates": (f"{BATCH} priorities set, of {many}", settings.rows),
        "uniform": (f"{BATCH} of {many}", settings.rows),
        "slices": (f"{SLICES} slices of {LENGTH} {episodes}, {many}", settings.rows),
        "add": ("one row added", 100_000),
        "extend": (f"{BATCH} rows added at once", 100_000),
    }
    found = [
        compare(
            settings, f"replay-{work}", f"Replay: {title}", [_ours(work, rows), *peers(_PEERS, "replay", work, rows)]
        )
        for work, (title, rows) in works.items()
    ]
    return [*found, _large(settings)]


def _ours(work: str, rows: int) -> Contender:
    buffer: Any = ReplayBuffer(ArrayStorage(rows), batch_size=BATCH)
    if work in WRITING:
        return Contender(
            f"mouse {work}", in_turn({"add": buffer.append}.get(work, buffer.extend), written(work)), "ours"
        )
    if work in BY_PRIORITY:
        buffer = PrioritizedReplayBuffer(0.6, 0.4, storage=ArrayStorage(rows), batch_size=BATCH)
    elif work == "slices":
        buffer = _of_slices(rows)
    for chunk in chunks(rows):
        buffer.extend(chunk)
    if work in BY_PRIORITY:
        buffer.update_priority(np.arange(rows), priorities(rows))
    name = "SliceSampler" if work == "slices" else type(buffer).__name__
    setting = in_turn(buffer.update_priority, *updated(rows))
    return Contender(f"mouse {name}", setting if work == "updates" else lambda _: buffer.sample(), "ours")


def _of_slices(rows: int) -> ReplayBuffer:
    sampler = SliceSampler(sequence_length=LENGTH, end_key="done", pad=False)
    return ReplayBuffer(ArrayStorage(rows), sampler, batch_size=SLICES)


def _large(settings: Settings) -> Table:
    """Slices at the usual size and at 50 times as many rows, whose observations are stored once (100 bytes each)."""
    chunk = make_rows(_CHUNK, widths={name: width for name, width in _WIDTHS.items() if name != "next_obs"})
    calls = {}
    for rows in (settings.rows, settings.rows * (5 if settings.quick else 50)):
        buffer = _of_slices(rows)
        for _ in range(rows // _CHUNK):
            buffer.extend(chunk)
        calls[f"{rows:,} rows"] = lambda number, buffer=buffer: buffer.sample()
    title = f"Replay: {SLICES} slices of {LENGTH} steps from few and from many rows"
    return compare(settings, "replay-large", title, contenders(calls, kind="ours"))
