"""A user's function as a job knows it: pickled for other processes, and recognised when it comes again."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

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
    """What says whether a function is the same: its name, a digest of its text and of what it holds, and a version.

    Args:
        function: One that can be pickled; see ``pickled``.
        version: What the user says of it.
    """
    said = in_words(function)
    innermost = function
    while isinstance(innermost, partial):
        innermost = innermost.func
    if not inspect.isroutine(innermost):
        said += _text(innermost if inspect.isclass(innermost) else type(innermost))
    digest = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()
    return {"function": _name(function), "text of the function": digest[:32], "version": version}


def in_words(value: Any, within: tuple[Any, ...] = ()) -> str:
    """All that decides about a value, in the same words in every process, for any value that can be pickled.

    Not its pickle, in which sets stand in the order of the process's hashes, and which says of texts whether they are
    one object. Functions are their texts, and objects what they are pickled as.

    Args:
        value: The value.
        within: What it is a part of, outermost first.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if any(value is one for one in within):
        return f"itself, {[value is one for one in within].index(True)}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array({value.dtype}, {value.shape}, {digest})"
    if inspect.isfunction(value):
        return _text(value)
    if inspect.isclass(value):
        return _name(value)
    if type(value) in (dict, set, frozenset, tuple, list):
        return _collection_in_words(value, (*within, value))
    return _object_in_words(value, (*within, value))


def _collection_in_words(value: Any, within: tuple[Any, ...]) -> str:
    if type(value) is dict:
        pairs = sorted((in_words(key, within), in_words(item, within)) for key, item in value.items())
        return f"dict({pairs})"
    words = [in_words(item, within) for item in value]
    return f"{type(value).__name__}({words if isinstance(value, tuple | list) else sorted(words)})"


def _object_in_words(value: Any, within: tuple[Any, ...]) -> str:
    """Those of what an object is pickled as."""
    known = copyreg.dispatch_table.get(type(value))
    parts = known(value) if known is not None else value.__reduce_ex__(4)
    if isinstance(parts, str):
        return f"{_name(type(value))} {parts}"
    listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return f"{_name(type(value))}({[in_words(part, within) for part in listed]})"


def _text(part: Any) -> str:
    """The text that a function or a class stands in; what it was compiled to where that is not known."""
    name = _name(part)
    try:
        return f"{name}: {inspect.getsource(part)}"
    except (OSError, TypeError):
        pass
    if inspect.isfunction(part):
        return f"{name}: {_compiled(part.__code__)} {in_words([part.__defaults__, part.__kwdefaults__])}"
    members = sorted((key, member) for key, member in vars(part).items() if inspect.isfunction(member))
    return f"{name}: {[_text(member) for _, member in members]}"


def _compiled(code: CodeType) -> str:
    constants = [_compiled(one) if isinstance(one, CodeType) else in_words(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
