"""The first step of two optimizers, from the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mouse_study.parting.layers import Arrays
from mouse_study.parting.models import arrays_of, flax_layers, torch_layers
from mouse_study.parting.report import Cause, Difference
from mouse_study.parting.running import EPS, Run, difference, gradient_of, split_params

Gradient = Callable[[Any], Any]
"""Gives for a parameter of PyTorch's its gradient, or None."""


class Stepping:
    """The first step of both optimizers, from any gradients.

    Args:
        run: Both models.
        torch_optimizer: Makes PyTorch's.
        flax_optimizer: Flax's.
    """

    def __init__(self, run: Run, torch_optimizer: Callable[[Any], Any], flax_optimizer: Any) -> None:
        self.run = run
        self.torch_optimizer = torch_optimizer
        self.flax_optimizer = flax_optimizer

    def compare(self) -> list[Difference]:
        """What both add to the weights, from PyTorch's gradients."""
        return self.beside(lambda parameter: parameter.grad)

    def beside(self, gradient: Gradient) -> list[Difference]:
        """What both add to the weights, from the gradients that a function gives for a parameter of PyTorch's."""
        return self._compared(*self.steps(gradient))

    def beyond_idle(self, size: float) -> list[Difference]:
        """What both add for gradients of one size, beyond what they add for none."""
        steps, idle = self.steps(_filled(size)), self.steps(torch.zeros_like)
        return self._compared(*(_less(some, none) for some, none in zip(steps, idle, strict=True)))

    def sizes(self, tensor: str, size: float) -> tuple[float, float]:
        """How much both add to a tensor for gradients of one size, on average, beyond what they add for none."""
        steps, idle = self.steps(_filled(size)), self.steps(torch.zeros_like)
        ours, theirs = (_named(_less(some, none))[tensor] for some, none in zip(steps, idle, strict=True))
        return float(np.abs(ours).mean()), float(np.abs(theirs).mean())

    def shrinking(self, tensor: str) -> tuple[float, float]:
        """Which part of a tensor both take away where there is no gradient."""
        ours, theirs = (_named(steps)[tensor] for steps in self.steps(torch.zeros_like))
        weights = float(np.abs(_named(self._weights)[tensor]).mean())
        return float(np.abs(ours).mean()) / weights, float(np.abs(theirs).mean()) / weights

    def options(self) -> dict[str, Any]:
        """What PyTorch's optimizer says of itself."""
        groups = self.torch_optimizer(self.run.torch_module.parameters()).param_groups
        return {name: value for name, value in groups[0].items() if name != "params"}

    def steps(self, gradient: Gradient) -> tuple[dict[str, Arrays], dict[str, Arrays]]:
        """What PyTorch's and Flax's optimizers add to the weights, by PyTorch's path, as Flax lays it out."""
        ours, given = self._of_torch(gradient)
        return ours, self._of_flax(given)

    def _compared(self, ours: Mapping[str, Arrays], theirs: Mapping[str, Arrays]) -> list[Difference]:
        found = []
        others, weights = _named(theirs), _named(self._weights)
        for tensor, values in _named(ours).items():
            # What is added is known to as many digits as the sum with the weight keeps of it.
            kept = np.abs(weights[tensor]).max(initial=0) / max(np.abs(values).max(initial=0), 1e-300)
            found.append(difference("update", tensor, values, others[tensor], float(64 * EPS * (1 + kept))))
        return found

    def _of_torch(self, gradient: Gradient) -> tuple[dict[str, Arrays], dict[str, Arrays]]:
        module = copy.deepcopy(self.run.before[0])
        grads = dict(self.run.torch_module.named_parameters())
        for name, parameter in module.named_parameters():
            given = gradient(grads[name])
            parameter.grad = torch.zeros_like(parameter) if given is None else given.detach().clone()
        pairs = {pair.torch.path: pair for pair in self.run.pairs}
        layers = {layer.path: layer for layer in torch_layers(module) if layer.path in pairs}
        before = {path: arrays_of(layer) for path, layer in layers.items()}
        before = {path: {name: values.copy() for name, values in arrays.items()} for path, arrays in before.items()}
        given_arrays = {
            path: pairs[path].to_flax(
                {name: made for name, value in layer.arrays.items() if (made := gradient_of(value)) is not None},
                "gradients",
            )
            for path, layer in layers.items()
        }
        self._weights = {path: pairs[path].to_flax(arrays, "updates") for path, arrays in before.items()}
        self.torch_optimizer(module.parameters()).step()
        added = {
            path: pairs[path].to_flax(
                {name: values - before[path][name] for name, values in arrays_of(layer).items()}, "updates"
            )
            for path, layer in layers.items()
        }
        return added, given_arrays

    def _of_flax(self, given: Mapping[str, Arrays]) -> dict[str, Arrays]:
        run = self.run
        merged = nnx.merge(run.flax_graph, run.flax_params, run.flax_rest)
        paths = {pair.flax.path: pair.torch.path for pair in run.pairs}
        merged = nnx.clone(merged)
        for layer in flax_layers(merged):
            for name, values in given[paths[layer.path]].items():
                layer.arrays[name].set_value(jnp.asarray(values))
        _, grads, _ = split_params(merged)
        updates, _ = self.flax_optimizer.update(grads, self.flax_optimizer.init(run.flax_params), run.flax_params)
        return run.in_flax(updates)


def _filled(size: float) -> Gradient:
    return lambda parameter: torch.full_like(parameter, size)


def _named(arrays: Mapping[str, Arrays]) -> Arrays:
    """Trained arrays of all layers by their full names."""
    return {
        f"{path}.{name}".removesuffix(".value"): values
        for path, own in arrays.items()
        for name, values in own.items()
        if name not in ("mean", "var")
    }


def _less(some: Mapping[str, Arrays], none: Mapping[str, Arrays]) -> dict[str, Arrays]:
    return {path: {name: values - none[path][name] for name, values in own.items()} for path, own in some.items()}


# ---------------------------------------------------------------------- causes


# Gradients beside which no epsilon counts, and beside which any does.
_LARGE, _SMALL = 1e12, 1e-9


def of_update(stepping: Stepping, found: Sequence[Difference]) -> list[Cause]:
    """What optimizers make of gradients of zero, of large and of small ones, where they part."""
    parted = [one for one in found if one.stage == "update" and one.beyond]
    causes = _two_biases(stepping, parted)
    known = {cause.where for cause in causes}
    if all(one.tensor in known for one in parted):
        return causes
    options = stepping.options()
    idle = [one for one in stepping.beside(torch.zeros_like) if one.beyond and one.tensor not in known]
    if idle:
        ours, theirs = stepping.shrinking(idle[0].tensor)
        decay = f" (weight_decay={options['weight_decay']:g})" if options.get("weight_decay") else ""
        causes.append(
            Cause(
                "weight decay",
                f"{len(idle)} tensors, {idle[0].tensor} first",
                f"{ours:.3g} of a weight taken in a step without gradient{decay}",
                f"{theirs:.3g}",
            )
        )
    large = _probed(stepping, _LARGE, known)
    small = _probed(stepping, _SMALL, known)
    if large:
        ours, theirs = stepping.sizes(large[0], _LARGE)
        causes.append(
            Cause(
                "learning rate or decay of moments",
                f"{len(large)} tensors, {large[0]} first",
                f"{ours:.3g} added for a large gradient",
                f"{theirs:.3g}",
            )
        )
    elif small:
        ours, theirs = stepping.sizes(small[0], _SMALL)
        causes.append(
            Cause(
                "epsilon of the optimizer, its size or whether it is within the root",
                f"{len(small)} tensors, {small[0]} first",
                f"{ours:.3g} added for a gradient of 1e-9 (eps={options.get('eps')})",
                f"{theirs:.3g}",
            )
        )
    return causes


def _probed(stepping: Stepping, size: float, known: set[str]) -> list[str]:
    """The tensors of which steps differ for gradients of one size, without what differs for those of zero."""
    return [one.tensor for one in stepping.beyond_idle(size) if one.beyond and one.tensor not in known]


def _two_biases(stepping: Stepping, parted: Sequence[Difference]) -> list[Cause]:
    """Recurrent layers of PyTorch's have two biases that are added: one step moves their sum twice as far."""
    recurrent = {pair.torch.path for pair in stepping.run.pairs if pair.torch.kind.name in ("GRU", "LSTM")}
    found = []
    for one in parted:
        path, _, _ = one.tensor.partition(".dense_") if ".dense_" in one.tensor else one.tensor.rpartition(".h")
        if path in recurrent and one.tensor.endswith(".bias"):
            found.append(Cause("two biases", one.tensor, "two that are added, and learn twice as fast", "one"))
    return found
