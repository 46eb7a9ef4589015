"""Examples of rollout groups as JAX arrays, padded, packed or one behind the other, and in streams by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mouse_core import ConfigError, groups
from mouse_core.groups import RLExample, RolloutColumn
from mouse_core.groups.examples import Arrays
from mouse_jax.placement import find_target
from mouse_jax.trees import narrowed


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
        sharding: How they are laid out ``[B, L]`` over devices of this process; None: on ``device``. Columns with a
            value per turn or example are laid out along ``B``.

    Returns:
        The same arrays, ``[B, L]``. Without x64 those of 64 bits have 32.

    Raises:
        ConfigError, DataError: As there; a device that is not there, both arguments, or a value that does not fit.
    """
    target = find_target(device, sharding)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options["max_turns"] = max_turns
    return _placed(groups.pad(examples, length, **options), target, examples[0].declared)


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
    target = find_target(device, sharding)
    options: Any = {"pad_token": pad_token, "pad_to_multiple_of": pad_to_multiple_of, "truncate": truncate}
    options |= {"max_turns": max_turns, "max_examples": max_examples}
    packed = groups.pack(examples, length, num_rows=num_rows, **options)
    return _placed(packed, target, examples[0].declared)


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
    return _placed(arrays, find_target(device, None), examples[0].declared)


def _placed(
    arrays: Arrays, target: jax.Device | Sharding | None, declared: Mapping[str, RolloutColumn]
) -> dict[str, jax.Array]:
    own = narrowed(arrays)
    shape = arrays["tokens"].shape
    where: Any = target
    if isinstance(target, Sharding):
        rows_only = {name for name, column in declared.items() if column.per != "token"}
        where = [
            _layout(target, _common(values.shape, shape[:1] if name in rows_only else shape))
            for name, values in own.items()
        ]
    try:
        # On a host JAX may keep the very memory, which is given away.
        placed = jax.device_put(list(own.values()), where, may_alias=True)
    except ValueError as error:
        raise ConfigError(
            f"sharding: expected one that divides arrays of shape {list(shape)}, found: {error}"
        ) from error
    return dict(zip(own, placed, strict=True))


def _common(shape: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Number of leading axes that an array shares with the tokens."""
    common = 0
    for size, other in zip(shape, tokens, strict=False):
        if size != other:
            break
        common += 1
    return common


def _layout(sharding: Sharding, common: int) -> Sharding:
    """Return the sharding of an array from the sharding of tokens, for its shared leading axes."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= common:
        return sharding
    spec: Any = PartitionSpec(*sharding.spec[:common])  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


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
        self._target = find_target(device, sharding)
        super().__init__(batches, max_tokens, **options)

    def _deliver(self, arrays: Arrays, declared: Mapping[str, RolloutColumn]) -> dict[str, jax.Array]:
        return _placed(arrays, self._target, declared)
