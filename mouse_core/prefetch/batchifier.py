"""PrefetchBatchifier, which creates the source of its batches from arguments, and computes batches ahead of time in
index order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from mouse_core.batches import Batch
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError
from mouse_core.prefetch.loader import Loader
from mouse_core.prefetch.prefetcher import Delivery, Staged
from mouse_core.prefetch.source import RecastSource, ShardSource, Source, checked_source
from mouse_core.sampling.plan import Sampling
from mouse_core.spec import check_count
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.ranks import Shard
    from mouse_core.replay.buffer import ReplayBuffer
    from mouse_core.replay.ensemble import ReplayBufferEnsemble

T = TypeVar("T")

_WHOLE = (0, 1)
# Arguments that determine batches, with a loader's defaults; other arguments determine the delivery.
_OF_BATCHES: dict[str, Any] = {
    "sequence_length": None,
    "batch_size": None,
    "sampling": "random",
    "seed": 0,
    "shard": None,
    **(BatchSource.__init__.__kwdefaults__ or {}),
}
del _OF_BATCHES["epoch_start"], _OF_BATCHES["replace_dtypes"]


class Batchifier(Loader[T]):
    """A loader of batches from a store, a replay buffer or a source; threads compute batches ahead, in index order.

    The loaders of all frameworks derive from this class and have the same arguments. The class of a framework overrides
    ``deliver``, which converts a batch of NumPy arrays. If batches of the framework are not made from NumPy arrays, the
    class overrides ``delivery`` instead.

    Args:
        store: A store, from which the loader takes a snapshot (see ``refresh``), or a snapshot; a replay buffer, from
            which each batch is drawn ``prefetch`` calls before the batch is delivered; or a ``Source``.
        sequence_length: Number of steps in a window, S; by default 64. If ``windows`` is given, the default is batches
            ``[B, ...]`` without an axis of steps.
        batch_size: Number of windows in a batch, B, over all shards and devices; by default 32. For a replay buffer,
            see ``ReplayBuffer.sample``.
        sampling: The starts of windows; see ``mouse_core.BatchSource``.
        prefetch: Number of batches to compute ahead.
        num_workers: Number of threads that compute batches, and of processes that decode images; with 0, the calling
            thread does both. The stream does not depend on this number.
        pin_memory: Whether host memory is pinned; None: host memory is pinned if an accelerator exists. Only the torch
            loader uses ``pin_memory``.
        device: The device of the batches, in the framework's form; None: the framework's default, or the device of the
            replay buffer.
        seed: In ``[0, 2**64)``.
        shard: See ``mouse_core.BatchSource``; None: complete batches, with a warning if several processes exist. With a
            user-defined source, each process computes complete batches and keeps only the rows of its shard.
        sharding: In JAX, the layout of a batch over devices; None in other frameworks.
        digest: Whether the loader computes a digest of the delivered batches; see ``Loader.digest``. By default, no
            digest is computed, because it takes time in the thread that computes batches: 35 us of processor time for a
            batch of 344 KB, and up to 160 us between training steps.

        **options: The other arguments of ``mouse_core.BatchSource``, except ``epoch_start`` and ``replace_dtypes``:
            ``dtypes``, ``required_fields``, ``fields``, ``drop_last``, ``augment``, ``views``, ``boundary``,
            ``weighting``, ``pad``, ``uneven``, ``windows``, ``normalize``, ``map``, ``lengths``, ``packed``,
            ``layout``.

    Raises:
        TypeError: An unknown option.
        ConfigError: The framework does not support an option, or the replay buffer or source defines the option; see
            also ``mouse_core.BatchSource``.
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
        sharding: Any = None,
        digest: bool = False,
        **options: Any,
    ) -> None:
        unknown = [name for name in options if name not in _OF_BATCHES]
        if unknown:
            raise TypeError(f"{type(self).__name__}: expected options among {list(_OF_BATCHES)}, found {unknown}")
        if isinstance(shard, str) and shard == "auto":
            from mouse_core.ranks import find_ranks

            # A sharding over several processes determines the rows of each process itself.
            shard = find_ranks(self.framework) if getattr(sharding, "is_fully_addressable", True) else (0, 1)
        given = {"sequence_length": sequence_length, "batch_size": batch_size, "sampling": sampling}
        asked = {**_OF_BATCHES, **given, "seed": seed, "shard": shard, **options}
        source = _source_of(store, asked, prefetch, self.replaced_dtypes, sharding)
        super().__init__(
            source,
            store if isinstance(store, Store) else None,
            delivery=self.delivery(source, device=device, pin_memory=pin_memory, sharding=sharding),
            prefetch=prefetch,
            num_workers=num_workers,
            digest=digest,
        )

    @property
    def replaced_dtypes(self) -> Mapping[Any, npt.DTypeLike]:
        """The dtypes that the framework lacks, with their replacements. A subclass can override this property with a
        class attribute.

        The dtypes in ``spec`` are replaced already. A value that does not fit in the replacement dtype raises
        DataError.
        """
        return {}

    @staticmethod
    def deliver(batch: Batch) -> Any:
        """Convert a batch ``{field: ndarray [B, S, ...]}`` to the framework; the result can share the arrays' memory.

        A batch with several views is converted view by view. Worker threads call this method.
        """
        return batch

    def delivery(self, source: Any, *, device: Any, pin_memory: bool | None, sharding: Any) -> Delivery[T]:
        """Return the ``Delivery``, which determines how batches are computed and delivered; by default, ``deliver``
        converts each batch on the host.

        Args:
            source: A ``BatchSource``, a ``BufferSource``, or a user-defined source.
            device, pin_memory, sharding: The loader's arguments.

        Raises:
            ConfigError: The framework does not support an argument.
        """
        if device not in (None, "cpu"):
            raise ConfigError(f"device: expected None or 'cpu' for NumPy batches, found {device!r}")
        if sharding is not None:
            raise ConfigError(f"sharding: expected None, found {sharding!r}; only mouse_jax supports it")
        return Delivery(partial(_maker, type(self).deliver))


class PrefetchBatchifier(Batchifier[Batch]):
    """A loader of batches ``{field: ndarray [B, S, ...]}`` of NumPy arrays, which threads compute ahead in index order.

    ``mouse_torch`` and ``mouse_jax`` each have a class with the same name and the same arguments for their framework.
    Here ``device`` is None or "cpu", ``pin_memory`` is ignored, and ``sharding`` is None; see
    ``mouse_core.prefetch.Batchifier`` for all arguments.

    Raises:
        ConfigError, MissingFieldError: See ``mouse_core.prefetch.Batchifier``.

    Example:
        >>> with PrefetchBatchifier(store, sequence_length=64, batch_size=32) as loader:  # doctest: +SKIP
        ...     batch = loader.next_batch()
    """


def _maker(deliver: Callable[[Batch], Any], source: Any) -> Callable[[int], Any]:
    """Return a function that takes the index of a batch, and returns the batch in the framework's form."""
    gather = partial(getitem, source)
    return gather if deliver is Batchifier.deliver else Staged(gather, partial(_delivered, deliver))


def _delivered(deliver: Callable[[Batch], Any], batch: Any) -> Any:
    return tuple(map(deliver, batch)) if isinstance(batch, tuple) else deliver(batch)


def _source_of(
    store: Any, asked: Mapping[str, Any], prefetch: int, replace_dtypes: Mapping[Any, npt.DTypeLike], sharding: Any
) -> Any:
    """Create or adapt the source of a loader's batches.

    Args:
        store: A store or snapshot, for which a ``BatchSource`` is created; a replay buffer, for which a
            ``BufferSource`` draws ``prefetch`` batches ahead; or a source, which is wrapped to deliver one shard or
            other dtypes if requested.
        asked: The loader's arguments that determine batches.
        prefetch, sharding: The loader's arguments.
        replace_dtypes: Dtypes that the framework lacks, with their replacements.

    Raises:
        ConfigError: A replay buffer or a source does not support an argument; for stores see ``BatchSource``.
    """
    shard, size, is_local = asked["shard"], asked["batch_size"], getattr(sharding, "is_fully_addressable", True)
    if isinstance(store, Store | Snapshot):
        size = 32 if size is None else size
        if shard is None and is_local:
            _warn_of_others(size)
        shard = _WHOLE if shard is None else shard
        return BatchSource(store, **{**asked, "batch_size": size, "shard": shard}, replace_dtypes=replace_dtypes)
    if not isinstance(store, Source):
        # Loaded on demand.
        from mouse_core.replay.buffer import BaseBuffer
        from mouse_core.replay.source import BufferSource

        if not isinstance(store, BaseBuffer):
            return checked_source(store)
        _refuse(asked, "a replay buffer, which has its own sampler, seed and transforms", "batch_size")
        return BufferSource(store, size, check_count("prefetch", prefetch, lowest=1))
    _refuse(asked, "a source, which determines its batches itself", "shard", "uneven")
    cut = dict[str, Any]()
    if shard not in (None, _WHOLE) or asked["uneven"] != "refuse":
        if sharding is not None:
            raise ConfigError(f"shard, uneven: cannot be passed together with sharding= and a source, found {shard!r}")
        cut = {"shard": _WHOLE if shard is None else shard}
        cut |= {} if asked["uneven"] == "refuse" else {"uneven": asked["uneven"]}
    if isinstance(store, BatchSource):
        if cut and store.shard != _WHOLE:
            raise ConfigError(f"shard: expected a source without a shard, found a source with shard {store.shard}")
        cut |= {"replace_dtypes": replace_dtypes} if replace_dtypes else {}
        return store.with_options(**cut) if cut else store
    if shard is None and hasattr(store, "members") and is_local:
        _warn_of_others(getattr(store, "batch_size", 0))  # a mixture needs complete batches of its members
    whole = RecastSource(checked_source(store), replace_dtypes) if replace_dtypes else checked_source(store)
    return ShardSource(whole, **cut) if cut else whole


def _refuse(asked: Mapping[str, Any], what: str, *but: str) -> None:
    """Raise ConfigError if ``asked`` has a value for an argument that ``what`` does not support. The arguments in
    ``but`` are supported, and all others are not.
    """
    for name, value in asked.items():
        is_default = value in (_OF_BATCHES[name], None) or (name == "shard" and value == _WHOLE)
        if name not in but and not is_default:
            raise ConfigError(
                f"{name}: expected the default, because this option cannot be used with {what}, found {value!r}"
            )


def _warn_of_others(size: int) -> None:
    """Warn, if several processes exist, that each process gets complete batches."""
    from mouse_core.ranks import find_ranks  # loaded where a loader is made

    try:
        found = find_ranks()
    except ConfigError:
        return  # incomplete variables of torchrun do not show that there are other processes
    if found.count > 1:
        warnings.warn(
            f"shard: each of {found.count} processes ({found.found_in}) gets complete batches of {size} windows, so "
            f"a step uses {found.count} times as many windows, and equal windows if the seeds are equal; shard='auto' "
            "gives each process its share, and shard=(0, 1) accepts complete batches without this warning",
            UserWarning,
            stacklevel=4,
        )
