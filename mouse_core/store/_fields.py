"""Binding fields to the columns that a snapshot has: their dtypes, shapes and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column import Column
from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core._arrow.layout import ColumnType, check_readable, fixed_shape
from mouse_core._arrow.windows import WindowsPart
from mouse_core.dtypes import RowError, convert, largest_of, number_kind
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.spec import Field, FieldSpec
from mouse_core.store._segments import Segment

if TYPE_CHECKING:
    from mouse_core._arrow.copier import Copier

_UNSIGNED = {np.dtype(f"int{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}


class FieldReader:
    """Reads one field's windows and checks their values.

    Args:
        field: The field.
        spec: Its dtypes and shape.
        column: Its column.
        bounds: Lowest and highest value allowed; None: any.
        holds_fills: Whether the column's dtype can hold what the field makes of nulls and short rows.
    """

    def __init__(
        self, field: Field, spec: FieldSpec, column: Column, bounds: tuple[int, int] | None, *, holds_fills: bool
    ) -> None:
        self.field = field
        self.spec = spec
        self.column = column
        self._bounds = None if _always_within(column.kind.dtype, bounds) else bounds
        self._holds_fills = holds_fills
        # The largest value allowed, where the column holds integers from 0 and has to be looked at.
        self.highest: int | None = None
        if self._bounds is not None and self._bounds[0] == 0 and column.kind.dtype.kind in "iu":
            self.highest = min(self._bounds[1], int(np.iinfo(column.kind.dtype.name).max))

    def over(self, kept: int, segments: Sequence[Segment]) -> FieldReader:
        """The same field over other segments, of which the first ``kept`` are the same and these the rest."""
        reader: FieldReader = object.__new__(type(self))
        reader.__dict__.update(self.__dict__)
        reader.column = self.column.over(kept, segments)
        return reader

    @property
    def is_bounded(self) -> bool:
        """Whether values have to be looked at."""
        return self._bounds is not None

    @property
    def identity(self) -> list[Any]:
        """What decides about the field's values, but for the dtype they are delivered in."""
        spec = self.spec
        return [spec.name, spec.column, spec.shape, spec.image_shape, repr(self.field.fill), repr(self.field.pad)]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """Raise ConfigError if ``dtype`` cannot hold what becomes of nulls and short rows."""
        for option in ("fill", "pad"):
            value = getattr(self.field, option)
            if value is not None and not _representable(value, dtype):
                raise ConfigError(f"{self.spec.name}: expected a dtype that holds {option}={value}, found {dtype}")

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """What to move values in that become ``dtype`` later: the column's dtype where that loses nothing."""
        stored = self.column.kind.dtype
        lossless = self._holds_fills and np.can_cast(stored, dtype, "safe") and stored.itemsize <= dtype.itemsize
        return stored if lossless else dtype

    def read(
        self,
        windows: WindowsPart,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[np.generic] | None = None,
        copier: Copier | None = None,
    ) -> npt.NDArray[Any]:
        """The windows' values.

        Args:
            windows: Where they lie.
            dtype: What to deliver.
            out: Where to write, ``[n, S, *shape]`` of ``dtype``, C-contiguous; by default a fresh array.
            copier: What is tried first.

        Returns:
            ``[n, S, *shape]`` of ``dtype``.

        Raises:
            DataError: A value that the field does not allow.
        """
        n, length = len(windows), windows.block.length
        values = np.empty((n, length, *self.spec.shape), dtype) if out is None else out
        with self._named(windows):
            if copier is None or not copier.write(windows.block, windows.number, self.spec.name, values):
                self.column.gather(windows, values.reshape(n, length, self.column.width))
        self.check(values, windows)
        return values

    def convert(
        self,
        values: npt.NDArray[Any],
        windows: WindowsPart,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[np.generic] | None = None,
    ) -> npt.NDArray[Any]:
        """The windows' values, ``[n, S, *shape]``, in another dtype, in ``out`` or a fresh array.

        Raises:
            DataError: A value that does not fit.
        """
        if out is not None and np.can_cast(values.dtype, dtype, "safe"):
            np.copyto(out, values)
            return out
        with self._named(windows):
            converted = convert(values.reshape(-1, self.column.width), dtype).reshape(values.shape)
        if out is None:
            return converted
        np.copyto(out, converted)
        return out

    @contextmanager
    def _named(self, windows: WindowsPart) -> Iterator[None]:
        """Errors in here name the field, the snapshot's row and the column."""
        try:
            yield
        except RowError as error:
            row = windows.row_of(error.row)
            raise DataError(f"{self.spec.name}: {error} at row {row} (column {self.spec.column!r})") from error
        except ValueError as error:
            raise DataError(f"{self.spec.name}: {error} (column {self.spec.column!r})") from error

    def check(self, values: npt.NDArray[Any], windows: WindowsPart) -> None:
        """Raise DataError if some of the windows' values, ``[n, S, ...]``, are out of bounds."""
        if self._bounds is not None:
            with self._named(windows):
                self._check_bounds(values)

    def _check_bounds(self, values: npt.NDArray[Any]) -> None:
        low, high = self._bounds or (0, 0)
        if low == 0 and values.dtype.kind == "i":
            # As unsigned numbers negative ones are the largest: one pass instead of two.
            highest = min(high, int(np.iinfo(values.dtype).max))
            if not values.size or values.view(_UNSIGNED[values.dtype]).max() <= highest:
                return
        elif not values.size or (values.min() >= low and values.max() <= high and not self._has_fraction(values)):
            return
        within = (values >= low) & (values <= high)
        if self._has_fraction(values):
            within &= values == np.floor(values)
        outside = ~within.reshape(values.shape[0] * values.shape[1], -1)
        row, place = np.argwhere(outside)[0].tolist()
        found = values.reshape(outside.shape)[row, place]
        raise RowError(row, f"expected {self.field.shown((low, high))}, found {found}")

    def _has_fraction(self, values: npt.NDArray[Any]) -> bool:
        """Whether a code, which is a whole number, came with a fraction (or as NaN)."""
        codes = self.field.dtype is not None and np.dtype(self.field.dtype).kind in "iu"
        return codes and values.dtype.kind == "f" and bool((values != np.floor(values)).any())


class CopyPlan(NamedTuple):
    """How columns are copied.

    Args:
        copier: What copies the plain ones.
        unchecked: The fields of these whose values it leaves to be checked.
        converted: Those which are delivered in another dtype.
    """

    copier: Copier
    unchecked: tuple[str, ...]
    converted: tuple[str, ...]

    def copies_all(self, fields: int) -> bool:
        """Whether nothing remains to be done to batches of so many fields, if their values are allowed."""
        return len(self.copier) == fields and not (self.unchecked or self.converted)


def plan_copying(
    readers: Mapping[str, FieldReader],
    shapes: Mapping[str, tuple[int, ...]],
    length: int,
    dtypes: Mapping[bool, Mapping[str, np.dtype[np.generic]]],
) -> dict[bool, CopyPlan]:
    """How windows of ``length`` steps of some fields are copied, for each of several dtypes."""
    from mouse_core._arrow.copier import Copier

    plain = {name: reader for name, reader in readers.items() if reader.column.is_plain}
    copier = Copier(
        {name: (reader.column, shapes[name]) for name, reader in plain.items()},
        length,
        highest={name: reader.highest for name, reader in plain.items() if reader.highest is not None},
    )
    unchecked = tuple(name for name, reader in plain.items() if reader.is_bounded and reader.highest is None)
    stored = {name: reader.column.kind.dtype for name, reader in plain.items()}
    return {
        key: CopyPlan(copier, unchecked, tuple(name for name in plain if stored[name] != wanted[name]))
        for key, wanted in dtypes.items()
    }


def bind_fields(
    segments: Sequence[Segment],
    fields: Mapping[str, Field],
    types: Mapping[str, ColumnType],
    *,
    rows: int,
    budget: DenseBudget | None = None,
) -> dict[str, FieldReader]:
    """Readers of the fields whose columns exist and are not null throughout, in the order of ``fields``.

    Raises:
        MissingFieldError: A required column is missing.
        SchemaError: A column's type does not suit its field, or its rows are wider than declared.
        DataError: A required column is null throughout, or the first image cannot be read.
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
    if kind.kind == "image":
        kind = replace(kind, value_type=field.pixel_dtype.name)
    vector = bool(shape) and field.vector_dtype is not None
    dtype = np.dtype(field.vector_dtype if vector else field.dtype if field.dtype is not None else kind.dtype)
    specials = [special for special in (field.fill, field.pad) if special is not None]
    parts = [segment.part(field.column) for segment in segments]
    column = Column(field.column, kind, shape, parts, fill=field.fill, pad=field.pad, budget=budget)
    image_shape = shape if field.image else None
    delivered = (int(np.prod(shape)),) if field.image else shape
    spec = FieldSpec(field.name, dtype, delivered, field.column, image_shape=image_shape)  # type: ignore[arg-type]
    holds_fills = all(_representable(special, kind.dtype) for special in specials)
    reader = FieldReader(field, spec, column, field.bounds_of(len(shape)), holds_fills=holds_fills)
    reader.spec = spec.replace(stored_dtype=reader.stored_dtype(dtype))
    return reader


def _shape(
    segments: Sequence[Segment], field: Field, kind: ColumnType, found: tuple[int, Any, tuple[str, ...]]
) -> tuple[int, ...]:
    """The shape of one row: declared, or that of the column's type, or that of its first value."""
    row, first, image_roots = found
    where = f"at row {row} (column {field.column!r})"
    if field.shape is not None:
        return field.shape
    if field.image:
        from mouse_core.images.pixels import image_shape

        try:
            return image_shape(first, dtype=field.pixel_dtype, image_roots=image_roots)
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
        raise SchemaError(f"{field.name}: expected a first row of regular lists, found {first!r:.80} {where}")
    return shape


def _first_value(segments: Sequence[Segment], name: str, rows: int) -> tuple[int, Any, tuple[str, ...]] | None:
    """The first value of a column that is not null, its row, and where images that it names may lie; None where all
    are. Looks no further than it must.
    """
    begin = 0
    for segment in segments:
        found = segment.first_value(name, rows - begin)
        if found is not None:
            return begin + found[0], found[1], segment.image_roots
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
