"""What a store knows about its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._layout import ColumnType, check_readable, column_type, fixed_shape
from mouse_core._segments import Segment
from mouse_core._tail_schema import tail_column
from mouse_core._tail_values import TailColumn
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.snapshot import SnapshotConfig
from mouse_core.spec import Alignment, Field, FieldSpec, check_alignment, merge_fields

REFUSALS = (ValueError, TypeError, OverflowError, pa.ArrowException)
"""What building a column out of a value may raise."""


class StoreSchema:
    """The fields a store was made with, and the columns it has met so far.

    Args:
        fields, max_action_dim, max_obs_continuous_dim, alignment: See ``DatasetStore``.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        max_action_dim: int | None,
        max_obs_continuous_dim: int | None,
        alignment: str,
    ) -> None:
        self.fields = merge_fields(fields)
        self.by_column = {field.column: self._combined(field.column) for field in self.fields.values()}
        self.max_action_dim = _check_dim("max_action_dim", max_action_dim)
        self.max_obs_continuous_dim = _check_dim("max_obs_continuous_dim", max_obs_continuous_dim)
        self.alignment: Alignment = check_alignment(alignment)
        self.types: dict[str, ColumnType] = {}
        self.arrow_types: dict[str, pa.DataType] = {}
        self.widths: dict[str, tuple[int, ...]] = {}

    def config(self) -> SnapshotConfig:
        """What a snapshot needs, as it is now."""
        return SnapshotConfig(
            dict(self.fields),
            dict(self.types),
            self.max_action_dim,
            self.max_obs_continuous_dim,
            self.alignment,
        )

    def merge(self, segments: Sequence[Segment]) -> None:
        """Take over the columns of new segments.

        Raises:
            MissingFieldError: A required column is missing.
            SchemaError: Columns that a field cannot be read from, or that do not fit those there are.

        Nothing changes after an error.
        """
        types, arrow_types, widths = dict(self.types), dict(self.arrow_types), dict(self.widths)
        for segment in segments:
            names = segment.table.schema.names
            if len(set(names)) < len(names):
                raise SchemaError(f"expected columns of different names, found {names}")
            for field in self.fields.values():
                if field.required and field.column not in segment.types:
                    raise MissingFieldError(
                        f"{field.name}: expected a column {field.column!r}, found columns {list(segment.types)}"
                    )
            for name, data_type in segment.types.items():
                kind = column_type(data_type)
                if name in self.by_column:
                    field = self.by_column[name]
                    check_readable(kind, column=name, image=field.image, max_ndim=field.max_ndim)
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
        if name not in self.types or self.types[name].kind == "null":
            self.types[name], self.arrow_types[name] = kind, data_type()

    def check_names(self, names: Iterable[str]) -> None:
        """Raise unless ``names`` are the columns of the store, or can be the first of an empty one.

        Raises:
            MissingFieldError: A column is missing.
            SchemaError: A column that the store does not have.
        """
        found = list(names)
        if not all(isinstance(name, str) for name in found):
            raise SchemaError(f"append: expected names of columns, found {found}")
        required = [field.column for field in self.fields.values() if field.required]
        known = list(self.arrow_types)
        missing = [name for name in known or required if name not in found]
        if missing:
            raise MissingFieldError(
                f"append: expected columns {known or required}, found {found}: {missing} missing (None gives a null)"
            )
        unknown = [name for name in found if known and name not in known]
        if unknown:
            raise SchemaError(f"append: expected columns {known}, found also {unknown}")

    def tail_columns(self, row: Mapping[str, Any], spec: Mapping[str, FieldSpec], at: int) -> dict[str, TailColumn]:
        """How to keep appended rows of which ``row``, number ``at``, is the first.

        Raises:
            DataError: A value that its column or field cannot take.
        """
        columns = {}
        for name in self.arrow_types or row:
            field = self.by_column.get(name)
            shape = None if field is None else self._row_shape(field, spec)
            try:
                columns[name] = tail_column(
                    row[name],
                    field,
                    known=self.arrow_types.get(name),
                    shape=shape,
                    bounds=None if field is None else self._bounds(field),
                )
                if field is not None:
                    kind = columns[name].kind
                    check_readable(kind, column=name, image=field.image, max_ndim=field.max_ndim)
            except SchemaError as error:
                raise DataError(f"{error} at row {at}") from error
            except REFUSALS as error:
                raise DataError(f"column {name!r}: {error} at row {at}") from error
        return columns

    def _combined(self, column: str) -> Field:
        """What all fields that read a column ask of its values."""
        first, *others = (field for field in self.fields.values() if field.column == column)
        bounds = [field.bounds for field in (first, *others) if field.bounds is not None]
        return replace(
            first,
            fill=first.fill if all(field.fill is not None for field in others) else None,
            pad=first.pad if all(field.pad is not None for field in others) else None,
            bounds=(max(low for low, _ in bounds), min(high for _, high in bounds)) if bounds else None,
            image=first.image or any(field.image for field in others),
        )

    def _check_width(self, name: str, data_type: pa.DataType, widths: dict[str, tuple[int, ...]]) -> None:
        """Raise SchemaError if the type alone says that rows do not fit those before, or the declared width."""
        found = fixed_shape(data_type)
        field = self.by_column.get(name)
        if not found or field is None or field.image:
            return
        wanted = self._row_shape(field, {}) or widths.setdefault(name, found)
        fits = found == wanted or (field.pad is not None and len(found) == len(wanted) == 1 and found < wanted)
        if not fits and len(found) == len(wanted) == 1:
            at_most = "at most " if field.pad is not None else ""
            raise SchemaError(f"column {name!r}: expected {at_most}{wanted[0]} values, found {found[0]}")
        if not fits:
            raise SchemaError(f"column {name!r}: expected rows of shape {list(wanted)}, found {list(found)}")

    def _row_shape(self, field: Field, spec: Mapping[str, FieldSpec]) -> tuple[int, ...] | None:
        if field.name in spec:
            return spec[field.name].image_shape or spec[field.name].shape
        if field.shape is not None:
            return field.shape
        width = {
            "q_star": self.max_action_dim,
            "action": self.max_action_dim,
            "obs_continuous": self.max_obs_continuous_dim,
        }.get(field.name)
        return None if width is None else (width,)

    def _bounds(self, field: Field) -> tuple[int, int] | None:
        if field.name == "action" and field.bounds is None and self.max_action_dim is not None:
            return (0, self.max_action_dim - 1)
        return field.bounds


def _check_dim(name: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name}: expected a positive integer or None, found {value!r}")
    return None if value is None else int(value)
