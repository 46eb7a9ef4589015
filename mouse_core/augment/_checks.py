"""Checks of configuration values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError


def check_number(where: str, value: Any) -> float:
    """``value`` as a float, or ConfigError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(f"{where}: expected a number, found {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, found {value}")
    return float(value)


def check_choice(where: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ConfigError if ``value`` is not one of ``choices``."""
    # By identity of type too: 0 == False must not pass for it.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{where}: expected one of {list(choices)}, found {value!r}")


def check_kind(where: str, value: Any, kind: Any, *, optional: bool = False) -> None:
    """ConfigError if ``value`` is not of ``kind``, nor None where that is allowed."""
    if not (isinstance(value, kind) or (optional and value is None)):
        name = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where}: expected {name}{' or None' if optional else ''}, found {value!r}")
