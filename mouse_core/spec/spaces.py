"""Converts specs from and to gymnasium's spaces, and from dm_env's specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.spec.arrays import Binary, Bounded, Categorical, MultiCategorical, NonTensor, Unbounded
from mouse_core.spec.composite import Composite
from mouse_core.spec.domain import Domain, is_dynamic

__all__ = ["from_dm_env", "from_gymnasium", "to_gymnasium"]

SPACES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")
"""Types of gymnasium's spaces that have a spec."""


# ---------------------------------------------------------------------- gymnasium


def from_gymnasium(space: Any, *, where: str = "space") -> Any:
    """Convert a gymnasium space to a spec.

    ==================================  ==================================================================
    space                               spec
    ==================================  ==================================================================
    ``Box``                             ``Bounded``; ``Unbounded`` for floats without any finite bound
    ``Discrete``, ``MultiDiscrete``     ``Categorical``, ``MultiCategorical``; integer ``Bounded`` if ``start`` is not 0
    ``MultiBinary``                     ``Binary``
    ``Text``                            ``NonTensor``
    ``Dict``, ``Tuple``                 ``Composite``; a tuple has the names "0", "1", ...
    ==================================  ==================================================================

    Args:
        space: The space, or its description as nested mappings with ``type``, as in Minari's recordings.
        where: Prefix of messages.

    Raises:
        ConfigError: The values of a space have no fixed shape, as in ``Sequence``, ``Graph`` and ``OneOf``.
    """
    described = isinstance(space, Mapping) and not hasattr(space, "spaces")  # gymnasium's Dict is also a mapping
    kind = str(space.get("type")) if described else type(space).__name__
    get: Callable[[str, Any], Any] = space.get if described else lambda name, default: getattr(space, name, default)
    if kind in ("Dict", "Tuple"):
        parts = get("subspaces", None) if described else space.spaces
        items = parts.items() if isinstance(parts, Mapping) else enumerate(parts if parts is not None else ())
        return Composite({str(name): from_gymnasium(part, where=f"{where}/{name}") for name, part in items})
    if kind not in SPACES:
        raise ConfigError(f"{where}: expected one of {list(SPACES)}, found {kind}; a wrapper can convert it")
    try:
        return _leaf(kind, get)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected a space of type {kind}, found {space!r:.200} ({error})") from error


def _leaf(kind: str, get: Callable[[str, Any], Any]) -> Domain:
    if kind == "Text":
        return NonTensor(example="")
    if kind == "MultiBinary":
        return Binary(tuple(int(size) for size in np.atleast_1d(get("n", None))), np.int8)
    dtype = np.dtype(get("dtype", None) or np.int64)
    if kind == "Discrete":
        first, n = int(get("start", 0)), int(get("n", None))
        return Categorical(n, (), dtype) if first == 0 else Bounded(first, first + n - 1, (), dtype)
    if kind == "MultiDiscrete":
        nvec, start = np.asarray(get("nvec", None)), np.asarray(get("start", 0))
        return Bounded(start, start + (nvec - 1), dtype=dtype) if start.any() else MultiCategorical(nvec, dtype=dtype)
    return _box(get("low", None), get("high", None), tuple(int(size) for size in get("shape", None)), dtype)


def _box(low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Domain:
    """Return the spec of a ``Box``: ``Bounded``, or ``Unbounded`` for floats without any finite bound."""
    low, high = np.asarray(low), np.asarray(high)
    if dtype.kind == "f" and bool(np.isneginf(low).all() and np.isposinf(high).all()):
        return Unbounded(shape, dtype)
    return Bounded(low, high, shape, dtype)


def to_gymnasium(spec: Any) -> Any:
    """Convert a spec to a gymnasium space: integers of shape ``()`` become ``Discrete``, and a ``Composite`` becomes a
    ``Dict``.

    Raises:
        ConfigError: A spec has no corresponding space: specs with a mask or dynamic dimensions, ``NonTensor``,
            ``Choice``, ``Stacked``, ``OneHot`` and ``MultiOneHot``. For ``OneHot`` and ``MultiOneHot``, convert the
            result of ``categorical()`` instead.
        ImportError: Gymnasium is not installed.
    """
    try:
        from gymnasium import spaces
    except ModuleNotFoundError as error:
        raise ImportError("to_gymnasium needs gymnasium: pip install 'mouse-data[record]'") from error
    return _to_space(spec, spaces, "spec")


def _to_space(spec: Any, spaces: Any, where: str) -> Any:
    if isinstance(spec, Composite):
        return spaces.Dict({name: _to_space(one, spaces, f"{where}/{name}") for name, one in spec.entries.items()})
    _check_convertible(spec, where)
    if isinstance(spec, Categorical):
        if not spec.shape:
            return spaces.Discrete(spec.n)
        return spaces.MultiDiscrete(np.full(spec.shape, spec.n), dtype=_whole(spec.dtype))
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(spec.nvec, dtype=_whole(spec.dtype))
    if isinstance(spec, Binary):
        return spaces.MultiBinary(spec.shape) if spec.shape else spaces.Discrete(2)
    low, high = (np.broadcast_to(bound, spec.shape) for bound in spec._bounds())
    if spec.is_discrete and not spec.shape and isinstance(spec, Bounded):
        return spaces.Discrete(int(high) - int(low) + 1, start=int(low))
    dtype = np.dtype(np.uint8) if spec.dtype.kind == "b" else spec.dtype
    return spaces.Box(low.astype(dtype), high.astype(dtype), spec.shape, dtype.type)


def _whole(dtype: np.dtype[Any]) -> Any:
    return np.int64 if dtype.kind == "b" else dtype.type


# ---------------------------------------------------------------------- dm_env


def from_dm_env(spec: Any, *, where: str = "spec") -> Any:
    """Convert a dm_env spec to a spec.

    ``Array`` becomes ``Unbounded``, ``BoundedArray`` becomes ``Bounded``, ``DiscreteArray`` becomes ``Categorical``,
    and ``StringArray`` becomes ``NonTensor``. A mapping or list becomes a ``Composite``; the entries of a list get the
    names "0", "1", ...

    Args:
        spec: The dm_env spec, or nested mappings and lists of dm_env specs.
        where: Prefix of messages.

    Raises:
        ConfigError: The object is neither a dm_env spec nor a mapping or list of dm_env specs.
    """
    if isinstance(spec, Mapping | list | tuple):
        items = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
        return Composite({str(name): from_dm_env(part, where=f"{where}/{name}") for name, part in items})
    kind = next((base.__name__ for base in type(spec).__mro__ if base.__module__.startswith("dm_env")), "")
    if kind == "StringArray":
        return NonTensor(tuple(spec.shape), "")
    dtype = np.dtype(getattr(spec, "dtype", object))
    if kind not in ("Array", "BoundedArray", "DiscreteArray") or number_kind(dtype) not in "biuf":
        raise ConfigError(f"{where}: expected a spec of dm_env with numbers or texts, found {spec!r:.200}")
    if kind == "DiscreteArray":
        return Categorical(int(spec.num_values), (), dtype)
    if kind == "Array":
        return Unbounded(tuple(spec.shape), dtype)
    return _box(spec.minimum, spec.maximum, tuple(spec.shape), dtype)


def _check_convertible(spec: Any, where: str) -> None:
    """Raise ConfigError for specs without a corresponding space."""
    if not isinstance(spec, Binary | Bounded | Categorical | MultiCategorical | Unbounded):
        remedy = "; its categorical() has one" if hasattr(spec, "categorical") else ""
        raise ConfigError(f"{where}: expected numbers or codes, which gymnasium supports, found {spec!r:.200}{remedy}")
    if getattr(spec, "mask", None) is not None:
        raise ConfigError(
            f"{where}: expected a spec without a mask, since gymnasium has no masks; with_mask(None) removes the mask"
        )
    if is_dynamic(spec.shape):
        raise ConfigError(f"{where}: expected sizes for all dimensions, found {spec.shape}; expand() sets sizes")
