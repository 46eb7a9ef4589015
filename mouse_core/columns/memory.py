"""Columns, the memory for rows of one schema, private or memory-mapped.

Small fields of a row are adjacent, so that reading a row touches one part of memory; large fields are separate. Ragged
values (which differ in length) are stored one after another in a ring of bytes. A row refers to its value by the length
of the value and the position of the value's first byte, counted over all bytes ever written. The ring has twice the
length of the values in use. When the ring is full, values of removed rows are overwritten; if this frees too little
room, the ring is copied to larger memory. Example: in a ring of 8 bytes, after 10 bytes were written, the value with
position 8 and length 2 lies in the bytes 0 and 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core import nested
from mouse_core._base.memory import BatchLayout, MemoryPool
from mouse_core.dtypes import dtype_name, named_dtype
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError

Bytes = npt.NDArray[np.uint8]

TEXT, BYTES, RAGGED = "text", "bytes", "ragged"


def field_kind(leaf: Any, lead: int) -> str:
    """Return the kind of a field from its first values: TEXT, BYTES, RAGGED, or "" for numbers in rows of one shape.

    Args:
        leaf: The field's values.
        lead: Number of leading axes that index rows.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSU":
        return ""
    values, shape = row_values(leaf, lead)
    if len(shape) < lead or not values:
        return ""
    for kind, accepted in ((TEXT, str), (BYTES, bytes)):
        if all(isinstance(value, accepted) for value in values):
            return kind
    try:
        return RAGGED if nested.differ_in_length({np.shape(value) for value in values}) else ""
    except ValueError:
        return ""


def row_values(leaf: Any, lead: int) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values of a field row by row, and the sizes of the axes that index rows.

    The result has fewer than ``lead`` sizes if the leaf has fewer axes.
    """
    shape: tuple[int, ...] = ()
    values = [leaf]
    for _ in range(lead):
        if not all(isinstance(value, list | tuple) or np.ndim(value) for value in values):
            break
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise DataError(f"rows: expected the same number of rows in every time step, found {sorted(lengths)}")
        shape = (*shape, lengths.pop() if lengths else 0)
        values = [item for value in values for item in value]
    return values, shape


_FORMAT = 1
_LONGEST = (1 << 31) - 1  # NumPy's limit for an axis of a row


@dataclass(frozen=True)
class FieldType:
    """The dtype and shape of a field of a row.

    Args:
        dtype: The dtype of the values; uint8 for text and bytes.
        shape: The shape of a row; for ragged rows, the shape of an item.
        varies: TEXT, BYTES or RAGGED for rows that differ in length, else "".
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    varies: str = ""

    @property
    def nbytes(self) -> int:
        """The size of a row in bytes."""
        return self.dtype.itemsize * prod(self.shape)

    def encode(self, value: Any, *, where: str) -> Bytes:
        """Convert the value of a row that can differ in length to bytes.

        Raises:
            SchemaError: The value has another kind, dtype or shape.
            DataError: The dtype cannot represent the Python numbers.
        """
        if self.varies == TEXT:
            if not isinstance(value, str):
                raise SchemaError(f"{where}: expected text as in the first write, found {value!r:.60}")
            # Python texts may contain lone surrogates, which UTF-8 cannot encode.
            return np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
        if self.varies == BYTES:
            if not isinstance(value, bytes):
                raise SchemaError(f"{where}: expected bytes as in the first write, found {value!r:.60}")
            return np.frombuffer(value, np.uint8)
        array = nested.fit(value, self.dtype, where=where)
        if array.ndim != 1 + len(self.shape) or array.shape[1:] != self.shape:
            axes = ", ".join(["length", *map(str, self.shape)])
            raise SchemaError(
                f"{where}: expected the shape [{axes}] of the first write, found {list(array.shape)}; "
                "ListStorage accepts any shape"
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def decode(self, raw: Bytes) -> Any:
        """Decode the bytes of ``encode``; an array shares the memory of ``raw``.

        Raises:
            DataError: The bytes are damaged.
        """
        try:
            if self.varies == TEXT:
                return raw.tobytes().decode("utf-8", "surrogatepass")
            return raw.tobytes() if self.varies == BYTES else raw.view(self.dtype).reshape(-1, *self.shape)
        except ValueError as error:
            raise DataError(f"rows: expected the bytes of {self.varies}, found damaged bytes: {error}") from error


class RowSchema:
    """The fields of a row, and their nesting.

    Args:
        structure: The nesting of the fields; see ``mouse_core.nested.structure_of``.
        fields: The dtype and shape of each field.
        num_envs: Number of rows of one time step.
    """

    def __init__(
        self, structure: nested.Structure, fields: Mapping[nested.FieldKey, FieldType], num_envs: int = 1
    ) -> None:
        self.structure = structure
        self.lists = nested.lists_of(structure)
        # Whether the structure was read from a file, which has the names of named tuples but not their classes.
        self.from_data = False
        self.fields = dict(fields)
        self.num_envs = num_envs
        self.varying = {key: kind for key, kind in self.fields.items() if kind.varies}
        # The stored form of a row, in which ragged values are references.
        self.stored = {key: _REF if kind.varies else kind for key, kind in self.fields.items()}
        self.plain = isinstance(structure, dict) and all(isinstance(child, nested.Leaf) for child in structure.values())

    @classmethod
    def of(cls, rows: Any, lead: int, ndim: int, ragged: Collection[nested.FieldKey] = ()) -> RowSchema:
        """Return the schema of the first written rows; the first ``lead`` axes of every leaf count rows.

        Args:
            rows: The rows.
            lead: Number of leading axes that index rows.
            ndim: The number of axes that index rows in the storage.
            ragged: Names of fields that are declared as ragged.

        Raises:
            SchemaError: A leaf is not an array, or has fewer axes.
            ConfigError: A field in ``ragged`` does not exist.
        """
        fields: dict[nested.FieldKey, FieldType] = {}
        num_envs = 1
        leaves = nested.flatten(rows)
        if not leaves.keys() >= set(ragged):
            raise ConfigError(f"ragged: expected fields among {list(leaves)}, found {sorted(map(str, ragged))}")
        for key, leaf in leaves.items():
            where, varies = _where(key), RAGGED if key in ragged else field_kind(leaf, lead)
            array = np.empty(0, np.uint8) if varies else nested.as_array(_even(key, leaf), where=where)
            values, shape = row_values(leaf, lead) if varies else ([], array.shape[:lead])
            if len(shape) < lead:
                found = f"{leaf!r:.60}" if varies else f"the shape {array.shape}"
                raise SchemaError(f"{where}: expected {_axes(lead, ndim)}, found {found}")
            if ndim == 2 and not fields:
                num_envs = shape[lead - 1]
            if varies == RAGGED:
                array = _first_item(values, where=where)
            fields[key] = FieldType(array.dtype.newbyteorder("="), array.shape[1 if varies else lead :], varies)
        if num_envs < 1:
            raise SchemaError("rows: expected at least one environment, found none")
        return cls(nested.structure_of(rows), fields, num_envs)

    def check(self, rows: Any, lead: int, ndim: int) -> tuple[list[Any], int]:
        """Return the leaves of ``rows`` as arrays ``[n, *shape]`` in the order of ``fields``, and the number of rows,
        ``n``.

        A ragged field is returned as a list with the bytes of each row.

        Raises:
            SchemaError: Structure, dtype, shape, or number of environments differ from the first write.
            DataError: The dtype cannot represent the Python numbers, or leaves differ in length.
        """
        leaves: Any = rows if self.plain and type(rows) is dict else nested.flatten(rows)
        if leaves.keys() != self.fields.keys():
            raise SchemaError(f"rows: expected the fields {list(self.fields)} of the first write, found {list(leaves)}")
        arrays = []
        expected: tuple[int, ...] | None = None
        for key, kind in self.fields.items():
            array = leaves[key]
            if kind.varies:
                values, found = row_values(array, lead)
                if (isinstance(array, str | bytes) and lead) or len(found) < lead:
                    raise SchemaError(f"{_where(key)}: expected {_axes(lead, ndim)}, found {array!r:.60}")
                arrays.append([kind.encode(value, where=_where(key)) for value in values])
                self._check_lead(key, found, ndim, expected)
                expected = found
                continue
            if type(array) is not np.ndarray or array.dtype != kind.dtype:
                array = _fitting(key, kind, array)
            shape = array.shape
            if shape[lead:] != kind.shape or len(shape) < lead:
                single = "; to write one row, pass [row]" if shape == kind.shape and ndim == 1 else ""
                expected_axes = ", ".join([*([_axes(lead, ndim)] if lead else []), *map(str, kind.shape)])
                raise SchemaError(
                    f"{_where(key)}: expected the shape [{expected_axes}] of the first write, found {list(shape)}"
                    f"{single or _if_declared(key, shape[lead:], kind.shape)}"
                )
            if shape[:lead] != expected:
                self._check_lead(key, shape[:lead], ndim, expected)
                expected = shape[:lead]
            # For a field without values, NumPy cannot infer the number of rows.
            arrays.append(array if lead == 1 else array.reshape(prod(shape[:lead]), *kind.shape))
        return arrays, len(arrays[0])

    def with_more(self, rows: Any, lead: int) -> RowSchema | None:
        """Return the schema of ``rows``, if the rows have all fields of this schema and additional fields; else None.

        Raises:
            SchemaError: See ``of``.
        """
        if not nested.flatten(rows).keys() > self.fields.keys():
            return None
        found = RowSchema.of(rows, lead, 1)
        return RowSchema(found.structure, {**self.fields, **found.fields, **self.fields}, self.num_envs)

    def whole_steps(self, capacity: int) -> int:
        """Return ``capacity`` rounded down to complete time steps: 99 rows for a capacity of 100 with 3 environments.

        Raises:
            ConfigError: The capacity is less than one time step.
        """
        if capacity < self.num_envs:
            raise ConfigError(
                f"capacity: expected at least {self.num_envs}, one row for each environment, found {capacity}"
            )
        return capacity - capacity % self.num_envs

    def _check_lead(
        self, key: nested.FieldKey, found: tuple[int, ...], ndim: int, expected: tuple[int, ...] | None
    ) -> None:
        """Raise an error unless a field has as many rows as the previous fields; for the first field, check the number
        of environments.
        """
        if expected is None:
            if ndim == 2 and found and found[-1] != self.num_envs:
                raise SchemaError(f"{_where(key)}: expected {self.num_envs} environments, found {found[-1]}")
        elif found != expected:
            raise DataError(
                f"{_where(key)}: expected {list(expected)} rows as in {next(iter(self.fields))!r}, found {list(found)}"
                f"{_if_listed([next(iter(self.fields)), key])}"
            )

    def to_json(self) -> dict[str, Any]:
        """Convert the schema to plain values."""
        fields = [
            [
                key if isinstance(key, str) else list(key),
                dtype_name(kind.dtype),
                list(kind.shape),
                *([kind.varies] if kind.varies else []),
            ]
            for key, kind in self.fields.items()
        ]
        structure = nested.structure_to_json(self.structure)
        return {"format": _FORMAT, "structure": structure, "num_envs": self.num_envs, "fields": fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSchema:
        """Restore the schema from ``to_json``; raise one of ``UNREADABLE`` for other values."""
        if value["format"] != _FORMAT:
            found = f"found {value['format']}; a newer mouse-data wrote the rows"
            raise ValueError(f"expected rows of format {_FORMAT}, {found}")
        fields = {
            (name if isinstance(name, str) else tuple(name)): _field_type(*kind) for name, *kind in value["fields"]
        }
        structure, num_envs = nested.structure_from_json(value["structure"]), index(value["num_envs"])
        if not fields or set(nested.keys_of(structure)) != fields.keys():
            raise ValueError(f"fields {list(fields)} that differ from the fields of the structure {structure!r:.80}")
        if num_envs < 1:
            raise ValueError(f"{num_envs} environments")
        made = cls(structure, fields, num_envs)
        made.from_data = True
        return made

    def take_nodes(self, rows: Any) -> None:
        """Adopt the classes of named tuples from ``rows``, if the nesting of ``rows`` equals the nesting in the
        file.
        """
        structure = nested.structure_of(rows)
        if nested.is_like(structure, self.structure):
            self.structure = structure
        self.from_data = False

    def same_as(self, other: RowSchema) -> bool:
        """Return whether rows of the other schema also match this schema."""
        return self.fields == other.fields and self.num_envs == other.num_envs


def whole(
    rows: Any, known: RowSchema | None, *, one: bool = False, ndim: int, ragged: Collection[nested.FieldKey] = ()
) -> Any:
    """Convert rows to one tree; see ``mouse_core.nested.opened``, and ``checked`` for the arguments."""
    lists: Collection[Any] = ()
    if known is not None:
        ragged, lists = known.varying, known.lists
    if isinstance(rows, list) and rows and not one:
        return nested.stack([nested.opened(row, ndim - 1, ragged, lists) for row in rows])
    if isinstance(rows, list) and nested.is_node(rows):  # a single row of several arrays
        rows = tuple(rows)
    return nested.opened(rows, ndim - 1 if one else ndim, ragged, lists)


def checked(
    rows: Any, known: RowSchema | None, *, one: bool, ndim: int, ragged: Collection[nested.FieldKey]
) -> tuple[RowSchema, list[Any], int]:
    """Check rows that will be written; return their schema, their leaves (see ``RowSchema.check``) and the number of
    rows.

    Args:
        rows: See ``Storage.append``.
        known: The schema of the rows in the storage; None if ``rows`` are the first rows.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
        ndim: ``ndim`` of the storage.
        ragged: Names of fields that are declared as ragged.

    Raises:
        SchemaError, DataError, ConfigError: See ``RowSchema.of`` and ``RowSchema.check``.
    """
    if isinstance(rows, list) and not rows and not one:
        raise DataError("rows: expected at least one item in the list, found none")
    rows = whole(rows, known, one=one, ndim=ndim, ragged=ragged)
    lead = ndim - 1 if one else ndim
    schema = RowSchema.of(rows, lead, ndim, ragged) if known is None else known
    if schema.from_data:
        schema.take_nodes(rows)
    return schema, *schema.check(rows, lead, ndim)


_REF = FieldType(np.dtype(np.int64), (2,))


def _field_type(dtype: str, shape: list[int], varies: str = "") -> FieldType:
    if varies not in ("", TEXT, BYTES, RAGGED):
        raise ValueError(f"expected text, bytes or ragged rows, found {varies!r}")
    kind = FieldType(named_dtype(dtype), tuple(map(index, shape)), varies)
    # An array of objects in memory from another source would contain untrusted pointers.
    if kind.dtype.hasobject or any(not 0 <= size <= _LONGEST for size in kind.shape):
        raise ValueError(f"{kind.dtype} {list(kind.shape)}")
    return kind


def _first_item(values: Sequence[Any], *, where: str) -> npt.NDArray[Any]:
    """Return the first array that is not empty, which has the dtype and the shape of an item."""
    if not values:
        raise SchemaError(f"{where}: expected at least one row, found none")
    array = nested.as_array(next((value for value in values if np.size(value)), values[0]), where=where)
    if not array.ndim:
        raise SchemaError(f"{where}: expected rows of arrays [length, ...], found {values[0]!r:.60}")
    return array


def _fitting(key: nested.FieldKey, kind: FieldType, leaf: Any) -> npt.NDArray[Any]:
    """Convert a leaf to an array of the field's dtype; raises the errors of ``RowSchema.check``."""
    if isinstance(leaf, Mapping | tuple):
        raise SchemaError(f"{_where(key)}: expected an array as in the first write, found {leaf!r:.60}")
    return nested.fit(_even(key, leaf), kind.dtype, where=_where(key))


def _even(key: nested.FieldKey, leaf: Any) -> Any:
    """Stack the arrays in an array of objects; raise SchemaError if their shapes differ."""
    if not nested.is_varying(leaf) or not leaf.size or not hasattr(leaf.flat[0], "shape"):
        return leaf
    items = leaf.reshape(-1).tolist()
    for number, item in enumerate(items):
        if np.shape(item) != np.shape(items[0]):
            raise SchemaError(
                f"{_where(key)}: expected the shape {np.shape(items[0])}, found {np.shape(item)} in item {number}"
                f"{_if_declared(key, np.shape(item), np.shape(items[0]))}"
            )
    return np.stack([nested.as_array(item, where=_where(key)) for item in items]).reshape(
        *leaf.shape, *np.shape(items[0])
    )


def _if_listed(keys: list[nested.FieldKey]) -> str:
    """Return the end of an error message. If the caller passed a list of arrays instead of one array, the result is the
    remedy; otherwise, the result is "".
    """
    if all(isinstance(key, str) or not any(isinstance(step, int) for step in key) for key in keys):
        return ""
    return "; each array in a list or tuple is a separate field; np.stack(arrays) makes one field"


def _if_declared(key: nested.FieldKey, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return the end of an error message with the remedy for rows of another shape, which names ``ragged`` if only the
    first axis differs.
    """
    if len(found) != len(expected) or not found or found[1:] != expected[1:]:
        return "; ListStorage accepts any shape"
    return f"; for rows of different length, pass ragged=[{key!r}] or use a ListStorage"


def _where(key: nested.FieldKey) -> str:
    return f"rows: field {key!r}" if key != () else "rows"


def _axes(lead: int, ndim: int) -> str:
    return "" if not lead else "n" if ndim == 1 else "env" if lead == 1 else "time, env"


Slots = npt.NDArray[np.int64]


def ring_slots(first: int, n: int, capacity: int) -> Slots:
    """Return the slots of ``n`` rows from row ``first`` on: in a ring of 8, the rows 6, 7 and 8 lie in the slots 6, 7
    and 0.
    """
    begin = first % capacity
    slots = np.arange(begin, begin + n, dtype=np.int64)
    return slots if begin + n <= capacity else slots % capacity


def ring_pieces(first: int, n: int, capacity: int) -> Iterator[tuple[int, int, int]]:
    """Cut ``n`` rows from row ``first`` on into contiguous pieces; yield the first slot, the first row and the number
    of rows of each piece.

    Example: in a ring of 8, the rows 6, 7 and 8 are the pieces ``(6, 0, 2)`` and ``(0, 2, 1)``.
    """
    done = 0
    while done < n:
        slot = (first + done) % capacity
        count = min(n - done, capacity - slot)
        yield slot, done, count
        done += count


Refs = npt.NDArray[np.int64]
"""References to ragged values, ``[n, 2]``: the position of the first byte, counted over all bytes ever written, and the
length.
"""

_LEAST_ROOM = 1 << 12


class ByteRing:
    """A ring of bytes: byte ``n``, counted over all bytes ever written, lies at ``n % len(memory)``."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def write(self, begin: int, values: Sequence[Bytes]) -> Refs:
        """Write values one after another from byte ``begin`` on."""
        refs = np.empty((len(values), 2), np.int64)
        refs[:, 1] = [value.size for value in values]
        refs[:, 0] = begin + np.cumsum(refs[:, 1]) - refs[:, 1]
        if values:
            self._put(begin, values[0] if len(values) == 1 else np.concatenate(values))
        return refs

    def _put(self, begin: int, raw: Bytes) -> None:
        for place, first, count in ring_pieces(begin, raw.size, self.memory.size):
            self.memory[place : place + count] = raw[first : first + count]

    def read(self, begin: int, nbytes: int) -> Bytes:
        """Return a copy of the bytes of values."""
        if not 0 <= nbytes <= self.memory.size:
            raise DataError(f"rows: expected a value of up to {self.memory.size} bytes, found {nbytes} bytes")
        if not nbytes:
            return np.empty(0, np.uint8)
        place = begin % self.memory.size
        raw = self.memory[place : place + nbytes]
        return raw.copy() if raw.size == nbytes else np.concatenate([raw, self.memory[: nbytes - raw.size]])

    def move(self, begin: int, end: int, memory: Bytes) -> ByteRing:
        """Copy the bytes from ``begin`` to ``end`` to other memory, which is large enough, and return the new ring."""
        ring = ByteRing(memory)
        for place, first, count in ring_pieces(begin, end - begin, self.memory.size):
            ring._put(begin + first, self.memory[place : place + count])
        return ring


def _room_for(nbytes: int) -> int:
    """Return the length of a new ring with ``nbytes`` in use: twice ``nbytes``, because searching all rows for free
    bytes must be rare.
    """
    return max(2 * nbytes, _LEAST_ROOM)


def _is_full(room: int, used: int, coming: int) -> bool:
    """Return whether a ring needs larger memory; also True if little room is left, because searching all rows must be
    rare.
    """
    return used + coming > room or room - used < room // 8


def _is_sparse(span: int, used: int) -> bool:
    """Return whether most bytes of a ring are holes: bytes of rows that were overwritten out of order."""
    return span > 4 * used + _LEAST_ROOM


def _in_use(columns: Sequence[Refs], end: int) -> tuple[int, int]:
    """Return the position of the first byte in use, and the number of bytes in use."""
    there = [refs[refs[:, 1] > 0] for refs in columns]
    begin = min((int(refs[:, 0].min()) for refs in there if len(refs)), default=end)
    return begin, sum(int(refs[:, 1].sum()) for refs in there)


class Values:
    """The ragged values of rows, in a ring; values of removed rows are overwritten."""

    packs = True
    """Whether a ring that consists mostly of holes is rewritten; otherwise a hole stays until the rows before the hole
    are removed.
    """

    def __init__(self) -> None:
        self._ring = ByteRing(np.empty(0, np.uint8))
        self._begin = 0  # the first byte that may be in use
        self._end = 0  # the end of all bytes ever written

    @property
    def nbytes(self) -> int:
        """Size of the allocated memory in bytes."""
        return self._ring.memory.size

    def keep(
        self, schema: RowSchema, arrays: Sequence[Any], refs: Callable[[], Sequence[Refs]]
    ) -> Sequence[npt.NDArray[Any]]:
        """Write ragged values, and return the arrays with references instead of ragged values.

        Args:
            schema: The schema of the rows.
            arrays: The arrays that ``RowSchema.check`` returned.
            refs: Function that returns the references of the rows in use as views, which packing changes in place.
        """
        if not schema.varying:
            return arrays
        parts = varying_of(schema, arrays)
        # Room is reserved for all fields at once, because no row refers to the new values yet, so reserving room for
        # one field could overwrite another.
        values = parts[0] if len(parts) == 1 else [value for part in parts for value in part]
        coming = sum(value.size for value in values)
        self.reserve(coming, refs)
        kept = iter(self._ring.write(self._end, values).reshape(len(parts), -1, 2))
        self._end += coming
        kinds = schema.fields.values()
        return [next(kept) if kind.varies else array for array, kind in zip(arrays, kinds, strict=True)]

    def reserve(self, coming: int, refs: Callable[[], Sequence[Refs]]) -> None:
        """Reserve room for ``coming`` more bytes; see ``keep`` for ``refs``."""
        if not _is_full(self.nbytes, self._end - self._begin, coming):
            return
        columns = refs()
        begin, used = _in_use(columns, self._end)
        if self.packs and _is_sparse(self._end - begin, used):
            self._pack(columns, used + coming)
            return
        if _is_full(self.nbytes, self._end - begin, coming):
            self._ring = self._ring.move(begin, self._end, self._memory(_room_for(self._end - begin + coming)))
        self._begin = begin

    def is_sparse(self, refs: Callable[[], Sequence[Refs]]) -> bool:
        """Return whether values of removed rows occupy most of the ring."""
        if not _is_full(self.nbytes, self._end - self._begin, 0):
            return False
        begin, used = _in_use(refs(), self._end)
        return _is_sparse(self._end - begin, used)

    def _pack(self, columns: Sequence[Refs], nbytes: int) -> None:
        """Copy the values in use to other memory without holes, and update the references."""
        ring, end = ByteRing(np.empty(_room_for(nbytes), np.uint8)), 0
        for refs in columns:
            refs[...] = ring.write(end, self.read(refs))
            end += int(refs[:, 1].sum())
        self._ring, self._begin, self._end = ring, 0, end

    def _memory(self, nbytes: int) -> Bytes:
        """Return new memory for a ring."""
        return np.empty(nbytes, np.uint8)

    def read(self, refs: Refs) -> list[Bytes]:
        """Return copies of the values at ``refs``, ``[..., 2]``."""
        return [self._ring.read(begin, nbytes) for begin, nbytes in refs.reshape(-1, 2).tolist()]


def varying_of(schema: RowSchema, arrays: Sequence[Any]) -> list[list[Bytes]]:
    """Return the arrays of ragged fields, from the arrays that ``RowSchema.check`` returned."""
    return [array for array, kind in zip(arrays, schema.fields.values(), strict=True) if kind.varies]


_Scratch = tuple[npt.NDArray[Any], list[tuple[int, npt.NDArray[Any]]]]

# Fields up to this size in bytes are adjacent, so that reading a row touches one part of memory. Larger fields are
# separate, so that they are copied once, not twice.
_SIDE_BY_SIDE = 1024
# Approximate size in bytes of the buffer through which rows are copied to fields; it fits into the processor's cache.
_SCRATCH = 1 << 18
_ALIGNMENT = 64
_POOL_FROM = 1 << 20
_PLANS_KEPT = 8


class FieldBlock:
    """A block of fields whose values in a row are adjacent.

    Args:
        places: The positions of the fields in the schema.
        dtype: The structured dtype of a row, with the fields ``f0``, ``f1``, ... in the order of ``places``.
    """

    def __init__(self, places: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.places = tuple(places)
        self.dtype = dtype
        self.raw = np.dtype((np.void, dtype.itemsize))

    def columns(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the fields' values ``[n, *shape]`` as views of rows of bytes ``[n]``."""
        structured = rows.view(self.dtype)
        return [structured[f"f{number}"] for number in range(len(self.places))]


def blocks_of(schema: RowSchema) -> list[FieldBlock]:
    """Return the blocks of a schema's fields; the result depends only on the schema."""
    kinds = list(schema.stored.values())
    small = [place for place, kind in enumerate(kinds) if kind.nbytes <= _SIDE_BY_SIDE]
    # Fields with the widest items are first, so that every field begins at a multiple of its item size, nearly without
    # gaps.
    small.sort(key=lambda place: -kinds[place].dtype.alignment)
    groups = ([small] if small else []) + [[place] for place in range(len(kinds)) if place not in small]
    return [_block(places, [kinds[place] for place in places]) for places in groups]


def _block(places: Sequence[int], kinds: Sequence[FieldType]) -> FieldBlock:
    offsets, end, widest = [], 0, 1
    for kind in kinds:
        alignment = kind.dtype.alignment
        end += -end % alignment
        offsets.append(end)
        end += kind.nbytes
        widest = max(widest, alignment)
    end += -end % widest
    layout: Any = {
        "names": [f"f{number}" for number in range(len(kinds))],
        "formats": [(kind.dtype, kind.shape) for kind in kinds],
        "offsets": offsets,
        "itemsize": max(end, 1),
    }
    return FieldBlock(places, np.dtype(layout))


class Columns:
    """Memory for rows of one schema.

    Args:
        schema: The schema of the rows.
        columns: Arrays ``[rows, *shape]`` in the order of the schema's fields.
        blocks: The blocks of which ``columns`` are views, with their rows as bytes, ``[rows]``; a field outside any
            block is gathered separately.
        values: The values of ragged fields; ``columns`` hold references to these values.
    """

    def __init__(
        self,
        schema: RowSchema,
        columns: Sequence[npt.NDArray[Any]],
        blocks: Sequence[tuple[FieldBlock, npt.NDArray[Any]]],
        values: Values | None = None,
    ) -> None:
        self.schema = schema
        self.values = values or Values()
        self.keys: tuple[nested.FieldKey, ...] = tuple(schema.fields)
        self.columns = list(columns)
        self.by_key: dict[nested.FieldKey, npt.NDArray[Any]] = dict(zip(self.keys, self.columns, strict=True))
        self.blocks = list(blocks)
        self._plans: dict[tuple[int, ...], _Gather] = {}

    @classmethod
    def allocate(
        cls, schema: RowSchema, rows: int, allocate: Callable[[int, int], Bytes], values: Values | None = None
    ) -> Columns:
        """Allocate memory for ``rows`` rows; ``allocate`` returns the memory of a block, given the index and the size
        of the block.
        """
        columns: dict[int, npt.NDArray[Any]] = {}
        blocks = []
        for number, block in enumerate(blocks_of(schema)):
            raw = np.ndarray((rows,), block.raw, allocate(number, rows * block.raw.itemsize))
            columns |= zip(block.places, block.columns(raw), strict=True)
            blocks.append((block, raw))
        return cls(schema, [columns[place] for place in range(len(columns))], blocks, values)

    @classmethod
    def wrap(cls, schema: RowSchema, arrays: Sequence[npt.NDArray[Any]]) -> Columns:
        """Use existing arrays ``[rows, *shape]`` as memory."""
        blocks = []
        for place, (array, kind) in enumerate(zip(arrays, schema.stored.values(), strict=True)):
            if array.flags.c_contiguous and array.size and array.dtype == kind.dtype:
                block = _block([place], [kind])
                blocks.append((block, np.ndarray((len(array),), block.raw, array)))
        return cls(schema, arrays, blocks)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory for all rows, used or not."""
        return sum(column.nbytes for column in self.columns) + self.values.nbytes

    def write(self, begin: int, arrays: Sequence[npt.NDArray[Any]], first: int, n: int) -> None:
        """Copy the rows ``first .. first + n - 1`` of ``arrays`` to the positions from ``begin`` on."""
        for column, array in zip(self.columns, arrays, strict=True):
            column[begin : begin + n] = array[first : first + n]

    def put(self, places: Slots, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy the rows of ``arrays`` to ``places``."""
        for column, array in zip(self.columns, arrays, strict=True):
            column[places] = array

    def gather(self, places: Slots) -> dict[nested.FieldKey, npt.NDArray[Any]]:
        """Copy the rows at ``places``, which the caller has checked, to new arrays ``[*places.shape, *shape]``.

        The arrays are contiguous and aligned to 64 bytes.
        """
        plan = self._plans.get(places.shape)
        if plan is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = self._plans[places.shape] = _Gather(self, places.shape)
        return plan.run(places)

    def get(self, places: Slots) -> Any:
        """Return the rows at ``places`` as a tree in new memory."""
        fields = self._with_values(self.gather(places))
        return fields if self.schema.plain else nested.unflatten(self.schema.structure, fields)

    def read(self, key: nested.FieldKey, places: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the rows at ``places``; raise MissingFieldError if the field does not exist."""
        try:
            column = self.by_key[key]
        except (KeyError, TypeError) as error:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {list(self.by_key)}") from error
        found: npt.NDArray[Any] = self._with_values({key: column[places]})[key]
        return found

    def _with_values(self, fields: dict[nested.FieldKey, Any]) -> dict[nested.FieldKey, Any]:
        """Replace references in gathered fields by their values."""
        for key, kind in self.schema.varying.items():
            if key in fields:
                refs = fields[key]
                values = [kind.decode(raw) for raw in self.values.read(refs)]
                fields[key] = nested.object_array(values, refs.shape[:-1])
        return fields

    def refs(self, places: Slots | slice) -> list[Refs]:
        """Return the references of the rows at ``places`` for each ragged field."""
        return [self.by_key[key][places] for key in self.schema.varying]

    def saved(self, places: Slots | slice) -> list[Any]:
        """Return the rows at ``places`` in the form that ``rows_state`` accepts as argument."""
        kinds = zip(self.schema.fields.values(), self.columns, strict=True)
        return [self.values.read(column[places]) if kind.varies else column[places] for kind, column in kinds]

    def layout(self, shape: tuple[int, ...]) -> BatchLayout:
        """Return the layout, in one contiguous memory, of the fields of ``shape`` rows; fields are given by their
        position in the schema.
        """
        kinds = enumerate(self.schema.stored.values())
        return BatchLayout({str(place): ((*shape, *kind.shape), kind.dtype) for place, kind in kinds})


class _Gather:
    """A reusable plan for gathering rows; all arrays ``places`` must have the shape of the plan."""

    def __init__(self, memory: Columns, shape: tuple[int, ...]) -> None:
        self._keys = memory.keys
        self._n = n = int(np.prod(shape, dtype=np.int64))
        layout = memory.layout((n,))
        self._nbytes = layout.nbytes
        self._pool = MemoryPool(layout.nbytes) if layout.nbytes >= _POOL_FROM else None
        self._targets = list(layout.fields.values())
        self._shapes = None if len(shape) == 1 else [(*shape, *flat[1:]) for _, flat, _ in self._targets]
        # For separate fields: position, source bytes, and the function that copies. For adjacent fields: source bytes,
        # and intermediate memory that is reused between calls (several threads may call at once).
        self._single: list[tuple[int, npt.NDArray[Any], np.dtype[Any]]] = []
        self._side_by_side: list[tuple[npt.NDArray[Any], FieldBlock, deque[_Scratch]]] = []
        blocked: set[int] = set()
        for block, rows in memory.blocks:
            blocked |= {*block.places}
            if len(block.places) == 1:
                self._single.append((block.places[0], rows, block.raw))
            else:
                self._side_by_side.append((rows, block, deque(maxlen=2)))
        self._strided = [(place, column) for place, column in enumerate(memory.columns) if place not in blocked]

    def _scratch(self, block: FieldBlock) -> _Scratch:
        memory = np.empty(max(1, min(self._n, _SCRATCH // block.raw.itemsize)), block.raw)
        return memory, list(zip(block.places, block.columns(memory), strict=True))

    def run(self, places: Slots) -> dict[nested.FieldKey, npt.NDArray[Any]]:
        """Gather the rows at ``places``, which have the plan's shape."""
        flat = places.reshape(-1)
        if self._pool is not None:
            memory: Bytes = self._pool.take()
            base = 0
        else:
            memory = np.empty(self._nbytes + _ALIGNMENT, np.uint8)
            base = -memory.__array_interface__["data"][0] % _ALIGNMENT
        found = [np.ndarray(shape, dtype, memory, base + offset) for offset, shape, dtype in self._targets]
        for place, rows, raw in self._single:
            if raw.itemsize * self._n:
                # "clip" copies directly to the output; "raise" would need another copy.
                rows.take(flat, 0, np.ndarray((self._n,), raw, memory, base + self._targets[place][0]), "clip")
        for rows, block, kept in self._side_by_side:
            try:
                scratch, parts = kept.pop()
            except IndexError:
                scratch, parts = self._scratch(block)
            if len(scratch) == self._n:
                rows.take(flat, 0, scratch, "clip")
                for place, values in parts:
                    found[place][...] = values
            else:
                for begin in range(0, self._n, len(scratch)):
                    now = min(len(scratch), self._n - begin)
                    rows.take(flat[begin : begin + now], 0, scratch[:now], "clip")
                    for place, values in parts:
                        found[place][begin : begin + now] = values[:now]
            kept.append((scratch, parts))
        for place, column in self._strided:
            found[place][...] = column[flat]
        if self._shapes is not None:
            found = [values.reshape(shape) for values, shape in zip(found, self._shapes, strict=True)]
        return dict(zip(self._keys, found, strict=True))
