"""Places of objects in a mirror: the file of places, and the objects that a process reads."""

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
    """Source of the digests of an object's pages; it can be pickled. Several threads may call it at once."""

    def __call__(self) -> PageChecksums:
        """Return the digests, as ``page_checksums`` does.

        Raises:
            DataError: The object is damaged.
            StorageError: A request failed, and may succeed later.
        """
        ...

    def find(self, others: Sequence[Any]) -> None:
        """Find the digests of ``others``, sources of the same class, with as few requests as possible.

        Raises:
            StorageError: A request failed, and may succeed later.
        """
        ...

    def named(self, message: str) -> str:
        """Return the message with the name of the object."""
        ...


@dataclass(eq=False)
class Placed:
    """An object with its place in a mirror.

    Args:
        client: The client that reads it.
        info: The object.
        begin: Offset of its first byte in the mirror; zeros follow its end up to the end of a block.
        salt: 32 bits that are combined with the digests in the table, so that bytes of another object do not match.
        sums: Source of the digests of its pages; None: pages are not compared.
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
        """Number of its first page in the mirror."""
        return self.begin // PAGE

    def known_sums(self) -> PageChecksums | None:
        """Return the digests of its pages; None without a source. Errors as ``PageSums``."""
        return None if self.sums is None else self.sums()

    def damaged(self, page: int) -> DataError:
        """Return the error for a damaged page, counted from the beginning of the object."""
        assert self.sums is not None
        begin = page * PAGE
        end = min(begin + PAGE, self.info.size)
        return DataError(
            self.sums.named(f"expected the bytes {begin}..{end - 1} as were written, found others; it is damaged")
        )


class Runs:
    """Runs of pages of several objects, which are fetched together.

    Args:
        objects: The objects.
        whose: Number of the object of each run, int64 ``[n]``.
        firsts, ends: Number of the first page of each run in the mirror, and of the page behind it, int64 ``[n]``.
    """

    def __init__(self, objects: Sequence[Placed], whose: Int64s, firsts: Int64s, ends: Int64s) -> None:
        self.objects, self.whose, self.firsts, self.ends = objects, whose, firsts, ends
        self.counts = ends - firsts
        self.bounds = np.append(0, np.cumsum(self.counts))
        """Number of each run's first page among all pages of the runs, and of all pages, int64 ``[n + 1]``."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Placed, slice]], blocks: Int64s, masks: Int64s) -> Runs:
        """Return the runs that bring pages of blocks, given the objects of ``Known.of``."""
        # The offset between objects keeps runs from continuing into the next object.
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
        """Numbers of all pages, int64 ``[m]``."""
        pages: Int64s = np.repeat(self.firsts - self.bounds[:-1], self.counts) + np.arange(self.bounds[-1])
        return pages

    def digests(self, contents: Sequence[memoryview]) -> PageChecksums:
        """Return the digests of all pages from the bytes of the runs, as ``page_checksums`` does, uint32 ``[m]``."""
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
        """Find the digests of all objects that have a source; errors as ``PageSums``."""
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
    """The file with the place of each object: lines of three numbers and their checksum.

    The caller holds the mirror's lock, so that one process at a time calls the methods.

    Args:
        path: The file; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())
        self._read = 0
        self._known: dict[int, tuple[int, int]] = {}
        self.blocks = 0
        """Number of blocks given to objects."""

    def follow(self) -> None:
        """Read lines that other processes added. A last line that a power cut tore is removed."""
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
        """Return the first block of each object; new objects get a place behind all others, which is written."""
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
    """Return the numbers of a line; None if it is damaged."""
    said, _, check = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or f"{checksum(said):016x}".encode() != check:
        return None
    key, begin, blocks = (int(number, 16) for number in said.split())
    return key, begin, blocks


class Known:
    """The objects of a mirror that a process reads, by their places."""

    def __init__(self) -> None:
        self._ordered: tuple[Int64s, list[Placed]] = (np.empty(0, np.int64), [])
        self._by_block: dict[int, Placed] = {}
        self.blocks = 0
        """Number of blocks of all objects."""

    def add(self, objects: Sequence[Placed]) -> None:
        """Add objects; one thread at a time calls it."""
        known = self._by_block | {one.begin // BLOCK: one for one in objects}
        begins = sorted(known)
        # One assignment, as other threads read it meanwhile.
        self._ordered = (np.array(begins, np.int64), [known[begin] for begin in begins])
        self._by_block = known
        self.blocks = sum(-(-one.info.size // BLOCK) for one in known.values())

    def get(self, block: int) -> Placed | None:
        """Return the object that begins with a block."""
        return self._by_block.get(block)

    def pages(self, blocks: Int64s) -> Int64s:
        """Return masks of all pages of blocks (ascending, int64 ``[n]``); the last block of an object has fewer."""
        begins, objects = self._ordered
        ends = np.array([objects[int(number)].end for number in np.searchsorted(begins, blocks, "right") - 1], np.int64)
        masks: Int64s = (1 << np.minimum(PAGES, -((blocks * BLOCK - ends) // PAGE))) - 1
        return masks

    def of(self, blocks: Int64s) -> list[tuple[Placed, slice]]:
        """Return the objects of some blocks (ascending, int64 ``[n]``), each with the slice of its blocks."""
        begins, objects = self._ordered
        numbers = np.searchsorted(begins, blocks, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)]
        return [(objects[int(numbers[first])], slice(first, end)) for first, end in pairwise(cuts) if end > first]

    def calls(self, blocks: Int64s, *, alone: bool) -> list[slice]:
        """Group blocks into requests: with a client that takes several objects, consecutive objects share a request.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            alone: Whether each object has a request of its own.
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
