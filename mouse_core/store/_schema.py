"""The schema of a store: its columns, its fields, and the metadata of its rows."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column_types import ColumnType, check_readable, column_type, fixed_shape
from mouse_core._base.checks import is_text, recipe, values_of
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.spec import DIMS, Alignment, Field, FieldSpec, check_alignment, merge_fields
from mouse_core.store._segments import Segment
from mouse_core.store.fields import SnapshotConfig

if TYPE_CHECKING:
    from mouse_core.about.dataset import About
    from mouse_core.columns.appended import TailColumn

REFUSALS = (ValueError, TypeError, OverflowError, pa.ArrowException)
"""Errors that building a column from a value may raise."""


class StoreSchema:
    """The fields a store was made with, and the columns it has met so far.

    Args:
        fields, alignment, image_roots, spec: See ``DatasetStore``.
        dims: Its ``max_action_dim`` and ``max_obs_continuous_dim``.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        dims: Mapping[str, int | None],
        alignment: str | None,
        image_roots: Iterable[str | os.PathLike[str]],
        spec: Any = None,
    ) -> None:
        from mouse_core.about.dataset import About
        from mouse_core.images.files import check_roots

        self.image_roots = check_roots(image_roots, where="image_roots")
        self.alignment: Alignment = check_alignment(alignment, "arrived")
        # What the store was told, and what datasets said beside it.
        checked: dict[str, Any] = {name: _check_dim(name, dim) for name, dim in dims.items()}
        self.told = About(None if alignment is None else self.alignment, fields=list(fields), spec=spec, **checked)
        self.said = About()
        self.all_say_alignment = True
        self._know_fields()
        self.types: dict[str, ColumnType] = {}
        self.arrow_types: dict[str, pa.DataType] = {}
        self.widths: dict[str, tuple[int, ...]] = {}

    def config(self) -> SnapshotConfig:
        """Return the configuration that a snapshot takes."""
        return SnapshotConfig(dict(self.fields), dict(self.types), self.dims, self.alignment)

    def about(self) -> About:
        """Return the metadata of the rows."""
        said = self.all_say_alignment if self.arrow_types else self.said.alignment is not None
        stated = self.told.alignment is not None or said
        fields = [*self.said.fields, *self.told.fields]
        whole = self.alignment if stated else None
        return self.said.replace(alignment=whole, fields=fields, spec=self.spec, **self.dims)

    def merged(self, segments: Sequence[Segment], said: Sequence[tuple[str, About]]) -> Self:
        """The schema with the columns of new segments, and what their datasets say of themselves.

        Args:
            segments: The segments.
            said: For each what to call it in messages, and what it says; of no segments perhaps that of the store.

        Raises:
            MissingFieldError: A required column is missing.
            SchemaError: Columns that a field cannot be read from, or that do not fit those there are; something said
                that contradicts what is known.
        """
        merged = copy.copy(self)
        merged._adopt(said)
        merged._merge_columns(segments)
        for segment, (_, about) in zip(segments, said, strict=False):
            merged.all_say_alignment &= about.alignment is not None or not segment.num_rows
        return merged

    def _adopt(self, said: Sequence[tuple[str, About]]) -> None:
        """Check what datasets say, and let it fill in what the store was not told."""
        from mouse_core.about.dataset import joined

        told = {field.name: field for field in self.told.fields}
        unknown = []
        for where, about in said:
            if about.alignment not in (None, self.alignment):
                raise SchemaError(
                    f"from_dataset: expected rows of alignment {self.alignment!r}, found {about.alignment!r} in "
                    f"{where}; a DatasetStore(alignment={about.alignment!r}) takes them"
                )
            for field in about.fields:
                _check_alike(told.get(field.name, field), field, where)
            _check_values_alike(self.told.spec, about.spec, where)
            news: dict[str, Any] = {name: self._untold_dim(name, where, about) for name in DIMS}
            news["fields"] = [field for field in about.fields if field.name not in told]
            unknown.append((_called(where, about), about.replace(**news)))
        self.said = joined([(_called("the rows before", self.said), self.said), *unknown])
        self._know_fields()
        for column, width in self.widths.items():
            known = self._row_shape(self.by_column[column], {})
            if known is not None and len(width) == len(known) == 1 and width > known:
                raise SchemaError(
                    f"column {column!r}: expected at most {known[0]} values, found {width[0]} in the rows before"
                )

    def _untold_dim(self, name: str, label: str, about: About) -> int | None:
        """A dimension that a dataset says and the store was not told."""
        told, found = getattr(self.told, name), getattr(about, name)
        if told is not None and found is not None and told < found:
            raise SchemaError(f"{name}: expected at least {found}, as {_called(label, about)} says, found {told}")
        return None if told is not None else found

    def _know_fields(self) -> None:
        """Put together what the store was told and what datasets said."""
        self.dims: dict[str, Any] = {name: getattr(self.told, name) or getattr(self.said, name) for name in DIMS}
        self.fields = merge_fields([*self.said.fields, *self.told.fields], self.dims)
        self.by_column = {field.column: self._combined(field.column) for field in self.fields.values()}
        specs = [about.spec.entries for about in (self.said, self.told) if about.spec is not None]
        #: Which values columns may have, a ``mouse_core.spec.Composite``; None: any.
        self.spec = self.said.replace(spec={name: one for each in specs for name, one in each.items()}).spec

    def _merge_columns(self, segments: Sequence[Segment]) -> None:
        types, arrow_types, widths = dict(self.types), dict(self.arrow_types), dict(self.widths)
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
            for name, data_type in segment.types.items():
                kind = column_type(data_type)
                if name in self.by_column:
                    check_readable(kind, self.by_column[name])
                self._check_width(name, data_type, widths)
                known = types.get(name, kind)
                if known != kind and "null" not in (known.kind, kind.kind):
                    raise SchemaError(
                        f"column {name!r}: expected {known} as in the rows before, found {kind}; "
                        f"cast one of them first, e.g. with Dataset.cast_column"
                    )
                if name not in types or known.kind == "null":
                    types[name], arrow_types[name] = kind, data_type
        self.types, self.arrow_types, self.widths = types, arrow_types, widths

    def learn(self, name: str, kind: ColumnType, data_type: Callable[[], pa.DataType]) -> None:
        """Take over a column of appended rows, unless its type is known already."""
        if not self.arrow_types and self.said.alignment is None:
            self.all_say_alignment = False  # the first rows, of which nobody said it
        if name not in self.types or self.types[name].kind == "null":
            self.types[name], self.arrow_types[name] = kind, data_type()

    def check_names(self, names: Iterable[str]) -> None:
        """Raise unless ``names`` are the columns of the store, or can be the first of an empty one.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: A column that the store does not have, or of which it was told and the first row knows nothing.
        """
        found = list(names)
        if not all(map(is_text, found)):
            raise SchemaError(f"append: expected names of columns as Unicode text, found {found}")
        required = [field.column for field in self.fields.values() if field.required]
        known = list(self.arrow_types)
        missing = [name for name in known or required if name not in found]
        if missing:
            raise MissingFieldError(
                f"append: expected columns {known or required}, found {found}: {missing} missing (None gives a null)"
                f"{_in_words(found, {*missing, *([] if known else ['observation'])})}"
            )
        meant = [] if known or self.told.spec is None else [name for name in self.told.spec if name not in found]
        if meant:
            raise SchemaError(f"spec: expected specs of columns that rows have, {found}, found {meant}")
        unknown = [name for name in found if known and name not in known]
        if unknown:
            raise SchemaError(f"append: expected columns {known}, found also {unknown}")

    def tail_columns(self, row: Mapping[str, Any], spec: Mapping[str, FieldSpec], at: int) -> dict[str, TailColumn]:
        """Return the columns for appended rows, the first of which is ``row``, number ``at``.

        Raises:
            DataError: A column or field cannot hold its value.
        """
        from mouse_core.columns.appended import tail_column

        columns = {}
        for name in self.arrow_types or row:
            field = self.by_column.get(name)
            shape = None if field is None else self._row_shape(field, spec)
            try:
                known = self.arrow_types.get(name)
                columns[name] = tail_column(row[name], field, known=known, shape=shape, image_roots=self.image_roots)
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
        """Return the remedy for a value that a column's field cannot read, to end a message; empty: none."""
        if isinstance(value, Mapping) and not value.keys() <= {"bytes", "path"}:
            parts = ", ".join(repr(f"{name}_{key}") for key in [*value][:3])
            return f"; give each part of the dict as a column of its own, such as {parts}"
        field = self.by_column.get(name)
        if field is None or name not in ("observation_image", "observation_discrete"):
            return ""
        return f"; the field {field.name!r} reads this column: give other values another name, such as '{name}_values'"

    def _with_domain(self, name: str, column: TailColumn) -> TailColumn:
        """A column that takes what its spec allows; and zeros, where it may be that no transition led to a row."""
        spec, field = self.spec[name], self.by_column.get(name)
        from mouse_core.columns.appended import holds

        if column.kind.kind == "image" and column.shape and not holds(spec.shape, column.shape):
            raise ValueError(f"expected pictures of shape {spec.shape}, found {column.shape}")
        of_transition = name.startswith("action") if field is None else field.is_of_transition
        return replace(column, domain=spec, zeros=of_transition and self.alignment == "arrived")

    def _combined(self, column: str) -> Field:
        """Return the field that combines the demands of all fields that read a column."""
        fields = [field for field in self.fields.values() if field.column == column]
        bounds = _common_bounds(column, fields)
        fill = None
        if all(field.fill is not None for field in fields):
            # What it is does not matter here, only whether there may be nulls.
            fill = 0 if bounds is None else bounds[0]
        is_padded = all(field.pad is not None for field in fields)
        return replace(
            fields[0],
            fill=fill,
            pad=fields[0].pad if is_padded else None,
            bounds=bounds,
            image=any(field.image for field in fields),
        )

    def _check_width(self, name: str, data_type: pa.DataType, widths: dict[str, tuple[int, ...]]) -> None:
        """Raise SchemaError if the type alone says that rows do not fit those before, or the declared width."""
        found = fixed_shape(data_type)
        field = self.by_column.get(name)
        if not found or field is None or field.image:
            return
        wanted = self._row_shape(field, {})
        if wanted == ():
            wanted = (1,)  # which is read as the number in it
        wanted = wanted or widths.setdefault(name, found)
        fits = found == wanted or (field.pad is not None and len(found) == len(wanted) == 1 and found < wanted)
        if not fits and len(found) == len(wanted) == 1:
            at_most = "at most " if field.pad is not None else ""
            raise SchemaError(f"column {name!r}: expected {at_most}{values_of(wanted[0])}, found {found[0]}")
        if not fits:
            raise SchemaError(f"column {name!r}: expected rows of shape {list(wanted)}, found {list(found)}")

    def _row_shape(self, field: Field, spec: Mapping[str, FieldSpec]) -> tuple[int, ...] | None:
        if field.name in spec:
            return spec[field.name].image_shape or spec[field.name].shape
        if field.shape is not None:
            return field.shape
        return None if field.dim is None else (field.dim,)


def _called(label: str, about: About) -> str:
    """Return the name of rows in a message, with their environments, the usual reason why rows differ."""
    more = ", ..." if len(about.environments) > 3 else ""
    return label + (f" ({', '.join(about.environments[:3])}{more})" if about.environments else "")


def _common_bounds(column: str, fields: Sequence[Field]) -> tuple[int, int] | None:
    """The bounds that values meet which all of some fields allow; None if no field has any."""
    given = [field.bounds for field in fields if field.bounds is not None]
    if not given:
        return None
    low, high = max(low for low, _ in given), min(high for _, high in given)
    if low > high:
        raise ConfigError(
            f"fields: expected bounds that some value of column {column!r} meets, found "
            f"{ {field.name: field.bounds for field in fields} }"
        )
    return low, high


def _check_dim(name: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name}: expected a positive integer or None, found {value!r}")
    return None if value is None else int(value)


def _check_alike(given: Field, said: Field, label: str) -> None:
    """Raise SchemaError unless a field that the store was given reads what the dataset says of the field."""
    for name in ("column", "shape", "image"):
        wanted, found = getattr(given, name), getattr(said, name)
        if wanted != found and wanted is not None and found is not None:
            raise SchemaError(f"field {said.name!r}: expected {name} {wanted!r}, found {found!r} in what {label} says")


def _check_values_alike(given: Any, said: Any, label: str) -> None:
    """Raise SchemaError unless a dataset says of columns what the store was given, or nothing."""
    for name in {} if given is None or said is None else given:
        if name in said and said[name] != given[name]:
            raise SchemaError(f"column {name!r}: expected {given[name]!r}, found {said[name]!r} in what {label} says")


def _in_words(found: Iterable[object], columns: Iterable[str] | None = None) -> str:
    said = recipe(found) if columns is None else recipe(found, columns)
    return f"; {said}" if said else ""
