"""Rollouts, turns and examples as Arrow columns, and back.

Arrays lie flat, so that every tool reads them: the values per token of a turn, or of an example, are one list, and
other values a number or a list. Metadata is JSON text. A value that JSON does not have is an object of one key that
begins with "$"::

    {"temperature": 0.7, "range": (1, 2)}   ->   {"temperature": 0.7, "range": {"$tuple": [1, 2]}}
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.groups.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.records import RLExample, RolloutRecord, Turn, unchecked

# ---------------------------------------------------------------------- metadata


def _to_json(value: Any) -> Any:
    """Convert a value of metadata to JSON values."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        name = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {name: [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]}
    if isinstance(value, dict):
        items = {key: _to_json(item) for key, item in value.items()}
        return {"$dict": list(items.items())} if any(key.startswith("$") for key in items) else items
    if isinstance(value, list):
        return list(map(_to_json, value))
    if isinstance(value, tuple):
        return {"$tuple": list(map(_to_json, value))}
    return {"$bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _array(value: Sequence[Any]) -> npt.NDArray[Any]:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "$array": _array,
    "$scalar": lambda value: _array(value)[()],
    "$dict": dict,
    "$tuple": tuple,
    "$bytes": base64.b64decode,
}


def _from_json(value: dict[str, Any]) -> Any:
    """Return the value of a JSON object that ``_to_json`` made, whose items are restored already."""
    key = next(iter(value), "")
    return _FROM_JSON[key](value[key]) if key.startswith("$") else value


def _metadata(texts: pa.Array) -> list[dict[str, Any]]:
    """Return the metadata of each row; ``{}`` where a row has none."""
    try:
        return [json.loads(text, object_hook=_from_json) if text else {} for text in texts.to_pylist()]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"metadata: expected it as it was written, found {error!r:.200}") from error


# ---------------------------------------------------------------------- schemas


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_field("element", kind))


TOKENS, _FLOATS = _list(pa.int32()), _list(pa.float32())
_TURN = pa.struct(
    [
        _field("message", pa.string()),
        _field("role", pa.string()),
        _field("tokens", TOKENS),
        _field("logprobs", _FLOATS, nullable=True),
        _field("reward", pa.float64(), nullable=True),
        _field("metadata", pa.string(), nullable=True),
    ]
)
ROLLOUTS = pa.schema(
    [
        _field("environment", pa.string()),
        _field("example_id", pa.string()),
        _field("policy_version", pa.string()),
        _field("rollout_uid", pa.string()),
        _field("turns", _list(_TURN)),
        _field("reward", pa.float64()),
        _field("created", pa.float64()),
        _field("replica_id", pa.string(), nullable=True),
        _field("metadata", pa.string(), nullable=True),
    ]
)
"""The columns of all rollouts."""

EXAMPLES = pa.schema(
    [
        _field("rollout_uid", pa.string()),
        _field("environment", pa.string()),
        _field("policy_version", pa.string()),
        _field("tokens", TOKENS),
        _field("loss_mask", _list(pa.bool_())),
        _field("advantage", _FLOATS),
        _field("generator_log_probs", _FLOATS),
    ]
)
"""The columns of all batches."""


def stored(declared: Columns, *pers: str) -> list[RolloutColumn]:
    """Return the declared columns that lie with the rollouts: all but late ones."""
    return [column for column in declared.values() if column.per in pers and not column.late]


def _is_flat(column: RolloutColumn, of_example: bool) -> bool:
    """Whether a row has one number and no list."""
    return not column.shape and (column.per == "example" or (column.per == "turn" and not of_example))


def declared_field(column: RolloutColumn, *, of_example: bool = False) -> pa.Field:
    """Return the field of a declared column in a turn or rollout, or, ``of_example``, in an example of many turns."""
    value = pa.from_numpy_dtype(np.dtype(column.dtype))
    return _field(column.name, value if _is_flat(column, of_example) else _list(value), nullable=not of_example)


@cache
def rollouts_with(declared: Columns, absent: frozenset[str] = frozenset()) -> pa.Schema:
    """Return the columns of rollouts that may have declared ones, without those in ``absent``, as "turns.reward"."""
    fields = [*_TURN, *map(declared_field, stored(declared, "token", "turn"))]
    turn = pa.struct([field for field in fields if f"turns.{field.name}" not in absent])
    fields = [_field("turns", _list(turn)) if field.name == "turns" else field for field in ROLLOUTS]
    if "reward" in declared:  # it may come later
        fields = [field.with_nullable(True) if field.name == "reward" else field for field in fields]
    fields += map(declared_field, stored(declared, "example"))
    return pa.schema([field for field in fields if field.name not in absent])


def _optional(declared: Columns) -> frozenset[str]:
    """Return the columns that a file leaves out if they are null in all rows: a small file costs time per column."""
    own = [column.name for column in stored(declared, "example")]
    of_turns = [f"turns.{column.name}" for column in stored(declared, "token", "turn")]
    return frozenset(["replica_id", "metadata", "turns.reward", "turns.metadata", *own, *of_turns])


def rollout_schema(found: pa.Schema, declared: Columns) -> pa.Schema:
    """Return the columns that a file of rollouts is expected to have, from the optional ones that it has."""
    names = {*found.names, *(f"turns.{field.name}" for field in found.field("turns").type.value_type)}
    return rollouts_with(declared, _optional(declared) - names)


def examples_with(declared: Columns) -> pa.Schema:
    """Return the columns of a batch whose examples have declared columns."""
    turn_ids = [_field("turn_ids", TOKENS)] if declared.of("turn") else []
    return pa.schema([*EXAMPLES, *turn_ids, *(declared_field(column, of_example=True) for column in declared.values())])


# ---------------------------------------------------------------------- to Arrow


def rollouts_to_table(rollouts: Sequence[RolloutRecord], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Convert rollouts, with their declared columns, to Arrow.

    Raises:
        DataError: Text that is not Unicode.
    """
    schema = rollouts_with(declared)
    try:
        return pa.RecordBatch.from_arrays(_columns_of(rollouts, schema, declared), schema=schema)
    except UnicodeEncodeError as error:
        raise DataError(f"rollouts: expected text in Unicode, found {error.object!r:.100}") from error


def examples_to_table(examples: Sequence[RLExample], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Convert examples, with their declared columns, to Arrow."""
    columns = _columns_of(examples, EXAMPLES, NO_COLUMNS)
    if declared.of("turn"):
        columns.append(lists_of(TOKENS, [example.turn_ids for example in examples]))
    for name, column in declared.items():
        columns.append(_declared_array(column, [example.columns[name] for example in examples], of_example=True))
    return pa.RecordBatch.from_arrays(columns, schema=examples_with(declared))


def _columns_of(objects: Sequence[Any], fields: Iterable[pa.Field], declared: Columns) -> list[pa.Array]:
    """Convert some attributes of rollouts, turns or examples, a row for each."""
    return [_column_of(field, objects, declared) for field in fields]


def _column_of(field: pa.Field, objects: Sequence[Any], declared: Columns) -> pa.Array:
    name, kind = field.name, field.type
    if name in declared and not declared[name].late:
        return _declared_array(declared[name], [item.columns.get(name) for item in objects])
    values = list(map(attrgetter(name), objects))
    if name == "turns":
        fields = list(kind.value_type)
        turns = _columns_of(list(chain.from_iterable(values)), fields, declared)
        return nested(kind, list(map(len, values)), pa.StructArray.from_arrays(turns, fields=fields))
    if name == "metadata":
        values = [json.dumps(_to_json(one), ensure_ascii=False) if one else None for one in values]
    elif name == "replica_id":
        values = [one or None for one in values]
    return lists_of(kind, values) if pa.types.is_list(kind) else pa.array(values, kind)


def nested(kind: pa.DataType, lengths: Sequence[int], values: pa.Array, missing: Any = None) -> pa.Array:
    """Return lists of type ``kind`` and these lengths, of values that lie behind each other."""
    ends = np.cumsum([0, *lengths])
    if ends[-1] > np.iinfo(np.int32).max:
        raise DataError(f"rollouts: expected fewer than 2**31 values at once, found {ends[-1]}")
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, type=kind, mask=missing)


def lists_of(kind: pa.DataType, arrays: Sequence[npt.NDArray[Any] | None]) -> pa.Array:
    """Convert arrays to lists of type ``kind``, flat; None becomes null."""
    there = [array.reshape(-1) for array in arrays if array is not None]
    values = pa.array(np.concatenate(there) if there else [], kind.value_type)
    missing = pa.array([array is None for array in arrays]) if len(there) < len(arrays) else None
    return nested(kind, [0 if array is None else array.size for array in arrays], values, missing)


def _declared_array(
    column: RolloutColumn, values: Sequence[npt.NDArray[Any] | None], *, of_example: bool = False
) -> pa.Array:
    """Convert the values of a declared column, None where a row has none."""
    kind = declared_field(column, of_example=of_example).type
    if not _is_flat(column, of_example):
        return lists_of(kind, values)
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    return pa.array(np.array([0 if value is None else value for value in values], column.dtype), kind, mask=missing)


def without_empty(rows: pa.RecordBatch, declared: Columns = NO_COLUMNS) -> pa.Table:
    """Return what ``rollouts_to_table`` made, or a slice of it, without optional columns that are null in all rows."""
    turns, bounds = _inner(rows.column("turns"))
    arrays = {f"turns.{field.name}": turns.field(field.name) for field in turns.type}
    arrays |= dict(zip(rows.schema.names, rows.columns, strict=True))
    absent = {name for name in _optional(declared) if arrays[name].null_count == len(arrays[name])}
    schema = rollouts_with(declared, frozenset(absent))
    fields = list(schema.field("turns").type.value_type)
    inner = pa.StructArray.from_arrays([arrays[f"turns.{field.name}"] for field in fields], fields=fields)
    arrays["turns"] = nested(schema.field("turns").type, np.diff(bounds).tolist(), inner)
    return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


# ---------------------------------------------------------------------- from Arrow


def table_to_rollouts(
    table: pa.Table | pa.RecordBatch,
    known: Mapping[str, Sequence[Any]] | None = None,
    declared: Columns = NO_COLUMNS,
) -> list[RolloutRecord]:
    """Return the rollouts that ``rollouts_to_table`` converted; their arrays share the table's memory.

    Args:
        table: The columns.
        known: Columns that the table may lack, as Python values.
        declared: The declared columns.
    """
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    rollouts: list[RolloutRecord] = []
    for batch, (begin, end) in zip(batches, pairwise(accumulate(map(len, batches), initial=0)), strict=True):
        rollouts += _batch_to_rollouts(
            batch, {name: values[begin:end] for name, values in (known or {}).items()}, declared
        )
    return rollouts


def _batch_to_rollouts(
    batch: pa.RecordBatch, known: dict[str, Sequence[Any]], declared: Columns
) -> list[RolloutRecord]:
    turns, bounds = _inner(batch.column("turns"))
    values: dict[str, Sequence[Any]] = {name: turns.field(name).to_pylist() for name in ("message", "role")}
    values |= {name: _arrays_of(turns.field(name)) for name in ("tokens", "logprobs")}
    names = turns.type.names
    values["reward"] = turns.field("reward").to_pylist() if "reward" in names else [None] * len(turns)
    values["metadata"] = _metadata(turns.field("metadata") if "metadata" in names else pa.nulls(len(turns)))
    own = [(column, turns.field(column.name)) for column in stored(declared, "token", "turn") if column.name in names]
    values["columns"] = _declared_dicts(own, len(turns))
    count, names = batch.num_rows, batch.schema.names
    simple = [name for name in names if name in ROLLOUTS.names and name not in ("turns", "metadata", "replica_id")]
    columns = known | {name: batch.column(name).to_pylist() for name in simple}
    # The checks of each object take most of the time, and find no more than these checks of whole columns.
    sound = _are_sound_turns(turns) and _are_sound(columns, bounds, "reward" in declared)
    make_turn, make_rollout = (_make_turn, _make_rollout) if sound else (Turn, RolloutRecord)
    made = list(map(make_turn, *(values[name] for name in Turn.__dataclass_fields__)))
    columns["turns"] = [tuple(made[begin:end]) for begin, end in pairwise(bounds)]
    columns["metadata"] = _metadata(batch.column("metadata") if "metadata" in names else pa.nulls(count))
    replicas = batch.column("replica_id").to_pylist() if "replica_id" in names else [None] * count
    columns["replica_id"] = [one or "" for one in replicas]
    columns.setdefault("group_uid", [""] * count)
    own = [(column, batch.column(column.name)) for column in stored(declared, "example") if column.name in names]
    columns["columns"], columns["declared"] = _declared_dicts(own, count), [declared] * count
    return list(map(make_rollout, *(columns[name] for name in RolloutRecord.__dataclass_fields__)))


_make_turn, _make_rollout = unchecked(Turn), unchecked(RolloutRecord)
_NUMBERS = ("reward", "created")


def _are_sound_turns(turns: pa.StructArray) -> bool:
    """Whether ``Turn`` accepts all of these values."""
    tokens, logprobs = turns.field("tokens"), turns.field("logprobs")
    rewards = turns.field("reward").drop_null() if "reward" in turns.type.names else pa.array([], pa.float64())
    flat, floats = _inner(tokens)[0], _inner(logprobs)[0]
    same = np.diff(logprobs.offsets.to_numpy()) == np.diff(tokens.offsets.to_numpy())
    if logprobs.null_count:
        same |= logprobs.is_null().to_numpy(zero_copy_only=False)
    required = (turns, flat, floats, *(turns.field(name) for name in ("message", "role", "tokens")))
    return bool(
        not any(values.null_count for values in required)
        and same.all()
        and (not len(flat) or flat.to_numpy().min() >= 0)
        and np.isfinite(floats.to_numpy()).all()
        and (not len(floats) or floats.to_numpy().max() <= 0)
        and np.isfinite(rewards.to_numpy()).all()
    )


def _are_sound(columns: Mapping[str, Sequence[Any]], bounds: Sequence[int], late_reward: bool) -> bool:
    """Whether ``RolloutRecord`` accepts all of these values, turns apart."""
    if late_reward:
        columns = {**columns, "reward": [reward for reward in columns["reward"] if reward is not None]}
    empty = any(begin == end for begin, end in pairwise(bounds))
    missing = any(None in values for values in columns.values())
    unnamed = any("" in values for name, values in columns.items() if name not in _NUMBERS)
    return not (empty or missing or unnamed) and all(map(math.isfinite, chain(*(columns[name] for name in _NUMBERS))))


def table_to_examples(table: pa.Table, declared: Columns = NO_COLUMNS) -> list[RLExample]:
    """Return the examples that ``examples_to_table`` converted."""
    rows: list[RLExample] = []
    for batch in table.to_batches():
        names = [name for name in (*EXAMPLES.names, "turn_ids") if name in batch.schema.names]
        values = [
            _arrays_of(array) if pa.types.is_list(array.type) else array.to_pylist()
            for array in map(batch.column, names)
        ]
        own = [(column, batch.column(name)) for name, column in declared.items()]
        for row, columns in zip(
            zip(*values, strict=True), _declared_dicts(own, len(batch), of_example=True), strict=True
        ):
            rows.append(RLExample(**dict(zip(names, row, strict=True)), columns=columns, declared=declared))
    return rows


def _inner(lists: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return the values of all lists behind each other, and the place where each list begins, and the end."""
    offsets = lists.offsets.to_numpy()
    begin = int(offsets[0])
    return lists.values.slice(begin, int(offsets[-1]) - begin), (offsets - begin).tolist()


def _arrays_of(lists: pa.Array) -> list[npt.NDArray[Any] | None]:
    """Return each list as an array that shares memory and is read-only, None for null."""
    values, bounds = _inner(lists)
    flat = values.to_numpy(zero_copy_only=False)
    flat.flags.writeable = False
    arrays: list[npt.NDArray[Any] | None] = [flat[a:b] for a, b in pairwise(bounds)]
    if lists.null_count:
        for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)).tolist():
            arrays[row] = None
    return arrays


def declared_values(
    column: RolloutColumn, rows: pa.Array, *, of_example: bool = False
) -> list[npt.NDArray[Any] | None]:
    """Return the value of a declared column of each row, None for null; they share memory with the array if possible.

    Raises:
        DataError: Values of another shape than the column's.
    """
    if _is_flat(column, of_example):
        filled = rows.fill_null(pa.scalar(0, pa.int8()).cast(rows.type)) if rows.null_count else rows
        flat = filled.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
        flat.flags.writeable = False
        has = rows.is_valid().to_numpy(zero_copy_only=False).tolist()
        return [flat[row, ...] if there else None for row, there in enumerate(has)]
    one = column.per == "example" or (column.per == "turn" and not of_example)
    shape, size = column.shape if one else (-1, *column.shape), math.prod(column.shape)
    found = _arrays_of(rows)
    for row, values in enumerate(found):
        if values is not None:
            if len(values) != size if one else len(values) % size:
                raise DataError(
                    f"column {column.name!r}: expected values of shape {list(column.shape)}, found {len(values)}"
                )
            found[row] = values.reshape(shape)
    return found


def _declared_dicts(
    columns: Iterable[tuple[RolloutColumn, pa.Array]], count: int, *, of_example: bool = False
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the values of declared columns by name, a dict for each of ``count`` rows."""
    rows: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(count)]
    for column, array in columns:
        for row, value in zip(rows, declared_values(column, array, of_example=of_example), strict=True):
            if value is not None:
                row[column.name] = value
    return rows
