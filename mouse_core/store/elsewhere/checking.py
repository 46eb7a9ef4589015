"""Whether the files of a store elsewhere are what was written."""

from __future__ import annotations

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.ipc.summed import SummedFile
from mouse_core.store.disk.checking import Checked
from mouse_core.store.disk.manifest import MOST_BYTES, NAME, Manifest, Sealed, parse_manifest
from mouse_core.store.disk.sealed import digest_of
from mouse_core.store.elsewhere.objects import Place
from mouse_core.store.elsewhere.rows import addressed

# Of a file of one record batch, so much is read at a time.
_PIECE = 64 << 20


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
    manifest, rows, wrong = parse_manifest(addressed(client.shown(NAME)), content), 0, {}
    total = sum(one.bytes for one in manifest.segments)
    with progress_bar("verifying", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        for sealed in manifest.segments:
            try:
                _check(place, manifest, sealed)
                rows += sealed.rows
            except (DataError, ConfigError) as error:
                where = client.shown(sealed.name)
                wrong[sealed.name] = str(error) if where in str(error) else f"{where}: {error}"
            advance(sealed.bytes)
    return Checked(rows, len(manifest.segments), wrong)


def _check(place: Place, manifest: Manifest, sealed: Sealed) -> None:
    client = place.client
    info = client.head(sealed.name)
    if info.size != sealed.bytes:
        raise DataError(f"expected {sealed.bytes} bytes as were written, found {info.size}")
    edges = [*range(0, info.size, _PIECE), info.size]
    content = b"".join(client.get_ranges(sealed.name, edges[:-1], edges[1:], info.version))
    if sealed.batch_rows:
        schema = manifest.schemas[sealed.schema]
        where = addressed(client.shown(sealed.name))
        file = SummedFile(where, pa.py_buffer(content), schema, sealed.rows, sealed.batch_rows, sealed.digest)
        file.check_all()
    elif digest_of(content) != sealed.digest:
        raise DataError(f"expected the digest {sealed.digest}, found {digest_of(content)}; it is damaged")
