"""The rows of a folder as its readers see them, who follow what its writer flushes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core.errors import ConfigError
from mouse_core.spec import check_alignment
from mouse_core.store._intake import Rows
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import ReadFolder
from mouse_core.store.disk.leases import Lease
from mouse_core.store.disk.manifest import Manifest, Sealed
from mouse_core.store.disk.sealed import SealedFile, SealedSegment


class Refusing:
    """What rows are appended to where none may be.

    Args:
        error: Makes the error that says why.
    """

    count = 0

    def __init__(self, error: Any) -> None:
        self.error = error

    def append(self, row: Any) -> None:
        """Refuse a row."""
        raise self.error()

    def extend(self, columns: Any, n: int) -> None:
        """Refuse rows."""
        raise self.error()

    def segment(self) -> None:
        """No rows."""
        return

    def close(self) -> None:
        """Refuse what is to come behind the rows."""
        raise self.error()


class FolderRows(Rows):
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
        # What stands for the rows of each file that were appended to it, by its number.
        self._tokens: dict[int, object] = {}

    def _adopt(self, manifest: Manifest, lease: Lease, known: Sequence[Segment] = ()) -> None:
        """Take over what a manifest says, with the segments that are known already."""
        told, about = self._told, manifest.about
        if told.told.alignment is None and about.alignment is not None:
            told = copy.copy(told)
            told.alignment = check_alignment(about.alignment)
        examples = [Segment(schema.empty_table()) for schema in manifest.schemas]
        said = [(f"store {self.path}", about)] * max(len(examples), 1)
        self.schema = told.merged(examples, said)
        self.schema.all_say_alignment &= about.alignment is not None or not examples
        files = {one.file.sealed: one for one in known if isinstance(one, SealedSegment)}
        self.segments[:] = [files.get(one) or self._sealed_segment(manifest, one) for one in manifest.segments]
        self.count, self._kept = manifest.rows, None
        self._have(lease)

    def _have(self, lease: Lease) -> None:
        """Keep the files of the state that there is; those of older ones are kept by whoever still has their rows."""
        for segment in self.segments:
            if isinstance(segment, SealedSegment):
                segment.file.lease = lease

    def _sealed_segment(self, manifest: Manifest, sealed: Sealed) -> SealedSegment:
        file = SealedFile(self.folder_path, sealed, manifest.schemas[sealed.schema], verify=self._verify)
        token = self._tokens.setdefault(sealed.number, object()) if sealed.appended else None
        return SealedSegment(file, self.schema.image_roots, token)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the folder.
        return ReadRows, (self.folder_path, self._told, self.budget, self._verify)


class ReadRows(FolderRows):
    """Those of a reader."""

    def __init__(self, folder: Path, told: StoreSchema, budget: DenseBudget, verify: bool) -> None:
        super().__init__(folder, told, budget, verify)
        self._folder = ReadFolder(folder)
        self.appender = Refusing(partial(_refused, self.folder_path))  # type: ignore[assignment]
        self._adopt(self._folder.manifest, self._folder.lease)

    def seen(self) -> Self:
        """The rows that were flushed by now."""
        with self.lock:
            if self._folder.look():
                self._adopt(self._folder.manifest, self._folder.lease, self.segments)
        return self

    def take(self, segments: Any, said: Any) -> None:
        """Refuse rows."""
        raise _refused(self.folder_path)

    def clear(self) -> None:
        """Refuse to forget rows."""
        raise _refused(self.folder_path)

    def close(self) -> None:
        """Let go of the manifest, which is opened again if somebody asks."""
        self._folder.close()


def _refused(path: Path) -> ConfigError:
    return ConfigError(
        f"store {path}: expected a store that was opened to be written, found one opened to be read; "
        f"DatasetStore.open({str(path)!r}, 'a') opens it for its one writer"
    )
