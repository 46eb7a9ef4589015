"""Priorities of the rows of a replay."""

from __future__ import annotations

from typing import Any

import torch

from mouse_core.errors import ConfigError
from mouse_core.replay import LinearSchedule
from mouse_core.replay.samplers.weighing import weighed
from mouse_torch.device.ground.episodes import Episodes, Windows
from mouse_torch.device.ground.reading import Ring
from mouse_torch.device.ground.weights import Weights, touched
from mouse_torch.tracing import is_known


def like(indices: torch.Tensor, priorities: torch.Tensor) -> torch.Tensor:
    """Priorities in the shape of indices, float32, where axes of length 1 may follow and one may be of a whole slice.

    Raises:
        ConfigError: Shapes that do not go together, or indices that are no integers.
    """
    if indices.dtype == torch.bool or indices.is_floating_point():
        raise ConfigError(f"set_priorities: expected integers as indices, found {indices.dtype}")
    values, shape = priorities.detach().to(torch.float32), indices.shape
    if values.shape[: len(shape)] == shape and values.numel() == indices.numel():
        return values.reshape(shape)  # also [n, 1], as networks give one number for each row
    fits = values.ndim <= len(shape) and values.shape[:1] in ((), shape[:1])
    if not fits or any(size not in (1, other) for size, other in zip(values.shape, shape, strict=False)):
        raise ConfigError(
            f"set_priorities: expected priorities of the shape of the index {[*shape]}, found {[*priorities.shape]}"
        )
    return values.reshape(*values.shape, *[1] * (len(shape) - values.ndim)).expand(shape)


def beta_at(beta: Any, number: torch.Tensor) -> Any:
    """The exponent of importance weights for a sample: what a schedule gives for its number, or what it is itself."""
    if isinstance(beta, LinearSchedule):
        # Called, it would ask which of two numbers is smaller, and wait for the device.
        return beta.start + (beta.end - beta.start) * (number / beta.samples).clamp(max=1.0)
    return beta(number) if callable(beta) else beta


def update(weights: Weights, rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Set priorities of some slots, float32 ``[n]``; of a slot that comes twice the last one counts.

    Raises:
        DataError, IndexError: Where it is seen that a slot cannot have its priority, or is not in use.
    """
    if not (is_known(slots) and is_known(values) and is_known(rows)):
        weights.update(rows, slots, values)
        return
    known, given, count = slots.numpy(), values.numpy(), int(rows.numpy())
    if known.size and known.min() < 0:
        there = known >= 0
        known, given = known[there], given[there]
    units = weighed(given, weights.capacity, weights.alpha, weights.eps)
    if not known.size:
        return
    if known.max() >= count:
        raise IndexError(f"set_priorities: expected slots in 0..{count - 1}, found {known.max()}")
    largest = given.argmax()
    if given[largest] > weights.largest.numpy():
        weights.largest.fill_(float(given[largest]))
        weights.fresh.fill_(int(units[largest]))
    weights.seen().put(known, units)


def written(weights: Weights, known: Episodes | None, ring: Ring, count: int, envs: int) -> None:
    """Give the newest time steps their priorities, and say where slices begin since they are there."""
    capacity = weights.capacity
    begin = (ring.cursor - count) % ring.steps * envs
    weights.fill((begin + torch.arange(count * envs, device=begin.device)) % capacity)
    if known is None:
        nodes = touched(begin, count * envs, capacity)
    else:
        nodes = _begun(weights, known, ring, count, envs)
    weights.refresh(nodes)


def _begun(weights: Weights, known: Episodes, ring: Ring, count: int, envs: int) -> torch.Tensor:
    """Mark where slices begin, and say in which rows of the leaves.

    With so many more steps slices of S begin up to S - 1 steps before them. Where short episodes have slices, one may
    begin at one of the oldest steps that did not before: what is left of its episode has one.
    """
    steps, length, capacity = ring.steps, known.slices.sequence_length, weights.capacity
    padded, number, where = known.slices.pad is not False, min(count + length - 1, steps), ring.cursor.device
    age = torch.arange(number - 1, -1, -1, device=where)
    step = (ring.cursor - 1 - age) % steps

    def at(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return counts.index_select(0, places % steps)

    def are_whole(age: torch.Tensor) -> torch.Tensor:
        """Whether a slice that begins so many steps before the newest ends with the row that is its last one."""
        last = age - (length - 1)
        step = ring.cursor - 1 - last
        behind = torch.where((last > 0)[:, None], at(known.windows, step + 1), known.made)
        whole = (last >= 0)[:, None] & (behind != at(known.windows, step))
        # With padded ones the row may begin an episode instead.
        return whole & (at(known.numbers, step) == at(known.numbers, ring.cursor - 1 - age)) if padded else whole

    begins = are_whole(age)
    if padded:
        begins = begins | (at(known.numbers, step - 1) != at(known.numbers, step))
    begins = begins & (age < ring.size)[:, None]
    env = torch.arange(envs, device=where)
    slots = (step[:, None] * envs + env).reshape(-1)
    weights.mark(slots, begins.reshape(-1))
    nodes = touched(slots[:1], number * envs, capacity)
    if padded:
        oldest, several = ring.oldest % steps, min(known.every, steps)
        found = known.table(known.reading(ring))
        # What lies before the oldest row in the ring is the newest, which says nothing of where its episode begins.
        weights.mark(oldest * envs + env, are_whole(ring.size.reshape(1) - 1)[0])
        slots = (oldest + found.first) % steps * envs + env
        weights.mark(slots, weights.marked(slots) | (found.of_head > 0) if known.every > 1 else env >= 0)
        nodes = torch.cat([nodes, touched(oldest * envs, several * envs, capacity)])
    return nodes


def windows(ring: Ring, slots: torch.Tensor, envs: int) -> Windows:
    """The slices that begin in these slots."""
    return Windows(slots % envs, (slots // envs - (ring.oldest)) % ring.steps)


def importance(weights: Any, index: torch.Tensor) -> torch.Tensor:
    """Importance weights ``[B]`` in the shape of the index, ``[B]`` or ``[B, S]``."""
    found: torch.Tensor = weights if index.ndim == 1 else weights[:, None].expand(index.shape)
    return found
