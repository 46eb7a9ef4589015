"""The files of a mapped buffer's rows: how they are called, and how long they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError, StateError, StorageError
from mouse_core.replay.ground.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.replay.ground.memory import RowMemory, blocks_of
from mouse_core.replay.ground.protocols import Slots
from mouse_core.replay.ground.schema import RowSchema
from mouse_core.replay.storages._mapped.files import Now, lengthen

_GROWTH = 1 << 16
_SPARE_BYTES = 1 << 20
_SPARE_ROWS = 1024


def read_schema(folder: Path, capacity: int, now: Now) -> RowSchema | None:
    """What a row looks like, as the folder says; None where it does not, and there is no room for rows.

    Raises:
        StateError: It is damaged, missing, or rows like these do not go into a buffer of this capacity.
    """
    path = folder / "schema"
    if not path.exists():
        if now.allocated:
            raise StateError(f"{path}: expected the fields of {now.allocated} rows, found no file")
        return None
    try:
        schema = RowSchema.from_json(json.loads(path.read_text()))
        for rows in (capacity, now.written, now.spare):
            if rows % schema.num_envs:
                raise ValueError(f"{schema.num_envs} environments where the head says {rows} rows")
        blocks_of(schema)
    except UNREADABLE as error:
        raise StateError(f"{path}: expected the fields of a row, found {error!r}") from error
    except OSError as error:
        raise StorageError(f"{path}: expected a file that can be read, found {error}") from error
    return schema


def row_files(folder: Path, generation: int, schema: RowSchema | None) -> list[Path]:
    """A file for each block of fields."""
    blocks = [] if schema is None else blocks_of(schema)
    return [folder / f"rows-{generation}-{number}" for number in range(len(blocks))]


def reserve(folder: Path, schema: RowSchema, now: Now, rows: int, capacity: int) -> Now:
    """Files with room for so many rows."""
    if rows <= now.allocated:
        return now
    sizes = [block.raw.itemsize for block in blocks_of(schema)]
    rows = min(max(rows, now.allocated + max(now.allocated // 8, _GROWTH // sum(sizes))), capacity + now.spare)
    for file, size in zip(row_files(folder, now.generation, schema), sizes, strict=True):
        lengthen(file, rows * size)
    return replace(now, allocated=rows)


def begun(schema: RowSchema, now: Now, capacity: int) -> Now:
    """The first write says what a row looks like, and how many places there are beyond the capacity."""
    if capacity % schema.num_envs:
        raise ConfigError(f"capacity: expected a multiple of the {schema.num_envs} environments, found {capacity}")
    row = sum(block.raw.itemsize for block in blocks_of(schema))
    steps = -(-min(capacity, _SPARE_ROWS, max(1, _SPARE_BYTES // row)) // schema.num_envs)
    return replace(now, spare=steps * schema.num_envs)


def remove(folder: Path, generation: int, schema: RowSchema) -> None:
    """Remove the files of a generation."""
    for file in row_files(folder, generation, schema):
        file.unlink(missing_ok=True)


def write_journal(folder: Path, places: Slots, rows: Sequence[npt.NDArray[Any]]) -> None:
    """Say what rows are to be changed in place, and to what."""
    columns = {str(number): array for number, array in enumerate(rows)}
    write_checkpoint(folder / "journal", {"places": places, "columns": columns}, sync=False, only_writer=True)


def read_journal(folder: Path, memory: RowMemory | None, rows: int) -> tuple[Slots, list[npt.NDArray[Any]]]:
    """What ``write_journal`` was called with: places among ``rows``, and what belongs there.

    Raises:
        StateError: It is damaged, missing, or of other rows.
    """
    path = folder / "journal"
    try:
        journal = read_checkpoint(path)
        places = journal["places"]
        columns = [journal["columns"][str(number)] for number in range(0 if memory is None else len(memory.columns))]
        if memory is None or places.ndim != 1 or places.dtype != np.int64:
            raise ValueError("places of no rows")
        if places.size and not 0 <= places.min() <= places.max() < rows:
            raise ValueError(f"places beyond {rows} rows")
        for column, known in zip(columns, memory.columns, strict=True):
            if column.shape != (len(places), *known.shape[1:]) or column.dtype != known.dtype:
                raise ValueError(f"{column.dtype} {list(column.shape)} where {known.dtype} belongs")
    except (OSError, *UNREADABLE) as error:
        raise StateError(f"{path}: expected the rows that were being changed, found {error}") from error
    return places, columns
