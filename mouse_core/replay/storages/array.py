"""ArrayStorage, which keeps rows as arrays in memory, and base classes and checks for all storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE, is_whole
from mouse_core._base.locks import is_spawning
from mouse_core.columns.memory import Bytes, Columns, FieldType, Refs, RowSchema, Values, checked, ring_pieces, whole
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, DataError, MissingFieldError, RowIndexError, SchemaError, StateError
from mouse_core.nested import map_tree
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.spec import Alignment, check_alignment, check_count, check_list


def rows_state(storage: Storage, schema: RowSchema | None, columns: Sequence[Any]) -> dict[str, Any]:
    """Return the state of a storage with columns ``[len, *shape]``, in the order of the schema's fields.

    A column whose rows differ in length is returned as a list with the bytes of each row.
    """
    return {
        "kind": "rows",
        "capacity": storage.capacity,
        "ndim": storage.ndim,
        "alignment": storage.alignment,
        "size": len(storage),
        "written": storage.written,
        "schema": None if schema is None else schema.to_json(),
        "columns": {
            str(place): _packed(column) if isinstance(column, list) else column for place, column in enumerate(columns)
        },
    }


def _packed(values: list[Bytes]) -> dict[str, npt.NDArray[Any]]:
    lengths = np.array([value.size for value in values], np.int64)
    return {"lengths": lengths, "bytes": np.concatenate([np.empty(0, np.uint8), *values])}


def _column(key: FieldKey, kind: FieldType, saved: Any, size: int) -> Any:
    """Check a saved column of ``size`` rows, and return the column as ``rows_state`` returns columns; raise StateError
    if the column is invalid.
    """
    if kind.varies:
        return _unpacked(key, kind, saved, size)
    column = np.asarray(saved)
    if column.shape != (size, *kind.shape) or column.dtype != kind.dtype:
        raise StateError(
            f"storage: field {key!r}: expected {kind.dtype} {[size, *kind.shape]}, found {column.dtype} "
            f"{list(column.shape)}"
        )
    return column


def _unpacked(key: FieldKey, kind: FieldType, column: Mapping[str, Any], size: int) -> list[Bytes]:
    """Return the bytes of each row of a saved column; raise StateError if the saved bytes cannot be decoded."""
    lengths, raw = np.asarray(column["lengths"]), np.asarray(column["bytes"])
    fits = lengths.dtype == np.int64 and lengths.shape == (size,) and raw.dtype == np.uint8 and raw.ndim == 1
    if not fits or (lengths < 0).any() or int(lengths.sum()) != raw.size:
        raise StateError(f"storage: field {key!r}: expected the bytes of {size} rows, found {lengths.shape} lengths")
    ends = np.cumsum(lengths).tolist()
    values = [raw[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    try:
        for value in values:
            kind.decode(value.copy())
    except ValueError as error:
        raise StateError(f"storage: field {key!r}: expected {kind.varies} rows, found {error}") from error
    return values


def _whole_steps(storage: Storage, state: Mapping[str, Any]) -> int:
    """Return the capacity of a storage, rounded down to a multiple of the number of environments in the state."""
    schema = state.get("schema")
    num_envs: Any = schema.get("num_envs") if isinstance(schema, Mapping) else 1
    own = storage.capacity
    return own - own % num_envs if is_whole(num_envs) and 1 <= num_envs <= own else own


# Upper limit of row counts: no run writes so many rows, and sums of such numbers fit into 64 bits.
_MOST_WRITTEN = 1 << 53


def check_state(storage: Storage, state: Mapping[str, Any], kind: str) -> None:
    """Raise StateError unless a state is complete and belongs to a storage of the given kind and size."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else state
        raise StateError(f"storage: expected a state of {kind}, found {found!r:.80}")
    for name in ("capacity", "alignment", *(["ndim"] if kind == "rows" else [])):
        own = _whole_steps(storage, state) if name == "capacity" else getattr(storage, name)
        if state.get(name) != own:
            raise StateError(f"storage: expected {name} {own!r}, found {state.get(name)!r}")
    size: Any = state.get("size")
    written: Any = state.get("written")
    whole = is_whole(size) and is_whole(written)
    if not whole or not 0 <= size <= min(storage.capacity, written) <= written <= _MOST_WRITTEN:
        raise StateError(
            f"storage: expected at most {storage.capacity} rows, and no more rows than were ever written, found "
            f"{size!r} rows, and {written!r} written rows"
        )


def state_rows(
    storage: Storage, state: Mapping[str, Any], known: RowSchema | None
) -> tuple[RowSchema | None, list[Any], int]:
    """Check a state; return the schema, the columns (see ``rows_state``) and the number of rows ever written.

    Raises:
        StateError: The state belongs to another storage, or is inconsistent.
    """
    check_state(storage, state, "rows")
    size, written = state["size"], int(state["written"])
    if state.get("schema") is None:
        if size:
            raise StateError(f"storage: expected a schema for {size} rows, found none")
        return None, [], written
    try:
        schema = RowSchema.from_json(state["schema"])
        columns = [
            _column(key, kind, state["columns"][str(place)], size)
            for place, (key, kind) in enumerate(schema.fields.items())
        ]
    except UNREADABLE as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"storage: expected a schema and its columns, found {error!r}") from error
    if state["capacity"] % schema.num_envs or size % schema.num_envs or written % schema.num_envs:
        raise StateError(f"storage: expected complete time steps of {schema.num_envs} environments, found {size} rows")
    if known is not None and not known.same_as(schema):
        raise StateError(f"storage: expected rows of {known.fields}, found {schema.fields}")
    return schema, columns, written


class RowStorage:
    """Base class of storages that keep rows as columns. The base class has the schema of the rows; subclasses store the
    rows.

    Args:
        ndim: The number of batch axes of the rows: 1, or 2 for ``[time, env]``.
        ragged: The names of the fields whose values can differ in length from row to row.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, ndim: Any, ragged: Iterable[FieldKey]) -> None:
        if isinstance(ndim, bool) or ndim not in (1, 2):
            raise ConfigError(f"ndim: expected 1 or 2, found {ndim!r}")
        self.ndim = int(ndim)
        self._ragged = check_list("ragged", ragged)
        self._schema: RowSchema | None = None
        # The episode indexes of these rows, in samplers and buffers: where one knows when an episode began, all do.
        self.indexes: WeakSet[Any] = WeakSet()

    @property
    def num_envs(self) -> int:
        """The number of environments; 1 for ``ndim=1``, and until the first write."""
        return 1 if self._schema is None else self._schema.num_envs

    @property
    def structure(self) -> Any:
        """The nesting of rows (see ``mouse_core.nested.structure_of``); None before the first write."""
        return None if self._schema is None else self._schema.structure

    @property
    def ragged(self) -> tuple[FieldKey, ...]:
        """The fields whose values can differ in length from row to row: declared fields, and fields whose lengths
        differ in the first write.
        """
        return self._ragged if self._schema is None else tuple({**dict.fromkeys(self._ragged), **self._schema.varying})

    @property
    def keys(self) -> list[FieldKey]:
        """The names of the fields; empty before the first write."""
        return [] if self._schema is None else list(self._schema.fields)


class RingStorage(RowStorage):
    """Base class of a ring of rows: sizes, counters, and checks of writes and reads.

    A subclass keeps the rows in the memory of this process. The subclass defines ``append``, ``put``, ``get``,
    ``read``, ``state`` and ``load`` of ``mouse_core.replay.Storage``. ``_pieces(n)`` returns the slots of the next
    ``n`` rows, ``_appended(n)`` counts the rows, and ``_check_slots(slots)`` checks slots. ``_size`` is the number of
    rows, and ``_schema`` the ``RowSchema`` of the first write, if rows have one. ``load`` sets ``_size`` and
    ``written``. ``put`` and ``load`` add 1 to ``changes``, so that samplers read the rows again.

    Args:
        capacity: The largest number of rows.
        ndim: The number of batch axes of the rows: 1, or 2 for ``[time, env]``.
        alignment: "arrived" if a row's action, reward and done led to the row's observation; "outgoing" if the action,
            reward and done follow the observation, as in rows that are transitions. None: "outgoing".
        ragged: The names of the fields whose values can differ in length from row to row.

    Raises:
        ConfigError: An argument is out of range.
    """

    writable = True

    def __init__(
        self, capacity: Any, ndim: Any = 1, alignment: Alignment | None = None, ragged: Iterable[FieldKey] = ()
    ) -> None:
        super().__init__(ndim, ragged)
        self.capacity = check_count("capacity", capacity)
        self.alignment = check_alignment(alignment, "outgoing")
        self.written = self._size = self.changes = 0

    def __len__(self) -> int:
        return self._size

    def lock(self) -> None:
        """Return None, because no other process writes to this storage."""
        return None

    def empty(self) -> None:
        """Remove all rows."""
        self.written = self._size = 0
        self.changes += 1

    def _pieces(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Return the slots of the next ``n`` rows, as runs of consecutive slots: for each run the first slot, the first
        row, and the number of rows.

        Example: a ring of 4 slots holds row 0, and 5 rows are appended. Row 1 would be overwritten at once, so only the
        rows 2 to 5, which are the appended rows 1 to 4, are written, to the slots 2, 3, 0 and 1: the result is ``(2, 1,
        2)`` and ``(0, 3, 2)``.
        """
        lost = max(0, n - self.capacity)
        for slot, begin, count in ring_pieces(self.written + lost, n - lost, self.capacity):
            yield slot, lost + begin, count

    def _appended(self, n: int) -> int:
        """Count ``n`` appended rows, and return the index of the first appended row in the order of writing."""
        first = self.written
        self.written = first + n
        self._size = min(self._size + n, self.capacity)
        return first

    def _begin(self, schema: RowSchema) -> None:
        """Round the capacity down to complete time steps, and allocate memory of this capacity with ``_allocate`` of
        the subclass.
        """
        asked, self.capacity = self.capacity, schema.whole_steps(self.capacity)
        try:
            self._allocate(schema)
        except BaseException:  # there is too little memory, and another first write may need less
            self.capacity = asked
            raise

    def _allocate(self, schema: RowSchema) -> None:
        raise NotImplementedError

    def _check_slots(self, slots: Slots) -> None:
        """Raise RowIndexError if any slot is not in use."""
        check_slots(slots, self._size)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a pickle contains.

        Raises:
            ConfigError: The storage is pickled for a new process; later writes would change only one of the two copies.
                Pickling to a file and ``copy.deepcopy`` are allowed.
        """
        if is_spawning():
            raise ConfigError(
                f"{type(self).__name__}: expected rows in shared memory, found rows in the memory of this "
                "process, which a new process would copy; use a MemmapStorage(capacity, path), or create the buffer in "
                "the new process and pass rows with dumps() and loads()"
            )
        return {name: value for name, value in self.__dict__.items() if name != "indexes"}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept, indexes=WeakSet())


def check_put(slots: Slots, n: int) -> None:
    """Raise DataError unless the number of rows, ``n``, equals the number of slots."""
    if slots.size != n:
        raise DataError(f"rows: expected {slots.size}, one for each index, found {n}")


def is_all(slots: Slots, size: int) -> bool:
    """Whether ``slots`` are all slots in use, in order."""
    return slots.size == size and bool((slots.reshape(-1) == np.arange(size)).all())


def check_slots(slots: Slots, size: int) -> None:
    """Raise RowIndexError unless all slots are in ``0 .. size - 1``."""
    # Viewed as unsigned numbers, negative numbers are the largest, so one comparison checks both bounds.
    if slots.size and int(slots.view(np.uint64).max()) >= size:
        raise slot_error(slots, size)


def slot_error(slots: Slots, size: int) -> RowIndexError:
    """Return the RowIndexError for ``slots``, some of which are not in use."""
    outside = slots[(slots < 0) | (slots >= size)].reshape(-1)
    return RowIndexError(f"index: expected 0..{size - 1}, found {outside[:1].tolist() or 'an empty storage'}")


class ArrayStorage(RingStorage):
    """A storage of rows that are nested dicts or tuples of arrays, in memory that the first write allocates.

    The first write fixes the fields, dtypes and shapes; all later writes must match. Python numbers are converted to
    the dtype of their field. Small fields of a row are stored next to each other, so reading a row touches one block of
    memory.

    Args:
        capacity: The largest number of rows; by default the number of rows in ``arrays``. With ``ndim=2``, all time
            steps of all environments count, and the capacity is rounded down to complete time steps.
        ndim: 1, or 2 for ``[time, env]``, in which every environment is a separate stream.
        arrays: A tree of arrays ``[n, ...]`` (``[time, env, ...]``) that become the storage's memory: the rows of the
            arrays are the storage's first rows, and later rows overwrite these rows.
        alignment: "arrived" if a row's action, reward and done led to the row's observation; "outgoing" if the action,
            reward and done follow the observation, as in rows that are transitions. None: "outgoing".
        ragged: The fields whose values are arrays that can differ in length from row to row. Text fields, and fields
            whose lengths already differ in the first write, need not be named.

    A pickle contains a copy of the rows. Sending the storage to a new process (``multiprocessing`` with "spawn", a
    ``DataLoader``'s workers) raises ConfigError, because later writes would change only one of the two copies. Use a
    ``MemmapStorage`` to share rows between processes.

    Raises:
        ConfigError: An argument is out of range, or both or neither of ``capacity`` and ``arrays`` are passed.
        SchemaError: The arrays differ in length.
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
        super().__init__(capacity if arrays is None else 1, ndim, alignment, ragged)
        self._memory: Columns | None = None
        self._single: list[Any] = []
        self.writable = True
        if arrays is not None:
            self._wrap(arrays)

    def _wrap(self, arrays: Any) -> None:
        arrays = whole(arrays, None, ndim=self.ndim, ragged=self._ragged)
        schema = RowSchema.of(arrays, self.ndim, self.ndim, self._ragged)
        columns, n = schema.check(map_tree(_as_given, arrays), self.ndim, self.ndim)
        if not n:
            raise SchemaError("ArrayStorage: expected arrays with rows, found none")
        self.capacity = self._size = self.written = n
        if schema.varying:  # references replace the values, so the arrays cannot be the memory
            self._allocate(schema)
            self._memory.write(0, self._memory.values.keep(schema, columns, list), 0, n)  # type: ignore[union-attr]
            return
        self.writable = all(column.flags.writeable for column in columns)
        self._take_memory(Columns.wrap(schema, columns))

    def __repr__(self) -> str:
        return f"ArrayStorage({len(self)} of {self.capacity} rows, ndim={self.ndim}, fields={self.keys})"

    @property
    def nbytes(self) -> int:
        """The size in bytes of the memory for ``capacity`` rows, including unused rows."""
        return 0 if self._memory is None else self._memory.nbytes

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append rows, and overwrite the oldest rows of a full ring; see ``Storage.append``."""
        if one and self.writable and self._append_single(rows):
            return self._appended(1), 1
        self._check_writable()
        schema, arrays, n = checked(rows, self._schema, one=one, ndim=self.ndim, ragged=self._ragged)
        if self._memory is None:
            self._begin(schema)
        assert self._memory is not None
        lost = max(0, n - self.capacity)  # rows that would be overwritten at once
        kept = self._memory.values.keep(schema, [array[lost:] for array in arrays] if lost else arrays, self._refs)
        for slot, begin, count in self._pieces(n):
            self._memory.write(slot, kept, begin - lost, count)
        return self._appended(n), n

    def _append_single(self, rows: Any) -> bool:
        """Write one row of plain values on a fast path. Return False and write nothing for the first row of the
        storage, and for a row that contains any other value.
        """
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
        slot = self.written % self.capacity
        for column, value in zip(self._memory.columns, values, strict=True):  # type: ignore[union-attr]
            column[slot] = value
        return True

    def _refs(self) -> list[Refs]:
        """Return, for the rows in use, the references to their ragged values, as views."""
        assert self._memory is not None
        return self._memory.refs(slice(self._size))

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` with ``rows``; see ``Storage.put``."""
        self._check_writable()
        if self._memory is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        rows = whole(rows, self._memory.schema, ndim=1)
        more = self._memory.schema.with_more(rows, 1) if is_all(slots, self._size) else None
        arrays, n = (more or self._memory.schema).check(rows, 1, 1)
        check_put(slots, n)
        if more is not None:  # existing rows get the new fields, and later rows must have them
            self._allocate(more)
        memory = self._memory
        memory.put(slots, memory.values.keep(memory.schema, arrays, self._refs if more is None else list))
        self.changes += 1

    def check(self, rows: Any) -> None:
        """Raise the errors of ``append(rows)`` without writing."""
        self._check_writable()
        checked(rows, self._schema, one=False, ndim=self.ndim, ragged=self._ragged)

    def empty(self) -> None:
        """Remove all rows."""
        self._check_writable()
        super().empty()

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """Return a copy of the rows in ``slots``; see ``Storage.get``."""
        if self._memory is None:
            raise slot_error(slots, 0)
        self._check_slots(slots)
        return self._memory.get(slots)

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the rows in ``slots``; see ``Storage.read``."""
        if self._memory is None:
            raise MissingFieldError(f"rows: expected a field {key!r}, found none")
        return self._memory.read(key, slots)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the rows, as views, and their description; see ``Storage.state``."""
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
        self.written = written
        self.changes += 1

    def _allocate(self, schema: RowSchema) -> None:
        self._take_memory(Columns.allocate(schema, self.capacity, lambda _, nbytes: np.empty(nbytes, np.uint8)))

    def __getstate__(self) -> dict[str, Any]:
        super().__getstate__()
        kept = {"state": self.state(), "ragged": self._ragged, "structure": self.structure}
        return kept | {"writable": self.writable, "changes": self.changes}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        state = kept["state"]
        self.__init__(state["capacity"], state["ndim"], alignment=state["alignment"], ragged=kept["ragged"])  # type: ignore[misc]
        self.load(state)
        if self._schema is not None:
            self._schema.structure = kept["structure"]
        self.writable, self.changes = kept["writable"], kept["changes"]

    def _take_memory(self, memory: Columns) -> None:
        self._memory, self._schema, self._single = memory, memory.schema, []
        if self.ndim == 1 and memory.schema.plain and not memory.schema.varying:
            for key, kind in memory.schema.fields.items():
                self._single.append((key, kind.dtype, kind.shape, _scalars(kind.dtype, kind.shape)))

    def _check_writable(self) -> None:
        if not self.writable:
            raise ConfigError("storage: expected writable arrays, found read-only arrays")


def _as_given(leaf: Any) -> Any:
    """Convert a leaf to an array; a list is returned unchanged, because its rows may be text or differ in length."""
    return leaf if isinstance(leaf, list) else to_numpy(leaf)


def _scalars(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[type, ...]:
    """Return the scalar types whose values can be written to a field without a conversion."""
    if shape:
        return ()
    return (dtype.type, *{"f": (float,), "b": (bool,)}.get(dtype.kind if dtype.itemsize in (1, 4, 8) else "", ()))
