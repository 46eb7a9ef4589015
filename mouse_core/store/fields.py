"""Readers of fields. A reader binds a field to a column of a snapshot, and determines the dtypes, the shape and the
checks.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import Column, Growth, ReadOptions
from mouse_core._arrow.column_types import ColumnType, check_readable, column_type, fixed_shape
from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.gathering import gather, pieces_lying
from mouse_core._arrow.windows import WindowsPart
from mouse_core.dtypes import RowError, is_lossless, largest_of, number_kind
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.spec import LAYOUTS, STANDARD_FIELDS, Alignment, Field, FieldSpec, Layout, merge_fields
from mouse_core.store._segments import Segment

_UNSIGNED = {np.dtype(f"int{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class SnapshotConfig:
    """The fields, columns, dimensions and layout of a store's data.

    Args:
        fields: The fields by name.
        types: The columns' types by name.
        dims: The configured dimensions, by their names in ``spec.DIMS``.
        alignment: "arrived" or "outgoing".
        made: The derivations of derived columns, by name.
        layout: How columns are delivered: "mouse" or "stored".
    """

    fields: Mapping[str, Field]
    types: Mapping[str, ColumnType]
    dims: Mapping[str, int | None]
    alignment: Alignment
    made: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: Layout = "mouse"

    def in_layout(self, layout: Layout, types: Mapping[str, pa.DataType]) -> SnapshotConfig:
        """Return the configuration that delivers columns in a layout; ``types`` are the Arrow types of columns by name.

        Fields that were added to the current layout are preserved.
        """
        if layout == self.layout:
            return self
        standard = {field.name: field for field in LAYOUTS[self.layout]}
        own = [field for name, field in self.fields.items() if replace(field, dim=None) != standard.get(name)]
        if layout == "stored":
            own = [*stored_fields(types, [*own, *LAYOUTS[layout]]), *own]
            return replace(self, layout=layout, fields=merge_fields(own, self.dims, layout))
        fields = merge_fields(own, self.dims, layout)
        for name, column in _mouse_columns(self).items():
            if column is None:
                del fields[name]
            else:
                fields.pop(column, None)
                fields[name] = replace(fields[name], column=column)
        return replace(self, layout=layout, fields=fields)

    def with_next(self) -> SnapshotConfig:
        """Return a configuration in which observations and ``done`` have a second field ``next_<name>``, the value of
        the next row.

        Raises:
            ConfigError: The store already has a field with the name ``next_<name>``.
        """
        if "next_done" in self.fields:
            return self
        marks = [Field("observation_missing", fill=0)] if "observation_missing" in self.types else []
        seen = [field for name, field in self.fields.items() if name.startswith("obs") or name == "done"]
        following = {f"next_{field.name}": field for field in (*marks, *seen)}
        taken = following.keys() & self.fields
        if taken:
            raise ConfigError(
                f"transitions: expected a store without fields {sorted(taken)}, since batches get fields of these names"
            )
        made = {name: replace(field, name=name, transition=False) for name, field in following.items()}
        return replace(self, fields={**self.fields, **made})


def stored_fields(
    types: Mapping[str, pa.DataType], known: Iterable[Field] = (), transitions: Container[str] = ()
) -> list[Field]:
    """Return a field for each column of numbers or images, with the dtype and shape of the column.

    Args:
        types: The columns' Arrow types by name.
        known: Existing fields; columns of existing fields get no new field.
        transitions: Columns whose values belong to transitions.
    """
    columns = {field.column for field in known}
    standard = {field.column: field for field in STANDARD_FIELDS}
    fields = []
    for name, data_type in types.items():
        kind = column_type(data_type)
        if name not in columns and kind.kind in ("scalar", "list", "image", "video"):
            like, of_transition = standard.get(name, Field(name)), True if name in transitions else None
            shape = fixed_shape(data_type) or ()
            picture = kind.value_type == "uint8" and len(shape) == 3 and shape[2] <= 4
            image = kind.is_encoded or like.image or picture
            fields.append(Field(name, fill=like.fill, pad=like.pad, image=image, transition=of_transition, flat=False))
    return fields


def fields_of_steps(
    types: Mapping[str, pa.DataType], columns: Container[str], transitions: Iterable[str] = ()
) -> list[Field]:
    """Return fields for the columns of added episodes that the layout "stored" does not cover.

    The columns ``observation.<key>`` and ``action.<key>`` get fields in their dtype and shape. If actions are nested,
    ``action`` is not required.

    Args:
        types: The Arrow types, by name, of the columns that can get fields.
        columns: The names of all columns.
        transitions: Further columns whose values belong to transitions.
    """
    of_actions = [name for name in types if name.startswith("action.")]
    nested = [] if "action" in columns else [Field("action", transition=True)]
    return [*nested, *stored_fields(types, LAYOUTS["stored"], {*transitions, *of_actions})]


def array_type(dtype: npt.DTypeLike, shape: Sequence[int]) -> pa.DataType:
    """Return the Arrow type for a column of arrays."""
    kind = pa.from_numpy_dtype(dtype)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def _mouse_columns(config: SnapshotConfig) -> dict[str, str | None]:
    """Return, for each observation field of the layout "mouse", the column that the field reads in rows that were added
    as episodes.

    Rows of added episodes have columns ``observation`` or ``observation.<key>``. If exactly one of these columns has
    the kind of a field, the field reads this column. The result has None for a field if no column fits and the field's
    default column is of another kind.
    """
    images = {field.column for field in config.fields.values() if field.image}
    found: dict[str, list[str]] = {"obs_continuous": [], "obs_discrete": [], "obs_image": []}
    for name, kind in config.types.items():
        if name != "observation" and not name.startswith("observation."):
            continue
        if name in images or (kind.kind == "list" and kind.depth == 2 and kind.dtype == np.uint8):
            found["obs_image"].append(name)  # images [H, W, C] or [H, W]
        elif kind.kind == "scalar" and kind.dtype.kind in "iu":
            found["obs_discrete"].append(name)
        elif kind.kind == "scalar" or (kind.kind == "list" and kind.depth == 1):
            found["obs_continuous"].append(name)
    chosen: dict[str, str | None] = {field: names[0] for field, names in found.items() if len(names) == 1}
    return chosen if "observation" not in config.types else {"obs_continuous": None, **chosen}


@dataclass(frozen=True, eq=False)
class FieldReader:
    """Reads windows of one field and checks their values.

    Args:
        field: The field.
        spec: The dtypes and shape of the field.
        column: The column that the field reads.
        bounds: Lowest and highest allowed value; None: values need no check.
        highest: The largest allowed value of a column of unsigned integers; None: values need no check.
        holds_fills: Whether the column's dtype can represent the values that replace nulls and pad short rows.
    """

    field: Field
    spec: FieldSpec
    column: Column
    bounds: tuple[int, int] | None = None
    highest: int | None = None
    holds_fills: bool = True

    def forward(self, growth: Growth) -> FieldReader:
        """Return the reader of this field for a snapshot with appended rows."""
        column = self.column.forward(growth)
        return FieldReader(self.field, self.spec, column, self.bounds, self.highest, self.holds_fills)

    @property
    def identity(self) -> list[Any]:
        """Return the properties that determine the field's values; the delivered dtype is not included."""
        spec, crop = self.spec, self.field.crop
        column = spec.column if crop is None else f"{spec.column} cropped to {list(crop)}"
        return [spec.name, column, spec.shape, spec.image_shape, repr(self.field.fill), repr(self.field.pad)]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """Raise ConfigError if ``dtype`` cannot represent the values that replace nulls and pad short rows."""
        for option in ("fill", "pad"):
            value = getattr(self.field, option)
            if value is not None and not _representable(value, dtype):
                raise ConfigError(
                    f"{self.spec.name}: expected a dtype that can represent {option}={value}, found {dtype}"
                )

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """Return the dtype in which to transfer values that are converted to ``dtype`` later: the column's dtype if it
        converts to ``dtype`` without loss, else ``dtype``.
        """
        stored = self.column.kind.dtype
        lossless = self.holds_fills and is_lossless(stored, dtype) and stored.itemsize <= dtype.itemsize
        return stored if lossless else dtype

    def read(
        self, windows: WindowsPart, dtype: np.dtype[np.generic], out: npt.NDArray[np.generic] | None = None
    ) -> npt.NDArray[Any]:
        """Read the values of windows.

        Args:
            windows: The located windows.
            dtype: The dtype of the result.
            out: The array to write, ``[n, S, *shape]`` of ``dtype``, C-contiguous; by default a new array.

        Returns:
            ``[n, S, *shape]`` of ``dtype``.

        Raises:
            DataError: A value is outside the bounds of the field.
        """
        n, length = len(windows), windows.every.length
        values = np.empty((n, length, *self.spec.shape), dtype) if out is None else out
        try:
            gather(self.column, windows, values.reshape(n, length, self.column.width))
        except ValueError as error:
            raise self.error(error, windows) from error
        self.check(values, windows)
        return values

    def seen(self, windows: WindowsPart, dtype: np.dtype[np.generic]) -> npt.NDArray[Any] | None:
        """Return the values of a window as a read-only view that is valid while the snapshot exists; None if a copy is
        needed.
        """
        pieces = pieces_lying(self.column, windows, dtype)
        if pieces is None or len(pieces) > 1:
            return None
        values = pieces[0].reshape(1, -1, *self.spec.shape)
        self.check(values, windows)
        return values

    def error(self, error: ValueError, windows: WindowsPart) -> DataError:
        """Return an error for values of windows; the message names the field, the column and, if known, the row."""
        where = f" at row {windows.row_of(error.row)}" if isinstance(error, RowError) else ""
        return DataError(f"{self.spec.name}: {error}{where} (column {self.spec.column!r})")

    def check(self, values: npt.NDArray[Any], windows: WindowsPart) -> None:
        """Raise DataError if a value of the windows, ``[n, S, ...]``, is out of bounds."""
        if self.bounds is not None:
            try:
                self._check_bounds(values)
            except RowError as error:
                raise self.error(error, windows) from error

    def _check_bounds(self, values: npt.NDArray[Any]) -> None:
        low, high = self.bounds or (0, 0)
        if low == 0 and values.dtype.kind == "i":
            # Viewed as unsigned numbers, negative numbers are the largest, so one comparison checks both bounds.
            highest = min(high, int(np.iinfo(values.dtype).max))
            if not values.size or values.view(_UNSIGNED[values.dtype]).max() <= highest:
                return
        elif not values.size or (values.min() >= low and values.max() <= high and not self._has_fraction(values)):
            return
        within = (values >= low) & (values <= high)
        if self._has_fraction(values):
            within &= values == np.floor(values)
        outside = ~within.reshape(values.shape[0] * values.shape[1], -1)
        step, value = np.argwhere(outside)[0].tolist()
        found = values.reshape(outside.shape)[step, value]
        raise RowError(step, f"expected {self.field.shown((low, high))}, found {found}")

    def _has_fraction(self, values: npt.NDArray[Any]) -> bool:
        """Return whether a code has a fraction or is NaN; codes must be integers."""
        codes = self.field.dtype is not None and np.dtype(self.field.dtype).kind in "iu"
        return codes and values.dtype.kind == "f" and bool((values != np.floor(values)).any())


def bind_fields(
    segments: Sequence[Segment],
    fields: Mapping[str, Field],
    types: Mapping[str, ColumnType],
    *,
    rows: int,
    budget: DenseBudget | None = None,
) -> dict[str, FieldReader]:
    """Return readers of the fields whose columns exist and have a value, in the order of ``fields``.

    Raises:
        MissingFieldError: A required column is missing.
        SchemaError: A column's type does not suit its field, or the rows are wider than declared.
        DataError: A required column has only nulls, or the first image cannot be read.
    """
    if not rows:
        return {}
    readers: dict[str, FieldReader] = {}
    for name, field in fields.items():
        reader = _bind(segments, field, types.get(field.column), rows, budget)
        if reader is not None:
            readers[name] = reader
    return readers


def _bind(
    segments: Sequence[Segment],
    field: Field,
    kind: ColumnType | None,
    rows: int,
    budget: DenseBudget | None,
) -> FieldReader | None:
    if kind is None:
        if field.required:
            raise MissingFieldError(f"{field.name}: expected a column {field.column!r}, found none")
        return None
    check_readable(kind, field)
    first = None if kind.kind == "null" else _first_value(segments, field.column, rows)
    if first is None:
        if field.required:
            raise DataError(f"{field.name}: expected values, found null in every row (column {field.column!r})")
        return None
    shape = _shape(segments, field, kind, first)
    shape = () if shape == (1,) and field.shape == () else shape
    if kind.is_encoded:
        kind = replace(kind, value_type=field.pixel_dtype.name)
    reading = ReadOptions(field.column, kind, shape, field.fill, field.pad, budget, field.crop, field.decoder)
    column = Column(reading, [segment.part(field.column) for segment in segments])
    return _reader(field, column)


def _reader(field: Field, column: Column) -> FieldReader:
    """Return the reader of a field whose column is known."""
    shape, stored = column.shape, column.reading.dtype
    vector = bool(shape) and field.vector_dtype is not None
    dtype = np.dtype(field.vector_dtype if vector else stored if field.dtype is None else field.dtype)
    delivered = (column.width,) if field.image and field.flat else shape
    image_shape = shape if field.image else None
    spec = FieldSpec(field.name, dtype, delivered, field.column, image_shape=image_shape)  # type: ignore[arg-type]
    bounds = field.bounds_of(len(shape))
    bounds = None if _always_within(stored, bounds) else bounds
    highest = None
    if bounds is not None and bounds[0] == 0 and stored.kind in "iu":
        highest = min(bounds[1], int(np.iinfo(stored.name).max))
    holds_fills = all(_representable(value, stored) for value in (field.fill, field.pad) if value is not None)
    reader = FieldReader(field, spec, column, bounds, highest, holds_fills)
    return replace(reader, spec=spec.replace(stored_dtype=reader.stored_dtype(dtype)))


def _shape(
    segments: Sequence[Segment], field: Field, kind: ColumnType, found: tuple[int, Any, Segment]
) -> tuple[int, ...]:
    """Return the shape of one row: the declared shape, else the shape from the column's type or from the column's first
    value.
    """
    row, first, of = found
    where = f"at row {row} (column {field.column!r})"
    if field.row_shape is not None:
        return field.row_shape
    if field.image:
        from mouse_core.images.pixels import image_shape

        try:
            if kind.kind == "video":
                return tuple(of.part(field.column).videos.shape_of(first, of.image_roots, field.crop))
            return image_shape(first, dtype=field.pixel_dtype, image_roots=of.image_roots)
        except ValueError as error:
            raise DataError(f"{field.name}: {error} {where}") from error
    if kind.depth or field.min_ndim:
        if field.dim is not None:
            return (field.dim,)
        if not kind.depth:
            return (1,)
    for segment in segments:
        if field.column in segment.types:
            known = fixed_shape(segment.types[field.column])
            if known is not None and len(known) == kind.depth:
                return known
    shape = np.array(first).shape
    if len(shape) != kind.depth or 0 in shape:
        raise SchemaError(
            f"{field.name}: expected a first row whose lists have equal length, found {first!r:.80} {where}"
        )
    return shape


def _first_value(segments: Sequence[Segment], name: str, rows: int) -> tuple[int, Any, Segment] | None:
    """Return a column's first non-null value, its row, and its segment; None if all values are null."""
    begin = 0
    for segment in segments:
        found = segment.first_value(name, rows - begin)
        if found is not None:
            return begin + found[0], found[1], segment
        begin += segment.num_rows
    return None


def stored_types(segments: Sequence[Segment]) -> dict[str, pa.DataType]:
    """Return the Arrow type of each column, from the first segment with values of the column; the null type if no
    segment has values.
    """
    found: dict[str, pa.DataType] = {}
    for segment in segments:
        for name, data_type in segment.types.items():
            if name not in found or column_type(found[name]).kind == "null":  # also lists of nulls
                found[name] = data_type
    return found


def kinds_of(types: Mapping[str, ColumnType], columns: Iterable[str], segments: Sequence[Segment]) -> dict[str, str]:
    """Return the types of columns as text; for a column of video frames, the text contains the digests of the
    videos.
    """
    kinds = {name: str(types[name]) for name in columns}
    for name in kinds:
        if types[name].kind == "video":
            known = [segment.part(name).videos.digest for segment in segments if name in segment.types]
            kinds[name] += f" {' '.join(dict.fromkeys(known))}"
    return kinds


def rows_without(segments: Sequence[Segment], rows: int, column: str) -> str | None:
    """Return a text that names a dataset in which a column has no values; None if all datasets have values of the
    column. Only the datasets of the first ``rows`` rows are inspected.

    Appended rows always have all columns, and nulls only where a field replaces nulls.
    """
    begin = 0
    for segment in segments:
        end = min(begin + segment.num_rows, rows)
        if segment.extent is None and not segment.has_value(column, end - begin):
            why = "null throughout" if column in segment.types else "missing"
            return f"column {column!r} {why} in rows {begin}..{end - 1}"
        begin += segment.num_rows
    return None


def _representable(value: float, dtype: np.dtype[Any]) -> bool:
    if number_kind(dtype) == "f":
        return not np.isfinite(value) or abs(value) <= largest_of(dtype)
    if dtype.kind == "b":
        return value in (0, 1)
    if not np.isfinite(value) or value != int(value):
        return False
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def _always_within(dtype: np.dtype[Any], bounds: tuple[int, int] | None) -> bool:
    if bounds is None or number_kind(dtype) == "f":
        return bounds is None
    if dtype.kind == "b":
        return bounds[0] <= 0 and bounds[1] >= 1
    limits = np.iinfo(dtype)
    return bounds[0] <= limits.min and bounds[1] >= limits.max


def meant_by(name: Any, readers: Mapping[str, Any], columns: Mapping[str, ColumnType]) -> str:
    """Return a suggestion for an unknown field name, as the end of an error message; "" if there is no suggestion.

    Args:
        name: The requested name.
        readers: The readers of the existing fields, by name.
        columns: The types of the existing columns, by name.
    """
    return meant_among(name, {field: reader.spec.column for field, reader in readers.items()}, columns)


def meant_among(name: Any, fields: Mapping[str, str], columns: Mapping[str, ColumnType] | None = None) -> str:
    """Return the suggestion of ``meant_by``; ``fields`` has the column of each field by name."""
    read = [field for field, column in fields.items() if name and column == name]
    if read:
        return f"; column {name!r} is read as the field {read[0]!r}"
    close = difflib.get_close_matches(str(name), fields, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    kind = columns.get(name) if columns else None
    if kind is None:
        return ""
    if kind.kind in ("scalar", "list", "null", "image", "video"):
        image = ", image=True" if kind.kind in ("image", "video") else ""
        return f"; make a field of the column with DatasetStore(fields=[Field({name!r}{image})])"
    return (
        f"; batches have only numbers and images: read values of the column of type {kind} with store[row][{name!r}]; "
        "source.plan(index).starts are the first rows of the windows of a batch"
    )
