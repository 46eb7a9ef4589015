"""The layout of rows in files, and how the layout slows down reading."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from mouse_core._base.room import room_for_files
from mouse_core.errors import MouseError
from mouse_core.files.ipc import MAGIC, messages, read_footer, read_message
from mouse_core.formats.base import RowStream
from mouse_core.store.disk.folder import NAME, parse_manifest

# In larger record batches, the columns of a window lie too far apart, and Arrow's reader uses too much memory for each
# batch.
_ROWS_FOR_WINDOWS, _KEPT_BYTES = 256, 3_500
# Files up to this size fit into memory on any machine.
_MINDED_BYTES = 100 << 20
# Rows above this size are read in large pieces in any layout.
_LARGE_ROW = 4 << 10


@dataclass(frozen=True)
class FileLayout:
    """The layout of rows in the files of a dataset. Only a few bytes of each file are read for it.

    Args:
        kind: "datasets" or "store".
        bytes: Size of all files in bytes.
        rows: Number of rows in all files; 0 if unknown.
        batch_rows: Largest number of rows of a record batch.
        batches: Approximate number of record batches.
        compressed: Whether values are compressed.
    """

    kind: str
    bytes: int
    rows: int
    batch_rows: int
    batches: int
    compressed: bool = False


def layout_of(stream: RowStream) -> FileLayout | None:
    """Return the layout of a stream's files; None for a format that must be converted before windows are drawn."""
    path = Path(stream.path)
    try:
        if stream.format == "store" and (path / NAME).is_file():
            return _of_store(path, stream.rows or 0)
        splits = stream.format_metadata.get("splits")  # for other formats, only the names of files are checked
        files = [Path(name) for names in splits.values() for name in names] if isinstance(splits, Mapping) else []
        if stream.format == "datasets" and files and all(file.suffix == ".arrow" for file in files):
            return _of_files(files, stream.rows or 0)
    except (MouseError, OSError):
        pass  # reading the rows raises the error later
    return None


def _of_store(folder: Path, rows: int) -> FileLayout:
    segments = parse_manifest(folder / NAME, (folder / NAME).read_bytes()).segments
    most = max((one.step for one in segments), default=0)
    batches = sum(-(-one.rows // one.step) for one in segments)
    return FileLayout("store", sum(one.bytes for one in segments), rows, most, batches)


def _of_files(files: Sequence[Path], rows: int) -> FileLayout:
    size = most = 0
    batches, compressed = 0.0, False
    for file in files:
        nbytes = os.path.getsize(file)
        with pa.memory_map(str(file)) as source:
            buffer = source.read_buffer(nbytes)
        found = _first_batch(buffer)
        size += nbytes
        if found is not None:
            batch_bytes, batch_rows, is_compressed = found
            batches += nbytes / batch_bytes
            most, compressed = max(most, batch_rows), compressed or is_compressed
    return FileLayout("datasets", size, rows, most, round(batches), compressed)


def _first_batch(buffer: pa.Buffer) -> tuple[int, int, bool] | None:
    """Return the size in bytes and the rows of a file's first record batch, and whether the batch is compressed."""

    def read(begin: int, end: int) -> pa.Buffer:
        return buffer.slice(begin, end - begin)

    if read(0, min(len(MAGIC), buffer.size)).to_pybytes() == MAGIC:
        footer = read_footer(read, buffer.size)
        first = read_message(read, int(footer.begins[0]), buffer.size) if len(footer) else None
    else:
        first = next((one for one in messages(read, buffer.size) if one.head is not None), None)
    if first is None or first.head is None:
        return None
    return first.end - first.begin, first.head.rows, first.head.compressed


def costs(layout: FileLayout | None, source: str, room: int | None = None) -> Iterator[tuple[str, str]]:
    """Return the costs of a layout. Each cost has a short name, and a sentence with the command that removes the cost.

    Args:
        layout: The layout.
        source: The path, as an argument of the command.
        room: How many bytes of files fit into memory; by default the available memory.
    """
    if layout is None:
        return
    room = room_for_files() if room is None else room
    beyond = room is not None and layout.bytes > room
    windows = f"mouse convert {source} NEW --layout windows"
    if layout.compressed:
        yield (
            "compressed-batches",
            "Record batches are compressed, so that each is unpacked into memory, as a whole: "
            f"mouse convert {source} NEW writes them as they are read.",
        )
    elif beyond and layout.batch_rows > _ROWS_FOR_WINDOWS and layout.bytes < _LARGE_ROW * layout.rows:
        yield (
            "columns-apart",
            f"{layout.bytes / 1e9:,.1f} GB of files do not fit in the {(room or 0) / 1e9:,.1f} GB of memory for them. "
            f"Record batches of up to {layout.batch_rows:,} rows have their columns far apart: each column of a "
            f"window is read for itself: {windows} puts them together.",
        )
    if layout.kind == "datasets" and layout.batches * _KEPT_BYTES > _MINDED_BYTES:
        mended = f"{windows} writes files that open without it"
        mended = mended if beyond else f"mouse convert {source} NEW writes larger ones"
        yield (
            "many-batches",
            f"About {layout.batches:,} record batches take {layout.batches * _KEPT_BYTES / 1e6:,.0f} MB of memory when "
            f"they are opened: {mended}.",
        )
