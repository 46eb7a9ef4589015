"""The mean over what is there of a batch, over all of its parts, in whichever process they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from mouse_core import ConfigError


def global_count(*masks: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum the masks of micro-batches over the processes of a group: the ``count`` of ``global_mean``.

    Every process must call it, once before the first of the micro-batches.

    Args:
        masks: Bool, or weights, of any shapes: that of a batch that is cut, or those of the batches of one step.
        group: The processes that have the batches together; None: all. Without ``torch.distributed`` it is this one.

    Returns:
        A scalar, float64 where the device knows it.

    Raises:
        ConfigError: No mask.

    Example:
        >>> global_count(torch.tensor([True, True, False]), torch.tensor([True]))
        tensor(3., dtype=torch.float64)
    """
    if not masks:
        raise ConfigError("masks: expected one or more, found none")
    total = torch.stack([mask.detach().sum(dtype=_wide(mask)) for mask in masks]).sum()
    _sum_over(total, group)
    return total


def global_mean(
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    count: torch.Tensor | float | None = None,
    group: Any = None,
    averaged: bool = True,
) -> torch.Tensor:
    """The mean of ``values`` where ``mask`` is True, over the processes of a group: ``sum(mask * values) / sum(mask)``.

    It is exact where processes have differently many windows or steps, and none of some. The mean of the processes' own
    means is not: it weighs a step of a process with few of them more, which changes the gradient by 1 to 3% with usual
    episodes, and by up to 12%.

    The loss is the same in all processes. Its gradient is such that averaging over the processes, as
    ``DistributedDataParallel`` and FSDP do, makes it that of the whole batch: of 2 processes with 10 and 30 steps, the
    sums of whose losses are 5 and 7, the loss is ``(5 + 7) / 40``, and its gradients are those of ``2 * 5 / 40`` and
    ``2 * 7 / 40``. Every process must call it, and it sums two numbers over the group.

    Gradients that are accumulated over micro-batches need ``count``: means of micro-batches with 10 and 30 steps do not
    add up to the mean of 40. With ``count`` each call returns its part, ``sum(mask * values) / count``, and the parts'
    sum, not divided by the number of micro-batches, is the mean, in value and in gradient.

    Args:
        values: Floats ``[b, ...]``, say a loss of each step ``[b, S]``.
        mask: Which of them count, bool, or how much, in a shape that theirs begins with: ``[b]``, ``[b, S]``. What does
            not count may be anything, NaN too. None: all.
        count: What is divided by instead of this call's mask: ``global_count`` of the masks of all micro-batches that
            make a step. Without a mask it counts the elements of ``values``, of all micro-batches and processes.
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
    # How many elements there are of each weight, of which ``count`` knows nothing: 1 where there is no mask.
    each = 1 if mask is None else values.shape[weights.ndim :].numel()
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)).expand(values.shape)
    total = torch.where(weights != 0, values * weights, 0).sum()
    # Exact for more elements than float32 counts, which is 2**24, where the device knows it.
    wide = _wide(values)
    sums = torch.stack([total.detach().to(wide), weights.sum(dtype=wide)])
    processes = _sum_over(sums, group)
    counted = sums[1] if count is None else torch.as_tensor(count, dtype=wide, device=values.device) * each
    divisor = torch.where(counted != 0, counted, 1)
    own = total * ((processes if averaged else 1) / divisor).to(total.dtype)
    # The value of all, with the gradient of this process's part. Where that is infinite so is the value, and nothing is
    # subtracted: inf - inf would be NaN here and inf elsewhere.
    return (sums[0] / divisor).to(total.dtype) + (own - own.detach().nan_to_num(0, 0, 0))


def _wide(values: torch.Tensor) -> torch.dtype:
    """The widest floats of a device."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def _sum_over(numbers: torch.Tensor, group: Any) -> int:
    """Sum numbers over a group, in place; how many processes it has."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    count = torch.distributed.get_world_size(group)
    if count > 1:
        torch.distributed.all_reduce(numbers, group=group)
    return count
