"""Words and questions that checks of arguments share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mouse_core.errors import StateError

UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RecursionError, SyntaxError, MemoryError),
)
"""What may come of reading a description that somebody edited; a dtype of "," is a SyntaxError."""


def values_of(count: int) -> str:
    """So many values, in words."""
    return f"{count} value{'s' * (count != 1)}"


def is_whole(value: Any) -> bool:
    """Whether it is an integer, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def state_number(name: str, value: Any, *, where: str = "state") -> int:
    """A number of a saved state, if it is an integer from 0 that 64 bits hold, else StateError."""
    if not is_whole(value) or not 0 <= value < 1 << 64:
        raise StateError(f"{where}: expected {name} as an integer from 0, found {value!r:.80}")
    return int(value)


def as_record(value: Any) -> dict[str, Any] | None:
    """The fields of a mapping (a TensorDict is one), a named tuple or a dataclass by name; None of anything else."""
    if type(value) is dict:
        return value
    if isinstance(value, Mapping):  # which may count or iterate over something else than its names
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None
