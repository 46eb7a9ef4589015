"""DatasetStore: an ordered sequence of steps, from recorded datasets and appended rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._appender import Appender
from mouse_core._dense_copies import DENSE_BYTES, DenseBudget
from mouse_core._export import declared_alignment, rows_to_table, to_dataset
from mouse_core._locks import ProcessLock
from mouse_core._schema import StoreSchema
from mouse_core._segments import Segment
from mouse_core._splits import select_splits
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.snapshot import Snapshot
from mouse_core.spec import Alignment, Field


class DatasetStore:
    """Steps in the order they were recorded: datasets by reference, then appended rows.

    Datasets stay where they are, on disk or in memory; nothing is copied or scanned. One thread may append while
    others read snapshots.

    Args:
        max_action_dim: Number of actions A, or the width of action vectors; by default from the data.
        max_obs_continuous_dim: Width C of observations; by default from the data.
        fields: Fields that replace standard ones of the same name, or come after them.
        alignment: "arrived" (a row's action, reward and done led to its observation) or "outgoing" (they leave it).
        dense_bytes: How much memory the store's readers may use, in all and in each process, to keep dense copies of
            what cannot be copied as it is stored: stretches of a column with nulls, with rows of differing length or
            of another width than declared, and booleans. What is beyond is read more slowly, with the same result.

    Raises:
        ConfigError: A dimension below 1, an unknown alignment, or ``dense_bytes`` below 0.
    """

    def __init__(
        self,
        max_action_dim: int | None = None,
        max_obs_continuous_dim: int | None = None,
        *,
        fields: Iterable[Field] = (),
        alignment: Alignment = "arrived",
        dense_bytes: int = DENSE_BYTES,
    ) -> None:
        self._budget = DenseBudget(dense_bytes)
        self._schema = StoreSchema(fields, max_action_dim, max_obs_continuous_dim, alignment)
        self._segments: list[Segment] = []
        self._num_rows = 0
        self._kept: Snapshot | None = None
        self._appender = Appender(self._schema, self._segments)
        self._lock = ProcessLock()

    # ------------------------------------------------------------------ what is there

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"DatasetStore(num_rows={len(self)}, columns={list(self.columns)}, alignment={self.alignment!r})"

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self._schema.alignment

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The stored columns' Arrow types by name; where parts of the store differ in encoding, that of the first."""
        return dict(self._schema.arrow_types)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields that the store knows, whether it has their columns or not."""
        return dict(self._schema.fields)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One stored row as Python values by column, null where its part of the store lacks the column.

        Raises:
            IndexError: ``row`` is not in ``-len(store)..len(store) - 1``.
        """
        snapshot = self.snapshot()
        if not -snapshot.num_rows <= row < snapshot.num_rows:
            raise IndexError(f"store: expected a row in {-snapshot.num_rows}..{snapshot.num_rows - 1}, found {row}")
        values = snapshot.row(row % snapshot.num_rows)
        return {name: values.get(name) for name in self._schema.arrow_types}

    def snapshot(self, rows: int | None = None) -> Snapshot:
        """An immutable view of the rows there are now, or of the first ``rows`` of them. Copies no steps.

        Raises:
            ConfigError: The store has fewer than ``rows`` rows.
        """
        with self._lock:
            if self._kept is None or self._kept.num_rows != len(self):
                open_segment = self._appender.segment()
                segments = self._segments if open_segment is None else [*self._segments, open_segment]
                self._kept = Snapshot(segments, self._schema.config(), budget=self._budget)
            kept = self._kept
        if rows is None:
            return kept
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
            raise ConfigError(f"snapshot: expected a number of rows, found {rows!r}")
        return kept if rows == kept.num_rows else Snapshot(kept.segments, kept.config, int(rows), budget=self._budget)

    # ------------------------------------------------------------------ datasets

    def from_dataset(
        self,
        dataset: Any,
        splits: str | Sequence[str] | None = None,
        split_pattern: str | Sequence[str] | None = None,
    ) -> DatasetStore:
        """Add recorded steps after those there are, by reference, in constant time.

        Args:
            dataset: A ``datasets.Dataset``, a ``DatasetDict`` (or any dict of datasets: all splits in their order),
                or a ``pyarrow.Table``.
            splits: Names of the splits to take, in this order.
            split_pattern: Shell patterns (``"train_*"``) of the splits to take, pattern by pattern, each split once.

        Returns:
            The store itself.

        Raises:
            ConfigError: Not a dataset, an unknown split, or a pattern that matches none.
            MissingFieldError: A required column is missing.
            SchemaError: Columns that a field cannot be read from, or that do not fit those there are; rows of another
                alignment.

        The store is unchanged after an error.
        """
        parts = select_splits(dataset, splits, split_pattern)
        segments = [_segment(part) for part in parts]
        for part in parts:
            declared = declared_alignment(part)
            if declared is not None and declared != self.alignment:
                raise SchemaError(f"from_dataset: expected rows of alignment {self.alignment!r}, found {declared!r}")
        with self._lock:
            self._schema.merge(segments)
            self._appender.close()
            self._segments.extend(segments)
            self._kept = None  # also where no row comes, columns may
            self._num_rows += sum(segment.num_rows for segment in segments)
        return self

    # ------------------------------------------------------------------ appended rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step.

        Args:
            row: A value for every column. The first row of an empty store says which columns there are; later ones
                must have the same. None is a null, allowed where the field fills it (``episode_step``,
                ``metadata_q_star``) and in columns that no field reads.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: A column that the store does not have.
            DataError: A value of the wrong type or shape, out of bounds, or None where nulls are not allowed.

        The store is unchanged after an error.
        """
        if type(row) is not dict and not isinstance(row, Mapping):
            raise DataError(f"append: expected a dict, found {row!r:.200}")
        with self._lock.mine():
            self._appender.append(row)
            self._num_rows += 1

    def extend(self, columns: Mapping[str, Any]) -> None:
        """Add many steps at once, column by column.

        Args:
            columns: For every column an array or sequence ``[n, ...]``, all of one length; see ``append``.

        Raises:
            MissingFieldError, SchemaError, DataError: As ``append``, or columns of differing lengths.

        The store is unchanged after an error.
        """
        try:
            lengths = {name: len(values) for name, values in columns.items()}
        except (TypeError, AttributeError) as error:
            raise DataError(f"extend: expected a dict of arrays or sequences, found {columns!r:.200}") from error
        if len(set(lengths.values())) > 1:
            raise DataError(f"extend: expected columns of one length, found {lengths}")
        n = next(iter(lengths.values()), 0)
        if n:
            with self._lock:
                self._appender.extend(columns, n)
                self._num_rows += n

    # ------------------------------------------------------------------ back to datasets

    def to_dataset(self) -> Any:
        """The whole store as a ``datasets.Dataset``, sharing files and memory with it.

        A store of one dataset gives that dataset. Another alignment than "arrived" is written into the description,
        which saving keeps and ``from_dataset`` checks. Columns that only some parts have are null in the others.

        Raises:
            ConfigError: The store is empty.
        """
        return to_dataset(self.snapshot(), self._schema.arrow_types)

    def encode_hf_rows(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Turn a dict of lists, as ``datasets`` yields it, into a dict of field arrays.

        Args:
            batch: Values by column, ``n`` of each.

        Returns:
            The store's fields by name, ``[n, ...]`` in their documented dtypes.

        Raises:
            MissingFieldError, SchemaError, DataError: As ``append``.
        """
        shapes = {name: spec.shape for name, spec in self.snapshot().spec.items() if spec.image_shape is None}
        fields = self._schema.fields.items()
        encoder = DatasetStore(
            self._schema.max_action_dim,
            self._schema.max_obs_continuous_dim,
            fields=[replace(field, shape=shapes.get(name, field.shape)) for name, field in fields],
            alignment=self.alignment,
        )
        encoder.from_dataset(rows_to_table(batch, self._schema))
        encoded = encoder.snapshot()
        windows = encoded.locate(np.arange(len(encoder)), 1).part(0)
        return {name: reader.read(windows, reader.spec.dtype)[:, 0] for name, reader in encoded.readers.items()}


def _segment(part: Any) -> Segment:
    if isinstance(part, pa.Table):
        return Segment(part)
    if not hasattr(part, "_indices") or not hasattr(getattr(part, "data", None), "table"):
        raise ConfigError(
            f"from_dataset: expected a datasets.Dataset, a dict of them or a pyarrow.Table, found {type(part).__name__}"
        )
    return Segment.from_dataset(part)
