"""Samplers of a device replay: pure functions from a state to the rows of a batch and the next state.

A sampler is a frozen dataclass; a compiler treats its values as constants. A sampler's state is a dict of arrays. The
torch and JAX adapters store the state, and call the functions in eager and in compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mouse_core.dtypes import kind_of
from mouse_core.errors import ConfigError, StateError
from mouse_core.randomness import Key
from mouse_core.replay.device.arrays import FAN, SHIFT, Arrays, DrawKey, Read, Ring, State
from mouse_core.replay.device.sum_tree import SumTree, touched
from mouse_core.replay.device.units import RowPlan, RowUnits, SliceUnits, Units
from mouse_core.replay.protocols import Draw, Sampler, Storage, Write
from mouse_core.replay.samplers.priorities import PrioritizedSampler, beta_at
from mouse_core.replay.samplers.rows import (
    BaseSampler,
    ConsumingSampler,
    Epochs,
    RandomSampler,
    SamplerWithoutReplacement,
    rows_in,
)
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.replay.samplers.weighing import check_priorities, powers, shape_like


@dataclass(frozen=True, kw_only=True)
class DeviceSampler:
    """A sampler that draws units uniformly with replacement; the base class of all device samplers.

    A custom sampler overrides ``draw``, and, if it has a state, ``init`` and ``settle``. A custom ``draw`` supports
    both rows and slices if it gets its units from ``units.at_slots`` or ``units.find``. ``at_slots`` takes the slots of
    rows, or of the first rows of slices; ``find`` takes the indices of units, ``0 <= index < left``.

    Args:
        units: The units that are drawn: rows or slices. A replay on a device sets ``units``.

    Raises:
        TypeError: A subclass is defined without ``draw``; it would draw uniformly.
    """

    units: Units = field(default_factory=RowUnits)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.draw is DeviceSampler.draw:
            raise TypeError(f"{cls.__name__}: expected a subclass of DeviceSampler with a method draw, found none")

    @property
    def constants(self) -> dict[str, Any]:
        """NumPy tables by name; an adapter may copy the tables to a device."""
        return {}

    order: ClassVar[str] = "random"
    """The order in which units are drawn. With any order except "random", a draw changes the state, and at least
    ``batch_size`` units must be left.
    """
    host_kind: ClassVar[type | tuple[()]] = ()
    """The class of host samplers that can continue these draws from a copied state; () if draws have no state."""

    @property
    def what(self) -> str:
        """The noun for the drawn units in error messages."""
        if isinstance(self.units, RowUnits):
            return "rows"
        length = f" of {self.units.slices.sequence_length} steps in one episode"
        return f"slices{length}" if self.order == "random" else "slices"

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return the state of an empty replay."""
        return self.units.init(xp, ring)

    def settle(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """Return the state after a write that ``units.extend`` has already counted. The call may write to the arrays of
        ``state``.

        Args:
            xp: The array functions of the framework.
            state: The state.
            read: A function that returns a field of the written time steps, ``[count, ...]`` or ``[count, E, ...]``.
            count: Number of time steps.
            ring: The ring after the write.
        """
        return state

    def left(self, xp: Arrays, state: State, ring: Ring) -> Any:
        """Return the number of units that can be drawn, ``[]``; a batch needs at least ``fewest``."""
        return self.units.count(self.units.table(xp, state, ring))

    def fewest(self, batch_size: int) -> int:
        """Return the smallest number of units with which a batch can be drawn."""
        return 1 if self.order == "random" else batch_size

    def waiting(self, xp: Arrays, state: State, ring: Ring) -> Any:
        """Return how many rows of the ring a write must not overwrite, ``[]``."""
        return xp.full((), 0, "index")

    # ------------------------------------------------------------------ to and from the host

    def host(self, beta: Any) -> Sampler:
        """Return a sampler for a host buffer with the same draws; ``beta`` is the exponent of importance weights."""
        if type(self) is not DeviceSampler:
            return HostSampler(self, beta)
        return RandomSampler() if isinstance(self.units, RowUnits) else SliceSampler(**self.units.options)

    def host_state(self, state: State, ring: Ring, sampler: Any, batch_size: int) -> dict[str, Any]:
        """Return state values with which a host sampler of class ``host_kind`` continues these draws.

        Args:
            state: The state in NumPy.
            ring: The ring, with integers as values.
            sampler: The sampler of a host buffer with the rows of the ring.
            batch_size: Number of units (rows or slices) in a batch.
        """
        return {}

    def resumed(self, state: State, ring: Ring, sampler: Any, storage: Storage) -> State:
        """Return a device state that continues the draws of a host sampler of class ``host_kind``.

        Args:
            state: The state in NumPy after the rows of the storage were written.
            ring: The ring, with integers as values.
            sampler: A sampler on the host.
            storage: The storage of the host buffer.
        """
        return state

    def loaded(self, xp: Arrays, state: State, ring: Ring, seed: Any) -> State:
        """Add the arrays that exist only in the framework to a state that was copied from NumPy."""
        return state

    # ------------------------------------------------------------------ drawing

    def draw(self, xp: Arrays, state: State, ring: Ring, key: DrawKey, size: int) -> tuple[State, RowPlan]:
        """Draw a batch of ``size`` units; return the next state and the rows of the batch."""
        table = self.units.table(xp, state, ring)
        left = self.units.count(table)
        ranks = xp.integers(xp.words(key, size), left)
        plan = self.units.plan(xp, state, ring, self.units.find(xp, state, ring, table, ranks))
        return state, plan._replace(left=left)


@dataclass(frozen=True, kw_only=True)
class EpochSampler(DeviceSampler):
    """A sampler that draws every unit once per epoch, in a random order.

    The state contains ``rows``, the number of units of the epoch, or 0 before the first epoch; ``began``, the index of
    the sample with which the epoch began; and ``drawn``, how many units were drawn in the epoch.
    """

    order: ClassVar[str] = "epochs"
    host_kind: ClassVar[type | tuple[()]] = Epochs

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return the state before the first epoch."""
        kinds = {"rows": "index", "began": "number", "drawn": "index"}
        epoch = {name: xp.full((), 0, kind) for name, kind in kinds.items()}
        return super().init(xp, ring) | epoch | xp.no_order(ring.capacity)

    def settle(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """If the units are slices, end the epoch, because a write changes the slices."""
        if isinstance(self.units, RowUnits):
            return state
        return state | {"rows": xp.full((), 0, "index")}

    def host(self, beta: Any) -> Sampler:
        """Return a sampler for a host buffer with the same draws."""
        if isinstance(self.units, RowUnits):
            return SamplerWithoutReplacement(drop_last=True)
        options = {name: value for name, value in self.units.options.items() if name != "period"}
        return SliceSamplerWithoutReplacement(**options, drop_last=True)

    def host_state(self, state: State, ring: Ring, sampler: Any, batch_size: int) -> dict[str, Any]:
        """Return state values for the sampler of a host buffer; see ``DeviceSampler``."""
        rows, began, position = (int(state[name]) for name in ("rows", "began", "drawn"))
        over = sampler.sequence_length if rows and isinstance(sampler, SliceSamplerWithoutReplacement) else rows
        ran_out = int(0 < rows < position + batch_size)
        return {"over": over, "began": began, "position": position, "ran_out": ran_out}

    def resumed(self, state: State, ring: Ring, sampler: Any, storage: Storage) -> State:
        """Return a state that continues the draws of a host buffer's sampler; see ``DeviceSampler``."""
        found = sampler.state_dict()
        rows = found["over"]
        if not rows:
            return state
        if isinstance(sampler, SliceSamplerWithoutReplacement):
            rows = self.units.count(self.units.table(Arrays(), state, ring))
        return state | {"rows": rows, "began": found["began"], "drawn": found["position"]} if rows else state

    def loaded(self, xp: Arrays, state: State, ring: Ring, seed: Any) -> State:
        """Add the random order of the current epoch to the state, and return the state."""
        key, count = DrawKey(seed, state["began"]), xp.maximum(state["rows"], 1)
        return state | xp.in_order(key, count, xp.range(1) * 0, ring.capacity, state, count > 0)[1]

    def draw(self, xp: Arrays, state: State, ring: Ring, key: DrawKey, size: int) -> tuple[State, RowPlan]:
        """Draw the next units of the epoch; if too few units are left, begin a new epoch."""
        table = self.units.table(xp, state, ring)
        units = self.units.count(table)
        begins = (units != state["rows"]) | (units - state["drawn"] < size)
        began = xp.where(begins, key.number, state["began"])
        position, count = xp.where(begins, 0, state["drawn"]), xp.maximum(units, 1)
        positions = xp.minimum(position + xp.range(size), count - 1)
        ranks, order = xp.in_order(DrawKey(key.seed, began), count, positions, ring.capacity, state, begins)
        epoch = {"rows": units, "began": began, "drawn": position + size, **order}
        plan = self.units.plan(xp, state, ring, self.units.find(xp, state, ring, table, ranks))
        return state | epoch, plan._replace(left=units)


@dataclass(frozen=True, kw_only=True)
class QueueSampler(DeviceSampler):
    """A sampler that draws every row once, the oldest first.

    The state contains ``left``, the number of rows that were not drawn yet; these rows are the newest.
    """

    order: ClassVar[str] = "queue"
    host_kind: ClassVar[type | tuple[()]] = ConsumingSampler

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return the state of an empty queue."""
        return super().init(xp, ring) | {"left": xp.full((), 0, "index")}

    def settle(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """Add the written rows to the queue."""
        return state | {"left": (state["left"] + count * ring.envs).clip(max=ring.capacity)}

    def left(self, xp: Arrays, state: State, ring: Ring) -> Any:
        """Return the number of rows that were not drawn yet."""
        return state["left"]

    waiting = left

    def host(self, beta: Any) -> Sampler:
        """Return a sampler for a host buffer with the same draws."""
        return ConsumingSampler(shuffle=False, drop_last=True)

    def host_state(self, state: State, ring: Ring, sampler: Any, batch_size: int) -> dict[str, Any]:
        """Return state values for the sampler of a host buffer; see ``DeviceSampler``."""
        left, rows = int(state["left"]), ring.rows
        age = (ring.cursor * ring.envs - 1 - np.arange(rows)) % ring.capacity
        return {"left": (age < left) * sampler.times, "ran_out": int(left < batch_size and rows > 0)}

    def resumed(self, state: State, ring: Ring, sampler: Any, storage: Storage) -> State:
        """Return a state that continues the draws of a host buffer's sampler; see ``DeviceSampler``."""
        return state | {"left": np.count_nonzero(sampler.state_dict()["left"])}

    def draw(self, xp: Arrays, state: State, ring: Ring, key: DrawKey, size: int) -> tuple[State, RowPlan]:
        """Draw the next rows; if too few rows are left, the state is unchanged."""
        left = state["left"]
        slots = ((ring.cursor * ring.envs - left) % ring.capacity + xp.range(size)) % ring.capacity
        state = state | {"left": xp.where(left >= size, left - size, left)}
        return state, self.units.plan(xp, state, ring, slots)._replace(left=left)


@dataclass(frozen=True, kw_only=True)
class ByPriority(DeviceSampler):
    """A sampler that draws units in proportion to a power of the priority of the row, or of the slice's first row.

    The state consists of the arrays of the ``SumTree``.

    Args:
        tree: The tree of weights.
    """

    tree: SumTree
    host_kind: ClassVar[type | tuple[()]] = PrioritizedSampler

    @property
    def constants(self) -> dict[str, Any]:
        """The tables of powers that ``Arrays.weights`` uses."""
        tables = powers(self.tree.alpha)
        return {name: getattr(tables, name) for name in ("factors", "shifts", "pieces")}

    @property
    def what(self) -> str:
        """The noun for the drawn units in error messages."""
        return f"{super().what} with a priority above 0"

    def init(self, xp: Arrays, ring: Ring) -> State:
        """Return a state in which all weights are 0."""
        return super().init(xp, ring) | self.tree.init(xp)

    def settle(self, xp: Arrays, state: State, read: Read, count: int, ring: Ring) -> State:
        """Give the newest time steps the largest priority, and mark the rows at which slices begin."""
        envs, steps, capacity = ring.envs, ring.steps, ring.capacity
        begin = (ring.cursor - count) % steps * envs
        slots = (begin + xp.range(count * envs)) % capacity
        state = state | {"sums": xp.scatter(state["sums"], slots, state["fresh"], unique=True)}
        if isinstance(self.units, RowUnits):
            nodes = touched(xp, begin, count * envs, capacity)
        else:
            state, nodes = self._begun(xp, self.units, state, ring, count)
        return self.tree.refresh(xp, state, nodes)

    def _begun(self, xp: Arrays, rule: SliceUnits, state: State, ring: Ring, count: int) -> tuple[State, Any]:
        """Mark the rows at which slices begin; return the state, and the changed rows of the tree's first level.

        After ``count`` new steps, slices of S steps may also begin at the S - 1 steps before the new steps. With
        padding, a slice may also begin at one of the oldest steps, and then consists of the remaining steps of its
        episode.
        """
        envs, steps, length = ring.envs, ring.steps, rule.slices.sequence_length
        env = xp.range(envs)

        def at(counts: Any, step: Any) -> Any:
            return xp.at(counts, (step % steps)[:, None], env)

        def are_whole(age: Any) -> Any:
            """Return whether a slice that begins ``age`` steps before the newest row is complete."""
            last = age - (length - 1)
            step = ring.cursor - 1 - last
            behind = xp.where((last > 0)[:, None], at(state["windows"], step + 1), state["made"])
            whole = (last >= 0)[:, None] & (behind != at(state["windows"], step))
            if rule.padded:  # the row may begin an episode instead
                whole = whole & (at(state["numbers"], step) == at(state["numbers"], ring.cursor - 1 - age))
            return whole

        number = min(count + length - 1, steps)
        age = number - 1 - xp.range(number)
        step = (ring.cursor - 1 - age) % steps
        begins = are_whole(age)
        if rule.padded:
            begins = begins | (at(state["numbers"], step - 1) != at(state["numbers"], step))
        begins = begins & (age < ring.size)[:, None]
        slots = (step[:, None] * envs + env).reshape(-1)
        nodes = touched(xp, slots[0], number * envs, ring.capacity)
        flags = xp.scatter(state["begins"], slots, begins.reshape(-1), unique=True)
        if rule.padded:
            oldest, several = (ring.cursor - ring.size) % steps, min(rule.every, steps)
            table = rule.table(xp, state, ring)
            # In a full ring, the position before the oldest row holds the newest row, which belongs to another episode.
            flags = xp.scatter(flags, oldest * envs + env, are_whole(ring.size - 1 + xp.range(1))[0])
            slots = (oldest + table.first) % steps * envs + env
            begin = env >= 0
            if rule.every > 1:
                begin = xp.at(flags, slots >> SHIFT, slots & (FAN - 1)) | (table.of_head > 0)
            flags = xp.scatter(flags, slots, begin)
            nodes = xp.concat([nodes, touched(xp, oldest * envs, several * envs, ring.capacity)])
        return state | {"begins": flags}, nodes

    def left(self, xp: Arrays, state: State, ring: Ring) -> Any:
        """Return 1 if a unit has a weight above 0, else 0."""
        return self.tree.some(xp, state)

    def host(self, beta: Any) -> Sampler:
        """Return a sampler for a host buffer with the same draws."""
        options: dict[str, Any] = {"alpha": self.tree.alpha, "beta": beta, "eps": self.tree.eps}
        if isinstance(self.units, RowUnits):
            return PrioritizedSampler(**options)
        return PrioritizedSliceSampler(**options, **self.units.options)

    def host_state(self, state: State, ring: Ring, sampler: Any, batch_size: int) -> dict[str, Any]:
        """Return state values for the sampler of a host buffer, which keeps its exponents; see ``DeviceSampler``."""
        units = state["sums"].reshape(-1)[: ring.rows].copy()
        return {"weights": units, "max_priority": float(state["largest"])}

    def resumed(self, state: State, ring: Ring, sampler: Any, storage: Storage) -> State:
        """Return a state that continues the draws of a host buffer's sampler; see ``DeviceSampler``."""
        sampler.weights_at(storage, slice(0))  # assigns weights to new rows
        found = sampler.state_dict()
        return self.tree.assign(Arrays(), state, found["weights"], found["max_priority"])

    def draw(self, xp: Arrays, state: State, ring: Ring, key: DrawKey, size: int) -> tuple[State, RowPlan]:
        """Draw units in proportion to their weights; the returned plan contains the weights of the rows."""
        slots, times, total = self.tree.draw(xp, state, key, size)
        plan = self.units.plan(xp, state, ring, self.units.at_slots(ring, slots, whole=True))
        return state, plan._replace(times=times, left=total)

    def check_update(self, slots: Any, priority: Any, rows: int) -> None:
        """Check an update of priorities; negative slots and their priorities are ignored.

        Args:
            slots, priority: NumPy arrays, ``[n]``.
            rows: The number of slots in use.

        Raises:
            DataError: A priority is negative, not finite, or too large for the capacity.
            IndexError: A slot is not in use.
        """
        check_priorities(priority[slots >= 0], self.tree.capacity, self.tree.alpha, self.tree.eps)
        if slots.size and slots.max() >= rows:
            raise IndexError(f"set_priorities: expected slots in 0..{rows - 1}, found {slots.max()}")


def priorities_of(xp: Arrays, sampler: DeviceSampler, indices: Any, priorities: Any) -> tuple[ByPriority, Any, Any]:
    """Check the arguments of ``set_priorities``; return the sampler, the slots ``[n]`` and their priorities, float32
    ``[n]``.

    Args:
        xp: The array functions of the framework.
        sampler: The sampler of a replay.
        indices: Slots, an array of any shape.
        priorities: Numbers in the shape of ``indices``, or one number for each slice.

    Raises:
        ConfigError: The sampler has no priorities, indices are not integers, or shapes do not match.
    """
    if not isinstance(sampler, ByPriority):
        raise ConfigError(
            "set_priorities: expected a replay created with priorities=, found a replay without priorities"
        )
    if kind_of(indices.dtype) not in "iu":
        raise ConfigError(f"set_priorities: expected integers as indices, found {indices.dtype}")
    values = xp.cast(priorities.reshape(shape_like(indices.shape, priorities.shape, "set_priorities")), "float")
    return sampler, xp.cast(indices.reshape(-1), "index"), xp.expand(values, indices.shape).reshape(-1)


def checked_sampler(given: Any) -> DeviceSampler:
    """Return ``given`` if it is a sampler; raise ConfigError for any other object, such as a class."""
    if not isinstance(given, DeviceSampler):
        raise ConfigError(f"sampler: expected an instance of a subclass of DeviceSampler, found {given!r:.80}")
    return given


class HostSampler(BaseSampler):
    """The sampler of a host buffer that makes the same draws as a device sampler.

    Args:
        sampler: The sampler.
        beta: The exponent of ``priority_weight``, if rows have weights.
    """

    needs_order = True
    _kinds: Mapping[str, type | str] = {"state": object}

    def __init__(self, sampler: DeviceSampler, beta: Any = 0.4) -> None:
        self.sampler, self._beta = checked_sampler(sampler), beta
        self._arrays = Arrays()
        self._capacity: int | None = None  # the capacity of the storage at the last write
        self._now: State | None = {}  # {}: the state without rows; None: the next draw reads the rows again

    def __repr__(self) -> str:
        return f"HostSampler({self.sampler})"

    def wrote(self, storage: Storage, write: Write) -> None:
        """Add written rows to the state; if rows are changed in place, mark the state as stale."""
        if write.first is None or self._now is None or self._capacity not in (None, storage.capacity):
            self._now = None  # rows were changed in place, or a larger capacity changed their slots
        else:
            self._extend(storage, write.read, write.first, len(write.slots))

    def reset(self, storage: Storage) -> None:
        """Mark the state as stale, because every row may have changed."""
        self._now = None

    def settled(self, storage: Storage) -> State:
        """Return the state for all rows of a storage."""
        if self._now is None:
            count, first = len(storage), storage.written - len(storage)
            slots = (first + np.arange(count)) % storage.capacity
            self._now = {}
            self._extend(storage, lambda key: storage.read(key, slots), first, count)
        return self._now

    def _extend(self, storage: Storage, read: Read, first: int, count: int) -> None:
        before, after = _ring(storage, first), _ring(storage, first + count)
        state, steps = self._now or self.sampler.init(self._arrays, before), count // before.envs
        state = self.sampler.units.extend(self._arrays, state, read, steps, before)
        self._now = self.sampler.settle(self._arrays, state, read, steps, after)
        self._capacity = storage.capacity

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw the rows of a batch.

        Raises:
            ConfigError: Too few units can be drawn.
        """
        rows_in(storage)
        state, ring, xp = self.settled(storage), _ring(storage, storage.written), self._arrays
        check_left(self.sampler, int(self.sampler.left(xp, state, ring)), batch_size, ring.size, "sample")
        self._now, plan = self.sampler.draw(xp, state, ring, DrawKey(key.seed, key.index), batch_size)
        extra = {}
        if plan.ids is not None or plan.traj_id is not None:
            ids = plan.traj_id if plan.ids is None else storage.read(plan.ids, plan.index[:, 0]).reshape(-1, 1)
            extra["traj_id"] = np.repeat(ids, plan.index.shape[1], 1)
        weight = None if plan.times is None else plan.times ** -beta_at(self._beta, key.index)
        return Draw(plan.index, plan.mask, weight, pad=plan.pad, extra=extra)

    def _state(self) -> dict[str, Any]:
        return {"state": None if self._now is None else _copied(self._now)}

    def _restore(self, values: Mapping[str, Any]) -> None:
        state, like = values["state"], self.sampler.init(self._arrays, Ring(0, 0, 1, None))
        if state and (not isinstance(state, Mapping) or state.keys() != like.keys()):
            raise StateError(f"sampler: expected the arrays {sorted(like)} as state, found {state!r:.80}")
        self._now = None if state is None else _copied(state)


def _copied(state: State) -> State:
    """Return a state with copies of all arrays, including arrays of single numbers."""
    return {name: np.array(array) for name, array in state.items()}


def _ring(storage: Storage, written: int) -> Ring:
    """Return the ring of a storage after ``written`` rows were written."""
    num_envs = None if storage.ndim == 1 else storage.num_envs
    steps, count = storage.capacity // (num_envs or 1), written // (num_envs or 1)
    return Ring(count % steps, min(count, steps), steps, num_envs)


def check_left(sampler: DeviceSampler, left: int, batch_size: int, size: int, caller: str) -> None:
    """Raise ConfigError if too few units are left for a batch; ``size`` is the number of time steps in the ring."""
    fewest = sampler.fewest(batch_size)
    if left >= fewest:
        return
    if sampler.order != "random":
        each = f"{fewest} {sampler.what} for a batch without repetition"
        raise ConfigError(f"{caller}: expected {each}, found {left}")
    raise ConfigError(f"{caller}: expected {sampler.what}, found none among {size} time steps")
