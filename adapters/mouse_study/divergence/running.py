"""Executes a training step of two implementations in float64, up to the gradients, and compares their tensors.

The inputs and outputs of layers are recorded in one forward pass of each framework.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from mouse_core import ConfigError
from mouse_core.dtypes import number_kind
from mouse_core.nested import map_tree
from mouse_study.divergence.models import (
    Array,
    Arrays,
    Difference,
    Layer,
    Stage,
    array_of,
    arrays_of,
    difference,
    flax_layers,
    tensor_name,
)
from mouse_study.divergence.weights import Twins, twins


@dataclass(frozen=True)
class Event:
    """The input or output of a layer in one call.

    Args:
        path: The path of the layer in the PyTorch model.
        role: "input" or "output".
        number: The index of the call of the layer, from 0.
        values: The tensor.
        module: The layer.
        alone: Whether the tensor is the layer's only input, so that the layer can be run separately.
    """

    path: str
    role: str
    number: int
    values: Array
    module: Any
    alone: bool = True

    @property
    def key(self) -> tuple[str, str, int]:
        """The event's identity in its forward pass: path, role and index of the call."""
        return self.path, self.role, self.number

    def __str__(self) -> str:
        again = f", call {self.number + 1}" if self.number else ""
        return f"{self.role} of {self.path or 'the model'}{again}"


@dataclass
class Recording:
    """The events of a pass, in order."""

    events: list[Event] = field(default_factory=list)
    summands: dict[str, float] = field(default_factory=dict)
    """By the path of a layer, the sum of the absolute values of the terms in the gradient of the layer's bias."""
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, path: str, role: str, values: Any, module: Any, *, alone: bool = True) -> None:
        """Record a tensor, unless it is None, or is traced and thus has no values."""
        if values is None or isinstance(values, jax.core.Tracer) or not hasattr(values, "dtype"):
            return
        number = self._calls[path, role]
        self._calls[path, role] += 1
        found = np.array(array_of(values))
        found = found.astype(np.float64) if number_kind(found.dtype) == "f" else found  # also for bfloat16
        self.events.append(Event(path, role, number, found, module, alone))

    def by_key(self) -> dict[tuple[str, str, int], Event]:
        """Return the events by their keys."""
        return {event.key: event for event in self.events}


@contextmanager
def torch_recording(pairs: Sequence[Twins]) -> Iterator[Recording]:
    """Record the inputs and outputs of the layers of the PyTorch model."""
    recording = Recording()
    layers: dict[int, list[Twins]] = {}
    for pair in pairs:
        layers.setdefault(id(pair.torch.module), []).append(pair)
    hooks = []
    for own in layers.values():
        if own[0].torch.kind.torch:
            module = own[0].torch.module
            # In a GRU of several layers, the input belongs to the first layer, and the output to the last.
            hooks.append(
                module.register_forward_pre_hook(partial(_record_input, recording, own[0].torch.path), with_kwargs=True)
            )
            hooks.append(module.register_forward_hook(partial(_record_output, recording, own[-1].torch.path)))
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _record_input(recording: Recording, path: str, module: Any, args: Any, kwargs: Any) -> None:
    """Record the input of a PyTorch layer, as a hook before its forward pass."""
    given = [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
    plain = ("need_weights", "average_attn_weights", "query", "key", "value", "input")
    options = any(name not in plain and value not in (None, False) for name, value in kwargs.items())
    same = all(value is given[0] for value in given[1:])
    recording.add(path, "input", given[0] if given else None, module, alone=same and not options)


def _record_output(recording: Recording, path: str, module: Any, args: Any, output: Any) -> None:
    """Record the output of a PyTorch layer (the first item of a tuple, as from LSTM and attention), and register a hook
    that records the output's gradient.
    """
    tensor = output[0] if isinstance(output, tuple) else output
    recording.add(path, "output", tensor, module)
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        hook: Any = tensor.register_hook
        hook(partial(_record_gradient, recording, path, module))


def _record_gradient(recording: Recording, path: str, module: Any, gradient: torch.Tensor) -> None:
    """Add up the absolute gradient of an output over all axes except the channels; record the largest sum."""
    spatial = isinstance(module, _SPATIAL) and gradient.ndim > 2
    sizes = gradient.detach().abs().movedim(1 if spatial else -1, 0).flatten(1).sum(1)
    recording.summands[path] = recording.summands.get(path, 0.0) + float(sizes.max())


@contextmanager
def flax_recording(module: Any, pairs: Sequence[Twins]) -> Iterator[Recording]:
    """Record the inputs and outputs of the layers of the Flax model, by PyTorch's paths.

    Flax has no hooks, so ``__call__`` of the layers' classes is patched during the pass. Traced tensors (of a cell in
    the scan of an ``nnx.RNN``) have no values and are left out; the RNN is recorded instead of its cell.
    """
    recording = Recording()
    paths = {id(pair.flax.module): pair.torch.path for pair in pairs if pair.flax.kind.flax}
    called = {id(pair.flax.module): pair.flax.module for pair in pairs if pair.flax.kind.flax}
    for _, found in nnx.iter_modules(module):
        if isinstance(found, nnx.RNN) and id(found.cell) in paths:
            paths[id(found)] = paths.pop(id(found.cell))
            called[id(found)] = found
    classes = {type(one) for one in called.values()}

    def wrapped(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None:
                return original(self, *args, **kwargs)
            given = [*args, *(value for value in kwargs.values() if hasattr(value, "dtype"))]
            recording.add(path, "input", given[0] if given else None, self)
            output = original(self, *args, **kwargs)
            # Recurrent layers return their carry first.
            last = output[-1] if isinstance(output, tuple) else output
            recording.add(path, "output", last, self)
            return output

        return call

    calls = [(one, wrapped(one.__call__)) for one in classes]
    with ExitStack() as stack:
        for one, call in calls:
            stack.enter_context(patch.object(one, "__call__", call))
        yield recording


# Kinds of layers whose PyTorch tensors have channels before the spatial axes.
_SPATIAL = torch.nn.modules.conv._ConvNd | torch.nn.modules.batchnorm._BatchNorm | torch.nn.GroupNorm


def as_flax_has_it(event: Event, shape: tuple[int, ...]) -> Array | None:
    """Return a tensor of PyTorch in the layout of Flax; None if it does not fit the shape.

    Channels are last in Flax: [batch, channels, height, width] becomes [batch, height, width, channels]. In recurrent
    layers of PyTorch, the axis of time may precede the axis of the batch; these axes are swapped.
    """
    values = event.values
    if values.ndim > 2 and isinstance(event.module, _SPATIAL):
        values = np.moveaxis(values, 1, -1)
    elif values.ndim == 3 and getattr(event.module, "batch_first", True) is False:
        values = np.swapaxes(values, 0, 1)
    if values.shape == shape:
        return values
    return values.reshape(shape) if values.size == int(np.prod(shape)) and 1 in (*values.shape, *shape) else None


EPS = float(np.finfo(np.float64).eps)


def as_float64(module: Any) -> Any:
    """Return a copy of a Flax model with float64 weights; a layer's own ``dtype`` for computations is kept."""
    made = nnx.clone(module)
    for layer in flax_layers(made):
        for variable in layer.arrays.values():
            if jnp.issubdtype(variable.get_value().dtype, jnp.floating):
                variable.set_value(variable.get_value().astype(jnp.float64))
        # ``param_dtype`` determines the dtype of the carry of recurrent cells, and of the output of an embedding.
        own = getattr(layer.module, "param_dtype", None)
        if own is not None and jnp.issubdtype(own, jnp.floating):
            if isinstance(layer.module, nnx.Embed) and layer.module.dtype == own:
                layer.module.dtype = jnp.dtype(jnp.float64)
            layer.module.param_dtype = jnp.float64
    return made


@dataclass
class Run:
    """Both models, and the recordings of a pass through each.

    Attributes:
        pairs: The corresponding layers.
        ours: The recording of the PyTorch model.
        theirs: The recording of the Flax model, by PyTorch's paths.
        losses: The losses of both models.
    """

    torch_module: Any
    flax_module: Any
    batch: Any
    torch_loss: Callable[[Any, Any], Any]
    flax_loss: Callable[[Any, Any], Any]
    names: Mapping[str, str] | None
    ours: Recording = field(default_factory=Recording)
    theirs: Recording = field(default_factory=Recording)
    losses: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.pairs = twins(self.torch_module, self.flax_module, names=self.names)
        self.torch_batch = map_tree(lambda values: torch.from_numpy(_widened(values)), self.batch)
        self.flax_batch = map_tree(lambda values: jnp.asarray(_widened(values)), self.batch)
        elements = [1]
        map_tree(lambda values: elements.append(np.size(values)), self.batch)
        widths = [max(shape, default=1) for pair in self.pairs for shape in pair.flax.shapes.values()]
        # The longest sum runs over all steps of a batch, or over the inputs of a layer.
        self.longest = max([*elements, *widths])
        self.before: Any = None
        self.flax_graph: Any = None
        self.flax_params: Any = None
        self.flax_rest: Any = None

    def tolerance(self, depth: int) -> float:
        """Return the difference that rounding explains in a tensor after ``depth`` layers.

        If n products are added in another order, their sum changes by about sqrt(n) * eps, and almost never by more
        than 8 times this number. The errors of layers add up. For 1,024 products after 9 layers, the tolerance is 8 *
        32 * 10 * 2.2e-16 = 5.7e-13.
        """
        return 8 * EPS * float(np.sqrt(self.longest)) * (1 + depth)

    # ------------------------------------------------------------------ stages

    def initial_weights(self) -> list[Difference]:
        """Compare the initial weights: check whether they are equal, or drawn from equal distributions."""
        found: list[Difference] = []
        for pair in self.pairs:
            theirs = arrays_of(pair.flax)
            for name, ours in pair.to_flax(arrays_of(pair.torch), "updates").items():
                found.append(_spreads(tensor_name(pair.torch.path, name), ours, theirs[name]))
        with torch.no_grad():
            own_loss = float(self.torch_loss(copy.deepcopy(self.torch_module), self.torch_batch))
        other_loss = self._flax_loss(nnx.clone(self.flax_module))
        parted = any(one.beyond for one in found)
        same = all(one.absolute == 0 for one in found)
        tolerance = 0.0 if parted else self.tolerance(len(self.pairs)) if same else float("inf")
        if not same:
            name, apart = "loss of each with its own weights", abs(own_loss - other_loss)
            found.append(Difference("initial weights", name, apart, abs(own_loss), tolerance))
        return found

    def forward(self) -> list[Difference]:
        """Compare the inputs and outputs of layers in the forward pass."""
        self.before = copy.deepcopy(self.torch_module), nnx.clone(self.flax_module)
        self.flax_graph, self.flax_params, self.flax_rest = split_params(self.flax_module)
        self.torch_module.zero_grad()
        with torch_recording(self.pairs) as self.ours:
            loss = self.torch_loss(self.torch_module, self.torch_batch)
        _check_scalar("torch_loss", loss)
        loss.backward()
        with flax_recording(
            self.flax_module, twins(self.torch_module, self.flax_module, names=self.names)
        ) as self.theirs:
            their_loss = self._flax_loss(self.flax_module)
        self.losses = float(loss.detach()), their_loss
        others = self.theirs.by_key()
        found: list[Difference] = []
        for event in self.ours.events:
            other = others.get(event.key)
            values = None if other is None else as_flax_has_it(event, other.values.shape)
            if other is not None and values is not None:
                found.append(self._difference("forward", str(event), values, other.values, depth=len(found)))
        return found

    def unaligned(self) -> list[str]:
        """Describe the outputs whose shapes do not correspond in the two frameworks."""
        others = self.theirs.by_key()
        return [
            f"{event}: {list(event.values.shape)} in PyTorch, {list(others[event.key].values.shape)} in Flax"
            for event in self.ours.events
            if event.key in others and as_flax_has_it(event, others[event.key].values.shape) is None
        ]

    def alone(self) -> list[Difference]:
        """Compare each layer separately: Flax's layer runs on the input of PyTorch's layer."""
        found = []
        ours = self.ours.by_key()
        # The layers before the pass, because the pass changed the running statistics of batch norms.
        for pair in twins(*self.before, names=self.names):
            path = pair.torch.path
            event, output = ours.get((path, "input", 0)), ours.get((path, "output", 0))
            if event is None or output is None or not event.alone or pair.torch.kind.name in ("GRU", "LSTM"):
                continue
            try:
                made: Any = pair.flax.module(jnp.asarray(_channels_last(event)))
            except (TypeError, ValueError):
                continue
            made = array_of(made[-1] if isinstance(made, tuple) else made)
            values = as_flax_has_it(output, made.shape)
            if values is not None:
                found.append(self._difference("layer alone", path, values, made, depth=0))
        return found

    def loss(self) -> list[Difference]:
        """Compare the losses."""
        return [self._difference("loss", "the loss", *map(np.asarray, self.losses), depth=len(self.pairs))]

    def gradients(self) -> list[Difference]:
        """Compare the gradients of all weights, from the last layer to the first."""
        ours = {pair.torch.path: pair.to_flax(gradients_of(pair.torch), "gradients") for pair in self.pairs}
        wanted = nnx.DiffState(0, nnx.Param)
        grads = nnx.grad(self.flax_loss, argnums=wanted)(nnx.clone(self.before[1]), self.flax_batch)
        theirs = self.in_flax(grads)
        largest = max(
            [float(np.abs(values).max(initial=0)) for own in ours.values() for values in own.values()] or [0.0]
        )
        found: list[Difference] = []
        for pair in reversed(self.pairs):
            for name, values in ours[pair.torch.path].items():
                tensor, other = tensor_name(pair.torch.path, name), theirs[pair.torch.path][name]
                depth = len(self.pairs) + len(found)
                least = max(1e-3 * largest, self._summands(pair.torch.path, name))
                found.append(self._difference("gradients", tensor, values, other, depth=depth, least=least))
        return found

    def _summands(self, path: str, name: str) -> float:
        """Return the sum of the absolute values of a gradient's terms; rounding errors are relative to this sum, even
        if the terms cancel.

        For example, the bias before a batch norm has a gradient of 0: with the terms 0.5, -0.2 and -0.3, rounding
        errors are relative to 1.0. The terms in the gradient of a weight are products with the layer's input.
        """
        summed, given = self.ours.summands.get(path, 0.0), self.ours.by_key().get((path, "input", 0))
        if name.endswith("bias") or given is None or given.values.dtype.kind != "f":
            return summed
        return summed * max(1.0, float(np.abs(given.values).max(initial=0)))

    def statistics(self) -> list[Difference]:
        """Compare the running statistics of batch norms after the pass."""
        found = []
        for pair in self.pairs:
            if pair.torch.kind.name == "BatchNorm":
                theirs = arrays_of(pair.flax)
                for name, values in pair.to_flax(arrays_of(pair.torch)).items():
                    if name in ("mean", "var"):
                        tensor = f"{pair.torch.path}.{name}"
                        found.append(
                            self._difference("statistics", tensor, values, theirs[name], depth=len(self.pairs))
                        )
        return found

    # ------------------------------------------------------------------ helpers

    def in_flax(self, params: Any) -> dict[str, Arrays]:
        """Return Flax parameters, or gradients of the same structure, by PyTorch's path."""
        merged = nnx.merge(self.flax_graph, params, self.flax_rest)
        paths = {pair.flax.path: pair.torch.path for pair in self.pairs}
        return {paths[layer.path]: arrays_of(layer) for layer in flax_layers(merged)}

    def _flax_loss(self, module: Any) -> float:
        loss = self.flax_loss(module, self.flax_batch)
        _check_scalar("flax_loss", loss)
        return float(loss)

    def _difference(
        self, stage: Stage, tensor: str, ours: Array, theirs: Array, *, depth: int, least: float = 0.0
    ) -> Difference:
        return difference(stage, tensor, ours, theirs, self.tolerance(depth), least=least)


def split_params(module: Any) -> tuple[Any, Any, Any]:
    """Split a Flax model into its graph definition, its parameters, and all other state."""
    split: Any = nnx.split
    graph, params, rest = split(module, nnx.Param, ...)
    return graph, params, rest


def _channels_last(event: Event) -> Array:
    shape = event.values.shape
    moved = as_flax_has_it(event, (shape[0], *shape[2:], shape[1])) if len(shape) > 2 else None
    if moved is not None and type(event.module).__name__.startswith(("Conv", "BatchNorm", "GroupNorm")):
        return moved
    if len(shape) == 3 and getattr(event.module, "batch_first", True) is False:
        return np.swapaxes(event.values, 0, 1)
    return event.values


def _spreads(tensor: str, ours: Array, theirs: Array) -> Difference:
    """Compare two draws of initial weights: whether values are equal, or have equal spreads.

    The spread of n drawn values has a relative error of 1/sqrt(2 n); the spreads of two draws differ by 5/sqrt(n) about
    once in millions of draws. Constants are not drawn, so they are compared exactly.
    """
    # Weights that were copied in float32 are equal in float32.
    if ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-6, atol=0):
        return Difference("initial weights", tensor, 0.0, 1.0, 0.0)
    if ours.shape != theirs.shape:
        return Difference("initial weights", tensor, float("inf"), 1.0, 0.0)
    spreads = float(np.sqrt(np.mean(ours**2))), float(np.sqrt(np.mean(theirs**2)))
    constant = np.ptp(ours) == 0 or np.ptp(theirs) == 0
    tolerance = 0.0 if constant else 5 / float(np.sqrt(ours.size))
    return Difference("initial weights", tensor, abs(spreads[0] - spreads[1]), max(spreads), tolerance)


def gradients_of(layer: Layer) -> Arrays:
    """Return the gradients of a PyTorch layer's parameters; zeros for a parameter without a gradient."""
    return {
        name: np.zeros(values.shape) if values.grad is None else array_of(values.grad)
        for name, values in layer.arrays.items()
        if isinstance(values, torch.nn.Parameter)
    }


def _widened(values: Any) -> Array:
    array = np.asarray(values)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(array.dtype.kind)
    return np.array(array if wide is None else array.astype(wide))


def _check_scalar(name: str, loss: Any) -> None:
    if getattr(loss, "shape", None) != ():
        raise ConfigError(f"{name}: expected a scalar, found {getattr(loss, 'shape', loss)!r:.80}")
