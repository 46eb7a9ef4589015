"""Checks that storages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from mouse_core._base.locks import is_spawning
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.spec import check_count


def check_capacity(capacity: Any) -> int:
    """``capacity`` if it is a positive integer, else ConfigError."""
    return check_count("capacity", capacity)


def check_ndim(ndim: Any) -> int:
    """``ndim`` if it is 1 or 2, else ConfigError."""
    if isinstance(ndim, bool) or ndim not in (1, 2):
        raise ConfigError(f"ndim: expected 1 or 2, found {ndim!r}")
    return int(ndim)


def check_not_spawning(storage: Any) -> None:
    """Raise ConfigError where a storage whose rows lie in this process goes to one that is being started.

    It would be copied, and the two go on apart. Pickling for other ends, such as a file or ``copy.deepcopy``, is fine.
    """
    if is_spawning():
        raise ConfigError(
            f"{type(storage).__name__}: expected rows that processes share, found rows in the memory of this one, of "
            "which the process that is started would get a copy of its own; give it a "
            "MemmapStorage(capacity, folder), or make the buffer there, and hand over rows by dumps() and loads()"
        )


def check_put(slots: Slots, n: int) -> None:
    """DataError unless there are as many rows as slots."""
    if slots.size != n:
        raise DataError(f"rows: expected {slots.size}, as many as indices, found {n}")


def slot_error(slots: Slots, size: int) -> IndexError:
    """What to raise for slots of which some are not in use."""
    outside = slots[(slots < 0) | (slots >= size)].reshape(-1)
    return IndexError(f"index: expected 0..{size - 1}, found {outside[:1].tolist() or 'an empty storage'}")


def check_part(name: str, part: Any, kind: type) -> Any:
    """``part`` if it has the methods of ``kind``, else ConfigError."""
    if not isinstance(part, kind):
        raise ConfigError(f"{name}: expected a {kind.__name__}, found {part!r:.80}")
    return part


def column_of(columns: Mapping[FieldKey, npt.NDArray[Any]], key: FieldKey) -> npt.NDArray[Any]:
    """A field's values, or MissingFieldError."""
    try:
        return columns[key]
    except (KeyError, TypeError) as error:
        raise MissingFieldError(f"rows: expected a field {key!r}, found {list(columns)}") from error
