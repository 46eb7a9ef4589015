"""NumPy, PyTorch and JAX have the same maps of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import mouse_jax
import mouse_torch
from mouse_core import maps
from mouse_core.errors import ConfigError, MissingRowError

MADE: dict[str, tuple[Any, Any]] = {
    "numpy": (maps.RowMap, lambda tree: tree),
    "torch": (mouse_torch.RowMap, lambda tree: TensorDict(jax.tree.map(torch.from_numpy, tree), [len(tree["a"])])),
    "jax": (mouse_jax.RowMap, lambda tree: jax.tree.map(jnp.asarray, tree)),
}


def rows(numbers: Any) -> dict[str, Any]:
    numbers = np.asarray(numbers)
    return {"a": (numbers % 3).astype(np.uint8), "b": {"c": np.stack([numbers, -numbers], 1).astype(np.float32)}}


@pytest.mark.parametrize("package", MADE)
def test_the_same_rows_have_the_same_indices_and_values(package):
    made, own = MADE[package]
    table = made(["a", ("b", "c")], capacity=7)
    seen = []
    for numbers in ([4, 2, 4], [7, 2], [8, 9, 10, 2], [4, 1]):
        seen.append(np.asarray(table.extend(own(rows(numbers)), own(rows(numbers)))).tolist())
        seen.append(np.asarray(table.contains(own(rows(np.arange(11))))).tolist())
    assert seen[::2] == [[0, 1, 0], [2, 1], [3, 4, 5, 1], [0, 6]]
    assert seen[7] == [number in (1, 2, 4, 7, 8, 9, 10) for number in range(11)]
    found = table.get(own(rows([1, 9, 50])), 0)
    assert np.asarray(found["b"]["c"]).tolist() == [[1, -1], [9, -9], [0, 0]]
    assert found["a"].dtype in (np.uint8, torch.uint8)
    with pytest.raises(MissingRowError, match="the first at index 1"):
        table[own(rows([9, 50]))]
    reference = maps.RowMap(["a", ("b", "c")], capacity=7)
    reference.load_state_dict(table.state_dict())
    assert np.asarray(table.index(own(rows(np.arange(11))))).tolist() == reference.index(rows(np.arange(11))).tolist()
    assert reference.values()["b"]["c"].tolist() == np.asarray(table.values()["b"]["c"]).tolist()


@pytest.mark.parametrize("package", MADE)
def test_counts(package):
    made, own = MADE[package]
    visits = made()
    for _ in range(2):
        index = visits.accumulate(own(rows([3, 5, 3])), 1)
    assert type(index) is {"numpy": np.ndarray, "torch": torch.Tensor}.get(package, type(jnp.zeros(1)))
    assert np.asarray(index).tolist() == [0, 1, 0]
    assert np.asarray(visits[own(rows([3, 5]))]).tolist() == [4, 2]
    assert np.asarray(visits.rows(index)["a"]).tolist() == [0, 2, 0]


def test_tensordicts_of_any_batch_size():
    table = mouse_torch.RowMap(["obs"])
    source = TensorDict({"obs": torch.arange(12).reshape(2, 3, 2), "other": torch.zeros(2, 3)}, [2, 3])
    table[source] = TensorDict({"v": torch.arange(6).reshape(2, 3)}, [2, 3])
    assert table[source].batch_size == torch.Size([2, 3])
    assert table[source]["v"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert table[source[1, 2]]["v"].item() == 5
    assert table.index(source).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert table.contains(source[0, 0]).item() is True
    assert table.contains(TensorDict({"obs": torch.tensor([9, 9])}, [])).item() is False
    counts = mouse_torch.RowMap()
    counts.accumulate(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2]))
    assert counts.get(torch.tensor([[2.0], [3.0]])).tolist() == [2, 0]


def test_a_map_is_not_asked_while_jax_traces():
    table = mouse_jax.RowMap()
    with pytest.raises(ConfigError, match=r"outside of jax\.jit"):
        jax.jit(lambda rows: table.extend(rows))(jnp.zeros(3))
