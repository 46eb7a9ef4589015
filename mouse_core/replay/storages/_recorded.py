"""Slices of recorded rows as the windows of a ``BatchSource``, which plans many samples at once."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.episodes import Windows
from mouse_core.errors import DataError
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.protocols import Draw, Storage
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.sampling.plan import MASK
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

_SOURCES_KEPT = 4
# Blocks of windows that are kept after they were planned together; steps that are numbered at once.
_BLOCKS_KEPT, _STEPS_TOGETHER = 4, 1 << 14


class RecordedSlices:
    """Slices of recorded rows by the number of the sample: batch ``i`` of a ``BatchSource`` is sample ``i``.

    Args:
        storage: The rows of a snapshot, ``storage.snapshot``.
        sampler: Draws the first rows of the slices.
    """

    def __init__(self, storage: Any, sampler: SliceSampler) -> None:
        self._storage = storage
        self._sampler = sampler
        self._sources: dict[tuple[Any, ...], BatchSource] = {}
        # Sources of an earlier snapshot, replaced when they are next used; and the first sample of the later one.
        self._before: dict[tuple[Any, ...], BatchSource] = {}
        self._first_sample = 0
        self._known_whole: bool | None = None

    @property
    def _is_whole(self) -> bool:
        """Whether every slice has all its steps."""
        if self._known_whole is None:
            self._known_whole = self._sampler.is_whole(self._storage)
        return self._known_whole

    def is_for_rows(self) -> bool:
        """Whether it draws the same as the sampler; False for padded slices of rows that have a field "mask".

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        return self._is_whole or MASK not in self._storage.snapshot.readers

    def draw(self, batch_size: int, key: Key) -> tuple[dict[str, npt.NDArray[Any]], Draw]:
        """The rows of the sample that ``key`` names, and their draw.

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        source = self._source(batch_size, key.seed)
        slices: Any = source.sampler
        try:
            rows = source[key.index]
        except DataError:
            if self._is_whole:
                raise
            draw = slices.draw(key)  # the damaged row may lie behind the end of an episode
            return self._storage.get(draw.index), draw
        if not self._is_whole:
            del rows[MASK]  # which is in the draw
        return rows, slices.draw(key)

    def _source(self, batch_size: int, seed: int) -> BatchSource:
        name = (batch_size, seed, self._sampler.weighting)
        source = self._sources.get(name)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            source = self._sources[name] = self._made(name, batch_size, seed)
        return source

    def _made(self, name: tuple[Any, ...], batch_size: int, seed: int) -> BatchSource:
        kind = _Slices if self._is_whole else _PaddedSlices
        before = self._before.pop(name, None)
        if before is None or type(before.sampler) is not kind:
            windows = kind(self._storage, self._sampler, batch_size)
            return BatchSource(self._storage.snapshot, sampling=windows, seed=seed)
        before.sampler.forget()
        return before.with_snapshot(self._storage.snapshot, epoch_start=self._first_sample)

    def grew(self, sample: int | None) -> None:
        """Use the later rows from sample number ``sample`` on; None: the number is unknown."""
        if sample is None:
            self.forget()
            return
        self._before |= self._sources
        self._sources, self._first_sample, self._known_whole = {}, sample, None

    def forget(self) -> None:
        """Plan all samples again."""
        self._sources.clear()
        self._before.clear()
        self._known_whole = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}, "_before": {}}


class _Slices:
    """The slices of a buffer's samples as the windows of batches; see ``WindowSampler``."""

    def __init__(self, storage: Storage, sampler: SliceSampler, batch_size: int) -> None:
        self.sequence_length, self.batch_size = sampler.sequence_length, batch_size
        self._storage, self._sampler = storage, sampler
        self._planned: deque[tuple[range, Windows]] = deque(maxlen=_BLOCKS_KEPT)
        self._draws: dict[int, Draw] = {}

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """1, as epochs have no end."""
        return 1

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        return self._plan(seed, index, 1)[1].start

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        return self._plan(seed, first, count)[1].start.reshape(count, -1)[:, rows]

    def _plan(self, seed: int, first: int, count: int) -> tuple[range, Windows]:
        """Draw the windows of ``count`` samples together."""
        samples = range(first, first + count)
        keys = [Key(seed, Purpose.REPLAY, sample) for sample in samples]
        planned = samples, self._sampler.windows(self._storage, self.batch_size, keys)
        self._planned.append(planned)
        return planned

    def forget(self) -> None:
        """Plan again, as there are more rows."""
        self._planned.clear()
        self._draws = {}

    def draw(self, key: Key) -> Draw:
        """The draw of the sample that ``key`` names."""
        if key.index not in self._draws:
            planned = next((block for block in self._planned if key.index in block[0]), None)
            self._draws = self._draws_from(key.index, *(planned or self._plan(key.seed, key.index, 1)))
        return self._draws.pop(key.index)

    def _draws_from(self, first: int, samples: range, windows: Windows) -> dict[int, Draw]:
        """The draws of ``samples`` from number ``first`` on, as many as are small together."""
        size = self.batch_size
        count = min(samples.stop - first, max(1, _STEPS_TOGETHER // (size * self.sequence_length)))
        begin = (first - samples.start) * size
        some = Windows(*[column[begin : begin + count * size] for column in windows])
        draw = self._sampler.draw_of(some, self._sampler.episodes.settled(self._storage), self._storage)
        return {first + number: _part(draw, slice(number * size, (number + 1) * size)) for number in range(count)}


def _part(draw: Draw, windows: slice) -> Draw:
    mask = None if draw.mask is None else draw.mask[windows]
    return Draw(draw.index[windows], mask, pad=draw.pad, extra={"traj_id": draw.extra["traj_id"][windows]})


class _PaddedSlices(_Slices):
    """Slices of which some lack steps behind the end of their episode; see ``PaddedSampler``."""

    fill = None  # batches are padded when they are assembled

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        episodes = self._sampler.episodes.settled(self._storage)
        _, ends, _ = episodes.episode_of(starts)
        lengths: Int64s = np.minimum(ends - starts, self.sequence_length)
        return lengths
