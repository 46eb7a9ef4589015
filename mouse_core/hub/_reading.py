"""Reads named stores that this package or MOUSE pushed to the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.store.dataset_store import DatasetStore

# Nested columns of rows of MOUSE, and the names of these columns in stores.
_NESTED = {
    "observation.continuous": "observation",
    "observation.discrete": "observation_discrete",
    "observation.image": "observation_image",
    "action.continuous": "action",
    "action.discrete": "action",
    "step_index": "episode_step",
}


def from_hub(
    repo_id: str,
    names: Sequence[str] | None = None,
    *,
    split: str = "train",
    revision: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> dict[str, DatasetStore]:
    """Return a dict from configuration names to the stores of a dataset on the Hub. The stores can be the members of a
    ``Mixture``.

    The rows were written by ``push_named_stores_to_hub`` or by MOUSE. MOUSE writes nested values:
    ``observation.continuous`` is read as ``observation``, ``action.discrete`` as ``action``, ``step_index`` as
    ``episode_step``, and so on. Values are never converted.

    Args:
        repo_id: ``"namespace/name"``, or any other argument of ``datasets.load_dataset``, such as a folder.
        names: Names of configurations, in the order of the result; None for all configurations.
        split: The split of each configuration.
        revision: A branch, tag or commit.
        token: An access token, for private datasets.
        **options: Options of ``DatasetStore``. By default, ``alignment`` is read from the metadata of the rows.

    Raises:
        ConfigError: A configuration is missing.
        SchemaError: Rows have nested actions of several kinds, or two columns get the same name.
        MissingFieldError, SchemaError, DataError: The rows do not form a store; see ``DatasetStore.from_dataset``.
    """
    import datasets

    from mouse_core.metadata import read_metadata

    known = datasets.get_dataset_config_names(repo_id, revision=revision, token=token)
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"names: expected configurations among {list(known)} of {repo_id}, found {name!r}")
    stores = {}
    for name in chosen:
        rows = _unnested(datasets.load_dataset(repo_id, name, split=split, revision=revision, token=token), name)
        said = {"alignment": read_metadata(rows, label=name).alignment} | options
        stores[name] = DatasetStore(**said).from_dataset(rows)
    return stores


def _unnested(rows: Any, name: str) -> Any:
    """Convert nested values of rows to columns with the names that a store uses; no row is copied."""
    nested = [column for column in ("observation", "action") if isinstance(rows.features.get(column), dict)]
    if not nested:
        return rows
    flat = rows.flatten()
    renamed = {column: _NESTED[column] for column in flat.column_names if column in _NESTED}
    names = [renamed.get(column, column) for column in flat.column_names]
    if len(set(names)) < len(names):
        raise SchemaError(f"{name}: expected each of the columns {sorted(set(_NESTED.values()))} once, found {names}")
    return flat.rename_columns(renamed)
