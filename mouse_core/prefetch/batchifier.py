"""PrefetchBatchifier: batches in index order, computed ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mouse_core.augment.config import AugmentTokensConfig
from mouse_core.batches.source import Batch
from mouse_core.errors import ConfigError
from mouse_core.prefetch._loader import Loader, make_source
from mouse_core.sampling.episodes import Boundary, Weighting
from mouse_core.sampling.plan import WindowSampler
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.replay.buffer import ReplayBuffer
    from mouse_core.replay.ensemble import ReplayBufferEnsemble

__all__ = ["Loader", "PrefetchBatchifier", "make_source", "numpy_maker"]


class PrefetchBatchifier(Loader[Batch]):
    """Batches ``{field: ndarray [B, S, ...]}`` of NumPy arrays, computed ahead in threads, in index order.

    ``mouse_torch`` and ``mouse_jax`` have a class of the same name and arguments for their frameworks.

    Args:
        store: A store, of which a snapshot is taken (see ``refresh``), or a snapshot; or a replay buffer, whose batches
            are drawn ``prefetch`` calls before they are delivered (see ``staleness``).
        sequence_length: Steps in a window, S.
        batch_size: Windows in a whole batch, B, over all shards; by default 32. Of a replay buffer as in ``sample``.
        sampling: "random", "last", "sequential", "batch", or a ``WindowSampler``.
        prefetch: Batches to compute ahead.
        num_workers: Threads that compute them, and processes that decode encoded images; with 0 the calling thread does
            both. The stream is the same.
        pin_memory: Ignored here.
        device: None or "cpu".
        seed, shard, dtypes, required_fields, fields, drop_last: See ``BatchSource``.
        augment: How batches are augmented, in the workers; see ``BatchSource``.
        views: With more than one, a batch is a tuple of so many; see ``BatchSource``.
        boundary: "episode" for windows that lie in one episode each, with a field ``mask``; see ``BatchSource``.
        weighting, pad: Of windows within episodes; see ``BatchSource``.

    Raises:
        ConfigError, MissingFieldError: See ``BatchSource``.

    Example:
        >>> with PrefetchBatchifier(store, sequence_length=64, batch_size=32) as loader:  # doctest: +SKIP
        ...     batch = loader.next_batch()
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
        device: str | None = None,
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
        if device not in (None, "cpu"):
            raise ConfigError(f"device: expected None or 'cpu' for NumPy batches, found {device!r}")
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
        super().__init__(
            source,
            store if isinstance(store, DatasetStore) else None,
            maker=numpy_maker,
            prefetch=prefetch,
            num_workers=num_workers,
        )


def numpy_maker(source: Any) -> Callable[[int], Batch]:
    """The function from an index to a batch of NumPy arrays; ``source`` is a ``BatchSource`` or a ``BufferSource``."""
    return partial(type(source).__getitem__, source)
