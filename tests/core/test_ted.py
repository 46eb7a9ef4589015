"""TED: its layouts into one another without loss, and its files, read and written."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, SchemaError, formats
from mouse_core.formats.base import RowStream, rows_digest
from mouse_core.formats.ted import (
    Flat2TED,
    Nested2TED,
    TED2Flat,
    TED2Nested,
    read_checkpoint,
    read_ted,
    write_checkpoint,
    write_ted,
)
from mouse_core.metadata import DatasetMetadata


def steps(
    lengths: list[int], *, codes: list[int] | None = None, seed: int = 0, used: int | None = None
) -> dict[str, Any]:
    """TED of trajectories of these lengths; of a ring of which only `used` places are used, the rest is zero."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    done = np.zeros((n, 1), bool)
    done[np.cumsum(lengths) - 1] = True
    done[-1] = codes is None or codes[-1] != 0
    truncated = done & (np.arange(n) % 2 == 0)[:, None]
    observations = [rng.normal(size=(length + 1, 3)).astype(np.float32) for length in lengths]
    pixels = [rng.integers(0, 255, (length + 1, 4, 2), dtype=np.uint8) for length in lengths]
    zero = np.zeros_like(done)
    data: dict[str, Any] = {
        "observation": np.concatenate([values[:-1] for values in observations]),
        "camera": {"pixels": np.concatenate([values[:-1] for values in pixels])},
        "action": rng.normal(size=(n, 2)).astype(np.float32),
        "collector": {"traj_ids": np.repeat(np.arange(len(lengths)), lengths)},
        "done": zero,
        "terminated": zero,
        "truncated": zero,
        "next": {
            "observation": np.concatenate([values[1:] for values in observations]),
            "camera": {"pixels": np.concatenate([values[1:] for values in pixels])},
            "reward": rng.normal(size=(n, 1)).astype(np.float32),
            "done": done,
            "terminated": done & ~truncated,
            "truncated": truncated,
        },
    }
    if used is not None:
        data = changed(data, lambda values: np.concatenate([values[:used], np.zeros_like(values[used:])]))
    return data


def changed(data: dict[str, Any], change: Any) -> dict[str, Any]:
    return {
        name: changed(value, change) if isinstance(value, dict) else np.asarray(change(value)).astype(value.dtype)
        for name, value in data.items()
    }


def leaves(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name, value


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert np.asarray(values).dtype == np.asarray(theirs[name]).dtype, name
        assert np.array_equal(values, theirs[name]), name


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), shift=st.integers(0, 30), open_end=st.booleans())
def test_layouts_lose_nothing(lengths: list[int], shift: int, open_end: bool) -> None:
    data = steps(lengths, codes=[0] if open_end else None)
    n = sum(lengths)
    shift %= n
    ring = changed(data, lambda values: np.roll(values, shift, axis=0))
    flat = TED2Flat(ring, shift=shift)
    assert len(flat["observation"]) == n + len(lengths)
    assert len(flat["reward"]) == len(flat["action"]) == n
    assert np.array_equal(flat["action"], data["action"])
    assert (flat["shift"], flat["is_full"], flat["_storage_shape"]) == (shift, True, (n,))
    same(Flat2TED(flat), ring)
    nested = TED2Nested(ring, shift=shift)
    assert [len(values) for values in nested["observation"]] == [length + 1 for length in lengths]
    assert [len(values) for values in nested["reward"]] == lengths
    stops = np.cumsum(lengths)[:-1]
    for found, root in zip(nested["observation"], np.split(data["observation"], stops), strict=True):
        assert np.array_equal(found[:-1], root)
    brought = np.split(data["next"]["camera"]["pixels"], stops)
    for found, following in zip(nested["camera"]["pixels"], brought, strict=True):
        assert np.array_equal(found[1:], following)
    same(Nested2TED(nested), ring)
    same(Nested2TED()(TED2Nested(shift=shift)(ring)), ring)


@given(lengths=st.lists(st.integers(2, 5), min_size=2, max_size=4), unused=st.integers(1, 4))
def test_a_ring_that_is_not_full(lengths: list[int], unused: int) -> None:
    n = sum(lengths)
    used = n - min(unused, n - 1)
    data = steps(lengths, used=used)
    same(Flat2TED(TED2Flat(data, shift=used, is_full=False)), data)
    same(Nested2TED(TED2Nested(data, shift=used, is_full=False)), data)


def test_several_environments() -> None:
    lanes = [steps([4, 2, 6], seed=1), steps([5, 7], seed=2), steps([12], seed=3)]
    data = stacked(lanes)
    flat = TED2Flat(data)
    assert len(flat["observation"]) == 36 + 6
    assert flat["_storage_shape"] == (12, 3)
    assert np.array_equal(flat["action"], np.concatenate([lane["action"] for lane in lanes]))
    same(Flat2TED(flat), data)
    nested = TED2Nested(data)
    assert [len(values) for values in nested["action"]] == [4, 2, 6, 5, 7, 12]
    same(Nested2TED(nested), data)


def stacked(lanes: list[dict[str, Any]]) -> dict[str, Any]:
    first = lanes[0]
    return {
        name: stacked([lane[name] for lane in lanes])
        if isinstance(first[name], dict)
        else np.stack([lane[name] for lane in lanes], axis=1)
        for name in first
    }


def test_what_a_layout_cannot_hold_is_refused() -> None:
    data = steps([4, 3])
    data["next"]["observation"][1] += 1
    with pytest.raises(DataError, match="observation: expected next of step 1"):
        TED2Flat(data)
    data = steps([4, 3])
    data["done"] = data["next"]["done"].copy()
    with pytest.raises(DataError, match="done: expected no done flag at the root"):
        TED2Nested(data)
    data = steps([4, 3])
    data["next"]["info"] = data["next"]["reward"]
    with pytest.raises(SchemaError, match=r"next\.info: expected the same key at the root or in reward_keys"):
        TED2Flat(data)
    same(Flat2TED(TED2Flat(data, reward_keys=("reward", "info")), reward_keys=("reward", "info")), data)
    with pytest.raises(SchemaError, match="expected a dict of arrays that has another dict"):
        TED2Flat({"observation": np.zeros(3)})
    flat = TED2Flat(steps([4, 3]))
    flat["observation"] = flat["observation"][:-1]
    with pytest.raises(DataError, match="observation: expected 7 entries, one per step, or 9"):
        Flat2TED(flat)


def expected(lengths: list[int], data: dict[str, Any]) -> dict[str, list[Any]]:
    """The rows that these steps are, by a plain loop."""
    rows: dict[str, list[Any]] = {name: [] for name in ("action", "reward", "done", "observation", "step")}
    begin = 0
    for length in lengths:
        for step in range(length + 1):
            t = begin + step - 1
            first, after = step == 0, data["next"]
            rows["observation"].append((data["observation"][begin] if first else after["observation"][t]).tolist())
            rows["action"].append([0.0, 0.0] if first else data["action"][t].tolist())
            rows["reward"].append(0.0 if first else float(after["reward"][t, 0]))
            rows["done"].append(0 if first else 1 if after["terminated"][t, 0] else 2 * int(after["truncated"][t, 0]))
            rows["step"].append(step)
        begin += length
    return rows


def rows_of(data: dict[str, Any], lengths: list[int]) -> RowStream:
    rows = expected(lengths, data)
    rows["action"] = pa.array(rows["action"], pa.list_(pa.float32(), 2))
    rows["observation"] = pa.array(rows["observation"], pa.list_(pa.float32(), 3))
    rows["episode_step"] = rows.pop("step")
    return stream_of(pa.table(rows | {"metadata_level": np.arange(len(rows["reward"]), dtype=float)}))


def stream_of(table: pa.Table, size: int = 5) -> RowStream:
    return RowStream("made", "datasets", table.schema, lambda: iter(table.to_batches(max_chunksize=size)))


def write_layout(stream: RowStream, path: Path, layout: str) -> None:
    """Write rows as steps, or as a checkpoint of these steps in another layout."""
    if layout == "ted":
        write_ted(stream, path)
        return
    with TemporaryDirectory() as folder:
        write_ted(stream, Path(folder) / "steps")
        write_checkpoint(read_checkpoint(Path(folder) / "steps"), path, layout=layout)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        *(("ted", size) for size in (1, 4, 8192)),
        *((layout, 4) for layout in ("flat", "nested", "h5")),
        *(
            pytest.param(layout, size, marks=pytest.mark.slow)
            for layout in ("flat", "nested", "h5")
            for size in (1, 8192)
        ),
    ],
)
def test_what_is_written_is_read(layout: str, size: int, tmp_path: Path) -> None:
    if layout == "h5":
        pytest.importorskip("h5py")
    lengths = [4, 1, 7, 3]
    data = steps(lengths)
    stream = rows_of(data, lengths)
    write_layout(stream, tmp_path / "data", layout)
    read = formats.open(tmp_path / "data", batch_rows=size)
    assert read.format == "ted"
    table = read.to_table()
    wanted = stream.to_table()
    assert set(table.column_names) == set(wanted.column_names)
    for column in wanted.column_names:
        found = table.column(column).to_pylist()
        assert found == wanted.column(column).to_pylist(), column
    again = read_ted(tmp_path / "data").to_table()
    assert rows_digest(again) == rows_digest(table)


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    size=st.integers(1, 9),
    layout=st.sampled_from(["ted", "flat", "nested"]),
    codes=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_any_rows_survive(
    lengths: list[int], size: int, layout: str, codes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(0)
    step = np.concatenate([np.arange(length + 1) for length in lengths])
    ends = [[0] * length + [code if length else 0] for length, code in zip(lengths, codes, strict=False)]
    table = pa.table(
        {
            "action": np.where(step == 0, 0, rng.integers(0, 9, len(step))),
            "reward": np.where(step == 0, 0, rng.normal(size=len(step))),
            "done": np.concatenate(ends),
            "episode_step": step,
            "observation": pa.array(rng.normal(size=(len(step), 2)).tolist(), pa.list_(pa.float64(), 2)),
        }
    )
    stream = stream_of(table, size)
    folder = tmp_path_factory.mktemp("ted") / "data"
    write_layout(stream, folder, layout)
    found = read_ted(folder, batch_rows=size).to_table()
    # An episode without a transition has no step to be written.
    kept = [length > 0 for length in lengths for _ in range(length + 1)]
    wanted = table.filter(pa.array(kept))
    assert found.select(wanted.column_names).to_pydict() == wanted.to_pydict()


def test_refusals_of_the_writer(tmp_path: Path) -> None:
    stream = rows_of(steps([3]), [3])
    with pytest.raises(ConfigError, match="expected a path that does not exist"):
        write_ted(stream, tmp_path)
    with pytest.raises(ConfigError, match=r"found the name of a \.h5 file"):
        write_ted(stream, tmp_path / "x.h5")
    with pytest.raises(SchemaError, match="alignment"):
        write_ted(stream.replace(metadata=DatasetMetadata("outgoing")), tmp_path / "x")
    table = stream.to_table().append_column("metadata_text", pa.array(["a"] * 4))
    texts = stream_of(table)
    with pytest.raises(SchemaError, match="'metadata_text': expected numbers"):
        write_ted(texts, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(SchemaError, match="made: expected a column 'reward'"):
        write_ted(stream_of(stream.to_table().drop_columns(["reward"])), tmp_path / "x")


def test_one_hot_actions_become_numbers(tmp_path: Path) -> None:
    chosen = np.array([2, 0, 1, 2])
    after = {"observation": np.arange(1.0, 5)[:, None], "reward": np.ones((4, 1)), "done": np.eye(4, dtype=bool)[3:].T}
    data = {"observation": np.arange(4.0)[:, None], "action": np.eye(3, dtype=np.int64)[chosen], "next": after}
    memmap(tmp_path / "td", data, batch=(4,))
    stream = read_ted(tmp_path / "td")
    assert stream.to_table().column("action").to_pylist() == [0, 2, 0, 1, 2]
    assert stream.notes == ("one-hot actions were read as the numbers of the actions",)
    assert read_ted(tmp_path / "td", one_hot=False).to_table().column("action").to_pylist()[1] == [0, 0, 1]


def test_a_ring_is_read_from_its_oldest_step(tmp_path: Path) -> None:
    lengths = [3, 4, 2]
    data = steps(lengths)
    ring = changed(data, lambda values: np.roll(values, 5, axis=0))
    memmap(tmp_path / "storage", ring, batch=(9,))
    (tmp_path / "storage" / "storage_metadata.json").write_text(json.dumps({"len": 9}))
    (tmp_path / "writer").mkdir()
    (tmp_path / "writer" / "metadata.json").write_text(json.dumps({"cursor": 5}))
    table = formats.open(tmp_path).to_table()
    assert table.column("observation").to_pylist() == expected(lengths, data)["observation"]
    (tmp_path / "storage" / "storage_metadata.json").write_text(json.dumps({"len": 4}))
    (tmp_path / "writer" / "metadata.json").write_text(json.dumps({"cursor": 4}))
    assert sum(batch.num_rows for batch in read_ted(tmp_path)) < 9


@pytest.mark.parametrize("name", ["folder", "file.h5"])
def test_environments_follow_each_other(name: str, tmp_path: Path) -> None:
    lengths = [[4, 2, 6], [5, 7], [12]]
    lanes = [steps(lengths[k], seed=k) for k in range(3)]
    data = stacked(lanes)
    del data["camera"], data["next"]["camera"]
    if name == "folder":
        memmap(tmp_path / name, data, batch=(12, 3))
        # TorchRL counts the places of all environments.
        (tmp_path / name / "storage_metadata.json").write_text(json.dumps({"len": 36}))
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / name, "w") as file:
            for path, values in leaves(data):
                file[path.replace(".", "/")] = values
    wanted = [expected(lengths[k], lane) for k, lane in enumerate(lanes)]
    for size in (5, 8192):
        table = formats.open(tmp_path / name, batch_rows=size).to_table()
        for column in ("observation", "action", "reward", "done"):
            assert table.column(column).to_pylist() == [value for rows in wanted for value in rows[column]], column


def memmap(folder: Path, data: dict[str, Any], batch: tuple[int, ...]) -> None:
    """A folder by the description of the format: meta.json and the plain bytes."""
    folder.mkdir(parents=True)
    about: dict[str, Any] = {"shape": list(batch), "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    for name, values in data.items():
        if isinstance(values, dict):
            about[name] = {"type": "TensorDict"}
            memmap(folder / name, values, batch)
        else:
            about[name] = {"device": "cpu", "shape": list(values.shape), "is_nested": False}
            about[name]["dtype"] = f"torch.{values.dtype}"
            (folder / f"{name}.memmap").write_bytes(np.ascontiguousarray(values).tobytes())
    (folder / "meta.json").write_text(json.dumps(about))


def test_trajectories_of_maniskill_are_called_so(tmp_path: Path) -> None:
    """Their groups have the names of TED's nested layout."""
    h5py = pytest.importorskip("h5py")
    shapes = {"actions": (4, 3), "env_states/actors/cube": (5, 13), "obs/agent/qpos": (5, 9)}
    with h5py.File(tmp_path / "trajectory.h5", "w") as file:
        for number in range(2):
            for name in ("success", "terminated", "truncated"):
                file[f"traj_{number}/{name}"] = np.zeros(4, bool)
            for name, shape in shapes.items():
                file[f"traj_{number}/{name}"] = np.zeros(shape, np.float32)
    with pytest.raises(SchemaError, match=r"found trajectories of ManiSkill \(actions, env_st.*format='maniskill'"):
        read_ted(tmp_path / "trajectory.h5")
    rows = formats.open(tmp_path / "trajectory.h5")
    assert (rows.format, rows.to_table().num_rows) == ("maniskill", 10)
