"""Columns of rows as bytes and back, without pickle.

What they are stands in a description of plain values, and their values lie one behind the other:

- an array ``[n, ...]`` of numbers: its dtype and shape, and its bytes
- a list of arrays of numbers: their dtype and shapes, and their bytes
- anything else (text, bytes, lists, dicts, None): an Arrow column
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.checks import UNREADABLE
from mouse_core.dtypes import RowError, dtype_name, is_hidden, named_dtype, refuse_hidden
from mouse_core.errors import DataError

Buffer = memoryview
_PLAIN = "biufc"


def encoded(columns: Mapping[str, Any]) -> tuple[list[Any], list[Buffer]]:
    """What columns are, and their bytes.

    Raises:
        DataError: Values that are neither numbers, text, bytes nor lists and dicts of such.
    """
    described: list[Any] = []
    parts: list[Buffer] = []
    for name, values in columns.items():
        kind, brought = _encoded(name, values)
        described.append([str(name), *kind, sum(part.nbytes for part in brought)])
        parts += brought
    return described, parts


def _encoded(name: str, values: Any) -> tuple[list[Any], list[Buffer]]:
    if np.ma.is_masked(values):
        values = [None if is_hidden(value) else value for value in values]
    if not isinstance(values, list | tuple | np.ndarray) and hasattr(values, "__array__"):
        values = np.asarray(values)  # of a framework
    if isinstance(values, np.ndarray) and values.dtype.kind in _PLAIN:
        return ["array", dtype_name(values.dtype), list(values.shape)], [_bytes_of(values)]
    items = [None if is_hidden(value) else value for value in values]
    try:
        refuse_hidden(items)
    except RowError as error:
        raise DataError(f"column {name!r}: {error} at row {error.row}") from error
    if items and all(isinstance(item, np.ndarray) and item.dtype.kind in _PLAIN for item in items):
        (dtype, *others) = {item.dtype for item in items}
        if not others:
            shapes = [list(item.shape) for item in items]
            return ["arrays", dtype_name(dtype), shapes], [_bytes_of(item) for item in items]
    return ["arrow", "", [len(items)]], [_arrow_bytes(name, items)]


def _arrow_bytes(name: str, items: list[Any]) -> Buffer:
    """A column of anything that Arrow takes, as a stream of Arrow."""
    try:
        column = pa.array([item.tolist() if isinstance(item, np.ndarray | np.generic) else item for item in items])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r}: expected numbers, text, bytes, or lists and dicts of such, found {error}"
        ) from error
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("", column.type)])) as stream:
        stream.write_batch(pa.record_batch([column], [""]))
    return memoryview(sink.getvalue())


def _bytes_of(values: np.ndarray[Any, Any]) -> Buffer:
    flat = np.ascontiguousarray(values).reshape(-1)
    return memoryview(flat.view(np.uint8).data if flat.size else b"")


def decoded(described: Any, body: Buffer) -> dict[str, Any]:
    """The columns; arrays are views of ``body``.

    Raises:
        DataError: The description does not go with the bytes.
    """
    columns: dict[str, Any] = {}
    try:
        begin = 0
        for name, kind, dtype, shape, nbytes in described:
            if not 0 <= nbytes <= len(body) - begin:
                raise ValueError(f"{nbytes} bytes of {len(body) - begin}")
            columns[str(name)] = _decoded(kind, dtype, shape, body[begin : begin + nbytes])
            begin += nbytes
        if begin != len(body):
            raise ValueError(f"{len(body)} bytes for {begin}")
    except (*UNREADABLE, pa.ArrowException, OSError) as error:
        raise DataError(f"rows: expected columns as a client sends them, found {error!r:.200}") from error
    return columns


def _decoded(kind: str, dtype: str, shape: Any, part: Buffer) -> Any:
    if kind == "array":
        return _array(dtype, shape, part)
    if kind == "arrays":
        found, begin = [], 0
        for one in shape:
            end = begin + prod(one) * named_dtype(dtype).itemsize
            found.append(_array(dtype, one, part[begin:end]))
            begin = end
        return found
    with pa.ipc.open_stream(part) as stream:
        column = stream.read_all().column(0)
    column.validate(full=True)
    return column.to_pylist()


def _array(dtype: str, shape: Sequence[int], part: Buffer) -> np.ndarray[Any, Any]:
    kind = named_dtype(dtype)
    if kind.kind not in _PLAIN or min(shape, default=0) < 0 or prod(shape) * kind.itemsize != len(part):
        raise ValueError(f"{dtype} {shape} of {len(part)} bytes")
    return np.frombuffer(part, kind).reshape(shape)
