"""Batches from several replays on a device: which replay each row of a batch comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mouse_core.errors import SchemaError
from mouse_core.nested import flatten, structure_of, unflatten
from mouse_core.replay.device.arrays import Arrays, DrawKey
from mouse_core.replay.ensemble import WITHOUT, Shares


def members_of(xp: Arrays, shares: Shares, key: DrawKey, stage_by: Any, size: int) -> tuple[Any, Any]:
    """Return the member of each row of a batch, and the position of the row in the concatenated rows of the members.

    Args:
        xp: Functions over arrays.
        shares: The shares of the members; each member contributes ``most`` candidate rows.
        key: The key of the batch.
        stage_by: The number of the batch, an integer ``[]``, which selects the stage of the shares.
        size: Rows in the batch.
    """
    words = xp.words(key, 1)
    with xp.wide():
        first, whole, from_bits = (xp.constant(name, getattr(shares, name)) for name in ("first", "whole", "from_bits"))
        stage = ((stage_by >= first).sum() - 1).reshape(1)
        more = xp.upper_bits(words) >= xp.take(from_bits, stage)[0]
        ends = xp.cast(xp.take(whole, stage)[0][1:] + more, "index")
        offsets = xp.cast(xp.constant("offsets", np.asarray(shares.offsets(), np.int64)), "index")
    row = xp.range(size)
    owner = xp.searchsorted(ends, row)
    begins = xp.concat([ends[:1] * 0, ends])
    return owner, row - xp.take(begins, owner) + xp.take(offsets, owner)


def joined(xp: Arrays, batches: Mapping[int, dict[str, Any]], owner: Any, places: Any) -> dict[str, Any]:
    """Join the batches of several members to one batch.

    Args:
        xp: Functions over arrays.
        batches: The batch of each member.
        owner, places: The results of ``members_of``.

    Raises:
        SchemaError: The batches have different fields.
    """
    extra = sorted({key for batch in batches.values() for key in batch if key in WITHOUT}, key=str)
    dtypes, first, filled = {"mask": "bool", "priority_weight": "float"}, next(iter(batches)), []
    for member, batch in batches.items():
        shape = batch["index"].shape
        filled.append(batch | {key: xp.full(shape, 1, dtypes[key]) for key in extra if key not in batch})
        expected, found = flatten(filled[0]), flatten(filled[-1])
        if expected.keys() != found.keys():
            raise SchemaError(
                f"replay {member}: expected the fields {list(expected)} of replay {first}, found {list(found)}"
            )
        for key, leaf in found.items():
            like = expected[key]
            if (like.shape[1:], like.dtype) != (leaf.shape[1:], leaf.dtype):
                raise SchemaError(
                    f"replay {member}: field {key!r}: expected {like.dtype} {list(like.shape[1:])} as of replay "
                    f"{first}, found {leaf.dtype} {list(leaf.shape[1:])}"
                )
    leaves = [flatten(batch) for batch in filled]
    taken = {key: xp.take(xp.concat([named[key] for named in leaves]), places) for key in leaves[0]}
    shape = taken["index"].shape
    taken["buffer_ids"] = xp.expand(owner.reshape(-1, *[1] * (len(shape) - 1)), shape)
    made: dict[str, Any] = unflatten(structure_of(filled[0] | {"buffer_ids": 0}), taken)
    return made
