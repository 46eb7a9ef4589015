"""Metadata of rollouts as rows of one Arrow type: nested values, each with its kind, so that all come back exactly.

A value is one row; a container is followed by the rows of what it holds. Parquet has no unions, and a struct of the
keys that happen to be there would lose which ones were missing and what type they had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import RowError, refuse_hidden
from mouse_core.errors import DataError

NODE = pa.struct(
    [
        pa.field("key", pa.string()),  # of an item of a dict; else null
        pa.field("kind", pa.string(), nullable=False),
        pa.field("number", pa.float64()),  # a bool, float or whole number up to 2**53; how many items a container has
        pa.field("text", pa.string()),  # a str, a larger whole number, the dtype and shape of an array
        pa.field("data", pa.binary()),  # bytes, the values of an array
    ]
)
"""A row of metadata."""

_EXACT = 2**53
_DEEPEST = 100
Node = tuple[str | None, str, float | None, str | None, bytes | None]


def checked_metadata(values: Any, where: str) -> dict[str, Any]:
    """A copy of metadata, or DataError if it holds what cannot be stored; ``where`` begins the message."""
    if not isinstance(values, Mapping):
        raise DataError(f"{where}: expected metadata as a dict, found {values!r:.100}")
    return {_key(key, where): _copy(value, f"{where}: metadata[{key!r}]", 1) for key, value in values.items()}


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise DataError(f"{where}: expected keys of metadata as str, found {key!r:.100}")
    return key


def _copy(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if depth > _DEEPEST:
        raise DataError(f"{where}: expected at most {_DEEPEST} levels of metadata, found more")
    if isinstance(value, Mapping):
        return {_key(key, where): _copy(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(_copy(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value))
    if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biufc":
        try:
            refuse_hidden(value)
        except RowError as error:
            raise DataError(f"{where}: {error}") from error
        return np.array(value, order="C") if isinstance(value, np.ndarray) else value
    raise DataError(
        f"{where}: expected None, bool, int, float, str, bytes, numeric NumPy values, or lists, tuples and dicts of "
        f"these, found {kind.__name__}"
    )


def encode(values: Mapping[str, Any], nodes: list[Node]) -> int:
    """Append the rows of a dict's items; how many there are now."""
    for key, value in values.items():
        _encode(key, value, nodes)
    return len(nodes)


def _encode(key: str | None, value: Any, nodes: list[Node]) -> None:
    if value is None:
        nodes.append((key, "none", None, None, None))
    elif isinstance(value, bool):
        nodes.append((key, "bool", float(value), None, None))
    elif isinstance(value, str):
        nodes.append((key, "str", None, value, None))
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        shape = "" if isinstance(value, np.generic) else ",".join(map(str, array.shape))
        kind = "scalar" if isinstance(value, np.generic) else "array"
        nodes.append((key, kind, None, f"{array.dtype.str}[{shape}]", array.tobytes()))
    elif isinstance(value, int):
        small = -_EXACT <= value <= _EXACT
        nodes.append((key, "int", float(value) if small else None, None if small else str(value), None))
    elif isinstance(value, float):
        # The bits of a NaN need not survive elsewhere; that it is one does.
        nodes.append((key, "float", value, None, None))
    elif isinstance(value, bytes):
        nodes.append((key, "bytes", None, None, value))
    elif isinstance(value, dict):
        nodes.append((key, "dict", float(len(value)), None, None))
        encode(value, nodes)
    else:
        nodes.append((key, type(value).__name__, float(len(value)), None, None))
        for item in value:
            _encode(None, item, nodes)


def decode(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The dict that ``encode`` made rows of."""
    found, position = {}, 0
    while position < len(nodes):
        key = nodes[position]["key"]
        found[key], position = _decode(nodes, position)
    return found


def _decode(nodes: Sequence[Mapping[str, Any]], position: int) -> tuple[Any, int]:
    """The value whose rows begin at a position, and where they end."""
    node = nodes[position]
    kind = node["kind"]
    position += 1
    if kind not in _CONTAINERS:
        if kind not in _VALUES:
            raise DataError(f"metadata: expected a known kind of value, found {kind!r}")
        return _VALUES[kind](node), position
    keys, items = [], []
    for _ in range(int(node["number"])):
        keys.append(nodes[position]["key"])
        item, position = _decode(nodes, position)
        items.append(item)
    return _CONTAINERS[kind](keys, items), position


def _array(node: Mapping[str, Any]) -> npt.NDArray[Any]:
    dtype, _, shape = node["text"][:-1].partition("[")
    sizes = [int(size) for size in shape.split(",") if size]
    return np.frombuffer(node["data"], dtype).reshape(sizes).copy()


_CONTAINERS: dict[str, Callable[[list[str], list[Any]], Any]] = {
    "dict": lambda keys, items: dict(zip(keys, items, strict=True)),
    "list": lambda keys, items: items,
    "tuple": lambda keys, items: tuple(items),
}
_VALUES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "none": lambda node: None,
    "bool": lambda node: bool(node["number"]),
    "int": lambda node: int(node["number"] if node["text"] is None else node["text"]),
    "float": lambda node: math.nan if math.isnan(node["number"]) else node["number"],
    "str": lambda node: node["text"],
    "bytes": lambda node: node["data"],
    "array": _array,
    "scalar": lambda node: _array(node)[()],
}
