"""Samplers of windows. Windows either lie anywhere in the stream of steps or lie within one episode each.

Windows of the stream may cross the ends of episodes. This is intended: a model that learns in context sees the
transition from one episode to the next, and the field ``done`` marks the end of each episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import EpisodeIndex, WindowRule, WindowView
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Order, Purpose, as_integers
from mouse_core.sampling.blocks import BlockWindows
from mouse_core.sampling.plan import (
    SECTION,
    Blocks,
    ManyStarts,
    PaddedSampler,
    ReadsBlocks,
    Sampling,
    Stretches,
    WindowSampler,
    cut_at_epochs,
    numbers_of_rows,
    read_only,
    remembered,
    slice_sections,
    whole_windows,
)
from mouse_core.spec import check_choice, check_count, codes_called
from mouse_core.store.fields import SnapshotConfig
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RandomWindows(ManyStarts):
    """Samples windows with independent, uniformly distributed starts in ``0..N-S``.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch.
    """

    name: ClassVar = "random"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of batches that together contain about as many steps as the snapshot."""
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
class LastWindows(ManyStarts):
    """Samples the last ``B`` windows of the snapshot, without overlap, in ascending order; all batches are equal.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch, B; the snapshot needs at least ``B * S`` rows.
    """

    name: ClassVar = "last"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return 1, because all batches are equal."""
        whole_windows(snapshot, self.sequence_length, at_least=self.batch_size)
        return 1

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        first_row = snapshot.num_rows - self.batch_size * self.sequence_length
        return np.tile(first_row + self.sequence_length * np.arange(rows.start, rows.stop), (count, 1))


@dataclass(frozen=True)
class SequentialWindows(ManyStarts):
    """Samples the ``N // S`` windows without overlap once per epoch, in a new random order for each epoch.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch.
        drop_last: Whether the last windows of an epoch are dropped if these windows do not fill a batch; otherwise, the
            last batch of the epoch is short.
    """

    name: ClassVar = "sequential"

    sequence_length: int
    batch_size: int
    drop_last: bool = True

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of full batches in an epoch, plus 1 if a short last batch is delivered."""
        at_least = self.batch_size if self.drop_last else 1
        windows = whole_windows(snapshot, self.sequence_length, at_least=at_least)
        return windows // self.batch_size if self.drop_last else -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        windows = snapshot.num_rows // self.sequence_length
        epoch, batch = divmod(index - epoch_start, self.batches_per_epoch(snapshot))
        begin, end = batch * self.batch_size, min((batch + 1) * self.batch_size, windows)
        return _ordered(seed, epoch_start, epoch, windows, begin, end) * self.sequence_length

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``; the result is None if one of the batches is short."""
        windows, each = snapshot.num_rows // self.sequence_length, self.batches_per_epoch(snapshot)
        epoch, batch = divmod(first - epoch_start, each)
        full = windows // self.batch_size
        if each > full and batch + count > full:
            return None
        batches, used = range(epoch * full + batch, epoch * full + batch + count), full * self.batch_size
        drawn = _in_order(seed, epoch_start, windows, used, batches, self.batch_size, rows)
        return drawn * self.sequence_length


@dataclass(frozen=True)
class CyclicWindows(ManyStarts):
    """Samples the epochs of ``SequentialWindows`` as an endless sequence: batches are full and may span two epochs.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch; may exceed the number of windows in an epoch.
    """

    name: ClassVar = "batch"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the smallest number of consecutive batches that together contain every window."""
        windows = whole_windows(snapshot, self.sequence_length, at_least=1)
        return -(-windows // self.batch_size)

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        windows, begin = snapshot.num_rows // self.sequence_length, first - epoch_start
        batches = range(begin, begin + count)
        drawn = _in_order(seed, epoch_start, windows, windows, batches, self.batch_size, rows)
        return drawn * self.sequence_length


def _in_order(seed: int, epoch_start: int, windows: int, used: int, batches: range, size: int, rows: slice) -> Int64s:
    """Return the windows at the positions ``rows`` of each of several consecutive batches, int64 ``[batches, rows]``.

    In each epoch, ``windows`` windows are ordered at random, and the first ``used`` windows of this order are
    delivered. Example: with epochs of 10 windows and batches of 4 windows, the batches 1 and 2 have the positions 4..9
    of epoch 0 and 0..1 of epoch 1. So the window at position 2 of these batches has position 6 of epoch 0 and position
    0 of epoch 1.
    """
    stretches = cut_at_epochs(batches.start * size, len(batches) * size, used)
    if rows == slice(0, size):  # sections are cached for later batches
        parts = [_ordered(seed, epoch_start, epoch, windows, begin, end) for epoch, begin, end in stretches]
    else:
        numbers, parts = numbers_of_rows(batches.start, len(batches), size, rows).reshape(-1), []
        for epoch, begin, end in stretches:
            places = numbers - epoch * used
            places = places[(places >= begin) & (places < end)]
            parts.append(_order(seed, epoch_start, epoch, windows)(places))
    return np.concatenate(parts).reshape(len(batches), -1)


def _ordered(seed: int, epoch_start: int, epoch: int, windows: int, begin: int, end: int) -> Int64s:
    """Return the windows ``begin .. end - 1`` of the random order of an epoch."""
    return slice_sections(partial(_order_section, seed, epoch_start, epoch, windows), begin, end)


# Caches of pure functions: many batches use a section, and computing a section takes little longer than computing one
# element.


@lru_cache(maxsize=16)
def _random_section(seed: int, section: int) -> npt.NDArray[np.float64]:
    # The range of starts changes with every appended row; the random numbers do not.
    return read_only(Key(seed, Purpose.WINDOWS, section).uniform(SECTION))


def _random_numbers(seed: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """Return the random numbers at the positions ``begin .. end - 1`` of the sequence whose sections
    ``_random_section`` returns."""
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


Weighting = Literal["step", "trajectory"]


@dataclass(frozen=True)
class Column:
    """A boundary of windows: all rows of a window have the same value in a column. A window may contain several
    episodes.

    Args:
        name: The name of a column of numbers or texts, or the name of the field that reads the column. Null counts as a
            value.
    """

    name: str


Boundary = Literal["stream", "episode", "task"] | Column


@dataclass(frozen=True)
class EpisodeWindows:
    """Samples windows, each of which lies in one episode; an episode shorter than a window is one padded window.

    The random orders of windows are the same as in the samplers over the stream. With "random", a window can begin at
    every possible row; with "sequential", "batch", "blocks" and "last", windows follow one another without overlap,
    from the first row of each episode on.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch.
        sampling: A name in ``SAMPLERS``, or ``Blocks``.
        weighting: Only for the sampling "random". "step": every window is equally likely, so long episodes are more
            frequent. "trajectory": every episode with a window is equally likely.
        pad: Whether windows may be padded: the window of a short episode and, for windows without overlap, the last
            window of each episode. With False, such windows are not drawn. With True, copies of the last row replace
            missing steps; a number is the value of all fields in missing steps.
        drop_last: Only for the sampling "sequential"; see ``SequentialWindows``.

    Raises:
        ConfigError: The sampling or the weighting is unknown, or the sampling does not support the weighting.
    """

    sequence_length: int
    batch_size: int
    sampling: str | Blocks = "random"
    weighting: Weighting = "step"
    pad: bool | float = True
    drop_last: bool = True
    _order: WindowSampler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, get_args(Weighting))
        if self.weighting != "step" and self.sampling != "random":
            raise ConfigError(f"weighting: with sampling {self.sampling!r}, expected 'step', found {self.weighting!r}")
        if not isinstance(self.pad, bool | int | float | np.number):
            raise ConfigError(f"pad: expected True, False or a number, found {self.pad!r}")
        order = window_sampler(self.sampling, sequence_length=1, batch_size=self.batch_size, drop_last=self.drop_last)
        object.__setattr__(self, "_order", order)

    @property
    def name(self) -> str:
        """The name of the sampling."""
        return self.sampling if isinstance(self.sampling, str) else BlockWindows.name

    @property
    def fill(self) -> float | None:
        """The value of all fields in missing steps; None: copies of the last step."""
        return None if isinstance(self.pad, bool) else self.pad

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the number of batches of an epoch over the windows of the episodes."""
        tiles = self._windows(snapshot, tiled=True).count
        if not tiles:
            rule = self._rule(tiled=True)
            raise ConfigError(
                f"sampling: expected an episode of at least {rule.length + rule.before + rule.behind} steps, found "
                f"episodes of at most {self._table(snapshot).longest()} steps; pad=True accepts shorter episodes"
            )
        try:
            return self._order.batches_per_epoch(self._numbered(tiles, snapshot))
        except ConfigError as error:
            wanted = f"at least {self.batch_size} windows of {self.sequence_length} steps within episodes"
            raise ConfigError(f"sampling: expected {wanted}, found {tiles}") from error

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        ranks = self._order.starts(seed, index, self._numbers(snapshot), epoch_start)
        return self._starts_of(snapshot, ranks, seed, [index])

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``; the result is None if batches differ in size."""
        draw = getattr(self._order, "starts_of_many", None)
        ranks = None if draw is None else draw(seed, first, count, self._numbers(snapshot), epoch_start, rows)
        if ranks is None:
            return None
        batches = range(first, first + count)
        return self._starts_of(snapshot, ranks.reshape(-1), seed, batches, rows.start).reshape(ranks.shape)

    def starts_to_read(
        self, seed: int, batches: range, snapshot: Snapshot, epoch_start: int, *, rows: slice, begun: int
    ) -> Stretches | None:
        """See ``ReadsBlocks.starts_to_read``; the result is None if the sampling is not "blocks"."""
        if not isinstance(self._order, ReadsBlocks):
            return None
        numbers = self._numbers(snapshot)
        found = self._order.starts_to_read(seed, batches, numbers, epoch_start, rows=rows, begun=begun)
        return None if found is None else found._replace(starts=self._starts_of(snapshot, found.starts, seed, ()))

    def pool(self, snapshot: Snapshot) -> Any:
        """See ``BlockWindows.pool``; the result is None if the sampling is not "blocks"."""
        pool = getattr(self._order, "pool", None)
        return None if pool is None else pool(self._numbers(snapshot))

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        if self.pad is False:
            return np.full(len(starts), self.sequence_length)
        _, ends, _ = self._table(snapshot).episode_of(starts)
        lengths: Int64s = np.minimum(ends - starts, self.sequence_length)
        return lengths

    def _numbers(self, snapshot: Snapshot) -> Snapshot:
        """Return a substitute for the snapshot in which each row represents a window or an episode, so that samplers of
        rows draw windows or episodes.
        """
        view = self._windows(snapshot, tiled=self.sampling != "random")
        return self._numbered(view.count if self.weighting == "step" else view.episode_count, snapshot)

    def _numbered(self, windows: int, snapshot: Snapshot) -> Snapshot:
        return cast(Snapshot, _Numbered(windows, self.sequence_length, snapshot))

    def _starts_of(
        self, snapshot: Snapshot, ranks: Int64s, seed: int, batches: Sequence[int], begin: int = 0
    ) -> Int64s:
        """Return the first row of each window in ``ranks``, int64 ``[n]``, for batches of equal size.

        ``ranks`` contains the indices of the windows of several batches: of each batch, the windows from position
        ``begin`` on.
        """
        view = self._windows(snapshot, tiled=self.sampling != "random")
        if self.weighting == "step":
            return view.at(ranks).start
        each = len(ranks) // len(batches)
        uniform = [Key(seed, Purpose.WINDOWS, index, call=1).uniform(each, begin) for index in batches]
        return view.in_episodes(ranks, np.concatenate(uniform)).start

    def _windows(self, snapshot: Snapshot, *, tiled: bool) -> WindowView:
        rule = self._rule(tiled=tiled)
        return remembered(
            snapshot,
            (rule, self.weighting, self._stretch),
            lambda: self._counted(WindowView(self._table(snapshot), rule)),
        )

    @property
    def _stretch(self) -> str | None:
        """The column that has the same value in all rows of a window; None if all rows of a window are in the same
        episode instead.
        """
        return None

    def _table(self, snapshot: Snapshot) -> EpisodeIndex:
        if self._stretch is None:
            return snapshot.episodes
        key = ("stretches", self._stretch)
        return remembered(
            snapshot, key, lambda: EpisodeIndex.of_begins(snapshot.stretch_starts(key[1]), snapshot.num_rows)
        )

    def _rule(self, *, tiled: bool) -> WindowRule:
        return WindowRule(self.sequence_length, strict=self.pad is False, tiled=tiled)

    def _counted(self, view: WindowView) -> WindowView:
        """Compute the number of windows of a view now, because several threads may use the view; return the view."""
        _ = view.count, self.weighting == "trajectory" and view.episode_count
        return view


@dataclass(frozen=True)
class EpisodeAnchors(EpisodeWindows):
    """Samples windows without padding; within its episode, every step has at least ``before`` steps before it and at
    least ``behind`` steps after it.

    Args:
        before, behind: Number of rows that the episode must have before and after every step of a window.
    """

    pad: bool | float = False
    before: int = 0
    behind: int = 0

    def _rule(self, *, tiled: bool) -> WindowRule:
        return WindowRule(self.sequence_length, tiled=tiled, before=self.before, behind=self.behind)


@dataclass(frozen=True)
class StretchWindows(EpisodeWindows):
    """Samples windows whose rows have the same value in a column; otherwise like ``EpisodeWindows``.

    Args:
        column: The name of the column; "" means the column of tasks.
    """

    column: str = ""

    @property
    def _stretch(self) -> str:
        return self.column


@dataclass(frozen=True)
class TransitionWindows(EpisodeWindows):
    """Samples windows of S consecutive transitions of one episode; otherwise like ``EpisodeWindows``.

    A window begins at a row that has a transition. With alignment "arrived", every row except the last row of an
    episode has a transition. With "outgoing", the last row also has a transition if the row is terminal; otherwise the
    last row has no transition, because its next observation is missing.
    """

    def _table(self, snapshot: Snapshot) -> EpisodeIndex:
        return _transitions(snapshot)[0]

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        return super().lengths(starts - np.searchsorted(_transitions(snapshot)[1], starts), snapshot)

    def _starts_of(
        self, snapshot: Snapshot, ranks: Int64s, seed: int, batches: Sequence[int], begin: int = 0
    ) -> Int64s:
        without = _transitions(snapshot)[1]
        starts = super()._starts_of(snapshot, ranks, seed, batches, begin)
        rows: Int64s = starts + np.searchsorted(without - np.arange(len(without)), starts, side="right")
        return rows


def _transitions(snapshot: Snapshot) -> tuple[EpisodeIndex, Int64s]:
    """Return an episode index that counts transitions instead of rows, and the rows without a transition, in ascending
    order.

    Example: two episodes have the rows 0 1 2 and 3 4 5, and the rows 2 and 5 have no transition. The rows 0 1 are the
    transitions 0 1, the rows 3 4 are the transitions 2 3, and the episodes begin at the transitions 0 and 2. One row
    without a transition precedes transition 2, so transition 2 is row 2 + 1.

    Raises:
        ConfigError: No row has a transition.
    """

    def find() -> tuple[EpisodeIndex, Int64s]:
        begins = snapshot.episode_starts
        without = np.append(begins[1:], snapshot.num_rows) - 1
        if snapshot.alignment == "outgoing":
            without = without[~np.isin(snapshot.stored("done", without), terminal_codes(snapshot.config))]
        count = snapshot.num_rows - len(without)
        if not count:
            raise ConfigError(f"transitions: expected at least one transition in {snapshot.num_rows} rows, found none")
        numbers = np.unique(begins - np.searchsorted(without, begins))
        return EpisodeIndex.of_begins(numbers[numbers < count], count), without

    return remembered(snapshot, "transitions", find)


def terminal_codes(config: SnapshotConfig) -> tuple[int, ...]:
    """Return the codes of ``done`` that mark a terminal step."""
    return codes_called(config.fields["done"], "terminal") or (1,)


def sampler_of(
    sampling: Sampling,
    sequence_length: int,
    batch_size: int,
    drop_last: bool,
    boundary: Boundary,
    weighting: Weighting,
    pad: bool | float | None,
) -> WindowSampler:
    """Return the sampler for the arguments, which are described in ``BatchSource``; if ``sampling`` is a sampler,
    return it unchanged.

    Raises:
        ConfigError: The name is unknown, or the sampling does not support an option.
    """
    if not isinstance(sampling, str | Blocks):
        if not isinstance(sampling, WindowSampler):
            raise ConfigError(f"sampling: expected a name or a WindowSampler, found {sampling!r}")
        if hasattr(sampling, "lengths") and hasattr(sampling, "fill") and not isinstance(sampling, PaddedSampler):
            raise ConfigError(
                "sampling: expected a class that defines lengths and fill, because isinstance ignores __getattr__ from "
                f"Python 3.12 on, found {type(sampling).__name__}, where only __getattr__ returns lengths and fill"
            )
        if (boundary, weighting, pad) != ("stream", "step", None):
            raise ConfigError(
                f"boundary, weighting, pad: can be passed only when sampling is a name, found {sampling!r}"
            )
        return sampling
    length, size = check_count("sequence_length", sequence_length), check_count("batch_size", batch_size)
    names = ("stream", "episode", "task")
    if not isinstance(boundary, Column) and boundary not in names:
        raise ConfigError(f"boundary: expected one of {list(names)} or a Column, found {boundary!r}")
    filled = True if pad is None else pad
    if boundary == "episode":
        return EpisodeWindows(length, size, sampling, weighting, filled, drop_last)
    if boundary != "stream":
        column = boundary.name if isinstance(boundary, Column) else ""
        return StretchWindows(length, size, sampling, weighting, filled, drop_last, column=column)
    if weighting != "step" or pad is not None:
        options = [f"weighting={weighting!r}"] * (weighting != "step") + [f"pad={pad!r}"] * (pad is not None)
        raise ConfigError(f"boundary: with {', '.join(options)}, expected 'episode', found {boundary!r}")
    return window_sampler(sampling, sequence_length=length, batch_size=size, drop_last=drop_last)


SAMPLERS: dict[str, type] = {
    kind.name: kind for kind in (RandomWindows, LastWindows, SequentialWindows, CyclicWindows, BlockWindows)
}
"""The samplers of windows of the stream, by name."""


def window_sampler(
    sampling: str | Blocks, *, sequence_length: int, batch_size: int, drop_last: bool = True
) -> WindowSampler:
    """Return the sampler for a name in ``SAMPLERS``, or for ``Blocks``.

    Raises:
        ConfigError: The name is unknown.
    """
    options: dict[str, Any] = {"blocks": sampling} if isinstance(sampling, Blocks) else {}
    name = BlockWindows.name if isinstance(sampling, Blocks) else sampling
    if name not in SAMPLERS:
        raise ConfigError(f"sampling: expected one of {list(SAMPLERS)} or a WindowSampler, found {sampling!r}")
    kind: Any = SAMPLERS[name]
    options |= {"drop_last": drop_last} if kind is SequentialWindows else {}
    sampler: WindowSampler = kind(sequence_length, batch_size, **options)
    return sampler


@dataclass(frozen=True)
class _Numbered:
    """A substitute for a snapshot in which each row represents a window, so that a sampler of rows draws windows.

    Args:
        num_rows: Number of windows.
        window_rows: Largest number of rows of a window.
        rows_of: The snapshot from which the rows of windows are read.
    """

    num_rows: int
    window_rows: int
    rows_of: Snapshot
