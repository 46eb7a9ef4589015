"""Inference of an optimizer's rule and settings from its updates.

Everything is inferred from one weight of a tensor, with gradients chosen to distinguish the settings. The weight is
reset to 0 before each update, so that decay adds nothing; to measure decay, it is reset to 1 or 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """Return the rule's updates to a weight that is reset each time; with ``rates=False`` learning rates are 1."""
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
        """Return the share of a gradient that enters the first moment: 0.1 if 0.9 is kept; 1 for momentum."""
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


# Gradients beside which no epsilon counts, which no clipping touches, and beside which any epsilon counts.
LARGE, PLAIN, SMALL, SMALLER = 1e6, 1e-3, 1e-6, 1e-9
_IRREGULAR = (PLAIN, 0.3 * PLAIN, -0.6 * PLAIN, PLAIN, -0.1 * PLAIN)


@dataclass(frozen=True)
class ProbeState:
    """The gradient and weight of a probe before one update.

    Args:
        gradient: The gradient of each tensor's first weight; all other weights have none.
        weight: The value of that weight before the update.
        loud: A different gradient for one tensor's first weight; its last weight then has ``gradient`` too.
    """

    gradient: float
    weight: float = 0.0
    loud: float | None = None


def _gradients(*values: float) -> list[ProbeState]:
    return [ProbeState(value) for value in values]


def probes(updates: int) -> dict[str, list[ProbeState]]:
    """Sequences of gradients, by their names. Of many the first is 0, which keeps away what is special of update 1."""
    big, many = LARGE, max(updates, 5)
    return {
        "large": _gradients(*[big] * many),
        "smaller": _gradients(*[SMALLER] * many),
        "none, then smaller": _gradients(0, SMALLER),
        "two nones, then smaller": _gradients(0, 0, SMALLER),
        "none, then small": _gradients(0, SMALL),
        "again": _gradients(0, big, big),
        "and back": _gradients(0, big, -big),
        "at third": _gradients(0, 0, big),
        "again after a pause": _gradients(0, big, 0, big),
        "and back after a pause": _gradients(0, big, 0, -big),
        "and none": _gradients(0, big, 0, 0),
        "at fourth": _gradients(0, 0, 0, big),
        "ten times": _gradients(big, 10 * big),
        "irregular": _gradients(*_IRREGULAR),
        "steady": _gradients(*[PLAIN] * many),
        "irregular at a weight": [ProbeState(gradient, weight=1) for gradient in _IRREGULAR],
        "none is loud": [ProbeState(PLAIN, loud=PLAIN), ProbeState(PLAIN, loud=PLAIN)],
        "one is loud": [ProbeState(PLAIN, loud=PLAIN), ProbeState(PLAIN, loud=LARGE)],
        "after a loud one": after_loud(LARGE),
        "weight": [ProbeState(0), ProbeState(0, weight=1), ProbeState(0)],
        "twice the weight": [ProbeState(0), ProbeState(0, weight=2)],
        "weight after a gradient": [ProbeState(PLAIN), ProbeState(0, weight=PLAIN)],
    }


def after_loud(size: float) -> list[ProbeState]:
    """A gradient in one tensor alone, then one that nothing clips."""
    return [ProbeState(0), ProbeState(0, loud=size), ProbeState(0, loud=PLAIN)]


Responses = Mapping[str, Array]
"""By the name of a probe: what each of its updates added to the weight."""


def read(given: Responses) -> Rule:
    """The rule that an optimizer follows.

    For gradients ``a`` and then ``x``, Adam adds ``(first * a + x) / sqrt(second * a**2 + x**2)``, times what depends
    on the number of the update alone. Of what it adds for 1 and then 1, and for 1 and then -1, sum and difference are
    ``2 * first`` and 2 in the same parts: ``first`` is their quotient. With 0.9, (1.9 + -0.1) / (1.9 - -0.1) = 0.9.
    """
    if not given["large"].any():
        return Rule(adaptive=False, first=0.0, second=0.0, rates=(0.0,) * len(given["large"]), explained=True)
    with np.errstate(all="ignore"):
        kept, after_pause = _kept(given, "again", "and back"), _kept(given, *_AFTER_PAUSE)
        alone = given["at third"][2]
        second = _snapped(((1 + kept) * alone / given["again"][2]) ** 2 - 1)
        silent = given["and none"][2] / alone, given["and none"][3] / given["at fourth"][3]
        rule = Rule(adaptive=second > 1e-6, first=kept, second=second)
        rule = _with_momentum(rule, kept, after_pause, silent)
        for reading in (_with_correction, _with_dampening, _with_epsilon, _with_rates, _with_decay):
            rule = reading(rule, given)
        expected = np.array([rule.updates(_IRREGULAR), rule.updates(_IRREGULAR, weight=1)])
        found = np.array([given["irregular"], given["irregular at a weight"]])
        apart, most = np.abs(expected - found).max(axis=1), np.abs(found).max(axis=1)
        return replace(rule, explained=bool((apart <= 1e-3 * most).all() and most.all()))


_AFTER_PAUSE = "again after a pause", "and back after a pause"


def _kept(given: Responses, again: str, back: str) -> float:
    one, other = given[again][-1], given[back][-1]
    return _snapped((one + other) / (one - other))


def _snapped(value: float) -> float:
    """0 and 1 where a reading is as near to them as it is exact."""
    return next((whole for whole in (0.0, 1.0) if abs(value - whole) < 1e-9), float(value))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * abs(other)


def _with_momentum(rule: Rule, kept: float, after_pause: float, silent: tuple[float, float]) -> Rule:
    """Infer the kind and size of momentum from the update after a pause and from updates without gradients."""
    if kept == 0 or not np.isfinite(kept):
        return replace(rule, first=kept)
    # Without a gradient Adam adds first / sqrt(second), AMSGrad first, as its second moment stays, RMSprop momentum.
    left = {"moments": kept / np.sqrt(rule.second), "largest": kept, "updates": kept / np.sqrt(1 + rule.second)}
    where = min(left, key=lambda name: abs(left[name] - silent[0])) if rule.adaptive and rule.second < 1 else "moments"
    first = _snapped(silent[1] / silent[0] if where == "updates" else after_pause / kept)
    ahead = not _close(silent[0] if where == "updates" else kept, first)
    return replace(rule, first=first, of_updates=where == "updates", largest=where == "largest", nesterov=ahead)


def _with_correction(rule: Rule, given: Responses) -> Rule:
    """Whether moments are corrected: then gradients that stay the same make updates that do so from the first on.

    A schedule hides it, and then it is taken for what is usual.
    """
    found = given["large"] if rule.adaptive else given["smaller"]
    usual = rule.adaptive and rule.first > 0 and not rule.of_updates
    possible = (usual, not usual) if rule.first > 0 or (rule.adaptive and rule.second < 1) else (False,)
    rates = (found / replace(rule, corrected=one).updates([LARGE] * len(found), rates=False) for one in possible)
    corrected = next((one for one, own in zip(possible, rates, strict=True) if _steady(own)), possible[0])
    return replace(rule, corrected=corrected)


def _with_dampening(rule: Rule, given: Responses) -> Rule:
    """Infer dampening, for plain momentum only: whether every gradient after the first counts less."""
    first, second, third = given["smaller"][0], given["none, then smaller"][1], given["two nones, then smaller"][2]
    if rule.adaptive or rule.corrected or not rule.first or not first or not _close(second, third):
        return rule
    return rule if _close(second, first) else replace(rule, dampening=float(1 - second / first))


def _with_rates(rule: Rule, given: Responses) -> Rule:
    """The learning rates: what is left of updates from a gradient that stays the same, when the rule is known."""
    name, size = ("steady", PLAIN) if _clipped(given) else ("large", LARGE)
    name, size = (name, size) if rule.adaptive else ("smaller", SMALLER)
    rates = given[name] / rule.updates([size] * len(given[name]), rates=False)
    return replace(rule, rates=tuple(map(float, rates)))


def _clipped(given: Responses) -> bool:
    """Whether ten times a large gradient counts as itself."""
    return _close(given["ten times"][1], given["large"][1])


def _steady(values: Array) -> bool:
    return bool(np.ptp(values) <= 1e-5 * np.abs(values).max())


def _with_epsilon(rule: Rule, given: Responses) -> Rule:
    """Infer epsilon, which shrinks small updates: with 1e-8 beside the root, a gradient of 1e-9 counts 1/11."""
    if not rule.adaptive:
        return rule
    found = []
    for probe, size in (("none, then smaller", SMALLER), ("none, then small", SMALL)):
        share = given[probe][1] / given["again"][1]
        root = -size / replace(rule, first=0.0, of_updates=False).updates([0, size], rates=False)[1]
        found.append((root * (1 / share - 1), root**2 * (1 / share**2 - 1), 1 / share - 1))
    (beside, within, lost), (beside_more, within_more, _) = found
    if lost < 1e-9:
        return rule
    if abs(within / within_more - 1) < abs(beside / beside_more - 1):
        return replace(rule, epsilon=float(within), within=True)
    return replace(rule, epsilon=float(beside))


def _with_decay(rule: Rule, given: Responses) -> Rule:
    """Infer weight decay, and whether it goes through the gradient: momentum then accumulates it like a gradient."""
    taken = -float(given["weight"][1])
    if not taken:
        return rule
    remembered = abs(given["weight"][2]) > 1e-9 * abs(taken)
    coupled = remembered or not _close(-given["twice the weight"][1], 2 * taken)
    if not rule.adaptive:
        decay = -taken * SMALLER / given["none, then smaller"][1]
        return replace(rule, decay=float(decay), taken=taken, coupled=coupled if rule.first else None)
    if not coupled:
        return replace(rule, decay=taken / rule.rates[1], taken=taken, coupled=False)
    found = float(given["weight after a gradient"][1])
    decay = _solved(lambda part: float(rule.updates([PLAIN, part * PLAIN])[1]), found, 0.0, 1.0)
    return replace(rule, decay=decay, taken=taken, coupled=True)


def _solved(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Solve ``function(x) == value`` for a monotonic function, by bisection."""
    rising = function(high) > function(low)
    for _ in range(200):
        middle = (low + high) / 2 if low == 0 or high / low < 4 else float(np.sqrt(low * high))
        low, high = (middle, high) if (function(middle) < value) == rising else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Clipping:
    """The kind and threshold of gradient clipping.

    Args:
        by: "no clipping", "value", "norm of a tensor" or "norm of all".
        at: The size to which clipping reduces the largest gradient.
        slack: The number added to a norm before division; 1e-6 in ``torch.nn.utils.clip_grad_norm_``.
    """

    by: str = "no clipping"
    at: float = float("inf")
    slack: float = 0.0

    def parts_from(self, other: Clipping) -> bool:
        """Whether two optimizers clip differently."""
        if self.by != other.by or self.by == "no clipping":
            return self.by != other.by
        return not near(self.at, other.at) or abs(self.slack - other.slack) > max(1e-7, 1e-10 * self.at**2)

    def __str__(self) -> str:
        if self.by == "no clipping":
            return self.by
        slack = f" ({self.slack:.0e} added to the norm)" if self.slack > 1e-7 else ""
        return f"by {self.by}, at {self.at:.3g}{slack}"


def clipping(rule: Rule, loud: Responses, last: Responses, other: Responses | None) -> Clipping:
    """Infer the clipping that is applied before an update rule.

    Args:
        rule: The rule of the loud tensor.
        loud: The updates of its first weight.
        last: The updates of its last weight.
        other: The updates of another tensor's first weight; None if there is no other tensor.
    """
    with np.errstate(all="ignore"):
        if not rule.explained or not any(rule.rates) or not _clipped(loud):
            return Clipping()
        quieter = [
            not _close(one["one is loud"][1], one["none is loud"][1]) for one in (last, other) if one is not None
        ]
        by = "norm of all" if quieter[-1] else "norm of a tensor" if quieter[0] else "value"
        return Clipping(by, threshold(rule, loud["after a loud one"]))


def threshold(rule: Rule, found: Array) -> float:
    """Infer the size to which a gradient was clipped, from the updates of ``after_loud``."""
    if not rule.adaptive:
        return float(found[1] / rule.updates([0.0, 1.0, 0.0])[1])
    return _solved(lambda size: float(rule.updates([0.0, size, PLAIN])[2]), float(found[2]), 2 * PLAIN, 1e9)
