"""What a rollout is worth compared with the others of its group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Below this share of the largest deviation in a group an advantage is rounding.
_ROUNDING = 1e-12


def advantages(
    rewards: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    normalize_std: bool = False,
    std_floor: float = 1e-6,
) -> npt.NDArray[np.float64]:
    """Leave-one-out advantages: a reward minus the mean of the others in its group.

    Kool, van Hoof and Welling, "Buy 4 REINFORCE samples, get a baseline for free!" (2019); with the division by the
    standard deviation, Shao et al., "DeepSeekMath" (2024).

    Args:
        rewards: ``[n]``.
        groups: A number from 0 for each, ``[n]``; None: all are of one group.
        normalize_std: Whether to divide by the standard deviation of the group's rewards (with n - 1).
        std_floor: The least that is divided by.

    Returns:
        float64 ``[n]``; 0 where all rewards of a group are equal, and for a rollout that is alone.
    """
    reward = np.asarray(rewards, np.float64)
    if not reward.size:
        return np.zeros(0)
    group = np.zeros(len(reward), np.int64) if groups is None else np.asarray(groups, np.int64)
    _, group = np.unique(group, return_inverse=True)
    size = np.bincount(group)
    first = np.zeros(len(size))
    first[group[::-1]] = reward[::-1]
    # Deviations from one of them are exactly 0 where all are equal, and small numbers keep their digits.
    deviation = reward - first[group]
    largest = np.zeros(len(size))
    np.maximum.at(largest, group, np.abs(deviation))
    others = np.maximum(size - 1, 1)
    total = np.bincount(group, deviation)
    advantage = deviation - (total[group] - deviation) / others[group]
    advantage[np.abs(advantage) <= _ROUNDING * largest[group]] = 0.0
    advantage[size[group] == 1] = 0.0
    if normalize_std:
        mean = total / size
        variance = np.bincount(group, (deviation - mean[group]) ** 2) / others
        advantage /= np.maximum(np.sqrt(variance), std_floor)[group]
    return advantage
