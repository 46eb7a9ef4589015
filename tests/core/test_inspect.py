"""`mouse inspect`: what it counts, against plain Python; what it warns of; what it prints and returns."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import DatasetStore
from mouse_core.cli import main
from mouse_core.formats.base import RowStream
from mouse_core.inspect import Report, inspect
from mouse_core.metadata import DatasetMetadata

Values = list[Any]


def episode(length: int, *, seed: int, end: int = 1, width: int = 3, reward: float | None = None) -> dict[str, Values]:
    """One episode of `length` transitions, as `length + 1` rows."""
    rng = np.random.default_rng(seed)
    rewards = [0.0, *(rng.normal(size=length) if reward is None else [reward] * length)]
    return {
        "action": [0, *rng.integers(0, 4, length).tolist()],
        "reward": rewards,
        "done": [0] * length + [end],
        "episode_step": list(range(length + 1)),
        "observation": rng.normal(size=(length + 1, width)).tolist(),
    }


def joined(*episodes: dict[str, Values]) -> dict[str, Values]:
    return {name: [value for one in episodes for value in one[name]] for name in episodes[0]}


def clean() -> dict[str, Values]:
    return joined(*(episode(3 + seed % 4, seed=seed, end=1 if seed % 3 else 2) for seed in range(12)))


def stream(rows: dict[str, Any] | pa.Table, *, size: int = 7, alignment: Any = None, **options: Any) -> RowStream:
    table = rows if isinstance(rows, pa.Table) else pa.table(rows)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(max_chunksize=size)

    return RowStream("recordings", "datasets", table.schema, batches, metadata=DatasetMetadata(alignment), **options)


def codes(report: Report, level: str = "warning") -> set[str]:
    return {one.code for one in report.findings if (one.level == "note") == (level == "note")}


def test_a_clean_recording_has_no_warnings() -> None:
    report = inspect(stream(clean()))
    assert report.findings == []
    assert report.episodes is not None
    assert (report.episodes.count, report.episodes.terminated, report.episodes.truncated) == (12, 8, 4)
    assert report.alignment == "arrived"


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.integers(1, 30),
    found_by=st.sampled_from(["episode_step", "done", "metadata_episode_id"]),
)
def test_figures_are_those_of_plain_python(lengths: list[int], size: int, found_by: str) -> None:
    episodes = [episode(length, seed=n, end=1 + n % 2) for n, length in enumerate(lengths)]
    rows = joined(*episodes)
    if found_by != "episode_step":
        del rows["episode_step"]
    if found_by == "metadata_episode_id":
        rows["metadata_episode_id"] = [n for n, length in enumerate(lengths) for _ in range(length + 1)]
    with pytest.MonkeyPatch.context() as patch:
        # Blocks as small as the batches: episodes spread over several of them.
        patch.setattr("mouse_core.formats.columns._BLOCK_ROWS", size)
        report = inspect(stream(rows, size=size))
    found = report.episodes
    assert found is not None
    assert found.found_by == found_by
    returns = [sum(one["reward"]) for one in episodes]
    assert found.count == len(lengths)
    assert found.transitions == sum(lengths)
    assert (found.lengths.low, found.lengths.high) == (min(lengths), max(lengths))
    assert found.lengths.mean == pytest.approx(np.mean(lengths))
    assert found.returns.low == pytest.approx(min(returns))
    assert found.returns.high == pytest.approx(max(returns))
    assert sum(found.lengths.counts) == sum(found.returns.counts) == len(lengths)
    assert found.terminated == (len(lengths) + 1) // 2
    assert found.duplicates == 0
    assert found.done_codes == {str(code): n for code, n in sorted(Counter(rows["done"]).items())}
    taken = [action for one in episodes for action in one["action"][1:]]
    assert report.actions is not None
    assert report.actions.counts == {str(action): n for action, n in sorted(Counter(taken).items())}
    observation = report.column("observation")
    values = np.array(rows["observation"])
    assert observation is not None
    assert observation.shape == [3]
    assert observation.places is not None
    assert observation.places["low"] == pytest.approx(values.min(axis=0))
    assert observation.places["mean"] == pytest.approx(values.mean(axis=0))
    assert observation.places["deviation"] == pytest.approx(values.std(axis=0))
    reward = report.column("reward")
    assert reward is not None
    assert reward.mean == pytest.approx(np.mean(rows["reward"]))


def test_columns_of_every_kind() -> None:
    n = 40
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 200, (n, 6, 5), dtype=np.uint8)
    table = pa.table(
        {
            "action": pa.array(rng.normal(size=(n, 2)).tolist(), pa.list_(pa.float32(), 2)),
            "reward": pa.array(rng.normal(size=n), pa.float32()),
            "done": pa.array(np.arange(n) % 10 == 9, pa.bool_()),
            "observation_image": pa.array(pixels.tolist(), pa.list_(pa.list_(pa.uint8(), 5), 6)),
            "observation_png": pa.array([{"bytes": bytes([k]), "path": None} for k in range(n)]),
            "metadata_text": pa.array([f"level {k % 3}" for k in range(n)]),
            "metadata_kind": pa.array(["a", "b"] * 20).dictionary_encode(),
            "metadata_ragged": pa.array([[1.0] * (k % 3) for k in range(n)]),
            "metadata_nothing": pa.nulls(n),
            "metadata_holes": pa.array([None if k % 4 else float(k) for k in range(n)]),
            "metadata_odd": pa.array([math.nan, math.inf, -math.inf, 2.0] * 10),
            "metadata_inner": pa.array([[1, None], [2, 3]] * 20, pa.list_(pa.int64())),
            "metadata_large": pa.array([2**62 + k for k in range(n)], pa.int64()),
        }
    )
    report = inspect(stream(table))
    columns = {column.name: column for column in report.columns}
    assert {name: column.dtype for name, column in columns.items() if name[:8] != "metadata"} == {
        "action": "float32",
        "reward": "float32",
        "done": "bool",
        "observation_image": "uint8",
        "observation_png": "image",
    }
    assert columns["observation_image"].shape == [6, 5]
    assert columns["observation_image"].high == pixels.max()
    assert columns["observation_image"].mean == pytest.approx(pixels.mean())
    assert columns["metadata_ragged"].shape == "0 to 2 values"
    assert columns["metadata_nothing"].nulls == n
    assert columns["metadata_holes"].nulls == 30
    assert columns["metadata_holes"].mean == pytest.approx(np.arange(0, n, 4).mean())
    odd = columns["metadata_odd"]
    assert (odd.nans, odd.infinite, odd.low, odd.mean) == (10, 20, 2.0, 2.0)
    assert columns["metadata_inner"].nulls == 20
    assert columns["metadata_inner"].high == 3
    assert columns["metadata_large"].high == 2**62 + n - 1
    assert report.actions is not None
    assert report.actions.kind == "continuous"
    assert report.actions.places is not None
    assert len(report.actions.places["mean"]) == 2
    json.loads(report.to_json())


def test_rows_of_the_other_alignment() -> None:
    rows = {
        "action": [1, 0, 1, 2, 3],
        "reward": [1.0, 2.0, 3.0, 4.0, 5.0],
        "done": [0, 1, 0, 0, 2],
        "observation": [[0.0], [1.0], [2.0], [3.0], [4.0]],
    }
    report = inspect(stream(rows, alignment="outgoing"))
    assert codes(report) == set()
    assert report.episodes is not None
    assert report.episodes.transitions == 5
    assert (report.episodes.returns.low, report.episodes.returns.high) == (3.0, 12.0)
    assert report.actions is not None
    assert report.actions.counts == {"0": 1, "1": 2, "2": 1, "3": 1}


Spoil = Callable[[dict[str, Values]], None]


def put(name: str, row: int, value: Any) -> Spoil:
    return lambda rows: rows[name].__setitem__(row, value)


def each(name: str, value: Callable[[int, Any], Any]) -> Spoil:
    """Another value in each row, by the row's step and value."""
    return lambda rows: rows.update({name: [*map(value, rows["episode_step"], rows[name])]})


def seen(value: Callable[[Values, int], Any], where: Callable[[int, int], Any], end: int | None = None) -> Spoil:
    """Another observation in rows of some steps and done codes."""

    def spoil(rows: dict[str, Values]) -> None:
        for row, of in enumerate(zip(rows["episode_step"][:end], rows["done"][:end], strict=True)):
            if where(*of):
                rows["observation"][row] = value(rows["observation"], row)

    return spoil


def more(*episodes: dict[str, Values], end: int = 1) -> Spoil:
    def spoil(rows: dict[str, Values]) -> None:
        rows.update(joined(rows, *episodes))
        rows["done"][-1] = end

    return spoil


def without(row: int) -> Spoil:
    return lambda rows: [values.pop(row) for values in rows.values()] and None


no_truncation = each("done", lambda step, code: min(code, 1))
same_final = seen(lambda observations, row: [9.0, 9.0, 9.0], lambda step, code: code)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (no_truncation, {"no-truncation"}),
        (seen(lambda observations, row: observations[row - 1], lambda step, _: step % 2), {"repeated-observation"}),
        (each("reward", lambda step, reward: reward if step else 1.0), {"reward-at-start"}),
        (put("done", 1, 1), {"continues-after-terminal"}),
        (put("done", 1, 2), {"continues-after-truncation"}),
        (lambda rows: rows.update(observation_speed=[4.0] * len(rows["done"])), {"constant-column"}),
        (more(episode(6, seed=3, end=2), episode(6, seed=3, end=2), end=2), {"duplicate-episodes"}),
        (put("done", 3, 0), {"episodes-without-end"}),  # the first episode has rows 0 to 3
        (seen(lambda observations, row: observations[row - 1], lambda _, code: code), {"final-repeats"}),
        (seen(lambda observations, row: observations[row + 1], lambda _, code: code, -1), {"final-is-next-first"}),
        (same_final, {"same-final"}),
        (put("observation", 5, [math.nan, 0.0, 0.0]), {"not-finite"}),
        (put("reward", 5, None), {"nulls"}),
        (without(1), {"step-jumps"}),
        (without(0), {"step-not-from-0", "reward-at-start"}),
        (put("done", 3, 7), {"unknown-done"}),
        (put("action", 2, -1), {"negative-action"}),
        (each("action", lambda step, _: 2 if step else 0), {"one-action"}),
        (more(episode(0, seed=99), end=0), {"without-transitions"}),
    ],
)
@pytest.mark.parametrize("size", [1, pytest.param(5, marks=pytest.mark.slow), 1000])
def test_each_mistake_gives_its_warning_and_no_other(
    spoil: Spoil, expected: set[str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", size)
    rows = clean()
    spoil(rows)
    report = inspect(stream(rows, size=size))
    assert codes(report) == expected
    if size == 1000:
        assert codes(inspect(stream(rows), ignore=expected)) == set()


def test_observations_that_a_reader_marked_as_missing_are_no_mistake_of_the_recording() -> None:
    rows = clean()
    same_final(rows)
    rows["observation_missing"] = [int(done != 0) for done in rows["done"]]
    report = inspect(stream(rows))
    assert codes(report) == set()
    assert "observations-missing" in [finding.code for finding in report.findings]


@pytest.mark.parametrize("form", ["datasets", "parquet"])
def test_how_the_alignment_is_known(form: str) -> None:
    rows = stream(clean())
    assert inspect(rows.replace(format=form)).alignment_found.startswith(
        "assumed, because the metadata do not state it"
    )
    stated = rows.replace(format=form, metadata=DatasetMetadata("arrived"))
    assert inspect(stated).alignment_found.startswith("from the metadata")
    assert inspect(rows.replace(format="minari")).alignment_found.startswith("the reader of minari defines it")


def test_rows_that_are_no_steps_are_described_too() -> None:
    report = inspect(stream({"x": [1.0, 2.0], "action_arm": [[1.0], [2.0]]}))
    assert codes(report) == {"missing-columns", "no-observation"}
    assert "action_arm" in report.findings[0].message
    assert report.episodes is None
    assert codes(inspect(stream(pa.table({"action": pa.array([], pa.int64())})))) >= {"no-rows"}


def test_notes_of_a_reader_are_passed_on() -> None:
    report = inspect(stream(clean(), notes=("the last transition of every episode was dropped",)))
    assert [finding.message for finding in report.findings] == ["the last transition of every episode was dropped"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "recordings"
    store = DatasetStore()
    store.extend(clean())
    store.to_dataset().save_to_disk(str(path))
    return path


def run(*arguments: object) -> int:
    return main(["inspect", *map(str, arguments)])


def test_status_says_what_was_found(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--strict") == 0
    assert "No warnings" in capsys.readouterr().out
    rows = clean()
    no_truncation(rows)
    spoiled = str(tmp_path / "spoiled.parquet")
    datasets.Dataset.from_dict(rows).to_parquet(spoiled)
    assert run(spoiled) == 0
    assert run(spoiled, "--strict") == 1
    assert "no-truncation" in capsys.readouterr().out
    assert run(spoiled, "--strict", "--ignore", "no-truncation") == 0
    (tmp_path / "cut.parquet").write_bytes(Path(spoiled).read_bytes()[:-100])
    for unusable in (tmp_path / "cut.parquet", tmp_path / "nowhere", tmp_path):
        capsys.readouterr()
        assert run(unusable, "--strict") == 2
        shown = capsys.readouterr().err.strip()
        assert shown.startswith("mouse inspect: ")
        assert str(unusable) in shown
        assert "\n" not in shown


def test_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    shown = capsys.readouterr().out
    for text in ("12 episodes", "float64", "[3]", "alignment: arrived", "8 terminated, 4 truncated", "actions: 0: "):
        assert text in shown, text


def test_the_command_that_is_hinted_at_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd name"
    folder.mkdir()
    rows = clean()
    rows["observation"][5] = [math.nan, 0.0, 0.0]
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    words = [str(folder), "--format", "rows", "--final", "mark", "--split", "train", "--alignment", "outgoing"]
    words += ["--image-root", str(tmp_path)]
    assert run(*words) == 0
    out = capsys.readouterr().out
    (hint,) = [line.removeprefix("To see it: ") for line in out.splitlines() if line.startswith("To see it: ")]
    monkeypatch.setattr("mouse_core.view.Viewer.wait", lambda viewer: None)
    program, *asked = shlex.split(hint)
    assert (program, asked[:2]) == ("mouse", ["view", words[0]])
    assert sorted(asked[2:-2]) == sorted(words[1:])
    assert main([*asked, "--no-browser"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"#{asked[-1]}")


def test_json_holds_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == len(clean()["done"])
    assert [column["name"] for column in report["columns"]] == list(clean())


@pytest.mark.parametrize("name", ["action", "reward", "done"])
def test_words_where_numbers_belong(name: str) -> None:
    rows = clean()
    report = inspect(stream(rows | {name: ["yes"] * len(rows["done"])}))
    assert "not-numbers" in codes(report)
    assert any(finding.message.startswith(f"{name}: expected numbers, found string") for finding in report.findings)


def test_episodes_that_a_small_world_brings_again_are_a_note_and_files_that_were_read_twice_a_warning() -> None:
    def whole(length: int, seed: int) -> dict[str, Values]:
        one = episode(length, seed=seed, width=20, reward=0.5)
        one["observation"] = np.random.default_rng(seed).integers(0, 9, (length + 1, 20)).tolist()
        return one

    few = joined(*(whole(30 + seed % 3, seed % 3) for seed in range(30)))
    twice = joined(*(whole(30, seed % 15) for seed in range(30)))
    for rows, wanted in ((few, ("note", 3, tuple(range(3, 30)))), (twice, ("warning", 15, tuple(range(15, 30))))):
        (finding,) = [one for one in inspect(stream(rows)).findings if one.code == "duplicate-episodes"]
        assert (finding.level, finding.episode, finding.episodes) == wanted
