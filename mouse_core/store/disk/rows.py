"""The rows of a folder, for readers and for the one writer; readers see the rows after each flush of the writer.

The writer appends rows to mapped files, and seals, merges and drops files. Sealing and merging write new files and
replace the manifest; no sealed file changes. Rows are dropped one file at a time, the oldest first::

    max_rows=1000, files of 120 rows each: 8 files have 960 rows; with a ninth file, 1,080 rows would exceed max_rows
    -> the oldest file is dropped first, 840 rows stay, and at most 960 rows exist when the next file is full

If an earlier writer had no limit, a file can be much larger than an eighth of the limit. When the folder is opened,
such a file is rewritten as smaller files::

    max_rows=300, one file of 400 rows   ten files of 37 rows and one of 30; the oldest three are dropped

Eight or more neighbouring files are merged if none of them is as large as all others together. As a result, each copy
moves a row to a file that is at least twice as large as the row's previous file::

    sizes 64, 9, 8, 1, 1, 1, 1, 1, 1, 1, 1   the last eight files become one file of size 8
    sizes 64, 9, 8, 8                        too few; eight files of size 8 would become one file of size 64
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._base.identity import common_start
from mouse_core._base.locks import uninterrupted
from mouse_core.columns.appended import Extent, TailColumn
from mouse_core.errors import ClosedError, ConfigError, DataError, ForkError, StorageError
from mouse_core.files.writing import remove
from mouse_core.spec import check_alignment
from mouse_core.store._intake import StoreBackend, StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import Lease, Manifest, ReadFolder, Sealed, Shared, Tail, WrittenFolder, repairable
from mouse_core.store.disk.segments import (
    LAYOUTS,
    MOST_BYTES,
    SealedFile,
    SealedSegment,
    TailSegment,
    pieces_of,
    together,
    write_segment,
)
from mouse_core.store.disk.tail import TailFile, TailReader
from mouse_core.store.snapshot import shows_no_join

if TYPE_CHECKING:
    from mouse_core.metadata import DatasetMetadata


def settled(told: StoreSchema, manifest: Manifest, label: str) -> StoreSchema:
    """Return the schema of a manifest's rows; raise SchemaError if the schema with which the store was opened
    contradicts the manifest.
    """
    metadata = manifest.metadata
    told = told.declare(manifest.columns, label)
    if told.told.alignment is None and metadata.alignment is not None:
        told = copy.copy(told)
        told.alignment = check_alignment(metadata.alignment)
    examples = [Segment(pa.Table.from_batches([], schema)) for schema in manifest.schemas]
    schema = told.merged(examples, [(label, metadata)] * max(len(examples), 1))
    schema.all_say_alignment &= metadata.alignment is not None or not examples
    return schema


class FolderRows(StoreBackend):
    """Rows in a folder; the schema and the segments of the rows come from the manifest.

    Args:
        folder: The folder.
        told: The schema from the store's arguments, which the rows must match.
        budget: The limit of memory for dense copies.
        verify: Whether to compare the pages of files with their checksums when rows are first read.
    """

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool) -> None:
        super().__init__(told, budget, path=str(folder))
        self.folder_path = folder
        self._told, self._verify = told, verify
        # See ``Segment.place``.
        self._token = object()
        # Number of rows in sealed segments, including dropped rows.
        self._end = 0
        self._together: list[Segment] = []
        # The manifest that the present segments come from, and the lease that keeps their files.
        self._taken, self._shared = Manifest(), Shared(Lease())
        self._videos: Any = None

    def shown(self) -> list[Segment]:
        """See ``StoreBackend``; here, many sealed files are joined to one segment."""
        shown = together(self.segments, self._together)
        # Segments of one file are left out, since this list would keep their files after a drop.
        self._together = [one for one in shown if len(one.sealed_files) > 1]
        return shown

    def _adopt(self, manifest: Manifest, lease: Lease) -> None:
        """Set columns and sealed segments from a manifest; known segments are reused."""
        self.schema = settled(self._told, manifest, f"store {self.path}")
        self._take_over(manifest, lease)

    def _take_over(self, manifest: Manifest, lease: Lease, waiting: Sequence[Segment] = ()) -> None:
        """Set the visible segments: the sealed segments of a manifest, followed by ``waiting``. Known segments are
        reused.
        """
        before, self._taken = self._taken, manifest
        same = common_start(before.segments, manifest.segments) if before.dropped == manifest.dropped else 0
        last = self.segments[same - 1].place if same else None
        first = manifest.dropped if last is None else last[1] + self.segments[same - 1].num_rows
        known = {one.place: one for one in self.segments[same:] if isinstance(one, SealedSegment)}
        segments: list[Segment] = self.segments[:same]
        for sealed in manifest.segments[same:]:
            one = known.get((self._token, first))
            segments.append(
                one if one and one.sealed_files[0].sealed == sealed else self.sealed_segment(manifest, sealed, first)
            )
            first += sealed.rows
        self._have(lease, before, manifest)
        self.segments[:] = [*segments, *waiting]
        self._end, self._kept = first, None

    def _have(self, lease: Lease, before: Manifest, now: Manifest) -> None:
        """Hold the lease of a state. If only the previous state names the files of a segment, the segment continues to
        hold the lease of the previous state.
        """
        if now.segments[: len(before.segments)] != before.segments:
            shared, named = Shared(self._shared.lease), now.file_numbers()
            for file in (file for segment in self.segments for file in segment.sealed_files):
                if file.sealed.number not in named:
                    file.kept = shared
        self._shared.lease = lease

    def sealed_segment(self, manifest: Manifest, sealed: Sealed, first: int) -> SealedSegment:
        """Return a sealed segment; ``first`` rows of the folder precede the segment."""
        schema = manifest.schemas[sealed.schema]
        file = SealedFile(self.folder_path, sealed, schema, first, manifest.identity, verify=self._verify)
        file.kept = self._shared
        roots, videos = self.schema.image_roots, manifest.metadata.videos
        if not videos:
            return SealedSegment([file], roots, self._token)
        from mouse_core.video.frames import VideoFiles  # imported only for rows with videos

        if self._videos is None or self._videos.files != videos:
            self._videos = VideoFiles(videos)
        return SealedSegment([file], (os.path.realpath(self.folder_path), *roots), self._token, self._videos)

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process opens the folder for reading.
        return ReadRows, (self.folder_path, self._told, self.budget, self._verify)


class ReadRows(FolderRows):
    """The rows of a folder that is opened for reading."""

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool) -> None:
        super().__init__(folder, told, budget, verify)
        self._folder = ReadFolder(folder)
        self._tails: list[TailReader] = []
        self._sealed = 0
        # A segment of each tail's rows that were read so far.
        self._shown_tails: list[TailSegment] = []
        self.error = partial(_refused, self.folder_path)
        self._follow()

    def seen(self) -> Self:
        """Return this backend, updated with the rows that the writer has flushed since the last call."""
        with self.lock:
            if self._folder.look():
                self._follow()
            self._look_at_tails()
        return self

    @property
    def end(self) -> int:
        """Number of rows ever written, including dropped rows."""
        return self._folder.manifest.dropped + self.count

    def _follow(self) -> None:
        """Set segments and tails from the manifest."""
        while True:
            manifest = self._folder.manifest
            known = {(tail.path, tail.layout.identity): tail for tail in self._tails}
            places = [(self.folder_path / tail.name, tail.identity) for tail in manifest.tails]
            try:
                with repairable(self.folder_path):
                    self._tails = [known.get(place) or TailReader(place[0], identity=place[1]) for place in places]
                break
            except (ConfigError, DataError) as error:
                # The tail was sealed after the manifest was read, or another writer reused the file's name.
                if not self._folder.look():
                    if isinstance(error, DataError):
                        raise
                    files = [str(path) for path, _ in places]
                    raise DataError(f"store {self.path}: expected the files {files}, found only some of them") from None
        self._adopt(manifest, self._folder.lease)
        self._sealed, self._shown_tails = len(self.segments), []
        self._look_at_tails()

    def _look_at_tails(self) -> None:
        """Read the committed rows of tails, up to the first tail in which rows are missing."""
        first = self._end
        for number, (tail, said) in enumerate(zip(self._tails, self._folder.manifest.tails, strict=True)):
            with repairable(self.folder_path):
                rows = tail.committed()
            if said.rows is not None:
                rows = min(rows, said.rows)
            if rows and (number == len(self._shown_tails) or self._shown_tails[number].num_rows < rows):
                where = (self.folder_path, said.name, first, tail.layout.identity, self._folder.manifest.identity)
                place = (self._token, first)
                extent, roots = tail.extent(rows), self.schema.image_roots
                segment = TailSegment.of(extent, roots, place, where, lease=self._folder.lease)
                self._shown_tails[number:] = [segment]
                self._kept = None
            first += rows
            if rows != said.rows:
                break
        self.segments[self._sealed :] = self._shown_tails
        self.count = first - self._folder.manifest.dropped

    def close(self) -> None:
        """Release the manifest; the next access opens the manifest again."""
        self._folder.close()


def _refused(path: Path) -> ConfigError:
    return ConfigError(
        f"store {path}: expected a store that was opened for writing, found a store opened for reading; "
        f"DatasetStore.open({str(path)!r}, 'a') opens it for writing"
    )


# The first file of rows is small, since many stores are small; each next file is twice as large, up to a sealed
# segment.
_FIRST_BYTES, _FIRST_ROWS = 1 << 20, 64
# Rows up to this size in bytes change few pages of a file between two flushes.
_FEW_BYTES = 1 << 10
# The rows of one call go into one file, up to this size in bytes.
_MOST_TOGETHER = 1 << 30


PARTS = 8
"""Smallest number of files that hold the rows kept by ``max_rows`` or ``max_bytes``; rows are dropped one file at a
time.
"""

LEAST_BYTES = 1 << 16
"""Smallest allowed ``max_bytes``, because even the smallest file of rows occupies several pages."""

_FEWEST = 8


@dataclass(frozen=True)
class Limits:
    """The limit of rows or bytes of a folder; above the limit, only the newest rows are kept.

    Args:
        max_rows: The largest number of rows; None for no limit.
        max_bytes: The largest total size of the files in bytes; None for no limit.

    Raises:
        ConfigError: A limit is invalid.
    """

    max_rows: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            least = PARTS if name == "max_rows" else LEAST_BYTES
            if limit is not None and (type(limit) is not int or limit < least):
                raise ConfigError(f"{name}: expected an integer of at least {least}, found {limit!r:.80}")

    def of_a_file(self, most_bytes: int) -> tuple[int, int | None]:
        """Return the largest allowed size of a file, in bytes and in rows. With this size, dropping one file drops only
        a small part of the rows.
        """
        size = most_bytes if self.max_bytes is None else min(most_bytes, self.max_bytes // PARTS)
        return size, None if self.max_rows is None else self.max_rows // PARTS

    def too_many(self, files: Sequence[tuple[int, int]], rows: int = 0, size: int = 0) -> int:
        """Return how many of the oldest files to drop; the newest file stays.

        Args:
            files: The number of rows and the size in bytes of each file, the oldest first.
            rows: Number of rows outside of `files` that count towards the limit.
            size: Size in bytes of rows outside of `files` that counts towards the limit.
        """
        rows, size = rows + sum(one for one, _ in files), size + sum(one for _, one in files)
        for number, (of_rows, of_bytes) in enumerate(files[:-1]):
            if not self._is_above(rows, size):
                return number
            rows, size = rows - of_rows, size - of_bytes
        return max(0, len(files) - 1)

    def is_large(self, rows: int, size: int) -> bool:
        """Whether a file is larger than these limits allow for one file; sizes in bytes are approximate."""
        return self._is_above(rows * PARTS, size // 3 * PARTS)

    def _is_above(self, rows: int, size: int) -> bool:
        too_long = self.max_rows is not None and rows > self.max_rows
        return too_long or (self.max_bytes is not None and size > self.max_bytes)


ALL = Limits()
"""Limits that keep all rows."""


def small_run(
    segments: Sequence[Sealed], most_bytes: int, most_rows: int | None = None, damaged: Set[int] = frozenset()
) -> range:
    """Return the range of neighbouring files to merge into one file; empty if nothing is to be merged.

    Only the newest files are examined, as many as fit into one segment.

    Args:
        segments: The sealed segments.
        most_bytes: The largest size of a segment in bytes.
        most_rows: The largest number of rows of a segment; None: any number.
        damaged: The file numbers of damaged segments, which are never merged.
    """
    found, size, rows, largest = range(0), 0, 0, 0
    for first in range(len(segments) - 1, -1, -1):
        one, last = segments[first], segments[-1]
        size, rows, largest = size + one.bytes, rows + one.rows, max(largest, one.bytes)
        unlike = (one.schema, one.appended, one.load) != (last.schema, last.appended, last.load)
        if unlike or one.number in damaged or size > most_bytes or (most_rows is not None and rows > most_rows):
            break
        if len(segments) - first >= _FEWEST and 2 * largest <= size:
            found = range(first, len(segments))
    return found


# The last sealing thread of each folder; a thread whose store was released ends after its current file.
_sealing: weakref.WeakValueDictionary[str, threading.Thread] = weakref.WeakValueDictionary()


def wait_for_sealing(folder: Path) -> None:
    """Wait until no thread of this process seals files of a folder."""
    thread = _sealing.get(str(folder))
    if thread is not None and thread.is_alive():
        thread.join()


def seal_in_background(rows: WrittenRows, folder: Path) -> None:
    """Start a thread that calls ``rows.seal_one`` until it returns False. While Python exits, no thread is started.

    At exit, Python waits for the file in progress, because stopping a thread inside Arrow would crash the process.
    """
    thread = threading.Thread(target=_seal_quietly, args=(weakref.ref(rows),), name="mouse-sealing")
    # Registered before the thread starts: after an interrupt in between, the folder's next writer still waits for it.
    rows.sealing = _sealing[str(folder)] = thread
    with suppress(RuntimeError):
        thread.start()


def _seal_quietly(rows_of: weakref.ref[Any]) -> None:
    # Between two files the store may be released, or the process may end.
    while threading.main_thread().is_alive() and (rows := rows_of()) is not None:
        try:
            if not rows.seal_one():
                return
        except (DataError, StorageError, MemoryError):
            return  # the rows are unchanged; the next flush tries again, and closing reports the error
        finally:
            del rows


class WrittenRows(FolderRows):
    """The rows of a folder that is opened for writing: sealed segments, and files that wait to be sealed.

    Args:
        folder, told, budget, verify: See ``FolderRows``.
        sync: See ``DatasetStore.open``.
        limits: The limit of rows and bytes.
        layout: The layout of new sealed files; None: the layout of the newest sealed file.
    """

    def __init__(
        self,
        folder: Path,
        told: StoreSchema,
        budget: DenseBudget,
        verify: bool,
        sync: str,
        limits: Limits,
        layout: str | None,
    ) -> None:
        super().__init__(folder, told, budget, verify)
        self.sync, self.limits = sync, limits
        self._folder = WrittenFolder(folder)
        self._layout = layout or self._folder.manifest.layout
        self._process = os.getpid()
        # Files that are closed for new rows but not sealed yet, in order, with their segments.
        self._waiting: list[tuple[TailFile, TailSegment]] = []
        self.sealing: threading.Thread | None = None
        self._looked_at: tuple[Sequence[Sealed], range] = (), range(0)
        # The numbers of files that were found damaged; these files are never merged.
        self._damaged: set[int] = set()
        # The open file, to which rows are appended (``_first`` rows precede it); and a new file whose first row may
        # still be rejected.
        self.tail: TailFile | None = None
        self._candidate: TailFile | None = None
        self._number = self._first = 0
        # Recordings to interrupt before the rows are sealed, in the order of their registration.
        self._recordings: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        try:
            self._recover()
            self._adopt(self._folder.manifest, self._folder.lease)
            self.count = self._end - self._folder.manifest.dropped
        except BaseException:
            self._folder.close()
            raise
        self._folder.note_opened(self.end)
        columns = pa.schema(list(self.schema.declared.values()))
        if columns != self._folder.manifest.columns:
            self._replace(replace(self._folder.manifest, columns=columns))
        _writers.add(self)
        self._keep_newest()
        self._seal_in_background()

    def _recover(self) -> None:
        """Seal the rows in the previous writer's tail files, up to the first file in which rows are missing."""
        tables: list[pa.Table] = []
        for said in self._folder.manifest.tails:
            with repairable(self.folder_path):
                tail = TailReader(self.folder_path / said.name, identity=said.identity)
                rows = tail.left()
            tables.append(tail.extent(rows).to_table(rows))
            tail.close()
            if said.rows is not None and rows < said.rows:
                break
        if tables:
            sealed, known = self._written(self._pieces_of(map(Segment, tables), [0] * len(tables)), appended=True)
            self._folder.replace(replace(known, segments=(*known.segments, *sealed), tails=()))
            self._folder.clean()

    def _replace(self, manifest: Manifest, waiting: Sequence[tuple[TailFile, TailSegment]] | None = None) -> None:
        """Replace the manifest. The visible segments become the sealed segments of the new manifest, followed by the
        segments of files that wait to be sealed.

        Args:
            manifest: The new manifest.
            waiting: The files that wait to be sealed; None: the waiting files are unchanged.
        """
        self._folder.replace(manifest)
        for _, segment in self._waiting:  # also those that go: their files can be removed while a frame refers to them
            segment.lease = self._folder.lease
        self._waiting = self._waiting if waiting is None else list(waiting)
        self._take_over(self._folder.manifest, self._folder.lease, [segment for _, segment in self._waiting])

    @property
    def end(self) -> int:
        """Number of rows ever written, including dropped rows."""
        return self._folder.manifest.dropped + self.count

    def tail_segment(self, tail: TailFile, first: int) -> TailSegment:
        """Return the present rows of a tail file as a segment; ``first`` rows of the folder precede the file."""
        identities = tail.layout.identity, self._folder.manifest.identity
        where, place = (self.folder_path, tail.path.name, first, *identities), (self._token, first)
        show, lease = partial(_show, weakref.ref(self)), self._folder.lease
        return TailSegment.of(tail.extent, self.schema.image_roots, place, where, show, lease)

    # ------------------------------------------------------------------ sealing

    def _seal_in_background(self) -> None:
        """Start a thread that seals all waiting files and then ends."""
        if (self._waiting or self._small()) and not self.is_sealing():
            seal_in_background(self, self.folder_path)

    def is_sealing(self) -> bool:
        """Whether a thread is sealing files of the folder."""
        return self.sealing is not None and self.sealing.is_alive()

    def seal_one(self) -> bool:
        """Seal one waiting file or merge small files, and return whether a file was sealed or files were merged.

        Raises:
            StorageError: The file cannot be written; the rows are unchanged.
        """
        if self._seal_next():
            return True
        return self._merge_next()

    def _wait_for_sealing(self) -> None:
        if self.sealing is not None and self.is_sealing():  # a thread that never started cannot be joined
            self.sealing.join()

    def seal_waiting(self) -> None:
        """Seal the waiting files now; the caller must not hold the lock.

        Raises:
            StorageError: A file cannot be written; the rows are unchanged.
        """
        self._wait_for_sealing()
        while self._seal_next():
            pass

    def _seal_next(self) -> bool:
        """Seal the first waiting file; return whether a file was waiting."""
        waiting = self._waiting[:1]
        if not waiting:
            return False
        sealed, manifest = self._written(self._pieces_of([waiting[0][1]], [0]), appended=True)
        with self.lock:
            if self._waiting[:1] != waiting:  # its rows were dropped meanwhile
                self._remove(sealed)
            else:
                uninterrupted(partial(self._have_sealed, waiting[0][0], sealed, manifest))
        return True

    def _have_sealed(self, tail: TailFile, sealed: Sequence[Sealed], manifest: Manifest) -> None:
        """Replace the first waiting file by sealed segments."""
        now, places = self._folder.manifest.with_schemas(sealed, manifest.schemas)
        known = replace(now, metadata=self.schema.metadata(), segments=(*now.segments, *places), tails=now.tails[1:])
        self._replace(known, self._waiting[1:])
        # For a process that receives an older snapshot.
        with suppress(StorageError):
            tail.commit()
        tail.close()
        self.drop()
        self._folder.clean()

    def drop(self) -> None:
        """Drop the oldest files until the limit is met; the open file is counted as if it were full."""
        before = self._folder.manifest
        files = [(one.rows, one.bytes) for one in before.segments]
        files += [(tail.extent.count, tail.nbytes) for tail, _ in self._waiting]
        tail = self.tail
        number = self.limits.too_many(files, *((0, 0) if tail is None else (tail.extent.rows, tail.nbytes)))
        if not number:
            return
        gone, tails = sum(rows for rows, _ in files[:number]), max(0, number - len(before.segments))
        after = replace(before, segments=before.segments[number:], tails=before.tails[tails:])
        closed = self._waiting[:tails]
        try:
            # The new rows must be on disk before the old rows are dropped, in case of a power cut.
            self.commit()
            self._replace(replace(after, dropped=before.dropped + gone), self._waiting[tails:])
        except StorageError:
            return  # the rows are dropped when the disk has room; an error would claim that the new rows do not count
        for waiting, _ in closed:
            waiting.close()
        self.count -= gone
        self._folder.clean()

    # ------------------------------------------------------------------ merging

    def _small(self) -> range:
        """Return the range of neighbouring files to merge; see ``small_run``."""
        segments = self._folder.manifest.segments
        if segments is not self._looked_at[0]:  # every flush calls this method
            self._looked_at = segments, small_run(segments, *self.limits.of_a_file(MOST_BYTES), self._damaged)
        return self._looked_at[1]

    def _merge_next(self) -> bool:
        """Merge small neighbouring files; return whether files were merged."""
        with self.lock:
            run, before = self._small(), self._folder.manifest
            # While this list holds a file, the file exists, even if another thread drops it meanwhile.
            files = [file for one in self.segments[run.start : run.stop] for file in one.sealed_files]
        if not run:
            return False
        parts = before.segments[run.start : run.stop]
        tables = [table for _ in run if (table := self._whole(files.pop(0))) is not None]
        if len(tables) < len(run):
            return True  # only a reader of the damaged file gets the error
        sealed, _ = write_segment(self.folder_path, self._folder.take_number(), pa.concat_tables(tables), self._layout)
        sealed = sealed._replace(schema=parts[0].schema, appended=parts[0].appended, load=parts[0].load)
        with self.lock:
            now = self._folder.manifest
            at = next((place for place, one in enumerate(now.segments) if one == parts[0]), -1)
            if at < 0 or now.segments[at : at + len(parts)] != parts:  # some files were dropped meanwhile
                self._remove([sealed])
                return True
            self._replace(replace(now, segments=(*now.segments[:at], sealed, *now.segments[at + len(parts) :])))
            self._folder.clean()
        return True

    def _whole(self, file: SealedFile) -> pa.Table | None:
        """Return the rows of a file; None if the file is damaged, because damaged rows must not get valid checksums."""
        try:
            return SealedFile(self.folder_path, file.sealed, file.schema, file.first, verify=True).table
        except DataError:
            self._damaged.add(file.sealed.number)
            self._looked_at = (), range(0)
            return None

    def _pieces_of(self, segments: Iterable[Segment], loads: Sequence[int]) -> Iterator[tuple[pa.Table, int]]:
        """Yield the rows of segments as one table for each file to write, with the file's ``load``."""
        for segment, load in zip(segments, loads, strict=True):
            for piece in pieces_of(segment, *self.limits.of_a_file(MOST_BYTES)):
                yield piece, load

    def _written(
        self, pieces: Iterable[tuple[pa.Table, int]], *, appended: bool, only_newest: bool = False
    ) -> tuple[list[Sealed], Manifest]:
        """Write tables as sealed segments that no manifest names yet; return the segments, and a manifest with their
        schemas.

        With ``only_newest``, the oldest segments above the limit are removed as soon as newer segments are written. The
        manifest counts the removed rows as dropped.
        """
        manifest, written = self._folder.manifest, []
        try:
            for table, load in pieces:
                if table.num_rows:
                    sealed, schema = write_segment(self.folder_path, self._folder.take_number(), table, self._layout)
                    manifest, which = manifest.with_schema(schema)
                    written.append(sealed._replace(schema=which, appended=appended, load=load))
                    files = [(one.rows, one.bytes) for one in written]
                    for _ in range(self.limits.too_many(files) if only_newest else 0):
                        self._remove(written[:1])
                        manifest = replace(manifest, dropped=manifest.dropped + written.pop(0).rows)
        except BaseException:
            self._remove(written)
            raise
        return written, manifest

    def _remove(self, written: Sequence[Sealed]) -> None:
        """Remove files that have never been named in a manifest."""
        for sealed in written:
            remove(self.folder_path / sealed.name)

    def _keep_newest(self) -> None:
        """Cut large files, and then drop the rows above the limit, which an earlier writer can have left."""
        with self.lock, suppress(StorageError):  # the rows are dropped when the disk has room
            self.drop()
            for place, one in reversed(list(enumerate(self._folder.manifest.segments))):
                if one.rows > 1 and self.limits.is_large(one.rows, one.bytes):
                    self._cut(place, one)
            self.drop()

    def _cut(self, place: int, one: Sealed) -> None:
        """Rewrite the rows of a sealed file as several smaller files."""
        table = self._whole(self.segments[place].sealed_files[0])
        if table is None:
            return  # the file is dropped once all its rows exceed the limit
        sealed, now = self._written(self._pieces_of([Segment(table)], [one.load]), appended=one.appended)
        self._replace(replace(now, segments=(*now.segments[:place], *sealed, *now.segments[place + 1 :])))

    # ------------------------------------------------------------------ operations of the store

    def flush(self) -> None:
        """See ``DatasetStore.flush``."""
        with self.lock:
            self.check_open()
            self.commit()
            self._seal_in_background()
            self._folder.clean()

    def close(self) -> None:
        """See ``DatasetStore.close``."""
        if self.error is not None:
            return
        with ExitStack() as ends:
            ends.callback(self._seal_and_let_go)  # also if a recording cannot be ended
            for recording in reversed(list(self._recordings)):
                ends.callback(recording.interrupt)

    def interrupt_on_close(self, recording: Any) -> None:
        """See ``DatasetStore.interrupt_on_close``."""
        self._recordings[recording] = None

    def _seal_and_let_go(self) -> None:
        while True:
            with self.lock:
                if self.error is not None:
                    return
                # The sealing thread must end before another process may write.
                if self._is_sealed() and not self.is_sealing():
                    uninterrupted(self._finish)
                    return
                self.commit()
                uninterrupted(self.seal_open)
            self.seal_waiting()

    def _finish(self) -> None:
        self._folder.have_manifest()
        metadata = self.schema.metadata()
        if metadata != self._folder.manifest.metadata:
            self._replace(replace(self._folder.manifest, metadata=metadata))
        self._refuse(partial(_closed, self.folder_path))

    def _is_sealed(self) -> bool:
        """Whether all rows are in sealed segments; another thread can append rows during this call."""
        return not self._waiting and self.tail is None

    def take(self, segments: Sequence[Segment], said: Sequence[tuple[str, DatasetMetadata]]) -> None:
        """Write the rows of segments to sealed files; see ``StoreBackend``."""
        while True:
            with self.lock:
                self.check_open()
                schema = self.schema.merged(segments, said)
                if self._is_sealed():
                    loads = self._loads_of(segments, schema)
                    pieces = self._pieces_of(segments, loads)
                    sealed, manifest = self._written(pieces, appended=False, only_newest=True)
                    uninterrupted(partial(self._take_sealed, sealed, manifest, schema))
                    return
                uninterrupted(self.seal_open)
            self.seal_waiting()

    def _loads_of(self, segments: Sequence[Segment], schema: StoreSchema) -> list[int]:
        """Return the identifier ``load`` of each dataset. If rows mark the end of an episode between a dataset and the
        previous dataset, both have the same ``load``; otherwise, the dataset gets a new identifier.
        """
        known = self._folder.manifest.segments
        newest = max((one.load for one in known), default=0)
        before: Segment | None = self.segments[-1] if known else None
        current = known[-1].load if known else 0
        loads = []
        for segment in segments:
            if segment.num_rows:
                if not current or before is None or shows_no_join(before, segment, schema.config()):
                    newest = current = newest + 1
                before = segment
            loads.append(current)
        return loads

    def _take_sealed(self, sealed: Sequence[Sealed], manifest: Manifest, schema: StoreSchema) -> None:
        """Add new sealed segments to the manifest, after all other segments.

        Args:
            sealed: The segments.
            manifest: The manifest with the segments' schemas. If this manifest counts more dropped rows than the
                present manifest, all rows before the new segments are dropped, because the new rows alone exceed the
                limit. The difference of both counts is the number of new rows that were already dropped.
            schema: The schema of all rows.
        """
        now, places = self._folder.manifest.with_schemas(sealed, manifest.schemas)
        gone, before, self.schema = manifest.dropped - now.dropped, self.schema, schema
        if gone:
            now = replace(now, segments=(), dropped=self.end + gone)
        try:
            self._replace(replace(now, metadata=schema.metadata(), segments=(*now.segments, *places)))
        except BaseException:
            self.schema = before
            raise
        self.count = sum(one.rows for one in sealed) + (0 if gone else self.count)
        self.drop()

    def clear(self) -> None:
        """Drop all rows; the files are removed when no reader needs them."""
        with self.lock:
            self.check_open()
        self._wait_for_sealing()
        with self.lock:
            uninterrupted(self._forget)

    def _forget(self) -> None:
        self._replace(replace(self._folder.manifest, segments=(), tails=(), dropped=self.end), [])
        self.count, self._extent, self.tail = 0, None, None
        self._folder.clean()

    # ------------------------------------------------------------------ the open file

    def open_segment(self) -> Segment | None:
        """See ``StoreBackend``."""
        return None if self.tail is None or not self.open_count else self.tail_segment(self.tail, self._first)

    def seal_open(self) -> None:
        """Close the open file, which is then sealed in the background; later rows are appended to a new file."""
        if self.tail is not None and self.open_count:
            segment = self.tail_segment(self.tail, self._first)
            self._waiting.append((self.tail, segment))
            self.segments.append(segment)
            self._seal_in_background()
        elif self.tail is not None:
            # No row came, because of an interrupt or a full disk.
            manifest, name = self._folder.manifest, self.tail.path.name
            tails = tuple(one for one in manifest.tails if one.name != name)
            if tails != manifest.tails:
                self._replace(replace(manifest, tails=tails))
            self.tail.remove()
        self.tail = self._extent = None

    def _extend(self, columns: Mapping[str, Any], n: int) -> None:
        super()._extend(columns, n)
        if self.sync == "append":
            self.commit()

    def _make(self, columns: Mapping[str, TailColumn], before: int, coming: int) -> Extent:
        if self._candidate is not None:  # created for a row that was rejected
            self._candidate.remove()
            self._candidate = None
        row_bytes = max(1, sum(column.row_bytes for column in columns.values()))
        keeps_all, (most_bytes, most_rows) = self.limits == ALL, self.limits.of_a_file(MOST_BYTES)
        fewest = 16 if keeps_all else 1  # large rows are dropped one by one
        most = min(max(fewest, most_bytes // row_bytes), most_rows or _MOST_TOGETHER)
        usual = min(max(_FIRST_ROWS, _FIRST_BYTES // row_bytes, 2 * before), most)
        together = max(16, _MOST_TOGETHER // row_bytes) if keeps_all else most
        rows = max(usual, min(coming, together))
        self._number = self._folder.take_number()
        often = self.sync != "none" and row_bytes <= _FEW_BYTES
        path = self.folder_path / Tail(self._number, 0).name
        self._candidate = TailFile.create(path, columns, rows, waits=self.sync != "none", often=often)
        extent = self._candidate.extent
        extent.most_bytes, extent.keeps_together = most_bytes, keeps_all
        return extent

    def _has_room(self, extent: Extent, coming: int) -> bool:
        # The rows of one call lie in one file, so that either all of them count or none. Exception: a limit drops old
        # rows one file at a time, and these rows are too many for one file.
        room = extent.rows - extent.count
        return room >= max(coming, 1) or (room > 0 and self.limits != ALL and coming > extent.rows // 2)

    def _open(self, extent: Extent) -> None:
        if extent is not self._extent:
            # The manifest and memory must name the same files, even after an interrupt at any line.
            uninterrupted(partial(self._open_new, extent))

    def _open_new(self, extent: Extent) -> None:
        tail, self._candidate = self._candidate, None
        assert tail is not None
        assert tail.extent is extent
        known = dict(self.schema.arrow_types)
        # Rows of an unfinished call are not part of ``end`` yet.
        first = self.end if self._extent is None else self._first + self.open_count
        try:
            self._know(extent)
            self._name_tail(self._number, tail)
        except BaseException:
            self.schema.arrow_types = known
            if self._folder.may_name(self._number):
                tail.close()
            else:
                tail.remove()
            raise
        self.seal_open()
        self.tail, self._extent, self._first = tail, extent, first
        self.drop()

    def _name_tail(self, number: int, tail: TailFile) -> None:
        """Replace the manifest by a manifest that names a new tail file; the previous tail file is closed for new
        rows.
        """
        manifest, schema = self._folder.manifest.with_schema(tail.extent.to_table(0).schema)
        tails = list(manifest.tails)
        if tails and tails[-1].rows is None:
            last = tails.pop()
            # Without an open file, the last file waits to be sealed, because sealing failed or is not finished.
            rows = self._waiting[-1][1].num_rows if self.tail is None and self._waiting else self.open_count
            tails += [last._replace(rows=rows)] if rows else []
        tails.append(Tail(number, schema, identity=tail.layout.identity))
        self._replace(replace(manifest, metadata=self.schema.metadata(), tails=tuple(tails)))

    def commit(self) -> None:
        """Make the present rows visible to readers; unless the store's ``sync`` is "none", sync the rows to the disk
        first.
        """
        if self.sync == "flush":  # with "append", each record of the log is synced
            self._folder.sync_clients()
        for tail, _ in self._waiting:
            tail.commit()
        if self.tail is not None:
            self.tail.commit()
        self._folder.check_there()
        self._folder.have_manifest()

    # ------------------------------------------------------------------ the right to write

    def recount(self) -> None:
        """See ``StoreBackend``; the rows that are valid after the interrupt also become visible to readers."""
        super().recount()
        if self.tail is not None:
            try:
                self.tail.extent.settle()
            except StorageError:
                super().recount()  # the objects of these rows cannot be written, so the rows are removed

    def _refuse(self, error: Callable[[], Exception]) -> None:
        """Make every later append raise ``error``."""
        self.error, self._extent, self.tail = error, None, None
        self._folder.close()

    def let_go(self) -> None:
        """Stop writing in a forked child process, because the parent process remains the only writer of the folder."""
        if self.error is not None:
            return
        # The parent continues to append to the same file.
        segment = self.open_segment()
        self.segments += [] if segment is None else [segment]
        self._refuse(partial(_forked, self.folder_path, self._process))


class SyncedRows(WrittenRows):
    """The rows of a folder whose writer commits each row before ``append`` returns."""

    def append(self, row: Mapping[str, Any]) -> None:
        """See ``StoreBackend``."""
        super().append(row)
        self.commit()


def _show(rows_of: weakref.ref[WrittenRows]) -> None:
    """Make the rows visible to other processes; if ``sync`` requires it, sync the rows to the disk first."""
    rows = rows_of()
    if rows is not None:
        with rows.lock:
            rows.commit()


_SYNC = ("none", "flush", "append")


def open_rows(
    path: str | os.PathLike[str],
    mode: str,
    sync: str,
    verify: bool,
    told: StoreBackend,
    limits: Limits = ALL,
    layout: str | None = None,
) -> StoreBackend:
    """Return a backend of the rows in a folder, for a store that has the schema ``told`` and no rows yet."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"open: expected the path of a folder, found {path!r:.80}")
    if mode not in ("r", "a"):
        raise ConfigError(f"open: expected the mode 'r' or 'a', found {mode!r}")
    if sync not in _SYNC:
        raise ConfigError(f"open: sync: expected one of {list(_SYNC)}, found {sync!r}")
    if layout not in (None, *LAYOUTS):
        raise ConfigError(f"open: layout: expected one of {list(LAYOUTS)}, found {layout!r:.80}")
    # The absolute path: a change of the working directory must not move the store.
    folder = Path(os.path.abspath(os.fspath(path)))
    if mode == "r":
        if limits != ALL:
            raise ConfigError("max_rows, max_bytes: expected mode 'a', found 'r'; only a writer removes rows")
        if layout is not None:
            raise ConfigError("layout: expected mode 'a', found 'r'; a reader cannot change the layout of files")
        return ReadRows(folder, told.schema, told.budget, verify)
    wait_for_sealing(folder)
    kind = SyncedRows if sync == "append" else WrittenRows
    return kind(folder, told.schema, told.budget, verify, sync, limits, layout)


# The function refers only to the path: a reference cycle with the store would keep files open until a garbage
# collection.
def _closed(path: Path) -> ClosedError:
    return ClosedError(f"store {path}: expected an open store, found a closed store")


def _forked(path: Path, process: int) -> ForkError:
    return ForkError(
        f"store {path}: expected a write in process {process}, which opened the store, found the forked child "
        f"{os.getpid()}; DatasetStore.open({str(path)!r}) opens the store for reading"
    )


_writers: weakref.WeakSet[WrittenRows] = weakref.WeakSet()


def _let_go() -> None:
    for writer in list(_writers):
        writer.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
