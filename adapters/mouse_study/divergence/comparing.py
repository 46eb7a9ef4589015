"""Compares two implementations of a model in one training step, and finds the first tensor that differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mouse_core import ConfigError
from mouse_study.divergence.models import (
    Arrays,
    Comparison,
    Difference,
    What,
    arrays_of,
    difference,
    flax_layers,
    largest,
    tensor_name,
    torch_layers,
)
from mouse_study.divergence.running import EPS, Run, as_float64, gradients_of, split_params
from mouse_study.divergence.weights import transfer, twins


def where_they_part(
    torch_module: torch.nn.Module,
    flax_module: Any,
    batch: Any,
    *,
    torch_loss: Callable[[Any, Any], Any],
    flax_loss: Callable[[Any, Any], Any],
    torch_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    flax_optimizer: Any = None,
    names: Mapping[str, str] | None = None,
    updates: int = 10,
) -> Comparison:
    """Train two implementations of a model for a step in float64, and find the first tensor that differs.

    First, the function compares the initial weights: whether they are equal, or have equal spreads. Then both models
    get the weights of the PyTorch model and the same batch. The models are compared in the order of a training step:
    the inputs and outputs of each layer, each layer alone on PyTorch's input, the loss, all gradients, running
    statistics, and the first updates of the optimizers from equal gradients. The gradients for these updates are the
    gradients of the batch, and multiples of them (times 1/2, 0, -1, a million and so on). The two models are not
    changed.

    Args:
        torch_module: A PyTorch model in the mode in which it is trained.
        flax_module: The Flax model.
        batch: Arrays, in any nesting of a batch. Floats are converted to float64, and integers to int64.
        torch_loss: A function of the PyTorch model and the batch as tensors that returns a scalar.
        flax_loss: A function of the Flax model and the batch as JAX arrays that returns a scalar. The function should
            not call compiled functions, because layers inside them cannot be observed.
        torch_optimizer: A function that creates an optimizer for a list of parameters. If an optimizer is missing,
            updates are not compared. If the training does something before or after each step, such as clipping or a
            schedule, add this operation as a hook of the optimizer (``register_step_pre_hook``,
            ``register_step_post_hook``).
        flax_optimizer: An ``optax.GradientTransformation``, which is compiled.
        names: Paths in the PyTorch model, mapped to paths in the Flax model; see ``transfer``.
        updates: The number of compared updates, at least 1. A schedule of the learning rate is found only if it changes
            within these updates.

    Returns:
        The compared tensors and the first difference beyond rounding; ``print`` shows a report.

    Raises:
        SchemaError: An error of ``transfer``.
        ConfigError: Only one optimizer is given, a loss is not a scalar, or ``updates`` is below 1.
    """
    if updates < 1:
        raise ConfigError(f"updates: expected 1 or more, found {updates}")
    if (torch_optimizer is None) != (flax_optimizer is None):
        raise ConfigError("optimizers: expected an optimizer of each framework, or none, found only one")
    # Copies of the Flax model have their layers in another order, so pairs are determined on the original models.
    names = {pair.torch.path: pair.flax.path for pair in twins(torch_module, flax_module, names=names)}
    with jax.enable_x64(True):
        own = copy.deepcopy(torch_module).double()
        other = as_float64(flax_module)
        run = Run(own, other, batch, torch_loss, flax_loss, names)
        found = run.initial_weights()
        transfer(own, other, names=names)
        found += run.forward() + run.alone() + run.loss() + run.gradients() + run.statistics()
        if torch_optimizer is not None:
            found += _compare_updates(run, torch_optimizer, flax_optimizer, updates)
    return Comparison(tuple(found), tuple(run.unaligned()))


# Factors of a batch's gradients in successive updates, repeated. Unlike with constant gradients, momentum, moments and
# clipping then change the updates.
_FACTORS = (1.0, 1.0, 0.5, 1e-6, 0.0, -1.0, 1e6, 1.0, 1.0, 1.0)


def _compare_updates(run: Run, torch_optimizer: Any, flax_optimizer: Any, count: int) -> list[Difference]:
    """Compare the first update of both optimizers from PyTorch's gradients; for tensors whose first updates agree,
    compare later updates.

    The gradients of later updates are the first gradients times factors.
    """
    first: dict[str, Difference] = {}
    later: dict[str, Difference] = {}
    sizes: dict[str, float] = {}
    factors = [_FACTORS[number % len(_FACTORS)] for number in range(count)]
    walk = _updates(run, torch_optimizer, flax_optimizer, factors)
    for number, (weights, ours, theirs) in enumerate(walk, start=1):
        for tensor, values in ours.items():
            others = theirs[tensor]
            sizes[tensor] = max(largest(values) or largest(others), sizes.get(tensor, 0.0))
            # An update is the difference of two weights, so it has the rounding error of the weight.
            kept = largest(weights[tensor]) / max(sizes[tensor], 1e-300)
            tolerance = float(64 * EPS * (1 + kept))
            if number == 1:
                first[tensor] = difference("update", tensor, values, others, tolerance)
            elif not first[tensor].beyond and not (tensor in later and later[tensor].beyond):
                named = f"{tensor}, update {number}"
                one = difference("later updates", named, values, others, tolerance * number, least=sizes[tensor])
                if tensor not in later or one.beyond or one.relative > later[tensor].relative:
                    later[tensor] = one
    return [*first.values(), *later.values()]


def _updates(
    run: Run, torch_optimizer: Any, flax_optimizer: Any, factors: Iterable[float]
) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
    """Create new optimizers, and yield their successive updates from the gradients of the run times ``factors``.

    Yields:
        For each update, three dicts by full name, in the layout of Flax: the weights before the update, PyTorch's
        update, and Flax's update.
    """
    pairs = {pair.torch.path: pair for pair in run.pairs}
    module = copy.deepcopy(run.before[0])
    layers = {layer.path: layer for layer in torch_layers(module) if layer.path in pairs}
    gradients = {path: gradients_of(pair.torch) for path, pair in pairs.items()}
    optimizer = torch_optimizer(list(module.parameters()))
    params, state = run.flax_params, _with_wide_counts(flax_optimizer, run.flax_params)
    update = jax.jit(flax_optimizer.update)

    def in_flax(arrays: Mapping[str, Arrays], what: What) -> Arrays:
        return _named({path: pairs[path].to_flax(own, what) for path, own in arrays.items()})

    def weights() -> dict[str, Arrays]:
        return {
            path: {name: np.array(values) for name, values in arrays_of(own).items()} for path, own in layers.items()
        }

    for factor in factors:
        scaled = {path: {name: factor * one for name, one in own.items()} for path, own in gradients.items()}
        before = weights()
        for path, layer in layers.items():
            for name, tensor in layer.arrays.items():
                if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                    tensor.grad = torch.from_numpy(np.array(scaled[path][name]))
        optimizer.step()
        added = {path: {name: one - before[path][name] for name, one in own.items()} for path, own in weights().items()}
        updates, state = update(_as_params(run, in_flax(scaled, "gradients")), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        yield in_flax(before, "updates"), in_flax(added, "updates"), _named(run.in_flax(updates))


def _named(arrays: Mapping[str, Arrays]) -> Arrays:
    """Return the trained arrays of all layers by full name."""
    return {
        tensor_name(path, name): values
        for path, own in arrays.items()
        for name, values in own.items()
        if name not in ("mean", "var")
    }


def _as_params(run: Run, gradients: Arrays) -> Any:
    """Return gradients in the structure of the Flax parameters; zeros for parameters without a gradient."""
    module = nnx.clone(nnx.merge(run.flax_graph, run.flax_params, run.flax_rest))
    paths = {pair.flax.path: pair.torch.path for pair in run.pairs}
    for layer in flax_layers(module):
        for name, variable in layer.arrays.items():
            if isinstance(variable, nnx.Param):
                found = gradients.get(tensor_name(paths[layer.path], name))
                variable.set_value(jnp.zeros(variable.shape) if found is None else jnp.asarray(found))
    return split_params(module)[1]


def _with_wide_counts(optimizer: Any, params: Any) -> Any:
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
