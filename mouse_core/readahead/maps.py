"""What is mapped in this process: which files, where, and how they are read otherwise than by touching them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mouse_core.readahead.backing import Int64s

# Bytes that the kernel reads at once where nobody says how many: of a longer range it reads no more than that.
_AT_ONCE = 128 << 10
# So many files are open at a time, of however many, and no more than one in so many of those that a process may have.
_FILES, _OF_ALLOWED = 256, 16
# Past the page cache places, sizes and addresses are multiples of so many bytes, or so many, by what disks there are.
_SECTORS = 512, 4096
_NOTHING = np.zeros(0, np.int64)


class Maps:
    """What is mapped in this process, on Linux: addresses, whether it is a file, and bytes of it that are read at once.

    All are ``[maps]``.

    Args:
        keeps: Keeps some files mapped while this is there: what is mapped where they are stays so.
        addresses: Of these files, int64 ``[n]``.
    """

    def __init__(self, keeps: object = None, addresses: Int64s = _NOTHING) -> None:
        rows = [line.split(None, 5) for line in _lines("/proc/self/maps")]
        edges = [[int(edge, 16) for edge in row[0].split("-")] for row in rows]
        self.begins, self.ends = np.array(edges, np.uint64).reshape(-1, 2).astype(np.int64).T
        self.is_file = np.array([row[4] != "0" for row in rows], np.bool_)
        disks = {disk: _read_at_once(disk) for disk in {row[3] for row in rows}}
        self.at_once = np.array([disks[row[3]] for row in rows], np.int64)
        # The address at which byte 0 of the file would be.
        self.origins = self.begins - np.array([int(row[2], 16) for row in rows], np.uint64).astype(np.int64)
        self._files = [(row[5] if len(row) > 5 else "", int(row[4])) for row in rows]
        self._open: dict[int, tuple[int, int] | None] = {}
        self._sectors: dict[int, int] = {}
        self.keeps, found = keeps, self.of(addresses)
        self.sure = np.unique(found[self.in_file(found)])

    def of(self, addresses: Int64s) -> Int64s:
        """The map that each address is in, -1 for none."""
        if not len(self.begins):
            return np.full(len(addresses), -1)
        found = np.searchsorted(self.begins, addresses, side="right") - 1
        found[(found >= 0) & (addresses >= self.ends[found])] = -1
        return found

    def in_file(self, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Whether each of some maps, -1 for none, is a file."""
        return numbers >= 0 if not len(self.begins) else (numbers >= 0) & self.is_file[numbers]

    def is_sure(self, keeps: object, numbers: Int64s) -> bool:
        """Whether those of some maps that are files, of addresses that ``keeps`` keeps mapped, are still there."""
        return self.keeps is keeps and bool(np.isin(numbers[self.in_file(numbers)], self.sure).all())

    def direct(self, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Some mapped files, ``most_open()`` at most, opened to be read past the page cache.

        Returns:
            By the map's number the descriptor, and of how many bytes the place and size of a read and the address that
            it goes to are to be multiples; without those that cannot be read so. They stay open until others are asked
            for: a read that was begun goes on.
        """
        for old in [one for one in self._open if one not in numbers]:
            if len(self._open) + len(numbers) <= most_open():
                break
            if (closed := self._open.pop(old)) is not None:
                os.close(closed[0])
        for number in numbers:
            if number not in self._open:
                self._open[number] = self._opened(*self._files[number])
        return {number: one for number in numbers if (one := self._open[number]) is not None}

    def _opened(self, path: str, inode: int) -> tuple[int, int] | None:
        """A file, if it is still the one that is mapped."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except (AttributeError, OSError, ValueError):  # there is no such way, or no such file any more
            return None
        status = os.fstat(file)
        if status.st_dev not in self._sectors:
            self._sectors[status.st_dev] = _sector(file)
        sector = self._sectors[status.st_dev]
        if status.st_ino == inode and sector:
            return file, sector
        os.close(file)
        return None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for opened in getattr(self, "_open", {}).values():
            if opened is not None:
                close(opened[0])


def most_open() -> int:
    """How many files are open at a time, at most."""
    allowed = os.sysconf("SC_OPEN_MAX")
    return _FILES if allowed < 0 else max(1, min(_FILES, allowed // _OF_ALLOWED))


def _sector(file: int) -> int:
    """The least number of bytes that can be read of a file; 0: none so."""
    memory = mmap.mmap(-1, 2 * _SECTORS[-1])
    for sector in _SECTORS:
        try:  # from its beginning, as it may have no more
            os.preadv(file, [memoryview(memory)[sector : 2 * sector]], 0)
            return sector
        except OSError:
            continue
    return 0


def _read_at_once(disk: str) -> int:
    """Bytes of a file that the kernel reads at once where it is asked to, by the disk in ``/proc/self/maps``."""
    major, _, minor = disk.partition(":")
    said = _lines(f"/sys/class/bdi/{int(major, 16)}:{int(minor, 16)}/read_ahead_kb")
    return max(_AT_ONCE, int(said[0]) << 10) if said and said[0].isdigit() else _AT_ONCE


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
