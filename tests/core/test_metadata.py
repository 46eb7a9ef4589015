"""What a dataset says of itself, and what becomes of it on its way."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, Field, SchemaError
from mouse_core.metadata import KEY, DatasetMetadata, joined, read_metadata, with_metadata

WHOLE = DatasetMetadata(
    alignment="outgoing",
    environments=["Hopper-v5"],
    tasks={7: "pick up the cube", 2: 'say "ä\n"'},
    fields=[
        Field("log_prob", dtype="float32", shape=(), fill=float("-inf")),
        Field("flags", shape=(2, 3), pad=0),
        Field("code", bounds=(0, 5)),
        Field("return", fill=float("nan")),
        Field("value", bounds=(-np.inf, np.float32(0.5))),
        Field("flag", bounds=(np.int64(0), np.bool_(True))),
    ],
    max_action_dim=3,
    max_obs_continuous_dim=11,
    dimensions={"observation": ["elbow", 'wrist "ä\n"']},
    frames_per_second=[12.5, 30],
    robots=["arm", "ä\n"],
)


FIELDS = [
    Field("a", column="b", dtype="float32", vector_dtype="uint8", shape=(), fill=0, required=True),
    Field("\u00e4 b", shape=(2, 3), pad=-0.5, max_ndim=3),
    Field("code", dtype="int16", bounds=(0, 2), labels=("no", "yes", "perhaps"), fill=1),
    Field("flag", dtype="bool", fill=False),
    Field("picture", shape=(8, 6, 3), image=True),
    Field("vector", dim=4, min_ndim=1, fill=float("-inf")),
]


def plain(rows: int = 6, **columns: Any) -> datasets.Dataset:
    standard = {"action": [[0.5, 0.25]] * rows, "reward": [0.5] * rows, "done": [0] * rows}
    return datasets.Dataset.from_dict(standard | columns)


@given(
    st.builds(
        DatasetMetadata,
        alignment=st.sampled_from([None, "arrived", "outgoing"]),
        environments=st.lists(st.text(max_size=5), max_size=3),
        tasks=st.dictionaries(st.integers(), st.text(max_size=8), max_size=3),
        fields=st.lists(st.sampled_from(FIELDS), max_size=3, unique_by=lambda item: item.name),
        max_action_dim=st.none() | st.integers(1, 99),
    )
)
def test_what_is_said_comes_back(metadata: DatasetMetadata) -> None:
    text = json.dumps(metadata.to_json())
    assert "\n" not in text
    assert DatasetMetadata.from_json(text) == DatasetMetadata.from_json(metadata.to_json()) == metadata
    assert json.loads(text) == metadata.to_json()
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    said = with_metadata(plain(), metadata)
    assert read_metadata(said) == metadata
    assert read_metadata(said.data.table) == metadata
    # The features are all that datasets writes to Parquet.
    schema = said.features.arrow_schema
    assert read_metadata(schema) == metadata
    assert read_metadata(with_metadata(said, DatasetMetadata())) == DatasetMetadata()
    assert bool(metadata) == (metadata != DatasetMetadata())


WAYS: dict[str, Callable[[datasets.Dataset], Any]] = {
    "select": lambda rows: rows.select([3, 1]),
    "shuffle": lambda rows: rows.shuffle(seed=0).flatten_indices(),
    "filter": lambda rows: rows.filter(lambda row, number: number > 2, with_indices=True),
    "map": lambda rows: rows.map(lambda row: {"done": row["done"] + 1, "reward": 2.0, "more": 1}),
    "map to other columns": lambda rows: rows.map(
        lambda row: {"reward": 0.0, "done": 0, "action": 1}, remove_columns=rows.column_names
    ),
    "add_column": lambda rows: rows.add_column("more", [1] * len(rows)),
    "cast_column": lambda rows: rows.cast_column("done", datasets.Value("int8")),
    "cast": lambda rows: rows.cast(plain().features),
    "rename_column": lambda rows: rows.rename_column("done", "terminated"),
    "train_test_split": lambda rows: rows.train_test_split(0.5, seed=0)["test"],
    "shard": lambda rows: rows.shard(2, 1),
    "concatenate": lambda rows: datasets.concatenate_datasets([rows, rows]),
    "interleave": lambda rows: datasets.interleave_datasets([rows, rows]),
    "with_format": lambda rows: rows.with_format("numpy"),
    "iterable": lambda rows: rows.to_iterable_dataset(),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_survives_what_datasets_does(way: str) -> None:
    assert read_metadata(WAYS[way](with_metadata(plain(), WHOLE))) == WHOLE


def test_tables_that_datasets_did_not_make_tell_it_too(tmp_path: Path) -> None:
    table = pa.table({"done": [0, 1], "reward": pa.array([0, 1], pa.float32()), "text": ["a", "b"]})
    said = with_metadata(table, WHOLE)
    assert read_metadata(datasets.Dataset(said)) == WHOLE
    pq.write_table(said, tmp_path / "rows.parquet")
    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "c"))
    assert read_metadata(loaded["train"]) == WHOLE
    assert read_metadata(with_metadata(said, DatasetMetadata())) == DatasetMetadata()
    # What others keep under the name of datasets is theirs.
    theirs = table.replace_schema_metadata({"huggingface": "none of it"})
    assert with_metadata(theirs, WHOLE).schema.metadata[b"huggingface"] == b"none of it"
    assert read_metadata(with_metadata(theirs, WHOLE)) == WHOLE


def test_it_survives_files(tmp_path: Path) -> None:
    said = with_metadata(plain(), WHOLE)
    said.save_to_disk(str(tmp_path / "saved"))
    assert read_metadata(datasets.load_from_disk(str(tmp_path / "saved"))) == WHOLE
    file = next((tmp_path / "saved").glob("*.arrow"))
    assert read_metadata(datasets.Dataset.from_file(str(file))) == WHOLE
    said.to_parquet(tmp_path / "rows.parquet")
    assert read_metadata(pq.read_table(tmp_path / "rows.parquet")) == WHOLE
    assert read_metadata(pq.read_schema(tmp_path / "rows.parquet")) == WHOLE
    load = partial(datasets.load_dataset, "parquet", data_files=str(tmp_path / "rows.parquet"), split="train")
    loaded = load(cache_dir=str(tmp_path / "cache"))
    assert read_metadata(loaded) == WHOLE
    assert read_metadata(loaded.map(lambda row: {"reward": 1.0}).select([0])) == WHOLE
    assert read_metadata(load(streaming=True)) == WHOLE
    # Another type for one column takes its feature along; the alignment stands at two of them.
    recast = loaded.cast_column("done", datasets.Value("int8"))
    assert read_metadata(recast).alignment == "outgoing"
    # As the Hub's card says it.
    features = datasets.Features._from_yaml_list(said.features._to_yaml_list())
    assert read_metadata(datasets.Dataset.from_dict(plain().to_dict(), features=features)) == WHOLE


def test_plain_tables() -> None:
    table = pa.table({"done": [0], "reward": [0.0]})
    said = with_metadata(table, WHOLE)
    assert read_metadata(said) == read_metadata(said.slice(0, 1)) == read_metadata(said.to_batches()[0]) == WHOLE
    assert said.schema.metadata.keys() == {KEY.encode(), b"huggingface"}
    assert read_metadata(with_metadata(said, DatasetMetadata())) == DatasetMetadata()
    assert KEY.encode() not in with_metadata(said, DatasetMetadata()).schema.metadata
    assert read_metadata(datasets.Features(x=datasets.Value("int8")).arrow_schema) == DatasetMetadata()


def test_other_texts_stay() -> None:
    features = datasets.Features(done=datasets.Value("int64", id="theirs"), reward=datasets.Value("float32"))
    info = datasets.DatasetInfo(description="Recorded on a Sunday.", features=features)
    rows = datasets.Dataset.from_dict({"done": [0], "reward": [0.0]}, features=features, info=info)
    said = with_metadata(with_metadata(rows, DatasetMetadata("arrived")), WHOLE)
    assert read_metadata(said) == WHOLE
    assert said.info.description.startswith("Recorded on a Sunday.\n")
    assert said.features["done"].id.startswith("theirs\n")
    again = with_metadata(said, DatasetMetadata())
    assert again.info.description == "Recorded on a Sunday."
    assert again.features == rows.features
    assert rows.features["done"].id == "theirs"


def test_results_that_datasets_has_cached_are_of_other_rows(tmp_path: Path) -> None:
    plain().save_to_disk(str(tmp_path / "saved"))
    rows = datasets.load_from_disk(str(tmp_path / "saved"))
    rows.map(_double)
    assert read_metadata(with_metadata(rows, WHOLE).map(_double).features) == WHOLE


def _double(row: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 2 * row["reward"]}


def test_contradictions_name_both() -> None:
    parts = [
        ("a", DatasetMetadata("arrived", ["X"], {1: "pick"}, [Field("f", dtype="int8")], 2, 3)),
        ("b", DatasetMetadata("outgoing", ["Y"], {1: "place"}, [Field("f", dtype="int16")], 4, 5)),
    ]
    same, x, y = (DatasetMetadata(environments=list(names)) for names in ("XY", "X", "Y"))
    one = DatasetMetadata(dimensions={"a": ["x"], "b": ["y"]})
    other = DatasetMetadata(dimensions={"a": ["z"], "c": ["y"]})
    assert joined([("a", one), ("b", other), ("c", one)]) == DatasetMetadata(dimensions={"b": ["y"], "c": ["y"]})
    rates = [DatasetMetadata(frames_per_second=[9 - k], robots=["arm"]) for k in range(2)]
    several = DatasetMetadata(frames_per_second=[9, 8], robots=["arm"])
    assert joined([("a", rates[0]), ("b", rates[1]), ("c", rates[0])]) == several
    assert joined([("a", x), ("b", y), ("c", same)]) == same
    for name, message in {
        "alignment": "alignment: expected one value, found 'arrived' in a and 'outgoing' in b",
        "tasks": "tasks: expected one text for task 1, found 'pick' in a and 'place' in b",
        "fields": r"fields: expected one field 'f', found .*int8.* in a and .*int16.* in b",
        "max_action_dim": "max_action_dim: expected one value, found 2 in a and 4 in b",
        "max_obs_continuous_dim": "max_obs_continuous_dim: expected one value, found 3 in a and 5 in b",
    }.items():
        with pytest.raises(SchemaError, match=message):
            joined((where, DatasetMetadata(**{name: getattr(metadata, name)})) for where, metadata in parts)
    # Datasets join descriptions, and so what their parts say.
    one, other = plain(), plain()
    for described, alignment in ((one, "arrived"), (other, "outgoing")):
        described.info.description = f"mouse_data: {json.dumps(DatasetMetadata(alignment).to_json())}"
    with pytest.raises(SchemaError, match=r"'arrived' in the description of rows, line 1 and 'outgoing' in .* line 2"):
        read_metadata(datasets.concatenate_datasets([one, other]), label="rows")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON, found '{'"),
        ("[]", "expected a JSON object with a version"),
        ('{"alignment": "arrived"}', "expected a JSON object with a version"),
        ('{"version": 2}', "expected version 1 at most, found version 2, which a newer mouse-data wrote"),
        ('{"version": 1, "colour": 1}', "metadata: expected attributes among .*, found .*colour"),
        ('{"version": 1, "alignment": "sideways"}', "alignment: expected one of"),
        ('{"version": 1, "tasks": {"one": "x"}}', "mouse_data: invalid literal"),
        ('{"version": 1, "tasks": [1]}', "mouse_data: "),
        ('{"version": 1, "environments": "Hopper"}', "environments: expected a list of names"),
        ('{"version": 1, "fields": [{"name": "x", "colour": 1}]}', "fields: expected attributes among"),
        ('{"version": 1, "fields": [{"name": "x", "dtype": "rainbow"}]}', "expected a NumPy dtype"),
        ('{"version": 1, "max_action_dim": 0}', "max_action_dim: expected a positive integer or None, found 0"),
        ('{"version": 1, "max_obs_continuous_dim": 100000000000}', "dim: expected at most 16777216 values per step"),
        ('{"version": 1, "fields": [{"name": "x", "shape": [100000, 100000]}]}', "x: expected at most 16777216 values"),
        ('{"version": 1, "fields": [{"name": "x", "dim": 100000000000}]}', "x: expected at most 16777216 values"),
        ('{"version": 1, "fields": [{"name": "x", "max_ndim": "1"}]}', "'x': expected max_ndim as an integer"),
        ('{"version": 1, "dimensions": {"x": "elbow"}}', "dimensions: expected a dict from column to a list of names"),
        ('{"version": 1, "dimensions": [1]}', "dimensions: expected a dict from column to a list of names"),
        ('{"version": 1, "frames_per_second": [0]}', "frames_per_second: expected a list of positive numbers"),
        ('{"version": 1, "frames_per_second": 30}', "frames_per_second: expected a list of positive numbers"),
        ('{"version": 1, "robots": "arm"}', "robots: expected a list of names of robots"),
        ('{"version": 1, "fields": [{"name": "x", "column": [1]}]}', "'x': expected the name of a column"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=f"the metadata of rows: .*{message}"):
        read_metadata(pa.table({"x": [1]}).replace_schema_metadata({KEY: text}), label="rows")


def test_numbers_of_numpy_are_numbers_and_other_values_are_refused() -> None:
    metadata = DatasetMetadata(tasks={np.int64(3): "x"}, max_action_dim=np.int32(4))
    assert metadata.to_json() == {"version": 1, "tasks": {"3": "x"}, "max_action_dim": 4}
    wrong: dict[str, Any] = {"alignment": "up", "environments": "Hopper", "tasks": {"a": "b"}, "fields": ["x"]}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=name):
            DatasetMetadata(**{name: value})
