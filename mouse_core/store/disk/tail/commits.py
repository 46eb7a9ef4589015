"""Commits: how many rows of a tail file count, and the checksums that tell whether they are those that were written.

Rows share checksums block by block. Those of a full block stand in a table, and are never written again. Those of the
block in progress are part of the commit. So a commit of 5000 rows, in blocks of 4096 rows, has one line in the table,
for rows 0..4095, and checksums of its own for rows 4096..4999.

There are four places for commits. Those that wait for the disk take turns in two, the others in the other two: so while
one is written, the last one of its kind is whole, and none that has reached the disk is lost to one that may not.

How many rows count, were committed, and are known to be on the disk, is told beside the commits, each as a multiple of
a prime: a flipped bit makes it none. So a commit that is missing was either cut off by a crash, or is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core.files.reading import damaged
from mouse_core.store.disk.tail.layout import TailLayout

# What the live page tells: rows that count, the file's origin, rows that are on the disk, rows that were committed.
COUNTED, ORIGIN, SYNCED, COMMITTED = range(4)
UNIT = 4294967291
"""The prime whose multiples they are; below it, so their product with it is an int64."""

# Of each kind of commit there are two places.
_EACH = 2


def tell(live: npt.NDArray[np.int64], which: int, number: int) -> None:
    """Say a number on the live page."""
    live[which] = number * UNIT


def told(path: str, live: npt.NDArray[np.int64], which: int) -> int:
    """A number of the live page.

    Raises:
        DataError: It is damaged.
    """
    number, rest = divmod(int(live[which]), UNIT)
    if rest or number < 0:
        raise damaged(path, f"expected a multiple of {UNIT} as number {which} of the live page, found damage")
    return number


@dataclass(frozen=True)
class Commit:
    """How many rows count, as a place for commits says.

    Args:
        number: How many commits came before.
        rows: How many rows count.
        since: For each column from which row on rows differ in length; see ``ColumnRoom``.
        sums: The checksums of the block in progress.
        place: Which place says it.
    """

    number: int
    rows: int
    since: npt.NDArray[np.int64]
    sums: list[int]
    place: int = 0

    @property
    def waited(self) -> bool:
        """Whether it waited for the disk."""
        return self.place >= _EACH


def next_places(commits: Sequence[Commit]) -> list[int]:
    """In which places the next commits are written: one that does not wait for the disk, and one that does."""
    last = {commit.waited: commit for commit in sorted(commits, key=lambda commit: commit.number)}
    return [place_after(last[waits].place) if waits in last else waits * _EACH for waits in (False, True)]


def place_after(place: int) -> int:
    """The other place of the same kind."""
    return place ^ 1


def write_commit(place: npt.NDArray[np.uint64], layout: TailLayout, commit: Commit) -> None:
    """Write a commit."""
    words = np.empty(layout.place_words, np.uint64)
    words[0], words[1] = commit.number, commit.rows
    words[2 : 2 + len(commit.since)] = commit.since.view(np.uint64)
    words[2 + len(commit.since) : -1] = commit.sums
    words[-1] = xxhash.xxh3_64_intdigest(words[:-1].data, layout.seed)
    place[:] = words


def read_commits(places: Sequence[npt.NDArray[np.uint64]], layout: TailLayout, known: int = -1) -> list[Commit]:
    """The commits that are whole and of more rows than are known, those of most rows first."""
    found = []
    for number, place in enumerate(places):
        words = place.copy()  # before it is looked at: the writer may be at work
        columns, rows = len(layout.columns), int(words[1])
        if rows <= known:
            continue
        if xxhash.xxh3_64_intdigest(words[:-1].data, layout.seed) != int(words[-1]) or rows > layout.rows:
            continue
        since, sums = words[2 : 2 + columns].view(np.int64), [int(word) for word in words[2 + columns : -1]]
        found.append(Commit(int(words[0]), rows, since, sums, number))
    return sorted(found, key=lambda commit: (commit.rows, commit.number), reverse=True)


def check_not_fewer(path: str, rows: int, told_of: int) -> None:
    """Raise DataError if there are fewer rows than the live page tells of."""
    if rows < told_of:
        raise damaged(path, f"expected a commit of {told_of} rows, found one of {rows}; it is damaged")
