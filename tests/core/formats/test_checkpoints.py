"""Checkpoints of TorchRL's buffers: what is written is read, each observation lies there once, and TorchRL agrees."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, SchemaError, formats
from mouse_core.formats.ted import H5Combine, H5Split, TED2Nested, read_checkpoint, write_checkpoint
from mouse_core.replay import ArrayStorage, ListStorage, ReplayBuffer
from tests.core.test_ted import changed, leaves, same, stacked, steps

LAYOUTS = ("ted", "flat", "nested", "h5")


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    layout=st.sampled_from(LAYOUTS),
    several=st.booleans(),
    unused=st.integers(0, 3),
    cursor=st.integers(0, 20),
    open_end=st.booleans(),
)
def test_what_is_written_is_read_from_the_oldest_step_on(
    lengths: list[int], layout: str, several: bool, unused: int, cursor: int, open_end: bool
) -> None:
    n = sum(lengths)
    data = steps(lengths, codes=[0] if open_end else None)
    if several:
        data = stacked([data, steps(lengths[::-1], seed=1)])
    cursor = 0 if unused else cursor % n
    ring = changed(data, lambda values: np.roll(values, cursor, axis=0))
    with TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        count = write_checkpoint(ring, path, layout=layout, capacity=n + unused, cursor=cursor)
        assert count == n * (2 if several else 1)
        same(read_checkpoint(path), data)


def test_each_observation_lies_there_once(tmp_path: Path) -> None:
    data = steps([6, 4])
    sizes = {}
    for layout in LAYOUTS[:3]:
        write_checkpoint(data, tmp_path / layout, layout=layout)
        sizes[layout] = sum(file.stat().st_size for file in (tmp_path / layout).rglob("observation.memmap"))
    assert sizes == {"ted": 2 * 10 * 12, "flat": 12 * 12, "nested": 12 * 12}


def test_the_files_say_what_torchrl_looks_for(tmp_path: Path) -> None:
    """As TorchRL 0.14 wrote them for seven of twelve places."""
    write_checkpoint(steps([3, 4]), tmp_path / "it", capacity=12, batch_size=4)

    def said(name: str) -> Any:
        return json.loads((tmp_path / "it" / name).read_text())

    assert said("buffer_metadata.json") == {"batch_size": 4, "consume_after_n_samples": None}
    assert said("writer/metadata.json") == {"cursor": 7, "write_count": 7}
    assert said("storage/storage_metadata.json") == {"metadata": {}, "is_pytree": False, "len": 7}
    values = {name: said(f"storage/{name}/meta.json")["data"] for name in ("shift", "is_full", "_storage_shape")}
    assert values == {"shift": 7, "is_full": False, "_storage_shape": [12]}
    # 12 places, and an end each of two trajectories.
    assert said("storage/meta.json")["observation"]["shape"] == [14, 3]


@pytest.mark.parametrize("storage", [ArrayStorage(10), ListStorage(10), ArrayStorage(20, ndim=2)])
def test_a_buffer_is_written_as_it_stands(storage: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage, batch_size=4)
    data = steps([3, 4, 5])
    data = stacked([data, steps([5, 7], seed=1)]) if storage.ndim == 2 else data
    buffer.extend(data)  # the first two steps have been written over
    lanes = storage.num_envs
    assert write_checkpoint(buffer, tmp_path / "it", layout="nested") == 10 * lanes
    found = read_checkpoint(tmp_path / "it")
    same(found, changed(data, lambda values: values[2:]))
    assert json.loads((tmp_path / "it/writer/metadata.json").read_text())["cursor"] == 2
    again = ReplayBuffer(ArrayStorage(10 * lanes, ndim=storage.ndim), batch_size=4)
    again.extend(found)
    assert len(again) == 10 * lanes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_opened_as_rows(layout: str, tmp_path: Path) -> None:
    write_checkpoint(steps([3, 4, 2], seed=3), tmp_path / "it", layout=layout, capacity=11)
    table = formats.open(tmp_path / "it").to_table()
    assert table.column("episode_step").to_pylist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_trajectories_split_and_combined_are_the_same() -> None:
    nested = TED2Nested(steps([1] * 10 + [2]))
    split = H5Split()(nested)
    assert [name for name in split if name.startswith("traj")] == [f"traj_{number:02d}" for number in range(11)]
    assert split["traj_10"]["camera"]["pixels"].shape == (3, 4, 2)
    backwards = dict(reversed(split.items()))
    found = H5Combine()(backwards)
    assert found["shift"] == nested["shift"]
    for name, values in leaves({key: value for key, value in nested.items() if isinstance(value, dict | list)}):
        place: Any = found
        for part in name.split("."):
            place = place[part]
        assert all(np.array_equal(one, other) for one, other in zip(place, values, strict=True)), name


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    data = steps([3, 4])
    for error, message, options in (
        (ConfigError, "layout: expected one of", {"layout": "compact"}),
        (ConfigError, "capacity: expected at least 7, the number of steps, found 6", {"capacity": 6}),
        (ConfigError, r"cursor: expected a position in a full ring, 0\.\.9", {"capacity": 10, "cursor": 2}),
        (ConfigError, r"cursor: expected a position in a full ring, 0\.\.6, found 7", {"cursor": 7}),
    ):
        with pytest.raises(error, match=message):
            write_checkpoint(data, tmp_path / "it", **options)
    with pytest.raises(ConfigError, match="expected steps, found an empty buffer"):
        write_checkpoint(ReplayBuffer(), tmp_path / "it")
    with pytest.raises(SchemaError, match="steps: expected a dict of arrays that has another dict"):
        write_checkpoint({"observation": np.zeros(3)}, tmp_path / "it")
    data["next"]["observation"][1] += 1
    with pytest.raises(DataError, match="observation: expected next of step 1"):
        write_checkpoint(data, tmp_path / "it")
    # A ring whose oldest step lies in place 2: what is wrong is told by its place.
    ring = changed(data, lambda values: np.roll(values, 2, axis=0))
    with pytest.raises(DataError, match=r"next of step 3,.* mark that step as truncated and done; .*layout='ted'"):
        write_checkpoint(ring, tmp_path / "it", cursor=2)
    assert not list(tmp_path.iterdir())
    write_checkpoint(data, tmp_path / "it", layout="ted")  # which holds any steps
    with pytest.raises(SchemaError, match="data: expected trajectories 'traj_0'"):
        H5Combine({"shift": 0})
    with pytest.raises(SchemaError, match="traj_1: expected the entries of traj_0"):
        H5Combine({"traj_0": {"a": [1]}, "traj_1": {"b": [1]}})
    with pytest.raises(SchemaError, match="expected lists with equal numbers of trajectories"):
        H5Split({"a": [[1]], "b": [[1], [2]]})


def test_damage_is_told(tmp_path: Path) -> None:
    write_checkpoint(steps([3, 4]), tmp_path / "it", capacity=8)
    file = tmp_path / "it" / "storage" / "shift" / "meta.json"
    content = file.read_text()
    for value in ('"x"', "-1", "0", "100"):
        file.write_text(content.replace('"data": 7', f'"data": {value}'))
        assert file.read_text() != content
        with pytest.raises((DataError, SchemaError), match="shift"):
            read_checkpoint(tmp_path / "it")
    h5py = pytest.importorskip("h5py")
    write_checkpoint(steps([3, 4]), tmp_path / "h5", layout="h5")
    for entries, message in ((2, r"traj_1/action: expected 4 entries, .* found \[2, 2\]"), (0, "traj_1: ex")):
        with h5py.File(tmp_path / "h5" / "storage" / "checkpoint.h5", "a") as whole:
            action = whole.pop("traj_1/action")[:entries]
            if entries:
                whole["traj_1/action"] = action
        with pytest.raises((DataError, SchemaError), match=message):
            read_checkpoint(tmp_path / "h5")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("several", "capacity"), [(False, 12), (False, 15), (True, 12), (True, 14)])
def test_torchrl_loads_what_was_written_and_is_read(layout: str, several: bool, capacity: int, tmp_path: Path) -> None:
    rl = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    from torchrl.data.replay_buffers import checkpointers

    kinds = {"ted": "TensorStorage", "flat": "FlatStorage", "nested": "NestedStorage", "h5": "H5Storage"}

    def buffer() -> Any:
        made = rl.ReplayBuffer(storage=rl.LazyTensorStorage(capacity * (1 + several), ndim=1 + several), batch_size=4)
        made.storage.checkpointer = getattr(checkpointers, f"{kinds[layout]}Checkpointer")()
        return made

    data = steps([4, 2, 6])
    data = stacked([data, steps([5, 7], seed=1)]) if several else data
    write_checkpoint(data, tmp_path / "ours", layout=layout, capacity=capacity, batch_size=4)
    theirs = buffer()
    theirs.loads(tmp_path / "ours")
    assert len(theirs) == 12 * (1 + several)
    assert theirs.sample().batch_size == (4,)
    cursor = theirs.writer._cursor
    found = theirs.storage._storage[:12]
    if cursor < 12:  # of a full ring, whose oldest step may lie anywhere
        found = found.roll(-cursor, 0) if hasattr(found, "roll") else found[[(cursor + i) % 12 for i in range(12)]]
    same({name: value for name, value in numpy_of(found).items() if name in data}, data)
    if layout in ("nested", "h5") and several and capacity > 12:
        return  # what TorchRL writes then depends on what was in memory at places that were never used
    from tensordict import TensorDict

    theirs = buffer()
    for part in [data] if capacity > 12 else [data, changed(data, lambda values: values[:6])]:
        steps_of = TensorDict.from_dict(part, batch_size=part["done"].shape[: 1 + several])
        theirs.extend(steps_of.transpose(0, 1) if several else steps_of)
    theirs.dumps(tmp_path / "theirs")
    cursor = 0 if capacity > 12 else 6
    same(read_checkpoint(tmp_path / "theirs"), changed(data, lambda values: np.roll(values, -cursor, axis=0)))


def numpy_of(found: Any) -> dict[str, Any]:
    return {name: numpy_of(value) if hasattr(value, "keys") else value.numpy() for name, value in found.items()}
