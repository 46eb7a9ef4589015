"""Chats, and pairs for DPO and reward models, as padded batches of JAX arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core.errors import ConfigError, DataError
from mouse_core.text import chat
from mouse_core.text.chat import EncodedChat
from mouse_jax.placement import find_target
from mouse_jax.trees import as_jax

__all__ = ["collate_chats", "collate_preferences", "collate_rewards"]


def collate_chats(
    chats: Iterable[EncodedChat],
    *,
    pad_token_id: int,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> dict[str, jax.Array]:
    """Chats as a padded batch; see ``mouse_core.text.chat.collate_chats``.

    Args:
        chats, pad_token_id, padding_side, pad_to_multiple_of: As there. A jitted step compiles anew for every shape, of
            which ``pad_to_multiple_of`` leaves few.
        device: Where the arrays go; None: JAX's default.
        sharding: How they are laid out over devices of this process, the same for each array; None: on ``device``.

    Returns:
        The same arrays; int32 without x64.

    Raises:
        ConfigError, DataError: As there; a device that is not there, both arguments, or an id that does not fit.
    """
    target = find_target(device, sharding)
    options: Any = {"padding_side": padding_side, "pad_to_multiple_of": pad_to_multiple_of}
    return _placed(chat.collate_chats(chats, pad_token_id=pad_token_id, **options), target)


def collate_preferences(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> dict[str, jax.Array]:
    """Pairs for DPO as a padded batch; see ``mouse_core.text.chat.collate_preferences``.

    Args:
        examples, pad_token_id, max_length, truncation_mode, padding_side, pad_to_multiple_of, two_blocks: As there. A
            jitted step compiles anew for every shape, of which ``pad_to_multiple_of`` leaves few.
        device, sharding: As in ``collate_chats``.

    Returns:
        The same arrays; int32 without x64.

    Raises:
        ConfigError, DataError: As ``collate_chats``.
    """
    target = find_target(device, sharding)
    options: Any = {
        "max_length": max_length,
        "truncation_mode": truncation_mode,
        "padding_side": padding_side,
        "pad_to_multiple_of": pad_to_multiple_of,
        "two_blocks": two_blocks,
    }
    return _placed(chat.collate_preferences(examples, pad_token_id=pad_token_id, **options), target)


def collate_rewards(
    examples: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_length: int | None = None,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
    two_blocks: bool = False,
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> dict[str, jax.Array]:
    """Pairs for a reward model as a padded batch; see ``mouse_core.text.chat.collate_rewards``.

    Args:
        examples, pad_token_id, max_length, padding_side, pad_to_multiple_of, two_blocks: As there. A jitted step
            compiles anew for every shape, of which ``pad_to_multiple_of`` leaves few.
        device, sharding: As in ``collate_chats``.

    Returns:
        The same arrays; int32 without x64.

    Raises:
        ConfigError, DataError: As ``collate_chats``.
    """
    target = find_target(device, sharding)
    options: Any = {
        "max_length": max_length,
        "padding_side": padding_side,
        "pad_to_multiple_of": pad_to_multiple_of,
        "two_blocks": two_blocks,
    }
    return _placed(chat.collate_rewards(examples, pad_token_id=pad_token_id, **options), target)


def _placed(arrays: Mapping[str, npt.NDArray[Any]], target: jax.Device | Sharding | None) -> dict[str, jax.Array]:
    try:
        placed: dict[str, jax.Array] = as_jax(arrays, target)
    except DataError:  # a number that does not fit
        raise
    except ValueError as error:
        shapes = {name: list(values.shape) for name, values in arrays.items()}
        raise ConfigError(f"sharding: expected one that divides arrays of shapes {shapes}, found: {error}") from error
    return placed
