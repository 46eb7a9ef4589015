"""Rows and states between a replay on a device and a buffer on the host, which may be of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.nested import FieldKey
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.device.arrays import Arrays, Ring
from mouse_core.replay.device.episodes import EpisodeIndex, one_a_row
from mouse_core.replay.device.samplers import DeviceSampler, SliceUnits, State
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.storages.array import ArrayStorage
from mouse_core.spec import Alignment

Int64s = npt.NDArray[np.int64]


def buffer_like(sampler: DeviceSampler, ring: Ring, alignment: Alignment, beta: Any) -> ReplayBuffer:
    """An empty buffer on the host that draws what a replay with this sampler does."""
    storage = ArrayStorage(ring.capacity, ndim=1 if ring.num_envs is None else 2, alignment=alignment)
    return ReplayBuffer(storage, sampler.host(beta))


def state_in_numpy(sampler: DeviceSampler, xp: Arrays, state: State, ring: Ring) -> State:
    """The state of a sampler in NumPy."""
    like = sampler.init(Arrays(), ring)
    return {
        part: {name: xp.to_numpy(state[part][name], array) for name, array in arrays.items()}
        for part, arrays in like.items()
    }


def to_host(
    sampler: DeviceSampler,
    state: State,
    ring: Ring,
    first: Callable[[int], Any],
    buffer: ReplayBuffer,
    *,
    batch_size: int,
    seed: int,
    samples: int,
) -> None:
    """Put all rows into an empty buffer, which then draws what the replay would.

    Args:
        sampler: The sampler of the replay.
        state: Its state in NumPy.
        ring: The ring, of integers.
        first: Gives the first ``n`` time steps of the ring, as arrays of NumPy.
        buffer: An empty one, of the ring's capacity.
        batch_size: Units in a batch.
        seed: The seed of the replay.
        samples: The number of the next sample.

    Raises:
        ConfigError: A buffer that is not empty, or of another capacity or ``ndim``.
    """
    check_fits(buffer, ring, "to_host")
    if len(buffer):
        raise ConfigError(f"to_host: expected an empty buffer, found {len(buffer)} rows")
    size, cursor, steps = ring.size, ring.cursor, ring.steps
    lost = np.zeros(ring.envs, np.int64)
    if isinstance(sampler.units, SliceUnits):
        lost = lost_in_state(sampler.units.episodes, state["episodes"], ring)
    # Of a ring that is full the rows up to the cursor are the newest: written a second time they are so there, too.
    counts = [size]
    if size == steps:
        counts = [size] * (1 + max(0, -((cursor - int(lost.max())) // steps))) + [cursor]
    for count in counts:
        if count:
            buffer.extend(first(count))
    found = sampler.host_state(state, ring, buffer.sampler, batch_size)
    if len(found.get("begins", ())):
        _, kept, base, end = found["steps"].tolist()
        begins = found["begins"].copy()
        begins[np.cumsum(found["counts"]) - found["counts"]] = max(end - kept, base) - lost
        found = found | {"begins": begins}
    known = {"kind": type(buffer.sampler).__name__, "state": found}
    buffer.load_state_dict({**buffer.state_dict(), "seed": seed, "samples": samples, "sampler": known})


def rows_from_host(ring: Ring, buffer: ReplayBuffer) -> tuple[Ring, Any]:
    """The ring of a buffer's rows, of integers, and the rows, the oldest first.

    Raises:
        ConfigError: A replay that is not empty, or of another capacity; a buffer whose rows lie in no order.
    """
    check_fits(buffer, ring, "from_host")
    if not buffer.writer.ordered:
        raise ConfigError(f"from_host: expected rows in the order they were written, found those of {buffer.writer!r}")
    if int(ring.size):
        raise ConfigError(f"from_host: expected an empty replay, found {int(ring.size)} time steps")
    envs, steps = ring.envs, ring.steps
    size, cursor = len(buffer) // envs, buffer.stats()["written"] // envs % steps
    places: Any = (cursor - size + np.arange(size)) % steps
    if ring.num_envs is not None:
        places = places[:, None] * envs + np.arange(envs)
    return Ring(cursor, size, steps, ring.num_envs), buffer[places] if size else None


def state_from_host(sampler: DeviceSampler, ring: Ring, fields: Mapping[FieldKey, Any], buffer: ReplayBuffer) -> State:
    """The state in NumPy of a sampler that goes on where a buffer is.

    Args:
        sampler: The sampler of the replay.
        ring: The ring of the buffer's rows.
        fields: These rows by field, ``[n, ...]`` or ``[n, E, ...]``, the oldest first.
        buffer: The buffer.
    """
    xp, size = Arrays(), ring.size
    before = Ring((ring.cursor - size) % ring.steps, 0, ring.steps, ring.num_envs)
    state = sampler.init(xp, before)
    if isinstance(sampler.units, SliceUnits):
        rule = sampler.units.episodes
        lost, key = lost_in_buffer(rule, buffer, ring.envs), rule.marks.ids
        if lost.any():
            ids = None if key is None else one_a_row(key, fields[key], (size, ring.envs))[0]
            state = {**state, "episodes": rule.cut_off(xp, state["episodes"], lost, ids)}
    state = sampler.settle(xp, sampler.extend(xp, state, fields, size, before), size, ring)
    return sampler.resumed(state, ring, buffer.sampler, buffer.storage)


def state_on_device(sampler: DeviceSampler, xp: Arrays, found: State, state: State, ring: Ring, seed: Any) -> State:
    """The state of a framework with what ``state_from_host`` found; ``state`` is its state of no rows."""
    made = {
        part: arrays | {name: xp.from_numpy(values, arrays[name]) for name, values in found[part].items()}
        for part, arrays in state.items()
    }
    return sampler.loaded(xp, made, ring, seed)


def check_fits(buffer: ReplayBuffer, ring: Ring, caller: str) -> None:
    """ConfigError unless a buffer has room for the rows of a ring, each in its place."""
    storage, wanted = buffer.storage, (ring.capacity, 1 if ring.num_envs is None else 2)
    if (storage.capacity, storage.ndim) != wanted or (len(buffer) and storage.num_envs != ring.envs):
        raise ConfigError(
            f"{caller}: expected a storage with capacity {wanted[0]} and ndim {wanted[1]}, of {ring.envs} "
            f"environments, found {storage!r}"
        )


def lost_in_buffer(rule: EpisodeIndex, buffer: ReplayBuffer, num_envs: int) -> Int64s:
    """Return the number of evicted steps of the oldest episode of each environment, ``[E]``.

    A number above S is reduced by whole periods; it is 0 if it does not matter or is unknown.
    """
    slices = rule.slices
    if slices.period == 1 or not len(buffer):
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


def lost_in_state(rule: EpisodeIndex, state: Mapping[str, Any], ring: Ring) -> Int64s:
    """Return ``lost_in_buffer`` for a device's slices, reduced by all whole periods: only the remainder is known."""
    size, slices = ring.size, rule.slices
    if not size or slices.period == 1:
        return np.zeros(ring.envs, np.int64)
    rows = (ring.cursor - size + np.arange(size)) % ring.steps
    if "phases" in state:
        phases: Int64s = state["phases"][rows[0]].astype(np.int64)
        return phases
    windows, numbers, length = state["windows"][rows], state["numbers"][rows], slices.sequence_length
    row = np.arange(size)[:, None]
    end = np.where((numbers == numbers[-1:]).all(0), size, (numbers != numbers[:1]).argmax(0))
    # The slices that end with these rows begin at places that count, and if there is none, nor are the places there.
    ends = (np.diff(windows, axis=0, append=state["made"][None]) != 0) & (row >= length - 1) & (row < end)
    none = 0 if rule.padded else np.maximum(end - length + 1, 0)
    first = np.where(ends.any(0), ends.argmax(0) - (length - 1), none)
    lost: Int64s = np.where(end == size, state["position"].astype(np.int64) - (size - 1), -first) % slices.period
    return lost
