"""Modules whose buffers are data, not weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Arrays = dict[str, npt.NDArray[Any]]
_LINE = 64


class Seen:
    """Buffers in NumPy, which to make takes longer than to read: they are kept, and made anew where one was moved."""

    def __init__(self) -> None:
        self._kept: tuple[list[int], Arrays] = ([], {})

    def __call__(self, buffers: Any) -> Arrays:
        """Them by name, but for what a class of somebody's has elsewhere."""
        where = [0 if memory is None else memory.data_ptr() for memory in buffers.values()]
        kept = self._kept
        if kept[0] != where:
            arrays = {name: _array(memory) for name, memory in buffers.items() if memory is not None and memory.is_cpu}
            kept = self._kept = where, arrays
        return kept[1]

    def __reduce__(self) -> tuple[type[Seen], tuple[()]]:
        """A copy has seen nothing."""
        return Seen, ()


class BufferModule(torch.nn.Module):
    """A module that goes where the module goes that it is part of, and keeps its dtypes, whatever ``half()`` does."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = Seen()

    def arrays(self) -> Arrays:
        """Return the module's buffers as NumPy arrays by name; bfloat16 as int16."""
        return self._seen(self._buffers)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        self._seen = Seen()
        return self


def _array(memory: torch.Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = (memory.view(torch.int16) if memory.dtype == torch.bfloat16 else memory).numpy()
    return found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of zeros.

    That of the host is NumPy's, which has Linux give it large pages: a row that is drawn of 10 million is found then
    without looking for its page in memory, too.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).reshape(shape)
