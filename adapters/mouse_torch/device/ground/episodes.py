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
from mouse_torch.device.ground.reading import Reading, Ring


class Windows(NamedTuple):
    """Slices that were found, int64 ``[B]`` each, tensors or arrays.

    Attributes:
        env: Their environments.
        start: Their first rows, counted from the oldest there is.
    """

    env: Any
    start: Any


class Table(NamedTuple):
    """What there is to choose from, int64 ``[E]`` each, tensors or arrays.

    Attributes:
        head: The row from which on slices are looked for, counted from the oldest: the first behind the oldest
            episode; where slices begin wherever there are rows enough, the first in which one may come into being.
        of_head: How many slices of the oldest episode lie before; 0 where slices begin wherever there are rows enough.
        before: How many slices are counted before that row.
        ends: How many slices there are up to the end of each environment, in all.
    """

    head: Any
    of_head: Any
    before: Any
    ends: Any


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

    def reading(self, ring: Ring) -> Reading:
        """What is known, to look slices up in, of the kind that the ring is."""
        windows, numbers = self.windows, self.numbers
        return Reading(ring, windows.numpy(), numbers.numpy()) if ring.is_seen else Reading(ring, windows, numbers)

    def table(self, at: Reading) -> Table:
        """What there is to choose from."""
        size, length = at.ring.size, self.slices.sequence_length
        envs = at.ring.range(self.windows.shape[1])
        none = envs * 0
        if self.slides:
            # Slices come into being with the row length - 1 or later, counted from the oldest.
            head = none + (length - 1)
            before = at(at.windows, head - 1, envs) if length > 1 else at(at.windows, head, envs) - 1
            there = at.where(size >= length, at(at.windows, none + size - 1, envs) - before, 0)
            return Table(head, none, before, there.cumsum(0))
        head = at.beyond(at.numbers, envs, at(at.numbers, none, envs), none, at.ring.steps)
        of_head = at.where(size > 0, self._count(head, at.where), 0)
        before = at(at.windows, head - 1, envs)
        there = of_head + at(at.windows, none + size - 1, envs) - before
        return Table(head, of_head, before, there.cumsum(0))

    def _count(self, steps: Any, where: Callable[..., Any]) -> Any:
        """How many slices there are of an episode of so many steps, at least 1."""
        length, every = self.slices.sequence_length, self.every
        if self.slices.pad is False:
            return where(steps < length, 0, (steps - length) // every + 1)
        return (steps - 1) // length + 1 if self.tiled else (steps - length).clip(min=0) // every + 1

    def find(self, at: Reading, found: Table, ranks: Any) -> Windows:
        """The slices of these numbers among all there are, int64 ``[B]``, environment by environment."""
        length, env, before, of_head = self.slices.sequence_length, ranks * 0, found.before, found.of_head
        head = found.head
        if len(found.ends) > 1:
            # Where there is none at all the last environment stands for the one that has it.
            env = at.searchsorted(found.ends, ranks, side="right").clip(max=len(found.ends) - 1)
            ranks = ranks - at.where(env > 0, found.ends.take((env - 1).clip(min=0)), 0)
            head, of_head, before = (part.take(env) for part in (head, of_head, before))
        later = ranks if self.slides else ranks - of_head
        row = at.beyond(at.windows, env, later + before, head, at.ring.steps)
        start = row - (length - 1)
        if self.tiled and self.slices.pad is not False:
            start = row
        elif self.slices.pad is not False:
            start = at.where(at(at.numbers, row, env) != at(at.numbers, row - 1, env), row, start)
        if not self.slides:
            start = at.where(later < 0, ranks * self.every, start)
        return Windows(env, start)

    def lengths(self, at: Reading, windows: Windows, mine: Any) -> Any:
        """How many of its steps each slice has, int64 ``[B]``: up to S, and fewer where its episode ends before.

        Args:
            at: What is known.
            windows: The slices.
            mine: What is counted in ``numbers`` where each begins.
        """
        most = self.slices.sequence_length
        end = at.beyond(at.numbers, windows.env, mine, windows.start + 1, most - 1)
        return (end - windows.start).clip(max=most)
