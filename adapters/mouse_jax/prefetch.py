"""PrefetchBatchifier for JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from mouse_core import BatchSource, ConfigError
from mouse_core.prefetch import Batchifier, Delivery, LoaderOptions
from mouse_core.ranks import find_ranks
from mouse_core.replay.source import BufferSource
from mouse_jax.dtypes import replaced_dtypes
from mouse_jax.pipeline import GrainPrefetcher
from mouse_jax.placement import find_placement, find_target
from mouse_jax.transfer import array_maker, thread_settings, whole_maker


class PrefetchBatchifier(Batchifier[dict[str, jax.Array]]):
    """Batches as dicts of ``jax.Array`` ``[B, S, ...]``, made ahead in a grain pipeline, in index order.

    Without x64 (``jax_enable_x64``) 64-bit fields are delivered as ``REPLACED_DTYPES`` says, and ``spec`` says so
    beforehand; a value that does not fit is an error. What holds is whether x64 is enabled where the loader is made.

    At most ``prefetch + 1`` batches exist in the pipeline at a time, and a batch once delivered never changes.

    The other arguments are those of every loader; see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: Threads that make batches and put them on the device (half of ``prefetch`` at most), and processes
            that decode encoded images; with 0 the calling thread does both. The stream is the same.
        pin_memory: Ignored here.
        device: A ``jax.Device``, a platform ("cpu", "gpu"), or both with a number ("gpu:1"); None: JAX's default
            device, or where the replay buffer has its batches.
        sharding: How a whole batch is laid out over the devices of this process or of several, instead of on one
            device; say, ``NamedSharding(mesh, P("data"))``. Each process gathers only the rows that its devices hold,
            and ``source`` is that of the whole batch. The processes see that they agree, as with ``shard="auto"``,
            which goes with a sharding.

    Raises:
        ConfigError: A device that is not there; a sharding that does not divide a batch evenly (which ``uneven="pad"``
            mends) or goes with a device or a shard; else see ``mouse_core.prefetch.Batchifier``.
        MissingFieldError: See ``mouse_core.prefetch.Batchifier``.
    """

    framework = "jax"

    @property
    def replaced_dtypes(self) -> Mapping[np.dtype[Any], np.dtype[Any]]:
        """Dtypes that JAX does not hold here and now, and what is delivered instead."""
        return replaced_dtypes()

    def delivery(self, source: Any, options: LoaderOptions) -> Delivery[dict[str, jax.Array]]:
        """How JAX's arrays are made on a device or on several; see ``mouse_core.prefetch.Batchifier``."""
        device, sharding = options.device, options.sharding
        if isinstance(source, BatchSource):
            placement = find_placement(device, sharding, source)
            maker = partial(array_maker, placement=placement, **thread_settings())
            ranks = None if sharding is None or sharding.is_fully_addressable else find_ranks(self.framework)
            return Delivery(maker, prefetcher=GrainPrefetcher, ranks=ranks)
        if isinstance(source, BufferSource) and device is None and sharding is None:
            of_buffer = getattr(source.buffer, "device", None)
            target = of_buffer if isinstance(of_buffer, jax.Device | Sharding) else None
        else:
            target = find_target(device, sharding)
        whole = partial(whole_maker, target=target, **thread_settings())
        if isinstance(source, BufferSource):
            # Draws are made in the caller's thread, batch by batch; grain would ask for one that is not drawn yet.
            return Delivery(whole)
        if isinstance(target, Sharding) and not target.is_fully_addressable:
            raise ConfigError(
                "sharding: expected devices of this process for a source of whole batches, found some of others"
            )
        return Delivery(whole, prefetcher=GrainPrefetcher)
