"""bfloat16 and 8-bit floats, which NumPy has from ml_dtypes: kept, delivered and saved as they are."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core.errors import ConfigError, DataError
from mouse_core.replay import (
    ArrayStorage,
    Cast,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    Pad,
    PrioritizedSampler,
    ReplayBuffer,
)
from mouse_core.rollouts import RolloutField, RolloutStorage

ml_dtypes = pytest.importorskip("ml_dtypes")
NAMES = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


def every(name: str) -> Any:
    """Every number of a dtype, but for those that are none."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.slow), "array", "memmap", "ragged"])
def test_buffers_keep_every_value(name: str, kind: str, tmp_path: Path) -> None:
    values = every(name)
    rows: dict[str, Any] = {"x": values, "n": np.arange(len(values))}
    if kind == "ragged":
        rows["x"] = [values[n : n + n % 3] for n in range(len(values))]
    options: Any = {"memmap": (tmp_path / "m",)}.get(kind, ())
    storage: Any = {"list": ListStorage, "memmap": MemmapStorage}.get(kind, ArrayStorage)(len(values), *options)
    buffer = ReplayBuffer(storage, batch_size=50)
    buffer.extend(rows)
    buffer.dumps(tmp_path / "c")
    buffer.empty()
    buffer.loads(tmp_path / "c")
    batch = buffer.sample()
    for found, n in zip(batch["x"], batch["n"].tolist(), strict=True):
        assert found.dtype == values.dtype
        assert found.tobytes() == rows["x"][n].tobytes()
    if kind == "memmap":
        assert MemmapStorage(None, tmp_path / "m").get(np.arange(3))["x"].tobytes() == values[:3].tobytes()
    if kind == "array":
        buffer.append({"x": 1.5, "n": 0})  # Python's own numbers take the dtype
        with pytest.raises(DataError, match="'x'"):
            buffer.append({"x": 1e39, "n": 0})


@pytest.mark.parametrize("name", NAMES)
def test_a_store_has_them_as_the_float32_that_they_are(name: str) -> None:
    values = every(name)
    n = len(values)
    columns = {"action": np.zeros(n, int), "reward": values, "done": np.zeros(n, int), "observation": values[:, None]}
    store, one_by_one = DatasetStore(), DatasetStore()
    store.extend(columns)
    for row in range(20):
        one_by_one.append({column: given[row] for column, given in columns.items()})
    assert str(store.columns["reward"]) == str(one_by_one.columns["reward"]) == "float"
    for row in range(20):
        assert one_by_one[row] == store[row]
        assert store[row]["reward"] == float(values[row])
    source = BatchSource(store, 1, n, sampling="sequential", dtypes={"reward": name, "obs_continuous": name})
    batch = source[0]
    assert source.spec["reward"].dtype == batch["reward"].dtype == values.dtype
    assert batch["reward"].tobytes() == batch["obs_continuous"].tobytes()
    assert np.array_equal(np.sort(batch["reward"].reshape(-1).astype(float)), np.sort(values.astype(float)))


@pytest.mark.parametrize("name", NAMES)
def test_cast_pad_ranks_and_priorities(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    buffer = ReplayBuffer(ArrayStorage(9), transform=Cast({"x": "float32"}, stored={"x": name}), batch_size=4)
    buffer.extend({"x": np.arange(8.0)})
    assert buffer.storage.get(np.arange(2))["x"].dtype == dtype
    batch = buffer.sample()
    assert batch["x"].dtype == np.float32
    np.testing.assert_array_equal(batch["x"], batch["index"])
    assert Cast(every={"float64": name})({"x": np.ones(2), "y": np.ones(2, dtype)})["x"].dtype == dtype
    with pytest.raises(DataError, match=f"fit {name}"):
        Cast({"x": name})({"x": np.array([1e39])})
    ranked = ReplayBuffer(ArrayStorage(2), writer=MaxValueWriter("x"))
    assert ranked.extend({"x": np.array([1, 3, 2], dtype)}).tolist() == [-1, 1, 0]
    prioritized = ReplayBuffer(ArrayStorage(4), PrioritizedSampler(eps=0), priority_key="x", batch_size=20)
    prioritized.extend({"x": np.array([0, 1, 0], dtype)})
    assert set(prioritized.sample()["index"].tolist()) == {1}
    padded = Pad(length=3, value=1)({"x": np.array([np.ones(2, dtype), np.zeros(1, dtype)], object)})
    assert padded["x"].dtype == dtype
    assert padded["x"].astype(float).tolist() == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("name", NAMES)
def test_rollouts(name: str) -> None:
    fields = {"observations": RolloutField((3,), name), "values": RolloutField((), "bfloat16")}
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=2, fields=fields)
    for step in range(2):
        row = {"observations": np.full((2, 3), step, storage.spec["observations"].dtype), "values": np.ones(2)}
        storage.add_transitions({**row, "rewards": np.ones(2), "dones": np.zeros(2)})
    storage.compute_returns(np.zeros(2), gamma=0.5, lam=1.0, normalize_advantage=False)
    assert storage.returns.astype(float).tolist() == [[[1.5]] * 2, [[1.0]] * 2]
    for batch in storage.mini_batch_generator(2, 1):
        assert str(batch.obs.dtype) == name
    with pytest.raises(ConfigError, match="16 bits"):
        RolloutStorage(num_envs=2, num_transitions_per_env=2, fields={"values": RolloutField((), "float8_e5m2")})


@pytest.mark.slow
def test_the_package_does_without_ml_dtypes_and_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import mouse_core, mouse_core.replay as r\n"
        "try: r.Cast({'x': 'bfloat16'})\n"
        "except mouse_core.ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install ml_dtypes" in done.stdout
