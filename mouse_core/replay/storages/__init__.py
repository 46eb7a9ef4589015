"""Storages for the rows of a buffer, and base classes for custom storages.

A storage is any object with the methods of ``mouse_core.replay.Storage``. A storage with rows in the memory of this
process can derive from ``RingStorage``, which counts the rows. A storage of columns creates a ``RowSchema`` from the
first rows and checks that all later rows match this schema. A storage of columns saves and restores its columns with
``rows_state`` and ``state_rows``, so a checkpoint of one storage of columns can be loaded into another.
``mouse_core.testing.StorageConformance`` tests the behaviour that all storages share.
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
