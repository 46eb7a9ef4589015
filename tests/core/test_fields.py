"""What the options of a field mean: shapes of one value, fills, bounds and names of codes, in every way rows come."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.images import decode_image, encode_png
from mouse_core.spec import STANDARD_FIELDS, check_list

VALUES: dict[str, list[Any]] = {
    "bool": [False, True],
    "int8": [0, 1, 5, 100],
    "int64": [0, 1, 5, 100],
    "float32": [0.0, 1.0, 2.5, 100.0],
}


def rows_of(values: list[Any]) -> dict[str, list[Any]]:
    n = len(values)
    return {"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "value": values}


def _table(store: DatasetStore, values: list[Any], kind: pa.DataType) -> None:
    store.from_dataset(pa.table(rows_of(values) | {"value": pa.array(values, kind)}))


def _chunks(store: DatasetStore, values: list[Any], kind: pa.DataType) -> None:
    whole = pa.table(rows_of([*values, *values]) | {"value": pa.array([*values, *values], kind)})
    store.from_dataset(pa.concat_tables([whole.slice(n, 1) for n in range(len(values))]))


def _append(store: DatasetStore, values: list[Any], kind: pa.DataType) -> None:
    for value in values:
        store.append({"action": 0, "reward": 0.0, "done": 0, "value": value})


def _extend(store: DatasetStore, values: list[Any], kind: pa.DataType) -> None:
    store.extend(rows_of(values))


def _arrays(store: DatasetStore, values: list[Any], kind: pa.DataType) -> None:
    if None in values:
        return _extend(store, values, kind)
    dtype = (kind.value_type if pa.types.is_nested(kind) else kind).to_pandas_dtype()
    return store.extend(rows_of(values) | {"value": np.array(values, dtype)})


WAYS: list[Callable[[DatasetStore, list[Any], pa.DataType], None]] = [_table, _chunks, _append, _extend, _arrays]


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(sorted(VALUES)),
    form=st.sampled_from(["number", "list", "fixed"]),
    fill=st.sampled_from([None, False, True, 0, 1, 5, 2.5]),
    bounds=st.sampled_from([None, (0, 1), (0, 5), (1, 100)]),
    delivered=st.sampled_from([None, "int64", "float32", "bool"]),
    way=st.sampled_from(WAYS),
    nulls=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(dtype="bool", form="number", fill=False, bounds=None, delivered=None, way=_append, nulls=True, seed=1)
def test_a_number_a_vector_of_one_and_a_null_are_what_the_field_says(
    dtype: str, form: str, fill: Any, bounds: Any, delivered: str | None, way: Any, nulls: bool, seed: int
) -> None:
    """Every row is delivered as the field says, or refused: when it comes, when it is asked for, or with its batch."""
    rng = random.Random(seed)
    plain = [rng.choice(VALUES[dtype]) for _ in range(12)]
    if nulls:
        plain[rng.randrange(1, 12)] = None
    values = plain if form == "number" else [None if value is None else [value] for value in plain]
    kind = {"bool": pa.bool_(), "int8": pa.int8(), "int64": pa.int64(), "float32": pa.float32()}[dtype]
    kind = {"number": kind, "list": pa.list_(kind), "fixed": pa.list_(kind, 1)}[form]

    if fill is not None and bounds is not None and not bounds[0] <= fill <= bounds[1]:
        with pytest.raises(ConfigError, match="expected a fill within its bounds"):
            Field("value", shape=(), fill=fill, bounds=bounds)
        return
    field = Field("value", dtype=delivered, shape=(), fill=fill, bounds=bounds)
    stored = np.dtype(dtype)
    if way in (_append, _extend) or (way is _arrays and nulls):  # kept in what Python has
        stored = {"int8": np.dtype("int64"), "float32": np.dtype("float64")}.get(dtype, stored)
    wanted = np.dtype(delivered) if delivered else stored
    known = [fill if value is None else value for value in plain]
    whole = wanted.kind in "iu" and stored.kind == "f"
    allowed = None not in known and all(
        (bounds is None or bounds[0] <= value <= bounds[1]) and (wanted.kind != "b" or value in (0, 1))
        for value in known
    )
    allowed = allowed and not (whole and any(value != int(value) for value in known if value is not None))
    # A fill is refused with the field, whether it is needed or not.
    kinds = {"b": (0, 1), "i": (0, 1, 5)}.get(wanted.kind)
    if fill is not None and kinds is not None and fill not in kinds:
        allowed = False
    store = DatasetStore(fields=[field])
    try:
        way(store, values, kind)
        found = BatchSource(store, 4, 3, "last")[0]["value"]
    except (DataError, ConfigError) as error:
        if allowed or "value" not in str(error):
            raise
    else:
        assert allowed
        array = found.reshape(-1)
        assert array.dtype == wanted
        assert array.tolist() == [wanted.type(value).item() for value in known]
        encoded = store.encode_hf_rows(rows_of(values))["value"]
        assert encoded.tolist() == array.tolist()


def test_numbers_and_vectors_of_one_are_the_same_to_a_store_that_has_either() -> None:
    row = {"action": 0, "reward": 0.0, "done": 0}
    for first, second in ((3, [4]), ([3], 4), (np.array([3]), np.int64(4))):
        store = DatasetStore()
        store.append(row | {"observation_discrete": first})
        store.append(row | {"observation_discrete": second})
        store.extend({name: [value] for name, value in row.items()} | {"observation_discrete": [second]})
        store.extend({name: [value] for name, value in row.items()} | {"observation_discrete": np.array([second])})
        assert BatchSource(store, 4, 1)[0]["obs_discrete"].tolist() == [[3, 4, 4, 4]]
        found = store.encode_hf_rows(
            {name: [value] * 2 for name, value in row.items()} | {"observation_discrete": [first, second]}
        )
        assert found["obs_discrete"].tolist() == [3, 4]


def test_a_fixed_width_that_is_not_one_is_told_by_the_type() -> None:
    wide = pa.array([[1, 2]] * 4, pa.list_(pa.int64(), 2))
    with pytest.raises(SchemaError, match="column 'observation_discrete': expected 1 value, found 2"):
        DatasetStore().from_dataset(
            pa.table({"action": [0] * 4, "reward": [0.0] * 4, "done": [0] * 4, "observation_discrete": wide})
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fill": "none"}, "fill as a number"),
        ({"pad": [0]}, "pad as a number"),
        ({"bounds": (5, 0)}, "bounds as"),
        ({"bounds": 5}, "bounds as"),
        ({"bounds": (0, None)}, "bounds as"),
        ({"bounds": ("a", "b")}, "bounds as"),
        ({"bounds": (0, 5), "fill": -1}, "fill within its bounds 0..5"),
        ({"bounds": (0, 5), "fill": float("nan")}, "fill within its bounds"),
        ({"dim": 0}, "dim as a positive integer"),
        ({"dim": 2.0}, "dim as a positive integer"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"field 'value': expected a? ?{said}"):
        Field("value", **options)


def test_fields_of_one_column_whose_bounds_no_value_meets() -> None:
    with pytest.raises(ConfigError, match="expected fields of column 'value' whose bounds have a value in common"):
        DatasetStore(fields=[Field("low", column="value", bounds=(0, 1)), Field("high", column="value", bounds=(2, 3))])
    DatasetStore(fields=[Field("low", column="value", fill=-1), Field("high", column="value", fill=3, bounds=(2, 3))])


def message(field: Field | None, **columns: Any) -> str:
    store = DatasetStore(fields=[] if field is None else [field])
    rows = {"action": [1] * 3, "reward": [0.0] * 3, "done": [0, 0, 9]} | columns
    with pytest.raises(DataError) as by_batch:
        BatchSource(store.from_dataset(pa.table(rows)), 3, 1)[0]
    store = DatasetStore(fields=[] if field is None else [field])
    with pytest.raises(DataError) as by_row:
        store.extend(rows)
    said = str(by_batch.value).partition(": ")[2].partition(" at row")[0]
    assert f": {said} at row 2" in str(by_row.value)
    return said


def test_messages_follow_the_bounds_of_the_field() -> None:
    assert message(None) == "expected one of 0 (alive), 1 (terminal), 2 (truncated), found 9"
    assert message(Field("done", dtype="int64", bounds=(0, 5), required=True)) == "expected 0..5, found 9"
    own = Field("done", dtype="int64", bounds=(0, 2), required=True)
    assert message(own) == "expected one of 0 (alive), 1 (terminal), 2 (truncated), found 9"
    named = Field("phase", bounds=(0, 1), labels=("day", "night"))
    assert message(named, phase=[0, 1, 2], done=[0, 0, 0]) == "expected one of 0 (day), 1 (night), found 2"
    assert message(Field("phase", dim=4), phase=[0, 1, 4], done=[0, 0, 0]) == "expected 0..3, found 4"


def test_a_store_says_what_its_fields_are() -> None:
    """Dimensions and names of codes are in the fields, also in those that replace standard ones."""
    fields = DatasetStore(3, 5, fields=[Field("q_star", column="values"), Field("obs_continuous", dim=7)]).fields
    assert {name: fields[name].dim for name in fields} == {
        **{standard.name: None for standard in STANDARD_FIELDS},
        "action": 3,
        "q_star": 3,
        "obs_continuous": 7,
    }
    assert fields["q_star"].min_ndim == fields["obs_continuous"].min_ndim == 1
    store = DatasetStore(3, fields=[Field("action", dtype="int64", bounds=(0, 9), required=True)])
    store.extend({"action": [5, 9], "reward": [0, 0], "done": [0, 0]})
    with pytest.raises(DataError, match=r"expected 0\.\.9, found 10"):
        store.extend({"action": [10], "reward": [0], "done": [0]})


def test_bounds_of_vectors_are_checked_when_rows_come() -> None:
    field = Field("tokens", dtype="int64", shape=(2,), bounds=(0, 9))
    for value, said in (([3, 10], r"expected 0\.\.9, found 10"), ([1.5, 2.0], "expected (int64|whole)")):
        for start in ([3, 4], [3.0, 4.0]):
            store = DatasetStore(fields=[field])
            row = {"action": 0, "reward": 0.0, "done": 0}
            store.append(row | {"tokens": start})
            with pytest.raises(DataError, match=said):
                store.append(row | {"tokens": value})
            with pytest.raises(DataError, match=said):
                store.append(row | {"tokens": np.array(value)})
            with pytest.raises(DataError, match=said):
                store.extend({name: [it] * 2 for name, it in (row | {"tokens": value}).items()})
            assert len(store) == 1


def test_a_single_text_is_not_taken_for_a_list_of_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"columns: expected a list of names, found 'obs'; write \['obs'\]"):
        check_list("columns", "obs")
    with pytest.raises(ConfigError, match="expected a list of names, found 3"):
        check_list("columns", 3)  # type: ignore[arg-type, type-var]
    assert check_list("columns", ["obs"]) == ("obs",)
    # Its letters would be folders, and the first of them that of everything.
    (tmp_path / "a.png").write_bytes(encode_png(np.zeros((2, 2, 3), np.uint8)))
    with pytest.raises(ConfigError, match="image_roots: expected a list"):
        decode_image(str(tmp_path / "a.png"), image_roots=str(tmp_path))
