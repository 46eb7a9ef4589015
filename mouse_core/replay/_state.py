"""The state of a storage of rows: what is saved, and what is checked before it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import StateError
from mouse_core.replay._rows import RowSchema
from mouse_core.replay.protocols import Storage


def rows_state(storage: Storage, schema: RowSchema | None, columns: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """The state of a storage with these columns ``[len, *shape]``, in the order of the schema's fields."""
    return {
        "kind": "rows",
        "capacity": storage.capacity,
        "ndim": storage.ndim,
        "alignment": storage.alignment,
        "size": len(storage),
        "written": storage.written,
        "schema": None if schema is None else schema.to_json(),
        "columns": {str(place): column for place, column in enumerate(columns)},
    }


def check_state(storage: Storage, state: Mapping[str, Any], kind: str) -> None:
    """Raise StateError unless a state is of this kind of storage, of its size, and whole."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else state
        raise StateError(f"storage: expected a state of {kind}, found {found!r:.80}")
    for name in ("capacity", "alignment", *(["ndim"] if kind == "rows" else [])):
        if state.get(name) != getattr(storage, name):
            raise StateError(f"storage: expected {name} {getattr(storage, name)!r}, found {state.get(name)!r}")
    size, written = state.get("size"), state.get("written")
    integers = all(isinstance(value, int) and not isinstance(value, bool) for value in (size, written))
    if not integers or not 0 <= size <= min(storage.capacity, written):  # type: ignore[operator, type-var]
        raise StateError(
            f"storage: expected sizes up to {storage.capacity}, found {size!r} rows of {written!r} written"
        )


def state_rows(
    storage: Storage, state: Mapping[str, Any], known: RowSchema | None
) -> tuple[RowSchema | None, list[npt.NDArray[Any]], int]:
    """Schema, columns and number of rows written of a state that was checked.

    Raises:
        StateError: It does not fit the storage, or its parts do not fit each other.
    """
    check_state(storage, state, "rows")
    size, written = state["size"], int(state["written"])
    if state.get("schema") is None:
        if size:
            raise StateError(f"storage: expected a schema for {size} rows, found none")
        return None, [], written
    try:
        schema = RowSchema.from_json(state["schema"])
        columns = [np.asarray(state["columns"][str(place)]) for place in range(len(schema.fields))]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"storage: expected a schema and its columns, found {error!r}") from error
    if known is not None and not known.same_as(schema):
        raise StateError(f"storage: expected rows of {known.fields}, found {schema.fields}")
    if storage.capacity % schema.num_envs or size % schema.num_envs or written % schema.num_envs:
        raise StateError(f"storage: expected whole time steps of {schema.num_envs} environments, found {size} rows")
    for (key, kind), column in zip(schema.fields.items(), columns, strict=True):
        if column.shape != (size, *kind.shape) or column.dtype != kind.dtype:
            raise StateError(
                f"storage: field {key!r}: expected {kind.dtype} {[size, *kind.shape]}, found {column.dtype} "
                f"{list(column.shape)}"
            )
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
    numbers = {}
    for name in names:
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 64:
            raise StateError(f"state: expected {name} as an integer from 0, found {value!r:.80}")
        numbers[name] = int(value)
    return numbers
