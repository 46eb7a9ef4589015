"""Open the rows at an address: those of a store, of a saved dataset, or of Parquet files."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from mouse_core.errors import ConfigError
from mouse_core.remote.clients import Reaching
from mouse_core.store._intake import StoreBackend
from mouse_core.store.disk.manifest import NAME
from mouse_core.store.remote.objects import Place
from mouse_core.store.remote.parquet import ParquetRows, parquet_files
from mouse_core.store.remote.rows import ElsewhereRows, infos_of
from mouse_core.store.remote.saved import LEROBOT, SavedRows, files_saved


def open_remote(url: str, reaching: Reaching, told: StoreBackend, verify: bool | None) -> StoreBackend:
    """Return the rows at an address, of which the schema and the index are read; see ``DatasetStore.open``.

    Args:
        url: The address of a folder, or of one Parquet file.
        reaching: How remote objects are reached.
        told: Empty rows with the schema that the store was told of, and its budget.
        verify: Whether what is read is compared with the checksums of a store; None: where there are some.

    Raises:
        ConfigError: No rows of a kind that is read from an address, or rows without checksums that are to be verified.
        DataError: They are damaged, or a newer release wrote them.
        StorageError: They were not reached.
    """
    parts, file = urlsplit(url), ""
    if parts.path.endswith(".parquet"):
        folder, _, file = parts.path.rpartition("/")
        url = urlunsplit(parts._replace(path=folder))
    place, schema, budget = Place.of(url, reaching), told.schema, told.budget
    client = place.client
    if not file and client.exists(NAME):
        return ElsewhereRows(place, schema, budget, verify is not False)
    if not file and client.exists(LEROBOT):
        raise ConfigError(
            f"{client.url}: expected a store, a saved dataset or Parquet files, found a LeRobotDataset; "
            "mouse_core.formats.open(url, final=...).to_store() opens it"
        )
    saved = None if file else files_saved(client)
    paths = [file] if file else [] if saved else parquet_files(client)
    if not saved and not paths:
        return ElsewhereRows(place, schema, budget)  # which says what was looked for
    if verify:
        what = "a dataset of save_to_disk" if saved else "Parquet files"
        raise ConfigError(
            f"{client.url}: verify=True: expected a store, whose manifest has checksums, found {what}; mouse convert "
            "makes a store of it"
        )
    if saved:
        return SavedRows(place, schema, budget, infos_of(client, saved[0]), *saved[1:])
    return ParquetRows(place, schema, budget, infos_of(client, paths))
