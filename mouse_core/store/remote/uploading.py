"""Sends a store's files and manifest to object storage, and checks remote files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.remote.clients import Reaching, open_client
from mouse_core.remote.clients.objects import MissingObject
from mouse_core.store.disk.checking import Checked, check_sealed
from mouse_core.store.disk.folder import MOST_BYTES, NAME, Manifest, ReadFolder, Sealed, parse_manifest
from mouse_core.store.disk.segments import SealedFile
from mouse_core.store.remote.files import Place, check_object
from mouse_core.store.remote.rows import OTHERS, infos_of, read_manifest

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Number of files that are sent at once.
_TOGETHER = 4
_PARQUET = re.compile(r"(data/)?[^/]*\.parquet")


@dataclass(frozen=True)
class Uploaded:
    """Result of an upload.

    Args:
        url: The address of the store.
        rows: Number of rows of the uploaded store.
        files: Number of sent files, without the manifest.
        sent_bytes: Size of the sent files in bytes.
        waiting: Number of rows that were not sent, because the rows are not sealed yet.
    """

    url: str
    rows: int
    files: int
    sent_bytes: int
    waiting: int


def upload(
    folder: str | os.PathLike[str], url: str, *, reaching: Reaching | None = None, progress: bool = False
) -> Uploaded:
    """Send the missing sealed files of a store's folder, and then its manifest.

    A concurrent reader sees the state before or after the upload, never a mixture. Files that the manifest no longer
    names are kept at the address, because readers can still use them.

    Args:
        folder: The store's folder; a writer can append rows during the upload.
        url: The target address, which is empty or holds an earlier state of this store.
        reaching: The options for reaching the address.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: The folder holds no store, or another store is at the address.
        ChangedError: Another process is also uploading the store.
        DataError: The store is damaged.
        StorageError: A file cannot be sent; the next upload continues with this file.
    """
    client = open_client(url, (reaching or Reaching()).storage_options)
    client.make()
    source = Path(folder)
    found = ReadFolder(source)
    try:
        # The lease keeps the files until they are sent.
        manifest, lease = found.manifest, found.lease
        if manifest.metadata.videos:
            raise ConfigError(
                f"{source}: expected rows that contain their images, found rows that refer to videos, which are not "
                "uploaded; `mouse convert --images png` stores images in the rows"
            )
        before, version = _there(client, manifest)
        known, numbers = set(before.segments), {sealed.number for sealed in before.segments}
        new = [sealed for sealed in manifest.segments if sealed not in known]
        if any(sealed.number in numbers for sealed in new):
            raise ConfigError(
                f"{client.url}: expected an earlier state of this store, found a store with other rows; of two "
                "copies of a folder, only one can continue the upload"
            )
        sent = _send(client, source, manifest, new, progress=progress)
        waiting = sum(tail.rows or 0 for tail in manifest.tails)
        bare = replace(manifest, tails=())
        if not version or bare.to_bytes() != before.to_bytes():
            client.put(NAME, bare.to_bytes(), version=version)
        del lease
    finally:
        found.close()
    return Uploaded(client.url, manifest.rows, *sent, waiting)


def _there(client: FolderClient, manifest: Manifest) -> tuple[Manifest, str]:
    """Return the uploaded manifest and its version; the version is "" if there is no manifest."""
    try:
        content, version = client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject:
        _check_free(client)
        return Manifest(), ""
    before = parse_manifest(client.shown(NAME), content)
    if before.identity != manifest.identity or not manifest.identity:
        raise ConfigError(
            f"{client.url}: expected no data, or an earlier state of this store, found another store of "
            f"{before.rows:,} "
            "rows; choose another address"
        )
    if before.next_number > manifest.next_number:
        raise ConfigError(f"{client.url}: expected an earlier state of this store, found a later state")
    return before, version


def _check_free(client: FolderClient) -> None:
    """Raise ConfigError if the address holds other rows, which a store's manifest would hide."""
    try:
        there = {one.path for one in client.listed()}
    except ConfigError:
        return  # a web server, which accepts no uploads
    signs = sorted(one for one in there if one in OTHERS or _PARQUET.fullmatch(one))
    if signs:
        raise ConfigError(
            f"{client.url}: expected no data, or an earlier state of this store, found other rows ({signs[0]}), which "
            "readers would no longer see; choose another address"
        )


def _send(
    client: FolderClient, folder: Path, manifest: Manifest, new: Sequence[Sealed], *, progress: bool
) -> tuple[int, int]:
    """Send the files that are missing or differ at the address; return how many files were sent, and their total size
    in bytes.

    A remote file with the right name and size is complete, because names are unique and an object is written completely
    or not at all.
    """
    there: dict[str, int] = {}
    try:
        there = {one.path: one.size for one in infos_of(client, [one.name for one in new])}
    except DataError:
        for sealed in new:
            if client.exists(sealed.name):
                there[sealed.name] = client.head(sealed.name).size
    missing = [sealed for sealed in new if there.get(sealed.name) != sealed.bytes]
    total = sum(sealed.bytes for sealed in missing)
    with progress_bar("uploading", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        for at in range(0, len(missing), _TOGETHER):
            some = missing[at : at + _TOGETHER]
            for sealed in some:
                _check(folder, manifest, sealed)
            client.put_all([(sealed.name, folder / sealed.name) for sealed in some])
            advance(sum(sealed.bytes for sealed in some))
    return len(missing), total


def _check(folder: Path, manifest: Manifest, sealed: Sealed) -> None:
    """Raise DataError if a file is damaged, so that damaged files are never sent."""
    schema, first = manifest.schemas[sealed.schema], manifest.firsts()[manifest.segments.index(sealed)]
    opened = SealedFile(folder, sealed, schema, first, manifest.identity, verify=True).opened
    if not isinstance(opened, pa.Table):
        opened.check_all()


# ---------------------------------------------------------------------- checking


def check_elsewhere(place: Place, *, progress: bool = False) -> Checked:
    """Read every file of a remote store once, without the cache, and compare the file with its checksums.

    Args:
        place: The client and the cache of the store.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: The address holds no store.
        DataError: The manifest is damaged.
        StorageError: The store could not be reached.
    """
    client = place.client
    content, _ = read_manifest(client)
    assert content is not None
    manifest = parse_manifest(client.shown(NAME), content)

    def check(number: int, sealed: Sealed) -> None:
        check_object(client, client.head(sealed.name), sealed)

    return check_sealed(manifest, check, lambda sealed: client.shown(sealed.name), progress=progress)
