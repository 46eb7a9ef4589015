"""PrefetchBatchifier for PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from mouse_core import BatchSource, ConfigError
from mouse_core.prefetch import Batchifier, Delivery, LoaderOptions
from mouse_core.replay.source import BufferSource
from mouse_torch.drawn import keeps_tensors, whole_maker
from mouse_torch.placement import check_device, check_pin
from mouse_torch.tracing import untraced
from mouse_torch.transfer import device_maker, hand_over, host_maker
from mouse_torch.trees import as_state


@untraced("next_batch", "__iter__", "state_dict", "load_state_dict", "refresh", "close")
class PrefetchBatchifier(Batchifier[TensorDict]):
    """Batches as ``TensorDict[B, S]``, made ahead in threads, in index order; ``[B]`` where there are no steps.

    Packed batches have the batch size ``[]``, as ``cu_seqlens`` and fields have no axis in common; ``as_nested`` makes
    nested tensors of them.

    On the host tensors share the memory that was gathered into. With ``device="cuda"`` a batch is gathered into one
    pinned slab in its stored dtypes, copied ahead of time on a stream of its own, and widened on the device.

    The other arguments are those of every loader; see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: As everywhere; of a replay buffer that keeps tensors the calling thread always makes the batches.
        pin_memory: Whether host memory is pinned; None: where there is an accelerator. Without one, nothing is pinned,
            and True warns.
        device: A ``torch.device`` or its name; None: on the host, or where the replay buffer has its batches.

    Raises:
        ConfigError: A device that is not there; else see ``mouse_core.prefetch.Batchifier``.
        MissingFieldError: See ``mouse_core.prefetch.Batchifier``.
    """

    def delivery(self, source: Any, options: LoaderOptions) -> Delivery[TensorDict]:
        """How TensorDicts are made on the host or a device; see ``mouse_core.prefetch.Batchifier``."""
        if options.sharding is not None:
            raise ConfigError(f"sharding: expected None, found {options.sharding!r}; mouse_jax lays batches out")
        buffer = source.buffer if isinstance(source, BufferSource) else None
        of_buffer = getattr(buffer, "device", None)
        by_default = of_buffer if isinstance(of_buffer, torch.device) else None
        target = check_device(by_default if options.device is None else options.device)
        pin = check_pin(options.pin_memory)
        if not isinstance(source, BatchSource):
            # What is on a device already is made there by the stream that it was gathered on.
            in_caller = buffer is not None and keeps_tensors(buffer)
            return Delivery(partial(whole_maker, device=target, pin=pin), hand_over, in_caller=in_caller)
        if target.type == "cpu":
            return Delivery(partial(host_maker, pin=pin))
        return Delivery(partial(device_maker, device=target, pin=pin), hand_over)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; of a replay buffer, with what was drawn ahead of time, in tensors and plain values.

        ``torch.save`` writes it and ``torch.load`` reads it with their defaults.
        """
        state: dict[str, Any] = as_state(super().state_dict())
        return state
