"""Which rows a batch has, and the rows, gathered."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from mouse_core.replay import Compose
from mouse_torch import _words
from mouse_torch.device import _priorities
from mouse_torch.device._checks import check_left
from mouse_torch.device.ground.episodes import Episodes, Ring, Windows
from mouse_torch.device.ground.fields import filled
from mouse_torch.device.ground.turns import Queue
from mouse_torch.device.ground.weights import Weights

if TYPE_CHECKING:
    from mouse_torch.device.replay import Replay


def drawn(replay: Replay, seed: torch.Tensor, number: torch.Tensor, size: int, beta: Any = None) -> Any:
    """A batch, before transforms: in which all rows, or slices, are as likely, come in turn, or are drawn by weight.

    Args:
        replay: Of which replay.
        seed: Which may be another than that of the replay, int64 ``[]``.
        number: That of the sample, int64 ``[]``.
        size: Rows or slices.
        beta: The exponent of importance weights; None: that of the replay.
    """
    known = replay.episodes
    if replay.weights is not None:
        return _weighted(replay, replay.weights, seed, number, size, beta)
    if known is None:
        return _rows(replay, _places(replay, replay.left(), seed, number, size))
    ring = replay.ring
    found = known.table(ring)
    return _slices(replay, ring, known, known.find(ring, found, _places(replay, found.ends[-1], seed, number, size)))


def _places(replay: Replay, count: torch.Tensor, seed: torch.Tensor, number: torch.Tensor, size: int) -> torch.Tensor:
    """Slots, or numbers of slices, of which there are so many."""
    turns = replay.turns
    check_left(replay, count)
    if turns is None:
        return _words.integers(seed, number, size, count)
    if isinstance(turns, Queue):
        return turns.take(replay.ring, size, replay.capacity)
    return turns.take(seed, number, count, size, replay.capacity)


def _weighted(
    replay: Replay, weights: Weights, seed: torch.Tensor, number: torch.Tensor, size: int, beta: Any
) -> dict[str, Any]:
    ring = replay.ring
    check_left(replay, weights.total)
    exponent = _priorities.beta_at(weights.beta if beta is None else beta, number)
    slots, importance = weights.drawn(_words.words(seed, number, size), exponent)
    if replay.episodes is None:
        batch = _rows(replay, slots)
    else:
        windows = _priorities.windows(ring, slots, replay.num_envs or 1)
        batch = _slices(replay, ring, replay.episodes, windows)
    return batch | {"priority_weight": _priorities.importance(importance, batch["index"])}


def _rows(replay: Replay, slot: torch.Tensor) -> dict[str, Any]:
    """The rows of some slots ``[B]``, which are all there, and those behind each that transforms need."""
    if not replay.reach:
        return _batch(replay.rows.taken(slot), {"index": slot})
    # Rows behind each in its stream; behind the newest there is none, and it is repeated.
    envs, steps = replay.num_envs or 1, replay.steps
    step, env = slot // envs, slot % envs
    age = (replay.cursor - 1 - step) % steps
    behind = torch.arange(replay.reach + 1, device=slot.device)
    mask = behind <= age[:, None]
    step = (step[:, None] + torch.minimum(behind, age[:, None])) % steps
    return _batch(replay.rows.taken(step * envs + env[:, None]), {"index": slot, "mask": mask})


def _slices(replay: Replay, ring: Ring, known: Episodes, windows: Windows) -> dict[str, Any]:
    """The rows of some slices."""
    slices, marks, envs = known.slices, known.marks, replay.num_envs or 1
    offset, mask = torch.arange(slices.sequence_length, device=windows.env.device), None
    if slices.pad is not False:
        count = known.lengths(ring, windows)[:, None]
        mask, offset = offset < count, torch.minimum(offset, count - 1)
    slots = ring.slots(windows.start[:, None] + offset)
    if envs > 1:
        slots = slots * envs + windows.env[:, None]
    rows = replay.rows.taken(slots)
    if mask is not None and not isinstance(slices.pad, bool):
        rows = filled(rows, mask, slices.pad)
    added = {"index": slots} if mask is None else {"index": slots, "mask": mask}
    if marks.numbers and marks.ids is not None:
        traj_id = replay.rows.taken_of(marks.ids, slots[:, :1])
    else:
        traj_id = known.numbers_at(ring, windows)[:, None]
    return _batch(rows, added | {"traj_id": traj_id.expand(slots.shape)})


def check_transform(replay: Replay) -> None:
    """Raise what the transforms of ``mouse_core.replay`` do, given a batch without values, up to one of somebody's."""
    given = () if replay.transform is None else replay.transform.transforms
    ours = [*takewhile(lambda part: type(part).__module__.partition(".")[0] == "mouse_core", given)]
    if not ours:
        return
    tried, known, lead = Compose(*ours), replay.episodes, [replay.batch_size]
    dtypes: dict[str, torch.dtype] = {"index": torch.int64}
    if known is not None:
        lead.append(known.slices.sequence_length)
        marks = known.marks
        dtypes["traj_id"] = replay.rows.dtype(marks.ids) if marks.numbers and marks.ids is not None else torch.int64
        if known.slices.pad is not False:
            dtypes["mask"] = torch.bool
    elif tried.reach:
        lead.append(tried.reach + 1)
        dtypes["mask"] = torch.bool
    if replay.weights is not None:
        dtypes["priority_weight"] = torch.float32
    added = {name: torch.empty(lead, dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    if known is None and tried.reach:
        # What is one a row was not read ahead.
        added |= {name: values[:, 0] for name, values in added.items() if name != "mask"}
    tried(_batch(replay.rows.outline(lead), added))


def _batch(rows: Any, added: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    # The rows' own numbers of trajectories pass through.
    return batch | {name: values for name, values in added.items() if name not in batch}
