"""Remote rows: an uploaded store, as ``DatasetStore.open`` opens it at an address."""

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
from mouse_core.remote.clients import ObjectInfo
from mouse_core.store._intake import StoreBackend, StoreSchema
from mouse_core.store.disk.folder import MOST_BYTES, NAME, Manifest, Sealed, check_identity, parse_manifest
from mouse_core.store.disk.rows import settled
from mouse_core.store.remote.files import ArrowFile, ElsewhereSegment, Files, FileTrailer, Place
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Up to this number of files, size and version of each file are requested separately; for more files, the folder is
# listed.
_FEW = 64


class StoreRows(StoreBackend):
    """The rows of an uploaded store; ``snapshot`` checks for new rows.

    Args:
        place: The client and the cache of the objects.
        told: The schema from the store's arguments, which the rows must match.
        budget: The limit of memory for dense copies.
        verify: Whether to compare read bytes with checksums.
    """

    def __init__(self, place: Place, told: StoreSchema, budget: DenseBudget, verify: bool = True) -> None:
        super().__init__(told, budget, partial(_refused, place.client.url), place.client.url)
        self._place, self._client, self._told, self._verify = place, place.client, told, verify
        # See ``Segment.place``.
        self._token = object()
        self._manifest, self._version = Manifest(), ""
        self._files: dict[Sealed, ArrowFile] = {}
        # For each segment the manifest's entries, and the number of the store's rows before the segment.
        self._made: list[tuple[ElsewhereSegment, tuple[Sealed, ...], int]] = []
        self.look()

    @property
    def end(self) -> int:
        """Number of rows ever written, including dropped rows."""
        return self._manifest.dropped + self.count

    def snapshot(self) -> Snapshot:
        """See ``StoreBackend``; requests the manifest first, to include new rows."""
        self.look()
        return super().snapshot()

    def look(self) -> None:
        """Read the manifest, and update the segments if the manifest was replaced.

        Raises:
            ConfigError: The address holds no store.
            DataError: The manifest is damaged, belongs to another store, or a newer release wrote it.
            StorageError: The store could not be reached.
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
                    # Files that the manifest no longer names may have been removed meanwhile.
                    if read_manifest(self._client, version)[0] is None:
                        raise
                    continue
                self._manifest, self._version = manifest, version
                return

    def _follow(self, manifest: Manifest) -> None:
        if any(tail.rows != 0 for tail in manifest.tails) and not self._version:
            warnings.warn(
                f"{self._client.url}: rows that were not sealed when the folder was copied are missing; mouse upload "
                "sends all flushed rows",
                StoreWarning,
                stacklevel=2,
            )
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
            # Joining keeps the number of segments small, and each row is joined few times.
            while made and len(made[-1][1]) <= len(alike) and _key(made[-1][1][0]) == key:
                _, before, first = made.pop()
                alike = (*before, *alike)
            files = Files(self._place, [self._files[one] for one in alike], manifest.schemas[key[0]])
            place = (self._token, first)
            segment = ElsewhereSegment(files, schema.image_roots, place)
            made.append((segment, alike, first))
            first += segment.num_rows
        self._made, self.schema = made, schema
        self.segments[:] = [segment for segment, _, _ in made]
        self.count, self._kept = first - manifest.dropped, None

    def _have(self, new: Sequence[Sealed]) -> None:
        """Record the size and version of the objects of new files, and compare the sizes with the manifest."""
        known: dict[tuple[int, int], Int64s] = {}
        for sealed, info in zip(new, infos_of(self._client, [one.name for one in new]), strict=True):
            if info.size != sealed.bytes:
                where = self._client.shown(sealed.name)
                raise DataError(f"{where}: expected {sealed.bytes} bytes, as written, found {info.size}")
            # Most files have equal lists, so they share one list.
            alike = sealed.rows, sealed.batch_rows
            rows = known[alike] = known[alike] if alike in known else rows_of_batches(sealed)
            trailer = FileTrailer(self._client, self._place.mirror.folder, info, sealed)
            self._files[sealed] = ArrowFile(trailer, rows, verify=self._verify)

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process reads the manifest.
        return StoreRows, (self._place, self._told, self.budget, self._verify)


def rows_of_batches(sealed: Sealed) -> Int64s:
    """Return the number of rows of each record batch of a sealed segment: 700 rows in batches of 256 give 256, 256 and
    188.
    """
    return np.diff(np.append(np.arange(0, sealed.rows, sealed.step), sealed.rows))


def read_manifest(client: FolderClient, known: str = "") -> tuple[bytes | None, str]:
    """Read a store's manifest and its version; return None if the version is ``known``.

    Raises:
        ConfigError: The manifest does not exist.
        StorageError: The store could not be reached.
    """
    from mouse_core.remote.clients.objects import MissingObject

    try:
        if known and client.head(NAME).version == known:
            return None, known
        return client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject as error:
        found = next((remedy for name, remedy in OTHERS.items() if client.exists(name)), "none")
        raise ConfigError(
            f"{client.url}: expected a store ({NAME}), found {found}; mouse convert and mouse upload make a store of "
            "other formats, and datasets.load_dataset reads Parquet files"
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
            pass  # a web server, which cannot list files
    return client.heads(list(names)) if names else []


def _refused(url: str) -> ConfigError:
    return ConfigError(
        f"store {url}: expected a store in a folder that was opened for writing, found a remote store; write to a "
        "folder, and mouse upload sends the new rows"
    )


def _key(sealed: Sealed) -> tuple[int, bool, int]:
    """Return the key of a file; consecutive files with equal keys form one segment."""
    return sealed.schema, sealed.appended, sealed.load


_DATASET = (
    "a folder of save_to_disk; download the folder, then call "
    "DatasetStore().from_dataset(datasets.load_from_disk(folder))"
)
OTHERS = {
    "state.json": _DATASET,
    "dataset_dict.json": _DATASET,
    "meta/info.json": "a LeRobotDataset; open its folder after a download, or lerobot:NAME, which downloads it",
}
"""Names of objects that show that an address holds another kind of rows, each with a remedy for the error message."""
