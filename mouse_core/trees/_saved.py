"""Forests and trees as files: arrays and what says how they are nested, checked against damage, no pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np

from mouse_core.errors import SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint

_FORMAT = 1


def write(path: str | PathLike[str], kind: str, state: Mapping[str, Any]) -> None:
    """Write nested dicts and tuples of arrays and plain values, by names that may be tuples.

    Raises:
        StorageError: The file cannot be written.
        SchemaError: Values that differ in length.
    """
    arrays: dict[str, Any] = {}
    described = _described(dict(state), arrays)
    write_checkpoint(path, {"format": _FORMAT, "kind": kind, "described": json.dumps(described), "arrays": arrays})


def read(path: str | PathLike[str], kind: str, names: Iterable[str]) -> dict[str, Any]:
    """What ``write`` wrote.

    Raises:
        StateError: The file is damaged, of another kind, or of a newer version.
        StorageError: It cannot be read.
    """
    state = read_checkpoint(path)
    if state.get("kind") != kind:
        raise StateError(f"{path}: expected a saved {kind}, found {state.get('kind', 'something else')}")
    if state.get("format") != _FORMAT:
        raise StateError(f"{path}: expected a {kind} of version {_FORMAT}, found version {state.get('format')}")
    try:
        found: dict[str, Any] = _made(json.loads(state["described"]), state["arrays"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: expected the description of a {kind}, found {error!r}") from error
    missing = set(names) - found.keys()
    if missing:
        raise StateError(f"{path}: expected {sorted(missing)} in a {kind}, found {sorted(found)}")
    return found


def _described(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise SchemaError("dumps: expected rows of one length, found some that differ")
        arrays[str(len(arrays))] = value
        return {"array": len(arrays) - 1}
    if isinstance(value, Mapping):
        return {
            "dict": [[list(k) if isinstance(k, tuple) else k, _described(child, arrays)] for k, child in value.items()]
        }
    if isinstance(value, tuple):
        return {"tuple": [_described(child, arrays) for child in value]}
    return {"value": value}


def _made(described: Any, arrays: Mapping[str, Any]) -> Any:
    if "array" in described:
        return arrays[str(described["array"])]
    if "dict" in described:
        return {tuple(k) if isinstance(k, list) else k: _made(child, arrays) for k, child in described["dict"]}
    if "tuple" in described:
        return tuple(_made(child, arrays) for child in described["tuple"])
    return described["value"]
