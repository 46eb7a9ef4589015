"""The places of objects in a mirror: the file of places, and the objects that a process reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mouse_core._base.memo import memo
from mouse_core.errors import DataError
from mouse_core.files.checksum import PAGE, PageChecksums, checksum, digest, page_checksums
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import open_file
from mouse_core.files.writing import write_all
from mouse_core.remote.client import ObjectClient, ObjectInfo
from mouse_core.remote.mirror.pages import BLOCK, PAGES, Int64s, pages_of, runs

# More pages than any mirror has.
_APART = 1 << 40


class PageSums(Protocol):
    """Knows the digests of an object's pages, or finds them; pickles. Several threads may call it at once."""

    def __call__(self) -> PageChecksums:
        """The digests, as ``page_checksums`` returns them.

        Raises:
            DataError: The object is not what was written.
            StorageError: It was not reached.
        """
        ...

    def find(self, others: Sequence[Any]) -> None:
        """Find those of others, which are of its own kind, with requests at once as far as that is possible.

        Raises:
            StorageError: They were not reached.
        """
        ...

    def named(self, message: str) -> str:
        """A message that names the object."""
        ...


@dataclass(eq=False)
class Placed:
    """An object that has its place in a mirror.

    Args:
        client: Who reads it.
        info: What it is.
        begin: Where its bytes begin in the mirror; they are followed by zeros up to the end of a block.
        salt: Of what the mirror notes of its pages' digests, 32 bits: bytes of another object are none of its own.
        sums: Knows the digests that its pages had when it was written; None: they come as they are.
    """

    client: ObjectClient
    info: ObjectInfo
    begin: int
    salt: int
    sums: PageSums | None = None
    error: Exception | None = field(default=None)

    @property
    def end(self) -> int:
        """Offset of the end of the object in the mirror."""
        return self.begin + self.info.size

    @property
    def page(self) -> int:
        """The page of the mirror at which it begins."""
        return self.begin // PAGE

    def known_sums(self) -> PageChecksums | None:
        """The digests of its pages, where they are to be known; raises as ``PageSums``."""
        return None if self.sums is None else self.sums()

    def damaged(self, page: int) -> DataError:
        """Says that a page, counted from its beginning, is not what was written."""
        assert self.sums is not None
        begin = page * PAGE
        end = min(begin + PAGE, self.info.size)
        return DataError(
            self.sums.named(f"expected the bytes {begin}..{end - 1} as were written, found others; it is damaged")
        )


class Runs:
    """Runs of pages that are fetched together, of several objects.

    Args:
        objects: The objects.
        whose: Of each run the number of its object, int64 ``[n]``.
        firsts, ends: The first page of the mirror in each, and the one behind its last, int64 ``[n]``.
    """

    def __init__(self, objects: Sequence[Placed], whose: Int64s, firsts: Int64s, ends: Int64s) -> None:
        self.objects, self.whose, self.firsts, self.ends = objects, whose, firsts, ends
        self.counts = ends - firsts
        self.bounds = np.append(0, np.cumsum(self.counts))
        """The number of each run's first page among all pages, and how many these are, int64 ``[n + 1]``."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Placed, slice]], blocks: Int64s, masks: Int64s) -> Runs:
        """Return the runs that bring pages of blocks, given the objects of ``Known.of``."""
        # Runs do not go on from one object to the next, as if these were far apart.
        numbers = np.repeat(np.arange(len(parts)), [part.stop - part.start for _, part in parts])
        firsts, ends = runs(pages_of(blocks + numbers * (_APART // PAGES), masks))
        whose = firsts // _APART
        return cls([placed for placed, _ in parts], whose, firsts - whose * _APART, ends - whose * _APART)

    def bytes(self) -> tuple[Int64s, Int64s]:
        """Return the first byte of each run in its object, and the one behind its last, int64 ``[n]``."""
        begins = np.array([one.begin for one in self.objects])[self.whose]
        ends = np.array([one.end for one in self.objects])[self.whose]
        return self.firsts * PAGE - begins, np.minimum(self.ends * PAGE, ends) - begins

    @memo
    def pages(self) -> Int64s:
        """The numbers of all their pages, int64 ``[m]``."""
        pages: Int64s = np.repeat(self.firsts - self.bounds[:-1], self.counts) + np.arange(self.bounds[-1])
        return pages

    def digests(self, contents: Sequence[memoryview]) -> PageChecksums:
        """The digests of all their pages, whose bytes came, as ``page_checksums`` returns them, uint32 ``[m]``."""
        begins = np.array([one.page for one in self.objects])[self.whose]
        return page_checksums(contents, (self.firsts - begins).tolist())

    def salts(self) -> PageChecksums:
        """Return the ``salt`` of each page's object, uint32 ``[m]``."""
        return np.repeat(np.array([one.salt for one in self.objects], np.uint32)[self.whose], self.counts)

    def _parts(self) -> list[slice]:
        """Return the slice of all pages for each object; runs ascend, so an object's pages are neighbours."""
        cuts = self.bounds[np.searchsorted(self.whose, np.arange(len(self.objects) + 1))].tolist()
        return [slice(*cut) for cut in pairwise(cuts)]

    def find_sums(self) -> None:
        """Find the digests of all objects, where they are to be known; raises as ``PageSums``."""
        known = [placed.sums for placed in self.objects if placed.sums is not None]
        if len(known) > 1:
            known[0].find(known)
        for placed in self.objects:
            placed.known_sums()

    def wrong(self, digests: PageChecksums) -> DataError | None:
        """Return the error for pages whose checksums differ from the known ones; None: all are right."""
        pages = self.pages
        for placed, mine in zip(self.objects, self._parts(), strict=True):
            sums = placed.known_sums()
            if sums is None:
                continue
            known = pages[mine] - placed.page
            if known[-1] >= len(sums):
                return placed.damaged(len(sums))
            others = sums[known] != digests[mine]
            if others.any():
                return placed.damaged(int(known[others][0]))
        return None


class Places(Descriptor):
    """The file that says which object lies where; a line for each, of three numbers and their checksum.

    What is called here is called by one at a time, of all processes.

    Args:
        path: The file, made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())
        self._read = 0
        self._known: dict[int, tuple[int, int]] = {}
        self.blocks = 0
        """Number of blocks given to objects."""

    def follow(self) -> None:
        """Read what others added. A last line that a power cut tore is removed."""
        content = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
        for line in content.splitlines(keepends=True):
            found = _parsed(line)
            if found is None:
                os.ftruncate(self._file, self._read)
                return
            key, begin, blocks = found
            self._known[key] = (begin, blocks)
            self.blocks = max(self.blocks, begin + blocks)
            self._read += len(line)

    def place(self, keys: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The blocks at which objects begin; those that have no place get one behind all others, and it is kept."""
        lines = []
        for key, size in zip(keys, sizes, strict=True):
            if key not in self._known:
                blocks = max(1, -(-size // BLOCK))
                lines.append(_line(key, self.blocks, blocks))
                self._known[key] = (self.blocks, blocks)
                self.blocks += blocks
        if lines:
            content = b"".join(lines)
            os.lseek(self._file, self._read, os.SEEK_SET)
            try:
                write_all(self._file, content)
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._read)
                self.blocks, self._known, self._read = 0, {}, 0
                raise
            self._read += len(content)
        return [self._known[key][0] for key in keys]


def key_of(url: str, info: ObjectInfo, *, verified: bool = False) -> int:
    """Return the key of an object's content, 128 bits; verified and unverified content lie apart."""
    said = [url, info.path, info.version, str(info.size), *(["verified"] if verified else [])]
    return int(digest("\0".join(said).encode()), 16)


def _line(key: int, begin: int, blocks: int) -> bytes:
    said = f"{key:032x} {begin:x} {blocks:x}"
    return f"{said} {checksum(said.encode()):016x}\n".encode()


def _parsed(line: bytes) -> tuple[int, int, int] | None:
    """The numbers of a line; None where it is not whole."""
    said, _, check = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or f"{checksum(said):016x}".encode() != check:
        return None
    key, begin, blocks = (int(number, 16) for number in said.split())
    return key, begin, blocks


class Known:
    """The objects of a mirror that a process reads, by where they lie."""

    def __init__(self) -> None:
        self._ordered: tuple[Int64s, list[Placed]] = (np.empty(0, np.int64), [])
        self._by_block: dict[int, Placed] = {}
        self.blocks = 0
        """Number of blocks of all objects."""

    def add(self, objects: Sequence[Placed]) -> None:
        """Know more of them; one at a time calls it."""
        known = self._by_block | {one.begin // BLOCK: one for one in objects}
        begins = sorted(known)
        # At once, for those who look meanwhile.
        self._ordered = (np.array(begins, np.int64), [known[begin] for begin in begins])
        self._by_block = known
        self.blocks = sum(-(-one.info.size // BLOCK) for one in known.values())

    def get(self, block: int) -> Placed | None:
        """The object that begins with a block."""
        return self._by_block.get(block)

    def pages(self, blocks: Int64s) -> Int64s:
        """Masks of all pages that there are in some blocks (ascending, int64 ``[n]``): at an object's end, fewer."""
        begins, objects = self._ordered
        ends = np.array([objects[int(number)].end for number in np.searchsorted(begins, blocks, "right") - 1], np.int64)
        masks: Int64s = (1 << np.minimum(PAGES, -((blocks * BLOCK - ends) // PAGE))) - 1
        return masks

    def of(self, blocks: Int64s) -> list[tuple[Placed, slice]]:
        """The objects that some blocks (ascending, int64 ``[n]``) lie in, and which of the blocks lie in each."""
        begins, objects = self._ordered
        numbers = np.searchsorted(begins, blocks, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)]
        return [(objects[int(numbers[first])], slice(first, end)) for first, end in pairwise(cuts) if end > first]

    def calls(self, blocks: Int64s, *, alone: bool) -> list[slice]:
        """Group blocks into requests: with a client that takes several objects, consecutive objects share a request.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            alone: Whether each object is asked for by itself.
        """
        found: list[slice] = []
        before: Placed | None = None
        paths: set[str] = set()
        for placed, part in self.of(blocks):
            path = placed.info.path
            joins = before is not None and before.client is placed.client and path not in paths
            if joins and not alone and hasattr(placed.client, "get_all"):
                found[-1] = slice(found[-1].start, part.stop)
            else:
                found.append(part)
                paths = set()
            paths.add(path)
            before = placed
        return found
