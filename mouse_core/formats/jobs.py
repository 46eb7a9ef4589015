"""Resumable jobs, which write their result part by part in a temporary folder.

A job writes its parts into a folder next to its target. The file ``job.json`` (the note) lists the finished parts with
the checksums of their files. The note also holds the fingerprint of the job, which covers all inputs of the result.
After an interruption, a job with the same fingerprint keeps the parts whose files are complete, and writes the other
parts::

    rows                    the result, once it is complete
    .rows.converting/
        lock                held by the process that works on the job
        job.json            {"fingerprint": {...}, "parts": {"0": {...}, "1": {...}}, "facts": {...}, "complete": false}
        part-00000.arrow    a part that the note lists
        part-00002.arrow    an incomplete part; the next run removes it

A fingerprint includes the identity of a user's function: the function's name, and a digest of the function's code and
of the values that the function uses.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import inspect
import json
import os
import pickle
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from types import CodeType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, Self

import numpy as np

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError, DataError
from mouse_core.files import writing
from mouse_core.files.checksum import file_digest
from mouse_core.files.locking import Held
from mouse_core.files.reading import read_json_object

# Names of folders of installed packages; Debian uses another name.
_PACKAGES = frozenset({"site-packages", "dist-packages"})
# The folder of this library, which may be an editable installation.
_OWN = str(Path(__file__).parents[1])
# Types of the members that Python adds to classes.
_OF_PYTHON = (MemberDescriptorType, GetSetDescriptorType)


def pickled(function: Callable[..., Any]) -> bytes:
    """Return the pickled function.

    Raises:
        ConfigError: The value is not a function, or cannot be pickled.
    """
    if not callable(function):
        raise ConfigError(f"function: expected a function of a dict of arrays, found {function!r:.80}")
    try:
        return pickle.dumps(function, protocol=5)
    except Exception as error:  # user objects may raise any error
        raise ConfigError(
            f"function: expected a function that can be pickled for other processes, found {_name(function)} "
            f"({error}); define the function with def at the top of a module, and bind its arguments with "
            "functools.partial"
        ) from error


def identity(function: Callable[..., Any], version: str) -> dict[str, str]:
    """Return the identity of a function: the function's name, a digest of its code and of the values that it uses, and
    a version.

    Args:
        function: A function that can be pickled; see ``pickled``.
        version: The user's version of the function.

    Raises:
        ConfigError: An error of ``digest_of``.
    """
    digest = digest_of(function, version, "function")
    return {"function": _name(function), "code of the function": digest[:32], "version": version}


def digest_of(function: Callable[..., Any], version: str, called: str) -> str:
    """Return a digest of everything that determines the result of a function or callable object.

    Args:
        function: The function or callable object.
        version: The user's version of the function. With a version, the digest leaves out values that ``in_words``
            cannot describe.
        called: Name of the function in error messages.

    Raises:
        ConfigError: The function uses a value that ``in_words`` cannot describe, and ``version`` is empty.
    """
    try:
        return _digest(in_words(function))
    except Exception as error:  # user objects may raise any error
        if not version:
            raise ConfigError(
                f"{called}: expected a function that uses only values that can be pickled and compared, found "
                f"{_name(function)}: {error}; pass version='1', and a new version after each change"
            ) from error
    while isinstance(function, partial):
        function = function.func
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    codes = [part for _, part in _members_of(kind)] if inspect.isclass(kind) else [kind]
    return _digest(f"{_name(kind)} {[_compiled(code.__code__) for code in codes if inspect.isfunction(code)]}")


def in_words(value: Any) -> str:
    """Return a text that describes a picklable value completely, and that is the same in every process.

    A pickle is unsuitable for two reasons: it orders sets by hashes that differ between processes, and its bytes depend
    on whether two equal texts are the same object. The description of a function consists of its compiled code (not the
    text of its file, which can have changed since), its defaults, its closure, and the values that it reads from its
    module and from modules that it names. The description of a class is its name, functions and attributes, including
    inherited functions and attributes. The description of an object is its class and pickled state. The description of
    a module is its name. In installed packages, functions are described only by their code, and classes only by their
    name.

    Raises:
        ConfigError: A function uses a value that cannot be pickled.
        Exception: Pickling an object raised this error.
    """
    return _Words().of(value, ())


class _Words:
    """Builds the description of a value and of all values in it; each function and class is described only once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, value: Any, within: tuple[Any, ...]) -> str:
        """Describe ``value``; ``within`` has the values that contain ``value``, outermost first."""
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
            # pickle stores a function of functools.cache only by name.
            wrapped = f" {self.of(value.__wrapped__, within)}" if hasattr(value, "__wrapped__") else ""
            return f"{_name(kind)} {parts}{wrapped}"
        listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
        return f"{self.of(kind, within)}({[self.of(part, within) for part in listed]})"

    def _of_code(self, value: Any, within: tuple[Any, ...]) -> str:
        """Describe a function or class by its name and a digest of its code and of all values that it uses."""
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
            except Exception as error:  # user objects may raise any error
                raise ConfigError(f"{name} of {_name(value)}, a {type(part).__name__}: {error}") from error
        return f"{_name(value)} {_digest(f'{said} {words}')}"


def _parts_of(function: Any) -> list[tuple[str, Any]]:
    """Return the defaults of a function, the values of its closure, and the names that the function reads from its
    module.
    """
    code = function.__code__
    parts = [("defaults", function.__defaults__), ("defaults by keyword", function.__kwdefaults__)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the closure's cell is still empty
            parts.append((f"{name!r}", cell.cell_contents))
    if not _is_installed(code.co_filename):
        of_module, names = function.__globals__, _names_in(code)
        parts += [(f"{name!r}", of_module[name]) for name in sorted(names) if name in of_module]
        for name, part in list(parts):
            if inspect.ismodule(part):
                parts += _read_of(part, name, names)
    return parts


def _read_of(module: ModuleType, called: str, names: set[str]) -> list[tuple[str, Any]]:
    """Return the values of ``names`` in a module and in the modules that these values refer to, except installed
    packages.
    """
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
    """Return the members of a class by name: functions, wrapped functions and values.

    Members that Python adds are left out.
    """
    found: list[tuple[str, Any]] = []
    for name, member in sorted(vars(kind).items()):
        wrapped = [getattr(member, inner, None) for inner in ("__func__", "fget", "fset", "fdel", "func")]
        if isinstance(member, staticmethod | classmethod | property | cached_property):
            found += [(name, one) for one in wrapped if one is not None]
        elif inspect.isfunction(member) or not (name.startswith(("__", "_abc_")) or isinstance(member, _OF_PYTHON)):
            found.append((name, member))
    return found


def _names_in(code: CodeType) -> set[str]:
    """Return the names in the code of a function and of its inner functions, except globals that the code assigns."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return {name for name in code.co_names if not name.startswith("__")}.union(*inner) - assigned


def _is_installed(file: str) -> bool:
    """Whether a function belongs to Python or to an installed package.

    The digest of a function of an installed package covers only its code.
    """
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


NOTE, _LOCK = "job.json", "lock"
# Largest share of the time for writing notes, so that a long note is not written again after each small part.
_SHARE = 1 / 20


@dataclass(frozen=True)
class Part:
    """Rows that a job has finished.

    Args:
        first: Index of the first row in the source.
        rows: Number of rows in the source.
        digest: Digest of these rows in the source.
        files: Digests of the files by name; see ``files.checksum``.
        facts: Further JSON data about the part.
    """

    first: int
    rows: int
    digest: str
    files: Mapping[str, str]
    facts: Any = None

    @classmethod
    def written(cls, folder: Path, names: Iterable[str], first: int, rows: int, digest: str, facts: Any = None) -> Self:
        """Sync the files of a part in ``folder`` to the disk, and return the part with the checksums of these files."""
        files = {name: folder / name for name in names}
        writing.sync_files([*files.values()])
        writing.sync_folders(file.parent for file in files.values())
        return cls(first, rows, digest, {name: _checksum(file) for name, file in files.items()}, facts)

    def is_in(self, folder: Path) -> bool:
        """Whether all files of the part are in ``folder``, with unchanged content."""
        return all((folder / name).is_file() and _checksum(folder / name) == one for name, one in self.files.items())


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream)


@contextmanager
def locked_job(
    target: Path, kind: str, what: str, fingerprint: Mapping[str, Any], *, in_order: bool = True
) -> Iterator[Job]:
    """Lock the folder ``.NAME.KIND`` next to ``target``, and open the job in it.

    At the end, even after an error, the note is saved. If no part is finished, the folder is removed.

    Args:
        target: Path of the result.
        kind: The last part of the folder's name, such as "converting".
        what, fingerprint, in_order: See ``Job``.

    Raises:
        ConfigError: ``target`` exists, another process is working on the job, or the folder has parts of a job with
            another fingerprint.
        DataError: The note is damaged.
        StorageError: Files cannot be written.
    """
    writing.check_nothing_at(target, what)
    folder = target.with_name(f".{target.name}.{kind}")
    with writing.storing(f"{what}: {str(target)!r}"):
        writing.make_folder(folder)
        with Held(folder / _LOCK, what):
            try:
                job = Job(folder, what, fingerprint, in_order=in_order)
                try:
                    yield job
                except BaseException:
                    # The first error counts, for example on a full disk.
                    with suppress(OSError):
                        job.save()
                    raise
                job.save()
            finally:
                if not (folder / NOTE).exists():
                    writing.remove(folder)


class Job:
    """A job and its finished parts.

    Args:
        folder: The folder of the parts.
        what: Name of the function that runs the job; error messages begin with this name.
        fingerprint: All inputs of the result, by name.
        in_order: Whether a part can be kept only if all parts before it are kept.

    Attributes:
        parts: Finished parts by index.
        facts: JSON data about the job.
        complete: Whether all parts are finished.

    Raises:
        ConfigError: The folder has parts of a job with another fingerprint.
        DataError: The note is damaged.
    """

    def __init__(self, folder: Path, what: str, fingerprint: Mapping[str, Any], *, in_order: bool = True) -> None:
        self.folder, self.fingerprint = folder, dict(fingerprint)
        self._others = f"{what}: {str(folder)!r} has unfinished work", "finish it, or delete the folder"
        self.parts: dict[int, Part] = {}
        self.facts: dict[str, Any] = {}
        self.complete = False
        self._saved, self._seconds = 0.0, 0.0
        if (folder / NOTE).exists():
            advice = f"delete the folder {str(folder)!r}, and call again"
            noted, parts, facts, complete = read_note(folder / NOTE, advice)
            check_same(noted, fingerprint, *self._others)
            chosen = takewhile if in_order else filter
            self.parts = dict(chosen(lambda item: item[1].is_in(folder), parts.items()))
            self.facts = facts
            self.complete = complete and len(self.parts) == len(parts)
        kept = (NOTE, _LOCK, *(name for part in self.parts.values() for name in part.files))
        # The deepest paths come first, so that a folder is empty when it is removed.
        for path in sorted(folder.rglob("*"), reverse=True):
            if not path.relative_to(folder).as_posix().startswith(kept):
                with suppress(OSError):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    @property
    def rows(self) -> int:
        """Number of rows of the source in all finished parts."""
        return sum(part.rows for part in self.parts.values())

    def begin_anew(self) -> None:
        """Remove all parts, so that the job starts again from the beginning."""
        for part in self.parts.values():
            for name in part.files:
                writing.remove(self.folder / name)
        self.parts, self.facts, self.complete = {}, {}, False

    def add(self, part: Part, number: int | None = None) -> None:
        """Add a part, by default after the last part.

        Also save the note, unless saving would take too large a share of the job's time.
        """
        self.parts[len(self.parts) if number is None else number] = part
        if time.monotonic() >= self._saved + self._seconds / _SHARE:
            self.save()

    def save(self) -> None:
        """Write the note if a part is finished; raise OSError if the note cannot be written."""
        if not self.parts:
            return
        began = time.monotonic()
        parts = {str(number): vars(part) for number, part in self.parts.items()}
        note = {"fingerprint": self.fingerprint, "parts": parts, "facts": self.facts, "complete": self.complete}
        with writing.replacing(self.folder / NOTE, only_writer=True) as partial:
            partial.write_text(json.dumps(note), encoding="utf-8")
        self._saved = time.monotonic()
        self._seconds = self._saved - began

    def result_folder(self) -> Path:
        """Return a new empty folder for the result."""
        folder = self.folder / "result"
        writing.remove(folder)
        folder.mkdir()
        return folder

    def finish(self, result: Path, target: Path) -> None:
        """Rename the result to the target, and remove all other files of the job."""
        writing.put_in_place(result, target)
        self.discard()

    def discard(self) -> None:
        """Remove all files of the job."""
        writing.remove(self.folder)
        self.parts = {}

    def check_rows(self, digest_of: Callable[[Part], str]) -> None:
        """Raise ConfigError if the rows of a finished part have changed in the source.

        Args:
            digest_of: A function that takes a part, and returns the digest of its rows in the source.
        """
        check_rows(self.parts, digest_of, *self._others)


def check_rows(parts: Mapping[int, Part], digest_of: Callable[[Part], str], where: str, remedy: str) -> None:
    """Raise ConfigError if the rows of a part have changed in the source; the message names these rows."""
    for part in parts.values():
        if digest_of(part) != part.digest:
            some = f"{part.first}..{part.first + part.rows - 1}"
            raise ConfigError(f"{where} with other inputs, which differ in some of the rows {some}; {remedy}")


def read_note(file: Path, advice: str) -> tuple[dict[str, Any], dict[int, Part], dict[str, Any], bool]:
    """Read ``job.json``; return the fingerprint, the parts, the facts, and whether the job is complete.

    Raises:
        DataError: The file is not a valid note; the message ends with ``advice``.
    """
    try:
        found = read_json_object(file)
        parts = {int(number): Part(**part) for number, part in found["parts"].items()}
        return dict(found["fingerprint"]), parts, dict(found["facts"]), bool(found["complete"])
    except (DataError, *UNREADABLE) as error:
        raise DataError(f"{file}: expected the note of a job, found something else ({error}); {advice}") from error


def check_same(noted: Mapping[str, Any], fingerprint: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise ConfigError if the fingerprints of two jobs differ; the message names the differences."""
    wanted = json.loads(json.dumps(dict(fingerprint)))
    differing = [name for name, value in wanted.items() if noted.get(name) != value]
    differing += [name for name in noted if name not in wanted]
    if differing:
        raise ConfigError(f"{where} with other inputs, which differ in {', '.join(differing)}; {remedy}")
