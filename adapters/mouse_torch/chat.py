"""Chats, and pairs for DPO and reward models, as padded batches of torch tensors.

The functions take the arguments of the functions with the same names in ``mouse_core.text.chat``, and ``device``, the
device of the tensors, by default the CPU. A batch is a dict of tensors, as trainers expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from mouse_core.text import chat
from mouse_torch.placement import on_device

__all__ = ["collate_chats", "collate_preferences", "collate_rewards"]


def _tensors(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device, _: Any) -> dict[str, torch.Tensor]:
    # The arrays are new, so the tensors can share their memory.
    return {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}


collate_chats = on_device(chat.collate_chats, _tensors)
"""Collate chats to a padded batch; see ``mouse_core.text.chat.collate_chats``."""

collate_preferences = on_device(chat.collate_preferences, _tensors)
"""Collate pairs for DPO to a padded batch; see ``mouse_core.text.chat.collate_preferences``.

With ``functools.partial`` the function is a ``data_collator`` for TRL's ``DPOTrainer``.
"""

collate_rewards = on_device(chat.collate_rewards, _tensors)
"""Collate pairs for a reward model to a padded batch; see ``mouse_core.text.chat.collate_rewards``.

With ``functools.partial`` the function is a ``data_collator`` for TRL's ``RewardTrainer``.
"""
