"""Two implementations of one model side by side: the one question that a user asks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from mouse_core import ConfigError
from mouse_study.divergence import causes
from mouse_study.divergence.report import Comparison
from mouse_study.divergence.running import Run, as_float64
from mouse_study.divergence.settings import Stepping, of_update
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
    """Train two implementations of one model for a step in float64, and say which tensor is the first to differ.

    First the weights that they begin with are compared: equal ones, or how widely they are spread. Then both get those
    of PyTorch's, and one batch, and are compared in the order of a training step: what each layer was given and gave,
    each layer alone with PyTorch's input, the loss, all gradients, running statistics, and the first updates that the
    optimizers make of the same gradients: those of the batch, and these times 1/2, 0, -1, a million and so on. What is
    beyond rounding is looked up among the causes that are known, each of which is checked and not guessed. Where
    updates part, both optimizers are given gradients from which their settings can be read. The two models stay as
    they are.

    Args:
        torch_module: A model, as it is trained: in training mode, or not.
        flax_module: The other one.
        batch: Arrays, nested as batches are. Floats come as float64; integers as int64.
        torch_loss: Called with PyTorch's model and the batch as tensors; gives a scalar.
        flax_loss: Called with Flax's model and the batch as JAX's arrays; gives a scalar. It should not call compiled
            functions, within which no layer can be looked at.
        torch_optimizer: Makes an optimizer of a list of parameters; with ``flax_optimizer``, or no update is compared.
            What a training does before or after each of its steps, such as clipping or a schedule, belongs to it as
            hooks of its steps (``register_step_pre_hook``, ``register_step_post_hook``).
        flax_optimizer: An ``optax.GradientTransformation``, which is compiled.
        names: As in ``transfer``.
        updates: How many updates are compared, 1 or more. A schedule of the learning rate shows within as many.

    Returns:
        All that was compared, the first tensor beyond rounding, and causes; ``print`` it.

    Raises:
        SchemaError: As ``transfer``.
        ConfigError: One optimizer without the other, a loss that is no scalar, or no updates.
    """
    if updates < 1:
        raise ConfigError(f"updates: expected 1 or more, found {updates}")
    if (torch_optimizer is None) != (flax_optimizer is None):
        raise ConfigError("optimizers: expected one of each framework or none at all, found one")
    # Copies of Flax's have their layers in another order, so it is these two that say which are the same.
    names = {pair.torch.path: pair.flax.path for pair in twins(torch_module, flax_module, names=names)}
    with jax.enable_x64(True):
        own = copy.deepcopy(torch_module).double()
        other = as_float64(flax_module)
        run = Run(own, other, batch, torch_loss, flax_loss, names)
        found = run.initial_weights()
        transfer(own, other, names=names)
        found += run.forward() + run.alone() + run.loss() + run.gradients() + run.statistics()
        known = causes.of_weights(found) + causes.of_layers(run) + causes.of_forward(run, found)
        known += causes.of_loss(run, found) + causes.of_statistics(run, found)
        if torch_optimizer is not None:
            stepping = Stepping(run, torch_optimizer, flax_optimizer, updates)
            found += stepping.compare()
            known += of_update(stepping, found)
    return Comparison(tuple(found), tuple(dict.fromkeys(known)), tuple(run.unaligned()))
