"""Slices of recorded rows, which nobody writes: several draws are planned, located and copied together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.errors import DataError
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.ground.protocols import Draw, Storage
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.sampling.plan import MASK
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

_SOURCES_KEPT = 4


class RecordedSlices:
    """Batches of recorded rows by the number of the sample, as ``BatchSource`` gives them by their index.

    Args:
        snapshot: The rows.
        storage: The same as a storage.
        sampler: Says where slices begin.
    """

    def __init__(self, snapshot: Snapshot, storage: Storage, sampler: SliceSampler) -> None:
        self._snapshot = snapshot
        self._storage = storage
        self._sampler = sampler
        self._sources: dict[tuple[Any, ...], BatchSource] = {}
        self._known_whole: bool | None = None

    @property
    def _is_whole(self) -> bool:
        """Whether no slice lacks steps."""
        if self._known_whole is None:
            self._known_whole = self._sampler.is_whole(self._storage)
        return self._known_whole

    def is_for_rows(self) -> bool:
        """Whether it draws what the sampler does; not from rows with a field of their own that is called as the mask.

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        return self._is_whole or MASK not in self._snapshot.readers

    def draw(self, batch_size: int, key: Key) -> tuple[dict[str, npt.NDArray[Any]], Draw]:
        """The rows of the sample that ``key`` names, and what the sampler says of them.

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        source = self._source(batch_size, key.seed)
        plan = source.plan(key.index)
        draw = self._sampler.draw_at(self._storage, plan.starts, whole=self._is_whole)
        if self._is_whole:
            return source.gather(plan), draw
        try:
            rows = source.gather(plan)
        except DataError:  # maybe in a row behind the end of an episode
            return self._storage.get(draw.index), draw
        del rows[MASK]  # the draw has it
        return rows, draw

    def _source(self, batch_size: int, seed: int) -> BatchSource:
        name = (batch_size, seed, self._sampler.weighting)
        source = self._sources.get(name)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            kind = _DrawnWindows if self._is_whole else _PaddedWindows
            windows = kind(self._storage, self._sampler, self._sampler.sequence_length, batch_size)
            source = self._sources[name] = BatchSource(self._snapshot, sampling=windows, seed=seed)
        return source

    def forget(self) -> None:
        """Ask the sampler anew."""
        self._sources.clear()
        self._known_whole = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}


@dataclass(frozen=True, eq=False)
class _DrawnWindows:
    """The slices of a buffer's samples as the windows of batches; see ``WindowSampler``."""

    storage: Storage
    sampler: SliceSampler
    sequence_length: int
    batch_size: int

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Nothing ends."""
        return 1

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        starts: Int64s = self.starts_of_many(seed, index, 1, snapshot, epoch_start)[0]
        return starts

    def starts_of_many(self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        keys = [Key(seed, Purpose.REPLAY, index) for index in range(first, first + count)]
        return self.sampler.starts(self.storage, self.batch_size, keys)


class _PaddedWindows(_DrawnWindows):
    """The same where some lack steps behind the end of their episode; see ``PaddedSampler``."""

    fill = None  # batches are padded when they are assembled

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        return self.sampler.lengths(self.storage, starts)
