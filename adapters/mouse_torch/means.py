"""The mean over what is there of a batch, over all of its parts, in whichever process they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from mouse_core import ConfigError


def global_mean(
    values: torch.Tensor, mask: torch.Tensor | None = None, *, group: Any = None, averaged: bool = True
) -> torch.Tensor:
    """The mean of ``values`` where ``mask`` is True, over the processes of a group: ``sum(mask * values) / sum(mask)``.

    It is exact where processes have differently many windows or steps, and none of some. The mean of the processes' own
    means is not: it weighs a step of a process with few of them more, which changes the gradient by 1 to 3% with usual
    episodes, and by up to 12%.

    The loss is the same in all processes. Its gradient is such that averaging over the processes, as
    ``DistributedDataParallel`` and FSDP do, makes it that of the whole batch: of 2 processes with 10 and 30 steps, the
    sums of whose losses are 5 and 7, the loss is ``(5 + 7) / 40``, and its gradients are those of ``2 * 5 / 40`` and
    ``2 * 7 / 40``. Every process must call it, and it sums two numbers over the group.

    Args:
        values: Floats ``[b, ...]``, say a loss of each step ``[b, S]``.
        mask: Which of them count, bool, or how much, in a shape that theirs begins with: ``[b]``, ``[b, S]``. What does
            not count may be anything, NaN too. None: all.
        group: The processes that have the batch together; None: all. Without ``torch.distributed`` it is this one.
        averaged: Whether gradients are averaged over the group afterwards; False: they are summed.

    Returns:
        A scalar; float32 of narrower floats. 0, with a gradient of 0, where nothing counts.

    Raises:
        ConfigError: A mask of another shape.

    Example:
        >>> global_mean(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = values.new_ones(()) if mask is None else mask.to(values)
    if weights.shape != values.shape[: weights.ndim]:
        raise ConfigError(f"mask: expected a shape that {list(values.shape)} begins with, found {list(weights.shape)}")
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)).expand(values.shape)
    total = torch.where(weights != 0, values * weights, 0).sum()
    # Exact for more elements than float32 counts, which is 2**24, where the device knows it.
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.stack([total.detach().to(wide), weights.sum(dtype=wide)])
    count = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = torch.distributed.get_world_size(group)
    if count > 1:
        torch.distributed.all_reduce(sums, group=group)
    divisor = torch.where(sums[1] != 0, sums[1], 1)
    own = total * ((count if averaged else 1) / divisor).to(total.dtype)
    # The value of all, with the gradient of this process's part.
    return (sums[0] / divisor).to(total.dtype) + (own - own.detach())
