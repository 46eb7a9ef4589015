"""Values whose rows differ in length (text, bytes, ragged arrays): as bytes in a ring, and in batches as object arrays.

A batch holds them as an object array while it is transformed, which is indexed and cut like any other array. On its way
out it becomes lists; ``Pad`` makes arrays of one shape and a mask of ragged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, SchemaError
from mouse_core.trees import as_array, fit, is_varying, map_tree

Bytes = npt.NDArray[np.uint8]
Refs = npt.NDArray[np.int64]
"""Where rows' values lie, ``[n, 2]``: the first byte among all that were ever written, and how many they are."""

TEXT, BYTES, RAGGED = "text", "bytes", "ragged"
_LEAST_ROOM = 1 << 12


# ---------------------------------------------------------------------- which fields they are


def kind_of(leaf: Any, lead: int) -> str:
    """What the first values of a field say that it is; "" for numbers in arrays of one shape.

    Args:
        leaf: The field's values of some rows.
        lead: How many axes count rows.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSU":
        return ""
    values, shape = apart(leaf, lead)
    if len(shape) < lead or not values:
        return ""
    for kind, accepted in ((TEXT, str), (BYTES, bytes)):
        if all(isinstance(value, accepted) for value in values):
            return kind
    return RAGGED if not isinstance(leaf, np.ndarray) and _is_ragged(values) else ""


def _is_ragged(values: Sequence[Any]) -> bool:
    """Whether values are arrays that differ along their first axis, and in nothing else."""
    try:
        shapes = {np.shape(value) for value in values}
    except ValueError:
        return False
    return len(shapes) > 1 and () not in shapes and len({shape[1:] for shape in shapes}) == 1


def apart(leaf: Any, lead: int) -> tuple[list[Any], tuple[int, ...]]:
    """The values of a field row by row, and the shape of its first axes; fewer than ``lead`` where there are fewer."""
    shape: tuple[int, ...] = ()
    values = [leaf]
    for _ in range(lead):
        if not all(isinstance(value, list | tuple) or np.ndim(value) for value in values):
            break
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise DataError(f"rows: expected as many in every time step, found {sorted(lengths)}")
        shape = (*shape, lengths.pop() if lengths else 0)
        values = [item for value in values for item in value]
    return values, shape


# ---------------------------------------------------------------------- to bytes and back


def encoded(value: Any, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, where: str) -> Bytes:
    """A row's value as bytes.

    Raises:
        SchemaError: It is of another kind, dtype or shape.
        DataError: Python numbers that the dtype does not hold.
    """
    if kind == TEXT:
        if not isinstance(value, str):
            raise SchemaError(f"{where}: expected text as in the first write, found {value!r:.60}")
        # A lone surrogate is no text elsewhere, but it is in Python.
        return np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    if kind == BYTES:
        if not isinstance(value, bytes):
            raise SchemaError(f"{where}: expected bytes as in the first write, found {value!r:.60}")
        return np.frombuffer(value, np.uint8)
    array = fit(value, dtype, where=where)
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
        axes = ", ".join(["length", *map(str, shape)])
        raise SchemaError(
            f"{where}: expected the shape [{axes}] of the first write, found {list(array.shape)}; ListStorage takes any"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decoded(raw: Bytes, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """What ``encoded`` was called on; an array lies in the memory of ``raw``. DataError: bytes that nobody encoded."""
    try:
        if kind == TEXT:
            return raw.tobytes().decode("utf-8", "surrogatepass")
        return raw.tobytes() if kind == BYTES else raw.view(dtype).reshape(-1, *shape)
    except ValueError as error:
        raise DataError(f"rows: expected the bytes of {kind}, found damaged ones: {error}") from error


class ByteRing:
    """Memory for values: of all bytes that were ever written, byte ``n`` lies in place ``n % len(memory)``."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def write(self, begin: int, values: Sequence[Bytes]) -> Refs:
        """Write values one behind the other from byte ``begin`` on."""
        refs = np.empty((len(values), 2), np.int64)
        refs[:, 1] = [value.size for value in values]
        refs[:, 0] = begin + np.cumsum(refs[:, 1]) - refs[:, 1]
        if values:
            self._put(begin, values[0] if len(values) == 1 else np.concatenate(values))
        return refs

    def _put(self, begin: int, raw: Bytes) -> None:
        while raw.size:
            place = begin % self.memory.size
            part = raw[: self.memory.size - place]
            self.memory[place : place + part.size] = part
            begin, raw = begin + part.size, raw[part.size :]

    def read(self, begin: int, nbytes: int) -> Bytes:
        """Bytes, copied."""
        if not 0 <= nbytes <= self.memory.size:
            raise DataError(f"rows: expected a value of up to {self.memory.size} bytes, found one of {nbytes}")
        if not nbytes:
            return np.empty(0, np.uint8)
        place = begin % self.memory.size
        raw = self.memory[place : place + nbytes]
        return raw.copy() if raw.size == nbytes else np.concatenate([raw, self.memory[: nbytes - raw.size]])

    def move(self, begin: int, end: int, memory: Bytes) -> ByteRing:
        """The bytes from ``begin`` to ``end`` in other memory, which has room for them."""
        ring = ByteRing(memory)
        while begin < end:
            place = begin % self.memory.size
            part = self.memory[place : place + end - begin]
            ring._put(begin, part)
            begin += part.size
        return ring


def room_for(nbytes: int) -> int:
    """Bytes of a ring in which so many are in use, and as many may come before it is looked through again."""
    return max(2 * nbytes, _LEAST_ROOM)


def is_full(room: int, used: int, coming: int) -> bool:
    """Whether a ring is to be made anew. Looking through all rows for what is in use must not happen too often."""
    return used + coming > room or room - used < room // 8


def is_sparse(span: int, used: int) -> bool:
    """Whether a ring is mostly holes, which rows left that were overwritten out of order."""
    return span > 4 * used + _LEAST_ROOM


def in_use(columns: Sequence[Refs], end: int) -> tuple[int, int]:
    """The first byte that some row has, and how many bytes rows have together, by where their values lie."""
    there = [refs[refs[:, 1] > 0] for refs in columns]
    begin = min((int(refs[:, 0].min()) for refs in there if len(refs)), default=end)
    return begin, sum(int(refs[:, 1].sum()) for refs in there)


class Heap:
    """The values of rows in memory, as long as there are rows."""

    def __init__(self) -> None:
        self._ring = ByteRing(np.empty(0, np.uint8))
        self._begin = self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, used or not."""
        return self._ring.memory.size

    def keep(self, values: Sequence[Bytes], columns: Sequence[Refs]) -> Refs:
        """Keep values, and say where they lie; ``columns`` say where those lie that there are, and may be changed."""
        coming = sum(value.size for value in values)
        if is_full(self._ring.memory.size, self._end - self._begin, coming):
            self._make_room(coming, columns)
        refs = self._ring.write(self._end, values)
        self._end += coming
        return refs

    def _make_room(self, coming: int, columns: Sequence[Refs]) -> None:
        begin, used = in_use(columns, self._end)
        if is_sparse(self._end - begin, used):
            ring, end = ByteRing(np.empty(room_for(used + coming), np.uint8)), 0
            for refs in columns:
                refs[...] = ring.write(end, [self._ring.read(*ref) for ref in refs.tolist()])
                end += int(refs[:, 1].sum())
            self._ring, self._begin, self._end = ring, 0, end
            return
        if is_full(self._ring.memory.size, self._end - begin, coming):
            memory = np.empty(room_for(self._end - begin + coming), np.uint8)
            self._ring = self._ring.move(begin, self._end, memory)
        self._begin = begin

    def read(self, refs: Refs) -> list[Bytes]:
        """The values at ``refs``, ``[..., 2]``, copied."""
        return [self._ring.read(begin, nbytes) for begin, nbytes in refs.reshape(-1, 2).tolist()]


# ---------------------------------------------------------------------- object arrays


def object_array(values: Sequence[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Values as an array of objects, whatever they are."""
    made = np.empty(len(values), object)
    for place, value in enumerate(values):
        made[place] = value
    return made.reshape(shape)


def as_text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An object array of text as an array of text, which can be compared at once; any other array as it is."""
    if is_varying(values) and all(isinstance(value, str) for value in values.reshape(-1)):
        return values.astype(str)
    return values


def as_lists(batch: Any) -> Any:
    """A batch with its object arrays as lists."""
    # Of most batches every field is a plain array; asking whether one is a Mapping takes longer than all the rest.
    if type(batch) is dict and all(type(leaf) is np.ndarray and leaf.dtype.kind != "O" for leaf in batch.values()):
        return batch
    return map_tree(lambda leaf: leaf.tolist() if is_varying(leaf) else leaf, batch)


def padding_of(value: Any) -> Any:
    """An empty value of the kind of ``value``: what stands where a batch is padded."""
    return value[:0] if isinstance(value, str | bytes | np.ndarray) or hasattr(value, "shape") else None


def first_array(values: Sequence[Any], *, where: str) -> npt.NDArray[Any]:
    """The first of the rows' arrays with something in it, which says the dtype and the shape of an item."""
    if not values:
        raise SchemaError(f"{where}: expected at least one row, found none")
    array = as_array(next((value for value in values if np.size(value)), values[0]), where=where)
    if not array.ndim:
        raise SchemaError(f"{where}: expected rows of arrays [length, ...], found {values[0]!r:.60}")
    return array
