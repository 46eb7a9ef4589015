"""Arrow files of many small record batches with a checksum each; opening a file creates no record batch.

Checksums lie between the end mark and the footer, which Arrow's readers skip, 8 bytes each::

    ARROW1.. | schema | head 0 | body 0 | ... | end mark | checksums | footer | its length | ARROW1

The first checksum covers the bytes before record batch 0, each other checksum a record batch. The digest of the bytes
behind the last record batch covers checksums and footer. With this digest, a reader can check any byte, and checking
one record batch reads no other.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.checksum import check, checksum, digest
from mouse_core.files.ipc.batches import PREFIX_BYTES, Footer, read_footer, read_message
from mouse_core.files.reading import damaged

_SUMS = np.dtype("<u8")
# Limits of one request, in record batches and in bytes: requested pages must stay in memory until they are used, also
# if memory is short.
_ASKED, _ASKED_BYTES = 512, 8 << 20


def write_summed(path: Path, batch: pa.RecordBatch, rows: int) -> tuple[int, str]:
    """Write rows to a file, ``rows`` rows in each record batch.

    Args:
        path: The file.
        batch: The rows, at least one.
        rows: Number of rows of a record batch; the last may have fewer.

    Returns:
        The distance in bytes between the begins of consecutive record batches of ``rows`` rows if all of these have the
            same layout, else 0; and the digest of the bytes behind the last record batch, see ``SummedFile``.
    """
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_table(pa.Table.from_batches([batch]), max_chunksize=rows)
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            footer = _footer(view)
            begin, stride = footer.begin, _stride(view, footer, batch.schema, batch.num_rows // rows)
            end, sums = _edges(footer)[-1], _sums(view, footer)
            mark, known = bytes(view[end:begin]), bytes(view[begin:])
            del footer
        stream.seek(begin)
        stream.write(sums + known)
    return stride, digest(mark + sums + known)


def _footer(view: memoryview) -> Footer:
    return read_footer(lambda begin, end: view[begin:end], len(view))


def _sums(view: memoryview, footer: Footer) -> bytes:
    """Return the checksums of a file that has none yet."""
    edges = pairwise(_edges(footer))
    return np.array([checksum(view[begin:end]) for begin, end in edges], _SUMS).tobytes()


def _edges(footer: Footer) -> list[int]:
    """Return the offsets of record batches, with 0 in front and the end of the last."""
    return [0, *footer.begins.tolist(), footer.span(len(footer) - 1)[2]]


def _stride(view: memoryview, footer: Footer, schema: pa.Schema, whole: int) -> int:
    """Return the distance between the first ``whole`` record batches if their layouts are equal; else 0."""
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
    """A file of many record batches, which are created on demand; see ``write_summed``.

    Args:
        path: The path, for messages.
        memory: The memory of the mapped file.
        schema: The columns of the file.
        rows: Number of rows.
        batch_rows: Number of rows of a record batch; the last may have fewer.
        expected: Digest of the bytes behind the last record batch. None: checksums are not compared.

    Raises:
        DataError: The file differs from the file that was written.
    """

    def __init__(
        self, path: str | Path, memory: mmap.mmap, schema: pa.Schema, rows: int, batch_rows: int, expected: str | None
    ) -> None:
        self.path, self._schema, self.rows, self.batch_rows = path, schema, rows, batch_rows
        self._memory, buffer = memory, pa.py_buffer(memory)
        self._buffer = buffer
        # Without this advice, the kernel would read some MB around each access, although little is read at first.
        self._advise("MADV_RANDOM", 0, len(memory))
        self.footer = read_footer(self.read, buffer.size)
        count = len(self.footer)
        if count != -(-rows // batch_rows):
            raise DataError(f"expected {-(-rows // batch_rows)} record batches, found {count}")
        end = self.footer.span(count - 1)[2]
        sums = self.footer.begin - _SUMS.itemsize * (count + 1)
        if sums < end + PREFIX_BYTES:
            raise DataError(f"expected checksums of {count} record batches, found no room for them")
        self._sums = np.frombuffer(buffer, _SUMS, count + 1, sums)
        # A byte for each record batch: 1 if it was compared with its checksum, or needs no check.
        self._seen: npt.NDArray[np.uint8] = np.full(count, expected is None, np.uint8)
        if expected is not None:
            check(path, "the table of checksums behind the rows", expected, digest(self.read(end, buffer.size)))
            self._check(0, 0, int(self.footer.begins[0]))
        else:  # a record batch with a checksum is requested as a whole
            self._advise("MADV_NORMAL", 0, len(memory))

    def _advise(self, advice: str, begin: int, end: int) -> None:
        """Advise the kernel about the use of a range of bytes, on systems with `madvise`."""
        known = getattr(mmap, advice, None)
        if known is not None and begin < end:
            page = begin - begin % mmap.PAGESIZE
            self._memory.madvise(known, page, end - page)

    def _together(self, numbers: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield record batches in groups that fit into one request."""
        size = self.footer.begin // len(self)
        most = max(1, min(_ASKED, _ASKED_BYTES // max(1, size)))
        for begin in range(0, len(numbers), most):
            yield numbers[begin : begin + most]

    def _ask(self, numbers: npt.NDArray[np.int64]) -> None:
        """Request ascending record batches all at once: a disk serves many together as fast as a few."""
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        firsts, lasts = numbers[np.append(0, breaks + 1)], numbers[np.append(breaks, len(numbers) - 1)]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._advise("MADV_WILLNEED", int(self.footer.begins[first]), self.footer.span(last)[2])

    def read(self, begin: int, end: int) -> pa.Buffer:
        """Return bytes of the file without copying them."""
        return self._buffer.slice(begin, end - begin)

    def __len__(self) -> int:
        return len(self.footer)

    @property
    def whole(self) -> int:
        """Number of record batches that have all ``batch_rows`` rows."""
        return self.rows // self.batch_rows

    def check_stride(self, stride: int) -> None:
        """Raise DataError unless full record batches begin ``stride`` bytes after each other; 0 is not checked."""
        begins, heads, bodies = (
            part[: self.whole] for part in (self.footer.begins, self.footer.heads, self.footer.bodies)
        )
        if stride and (
            (heads != heads[:1]).any() or (heads + bodies != stride).any() or (np.diff(begins) != stride).any()
        ):
            raise DataError(f"expected record batches {stride} bytes after each other, found others")

    def check(self, numbers: npt.NDArray[np.int64]) -> None:
        """Compare record batches with their checksums, unless they were compared before.

        Raises:
            DataError: A record batch is damaged.
        """
        unseen = np.unique(numbers[self._seen[numbers] == 0])
        for some in self._together(unseen):
            self._ask(some)
            for number in some.tolist():
                last = number + 1 == len(self)
                end = self.footer.span(number)[2] if last else int(self.footer.begins[number + 1])
                self._check(number + 1, int(self.footer.begins[number]), end)
                self._seen[number] = 1

    def check_all(self) -> None:
        """Compare all record batches with their checksums."""
        self.check(np.arange(len(self)))

    def _check(self, number: int, begin: int, end: int) -> None:
        unit = f"record batch {number - 1}" if number else "the schema"
        check(self.path, unit, self._sums[number], checksum(self.read(begin, end)))

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch, as a view of the mapped memory.

        Raises:
            DataError: The record batch is damaged.
        """
        self.check(np.array([number]))
        begin, _, end = self.footer.span(number)
        try:
            if self.footer.has_dictionaries:
                found = pa.ipc.open_file(self._buffer).get_batch(number)
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
        """Yield record batches; each takes some KB of memory."""
        made = []
        for some in self._together(np.array(numbers, np.int64)):
            self._ask(some)
            made += [self.batch(number) for number in some.tolist()]
        return made
