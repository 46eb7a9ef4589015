"""Rows of tensors in a store."""

from __future__ import annotations

import pytest
import torch

from mouse_core import DataError, DatasetStore
from tests.core.appending_cases import check_arrays_are_taken, row_of


def test_tensors_of_the_cpu_are_taken() -> None:
    row = row_of(torch.tensor, episode_step=torch.tensor([0], dtype=torch.int32))
    check_arrays_are_taken(row, torch.stack)


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_with_a_gradient_is_refused_by_its_column(first: bool) -> None:
    store = DatasetStore()
    if not first:
        store.append(row_of(torch.tensor))
    with pytest.raises(DataError, match=r"column 'reward': .*detach.* at row"):
        store.append(row_of(torch.tensor, reward=torch.tensor(0.5, requires_grad=True)))
    assert len(store) == (not first)
