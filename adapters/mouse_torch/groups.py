"""Training examples of rollout groups as torch tensors: padded, packed or concatenated, and as streams with a part of
the examples for each rank.

``pad``, ``pack`` and ``concatenate`` return the same fields as the functions of these names in ``mouse_core.groups``,
in a TensorDict. The functions take the same arguments and an additional argument ``device``, the device of the tensors
(by default the CPU).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from tensordict import TensorDict

from mouse_core import groups
from mouse_core.groups import RolloutColumn
from mouse_core.groups.examples import Arrays
from mouse_torch.placement import check_device


def _tensors(arrays: Arrays, device: torch.device, declared: Mapping[str, RolloutColumn]) -> TensorDict:
    # The arrays are new, so the tensors can share their memory.
    tensors = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
    size = () if "cu_seqlens" in arrays else arrays["tokens"].shape
    if any(column.per != "token" for column in declared.values()):
        size = size[:1]
    return TensorDict(tensors, batch_size=size, device=device)


def _on_device(function: Callable[..., Arrays]) -> Callable[..., TensorDict]:
    """Return a function of ``mouse_core.groups`` with an additional argument ``device``, by default the CPU."""

    @wraps(function)
    def placed(examples: Any, *args: Any, device: str | torch.device | None = None, **options: Any) -> TensorDict:
        target = check_device(device)
        return _tensors(function(examples, *args, **options), target, examples[0].declared)

    signature, option = inspect.signature(function), inspect.signature(placed, follow_wrapped=False).parameters
    placed.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option["device"]])  # type: ignore[attr-defined]
    return placed


pad = _on_device(groups.pad)
"""Pad examples to rows of equal length, one example per row; see ``mouse_core.groups.pad``.

The batch size is ``[B, L]``, or ``[B]`` if a column has a value per example.
"""

pack = _on_device(groups.pack)
"""Pack several examples into each row, one after another; see ``mouse_core.groups.pack``.

The batch size is ``[R, L]``, or ``[R]`` if a column has a value per example.
"""

concatenate = _on_device(groups.concatenate)
"""Concatenate all examples without padding; see ``mouse_core.groups.concatenate``.

The batch size is ``[]``, because ``cu_seqlens`` and the tokens have no axis in common. ``mouse_torch.as_nested``
converts the fields to nested tensors.
"""


class RolloutStream(groups.RolloutStream):
    """``mouse_core.groups.RolloutStream`` with micro-batches as ``TensorDict`` on a device.

    Args:
        batches, max_tokens: The same arguments as in ``mouse_core.groups.RolloutStream``.
        device: The device of the tensors; None: the CPU.
        **options: The other arguments of ``mouse_core.groups.RolloutStream``.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.groups.RolloutStream``.
    """

    def __init__(
        self, batches: Any, max_tokens: int, *, device: str | torch.device | None = None, **options: Any
    ) -> None:
        self._device = check_device(device)
        super().__init__(batches, max_tokens, **options)

    def _deliver(self, arrays: Arrays, declared: Mapping[str, RolloutColumn]) -> TensorDict:
        return _tensors(arrays, self._device, declared)
