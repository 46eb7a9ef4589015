"""The order of policy versions."""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError

_LAST = "\U0010ffff"  # behind all versions
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def version_name(version: Any) -> str:
    """Convert a version to text; DataError: neither an int nor a str that is not empty."""
    if isinstance(version, int | np.integer) and not isinstance(version, bool):
        return str(int(version))
    if not isinstance(version, str) or not version:
        raise DataError(f"set_policy_version: expected a str, not empty, or an int, found {version!r:.80}")
    return version


def version_number(version: str) -> Decimal | None:
    """Return a version as a number; None if it is no number."""
    text = version.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all measure
        return None


def version_order(version: str) -> tuple[Any, ...]:
    """Return the key that sorts versions: numbers by their values, behind versions that are no numbers.

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


class Versions:
    """The versions that were seen, and how far behind the newest one each is.

    The newest is the one that was told last, or, where none was, the newest that was seen.

    Example:
        >>> versions = Versions(["3", "5", "7", "step-9", "step-10"])
        >>> versions.behind("3"), versions.behind("step-9")
        (4, 4)
        >>> versions.tell("7"), versions.tell("3"), versions.behind("3"), versions.is_ahead("5")
        (False, True, 0, True)
        >>> versions.tell("7"), versions.parted("5", ["7", "3", "7"]), versions.parted("3", ["7", "3", "7"])
        (False, 6, None)

    Attributes:
        told: Which one is the latest, if that was said.
    """

    def __init__(self, seen: Iterable[str] = (), told: str | None = None) -> None:
        self.told = told
        self._seen: list[tuple[tuple[Any, ...], str]] = []  # in their order, of equal ones the first
        self._places: dict[str, int] = {}
        for version in seen:
            self.note(version)

    def note(self, version: str) -> bool:
        """Add a version; return whether it is the newest so far."""
        entry = (version_order(version), version)
        place = bisect_right(self._seen, entry)
        if place and self._seen[place - 1][0] == entry[0]:
            return False
        insort(self._seen, entry)
        return place == len(self._seen) - 1

    def tell(self, version: str) -> bool:
        """Set the latest version; return whether a newer one was told or seen before.

        Those that are newer than it are forgotten: where their numbers come again, they are of another policy.
        """
        order = version_order(version)
        goes_back = self.told is not None and order < version_order(self.told)
        self.told = version
        self.note(version)
        there = bisect_right(self._seen, (order, _LAST))
        goes_back |= there < len(self._seen)
        del self._seen[there:]
        return goes_back

    def behind(self, version: str) -> int:
        """Return how many versions ``version`` is behind the newest: the difference of numbers, rounded up, else the
        number of versions between them; 0 if it is not behind.
        """
        return self._between(version, self._seen[-1][1] if self.told is None else self.told)

    def parted(self, version: str, told: Iterable[str]) -> int | None:
        """Return the distance of a version from the newest, if a trainer went back behind it; else None.

        Of version 5, where 3 was told and then 7, two lie on the line that was lost, and four on the other: 6.

        Args:
            version: The version.
            told: The versions that were told after it was there.
        """
        back = min(told, key=version_order, default=version)
        if version_order(back) >= version_order(version):
            return None
        return max(1, self._between(back, version) + self.behind(back))

    def _between(self, version: str, newer: str) -> int:
        """Return how many versions ``version`` is behind ``newer``."""
        numbers = version_number(newer), version_number(version)
        if numbers[0] is not None and numbers[1] is not None:
            return max(0, min(math.ceil(numbers[0] - numbers[1]), 1 << 62))
        return max(0, self._place(newer) - self._place(version))

    def _place(self, version: str) -> int:
        return bisect_right(self._seen, (version_order(version), _LAST))

    def is_ahead(self, version: str) -> bool:
        """Whether a version is newer than the one that is said to be the latest."""
        return self.told is not None and version_order(version) > version_order(self.told)

    def refuse_ahead(self, version: str, rollout_uid: str) -> None:
        """Raise DataError where a rollout is of a version newer than the one that is said to be the latest."""
        if self.is_ahead(version):
            raise DataError(
                f"rollout {rollout_uid!r}: expected a version up to {self.told!r}, as set_policy_version said, "
                f"found {version!r}"
            )

    def place(self, version: str) -> int:
        """Return the number of a version, counted from 0 in the order in which versions come."""
        return self._places.setdefault(version, len(self._places))

    def all_behind(self) -> npt.NDArray[np.int64]:
        """Return ``behind`` of every version that has a ``place``, by its ``place``."""
        return np.array([self.behind(version) for version in self._places], np.int64)
