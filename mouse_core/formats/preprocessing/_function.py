"""A user's function as a job knows it: pickled for other processes, and recognised when it comes again."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mouse_core.errors import ConfigError


def pickled(function: Callable[..., Any]) -> bytes:
    """The function as other processes get it.

    Raises:
        ConfigError: It is no function, or cannot be pickled.
    """
    if not callable(function):
        raise ConfigError(f"function: expected a function of a dict of arrays, found {function!r:.80}")
    try:
        return pickle.dumps(function, protocol=5)
    except Exception as error:  # whatever the pickling of somebody's object raises
        raise ConfigError(
            f"function: expected one that other processes can be given, found {_name(function)}, which cannot be "
            f"pickled ({error}); define it with def at the top of a module, and give what it needs with "
            "functools.partial"
        ) from error


def identity(function: Callable[..., Any], version: str) -> dict[str, str]:
    """What says whether a function is the same: its name, a digest of its text and of what it holds, and a version."""
    digest = hashlib.sha256(pickled(function))
    for text in _sources(function):
        digest.update(text.encode())
    return {"function": _name(function), "text of the function": digest.hexdigest()[:32], "version": version}


def _sources(function: Any) -> Iterator[str]:
    """The texts that the function itself stands in, where they are known; not those of what it calls."""
    while isinstance(function, partial):
        function = function.func
    for part in (function, type(function)):
        if inspect.isroutine(part) or (inspect.isclass(part) and part.__module__ != "builtins"):
            try:
                yield inspect.getsource(part)
            except (OSError, TypeError):
                continue


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
