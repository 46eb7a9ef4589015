"""What a rollout is worth compared with the others of its group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError

BASELINES = ("mean", "leave_one_out")
"""What a reward is compared with: the mean of its group, or that of the others in it."""

# Below this share of the largest deviation in a group an advantage is rounding.
_ROUNDING = 1e-12
# So many units in the last place of the largest reward of a group are rounding.
_UNITS = 4
_FLOAT32, _FLOAT64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)
# What is left of sums of doubles that should be 0, as of 0.1 + 0.2 - 0.3.
_NOTHING = 1e-15


def are_equal(least: float, most: float) -> bool:
    """Whether rewards between two bounds differ by rounding at most, that of float32, as models give them.

    Example: 0.3 and 0.1 + 0.2 do, and 0.3 and 0.3 in float32; 0.3 and 0.30001 do not.
    """
    return most - least <= max(abs(least), abs(most)) * _UNITS * _FLOAT32 + _NOTHING


def advantages(
    rewards: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    normalize_std: bool = False,
    baseline: str | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
    std_floor: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Advantages within groups: a reward minus its group's baseline, over the group's standard deviation if so asked.

    ================================================ ==============================================================
    RLOO, the default                                ``r_i - mean of the others``
    GRPO as TRL computes it, ``normalize_std=True``  ``(r_i - mean) / (std + 1e-4)``, the deviation with n - 1
    DeepSeekMath, as its formula is written          ``normalize_std=True, ddof=0, eps=0``
    Dr. GRPO                                         ``baseline="mean"``
    RLOO divided by the standard deviation           ``normalize_std=True, baseline="leave_one_out"``: n / (n - 1)
                                                     times GRPO's
    ================================================ ==============================================================

    Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!" (2019); Ahmadian et al., "Back to
    Basics" (2024), for RLOO; Shao et al., "DeepSeekMath" (2024), for GRPO; Liu et al., "Understanding R1-Zero-Like
    Training" (2025), for Dr. GRPO. All is computed in double precision.

    Args:
        rewards: ``[n]``.
        groups: A number from 0 for each, ``[n]``; None: all are of one group.
        normalize_std: Whether to divide by ``max(std, std_floor) + eps``, where ``std`` is that of the group's rewards.
        baseline: "mean" of the group, or "leave_one_out", the mean of the others in it. None: "mean" with
            ``normalize_std``, as in GRPO, else "leave_one_out", as in RLOO.
        ddof: 1 for the standard deviation of a sample (with n - 1), 0 for that of all there is (with n).
        eps: What is added to the standard deviation; 0 or more.
        std_floor: The least standard deviation; 0 or more.

    Returns:
        float64 ``[n]``; exactly 0 where all rewards of a group are equal, but for rounding of doubles, also with
        ``eps=0``, and for a rollout that is alone, of which others make the reward itself or NaN.

    Raises:
        ConfigError: An option that cannot be used.
        DataError: No finite numbers, or not one group for each.
    """
    baseline, ddof, eps, std_floor = check_options(normalize_std, baseline, ddof, eps, std_floor)
    reward, group = _arrays(rewards, groups)
    if not reward.size:
        return np.zeros(0)
    size = np.bincount(group)
    first = np.zeros(len(size))
    first[group[::-1]] = reward[::-1]
    # Deviations from one of them are exactly 0 where all are equal, and small numbers keep their digits.
    deviation = reward - first[group]
    largest = np.zeros(len(size))
    np.maximum.at(largest, group, np.abs(deviation))
    others = np.maximum(size - 1, 1)
    scale = np.zeros(len(size))
    np.maximum.at(scale, group, np.abs(reward))
    total = np.bincount(group, deviation)
    mean = total / size
    if baseline == "mean":
        advantage = deviation - mean[group]
    else:
        advantage = deviation - (total[group] - deviation) / others[group]
    advantage[np.abs(advantage) <= _ROUNDING * largest[group]] = 0.0
    advantage[(largest <= scale * _UNITS * _FLOAT64)[group]] = 0.0
    advantage[size[group] == 1] = 0.0
    if normalize_std:
        variance = np.bincount(group, (deviation - mean[group]) ** 2) / (others if ddof else size)
        divisor = np.maximum(np.sqrt(variance), std_floor) + eps
        # Where it is 0 all rewards are equal (or their differences too small to be squared), and so are advantages.
        np.divide(advantage, divisor[group], out=advantage, where=divisor[group] > 0)
    return advantage


def _arrays(rewards: Any, groups: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Rewards, and a group for each."""
    try:
        reward = np.asarray(rewards, np.float64)
        group = np.zeros(reward.shape, np.int64) if groups is None else np.asarray(groups)
    except (TypeError, ValueError):
        raise DataError(f"rewards: expected numbers [n], found {rewards!r:.80}") from None
    if reward.ndim != 1 or group.shape != reward.shape or (group.size and group.dtype.kind not in "biu"):
        raise DataError(
            f"rewards: expected numbers [n], and an integer for each as its group, found {list(reward.shape)}, and "
            f"{group.dtype} {list(group.shape)}"
        )
    if not np.isfinite(reward).all():
        raise DataError(f"rewards: expected finite numbers, found {reward[~np.isfinite(reward)][0]}")
    return reward, _numbered(group.astype(np.int64)) if group.size else np.zeros(0, np.int64)


def _numbered(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Groups by numbers of which none is left out: 7, 3, 7 become 1, 0, 1."""
    if groups.min() < 0 or groups.max() > 8 * len(groups) + 1024:
        found: npt.NDArray[np.int64] = np.unique(groups, return_inverse=True)[1]
        return found
    # Faster than to sort them.
    numbers = np.cumsum(np.bincount(groups) > 0) - 1
    return numbers[groups]


def check_options(
    normalize_std: object, baseline: object, ddof: object, eps: object, std_floor: object
) -> tuple[str, int, float, float]:
    """The last four options of ``advantages``, as they are used.

    Raises:
        ConfigError: One of them cannot be used.
    """
    if baseline is None:
        baseline = "mean" if normalize_std else "leave_one_out"
    if not isinstance(baseline, str) or baseline not in BASELINES:
        raise ConfigError(f"baseline: expected one of {list(BASELINES)} or None, found {baseline!r}")
    if isinstance(ddof, bool) or not isinstance(ddof, int | np.integer) or ddof not in (0, 1):
        raise ConfigError(f"ddof: expected 0 or 1, found {ddof!r}")
    return baseline, int(ddof), _at_least_0("eps", eps), _at_least_0("std_floor", std_floor)


def _at_least_0(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < math.inf:
        raise ConfigError(f"{name}: expected a number from 0, found {value!r}")
    return float(value)
