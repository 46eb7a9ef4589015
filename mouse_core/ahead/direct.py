"""Reads of files past the page cache, which go on while this process does something else (Linux)."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import numpy as np
import numpy.typing as npt

from mouse_core.ahead.backing import Int64s

# The numbers of the calls io_setup, io_destroy, io_getevents and io_submit.
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# Reads that are under way at a time, at most.
_MOST = 1024
# A read as the kernel is told of it, and one that is done, as linux/aio_abi.h has them. The first word is the caller's
# own: whose read it is, and how many bytes it is to bring at least, 32 bits each.
_READ = np.dtype(
    {
        "names": ["own", "file", "target", "size", "place"],
        "formats": ["u8", "u4", "u8", "u8", "i8"],
        "offsets": [0, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_DONE = np.dtype([("own", "u8"), ("read", "u8"), ("brought", "i8"), ("more", "i8")])


class DirectReads:
    """Reads that are begun many at a time, without waiting for them.

    Raises:
        OSError: The system has none such, or lets this process have none.
    """

    def __init__(self) -> None:
        calls = _CALLS.get(os.uname().machine) if sys.platform == "linux" and sys.byteorder == "little" else None
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, self._destroy, self._getevents, self._submit = calls
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        context = ctypes.c_ulong()
        self._call(setup, _MOST, ctypes.addressof(context))
        self._context, self._done = context.value, np.zeros(_MOST, _DONE)
        self._came: list[npt.NDArray[np.void]] = []
        self.under_way = 0
        """How many are begun and not done."""

    def begin(self, whose: Int64s, files: Int64s, places: Int64s, targets: Int64s, sizes: Int64s, least: Int64s) -> int:
        """Begin with some reads; waits for others where too many are under way.

        Args:
            whose: A number below 2**32 for each that ``done`` says again; int64 ``[n]``, as all that follow.
            files: Its descriptor, opened with ``O_DIRECT``.
            places: Where it begins in the file, a multiple of what the disk asks for, as the next two.
            targets: The address that the bytes are written to.
            sizes: Bytes.
            least: Bytes that are wanted: at the end of a file it has no more.

        Returns:
            With how many it was begun, from the first on; less than n where the system refuses one.
        """
        reads = np.zeros(len(files), _READ)
        reads["own"] = whose << 32 | least
        reads["file"], reads["place"], reads["target"], reads["size"] = files, places, targets, sizes
        pointers, begun = reads.ctypes.data + reads.itemsize * np.arange(len(reads)), 0
        while begun < len(reads):
            if self.under_way >= _MOST:
                self._collect(1)
                continue
            some = pointers[begun : begun + _MOST - self.under_way]
            try:
                count = self._call(self._submit, self._context, len(some), some.ctypes.data)
            except OSError as error:
                if error.errno != errno.EAGAIN or not self.under_way:
                    break
                self._collect(1)
                continue
            begun += count
            self.under_way += count
        return begun

    def done(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Those that are done and were not said yet: whose each is, and whether it brought what was wanted.

        Args:
            wait: Whether there is to be one at least, if any is under way.
        """
        if self.under_way:
            self._collect(int(wait and not self._came))
        came, self._came = self._came, []
        found: list[tuple[int, bool]] = []
        for some in came:
            fine = some["brought"] >= (some["own"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            found += zip((some["own"] >> np.uint64(32)).tolist(), fine.tolist(), strict=True)
        return found

    def _collect(self, least: int) -> None:
        """Take what is done from the kernel, and wait for so many."""
        count = self._call(self._getevents, self._context, least, _MOST, self._done.ctypes.data, 0)
        if count:
            self.under_way -= count
            self._came.append(self._done[:count].copy())

    def close(self) -> None:
        """Wait for all that are under way, and begin none any more."""
        self._call(self._destroy, self._context)
        self.under_way = 0

    def _call(self, *numbers: int) -> int:
        """A system call, made again where a signal came."""
        while True:
            found = int(self._syscall(*map(ctypes.c_long, numbers)))
            if found >= 0:
                return found
            if (code := ctypes.get_errno()) != errno.EINTR:
                raise OSError(code, os.strerror(code))
