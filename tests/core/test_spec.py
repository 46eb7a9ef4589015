"""What a batch is said to hold before it is made: fields, specs, alignment."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, ConfigError, DatasetStore, Field, FieldSpec, MissingFieldError, Spec

TABLE = pa.table(
    {
        "action": [1, 2],
        "reward": [0.5, 1.0],
        "xformed_reward": [0.5, 1.0],
        "done": [0, 1],
        "episode_step": pa.array([0, None], pa.int32()),
        "metadata_q_star": pa.array([[1.0, 2.0, 3.0]] * 2, pa.list_(pa.float32())),
        "observation": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float32(), 2)),
        "observation_discrete": pa.array([4, 5], pa.uint8()),
        "observation_image": pa.array([[[1, 2], [3, 4]]] * 2, pa.list_(pa.list_(pa.uint8()))),
    }
)
# The documented table: field, dtype, shape of a step, column, dtype it is stored and best moved in.
DOCUMENTED = [
    ("action", "int64", (), "action", "int64"),
    ("reward", "float32", (), "reward", "float32"),
    ("xformed_reward", "float32", (), "xformed_reward", "float32"),
    ("done", "int64", (), "done", "int64"),
    ("time", "int64", (), "episode_step", "int32"),
    ("q_star", "float32", (3,), "metadata_q_star", "float32"),
    ("obs_continuous", "float64", (2,), "observation", "float32"),
    ("obs_discrete", "int64", (), "observation_discrete", "uint8"),
    ("obs_image", "int64", (4,), "observation_image", "uint8"),
]


def test_the_documented_table() -> None:
    source = BatchSource(DatasetStore().from_dataset(TABLE), 2, 1, sampling="last")
    spec = source.spec
    assert [(f.name, f.dtype.name, f.shape, f.column, str(f.stored_dtype)) for f in spec.values()] == DOCUMENTED
    assert list(spec) == [line[0] for line in DOCUMENTED]
    assert len(spec) == 9
    assert spec.alignment == "arrived"
    assert spec["obs_image"].image_shape == (2, 2, 1)
    assert spec["reward"].image_shape is None
    batch = source[0]
    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
        name: (field.dtype, (1, 2, *field.shape)) for name, field in spec.items()
    }
    assert batch["time"].tolist() == [[0, -1]]
    required = ["action", "reward", "done"]
    assert list(BatchSource(DatasetStore().from_dataset(TABLE.select(required)), 1, 1).spec) == required
    varied = spec["q_star"].replace(shape=(4,))
    assert (varied.shape, varied.column, spec["q_star"].shape) == ((4,), "metadata_q_star", (3,))


def test_a_spec_is_a_value() -> None:
    store = DatasetStore().from_dataset(TABLE)
    one, same = BatchSource(store, 1, 1).spec, BatchSource(store, 2, 1).spec
    other = BatchSource(store, 1, 1, dtypes={"reward": "float64"}).spec
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert pickle.loads(pickle.dumps(one)) == one
    assert other["reward"].dtype == np.float64
    with pytest.raises((TypeError, dataclasses.FrozenInstanceError)):
        one["reward"] = other["reward"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        one["reward"].dtype = np.dtype("int8")  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.fields["x"] = one["reward"]  # type: ignore[index]
    assert one != Spec(one.fields, "outgoing")
    assert dict(one) == dict(one.fields)


def test_a_spec_names_what_it_has() -> None:
    spec = BatchSource(DatasetStore().from_dataset(TABLE), 1, 1).spec
    with pytest.raises(MissingFieldError, match=r"expected one of \['action'.*found 'rewards'"):
        spec["rewards"]
    assert "rewards" not in spec
    assert spec.get("rewards") is None
    with pytest.raises(ConfigError, match="alignment"):
        Spec({}, "sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "x"}, ("x", "x", None, None)),
        ({"name": "x", "column": "y"}, ("x", "y", None, None)),
        ({"name": "x", "dtype": "float16", "shape": [2, 3]}, ("x", "x", np.dtype("float16"), (2, 3))),
        ({"name": "x", "dtype": np.uint8, "shape": ()}, ("x", "x", np.dtype("uint8"), ())),
    ],
    ids=str,
)
def test_fields(options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    field = Field(**options)
    assert (field.name, field.column, field.dtype, field.shape) == expected
    assert field == Field(**options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        field.name = "z"  # type: ignore[misc]


@pytest.mark.parametrize("given", [FieldSpec("y", np.dtype("float32"), ()), "float32"])
def test_a_field_is_under_its_name(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"spec: field 'x': expected a FieldSpec with the name 'x', found .*(y|float32)"
    ):
        Spec({"x": given})


def test_custom_field_dtype_defaults_to_the_stored_one() -> None:
    table = TABLE.append_column("half", pa.array([0.5, 1.5], pa.float16())).append_column(
        "flag", pa.array([True, False])
    )
    source = BatchSource(DatasetStore(fields=[Field("half"), Field("flag")]).from_dataset(table), 2, 1, sampling="last")
    assert source.spec["half"].dtype == np.float16
    assert source.spec["flag"].dtype == np.bool_
    assert source[0]["flag"].tolist() == [[True, False]]
    assert source[0]["half"].tolist() == [[0.5, 1.5]]
