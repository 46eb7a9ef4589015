"""What a batch consists of, decided before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mouse_core.randomness import Key
from mouse_core.store.snapshot import Snapshot

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


class ManyStarts(Protocol):
    """What a sampler may offer besides, so that planning is cheap: the starts of several batches by one call."""

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int
    ) -> npt.NDArray[np.int64] | None:
        """What ``starts`` gives for ``first .. first + count - 1``, int64 ``[count, B]``; None: ask one by one."""
        ...


@runtime_checkable
class PaddedSampler(WindowSampler, Protocol):
    """A sampler whose windows may have fewer steps than they are long; its batches have a field ``mask``."""

    @property
    def fill(self) -> float | None:
        """What all fields become in steps that are not there; None: they repeat the window's last one that is."""
        ...

    def lengths(self, starts: npt.NDArray[np.int64], snapshot: Snapshot) -> npt.NDArray[np.int64]:
        """How many steps of the windows that begin at ``starts`` (int64 ``[n]``) are there, int64 ``[n]``, from 1."""
        ...


class CutWindows(Protocol):
    """What a padded sampler may offer besides: windows that are parts of those that it names."""

    def cut_many(
        self,
        seed: int,
        batches: Sequence[int],
        own: Sequence[slice],
        sizes: Sequence[int],
        starts: npt.NDArray[np.int64],
        snapshot: Snapshot,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the windows of some batches begin that are left, and how many steps they have, int64 ``[n]`` each.

        Args:
            seed, batches: Which batches.
            own: Which of their windows these are.
            sizes: How many the whole batches have.
            starts: Where the windows begin that they are cut from, batch by batch, int64 ``[n]``.
            snapshot: The rows.
        """
        ...
