"""Maps of rows beside TorchRL's, and beside Python's dict of the rows' bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from mouse_core.maps import RowMap
from tests.bench.results import Figure, Settings, Table, compare, contenders

WIDTH = 17

Fill = Callable[[], Any]
Look = Callable[[Any], Any]


def tables(settings: Settings) -> list[Table]:
    """Distinct observations written to an empty map, looked up, and written once more."""
    rows = settings.rows
    observations = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    values, order, same = (
        np.arange(rows, dtype=np.float32),
        np.random.default_rng(1).permutation(rows),
        observations.copy(),
    )
    inserting: dict[str, Callable[..., Any]] = {
        "NumPy copying rows and values": lambda _: (observations.copy(), values.copy())
    }
    looking: dict[str, Callable[..., Any]] = {
        "NumPy comparing rows, and taking values": lambda _: ((same == observations).all(), values.copy())
    }
    shuffled: dict[str, Callable[..., Any]] = {
        "NumPy taking rows and values": lambda _: (observations[order], values[order])
    }
    kinds = {"mouse RowMap": _ours, "TorchRL TensorDictMap": _torchrl, "Python's dict of bytes": _dict}
    for name, kind in kinds.items():
        try:
            fill, *looks = kind(observations, values, order)
        except ImportError:
            continue
        filled = fill()
        inserting[name] = lambda _, fill=fill: fill()
        for calls, look in zip((looking, shuffled), looks, strict=True):
            calls[name] = lambda _, look=look, filled=filled: look(filled)
    what = f"Maps: {rows:,} observations of {WIDTH} float32"
    return [
        compare(settings, f"maps-{key}", f"{what} {title}", contenders(calls, first="floor"), budget=3)
        for key, title, calls in (
            ("insert", "inserted", inserting),
            ("lookup", "looked up", looking),
            ("shuffled", "looked up in another order", shuffled),
        )
    ]


def figures(settings: Settings) -> list[Figure]:
    """Memory of a row of a map, beyond its key and value."""
    table = RowMap()
    table[np.arange(settings.rows)] = np.zeros(settings.rows, np.float32)
    beyond = table.nbytes / settings.rows - 12
    return [Figure("maps-memory", "a map's memory for a row, beyond key and value", beyond, "B")]


def _ours(observations: Any, values: Any, order: Any) -> tuple[Fill, Look, Look]:
    rows, shuffled = {"obs": observations}, {"obs": observations[order]}

    def fill() -> RowMap:
        table = RowMap(keys=["obs"])
        table[rows] = {"value": values}
        return table

    return fill, lambda table: table[rows], lambda table: table[shuffled]


def _torchrl(observations: Any, values: Any, order: Any) -> tuple[Fill, Look, Look]:
    import torch
    from tensordict import TensorDict

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    from torchrl.data import LazyTensorStorage
    from torchrl.data.map import QueryModule, SipHash, TensorDictMap

    size = len(values)
    rows = TensorDict({"obs": torch.from_numpy(observations)}, [size])
    given = TensorDict({"value": torch.from_numpy(values)}, [size])
    shuffled = rows[torch.from_numpy(order)]

    def fill() -> Any:
        query = QueryModule(in_keys=["obs"], index_key="index", hash_module=SipHash())
        table = TensorDictMap(query_module=query, storage=LazyTensorStorage(size))
        table[rows] = given
        return table

    return fill, lambda table: table[rows], lambda table: table[shuffled]


def _dict(observations: Any, values: Any, order: Any) -> tuple[Fill, Look, Look]:
    shuffled, numbers = observations[order], values.tolist()

    def fill() -> Any:
        return dict(zip([row.tobytes() for row in observations], numbers, strict=True))

    def look(rows: Any) -> Look:
        return lambda table: np.array([table[row.tobytes()] for row in rows], np.float32)

    return fill, look(observations), look(shuffled)
