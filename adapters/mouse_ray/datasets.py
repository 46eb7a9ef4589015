"""Stores as Ray Datasets, in blocks of complete episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import ray.data
from ray.data.block import BlockAccessor, BlockMetadata

from mouse_core import BatchSource, ConfigError, MissingFieldError, Snapshot
from mouse_core.metadata import DatasetMetadata, with_metadata
from mouse_core.spec import check_count, check_list
from mouse_core.store import Store

_EPISODE = "episode"


def read(
    store: Store | Snapshot, *, fields: Sequence[str] | None = None, rows_per_block: int = 4096
) -> ray.data.Dataset:
    """Return a Ray Dataset of the steps, with the store's fields as columns.

    A block has complete episodes with about ``rows_per_block`` steps, and at least one episode. Ray delivers blocks as
    soon as they are finished, in any order, unless ``execution_options.preserve_order`` is set in Ray's
    ``DataContext``. With ``dataset.streaming_split(n)`` every trainer gets complete blocks, so each episode goes to one
    trainer. With ``equal=True``, Ray splits blocks, even within episodes, and all trainers get the same number of
    steps.

    Every block is an Arrow table with the store's metadata (``mouse_core.metadata``): alignment, environments and
    tasks. Files that Ray writes from blocks keep the metadata.

    Args:
        store: The store of the steps. Ray's tasks read datasets on disk from the same path; steps that are only in
            memory are sent through the object store.
        fields: The fields to read; by default all fields. The additional column ``episode``, int64, is the index of the
            episode, from 0.
        rows_per_block: The approximate number of steps in a block. Ray splits blocks that are larger than
            ``DataContext.target_max_block_size`` (128 MB).

    Raises:
        ConfigError: The store has no steps, or an argument is invalid.
        MissingFieldError: A field is missing in a dataset of the store.
    """
    snapshot = store.snapshot() if isinstance(store, Store) else store
    if not isinstance(snapshot, Snapshot):
        raise ConfigError(f"read: expected a DatasetStore or a Snapshot, found {type(store).__name__}")
    rows_per_block = check_count("rows_per_block", rows_per_block)
    if not snapshot.num_rows:
        raise ConfigError(snapshot.if_empty)
    names = list(snapshot.spec if fields is None else check_list("fields", fields))
    if not names:
        raise MissingFieldError(f"fields: expected some of {list(snapshot.spec)}, found {names}")
    BatchSource(snapshot, sequence_length=1, batch_size=1, fields=names)  # raises errors for invalid fields
    if _EPISODE in names:
        raise ConfigError(
            f"fields: expected no field {_EPISODE!r}, the name of the column with the index of the episode"
        )
    metadata = store.metadata.replace(fields=(), max_action_dim=None, max_obs_continuous_dim=None)
    source = _Episodes(snapshot, tuple(names), rows_per_block, metadata)
    # The exact number of blocks is stated, because otherwise Ray would split them further.
    dataset: ray.data.Dataset = ray.data.read_datasource(source, override_num_blocks=len(source.blocks))
    return dataset


@dataclass(frozen=True)
class _Block:
    """The rows ``starts[0] .. end - 1`` of a block. The episodes of the block have the indices ``first``, ``first +
    1``, ..., and begin at the rows ``starts``.
    """

    first: int
    starts: npt.NDArray[np.int64]
    end: int


class _Episodes(ray.data.Datasource):
    """Reads a snapshot block by block."""

    def __init__(
        self, snapshot: Snapshot, names: tuple[str, ...], rows_per_block: int, metadata: DatasetMetadata
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._snapshot, self._names, self._metadata = snapshot, names, metadata
        self.blocks = _cut(np.asarray(snapshot.episode_starts, np.int64), snapshot.num_rows, rows_per_block)
        spec = snapshot.spec
        sizes = [spec[name].dtype.itemsize * int(np.prod(spec[name].shape, dtype=np.int64)) for name in names]
        self._row_bytes = 8 + sum(sizes)

    def get_name(self) -> str:
        return "Episodes"

    def estimate_inmemory_data_size(self) -> int:
        return self._row_bytes * self._snapshot.num_rows

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ray.data.ReadTask]:
        # Steps that are only in memory are sent once, not with every task.
        snapshot = ray.put(self._snapshot)
        tasks = []
        for block in self.blocks:
            rows = block.end - int(block.starts[0])
            metadata = BlockMetadata(num_rows=rows, size_bytes=rows * self._row_bytes, exec_stats=None)
            tasks.append(
                ray.data.ReadTask(
                    partial(_read, snapshot, self._names, block, self._metadata),
                    metadata,
                    per_task_row_limit=per_task_row_limit,
                )
            )
        return tasks


def _cut(starts: npt.NDArray[np.int64], rows: int, rows_per_block: int) -> list[_Block]:
    """Return blocks of complete episodes; a block ends when it has enough rows."""
    ends = np.append(starts[1:], rows)
    blocks, first = [], 0
    while first < len(starts):
        last = int(np.searchsorted(ends, starts[first] + rows_per_block))
        last = min(last, len(starts) - 1)
        blocks.append(_Block(first, starts[first : last + 1], int(ends[last])))
        first = last + 1
    return blocks


def _read(reference: Any, names: Iterable[str], block: _Block, metadata: DatasetMetadata) -> Iterator[Any]:
    snapshot: Snapshot = ray.get(reference)
    begin = int(block.starts[0])
    length = block.end - begin
    windows = snapshot.locate(np.array([begin]), length).part(0)
    columns = {}
    for name in names:
        reader = snapshot.readers[name]
        columns[name] = reader.read(windows, reader.spec.dtype)[0]
    lengths = np.diff(np.append(block.starts, block.end))
    columns[_EPISODE] = block.first + np.repeat(np.arange(len(lengths)), lengths)
    yield with_metadata(BlockAccessor.batch_to_block(columns), metadata)
