"""What a study recorded: how it comes back, which runs are compared, and what their record proves."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mouse_study
from mouse_core import ConfigError, DataError, SchemaError, StorageError
from mouse_study import SCHEMA, Results, Run, pairs, same_data
from mouse_study.comparing import verdict

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


def run(framework: str = "torch", **facts: Any) -> Run:
    usual = {"status": "done", "steps": 50, "digest": "ab" * 16, "fingerprint": "cd" * 8}
    return Run(run=f"v/{framework}/0", variant="v", framework=framework, seed=0, **usual | facts)


@pytest.mark.parametrize(
    ("both", "other", "said"),
    [
        ({}, {}, ["steps 0 to 49", "ab" * 16, "fingerprint " + "cd" * 8]),
        ({"status": "partial", "steps": 20}, {}, ["steps 0 to 19", "later steps are unknown"]),
        ({}, {"fingerprint": "ef" * 8}, ["differ"]),
        ({}, {"fingerprint": None}, ["not recorded"]),
    ],
)
def test_equal_digests_over_equal_steps_prove_it_and_say_of_what(both: Any, other: Any, said: list[str]) -> None:
    found = same_data(run(**both), run("jax", **both, **other))
    assert found.proven
    assert all(one in found.reason for one in said)
    assert ("are unknown" in found.reason) == bool(both)


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ({"digest": None}, {}, "no digest of the batches of torch"),
        ({"digest": ""}, {"digest": None}, "no digest of the batches of torch and jax"),
        ({}, {"digest": "ff" * 16}, "the digests differ"),
        ({}, {"steps": 49, "status": "partial"}, "torch took 50 steps and jax 49"),
        ({"steps": 0}, {"steps": 0}, "torch took no step"),
    ],
)
def test_nothing_is_proven_without_a_reason_being_said(left: Any, right: Any, said: str) -> None:
    found = same_data(run(**left), run("jax", **right))
    assert not found.proven
    assert said in found.reason


def test_pairs_differ_in_nothing_but_the_framework() -> None:
    results = planted(variants=("b", "a"), frameworks=("torch", "jax", "numpy"), seeds=2)
    found = pairs(results)
    assert [(pair.left.run, pair.right.run) for pair in found[:4]] == [
        ("a/jax/0", "a/numpy/0"),
        ("a/jax/0", "a/torch/0"),
        ("a/numpy/0", "a/torch/0"),
        ("a/jax/1", "a/numpy/1"),
    ]
    assert len(found) == 12
    assert verdict(found).reason == "same data: proven, for 12 pairs of runs"


def test_pairs_are_compared_where_both_have_values() -> None:
    left, right = run(), run("jax")
    rows = [(left, step, "loss", 1.0) for step in (0, 2, 4, 6)]
    rows += [(right, step, "loss", value) for step, value in ((2, 1.0), (3, 9.0), (4, 1.0), (6, 1.5))]
    (pair,) = pairs(Results("one", 50, (left, right), table_of(rows)))
    assert pair.steps.tolist() == [2, 4, 6]
    assert pair.difference.tolist() == pytest.approx([0.0, 0.0, 1 / 3])
    assert (pair.parts(0.1), pair.parts(0.5)) == (6, None)
    (none,) = pairs(Results("one", 50, (left, right), table_of([])))
    assert none.steps.size == 0
    assert none.parts(0.0) is None


def test_the_verdict_is_over_all_pairs() -> None:
    assert "nothing to prove" in verdict([]).reason
    results = planted(seeds=3, unlike={"default/jax/1": {"digest": None}})
    found = verdict(mouse_study.pairs(results))
    assert (found.proven, found.reason) == (False, "same data: not proven for 1 of 3 pairs")
    missing = verdict(mouse_study.pairs(planted(seeds=2)), ["default/jax/2", "default/torch/2", "b/jax/0"])
    assert (missing.proven, missing.reason) == (
        False,
        "same data: proven, for 2 pairs of runs; not begun: b/jax/0, default/jax/2, default/torch/2",
    )
    runs = tuple(dataclasses.replace(one, status="partial") for one in planted(seeds=1).runs)
    begun = dataclasses.replace(planted(seeds=1), runs=runs)
    assert verdict(pairs(begun)).reason == "same data: proven, for 1 pair of runs, for their steps so far"


def table_of(rows: Sequence[tuple[Run, int, str, float]]) -> pa.Table:
    """The table of single values."""
    listed = [(run.run, run.variant, run.framework, run.seed, *value) for run, *value in rows]
    columns = dict(zip(SCHEMA.names, zip(*listed, strict=True) if listed else [()] * len(SCHEMA), strict=True))
    return pa.table(columns, SCHEMA).sort_by([(name, "ascending") for name in ("run", "step", "name")])


def planted(
    *,
    variants: tuple[str, ...] = ("default",),
    frameworks: tuple[str, ...] = ("torch", "jax"),
    seeds: int,
    unlike: dict[str, dict[str, Any]] | None = None,
) -> Results:
    """Finished runs of 20 steps without values, whose digests are equal for equal seeds.

    ``unlike`` has other facts of a run, by its name.
    """
    runs = []
    for variant in variants:
        for framework in frameworks:
            for seed in range(seeds):
                name = f"{variant}/{framework}/{seed}"
                facts: dict[str, Any] = {"status": "done", "steps": 20, "digest": f"{seed:02x}" * 16}
                facts |= (unlike or {}).get(name, {})
                runs.append(Run(run=name, variant=variant, framework=framework, seed=seed, **facts))
    return Results("planted study", 20, tuple(runs), table_of([]))
