"""PrefetchBatchifier, which delivers batches as TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from mouse_core import BatchSource, ConfigError
from mouse_core.dtypes import is_number
from mouse_core.nested import flatten, map_tree
from mouse_core.prefetch import Batchifier, Delivery, Staged
from mouse_core.replay.source import BufferSource
from mouse_torch.placement import check_device, check_pin, untraced
from mouse_torch.transfer import (
    InFlight,
    batch_dims,
    device_maker,
    hand_over,
    host_maker,
    in_slab,
    slab_tensors,
    stream_of,
    under_way,
)
from mouse_torch.trees import as_state, tensor_dict


def whole_maker(source: Any, *, device: torch.device, pin: bool) -> Staged:
    """Return a function that takes the index of a batch and creates the batch; the batch is on the host, or is being
    copied to ``device``.

    Args:
        source: A ``BufferSource``, or a custom source.
        device: The device of batches.
        pin: Whether batches are copied through pinned memory.
    """
    return Staged(partial(_gathered, source), partial(_placed, source, device, pin, stream_of(device)))


def _gathered(source: Any, index: int) -> Any:
    return source.buffer.batch_of(source.drawn(index)) if isinstance(source, BufferSource) else source[index]


def _placed(source: Any, device: torch.device, pin: bool, stream: torch.cuda.Stream | None, batch: Any) -> InFlight:
    if isinstance(source, BufferSource):
        return _moved(batch, device, pin, stream, size=None)
    views = batch if isinstance(batch, tuple) else (batch,)
    sizes = [next(iter(view.values())).shape[: batch_dims(source.spec)] for view in views]
    moved = [_moved(view, device, pin, stream, size=size) for view, size in zip(views, sizes, strict=True)]
    return InFlight(tuple(made.views[0] for made in moved), moved[-1].event)


def _moved(
    batch: Any, device: torch.device, pin: bool, stream: torch.cuda.Stream | None, *, size: Sequence[int] | None
) -> InFlight:
    """Return a batch that is on the host or being copied to a device, with the batch size ``size``; see
    ``tensor_dict``.
    """
    numbers = {
        str(place): leaf
        for place, leaf in enumerate(flatten(batch).values())
        if isinstance(leaf, np.ndarray) and is_number(leaf.dtype)
    }
    if not numbers or not (pin or stream is not None):  # no copy is needed, or memory is shared
        return InFlight((tensor_dict(batch, device, size=size),), None)
    layout, slab = in_slab(numbers, pin=pin)

    def views() -> Iterator[TensorDict]:
        moved = slab_tensors(layout, slab if stream is None else slab.to(device, non_blocking=pin))
        yield tensor_dict(_with_tensors(batch, moved), device, size=size)

    return under_way(views, stream)


def _with_tensors(batch: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the batch with some leaves replaced; ``tensors`` is a dict from the index of a leaf to its new value."""
    places = iter(range(len(flatten(batch))))
    return map_tree(lambda leaf: tensors.get(str(next(places)), leaf), batch)


def keeps_tensors(buffer: Any) -> bool:
    """Whether a buffer, or any member of an ensemble, draws its batches as tensors."""
    own = getattr(buffer, "keeps_tensors", False)
    return bool(own) or any(keeps_tensors(member) for member in getattr(buffer, "buffers", ()))


@untraced("next_batch", "__iter__", "state_dict", "load_state_dict", "refresh", "close")
class PrefetchBatchifier(Batchifier[TensorDict]):
    """Delivers batches in order as ``TensorDict[B, S]``, or ``TensorDict[B]`` if batches have no axis of steps; threads
    prefetch the batches.

    Packed batches have the batch size ``[]``, because ``cu_seqlens`` and the other fields have no axis in common;
    ``as_nested`` converts the fields to nested tensors.

    On the host, tensors share the memory into which rows were gathered. With ``device="cuda"``, a batch is gathered
    into one block of pinned memory in the stored dtypes, copied in advance on a separate stream, and converted to the
    delivered dtypes on the device.

    For the arguments of all loaders, see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: Number of threads; see ``Batchifier``. If a replay buffer stores its rows as tensors, the calling
            thread always creates the batches.
        pin_memory: Whether to pin host memory; None: memory is pinned if there is an accelerator. If there is no
            accelerator, no memory is pinned, and True causes a warning.
        device: A ``torch.device`` or its name; None: the host, or the device of the replay buffer's batches.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.prefetch.Batchifier``.
        MissingFieldError: See ``mouse_core.prefetch.Batchifier``.
    """

    def delivery(self, source: Any, *, device: Any, pin_memory: bool | None, sharding: Any) -> Delivery[TensorDict]:
        """Return the converter of batches to TensorDicts on the host or a device; see
        ``mouse_core.prefetch.Batchifier``.
        """
        if sharding is not None:
            raise ConfigError(f"sharding: expected None, found {sharding!r}; only mouse_jax supports sharding")
        buffer = source.buffer if isinstance(source, BufferSource) else None
        of_buffer = getattr(buffer, "device", None)
        by_default = of_buffer if isinstance(of_buffer, torch.device) else None
        target = check_device(by_default if device is None else device)
        pin = check_pin(pin_memory)
        if not isinstance(source, BatchSource):
            # Batches on a device are created on the stream that gathered them.
            in_caller = buffer is not None and keeps_tensors(buffer)
            return Delivery(partial(whole_maker, device=target, pin=pin), hand_over, in_caller=in_caller)
        if target.type == "cpu":
            return Delivery(partial(host_maker, pin=pin))
        return Delivery(partial(device_maker, device=target, pin=pin), hand_over)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as tensors and plain values; for a replay buffer, also the prefetched
        batches.

        ``torch.save`` and ``torch.load`` can write and read the state with their default options.
        """
        state: dict[str, Any] = as_state(super().state_dict())
        return state
