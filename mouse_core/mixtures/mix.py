"""What a mixture was told of its members: names and weights, and the shares that follow from them and from the rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from mouse_core.errors import ConfigError
from mouse_core.sampling.shares import Schedule, Shares, exact
from mouse_core.store.snapshot import Snapshot

Per = Literal["member", "trajectory", "step"]


@dataclass(frozen=True, repr=False)
class Mix:
    """What a mixture was told of its members; see ``Mixture``.

    Args:
        names: Those of the members.
        stages: The number of the first batch of each stage, and the members' weights there, as small whole numbers as
            have their ratio.
        per: What a weight is for.
        temperature: How far shares are evened out.
        field: The field that says which member a window is of; None: there is none.
        skips_empty: Whether a member without rows has no share, as in parts of a mixture, and is no error.
    """

    names: tuple[str, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    per: Per = "member"
    temperature: float = 1.0
    field: str | None = "member"
    skips_empty: bool = False

    def __repr__(self) -> str:
        """Short, as it says in states what a mixture is."""
        by_name = {first: dict(zip(self.names, weights, strict=True)) for first, weights in self.stages}
        even = "" if self.temperature == 1 else f" at temperature {self.temperature}"
        return f"{by_name if len(by_name) > 1 else by_name[0]} per {self.per}{even}"

    def shares(self, stage: int, members: Sequence[Snapshot]) -> Shares:
        """The members' shares of the windows in a stage.

        Raises:
            ConfigError: A member with a weight has no rows, or no member has both.
        """
        weights = self.stages[stage][1]
        sizes = self._sizes(weights, members)
        shares = [exact(weight) * size for weight, size in zip(weights, sizes, strict=True)]
        if not any(shares):
            raise ConfigError(f"mixture: expected rows in a member with a weight, found {self!r} and {sizes}")
        if self.temperature != 1:
            largest = max(shares)
            shares = [_evened(share / largest, self.temperature) for share in shares]
        return Shares.of(shares)

    def _sizes(self, weights: Sequence[int], members: Sequence[Snapshot]) -> list[int]:
        """What each member's weight is multiplied by: its steps, its episodes, or 1."""
        if self.per == "step":
            return [member.num_rows for member in members]
        if self.per == "trajectory":
            return [len(member.episode_starts) if member.num_rows else 0 for member in members]
        if self.skips_empty:
            return [int(member.num_rows > 0) for member in members]
        for name, weight, member in zip(self.names, weights, members, strict=True):
            if weight and not member.num_rows:
                raise ConfigError(f"mixture: expected rows in every member with a weight, found {name!r} empty")
        return [1] * len(members)


def checked_stages(weights: Any, names: Sequence[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The weights of some members by number of batch, or ConfigError; None are 1 for each."""
    if isinstance(weights, Schedule):
        return tuple((int(first), _checked(some, names)) for first, some in weights.weights.items())
    return ((0, _checked(weights, names)),)


def listed(option: str, given: Any) -> list[Any]:
    """Several things in their order, or ConfigError."""
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
        raise ConfigError(f"{option}: expected several, by name or in a list, found {given!r:.80}")
    return list(given)


def is_number(value: Any) -> bool:
    """Whether something is a number, and no infinite one."""
    known = isinstance(value, int | float | Fraction | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return known and math.isfinite(value)
    except OverflowError:
        return False


def _checked(weights: Any, names: Sequence[str]) -> tuple[int, ...]:
    if weights is None:
        return (1,) * len(names)
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ConfigError(f"weights: expected one for each of {list(names)}, found {list(weights)}")
        weights = [weights[name] for name in names]
    given = listed("weights", weights)
    if len(given) != len(names) or not all(is_number(weight) and weight >= 0 for weight in given) or not any(given):
        raise ConfigError(f"weights: expected {len(names)} numbers from 0, not all 0, found {given}")
    # 2 and 1, 1.0 and 0.5, 0.7 and 0.35 are the same weights, also in a fingerprint: 2 and 1.
    shares = [exact(weight if isinstance(weight, int | Fraction) else float(weight)) for weight in given]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    return tuple(share // math.gcd(*whole) for share in whole)


def _evened(share: Fraction, temperature: float) -> Fraction:
    """A share of at most 1 at a temperature, where no share becomes none."""
    return Fraction(max(float(share) ** (1 / temperature), sys.float_info.min)) if share else share
