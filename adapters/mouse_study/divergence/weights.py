"""Copies weights from PyTorch to Flax NNX and back, for each pair of corresponding layers (twins)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from flax import nnx

from mouse_core import ConfigError, SchemaError
from mouse_study.divergence.models import (
    FOREIGN,
    KINDS,
    PARAMETER,
    Array,
    Arrays,
    Layer,
    What,
    arrays_of,
    flax_layers,
    torch_layers,
)


@dataclass(frozen=True)
class Twins:
    """A layer of PyTorch and the corresponding layer of Flax."""

    torch: Layer
    flax: Layer

    def to_flax(self, arrays: Arrays, what: What = "weights") -> Arrays:
        """Convert arrays of the PyTorch layer (weights, gradients, updates) to the layout of Flax."""
        return self.torch.kind.to_flax(arrays, self.flax.shapes, what)

    def to_torch(self, arrays: Arrays) -> Arrays:
        """Convert weights of the Flax layer to the layout of PyTorch."""
        return self.flax.kind.to_torch(arrays, self.torch.shapes)


def transfer(source: Any, destination: Any, *, names: Mapping[str, str] | None = None) -> None:
    """Copy the weights of a model to a model of the other framework, from PyTorch to Flax NNX or the other way round.

    The supported layers are Linear, Embedding, LayerNorm, RMSNorm, GroupNorm, BatchNorm with its running statistics,
    convolutions, MultiheadAttention, GRU and LSTM with any number of layers and their cells, and single parameters,
    nested in any way. The destination gets the dtypes of the source. A copy to Flax and back changes no bit, except in
    recurrent layers, whose two biases become their sum and zeros.

    Layers correspond if their paths are equal, such as ``blocks.0.linear`` for ``blocks[0].linear``. ``layers`` of an
    ``nnx.Sequential`` and ``cell`` of an ``nnx.RNN`` are not part of paths, and layer 2 of a GRU with several layers is
    ``gru.2``. Numbers in paths count only layers with weights: the second linear layer in a ``Sequential`` of linear,
    ReLU and linear has the number 1, like the second layer in a list of two layers. Remaining layers correspond if each
    is the only layer of its kind and shape in its model, and if the pairs have the same order in both models. A PyTorch
    layer that shares all weights with another layer needs no twin.

    Args:
        source: A ``torch.nn.Module`` or a ``flax.nnx.Module``.
        destination: A model of the other framework; its weights are changed.
        names: Paths in the PyTorch model (or prefixes of paths), mapped to paths in the Flax model, for both
            directions.

    Raises:
        SchemaError: A layer has no twin, or a twin of another kind or shape (the message names path, kind and shapes);
            a layer is supported only in one framework, such as a transposed convolution; or two layers have different
            weights for a tensor that the other model shares between these layers. After a SchemaError, both models are
            unchanged.
        ConfigError: The arguments are not models of both frameworks, or float64 cannot be copied to JAX without x64.
    """
    if isinstance(source, torch.nn.Module) and isinstance(destination, nnx.Module):
        pairs = twins(source, destination, names=names)
        copies = _copies((pair.torch, pair.flax, pair.to_flax) for pair in pairs)
    elif isinstance(source, nnx.Module) and isinstance(destination, torch.nn.Module):
        pairs = twins(destination, source, names=names)
        copies = _copies((pair.flax, pair.torch, pair.to_torch) for pair in pairs)
    else:
        raise ConfigError(
            "transfer: expected a torch.nn.Module and a flax.nnx.Module, found "
            f"{type(source).__name__} and {type(destination).__name__}"
        )
    for array, values in copies:
        _write(array, values)


def twins(torch_module: Any, flax_module: Any, *, names: Mapping[str, str] | None = None) -> list[Twins]:
    """Return the corresponding layers of two models, in the order of the PyTorch model.

    Args:
        torch_module: A ``torch.nn.Module``.
        flax_module: A ``flax.nnx.Module``.
        names: See ``transfer``.

    Raises:
        SchemaError: An error of ``transfer``.
        ConfigError: ``names`` has a path that the PyTorch model lacks.
    """
    ours = {layer.path: layer for layer in torch_layers(torch_module)}
    theirs = {layer.path: layer for layer in flax_layers(flax_module)}
    _check_known([*ours.values(), *theirs.values()])
    in_flax = list(theirs.values())
    pairs = _by_path(ours, theirs, names or {})
    _by_shape(ours, in_flax, theirs, pairs)
    tied = _tied(ours, pairs)
    ours = {path: layer for path, layer in ours.items() if path not in tied}
    alone = [layer for path, layer in ours.items() if path not in pairs]
    if alone or theirs:
        raise SchemaError(_without_twins(alone, list(theirs.values()), _in_order(list(ours.values()), in_flax, pairs)))
    found = [Twins(layer, pairs[path]) for path, layer in ours.items()]
    _check_kinds(found)
    return found


def _check_known(layers: Iterable[Layer]) -> None:
    if foreign := [layer for layer in layers if layer.kind is FOREIGN]:
        raise SchemaError(
            f"layers: expected kinds that are known in both frameworks, {', '.join(kind.name for kind in KINDS)}, "
            f"found {'; '.join(map(str, foreign[:6]))}"
        )


def _check_kinds(pairs: Iterable[Twins]) -> None:
    for pair in pairs:
        if pair.torch.kind is not pair.flax.kind:
            raise SchemaError(
                f"layers: expected two layers of the same kind, found {pair.torch} in PyTorch and {pair.flax} in Flax"
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
    """Pair layers by ``names``, then by equal paths after ``_counted``; remove paired layers from ``theirs``."""
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


def _containers(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the numbered containers of each path."""
    found = {}
    for path in paths:
        parts = path.split(".")
        found[path] = {".".join(parts[:at]) for at, part in enumerate(parts) if part.isdecimal()}
    return found


def _by_shape(
    ours: Mapping[str, Layer], in_flax: list[Layer], theirs: dict[str, Layer], pairs: dict[str, Layer]
) -> None:
    """Add pairs of unpaired layers that fit only each other, if the pairs have the same order in both models."""
    found = _only_fits(ours, in_flax, theirs, pairs)
    place = {path: at for at, path in enumerate(ours)}
    there = {layer.path: at for at, layer in enumerate(in_flax)}
    everything = pairs | found
    for path, layer in found.items():
        # PyTorch does not record the position of a single parameter among layers.
        apart = [
            (place[past] - place[path]) * (there[twin.path] - there[layer.path]) < 0
            for past, twin in everything.items()
            if (twin.kind is PARAMETER) == (layer.kind is PARAMETER)
        ]
        if not any(apart):
            pairs[path] = theirs.pop(layer.path)


def _only_fits(
    ours: Mapping[str, Layer], in_flax: list[Layer], theirs: Mapping[str, Layer], pairs: Mapping[str, Layer]
) -> dict[str, Layer]:
    """Return, by PyTorch's path, the only Flax layer that fits each unpaired PyTorch layer, if the Flax layer fits no
    other layer.

    Unpaired layers of a container that is numbered in both models are left out: the containers differ in length, and
    nothing shows which layer is missing.
    """
    own, other = _containers(ours), _containers(layer.path for layer in in_flax)
    both = set().union(*own.values()) & set().union(*other.values())
    left = [layer for path, layer in ours.items() if path not in pairs]
    fitting = {layer.path: [one for one in theirs.values() if _alike(layer, one)] for layer in left}
    claims = Counter(one.path for alike in fitting.values() for one in alike)
    return {
        path: alike[0]
        for path, alike in fitting.items()
        if len(alike) == 1 and claims[alike[0].path] == 1 and not (own[path] | other[alike[0].path]) & both
    }


def _in_order(ours: list[Layer], theirs: list[Layer], pairs: Mapping[str, Layer]) -> dict[str, str]:
    """Return ``names`` that pair the layers in order; empty if kinds differ."""
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


def _alike(layer: Layer, other: Layer) -> bool:
    """Whether the weights of one layer fit the other."""
    if layer.kind is not other.kind:
        return False
    try:
        made = layer.kind.to_flax(arrays_of(layer, zeros=True), other.shapes, "updates")
    except (SchemaError, KeyError, ValueError):
        return False
    return {name: values.shape for name, values in made.items()} == other.shapes


def _without_twins(ours: list[Layer], theirs: list[Layer], in_order: Mapping[str, str]) -> str:
    said = []
    for there, layers in (("Flax", ours), ("PyTorch", theirs)):
        if layers:
            said.append(f"without a twin in {there}: {'; '.join(map(str, layers[:6]))}{' ...' * (len(layers) > 6)}")
    hint = f"; to pair the layers in order, pass names={in_order}" if in_order else ""
    hint = hint or "; pair layers with names={path in PyTorch: path in Flax}"
    return f"layers: expected a twin for each layer, found layers {', and '.join(said)}{hint:.600}"


# ---------------------------------------------------------------------- copying


def _copies(pairs: Iterable[tuple[Layer, Layer, Callable[[Arrays], Arrays]]]) -> list[tuple[Any, Array]]:
    """Return the arrays of the destination layers, each with its new values.

    Args:
        pairs: For each pair of layers, the source, the destination, and the function that converts the arrays.

    Raises:
        SchemaError: Names or shapes do not match, or layers that share an array assign different values.
    """
    found: dict[int, tuple[Layer, Any, Array]] = {}
    for source, destination, convert in pairs:
        for name, values in _converted(source, destination, convert).items():
            array = destination.arrays[name]
            first, _, before = found.setdefault(id(array), (destination, array, values))
            if before.dtype != values.dtype or not np.array_equal(before, values, equal_nan=before.dtype.kind == "f"):
                raise SchemaError(
                    f"layers: expected equal weights for {first} and {destination}, which are tied in one tensor, "
                    "found different weights"
                )
            wide = isinstance(array, nnx.Variable) and values.dtype == np.float64
            if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
                raise ConfigError(f"{source.path!r}: expected jax_enable_x64 for float64, found JAX without it")
    return [(array, values) for _, array, values in found.values()]


def _write(to: Any, values: Array) -> None:
    if isinstance(to, nnx.Variable):
        to.set_value(jnp.array(values))
    else:
        bits = values.dtype == ml_dtypes.bfloat16
        made = torch.from_numpy(np.array(values.view(np.int16) if bits else values))
        to.data = (made.view(torch.bfloat16) if bits else made).to(to.device)


def _converted(source: Layer, destination: Layer, convert: Callable[[Arrays], Arrays]) -> Arrays:
    """Convert the arrays of a layer to the layout of another; raise SchemaError if names or shapes do not match."""
    try:
        made = convert(arrays_of(source))
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
