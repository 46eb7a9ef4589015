"""The windows of a mixture: which member each is of, and which of that member's own windows it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.mixtures.mix import Mix
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling import (
    CyclicWindows,
    EpisodeWindows,
    LastWindows,
    PaddedSampler,
    RandomWindows,
    SequentialWindows,
    WindowSampler,
)
from mouse_core.sampling.shares import Shares, StagedShares
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

# Of batches of so many windows some are drawn alone: that takes 500 us a batch, as drawing 2,000 does.
_MANY_WINDOWS = 2048


class Members(Protocol):
    """What a mixture's snapshot knows of its members; see ``MixtureSnapshot``."""

    members: Sequence[Snapshot]

    def shares_of(self, stage: int) -> Shares:
        """How many windows each gets in a stage."""
        ...

    @property
    def first_rows(self) -> Int64s:
        """Where each one's rows begin, and the end."""
        ...


@dataclass(frozen=True)
class MixedWindows:
    """Windows of several members, of each as many as its share says; a source of a mixture has such a sampler.

    Of all batches, one behind the other, window n is of the member that ``Shares`` says. A member's windows are counted
    from the batch at which the epoch began, and drawn by a sampler of its own, with a seed that follows from the seed,
    that batch and the member's number. Members take turns as evenly as their shares allow, so any part of a batch, as a
    shard has it, is mixed as the whole is.

    Args:
        each: How members are drawn from; all batches of it are full.
        mix: What is known of the members.
    """

    each: WindowSampler
    mix: Mix

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        return self.each.sequence_length

    @property
    def batch_size(self) -> int:
        """Windows in a batch."""
        return self.each.batch_size

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """As many as hold as many windows as the epochs of all members with a share; of "last" one."""
        mixture, windows = _members(snapshot), 0
        shares = mixture.shares_of(0)
        counts = shares.counts(self.batch_size)
        for number, member in enumerate(mixture.members):
            try:
                if member.num_rows and any(weights[number] for _, weights in self.mix.stages):
                    # Of a sampler that is not known here all there is to know is how many of its own batches.
                    sized = _sized(self.each, max(1, counts[number]) if _is_last(self.each) else 1)
                    own = member.sampled_by(sized)
                    windows += own.batches_per_epoch(member) * own.batch_size
            except ConfigError as error:
                if shares.windows[number]:  # else there may be rows when its stage has come
                    raise ConfigError(f"mixture: member {self.mix.names[number]!r}: {error}") from error
        return 1 if _is_last(self.each) else -(-windows // self.batch_size)

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        starts: Int64s = self.starts_of_many(seed, index, 1, snapshot, epoch_start, slice(0, self.batch_size))[0]
        return starts

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        mixture, size, each = _members(snapshot), self.batch_size, rows.stop - rows.start
        if _is_last(self.each):
            begins = [begin for begin, _ in self.mix.stages]
            stages = np.searchsorted(begins, np.arange(first, first + count), side="right") - 1
            there, which = np.unique(stages, return_inverse=True)
            latest = [self._drawn(mixture, mixture.shares_of(stage), seed, 0, size, 0) for stage in there.tolist()]
            return np.stack(latest)[which, rows]
        shares = StagedShares([stage * size for stage, _ in self.mix.stages], mixture.shares_of)
        begin, end = first * size, (first + count) * size
        if each == size or size < _MANY_WINDOWS:
            return self._drawn(mixture, shares, seed, begin, end, epoch_start).reshape(count, size)[:, rows]
        each_begin = range(begin + rows.start, end, size)
        return np.stack([self._drawn(mixture, shares, seed, one, one + each, epoch_start) for one in each_begin])

    def _drawn(
        self, mixture: Members, shares: Shares | StagedShares, seed: int, begin: int, end: int, epoch_start: int
    ) -> Int64s:
        """Where the windows ``begin .. end - 1`` begin.

        Of members 0, 0, 1, 0 with windows at rows 5, 9, 7 of the first and 2 of the second, which begins at row 100, it
        is 5, 9, 102, 7.
        """
        members = shares.members(begin, end)
        before, at_start = shares.counts(begin), shares.counts(epoch_start * self.batch_size)
        ends = np.cumsum(np.bincount(members, minlength=len(before))).tolist()
        places = np.argsort(members, kind="stable")
        starts = np.empty(len(members), np.int64)
        last = 0
        for number, member in enumerate(mixture.members):
            mine, last = places[last : ends[number]], ends[number]
            if len(mine):
                own_seed = int(Key(seed, Purpose.MIXTURES, epoch_start, number).bits(1)[0])
                own = before[number] - at_start[number]
                drawn = self._of_member(member, own_seed, own, own + len(mine))
                starts[mine] = drawn + mixture.first_rows[number]
        return starts

    def _of_member(self, member: Snapshot, seed: int, begin: int, end: int) -> Int64s:
        """Where a member's windows ``begin .. end - 1`` begin, among its own rows."""
        if _is_last(self.each):
            return member.sampled_by(_sized(self.each, end - begin)).starts(seed, 0, member, 0)
        own = member.sampled_by(self.each)
        size = own.batch_size
        first, count = begin // size, -(-end // size) - begin // size
        draw = getattr(own, "starts_of_many", None)
        if draw is not None and 2 * (end - begin) < size:  # few of one batch, or of two that follow each other
            bounds = [begin, *([(first + 1) * size] if count == 2 else []), end]
            parts = [
                draw(seed, low // size, 1, member, 0, slice(low % size, low % size + high - low))
                for low, high in pairwise(bounds)
            ]
            if all(part is not None for part in parts):
                joined: Int64s = np.concatenate(parts, axis=1)[0]
                return joined
        drawn = None if draw is None else draw(seed, first, count, member, 0, slice(0, size))
        if drawn is None:
            parts = [own.starts(seed, index, member, 0) for index in range(first, first + count)]
            for part in parts:
                if len(part) != size:
                    raise ConfigError(
                        f"mixture: expected a sampler of batches of {size} windows, found one of {len(part)} by {own!r}"
                    )
            drawn = np.concatenate(parts)
        starts: Int64s = drawn.reshape(-1)[begin - first * size : end - first * size]
        return starts


class PaddedMixedWindows(MixedWindows):
    """The same of windows that may have fewer steps than they are long; see ``PaddedSampler``."""

    each: PaddedSampler

    @property
    def fill(self) -> float | None:
        """What fields become in steps that are not there."""
        return self.each.fill

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """How many steps of the windows are there; see ``PaddedSampler.lengths``."""
        mixture = _members(snapshot)
        owner = np.searchsorted(mixture.first_rows, starts, side="right") - 1
        lengths = np.empty(len(starts), np.int64)
        for number in np.unique(owner).tolist():
            mine, member = owner == number, mixture.members[number]
            own: Any = member.sampled_by(self.each)
            lengths[mine] = own.lengths(starts[mine] - mixture.first_rows[number], member)
        return lengths


def mixed(sampler: WindowSampler, mix: Mix) -> WindowSampler:
    """What draws from each member of a mixture as ``sampler`` draws from a store.

    An epoch of "sequential" has no rest there, so it is drawn as "batch".
    """
    if isinstance(sampler, MixedWindows):
        return sampler
    if isinstance(sampler, SequentialWindows):
        sampler = CyclicWindows(sampler.sequence_length, sampler.batch_size)
    elif isinstance(sampler, EpisodeWindows) and sampler.sampling == "sequential":
        sampler = replace(sampler, sampling="batch")
    return PaddedMixedWindows(sampler, mix) if isinstance(sampler, PaddedSampler) else MixedWindows(sampler, mix)


def _is_last(sampler: WindowSampler) -> bool:
    """Whether every batch is the last windows, of which a member gives its share."""
    return isinstance(sampler, LastWindows) or (isinstance(sampler, EpisodeWindows) and sampler.sampling == "last")


def _sized(sampler: WindowSampler, batch_size: int) -> WindowSampler:
    """The same with batches of another size, where it is known that any will do."""
    from mouse_core.sampling import BlockWindows  # loaded where it is asked for

    if isinstance(sampler, RandomWindows | LastWindows | CyclicWindows | EpisodeWindows | BlockWindows):
        return replace(sampler, batch_size=batch_size)
    return sampler


def _members(snapshot: Any) -> Members:
    if not hasattr(snapshot, "first_rows"):
        raise ConfigError(f"sampler: expected the snapshot of a mixture, found {snapshot!r}")
    found: Members = snapshot
    return found
