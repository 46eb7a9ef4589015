"""TensorStorage does what every storage must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mouse_core.spec import Alignment
from mouse_core.testing import StorageConformance
from mouse_torch import ReplayBuffer, TensorStorage


class TestTensorStorage(StorageConformance):
    buffer = ReplayBuffer

    def make(self, capacity: int, ndim: int, folder: Path, alignment: Alignment) -> Any:
        return TensorStorage(capacity, ndim, alignment=alignment)

    def to_numpy(self, values: Any) -> npt.NDArray[Any]:
        return np.asarray(values)


def test_a_storage_that_is_begun_in_inference_mode_goes_on_outside_of_it() -> None:
    storage = TensorStorage(4)
    buffer = ReplayBuffer(storage, batch_size=2)
    with torch.inference_mode():
        buffer.extend({"x": torch.arange(2.0)})
    buffer.extend({"x": torch.arange(2.0, 4.0)})
    assert buffer[:]["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
