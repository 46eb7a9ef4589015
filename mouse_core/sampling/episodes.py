"""Windows that stay within one episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import WindowSampler
from mouse_core.sampling.windows import window_sampler
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Boundary = Literal["stream", "episode"]
Weighting = Literal["step", "trajectory"]


@dataclass(frozen=True)
class EpisodeWindows:
    """Windows that lie in one episode each; an episode shorter than a window makes one window that is filled up.

    The orders are those of the samplers without episodes, over the windows that there are: "random" draws from all of
    them, wherever they begin; "sequential", "batch" and "last" take those that lie side by side from the first row of
    each episode on.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
        sampling: "random", "last", "sequential" or "batch".
        weighting: For "random". "step": every window comes equally often, so long episodes come more often.
            "trajectory": every episode that has a window comes equally often.
        pad: Whether windows may be filled up: those of episodes that are shorter, and of windows that lie side by side
            the last one of each episode. Otherwise these are left out. True repeats the last row; a number is what all
            fields become.
        drop_last: For "sequential", as in ``SequentialWindows``.

    Raises:
        ConfigError: An unknown sampling or weighting, or a weighting that the sampling does not take.
    """

    sequence_length: int
    batch_size: int
    sampling: str = "random"
    weighting: Weighting = "step"
    pad: bool | float = True
    drop_last: bool = True
    _order: WindowSampler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ConfigError(f"weighting: expected one of {list(get_args(Weighting))}, found {self.weighting!r}")
        if self.weighting != "step" and self.sampling != "random":
            raise ConfigError(f"weighting: expected 'step' with sampling {self.sampling!r}, found {self.weighting!r}")
        if not isinstance(self.pad, bool | int | float | np.number):
            raise ConfigError(f"pad: expected True, False or a number, found {self.pad!r}")
        order = window_sampler(self.sampling, sequence_length=1, batch_size=self.batch_size, drop_last=self.drop_last)
        object.__setattr__(self, "_order", order)

    @property
    def fill(self) -> float | None:
        """What all fields become in steps that are not there; None: they repeat the last one that is."""
        return None if isinstance(self.pad, bool) else self.pad

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """As the sampling without episodes says, over the windows that lie side by side."""
        episodes = _episodes_of(snapshot)
        tiles = int(self._sums(snapshot, tiled=True)[-1])
        if not tiles:
            raise ConfigError(
                f"sampling: expected an episode of at least {self.sequence_length} steps, found the longest to have "
                f"{int(np.diff(episodes).max())}; pad=True takes shorter ones"
            )
        try:
            return self._order.batches_per_epoch(_counted(tiles))
        except ConfigError as error:
            wanted = f"at least {self.batch_size} windows of {self.sequence_length} steps within episodes"
            raise ConfigError(f"sampling: expected {wanted}, found {tiles}") from error

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        if self.weighting == "trajectory":
            return self._starts_by_episode(seed, index, snapshot, epoch_start)
        sums = self._sums(snapshot, tiled=self.sampling != "random")
        return self._at(snapshot, sums, self._order.starts(seed, index, _counted(int(sums[-1])), epoch_start))

    def starts_of_many(self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``; None where batches are not all of one size."""
        draw = getattr(self._order, "starts_of_many", None)
        ranks: Int64s | None
        if draw is None:
            return None
        if self.weighting == "trajectory":
            ranks = draw(seed, first, count, _counted(len(self._episodes_there(snapshot))), epoch_start)
            if ranks is None:
                return None
            uniform = [
                Key(seed, Purpose.WINDOWS, index, call=1).uniform(len(ranks[0]))
                for index in range(first, first + count)
            ]
            return self._in_episodes(snapshot, ranks, np.stack(uniform))
        sums = self._sums(snapshot, tiled=self.sampling != "random")
        ranks = draw(seed, first, count, _counted(int(sums[-1])), epoch_start)
        return None if ranks is None else self._at(snapshot, sums, ranks.reshape(-1)).reshape(ranks.shape)

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        if self.pad is False:
            return np.full(len(starts), self.sequence_length)
        begins = _episodes_of(snapshot)
        ends = begins[np.searchsorted(begins, starts, side="right")]
        lengths: Int64s = np.minimum(ends - starts, self.sequence_length)
        return lengths

    def _starts_by_episode(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        ranks = self._order.starts(seed, index, _counted(len(self._episodes_there(snapshot))), epoch_start)
        return self._in_episodes(snapshot, ranks, Key(seed, Purpose.WINDOWS, index, call=1).uniform(len(ranks)))

    def _episodes_there(self, snapshot: Snapshot) -> Int64s:
        """The episodes that have a window."""
        return self._known(snapshot, "there", lambda: np.nonzero(np.diff(self._sums(snapshot, tiled=False)))[0])

    def _in_episodes(self, snapshot: Snapshot, ranks: Int64s, uniform: npt.NDArray[np.float64]) -> Int64s:
        """Where windows begin, in some of the episodes that have one, by numbers in ``[0, 1)`` of the same shape."""
        sums = self._sums(snapshot, tiled=False)
        episode = self._episodes_there(snapshot)[ranks]
        counts = sums[episode + 1] - sums[episode]
        number = np.minimum((uniform * counts).astype(np.int64), counts - 1)
        starts: Int64s = _episodes_of(snapshot)[episode] + number
        return starts

    def _at(self, snapshot: Snapshot, sums: Int64s, ranks: Int64s) -> Int64s:
        """Where the windows of these ranks begin."""
        episode = np.searchsorted(sums, ranks, side="right") - 1
        number = ranks - sums[episode]
        step = 1 if self.sampling == "random" else self.sequence_length
        starts: Int64s = _episodes_of(snapshot)[episode] + number * step
        return starts

    def _sums(self, snapshot: Snapshot, *, tiled: bool) -> Int64s:
        """How many windows there are before each episode, and in all, int64 ``[episodes + 1]``."""

        def sums() -> Int64s:
            steps, length = np.diff(_episodes_of(snapshot)), self.sequence_length
            if tiled:
                counts = steps // length if self.pad is False else -(-steps // length)
            else:
                counts = np.maximum(steps - length + 1, 0 if self.pad is False else 1)
            return np.concatenate([[0], np.cumsum(counts)])

        return self._known(snapshot, f"sums{tiled}", sums)

    def _known(self, snapshot: Snapshot, name: str, compute: Any) -> Int64s:
        return _memo(snapshot, (self.sequence_length, self.pad is False, name), compute)


def sampler_of(
    sampling: str,
    *,
    sequence_length: int,
    batch_size: int,
    drop_last: bool = True,
    boundary: Boundary = "stream",
    weighting: Weighting = "step",
    pad: bool | float | None = None,
) -> WindowSampler:
    """The sampler of a name, over the stream of steps or within episodes; see ``BatchSource``.

    Raises:
        ConfigError: An unknown name, or options of windows within episodes for windows that are not.
    """
    if boundary not in get_args(Boundary):
        raise ConfigError(f"boundary: expected one of {list(get_args(Boundary))}, found {boundary!r}")
    if boundary == "episode":
        pad = True if pad is None else pad
        return EpisodeWindows(sequence_length, batch_size, sampling, weighting, pad, drop_last)
    if weighting != "step" or pad is not None:
        raise ConfigError(f"boundary: expected 'episode' with weighting={weighting!r}, pad={pad!r}, found {boundary!r}")
    return window_sampler(sampling, sequence_length=sequence_length, batch_size=batch_size, drop_last=drop_last)


# What follows from a snapshot, for as long as that exists.
_memos: WeakKeyDictionary[Snapshot, dict[Any, Int64s]] = WeakKeyDictionary()
_lock = ProcessLock()


def _memo(snapshot: Snapshot, key: Any, compute: Any) -> Int64s:
    with _lock:
        known = _memos.setdefault(snapshot, {})
    found = known.get(key)
    return known.setdefault(key, compute()) if found is None else found


def _episodes_of(snapshot: Snapshot) -> Int64s:
    """The first row of each episode, and the number of rows, int64 ``[episodes + 1]``."""
    return _memo(snapshot, "begins", lambda: np.append(snapshot.episode_starts, snapshot.num_rows))


@dataclass(frozen=True)
class _Counted:
    """So many windows, for a sampler to choose from as from rows."""

    num_rows: int


def _counted(windows: int) -> Snapshot:
    return cast(Snapshot, _Counted(windows))
