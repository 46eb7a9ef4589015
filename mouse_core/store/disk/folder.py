"""A store's folder: which state of it readers look at, and the lock, the files and the manifest of its one writer.

A reader that opened a manifest may open the files that it names much later, when a batch needs their rows. A writer
that drops old rows, or puts one file in the place of several, removes a file only when nobody looks at a state any more
that named it. States are numbered by ``next_number`` of their manifests, which grows whenever a file is dropped::

    state 7 names the files 4, 5, 6     a reader locks byte 7 of the file "readers"
    state 9 names the file 8            which is 4, 5 and 6 in one; they can be needed in states 5..7, 6..7 and 7..7,
                                        and byte 7 is locked, so these three stay
    the reader looks again              it locks byte 9 and lets go of byte 7: they are removed

The locks are shared and belong to open files (``F_OFD_SETLK`` of Linux), so that the system frees them when their
holder ends, however it ends, and a read-only folder will do. Where a system has none, files are removed at once, and a
reader that comes too late is told so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError, StorageError
from mouse_core.files.locking import Descriptor, Held, is_at
from mouse_core.files.log import Log
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import make_folder, remove, remove_leftovers, storing, sync_folders
from mouse_core.store.disk.manifest import (
    COPY,
    LOCK,
    NAME,
    Manifest,
    check_identity,
    new_identity,
    parse_manifest,
    repair_hint,
    write_manifest,
)

READERS = "readers"
"""Name of the file in a store's folder that readers lock."""

# Of Linux: type, whence, start, length, process. 16 bits, 16 bits, then as the machine aligns 64 bits.
_LOCK = "hhqqi4x"


def _can_lock() -> bool:
    return hasattr(fcntl, "F_OFD_SETLK")


class Lease(Descriptor):
    """A reader's lock on one state of a folder, for as long as this object lives.

    A forked child has it too, and keeps it as long as it lives itself.

    Args:
        folder: The store's; None: nobody looks at anything.
        state: ``next_number`` of its manifest.
    """

    def __init__(self, folder: Path | None = None, state: int = 0) -> None:
        if folder is not None and _can_lock():
            # Readers of a folder that was made elsewhere, or is copied, are no worse off than without locks.
            try:
                self._file = os.open(folder / READERS, os.O_RDONLY)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, state, 1, 0))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # without a lease rows may be dropped under a reader
                    with storing(f"store {folder}"):
                        raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Files stay for another process as long as whoever sent it there keeps what it sent.
        return Lease, ()


class Shared:
    """A lease that the files of one state share: whoever looks at a later state has another for all of them at once.

    Args:
        lease: The first.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


class Unneeded:
    """Files that the manifest does not name any more, each kept as long as a reader's lock says that it may be needed.

    Args:
        folder: The store's. The file that readers lock is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._readers = Descriptor(os.open(folder / READERS, os.O_RDWR | os.O_CREAT, 0o644))
        self._files: dict[Path, tuple[int, int]] = {}

    def add(self, file: Path, number: int, state: int) -> None:
        """Have a file removed.

        Args:
            file: The file.
            number: Its own; states up to that did not name it.
            state: The last that did.
        """
        self._files.setdefault(file, (number + 1, state))

    def remove_free(self) -> None:
        """Remove the files that no reader needs."""
        for file, states in list(self._files.items()):
            if self.is_free(*states):
                remove(file)
                del self._files[file]

    def is_free(self, first: int, last: int) -> bool:
        """Whether no reader looks at a state among ``first``..``last``."""
        if first > last or not _can_lock():
            return True
        try:
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, first, last + 1 - first, 0)
            found = fcntl.fcntl(self._readers.file, fcntl.F_OFD_GETLK, asked)
        except OSError:  # a file system without such locks
            return True
        return bool(struct.unpack(_LOCK, found)[0] == fcntl.F_UNLCK)

    def forget(self) -> None:
        """Keep all files: where the folder was, another writer may have files of the same names."""
        self._files.clear()

    def close(self) -> None:
        """Remove the files that no reader needs; the next writer removes the others."""
        self.remove_free()
        self._readers.close()


CLIENTS = "clients.log"
"""Name of the log that records which client sent which rows; see ``collect.shared``."""
# What a writer makes: a crash may leave some that no manifest names.
_OURS = re.compile(r"tail-(\d{6,})\..*|(\d{6,})\.arrow")
_SEGMENTS = "segments"


@contextmanager
def repairable(folder: Path) -> Iterator[None]:
    """Say in errors over damaged files what to do about them."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; mouse repair {folder} keeps what is whole") from error


class ReadFolder(Descriptor):
    """A folder as its readers see it: the manifest that is there, read again once it was replaced.

    Args:
        path: The folder.

    Attributes:
        lease: Keeps the files that the manifest names, for whoever has it.

    Raises:
        ConfigError: There is no store.
        DataError: Its manifest is lost or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path / NAME)
        self.manifest, self.lease = Manifest(), Lease()
        # Of the file that was read, which stays open.
        self._number: tuple[int, int] | None = None
        # Looked for before the manifest is: a writer makes this folder and its lock first, then the manifest, then the
        # copy and files of rows.
        had_one, being_made = (path / COPY).exists() or bool(files_of(path)), (path / LOCK).exists()
        if not (path / NAME).exists():
            if had_one:
                raise damaged(path / NAME, f"expected the manifest of a store, found none; {repair_hint(path)}")
            if being_made:
                raise ConfigError(f"{path}: expected a store ({NAME}), found a folder whose writer has made none yet")
            what = (
                "nothing" if not path.exists() else (_shown(path) or "an empty folder") if path.is_dir() else "a file"
            )
            # Where something else lies, no store is made.
            makes = not path.exists() or (path.is_dir() and all(map(_is_ours, os.listdir(path))))
            remedy = f"{str(path)!r}, 'a') makes one" if makes else f"{str(path)!r}).to_store() reads other formats"
            opens = "DatasetStore.open(" if makes else "mouse_core.formats.open("
            if not (path / NAME).exists():  # made while its folder was looked at
                raise ConfigError(f"{path}: expected a folder with a store ({NAME}), found {what}; {opens}{remedy}")
        check_inside([path / NAME, path / READERS], path)
        self.look()

    def look(self) -> bool:
        """Read the manifest if it is another one than before; whether it was. DataError if it is another store's.

        The file that was read stays open: so no other file can have its number, and two that differ are told apart.
        """
        if self._is_read():
            return False
        # Until a lease is had, its writer may remove what a manifest names.
        while True:
            self._read()
            self.lease = Lease(self.path, self.manifest.next_number)
            if self._is_read():
                return True

    def _is_read(self) -> bool:
        """Whether the manifest that was read is still the one there is."""
        try:
            there = os.stat(self._name)
        except OSError as error:
            with storing(f"manifest {self._name}"):
                raise error
        return self._file >= 0 and (there.st_dev, there.st_ino) == self._number

    def _read(self) -> None:
        file = self.path / NAME
        with storing(f"manifest {file}"):
            opened = os.open(file, os.O_RDONLY)
        try:
            with reading(file), os.fdopen(os.dup(opened), "rb") as stream:
                manifest = parse_manifest(file, stream.read(), self.manifest)
        except BaseException:
            os.close(opened)
            raise
        try:
            check_identity(self.path, self.manifest.identity, manifest.identity)
        except BaseException:
            os.close(opened)
            raise
        self.close()
        there = os.fstat(opened)
        self._file, self._number, self.manifest = opened, (there.st_dev, there.st_ino), manifest


class WrittenFolder:
    """A folder with its writer's lock.

    Args:
        path: The folder; made if it is not there.

    Raises:
        ConfigError: Another one writes to it, or it holds something else.
        DataError: The manifest is damaged, or is not there beside files of rows.
        StorageError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock_path, self._manifest_path = path, str(path / LOCK), str(path / NAME)
        self.manifest = Manifest()
        # The number of the next file, and who may take it.
        self._next, self._numbers = 0, threading.Lock()
        # Files that a manifest names which may be on the disk, and is not the one that memory has.
        self._doubted: frozenset[int] = frozenset()
        file = path / NAME
        with storing(f"store {path}"):
            if not file.exists():
                make_folder(path)
                if any(not _is_ours(name) for name in os.listdir(path)):
                    raise ConfigError(f"{path}: expected a folder with a store, or an empty one, found {_shown(path)}")
            self._lock = Held(path / LOCK, f"store {path}")
            make_folder(path / _SEGMENTS, sync=False)  # the manifest waits for its name
        try:
            with storing(f"store {path}"):
                self._unneeded = Unneeded(path)
            if file.exists():
                with reading(file):
                    self.manifest = parse_manifest(file, file.read_bytes())
                self.remove_unnamed()
            else:
                # A store's first file is its manifest: where there are others it was lost, and they must not be.
                rows = sorted(files_of(path))
                if rows:
                    raise damaged(
                        file, f"expected the manifest of the rows in {rows[:4]}, found none; {repair_hint(path)}"
                    )
                remove_leftovers(path, only_writer=True)
                self.replace(Manifest(identity=new_identity()))
            self.lease = Lease(path, self.manifest.next_number)
        except BaseException:
            self._lock.close()
            raise

    def replace(self, manifest: Manifest) -> None:
        """Have another manifest, on the disk; see ``write_manifest``. What it does not name is for ``clean``.

        Raises:
            StorageError: It cannot be written; the one before is there, or, if ``may_name`` says so of a file, it may
                be this one.
        """
        before = self.manifest
        self.check_there()
        if self._doubted:
            # A manifest may be on the disk that is not the one that memory has; from here on it is.
            write_manifest(self.path, before)
            self._doubted = frozenset()
        manifest = replace(manifest, next_number=max(self._next, before.next_number))
        dropped = before.file_numbers() - manifest.file_numbers()
        if dropped and manifest.next_number == before.next_number:
            # Readers of the state before may need them: it must be told from this one.
            manifest = replace(manifest, next_number=manifest.next_number + 1)
        try:
            write_manifest(self.path, manifest)
        except BaseException:
            self._put_back(before, manifest)
            raise
        self.manifest = manifest
        if manifest.next_number != before.next_number:
            self.lease = Lease(self.path, manifest.next_number)
        for name, number in files_of(self.path).items() if dropped else ():
            if number in dropped:
                self._unneeded.add(self.path / name, number, before.next_number)

    def _put_back(self, before: Manifest, failed: Manifest) -> None:
        """Have the manifest before again, where another has taken its place and may not be on the disk."""
        self._doubted = frozenset(failed.file_numbers() - before.file_numbers())
        with suppress(OSError):
            if (self.path / NAME).read_bytes() == before.to_bytes():
                self._doubted = frozenset()
                return
        with suppress(StorageError):
            write_manifest(self.path, before)
            self._doubted = frozenset()

    def may_name(self, number: int) -> bool:
        """Whether the manifest on the disk may name a file, be it that memory's does or not."""
        return number in self._doubted or number in self.manifest.file_numbers()

    def clean(self) -> None:
        """Remove files that no manifest names any more, and whose rows nobody has any more."""
        if self._is_there():
            self._unneeded.remove_free()

    def check_there(self) -> None:
        """Raise StorageError where the folder was removed or moved, and another writer may have one in its place."""
        if not self._is_there():
            found = "another one" if os.path.exists(self.path) else "none"
            raise StorageError(
                f"store {self.path}: expected the folder that was opened to be written, found {found} there; rows are "
                "in it where it was moved, and lost where it was removed"
            )

    def have_manifest(self) -> None:
        """Write the manifest again where somebody removed it: without it nobody finds the rows.

        Raises:
            StorageError: It cannot be written.
        """
        if not os.path.exists(self._manifest_path):
            self.check_there()
            write_manifest(self.path, self.manifest)

    def _is_there(self) -> bool:
        # One that was closed writes nothing any more.
        return self._lock.file < 0 or is_at(self._lock_path, self._lock.file)

    def take_number(self) -> int:
        """A number that no file has had that was ever named.

        Raises:
            StorageError: The folder is not there any more; a file of this number may be another writer's.
        """
        self.check_there()
        with self._numbers:
            number = max(self._next, self.manifest.next_number)
            self._next = number + 1
            return number

    def remove_unnamed(self) -> None:
        """Remove files that no manifest names any more, or yet: what a crash left, and what was sealed or dropped."""
        remove_leftovers(self.path, only_writer=True)
        remove_leftovers(self.path / _SEGMENTS, only_writer=True)
        named = self.manifest.file_numbers()
        unnamed = {name: number for name, number in files_of(self.path).items() if number not in named}
        if unnamed:
            # Whoever put the manifest there may have died before it was on the disk, where an older one names them.
            sync_folders([self.path])
        for name, number in unnamed.items():
            self._unneeded.add(self.path / name, number, self.manifest.next_number - 1)
        self._unneeded.remove_free()

    def note_opened(self, rows: int) -> None:
        """Write down, for clients, how many rows there ever were as the folder was opened.

        Where a crash left 60 of a client's 100 rows, the 61st may be the owner's by the time the clients come back.

        Raises:
            StorageError: It cannot be written; the folder is let go.
        """
        if not (self.path / CLIENTS).exists():
            return
        record = json.dumps({"opened": rows}).encode()
        try:
            log = Log(self.path / CLIENTS)
            try:
                if log.records[-1:] != [record]:
                    log.append(record, sync=True)
            finally:
                log.close()
        except DataError:
            return  # whoever serves the clients says so
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others write."""
        if not self._is_there():
            self._unneeded.forget()
        self._unneeded.close()
        self._lock.close()


def files_of(folder: Path) -> dict[str, int]:
    """The files of rows in a store's folder, named by its manifest or not, and the number of each."""
    found: dict[str, int] = {}
    for part in ("", _SEGMENTS):
        try:
            names = os.listdir(folder / part)
        except FileNotFoundError:
            continue
        matches = {os.path.join(part, name): _OURS.fullmatch(name) for name in names}
        found |= {name: int(match[1] or match[2]) for name, match in matches.items() if match}
    return found


def _is_ours(name: str) -> bool:
    return name in (LOCK, READERS, _SEGMENTS, COPY) or name.startswith(f".{NAME}") or _OURS.fullmatch(name) is not None


def _shown(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not _is_ours(name))[:8]
