"""Making a batch for JAX: gathered into NumPy arrays, then put where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core import BatchSource, Spec
from mouse_core.prefetch import Staged
from mouse_core.replay.source import BufferSource
from mouse_jax.dtypes import x64_enabled
from mouse_jax.placement import Placement
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
        """What was gathered, as JAX's arrays in their place and in the dtypes to deliver."""
        views: tuple[Arrays, ...] = gathered if isinstance(gathered, tuple) else (gathered,)
        rows = [values for view in views for values in view.values()]
        with settings(self.x64, self.default_device):
            placed = iter(self.placement.put(rows, recurring=len(rows[0]) == self.rows))
            made = tuple(self._delivered({name: next(placed) for name in view}) for view in views)
        return made if isinstance(gathered, tuple) else made[0]

    def delivered(self, gathered: Any) -> Any:
        """What was gathered, in the kinds of number to deliver, on the host."""
        if isinstance(gathered, tuple):
            return tuple(map(self.delivered, gathered))
        kinds = {name: np.dtype(self.spec[name].dtype) for name in gathered}
        return {k: v if v.dtype.kind == kinds[k].kind else v.astype(kinds[k]) for k, v in gathered.items()}

    def rows_of(self, index: int) -> npt.NDArray[np.int64]:
        """Which rows of the whole batch those gathered are; -1 for one that is padded, which another part has."""
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
