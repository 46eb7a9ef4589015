"""Recording of layer inputs and outputs in one forward pass of either framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from mouse_core.dtypes import number_kind
from mouse_study.divergence.models import Array, array_of
from mouse_study.divergence.weights import Twins


@dataclass(frozen=True)
class Event:
    """A tensor that a layer was given or gave.

    Args:
        path: Of the layer, in PyTorch's model.
        role: "input" or "output".
        number: Which call of the layer it was.
        values: The tensor.
        module: The layer.
        alone: Whether the layer was given nothing else, so that it can be run by itself.
    """

    path: str
    role: str
    number: int
    values: Array
    module: Any
    alone: bool = True

    @property
    def key(self) -> tuple[str, str, int]:
        """The identity of the event in its forward pass: path, role and number."""
        return self.path, self.role, self.number

    def __str__(self) -> str:
        again = f", call {self.number + 1}" if self.number else ""
        return f"{self.role} of {self.path or 'the model'}{again}"


@dataclass
class Recording:
    """The events of a pass, in their order."""

    events: list[Event] = field(default_factory=list)
    summands: dict[str, float] = field(default_factory=dict)
    """By path: how much the gradient of a bias of the layer sums up, signs aside."""
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, path: str, role: str, values: Any, module: Any, *, alone: bool = True) -> None:
        """Note a tensor, if it is one that has values."""
        if values is None or isinstance(values, jax.core.Tracer) or not hasattr(values, "dtype"):
            return
        number = self._calls[path, role]
        self._calls[path, role] += 1
        found = np.array(array_of(values))
        found = found.astype(np.float64) if number_kind(found.dtype) == "f" else found  # of bfloat16, too
        self.events.append(Event(path, role, number, found, module, alone))

    def by_key(self) -> dict[tuple[str, str, int], Event]:
        """The events by what tells them apart."""
        return {event.key: event for event in self.events}


def _first_tensor(values: Any) -> Any:
    """Return the main output of a PyTorch layer: the first of a tuple, as in LSTM and attention."""
    return values[0] if isinstance(values, tuple) else values


@contextmanager
def torch_recording(pairs: Sequence[Twins]) -> Iterator[Recording]:
    """Note what the layers of PyTorch's model are given and give."""
    recording = Recording()
    layers: dict[int, list[Twins]] = {}
    for pair in pairs:
        layers.setdefault(id(pair.torch.module), []).append(pair)
    hooks = []
    for own in layers.values():
        if own[0].torch.kind.torch:
            module = own[0].torch.module
            # Of a GRU of several layers the first has the input, and the last the output.
            hooks.append(module.register_forward_pre_hook(_before(recording, own[0].torch.path), with_kwargs=True))
            hooks.append(module.register_forward_hook(_after(recording, own[-1].torch.path)))
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _before(recording: Recording, path: str) -> Callable[[Any, Any, Any], None]:
    def note(module: Any, args: Any, kwargs: Any) -> None:
        given = [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
        same = all(value is given[0] for value in given[1:])
        recording.add(path, "input", given[0] if given else None, module, alone=same and not _says_more(kwargs))

    return note


def _says_more(kwargs: Mapping[str, Any]) -> bool:
    plain = ("need_weights", "average_attn_weights", "query", "key", "value", "input")
    return any(name not in plain and value not in (None, False) for name, value in kwargs.items())


def _after(recording: Recording, path: str) -> Callable[[Any, Any, Any], None]:
    def note(module: Any, args: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        recording.add(path, "output", tensor, module)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            hook: Any = tensor.register_hook
            hook(_summed(recording, path, module))

    return note


def _summed(recording: Recording, path: str, module: Any) -> Callable[[torch.Tensor], None]:
    """Adds up the sizes of a layer's gradients over all axes but that of channels; the largest sum counts."""

    def note(gradient: torch.Tensor) -> None:
        spatial = isinstance(module, torch.nn.modules.conv._ConvNd | torch.nn.modules.batchnorm._BatchNorm)
        spatial = (spatial or isinstance(module, torch.nn.GroupNorm)) and gradient.ndim > 2
        sizes = gradient.detach().abs().movedim(1 if spatial else -1, 0).flatten(1).sum(1)
        recording.summands[path] = recording.summands.get(path, 0.0) + float(sizes.max())

    return note


@contextmanager
def flax_recording(module: Any, pairs: Sequence[Twins]) -> Iterator[Recording]:
    """Note what the layers of Flax's model are given and give, by PyTorch's paths.

    Flax has no hooks, so the classes' ``__call__`` are others for a while. What is traced (a cell in the scan of an
    ``nnx.RNN``) has no values, and is left out; the RNN stands for its cell.
    """
    recording = Recording()
    paths = {id(pair.flax.module): pair.torch.path for pair in pairs if pair.flax.kind.flax}
    called = {id(pair.flax.module): pair.flax.module for pair in pairs if pair.flax.kind.flax}
    for _, found in nnx.iter_modules(module):
        if isinstance(found, nnx.RNN) and id(found.cell) in paths:
            paths[id(found)] = paths.pop(id(found.cell))
            called[id(found)] = found
    classes = {type(one) for one in called.values()}
    own = {one: one.__dict__.get("__call__") for one in classes}

    def wrapped(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None:
                return original(self, *args, **kwargs)
            given = [*args, *(value for value in kwargs.values() if hasattr(value, "dtype"))]
            recording.add(path, "input", given[0] if given else None, self)
            output = original(self, *args, **kwargs)
            # Recurrent layers give what they carry first.
            last = output[-1] if isinstance(output, tuple) else output
            recording.add(path, "output", last, self)
            return output

        return call

    made = {one: wrapped(one.__call__) for one in classes}
    try:
        for one, call in made.items():
            one.__call__ = call
        yield recording
    finally:
        for one, before in own.items():
            if before is None:
                del one.__call__
            else:
                one.__call__ = before


def is_spatial(event: Event) -> bool:
    """Whether a tensor of PyTorch's has channels before what is convolved."""
    layers = torch.nn.modules.conv._ConvNd | torch.nn.modules.batchnorm._BatchNorm | torch.nn.GroupNorm
    return event.values.ndim > 2 and isinstance(event.module, layers)


def as_flax_has_it(event: Event, shape: tuple[int, ...]) -> Array | None:
    """A tensor of PyTorch's as Flax lays it out; None if that cannot be.

    Channels come last in Flax: [batch, channels, height, width] becomes [batch, height, width, channels]. Recurrent
    layers of PyTorch's may have time before the batch.
    """
    values = event.values
    if is_spatial(event):
        values = np.moveaxis(values, 1, -1)
    elif values.ndim == 3 and getattr(event.module, "batch_first", True) is False:
        values = np.swapaxes(values, 0, 1)
    if values.shape == shape:
        return values
    return values.reshape(shape) if values.size == int(np.prod(shape)) and 1 in (*values.shape, *shape) else None
