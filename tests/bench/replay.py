"""Replay buffers beside those of TorchRL, cpprb and flashbax: the same rows, written and drawn by each.

A row is a transition: observation and next observation of 17 numbers, an action of 6, reward and done, all float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.replay import ArrayStorage, PrioritizedReplayBuffer, ReplayBuffer, SliceSampler
from tests.bench.measuring import Contender
from tests.bench.results import Settings, Table, compare, contenders, peers

Rows = dict[str, npt.NDArray[np.float32]]

BATCH = 256
SLICES, LENGTH = 32, 64
EPISODE = 200
OURS = "mouse"
_WIDTHS = {"obs": 17, "next_obs": 17, "action": 6, "reward": 0, "done": 0}
_PEERS = ("replay_of_cpprb", "replay_of_torchrl", "replay_of_flashbax")
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


def tables(settings: Settings) -> list[Table]:
    """All of it; what each of them does is a function here and in the modules of peers, which may lack some."""
    many, episodes = f"{settings.rows:,} rows", "steps within episodes"
    # Rings that are soon full: memory that was never written to costs page faults, and that is all one would measure.
    works: dict[str, tuple[str, Callable[[int], Contender], int]] = {
        "prioritized": (f"{BATCH} of {many} by priority", _prioritized, settings.rows),
        "updates": (f"{BATCH} priorities set, of {many}", _updates, settings.rows),
        "uniform": (f"{BATCH} of {many}", _uniform, settings.rows),
        "slices": (f"{SLICES} slices of {LENGTH} {episodes}, {many}", _slices, settings.rows),
        "add": ("one row added", _add, 100_000),
        "extend": (f"{BATCH} rows added at once", _extend, 100_000),
    }
    found = [
        compare(settings, f"replay-{work}", f"Replay: {title}", [ours(rows), *peers(_PEERS, work, rows)])
        for work, (title, ours, rows) in works.items()
    ]
    return [*found, _large(settings)]


def _filled(buffer: Any, rows: int) -> Any:
    for chunk in chunks(rows):
        buffer.extend(chunk)
    return buffer


def _with_priorities(rows: int) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(0.6, 0.4, storage=ArrayStorage(rows), batch_size=BATCH)
    _filled(buffer, rows)
    buffer.update_priority(np.arange(rows), priorities(rows))
    return buffer


def priorities(rows: int) -> npt.NDArray[np.float64]:
    """One for each row."""
    return np.abs(np.random.default_rng(3).standard_normal(rows)) + 0.01


def _prioritized(rows: int) -> Contender:
    buffer = _with_priorities(rows)
    return Contender(f"{OURS} PrioritizedReplayBuffer", lambda number: buffer.sample(), "ours")


def _updates(rows: int) -> Contender:
    buffer = _with_priorities(rows)
    index, priority = updated(rows)
    return Contender(
        f"{OURS} PrioritizedReplayBuffer",
        lambda number: buffer.update_priority(index[number % len(index)], priority[number % len(priority)]),
        "ours",
    )


def updated(rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Indices ``[1000, 256]`` and priorities ``[997, 256]`` to set in turn, so that a row gets another each time."""
    random = np.random.default_rng(4)
    return random.integers(0, rows, (1000, BATCH)), np.abs(random.standard_normal((997, BATCH))) + 0.01


def _uniform(rows: int) -> Contender:
    buffer = _filled(ReplayBuffer(ArrayStorage(rows), batch_size=BATCH), rows)
    return Contender(f"{OURS} ReplayBuffer", lambda number: buffer.sample(), "ours")


def _slices(rows: int) -> Contender:
    buffer = _filled(_of_slices(rows), rows)
    return Contender(f"{OURS} SliceSampler", lambda number: buffer.sample(), "ours")


def _of_slices(rows: int) -> ReplayBuffer:
    sampler = SliceSampler(sequence_length=LENGTH, end_key="done", pad=False)
    return ReplayBuffer(ArrayStorage(rows), sampler, batch_size=SLICES)


def _add(rows: int) -> Contender:
    buffer = ReplayBuffer(ArrayStorage(rows))
    some = single_rows()
    return Contender(f"{OURS} add", lambda number: buffer.append(some[number % len(some)]), "ours")


def single_rows() -> list[dict[str, Any]]:
    """Rows one by one."""
    whole = make_rows(1000)
    return [{name: values[number] for name, values in whole.items()} for number in range(1000)]


def _extend(rows: int) -> Contender:
    buffer = ReplayBuffer(ArrayStorage(rows))
    some = [make_rows(BATCH, first=number * BATCH) for number in range(20)]
    return Contender(f"{OURS} extend", lambda number: buffer.extend(some[number % len(some)]), "ours")


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
