"""RolloutStream: an iterator over one rank's share of each batch of a RolloutBuffer."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_choice, check_seconds, state_number
from mouse_core.digest import StreamDigest
from mouse_core.errors import ConfigError, DataError, StateError, TimedOutError
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.examples import Arrays, best_fit, concatenate, examples_digest, pack, pad
from mouse_core.groups.records import NO_COLUMNS, Columns, RLExample
from mouse_core.groups.stored import FolderBatches
from mouse_core.ranks import Shard, check_shard, ranks_of
from mouse_core.spec import check_count

COLLATIONS = ("pack", "pad", "concatenate")


@dataclass(frozen=True)
class MicroBatch:
    """The limits of a micro-batch, and its conversion to arrays; see ``plan_micro_batches``.

    Raises:
        ConfigError: An argument is invalid.
    """

    max_tokens: int
    collate: str = "pack"
    length: int | None = None
    max_examples: int | None = None
    pad_token: int = 0

    def __post_init__(self) -> None:
        tokens = check_count("max_tokens", self.max_tokens)
        check_choice("collate", self.collate, COLLATIONS)
        if self.max_examples is not None:
            check_count("max_examples", self.max_examples)
        if self.collate == "concatenate" and self.length is not None:
            raise ConfigError(f"length: with collate='concatenate', expected None, found {self.length!r}")
        if self.collate == "pad" and self.length is None:
            raise ConfigError("length: with collate='pad', expected the number of tokens in a row, found None")
        if self.length is not None and check_count("length", self.length) > tokens:
            raise ConfigError(f"length: expected at most max_tokens, {tokens}, found {self.length}")

    @property
    def row(self) -> int:
        """Largest number of tokens of an example."""
        return self.max_tokens if self.length is None else self.length

    @property
    def rows(self) -> int:
        """Number of rows of the arrays."""
        rows = self.max_tokens // self.row
        return rows if self.collate != "pad" or self.max_examples is None else min(rows, self.max_examples)

    @property
    def most(self) -> int | None:
        """Largest number of examples; None: no limit."""
        return self.rows if self.collate == "pad" else self.max_examples

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether examples of the given lengths fit into one micro-batch."""
        if self.collate == "pack" and self.rows > 1 and lengths:
            return int(best_fit(np.array(lengths, np.int64), self.row)[0].max()) < self.rows
        return True  # their number and their tokens are known to

    def arrays(self, examples: Sequence[RLExample], empty: RLExample) -> Arrays:
        """Return the arrays, whose shapes are equal for all micro-batches; an empty micro-batch gets an example without
        tokens.
        """
        wanted = 1 if self.collate == "pack" or self.most is None else self.most
        filled = [*examples, *[empty] * (wanted - len(examples))]
        if self.collate == "pad":
            return pad(filled, self.row, pad_token=self.pad_token)
        if self.collate == "pack":
            options: dict[str, Any] = {"num_rows": self.rows, "max_examples": self.max_examples}
            return pack(filled, self.row, pad_token=self.pad_token, **options)
        return concatenate(filled, self.max_tokens, pad_token=self.pad_token)


def plan_micro_batches(
    lengths: npt.ArrayLike,
    count: int,
    *,
    max_tokens: int,
    collate: str = "pack",
    length: int | None = None,
    max_examples: int | None = None,
) -> list[list[list[int]]]:
    """Distribute examples to ranks, so that all ranks have about equally many tokens and equally many micro-batches.

    The number of micro-batches is the smallest number that is sufficient for all examples. Each example, longest first,
    is added to the micro-batch with the fewest tokens (longest processing time first, Graham 1969). The micro-batches,
    most tokens first, are distributed to the ranks in rounds; in each round, the largest micro-batch is assigned to the
    rank with the fewest tokens. As a result, micro-batches that the ranks process at the same time have similar sizes.
    The token counts of two ranks differ by at most the length of the longest example, unless the number of examples is
    limited.

    Args:
        lengths: Number of tokens of each example, ``[N]``.
        count: The number of ranks.
        max_tokens: The largest number of tokens of a micro-batch's arrays, including padding.
        collate: The function that creates the arrays: "pack", rows of ``length`` tokens, at most ``max_tokens`` in
            total; "pad", the same rows with one example each; "concatenate", one row.
        length: Number of tokens in a row; None: ``max_tokens``.
        max_examples: The largest number of examples in a micro-batch.

    Returns:
        For each rank a list of micro-batches; a micro-batch is an ascending list of indices into ``lengths``. With few
        examples, some micro-batches are empty.

    Raises:
        ConfigError: An argument is invalid.
        DataError: ``lengths`` contains a value that is not a number of tokens, or an example is longer than a row.

    Example:
        >>> plan_micro_batches([5, 3, 3, 2, 2, 1], 2, max_tokens=8)
        [[[0, 3, 5]], [[1, 2, 4]]]
    """
    return plan(lengths, check_count("count", count), MicroBatch(max_tokens, collate, length, max_examples))


def plan(lengths: npt.ArrayLike, count: int, kind: MicroBatch) -> list[list[list[int]]]:
    """See ``plan_micro_batches``."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 0)):
        raise DataError(f"lengths: expected the number of tokens of each example, found {lengths!r:.80}")
    sizes: list[int] = given.tolist()
    for place, size in enumerate(sizes):
        if size > kind.row:
            raise DataError(
                f"examples: expected at most {kind.row} tokens, found {size} at index {place}; a RolloutStream with "
                "skip_longer=True skips such examples"
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
    """Return the examples of each micro-batch. The number of micro-batches is the smallest number that is sufficient
    for all examples and is equal for all ranks.
    """
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
    """Return a lower bound of the number of micro-batches per rank."""
    room = kind.rows * kind.row
    needed = [1, -(-sum(sizes) // room)]
    # Two examples that are longer than half a row cannot share a row.
    needed.append(-(-sum(2 * size > kind.row for size in sizes) // kind.rows))
    if kind.most is not None:
        needed.append(-(-len(sizes) // kind.most))
    return -(-max(needed) // count)


def _filled(sizes: Sequence[int], count: int, kind: MicroBatch) -> list[list[int]] | None:
    """Distribute examples, longest first, each to the micro-batch with the fewest tokens; None if ``count``
    micro-batches are too few.
    """
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


class BatchShare:
    """One rank's share of a batch: a sequence of micro-batches; its length is equal on every rank.

    A micro-batch is a dict of the arrays of ``pack``, ``pad`` or ``concatenate``, created on access; the arrays of all
    micro-batches have equal shapes. With too few examples, a micro-batch may be empty: its arrays have the same shape,
    without any token in the loss.

    Attributes:
        index: The index of the batch.
        batch_id: The batch's id in the buffer.
        examples: The examples of this rank, in the order of micro-batches.
        places: The indices of these examples in the complete batch, int64 ``[k]``.
        staleness: The number of versions that each example was behind the newest version when the batch was created,
            float64 ``[k]``; NaN if unknown.
        report: Statistics of the complete batch, equal on every rank: "index", "batch_id", "examples", "tokens",
            "loss_tokens" (the divisor of a loss that is summed over ranks), "skipped" (the number of examples that were
            left out because they are longer than a row; "examples" and the token counts do not include these examples),
            "micro_batches", "rank_tokens" (a list), "staleness_mean" and "staleness_max" (None if unknown).
    """

    def __init__(self, stream: RolloutStream, index: int, batch_id: str) -> None:
        self.index, self.batch_id = index, batch_id
        self._deliver, self._kind = stream._deliver, stream._kind
        batch, staleness = stream._batches.read_batch(batch_id), stream._batches.batch_staleness(batch_id)
        kind, (rank, count) = self._kind, stream.shard
        sizes = [len(example) for example in batch]
        kept = [place for place, size in enumerate(sizes) if not stream._skip_longer or size <= kind.row]
        planned = plan([sizes[place] for place in kept], count, kind)
        ranks = [[[kept[number] for number in numbers] for numbers in one] for one in planned]
        own = ranks[rank]
        self.places = np.array([place for places in own for place in places], np.int64)
        self.examples = [batch[place] for place in self.places.tolist()]
        self._micro = [[batch[place] for place in places] for places in own]
        self.staleness = staleness[self.places]
        self._empty = _empty(batch)
        known = staleness[~np.isnan(staleness)]
        self.report: Mapping[str, Any] = {
            "index": index,
            "batch_id": batch_id,
            "examples": len(kept),
            "tokens": sum(sizes[place] for place in kept),
            "loss_tokens": sum(int(np.count_nonzero(batch[place].loss_mask)) for place in kept),
            "skipped": len(batch) - len(kept),
            "micro_batches": len(self._micro),
            "rank_tokens": [sum(sizes[place] for places in one for place in places) for one in ranks],
            "staleness_mean": float(known.mean()) if len(known) else None,
            "staleness_max": float(known.max()) if len(known) else None,
        }

    def __repr__(self) -> str:
        return f"BatchShare(index={self.index}, examples={len(self.examples)}, micro_batches={len(self)})"

    def __len__(self) -> int:
        return len(self._micro)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        """Return the arrays of a micro-batch; for a slice, a list of the arrays of several micro-batches."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return self._deliver(self._kind.arrays(self._micro[number], self._empty), self._empty.declared)

    @property
    def digest(self) -> StreamDigest:
        """The digest of this rank's examples. The sum of all ranks' digests is ``examples_digest(index, batch)`` of the
        complete batch, unless an example was skipped.
        """
        each = zip(self.places.tolist(), self.examples, strict=True)
        return sum((examples_digest(self.index, [example], place) for place, example in each), StreamDigest())


def _empty(batch: Sequence[RLExample]) -> RLExample:
    """Return an example without tokens that has the columns of the other examples."""
    declared = batch[0].declared if batch else NO_COLUMNS
    columns = {
        name: np.full(column.shape if column.per == "example" else (0, *column.shape), column.fill, column.dtype)
        for name, column in declared.items()
    }
    tokens, none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return RLExample(tokens, tokens > 0, none, none, columns=columns, declared=declared)


class StoredBatches(Protocol):
    """Access to stored batches by their index."""

    def batch_at(self, index: int) -> str | None:
        """Return the id of a batch; None while the batch is not stored."""
        ...

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Return the examples of a batch."""
        ...

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """Return how many versions each example is behind the newest version, float64 ``[B]``."""
        ...


# Seconds between two checks for a missing batch: initially, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_FORMAT = 1


class RolloutStream:
    """An endless iterator over this rank's share of a buffer's stored batches.

    The batches and the order of their examples come from the buffer. ``plan_micro_batches`` distributes the examples to
    ranks: all ranks have about the same number of tokens, and the same number of micro-batches, so that collective
    operations match. One process owns the buffer and creates batches on request; the other processes read the batches
    from the folder. The iterator waits for a batch that does not exist yet.

    Args:
        batches: A ``RolloutBuffer``; the folder of a ``RolloutBuffer`` in another process; or another object with
            ``batch_at``, ``read_batch`` and ``batch_staleness``, such as ``mouse_ray.ActorBatches``.
        max_tokens: The largest number of tokens of a micro-batch, including padding.
        shard: ``(rank, count)``; or "auto", which uses ``mouse_core.ranks.find_ranks``.
        batch_size: The number of examples in new batches, if ``batches`` is a buffer; None: create no batches.
        collate, length, max_examples: See ``plan_micro_batches``. All micro-batches have equal shapes if
            ``max_examples`` is given for concatenated examples and for packed columns per example.
        pad_token: The token for padding.
        skip_longer: Whether examples that are longer than a row are left out, on all ranks, and counted in a share's
            ``report``; otherwise a batch with such an example raises DataError. To exclude long rollouts from batches,
            use the batch maker's ``retention``.
        timeout: Seconds to wait for a batch.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        stream = RolloutStream("rollouts", 4096, shard=(rank, count))
        for share in stream:
            for arrays in share:
                ...  # forward and backward
            ...  # the optimizer's step
            save(stream.state_dict())
    """

    def __init__(
        self,
        batches: str | Path | RolloutBuffer | StoredBatches,
        max_tokens: int,
        *,
        shard: Shard = (0, 1),
        batch_size: int | None = None,
        collate: str = "pack",
        length: int | None = None,
        max_examples: int | None = None,
        pad_token: int = 0,
        skip_longer: bool = False,
        timeout: float = 600.0,
    ) -> None:
        ranks = ranks_of(shard)
        self.shard = check_shard(shard if ranks is None else ranks.shard, 0, "pad")
        self._kind = MicroBatch(max_tokens, collate, length, max_examples, int(pad_token))
        self._timeout = check_seconds("timeout", timeout)
        self._skip_longer = bool(skip_longer)
        self._batches, self._batch_at = _feed(batches, batch_size)
        # The index of the next batch, and the id of the previous batch.
        self._next, self._after = 0, ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batches!r}, shard={self.shard}, at={self._next})"

    def __iter__(self) -> Iterator[BatchShare]:
        return self

    def __next__(self) -> BatchShare:
        """Return the share of the next batch.

        Raises:
            TimedOutError: The batch was not created in time; the next call waits again.
            StateError: The previous batch differs from the batch in the loaded state.
            DataError: The batch's file is damaged, or an example is longer than a row of a micro-batch; with
                ``skip_longer``, long examples are left out instead.
            StorageError: The batch's file cannot be read.
        """
        index = self._next
        batch_id = self._wait(index)
        self._check_before(index)
        share = BatchShare(self, index, batch_id)
        self._next, self._after = index + 1, batch_id
        return share

    def _deliver(self, arrays: Arrays, declared: Columns) -> Any:
        """Return a micro-batch in the form that the caller receives; adapters move the arrays to a device."""
        return arrays

    def _wait(self, index: int) -> str:
        """Wait until a batch is stored, and return its id."""
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while (batch_id := self._batch_at(index)) is None:
            self._check_before(index, may_come=True)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOutError(
                    f"batch {index}: expected this batch within {self._timeout:g} s, found no such batch in "
                    f"{self._batches!r}; the process with the buffer creates a batch as soon as enough "
                    "rollouts can be drawn"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return batch_id

    def _check_before(self, index: int, *, may_come: bool = False) -> None:
        """Raise StateError if the batch before the current position differs from the batch before this position when
        the state was saved.
        """
        before = self._batch_at(index - 1) if index else ""
        if before != self._after and not (may_come and before is None):
            raise StateError(
                f"batch {index - 1}: expected {self._after!r}, as when the state was saved, found {before!r}"
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch as numbers and text; the result is equal on every rank."""
        return {"format": _FORMAT, "batch": self._next, "after": self._after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position, also with another number of ranks.

        Raises:
            StateError: The state does not belong to a stream, or a newer version wrote it. The stream is unchanged.
        """
        form = state.get("format") if isinstance(state, Mapping) else None
        if form != _FORMAT:
            newer = ", of a newer version" if isinstance(form, int) and form > _FORMAT else ""
            raise StateError(
                f"state: expected the state of a RolloutStream in format {_FORMAT}, found format {form!r}{newer}"
            )
        after, index = state.get("after"), state_number("batch", state.get("batch"))
        if not isinstance(after, str) or bool(after) != bool(index):
            raise StateError(f"state: expected the id of the batch before batch {index}, found {after!r:.80}")
        self._next, self._after = index, after


def _feed(batches: Any, batch_size: int | None) -> tuple[StoredBatches, Callable[[int], str | None]]:
    """Return the reader of batches, and a function from the index of a batch to the id of the batch."""
    size = None if batch_size is None else check_count("batch_size", batch_size)
    if isinstance(batches, RolloutBuffer):
        return batches, partial(batches.batch_at, batch_size=size)
    if size is not None:
        raise ConfigError(
            f"batch_size: expected None, since only the process with the buffer creates batches, found {size}"
        )
    feed = FolderBatches(Path(batches)) if isinstance(batches, str | Path) else batches
    if not hasattr(feed, "batch_at"):
        raise ConfigError(f"batches: expected a RolloutBuffer or the path of its folder, found {batches!r:.100}")
    return feed, feed.batch_at
