"""The store of a study: opened where it lies, or made once and kept in the study's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.files.writing import making
from mouse_study._names import found


def open_store(declared: Mapping[str, Any], folder: Path) -> Any:
    """The store that a study declares; one that a function made lies in the study's folder."""
    from mouse_core import formats

    options = dict(declared)
    if "function" in options:
        return formats.open(folder / "store").to_store()
    return formats.open(options.pop("path"), **options).to_store()


def make_store(declared: Mapping[str, Any], folder: Path) -> None:
    """Call the function that makes the study's store, and keep what it gives, if that was not done before."""
    from mouse_core.store import Store

    target = folder / "store"
    if target.exists():
        return
    made = found(declared["function"], "store")()
    if not isinstance(made, Store):
        raise ConfigError(
            f"store: expected a function that makes a DatasetStore, found {type(made).__name__}; a training that has a "
            "source of its own gives Training(batches=...)"
        )
    with making(target, "store") as partial:
        made.to_dataset().save_to_disk(partial)
