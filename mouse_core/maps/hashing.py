"""Hashes of rows, and codes of bits: pure functions of arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_number
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.maps._rows import KeyRows
from mouse_core.nested import as_array
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.spec import check_count

# Rows with more words are hashed one by one at the speed of memory, shorter rows all at once.
_MOST_WORDS = 256
# Bytes that are hashed at a time; they fit into the cache of a processor.
_BYTES = 1 << 19
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: multiplying by it loses nothing


def row_hash(rows: Any, *, seed: int = 0) -> npt.NDArray[np.uint64]:
    """Return the hash of each row, 128 bits over its exact bytes.

    Rows are equal if all their bytes are equal: -0.0 differs from 0.0, and a NaN equals a NaN with the same bits. Rows
    up to 1 KiB are hashed by two multilinear functions of their 32-bit words, whose coefficients come from the seed:
    two rows that were chosen without knowing it have the same hash with a probability below 2**-64 (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2014). Longer rows, text and bytes are hashed by XXH3.

    Args:
        rows: A tree of arrays ``[n, ...]`` of any dtype, lists of text or bytes, or ragged arrays.
        seed: Names the function, in ``[0, 2**64)``.

    Returns:
        uint64 ``[n, 2]``; the same on every machine.

    Raises:
        SchemaError: Leaves are not arrays of numbers or text, or differ in length.
        ConfigError: A seed out of range.

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
    """Return the first ``words`` words of the hash of each row, or of some rows, uint64; see ``row_hash``."""
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
    # Multilinear: c0 + sum of c[i] * word[i], modulo 2**64, of which the upper bits are the good ones.
    np.matmul(words.astype(np.uint64), factors, out=out)
    out += first
    out ^= out >> np.uint64(32)
    out *= _MIX
    out ^= out >> np.uint64(32)


@lru_cache(maxsize=64)
def _coefficients(seed: int, words: int, count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the coefficients of ``count`` functions: the constants ``[count]``, and the factors ``[words, count]``."""
    found = np.stack([Key(seed, Purpose.HASHES, lane).bits(words + 1) for lane in range(count)], axis=1)
    return found[0], found[1:]


def hash_to_int(hashes: Any) -> npt.NDArray[np.int64]:
    """Number distinct values from 0 on, in the order of their first occurrence.

    A ``RowMap`` without values does it over many calls, as ``map.extend(rows)``.

    Args:
        hashes: ``[n]`` or ``[n, k]``, of any dtype.

    Returns:
        int64 ``[n]``; equal rows have the same number.

    Raises:
        SchemaError: The argument is not an array of numbers.

    Example:
        >>> from mouse_core.maps import hash_to_int
        >>> hash_to_int([7, 3, 7, 5]).tolist()
        [0, 1, 0, 2]
    """
    values = as_array(hashes, where="hash_to_int")
    if not values.ndim:
        raise SchemaError(f"hash_to_int: expected [n] or [n, k], found the shape {values.shape}")
    _, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[which.reshape(-1)]


def binary_to_decimal(bits: Any, *, width: int | None = None) -> npt.NDArray[np.int64]:
    """Convert rows of bits to numbers; the first bit is the highest.

    Args:
        bits: ``[..., k]``: values greater than 0 are 1. ``projection > 0`` of a random projection makes codes under
            which similar rows meet (SimHash).
        width: Bits of a number, at most 63; several numbers of a row are added. None: all of a row.

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
        raise ConfigError(f"width: expected at most 63 bits that divide the {length} of a row, found {width}")
    bases = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
    numbers: npt.NDArray[np.int64] = ((values > 0).reshape(*values.shape[:-1], -1, width) @ bases).sum(axis=-1)
    return numbers


def random_projection(values: Any, width: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Project rows onto ``width`` random directions.

    Near rows stay near (Johnson and Lindenstrauss), so that similar rows share a key of rounded values, or of signs as
    in ``binary_to_decimal(random_projection(x, 32) > 0)``. Counts of visits over images use such keys (Tang et al.,
    "#Exploration", 2017). A ``RowMap`` needs no projection: it distinguishes rows of any width exactly.

    Args:
        values: ``[n, ...]``.
        width: The number of values of a projected row.
        seed: Names the directions, in ``[0, 2**64)``.

    Returns:
        float32 ``[n, width]``, scaled so that a row keeps its length on average.

    Raises:
        ConfigError: An argument out of range.
        SchemaError: No array of numbers with rows.
    """
    rows = as_array(values, where="random_projection")
    if not rows.ndim or not is_number(rows.dtype):
        raise SchemaError(f"random_projection: expected numbers [n, ...], found {rows.dtype} of shape {rows.shape}")
    width = check_count("width", width)
    flat = rows.reshape(len(rows), -1).astype(np.float32)
    return flat @ _directions(check_seed(seed), flat.shape[1], width)


@lru_cache(maxsize=4)
def _directions(seed: int, length: int, width: int) -> npt.NDArray[np.float32]:
    # Signs do as well as normal numbers (Achlioptas, 2003), and are the same on every machine.
    bits = Key(seed, Purpose.HASHES, 2).bits(-(-length * width // 64))
    signs = np.unpackbits(bits.astype("<u8").view(np.uint8))[: length * width].reshape(length, width)
    return (signs * np.float32(2) - np.float32(1)) / np.float32(np.sqrt(width))
