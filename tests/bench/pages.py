"""Which pages of a dataset's files are in memory, all or none; and what a disk can do without the page cache."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_MADV_DONTNEED = 4
_READERS, _READ_BYTES, _LONG_BYTES = 32, 4096, 1 << 20


def read_whole(folder: Path) -> None:
    """Bring every page of a dataset's files into the page cache."""
    buffer: Any = memoryview(bytearray(1 << 24))
    for file in sorted(folder.glob("*.arrow")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)


def unmap_touched(folder: Path) -> None:
    """Forget, in this process, the pages of mapped files that were touched so far (Linux)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if str(folder) in line and line.endswith(".arrow"):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def drop(folder: Path, pattern: str = "*.arrow") -> None:
    """Have the pages of a dataset's files dropped from the page cache, also those that this process has mapped."""
    unmap_touched(folder)
    for file in sorted(one for one in folder.glob(pattern) if one.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages are dropped
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------- reads past the page cache


def random_reads(folder: Path, seconds: float) -> tuple[float, float]:
    """Bytes a second, and milliseconds of the slowest of 1,000, of reads of 4 KB at random places of Arrow files.

    32 reads are under way at a time: by fio where it is installed.
    """
    files = sorted(folder.glob("*.arrow"))
    fio = shutil.which("fio")
    return _by_threads(files, seconds) if fio is None else _by_fio(fio, files, seconds)


def long_reads(folder: Path, seconds: float) -> float:
    """Bytes a second of a folder's Arrow files from beginning to end, 1 MB after the other, two at a time."""
    files = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in sorted(folder.glob("*.arrow"))]
    end, counts = time.perf_counter() + seconds, []

    def read(first: int) -> None:
        memory, count = mmap.mmap(-1, _LONG_BYTES), 0
        while time.perf_counter() < end:
            for file in files[first::2]:
                place = 0
                while time.perf_counter() < end and (came := os.preadv(file, [memory], place)):
                    place += _LONG_BYTES
                    count += came
        counts.append(count)

    _together(read, 2)
    for file in files:
        os.close(file)
    return sum(counts) / seconds


def _by_fio(fio: str, files: list[Path], seconds: float) -> tuple[float, float]:
    asked = {"filename": ":".join(map(str, files)), "bs": _READ_BYTES, "iodepth": _READERS, "runtime": seconds}
    fixed = "--name=reads --rw=randread --ioengine=libaio --direct=1 --time_based --readonly --output-format=json"
    command = [fio, *fixed.split(), *(f"--{name}={value}" for name, value in asked.items())]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = json.loads(found[found.index("{") :])["jobs"][0]["read"]
    return read["bw_bytes"], read["clat_ns"]["percentile"]["99.900000"] / 1e6


def _by_threads(names: list[Path], seconds: float) -> tuple[float, float]:
    files = [os.open(name, os.O_RDONLY | os.O_DIRECT) for name in names]
    pages = [os.fstat(file).st_size // _READ_BYTES for file in files]
    end, times = time.perf_counter() + seconds, list[float]()

    def read(seed: int) -> None:
        draw, memory = random.Random(seed), mmap.mmap(-1, _READ_BYTES)
        while (began := time.perf_counter()) < end:
            file = draw.randrange(len(files))
            os.preadv(files[file], [memory], _READ_BYTES * draw.randrange(pages[file]))
            times.append(time.perf_counter() - began)

    _together(read, _READERS)
    for file in files:
        os.close(file)
    return _READ_BYTES * len(times) / seconds, 1e3 * sorted(times)[int(0.999 * len(times))]


def _together(read: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(read, range(count)))
