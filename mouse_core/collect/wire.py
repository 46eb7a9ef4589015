"""Messages over a socket: a call or its answer in JSON, then a body of bytes. Messages contain no pickled objects and
no code.

    b"MSC1" | length of the JSON, 4 bytes | length of the body, 8 bytes | JSON | body

Numbers are little-endian. Even if a message announces a large length, physical memory is used only for the bytes that
have arrived.

A column is described in the JSON, and its values are in the body:

- an array ``[n, ...]`` of numbers is sent as its dtype, its shape and its bytes
- a list of arrays of numbers is sent as their dtype, their shapes and their bytes
- other values (text, bytes, lists, dicts, None) are sent as an Arrow column

The size of the body limits the memory that decoded values need. Compressed values, and values to which a message refers
twice, raise DataError before any value is decoded.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.checks import UNREADABLE
from mouse_core.dtypes import RowError, dtype_name, is_hidden, named_dtype, refuse_hidden
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.ipc import read_message

Buffer = memoryview
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"MSC1"
_MOST_SAID = 1 << 24
_MOST_DIMENSIONS = 32
MOST_BYTES = 1 << 31
"""Largest size in bytes of the rows of one write."""
_PLAIN = "biufc"
_TYPED = pa.Scalar, np.datetime64, np.timedelta64  # Python values would lose the type or unit of these
_MOST_PARTS = 512  # the limit of one system call
_LONGEST_PATH = 100


def send(to: socket.socket, said: Mapping[str, Any], parts: Sequence[memoryview] = ()) -> None:
    """Send a message.

    Raises:
        DataError: The message has too many bytes.
        OSError: The socket failed.
    """
    text = json.dumps(said).encode()
    nbytes = sum(part.nbytes for part in parts)
    if nbytes > MOST_BYTES or len(text) > _MOST_SAID:
        raise DataError(
            f"write: expected rows of up to {MOST_BYTES} bytes, found {nbytes}; write fewer rows in one call"
        )
    rest = [memoryview(_HEAD.pack(_MAGIC, len(text), nbytes) + text), *[part for part in parts if part.nbytes]]
    while rest:
        sent = to.sendmsg(rest[:_MOST_PARTS])
        while rest and sent >= rest[0].nbytes:
            sent -= rest.pop(0).nbytes
        if sent:
            rest[0] = rest[0][sent:]


def receive(
    source: socket.socket, *, most_text: int = _MOST_SAID, most_bytes: int = MOST_BYTES
) -> tuple[dict[str, Any], memoryview]:
    """Receive the next message.

    Args:
        source: The socket.
        most_text, most_bytes: The largest sizes in bytes of the JSON and of the body.

    Raises:
        ConnectionError: The connection ended.
        DataError: The bytes are not a message.
        OSError: The socket failed.
    """
    magic, said, nbytes = _HEAD.unpack(_exactly(source, _HEAD.size))
    if magic != _MAGIC or said > most_text or nbytes > most_bytes:
        raise DataError(
            f"message: expected a message of up to {most_bytes} bytes, found {bytes(magic)!r} with {said} bytes of "
            f"JSON and {nbytes} bytes of values"
        )
    try:
        text = json.loads(bytes(_exactly(source, said)))
    except UNREADABLE as error:
        raise DataError(f"message: expected JSON, found {error}") from error
    if not isinstance(text, dict):
        raise DataError(f"message: expected a dict, found a {type(text).__name__}")
    return text, _exactly(source, nbytes)


def _exactly(source: socket.socket, nbytes: int) -> memoryview:
    memory = np.empty(nbytes, np.uint8).data  # memory is not resident before bytes arrive
    done = 0
    while done < nbytes:
        count = source.recv_into(memory[done:])
        if not count:
            raise ConnectionResetError("the other side has closed the connection")
        done += count
    return memory


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """Return a path to the socket that is short enough for the operating system."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        short = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        if not os.path.isdir(os.path.dirname(short)):
            raise ConfigError(f"address: expected a path of up to {_LONGEST_PATH} bytes on this system, found {path!r}")
        yield short
    finally:
        os.close(folder)


def encoded(columns: Mapping[str, Any]) -> tuple[list[Any], list[Buffer]]:
    """Return the description of columns, and their bytes.

    Raises:
        DataError: A value is not a number, text, bytes, or a list or dict of these.
    """
    described: list[Any] = []
    parts: list[Buffer] = []
    for name, values in columns.items():
        kind, brought = _encoded(name, values)
        described.append([str(name), *kind, sum(part.nbytes for part in brought)])
        parts += brought
    return described, parts


def _encoded(name: str, values: Any) -> tuple[list[Any], list[Buffer]]:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return ["column", "", [len(values)]], _arrow_bytes(name, values)
    if np.ma.is_masked(values):
        values = [None if is_hidden(value) else value for value in values]
    if not isinstance(values, list | tuple) and hasattr(values, "__array__"):
        values = np.asarray(values)  # an array of a framework, or a subclass of ndarray
    if isinstance(values, np.ndarray) and values.dtype.kind in _PLAIN:
        return ["array", dtype_name(values.dtype), list(values.shape)], [_bytes_of(values)]
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM" and values.ndim == 1:  # items would lose the unit
        return ["column", "", [len(values)]], _arrow_bytes(name, values)
    items: list[Any] = [None if is_hidden(value) else value for value in values]
    try:
        refuse_hidden(items)
    except RowError as error:
        raise DataError(f"column {name!r}: {error} at row {error.row}") from error
    if items and all(isinstance(item, np.ndarray) and item.dtype.kind in _PLAIN for item in items):
        (dtype, *others) = {item.dtype for item in items}
        if not others:
            shapes = [list(item.shape) for item in items]
            return ["arrays", dtype_name(dtype), shapes], [_bytes_of(item) for item in items]
    kind = "column" if any(isinstance(item, _TYPED) for item in items) else "arrow"
    return [kind, "", [len(items)]], _arrow_bytes(name, items)


def _arrow_bytes(name: str, values: Any) -> list[Buffer]:
    """Encode a column of values that Arrow supports. The result is a message of the schema and a message of a record
    batch.
    """
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            values.validate(full=True)
            column = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        else:
            column = pa.array([_plain(item) for item in values] if isinstance(values, list) else values)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"column {name!r}: expected numbers, text, bytes, or lists and dicts of these, found {error}"
        ) from error
    batch = pa.record_batch([column], [""])
    return [memoryview(batch.schema.serialize()), memoryview(batch.serialize())]


def _plain(item: Any) -> Any:
    """Convert an item for Arrow; times stay NumPy values, because Python times lack nanoseconds."""
    if not isinstance(item, np.ndarray | np.generic) or item.dtype.kind in "mM":
        return item
    if item.dtype.names is not None:
        raise TypeError(f"{item.dtype}")
    return item.tolist()


def _bytes_of(values: np.ndarray[Any, Any]) -> Buffer:
    flat = np.ascontiguousarray(values).reshape(-1)
    return memoryview(flat.view(np.uint8).data if flat.size else b"")


def decoded(described: Any, body: Buffer) -> dict[str, Any]:
    """Decode columns; arrays are views of ``body``.

    Raises:
        DataError: The description does not match the bytes, or the values would take far more memory than the bytes.
    """
    columns: dict[str, Any] = {}
    # The limit is needed because nulls and empty rows have no bytes in the body, but take memory when they are decoded.
    most = 16 * len(body) + 4096
    try:
        begin = 0
        for name, kind, dtype, shape, nbytes in described:
            if not 0 <= nbytes <= len(body) - begin:
                raise ValueError(f"expected a column of at most {len(body) - begin} bytes, found {nbytes}")
            part = body[begin : begin + nbytes]
            if kind == "array":
                columns[str(name)] = _array(dtype, shape, part, most)
            elif kind == "arrays":
                columns[str(name)] = _arrays(dtype, shape, part, most)
            else:
                column = _read_batch(part, most).column(0)
                columns[str(name)] = column if kind == "column" else column.to_pylist()
            begin += nbytes
        if begin != len(body):
            raise ValueError(f"expected columns of {len(body)} bytes in total, found {begin}")
    except (*UNREADABLE, pa.ArrowException, OSError) as error:
        raise DataError(f"rows: cannot decode the columns that a client sent: {error!r:.200}") from error
    return columns


def _read_batch(body: Buffer, most: int) -> pa.RecordBatch:
    """Read the record batch of a client; its values are views of ``body``.

    Args:
        body: The message of the schema, and the message of the record batch.
        most: The largest number of values, including values in lists and dicts.

    Raises:
        DataError: The message is not a record batch, is compressed, refers to values more than once, or has too many
            values.
        pyarrow.ArrowException, OSError, ValueError: The message is damaged.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(body))
    first = read_message(lambda begin, end: body[begin:end], 0, len(body))
    begin = len(body) if first is None else first.end
    message = read_message(lambda begin, end: body[begin:end], begin, len(body))
    head = None if message is None else message.head
    if head is None or head.compressed or head.columns(schema, 0).keys() != set(schema.names):
        raise DataError("expected a record batch of plain, uncompressed values, found a different record batch")
    values = float(head.levels[:, 0].sum(dtype=np.float64)) if len(head.levels) else 0
    if values > most:
        raise DataError(f"expected fewer values in a message of {len(body)} bytes, found {values:.0f}")
    batch = pa.ipc.read_record_batch(pa.py_buffer(body[begin:]), schema)
    batch.validate(full=True)
    return batch


def _arrays(dtype: str, shapes: Any, part: Buffer, most: int) -> list[np.ndarray[Any, Any]]:
    found, begin = [], 0
    for shape in shapes:
        end = begin + _count(shape) * named_dtype(dtype).itemsize
        found.append(_array(dtype, shape, part[begin:end], most))
        begin = end
    return found


def _array(dtype: str, shape: Sequence[int], part: Buffer, most: int) -> np.ndarray[Any, Any]:
    kind = named_dtype(dtype)
    fits = min(shape, default=0) >= 0 and _count(shape) * kind.itemsize == len(part)
    # A shape such as [10**12, 0] has no bytes, and 10**12 rows.
    if kind.kind not in _PLAIN or not fits or prod(max(one, 1) for one in shape) > most:
        raise ValueError(f"expected an array {dtype} {shape}, found {len(part)} bytes")
    return np.frombuffer(part, kind).reshape(shape)


def _count(shape: Sequence[int]) -> int:
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"expected at most {_MOST_DIMENSIONS} dimensions, found {len(shape)}")
    return prod(shape)
