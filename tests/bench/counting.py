"""Statistics of a store beside NumPy's own sum over the same memory, and what normalising a batch costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore
from mouse_core.bench import Contender, interleave
from mouse_core.statistics import statistics
from tests.bench.results import Table, table_of
from tests.bench.workloads import Settings

_WIDTH, _PIECE = 17, 1 << 18
_KINDS: Any = {"obs_continuous": "mean_std", "action": "min_max"}


def tables(settings: Settings) -> list[Table]:
    """Both tables."""
    rows = 10 * settings.rows if not settings.quick else settings.rows
    observation = np.random.default_rng(0).normal(3, 2, (rows, _WIDTH)).astype(np.float32)
    store = DatasetStore()
    for begin in range(0, rows, _PIECE):
        part = observation[begin : begin + _PIECE]
        n = len(part)
        store.extend({"action": part[:, :6], "reward": part[:, 0], "done": np.zeros(n, np.int64), "observation": part})
    return [_passes(settings, store, observation), _batches(settings, store)]


def _passes(settings: Settings, store: DatasetStore, observation: Any) -> Table:
    snapshot = store.snapshot()
    wide = np.dtype(np.float64)
    passes: dict[str, Callable[[int], Any]] = {
        "NumPy sum by dimension, float64": lambda _: observation.sum(axis=0, dtype=wide),
        "NumPy sum by dimension, float32": lambda _: observation.sum(axis=0),
        "NumPy mean and std by dimension, float64": lambda _: (
            observation.mean(axis=0, dtype=wide),
            observation.std(axis=0, dtype=wide),
        ),
        "mouse statistics, no quantiles": lambda _: statistics(snapshot, "obs_continuous", quantiles=()),
        "mouse statistics, five quantiles": lambda _: statistics(snapshot, "obs_continuous"),
    }
    timings = interleave(
        [Contender(name, call, "ours" if "mouse" in name else "peer") for name, call in passes.items()],
        rounds=max(5, settings.rounds // 4),
        budget_seconds=3 * settings.budget,
    )
    return table_of(
        "statistics",
        f"One pass over {len(observation):,} rows of {_WIDTH} float32",
        timings,
        nbytes=observation.nbytes,
        notes=["Ours has count, mean, deviation, lowest and highest; processor time, of all threads."],
    )


def _batches(settings: Settings, store: DatasetStore) -> Table:
    options: dict[str, Any] = {"dtypes": {"obs_continuous": "float32"}}
    plain, normalized = BatchSource(store, 64, 32, **options), BatchSource(store, 64, 32, normalize=_KINDS)
    scalings = normalized.normalizer
    numbers = {name: (one.centre.astype("f4"), one.spread.astype("f4")) for name, one in scalings.items()}

    def by_hand(index: int) -> None:
        batch = plain[index]
        for name, (centre, spread) in numbers.items():
            batch[name] = (batch[name] - centre) / spread

    timings = interleave(
        [
            Contender("mouse source[i]", plain.__getitem__, "ours"),
            Contender("mouse source[i], normalised by hand", by_hand, "peer"),
            Contender("mouse source[i], normalize=", normalized.__getitem__, "ours"),
        ],
        rounds=settings.rounds,
        budget_seconds=settings.budget,
    )
    return table_of("normalize", f"Normalised batches, B=32, S=64, {_WIDTH} and 6 numbers a step", timings)
