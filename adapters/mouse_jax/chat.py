"""Chats, and pairs for DPO and reward models, as padded batches of JAX arrays.

The functions take the arguments of the functions with the same names in ``mouse_core.text.chat``, and two more.
``device`` is the device of the arrays, by default JAX's default device. ``sharding`` distributes every array over
devices of this process. Arrays are int32 without x64. A jitted step compiles again for every new shape;
``pad_to_multiple_of`` reduces the number of shapes.
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
    except DataError:  # a number does not fit
        raise
    except ValueError as error:
        shapes = {name: list(values.shape) for name, values in arrays.items()}
        raise ConfigError(f"sharding: expected one that divides arrays of shapes {shapes}, found: {error}") from error
    return placed


collate_chats = on_device(chat.collate_chats, _placed)
"""Collate chats to a padded batch; see ``mouse_core.text.chat.collate_chats``."""

collate_preferences = on_device(chat.collate_preferences, _placed)
"""Collate pairs for DPO to a padded batch; see ``mouse_core.text.chat.collate_preferences``."""

collate_rewards = on_device(chat.collate_rewards, _placed)
"""Collate pairs for a reward model to a padded batch; see ``mouse_core.text.chat.collate_rewards``."""
