"""The rows of a store whose files lie in objects elsewhere, as its readers see them, who follow what is uploaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Int64s
from mouse_core.errors import ConfigError, DataError, StoreWarning
from mouse_core.remote.client import ObjectInfo
from mouse_core.store._intake import Refusing, StoreBackend
from mouse_core.store._schema import StoreSchema
from mouse_core.store.disk.manifest import MOST_BYTES, NAME, Manifest, Sealed, check_identity, parse_manifest
from mouse_core.store.disk.reading import settled
from mouse_core.store.remote.files import ArrowFile, ElsewhereSegment, Files
from mouse_core.store.remote.objects import FileSums, Place, name_of_sums
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Of so many files each is asked for by itself; more are listed.
_FEW = 64
# So many bytes take a while.
_MUCH = 1 << 30


class ReadOnlyRows(StoreBackend):
    """Rows elsewhere, which nobody appends to from here.

    Args:
        url: Where they are.
        schema: Their schema.
        budget: Of the memory for dense copies.
    """

    def __init__(self, url: str, schema: StoreSchema, budget: DenseBudget) -> None:
        super().__init__(schema, budget)
        self.path = url
        self.appender = Refusing(partial(_refused, url))


class ElsewhereRows(ReadOnlyRows):
    """The rows of an uploaded store; ``snapshot`` looks for new ones.

    Args:
        place: Where the objects are.
        told: What the store was told of the rows, which are to fit.
        budget: Of the memory for dense copies.
        verify: Whether what is read is held against what was written.
    """

    def __init__(self, place: Place, told: StoreSchema, budget: DenseBudget, verify: bool = True) -> None:
        super().__init__(place.client.url, told, budget)
        self._place, self._client, self._told, self._verify = place, place.client, told, verify
        # See ``Segment.place``.
        self._token = object()
        self._manifest, self._version = Manifest(), ""
        self._files: dict[Sealed, ArrowFile] = {}
        # What each segment has, and how many rows of the store were before.
        self._made: list[tuple[ElsewhereSegment, tuple[Sealed, ...], int]] = []
        self.look()

    @property
    def end(self) -> int:
        """Number of rows ever written, dropped ones included."""
        return self._manifest.dropped + self.count

    def snapshot(self) -> Snapshot:
        """See ``StoreBackend``; asks for the manifest."""
        self.look()
        return super().snapshot()

    def look(self) -> None:
        """Take over the manifest, if it is another one than before.

        Raises:
            ConfigError: There is no store.
            DataError: It is damaged, a newer release wrote it, or it is that of another store.
            StorageError: It was not reached.
        """
        with self.lock:
            while True:
                content, version = read_manifest(self._client, self._version)
                if content is None:
                    return
                manifest = parse_manifest(self._client.shown(NAME), content)
                check_identity(self._client.url, self._manifest.identity, manifest.identity)
                try:
                    self._follow(manifest)
                except DataError:
                    # Files that are not named any more may have been removed meanwhile.
                    if read_manifest(self._client, version)[0] is None:
                        raise
                    continue
                self._manifest, self._version = manifest, version
                return

    def _follow(self, manifest: Manifest) -> None:
        if any(tail.rows != 0 for tail in manifest.tails) and not self._version:
            warnings.warn(
                f"{self._client.url}: rows that were not sealed when the folder was copied are not there; mouse upload "
                "sends all that were flushed",
                StoreWarning,
                stacklevel=2,
            )
        if self._verify and not self._version:
            self._warn_of_wholes(manifest)
        schema = settled(self._told, manifest, f"store {self.path}")
        self._have([sealed for sealed in manifest.segments if sealed not in self._files])
        made, at, first = [], 0, manifest.dropped
        for segment, sealed, begin in self._made:
            if manifest.segments[at : at + len(sealed)] != sealed or begin != first:
                break
            made.append((segment, sealed, begin))
            at, first = at + len(sealed), first + segment.num_rows
        for key, some in groupby(manifest.segments[at:], _key):
            alike = tuple(some)
            # So that there are few: a row is taken into another segment few times.
            while made and len(made[-1][1]) <= len(alike) and _key(made[-1][1][0]) == key:
                _, before, first = made.pop()
                alike = (*before, *alike)
            files = Files(self._place, [self._files[one] for one in alike], manifest.schemas[key[0]])
            place = (self._token, first)
            segment = ElsewhereSegment(files, schema.image_roots, place, appended=key[1], load=key[2])
            made.append((segment, alike, first))
            first += segment.num_rows
        self._made, self.schema = made, schema
        self.segments[:] = [segment for segment, _, _ in made]
        self.count, self._kept = first - manifest.dropped, None

    def _warn_of_wholes(self, manifest: Manifest) -> None:
        """Say so where files are to be read as wholes before their first rows."""
        size = sum(sealed.bytes for sealed in manifest.segments)
        if size > _MUCH and not self._client.exists(name_of_sums(manifest.segments[-1])):
            warnings.warn(
                f"{self._client.url}: each of {len(manifest.segments):,} files, {size:,} bytes in all, is read as a "
                "whole before its first row, as no digests of its pages lie beside it; mouse upload sends them, and "
                "verify=False takes rows as they come",
                StoreWarning,
                stacklevel=2,
            )

    def _have(self, new: Sequence[Sealed]) -> None:
        """Know the objects of files, and hold them to what is said of them."""
        known: dict[tuple[int, int], Int64s] = {}
        for sealed, info in zip(new, infos_of(self._client, [one.name for one in new]), strict=True):
            if info.size != sealed.bytes:
                where = self._client.shown(sealed.name)
                raise DataError(f"{where}: expected {sealed.bytes} bytes as were written, found {info.size}")
            # Most have as many: one list is enough for all of these.
            alike = sealed.rows, sealed.batch_rows
            rows = known[alike] = known[alike] if alike in known else rows_of_batches(sealed)
            sums = FileSums(self._place.sums, info, sealed) if self._verify else None
            self._files[sealed] = ArrowFile(info, rows, nulls=sealed.nulls, stride=sealed.stride, sums=sums)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the manifest by itself.
        return ElsewhereRows, (self._place, self._told, self.budget, self._verify)


def rows_of_batches(sealed: Sealed) -> Int64s:
    """Return the rows of each record batch of a sealed segment: of 700 rows, 256, 256 and 188."""
    if not sealed.batch_rows:
        return np.array([sealed.rows], np.int64)
    edges = np.append(np.arange(0, sealed.rows, sealed.batch_rows), sealed.rows)
    return np.diff(edges)


def read_manifest(client: FolderClient, known: str = "") -> tuple[bytes | None, str]:
    """A store's manifest and its version; None where that is the one known.

    Raises:
        ConfigError: There is none.
        StorageError: It was not reached.
    """
    from mouse_core.remote.clients.objects import MissingObject

    try:
        if known and client.head(NAME).version == known:
            return None, known
        return client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject as error:
        raise ConfigError(
            f"{client.url}: expected a store ({NAME}), a dataset of save_to_disk (state.json), a LeRobotDataset "
            "(meta/info.json) or Parquet files, found none; other formats are converted first (mouse convert)"
        ) from error


def infos_of(client: FolderClient, names: Sequence[str]) -> list[ObjectInfo]:
    """Return the current size and version of objects, in the order of ``names``."""
    if len(names) > _FEW:
        try:
            folders = {os.path.dirname(name) for name in names}
            listed = {one.path: one for folder in folders for one in client.listed(folder)}
            if all(name in listed for name in names):
                return [listed[name] for name in names]
        except ConfigError:
            pass  # a web server, which has no lists
    return client.heads(list(names)) if names else []


def _refused(url: str) -> ConfigError:
    return ConfigError(
        f"store {url}: expected a store in a folder that was opened to be written, found one elsewhere; write it in a "
        "folder, and mouse upload sends what is new"
    )


def _key(sealed: Sealed) -> tuple[int, bool, int]:
    """Return the key that files of one segment share."""
    return sealed.schema, sealed.appended, sealed.load
