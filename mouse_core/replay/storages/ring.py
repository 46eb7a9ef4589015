"""RingStorage, the base of storages in the memory of this process, and the checks that all storages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE, is_whole
from mouse_core._base.locks import is_spawning
from mouse_core.columns.memory import Bytes, FieldType, RowSchema, ring_pieces
from mouse_core.errors import ConfigError, DataError, RowIndexError, StateError
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.spec import Alignment, check_alignment, check_count, check_list


def rows_state(storage: Storage, schema: RowSchema | None, columns: Sequence[Any]) -> dict[str, Any]:
    """Return the state of a storage with these columns ``[len, *shape]``, in the order of the schema's fields.

    A column that differs in length is a list of the rows' bytes. ``begins`` is None, except in the state of a
    ``MemmapStorage`` that overwrote rows: it knows where the episodes of its oldest rows begin.
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
        "begins": None,
    }


def _packed(values: list[Bytes]) -> dict[str, npt.NDArray[Any]]:
    lengths = np.array([value.size for value in values], np.int64)
    return {"lengths": lengths, "bytes": np.concatenate([np.empty(0, np.uint8), *values])}


def _column(key: FieldKey, kind: FieldType, saved: Any, size: int) -> Any:
    """Check a saved column of ``size`` rows, and return it as ``rows_state`` takes it; raise StateError."""
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
    """Return the bytes of each row; raise StateError for bytes that cannot be decoded."""
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
    """Return the capacity of a storage in whole time steps of as many environments as a state has."""
    schema = state.get("schema")
    num_envs: Any = schema.get("num_envs") if isinstance(schema, Mapping) else 1
    own = storage.capacity
    return own - own % num_envs if is_whole(num_envs) and 1 <= num_envs <= own else own


# More rows than any run writes; sums of such numbers fit into 64 bits.
_MOST_WRITTEN = 1 << 53


def check_state(storage: Storage, state: Mapping[str, Any], kind: str) -> None:
    """Raise StateError unless a state is of this kind of storage, of its size, and whole."""
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
            f"storage: expected sizes up to {storage.capacity}, found {size!r} rows of {written!r} written"
        )


def state_rows(
    storage: Storage, state: Mapping[str, Any], known: RowSchema | None
) -> tuple[RowSchema | None, list[Any], int]:
    """Check a state, and return its schema, its columns as in ``rows_state``, and its number of rows written.

    Raises:
        StateError: The state does not fit the storage, or its parts do not fit each other.
    """
    check_state(storage, state, "rows")
    if "begins" not in state:
        raise StateError(f"storage: expected begins of episodes or None, found {list(state)}")
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
        raise StateError(f"storage: expected whole time steps of {schema.num_envs} environments, found {size} rows")
    if known is not None and not known.same_as(schema):
        raise StateError(f"storage: expected rows of {known.fields}, found {schema.fields}")
    return schema, columns, written


class RowStorage:
    """The fields of a storage's rows; a base of storages, which keep the rows.

    Args:
        ndim: 1, or 2 for ``[time, env]``.
        ragged: Fields whose rows are declared to differ in length.

    Raises:
        ConfigError: An argument out of range.
    """

    def __init__(self, ndim: Any, ragged: Iterable[FieldKey]) -> None:
        if isinstance(ndim, bool) or ndim not in (1, 2):
            raise ConfigError(f"ndim: expected 1 or 2, found {ndim!r}")
        self._ndim = int(ndim)
        self._ragged = check_list("ragged", ragged)
        self._schema: RowSchema | None = None

    @property
    def ndim(self) -> int:
        """1, or 2 for ``[time, env]``."""
        return self._ndim

    @property
    def num_envs(self) -> int:
        """Environments side by side; 1 for ``ndim=1``, and until the first write."""
        return 1 if self._schema is None else self._schema.num_envs

    @property
    def structure(self) -> Any:
        """The nesting of rows, as from ``mouse_core.nested.structure_of``; None before the first write."""
        return None if self._schema is None else self._schema.structure

    @property
    def ragged(self) -> tuple[FieldKey, ...]:
        """Fields that differ in length: those that were declared, and those that do since the first write."""
        return self._ragged if self._schema is None else tuple({**dict.fromkeys(self._ragged), **self._schema.varying})

    @property
    def keys(self) -> list[FieldKey]:
        """The names of the fields; none before the first write."""
        return [] if self._schema is None else list(self._schema.fields)


class RingStorage(RowStorage):
    """A ring of rows without the rows: its sizes and counters, and what is checked before rows are written or read.

    A class that derives from it keeps the rows in the memory of this process. It has ``append``, ``put``, ``get``,
    ``read``, ``state`` and ``load``, as ``mouse_core.replay.Storage`` says. For these it uses, although their names
    begin with ``_``: ``_pieces(n)``, in which slots ``n`` more rows go; ``_appended(n)``, which counts them;
    ``_check_slots(slots)``; ``_capacity``, ``_ndim`` and ``_alignment``, which stay; ``_size``, the rows there are, and
    ``_written``, those ever appended, both of which ``load`` sets; ``_schema``, the ``RowSchema`` of the first write,
    for rows that have one; and ``_changes``, to which ``put`` and ``load`` add one, so that samplers look again.

    Args:
        capacity: Rows it holds.
        ndim: 1, or 2 for ``[time, env]``.
        alignment: Which transition a row's action, reward and done belong to; None: "outgoing", as for all transitions.
        ragged: Fields whose rows are declared to differ in length.

    Raises:
        ConfigError: An argument out of range.
    """

    def __init__(
        self, capacity: Any, ndim: Any = 1, alignment: Alignment | None = None, ragged: Iterable[FieldKey] = ()
    ) -> None:
        super().__init__(ndim, ragged)
        self._capacity = check_count("capacity", capacity)
        self._alignment = check_alignment(alignment, "outgoing")
        self._written = self._size = self._changes = 0

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """The capacity of the storage in rows."""
        return self._capacity

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._alignment

    @property
    def writable(self) -> bool:
        """Whether rows may be written."""
        return True

    @property
    def written(self) -> int:
        """The number of rows ever appended."""
        return self._written

    @property
    def changes(self) -> int:
        """The number of changes to rows other than ``append``."""
        return self._changes

    def lock(self) -> None:
        """Return None: no other process writes here."""
        return None

    def empty(self) -> None:
        """Forget all rows."""
        self._written = self._size = 0
        self._changes += 1

    def _pieces(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Return where the next ``n`` rows go: for each run of slots the first slot, the first row, and the count.

        Where 5 rows are appended to a ring of 4 in which row 0 was written, row 1 would be overwritten at once. So rows
        2 to 5, which are numbers 1 to 4 of those given, go to the slots 2, 3, 0 and 1: ``(2, 1, 2)`` and ``(0, 3, 2)``.
        """
        lost = max(0, n - self._capacity)
        for slot, begin, count in ring_pieces(self._written + lost, n - lost, self._capacity):
            yield slot, lost + begin, count

    def _appended(self, n: int) -> int:
        """Count ``n`` rows as appended, and return the number of the first."""
        first = self._written
        self._written = first + n
        self._size = min(self._size + n, self._capacity)
        return first

    def _check_slots(self, slots: Slots) -> None:
        """Raise RowIndexError for slots of which some are not in use."""
        check_slots(slots, self._size)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for a pickle.

        Raises:
            ConfigError: The pickle goes to a process that is being started, where the copy and the original would
                diverge. Pickling to a file or by ``copy.deepcopy`` is fine.
        """
        if is_spawning():
            raise ConfigError(
                f"{type(self).__name__}: expected rows that processes share, found rows in the memory of this one, of "
                "which the process that is started would get a copy of its own; give it a "
                "MemmapStorage(capacity, path), or make the buffer there, and hand over rows by dumps() and loads()"
            )
        return self.__dict__


def check_put(slots: Slots, n: int) -> None:
    """Raise DataError unless the numbers of rows and of slots are equal."""
    if slots.size != n:
        raise DataError(f"rows: expected {slots.size}, as many as indices, found {n}")


def is_all(slots: Slots, size: int) -> bool:
    """Whether slots are all that are in use, in their order."""
    return slots.size == size and bool((slots.reshape(-1) == np.arange(size)).all())


def check_slots(slots: Slots, size: int) -> None:
    """Raise RowIndexError for slots of which some are not below ``size``."""
    # As unsigned numbers negative ones are the largest: one pass instead of two.
    if slots.size and int(slots.view(np.uint64).max()) >= size:
        raise slot_error(slots, size)


def slot_error(slots: Slots, size: int) -> RowIndexError:
    """Return the error for slots of which some are not in use."""
    outside = slots[(slots < 0) | (slots >= size)].reshape(-1)
    return RowIndexError(f"index: expected 0..{size - 1}, found {outside[:1].tolist() or 'an empty storage'}")
