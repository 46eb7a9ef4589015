"""Hashes of rows, and conversion of bits to integers: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import FieldType, RowSchema, row_values
from mouse_core.dtypes import is_number
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
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.spec import check_count, check_list

_WORD = np.dtype("<u4")
_BYTE = np.dtype(np.uint8)
_HASH_WORDS = 4  # the hash of a value that differs in length


class KeyRows:
    """Rows that were checked against a schema.

    Args:
        schema: The schema of the rows.
        leaves: The values as a storage accepts them, in the order of the fields; ragged values are an array of objects.
        arrays: The values as ``RowSchema.check`` returns them.
        n: Number of rows.
    """

    def __init__(self, schema: RowSchema, leaves: list[Any], arrays: list[Any], n: int) -> None:
        self.schema = schema
        self.leaves = leaves
        self.arrays = arrays
        self.n = n
        # Number of 32-bit words of a row, which are hashed.
        self.words = schema_words(schema)

    @classmethod
    def of(cls, tree: Any, schema: RowSchema | None = None, *, n: int | None = None) -> KeyRows:
        """Check rows that a caller passed, and return them as ``KeyRows``.

        Args:
            tree: A tree of arrays ``[n, ...]``, or a list of single rows.
            schema: The schema that the rows must match; None: the schema is inferred from the rows.
            n: The number of rows for which single numbers in ``tree`` are repeated; None: single numbers are not
                repeated.

        Raises:
            SchemaError: A leaf is not an array, or does not match the schema.
            DataError: A dtype cannot represent a value, or leaves differ in length.
        """
        if isinstance(tree, list) and tree and isinstance(tree[0], dict | tuple):
            tree = stack(tree)
        tree = opened(tree, 1, () if schema is None else schema.varying)
        if n is not None:
            tree = _spread(tree, schema, n)
        schema = RowSchema.of(tree, 1, 1) if schema is None else schema
        arrays, found = schema.check(tree, 1, 1)
        given = flatten(tree)
        leaves = [
            object_array(row_values(given[key], 1)[0], (found,)) if kind.varies else array
            for (key, kind), array in zip(schema.fields.items(), arrays, strict=True)
        ]
        for key, kind in schema.fields.items():
            if kind.dtype.char in "gG":
                raise SchemaError(f"rows: field {key!r}: expected a dtype without padding bytes, found {kind.dtype}")
        return cls(schema, leaves, arrays, found)

    def take(self, rows: npt.NDArray[np.int64] | None) -> Any:
        """Return the rows at the positions ``rows``, by default all rows, as a tree that a storage accepts."""
        chosen = self.leaves if rows is None else _chosen(self.leaves, rows)
        return unflatten(self.schema.structure, dict(zip(self.schema.fields, chosen, strict=True)))

    def only(self, rows: npt.NDArray[np.int64]) -> KeyRows:
        """Return the rows at the positions ``rows`` as ``KeyRows``."""
        leaves, arrays = _chosen(self.leaves, rows), _chosen(self.arrays, rows)
        return KeyRows(self.schema, leaves, arrays, rows.size)

    def as_words(self, part: slice | npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint32]:
        """Return the rows ``part`` as 32-bit words, ``[rows, words]``: all fields of a row one after another, each
        field padded with zeros.
        """
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
        """Return whether each row differs from the corresponding row of ``others``, bool ``[n]``.

        Args:
            rows: Positions of the rows, in ascending order.
            others: Rows of the same schema.
            theirs: Positions of the rows in ``others``; None: all rows.
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
                # Rows are compared completely, in the widest words that fit, because rows with equal hashes are nearly
                # always equal.
                if (one.reshape(-1).view(unit) != two.reshape(-1).view(unit)).any():
                    found |= (_bits(one, _BYTE) != _bits(two, _BYTE)).any(axis=1)
        return found


def _chosen(arrays: list[Any], rows: npt.NDArray[np.int64]) -> list[Any]:
    """Return the rows at the positions ``rows`` of each array or list."""
    return [[array[row] for row in rows.tolist()] if isinstance(array, list) else array[rows] for array in arrays]


def _spread(tree: Any, schema: RowSchema | None, n: int) -> Any:
    """Repeat each single number (without an axis) in a tree for ``n`` rows."""
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
    """Return the distinct numbers in ascending order, and the position of the last occurrence of each number.

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
    """Return the number of 32-bit words in a row of a schema."""
    return max(1, sum(map(_words_of, schema.fields.values())))


def _words_of(kind: FieldType) -> int:
    return _HASH_WORDS if kind.varies else -(-kind.nbytes // 4)


def _hashed(values: list[npt.NDArray[np.uint8]], seed: int) -> npt.NDArray[np.uint32]:
    """Return the hash of each ragged value as 32-bit words, ``[n, 4]``."""
    import xxhash  # which comes with datasets

    return np.frombuffer(b"".join([xxhash.xxh3_128_digest(value.data, seed) for value in values]), "<u4").reshape(
        -1, _HASH_WORDS
    )


def pick(rows: Any, fields: tuple[FieldKey, ...] | None) -> Any:
    """Return a tree with only the given fields, in the same nesting."""
    if isinstance(rows, list) and rows and isinstance(rows[0], Mapping | tuple):
        rows = stack(rows)
    if fields is None:
        return rows
    return nest({key: find(rows, key) for key in fields})


def filled(found: Any, absent: npt.NDArray[np.bool_], default: Any) -> Any:
    """Return a tree of values in which the absent rows have the value ``default``."""
    leaves = flatten(found)
    given = flatten(default) if isinstance(default, Mapping | tuple) else dict.fromkeys(leaves, default)
    if given.keys() != leaves.keys():
        raise SchemaError(
            f"get: expected a default for the fields {list(leaves)}, found a default for the fields {list(given)}"
        )
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
    """Check names of fields, and return the names; None means all fields.

    Raises:
        ConfigError: The argument is not a list of names, or the list is empty.
    """
    if names is None:
        return None
    fields = check_list(option, names)
    if not fields:
        raise ConfigError(f"{option}: expected names of fields, found none")
    return fields


# Rows with more words are hashed individually at memory speed; shorter rows are hashed together.
_MOST_WORDS = 256
# Number of bytes that are hashed together; they fit into the processor's cache.
_BYTES = 1 << 19
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio; odd, so that multiplication by it is invertible


def row_hash(rows: Any, *, seed: int = 0) -> npt.NDArray[np.uint64]:
    """Return the hash of each row, 128 bits that are computed from the exact bytes of the row.

    Rows are equal if all their bytes are equal: -0.0 differs from 0.0, and a NaN equals a NaN with the same bits. Rows
    of up to 1 KiB are hashed by two multilinear functions of their 32-bit words; the seed determines the coefficients
    of these functions. Two different rows that were chosen without knowledge of the seed have equal hashes with a
    probability below 2**-64 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Longer rows, text
    and bytes are hashed by XXH3.

    Args:
        rows: A tree of arrays ``[n, ...]`` of any dtype, lists of text or bytes, or ragged arrays.
        seed: An integer in ``[0, 2**64)``, which selects the hash function.

    Returns:
        uint64 ``[n, 2]``; the hashes are equal on every machine.

    Raises:
        SchemaError: Leaves are not arrays of numbers or text, or differ in length.
        ConfigError: The seed is out of range.

    Example:
        >>> import numpy as np
        >>> from mouse_core.maps import row_hash
        >>> hashes = row_hash({"obs": np.array([[0.1, 0.2], [0.3, 0.4], [0.1, 0.2]])})
        >>> bool((hashes[0] == hashes[2]).all()), bool((hashes[0] == hashes[1]).any())
        (True, False)
    """
    return hash_rows(KeyRows.of(rows), check_seed(seed), words=2)


def hash_rows(
    rows: KeyRows, seed: int, places: slice | npt.NDArray[np.int64] = slice(None), *, words: int = 1
) -> npt.NDArray[np.uint64]:
    """Return the first ``words`` words (uint64) of the hash of each of the given rows; see ``row_hash``."""
    chosen = range(rows.n)[places] if isinstance(places, slice) else places
    n, step = len(chosen), max(1, _BYTES // (8 * rows.words))
    hashes = np.empty((n, words), np.uint64)
    for begin in range(0, n, step):
        end = min(begin + step, n)
        part = slice(chosen[begin], chosen[begin] + end - begin) if isinstance(chosen, range) else chosen[begin:end]
        _hash_words(rows.as_words(part, seed), seed, hashes[begin:end])
    return hashes


def _hash_words(words: npt.NDArray[np.uint32], seed: int, out: npt.NDArray[np.uint64]) -> None:
    """Write the hashes of rows of 32-bit words ``[n, words]`` into ``out``, uint64 ``[n, 1]`` or ``[n, 2]``."""
    if words.shape[1] > _MOST_WORDS:
        import xxhash  # which comes with datasets

        digest = xxhash.xxh3_128_digest
        found = b"".join([digest(row.data, seed) for row in np.ascontiguousarray(words)])
        out[...] = np.frombuffer(found, ">u8").reshape(-1, 2)[:, : out.shape[1]]
        return
    first, factors = _coefficients(seed, words.shape[1], out.shape[1])
    # Multilinear hash: c0 + sum of c[i] * word[i], modulo 2**64; its upper bits are the well distributed bits.
    np.matmul(words.astype(np.uint64), factors, out=out)
    out += first
    out ^= out >> np.uint64(32)
    out *= _MIX
    out ^= out >> np.uint64(32)


@lru_cache(maxsize=64)
def _coefficients(seed: int, words: int, count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the coefficients of ``count`` multilinear hash functions: the constants ``[count]``, and the factors
    ``[words, count]``.
    """
    found = np.stack([Key(seed, Purpose.HASHES, lane).bits(words + 1) for lane in range(count)], axis=1)
    return found[0], found[1:]


def hash_to_int(hashes: Any) -> npt.NDArray[np.int64]:
    """Return an integer for each value: distinct values get 0, 1, 2, ... in the order of their first occurrence.

    If equal values must have the same integer in several calls, use the method ``extend(rows)`` of a ``RowMap`` without
    values.

    Args:
        hashes: The values, an array ``[n]`` or ``[n, k]`` of any dtype.

    Returns:
        int64 ``[n]``; equal rows have the same integer.

    Raises:
        SchemaError: The argument is not an array of numbers.

    Example:
        >>> from mouse_core.maps import hash_to_int
        >>> hash_to_int([7, 3, 7, 5]).tolist()
        [0, 1, 0, 2]
    """
    values = as_array(hashes, where="hash_to_int")
    if not values.ndim:
        raise SchemaError(f"hash_to_int: expected an array of shape [n] or [n, k], found the shape {values.shape}")
    _, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[which.reshape(-1)]


def binary_to_decimal(bits: Any, *, width: int | None = None) -> npt.NDArray[np.int64]:
    """Convert rows of bits to integers; the first bit is the most significant bit.

    Args:
        bits: An array ``[..., k]``; values greater than 0 count as 1. If the bits are the signs of a random projection,
            ``projection > 0``, similar rows get equal codes (SimHash).
        width: The number of bits of an integer, at most 63. If the bits of a row form several integers, their sum is
            returned. None: all bits of a row form one integer.

    Returns:
        int64 ``[...]``.

    Raises:
        ConfigError: The width does not divide ``k``, or is out of range.
        SchemaError: The argument is not an array of numbers.

    Example:
        >>> import numpy as np
        >>> from mouse_core.maps import binary_to_decimal
        >>> binary_to_decimal(np.array([0, 0, 1, 0, 0, 0, 0, 1]), width=4).tolist()
        3
    """
    values = as_array(bits, where="binary_to_decimal")
    if not values.ndim or not is_number(values.dtype):
        raise SchemaError(f"binary_to_decimal: expected numbers [..., k], found {values.dtype} of shape {values.shape}")
    length = values.shape[-1]
    width = check_count("width", length if width is None else width)
    if width > 63 or length % width:
        raise ConfigError(
            f"width: expected a number of bits, at most 63, that divides the row length {length}, found {width}"
        )
    bases = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
    numbers: npt.NDArray[np.int64] = ((values > 0).reshape(*values.shape[:-1], -1, width) @ bases).sum(axis=-1)
    return numbers


def random_projection(values: Any, width: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Project rows onto ``width`` random directions.

    Distances between rows are approximately preserved (Johnson and Lindenstrauss). Therefore similar rows get the same
    key if the key consists of the rounded values or of the signs of the projection, as in
    ``binary_to_decimal(random_projection(x, 32) > 0)``. Visit counts for images use such keys (Tang et al.,
    "#Exploration", 2017). A ``RowMap`` needs no projection, because it distinguishes rows of any width exactly.

    Args:
        values: ``[n, ...]``.
        width: The number of values of a projected row.
        seed: An integer in ``[0, 2**64)``, which selects the directions.

    Returns:
        The projected rows, float32 ``[n, width]``, scaled so that the norm of a row is preserved on average.

    Raises:
        ConfigError: An argument is out of range.
        SchemaError: The argument is not an array of numbers with rows.
    """
    rows = as_array(values, where="random_projection")
    if not rows.ndim or not is_number(rows.dtype):
        raise SchemaError(f"random_projection: expected numbers [n, ...], found {rows.dtype} of shape {rows.shape}")
    width = check_count("width", width)
    flat = rows.reshape(len(rows), -1).astype(np.float32)
    return flat @ _directions(check_seed(seed), flat.shape[1], width)


@lru_cache(maxsize=4)
def _directions(seed: int, length: int, width: int) -> npt.NDArray[np.float32]:
    # Random signs work as well as normal numbers (Achlioptas, 2003), and are equal on every machine.
    bits = Key(seed, Purpose.HASHES, 2).bits(-(-length * width // 64))
    signs = np.unpackbits(bits.astype("<u8").view(np.uint8))[: length * width].reshape(length, width)
    return (signs * np.float32(2) - np.float32(1)) / np.float32(np.sqrt(width))
