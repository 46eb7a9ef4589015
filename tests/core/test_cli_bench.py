"""`mouse bench`: what it opens, what it reports, and what it says to change."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from mouse_core import BatchSource, ConfigError, DatasetStore, formats
from mouse_core.bench import Line, advise, open_data
from mouse_core.cli import main
from tests.bench import generate
from tests.core.formats.test_flat_files import logged, write_ogbench

ROWS = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate.write(generate.STATE, tmp_path_factory.mktemp("state"), ROWS)


def run(*arguments: object) -> int:
    return main(["bench", *map(str, arguments)])


@pytest.mark.slow
def test_a_report_has_every_way_to_get_batches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert run(folder, "--seconds", 0.2, "--frameworks", "numpy", "--batch-size", 4, "--json", file) == 0
    report = json.loads(file.read_text())
    names = [line["name"] for line in report["lines"]]
    assert names == [
        "plain copy of the same bytes",
        "source[i], no loader",
        *(f"numpy loader, num_workers={workers}" for workers in (0, 1, 2)),
    ]
    assert report["dataset"]["rows"] == ROWS
    assert report["batch"]["megabytes"] == pytest.approx(4 * 64 * (3 * 8 + 4 + 17 * 8 + 18 * 4) / 1e6)
    assert report["batch"]["megabytes stored"] == pytest.approx(4 * 64 * (3 * 8 + 4 + 35 * 4) / 1e6)
    assert report["decoding_share"] is None
    for line in report["lines"]:
        assert line["batches_per_second"] > 0
        assert line["floor_share"] > 0
    shown = capsys.readouterr().out
    for text in (*names, f"{ROWS:,} steps", "Recommended", "num_workers=", "obs_continuous=float32"):
        assert text in shown


def test_fields_and_dtypes_are_those_asked_for(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ("--fields", "reward,obs_continuous", "--dtype", "obs_continuous=float32", "--sequence-length", 8)
    assert run(folder, "--seconds", 0.1, "--frameworks", "numpy", "--json", file, *options) == 0
    batch = json.loads(file.read_text())["batch"]
    assert batch["fields"] == {"reward": "float32 []", "obs_continuous": "float32 [17]"}
    assert batch["sequence_length"] == 8


@pytest.mark.slow
def test_windows_by_field_within_episodes_and_mixtures_are_measured_as_a_loader_makes_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    options = ("--seconds", 0.05, "--batch-size", 4, "--frameworks", "numpy", "--json", file)

    def bench(*arguments: object) -> dict[str, Any]:
        assert run(folder, *arguments, *options) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    report = bench("--boundary", "episode", "--window", "obs_continuous=-1:1", "--window", "action=0,3")
    store = DatasetStore.open(folder)
    windows = {"obs_continuous": [-1, 0], "action": [0, 3]}
    batch = BatchSource(store, batch_size=4, boundary="episode", windows=windows)[0]
    assert report["batch"]["megabytes"] == sum(one.nbytes for one in batch.values()) / 1e6
    assert report["batch"]["fields"]["action"] == "int64 [2]"
    assert "rows, obs_continuous at -1,0, action at 0,3, random, within episodes" in _shown(capsys)
    report = bench(folder, "--weights", "1,3", "--sequence-length", 8, "--boundary", "episode")
    assert report["dataset"]["rows"] == 2 * ROWS
    assert {"member", "mask"} <= report["batch"]["fields"].keys()
    assert run(folder, folder, "--weights", "1", *options) == 2
    assert "a number for each source, found 1 for 2" in _shown(capsys, err=True)


def _shown(capsys: pytest.CaptureFixture[str], *, err: bool = False) -> str:
    found = capsys.readouterr()
    return " ".join((found.err if err else found.out).split())


def test_a_replay_buffer_is_measured_in_the_frameworks_that_are_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    options = ("--seconds", 0.05, "--batch-size", 4, "--frameworks", "numpy", "--replay", 1000)
    assert run(folder, *options, "--sequence-length", 8, "--fields", "reward,done,obs_continuous", "--json", file) == 0
    report = json.loads(file.read_text())
    assert [line["name"] for line in report["lines"]] == ["numpy replay, sample()", "numpy replay, drawn ahead"]
    fields = report["batch"]["fields"]
    assert (fields["obs_continuous"], fields["mask"]) == ("float64 [4, 8, 17]", "bool [4, 8]")
    assert "action" not in fields
    assert report["batch"]["rows written a second"] > 0
    assert report["advice"][0].startswith("numpy: sample() takes ")
    assert "a replay buffer of 1,000 rows, B=4 slices of 8 steps" in _shown(capsys)
    for refused in (("--window", "action=0:2"), ("--dtype", "reward=float32"), (folder,), ("--fields", "x")):
        assert run(folder, *refused, *options) == 2
        assert ("--replay: expected" in _shown(capsys, err=True)) == (refused[0] != "--fields")


@pytest.mark.long
@pytest.mark.slow
def test_windows_are_drawn_as_asked_for_and_stores_of_small_record_batches_have_a_floor(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetStore.open(tmp_path / "store", "a", layout="windows") as store:
        store.from_dataset(datasets.load_from_disk(str(folder)))
    file = tmp_path / "report.json"
    options = ("--sampling", "blocks", "--seconds", 0.1, "--frameworks", "numpy", "--json", file)
    assert run(tmp_path / "store", *options) == 0
    report = json.loads(file.read_text())
    assert report["batch"]["sampling"] == "blocks"
    assert report["lines"][0]["name"] == "plain copy of the same bytes"
    assert all(line["floor_share"] > 0 for line in report["lines"])
    assert "64 steps, blocks" in " ".join(capsys.readouterr().out.split())
    assert run(folder, "--sampling", "block", "--frameworks", "numpy") == 2
    assert "'blocks'" in capsys.readouterr().err


@pytest.mark.long
def test_all_frameworks_that_are_installed_take_part(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    pytest.importorskip("grain")
    file = tmp_path / "report.json"
    assert run(folder, "--seconds", 0.2, "--json", file) == 0
    report = json.loads(file.read_text())
    assert {line["framework"] for line in report["lines"]} == {"", "numpy", "torch", "jax"}
    assert {name.split()[0] for name in report["first"]} == {"numpy", "torch", "jax"}


@pytest.mark.slow
def test_encoded_images_show_as_decoding(tmp_path: Path) -> None:
    kind = generate.png_images(84, 84, colour=False)
    folder = generate.write(kind, tmp_path / "png", 40)
    file = tmp_path / "report.json"
    options = ("--sequence-length", 4, "--batch-size", 4, "--frameworks", "numpy", "--seconds", 0.1)
    assert run(folder, "--json", file, *options) == 0
    report = json.loads(file.read_text())
    assert report["decoding_share"] > 0.5
    assert all(line["floor_share"] is None for line in report["lines"])
    assert any("Decoding dominates" in sentence for sentence in report["advice"])


@pytest.mark.slow
@pytest.mark.usefixtures("without_rich")
def test_without_rich_the_report_is_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--seconds", 0.1, "--frameworks", "numpy") == 0
    shown = capsys.readouterr().out
    assert "source[i], no loader" in shown
    assert "Recommended" in shown
    assert "┃" not in shown


RUN = """
from mouse_core import PrefetchBatchifier
from mouse_core.replay import ArrayStorage, ReplayBuffer

def episodes(store, *, num_workers):
    return PrefetchBatchifier(store, sequence_length=8, batch_size=4, boundary="episode", num_workers=num_workers)

def buffer(store):
    made = ReplayBuffer(ArrayStorage(100), batch_size=16)
    made.extend({"reward": [1.0] * 20, "observation": [[1.0, 2.0]] * 20})
    return made

def once(store):
    return [{"outer": {"x": store.snapshot().fingerprint and __import__("numpy").zeros((2, 3))}}]

def nothing(store):
    return 3
"""


@pytest.mark.slow
def test_a_run_of_ones_own_is_measured_as_it_is_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_run_for_bench.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "report.json"

    def bench(name: str) -> dict[str, Any]:
        assert run(folder, "--seconds", 0.05, "--run", f"own_run_for_bench:{name}", "--json", file) == 0
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    report = bench("episodes")
    made = "own_run_for_bench:episodes"
    assert [line["name"] for line in report["lines"]] == [f"{made}, num_workers={workers}" for workers in (0, 1, 2)]
    assert report["batch"]["fields"]["mask"] == "bool [4, 8]"
    assert "num_workers=" in report["advice"][0]
    assert f"batches of {made}" in " ".join(capsys.readouterr().out.split())
    report = bench("buffer")
    assert [line["name"] for line in report["lines"]] == ["own_run_for_bench:buffer"]
    assert report["batch"]["fields"]["observation"].endswith("[16, 2]")
    assert report["advice"][0].startswith("numpy: sample() takes ")
    assert bench("once")["batch"]["fields"] == {"outer.x": "float64 [2, 3]"}
    capsys.readouterr()
    assert run(folder, "--run", "own_run_for_bench:nothing") == 2
    assert "expected something with next_batch or sample" in capsys.readouterr().err
    assert run(folder, "--run", "own_run_for_bench:buffer", "--fields", "reward") == 2


def test_what_can_be_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.load_from_disk(str(folder))
    datasets.DatasetDict({"train": dataset, "eval": dataset.select(range(100))}).save_to_disk(str(tmp_path / "dict"))
    dataset.select(range(50)).to_parquet(str(tmp_path / "some.parquet"))
    arrow = next(folder.glob("*.arrow"))

    def rows(path: object, *splits: str, **options: str) -> int:
        with open_data(str(path), splits or None, **options) as found:
            segments = found.to_store().snapshot().segments
            assert all(segment.is_mapped for segment in segments)  # on disk, whatever it was before
            return found.rows

    flat = write_ogbench(tmp_path / "x.npz", "raw", logged())
    assert rows(folder) == rows(arrow) == ROWS
    assert rows(tmp_path / "some.parquet") == 50
    assert rows(tmp_path / "dict") == ROWS + 100
    assert rows(tmp_path / "dict", "eval") == 100
    assert rows(flat) == rows(flat, format="ogbench") == formats.open(flat).to_table().num_rows
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": dataset} if name == "org/data" else None)
    with open_data("org/data") as found:
        assert found.rows == ROWS


def test_damaged_and_mixed_data_are_refused_here_too(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = next(copy.glob("data-*.arrow"))
    shutil.copyfile(file, copy / "more.arrow")
    assert run(copy) == 2
    (copy / "more.arrow").unlink()
    file.write_bytes(file.read_bytes() + bytes(8))
    assert run(copy) == 2


@pytest.mark.parametrize(
    "name", ["typo", "./typo", "recordings/typo", "/typo/typo", "typo/", "org/data.parquet", "a b/c"]
)
def test_a_mistyped_path_asks_no_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(*ignored: object, **also: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recordings").mkdir()
    assert run(name) == 2
    shown = capsys.readouterr().err.strip()
    assert shown == (
        f"mouse bench: expected a file or folder, or namespace/name of a dataset on the Hub, found no file {name!r}"
    )


def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset {name!r} doesn't exist on the Hub\nor so")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert run("org/typo") == 2
    assert capsys.readouterr().err == "mouse bench: the Hub: Dataset 'org/typo' doesn't exist on the Hub\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"mouse-data \S.*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{tmp}",), "no format recognised in a folder of nothing"),
        (("{folder}", "--split", "eval"), "split: expected one of ['train'], found 'eval'"),
        (("{folder}", "--frameworks", "numpy,tensorflow"), "expected some of ['numpy', 'torch', 'jax']"),
        (("{folder}", "--sequence-length", "5000"), "expected at least 1 window of 5000 steps"),
        (("{folder}", "--fields", "pressure"), "expected 'pressure'"),
        (("{folder}", "--dtype", "reward=words"), "expected a NumPy dtype"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[str, ...], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(text.format(tmp=tmp_path, folder=folder) for text in arguments)) == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("mouse bench: ")
    assert message in shown
    assert "\n" not in shown


@pytest.mark.parametrize("arguments", [("x", "--batch-size", "0"), ("x", "--dtype", "reward"), ()])
def test_arguments_are_checked(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    assert "usage: mouse bench" in capsys.readouterr().err


def test_a_framework_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mouse_core import bench

    monkeypatch.setitem(bench.PACKAGES, "torch", ("mouse_nowhere", "mouse_nowhere"))
    with open_data(str(folder)) as found, pytest.raises(ConfigError, match="expected torch to be installed"):
        bench.bench(found, frameworks=["torch"])


def source(dtype: str = "float32") -> BatchSource:
    store = DatasetStore()
    store.extend(
        {
            "action": np.zeros(100, np.int64),
            "reward": np.zeros(100, np.float32),
            "done": np.zeros(100, np.int64),
            "observation": np.zeros((100, 3), np.float32),
        }
    )
    return BatchSource(store, 4, 2, dtypes={"obs_continuous": dtype})


def advice(
    lines: Sequence[tuple[str, int | None, float]],
    *,
    dtype: str = "float32",
    decoding: float | None = None,
    faults: int = 0,
    indexed: bool = False,
) -> str:
    measured = [Line(name, name, workers, 1e3 / ms, 0.0, None, (0.9 * ms, ms, 1.1 * ms)) for name, workers, ms in lines]
    return "\n".join(advise(measured, source(dtype), decoding=decoding, faults=faults, indexed=indexed))


FAST = [("", None, 0.1), ("numpy", 0, 0.11), ("numpy", 1, 0.12), ("numpy", 2, 0.12)]


def test_one_worker_is_enough_where_more_are_no_faster() -> None:
    said = advice(FAST)
    assert "num_workers=1, prefetch=3" in said
    assert "longer than 0.12 ms" in said
    assert "\n" not in said  # there is nothing else to say


def test_more_workers_where_they_help() -> None:
    assert "num_workers=2, prefetch=4" in advice([("numpy", 0, 100), ("numpy", 1, 100), ("numpy", 2, 55)])


def test_everything_else_is_said_where_it_is_so() -> None:
    said = advice(FAST, dtype="float64", decoding=0.9, faults=5000, indexed=True)
    assert "Decoding dominates: 90%" in said
    assert f"{1e3 * 8 / 0.11:,.0f} images/s" in said
    assert "--dtype obs_continuous=float32" in said
    assert "flatten_indices" in said
    assert "5,000 pages came from the disk" in said
    assert "blocks" not in said  # the pool has room for all windows


def test_data_on_disks_may_be_read_by_blocks() -> None:
    store, zeros = DatasetStore(), np.zeros(9000, np.int8)
    store.extend({"action": zeros, "reward": zeros, "done": zeros})
    measured = [Line("numpy", "numpy", 0, 10.0, 0.0, None, (0.9, 1.0, 1.1))]
    read = BatchSource(store, 4, 2)
    said = "\n".join(advise(measured, read, decoding=None, faults=5000, indexed=False))
    assert 'sampling="blocks" reads long stretches' in said
    assert "pool of 1,024 blocks of 8 rows" in said
    assert "blocks" not in "\n".join(advise(measured, read, decoding=None, faults=0, indexed=False))
