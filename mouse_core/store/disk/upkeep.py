"""What a writer does for its folder beside writing: old rows are dropped, and small files are put together.

Both make a manifest of another and change no file. Rows are dropped a whole file at a time, the oldest first::

    max_rows=1000, files of 120 rows each: 8 files are 960 rows; room for 120 more would be 1,080
    -> the oldest is dropped first, 840 rows stay, and at most 960 are there when the next file is full

A file that is much larger than an eighth, as a writer without that limit left it, is cut, and its newest rows are
written again in files that are small enough::

    max_rows=300, one file of 400 rows, room for 37 more   137 go, and 263 stay in files of 37

Files are put together where eight or more neighbours have no file among them as large as the others together, so that
a row is written again only into a file at least twice as large as the one that it was in::

    sizes 64, 9, 8, 1, 1, 1, 1, 1, 1, 1, 1   the last eight become one of 8
    sizes 64, 9, 8, 8                        too few; with eight of 8 they become one of 64
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError, StorageError
from mouse_core.store.disk.manifest import Sealed

PARTS = 8
"""Files that the rows kept by ``max_rows`` or ``max_bytes`` lie in, at least: one of them is dropped at a time."""

LEAST_BYTES = 1 << 16
"""What ``max_bytes`` is, at least: no file of rows is smaller than some pages."""

_FEWEST = 8


@dataclass(frozen=True)
class Limits:
    """Which rows of a folder stay: the newest ones.

    Args:
        max_rows: How many rows there may be; None: any number.
        max_bytes: How many bytes their files may have; None: any number.

    Raises:
        ConfigError: A limit that is none.
    """

    max_rows: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            least = PARTS if name == "max_rows" else LEAST_BYTES
            if limit is not None and (type(limit) is not int or limit < least):
                raise ConfigError(f"{name}: expected None or a whole number of at least {least}, found {limit!r:.80}")

    def refuse_for_readers(self) -> None:
        """Raise ConfigError where there is a limit: a reader drops no rows."""
        if self != ALL:
            raise ConfigError("max_rows, max_bytes: expected mode 'a', found 'r'; only the writer drops rows")

    def of_a_file(self, most_bytes: int) -> tuple[int, int | None]:
        """How many bytes and rows a file may have, so that dropping the oldest drops no more than a part of them."""
        size = most_bytes if self.max_bytes is None else min(most_bytes, self.max_bytes // PARTS)
        return size, None if self.max_rows is None else self.max_rows // PARTS

    def too_many(self, files: Sequence[tuple[int, int]], rows: int = 0, size: int = 0) -> tuple[int, int]:
        """How many of the oldest files are to go, and how many rows of the next, which is too large to go as a whole.

        The newest stays, or a part of it.

        Args:
            files: Rows and bytes of each, the oldest first.
            rows: Rows that there are or will be beside them.
            size: Bytes, likewise.
        """
        rows, size = rows + sum(one for one, _ in files), size + sum(one for _, one in files)
        for number, (of_rows, of_bytes) in enumerate(files):
            cut = 0 if self.max_rows is None else rows - self.max_rows
            if self.max_bytes is not None:
                # Bytes are taken to be as many in each row.
                cut = max(cut, -((self.max_bytes - size) * of_rows // max(of_bytes, 1)))
            if cut <= 0:
                return number, 0
            if cut < of_rows and self._is_large(of_rows, of_bytes):
                return number, cut
            if number == len(files) - 1:
                return number, 0
            rows, size = rows - of_rows, size - of_bytes
        return 0, 0

    def _is_large(self, rows: int, size: int) -> bool:
        """Whether a file is larger than those that are written with these limits, whose bytes are not exact."""
        too_long = self.max_rows is not None and rows > self.max_rows // PARTS
        return too_long or (self.max_bytes is not None and size > 2 * (self.max_bytes // PARTS))


ALL = Limits()
"""Where all rows stay."""


def small_run(
    segments: Sequence[Sealed], most_bytes: int, most_rows: int | None = None, damaged: Set[int] = frozenset()
) -> range:
    """Which neighbours are to be one segment; an empty range where none are.

    Only the newest are looked at, as far as they would go into one segment.

    Args:
        segments: Those there are.
        most_bytes: How large a segment may be.
        most_rows: How many rows a segment may have; None: any number.
        damaged: The numbers of segments that stay as they are.
    """
    found, size, rows, largest = range(0), 0, 0, 0
    for first in range(len(segments) - 1, -1, -1):
        one, last = segments[first], segments[-1]
        size, rows, largest = size + one.bytes, rows + one.rows, max(largest, one.bytes)
        unlike = (one.schema, one.appended, one.load) != (last.schema, last.appended, last.load)
        if unlike or one.number in damaged or size > most_bytes or (most_rows is not None and rows > most_rows):
            break
        if len(segments) - first >= _FEWEST and 2 * largest <= size:
            found = range(first, len(segments))
    return found


# The last thread of each folder; one whose store is gone ends with the file that it is at.
_sealing: weakref.WeakValueDictionary[str, threading.Thread] = weakref.WeakValueDictionary()


def wait_for_sealing(folder: Path) -> None:
    """Wait until no thread of this process seals files of a folder."""
    thread = _sealing.get(str(folder))
    if thread is not None and thread.is_alive():
        thread.join()


def seal_in_background(rows: Any, folder: Path) -> threading.Thread | None:
    """Start a thread that calls ``rows.seal_one`` as long as it says that it did something; None where Python ends.

    Whoever ends waits for it, for the time of a file: a thread that is cut off in Arrow would end the process.
    """
    thread = threading.Thread(target=_seal_quietly, args=(weakref.ref(rows),), name="mouse-sealing")
    with suppress(RuntimeError):
        thread.start()
        _sealing[str(folder)] = thread
        return thread
    return None


def _seal_quietly(rows_of: weakref.ref[Any]) -> None:
    # Between two files the store may be let go of, or the process end.
    while threading.main_thread().is_alive() and (rows := rows_of()) is not None:
        try:
            if not rows.seal_one():
                return
        except (DataError, StorageError, MemoryError):
            return  # the rows are where they are; the next flush tries again, and closing says what is wrong
        finally:
            del rows
