"""Positions of an Arrow file's record batches and of each column's values, read from metadata only.

An Arrow file is a sequence of messages, followed by a footer that lists the positions of the messages; a stream has an
end mark instead of a footer::

    ARROW1.. | schema | head 0 | body 0 | head 1 | body 1 | ... | end mark | footer | length of the footer | ARROW1
               schema | head 0 | body 0 | head 1 | body 1 | ... | end mark

The head of a record batch contains the number of rows, and the positions in the body of each column's buffers: nulls,
ends of lists, values. To locate a record batch in a local or remote file, a reader therefore needs only 24 bytes of the
footer and a few hundred bytes of the head. Values are read on demand. Footer and heads are FlatBuffers
(https://arrow.apache.org/docs/format/Columnar.html, format/File.fbs and Message.fbs).

Metadata are untrusted: a position outside the file or the body raises ``DataError``.

``SummedFile`` is a file with a checksum of each page of 4096 bytes; opening the file creates no record batch. The
checksums, 4 bytes each, are stored between the end mark and the footer, where Arrow's readers skip them::

    ARROW1.. | schema | head 0 | body 0 | ... | end mark | checksums | footer | its length | ARROW1
    body of the file                          | trailer

The checksums cover the body of the file: the bytes before the end mark. The digest of the trailer covers checksums and
footer. A reader that knows the size of the body and this digest can check any page without reading other pages.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.checksum import PAGE, PageChecksums, check, digest, page_checksums
from mouse_core.files.reading import damaged


class Flat:
    """A table in a FlatBuffer. The first bytes of the table give the distance to a list with the positions of the
    table's fields.

    Args:
        memory: The buffer.
        at: The position at which the table begins.
    """

    def __init__(self, memory: Any, at: int) -> None:
        self.memory, self.at = memory, at
        self._fields = at - self._number("<i", at)
        self._size = self._number("<H", self._fields)

    def _number(self, kind: str, at: int) -> int:
        if at < 0:
            raise DataError(f"expected metadata of Arrow, found a reference to byte {at}, outside of the metadata")
        try:
            return int(struct.unpack_from(kind, self.memory, at)[0])
        except struct.error as error:
            raise DataError(
                f"expected metadata of Arrow, found a reference beyond the end of the metadata ({error})"
            ) from error

    def _place(self, number: int) -> int:
        """Return the position of a field; 0 if the field is missing."""
        entry = 4 + 2 * number
        found = self._number("<H", self._fields + entry) if entry + 2 <= self._size else 0
        return self.at + found if found else 0

    def number(self, number: int, kind: str) -> int:
        """Return a field that is a number; 0 if the field is missing."""
        place = self._place(number)
        return self._number(kind, place) if place else 0

    def table(self, number: int) -> Flat | None:
        """Return a field that is a table."""
        place = self._place(number)
        return Flat(self.memory, place + self._number("<I", place)) if place else None

    def rows(self, number: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a field that is a list of numbers or records as a view of the buffer's memory."""
        place = self._place(number)
        if not place:
            return np.zeros(0, dtype)
        place += self._number("<I", place)
        count = self._number("<I", place)
        if place + 4 + count * dtype.itemsize > len(self.memory):
            raise DataError(f"expected {count} entries in the metadata of Arrow, found fewer")
        return np.frombuffer(self.memory, dtype, count, place + 4)

    @classmethod
    def root(cls, memory: Any) -> Flat:
        """Return the root table of a buffer."""
        (at,) = struct.unpack_from("<I", memory, 0) if len(memory) >= 4 else (-1,)
        return cls(memory, at)


Read = Callable[[int, int], Any]
"""A function that returns the bytes ``begin .. end`` of a file as a buffer."""

_V5 = 4


class BufferPlace(NamedTuple):
    """The position of one of a column's buffers in the file.

    Args:
        kind: "nulls" (a bit for each value; empty if there are no nulls), "ends" (of lists, texts and bytes), or
            "values".
        begin: The first byte in the file.
        size: The size in bytes.
    """

    kind: str
    begin: int
    size: int


@dataclass(frozen=True)
class ColumnPlace:
    """The position of one column of a record batch in its file.

    Args:
        type: The Arrow type of the column.
        levels: The numbers of values and nulls of the column and of each nested level, outer levels first.
        memory: The column's buffers, in Arrow's order.
    """

    type: pa.DataType
    levels: tuple[tuple[int, int], ...]
    memory: tuple[BufferPlace, ...]

    def array(self, read: Read) -> pa.Array:
        """Read all buffers of the column, and return the column as an array.

        Args:
            read: Function that returns the bytes ``begin .. end`` of the file as a ``pyarrow.Buffer``; the array is a
                view of these buffers.

        Raises:
            DataError: The column is damaged.
        """
        buffers = iter([read(one.begin, one.begin + one.size) if one.size else None for one in self.memory])
        try:
            return _array(self.type, iter(self.levels), buffers)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(f"expected values of type {self.type}, found damaged values: {error}") from error


class Head(NamedTuple):
    """The description of a record batch's body, parsed from its head.

    Args:
        rows: Number of rows of the record batch.
        levels: For each column and its nested levels, the number of values and of nulls, int64 ``[n, 2]``.
        memory: For each buffer, the first byte in the body and the size in bytes, int64 ``[m, 2]``.
        compressed: Whether buffers are compressed, so that values cannot be read directly.
    """

    rows: int
    levels: npt.NDArray[np.int64]
    memory: npt.NDArray[np.int64]
    compressed: bool

    @classmethod
    def of(cls, table: Flat, size: int, version: int = _V5) -> Head:
        """Parse a head from a table of metadata; the body has ``size`` bytes."""
        pair = np.dtype(("<i8", (2,)))
        rows, levels, memory = table.number(0, "<q"), table.rows(1, pair), table.rows(2, pair)
        if version < _V5 - 1 or rows < 0 or (levels < 0).any() or (memory < 0).any():
            raise DataError(f"expected a record batch of 0 or more rows, found {rows} rows; the file is damaged")
        if len(memory) and (memory[:, 0] > size - np.minimum(memory[:, 1], size + 1)).any():
            raise DataError(f"expected the buffers of columns in a body of {size} bytes, found a buffer beyond its end")
        return cls(rows, levels, memory, table.table(3) is not None)

    def columns(self, schema: pa.Schema, body: int) -> dict[str, ColumnPlace]:
        """Return the positions of columns, by name.

        Columns that are missing in the result must be read with Arrow's reader, in complete record batches: compressed
        columns, dictionaries, and columns that follow a column of a rarely used type.

        Args:
            schema: The schema of the file.
            body: The first byte of the body in the file.

        Raises:
            DataError: The head does not match the schema.
        """
        found: dict[str, ColumnPlace] = {}
        level = piece = 0
        for name, data_type in zip(schema.names, schema.types, strict=True) if not self.compressed else ():
            form = _form(data_type)
            if form is None:
                break
            levels, kinds = form
            there, memory = (
                self.levels[level : level + levels].tolist(),
                self.memory[piece : piece + len(kinds)].tolist(),
            )
            if len(there) < levels or len(memory) < len(kinds) or there[0][0] != self.rows:
                raise DataError(
                    f"expected {self.rows} rows of the column {name!r}, found another number; the file is damaged"
                )
            level, piece = level + levels, piece + len(kinds)
            pieces = [BufferPlace(kind, body + at, size) for kind, (at, size) in zip(kinds, memory, strict=True)]
            if not isinstance(data_type, pa.DictionaryType):
                found[name] = ColumnPlace(data_type, tuple(map(tuple, there)), tuple(pieces))
        return found


def _form(data_type: pa.DataType) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of levels and the kinds of buffers of a column; None if the type is not supported."""
    is_of = pa.types
    if is_of.is_null(data_type):
        return 1, ()
    if isinstance(data_type, pa.BaseExtensionType):
        return _form(data_type.storage_type)
    if is_of.is_struct(data_type):
        return _nested_form(("nulls",), [field.type for field in data_type])
    if is_of.is_fixed_size_list(data_type):
        return _nested_form(("nulls",), [data_type.value_type])
    if is_of.is_list(data_type) or is_of.is_large_list(data_type):
        return _nested_form(("nulls", "ends"), [data_type.value_type])
    if any(
        test(data_type) for test in (is_of.is_string, is_of.is_binary, is_of.is_large_string, is_of.is_large_binary)
    ):
        return 1, ("nulls", "ends", "values")
    fixed = is_of.is_primitive(data_type) or is_of.is_fixed_size_binary(data_type) or is_of.is_decimal(data_type)
    return (1, ("nulls", "values")) if fixed or is_of.is_dictionary(data_type) else None


def _nested_form(own: tuple[str, ...], within: list[pa.DataType]) -> tuple[int, tuple[str, ...]] | None:
    """Return the levels and buffers of a column that has the buffers ``own`` and the nested columns ``within``."""
    levels, kinds = 1, own
    for data_type in within:
        form = _form(data_type)
        if form is None or isinstance(data_type, pa.DictionaryType):
            return None
        levels, kinds = levels + form[0], kinds + form[1]
    return levels, kinds


def _array(data_type: pa.DataType, levels: Iterator[tuple[int, int]], buffers: Iterator[pa.Buffer | None]) -> pa.Array:
    """Return an array as a view of buffers, which are consumed in Arrow's order; Arrow validates the array."""
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, _array(data_type.storage_type, levels, buffers))
    rows, nulls = next(levels)
    if pa.types.is_null(data_type):
        return pa.nulls(rows)
    is_list = pa.types.is_list(data_type) or pa.types.is_large_list(data_type)
    own, within = [next(buffers)], []
    if pa.types.is_struct(data_type):
        within = [field.type for field in data_type]
    elif pa.types.is_fixed_size_list(data_type) or is_list:
        within = [data_type.value_type]
        own += [next(buffers)] if is_list else []
    else:
        own += [next(buffers) for _ in range(data_type.num_buffers - 1)]
    # Arrow accepts a missing buffer, instead of an empty one, only for values that may be null.
    own = [own[0], *(pa.py_buffer(b"") if one is None else one for one in own[1:])]
    children = [_array(one, levels, buffers) for one in within]
    return pa.Array.from_buffers(data_type, rows, own, nulls, 0, children)


MAGIC = b"ARROW1"
END_BYTES = 10
"""Size in bytes of the file's trailer: the footer's length and the magic."""

PREFIX_BYTES = 8
"""Size in bytes of a message's prefix: a mark and the metadata's length."""

_SCHEMA, _RECORD_BATCH = 1, 3
_MARK = 0xFFFFFFFF
_BLOCKS = np.dtype([("offset", "<i8"), ("head", "<i4"), ("unused", "<i4"), ("body", "<i8")])
# Largest size of a head, which has 16 bytes for each buffer and each level of a column.
_MOST_METADATA = 64 << 20


@dataclass(frozen=True)
class Footer:
    """The positions of a file's record batches, from the footer.

    Args:
        begins: The first byte of each record batch in the file, int64 ``[n]``; all arrays are views of the footer.
        heads: The size of each head in bytes, int32 ``[n]``.
        bodies: The size of each body, which follows its head, in bytes, int64 ``[n]``.
        begin: The first byte of the footer in the file.
        has_dictionaries: Whether columns refer to dictionaries, which are stored at other positions in the file.
    """

    begins: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int32]
    bodies: npt.NDArray[np.int64]
    begin: int
    has_dictionaries: bool

    def __len__(self) -> int:
        return len(self.begins)

    def span(self, number: int) -> tuple[int, int, int]:
        """Return the first byte of a record batch, the first byte of its body, and the end of its body."""
        begin = int(self.begins[number])
        body = begin + int(self.heads[number])
        return begin, body, body + int(self.bodies[number])


def read_footer(read: Read, size: int) -> Footer:
    """Read the footer of a file from its end: first the last 10 bytes, then the footer.

    Args:
        read: Function that reads bytes of the file.
        size: The size of the file in bytes.

    Raises:
        DataError: The file is not an Arrow file, or is truncated.
    """
    end = memoryview(read(size - END_BYTES, size)) if size > len(MAGIC) + END_BYTES else memoryview(b"")
    if bytes(end[4:]) != MAGIC:
        raise DataError(
            "expected a footer at the end of the Arrow file, found none; the file was truncated or not finished"
        )
    begin = size - END_BYTES - int.from_bytes(end[:4], "little")
    if not len(MAGIC) <= begin < size - END_BYTES:
        raise DataError(f"expected a footer within a file of {size} bytes, found a footer that begins at byte {begin}")
    flat = Flat.root(memoryview(read(begin, size - END_BYTES)))
    _check_little(flat.table(1))
    blocks = flat.rows(3, _BLOCKS)
    begins, heads, bodies = blocks["offset"], blocks["head"], blocks["body"]
    if len(blocks):
        least = min(int(begins.min()), int(heads.min()) - PREFIX_BYTES, int(bodies.min()))
        most = max(int(begins.max()), int(bodies.max()))
        # Both numbers are compared separately, because their sum may overflow 8 bytes.
        if least < 0 or most > begin or int((begins + heads + bodies).max()) > begin:
            raise DataError(f"expected all record batches before byte {begin}, found record batches beyond it")
    return Footer(begins, heads, bodies, begin, len(flat.rows(2, _BLOCKS)) > 0)


def _check_little(schema: Flat | None) -> None:
    if schema is None:
        raise DataError("expected a schema in the metadata of Arrow, found none")
    if schema.number(0, "<h"):
        raise DataError("expected little-endian values, found big-endian values")


class Message(NamedTuple):
    """A message of a stream or a file, described by its head.

    Args:
        begin: The first byte of the message.
        body: The first byte of the message's body.
        end: The first byte of the next message.
        head: The description of a record batch; None for any other message.
    """

    begin: int
    body: int
    end: int
    head: Head | None


def read_message(read: Read, begin: int, size: int) -> Message | None:
    """Read the message that begins at byte ``begin``; return None at the end mark.

    Args:
        read: Function that reads bytes of the file or the stream.
        begin: The first byte of the message.
        size: The size of the file or stream in bytes.

    Raises:
        DataError: No message begins at ``begin``, or the message exceeds the file.
    """
    memory = memoryview(read(begin, min(begin + PREFIX_BYTES, size)))
    if len(memory) < PREFIX_BYTES:
        raise DataError(f"expected an Arrow message at byte {begin}, found the end of the file; the file was truncated")
    mark, length = struct.unpack_from("<II", memory)
    if mark != _MARK or length > _MOST_METADATA:
        raise DataError(f"expected an Arrow message at byte {begin}, found other bytes; the file is damaged")
    if not length:
        return None
    body = begin + PREFIX_BYTES + length
    if body > size:
        raise DataError(
            f"expected a message header that ends before byte {size}, found its end at {body}; the file was truncated"
        )
    flat = Flat.root(memoryview(read(begin + PREFIX_BYTES, body)))
    end = body + flat.number(3, "<q")
    if not body <= end <= size:
        raise DataError(
            f"expected a message body that ends before byte {size}, found its end at {end}; the file was truncated"
        )
    table = flat.table(2)
    if flat.number(1, "<B") == _SCHEMA:
        _check_little(table)
    if table is None or flat.number(1, "<B") != _RECORD_BATCH:
        return Message(begin, body, end, None)
    return Message(begin, body, end, Head.of(table, end - body, flat.number(0, "<h")))


# Limits of one request, in record batches and in bytes: requested pages must stay in memory until they are used, even
# if memory is short.
_MOST_REQUESTED, _MOST_REQUESTED_BYTES = 512, 8 << 20


def write_summed(path: Path, batch: pa.RecordBatch, rows: int) -> tuple[int, int, str]:
    """Write rows to a file, ``rows`` rows in each record batch.

    Args:
        path: The file.
        batch: The rows, at least one.
        rows: Number of rows of a record batch; the last can have fewer.

    Returns:
        Three values: the size of the file's body in bytes; the stride; and the digest of the trailer, see
        ``SummedFile``. If all record batches of ``rows`` rows have the same layout, the stride is the distance in bytes
        between the starts of consecutive batches, else 0.
    """
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_table(pa.Table.from_batches([batch]), max_chunksize=rows)
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            footer = read_footer(lambda begin, end: view[begin:end], len(view))
            body, stride = footer.span(len(footer) - 1)[2], _stride(view, footer, batch.schema, batch.num_rows // rows)
            sums = page_checksums([view[:body]])
            sums = np.pad(sums, (0, len(sums) % 2)).astype("<u4")  # the footer begins at a multiple of 8 bytes
            trailer = bytes(view[body : footer.begin]) + sums.tobytes() + bytes(view[footer.begin :])
            del footer
        stream.seek(body)
        stream.write(trailer)
    return body, stride, digest(trailer)


class Trailer(NamedTuple):
    """The bytes of a file after its body; see ``write_summed``.

    Args:
        sums: The checksum of each page of the body.
        footer: The footer of the file.
    """

    sums: PageChecksums
    footer: Footer

    @classmethod
    def of(cls, path: str | Path, content: Any, body: int, expected: str | None) -> Trailer:
        """Parse a trailer.

        Args:
            path: The path or address of the file, for messages.
            content: The bytes of the trailer.
            body: The size of the file's body in bytes.
            expected: The digest of the trailer; None: the digest is not compared.

        Raises:
            DataError: The trailer differs from the written trailer.
        """
        if expected is not None:
            check(path, "the table of checksums behind the rows", expected, digest(content))
        view, count = memoryview(content), -(-body // PAGE)
        footer = read_footer(lambda begin, end: view[max(begin - body, 0) : end - body], body + len(view))
        sums = footer.begin - 8 * -(-count // 2) - body
        if sums < PREFIX_BYTES:
            raise DataError(f"expected checksums of {count} pages, found a shorter trailer")
        return cls(np.frombuffer(view, "<u4", count, sums), footer)


def _stride(view: memoryview, footer: Footer, schema: pa.Schema, whole: int) -> int:
    """Return the distance in bytes between consecutive record batches, if the first ``whole`` record batches have equal
    layouts; else 0.
    """
    begins = footer.begins[:whole].astype(np.int64)
    if not whole or not (footer.heads[:whole] == footer.heads[0]).all():
        return 0
    begin, body, end = footer.span(0)
    message = read_message(lambda begin, end: view[begin:end], begin, len(view))
    if message is None or message.head is None:
        return 0
    stride, columns = end - begin, message.head.columns(schema, body)
    if len(columns) < len(schema) or (np.diff(begins) != stride).any():
        return 0
    octets = np.frombuffer(view, np.uint8, whole * stride, begin).reshape(whole, stride)
    same = [(0, body - begin)]
    for place in columns.values():
        same += [(one.begin - begin, one.size) for one in place.memory if one.kind == "ends"]
    return stride if all((octets[:, at : at + size] == octets[0, at : at + size]).all() for at, size in same) else 0


class SummedFile:
    """A file with checksums of its pages, whose record batches are created on demand; see ``write_summed``.

    Args:
        path: The path of the file, for messages.
        memory: The memory of the mapped file. If the memory is a ``mmap``, the kernel also gets advice on the use of
            its pages.
        schema: The columns of the file.
        rows: Number of rows.
        batch_rows: Number of rows of a record batch; the last can have fewer.
        body: The size of the file's body in bytes.
        expected: Digest of the trailer. If None, checksums are not compared.

    Raises:
        DataError: The file differs from the written file.
    """

    def __init__(
        self,
        path: str | Path,
        memory: mmap.mmap | pa.Buffer,
        schema: pa.Schema,
        rows: int,
        batch_rows: int,
        body: int,
        expected: str | None,
    ) -> None:
        self.path, self._schema, self.rows, self.batch_rows, self._body = path, schema, rows, batch_rows, body
        self._memory, self.buffer = memory, pa.py_buffer(memory)
        # Without this advice, the kernel would read some MB around each access, although only a little is needed.
        self._advise("MADV_RANDOM", 0, self.buffer.size)
        self._sums, self.footer = Trailer.of(path, self.read(body, self.buffer.size), body, expected)
        count = len(self.footer)
        if count != -(-rows // batch_rows):
            raise DataError(f"expected {-(-rows // batch_rows)} record batches, found {count}")
        # A byte for each record batch: 1 if the batch was compared with its checksums or needs no check.
        self._seen: npt.NDArray[np.uint8] = np.full(count, expected is None, np.uint8)
        if expected is not None:
            self._check([(0, int(self.footer.begins[0]))])
        else:  # a record batch with checksums is requested completely
            self._advise("MADV_NORMAL", 0, self.buffer.size)

    def _advise(self, advice: str, begin: int, end: int) -> None:
        """Advise the kernel about the use of a range of bytes, on systems with `madvise`."""
        known = getattr(mmap, advice, None)
        if known is not None and begin < end and isinstance(self._memory, mmap.mmap):
            page = begin - begin % mmap.PAGESIZE
            self._memory.madvise(known, page, end - page)

    def _in_requests(self, numbers: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield record batches in groups that fit into one request."""
        size = self.footer.begin // len(self)
        most = max(1, min(_MOST_REQUESTED, _MOST_REQUESTED_BYTES // max(1, size)))
        for begin in range(0, len(numbers), most):
            yield numbers[begin : begin + most]

    def _request(self, numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Request all given record batches (ascending) together, because a disk serves many requests as fast as a
        few; return the byte ranges of the record batches.
        """
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        firsts, lasts = numbers[np.append(0, breaks + 1)], numbers[np.append(breaks, len(numbers) - 1)]
        ends = self.footer.begins[lasts] + self.footer.heads[lasts] + self.footer.bodies[lasts]
        ranges = list(zip(self.footer.begins[firsts].tolist(), ends.tolist(), strict=True))
        for begin, end in ranges:
            self._advise("MADV_WILLNEED", begin, end)
        return ranges

    def read(self, begin: int, end: int) -> pa.Buffer:
        """Return bytes of the file without a copy."""
        return self.buffer.slice(begin, end - begin)

    def __len__(self) -> int:
        return len(self.footer)

    @property
    def whole(self) -> int:
        """Number of full record batches, which have ``batch_rows`` rows each."""
        return self.rows // self.batch_rows

    def check_stride(self, stride: int) -> None:
        """Raise DataError unless full record batches begin at distances of ``stride`` bytes; a stride of 0 is not
        checked.
        """
        begins, heads, bodies = (
            part[: self.whole] for part in (self.footer.begins, self.footer.heads, self.footer.bodies)
        )
        if stride and (
            (heads != heads[:1]).any() or (heads + bodies != stride).any() or (np.diff(begins) != stride).any()
        ):
            raise DataError(f"expected record batches every {stride} bytes, found other distances")

    def check(self, numbers: npt.NDArray[np.int64]) -> None:
        """Compare the pages of record batches with their checksums, unless the record batches were already compared.

        Raises:
            DataError: A record batch is damaged.
        """
        unseen = np.unique(numbers[self._seen[numbers] == 0])
        for some in self._in_requests(unseen):
            self._check(self._request(some))
            self._seen[some] = 1

    def check_all(self) -> None:
        """Compare all pages with their checksums."""
        self.check(np.arange(len(self)))

    def _check(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Compare the pages of byte ranges with their checksums."""
        pages = [(begin // PAGE, -(-end // PAGE)) for begin, end in ranges]
        contents = [self.read(first * PAGE, min(last * PAGE, self._body)) for first, last in pages]
        found = page_checksums(contents, [first for first, _ in pages])
        expected = np.concatenate([self._sums[first:last] for first, last in pages])
        for wrong in np.flatnonzero(found != expected)[:1].tolist():
            page = np.concatenate([np.arange(*some) for some in pages])[wrong]
            number = int(np.searchsorted(self.footer.begins, page * PAGE, "right")) - 1
            unit = "the schema" if number < 0 else f"record batch {number}"
            check(self.path, unit, expected[wrong], found[wrong])

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch as a view of the mapped memory.

        Raises:
            DataError: The record batch is damaged.
        """
        self.check(np.array([number]))
        begin, _, end = self.footer.span(number)
        try:
            if self.footer.has_dictionaries:
                found = pa.ipc.open_file(self.buffer).get_batch(number)
            else:
                found = pa.ipc.read_record_batch(self.read(begin, end), self._schema)
            found.validate()
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.path, f"record batch {number} cannot be read: {error}") from error
        rows = min(self.batch_rows, self.rows - number * self.batch_rows)
        if found.num_rows != rows:
            raise damaged(self.path, f"expected {rows} rows in record batch {number}, found {found.num_rows}")
        return found

    def batches(self, numbers: range) -> list[pa.RecordBatch]:
        """Return several record batches; each needs some KB of memory."""
        made = []
        for some in self._in_requests(np.array(numbers, np.int64)):
            self._request(some)
            made += [self.batch(number) for number in some.tolist()]
        return made
