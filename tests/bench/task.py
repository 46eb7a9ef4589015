"""What all contenders of a workload are given: the same data, the same windows to deliver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore


@dataclass(frozen=True)
class Task:
    """Batches of `batch_size` random windows of `sequence_length` steps over one dataset.

    Args:
        folder: The dataset's, as `datasets.load_from_disk` reads it.
        scratch: For the copies that peers need.
        sequence_length: S.
        batch_size: B.
        columns: The columns to deliver; by default all.
        dtypes: Delivered dtypes that are the stored ones, where ours would be wider.
        multiple: Batches that ours may plan together, and which are therefore measured together.
    """

    folder: Path
    scratch: Path
    sequence_length: int
    batch_size: int
    columns: Sequence[str] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    multiple: int = 1

    @cached_property
    def dataset(self) -> Any:
        """The dataset, of the chosen columns."""
        import datasets

        dataset = datasets.load_from_disk(str(self.folder))
        return dataset if self.columns is None else dataset.select_columns(list(self.columns))

    @cached_property
    def store(self) -> DatasetStore:
        """Ours, over the whole dataset."""
        import datasets

        return DatasetStore().from_dataset(datasets.load_from_disk(str(self.folder)))

    def source(self, *, stored_dtypes: bool = True, seed: int = 0) -> BatchSource:
        """Ours, delivering the stored dtypes or the documented ones."""
        names = None
        if self.columns is not None:
            every = self.store.snapshot().spec.values()
            names = [spec.name for spec in every if spec.column in self.columns]
        return BatchSource(
            self.store,
            self.sequence_length,
            self.batch_size,
            seed=seed,
            fields=names,
            dtypes=self.dtypes if stored_dtypes else None,
        )

    @property
    def rows(self) -> int:
        """Steps in the dataset."""
        return len(self.dataset)

    @cached_property
    def array_files(self) -> dict[str, Path]:
        """The columns as .npy files `[rows, ...]`, for peers that read arrays."""
        folder = self.scratch / f"arrays-{self.folder.name}"
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name in self.dataset.column_names:
            files[name] = folder / f"{name}.npy"
            if not files[name].exists():
                np.save(files[name], column_array(self.dataset, name))
        return files

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The same, mapped."""
        return {name: np.load(path, mmap_mode="r") for name, path in self.array_files.items()}

    def starts(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """`count` random windows, for peers that do not draw them themselves."""
        return np.random.default_rng(seed).integers(0, self.rows - self.sequence_length + 1, count)


def column_array(dataset: Any, name: str) -> npt.NDArray[Any]:
    """A column of equally long rows as one array `[rows, ...]`."""
    array = dataset.data.table.column(name).combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    shape: list[int] = [len(array)]
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        shape.append(len(array.values) // len(array))
        array = array.flatten()
    return np.asarray(array).reshape(shape)
