"""Specs from the spaces of gymnasium and the specs of dm_env, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.spec.categories import Categorical, MultiCategorical
from mouse_core.spec.composite import Composite
from mouse_core.spec.domain import Domain
from mouse_core.spec.numbers import Binary, Bounded, Unbounded
from mouse_core.spec.objects import NonTensor
from mouse_core.spec.shapes import is_dynamic

__all__ = ["from_dm_env", "from_gymnasium", "from_lerobot", "to_dm_env", "to_gymnasium"]

SPACES = ("Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple")
"""Kinds of gymnasium's spaces whose values have a fixed form."""


# ---------------------------------------------------------------------- gymnasium


def from_gymnasium(space: Any, *, where: str = "space") -> Any:
    """The spec of the values that one of gymnasium's spaces has.

    A ``Box`` is ``Bounded``, or ``Unbounded`` where no float has a bound; ``Discrete`` and ``MultiDiscrete`` are
    ``Categorical`` and ``MultiCategorical``, or ``Bounded`` whole numbers where they begin elsewhere than at 0.
    ``MultiBinary`` is ``Binary``, ``Text`` a ``NonTensor`` of texts. ``Dict`` and ``Tuple`` are a ``Composite``, whose
    names are texts: "0", "1", ... of a tuple.

    Args:
        space: The space; or nested mappings with ``type``, as Minari and recorders write spaces down.
        where: What messages call it.

    Raises:
        ConfigError: A space whose values have no fixed form, such as ``Sequence``, ``Graph`` and ``OneOf``.
    """
    written = isinstance(space, Mapping) and not hasattr(space, "spaces")  # gymnasium's Dict is a mapping, too
    kind = str(space.get("type")) if written else type(space).__name__
    said: Callable[[str, Any], Any] = space.get if written else lambda name, default: getattr(space, name, default)
    if kind in ("Dict", "Tuple"):
        parts = said("subspaces", None) if written else space.spaces
        items = parts.items() if isinstance(parts, Mapping) else enumerate(parts if parts is not None else ())
        return Composite({str(name): from_gymnasium(part, where=f"{where}/{name}") for name, part in items})
    if kind not in SPACES:
        raise ConfigError(f"{where}: expected one of {list(SPACES)}, found {kind}; a wrapper can make it one")
    try:
        return _leaf(kind, said)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected a space of type {kind}, found {space!r:.200} ({error})") from error


def _leaf(kind: str, said: Callable[[str, Any], Any]) -> Domain:
    if kind == "Text":
        return NonTensor(example="")
    if kind == "MultiBinary":
        n = said("n", None)
        return Binary(tuple(int(size) for size in np.atleast_1d(said("shape", None) if n is None else n)), np.int8)
    dtype = np.dtype(said("dtype", None) or np.int64)
    if kind == "Discrete":
        first, n = int(said("start", 0)), int(said("n", None))
        return Categorical(n, (), dtype) if first == 0 else Bounded(first, first + n - 1, (), dtype)
    if kind == "MultiDiscrete":
        nvec, start = np.asarray(said("nvec", None)), np.asarray(said("start", 0))
        nvec = np.broadcast_to(nvec, tuple(said("shape", None) or nvec.shape))
        return Bounded(start, start + (nvec - 1), dtype=dtype) if start.any() else MultiCategorical(nvec, dtype=dtype)
    return _box(said("low", None), said("high", None), tuple(int(size) for size in said("shape", None)), dtype)


def _box(low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Domain:
    """Numbers between bounds; without them, where no float has one."""
    low, high = np.asarray(low), np.asarray(high)
    if low.dtype.kind in "UO":  # infinite bounds are written as texts
        low, high = low.astype(np.float64), high.astype(np.float64)
    if dtype.kind == "f" and bool(np.isneginf(low).all() and np.isposinf(high).all()):
        return Unbounded(shape, dtype)
    return Bounded(low, high, shape, dtype)


def to_gymnasium(spec: Any) -> Any:
    """The space of gymnasium that has the values of a spec.

    Whole numbers of shape ``()`` are ``Discrete``, a ``Composite`` is a ``Dict``.

    Raises:
        ConfigError: A spec that none has: with a mask, dynamic dimensions, objects, vectors with a single 1 (their
            ``categorical()`` has one), choices, or a stack of specs that differ.
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
    _check_sayable(spec, where, "gymnasium")
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


def from_lerobot(features: Mapping[str, Any]) -> Composite:
    """The specs of what a LeRobotDataset says it has: ``features`` of its ``meta/info.json``, by LeRobot's names.

    Numbers are ``Unbounded``, booleans ``Binary``, pictures of cameras ``Bounded`` from 0 to 255, texts ``NonTensor``.

    Raises:
        ConfigError: Something else.
    """
    entries: dict[str, Domain] = {}
    for name, feature in features.items():
        try:
            kind, sizes = str(feature["dtype"]), tuple(int(size) for size in feature.get("shape") or ())
            shape = () if sizes == (1,) else sizes  # a frame has one number of those
            if kind in ("image", "video"):
                entries[name] = Bounded(0, 255, sizes, np.uint8)
            elif kind in ("string", "language", "language_persistent", "language_events"):
                entries[name] = NonTensor(shape, "")
            else:
                entries[name] = Binary(shape) if kind == "bool" else Unbounded(shape, kind)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"features: {name!r}: expected a dtype and a shape, found {feature!r:.200}") from error
    return Composite(entries)


# ---------------------------------------------------------------------- dm_env


def from_dm_env(spec: Any, *, where: str = "spec") -> Any:
    """The spec of the values that one of dm_env's specs has.

    ``Array`` is ``Unbounded``, ``BoundedArray`` is ``Bounded``, ``DiscreteArray`` is ``Categorical``, ``StringArray``
    is ``NonTensor``. Mappings and lists of them are a ``Composite``, whose names are texts.

    Args:
        spec: The spec, or nested mappings and lists of them.
        where: What messages call it.

    Raises:
        ConfigError: Something else.
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


def to_dm_env(spec: Any, *, name: str | None = None) -> Any:
    """The spec of dm_env that has the values of a spec; of a ``Composite`` a dict of them.

    Args:
        spec: The spec.
        name: What it is called; entries of a ``Composite`` have their names.

    Raises:
        ConfigError: A spec that none has: with a mask, dynamic dimensions, vectors with a single 1 (their
            ``categorical()`` has one), choices, or a stack of specs that differ.
        ImportError: dm_env is not installed.
    """
    try:
        from dm_env import specs
    except ModuleNotFoundError as error:
        raise ImportError("to_dm_env needs dm_env: pip install dm-env") from error
    return _to_dm_env(spec, specs, name, "spec")


def _to_dm_env(spec: Any, specs: Any, name: str | None, where: str) -> Any:
    if isinstance(spec, Composite):
        return {key: _to_dm_env(one, specs, key, f"{where}/{key}") for key, one in spec.entries.items()}
    if isinstance(spec, NonTensor):
        return specs.StringArray(spec.shape, name=name)
    _check_sayable(spec, where, "dm_env")
    if isinstance(spec, Categorical) and not spec.shape:
        return specs.DiscreteArray(spec.n, _whole(spec.dtype), name=name)
    if isinstance(spec, Unbounded):
        return specs.Array(spec.shape, spec.dtype, name=name)
    low, high = spec._bounds() if not isinstance(spec, Categorical | MultiCategorical) else (0, spec.nvec - 1)
    if spec.dtype.kind == "b":
        low, high = np.zeros(spec.shape, bool), np.ones(spec.shape, bool)
    return specs.BoundedArray(spec.shape, spec.dtype, low, high, name=name)


def _check_sayable(spec: Any, where: str, whose: str) -> None:
    """ConfigError for what neither of them can say."""
    if not isinstance(spec, Binary | Bounded | Categorical | MultiCategorical | Unbounded):
        remedy = "; its categorical() has one" if hasattr(spec, "categorical") else ""
        raise ConfigError(f"{where}: expected numbers or codes, as {whose} has them, found {spec!r:.200}{remedy}")
    if getattr(spec, "mask", None) is not None:
        raise ConfigError(
            f"{where}: expected all codes to be allowed, as {whose} has no masks; with_mask(None) drops it"
        )
    if is_dynamic(spec.shape):
        raise ConfigError(f"{where}: expected sizes for all dimensions, found {spec.shape}; expand() gives them")
