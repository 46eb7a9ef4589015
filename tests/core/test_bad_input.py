"""Bad input: the type of the error, its message, and that the store is unchanged."""

import itertools
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import (
    BatchSource,
    ClosedError,
    ConfigError,
    DataError,
    DatasetStore,
    Field,
    ForkError,
    MissingFieldError,
    MouseError,
    PrefetchBatchifier,
    SchemaError,
    StateError,
    WorkerError,
)
from mouse_core.statistics import statistics
from tests.core.killing import in_child

GOOD = {
    "action": 1,
    "reward": 0.5,
    "done": 0,
    "episode_step": 4,
    "metadata_q_star": [1.0, 2.0, 3.0],
    "observation": [0.25, 0.5],
    "observation_discrete": 3,
    "xformed_reward": 1.5,
}


def table(rows: int = 8, **columns: Any) -> pa.Table:
    """A small table; a column of ``columns`` replaces one of the same name, None removes it."""
    whole = {name: [value] * rows for name, value in GOOD.items()} | columns
    return pa.table({name: values for name, values in whole.items() if values is not None})


def at_row(bad: int, value: Any, name: str, rows: int = 8) -> list[Any]:
    values: list[Any] = [GOOD[name]] * rows
    values[bad] = value
    return values


def contents(store: DatasetStore) -> Any:
    return len(store), store.columns, [store[row] for row in range(len(store))], store.snapshot().fingerprint


def refused(store: DatasetStore, error: type[Exception], pattern: str, act: Callable[[], Any]) -> None:
    """The act is refused with a message, leaves no trace, and good rows are taken afterwards."""
    before = contents(store)
    with pytest.raises(error, match=pattern) as caught:
        act()
    assert isinstance(caught.value, MouseError)
    assert contents(store) == before
    store.append(dict(GOOD))
    store.extend({name: [value] * 2 for name, value in GOOD.items()})
    assert len(store) == before[0] + 3
    assert store[-1] == GOOD
    assert BatchSource(store, len(store), 1, sampling="last")[0]["reward"].shape == (1, len(store))


def reads_until(bad_row: int, store: DatasetStore, field: str, pattern: str) -> None:
    """Windows that touch the bad row are errors that name field and row; the others are delivered."""
    for length in (1, 3, len(store)):
        source = BatchSource(store, length, 1, sampling="sequential", drop_last=False)
        for index in range(len(source)):
            (start,) = source.plan(index).starts.tolist()
            if start <= bad_row < start + length:
                with pytest.raises(DataError, match=pattern) as caught:
                    source[index]
                assert str(caught.value).startswith(f"{field}: expected")
                assert f"at row {bad_row} " in str(caught.value)
                with pytest.raises(DataError, match=pattern):  # and again
                    source[index]
            else:
                source[index]


@pytest.mark.parametrize("name", ["action", "reward", "done"])
def test_a_column_missing_or_null_throughout(name: str) -> None:
    store = DatasetStore()
    with pytest.raises(KeyError) as caught:
        store.from_dataset(table(**{name: None}))
    assert isinstance(caught.value, MissingFieldError)
    assert isinstance(caught.value, SchemaError)
    assert f"expected a column {name!r}" in str(caught.value)
    assert "xformed_reward" in str(caught.value)  # what there is instead
    assert (len(store), store.columns) == (0, {})
    store.from_dataset(table())
    refused(store, MissingFieldError, f"'{name}'", lambda: store.from_dataset(table(**{name: None})))
    store = DatasetStore().from_dataset(table(**{name: pa.nulls(8, pa.int64())}))
    with pytest.raises(DataError, match=rf"{name}: expected values, found null in every row.*'{name}'"):
        BatchSource(store, 2, 2)


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("action", ["left"] * 8, "string"),
        ("reward", [{"a": 1.0}] * 8, "struct"),
        ("observation", ["text"] * 8, "string"),
        ("observation", [["a"]] * 8, "string"),
        ("observation_image", ["text"] * 8, "string"),
        ("done", [b"x"] * 8, "image"),
        ("metadata_q_star", [[{"a": 1.0}]] * 8, "struct"),
    ],
)
def test_a_column_of_a_type_that_its_field_cannot_be_read_from(name: str, values: list[Any], found: str) -> None:
    store = DatasetStore().from_dataset(table())
    refused(
        store,
        SchemaError,
        rf"column '{name}': expected .*found .*{found}",
        lambda: store.from_dataset(table(**{name: values})),
    )


NESTED = [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("done", [0, 0]), ("xformed_reward", [[0]]), ("episode_step", [[0]]), ("observation_discrete", [0, 0])),
        *((name, NESTED) for name in ("action", "observation", "metadata_q_star")),
    ],
)
def test_lists_that_are_too_deep(name: str, value: Any) -> None:
    kind = pa.list_(pa.int64(), 2) if value == [0, 0] else None
    with pytest.raises(SchemaError, match=rf"column '{name}': expected"):
        DatasetStore(8, 8).from_dataset(table(**{name: pa.array([value] * 8, kind)}))
    store = DatasetStore(8, 8).from_dataset(table())
    refused(store, DataError, name, lambda: store.append(GOOD | {name: value}))
    for add in (
        lambda: DatasetStore(8, 8).append(GOOD | {name: value}),
        lambda: DatasetStore(8, 8).extend({key: [item] * 2 for key, item in (GOOD | {name: value}).items()}),
    ):
        with pytest.raises(DataError, match=name):
            add()


@pytest.mark.parametrize(
    ("name", "values", "expected", "found"),
    [
        ("reward", [1] * 8, "double", "int64"),
        ("action", [1.0] * 8, "int64", "double"),
        ("observation", [1.0] * 8, "list of double", "double"),
        ("observation", pa.array([[1.0]] * 8, pa.list_(pa.float32())), "list of double", "list of float"),
    ],
)
def test_columns_that_do_not_fit_those_before(name: str, values: Any, expected: str, found: str) -> None:
    store = DatasetStore().from_dataset(table())
    pattern = rf"column '{name}': expected {expected} as in the earlier rows, found {found}"
    refused(store, SchemaError, pattern, lambda: store.from_dataset(table(**{name: values})))
    recorded = DatasetStore()
    recorded.append(dict(GOOD))
    refused(recorded, SchemaError, pattern, lambda: recorded.from_dataset(table(**{name: values})))


def test_what_is_no_column_and_no_dataset() -> None:
    store = DatasetStore()
    rows = {"action": [0] * 3, "reward": [0.0] * 3, "done": [0] * 3, "observation": [[0.0]] * 3}
    said = "column 'metadata_task': expected an array or sequence with one value per row"
    for values in ("abc", b"abc", {1, 2, 3}, frozenset("abc")):
        with pytest.raises(DataError, match=said):
            store.extend({**rows, "metadata_task": values})
        assert len(store) == 0
    store.from_dataset(table())
    iterable = datasets.Dataset.from_list([GOOD]).to_iterable_dataset()
    for thing in (None, 5, "path/to/dataset", [GOOD], iterable, {"train": [GOOD]}):
        refused(store, ConfigError, "from_dataset: expected .*found ", lambda thing=thing: store.from_dataset(thing))


DIMS = {"max_action_dim": 3, "max_obs_continuous_dim": 2}
CODE = r"expected one of 0 \(alive\), 1 \(terminal\), 2 \(truncated\), found "
FIELDS_OF = {"observation": "obs_continuous", "observation_discrete": "obs_discrete", "metadata_q_star": "q_star"}
NULLS = ("action", "reward", "xformed_reward", "done", "observation", "observation_discrete")
# Values that a column of their type holds and its field does not, and what is said of them.
NOT_ALLOWED: list[tuple[str, Any, str]] = [
    *(("done", code, f"{CODE}{code}") for code in (7, 3, -1, 2**40)),
    *(("action", action, rf"expected 0\.\.2, found {action}") for action in (3, -1, 100)),
    *((name, None, "expected a value, found (null|None)") for name in NULLS),
    ("observation", [1.0, 2.0, 3.0], "expected at most 2 values, found 3"),
    ("metadata_q_star", [1.0] * 4, "expected at most 3 values, found 4"),
]
OF_ANOTHER_TYPE: list[tuple[str, Any, str]] = [
    ("done", "yes", "expected"),
    ("done", 1.5, ""),
    ("action", "left", "expected"),
    ("action", 0.5, ""),
    ("action", 2**70, ""),
    ("action", {"a": 1}, "expected"),
    ("reward", "0.5", "expected"),
    ("reward", 1j, "expected"),
    ("reward", object(), "expected"),
    ("observation", "abc", "expected"),
    ("observation", [[1.0], [1.0, 2.0]], ""),
    ("observation", ["a", "b"], "expected"),
    ("episode_step", "now", "expected"),
    ("episode_step", math.nan, ""),
    ("episode_step", 2.5, ""),
    ("observation_discrete", math.inf, ""),
]


@pytest.mark.parametrize(("name", "value", "said"), NOT_ALLOWED, ids=lambda value: repr(value)[:20])
def test_a_value_that_is_not_allowed_is_named_where_it_is_read(name: str, value: Any, said: str) -> None:
    store = DatasetStore(**DIMS).from_dataset(table(**{name: at_row(4, value, name)}))
    reads_until(4, store, FIELDS_OF.get(name, name), said)


@pytest.mark.parametrize(
    ("name", "value", "said"), [*NOT_ALLOWED, *OF_ANOTHER_TYPE], ids=lambda value: repr(value)[:20]
)
def test_a_bad_value_is_refused_when_it_comes(name: str, value: Any, said: str) -> None:
    empty, store = DatasetStore(**DIMS), DatasetStore(**DIMS)
    store.append(dict(GOOD))
    refused(store, DataError, rf"column '{name}': .*{said}.* at row 1", lambda: store.append(GOOD | {name: value}))
    with pytest.raises(DataError, match=rf"column '{name}': .*{said}.* at row 0"):
        empty.append(GOOD | {name: value})
    bad = {key: [item] * 3 for key, item in GOOD.items()} | {name: [GOOD[name], GOOD[name], value]}
    refused(empty, DataError, f"column '{name}'", lambda: empty.extend(bad))


@pytest.mark.parametrize("name", ["action", "done", "episode_step", "observation_discrete"])
def test_fractions_in_a_column_of_floats_where_a_whole_number_belongs(name: str) -> None:
    store = DatasetStore().from_dataset(table(**{name: [1.0] * 8}))
    for value in (0.5, math.nan, math.inf):
        refused(store, DataError, f"column '{name}'", lambda value=value: store.append(GOOD | {name: value}))


def test_without_a_width_that_of_the_first_observation_counts() -> None:
    store = DatasetStore().from_dataset(table(observation=at_row(7, [1.0, 2.0, 3.0], "observation")))
    reads_until(7, store, "obs_continuous", "expected at most 2 values, found 3")
    wide = pa.array([[1.0, 2.0, 3.0]] * 8, pa.list_(pa.float64(), 3))
    with pytest.raises((SchemaError, DataError), match="expected at most 2 values, found 3"):
        BatchSource(DatasetStore(max_obs_continuous_dim=2).from_dataset(table(observation=wide)), 2, 2)[0]
    # A field that does not pad has rows of one width.
    ragged = table(features=[[1.0, 2.0]] * 5 + [[1.0]] + [[1.0, 2.0]] * 2)
    reads_until(5, DatasetStore(fields=[Field("features")]).from_dataset(ragged), "features", "2 values, found 1")


def test_done_codes_of_other_types() -> None:
    for data_type, code in ((pa.uint8(), 3), (pa.int8(), 5), (pa.float32(), 3), (pa.uint64(), 5), (pa.float16(), 3)):
        values = pa.array([0, 0, 0, code, 0, 0, 0, 0]).cast(data_type)
        reads_until(3, DatasetStore().from_dataset(table(done=values)), "done", f"found {code}")
    for value, dtype in itertools.product((math.nan, 0.5, math.inf), ("int64", "float32")):
        store = DatasetStore().from_dataset(table(4, done=pa.array([0.0, 0.0, value, 0.0])))
        with pytest.raises(DataError, match="done: expected"):
            BatchSource(store, 4, 1, dtypes={"done": dtype})[0]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float32", "float16", "bool"])
def test_done_codes_in_any_delivered_dtype(dtype: str) -> None:
    def batch(code: int) -> Any:
        store = DatasetStore().from_dataset(table(done=at_row(4, code, "done")))
        return BatchSource(store, 8, 1, sampling="last", dtypes={"done": dtype})[0]

    for code in (3, -1):
        with pytest.raises(DataError, match=f"done: expected .*found {code}.* at row 4 "):
            batch(code)
    if dtype != "bool":
        assert batch(2)["done"].max() == 2


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
@pytest.mark.parametrize("value", [1, 7])
def test_bounds_of_a_field_of_ones_own(dtype: str, value: int) -> None:
    store = DatasetStore(fields=[Field("level", dtype=dtype, bounds=(2, 6))])
    said = rf"expected 2\.\.6, found {value}"
    reads_until(3, store.from_dataset(table(level=[2, 3, 6, value, 4, 5, 2, 6])), "level", said)
    with pytest.raises(DataError, match=f"column 'level': {said}"):
        store.append(GOOD | {"level": value})


def test_without_max_action_dim_any_action_is_taken() -> None:
    """The width of q_star says how wide q_star is; appending and reading agree that it binds no action."""
    store = DatasetStore().from_dataset(table(action=at_row(5, 100, "action")))
    store.append(GOOD | {"action": -5})
    assert BatchSource(store, 9, 1, sampling="last")[0]["action"].tolist() == [[1, 1, 1, 1, 1, 100, 1, 1, -5]]


def test_nulls_inside_lists_where_not_allowed() -> None:
    values = at_row(6, [0.5, None], "observation")
    reads_until(6, DatasetStore().from_dataset(table(observation=values)), "obs_continuous", "found null inside a list")
    fixed = pa.array(values, pa.list_(pa.float64(), 2))
    reads_until(6, DatasetStore().from_dataset(table(observation=fixed)), "obs_continuous", "found null inside a list")


@pytest.mark.parametrize("how", ["missing", "null", "filtered", "typed"])
@pytest.mark.parametrize("asked", [{}, {"fields": ["xformed_reward"]}, {"required_fields": "xformed_reward"}])
def test_a_column_that_only_one_part_has_and_whose_nulls_are_errors(how: str, asked: dict[str, Any]) -> None:
    lacking: dict[str, Any] = {
        "missing": table(4, xformed_reward=None),
        "null": table(4, xformed_reward=[None] * 4),
        "typed": table(4, xformed_reward=pa.nulls(4, pa.float64())),
        "filtered": datasets.Dataset(table(5, xformed_reward=[0.5, None, None, None, None])).select([1, 2, 3, 4, 2]),
    }
    store = DatasetStore().from_dataset(table(4)).from_dataset(lacking[how])
    why = "missing" if how == "missing" else "null throughout"
    said = f"expected 'xformed_reward' in all datasets of the store, found column 'xformed_reward' {why} in rows 4\\.."
    for make in (BatchSource, PrefetchBatchifier):
        with pytest.raises(MissingFieldError, match=said):
            make(store, 4, 2, **asked)
    assert "xformed_reward" not in BatchSource(store, 4, 2, sampling="last", fields=["reward"])[0]
    BatchSource(store.snapshot(4), 4, 1, **asked)[0]
    filled = DatasetStore(fields=[Field("xformed_reward", dtype="float32", fill=0)])
    filled.from_dataset(table(4)).from_dataset(lacking[how])
    assert BatchSource(filled, 4, 2, "last", **asked)[0]["xformed_reward"][1].tolist() == [0.0] * 4


def test_a_part_that_lacks_a_column_and_comes_later() -> None:
    store = DatasetStore().from_dataset(table(8))
    with PrefetchBatchifier(store, 4, 2, required_fields=["xformed_reward"]) as loader:
        loader.next_batch()
        state = loader.state_dict()
        store.from_dataset(table(4, xformed_reward=None))
        with pytest.raises(MissingFieldError, match=r"required_fields: .* missing in rows 8\.\.11"):
            loader.refresh()
        assert loader.state_dict() == state
        loader.next_batch()
    # Of rows that are not among those asked for nothing is asked.
    BatchSource(store.snapshot(8), 4, 2, required_fields=["xformed_reward"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("observation", "column 'observation' is read as the field 'obs_continuous'"),
        ("episode_step", "column 'episode_step' is read as the field 'time'"),
        ("obs_continous", "did you mean 'obs_continuous'?"),
        ("rewards", "did you mean 'reward'?"),
        ("level", "make a field of the column with DatasetStore(fields=[Field('level')])"),
        (
            "note",
            "read values of the column of type string with store[row]['note']; source.plan(index).starts are the "
            "first rows of the windows of a batch",
        ),
        ("zzz", "obs_discrete']"),
        (5, "obs_discrete']"),
    ],
)
@pytest.mark.parametrize("option", ["fields", "required_fields"])
@pytest.mark.parametrize("make", [BatchSource, PrefetchBatchifier])
def test_names_that_are_no_fields(asked: str, said: str, option: str, make: Any) -> None:
    store = DatasetStore().from_dataset(table(8, note=["a"] * 8, level=[0.5] * 8))
    with pytest.raises(MissingFieldError, match=f"{option}: expected {asked!r}, found ") as caught:
        make(store, 4, 2, **{option: [asked]})
    assert str(caught.value).endswith(said)
    with pytest.raises(MissingFieldError, match="obs_image"):
        make(store, 4, 2, dtypes={"obs_image": "uint8"})


def test_rows_as_gymnasium_has_them_get_the_recipe() -> None:
    row = {"obs": [0.0], "action": 0, "reward": 0.0, "terminated": False, "truncated": False, "next_obs": [1.0]}
    for add in (
        lambda: DatasetStore().append(row),
        lambda: DatasetStore().extend({name: [value] for name, value in row.items()}),
        lambda: DatasetStore().from_dataset(datasets.Dataset.from_list([row])),
    ):
        with pytest.raises(MissingFieldError) as caught:
            add()
        assert "'done' is 1 if terminated else 2 if truncated else 0 (from terminated, truncated)" in str(caught.value)
        assert "'next_obs' is the observation of the next row" in str(caught.value)
    # A row that goes is no error; asking for the field that it does not give is.
    store = DatasetStore()
    store.append({"obs": [0.0], "action": 0, "reward": 0.0, "done": 0})
    with pytest.raises(MissingFieldError, match=r"rename 'obs' to 'observation': rename it, or read it with Field"):
        BatchSource(store, 1, 1, required_fields=["obs_continuous"])
    store = DatasetStore()
    store.append({"observation": [0.0], "action": 0, "reward": 0.0, "done": 0})
    with pytest.raises(MissingFieldError, match=r"rename 'obs' to 'observation'$"):
        store.append({"obs": [0.0], "action": 0, "reward": 0.0, "done": 0})


def test_numbers_that_do_not_fit_their_dtype() -> None:
    store = DatasetStore().from_dataset(table(reward=at_row(3, 1e300, "reward")))
    source = BatchSource(store, 8, 1, sampling="last")
    with pytest.raises(DataError, match=r"reward: expected .*float32, found 1e\+300"):
        source[0]
    store = DatasetStore().from_dataset(table(episode_step=pa.array([2**63] * 8, pa.uint64())))
    with pytest.raises(DataError, match=r"time: expected .*int64, found 9223372036854775808"):
        BatchSource(store, 2, 1)[0]
    store = DatasetStore().from_dataset(table(episode_step=pa.array([1.5] * 8)))
    with pytest.raises(DataError, match=r"time: expected whole numbers for int64, found 1\.5"):
        BatchSource(store, 2, 1)[0]
    store = DatasetStore().from_dataset(table(episode_step=at_row(3, 300, "episode_step")))
    assert BatchSource(store, 8, 1, dtypes={"time": "int16"})[0]["time"].max() == 300
    with pytest.raises(DataError, match=r"time: expected values -128\.\.127 that fit int8, found 300"):
        BatchSource(store, 8, 1, dtypes={"time": "int8"})[0]


def test_large_whole_numbers_arrive_as_they_are() -> None:
    for data_type in (pa.int64(), pa.uint64()):
        for last in (None, 1):
            steps = [2**53 + 1, 2**62 + 3, 7, last]
            store = DatasetStore().from_dataset(table(4, episode_step=pa.array(steps, data_type)))
            found = BatchSource(store, 4, 1, sampling="last")[0]["time"]
            assert found.tolist() == [[-1 if step is None else step for step in steps]]


@given(
    cuts=st.lists(st.integers(0, 40), max_size=5),
    bad=st.integers(0, 39),
    kind=st.sampled_from(["done", "null", "wide", "inner null"]),
    shuffled=st.booleans(),
)
def test_a_bad_value_is_found_wherever_it_is(cuts: list[int], bad: int, kind: str, shuffled: bool) -> None:
    columns: dict[str, list[Any]] = {name: [GOOD[name]] * 40 for name in ("action", "reward", "done", "observation")}
    name, value, field = {
        "done": ("done", 9, "done"),
        "null": ("reward", None, "reward"),
        "wide": ("observation", [1.0] * 3, "obs_continuous"),
        "inner null": ("observation", [None, 1.0], "obs_continuous"),
    }[kind]
    columns[name][bad] = value
    whole = pa.table(columns)
    edges = sorted({0, 40, *cuts})
    whole = pa.concat_tables([whole.slice(a, b - a) for a, b in itertools.pairwise(edges)])
    store = DatasetStore(max_obs_continuous_dim=2)
    if shuffled:
        dataset = datasets.Dataset(whole.append_column("at", pa.array(range(40)))).shuffle(
            seed=bad, keep_in_memory=True
        )
        store.from_dataset(dataset)
        bad = dataset["at"][:].index(bad)
    else:
        store.from_dataset(whole)
    reads_until(bad, store, field, "expected")


def test_append_with_new_or_missing_keys() -> None:
    store = DatasetStore()
    store.append(dict(GOOD))
    said = r"expected only the columns .*'action'.*found also \['novel', 'other'\]"
    refused(store, SchemaError, said, lambda: store.append(GOOD | {"novel": 1, "other": 2}))
    for name in GOOD:
        less = {key: value for key, value in GOOD.items() if key != name}
        lists = {key: [value] for key, value in less.items()}
        for add in (lambda less=less: store.append(less), lambda lists=lists: store.extend(lists)):
            with pytest.raises(MissingFieldError, match=rf"\['{name}'\] missing"):
                add()
    refused(
        store,
        MissingFieldError,
        r"\['observation_discrete'\] missing",
        lambda: store.append({key: value for key, value in GOOD.items() if key != "observation_discrete"}),
    )
    empty = DatasetStore()
    for name in ("action", "reward", "done"):
        with pytest.raises(MissingFieldError, match=rf"'{name}'\] missing"):
            empty.append({key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(KeyError):
        empty.append({})
    assert (len(empty), empty.columns) == (0, {})


def test_append_to_a_store_of_a_dataset() -> None:
    """The dataset's types bind appended rows."""
    fixed = pa.array([[0.25, 0.5]] * 8, pa.list_(pa.float32(), 2))
    store = DatasetStore().from_dataset(table(action=pa.array([1] * 8, pa.int8()), observation=fixed))
    for name, value, pattern in [
        ("action", 300, "column 'action'"),
        ("observation", [1.0] * 3, "found 3 at row"),
        ("observation", [1e300, 0.0], "column 'observation': .*float32"),
        ("reward", None, "column 'reward'"),
    ]:
        refused(store, DataError, pattern, lambda name=name, value=value: store.append(GOOD | {name: value}))


def test_what_is_no_row() -> None:
    store = DatasetStore()
    store.append(dict(GOOD))
    for act in (
        lambda: store.append(5),
        lambda: store.append(None),
        lambda: store.append([1, 2]),
        lambda: store.append(store),
        lambda: store.extend(5),
        lambda: store.extend(GOOD | {"action": [1]}),
        lambda: store.snapshot("3"),
    ):
        refused(store, MouseError, "expected", act)


def test_extend_with_arrays_of_the_wrong_shape() -> None:
    store = DatasetStore(max_action_dim=3, max_obs_continuous_dim=2)
    store.append(dict(GOOD))
    ragged = {name: [value] * 2 for name, value in GOOD.items()} | {"reward": [0.5] * 3}
    refused(store, DataError, r"columns of equal length, found .*'reward': 3", lambda: store.extend(ragged))
    good = {name: np.array([value] * 4) for name, value in GOOD.items()}
    for name, value in [
        ("observation", np.zeros((4, 3))),
        ("observation", np.zeros((4, 2, 1))),
        ("observation", np.zeros(4)),
        ("reward", np.zeros((4, 2))),
        ("reward", np.zeros((4, 1, 1))),
        ("action", np.array([0, 1, 2, 3])),
        ("action", np.zeros(4)),
        ("done", np.array([0, 0, 0, 7])),
        ("reward", np.array(["a"] * 4)),
        ("reward", np.zeros(4, complex)),
        ("episode_step", np.array([0, 1, 2, 2**63], np.uint64)),
    ]:
        refused(store, DataError, f"column '{name}'", lambda name=name, value=value: store.extend(good | {name: value}))


@pytest.fixture
def store() -> DatasetStore:
    return DatasetStore().from_dataset(table(20))


@pytest.mark.parametrize("make", [BatchSource, PrefetchBatchifier])
@pytest.mark.parametrize("sampling", ["random", "last", "sequential", "batch"])
def test_fewer_steps_than_one_window_or_windows_than_one_batch(make: Any, sampling: str, store: DatasetStore) -> None:
    with pytest.raises(ConfigError, match=r"at least 1 windows? of 21 steps \(21 rows\), found 20 rows"):
        make(store, 21, 1, sampling=sampling)
    make(store, 20, 1, sampling=sampling)
    make(store, 4, 5, sampling=sampling)
    if sampling in ("last", "sequential"):
        with pytest.raises(ConfigError, match=r"at least 6 windows of 4 steps \(24 rows\), found 20 rows"):
            make(store, 4, 6, sampling=sampling)
    else:
        make(store, 4, 6, sampling=sampling)


@pytest.mark.parametrize("make", [BatchSource, PrefetchBatchifier])
def test_an_empty_store(make: Any) -> None:
    for empty in (
        DatasetStore(),
        DatasetStore().from_dataset(table(0)),
        DatasetStore().snapshot(),
        DatasetStore().from_dataset(table()).snapshot(0),
    ):
        with pytest.raises(ConfigError, match="expected rows, found an empty"):
            make(empty, 1, 1)
    with pytest.raises(ConfigError, match="to_dataset: expected a store with rows"):
        DatasetStore().to_dataset()
    with pytest.raises(IndexError):
        DatasetStore()[0]


@pytest.mark.parametrize("make", [BatchSource, PrefetchBatchifier])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"sampling": "lats"}, r"sampling: expected one of \['random', .*\] or a WindowSampler, found 'lats'"),
        ({"sampling": None}, "sampling: expected .*found None"),
        ({"sampling": 3}, "sampling: expected .*found 3"),
        ({"sequence_length": 0}, "sequence_length: expected an integer of at least 1, found 0"),
        ({"sequence_length": 2.0}, r"sequence_length: expected an integer of at least 1, found 2\.0"),
        ({"sequence_length": True}, "sequence_length: expected an integer of at least 1, found True"),
        ({"batch_size": -1}, "batch_size: expected an integer of at least 1, found -1"),
        ({"batch_size": "4"}, "batch_size: expected an integer of at least 1, found '4'"),
        ({"seed": -1}, r"seed: expected an integer in \[0, 2\*\*64\), found -1"),
        ({"seed": None}, "seed: expected"),
        ({"shard": (0, 3)}, "shard: expected a count that divides batch_size 4, found 3"),
        ({"shard": (4, 4)}, r"shard: expected 0 <= rank < count, found \(4, 4\)"),
        ({"shard": (-1, 2)}, "shard: expected 0 <= rank < count"),
        ({"shard": 2}, r"shard: expected \(rank, count\), found 2"),
        ({"shard": (0, 1, 2)}, r"shard: expected \(rank, count\)"),
        ({"shard": (0.5, 2)}, r"shard: expected \(rank, count\)"),
        ({"dtypes": {"reward": "complex64"}}, r"dtypes\['reward'\]: expected .*found complex64"),
        ({"dtypes": {"reward": "words"}}, r"dtypes\['reward'\]: expected a NumPy dtype, found 'words'"),
    ],
    ids=str,
)
def test_arguments(make: Any, options: dict[str, Any], pattern: str, store: DatasetStore) -> None:
    with pytest.raises(ConfigError, match=pattern):
        make(store, **({"sequence_length": 2, "batch_size": 4} | options))


def test_arguments_of_the_loader(store: DatasetStore) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prefetch": 0}, "prefetch: expected an integer of at least 1, found 0"),
        ({"prefetch": 1.5}, "prefetch: expected"),
        ({"num_workers": -1}, "num_workers: expected an integer of at least 0, found -1"),
        ({"num_workers": None}, "num_workers: expected"),
        ({"device": "cuda"}, "device: expected None or 'cpu'"),
    ]
    for options, pattern in wrong:
        with pytest.raises(ConfigError, match=pattern):
            PrefetchBatchifier(store, 2, 4, **options)
    # Without a framework pin_memory is ignored.
    with PrefetchBatchifier(store, 2, 4, pin_memory=True, device="cpu") as loader:
        assert loader.next_batch()["reward"].shape == (4, 2)
    for thing in (None, table(), [GOOD]):
        with pytest.raises(ConfigError, match="store: expected a DatasetStore or a Snapshot, found"):
            BatchSource(thing, 2, 4)
        with pytest.raises(ConfigError, match="store: expected a DatasetStore, a Snapshot, a replay buffer, or a so"):
            PrefetchBatchifier(thing, 2, 4)


def test_what_is_no_batch_index(store: DatasetStore) -> None:
    for before in (0, 2):  # after two batches, batch 2 was copied, too, and waits
        source = BatchSource(store, 2, 4)
        for number in range(before):
            source[number]
        for index in (1.5, 2.0, "1", None):
            with pytest.raises(TypeError, match="as an integer"):
                source[index]  # type: ignore[index]
        for index in (-1, -(2**40)):
            with pytest.raises(IndexError, match=f"found {index}"):
                source[index]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint16, np.int64])
def test_batch_indices_of_every_integer_type(kind: Any) -> None:
    store = DatasetStore()
    rows = np.arange(500)
    store.extend({"action": rows % 5, "reward": rows, "done": rows * 0, "observation": rows[:, None] * np.ones(3)})
    source, other = BatchSource(store, 4, 8), BatchSource(store, 4, 8)
    for number in (*range(60), 90, 9, 120, 500, 100):
        index = kind(number) if number <= np.iinfo(kind).max else number
        assert np.array_equal(source[index]["reward"], other[number]["reward"])
        assert np.array_equal(source.plan(index).starts, other.plan(number).starts)


def test_arguments_of_the_store_and_of_a_field() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_action_dim": 0}, "max_action_dim: expected a positive integer or None, found 0"),
        ({"max_action_dim": 2.5}, "max_action_dim: expected"),
        ({"max_obs_continuous_dim": -3}, "max_obs_continuous_dim: expected a positive integer or None, found -3"),
        ({"alignment": "departing"}, r"alignment: expected one of \['arrived', 'outgoing'\], found 'departing'"),
        ({"fields": ["log_prob"]}, "fields: expected mouse_core.Field objects, found 'log_prob'"),
    ]
    for options, pattern in wrong:
        with pytest.raises(ConfigError, match=pattern):
            DatasetStore(**options)
    fields: list[dict[str, Any]] = [{"dtype": "str"}, {"dtype": "nonsense"}, {"shape": (0,)}, {"name": ""}, {"name": 3}]
    for options in fields:
        with pytest.raises(ConfigError, match="expected"):
            Field(**{"name": "x"} | options)


def test_splits_and_patterns() -> None:
    store = DatasetStore().from_dataset(table())
    splits = {"train": table(), "test": table()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"splits": ["train", "valid"]}, r"expected splits among \['train', 'test'\], found 'valid'"),
        ({"splits": "valid"}, "found 'valid'"),
        ({"split_pattern": "eval_*"}, r"expected a pattern matching \['train', 'test'\], found 'eval_\*'"),
        ({"split_pattern": ["tr*", "x"]}, "found 'x'"),
        ({"splits": "train", "split_pattern": "t*"}, "expected splits or split_pattern, found both"),
    ]
    for options, pattern in wrong:
        refused(store, ConfigError, pattern, lambda options=options: store.from_dataset(splits, **options))
    for option in ({"splits": "train"}, {"split_pattern": "*"}):
        with pytest.raises(ConfigError, match="expected a dict of splits, found Dataset"):
            DatasetStore().from_dataset(datasets.Dataset.from_list([GOOD]), **option)


def test_a_state_of_another_dataset_or_configuration() -> None:
    def loader(source: Any = None, store_options: Any = None, **options: Any) -> PrefetchBatchifier:
        made = DatasetStore(**(store_options or {})).from_dataset(source if source is not None else table(40))
        return PrefetchBatchifier(made, **({"sequence_length": 4, "batch_size": 2, "num_workers": 0} | options))

    mine = loader()
    mine.next_batch()
    state = mine.state_dict()
    wanted = mine.source[1]
    others = [
        (loader(table(44, reward=[0.25] * 44)), "data: expected a state of these rows, found a state of other rows"),
        (loader(table(40, reward=[0.25] * 40)), "data: expected a state of these rows, found a state of other rows"),
        (loader(table(40, xformed_reward=None)), "columns: expected no 'xformed_reward', found one"),
        (loader(store_options={"alignment": "outgoing"}), "alignment: expected outgoing, found arrived"),
        (loader(sequence_length=5), "sequence_length: expected 5, found 4"),
        (loader(fields=["reward"]), "fields: expected no 'action', found one"),
        (loader(store_options={"max_obs_continuous_dim": 5}), "'observation' as [5], pad 0, found column"),
        (loader(store_options={"fields": [Field("obs_discrete", column="episode_step")]}), "column 'episode_step'"),
        (
            loader(store_options={"fields": [Field("time", column="episode_step", dtype="int64", fill=7)]}),
            "time: expected column 'episode_step' as [], fill 7, found column 'episode_step' as [], fill -1",
        ),
    ]
    for other, said in others:
        other.next_batch()
        before = other.state_dict()
        following = other.source[1]
        with pytest.raises(StateError, match="expected") as caught:
            other.load_state_dict(state)
        assert said in str(caught.value)
        assert ("data: " in said) == ("data: " in str(caught.value)), said
        for less in ({}, {"configuration": "["}, {"configuration": "[1]"}, {"configuration": 5}):  # unreadable
            rest = {key: value for key, value in state.items() if key != "configuration"} | less
            with pytest.raises(StateError, match="expected the fingerprint"):
                other.load_state_dict(rest)
        assert other.state_dict() == before, said
        found = other.next_batch()
        assert all(np.array_equal(found[field], following[field]) for field in following), said
    for known in (state, {key: value for key, value in state.items() if key != "configuration"}):
        mine.load_state_dict(known)
        assert np.array_equal(mine.next_batch()["reward"], wanted["reward"])


DAMAGES: dict[str, list[Any]] = {
    "seed": [-1, 2**64, 1.5, "0", ...],
    "next_index": [-1, None, True, ...],
    "rows": [41, 0, 3, 39, ...],
    "epoch_start": [7, -1, ...],
    "fingerprint": ["0" * 32, None, ...],
    "more": [1],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_state(name: str) -> None:
    store = DatasetStore().from_dataset(table(40))
    with PrefetchBatchifier(store, 4, 2, num_workers=2) as loader:
        for _ in range(3):
            loader.next_batch()
        state = loader.state_dict()
        for damage in DAMAGES[name]:
            bad = {key: value for key, value in (state | {name: damage}).items() if value is not ...}
            with pytest.raises(StateError, match=r"state: expected .*found"):
                loader.load_state_dict(bad)
            assert loader.state_dict() == state
        assert np.array_equal(loader.next_batch()["reward"], loader.source[3]["reward"])


def test_what_is_no_state() -> None:
    loader = PrefetchBatchifier(DatasetStore().from_dataset(table(40)).snapshot(), 4, 2, num_workers=0)
    for state in (None, 5, [], {}, {1: 2, "a": 3}, "seed"):
        with pytest.raises(StateError, match="state: expected"):
            loader.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="refresh: expected a loader over a DatasetStore"):
        loader.refresh()
    loader.next_batch()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python's own, about forking with threads
@pytest.mark.parametrize("workers", [0, 2])
def test_use_after_fork(workers: int, store: DatasetStore) -> None:
    used, unused = (PrefetchBatchifier(store, 4, 2, num_workers=workers) for _ in range(2))
    used.next_batch()

    def child() -> None:
        for use in (used.next_batch, used.next_batch, used.refresh, lambda: used.load_state_dict(used.state_dict())):
            with pytest.raises(ForkError, match=r"loader: expected a call in process .*forked child"):
                use()
        used.close()
        unused.next_batch()  # never used before: it may start here
        unused.close()

    in_child(child)
    used.next_batch()  # the parent's goes on
    used.close()
    unused.next_batch()
    unused.close()


def test_errors_are_of_one_family() -> None:
    for error, builtin in [
        (ConfigError, ValueError),
        (SchemaError, ValueError),
        (DataError, ValueError),
        (StateError, ValueError),
        (MissingFieldError, KeyError),
        (ClosedError, RuntimeError),
        (ForkError, RuntimeError),
        (WorkerError, RuntimeError),
    ]:
        assert issubclass(error, MouseError)
        assert issubclass(error, builtin)
    assert str(MissingFieldError("a sentence, not in quotes")) == "a sentence, not in quotes"


def test_negative_pixels_of_a_narrow_column() -> None:
    pixels = pa.array(np.where(np.arange(300 * 16) < 16, 5, -56).astype(np.int8))
    images = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pixels, 4), 4)
    zeros = {"action": np.zeros(300, np.int64), "reward": np.zeros(300, np.float32), "done": np.zeros(300, np.int64)}
    store = DatasetStore().from_dataset(pa.table({**zeros, "observation_image": images}))
    with pytest.raises(DataError, match=r"obs_image: expected 0\.\.255, found -56"):
        BatchSource(store, 4, 8)[0]


def test_indices_that_end_before_they_say(tmp_path: Path) -> None:
    path, rows = tmp_path / "indices.arrow", 1000
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema([("indices", pa.uint64())])) as writer:
        writer.write_table(pa.table({"indices": pa.array(np.arange(0, rows, 2, dtype=np.uint64))}))
    content, said = path.read_bytes(), struct.pack("<q", rows // 2)
    assert content.count(said) >= 2
    path.write_bytes(content.replace(said, struct.pack("<q", 20_000_000), 2))
    table = pa.table({"action": np.zeros(rows, int), "reward": np.zeros(rows), "done": np.zeros(rows, int)})
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table))
    dataset._indices = datasets.table.MemoryMappedTable.from_file(str(path))
    with pytest.raises(DataError, match="damaged"):
        BatchSource(DatasetStore().from_dataset(dataset), 4, 8)[0]


def test_columns_where_fields_are_expected() -> None:
    store = DatasetStore().from_dataset(table(40))
    asked: list[Any] = [
        lambda: BatchSource(store, fields=["observation"]),
        lambda: BatchSource(store, normalize={"observation": "mean_std"}),
        lambda: BatchSource(store, windows={"observation": [0]}),
        lambda: statistics(store, ["observation"]),
    ]
    for ask in asked:
        with pytest.raises(MissingFieldError, match=r"; column 'observation' is read as the field 'obs_continuous'$"):
            ask()


def test_statistics_are_no_normalizer() -> None:
    store = DatasetStore().from_dataset(table(40))
    with pytest.raises(ConfigError, match=r"normalize: expected kinds.*found Statistics; Normalizer\.of") as caught:
        BatchSource(store, normalize=statistics(store))  # type: ignore[arg-type]
    assert "array" not in str(caught.value)
