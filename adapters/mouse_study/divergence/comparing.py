"""Compares two implementations of a model, and finds the first divergence and its known causes; each cause is confirmed
by a check."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mouse_core import ConfigError
from mouse_study.divergence.models import (
    Array,
    Cause,
    Comparison,
    Difference,
    array_of,
    arrays_of,
    difference,
    tensor_name,
)
from mouse_study.divergence.running import Event, Run, as_flax_has_it, as_float64, is_spatial, run_alone
from mouse_study.divergence.settings import Stepping, of_update
from mouse_study.divergence.weights import Twins, transfer, twins


def of_weights(found: Sequence[Difference]) -> list[Cause]:
    """Find initial weights that have different distributions, or that were drawn with different random numbers."""
    drawn = [
        one for one in found if one.stage == "initial weights" and one.beyond and not one.tensor.startswith("loss of")
    ]
    if not drawn:
        return []
    worst = max(drawn, key=lambda one: one.relative)
    return [
        Cause(
            "initialization",
            f"{len(drawn)} tensors, {drawn[0].tensor} first",
            "values of one spread",
            f"values of another, {worst.relative:.0%} apart in {worst.tensor}",
        )
    ]


# ---------------------------------------------------------------------- what layers say of themselves


def of_layers(run: Run) -> list[Cause]:
    """Find settings of layers that differ between the two models."""
    found = []
    for pair in run.pairs:
        ours, theirs = pair.torch.module, pair.flax.module
        for name, one, other in _settings(pair, ours, theirs):
            if one != other:
                found.append(Cause(name, pair.torch.path, f"{one}", f"{other}"))
        found += _frozen(pair)
        dtype = getattr(theirs, "dtype", None)
        if dtype is not None and jnp.dtype(dtype) != jnp.float64:
            found.append(
                Cause("dtype of a layer", pair.torch.path, "float64", f"{jnp.dtype(dtype)}, which it asks for")
            )
    for path, module in run.torch_module.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            found.append(Cause("dropout", path, f"draws with p={module.p}", "draws of its own"))
    for parts, module in nnx.iter_modules(run.flax_module):
        if isinstance(module, nnx.Dropout) and not module.deterministic and module.rate > 0:
            where = ".".join(map(str, parts))
            found.append(Cause("dropout", where, "draws of its own, or none", f"draws with rate={module.rate:g}"))
    return found + _batch_first(run)


def _frozen(pair: Twins) -> list[Cause]:
    """Find parameters that PyTorch does not train, except the second bias of recurrent layers, which Flax lacks."""
    return [
        Cause("requires_grad", tensor_name(pair.torch.path, name), "False", "it learns, as each nnx.Param")
        for name, tensor in pair.torch.arrays.items()
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and name != "bias_hh"
    ]


def _batch_first(run: Run) -> list[Cause]:
    """Find PyTorch layers that treat the first axis as time, although Flax treats the first axis of the same input as
    the batch.
    """
    found, others = [], run.theirs.by_key()
    for event in run.ours.events:
        other = others.get((event.path, "input", 0))
        if event.key[1:] != ("input", 0) or other is None or event.values.ndim != 3:
            continue
        if getattr(event.module, "batch_first", True) or event.values.shape != other.values.shape:
            continue
        # The inputs are equal without swapping time and batch, so time was not meant to be first.
        equal = difference("forward", "", event.values, other.values, run.tolerance(len(run.pairs)))
        swapped = as_flax_has_it(event, other.values.shape)
        if not equal.beyond and (swapped is None or not np.allclose(swapped, other.values)):
            found.append(Cause("batch_first", event.path, "time first (batch_first=False)", "the batch first"))
    return found


def _settings(pair: Twins, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    kind = pair.torch.kind.name
    said: list[tuple[str, Any, Any]] = []
    if kind in ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"):
        eps = torch.finfo(torch.float64).eps if ours.eps is None else ours.eps
        said.append(("epsilon", f"eps={eps:g}", f"eps={theirs.epsilon:g}"))
    if kind == "GroupNorm":
        said.append(("groups", f"num_groups={ours.num_groups}", f"num_groups={theirs.num_groups}"))
    if kind == "BatchNorm":
        own = f"a new batch counts {ours.momentum:g}" if ours.momentum is not None else "all batches count alike"
        said.append(("momentum of running statistics", own, f"a new batch counts {1 - theirs.momentum:g}"))
        mine = "batch statistics" if ours.training or not ours.track_running_stats else "running statistics"
        said.append(
            ("mode of batch norm", mine, ("running" if theirs.use_running_average else "batch") + " statistics")
        )
    if kind == "Embedding" and ours.padding_idx is not None:
        row = f"padding_idx={ours.padding_idx}: row {ours.padding_idx} never learns"
        said.append(("padding_idx", row, "all rows learn (nnx.Embed has no padding_idx)"))
    if kind == "Attention":
        said.append(("heads", f"num_heads={ours.num_heads}", f"num_heads={theirs.num_heads}"))
        own_rate = ours.dropout if ours.training else 0.0
        rate = 0.0 if theirs.deterministic else theirs.dropout_rate
        said.append(("dropout", f"rate {own_rate:g}", f"rate {rate:g}"))
    if kind == "Conv":
        said += _convolution(ours, theirs)
    return said


def _convolution(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    count = len(ours.kernel_size)

    def each(value: Any) -> tuple[int, ...]:
        return (1,) * count if value is None else (value,) * count if isinstance(value, int) else tuple(value)

    said: list[tuple[str, Any, Any]] = [("stride", list(each(ours.stride)), list(each(theirs.strides)))]
    said.append(("dilation", list(each(ours.dilation)), list(each(theirs.kernel_dilation))))
    padding = theirs.padding
    reach = [(size - 1) * by for size, by in zip(ours.kernel_size, each(ours.dilation), strict=True)]
    same = [[total // 2, total - total // 2] for total in reach]
    own = same if ours.padding == "same" else [[0, 0]] * count if ours.padding == "valid" else None
    own = [[size, size] for size in each(ours.padding)] if own is None else own
    if isinstance(padding, str):
        strided = any(step > 1 for step in each(theirs.strides))
        named = {"VALID": [[0, 0]] * count, "SAME": "SAME, which depends on the size" if strided else same}
        other: Any = named.get(padding, padding)
    elif isinstance(padding, int):
        other = [[padding, padding]] * count
    else:
        other = [[one, one] if isinstance(one, int) else list(one) for one in padding]
    said.append(("padding", own, other))
    return said


# ---------------------------------------------------------------------- the forward pass


def of_forward(run: Run, found: Sequence[Difference]) -> list[Cause]:
    """Find causes in the forward pass: changes to Flax layers that remove a difference, and functions between layers
    that differ between the models."""
    causes = []
    if any(one.stage == "forward" and one.beyond for one in found):
        causes += _functions_between(run)
        causes += _flattened(run)
        causes += _attention_in_float32(run)
    alone = {one.tensor: one for one in found if one.stage == "layer alone" and one.beyond}
    for pair, event, given, output in run.calls():
        if event.path in alone and getattr(pair.flax.module, "use_fast_variance", False):
            with patch.object(pair.flax.module, "use_fast_variance", False):
                made = run_alone(pair.flax.module, given)
            values = as_flax_has_it(output, made.shape)
            # The remaining difference may be the rounding of large means, which both implementations subtract.
            if (
                values is not None
                and difference("layer alone", "", values, made, 0).relative < _MENDED * alone[event.path].relative
            ):
                causes.append(Cause("fast variance", event.path, "mean((x - mean)**2)", "mean(x**2) - mean**2"))
    return causes


def _leaky(slope: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.leaky_relu(x, slope)


# A change counts as the cause of a difference if at most this share of the difference remains.
_MENDED = 0.01

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no function": lambda x: x,
    "gelu with erf": torch.nn.functional.gelu,
    "gelu with tanh, its approximation": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu with a sigmoid, x * sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu6": torch.nn.functional.relu6,
    "silu": torch.nn.functional.silu,
    "mish": torch.nn.functional.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": torch.nn.functional.elu,
    "selu": torch.selu,
    "celu": torch.celu,
    "softplus": torch.nn.functional.softplus,
    "softsign": torch.nn.functional.softsign,
    "hard swish": torch.nn.functional.hardswish,
    "hard tanh": torch.nn.functional.hardtanh,
    **{f"leaky relu with slope {slope:g}": _leaky(slope) for slope in (0.01, 0.1, 0.2, 0.3)},
    "softmax over the last axis": lambda x: torch.softmax(x, -1),
}


def _functions_between(run: Run) -> list[Cause]:
    """Find pairs of layers between which the two models apply different known functions."""
    causes: list[Cause] = []
    before: list[tuple[Event, Array, Event]] = []
    for event, values, other in run.paired(run.theirs.by_key()):
        parted = difference("forward", "", values, other.values, run.tolerance(len(run.pairs))).beyond
        if event.role == "input" and parted:
            for past, own, theirs in reversed(before[-4:]):
                if own.shape != values.shape:
                    continue
                names = _function(own, values), _function(theirs.values, other.values)
                if None not in names and names[0] != names[1]:
                    causes.append(Cause("activation", f"between {past} and {event}", str(names[0]), str(names[1])))
                    break
        if event.role == "output":
            before.append((event, values, other))
    return causes


def _flattened(run: Run) -> list[Cause]:
    """Find images that are flattened before a linear layer. The flattened orders differ, because channels are first in
    PyTorch and last in Flax.

    For 2 channels a and b of 3 values, PyTorch has the order a1 a2 a3 b1 b2 b3, and Flax has a1 b1 a2 b2 a3 b3.
    """
    causes, channels = [], 0
    for event, values, other in run.paired(run.theirs.by_key()):
        if event.role == "output" and is_spatial(event):
            channels = event.values.shape[1]
        elif channels > 1 and event.role == "input" and values.ndim == 2 and values.shape[1] % channels == 0:
            apart = values.reshape(len(values), channels, -1).swapaxes(1, 2).reshape(values.shape)
            tolerance = run.tolerance(len(run.pairs))
            parted = difference("forward", "", values, other.values, tolerance).beyond
            if parted and not difference("forward", "", apart, other.values, tolerance).beyond:
                ours, theirs = f"{channels} channels first, as [batch, channels, ...]", "channels last"
                causes.append(Cause("order of what is flattened", f"{event}", ours, theirs))
    return causes


def _function(given: Array, made: Array) -> str | None:
    """Return the known function that maps one tensor to the other; None if no known function does."""
    # A few rows exclude most functions; the remaining function is confirmed on all rows.
    rows, found = torch.from_numpy(given.reshape(-1, given.shape[-1])), made.reshape(-1, made.shape[-1])
    scale = float(np.abs(made).max(initial=0)) or 1.0
    for name, function in _FUNCTIONS.items():
        parts = (slice(8), slice(None))
        if all(np.abs(function(rows[part]).numpy() - found[part]).max(initial=0) <= 1e-12 * scale for part in parts):
            return name
    return None


def _attention_in_float32(run: Run) -> list[Cause]:
    """Check at every call in the model whether JAX's attention equals its formula in float64."""
    original = jax.nn.dot_product_attention
    apart: list[float] = []

    def attention(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        exact = _attention(inspect.signature(original).bind(*args, **options))
        if exact is not None and not isinstance(made, jax.core.Tracer):
            one = difference("forward", "", np.asarray(exact), np.asarray(made), run.tolerance(0))
            apart.extend([one.relative] * one.beyond)
        return made

    with patch.object(jax.nn, "dot_product_attention", attention):
        run.pass_of_flax(nnx.clone(run.before[1]))
    if not apart:
        return []
    what = f"products of queries and keys in float32, which is {max(apart):.0e} off"
    return [Cause("float32 inside jax.nn.dot_product_attention", f"{len(apart)} calls", "float64", what, max(apart))]


def _attention(bound: inspect.BoundArguments) -> Any:
    """Compute attention ``[batch, steps, heads, width]`` by its formula; return None for unsupported options."""
    given = dict(bound.arguments)
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    bias, mask, scale = given.pop("bias", None), given.pop("mask", None), given.pop("scale", None)
    causal = given.pop("is_causal", False)
    given.pop("implementation", None)
    if any(values is not None and values is not False for values in given.values()):
        return None
    repeat = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(values, repeat, axis=-2) for values in (key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = allowed if mask is None else mask & allowed
    if mask is not None:
        scores = jnp.where(mask, scores, -0.7 * float(np.finfo(np.float64).max))
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1), value)


# ---------------------------------------------------------------------- loss, statistics


def of_loss(run: Run, found: Sequence[Difference]) -> list[Cause]:
    """If all layers agree, check whether one loss is a mean and the other loss is a sum."""
    parted = {one.stage for one in found if one.beyond}
    if "forward" in parted or "loss" not in parted:
        return []
    ours, theirs = run.losses
    outputs = [event.values.shape for event in run.ours.events if event.role == "output"]
    sizes = {int(np.prod(shape[:end])) for shape in outputs for end in range(1, len(shape) + 1)} - {1}
    for size in sorted(sizes | {2}):
        name, less, more = _reduction(size, sizes)
        if np.isclose(ours * size, theirs, rtol=1e-9, atol=0):
            return [Cause(name, "the loss", less, "its " * (size > 2) + more)]
        if np.isclose(theirs * size, ours, rtol=1e-9, atol=0):
            return [Cause(name, "the loss", "a " * (size > 2) + more, "its mean" if size > 2 else less)]
    if not run.theirs.events or run.unaligned():
        return []
    return [Cause("what the loss makes of equal layers", "the loss", f"{ours:.6g}", f"{theirs:.6g}")]


def _reduction(size: int, sizes: set[int]) -> tuple[str, str, str]:
    """Return a name for the factor between two losses, and descriptions of the smaller loss and of the larger loss."""
    if size > 2:
        return "reduction of the loss", "a mean", f"sum over {size}"
    # A factor of 2 or 1/2 may also be part of the loss's formula, as in half a squared error.
    return "factor of the loss", "a loss", "2 times that" + ", or its sum over 2" * (size in sizes)


def of_statistics(run: Run, found: Sequence[Difference]) -> list[Cause]:
    """Find different running variances: PyTorch updates them with n/(n-1) times the batch's variance, and Flax with the
    variance itself."""
    parted = {one.tensor for one in found if one.stage == "statistics" and one.beyond}
    causes = []
    events = run.ours.by_key()
    befores = {pair.torch.path: pair for pair in run.pairs}
    for path, pair in befores.items():
        event = events.get((path, "input", 0))
        if f"{path}.var" not in parted or event is None or pair.torch.module.momentum is None:
            continue
        axes = tuple(axis for axis in range(event.values.ndim) if axis != 1)
        count, variance = event.values.size // event.values.shape[1], event.values.var(axis=axes)
        own, other = pair.torch.module.momentum, 1 - pair.flax.module.momentum
        before = array_of(dict(run.before[0].named_buffers())[f"{path}.running_var" if path else "running_var"])
        ours = np.allclose(
            arrays_of(pair.torch)["running_var"], before * (1 - own) + own * variance * count / (count - 1)
        )
        theirs = np.allclose(arrays_of(pair.flax)["var"], before * (1 - other) + other * variance)
        if ours and theirs:
            causes.append(
                Cause("running variance", path, f"of a sample, times {count}/{count - 1}", "of the batch as it is")
            )
    return causes


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
    gradients of the batch, and multiples of them (times 1/2, 0, -1, a million and so on). If a difference is larger
    than rounding explains, the function searches for known causes, and confirms each cause by a check. If updates
    differ, both optimizers receive other gradients that reveal their settings. The two models are not changed.

    Args:
        torch_module: A PyTorch model in the mode in which it is trained.
        flax_module: The Flax model.
        batch: Arrays, in any nesting of a batch. Floats are converted to float64, and integers to int64.
        torch_loss: A function of the PyTorch model and the batch as tensors that returns a scalar.
        flax_loss: A function of the Flax model and the batch as JAX arrays that returns a scalar. The function should
            not call compiled functions, because layers inside them cannot be observed.
        torch_optimizer: A function that creates an optimizer for a list of parameters. If an optimizer is missing,
            updates are not compared. If the training does something before or after each step, such as clipping or a
            schedule, add it as a hook of the optimizer (``register_step_pre_hook``, ``register_step_post_hook``).
        flax_optimizer: An ``optax.GradientTransformation``, which is compiled.
        names: Paths in the PyTorch model, mapped to paths in the Flax model; see ``transfer``.
        updates: The number of compared updates, at least 1. A schedule of the learning rate is found only if it changes
            within these updates.

    Returns:
        The compared tensors, the first difference beyond rounding, and its causes; ``print`` shows a report.

    Raises:
        SchemaError: An error of ``transfer``.
        ConfigError: Only one optimizer is given, a loss is not a scalar, or ``updates`` is below 1.
    """
    if updates < 1:
        raise ConfigError(f"updates: expected 1 or more, found {updates}")
    if (torch_optimizer is None) != (flax_optimizer is None):
        raise ConfigError("optimizers: expected one of each framework or none at all, found one")
    # Copies of the Flax model have their layers in another order, so pairs are determined on the original models.
    names = {pair.torch.path: pair.flax.path for pair in twins(torch_module, flax_module, names=names)}
    with jax.enable_x64(True):
        own = copy.deepcopy(torch_module).double()
        other = as_float64(flax_module)
        run = Run(own, other, batch, torch_loss, flax_loss, names)
        found = run.initial_weights()
        transfer(own, other, names=names)
        found += run.forward() + run.alone() + run.loss() + run.gradients() + run.statistics()
        known = of_weights(found) + of_layers(run) + of_forward(run, found)
        known += of_loss(run, found) + of_statistics(run, found)
        if torch_optimizer is not None:
            stepping = Stepping(run, torch_optimizer, flax_optimizer, updates)
            found += stepping.compare()
            known += of_update(stepping, found)
    return Comparison(tuple(found), tuple(dict.fromkeys(known)), tuple(run.unaligned()))
