"""PrefetchBatchifier for JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core import DatasetStore, Snapshot
from mouse_core.augment import AugmentTokensConfig
from mouse_core.prefetch import Loader, make_source
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.ensemble import ReplayBufferEnsemble
from mouse_core.replay.source import BufferSource
from mouse_core.sampling import Boundary, Weighting, WindowSampler
from mouse_jax.dtypes import replaced_dtypes
from mouse_jax.pipeline import GrainPrefetcher
from mouse_jax.placement import find_placement, find_target
from mouse_jax.transfer import array_maker, drawn_maker, thread_settings


class PrefetchBatchifier(Loader[dict[str, jax.Array]]):
    """Batches as dicts of ``jax.Array`` ``[B, S, ...]``, made ahead in a grain pipeline, in index order.

    Without x64 (``jax_enable_x64``) 64-bit fields are delivered as ``REPLACED_DTYPES`` says, and ``spec`` says so
    beforehand; a value that does not fit is an error. What holds is whether x64 is enabled where the loader is made.

    At most ``prefetch + 1`` batches exist in the pipeline at a time, and a batch once delivered never changes.

    Args:
        store: A store, of which a snapshot is taken (see ``refresh``), or a snapshot; or a replay buffer, whose batches
            are drawn ``prefetch`` calls before they are delivered (see ``staleness``).
        sequence_length: Steps in a window, S.
        batch_size: Windows in a whole batch, B, over all shards and devices; by default 32. Of a replay buffer as in
            ``sample``.
        sampling: "random", "last", "sequential", "batch", or a ``WindowSampler``.
        prefetch: Batches to make ahead.
        num_workers: Threads that make them and put them on the device (half of ``prefetch`` at most), and processes
            that decode encoded images; with 0 the calling thread does both. The stream is the same.
        pin_memory: Ignored here.
        device: Where batches arrive: a ``jax.Device``, a platform ("cpu", "gpu"), or both with a number ("gpu:1");
            None: JAX's default device.
        seed, shard, dtypes, required_fields, fields, drop_last, augment, views: See ``mouse_core.BatchSource``.
        boundary: "episode" for windows that lie in one episode each, with a field ``mask``; see
            ``mouse_core.BatchSource``.
        weighting, pad: Of windows within episodes; see ``mouse_core.BatchSource``.
        sharding: How a whole batch is laid out over the devices of this process or of several, instead of on one
            device; say, ``NamedSharding(mesh, P("data"))``. Each process gathers only the rows that its devices hold,
            and ``source`` is that of the whole batch.

    Raises:
        ConfigError: A device that is not there; a sharding that does not divide a batch evenly or goes with a device
            or a shard; else see ``BatchSource``.
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
        device: jax.Device | str | None = None,
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
        sharding: Sharding | None = None,
    ) -> None:
        source = make_source(
            store,
            sequence_length,
            batch_size,
            sampling,
            seed,
            shard,
            dtypes=dtypes,
            replace_dtypes=replaced_dtypes(),
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
            of_buffer = getattr(store, "device", None)
            own = of_buffer if isinstance(of_buffer, jax.Device | Sharding) else None
            target = own if device is None and sharding is None else find_target(device, sharding)
            # Draws are made in the caller's thread, batch by batch; grain would ask for one that is not drawn yet.
            super().__init__(
                source,
                None,
                maker=partial(drawn_maker, target=target, **thread_settings()),
                prefetch=prefetch,
                num_workers=num_workers,
            )
            return
        placement = find_placement(device, sharding, source)
        super().__init__(
            source,
            store if isinstance(store, DatasetStore) else None,
            maker=partial(array_maker, placement=placement, **thread_settings()),
            prefetcher=GrainPrefetcher,
            prefetch=prefetch,
            num_workers=num_workers,
        )
