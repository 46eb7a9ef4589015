"""The order of policy versions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def version_number(version: str) -> Decimal | None:
    """The number that a version is, or None if it is not one."""
    text = version.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all measure
        return None


def version_order(version: str) -> tuple[Any, ...]:
    """A key to sort versions by: numbers as numbers, and before them those that are not.

    In other versions the digits compare as numbers too: "step-9" comes before "step-10".

    Example:
        >>> sorted(["10", "9", "step-10", "step-9", "9.5"], key=version_order)
        ['step-9', 'step-10', '9', '9.5', '10']
    """
    number = version_number(version)
    if number is not None:
        return (1, number)
    pieces = re.split(r"([0-9]+)", version)
    # Text and digits take turns, beginning with text, so like is compared with like.
    return (0, tuple(int(piece) if index % 2 else piece for index, piece in enumerate(pieces)), version)


def staleness(versions: Sequence[str], known: Collection[str]) -> list[float | None]:
    """How far each version is behind the newest of them and of those known: None where there is no version.

    Numbers are compared as numbers; of other versions it is counted how many known ones are newer.

    Example:
        >>> staleness(["3", "5", ""], {"7"}), staleness(["step-9"], {"step-10", "step-11"})
        ([4.0, 2.0, None], [2.0])
    """
    orders = sorted({version_order(version) for version in {*versions, *known} if version})
    behind: dict[str, float | None] = {"": None}
    for version in set(versions) - {""}:
        order = version_order(version)
        numbers = order[0] == orders[-1][0] == 1
        behind[version] = float(orders[-1][1] - order[1]) if numbers else float(len(orders) - 1 - orders.index(order))
    return [behind[version] for version in versions]
