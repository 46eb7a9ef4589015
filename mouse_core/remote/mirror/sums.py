"""Digests of an object's pages, noted by who had the object as it was written: 4 bytes for each page of 4 KB.

Whoever knows them can tell of every page that comes whether it is what was written, whichever pages come, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core.remote.mirror.shared.pages import PAGE

Sums = npt.NDArray[np.uint32]


class PageSums(Protocol):
    """Knows the digests of an object's pages, or finds them; pickles. Several threads may call it at once."""

    def __call__(self) -> Sums:
        """The digests, as ``sums_of`` says.

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


def sums_of(content: Any, first: int = 0) -> Sums:
    """Digests of pages of an object, uint32 ``[n]``: the lower half of XXH3 with 64 bits and the page's number as seed.

    Args:
        content: Their bytes, of the last maybe fewer.
        first: The number of the first, counted from the object's beginning.
    """
    with memoryview(content) as view:
        return sums_of_all([view], [first])


def sums_of_all(contents: Sequence[memoryview], firsts: Sequence[int]) -> Sums:
    """The same of several runs of pages, one after the other."""
    found, digest = list[int](), xxhash.xxh3_64_intdigest
    for content, first in zip(contents, firsts, strict=True):
        begins = range(0, len(content), PAGE)
        found += [digest(content[begin : begin + PAGE], page) for page, begin in enumerate(begins, first)]
    return np.fromiter(found, np.uint64, len(found)).astype(np.uint32)  # the lower halves
