"""Samplers of windows: over the stream of steps, whatever episodes it is made of, or within episodes.

Windows of the stream cross the ends of episodes on purpose: a model that learns in context sees one episode lead into
the next, and ``done`` shows where.
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
    """Windows that begin anywhere in ``0..N-S``, uniformly and independently.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
    """

    name: ClassVar = "random"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return how many batches have as many steps as the snapshot."""
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
    """The final windows of the snapshot, side by side up to its end, in ascending order; every batch is the same.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch, B; the snapshot needs at least ``B * S`` rows.
    """

    name: ClassVar = "last"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """One."""
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
    """Epochs over the ``N // S`` windows that lie side by side, each epoch in a new seeded order.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
        drop_last: Whether windows that do not fill a batch at the end of an epoch are left out, or make a short batch.
    """

    name: ClassVar = "sequential"

    sequence_length: int
    batch_size: int
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
        begin, end = batch * self.batch_size, min((batch + 1) * self.batch_size, windows)
        return _ordered(seed, epoch_start, epoch, windows, begin, end) * self.sequence_length

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s | None:
        """See ``ManyStarts.starts_of_many``; None where one of the batches is short."""
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
    """The epochs of ``SequentialWindows`` as an endless sequence: each batch is full and goes on where the last ended.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch; may exceed the number of windows.
    """

    name: ClassVar = "batch"

    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """The fewest batches in which every window occurs."""
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
    """Return the windows of some rows of consecutive batches, int64 ``[batches, rows]``.

    Each epoch orders ``windows`` windows anew, of which the first ``used`` come. With epochs of 10, batches 1 and 2 of
    4 windows have places 4..9 of epoch 0 and 0..1 of epoch 1; row 2 of them has place 6 of epoch 0 and 0 of epoch 1.
    """
    stretches = cut_at_epochs(batches.start * size, len(batches) * size, used)
    if rows == slice(0, size):  # the sections serve later batches, too
        parts = [_ordered(seed, epoch_start, epoch, windows, begin, end) for epoch, begin, end in stretches]
    else:
        numbers, parts = numbers_of_rows(batches.start, len(batches), size, rows).reshape(-1), []
        for epoch, begin, end in stretches:
            places = numbers - epoch * used
            places = places[(places >= begin) & (places < end)]
            parts.append(_order(seed, epoch_start, epoch, windows)(places))
    return np.concatenate(parts).reshape(len(batches), -1)


def _ordered(seed: int, epoch_start: int, epoch: int, windows: int, begin: int, end: int) -> Int64s:
    """Windows ``begin..end - 1`` of the drawn order of an epoch."""
    return slice_sections(partial(_order_section, seed, epoch_start, epoch, windows), begin, end)


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


Weighting = Literal["step", "trajectory"]


@dataclass(frozen=True)
class Column:
    """A boundary of windows: they lie in stretches of rows in which a column has one value, over however many episodes.

    Args:
        name: The column, of single numbers or texts, or the field that reads it. Null is a value.
    """

    name: str


Boundary = Literal["stream", "episode", "task"] | Column


@dataclass(frozen=True)
class EpisodeWindows:
    """Windows that lie in one episode each; an episode shorter than a window makes one window that is filled up.

    The orders are those of the samplers without episodes, over the windows that there are: "random" draws from all of
    them, wherever they begin; "sequential", "batch", "blocks" and "last" take those that lie side by side
    from the first row of each episode on.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch.
        sampling: "random", "last", "sequential", "batch", "blocks" or ``Blocks``.
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
    sampling: str | Blocks = "random"
    weighting: Weighting = "step"
    pad: bool | float = True
    drop_last: bool = True
    _order: WindowSampler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, get_args(Weighting))
        if self.weighting != "step" and self.sampling != "random":
            raise ConfigError(f"weighting: expected 'step' with sampling {self.sampling!r}, found {self.weighting!r}")
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
        """The value of all fields in missing steps; None: they repeat the last step."""
        return None if isinstance(self.pad, bool) else self.pad

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the batches that the sampling without episodes has, over the windows that lie side by side."""
        tiles = self._windows(snapshot, tiled=True).count
        if not tiles:
            rule = self._rule(tiled=True)
            raise ConfigError(
                f"sampling: expected an episode of at least {rule.length + rule.before + rule.behind} steps, found the "
                f"longest to have {self._table(snapshot).longest()}; pad=True takes shorter ones"
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
        """See ``ManyStarts.starts_of_many``; None where batches are not all of one size."""
        draw = getattr(self._order, "starts_of_many", None)
        ranks = None if draw is None else draw(seed, first, count, self._numbers(snapshot), epoch_start, rows)
        if ranks is None:
            return None
        batches = range(first, first + count)
        return self._starts_of(snapshot, ranks.reshape(-1), seed, batches, rows.start).reshape(ranks.shape)

    def starts_to_read(
        self, seed: int, batches: range, snapshot: Snapshot, epoch_start: int, *, rows: slice, begun: int
    ) -> Stretches | None:
        """See ``ReadsBlocks.starts_to_read``; None where batches are not drawn from blocks."""
        if not isinstance(self._order, ReadsBlocks):
            return None
        numbers = self._numbers(snapshot)
        found = self._order.starts_to_read(seed, batches, numbers, epoch_start, rows=rows, begun=begun)
        return None if found is None else found._replace(starts=self._starts_of(snapshot, found.starts, seed, ()))

    def pool(self, snapshot: Snapshot) -> Any:
        """See ``BlockWindows.pool``; None where batches are not drawn from blocks."""
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
        """Return the numbers that the order draws from: of windows, or of episodes that have one."""
        view = self._windows(snapshot, tiled=self.sampling != "random")
        return self._numbered(view.count if self.weighting == "step" else view.episode_count, snapshot)

    def _numbered(self, windows: int, snapshot: Snapshot) -> Snapshot:
        return cast(Snapshot, _Numbered(windows, self.sequence_length, snapshot))

    def _starts_of(
        self, snapshot: Snapshot, ranks: Int64s, seed: int, batches: Sequence[int], begin: int = 0
    ) -> Int64s:
        """Return where the windows of these numbers begin, int64 ``[n]``, for batches of equal size.

        They are those from window ``begin`` of each batch on.
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
        """The column that has one value in all rows of a window; None: a window lies in one episode."""
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
        """Return the view after it has counted its windows, so that several threads may ask it."""
        _ = view.count, self.weighting == "trajectory" and view.episode_count
        return view


@dataclass(frozen=True)
class EpisodeAnchors(EpisodeWindows):
    """Windows of which every step has some steps of its episode before it, and some behind; ``pad`` is False.

    Args:
        before, behind: How many.
    """

    pad: bool | float = False
    before: int = 0
    behind: int = 0

    def _rule(self, *, tiled: bool) -> WindowRule:
        return WindowRule(self.sequence_length, tiled=tiled, before=self.before, behind=self.behind)


@dataclass(frozen=True)
class StretchWindows(EpisodeWindows):
    """Windows that lie in one stretch of rows each, in which a column has one value; otherwise as within episodes.

    Args:
        column: Its name; "" for the task.
    """

    column: str = ""

    @property
    def _stretch(self) -> str:
        return self.column


@dataclass(frozen=True)
class TransitionWindows(EpisodeWindows):
    """Windows of S transitions that follow each other in one episode; otherwise as within episodes.

    A window begins at a row of which there is a transition: with alignment "arrived" any but the last of its episode,
    with "outgoing" also the last one if it is terminal, as otherwise the observation that it led to is missing.
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
    """Return the episodes in transitions, which are numbered on, and the rows without a transition, ascending.

    Of rows 0 1 2 and 3 4 5 of two episodes, rows 2 and 5 have none. So rows 0 1 and 3 4 are transitions 0 1 and 2 3, of
    episodes that begin at 0 and 2. Transition 2 lies behind one row without, in row 2 + 1.

    Raises:
        ConfigError: There is no transition.
    """

    def find() -> tuple[EpisodeIndex, Int64s]:
        begins = snapshot.episode_starts
        without = np.append(begins[1:], snapshot.num_rows) - 1
        if snapshot.alignment == "outgoing":
            without = without[~np.isin(snapshot.stored("done", without), terminal_codes(snapshot.config))]
        count = snapshot.num_rows - len(without)
        if not count:
            raise ConfigError(f"transitions: expected some among {snapshot.num_rows} rows, found none")
        numbers = np.unique(begins - np.searchsorted(without, begins))
        return EpisodeIndex.of_begins(numbers[numbers < count], count), without

    return remembered(snapshot, "transitions", find)


def terminal_codes(config: SnapshotConfig) -> tuple[int, ...]:
    """Return the codes of ``done`` that end an episode for good."""
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
    """The sampler of a name, for the stream of steps or within episodes, or the one given; see ``BatchSource``.

    Raises:
        ConfigError: An unknown name, or options that do not go with the sampling.
    """
    if not isinstance(sampling, str | Blocks):
        if not isinstance(sampling, WindowSampler):
            raise ConfigError(f"sampling: expected a name or a WindowSampler, found {sampling!r}")
        if (boundary, weighting, pad) != ("stream", "step", None):
            raise ConfigError(
                f"boundary, weighting, pad: expected them with the name of a sampling, found {sampling!r}"
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
        raise ConfigError(f"boundary: expected 'episode' with {', '.join(options)}, found {boundary!r}")
    return window_sampler(sampling, sequence_length=length, batch_size=size, drop_last=drop_last)


SAMPLERS: dict[str, type] = {
    kind.name: kind for kind in (RandomWindows, LastWindows, SequentialWindows, CyclicWindows, BlockWindows)
}
"""The samplers that have a name, by name."""


def window_sampler(
    sampling: str | Blocks, *, sequence_length: int, batch_size: int, drop_last: bool = True
) -> WindowSampler:
    """Return the sampler of a name in ``SAMPLERS``, or of ``Blocks``.

    Raises:
        ConfigError: An unknown name.
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
    """Stands for a snapshot whose rows are numbered windows, so that a sampler of rows draws windows.

    Args:
        num_rows: How many.
        window_rows: Rows of each, at most.
        rows_of: Whose rows these are.
    """

    num_rows: int
    window_rows: int
    rows_of: Snapshot
