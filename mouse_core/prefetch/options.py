"""LoaderOptions: what a loader is asked for, and the source that it names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError
from mouse_core.prefetch.source import RecastSource, ShardSource, Source, checked_source
from mouse_core.sampling.plan import Sampling
from mouse_core.sampling.windows import Boundary, Weighting
from mouse_core.spec import check_count
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.augment.config import AugmentTokensConfig
    from mouse_core.batches import Map
    from mouse_core.ranks import Shard, Uneven
    from mouse_core.sampling.offsets import Seconds
    from mouse_core.statistics.normalizer import Normalization, Normalizer

# What decides about delivering batches; all other options decide about the batches.
_DELIVERING = ("prefetch", "num_workers", "pin_memory", "device", "sharding", "digest")
_WHOLE = (0, 1)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The arguments of a loader, but for the store; ``Batchifier`` says what they mean."""

    sequence_length: int | None = None
    batch_size: int | None = None
    sampling: Sampling = "random"
    prefetch: int = 4
    num_workers: int = 2
    pin_memory: bool | None = None
    device: Any = None
    seed: int = 0
    shard: Shard | None = None
    dtypes: Mapping[str, npt.DTypeLike] | None = None
    required_fields: Sequence[str] = ()
    fields: Sequence[str] | None = None
    drop_last: bool = True
    augment: AugmentTokensConfig | None = None
    views: int = 1
    boundary: Boundary = "stream"
    weighting: Weighting = "step"
    pad: bool | float | None = None
    uneven: Uneven = "refuse"
    windows: Mapping[str, Iterable[int] | Seconds] | None = None
    normalize: Mapping[str, Normalization] | Normalizer | None = None
    map: Map | None = None
    lengths: Iterable[int] | None = None
    packed: bool | int = False
    sharding: Any = None
    digest: bool = False

    def source(self, store: Any, *, replace_dtypes: Mapping[Any, npt.DTypeLike]) -> Any:
        """Where batches of ``store`` come from.

        Args:
            store: A store or a snapshot, of which a ``BatchSource`` is made; a replay buffer, of which a
                ``BufferSource`` draws ``prefetch`` batches in advance; or a source.
            replace_dtypes: Dtypes that the framework lacks, and what is delivered instead.

        Raises:
            ConfigError: For a replay buffer or a source, an option that only stores have; else see ``BatchSource``.
        """
        if isinstance(store, Store | Snapshot):
            size = 32 if self.batch_size is None else self.batch_size
            if self.shard is None and getattr(self.sharding, "is_fully_addressable", True):
                _warn_of_others(size)
            return BatchSource(store, **{**self._of_batches(), "batch_size": size}, replace_dtypes=replace_dtypes)
        if isinstance(store, Source):
            return self._of_source(store, replace_dtypes)
        # Loaded only where there may be one.
        from mouse_core.replay.buffer import BaseBuffer
        from mouse_core.replay.source import BufferSource

        if not isinstance(store, BaseBuffer):
            return checked_source(store)
        self._refuse("a replay buffer, which has a sampler, a seed and transforms of its own")
        return BufferSource(store, self.batch_size, check_count("prefetch", self.prefetch, lowest=1))

    def _of_source(self, source: Any, replace_dtypes: Mapping[Any, npt.DTypeLike]) -> Any:
        """A source in other dtypes, or one shard's rows of it, where that is asked for."""
        self._refuse("a source, which gives its batches as they are", "batch_size", but=("shard", "uneven"))
        options = self._of_shard()
        if isinstance(source, BatchSource):
            if options and source.shard != _WHOLE:
                raise ConfigError(f"shard: expected a source that is sharded once, found shard {source.shard} of it")
            options |= {"replace_dtypes": replace_dtypes} if replace_dtypes else {}
            return source.with_options(**options) if options else source
        if self.shard is None and hasattr(source, "members") and getattr(self.sharding, "is_fully_addressable", True):
            _warn_of_others(source.batch_size, stacklevel=5)  # a mixture's batches are whole
        made = RecastSource(checked_source(source), replace_dtypes) if replace_dtypes else checked_source(source)
        return ShardSource(made, **options) if options else made

    def _of_shard(self) -> dict[str, Any]:
        """Which rows of a source's batches are asked for, by option; nothing where they are to be whole."""
        if self.shard in (None, _WHOLE) and self.uneven == "refuse":
            return {}
        if self.sharding is not None:
            raise ConfigError(f"shard, uneven: expected none with a sharding of a source, found {self.shard!r}")
        shard = _WHOLE if self.shard is None else self.shard
        return {"shard": shard} if self.uneven == "refuse" else {"shard": shard, "uneven": self.uneven}

    def _of_batches(self) -> dict[str, Any]:
        given = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in _DELIVERING}
        return {**given, "shard": _WHOLE if self.shard is None else self.shard}

    def _refuse(self, what: str, *also: str, but: Sequence[str] = ()) -> None:
        """Raise ConfigError where an option is given that decides about batches, ``but`` those."""
        defaults = {**{option.name: option.default for option in fields(self)}, "shard": _WHOLE}
        for name, value in self._of_batches().items():
            if name not in but and (name != "batch_size" or name in also) and value not in (defaults[name], None):
                raise ConfigError(f"{name}: expected none for {what}, found {value!r}")


def _warn_of_others(size: int, stacklevel: int = 4) -> None:
    """Say that every one of several processes is about to get whole batches, where nobody has said that it is to."""
    from mouse_core.ranks import find_ranks  # loaded where a loader is made

    try:
        found = find_ranks()
    except ConfigError:
        return  # half of what torchrun sets says nothing of others
    if found.count > 1:
        warnings.warn(
            f"shard: each of {found.count} processes ({found.found_in}) gets whole batches of {size} windows, of which "
            f"a step sees {found.count} times as many, all of them alike where the seeds are; shard='auto' gives each "
            "its rows, and shard=(0, 1) says that this is meant",
            UserWarning,
            stacklevel=stacklevel,
        )
