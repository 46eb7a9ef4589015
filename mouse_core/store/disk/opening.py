"""Opening the rows that lie in a folder; see ``DatasetStore.open``."""

from __future__ import annotations

import os
from pathlib import Path

from mouse_core.errors import ConfigError
from mouse_core.store._intake import Rows
from mouse_core.store.disk.reading import ReadRows
from mouse_core.store.disk.upkeep import ALL, Limits
from mouse_core.store.disk.writing import WrittenRows

_SYNC = ("none", "flush", "append")


def open_rows(
    path: str | os.PathLike[str], mode: str, sync: str, verify: bool, told: Rows, limits: Limits = ALL
) -> Rows:
    """The rows of a folder, in a store that was told ``told`` of them, which is empty."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"open: expected the path of a folder, found {path!r:.80}")
    if mode not in ("r", "a"):
        raise ConfigError(f"open: expected the mode 'r' or 'a', found {mode!r}")
    if sync not in _SYNC:
        raise ConfigError(f"open: expected sync among {list(_SYNC)}, found {sync!r}")
    # As it is now: whoever changes the folder that the process is in does not move the store.
    folder = Path(os.path.abspath(os.fspath(path)))
    if mode == "r":
        limits.refuse_for_readers()
        return ReadRows(folder, told.schema, told.budget, verify)
    return WrittenRows(folder, told.schema, told.budget, verify, sync, limits)
