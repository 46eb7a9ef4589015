"""What a study recorded comes back as it was written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mouse_study
from mouse_core import ConfigError, DataError, SchemaError, StorageError
from mouse_study import Results, Run
from tests.study.planted import table_of

RUNS = (
    Run(run="wide/torch/0", variant="wide", framework="torch", seed=0, status="done", steps=3, digest="ab"),
    Run(run="wide/jax/10", variant="wide", framework="jax", seed=10, status="failed", error="ValueError: no"),
)


def made() -> Results:
    rows = [(RUNS[0], step, "loss", 1.0 / (step + 1)) for step in (2, 0, 1)]
    rows += [(RUNS[0], 2, "evaluation", 7.0), (RUNS[1], 0, "loss", float("nan"))]
    return Results("widths", 3, RUNS, table_of(rows))


def test_results_come_back(tmp_path: Path) -> None:
    results = made()
    results.write(tmp_path / mouse_study.FILE)
    for path in (tmp_path, tmp_path / mouse_study.FILE):
        back = mouse_study.read(path)
        assert (back.name, back.steps) == ("widths", 3)
        assert {run.run: run for run in back.runs} == {run.run: run for run in RUNS}
        assert back.table.schema == mouse_study.SCHEMA
        keys = list(zip(back.table["run"].to_pylist(), back.table["step"].to_pylist(), strict=True))
        assert keys == sorted(keys)
        losses = back.series("loss")
        assert losses.keys() == {"wide/torch/0", "wide/jax/10"}
        steps, values = losses["wide/torch/0"]
        assert (steps.dtype, values.dtype) == (np.int64, np.float64)
        assert (steps.tolist(), values.tolist()) == ([0, 1, 2], [1.0, 0.5, 1 / 3])
        assert back.series("evaluation").keys() == {"wide/torch/0"}
        assert back.series("accuracy") == {}
    assert [path.name for path in tmp_path.iterdir()] == [mouse_study.FILE]


def test_the_form_is_what_it_says(tmp_path: Path) -> None:
    made().write(tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    assert table.column_names == ["run", "variant", "framework", "seed", "step", "name", "value"]
    said = json.loads(table.schema.metadata[b"mouse_study"])
    assert (said["version"], said["name"], said["steps"]) == (1, "widths", 3)
    assert [run["run"] for run in said["runs"]] == ["wide/jax/10", "wide/torch/0"]
    assert said["runs"][1]["status"] == "done"


def rewritten(path: Path, said: dict[str, Any] | None) -> Path:
    metadata = None if said is None else {b"mouse_study": json.dumps(said).encode()}
    pq.write_table(made().table.replace_schema_metadata(metadata), path)
    return path


def test_what_is_no_results_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "r.parquet"
    with pytest.raises(ConfigError, match=r"expected a study's folder with results\.parquet"):
        mouse_study.read(tmp_path)
    file.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"r\.parquet: expected the Parquet file of a study"):
        mouse_study.read(file)
    with pytest.raises(DataError, match=r"metadata 'mouse_study' .*, found none"):
        mouse_study.read(rewritten(file, None))
    with pytest.raises(DataError, match="version 1 at most, found version 2, which a newer mouse-data wrote"):
        mouse_study.read(rewritten(file, {"version": 2}))
    with pytest.raises(DataError, match="expected facts of every run"):
        mouse_study.read(rewritten(file, {"version": 1, "name": "n", "steps": 3, "runs": []}))
    with pytest.raises(SchemaError, match="expected the columns run"):
        Results("n", 3, RUNS, pa.table({"run": ["wide/jax/10"]}))
    for name, value in (("steps", "3"), ("seconds", None), ("digest", ["ab"]), ("versions", "1"), ("seed", 0.5)):
        runs = [dataclasses.asdict(RUNS[0]) | {name: value}, dataclasses.asdict(RUNS[1])]
        with pytest.raises(DataError, match=f"expected {name} of a run to be"):
            mouse_study.read(rewritten(file, {"version": 1, "name": "widths", "steps": 3, "runs": runs}))
    made().write(file)
    table = pq.read_table(file)
    for name in ("run", "step", "name"):
        kept = pa.array([None, *table[name].to_pylist()[1:]], table.schema.field(name).type)
        place = table.schema.get_field_index(name)
        pq.write_table(table.set_column(place, table.schema.field(name), kept), file)
        with pytest.raises(DataError, match=f"expected {name} in each row"):
            mouse_study.read(file)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    made().write(tmp_path / "r.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot write or read the file"):
        made().write(tmp_path / "folder")
    with pytest.raises(StorageError):
        made().write(tmp_path / "missing" / "r.parquet")
    assert mouse_study.read(tmp_path / "r.parquet").series("loss").keys() == {"wide/torch/0", "wide/jax/10"}
