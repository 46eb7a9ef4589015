"""Stores for property tests: the same rows in every way that steps can come to a store, and what they hold.

A `World` says which columns there are and of which types. A store is made of parts, each with rows of its own and a
way of being stored (`KINDS`); `build` makes them and returns the rows as plain Python, which the oracle reads.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from mouse_core import DatasetStore, Field
from tests.core.oracle import Rule

IMAGE_SHAPES = {"grey": (2, 3), "colour": (2, 2, 3)}
GRID = (2, 3)
CUSTOM_RULES = (
    Rule("row", "row_id", "int64"),
    Rule("grid", "grid", "float32", fill=7),
    Rule("flags", "flags", "bool"),
    Rule("trail", "trail", "float32", fill=7, pad=-3),
    Rule("half", "half", "float16"),
)
CUSTOM_FIELDS = (
    Field("row", column="row_id"),
    Field("grid", fill=7.0),
    Field("flags"),
    Field("trail", dtype="float32", shape=(4,), fill=7, pad=-3),
    Field("half"),
)


@dataclass(frozen=True)
class Column:
    """A column: its values' type, the shape of a row, and which irregularities it has."""

    name: str
    value: pa.DataType
    shape: tuple[int, ...] = ()
    ragged: bool = False
    null_rows: bool = False
    inner_nulls: bool = False

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.value.to_pandas_dtype())

    def draw(self, rng: random.Random, actions: int) -> Any:
        """One row's value as Python."""
        if self.null_rows and rng.random() < 0.25:
            return None
        shape = self.shape
        if self.ragged:
            shape = (rng.randint(1, shape[0]),)
        value = self._draw(rng, shape, actions)
        if self.inner_nulls and rng.random() < 0.3:
            value[rng.randrange(len(value))] = None
        return value

    def _draw(self, rng: random.Random, shape: tuple[int, ...], actions: int) -> Any:
        if shape:
            return [self._draw(rng, shape[1:], actions) for _ in range(shape[0])]
        if self.name == "action" and not self.shape:
            number: Any = rng.randrange(min(actions, 2) if self.numpy.kind == "b" else actions)
        elif self.name == "done":
            number = rng.choice([0, 0, 0, 1] if self.numpy.kind == "b" else [0, 0, 1, 2])
        elif self.name == "observation_image":
            number = rng.randrange(256)
        elif self.name == "observation_discrete" or self.name == "episode_step":
            number = rng.randrange(100)
        elif self.numpy.kind in "iu":
            limits = np.iinfo(self.numpy)
            number = rng.randint(max(limits.min, -(2**40)), min(limits.max, 2**40))
        elif self.numpy.kind == "b":
            number = rng.random() < 0.5
        else:
            odd = (0.0, -0.0, float("nan"), float("inf"), -float("inf"))
            number = rng.choice(odd) if rng.random() < 0.1 else rng.uniform(-1e3, 1e3)
        return self.numpy.type(number).item()


@dataclass(frozen=True)
class World:
    """Columns, and the two dimensions as a store is told them."""

    columns: tuple[Column, ...]
    actions: int
    max_action_dim: int | None
    max_obs_continuous_dim: int | None

    def rows(self, seed: int, count: int) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        numbers = [rng.randrange(2**40) for _ in range(count)]
        rows = [{column.name: column.draw(rng, self.actions) for column in self.columns} for _ in range(count)]
        for row, number in zip(rows, numbers, strict=True):
            row["row_id"] = number
        return rows

    def store(self, **options: Any) -> DatasetStore:
        return DatasetStore(self.max_action_dim, self.max_obs_continuous_dim, fields=CUSTOM_FIELDS, **options)

    @property
    def widths(self) -> dict[str, int]:
        """Widths for the oracle that a store was told: A, C, and that of a field of the tests."""
        given = {"q_star": self.max_action_dim, "obs_continuous": self.max_obs_continuous_dim, "trail": 4}
        return {name: width for name, width in given.items() if width is not None}


DICTIONARIES = True
INTEGERS = [pa.int64(), pa.int32(), pa.int8(), pa.uint8()]
FLOATS = [pa.float64(), pa.float32(), pa.float16()]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Columns of any types that a store takes, with any of the irregularities it has to cope with."""

    def scalar(name: str, types: Sequence[pa.DataType], **options: bool) -> Column:
        return Column(name, draw(st.sampled_from(list(types))), **options)

    actions = draw(st.integers(2, 4))
    max_action_dim = draw(st.sampled_from([None, actions]))
    max_obs = draw(st.sampled_from([None, 3, 5]))
    columns = [Column("row_id", pa.int64())]
    if draw(st.integers(0, 3)):
        columns.append(scalar("action", [*INTEGERS, pa.bool_(), pa.uint64()]))
    else:
        columns.append(Column("action", draw(st.sampled_from([*FLOATS, pa.int32()])), (actions,)))
    columns.append(scalar("reward", [*FLOATS, pa.int64(), pa.int8()]))
    columns.append(scalar("done", [*INTEGERS, pa.bool_(), pa.float32()]))
    wanted = draw(st.sets(st.sampled_from(OPTIONAL), max_size=4))
    if "xformed_reward" in wanted:
        columns.append(scalar("xformed_reward", [*FLOATS, pa.int32()]))
    if "episode_step" in wanted:
        columns.append(scalar("episode_step", [*INTEGERS, pa.float16()], null_rows=draw(st.booleans())))
    if "metadata_q_star" in wanted:
        columns.append(
            Column(
                "metadata_q_star",
                draw(st.sampled_from([*FLOATS, pa.int32()])),
                (actions,),
                ragged=max_action_dim is not None and draw(st.booleans()),
                null_rows=draw(st.booleans()),
                inner_nulls=draw(st.booleans()),
            )
        )
    if "observation" in wanted:
        ragged = max_obs is not None and draw(st.booleans())
        columns.append(Column("observation", draw(st.sampled_from([*FLOATS, pa.int32()])), (3,), ragged=ragged))
    if "observation_discrete" in wanted:
        columns.append(scalar("observation_discrete", [*INTEGERS, pa.bool_()]))
    if "observation_image" in wanted:
        shape = IMAGE_SHAPES[draw(st.sampled_from(sorted(IMAGE_SHAPES)))]
        columns.append(Column("observation_image", draw(st.sampled_from([pa.uint8(), pa.int64()])), shape))
    if "grid" in wanted:
        columns.append(Column("grid", pa.float32(), GRID, null_rows=draw(st.booleans())))
    if "flags" in wanted:
        columns.append(Column("flags", pa.bool_(), (3,)))
    if "trail" in wanted:
        kind = draw(st.sampled_from([*FLOATS, pa.int32()]))
        nulls = {"null_rows": draw(st.booleans()), "inner_nulls": draw(st.booleans())}
        columns.append(Column("trail", kind, (draw(st.integers(1, 4)),), ragged=draw(st.booleans()), **nulls))
    if "half" in wanted:
        columns.append(Column("half", pa.float16()))
    return World(tuple(columns), actions, max_action_dim, max_obs)


OPTIONAL = (
    "xformed_reward",
    "episode_step",
    "metadata_q_star",
    "observation",
    "observation_discrete",
    "observation_image",
    "grid",
    "flags",
    "trail",
    "half",
)
# Nulls are allowed in these, so a part of a store may lack them.
MAY_LACK = ("episode_step", "metadata_q_star", "grid", "trail")


@dataclass(frozen=True)
class Part:
    """Some rows, and how they come to the store."""

    kind: str
    count: int
    seed: int
    lacks: frozenset[str] = frozenset()


def parts(max_parts: int = 4, counts: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[list[Part]]:
    part = st.builds(
        Part,
        kind=st.sampled_from(sorted(KINDS)),
        # Mostly few rows, for small counterexamples.
        count=st.one_of(st.integers(0, 25), st.sampled_from([0, 1, 150])) if counts is None else counts,
        seed=st.integers(0, 2**16),
        lacks=st.sets(st.sampled_from(MAY_LACK), max_size=1).map(frozenset),
    )
    return st.lists(part, min_size=1, max_size=max_parts)


@dataclass
class Built:
    """A store and its rows."""

    store: DatasetStore
    rows: list[dict[str, Any]] = field(default_factory=list)


def build(world: World, wanted: Sequence[Part], folder: Path, **options: Any) -> Built:
    """The store of these parts."""
    built = Built(world.store(**options))
    for number, part in enumerate(wanted):
        add_part(world, built, part, folder / f"part-{number}")
    return built


def add_part(world: World, built: Built, part: Part, folder: Path) -> None:
    """Add one part to the store, and its rows to the rows."""
    rows = [
        {name: value for name, value in row.items() if name not in part.lacks}
        for row in world.rows(part.seed, part.count)
    ]
    columns = [column for column in world.columns if column.name not in part.lacks]
    kind = part.kind
    if kind in ("append", "extend") and not _appends_as_it_is(world, built.store):
        kind = "table"
    built.rows += KINDS[kind](built.store, columns, rows, random.Random(part.seed), folder)


def _appends_as_it_is(world: World, store: DatasetStore) -> bool:
    """Whether appended values would be kept in the world's types, so that later parts fit them.

    The first value of a column decides its type, and a whole number or flag that stands for a float or a code is
    kept as that.
    """
    for column in world.columns:
        known = store.columns.get(column.name)
        if known is not None and not pa.types.is_null(known):
            continue
        flag = column.numpy.kind == "b" and column.name in ("action", "done", "observation_discrete")
        floating = column.name in ("reward", "xformed_reward", "metadata_q_star", "observation", "trail")
        vector = column.name == "action" and bool(column.shape)
        pixels = column.name == "observation_image" and column.numpy != np.uint8
        if flag or pixels or ((floating or vector) and column.numpy.kind != "f"):
            return False
    return True


def encode(column: Column, values: list[Any], rng: random.Random, *, plain: bool) -> pa.Array:
    """The values in one of the encodings that a store takes as the same type."""
    if not column.shape:
        array = pa.array(values, column.value)
        return array.dictionary_encode() if not plain and DICTIONARIES and rng.random() < 0.2 else array
    ways = ["list", "large_list"]
    if not column.ragged:
        ways.append("fixed")
    if len(column.shape) == 2 and not column.ragged:
        ways += ["extension", "extension"]
    way = rng.choice(ways)
    if way == "extension":
        kind = datasets.Features({"x": datasets.Array2D(column.shape, str(column.numpy))}).arrow_schema.types[0]
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    data_type = column.value
    for size in reversed(column.shape):
        if way == "fixed":
            data_type = pa.list_(data_type, size)
        else:
            data_type = pa.list_(data_type) if way == "list" else pa.large_list(data_type)
    return pa.array(values, data_type)


def sliced(array: pa.Array, encode_more: Callable[[], pa.Array], rng: random.Random) -> pa.Array:
    """The same values, as a slice out of the middle of a longer array."""
    if rng.random() < 0.5 or not len(array):
        return array
    more = encode_more()
    if more.type != array.type:
        return array
    if pa.types.is_dictionary(array.type):
        array, more = array.dictionary_decode(), more.dictionary_decode()
        return pa.concat_arrays([more, array, more]).dictionary_encode().slice(len(more), len(array))
    return pa.concat_arrays([more, array, more]).slice(len(more), len(array))


def chunked(array: pa.Array, rng: random.Random) -> pa.ChunkedArray:
    """The same values in chunks of any lengths, some of them empty."""
    cuts = sorted(rng.randint(0, len(array)) for _ in range(rng.randint(0, 6)))
    edges = [0, *cuts, len(array)]
    chunks = [array.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    if rng.random() < 0.3:
        # Buffers of their own, like batches that were read one by one.
        chunks = [_copied(chunk) for chunk in chunks]
    return pa.chunked_array(chunks, array.type)


def _copied(chunk: pa.Array) -> pa.Array:
    if isinstance(chunk, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(chunk.type, _copied(chunk.storage))
    if pa.types.is_dictionary(chunk.type):
        return chunk.dictionary_decode().dictionary_encode()
    return pa.array(chunk.to_pylist(), chunk.type)


def table_of(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], rng: random.Random, *, plain: bool = False
) -> pa.Table:
    """A table of the rows, every column encoded and chunked in its own way."""
    made = {}
    for column in columns:
        values = [row[column.name] for row in rows]
        state = rng.getstate()
        array = encode(column, values, rng, plain=plain)
        after = rng.getstate()

        def more(column: Column = column, state: Any = state) -> pa.Array:
            again = random.Random()
            again.setstate(state)  # the same choice of encoding
            return encode(column, [column.draw(again, 2) for _ in range(3)], _with_state(state), plain=plain)

        array = sliced(array, more, rng)
        rng.setstate(after)
        made[column.name] = chunked(array, rng)
    return pa.table(made)


def _with_state(state: Any) -> random.Random:
    rng = random.Random()
    rng.setstate(state)
    return rng


Rows = list[dict[str, Any]]
Maker = Callable[[DatasetStore, Sequence[Column], Rows, random.Random, Path], Rows]


def _table(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    store.from_dataset(table_of(columns, rows, rng))
    return rows


def _memory(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    store.from_dataset(datasets.Dataset(table_of(columns, rows, rng, plain=True)))
    return rows


def stream_file(path: Path, table: pa.Table, batch_rows: int) -> datasets.Dataset:
    """The table as an Arrow file of record batches of at most so many rows, mapped as `datasets` maps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = table.combine_chunks()
    with pa.ipc.new_stream(str(path), whole.schema) as writer:
        for batch in whole.to_batches(max_chunksize=batch_rows):
            writer.write_batch(batch)
    return datasets.Dataset.from_file(str(path))


def _file(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    if not rows:
        return _table(store, columns, rows, rng, folder)
    table = table_of(columns, rows, rng, plain=True)
    store.from_dataset(stream_file(folder / "a.arrow", table, rng.randint(1, 9)))
    return rows


def _files(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    """Several files in one dataset."""
    if len(rows) < 2:
        return _table(store, columns, rows, rng, folder)
    table = table_of(columns, rows, rng, plain=True)
    cut = rng.randrange(1, len(rows))
    pieces = [
        stream_file(folder / f"{number}.arrow", piece, rng.randint(1, 9))
        for number, piece in enumerate((table.slice(0, cut), table.slice(cut)))
    ]
    store.from_dataset(datasets.concatenate_datasets(pieces))
    return rows


def _dict(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    cut = rng.randint(0, len(rows))
    table = table_of(columns, rows, rng, plain=True)
    splits = {"b": datasets.Dataset(table.slice(0, cut)), "a": datasets.Dataset(table.slice(cut))}
    store.from_dataset(datasets.DatasetDict(splits))
    return rows


def _mapped(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    """Datasets behind a mapping of indices: shuffled, selected, several times over."""
    if not rows:
        return _table(store, columns, rows, rng, folder)
    table = table_of(columns, rows, rng, plain=True)
    if rng.random() < 0.5:
        dataset = stream_file(folder / "a.arrow", table, rng.randint(1, 9))
    else:
        dataset = datasets.Dataset(table)
    for _ in range(rng.randint(1, 3)):
        n = len(dataset)
        step = rng.choice(["range", "list", "shuffle", "runs"])
        if step == "range":
            begin = rng.randrange(n)
            dataset = dataset.select(range(begin, rng.randint(begin + 1, n)))
        elif step == "list":
            chosen = [rng.randrange(n) for _ in range(rng.randint(1, n))]
            dataset = dataset.select(chosen, keep_in_memory=True)
        elif step == "runs":  # long stretches in order, as a filter leaves them
            kept = [row for row in range(n) if row % 7 != 3] or [0]
            dataset = dataset.select(kept, keep_in_memory=True)
        else:
            dataset = dataset.shuffle(seed=rng.randrange(1000), keep_in_memory=True)
    store.from_dataset(dataset)
    # Which rows are left, and in which order, as `datasets` itself sees it.
    by_number = {row["row_id"]: row for row in rows}
    return [by_number[number] for number in dataset["row_id"]]


def _kept(store: DatasetStore, columns: Sequence[Column], rows: Rows) -> tuple[Sequence[Column], Rows]:
    """What of the rows a store takes that knows its columns already."""
    names = list(store.columns)
    if not names:
        return columns, rows
    return [column for column in columns if column.name in names], [
        {name: row.get(name) for name in names} for row in rows
    ]


def _append(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    columns, rows = _appendable(*_kept(store, columns, rows))
    kinds = {column.name: column for column in columns}
    for row in rows:
        native = {name: _native(kinds[name], value) if name in kinds else None for name, value in row.items()}
        store.append(native)
    return rows


def _extend(store: DatasetStore, columns: Sequence[Column], rows: Rows, rng: random.Random, folder: Path) -> Rows:
    columns, rows = _appendable(*_kept(store, columns, rows))
    kinds = {column.name: column for column in columns}
    begin = 0
    while begin < len(rows):
        end = rng.randint(begin + 1, len(rows))
        some = rows[begin:end]
        block: dict[str, Any] = {}
        for name in some[0]:
            values = [_native(kinds[name], row[name]) if name in kinds else None for row in some]
            regular = name in kinds and not kinds[name].ragged and None not in [row[name] for row in some]
            block[name] = np.array(values) if regular and rng.random() < 0.7 else values
        store.extend(block)
        begin = end
    return rows


def _appendable(columns: Sequence[Column], rows: Rows) -> tuple[Sequence[Column], Rows]:
    """Rows without nulls inside lists, which only stored data may have."""
    inner = [column.name for column in columns if column.inner_nulls]
    return columns, [
        {
            name: [0 if item is None else item for item in value] if name in inner and value is not None else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _native(column: Column, value: Any) -> Any:
    """A value as whoever records it has it, in the column's own dtype."""
    if value is None:
        return None
    array = np.array(value, column.numpy)
    return array if column.shape else array[()]


KINDS: dict[str, Maker] = {
    "append": _append,
    "dict": _dict,
    "extend": _extend,
    "file": _file,
    "files": _files,
    "mapped": _mapped,
    "memory": _memory,
    "table": _table,
}


def numbered(rows: int) -> DatasetStore:
    """A store whose every row has other numbers than the rest."""
    store, numbers = DatasetStore(), np.arange(rows)
    store.extend(
        {
            "action": numbers % 5,
            "reward": numbers.astype(np.float32),
            "done": np.zeros(rows, np.int64),
            "observation": numbers[:, None] + np.arange(3, dtype=np.float32),
        }
    )
    return store


def store_of(columns: Mapping[str, Any], **options: Any) -> DatasetStore:
    """A store of some columns."""
    store = DatasetStore(**options)
    store.extend(columns)
    return store
