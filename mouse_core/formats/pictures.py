"""Finds columns of images, reads images as pixels, and changes their encoding (pixels, PNG, JPEG)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import column_type, fixed_shape
from mouse_core._arrow.dense import plain, without_nulls
from mouse_core._base.threads import THREADS
from mouse_core.dtypes import RowError
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.formats.columns import read_values, rows_at_once, to_arrow
from mouse_core.images.pixels import check_image, encode_jpeg, encode_png, fill_images, image_shape
from mouse_core.metadata import HUGGINGFACE, DatasetMetadata, features_in
from mouse_core.spec import STANDARD_FIELDS, Field
from mouse_core.video.frames import VideoFiles
from mouse_core.video.writing import VideoCodec

_WAYS = ("raw", "png", "jpeg:QUALITY", "video", "video:CODEC:gop=N")
_COLUMN = re.compile(r"([^:=]+)=(.*)")


@dataclass(frozen=True)
class PictureEncoding:
    """An encoding of stored images.

    Args:
        way: "raw", "png", "jpeg" or "video".
        quality: Quality of JPEG, 1 to 100.
        codec: Codec of videos.
    """

    way: str
    quality: int = 95
    codec: VideoCodec | None = None

    @classmethod
    def parse(cls, text: Any) -> PictureEncoding:
        """Parse a text: "raw", "png", "jpeg:95", "video", or "video:" followed by a text for ``VideoCodec.parse``.

        Raises:
            ConfigError: The text is not an encoding.
        """
        way, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if way == "video":
            return cls(way, codec=VideoCodec.parse(rest) if rest else VideoCodec())
        if way == "jpeg" and re.fullmatch(r"\d{1,3}", rest or "95") and 1 <= int(rest or 95) <= 100:
            return cls(way, quality=int(rest or 95))
        if way in ("raw", "png") and text == way:
            return cls(way)
        raise ConfigError(f"images: expected one of {list(_WAYS)}, found {text!r}")

    def encoder(self, dtype: npt.DTypeLike) -> Callable[[Any], bytes]:
        """Return the function that encodes pixels of type ``dtype`` as a PNG or JPEG file."""
        return partial(encode_png, dtype=dtype) if self.way == "png" else partial(encode_jpeg, quality=self.quality)

    def shown(self) -> str:
        """Return a description of the encoding that states whether it loses information."""
        if self.way == "video":
            lost = "" if self.codec and self.codec.lossless else ", which change pixels"
            return f"frames of videos, {self.codec}{lost}"
        return f"jpeg of quality {self.quality}, which changes pixels" if self.way == "jpeg" else self.way


@dataclass(frozen=True)
class Pictures:
    """A column of images.

    Args:
        name: Name of the column.
        kind: Storage form of the images: "raw", "encoded" or "video".
        shape: Shape ``(H, W, C)`` of the first image.
        dtype: Type of the pixels, uint8 or uint16.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Size of one image as pixels."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


Changed = Mapping[str, tuple[Pictures, PictureEncoding]]
"""The type of a dict. Its keys are the columns whose encoding changes; each value is the description of the column's
images and the new encoding.
"""


def by_column(given: str | Sequence[str] | Mapping[str, str]) -> dict[str, PictureEncoding]:
    """Return the encoding by column. The key "" holds the encoding of all columns that are not named.

    Args:
        given: A text for all columns, a mapping from columns to texts, or a list of texts. A text in the list can begin
            with ``COLUMN=``, to name its column.

    Raises:
        ConfigError: A text is invalid, or a column has two texts.
    """
    texts: list[tuple[str, Any]] = list(given.items()) if isinstance(given, Mapping) else []
    for text in () if isinstance(given, Mapping) else (given,) if isinstance(given, str) else given:
        match = _COLUMN.fullmatch(text) if isinstance(text, str) else None
        texts.append((match[1], match[2]) if match else ("", text))
    found = {name: PictureEncoding.parse(text) for name, text in texts}
    if len(found) < len(texts):
        raise ConfigError(
            f"images: expected one encoding for each column, found {[name or 'all' for name, _ in texts]}"
        )
    return found


def pictures_of(stream: Any, wanted: Mapping[str, PictureEncoding]) -> dict[str, tuple[Pictures, PictureEncoding]]:
    """Return the columns whose encoding changes, with their images and the new encoding.

    Args:
        stream: A ``RowStream``; rows are read until each column has an image.
        wanted: Encodings by column, from ``by_column``.

    Raises:
        ConfigError: A column does not exist or holds no images, or there is no column of images.
        DataError: The first image of a column cannot be read.
    """
    kinds = {one.name: _kind(one, stream) for one in stream.schema}
    for name in wanted:
        if name and not kinds.get(name):
            there = [column for column, kind in kinds.items() if kind]
            raise ConfigError(f"images: expected one of the image columns {there}, found {name!r}")
    chosen = {name: wanted.get(name, wanted.get("")) for name, kind in kinds.items() if kind}
    if not chosen:
        raise ConfigError(f"images: expected columns of images in {stream.path}, found {list(kinds)}")
    asked = {
        name: kinds[name]
        for name, kept in chosen.items()
        if kept is not None and (kinds[name], kept.way) != ("raw", "raw")
    }
    found: dict[str, tuple[Pictures, PictureEncoding]] = {}
    for name, picture in _first_pictures(stream, asked).items():
        kept = chosen[name]
        assert kept is not None
        if kept.codec is not None:
            kept.codec.pixel_format(picture.shape, picture.dtype)
        elif kept.way == "jpeg" and (picture.dtype != np.uint8 or picture.shape[2] not in (1, 3)):
            shown = f"{picture.dtype} {list(picture.shape)}"
            raise ConfigError(f"images: {name}: expected pixels of uint8 in 1 or 3 channels for jpeg, found {shown}")
        elif kept.way == "png" and picture.dtype != np.uint8 and picture.shape[2] != 1:
            raise ConfigError(
                f"images: {name}: expected one channel of {picture.dtype} for png, found {picture.shape[2]}"
            )
        found[name] = picture, kept
    return found


def _kind(column: pa.Field, stream: Any) -> str:
    """Return how a column stores images: "raw", "encoded" or "video"; an empty text for a column without images."""
    kind, name = column_type(column.type), column.name
    if kind.kind == "video":
        return "video"
    read = field_of(name, stream.metadata)
    if kind.kind == "image":
        said = features_in(stream.schema.metadata or {}).get(name, {}).get("_type", "Image")
        is_struct = pa.types.is_struct(getattr(column.type, "storage_type", column.type))
        return "encoded" if (is_struct and said == "Image") or (read is not None and read.image) else ""
    if kind.kind != "list" or kind.depth not in (2, 3) or kind.value_type not in ("uint8", "uint16"):
        return ""
    shape = fixed_shape(column.type) or ()
    likely = name.startswith("observation") and (len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4))
    return "raw" if (read is not None and read.image) or likely else ""


def field_of(name: str, metadata: DatasetMetadata) -> Field | None:
    """Return the field that reads a column: the field in the metadata of the rows, or a standard field."""
    return next((one for one in (*metadata.fields, *STANDARD_FIELDS) if one.column == name), None)


def _first_pictures(stream: Any, kinds: Mapping[str, str]) -> dict[str, Pictures]:
    """Return the first image of each column; columns without images are left out."""
    found: dict[str, Pictures] = {}
    videos, roots = VideoFiles(stream.metadata.videos), stream.image_folders()
    for batch in stream if kinds else ():
        for name in kinds.keys() - found.keys():
            values = without_nulls(plain(batch.column(name)))
            if not len(values):
                continue
            try:
                found[name] = _picture(name, kinds[name], values, videos, roots, field_of(name, stream.metadata))
            except ValueError as error:
                raise DataError(f"{stream.path}: column {name!r}: {error} in its first row") from error
        if len(found) == len(kinds):
            break
    return {name: found[name] for name in kinds if name in found}


def _picture(
    name: str, kind: str, values: pa.Array, videos: VideoFiles, roots: Sequence[str], read: Field | None
) -> Pictures:
    wide = read is not None and read.pixel_dtype != np.uint8
    if kind == "video":
        value = values[0].as_py()
        pixel_format = videos.index(-1 if value["video"] is None else value["video"], roots).pixel_format
        deep = re.match(r"gray(\d+)", pixel_format)
        shape = videos.shape_of(value, roots)
        if read is not None and read.shape is not None and read.shape[2:] == (1,):
            shape = (*shape[:2], 1)  # greys; some decoders do not report this
        wide = deep is not None and int(deep[1]) > 8
    elif kind == "encoded":
        shape = image_shape(values[0].as_py(), dtype=np.uint16 if wide else np.uint8, image_roots=roots)
    else:
        first = np.array(values[0].as_py())
        if first.ndim not in (2, 3) or not first.size:
            raise DataError(f"expected pixels [H, W] or [H, W, C], found shape {list(first.shape)}")
        height, width, channels = (*first.shape, 1)[:3]
        shape, wide = (height, width, channels), column_type(values.type).value_type == "uint16"
    return Pictures(name, kind, shape, np.dtype(np.uint16 if wide else np.uint8))


def _metadata_after(metadata: DatasetMetadata, changed: Changed, *, frames_stay: bool) -> DatasetMetadata:
    """Return the metadata of rows whose images have a new encoding, with a field for each column of images.

    Args:
        metadata: The metadata before the change.
        changed: New encodings by column.
        frames_stay: Whether other columns still refer to frames of the videos in the metadata.

    Raises:
        SchemaError: A field crops or resizes video frames.
    """
    fields = {one.name: one for one in metadata.fields}
    for name, (picture, kept) in changed.items():
        read = field_of(name, metadata)
        if read is None:
            if kept.way != "raw":
                fields[name] = Field(name, image=True, dtype="uint16" if picture.dtype != np.uint8 else None)
            continue
        resized = read.shape is not None and read.shape[:2] != picture.shape[:2]
        if picture.kind == "video" and (read.crop is not None or resized):
            raise SchemaError(
                f"images: {name}: when images are stored as {kept.way}, expected a field that does not crop or resize, "
                f"found crop={read.crop}, shape={read.shape}"
            )
        if kept.way != "raw" and not read.image:
            fields[read.name] = replace(read, image=True, shape=picture.shape, max_ndim=None)
    return metadata.replace(fields=tuple(fields.values()), videos=metadata.videos if frames_stay else ())


def encoded_images(column: pa.Array) -> npt.NDArray[Any]:
    """Return the image files of a column, ``{bytes, path}`` or binary, as an array of bytes.

    Paths in the column are ignored, because a dataset must not name files outside of its folder.
    """
    return np.asarray(_files(column).to_numpy(zero_copy_only=False))


def unreadable_images(
    column: pa.Array, name: str, shape: tuple[int, int, int], dtype: npt.DTypeLike
) -> Iterator[tuple[int, str]]:
    """Yield the index of each row whose image is missing or has a header with a wrong shape, and the reason.

    Args:
        column: The images, ``{bytes, path}`` or binary.
        name: Name for error messages.
        shape: Shape ``(H, W, C)`` that each image must have.
        dtype: Type of the pixels, uint8 or uint16.
    """
    for row, one in enumerate(_files(column)):
        try:
            check_image({"bytes": memoryview(one.as_buffer() if one.is_valid else b"")}, shape, dtype=dtype)
        except ValueError as error:
            yield row, f"{name}: {error}"


def _files(column: pa.Array) -> pa.Array:
    """Return the image files of a column of files or of ``{bytes, path}``."""
    encoded = pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
    return encoded.cast(pa.binary())


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FRAME = pa.struct([("video", pa.int32()), ("frame", pa.int32())])
_PIECE_BYTES = 32 << 20
_PNG = b"\x89PNG\r\n\x1a\n"


def changed_stream(stream: Any, changed: Changed, *, fill: bool = False) -> Any:
    """Return the same rows, with the images of some columns converted to pixels, PNG or JPEG.

    Args:
        stream: A ``RowStream``.
        changed: New encodings by column: "raw", "png" or "jpeg".
        fill: Whether missing images become images of zeros; otherwise missing images become null.
    """
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
    metadata = _metadata_after(stream.metadata, changed, frames_stay=bool(others))
    return stream.replace(schema=schema, metadata=metadata, batches=partial(_batches, stream, changed, schema, fill))


def _batches(stream: Any, changed: Changed, schema: pa.Schema, fill: bool) -> Iterator[pa.RecordBatch]:
    reader, first = PixelReader(stream), 0
    with ThreadPoolExecutor(THREADS) as pool:
        for piece in pieces(stream, [picture for picture, _ in changed.values()]):
            columns = dict(zip(piece.schema.names, piece.columns, strict=True))
            for name, (picture, kept) in changed.items():
                columns[name] = _column(reader, picture, kept, columns[name], first, pool.map, fill=fill)
            yield pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
            first += piece.num_rows


def pieces(batches: Iterable[pa.RecordBatch], pictures: Sequence[Pictures]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches, so that the decoded images of a batch have a bounded size in bytes."""
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
    """Convert a column of images to another encoding."""
    ready = _png_already(values) if kept.way == "png" and picture.kind == "encoded" else None
    if ready is not None:
        return ready
    pixels, there = reader.read(picture, values, first)
    if kept.way == "raw":
        flat = to_arrow(pixels, where=picture.name)
        mask = None if fill or there.all() else pa.array(~there)
        return pa.FixedSizeListArray.from_arrays(flat.values, flat.type.list_size, mask=mask)
    encode = kept.encoder(picture.dtype)
    return image_column(list(each(lambda row: encode(pixels[row]) if there[row] else None, range(len(pixels)))))


def image_column(encoded: pa.Array | Sequence[bytes | None]) -> pa.Array:
    """Return a column of image files; rows without an image are null."""
    files = encoded if isinstance(encoded, pa.Array) else pa.array(encoded, pa.binary())
    parts = [files, pa.nulls(len(encoded), pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(IMAGE), mask=pc.is_null(files))


def _png_already(values: pa.Array) -> pa.Array | None:
    """Return the column if all of its images are PNG files; else None."""
    files = _files(plain(values))
    is_png = pc.all(pc.starts_with(files, pattern=_PNG), min_count=0).as_py()
    return image_column(files) if is_png else None


class PixelReader:
    """Reads images as pixels.

    Args:
        stream: The ``RowStream`` of the rows.
    """

    def __init__(self, stream: Any) -> None:
        self._where, self._roots = stream.path, stream.image_folders()
        self._videos = VideoFiles(stream.metadata.videos)

    def read(self, picture: Pictures, values: pa.Array, first: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return pixels ``[n, H, W, C]``, and a mask of the rows with an image, bool ``[n]``; other rows have zeros.

        Args:
            picture: Description of the column.
            values: Rows of the column.
            first: Index of the first row, for error messages.

        Raises:
            DataError: An image cannot be read, or differs from the first image in shape or type. The message names
                column and row.
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


def with_features(schema: pa.Schema, changed: Changed) -> pa.Schema:
    """Return a schema with metadata that name the columns of image files.

    Metadata about changed columns are removed.
    """
    metadata = dict(schema.metadata or {})
    features = {name: item for name, item in features_in(metadata).items() if name not in changed}
    features |= {name: {"_type": "Image"} for name, (_, kept) in changed.items() if kept.way != "raw"}
    metadata.pop(HUGGINGFACE, None)
    if features:
        metadata[HUGGINGFACE] = json.dumps({"info": {"features": features}}).encode()
    return schema.with_metadata(metadata)
