"""Types of columns, independent of Arrow's encoding, and which fields can be read from a column of a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.checks import is_text, is_whole
from mouse_core.dtypes import named_dtype
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.spec import Field

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def is_list(data_type: pa.DataType) -> bool:
    """Whether ``data_type`` is a list, large list or fixed-size list."""
    return any(test(data_type) for test in _LISTS)


@dataclass(frozen=True)
class ColumnType:
    """The type of a column, independent of Arrow's encoding; columns of equal types can be combined.

    Args:
        kind: "scalar", "list", "image" (an encoded image: a ``{bytes, path}`` struct or binary), "video" (a video
            frame: a ``{video, frame}`` struct of integers), "null" or "other".
        value_type: The Arrow type of the innermost values, as text. For images and frames, the type of the pixels, or
            the kind if pixels are uint8.
        depth: Number of nested list levels.
    """

    kind: str
    value_type: str = ""
    depth: int = 0

    @property
    def is_encoded(self) -> bool:
        """Whether values are encoded images or frames."""
        return self.kind in ("image", "video")

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The NumPy dtype of the innermost values."""
        return np.dtype(NUMPY_NAMES.get(self.value_type, "uint8") if self.is_encoded else NUMPY_NAMES[self.value_type])

    def __str__(self) -> str:
        return f"{'list of ' * self.depth}{self.value_type or self.kind}"


# Arrow's number types.
NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "bool"} | {
    name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


@lru_cache(maxsize=1024)
def column_type(data_type: pa.DataType) -> ColumnType:
    """Return the ColumnType of an Arrow type; extension and dictionary types count as their storage types."""
    depth = 0
    while True:
        if isinstance(data_type, pa.BaseExtensionType):
            data_type = data_type.storage_type
        elif pa.types.is_dictionary(data_type):
            data_type = data_type.value_type
        elif is_list(data_type):
            data_type, depth = data_type.value_type, depth + 1
        else:
            break
    if pa.types.is_null(data_type):
        return ColumnType("null")
    if str(data_type) in NUMPY_NAMES:
        return ColumnType("list" if depth else "scalar", str(data_type), depth)
    encoded = pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)
    if pa.types.is_struct(data_type):
        whole = {field.name: pa.types.is_integer(field.type) for field in data_type}
        if whole == {"video": True, "frame": True} and not depth:
            return ColumnType("video", "video")
        encoded = {field.name for field in data_type} == {"bytes", "path"}
    return ColumnType("image", "image") if encoded and not depth else ColumnType("other", str(data_type), depth)


def fixed_shape(data_type: pa.DataType) -> tuple[int, ...] | None:
    """Return the shape of a row if the type determines it: ``()`` for scalars, the sizes for nested fixed-size lists;
    else None.
    """
    shape: list[int] = []
    declared = getattr(data_type, "shape", None)  # Array2D and similar types of datasets
    if isinstance(data_type, pa.BaseExtensionType) and declared is not None and None not in declared:
        return tuple(int(size) for size in declared)
    while isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    while pa.types.is_fixed_size_list(data_type):
        shape.append(data_type.list_size)
        data_type = data_type.value_type
    return None if is_list(data_type) else tuple(shape)


def declared_columns(given: Any) -> dict[str, pa.Field]:
    """Return the declared columns of a store by name; see ``columns`` of ``DatasetStore``.

    Raises:
        ConfigError: A type or shape is invalid for a column.
    """
    given = getattr(given, "arrow_schema", given)  # of datasets.Features
    if isinstance(given, pa.Schema):
        given = {one.name: one for one in given}
    if not isinstance(given, Mapping) or not all(map(is_text, given)):
        raise ConfigError(f"columns: expected an Arrow schema, or a dict of types, found {given!r:.200}")
    return {name: _declared(name, one) for name, one in given.items()}


def _declared(name: str, given: Any) -> pa.Field:
    declared = pa.field(name, given) if isinstance(given, pa.DataType) else given
    try:
        if not isinstance(declared, pa.Field):
            dtype, shape = given if isinstance(given, tuple) else (given, ())
            if dtype is None or not all(is_whole(size) and (size > 0 or size == -1) for size in shape):
                raise ValueError("not a dtype, or a size that is neither positive nor -1")
            data_type = pa.from_numpy_dtype(named_dtype(dtype))
            for size in reversed(shape):
                data_type = pa.list_(data_type, size)
            declared = pa.field(name, data_type)
        if column_type(declared.type).kind == "null":
            raise ValueError("the type null, which has no values")
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"columns: expected an Arrow type, a dtype, or (dtype, shape) for column {name!r}, found {given!r:.80} "
            f"({error})"
        ) from error
    return declared.with_name(name)


def check_readable(kind: ColumnType, field: Field) -> None:
    """Raise SchemaError if a field cannot be read from a column of this type."""
    where, most = f"column {field.column!r}", field.max_ndim
    if most is not None and kind.depth > most and not (field.shape == () and kind.depth == 1):
        wanted = "numbers or lists of one" if field.shape == () else "numbers" if not most else "numbers or lists of "
        if most:
            wanted += f"{most} dimension{'s' * (most > 1)}"
        raise SchemaError(f"{where}: expected {wanted}, found {kind}")
    readable = ("list", "null", "image", "video") if field.image else ("scalar", "list", "null")
    if kind.kind not in readable or (field.image and kind.kind == "list" and kind.depth not in (2, 3)):
        wanted = "images or lists [H, W] or [H, W, C] of integers" if field.image else "numbers or lists of numbers"
        raise SchemaError(f"{where}: expected {wanted}, found {kind}")
    if field.crop is not None:
        if kind.kind not in ("video", "null"):
            raise SchemaError(f"{where}: expected frames of videos to crop, found {kind}")
        if len(field.crop) != 4 or not all(type(number) is int for number in field.crop):
            raise SchemaError(f"{where}: expected crop as (top, left, height, width), found {field.crop!r:.80}")
