"""Words and questions that checks share."""

from __future__ import annotations

from typing import Any

import numpy as np

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
