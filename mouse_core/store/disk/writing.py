"""The rows of a folder as its one writer has them, who seals them in files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core.errors import ClosedError, ForkError
from mouse_core.store._intake import Appender
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import WrittenFolder
from mouse_core.store.disk.reading import FolderRows, Refusing
from mouse_core.store.disk.sealed import MOST_BYTES, pieces_of, write_segment
from mouse_core.store.disk.upkeep import Limits

if TYPE_CHECKING:
    from mouse_core.about.dataset import About


class _FolderAppender(Appender):
    """The rows that are in no sealed segment yet."""

    def __init__(self, rows: WrittenRows) -> None:
        super().__init__(rows.schema, rows.segments)
        self._rows_of = weakref.proxy(rows)

    def close(self) -> None:
        """Seal them in a file."""
        segment = self.segment()
        if segment is not None:
            self._rows_of.seal([segment.table], appended=True)
        self._extent = None
        self._rows_of._drop()


class WrittenRows(FolderRows):
    """Those of the writer.

    Args:
        folder, told, budget, verify: See ``FolderRows``.
        sync: See ``DatasetStore.open``.
        limits: Which rows stay.
    """

    def __init__(
        self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool, sync: str, limits: Limits
    ) -> None:
        super().__init__(folder, told, budget, verify)
        self._sync, self._limits, self._process = sync, limits, os.getpid()
        self._folder = WrittenFolder(folder)
        try:
            self._adopt(self._folder.manifest, self._folder.lease)
            self.appender = _FolderAppender(self)
        except BaseException:
            self._folder.close()
            raise
        _writers.add(self)

    def flush(self) -> None:
        """See ``DatasetStore.flush``."""
        with self.lock:
            self._check()
            self.appender.close()
            self._folder.clean()

    def close(self) -> None:
        """See ``DatasetStore.close``."""
        with self.lock:
            if not isinstance(self.appender, Refusing):
                self.flush()
                self._refuse(partial(_closed, self.folder_path))

    def take(self, segments: Sequence[Segment], said: Sequence[tuple[str, About]]) -> None:
        """Write the rows of segments into the folder; see ``Rows``."""
        with self.lock:
            self._check()
            schema = self.schema.merged(segments, said)
            self.appender.close()
            before, self.schema = self.schema, schema
            try:
                most = self._limits.of_a_file(MOST_BYTES)
                tables = (table for segment in segments for table in pieces_of(segment, *most))
                self.count += self.seal(tables, appended=False)
                self._drop()
            except BaseException:
                self.schema = before
                raise
            self.appender = _FolderAppender(self)

    def clear(self) -> None:
        """Forget all rows; the files go once the manifest no longer names them."""
        with self.lock:
            self._check()
            dropped = self._folder.manifest.dropped + self.count
            self._folder.replace(replace(self._folder.manifest, segments=(), tails=(), dropped=dropped))
            self.segments, self.count, self._kept = [], 0, None
            self.appender = _FolderAppender(self)
            self._folder.clean()

    def _drop(self) -> None:
        """Forget the oldest rows, where there are more than are to stay."""
        before = self._folder.manifest
        manifest = self._limits.retained(before)
        dropped = len(before.segments) - len(manifest.segments)
        if dropped:
            self._folder.replace(manifest)
            # Snapshots have a list of their own.
            del self.segments[:dropped]
            self.count -= manifest.dropped - before.dropped
            self._kept = None
            self._have(self._folder.lease)
            self._folder.clean()

    def seal(self, tables: Iterable[pa.Table], *, appended: bool) -> int:
        """Write tables as sealed segments behind those that there are, and have a manifest that names them.

        Returns:
            How many rows they have.
        """
        manifest, added = self._folder.manifest, []
        number = manifest.next_number
        for table in tables:
            if table.num_rows:
                sealed, schema = write_segment(self.folder_path, number, table)
                manifest, which = manifest.with_schema(schema)
                added.append(sealed._replace(schema=which, appended=appended))
                number += 1
        about = self.schema.about()
        if added or about != manifest.about:
            segments = (*manifest.segments, *added)
            self._folder.replace(replace(manifest, about=about, segments=segments, next_number=number))
            self.segments += [self._sealed_segment(self._folder.manifest, sealed) for sealed in added]
            self._kept = None
            self._have(self._folder.lease)
        return sum(sealed.rows for sealed in added)

    def _check(self) -> None:
        """Raise unless rows may be written from here."""
        if isinstance(self.appender, Refusing):
            raise self.appender.error()

    def _refuse(self, error: object) -> None:
        """Take no more rows."""
        self.appender = Refusing(error)  # type: ignore[assignment]
        self._folder.close()

    def let_go(self) -> None:
        """In a forked child: the parent is the one writer."""
        if not isinstance(self.appender, Refusing):
            self._refuse(partial(_forked, self.folder_path, self._process))


# Of the path alone: a store that its own errors refer to would keep files until Python looks for such circles.
def _closed(path: Path) -> ClosedError:
    return ClosedError(f"store {path}: expected an open one, found it closed")


def _forked(path: Path, process: int) -> ForkError:
    return ForkError(
        f"store {path}: expected to be written in process {process}, found the forked child {os.getpid()}; "
        f"DatasetStore.open({str(path)!r}) reads it there"
    )


_writers: weakref.WeakSet[WrittenRows] = weakref.WeakSet()


def _let_go() -> None:
    for writer in list(_writers):
        writer.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
