"""RoboSet, Gen-DGRL and OpenML: files made to their published layouts, and what the readers make of them."""

import io
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, ConfigError, DataError, SchemaError, formats
from mouse_core.formats.layouts import read_layouts
from mouse_core.formats.openml import read_openml
from tests.core.formats.recording import Episode, check_rows, ends_of, suite
from tests.core.formats.test_flat_files import LENGTHS, logged


def write_roboset(path: Path, logs: Sequence[Episode], *, closed: bool, first: int = 0) -> Path:
    """As RoboHive logs: of late with the reward that came with a row's observation, before with that of its action."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for number, log in enumerate(logs, first):
            trial = file.create_group(f"Trial{number}")
            n = len(log) + closed
            ended = [int(flag) for flag in log.terminated]
            nothing = np.full_like(log.actions[0], np.nan)
            trial["time"] = 0.5 * np.arange(n)
            trial["observations"] = np.array(log.observations[:n])
            trial["actions"] = np.array([*log.actions, *([nothing] if closed else [])])
            trial["rewards"] = np.array([*([99.0] if closed else []), *log.rewards])
            trial["done"] = np.array([*([0] if closed else []), *ended], bool)
            infos = log.infos if closed else log.infos[1:]
            for key in infos[0]:
                trial[f"env_infos/{key}"] = np.array([info[key] for info in infos])
    return path


@pytest.mark.parametrize("closed", [True, False])
def test_roboset(closed: bool, tmp_path: Path) -> None:
    logs = logged()
    write_roboset(tmp_path / "a.h5", logs[:2], closed=closed, first=9)
    write_roboset(tmp_path / "b.h5", logs[2:], closed=closed)
    stream = formats.open(tmp_path, batch_rows=3, **({} if closed else {"final": "mark"}))
    table = stream.to_table()
    check_rows(table, logs, final=None if closed else "mark", infos="info" if closed else "")
    assert stream.format == "roboset"
    begins = np.flatnonzero(table.column("episode_step").to_numpy() == 0)
    assert table.column("metadata_episode").to_numpy()[begins].tolist() == [9, 10, 0, 1, 2, 3]
    assert table.column("metadata_seed").to_numpy()[begins].tolist() == [0, 0, 1, 1, 1, 1]
    if not closed:  # infos arrive with the action, as its reward does
        speeds = table.column("info.speed").to_pylist()
        steps = table.column("episode_step").to_pylist()
        assert [speed[0] for speed in speeds] == steps
        check_rows(read_layouts(tmp_path, layout="roboset", final="drop").to_table(), logs, final="drop")
        with pytest.raises(ConfigError, match="choose: final="):
            read_layouts(tmp_path, layout="roboset")
    rest = read_layouts(tmp_path, layout="roboset", final="mark", leave_out=["*/env_infos"])
    assert "info.speed" not in rest.columns
    assert any(("NaN" if closed else "a number") in note for note in stream.notes)


def test_roboset_goes_on_after_a_flag(tmp_path: Path) -> None:
    """A trial ends where its rows do; flags that were logged before are kept as they were."""
    h5py = pytest.importorskip("h5py")
    path = write_roboset(tmp_path / "x.h5", logged()[:2], closed=True)
    with h5py.File(path, "a") as file:
        file["Trial1/done"][1:3] = True
    table = read_layouts(path, layout="roboset").to_table()
    assert table.column("done").to_pylist() == [0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert table.column("metadata_done").to_pylist() == [False] * 4 + [True, False, True, True, False]


def test_torchrl_makes_the_same_of_roboset(tmp_path: Path) -> None:
    """Of its older layout: of the newer one TorchRL makes transitions with an action NaN, and the reward before."""
    data = pytest.importorskip("torchrl.data.datasets", reason="torchrl is not installed")
    path = write_roboset(tmp_path / "x.h5", logged(), closed=False)

    class Made(data.RobosetExperienceReplay):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.root, self.dataset_id, self.split_trajs = tmp_path, "made", False

    theirs = Made()._preproc_h5([str(path)])
    table = read_layouts(path, layout="roboset", final="mark").to_table()
    led_to = table.column("episode_step").to_numpy() > 0
    for name, found in (("reward", theirs["next", "reward"][:, 0]), ("action", theirs["action"])):
        assert np.array_equal(np.array(table.column(name).to_pylist())[led_to], found.numpy()), name
    left = np.append(led_to[1:], False)
    assert np.array_equal(np.array(table.column("observation").to_pylist())[left], theirs["observation"].numpy())
    assert np.array_equal(table.column("metadata_episode").to_numpy()[left], theirs["episode"].numpy())


def test_roboset_of_other_layouts_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write_roboset(tmp_path / "a.h5", logged()[:1], closed=True)
    write_roboset(tmp_path / "b.h5", logged()[:1], closed=False)
    with pytest.raises(DataError, match=r"b\.h5, Trial0: expected a last action that is NaN, as in"):
        read_layouts(tmp_path, layout="roboset").to_table()
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["Trial0/extra"] = np.zeros(len(file["Trial0/rewards"]))
    with pytest.raises(SchemaError, match=r"expected the arrays of the first episode, found .*'metadata_extra'"):
        read_layouts(tmp_path, layout="roboset").to_table()
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["Trial0/short"] = np.zeros(1)
    with pytest.raises(DataError, match=r"Trial0/short: expected 4 rows, .*leave_out=\['\*/short'\] reads"):
        read_layouts(tmp_path / "b.h5", layout="roboset", final="drop")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["Trial0/actions"] = np.zeros(3)
    with pytest.raises(DataError, match=r"Trial0/observations: expected an array .*, found none"):
        formats.open(tmp_path / "c.h5")


# Each file of HDF5 is read by a process of its own.
TestRoboset = suite(
    ends_of(LENGTHS),
    lambda folder: write_roboset(folder / "trace.h5", logged(), closed=True),
    partial(read_layouts, layout="roboset"),
    pytestmark=pytest.mark.slow,
)


def episode(length: int, seed: int, *, done: bool = True) -> tuple[str, dict[str, Any]]:
    """One of Procgen, with pictures of 8 by 8, and its file's name without the ending."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, (length, 1)).astype(np.float32)
    dones = np.zeros(length, bool)
    dones[-1] = done
    name = f"20230313T133237_{seed}_{length}_{seed + 100}_{rewards.sum():.2f}"
    return name, {
        "observations": rng.integers(0, 256, (length + 1, 3, 8, 8)).astype(np.float32 if seed % 2 else np.uint8),
        "actions": rng.integers(0, 15, (length, 1)),
        "rewards": rewards,
        "dones": dones,
    }


EPISODES = [episode(5, 1), episode(7, 2), episode(3, 3, done=False)]


def bytes_of(arrays: dict[str, Any], kind: str) -> bytes:
    data = io.BytesIO()
    if kind == "npz":
        np.savez_compressed(data, **arrays)
    else:
        np.save(data, np.array(arrays, dtype=object), allow_pickle=True)
    return data.getvalue()


def write_gen_dgrl(path: Path, kind: str) -> Path:
    """In an archive as it is published, or a folder."""
    if not path.suffix:
        path.mkdir()
        for name, arrays in EPISODES:
            (path / f"{name}.{kind}").write_bytes(bytes_of(arrays, kind))
        return path
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as archive:
        folder = tarfile.TarInfo("expert")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, arrays in EPISODES:
            member = tarfile.TarInfo(f"expert/{name}.{kind}")
            data = bytes_of(arrays, kind)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(("name", "kind"), [("bigfish.tar.xz", "npy"), ("bigfish.tar", "npz"), ("bigfish", "npz")])
def test_gen_dgrl(name: str, kind: str, tmp_path: Path) -> None:
    stream = formats.open(write_gen_dgrl(tmp_path / name, kind), batch_rows=4)
    assert stream.format == "gen_dgrl"
    rows = iter(stream.to_table().to_pylist())
    for file, arrays in EPISODES:
        steps = len(arrays["rewards"])
        for step in range(steps + 1):
            row = next(rows)
            assert np.array_equal(row.pop("observation"), np.moveaxis(arrays["observations"][step], 0, -1))
            action, reward = ((arrays[name][step - 1, 0] if step else 0) for name in ("actions", "rewards"))
            done = 0 if step < steps else 1 if arrays["dones"][-1] else 2
            level = int(file.split("_")[3])
            wanted = {"action": action, "reward": reward, "done": done, "episode_step": step}
            assert row == wanted | {"metadata_level_seed": level}
    assert next(rows, None) is None
    assert stream.schema.field("action").type == pa.int64()
    batch = BatchSource(stream.to_store(), sequence_length=2, batch_size=2)[0]
    assert batch["observation"].shape == (2, 2, 8, 8, 3)


def test_torchrl_makes_the_same_of_gen_dgrl(tmp_path: Path) -> None:
    data = pytest.importorskip("torchrl.data.datasets", reason="torchrl is not installed")
    path = write_gen_dgrl(tmp_path / "bigfish.tar.xz", "npy")

    class Made(data.GenDGRLExperienceReplay):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.root, self.dataset_id = tmp_path, "made"

        @classmethod
        def _get_category_len(cls, name: str) -> int:
            return 15

    theirs = Made()._unpack_category_file(str(tmp_path), False, "1M_E", ("1M_E", path.name, ""))
    table = read_layouts(path, layout="gen_dgrl").to_table()
    led_to = table.column("episode_step").to_numpy() > 0
    pictures = np.moveaxis(np.array(table.column("observation").to_pylist()), -1, 1)
    assert np.array_equal(pictures[led_to], theirs["next", "observation"].numpy())
    assert np.array_equal(pictures[np.append(led_to[1:], False)], theirs["observation"].numpy())
    assert np.array_equal(table.column("action").to_numpy()[led_to], theirs["action"][:, 0].numpy())
    assert np.array_equal(table.column("reward").to_numpy()[led_to], theirs["next", "reward"][:, 0].numpy())


def test_gen_dgrl_that_cannot_be(tmp_path: Path) -> None:
    name, arrays = EPISODES[0]
    file = tmp_path / f"{name}.npz"
    for change, wanted in (
        ({"observations": arrays["observations"][1:]}, "final='drop'"),
        ({"actions": arrays["actions"][1:]}, "observations: expected 4 rows"),
        ({"observations": arrays["observations"][0]}, "rows"),
    ):
        np.savez(file, **(arrays | change))
        with pytest.raises((ConfigError, DataError), match=wanted):
            read_layouts(file, layout="gen_dgrl").to_table()
    np.savez(file, **{key: values for key, values in arrays.items() if key != "dones"})
    with pytest.raises(DataError, match="dones: expected an array"):
        read_layouts(file, layout="gen_dgrl")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(__file__, "expert/readme.txt")
    with pytest.raises(DataError, match=r"x\.tar, expert/readme\.txt: expected a file \.npz or \.npy"):
        read_layouts(tmp_path / "x.tar", layout="gen_dgrl")


TestGenDGRL = suite(
    ((6, 1), (8, 1), (4, 2)),
    lambda folder: write_gen_dgrl(folder / "bigfish.tar.xz", "npy"),
    partial(read_layouts, layout="gen_dgrl"),
)


MUSHROOMS = {
    "cap shape": pa.array(["flat", "two words", "flat"]).dictionary_encode(),
    "width": [1.5, -20.0, 3.0],
    "class": ["edible", "poisonous", "poisonous"],
    "stalk": [True, False, True],
}


def write_openml(path: Path, times: int = 1, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.concat_tables([pa.table(MUSHROOMS | columns)] * times), path, write_page_checksum=True)
    return path


def test_openml_is_a_contextual_bandit(tmp_path: Path) -> None:
    path = write_openml(tmp_path / "mushroom.parquet")
    stream = formats.open(path, format="openml", batch_rows=2, target="class")
    assert (stream.format, stream.alignment) == ("openml", "outgoing")
    table = stream.to_table()
    rows = {"observation": [[0, 1.5, 1], [1, -20, 0], [0, 3, 1]], "action": [0, 1, 1]}
    assert table.to_pydict() == rows | {"reward": [1, 1, 1], "done": [1, 1, 1], "episode_step": [0, 0, 0]}
    said = {"features": ["cap shape", "width", "stalk"], "target": "class", "classes": ["edible", "poisonous"]}
    assert dict(stream.format_metadata) == said
    numbers = read_openml(path, target="width").to_table()
    assert numbers.column("action").to_pylist() == [[1.5], [-20], [3]]
    assert len(stream.to_store()) == 3


def test_openml_that_cannot_be(tmp_path: Path) -> None:
    path = write_openml(tmp_path / "x.parquet", width=[1.5, None, 3.0])
    with pytest.raises(DataError, match=r"x\.parquet: 'width': expected values, found 1 nulls; frame.dropna"):
        read_openml(path).to_table()
    with pytest.raises(ConfigError, match="target: expected one of"):
        read_openml(path, target="nothing")
    with pytest.raises(ConfigError, match="expected a Parquet file, found none"):
        read_openml(tmp_path)
    for columns, wanted in (
        ({"width": [[1.0]] * 3}, "'width': expected a column of numbers or texts, found list"),
        ({"class": [str(number) for number in range(10_001)]}, "'class': expected at most 10000 different values"),
    ):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(DataError, match=wanted):
            read_openml(path)


TestOpenML = suite(((1, 1),) * 12, lambda folder: write_openml(folder / "x.parquet", times=4), read_openml)
