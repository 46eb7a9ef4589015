"""Batches from several replays (the members) on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mouse_core.replay.device.arrays import Arrays, DrawKey
from mouse_core.replay.ensemble import Shares, check_alike, join_batches

TABLES = ("first", "whole", "from_bits", "offsets")
"""Names of the arrays in ``Shares``."""


def draw_members(
    xp: Arrays, shares: Shares, key: DrawKey, stage_by: Any, size: int, draw: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Draw a batch from several replays. The field ``buffer_ids`` is the index of each row's member.

    Args:
        xp: The array functions of the framework.
        shares: The shares of the members. From each member, ``shares.most`` candidate rows are drawn.
        key: The key of the batch.
        stage_by: The index of the batch, an integer ``[]``, which selects the stage of a schedule of shares.
        size: The number of rows in the batch.
        draw: A function that returns ``shares.most[member]`` rows of a member.

    Raises:
        SchemaError: The batches of the members have different fields.
    """
    # Example: 10 rows are shared equally by 3 members, so the ends are 3.33, 6.67 and 10. One random number u in [0, 1)
    # rounds all ends: for u = 0.5 the ends are 3, 7 and 10, and the members deliver the rows 0..2, 3..6 and 7..9.
    words = xp.words(key, 1)
    with xp.wide():
        first, whole, from_bits, offsets = (xp.constant(name, getattr(shares, name)) for name in TABLES)
        stage = ((stage_by >= first).sum() - 1).reshape(1)
        upper = xp.scaled(words, xp.full((), 1 << 53, "wide"))  # the upper 53 bits of the word
        more = upper >= xp.cast(xp.take(from_bits, stage)[0], "wide")
        ends, offsets = xp.cast(xp.take(whole, stage)[0][1:] + more, "index"), xp.cast(offsets, "index")
    row = xp.range(size)
    owner = xp.searchsorted(ends, row)
    begins = xp.concat([ends[:1] * 0, ends])
    places = row - xp.take(begins, owner) + xp.take(offsets, owner)  # in the concatenated rows of the members

    def join(key: Any, parts: list[Any], numbers: list[int]) -> Any:
        check_alike(key, parts, numbers)
        return xp.take(xp.concat(parts), places)

    def fill(key: Any, shape: tuple[int, ...]) -> Any:
        return xp.full(shape, 1, "bool" if key == "mask" else "float")

    members = [member for member, given in enumerate(shares.given) if given]
    batch = join_batches([draw(member) for member in members], members, fill, join)
    shape = batch["index"].shape
    return batch | {"buffer_ids": xp.expand(owner.reshape(-1, *[1] * (len(shape) - 1)), shape)}
