"""The schema of rows: their fields, how these are nested, and the check that new rows fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import dtype_name, named_dtype
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.nested import (
    FieldKey,
    Leaf,
    Structure,
    as_array,
    differ_in_length,
    fit,
    flatten,
    is_like,
    is_node,
    is_varying,
    keys_of,
    lists_of,
    opened,
    stack,
    structure_from_json,
    structure_of,
    structure_to_json,
)

Bytes = npt.NDArray[np.uint8]

TEXT, BYTES, RAGGED = "text", "bytes", "ragged"


def field_kind(leaf: Any, lead: int) -> str:
    """Return the kind of a field by its first values: TEXT, BYTES, RAGGED, or "" for numbers in rows of one shape.

    Args:
        leaf: The field's values.
        lead: How many axes count rows.
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
        return RAGGED if differ_in_length({np.shape(value) for value in values}) else ""
    except ValueError:
        return ""


def row_values(leaf: Any, lead: int) -> tuple[list[Any], tuple[int, ...]]:
    """Return the values of a field row by row, and the sizes of the axes that count rows.

    There are fewer than ``lead`` sizes for a leaf with fewer axes.
    """
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


_FORMAT = 1
_LONGEST = (1 << 31) - 1  # NumPy's limit for an axis of a row


@dataclass(frozen=True)
class FieldType:
    """Dtype and shape of one field of a row.

    Args:
        dtype: The dtype of the values; uint8 for text and bytes.
        shape: The shape of a row; for ragged rows, of one item.
        varies: TEXT, BYTES or RAGGED for rows that differ in length, else "".
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    varies: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * prod(self.shape)

    def encode(self, value: Any, *, where: str) -> Bytes:
        """Convert the value of a row that may differ in length to bytes.

        Raises:
            SchemaError: The value has another kind, dtype or shape.
            DataError: Python numbers that the dtype does not hold.
        """
        if self.varies == TEXT:
            if not isinstance(value, str):
                raise SchemaError(f"{where}: expected text as in the first write, found {value!r:.60}")
            # UTF-8 has no lone surrogates, Python's texts may.
            return np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
        if self.varies == BYTES:
            if not isinstance(value, bytes):
                raise SchemaError(f"{where}: expected bytes as in the first write, found {value!r:.60}")
            return np.frombuffer(value, np.uint8)
        array = fit(value, self.dtype, where=where)
        if array.ndim != 1 + len(self.shape) or array.shape[1:] != self.shape:
            axes = ", ".join(["length", *map(str, self.shape)])
            raise SchemaError(
                f"{where}: expected the shape [{axes}] of the first write, found {list(array.shape)}; "
                "ListStorage takes any"
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def decode(self, raw: Bytes) -> Any:
        """Convert the bytes of ``encode`` to the value; an array shares the memory of ``raw``.

        Raises:
            DataError: The bytes are damaged.
        """
        try:
            if self.varies == TEXT:
                return raw.tobytes().decode("utf-8", "surrogatepass")
            return raw.tobytes() if self.varies == BYTES else raw.view(self.dtype).reshape(-1, *self.shape)
        except ValueError as error:
            raise DataError(f"rows: expected the bytes of {self.varies}, found damaged ones: {error}") from error


class RowSchema:
    """The fields of a row, and how they are nested.

    Args:
        structure: How the fields are nested; see ``mouse_core.nested.structure_of``.
        fields: The dtype and shape of each field.
        num_envs: Rows of one time step.
    """

    def __init__(self, structure: Structure, fields: Mapping[FieldKey, FieldType], num_envs: int = 1) -> None:
        self.structure = structure
        self.lists = lists_of(structure)
        # Whether the structure comes from a file, which names the classes of named tuples and does not have them.
        self.from_data = False
        self.fields = dict(fields)
        self.num_envs = num_envs
        self.varying = {key: kind for key, kind in self.fields.items() if kind.varies}
        # What lies in the memory of a row: references to the values that differ in length.
        self.stored = {key: _REF if kind.varies else kind for key, kind in self.fields.items()}
        self.plain = isinstance(structure, dict) and all(isinstance(child, Leaf) for child in structure.values())

    @classmethod
    def of(cls, rows: Any, lead: int, ndim: int, ragged: Collection[FieldKey] = ()) -> RowSchema:
        """The schema of the first rows written; the first ``lead`` axes of every leaf count rows.

        Args:
            rows: The rows.
            lead: How many axes count rows.
            ndim: The storage's.
            ragged: Fields that are declared to be ragged.

        Raises:
            SchemaError: Leaves that are no arrays, or have fewer axes.
            ConfigError: A field in ``ragged`` is not among the fields.
        """
        fields: dict[FieldKey, FieldType] = {}
        num_envs = 1
        leaves = flatten(rows)
        if not leaves.keys() >= set(ragged):
            raise ConfigError(f"ragged: expected fields of {list(leaves)}, found {sorted(map(str, ragged))}")
        for key, leaf in leaves.items():
            where, varies = _where(key), RAGGED if key in ragged else field_kind(leaf, lead)
            array = np.empty(0, np.uint8) if varies else as_array(_even(key, leaf), where=where)
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
        return cls(structure_of(rows), fields, num_envs)

    def check(self, rows: Any, lead: int, ndim: int) -> tuple[list[Any], int]:
        """Return the leaves of ``rows`` as arrays ``[n, *shape]`` in the order of ``fields``, and ``n``.

        For a field that differs in length, return a list with the bytes of each row.

        Raises:
            SchemaError: Another structure, dtype, shape, or number of environments than the first write's.
            DataError: Python numbers that the dtype does not hold; leaves of differing length.
        """
        leaves: Any = rows if self.plain and type(rows) is dict else flatten(rows)
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
                expected_axes = ", ".join([*([_axes(lead, ndim)] if lead else []), *map(str, kind.shape)])
                raise SchemaError(
                    f"{_where(key)}: expected the shape [{expected_axes}] of the first write, found {list(shape)}"
                    f"{_if_single(shape, kind.shape, ndim) or _if_declared(key, shape[lead:], kind.shape)}"
                )
            if shape[:lead] != expected:
                self._check_lead(key, shape[:lead], ndim, expected)
                expected = shape[:lead]
            # Of a field without values NumPy cannot tell how many rows there are.
            arrays.append(array if lead == 1 else array.reshape(prod(shape[:lead]), *kind.shape))
        return arrays, len(arrays[0])

    def with_more(self, rows: Any, lead: int) -> RowSchema | None:
        """Return the schema of rows that have these fields and others; None for rows without others, or all of these.

        Raises:
            SchemaError: As ``of``.
        """
        if not flatten(rows).keys() > self.fields.keys():
            return None
        found = RowSchema.of(rows, lead, 1)
        return RowSchema(found.structure, {**self.fields, **found.fields, **self.fields}, self.num_envs)

    def whole_steps(self, capacity: int) -> int:
        """Return how many of ``capacity`` rows are whole time steps: 99 of 100 with 3 environments.

        Raises:
            ConfigError: There is no room for one time step.
        """
        if capacity < self.num_envs:
            raise ConfigError(f"capacity: expected room for a step of {self.num_envs} environments, found {capacity}")
        return capacity - capacity % self.num_envs

    def _check_lead(self, key: FieldKey, found: tuple[int, ...], ndim: int, expected: tuple[int, ...] | None) -> None:
        """Raise an error unless there are as many rows as in the fields before, or of the first one, environments."""
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
        structure = structure_to_json(self.structure)
        return {"format": _FORMAT, "structure": structure, "num_envs": self.num_envs, "fields": fields}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSchema:
        """Restore the schema from ``to_json``; raise one of ``UNREADABLE`` for other values."""
        if value["format"] != _FORMAT:
            found = f"found {value['format']}; a newer mouse-data wrote them"
            raise ValueError(f"expected rows of format {_FORMAT}, {found}")
        fields = {
            (name if isinstance(name, str) else tuple(name)): _field_type(*kind) for name, *kind in value["fields"]
        }
        structure, num_envs = structure_from_json(value["structure"]), index(value["num_envs"])
        if not fields or set(keys_of(structure)) != fields.keys():
            raise ValueError(f"fields {list(fields)} that are not those of the structure {structure!r:.80}")
        if num_envs < 1:
            raise ValueError(f"{num_envs} environments")
        made = cls(structure, fields, num_envs)
        made.from_data = True
        return made

    def take_nodes(self, rows: Any) -> None:
        """Take over the classes of the nodes of ``rows``, if these are nested as the structure from a file says."""
        structure = structure_of(rows)
        if is_like(structure, self.structure):
            self.structure = structure
        self.from_data = False

    def same_as(self, other: RowSchema) -> bool:
        """Whether rows of the other schema fit this one."""
        return self.fields == other.fields and self.num_envs == other.num_envs


def whole(
    rows: Any, known: RowSchema | None, *, one: bool = False, ndim: int, ragged: Collection[FieldKey] = ()
) -> Any:
    """Return rows as one tree, see ``mouse_core.nested.opened``; the arguments are as for ``checked``."""
    lists: Collection[Any] = ()
    if known is not None:
        ragged, lists = known.varying, known.lists
    if isinstance(rows, list) and rows and not one:
        return stack([opened(row, ndim - 1, ragged, lists) for row in rows])
    if isinstance(rows, list) and is_node(rows):  # a single row of several arrays
        rows = tuple(rows)
    return opened(rows, ndim - 1 if one else ndim, ragged, lists)


def checked(
    rows: Any, known: RowSchema | None, *, one: bool, ndim: int, ragged: Collection[FieldKey]
) -> tuple[RowSchema, list[Any], int]:
    """Return the schema of rows to be written, their leaves as ``RowSchema.check`` gives them, and their number.

    Args:
        rows: As for ``Storage.append``.
        known: The schema of the rows in the storage; None: these are the first.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
        ndim: The storage's.
        ragged: Fields that are declared to be ragged.

    Raises:
        SchemaError, DataError, ConfigError: As ``RowSchema.of`` and ``RowSchema.check``.
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
    # An array of objects in foreign memory would be pointers that somebody else wrote.
    if kind.dtype.hasobject or any(not 0 <= size <= _LONGEST for size in kind.shape):
        raise ValueError(f"{kind.dtype} {list(kind.shape)}")
    return kind


def _first_item(values: Sequence[Any], *, where: str) -> npt.NDArray[Any]:
    """Return the first array that is not empty, as it has the dtype and the shape of an item."""
    if not values:
        raise SchemaError(f"{where}: expected at least one row, found none")
    array = as_array(next((value for value in values if np.size(value)), values[0]), where=where)
    if not array.ndim:
        raise SchemaError(f"{where}: expected rows of arrays [length, ...], found {values[0]!r:.60}")
    return array


def _fitting(key: FieldKey, kind: FieldType, leaf: Any) -> npt.NDArray[Any]:
    """Convert a leaf to an array of the field's dtype; raise as ``RowSchema.check``."""
    if isinstance(leaf, Mapping | tuple):
        raise SchemaError(f"{_where(key)}: expected an array as in the first write, found {leaf!r:.60}")
    return fit(_even(key, leaf), kind.dtype, where=_where(key))


def _even(key: FieldKey, leaf: Any) -> Any:
    """Stack the arrays in an array of objects; raise SchemaError for arrays of differing shapes."""
    if not is_varying(leaf) or not leaf.size or not hasattr(leaf.flat[0], "shape"):
        return leaf
    items = leaf.reshape(-1).tolist()
    for number, item in enumerate(items):
        if np.shape(item) != np.shape(items[0]):
            raise SchemaError(
                f"{_where(key)}: expected the shape {np.shape(items[0])}, found {np.shape(item)} in item {number}"
                f"{_if_declared(key, np.shape(item), np.shape(items[0]))}"
            )
    return np.stack([as_array(item, where=_where(key)) for item in items]).reshape(*leaf.shape, *np.shape(items[0]))


def _if_listed(keys: list[FieldKey]) -> str:
    """Remedy for lists of arrays that were meant as one array: half a sentence if a field is in a list."""
    if all(isinstance(key, str) or not any(isinstance(step, int) for step in key) for key in keys):
        return ""
    return "; each array in a list or tuple is a field of its own, and np.stack(arrays) is one field"


def _if_single(found: tuple[int, ...], expected: tuple[int, ...], ndim: int) -> str:
    """Remedy for a row where rows are expected: half a sentence if only the axis of rows is missing."""
    return "; one row is written as [row]" if found == expected and ndim == 1 else ""


def _if_declared(key: FieldKey, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Remedy for rows of another shape: half a sentence, with ``ragged`` if only their first axis differs."""
    if len(found) != len(expected) or not found or found[1:] != expected[1:]:
        return "; ListStorage takes any"
    return f"; a field whose rows differ in length is declared, ragged=[{key!r}], or kept in a ListStorage"


def _where(key: FieldKey) -> str:
    return f"rows: field {key!r}" if key != () else "rows"


def _axes(lead: int, ndim: int) -> str:
    return "" if not lead else "n" if ndim == 1 else "env" if lead == 1 else "time, env"
