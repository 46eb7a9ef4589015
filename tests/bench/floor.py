"""The floor: a loop of memcpy over the very same windows that a batch consists of.

The loop is a few lines of C, compiled where a compiler is at hand; elsewhere NumPy copies as many bytes in one piece.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mouse_core import BatchSource
from mouse_core._arrow.gathering import ranges_of
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

_C = r"""
#include <stdint.h>
#include <string.h>
void copy_pieces(int64_t n, const uint64_t *from, const uint64_t *to, const int64_t *size)
{
    for (int64_t i = 0; i < n; i++)
        memcpy((void *)to[i], (const void *)from[i], (size_t)size[i]);
}
"""


@dataclass(frozen=True)
class Pieces:
    """Ranges of bytes that are copied one after another.

    Args:
        source: Memory addresses of the ranges, uint64 ``[n]``.
        size: Sizes of the ranges in bytes, int64 ``[n]``.
    """

    source: npt.NDArray[np.uint64]
    size: Int64s

    @property
    def nbytes(self) -> int:
        """The total number of bytes."""
        return int(self.size.sum())


def pieces_of(
    snapshot: Snapshot, fields: Iterable[str], starts: Int64s, length: int, lengths: Int64s | None = None
) -> Pieces:
    """Return the byte ranges of the stored values of windows in local memory, ordered by field and then by window.

    Args:
        snapshot: The rows.
        fields: Names of fields.
        starts: The first row of each window, ``[n]``.
        length: Number of steps of a window.
        lengths: Number of existing steps of each window, ``[n]``; by default, all steps exist.
    """
    steps = np.full(len(starts), length) if lengths is None else lengths
    # Row of each present step: [10, 11, 12, 50, 51] for starts [10, 50] and 3 and 2 steps.
    rows = np.repeat(starts - np.cumsum(steps) + steps, steps) + np.arange(steps.sum())
    part = snapshot.locate(rows, 1).part(0)
    found = [ranges for name in fields for ranges in ranges_of([snapshot.readers[name].column], part)]
    begins, ends = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    cut = np.flatnonzero(begins[1:] != ends[:-1]) + 1  # rows that lie side by side are one piece
    begins, ends = begins[np.r_[0, cut]], ends[np.r_[cut - 1, -1]]
    return Pieces(begins.astype(np.uint64), ends - begins)


@cache
def c_loop() -> Callable[..., None] | None:
    """The compiled loop, or None where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="mouse-bench-"))
    try:
        (folder / "floor.c").write_text(_C, encoding="utf-8")
        library = folder / f"floor{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
        command = [compiler, "-O2", "-shared", "-fPIC", str(folder / "floor.c"), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        function = ctypes.CDLL(str(library)).copy_pieces
        function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        function.restype = None
        copy: Callable[..., None] = function
        return copy
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the mapped library stays


def floor_name() -> str:
    """What the floor is on this machine."""
    return "memcpy loop in C" if c_loop() is not None else "NumPy copying as many bytes"


def pieces(source: BatchSource, index: int) -> Pieces:
    """The stored values of a batch, field by field."""
    plan = source.plan(index)
    return pieces_of(source.snapshot, [*source.spec], plan.starts, plan.length, plan.lengths)


def floor(batches: Sequence[Pieces]) -> Callable[[int], None]:
    """Copies the pieces of batch `number` (modulo how many there are) into memory that is kept."""
    loop, memory = c_loop(), np.zeros(max(batch.nbytes for batch in batches) + 64, np.uint8)
    if loop is None:
        other, sizes = memory.copy(), [batch.nbytes for batch in batches]
        return lambda number: np.copyto(memory[: (n := sizes[number % len(sizes)])], other[:n])
    first = memory.ctypes.data + (-memory.ctypes.data % 64)
    arrays = []
    for batch in batches:
        target = np.uint64(first) + np.concatenate([[0], np.cumsum(batch.size)[:-1]]).astype(np.uint64)
        arrays.append((batch.source, target, batch.size))
    calls = [(len(size), *(array.ctypes.data for array in (source, to, size))) for source, to, size in arrays]

    def copy(number: int) -> None:
        loop(*calls[number % len(calls)])

    copy.kept = (memory, arrays)  # type: ignore[attr-defined]
    return copy


def check_floor(source: BatchSource, pieces: Pieces, index: int, fields: Container[str] | None = None) -> None:
    """See that the pieces are the batch, or these fields of it: otherwise the comparison would be with other work."""
    copied = b"".join(
        ctypes.string_at(address, size)
        for address, size in zip(pieces.source.tolist(), pieces.size.tolist(), strict=True)
    )
    taken = (values for name, values in source[index].items() if fields is None or name in fields)
    batch = b"".join(values.tobytes() for values in taken)
    assert copied == batch, "the floor copies other bytes than the batch consists of"
