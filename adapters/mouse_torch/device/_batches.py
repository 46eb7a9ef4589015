"""Batches on a device: select the rows and gather them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mouse_core.replay import Compose
from mouse_torch import _philox
from mouse_torch.device import _priorities
from mouse_torch.device._checks import check_left
from mouse_torch.device.ground.episodes import Episodes, Windows
from mouse_torch.device.ground.fields import filled
from mouse_torch.device.ground.reading import Reading, Ring, seen_ring
from mouse_torch.device.ground.turns import Queue
from mouse_torch.device.ground.weights import Weights

if TYPE_CHECKING:
    from mouse_torch.device.replay import Replay


def drawn(replay: Replay, seed: Any, number: Any, size: int, beta: Any = None) -> Any:
    """A batch, before transforms: in which all rows, or slices, are as likely, come in turn, or are drawn by weight.

    Args:
        replay: Of which replay.
        seed: Which may be another than that of the replay, int64 ``[]``, a tensor or NumPy's.
        number: That of the sample, int64 ``[]``, likewise.
        size: Rows or slices.
        beta: The exponent of importance weights; None: that of the replay.
    """
    known, counters = replay.episodes, replay.counters()
    if counters is None:
        ring = replay.ring
    else:
        ring = seen_ring(int(counters["cursor"]), int(counters["size"]), replay.steps)
    if replay.weights is not None:
        return _weighted(replay, replay.weights, ring, seed, number, size, beta)
    if known is None:
        count = ring.size if replay.num_envs is None else ring.size * replay.num_envs
        return _rows(replay, ring, _places(replay, ring, count, seed, number, size))
    at = known.reading(ring)
    found = known.table(at)
    places = _places(replay, ring, found.ends[-1], seed, number, size)
    return _slices(replay, known, at, known.find(at, found, places))


def _places(replay: Replay, ring: Ring, count: Any, seed: Any, number: Any, size: int) -> Any:
    """Slots, or numbers of slices, of which there are so many, int64 ``[size]``; NumPy's where one may look."""
    turns = replay.turns
    if isinstance(turns, Queue):
        check_left(replay, turns.left)
        return _seen(ring, turns.take(replay.ring, size, replay.capacity))
    check_left(replay, count)
    if turns is None:
        return _philox.integers(seed, number, size, count)
    whole = torch.as_tensor(count, device=replay.device)
    return _seen(ring, turns.take(_tensor(seed), _tensor(number), whole, size, replay.capacity))


def _seen(ring: Ring, numbers: torch.Tensor) -> Any:
    """Numbers on the device as those of a ring are."""
    return numbers.numpy() if ring.is_seen else numbers


def _weighted(
    replay: Replay, weights: Weights, ring: Ring, seed: Any, number: Any, size: int, beta: Any
) -> dict[str, Any]:
    check_left(replay, weights.total)
    exponent = _priorities.beta_at(weights.beta if beta is None else beta, _tensor(number))
    found, importance = weights.drawn(_philox.words(seed, number, size), exponent)
    known, slots = replay.episodes, _seen(ring, found)
    if known is None:
        batch = _rows(replay, ring, slots)
    else:
        batch = _slices(replay, known, known.reading(ring), _priorities.windows(ring, slots, replay.num_envs or 1))
    return batch | {"priority_weight": _priorities.importance(importance, batch["index"])}


def _rows(replay: Replay, ring: Ring, slot: Any) -> dict[str, Any]:
    """The rows of some slots ``[B]``, which are all there, and those behind each that transforms need."""
    if not replay.reach:
        return _batch(replay.rows.taken(slot), {"index": _tensor(slot)})
    # Rows behind each in its stream; behind the newest there is none, and it is repeated.
    envs, steps = replay.num_envs or 1, replay.steps
    step, env = slot // envs, slot % envs
    age = ((ring.cursor - 1 - step) % steps)[:, None]
    behind = ring.range(replay.reach + 1)
    mask = behind <= age
    taken = (step[:, None] + ring.minimum(behind, age)) % steps * envs + env[:, None]
    return _batch(replay.rows.taken(taken), {"index": _tensor(slot), "mask": _tensor(mask)})


def _slices(replay: Replay, known: Episodes, at: Reading, windows: Windows) -> dict[str, Any]:
    """The rows of some slices."""
    slices, marks, envs, ring = known.slices, known.marks, replay.num_envs or 1, at.ring
    number, mask = at(at.numbers, windows.start, windows.env), None
    row = offset = ring.range(slices.sequence_length)
    if slices.pad is not False:
        count = known.lengths(at, windows, number)[:, None]
        mask, row = _tensor(offset < count), ring.minimum(offset, count - 1)
    places = ring.slots(windows.start[:, None] + row)
    if envs > 1:
        places = places * envs + windows.env[:, None]
    rows, slots = replay.rows.taken(places), _tensor(places)
    if mask is not None and not isinstance(slices.pad, bool):
        rows = filled(rows, mask, slices.pad)
    added = {"index": slots} if mask is None else {"index": slots, "mask": mask}
    if marks.numbers and marks.ids is not None:
        traj_id = replay.rows.taken_of(marks.ids, slots[:, :1])
    else:
        # As many environments apart as there are, so that no two episodes have one number.
        traj_id = _tensor(((number - 1) * envs + windows.env)[:, None])
    return _batch(rows, added | {"traj_id": traj_id.expand(slots.shape)})


def _tensor(numbers: Any) -> torch.Tensor:
    """Numbers that NumPy may have computed."""
    return torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers


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
