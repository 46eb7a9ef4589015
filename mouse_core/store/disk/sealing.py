"""Files of rows that take no more, sealed one after the other while others are appended to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core.errors import StorageError
from mouse_core.files.writing import remove
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import WrittenFolder
from mouse_core.store.disk.manifest import Manifest, Sealed, Tail
from mouse_core.store.disk.reading import FolderRows
from mouse_core.store.disk.sealed import MOST_BYTES, pieces_of, write_segment
from mouse_core.store.disk.tail import TailFile
from mouse_core.store.disk.tails import TailSegment
from mouse_core.store.disk.upkeep import Limits


class SealingRows(FolderRows):
    """The rows of a folder that is written, in sealed segments and in files that wait to be sealed.

    Args:
        folder, told, budget, verify: See ``FolderRows``.
        limits: Which rows stay.
    """

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool, limits: Limits) -> None:
        super().__init__(folder, told, budget, verify)
        self.limits = limits
        self._folder = WrittenFolder(folder)
        # Files that take no more rows and are not sealed yet, in their order, with their segments.
        self._waiting: list[tuple[TailFile, TailSegment]] = []
        self._sealing: threading.Thread | None = None
        try:
            self._adopt(self._folder.manifest, self._folder.lease)
            self._recover()
        except BaseException:
            self._folder.close()
            raise

    def _recover(self) -> None:
        """Take over the files of rows that the last writer left, up to one that is not whole."""
        manifest, whole = self._folder.manifest, True
        tails: list[Tail] = []
        for said in manifest.tails:
            if not whole:
                break
            tail = TailFile.recover(self.folder_path / said.name)
            rows = tail.extent.count
            whole = said.rows is None or rows >= said.rows
            if rows:
                tails.append(said._replace(rows=rows))
                self._wait(tail, self.end)
                self.count += rows
            else:
                tail.close()
        if tuple(tails) != manifest.tails:
            self._folder.replace(replace(manifest, tails=tuple(tails)))
            self._folder.clean()

    @property
    def end(self) -> int:
        """How many rows were ever before the next one, those included that were dropped."""
        return self._folder.manifest.dropped + self.count

    def commit(self, *, sync: bool) -> None:
        """Let readers see the rows so far.

        Args:
            sync: Whether to wait until they are on the disk, and only then let readers see them.
        """
        for tail, _ in self._waiting:
            tail.commit(sync=sync)

    def tail_segment(self, tail: TailFile, first: int) -> TailSegment:
        """The rows of a file so far, of which ``first`` were before in the folder."""
        where, place = (self.folder_path, tail.path.name, first), (self._token, first)
        return TailSegment.of(tail.extent, self.schema.image_roots, place, where, partial(_show, weakref.ref(self)))

    def _wait(self, tail: TailFile, first: int) -> None:
        segment = self.tail_segment(tail, first)
        self._waiting.append((tail, segment))
        self.segments.append(segment)

    # ------------------------------------------------------------------ sealing

    def _seal_in_background(self) -> None:
        """Have the files that wait sealed by a thread, which ends with the last of them."""
        if self._waiting and (self._sealing is None or not self._sealing.is_alive()):
            self._sealing = threading.Thread(target=self._seal_quietly, name="mouse-sealing", daemon=True)
            self._sealing.start()

    def _seal_quietly(self) -> None:
        try:
            self._seal_all()
        except (StorageError, MemoryError):
            pass  # the rows are where they are; the next flush tries again, and closing says what is wrong

    def _wait_for_sealing(self) -> None:
        if self._sealing is not None:
            self._sealing.join()

    def seal_waiting(self) -> None:
        """Seal the files that wait, now; not while the lock is held.

        Raises:
            StorageError: They cannot be; the rows are where they are.
        """
        self._wait_for_sealing()
        self._seal_all()

    def _seal_all(self) -> None:
        while self._waiting:
            tail, segment = self._waiting[0]
            first = segment.place[1] if segment.place else 0
            sealed, manifest = self._written(self._pieces_of([segment]), appended=True)
            with self.lock:
                self._name_sealed(sealed, manifest.schemas, tails=self._folder.manifest.tails[1:])
                at = self.segments.index(segment)
                self.segments[at : at + 1] = self._segments_of(sealed, first)
                self._kept = None
                del self._waiting[0]
                tail.close()
                self._drop()
                self._folder.clean()

    def _write_segments(self, segments: Sequence[Segment]) -> None:
        """Write the rows of datasets behind all others, which are sealed."""
        first = self.end
        sealed, manifest = self._written(self._pieces_of(segments), appended=False)
        self._name_sealed(sealed, manifest.schemas)
        self.segments += self._segments_of(sealed, first)
        self.count += sum(one.rows for one in sealed)
        self._kept = None
        self._drop()

    def _drop(self) -> None:
        """Forget the oldest rows, where there are more than are to stay."""
        before = self._folder.manifest
        manifest = self.limits.retained(before, rows=self.count - before.rows)
        dropped = len(before.segments) - len(manifest.segments)
        if dropped:
            self._folder.replace(manifest)
            # Snapshots have a list of their own.
            del self.segments[:dropped]
            self.count -= manifest.dropped - before.dropped
            self._kept = None
            self._have(self._folder.lease)
            self._folder.clean()

    def _pieces_of(self, segments: Sequence[Segment]) -> Iterator[pa.Table]:
        """The rows of segments as those of the files that they are to be in."""
        for segment in segments:
            yield from pieces_of(segment, *self.limits.of_a_file(MOST_BYTES))

    def _written(self, tables: Iterable[pa.Table], *, appended: bool) -> tuple[list[Sealed], Manifest]:
        """Tables as sealed segments that no manifest names yet, and a manifest that knows their schemas."""
        manifest, written = self._folder.manifest, []
        try:
            for table in tables:
                if table.num_rows:
                    sealed, schema = write_segment(self.folder_path, self._folder.take_number(), table)
                    manifest, which = manifest.with_schema(schema)
                    written.append(sealed._replace(schema=which, appended=appended))
        except BaseException:
            for sealed in written:
                remove(self.folder_path / sealed.name)
            raise
        return written, manifest

    def _name_sealed(
        self, sealed: Sequence[Sealed], schemas: tuple[pa.Schema, ...], tails: tuple[Tail, ...] | None = None
    ) -> None:
        now = self._folder.manifest
        places = []
        for one in sealed:
            now, which = now.with_schema(schemas[one.schema])
            places.append(one._replace(schema=which))
        segments = (*now.segments, *places)
        tails = now.tails if tails is None else tails
        self._folder.replace(replace(now, about=self.schema.about(), segments=segments, tails=tails))

    def _segments_of(self, sealed: Sequence[Sealed], first: int) -> list[Segment]:
        made: list[Segment] = []
        for one in sealed:
            made.append(self.sealed_segment(self._folder.manifest, self._named(one), first))
            first += one.rows
        self._have(self._folder.lease)
        return made

    def _named(self, sealed: Sealed) -> Sealed:
        """What the manifest says of a segment that it names."""
        return next(one for one in reversed(self._folder.manifest.segments) if one.number == sealed.number)

    def _write_about(self) -> None:
        about = self.schema.about()
        if about != self._folder.manifest.about:
            self._folder.replace(replace(self._folder.manifest, about=about))


def _show(rows_of: weakref.ref[SealingRows]) -> None:
    """Let other processes see the rows, which may not be on the disk."""
    rows = rows_of()
    if rows is not None:
        with rows.lock:
            rows.commit(sync=False)
