"""Pictures of rows as pixels, whatever they are kept as, and pixels as columns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.dense import without_nulls
from mouse_core._base.threads import THREADS
from mouse_core.about.features import HUGGINGFACE, features_in
from mouse_core.dtypes import RowError
from mouse_core.errors import DataError
from mouse_core.files.reading import damaged
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.columns.named import to_arrow
from mouse_core.formats.columns.values import read_values
from mouse_core.formats.pictures.kept import PictureEncoding, Pictures, said_after
from mouse_core.images.pixels import check_image, encode_jpeg, encode_png
from mouse_core.images.rows import fill_images
from mouse_core.video.frames import VideoFiles


class HeldImages:
    """Image files, and numbers that stand for them while rows are laid out; 0 stands for none.

    Args:
        name: For messages.
        shape: ``(H, W, C)`` that each must have.
        dtype: Of pixels, uint8 or uint16.
        behind: How many of the rows that were taken last are still asked for when others are taken.
    """

    def __init__(self, name: str, shape: tuple[int, int, int], dtype: npt.DTypeLike, *, behind: int = 2) -> None:
        self._name, self._shape, self._dtype, self._behind = name, shape, np.dtype(dtype), behind
        self._held, self._first = pa.array([], IMAGE), 1

    def add(
        self, column: pa.Array, file: str | os.PathLike[str], called: Callable[[int], str]
    ) -> npt.NDArray[np.int64]:
        """Take the images of some rows, and give a number for each.

        Args:
            column: As a file has it: ``{bytes, path}``, or binary. Paths count for nothing: a dataset must not reach
                outside of its folder.
            file: For messages.
            called: What messages call a row.

        Raises:
            DataError: One is not there, or is none of that shape, as far as its header says; names file and row.
        """
        for row, why in self.unreadable(column):
            raise damaged(file, why, at=called(row))
        encoded = _files(column)
        made = pa.StructArray.from_arrays([encoded, pa.nulls(len(encoded), pa.string())], fields=list(IMAGE))
        kept = self._held.slice(max(0, len(self._held) - self._behind))
        self._first += len(self._held) - len(kept)
        self._held = pa.concat_arrays([kept, made])
        return self._first + len(kept) + np.arange(len(encoded))

    def unreadable(self, column: pa.Array) -> Iterator[tuple[int, str]]:
        """Rows whose image is not there, or none of the shape, as far as its header says, and why."""
        for row, one in enumerate(_files(column)):
            try:
                value = {"bytes": memoryview(one.as_buffer() if one.is_valid else b"")}
                check_image(value, self._shape, dtype=self._dtype)
            except ValueError as error:
                yield row, f"{self._name}: {error}"

    def column_of(self, numbers: npt.NDArray[np.int64]) -> pa.StructArray:
        """The images that some numbers stand for; nulls for 0."""
        return self._held.take(pa.array(numbers - self._first, mask=numbers == 0))


def _files(column: pa.Array) -> pa.Array:
    """The image files of a column that has them, or ``{bytes, path}``."""
    encoded = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
    return encoded.cast(pa.binary())


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FRAME = pa.struct([("video", pa.int32()), ("frame", pa.int32())])
_PIECE_BYTES = 32 << 20
_PNG = b"\x89PNG\r\n\x1a\n"


def changed_stream(stream: Any, changed: Mapping[str, tuple[Pictures, PictureEncoding]], *, fill: bool = False) -> Any:
    """The same rows with the pictures of some columns as pixels, PNG or JPEG.

    Args:
        stream: A ``RowStream``.
        changed: What becomes of which columns; those that are to be videos are left as they are.
        fill: Whether zeros stand for pixels that a row lacks; they are null otherwise.
    """
    changed = {name: one for name, one in changed.items() if one[1].way != "video"}
    if not changed:
        return stream
    schema = stream.schema
    for name, (picture, kept) in changed.items():
        data_type = IMAGE
        if kept.way == "raw":
            data_type = to_arrow(np.zeros((1, *picture.shape), picture.dtype), where=name).type
        schema = schema.set(schema.get_field_index(name), pa.field(name, data_type))
    schema = with_features(schema, changed)
    others = {one.name for one in schema if one.type == FRAME} - changed.keys()
    about = said_after(stream.about, changed, frames_stay=bool(others))
    return stream.replace(schema=schema, about=about, batches=partial(_batches, stream, changed, schema, fill))


def _batches(
    stream: Any, changed: Mapping[str, tuple[Pictures, PictureEncoding]], schema: pa.Schema, fill: bool
) -> Iterator[pa.RecordBatch]:
    reader, first = PixelReader(stream), 0
    with ThreadPoolExecutor(THREADS) as pool:
        for piece in pieces(stream, [picture for picture, _ in changed.values()]):
            columns = dict(zip(piece.schema.names, piece.columns, strict=True))
            for name, (picture, kept) in changed.items():
                columns[name] = _column(reader, picture, kept, columns[name], first, pool.map, fill=fill)
            yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
            first += piece.num_rows


def pieces(batches: Iterable[pa.RecordBatch], pictures: Sequence[Pictures]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches whose pictures take a bounded number of bytes as pixels."""
    size = sum(picture.bytes for picture in pictures)
    for batch in batches:
        step = rows_at_once(size, most=max(1, batch.num_rows), budget=_PIECE_BYTES)
        for begin in range(0, batch.num_rows, step):
            yield batch.slice(begin, step)


def _column(
    reader: PixelReader,
    picture: Pictures,
    kept: PictureEncoding,
    values: pa.Array,
    first: int,
    each: Callable[..., Iterator[Any]],
    *,
    fill: bool,
) -> pa.Array:
    """A column of pictures, kept in another way."""
    ready = _png_already(values) if kept.way == "png" and picture.kind == "encoded" else None
    if ready is not None:
        return ready
    pixels, there = reader.read(picture, values, first)
    if kept.way == "raw":
        flat = to_arrow(pixels, where=picture.name)
        mask = None if fill or there.all() else pa.array(~there)
        return pa.FixedSizeListArray.from_arrays(flat.values, flat.type.list_size, mask=mask)
    encode = (
        partial(encode_png, dtype=picture.dtype) if kept.way == "png" else partial(encode_jpeg, quality=kept.quality)
    )
    encoded = list(each(lambda row: encode(pixels[row]) if there[row] else None, range(len(pixels))))
    return _images(encoded)


def _images(encoded: Sequence[bytes | None]) -> pa.Array:
    parts = [pa.array(encoded, pa.binary()), pa.nulls(len(encoded), pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(IMAGE), mask=pc.is_null(parts[0]))


def _png_already(values: pa.Array) -> pa.Array | None:
    """The same column where all of its pictures are PNG files; else None."""
    storage = values.storage if isinstance(values, pa.ExtensionArray) else values
    encoded = pc.struct_field(storage, "bytes") if pa.types.is_struct(storage.type) else storage
    found = encoded.to_pylist()
    is_png = all(value is None or value.startswith(_PNG) for value in found)
    return _images(found) if is_png else None


class PixelReader:
    """Reads pictures as pixels.

    Args:
        stream: The ``RowStream`` that rows are of.
    """

    def __init__(self, stream: Any) -> None:
        self._where, self._roots = stream.path, stream.image_folders()
        self._videos = VideoFiles(stream.about.videos)

    def read(self, picture: Pictures, values: pa.Array, first: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Pixels ``[n, H, W, C]``, zeros where a row has no picture, and which rows have one, bool ``[n]``.

        Args:
            picture: What the column's pictures are.
            values: Rows of the column.
            first: The number of the first, for messages.

        Raises:
            DataError: A picture that cannot be read, or is not like the first one; names column and row.
        """
        there = np.asarray(values.is_valid())
        if picture.kind == "raw":
            return self._raw(picture, values, there, first), there
        if picture.kind == "encoded" and not pa.types.is_struct(values.type):
            values = values.cast(pa.binary()) if pa.types.is_large_binary(values.type) else values
        found = np.zeros((len(values), int(np.prod(picture.shape))), picture.dtype)
        read = self._videos.fill if picture.kind == "video" else fill_images
        try:
            read([(values, 0, self._roots)], picture.shape, found, fill=0, pixel=picture.dtype)
        except ValueError as error:
            row = f", row {first + error.row}" if isinstance(error, RowError) else f", rows from {first} on"
            raise DataError(f"{self._where}: column {picture.name!r}{row}: {error}") from error
        return found.reshape(len(values), *picture.shape), there

    def _raw(self, picture: Pictures, values: pa.Array, there: npt.NDArray[np.bool_], first: int) -> npt.NDArray[Any]:
        taken = read_values(values if there.all() else without_nulls(values))
        found = np.zeros((len(values), *picture.shape), picture.dtype)
        if not there.any():
            return found
        if taken.numbers is None or (*(taken.shape or ()), 1)[:3] != picture.shape:
            shown = "shapes that differ" if taken.shape is None else list(taken.shape)
            raise DataError(
                f"{self._where}: column {picture.name!r}, rows from {first} on: expected pixels of shape "
                f"{list(picture.shape)}, as in its first row, found {shown}"
            )
        found[there] = taken.numbers.reshape(-1, *picture.shape)
        return found


def with_features(schema: pa.Schema, changed: Mapping[str, tuple[Pictures, PictureEncoding]]) -> pa.Schema:
    """A schema that says of image files that they are, and nothing of what other columns have been."""
    metadata = dict(schema.metadata or {})
    features = {name: item for name, item in features_in(metadata).items() if name not in changed}
    features |= {name: {"_type": "Image"} for name, (_, kept) in changed.items() if kept.way in ("png", "jpeg")}
    metadata.pop(HUGGINGFACE, None)
    if features:
        metadata[HUGGINGFACE] = json.dumps({"info": {"features": features}}).encode()
    return schema.with_metadata(metadata)
