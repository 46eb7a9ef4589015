"""PrefetchBatchifier for JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core import BatchSource, ConfigError, Spec
from mouse_core.prefetch import Batchifier, Delivery, Staged
from mouse_core.ranks import find_ranks
from mouse_core.replay.source import BufferSource
from mouse_jax.dtypes import replaced_dtypes, x64_enabled
from mouse_jax.placement import Placement, find_placement, find_target
from mouse_jax.trees import as_jax, narrowed

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ArrayMaker:
    """Makes a batch by its index, in two stages.

    Settings of JAX that hold for one thread only are those of the thread that made this.

    Args:
        sources: Of the shards that this process needs.
        placement: Where batches go.
        spec: Of the batches delivered.
        x64: Whether JAX holds 64-bit numbers.
        default_device: JAX's default device, if there is a setting.
        rows: This process's in a whole batch.
    """

    sources: tuple[BatchSource, ...]
    placement: Placement
    spec: Spec
    x64: bool
    default_device: Any
    rows: int

    def gather(self, index: int) -> Any:
        """This process's rows of batch ``index``, in memory that is given away.

        On a host they have the dtypes to deliver; else those they are stored in, so that few bytes travel.
        """
        if self.placement.on_host:
            parts = [source[index] for source in self.sources]
        else:
            parts = [source.gather(source.plan(index), stored=True) for source in self.sources]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def transfer(self, gathered: Any) -> Any:
        """Convert a gathered batch to JAX arrays, placed and in the delivered dtypes."""
        views: tuple[Arrays, ...] = gathered if isinstance(gathered, tuple) else (gathered,)
        rows = [values for view in views for values in view.values()]
        with settings(self.x64, self.default_device):
            placed = iter(self.placement.put(rows, recurring=len(rows[0]) == self.rows))
            made = tuple(self._delivered({name: next(placed) for name in view}) for view in views)
        return made if isinstance(gathered, tuple) else made[0]

    def delivered(self, gathered: Any) -> Any:
        """Convert a gathered batch to the delivered dtypes, on the host."""
        if isinstance(gathered, tuple):
            return tuple(map(self.delivered, gathered))
        kinds = {name: np.dtype(self.spec[name].dtype) for name in gathered}
        return {k: v if v.dtype.kind == kinds[k].kind else v.astype(kinds[k]) for k, v in gathered.items()}

    def rows_of(self, index: int) -> npt.NDArray[np.int64]:
        """Numbers of the gathered rows in the whole batch; -1 for a padded row, which belongs to another shard."""
        rows = []
        for source in self.sources:
            plan, (rank, count) = source.plan(index), source.shard
            own = np.arange(plan.first, plan.first + len(plan.starts))
            rows.append(np.where(own < plan.global_size * (rank + 1) // count, own, -1))
        return np.concatenate(rows)

    def _delivered(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: values if values.dtype == self.spec[name].dtype else values.astype(self.spec[name].dtype)
            for name, values in batch.items()
        }


def array_maker(source: BatchSource, *, placement: Placement, x64: bool, default_device: Any) -> Staged:
    """The function from an index to a batch of a source, in its two stages.

    Raises:
        ConfigError: A batch that the placement's sharding does not divide.
    """
    sources = placement.sources(source)
    rows = sum(-(-own.batch_size // own.shard[1]) for own in sources)
    if source.spec.is_packed:  # filled up to one size, or of a size that hardly comes again
        rows = 0 if isinstance(source.packed, bool) else source.packed
    make = ArrayMaker(sources, placement, source.spec, x64, default_device, rows)
    return Staged(make.gather, make.transfer, make.delivered, None if placement.parts is None else make.rows_of)


def whole_maker(source: Any, *, target: jax.Device | Sharding | None, x64: bool, default_device: Any) -> Staged:
    """The function from an index to a batch that exists as arrays: drawn from a replay buffer, or given by a source.

    Args:
        source: A ``BufferSource``, or a source of somebody's own.
        target: Where they go; None: JAX's default device.
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
    """JAX's settings here and now that other threads would not see."""
    config: Any = jax.config
    return {"x64": x64_enabled(), "default_device": config.jax_default_device}


@contextmanager
def _changed(x64: bool, default_device: Any) -> Iterator[None]:
    with jax.enable_x64(x64), jax.default_device(default_device):
        yield


def settings(x64: bool, default_device: Any) -> AbstractContextManager[None]:
    """A context in which settings are those that ``thread_settings`` found; setting them anew costs 10 us."""
    if thread_settings() == {"x64": x64, "default_device": default_device}:
        return nullcontext()
    return _changed(x64, default_device)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(views)) for views in zip(*parts, strict=True))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class PrefetchBatchifier(Batchifier[dict[str, jax.Array]]):
    """Batches as dicts of ``jax.Array`` ``[B, S, ...]``, made ahead in threads, in index order.

    Without x64 (``jax_enable_x64``) 64-bit fields are delivered as ``REPLACED_DTYPES`` says, and ``spec`` says so
    beforehand; a value that does not fit is an error. What holds is whether x64 is enabled where the loader is made.

    Besides those delivered, at most ``prefetch`` batches exist at a time. A delivered batch never changes.

    The other arguments are those of every loader; see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: Threads that make batches and put them on the device, and processes that decode encoded images;
            with 0 the calling thread does both. The stream is the same.
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

    def delivery(
        self, source: Any, *, device: Any, pin_memory: bool | None, sharding: Any
    ) -> Delivery[dict[str, jax.Array]]:
        """Converter of batches to JAX arrays on one or several devices; see ``mouse_core.prefetch.Batchifier``."""
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
        whole = partial(whole_maker, target=target, **thread_settings())
        if not isinstance(source, BufferSource) and isinstance(target, Sharding) and not target.is_fully_addressable:
            raise ConfigError(
                "sharding: expected devices of this process for a source of whole batches, found some of others"
            )
        return Delivery(whole)
