"""Compares the updates of two optimizers from the same gradients, and infers their settings from updates of small
tensors.

All settings are inferred from the updates of one weight of a tensor, with gradients that are chosen to distinguish the
settings. The weight is reset to 0 before each update, so that decay has no effect. To measure decay, the weight is
reset to 1 or 2 instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from flax import nnx

from mouse_study.divergence.models import (
    Arrays,
    Cause,
    Difference,
    Stage,
    arrays_of,
    difference,
    flax_layers,
    largest,
    tensor_name,
    torch_layers,
)
from mouse_study.divergence.running import EPS, Run, gradient_of, split_params

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """The update rule ``weight -= rate * m / (sqrt(v) + epsilon)``, and its settings.

    In each update, ``m`` is multiplied by ``first``, and the gradient is added to ``m``; ``v`` is multiplied by
    ``second``, and the squared gradient is added to ``v``. SGD has no ``v``. In RMSprop with momentum, ``m`` adds up
    normalized gradients.

    Args:
        adaptive: Whether the rule has ``v``.
        first: Momentum, or the decay rate of the first moment.
        second: The decay rate of the second moment; 1 for a sum of all squares, as in AdaGrad.
        of_updates: Whether ``m`` adds up normalized gradients.
        nesterov: Whether the rule uses Nesterov momentum.
        corrected: Whether the moments have bias correction.
        dampening: The share by which all gradients after the first are reduced.
        largest: Whether the largest second moment so far is used, as in AMSGrad.
        epsilon: The number that is added to the square root of ``v``, or to ``v`` under the root.
        within: Whether epsilon is added to ``v`` under the root.
        rates: The learning rate of each update.
        decay: The weight decay: the fraction of a weight that is added to its gradient; or the fraction that, times the
            learning rate, is subtracted from the weight.
        coupled: Whether decay is added to the gradient, and thus affects the moments; None if both forms of decay give
            the same updates.
        taken: The fraction of a weight that an update with gradient 0 subtracts.
        explained: Whether the rule also predicts the updates from gradients that were not used to infer the rule.
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
        """Return the rule's updates of a weight that is reset before each update; with ``rates=False``, learning rates
        are 1.
        """
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
        """Return the share of a gradient that is added to the first moment: 0.1 for moments with ``first`` 0.9, and 1
        for momentum."""
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
    """Return a quotient; 0 for a division by 0."""
    return value / by if by else 0.0


# ---------------------------------------------------------------------- comparison of two rules


Said = tuple[str, str, str]


def differing(ours: Rule, theirs: Rule, exact: float) -> list[Said]:
    """Return the settings that differ; for each, the name, PyTorch's value and Flax's value.

    Args:
        ours: The rule of PyTorch.
        theirs: The rule of Flax.
        exact: The largest relative difference at which settings count as equal.
    """
    # Without momentum, ``of_updates`` cannot be inferred.
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
    """Whether two settings are equal within the accuracy of the inference."""
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))


def _rates(ours: Sequence[float], theirs: Sequence[float], exact: float) -> list[Said]:
    """Compare learning rates. Rates 1, 2, 3 and 2, 4, 6 have a constant ratio, so the base rates differ. Rates 1, 2, 3
    and 1, 2, 4 have no constant ratio, so the schedules differ.
    """
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


# Gradients that are so large that epsilon is negligible and so small that they are not clipped (PLAIN), and gradients
# for which epsilon matters (SMALL, SMALLER).
LARGE, PLAIN, SMALL, SMALLER = 1e6, 1e-3, 1e-6, 1e-9
_IRREGULAR = (PLAIN, 0.3 * PLAIN, -0.6 * PLAIN, PLAIN, -0.1 * PLAIN)


@dataclass(frozen=True)
class ProbeState:
    """The gradient and weight of a probe before one update.

    Args:
        gradient: The gradient of each tensor's first weight; all other weights have no gradient.
        weight: The value of the first weight before the update.
        loud: A different gradient for the first weight of one tensor; the tensor's last weight then also has
            ``gradient``.
    """

    gradient: float
    weight: float = 0.0
    loud: float | None = None


def _probe_states(*values: float) -> list[ProbeState]:
    return [ProbeState(value) for value in values]


def probes(updates: int) -> dict[str, list[ProbeState]]:
    """Return sequences of gradients by name. Many sequences begin with 0, because optimizers treat the first update
    specially."""
    big, many = LARGE, max(updates, 5)
    return {
        "large": _probe_states(*[big] * many),
        "smaller": _probe_states(*[SMALLER] * many),
        "none, then smaller": _probe_states(0, SMALLER),
        "two nones, then smaller": _probe_states(0, 0, SMALLER),
        "none, then small": _probe_states(0, SMALL),
        "again": _probe_states(0, big, big),
        "and back": _probe_states(0, big, -big),
        "at third": _probe_states(0, 0, big),
        "again after a pause": _probe_states(0, big, 0, big),
        "and back after a pause": _probe_states(0, big, 0, -big),
        "and none": _probe_states(0, big, 0, 0),
        "at fourth": _probe_states(0, 0, 0, big),
        "ten times": _probe_states(big, 10 * big),
        "irregular": _probe_states(*_IRREGULAR),
        "steady": _probe_states(*[PLAIN] * many),
        "irregular at a weight": [ProbeState(gradient, weight=1) for gradient in _IRREGULAR],
        "none is loud": [ProbeState(PLAIN, loud=PLAIN), ProbeState(PLAIN, loud=PLAIN)],
        "one is loud": [ProbeState(PLAIN, loud=PLAIN), ProbeState(PLAIN, loud=LARGE)],
        "after a loud one": after_loud(LARGE),
        "weight": [ProbeState(0), ProbeState(0, weight=1), ProbeState(0)],
        "twice the weight": [ProbeState(0), ProbeState(0, weight=2)],
        "weight after a gradient": [ProbeState(PLAIN), ProbeState(0, weight=PLAIN)],
    }


def after_loud(size: float) -> list[ProbeState]:
    """Return probe states: a large gradient in only one tensor, then a gradient that is not clipped."""
    return [ProbeState(0), ProbeState(0, loud=size), ProbeState(0, loud=PLAIN)]


Responses = Mapping[str, Array]
"""The updates of the weight, by the name of the probe."""


def read(given: Responses) -> Rule:
    """Infer the rule of an optimizer from its updates.

    For the gradients ``a`` and then ``x``, Adam's second update is ``(first * a + x) / sqrt(second * a**2 + x**2)``,
    times a factor that depends on the index of the update. For the gradients 1, 1 and 1, -1, the sum of the two second
    updates is proportional to ``2 * first``, and their difference is proportional to 2. So the quotient is ``first``:
    (1.9 + -0.1) / (1.9 - -0.1) = 0.9.
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
    """Round an inferred value to 0 or 1 if it is within 1e-9."""
    return next((whole for whole in (0.0, 1.0) if abs(value - whole) < 1e-9), float(value))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * abs(other)


def _with_momentum(rule: Rule, kept: float, after_pause: float, silent: tuple[float, float]) -> Rule:
    """Infer the kind and size of momentum from the update after a pause and from updates without gradients."""
    if kept == 0 or not np.isfinite(kept):
        return replace(rule, first=kept)
    # For a gradient of 0, the update of Adam is multiplied by first / sqrt(second), that of AMSGrad by first (its
    # second moment stays), and that of RMSprop by its momentum.
    left = {"moments": kept / np.sqrt(rule.second), "largest": kept, "updates": kept / np.sqrt(1 + rule.second)}
    where = min(left, key=lambda name: abs(left[name] - silent[0])) if rule.adaptive and rule.second < 1 else "moments"
    first = _snapped(silent[1] / silent[0] if where == "updates" else after_pause / kept)
    ahead = not _close(silent[0] if where == "updates" else kept, first)
    return replace(rule, first=first, of_updates=where == "updates", largest=where == "largest", nesterov=ahead)


def _with_correction(rule: Rule, given: Responses) -> Rule:
    """Infer whether moments have bias correction: if they have, constant gradients cause constant updates from the
    first update on.

    With a schedule of the learning rate, this check is not possible; the usual setting is then assumed.
    """
    found = given["large"] if rule.adaptive else given["smaller"]
    usual = rule.adaptive and rule.first > 0 and not rule.of_updates
    possible = (usual, not usual) if rule.first > 0 or (rule.adaptive and rule.second < 1) else (False,)
    rates = (found / replace(rule, corrected=one).updates([LARGE] * len(found), rates=False) for one in possible)
    corrected = next((one for one, own in zip(possible, rates, strict=True) if _steady(own)), possible[0])
    return replace(rule, corrected=corrected)


def _with_dampening(rule: Rule, given: Responses) -> Rule:
    """Infer dampening, only for plain momentum: whether every gradient after the first is reduced."""
    first, second, third = given["smaller"][0], given["none, then smaller"][1], given["two nones, then smaller"][2]
    if rule.adaptive or rule.corrected or not rule.first or not first or not _close(second, third):
        return rule
    return rule if _close(second, first) else replace(rule, dampening=float(1 - second / first))


def _with_rates(rule: Rule, given: Responses) -> Rule:
    """Infer the learning rates: the updates from constant gradients, divided by the updates of the rule with rate 1."""
    name, size = ("steady", PLAIN) if _clipped(given) else ("large", LARGE)
    name, size = (name, size) if rule.adaptive else ("smaller", SMALLER)
    rates = given[name] / rule.updates([size] * len(given[name]), rates=False)
    return replace(rule, rates=tuple(map(float, rates)))


def _clipped(given: Responses) -> bool:
    """Whether a large gradient and ten times this gradient give the same update."""
    return _close(given["ten times"][1], given["large"][1])


def _steady(values: Array) -> bool:
    return bool(np.ptp(values) <= 1e-5 * np.abs(values).max())


def _with_epsilon(rule: Rule, given: Responses) -> Rule:
    """Infer epsilon, which makes updates from small gradients smaller: with 1e-8 added to the root, the update from a
    gradient of 1e-9 is 1/11 of the learning rate.
    """
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
    """Infer weight decay, and whether decay is added to the gradient, in which case momentum accumulates it."""
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
        at: The threshold: the norm or absolute value to which clipping reduces larger gradients.
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
    """Infer the clipping of gradients before the update rule.

    Args:
        rule: The rule of the tensor that received ``ProbeState.loud``.
        loud: The updates of this tensor's first weight.
        last: The updates of this tensor's last weight.
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


ByLayer = Mapping[str, Arrays]
"""Arrays of layers, by PyTorch's path."""

# Factors of a batch's gradients in successive updates, repeated. Unlike with constant gradients, momentum, moments and
# clipping then change the updates.
_FACTORS = (1.0, 1.0, 0.5, 1e-6, 0.0, -1.0, 1e6, 1.0, 1.0, 1.0)


class Stepping:
    """Computes the updates of both optimizers from given gradients.

    Args:
        run: The run with both models.
        torch_optimizer: Creates the PyTorch optimizer.
        flax_optimizer: The Flax optimizer.
        updates: The number of compared updates.

    Attributes:
        module: A copy of the PyTorch model, which is updated.
        leaves: The Flax parameters.
        tree: The tree structure of the Flax parameters.
        places: The full names of the Flax parameters.
    """

    def __init__(self, run: Run, torch_optimizer: Callable[[Any], Any], flax_optimizer: Any, updates: int) -> None:
        self.run = run
        self.updates = updates
        self.torch_optimizer = torch_optimizer
        self.flax_optimizer = flax_optimizer
        self.module = copy.deepcopy(run.before[0])
        self._pairs = {pair.torch.path: pair for pair in run.pairs}
        self._layers = {layer.path: layer for layer in torch_layers(self.module) if layer.path in self._pairs}
        self.leaves, self.tree = jax.tree.flatten(run.flax_params)
        self.places = _places(run)

    def owners(self) -> dict[str, int]:
        """Return, by the full name of each trained Flax tensor, the index of the corresponding PyTorch parameter.

        Each parameter is filled with its index and converted to Flax's layout. The query, key and value of an attention
        layer then all contain the index of the same parameter.
        """
        numbers = {id(parameter): number for number, parameter in enumerate(self.module.parameters(), start=1)}
        marked = {
            path: {
                name: np.full(tuple(tensor.shape), numbers[id(tensor)] if _learns(tensor) else 0)
                for name, tensor in layer.arrays.items()
            }
            for path, layer in self._layers.items()
        }
        found = {
            tensor: int(values.max(initial=0)) for tensor, values in _named(self._laid_out(marked, "gradients")).items()
        }
        return {tensor: number - 1 for tensor, number in found.items() if number and tensor in self.places}

    def compare(self) -> list[Difference]:
        """Compare the first update of both optimizers from PyTorch's gradients; if the first updates agree, compare
        later updates.

        The gradients of later updates are the first gradients times factors.
        """
        grads = {path: _gradients(pair.torch.arrays) for path, pair in self._pairs.items()}
        factors = [_FACTORS[number % len(_FACTORS)] for number in range(self.updates)]
        steps = (_times(factor, grads) for factor in factors)
        first: dict[str, Difference] = {}
        later: dict[str, Difference] = {}
        sizes: dict[str, float] = {}
        for number, (weights, ours, theirs) in enumerate(self.walk(steps), start=1):
            for tensor, values in ours.items():
                if (others := theirs.get(tensor)) is None:  # a tensor that is tied to another one in Flax
                    continue
                sizes[tensor] = max(largest(values) or largest(others), sizes.get(tensor, 0.0))
                # An update is the difference of two weights, so it has the rounding error of the weight.
                kept = largest(weights[tensor]) / max(sizes[tensor], 1e-300)
                tolerance = float(64 * EPS * (1 + kept))
                if number == 1:
                    first[tensor] = difference("update", tensor, values, others, tolerance)
                elif not first[tensor].beyond and not (tensor in later and later[tensor].beyond):
                    named = f"{tensor}, update {number}"
                    one = difference("later updates", named, values, others, tolerance * number, least=sizes[tensor])
                    later[tensor] = _worse(later.get(tensor), one)
        return [*first.values(), *later.values()]

    def walk(self, steps: Iterable[ByLayer]) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Create new optimizers, and yield their successive updates.

        Args:
            steps: The gradients of each update in the layout of PyTorch.

        Yields:
            For each update, three dicts by full name, in the layout of Flax: the weights before the update, PyTorch's
            update, and Flax's update.
        """
        optimizer = self.torch_optimizer(list(self.module.parameters()))
        leaves, state = self.leaves, with_wide_counts(self.flax_optimizer, self.run.flax_params)
        update = jax.jit(self.flax_optimizer.update)
        for gradients in steps:
            before = {
                path: {name: values.copy() for name, values in arrays_of(layer).items()}
                for path, layer in self._layers.items()
            }
            self._set_gradients(gradients)
            optimizer.step()
            added = {
                path: {name: values - before[path][name] for name, values in arrays_of(layer).items()}
                for path, layer in self._layers.items()
            }
            grads = jax.tree.unflatten(self.tree, self._as_leaves(gradients))
            updates, state = update(grads, state, jax.tree.unflatten(self.tree, leaves))
            others = jax.tree.leaves(updates)
            leaves = [leaf + other for leaf, other in zip(leaves, others, strict=True)]
            theirs = {place: np.asarray(other) for place, other in zip(self.places, others, strict=True)}
            yield _named(self._laid_out(before, "updates")), _named(self._laid_out(added, "updates")), theirs

    def _laid_out(self, arrays: ByLayer, what: Any) -> ByLayer:
        return {path: self._pairs[path].to_flax(own, what) for path, own in arrays.items()}

    def _as_leaves(self, gradients: ByLayer) -> list[Any]:
        """Return gradients for all Flax parameters; zeros for parameters without a gradient."""
        named = _named(self._laid_out(gradients, "gradients"))
        return [
            jnp.asarray(named[place]) if place in named else jnp.zeros_like(leaf)
            for place, leaf in zip(self.places, self.leaves, strict=True)
        ]

    def _set_gradients(self, gradients: ByLayer) -> None:
        for path, layer in self._layers.items():
            for name, tensor in layer.arrays.items():
                if _learns(tensor):
                    values = gradients[path].get(name)
                    tensor.grad = torch.zeros_like(tensor) if values is None else torch.from_numpy(np.array(values))


def _learns(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _worse(one: Difference | None, other: Difference) -> Difference:
    """Return the first difference beyond rounding; if there is none, return the largest difference."""
    if one is None or (not one.beyond and (other.beyond or other.relative > one.relative)):
        return other
    return one


def _gradients(arrays: Mapping[str, Any]) -> Arrays:
    found = {name: gradient_of(values) for name, values in arrays.items()}
    return {name: values for name, values in found.items() if values is not None}


def _times(factor: float, arrays: ByLayer) -> ByLayer:
    return {path: {name: factor * values for name, values in own.items()} for path, own in arrays.items()}


def _named(arrays: ByLayer) -> Arrays:
    """Return the trained arrays of all layers by full name."""
    return {
        tensor_name(path, name): values
        for path, own in arrays.items()
        for name, values in own.items()
        if name not in ("mean", "var")
    }


def with_wide_counts(optimizer: Any, params: Any) -> Any:
    """Return a new state of a Flax optimizer with int64 in place of int32, because schedules that divide int32 numbers
    compute in float32."""
    state = optimizer.init(params)
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.int64) if getattr(leaf, "dtype", None) == jnp.int32 else leaf, state
    )
    try:
        jax.eval_shape(optimizer.update, params, wide, params)
    except TypeError:  # the optimizer accepts only int32
        return state
    return wide


def _places(run: Run) -> list[str]:
    """Return the full names of Flax parameters in JAX's order; each parameter is set to an index that identifies it."""
    merged = nnx.clone(nnx.merge(run.flax_graph, run.flax_params, run.flax_rest))
    paths = {pair.flax.path: pair.torch.path for pair in run.pairs}
    names: list[str] = []
    seen: set[int] = set()
    for layer in flax_layers(merged):
        for name, variable in layer.arrays.items():
            if isinstance(variable, nnx.Param) and id(variable) not in seen:
                seen.add(id(variable))
                variable.set_value(jnp.asarray(len(names)))
                names.append(tensor_name(paths[layer.path], name))
    return [names[int(number)] for number in jax.tree.leaves(split_params(merged)[1])]


_STAGES: tuple[Stage, ...] = ("update", "later updates")


def of_update(stepping: Stepping, found: Sequence[Difference]) -> list[Cause]:
    """Find the settings that differ between two optimizers whose updates differ."""
    parted = [one.tensor.partition(", update ")[0] for one in found if one.stage in _STAGES and one.beyond]
    causes = _two_biases(stepping.run, dict.fromkeys(parted))
    if set(parted) <= {cause.where for cause in causes} or not stepping.owners():
        return causes
    ours, theirs = readings(StandIns(stepping))
    exact = 1e-10 + 10 * max(ours.blur, theirs.blur)
    if ours.known and theirs.known and ours.clipping.parts_from(theirs.clipping):
        causes.append(Cause("clipping", "all gradients", f"{ours.clipping}", f"{theirs.clipping}"))
    places: dict[tuple[str, str, str], list[str]] = {}
    for tensor, rule in ours.rules.items():
        for said in differing(rule, theirs.rules[tensor], exact):
            places.setdefault(said, []).append(tensor)
    for (name, one, other), tensors in places.items():
        causes.append(Cause(name, f"{len(tensors)} tensors, {tensors[0]} first", one, other))
    return causes


def _two_biases(run: Run, parted: Iterable[str]) -> list[Cause]:
    """Find recurrent layers of PyTorch, which add two biases: an optimizer step changes the sum of both biases by twice
    as much as the single bias in Flax."""
    recurrent = {pair.torch.path for pair in run.pairs if pair.torch.kind.name in ("GRU", "LSTM")}
    found = []
    for tensor in parted:
        path, _, _ = tensor.partition(".dense_") if ".dense_" in tensor else tensor.rpartition(".h")
        if path in recurrent and tensor.endswith(".bias"):
            found.append(Cause("two biases", tensor, "two that are added, and learn twice as fast", "one"))
    return found


@dataclass(frozen=True)
class Read:
    """The inferred properties of one optimizer: the update rule of each tensor, and the gradient clipping."""

    rules: dict[str, Rule]
    clipping: Clipping

    @property
    def known(self) -> bool:
        """Whether every tensor has a known rule."""
        return any(rule.explained for rule in self.rules.values())

    @property
    def blur(self) -> float:
        """The largest error that epsilon causes in the inferred settings, for the largest gradients that are not
        clipped.
        """
        roots = [float(np.sqrt(rule.epsilon)) if rule.within else rule.epsilon for rule in self.rules.values()]
        return max(roots, default=0.0) * float(np.sqrt(len(self.rules))) / min(LARGE, self.clipping.at)


def readings(small: StandIns) -> tuple[Read, Read]:
    """Infer the properties of the PyTorch optimizer and the Flax optimizer."""
    seen = {name: small.respond(given) for name, given in probes(small.updates).items()}
    other = next((tensor for tensor in small.owners if small.owners[tensor] != small.owners[small.loud]), "")
    found = []
    for side in (0, 1):
        first, last = (
            {tensor: {name: one[side][tensor][:, at] for name, one in seen.items()} for tensor in small.owners}
            for at in (0, 1)
        )
        rules = {tensor: read(given) for tensor, given in first.items()}
        rule = rules[small.loud]
        own = clipping(rule, first[small.loud], last[small.loud], first.get(other))
        if own.by.startswith("norm"):
            again = small.respond(after_loud(2 * own.at))[side][small.loud][:, 0]
            own = replace(own, slack=2 * own.at * (own.at / threshold(rule, again) - 1))
        found.append(Read(rules, own))
    return found[0], found[1]


class StandIns:
    """Both optimizers, applied to small copies of the models' tensors with at most 2 values along each axis.

    Optimizers may depend on the number of axes of a tensor and on its path, but rarely on its size. With millions of
    weights, the probes would take minutes.

    Args:
        stepping: Both optimizers and models.

    Attributes:
        owners: The result of ``Stepping.owners``.
        loud: The tensor that receives ``ProbeState.loud``: the first tensor with two values that both optimizers
            change.
    """

    def __init__(self, stepping: Stepping) -> None:
        self.updates = stepping.updates
        self.owners = stepping.owners()
        self._make = stepping.torch_optimizer
        self._ours = [
            torch.nn.Parameter(torch.zeros(_small(tensor), dtype=torch.float64), requires_grad=tensor.requires_grad)
            for tensor in stepping.module.parameters()
        ]
        self._tree = stepping.tree
        self._theirs = [np.zeros(_small(leaf)) for leaf in stepping.leaves]
        places = {tensor: place for place, tensor in enumerate(stepping.places)}
        self._leaf = {tensor: places[tensor] for tensor in self.owners}
        self._state = with_wide_counts(stepping.flax_optimizer, self._flax(self._theirs))
        self._update = jax.jit(stepping.flax_optimizer.update)
        self.loud = ""
        moved = zip(*(self.respond([ProbeState(0), ProbeState(LARGE)])[side].items() for side in (0, 1)), strict=True)
        both = [tensor for (tensor, ours), (_, theirs) in moved if ours[1, 0] and theirs[1, 0]]
        self.loud = next((one for one in both if self._theirs[self._leaf[one]].size > 1), (both or [*self.owners])[0])

    def respond(self, given: Sequence[ProbeState]) -> tuple[Arrays, Arrays]:
        """Return the updates of new optimizers to the first and the last weight of each tensor, ``[updates, 2]``."""
        optimizer, state = self._make(self._ours), self._state
        loud, other = self.owners.get(self.loud), self._leaf.get(self.loud)
        owned, leaves = set(self.owners.values()), set(self._leaf.values())
        ours: list[Any] = []
        theirs: list[Any] = []
        for one in given:
            own = [
                _filled(_small(tensor), one, number == loud, number in owned)
                for number, tensor in enumerate(self._ours)
            ]
            for tensor, (weight, gradient) in zip(self._ours, own, strict=True):
                tensor.data = torch.from_numpy(weight.copy())
                tensor.grad = torch.from_numpy(gradient) if tensor.requires_grad else None
            optimizer.step()
            ours.append([tensor.detach().numpy() - weight for tensor, (weight, _) in zip(self._ours, own, strict=True)])
            flax = [
                _filled(leaf.shape, one, place == other, place in leaves) for place, leaf in enumerate(self._theirs)
            ]
            weights, gradients = (self._flax([both[at] for both in flax]) for at in (0, 1))
            updates, state = self._update(gradients, state, weights)
            theirs.append([np.asarray(leaf) for leaf in jax.tree.leaves(updates)])
        return _ends(ours, self.owners), _ends(theirs, self._leaf)

    def _flax(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._tree, [jnp.asarray(values) for values in arrays])


def _ends(steps: Sequence[Any], places: Mapping[str, int]) -> Arrays:
    return {tensor: np.array([step[place].flat[[0, -1]] for step in steps]) for tensor, place in places.items()}


def _small(tensor: Any) -> tuple[int, ...]:
    return tuple(min(size, 2) for size in tensor.shape)


def _filled(shape: tuple[int, ...], given: ProbeState, loud: bool, used: bool) -> tuple[Any, Any]:
    """Return a weight and its gradient."""
    weight, gradient = np.zeros(shape), np.zeros(shape)
    if used:
        weight.flat[0], gradient.flat[0] = given.weight, given.gradient
    if loud and given.loud is not None:
        gradient.flat[-1] = given.gradient
        gradient.flat[0] = given.loud
    return weight, gradient
