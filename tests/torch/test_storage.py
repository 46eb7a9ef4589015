"""TensorStorage does what every storage must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.testing import StorageConformance
from mouse_torch import TensorStorage


class TestTensorStorage(StorageConformance):
    def make(self, max_size: int, ndim: int, folder: Path) -> Any:
        return TensorStorage(max_size, ndim)

    def to_numpy(self, values: Any) -> npt.NDArray[Any]:
        return np.asarray(values)
