"""The errors of this library: one family, each also the built-in kind a caller would expect.

Every message says what was expected, what was found, and where (field, row, file).
"""

from __future__ import annotations

import sys as _sys

# Every module comes here first. Another distribution has a package of this name: where it was installed over this one,
# or removed, mouse_core/__init__.py is its own or none at all, and names would be missing one by one.
_package = _sys.modules.get("mouse_core")
if getattr(_package, "__distribution__", None) != "mouse-data":
    raise ImportError(
        f"mouse_core: expected the package of mouse-data, found another at {getattr(_package, '__file__', None)}: the "
        "distribution mouse-core, which has a package of this name, was installed over it or removed; run "
        "pip uninstall mouse-core mouse-data, then install mouse-data again"
    )


class MouseError(Exception):
    """Base class of every error raised on purpose by this library."""


class ConfigError(MouseError, ValueError):
    """An argument that cannot be used: an unknown name, a number out of range, a pair that does not go together."""


class SpecIndexError(ConfigError, IndexError):
    """An index that no array of a spec's shape has, or one of a dynamic dimension."""


class SchemaError(MouseError, ValueError):
    """Columns whose names, types or widths do not fit the store, its fields, or each other."""


class MissingFieldError(SchemaError, KeyError):
    """A column or field that must be there and is not."""

    def __str__(self) -> str:
        # KeyError shows its argument with repr(), which would put a sentence in quotes.
        return str(self.args[0]) if self.args else ""


class DataError(MouseError, ValueError):
    """A value in the data that its field does not allow; the message names field, row and value."""


class RowIndexError(DataError, IndexError):
    """An index of rows that is out of range, or none at all."""


class MissingRowError(DataError, KeyError):
    """A row that was looked up in a map and is not there."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ChangedError(DataError):
    """An object elsewhere is another one than the one that was opened."""


class StateError(MouseError, ValueError):
    """A state dict that belongs to another dataset or another configuration."""


class ClosedError(MouseError, RuntimeError):
    """A loader was used after ``close()``."""


class ForkError(MouseError, RuntimeError):
    """A loader whose threads live in the parent process was used in a forked child."""


class WorkerError(MouseError, RuntimeError):
    """Computing a batch failed; the cause is chained, and the same error is raised on every later call."""


class EpisodeError(DataError):
    """Steps that cannot follow each other in an episode: ``episode`` and ``step`` say where, both counted from 0."""

    def __init__(self, message: str, *, episode: int = 0, step: int = 0) -> None:
        super().__init__(message)
        self.episode = episode
        self.step = step


class RolloutError(MouseError, RuntimeError):
    """A rollout was used out of turn: read before it was full, or changed while it was read."""


class RolloutFullError(RolloutError, OverflowError):
    """A row was added beyond the last one of a rollout."""


class StorageError(MouseError, OSError):
    """Something could not be written or read: a full disk, a missing permission; the system's error is chained."""


class TimedOutError(MouseError, TimeoutError):
    """A wait exceeded its time limit; the message names its object. Nothing has changed."""


class StoreWarning(UserWarning):
    """Something that a store had is lost: rows that were appended before, or where an episode begins among its rows."""


class AlignmentWarning(UserWarning):
    """The data speak against the alignment that they have, or are taken to have."""
