"""Arrow files of many small record batches, each with a checksum of its own, opened without making any of them.

Checksums stand between the end mark and the footer, where no reader of Arrow looks, 8 bytes each::

    ARROW1.. | schema | head 0 | body 0 | ... | end mark | checksums | footer | its length | ARROW1

The first is of what stands before record batch 0, the others of a record batch each. Whoever has the digest of what
stands behind the last record batch, checksums and footer, can so tell whether any byte is what was written, and to read
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
# Record batches that are asked for at once are so many at most, and no more bytes than that: what is asked for has to
# stay until it is looked at, also where memory is short.
_ASKED, _ASKED_BYTES = 512, 8 << 20


def write_summed(path: Path, batch: pa.RecordBatch, rows: int) -> tuple[int, str]:
    """Write rows to a file, ``rows`` to a record batch.

    Args:
        path: The file.
        batch: The rows, at least one.
        rows: How many a record batch has; the last may have fewer.

    Returns:
        How many bytes after each other record batches begin that are laid out alike: those of ``rows`` rows, where
        every value lies as far behind the beginning as in the first; 0 where they are not. And the digest of what
        stands behind the last record batch; see ``SummedFile``.
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
    """The checksums of a file without any."""
    edges = pairwise(_edges(footer))
    return np.array([checksum(view[begin:end]) for begin, end in edges], _SUMS).tobytes()


def _edges(footer: Footer) -> list[int]:
    """Return the offsets of record batches, with 0 before and the end of the last."""
    return [0, *footer.begins.tolist(), footer.span(len(footer) - 1)[2]]


def _stride(view: memoryview, footer: Footer, schema: pa.Schema, whole: int) -> int:
    """Return the distance between the first ``whole`` record batches, if their layouts are equal; else 0."""
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
    """A file of many record batches, which are made when they are asked for; see ``write_summed``.

    Args:
        path: For messages.
        memory: The file.
        schema: Its columns.
        rows: How many rows there are.
        batch_rows: How many a record batch has; the last may have fewer.
        expected: Digest of the bytes behind the last record batch. None: no checksum is compared.

    Raises:
        DataError: It is not the file that was written.
    """

    def __init__(
        self, path: str | Path, memory: mmap.mmap, schema: pa.Schema, rows: int, batch_rows: int, expected: str | None
    ) -> None:
        self.path, self._schema, self.rows, self.batch_rows = path, schema, rows, batch_rows
        self._memory, buffer = memory, pa.py_buffer(memory)
        self._buffer = buffer
        # Of a file of which little is read at first, the kernel would read some MB around each place.
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
        # A byte for each record batch: 1 if it was held against its checksum, or is not to be.
        self._seen: npt.NDArray[np.uint8] = np.full(count, expected is None, np.uint8)
        if expected is not None:
            check(path, "the table of checksums behind the rows", expected, digest(self.read(end, buffer.size)))
            self._check(0, 0, int(self.footer.begins[0]))
        else:  # what is held against a checksum is asked for as a whole record batch
            self._advise("MADV_NORMAL", 0, len(memory))

    def _advise(self, advice: str, begin: int, end: int) -> None:
        """Tell the kernel what will be done with some bytes, where it takes advice."""
        known = getattr(mmap, advice, None)
        if known is not None and begin < end:
            page = begin - begin % mmap.PAGESIZE
            self._memory.madvise(known, page, end - page)

    def _together(self, numbers: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Some record batches, as many at a time as are asked for at once."""
        size = self.footer.begin // len(self)
        most = max(1, min(_ASKED, _ASKED_BYTES // max(1, size)))
        for begin in range(0, len(numbers), most):
            yield numbers[begin : begin + most]

    def _ask(self, numbers: npt.NDArray[np.int64]) -> None:
        """Have some record batches read, ascending, all at once: a disk answers many together as fast as a few."""
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
        """Number of record batches that have all rows."""
        return self.rows // self.batch_rows

    def check_stride(self, stride: int) -> None:
        """Raise DataError unless the whole ones begin ``stride`` bytes after each other, if that is not 0."""
        begins, heads, bodies = (
            part[: self.whole] for part in (self.footer.begins, self.footer.heads, self.footer.bodies)
        )
        if stride and (
            (heads != heads[:1]).any() or (heads + bodies != stride).any() or (np.diff(begins) != stride).any()
        ):
            raise DataError(f"expected record batches {stride} bytes after each other, found others")

    def check(self, numbers: npt.NDArray[np.int64]) -> None:
        """Hold some record batches against their checksums, those that nobody has looked at.

        Raises:
            DataError: One is damaged.
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
        """Hold all of them against their checksums."""
        self.check(np.arange(len(self)))

    def _check(self, number: int, begin: int, end: int) -> None:
        unit = f"record batch {number - 1}" if number else "the schema"
        check(self.path, unit, self._sums[number], checksum(self.read(begin, end)))

    def batch(self, number: int) -> pa.RecordBatch:
        """A record batch, over the memory that it lies in.

        Raises:
            DataError: It is damaged.
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
        """Some record batches that follow each other; each takes some KB of memory."""
        made = []
        for some in self._together(np.array(numbers, np.int64)):
            self._ask(some)
            made += [self.batch(number) for number in some.tolist()]
        return made
