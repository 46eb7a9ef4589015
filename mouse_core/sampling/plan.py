"""The plan of a batch (computed before rows are read), the protocols of samplers, and functions that samplers share."""

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

# Name of the field that marks present steps, in batches whose windows may have missing steps.
MASK = "mask"
# Names of the additional fields of packed batches, which locate windows and mark rows that belong to a window.
PACKED = ("cu_seqlens", "position", "sequence_id", MASK)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The windows of one batch. A plan is a small immutable value, so a plan can be sent quickly to another process.

    Args:
        starts: The row of the snapshot at which each window begins, int64 ``[b]``.
        length: Number of steps in a window.
        key: The key of the random numbers of all later stages, such as augmentation. All shards have the same key.
        global_size: Number of windows in the batch over all shards.
        first: Position of the plan's first window in the batch over all shards.
        lengths: Number of present steps in each window, int64 ``[b]``; None: all steps are present.
        block, number: The planner's block that contains this batch, and the batch's index in the block; not pickled.
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
    """Chooses the windows of a batch by a pure function, so every process can compute every batch.

    The argument ``epoch_start`` of the methods is the index of the first batch that is drawn from the snapshot: 0, or
    the index at which a loader was refreshed.
    """

    @property
    def sequence_length(self) -> int:
        """Number of steps in a window."""

    @property
    def batch_size(self) -> int:
        """Number of windows in a batch over all shards."""

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of batches in an epoch, at least 1; raise ConfigError if the snapshot has too few rows."""

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """Return the first row of each window of batch ``index``, over all shards, int64 ``[b]`` with ``b <=
        batch_size``.
        """


@dataclass(frozen=True)
class Blocks:
    """The options of ``sampling="blocks"``, as in ``sampling=Blocks(rows=4096)``.

    Args:
        rows: Number of rows in a block; None: the number of rows in 256 KB. Blocks are shorter if batches are so large
            that the pool would exceed 256 MB, or if the pool has room for all windows.
        pool: Number of blocks that are open at the same time, rounded to a multiple of the batch size; None: the number
            of blocks that need at most 256 MB, for example 1,024 blocks of 256 KB. The windows at each position in a
            batch are drawn from a separate part of the pool, so different shards never read the same block.

    Raises:
        ConfigError: ``rows`` or ``pool`` is not an integer of at least 1.

    Example:
        >>> Blocks(rows=4096, pool=256)
        Blocks(rows=4096, pool=256)
    """

    rows: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("pool", self.pool)):
            if value is not None and not (is_whole(value) and value >= 1):
                raise ConfigError(f"Blocks: expected {name} as an integer of at least 1, or None, found {value!r}")


Sampling = str | Blocks | WindowSampler
"""The type of a source's ``sampling``: the name of a sampling, ``Blocks``, or a sampler."""


class ManyStarts:
    """Base class of samplers that draw the windows of several batches in one call, so that planning takes less time.

    A sampler may implement ``starts_of_many`` without this base class. With ``starts_of_many``, each process draws only
    the windows of its shard.
    """

    def starts(self: Any, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``WindowSampler.starts``."""
        rows = slice(0, self.batch_size)
        starts: npt.NDArray[np.int64] = self.starts_of_many(seed, index, 1, snapshot, epoch_start, rows)[0]
        return starts

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> npt.NDArray[np.int64] | None:
        """Return the first rows of the windows ``rows.start .. rows.stop - 1`` of the ``count`` batches from batch
        ``first`` on.

        Returns:
            int64 ``[count, rows.stop - rows.start]``, equal to the results of ``starts``. If the result is None, the
            caller must call ``starts`` for each batch.
        """
        raise NotImplementedError


class Stretches(NamedTuple):
    """Stretches of rows that are each read completely, and the windows in each stretch."""

    starts: npt.NDArray[np.int64]
    """The first row of each window, stretch by stretch, int64 ``[n]``."""
    bounds: npt.NDArray[np.int64]
    """The position in ``starts`` of each stretch's first window, followed by the number of all windows, int64
    ``[stretches + 1]``.
    """
    firsts: npt.NDArray[np.int64]
    """For each batch, the index of the first stretch that the batch opens, followed by the number of stretches, int64
    ``[batches + 1]``.
    """
    until: npt.NDArray[np.int64]
    """For each stretch, the index of the first batch after the last batch that reads the stretch, int64
    ``[stretches]``.
    """


@runtime_checkable
class ReadsBlocks(Protocol):
    """The optional interface of samplers whose batches take windows from stretches of rows that are read completely."""

    def starts_to_read(
        self, seed: int, batches: range, snapshot: Snapshot, epoch_start: int, *, rows: slice, begun: int
    ) -> Stretches | None:
        """Return the stretches that the given batches open, and the windows of the stretches; the stretches are read
        together with these batches.

        Over all batches of an epoch, the result contains each window of the epoch once. Each window of a batch lies in
        a stretch that this batch or an earlier batch opens.

        Args:
            seed, snapshot, epoch_start: See ``WindowSampler.starts``.
            batches: Indices of the batches.
            rows: The positions in each batch of the windows that this shard delivers.
            begun: Index of the first batch that the caller reads; the result also contains the stretches that earlier
                batches opened.

        Returns:
            The stretches; None if the rows of each batch are read only with the batch.
        """


@runtime_checkable
class PaddedSampler(WindowSampler, Protocol):
    """A sampler whose windows may have missing steps; its batches have a field ``mask``."""

    @property
    def fill(self) -> float | None:
        """The value of all fields in missing steps; None: copies of the window's last step."""

    def lengths(self, starts: npt.NDArray[np.int64], snapshot: Snapshot) -> npt.NDArray[np.int64]:
        """Return the number of present steps, at least 1, of each window that begins at one of ``starts``; the argument
        and the result are int64 ``[n]``.
        """


def starts_by_epochs(
    first: int,
    end: int,
    epoch: int,
    epoch_start: int,
    one: Callable[[int], npt.NDArray[np.int64]],
    many: Callable[[int, int], npt.NDArray[np.int64] | None],
) -> list[npt.NDArray[np.int64]]:
    """Return the first rows of the windows of the batches ``first .. end - 1``; the last batch of an epoch may be
    short.

    Args:
        first, end: The index of the first batch, and the index of the last batch plus 1.
        epoch, epoch_start: Number of batches in an epoch, and index of the first batch of the first epoch.
        one: Function that draws the batch with a given index.
        many: Function that draws ``count`` full batches, beginning with the batch of a given index, int64 ``[count,
            B]``. The function returns None if the sampler cannot draw several batches together.

    Returns:
        A list with an array int64 ``[b]`` for each batch; the list is empty if the caller must draw the batches one by
        one.
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


# Windows of a section, which are drawn together: drawing one window takes 60 us, drawing 4,096 takes 300 us. The value
# is part of the random stream.
SECTION = 4096


def whole_windows(snapshot: Snapshot, length: int, *, at_least: int) -> int:
    """Return how many windows of ``length`` rows a snapshot has without overlap; raise ConfigError if this number is
    below ``at_least``.
    """
    windows = snapshot.num_rows // length
    if windows < at_least:
        wanted = f"{at_least} window{'s' * (at_least > 1)} of {length} steps ({at_least * length} rows)"
        raise ConfigError(f"sampling: expected at least {wanted}, found {snapshot.num_rows} rows")
    return windows


def cut_at_epochs(begin: int, count: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Split the ``count`` items from item ``begin`` on into epochs of ``length`` items. Yield, for each epoch, its
    index, the first item in the epoch, and the last item plus 1.

    Example: with epochs of 10 items, 7 items from item 8 on are the items 8..9 of epoch 0 and 0..4 of epoch 1: (0, 8,
    10), (1, 0, 5).
    """
    end = begin + count
    while begin < end:
        epoch, first = divmod(begin, length)
        last = min(first + end - begin, length)
        yield epoch, first, last
        begin += last - first


def numbers_of_rows(first: int, count: int, size: int, rows: slice) -> Int64s:
    """Return the indices of the windows at the positions ``rows`` of ``count`` batches, int64 ``[count, n]``. The
    indices are counted over all batches, and each batch has ``size`` windows.

    Example: with batches of 4 windows, the windows at the positions 1 and 2 of batch 5 have the indices 21 and 22, and
    the windows at these positions of batch 6 have the indices 25 and 26.
    """
    numbers: Int64s = np.arange(first, first + count)[:, None] * size + np.arange(rows.start, rows.stop)
    return numbers


def slice_sections(section: Callable[[int], Array], begin: int, end: int) -> Array:
    """Return the elements ``begin .. end - 1``, along the last axis, of a sequence that is computed in sections of
    ``SECTION`` elements.
    """
    first, last = begin // SECTION, (end - 1) // SECTION
    if first == last:
        return cast(Array, section(first)[..., begin - first * SECTION : end - first * SECTION])
    joined = np.concatenate([section(number) for number in range(first, last + 1)], axis=-1)
    return cast(Array, joined[..., begin - first * SECTION : end - first * SECTION])


def read_only(array: Array) -> Array:
    """Make an array read-only, and return the array."""
    array.flags.writeable = False
    return array


def remembered(snapshot: Snapshot, key: Any, compute: Callable[[], Known]) -> Known:
    """Return a value that is computed from a snapshot. The value is computed once, and cached as long as the snapshot
    exists.
    """
    known = snapshot.__dict__.setdefault("_remembered", {})
    found: Known | None = known.get(key)
    return known.setdefault(key, compute()) if found is None else found
