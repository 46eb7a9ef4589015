"""A user's function as a job knows it: pickled for other processes, and recognised when it comes again."""

from __future__ import annotations

import copyreg
import dis
import hashlib
import inspect
import os
import pickle
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError

# What folders of packages are called, and Debian's.
_PACKAGES = frozenset({"site-packages", "dist-packages"})


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

    Raises:
        ConfigError: As ``digest_of``.
    """
    digest = digest_of(function, version, "function")
    return {"function": _name(function), "text of the function": digest[:32], "version": version}


def digest_of(function: Callable[..., Any], version: str, called: str) -> str:
    """A digest of all that decides about what a function, or an object that is called, gives.

    Args:
        function: It.
        version: What the user says of it. Where there is one, what has no words is left out.
        called: What messages call it.

    Raises:
        ConfigError: It holds or reads what has no words, and no version is said.
    """
    innermost = function
    while isinstance(innermost, partial):
        innermost = innermost.func
    if not inspect.isroutine(innermost):
        innermost = innermost if inspect.isclass(innermost) else type(innermost)
    try:
        said = in_words(function)
    except Exception as error:  # whatever the pickling of somebody's object raises
        if not version:
            raise ConfigError(
                f"{called}: expected one of which all is known that decides about what it gives, found "
                f"{_name(function)}: {error}; say version='1', and another where it changes"
            ) from error
        said = _text(innermost)
    if inspect.isclass(innermost):
        said += _text(innermost)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def in_words(value: Any) -> str:
    """All that decides about a value, in the same words in every process, for any value that can be pickled.

    Not its pickle, in which sets stand in the order of the process's hashes, and which says of texts whether they are
    one object. Functions are their texts, defaults and what they close over, and, but for those of installed packages,
    what they read of their modules, functions as well; modules and classes are their names, and objects what they are
    pickled as.

    Raises:
        ConfigError: A function holds or reads something that cannot be pickled.
        Exception: Whatever the pickling of an object raises.
    """
    return _Words().of(value, ())


class _Words:
    """Words of a value and of its parts; a function that is met again is not looked at again."""

    def __init__(self) -> None:
        self._functions: dict[int, str] = {}

    def of(self, value: Any, within: tuple[Any, ...]) -> str:
        """Those of a value that is a part of others, outermost first."""
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return repr(value)
        if any(value is one for one in within):
            return f"itself, {[value is one for one in within].index(True)}"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"array({value.dtype}, {value.shape}, {digest})"
        if inspect.isfunction(value):
            return self._of_function(value, (*within, value))
        if inspect.ismethod(value):
            return f"{self.of(value.__func__, within)} of {self.of(value.__self__, within)}"
        if inspect.isclass(value):
            return _name(value)
        if inspect.ismodule(value):
            return f"module {value.__name__}"
        if type(value) in (dict, set, frozenset, tuple, list):
            return self._of_collection(value, (*within, value))
        return self._of_object(value, (*within, value))

    def _of_collection(self, value: Any, within: tuple[Any, ...]) -> str:
        if type(value) is dict:
            pairs = sorted((self.of(key, within), self.of(item, within)) for key, item in value.items())
            return f"dict({pairs})"
        words = [self.of(item, within) for item in value]
        return f"{type(value).__name__}({words if isinstance(value, tuple | list) else sorted(words)})"

    def _of_object(self, value: Any, within: tuple[Any, ...]) -> str:
        """Those of what an object is pickled as."""
        known = copyreg.dispatch_table.get(type(value))
        parts = known(value) if known is not None else value.__reduce_ex__(4)
        if isinstance(parts, str):
            # What functools.cache makes is pickled as a name.
            wrapped = f" {self.of(value.__wrapped__, within)}" if hasattr(value, "__wrapped__") else ""
            return f"{_name(type(value))} {parts}{wrapped}"
        listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
        return f"{_name(type(value))}({[self.of(part, within) for part in listed]})"

    def _of_function(self, function: Any, within: tuple[Any, ...]) -> str:
        found = self._functions.get(id(function))
        if found is None:
            parts = [f"{name} {self._of_part(name, part, within)}" for name, part in _parts_of(function)]
            said = f"{_text(function)} {parts}"
            found = self._functions[id(function)] = hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()
        return found

    def _of_part(self, name: str, part: Any, within: tuple[Any, ...]) -> str:
        try:
            return self.of(part, within)
        except ConfigError:
            raise
        except Exception as error:  # whatever the pickling of somebody's object raises
            raise ConfigError(f"{name} of {_name(within[-1])}, a {type(part).__name__}: {error}") from error


def _parts_of(function: Any) -> list[tuple[str, Any]]:
    """Of a function, by name, what it takes by default and closes over, and what it reads of its module."""
    code = function.__code__
    parts = [("defaults", function.__defaults__), ("defaults by keyword", function.__kwdefaults__)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            parts.append((f"{name!r}", cell.cell_contents))
    if not _is_installed(code.co_filename):
        of_module = function.__globals__
        parts += [(f"{name!r}", of_module[name]) for name in sorted(_names_read(code)) if name in of_module]
    return parts


def _names_read(code: CodeType) -> set[str]:
    """Names of a module that a function reads, in functions within it, too, but those that it sets itself."""
    found: dict[str, set[str]] = {"LOAD": set(), "STORE": set()}
    todo = [code]
    while todo:
        one = todo.pop()
        todo += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(one):
            way, _, kind = step.opname.partition("_")
            if kind == "GLOBAL" and way in found:
                found[way].add(step.argval)
    return {name for name in found["LOAD"] - found["STORE"] if not name.startswith("__")}


def _is_installed(file: str) -> bool:
    """Whether a function is of Python or of a package, which is known by its text alone."""
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return file.startswith(("<frozen ", *(f"{one}{os.sep}" for one in folders))) or not _PACKAGES.isdisjoint(
        Path(file).parts
    )


def _text(part: Any) -> str:
    """The text that a function or a class stands in; what it was compiled to where that is not known."""
    name = _name(part)
    try:
        # Of its code, as otherwise it is the text of what a function wraps.
        return f"{name}: {inspect.getsource(part.__code__ if inspect.isfunction(part) else part)}"
    except (OSError, TypeError):
        pass
    if inspect.isfunction(part):
        return f"{name}: {_compiled(part.__code__)}"
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
