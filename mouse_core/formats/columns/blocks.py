"""Sizes of record batches: how many rows are read, and worked on, at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError

# Batches are joined up to this many bytes: small ones cost more than what is in them.
_BLOCK_BYTES = 8 << 20
_BLOCK_ROWS = 1 << 16
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def check_batch_rows(batch_rows: int) -> None:
    """Raise ConfigError unless batches have rows."""
    if batch_rows < 1:
        raise ConfigError(f"batch_rows: expected a positive number, found {batch_rows!r}")


def check_size(name: str, size: int | str) -> int:
    """Return a number of bytes from a number or a text such as "500MB" (10**6) or "2GiB" (2**30).

    Raises:
        ConfigError: Another text, or less than a byte.
    """
    found = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, prefix, binary = match.groups()
        found = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"{name}: expected bytes or a text such as '500MB', found {size!r}")
    return found


def rows_at_once(row_bytes: int, *, most: int, budget: int = 32 << 20) -> int:
    """Return ``most``, or the number of rows that ``budget`` bytes hold if that is less, and at least 1."""
    return max(1, min(most, budget // max(1, row_bytes)))


def bytes_a_row(rows: pa.RecordBatch | pa.Table) -> int:
    """Return about how many bytes a row takes, at least 1."""
    return int(max(1, rows.nbytes // max(1, rows.num_rows)))


def blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about 8 MB: small batches are joined, large ones are cut."""
    held: list[pa.RecordBatch] = []
    held_bytes = held_rows = 0
    for batch in batches:
        each = bytes_a_row(batch)
        most = int(np.clip(4 * _BLOCK_BYTES // each, 1, _BLOCK_ROWS))
        for first in range(0, batch.num_rows, most):
            piece = batch.slice(first, most)
            held.append(piece)
            held_bytes, held_rows = held_bytes + piece.num_rows * each, held_rows + piece.num_rows
            if held_bytes >= _BLOCK_BYTES or held_rows >= _BLOCK_ROWS:
                yield _joined(held)
                held, held_bytes, held_rows = [], 0, 0
    if held:
        yield _joined(held)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(held) == 1:
        return held[0]
    return pa.RecordBatch.from_arrays(
        [pa.concat_arrays([_plain(batch.column(place)) for batch in held]) for place in range(held[0].num_columns)],
        names=held[0].schema.names,
    )


def _plain(array: pa.Array) -> pa.Array:
    """Decode a dictionary, as dictionaries may differ between batches, and only arrays of one type can be joined."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
