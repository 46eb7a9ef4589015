"""Rollouts as bytes and back, without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from mouse_core.collect.wire import read_batch
from mouse_core.errors import DataError
from mouse_core.groups._files.arrow import rollouts_to_table, rollouts_with, table_to_rollouts
from mouse_core.groups.types.columns import Columns
from mouse_core.groups.types.records import RolloutRecord


def encode_rollouts(rollouts: Sequence[RolloutRecord], declared: Columns) -> memoryview:
    """Rollouts as bytes, with the columns that they have.

    Raises:
        DataError: Text that is not Unicode.
    """
    return memoryview(rollouts_to_table(rollouts, _at_once(declared)).serialize())


def decode_rollouts(body: memoryview, declared: Columns) -> list[RolloutRecord]:
    """The rollouts that ``encode_rollouts`` made bytes of.

    Raises:
        DataError: They are something else.
    """
    known = _at_once(declared)
    try:
        return table_to_rollouts(read_batch(body, rollouts_with(known)), declared=known)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"rollouts: expected them as a client sends them, found: {error}") from error


def _at_once(declared: Columns) -> Columns:
    """The same columns, none of them late, so that all are with the rollouts; but a reward, which rollouts have."""
    return Columns(replace(column, late=False) for column in declared.values() if column.name != "reward")
