"""Windows over the stream of steps, whatever episodes it is made of.

Windows cross the ends of episodes on purpose: a model that learns in context sees one episode lead into the next,
and ``done`` shows where.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Order, Purpose
from mouse_core.sampling.plan import Sampler
from mouse_core.snapshot import Snapshot

# Positions of an epoch's order that are evaluated together: one is 60 us, 4,096 are 300 us.
_ORDER_BLOCK = 4096


@dataclass(frozen=True)
class RandomWindows:
    """Windows that begin anywhere in ``0..N-S``, uniformly and independently.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
    """

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """As many batches as it takes for as many steps as the snapshot has."""
        windows = _whole_windows(snapshot, self.sequence_length, at_least=1)
        return -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``Sampler.starts``."""
        key = Key(seed, Purpose.WINDOWS, index)
        return key.integers(snapshot.num_rows - self.sequence_length + 1, self.batch_size)


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
        _whole_windows(snapshot, self.sequence_length, at_least=self.batch_size)
        return 1

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``Sampler.starts``."""
        first = snapshot.num_rows - self.batch_size * self.sequence_length
        return first + self.sequence_length * np.arange(self.batch_size)


@dataclass(frozen=True)
class SequentialWindows:
    """Epochs over the ``N // S`` windows that lie side by side, each epoch in a new seeded order.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
        drop_last: Whether windows that do not fill a batch at the end of an epoch are left out, or make a short batch.
    """

    sequence_length: int
    batch_size: int
    drop_last: bool = True

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Full batches, and a short one if there is a rest and it is kept."""
        at_least = self.batch_size if self.drop_last else 1
        windows = _whole_windows(snapshot, self.sequence_length, at_least=at_least)
        return windows // self.batch_size if self.drop_last else -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``Sampler.starts``."""
        windows = snapshot.num_rows // self.sequence_length
        epoch, batch = divmod(index - epoch_start, self.batches_per_epoch(snapshot))
        positions = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, windows))
        return _in_order(seed, epoch_start, epoch, windows, positions) * self.sequence_length


@dataclass(frozen=True)
class CyclicWindows:
    """The same epochs as one endless sequence: batches are always full and go on where the last one stopped.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch; may exceed the number of windows.
    """

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """The fewest batches in which every window occurs."""
        windows = _whole_windows(snapshot, self.sequence_length, at_least=1)
        return -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> npt.NDArray[np.int64]:
        """See ``Sampler.starts``."""
        windows = snapshot.num_rows // self.sequence_length
        first = (index - epoch_start) * self.batch_size
        epochs, positions = np.divmod(first + np.arange(self.batch_size), windows)
        parts = [
            _in_order(seed, epoch_start, epoch, windows, positions[epochs == epoch])
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return np.concatenate(parts) * self.sequence_length


def window_sampler(sampling: str, *, sequence_length: int, batch_size: int, drop_last: bool = True) -> Sampler:
    """The sampler of a name: "random", "last", "sequential" or "batch".

    Raises:
        ConfigError: An unknown name.
    """
    samplers: dict[str, Sampler] = {
        "random": RandomWindows(sequence_length, batch_size),
        "last": LastWindows(sequence_length, batch_size),
        "sequential": SequentialWindows(sequence_length, batch_size, drop_last),
        "batch": CyclicWindows(sequence_length, batch_size),
    }
    if sampling not in samplers:
        raise ConfigError(f"sampling: expected one of {list(samplers)} or a Sampler, found {sampling!r}")
    return samplers[sampling]


def _whole_windows(snapshot: Snapshot, length: int, *, at_least: int) -> int:
    windows = snapshot.num_rows // length
    if windows < at_least:
        raise ConfigError(
            f"sampling: expected at least {at_least} windows of {length} steps ({at_least * length} rows), "
            f"found {snapshot.num_rows} rows"
        )
    return windows


def _in_order(
    seed: int, epoch_start: int, epoch: int, windows: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The windows at ascending ``positions`` of an epoch's order."""
    first, last = int(positions[0]) // _ORDER_BLOCK, int(positions[-1]) // _ORDER_BLOCK
    blocks = [_order_block(seed, epoch_start, epoch, windows, block) for block in range(first, last + 1)]
    return np.concatenate(blocks)[positions - first * _ORDER_BLOCK]


@lru_cache(maxsize=16)
def _order_block(seed: int, epoch_start: int, epoch: int, windows: int, block: int) -> npt.NDArray[np.int64]:
    order = _order(seed, epoch_start, epoch, windows)
    return order(np.arange(block * _ORDER_BLOCK, min((block + 1) * _ORDER_BLOCK, windows)))


@lru_cache(maxsize=4)
def _order(seed: int, epoch_start: int, epoch: int, windows: int) -> Order:
    return Order(Key(seed, Purpose.EPOCH, epoch_start, call=epoch), windows)
