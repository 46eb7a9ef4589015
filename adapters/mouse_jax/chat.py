"""Chats, and pairs for DPO and reward models, as padded batches of JAX arrays.

The functions have the arguments and results of those in ``mouse_core.text.chat``, and two more. ``device`` says where
the arrays go, by default JAX's default device. ``sharding`` lays them out over devices of this process, each array
alike. Arrays are int32 without x64. A jitted step compiles anew for every shape, of which ``pad_to_multiple_of``
leaves few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core.errors import ConfigError, DataError
from mouse_core.text import chat
from mouse_jax.placement import on_device
from mouse_jax.trees import as_jax

__all__ = ["collate_chats", "collate_preferences", "collate_rewards"]


def _placed(
    arrays: Mapping[str, npt.NDArray[Any]], target: jax.Device | Sharding | None, _: Any
) -> dict[str, jax.Array]:
    try:
        placed: dict[str, jax.Array] = as_jax(arrays, target)
    except DataError:  # a number that does not fit
        raise
    except ValueError as error:
        shapes = {name: list(values.shape) for name, values in arrays.items()}
        raise ConfigError(f"sharding: expected one that divides arrays of shapes {shapes}, found: {error}") from error
    return placed


collate_chats = on_device(chat.collate_chats, _placed)
"""Chats as a padded batch; see ``mouse_core.text.chat.collate_chats``."""

collate_preferences = on_device(chat.collate_preferences, _placed)
"""Pairs for DPO as a padded batch; see ``mouse_core.text.chat.collate_preferences``."""

collate_rewards = on_device(chat.collate_rewards, _placed)
"""Pairs for a reward model as a padded batch; see ``mouse_core.text.chat.collate_rewards``."""
