"""Reads Parquet tables of OpenML as contextual bandits.

Each example of the table becomes an episode of one step: the features of the example are the observation, and the class
is the action with reward 1. No step follows, so each example is a single row with the alignment "outgoing".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import reading
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import check_batch_rows
from mouse_core.formats.rows import open_parquet, parquet_batches
from mouse_core.metadata import DatasetMetadata
from mouse_core.spec import check_choice

__all__ = ["read_openml"]

_MOST_VALUES = 10_000


def read_openml(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read a table of OpenML as a contextual bandit: a row for each example, with alignment "outgoing".

    ``observation`` holds the features in the order of the table, float64. A text or boolean becomes an index: its
    position among the different values of its column, in alphabetical order. ``action`` is the index of the class, or,
    for a regression, the target value as a vector of length 1. ``reward`` and ``done`` are 1 in every row.
    ``format_metadata`` holds the names of features and classes. Features are not scaled; a ``Normalizer`` can scale
    them.

    Args:
        path: A Parquet file.
        target: The column to predict; by default the last column.
        batch_rows: Largest number of rows of a batch.

    Raises:
        ConfigError: The file does not exist, or no column has the name ``target``.
        DataError: The file is damaged, or a value is null; the message names the column.
    """
    check_batch_rows(batch_rows)
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file}: expected a Parquet file, found none")
    with reading(file):
        schema = open_parquet(file).schema_arrow
        names: list[str] = schema.names
        chosen = target or names[-1]
        check_choice("target", chosen, names)
        texts = _texts(file, schema)

    def rows() -> Iterator[Columns]:
        for batch in parquet_batches(file, batch_rows):
            yield _columns(batch, texts, chosen, where=str(file))

    note = f"The class is {chosen!r}; each example is an episode of one step, whose reward is 1."
    features = [name for name in names if name != chosen]
    first = _columns(pa.RecordBatch.from_pylist([], schema), texts, chosen, where=str(file))
    return RowStream.of_columns(
        path,
        "openml",
        first,
        rows,
        notes=(note,),
        format_metadata={"features": features, "target": chosen, "classes": texts.get(chosen, [])},
        metadata=DatasetMetadata("outgoing"),
    )


def _columns(batch: pa.RecordBatch, texts: dict[str, list[str]], target: str, *, where: str) -> Columns:
    n = batch.num_rows
    features, action = [np.empty((n, 0))], np.empty(0)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            hint = "frame.dropna() leaves out such examples before frame.to_parquet(...)"
            raise DataError(f"{where}: {name!r}: expected values, found {column.null_count} nulls; {hint}")
        values = _numbers(column, texts.get(name))
        if name == target:
            action = values if name in texts else values[:, None]
        else:
            features.append(values[:, None])
    return {
        "action": action,
        "reward": np.ones(n),
        "done": np.ones(n, np.int64),
        "episode_step": np.zeros(n, np.int64),
        "observation": np.concatenate(features, axis=1).astype(np.float64),
    }


def _numbers(column: pa.Array, texts: list[str] | None) -> npt.NDArray[Any]:
    """Return the values of a column as float64; for a column of texts, return the index of each value in ``texts``."""
    if texts is None:
        return np.asarray(column.cast(pa.float64(), safe=False))
    return np.asarray(pc.index_in(column.cast(pa.string()), value_set=pa.array(texts, pa.string()))).astype(np.int64)


def _texts(file: Path, schema: pa.Schema) -> dict[str, list[str]]:
    """Return the different values of each column of texts or booleans, in alphabetical order.

    Raises:
        DataError: The file is damaged, or a column has another type.
    """
    found: dict[str, set[str]] = {field.name: set() for field in schema if _is_text(field.type, field.name, file)}
    for batch in parquet_batches(file, 1 << 16, columns=list(found)) if found else ():
        for name, seen in found.items():
            seen.update(pc.unique(batch.column(name).cast(pa.string()).drop_null()).to_pylist())
            if len(seen) > _MOST_VALUES:
                raise DataError(f"{file}: {name!r}: expected at most {_MOST_VALUES} different values, found more")
    return {name: sorted(seen) for name, seen in found.items()}


def _is_text(kind: pa.DataType, name: str, path: Path) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
        return True
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return False
    raise DataError(f"{path}: {name!r}: expected a column of numbers or texts, found {kind}")
