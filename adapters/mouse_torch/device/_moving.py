"""Rows between a device and a buffer on the host, which may be of any framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mouse_core.errors import ConfigError
from mouse_core.replay import ArrayStorage, Priorities, PrioritizedSampler, ReplayBuffer
from mouse_core.replay.device.moving import (
    check_fits,
    check_ordered,
    episodes_state,
    epoch_in,
    epoch_state,
    fill,
    left_in,
    lost_in,
    lost_of,
    queue_state,
    sampler_like,
    weights_in,
    weights_state,
)
from mouse_torch import _words
from mouse_torch.device.ground.turns import Queue
from mouse_torch.transfer import to_numpy
from mouse_torch.trees import on_host

if TYPE_CHECKING:
    from mouse_torch.device.replay import Replay


def like(replay: Replay) -> ReplayBuffer:
    """An empty buffer on the host that draws the same."""
    storage = ArrayStorage(replay.capacity, ndim=1 if replay.num_envs is None else 2, alignment=replay.alignment)
    slices = None if replay.episodes is None else replay.episodes.slices
    weights, priorities = replay.weights, None
    if weights is not None:
        beta = weights.beta if callable(weights.beta) else float(weights.beta)
        priorities = Priorities(alpha=weights.alpha, beta=beta, eps=weights.eps)
    return ReplayBuffer(storage, sampler_like(slices, priorities, replay.order))


def to_host(replay: Replay, buffer: ReplayBuffer) -> None:
    """See ``Replay.to_host``."""
    check_fits(buffer, replay.capacity, replay.num_envs, "to_host")
    lead = (replay.steps,) if replay.num_envs is None else (replay.steps, replay.num_envs)
    rows = {key: to_numpy(memory).reshape(*lead, *memory.shape[1:]) for key, memory in replay.rows.each()}

    def first(count: int) -> Any:
        return replay.rows.nested({key: values[:count] for key, values in rows.items()})

    lost = _lost(replay)
    fill(buffer, first, int(replay.size), int(replay.cursor), replay.steps, lost)
    known = {
        "kind": type(buffer.sampler).__name__,
        "state": episodes_state(_sampler_state(replay, buffer), lost),
    }
    state = {"seed": int(replay.seed) & ((1 << 64) - 1), "samples": int(replay.samples), "sampler": known}
    buffer.load_state_dict({**buffer.state_dict(), **state})


def _sampler_state(replay: Replay, buffer: ReplayBuffer) -> dict[str, Any]:
    """What rows weigh and which come next, as a sampler on the host saves it; of another kind, what it is."""
    sampler, turns, size = buffer.sampler, replay.turns, replay.batch_size
    if replay.weights is not None and isinstance(sampler, PrioritizedSampler):
        return weights_state(sampler, replay.weights.units(len(buffer)), float(replay.weights.largest))
    if isinstance(turns, Queue):
        cursor = int(replay.cursor) * (replay.num_envs or 1)
        return queue_state(sampler, int(turns.left), len(buffer), cursor, replay.capacity, size)
    if turns is None:
        return sampler.state_dict()
    return epoch_state(sampler, int(turns.rows), int(turns.began), int(turns.position), size)


def _lost(replay: Replay) -> Any:
    """See ``lost_in``."""
    known, size = replay.episodes, int(replay.size)
    if known is None:
        return np.zeros(replay.num_envs or 1, np.int64)
    rows = (int(replay.cursor) - size + np.arange(size)) % replay.steps
    windows, numbers, made, position = map(to_numpy, (known.windows, known.numbers, known.made, known.position))
    phases = to_numpy(known.phases)[rows[0]] if known.is_phased and size else None
    return lost_of(known.slices, windows[rows], numbers[rows], made, position, phases)


def _take_turns(replay: Replay, buffer: ReplayBuffer) -> None:
    """Go on where a buffer is; one of another kind has not begun."""
    turns, known = replay.turns, replay.episodes
    if isinstance(turns, Queue):
        left = left_in(buffer.sampler)
        turns.left.fill_(len(buffer) if left is None else left)
    elif turns is not None:
        slices = 0 if known is None else int(known.table(known.reading(replay.ring)).ends[-1])
        epoch = epoch_in(buffer.sampler, slices)
        for name, value in zip(("rows", "began", "position"), epoch or (0, 0, 0), strict=True):
            getattr(turns, name).fill_(value)


@torch.no_grad()
def from_host(replay: Replay, buffer: ReplayBuffer) -> None:
    """See ``Replay.from_host``."""
    check_fits(buffer, replay.capacity, replay.num_envs, "from_host")
    check_ordered(buffer, "from_host")
    if int(replay.size):
        raise ConfigError(f"from_host: expected an empty replay, found {int(replay.size)} time steps")
    envs, steps, counted = replay.num_envs or 1, replay.steps, buffer.stats()
    size = len(buffer) // envs
    begin = (counted["written"] // envs - size) % steps
    if size:
        places: Any = (begin + np.arange(size)) % steps
        if replay.num_envs is not None:
            places = places[:, None] * envs + np.arange(envs)
        rows, count = replay.rows.accepted(on_host(buffer[places]))
        replay.cursor.fill_(begin)
        if replay.episodes is not None:
            lost = lost_in(buffer, replay.episodes.slices, envs)
            if lost.any():
                replay.episodes.cut_off(torch.as_tensor(lost, device=replay.device), rows)
        replay.write(rows, count)
    else:
        replay.cursor.fill_(begin)
    weighed = weights_in(buffer)
    if size and replay.weights is not None and weighed is not None:
        replay.weights.take(*weighed)
    if size:
        _take_turns(replay, buffer)
    replay.seed.fill_(_words.signed(buffer.seed))
    replay.samples.fill_(counted["samples"])
