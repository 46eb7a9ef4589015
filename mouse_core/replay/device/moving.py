"""Copy rows and states between a replay on a device and a buffer on the host, for any framework."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.nested import map_tree
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.device.arrays import Arrays, Read, Ring, State
from mouse_core.replay.device.layout import Layout
from mouse_core.replay.device.samplers import DeviceSampler, HostSampler
from mouse_core.replay.device.units import SliceUnits, one_a_row
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.storages.array import ArrayStorage


def to_host(
    layout: Layout, xp: Arrays, state: State, ring: Ring, rows: Any, beta: Any, seed: int, samples: int
) -> ReplayBuffer:
    """Return a buffer on the host with all rows of a replay, which continues the draws of the replay.

    Args:
        layout: The constants of the replay.
        xp: The array functions of the state's framework.
        state: The state of the sampler.
        ring: The ring.
        rows: The memory of the rows, a tree of NumPy arrays ``[T, ...]`` or ``[T, E, ...]``.
        beta: The exponent of importance weights.
        seed: The seed of the replay.
        samples: The index of the next sample.
    """
    sampler, ring = layout.sampler, _known(ring)
    size, cursor, steps = ring.size, ring.cursor, ring.steps
    state = {name: xp.to_numpy(state[name], array) for name, array in sampler.init(Arrays(), ring).items()}
    storage = ArrayStorage(layout.capacity, ndim=1 if layout.num_envs is None else 2, alignment=layout.alignment)
    buffer = ReplayBuffer(storage, sampler.host(beta), transform=layout.transform, batch_size=layout.batch_size)
    lost = np.zeros(ring.envs, np.int64)
    if size and "phases" in state:
        # The number of evicted steps of each oldest episode is known only modulo the period.
        lost = state["phases"][(cursor - size) % steps].astype(np.int64)
    # In a full ring, the rows before the cursor are the newest. They are written to the buffer a second time, so that
    # they are its newest rows.
    counts = [size]
    if size == steps:
        counts = [size] * (1 + max(0, -((cursor - int(lost.max())) // steps))) + [cursor]
    for count in filter(None, counts):
        buffer.extend(map_tree(itemgetter(slice(count)), rows))
    found = buffer.sampler.state_dict()
    if isinstance(buffer.sampler, HostSampler):
        found = found | {"state": state}
    else:
        found = found | sampler.host_state(state, ring, buffer.sampler, layout.batch_size)
    if len(found.get("begins", ())):
        _, kept, base, end = found["steps"].tolist()
        begins = found["begins"].copy()
        begins[np.cumsum(found["counts"]) - found["counts"]] = max(end - kept, base) - lost
        found = found | {"begins": begins}
    known = {"kind": type(buffer.sampler).__name__, "state": found}
    buffer.load_state_dict({**buffer.state_dict(), "seed": seed, "samples": samples, "sampler": known})
    return buffer


def rows_from_host(ring: Ring, buffer: ReplayBuffer) -> tuple[Ring, Any]:
    """Return the ring for a buffer's rows, with Python integers as values, and the rows, the oldest first.

    Args:
        ring: The ring of an empty replay.
        buffer: A buffer of the same capacity.

    Raises:
        ConfigError: The replay is not empty or has another capacity, or the buffer's rows are not in order.
    """
    ring, storage = _known(ring), buffer.storage
    wanted = ring.capacity, 1 if ring.num_envs is None else 2
    if (storage.capacity, storage.ndim) != wanted or (len(buffer) and storage.num_envs != ring.envs):
        raise ConfigError(
            f"from_host: expected a storage with capacity {wanted[0]} and ndim {wanted[1]}, of {ring.envs} "
            f"environments, found {storage!r}"
        )
    if not buffer.writer.ordered:
        raise ConfigError(
            f"from_host: expected a writer that keeps rows in the order of writing, found {buffer.writer!r}"
        )
    if ring.size:
        raise ConfigError(f"from_host: expected an empty replay, found {ring.size} time steps")
    envs, steps = ring.envs, ring.steps
    size, cursor = len(buffer) // envs, buffer.stats()["written"] // envs % steps
    places: Any = (cursor - size + np.arange(size)) % steps
    if ring.num_envs is not None:
        places = places[:, None] * envs + np.arange(envs)
    return Ring(cursor, size, steps, ring.num_envs), buffer[places] if size else None


def state_from_host(
    sampler: DeviceSampler, xp: Arrays, state: State, ring: Ring, read: Read, buffer: ReplayBuffer, seed: Any
) -> State:
    """Return the state of a device sampler that continues the draws of a buffer.

    Args:
        sampler: The sampler of the replay.
        xp: The array functions of the state's framework.
        state: The state without rows.
        ring: The ring of the buffer's rows, from ``rows_from_host``.
        read: A function that returns a field of the rows in NumPy, ``[n, ...]`` or ``[n, E, ...]``, the oldest first.
        buffer: The buffer.
        seed: The seed of the buffer, in the framework's representation.
    """
    host, size = Arrays(), ring.size
    before = Ring((ring.cursor - size) % ring.steps, 0, ring.steps, ring.num_envs)
    found = sampler.init(host, before)
    if isinstance(sampler.units, SliceUnits):
        rule = sampler.units
        lost, key = _lost_in_buffer(rule, buffer, ring.envs), rule.marks.ids
        if lost.any():
            ids = None if key is None else one_a_row(key, read(key), (size, ring.envs))[0]
            found = rule.cut_off(host, found, lost, ids)
    found = sampler.units.extend(host, found, read, size, before)
    found = sampler.settle(host, found, read, size, ring)
    if isinstance(buffer.sampler, HostSampler):
        found = buffer.sampler.settled(buffer.storage)
    elif isinstance(buffer.sampler, sampler.host_kind):
        found = sampler.resumed(found, ring, buffer.sampler, buffer.storage)
    moved = {name: xp.from_numpy(values, state[name]) for name, values in found.items()}
    return sampler.loaded(xp, state | moved, ring, seed)


def _known(ring: Ring) -> Ring:
    return ring._replace(cursor=int(ring.cursor), size=int(ring.size))


def _lost_in_buffer(rule: SliceUnits, buffer: ReplayBuffer, num_envs: int) -> npt.NDArray[np.int64]:
    """Return, for each environment, how many steps of its oldest episode were overwritten, ``[E]``; 0 if this number is
    unknown or has no effect.
    """
    slices = rule.slices
    if slices.period == 1 or not len(buffer):
        return np.zeros(num_envs, np.int64)
    episodes = StorageEpisodes(slices.traj_key, slices.end_key, slices.truncated_key).settled(buffer.storage)
    begin, _, _ = episodes.episode_of(np.full(num_envs, episodes.begin), np.arange(num_envs))
    lost: npt.NDArray[np.int64] = episodes.begin - begin
    return lost
