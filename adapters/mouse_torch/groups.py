"""Examples of rollout groups as torch tensors, padded, packed or one behind the other, and in streams by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from mouse_core import groups
from mouse_core.groups import RLExample, RolloutColumn
from mouse_core.groups.examples import Arrays
from mouse_torch.placement import check_device


def pad(
    examples: Sequence[RLExample],
    length: int | None = None,
    *,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
    truncate: bool = False,
    max_turns: int | None = None,
    device: str | torch.device | None = None,
) -> TensorDict:
    """One example a row, filled up at the end; see ``mouse_core.groups.pad``.

    Args:
        examples, length, pad_token, pad_to_multiple_of, truncate, max_turns: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, batch size ``[B, L]``, or ``[B]`` where a column has a value per turn or example.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options["max_turns"] = max_turns
    return _tensors(groups.pad(examples, length, **options), target, examples[0].declared)


def pack(
    examples: Sequence[RLExample],
    length: int,
    *,
    num_rows: int | None = None,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
    truncate: bool = False,
    max_turns: int | None = None,
    max_examples: int | None = None,
    device: str | torch.device | None = None,
) -> TensorDict:
    """Several examples a row, one behind the other; see ``mouse_core.groups.pack``.

    Args:
        examples, length, num_rows, pad_token, pad_to_multiple_of, truncate, max_turns, max_examples: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, batch size ``[R, L]``, or ``[R]`` where a column has a value per turn or example.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options |= {"max_turns": max_turns, "max_examples": max_examples}
    packed = groups.pack(examples, length, num_rows=num_rows, **options)
    return _tensors(packed, target, examples[0].declared)


def concatenate(
    examples: Sequence[RLExample],
    capacity: int | None = None,
    *,
    pad_token: int = 0,
    max_turns: int | None = None,
    device: str | torch.device | None = None,
) -> TensorDict:
    """All examples one behind the other, without padding; see ``mouse_core.groups.concatenate``.

    ``mouse_torch.as_nested`` makes nested tensors of them.

    Args:
        examples, capacity, pad_token, max_turns: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, batch size ``[]``, as ``cu_seqlens`` and the tokens have no axis in common.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    arrays = groups.concatenate(examples, capacity, pad_token=pad_token, max_turns=max_turns)
    return _tensors(arrays, target, examples[0].declared)


def _tensors(arrays: Arrays, device: torch.device, declared: Mapping[str, RolloutColumn]) -> TensorDict:
    # The arrays are fresh, so the tensors take their memory over.
    tensors = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
    size = () if "cu_seqlens" in arrays else arrays["tokens"].shape
    if any(column.per != "token" for column in declared.values()):
        size = size[:1]
    return TensorDict(tensors, batch_size=size, device=device)


class RolloutStream(groups.RolloutStream):
    """``mouse_core.groups.RolloutStream`` with micro-batches as ``TensorDict`` on a device.

    Args:
        batches, max_tokens: As there.
        device: Where the tensors go; None: the CPU.
        **options: All else, as there.

    Raises:
        ConfigError: As there; a device that is not there.
    """

    def __init__(
        self, batches: Any, max_tokens: int, *, device: str | torch.device | None = None, **options: Any
    ) -> None:
        self._device = check_device(device)
        super().__init__(batches, max_tokens, **options)

    def _deliver(self, arrays: Arrays, declared: Mapping[str, RolloutColumn]) -> TensorDict:
        return _tensors(arrays, self._device, declared)
