"""Intake of rows: datasets become segments by reference; appended rows go into extents, whole rows or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._base.locks import ProcessLock
from mouse_core.columns.appended import TailColumn, checked_rows, is_empty
from mouse_core.columns.extent import ColumnExtent, Extent, Refused
from mouse_core.dtypes import RowError, is_hidden
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.arrow import check_mapped
from mouse_core.spec import FieldSpec
from mouse_core.store._schema import REFUSALS, StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.evidence import AppendedRows, check_flags, flags_in
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.about.dataset import About


class StoreBackend:
    """The rows of a store: segments, and those that are being appended; here all in memory, or lying elsewhere.

    Args:
        schema: The store's schema.
        budget: Of the memory for dense copies.
    """

    #: The folder that the rows lie in.
    path: str | None = None
    #: See ``DatasetStore.open``.
    sync: str = "none"

    def __init__(self, schema: StoreSchema, budget: DenseBudget) -> None:
        self.schema, self.budget = schema, budget
        self.segments: list[Segment] = []
        self.count = self._cleared = 0
        self.appender: Appender | Refusing = Appender(schema, self.segments)
        self.lock = ProcessLock()
        self._kept: Snapshot | None = None
        #: What the first rows that are appended say; None: no more are looked at.
        self.evidence: AppendedRows | None = AppendedRows()

    def warn_of_rewards(self, *, stacklevel: int) -> None:
        """Warn, once, where the first rows that were appended speak against the alignment; see ``AppendedRows``."""
        evidence = self.evidence
        if evidence is not None and self.schema.alignment == "arrived":
            where = "the rows that were appended" if self.path is None else f"store {self.path}"
            if evidence.warn(where, stacklevel=stacklevel + 1):
                self.evidence = None

    @property
    def end(self) -> int:
        """Number of rows ever written, cleared ones included."""
        return self._cleared + self.count

    def seen(self) -> Self:
        """The rows with those that somebody else has written since, where there may be some."""
        return self

    def shown(self) -> list[Segment]:
        """The segments as snapshots have them."""
        return self.segments

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all present rows; see ``DatasetStore.snapshot``."""
        with self.lock:
            rows = self.seen()
            if self._kept is None or self._kept.num_rows != rows.count:
                open_segment = self.appender.segment()
                segments = self.shown() if open_segment is None else [*self.shown(), open_segment]
                self._kept = Snapshot(segments, self.schema.config(), budget=self.budget)
            return self._kept

    def take(self, segments: Sequence[Segment], said: Sequence[tuple[str, About]]) -> None:
        """Have more segments, behind the rows there are; see ``DatasetStore.from_dataset``.

        Args:
            segments: Them.
            said: For each what to call it in messages, and what it says of itself.
        """
        with self.lock:
            self.check_open()
            schema = self.schema.merged(segments, said)
            self.appender.close()
            self.segments.extend(segments)
            self.schema, self.appender = schema, Appender(schema, self.segments)
            self._kept = None  # also where no row comes, columns may
            self.count += sum(segment.num_rows for segment in segments)

    def clear(self) -> None:
        """Forget all rows; see ``DatasetStore.clear``."""
        with self.lock:
            self.check_open()
            self._cleared += self.count
            self.segments, self.count, self._kept = [], 0, None
            self.appender = Appender(self.schema, self.segments)

    def extend(self, columns: Mapping[str, Any], n: int) -> None:
        """Take ``n`` rows; see ``DatasetStore.extend``."""
        with self.lock:
            try:
                self.appender.extend(columns, n)
                self.count += n
            except BaseException:
                self.recount()
                raise

    def recount(self) -> None:
        """Count the rows that were taken, after an error in the middle; those of which only a part came are none."""
        if isinstance(self.appender, Refusing):
            return
        self.appender.forget_parts()
        self.count = sum(segment.num_rows for segment in self.segments) + self.appender.count

    def check_open(self) -> None:
        """Raise the error that says why, where no rows may be written from here."""
        if isinstance(self.appender, Refusing):
            raise self.appender.error()

    def flush(self) -> None:
        """Do nothing, without rows to write; see ``DatasetStore.flush``."""

    def close(self) -> None:
        """Do nothing, without files to close; see ``DatasetStore.close``."""

    def interrupt_on_close(self, recording: Any) -> None:
        """There is no moment for it; see ``DatasetStore.interrupt_on_close``."""


class Refusing:
    """Takes no rows, in the place of an appender.

    Args:
        error: Makes the error that says why.
    """

    count = 0

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    def append(self, row: Any) -> None:
        """Refuse a row."""
        raise self.error()

    def extend(self, columns: Any, n: int) -> None:
        """Refuse rows."""
        raise self.error()

    def segment(self) -> None:
        """Return no rows."""

    def close(self) -> None:
        """Refuse rows that would come behind those there are."""
        raise self.error()


class Appender:
    """The open extent of a store.

    Args:
        schema: The store's schema, which learns the columns of the first row.
        segments: The store's segments; an extent that is full becomes another.
    """

    def __init__(self, schema: StoreSchema, segments: list[Segment]) -> None:
        self._schema, self._segments = schema, segments
        self._extent: Extent | None = None
        # Columns that say how episodes end, beside the done code; None: rows have none.
        self._flags: tuple[str, str] | None = None

    @property
    def count(self) -> int:
        """Rows in the open extent."""
        return 0 if self._extent is None else self._extent.count

    def segment(self) -> Segment | None:
        """The rows of the open extent; rows that come later do not show in it."""
        if self._extent is None or not self._extent.count:
            return None
        return Segment.of_extent(self._extent, self._schema.image_roots)

    def forget_parts(self) -> None:
        """Have nothing behind the last row that counts."""
        if self._extent is not None:
            self._extent.forget_parts()

    def close(self) -> None:
        """Seal the open extent; the next row opens another, of columns that may have been learnt since."""
        segment = self.segment()
        self._extent = None
        if segment is not None:
            segment.seal()
            self._segments.append(segment)

    def append(self, row: Mapping[str, Any]) -> None:
        """Take one row; see ``DatasetStore.append``."""
        extent = self._extent
        if self._flags is None and extent is not None and extent.count < extent.rows and extent.append(row):
            return
        self._flags = flags_in(row)
        if self._flags is not None:
            self._check_flags(row, *self._flags)
            if extent is not None and extent.count < extent.rows and extent.append(row):
                return
        if extent is None or extent.count == extent.rows or row.keys() != extent.columns.keys():
            extent = self._extent_for(row)
        try:
            extent.put(row)
        except Refused as refused:
            if not self._learn(extent, row):
                raise self._refused(refused.name, refused.__cause__) from refused.__cause__
            return
        if extent is not self._extent:
            self._open(extent)

    def extend(self, columns: Mapping[str, Any], n: int) -> None:
        """Take ``n`` rows, column by column; see ``DatasetStore.extend``."""
        self._flags = flags_in(columns)
        if self._flags is not None:
            check_flags(columns, self._done, lambda row: f"at row {self._rows() + row}")
        firsts = {name: _first_known(values, name in self._schema.by_column) for name, values in columns.items()}
        extent = self._extent_for(firsts, n)
        try:
            prepared = self._prepare(extent, columns)
        except DataError:
            # The first value of a column that was all null so far: keep the column from here on as that value says.
            learnt = self._relearnt(extent, firsts, n)
            if learnt is None:
                raise
            extent = learnt
            prepared = self._prepare(extent, columns)
        if extent is not self._extent:
            self._open(extent)
        done = 0
        while done < n:
            if extent.count == extent.rows:
                extent = self._make(extent.columns, extent.rows, n - done)
                self._open(extent)
            rows = min(n - done, extent.rows - extent.count)
            done += extent.put_many(prepared, done, rows)

    @property
    def _done(self) -> str:
        """The column of done codes."""
        return self._schema.fields["done"].column

    def _check_flags(self, row: Mapping[str, Any], ended: str, cut: str) -> None:
        """Raise DataError where a row's flags say another done code."""
        try:
            if row[self._done] == (1 if row[ended] else 2 if row[cut] else 0):
                return
        except (KeyError, ValueError):  # names that are refused later; arrays
            pass
        one = {name: [row[name]] for name in (self._done, ended, cut) if name in row}
        check_flags(one, self._done, lambda _: f"at row {self._rows()}")

    def _prepare(self, extent: Extent, columns: Mapping[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = {}
        for name, column in extent.columns.items():
            try:
                prepared[name] = checked_rows(columns[name], column)
            except RowError as error:
                raise self._refused(name, error, error.row) from error
            except REFUSALS as error:
                raise DataError(f"column {name!r}: {error}{self._schema.hint(name)}") from error
        return prepared

    def _extent_for(self, row: Mapping[str, Any], coming: int = 0) -> Extent:
        """The extent that ``row`` goes to: the open one, or a new one that is to be opened once the row is in it."""
        if self._extent is None or row.keys() != self._extent.columns.keys():
            self._schema.check_names(row)
        if self._extent is None:
            return self._make(self._schema.tail_columns(row, self._spec(), self._rows()), 0, coming)
        if not self._has_room(self._extent, coming):
            return self._make(self._extent.columns, self._extent.rows, coming)
        return self._extent

    def _make(self, columns: Mapping[str, TailColumn], before: int, coming: int) -> Extent:
        """An extent that may be opened; see ``Extent``."""
        return Extent.allocate(columns, before, coming)

    def _has_room(self, extent: Extent, coming: int) -> bool:
        """Whether the first of some rows that come together goes into an extent."""
        return extent.count < extent.rows

    def _learn(self, extent: Extent, row: Mapping[str, Any]) -> bool:
        """Try again a row with the first value of a column that was all null so far; whether it was taken."""
        learnt = self._relearnt(extent, row)
        if learnt is None:
            return False
        try:
            learnt.put(row)
        except Refused as refused:
            raise self._refused(refused.name, refused.__cause__) from refused.__cause__
        self._open(learnt)
        return True

    def _relearnt(self, extent: Extent, row: Mapping[str, Any], coming: int = 0) -> Extent | None:
        fresh = {
            name for name, column in extent.columns.items() if column.kind.kind == "null" and not is_hidden(row[name])
        }
        if not fresh:
            return None
        columns = self._schema.tail_columns(row, self._spec(), self._rows())
        kept = {name: columns[name] if name in fresh else column for name, column in extent.columns.items()}
        return self._make(kept, 0, coming)

    def _open(self, extent: Extent) -> None:
        if self._extent is not None and self._extent is not extent:
            self.close()
        self._extent = extent
        self._know(extent)

    def _know(self, extent: Extent) -> None:
        for name, column in extent.extents.items():
            self._schema.learn(name, extent.columns[name].kind, partial(_arrow_type, column))

    def _before(self) -> list[Segment]:
        """The segments before these rows, as snapshots have them."""
        return self._segments

    def _rows(self) -> int:
        return sum(segment.num_rows for segment in self._segments) + self.count

    def _spec(self) -> Mapping[str, FieldSpec]:
        """The specs of the fields there are in the rows before."""
        if not self._segments:
            return {}
        segment, before = self.segment(), self._before()
        segments = before if segment is None else [*before, segment]
        return Snapshot(segments, self._schema.config()).spec

    def _refused(self, name: str, error: BaseException | None, row: int = 0) -> DataError:
        return DataError(f"column {name!r}: {error} at row {self._rows() + row}")


def _arrow_type(column: ColumnExtent) -> pa.DataType:
    return column.to_arrow(0).type


def _first_known(values: Any, is_read: bool) -> Any:
    """The first value that is not null, to infer a type from; None where all are.

    Of a column that no field reads it is the first that says of which type all are, which ``[]`` does not.
    """
    if type(values) is np.ndarray and values.dtype != object:
        return values[0]
    first = next((value for value in values if not is_hidden(value)), None)
    return first if is_read or not is_empty(first) else next((one for one in values if not is_empty(one)), first)


def select_splits(
    dataset: Any, splits: str | Sequence[str] | None, split_pattern: str | Sequence[str] | None
) -> list[tuple[str, Any]]:
    """The datasets to take, in order, and what to call each in messages; see ``DatasetStore.from_dataset``.

    Raises:
        ConfigError: Both ways of choosing, an unknown split, or a pattern that matches none.
    """
    if splits is None and split_pattern is None:
        return _named(dataset, dataset) if isinstance(dataset, Mapping) else [("dataset", dataset)]
    if splits is not None and split_pattern is not None:
        raise ConfigError("from_dataset: expected splits or split_pattern, found both")
    if not isinstance(dataset, Mapping):
        raise ConfigError(f"from_dataset: expected a dict of splits, found {type(dataset).__name__}")
    if splits is None:
        return _named(dataset, _matching(dataset, _listed(split_pattern)))
    for name in _listed(splits):
        if name not in dataset:
            raise ConfigError(f"from_dataset: expected splits among {list(dataset)}, found {name!r}")
    return _named(dataset, _listed(splits))


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _matching(dataset: Mapping[Any, Any], patterns: Iterable[str]) -> Iterable[Any]:
    """The names that match some pattern, each once, in the order of the patterns."""
    names: dict[Any, None] = {}
    for pattern in patterns:
        matched = [name for name in dataset if fnmatchcase(str(name), pattern)]
        if not matched:
            raise ConfigError(f"from_dataset: expected a pattern matching {list(dataset)}, found {pattern!r}")
        names |= dict.fromkeys(matched)
    return names


def segment_of(part: Any, image_roots: tuple[str, ...]) -> Segment:
    """The segment of a dataset or a table, which stays where it is.

    Raises:
        ConfigError: It is neither.
        SchemaError: The name of a column is no Unicode text.
        DataError: A file that it is mapped from was cut, or holds rows that its reader did not see.
    """
    if isinstance(part, pa.Table):
        try:
            part.schema.names  # noqa: B018
        except UnicodeDecodeError as error:
            raise SchemaError(f"from_dataset: expected names of columns as Unicode text: {error}") from error
        return Segment(part, image_roots=image_roots)
    if isinstance(part, str | os.PathLike):
        path = os.fspath(part)
        raise ConfigError(
            f"from_dataset: expected a dataset, found the path {path!r}; open it with mouse_core.formats.open({path!r})"
            ".to_store(), which checks it first, or with datasets.load_from_disk or datasets.load_dataset"
        )
    if not hasattr(part, "_indices") or not hasattr(getattr(part, "data", None), "table"):
        raise ConfigError(
            f"from_dataset: expected a datasets.Dataset, a dict of them or a pyarrow.Table, found {type(part).__name__}"
        )
    # Rows that a damaged file no longer leads to are missed here, before anyone trains without them.
    for table in (part.data, part._indices):
        check_mapped(table)
    return Segment.from_dataset(part, image_roots)


def _named(dataset: Mapping[Any, Any], names: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"split {name!r}", dataset[name]) for name in names]
