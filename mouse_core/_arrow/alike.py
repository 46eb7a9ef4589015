"""Record batches that are laid out alike, so that looking up one of them says where the values of all others lie.

In Arrow's IPC format a record batch is a message of metadata, which says how many rows, nulls and bytes each column
has and at which offsets, and a body with the bytes. Batches with the same metadata have every value at the same
distance from the body's beginning; what remains to be compared is the offsets of lists, which are data. A file of
``datasets`` has such a batch for every 1,000 rows, 100,000 of them in a hundred million steps: asking pyarrow about
each of them, column by column, takes ten times as long as reading their windows.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import element_of, element_of_all, flat_view, list_offsets, runs_equal
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock

# Metadata takes some 60 bytes a column; tables of hundreds of columns are looked up one by one.
_LONGEST_METADATA = 1 << 14
_UNKNOWN = np.iinfo(np.int64).min
_NOT_ALIKE = _UNKNOWN + 1


class Alike:
    """The record batches of a table that have the metadata of one of them, the template.

    Args:
        table: Read from mapped files; all columns of a chunk are of one record batch.
        starts: The first row of every chunk, and the end, int64 ``[chunks + 1]``.
    """

    def __init__(self, table: pa.Table, starts: Int64s) -> None:
        self._table = table
        self._sizes = np.diff(starts)
        # The first chunk of a slice is often short.
        self.template = 1 if len(self._sizes) > 2 and self._sizes[0] != self._sizes[1] else 0
        self._distance = np.full(len(self._sizes), _UNKNOWN, np.int64)
        self._lock = ProcessLock()
        # The template's list offsets that others' were compared with, by address, and their bytes.
        self._lists: dict[int, int] = {}
        # Address ranges of files that were met: where each begins, and where it ends.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._metadata = self._find_metadata()

    def distances(self, chunks: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the distance in bytes of each chunk from the template, and a mask of chunks with an equal layout."""
        with self._lock:
            unknown = chunks[self._distance[chunks] == _UNKNOWN]
            if len(unknown):
                self._distance[unknown] = self._compare(unknown)
            found = self._distance[chunks]
        return found, found != _NOT_ALIKE

    def same_lists(
        self, column: pa.ChunkedArray, distance: Int64s, alike: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the alike chunks that also have the template's list offsets in ``column``."""
        from mouse_core.readahead.local import in_parts  # loaded when chunks are compared

        if not self._holds(column):
            return np.zeros(len(alike), np.bool_)
        alike = alike.copy()
        for address, count, dtype in list_offsets(column.chunk(self.template)):
            first = element_of(address, dtype.itemsize)
            if first is None or (distance[alike] % dtype.itemsize).any():
                return np.zeros(len(alike), np.bool_)
            wanted = flat_view(dtype)[first : first + count]
            self._lists[address] = wanted.nbytes
            (positions,) = np.nonzero(alike)
            for part in in_parts(address + distance[positions], wanted.nbytes):
                some = positions[part]
                alike[some] = runs_equal(first + distance[some] // dtype.itemsize, wanted)
        return alike

    def _holds(self, column: pa.ChunkedArray) -> bool:
        """Whether the template's body is where the column's values lie: not those of one that was cast."""
        if self._metadata is None:
            return False
        buffers = [buffer for buffer in column.chunk(self.template).buffers() if buffer is not None and buffer.size]
        parents = [buffer.parent for buffer in buffers]
        return all(parent is not None and parent.address == self._address for parent in parents)

    def _find_metadata(self) -> Int64s | None:
        """The template's message before its body, in words; None if it is not a message in uncompressed IPC."""
        body = self._find_body() if len(self._sizes) else None
        if body is None or not self._in_file(body):
            return None
        self._address, self._size = body.address, body.size
        before = min(_LONGEST_METADATA, self._address - self._begins[-1]) // 8
        element = element_of(self._address, 8)
        if element is None:
            return None
        words = flat_view(np.dtype(np.int64))[element - before : element]
        # A message is a continuation mark, the metadata's length, and the metadata.
        marks = words.view(np.int32).reshape(-1, 2)
        (marked,) = np.nonzero((marks[:, 0] == -1) & (marks[:, 1] == 8 * np.arange(before - 1, -1, -1)))
        return None if not len(marked) else words[int(marked[-1]) :].astype(np.int64)

    def _find_body(self) -> pa.Buffer | None:
        """The template's body, through a column and a buffer that are there to find those of other chunks."""
        for column in self._table.columns:
            if not pa.types.is_dictionary(column.type):
                for number, buffer in enumerate(column.chunk(self.template).buffers()):
                    if buffer is not None and buffer.size:
                        self._column, self._buffer = column, number
                        return self._body(self.template)
        return None

    def _body(self, chunk: int) -> pa.Buffer | None:
        """The body of a chunk's record batch, which is what its values' memory is a part of."""
        values = self._column.chunk(chunk)
        buffer = None if values.offset else values.buffers()[self._buffer]
        return None if buffer is None else buffer.parent

    def _in_file(self, body: pa.Buffer) -> bool:
        """Whether a body lies in a file that was met, which it is made to be."""
        file = bisect_right(self._begins, body.address) - 1
        if file < 0 or body.address + body.size > self._ends[file]:
            root = body
            while root.parent is not None:
                root = root.parent
            if root.size <= body.size:
                return False
            file = bisect_right(self._begins, root.address)
            self._begins.insert(file, root.address)
            self._ends.insert(file, root.address + root.size)
        return True

    def _compare(self, chunks: Int64s) -> Int64s:
        """The distance of each chunk, or ``_NOT_ALIKE``."""
        distance = np.full(len(chunks), _NOT_ALIKE, np.int64)
        if self._metadata is None:
            return distance
        length = self._metadata.nbytes
        positions, found = [], []
        (candidates,) = np.nonzero(self._sizes[chunks] == self._sizes[self.template])
        for position, chunk in zip(candidates.tolist(), chunks[candidates].tolist(), strict=True):
            body = self._body(chunk)
            if body is not None and body.size == self._size and self._in_file(body):
                address = body.address
                if not address % 8 and address - length >= self._begins[bisect_right(self._begins, address) - 1]:
                    positions.append(position)
                    found.append(address)
        if positions:
            from mouse_core.readahead.local import in_parts

            bodies, same = np.array(found), np.zeros(len(found), np.bool_)
            lists = [(bodies + (address - self._address), nbytes) for address, nbytes in list(self._lists.items())]
            for some in in_parts(bodies - length, length, lists):
                same[some] = runs_equal(element_of_all(bodies[some] - length, 8), self._metadata)
            distance[np.array(positions)[same]] = bodies[same] - self._address
        return distance
