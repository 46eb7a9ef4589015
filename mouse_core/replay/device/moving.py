"""Rows of a device in a buffer on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.device.options import Order, Slices
from mouse_core.replay.protocols import Sampler
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.samplers.priorities import PrioritizedSampler
from mouse_core.replay.samplers.rows import ConsumingSampler, Epochs, RandomSampler, SamplerWithoutReplacement
from mouse_core.replay.samplers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from mouse_core.replay.samplers.weighing import Priorities

Int64s = npt.NDArray[np.int64]

_OF_SLICES = ("sequence_length", "pad", "end_key", "truncated_key", "traj_key")


def sampler_like(slices: Slices | None, priorities: Priorities | None, order: Order = "random") -> Sampler:
    """The sampler that draws what a replay on a device does."""
    options: dict[str, Any] = {} if slices is None else {name: getattr(slices, name) for name in _OF_SLICES}
    if order == "queue":
        return ConsumingSampler(shuffle=False, drop_last=True)
    if order == "epochs":
        kind: Any = SamplerWithoutReplacement if slices is None else SliceSamplerWithoutReplacement
        made: Sampler = kind(**options, drop_last=True)
        return made
    if slices is not None:
        options["period"] = slices.period
    if priorities is None:
        return RandomSampler() if slices is None else SliceSampler(**options)
    exponents: dict[str, Any] = {name: getattr(priorities, name) for name in ("alpha", "beta", "eps")}
    return PrioritizedSampler(**exponents) if slices is None else PrioritizedSliceSampler(**exponents, **options)


def queue_state(sampler: Sampler, left: int, rows: int, cursor: int, capacity: int, batch_size: int) -> dict[str, Any]:
    """The state of a sampler of which the newest ``left`` rows have not come; of another kind, what it is.

    Args:
        sampler: Of a buffer with as many rows.
        left: How many have not come.
        rows: How many there are.
        cursor: The slot that is written next.
        capacity: How many slots there are.
        batch_size: Rows in a batch.
    """
    state = sampler.state_dict()
    if not isinstance(sampler, ConsumingSampler):
        return state
    age = (cursor - 1 - np.arange(rows)) % capacity
    return state | {"left": (age < left) * sampler.times, "ran_out": int(left < batch_size and rows > 0)}


def left_in(sampler: Sampler) -> int | None:
    """How many rows have not come yet; None where a sampler does not count that."""
    return int(np.count_nonzero(sampler.state_dict()["left"])) if isinstance(sampler, ConsumingSampler) else None


def epoch_state(sampler: Any, rows: int, began: int, position: int, batch_size: int) -> dict[str, Any]:
    """The state of a sampler in an epoch; of another kind, what it is.

    Args:
        sampler: Of a buffer with as many rows.
        rows: How many rows or slices the epoch is over; 0: none has begun.
        began: The number of the sample with which it began.
        position: How many of them have come.
        batch_size: Rows or slices in a batch.
    """
    state: dict[str, Any] = sampler.state_dict()
    ran_out = int(0 < rows < position + batch_size)
    if not isinstance(sampler, Epochs):
        return state
    over = sampler.sequence_length if rows and isinstance(sampler, SliceSamplerWithoutReplacement) else rows
    return state | {"over": over, "began": began, "position": position, "ran_out": ran_out}


def epoch_in(sampler: Any, slices: int) -> tuple[int, int, int] | None:
    """Rows or slices of the epoch, when it began, and how many have come; None where none has begun, or is counted.

    Args:
        sampler: Where the epoch is.
        slices: How many slices there are, where it is one of slices.
    """
    if not isinstance(sampler, Epochs):
        return None
    state = sampler.state_dict()
    rows = slices if state["over"] and isinstance(sampler, SliceSamplerWithoutReplacement) else state["over"]
    return (int(rows), int(state["began"]), int(state["position"])) if rows else None


def weights_state(sampler: PrioritizedSampler, units: npt.NDArray[np.int64], largest: float) -> dict[str, Any]:
    """The state of a sampler in which rows weigh so much; its own exponents stay.

    Args:
        sampler: One that has been told of as many rows.
        units: What they weigh, by their slots.
        largest: The priority of new rows.
    """
    state = sampler.state_dict()
    end = max(state["begin"], state["end"])
    return state | {"weights": units, "max_priority": largest, "begin": end, "end": end}


def weights_in(buffer: ReplayBuffer) -> tuple[npt.NDArray[np.int64], float] | None:
    """What the rows of a buffer weigh, and the priority of new ones; None where they have none."""
    sampler = buffer.sampler
    if not isinstance(sampler, PrioritizedSampler):
        return None
    sampler.weights_at(buffer.storage, slice(0))  # new rows have their weights then
    state = sampler.state_dict()
    return state["weights"], state["max_priority"]


def lost_in(buffer: ReplayBuffer, slices: Slices | None, num_envs: int) -> Int64s:
    """How many steps of its episode, which are gone, lie before the oldest of each environment, ``[E]``.

    More than S are some periods fewer; 0 where it does not matter, or where nothing knows of steps that are gone.
    """
    if slices is None or slices.period == 1 or not len(buffer):
        return np.zeros(num_envs, np.int64)
    index = StorageEpisodes(slices.traj_key, slices.end_key, slices.truncated_key)
    known = getattr(buffer.sampler, "episodes", None)
    if isinstance(known, StorageEpisodes):
        index.go_on(known, buffer.storage)
    episodes = index.settled(buffer.storage)
    begin, _, _ = episodes.episode_of(np.full(num_envs, episodes.begin), np.arange(num_envs))
    lost, most = episodes.begin - begin, slices.sequence_length + 1
    kept: Int64s = np.where(lost < most, lost, most + (lost - most) % slices.period)
    return kept


def lost_of(
    slices: Slices,
    windows: npt.NDArray[Any],
    numbers: npt.NDArray[Any],
    made: npt.NDArray[Any],
    position: npt.NDArray[Any],
    phases: npt.NDArray[Any] | None = None,
) -> Int64s:
    """The same of a device, less as many periods as there are in it, as of these slices nothing else is known.

    Args:
        slices: What a slice is.
        windows: How many slices there are before a row, the oldest first, ``[n, E]``.
        numbers: How many episodes there are up to a row, itself included, ``[n, E]``.
        made: How many slices there are in all, ``[E]``.
        position: Of the newest row in its episode, but for some periods, ``[E]``.
        phases: How many steps behind one that counts the oldest row lies, ``[E]``, where that is known.
    """
    size, num_envs = windows.shape
    if not size or slices.period == 1:
        return np.zeros(num_envs, np.int64)
    if phases is not None:
        return phases.astype(np.int64)
    length, row = slices.sequence_length, np.arange(size)[:, None]
    end = np.where((numbers == numbers[-1:]).all(0), size, (numbers != numbers[:1]).argmax(0))
    # The slices that end with these rows begin at places that count, and if there is none, nor are the places there.
    ends = (np.diff(windows, axis=0, append=made[None]) != 0) & (row >= length - 1) & (row < end)
    none = 0 if slices.pad is not False else np.maximum(end - length + 1, 0)
    first = np.where(ends.any(0), ends.argmax(0) - (length - 1), none)
    lost: Int64s = np.where(end == size, position.astype(np.int64) - (size - 1), -first) % slices.period
    return lost


def episodes_state(state: dict[str, Any], lost: Int64s) -> dict[str, Any]:
    """The state of a sampler with what its oldest episodes have lost; of one without episodes, what it is.

    Args:
        state: Of a sampler that was told of as many rows, and of as many before them as were lost, or more.
        lost: See ``lost_in``.
    """
    if not len(state.get("begins", ())):
        return state
    _, steps, base, end = state["steps"].tolist()
    begins = state["begins"].copy()
    begins[np.cumsum(state["counts"]) - state["counts"]] = max(end - steps, base) - lost
    return state | {"begins": begins}


def check_fits(buffer: ReplayBuffer, capacity: int, num_envs: int | None, caller: str) -> None:
    """ConfigError unless a buffer has room for the rows of a replay of this capacity, each in its place."""
    storage = buffer.storage
    wanted = (capacity, 1 if num_envs is None else 2)
    if (storage.capacity, storage.ndim) != wanted or (len(buffer) and storage.num_envs != (num_envs or 1)):
        raise ConfigError(
            f"{caller}: expected a storage with capacity {wanted[0]} and ndim {wanted[1]}, of {num_envs or 1} "
            f"environments, found {storage!r}"
        )


def check_ordered(buffer: ReplayBuffer, caller: str) -> None:
    """ConfigError where rows lie in another order than that in which they were written."""
    if not buffer.writer.ordered:
        raise ConfigError(f"{caller}: expected rows in the order they were written, found those of {buffer.writer!r}")


def fill(buffer: ReplayBuffer, first: Callable[[int], Any], size: int, cursor: int, steps: int, lost: Int64s) -> None:
    """Write the rows of a ring into an empty buffer, each to its place.

    Args:
        buffer: An empty one, of the ring's capacity.
        first: Gives the first ``n`` time steps of the ring, as arrays of NumPy.
        size: How many of the time steps there are.
        cursor: The one that is written next.
        steps: How many fit.
        lost: How many time steps must have been written before the oldest, at least, ``[E]``.

    Raises:
        ConfigError: A buffer that is not empty.
    """
    if len(buffer):
        raise ConfigError(f"to_host: expected an empty buffer, found {len(buffer)} rows")
    # Of a ring that is full the rows up to the cursor are the newest: written a second time they are so there, too.
    counts = [size]
    if size == steps:
        counts = [size] * (1 + max(0, -((cursor - int(lost.max())) // steps))) + [cursor]
    for count in counts:
        if count:
            buffer.extend(first(count))
