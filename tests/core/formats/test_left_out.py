"""No column vanishes: what lies beside the columns and cannot be read as one is an error, or a note says so."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import DataError, SchemaError, formats
from mouse_core.formats.layouts import read_layouts
from mouse_core.formats.rlds import read_rlds
from mouse_core.formats.ted import read_checkpoint, write_ted
from tests.core.formats.recording import Counting, record, rlds_episode, write_minari
from tests.core.formats.test_flat_files import atari, flat, logged, write_d4rl, write_dopamine, write_ogbench
from tests.core.test_ted import leaves

h5py = pytest.importorskip("h5py")
LENGTHS = (4, -3, 2)
STEPS = 9


RAGGED = {"data": [np.zeros(k % 3, np.float32) for k in range(STEPS)], "dtype": h5py.vlen_dtype(np.float32)}
WAYS: dict[str, dict[str, Any] | None] = {
    "opaque": {"data": np.zeros(STEPS, "V4")},
    "shorter": {"data": np.zeros((STEPS - 1, 2), np.float32)},
    "longer": {"data": np.zeros((STEPS + 1, 2), np.float32)},
    "complex": {"data": np.zeros(STEPS, np.complex64)},
    "ragged": RAGGED,
    "single": {"data": 1.0},
    "without values": {"dtype": h5py.Empty("f4").dtype, "shape": None},
    "a type": None,
}


def replace(file: Any, name: str, way: str) -> None:
    """Replace an array of a file by one that cannot be a column, or by a type without values."""
    if name in file:
        del file[name]
    made = WAYS[way]
    if made is None:
        file[name] = np.dtype("f4")
    else:
        file.create_dataset(name, **made)


@pytest.fixture
def d4rl(tmp_path: Path) -> Path:
    return write_d4rl(tmp_path / "x.hdf5", flat(logged(lengths=LENGTHS)))


# Another process reads an HDF5 file, which has to be started for each.
CASES = [
    pytest.param(name, way, marks=[] if number < 2 else later)
    for name, later in (
        ("infos/speed", pytest.mark.slow),
        ("next_observations", pytest.mark.long),
        ("timeouts", pytest.mark.long),
    )
    for number, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_column_of_d4rl_that_cannot_be_read(name: str, way: str, d4rl: Path) -> None:
    with h5py.File(d4rl, "a") as file:
        replace(file, name, way)
    with pytest.raises(DataError, match=rf"x\.hdf5: {name}: expected (numbers|{STEPS} rows)") as refused:
        formats.open(d4rl)
    if name == "infos/speed":
        assert "leave_out=['infos/speed'] reads the rest" in str(refused.value)
        rest = read_layouts(d4rl, layout="d4rl", leave_out=["infos/speed"]).columns
        assert "info.action_log_probs" in rest
        assert "info.speed" not in rest


def test_what_is_no_column_of_d4rl_is_noted(d4rl: Path) -> None:
    with h5py.File(d4rl, "a") as file:
        file["metadata/policy/weight"] = np.zeros((STEPS, 3))
        file["version"] = 3
        file["names"] = [f"step {k}" for k in range(STEPS)]
    rows = formats.open(d4rl)
    left = "['metadata/algorithm', 'metadata/policy/weight', 'version']"
    assert rows.notes == (f"Left out: {left}, which have no value for each row, or are to be left out.",)
    names = rows.to_table().column("metadata_names").to_pylist()
    assert names[:3] == ["step 0", "step 1", "step 2"]
    with h5py.File(d4rl, "a") as file:
        file["starts"] = [0, 4]  # a value an episode, or a damaged column: the file does not say
    with pytest.raises(DataError, match="starts: expected 9 rows"):
        formats.open(d4rl)
    assert "metadata_starts" not in read_layouts(d4rl, layout="d4rl", leave_out=["starts"]).columns


def test_two_paths_of_one_name(d4rl: Path) -> None:
    with h5py.File(d4rl, "a") as file:
        file["infos/arm/speed"] = np.zeros(STEPS)
        file["infos/arm.speed"] = np.ones(STEPS)
    with pytest.raises(SchemaError, match="expected paths that give different column names"):
        formats.open(d4rl)


@pytest.mark.parametrize("name", ["actions.npy", "readme.txt"])
def test_npz_files_hold_arrays_each_once(name: str, tmp_path: Path) -> None:
    file = write_ogbench(tmp_path / "x.npz", "raw", logged(lengths=LENGTHS))
    with zipfile.ZipFile(file, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that is there already
        archive.writestr(name, archive.read("actions.npy"))
    with pytest.raises(DataError, match=r"x\.npz"):
        formats.open(file)


def test_checkpoints_of_dopamine_have_the_same_stores(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        write_dopamine(tmp_path / "x", atari(), number=number)
    rows = formats.open(tmp_path / "x", final="mark")
    assert rows.notes[1:] == ("Missing checkpoints: 2.",)
    for store in ("observation", "reward"):
        file = tmp_path / "x" / f"$store$_{store}_ckpt.1.gz"
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(DataError, match=rf"checkpoint 1: expected stores .* found no \['{store}'\]"):
            formats.open(tmp_path / "x", final="mark")
        file.write_bytes(data)
    extra = tmp_path / "x" / "$store$_level_ckpt.3.gz"
    extra.write_bytes((tmp_path / "x" / "$store$_reward_ckpt.3.gz").read_bytes())
    with pytest.raises(DataError, match=r"checkpoint 0: expected stores .* found no \['level'\]"):
        formats.open(tmp_path / "x", final="mark")


def rows() -> Any:
    return read_rlds([rlds_episode(log) for log in record(Counting(LENGTHS, "vector"), len(LENGTHS))])


@pytest.mark.parametrize("way", ["opaque", "complex"])
def test_entries_of_ted_in_hdf5(way: str, tmp_path: Path) -> None:
    write_ted(rows(), tmp_path / "x")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, values in leaves(read_checkpoint(tmp_path / "x")):
            file[name.replace(".", "/")] = values
    assert formats.open(tmp_path / "x.h5").digest() == formats.open(tmp_path / "x").digest()
    with h5py.File(tmp_path / "x.h5", "a") as file:
        replace(file, "speed", way)
    with pytest.raises(DataError, match="speed: expected numbers for every step"):
        formats.open(tmp_path / "x.h5")


def test_entries_of_ted_that_are_not_described(tmp_path: Path) -> None:
    write_ted(rows(), tmp_path / "x")
    assert formats.open(tmp_path / "x").to_table().num_rows
    (tmp_path / "x" / "speed.memmap").write_bytes(bytes(4 * STEPS))
    with pytest.raises(DataError, match=r"meta\.json: expected a description of 'speed\.memmap'"):
        formats.open(tmp_path / "x")


@pytest.mark.parametrize("way", ["single", "opaque"])
def test_infos_of_one_minari_episode(way: str, tmp_path: Path) -> None:
    table = rows().to_table()
    speed = pa.array(np.arange(table.num_rows, dtype=np.float32))
    write_minari(table.append_column("info.speed", speed), tmp_path / "x-v0")
    data = next((tmp_path / "x-v0").rglob("main_data.hdf5"))
    with h5py.File(data, "a") as file:
        names: list[str] = []
        file["episode_1"].visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        name = next(name for name in names if name.startswith("infos/"))
        replace(file["episode_1"], name, way)
    with pytest.raises(DataError, match=r"infos/.*infos=False reads the rest"):
        formats.open(tmp_path / "x-v0").to_table()


def test_rows_that_the_data_say_there_are(tmp_path: Path) -> None:
    write_minari(rows(), tmp_path / "x-v0")
    whole = formats.open(tmp_path / "x-v0")
    assert whole.rows == whole.to_table().num_rows
    file = tmp_path / "x-v0" / "data" / "metadata.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"total_steps": about["total_steps"] + 1}))
    with pytest.raises(DataError, match=rf"expected {whole.rows + 1} rows, as declared in the data's metadata"):
        formats.open(tmp_path / "x-v0").to_table()
