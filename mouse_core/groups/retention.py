"""Retention and drawing of rollouts, as functions of the known properties of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_count, check_number


@dataclass(frozen=True)
class HeldRollouts:
    """The known properties of a batch maker's n rollouts, in order of arrival. They are the rollouts of all groups with
    at least one that can be drawn; other rollouts of these groups have left.

    Args:
        present: Whether each has not left, bool ``[n]``.
        reward: float64 ``[n]``.
        advantage: The advantage of each, float64 ``[n]``.
        group: The number of each one's group, int64 ``[n]``.
        environment: The place of each one's environment among ``environments``, int64 ``[n]``.
        environments: Their names.
        staleness: How many versions behind the newest one, int64 ``[n]``: by the difference where versions are whole
            numbers, else by how many are between.
        age: Seconds between each one's creation and that of the newest rollout that came, float64 ``[n]``.
        newer: The number of rollouts of its environment that arrived later, int64 ``[n]``.
        tokens: The number of tokens of each, int64 ``[n]``.
        uses: The number of batches that contained it, int64 ``[n]``.
        columns: By name what was declared as one number per example, ``[n]`` of its dtype; what a rollout lacks is the
            column's fill. Another name is a ``MissingFieldError``.
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
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.reward)


Retention = Callable[[HeldRollouts], npt.ArrayLike]
"""Weight each rollout of ``HeldRollouts``, ``[n]`` with n of 1 or more: numbers of at least 0, or bools as 1 and 0.
A rollout is drawn in proportion to its weight. A rollout of weight 0 leaves for good, so its weight must stay 0."""


@dataclass(frozen=True)
class Newest:
    """Keep the newest ``count`` rollouts of each environment, counted as they came, whether drawn since or not.

    Args:
        count: 1 or more; or how many by the environment's name, where all of others are kept.

    Raises:
        ConfigError: One is below 1.
    """

    count: int | Mapping[str, int]

    def __post_init__(self) -> None:
        for name, count in self.count.items() if isinstance(self.count, Mapping) else [("count", self.count)]:
            check_count(name, count, 1)

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``."""
        if not isinstance(self.count, Mapping):
            return rows.newer < self.count
        most = np.array([self.count.get(name, len(rows) + 1) for name in rows.environments], np.int64)
        return rows.newer < most[rows.environment]


@dataclass(frozen=True)
class MaxAge:
    """Keep rollouts created at most ``seconds`` before the newest one that came.

    Args:
        seconds: 0 or more.

    Raises:
        ConfigError: It is below 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds)

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``."""
        return rows.age <= self.seconds


@dataclass(frozen=True)
class Recency:
    """Draw rollouts of older versions less often: the weight is ``0.5 ** (staleness / half_life)``.

    Args:
        half_life: After how many versions a rollout is half as likely; above 0.

    Raises:
        ConfigError: It is not above 0.
    """

    half_life: float

    def __post_init__(self) -> None:
        check_number("half_life", self.half_life, above=True)

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``; at least 2**-1000, so that none leaves for it."""
        return np.exp2(-np.minimum(rows.staleness / self.half_life, 1000))


@dataclass(frozen=True)
class Lengths:
    """Keep rollouts of ``least`` to ``most`` tokens, prompts included.

    Args:
        least, most: How many.

    Raises:
        ConfigError: None is so long.
    """

    least: int = 0
    most: int = 1 << 62

    def __post_init__(self) -> None:
        if check_count("least", self.least, 0) > check_count("most", self.most, 0):
            raise ConfigError(f"most: expected at least {self.least}, found {self.most}")

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``."""
        return (rows.tokens >= self.least) & (rows.tokens <= self.most)


@dataclass(frozen=True)
class Rewards:
    """Keep rollouts with rewards from ``least`` to ``most``; the others of their groups are still compared with them.

    Args:
        least, most: How much.

    Raises:
        ConfigError: Nothing is between.
    """

    least: float = -np.inf
    most: float = np.inf

    def __post_init__(self) -> None:
        if not self.least <= self.most:
            raise ConfigError(f"most: expected at least {self.least}, found {self.most}")

    def __call__(self, rows: HeldRollouts) -> npt.ArrayLike:
        """See ``Retention``."""
        return (rows.reward >= self.least) & (rows.reward <= self.most)


@dataclass(frozen=True)
class TopK:
    """Keep the ``k`` rollouts of each group with the highest rewards, of equal ones those that came first.

    It is for groups that come whole, as a ``RolloutBuffer`` seals them. ``TopK(k, above_median=True)`` chooses as
    TorchRL's ``TopKRewardSelector(size of groups, k)`` does.

    Args:
        k: 1 or more.
        above_median: Leave out what earned no more than the group's median, of an even number the lower one of the two
            in the middle: of rewards 0, 1, 1, 2 only 2 is left, and of equal ones none.

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
            # Rewards go down: of 5 the median is number 2 from 0, of 4 the lower one is number 2, too.
            kept[order] &= rows.reward[order] > np.repeat(rows.reward[order][first + sizes // 2], sizes)
        return kept


def weights_of(retention: Retention, rows: HeldRollouts) -> npt.NDArray[np.float64]:
    """Return the weights that a ``Retention`` gives.

    Raises:
        DataError: It does not give a finite number from 0 for each.
    """
    weights = np.asarray(retention(rows))
    if weights.shape != (len(rows),) or weights.dtype.kind not in "biuf":
        raise DataError(
            f"retention {name_of(retention)}: expected a weight for each of {len(rows)} rollouts, "
            f"found {weights.dtype} {list(weights.shape)}"
        )
    given: npt.NDArray[np.float64] = weights.astype(np.float64)
    if not (np.isfinite(given) & (given >= 0)).all():
        raise DataError(f"retention {name_of(retention)}: expected finite weights from 0, found others")
    return given


def name_of(retention: Retention) -> str:
    """Return the name of a retention, under which the rollouts are counted that left for it."""
    return getattr(retention, "__name__", type(retention).__name__)


def functions(name: str, given: Retention | Sequence[Retention]) -> list[Retention]:
    """Return one or several retentions as a list.

    Raises:
        ConfigError: Something that cannot be called.
    """
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for one in several:
        if not callable(one) or isinstance(one, type):
            raise ConfigError(f"{name}: expected functions of Rows, found {one!r:.80}")
    return several
