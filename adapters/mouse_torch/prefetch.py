"""PrefetchBatchifier for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from tensordict import TensorDict

from mouse_core import AugmentTokensConfig, DatasetStore, Snapshot
from mouse_core.prefetch import Loader, make_source
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.ensemble import ReplayBufferEnsemble
from mouse_core.replay.source import BufferSource
from mouse_core.sampling import Boundary, Weighting, WindowSampler
from mouse_torch.drawn import drawn_maker, keeps_tensors
from mouse_torch.placement import check_device, check_pin
from mouse_torch.tracing import untraced
from mouse_torch.transfer import device_maker, hand_over, host_maker
from mouse_torch.trees import as_state


@untraced("next_batch", "__iter__", "state_dict", "load_state_dict", "refresh", "close")
class PrefetchBatchifier(Loader[TensorDict]):
    """Batches as ``TensorDict[B, S]``, made ahead in threads, in index order.

    On the host tensors share the memory that was gathered into. With ``device="cuda"`` a batch is gathered into one
    pinned slab in its stored dtypes, copied ahead of time on a stream of its own, and widened on the device.

    Args:
        store: A store, of which a snapshot is taken (see ``refresh``), or a snapshot; or a replay buffer, whose batches
            are drawn ``prefetch`` calls before they are delivered (see ``staleness``).
        sequence_length: Steps in a window, S.
        batch_size: Windows in a whole batch, B, over all shards; by default 32. Of a replay buffer as in ``sample``.
        sampling: "random", "last", "sequential", "batch", or a ``WindowSampler``.
        prefetch: Batches to make ahead.
        num_workers: Threads that make them, and processes that decode encoded images; with 0 the calling thread does
            both. The stream is the same. (Of a replay buffer that keeps tensors the calling thread always does.)
        pin_memory: Whether host memory is pinned; None: where there is an accelerator.
        device: Where batches arrive; None: on the host, or where the replay buffer has them.
        seed, shard, dtypes, required_fields, fields, drop_last: See ``mouse_core.BatchSource``.
        augment: How batches are augmented, on the host, in the workers; see ``mouse_core.BatchSource``.
        views: With more than one, a batch is a tuple of so many; see ``mouse_core.BatchSource``.
        boundary: "episode" for windows that lie in one episode each, with a field ``mask``; see
            ``mouse_core.BatchSource``.
        weighting, pad: Of windows within episodes; see ``mouse_core.BatchSource``.

    Raises:
        ConfigError: ``pin_memory=True`` or a device that is not there; else see ``BatchSource``.
        MissingFieldError: See ``BatchSource``.
    """

    def __init__(
        self,
        store: DatasetStore | Snapshot | ReplayBuffer | ReplayBufferEnsemble,
        sequence_length: int = 64,
        batch_size: int | None = None,
        sampling: str | WindowSampler = "random",
        prefetch: int = 4,
        num_workers: int = 2,
        pin_memory: bool | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        *,
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
        required_fields: Sequence[str] = (),
        fields: Sequence[str] | None = None,
        drop_last: bool = True,
        augment: AugmentTokensConfig | None = None,
        views: int = 1,
        boundary: Boundary = "stream",
        weighting: Weighting = "step",
        pad: bool | float | None = None,
    ) -> None:
        if device is None and isinstance(store, ReplayBuffer | ReplayBufferEnsemble):
            of_buffer = getattr(store, "device", None)
            device = of_buffer if isinstance(of_buffer, torch.device) else None
        target = check_device(device)
        pin = check_pin(pin_memory)
        source = make_source(
            store,
            sequence_length,
            batch_size,
            sampling,
            seed,
            shard,
            dtypes=dtypes,
            required_fields=required_fields,
            fields=fields,
            drop_last=drop_last,
            augment=augment,
            views=views,
            boundary=boundary,
            weighting=weighting,
            pad=pad,
            ahead=prefetch,
        )
        if isinstance(source, BufferSource):
            # What is on a device already is made there by the stream that it was gathered on.
            super().__init__(
                source,
                None,
                maker=partial(drawn_maker, device=target, pin=pin),
                hand_over=hand_over,
                prefetch=prefetch,
                num_workers=0 if keeps_tensors(store) else num_workers,
            )
            return
        on_host = target.type == "cpu"
        super().__init__(
            source,
            store if isinstance(store, DatasetStore) else None,
            maker=partial(host_maker, pin=pin) if on_host else partial(device_maker, device=target, pin=pin),
            hand_over=None if on_host else hand_over,
            prefetch=prefetch,
            num_workers=num_workers,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; of a replay buffer, with what was drawn ahead of time, in tensors and plain values.

        ``torch.save`` writes it and ``torch.load`` reads it with their defaults.
        """
        state: dict[str, Any] = as_state(super().state_dict())
        return state
