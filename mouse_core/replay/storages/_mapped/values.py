"""What differs in length from row to row, in a mapped file that several processes write and read.

Nothing is written where a value lies that a row in use has, so that a process that dies has changed nothing; a ring
that is full is copied to a longer file first, and that one counts from the next commit on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.replay.ground.encoding import Bytes
from mouse_core.replay.ground.schema import RowSchema
from mouse_core.replay.ground.values import ByteRing, Refs, Values, varying_of
from mouse_core.replay.storages._mapped.files import Now
from mouse_core.replay.storages._mapped.mapping import lengthen, map_file


class MappedValues(Values):
    """The values of a mapped buffer. The storage's lock is held around every call, and ``at`` comes before all others.

    Args:
        folder: The buffer's.
    """

    packs = False  # the file may be mapped elsewhere

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._generation: int | None = None

    def at(self, now: Now) -> MappedValues:
        """These values as they are now."""
        if (self._generation, self.nbytes) != (now.generation, now.room):
            if self._generation != now.generation:
                self._begin = 0
            self._ring = ByteRing(map_file(self._file(now.generation, now.room), now.room))
            self._generation = now.generation
        self._end = now.end
        return self

    def kept(
        self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], Sequence[Refs]]
    ) -> tuple[Sequence[npt.NDArray[Any]], Now]:
        """What ``keep`` gives, and what is there then."""
        if not schema.varying:
            return arrays, now
        rows = self.at(now).keep(schema, arrays, refs)
        return rows, replace(now, end=self._end, room=self.nbytes)

    def with_room(self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], Sequence[Refs]]) -> Now:
        """What is there with room for all of these rows: a full disk is found before one of them is written."""
        self.at(now).reserve(sum(value.size for part in varying_of(schema, arrays) for value in part), refs)
        return now if self.nbytes == now.room else replace(now, room=self.nbytes)

    def _file(self, generation: int | None, room: int) -> Path:
        return self._folder / f"values-{generation}-{room}"

    def _memory(self, nbytes: int) -> Bytes:
        path = self._file(self._generation, nbytes)
        lengthen(path, nbytes)
        return map_file(path, nbytes)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file(self._generation, self.nbytes)

    def forget(self) -> None:
        """Let go of the file."""
        self._generation, self._ring = None, ByteRing(np.empty(0, np.uint8))

    def tidy(self, now: Now) -> None:
        """Remove the files that do not count any more."""
        for file in self._folder.glob("values-*"):
            if file != self._file(now.generation, now.room):
                file.unlink(missing_ok=True)
