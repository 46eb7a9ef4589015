"""The state of a storage of rows: what is saved, and what is checked before it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE, is_whole, state_number
from mouse_core.errors import StateError
from mouse_core.replay.ground.encoding import Bytes, decoded
from mouse_core.replay.ground.protocols import FieldKey, Storage
from mouse_core.replay.ground.schema import FieldType, RowSchema


def rows_state(storage: Storage, schema: RowSchema | None, columns: Sequence[Any]) -> dict[str, Any]:
    """The state of a storage with these columns ``[len, *shape]``, in the order of the schema's fields.

    What differs in length comes as a list of the rows' bytes. ``begins`` is None but in a ``MemmapStorage`` that
    overwrote rows, which knows where the episodes of its oldest rows begin.
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
    """A column of ``size`` rows as ``rows_state`` takes it; StateError for another one."""
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
    """The rows' bytes, of which a value can be made; StateError if they cannot."""
    lengths, raw = np.asarray(column["lengths"]), np.asarray(column["bytes"])
    fits = lengths.dtype == np.int64 and lengths.shape == (size,) and raw.dtype == np.uint8 and raw.ndim == 1
    if not fits or (lengths < 0).any() or int(lengths.sum()) != raw.size:
        raise StateError(f"storage: field {key!r}: expected the bytes of {size} rows, found {lengths.shape} lengths")
    ends = np.cumsum(lengths).tolist()
    values = [raw[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    try:
        for value in values:
            decoded(value.copy(), kind.varies, kind.dtype, kind.shape)
    except ValueError as error:
        raise StateError(f"storage: field {key!r}: expected {kind.varies} rows, found {error}") from error
    return values


def _whole_steps(storage: Storage, state: Mapping[str, Any]) -> int:
    """The capacity that a storage has when it is of as many environments as a state."""
    schema = state.get("schema")
    num_envs: Any = schema.get("num_envs") if isinstance(schema, Mapping) else 1
    own = storage.capacity
    return own - own % num_envs if is_whole(num_envs) and 1 <= num_envs <= own else own


# Nobody writes more rows than that, and sums of such numbers still fit into 64 bits.
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
    """Schema, columns (see ``rows_state``) and number of rows written of a state that was checked.

    Raises:
        StateError: It does not fit the storage, or its parts do not fit each other.
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


def copied(state: Any) -> Any:
    """Nested dicts with every array copied."""
    if isinstance(state, Mapping):
        return {name: copied(value) for name, value in state.items()}
    return np.array(state) if isinstance(state, np.ndarray) else state


def part_of(state: Any, name: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a state, a dict with the values ``own`` in it.

    Raises:
        StateError: It is missing, or of something else.
    """
    part = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(part, Mapping):
        raise StateError(f"state: expected a dict {name!r}, found {part!r:.80}")
    for key, value in own.items():
        if part.get(key) != value:
            raise StateError(f"state: expected the {name} {key} {value!r} of this buffer, found {part.get(key)!r:.80}")
    return part


def check_numbers(state: Any, own: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """The integers ``names`` of a state that has the values ``own``.

    Raises:
        StateError: One of them is none, or the state is of something else.
    """
    part_of({"state": state}, "state", own)
    return {name: state_number(name, state.get(name)) for name in names}
