"""A hundred damaged files of each of: Arrow, Parquet, TED in folders and in HDF5, LeRobot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import DataError, SchemaError, formats
from mouse_core.formats.base import RowStream
from mouse_core.formats.converting import convert
from mouse_core.formats.ted import write_ted
from tests.core.damaged_files import damaged_copies, read_all
from tests.core.test_lerobot import Robot


def recording(*, texts: bool = True) -> RowStream:
    rng = np.random.default_rng(0)
    rows = 400
    step = np.arange(rows) % 20
    columns = {
        "action": rng.integers(0, 4, rows),
        "reward": rng.normal(size=rows),
        "done": (step == 19).astype(np.int64),
        "episode_step": step,
        "observation": pa.array(rng.normal(size=(rows, 3)).tolist(), pa.list_(pa.float64(), 3)),
    }
    if texts:
        columns["metadata_text"] = pa.array([f"level {k % 5}" for k in range(rows)])
        columns["metadata_ragged"] = pa.array([[1.0] * (k % 4) for k in range(rows)])
        columns["observation_png"] = pa.array([{"bytes": bytes(range(k % 9)), "path": None} for k in range(rows)])
    table = pa.table(columns)
    return RowStream("made", "made", table.schema, lambda: iter(table.to_batches(max_chunksize=100)))


def test_arrow(tmp_path: Path) -> None:
    convert(recording(), tmp_path / "source")
    counts = read_all(damaged_copies(tmp_path / "source", tmp_path / "copies", only="*.arrow"))
    assert counts["refused"] > 30  # there are no checksums: many a value is only another value
    described = read_all(damaged_copies(tmp_path / "source", tmp_path / "described", only="state.json", count=30))
    assert described["refused"] > 5


def test_names_that_are_no_text_or_stand_twice(tmp_path: Path) -> None:
    convert(recording(), tmp_path / "source")
    file = next((tmp_path / "source").glob("*.arrow"))
    file.write_bytes(file.read_bytes().replace(b"metadata_text", b"metadata_tex\xee"))
    with pytest.raises(DataError, match=file.name):
        formats.open(tmp_path / "source")
    twice = pa.table({"reward": [1.0], "done": [0]}).rename_columns(["reward", "reward"])
    with pa.OSFile(str(tmp_path / "twice.arrow"), "wb") as sink, pa.ipc.new_stream(sink, twice.schema) as writer:
        writer.write_table(twice)
    with pytest.raises(SchemaError, match=r"twice\.arrow: expected columns of different names"):
        formats.open(tmp_path / "twice.arrow")


def test_parquet(tmp_path: Path) -> None:
    convert(recording(), tmp_path / "source.parquet")
    folder = tmp_path / "copies"
    folder.mkdir()
    counts = read_all(damaged_copies(tmp_path / "source.parquet", folder))
    # The pages have checksums; what is left are statistics and the like, which nobody reads.
    assert counts["refused"] > 70


SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("ted", "flat")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nested", *SLOW])
def test_ted_folders(layout: str, tmp_path: Path) -> None:
    write_ted(recording(texts=False), tmp_path / "source", layout=layout)
    counts = read_all(damaged_copies(tmp_path / "source", tmp_path / "copies", count=70))
    assert counts["refused"] > 15  # the files are plain values, without checksums
    described = read_all(damaged_copies(tmp_path / "source", tmp_path / "described", only="meta.json", count=30))
    assert described["refused"] > 15


@pytest.mark.long
def test_ted_in_hdf5(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    write_ted(recording(texts=False), tmp_path / "source.h5", layout="flat")
    folder = tmp_path / "copies"
    folder.mkdir()
    counts = read_all(damaged_copies(tmp_path / "source.h5", folder, count=15), format="ted")
    assert counts["refused"] > 2


@pytest.mark.slow
def test_lerobot(tmp_path: Path) -> None:
    pytest.importorskip("av")
    Robot((5, 3, 7, 12), cameras=["top"]).write(tmp_path / "source")
    counts = read_all(damaged_copies(tmp_path / "source", tmp_path / "copies"), final="drop")
    assert counts["refused"] > 50
