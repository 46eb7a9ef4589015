"""One batch from several replays: recorded data and fresh data, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt

from mouse_core import ConfigError
from mouse_core.randomness import Purpose
from mouse_core.replay import Schedule
from mouse_core.replay.device import DrawKey
from mouse_core.replay.device.ensemble import joined, members_of
from mouse_core.replay.ensemble import shares_of
from mouse_core.spec import check_count
from mouse_jax import _philox
from mouse_jax.device.arrays import JAX
from mouse_jax.device.sampling import checked_index, sample
from mouse_jax.device.state import Replay
from mouse_jax.dtypes import is_key, seed_halves

_MEMBERS = 1 << 63  # the call of keys that seeds of members come from, as on the host


def sample_ensemble(
    replays: Sequence[Replay],
    index: Any,
    batch_size: int,
    *,
    p: Sequence[float] | npt.NDArray[Any] | Schedule | None = None,
    seed: int | jax.Array = 0,
) -> dict[str, Any]:
    """Batch number ``index`` of several replays, of which each gives its share.

    It is that of a ``mouse_core.replay.ReplayBufferEnsemble`` of the same seed over buffers with the same rows, which
    nobody else draws from, as long as each with a weight has a row in every batch. A share is a weight times the size;
    where that is no whole number, it is rounded up or down at random, so that it is right on average. Members have
    seeds that come from this one, and their transforms are applied.

    Args:
        replays: Replays of which rows or slices are drawn at random, all with rows; see ``can_sample`` of each.
        index: The number of the sample, from 0, below 2**32; may be traced. Or a random key of JAX.
        batch_size: Rows or slices in the batch, B.
        p: A weight for each, from 0; by default all alike. With a ``Schedule`` they change with the number of the
            sample, which is no random key then.
        seed: In ``[0, 2**64)``; may be traced.

    Returns:
        A batch as of ``sample``, the members' rows one behind the other, and ``buffer_ids``, int32: of which member
        each row is. Where one member's batches have ``mask`` or ``priority_weight`` and another's not, it is True or 1.
        A batch has these also where none of its rows is of that member.

    Raises:
        ConfigError: No replays, weights that are none, or a number out of range; nothing to draw, where that is known.
        SchemaError: Members whose batches have other fields than the first one's.
    """
    members, size = len(replays), check_count("batch_size", batch_size)
    if not members:
        raise ConfigError("replays: expected at least one, found none")
    number = checked_index(index)
    keyed = is_key(number.dtype)
    if keyed and isinstance(p, Schedule) and len(p.weights) > 1:
        raise ConfigError("index: expected the number of the sample, which the schedule needs, found a random key")
    shares = shares_of(p, members, size)
    halves = seed_halves(seed)
    own, *numbers = jax.random.split(number, members + 1) if keyed else [number] * (members + 1)
    owner, places = members_of(JAX, shares, DrawKey(halves, own), jnp.uint32(0) if keyed else number, size)
    batches = {}
    for member in range(members):
        if shares.given[member]:
            words = _philox.words(halves, Purpose.REPLAY, jnp.uint32(member), 1, call=_MEMBERS)
            drawn = replace(replays[member], seed=jnp.concatenate(words))
            batches[member] = sample(drawn, numbers[member], shares.most[member])
    return joined(JAX, batches, owner, places)
