"""HDF5 files, written piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_BYTES = 256 << 10


def import_h5py() -> Any:
    """The package h5py; an ImportError that says what to install where it is missing."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 files need h5py: pip install 'mouse-data[formats]'") from error
    return h5py


def append_rows(group: Any, path: str, values: npt.NDArray[Any]) -> None:
    """Add rows to an array of a file or group, in chunks of about 256 KiB; the first rows make it."""
    if path in group:
        dataset = group[path]
        dataset.resize(dataset.shape[0] + len(values), axis=0)
        dataset[dataset.shape[0] - len(values) :] = values
        return
    dtype = import_h5py().string_dtype() if values.dtype.kind in "OSU" else values.dtype
    shape = values.shape[1:]
    row_bytes = int(np.prod(shape, dtype=np.int64)) * values.dtype.itemsize
    rows = max(1, min(len(values), _CHUNK_BYTES // max(1, row_bytes)))
    group.create_dataset(path, data=values, dtype=dtype, chunks=(rows, *shape), maxshape=(None, *shape))
