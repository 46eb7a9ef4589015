"""What a row looks like, and how its fields lie in memory."""

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
    return RAGGED if _is_ragged(values) else ""


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


def first_array(values: Sequence[Any], *, where: str) -> npt.NDArray[Any]:
    """The first of the rows' arrays with something in it, which says the dtype and the shape of an item."""
    if not values:
        raise SchemaError(f"{where}: expected at least one row, found none")
    array = as_array(next((value for value in values if np.size(value)), values[0]), where=where)
    if not array.ndim:
        raise SchemaError(f"{where}: expected rows of arrays [length, ...], found {values[0]!r:.60}")
    return array


_FORMAT = 1
_LONGEST = (1 << 31) - 1  # NumPy's limit for an axis of a row


@dataclass(frozen=True)
class FieldType:
    """Dtype and shape of one field of a row.

    Args:
        dtype: Of its values; uint8 for text and bytes.
        shape: Of one row; of a ragged one, of one item.
        varies: "text", "bytes" or "ragged" where rows differ in length.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    varies: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of one row's values."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class RowSchema:
    """The fields of a row, and how they are nested.

    Args:
        structure: How they are nested.
        fields: Their dtypes and shapes by name.
        num_envs: Rows of one time step.
    """

    def __init__(self, structure: Structure, fields: Mapping[FieldKey, FieldType], num_envs: int = 1) -> None:
        self.structure = structure
        self.lists = lists_of(structure)
        self.from_data = False  # whether a file says how rows are nested, which names classes and does not have them
        self.fields = dict(fields)
        self.num_envs = num_envs
        self.varying = {key: kind for key, kind in self.fields.items() if kind.varies}
        # What lies in a row: of what differs in length, where it lies.
        self.stored = {key: _REF if kind.varies else kind for key, kind in self.fields.items()}
        self.plain = isinstance(structure, dict) and all(isinstance(child, Leaf) for child in structure.values())

    @classmethod
    def of(cls, rows: Any, lead: int, ndim: int, ragged: Collection[FieldKey] = ()) -> RowSchema:
        """The schema of the first rows written; the first ``lead`` axes of every leaf count rows.

        Args:
            rows: The rows.
            lead: How many axes count rows.
            ndim: That of the storage.
            ragged: Fields that are said to be ragged.

        Raises:
            SchemaError: Leaves that are no arrays, or have fewer axes.
            ConfigError: A field is said to be ragged that is not there.
        """
        fields: dict[FieldKey, FieldType] = {}
        num_envs = 1
        leaves = flatten(rows)
        if not leaves.keys() >= set(ragged):
            raise ConfigError(f"ragged: expected fields of {list(leaves)}, found {sorted(map(str, ragged))}")
        for key, leaf in leaves.items():
            kind = RAGGED if key in ragged else kind_of(leaf, lead)
            if kind:
                values, shape = apart(leaf, lead)
                if len(shape) < lead:
                    raise SchemaError(f"{_where(key)}: expected {_axes(lead, ndim)}, found {leaf!r:.60}")
                if ndim == 2 and not fields:
                    num_envs = shape[lead - 1]
                item = first_array(values, where=_where(key)) if kind == RAGGED else np.empty(1, np.uint8)
                fields[key] = FieldType(item.dtype.newbyteorder("="), item.shape[1:], kind)
                continue
            array = as_array(_even(key, leaf), where=_where(key))
            if array.ndim < lead:
                raise SchemaError(f"{_where(key)}: expected {_axes(lead, ndim)}, found the shape {array.shape}")
            if ndim == 2 and not fields:
                num_envs = array.shape[lead - 1]
            fields[key] = FieldType(array.dtype.newbyteorder("="), array.shape[lead:])
        if num_envs < 1:
            raise SchemaError("rows: expected at least one environment, found none")
        return cls(structure_of(rows), fields, num_envs)

    def check(self, rows: Any, lead: int, ndim: int) -> tuple[list[Any], int]:
        """The leaves of ``rows`` as arrays ``[n, *shape]`` in the order of ``fields``, and ``n``.

        Of what differs in length, a list of the bytes of each row.

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
                values, found = self._bytes(key, kind, array, lead, ndim)
                self._check_lead(key, found, ndim, expected)
                expected = found
                arrays.append(values)
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
        """The schema of rows with these fields and others; None where they have no others, or not all of these.

        Raises:
            SchemaError: As ``of``.
        """
        if not flatten(rows).keys() > self.fields.keys():
            return None
        found = RowSchema.of(rows, lead, 1)
        return RowSchema(found.structure, {**self.fields, **found.fields, **self.fields}, self.num_envs)

    def whole_steps(self, capacity: int) -> int:
        """How many of ``capacity`` rows are whole time steps: 99 of 100, of 3 environments; ConfigError for none."""
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

    def _bytes(
        self, key: FieldKey, kind: FieldType, leaf: Any, lead: int, ndim: int
    ) -> tuple[list[Bytes], tuple[int, ...]]:
        """The rows' values as bytes, and the shape of the axes that count rows."""
        values, shape = apart(leaf, lead)
        if (isinstance(leaf, str | bytes) and lead) or len(shape) < lead:
            raise SchemaError(f"{_where(key)}: expected {_axes(lead, ndim)}, found {leaf!r:.60}")
        where = _where(key)
        return [encoded(value, kind.varies, kind.dtype, kind.shape, where=where) for value in values], shape

    def to_json(self) -> dict[str, Any]:
        """The schema in plain values."""
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
        """What ``to_json`` was called on; raises one of ``UNREADABLE`` for anything else."""
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
        """Nest rows from now on as ``rows`` are nested, if a file said how, and only their classes differ."""
        structure = structure_of(rows)
        if is_like(structure, self.structure):
            self.structure = structure
        self.from_data = False

    def same_as(self, other: RowSchema) -> bool:
        """Whether rows of one are rows of the other."""
        return self.fields == other.fields and self.num_envs == other.num_envs


def whole(
    rows: Any, known: RowSchema | None, *, one: bool = False, ndim: int, ragged: Collection[FieldKey] = ()
) -> Any:
    """Rows as one tree, opened; the arguments as for ``checked``."""
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
    """The schema of rows to be written, their leaves as ``RowSchema.check`` gives them, and how many rows there are.

    Args:
        rows: As for ``Storage.append``.
        known: The schema of the rows there are; None: these are the first.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
        ndim: That of the storage.
        ragged: Fields that are said to be ragged.

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


def _fitting(key: FieldKey, kind: FieldType, leaf: Any) -> npt.NDArray[Any]:
    """A leaf that is no array of the field's dtype as one; raises as ``RowSchema.check``."""
    if isinstance(leaf, Mapping | tuple):
        raise SchemaError(f"{_where(key)}: expected an array as in the first write, found {leaf!r:.60}")
    return fit(_even(key, leaf), kind.dtype, where=_where(key))


def _even(key: FieldKey, leaf: Any) -> Any:
    """The arrays in an array of objects as one array; SchemaError where they differ in shape."""
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
    """What to do about lists of arrays that were meant as one array: half a sentence where a field is in a list."""
    if all(isinstance(key, str) or not any(isinstance(step, int) for step in key) for key in keys):
        return ""
    return "; each array in a list or tuple is a field of its own, and np.stack(arrays) is one field"


def _if_single(found: tuple[int, ...], expected: tuple[int, ...], ndim: int) -> str:
    """The remedy for a row where rows are expected: half a sentence if only the axis of rows is missing."""
    return "; one row is written as [row]" if found == expected and ndim == 1 else ""


def _if_declared(key: FieldKey, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What to do about rows of another shape: half a sentence where they differ in their first axis alone."""
    if len(found) != len(expected) or not found or found[1:] != expected[1:]:
        return "; ListStorage takes any"
    return f"; a field whose rows differ in length is declared, ragged=[{key!r}], or kept in a ListStorage"


def _where(key: FieldKey) -> str:
    return f"rows: field {key!r}" if key != () else "rows"


def _axes(lead: int, ndim: int) -> str:
    return "" if not lead else "n" if ndim == 1 else "env" if lead == 1 else "time, env"
