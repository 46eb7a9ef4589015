"""Slices of episodes: counted while rows are written, found by binary search.

The slices of one environment are numbered by the row at which each comes into being: that is its last row, or, for the
first slice of an episode where short ones are padded, the episode's first row, for it is there from then on. So the
number of slices before a row never changes, and slice k comes into being with the last row before which there are k.
Those of which a ring has overwritten a row are before what lies S - 1 rows behind the oldest, if its episode goes on
until there. Where short episodes are padded it may have one slice beside those that are counted behind: one that begins
with the oldest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mouse_core.nested import FieldKey
from mouse_core.replay import Slices
from mouse_core.replay.samplers.episodes import EpisodeFields
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
    """Limits of the drawable slices by environment, int64 ``[E]`` each, tensors or arrays.

    Attributes:
        head: The row, counted from the oldest, from which on slices come into being; of those that lie side by side,
            the first behind the oldest episode.
        of_head: How many slices there are that came into being before.
        before: How many slices are counted before that row.
        ends: How many slices there are up to the end of each environment, in all.
        first: The first row, counted from the oldest, at which a slice of its episode may begin.
    """

    head: Any
    of_head: Any
    before: Any
    ends: Any
    first: Any


class Episodes(torch.nn.Module):
    """Episode numbers of each row, in which a binary search finds a slice.

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
    """How many slices there are before a row in its environment, int64 ``[T, E]``."""
    numbers: torch.Tensor
    """How many episodes there are up to a row, itself included, int64 ``[T, E]``."""
    phases: torch.Tensor
    """How many steps behind one at which slices may begin a row lies, int64 ``[T, E]``; no rows: not needed."""
    made: torch.Tensor
    """How many slices there are in all, int64 ``[E]``."""
    begun: torch.Tensor
    """How many episodes there are in all, int64 ``[E]``."""
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
        marks: EpisodeFields,
        ids: torch.dtype | None,
        *,
        tiled: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.slices, self.marks, self.tiled = slices, marks, tiled
        self.every = slices.sequence_length if tiled else slices.period
        self.has_ids = ids is not None
        self.is_phased = slices.pad is not False and not tiled and self.every > 1
        for name, rows in (("windows", steps), ("numbers", steps), ("phases", steps * self.is_phased)):
            self.register_buffer(name, torch.zeros((rows, num_envs), dtype=torch.int64, device=device))
        for name in ("made", "begun", "position"):
            self.register_buffer(name, torch.zeros(num_envs, dtype=torch.int64, device=device))
        self.register_buffer("ended", torch.ones(num_envs, dtype=torch.bool, device=device))
        if ids is not None:
            self.register_buffer("last_id", torch.zeros(num_envs, dtype=ids, device=device))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Refuse what counted slices up to each row, itself included, also where not all has to be there."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if f"{prefix}windows" in state_dict and f"{prefix}made" not in state_dict:
            rest[-1].append(
                f"expected {prefix}made, found the state of a release that counted slices in another way; there dumps "
                "makes a file of it that loads reads here"
            )

    def extend(self, fields: Mapping[FieldKey, torch.Tensor], places: torch.Tensor, cursor: torch.Tensor) -> None:
        """Take note of more time steps, which are written to some places from the cursor on."""
        num_envs, count = self.windows.shape[1], len(places)
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
        # Of slices of 4 steps with a period of 3 those come into being at the positions 3, 6, 9, ...
        position = self._kept(position)
        due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
        if padded:
            # What is left at an episode's end is a slice, too, where they lie side by side.
            due = position % length == 0 if self.tiled else new | (due & (position >= length))
        made, begun = self.made + due.cumsum(0), self.begun + new.cumsum(0)
        self.windows.index_copy_(0, places, made - due.to(torch.int64))
        self.numbers.index_copy_(0, places, begun)
        if self.is_phased:
            self.phases.index_copy_(0, places, position % every)
        self.made.copy_(made[-1])
        self.begun.copy_(begun[-1])
        self.position.copy_(position[-1])
        self.ended.copy_(ends[-1])
        if ids is not None:
            self.last_id.copy_(ids[-1])

    def _kept(self, position: torch.Tensor) -> torch.Tensor:
        """Places in episodes, without periods that tell nothing: of slices of 4 with a period of 3, 9 is kept as 6."""
        length, every = self.slices.sequence_length, self.every
        return torch.where(position < length, position, length + (position - length) % every)

    def cut_off(self, lost: torch.Tensor, fields: Mapping[FieldKey, torch.Tensor]) -> None:
        """The rows that come first, fields ``[n, ...]``, lie so many steps behind those of their episodes, ``[E]``."""
        self.position.copy_(self._kept(lost - 1))
        self.ended.copy_(lost == 0)
        self.begun.copy_(lost > 0)
        if self.marks.ids is not None:
            self.last_id.copy_(fields[self.marks.ids].reshape(-1, len(lost))[0])

    def reading(self, ring: Ring) -> Reading:
        """Return the episode numbers as arrays or tensors, as the ring holds them."""
        known = (self.windows, self.numbers, self.made, self.phases)
        return Reading(ring, *(counts.numpy() for counts in known)) if ring.is_seen else Reading(ring, *known)

    def table(self, at: Reading) -> Table:
        """Return the limits of the drawable slices."""
        ring, length, every = at.ring, self.slices.sequence_length, self.every
        envs = ring.range(self.windows.shape[1])
        none, padded = envs * 0, self.slices.pad is not False
        if not (self.tiled or padded):
            end = none + ring.size
        else:
            most = ring.steps if self.tiled else length - 1 + every
            end = at.beyond(at.numbers, envs, at(at.numbers, none, envs), none, most)
        head = end if self.tiled else end.clip(max=length - 1)
        before, of_head, first = at.before(head, envs), none, none
        if self.is_phased:
            first = -at(at.phases, none, envs) % every
        if self.tiled:
            of_head = (end + length - 1) // length if padded else end // length
        elif padded:
            # If one counts there, the next before it would begin with ``first``.
            counted = before != at.before(end.clip(max=length - 1 + every), envs)
            of_head = none + (~counted & (first < end) & (ring.size > 0))
        return Table(head, of_head, before, (of_head + at.made - before).cumsum(0), first)

    def find(self, at: Reading, found: Table, ranks: Any) -> Windows:
        """The slices of these numbers among all there are, int64 ``[B]``, environment by environment."""
        length, env, before, of_head = self.slices.sequence_length, ranks * 0, found.before, found.of_head
        head, first = found.head, found.first
        if len(found.ends) > 1:
            # Where there is none at all the last environment stands for the one that has it.
            env = at.searchsorted(found.ends, ranks, side="right").clip(max=len(found.ends) - 1)
            ranks = ranks - at.where(env > 0, found.ends.take((env - 1).clip(min=0)), 0)
            head, of_head, before, first = (part.take(env) for part in (head, of_head, before, first))
        beside = self.tiled or self.slices.pad is not False
        later = ranks - of_head if beside else ranks
        sought = later.clip(min=0) if beside else ranks
        row = at.beyond(at.windows, env, sought + before, head + 1, at.ring.steps) - 1
        start = row - (length - 1)
        if self.tiled and self.slices.pad is not False:
            start = row
        elif self.slices.pad is not False:
            start = at.where(at(at.numbers, row, env) != at(at.numbers, row - 1, env), row, start)
        if beside:
            start = at.where(later < 0, ranks * self.every if self.tiled else first, start)
        return Windows(env, start)

    def lengths(self, at: Reading, windows: Windows, mine: Any) -> Any:
        """Steps in each slice, int64 ``[B]``: S, or fewer if its episode ends earlier.

        Args:
            at: What is known.
            windows: The slices.
            mine: What is counted in ``numbers`` where each begins.
        """
        most = self.slices.sequence_length
        end = at.beyond(at.numbers, windows.env, mine, windows.start + 1, most - 1)
        return (end - windows.start).clip(max=most)
