"""Batches of several replays: which rows of a batch are whose, decided by integers alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.replay.ground.protocols import FieldKey
from mouse_core.replay.ground.shares import check_weights
from mouse_core.sampling.shares import Schedule

WITHOUT: Mapping[FieldKey, Any] = MappingProxyType({"priority_weight": np.float32(1), "mask": np.True_})
"""What one member's batches may have and another's not, and what it is there."""

_BITS = 53  # of a uniform number


class Shares(NamedTuple):
    """Where the members' shares of a batch end, before one random number of the sample is added and all is cut off.

    Attributes:
        first: The first sample of each stage, int64 ``[stages]``.
        whole: The integer below each end, int64 ``[stages, 1 + M]``, 0 first.
        from_bits: From which random integer of 53 bits on it is one more, int64 ``[stages, M]``.
        given: Which members give rows in any stage.
        most: How many rows of a batch are at most of each member.
    """

    first: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]
    from_bits: npt.NDArray[np.int64]
    given: tuple[bool, ...]
    most: tuple[int, ...]

    def offsets(self) -> list[int]:
        """Where the rows of each member begin, where so many of each that gives any lie one behind the other."""
        counts = [most if given else 0 for most, given in zip(self.most, self.given, strict=True)]
        return [sum(counts[:number]) for number in range(len(counts))]


def shares_of(p: Any, members: int, size: int) -> Shares:
    """The shares of so many members in batches of a size.

    Args:
        p: A weight for each, from 0, a ``Schedule`` of them, or None: all alike.
        members: How many there are.
        size: Rows in a batch.

    Raises:
        ConfigError: Weights that are none.
    """
    stages = p.weights if isinstance(p, Schedule) else {0: p}
    weights = np.stack([check_weights(given, members) for given in stages.values()])
    ends = np.round(np.cumsum(weights, 1) * size, 9)
    ends[:, -1] = size
    whole = np.floor(ends).astype(np.int64)
    from_bits = np.array([[_least(end) for end in row] for row in ends.tolist()], np.int64)
    from_bits[:, -1] = 1 << _BITS
    whole = np.concatenate([np.zeros((len(ends), 1), np.int64), whole], 1)
    most = (whole[:, 1:] + 1 - np.minimum(whole[:, :-1], size)).max(0)
    return Shares(
        np.array([*stages], np.int64),
        whole,
        from_bits,
        tuple(bool(column.any()) for column in (weights > 0).T),
        tuple(int(number) for number in np.minimum(most, size)),
    )


def _least(end: float) -> int:
    """The least integer m of 53 bits with which ``end + m * 2**-53``, in float64, has another integer part."""
    low, high = 0, 1 << _BITS
    while low < high:
        middle = (low + high) // 2
        if np.floor(end + middle * 2.0**-_BITS) > np.floor(end):
            high = middle
        else:
            low = middle + 1
    return low
