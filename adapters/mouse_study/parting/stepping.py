"""The updates of two optimizers, from the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mouse_study.parting.layers import Arrays
from mouse_study.parting.models import arrays_of, flax_layers, torch_layers
from mouse_study.parting.optimizers.reading import (
    LARGE,
    Clipping,
    Given,
    after_loud,
    clipping,
    probes,
    read,
    threshold,
)
from mouse_study.parting.optimizers.rule import Rule, differing
from mouse_study.parting.report import Cause, Difference, Stage
from mouse_study.parting.running import EPS, Run, difference, gradient_of, split_params

ByLayer = Mapping[str, Arrays]
"""Arrays by PyTorch's path of a layer, and their names there."""

# What the gradients of a batch are multiplied with in the first updates, and again from the first on: momentum, both
# moments and clipping make other updates of these than of gradients that stay the same.
_FACTORS = (1.0, 1.0, 0.5, 1e-6, 0.0, -1.0, 1e6, 1.0, 1.0, 1.0)


class Stepping:
    """The updates of both optimizers, from any gradients.

    Args:
        run: Both models.
        torch_optimizer: Makes PyTorch's.
        flax_optimizer: Flax's.
        updates: How many are compared.
    """

    def __init__(self, run: Run, torch_optimizer: Callable[[Any], Any], flax_optimizer: Any, updates: int) -> None:
        self.run = run
        self.updates = updates
        self._make = torch_optimizer
        self._module = copy.deepcopy(run.before[0])
        self._pairs = {pair.torch.path: pair for pair in run.pairs}
        self._layers = {layer.path: layer for layer in torch_layers(self._module) if layer.path in self._pairs}
        self._begin = {path: _copied(arrays_of(layer)) for path, layer in self._layers.items()}
        self._leaves, self._tree = jax.tree.flatten(run.flax_params)
        self._places = _places(run)
        self._state = _with_wide_counts(flax_optimizer, run.flax_params)
        self._update = jax.jit(flax_optimizer.update)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what PyTorch's optimizer may change, as Flax lays it out, by full name."""
        learns = {
            path: {name: np.full(tuple(tensor.shape), _learns(tensor)) for name, tensor in layer.arrays.items()}
            for path, layer in self._layers.items()
        }
        return {
            tensor: ones.shape for tensor, ones in _named(self._laid_out(learns, "gradients")).items() if ones.any()
        }

    def marked(self, place: int, only: str | None = None) -> ByLayer:
        """1 at one place of each of Flax's tensors, or of only one, and 0 elsewhere; laid out as PyTorch's."""
        found = {}
        for path, pair in self._pairs.items():
            arrays = {name: np.zeros(shape) for name, shape in pair.flax.shapes.items() if _counts(name)}
            for name, values in arrays.items():
                if only is None or _full(path, name) == only:
                    values.flat[place] = 1.0
            own = self._layers[path].arrays
            found[path] = {name: values for name, values in pair.to_torch(arrays).items() if name in own}
        return found

    def compare(self) -> list[Difference]:
        """What both add to the weights in the first update, from PyTorch's gradients, and in later ones if they agree.

        The gradients of later updates are those of the first, times factors.
        """
        grads = {path: _gradients(pair.torch.arrays) for path, pair in self._pairs.items()}
        factors = [_FACTORS[number % len(_FACTORS)] for number in range(self.updates)]
        steps = ((None, _times(factor, grads)) for factor in factors)
        first: dict[str, Difference] = {}
        later: dict[str, Difference] = {}
        largest: dict[str, float] = {}
        for number, (weights, ours, theirs) in enumerate(self.walk(steps), start=1):
            for tensor, values in ours.items():
                size = max(float(np.abs(added[tensor]).max(initial=0)) for added in (ours, theirs))
                largest[tensor] = max(size, largest.get(tensor, 0.0))
                # What is added is known to as many digits as the sum with the weight keeps of it.
                kept = np.abs(weights[tensor]).max(initial=0) / max(largest[tensor], 1e-300)
                tolerance, others = float(64 * EPS * (1 + kept)), theirs[tensor]
                if number == 1:
                    first[tensor] = difference("update", tensor, values, others, tolerance)
                elif not first[tensor].beyond:
                    named = f"{tensor}, update {number}"
                    one = difference("later updates", named, values, others, tolerance * number, least=largest[tensor])
                    later[tensor] = _worse(later.get(tensor), one)
        return [*first.values(), *later.values()]

    def walk(self, steps: Iterable[tuple[ByLayer | None, ByLayer]]) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """New optimizers, and the updates that they make one after another.

        Args:
            steps: Of each update the weights before it, or None for what came of the last one, and the gradients, as
                PyTorch lays them out.

        Yields:
            The weights before an update and what PyTorch's and Flax's optimizers added, by full name, as Flax lays
            them out.
        """
        self._set_weights(self._begin)
        optimizer = self._make(list(self._module.parameters()))
        leaves, state = self._leaves, self._state
        for weights, gradients in steps:
            if weights is not None:
                self._set_weights(weights)
                leaves = self._as_leaves(weights, "updates", leaves)
            before = {path: _copied(arrays_of(layer)) for path, layer in self._layers.items()}
            self._set_gradients(gradients)
            optimizer.step()
            added = {
                path: {name: values - before[path][name] for name, values in arrays_of(layer).items()}
                for path, layer in self._layers.items()
            }
            grads = jax.tree.unflatten(self._tree, self._as_leaves(gradients, "gradients", leaves))
            updates, state = self._update(grads, state, jax.tree.unflatten(self._tree, leaves))
            others = jax.tree.leaves(updates)
            leaves = [leaf + other for leaf, other in zip(leaves, others, strict=True)]
            theirs = {place: np.asarray(other) for place, other in zip(self._places, others, strict=True)}
            yield _named(self._laid_out(before, "updates")), _named(self._laid_out(added, "updates")), theirs

    def _laid_out(self, arrays: ByLayer, what: Any) -> ByLayer:
        return {path: self._pairs[path].to_flax(own, what) for path, own in arrays.items()}

    def _as_leaves(self, arrays: ByLayer, what: Any, before: Sequence[Any]) -> list[Any]:
        """Flax's parameters with other values; what is not among these has none."""
        named = _named(self._laid_out(arrays, what))
        return [
            jnp.asarray(named[place]) if place in named else jnp.zeros_like(leaf)
            for place, leaf in zip(self._places, before, strict=True)
        ]

    def _set_weights(self, weights: ByLayer) -> None:
        with torch.no_grad():
            for path, own in weights.items():
                for name, values in own.items():
                    self._layers[path].arrays[name].copy_(torch.from_numpy(values))

    def _set_gradients(self, gradients: ByLayer) -> None:
        for path, layer in self._layers.items():
            for name, tensor in layer.arrays.items():
                if _learns(tensor):
                    values = gradients[path].get(name)
                    tensor.grad = torch.zeros_like(tensor) if values is None else torch.from_numpy(np.array(values))


# ---------------------------------------------------------------------- what the optimizers are


def of_update(stepping: Stepping, found: Sequence[Difference]) -> list[Cause]:
    """What is not the same in two optimizers of which updates part: both are read, and compared setting by setting."""
    parted = [one.tensor.partition(", update ")[0] for one in found if one.stage in _STAGES and one.beyond]
    causes = _two_biases(stepping.run, dict.fromkeys(parted))
    if set(parted) <= {cause.where for cause in causes} or not stepping.trained:
        return causes
    ours, theirs = readings(stepping)
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
    """Recurrent layers of PyTorch's have two biases that are added: one step moves their sum twice as far."""
    recurrent = {pair.torch.path for pair in run.pairs if pair.torch.kind.name in ("GRU", "LSTM")}
    found = []
    for tensor in parted:
        path, _, _ = tensor.partition(".dense_") if ".dense_" in tensor else tensor.rpartition(".h")
        if path in recurrent and tensor.endswith(".bias"):
            found.append(Cause("two biases", tensor, "two that are added, and learn twice as fast", "one"))
    return found


@dataclass(frozen=True)
class Read:
    """What was read of one optimizer: the rule of each tensor, and how gradients are clipped."""

    rules: dict[str, Rule]
    clipping: Clipping

    @property
    def known(self) -> bool:
        """Whether the rules are among those that are known."""
        return any(rule.explained for rule in self.rules.values())

    @property
    def blur(self) -> float:
        """What epsilon makes of the readings at most, which are of gradients as large as clipping leaves them."""
        roots = [float(np.sqrt(rule.epsilon)) if rule.within else rule.epsilon for rule in self.rules.values()]
        return max(roots, default=0.0) * float(np.sqrt(len(self.rules))) / min(LARGE, self.clipping.at)


def readings(stepping: Stepping) -> tuple[Read, Read]:
    """PyTorch's optimizer and Flax's."""
    shapes = stepping.trained
    loud = next((tensor for tensor, shape in shapes.items() if np.prod(shape) > 1), next(iter(shapes)))
    other = next((tensor for tensor in shapes if tensor != loud), None)
    seen = {name: _responses(stepping, given, loud) for name, given in probes(stepping.updates).items()}
    found = []
    for side in (0, 1):
        first, last = (
            {tensor: {name: one[side][tensor][:, at] for name, one in seen.items()} for tensor in shapes}
            for at in (0, 1)
        )
        rules = {tensor: read(given) for tensor, given in first.items()}
        own = clipping(rules[loud], first[loud], last[loud], first.get(other or ""))
        if own.by.startswith("norm"):
            again = _responses(stepping, after_loud(2 * own.at), loud)[side][loud][:, 0]
            own = replace(own, slack=2 * own.at * (own.at / threshold(rules[loud], again) - 1))
        found.append(Read(rules, own))
    return found[0], found[1]


def _responses(stepping: Stepping, given: Sequence[Given], loud: str) -> tuple[Arrays, Arrays]:
    """What both optimizers add to the first and to the last weight of each tensor, ``[updates, 2]``."""
    first, loud_first, loud_last = (stepping.marked(mark, only) for mark, only in ((0, None), (0, loud), (-1, loud)))
    steps = []
    for one in given:
        gradients = _times(one.gradient, first)
        if one.loud is not None:
            gradients = _sum(gradients, _times(one.gradient, loud_last), _times(one.loud - one.gradient, loud_first))
        steps.append((_times(one.weight, first), gradients))
    walked = [both for _, *both in stepping.walk(steps)]
    ours, theirs = (
        {tensor: np.array([own[side][tensor].flat[[0, -1]] for own in walked]) for tensor in stepping.trained}
        for side in (0, 1)
    )
    return ours, theirs


def _sum(*several: ByLayer) -> ByLayer:
    one, *others = several
    return {
        path: {name: sum((other[path][name] for other in others), values) for name, values in own.items()}
        for path, own in one.items()
    }


_STAGES: tuple[Stage, ...] = ("update", "later updates")


def _learns(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _worse(one: Difference | None, other: Difference) -> Difference:
    """The first beyond rounding, and of those within it the larger one."""
    if one is None or (not one.beyond and (other.beyond or other.relative > one.relative)):
        return other
    return one


def _gradients(arrays: Mapping[str, Any]) -> Arrays:
    found = {name: gradient_of(values) for name, values in arrays.items()}
    return {name: values for name, values in found.items() if values is not None}


def _times(factor: float, arrays: ByLayer) -> ByLayer:
    return {path: {name: factor * values for name, values in own.items()} for path, own in arrays.items()}


def _copied(arrays: Arrays) -> Arrays:
    return {name: values.copy() for name, values in arrays.items()}


def _full(path: str, name: str) -> str:
    return f"{path}.{name}".removesuffix(".value")


def _counts(name: str) -> bool:
    """Whether an array of Flax's is trained."""
    return name not in ("mean", "var")


def _named(arrays: ByLayer) -> Arrays:
    """Trained arrays of all layers by their full names."""
    return {_full(path, name): values for path, own in arrays.items() for name, values in own.items() if _counts(name)}


def _with_wide_counts(optimizer: Any, params: Any) -> Any:
    """A new state of Flax's optimizer, whose int32 are int64: a schedule that divides an int32 gets a float32 of it."""
    state = optimizer.init(params)
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.int64) if getattr(leaf, "dtype", None) == jnp.int32 else leaf, state
    )
    try:
        jax.eval_shape(optimizer.update, params, wide, params)
    except TypeError:  # it takes int32 alone
        return state
    return wide


def _places(run: Run) -> list[str]:
    """The full names of Flax's parameters, in JAX's order: each is made a number of its own, and looked up."""
    merged = nnx.clone(nnx.merge(run.flax_graph, run.flax_params, run.flax_rest))
    paths = {pair.flax.path: pair.torch.path for pair in run.pairs}
    names: list[str] = []
    seen: set[int] = set()
    for layer in flax_layers(merged):
        for name, variable in layer.arrays.items():
            if isinstance(variable, nnx.Param) and id(variable) not in seen:
                seen.add(id(variable))
                variable.set_value(jnp.asarray(len(names)))
                names.append(_full(paths[layer.path], name))
    return [names[int(number)] for number in jax.tree.leaves(split_params(merged)[1])]
