"""preprocess: a function over all rows, in processes or here, interrupted and taken up again, opened when done."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import ConfigError, DataError, DatasetStore, StorageError, WorkerError
from mouse_core import formats as every_format
from mouse_core.errors import AlignmentWarning
from mouse_core.formats.converting import preprocess
from mouse_core.images.pixels import encode_png
from mouse_core.store.derived import DerivedStore, Return
from mouse_core.testing import example_columns, example_store

ROWS = 300


def doubled(rows: dict[str, Any], *, factor: float = 2.0) -> dict[str, Any]:
    """A new column and another observation; the discrete one is left out."""
    return {
        "observation": (factor * rows["observation"]).astype(np.float32),
        "length": np.full(len(rows["reward"]), len(rows["reward"])),
        "observation_discrete": None,
    }


def sums(rows: dict[str, Any]) -> dict[str, Any]:
    """A number an episode, which needs all of it."""
    begins = np.flatnonzero(rows["episode_step"] == 0)
    total = np.add.reduceat(rows["reward"], begins)
    return {"episode_return": np.repeat(total, np.diff([*begins, len(rows["reward"])]))}


def recorded(folder: Path, rows: int = ROWS) -> Any:
    if not folder.exists():
        example_store(rows).to_dataset().save_to_disk(folder)
    return datasets.load_from_disk(folder)


def columns_of(path: str | Path) -> dict[str, Any]:
    return every_format.open(path).to_table().to_pydict()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_what_the_function_makes_of_them(num_workers: int, tmp_path: Path) -> None:
    rows = recorded(tmp_path / "rows")
    done = preprocess(
        rows, doubled, tmp_path / "new", columns=["observation", "reward"], num_workers=num_workers, block_rows=50
    )
    assert (done.rows, done.resumed_rows, done.reopened) == (ROWS, 0, False)
    found, before = columns_of(done.path), rows.to_dict()
    wanted = example_columns(ROWS)
    np.testing.assert_array_equal(found.pop("observation"), (2 * wanted["observation"]).astype(np.float32))
    assert len(set(found.pop("length"))) > 1  # blocks are of whole episodes
    del before["observation"], before["observation_discrete"]
    assert found == before
    assert sorted(os.listdir(tmp_path)) == ["new", "rows"]
    # However it is made, the files are the same.
    again = preprocess(rows, doubled, tmp_path / "again", columns=["observation", "reward"], block_rows=50)
    assert again.digest == done.digest == every_format.rows_digest(every_format.open(done.path))
    same = [(tmp_path / name / "data-00003-of-00006.arrow").read_bytes() for name in ("new", "again")]
    assert same[0] == same[1]


def test_what_the_rows_say_of_themselves_is_kept(tmp_path: Path) -> None:
    store = DatasetStore(alignment="outgoing", max_action_dim=4)
    store.extend(example_columns(60))
    done = preprocess(store, doubled, tmp_path / "new")
    assert done.to_store().metadata == store.metadata
    assert done.to_store().alignment == "outgoing"
    for number, rows in enumerate((store.to_dataset(), every_format.open(done.path), done.path)):
        again = preprocess(rows, doubled, tmp_path / str(number), columns=["reward", "observation"])
        assert again.to_store().alignment == "outgoing"


def test_parts_of_a_store_that_differ_and_derived_fields_are_columns(tmp_path: Path) -> None:
    store = DatasetStore().from_dataset(recorded(tmp_path / "rows", 40))
    fewer = {name: values for name, values in example_columns(50, first=40).items() if name != "xformed_reward"}
    store.from_dataset(pa.table({name: list(values) for name, values in fewer.items() if values.ndim < 3}))
    derived = DerivedStore(store, {"returns_to_go": Return()})
    done = preprocess(derived, sums, tmp_path / "new", columns=["reward", "episode_step"], block_rows=30)
    table = every_format.open(done.path).to_table()
    found = table.to_pydict()
    assert found["xformed_reward"] == [*example_columns(40)["xformed_reward"].tolist(), *[None] * 50]
    # datasets 5.0 lists null images as arrays of NaN.
    assert table["observation_image"].is_null().to_pylist() == [False] * 40 + [True] * 50
    snapshot = derived.snapshot()
    assert found["returns_to_go"] == snapshot.stored("returns_to_go", np.arange(90)).tolist()


def halved(rows: dict[str, Any]) -> dict[str, Any]:
    return {"observation_image": rows["observation_image"][:, ::2]}


def test_encoded_images_are_given_as_pixels(tmp_path: Path) -> None:
    columns = example_columns(60)
    pixels = columns["observation_image"]
    encoded = [{"bytes": encode_png(one, dtype=np.uint8), "path": None} for one in pixels]
    table = pa.table({name: list(values) for name, values in columns.items() if values.ndim < 3})
    table = table.append_column("observation_image", pa.array(encoded))
    done = preprocess(table, halved, tmp_path / "new", columns=["observation_image"], block_rows=20)
    np.testing.assert_array_equal(columns_of(done.path)["observation_image"], pixels[:, ::2])
    kept = preprocess(table, sums, tmp_path / "kept", columns=["reward", "episode_step"])
    assert columns_of(kept.path)["observation_image"] == encoded


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "rows")
    first = preprocess(rows, doubled, tmp_path / "new")
    before = (tmp_path / "new" / "state.json").stat().st_mtime_ns
    again = preprocess(tmp_path / "rows", doubled, tmp_path / "new", num_workers=2)
    assert again.reopened
    assert (again.rows, again.digest) == (first.rows, first.digest)
    assert (tmp_path / "new" / "state.json").stat().st_mtime_ns == before


def test_other_rows_or_another_function_are_told_apart(tmp_path: Path) -> None:
    def run(rows: int = ROWS, function: Any = doubled, **options: Any) -> None:
        preprocess(example_store(rows), function, tmp_path / "new", **options)

    run()
    others: list[tuple[dict[str, Any], str]] = [
        ({"function": sums, "columns": ["reward", "episode_step"]}, "function, code of the function, columns"),
        ({"function": partial(doubled, factor=3.0)}, "code of the function"),
        ({"version": "2"}, "version"),
        ({"rows": 200}, "rows"),
        ({"columns": ["observation", "reward"]}, "columns"),
    ]
    for changes, what in others:
        with pytest.raises(ConfigError, match=f"was made with other inputs, which differ in {what}; give another path"):
            run(**changes)


def with_one_other(row: int) -> pa.Table:
    columns = {name: np.array(values) for name, values in example_columns(ROWS).items() if values.ndim < 3}
    columns["reward"][row] += 3
    return pa.table({name: list(values) for name, values in columns.items()})


def test_one_row_of_others_is_enough(tmp_path: Path) -> None:
    by_reward(tmp_path, a_sum, with_one_other(0))
    assert by_reward(tmp_path, a_sum, with_one_other(0)).reopened
    other = np.array([row for row in range(1, ROWS - 1) if row % 43])[100]
    by_reward(tmp_path, a_sum, with_one_other(int(other)), "other")
    with pytest.raises(ConfigError, match=r"made with other inputs, which differ in some of the rows \d+\.\.\d+; give"):
        by_reward(tmp_path, a_sum, with_one_other(int(other) + 1), "other")
    # What is half done, too.
    function = stopped(tmp_path, 7, with_one_other(20), "half")
    with pytest.raises(ConfigError, match=r"unfinished work .* differ in some of the rows .*; finish it, or delete"):
        by_reward(tmp_path, function, with_one_other(21), "half")


def a_sum(rows: dict[str, Any]) -> dict[str, Any]:
    return {"sum": rows["reward"].cumsum()}


def in_place(rows: dict[str, Any], *, column: str) -> dict[str, Any]:
    rows[column][:] = rows[column][0]
    return rows


def test_changes_in_place_are_refused(tmp_path: Path) -> None:
    columns: dict[str, Any] = {name: list(example_columns(20)[name]) for name in ("action", "reward", "done")}
    table = pa.table({**columns, "flag": [row > 3 for row in range(20)], "task": [f"task {row}" for row in range(20)]})
    for column in ("reward", "flag", "task"):
        with pytest.raises(WorkerError, match="read-only"):
            preprocess(table, partial(in_place, column=column), tmp_path / "new")


def test_a_note_that_is_damaged_says_what_to_do(tmp_path: Path) -> None:
    function = stopped(tmp_path, 4)
    job = tmp_path / ".new.preprocessing" / "job.json"
    noted = json.loads(job.read_text())
    without = [
        {key: value for key, value in noted.items() if key != name} for name in ("parts", "facts", "fingerprint")
    ]
    for said in ("", "{", "[]", *map(json.dumps, without)):
        job.write_text(said)
        with pytest.raises(DataError, match=r"job\.json.*delete the folder .*\.new\.preprocessing'?, and call again"):
            by_reward(tmp_path, function)
        assert job.exists()


ANEW = """
import sys
from functools import partial
from mouse_core.formats.converting import preprocess
from mouse_core.testing import example_store

def scaled(rows, *, names, factor=1):
    return {"scaled": rows["reward"] * FACTOR}

function = partial(scaled, names={"alpha", "beta", "gamma", "delta"})
print(preprocess(example_store(40), function, sys.argv[1], columns=["reward"]).reopened)
"""


@pytest.mark.long
def test_a_function_is_known_by_what_it_does_where_its_text_is_not(tmp_path: Path) -> None:
    def run(factor: int, hashes: str) -> tuple[str, str]:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), *sys.path]), PYTHONHASHSEED=hashes)
        done = subprocess.run(
            [sys.executable, "-", str(tmp_path / "new")],
            input=ANEW.replace("FACTOR", str(factor)),
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip(), done.stderr

    assert [run(2, hashes)[0] for hashes in ("1", "2")] == ["False", "True"]
    out, error = run(3, "1")
    assert not out
    assert "differ in code of the function" in error


def named(rows: dict[str, Any], *, names: list[str]) -> dict[str, Any]:
    return {}


def test_equal_arguments_are_the_same_whatever_objects_they_are(tmp_path: Path) -> None:
    one = "x" * 30
    again = "".join(["x"] * 30)
    preprocess(example_store(20), partial(named, names=[one, one]), tmp_path / "new", columns=["reward"])
    function = partial(named, names=[one, again])
    assert preprocess(example_store(20), function, tmp_path / "new", columns=["reward"]).reopened


def waiting(rows: dict[str, Any], *, folder: str) -> dict[str, Any]:
    """What it has begun is counted by files; it waits for one that says that it may go on."""
    name = f"{rows['observation'][0, 0]}-{os.getpid()}-{time.monotonic_ns()}"
    (Path(folder) / name).touch()
    while len(os.listdir(folder)) > 4 and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return {"seen": rows["reward"] + 1}


KILLED = """
import sys
from functools import partial
from tests.core.formats.test_preprocess import recorded, waiting
from mouse_core.formats.converting import preprocess
from mouse_core.images.pixels import encode_png
from pathlib import Path

if __name__ == "__main__":
    rows, folder, target, workers = sys.argv[1:]
    preprocess(
        recorded(Path(rows)), partial(waiting, folder=folder), target, columns=["observation", "reward"],
        num_workers=int(workers), block_rows=30,
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_after_a_kill_it_goes_on(workers: int, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    counted.mkdir()
    rows, target = tmp_path / "rows", tmp_path / "new"
    recorded(rows)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([os.getcwd(), *sys.path]))
    command = [sys.executable, str(script), str(rows), str(counted), str(target), str(workers)]
    running = subprocess.Popen(command, env=environment)
    job = target.with_name(".new.preprocessing") / "job.json"
    until = time.monotonic() + 60
    # Four may go on; from then on each process waits in the block that it has begun, so that none is yet to begin one.
    waiting_in_all = 4 + max(workers, 1)
    while (len(os.listdir(counted)) < waiting_in_all or not job.exists()) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.7)  # what is done is noted so often
    running.send_signal(signal.SIGKILL)
    running.wait()
    begun = len(os.listdir(counted))
    noted = json.loads(job.read_text())["parts"]
    assert noted
    assert not target.exists()
    (counted / "go").touch()
    time.sleep(0.5)  # whoever was left behind ends with the one that was killed
    at_rest = len(os.listdir(counted))
    assert at_rest == begun + 1
    done = preprocess(
        recorded(rows), partial(waiting, folder=str(counted)), target, columns=["observation", "reward"], block_rows=30
    )
    assert done.resumed_rows == sum(part["rows"] for part in noted.values())
    blocks = len([name for name in os.listdir(done.path) if name.endswith(".arrow")])
    assert len(os.listdir(counted)) - at_rest == blocks - len(noted)
    np.testing.assert_array_equal(columns_of(done.path)["seen"], example_columns(ROWS)["reward"] + 1)
    assert sorted(os.listdir(tmp_path)) == ["counted", "new", "rows", "script.py"]


def by_reward(folder: Path, function: Any, rows: Any = ROWS, name: str = "new") -> Any:
    """What becomes of rewards in blocks of 30 rows."""
    rows = example_store(rows) if isinstance(rows, int) else rows
    return preprocess(rows, function, folder / name, columns=["reward"], block_rows=30)


def stopped(folder: Path, after: int, rows: Any = ROWS, name: str = "new") -> Any:
    """A function that ended ``by_reward`` at one of its calls, and does not when it is called again."""
    function = partial(raising, after=after, folder=str(folder))
    with pytest.raises(WorkerError, match=r"rows \d+\.\.\d+: the function raised LookupError: no such thing"):
        by_reward(folder, function, rows, name)
    return function


def raising(rows: dict[str, Any], *, after: int, folder: str) -> dict[str, Any]:
    with (Path(folder) / "calls").open("a") as file:
        file.write(".")
    if (Path(folder) / "calls").stat().st_size == after:
        raise LookupError("no such thing")
    return {}


def test_what_was_made_before_an_error_is_kept(tmp_path: Path) -> None:
    function = stopped(tmp_path, 4)
    assert not (tmp_path / "new").exists()
    done = by_reward(tmp_path, function)
    assert done.resumed_rows >= 60
    assert (tmp_path / "calls").stat().st_size == 4 + len(list((tmp_path / "new").glob("*.arrow"))) - 3


def test_unfinished_work_of_something_else_is_not_taken_over_and_a_file_that_was_cut_is_made_again(
    tmp_path: Path,
) -> None:
    function = stopped(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"unfinished work with other inputs, which differ in rows; finish it"):
        by_reward(tmp_path, function, 200)
    (part,) = (tmp_path / ".new.preprocessing").glob("part-00001-*.arrow")
    os.truncate(part, part.stat().st_size - 8)
    assert columns_of(by_reward(tmp_path, function).path)["reward"] == example_columns(ROWS)["reward"].tolist()


def test_a_full_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pa.ipc, "new_stream", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(StorageError, match="No space left on device") as caught:
        preprocess(example_store(ROWS), sums, tmp_path / "new", columns=["reward", "episode_step"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as it comes through processes
    assert os.listdir(tmp_path) == []


def fewer(rows: dict[str, Any]) -> dict[str, Any]:
    return {"reward": rows["reward"][1:]}


def a_list(rows: dict[str, Any]) -> Any:
    return [rows]


def words(rows: dict[str, Any]) -> dict[str, Any]:
    return {"done": np.array(["no"] * len(rows["reward"]))}


def by_size(rows: dict[str, Any]) -> dict[str, Any]:
    return {"new": np.zeros((len(rows["reward"]), 1 + len(rows["reward"]) % 2))}


@pytest.mark.parametrize(
    ("function", "error", "message", "num_workers"),
    [
        (lambda rows: rows, ConfigError, r"can be pickled .*<lambda> .* define the function with def at the top", 0),
        (3, ConfigError, "expected a function of a dict of arrays, found 3", 1),
        (fewer, DataError, r"expected \d+ rows of column 'reward', as the function received, found", 0),
        pytest.param(fewer, DataError, "expected .* as the function received", 1, marks=pytest.mark.slow),
        (a_list, DataError, "expected a function that returns a dict of columns, found", 0),
        (words, DataError, "expected rows that a store accepts", 0),
        (by_size, DataError, "expected the columns of the first rows, 'new' of fixed_size_list", 0),
    ],
)
def test_functions_that_cannot_be_used(
    function: Any, error: type[Exception], message: str, num_workers: int, tmp_path: Path
) -> None:
    options: Any = {"columns": ["reward"], "num_workers": num_workers, "block_rows": 20}
    with pytest.raises(error, match=message):
        preprocess(example_store(ROWS), function, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_bad_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (example_store(20), {"columns": ["rewards"]}, r"columns: expected names among .*, found 'rewards'"),
        (DatasetStore(), {}, "rows: expected at least one row, found none"),
        (example_store(20), {"num_workers": -1}, "num_workers"),
        (example_store(20), {"block_rows": 0}, "block_rows"),
        (example_store(20), {}, "expected a path that does not exist"),
    ]
    for rows, options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            preprocess(rows, sums, tmp_path / "new", **options)


def test_small_rows_are_still_work_for_several_processes(tmp_path: Path) -> None:
    rows = DatasetStore()
    step = np.arange(40_000) % 10
    rows.extend({"action": step, "reward": np.ones(40_000), "done": step == 9, "episode_step": step})
    whole = preprocess(rows, sums, tmp_path / "whole", columns=["reward", "episode_step"], block_rows=40_000)
    shared = preprocess(rows, sums, tmp_path / "shared", columns=["reward", "episode_step"])
    assert [len(list(Path(done.path).glob("*.arrow"))) for done in (whole, shared)] == [1, 32]
    assert whole.digest == shared.digest
    assert columns_of(shared.path)["episode_return"] == [10.0] * 40_000  # blocks are of whole episodes


def test_rewards_where_episodes_begin_are_warned_of_once(tmp_path: Path) -> None:
    rows = {"action": [0] * 20, "reward": [1.0] * 20, "done": [0] * 20, "episode_step": [*range(10)] * 2}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    with pytest.warns(AlignmentWarning) as caught:
        preprocess(tmp_path / "rows", sums, tmp_path / "new", columns=["reward", "episode_step"])
    assert len(caught) == 1
