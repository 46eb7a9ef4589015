"""Windows by field, and windows of drawn lengths, of rows that a robot's policy trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore
from tests.bench.floor import Pieces, check_floor, floor, floor_name, pieces_of
from tests.bench.measuring import Contender
from tests.bench.results import Settings, Table, compare, contenders

JOINTS = 14
EPISODE = 400
POLICY: Mapping[str, Sequence[int]] = {"obs_continuous": range(-1, 1), "action": range(50)}
STATES: Mapping[str, Sequence[int]] = {"obs_continuous": range(-1, 1)}
COLUMNS = {"obs_continuous": "observation", "action": "action"}
_LENGTH = 64
_MULTIPLE = 16
# Bytes that the floor goes through, again and again: more than caches hold, as ours reads other rows every time.
_FLOOR_BYTES = 1 << 28
_FLOOR_BATCHES = 32


def table(settings: Settings, batch_size: int, what: str = "") -> Table:
    """Two states, and chunks of fifty actions (or "-states" alone), of 14 joints each, from episodes of 400 rows."""
    windows = STATES if what else POLICY
    task = Robot(settings)
    options: dict[str, Any] = {"batch_size": batch_size, "fields": list(windows), "windows": windows}
    whole = task.source(**options, pad=False)
    pieces = [task.pieces(whole, 0, windows)]
    count = max(64, min(512, _FLOOR_BYTES // pieces[0].nbytes))
    pieces += [task.pieces(whole, index, windows) for index in range(1, count)]
    check_floor(whole, pieces[1], 1, windows)
    # What a plain window of the longest of these costs, which needs no other copying.
    longest = max(windows, key=lambda name: len(windows[name]))
    steps = len(windows[longest])
    narrow: dict[str, Any] = {"fields": [longest], "dtypes": {longest: "float32"}, "boundary": "episode", "pad": False}
    plain = task.source(sequence_length=steps, batch_size=batch_size, **narrow)
    calls = {
        floor_name(): floor(pieces),
        "mouse source[i]": task.source(**options).__getitem__,
        "mouse source[i], pad=False": whole.__getitem__,
        f"mouse windows of {steps} steps, {longest} alone": plain.__getitem__,
    }
    of = contenders(calls, first="floor", multiple=_MULTIPLE)
    of.append(Contender("LeRobot-style delta queries over datasets", _Deltas(task, batch_size, windows)))
    said = " and ".join(f"{len(offsets)} of {name}" for name, offsets in windows.items())
    title = f"Windows by field, B={batch_size}: {said}, 14 joints"
    return compare(settings, f"around{what}-{batch_size}", title, of, nbytes=pieces[0].nbytes)


def ragged(settings: Settings, batch_size: int) -> Table:
    """States and actions of 14 joints each, in windows of 1 to 64 steps within episodes of 400 rows."""
    task, lengths, capacity = Robot(settings), range(1, _LENGTH + 1), batch_size * _LENGTH * 3 // 4

    def source(**options: Any) -> BatchSource:
        fields = list(COLUMNS)
        return task.source(sequence_length=_LENGTH, batch_size=batch_size, fields=fields, boundary="episode", **options)

    packed, padded = source(lengths=lengths, packed=True), source(lengths=lengths)
    pieces = [task.pieces(packed, index) for index in range(_FLOOR_BATCHES)]
    check_floor(packed, pieces[1], 1, COLUMNS)

    def repack(index: int) -> dict[str, npt.NDArray[Any]]:
        """Pack by the mask, as the user of a padded batch does by hand."""
        batch = padded[index]
        mask = batch["mask"]
        return {name: batch[name][mask] for name in COLUMNS} | {"cu_seqlens": np.cumsum(mask.sum(axis=1))}

    calls = {
        floor_name(): floor(pieces),
        "mouse source[i], packed=True": packed.__getitem__,
        f"mouse source[i], packed={capacity}": source(lengths=lengths, packed=capacity).__getitem__,
        "mouse source[i], padded with a mask": padded.__getitem__,
        "padded with a mask, then packed by it": repack,
        f"mouse windows of {_LENGTH} steps": source(pad=False).__getitem__,
    }
    of = contenders(calls, first="floor", kind="ours", multiple=_MULTIPLE)
    title = f"Windows of 1 to {_LENGTH} steps, B={batch_size}: states and actions of 14 joints"
    return compare(settings, f"ragged-{batch_size}", title, of, nbytes=pieces[0].nbytes)


class Robot:
    """The rows, and sources over them."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.folder / f"robot-{settings.rows}"
        if not (self.folder / "state.json").exists():
            _write(self.folder, settings.rows)

    @cached_property
    def dataset(self) -> Any:
        """The dataset."""
        import datasets

        return datasets.load_from_disk(str(self.folder))

    def source(self, **options: Any) -> BatchSource:
        """Ours, in the stored dtypes."""
        return BatchSource(
            DatasetStore().from_dataset(self.dataset), **{"dtypes": {"obs_continuous": "float32"}, **options}
        )

    def pieces(self, source: BatchSource, index: int, windows: Mapping[str, Sequence[int]] | None = None) -> Pieces:
        """What a batch consists of: its rows, which are all there, or of each window the steps that are there."""
        plan, rows = source.plan(index), source.snapshot
        if windows is None:
            return pieces_of(
                rows, [name for name in source.spec if name in COLUMNS], plan.starts, plan.length, plan.lengths
            )
        begins = {name: plan.starts + windows[name][0] + (name == "action") for name in source.spec if name in windows}
        parts = [pieces_of(rows, [name], starts, len(windows[name])) for name, starts in begins.items()]
        return Pieces(np.concatenate([part.source for part in parts]), np.concatenate([part.size for part in parts]))


def _write(folder: Path, rows: int) -> None:
    import datasets

    rows -= rows % EPISODE
    values = np.random.default_rng(0).normal(size=(2, rows * JOINTS)).astype(np.float32)
    step = np.arange(rows) % EPISODE
    vectors = [pa.FixedSizeListArray.from_arrays(pa.array(flat), JOINTS) for flat in values]
    columns = {
        "observation": vectors[0],
        "action": vectors[1],
        "reward": np.zeros(rows, np.float32),
        "done": (step == EPISODE - 1).astype(np.int64),
        "episode_step": step,
    }
    datasets.Dataset(pa.table(columns)).save_to_disk(str(folder))


class _Deltas:
    """For each item its row, and for each key a query of that column at the wanted rows; then the items collated.

    As LeRobot's reader did it when this was written, of items that a DataLoader asks for one by one.
    """

    def __init__(self, task: Robot, batch_size: int, windows: Mapping[str, Sequence[int]]) -> None:
        self._rows, self._batch_size, self._windows = len(task.dataset), batch_size, windows
        whole = self._whole = task.dataset.with_format("torch")
        self._views = {name: whole.select_columns([column]) for name, column in COLUMNS.items()}

    def __call__(self, number: int) -> Any:
        import torch

        items = []
        rows = np.random.default_rng(number).integers(0, self._rows, self._batch_size)
        for row in rows.tolist():
            first = row - row % EPISODE
            item: dict[str, Any] = dict(self._whole[row])
            for name, offsets in self._windows.items():
                asked = [row + offset + (name == "action") for offset in offsets]
                held = [max(first, min(first + EPISODE - 1, one)) for one in asked]
                item[name] = torch.stack(list(self._views[name][held][COLUMNS[name]]))
                item[f"{name}_is_pad"] = torch.tensor([one != other for one, other in zip(asked, held, strict=True)])
            items.append(item)
        return torch.utils.data.default_collate(items)
