"""Spaces of gymnasium in the form in which Minari writes them, without gymnasium."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError

LEAVES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text")


def parse_space(written: Any, *, where: str) -> dict[str, Any] | None:
    """Return a space as nested mappings with ``type``; None if the metadata have none.

    Raises:
        DataError: The space is not as Minari writes it.
    """
    if written is None:
        return None
    space = json.loads(written) if isinstance(written, str) else written
    _check(space, where)
    return space  # type: ignore[no-any-return]


def _check(space: Any, where: str) -> None:
    kind = space.get("type") if isinstance(space, dict) else None
    parts = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(parts, {"Dict": dict, "Tuple": list}.get(str(kind), ())):
        for name, part in _parts(parts):
            _check(part, f"{where}/{name}")
    elif kind not in LEAVES:
        raise DataError(f"{where}: expected a space of type {['Dict', 'Tuple', *LEAVES]}, found {kind!r}")
    else:
        leaf_shape(space, where=where)


def _parts(subspaces: Any) -> Iterable[tuple[str, Any]]:
    """Return the parts of a Dict by name, of a Tuple by position."""
    items = subspaces.items() if isinstance(subspaces, Mapping) else enumerate(subspaces)
    return ((str(name), part) for name, part in items)


def leaf_shape(space: Mapping[str, Any], *, where: str) -> tuple[int, ...]:
    """Return the shape of the values of a leaf."""
    kind = space["type"]
    try:
        if kind == "Box":
            return tuple(int(size) for size in space["shape"])
        if kind == "MultiBinary":
            return tuple(int(size) for size in np.atleast_1d(space["n"]))
        return np.shape(space["nvec"]) if kind == "MultiDiscrete" else ()
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: expected a {kind} space with its shape, found {str(space)[:80]}") from error


def is_picture(space: Mapping[str, Any], *, where: str) -> bool:
    """Whether Minari may have encoded the values of a space as pictures."""
    shape = leaf_shape(space, where=where)
    return space["type"] == "Box" and space.get("dtype") == "uint8" and len(shape) in (2, 3)


def written_space(space: Any) -> dict[str, Any]:
    """Return a space in the form of Minari, from a space of gymnasium or from mappings in that form.

    Raises:
        ConfigError: Minari does not know this kind of space.
    """
    if isinstance(space, Mapping) and not hasattr(space, "spaces"):  # gymnasium's Dict is a mapping, too
        return dict(space)
    kind = type(space).__name__
    if kind == "Box":
        found: dict[str, Any] = {"dtype": str(space.dtype), "shape": list(space.shape)}
        found |= {"low": space.low.tolist(), "high": space.high.tolist()}
    elif kind == "Discrete":
        found = {"dtype": "int64", "start": int(space.start), "n": int(space.n)}
    elif kind == "MultiDiscrete":
        found = {"dtype": str(space.dtype), "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    elif kind == "MultiBinary":
        found = {"n": space.n if isinstance(space.n, int) else [int(size) for size in space.n]}
    elif kind == "Text":
        found = {"max_length": space.max_length, "min_length": space.min_length, "charset": space.characters}
    elif kind == "Dict":
        found = {"subspaces": {name: written_space(part) for name, part in space.spaces.items()}}
    elif kind == "Tuple":
        found = {"subspaces": [written_space(part) for part in space.spaces]}
    else:
        raise ConfigError(f"space: expected one of {['Dict', 'Tuple', *LEAVES]}, found {kind}")
    return {"type": kind, **found}


class SpaceOf:
    """Finds the smallest space that holds all values of a column, piece by piece."""

    def __init__(self) -> None:
        self._low: float | int | None = None
        self._high: float | int | None = None
        self._first: npt.NDArray[Any] | None = None
        self._characters: set[str] = set()
        self._longest = 1

    def see(self, values: npt.NDArray[Any]) -> None:
        """Add values ``[n, ...]``."""
        if not len(values):
            return
        self._first = values[:1]
        if values.dtype.kind in "OSU":
            texts = {value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values}
            self._characters.update(*texts)
            self._longest = max(self._longest, *(len(text) for text in texts))
        elif values.dtype.kind in "biu" and values.size:
            low, high = int(values.min()), int(values.max())
            self._low = low if self._low is None else min(low, int(self._low))
            self._high = high if self._high is None else max(high, int(self._high))

    def written(self) -> dict[str, Any]:
        """Return the space in the form of Minari."""
        if self._first is None:
            raise DataError("space: expected values, found none")
        dtype, shape = self._first.dtype, self._first.shape[1:]
        if dtype.kind in "OSU":
            characters = "".join(sorted(self._characters)) or " "
            return {"type": "Text", "max_length": self._longest, "min_length": 0, "charset": characters}
        low, high = self._low or 0, self._high or 0
        if not shape and dtype.kind in "biu":
            start = min(int(low), 0)
            return {"type": "Discrete", "dtype": "int64", "start": start, "n": int(high) - start + 1}
        if dtype.kind == "f":
            bounds: tuple[Any, Any] = (-np.inf, np.inf)
        elif dtype == np.uint8:
            bounds = (0, 255)
        elif dtype.kind == "b":
            bounds = (0, 1)
        else:
            bounds = (int(low), int(high))
        lowest, highest = (np.full(shape, bound).tolist() for bound in bounds)
        name = "int8" if dtype.kind == "b" else str(dtype)
        return {"type": "Box", "dtype": name, "shape": list(shape), "low": lowest, "high": highest}


def space_leaves(space: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a space, with their keys."""
    if "subspaces" not in space:
        yield path, space
        return
    for name, part in _parts(space["subspaces"]):
        yield from space_leaves(part, (*path, name))
