"""Rows of a map, checked against a schema, as arrays that are hashed and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import FieldType, RowSchema, row_values
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import (
    FieldKey,
    as_array,
    find,
    fit,
    flatten,
    is_varying,
    nest,
    object_array,
    opened,
    stack,
    structure_of,
    unflatten,
)
from mouse_core.spec import check_list

_WORD = np.dtype("<u4")
_BYTE = np.dtype(np.uint8)
_HASH_WORDS = 4  # of a value that differs in length


class KeyRows:
    """Rows that fit a schema.

    Args:
        schema: The schema of the rows.
        leaves: The values as given, in the order of the fields; values of differing length are an array of objects.
        arrays: The values as ``RowSchema.check`` returns them.
        n: Number of rows.
    """

    def __init__(self, schema: RowSchema, leaves: list[Any], arrays: list[Any], n: int) -> None:
        self.schema = schema
        self.leaves = leaves
        self.arrays = arrays
        self.n = n
        # Number of 32-bit words of a row, from which the row is hashed.
        self.words = schema_words(schema)

    @classmethod
    def of(
        cls, tree: Any, schema: RowSchema | None = None, *, n: int | None = None, ragged: tuple[FieldKey, ...] = ()
    ) -> KeyRows:
        """Return rows that a caller gave, checked.

        Args:
            tree: A tree of arrays ``[n, ...]``, or a list of single rows.
            schema: Schema that the rows must fit; None for the schema of these rows.
            n: Number of rows that a single number is repeated for; None for no repetition.
            ragged: Ragged fields, without a schema.

        Raises:
            SchemaError: Leaves that are no arrays, or unlike the schema.
            DataError: Numbers that a dtype does not hold, leaves of differing length.
        """
        if isinstance(tree, list) and tree and isinstance(tree[0], dict | tuple):
            tree = stack(tree)
        tree = opened(tree, 1, ragged if schema is None else schema.varying)
        if n is not None:
            tree = _spread(tree, schema, n)
        schema = RowSchema.of(tree, 1, 1, ragged) if schema is None else schema
        arrays, found = schema.check(tree, 1, 1)
        given = flatten(tree)
        leaves = [
            object_array(row_values(given[key], 1)[0], (found,)) if kind.varies else array
            for (key, kind), array in zip(schema.fields.items(), arrays, strict=True)
        ]
        for key, kind in schema.fields.items():
            if kind.dtype.char in "gG":
                raise SchemaError(f"rows: field {key!r}: expected a dtype without unused bytes, found {kind.dtype}")
        return cls(schema, leaves, arrays, found)

    def take(self, rows: npt.NDArray[np.int64] | None) -> Any:
        """Return some rows, or all, as a tree that a storage takes."""
        chosen = self.leaves if rows is None else _chosen(self.leaves, rows)
        return unflatten(self.schema.structure, dict(zip(self.schema.fields, chosen, strict=True)))

    def only(self, rows: npt.NDArray[np.int64]) -> KeyRows:
        """Return some of the rows."""
        leaves, arrays = _chosen(self.leaves, rows), _chosen(self.arrays, rows)
        return KeyRows(self.schema, leaves, arrays, rows.size)

    def as_words(self, part: slice | npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint32]:
        """Return some rows as 32-bit words, ``[rows, words]``: fields side by side, each padded with zeros."""
        kinds = self.schema.fields.values()
        arrays = [array[part] for array in self.arrays] if isinstance(part, slice) else _chosen(self.arrays, part)
        fields = list(zip(kinds, arrays, strict=True))
        if len(fields) == 1 and not fields[0][0].varies and fields[0][0].nbytes and not fields[0][0].nbytes % 4:
            return _bits(arrays[0], _WORD)
        words = np.zeros((len(arrays[0]), self.words), _WORD)
        begin = 0
        for kind, array in fields:
            end = begin + _words_of(kind)
            if kind.varies:
                words[:, begin:end] = _hashed(array, seed)
            elif kind.nbytes % 4 == 0:
                words[:, begin:end] = _bits(array, _WORD)
            else:
                words[:, begin:end].view(_BYTE)[:, : kind.nbytes] = _bits(array, _BYTE)
            begin = end
        return words

    def differ(
        self, rows: npt.NDArray[np.int64], others: KeyRows, theirs: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.bool_]:
        """Whether each row differs from the row of ``others`` at the same position, bool ``[n]``.

        Args:
            rows: Positions of the rows, in ascending order.
            others: Rows of the same schema.
            theirs: Positions of the other rows; None for all of them.
        """
        found = np.zeros(rows.size, np.bool_)
        # Adjacent rows, which are the usual case, are compared without a copy.
        whole = rows.size > 0 and int(rows[-1]) - int(rows[0]) == rows.size - 1
        mine = [array[rows[0] : rows[-1] + 1] for array in self.arrays] if whole else _chosen(self.arrays, rows)
        other = others.arrays if theirs is None else _chosen(others.arrays, theirs)
        for kind, one, two in zip(self.schema.fields.values(), mine, other, strict=True):
            if kind.varies:
                found |= np.array([a.tobytes() != b.tobytes() for a, b in zip(one, two, strict=True)], np.bool_)
            elif kind.nbytes and rows.size:
                one, two = np.ascontiguousarray(one), np.ascontiguousarray(two)
                unit = np.dtype(f"u{next(size for size in (8, 4, 2, 1) if one.nbytes % size == 0)}")
                # In one comparison of the widest words that fit: rows of equal hashes are nearly always equal.
                if (one.reshape(-1).view(unit) != two.reshape(-1).view(unit)).any():
                    found |= (_bits(one, _BYTE) != _bits(two, _BYTE)).any(axis=1)
        return found


def _chosen(arrays: list[Any], rows: npt.NDArray[np.int64]) -> list[Any]:
    """Return some rows of each array or list."""
    return [[array[row] for row in rows.tolist()] if isinstance(array, list) else array[rows] for array in arrays]


def _spread(tree: Any, schema: RowSchema | None, n: int) -> Any:
    """Return a tree in which each number without an axis is repeated for ``n`` rows."""
    leaves = flatten(tree)
    if all(isinstance(leaf, list) or np.ndim(leaf) for leaf in leaves.values()):
        return tree
    for key, leaf in leaves.items():
        if isinstance(leaf, str | bytes):
            leaves[key] = [leaf] * n
        elif not isinstance(leaf, list) and not np.ndim(leaf):
            kind = None if schema is None else schema.fields.get(key)
            value = (
                as_array(leaf, where="rows") if kind is None else fit(leaf, kind.dtype, where=f"rows: field {key!r}")
            )
            leaves[key] = np.broadcast_to(value, (n,))
    return unflatten(structure_of(tree), leaves)


def last_of(numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct numbers in ascending order, and the last position of each.

    >>> last_of(np.array([5, 3, 5]))
    (array([3, 5]), array([1, 2]))
    """
    ascending, places = np.unique(numbers[::-1], return_index=True)
    return ascending, numbers.size - 1 - places


def _bits(array: npt.NDArray[Any], unit: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the bytes of rows as integers of the type ``unit``, ``[n, k]``."""
    if not array.size:
        return np.zeros((len(array), 0), unit)
    return np.ascontiguousarray(array).reshape(len(array), -1).view(unit)


def schema_words(schema: RowSchema) -> int:
    """Return the number of words in a row of a schema."""
    return max(1, sum(map(_words_of, schema.fields.values())))


def _words_of(kind: FieldType) -> int:
    return _HASH_WORDS if kind.varies else -(-kind.nbytes // 4)


def _hashed(values: list[npt.NDArray[np.uint8]], seed: int) -> npt.NDArray[np.uint32]:
    """Return the words of the hashes of values that differ in length, ``[n, 4]``."""
    import xxhash  # which comes with datasets

    return np.frombuffer(b"".join([xxhash.xxh3_128_digest(value.data, seed) for value in values]), "<u4").reshape(
        -1, _HASH_WORDS
    )


def pick(rows: Any, fields: tuple[FieldKey, ...] | None) -> Any:
    """Return the tree of some fields, with the same nesting."""
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping | tuple):
        rows = stack(rows)
    if fields is None:
        return rows
    return nest({key: find(rows, key) for key in fields})


def filled(found: Any, absent: npt.NDArray[np.bool_], default: Any) -> Any:
    """Return a tree of values with a default in the rows that are absent."""
    leaves = flatten(found)
    given = flatten(default) if isinstance(default, Mapping | tuple) else dict.fromkeys(leaves, default)
    if given.keys() != leaves.keys():
        raise SchemaError(f"get: expected a default for {list(leaves)}, found one for {list(given)}")
    for key, leaf in leaves.items():
        if is_varying(leaf):
            leaf[absent] = object_array([given[key]], (1,))
            continue
        value = fit(given[key], leaf.dtype, where=f"get: default of {key!r}")
        if value.shape not in ((), leaf.shape[1:]):
            raise SchemaError(f"get: default of {key!r}: expected the shape {leaf.shape[1:]}, found {value.shape}")
        leaf[absent] = value
    return unflatten(structure_of(found), leaves)


def fields_of(option: str, names: Iterable[FieldKey] | None) -> tuple[FieldKey, ...] | None:
    """Return names of fields after checking them; None for all fields.

    Raises:
        ConfigError: No list of names, or an empty one.
    """
    if names is None:
        return None
    fields = check_list(option, names)
    if not fields:
        raise ConfigError(f"{option}: expected names of fields, found none")
    return fields
