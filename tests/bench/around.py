"""Fields at offsets around an anchor: the rows that a robot's policy trains on, and LeRobot's way to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore
from mouse_core.bench import ColumnAddresses, Contender, Pieces, interleave
from tests.bench.floor import check_floor, floor, floor_name
from tests.bench.results import Table, table_of
from tests.bench.settings import Settings

JOINTS = 14
EPISODE = 400
POLICY: Mapping[str, Sequence[int]] = {"obs_continuous": range(-1, 1), "action": range(50)}
STATES: Mapping[str, Sequence[int]] = {"obs_continuous": range(-1, 1)}
COLUMNS = {"obs_continuous": "observation", "action": "action"}
_MULTIPLE = 16
# Bytes that the floor goes through, again and again: more than caches hold, as ours reads other rows every time.
_FLOOR_BYTES = 1 << 28


def table(settings: Settings, batch_size: int, windows: Mapping[str, Sequence[int]] = POLICY) -> Table:
    """Two states, and chunks of fifty actions, of 14 joints each, from episodes of 400 rows."""
    task = Robot(settings, batch_size, windows)
    whole = task.source(pad=False)
    pieces = [task.pieces(whole, 0)]
    pieces += [task.pieces(whole, index) for index in range(1, max(64, min(512, _FLOOR_BYTES // pieces[0].nbytes)))]
    check_floor(_Fields(whole, windows), pieces[1], 1)  # type: ignore[arg-type]
    # What a plain window of the longest of these costs, which needs no other copying.
    longest = max(windows, key=lambda name: len(windows[name]))
    plain = BatchSource(
        task.store,
        len(windows[longest]),
        batch_size,
        fields=[longest],
        dtypes={longest: "float32"},
        boundary="episode",
        pad=False,
    )
    contenders = [
        Contender(floor_name(), floor(pieces), kind="floor", multiple=_MULTIPLE),
        Contender("mouse source[i]", task.source().__getitem__, kind="ours", multiple=_MULTIPLE),
        Contender("mouse source[i], pad=False", whole.__getitem__, kind="ours", multiple=_MULTIPLE),
        Contender(
            f"mouse windows of {len(windows[longest])} steps, {longest} alone",
            plain.__getitem__,
            kind="ours",
            multiple=_MULTIPLE,
        ),
        Contender("LeRobot-style delta queries over datasets", _Deltas(task)),
    ]
    timings = interleave(contenders, rounds=settings.rounds, budget_seconds=settings.budget)
    what = " and ".join(f"{len(offsets)} of {name}" for name, offsets in windows.items())
    name = "around-states" if windows is STATES else "around"
    title = f"Windows by field, B={batch_size}: {what}, 14 joints"
    return table_of(f"{name}-{batch_size}", title, timings, nbytes=pieces[0].nbytes)


class _Fields:
    """The fields of a source without their masks, which the floor does not copy."""

    def __init__(self, source: BatchSource, names: Mapping[str, Any]) -> None:
        self._source, self._names = source, names

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        batch = self._source[index]
        return {name: values for name, values in batch.items() if name in self._names}


class Robot:
    """The rows, and sources over them."""

    def __init__(self, settings: Settings, batch_size: int, windows: Mapping[str, Sequence[int]]) -> None:
        self.batch_size, self.windows = batch_size, windows
        self.folder = settings.folder / f"robot-{settings.rows}"
        if not (self.folder / "state.json").exists():
            _write(self.folder, settings.rows)

    @cached_property
    def dataset(self) -> Any:
        """The dataset."""
        import datasets

        return datasets.load_from_disk(str(self.folder))

    @cached_property
    def store(self) -> DatasetStore:
        """Ours."""
        return DatasetStore().from_dataset(self.dataset)

    @cached_property
    def columns(self) -> dict[str, ColumnAddresses]:
        """Where the columns lie."""
        return {name: ColumnAddresses(self.dataset.data.table.column(name).chunks) for name in COLUMNS.values()}

    def source(self, **options: Any) -> BatchSource:
        """Ours, in the stored dtypes."""
        dtypes = {"obs_continuous": "float32"}
        fields = list(self.windows)
        return BatchSource(
            self.store, batch_size=self.batch_size, fields=fields, dtypes=dtypes, windows=self.windows, **options
        )

    def pieces(self, source: BatchSource, index: int) -> Pieces:
        """What a batch consists of whose rows are all there."""
        starts, parts = source.plan(index).starts, []
        for name in source.spec:
            if name in self.windows:
                offsets = self.windows[name]
                found = self.columns[COLUMNS[name]].pieces(starts + offsets[0] + (name == "action"), len(offsets))
                assert found is not None, f"{name} has no fixed width"
                parts.append(found)
        return Pieces.of_columns(parts)


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

    def __init__(self, task: Robot) -> None:
        self._task = task
        whole = self._whole = task.dataset.with_format("torch")
        self._views = {name: whole.select_columns([column]) for name, column in COLUMNS.items()}

    def __call__(self, number: int) -> Any:
        import torch

        items = []
        rows = np.random.default_rng(number).integers(0, len(self._task.dataset), self._task.batch_size)
        for row in rows.tolist():
            first = row - row % EPISODE
            item: dict[str, Any] = dict(self._whole[row])
            for name, offsets in self._task.windows.items():
                asked = [row + offset + (name == "action") for offset in offsets]
                held = [max(first, min(first + EPISODE - 1, one)) for one in asked]
                item[name] = torch.stack(list(self._views[name][held][COLUMNS[name]]))
                item[f"{name}_is_pad"] = torch.tensor([one != other for one, other in zip(asked, held, strict=True)])
            items.append(item)
        return torch.utils.data.default_collate(items)
