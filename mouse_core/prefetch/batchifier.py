"""PrefetchBatchifier: batches in index order, computed ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from mouse_core.batches import Batch
from mouse_core.errors import ConfigError
from mouse_core.prefetch.loader import Loader
from mouse_core.prefetch.options import LoaderOptions
from mouse_core.prefetch.prefetcher import Delivery, Staged
from mouse_core.prefetch.source import Source
from mouse_core.sampling.plan import Sampling
from mouse_core.sampling.windows import Boundary, Weighting
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.batches import Map
    from mouse_core.ranks import Shard, Uneven
    from mouse_core.replay.buffer import ReplayBuffer
    from mouse_core.replay.ensemble import ReplayBufferEnsemble
    from mouse_core.sampling.offsets import Seconds
    from mouse_core.statistics.normalizer import Normalization, Normalizer

T = TypeVar("T")


class Batchifier(Loader[T]):
    """Batches of a store, a replay buffer or a source, made ahead in threads, in index order.

    The loaders of all frameworks are one, and take the same arguments. A framework's own says what becomes of a batch:
    it overrides ``deliver``, or, where batches go elsewhere than through NumPy arrays, ``delivery``.

    Args:
        store: A store, of which a snapshot is taken (see ``refresh``), or a snapshot; a replay buffer, whose batches
            are drawn ``prefetch`` calls before they are delivered (see ``staleness``); or a ``Source``.
        sequence_length: Steps in a window, S; by default 64, and none with ``windows``, whose batches are ``[B, ...]``.
        batch_size: Windows in a whole batch, B, over all shards and devices; by default 32. Of a replay buffer as in
            ``sample``.
        sampling: "random", "last", "sequential", "batch", "blocks", ``sampling.Blocks``, or a ``WindowSampler``.
        prefetch: Batches to make ahead.
        num_workers: Threads that make them, and processes that decode encoded images; with 0 the calling thread does
            both. The stream is the same.
        pin_memory: Whether host memory is pinned; None: where there is an accelerator. Ignored but in torch.
        device: Where batches arrive, as the framework says it; None: its default, or where the replay buffer has them.
        seed, dtypes, required_fields, fields, drop_last: See ``mouse_core.BatchSource``.
        shard: See ``mouse_core.BatchSource``; None: whole batches, with a warning where there are several processes.
            Of a source of one's own, whose batches are whole, each process makes these and keeps its rows.
        augment: How batches are augmented, in the workers; see ``mouse_core.BatchSource``.
        views: With more than one, a batch is a tuple of so many; see ``mouse_core.BatchSource``.
        boundary: "episode", "task" or a ``sampling.Column`` for windows that lie in one, with a field ``mask``; see
            ``mouse_core.BatchSource``.
        weighting, pad: Of windows within episodes; see ``mouse_core.BatchSource``.
        uneven: "pad" for batches that shards need not divide, with a field ``mask``; see ``mouse_core.BatchSource``.
        windows: Which rows around an anchor fields deliver, by field; see ``mouse_core.BatchSource``.
        normalize: How fields are normalised, by field, in the workers; see ``mouse_core.BatchSource``.
        map: A function of one's own, in the workers; see ``mouse_core.Map``.
        lengths: How many steps windows have, where that is drawn; see ``mouse_core.BatchSource``.
        packed: Whether windows lie one behind the other, without padding; see ``mouse_core.BatchSource``.
        sharding: How a whole batch is laid out over devices, in JAX; None elsewhere.
        digest: Whether a digest of what is delivered runs along; see ``Loader.digest``. Off by default: of 344 KB it
            takes 35 us of a processor, and up to 160 between the steps of a training, in the thread that makes batches.

    Raises:
        ConfigError: An option that the framework lacks, or that a replay buffer or a source has of its own; else see
            ``mouse_core.BatchSource``.
        MissingFieldError: See ``mouse_core.BatchSource``.
    """

    def __init__(
        self,
        store: Store | Snapshot | ReplayBuffer | ReplayBufferEnsemble | Source,
        sequence_length: int | None = None,
        batch_size: int | None = None,
        sampling: Sampling = "random",
        prefetch: int = 4,
        num_workers: int = 2,
        pin_memory: bool | None = None,
        device: Any = None,
        seed: int = 0,
        shard: Shard | None = None,
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
        uneven: Uneven = "refuse",
        windows: Mapping[str, Iterable[int] | Seconds] | None = None,
        normalize: Mapping[str, Normalization] | Normalizer | None = None,
        map: Map | None = None,
        lengths: Iterable[int] | None = None,
        packed: bool | int = False,
        sharding: Any = None,
        digest: bool = False,
    ) -> None:
        if isinstance(shard, str) and shard == "auto":
            from mouse_core.ranks import find_ranks

            # A sharding over several processes says itself which of them needs what.
            shard = find_ranks(self.framework) if getattr(sharding, "is_fully_addressable", True) else (0, 1)
        given = locals()
        options = LoaderOptions(**{option.name: given[option.name] for option in dataclasses.fields(LoaderOptions)})
        source = options.source(store, replace_dtypes=self.replaced_dtypes)
        super().__init__(
            source,
            store if isinstance(store, Store) else None,
            delivery=self.delivery(source, options),
            prefetch=prefetch,
            num_workers=num_workers,
            digest=digest,
        )

    @property
    def replaced_dtypes(self) -> Mapping[Any, npt.DTypeLike]:
        """Dtypes that the framework cannot hold, and what is delivered instead; a class attribute will do.

        ``spec`` says so beforehand, and a value that does not fit is an error.
        """
        return {}

    @staticmethod
    def deliver(batch: Batch) -> Any:
        """What a framework makes of a batch ``{field: ndarray [B, S, ...]}``, whose arrays it may keep.

        Of a batch in several views it is asked for each. It runs in the worker threads.
        """
        return batch

    def delivery(self, source: Any, options: LoaderOptions) -> Delivery[T]:
        """How batches are made; by default ``deliver`` is called with those of the source, and they are on the host.

        Args:
            source: A ``BatchSource``, a ``BufferSource``, or a source of somebody's own.
            options: All arguments but ``store``.

        Raises:
            ConfigError: Options that the framework lacks.
        """
        if options.device not in (None, "cpu"):
            raise ConfigError(f"device: expected None or 'cpu' for NumPy batches, found {options.device!r}")
        if options.sharding is not None:
            raise ConfigError(f"sharding: expected None, found {options.sharding!r}; mouse_jax lays batches out")
        return Delivery(partial(_maker, type(self).deliver))


class PrefetchBatchifier(Batchifier[Batch]):
    """Batches ``{field: ndarray [B, S, ...]}`` of NumPy arrays, computed ahead in threads, in index order.

    ``mouse_torch`` and ``mouse_jax`` have a class of the same name and arguments for their frameworks. Here ``device``
    is None or "cpu", ``pin_memory`` is ignored, and ``sharding`` is None; ``mouse_core.prefetch.Batchifier`` says what
    the arguments are.

    Raises:
        ConfigError, MissingFieldError: See ``mouse_core.prefetch.Batchifier``.

    Example:
        >>> with PrefetchBatchifier(store, sequence_length=64, batch_size=32) as loader:  # doctest: +SKIP
        ...     batch = loader.next_batch()
    """


def _maker(deliver: Callable[[Batch], Any], source: Any) -> Callable[[int], Any]:
    """The function from an index to a batch of a source, as a framework has it."""
    gather = partial(getitem, source)
    return gather if deliver is Batchifier.deliver else Staged(gather, partial(_delivered, deliver))


def _delivered(deliver: Callable[[Batch], Any], batch: Any) -> Any:
    return tuple(map(deliver, batch)) if isinstance(batch, tuple) else deliver(batch)
