"""Making the batches that a loader has drawn from a replay buffer: TensorDicts, on a device if asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from mouse_core.batches import BatchLayout
from mouse_core.dtypes import is_number
from mouse_core.replay.source import BufferSource
from mouse_core.trees import flatten, map_tree
from mouse_torch.transfer import InFlight, slab_tensors
from mouse_torch.trees import tensor_dict


def drawn_maker(source: BufferSource, *, device: torch.device, pin: bool) -> Callable[[int], InFlight]:
    """The function from an index to a batch, on the host or under way to ``device``."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return partial(_make, source, device, pin, stream)


def _make(
    source: BufferSource, device: torch.device, pin: bool, stream: torch.cuda.Stream | None, index: int
) -> InFlight:
    batch = source.buffer.batch_of(source.drawn(index))
    numbers = {
        str(place): leaf
        for place, leaf in enumerate(flatten(batch).values())
        if isinstance(leaf, np.ndarray) and is_number(leaf.dtype)
    }
    if not numbers or not (pin or stream is not None):  # it lies where it belongs, or is to be shared as it is
        return InFlight((tensor_dict(batch, device),), None)
    layout = BatchLayout({name: (leaf.shape, leaf.dtype) for name, leaf in numbers.items()})
    # See ``transfer`` for when this memory is used again.
    slab = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin)
    for name, target in layout.arrays(slab.numpy()).items():
        np.copyto(target, numbers[name])
    with torch.cuda.stream(stream):  # no effect for None
        moved = slab_tensors(layout, slab if stream is None else slab.to(device, non_blocking=pin))
        made: TensorDict = tensor_dict(_with_tensors(batch, moved), device)
        event = None
        if stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    return InFlight((made,), event)


def _with_tensors(batch: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The batch with those leaves replaced whose numbers there are tensors for."""
    places = iter(range(len(flatten(batch))))
    return map_tree(lambda leaf: tensors.get(str(next(places)), leaf), batch)


def keeps_tensors(buffer: Any) -> bool:
    """Whether batches of a buffer, or of a member of an ensemble, are tensors from the beginning."""
    own = getattr(buffer, "keeps_tensors", False)
    return bool(own) or any(keeps_tensors(member) for member in getattr(buffer, "buffers", ()))
