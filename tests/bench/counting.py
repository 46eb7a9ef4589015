"""Statistics and derived fields beside NumPy's own sums, and what normalising a batch and ``map=`` cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore, Map
from mouse_core.statistics import statistics
from mouse_core.store.derived import DerivedStore, NStepReturn, Return
from tests.bench.results import Settings, Table, compare, contenders
from tests.bench.workloads import NARROW

_WIDTH, _PIECE = 17, 1 << 18
# Batches that are planned and copied together.
_TOGETHER = 1024
_KINDS: Any = {"obs_continuous": "mean_std", "action": "min_max"}


def tables(settings: Settings) -> list[Table]:
    """All tables."""
    rows = 10 * settings.rows if not settings.quick else settings.rows
    observation = np.random.default_rng(0).normal(3, 2, (rows, _WIDTH)).astype(np.float32)
    store = DatasetStore()
    for begin in range(0, rows, _PIECE):
        part = observation[begin : begin + _PIECE]
        n = len(part)
        store.extend({"action": part[:, :6], "reward": part[:, 0], "done": np.zeros(n, np.int64), "observation": part})
    tables = [_passes(settings, store, observation), _batches(settings, store), _maps(settings, store)]
    return [*tables, _derived(settings, observation[: settings.rows, 0])]


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
    title = f"One pass over {len(observation):,} rows of {_WIDTH} float32"
    notes = [
        "mouse computes count, mean, standard deviation, minimum and maximum. Times are the processor time of all "
        "threads."
    ]
    options: dict[str, Any] = {"rounds": max(5, settings.rounds // 4), "budget": 3, "nbytes": observation.nbytes}
    return compare(settings, "statistics", title, contenders(passes), **options, notes=notes)


def _batches(settings: Settings, store: DatasetStore) -> Table:
    plain, normalized = BatchSource(store, 64, 32, dtypes=NARROW), BatchSource(store, 64, 32, normalize=_KINDS)
    scalings = normalized.normalizer
    numbers = {name: (one.centre.astype("f4"), one.spread.astype("f4")) for name, one in scalings.items()}

    def by_hand(index: int) -> None:
        batch = plain[index]
        for name, (centre, spread) in numbers.items():
            batch[name] = (batch[name] - centre) / spread

    calls = {
        "mouse source[i]": plain.__getitem__,
        "mouse source[i], normalised by hand": by_hand,
        "mouse source[i], normalize=": normalized.__getitem__,
    }
    title = f"Normalised batches, B=32, S=64, {_WIDTH} and 6 numbers a step"
    first, second, third = contenders(calls, multiple=_TOGETHER)
    return compare(settings, "normalize", title, [first, replace(second, kind="peer"), third])


def identity(fields: dict[str, Any], _: np.random.Generator) -> dict[str, Any]:
    """The rewards as they are."""
    return {"reward": fields["reward"]}


def _maps(settings: Settings, store: DatasetStore) -> Table:
    """A function that does nothing, called for every batch."""
    mapped = Map(identity, "identity/1", {"reward": ("float32", ())})
    calls = {
        "mouse source[i]": BatchSource(store, 64, 32, dtypes=NARROW).__getitem__,
        "mouse source[i], map=": BatchSource(store, 64, 32, map=mapped, dtypes=NARROW).__getitem__,
    }
    title = "Batches through a function that does nothing, B=32, S=64"
    return compare(settings, "map", title, contenders(calls, multiple=_TOGETHER))


def _derived(settings: Settings, rewards: Any) -> Table:
    """Returns of episodes of 1,000 rows, computed anew, beside NumPy's running sum of the same numbers."""
    done = (np.arange(len(rewards)) % 1000 == 999).astype(np.int64)
    store = DatasetStore(alignment="outgoing")
    store.extend({"action": done, "reward": rewards, "done": done, "episode_step": np.arange(len(rewards)) % 1000})
    wide, rows = rewards.astype(np.float64), np.array([0])
    _ = store.snapshot().episode_starts  # which are looked up once, whatever is derived

    def read(derivation: Any) -> Callable[[int], Any]:
        return lambda _: DerivedStore(store, {"derived": derivation}).snapshot().stored("derived", rows)

    passes = {
        "NumPy cumsum, float64": lambda _: np.cumsum(wide),
        "mouse Return(0.99)": read(Return(0.99)),
        "mouse NStepReturn(3, 0.99)": read(NStepReturn(3, 0.99)),
        "mouse NStepReturn(500, 0.99)": read(NStepReturn(500, 0.99)),
    }
    notes = [
        "The times of mouse include reading rewards and ends of episodes from the store. The results of mouse are "
        "float32."
    ]
    title, rounds = f"Fields computed from {len(rewards):,} rows", max(5, settings.rounds // 4)
    return compare(settings, "derived", title, contenders(passes), rounds=rounds, notes=notes)
