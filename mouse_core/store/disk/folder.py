"""A store's folder as its one writer has it: locked, cleaned of what a crash left, and changed manifest by manifest."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mouse_core.errors import ConfigError
from mouse_core.files.locking import Held
from mouse_core.files.reading import reading
from mouse_core.files.writing import make_folder, remove, remove_leftovers, storing
from mouse_core.store.disk.manifest import NAME, Manifest, parse_manifest, write_manifest

_LOCK = "lock"
# What a writer makes: a crash may leave some that no manifest names.
_OURS = re.compile(r"tail-(\d{6,})\..*|(\d{6,})\.arrow")


class ReadFolder:
    """A folder as its readers see it: the manifest that is there, read again once it was replaced.

    Args:
        path: The folder.

    Raises:
        ConfigError: There is no store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self.manifest = Manifest()
        if not (path / NAME).exists():
            what = "nothing" if not path.exists() else "a folder without one" if path.is_dir() else "a file"
            raise ConfigError(
                f"{path}: expected a folder with a store ({NAME}), found {what}; "
                f"DatasetStore.open({str(path)!r}, 'a') makes one"
            )
        self.look()

    def look(self) -> bool:
        """Read the manifest if it is another one than before; whether it was.

        The file that was read stays open: so no other file can have its number, and two that differ are told apart.
        """
        file = self.path / NAME
        with storing(f"manifest {file}"):
            found = os.stat(file)
            if self._file >= 0 and os.path.samestat(found, os.fstat(self._file)):
                return False
            opened = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        try:
            with reading(file), os.fdopen(os.dup(opened), "rb") as stream:
                manifest = parse_manifest(file, stream.read())
        except BaseException:
            os.close(opened)
            raise
        self.close()
        self._file, self.manifest = opened, manifest
        return True

    def close(self) -> None:
        """Close the manifest; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


class WrittenFolder:
    """A folder with its writer's lock.

    Args:
        path: The folder; made if it is not there.

    Raises:
        ConfigError: Another one writes to it, or it holds something else.
        DataError: The manifest is damaged.
        StorageError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest()
        file = path / NAME
        with storing(f"store {path}"):
            make_folder(path)
            if not file.exists() and any(not _is_ours(name) for name in os.listdir(path)):
                raise ConfigError(f"{path}: expected a folder with a store, or an empty one, found {_shown(path)}")
            self._lock = Held(path / _LOCK, f"store {path}")
        try:
            if file.exists():
                with reading(file):
                    self.manifest = parse_manifest(file, file.read_bytes())
                self.remove_unnamed()
            else:
                self.remove_unnamed()
                self.replace(Manifest())
        except BaseException:
            self._lock.close()
            raise

    def replace(self, manifest: Manifest) -> None:
        """Have another manifest, on the disk; see ``write_manifest``."""
        write_manifest(self.path, manifest)
        self.manifest = manifest

    def new_number(self) -> int:
        """A number that no file had; it is only taken with the manifest that names the file."""
        return self.manifest.next_number

    def remove_unnamed(self) -> None:
        """Remove files that no manifest names any more, or yet: what a crash left, and what was sealed or dropped."""
        remove_leftovers(self.path, only_writer=True)
        segments = {one.number for one in self.manifest.segments}
        for folder, named in ((self.path, set(self.manifest.tails)), (self.path / "segments", segments)):
            try:
                found = os.listdir(folder)
            except FileNotFoundError:
                continue
            for name in found:
                match = _OURS.fullmatch(name)
                if match and int(match[1] or match[2]) not in named:
                    remove(folder / name)

    def close(self) -> None:
        """Let others write."""
        self._lock.close()


def _is_ours(name: str) -> bool:
    return name in (_LOCK, "segments") or name.startswith(f".{NAME}") or _OURS.fullmatch(name) is not None


def _shown(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not _is_ours(name))[:8]
