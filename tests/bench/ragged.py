"""Windows of lengths that are drawn, packed and padded, beside a loop of memcpy over the steps that are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core import BatchSource
from mouse_core.bench import Contender, Pieces, interleave
from tests.bench.around import COLUMNS, Robot
from tests.bench.floor import check_floor, floor, floor_name
from tests.bench.results import Table, table_of
from tests.bench.settings import Settings

LENGTH = 64
_MULTIPLE = 16
_FLOOR_BATCHES = 32


def table(settings: Settings, batch_size: int) -> Table:
    """States and actions of 14 joints each, in windows of 1 to 64 steps within episodes of 400 rows."""
    task = Robot(settings, batch_size, dict.fromkeys(COLUMNS, ()))

    def source(**options: Any) -> BatchSource:
        return BatchSource(
            task.store,
            LENGTH,
            batch_size,
            fields=list(COLUMNS),
            dtypes={"obs_continuous": "float32"},
            boundary="episode",
            **options,
        )

    lengths = range(1, LENGTH + 1)
    packed, padded = source(lengths=lengths, packed=True), source(lengths=lengths)
    pieces = [_pieces(task, packed, index) for index in range(_FLOOR_BATCHES)]
    check_floor(_Fields(packed), pieces[1], 1)  # type: ignore[arg-type]
    capacity = batch_size * LENGTH * 3 // 4
    contenders = [
        Contender(floor_name(), floor(pieces), kind="floor", multiple=_MULTIPLE),
        Contender("mouse source[i], packed=True", packed.__getitem__, kind="ours", multiple=_MULTIPLE),
        Contender(
            f"mouse source[i], packed={capacity}",
            source(lengths=lengths, packed=capacity).__getitem__,
            kind="ours",
            multiple=_MULTIPLE,
        ),
        Contender("mouse source[i], padded with a mask", padded.__getitem__, kind="ours", multiple=_MULTIPLE),
        Contender("padded with a mask, then packed by it", _Repacked(padded), kind="ours", multiple=_MULTIPLE),
        Contender(f"mouse windows of {LENGTH} steps", source(pad=False).__getitem__, kind="ours", multiple=_MULTIPLE),
    ]
    timings = interleave(contenders, rounds=settings.rounds, budget_seconds=settings.budget)
    title = f"Windows of 1 to {LENGTH} steps, B={batch_size}: states and actions of 14 joints"
    return table_of(f"ragged-{batch_size}", title, timings, nbytes=pieces[0].nbytes)


def _pieces(task: Robot, source: BatchSource, index: int) -> Pieces:
    """What a batch consists of: of each window the steps that are there."""
    plan, parts = source.plan(index), []
    assert plan.lengths is not None
    for name in source.spec:
        if name in COLUMNS:
            column = task.columns[COLUMNS[name]]
            windows = zip(plan.starts, plan.lengths.tolist(), strict=True)
            found = [column.pieces(np.array([start]), length) for start, length in windows]
            parts.append([piece for window in found for piece in window or ()])
    return Pieces.of_columns(parts)


class _Fields:
    """The fields of a packed source without those that say where windows lie, which the floor does not copy."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        return {name: values for name, values in self._source[index].items() if name in COLUMNS}


class _Repacked:
    """What a user of a padded batch does by hand."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __call__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        batch = self._source[index]
        mask = batch["mask"]
        return {name: batch[name][mask] for name in COLUMNS} | {"cu_seqlens": np.cumsum(mask.sum(axis=1))}
