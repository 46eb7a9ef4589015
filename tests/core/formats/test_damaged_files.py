"""A hundred damaged files of each of: Minari, TFDS, OGBench, Dopamine, TED, LeRobot; of HDF5 ten."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mouse_core.formats.rlds import read_rlds
from tests.core.damaged_files import damaged_copies, read_all, read_each
from tests.core.formats import test_robot_logs
from tests.core.formats.recording import Counting, record, rlds_episode, write_minari
from tests.core.formats.robots import write_mcap
from tests.core.formats.test_dreamerv3 import logs_of, stream, write_replay
from tests.core.formats.test_flat_files import atari, flat, logged, write_d4rl, write_dopamine, write_ogbench
from tests.core.formats.test_tfds import as_tfrecord, features_of, write
from tests.core.test_damaged_rows import recording
from tests.core.test_lerobot import Robot
from tests.core.test_ted import write_layout

STATE = {"observation": "/joints.position", "action": "/command.data", "tolerance": 0.02, "rate": 20}
LENGTHS = (20, -15, 1, 8)


def minari_hdf5(folder: Path) -> Path:
    rows = read_rlds([rlds_episode(log) for log in record(Counting(LENGTHS, "nested"), 4)])
    return write_minari(rows, folder / "x-v0")


def minari_arrow(folder: Path) -> Path:
    """A dataset that Minari stored as Arrow files."""
    pytest.importorskip("minari")
    from tests.core.formats.test_minari import collect

    collect("x-v0", Counting(LENGTHS, "nested"), episodes=4, storage="arrow")
    return folder / "x-v0"


def d4rl(folder: Path) -> Path:
    return write_d4rl(folder / "x.hdf5", flat(logged(lengths=LENGTHS)), compression="gzip", chunks=True)


def ogbench(folder: Path) -> Path:
    return write_ogbench(folder / "x.npz", "raw", logged(lengths=LENGTHS))


def ogbench_compressed(folder: Path) -> Path:
    return write_ogbench(folder / "x.npz", "raw", logged(lengths=LENGTHS), compressed=True)


def dopamine(folder: Path) -> Path:
    return write_dopamine(folder / "x", atari())


def dreamerv3(folder: Path) -> Path:
    write_replay(folder / "x", [stream(logs_of())])
    return folder / "x"


def mcap(folder: Path) -> Path:
    return write_mcap(folder / "x.mcap", test_robot_logs.log_of())


def array_record(folder: Path, kind: str = "nested") -> Path:
    pytest.importorskip("tensorflow_datasets")
    write(folder / "x", features_of(kind), {"train": [rlds_episode(log) for log in logged(kind, LENGTHS)]})
    return folder / "x"


def tfrecord(folder: Path) -> Path:
    return as_tfrecord(array_record(folder, "vector"))


def tfrecord_of_images(folder: Path) -> Path:
    return as_tfrecord(array_record(folder, "image"))


def ted(folder: Path, layout: str = "nested") -> Path:
    write_layout(recording(texts=False), folder / "x", layout)
    return folder / "x"


def lerobot(folder: Path) -> Path:
    pytest.importorskip("av")
    return Robot((5, 3, 7, 12), cameras=["top"]).write(folder / "x")


# How many of the copies are refused at least. HDF5 has no checksums where none were asked for, so that many a value is
# only another value; another process, which has to be started for each, reads it. In npz all but dates is under a CRC.
CASES = [
    *((made, 3, "*.hdf5", 0.2) for made in (minari_hdf5, d4rl)),
    *(pytest.param(made, 10, "*.hdf5", 0.2, marks=pytest.mark.long) for made in (minari_hdf5, d4rl)),
    (minari_arrow, 100, "*.arrow", 0.25),
    (minari_arrow, 20, "metadata.json", 0.2),
    (ogbench, 100, "*", 0.75),
    (ogbench_compressed, 100, "*", 0.75),
    (dopamine, 100, "*ckpt.0.gz", 0.6),
    (tfrecord, 100, "*.tfrecord*", 1),
    (tfrecord_of_images, 100, "*.tfrecord*", 1),
    (array_record, 100, "*.array_record*", 0),
    (array_record, 20, "*.json", 0.2),
    (dreamerv3, 100, "*", 0.6),
    (lerobot, 100, "*", 0.5),
    *(
        (partial(ted, layout=layout), count, only, least)
        for layout in ("ted", "flat", "nested")
        for count, only, least in ((70, "*", 0.2), (30, "meta.json", 0.5))
    ),
    pytest.param(partial(ted, layout="h5"), 15, "*.h5", 0.15, marks=pytest.mark.long),
    (mcap, 150, "*", 0.4),  # what is behind the data, an index and statistics, is not read
]
OPTIONS: dict[Any, dict[str, Any]] = {
    d4rl: {"format": "d4rl"},
    dopamine: {"final": "mark"},
    lerobot: {"final": "drop"},
    mcap: {"format": STATE},
}


@pytest.mark.slow
@pytest.mark.parametrize(("made", "count", "only", "least"), CASES)
def test_damage_is_refused_or_reads_as_rows(
    made: Callable[[Path], Path], count: int, only: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    source, copies = made(tmp_path), tmp_path / "copies"
    copies.mkdir()
    counts = read_all(damaged_copies(source, copies, count=count, only=only), **OPTIONS.get(made, {}))
    assert counts["refused"] >= least * count


def test_some_damage_of_several_formats(tmp_path: Path) -> None:
    copies = []
    for made in (ogbench, dopamine, dreamerv3, mcap):
        folder = tmp_path / made.__name__
        (folder / "copies").mkdir(parents=True)
        damaged = damaged_copies(made(folder), folder / "copies", count=10)
        copies += [(str(copy), OPTIONS.get(made, {})) for copy in damaged]
    assert read_each(copies)["refused"] >= 20
