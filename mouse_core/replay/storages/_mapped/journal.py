"""The journal of a mapped buffer: rows that are being changed in place, and what to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.replay.ground.memory import RowMemory
from mouse_core.replay.ground.protocols import Slots


def write_journal(folder: Path, places: Slots, rows: Sequence[npt.NDArray[Any]], *, sync: bool) -> None:
    """Say what rows are to be changed in place, and to what."""
    columns = {str(number): array for number, array in enumerate(rows)}
    write_checkpoint(folder / "journal", {"places": places, "columns": columns}, sync=sync, only_writer=True)


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
