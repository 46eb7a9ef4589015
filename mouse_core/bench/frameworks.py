"""The frameworks that batches are measured in, by name: the core imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.spec import check_list

# Framework, the package that has its loader, and the module without which that package cannot be imported.
PACKAGES = {"numpy": ("mouse_core", "numpy"), "torch": ("mouse_torch", "tensordict"), "jax": ("mouse_jax", "grain")}


def frameworks_of(frameworks: Sequence[str] | None) -> list[str]:
    """The frameworks that are asked for, or all that are installed.

    Raises:
        ConfigError: One that is not known.
    """
    if frameworks is None:
        return [name for name, (_, needs) in PACKAGES.items() if importlib.util.find_spec(needs) is not None]
    frameworks = check_list("frameworks", frameworks)
    for name in frameworks:
        if name not in PACKAGES:
            raise ConfigError(f"frameworks: expected some of {list(PACKAGES)}, found {name!r}")
    return list(frameworks)


def class_of(framework: str, name: str) -> Callable[..., Any]:
    """The framework's loader or buffer; named, not imported, for the core knows no framework.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        made: Callable[..., Any] = getattr(importlib.import_module(PACKAGES[framework][0]), name)
    except ImportError as error:
        raise ConfigError(f"frameworks: expected {framework} to be installed: {error}") from error
    return made
