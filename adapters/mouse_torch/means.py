"""Masked means of a batch whose windows are distributed over several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from mouse_core import ConfigError


def global_count(*masks: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum the masks of micro-batches over the processes of a group, for ``count`` of ``global_mean``.

    Every process must call this function once, before the first micro-batch.

    Args:
        masks: Bool masks, or weights, of any shapes: the mask of a batch that is split into micro-batches later, or the
            masks of all micro-batches of one training step.
        group: The processes that share the batches; None: all processes. If ``torch.distributed`` is not initialised,
            only this process.

    Returns:
        A tensor ``[]`` with the sum; float64 if the device supports float64.

    Raises:
        ConfigError: ``masks`` is empty.

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
    """Return the masked mean of ``values`` over the processes of a group: ``sum(mask * values) / sum(mask)``.

    The mean is exact even if processes have different numbers of windows or steps, or no windows. A mean over the means
    of the processes would not be exact, because a step in a process with few steps would have more weight. With usual
    episodes, a mean of means would change the gradient by typically 1 to 3%, and at most 12%.

    The returned loss is the same in all processes. If the gradients of this loss are averaged over the processes, as in
    ``DistributedDataParallel`` and FSDP, the average equals the gradient for the complete batch. For example, the
    losses of 10 steps in one process add up to 5, and the losses of 30 steps in another process add up to 7. Both
    processes return the loss ``(5 + 7) / 40``. The first process computes the gradient of ``2 * 5 / 40``, and the
    second process the gradient of ``2 * 7 / 40``. Every process must call this function, because the call sums two
    numbers over the group.

    To accumulate gradients over micro-batches, pass ``count``, because the means of two micro-batches with 10 and 30
    steps do not add up to the mean of all 40 steps. With ``count`` each call returns ``sum(mask * values) / count`` for
    its micro-batch. The sum of these results (not divided by the number of micro-batches) equals the mean, and its
    gradient equals the gradient of the mean.

    Args:
        values: Floats ``[b, ...]``, for example a loss for each step ``[b, S]``.
        mask: A bool mask of the values that count, or weights of the values. The mask's shape is a prefix of the shape
            of ``values``: ``[b]`` or ``[b, S]``. All other values are ignored, even NaN. None: all values count.
        count: The divisor in place of the sum of this call's mask: ``global_count`` of the masks of all micro-batches
            of a step. If there is no mask, ``count`` is the number of elements of ``values`` in all micro-batches and
            processes.
        group: The processes that share the batch; None: all processes. If ``torch.distributed`` is not initialised,
            only this process.
        averaged: True if gradients are averaged over the group after the backward pass, False if they are summed.

    Returns:
        A tensor ``[]`` in the dtype of ``values``, or in float32 if that dtype is narrower or is not a float dtype. If
        no value counts, the result and its gradient are 0.

    Raises:
        ConfigError: The shape of ``values`` does not begin with the shape of ``mask``.

    Example:
        >>> global_mean(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(1.5000)
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = values.new_ones(()) if mask is None else mask.to(values)
    if weights.shape != values.shape[: weights.ndim]:
        raise ConfigError(
            f"mask: expected the leading axes of the shape {list(values.shape)}, found shape {list(weights.shape)}"
        )
    # The number of elements for each weight, which ``count`` does not include; 1 without a mask.
    each = 1 if mask is None else values.shape[weights.ndim :].numel()
    weights = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)).expand(values.shape)
    total = torch.where(weights != 0, values * weights, 0).sum()
    # float64, if the device supports it, counts exactly; float32 is exact only up to 2**24 elements.
    wide = _wide(values)
    sums = torch.stack([total.detach().to(wide), weights.sum(dtype=wide)])
    processes = _sum_over(sums, group)
    counted = sums[1] if count is None else torch.as_tensor(count, dtype=wide, device=values.device) * each
    divisor = torch.where(counted != 0, counted, 1)
    own = total * ((processes if averaged else 1) / divisor).to(total.dtype)
    # The result has the value of all processes, and the gradient of this process's part. If the part is infinite, so is
    # the value; then nothing is subtracted, because inf - inf would be NaN in this process and inf in the others.
    return (sums[0] / divisor).to(total.dtype) + (own - own.detach().nan_to_num(0, 0, 0))


def _wide(values: torch.Tensor) -> torch.dtype:
    """Return the widest float dtype that the device of ``values`` supports."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def _sum_over(numbers: torch.Tensor, group: Any) -> int:
    """Sum numbers over a group, in place; return the number of processes in the group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    count = torch.distributed.get_world_size(group)
    if count > 1:
        torch.distributed.all_reduce(numbers, group=group)
    return count
