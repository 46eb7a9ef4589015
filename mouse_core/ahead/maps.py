"""What is mapped in this process: which files, where, and how they are read otherwise than by touching them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mouse_core.ahead.backing import Int64s

# Bytes that the kernel reads at once where nobody says how many: of a longer range it reads no more than that.
_AT_ONCE = 128 << 10
# So many files are open at a time, of however many.
_FILES = 64
# Past the page cache places, sizes and addresses are multiples of so many bytes, or so many, by what disks there are.
_SECTORS = 512, 4096


class Maps:
    """What is mapped in this process, on Linux: addresses, whether it is a file, and bytes of it that are read at once.

    All are ``[maps]``.
    """

    def __init__(self) -> None:
        rows = [line.split(None, 5) for line in _lines("/proc/self/maps")]
        edges = [[int(edge, 16) for edge in row[0].split("-")] for row in rows]
        self.begins, self.ends = np.array(edges, np.uint64).reshape(-1, 2).astype(np.int64).T
        self.is_file = np.array([row[4] != "0" for row in rows], np.bool_)
        disks = {row[3]: _read_at_once(row[3]) for row in rows}
        self.at_once = np.array([disks[row[3]] for row in rows], np.int64)
        # The address at which byte 0 of the file would be.
        self.origins = self.begins - np.array([int(row[2], 16) for row in rows], np.uint64).astype(np.int64)
        self._files = [(row[5] if len(row) > 5 else "", int(row[4])) for row in rows]
        self._open: dict[int, tuple[int, int] | None] = {}
        self._sectors: dict[int, int] = {}

    def of(self, addresses: Int64s) -> Int64s:
        """The map that each address is in, -1 for none."""
        if not len(self.begins):
            return np.full(len(addresses), -1)
        found = np.searchsorted(self.begins, addresses, side="right") - 1
        found[(found >= 0) & (addresses >= self.ends[found])] = -1
        return found

    def direct(self, number: int) -> tuple[int, int] | None:
        """The descriptor of a mapped file, opened to be read past the page cache, and of what number of bytes the place
        and size of a read and the address that it goes to are to be multiples; None where it cannot be read so.

        It may be closed when others are asked for: a read that was begun goes on.
        """
        if number not in self._open:
            while len(self._open) >= _FILES:
                if (oldest := self._open.pop(next(iter(self._open)))) is not None:
                    os.close(oldest[0])
            self._open[number] = self._opened(*self._files[number])
        return self._open[number]

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


def _sector(file: int) -> int:
    """The least number of bytes that can be read of a file; 0: none so."""
    memory = mmap.mmap(-1, 2 * _SECTORS[-1])
    for sector in _SECTORS:
        try:
            os.preadv(file, [memoryview(memory)[sector : 2 * sector]], sector)
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
