"""A hundred damaged files of each of: Minari, TFDS, D4RL, OGBench, Dopamine; of HDF5 ten."""

from __future__ import annotations

from pathlib import Path

import pytest

from mouse_core.formats.minari import write_minari
from mouse_core.formats.rlds import read_rlds
from tests.core.damaged_files import damaged_copies, read_all
from tests.core.formats.recording import Counting, record, rlds_episode
from tests.core.formats.test_flat_files import atari, flat, logged, write_d4rl, write_dopamine, write_ogbench
from tests.core.formats.test_tfds import as_tfrecord, features_of, write

# Together they take many seconds.
pytestmark = pytest.mark.slow

LENGTHS = (20, -15, 1, 8)
# Another process reads an HDF5 file, which has to be started for each: 0.2 s of processor time.
COUNTS = [pytest.param(30, id="some"), pytest.param(100, id="hundred", marks=pytest.mark.slow)]
HDF5 = [pytest.param(3, id="some"), pytest.param(10, id="ten", marks=pytest.mark.long)]


def folder_of(tmp_path: Path) -> Path:
    copies = tmp_path / "copies"
    copies.mkdir()
    return copies


@pytest.mark.parametrize("count", HDF5)
def test_minari_hdf5(count: int, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    rows = read_rlds([rlds_episode(log) for log in record(Counting(LENGTHS, "nested"), 4)])
    write_minari(rows, tmp_path / "x-v0")
    counts = read_all(damaged_copies(tmp_path / "x-v0", folder_of(tmp_path), count=count, only="*.hdf5"))
    # HDF5 has no checksums where none were asked for: many a value is only another value.
    assert counts["refused"] >= count // 5


@pytest.fixture
def minari_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset that Minari stored as Arrow files."""
    pytest.importorskip("minari")
    from tests.core.formats.test_minari import collect

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    collect("x-v0", Counting(LENGTHS, "nested"), episodes=4, storage="arrow")
    return tmp_path


@pytest.mark.parametrize("count", COUNTS)
def test_minari_arrow(count: int, minari_arrow: Path) -> None:
    tmp_path = minari_arrow
    counts = read_all(damaged_copies(tmp_path / "x-v0", folder_of(tmp_path), count=count, only="*.arrow"))
    assert counts["refused"] > count // 4


def test_minari_metadata(minari_arrow: Path) -> None:
    tmp_path = minari_arrow
    counts = read_all(damaged_copies(tmp_path / "x-v0", folder_of(tmp_path), count=20, only="metadata.json"))
    assert counts["refused"] > 4


@pytest.mark.parametrize("count", HDF5)
def test_d4rl(count: int, tmp_path: Path) -> None:
    path = write_d4rl(tmp_path / "x.hdf5", flat(logged(lengths=LENGTHS)), compression="gzip", chunks=True)
    counts = read_all(damaged_copies(path, folder_of(tmp_path), count=count), format="d4rl")
    assert counts["refused"] >= count // 5


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("compressed", [False, True])
def test_ogbench(compressed: bool, count: int, tmp_path: Path) -> None:
    path = write_ogbench(tmp_path / "x.npz", "raw", logged(lengths=LENGTHS), compressed=compressed)
    counts = read_all(damaged_copies(path, folder_of(tmp_path), count=count))
    # Everything but dates and the like is under a CRC.
    assert counts["refused"] > 0.75 * count


@pytest.mark.parametrize("count", COUNTS)
def test_dopamine(count: int, tmp_path: Path) -> None:
    write_dopamine(tmp_path / "x", atari())
    counts = read_all(damaged_copies(tmp_path / "x", folder_of(tmp_path), count=count, only="*ckpt.0.gz"), final="mark")
    assert counts["refused"] > 0.6 * count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["vector", pytest.param("image", marks=pytest.mark.slow)])
def test_tfrecord(kind: str, count: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_datasets")
    write(tmp_path / "x", features_of(kind), {"train": [rlds_episode(log) for log in logged(kind, LENGTHS)]})
    records = as_tfrecord(tmp_path / "x")
    counts = read_all(damaged_copies(records, folder_of(tmp_path), count=count, only="*.tfrecord*"))
    assert counts == {"refused": count}


@pytest.mark.parametrize("count", COUNTS)
def test_array_record(count: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_datasets")
    write(tmp_path / "x", features_of("nested"), {"train": [rlds_episode(log) for log in logged("nested", LENGTHS)]})
    read_all(damaged_copies(tmp_path / "x", folder_of(tmp_path), count=count, only="*.array_record*"))
    counts = read_all(damaged_copies(tmp_path / "x", tmp_path / "described", only="*.json", count=20))
    assert counts["refused"] > 4
