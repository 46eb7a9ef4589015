"""Chats, and pairs for DPO and reward models, as padded batches of torch tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt
import torch

from mouse_core.text import chat
from mouse_core.text.chat import EncodedChat
from mouse_torch.placement import check_device

__all__ = ["collate_chats", "collate_preferences", "collate_rewards"]


def collate_chats(
    chats: Iterable[EncodedChat],
    *,
    pad_token_id: int,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    device: str | torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Chats as a padded batch; see ``mouse_core.text.chat.collate_chats``.

    Args:
        chats, pad_token_id, padding_side, pad_to_multiple_of: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, in a dict, as trainers take it.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    options: Any = {"padding_side": padding_side, "pad_to_multiple_of": pad_to_multiple_of}
    return _tensors(chat.collate_chats(chats, pad_token_id=pad_token_id, **options), target)


def collate_preferences(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
    device: str | torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Pairs for DPO as a padded batch; see ``mouse_core.text.chat.collate_preferences``.

    With ``functools.partial`` it is a ``data_collator`` of TRL's ``DPOTrainer``.

    Args:
        examples, pad_token_id, max_length, truncation_mode, padding_side, pad_to_multiple_of, two_blocks: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, in a dict, as trainers take it.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    options: Any = {
        "max_length": max_length,
        "truncation_mode": truncation_mode,
        "padding_side": padding_side,
        "pad_to_multiple_of": pad_to_multiple_of,
        "two_blocks": two_blocks,
    }
    return _tensors(chat.collate_preferences(examples, pad_token_id=pad_token_id, **options), target)


def collate_rewards(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
    device: str | torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Pairs for a reward model as a padded batch; see ``mouse_core.text.chat.collate_rewards``.

    With ``functools.partial`` it is a ``data_collator`` of TRL's ``RewardTrainer``.

    Args:
        examples, pad_token_id, max_length, padding_side, pad_to_multiple_of, two_blocks: As there.
        device: Where the tensors go; None: the CPU.

    Returns:
        The same arrays as tensors, in a dict, as trainers take it.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    target = check_device(device)
    options: Any = {
        "max_length": max_length,
        "padding_side": padding_side,
        "pad_to_multiple_of": pad_to_multiple_of,
        "two_blocks": two_blocks,
    }
    return _tensors(chat.collate_rewards(examples, pad_token_id=pad_token_id, **options), target)


def _tensors(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    # The arrays are fresh, so the tensors take their memory over.
    return {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
