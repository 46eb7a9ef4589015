"""Opening untrusted Arrow files on disk, with a check for bytes after their end mark.

A length of zero marks the end of a stream of record batches. If a few bytes in the middle of a file become zero, the
stream therefore ends there without an error, and Arrow's reader misses the later rows. Bytes after the end mark reveal
such damage.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.manifest import check_schemas
from mouse_core.files.reading import reading

_FILE_MAGIC = b"ARROW1"
# Sizes in bytes of the file format's head, and of the trailer: the footer's length and the magic.
_FILE_HEAD, _FILE_TAIL = 8, 10
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# Number of bytes after which pages of a mapped file are released; reading the head of a batch loads about 128 KB.
_RELEASED = 64 << 20
TOUCHED = 128 << 10
# Buffers are padded to a multiple of this number; the head of a record batch is larger.
_PADDING = 64
# Operations of ``datasets`` on a mapped table that keep the positions of all rows and columns.
_HARMLESS = ("replace_schema_metadata", "rename_columns")


@contextmanager
def mapped(file: Path, *, whole: bool = False) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """Yield a memory-mapped file, and a function ``release`` to call with the number of bytes that were read.

    Pages that were read count as memory of the process until ``release`` frees the pages; only some calls of
    ``release`` free pages.

    Args:
        file: The file.
        whole: Whether all bytes will be read, in which case the system reads ahead; if False, only heads of record
            batches will be read.
    """
    with file.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    takes_advice = hasattr(memory, "madvise")
    if takes_advice and not whole:
        memory.madvise(mmap.MADV_RANDOM)
    seen = 0

    def release(count: int) -> None:
        nonlocal seen
        seen += count
        if seen >= _RELEASED and takes_advice:
            memory.madvise(mmap.MADV_DONTNEED)
            seen = 0

    # The mapping ends when the last batch that refers to it is deleted.
    try:
        yield pa.BufferReader(pa.py_buffer(memory)), release
    finally:
        if takes_advice and not whole:
            memory.madvise(mmap.MADV_NORMAL)


def is_stream(file: Path) -> bool:
    """Whether an Arrow file has the stream format, which ``datasets`` writes, instead of the file format."""
    with reading(file), file.open("rb") as source:
        return source.read(len(_FILE_MAGIC)) != _FILE_MAGIC


def schema_of(file: Path) -> pa.Schema:
    """Return the schema of a file in the stream or the file format."""
    with reading(file), mapped(file) as (source, _):
        return _reader(source)[0].schema


def table_of(file: Path) -> pa.Table:
    """Return the rows of a stream as a table over mapped memory; only heads of record batches are read."""
    with reading(file), mapped(file) as (source, _):
        return pa.ipc.open_stream(source).read_all()


def batches(
    file: Path, *, whole: bool = True
) -> Iterator[tuple[Callable[[], pa.RecordBatch | None], Callable[[int], None]]]:
    """Yield pairs: a function that reads one record batch (the last function returns None), and ``release`` of
    ``mapped``.

    Args:
        file: The file.
        whole: Whether the values are read, not only the heads.

    Raises:
        DataError: The file is truncated, or has bytes after the end of the stream.
    """
    with reading(file), mapped(file, whole=whole) as (source, release):
        reader, end = _reader(source)
        for number, read in enumerate(_each(reader, source, end)):
            yield partial(_named, read, file, number), release


def count_rows(file: Path) -> int:
    """Return the number of rows of an Arrow file, from the heads of its record batches.

    Raises:
        DataError: The file is damaged or truncated, or continues after its end mark.
    """
    rows = 0
    for read, release in batches(file, whole=False):
        batch = read()
        if batch is None:
            break
        rows += batch.num_rows
        release(TOUCHED)
    return rows


def check_mapped(data: Any) -> None:
    """Check that a table of ``datasets`` has all rows of the files from which the table is mapped.

    The schema of each file is compared with the manifest in the same folder. The check takes constant time for each
    file; if the table leaves out rows or columns of a file, the heads of all record batches are read.

    Args:
        data: A ``datasets.table.Table``.

    Raises:
        DataError: A file is truncated, has another schema than the schema that was written, or has more rows than the
            table.
    """
    blocks = [block for row in getattr(data, "blocks", [[data]]) for block in row]
    found = {path: block for block in reversed(blocks) if (path := getattr(block, "path", None)) is not None}
    files = {Path(path): block for path, block in found.items() if Path(path).is_file()}
    check_schemas(files)
    for file, block in files.items():
        plain = all(replay[0] in _HARMLESS for replay in block.replays or ())
        # If the positions of the buffers do not decide, all heads of record batches are read.
        if not (plain and _ends_together(file, block.table)):
            count_rows(file)


def _ends_together(file: Path, table: pa.Table) -> bool:
    """Whether a table that is mapped from a stream contains the stream's last record batch, according to the positions
    of the table's buffers.
    """
    if not table.num_columns or not all(column.num_chunks for column in table.columns):
        return False
    with reading(file), mapped(file) as (source, _):
        size = source.size()
        source.seek(max(size - len(_END_OF_STREAM), 0))
        if source.read() != _END_OF_STREAM:
            return False
        source.seek(0)
        first = pa.ipc.open_stream(source).read_next_batch()
        source.seek(0)
        origin = source.read_buffer(1)
        theirs = _extent([column.chunk(0) for column in table.columns])
        ours = _extent(first.columns)
        last = _extent([column.chunk(column.num_chunks - 1) for column in table.columns])
        if theirs is None or ours is None or last is None:
            return False
        end, stop = last[1] - theirs[0] + ours[0] - origin.address, size - len(_END_OF_STREAM)
        # Only padding, which is zeros, lies between the last value and the end mark.
        return 0 <= stop - end < _PADDING and not any(source.read_at(stop - end, end))


def _extent(arrays: list[pa.Array]) -> tuple[int, int] | None:
    """Return the lowest address of the arrays' buffers, and the end of the highest buffer."""
    found = [buffer for array in arrays for buffer in array.buffers() if buffer is not None and buffer.size]
    if not found:
        return None
    return min(buffer.address for buffer in found), max(buffer.address + buffer.size for buffer in found)


def _named(read: Callable[[], pa.RecordBatch | None], file: Path, number: int) -> pa.RecordBatch | None:
    with reading(file, at=f"record batch {number}"):
        return read()


def _reader(source: Any) -> tuple[Any, int]:
    """Return a reader of the stream or file format, and the offset at which the end mark must end."""
    size: int = source.size()
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    if is_file:
        source.seek(0)
        return pa.ipc.open_file(source), size
    # Every complete stream has this mark; without the check, a file that was truncated between batches would seem
    # complete.
    source.seek(max(size - len(_END_OF_STREAM), 0))
    if source.read() != _END_OF_STREAM:
        raise DataError("expected an end mark of the Arrow stream, found none; the file was truncated or not finished")
    source.seek(0)
    return pa.ipc.open_stream(source), size


def _each(reader: Any, source: Any, end: int) -> Iterator[Callable[[], pa.RecordBatch | None]]:
    """Yield functions that each read one record batch; the last function returns None."""
    if isinstance(reader, pa.RecordBatchFileReader):
        known = reader.num_record_batches
        for number in range(known):
            yield partial(reader.get_batch, number)
        yield partial(_nothing_more, source, known)
        return

    def following() -> pa.RecordBatch | None:
        try:
            return reader.read_next_batch()
        except StopIteration:
            place = source.tell()
            if place != end:
                raise DataError(
                    f"expected the end of the file after the end mark at byte {place}, found {end - place} bytes more; "
                    "rows are missing"
                ) from None
            return None

    while True:
        yield following


def _nothing_more(source: Any, known: int) -> None:
    """Compare the footer of the file format with the stream in the file."""
    source.seek(max(source.size() - _FILE_TAIL, 0))
    footer = source.size() - _FILE_TAIL - int.from_bytes(source.read(4), "little")
    source.seek(_FILE_HEAD)
    stream = pa.ipc.open_stream(source)
    found, place = 0, footer
    try:
        while found <= known:
            stream.read_next_batch()
            found += 1
    except StopIteration:
        place = source.tell()
    except (pa.ArrowException, OSError):
        pass  # files of old writers end with the footer, which is not a record batch
    if found > known or place != footer:
        raise DataError(
            f"expected the footer directly after its {known} record batches, found other bytes between; "
            "rows are "
            "missing, or files were joined"
        )
