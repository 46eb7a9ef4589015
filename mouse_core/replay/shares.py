"""Batches of several replays: which rows of a batch are whose, decided by integers alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.nested import find, flatten
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.sampling.shares import Schedule

Floats = npt.NDArray[np.float64]
# The call of keys that seeds of members come from.
_MEMBERS = 1 << 63


def check_weights(p: Any, n: int) -> Floats:
    """The weights of ``n`` members, which add up to 1."""
    if p is None:
        return np.full(n, 1 / n)
    try:
        weights = np.array(p, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"p: expected {n} weights, found {p!r:.80}") from error
    if weights.shape != (n,) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum():
        raise ConfigError(f"p: expected {n} weights from 0, not all 0, found {p!r:.80}")
    normalised: Floats = weights / weights.sum()
    return normalised


def shares_of_all(p: Floats, size: int, offset: float) -> list[int]:
    """How many of ``size`` windows each member gives, where all with a weight take part (systematic sampling)."""
    # Rounded, so that a share that is a whole number is not missed by the last bit of a float.
    ends = np.round(np.cumsum(p) * size, 9)
    ends[-1] = size
    shares: list[int] = (np.diff(np.floor(ends + offset), prepend=0.0).astype(np.int64)).tolist()
    return shares


def shares_of_some(p: Floats, size: int, key: Key, drawn: int) -> list[int]:
    """How many each gives, where members are drawn ``drawn`` times by their weights, each time for as many windows.

    Of 10 windows for 3 members that are drawn the first gets 4.
    """
    ends = np.cumsum(p)
    ends[int(np.flatnonzero(p)[-1]) :] = 1.0  # no rounding leads behind the last member that has a weight
    members = ends.searchsorted(key.uniform(drawn), side="right")
    parts = np.diff(np.arange(drawn + 1) * size // drawn)[::-1]
    shares: list[int] = np.bincount(members, weights=parts, minlength=len(p)).astype(np.int64).tolist()
    return shares


def routes_of(rows: Any, buffer_ids: Any) -> tuple[int, list[tuple[int, Slots]]]:
    """How many rows there are, and which of them go to which member.

    Args:
        rows: A tree of arrays ``[n, ...]``, or a list of rows.
        buffer_ids: The number of the member of each, or the field that has it.

    Raises:
        ConfigError: They are no integers, or not as many as rows.
        MissingFieldError: There is no such field.
    """
    if isinstance(buffer_ids, str | tuple):
        parts = rows if isinstance(rows, list) else [rows]
        found = [find(part, buffer_ids, where="extend") for part in parts]
        buffer_ids = found if isinstance(rows, list) else found[0]
    ids = np.asarray(buffer_ids)
    count = len(rows) if isinstance(rows, list) else next((len(leaf) for leaf in flatten(rows).values()), 0)
    if ids.size != count or (count and ids.dtype.kind not in "iu"):
        raise ConfigError(f"extend: expected {count} buffer_ids, integers, found {ids.dtype} {list(ids.shape)}")
    ids = ids.reshape(count)
    return count, [(number, np.flatnonzero(ids == number)) for number in np.unique(ids).tolist()]


def member_seed(seed: int, number: int) -> int:
    """A seed for each member, so that members of one seed do not draw the same rows."""
    return int(Key(seed, Purpose.REPLAY, number, _MEMBERS).bits(1)[0])


def check_ids(ids: npt.NDArray[Any], slots: Slots, members: int) -> None:
    """ConfigError unless there is the number of a member for every slot."""
    if ids.shape != slots.shape or (ids.size and not (ids.min() >= 0 and ids.max() < members)):
        raise ConfigError(f"update_priority: expected buffer_ids in 0..{members - 1} for every index")


def said(schedule: Any) -> Any:
    """All shares as a state has them: a tuple, or tuples by the number of the first sample."""
    shares = {str(first): tuple(weights.tolist()) for first, weights in schedule.weights.items()}
    return shares["0"] if len(shares) == 1 else shares


def listed(p: Any) -> Any:
    """Shares of a state, in which tuples may have become lists."""
    return {first: list(shares) for first, shares in p.items()} if isinstance(p, Mapping) else list(p)


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
