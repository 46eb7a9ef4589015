"""Opening the rows behind an address."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core.errors import ConfigError
from mouse_core.remote.clients import Reaching
from mouse_core.remote.clients.options import without_secrets
from mouse_core.store._intake import StoreBackend
from mouse_core.store._schema import StoreSchema
from mouse_core.store.disk.manifest import NAME
from mouse_core.store.remote.objects import Place
from mouse_core.store.remote.rows import ElsewhereRows, infos_of


class _HasRows(Protocol):
    """A store, which may get other rows."""

    _rows: StoreBackend


Store = TypeVar("Store", bound=_HasRows)
_OPTIONS = frozenset(inspect.signature(Reaching).parameters)
# What only a LeRobotDataset is opened with.
_OF_LEROBOT = ("final", "cameras")


def open_elsewhere(
    make: Callable[..., Store], url: str, mode: str, options: Mapping[str, Any], verify: bool | None = None
) -> Store:
    """A store of the rows behind an address, of which the schema and the index are read; see ``DatasetStore.open``.

    Args:
        make: The class.
        url: The address.
        mode: "r".
        options: Those of the class, and of ``Reaching``.
        verify: Whether what is read is held against the digests of a store; None: where there are some.

    Raises:
        ConfigError: There are no rows of a kind that is read elsewhere, or another mode; rows that have no digests
            are to be verified.
        DataError: They are damaged, or a newer release wrote them.
        StorageError: They were not reached.
    """
    if mode != "r":
        raise ConfigError(
            f"{without_secrets(url)}: expected the mode 'r', as rows elsewhere are only read, found {mode!r}; write in "
            "a folder, and mouse upload sends what is new"
        )
    chosen = {name: value for name, value in options.items() if name in _OF_LEROBOT}
    options = {name: value for name, value in options.items() if name not in _OF_LEROBOT}
    reaching = Reaching(**{name: value for name, value in options.items() if name in _OPTIONS})
    store = make(**{name: value for name, value in options.items() if name not in _OPTIONS})
    parts, file = urlsplit(url), ""
    if parts.path.endswith(".parquet"):
        folder, _, file = parts.path.rpartition("/")
        url = urlunsplit(parts._replace(path=folder))
    told, budget = store._rows.schema, store._rows.budget
    store._rows = _rows_at(Place.of(url, reaching), file, told, budget, chosen, verify)
    return store


def _rows_at(
    place: Place, file: str, told: StoreSchema, budget: DenseBudget, chosen: Mapping[str, Any], verify: bool | None
) -> StoreBackend:
    """The rows of whichever kind, or of one Parquet file."""
    from mouse_core.store.remote import parquet, saved

    client = place.client
    if not file and client.exists(NAME):
        _refuse(client.url, chosen)
        return ElsewhereRows(place, told, budget, verify is not False)
    if not file and client.exists(saved.LEROBOT):
        from mouse_core.formats.lerobot.elsewhere import LeRobotRows

        refuse_to_verify(client.url, "a LeRobotDataset", verify)
        return LeRobotRows(place, told, budget, **chosen)
    _refuse(client.url, chosen)
    if not file:
        found = saved.files_saved(client)
        if found is not None:
            refuse_to_verify(client.url, "a dataset of save_to_disk", verify)
            return saved.SavedRows(place, told, budget, infos_of(client, found[0]), *found[1:])
    paths = [file] if file else parquet.parquet_files(client)
    if paths:
        refuse_to_verify(client.url, "Parquet files", verify)
        return parquet.ParquetRows(place, told, budget, infos_of(client, paths))
    return ElsewhereRows(place, told, budget)


def _refuse(url: str, chosen: Mapping[str, Any]) -> None:
    """Raise ConfigError where there are options of a LeRobotDataset."""
    if chosen:
        raise ConfigError(f"{url}: {', '.join(chosen)}: expected a LeRobotDataset, found other rows")


def refuse_to_verify(where: str, what: str, verify: bool | None) -> None:
    """Raise ConfigError where rows are to be verified that nobody noted digests of."""
    if verify:
        raise ConfigError(
            f"{where}: verify=True: expected a store, whose manifest has digests, found {what}; mouse convert makes a "
            "store of it"
        )
