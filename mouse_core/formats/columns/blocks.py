"""Sizes of record batches: how many rows a reader reads, and a writer processes, at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError

# Small batches are joined up to this size, since each batch costs time however few rows it has.
_BLOCK_BYTES = 8 << 20
_BLOCK_ROWS = 1 << 16
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def check_batch_rows(batch_rows: int) -> None:
    """Raise ConfigError if `batch_rows` is below 1."""
    if batch_rows < 1:
        raise ConfigError(f"batch_rows: expected a positive number, found {batch_rows!r}")


def check_size(name: str, size: int | str) -> int:
    """Return a number of bytes from a number or a text such as "500MB" (10**6) or "2GiB" (2**30).

    Raises:
        ConfigError: The text is no size, or the size is below one byte.
    """
    count = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, prefix, binary = match.groups()
        count = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}: expected bytes or a text such as '500MB', found {size!r}")
    return count


def rows_at_once(row_bytes: int, *, most: int, budget: int = 32 << 20) -> int:
    """Return the number of rows that fit into ``budget`` bytes, but at least 1 and at most ``most``.

    With 10 bytes a row and a budget of 35 bytes: 3 rows, or 2 if ``most`` is 2.
    """
    return max(1, min(most, budget // max(1, row_bytes)))


def bytes_a_row(rows: pa.RecordBatch | pa.Table) -> int:
    """Return the average number of bytes of a row, at least 1."""
    return int(max(1, rows.nbytes // max(1, rows.num_rows)))


def blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about 8 MB: small batches are joined, large batches are split."""
    pending: list[pa.RecordBatch] = []
    pending_bytes = pending_rows = 0
    for batch in batches:
        row_bytes = bytes_a_row(batch)
        most = int(np.clip(4 * _BLOCK_BYTES // row_bytes, 1, _BLOCK_ROWS))
        for first in range(0, batch.num_rows, most):
            piece = batch.slice(first, most)
            pending.append(piece)
            pending_bytes, pending_rows = pending_bytes + piece.num_rows * row_bytes, pending_rows + piece.num_rows
            if pending_bytes >= _BLOCK_BYTES or pending_rows >= _BLOCK_ROWS:
                yield _concatenate(pending)
                pending, pending_bytes, pending_rows = [], 0, 0
    if pending:
        yield _concatenate(pending)


def _concatenate(pending: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pending[0] if len(pending) == 1 else pa.concat_batches(pending)
