"""The storages of a map: of its keys, and of the values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import state_number
from mouse_core.columns.schema import RowSchema
from mouse_core.errors import ConfigError, SchemaError, StateError
from mouse_core.nested import FieldKey, flatten, is_varying, map_tree
from mouse_core.replay.protocols import Storage
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.replay.storages.list import ListStorage
from mouse_core.spec import check_count

Integers = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class Stored:
    """Rows of a storage by their number, in memory as many as come.

    Args:
        storage: Where they lie; None: in memory, which grows.
        what: "keys" or "values", for messages.
    """

    def __init__(self, storage: Storage | None, what: str) -> None:
        self.grows = storage is None
        self.storage: Any = ArrayStorage(_FIRST_CAPACITY) if storage is None else storage
        self.what = what
        self._schema: RowSchema | None = None

    @classmethod
    def pair(cls, storage: Any, capacity: int | None) -> tuple[Stored, Stored]:
        """Return the storages of keys and values; see ``RowMap``.

        Raises:
            ConfigError: The storages do not fit each other or the capacity.
        """
        if storage is None:
            if capacity is None:
                return cls(None, "keys"), cls(None, "values")
            capacity = check_count("capacity", capacity)
            return cls(ArrayStorage(capacity), "keys"), cls(ArrayStorage(capacity), "values")
        parts = list(storage) if isinstance(storage, tuple | list) else [storage]
        if len(parts) not in (1, 2) or not all(isinstance(part, Storage) for part in parts):
            raise ConfigError(f"storage: expected a storage, or a pair for keys and values, found {storage!r:.100}")
        for part in parts:
            _check(part, parts[0].capacity, capacity)
        if len(parts) == 2 and parts[0] is parts[1]:
            raise ConfigError("storage: expected two storages for keys and values, found one twice")
        return cls(parts[0], "keys"), cls(parts[1], "values") if len(parts) == 2 else cls(None, "values").forbidden()

    def loaded(self, state: Any) -> ArrayStorage:
        """Rows of a state, in memory; none where there is no state.

        Raises:
            StateError: It is damaged, or does not fit.
        """
        if state is not None and not self.what:
            raise StateError("state: expected that of a map of keys alone, as there is one storage, found values")
        capacity = self.capacity
        if self.grows and isinstance(state, Mapping):
            capacity = max(_FIRST_CAPACITY, state_number("size", state.get("size"), where="storage"))
            if state.get("written") != state.get("size"):
                raise StateError(f"storage: expected all {state.get('written')!r:.80} rows, found {state.get('size')}")
            state = {**state, "capacity": capacity}
        made = ArrayStorage(capacity)
        if state is not None or self.what == "keys":
            made.load(state)
        return made

    def take_over(self, loaded: ArrayStorage) -> None:
        """Have the rows that ``loaded`` gave."""
        self._schema = None
        if self.grows:
            self.storage = loaded
        elif loaded.written:
            self.storage.load({**loaded.state(), "alignment": self.storage.alignment})
        else:
            self.storage.empty()

    def forbidden(self) -> Stored:
        """Mark the storage as unused, for a map without values, and return it."""
        self.what = ""
        return self

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def capacity(self) -> int:
        """Rows it can hold; one that grows, now."""
        return int(self.storage.capacity)

    @property
    def written(self) -> int:
        """The number of rows ever added."""
        return int(self.storage.written)

    @property
    def oldest(self) -> int:
        """The number of the oldest row that is there."""
        return self.written - len(self.storage)

    @property
    def changes(self) -> int:
        """The number of changes to rows other than additions."""
        return int(self.storage.changes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory or files, where the storage tells them."""
        return int(getattr(self.storage, "nbytes", 0))

    @property
    def ragged(self) -> tuple[FieldKey, ...]:
        """Fields that the storage was told to be ragged."""
        return tuple(getattr(self.storage, "ragged", ()))

    @property
    def schema(self) -> RowSchema | None:
        """The schema of rows; None before the first row."""
        if self._schema is None and len(self.storage):
            first = self.storage.get(np.zeros(1, np.int64))
            ragged = [
                key for key, leaf in flatten(first).items() if is_varying(leaf) and isinstance(leaf[0], np.ndarray)
            ]
            self._schema = RowSchema.of(first, 1, 1, ragged)
        return self._schema

    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock to hold if other processes write too."""
        return self.storage.lock() or nullcontext()

    def slots(self, numbers: Integers) -> Integers:
        """Return the slots of rows."""
        return numbers if self.grows else numbers % self.capacity

    def get(self, slots: Integers) -> Any:
        """The rows in slots, as a tree; SchemaError where none were ever written."""
        if not len(self.storage):
            raise SchemaError(f"map: expected {self.what or 'values'} that were written, found none")
        return self.storage.get(slots)

    def write(self, rows: Any, schema: RowSchema, n: int, first: int) -> None:
        """Write rows from number ``first`` on, which is that of the next, or, after a crash, of one before."""
        if not n:
            return
        if not self.what:
            raise ConfigError("storage: expected a pair, for keys and values, found one for the keys alone")
        if self.grows and first + n > self.capacity:
            self._grow(first + n)
        there = min(n, self.written - first)
        if there > 0:
            tree = map_rows(rows, slice(there))
            self.storage.put(self.slots(np.arange(first, first + there)), tree)
            rows = map_rows(rows, slice(there, None))
        if there < n:
            self.storage.append(rows)
        self._schema = schema

    def _grow(self, least: int) -> None:
        larger = ArrayStorage(max(2 * self.capacity, least))
        if len(self.storage):
            larger.load({**self.storage.state(), "capacity": larger.capacity})
        self.storage = larger

    def empty(self) -> None:
        """Forget all rows."""
        self.storage.empty()


def map_rows(rows: Any, part: slice) -> Any:
    """Some of the rows of a tree whose leaves are arrays or lists."""
    return map_tree(lambda leaf: leaf[part], rows)


def _check(part: Any, of_keys: int, capacity: int | None) -> None:
    """ConfigError for a storage that a map cannot use."""
    if isinstance(part, ListStorage) or part.ndim != 1 or not part.writable:
        raise ConfigError(f"storage: expected writable ones of arrays, with ndim=1, found {part!r:.100}")
    if part.capacity != (of_keys if capacity is None else capacity):
        expected = f"{of_keys}, that of the keys" if capacity is None else capacity
        raise ConfigError(f"storage: expected a capacity of {expected}, found {part.capacity}")
