"""The errors of this library. All errors derive from ``MouseError``, and each error also derives from the built-in
error that fits best.

Every message states the expected value, the found value, and the position (field, row, file).
"""

from __future__ import annotations

import sys as _sys

# Every module imports this one first, so it checks the package. Another distribution also has a package mouse_core: if
# it was installed over this one, or removed, mouse_core/__init__.py is another file or missing, and later imports would
# fail with unclear errors.
_package = _sys.modules.get("mouse_core")
if getattr(_package, "__distribution__", None) != "mouse-data":
    raise ImportError(
        f"mouse_core: expected the package of mouse-data, found another at {getattr(_package, '__file__', None)}. The "
        "distribution mouse-core also contains a package of this name, and was installed or removed later; run "
        "pip uninstall mouse-core mouse-data, then install mouse-data again"
    )


class MouseError(Exception):
    """Base class of every error raised on purpose by this library."""


class ConfigError(MouseError, ValueError):
    """An argument is invalid: for example, a name is unknown, a number is out of range, or two arguments exclude each
    other.
    """


class SpecIndexError(ConfigError, IndexError):
    """An index is outside of the shape of a spec, or selects from a dynamic dimension."""


class SchemaError(MouseError, ValueError):
    """Names, types or widths of columns do not fit the store, its fields, or each other."""


class MissingFieldError(SchemaError, KeyError):
    """A required column or field is missing."""

    def __str__(self) -> str:
        # KeyError shows its argument with repr(), which would put a sentence in quotes.
        return str(self.args[0]) if self.args else ""


class DataError(MouseError, ValueError):
    """The data have a value that its field does not allow; the message names field, row and value."""


class RowIndexError(DataError, IndexError):
    """A row index is out of range, or is not an integer."""


class MissingRowError(DataError, KeyError):
    """A key that was looked up in a map has no row."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ChangedError(DataError):
    """A remote object was replaced after it was opened."""


class StateError(MouseError, ValueError):
    """A state dict belongs to another dataset or another configuration."""


class ClosedError(MouseError, RuntimeError):
    """A loader was used after ``close()``."""


class ForkError(MouseError, RuntimeError):
    """A loader whose threads live in the parent process was used in a forked child."""


class WorkerError(MouseError, RuntimeError):
    """Computing a batch failed. The cause is chained, and every later call raises the same error."""


class EpisodeError(DataError):
    """A step cannot follow the previous step of its episode; ``episode`` and ``step`` are its position, from 0."""

    def __init__(self, message: str, *, episode: int = 0, step: int = 0) -> None:
        super().__init__(message)
        self.episode = episode
        self.step = step


class RolloutError(MouseError, RuntimeError):
    """A rollout was used in the wrong order: read before it was full, or changed while it was read."""


class RolloutFullError(RolloutError, OverflowError):
    """A row was added to a rollout that was already full."""


class StorageError(MouseError, OSError):
    """A file could not be written or read, for example because the disk is full or a permission is missing; the
    system's error is chained.
    """


class TimedOutError(MouseError, TimeoutError):
    """A wait exceeded its time limit; the message names the object that was waited for. No data have changed."""


class StoreWarning(UserWarning):
    """A store no longer has rows that were appended earlier, or the first rows of an episode."""


class AlignmentWarning(UserWarning):
    """The data contradict their stored or assumed alignment."""
