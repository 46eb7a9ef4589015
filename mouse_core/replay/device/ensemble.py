"""Batches from several replays on a device: the functions choose the replay from which each row of a batch is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mouse_core.replay.device.arrays import Arrays, DrawKey
from mouse_core.replay.ensemble import Shares, check_alike, join_batches

TABLES = ("first", "whole", "from_bits", "offsets")
"""Names of the arrays in ``Shares``."""


def members_of(xp: Arrays, shares: Shares, key: DrawKey, stage_by: Any, size: int) -> tuple[Any, Any]:
    """Return the member of each row of a batch, and the position of the row in the concatenated rows of the members.

    Args:
        xp: The array functions of the framework.
        shares: The shares of the members. From each member, ``shares.most`` candidate rows are drawn.
        key: The key of the batch.
        stage_by: The index of the batch, an integer ``[]``, which selects the stage of a schedule of shares.
        size: The number of rows in the batch.
    """
    words = xp.words(key, 1)
    with xp.wide():
        first, whole, from_bits, offsets = (xp.constant(name, getattr(shares, name)) for name in TABLES)
        stage = ((stage_by >= first).sum() - 1).reshape(1)
        more = xp.upper_bits(words) >= xp.take(from_bits, stage)[0]
        ends, offsets = xp.cast(xp.take(whole, stage)[0][1:] + more, "index"), xp.cast(offsets, "index")
    row = xp.range(size)
    owner = xp.searchsorted(ends, row)
    begins = xp.concat([ends[:1] * 0, ends])
    return owner, row - xp.take(begins, owner) + xp.take(offsets, owner)


def joined(xp: Arrays, batches: Mapping[int, dict[str, Any]], owner: Any, places: Any) -> dict[str, Any]:
    """Join the batches of several members to one batch.

    Args:
        xp: The array functions of the framework.
        batches: The batch of each member.
        owner, places: The results of ``members_of``.

    Raises:
        SchemaError: The batches of the members have different fields.
    """

    def join(key: Any, parts: list[Any], numbers: list[int]) -> Any:
        check_alike(key, parts, numbers)
        return xp.take(xp.concat(parts), places)

    def fill(key: Any, shape: tuple[int, ...]) -> Any:
        return xp.full(shape, 1, "bool" if key == "mask" else "float")

    batch = join_batches([*batches.values()], [*batches], fill, join)
    shape = batch["index"].shape
    return batch | {"buffer_ids": xp.expand(owner.reshape(-1, *[1] * (len(shape) - 1)), shape)}
