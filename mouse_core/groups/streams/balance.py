"""Which rank trains on which examples of a batch, micro-batch by micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.groups.examples.batches import concatenate, pack, pad
from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.examples.placing import best_fit
from mouse_core.groups.types.example import RLExample
from mouse_core.spec import check_count

COLLATIONS = ("pack", "pad", "concatenate")


@dataclass(frozen=True)
class MicroBatch:
    """What a micro-batch may hold, and the arrays it becomes; see ``plan_micro_batches``.

    Raises:
        ConfigError: An argument that cannot be used.
    """

    max_tokens: int
    collate: str = "pack"
    length: int | None = None
    max_examples: int | None = None
    pad_token: int = 0
    max_turns: int | None = None

    def __post_init__(self) -> None:
        tokens = check_count("max_tokens", self.max_tokens)
        if self.collate not in COLLATIONS:
            raise ConfigError(f"collate: expected one of {list(COLLATIONS)}, found {self.collate!r}")
        for name in ("max_examples", "max_turns"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.collate == "concatenate" and self.length is not None:
            raise ConfigError(f"length: expected None with collate='concatenate', found {self.length!r}")
        if self.collate == "pad" and self.length is None:
            raise ConfigError("length: expected the tokens of a row with collate='pad', found None")
        if self.length is not None and check_count("length", self.length) > tokens:
            raise ConfigError(f"length: expected at most max_tokens, {tokens}, found {self.length}")

    @property
    def row(self) -> int:
        """The most tokens of an example."""
        return self.max_tokens if self.length is None else self.length

    @property
    def rows(self) -> int:
        """Rows of the arrays."""
        rows = self.max_tokens // self.row
        return rows if self.collate != "pad" or self.max_examples is None else min(rows, self.max_examples)

    @property
    def most(self) -> int | None:
        """The most examples; None: any number."""
        return self.rows if self.collate == "pad" else self.max_examples

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether examples of these lengths are one micro-batch."""
        if self.collate == "pack" and self.rows > 1 and lengths:
            return int(best_fit(np.array(lengths, np.int64), self.row)[0].max()) < self.rows
        return True  # their number and their tokens are known to

    def arrays(self, examples: Sequence[RLExample], empty: RLExample) -> Arrays:
        """The arrays, of one shape for all micro-batches; filled up with an example of no tokens."""
        wanted = 1 if self.collate == "pack" or self.most is None else self.most
        filled = [*examples, *[empty] * (wanted - len(examples))]
        fill: dict[str, Any] = {"pad_token": self.pad_token, "max_turns": self.max_turns}
        if self.collate == "pad":
            return pad(filled, self.row, **fill)
        if self.collate == "pack":
            return pack(filled, self.row, num_rows=self.rows, max_examples=self.max_examples, **fill)
        return concatenate(filled, self.max_tokens, **fill)


def plan_micro_batches(
    lengths: npt.ArrayLike,
    count: int,
    *,
    max_tokens: int,
    collate: str = "pack",
    length: int | None = None,
    max_examples: int | None = None,
) -> list[list[list[int]]]:
    """Share examples out among ranks: about the same number of tokens, and the same number of micro-batches each.

    The examples go, longest first, to the micro-batch with the fewest tokens (longest processing time first, Graham
    1969), of as few micro-batches as hold them all. These go, those of most tokens first, to the ranks by turns, in
    each turn the largest to the rank with the fewest tokens. So the micro-batches that ranks work on at the same time
    are alike, and ranks differ by no more tokens than the longest example has, unless the number of examples is
    limited.

    Args:
        lengths: Tokens of each example, ``[N]``.
        count: How many ranks.
        max_tokens: The most tokens of a micro-batch's arrays, padding included.
        collate: What it is made by: "pack", rows of ``length`` tokens, as many as are at most ``max_tokens``; "pad",
            as many rows of ``length``, one example each; "concatenate", one row.
        length: Tokens of a row; None: ``max_tokens``.
        max_examples: The most examples of a micro-batch.

    Returns:
        For each rank its micro-batches, each the examples' numbers in order. Some may be empty, where there are few.

    Raises:
        ConfigError: An argument that cannot be used.
        DataError: No numbers of tokens, or an example that is longer than a row.

    Example:
        >>> plan_micro_batches([5, 3, 3, 2, 2, 1], 2, max_tokens=8)
        [[[0, 3, 5]], [[1, 2, 4]]]
    """
    return plan(lengths, check_count("count", count), MicroBatch(max_tokens, collate, length, max_examples))


def plan(lengths: npt.ArrayLike, count: int, kind: MicroBatch) -> list[list[list[int]]]:
    """See ``plan_micro_batches``."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 0)):
        raise DataError(f"lengths: expected the tokens of each example, found {lengths!r:.80}")
    sizes: list[int] = given.tolist()
    for place, size in enumerate(sizes):
        if size > kind.row:
            raise DataError(
                f"examples: expected at most {kind.row} tokens, found {size} at {place}; a RolloutStream passes over "
                "it with skip_longer=True"
            )
    filled = _fill(sizes, count, kind)
    tokens = [sum(sizes[place] for place in places) for places in filled]
    order = sorted(range(len(filled)), key=lambda number: (-tokens[number], number))
    ranks: list[list[list[int]]] = [[] for _ in range(count)]
    loads = [0] * count
    for first in range(0, len(order), count):
        lightest = sorted(range(count), key=lambda rank: (loads[rank], rank))
        for rank, number in zip(lightest, order[first : first + count], strict=True):
            ranks[rank].append(sorted(filled[number]))
            loads[rank] += tokens[number]
    return ranks


def _fill(sizes: Sequence[int], count: int, kind: MicroBatch) -> list[list[int]]:
    """The examples of as few micro-batches as are found to hold them, equally many for each rank."""
    turns = _fewest(sizes, count, kind)
    too_few = turns - 1
    while (filled := _filled(sizes, count * turns, kind)) is None:
        too_few, turns = turns, turns + max(1, turns // 8)
    while turns - too_few > 1:
        between = (too_few + turns) // 2
        tried = _filled(sizes, count * between, kind)
        if tried is None:
            too_few = between
        else:
            filled, turns = tried, between
    return filled


def _fewest(sizes: Sequence[int], count: int, kind: MicroBatch) -> int:
    """Fewer micro-batches a rank than these can't hold the examples."""
    room = kind.rows * kind.row
    needed = [1, -(-sum(sizes) // room)]
    # Of those longer than half a row no two share one.
    needed.append(-(-sum(2 * size > kind.row for size in sizes) // kind.rows))
    if kind.most is not None:
        needed.append(-(-len(sizes) // kind.most))
    return -(-max(needed) // count)


def _filled(sizes: Sequence[int], count: int, kind: MicroBatch) -> list[list[int]] | None:
    """Examples in so many micro-batches, longest first to the one with the fewest tokens; None if that fails."""
    room = kind.rows * kind.row
    filled: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        if not heap or heap[0][0] + sizes[place] > room:
            return None
        tokens, held, number = heap[0]
        filled[number].append(place)
        if held + 1 == kind.most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (tokens + sizes[place], held + 1, number))
    return filled if all(kind.fits([sizes[place] for place in places]) for places in filled) else None
