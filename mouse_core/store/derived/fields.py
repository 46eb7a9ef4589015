"""The fields that are computed most: returns and what belongs to them, times, the action before, ends of episodes.

But for two, which say so, they are about the observation of a row: it has the same value in either alignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mouse_core.spec import FieldSpec, Spec, check_count, check_unit
from mouse_core.store.derived.rows import EpisodeRows, known_field
from mouse_core.store.derived.sums import discounted_sums, sums_of_next

Array = npt.NDArray[Any]


def _number(name: str, dtype: str, stored: str = "") -> FieldSpec:
    return FieldSpec(name, np.dtype(dtype), (), stored_dtype=np.dtype(stored or dtype))


# ---------------------------------------------------------------------- returns


@dataclass(frozen=True)
class Return:
    """The discounted sum of the rewards that still come, float32: the return-to-go.

    ``G[t] = r + discount * G[t + 1]``, where ``r`` is the reward of the transition that leaves observation t, up to the
    end of its episode; 0 where no transition leaves it (Sutton and Barto, "Reinforcement learning", 2nd edition,
    section 3.3). With a discount of 1 that is the sum that D4RL's evaluations and decision transformers call
    return-to-go. Sums are made in float64. An episode that is not finished counts as far as it goes.

    Args:
        discount: Of one step, in ``[0, 1]``.
        reward: The field of rewards.

    Raises:
        ConfigError: A discount out of range.
    """

    discount: float = 1.0
    reward: str = "reward"

    def __post_init__(self) -> None:
        check_unit("Return: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """float32, one number a step."""
        known_field(rows, self.reward, "Return")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The sums, float64 ``[n]``."""
        rewards = rows.leaving(self.reward, np.float64).reshape(len(rows))
        return discounted_sums(rewards, rows.lengths, float(self.discount))


def _steps_taken(rows: EpisodeRows, n: int) -> Array:
    """How many steps lead from each row's observation to the one whose value stands for the rest; int64 ``[n]``.

    They are ``n``, or as many as are left of the episode. In an "outgoing" episode that did not terminate the last
    transition leads to an observation that is not stored: one less.
    """
    left = rows.steps_left
    if rows.alignment == "outgoing":
        left = left - np.repeat(~rows.is_terminal, rows.lengths)
    return np.minimum(left, n)


@dataclass(frozen=True)
class NStepReturn:
    """The discounted sum of the next ``n`` rewards, float32, to which a value is added: a target of n steps.

    ``G[t] = sum(discount**k * r[t + k] for k in range(m))``, with ``r`` as in ``Return``, and ``m`` steps: ``n``, or
    fewer where the episode ends before. The target is ``G[t] + d[t] * V(observation t + m)``, where ``d`` is
    ``NStepDiscount(n, discount)``; that observation is ``n`` rows further, or the last row of the episode (Sutton and
    Barto, section 7.1; Pardo et al., "Time limits in reinforcement learning", ICML 2018).

    Args:
        n: Steps, at least 1.
        discount: Of one step, in ``[0, 1]``.
        reward: The field of rewards.

    Raises:
        ConfigError: ``n`` or the discount out of range.
    """

    n: int
    discount: float
    reward: str = "reward"

    def __post_init__(self) -> None:
        check_count("NStepReturn: n", self.n)
        check_unit("NStepReturn: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """float32, one number a step."""
        known_field(rows, self.reward, "NStepReturn")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The sums, float64 ``[n]``."""
        rewards = rows.leaving(self.reward, np.float64).reshape(len(rows))
        # The last transition of an episode may not be taken.
        rewards[_steps_taken(rows, 1) == 0] = 0.0
        behind = np.repeat(rows.last_rows, rows.lengths) - np.arange(len(rows))
        return sums_of_next(rewards, behind, self.n, float(self.discount))


@dataclass(frozen=True)
class NStepDiscount:
    """What the value of the observation ``n`` steps on is multiplied by, float32: ``discount**m``, 0 after the end.

    ``m`` is as in ``NStepReturn``; 0 stands where the episode terminates within these steps, as nothing comes after. An
    episode that was cut short or broken off goes on with the value of its last observation. With ``n`` of 1 it is what
    others call the mask of dones.

    Args:
        n: Steps, at least 1.
        discount: Of one step, in ``[0, 1]``.

    Raises:
        ConfigError: ``n`` or the discount out of range.
    """

    n: int = 1
    discount: float = 1.0

    def __post_init__(self) -> None:
        check_count("NStepDiscount: n", self.n)
        check_unit("NStepDiscount: discount", self.discount)

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """float32, one number a step."""
        known_field(rows, "done", "NStepDiscount")
        return _number(name, "float32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The factors, float64 ``[n]``."""
        taken = _steps_taken(rows, self.n)
        is_over = (taken == rows.steps_left) & np.repeat(rows.is_terminal, rows.lengths)
        powers = float(self.discount) ** np.arange(int(taken.max()) + 1.0)
        return np.where(is_over, 0.0, powers[taken])


# ---------------------------------------------------------------------- times


@dataclass(frozen=True)
class TimeFromStart:
    """How many steps of its episode come before a row, int64: 0 in the first."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """int64, kept as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The times, int64 ``[n]``."""
        return rows.time


@dataclass(frozen=True)
class TimeToEnd:
    """How many transitions still follow a row's observation in its episode, int64.

    In the last row of an episode that is 0 where rows are "arrived", and 1 where they are "outgoing". Of an episode
    that is not finished the rows count that there are.
    """

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """int64, kept as int32."""
        return _number(name, "int64", "int32")

    def compute(self, rows: EpisodeRows) -> Array:
        """The times, int64 ``[n]``."""
        return rows.steps_left


# ---------------------------------------------------------------------- what came before


@dataclass(frozen=True)
class Previous:
    """What belongs to the transition that led to a row's observation: the previous action, or its reward.

    All 0 in the first row of an episode. Where rows are "arrived" that is what stands in the row itself, but for the
    placeholder in the first one; where they are "outgoing", what stands in the row before.

    Args:
        field: "action", "reward", or another field; of one that belongs to observations, that of the row before.
    """

    field: str = "action"

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """As the field itself."""
        return known_field(rows, self.field, "Previous").replace(name=name, column="")

    def compute(self, rows: EpisodeRows) -> Array:
        """The values, ``[n, *shape]``."""
        return rows.arriving(self.field)


# ---------------------------------------------------------------------- beginnings and ends


@dataclass(frozen=True)
class IsFirst:
    """Whether a row is the first of its episode, bool."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, uint8 ``[n]``."""
        return _marked(rows, rows.first_rows)


@dataclass(frozen=True)
class IsLast:
    """Whether a row is the last of its episode, bool; of one that is not finished, the last that there is."""

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, uint8 ``[n]``."""
        return _marked(rows, rows.last_rows)


def _marked(rows: EpisodeRows, which: npt.NDArray[np.int64]) -> Array:
    flags = np.zeros(len(rows), np.uint8)
    flags[which] = 1
    return flags


@dataclass(frozen=True)
class Terminated:
    """Whether a transition ended its episode in a terminal state, bool, in the row in which its ``done`` stands."""

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        known_field(rows, "done", "Terminated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, bool ``[n]``."""
        return rows.done_is("terminal")


@dataclass(frozen=True)
class Truncated:
    """Whether an episode was cut short behind a transition, bool, in the row in which its ``done`` stands."""

    transition: ClassVar[bool] = True

    def spec(self, name: str, rows: Spec) -> FieldSpec:
        """bool, kept as uint8."""
        known_field(rows, "done", "Truncated")
        return _number(name, "bool", "uint8")

    def compute(self, rows: EpisodeRows) -> Array:
        """Flags, bool ``[n]``."""
        return rows.done_is("truncated")
