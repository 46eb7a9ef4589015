"""Functions by where they stand, so that another process finds them; names of variants and frameworks."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from mouse_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*")


def check_names(where: str, names: Iterable[object]) -> None:
    """Raise ConfigError where a name cannot be a folder's and a part of a run's."""
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: expected names of letters, digits and any of ._+=-, found {name!r}")
    if not names:
        raise ConfigError(f"{where}: expected one or more, found none")


def reference(function: Callable[..., Any] | str, where: str) -> dict[str, str | None]:
    """Return the location of a function: its ``module``, its ``name``, and a ``file`` if the module has no import name.

    Args:
        function: A function at the top of a module or script, or "module:name".
        where: The prefix of error messages.

    Raises:
        ConfigError: Another process could not import the function.
    """
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not colon or not module or not name:
            raise ConfigError(f"{where}: expected a function, or a text 'module:function', found {function!r}")
        return {"module": module, "file": None, "name": name}
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    if not callable(function) or not name:
        raise ConfigError(f"{where}: expected a function, or a text 'module:function', found {function!r:.80}")
    if "<" in name:
        raise ConfigError(
            f"{where}: expected a function at the top of a module, which another process can import, found {name}"
        )
    if module != "__main__":
        return {"module": module, "file": _loaded_from.get(module), "name": name}
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return {"module": spec.name, "file": None, "name": name}
    file = getattr(main, "__file__", None)
    if file is None:
        raise ConfigError(
            f"{where}: expected a function that stands in a file, which another process can import, found {name}, "
            "typed into this one"
        )
    return {"module": Path(file).stem, "file": str(Path(file).resolve()), "name": name}


def found(place: dict[str, str | None], where: str) -> Any:
    """Import the function at a location that ``reference`` returned.

    Raises:
        ConfigError: The module or the name does not exist.
    """
    module, name = str(place["module"]), str(place["name"])
    try:
        holder: Any = load_file(Path(place["file"])) if place["file"] else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise ConfigError(f"{where}: expected a module {module!r} that can be imported, found none") from error
    for part in name.split("."):
        if not hasattr(holder, part):
            raise ConfigError(f"{where}: expected {name!r} in module {module!r}, found no such name")
        holder = getattr(holder, part)
    return holder


# The modules that were loaded from a file, by name; other processes load them in the same way.
_loaded_from: dict[str, str] = {}


def load_file(path: Path) -> ModuleType:
    """The module that a Python file is, with its folder on the path, as ``python path`` has it, but not ``__main__``.

    Raises:
        ConfigError: There is no such file.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"study: expected a Python file, found none at {str(path)!r}")
    if _loaded_from.get(path.stem) == str(path):
        return sys.modules[path.stem]
    if path.stem in sys.modules:
        raise ConfigError(
            f"study: expected a file whose name is not that of a module in use, found {path.name}; give it another"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    _loaded_from[path.stem] = str(path)
    return module
