"""Storages for the rows of a buffer, and the tools for custom storages.

A storage is any object with the methods of ``mouse_core.replay.Storage``. One whose rows lie in the memory of this
process derives from ``RingStorage``, which counts them. One that keeps rows as columns, wherever these lie, makes a
``RowSchema`` of the first rows and checks all others by it; and it saves and restores them with ``rows_state`` and
``state_rows``, so that checkpoints go from any such storage to any other.
``mouse_core.testing.StorageConformance`` holds what all of them must do.
"""

from mouse_core.columns.memory import FieldType, RowSchema
from mouse_core.replay.storages.array import (
    ArrayStorage,
    RingStorage,
    check_put,
    is_all,
    rows_state,
    slot_error,
    state_rows,
)
from mouse_core.replay.storages.list import ListStorage
from mouse_core.replay.storages.memmap import MemmapStorage

__all__ = [
    "ArrayStorage",
    "FieldType",
    "ListStorage",
    "MemmapStorage",
    "RingStorage",
    "RowSchema",
    "check_put",
    "is_all",
    "rows_state",
    "slot_error",
    "state_rows",
]
