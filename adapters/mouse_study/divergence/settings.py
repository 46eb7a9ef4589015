"""Updates of two optimizers from the same gradients, and their settings, read from what they make of small tensors."""

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

from mouse_study.divergence.models import Arrays, arrays_of, flax_layers, tensor_name, torch_layers
from mouse_study.divergence.optimizers import (
    LARGE,
    Clipping,
    ProbeState,
    Rule,
    after_loud,
    clipping,
    differing,
    probes,
    read,
    threshold,
)
from mouse_study.divergence.report import Cause, Difference, Stage, difference, largest
from mouse_study.divergence.running import EPS, Run, gradient_of, split_params

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

    Attributes:
        module: A copy of PyTorch's model, which is updated.
        leaves: Flax's parameters.
        tree: What they are the leaves of.
        places: Their full names, in the same order.
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
        """Return the number of the PyTorch parameter behind each trained Flax tensor, by full name.

        Each parameter is filled with its number and converted to Flax's layout. The query, key and value of an
        attention then all carry the number of one parameter.
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
        """Compare the first update of both optimizers from PyTorch's gradients, and the later ones if the first agrees.

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
                if (others := theirs.get(tensor)) is None:  # one that is tied to another in Flax
                    continue
                sizes[tensor] = max(largest(values) or largest(others), sizes.get(tensor, 0.0))
                # What is added is known to as many digits as the sum with the weight keeps of it.
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
        """New optimizers, and the updates that they make one after another.

        Args:
            steps: The gradients of each update, as PyTorch lays them out.

        Yields:
            The weights before an update and what PyTorch's and Flax's optimizers added, by full name, as Flax lays
            them out.
        """
        optimizer = self.torch_optimizer(list(self.module.parameters()))
        leaves, state = self.leaves, with_wide_counts(self.flax_optimizer, self.run.flax_params)
        update = jax.jit(self.flax_optimizer.update)
        for gradients in steps:
            before = {path: _copied(arrays_of(layer)) for path, layer in self._layers.items()}
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
        """Gradients as Flax's parameters; what is not among these has none."""
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


def _counts(name: str) -> bool:
    """Whether an array of Flax's is trained."""
    return name not in ("mean", "var")


def _named(arrays: ByLayer) -> Arrays:
    """Trained arrays of all layers by their full names."""
    return {
        tensor_name(path, name): values for path, own in arrays.items() for name, values in own.items() if _counts(name)
    }


def with_wide_counts(optimizer: Any, params: Any) -> Any:
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
    """The inferred properties of one optimizer: the rule of each tensor, and the gradient clipping."""

    rules: dict[str, Rule]
    clipping: Clipping

    @property
    def known(self) -> bool:
        """Whether every rule is a known one."""
        return any(rule.explained for rule in self.rules.values())

    @property
    def blur(self) -> float:
        """The largest error that epsilon causes in the inferred settings, for gradients as large as clipping allows."""
        roots = [float(np.sqrt(rule.epsilon)) if rule.within else rule.epsilon for rule in self.rules.values()]
        return max(roots, default=0.0) * float(np.sqrt(len(self.rules))) / min(LARGE, self.clipping.at)


def readings(small: StandIns) -> tuple[Read, Read]:
    """PyTorch's optimizer and Flax's."""
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
    """Both optimizers on small tensors, of at most 2 values along each axis, that stand for the models' tensors.

    An optimizer may look at how many axes a tensor has, and where it is. How long it is, only few do, and a model of
    millions of weights would take minutes.

    Args:
        stepping: Both optimizers and models.

    Attributes:
        owners: As ``Stepping.owners``.
        loud: The tensor that is given a gradient of its own: the first of two values that both optimizers change.
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
    """A weight and its gradient."""
    weight, gradient = np.zeros(shape), np.zeros(shape)
    if used:
        weight.flat[0], gradient.flat[0] = given.weight, given.gradient
    if loud and given.loud is not None:
        gradient.flat[-1] = given.gradient
        gradient.flat[0] = given.loud
    return weight, gradient
