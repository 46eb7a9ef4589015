"""Rows in objects elsewhere as a segment of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.windows import Int64s
from mouse_core._base.memo import memo
from mouse_core.store._segments import Segment
from mouse_core.store.remote.asking import Asking, together
from mouse_core.store.remote.files import Files

if TYPE_CHECKING:
    from mouse_core.readahead.backing import RemoteMemory

# Heads of so many record batches are read at once where one after the other is looked at.
_LOOKED_AT = 64


class ElsewhereSegment(Segment):
    """The rows of files elsewhere, a chunk for each record batch; making one reads nothing.

    Args:
        files: The files.
        image_roots: Folders in which images that rows name by path may lie.
        place: See ``Segment``.
        appended: Whether the rows were appended to a store, and are not those of a dataset.
        load: See ``Sealed``.
    """

    def __init__(
        self,
        files: Files,
        image_roots: tuple[str, ...],
        place: tuple[object, int] | None,
        *,
        appended: bool = False,
        load: int = 0,
    ) -> None:
        self.files, self.place = files, place
        self.backing = files.backing
        self.extent = object() if appended else None
        self.num_rows = int(files.starts[-1])
        self._appended, self._load, self._named_roots = appended, load, image_roots
        self._parts, self._first_values = {}, {}
        # The columns that were asked for, which know each other by it, and keep nobody alive.
        self._asked: WeakValueDictionary[str, _PartElsewhere] = WeakValueDictionary()
        self.__dict__.update(chunk_starts=files.starts, _same_chunks=True, is_mapped=False)

    @property
    def recording(self) -> object:
        """See ``Segment``."""
        return self._load or None

    @property
    def fetched_by(self) -> RemoteMemory | None:
        """Who fetches values that are decoded before they are in memory; None: all lie where ``backing`` has them."""
        return getattr(self.files, "fetched_by", None)

    @memo
    def table(self) -> pa.Table:
        """The steps; reads all of them."""
        return pa.concat_tables(list(self.tables()))

    def tables(self) -> Iterator[pa.Table]:
        """The steps, record batch by record batch; each is read when it is asked for."""
        names = self.files.schema.names
        for chunk in range(len(self.chunk_starts) - 1):
            columns = self._read([(chunk, self.files.column(chunk, name)) for name in names])
            yield pa.Table.from_arrays(columns, names=names)

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.files.schema.names, self.files.schema.types, strict=True))

    def column(self, name: str) -> pa.ChunkedArray | None:
        """See ``Segment``; reads all of it."""
        if name not in self.types:
            return None
        chunks = range(len(self.chunk_starts) - 1)
        return pa.chunked_array(
            self._read([(chunk, self.files.column(chunk, name)) for chunk in chunks]), self.types[name]
        )

    def part(self, name: str) -> ColumnPart:
        """See ``Segment``; a head is read when a chunk is touched."""
        if name not in self._parts and name in self.types:
            is_image = column_type(self.types[name]).is_encoded
            roots = self.image_roots if is_image else ()
            part = self._parts.setdefault(name, _PartElsewhere(self.files, name, roots, self._asked))
            self._asked[name] = part  # type: ignore[assignment]
        return super().part(name)

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``; what is known to be null throughout is not looked into."""
        if name not in self.types:
            return None
        if name not in self._first_values:
            self._first_values[name] = self._look_for_first(name)
        found = self._first_values[name]
        return None if found is None or found[0] >= rows else found

    def _look_for_first(self, name: str) -> tuple[int, Any] | None:
        # There may be millions, and most often it is the very first row.
        files, several = self.files, self.files.chunks_with(name)
        groups = chain([list(islice(several, 1))], iter(lambda: list(islice(several, _LOOKED_AT)), []))
        for some in groups:
            places = self._read([(chunk, files.place(chunk, name)) for chunk in some])
            for chunk, place in zip(some, places, strict=True):
                rows, nulls = (1, 1) if place is None else place.levels[0]
                row = 0
                if nulls == rows and place is not None:
                    continue
                if nulls:
                    (column,) = self._read([(chunk, files.column(chunk, name))])
                    if column.null_count == len(column):
                        continue
                    row = int(np.argmin(column.is_null()))
                (value,) = self._read([(chunk, files.rows(chunk, name, row, 1))])
                return int(self.chunk_starts[chunk]) + row, value[0].as_py()
        return None

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``."""
        if name not in self.types:
            return False
        if rows == self.num_rows and any(one.nulls for one in self.files.files):
            return any(name not in one.nulls for one in self.files.files)
        return not rows or self.first_value(name, rows) is not None

    def take(self, row: int, count: int = 1) -> pa.Table:
        """See ``Segment``; reads no others."""
        names = self.files.schema.names
        pieces = list(self._pieces(row, count))
        read = self._read(
            [(chunk, self.files.rows(chunk, name, first, rows)) for chunk, first, rows in pieces for name in names]
        )
        tables = [
            pa.Table.from_arrays(read[at : at + len(names)], schema=self.files.schema.remove_metadata())
            for at in range(0, len(read), max(len(names), 1))
        ]
        if not tables:
            return self.files.schema.remove_metadata().empty_table()
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def _pieces(self, row: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The chunks that some rows lie in: the first row of each there, and how many."""
        chunk = int(np.searchsorted(self.chunk_starts, row, side="right")) - 1
        while count > 0 and chunk < len(self.chunk_starts) - 1:
            first, end = self.chunk_starts[chunk : chunk + 2].tolist()
            there = min(count, end - row)
            yield chunk, row - first, there
            chunk, row, count = chunk + 1, row + there, count - there

    def _read(self, readers: Sequence[tuple[int, Asking[Any]]]) -> list[Any]:
        """What readers of some chunks return."""
        files = self.files
        found: list[Any] = files.run(together([files.named(chunk, reader) for chunk, reader in readers]))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _segment, (self.files, self._named_roots, self.place, self._appended, self._load)


def _segment(
    files: Files, image_roots: tuple[str, ...], place: tuple[object, int] | None, appended: bool, load: int
) -> ElsewhereSegment:
    return ElsewhereSegment(files, image_roots, place, appended=appended, load=load)


class _PartElsewhere(ColumnPart):
    """One column of files elsewhere.

    Args:
        files: The files.
        name: The column's.
        image_roots: See ``ColumnPart``.
        asked: The columns of the segment that were asked for, with whose heads this one's come.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        image_roots: tuple[str, ...],
        asked: WeakValueDictionary[str, _PartElsewhere],
    ) -> None:
        super().__init__(_no_column, files.starts, same_chunks=True, image_roots=image_roots)
        self.backing: RemoteMemory | None = files.backing
        self._files, self._name, self._asked = files, name, asked
        self._located: dict[int, tuple[int, tuple[int, ...]] | None] = {}

    def chunk(self, number: int) -> pa.Array:
        """The values of one record batch; reads them."""
        return self._files.run(self._files.named(number, self._files.column(number, self._name)))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart``."""
        return self._files.alike(chunks)

    def slices(self, wanted: Sequence[tuple[int, int, int]]) -> list[pa.Array]:
        """Some rows of some chunks, read at once."""
        files = self._files
        readers = [files.named(chunk, files.rows(chunk, self._name, row, count)) for chunk, row, count in wanted]
        found: list[pa.Array] = files.run(together(readers))
        return found

    def locate(self, number: int) -> tuple[int, tuple[int, ...]] | None:
        """See ``ColumnPart``; reads a head, and where lists end."""
        like, ahead = self._files.template(number)
        if like not in self._located:
            self.prepare([like])
        found = self._located[like]
        if found is None or not ahead:
            return found
        scale = 8 if column_type(self._files.schema.field(self._name).type).value_type == "bool" else 1
        return found[0] + scale * ahead, found[1]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Read what it takes to locate some chunks, of all columns that are read together."""
        readers, files = [], self._files
        numbers = list(dict.fromkeys(files.template(number)[0] for number in numbers))
        for part in dict.fromkeys([self, *filter(None, (one() for one in self._asked.valuerefs()))]):
            missing = [number for number in numbers if number not in part._located]
            readers += [files.named(number, part._locate(number)) for number in missing]
        files.run(together(readers))

    def _locate(self, number: int) -> Asking[None]:
        self._located[number] = yield from self._files.lying(number, self._name)


def _no_column() -> None:
    """What stands for a column that lies in no table."""
