"""Examples of rollout groups as JAX arrays, padded, packed or one behind the other, and in streams by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from mouse_core import ConfigError, groups
from mouse_core.groups import RLExample
from mouse_core.groups.examples.declared import Arrays
from mouse_jax.placement import Placement, find_target


def pad(
    examples: Sequence[RLExample],
    length: int | None = None,
    *,
    pad_token: int = 0,
    pad_to_multiple_of: int = 1,
    truncate: bool = False,
    max_turns: int | None = None,
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> dict[str, jax.Array]:
    """One example a row, filled up at the end; see ``mouse_core.groups.pad``.

    Args:
        examples, length, pad_token, pad_to_multiple_of, truncate: As there. A jitted step compiles anew for every
            ``length`` and number of examples.
        max_turns: As there.
        device: Where the arrays go; None: JAX's default.
        sharding: How they are laid out ``[B, L]`` over devices of this process; None: on ``device``.

    Returns:
        The same arrays, ``[B, L]``.

    Raises:
        ConfigError, DataError: As there; a device that is not there, or both arguments.
    """
    placement = _placement(device, sharding)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options["max_turns"] = max_turns
    return _placed(groups.pad(examples, length, **options), placement)


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
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> dict[str, jax.Array]:
    """Several examples a row, one behind the other; see ``mouse_core.groups.pack``.

    Args:
        examples, length, num_rows, pad_token, pad_to_multiple_of, truncate: As there. A jitted step compiles anew
            for every ``length`` and number of rows.
        max_turns, max_examples: As there.
        device, sharding: As in ``pad``.

    Returns:
        The same arrays, ``[R, L]``.

    Raises:
        ConfigError, DataError: As ``pad``.
    """
    placement = _placement(device, sharding)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options |= {"max_turns": max_turns, "max_examples": max_examples}
    return _placed(groups.pack(examples, length, num_rows=num_rows, **options), placement)


def concatenate(
    examples: Sequence[RLExample],
    capacity: int | None = None,
    *,
    pad_token: int = 0,
    max_turns: int | None = None,
    device: jax.Device | str | None = None,
) -> dict[str, jax.Array]:
    """All examples one behind the other, without padding; see ``mouse_core.groups.concatenate``.

    Args:
        examples, capacity, pad_token: As there. A jitted step compiles anew for every number of tokens and examples;
            ``capacity`` keeps the former.
        max_turns: As there.
        device: Where the arrays go; None: JAX's default.

    Returns:
        The same arrays.

    Raises:
        ConfigError, DataError: As there; a device that is not there.
    """
    arrays = groups.concatenate(examples, capacity, pad_token=pad_token, max_turns=max_turns)
    return _placed(arrays, _placement(device, None))


def _placement(device: jax.Device | str | None, sharding: Sharding | None) -> Placement:
    return Placement(find_target(device, sharding))


def _placed(arrays: Arrays, placement: Placement) -> dict[str, jax.Array]:
    try:
        placed = placement.put(list(arrays.values()))
    except ValueError as error:
        shape = list(arrays["tokens"].shape)
        raise ConfigError(f"sharding: expected one that divides arrays of shape {shape}, found: {error}") from error
    return dict(zip(arrays, placed, strict=True))


class RolloutStream(groups.RolloutStream):
    """``mouse_core.groups.RolloutStream`` with micro-batches as JAX arrays on a device or a sharding.

    All have one shape, so a jitted step is compiled once; see there for what breaks that.

    Args:
        batches, max_tokens: As there.
        device: Where the arrays go; None: JAX's default.
        sharding: How they are laid out ``[B, L]`` over devices of this process; None: on ``device``.
        **options: All else, as there.

    Raises:
        ConfigError: As there; a device that is not there, or both arguments.
    """

    def __init__(
        self,
        batches: Any,
        max_tokens: int,
        *,
        device: jax.Device | str | None = None,
        sharding: Sharding | None = None,
        **options: Any,
    ) -> None:
        self._placement = _placement(device, sharding)
        super().__init__(batches, max_tokens, **options)

    def _deliver(self, arrays: Arrays) -> dict[str, jax.Array]:
        return _placed(arrays, self._placement)
