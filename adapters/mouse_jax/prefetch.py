"""PrefetchBatchifier, which delivers batches as JAX arrays, and ``to_grain``, which delivers them to grain."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core import BatchSource, ConfigError
from mouse_core.batches import Batch
from mouse_core.prefetch import Batchifier, Delivery, Source, Staged
from mouse_core.ranks import find_ranks
from mouse_core.replay.source import BufferSource
from mouse_jax.dtypes import replaced_dtypes, x64_enabled
from mouse_jax.placement import Placement, find_placement, find_target
from mouse_jax.trees import as_jax, narrowed

if TYPE_CHECKING:
    import grain

Arrays = dict[str, npt.NDArray[Any]]


def array_maker(source: BatchSource, *, placement: Placement, x64: bool, default_device: Any) -> Staged:
    """Return an object that creates the batch of a source with a given index in two stages.

    All threads use the settings of JAX ``x64`` and ``default_device``; see ``thread_settings``.

    Raises:
        ConfigError: The placement's sharding does not divide a batch evenly.
    """
    # The sources of the shards that this process needs, and the number of rows of a complete batch from these shards.
    sources, spec = placement.sources(source), source.spec
    most = sum(-(-own.batch_size // own.shard[1]) for own in sources)
    if spec.is_packed:  # batches are padded to one size, or have varying sizes that rarely recur
        most = 0 if isinstance(source.packed, bool) else source.packed

    def gather(index: int) -> Any:
        # For devices, rows have the stored dtypes, so that fewer bytes are transferred. The memory is new: it is never
        # modified later.
        if placement.on_host:
            parts: list[Any] = [own[index] for own in sources]
        else:
            parts = [own.gather(own.plan(index), stored=True) for own in sources]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def transfer(gathered: Any) -> Any:
        views: tuple[Arrays, ...] = gathered if isinstance(gathered, tuple) else (gathered,)
        arrays = [values for view in views for values in view.values()]
        with settings(x64, default_device):
            placed = iter(placement.put(arrays, recurring=len(arrays[0]) == most))
            made = tuple({name: _cast(next(placed), spec[name].dtype) for name in view} for view in views)
        return made if isinstance(gathered, tuple) else made[0]

    def delivered(gathered: Any) -> Any:
        if isinstance(gathered, tuple):
            return tuple(map(delivered, gathered))
        kinds = {name: np.dtype(spec[name].dtype) for name in gathered}
        return {k: v if v.dtype.kind == kinds[k].kind else v.astype(kinds[k]) for k, v in gathered.items()}

    def rows_of(index: int) -> npt.NDArray[np.int64]:
        # The index of each gathered row in the complete batch; -1 for a padded row, a copy of another shard's row.
        rows = []
        for own in sources:
            plan, (rank, count) = own.plan(index), own.shard
            numbers = np.arange(plan.first, plan.first + len(plan.starts))
            rows.append(np.where(numbers < plan.global_size * (rank + 1) // count, numbers, -1))
        return np.concatenate(rows)

    return Staged(gather, transfer, delivered, None if placement.parts is None else rows_of)


def _cast(values: jax.Array, dtype: Any) -> jax.Array:
    return values if values.dtype == dtype else values.astype(dtype)


def whole_maker(source: Any, *, target: jax.Device | Sharding | None, x64: bool, default_device: Any) -> Staged:
    """Return a function that takes the index of a batch, and creates the complete batch of a replay buffer or a custom
    source.

    Args:
        source: A ``BufferSource``, or a custom source.
        target: The device or sharding of batches; None: JAX's default device.
        x64, default_device: See ``thread_settings``.
    """

    def gather(index: int) -> Any:
        drawn = isinstance(source, BufferSource)
        return source.buffer.batch_of(source.drawn(index)) if drawn else source[index]

    def transfer(batch: Any) -> Any:
        with settings(x64, default_device):
            return as_jax(batch, target)

    def delivered(batch: Any) -> Any:
        with settings(x64, default_device):
            return narrowed(batch)

    return Staged(gather, transfer, delivered)


def thread_settings() -> dict[str, Any]:
    """Return the thread-local settings of JAX in this thread; other threads do not inherit these settings."""
    config: Any = jax.config
    return {"x64": x64_enabled(), "default_device": config.jax_default_device}


@contextmanager
def _changed(x64: bool, default_device: Any) -> Iterator[None]:
    with jax.enable_x64(x64), jax.default_device(default_device):
        yield


def settings(x64: bool, default_device: Any) -> AbstractContextManager[None]:
    """Return a context in which JAX has the given settings, a result of ``thread_settings``; changing a setting takes
    10 us.
    """
    if thread_settings() == {"x64": x64, "default_device": default_device}:
        return nullcontext()
    return _changed(x64, default_device)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(views)) for views in zip(*parts, strict=True))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class PrefetchBatchifier(Batchifier[dict[str, jax.Array]]):
    """Delivers batches in order as dicts of ``jax.Array`` ``[B, S, ...]``; threads prefetch the batches.

    Without x64 (``jax_enable_x64``), 64-bit fields are converted to the dtypes in ``REPLACED_DTYPES``, and ``spec`` has
    the converted dtypes; a value that the new dtype cannot represent raises an error. The setting of x64 is read when
    the loader is created.

    At most ``prefetch + 1`` batches exist in the pipeline at a time, and delivered batches never change.

    For the arguments of all loaders, see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: Number of threads that create batches and transfer them to the device; with 0 the calling thread
            creates and transfers the batches. The stream of batches does not depend on this number.
        pin_memory: Ignored.
        device: A ``jax.Device``, a platform ("cpu", "gpu"), or a platform with a number ("gpu:1"); None: JAX's default
            device, or the device of the replay buffer's batches.
        sharding: The sharding of a complete batch over the devices of one or several processes, for example
            ``NamedSharding(mesh, P("data"))``; pass it instead of ``device``. Each process gathers only the rows of its
            devices, and ``source`` must deliver complete batches. As with ``shard="auto"``, the processes check that
            they deliver parts of the same batches; ``shard="auto"`` may be combined with a sharding.

    Raises:
        ConfigError: The device does not exist; the sharding does not divide a batch evenly (``uneven="pad"`` pads the
            batch), or is combined with a device or a shard; see also ``mouse_core.prefetch.Batchifier``.
        MissingFieldError: See ``mouse_core.prefetch.Batchifier``.
    """

    framework = "jax"

    @property
    def replaced_dtypes(self) -> Mapping[np.dtype[Any], np.dtype[Any]]:
        """Return a dict from each dtype that JAX lacks in this thread to the dtype that is delivered instead."""
        return replaced_dtypes()

    def delivery(
        self, source: Any, *, device: Any, pin_memory: bool | None, sharding: Any
    ) -> Delivery[dict[str, jax.Array]]:
        """Return the converter of batches to JAX arrays on one or several devices; see
        ``mouse_core.prefetch.Batchifier``.
        """
        if isinstance(source, BatchSource):
            placement = find_placement(device, sharding, source)
            maker = partial(array_maker, placement=placement, **thread_settings())
            ranks = None if sharding is None or sharding.is_fully_addressable else find_ranks(self.framework)
            return Delivery(maker, ranks=ranks)
        if isinstance(source, BufferSource) and device is None and sharding is None:
            of_buffer = getattr(source.buffer, "device", None)
            target = of_buffer if isinstance(of_buffer, jax.Device | Sharding) else None
        else:
            target = find_target(device, sharding)
        local = not isinstance(target, Sharding) or target.is_fully_addressable
        if not local and not isinstance(source, BufferSource):
            raise ConfigError(
                "sharding: when the source is not sharded, expected only devices of this process, found devices of "
                "other processes"
            )
        return Delivery(partial(whole_maker, target=target, **thread_settings()))


def to_grain(source: Source) -> grain.MapDataset:
    """Return the batches of a source as a ``grain.MapDataset``, for pipelines of grain's transformations.

    Element ``i`` is ``source[i]``, a dict of NumPy arrays. The dataset has no end: after each epoch, the next epoch
    begins, in a new order. The state of a grain iterator, ``{"next_index": i}``, has the index of the next batch, like
    the ``state_dict()`` of a loader.

    Each element is a batch, and grain reads 500 elements ahead by default. To read fewer elements ahead, use
    ``to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))``. Without x64, JAX converts 64-bit
    numbers to 32 bits without a check; ``BatchSource(..., replace_dtypes=mouse_jax.replaced_dtypes())`` checks that
    each number can be represented.

    Grain's ``mp_prefetch`` would fail in programs that do not parse flags with absl, so this function marks absl's
    flags as parsed.

    Args:
        source: The source of batches: a ``BatchSource``, or another ``mouse_core.prefetch.Source``.

    Returns:
        A dataset of length ``sys.maxsize``.

    Raises:
        ImportError: Grain is not installed.

    Example:
        >>> dataset = to_grain(source).map(augment)  # doctest: +SKIP
        >>> for batch in dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)):
        ...     batch = jax.device_put(batch)
    """
    try:
        import grain
        from absl import flags
    except ImportError as error:
        raise ImportError("to_grain needs grain: pip install 'mouse-data[jax]'") from error
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return grain.MapDataset.source(_Endless(source))


class _Endless:
    """A source with random access for grain, which returns ``sys.maxsize`` as its length.

    Grain computes indices modulo the length, so with the length of one epoch, grain would repeat the first epoch.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        batch: Batch = self._source[index]
        return batch

    def __repr__(self) -> str:
        if not isinstance(self._source, BatchSource):
            return f"{type(self._source).__name__}(fingerprint={self._source.fingerprint!r})"
        return f"BatchSource(sampler={self._source.sampler}, seed={self._source.seed}, shard={self._source.shard})"
