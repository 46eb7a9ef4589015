"""Names, order and Arrow types of the columns that readers make of observations, actions and other values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import is_list
from mouse_core._arrow.dense import plain
from mouse_core._base.checks import is_text
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import DataError, SchemaError
from mouse_core.files.reading import reading
from mouse_core.images.pixels import decode_image

MISSING = "observation_missing"
"""The column that marks rows whose observation the source did not hold."""


def travels_with_action(key: str) -> bool:
    """Whether a value that a source stores with a step belongs to the action of the step, judged by its name."""
    return key.split("/")[-1].startswith(("action", "policy", "log_prob"))


def flatten(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of nested mappings and tuples by path: ``{"observation_arm_angle": ...}``.

    Args:
        name: The beginning of all names.
        value: A mapping, a tuple (its items are named by their position), or a leaf.
    """
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        for path, leaf in flatten(f"{name}_{key}", item).items():
            if path in leaves:
                raise SchemaError(f"{path}: two values of a step have this name once their keys are joined by '_'")
            leaves[path] = leaf
    return leaves


def is_single(names: Collection[str], prefix: str) -> bool:
    """Whether one column is the whole observation or action, rather than a part of a nested one."""
    kinds = ("discrete", "image", "text")
    return len(names) == 1 and next(iter(names)) in (prefix, *(f"{prefix}_{kind}" for kind in kinds))


def is_image(values: npt.NDArray[Any]) -> bool:
    """Whether the rows of ``values`` look like pictures: uint8 ``[n, H, W]`` or ``[n, H, W, C]`` with C up to 4."""
    return values.dtype == np.uint8 and (values.ndim == 3 or (values.ndim == 4 and values.shape[3] <= 4))


def _suits(column: str, values: npt.NDArray[Any]) -> bool:
    """Whether the standard field of a column, if it has one, can read these rows."""
    is_whole, shape = values.dtype.kind in "iu", values.shape[1:]
    if column == MISSING or values.dtype.kind in "OSU" or column not in ("observation_image", "observation_discrete"):
        return column != MISSING  # encoded pictures may be any
    is_picture = len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)
    return is_whole and (is_picture if column == "observation_image" else shape in ((), (1,)))


def named_observation(value: Any) -> Columns:
    """Return observations ``[n, ...]`` as columns: a standard column, or ``observation_<key>`` for nested ones.

    A single array of whole numbers ``[n]`` becomes ``observation_discrete``, of pictures ``observation_image``, of
    texts ``observation_text``. All others become ``observation``: vectors, with longer shapes flattened in C order.

    A nested part with the name ``image`` or ``discrete`` that holds no pictures or whole numbers becomes
    ``observation_<key>_values``.
    """
    if isinstance(value, Mapping | tuple):
        leaves = {name: np.asarray(leaf) for name, leaf in flatten("observation", value).items()}
        return {name if _suits(name, leaf) else f"{name}_values": leaf for name, leaf in leaves.items()}
    values = np.asarray(value)
    if values.dtype.kind in "OSU":
        return {"observation_text": values}
    if values.ndim == 1 and values.dtype.kind in "iub":
        return {"observation_discrete": values}
    if is_image(values):
        return {"observation_image": values}
    return {"observation": as_vectors(values)}


def named_action(value: Any) -> Columns:
    """Return actions ``[n, ...]`` as columns: ``action``, or ``action_<key>`` for nested ones.

    A single array of whole numbers ``[n]`` stays as it is. Fractions become vectors, a single one a vector of one, and
    longer shapes are flattened in C order.
    """
    if isinstance(value, Mapping | tuple):
        return {name: np.asarray(leaf) for name, leaf in flatten("action", value).items()}
    values = np.asarray(value)
    return {"action": values if values.ndim == 1 and values.dtype.kind in "iubOSU" else as_vectors(values)}


def one_each(columns: Columns, name: str) -> npt.NDArray[Any]:
    """Return a column with one number a row, of shape ``[n]``, ``[n, 1]`` and so on, as ``[n]``.

    Raises:
        DataError: A row has no number, or several.
    """
    values = columns[name]
    if values.size != len(values):
        raise DataError(f"{name}: expected one number a row, found shape {list(values.shape[1:])}")
    return values.reshape(len(values))


def as_vectors(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values ``[n, ...]`` as ``[n, width]``, in C order."""
    return values if values.ndim == 2 else values.reshape(len(values), int(np.prod(values.shape[1:], dtype=np.int64)))


def to_arrow(values: npt.NDArray[Any], *, where: str) -> pa.Array:
    """Return rows ``[n, ...]`` of a column as an Arrow array, without a copy if the memory layout allows it.

    Args:
        values: Numbers, or strings or bytes ``[n]`` (arrays of objects or of NumPy's text types).
        where: Prefix of the message.

    Raises:
        DataError: No column can have values of this type.
    """
    if values.dtype.kind in "OSU":
        return _text(values, where=where)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"{where}: expected numbers or text, found {values.dtype}")
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        size = values.shape[axis]
        if size:
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        else:
            count = int(np.prod(values.shape[:axis], dtype=np.int64))
            flat = pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), flat[:0])
    return flat


def _text(values: npt.NDArray[Any], *, where: str) -> pa.Array:
    if values.ndim != 1:
        raise DataError(f"{where}: expected one text a step, found an array of shape {list(values.shape[1:])}")
    if values.dtype.kind == "S":
        values = values.astype(object)
    items = values.tolist()
    if not items:
        return pa.array([], pa.string())
    try:
        if any(isinstance(item, bytes) for item in items):
            try:
                return pa.array([item.decode() if isinstance(item, bytes) else item for item in items], pa.string())
            except UnicodeDecodeError:
                return pa.array(items, pa.binary())
        return pa.array(items)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: expected numbers or text, found {items[:1]!r:.80}") from error


def from_arrow(array: Any, *, where: str) -> npt.NDArray[Any]:
    """Return rows of a column as an array ``[n, ...]``: lists of one length as dimensions, encoded images as pixels.

    Args:
        array: An Arrow array or chunked array.
        where: Prefix of the message.

    Raises:
        DataError: Nulls, lists of differing lengths, or an image that cannot be decoded.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    array = plain(array)
    if array.null_count:
        raise DataError(f"{where}: expected values, found {array.null_count} nulls among {len(array)} rows")
    kind = array.type
    if is_list(kind):
        if pa.types.is_fixed_size_list(kind):
            size = kind.list_size
        else:
            lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) > 1:
                raise DataError(f"{where}: expected lists of one length, found lengths {lengths[:5].tolist()}")
            size = int(lengths[0]) if len(lengths) else 0
        inner = from_arrow(array.flatten(), where=where)
        return inner.reshape(len(array), size, *inner.shape[1:])
    if pa.types.is_struct(kind):
        try:
            return np.stack([decode_image(value) for value in array.to_pylist()])
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
    return np.asarray(array.to_numpy(zero_copy_only=False))


def ordered(columns: Columns) -> Columns:
    """Return columns in the order of all readers: action, reward, done, step, observations, metadata."""
    fixed = ("reward", "done", "episode_step")
    actions = [name for name in columns if name == "action" or name.startswith("action_")]
    others = [name for name in columns if name not in fixed and name not in actions]
    others.sort(key=lambda name: name.startswith("metadata_"))
    return {name: columns[name] for name in (*actions, *fixed, *others)}


def schema_of(columns: Mapping[str, npt.NDArray[Any]]) -> pa.Schema:
    """Return the schema of rows with these columns; a name that is no Unicode text raises DataError."""
    _check_texts(columns)
    return pa.schema([(name, to_arrow(values, where=name).type) for name, values in columns.items()])


def _check_texts(names: Iterable[str], where: str = "") -> None:
    for name in names:
        if not is_text(name):
            raise DataError(f"{where}{': ' * bool(where)}expected names of columns as Unicode text, found {name!r}")


def to_batch(columns: Mapping[str, npt.NDArray[Any]], schema: pa.Schema | None, *, where: str) -> pa.RecordBatch:
    """Return rows as a record batch; metadata that are missing become null.

    Args:
        columns: Values ``[n, ...]`` by name, all of one length.
        schema: Columns and types of the rows before; by default any.
        where: Prefix of messages, usually a file and an episode.

    Raises:
        DataError: Columns have different lengths, or other names or types than in the schema.
    """
    _check_texts(columns, where)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where}: expected columns of one length, found {lengths}")
    arrays = {name: to_arrow(np.asarray(values), where=f"{where}: column {name!r}") for name, values in columns.items()}
    if schema is None:
        return pa.RecordBatch.from_pydict(arrays)
    for field in schema:
        if field.name.startswith("metadata_") and field.name not in arrays:
            arrays[field.name] = pa.nulls(next(iter(lengths.values()), 0), field.type)
    if set(arrays) != set(schema.names):
        raise DataError(f"{where}: expected columns {schema.names}, found {list(arrays)}")
    for field in schema:
        found = arrays[field.name]
        if found.type == field.type:
            continue
        if pa.types.is_null(found.type) or (pa.types.is_string(found.type) and pa.types.is_binary(field.type)):
            arrays[field.name] = found.cast(field.type)
        else:
            raise DataError(f"{where}: column {field.name!r}: expected {field.type} a step, found {found.type}")
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def to_batches(rows: Iterable[Columns], schema: pa.Schema, *, where: str) -> Iterator[pa.RecordBatch]:
    """Yield rows as record batches, as ``to_batch`` makes them, and no empty batch."""
    with reading(where):
        for columns in rows:
            if len(columns["done"]):
                yield to_batch(columns, schema, where=where)
