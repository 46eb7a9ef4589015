"""Columns that were declared as Arrow arrays, and back.

The values of a token, turn or example lie flat, so that every tool reads them: those of a token column are one list a
turn, or an example, and others a number or a list each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import DataError
from mouse_core.groups.columns import NO_COLUMNS, Columns, RolloutColumn
from mouse_core.groups.records import RLExample, RolloutRecord, Turn, unchecked

NODE = pa.struct(
    [
        pa.field("key", pa.string()),  # of an item of a dict; else null
        pa.field("kind", pa.string(), nullable=False),
        pa.field("number", pa.float64()),  # a bool, float or whole number up to 2**53; how many items a container has
        pa.field("text", pa.string()),  # a str, a larger whole number, the dtype and shape of an array
        pa.field("data", pa.binary()),  # bytes, the values of an array
    ]
)
"""A row of metadata."""

_EXACT = 2**53
Node = tuple[str | None, str, float | None, str | None, bytes | None]


def encode_metadata(values: Mapping[str, Any], nodes: list[Node]) -> int:
    """Append the rows of a dict's items; how many there are now."""
    for key, value in values.items():
        _encode(key, value, nodes)
    return len(nodes)


def _encode(key: str | None, value: Any, nodes: list[Node]) -> None:
    if value is None:
        nodes.append((key, "none", None, None, None))
    elif isinstance(value, bool):
        nodes.append((key, "bool", float(value), None, None))
    elif isinstance(value, str):
        nodes.append((key, "str", None, value, None))
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        shape = "" if isinstance(value, np.generic) else ",".join(map(str, array.shape))
        kind = "scalar" if isinstance(value, np.generic) else "array"
        nodes.append((key, kind, None, f"{array.dtype.str}[{shape}]", array.tobytes()))
    elif isinstance(value, int):
        small = -_EXACT <= value <= _EXACT
        nodes.append((key, "int", float(value) if small else None, None if small else str(value), None))
    elif isinstance(value, float):
        # The bits of a NaN need not survive elsewhere; that it is one does.
        nodes.append((key, "float", value, None, None))
    elif isinstance(value, bytes):
        nodes.append((key, "bytes", None, None, value))
    elif isinstance(value, dict):
        nodes.append((key, "dict", float(len(value)), None, None))
        encode_metadata(value, nodes)
    else:
        nodes.append((key, type(value).__name__, float(len(value)), None, None))
        for item in value:
            _encode(None, item, nodes)


def decode_metadata(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The dict that ``encode_metadata`` made rows of."""
    found, position = {}, 0
    while position < len(nodes):
        key = nodes[position]["key"]
        found[key], position = _decode(nodes, position)
    return found


def _decode(nodes: Sequence[Mapping[str, Any]], position: int) -> tuple[Any, int]:
    """The value whose rows begin at a position, and where they end."""
    node = nodes[position]
    kind = node["kind"]
    position += 1
    if kind not in _CONTAINERS:
        if kind not in _VALUES:
            raise DataError(f"metadata: expected a known kind of value, found {kind!r}")
        return _VALUES[kind](node), position
    keys, items = [], []
    for _ in range(int(node["number"])):
        keys.append(nodes[position]["key"])
        item, position = _decode(nodes, position)
        items.append(item)
    return _CONTAINERS[kind](keys, items), position


def _array(node: Mapping[str, Any]) -> npt.NDArray[Any]:
    dtype, _, shape = node["text"][:-1].partition("[")
    sizes = [int(size) for size in shape.split(",") if size]
    return np.frombuffer(node["data"], dtype).reshape(sizes).copy()


_CONTAINERS: dict[str, Callable[[list[str], list[Any]], Any]] = {
    "dict": lambda keys, items: dict(zip(keys, items, strict=True)),
    "list": lambda keys, items: items,
    "tuple": lambda keys, items: tuple(items),
}
_VALUES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "none": lambda node: None,
    "bool": lambda node: bool(node["number"]),
    "int": lambda node: int(node["number"] if node["text"] is None else node["text"]),
    "float": lambda node: math.nan if math.isnan(node["number"]) else node["number"],
    "str": lambda node: node["text"],
    "bytes": lambda node: node["data"],
    "array": _array,
    "scalar": lambda node: _array(node)[()],
}


def field_of(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    """A field that has no nulls, unless it is said to."""
    return pa.field(name, kind, nullable=nullable)


TOKENS = pa.list_(field_of("element", pa.int32()))
FLOATS = pa.list_(field_of("element", pa.float32()))
_METADATA = pa.list_(field_of("element", NODE))
_TURN = pa.struct(
    [
        field_of("message", pa.string()),
        field_of("role", pa.string()),
        field_of("tokens", TOKENS),
        field_of("logprobs", FLOATS, nullable=True),
        field_of("reward", pa.float64(), nullable=True),
        field_of("metadata", _METADATA),
    ]
)
ROLLOUTS = pa.schema(
    [
        field_of("environment", pa.string()),
        field_of("example_id", pa.string()),
        field_of("policy_version", pa.string()),
        field_of("rollout_uid", pa.string()),
        field_of("turns", pa.list_(field_of("element", _TURN))),
        field_of("reward", pa.float64()),
        field_of("created", pa.float64()),
        field_of("replica_id", pa.string()),
        field_of("metadata", _METADATA),
    ]
)
"""The columns of rollouts, all of them."""


_OPTIONAL = ("replica_id", "metadata", "turns.reward", "turns.metadata")
"""Columns that a file lacks if nothing is in them: what a small file costs is its columns."""


@cache
def rollouts_with(declared: Columns) -> pa.Schema:
    """The columns of rollouts, all of them, where others were declared."""
    turn = pa.struct([*_TURN, *map(declared_field, stored(declared, "token", "turn"))])
    turns = field_of("turns", pa.list_(field_of("element", turn)))
    own = [turns if field.name == "turns" else field for field in ROLLOUTS]
    if "reward" in declared:  # it may come later
        own = [field.with_nullable(True) if field.name == "reward" else field for field in own]
    return pa.schema([*own, *map(declared_field, stored(declared, "example"))])


@cache
def _schema_for(present: frozenset[str], declared: Columns) -> pa.Schema:
    """The columns of a file that has some of the optional ones, and some that were declared."""
    whole = rollouts_with(declared)
    left_out = _optional(declared).difference(present)
    inner = whole.field("turns").type.value_type
    turn = pa.struct([field for field in inner if f"turns.{field.name}" not in left_out])
    turns = field_of("turns", pa.list_(field_of("element", turn)))
    fields = [turns if field.name == "turns" else field for field in whole]
    return pa.schema([field for field in fields if field.name not in left_out])


def _optional(declared: Columns) -> set[str]:
    prefix = {"example": "", "turn": "turns.", "token": "turns."}
    return {*_OPTIONAL, *(prefix[column.per] + column.name for column in declared.values() if not column.late)}


def rollout_schema(found: pa.Schema, declared: Columns) -> pa.Schema:
    """The columns that a file of rollouts is to have, if it has these."""
    turns = [kind for name, kind in zip(found.names, found.types, strict=True) if name == "turns"]
    turn = turns[0].value_type if turns and pa.types.is_list(turns[0]) else _TURN
    inner = turn.names if pa.types.is_struct(turn) else _TURN.names
    names = frozenset([*found.names, *(f"turns.{name}" for name in inner)])
    return _schema_for(names.intersection(_optional(declared)), declared)


def rollouts_to_table(rollouts: Sequence[RolloutRecord], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Rollouts as columns, also those that were declared.

    Raises:
        DataError: Text that is not Unicode.
    """
    try:
        schema = rollouts_with(declared)
        return pa.RecordBatch.from_arrays(columns_of(rollouts, schema, declared), schema=schema)
    except UnicodeEncodeError as error:
        raise DataError(f"rollouts: expected text in Unicode, found {error.object!r:.100}") from error


def columns_of(objects: Sequence[Any], fields: Iterable[pa.Field], declared: Columns) -> list[pa.Array]:
    """Some fields of rollouts, turns or examples, a row for each."""
    given = list(fields)
    own = [field.name for field in given if field.name not in declared or declared[field.name].late]
    values = {name: list(map(attrgetter(name), objects)) for name in own}
    return [
        _column(field, values[field.name], declared)
        if field.name in values
        else declared_array(declared[field.name], [item.columns.get(field.name) for item in objects])
        for field in given
    ]


def _column(field: pa.Field, values: Sequence[Any], declared: Columns) -> pa.Array:
    if field.name == "turns":
        fields = list(field.type.value_type)
        turns = columns_of(list(chain.from_iterable(values)), fields, declared)
        rows = pa.StructArray.from_arrays(turns, fields=fields)
        return _nested(field.type, list(map(len, values)), rows)
    if field.name == "metadata":
        return _metadata(values)
    return lists_of(field.type, values) if pa.types.is_list(field.type) else pa.array(values, field.type)


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise DataError(f"rollouts: expected fewer than 2**31 tokens at once, found {offsets[-1]}")
    return offsets.astype(np.int32)


def _nested(kind: pa.DataType, lengths: Sequence[int], values: pa.Array, missing: Any = None) -> pa.Array:
    offsets = pa.array(_offsets(lengths))
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=missing)


def lists_of(kind: pa.DataType, arrays: Sequence[npt.NDArray[Any] | None]) -> pa.Array:
    """Arrays as lists of this type."""
    there = [array for array in arrays if array is not None]
    values = pa.array(np.concatenate(there) if there else [], kind.value_type)
    lengths = [0 if array is None else len(array) for array in arrays]
    missing = None
    if len(there) < len(arrays):
        missing = pa.array([array is None for array in arrays], pa.bool_())
    return _nested(kind, lengths, values, missing)


def _metadata(dicts: Sequence[Any]) -> pa.Array:
    nodes: list[Node] = []
    ends = [encode_metadata(values, nodes) if values else len(nodes) for values in dicts]
    columns = list(zip(*nodes, strict=True)) if nodes else [()] * NODE.num_fields
    rows = pa.StructArray.from_arrays(
        [pa.array(values, kind.type) for values, kind in zip(columns, NODE, strict=True)], fields=list(NODE)
    )
    return _nested(_METADATA, np.diff(ends, prepend=0).tolist(), rows)


def split_rows(rows: pa.RecordBatch, ends: Sequence[int], declared: Columns = NO_COLUMNS) -> Iterator[pa.Table]:
    """Rows ``ends[0]`` to ``ends[1]``, ``ends[1]`` to ``ends[2]`` and so on, each without columns that say nothing.

    Args:
        rows: What ``rollouts_to_table`` made.
        ends: Where they are to be cut.
        declared: Its columns that were declared.
    """
    turns, cuts = rows.column("turns"), np.asarray(ends)
    turn_cuts = turns.offsets.to_numpy()[cuts]
    inner = turns.values
    there = {
        "replica_id": _anything(pc.binary_length(rows.column("replica_id")), cuts),
        "metadata": _anything(rows.column("metadata").value_lengths(), cuts),
        "turns.reward": _anything(inner.field("reward").is_valid(), turn_cuts),
        "turns.metadata": _anything(inner.field("metadata").value_lengths(), turn_cuts),
    }
    for column in stored(declared, "example"):
        there[column.name] = _anything(rows.column(column.name).is_valid(), cuts)
    for column in stored(declared, "token", "turn"):
        there[f"turns.{column.name}"] = _anything(inner.field(column.name).is_valid(), turn_cuts)
    made: dict[frozenset[str], pa.Table] = {}
    for place, (begin, end) in enumerate(pairwise(ends)):
        present = frozenset(name for name, values in there.items() if values[place])
        if present not in made:
            made[present] = pa.Table.from_batches([_only(rows, _schema_for(present, declared))])
        yield made[present].slice(begin, end - begin)


def _anything(values: pa.Array, cuts: npt.NDArray[np.int64]) -> list[bool]:
    """Whether something is not zero between two cuts each."""
    sums = np.concatenate([[0], np.cumsum(values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    found: list[bool] = (np.diff(sums[cuts]) > 0).tolist()
    return found


def _only(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows with fewer columns."""
    turns, kind = rows.column("turns"), schema.field("turns").type
    fields = list(kind.value_type)
    inner = pa.StructArray.from_arrays([turns.values.field(field.name) for field in fields], fields=fields)
    columns = {"turns": pa.ListArray.from_arrays(turns.offsets, inner, type=kind)}
    return pa.RecordBatch.from_arrays([columns.get(name, rows.column(name)) for name in schema.names], schema=schema)


def table_to_rollouts(
    table: pa.Table | pa.RecordBatch,
    known: Mapping[str, Sequence[Any]] | None = None,
    declared: Columns = NO_COLUMNS,
) -> list[RolloutRecord]:
    """The rollouts that ``rollouts_to_table`` made columns of; their arrays share the table's memory.

    Args:
        table: The columns.
        known: Columns that the table may lack, as Python values.
        declared: Columns that the rollouts may have beside those of all.
    """
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    ends = accumulate(map(len, batches), initial=0)
    pieces = zip(batches, pairwise(ends), strict=True)
    return [
        rollout
        for batch, (begin, end) in pieces
        for rollout in _batch_to_rollouts(
            batch, {name: values[begin:end] for name, values in (known or {}).items()}, declared
        )
    ]


def _batch_to_rollouts(
    batch: pa.RecordBatch, known: dict[str, Sequence[Any]], declared: Columns
) -> list[RolloutRecord]:
    turns, bounds = _inner(batch.column("turns"))
    values: dict[str, Sequence[Any]] = {name: turns.field(name).to_pylist() for name in ("message", "role")}
    values |= {name: arrays_of(turns.field(name)) for name in ("tokens", "logprobs")}
    names = turns.type.names
    values["reward"] = turns.field("reward").to_pylist() if "reward" in names else [None] * len(turns)
    values["metadata"] = _dicts(turns.field("metadata")) if "metadata" in names else [{} for _ in range(len(turns))]
    own = [(column, turns.field(column.name)) for column in stored(declared, "token", "turn") if column.name in names]
    values["columns"] = dicts_of(own, len(turns))
    simple = [name for name in batch.schema.names if name in ROLLOUTS.names and name not in ("turns", "metadata")]
    columns = known | {name: batch.column(name).to_pylist() for name in simple}
    # Each object's own checks take most of the time, and find nothing that these do not.
    sound = _are_sound_turns(turns) and _are_sound(columns, bounds, "reward" in declared)
    make_turn, make_rollout = (_make_turn, _make_rollout) if sound else (Turn, RolloutRecord)
    made = list(map(make_turn, *(values[name] for name in Turn.__dataclass_fields__)))
    columns["turns"] = [tuple(made[begin:end]) for begin, end in pairwise(bounds)]
    count, names = batch.num_rows, batch.schema.names
    columns["metadata"] = _dicts(batch.column("metadata")) if "metadata" in names else [{} for _ in range(count)]
    for name in ("replica_id", "group_uid"):
        columns.setdefault(name, [""] * count)
    own = [(column, batch.column(column.name)) for column in stored(declared, "example") if column.name in names]
    columns["columns"], columns["declared"] = dicts_of(own, count), [declared] * count
    return list(map(make_rollout, *(columns[name] for name in RolloutRecord.__dataclass_fields__)))


_make_turn, _make_rollout = unchecked(Turn), unchecked(RolloutRecord)
_NUMBERS = ("reward", "created")


def _are_sound_turns(turns: pa.StructArray) -> bool:
    """Whether no turn would refuse these values."""
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
    """Whether no rollout would refuse these values, its turns apart."""
    if late_reward:
        columns = {**columns, "reward": [reward for reward in columns["reward"] if reward is not None]}
    empty = any(begin == end for begin, end in pairwise(bounds))
    missing = any(None in values for values in columns.values())
    unnamed = any("" in values for name, values in columns.items() if name not in ("replica_id", *_NUMBERS))
    return not (empty or missing or unnamed) and all(map(math.isfinite, chain(*(columns[name] for name in _NUMBERS))))


def _inner(lists: pa.Array) -> tuple[pa.Array, list[int]]:
    """What some lists hold, and where each begins in it."""
    offsets = lists.offsets.to_numpy()
    begin = int(offsets[0])
    return lists.values.slice(begin, int(offsets[-1]) - begin), (offsets - begin).tolist()


def arrays_of(lists: pa.Array) -> list[npt.NDArray[Any] | None]:
    """The lists as arrays that share memory, None where there is none."""
    values, bounds = _inner(lists)
    flat = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
    arrays: list[npt.NDArray[Any] | None] = [flat[a:b] for a, b in pairwise(bounds)]
    if lists.null_count:
        for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)).tolist():
            arrays[row] = None
    return arrays


def _dicts(lists: pa.Array) -> list[dict[str, Any]]:
    nodes, bounds = _inner(lists)
    if not len(nodes):
        return [{} for _ in range(len(lists))]
    rows = nodes.to_pylist()
    return [decode_metadata(rows[a:b]) for a, b in pairwise(bounds)]


EXAMPLES = pa.schema(
    [
        field_of("rollout_uid", pa.string()),
        field_of("environment", pa.string()),
        field_of("policy_version", pa.string()),
        field_of("tokens", TOKENS),
        field_of("loss_mask", pa.list_(field_of("element", pa.bool_()))),
        field_of("advantage", FLOATS),
        field_of("generator_log_probs", FLOATS),
    ]
)
"""The columns of a batch."""


def examples_with(declared: Columns) -> pa.Schema:
    """The columns of a batch of examples that have others, too."""
    turn_ids = [field_of("turn_ids", TOKENS)] if declared.of("turn") else []
    return pa.schema([*EXAMPLES, *turn_ids, *(declared_field(column, of_example=True) for column in declared.values())])


def examples_to_table(examples: Sequence[RLExample], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Examples as columns, also those that were declared."""
    columns = columns_of(examples, EXAMPLES, NO_COLUMNS)
    if declared.of("turn"):
        columns.append(lists_of(TOKENS, [example.turn_ids for example in examples]))
    for name, column in declared.items():
        columns.append(declared_array(column, [example.columns[name] for example in examples], of_example=True))
    return pa.RecordBatch.from_arrays(columns, schema=examples_with(declared))


def table_to_examples(table: pa.Table, declared: Columns = NO_COLUMNS) -> list[RLExample]:
    """The examples that ``examples_to_table`` made columns of."""
    rows: list[RLExample] = []
    for batch in table.to_batches():
        names = [name for name in (*EXAMPLES.names, "turn_ids") if name in batch.schema.names]
        values = [
            arrays_of(batch.column(name))
            if pa.types.is_list(batch.column(name).type)
            else batch.column(name).to_pylist()
            for name in names
        ]
        own = dicts_of(((column, batch.column(name)) for name, column in declared.items()), len(batch), of_example=True)
        for row, columns in zip(zip(*values, strict=True), own, strict=True):
            rows.append(RLExample(**dict(zip(names, row, strict=True)), columns=columns, declared=declared))
    return rows


def stored(declared: Columns, *pers: str) -> list[RolloutColumn]:
    """Those that lie with the rollouts, in the order in which they were declared; late ones do not."""
    return [column for column in declared.values() if column.per in pers and not column.late]


def is_flat(column: RolloutColumn, *, of_example: bool = False) -> bool:
    """Whether a row has one number and no list."""
    return not column.shape and (column.per == "example" or (column.per == "turn" and not of_example))


def declared_field(column: RolloutColumn, *, of_example: bool = False) -> pa.Field:
    """How values lie: in a turn or a rollout, or, ``of_example``, in an example, which has many turns."""
    value = pa.from_numpy_dtype(np.dtype(column.dtype))
    flat = is_flat(column, of_example=of_example)
    kind = value if flat else pa.list_(pa.field("element", value, nullable=False))
    return pa.field(column.name, kind, nullable=not of_example)


def declared_array(
    column: RolloutColumn, values: Sequence[npt.NDArray[Any] | None], *, of_example: bool = False
) -> pa.Array:
    """The values of some rows, None where a row has none."""
    kind = declared_field(column, of_example=of_example).type
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    if is_flat(column, of_example=of_example):
        flat = np.array([0 if value is None else value for value in values], column.dtype)
        return pa.array(flat, kind, mask=missing if missing.any() else None)
    there = [value.reshape(-1) for value in values if value is not None]
    inner = pa.array(np.concatenate(there) if there else np.zeros(0, column.dtype), kind.value_type)
    ends = np.cumsum([0, *(0 if value is None else value.size for value in values)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise DataError(f"column {column.name!r}: expected fewer than 2**31 values at once, found {ends[-1]}")
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), inner, type=kind, mask=mask)


def declared_values(
    column: RolloutColumn, rows: pa.Array, *, of_example: bool = False
) -> list[npt.NDArray[Any] | None]:
    """The values of each row, None where it has none; they share memory with the array where that can be.

    Raises:
        DataError: They are not of the column's shape.
    """
    has = rows.is_valid().to_numpy(zero_copy_only=False)
    if is_flat(column, of_example=of_example):
        filled = rows.fill_null(pa.scalar(0, pa.int8()).cast(rows.type)) if rows.null_count else rows
        flat = filled.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
        flat.flags.writeable = False
        return [flat[row, ...] if there else None for row, there in enumerate(has.tolist())]
    offsets = rows.offsets.to_numpy()
    begin, end = int(offsets[0]), int(offsets[-1])
    values = rows.values.slice(begin, end - begin).to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    values.flags.writeable = False
    one = column.per == "example" or (column.per == "turn" and not of_example)
    shape, size = column.shape if one else (-1, *column.shape), prod(column.shape)
    found: list[npt.NDArray[Any] | None] = []
    for row, (a, b) in enumerate(pairwise((offsets - begin).tolist())):
        if has[row] and ((b - a) != size if one else (b - a) % size):
            raise DataError(f"column {column.name!r}: expected values of shape {list(column.shape)}, found {b - a}")
        found.append(values[a:b].reshape(shape) if has[row] else None)
    return found


def dicts_of(
    columns: Iterable[tuple[RolloutColumn, pa.Array]], count: int, *, of_example: bool = False
) -> list[dict[str, npt.NDArray[Any]]]:
    """What each of some rows has of columns, by name."""
    rows: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(count)]
    for column, array in columns:
        for row, value in zip(rows, declared_values(column, array, of_example=of_example), strict=True):
            if value is not None:
                row[column.name] = value
    return rows
