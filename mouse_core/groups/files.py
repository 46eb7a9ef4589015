"""The files of a rollout buffer's folder: Parquet files of groups and of batches, and the declared columns.

The name of a Parquet file contains a digest of its content, and every page has a checksum, so damage is detected::

    <environment>/part-<uuid>.parquet            groups of one environment
    batches/batch_<uuid>_<seconds>.parquet       one batch
    .state/                                      logs, the owner of the folder, and columns.json

Rollouts, turns and examples are stored as Arrow columns. Arrays are stored flat, so that every tool can read them: the
values per token of a turn or an example are one list, and other values are a number or a list. Metadata is JSON text. A
value of a type that JSON does not have is written as an object with one key, which begins with "$"::

    {"temperature": 0.7, "range": (1, 2)}   ->   {"temperature": 0.7, "range": {"$tuple": [1, 2]}}
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import digest
from mouse_core.files.writing import publish, remove, remove_leftovers, storing, sync_folders, write_file
from mouse_core.groups.records import (
    NO_COLUMNS,
    Columns,
    GroupKey,
    RLExample,
    RolloutColumn,
    RolloutRecord,
    Turn,
    unchecked,
)

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
    """Restore a value from a JSON object that ``_to_json`` created; the object's items are already restored."""
    key = next(iter(value), "")
    return _FROM_JSON[key](value[key]) if key.startswith("$") else value


def _metadata(texts: pa.Array) -> list[dict[str, Any]]:
    """Return the metadata of each row; ``{}`` for a row without metadata."""
    try:
        return [json.loads(text, object_hook=_from_json) if text else {} for text in texts.to_pylist()]
    except UNREADABLE as error:
        raise DataError(f"metadata: expected valid JSON as it was written, found {error!r:.200}") from error


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
        _field("reward", pa.float64(), nullable=True),
        _field("created", pa.float64()),
        _field("replica_id", pa.string(), nullable=True),
        _field("metadata", pa.string(), nullable=True),
    ]
)
"""The columns that all rollouts have."""

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
"""The columns that all batches have."""


def _is_flat(column: RolloutColumn) -> bool:
    """Whether a row of the column has one number instead of a list."""
    return not column.shape and column.per == "example"


def declared_field(column: RolloutColumn, *, nullable: bool = True) -> pa.Field:
    """Return the Arrow field of a declared column."""
    value = pa.from_numpy_dtype(np.dtype(column.dtype))
    return _field(column.name, value if _is_flat(column) else _list(value), nullable)


@cache
def rollouts_with(declared: Columns) -> pa.Schema:
    """Return the Arrow schema of rollouts, including declared columns."""
    turn = pa.struct([*_TURN, *map(declared_field, declared.of("token"))])
    fields = [_field("turns", _list(turn)) if field.name == "turns" else field for field in ROLLOUTS]
    return pa.schema([*fields, *map(declared_field, declared.of("example"))])


def rollout_schema(found: pa.Schema, declared: Columns) -> pa.Schema:
    """Return the Arrow schema that a file of rollouts must have; a file may be older than some declared columns."""
    names = {*found.names, *(field.name for field in found.field("turns").type.value_type)}
    return rollouts_with(Columns(column for name, column in declared.items() if name in names))


def examples_with(declared: Columns) -> pa.Schema:
    """Return the Arrow schema of batches, including declared columns."""
    return pa.schema([*EXAMPLES, *(declared_field(column, nullable=False) for column in declared.values())])


# ---------------------------------------------------------------------- to Arrow


def rollouts_to_table(rollouts: Sequence[RolloutRecord], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Convert rollouts, with their declared columns, to Arrow.

    Raises:
        DataError: Text is not Unicode.
    """
    schema = rollouts_with(declared)
    try:
        return pa.RecordBatch.from_arrays(_columns_of(rollouts, schema, declared), schema=schema)
    except UnicodeEncodeError as error:
        raise DataError(f"rollouts: expected text in Unicode, found {error.object!r:.100}") from error


def examples_to_table(examples: Sequence[RLExample], declared: Columns = NO_COLUMNS) -> pa.RecordBatch:
    """Convert examples, with their declared columns, to Arrow."""
    schema = examples_with(declared)
    return pa.RecordBatch.from_arrays(_columns_of(examples, schema, declared), schema=schema)


def _columns_of(objects: Sequence[Any], fields: Iterable[pa.Field], declared: Columns) -> list[pa.Array]:
    """Convert attributes of rollouts, turns or examples to columns; each object becomes a row."""
    return [_column_of(field, objects, declared) for field in fields]


def _column_of(field: pa.Field, objects: Sequence[Any], declared: Columns) -> pa.Array:
    name, kind = field.name, field.type
    if name in declared:
        return _declared_array(declared[name], kind, [item.columns.get(name) for item in objects])
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
    """Return lists of type ``kind`` with the given lengths; ``values`` has the values of all lists in order."""
    ends = np.cumsum([0, *lengths])
    if ends[-1] > np.iinfo(np.int32).max:
        raise DataError(f"rollouts: expected fewer than 2**31 values at once, found {ends[-1]}")
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, type=kind, mask=missing)


def lists_of(kind: pa.DataType, arrays: Sequence[npt.NDArray[Any] | None]) -> pa.Array:
    """Convert arrays to flat lists of type ``kind``; None becomes null."""
    there = [array.reshape(-1) for array in arrays if array is not None]
    values = pa.array(np.concatenate(there) if there else [], kind.value_type)
    missing = pa.array([array is None for array in arrays]) if len(there) < len(arrays) else None
    return nested(kind, [0 if array is None else array.size for array in arrays], values, missing)


def _declared_array(column: RolloutColumn, kind: pa.DataType, values: Sequence[npt.NDArray[Any] | None]) -> pa.Array:
    """Convert the values of a declared column; a row without a value has None."""
    if not _is_flat(column):
        return lists_of(kind, values)
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    return pa.array(np.array([0 if value is None else value for value in values], column.dtype), kind, mask=missing)


# ---------------------------------------------------------------------- from Arrow


def table_to_rollouts(
    table: pa.Table | pa.RecordBatch,
    known: Mapping[str, Sequence[Any]] | None = None,
    declared: Columns = NO_COLUMNS,
) -> list[RolloutRecord]:
    """Convert a table of ``rollouts_to_table`` back to rollouts; their arrays share the table's memory.

    Args:
        table: The columns.
        known: Python values for columns that the table may lack.
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
    values |= {"reward": turns.field("reward").to_pylist(), "metadata": _metadata(turns.field("metadata"))}
    names = turns.type.names
    own = [(column, turns.field(column.name)) for column in declared.of("token") if column.name in names]
    values["columns"] = _declared_dicts(own, len(turns))
    count, names = batch.num_rows, batch.schema.names
    simple = [name for name in names if name in ROLLOUTS.names and name not in ("turns", "metadata", "replica_id")]
    columns = known | {name: batch.column(name).to_pylist() for name in simple}
    # Columns are checked at once, because the same checks of each object would take most of the time.
    sound = _are_sound_turns(turns) and _are_sound(columns, bounds)
    make_turn, make_rollout = (_make_turn, _make_rollout) if sound else (Turn, RolloutRecord)
    made = list(map(make_turn, *(values[name] for name in Turn.__dataclass_fields__)))
    columns["turns"] = [tuple(made[begin:end]) for begin, end in pairwise(bounds)]
    columns["metadata"] = _metadata(batch.column("metadata"))
    columns["replica_id"] = [one or "" for one in batch.column("replica_id").to_pylist()]
    columns.setdefault("group_uid", [""] * count)
    own = [(column, batch.column(column.name)) for column in declared.of("example") if column.name in names]
    columns["columns"], columns["declared"] = _declared_dicts(own, count), [declared] * count
    return list(map(make_rollout, *(columns[name] for name in RolloutRecord.__dataclass_fields__)))


_make_turn, _make_rollout = unchecked(Turn), unchecked(RolloutRecord)
_TURN_NUMBERS = ("reward", "created")


def _are_sound_turns(turns: pa.StructArray) -> bool:
    """Whether ``Turn`` accepts the values of all turns."""
    tokens, logprobs = turns.field("tokens"), turns.field("logprobs")
    rewards = turns.field("reward").drop_null()
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


def _are_sound(columns: Mapping[str, Sequence[Any]], bounds: Sequence[int]) -> bool:
    """Whether ``RolloutRecord`` accepts the values of all rollouts; turns are checked separately."""
    columns = {**columns, "reward": [reward for reward in columns["reward"] if reward is not None]}
    empty = any(begin == end for begin, end in pairwise(bounds))
    missing = any(None in values for values in columns.values())
    unnamed = any("" in values for name, values in columns.items() if name not in _TURN_NUMBERS)
    return not (empty or missing or unnamed) and all(
        map(math.isfinite, chain(*(columns[name] for name in _TURN_NUMBERS)))
    )


def table_to_examples(table: pa.Table, declared: Columns = NO_COLUMNS) -> list[RLExample]:
    """Convert a table of ``examples_to_table`` back to examples."""
    rows: list[RLExample] = []
    for batch in table.to_batches():
        values = [
            _arrays_of(array) if pa.types.is_list(array.type) else array.to_pylist()
            for array in map(batch.column, EXAMPLES.names)
        ]
        own = [(column, batch.column(name)) for name, column in declared.items()]
        for row, columns in zip(zip(*values, strict=True), _declared_dicts(own, len(batch)), strict=True):
            rows.append(RLExample(**dict(zip(EXAMPLES.names, row, strict=True)), columns=columns, declared=declared))
    return rows


def _inner(lists: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return the values of all lists in one array, and the start and end of each list in the array."""
    offsets = lists.offsets.to_numpy()
    begin = int(offsets[0])
    return lists.values.slice(begin, int(offsets[-1]) - begin), (offsets - begin).tolist()


def _arrays_of(lists: pa.Array) -> list[npt.NDArray[Any] | None]:
    """Return each list as a read-only array that shares memory; None for null."""
    values, bounds = _inner(lists)
    flat = values.to_numpy(zero_copy_only=False)
    flat.flags.writeable = False
    arrays: list[npt.NDArray[Any] | None] = [flat[a:b] for a, b in pairwise(bounds)]
    if lists.null_count:
        for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)).tolist():
            arrays[row] = None
    return arrays


def declared_values(column: RolloutColumn, rows: pa.Array) -> list[npt.NDArray[Any] | None]:
    """Return the value of a declared column in each row, None for null; values share memory with the array if possible.

    Raises:
        DataError: Values have another shape than the column.
    """
    if _is_flat(column):
        filled = rows.fill_null(pa.scalar(0, pa.int8()).cast(rows.type)) if rows.null_count else rows
        flat = filled.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
        flat.flags.writeable = False
        has = rows.is_valid().to_numpy(zero_copy_only=False).tolist()
        return [flat[row, ...] if there else None for row, there in enumerate(has)]
    one = column.per == "example"
    shape, size = column.shape if one else (-1, *column.shape), math.prod(column.shape)
    found = _arrays_of(rows)
    for row, values in enumerate(found):
        if values is not None:
            if len(values) != size if one else len(values) % size:
                raise DataError(
                    f"column {column.name!r}: expected values of shape {list(column.shape)}, found {len(values)} "
                    f"numbers in row {row}"
                )
            found[row] = values.reshape(shape)
    return found


def _declared_dicts(columns: Iterable[tuple[RolloutColumn, pa.Array]], count: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Return a dict of declared columns by name for each of ``count`` rows."""
    rows: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(count)]
    for column, array in columns:
        for row, value in zip(rows, declared_values(column, array), strict=True):
            if value is not None:
                row[column.name] = value
    return rows


BATCHES = "batches"
"""Name of the subfolder with stored batches."""

STATE = ".state"
"""Name of the subfolder with the logs, the owner's lock, and the declared columns."""

_LONGEST = 200


@lru_cache(maxsize=1024)
def folder_name(environment: str) -> str:
    """Return the name of an environment's folder, which is safe in paths and unique for every environment.

    Letters, digits, ``_``, ``-`` and inner dots are kept; each other byte becomes ``%XX``.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), environment)
    if name[0] == "." or name == BATCHES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST:
        # "%" without a hexadecimal digit after it: no other environment has this name.
        name = f"{name[:100]}%-{hashlib.sha256(environment.encode()).hexdigest()[:32]}"
    return name


_NOTE = "columns.json"


def read_declared(root: Path) -> Columns:
    """Return the declared columns of a buffer's folder; empty without ``columns.json``.

    Raises:
        DataError: The file is damaged, or a newer release wrote it.
        StorageError: A file cannot be read.
    """
    path = root / STATE / _NOTE
    with storing(f"columns {path}"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return NO_COLUMNS
    return Columns.from_json(text, f"columns {path}")


def refuse_missing(root: Path, declared: Columns, indexed: Columns, count: int = 0) -> None:
    """Raise DataError if the folder has data of columns that ``columns.json`` does not declare.

    Args:
        root: The folder.
        declared: The columns in ``columns.json``.
        indexed: The columns in the index.
        count: The number of columns that were declared when the stored rollouts were added.
    """
    missing = [f"{column}" for name, column in indexed.items() if declared.get(name) != column]
    if missing or len(declared) < count:
        known = ", ".join(missing) if missing else f"{count} columns"
        raise DataError(
            f"columns {root / STATE / _NOTE}: expected {known}, as they were declared for this folder, found "
            f"{list(declared)}. Restore the file from a copy; or delete the file, and open the folder with a "
            "RolloutBuffer whose columns= are the declared columns"
        )


def declare(root: Path, columns: Iterable[RolloutColumn] | None, *, sync: bool) -> Columns:
    """Add ``columns`` to the declared columns of a folder, and return all declared columns. Only the folder's one
    writer may call this function.

    Raises:
        ConfigError: An argument is not a column, or the folder declares a column differently. Nothing is changed.
        DataError: ``columns.json`` is damaged, or a newer release wrote it.
        StorageError: ``columns.json`` cannot be read or written.
    """
    remove_leftovers(root / STATE, [_NOTE], only_writer=True)
    there = read_declared(root)
    if columns is None:
        return there
    if isinstance(columns, RolloutColumn | str):
        raise ConfigError(f"columns: expected a list of RolloutColumn, found {columns!r}")
    wanted = there.with_more(Columns(columns))
    if wanted == there:
        return wanted
    write_file(root / STATE / _NOTE, wanted.to_json().encode(), sync=sync)
    return wanted


@dataclass(frozen=True, slots=True)
class GroupFile:
    """The indexed properties of a sealed group, which are known without opening the group's file.

    Args:
        key: The environment, problem and policy version of the group.
        name: The name of the group's file, in the folder of its environment.
        number: The number of groups that were sealed before this group.
        uids: The rollouts' uids.
        created: The time of creation of each rollout, in seconds since 1970.
        rewards: The rollouts' rewards; None for an unknown reward.
        tokens: Number of tokens of each rollout, over all turns.
        declared: The number of columns that were declared when the group was sealed.
        untrained: For each rollout without a token in the loss, the position of this rollout in the group.
        first: The number of rollouts of other groups before this group in the file.
    """

    key: GroupKey
    name: str
    number: int
    uids: tuple[str, ...]
    created: tuple[float, ...]
    rewards: tuple[float | None, ...]
    tokens: tuple[int, ...]
    declared: int
    untrained: tuple[int, ...]
    first: int = 0

    @property
    def place(self) -> str:
        """The group's uid: the path of its file in the buffer's folder, and its position in the file."""
        place = f"{folder_name(self.key.environment)}/{self.name}"
        return f"{place}#{self.first}" if self.first else place

    def path(self, root: Path) -> Path:
        """Return the path of the file."""
        return root / folder_name(self.key.environment) / self.name


def part_of(
    rollouts: Sequence[RolloutRecord], *, name: str = "", number: int = 0, declared: int = 0, first: int = 0
) -> GroupFile:
    """Return the ``GroupFile`` of a group of rollouts; see ``GroupFile`` for the other arguments."""
    trained = [sum([len(turn.tokens) for turn in rollout.turns if turn.is_trained]) for rollout in rollouts]
    return GroupFile(
        key=rollouts[0].key,
        name=name,
        number=number,
        uids=tuple([rollout.rollout_uid for rollout in rollouts]),
        created=tuple([rollout.created for rollout in rollouts]),
        rewards=tuple([rollout.reward for rollout in rollouts]),
        tokens=tuple([sum([len(turn.tokens) for turn in rollout.turns]) for rollout in rollouts]),
        declared=declared,
        untrained=tuple([place for place, some in enumerate(trained) if not some]),
        first=first,
    )


# ---------------------------------------------------------------------- Parquet

# Metadata of a file of groups: for each group, the number of groups sealed before it and its number of rollouts; and
# the number of columns declared at sealing.
_PLACES, _ROWS, _DECLARED = b"mouse_group_number", b"mouse_group_rollouts", b"mouse_group_columns"

_NUMBERS = frozenset({"tokens", "logprobs", "advantage", "generator_log_probs"})
_SHORT = frozenset({*GroupKey._fields, "rollout_uid", "role", "reward", "created", "replica_id"})
_CODECS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


def check_codec(compression: str) -> str:
    """Return the compression codec of pages; raise ConfigError if the codec is unknown."""
    if compression not in _CODECS or (compression != "none" and not pa.Codec.is_available(compression)):
        raise ConfigError(f"compression: expected one of {list(_CODECS)}, found {compression!r}")
    return compression


def encode_part(rows: pa.Table, compression: str, metadata: Mapping[bytes, bytes]) -> tuple[uuid.UUID, memoryview]:
    """Encode rows as a Parquet file with a checksum on every page; return the content and its digest.

    A file has few rows, so dictionaries, statistics, and compression of short columns would cost more than they save.
    Numbers are stored byte-split: all first bytes, then all second bytes, and so on, which compresses better and
    faster.
    """
    import pyarrow.parquet as pq

    columns = {path: name for field in rows.schema for path, name in _paths(field, field.name, field.name)}
    large = [path for path, name in columns.items() if name not in _SHORT]
    options: dict[str, Any] = {
        "compression": dict.fromkeys(large, compression),
        "use_dictionary": False,
        "use_byte_stream_split": [path for path in large if columns[path] in _NUMBERS],
        "write_page_checksum": True,
        "data_page_version": "2.0",
        "write_statistics": False,
        "store_schema": False,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **options) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata(metadata)
    content = memoryview(sink.getvalue())
    return _digest_of(content), content


def _paths(field: pa.Field, path: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each column of a file, and the name of the innermost named field in the path."""
    if pa.types.is_list(field.type):
        yield from _paths(field.type.value_field, f"{path}.list.element", name)
    elif pa.types.is_struct(field.type):
        for inner in field.type:
            yield from _paths(inner, f"{path}.{inner.name}", inner.name)
    else:
        yield path, name


def _digest_of(content: bytes | memoryview) -> uuid.UUID:
    """Return a UUID of version 8 (RFC 9562) computed from the content. The file's name contains this UUID, so damage is
    detected.

    The checksums of pages alone do not cover the page headers.
    """
    number = int(digest(content), 16) & ~(0xF << 76) | 8 << 76
    return uuid.UUID(int=number & ~(0x3 << 62) | 2 << 62)


def _promised(path: Path) -> uuid.UUID | None:
    """Return the digest in a file's name; None if the name contains no digest."""
    try:
        found = uuid.UUID(path.stem.replace("_", "-").partition("-")[2][:36])
    except ValueError:
        return None
    return found if found.version == 8 else None


def _damaged(path: Path, error: object) -> DataError:
    return DataError(f"part file {path}: expected the content that was written, found damage: {error}")


def read_part(
    path: Path,
    expected: Callable[[pa.Schema, Mapping[bytes, bytes]], pa.Schema],
    columns: Sequence[str] | None = None,
) -> tuple[pa.Table, Mapping[bytes, bytes]]:
    """Read the rows and the metadata of a file, and compare the file's digest with the digest in its name.

    Args:
        path: The file.
        expected: A function that takes the columns and the metadata of the file, and returns the columns that the file
            must have.
        columns: The columns to read; None: all.

    Raises:
        DataError: The file is damaged; the message names it.
        StorageError: The file cannot be read.
    """
    import pyarrow.parquet as pq

    with storing(f"part file {path}"):
        content = path.read_bytes()
    if _promised(path) not in (None, _digest_of(content)):
        raise _damaged(path, "the digest of the content differs from the digest in the file's name")
    try:
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            table, metadata = file.read(columns, use_threads=False), dict(file.metadata.metadata or {})
        schema = expected(table.schema, metadata)
        if columns is not None:
            schema = pa.schema([field for field in schema if field.name in columns])
        if not table.schema.equals(schema):
            # Another tool may have rewritten the file, with the same columns.
            table = table.select(schema.names).cast(schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError, *UNREADABLE) as error:
        raise _damaged(path, error) from error
    return table, metadata


def read_metadata(path: Path) -> Mapping[bytes, bytes]:
    """Return the metadata of a file; raises the errors of ``read_part``."""
    return read_part(path, lambda found, metadata: found, [])[1]


# ---------------------------------------------------------------------- files of groups


def encode_groups(
    groups: Sequence[Sequence[RolloutRecord]],
    rows: pa.Table,
    compression: str,
    *,
    numbers: Sequence[int],
    declared: int,
) -> tuple[list[GroupFile], memoryview]:
    """Encode groups as one file; return the properties of the groups, and the content of the file.

    Args:
        groups: The rollouts of each group.
        rows: The rollouts of all groups, as Arrow.
        compression: The codec of pages.
        numbers: For each group, how many groups were sealed before this group.
        declared: The number of declared columns.
    """
    metadata = {_PLACES: " ".join(map(str, numbers)).encode(), _ROWS: " ".join(map(str, map(len, groups))).encode()}
    if declared:
        metadata[_DECLARED] = str(declared).encode()
    name, content = encode_part(rows, compression, metadata)
    return _parts_of(groups, f"part-{name}.parquet", numbers, declared), content


def _parts_of(
    groups: Sequence[Sequence[RolloutRecord]], name: str, numbers: Sequence[int], declared: int
) -> list[GroupFile]:
    firsts = accumulate(map(len, groups), initial=0)
    given = zip(groups, numbers, firsts, strict=False)
    return [part_of(own, name=name, number=n, declared=declared, first=first) for own, n, first in given]


def read_groups(parts: Sequence[GroupFile], root: Path) -> list[list[RolloutRecord]]:
    """Read groups; return the rollouts of each group in the order of its file. The arrays share memory.

    Raises:
        DataError: A file differs from the written file; the message names the file.
        StorageError: A file cannot be read.
    """
    paths = [part.path(root) for part in parts]
    declared = read_declared(root)
    files = {path: _read_unknown(path, declared) for path in dict.fromkeys(paths)}
    tables = []
    for part, path in zip(parts, paths, strict=True):
        tables.append(files[path].slice(part.first, len(part.uids)))
        if len(tables[-1]) < len(part.uids):
            raise _damaged(
                path, f"expected {len(part.uids)} rollouts from row {part.first} on, found {len(tables[-1])}"
            )
    try:
        # Converting several groups in one call takes about as long as converting one.
        whole = table_to_rollouts(pa.concat_tables(tables).combine_chunks(), _known(parts), declared)
    except (pa.ArrowException, DataError):
        groups = zip(tables, parts, paths, strict=True)
        return [_rollouts_of(table, path, declared, _known([part])) for table, part, path in groups]
    ends = accumulate(map(len, tables), initial=0)
    return [whole[begin:end] for begin, end in pairwise(ends)]


def _read_unknown(path: Path, declared: Columns) -> pa.Table:
    """Return the columns to read from a file of groups: all columns that ``GroupFile`` does not contain."""
    unknown = ["turns", "replica_id", "metadata", *(column.name for column in declared.of("example"))]
    # If the name contains the right digest, the values in ``GroupFile`` are valid. Otherwise another tool may have
    # rewritten the file.
    return read_part(path, lambda found, _: rollout_schema(found, declared), unknown if _promised(path) else None)[0]


def _known(parts: Sequence[GroupFile]) -> dict[str, list[Any]]:
    """Return the values of the columns that ``GroupFile`` contains."""
    columns: dict[str, list[Any]] = {
        name: [value for part in parts for value in [part.key[place]] * len(part.uids)]
        for place, name in enumerate(GroupKey._fields)
    }
    for name, values in (("rollout_uid", "uids"), ("created", "created"), ("reward", "rewards")):
        columns[name] = list(chain.from_iterable(getattr(part, values) for part in parts))
    columns["group_uid"] = [part.place for part in parts for _ in part.uids]
    return columns


def _rollouts_of(
    table: pa.Table, path: Path, declared: Columns, known: Mapping[str, list[Any]] | None = None
) -> list[RolloutRecord]:
    try:
        return table_to_rollouts(table, known, declared)
    except (pa.ArrowException, DataError) as error:
        raise DataError(f"part file {path}: expected rollouts, found: {error}") from error


def find_parts(path: Path, declared: Columns = NO_COLUMNS) -> list[GroupFile]:
    """Read the properties of groups from their file.

    Raises:
        DataError: The file is not a file of groups.
        StorageError: A file cannot be read.
    """
    table, metadata = read_part(path, lambda found, _: rollout_schema(found, declared))
    rollouts = _rollouts_of(table, path, declared)
    numbers, sizes = ([int(one) for one in metadata.get(name, b"").split()] for name in (_PLACES, _ROWS))
    if sum(sizes) != len(rollouts):  # another tool wrote it
        sizes = [len(list(own)) for _, own in groupby(rollouts, attrgetter("key"))]
    if len(numbers) != len(sizes):
        numbers = (numbers or [0])[:1] * len(sizes)
    groups = [rollouts[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
    if any(len({rollout.key for rollout in group}) != 1 for group in groups):
        raise DataError(
            f"part file {path}: expected groups of {sizes} rollouts, found a group whose rollouts have different "
            "group ids"
        )
    return _parts_of(groups, path.name, numbers, int(metadata.get(_DECLARED, b"0")))


# ---------------------------------------------------------------------- writing


@contextmanager
def writing_files(root: Path, folders: Sequence[str], *, sync: bool) -> Iterator[list[str]]:
    """Context manager: publish files when the block ends, either all files or none.

    The block writes each file with ``write_partial``, syncs the file if necessary, and appends the path to the list
    that the context manager provides.

    Args:
        root: The buffer's folder, for messages.
        folders: The folders of the files. Each folder has only one writer. After an error, partial files are removed
            from these folders.
        sync: Whether to sync the names of the files to the disk.

    Raises:
        StorageError: The files cannot be written; then none of the files exists.
    """
    paths: list[str] = []
    with storing(f"files in {root}"):
        try:
            yield paths
            # From here on the values are stored: readers and a restart find the files.
            publish(paths)
            if sync:
                sync_folders(folders)
        except BaseException:
            for path in paths:
                remove(path)
            for folder in folders:
                remove_leftovers(folder, only_writer=True)
            raise
