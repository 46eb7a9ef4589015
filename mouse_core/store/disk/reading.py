"""The rows of a folder as its readers see them, who follow what its writer flushes."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._base.identity import common_start
from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import check_alignment
from mouse_core.store._intake import Refusing, StoreBackend
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import Lease, ReadFolder, Shared, repairable
from mouse_core.store.disk.manifest import Manifest, Sealed
from mouse_core.store.disk.segments import SealedFile, SealedSegment, SealedSegments, TailSegment, together
from mouse_core.store.disk.tail.file import TailReader


def settled(told: StoreSchema, manifest: Manifest, label: str) -> StoreSchema:
    """The schema of the rows that a manifest names, which are to fit what a store was told of them."""
    about = manifest.about
    if told.told.alignment is None and about.alignment is not None:
        told = copy.copy(told)
        told.alignment = check_alignment(about.alignment)
    examples = [Segment(pa.Table.from_batches([], schema)) for schema in manifest.schemas]
    schema = told.merged(examples, [(label, about)] * max(len(examples), 1))
    schema.all_say_alignment &= about.alignment is not None or not examples
    return schema


class FolderRows(StoreBackend):
    """Rows that lie in a folder, with a schema and segments as its manifest has them.

    Args:
        folder: It.
        told: What the store was told of the rows, which are to fit.
        budget: Of the memory for dense copies.
        verify: Whether files are held against their digests when they are first read.
    """

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool) -> None:
        super().__init__(told, budget)
        self.folder_path, self.path = folder, str(folder)
        self._told, self._verify = told, verify
        # See ``Segment.place``.
        self._token = object()
        # How many rows were before the first that is in no sealed segment, those included that were dropped.
        self._end = 0
        self._together: list[SealedSegments] = []
        # The manifest that segments were taken over from last, and what keeps their files.
        self._taken, self._shared = Manifest(), Shared(Lease())
        self._videos: Any = None

    def shown(self) -> list[Segment]:
        """See ``StoreBackend``; of many sealed files one."""
        shown = together(self.segments, self._together)
        # Not those of a file each, which would be kept here when they were dropped.
        self._together = [one for one in shown if isinstance(one, SealedSegments)]
        return shown

    def _adopt(self, manifest: Manifest, lease: Lease) -> None:
        """Take over what a manifest says of columns and sealed segments, with those that are known already."""
        self.schema = settled(self._told, manifest, f"store {self.path}")
        self._take_over(manifest, lease)

    def _take_over(self, manifest: Manifest, lease: Lease) -> None:
        """Have the sealed segments of a manifest; those that it has as the one before are not looked at."""
        before, self._taken = self._taken, manifest
        same = common_start(before.segments, manifest.segments) if before.dropped == manifest.dropped else 0
        last = self.segments[same - 1].place if same else None
        first = manifest.dropped if last is None else last[1] + self.segments[same - 1].num_rows
        known = {one.place: one for one in self.segments[same:] if isinstance(one, SealedSegment)}
        segments: list[Segment] = self.segments[:same]
        for sealed in manifest.segments[same:]:
            one = known.get((self._token, first))
            segments.append(one if one and one.file.sealed == sealed else self.sealed_segment(manifest, sealed, first))
            first += sealed.rows
        self._have(lease, before, manifest)
        self.segments[:] = segments
        self._end, self.count, self._kept = first, first - manifest.dropped, None

    def _have(self, lease: Lease, before: Manifest, now: Manifest) -> None:
        """Keep the files of a state; those that only the one before named are kept by whoever still has their rows."""
        if now.segments[: len(before.segments)] != before.segments:
            shared, named = Shared(self._shared.lease), now.file_numbers()
            for segment in self.segments:
                if isinstance(segment, SealedSegment) and segment.file.sealed.number not in named:
                    segment.file.kept = shared
        self._shared.lease = lease

    def sealed_segment(self, manifest: Manifest, sealed: Sealed, first: int) -> SealedSegment:
        """A sealed segment, of which ``first`` rows were before."""
        schema = manifest.schemas[sealed.schema]
        file = SealedFile(self.folder_path, sealed, schema, first, manifest.identity, verify=self._verify)
        file.kept = self._shared
        roots, videos = self.schema.image_roots, manifest.about.videos
        if not videos:
            return SealedSegment(file, roots, self._token)
        from mouse_core.video.frames import VideoFiles  # loaded where there are some

        if self._videos is None or self._videos.files != videos:
            self._videos = VideoFiles(videos)
        return SealedSegment(file, (os.path.realpath(self.folder_path), *roots), self._token, self._videos)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the folder.
        return ReadRows, (self.folder_path, self._told, self.budget, self._verify)


class ReadRows(FolderRows):
    """The rows of a folder as a reader has them."""

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool) -> None:
        super().__init__(folder, told, budget, verify)
        self._folder = ReadFolder(folder)
        self._tails: list[TailReader] = []
        self._sealed = 0
        # Of each tail, as far as rows were seen.
        self._open: list[TailSegment] = []
        self.appender = Refusing(partial(_refused, self.folder_path))
        self._follow()

    def seen(self) -> Self:
        """The rows that were flushed by now."""
        with self.lock:
            if self._folder.look():
                self._follow()
            self._look_at_tails()
        return self

    @property
    def end(self) -> int:
        """Number of rows ever written, dropped ones included."""
        return self._folder.manifest.dropped + self.count

    def _follow(self) -> None:
        """Take over the manifest."""
        while True:
            manifest = self._folder.manifest
            known = {(tail.path, tail.layout.identity): tail for tail in self._tails}
            places = [(self.folder_path / tail.name, tail.identity) for tail in manifest.tails]
            try:
                with repairable(self.folder_path):
                    self._tails = [known.get(place) or TailReader(place[0], identity=place[1]) for place in places]
                break
            except (ConfigError, DataError) as error:
                # It was sealed after the manifest was read, or another writer has another of its name by now.
                if not self._folder.look():
                    if isinstance(error, DataError):
                        raise
                    files = [str(path) for path, _ in places]
                    raise DataError(f"store {self.path}: expected the files {files}, found not all") from None
        self._adopt(manifest, self._folder.lease)
        self._sealed, self._open = len(self.segments), []
        self._look_at_tails()

    def _look_at_tails(self) -> None:
        """Have the rows of tails that were committed; those behind a tail that is not whole do not follow any."""
        first = self._end
        for number, (tail, said) in enumerate(zip(self._tails, self._folder.manifest.tails, strict=True)):
            with repairable(self.folder_path):
                rows = tail.committed()
            if said.rows is not None:
                rows = min(rows, said.rows)
            if rows and (number == len(self._open) or self._open[number].num_rows < rows):
                where = (self.folder_path, said.name, first, tail.layout.identity, self._folder.manifest.identity)
                place = (self._token, first)
                extent, roots = tail.extent(rows), self.schema.image_roots
                segment = TailSegment.of(extent, roots, place, where, lease=self._folder.lease)
                self._open[number:] = [segment]
                self._kept = None
            first += rows
            if rows != said.rows:
                break
        self.segments[self._sealed :] = self._open
        self.count = first - self._folder.manifest.dropped

    def close(self) -> None:
        """Let go of the manifest, which is opened again if somebody asks."""
        self._folder.close()


def _refused(path: Path) -> ConfigError:
    return ConfigError(
        f"store {path}: expected a store that was opened to be written, found one opened to be read; "
        f"DatasetStore.open({str(path)!r}, 'a') opens it for its one writer"
    )
