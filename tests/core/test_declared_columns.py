"""Declared columns: no first value decides a type, whatever way rows come in and wherever they lie."""

import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.errors import ConfigError, DataError, MissingFieldError, MouseError, SchemaError
from mouse_core.record import record

DAY = datetime(2026, 1, 2)
STRUCT = pa.struct([("name", pa.string()), ("path", pa.list_(pa.float32()))])
COLUMNS: dict[str, Any] = {
    "raw": bytes,
    "text": pa.large_string(),
    "tokens": ("int32", (-1,)),
    "nested": pa.list_(pa.list_(pa.float32())),
    "struct": STRUCT,
    "time": pa.timestamp("us"),
    "vector": ("float32", (3,)),
    "matrix": ("uint8", (2, 2)),
    "number": "int16",
    "present": pa.field("present", pa.float64(), nullable=False),
}
# For each column the values that are taken, each with the stored value; and the values that are refused.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "raw": [(b"", b""), (b"a\0", b"a\0"), (None, None), (bytearray(b"\0b"), b"\0b")],
    "text": [("", ""), ("a\0", "a\0"), (None, None), (np.str_("b"), "b")],
    "tokens": [([], []), ([1], [1]), (np.array([2, 3]), [2, 3]), (None, None), ((4, None), [4, None])],
    "nested": [([], []), ([[]], [[]]), ([[1], [2.5, 3]], [[1.0], [2.5, 3.0]]), (np.ones((2, 1)), [[1.0], [1.0]])],
    "struct": [
        ({}, {"name": None, "path": None}),
        ({"name": "a"}, {"name": "a", "path": None}),
        ({"path": np.arange(2), "name": None}, {"name": None, "path": [0.0, 1.0]}),
        (None, None),
    ],
    "time": [(DAY, DAY), (None, None)],
    "vector": [([1, 2, 3], [1.0, 2.0, 3.0]), (np.full(3, 0.5), [0.5] * 3), (None, None)],
    "matrix": [([[1, 2], [3, 4]], [[1, 2], [3, 4]]), (np.eye(2, dtype=np.int64), [[1, 0], [0, 1]]), (None, None)],
    "number": [(1, 1), (np.int64(-2), -2), (True, 1), (None, None)],
    "present": [(1, 1.0), (0.5, 0.5), (np.float32(0.25), 0.25)],
}
REFUSED: dict[str, list[Any]] = {
    "raw": ["text", 1, [1]],
    "text": [b"bytes", 1, ["a"]],
    "tokens": [5, [1.5], [2**31], "ab", [[1]], {"a": 1}, ["1"]],
    "nested": [[1.0], 5, [["a"]], [[1e300]]],
    "struct": [{"name": "a", "other": 1}, {"name": 1}, {"path": 1.0}, {"path": ["a"]}, [1], "a"],
    "time": ["yesterday", [1]],
    "vector": [[1, 2], [1, 2, 3, 4], [], 5, [1, 2, 1e300], ["a", "b", "c"], [[1, 2, 3]]],
    "matrix": [[1, 2], [[1, 2, 3], [4, 5, 6]], [[256, 0], [0, 0]], [[0.5, 0], [0, 0]]],
    "number": [1.5, 2**15, "1", [1, 2]],
    "present": [None, "a", [1.0, 2.0]],
}
ORDINARY = {"action": 1, "reward": 0.5, "done": 0}


def row(place: int = -1, /, **more: Any) -> dict[str, Any]:
    return {**ORDINARY, **{name: taken[place % len(taken)][0] for name, taken in TAKEN.items()}, **more}


def rows_of(store: Any) -> list[dict[str, Any]]:
    return [one for segment in store.snapshot().segments for one in segment.table.to_pylist()]


def types_of(store: DatasetStore) -> dict[str, pa.DataType]:
    return {name: store.columns[name] for name in COLUMNS}


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DatasetStore]:
    is_disk = request.param == "disk"
    with DatasetStore.open(tmp_path / "s", "a", columns=COLUMNS) if is_disk else DatasetStore(columns=COLUMNS) as made:
        yield made


DECLARED = DatasetStore(columns=COLUMNS).columns


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_values_decides_nothing(store: DatasetStore, seed: int) -> None:
    assert store.columns == DECLARED
    rng = random.Random(seed)
    shuffled = {name: [rng.choice(taken) for _ in range(12)] for name, taken in TAKEN.items()}
    given = [ORDINARY | {name: values[at][0] for name, values in shuffled.items()} for at in range(12)]
    expected = [ORDINARY | {name: values[at][1] for name, values in shuffled.items()} for at in range(12)]
    for at in range(0, 12, 4):
        if rng.random() < 0.5:
            store.extend(given[at : at + 4])
        else:
            for one in given[at : at + 4]:
                store.append(one)
        if store.path is not None and rng.random() < 0.5:
            store.close()
            store = DatasetStore.open(store.path, "a")
    assert rows_of(store) == expected
    assert types_of(store) == DECLARED
    made = store.to_dataset()
    assert made.with_format("arrow")[:].to_pylist() == expected
    again = DatasetStore(columns=COLUMNS).from_dataset(made)
    again.append(given[0])
    assert rows_of(again) == [*expected, expected[0]]
    store.close()


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_contradict_a_declaration_change_nothing(store: DatasetStore, name: str) -> None:
    for count in range(2):
        for value in REFUSED[name]:
            with pytest.raises(DataError, match=f"column '{name}': .*expected.* at row {count}"):
                store.append(row(**{name: value}))
            with pytest.raises(DataError, match=f"column '{name}': .*expected"):
                store.extend([row(**{name: value})])
        assert len(store) == count
        store.append(row(count))
    assert [one[name] for one in rows_of(store)] == [TAKEN[name][at % len(TAKEN[name])][1] for at in range(2)]


def test_parts_of_a_value_may_exclude_nulls() -> None:
    keyed = pa.struct([pa.field("key", pa.int8(), nullable=False)])
    store = DatasetStore(columns={"x": pa.list_(keyed), "y": pa.list_(pa.field("item", pa.int8(), nullable=False))})
    for x, y in (([{}], []), ([{"key": None}], []), ([], [1, None])):
        with pytest.raises(DataError, match=r"column '[xy]': expected list.*expected a value, found None"):
            store.append({**ORDINARY, "x": x, "y": y})
    store.append({**ORDINARY, "x": [{"key": 1}, None], "y": None})
    assert [(one["x"], one["y"]) for one in rows_of(store)] == [([{"key": 1}, None], None)]


def test_a_declared_column_is_in_every_row(store: DatasetStore) -> None:
    for lacking in ("tokens", "present"):
        first = row()
        del first[lacking]
        with pytest.raises(MissingFieldError, match=f"'{lacking}'] missing"):
            store.append(first)
    store.append(row(another=1))
    assert store.columns["another"] == pa.int64()


def test_what_a_store_keeps_is_a_copy(store: DatasetStore) -> None:
    tokens, matrix, struct = [1, 2], np.zeros((2, 2), np.uint8), {"name": "a", "path": np.zeros(2)}
    same = np.array([1, 2], np.int32)
    store.append(row(tokens=tokens, matrix=matrix, struct=struct))
    store.append(row(tokens=same))
    tokens.append(3)
    same[:] = 9
    matrix[:] = 9
    struct["path"][:] = 9  # type: ignore[index]
    struct["name"] = "b"
    kept, after = rows_of(store)
    assert after["tokens"] == [1, 2]
    assert (kept["tokens"], kept["matrix"]) == ([1, 2], [[0, 0], [0, 0]])
    assert kept["struct"] == {"name": "a", "path": [0.0, 0.0]}


def test_a_folder_keeps_the_declaration(tmp_path: Path) -> None:
    path = tmp_path / "s"
    DatasetStore.open(path, "a", columns=COLUMNS).close()
    assert types_of(DatasetStore.open(path)) == DECLARED
    for clear in (False, True):
        with DatasetStore.open(path, "a") as store:
            if clear:
                store.clear()
            with pytest.raises(DataError, match="column 'vector': expected 3 values, found 2"):
                store.append(row(vector=np.zeros(2)))
            store.append(row(vector=np.zeros(3), tokens=np.zeros(5, np.int8)))
        with DatasetStore.open(path, "a", columns={"vector": ("float32", (3,))}) as store:
            with pytest.raises(DataError, match="column 'present': expected a value, found None"):
                store.append(row(present=None))
            store.append(row(0))
            assert types_of(store) == DECLARED
    for other in (("float64", (3,)), ("float32", (4,)), ("float32", (-1,))):
        with pytest.raises(SchemaError, match=r"columns: expected .*vector.*, as declared in store .*, found"):
            DatasetStore.open(path, "a", columns={"vector": other})
    with pytest.raises(SchemaError, match=r"column 'reward': expected list<item: double>.*, as declared, found double"):
        DatasetStore.open(path, "a", columns={"reward": ("float64", (-1,))}, fields=[Field("reward", max_ndim=1)])


IN_EPISODES = {
    "info.tokens": pa.list_(pa.int32()),
    "info.raw": bytes,
    "info.struct": STRUCT,
    "info.score": "float32",
    "info.pair": ("int16", (2,)),
    "observation.x": ("float32", (2,)),
    "observation.words": pa.list_(pa.string()),
    "reward": "float64",
    "tags": pa.list_(pa.string()),
}


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
def test_episodes_hold_declared_values(store: DatasetStore, alignment: Any, by_step: bool) -> None:
    fields = [Field("info.score", fill=-1), Field("info.pair", fill=5)]
    options: dict[str, Any] = {"columns": IN_EPISODES, "fields": fields, "alignment": alignment}
    store = DatasetStore(**options) if store.path is None else DatasetStore.open(f"{store.path}-e", "a", **options)
    columns: dict[str, list[Any]] = {
        "tokens": [[], [1], [2, 3]],
        "raw": [b"a\0", b"", b"\0"],
        "struct": [None, {"name": "a", "path": [1.0]}, {"name": "b", "path": []}],
        "score": [None, 1, 2.5],
        "pair": [None, [1, 2], [3, 4]],
    }
    seen: dict[str, list[Any]] = {"x": [[0, 1], [2, 3], [4, 5], [6, 7]], "words": [[], ["a"], ["b", "c"], ["\0"]]}
    infos: Any = columns
    observations: Any = seen
    if by_step:
        infos = [{name: values[at] for name, values in columns.items()} for at in range(3)]
        observations = [{name: values[at] for name, values in seen.items()} for at in range(4)]
        del infos[0]["score"]  # some simulators leave out what is not there
    given = {"observations": observations, "infos": infos, "actions": [1, 2, 3], "rewards": [2**24 + 1, 0, 1]}
    store.add_episodes([{**given, "tags": ["a", "b"]}, {**given, "tags": []}])
    empty = {"tokens": [], "raw": b"", "struct": {"name": None, "path": None}, "score": 0.0, "pair": [0, 0]}
    expected = []
    for tags in (["a", "b"], []):
        for at in range(4 if alignment == "arrived" else 3):
            transition = at - 1 if alignment == "arrived" else at
            led = {f"info.{name}": values[transition] for name, values in columns.items()}
            led = led if transition >= 0 else {f"info.{name}": value for name, value in empty.items()}
            there = {f"observation.{name}": values[at] for name, values in seen.items()}
            reward = given["rewards"][transition] if transition >= 0 else 0.0
            expected.append({**led, **there, "reward": reward, "tags": tags})
    assert [{name: one[name] for name in IN_EPISODES} for one in rows_of(store)] == expected
    batch = BatchSource(store, 3, 2, sampling="last")[0]
    assert not {"info.tokens", "info.raw"} & batch.keys()
    assert batch["observation.x"].dtype == batch["info.score"].dtype == np.float32
    assert batch["reward"].dtype == np.float64
    for wrong in ({"tags": "ab"}, {"actions": [1, 2]}, {"rewards": ["a", "b", "c"]}):
        before = len(store)
        with pytest.raises(DataError, match="expected"):
            store.add_episode({**given, "tags": [], **wrong})
        assert len(store) == before
    store.close()


WANTED = {"vector": ("float32", (2,)), "present": pa.field("present", pa.int64(), nullable=False)}
FITTING = {"vector": pa.array([[1, 2]] * 3, pa.list_(pa.float32())), "present": pa.array([1, 2, 3])}


def table(**columns: Any) -> pa.Table:
    return pa.table({name: [value] * 3 for name, value in ORDINARY.items()} | FITTING | columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"vector": pa.array([[1, 2]] * 3, pa.list_(pa.float64()))}, "expected fixed_size_list<item: float>.2., as"),
        ({"vector": pa.array([[1, 2, 3]] * 3, pa.list_(pa.float32()))}, r"found list.* in rows of shape \[3\]"),
        ({"vector": pa.array([[1, 2, 3]] * 3, pa.list_(pa.float32(), 3))}, r"found fixed.* in rows of shape \[3\]"),
        ({"vector": pa.array([1.0] * 3, pa.float32())}, "found float"),
        ({"present": pa.array([1, None, 3])}, "expected int64 not null, as declared, found int64 with 1 nulls"),
        ({"present": pa.array([1.0, 2.0, 3.0])}, "expected int64 not null, as declared, found double"),
    ],
)
def test_datasets_are_compared_with_the_declaration(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    memory = DatasetStore(columns=WANTED)
    with pytest.raises(SchemaError, match=message):
        memory.from_dataset(table(**columns))
    store = DatasetStore.open(tmp_path, "a", columns=WANTED)
    with pytest.raises(SchemaError, match=message):
        store.from_dataset(table(**columns))
    with pytest.raises(MissingFieldError, match=r"columns: expected columns .'present'., found"):
        store.from_dataset(table().drop_columns("present"))
    assert not len(store)
    store.from_dataset(table()).from_dataset(table(vector=pa.array([[3, 4]] * 3, pa.list_(pa.float32(), 2))))
    store.append({**ORDINARY, "vector": [5, 6], "present": 4})
    assert [one["vector"] for one in rows_of(store)] == [[1, 2]] * 3 + [[3, 4]] * 3 + [[5, 6]]
    store.close()


def test_declarations_that_say_the_same() -> None:
    schema = pa.schema([("a", pa.list_(pa.float32(), 3)), ("b", pa.list_(pa.int64())), ("c", pa.binary())])
    features = datasets.Features(
        a=datasets.List(datasets.Value("float32"), length=3),
        b=datasets.List(datasets.Value("int64")),
        c=datasets.Value("binary"),
    )
    pairs = {"a": (np.float32, (3,)), "b": ("int64", (-1,)), "c": bytes}
    for declared in (schema, features, dict(zip(schema.names, schema.types, strict=True)), pairs):
        assert DatasetStore(columns=declared).columns == dict(zip(schema.names, schema.types, strict=True))


SHAPES: list[Any] = [(0,), (None,), 3]
TYPES = [None, "numbers", object, pa.null(), pa.list_(pa.null()), *(("float32", shape) for shape in SHAPES)]


@pytest.mark.parametrize("columns", [5, ["a"], {1: "float32"}, *({"a": one} for one in TYPES)])
def test_declarations_of_nothing_are_refused(columns: Any) -> None:
    with pytest.raises(ConfigError, match="columns: expected"):
        DatasetStore(columns=columns)


@pytest.mark.parametrize("columns", [{"done": ("int64", (2,))}, {"reward": str}, {"observation": ("float32", (2, 2))}])
def test_a_field_must_be_able_to_read_its_column(columns: Any, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"column '{next(iter(columns))}': expected"):
        DatasetStore(columns=columns)
    with pytest.raises(SchemaError, match="expected"):
        DatasetStore.open(tmp_path / "s", "a", columns=columns)


def test_fields_read_what_is_declared() -> None:
    columns = {
        "observation": ("float32", (3,)),
        "action": "int8",
        "observation_image": ("uint8", (2, 2, 3)),
        "extra": ("int32", (2,)),
    }
    store = DatasetStore(columns=columns, fields=[Field("extra", fill=7)])
    one: dict[str, Any] = {"action": 1, "reward": 0, "done": 0, "observation": [1, 2, 3]}
    one["observation_image"] = np.ones((2, 2, 3), np.int64)
    store.append({**one, "extra": None})
    store.append({**one, "extra": [1, 2]})
    for short in ([1, 2], []):
        with pytest.raises(DataError, match="column 'observation': expected 3 values"):
            store.append({**one, "observation": short, "extra": None})
    assert store.columns["observation"] == pa.list_(pa.float32(), 3)
    batch = BatchSource(store, 2, 1, layout="stored")[0]
    assert [batch[name].dtype.name for name in columns] == ["float32", "int8", "uint8", "int32"]
    assert batch["extra"].tolist() == [[[7, 7], [1, 2]]]


@pytest.mark.parametrize("way", ["append", "extend", "add_episode", "from_dataset"])
def test_rewards_are_vectors_from_the_first_row_on(way: str) -> None:
    store = DatasetStore(columns={"reward": ("float64", (2,)), "action": "int8"}, alignment="outgoing")
    rewards = [[2**24 + 1, 0], [1, 2]]
    columns: dict[str, Any] = {"action": [0, 1], "reward": rewards, "done": [0, 1]}
    for wrong in ([1, 2], [[1, 2, 3]] * 2):
        given = {**columns, "reward": wrong}
        with pytest.raises(DataError, match="column 'reward': expected"):
            store.extend(given) if way != "append" else store.append({name: one[0] for name, one in given.items()})
        with pytest.raises(DataError, match="column 'reward': expected"):
            store.add_episode(observations=np.zeros((2, 1)), actions=[0, 1], rewards=wrong)
    if way == "append":
        for at in range(2):
            store.append({name: values[at] for name, values in columns.items()})
    elif way == "extend":
        store.extend(columns)
    elif way == "from_dataset":
        reward = pa.array(rewards, pa.list_(pa.float64()))
        store.from_dataset(pa.table(columns | {"reward": reward, "action": pa.array([0, 1], pa.int8())}))
    else:
        store.add_episode(observations=np.zeros((2, 1)), actions=[0, 1], rewards=rewards, terminated=True)
    assert (store.columns["reward"], store.columns["action"]) == (pa.list_(pa.float64(), 2), pa.int8())
    assert BatchSource(store, 2, 1, layout="stored")[0]["reward"].tolist() == [rewards]
    assert store.episodes["return"].to_pylist() == [[2.0**24 + 2, 2.0]]


@pytest.mark.parametrize("size", [3, 4])
def test_recorders_write_declared_types(size: int) -> None:
    columns = {"observation": ("float64", (size,)), "reward": "float32"}
    with DatasetStore(columns=columns) as made:
        if size == 4:
            record("CartPole-v1", episodes=1, store=made, seed=0)
            assert made.columns["reward"] == pa.float32()
            assert made.columns["observation"] == pa.list_(pa.float64(), 4)
        else:
            with pytest.raises(DataError, match="column 'observation': expected 3 values, found 4"):
                record("CartPole-v1", episodes=1, store=made, seed=0)
            assert not len(made)


@pytest.mark.parametrize(
    ("first", "later"),
    [([1], [1.5]), ({"a": 1}, {"a": 1, "b": 2}), ([{"a": 1}], [{"b": 1}]), ("a", b"a"), (b"a", "a"), (["a"], "ab")],
)
def test_objects_that_arrow_alone_would_change_are_refused(first: Any, later: Any) -> None:
    store = DatasetStore()
    store.append({**ORDINARY, "x": first})
    with pytest.raises(MouseError, match=r"column 'x': expected .*, found .* at row 1"):
        store.append({**ORDINARY, "x": later})
    assert [one["x"] for one in rows_of(store)] == [first]


def test_texts_of_episodes_keep_the_zeros_at_their_ends() -> None:
    texts = [b"a\0", b"\0\0", b"c"]
    given = {"observations": np.zeros((3, 1)), "actions": [0, 1], "rewards": [0, 1]}
    store = DatasetStore().add_episode(given, infos={"raw": texts})
    assert [one["info.raw"] for one in rows_of(store)] == texts


def test_a_first_value_without_a_type_is_named_with_the_remedy() -> None:
    rows = [{**ORDINARY, "x": {"path": []}}, {**ORDINARY, "x": {"path": [1]}}]
    store = DatasetStore()
    store.append(rows[0])
    said = r"column 'x': expected struct.*, found .'path': .1.*columns= declares a type at"
    with pytest.raises(DataError, match=said):
        store.append(rows[1])
    declared = DatasetStore(columns={"x": pa.struct([("path", pa.list_(pa.int8()))])})
    declared.extend(rows)
    assert [one["x"] for one in rows_of(declared)] == [{"path": []}, {"path": [1]}]
