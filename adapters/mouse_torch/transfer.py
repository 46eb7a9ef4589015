"""Moving a batch of NumPy arrays into torch: zero-copy on the host; to CUDA one pinned slab and one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from mouse_core import BatchSource
from mouse_core.batches import BatchLayout


def host_maker(source: BatchSource, *, pin: bool) -> Callable[[int], TensorDict]:
    """The function from an index to a TensorDict ``[B, S]`` on the host, in pinned memory if asked."""
    return partial(_make_pinned if pin else _make_host, source)


def _make_host(source: BatchSource, index: int) -> TensorDict:
    plan = source.plan(index)
    tensors = {name: torch.from_numpy(values) for name, values in source.gather(plan).items()}
    return TensorDict(tensors, batch_size=[len(plan.starts), plan.length])


def _make_pinned(source: BatchSource, index: int) -> TensorDict:
    plan = source.plan(index)
    layout = source.layout(len(plan.starts))
    slab = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
    source.gather(plan, layout.arrays(slab.numpy()))
    return TensorDict(slab_tensors(layout, slab), batch_size=[len(plan.starts), plan.length])


def slab_tensors(layout: BatchLayout, slab: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields of a batch as tensors in a slab (uint8 ``[layout.nbytes]``) on any device."""
    tensors = {}
    for name, (offset, shape, dtype) in layout.fields.items():
        nbytes = prod(shape) * dtype.itemsize
        tensors[name] = slab[offset : offset + nbytes].view(torch_dtype(dtype)).reshape(shape)
    return tensors


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass(frozen=True)
class InFlight:
    """A batch on its way to a device.

    Args:
        batch: Its tensors, which are not ready before ``event``.
        event: Recorded on the copying stream after the last of them; None where they are ready.
    """

    batch: TensorDict
    event: torch.cuda.Event | None


def device_maker(source: BatchSource, *, device: torch.device, pin: bool) -> Callable[[int], InFlight]:
    """The function from an index to a batch under way to ``device``.

    Bytes travel in their stored dtypes and are widened on the device. On CUDA copies run on a stream of their own,
    so that they overlap with the training step; ``hand_over`` makes the consumer's stream wait for them.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return partial(_make_on_device, source, device, pin, stream)


def _make_on_device(
    source: BatchSource, device: torch.device, pin: bool, stream: torch.cuda.Stream | None, index: int
) -> InFlight:
    plan = source.plan(index)
    layout = source.layout(len(plan.starts), widen=False)
    # Pinned memory comes from torch's caching host allocator, which takes a slab back only once the copies out of it
    # are done.
    slab = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pin)
    source.gather(plan, layout.arrays(slab.numpy()), widen=False)
    with torch.cuda.stream(stream):  # no effect for None
        moved = slab_tensors(layout, slab.to(device, non_blocking=pin))
        wide = {name: tensor.to(torch_dtype(np.dtype(source.spec[name].dtype))) for name, tensor in moved.items()}
        batch = TensorDict(wide, batch_size=[len(plan.starts), plan.length], device=device)
        event = None
        if stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    return InFlight(batch, event)


def hand_over(made: InFlight) -> TensorDict:
    """Give a batch to the caller, whose current stream waits for its copies; the host does not."""
    if made.event is not None:
        stream = torch.cuda.current_stream(made.batch.device)
        stream.wait_event(made.event)
        for tensor in made.batch.values():
            # The allocator must not reuse the memory before the caller's stream is done with it.
            tensor.record_stream(stream)
    return made.batch
