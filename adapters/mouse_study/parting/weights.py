"""Weights from PyTorch to Flax NNX and back: which layers are each other's twins, and what has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx

from mouse_core import ConfigError, SchemaError
from mouse_study.parting.layers import KINDS, PARAMETER, Array, Arrays, Kind, What


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


@dataclass(frozen=True)
class Twins:
    """A layer of PyTorch's and the one of Flax's that is to be the same."""

    torch: Layer
    flax: Layer

    def to_flax(self, arrays: Arrays, what: What = "weights") -> Arrays:
        """Arrays of PyTorch's layer (weights, gradients, updates) as they are laid out in Flax's."""
        return self.torch.kind.to_flax(arrays, self.flax.shapes, what)

    def to_torch(self, arrays: Arrays) -> Arrays:
        """Weights of Flax's layer as they are laid out in PyTorch's."""
        return self.flax.kind.to_torch(arrays, self.torch.shapes)


def transfer(source: Any, destination: Any, *, names: Mapping[str, str] | None = None) -> None:
    """Copy the weights of a model to one of the other framework, from PyTorch to Flax NNX or back.

    It knows Linear, Embedding, LayerNorm, RMSNorm, GroupNorm, BatchNorm with its running statistics, convolutions,
    MultiheadAttention, GRU and LSTM of any number of layers and their cells, and parameters by themselves, nested in
    any way. Dtypes are kept: the destination gets those of the source. There and back changes no bit, but that two
    biases of a recurrent layer come back as their sum and zeros.

    Layers are twins where their paths are equal, such as ``blocks.0.linear`` for ``blocks[0].linear``; ``layers`` of a
    ``nnx.Sequential`` and ``cell`` of a ``nnx.RNN`` do not count, and layer 2 of a GRU of several is ``gru.2``. Of what
    is left, one layer of a kind and shape here and one there are twins, too. A layer of PyTorch's whose weights are
    those of another one needs none.

    Args:
        source: A ``torch.nn.Module`` or a ``flax.nnx.Module``.
        destination: One of the other framework, which is changed.
        names: Paths in PyTorch's model, or beginnings of them, and what they are in Flax's, in both directions.

    Raises:
        SchemaError: A layer that has no twin, or one of another kind or shape; the message names path, kind and
            shapes. Nothing has been copied then.
        ConfigError: These are not two models of two frameworks, or float64 is to go to JAX without x64.
    """
    if isinstance(source, torch.nn.Module) and isinstance(destination, nnx.Module):
        writes = _to_flax(twins(source, destination, names=names))
    elif isinstance(source, nnx.Module) and isinstance(destination, torch.nn.Module):
        writes = _to_torch(twins(destination, source, names=names))
    else:
        raise ConfigError(
            "transfer: expected a torch.nn.Module and a flax.nnx.Module, found "
            f"{type(source).__name__} and {type(destination).__name__}"
        )
    for write in writes:
        write()


def twins(torch_module: Any, flax_module: Any, *, names: Mapping[str, str] | None = None) -> list[Twins]:
    """The layers of two models that are to be the same, in the order of PyTorch's.

    Args:
        torch_module: A ``torch.nn.Module``.
        flax_module: A ``flax.nnx.Module``.
        names: As in ``transfer``.

    Raises:
        SchemaError: As ``transfer``.
        ConfigError: ``names`` has a path that PyTorch's model has not.
    """
    ours = {layer.path: layer for layer in torch_layers(torch_module)}
    theirs = {layer.path: layer for layer in flax_layers(flax_module)}
    path_in_flax = _renamed(ours, names or {})
    pairs = {path: theirs.pop(other) for path, other in path_in_flax.items() if other in theirs}
    left = [layer for path, layer in ours.items() if path not in pairs]
    for layer in left.copy():
        alike = [other for other in theirs.values() if _alike(layer, other)]
        if len(alike) == 1 and sum(_alike(own, alike[0]) for own in left) == 1:
            pairs[layer.path] = theirs.pop(alike[0].path)
    shared = {id(values) for path in pairs for values in ours[path].arrays.values()}
    for layer in [layer for layer in left if layer.path not in pairs]:
        if all(id(values) in shared for values in layer.arrays.values()):  # tied to one that has a twin
            del ours[layer.path]
    alone = [layer for layer in left if layer.path in ours and layer.path not in pairs]
    if alone or theirs:
        raise SchemaError(_without_twins(alone, list(theirs.values())))
    found = [Twins(layer, pairs[path]) for path, layer in ours.items()]
    for pair in found:
        if pair.torch.kind is not pair.flax.kind:
            raise SchemaError(
                f"layers: expected two of one kind, found {pair.torch} in PyTorch and {pair.flax} in Flax"
            )
    return found


def _renamed(layers: Mapping[str, Layer], names: Mapping[str, str]) -> dict[str, str]:
    """What each path of PyTorch's is to be in Flax's model; the longest beginning that is named counts."""
    found, used = {}, set()
    for path in layers:
        begins = [name for name in names if path == name or path.startswith(f"{name}.") or not name]
        if begins:
            longest = max(begins, key=len)
            used.add(longest)
            rest = path[len(longest) :].removeprefix(".")
            found[path] = ".".join(part for part in (names[longest], rest) if part)
        else:
            found[path] = path
    if unused := [name for name in names if name not in used]:
        raise ConfigError(f"names: expected paths of PyTorch's layers, of {list(layers)}, found {unused}")
    return found


def _alike(layer: Layer, other: Layer) -> bool:
    """Whether weights of one fit the other."""
    if layer.kind is not other.kind:
        return False
    try:
        made = layer.kind.to_flax(arrays_of(layer, zeros=True), other.shapes, "updates")
    except (SchemaError, KeyError, ValueError):
        return False
    return {name: values.shape for name, values in made.items()} == other.shapes


def _without_twins(ours: list[Layer], theirs: list[Layer]) -> str:
    said = []
    for there, layers in (("Flax", ours), ("PyTorch", theirs)):
        if layers:
            said.append(f"without a twin in {there}: {'; '.join(map(str, layers[:6]))}{' ...' * (len(layers) > 6)}")
    hint = ""
    if len(ours) == len(theirs) and [one.kind for one in ours] == [one.kind for one in theirs]:
        pairs = {one.path: other.path for one, other in zip(ours, theirs, strict=True)}
        hint = f"; if it is their order that says which are the same: names={pairs}"
    return f"layers: expected each to have a twin, found {', and '.join(said)}{hint:.600}"


# ---------------------------------------------------------------------- what there is


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
        children = {name: child for name, child in vars(module).items() if not name.startswith("_")}
    kept = (nnx.Module, nnx.Variable, list, tuple, dict)
    return [(name, child) for name, child in children.items() if isinstance(child, kept)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---------------------------------------------------------------------- copying


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


def _to_flax(pairs: list[Twins]) -> list[Callable[[], None]]:
    writes: list[Callable[[], None]] = []
    for pair in pairs:
        for name, values in _converted(pair.torch, pair.flax, pair.to_flax).items():
            if values.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                raise ConfigError(f"{pair.torch.path!r}: expected jax_enable_x64 for float64, found JAX without it")
            writes.append(partial(_write_variable, pair.flax.arrays[name], values))
    return writes


def _to_torch(pairs: list[Twins]) -> list[Callable[[], None]]:
    writes: list[Callable[[], None]] = []
    for pair in pairs:
        for name, values in _converted(pair.flax, pair.torch, pair.to_torch).items():
            writes.append(partial(_write_tensor, pair.torch.arrays[name], values))
    return writes


def _write_variable(to: Any, values: Array) -> None:
    to.set_value(jnp.array(values))


def _write_tensor(to: torch.Tensor, values: Array) -> None:
    if values.dtype == ml_dtypes.bfloat16:
        made = torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(np.array(values))
    to.data = made.to(to.device)


def _converted(source: Layer, destination: Layer, convert: Callable[[Arrays], Arrays]) -> Arrays:
    """The arrays of a layer as another has them; SchemaError where these are not those of the other."""
    try:
        made = convert(arrays_of(source))
    except (KeyError, ValueError) as error:
        raise SchemaError(f"layers: expected {destination} to fit {source}, found {error!r:.200}") from error
    except SchemaError as error:
        raise SchemaError(f"{source.path!r}: {error}") from error
    shapes = {name: values.shape for name, values in made.items()}
    if shapes != destination.shapes:
        missed = sorted(set(shapes.items()) ^ set(destination.shapes.items()))
        raise SchemaError(
            f"layers: expected {destination} to fit {source}, found differences in "
            f"{', '.join(dict.fromkeys(name for name, _ in missed))}"
        )
    return made
