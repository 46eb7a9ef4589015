"""Converts packed batches to nested tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from mouse_core import ConfigError


def as_nested(batch: Any) -> Any:
    """Convert each field of a packed batch to a jagged nested tensor, whose elements are the windows without padding.

    The batch may come from a source with ``packed=``, or from ``groups.concatenate``, with or without a capacity. No
    values are copied: the nested tensors share the memory of the batch. All nested tensors have the same offsets, so
    the tensors can be combined in computations.

    Args:
        batch: A TensorDict, or a dict of tensors, with ``cu_seqlens`` ``[B + 1]`` and fields ``[T, ...]``; or a tuple
            of several views of a batch.

    Returns:
        A TensorDict of batch size ``[B]`` with a nested tensor ``[B, *, ...]`` for each field. The fields
        ``cu_seqlens``, ``sequence_id`` and ``mask`` are left out, because the nested tensors contain their information.
        For several views, the result is a tuple of TensorDicts.

    Raises:
        ConfigError: ``batch`` is not a packed batch.

    Example:
        >>> packed = {"cu_seqlens": torch.tensor([0, 2, 3]), "reward": torch.tensor([1.0, 2.0, 3.0])}
        >>> as_nested(packed)["reward"].offsets().tolist()
        [0, 2, 3]
    """
    if isinstance(batch, tuple):
        return tuple(map(as_nested, batch))
    if not hasattr(batch, "keys") or "cu_seqlens" not in batch.keys():  # noqa: SIM118  a TensorDict iterates over rows
        raise ConfigError(
            f"as_nested: expected a batch with cu_seqlens, as packed=True returns it, found {type(batch).__name__}"
        )
    offsets = batch["cu_seqlens"].long()
    # Padding belongs to no window. Reading the position where it begins waits for the device.
    rows = slice(int(offsets[-1])) if "mask" in batch.keys() else slice(None)  # noqa: SIM118  as above
    fields = {
        name: torch.nested.nested_tensor_from_jagged(batch[name][rows], offsets)
        for name in batch.keys()  # noqa: SIM118  as above
        if name not in ("cu_seqlens", "sequence_id", "mask")
    }
    return TensorDict(fields, batch_size=[len(offsets) - 1])
