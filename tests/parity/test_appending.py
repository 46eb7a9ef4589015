"""Rows of a framework's arrays in a store."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mouse_core import BatchSource, DataError, DatasetStore

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
