"""What a power cut leaves of a folder, at every moment of a program's life.

Nothing but ``fsync`` brings anything to the disk: of a file its content, of a folder the names in it. After every call
that changes names or syncs, the folder is kept as two machines would find it, or three. One has lost all that was not
synced. The second has every name as it is by then, as if renames went ahead of what they name, and of content that was
not synced the first half. The third has the names, too, and of every page of a file either what was synced or what it
was changed to since, by chance: a mapped file reaches the disk page by page, in any order.
"""

import os
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = ("fsync", "fdatasync", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate", "link")
Tree = dict[str, Any]
"""By name: the bytes of a file, or the tree of a folder."""
_PAGE = 4096


@dataclass(frozen=True)
class Moment:
    """What the machines find after a change, and what had been promised by then."""

    change: str
    found: tuple[Tree, ...]
    promised: list[Any]


class Disk:
    """What of a folder is on the disk, and what was at earlier moments; the third machine only with ``by_page``."""

    def __init__(self, root: Path, *, by_page: bool = False) -> None:
        self.root, self.by_page = root, by_page
        self.moments: list[Moment] = []
        self._promised: list[Any] = []
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        # A file that is open keeps its number for itself, also when it is removed: no machine's copy of a file may get
        # the number of the file that it is a copy of, as long as there are machines.
        self._open: list[int] = []
        weakref.finalize(self, _close, self._open)
        self._lock = threading.RLock()
        self._rng = random.Random(0)
        for folder, _, names in os.walk(root):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                self.sync(path)

    def sync(self, path: str) -> None:
        """A file or folder reaches the disk as it is."""
        self._open.append(os.open(path, os.O_RDONLY))
        number = os.fstat(self._open[-1]).st_ino
        if not os.path.isdir(path):
            self._contents[number] = Path(path).read_bytes()
            return
        inside = list(os.scandir(path))
        self._open += [os.open(entry.path, os.O_RDONLY) for entry in inside]
        self._names[number] = {entry.name: (entry.inode(), entry.is_dir()) for entry in inside}

    def _synced(self, number: int, is_folder: bool = True) -> Any:
        if not is_folder:
            return self._contents.get(number, b"")
        return {name: self._synced(*inner) for name, inner in self._names.get(number, {}).items()}

    def _named(self, path: Path, *, by_page: bool = False) -> Any:
        if path.is_dir():
            return {inner.name: self._named(inner, by_page=by_page) for inner in path.iterdir()}
        content = path.read_bytes()
        synced = self._contents.get(path.stat().st_ino, b"")
        if not by_page:
            return synced + content[len(synced) :][: (len(content) - len(synced)) // 2]
        if content == synced:
            return content
        synced = synced.ljust(len(content), b"\0")
        pages = range(0, len(content), _PAGE)
        return b"".join(self._rng.choice((content, synced))[at : at + _PAGE] for at in pages)

    def left(self, rng: random.Random) -> Tree:
        """What one of the first two machines finds now, or one where names, too, reached the disk in any order."""
        self._rng = rng
        which, number = rng.randrange(3), self.root.stat().st_ino
        found = (lambda: self._synced(number), lambda: self._named(self.root), lambda: self._by_chance(self.root))
        return found[which]()

    def _by_chance(self, path: Path) -> Tree:
        """A folder with some of the names that changed, and of every file some of the pages that did."""
        before = self._names.get(path.stat().st_ino, {})
        now = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
        tree = {}
        for name in sorted(before | now):
            entry = self._rng.choice((before.get(name), now.get(name)))
            if entry is None:
                continue
            if entry != now.get(name):
                tree[name] = self._synced(*entry)
            else:
                tree[name] = self._by_chance(path / name) if entry[1] else self._named(path / name, by_page=True)
        return tree

    def promise(self, what: Any) -> None:
        self._promised.append(what)
        self._keep(f"the promise of {what!r:.50}")

    def _keep(self, change: str) -> None:
        synced = self._synced(self.root.stat().st_ino)
        found = (synced, self._named(self.root))
        found += (self._named(self.root, by_page=True),) if self.by_page else ()
        moment = Moment(change, found, list(self._promised))
        if not self.moments or (found, moment.promised) != (self.moments[-1].found, self.moments[-1].promised):
            self.moments.append(moment)

    @contextmanager
    def watched(self) -> Iterator[None]:
        def following(name: str, call: Any) -> Any:
            def followed(*arguments: Any, **options: Any) -> Any:
                with self._lock:
                    done = call(*arguments, **options)
                    if name in ("fsync", "fdatasync"):
                        self.sync(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                    self._keep(f"{name} {arguments[0]}")
                    return done

            return followed

        calls = {name: getattr(os, name) for name in CHANGES}
        try:
            for name, call in calls.items():
                setattr(os, name, following(name, call))
            yield
        finally:
            for name, call in calls.items():
                setattr(os, name, call)

    def machines(self, folder: Path) -> Iterator[tuple[Moment, Path]]:
        """Every moment, and the folder as each machine finds it when it is switched on again; the same ones once."""
        folder.mkdir()
        seen = set()
        for moment in self.moments:
            for tree in moment.found:
                key = (pickle.dumps(tree), len(moment.promised))
                if key not in seen:
                    seen.add(key)
                    path = folder / str(len(seen))
                    write_tree(path, tree)
                    yield moment, path


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def write_tree(path: Path, tree: Any) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree.items():
        write_tree(path / name, inner)
