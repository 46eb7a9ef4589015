"""Training examples of rollout groups as JAX arrays: padded, packed or concatenated, and as streams with a part of the
examples for each rank.

``pad``, ``pack`` and ``concatenate`` take the arguments of the functions with the same names in ``mouse_core.groups``,
and two additional arguments. ``device`` is the device of the arrays, by default JAX's default device. ``sharding``
distributes arrays ``[B, L]`` over devices of this process; columns with a value per example are distributed along
``B``. Without x64, dtypes have at most 32 bits. A jitted step is compiled again for every new length and every new
number of rows; the arguments ``length``, ``num_rows`` and ``capacity`` keep these sizes constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mouse_core import ConfigError, groups
from mouse_core.groups import RolloutColumn
from mouse_core.groups.examples import Arrays
from mouse_jax.placement import find_target
from mouse_jax.trees import narrowed


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
        # On a host, JAX may share the memory; it is never modified later.
        placed = jax.device_put(list(own.values()), where, may_alias=True)
    except ValueError as error:
        raise ConfigError(
            f"sharding: expected a sharding that divides arrays of shape {list(shape)}, found: {error}"
        ) from error
    return dict(zip(own, placed, strict=True))


def _common(shape: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Return the number of leading axes that an array has in common with the tokens."""
    common = 0
    for size, other in zip(shape, tokens, strict=False):
        if size != other:
            break
        common += 1
    return common


def _layout(sharding: Sharding, common: int) -> Sharding:
    """Return the sharding of an array: the first ``common`` axes are sharded like the axes of the tokens."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= common:
        return sharding
    spec: Any = PartitionSpec(*sharding.spec[:common])  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _on_device(function: Callable[..., Arrays]) -> Callable[..., dict[str, jax.Array]]:
    """Return a function of ``mouse_core.groups`` with the additional arguments ``device`` and ``sharding``; see
    ``find_target``.
    """

    @wraps(function)
    def placed(
        examples: Any,
        *args: Any,
        device: jax.Device | str | None = None,
        sharding: Sharding | None = None,
        **options: Any,
    ) -> dict[str, jax.Array]:
        target = find_target(device, sharding)
        return _placed(function(examples, *args, **options), target, examples[0].declared)

    signature, added = inspect.signature(function), inspect.signature(placed, follow_wrapped=False).parameters
    own = [*signature.parameters.values(), added["device"], added["sharding"]]
    placed.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return placed


pad = _on_device(groups.pad)
"""Pad examples to rows of equal length, one example per row; see ``mouse_core.groups.pad``."""

pack = _on_device(groups.pack)
"""Pack several examples into each row, one after another; see ``mouse_core.groups.pack``."""

concatenate = _on_device(groups.concatenate)
"""Concatenate all examples without padding; see ``mouse_core.groups.concatenate``."""


class RolloutStream(groups.RolloutStream):
    """``mouse_core.groups.RolloutStream`` with micro-batches as JAX arrays on a device or a sharding.

    All micro-batches have the same shape, so a jitted step is compiled once; for the conditions see ``collate`` of
    ``mouse_core.groups.RolloutStream``.

    Args:
        batches, max_tokens: The same arguments as in ``mouse_core.groups.RolloutStream``.
        device: The device of the arrays; None: JAX's default device.
        sharding: The sharding of arrays ``[B, L]`` over devices of this process; None: arrays are on ``device``.
        **options: The other arguments of ``mouse_core.groups.RolloutStream``.

    Raises:
        ConfigError: The device does not exist, or ``device`` and ``sharding`` are both given; see also
            ``mouse_core.groups.RolloutStream``.
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
