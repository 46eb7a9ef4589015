"""D4RL, OGBench and Dopamine files, made to their published description from logs of what an environment returned."""

import gzip
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.dopamine import read_dopamine
from mouse_core.formats.layouts import read_layouts
from tests.core.formats.recording import Counting, Episode, check_rows, record

LENGTHS = (4, -3, 1, -1, 9, 2)


def logged(kind: str = "vector", lengths: Sequence[int] = LENGTHS) -> list[Episode]:
    return list(record(Counting(lengths, kind), len(lengths)))


def flat(logs: Sequence[Episode]) -> dict[str, Any]:
    """T transitions an episode."""
    return {
        "observations": np.array([value for log in logs for value in log.observations[:-1]]),
        "actions": np.array([value for log in logs for value in log.actions]),
        "rewards": np.array([value for log in logs for value in log.rewards]),
        "terminals": np.array([value for log in logs for value in log.terminated]),
        "timeouts": np.array([value for log in logs for value in log.truncated]),
        "next_observations": np.array([value for log in logs for value in log.observations[1:]]),
        "speed": np.array([value["speed"] for log in logs for value in log.infos[:-1]]),
        "log_prob": np.array([-value for log in logs for value in log.rewards]),
    }


def write_d4rl(path: Path, arrays: dict[str, Any], leave: Sequence[str] = (), **options: Any) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            if key not in leave:
                name = {"speed": "infos/speed", "log_prob": "infos/action_log_probs"}.get(key, key)
                file.create_dataset(name, data=values, **options)
        file["metadata/algorithm"] = "random"
    return path


@pytest.mark.parametrize(("final", "kind"), [("drop", "vector"), ("mark", "discrete"), (None, "image")])
def test_d4rl(final: str | None, kind: str, tmp_path: Path) -> None:
    logs = logged(kind)
    arrays = flat(logs)
    leave = ["next_observations"] if final else []
    path = write_d4rl(tmp_path / "x.hdf5", arrays, leave, compression="gzip", chunks=True)
    stream = read_layouts(path, layout="d4rl", final=final, batch_rows=3)
    table = stream.to_table()
    check_rows(table, logs, final=final, reward_dtype="float64")
    assert read_layouts(path, layout="d4rl", final=final).digest() == stream.digest()
    # Infos stay with their observation; what belongs to actions moves with them.
    speeds = np.array(table.column("info.speed").to_pylist())
    steps = table.column("episode_step").to_numpy()
    known = ~np.isnan(speeds).any(axis=1)
    assert np.array_equal(speeds[known, 0], steps[known])
    assert (~known).sum() == (0 if final == "drop" else len(logs))
    assert np.array_equal(table["info.action_log_probs"].to_numpy(), -table["reward"].to_numpy())


def test_d4rl_without_timeouts(tmp_path: Path) -> None:
    logs = logged(lengths=(5, -5, 2, -5))
    path = write_d4rl(tmp_path / "x.hdf5", flat(logs), ["timeouts", "next_observations"])
    rows = read_layouts(path, layout="d4rl", final="mark", episode_steps=5, batch_rows=3).to_table()
    check_rows(rows, logs, final="mark")
    stream = read_layouts(path, layout="d4rl", final="mark")
    assert "There are no timeouts" in " ".join(stream.notes)
    # Without timeouts and without being told, episodes that were cut off run into the next ones.
    assert (stream.to_table().column("episode_step").to_numpy() == 0).sum() == 3


def test_d4rl_shuffled_transitions_stay_pairs(tmp_path: Path) -> None:
    arrays = flat(logged())
    order = np.random.default_rng(0).permutation(len(arrays["rewards"]))
    path = write_d4rl(tmp_path / "x.hdf5", {key: values[order] for key, values in arrays.items()})
    table = read_layouts(path, layout="d4rl", batch_rows=4).to_table()
    observations = np.array(table.column("observation").to_pylist())
    actions = np.array(table.column("action").to_pylist())
    arrived = np.flatnonzero(table.column("episode_step").to_numpy() > 0)
    assert np.array_equal(actions[arrived], arrays["actions"][order])
    assert np.array_equal(observations[arrived - 1], arrays["observations"][order])
    assert np.array_equal(observations[arrived], arrays["next_observations"][order])


def test_d4rl_asks_for_final(tmp_path: Path) -> None:
    path = write_d4rl(tmp_path / "x.hdf5", flat(logged()), ["next_observations"])
    with pytest.raises(ConfigError, match=r"x\.hdf5: .*final='drop'.*final='mark'"):
        read_layouts(path, layout="d4rl")
    with pytest.raises(ConfigError, match="expected a file or folder, found none"):
        read_layouts(tmp_path / "none.hdf5", layout="d4rl", final="drop")
    for key in ("observations", "rewards"):
        lacking = write_d4rl(tmp_path / f"{key}.hdf5", flat(logged()), [key])
        with pytest.raises(DataError, match=f"{key}.hdf5: {key}: expected an array .*, found none"):
            read_layouts(lacking, layout="d4rl", final="drop")


def write_ogbench(path: Path, layout: str, logs: Sequence[Episode], **more: Any) -> Path:
    """The layouts as OGBench's documentation draws them; T+1 rows have an action that leads nowhere at their end."""
    observations = np.array([value for log in logs for value in log.observations])
    actions = np.array([value for log in logs for value in [*log.actions, log.actions[0]]])
    last = np.concatenate([np.arange(len(log) + 1) == len(log) for log in logs])
    qpos = np.array([value["speed"] for log in logs for value in log.infos])
    rewards = np.array([value for log in logs for value in [*log.rewards, -99.0]], np.float32)
    masks = np.array([value for log in logs for value in [*(not flag for flag in log.terminated), 1]], np.float32)
    arrays = {"observations": observations, "actions": actions, "terminals": last.astype(np.float32), "qpos": qpos}
    arrays |= {key: values for key, values in {"rewards": rewards, "masks": masks}.items() if more.get(key)}
    if layout == "compact":
        arrays |= {"valids": 1.0 - last, "terminals": np.minimum(last + np.append(last[1:], 1.0), 1.0)}
    elif layout == "regular":
        arrays = {key: values[~last] for key, values in arrays.items()}
        arrays["next_observations"] = observations[np.append(False, ~last[:-1])]
        arrays["terminals"] = np.append(last[1:], True)[~last].astype(np.float32)
    (np.savez_compressed if more.get("compressed") else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize(("layout", "kind"), [("raw", "vector"), ("compact", "image"), ("regular", "vector")])
def test_ogbench(layout: str, kind: str, tmp_path: Path) -> None:
    logs = logged(kind)
    for log in logs:
        log.rewards = [np.float32(reward) for reward in log.rewards]
    path = write_ogbench(tmp_path / "x.npz", layout, logs, rewards=True, masks=True, compressed=layout == "raw")
    stream = read_layouts(path, layout="ogbench", batch_rows=3)
    check_rows(stream.to_table(), logs, reward_dtype="float32")
    assert read_layouts(path, layout="ogbench").digest() == stream.digest()
    qpos = np.array(stream.to_table().column("metadata_qpos").to_pylist())[:, 0]
    steps = stream.to_table().column("episode_step").to_numpy()
    known = ~np.isnan(qpos)
    assert np.array_equal(qpos[known], steps[known])
    assert (~known).sum() == (len(logs) if layout == "regular" else 0)


def test_ogbench_checks_arrays_that_are_no_columns(tmp_path: Path) -> None:
    """``terminals`` of compact files, of which ``valids`` say the same."""
    path = write_ogbench(tmp_path / "x.npz", "compact", logged(lengths=(2000, -3)))
    content = path.read_bytes()
    place = content.index(b"terminals.npy") + 12_000  # far from what is read with the header
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(DataError, match=r"x\.npz.*CRC"):
        read_layouts(path, layout="ogbench").to_table()


@pytest.mark.parametrize("layout", ["raw", "compact", "regular"])
def test_ogbench_without_rewards_and_masks(layout: str, tmp_path: Path) -> None:
    logs = logged()
    path = write_ogbench(tmp_path / "x.npz", layout, logs)
    for ending, code in (("truncated", 2), ("terminal", 1)):
        stream = read_layouts(path, layout="ogbench", ending=ending)
        assert any("no rewards" in note for note in stream.notes)
        done = stream.to_table().column("done").to_numpy()
        assert done[done > 0].tolist() == [code] * len(logs)
        assert not stream.to_table().column("reward").to_numpy().any()
    with pytest.raises(ConfigError, match="ending: expected 'truncated' or 'terminal', found 'over'"):
        read_layouts(path, layout="ogbench", ending="over")


def write_dopamine(
    folder: Path, logs: Sequence[Episode], *, padding: int = 3, capacity: int = 0, cursor: int = 0, number: int = 0
) -> Path:
    """A ring of transitions as Dopamine writes it: rows of zeros before every episode, the oldest row at the cursor."""
    rows: list[tuple[Any, ...]] = []
    for log in logs:
        rows += [(np.zeros_like(log.observations[0]), 0, 0.0, 0)] * padding + transitions(log)
    return write_ring(folder, rows, capacity or len(rows), cursor, number, None)


def transitions(log: Episode) -> list[tuple[Any, ...]]:
    ended = [0] * (len(log) - 1) + [1]
    return list(zip(log.observations[:-1], log.actions, log.rewards, ended, strict=True))


def write_ring(
    folder: Path, rows: list[tuple[Any, ...]], capacity: int, cursor: int, number: int, added: int | None
) -> Path:
    folder.mkdir(exist_ok=True)
    dtypes = {"observation": np.uint8, "action": np.int32, "reward": np.float32, "terminal": np.uint8}
    for index, (store, dtype) in enumerate(dtypes.items()):
        values = np.array([row[index] for row in rows], dtype)
        ring = np.zeros((capacity, *values.shape[1:]), dtype)
        ring[: len(values)] = values
        with gzip.open(folder / f"$store$_{store}_ckpt.{number}.gz", "wb", compresslevel=1) as file:
            np.save(file, np.roll(ring, cursor, axis=0))
    for name, value in (("add_count", len(rows) + cursor if added is None else added), ("invalid_range", [0])):
        with gzip.open(folder / f"{name}_ckpt.{number}.gz", "wb") as file:
            np.save(file, np.array(value))
    return folder


def atari() -> list[Episode]:
    """Frames [H, W] without colour, the rewards of games; Dopamine has one flag for all ends."""
    logs = logged("image")
    for log in logs:
        log.observations = [frame[:, :, 0] for frame in log.observations]
        log.rewards = [np.float32(reward) for reward in log.rewards]
        log.actions = [np.int32(action) for action in log.actions]
        log.terminated[-1] = True
    return logs


def as_images(logs: list[Episode], table: pa.Table) -> pa.Table:
    """Give the frames of both an axis for colours, of which there are none."""
    assert [str(table.schema.field(name).type) for name in ("action", "reward")] == ["int32", "float"]
    for log in logs:
        log.observations = [frame[:, :, None] for frame in log.observations]
    pixels = [np.array(frame)[:, :, None].tolist() for frame in table.column("observation").to_pylist()]
    column = pa.array(pixels, pa.list_(pa.list_(pa.list_(pa.uint8()))))
    return table.set_column(table.schema.get_field_index("observation"), "observation", column)


@pytest.mark.parametrize("final", ["drop", "mark"])
@pytest.mark.parametrize("padding", [3, 0])
def test_dopamine(final: str, padding: int, tmp_path: Path) -> None:
    logs = atari()
    write_dopamine(tmp_path / "replay_logs", logs, padding=padding)
    stream = read_dopamine(tmp_path, final=final, batch_rows=4)
    check_rows(as_images(logs, stream.to_table()), logs, final=final)
    for size in (1, 2, 3, 5, 100):
        assert read_dopamine(tmp_path, final=final, batch_rows=size).digest() == stream.digest()
    with pytest.raises(ConfigError, match=r"final='drop'.*final='mark'"):
        read_dopamine(tmp_path)


def test_dopamine_rings_that_went_round_or_are_not_full(tmp_path: Path) -> None:
    logs = atari()
    whole = read_dopamine(write_dopamine(tmp_path / "whole", logs), final="mark").digest()
    turned = write_dopamine(tmp_path / "turned", logs, cursor=11)
    assert read_dopamine(turned, final="mark", batch_rows=3).digest() == whole
    partly = write_dopamine(tmp_path / "partly", logs, capacity=100)
    assert read_dopamine(partly, final="mark", batch_rows=3).digest() == whole


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files there")
def test_dopamine_waits_for_no_pipe(tmp_path: Path) -> None:
    root = write_dopamine(tmp_path / "ring", atari())
    file = next(root.rglob("*reward*.gz"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="expected a regular file, found a pipe"):
        read_dopamine(root, final="mark").digest()


def test_dopamine_checkpoints_that_follow_each_other(tmp_path: Path) -> None:
    logs = atari()
    rows = [row for log in logs for row in transitions(log)]
    whole = read_dopamine(write_ring(tmp_path / "whole", rows, 20, 0, 0, 20), final="mark").digest()
    for part in (0, 1):
        write_ring(tmp_path / "log", rows[10 * part : 10 * part + 10], 10, 0, part, 10 * part + 10)
        write_ring(tmp_path / "apart", rows[10 * part : 10 * part + 10], 10, 0, part, 50 * part + 10)
    assert read_dopamine(tmp_path / "log", final="mark", batch_rows=3).digest() == whole
    # With transitions missing between them, an episode begins with each.
    apart = read_dopamine(tmp_path / "apart", final="mark").to_table()
    assert (apart.column("episode_step").to_numpy() == 0).sum() == 7
    (alone,) = (tmp_path / "log").rglob("$store$_action_ckpt.1.gz")
    assert read_dopamine(alone, final="drop").to_table().num_rows < 20
    with pytest.raises(ConfigError, match="found none"):
        read_dopamine(tmp_path, final="drop")


def lying(shape: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    return stream.getvalue().replace(b"'shape': (3,), }", f"'shape': ({shape}), }}".ljust(16).encode()[:40])


def test_arrays_that_lie(tmp_path: Path) -> None:
    good = flat(logged())
    for key, data, message in (
        ("actions", lying("9**9,"), "actions|cannot be read"),
        ("actions", b"no array", "cannot be read"),
        ("terminals", lying("3,"), "terminals: expected 20 rows, one for each step, found 3"),
    ):
        path = tmp_path / "x.npz"
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("observations", "actions", "terminals"):
                stream = io.BytesIO()
                np.save(stream, good[name])
                archive.writestr(f"{name}.npy", data if name == key else stream.getvalue())
        with pytest.raises(DataError, match=message) as caught:
            list(read_layouts(path, layout="ogbench"))
        assert str(path) in str(caught.value)
    folder = write_dopamine(tmp_path / "log", atari())
    file = folder / "$store$_reward_ckpt.0.gz"
    whole, shorter = file.read_bytes(), io.BytesIO()
    np.save(shorter, np.zeros(5, np.float32))
    for content, message in (
        (gzip.compress(shorter.getvalue()), r"expected arrays of equal length, found .*'reward': 5"),
        (whole[:-9], r"reward_ckpt\.0\.gz"),
        (whole[:-8] + b"abcd" + whole[-4:], r"reward_ckpt\.0\.gz.*CRC"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(read_dopamine(folder, final="drop"))
    file.unlink()
    with pytest.raises(DataError, match=r"found no .'reward'"):
        list(read_dopamine(folder, final="drop"))
