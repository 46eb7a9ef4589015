"""What a writer does for its folder beside writing: old rows are dropped, and small files are put together.

Both make a manifest of another and change no file. Rows are dropped a whole file at a time, the oldest first::

    max_rows=1000, files of 120 rows each: 8 files are 960 rows; room for 120 more would be 1,080
    -> the oldest is dropped first, 840 rows stay, and at most 960 are there when the next file is full

Files are put together where eight or more neighbours have no file among them as large as the others together, so that
a row is written again only into a file at least twice as large as the one that it was in::

    sizes 64, 9, 8, 1, 1, 1, 1, 1, 1, 1, 1   the last eight become one of 8
    sizes 64, 9, 8, 8                        too few; with eight of 8 they become one of 64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mouse_core.errors import ConfigError
from mouse_core.store.disk.manifest import Manifest, Sealed

PARTS = 8
"""Files that the rows kept by ``max_rows`` or ``max_bytes`` lie in, at least: one of them is dropped at a time."""

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
            if limit is not None and (type(limit) is not int or limit < PARTS):
                raise ConfigError(f"{name}: expected None or a whole number of at least {PARTS}, found {limit!r:.80}")

    def refuse_for_readers(self) -> None:
        """Raise ConfigError where there is a limit: a reader drops no rows."""
        if self != ALL:
            raise ConfigError("max_rows, max_bytes: expected mode 'a', found 'r'; only the writer drops rows")

    def of_a_file(self, most_bytes: int) -> tuple[int, int | None]:
        """How many bytes and rows a file may have, so that dropping the oldest drops no more than a part of them."""
        size = most_bytes if self.max_bytes is None else min(most_bytes, self.max_bytes // PARTS)
        return size, None if self.max_rows is None else self.max_rows // PARTS

    def too_many(self, files: Sequence[tuple[int, int]], rows: int = 0, size: int = 0) -> int:
        """How many of the oldest files are to go. The newest stays, however large it is.

        Args:
            files: Rows and bytes of each, the oldest first.
            rows: Rows that there are or will be beside them.
            size: Bytes, likewise.
        """
        rows, size = rows + sum(one for one, _ in files), size + sum(one for _, one in files)
        for number, (of_rows, of_bytes) in enumerate(files):
            fits = self.max_rows is None or rows <= self.max_rows
            if number == len(files) - 1 or (fits and (self.max_bytes is None or size <= self.max_bytes)):
                return number
            rows, size = rows - of_rows, size - of_bytes
        return 0


ALL = Limits()
"""Where all rows stay."""


def small_run(segments: Sequence[Sealed], most_bytes: int, most_rows: int | None = None) -> range:
    """Which neighbours are to be one segment; an empty range where none are.

    Only the newest are looked at, as far as they would go into one segment.

    Args:
        segments: Those there are.
        most_bytes: How large a segment may be.
        most_rows: How many rows a segment may have; None: any number.
    """
    found, size, rows, largest = range(0), 0, 0, 0
    for first in range(len(segments) - 1, -1, -1):
        one, last = segments[first], segments[-1]
        size, rows, largest = size + one.bytes, rows + one.rows, max(largest, one.bytes)
        unlike = one.schema != last.schema or one.appended != last.appended
        if unlike or size > most_bytes or (most_rows is not None and rows > most_rows):
            break
        if len(segments) - first >= _FEWEST and 2 * largest <= size:
            found = range(first, len(segments))
    return found


def joined(manifest: Manifest, run: range, sealed: Sealed) -> Manifest:
    """A manifest in which one segment stands in the place of several neighbours."""
    segments = (*manifest.segments[: run.start], sealed, *manifest.segments[run.stop :])
    return replace(manifest, segments=segments, next_number=max(manifest.next_number, sealed.number) + 1)
