"""A store's files as wholes: sent to object storage, then the manifest; and held against their checksums there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import page_checksums
from mouse_core.remote.clients import Reaching, open_client
from mouse_core.remote.clients.objects import MissingObject
from mouse_core.store.disk.checking import Checked, check_sealed
from mouse_core.store.disk.folder import MOST_BYTES, NAME, Manifest, ReadFolder, Sealed, parse_manifest
from mouse_core.store.disk.segments import SealedFile
from mouse_core.store.remote.files import Place, checked_content, name_of_sums, sums_as_bytes
from mouse_core.store.remote.rows import LEROBOT, SPLITS, STATE, infos_of, parquet_among

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Files that are sent at once.
_TOGETHER = 4
_SUMS_TOGETHER = 32


@dataclass(frozen=True)
class Uploaded:
    """Result of an upload.

    Args:
        url: Where the store is.
        rows: How many rows it has there.
        files: How many files were sent, besides the manifest.
        sent_bytes: How many bytes these have.
        waiting: How many rows of the folder are not there, as they are not sealed yet.
    """

    url: str
    rows: int
    files: int
    sent_bytes: int
    waiting: int


def upload(
    folder: str | os.PathLike[str], url: str, *, reaching: Reaching | None = None, progress: bool = False
) -> Uploaded:
    """Send the sealed files of a store's folder, those that are not there yet, and then its manifest.

    Who reads meanwhile sees the store as it was, or as it is then, and nothing in between. Files that no manifest names
    any more stay, as others may read them.

    Args:
        folder: The store's; it may be written meanwhile.
        url: Where it goes: nothing is there, or this store as it was earlier.
        reaching: How it is reached.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store in the folder, or another one is there.
        ChangedError: Somebody else sends the store, too.
        DataError: The store is damaged.
        StorageError: It cannot be sent; another upload goes on where this one was.
    """
    client = open_client(url, (reaching or Reaching()).storage_options)
    client.make()
    source = Path(folder)
    found = ReadFolder(source)
    try:
        # Its lease keeps the files until they are sent.
        manifest, lease = found.manifest, found.lease
        if manifest.metadata.videos:
            raise ConfigError(
                f"{source}: expected rows with their pictures, found frames of videos, which are not read elsewhere; "
                "`mouse convert --images png` has them in the rows"
            )
        before, version = _there(client, manifest)
        known, numbers = set(before.segments), {sealed.number for sealed in before.segments}
        new = [sealed for sealed in manifest.segments if sealed not in known]
        if any(sealed.number in numbers for sealed in new):
            raise ConfigError(
                f"{client.url}: expected this store as it was earlier, found one with other rows: of a folder that was "
                "copied, only one goes on"
            )
        sent = _send(client, source, manifest, new, progress=progress)
        _send_sums(client, source, manifest, new)
        waiting = sum(tail.rows or 0 for tail in manifest.tails)
        bare = replace(manifest, tails=())
        if not version or bare.to_bytes() != before.to_bytes():
            client.put(NAME, bare.to_bytes(), version=version)
        del lease
    finally:
        found.close()
    return Uploaded(client.url, manifest.rows, *sent, waiting)


def follow(
    folder: str | os.PathLike[str],
    url: str,
    *,
    reaching: Reaching | None = None,
    seconds: float = 30.0,
    said: Callable[[Uploaded], None] = lambda done: None,
    rounds: int | None = None,
) -> None:
    """Upload again and again while a store grows.

    Args:
        folder, url, reaching: See ``upload``.
        seconds: Between two looks at the folder.
        said: Is told of each upload that sent something.
        rounds: How often; None: until it is interrupted.

    Raises:
        ConfigError, ChangedError, DataError, StorageError: As ``upload``.
    """
    number = 0
    while rounds is None or number < rounds:
        if number:
            time.sleep(seconds)
        done = upload(folder, url, reaching=reaching)
        if done.files or not number:
            said(done)
        number += 1


def _there(client: FolderClient, manifest: Manifest) -> tuple[Manifest, str]:
    """The manifest that is there, and its version; "" where there is none."""
    try:
        content, version = client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject:
        _check_free(client)
        return Manifest(), ""
    before = parse_manifest(client.shown(NAME), content)
    if before.identity != manifest.identity or not manifest.identity:
        raise ConfigError(
            f"{client.url}: expected nothing, or this store as it was earlier, found another store of {before.rows:,} "
            "rows; choose another address"
        )
    if before.next_number > manifest.next_number:
        raise ConfigError(f"{client.url}: expected this store as it was earlier, found a later state of it")
    return before, version


def _check_free(client: FolderClient) -> None:
    """Raise ConfigError where other rows are, which nobody would see any more behind a store's manifest."""
    try:
        there = {one.path for one in client.listed()}
    except ConfigError:
        return  # a web server, which is not written to
    signs = [one for one in (STATE, SPLITS, LEROBOT) if one in there] or parquet_among(sorted(there))
    if signs:
        raise ConfigError(
            f"{client.url}: expected nothing, or this store as it was earlier, found other rows ({signs[0]}), which "
            "would not be seen any more; choose another address"
        )


def _send(
    client: FolderClient, folder: Path, manifest: Manifest, new: Sequence[Sealed], *, progress: bool
) -> tuple[int, int]:
    """Send files that are not there as they are to be; how many, and their bytes.

    The version of a file that an interrupted upload left is not known, but its size, and that no other file has its
    name: objects are written whole or not at all.
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


def _send_sums(client: FolderClient, folder: Path, manifest: Manifest, new: Sequence[Sealed]) -> None:
    """Send the digests of the pages of new files, or of all where the folder was copied by other means."""
    known = manifest.segments and client.exists(name_of_sums(manifest.segments[0]))
    wanted = new if known else manifest.segments
    for at in range(0, len(wanted), _SUMS_TOGETHER):
        found = []
        for sealed in wanted[at : at + _SUMS_TOGETHER]:
            _check(folder, manifest, sealed)
            found.append(
                (
                    name_of_sums(sealed),
                    sums_as_bytes(page_checksums([(folder / sealed.name).read_bytes()]), sealed),
                )
            )
        client.put_all(found)


def _check(folder: Path, manifest: Manifest, sealed: Sealed) -> None:
    """Raise DataError where a file is not what was written: nothing that is damaged is sent."""
    schema, first = manifest.schemas[sealed.schema], manifest.firsts()[manifest.segments.index(sealed)]
    opened = SealedFile(folder, sealed, schema, first, manifest.identity, verify=True).opened
    if not isinstance(opened, pa.Table):
        opened.check_all()


# ---------------------------------------------------------------------- checking


def check_elsewhere(place: Place, *, progress: bool = False) -> Checked:
    """Read every file of a store once, and hold it against its checksums; the cache is passed by.

    Args:
        place: Where it is.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store.
        DataError: Its manifest is damaged.
        StorageError: It was not reached.
    """
    client = place.client
    content, _ = client.read(NAME, most_bytes=MOST_BYTES)
    manifest = parse_manifest(client.shown(NAME), content)

    def check(number: int, sealed: Sealed) -> None:
        checked_content(client, client.head(sealed.name), sealed)

    return check_sealed(manifest, check, lambda sealed: client.shown(sealed.name), progress=progress)
