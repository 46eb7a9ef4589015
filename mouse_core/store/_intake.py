"""The schema of a store, and the backend of the store's rows. Datasets become segments, without a copy; appended rows
are written to extents.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column_types import check_readable, column_type, declared_columns, fixed_shape
from mouse_core._arrow.dense import DenseBudget
from mouse_core._base.checks import is_text, recipe, values_of
from mouse_core._base.locks import ProcessLock
from mouse_core.columns.appended import ColumnExtent, Extent, Refused, TailColumn, checked_rows, is_empty
from mouse_core.dtypes import RowError, is_hidden
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.files.arrow import check_mapped
from mouse_core.spec import DIMS, Alignment, Field, FieldSpec, check_alignment, merge_fields
from mouse_core.store._segments import Segment
from mouse_core.store.evidence import check_flags, flags_in, warn_of_appended
from mouse_core.store.fields import SnapshotConfig
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata

REFUSALS = (ValueError, TypeError, OverflowError, pa.ArrowException)
"""Errors that can be raised when a column is created from a value."""


class StoreSchema:
    """The arguments of a store, and the columns and metadata of the store's present rows.

    Args:
        fields, alignment, image_roots, spec, columns: See ``DatasetStore``.
        dims: The store's ``max_action_dim`` and ``max_obs_continuous_dim``.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        dims: Mapping[str, int | None],
        alignment: str | None,
        image_roots: Iterable[str | os.PathLike[str]],
        spec: Any = None,
        columns: Any = None,
    ) -> None:
        from mouse_core.images.files import check_roots
        from mouse_core.metadata import DatasetMetadata

        self.image_roots = check_roots(image_roots, where="image_roots")
        self.alignment: Alignment = check_alignment(alignment, "arrived")
        # The arguments of the store, and the metadata of datasets.
        given: dict[str, Any] = {**dims, "alignment": None if alignment is None else self.alignment}
        self.told = DatasetMetadata(fields=list(fields), spec=spec, **given)
        self.said = DatasetMetadata()
        self.all_say_alignment = True
        #: Columns whose type does not depend on rows, by name.
        self.declared = {} if columns is None else declared_columns(columns)
        self.arrow_types: dict[str, pa.DataType] = {}
        self._know_fields()

    def config(self) -> SnapshotConfig:
        """Return the configuration of a snapshot."""
        types = {name: column_type(one) for name, one in self.arrow_types.items()}
        return SnapshotConfig(dict(self.fields), types, self.dims, self.alignment, layout=self.said.layout or "mouse")

    def columns(self) -> dict[str, pa.DataType]:
        """Return the Arrow types of the columns; an empty store has only the declared columns."""
        return dict(self.arrow_types) or {name: one.type for name, one in self.declared.items()}

    def metadata(self) -> DatasetMetadata:
        """Return the metadata of the rows."""
        said = self.all_say_alignment if self.arrow_types else self.said.alignment is not None
        stated = self.told.alignment is not None or said
        fields = [*self.said.fields, *self.told.fields]
        whole = self.alignment if stated else None
        return self.said.replace(alignment=whole, fields=fields, spec=self.spec, **self.dims)

    def merged(self, segments: Sequence[Segment], said: Sequence[tuple[str, DatasetMetadata]]) -> Self:
        """Return the schema with the columns of new segments and the metadata of their datasets.

        Args:
            segments: The segments.
            said: For each segment, its name in messages and its metadata; if there are no segments, one pair for the
                store.

        Raises:
            MissingFieldError: A required column is missing.
            SchemaError: A field cannot be read from its column, columns differ from the store's columns, or metadata
                contradict known metadata.
        """
        merged = copy.copy(self)
        merged._adopt(said)
        merged._merge_columns(segments)
        for segment, (_, metadata) in zip(segments, said, strict=False):
            merged.all_say_alignment &= metadata.alignment is not None or not segment.num_rows
        return merged

    def _adopt(self, said: Sequence[tuple[str, DatasetMetadata]]) -> None:
        """Check the metadata of datasets, and use the metadata to set the options that the store's arguments do not
        set.
        """
        from mouse_core.metadata import joined

        told = {field.name: field for field in self.told.fields}
        unknown = []
        for where, metadata in said:
            if self.arrow_types and self.said.layout is None:
                # The first rows decide the layout, and the names of fields that read their columns.
                kept = [one for one in metadata.fields if one.name in self.fields or one.column not in self.by_column]
                metadata = metadata.replace(layout=None, fields=kept)
            elif metadata.layout == "stored" and self.told.alignment is None and self.said.alignment is None:
                self.alignment = metadata.alignment or self.alignment
            if metadata.alignment not in (None, self.alignment):
                raise SchemaError(
                    f"from_dataset: expected rows of alignment {self.alignment!r}, found {metadata.alignment!r} in "
                    f"{where}; a DatasetStore(alignment={metadata.alignment!r}) accepts these rows"
                )
            for field in metadata.fields:
                _check_alike(told.get(field.name, field), field, where)
            spec, found = self.told.spec or {}, metadata.spec or {}
            for name in spec:
                if name in found and found[name] != spec[name]:
                    raise SchemaError(
                        f"column {name!r}: expected {spec[name]!r}, found {found[name]!r} in the metadata of {where}"
                    )
            news: dict[str, Any] = {name: self._untold_dim(name, where, metadata) for name in DIMS}
            news["fields"] = [field for field in metadata.fields if field.name not in told]
            unknown.append((_called(where, metadata), metadata.replace(**news)))
        self.said = joined([(_called("the rows before", self.said), self.said), *unknown])
        self._know_fields()
        for column, data_type in self.arrow_types.items():
            self._check_width(column, data_type, " in the rows before")

    def _untold_dim(self, name: str, label: str, metadata: DatasetMetadata) -> int | None:
        """Return a dimension from a dataset's metadata; None if an argument of the store sets this dimension."""
        told, found = getattr(self.told, name), getattr(metadata, name)
        if told is not None and found is not None and told < found:
            raise SchemaError(f"{name}: expected at least {found}, as {_called(label, metadata)} states, found {told}")
        return None if told is not None else found

    def _know_fields(self) -> None:
        """Set dimensions and fields from the store's arguments and the metadata of datasets."""
        self.dims: dict[str, Any] = {name: getattr(self.told, name) or getattr(self.said, name) for name in DIMS}
        self.fields = merge_fields([*self.said.fields, *self.told.fields], self.dims, self.said.layout or "mouse")
        self.by_column = {field.column: self._combined(field.column) for field in self.fields.values()}
        specs = [metadata.spec.entries for metadata in (self.said, self.told) if metadata.spec is not None]
        #: The allowed values of columns, a ``mouse_core.spec.Composite``; None: any values.
        self.spec = self.said.replace(spec={name: one for each in specs for name, one in each.items()}).spec
        for name, declared in self.declared.items():
            if name in self.by_column:
                check_readable(column_type(declared.type), self.by_column[name])
                self._check_width(name, declared.type)

    def declare(self, columns: Iterable[pa.Field], label: str) -> Self:
        """Return the schema with the columns that were declared when the store's folder was created.

        Raises:
            SchemaError: The store declares one of these columns with another type, or a field cannot be read from its
                column.
        """
        schema, found = copy.copy(self), {one.name: one for one in columns}
        for name, declared in self.declared.items():
            known = found.get(name, declared)
            if known != declared:
                raise SchemaError(f"columns: expected {known}, as declared in {label}, found {declared}")
        schema.declared = found | self.declared
        schema._know_fields()
        return schema

    def _merge_columns(self, segments: Sequence[Segment]) -> None:
        arrow_types = dict(self.arrow_types)
        for segment in segments:
            names = segment.table.schema.names
            if len(set(names)) < len(names):
                raise SchemaError(f"expected columns of different names, found {names}")
            for field in self.fields.values():
                if field.required and field.column not in segment.types:
                    raise MissingFieldError(
                        f"{field.name}: expected a column {field.column!r}, found columns {list(segment.types)}"
                        f"{_in_words(segment.types)}"
                    )
            missing = [name for name in self.declared if name not in segment.types]
            if missing:
                raise MissingFieldError(f"columns: expected columns {missing}, found columns {list(segment.types)}")
            for name, data_type in segment.types.items():
                kind, declared = column_type(data_type), self.declared.get(name)
                if declared is not None:
                    _check_declared(declared, segment)
                if name in self.by_column:
                    check_readable(kind, self.by_column[name])
                before = arrow_types.get(name, data_type)
                self._check_width(name, data_type, before=before)
                known = column_type(before)
                if known != kind and "null" not in (known.kind, kind.kind):
                    raise SchemaError(
                        f"column {name!r}: expected {known} as in the earlier rows, found {kind}; "
                        f"cast one of the columns first, e.g. with Dataset.cast_column"
                    )
                if name not in arrow_types or known.kind == "null":
                    arrow_types[name] = data_type if declared is None or kind.kind == "null" else declared.type
        self.arrow_types = arrow_types

    def learn(self, name: str, column: ColumnExtent) -> None:
        """Set the type of a column of appended rows, unless the type is known already: the declared type, or, for a
        column that is not declared, the type of its rows.
        """
        if not self.arrow_types and self.said.alignment is None:
            self.all_say_alignment = False  # these are the first rows, and no metadata state their alignment
        if name not in self.arrow_types or column_type(self.arrow_types[name]).kind == "null":
            found = column.to_arrow(0).type
            is_declared = name in self.declared and column_type(found).kind != "null"
            self.arrow_types[name] = self.declared[name].type if is_declared else found

    def check_names(self, names: Iterable[str]) -> None:
        """Check that ``names`` are the store's columns, or valid first columns of an empty store.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: The store does not have a column, or the first row lacks a column of the store's ``spec``.
        """
        found = list(names)
        if not all(map(is_text, found)):
            raise SchemaError(f"append: expected names of columns as Unicode text, found {found}")
        required = [field.column for field in self.fields.values() if field.required]
        required += [name for name in self.declared if name not in required]
        known = list(self.arrow_types)
        missing = [name for name in known or required if name not in found]
        if missing:
            raise MissingFieldError(
                f"append: expected columns {known or required}, found {found}: {missing} missing (pass None for a null)"
                f"{_in_words(found, {*missing, *([] if known else ['observation'])})}"
            )
        meant = [] if known or self.told.spec is None else [name for name in self.told.spec if name not in found]
        if meant:
            raise SchemaError(
                f"spec: expected specs only for the columns of the rows ({found}), found specs for {meant}"
            )
        unknown = [name for name in found if known and name not in known]
        if unknown:
            raise SchemaError(f"append: expected only the columns {known}, found also {unknown}")

    def tail_columns(self, row: Mapping[str, Any], spec: Mapping[str, FieldSpec], at: int) -> dict[str, TailColumn]:
        """Return columns for appended rows. ``row`` is the first appended row, and ``at`` is the index of this row.

        Raises:
            DataError: A column or field cannot represent a value of the row.
        """
        from mouse_core.columns.appended import tail_column

        columns = {}
        for name in self.arrow_types or row:
            field = self.by_column.get(name)
            shape = None if field is None else self._row_shape(field, spec)
            known, declared, roots = self.arrow_types.get(name), self.declared.get(name), self.image_roots
            try:
                columns[name] = tail_column(
                    row[name], field, known=known, shape=shape, image_roots=roots, declared=declared
                )
                if field is not None:
                    check_readable(columns[name].kind, field)
                if self.spec is not None and name in self.spec:
                    columns[name] = self._with_domain(name, columns[name])
            except SchemaError as error:
                raise DataError(f"{error} at row {at}{self.hint(name, row[name])}") from error
            except REFUSALS as error:
                raise DataError(f"column {name!r}: {error} at row {at}{self.hint(name, row[name])}") from error
        return columns

    def hint(self, name: str, value: Any = None) -> str:
        """Return the end of an error message about a value that a column's field cannot read: the remedy, or ""."""
        if isinstance(value, Mapping) and not value.keys() <= {"bytes", "path"}:
            parts = ", ".join(repr(f"{name}.{key}") for key in [*value][:3])
            return f"; give each part of the dict as a column of its own, such as {parts}"
        field = self.by_column.get(name)
        if field is None or name not in ("observation_image", "observation_discrete"):
            return ""
        return f"; the field {field.name!r} reads this column: give other values another name, such as '{name}_values'"

    def _with_domain(self, name: str, column: TailColumn) -> TailColumn:
        """Return the column with a check that allows only values of the column's spec. With alignment "arrived", zeros
        are also allowed.
        """
        spec, field = self.spec[name], self.by_column.get(name)
        from mouse_core.columns.appended import holds

        if column.kind.kind == "image" and column.shape and not holds(spec.shape, column.shape):
            raise ValueError(f"expected images of shape {spec.shape}, found {column.shape}")
        of_transition = name.startswith("action") if field is None else field.is_of_transition
        return replace(column, domain=spec, zeros=of_transition and self.alignment == "arrived")

    def _combined(self, column: str) -> Field:
        """Return the field that combines the requirements of all fields that read a column."""
        fields = [field for field in self.fields.values() if field.column == column]
        bounds = _common_bounds(column, fields)
        fill = None
        if all(field.fill is not None for field in fields):
            # The value does not matter if it is valid: it only shows that nulls are allowed.
            fill = 0 if bounds is None else bounds[0]
        is_padded = all(field.pad is not None for field in fields)
        return replace(
            fields[0],
            fill=fill,
            pad=fields[0].pad if is_padded else None,
            bounds=bounds,
            image=any(field.image for field in fields),
        )

    def _check_width(self, name: str, data_type: pa.DataType, where: str = "", before: pa.DataType = None) -> None:
        """Raise SchemaError if a column's type shows that its rows have another width than the field or the earlier
        rows.
        """
        found = fixed_shape(data_type)
        field = self.by_column.get(name)
        if not found or field is None or field.image:
            return
        wanted = self._row_shape(field, {})
        if wanted == ():
            wanted = (1,)  # a list of one number is read as that number
        wanted = wanted or (None if before is None else fixed_shape(before)) or found
        fits = found == wanted or (field.pad is not None and len(found) == len(wanted) == 1 and found < wanted)
        if not fits and len(found) == len(wanted) == 1:
            at_most = "at most " if field.pad is not None else ""
            raise SchemaError(f"column {name!r}: expected {at_most}{values_of(wanted[0])}, found {found[0]}{where}")
        if not fits:
            raise SchemaError(f"column {name!r}: expected rows of shape {list(wanted)}, found {list(found)}")

    def _row_shape(self, field: Field, spec: Mapping[str, FieldSpec]) -> tuple[int, ...] | None:
        if field.name in spec:
            return spec[field.name].image_shape or spec[field.name].shape
        if field.row_shape is not None:
            return field.row_shape
        return None if field.dim is None else (field.dim,)


def _called(label: str, metadata: DatasetMetadata) -> str:
    """Return the name of some rows for an error message about rows that contradict each other. The name includes the
    environments of the rows, because differing environments are the usual cause.
    """
    more = ", ..." if len(metadata.environments) > 3 else ""
    return label + (f" ({', '.join(metadata.environments[:3])}{more})" if metadata.environments else "")


def _common_bounds(column: str, fields: Sequence[Field]) -> tuple[int, int] | None:
    """Return the range of values that every field of a column allows; None if no field has bounds."""
    given = [field.bounds for field in fields if field.bounds is not None]
    if not given:
        return None
    low, high = max(low for low, _ in given), min(high for _, high in given)
    if low > high:
        raise ConfigError(
            f"fields: expected fields of column {column!r} whose bounds have a value in common, found "
            f"{ {field.name: field.bounds for field in fields} }"
        )
    return low, high


def _check_alike(given: Field, said: Field, label: str) -> None:
    """Raise SchemaError unless the store's field has the same column and shape as the dataset's field of that name."""
    for name in ("column", "shape", "image"):
        wanted, found = getattr(given, name), getattr(said, name)
        if wanted != found and wanted is not None and found is not None:
            raise SchemaError(
                f"field {said.name!r}: expected {name} {wanted!r}, found {found!r} in the metadata of {label}"
            )


def _check_declared(declared: pa.Field, segment: Segment) -> None:
    """Raise SchemaError if the type or the first value of a dataset's column contradicts the declared column."""
    name, wanted = declared.name, fixed_shape(declared.type)
    kind, found = column_type(segment.types[name]), fixed_shape(segment.types[name])
    if wanted and found is None:
        first = segment.first_value(name, segment.num_rows)
        found = None if first is None else np.array(first[1], object).shape
    nulls = 0 if declared.nullable else segment.table.column(name).null_count
    differs = kind.kind != "null" and kind != column_type(declared.type)
    if differs or nulls or (wanted and found and wanted != found):
        shape = f" in rows of shape {list(found)}" if found else ""
        raise SchemaError(
            f"column {name!r}: expected {declared.type}{'' if declared.nullable else ' not null'}, as declared, found "
            f"{segment.types[name]}{shape}{f' with {nulls} nulls' if nulls else ''} in the dataset"
        )


def _in_words(found: Iterable[object], columns: Iterable[str] | None = None) -> str:
    said = recipe(found) if columns is None else recipe(found, columns)
    return f"; {said}" if said else ""


class StoreBackend:
    """The rows of a store: segments, and the open extent for appended rows. This class keeps rows in memory; subclasses
    keep rows in files or at a remote address.

    Args:
        schema: The store's schema; the columns of the first row are added to the schema.
        budget: The limit of memory for dense copies.
        error: Function that returns the error that every append to a read-only store raises; None: appends are allowed.
        path: The folder or address of the rows; None: the rows are in memory.
    """

    #: See ``DatasetStore.open``.
    sync: str = "none"

    def __init__(
        self,
        schema: StoreSchema,
        budget: DenseBudget,
        error: Callable[[], Exception] | None = None,
        path: str | None = None,
    ) -> None:
        self.schema, self.budget, self.error, self.path = schema, budget, error, path
        self.segments: list[Segment] = []
        self.count = self._cleared = 0
        self._extent: Extent | None = None
        # Columns of flags that contradict or confirm the done code; None: the rows have no such columns.
        self._flags: tuple[str, str] | None = None
        self.lock = ProcessLock()
        self._kept: Snapshot | None = None
        # Whether enough appended rows were inspected for rewards that contradict the alignment.
        self._is_inspected = False

    def warn_of_rewards(self, *, stacklevel: int) -> None:
        """Warn once if, with alignment "arrived", the first appended rows have rewards in the first row of an
        episode.
        """
        if self._extent is not None and not self._is_inspected and self.schema.alignment == "arrived":
            where = "the rows that were appended" if self.path is None else f"store {self.path}"
            found = warn_of_appended(self._extent, self.schema.fields, where, stacklevel=stacklevel + 1)
            self._is_inspected = found

    @property
    def end(self) -> int:
        """Number of rows ever written, including cleared rows."""
        return self._cleared + self.count

    def seen(self) -> Self:
        """Update the backend with the rows that another process has written since the last call, and return the
        backend."""
        return self

    def shown(self) -> list[Segment]:
        """The segments that snapshots use; the segments hold only complete rows."""
        return self.segments

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all present rows; see ``DatasetStore.snapshot``."""
        with self.lock:
            rows = self.seen()
            if self._kept is None or self._kept.num_rows != rows.count:
                self._kept = Snapshot(self._all_segments(), self.schema.config(), budget=self.budget)
            return self._kept

    def _all_segments(self) -> list[Segment]:
        """Return all segments, including the open extent."""
        segment = self.open_segment()
        return self.shown() if segment is None else [*self.shown(), segment]

    def take(self, segments: Sequence[Segment], said: Sequence[tuple[str, DatasetMetadata]]) -> None:
        """Add segments after the existing rows; see ``DatasetStore.from_dataset``.

        Args:
            segments: The segments.
            said: For each segment, its name in messages and its metadata.
        """
        with self.lock:
            self.check_open()
            schema = self.schema.merged(segments, said)
            self.seal_open()
            self.segments.extend(segments)
            self.schema, self._kept = schema, None  # a dataset without rows may still add columns
            self.count += sum(segment.num_rows for segment in segments)

    def check_first(self, columns: Mapping[str, Any], metadata: DatasetMetadata) -> None:
        """Raise the errors that ``take`` and ``extend`` would raise if the store's first rows had ``metadata``; the
        store is not changed.
        """
        trial = StoreBackend(self.schema, self.budget)
        trial.take([], [("the episode", metadata)])
        trial.extend(columns, len(columns["done"]))

    def clear(self) -> None:
        """Remove all rows; see ``DatasetStore.clear``."""
        with self.lock:
            self.check_open()
            self._cleared += self.count
            self.segments, self.count, self._kept, self._extent = [], 0, None, None

    def recount(self) -> None:
        """Restore a valid row count after an interrupt; an incomplete row is removed."""
        if self.error is None:
            if self._extent is not None:
                self._extent.forget_parts()
            self.count = sum(segment.num_rows for segment in self.segments) + self.open_count

    def check_open(self) -> None:
        """If the store is read-only, raise the error that explains this."""
        if self.error is not None:
            raise self.error()

    def flush(self) -> None:
        """Do nothing, because all rows are in memory and none must be written; see ``DatasetStore.flush``."""

    def close(self) -> None:
        """Do nothing, since no files are open; see ``DatasetStore.close``."""

    def interrupt_on_close(self, recording: Any) -> None:
        """Do nothing, since ``close`` does nothing; see ``DatasetStore.interrupt_on_close``."""

    # ------------------------------------------------------------------ appended rows

    @property
    def open_count(self) -> int:
        """Number of appended rows in the open extent."""
        return 0 if self._extent is None else self._extent.count

    def open_segment(self) -> Segment | None:
        """A segment of the rows that the open extent has now; the segment never includes later rows."""
        if self._extent is None or not self._extent.count:
            return None
        return Segment.of_extent(self._extent, self.schema.image_roots)

    def seal_open(self) -> None:
        """Seal the open extent. The next row opens a new extent, which has all columns that are known when the row is
        appended.
        """
        segment = self.open_segment()
        self._extent = None
        if segment is not None:
            segment.seal()
            self.segments.append(segment)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; the caller increments the row count. See ``DatasetStore.append``."""
        extent = self._extent
        if self._flags is None and extent is not None and extent.count < extent.rows and extent.append(row):
            return
        self.check_open()
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
        """Add ``n`` rows, column by column; see ``DatasetStore.extend``."""
        with self.lock:
            try:
                self._extend(columns, n)
                self.count += n
            except BaseException:
                self.recount()
                raise

    def _extend(self, columns: Mapping[str, Any], n: int) -> None:
        self.check_open()
        self._flags = flags_in(columns)
        if self._flags is not None:
            check_flags(columns, self._done, lambda row: f"at row {self.count + row}")
        firsts = {name: _first_known(values, name in self.schema.by_column) for name, values in columns.items()}
        extent = self._extent_for(firsts, n)
        try:
            prepared = self._prepare(extent, columns)
        except DataError:
            # A column that was null throughout gets its first value: from here on, store it in that value's type.
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
        return self.schema.fields["done"].column

    def _check_flags(self, row: Mapping[str, Any], ended: str, cut: str) -> None:
        """Raise DataError if the flags of a row contradict its done code."""
        try:
            if row[self._done] == (1 if row[ended] else 2 if row[cut] else 0):
                return
        except (KeyError, ValueError):  # names that raise later; arrays
            pass
        one = {name: [row[name]] for name in (self._done, ended, cut) if name in row}
        check_flags(one, self._done, lambda _: f"at row {self.count}")

    def _prepare(self, extent: Extent, columns: Mapping[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = {}
        for name, column in extent.columns.items():
            try:
                prepared[name] = checked_rows(columns[name], column)
            except RowError as error:
                raise self._refused(name, error, error.row) from error
            except REFUSALS as error:
                raise DataError(f"column {name!r}: {error}{self.schema.hint(name)}") from error
        return prepared

    def _extent_for(self, row: Mapping[str, Any], coming: int = 0) -> Extent:
        """Return the extent for ``row``: the open extent, or a new extent. The new extent becomes the open extent when
        the row has been written.
        """
        if self._extent is None or row.keys() != self._extent.columns.keys():
            self.schema.check_names(row)
        if self._extent is None:
            return self._make(self.schema.tail_columns(row, self._spec(), self.count), 0, coming)
        if not self._has_room(self._extent, coming):
            return self._make(self._extent.columns, self._extent.rows, coming)
        return self._extent

    def _make(self, columns: Mapping[str, TailColumn], before: int, coming: int) -> Extent:
        """Return a new extent; see ``Extent``."""
        return Extent.allocate(columns, before, coming)

    def _has_room(self, extent: Extent, coming: int) -> bool:
        """Return whether an extent has room for at least the first of the next ``coming`` rows."""
        return extent.count < extent.rows

    def _learn(self, extent: Extent, row: Mapping[str, Any]) -> bool:
        """Set the type of a column that was null in all earlier rows, and try to add the row again; return whether the
        row was added.
        """
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
        columns = self.schema.tail_columns(row, self._spec(), self.count)
        kept = {name: columns[name] if name in fresh else column for name, column in extent.columns.items()}
        return self._make(kept, 0, coming)

    def _open(self, extent: Extent) -> None:
        if self._extent is not None and self._extent is not extent:
            self.seal_open()
        self._extent = extent
        self._know(extent)

    def _know(self, extent: Extent) -> None:
        for name, column in extent.extents.items():
            self.schema.learn(name, column)

    def _spec(self) -> Mapping[str, FieldSpec]:
        """The specs of the fields, determined from the earlier rows."""
        return Snapshot(self._all_segments(), self.schema.config()).spec if self.segments else {}

    def _refused(self, name: str, error: BaseException | None, row: int = 0) -> DataError:
        return DataError(f"column {name!r}: {error} at row {self.count + row}")


def _first_known(values: Any, is_read: bool) -> Any:
    """Return the first value that is not null, from which a type can be inferred; None if all values are null.

    For a column that no field reads, empty lists are skipped, since ``[]`` does not determine a type.
    """
    if type(values) is np.ndarray and values.dtype != object:
        return values[0]
    first = next((value for value in values if not is_hidden(value)), None)
    return first if is_read or not is_empty(first) else next((one for one in values if not is_empty(one)), first)


def select_splits(
    dataset: Any, splits: str | Sequence[str] | None, split_pattern: str | Sequence[str] | None
) -> list[tuple[str, Any]]:
    """Return the selected datasets in order, each with a name for messages; see ``DatasetStore.from_dataset``.

    Raises:
        ConfigError: Both arguments are given, a split is unknown, or a pattern matches no split.
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
    """Yield each name that matches a pattern once, in the order of the patterns."""
    names: dict[Any, None] = {}
    for pattern in patterns:
        matched = [name for name in dataset if fnmatchcase(str(name), pattern)]
        if not matched:
            raise ConfigError(f"from_dataset: expected a pattern matching {list(dataset)}, found {pattern!r}")
        names |= dict.fromkeys(matched)
    return names


def segment_of(part: Any, image_roots: tuple[str, ...]) -> Segment:
    """Return the segment of a dataset or a table, without a copy.

    Raises:
        ConfigError: ``part`` is neither a dataset nor a table.
        SchemaError: The name of a column is not Unicode text.
        DataError: A mapped file was truncated, or has grown since its reader opened the file.
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
            f"from_dataset: expected a dataset, found the path {path!r}; DatasetStore.open({path!r}) opens it; "
            "datasets.load_from_disk and datasets.load_dataset return a dataset"
        )
    if not hasattr(part, "_indices") or not hasattr(getattr(part, "data", None), "table"):
        raise ConfigError(
            f"from_dataset: expected a datasets.Dataset, a dict of them or a pyarrow.Table, found {type(part).__name__}"
        )
    # Detect rows that a damaged file no longer contains here, before a training runs without them.
    for table in (part.data, part._indices):
        check_mapped(table)
    return Segment.from_dataset(part, image_roots)


def _named(dataset: Mapping[Any, Any], names: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"split {name!r}", dataset[name]) for name in names]
