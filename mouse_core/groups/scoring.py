"""Advantages of rollouts, and retention rules, which weight rollouts by their known properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_count, check_number


@dataclass(frozen=True)
class HeldRollouts:
    """The known properties of a batch maker's n rollouts, in order of arrival: all rollouts of groups that have at
    least one drawable rollout. A rollout of these groups that cannot be drawn was drawn before, or was
    removed.

    Args:
        present: Whether each rollout can still be drawn, bool ``[n]``.
        reward: The reward of each rollout, float64 ``[n]``.
        advantage: The advantage of each rollout, float64 ``[n]``.
        group: The group index of each rollout, int64 ``[n]``.
        environment: The position of each rollout's environment in ``environments``, int64 ``[n]``.
        environments: The names of the environments.
        staleness: The number of versions that each rollout is behind the newest version, int64 ``[n]``. The staleness
            is the difference of the two versions if they are numeric, else the number of later versions that were seen.
        age: Seconds between the creation of each rollout and the creation of the newest rollout, float64 ``[n]``.
        newer: For each rollout, the number of rollouts of the same environment that arrived later, int64 ``[n]``.
        tokens: The number of tokens of each rollout, int64 ``[n]``.
        uses: The number of batches that contained each rollout, int64 ``[n]``.
    """

    present: npt.NDArray[np.bool_]
    reward: npt.NDArray[np.float64]
    advantage: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]
    environment: npt.NDArray[np.int64]
    environments: tuple[str, ...]
    staleness: npt.NDArray[np.int64]
    age: npt.NDArray[np.float64]
    newer: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    uses: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.reward)


Retention = Callable[[HeldRollouts], npt.ArrayLike]
"""A function that takes ``HeldRollouts`` with at least one rollout, and returns a weight for each of the n rollouts,
``[n]``: numbers of at least 0, or bools, which count as 1 and 0. A rollout is drawn in proportion to its weight. A
rollout of weight 0 is removed permanently, so its weight must stay 0, as with ``lambda rows: rows.tokens <= 4096``.
"""


@dataclass(frozen=True)
class TopK:
    """Keep, in each group, the ``k`` rollouts with the highest rewards; if rewards are equal, earlier rollouts are
    kept.

    ``TopK`` needs complete groups, such as the groups that a ``RolloutBuffer`` seals. ``TopK(k, above_median=True)``
    chooses the same rollouts as TorchRL's ``TopKRewardSelector(size of groups, k)``.

    Args:
        k: The number of rollouts to keep in each group, 1 or more.
        above_median: Whether to exclude rewards up to the group's median; in a group with an even number of rollouts,
            the median is the lower of the two middle rewards. Of the rewards 0, 1, 1, 2 only 2 is kept. If all rewards
            of a group are equal, no rollout is kept.

    Raises:
        ConfigError: ``k`` is below 1.
    """

    k: int
    above_median: bool = False

    def __post_init__(self) -> None:
        check_count("k", self.k, 1)

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``."""
        order = np.lexsort((np.arange(len(rows)), -rows.reward, rows.group))
        groups = rows.group[order]
        first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])[: len(groups)])
        sizes = np.diff(np.append(first, len(groups)))
        kept = np.empty(len(rows), np.bool_)
        kept[order] = np.arange(len(rows)) - np.repeat(first, sizes) < self.k
        if self.above_median:
            # Rewards are in descending order: of 5 rewards, the median has index 2; of 4 rewards, the lower middle also
            # has index 2.
            kept[order] &= rows.reward[order] > np.repeat(rows.reward[order][first + sizes // 2], sizes)
        return kept


def weights_of(retention: Retention, rows: HeldRollouts) -> npt.NDArray[np.float64]:
    """Return the weights of a ``Retention``, after a check.

    Raises:
        DataError: The weights are not one finite number of at least 0 for each rollout.
    """
    weights = np.asarray(retention(rows))
    if weights.shape != (len(rows),) or weights.dtype.kind not in "biuf":
        raise DataError(
            f"retention {name_of(retention)}: expected a weight for each of {len(rows)} rollouts, "
            f"found {weights.dtype} {list(weights.shape)}"
        )
    given: npt.NDArray[np.float64] = weights.astype(np.float64)
    invalid = given[~(np.isfinite(given) & (given >= 0))]
    if len(invalid):
        raise DataError(f"retention {name_of(retention)}: expected finite weights of 0 or more, found {invalid[0]}")
    return given


def name_of(retention: Retention) -> str:
    """Return the name of a retention; rollouts that the retention removes are counted under this name."""
    return getattr(retention, "__name__", type(retention).__name__)


def retentions(given: Retention | Sequence[Retention]) -> list[Retention]:
    """Return one or several retentions as a list.

    Raises:
        ConfigError: An element is not callable.
    """
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for one in several:
        if not callable(one) or isinstance(one, type):
            raise ConfigError(f"retention: expected functions of HeldRollouts, found {one!r:.80}")
    return several


# An advantage below this fraction of the largest deviation in its group is a rounding error.
_ROUNDING = 1e-12
# Differences of up to this number of units in the last place of a group's largest reward are rounding errors.
_UNITS = 4
_FLOAT32, _FLOAT64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)
# Relative size of the rounding error of sums of doubles that should be 0, such as 0.1 + 0.2 - 0.3.
_NOTHING = 1e-15


def are_equal(least: float, most: float) -> bool:
    """Whether the smallest and the largest reward differ at most by the rounding of float32, the dtype of reward
    models.

    Example: 0.3 and 0.1 + 0.2 count as equal; 0.3 and float32(0.3) also do; 0.3 and 0.30001 do not.
    """
    return most - least <= max(abs(least), abs(most)) * _UNITS * _FLOAT32 + _NOTHING


def _advantages(
    rewards: Any, groups: Any, *, leave_one_out: bool = False, grpo: Grpo | None = None
) -> npt.NDArray[np.float64]:
    """Return rewards minus the baseline of their group, float64 ``[n]``, computed in double precision.

    The advantage is exactly 0 if all rewards of a group are equal up to rounding of doubles. The advantage is also 0 if
    a group has a single rollout; other libraries then return the reward or NaN.

    Args:
        rewards: ``[n]``.
        groups: The group index of each reward, ``[n]``.
        leave_one_out: Whether the baseline is the mean of the other rewards in the group, instead of the group's mean.
        grpo: The options of the division by the group's standard deviation; None: no division.

    Raises:
        DataError: A reward is not finite, or ``groups`` and ``rewards`` differ in length.
    """
    reward, group = _arrays(rewards, groups)
    if not reward.size:
        return np.zeros(0)
    size = np.bincount(group)
    first = np.zeros(len(size))
    first[group[::-1]] = reward[::-1]
    # Deviations from one reward of the group are exactly 0 if all rewards are equal, and small numbers keep their
    # digits.
    deviation = reward - first[group]
    largest = np.zeros(len(size))
    np.maximum.at(largest, group, np.abs(deviation))
    others = np.maximum(size - 1, 1)
    scale = np.zeros(len(size))
    np.maximum.at(scale, group, np.abs(reward))
    total = np.bincount(group, deviation)
    mean = total / size
    if leave_one_out:
        advantage = deviation - (total[group] - deviation) / others[group]
    else:
        advantage = deviation - mean[group]
    advantage[np.abs(advantage) <= _ROUNDING * largest[group]] = 0.0
    advantage[(largest <= scale * _UNITS * _FLOAT64)[group]] = 0.0
    advantage[size[group] == 1] = 0.0
    if grpo is not None:
        variance = np.bincount(group, (deviation - mean[group]) ** 2) / (others if grpo.ddof else size)
        divisor = np.maximum(np.sqrt(variance), grpo.std_floor) + grpo.eps
        # If the standard deviation is 0, all rewards are equal (or their squared differences underflow), and advantages
        # are 0.
        np.divide(advantage, divisor[group], out=advantage, where=divisor[group] > 0)
    return advantage


def _arrays(rewards: Any, groups: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the rewards, and the group index of each reward, as arrays."""
    try:
        reward = np.asarray(rewards, np.float64)
        group = np.asarray(groups)
    except (TypeError, ValueError):
        raise DataError(f"rewards: expected numbers [n], found {rewards!r:.80}") from None
    if reward.ndim != 1 or group.shape != reward.shape or (group.size and group.dtype.kind not in "biu"):
        raise DataError(
            f"rewards: expected rewards [n] and groups [n], which are integers, found rewards {list(reward.shape)} and "
            f"groups {list(group.shape)} of {group.dtype}"
        )
    if not np.isfinite(reward).all():
        raise DataError(f"rewards: expected finite numbers, found {reward[~np.isfinite(reward)][0]}")
    return reward, _numbered(group.astype(np.int64)) if group.size else np.zeros(0, np.int64)


def _numbered(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Renumber groups from 0 without gaps: 7, 3, 7 become 1, 0, 1."""
    if groups.min() < 0 or groups.max() > 8 * len(groups) + 1024:
        found: npt.NDArray[np.int64] = np.unique(groups, return_inverse=True)[1]
        return found
    # Faster than to sort them.
    numbers = np.cumsum(np.bincount(groups) > 0) - 1
    return numbers[groups]


Advantage = Callable[[npt.NDArray[np.float64], npt.NDArray[np.int64]], npt.ArrayLike]
"""A function that takes ``rewards``, float64 ``[n]``, and ``groups``, int64 ``[n]``, the group index of each reward,
from 0. The function returns finite advantages ``[n]``. The advantage of a rollout must depend only on the rewards of
its own group, because the other groups in a call change when batches are drawn. Therefore a plain function is called
for one group at a time, with all rollouts of the group, including rollouts that were already drawn.

An object with an attribute ``compares`` is called for many groups at once, and must compute each group separately. If
``compares`` is "rewards", groups whose rollouts have equal rewards are left out, because their advantages are zero. If
``compares`` is "nothing", the default of plain functions, no group is left out.

An object with a method ``of_batch(rollouts, worth)`` changes the advantages of a batch after the draw. The method
receives the B rollouts of the batch and the advantage of each rollout, float64 ``[B]``, and returns the advantage of
each rollout: a number, or an array with a number for each token of the rollout. To repeat ``values`` of turns for the
tokens of each turn, use ``np.repeat(values, [len(turn.tokens) for turn in rollout.turns])``.
"""

COMPARES = ("rewards", "nothing")


@dataclass(frozen=True)
class Rloo:
    """The reward minus the mean of the other rewards in the group: ``r_i - mean(r_j, j != i)``.

    Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!" (2019); Ahmadian et al., "Back to
    Basics" (2024).
    """

    compares: ClassVar[str] = "rewards"

    def __call__(self, rewards: npt.ArrayLike, groups: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """See ``Advantage``."""
        return _advantages(rewards, groups, leave_one_out=True)


@dataclass(frozen=True)
class Grpo:
    """The reward minus the mean of the group, divided by the group's standard deviation: ``(r_i - mean) / (max(std,
    floor) + eps)``.

    Shao et al., "DeepSeekMath" (2024). The defaults are the values of TRL; the formula of the paper is ``Grpo(ddof=0,
    eps=0)``.

    Args:
        ddof: 1 for the standard deviation of a sample (with n - 1), 0 for the standard deviation of a population (with
            n).
        eps: The number that is added to the standard deviation; 0 or more.
        std_floor: The smallest standard deviation; 0 or more.

    Raises:
        ConfigError: An option is invalid.
    """

    compares: ClassVar[str] = "rewards"
    ddof: int = 1
    eps: float = 1e-4
    std_floor: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.ddof, bool) or not isinstance(self.ddof, int | np.integer) or self.ddof not in (0, 1):
            raise ConfigError(f"ddof: expected 0 or 1, found {self.ddof!r}")
        check_number("eps", self.eps)
        check_number("std_floor", self.std_floor)

    def __call__(self, rewards: npt.ArrayLike, groups: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """See ``Advantage``."""
        return _advantages(rewards, groups, grpo=self)


@dataclass(frozen=True)
class DrGrpo:
    """The reward minus the mean of the group, without a division: ``r_i - mean``.

    Liu et al., "Understanding R1-Zero-Like Training" (2025).
    """

    compares: ClassVar[str] = "rewards"

    def __call__(self, rewards: npt.ArrayLike, groups: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """See ``Advantage``."""
        return _advantages(rewards, groups)


def checked_worth(advantage: Advantage, rewards: Any, groups: Any) -> npt.NDArray[np.float64]:
    """Call an ``Advantage`` once for all groups, or a plain function once for each group; return the advantages.

    Raises:
        DataError: The result does not have one finite number for each rollout.
    """
    if hasattr(advantage, "compares"):
        return _finite(advantage, rewards, groups)
    worth = np.empty(len(rewards))
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    for rows in np.split(order, ends) if len(order) else ():
        worth[rows] = _finite(advantage, rewards[rows], np.zeros(len(rows), np.int64))
    return worth


def _finite(advantage: Advantage, rewards: Any, groups: Any) -> npt.NDArray[np.float64]:
    worth = np.asarray(advantage(rewards, groups), np.float64)
    with np.errstate(over="ignore"):  # examples have float32
        fits = np.isfinite(worth.astype(np.float32)).all()
    if worth.shape != rewards.shape or not fits:
        raise DataError(
            f"advantage: expected a finite float32 for each of {len(rewards)} rollouts, found shape {list(worth.shape)}"
            + (" with other values" if worth.shape == rewards.shape else "")
        )
    return worth


def compared(advantage: Advantage) -> str:
    """Return the attribute ``compares`` of an ``Advantage``, one of ``COMPARES``.

    Raises:
        ConfigError: The attribute has another value.
    """
    said: str = getattr(advantage, "compares", "nothing")
    if said not in COMPARES:
        raise ConfigError(f"advantage: expected an attribute compares, one of {list(COMPARES)}, found {said!r:.80}")
    return said
