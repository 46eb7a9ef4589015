"""Derived columns on disk: a file for each, which says what it was computed from, and how, and has a checksum."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.identity import derivation_identity
from mouse_core.errors import MissingFieldError
from mouse_core.files.writing import make_folder, replacing, storing
from mouse_core.spec import FieldSpec
from mouse_core.store._chosen import ChosenSegment
from mouse_core.store._segments import Segment
from mouse_core.store.derived.segment import to_arrow
from mouse_core.store.snapshot import Snapshot

Array = npt.NDArray[Any]

_VERSION = 1
_KEY = b"mouse_derived"


def is_lasting(snapshot: Snapshot) -> bool:
    """Whether all rows are those of datasets, and so there in the next process."""
    segments = snapshot.segments
    return all(_is_lasting(segment) for segment in segments) and snapshot.num_rows == sum(
        segment.num_rows for segment in segments
    )


def _is_lasting(segment: Segment) -> bool:
    segment = segment.recorded
    return _is_lasting(segment.whole) if isinstance(segment, ChosenSegment) else segment.extent is None


def said_of(snapshot: Snapshot, how: object, spec: FieldSpec) -> dict[str, Any]:
    """What a file says of itself: the version of its form, and what decides about its values."""
    return {
        "version": _VERSION,
        "rows": snapshot.num_rows,
        "fingerprint": snapshot.fingerprint,
        "how": derivation_identity(how),
        "dtype": spec.stored_dtype.name,
        "shape": list(spec.shape),
    }


def load(file: Path, said: Mapping[str, Any], digest: Callable[[str], str]) -> Array | None:
    """The values of a file, ``[rows, *shape]``, mapped; None where there is none of which all that is said holds.

    ``digest`` gives that of a field's values; the file says which fields it was computed from, and what theirs was.
    A file that is damaged or cut counts as none, for what was in it can be computed again.
    """
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            found = json.loads((reader.schema.metadata or {}).get(_KEY, b"null"))
            read, checksum = (found.pop(name) for name in ("read", "values"))
            if found != said or any(digest(name) != read[name] for name in read):
                return None
            batch = reader.get_batch(0)
            batch.validate()
        column = batch.column(0)
        while pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        values: Array = column.to_numpy(zero_copy_only=True)
        # Values of another type, or another number of them, are damage, too.
        shaped: Array = values.view(said["dtype"]).reshape(said["rows"], *said["shape"])
        return shaped if _checksum_of(shaped) == checksum else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MissingFieldError, pa.ArrowException):
        return None


def _checksum_of(values: Array) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))


def write(file: Path, values: Array, said: Mapping[str, Any], read: Mapping[str, str]) -> None:
    """Write the values of a file, which replace any that it has; ``read`` are digests of the fields behind them.

    Raises:
        StorageError: It cannot be written; the file that was there still is.
    """
    column = to_arrow(np.ascontiguousarray(values))
    whole = {**said, "read": dict(read), "values": _checksum_of(values)}
    schema = pa.schema([(file.stem, column.type)], metadata={_KEY: json.dumps(whole).encode()})
    with storing(f"derived fields: {str(file)!r}"):
        make_folder(file.parent)
        with (
            replacing(file) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_batch(pa.record_batch([column], schema=schema))
