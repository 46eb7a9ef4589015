"""The plan of a batch, made before anything is read, the protocols of samplers, and the arithmetic they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

# The field of batches whose windows may have fewer steps: which of them are there.
MASK = "mask"
# The fields that packed batches have besides: where their windows lie, and which rows are of one.
PACKED = ("cu_seqlens", "position", "sequence_id", MASK)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The windows of one batch; a value to be read, and small to send.

    Args:
        starts: The snapshot's row at which each window begins, int64 ``[b]``.
        length: Steps in a window.
        key: Names the random numbers of whatever is done to the batch afterwards; the same for all shards.
        global_size: Windows in the whole batch, of which these may be a shard.
        first: Which row of the whole batch the first of these is.
        lengths: How many steps of each window are there, int64 ``[b]``; None: all.
        block, number: What the source that made the plan knows about it already, and which batch of that it is.
    """

    starts: npt.NDArray[np.int64]
    length: int
    key: Key
    global_size: int
    first: int = 0
    lengths: npt.NDArray[np.int64] | None = None
    block: object = field(default=None, repr=False)
    number: int = field(default=0, repr=False)

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        return Plan, (self.starts, self.length, self.key, self.global_size, self.first, self.lengths)


@runtime_checkable
class WindowSampler(Protocol):
    """Decides which windows a batch consists of; pure, so that any process can compute any batch.

    ``epoch_start`` is the index of the first batch that was drawn from this snapshot: 0, or where a loader
    was refreshed.
    """

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        ...

    @property
    def batch_size(self) -> int:
        """Windows in a whole batch."""
        ...

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Batches in an epoch, at least 1; raises ConfigError if the snapshot has too few rows."""
        ...

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """The rows at which the windows of whole batch ``index`` begin, int64 ``[b]``, ``b <= batch_size``."""
        ...


@dataclass(frozen=True)
class Blocks:
    """The options of ``sampling="blocks"``, as in ``sampling=Blocks(rows=4096)``.

    Args:
        rows: Rows of a block; None: as many as take 256 KB, and fewer where batches are so large that the pool would
            take more than 256 MB. Where the pool has room for all windows, blocks are shorter, one for each place.
        pool: Blocks that windows are drawn from at a time, made a multiple of the batch size; None: what takes 256 MB,
            1,024 of 256 KB. Each window of a batch has a part of the pool of its own, so that shards share no blocks.

    Raises:
        ConfigError: No integers from 1.

    Example:
        >>> Blocks(rows=4096, pool=256)
        Blocks(rows=4096, pool=256)
    """

    rows: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("pool", self.pool)):
            if value is not None and not (is_whole(value) and value >= 1):
                raise ConfigError(f"Blocks: expected {name} as an integer from 1, or None, found {value!r}")


Sampling = str | Blocks | WindowSampler
"""What a source takes as ``sampling``: a name, what one of them stands for, or a sampler."""


class ManyStarts:
    """Base of samplers that draw the windows of several batches by one call, which makes planning cheap.

    A sampler may have ``starts_of_many`` without this base. One of many processes has few windows of a batch, and draws
    only these.
    """

    def starts(self: Any, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``WindowSampler.starts``."""
        rows = slice(0, self.batch_size)
        starts: npt.NDArray[np.int64] = self.starts_of_many(seed, index, 1, snapshot, epoch_start, rows)[0]
        return starts

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> npt.NDArray[np.int64] | None:
        """Return the starts of windows ``rows.start .. rows.stop - 1`` of batches ``first .. first + count - 1``.

        Returns:
            int64 ``[count, rows.stop - rows.start]``, equal to those of ``starts``. None: ``starts`` draws each batch.
        """
        raise NotImplementedError


class Stretches(NamedTuple):
    """Stretches of rows that are read as a whole, and the windows that they consist of."""

    starts: npt.NDArray[np.int64]
    """Where the windows begin, stretch by stretch, int64 ``[n]``."""
    bounds: npt.NDArray[np.int64]
    """Where among them those of each stretch begin, and the end, int64 ``[stretches + 1]``."""
    firsts: npt.NDArray[np.int64]
    """The first stretch that each batch opens, and the end, int64 ``[batches + 1]``."""
    until: npt.NDArray[np.int64]
    """The batch from which on nobody reads each stretch any more, int64 ``[stretches]``."""


@runtime_checkable
class ReadsBlocks(Protocol):
    """An optional method of samplers whose batches take windows from stretches of rows that are read as a whole."""

    def starts_to_read(
        self, seed: int, batches: range, snapshot: Snapshot, epoch_start: int, *, rows: slice, begun: int
    ) -> Stretches | None:
        """Return the windows of the stretches that batches open, which are read with these batches.

        Over the batches of an epoch these are all of its windows, each once; a batch's own are among its own and those
        of the batches before it.

        Args:
            seed, snapshot, epoch_start: As of ``WindowSampler.starts``.
            batches: Which batches.
            rows: Which windows of each batch are of interest, as a shard has them.
            begun: The first batch that anybody read: stretches that were opened before it are read when it comes.

        Returns:
            The stretches. None: nothing is read before its batch.
        """
        ...


@runtime_checkable
class PaddedSampler(WindowSampler, Protocol):
    """A sampler whose windows may have fewer steps than they are long; its batches have a field ``mask``."""

    @property
    def fill(self) -> float | None:
        """The value of all fields in missing steps; None: they repeat the window's last step."""
        ...

    def lengths(self, starts: npt.NDArray[np.int64], snapshot: Snapshot) -> npt.NDArray[np.int64]:
        """Return how many steps the windows that begin at ``starts`` (int64 ``[n]``) have, int64 ``[n]``, from 1."""
        ...


def starts_by_epochs(
    first: int,
    end: int,
    epoch: int,
    epoch_start: int,
    one: Callable[[int], npt.NDArray[np.int64]],
    many: Callable[[int, int], npt.NDArray[np.int64] | None],
) -> list[npt.NDArray[np.int64]]:
    """The starts of batches ``first .. end - 1``, of which the last one of an epoch may be short.

    Args:
        first, end: Which batches.
        epoch, epoch_start: How many an epoch has, and where the first begins.
        one: Draws a batch.
        many: Draws so many full batches from one on, int64 ``[count, B]``; None if the sampler cannot.

    Returns:
        int64 ``[b]`` for each; none where they are to be drawn one by one.
    """
    starts: list[npt.NDArray[np.int64]] = []
    while first < end and epoch > 1:
        last = min(first + epoch - 1 - (first - epoch_start) % epoch, end)
        if last - first > 1:
            full = many(first, last - first)
            if full is None:
                return []
            starts += list(full)
        elif last > first:
            starts.append(one(first))
        if last < end:
            starts.append(one(last))
        first = last + 1
    return starts


Array = TypeVar("Array", bound=npt.NDArray[Any])


Known = TypeVar("Known")


# Windows of a section, which are drawn together: one of an epoch's order is 60 us, 4,096 are 300 us. Part of the
# random stream.
SECTION = 4096


def whole_windows(snapshot: Snapshot, length: int, *, at_least: int) -> int:
    """Return how many windows lie side by side, or raise ConfigError if there are fewer than ``at_least``."""
    windows = snapshot.num_rows // length
    if windows < at_least:
        wanted = f"{at_least} window{'s' * (at_least > 1)} of {length} steps ({at_least * length} rows)"
        raise ConfigError(f"sampling: expected at least {wanted}, found {snapshot.num_rows} rows")
    return windows


def cut_at_epochs(begin: int, count: int, length: int) -> Iterator[tuple[int, int, int]]:
    """``count`` items from ``begin`` on, cut where epochs of ``length`` items end: epoch, first item in it, and end.

    7 items from 8 on, of epochs of 10, are items 8..9 of epoch 0 and 0..4 of epoch 1: (0, 8, 10) and (1, 0, 5).
    """
    end = begin + count
    while begin < end:
        epoch, first = divmod(begin, length)
        last = min(first + end - begin, length)
        yield epoch, first, last
        begin += last - first


def numbers_of_rows(first: int, count: int, size: int, rows: slice) -> Int64s:
    """Return the numbers of some rows of batches, of all windows one after the other, int64 ``[count, n]``.

    Rows 1..2 of batches 5 and 6 of 4 windows each are windows 21, 22 and 25, 26.
    """
    numbers: Int64s = np.arange(first, first + count)[:, None] * size + np.arange(rows.start, rows.stop)
    return numbers


def slice_sections(section: Callable[[int], Array], begin: int, end: int) -> Array:
    """Elements ``begin..end - 1``, of the last axis, of a sequence that is computed in sections of ``SECTION``."""
    first, last = begin // SECTION, (end - 1) // SECTION
    if first == last:
        return cast(Array, section(first)[..., begin - first * SECTION : end - first * SECTION])
    joined = np.concatenate([section(number) for number in range(first, last + 1)], axis=-1)
    return cast(Array, joined[..., begin - first * SECTION : end - first * SECTION])


def read_only(array: Array) -> Array:
    """Return the array, set to read-only."""
    array.flags.writeable = False
    return array


def remembered(snapshot: Snapshot, key: Any, compute: Callable[[], Known]) -> Known:
    """Return a value that follows from a snapshot; it is computed once and kept as long as the snapshot exists."""
    known = snapshot.__dict__.setdefault("_remembered", {})
    found: Known | None = known.get(key)
    return known.setdefault(key, compute()) if found is None else found
