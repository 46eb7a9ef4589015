"""Copies the weights of a model from PyTorch to Flax NNX or back. The layer that corresponds to a layer in the other
framework is called its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from flax import nnx

from mouse_core import ConfigError, SchemaError

__all__ = ["transfer"]

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Kind:
    """A kind of layer in both frameworks.

    Args:
        name: Name of the kind of layer, for messages.
        torch: The PyTorch classes.
        flax: The Flax classes.
        to_flax: Function that converts PyTorch weights to Flax weights of the requested shapes.
        to_torch: Function that converts Flax weights to PyTorch weights of the requested shapes.
    """

    name: str
    torch: tuple[type[Any], ...]
    flax: tuple[type[Any], ...]
    to_flax: Callable[[Arrays, Shapes], Arrays]
    to_torch: Callable[[Arrays, Shapes], Arrays]


def _conversions(
    names: Mapping[str, str],
    convert: Callable[[Array], Array] = np.asarray,
    back: Callable[[Array], Array] = np.asarray,
) -> Any:
    """Return the conversions in both directions for a kind of layer whose arrays have different names in the two
    frameworks. Only the first array differs also in its layout.
    """
    first = next(iter(names))

    def to_flax(arrays: Arrays, wanted: Shapes) -> Arrays:
        return {names[name]: convert(values) if name == first else values for name, values in arrays.items()}

    def to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
        own = {other: name for name, other in names.items()}
        return {own[name]: back(values) if own[name] == first else values for name, values in arrays.items()}

    return to_flax, to_torch


def _kernel_of_convolution(weight: Array) -> Array:
    # [out, in, height, width] becomes [height, width, in, out]
    return np.moveaxis(weight, (0, 1), (-1, -2))


def _weight_of_convolution(kernel: Array) -> Array:
    return np.moveaxis(kernel, (-1, -2), (0, 1))


# ---------------------------------------------------------------------- attention

_PROJECTIONS = ("query", "key", "value")


def _attention_to_flax(arrays: Arrays, wanted: Shapes) -> Arrays:
    if "in_proj_weight" in arrays:
        weights = np.split(arrays["in_proj_weight"], 3)
    else:
        weights = [arrays[f"{name[0]}_proj_weight"] for name in _PROJECTIONS]
    # weight [heads * width, in] becomes kernel [in, heads, width]
    made = {f"{name}.kernel": weight.T for name, weight in zip(_PROJECTIONS, weights, strict=True)}
    made["out.kernel"] = arrays["out_proj.weight"].T
    if "in_proj_bias" in arrays:
        biases = np.split(arrays["in_proj_bias"], 3)
        made |= {f"{name}.bias": bias for name, bias in zip(_PROJECTIONS, biases, strict=True)}
        made["out.bias"] = arrays["out_proj.bias"]
    return {name: _reshaped(values, wanted.get(name)) for name, values in made.items()} | _rest(arrays, "bias_")


def _attention_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    weights = [arrays[f"{name}.kernel"].reshape(len(arrays[f"{name}.kernel"]), -1).T for name in _PROJECTIONS]
    if "in_proj_weight" in wanted and len({weight.shape[1] for weight in weights}) == 1:
        made = {"in_proj_weight": np.concatenate(weights)}
    else:
        made = {f"{name[0]}_proj_weight": weight for name, weight in zip(_PROJECTIONS, weights, strict=True)}
    out = arrays["out.kernel"]
    made["out_proj.weight"] = out.reshape(-1, out.shape[-1]).T
    if "out.bias" in arrays:
        made["in_proj_bias"] = np.concatenate([arrays[f"{name}.bias"].reshape(-1) for name in _PROJECTIONS])
        made["out_proj.bias"] = arrays["out.bias"]
    return made | _rest(arrays, "query_ln", "key_ln")


def _reshaped(values: Array, shape: tuple[int, ...] | None) -> Array:
    """Split the axis of the heads. With 4 heads of size 8, the query's kernel [32, 32] becomes [32, 4, 8], and the
    output's kernel becomes [4, 8, 32].
    """
    if shape is None or int(np.prod(shape)) != values.size:
        return values
    return values.reshape(shape)


def _rest(arrays: Arrays, *prefixes: str) -> Arrays:
    """Return, with unchanged names, the arrays that do not exist in the other framework; a later check raises an error
    for these arrays.
    """
    return {name: values for name, values in arrays.items() if name.startswith(prefixes)}


# ---------------------------------------------------------------------- recurrent layers


def _gru_to_flax(arrays: Arrays, wanted: Shapes) -> Arrays:
    made = {"dense_i.kernel": arrays["weight_ih"].T, "dense_h.kernel": arrays["weight_hh"].T}
    hidden = arrays["weight_hh"].shape[1]
    if "bias_ih" not in arrays:
        made["dense_i.bias"] = np.zeros(3 * hidden, made["dense_i.kernel"].dtype)
        return made
    # The gates r and z add both biases. In n, the recurrent bias is first multiplied by r, and Flax has no such bias.
    inner = arrays["bias_hh"][2 * hidden :]
    if inner.any():
        raise SchemaError(
            f"bias_hh: expected zeros in its last {hidden} values, the recurrent bias of n, because nnx.GRUCell "
            f"has no such bias, found values up to {np.abs(inner).max():.3g}; before training begins, set bias_hh to 0 "
            "and freeze it with requires_grad_(False), or create the GRU with bias=False"
        )
    made["dense_i.bias"] = arrays["bias_ih"] + arrays["bias_hh"]
    return made


def _gru_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    return _recurrent_to_torch(arrays["dense_i.kernel"], arrays["dense_h.kernel"], arrays["dense_i.bias"], wanted)


def _recurrent_to_torch(inputs: Array, hidden: Array, bias: Array, wanted: Shapes) -> Arrays:
    made = {"weight_ih": inputs.T, "weight_hh": hidden.T}
    if "bias_ih" in wanted or bias.any():  # a bias of zeros counts as no bias
        made |= {"bias_ih": bias, "bias_hh": np.zeros_like(bias)}
    return made


_GATES = ("i", "f", "g", "o")


def _lstm_to_flax(arrays: Arrays, wanted: Shapes) -> Arrays:
    if "bias_ih" in arrays:
        bias = arrays["bias_ih"] + arrays["bias_hh"]
    else:
        bias = np.zeros(len(arrays["weight_hh"]), arrays["weight_hh"].dtype)
    if "dense_h.kernel" in wanted:
        inputs, hidden = arrays["weight_ih"].T, arrays["weight_hh"].T
        return {"dense_i.kernel": inputs, "dense_h.kernel": hidden, "dense_h.bias": bias}
    made: Arrays = {}
    parts = (np.split(values, 4) for values in (arrays["weight_ih"], arrays["weight_hh"], bias))
    for gate, own, recurrent, one in zip(_GATES, *parts, strict=True):
        made[f"i{'f_' if gate == 'f' else gate}.kernel"] = own.T
        made[f"h{gate}.kernel"], made[f"h{gate}.bias"] = recurrent.T, one
    return made


def _lstm_to_torch(arrays: Arrays, wanted: Shapes) -> Arrays:
    if "dense_h.kernel" in arrays:
        inputs, hidden, bias = (arrays[name] for name in ("dense_i.kernel", "dense_h.kernel", "dense_h.bias"))
    else:
        inputs = np.concatenate([arrays[f"i{'f_' if gate == 'f' else gate}.kernel"] for gate in _GATES], axis=1)
        hidden = np.concatenate([arrays[f"h{gate}.kernel"] for gate in _GATES], axis=1)
        bias = np.concatenate([arrays[f"h{gate}.bias"] for gate in _GATES])
    return _recurrent_to_torch(inputs, hidden, bias, wanted)


# ---------------------------------------------------------------------- the kinds

_NORM = {"weight": "scale", "bias": "bias"}
_BATCH_NORM = _NORM | {"running_mean": "mean", "running_var": "var"}
_AFFINE = {"weight": "kernel", "bias": "bias"}

PARAMETER = Kind("parameter", (), (), *_conversions({"value": "value"}))
FOREIGN = Kind("layer without a twin", (), (), *_conversions({"value": "value"}))
KINDS = (
    Kind("Linear", (torch.nn.Linear,), (nnx.Linear,), *_conversions(_AFFINE, np.transpose, np.transpose)),
    Kind("Embedding", (torch.nn.Embedding,), (nnx.Embed,), *_conversions({"weight": "embedding"})),
    Kind("LayerNorm", (torch.nn.LayerNorm,), (nnx.LayerNorm,), *_conversions(_NORM)),
    Kind("RMSNorm", (torch.nn.RMSNorm,), (nnx.RMSNorm,), *_conversions(_NORM)),
    Kind("GroupNorm", (torch.nn.GroupNorm,), (nnx.GroupNorm,), *_conversions(_NORM)),
    Kind(
        "BatchNorm",
        (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
        (nnx.BatchNorm,),
        *_conversions(_BATCH_NORM),
    ),
    Kind(
        "Conv",
        (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
        (nnx.Conv,),
        *_conversions(_AFFINE, _kernel_of_convolution, _weight_of_convolution),
    ),
    Kind(
        "Attention", (torch.nn.MultiheadAttention,), (nnx.MultiHeadAttention,), _attention_to_flax, _attention_to_torch
    ),
    Kind("GRU", (torch.nn.GRU, torch.nn.GRUCell), (nnx.GRUCell,), _gru_to_flax, _gru_to_torch),
    Kind(
        "LSTM",
        (torch.nn.LSTM, torch.nn.LSTMCell),
        (nnx.LSTMCell, nnx.OptimizedLSTMCell),
        _lstm_to_flax,
        _lstm_to_torch,
    ),
)


# Containers of the frameworks, whose parameters the user defines.
_HOLD = (
    *(torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict),
    *(torch.nn.ParameterList, torch.nn.ParameterDict),
    *(torch.nn.Transformer, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer),
    *(torch.nn.TransformerDecoder, torch.nn.TransformerDecoderLayer),
    *(*nnx.Module.__mro__, nnx.Sequential, *nnx.List.__mro__, *nnx.Dict.__mro__, nnx.RNN),
)


def _is_foreign(module: Any) -> bool:
    """Whether a module is, or derives from, a layer of a framework; this determines the layout of its arrays."""
    packages = ("torch.nn.", "flax.nnx.")
    return any(base not in _HOLD and base.__module__.startswith(packages) for base in type(module).__mro__)


@dataclass(frozen=True)
class Layer:
    """A layer with weights, or a single parameter outside of layers.

    Args:
        path: The names from the model to the layer, joined by dots, without containers that only one framework has.
        kind: The kind of layer.
        module: The layer, or the module that has the parameter.
        arrays: PyTorch tensors or Flax variables, by the names that the kind defines.
    """

    path: str
    kind: Kind
    module: Any
    arrays: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays by name."""
        return {name: tuple(values.shape) for name, values in self.arrays.items()}

    def __str__(self) -> str:
        of = type(self.module)
        package = "torch.nn" if isinstance(self.module, torch.nn.Module) else "nnx"
        what = f"a parameter of {package}.{of.__name__}" if self.kind is PARAMETER else f"{package}.{of.__name__}"
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())
        return f"{self.path!r} ({what}: {shapes})"


def torch_layers(module: torch.nn.Module, path: str = "") -> Iterator[Layer]:
    """Yield the layers of a PyTorch model, and parameters outside layers, in the order of their creation."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.torch)), None)
    if kind is not None:
        yield from (
            _recurrent_layers(module, kind, path)
            if kind.name in ("GRU", "LSTM")
            else [Layer(path, kind, module, _tensors(module))]
        )
        return
    if _is_foreign(module) and any(parameter is not None for parameter in module._parameters.values()):
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
            f"{path!r}: expected a torch.nn.{kind.name} with bidirectional=False and proj_size=0, because Flax has "
            "neither option, found another value"
        )
    for number in range(module.num_layers):
        own = {name.removesuffix(f"_l{number}"): values for name, values in tensors.items()}
        own = {name: values for name, values in own.items() if "_l" not in name}
        yield Layer(path if module.num_layers == 1 else _joined(path, str(number)), kind, module, own)


def flax_layers(module: Any, path: str = "") -> Iterator[Layer]:
    """Yield the layers of a Flax model, and parameters outside layers, in the order of their creation."""
    kind = next((kind for kind in KINDS if isinstance(module, kind.flax)), None)
    if kind is not None:
        yield Layer(path, kind, module, dict(_variables(module, "")))
        return
    if _is_foreign(module) and any(isinstance(child, nnx.Param) for _, child in _children(module)):
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
        # Flax has internal state there: _pytree__state or _object__state.
        own = vars(module).items()
        children = {name: child for name, child in own if not name.startswith(("_pytree__", "_object__"))}
    kept = (nnx.Module, nnx.Variable, list, tuple, dict)
    return [(name, child) for name, child in children.items() if isinstance(child, kept)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _on_host(values: Any) -> Array:
    """Return a PyTorch tensor or a Flax variable on the host."""
    if isinstance(values, nnx.Variable):
        return np.asarray(values.get_value())
    tensor = values.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def transfer(source: Any, destination: Any, *, names: Mapping[str, str] | None = None) -> None:
    """Copy the weights of a model to a model of the other framework, from PyTorch to Flax NNX or the other way round.

    The supported layers are Linear, Embedding, LayerNorm, RMSNorm, GroupNorm, BatchNorm with its running statistics,
    convolutions, MultiheadAttention, GRU and LSTM with any number of layers and their cells, and single parameters,
    nested in any way. The destination gets the dtypes of the source. A copy to Flax and back changes no bit, except in
    recurrent layers, whose two biases become their sum and zeros.

    Layers correspond if their paths are equal, such as ``blocks.0.linear`` for ``blocks[0].linear``. ``layers`` of an
    ``nnx.Sequential`` and ``cell`` of an ``nnx.RNN`` are not part of paths, and layer 2 of a GRU with several layers is
    ``gru.2``. Numbers in paths count only layers with weights: the second linear layer in a ``Sequential`` of linear,
    ReLU and linear has the number 1, like the second layer in a list of two layers. Layers with different paths are
    paired by ``names``; if ``names`` lacks a layer, the error contains the ``names`` that pair the layers in order. A
    PyTorch layer that shares all weights with another layer needs no twin.

    Args:
        source: A ``torch.nn.Module`` or a ``flax.nnx.Module``.
        destination: A model of the other framework; its weights are changed.
        names: Paths in the PyTorch model (or prefixes of paths), mapped to paths in the Flax model, for both
            directions.

    Raises:
        SchemaError: A layer has no twin, or a twin of another kind or shape; the message names path, kind and shapes.
            Or a layer is supported only in one framework, such as a transposed convolution. Or two layers have
            different weights for a tensor that the other model shares between these layers. After a SchemaError, both
            models are unchanged.
        ConfigError: The arguments are not models of both frameworks, or float64 cannot be copied to JAX without x64.
    """
    if isinstance(source, torch.nn.Module) and isinstance(destination, nnx.Module):
        pairs = _twins(source, destination, names or {})
    elif isinstance(source, nnx.Module) and isinstance(destination, torch.nn.Module):
        pairs = [(flax, ours) for ours, flax in _twins(destination, source, names or {})]
    else:
        raise ConfigError(
            "transfer: expected a torch.nn.Module and a flax.nnx.Module, found "
            f"{type(source).__name__} and {type(destination).__name__}"
        )
    for array, values in _copies(pairs):
        _write(array, values)


def _twins(torch_module: Any, flax_module: Any, names: Mapping[str, str]) -> list[tuple[Layer, Layer]]:
    """Return the corresponding layers of a PyTorch model and a Flax model, in the order of the PyTorch model."""
    ours = {layer.path: layer for layer in torch_layers(torch_module)}
    theirs = {layer.path: layer for layer in flax_layers(flax_module)}
    _check_known([*ours.values(), *theirs.values()])
    in_flax = list(theirs.values())
    pairs = _by_path(ours, theirs, names)
    tied = _tied(ours, pairs)
    ours = {path: layer for path, layer in ours.items() if path not in tied}
    alone = [layer for path, layer in ours.items() if path not in pairs]
    if alone or theirs:
        raise SchemaError(_without_twins(alone, list(theirs.values()), _in_order(list(ours.values()), in_flax, pairs)))
    for path, layer in ours.items():
        if layer.kind is not pairs[path].kind:
            raise SchemaError(
                f"layers: expected two layers of the same kind, found {layer} in PyTorch and {pairs[path]} in Flax"
            )
    return [(layer, pairs[path]) for path, layer in ours.items()]


def _check_known(layers: Iterable[Layer]) -> None:
    if foreign := [layer for layer in layers if layer.kind is FOREIGN]:
        raise SchemaError(
            f"layers: expected kinds that are known in both frameworks, {', '.join(kind.name for kind in KINDS)}, "
            f"found {'; '.join(map(str, foreign[:6]))}"
        )


def _tied(ours: Mapping[str, Layer], pairs: Mapping[str, Layer]) -> set[str]:
    """Return the paths of layers without a twin whose weights all belong to layers with a twin."""
    shared = {id(values) for path in pairs for values in ours[path].arrays.values()}
    return {
        path
        for path, layer in ours.items()
        if path not in pairs and all(id(values) in shared for values in layer.arrays.values())
    }


def _by_path(ours: Mapping[str, Layer], theirs: dict[str, Layer], names: Mapping[str, str]) -> dict[str, Layer]:
    """Pair layers by ``names``, then by equal paths in the numbering of ``_counted``; remove paired layers from
    ``theirs``.
    """
    wanted, fixed = _renamed(ours, names)
    pairs = {path: theirs.pop(wanted[path]) for path in fixed if wanted[path] in theirs}
    by_number = {path: other for path, other in wanted.items() if path not in pairs}
    own, others = _counted(by_number.values()), _counted(theirs)
    path_of = {counted: path for path, counted in others.items()}
    for path, other in by_number.items():
        there = path_of.get(own[other])
        if there in theirs:
            pairs[path] = theirs.pop(there)
    return pairs


def _counted(paths: Iterable[str]) -> dict[str, str]:
    """Renumber paths to count layers with weights: ``a.0``, ``a.2`` and ``a.4`` become ``a.0``, ``a.1`` and ``a.2``."""
    split = {path: path.split(".") for path in paths}
    numbers: dict[tuple[str, ...], set[int]] = {}
    for parts in split.values():
        for at, part in enumerate(parts):
            if part.isdecimal():
                numbers.setdefault(tuple(parts[:at]), set()).add(int(part))
    found = {}
    for path, parts in split.items():
        counted = [
            str(sorted(numbers[tuple(parts[:at])]).index(int(part))) if part.isdecimal() else part
            for at, part in enumerate(parts)
        ]
        found[path] = ".".join(counted)
    return found


def _in_order(ours: list[Layer], theirs: list[Layer], pairs: Mapping[str, Layer]) -> dict[str, str]:
    """Return the ``names`` that pair unpaired layers in order; empty if the models have different kinds of layers."""
    own, other = (sorted(layers, key=lambda layer: layer.kind is PARAMETER) for layers in (ours, theirs))
    if [layer.kind for layer in own] != [layer.kind for layer in other]:
        return {}
    return {one.path: two.path for one, two in zip(own, other, strict=True) if pairs.get(one.path) is not two}


def _renamed(layers: Mapping[str, Layer], names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the Flax path for each PyTorch path, and the PyTorch paths whose last number is also determined by
    ``names``.

    The longest matching prefix in ``names`` is used.
    """
    found, used, fixed = {}, set(), []
    for path in layers:
        begins = [name for name in names if path == name or path.startswith(f"{name}.") or not name]
        if begins:
            longest = max(begins, key=len)
            used.add(longest)
            rest = path[len(longest) :].removeprefix(".")
            found[path] = ".".join(part for part in (names[longest], rest) if part)
            if not any(part.isdecimal() for part in rest.split(".")):
                fixed.append(path)
        else:
            found[path] = path
    if unused := [name for name in names if name not in used]:
        raise ConfigError(f"names: expected paths of PyTorch layers among {list(layers)}, found {unused}")
    return found, fixed


def _without_twins(ours: list[Layer], theirs: list[Layer], in_order: Mapping[str, str]) -> str:
    said = []
    for there, layers in (("Flax", ours), ("PyTorch", theirs)):
        if layers:
            said.append(f"without a twin in {there}: {'; '.join(map(str, layers[:6]))}{' ...' * (len(layers) > 6)}")
    hint = f"; to pair the layers in order, pass names={in_order}" if in_order else ""
    hint = hint or "; pair layers with names={path in PyTorch: path in Flax}"
    return f"layers: expected a twin for each layer, found layers {', and '.join(said)}{hint:.600}"


# ---------------------------------------------------------------------- copying


def _copies(pairs: Iterable[tuple[Layer, Layer]]) -> list[tuple[Any, Array]]:
    """Return the arrays of the destination layers, each with its new values.

    Args:
        pairs: Pairs of a source and a destination.

    Raises:
        SchemaError: Names or shapes do not match, or layers that share an array assign different values.
    """
    found: dict[int, tuple[Layer, Any, Array]] = {}
    for source, destination in pairs:
        for name, values in _converted(source, destination).items():
            array = destination.arrays[name]
            first, _, before = found.setdefault(id(array), (destination, array, values))
            if before.dtype != values.dtype or not np.array_equal(before, values, equal_nan=before.dtype.kind == "f"):
                raise SchemaError(
                    f"layers: expected equal weights for {first} and {destination}, which are tied in one tensor, "
                    "found different weights"
                )
            wide = isinstance(array, nnx.Variable) and values.dtype == np.float64
            if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                raise ConfigError(
                    f"{source.path!r}: for weights of float64, expected JAX with jax_enable_x64=True, found False"
                )
    return [(array, values) for _, array, values in found.values()]


def _write(to: Any, values: Array) -> None:
    if isinstance(to, nnx.Variable):
        to.set_value(jnp.array(values))
    else:
        bits = values.dtype == ml_dtypes.bfloat16
        made = torch.from_numpy(np.array(values.view(np.int16) if bits else values))
        to.data = (made.view(torch.bfloat16) if bits else made).to(to.device)


def _converted(source: Layer, destination: Layer) -> Arrays:
    """Convert the arrays of a layer to the layout of its twin; raise SchemaError if names or shapes do not match."""
    convert = source.kind.to_flax if isinstance(source.module, torch.nn.Module) else source.kind.to_torch
    try:
        made = convert({name: _on_host(values) for name, values in source.arrays.items()}, destination.shapes)
    except SchemaError as error:  # also a ValueError, whose message names the remedy
        raise SchemaError(f"{source}: {error}") from error
    except (KeyError, ValueError) as error:
        raise SchemaError(f"layers: expected {destination} to fit {source}, found {error!r:.200}") from error
    shapes = {name: values.shape for name, values in made.items()}
    if shapes != destination.shapes:
        missed = sorted(set(shapes.items()) ^ set(destination.shapes.items()))
        raise SchemaError(
            f"layers: expected {destination} to fit {source}, found differences in "
            f"{', '.join(dict.fromkeys(name for name, _ in missed))}"
        )
    return made
