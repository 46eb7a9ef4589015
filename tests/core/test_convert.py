"""`mouse convert` and `mouse push`: the result has the rows of the source, also after interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import ConfigError, DataError, DatasetStore, StorageError, formats
from mouse_core.cli import main
from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.columns import to_arrow
from mouse_core.formats.converting import convert
from mouse_core.images import encode_png
from mouse_core.metadata import DatasetMetadata
from tests.programs import run_code


def table(rows: int = 500) -> pa.Table:
    rng = np.random.default_rng(0)
    step = np.arange(rows) % 25
    return pa.table(
        {
            "action": pa.array(np.where(step == 0, 0, rng.integers(0, 4, rows)), pa.int32()),
            "reward": pa.array(np.where(step == 0, 0, rng.normal(size=rows)), pa.float32()),
            "done": pa.array(np.where(step == 24, 1 + (np.arange(rows) // 25) % 2, 0), pa.int64()),
            "episode_step": step,
            "observation": pa.array(rng.normal(size=(rows, 3)).tolist(), pa.list_(pa.float32(), 3)),
            "observation_image": to_arrow(rng.integers(0, 255, (rows, 4, 5), np.uint8), where="image"),
            "metadata_ragged": pa.array([[float(k)] * (k % 3) if k % 7 else None for k in range(rows)]),
            "metadata_level": pa.array([f"level {k % 3}" for k in range(rows)]),
            "metadata_odd": pa.array([float("nan"), -0.0, 0.0, float("inf")] * (rows // 4)),
        }
    )


def stream(source: pa.Table | None = None, *, size: int = 33, **options: Any) -> RowStream:
    found = table() if source is None else source
    batches = found.to_batches(max_chunksize=size)
    return RowStream("made", "ted", found.schema, lambda: iter(batches), rows=len(found), **options)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few rows, so that small data have several shards."""
    monkeypatch.setattr("mouse_core.formats.columns._BLOCK_ROWS", 40)


def test_no_folder_gets_the_name_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    stream().save(source)
    for name in ("rows.csv", "rows.json", "rows.arrow", "rows.PARQUET", "v1.0.jsonl", "rows.hdf5"):
        calls = (
            lambda name=name: convert(stream(), tmp_path / name),
            lambda name=name: convert(stream(), tmp_path / name, to="parquet"),
            lambda name=name: stream().save(tmp_path / name),
            lambda: stream().save(tmp_path / "rows.parquet"),
        )
        for call in calls:
            with pytest.raises(ConfigError, match=r"expected the name of a folder.* found the name of a \.\w+ file"):
                call()
        assert main(["convert", str(source), str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["source"]
    convert(stream(), tmp_path / "rows.v1.0")
    assert formats.open(tmp_path / "rows.v1.0").rows == 500


@pytest.mark.parametrize(
    ("target", "to", "alignment"),
    [
        ("folder", None, "outgoing"),
        ("folder", "parquet", "arrived"),
        ("file.parquet", None, "outgoing"),
        ("folder", "store", "outgoing"),
    ],
)
@pytest.mark.usefixtures("small")
def test_what_arrives_is_what_was_there(target: str, to: str | None, alignment: Any, tmp_path: Path) -> None:
    source = stream(metadata=DatasetMetadata(alignment))
    done = convert(source, tmp_path / target, to=to, shard_bytes=9000)
    assert (done.rows, done.resumed_rows, done.digest) == (500, 0, source.digest())
    assert (done.shards > 2) == (target == "folder")
    read = formats.open(tmp_path / target)
    assert read.digest() == done.digest
    assert read.alignment == alignment
    assert os.listdir(tmp_path) == [target]
    if to == "store":
        store = DatasetStore.open(tmp_path / target)
        assert store[30]["action"] == table().column("action")[30].as_py()
        assert store.metadata.alignment == source.metadata.alignment
        with DatasetStore.open(tmp_path / target, "a") as writer:
            writer.extend(store[:3])
        assert len(DatasetStore.open(tmp_path / target)) == 503
    if to is None and target == "folder":
        loaded = datasets.load_from_disk(str(tmp_path / target))
        assert rows_digest(loaded.data.table) == done.digest
        store = DatasetStore(alignment=alignment).from_dataset(loaded)
        assert store[30]["action"] == table().column("action")[30].as_py()


def test_no_rows_are_a_dataset_too(tmp_path: Path) -> None:
    for to in ("arrow", "store"):
        done = convert(stream(table().slice(0, 0)), tmp_path / to, to=to)
        assert (done.rows, done.shards) == (0, 1)
        assert formats.open(tmp_path / to).to_table().num_rows == 0


KILLED = """
import os, signal, sys
import tests.core.test_convert as here
from mouse_core.formats import base, columns, converting
from mouse_core.formats.jobs import Job

columns._BLOCK_ROWS = 40
source = here.stream()
moment, after, target, to = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] or None
left = [after]

def killing(function):
    def call(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

if moment == "read":
    batches = list(source)
    source = source.replace(batches=lambda: map(killing(lambda batch: batch), batches))
elif moment == "save":
    Job.save = killing(Job.save)
elif moment == "verify":
    base.rows_digest = killing(base.rows_digest)
elif moment == "rename":
    Job.finish = killing(Job.finish)
converting.convert(source, target, to=to, shard_bytes=9000)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "after", "to"),
    [("read", 9, "parquet"), ("read", 0, ""), ("save", 1, ""), ("verify", 0, ""), ("rename", 0, "")],
)
def test_a_killed_conversion_goes_on(moment: str, after: int, to: str, tmp_path: Path, small: None) -> None:
    target = tmp_path / "out"
    killed = run_code(KILLED, moment, after, target, to)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    done = convert(stream(), target, to=to or None, shard_bytes=9000)
    assert done.digest == stream().digest() == formats.open(target).digest()
    assert (done.resumed_rows > 0) == (moment != "read" or after > 3)
    assert os.listdir(tmp_path) == ["out"]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("to", ["arrow", "parquet", "store"])
@pytest.mark.usefixtures("small")
def test_any_number_of_interruptions(to: str, tmp_path: Path) -> None:
    source, target = stream(), tmp_path / "out"
    kept = []
    for rows in (10, 60, 130, 130, 300, 499):
        with pytest.raises(Interrupted):
            convert(cut(source, rows), target, to=to, shard_bytes=9000)
        job = tmp_path / ".out.converting" / "job.json"
        kept.append(sum(part["rows"] for part in json.loads(job.read_text())["parts"].values()) if job.exists() else 0)
    assert kept == sorted(kept)
    assert kept[-1] > 200
    done = convert(source, target, to=to, shard_bytes=9000)
    assert done.resumed_rows == kept[-1]
    assert done.digest == source.digest() == formats.open(target).digest()


@pytest.mark.usefixtures("small")
def test_a_source_that_changed_meanwhile_is_refused_and_lost_files_are_written_again(tmp_path: Path) -> None:
    target = tmp_path / "out"
    interrupt(stream(), target)
    other = table().set_column(1, "reward", pa.array(np.zeros(500), pa.float32()))
    with pytest.raises(ConfigError, match=r"unfinished work with other inputs, which differ in some of the rows 0\.\."):
        convert(stream(other), target, shard_bytes=9000)
    with pytest.raises(ConfigError, match=r"unfinished work with other inputs, which differ in metadata"):
        convert(stream(metadata=DatasetMetadata("outgoing")), target, shard_bytes=9000)
    parts = sorted((tmp_path / ".out.converting").glob("part-*.arrow"))
    assert len(parts) > 1
    parts[-1].write_bytes(b"cut")
    done = convert(stream(), target, shard_bytes=9000)
    assert 0 < done.resumed_rows < 300
    assert formats.open(target).digest() == stream().digest()


def cut(source: RowStream, rows: int) -> RowStream:
    """The same source, interrupted after about so many rows."""

    def batches() -> Iterator[pa.RecordBatch]:
        seen = 0
        for batch in source:
            yield batch
            seen += batch.num_rows
            if seen >= rows:
                raise Interrupted

    return source.replace(batches=batches)


def interrupt(source: RowStream, target: Path) -> None:
    with pytest.raises(Interrupted):
        convert(cut(source, 390), target, shard_bytes=9000)


def test_a_result_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_stream = pa.ipc.new_stream

    class Wrong:
        """Writes other rewards than it is given."""

        def __init__(self, *arguments: Any) -> None:
            self.writer = new_stream(*arguments)

        def write_batch(self, batch: pa.RecordBatch) -> None:
            place = batch.schema.get_field_index("reward")
            zeros = pa.array(np.zeros(len(batch), np.float32))
            self.writer.write_batch(batch.set_column(place, batch.schema.field(place), zeros))

        def close(self) -> None:
            self.writer.close()

    monkeypatch.setattr(pa.ipc, "new_stream", Wrong)
    with pytest.raises(DataError, match="expected rows with the digest of the source"):
        convert(stream(), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    address = r"expected a folder of this machine .* found an address \((s3|hf)://\)"
    for target, options, message in (
        ("there", {}, "expected a path that does not exist"),
        ("x", {"to": "csv"}, "to: expected one of"),
        ("x.parquet", {"to": "arrow"}, "to: expected one of"),
        ("x", {"shard_bytes": 0}, "shard_bytes"),
        *((one, {}, address) for one in ("s3://bucket/x", "s3://bucket/x.parquet", "hf://datasets/a/b")),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(stream(), target, **options)
    with pytest.raises(StorageError, match="convert: '/proc/nowhere/x': cannot write or read"):
        convert(stream(), "/proc/nowhere/x")
    with pytest.raises(ConfigError, match="found an address"):
        stream().to_store().save("s3://bucket/x")
    assert os.listdir(tmp_path) == ["there"]  # no folder "s3:"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    convert(stream(), tmp_path / "source.parquet")
    return tmp_path / "source.parquet"


def test_convert_on_the_command_line(parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", parquet, tmp_path / "out", "--max-shard-size", "10kB") == 0
    shown = capsys.readouterr().out
    assert "500 rows in" in shown
    assert f"verified: source and result have the digest {stream().digest()}" in shown
    assert run("convert", parquet, tmp_path / "out") == 2
    assert run("convert", tmp_path / "nowhere", tmp_path / "out2") == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 2
    assert shown[0].startswith("mouse convert: expected a path that does not exist")


def test_an_interruption_from_the_keyboard_is_one_line(
    parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mouse_core.formats.base.ShardWriter.write", Mock(side_effect=KeyboardInterrupt))
        assert run("convert", parquet, tmp_path / "out") == 130
    assert capsys.readouterr().err.strip() == "mouse convert: interrupted"
    assert run("convert", parquet, tmp_path / "out") == 0


def test_push_on_the_command_line(
    parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = datasets.Dataset(table().drop_columns(["metadata_ragged"]))
    datasets.DatasetDict({"train": dataset, "eval": dataset.select(range(100))}).save_to_disk(str(tmp_path / "both"))
    assert run("push", tmp_path / "both", "a/b", "--dry-run") == 0
    assert "train: 500 rows, eval: 100 rows" in capsys.readouterr().out
    assert run("push", tmp_path / "both", "a/b", "--dry-run", "--split", "eval") == 0
    assert "at main: eval: 100 rows" in capsys.readouterr().out
    assert run("push", parquet, "someone/something", "--dry-run") == 0
    assert "would push someone/something at main: train: 500 rows; 1 files" in capsys.readouterr().out
    assert run("push", parquet, "someone/something", "--dry-run", "--as-split", "eval") == 0
    assert "eval: 500 rows" in capsys.readouterr().out
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    assert run("push", parquet, "someone/something") == 2  # there is no Hub here
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("mouse push: ")
    assert "\n" not in shown


def test_help_shows_examples_and_loads_nothing_heavy() -> None:
    commands = ("inspect", "convert", "push", "upload")
    code = (
        "import sys\nfrom mouse_core.cli import main\n"
        f"for command in {commands}:\n"
        "    try:\n        main([command, '--help'])\n    except SystemExit: pass\n"
        "    assert not {'datasets', 'torch', 'jax', 'pandas', 'h5py'} & set(sys.modules), command"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("examples:") == len(commands)
    assert all(f"mouse {command} " in done.stdout for command in commands)


def test_what_is_recognised(tmp_path: Path, parquet: Path) -> None:
    assert formats.open(parquet).format == "parquet"
    saved = tmp_path / "saved"
    datasets.Dataset(table().drop_columns(["metadata_ragged"])).save_to_disk(str(saved))
    assert formats.open(saved).format == "datasets"
    assert formats.open(next(saved.glob("*.arrow"))).rows == 500
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "eval-00000-of-00001"):
        (tmp_path / "hub" / "data" / f"{name}.parquet").write_bytes(parquet.read_bytes())
    hub = formats.open(tmp_path / "hub")
    assert hub.rows == 1500
    assert {name: len(files) for name, files in hub.format_metadata["splits"].items()} == {"eval": 1, "train": 2}
    assert formats.open(tmp_path / "hub", splits=["train"]).rows == 1000
    with pytest.raises(ConfigError, match="split: expected one of"):
        formats.open(tmp_path / "hub", splits=["test"])


def test_what_is_not_recognised_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "empty").mkdir()
    for path, found in (
        (tmp_path, "a folder of ['empty', 'notes.txt']"),
        (tmp_path / "empty", "a folder of nothing"),
        (tmp_path / "notes.txt", "a file of 7 bytes"),
    ):
        wanted = f"no format recognised in {re.escape(found)}; looked for store: .*; lerobot: .*; minari: .*; ogbench: "
        with pytest.raises(ConfigError, match=wanted):
            formats.open(path)
    with pytest.raises(ConfigError, match="expected a file or folder, found none"):
        formats.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="format: expected one of"):
        formats.open(tmp_path, format="csv")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("pictures", [False, True])
def test_ten_million_steps_take_little_memory(pictures: bool, tmp_path: Path) -> None:
    code = """
    import sys
    import numpy as np, pyarrow as pa
    from mouse_core.formats import open as read_rows
    from mouse_core.formats.base import RowStream
    from mouse_core.formats.converting import convert
    from mouse_core.inspect import inspect
    from tests.core.peak import peak_mb

    ROWS, N, PICTURES = (20_000, 2000, True) if sys.argv[2] == "True" else (10_000_000, 8000, False)
    def batch(first, n):
        rows = np.arange(first, first + n)
        step = rows % 200
        made = {"action": rows % 4, "reward": (rows % 7).astype(np.float32) * (step > 0), "episode_step": step,
                "done": np.where(step == 199, 1 + rows // 200 % 2, 0), "observation": pa.FixedSizeListArray.from_arrays(
                    pa.array(np.repeat(rows, 4).astype(np.float32)), 4)}
        if PICTURES:
            pixels = pa.array(np.resize(np.arange(251, dtype=np.uint8), n * 84 * 84))
            lines = pa.FixedSizeListArray.from_arrays(pixels, 84)
            made["observation_image"] = pa.FixedSizeListArray.from_arrays(lines, 84)
        return pa.RecordBatch.from_pydict(made)
    schema = batch(0, 1).schema
    stream = RowStream("made", "made", schema, lambda: (batch(k, N) for k in range(0, ROWS, N)), rows=ROWS)
    done = convert(stream, sys.argv[1] + "/arrow")
    again = convert(read_rows(sys.argv[1] + "/arrow"), sys.argv[1] + "/all.parquet")
    assert done.digest == again.digest and done.rows == ROWS
    report = inspect(read_rows(sys.argv[1] + "/all.parquet"))
    assert report.episodes.count == ROWS // 200
    print(peak_mb())
    """
    done = run_code(textwrap.dedent(code), tmp_path, pictures)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 500


def test_encoded_pictures_stay_encoded(tmp_path: Path) -> None:
    encoded = [encode_png(np.full((3, 3, 1), k, np.uint8)) for k in range(8)]
    columns: dict[str, Any] = {"action": [0] * 8, "reward": [0.0] * 8, "done": [0] * 8}
    columns["observation_image"] = [{"bytes": one, "path": None} for one in encoded]
    source = datasets.Dataset.from_dict(columns).cast_column("observation_image", datasets.Image())
    source.save_to_disk(str(tmp_path / "in"))
    convert(formats.open(tmp_path / "in"), tmp_path / "out")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert isinstance(loaded.features["observation_image"], datasets.Image)
    assert loaded.data.column("observation_image")[3].as_py()["bytes"] == encoded[3]
