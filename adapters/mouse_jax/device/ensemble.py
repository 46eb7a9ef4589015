"""One batch from several replays: recorded data and fresh data, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from mouse_core import ConfigError, SchemaError
from mouse_core.randomness import Purpose
from mouse_core.replay import Schedule
from mouse_core.replay.ensemble import WITHOUT, Shares, shares_of
from mouse_core.spec import check_count
from mouse_jax import _philox
from mouse_jax._rollout import seed_halves
from mouse_jax.device.ground.state import Replay, named
from mouse_jax.device.sampling import checked_index, sample
from mouse_jax.dtypes import is_key

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
    if keyed:
        own, *numbers = jax.random.split(number, members + 1)
        high, low = jax.random.bits(own, (2, 1), jnp.uint32)
        stage: Any = 0
    else:
        numbers = [number] * members
        high, low = _philox.words(halves, Purpose.REPLAY, number, 1)
        stage = (number >= jnp.asarray(shares.first.astype(np.uint32))).sum() - 1
    ends = _ends(shares, stage, high[0], low[0])
    batches, ids = [], []
    for member in range(members):
        if not shares.given[member]:
            continue
        words = _philox.words(halves, Purpose.REPLAY, jnp.uint32(member), 1, call=_MEMBERS)
        drawn = replace(replays[member], seed=jnp.concatenate(words))
        batches.append(sample(drawn, numbers[member], shares.most[member]))
        ids.append(member)
    row = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[owner]
    place = row - begin + jnp.asarray(shares.offsets(), jnp.int32)[owner]
    joined = _joined(batches, ids, place)
    index_shape = joined["index"].shape
    return joined | {"buffer_ids": jnp.broadcast_to(owner.reshape(size, *[1] * (len(index_shape) - 1)), index_shape)}


def _ends(shares: Shares, stage: Any, high: jax.Array, low: jax.Array) -> jax.Array:
    """Draw the end of each member's rows, int32 ``[M]``, from the upper 53 of 64 random bits."""
    bits = high >> 11, (low >> 11) | (high << 21)
    least = tuple(jnp.asarray(part.astype(np.uint32))[stage] for part in (shares.from_bits >> 32, shares.from_bits))
    more = (bits[0] > least[0]) | ((bits[0] == least[0]) & (bits[1] >= least[1]))
    return jnp.asarray(shares.whole.astype(np.int32))[stage, 1:] + more


def _joined(batches: list[dict[str, Any]], ids: list[int], places: jax.Array) -> dict[str, Any]:
    """Rows of all batches, in which they lie one behind the other, as one batch."""
    filled = []
    extra = {key for batch in batches for key in batch if key in WITHOUT}
    for batch in batches:
        without = {key: jnp.full(batch["index"].shape, WITHOUT[key]) for key in extra - batch.keys()}
        filled.append(batch | without)
    for member, batch in zip(ids, filled, strict=True):
        structures: list[Any] = [jax.tree.structure(one) for one in (batch, filled[0])]
        if structures[0] != structures[1]:
            raise SchemaError(
                f"replay {member}: expected the fields {list(named(filled[0]))} of replay {ids[0]}, found "
                f"{list(named(batch))}"
            )
        shapes = [{key: (leaf.shape[1:], leaf.dtype) for key, leaf in named(one).items()} for one in (filled[0], batch)]
        other = next((key for key in shapes[0] if shapes[0][key] != shapes[1][key]), None)
        if other is not None:
            raise SchemaError(
                f"replay {member}: field {other!r}: expected {shapes[0][other]}, found {shapes[1][other]}"
            )
    joined: dict[str, Any] = jax.tree.map(lambda *parts: jnp.concatenate(parts)[places], *filled)
    return joined
