"""Pickle a user's function for other processes, and tell by its identity whether a later call has the same function."""

from __future__ import annotations

import copyreg
import dis
import hashlib
import inspect
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np

from mouse_core.errors import ConfigError

# Names of folders of packages; Debian has its own.
_PACKAGES = frozenset({"site-packages", "dist-packages"})
# The folder of this library, which may be installed as a working copy.
_OWN = str(Path(__file__).parents[1])
# Types of the members that Python adds to classes.
_OF_PYTHON = (MemberDescriptorType, GetSetDescriptorType)


def pickled(function: Callable[..., Any]) -> bytes:
    """Return the pickled function.

    Raises:
        ConfigError: The value is no function, or cannot be pickled.
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
    """Return the identity of a function: its name, a digest of its code and of the values it uses, and a version.

    Args:
        function: A function that can be pickled; see ``pickled``.
        version: The user's version of the function.

    Raises:
        ConfigError: As ``digest_of``.
    """
    digest = digest_of(function, version, "function")
    return {"function": _name(function), "code of the function": digest[:32], "version": version}


def digest_of(function: Callable[..., Any], version: str, called: str) -> str:
    """Return a digest of everything that determines the result of a function, or of an object that is called.

    Args:
        function: The function or object.
        version: The user's version of the function. If given, parts that cannot be described are left out.
        called: Name of the function in messages.

    Raises:
        ConfigError: The function holds or reads a value that cannot be described, and ``version`` is empty.
    """
    try:
        return _digest(in_words(function))
    except Exception as error:  # whatever the pickling of somebody's object raises
        if not version:
            raise ConfigError(
                f"{called}: expected one of which all is known that decides about what it gives, found "
                f"{_name(function)}: {error}; say version='1', and another where it changes"
            ) from error
    while isinstance(function, partial):
        function = function.func
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    codes = [part for _, part in _members_of(kind)] if inspect.isclass(kind) else [kind]
    return _digest(f"{_name(kind)} {[_compiled(code.__code__) for code in codes if inspect.isfunction(code)]}")


def in_words(value: Any) -> str:
    """Describe a value completely, in the same words in every process, for any value that can be pickled.

    A pickle would not do: it orders sets by the process's hashes, and records whether equal texts are one object.
    Functions are their code as it was compiled (not the text of their file, which may have changed since),
    defaults and what they close over, and what they read of their modules, and of modules that these name; classes are
    their names, functions and attributes, with those of the classes that they inherit from; objects are their classes
    and what they are pickled as; modules are their names. Of installed packages functions are their code, and classes
    their names.

    Raises:
        ConfigError: A function holds or reads something that cannot be pickled.
        Exception: Pickling an object raises it.
    """
    return _Words().of(value, ())


class _Words:
    """Words of a value and of its parts; a function or a class that is met again is not looked at again."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, value: Any, within: tuple[Any, ...]) -> str:
        """Describe a value within others, which are given outermost first."""
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            return repr(value)
        if any(value is one for one in within):
            return f"itself, {[value is one for one in within].index(True)}"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"array({value.dtype}, {value.shape}, {digest})"
        if inspect.ismethod(value):
            return f"{self.of(value.__func__, within)} of {self.of(value.__self__, within)}"
        if inspect.ismodule(value):
            return f"module {value.__name__}"
        within = (*within, value)
        if inspect.isfunction(value) or inspect.isclass(value):
            if id(value) not in self._known:
                self._known[id(value)] = self._of_code(value, within)
            return self._known[id(value)]
        if kind is dict:
            return f"dict({sorted((self.of(key, within), self.of(item, within)) for key, item in value.items())})"
        if kind in (set, frozenset, tuple, list):
            words = [self.of(item, within) for item in value]
            return f"{kind.__name__}({words if kind in (tuple, list) else sorted(words)})"
        reduce = copyreg.dispatch_table.get(kind)
        parts = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(parts, str):
            # What functools.cache makes is pickled as a name.
            wrapped = f" {self.of(value.__wrapped__, within)}" if hasattr(value, "__wrapped__") else ""
            return f"{_name(kind)} {parts}{wrapped}"
        listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
        return f"{self.of(kind, within)}({[self.of(part, within) for part in listed]})"

    def _of_code(self, value: Any, within: tuple[Any, ...]) -> str:
        """Describe a function or a class by its name and a digest of its code and of all that it reads or holds."""
        if inspect.isfunction(value):
            said, parts = _compiled(value.__code__), _parts_of(value)
        else:
            own = [one for one in value.__mro__ if not _is_of_package(sys.modules.get(one.__module__))]
            if not own:
                return _name(value)
            said = str([_name(one) for one in value.__mro__])
            parts = [(f"{one.__name__}.{name}", part) for one in own for name, part in _members_of(one)]
        words = []
        for name, part in parts:
            try:
                words.append(f"{name} {self.of(part, within)}")
            except ConfigError:
                raise
            except Exception as error:  # whatever the pickling of somebody's object raises
                raise ConfigError(f"{name} of {_name(value)}, a {type(part).__name__}: {error}") from error
        return f"{_name(value)} {_digest(f'{said} {words}')}"


def _parts_of(function: Any) -> list[tuple[str, Any]]:
    """Return a function's defaults, closure values, and the names that it reads from its module."""
    code = function.__code__
    parts = [("defaults", function.__defaults__), ("defaults by keyword", function.__kwdefaults__)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            parts.append((f"{name!r}", cell.cell_contents))
    if not _is_installed(code.co_filename):
        of_module, (read, named) = function.__globals__, _names_read(code)
        parts += [(f"{name!r}", of_module[name]) for name in sorted(read) if name in of_module]
        for name, part in list(parts):
            if inspect.ismodule(part):
                parts += _read_of(part, name, named)
    return parts


def _read_of(module: ModuleType, called: str, names: set[str]) -> list[tuple[str, Any]]:
    """Return the values of some names in a module outside installed packages, and in such modules within it."""
    parts: list[tuple[str, Any]] = []
    todo, seen = [(called, module)], [module]
    while todo:
        where, one = todo.pop()
        if _is_of_package(one):
            continue
        found = [(f"{where}.{name!r}", vars(one)[name]) for name in sorted(names & vars(one).keys())]
        parts += found
        todo += [(name, part) for name, part in found if inspect.ismodule(part) and part not in seen]
        seen += [part for _, part in todo]
    return parts


def _members_of(kind: type) -> list[tuple[str, Any]]:
    """Return the members of a class by name: functions, also wrapped ones, and values that Python did not add."""
    found: list[tuple[str, Any]] = []
    for name, member in sorted(vars(kind).items()):
        wrapped = [getattr(member, inner, None) for inner in ("__func__", "fget", "fset", "fdel", "func")]
        if isinstance(member, staticmethod | classmethod | property | cached_property):
            found += [(name, one) for one in wrapped if one is not None]
        elif inspect.isfunction(member) or not (name.startswith(("__", "_abc_")) or isinstance(member, _OF_PYTHON)):
            found.append((name, member))
    return found


def _names_read(code: CodeType) -> tuple[set[str], set[str]]:
    """Names of a module that a function reads, in functions within it, too, but those that it sets itself; and all
    names in it, attributes among them.
    """
    found: dict[str, set[str]] = {"LOAD": set(), "STORE": set()}
    named: set[str] = set()
    todo = [code]
    while todo:
        one = todo.pop()
        named.update(one.co_names)
        todo += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(one):
            way, _, kind = step.opname.partition("_")
            if kind == "GLOBAL" and way in found:
                found[way].add(step.argval)
    read, named = ({name for name in some if not name.startswith("__")} for some in (found["LOAD"], named))
    return read - found["STORE"], named


def _is_installed(file: str) -> bool:
    """Whether a function is of Python or of a package, which is known by its code alone."""
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _OWN)
    return file.startswith(("<frozen ", *(f"{one}{os.sep}" for one in folders))) or not _PACKAGES.isdisjoint(
        Path(file).parts
    )


def _is_of_package(module: ModuleType | None) -> bool:
    """Whether a module belongs to an installed package."""
    if module is None or module.__name__ in sys.builtin_module_names:
        return module is not None
    file = getattr(module, "__file__", None)
    return _is_installed(file) if file else getattr(module.__spec__, "origin", None) == "frozen"


def _digest(said: str) -> str:
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def _compiled(code: CodeType) -> str:
    constants = [_compiled(one) if isinstance(one, CodeType) else in_words(one) for one in code.co_consts]
    caught = getattr(code, "co_exceptiontable", b"").hex()
    return f"{code.co_flags} {code.co_code.hex()} {caught} {code.co_names} {code.co_varnames} {constants}"


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
