"""Rows as arrays in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import Columns, Refs, RowSchema, Values, checked, whole
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.nested import map_tree
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.storages.ring import RingStorage, check_put, is_all, rows_state, slot_error, state_rows
from mouse_core.spec import Alignment


class ArrayStorage(RingStorage):
    """Rows as nested dicts or tuples of arrays in memory, which is allocated when the first row is written.

    The first write says which fields there are, with which dtypes and shapes; every other must be alike. Python's own
    numbers take the dtype of their field. Small fields of a row lie side by side, so that reading a row touches one
    place.

    Args:
        capacity: Rows it holds: with ``ndim=2`` all time steps of all environments together, as many as are whole time
            steps. By default as many as ``arrays`` have.
        ndim: 1, or 2 for ``[time, env]``, where every environment is a stream of its own.
        arrays: A tree of arrays ``[n, ...]`` (``[time, env, ...]``) that become the storage's memory: their rows are
            there from the beginning, and rows written later overwrite them. Or a replay buffer, whose rows are copied
            in the order of time.
        alignment: Which transition a row's action, reward and done belong to; None: "outgoing", as for all transitions.
        ragged: Fields whose rows are arrays of differing length. Those that already differ in the first write need not
            be named, nor does text.

    A pickle holds a copy of the rows. Sending it to a process that is started (``multiprocessing`` with "spawn", a
    ``DataLoader``'s workers) is refused, as the two would go on apart: processes share a ``MemmapStorage``.

    Raises:
        ConfigError: An argument out of range, or both or none of ``capacity`` and ``arrays``.
        SchemaError: Arrays of differing length.
        DataError: A buffer that cannot be copied; see ``ReplayBuffer.extend``.
    """

    def __init__(
        self,
        capacity: int | None = None,
        ndim: int = 1,
        *,
        arrays: Any = None,
        alignment: Alignment | None = None,
        ragged: Iterable[FieldKey] = (),
    ) -> None:
        if arrays is not None and capacity is not None:
            raise ConfigError(f"ArrayStorage: expected capacity or arrays, found both, capacity={capacity!r}")
        if hasattr(arrays, "rows_for"):  # a buffer
            alignment = arrays.storage.alignment if alignment is None else alignment
            arrays = arrays.rows_for("ArrayStorage", alignment, ndim)
        super().__init__(capacity if arrays is None else 1, ndim, alignment, ragged)
        self._memory: Columns | None = None
        self._single: list[Any] = []
        self._writable = True
        if arrays is not None:
            self._wrap(arrays)

    def _wrap(self, arrays: Any) -> None:
        arrays = whole(arrays, None, ndim=self._ndim, ragged=self._ragged)
        schema = RowSchema.of(arrays, self._ndim, self._ndim, self._ragged)
        columns, n = schema.check(map_tree(_as_given, arrays), self._ndim, self._ndim)
        if not n:
            raise SchemaError("ArrayStorage: expected arrays with rows, found none")
        self._capacity = self._size = self._written = n
        if schema.varying:  # references replace the values, so the arrays cannot be the memory
            self._take_memory(self._allocate(schema))
            self._memory.write(0, self._memory.values.keep(schema, columns, list), 0, n)  # type: ignore[union-attr]
            return
        self._writable = all(column.flags.writeable for column in columns)
        self._take_memory(Columns.wrap(schema, columns))

    def __repr__(self) -> str:
        return f"ArrayStorage({len(self)} of {self._capacity} rows, ndim={self._ndim}, fields={self.keys})"

    @property
    def writable(self) -> bool:
        """Whether rows may be written: not where arrays were given that may not."""
        return self._writable

    @property
    def nbytes(self) -> int:
        """Bytes of memory for all rows, used or not."""
        return 0 if self._memory is None else self._memory.nbytes

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append rows, and overwrite the oldest rows of a full ring; see ``Storage.append``."""
        if one and self._writable and self._append_single(rows):
            return self._appended(1), 1
        self._check_writable()
        schema, arrays, n = checked(rows, self._schema, one=one, ndim=self._ndim, ragged=self._ragged)
        if self._memory is None:
            self._begin(schema)
        assert self._memory is not None
        lost = max(0, n - self._capacity)  # rows that would be overwritten at once
        kept = self._memory.values.keep(schema, [array[lost:] for array in arrays] if lost else arrays, self._refs)
        for slot, begin, count in self._pieces(n):
            self._memory.write(slot, kept, begin - lost, count)
        return self._appended(n), n

    def _append_single(self, rows: Any) -> bool:
        """Write one row of plain values without further checks; return False for other rows, and the first."""
        if not self._single or type(rows) is not dict or len(rows) != len(self._single):
            return False
        values = []
        for key, dtype, shape, scalars in self._single:
            value: Any = rows.get(key)
            kind = type(value)
            if kind is np.ndarray:
                if value.dtype != dtype or value.shape != shape:
                    return False
            elif kind not in scalars or (kind is float and dtype.itemsize < 8 and not (-3e38 < value < 3e38)):
                return False
            values.append(value)
        slot = self._written % self._capacity
        for column, value in zip(self._memory.columns, values, strict=True):  # type: ignore[union-attr]
            column[slot] = value
        return True

    def _refs(self) -> list[Refs]:
        """Return the references of the rows in use, as views."""
        assert self._memory is not None
        return self._memory.refs(slice(self._size))

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` by ``rows``; see ``Storage.put``."""
        self._check_writable()
        if self._memory is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        rows = whole(rows, self._memory.schema, ndim=1)
        more = self._memory.schema.with_more(rows, 1) if is_all(slots, self._size) else None
        arrays, n = (more or self._memory.schema).check(rows, 1, 1)
        check_put(slots, n)
        if more is not None:  # all rows there are get the new fields, and what is written later must have them
            self._take_memory(self._allocate(more))
        memory = self._memory
        memory.put(slots, memory.values.keep(memory.schema, arrays, self._refs if more is None else list))
        self._changes += 1

    def check(self, rows: Any) -> None:
        """Raise what ``append(rows)`` would, and write nothing."""
        self._check_writable()
        checked(rows, self._schema, one=False, ndim=self._ndim, ragged=self._ragged)

    def empty(self) -> None:
        """Forget all rows."""
        self._check_writable()
        super().empty()

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots`` in fresh memory; see ``Storage.get``."""
        if self._memory is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        return self._memory.get(slots)

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots``; see ``Storage.read``."""
        if self._memory is None:
            raise MissingFieldError(f"rows: expected a field {key!r}, found none")
        return self._memory.read(key, slots)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The rows, as long as the data, and what describes them. The arrays are views."""
        columns = [] if self._memory is None else self._memory.saved(slice(self._size))
        return rows_state(self, self._schema, columns)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; see ``Storage.load``."""
        self._check_writable()
        schema, arrays, written = state_rows(self, state, self._schema)
        if schema is not None:
            if self._memory is None:
                self._begin(schema)
            assert self._memory is not None
            self._size = 0
            self._memory.values = Values()
            self._memory.write(0, self._memory.values.keep(schema, arrays, list), 0, len(arrays[0]))
        self._size = len(arrays[0]) if arrays else 0
        self._written = written
        self._changes += 1

    def _begin(self, schema: RowSchema) -> None:
        """Allocate memory for as many rows as are whole time steps."""
        asked, self._capacity = self._capacity, schema.whole_steps(self._capacity)
        try:
            self._take_memory(self._allocate(schema))
        except BaseException:  # there is too little memory, and another first write may need less
            self._capacity = asked
            raise

    def _allocate(self, schema: RowSchema) -> Columns:
        return Columns.allocate(schema, self._capacity, lambda _, nbytes: np.empty(nbytes, np.uint8))

    def __getstate__(self) -> dict[str, Any]:
        super().__getstate__()
        ragged = {"ragged": self._ragged} if self._ragged else {}
        nodes = {} if self._schema is None else {"structure": self._schema.structure}
        return {"writable": self._writable, "changes": self._changes, "state": self.state(), **ragged, **nodes}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept["state"]
        self.__init__(state["capacity"], state["ndim"], alignment=state["alignment"], ragged=kept.get("ragged", ()))  # type: ignore[misc]
        self.load(state)
        if self._schema is not None and "structure" in kept:
            self._schema.structure = kept["structure"]
        self._writable, self._changes = kept["writable"], kept["changes"]

    def _take_memory(self, memory: Columns) -> None:
        self._memory, self._schema, self._single = memory, memory.schema, []
        if self._ndim == 1 and memory.schema.plain and not memory.schema.varying:
            for key, kind in memory.schema.fields.items():
                self._single.append((key, kind.dtype, kind.shape, _scalars(kind.dtype, kind.shape)))

    def _check_writable(self) -> None:
        if not self._writable:
            raise ConfigError("storage: expected arrays that may be written, found read-only ones")


def _as_given(leaf: Any) -> Any:
    """Convert a leaf to an array; a list stays, as its rows may be text or differ in length."""
    return leaf if isinstance(leaf, list) else to_numpy(leaf)


def _scalars(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[type, ...]:
    """Return the types of single values that fit a field unchanged."""
    if shape:
        return ()
    return (dtype.type, *{"f": (float,), "b": (bool,)}.get(dtype.kind if dtype.itemsize in (1, 4, 8) else "", ()))
