"""Functions that draw values of specs as tensors, and that convert specs from and to TorchRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData

from mouse_core.errors import ConfigError
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    Domain,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    Unbounded,
)
from mouse_torch.placement import check_device
from mouse_torch.transfer import from_numpy, to_numpy, torch_dtype
from mouse_torch.trees import tensor_dict

__all__ = ["from_torchrl", "sample", "to_torchrl"]


def sample(spec: Domain, seed: int, batch: int | tuple[int, ...] = (), *, device: Any = None) -> Any:
    """Draw random values of a spec as a tensor; the values equal the values of ``spec.sample`` bit by bit.

    For a ``Composite`` the result is a TensorDict; for a ``Stacked`` whose specs differ in shape or fields, a tuple.

    Args:
        spec: The spec.
        seed: An integer in ``[0, 2**64)``.
        batch: The shape of the batch of values.
        device: The device of the tensors; by default ``spec.device``, or the host if ``spec.device`` is None.

    Raises:
        ConfigError: An argument of ``spec.sample`` is invalid, or the device does not exist.
    """
    values = spec.sample(seed, batch)
    target = check_device(device if device is not None else spec.device)
    return _tensors(spec, values, target, list(batch) if isinstance(batch, tuple | list) else [int(batch)])


def _tensors(spec: Any, values: Any, target: Any, size: list[int]) -> Any:
    if isinstance(values, tuple):
        return tuple(_tensors(one, part, target, size) for one, part in zip(spec.specs, values, strict=True))
    if isinstance(values, dict):
        return tensor_dict(values, target, size=[*size, *spec.shape])
    if isinstance(values, np.ndarray | np.generic) and values.dtype != object:
        return from_numpy(np.array(values)).to(target)
    return values


# ---------------------------------------------------------------------- to TorchRL


def to_torchrl(spec: Domain) -> Any:
    """Convert a spec to the TorchRL spec that allows the same values.

    Args:
        spec: The spec; its ``device`` becomes the device of the TorchRL spec.

    Raises:
        ConfigError: torch lacks a dtype of the spec.
        ImportError: TorchRL is not installed.
    """
    theirs = _torchrl("to_torchrl")
    return _to(spec, theirs)


def _torchrl(what: str) -> Any:
    try:
        from torchrl.data import tensor_specs
    except ModuleNotFoundError as error:
        raise ImportError(f"{what} needs TorchRL: pip install torchrl") from error
    return tensor_specs


def _to(spec: Any, theirs: Any) -> Any:
    device = spec.device
    if isinstance(spec, Composite):
        entries = {name: _to(one, theirs) for name, one in spec.entries.items()}
        return theirs.Composite(entries, shape=torch.Size(spec.shape), device=device)
    if isinstance(spec, Stacked):
        return torch.stack([_to(one, theirs) for one in spec.specs], spec.axis)
    if isinstance(spec, Choice):
        choices = [
            NonTensorData(one.example) if isinstance(one, NonTensor) else _to(one, theirs) for one in spec.choices
        ]
        return theirs.Choice(choices)
    if isinstance(spec, NonTensor):
        return theirs.NonTensor(torch.Size(spec.shape), device=device, example_data=spec.example)
    return _leaf_to(spec, theirs)


def _leaf_to(spec: Any, theirs: Any) -> Any:
    arguments = {"shape": torch.Size(spec.shape), "dtype": torch_dtype(spec.dtype), "device": spec.device}
    if isinstance(spec, Bounded):
        low, high = (from_numpy(np.array(bound)) for bound in (spec.low, spec.high))
        return theirs.Bounded(low=low, high=high, **arguments)
    if isinstance(spec, Unbounded):
        return theirs.Unbounded(**arguments)
    if isinstance(spec, Binary):
        return theirs.Binary(n=spec.shape[-1] if spec.shape else None, **arguments)
    mask = None if spec.mask is None else torch.from_numpy(np.array(_flat_mask(spec)))
    if isinstance(spec, OneHot):
        return theirs.OneHot(spec.n, mask=mask, **arguments)
    if isinstance(spec, MultiOneHot):
        return theirs.MultiOneHot(spec.nvec, mask=mask, **arguments)
    if isinstance(spec, Categorical):
        return theirs.Categorical(spec.n, mask=mask, **arguments)
    return theirs.MultiCategorical(torch.from_numpy(np.array(spec.nvec)), mask=mask, **arguments)


def _flat_mask(spec: Any) -> Any:
    """Return the mask of a spec in TorchRL's format: the masks of several codes are concatenated."""
    return spec.one_hot().mask if isinstance(spec, MultiCategorical) else spec.mask


# ---------------------------------------------------------------------- from TorchRL


def from_torchrl(spec: Any) -> Any:
    """Convert a TorchRL spec to the spec that allows the same values.

    Raises:
        ConfigError: The object is not a supported spec, or the number of codes of a categorical spec is not known yet.
        ImportError: TorchRL is not installed.
    """
    return _from(spec, _torchrl("from_torchrl"), "spec")


def _from(spec: Any, theirs: Any, where: str) -> Any:
    if isinstance(spec, theirs.Stacked | theirs.StackedComposite):
        specs = tuple(_from(one, theirs, f"{where}/{number}") for number, one in enumerate(spec._specs))
        return Stacked(specs, spec.dim)
    if isinstance(spec, theirs.Composite):
        entries = {name: _from(one, theirs, f"{where}/{name}") for name, one in spec.items() if one is not None}
        return Composite(entries, tuple(spec.shape), _device(spec))
    if isinstance(spec, theirs.Choice):
        data = [NonTensor(example=one.data) if isinstance(one, NonTensorData) else one for one in spec._choices]
        return Choice([one if isinstance(one, NonTensor) else _from(one, theirs, where) for one in data])
    for kind, convert in _CONVERTERS.items():
        if isinstance(spec, getattr(theirs, kind)):
            return convert(spec, where)
    raise ConfigError(f"{where}: expected one of TorchRL's specs, found {spec!r:.200}")


def _arguments(spec: Any) -> dict[str, Any]:
    dtype = to_numpy(torch.zeros(0, dtype=spec.dtype)).dtype
    return {"shape": tuple(spec.shape), "dtype": dtype, "device": _device(spec)}


def _device(spec: Any) -> str | None:
    device = spec.device
    return None if device is None or device.type == "cpu" else str(device)


def _code_arguments(spec: Any, where: str) -> dict[str, Any]:
    if getattr(spec, "_provisional_n", None) is not None or getattr(spec.space, "n", 1) == -1:
        raise ConfigError(f"{where}: expected a spec with a known number of codes, found {spec!r:.200}")
    return {**_arguments(spec), "mask": None if spec.mask is None else to_numpy(spec.mask)}


# Subclasses come before their base classes, because TorchRL's specs derive from each other.
_CONVERTERS: dict[str, Callable[[Any, str], Domain]] = {
    "NonTensor": lambda spec, where: NonTensor(tuple(spec.shape), spec.example_data, _device(spec)),
    "Bounded": lambda spec, where: Bounded(to_numpy(spec.space.low), to_numpy(spec.space.high), **_arguments(spec)),
    "Unbounded": lambda spec, where: Unbounded(**_arguments(spec)),
    "Binary": lambda spec, where: Binary(**_arguments(spec)),
    "MultiOneHot": lambda spec, where: MultiOneHot(tuple(map(int, spec.nvec)), **_code_arguments(spec, where)),
    "OneHot": lambda spec, where: OneHot(int(spec.space.n), **_code_arguments(spec, where)),
    "MultiCategorical": lambda spec, where: MultiCategorical(to_numpy(spec.nvec), **_code_arguments(spec, where)),
    "Categorical": lambda spec, where: Categorical(int(spec.space.n), **_code_arguments(spec, where)),
}
