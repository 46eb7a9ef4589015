"""Slices of episodes: counted while rows are written, found by a search in the counts.

The slices of one environment are numbered by the row at which each comes into being: that is its last row, or, for the
first slice of an episode where short ones are padded, the episode's first row, for it is there from then on. So the
number of slices before a row never changes, and slice k comes into being with the last row before which there are k.
Those of which a ring has overwritten a row are before what lies S - 1 rows behind the oldest, if its episode goes on
until there. Where short episodes are padded it may have one slice beside those that are counted behind: one that begins
with the oldest row.

With slices of 3 and pad=False, rows of two episodes of 4 and 3 steps have 0, 0, 0, 1, 2, 2, 2 slices before them: the
slices end at the rows 2, 3 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mouse_core.errors import SchemaError
from mouse_core.nested import FieldKey
from mouse_core.replay.device.arrays import Arrays, Ring
from mouse_core.replay.device.options import Slices
from mouse_core.replay.samplers.episodes import EpisodeFields

State = Mapping[str, Any]


class Windows(NamedTuple):
    """Slices that were found, ``[B]`` each.

    Attributes:
        env: Their environments.
        start: Their first rows, counted from the oldest.
    """

    env: Any
    start: Any


class Table(NamedTuple):
    """Limits of the drawable slices by environment, ``[E]`` each.

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


@dataclass(frozen=True)
class EpisodeIndex:
    """The rule of slices, and functions of the index that they are found in.

    The index is a dict of arrays:

    - ``windows``: how many slices there are before a row in its environment, ``[T, E]``;
    - ``numbers``: how many episodes there are up to a row, itself included, ``[T, E]``;
    - ``phases``: how many steps behind one at which slices may begin a row lies, ``[T, E]``, where that is needed;
    - ``made``, ``begun``: how many slices and episodes there are in all, ``[E]``;
    - ``position``: of the newest row in its episode, ``[E]``; behind S, less as many periods as leave at least S;
    - ``ended``: whether the newest row ended its episode, ``[E]``;
    - ``last_id``: the newest row's number of a trajectory, ``[E]``, where there are such.

    Args:
        slices: What a slice is.
        marks: Which fields say where episodes end.
        ids: The dtype of the numbers of trajectories, or None.
        tiled: Whether slices lie side by side, from an episode's first step that is there on.
    """

    slices: Slices
    marks: EpisodeFields
    ids: Any
    tiled: bool = False

    @property
    def every(self) -> int:
        """Least number of steps between the beginnings of two slices of an episode."""
        return self.slices.sequence_length if self.tiled else self.slices.period

    @property
    def padded(self) -> bool:
        """Whether shorter episodes have slices."""
        return self.slices.pad is not False

    def init(self, xp: Arrays, ring: Ring) -> dict[str, Any]:
        """The index of no rows."""
        rows, envs = (ring.steps, ring.envs), (ring.envs,)
        state = {name: xp.full(rows, 0, "count") for name in ("windows", "numbers")}
        if self.padded and not self.tiled and self.every > 1:
            state["phases"] = xp.full(rows, 0, "index")
        state |= {name: xp.full(envs, 0, "count") for name in ("made", "begun")}
        state |= {"position": xp.full(envs, 0, "index"), "ended": xp.full(envs, True, "bool")}
        return state if self.ids is None else state | {"last_id": xp.full(envs, 0, self.ids)}

    def extend(
        self, xp: Arrays, state: State, fields: Mapping[FieldKey, Any], count: int, ring: Ring
    ) -> dict[str, Any]:
        """The index after a write of ``count`` time steps of ``fields`` from the ring's cursor on.

        Time steps that are added one by one give the same as all at once.
        """
        length, every, shape = self.slices.sequence_length, self.every, (count, ring.envs)
        ends = xp.full(shape, False, "bool")
        for key in self.marks.ends:
            ends = ends | (one_a_row(key, fields[key], shape) != 0)
        new, ids = xp.concat([state["ended"][None], ends[:-1]]), None
        if self.marks.ids is not None:
            ids = one_a_row(self.marks.ids, fields[self.marks.ids], shape)
            new = new | (ids != xp.concat([state["last_id"][None], ids[:-1]]))
        row = xp.range(count)[:, None]
        begin = xp.running_max(xp.where(new, row, -1))
        position = self._kept(xp, xp.where(begin < 0, state["position"] + 1 + row, row - begin))
        # Of slices of 4 steps with a period of 3 those come into being at the positions 3, 6, 9, ...
        due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
        if self.padded:
            # What is left at an episode's end is a slice, too, where they lie side by side.
            due = position % length == 0 if self.tiled else new | (due & (position >= length))
        due = xp.cast(due, "count")
        made, begun = state["made"] + xp.cumsum(due), state["begun"] + xp.cumsum(xp.cast(new, "count"))
        rows = {"windows": made - due, "numbers": begun}
        if "phases" in state:
            rows["phases"] = position % every
        places = xp.places(ring.cursor, count, ring.steps)
        found = {name: xp.write(state[name], places, values) for name, values in rows.items()}
        found |= {"made": made[-1], "begun": begun[-1], "position": position[-1], "ended": ends[-1]}
        return found if ids is None else found | {"last_id": ids[-1]}

    def cut_off(self, xp: Arrays, state: State, lost: Any, first_ids: Any) -> dict[str, Any]:
        """The index of no rows, of which the first that come begin in the middle of their episodes.

        Args:
            xp: Functions over arrays.
            state: The index.
            lost: How many steps of their episodes lie before the first rows, ``[E]``.
            first_ids: Their numbers of trajectories, ``[E]``, or None.
        """
        ids = {} if first_ids is None else {"last_id": first_ids}
        begun, position = xp.cast(lost > 0, "count"), self._kept(xp, lost - 1)
        return {**state, "position": position, "ended": lost == 0, "begun": begun, **ids}

    def _kept(self, xp: Arrays, position: Any) -> Any:
        """Places in episodes, without periods that tell nothing: of slices of 4 with a period of 3, 9 is kept as 6."""
        length = self.slices.sequence_length
        return xp.where(position < length, position, length + (position - length) % self.every)

    def table(self, xp: Arrays, state: State, ring: Ring) -> Table:
        """Limits of the drawable slices."""
        size, length, every = ring.size, self.slices.sequence_length, self.every
        envs, windows, numbers, made = xp.range(ring.envs), state["windows"], state["numbers"], state["made"]
        none = envs * 0
        oldest = xp.slots(ring, none)

        def before(row: Any) -> Any:
            """Number of slices before a row; without a row, the total."""
            return xp.where(row < size, xp.at(windows, xp.slots(ring, xp.minimum(row, size - 1)), envs), made)

        end = none + size
        if self.tiled or self.padded:
            # The first row behind the oldest episode, if it is near enough to matter.
            most = ring.steps if self.tiled else length - 1 + every
            end = xp.search(ring, numbers, envs, xp.at(numbers, oldest, envs), xp.cast(none, "count"), none, most)
        head = end if self.tiled else xp.minimum(end, none + length - 1)
        counted, of_head, first = before(head), none, none
        if "phases" in state:
            first = -xp.at(state["phases"], oldest, envs) % every
        if self.tiled:
            of_head = (end + length - 1) // length if self.padded else end // length
        elif self.padded:
            # If one counts there, the next before it would begin with ``first``.
            is_counted = counted != before(xp.minimum(end, none + length - 1 + every))
            of_head = xp.cast(~is_counted & (first < end) & (size > 0), "index")
        ends = xp.cumsum(of_head + xp.cast(made - counted, "index"))
        return Table(head, of_head, counted, ends, first)

    def find(self, xp: Arrays, state: State, ring: Ring, table: Table, ranks: Any) -> Windows:
        """The slices of these numbers among all there are, ``[B]``, environment by environment."""
        length, env, (head, of_head, before, ends, first) = self.slices.sequence_length, ranks * 0, table
        if ring.envs > 1:
            # Where there is none at all the last environment stands for the one that has it.
            env = xp.minimum(xp.searchsorted(ends, ranks), env + ring.envs - 1)
            ranks = ranks - xp.where(env > 0, xp.take(ends, xp.maximum(env - 1, env * 0)), 0)
            head, of_head, before, first = (xp.take(part, env) for part in (head, of_head, before, first))
        beside, later = self.tiled or self.padded, ranks
        if beside:
            later = ranks - of_head
        more = xp.cast(xp.maximum(later, later * 0) if beside else ranks, "count")
        row = xp.search(ring, state["windows"], env, before, more, head + 1 + later * 0, ring.steps) - 1
        start = row - (length - 1)
        if self.tiled and self.padded:
            start = row
        elif self.padded:
            number, above = xp.one_by_one(
                lambda looked: xp.at(state["numbers"], xp.slots(ring, looked), env), (row, row - 1)
            )
            start = xp.where(number != above, row, start)
        if beside:
            start = xp.where(later < 0, ranks * self.every if self.tiled else first, start)
        return Windows(env, start)


def one_a_row(key: FieldKey, values: Any, shape: tuple[int, int]) -> Any:
    """A field of one value a row, ``[n, E]``, whatever axes of length 1 it has behind.

    Raises:
        SchemaError: It has more values a row.
    """
    size = 1
    for axis in values.shape:
        size *= axis
    if size != shape[0] * shape[1]:
        raise SchemaError(f"slices: {key!r}: expected one value a row, found rows of shape {list(values.shape[1:])}")
    return values.reshape(shape)
