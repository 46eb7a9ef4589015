"""Trees of arrays, written to the layouts that libraries publish, from logs of what an environment returned.

robomimic 0.3.0 (scripts/dataset_states_to_obs.py), ManiSkill 3 (utils/wrappers/record.py), ACT
(record_sim_episodes.py), d3rlpy 2.8.1 (dataset/io.py).
"""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, DataError, SchemaError, formats
from mouse_core.formats.layouts import LAYOUTS, TreeLayout, load_layout, read_layouts
from tests.core.formats.recording import Episode, check_rows
from tests.core.formats.test_flat_files import LENGTHS, flat, logged, write_d4rl, write_ogbench
from tests.core.formats.test_torchrls_datasets import write_roboset

h5py = pytest.importorskip("h5py")

SLOW = pytest.mark.slow  # a process of its own for every HDF5 file


def seen(log: Episode) -> np.ndarray:
    return np.array(log.observations)


def save(path: Path, arrays: dict[str, Any], **attributes: Any) -> Path:
    """Arrays by path, in HDF5 or npz."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
        for name, values in arrays.items():
            whole = np.asarray(values)
            sparing = {"compression": "gzip", "chunks": True} if whole.ndim > 1 else {}
            file.create_dataset(name, data=values, **sparing)
    return path


def write_robomimic(path: Path, logs: Sequence[Episode], *, ends: bool = True) -> Path:
    arrays: dict[str, Any] = {}
    for number, log in enumerate(logs):
        demo = f"data/demo_{number}"
        arrays[f"{demo}/actions"], arrays[f"{demo}/rewards"] = np.array(log.actions), np.array(log.rewards)
        arrays[f"{demo}/dones"] = np.array(log.terminated).astype(int)
        arrays[f"{demo}/states"], arrays[f"{demo}/obs/flat"] = seen(log)[:-1] * 2, seen(log)[:-1]
        if ends:
            arrays[f"{demo}/next_obs/flat"] = seen(log)[1:]
    return save(path, arrays | {"mask/train": np.array([b"demo_0"])}, env_args="{}")


def write_maniskill(path: Path, logs: Sequence[Episode]) -> Path:
    arrays: dict[str, Any] = {}
    for number, log in enumerate(logs):
        group = f"traj_{number}"
        arrays[f"{group}/obs"], arrays[f"{group}/env_states/actors/cube"] = seen(log), seen(log) + 1
        arrays[f"{group}/actions"], arrays[f"{group}/rewards"] = np.array(log.actions), np.array(log.rewards)
        arrays[f"{group}/terminated"], arrays[f"{group}/truncated"] = np.array(log.terminated), np.array(log.truncated)
        arrays[f"{group}/success"] = np.array(log.terminated)
    return save(path, arrays)


def write_aloha(folder: Path, logs: Sequence[Episode], suffix: str = "hdf5") -> Path:
    folder.mkdir(exist_ok=True)
    for number, log in enumerate(logs):
        pictures = np.stack([np.full((4, 5, 3), t, np.uint8) for t in range(len(log))])
        arrays = {"observations/qpos": seen(log)[:-1], "observations/images/top": pictures}
        save(folder / f"episode_{number}.{suffix}", arrays | {"action": np.array(log.actions)}, sim=True)
    return folder


def write_d3rlpy(path: Path, logs: Sequence[Episode]) -> Path:
    arrays: dict[str, Any] = {}
    for number, log in enumerate(logs):
        arrays[f"observations_{number}"], arrays[f"actions_{number}"] = seen(log)[:-1], np.array(log.actions)
        arrays[f"rewards_{number}"], arrays[f"terminated_{number}"] = np.array(log.rewards)[:, None], log.terminated[-1]
    return save(path, arrays)


D3RLPY = {name: f"{name}s_*" for name in ("observation", "action", "reward")} | {"terminated": "terminated_*"}


def written(name: str, folder: Path, logs: Sequence[Episode], suffix: str = "hdf5") -> Path:
    path = folder / f"x.{suffix}"
    writers: dict[str, Callable[[], Path]] = {
        "aloha": lambda: write_aloha(folder / "aloha", logs, suffix),
        "d4rl": lambda: write_d4rl(folder / "x.hdf5", flat(logs)),
        "roboset": lambda: write_roboset(folder / "x.h5", logs, closed=True),
        "ogbench": lambda: write_ogbench(folder / "x.npz", "raw", logs),
        "diffusion_policy": lambda: write_zarr(folder / "x.zarr", logs),
        "robomimic": lambda: write_robomimic(path, logs),
        "maniskill": lambda: write_maniskill(path, logs),
        "d3rlpy": lambda: write_d3rlpy(path, logs),
    }
    return writers[name]()


def test_flags_of_arrays_that_hold_several_episodes(tmp_path: Path) -> None:
    arrays = flat(logged())
    layout = {"observation": "observations", "action": "actions", "reward": "rewards", "terminated": "terminals"}
    layout |= {"truncated": "timeouts", "metadata": "speed?", "leave_out": ["speed"]}
    stream = read_layouts(save(tmp_path / "x.npz", arrays), layout=layout, final="mark", batch_rows=1)
    check_rows(stream.to_table(), logged(), final="mark")
    assert "metadata_speed" not in stream.columns
    # One flag says how an episode ended, of which there are several here.
    with pytest.raises(DataError, match="timeouts: expected 20 rows, one for each step, found 0"):
        read_layouts(save(tmp_path / "y.npz", arrays | {"timeouts": np.bool_(True)}), layout=layout, final="mark")
    named = {name: layout[name] for name in ("observation", "action", "reward")}
    with pytest.raises(ConfigError, match=r"expected only one of .* found several"):
        read_layouts(tmp_path / "x.npz", layout=named | {"is_last": "timeouts", "one_a_file": True})


LACKING = {"aloha", "d3rlpy"}


@pytest.mark.parametrize("suffix", ["npz", pytest.param("hdf5", marks=SLOW)])
@pytest.mark.parametrize("name", ["robomimic", "maniskill", "d3rlpy"])
def test_what_was_recorded(name: str, suffix: str, tmp_path: Path) -> None:
    logs = logged()
    path = written(name, tmp_path, logs, suffix)
    final = "mark" if name in LACKING else None
    layout = D3RLPY if name == "d3rlpy" else name
    stream = formats.open(path, format=layout, final=final, batch_rows=4)
    table = stream.to_table()
    found = table.rename_columns([name.replace("observation.flat", "observation") for name in table.column_names])
    check_rows(found, logs, final=final)
    assert stream.format == ("layouts" if name == "d3rlpy" else name)
    assert formats.open(path, format=layout, final=final).digest() == stream.digest()


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=SLOW)])
def test_the_task_of_libero_and_robocasa_is_a_column(ends: bool, tmp_path: Path) -> None:
    logs = logged()
    path = write_robomimic(tmp_path / "x.hdf5", logs, ends=ends)
    with h5py.File(path, "r+") as file:
        file["data"].attrs["problem_info"] = json.dumps({"language_instruction": ["close", " it"]})
        file["data/demo_1"].attrs["ep_meta"] = json.dumps({"lang": "open it"})
        file["data/demo_0"].attrs["ep_meta"] = json.dumps({"layout_id": 3})
    final = None if ends else "mark"
    table = read_layouts(path, layout="robomimic", final=final, batch_rows=2).to_table()
    tasks = ["open it" if number == 1 else "close it" for number, log in enumerate(logs) for _ in range(len(log) + 1)]
    assert table.column("metadata_task").to_pylist() == tasks
    if not ends:
        with h5py.File(path, "r+") as file:
            file["data"].attrs["problem_info"] = "{"
        with pytest.raises(DataError, match=r"x.hdf5, data@problem_info: expected JSON, found '{'"):
            read_layouts(path, layout="robomimic", final="mark")


def test_a_folder_of_maniskill_is_recognised_as_its_files_are(tmp_path: Path) -> None:
    logs = logged()
    for number, part in enumerate((logs[:1], logs[1:])):
        write_maniskill(tmp_path / f"trajectory.{number}.h5", part)
        (tmp_path / f"trajectory.{number}.json").write_text('{"env_info": {"env_id": "PickCube-v1"}, "episodes": []}')
    stream = formats.open(tmp_path)
    assert stream.format == "maniskill"
    check_rows(stream.to_table(), logs)


def test_episodes_without_steps_are_left_out_and_counted(tmp_path: Path) -> None:
    logs = logged()
    arrays = dict(np.load(write_maniskill(tmp_path / "x.npz", logs)))
    nothing = {f"traj_{k}/{name}": arrays[f"traj_0/{name}"][:0] for k in (7, 8) for name in ("actions", "rewards")}
    empty = nothing | {"traj_7/obs": arrays["traj_0/obs"][:1], "traj_8/obs": arrays["traj_0/obs"][:0]}
    renamed = {name.replace("traj_0/", "traj_9/"): array for name, array in arrays.items()}  # the first is empty
    stream = formats.open(save(tmp_path / "y.npz", renamed | empty), format="maniskill")
    with pytest.warns(UserWarning, match=r"y.npz: 2 episodes without steps left out, the first is .*y.npz, traj_7$"):
        check_rows(stream.to_table(), [*logs[1:], logs[0]])
    with pytest.raises(DataError, match="expected an episode with a step, found 2 episodes without"):
        formats.open(save(tmp_path / "z.npz", empty), format="maniskill")
    with pytest.raises(DataError, match=r"traj_8/obs: expected 0 rows, one for each step, found 3"):
        formats.open(save(tmp_path / "z.npz", empty | {"traj_8/obs": np.zeros((3, 2))}), format="maniskill")
    said = {"observation": "x", "action": "a", "episode_ends": "ends"}
    ends = save(tmp_path / "ends.npz", {"x": np.arange(3.0), "a": np.arange(3), "ends": np.array([0, 1, 1, 3])})
    with pytest.warns(UserWarning, match="2 episodes without steps"):
        table = read_layouts(ends, layout=said, final="drop").to_table()
    assert table.column("observation").to_pylist() == [0, 1, 2]


TYPES: list[tuple[str, str, Any, bool]] = [
    ("float64", "float32", 0.1, True),
    ("float32", "float64", 0.5, True),
    ("float32", "float64", np.nan, True),
    ("float32", "float64", 0.1, True),
    ("float32", "float64", 1e300, False),
    ("float32", "int64", 1 << 24, True),
    ("float32", "int64", (1 << 53) + 1, False),
    ("int32", "int64", -(1 << 31), True),
    ("int32", "int64", 1 << 31, False),
    ("int64", "uint64", 1 << 63, False),
    ("int64", "float64", 1.0, True),
    ("int64", "float64", 0.5, False),
    ("uint8", "bool", True, True),
]


@pytest.mark.parametrize(("first", "second", "value", "holds"), TYPES)
def test_numbers_have_the_type_of_the_first(first: str, second: str, value: Any, holds: bool, tmp_path: Path) -> None:
    arrays = {"a_0": np.zeros((3, 2)), "x_0": np.ones((3, 2), first)}
    arrays |= {"a_1": np.zeros((2, 2)), "x_1": np.full((2, 2), value, second)}
    said = {"observation": {"x": "x_*"}, "action": "a_*"}
    stream = read_layouts(save(tmp_path / "x.npz", arrays), layout=said, final="drop")
    if holds:
        rows = stream.to_table().column("observation.x").combine_chunks()
        expected = np.array([value, value]).astype(second).astype(first)
        assert str(rows.flatten().to_numpy().dtype) == first
        assert np.array_equal(rows.to_pylist()[3], expected, equal_nan=first.startswith("f"))
        return
    with pytest.raises(DataError, match=rf"x.npz, a_1: x_1: expected {first} as in the first .* found .*; save that"):
        stream.to_table()


def test_filters_that_are_not_there_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["act"] = np.zeros((4, 2))
        described = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        described.set_chunk((4,))
        described.set_filter(305, h5py.h5z.FLAG_OPTIONAL, ())
        space, kind = h5py.h5s.create_simple((4,)), h5py.h5t.py_create(np.dtype(np.float64))
        h5py.h5d.create(file.id, b"seen", kind, space, described).write_direct_chunk((0,), bytes(32))
    layout = {"observation": "seen", "action": "act", "one_a_file": True}
    with pytest.raises(DataError, match=r"compressed by \['filter 305'\], .* pip install hdf5plugin"):
        read_layouts(tmp_path / "x.hdf5", layout=layout, final="drop")


def test_what_lies_beside_stays_with_its_observation(tmp_path: Path) -> None:
    logs = logged()
    table = formats.open(write_maniskill(tmp_path / "x.npz", logs), format="maniskill").to_table()
    cube = np.array(table.column("metadata_env_states_actors_cube").to_pylist())
    assert np.array_equal(cube, np.concatenate([seen(log) for log in logs]) + 1)
    states = read_layouts(write_robomimic(tmp_path / "y.npz", logs), layout="robomimic").to_table()
    states = states.column("metadata_states").to_pylist()
    expected = [row for log in logs for row in [*(seen(log)[:-1] * 2).tolist(), [np.nan] * 3]]
    assert np.array_equal(states, expected, equal_nan=True)


def test_episodes_in_the_order_of_their_numbers_and_files_of_theirs(tmp_path: Path) -> None:
    logs = logged(lengths=[2] * 12)
    table = formats.open(write_robomimic(tmp_path / "x.npz", logs), format="robomimic").to_table()
    assert np.array_equal(table.column("observation.flat").to_pylist(), np.concatenate([seen(log) for log in logs]))
    stream = formats.open(write_aloha(tmp_path / "aloha", logs), final="drop")
    table = stream.to_table()
    assert table.column("done").to_pylist() == [0, 2] * 12
    assert table.column("reward").to_pylist() == [0] * 24
    assert np.array_equal(table.column("observation.qpos").to_pylist(), np.concatenate([seen(log)[:2] for log in logs]))
    assert table.column("observation.images.top").to_pylist()[1] == np.full((4, 5, 3), 1).tolist()
    assert any("reward is 0" in note for note in stream.notes)
    assert any("their ends count as truncated" in note for note in stream.notes)


def test_observations_that_are_lacking(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.npz", logged(), ends=False)
    with pytest.raises(ConfigError, match="choose: final='drop'"):
        formats.open(path, format="robomimic")
    rows = formats.open(path, format="robomimic", final="mark").to_table()
    assert sum(rows.column("observation_missing").to_pylist()) == len(LENGTHS)
    layout = {"observation": ["observations?", "others?"], "action": "actions", "one_a_file": True}
    with pytest.raises(DataError, match=r"expected observations in observations or others, found none"):
        read_layouts(save(tmp_path / "z.npz", {"actions": np.zeros(3)}), layout=layout, final="drop")


# ---------------------------------------------------------------------------------------------------------------- zarr


def write_zarr(path: Path, logs: Sequence[Episode], version: int = 3) -> Path:
    """As Diffusion Policy's ReplayBuffer does, in chunks that begin and end anywhere."""
    zarr = pytest.importorskip("zarr")
    store = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else str(path)
    root = zarr.open_group(store, mode="w", zarr_format=version)
    arrays = {
        "data/state": np.concatenate([seen(log)[:-1] for log in logs]),
        "data/action": np.concatenate([log.actions for log in logs]),
        "meta/episode_ends": np.cumsum([len(log) for log in logs]),
    }
    for name, values in arrays.items():
        root.create_array(name, data=values, chunks=(7, *values.shape[1:]))
    if path.suffix == ".zip":
        store.close()
    return path


ZARR = ["x.zarr"] + [pytest.param(name, marks=SLOW) for name in ("x2.zarr", "x.zarr.zip", "x2.zarr.zip")]


@pytest.mark.parametrize("name", ZARR)
def test_zarr_groups(name: str, tmp_path: Path) -> None:
    logs = logged()
    path = write_zarr(tmp_path / name, logs, version=2 if "2" in name else 3)
    stream = formats.open(path, final="mark", batch_rows=3)
    table = stream.to_table()
    assert stream.format == "diffusion_policy"
    expected = [row for log in logs for row in [*seen(log)[:-1].tolist(), [0, 0, 0]]]
    assert table.column("observation.state").to_pylist() == expected
    expected = [row for log in logs for row in [[0, 0], *np.array(log.actions).tolist()]]
    assert table.column("action").to_pylist() == expected
    assert table.column("done").to_pylist() == [code for log in logs for code in [*[0] * len(log), 2]]
    if name == "x2.zarr":
        (path / CHUNK).unlink()
        note = "data/action: 1 of 3 chunks are missing and are read as the fill value."
        assert note in formats.open(path, final="mark").notes


DESCRIBED = "data/action/.zarray"
CHUNK = "data/action/0.0"
SPOILED: list[tuple[Any, str]] = [
    (lambda path: (path / DESCRIBED).unlink(), "expected equal numbers of observations|action"),
    (
        lambda path: (path / "meta/episode_ends/.zarray").write_text((path / DESCRIBED).read_text()),
        "expected integers",
    ),
]


@SLOW
@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_zarr_groups_that_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "x.zarr", logged(), version=2)
    spoil(path)
    layout = {"observation": "data/state", "action": "data/action", "episode_ends": "meta/episode_ends"}
    with pytest.raises(DataError, match=message):
        read_layouts(path, layout=layout, final="mark").to_table()


@pytest.mark.parametrize("name", ["drqv2", "dreamer"])
def test_episodes_of_drqv2_and_dreamer(name: str, tmp_path: Path) -> None:
    logs = logged("image")
    for number, log in enumerate(logs):
        arrays = {"action": np.array([0, *log.actions]), "reward": np.array([0, *log.rewards])}
        if name == "drqv2":
            arrays |= {"observation": seen(log), "discount": 1 - np.array([0, *log.terminated], np.float32)}
        else:
            arrays |= {"image": seen(log), "is_terminal": np.array([False, *log.terminated])}
        np.savez_compressed(tmp_path / f"20210701T10101{number}_{number}_{len(log)}.npz", **arrays)
    stream = formats.open(tmp_path, batch_rows=4)
    assert stream.format == name
    check_rows(stream.to_table(), logs)


def test_an_npz_file_that_was_cut_or_claims_more(tmp_path: Path) -> None:
    path = write_own(tmp_path / "x.npz", logged()[0])
    content = path.read_bytes()
    for damaged, message in (
        (content[: len(content) // 2], r"x\.npz"),
        (content.replace(b"(5, 3)", b"(9, 3)"), r"expected 108 bytes for shape \[9, 3\], found|CRC"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            read_layouts(path, layout=ARRIVED)
    np.savez(path, seen=np.array([{"a": 1}], object), act=np.zeros(1))
    with pytest.raises(DataError, match="seen: expected numbers for observation, found other"):
        read_layouts(path, layout={"observation": "seen", "action": "act", "one_a_file": True})


def as_png(pictures: np.ndarray) -> list[bytes]:
    """Each picture as a PNG file; the test is skipped where Pillow is missing."""
    image, found = pytest.importorskip("PIL.Image"), []
    for picture in pictures:
        file = io.BytesIO()
        image.fromarray(picture).save(file, "png")
        found.append(file.getvalue())
    return found


def test_pictures_that_are_encoded(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 6, 7, 3), np.uint8)
    encoded = [np.frombuffer(content, np.uint8) for content in as_png(pictures)]
    rows = np.zeros((3, max(map(len, encoded)) + 5), np.uint8)
    for row, one in zip(rows, encoded, strict=True):
        row[: len(one)] = one
    path = save(tmp_path / "x.npz", {"action": np.zeros((3, 2)), "observations/images/top": rows})
    table = read_layouts(path, layout="aloha", final="mark").to_table()
    assert table.column("observation.images.top").to_pylist()[:3] == pictures.tolist()
    # In all paths * stands for an episode.
    starred = {"observation": "run_*/cam", "action": "run_*/cmd", "pictures": "run_*/cam"}
    arrays = {"run_0/cmd": np.zeros((3, 2)), "run_0/cam": rows, "run_0/more/time": np.zeros(3), "said": np.zeros(2)}
    stream = read_layouts(save(tmp_path / "y.npz", arrays), layout=starred, final="mark")
    assert stream.notes[0] == "Left out: ['run_0/more/time'], which have no place in the layout."
    table = stream.to_table()
    assert table.column("observation").to_pylist()[:3] == pictures.tolist()
    other = r"x.npz.*images/top: expected images of shape \[6, 7, 3\], found shape \[5, 7, 3\]"
    (smaller,) = as_png(pictures[:1, :5])
    for content, message in ((b"no picture", "observations/images/top"), (smaller, other)):
        rows[1] = np.resize(np.frombuffer(content + bytes(rows.shape[1]), np.uint8), rows.shape[1])
        save(path, {"action": np.zeros((3, 2)), "observations/images/top": rows})
        with pytest.raises(DataError, match=message):
            read_layouts(path, layout="aloha", final="mark").to_table()


def test_pictures_in_strings_of_bytes(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 6, 7, 3), np.uint8)
    encoded = as_png(pictures)
    with h5py.File(tmp_path / "episode_0.hdf5", "w") as file:
        file["action"], file["observations/qpos"] = np.zeros((3, 2)), np.zeros((3, 2))
        file["observations/images/one"], file["compress_len"] = np.array(encoded), np.zeros((2, 3))  # S
        own = file.create_dataset("observations/images/own", (3,), h5py.vlen_dtype(np.uint8))
        for step, content in enumerate(encoded):
            own[step] = np.frombuffer(content, np.uint8)
    stream = formats.open(tmp_path, final="mark")
    assert stream.notes[0] == "Left out: ['compress_len'], which have no place in the layout."
    table = stream.to_table()
    for name in ("one", "own"):
        assert table.column(f"observation.images.{name}").to_pylist()[:3] == pictures.tolist()


def test_episodes_of_other_shapes_are_named(tmp_path: Path) -> None:
    for number, side in enumerate((4, 4, 5)):
        save(tmp_path / f"{number}.npz", {"action": np.zeros((3, 2)), "seen": np.zeros((3, side, 4, 3), np.uint8)})
    layout = {"observation": "seen", "action": "action", "one_a_file": True}
    with pytest.raises(DataError, match=r"2\.npz: column 'observation': expected shape \[4, 4, 3\] per step, f"):
        read_layouts(tmp_path, layout=layout, final="drop").to_table()


ARRIVED = TreeLayout(
    observation="seen",
    action="act",
    reward="rew",
    terminated="not discount",
    metadata=["speed"],
    alignment={"reward": "arrived", "terminated": "arrived"},
    one_a_file=True,
)


def write_own(path: Path, log: Episode) -> Path:
    arrays = {
        "seen": seen(log),
        "act": np.array([*log.actions, log.actions[0]]),  # one that leads nowhere
        "rew": np.array([-77, *log.rewards]),
        "discount": 1.0 - np.array([0, *log.terminated]),
        "speed": np.array([info["speed"] for info in log.infos]),
        "else": np.zeros(3),
    }
    return save(path, arrays)


def test_rewards_that_stand_beside_the_observation_they_came_with(tmp_path: Path) -> None:
    logs = logged()
    for number, log in enumerate(logs):
        write_own(tmp_path / f"{number}.npz", log)
    for rows in (2, 100):
        table = read_layouts(tmp_path, layout=ARRIVED, batch_rows=rows).to_table()
        check_rows(table, logs, reward_dtype="float64")
        speeds = [info["speed"].tolist() for log in logs for info in log.infos]
        assert table.column("metadata_speed").to_pylist() == speeds


YAML = """
version: 1
observation: {place: all/x, picture: all/pixels}
action: all/a
episode_ends: ends
ending: terminal
"""


def test_a_layout_in_ten_lines(tmp_path: Path) -> None:
    pixels = np.zeros((6, 2, 2, 3), np.uint8)
    path = tmp_path / "x.npz"
    save(path, {"all/x": np.arange(6.0), "all/a": np.arange(6), "all/pixels": pixels, "ends": np.array([2, 6])})
    (tmp_path / "mine.yaml").write_text(YAML)
    table = formats.open(path, format=str(tmp_path / "mine.yaml"), final="mark").to_table()
    assert table.column("observation.place").to_pylist() == [0, 1, 0, 2, 3, 4, 5, 0]
    assert table.column("action").to_pylist() == [0, 0, 1, 0, 2, 3, 4, 5]
    assert table.column("done").to_pylist() == [0, 0, 1, 0, 0, 0, 0, 1]
    said = {"observation": "all/x", "action": "all/a", "episode_ends": "ends"}
    rows = formats.open(path, format=said, final="drop").to_table()
    assert rows.column("observation").to_pylist() == [0, 1, 2, 3, 4, 5]


ONE = {"observation": "x", "one_a_file": True}
WRONG: list[tuple[Any, str]] = [
    ({}, "expected a path for observation or action"),
    ({"observations": "x"}, r"found \['observations'\]"),
    ({"observation": "x"}, "expected an argument that defines where episodes end"),
    ({"observation": "../x", "one_a_file": True}, "expected a path as"),
    ({"observation": "*/*", "action": "a"}, r"at most one '\*'"),
    ({"observation": "*/x", "action": "a"}, r"expected '\*' in the paths"),
    ({"observation": "x_*", "one_a_file": True}, "found several"),
    (ONE | {"task": "data/task"}, "a group and an attribute as 'data@task'"),
    ({"observation": 3}, "expected a path, some paths"),
    (ONE | {"alignment": "late"}, "expected 'outgoing' or 'arrived'"),
    ({"observation": "x", "terminated": "t", "alignment": "arrived"}, "if only flags define"),
    (ONE | {"ending": "lost"}, "expected 'truncated' or 'terminal'"),
    ({"observation": "not x", "one_a_file": True}, "without 'not'"),
    (ONE | {"numbers": {"seed": "x"}}, "expected 'file', "),
    (ONE | {"numbers": {"trial": "*"}}, r"expected '\*' in paths"),
    ({"observation": "x", "nan_action": True}, r"'\*' in paths"),
    ({"observation": "x", "terminated": "t", "episode_steps": 0}, "expected a positive number"),
    (ONE | {"leave_out": "y"}, "leave_out"),
    (ONE | {"files": "a/*"}, "names of files"),
]


def test_layouts_of_no_use(tmp_path: Path) -> None:
    for said, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            load_layout(said)
    file = tmp_path / "x.yaml"
    for text, message in {
        YAML.replace("version: 1", "version: 2"): "version: expected 1, found 2, of a newer mouse-data",
        YAML.replace("version: 1", ""): "version: expected 1, found None",
        "- 1": "expected a mapping, found list",
        "a: [": "cannot be read",
    }.items():
        file.write_text(text)
        with pytest.raises((ConfigError, DataError), match=message):
            load_layout(file)
    with pytest.raises(ConfigError, match="expected one of"):
        read_layouts(tmp_path, layout="robosuite")


def other_states(file: Any) -> None:
    del file["data/demo_1/states"]


def no_actions(file: Any) -> None:
    del file["data/demo_2/actions"]


def longer_actions(file: Any) -> None:
    rows = file["data/demo_0/actions"][:]
    del file["data/demo_0/actions"]
    file["data/demo_0/actions"] = np.concatenate([rows, rows])


@SLOW
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (longer_actions, DataError, "expected"),
        (other_states, SchemaError, "demo_1: expected the arrays of the first episode, found .*states"),
        (no_actions, DataError, "data/demo_2/actions: expected an array"),
    ],
)
def test_what_is_refused(change: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", logged())
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(error, match=message):
        read_layouts(path, layout="robomimic").to_table()


@SLOW
def test_every_layout_has_a_sign(tmp_path: Path) -> None:
    logs = logged(lengths=[3, -2])
    for name in LAYOUTS.keys() - {"drqv2", "dreamer", "gen_dgrl"}:
        (tmp_path / name).mkdir()
        assert formats.open(written(name, tmp_path / name, logs), final="drop").format == name
