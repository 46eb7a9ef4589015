"""Checks of the arguments of a draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mouse_core.errors import ConfigError
from mouse_torch.tracing import is_known

if TYPE_CHECKING:
    from mouse_torch.device.replay import Replay


def number_of(index: Any, device: torch.device) -> torch.Tensor:
    """The number of a sample, int64 ``[]`` on a device, or ConfigError."""
    if isinstance(index, torch.Tensor):
        if index.ndim or index.is_floating_point() or index.dtype == torch.bool:
            raise ConfigError(f"index: expected an integer, found {index.dtype} {[*index.shape]}")
        if is_known(index) and index.numpy() < 0:
            raise ConfigError(f"index: expected an integer in [0, 2**63), found {index}")
        return index.to(device, torch.int64)
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < 1 << 63:
        raise ConfigError(f"index: expected an integer in [0, 2**63), found {index!r}")
    # Filled there, not copied.
    return torch.full((), int(index), dtype=torch.int64, device=device)


def check_left(replay: Replay, count: Any) -> None:
    """ConfigError where it is seen that too little is left for a batch: of an integer, or int64 ``[]``."""
    fewest = 1 if replay.turns is None else replay.batch_size
    if isinstance(count, torch.Tensor):
        if not is_known(count):
            return
        count = count.numpy()
    if count >= fewest:
        return
    if replay.turns is not None:
        what = "rows" if replay.episodes is None else "slices"
        each = f"{fewest} {what} for a batch in which each comes once"
        raise ConfigError(f"sample: expected {each}, found {int(count)}")
    length = None if replay.episodes is None else replay.episodes.slices.sequence_length
    what = "rows" if length is None else f"slices of {length} steps in one episode"
    what += "" if replay.weights is None else " with a priority above 0"
    raise ConfigError(f"sample: expected {what}, found none among {int(replay.size)} time steps")
