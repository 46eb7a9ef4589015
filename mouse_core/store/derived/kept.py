"""Derived columns on disk: a file for each, which says what it was computed from, and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.files.writing import make_folder, replacing, storing
from mouse_core.spec import FieldSpec
from mouse_core.store.derived.segment import to_arrow
from mouse_core.store.snapshot import Snapshot

Array = npt.NDArray[Any]

_VERSION = 1
_KEY = b"mouse_derived"


def is_lasting(snapshot: Snapshot) -> bool:
    """Whether all rows are those of datasets, and so there in the next process."""
    segments = snapshot.segments
    return all(segment.extent is None for segment in segments) and snapshot.num_rows == sum(
        segment.num_rows for segment in segments
    )


def said_of(snapshot: Snapshot, how: object, spec: FieldSpec) -> dict[str, Any]:
    """What a file says of itself: the version of its form, and what decides about its values."""
    return {
        "version": _VERSION,
        "rows": snapshot.num_rows,
        "fingerprint": snapshot.fingerprint,
        "how": repr(how),
        "dtype": spec.stored_dtype.name,
        "shape": list(spec.shape),
    }


def load(file: Path, said: Mapping[str, Any]) -> Array | None:
    """The values of a file, ``[rows, *shape]``, mapped; None where there is none of which all that is said holds.

    A file that is damaged or cut counts as none, for what was in it can be computed again.
    """
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            if json.loads((reader.schema.metadata or {}).get(_KEY, b"null")) != said:
                return None
            batch = reader.get_batch(0)
            batch.validate()
        column = batch.column(0)
        while pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        values: Array = column.to_numpy(zero_copy_only=True)
        # Values of another type, or another number of them, are damage, too.
        found: Array = values.view(said["dtype"]).reshape(said["rows"], *said["shape"])
        return found
    except (OSError, ValueError, pa.ArrowException):
        return None


def write(file: Path, values: Array, said: Mapping[str, Any]) -> None:
    """Write the values of a file, which replace any that it has.

    Raises:
        StorageError: It cannot be written; the file that was there still is.
    """
    column = to_arrow(np.ascontiguousarray(values))
    schema = pa.schema([(file.stem, column.type)], metadata={_KEY: json.dumps(said).encode()})
    with storing(f"derived fields: {str(file)!r}"):
        make_folder(file.parent)
        with (
            replacing(file) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_batch(pa.record_batch([column], schema=schema))
