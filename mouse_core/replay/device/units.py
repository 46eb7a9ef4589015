"""The drawable units (single rows, or slices of episodes), and the rows that a batch reads.

A write counts the slices that are completed by its rows. A draw finds a slice by a search in these counts.

The slices of one environment are numbered in the order of the rows that complete them. A slice is completed by its last
row. With padded short episodes, the first row of an episode completes the episode's first slice. With this numbering,
the number of slices before a row never changes, and slice k is completed by the last row that has k slices before it. A
slice whose first row is overwritten ends less than S - 1 rows after the oldest row. With padding, one additional slice,
which was not counted, may begin at the oldest row.

Example: with slices of 3 steps, pad=False and two episodes of 4 and 3 steps, the slices end at the rows 2, 3 and 6, so
the numbers of slices before the rows 0 to 6 are 0, 0, 0, 1, 2, 2, 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import FieldKey, flatten, map_tree
from mouse_core.replay.device.arrays import Arrays, Read, Ring, State
from mouse_core.replay.samplers.episodes import EpisodeFields
from mouse_core.spec import check_count


class RowPlan(NamedTuple):
    """The rows of a batch.

    Attributes:
        read: The slots of the rows that are gathered, ``[B]`` or ``[B, S]``.
        index: The slots that the batch returns to the caller, ``[B]`` or ``[B, S]``.
        mask: Whether each row exists, bool ``[B, S]``; None: all rows exist.
        traj_id: The trajectory number of each slice, ``[B, 1]``; None for single rows, or if ``ids`` names a field.
        ids: The field of the rows with the trajectory number of each slice.
        pad: The value of all fields where the mask is False; None: fields are unchanged.
        times: The probability of each row divided by the smallest probability of a row, float32 ``[B]``; None: all rows
            are equally likely.
        left: The number of units that can be drawn, or the sum of their weights, ``[]``. If ``left`` is smaller than
            the result of ``DeviceSampler.fewest``, the plan and the next state are invalid.
    """

    read: Any
    index: Any
    mask: Any = None
    traj_id: Any = None
    ids: FieldKey | None = None
    pad: float | None = None
    times: Any = None
    left: Any = None

    def batch(self, xp: Arrays, rows: Any, beta: Any) -> dict[str, Any]:
        """Return the batch: the fields of the gathered rows, and the fields of the plan.

        Args:
            xp: The array functions of the framework.
            rows: A tree of arrays whose first axes are the axes of ``read``.
            beta: The exponent of ``priority_weight``.
        """
        shape, added = self.index.shape, {"index": self.index}
        if self.mask is not None:
            added["mask"] = self.mask
        if self.ids is not None or self.traj_id is not None:
            traj_id = self.traj_id if self.ids is None else flatten(rows)[self.ids][:, 0].reshape(-1, 1)
            added["traj_id"] = xp.expand(traj_id, shape)
        if self.times is not None:
            weight = self.times**-beta
            added["priority_weight"] = weight if len(shape) == 1 else xp.expand(weight[:, None], shape)
        if self.pad is not None:
            rows = map_tree(lambda leaf: self._filled(xp, leaf), rows)
        batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
        return batch | {name: values for name, values in added.items() if name not in batch}

    def _filled(self, xp: Arrays, leaf: Any) -> Any:
        """Return a field ``[B, S, ...]`` with the pad where the mask is False."""
        there = self.mask.reshape(*self.mask.shape, *[1] * (leaf.ndim - 2))
        return xp.where(there, leaf, xp.full((), self.pad, leaf.dtype))


@dataclass(frozen=True)
class RowUnits:
    """Single rows as units, numbered by their slots.

    Args:
        reach: The number of rows after each drawn row that transforms read.
    """

    reach: int = 0

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return an empty state."""
        return {}

    def extend(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """Return the state unchanged."""
        return state

    def table(self, xp: Arrays, state: State, ring: Ring) -> Any:
        """Return the number of rows, ``[]``."""
        return ring.rows

    def count(self, table: Any) -> Any:
        """Return the number of rows, ``[]``."""
        return table

    def find(self, xp: Arrays, state: State, ring: Ring, table: Any, ranks: Any) -> Any:
        """Return the slots of rows; the slots equal the indices ``ranks``."""
        return ranks

    def at_slots(self, ring: Ring, slots: Any, *, whole: bool = False) -> Any:
        """Return ``slots`` unchanged, because slots identify rows."""
        return slots

    def plan(self, xp: Arrays, state: State, ring: Ring, slot: Any) -> RowPlan:
        """Return the plan that reads the rows in slots ``[B]``, and the following rows that transforms need."""
        if not self.reach:
            return RowPlan(slot, slot)
        # The newest row of a stream is repeated in place of rows behind it.
        step, env = ring.split(slot)
        age = ((ring.cursor - 1 - step) % ring.steps)[:, None]
        behind = xp.range(self.reach + 1)
        read = ring.slots_of((step[:, None] + xp.minimum(behind, age)) % ring.steps, env[:, None])
        return RowPlan(read, slot, behind <= age)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of consecutive rows of one episode, like the slices of ``mouse_core.replay.SliceSampler``.

    Args:
        sequence_length: Number of steps in a slice, S.
        pad: Whether episodes shorter than a slice are drawn, padded to S steps, with a field ``mask``. True repeats the
            nearest existing step; a number is the value of all fields in missing steps. With False, short episodes are
            not drawn.
        end_key, truncated_key, traj_key: The fields that mark the ends of episodes; by default all fields of the rows
            with known names, as in ``SliceSampler``. Trajectory numbers must be integers.
        period: The number of steps between the beginnings of two successive slices of an episode. Steps are counted
            from the first step of the episode, even if that step is overwritten.

    Raises:
        ConfigError: An argument is out of range.
    """

    sequence_length: int
    pad: bool | float = True
    end_key: FieldKey | None = None
    truncated_key: FieldKey | None = None
    traj_key: FieldKey | None = None
    period: int = 1
    _fills: bool = field(init=False, repr=False)
    """Whether ``pad`` is a number. Without this field, ``Slices`` with ``pad=0`` and with ``pad=False`` would be equal,
    although the two pads need different compiled code.
    """

    def __post_init__(self) -> None:
        check_count("sequence_length", self.sequence_length)
        check_count("period", self.period)
        if not isinstance(self.pad, bool | int | float):
            raise ConfigError(f"pad: expected True, False or a number, found {self.pad!r}")
        vars(self)["_fills"] = not isinstance(self.pad, bool)


class Windows(NamedTuple):
    """The positions of slices, arrays ``[B]``.

    Attributes:
        env: The environment of each slice.
        start: The first row of each slice, counted from the oldest row.
    """

    env: Any
    start: Any


class Table(NamedTuple):
    """The limits of the drawable slices of each environment, arrays ``[E]``. Rows are numbered from the oldest.

    Attributes:
        head: The first row that completes a slice; for ``tiled`` slices, the first row after the oldest episode.
        of_head: The number of drawable slices whose completing row lies before ``head``.
        before: The number of all slices, drawable or not, whose completing row lies before ``head``.
        ends: The running total of drawable slices over environments: each environment's slices plus the slices of all
            earlier environments.
        first: The first row at which a slice can begin.
    """

    head: Any
    of_head: Any
    before: Any
    ends: Any
    first: Any


@dataclass(frozen=True)
class SliceUnits:
    """Slices of consecutive rows of one episode as units, found through an index of episodes.

    The index consists of these arrays of the state:

    - ``windows``: the number of slices before a row in its environment, ``[T, E]``;
    - ``numbers``: the number of episodes up to and including a row, ``[T, E]``;
    - ``phases``: if the period is above 1, the distance from a row back to the nearest row at which a slice can begin,
      ``[T, E]``;
    - ``made``, ``begun``: the total numbers of slices and of episodes, ``[E]``;
    - ``position``: the position of the newest row in its episode, ``[E]``; positions above S are reduced by multiples
      of the period;
    - ``ended``: whether the newest row ended its episode, ``[E]``;
    - ``last_id``: the trajectory number of the newest row, ``[E]``, if rows have trajectory numbers.

    Args:
        slices: The options of slices.
        marks: The fields that mark the ends of episodes.
        ids: The dtype of trajectory numbers, or None.
        tiled: Whether slices follow one another without overlap, from the first existing step of an episode on.
    """

    slices: Slices
    marks: EpisodeFields
    ids: Any
    tiled: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the corresponding sampler of slices on the host."""
        return {name: value for name, value in vars(self.slices).items() if name != "_fills"}

    @property
    def every(self) -> int:
        """The number of steps between the beginnings of two successive slices of an episode."""
        return self.slices.sequence_length if self.tiled else self.slices.period

    @property
    def padded(self) -> bool:
        """Whether episodes shorter than a slice have a (padded) slice."""
        return self.slices.pad is not False

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return the index of an empty ring."""
        rows, envs = (ring.steps, ring.envs), (ring.envs,)
        index = {name: xp.full(rows, 0, "count") for name in ("windows", "numbers")}
        if self.slices.period > 1:
            index["phases"] = xp.full(rows, 0, "index")
        index |= {name: xp.full(envs, 0, "count") for name in ("made", "begun")}
        index |= {"position": xp.full(envs, 0, "index"), "ended": xp.full(envs, True, "bool")}
        return index if self.ids is None else index | {"last_id": xp.full(envs, 0, self.ids)}

    def extend(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """Return the state after a write of ``count`` time steps at the cursor of the ring; ``read`` returns
        the fields of these time steps.

        The returned state is the same as if the time steps were written one by one.
        """
        length, every, shape = self.slices.sequence_length, self.every, (count, ring.envs)
        ends = xp.full(shape, False, "bool")
        for key in self.marks.ends:
            ends = ends | (one_a_row(key, read(key), shape) != 0)
        new, ids = xp.concat([state["ended"][None], ends[:-1]]), None
        if self.marks.ids is not None:
            ids = one_a_row(self.marks.ids, read(self.marks.ids), shape)
            new = new | (ids != xp.concat([state["last_id"][None], ids[:-1]]))
        row = xp.range(count)[:, None]
        begin = xp.running_max(xp.where(new, row, -1))
        position = self._reduced(xp, xp.where(begin < 0, state["position"] + 1 + row, row - begin))
        # Slices of 4 steps with a period of 3 are completed at the positions 3, 6, 9, ...
        due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
        if self.padded:
            # Slices without overlap include an incomplete slice at the end of an episode.
            due = position % length == 0 if self.tiled else new | (due & (position >= length))
        due = xp.cast(due, "count")
        made, begun = state["made"] + xp.cumsum(due), state["begun"] + xp.cumsum(xp.cast(new, "count"))
        rows = {"windows": made - due, "numbers": begun}
        if "phases" in state:
            rows["phases"] = position % every
        places = xp.places(ring.cursor, count, ring.steps)
        found = {name: xp.write(state[name], places, values) for name, values in rows.items()}
        found |= {"made": made[-1], "begun": begun[-1], "position": position[-1], "ended": ends[-1]}
        return state | found if ids is None else state | found | {"last_id": ids[-1]}

    def cut_off(self, xp: Arrays, state: State, lost: Any, first_ids: Any) -> State:
        """Return the state of an empty ring whose next rows begin in the middle of their episodes.

        Args:
            xp: The array functions of the framework.
            state: The state.
            lost: For each environment, the number of steps of its first episode that came before the first row,
                ``[E]``.
            first_ids: The trajectory numbers of the first rows, ``[E]``, or None.
        """
        ids = {} if first_ids is None else {"last_id": first_ids}
        begun, position = xp.cast(lost > 0, "count"), self._reduced(xp, lost - 1)
        return state | {"position": position, "ended": lost == 0, "begun": begun} | ids

    def _reduced(self, xp: Arrays, position: Any) -> Any:
        """Reduce positions in episodes by multiples of the period. Example: for slices of 4 steps with a period of 3,
        position 9 becomes 6.
        """
        length = self.slices.sequence_length
        return xp.where(position < length, position, length + (position - length) % self.every)

    def table(self, xp: Arrays, state: State, ring: Ring) -> Table:
        """Return the limits of the drawable slices."""
        size, length, every = ring.size, self.slices.sequence_length, self.every
        envs, windows, numbers, made = xp.range(ring.envs), state["windows"], state["numbers"], state["made"]
        none = (envs + size) * 0  # in ``jax.shard_map``, varying over shards like the size
        oldest = xp.slots(ring, none)

        def before(row: Any) -> Any:
            """Return how many slices are counted before a row; for the row after the newest row, the total number of
            slices.
            """
            return xp.where(row < size, xp.at(windows, xp.slots(ring, xp.minimum(row, size - 1)), envs), made)

        end = none + size
        if self.tiled or self.padded:
            # The first row behind the oldest episode, if it is near enough to matter.
            most = ring.steps if self.tiled else length - 1 + every
            end = xp.search(ring, numbers, envs, xp.at(numbers, oldest, envs), none, most)
        head = end if self.tiled else xp.minimum(end, none + length - 1)
        counted, of_head, first = before(head), none, none
        if "phases" in state:
            first = -xp.at(state["phases"], oldest, envs) % every
        if self.tiled:
            of_head = (end + length - 1) // length if self.padded else end // length
        elif self.padded:
            # A slice that was counted in these rows begins with ``first``; then no slice is missing.
            is_counted = counted != before(xp.minimum(end, none + length - 1 + every))
            of_head = xp.cast(~is_counted & (first < end) & (size > 0), "index")
        ends = xp.cumsum(of_head + xp.cast(made - counted, "index"))
        return Table(head, of_head, counted, ends, first)

    def count(self, table: Table) -> Any:
        """Return the number of slices, ``[]``."""
        return table.ends[-1]

    def find(self, xp: Arrays, state: State, ring: Ring, table: Table, ranks: Any) -> Windows:
        """Return the slices with the indices ``ranks``, ``[B]``; slices are counted environment by environment."""
        length, env, (head, of_head, before, ends, first) = self.slices.sequence_length, ranks * 0, table
        if ring.envs > 1:
            # Without any slice, the last environment is searched.
            env = xp.minimum(xp.searchsorted(ends, ranks), ring.envs - 1)
            ranks = ranks - xp.where(env > 0, xp.take(ends, xp.maximum(env - 1, 0)), 0)
            head, of_head, before, first = (xp.take(part, env) for part in (head, of_head, before, first))
        beside, later = self.tiled or self.padded, ranks
        if beside:
            later = ranks - of_head
        # As one array, because Inductor would repeat the sum for every row that the search reads.
        most = before + xp.cast(xp.maximum(later, 0) if beside else ranks, "count")
        row = xp.search(ring, state["windows"], env, most, head + 1 + later * 0, ring.steps) - 1
        start = row - (length - 1)
        if self.tiled and self.padded:
            start = row
        elif self.padded:
            numbers = state["numbers"]
            number, above = (xp.at(numbers, xp.slots(ring, looked), env) for looked in (row, row - 1))
            start = xp.where(number != above, row, start)
        if beside:
            start = xp.where(later < 0, ranks * self.every if self.tiled else first, start)
        return Windows(env, start)

    def at_slots(self, ring: Ring, slots: Any, *, whole: bool = False) -> Windows:
        """Return the slices that begin in the given slots.

        Args:
            ring: The ring.
            slots: The slots of the first rows of the slices.
            whole: Whether ``slots`` contains only slots at which ``find`` finds a slice.

        Raises:
            ConfigError: Slices are not padded, and ``whole`` is False, so a slice could cross the end of an episode.
        """
        if self.slices.pad is False and not whole:
            raise ConfigError(
                "sampler: at_slots: expected slices with padding, found pad=False, with which a slice can cross the "
                "end of an episode; pad slices, or draw them with units.find"
            )
        step, env = ring.split(slots)
        return Windows(env, (step - (ring.cursor - ring.size)) % ring.steps)

    def plan(self, xp: Arrays, state: State, ring: Ring, windows: Windows) -> RowPlan:
        """Return the plan that reads the rows of slices, which ``find`` or ``at_slots`` returned.

        Raises:
            ConfigError: The argument contains slots instead of slices.
        """
        if not isinstance(windows, Windows):
            raise ConfigError(
                "sampler: plan: expected slices, as units.at_slots and units.find return them, found slots of rows"
            )
        slices, marks, numbers = self.slices, self.marks, state["numbers"]
        start, env = xp.once(windows.start)[:, None], windows.env[:, None]
        row, mask = start + xp.range(slices.sequence_length), None
        if slices.pad is False:
            number = xp.at(numbers, xp.slots(ring, start), env)
        else:
            number = xp.at(numbers, xp.slots(ring, xp.minimum(row, ring.size - 1)), env)
            # The existing rows of an episode have the number of the episode.
            number, mask = number[:, :1], (number == number[:, :1]) & (row < ring.size)
            count = xp.once(xp.cast(mask.sum(-1), "index"))
            row = xp.minimum(row, start + count[:, None] - 1)
        index = ring.slots_of(xp.once(xp.slots(ring, row)), env)
        pad = None if isinstance(slices.pad, bool) else slices.pad
        if marks.numbers and marks.ids is not None:
            return RowPlan(index, index, mask, ids=marks.ids, pad=pad)
        # Numbers of one environment differ by multiples of the number of environments, so every episode has a unique
        # number.
        traj_id = xp.cast(number - 1, "index") * ring.envs + env
        return RowPlan(index, index, mask, traj_id, pad=pad)


Units = RowUnits | SliceUnits


def one_a_row(key: FieldKey, values: Any, shape: tuple[int, int]) -> Any:
    """Reshape a field with one value per row, possibly with further axes of length 1, to ``[n, E]``.

    Raises:
        SchemaError: The field has several values per row.
    """
    if prod(values.shape) != prod(shape):
        raise SchemaError(
            f"slices: {key!r}: expected one value per row, found rows of shape {list(values.shape[1:])}; store "
            "the ends of agents in a field 'agent_done'"
        )
    return values.reshape(shape)
