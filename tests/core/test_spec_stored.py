"""Which values columns may have: said by a store, checked where rows are appended, kept where rows go."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, Field, SchemaError
from mouse_core.formats import open as read_rows
from mouse_core.images.pixels import encode_png
from mouse_core.inspect import inspect
from mouse_core.metadata import DatasetMetadata, joined, read_metadata
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Unbounded,
    stack_specs,
)

SPEC = Composite(
    {
        "action": Bounded(0.5, 1, (2,)),
        "observation": Bounded([-1, -np.inf], [1, np.inf], dtype=np.float32),
        "task": Categorical(3, mask=[True, True, False]),
        "kind": OneHot(3),
        "gait": MultiCategorical([2, 4]),
        "speed": Choice([Bounded(0, 1, ()), Bounded(5, 6, ())]),
    }
)


def row(**changes: Any) -> dict[str, Any]:
    plain = {"action": [1.0, 1.0], "observation": [0.5, 1e9], "reward": 0.0, "done": 0}
    return plain | {"task": 1, "kind": np.array([False, True, False]), "gait": [1, 3], "speed": 5.5} | changes


def columns(n: int, **changes: Any) -> dict[str, Any]:
    return {name: np.stack([np.asarray(value)] * n) for name, value in row().items()} | changes


BAD: list[tuple[str, Any, str]] = [
    ("action", [1.0, 0.25], r"expected a number from 0.5 to 1.0, found 0.25 at \[1\]"),
    ("observation", [1.5, 0.0], r"expected a number from -1.0 to 1.0, found 1.5 at \[0\]"),
    ("observation", [float("nan"), 0.0], r"found nan at \[0\]"),
    ("task", 2, r"expected one of the codes \[0, 1\], found 2"),
    ("task", -1, "expected"),
    ("kind", np.array([True, True, False]), "expected one 1 among 3 zeros"),
    ("gait", [2, 0], r"found 2 at \[0\]"),
    ("speed", 3.0, "expected one of"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[f"{name}-{value}" for name, value, _ in BAD])
def test_rows_are_held_to_what_is_said(name: str, value: Any, message: str) -> None:
    store = DatasetStore(spec=SPEC)
    store.append(row())
    with pytest.raises(DataError, match=rf"column '{name}': .*{message}.* at row 1"):
        store.append(row(**{name: value}))
    many = columns(5)
    many[name] = many[name].astype(np.asarray(value).dtype)
    many[name][3] = value
    with pytest.raises(DataError, match=rf"column '{name}': .*{message}.* at row 4"):
        store.extend(many)
    assert len(store) == 1
    store.extend(columns(5))
    assert len(store) == 6


def test_a_transition_that_there_was_not_is_zeros() -> None:
    """No action led to the first row of an episode; one leaves each of them where rows hold those."""
    store = DatasetStore(spec=SPEC)
    store.append(row(action=[0.0, 0.0]))
    store.extend(columns(2, action=np.zeros((2, 2))))
    assert len(store) == 3
    with pytest.raises(DataError, match="observation"):
        store.append(row(observation=[-2.0, 0.0]))
    outgoing = DatasetStore(spec=SPEC, alignment="outgoing")
    for take in (
        lambda: outgoing.append(row(action=[0.0, 0])),
        lambda: outgoing.extend(columns(2, action=np.zeros((2, 2)))),
    ):
        with pytest.raises(DataError, match=r"column 'action': expected a number from 0\.5"):
            take()
    assert not len(outgoing)


def test_shapes_are_those_of_values_however_rows_hold_them() -> None:
    store = DatasetStore(spec={"observation": Bounded(0, 1, (2, 2))})
    plain = {"action": 0, "reward": 0.0, "done": 0}
    store.append(plain | {"observation": [0.0, 1, 1, 0]})
    with pytest.raises(DataError, match=r"found 2.0 at \[1, 0\]"):
        store.append(plain | {"observation": [0.0, 1, 2, 0]})
    lists = DatasetStore(spec={"x": OneHot(3, (2, 3))})  # a column that no field reads may have rows of any length
    lists.append(plain | {"x": [0, 1, 0, 1, 0, 0]})
    with pytest.raises(DataError, match=r"expected one 1 among 3 zeros, found \[0, 0, 0\] at \[1\]"):
        lists.append(plain | {"x": [0, 1, 0, 0, 0, 0]})
    with pytest.raises(DataError, match="expected a shape that ends in"):
        DatasetStore(spec={"observation": Bounded(0, 1, (3,))}).append(plain | {"observation": [0.0, 1, 1, 0]})


NUMBERS: list[tuple[Any, Any, Any]] = [
    # A spec, what a column takes of it in another dtype, and what it does not take.
    (Bounded(0, 0.7, ()), 0.7, 0.7001),
    (Bounded(0, 0.7, (2,)), np.array([0.7, 0], np.float16), np.array([0.71, 0], np.float16)),
    (Bounded([0, 1], [0.7, 2]), [0.7, 1.0], [0.7, 0.99]),
    (Categorical(3), 2.0, 0.5),
    (MultiCategorical([2, 3]), [1.0, 2.0], [0.5, 1.0]),
    (Bounded(0, 3, (), np.int64), 3.0, 0.5),
    (Unbounded((), np.uint8), 255, 300),
    (Unbounded((), np.bool_), 1, 2),
    (Unbounded((2,), np.int8), [-128.0, 127.0], [0.0, 0.5]),
    (Categorical(2), True, None),
    (NonTensor(), 1.5, None),
    (NonTensor((2,)), [1.5, 2.5], None),
    (Choice([NonTensor(example=1), NonTensor(example=3)]), 3, 2),
]


@pytest.mark.parametrize(("spec", "good", "bad"), NUMBERS, ids=[f"{spec}"[:40] for spec, _, _ in NUMBERS])
def test_numbers_count_as_what_they_are_whatever_their_dtype(spec: Any, good: Any, bad: Any) -> None:
    store = DatasetStore(spec={"x": spec})
    plain = {"action": 0, "reward": 0.0, "done": 0, "x": good}
    many = {name: np.stack([np.asarray(value)] * 400) for name, value in plain.items()}
    store.append(plain)
    store.append(plain)
    store.extend(many)
    assert len(store) == 402
    if bad is None:
        return
    with pytest.raises(DataError, match=r"column 'x': expected .* at row 402"):
        store.append(plain | {"x": bad})
    many["x"][301] = bad
    with pytest.raises(DataError, match=r"column 'x': expected .* at row 703"):
        store.extend(many)
    assert len(store) == 402


def test_pictures_are_held_to_it() -> None:
    plain = {"action": 0, "reward": 0.0, "done": 0}
    pixels = np.full((4, 4, 3), 200, np.uint8)
    with pytest.raises(DataError, match=r"found 200 at \[0, 0, 0\]"):
        DatasetStore(spec={"observation_image": Bounded(0, 100, (4, 4, 3), np.uint8)}).append(
            plain | {"observation_image": pixels}
        )
    encoded = plain | {"observation_image": encode_png(pixels)}
    with pytest.raises(DataError, match=r"expected images of shape \(5, 4, 3\), found \(4, 4, 3\)"):
        DatasetStore(spec={"observation_image": Bounded(0, 255, (5, 4, 3), np.uint8)}).append(encoded)
    DatasetStore(spec={"observation_image": Bounded(0, 255, (4, 4, 3), np.uint8)}).append(encoded)


def test_it_goes_with_the_rows(tmp_path: Path) -> None:
    store = DatasetStore(spec=SPEC)
    store.extend(columns(4))
    assert store.metadata.spec == SPEC
    store.to_dataset().save_to_disk(tmp_path / "saved")
    again = DatasetStore().from_dataset(datasets.load_from_disk(tmp_path / "saved"))
    pq.write_table(store.to_dataset().data.table, tmp_path / "rows.parquet")
    read = DatasetStore().from_dataset(pq.read_table(tmp_path / "rows.parquet"))
    with DatasetStore.open(tmp_path / "store", "a", spec=SPEC) as written:
        written.extend(columns(3))
    with DatasetStore.open(tmp_path / "store", "a") as reopened:
        for one in (again, read, reopened):
            assert one.metadata.spec == SPEC
            with pytest.raises(DataError, match="column 'task'"):
                one.append(row(task=2))
        reopened.append(row())
    assert len(DatasetStore.open(tmp_path / "store")) == 4


def test_what_is_said_differently_is_not_said_of_the_whole() -> None:
    one, other = DatasetStore(spec=SPEC), DatasetStore(spec=SPEC.with_fields({"task": Categorical(3)}))
    one.extend(columns(1))
    other.extend(columns(1))
    both = DatasetStore().from_dataset(one.to_dataset()).from_dataset(other.to_dataset())
    whole = SPEC.with_fields({"task": Unbounded((), np.int64)})
    assert both.metadata.spec == whole
    assert both.from_dataset(one.to_dataset()).metadata.spec == whole, "what there was once is there still"
    two = DatasetStore(spec=SPEC.with_fields({"task": OneHot(3), "speed": Unbounded((2,))}))
    two.extend(columns(1, task=[[True, False, False]], speed=np.zeros((1, 2))))
    said = joined([("one", one.metadata), ("two", two.metadata)])
    assert said.spec == SPEC.with_fields({"task": NonTensor(), "speed": NonTensor()})
    wider = joined(
        [
            ("a", DatasetMetadata(spec={"x": Unbounded((2, 3))})),
            ("b", DatasetMetadata(spec={"x": Binary((4, 3), np.float64)})),
        ]
    )
    assert wider.spec == Composite({"x": Unbounded((-1, 3), np.float64)})
    with pytest.raises(SchemaError, match=r"column 'task': expected Categorical\(.* found Categorical\("):
        one.from_dataset(other.to_dataset())
    assert len(one) == 1


def test_other_things_are_no_specs_of_columns() -> None:
    for spec in (
        {"a": {"b": Unbounded()}},
        {"a": stack_specs([Unbounded((1,)), Unbounded((2,))])},
        Composite({"a": Unbounded((2,))}, (2,)),
    ):
        with pytest.raises(ConfigError, match="spec: expected an array spec for each column"):
            DatasetMetadata(spec=spec)
    with pytest.raises(ConfigError, match="expected a spec"):
        DatasetStore(spec={"a": 3})
    assert DatasetMetadata(spec={"a": Unbounded(device="cuda:0")}) == DatasetMetadata(spec={"a": Unbounded()})
    assert DatasetMetadata(spec={}).spec is None
    assert DatasetMetadata(spec=SPEC) == DatasetMetadata.from_json(DatasetMetadata(spec=SPEC).to_json())
    text = json.dumps(DatasetMetadata(spec=SPEC).to_json()).replace("OneHot", "TwoHot")
    with pytest.raises(DataError, match="expected one of"):
        read_metadata(f"mouse_data: {text}")


def test_batches_have_it() -> None:
    store = DatasetStore(spec=SPEC)
    store.extend(columns(8))
    source = BatchSource(store, 4, 2, fields=["action", "obs_continuous", "reward"])
    spec = source.spec.composite(store.metadata.spec)
    assert spec["action"] == SPEC["action"]
    assert spec["obs_continuous"] == SPEC["observation"].astype(np.float64)
    assert spec["reward"] == Unbounded((), np.float32)
    assert spec.contains(source[0])
    normal = BatchSource(store, 4, 2, fields=["obs_continuous"], normalize={"obs_continuous": "mean_std"})
    assert normal.spec.composite(store.metadata.spec)["obs_continuous"] == Unbounded((2,), np.float32), "other numbers"
    floats = BatchSource(DatasetStore(fields=[Field("task", dtype="float32")]).from_dataset(store.to_dataset()), 4, 2)
    assert floats.spec.composite(store.metadata.spec)["task"] == Unbounded(()), "there are no codes that are floats"
    assert source.spec.composite()["action"] == Unbounded((2,), np.float32)


def test_inspection_shows_it_and_finds_what_is_beyond(tmp_path: Path) -> None:
    store = DatasetStore()
    store.extend(columns(4, action=np.zeros((4, 2))) | {"done": [0, 0, 0, 1]})
    store.describe(DatasetMetadata(spec=SPEC.with_fields({"observation": Bounded(0, 1, (2,))})))
    store.to_dataset().save_to_disk(tmp_path / "saved")
    report = inspect(read_rows(tmp_path / "saved"))
    assert report.metadata.spec["action"] == SPEC["action"]
    found = [finding.message for finding in report.findings if finding.code == "beyond-spec"]
    assert len(found) == 1
    assert found[0].startswith(
        "observation: expected a number from 0.0 to 1.0, found 1000000000.0 at [1]; the spec of the dataset is Bounded"
    )


def beyond(tmp_path: Path, spec: Any, **rows: Any) -> list[str]:
    store = DatasetStore()
    n = len(next(iter(rows.values())))
    store.extend({"action": np.zeros(n), "reward": np.zeros(n), "done": np.zeros(n, int)} | rows)
    store.describe(DatasetMetadata(spec=spec))
    store.to_dataset().save_to_disk(tmp_path / "rows")
    return [one.message for one in inspect(read_rows(tmp_path / "rows")).findings if one.code == "beyond-spec"]


def test_inspection_finds_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    wide = np.tile([0.1, 5.7], 1000)
    spec = {
        "x": Bounded(0, 0.7, (2,)),  # float32, of rows of float64
        "wide": Bounded(np.tile([0, 5], 1000), np.tile([1, 5.7], 1000)),
        "nan": Categorical(3),
    }
    rows = {"x": np.array([[0.1, 0.7]] * 2), "wide": np.stack([wide] * 2), "nan": np.array([np.nan, 2.0])}
    assert beyond(tmp_path / "good", spec, **rows) == []
    found = beyond(tmp_path / "bad", spec, **(rows | {"wide": np.stack([wide, wide + 0.1])}))
    assert [message.split(",")[0] for message in found] == ["wide: expected a number from 0.0 to 5.7"]


def test_a_spec_of_a_column_that_rows_have_not_is_refused() -> None:
    """A name that is mistyped would never check anything."""
    store = DatasetStore(spec={"acton": Bounded(0, 1, (2,))})
    for take in (lambda: store.append(row()), lambda: store.extend(columns(3))):
        with pytest.raises(
            SchemaError,
            match=r"spec: expected specs only for the columns of the rows \(.*\), found specs for \['acton'\]",
        ):
            take()
    assert not len(store)
