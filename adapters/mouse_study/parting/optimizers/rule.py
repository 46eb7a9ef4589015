"""The rule that an optimizer follows, and what is not the same in two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """An update's rule ``weight -= rate * m / (sqrt(v) + epsilon)``, and its settings.

    ``m`` keeps ``first`` of itself and adds the gradient, ``v`` keeps ``second`` and adds its square. SGD has no ``v``.
    Of RMSprop with momentum it is the normalized gradients that ``m`` adds up.

    Args:
        adaptive: Whether there is a ``v``.
        first: Momentum, or what the first moment keeps.
        second: What the second moment keeps; 1 where all squares add up, as in AdaGrad.
        of_updates: Whether ``m`` adds up normalized gradients.
        nesterov: Whether the update looks one step ahead.
        corrected: Whether both moments are divided by what they began too small with.
        dampening: Of how much a gradient is less than the first one.
        largest: Whether the largest second moment counts, as in AMSGrad.
        epsilon: Added to the root, or within it.
        within: Whether it is within the root.
        rates: The learning rate of each update.
        decay: Which part of a weight is added to its gradient, or times the learning rate taken from it.
        coupled: Whether it is added to the gradient, and passes through both moments; None if that makes no difference.
        taken: Which part of a weight goes in a step without gradient.
        explained: Whether this rule gives the updates of other gradients, too.
    """

    adaptive: bool
    first: float
    second: float
    of_updates: bool = False
    nesterov: bool = False
    corrected: bool = False
    dampening: float = 0.0
    largest: bool = False
    epsilon: float = 0.0
    within: bool = False
    rates: tuple[float, ...] = ()
    decay: float = 0.0
    coupled: bool | None = None
    taken: float = 0.0
    explained: bool = False

    def updates(self, gradients: Sequence[float], *, rates: bool = True, weight: float = 0.0) -> Array:
        """What the rule adds to a weight that is set back each time; with ``rates=False`` learning rates are 1."""
        taken = 0.0 if self.coupled else self.decay * weight
        m = v = largest = 0.0
        added = []
        for number, gradient in enumerate(gradients, start=1):
            given = gradient + self.decay * weight - taken
            v = self.second * v + (1.0 if self.second == 1 else 1 - self.second) * given**2
            largest = max(largest, v) if self.largest else v
            root = self._root(largest, number)
            before, behind = (root, 1.0) if self.of_updates else (1.0, root)
            share = (1 - self.dampening * (number > 1)) * self._share
            given = _divided(given, before) * share
            m = self.first * m + given
            ahead = _divided(given + self.first * m if self.nesterov else m, behind)
            added.append(-taken - ahead / (1 - self.first**number if self.corrected else 1.0))
        return np.array(added) * (np.array(self.rates[: len(added)]) if rates else 1.0)

    @property
    def _share(self) -> float:
        """Which part of a gradient the first moment takes: 0.1, where it keeps 0.9; all of it in momentum."""
        moments = self.corrected or (self.adaptive and not self.of_updates)
        return 1 - self.first if moments else 1.0

    def _root(self, v: float, number: int) -> float:
        if not self.adaptive:
            return 1.0
        v = v / (1 - self.second**number) if self.corrected and self.second < 1 else v
        return float(np.sqrt(v + self.epsilon)) if self.within else float(np.sqrt(v)) + self.epsilon

    def __str__(self) -> str:
        if not self.explained:
            return "none that is known"
        if not any(self.rates):
            return "weights stay as they are"
        if not self.adaptive:
            return "gradients are not normalized, as in SGD"
        if self.second == 1:
            return "gradients are divided by the root of the sum of all squares, as in AdaGrad"
        kept = "with momentum behind it, as in RMSprop" if self.of_updates else "as in Adam and RMSprop"
        return f"gradients are divided by the root of a mean of squares, {kept}"


def _divided(value: float, by: float) -> float:
    """A quotient, and 0 of two zeros."""
    return value / by if by else 0.0


# ---------------------------------------------------------------------- two of them


Said = tuple[str, str, str]


def differing(ours: Rule, theirs: Rule, exact: float) -> list[Said]:
    """The settings that are not the same: what they are called, PyTorch's and Flax's.

    Args:
        ours: PyTorch's rule.
        theirs: Flax's.
        exact: How far apart readings may be that are the same, in parts of them.
    """
    # Without momentum there is no telling where it would be.
    ours = ours if ours.first else replace(ours, of_updates=theirs.of_updates)
    theirs = theirs if theirs.first else replace(theirs, of_updates=ours.of_updates)
    if f"{ours}" != f"{theirs}":
        return [("rule of the update", f"{ours}", f"{theirs}")]
    if not (ours.explained and any(ours.rates)):
        return []
    said = [*_rates(ours.rates, theirs.rates, exact), *_kept_of_moments(ours, theirs, exact), *_switches(ours, theirs)]
    if ours.within != theirs.within or not near(ours.epsilon, theirs.epsilon):
        said.append(("epsilon of the optimizer", _epsilon(ours), _epsilon(theirs)))
    apart = None not in (ours.coupled, theirs.coupled) and ours.coupled != theirs.coupled
    if apart or not near(ours.decay, theirs.decay):
        said.append(("weight decay", _decay(ours), _decay(theirs)))
    return said


def near(one: float, other: float) -> bool:
    """Whether two settings are the same, as well as both can be read."""
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))


def _rates(ours: Sequence[float], theirs: Sequence[float], exact: float) -> list[Said]:
    """Learning rates in one ratio are two rates, and others are two schedules: 1, 2, 3 and 2, 4, 6 have one ratio."""
    most = max(ours, key=abs), max(theirs, key=abs)
    apart = [abs(one / most[0] - other / most[1]) > exact for one, other in zip(ours, theirs, strict=True)]
    if not any(apart):
        same = abs(most[0] - most[1]) <= exact * abs(most[0])
        return [] if same else [("learning rate", f"{most[0]:.4g}", f"{most[1]:.4g}")]
    return [("schedule of the learning rate", _schedule(ours), _schedule(theirs))]


def _schedule(rates: Sequence[float]) -> str:
    if np.ptp(rates) <= 1e-12 * np.abs(rates).max():
        return f"{rates[0]:.4g} in all of {len(rates)} updates"
    digits = 4 if f"{rates[0]:.4g}" != f"{rates[-1]:.4g}" else 12
    first, last = ", ".join(f"{rate:.{digits}g}" for rate in rates[:4]), f"{rates[-1]:.{digits}g}"
    return f"{first} and so on, {last} in update {len(rates)}"


def _kept_of_moments(ours: Rule, theirs: Rule, exact: float) -> list[Said]:
    momentum = "decay of the first moment" if ours.adaptive and not ours.of_updates else "momentum"
    settings = (
        (momentum, ours.first, theirs.first),
        ("decay of the second moment", ours.second, theirs.second),
        ("dampening", ours.dampening, theirs.dampening),
    )
    return [
        (name, f"{one:.6g}", f"{other:.6g}")
        for name, one, other in settings
        if abs(one - other) > exact + 1e-3 * (1 - max(one, other))
    ]


def _switches(ours: Rule, theirs: Rule) -> list[Said]:
    settings = (
        ("nesterov", ours.nesterov, theirs.nesterov, "momentum looks one step ahead"),
        ("bias correction", ours.corrected, theirs.corrected, "moments are corrected for having begun as 0"),
        ("AMSGrad", ours.largest, theirs.largest, "the largest second moment counts"),
    )
    return [
        (name, what if one else "not so", what if other else "not so")
        for name, one, other, what in settings
        if one != other
    ]


def _epsilon(rule: Rule) -> str:
    return f"{rule.epsilon:.3g} {'within' if rule.within else 'beside'} the root" if rule.epsilon else "none"


def _decay(rule: Rule) -> str:
    if not rule.decay:
        return "none"
    if rule.coupled is False:
        return f"{rule.taken:.3g} of a weight taken in a step without gradient (weight_decay={rule.decay:.3g})"
    return f"{rule.decay:.3g} of a weight added to its gradient, as L2"
