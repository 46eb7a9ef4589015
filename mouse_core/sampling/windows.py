"""Windows over the stream of steps, whatever episodes it is made of.

Windows cross the ends of episodes on purpose: a model that learns in context sees one episode lead into the next,
and ``done`` shows where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Order, Purpose, as_integers
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Array = TypeVar("Array", bound=npt.NDArray[Any])
Known = TypeVar("Known")

# Windows of a section, which are drawn together: one of an epoch's order is 60 us, 4,096 are 300 us. Part of the
# random stream.
SECTION = 4096


@dataclass(frozen=True)
class _ManyWindows:
    """The part that samplers share which plan several batches at once."""

    sequence_length: int
    batch_size: int

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        starts: Any = self.starts_of_many(seed, index, 1, snapshot, epoch_start, slice(0, self.batch_size))
        return np.asarray(starts[0])

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``."""
        raise NotImplementedError


@dataclass(frozen=True)
class RandomWindows(_ManyWindows):
    """Windows that begin anywhere in ``0..N-S``, uniformly and independently.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
    """

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """As many batches as it takes for as many steps as the snapshot has."""
        windows = whole_windows(snapshot, self.sequence_length, at_least=1)
        return -(-windows // self.batch_size)

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        size, each = self.batch_size, rows.stop - rows.start
        begin, end = first * size + rows.start, (first + count) * size
        if each == size:
            drawn = slice_sections(partial(_random_section, seed), begin, end)
        else:
            drawn = np.concatenate([_random_numbers(seed, one, one + each) for one in range(begin, end, size)])
        return as_integers(drawn.reshape(count, each), snapshot.num_rows - self.sequence_length + 1)


@dataclass(frozen=True)
class LastWindows:
    """The final windows of the snapshot, side by side up to its end, in ascending order; every batch is the same.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch, B; the snapshot needs at least ``B * S`` rows.
    """

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """One."""
        whole_windows(snapshot, self.sequence_length, at_least=self.batch_size)
        return 1

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        first = snapshot.num_rows - self.batch_size * self.sequence_length
        return first + self.sequence_length * np.arange(self.batch_size)


@dataclass(frozen=True)
class SequentialWindows(_ManyWindows):
    """Epochs over the ``N // S`` windows that lie side by side, each epoch in a new seeded order.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
        drop_last: Whether windows that do not fill a batch at the end of an epoch are left out, or make a short batch.
    """

    drop_last: bool = True

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Full batches, and a short one if there is a rest and it is kept."""
        at_least = self.batch_size if self.drop_last else 1
        windows = whole_windows(snapshot, self.sequence_length, at_least=at_least)
        return windows // self.batch_size if self.drop_last else -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        windows = snapshot.num_rows // self.sequence_length
        epoch, batch = divmod(index - epoch_start, self.batches_per_epoch(snapshot))
        numbers = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, windows))
        return _in_order(seed, epoch_start, windows, epoch * windows + numbers) * self.sequence_length

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``; None where one of the batches is short."""
        windows = snapshot.num_rows // self.sequence_length
        index = np.arange(first - epoch_start, first - epoch_start + count)
        epoch, batch = np.divmod(index, self.batches_per_epoch(snapshot))
        if (batch >= windows // self.batch_size).any():
            return None
        begin = epoch * windows + batch * self.batch_size
        numbers = begin[:, None] + np.arange(rows.start, rows.stop)
        return _in_order(seed, epoch_start, windows, numbers) * self.sequence_length


@dataclass(frozen=True)
class CyclicWindows(_ManyWindows):
    """The same epochs as one endless sequence: batches are always full and go on where the last one stopped.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch; may exceed the number of windows.
    """

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """The fewest batches in which every window occurs."""
        windows = whole_windows(snapshot, self.sequence_length, at_least=1)
        return -(-windows // self.batch_size)

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        numbers = numbers_of_rows(first - epoch_start, count, self.batch_size, rows)
        windows = snapshot.num_rows // self.sequence_length
        return _in_order(seed, epoch_start, windows, numbers) * self.sequence_length


def whole_windows(snapshot: Snapshot, length: int, *, at_least: int) -> int:
    """How many windows lie side by side; raises ConfigError if they are fewer than ``at_least``."""
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
    """Which windows some rows of some batches are, of all windows one after the other, int64 ``[count, n]``.

    Rows 1..2 of batches 5 and 6 of 4 windows each are windows 21, 22 and 25, 26.
    """
    numbers: Int64s = np.arange(first, first + count)[:, None] * size + np.arange(rows.start, rows.stop)
    return numbers


def _in_order(seed: int, epoch_start: int, windows: int, numbers: Int64s) -> Int64s:
    """The windows that have some places in the drawn orders of epochs of ``windows``, one epoch behind the other.

    With 10 windows, number 13 is the window that comes fourth in the order of epoch 1.

    Args:
        seed, epoch_start: See ``WindowSampler.starts``.
        windows: Windows of an epoch.
        numbers: The places, ascending, int64 of any shape.
    """
    flat, parts = numbers.reshape(-1), []
    epochs = range(int(flat[0]) // windows, int(flat[-1]) // windows + 1)
    edges = [0, *flat.searchsorted([epoch * windows for epoch in epochs[1:]]).tolist(), len(flat)]
    for epoch, (begin, end) in zip(epochs, pairwise(edges), strict=True):
        some = flat[begin:end] - epoch * windows
        if not len(some):
            continue
        first, last = int(some[0]), int(some[-1]) + 1
        if last - first == len(some):  # the sections serve the batches behind, too
            parts.append(slice_sections(partial(_order_section, seed, epoch_start, epoch, windows), first, last))
        else:
            parts.append(_order(seed, epoch_start, epoch, windows)(some))
    return np.concatenate(parts).reshape(numbers.shape)


def slice_sections(section: Callable[[int], Array], begin: int, end: int) -> Array:
    """Elements ``begin..end - 1``, of the last axis, of a sequence that is computed in sections of ``SECTION``."""
    first, last = begin // SECTION, (end - 1) // SECTION
    if first == last:
        return cast(Array, section(first)[..., begin - first * SECTION : end - first * SECTION])
    joined = np.concatenate([section(number) for number in range(first, last + 1)], axis=-1)
    return cast(Array, joined[..., begin - first * SECTION : end - first * SECTION])


# Memos of pure functions: a section serves many batches, and costs little more than one of its elements.


@lru_cache(maxsize=16)
def _random_section(seed: int, section: int) -> npt.NDArray[np.float64]:
    # Where windows may begin changes with every row that comes; what is drawn does not.
    return read_only(Key(seed, Purpose.WINDOWS, section).uniform(SECTION))


def _random_numbers(seed: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """Elements ``begin..end - 1`` of what ``_random_section`` gives section by section, without the others."""
    parts = []
    while begin < end:
        section, first = divmod(begin, SECTION)
        last = min(first + end - begin, SECTION)
        parts.append(Key(seed, Purpose.WINDOWS, section).uniform(last - first, first))
        begin += last - first
    return np.concatenate(parts)


@lru_cache(maxsize=16)
def _order_section(seed: int, epoch_start: int, epoch: int, windows: int, section: int) -> Int64s:
    order = _order(seed, epoch_start, epoch, windows)
    return read_only(order(np.arange(section * SECTION, min((section + 1) * SECTION, windows))))


@lru_cache(maxsize=4)
def _order(seed: int, epoch_start: int, epoch: int, windows: int) -> Order:
    return Order(Key(seed, Purpose.EPOCH, epoch_start, call=epoch), windows)


def read_only(array: Array) -> Array:
    """The array, which nobody can write to any more."""
    array.flags.writeable = False
    return array


_memos: WeakKeyDictionary[Snapshot, dict[Any, Any]] = WeakKeyDictionary()
_lock = ProcessLock()


def remembered(snapshot: Snapshot, key: Any, compute: Callable[[], Known]) -> Known:
    """What follows from a snapshot, computed when it is first asked for, and kept as long as that exists."""
    with _lock:
        known = _memos.setdefault(snapshot, {})
    found: Known | None = known.get(key)
    return known.setdefault(key, compute()) if found is None else found
