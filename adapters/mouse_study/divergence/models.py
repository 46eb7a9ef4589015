"""The layers of a model of either framework, and their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from flax import nnx

from mouse_core import SchemaError
from mouse_study.divergence.layers import FOREIGN, KINDS, PARAMETER, Array, Arrays, Kind, is_foreign


@dataclass(frozen=True)
class Layer:
    """A layer with weights, or a parameter by itself.

    Args:
        path: Where it is, names joined by dots; containers that only one framework has are left out.
        kind: What it is.
        module: The layer, or whose the parameter is.
        arrays: PyTorch's tensors or Flax's variables, by the names that the kind knows.
    """

    path: str
    kind: Kind
    module: Any
    arrays: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays."""
        return {name: tuple(values.shape) for name, values in self.arrays.items()}

    def __str__(self) -> str:
        of = type(self.module)
        package = "torch.nn" if isinstance(self.module, torch.nn.Module) else "nnx"
        what = f"a parameter of {package}.{of.__name__}" if self.kind is PARAMETER else f"{package}.{of.__name__}"
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.path!r} ({what}: {shapes})"


def torch_layers(module: torch.nn.Module, path: str = "") -> Iterator[Layer]:
    """The layers of a PyTorch model, and its parameters that are in none, in the order in which they were made."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.torch)), None)
    if kind is not None:
        yield from (
            _recurrent_layers(module, kind, path)
            if kind.name in ("GRU", "LSTM")
            else [Layer(path, kind, module, _tensors(module))]
        )
        return
    if is_foreign(module) and any(parameter is not None for parameter in module._parameters.values()):
        yield Layer(path, FOREIGN, module, _tensors(module))
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Layer(_joined(path, name), PARAMETER, module, {"value": parameter})
    for name, child in module._modules.items():
        if child is not None:
            yield from torch_layers(child, _joined(path, name))


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(module.named_parameters())
    buffers = {name: buffer for name, buffer in module.named_buffers() if name != "num_batches_tracked"}
    return tensors | buffers


def _recurrent_layers(module: Any, kind: Kind, path: str) -> Iterator[Layer]:
    tensors = _tensors(module)
    if isinstance(module, torch.nn.GRUCell | torch.nn.LSTMCell):
        yield Layer(path, kind, module, tensors)
        return
    if module.bidirectional or getattr(module, "proj_size", 0):
        raise SchemaError(
            f"{path!r}: expected a torch.nn.{kind.name} that goes one way and projects nothing, which is what Flax has"
        )
    for number in range(module.num_layers):
        own = {name.removesuffix(f"_l{number}"): values for name, values in tensors.items()}
        own = {name: values for name, values in own.items() if "_l" not in name}
        yield Layer(path if module.num_layers == 1 else _joined(path, str(number)), kind, module, own)


def flax_layers(module: Any, path: str = "") -> Iterator[Layer]:
    """The layers of a Flax model, and its parameters that are in none, in the order in which they were made."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.flax)), None)
    if kind is not None:
        yield Layer(path, kind, module, dict(_variables(module, "")))
        return
    if is_foreign(module) and any(isinstance(child, nnx.Param) for _, child in _children(module)):
        yield Layer(path, FOREIGN, module, dict(_variables(module, "")))
        return
    for name, child in _children(module):
        inside = isinstance(module, nnx.Sequential) and name == "layers"
        inside = inside or (isinstance(module, nnx.RNN) and name == "cell")
        below = path if inside else _joined(path, name)
        if isinstance(child, nnx.Param):
            yield Layer(below, PARAMETER, module, {"value": child})
        elif not isinstance(child, nnx.Variable):
            yield from flax_layers(child, below)


def _variables(module: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in _children(module):
        if isinstance(child, nnx.Param | nnx.BatchStat):
            yield _joined(path, name), child
        elif not isinstance(child, nnx.Variable):
            yield from _variables(child, _joined(path, name))


def _children(module: Any) -> list[tuple[str, Any]]:
    if isinstance(module, Mapping):
        children: dict[str, Any] = {str(name): child for name, child in module.items()}
    elif isinstance(module, list | tuple):
        children = {str(number): child for number, child in enumerate(module)}
    else:
        # What Flax keeps of its own there is called _pytree__state or _object__state.
        own = vars(module).items()
        children = {name: child for name, child in own if not name.startswith(("_pytree__", "_object__"))}
    kept = (nnx.Module, nnx.Variable, list, tuple, dict)
    return [(name, child) for name, child in children.items() if isinstance(child, kept)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def tensor_name(path: str, name: str) -> str:
    """Return the full name of a layer's array; a parameter outside any layer has its own path as its name."""
    return f"{path}.{name}".removesuffix(".value")


def arrays_of(layer: Layer, *, zeros: bool = False) -> Arrays:
    """The arrays of a layer on the host, or zeros of their shapes."""
    if zeros:
        return {name: np.zeros(shape, np.float32) for name, shape in layer.shapes.items()}
    return {name: array_of(values) for name, values in layer.arrays.items()}


def array_of(values: Any) -> Array:
    """A tensor of PyTorch's, a variable of Flax's or an array of JAX's on the host."""
    if isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        found: Array = tensor.numpy()
        return found
    return np.asarray(values.get_value() if isinstance(values, nnx.Variable) else values)
