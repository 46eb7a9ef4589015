"""Modules whose buffers are data, not weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch


class Kept(torch.nn.Module):
    """A module that goes where the module goes that it is part of, and keeps its dtypes, whatever ``half()`` does."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self
