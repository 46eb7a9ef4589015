"""Opening a store by its path or its address."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.remote.clients import Reaching, is_url
from mouse_core.remote.clients.options import without_secrets
from mouse_core.store.disk.manifest import NAME, looks_like_store
from mouse_core.store.disk.writing import Limits


def opened(
    make: Callable[..., Any],
    path: str | os.PathLike[str],
    mode: str,
    options: Mapping[str, Any],
    sync: str,
    verify: bool | None,
    max_rows: int | None,
    max_bytes: int | None,
    layout: str | None,
) -> Any:
    """The store in a folder, or behind an address; see ``DatasetStore.open``.

    Args:
        make: The class.
        path, mode: As there.
        options: Those of the class, and for an address those of ``Reaching``.
        sync, verify, max_rows, max_bytes, layout: As there; of an address ``verify`` alone.

    Raises:
        ConfigError: Options of an address for a folder, or the other way round; and as there.
    """
    if is_url(path):
        from mouse_core.store.remote.opening import open_elsewhere

        writing = {"sync=": sync != "flush", "max_rows=": max_rows, "max_bytes=": max_bytes, "layout=": layout}
        found = [name for name, value in writing.items() if value is not None and value is not False]
        if found:
            raise ConfigError(
                f"{' and '.join(found)}: expected a folder that is written, found the address "
                f"{without_secrets(str(path))!r:.200}, whose rows are only read"
            )
        return open_elsewhere(make, str(path), mode, options, verify)
    if os.path.isfile(os.path.join(path, "meta", "info.json")) and not os.path.exists(os.path.join(path, NAME)):
        if mode != "r":
            raise ConfigError(
                f"{os.fspath(path)}: expected the mode 'r', as a LeRobotDataset is only read, found {mode!r}"
            )
        from mouse_core.formats.lerobot.reading import store_of
        from mouse_core.store.remote.opening import refuse_to_verify

        refuse_to_verify(os.fspath(path), "a LeRobotDataset", verify)
        return store_of(path, make=make, **options)
    if os.path.isfile(os.path.join(path, "features.json")) and not os.path.exists(os.path.join(path, NAME)):
        if mode != "r":
            raise ConfigError(
                f"{os.fspath(path)}: expected the mode 'r', as a dataset of TFDS is only read, found {mode!r}"
            )
        from mouse_core.formats.tfds.reading import store_of as store_of_records

        return store_of_records(path, make=make, verify=verify is not False, **options)
    if isinstance(path, str | os.PathLike) and os.path.exists(path) and not looks_like_store(Path(path)):
        from mouse_core.formats.rows import are_rows

        if are_rows(path):
            return _saved(make, path, mode, options, verify, Limits(max_rows, max_bytes), layout)
    reading = [f"{name}=" for name in ("final", "splits", "skip_broken", "tolerance", "last_step") if name in options]
    if reading:
        there = "another folder" if os.path.isdir(path) else "a file" if os.path.exists(path) else "nothing"
        raise ConfigError(
            f"{os.fspath(path)}: {' and '.join(reading)}: expected the folder of a LeRobotDataset (meta/info.json) or "
            f"of a dataset of TFDS (features.json), found {there}; formats.open(...).to_store() reads others"
        )
    _refuse_reaching(path, options)
    from mouse_core.store.disk.writing import open_rows

    store = make(**options)
    store._rows = open_rows(path, mode, sync, verify is not False, store._rows, Limits(max_rows, max_bytes), layout)
    return store


def _refuse_reaching(path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Raise ConfigError where a path is opened with options of an address."""
    misplaced = [f"{name}=" for name in Reaching.__dataclass_fields__ if name in options]
    if misplaced:
        raise ConfigError(
            f"{' and '.join(misplaced)}: expected an address, as s3://bucket/folder or file:///folder, found the path "
            f"{str(path)!r:.200}, which is read where it lies"
        )


def _saved(
    make: Callable[..., Any],
    path: str | os.PathLike[str],
    mode: str,
    options: Mapping[str, Any],
    verify: bool | None,
    limits: Limits,
    layout: str | None,
) -> Any:
    """The rows of a folder that ``save`` wrote, or of other Arrow and Parquet files, by reference; see ``opened``."""
    where = os.fspath(path)
    if mode != "r":
        raise ConfigError(
            f"{where}: expected the mode 'r', as what save() wrote, or other Arrow and Parquet files, is only read, "
            f"found {mode!r}; `mouse convert {where} TARGET --to store` makes a store of them that takes more rows"
        )
    for_others = [f"{name}=" for name in ("final", "skip_broken", "tolerance", "last_step") if name in options]
    if for_others:
        raise ConfigError(
            f"{where}: {' and '.join(for_others)}: expected the folder of a LeRobotDataset or of a dataset of TFDS, "
            "found Arrow or Parquet files"
        )
    limits.refuse_for_readers()
    if layout is not None:
        raise ConfigError("layout: expected mode 'a', found 'r'; a reader takes files as they are")
    _refuse_reaching(path, options)
    from mouse_core.formats.rows import store_of

    return store_of(path, make=make, verify=bool(verify), **options)
