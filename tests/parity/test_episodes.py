"""Rows and episodes of any framework, and of Minari, in stores; every framework delivers them by name."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DataError, DatasetStore
from mouse_core.formats.minari import read_minari
from mouse_core.formats.rlds import write_rlds
from tests.core.formats.recording import Counting

PACKAGES: dict[str, Any] = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}


class OnlyDLPack:
    """An array that only the DLPack protocol reads."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def episode(steps: int, make: Any = np.asarray) -> dict[str, Any]:
    rows = np.arange(steps + 1)
    return {
        "observations": {
            "image": make(np.arange((steps + 1) * 48, dtype=np.uint8).reshape(-1, 4, 4, 3)),
            "state": make(rows[:, None].astype(np.float32) / 2),
        },
        "actions": make(rows[1:].astype(np.int32)),
        "rewards": make(rows[1:].astype(np.float32)),
        "terminated": make(rows[1:] == steps),
    }


@pytest.mark.parametrize("make", [torch.from_numpy, jnp.asarray, OnlyDLPack])
def test_arrays_of_all_frameworks_are_the_same_rows(make: Any) -> None:
    expected = DatasetStore().add_episodes(episode(steps) for steps in (3, 1, 5))
    store = DatasetStore().add_episodes(episode(steps, make) for steps in (3, 1, 5))
    assert (store[:], store.columns, store.metadata) == (expected[:], expected.columns, expected.metadata)
    with pytest.raises(DataError, match=r"actions: expected an array .*requires grad"):
        store.add_episode(episode(3) | {"actions": torch.zeros(3, requires_grad=True)})


def test_all_frameworks_deliver_what_came_in() -> None:
    store = DatasetStore().add_episodes(episode(steps) for steps in (3, 1, 5))
    batches = {}
    for framework, package in PACKAGES.items():
        with package.PrefetchBatchifier(store, 4, 3, seed=1) as loader:
            batches[framework] = loader.next_batch()
    for name, values in batches["numpy"].items():
        for framework in ("torch", "jax"):
            assert np.array_equal(batches[framework][name], values)
    assert batches["torch"]["observation.image"].dtype == torch.uint8
    assert batches["jax"]["observation.state"].dtype == jnp.float32
    assert batches["jax"]["observation.image"].shape == (3, 4, 4, 4, 3)


@pytest.mark.parametrize("kind", ["vector", "nested"])
def test_episodes_of_minari_are_the_rows_that_its_reader_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    from tests.core.formats.test_minari import collect

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    collect("toy/counting-v0", Counting((3, -1, 5), kind), episodes=3)
    store = DatasetStore().add_episodes(minari.load_dataset("toy/counting-v0"))
    rows = read_minari(tmp_path / "toy/counting-v0").to_table().drop_columns(["metadata_episode_seed"])
    assert set(store.columns) == set(rows.column_names)
    assert store[:] == rows.select(list(store.columns)).to_pylist()


def test_nested_episodes_are_written_as_rlds() -> None:
    given = [episode(steps) for steps in (3, 1, 5)]
    for one, written in zip(given, write_rlds(DatasetStore().add_episodes(given)), strict=True):
        steps = list(written["steps"])
        for name, values in one["observations"].items():
            assert np.array_equal([step["observation"][name] for step in steps], values)
        assert [int(step["action"]) for step in steps[:-1]] == one["actions"].tolist()
        assert [float(step["reward"]) for step in steps[:-1]] == one["rewards"].tolist()


ROW = {
    "action": 1,
    "reward": 0.5,
    "done": False,
    "episode_step": np.array([0], np.int32),
    "observation": [1.0, 2.0],
    "observation_discrete": [3],
}


@pytest.mark.parametrize(("array", "stack"), [(torch.tensor, torch.stack), (jnp.array, jnp.stack)])
def test_two_rows_one_by_one_and_two_at_once_are_four_steps(array: Any, stack: Any) -> None:
    row, store = {name: array(value) for name, value in ROW.items()}, DatasetStore()
    store.append(row)
    store.append(row)
    store.extend({name: stack([value, value]) for name, value in row.items()})
    batch = BatchSource(store, 4, 1)[0]
    assert {name: values.tolist() for name, values in batch.items()} == {
        "action": [[1] * 4],
        "reward": [[0.5] * 4],
        "done": [[0] * 4],
        "time": [[0] * 4],
        "obs_continuous": [[[1.0, 2.0]] * 4],
        "obs_discrete": [[3] * 4],
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_with_a_gradient_is_refused_by_its_column(first: bool) -> None:
    row, store = {name: torch.tensor(value) for name, value in ROW.items()}, DatasetStore()
    if not first:
        store.append(row)
    with pytest.raises(DataError, match=r"column 'reward': .*detach.* at row"):
        store.append({**row, "reward": torch.tensor(0.5, requires_grad=True)})
    assert len(store) == (not first)
