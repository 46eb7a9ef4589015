"""Draws batches from several replays, such as recorded and new rows."""

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

_MEMBERS = 1 << 63  # call number of the keys for the seeds of members, as on the host


def sample_ensemble(
    replays: Sequence[Replay],
    index: Any,
    batch_size: int,
    *,
    p: Sequence[float] | npt.NDArray[Any] | Schedule | None = None,
    seed: int | jax.Array = 0,
) -> dict[str, Any]:
    """Return batch number ``index`` from several replays; each replay contributes its share.

    The batch equals the batch of a ``mouse_core.replay.ReplayBufferEnsemble`` with the same seed, over buffers with the
    same rows and no other reader, as long as each member with a weight above 0 has a row in every batch. A member's
    share is its weight times the batch size, rounded up or down at random, so that the mean is exact. The seeds of
    members come from ``seed``, and the transforms of members are applied.

    Args:
        replays: Replays with order="random", all of which have rows; see ``can_sample``.
        index: The number of the sample, from 0, below 2**32; may be traced. Or a random key of JAX.
        batch_size: Number of rows or slices in the batch, B.
        p: A weight for each replay, at least 0; by default equal weights. The weights of a ``Schedule`` change with the
            number of the sample; ``index`` then must not be a random key.
        seed: An integer in ``[0, 2**64)``; may be traced.

    Returns:
        A batch as in ``sample``, with the rows of the members one after another, and ``buffer_ids``, int32, the member
        of each row. For members without ``mask`` or ``priority_weight``, these are True and 1. A batch has both fields
        if any member has them, even if it contributes no row.

    Raises:
        ConfigError: There are no replays, weights are invalid, a number is out of range, or values are known and a
            replay cannot draw a batch.
        SchemaError: The batches of a member have other fields than the batches of the first member.
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
