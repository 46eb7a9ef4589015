"""Which slices there are: counted as rows come in, and found by binary searches.

The slices of one environment are numbered by the row at which each comes into being: that is its last row, or, for the
first slice of an episode where short ones are padded, the episode's first row, for it is there from then on. So the
number of slices up to a row never changes, and slice k is the first row up to which there are k + 1. What a ring has
overwritten is taken off at sampling: of the oldest episode alone, as the others are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mouse_core.nested import FieldKey
from mouse_core.replay import Slices
from mouse_core.replay.device.options import Marks

_PARTS = 32


class Windows(NamedTuple):
    """Slices that were found, int64 ``[B]`` each.

    Attributes:
        env: Their environments.
        start: Their first rows, counted from the oldest there is.
    """

    env: torch.Tensor
    start: torch.Tensor


class Table(NamedTuple):
    """What there is to choose from, int64 ``[E]`` each.

    Attributes:
        head: The row from which on slices are looked for, counted from the oldest: the first behind the oldest
            episode; where slices begin wherever there are rows enough, the first in which one may come into being.
        of_head: How many slices of the oldest episode lie before; 0 where slices begin wherever there are rows enough.
        before: How many slices are counted before that row.
        ends: How many slices there are up to the end of each environment, in all.
    """

    head: torch.Tensor
    of_head: torch.Tensor
    before: torch.Tensor
    ends: torch.Tensor


class Ring(NamedTuple):
    """Where in the ring the rows are.

    Attributes:
        cursor: The time step that is written next, int64 ``[]``.
        size: Time steps there are, int64 ``[]``.
        oldest: The time step of the oldest, less ``steps`` where the ring went round, int64 ``[]``.
        steps: How many fit.
    """

    cursor: torch.Tensor
    size: torch.Tensor
    oldest: torch.Tensor
    steps: int

    def slots(self, row: torch.Tensor) -> torch.Tensor:
        """The time steps of rows counted from the oldest, which may be -1."""
        return (row + self.oldest) % self.steps


class Episodes(torch.nn.Module):
    """What is known of episodes, numbers of each row, so that a slice is found by a binary search.

    Args:
        steps: Time steps that the ring holds, T.
        num_envs: Environments, E.
        slices: What a slice is.
        marks: Which fields say where episodes end.
        ids: The dtype of the numbers of trajectories, or None.
        tiled: Whether slices lie side by side, from an episode's first step that is there on.
        device: Where it all lies.
    """

    windows: torch.Tensor
    """How many slices there are up to a row in its environment, int64 ``[T, E]``."""
    numbers: torch.Tensor
    """How many episodes there are up to a row, itself included, int64 ``[T, E]``."""
    position: torch.Tensor
    """Of the newest row in its episode, int64 ``[E]``; behind S, less as many periods as leave at least S."""
    ended: torch.Tensor
    """Whether the newest row ended its episode, bool ``[E]``."""
    last_id: torch.Tensor
    """The newest row's number of a trajectory ``[E]``, where there are such."""

    def __init__(
        self,
        steps: int,
        num_envs: int,
        slices: Slices,
        marks: Marks,
        ids: torch.dtype | None,
        *,
        tiled: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.slices, self.marks, self.tiled = slices, marks, tiled
        self.every = slices.sequence_length if tiled else slices.period
        self.has_ids = ids is not None
        # Whether slices begin wherever there are rows enough, so that it does not matter where the oldest episode did.
        self.slides = slices.pad is False and self.every == 1
        for name in ("windows", "numbers"):
            self.register_buffer(name, torch.zeros((steps, num_envs), dtype=torch.int64, device=device))
        self.register_buffer("position", torch.zeros(num_envs, dtype=torch.int64, device=device))
        self.register_buffer("ended", torch.ones(num_envs, dtype=torch.bool, device=device))
        if ids is not None:
            self.register_buffer("last_id", torch.zeros(num_envs, dtype=ids, device=device))

    def extend(self, fields: Mapping[FieldKey, torch.Tensor], places: torch.Tensor, cursor: torch.Tensor) -> None:
        """Take note of more time steps, which are written to some places from the cursor on."""
        steps, num_envs = self.windows.shape
        count = len(places)
        length, every, padded = self.slices.sequence_length, self.every, self.slices.pad is not False
        ends = torch.zeros((count, num_envs), dtype=torch.bool, device=cursor.device)
        for key in self.marks.ends:
            ends = ends | (fields[key].reshape(count, num_envs) != 0)
        new = torch.cat([self.ended[None], ends[:-1]])
        ids = None
        if self.marks.ids is not None:
            ids = fields[self.marks.ids].reshape(count, num_envs)
            new = new | (ids != torch.cat([self.last_id[None], ids[:-1]]))
        row = torch.arange(count, device=cursor.device)[:, None]
        begin = torch.where(new, row, -1).cummax(0).values
        position = torch.where(begin < 0, self.position + 1 + row, row - begin)
        # Of slices of 4 steps with a period of 3 those come into being at the positions 3, 6, 9, ..., and 9 is kept as
        # 6.
        position = torch.where(position < length, position, length + (position - length) % every)
        due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
        if padded:
            # What is left at an episode's end is a slice, too, where they lie side by side.
            due = position % length == 0 if self.tiled else new | (due & (position >= length))
        newest = ((cursor - 1) % steps).reshape(1)
        for counts, more in ((self.windows, due), (self.numbers, new)):
            counts.index_copy_(0, places, counts.index_select(0, newest) + more.cumsum(0))
        self.position.copy_(position[-1])
        self.ended.copy_(ends[-1])
        if ids is not None:
            self.last_id.copy_(ids[-1])

    def table(self, ring: Ring) -> Table:
        """What there is to choose from."""
        size, length = ring.size, self.slices.sequence_length
        envs = torch.arange(self.windows.shape[1], device=size.device)
        at = self._reader(ring)
        none = torch.zeros_like(envs)
        if self.slides:
            # Slices come into being with the row length - 1 or later, counted from the oldest.
            head = none + (length - 1)
            before = at(self.windows, head - 1, envs) if length > 1 else at(self.windows, head, envs) - 1
            there = torch.where(size >= length, at(self.windows, none + size - 1, envs) - before, 0)
            return Table(head, none, before, there.cumsum(0))
        oldest = at(self.numbers, none, envs)
        head = search(ring, lambda row: at(self.numbers, row, envs) == oldest, none, ring.steps)
        of_head = torch.where(size > 0, self._count(head), 0)
        before = at(self.windows, head - 1, envs)
        there = of_head + at(self.windows, none + size - 1, envs) - before
        return Table(head, of_head, before, there.cumsum(0))

    def _count(self, steps: torch.Tensor) -> torch.Tensor:
        """How many slices there are of an episode of so many steps, at least 1."""
        length, every = self.slices.sequence_length, self.every
        if self.slices.pad is False:
            return torch.where(steps < length, 0, (steps - length) // every + 1)
        return (steps - 1) // length + 1 if self.tiled else (steps - length).clamp(min=0) // every + 1

    def find(self, ring: Ring, found: Table, ranks: torch.Tensor) -> Windows:
        """The slices of these numbers among all there are, int64 ``[B]``, environment by environment."""
        length, at = self.slices.sequence_length, self._reader(ring)
        env = torch.zeros_like(ranks)
        if len(found.ends) > 1:
            # Where there is none at all the last environment stands for the one that has it.
            env = torch.searchsorted(found.ends, ranks, right=True).clamp(max=len(found.ends) - 1)
            ranks = ranks - torch.where(env > 0, found.ends.take((env - 1).clamp(min=0)), 0)
        later = ranks - found.of_head.take(env)
        most = later + found.before.take(env)
        row = search(ring, lambda row: at(self.windows, row, env) <= most, found.head.take(env), ring.steps)
        start = row - (length - 1)
        if self.tiled and self.slices.pad is not False:
            start = row
        elif self.slices.pad is not False:
            start = torch.where(at(self.numbers, row, env) != at(self.numbers, row - 1, env), row, start)
        if not self.slides:
            start = torch.where(later < 0, ranks * self.every, start)
        return Windows(env, start)

    def lengths(self, ring: Ring, windows: Windows) -> torch.Tensor:
        """How many of its steps each slice has, int64 ``[B]``: up to S, and fewer where its episode ends before."""
        at, most = self._reader(ring), self.slices.sequence_length
        mine = at(self.numbers, windows.start, windows.env)
        first = windows.start + 1
        end = search(ring, lambda row: at(self.numbers, row, windows.env) == mine, first, most - 1)
        return (end - windows.start).clamp(max=most)

    def numbers_at(self, ring: Ring, windows: Windows) -> torch.Tensor:
        """The numbers of the slices' episodes, no two of which are the same, int64 ``[B]``."""
        envs = self.numbers.shape[1]
        return (self._reader(ring)(self.numbers, windows.start, windows.env) - 1) * envs + windows.env

    def _reader(self, ring: Ring) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        envs = self.windows.shape[1]
        if envs == 1:
            return lambda counts, row, env: counts.take(ring.slots(row))
        return lambda counts, row, env: counts.take(ring.slots(row) * envs + env)


def search(ring: Ring, before: Callable[[Any], Any], first: torch.Tensor, most: int) -> torch.Tensor:
    """The first row from ``first`` on for which something does not hold, nor for any behind; or how many there are.

    Each round looks at 31 rows and leaves a 32nd, for what a round costs is mostly that there is one. Of 1,000 rows
    from row 0 on the first looks at the rows 31, 63, ..., and where 511 is the first of them for which it does not, the
    next looks at 480, 481, ..., 510.

    Args:
        ring: Where the rows are.
        before: Says of rows, int64 ``[31, n]``, whether it holds.
        first: Int64 ``[n]``.
        most: How many rows may have to be looked at.
    """
    stride = 1
    while stride * _PARTS <= most:
        stride *= _PARTS
    last, low = ring.size - 1, first
    while stride:
        behind = torch.arange(stride - 1, (_PARTS - 1) * stride, stride, device=first.device)
        looked = low + behind[:, None]
        below = (looked <= last) & before(torch.minimum(looked, last))
        low = torch.add(low, below.sum(0), alpha=stride)
        stride //= _PARTS
    return torch.minimum(low, ring.size)
