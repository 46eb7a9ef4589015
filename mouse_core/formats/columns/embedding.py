"""Put the images that rows name by path into the rows: a path means nothing in the place they are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import DataError, MouseError
from mouse_core.images.files import open_inside
from mouse_core.metadata import features_in

_FIRST_ROWS, _MOST_ROWS = 16, 8192
_PIECE_BYTES = 16 << 20


def embedded(stream: Any, *, others: bool = True) -> Any:
    """Return the same rows with the bytes of images that they name by path.

    Args:
        stream: The rows.
        others: Whether a path to a file that is no image, such as a sound, is an error; otherwise it stays a path.

    Returns:
        The stream; ``stream`` itself if no column can name files.

    Raises:
        DataError: While reading: a path leads out of the permitted folders, to no file, or to no image; names column
            and row.
    """
    types = features_in(stream.schema.metadata or {})
    images = {
        column.name: types.get(column.name, {}).get("_type", "Image") == "Image"
        for column in stream.schema
        if names_files(column.type)
    }
    if not others:
        images = {name: True for name, image in images.items() if image}
    if not images:
        return stream
    roots = stream.image_folders()

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in stream:
            yield from _pieces(batch, images, first, roots)
            first += batch.num_rows

    return stream.replace(batches=batches, mapped=stream.mapped, noted=stream.noted)


def names_files(data_type: pa.DataType) -> bool:
    """Whether values are ``{bytes, path}``: a file, or the path of one."""
    return pa.types.is_struct(data_type) and {child.name for child in data_type} == {"bytes", "path"}


def by_path(files: pa.Array) -> pa.Array:
    """Return booleans: whether a row of a ``{bytes, path}`` column has a path and no bytes."""
    return pc.and_(pc.is_null(pc.struct_field(files, "bytes")), pc.is_valid(pc.struct_field(files, "path")))


def embed(files: pa.Array, read: Callable[..., bytes], *, where: str, first_row: int) -> pa.Array:
    """Return a ``{bytes, path}`` column with the bytes of the files that rows name, and file names instead of paths.

    Args:
        files: The column.
        read: Returns the bytes of a path; called with the path, and with ``where`` for messages.
        where: Name of the column for messages.
        first_row: Number of the first row.
    """
    rows = by_path(files)
    if not pc.any(rows).as_py():
        return files
    encoded, path = pc.struct_field(files, "bytes"), pc.struct_field(files, "path")
    values, names = encoded.to_pylist(), path.to_pylist()
    for row in pc.indices_nonzero(rows).to_pylist():
        values[row] = read(names[row], where=f"{where}, row {first_row + row}")
        names[row] = names[row].replace("\\", "/").rpartition("/")[2]
    parts = {"bytes": pa.array(values, type=encoded.type), "path": pa.array(names, type=path.type)}
    kinds = list(files.type)
    return pa.StructArray.from_arrays([parts[kind.name] for kind in kinds], fields=kinds, mask=pc.is_null(files))


def _pieces(
    batch: pa.RecordBatch, images: dict[str, bool], first_row: int, roots: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield a batch with its images in pieces of bounded size, as images may be far larger than their paths."""
    if not any(pc.any(by_path(batch.column(name))).as_py() for name in images):
        yield batch
        return
    first, step = 0, _FIRST_ROWS
    while first < batch.num_rows:
        piece = batch.slice(first, step)
        for name, image in images.items():
            read = partial(read_image, image=image, roots=roots)
            column = embed(piece.column(name), read, where=f"column {name!r}", first_row=first_row + first)
            piece = piece.set_column(piece.schema.get_field_index(name), piece.schema.field(name), column)
        yield piece
        first += piece.num_rows
        step = int(np.clip(_PIECE_BYTES * piece.num_rows // max(1, piece.nbytes), 1, _MOST_ROWS))


def read_image(path: str, *, image: bool, roots: Sequence[str], where: str, whole: bool = False) -> bytes:
    """Return the bytes of the image file that a row names.

    Args:
        path: The path in the row.
        image: Whether the column holds images; any other file raises a DataError.
        roots: Permitted folders (absolute, without links).
        where: Name of the row for messages.
        whole: Whether to decode the whole image, not its header alone.
    """
    from mouse_core.images.pixels import decode_image, image_shape

    if not image:
        raise DataError(f"{where}: expected bytes, found only a path, {path!r}; only images are embedded")
    try:
        with open_inside(path, roots) as file:
            encoded = file.read()
        try:
            (decode_image if whole else image_shape)(encoded, dtype=np.uint16)
        except MouseError as error:
            raise DataError(f"path {path!r}: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error
    return encoded
