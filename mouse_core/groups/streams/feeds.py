"""Where a stream's batches come from: a folder, or the buffer whose folder it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.groups._files.batches import read_examples, read_staleness
from mouse_core.groups._files.index import StoredBatch, Told, follow_batches
from mouse_core.groups._files.names import BATCHES
from mouse_core.groups.buffer import RolloutBuffer
from mouse_core.groups.types.example import RLExample


class StoredBatches(Protocol):
    """Batches by their number, as they were stored."""

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; None while there is none."""
        ...

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        ...

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How many versions older than the newest each example is, float64 ``[B]``."""
        ...


class FolderBatches:
    """The batches of a folder that another process owns; nothing in it is changed.

    Args:
        root: The folder, which need not be there yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored: list[StoredBatch] = []
        self._told: list[Told] = []
        self._position = 0

    def __repr__(self) -> str:
        return f"the folder {str(self._root)!r}, which has {len(self._stored)}"

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; None while it is not in the log."""
        if index >= len(self._stored):
            self._follow()
        return self._stored[index].batch_id if index < len(self._stored) else None

    def _follow(self) -> None:
        new, self._position = follow_batches(self._root, self._position)
        self._told += [one._replace(batches=one.batches + len(self._stored)) for one in new.told]
        self._stored += new.batches

    def _number(self, batch_id: str) -> int:
        numbers = range(len(self._stored) - 1, -1, -1)
        number = next((number for number in numbers if self._stored[number].batch_id == batch_id), None)
        if number is None:
            raise DataError(f"batch: expected one of {self!r}, found {batch_id!r}")
        return number

    def _path(self, batch_id: str) -> Path:
        return self._root / BATCHES / self._stored[self._number(batch_id)].name

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        return read_examples(self._path(batch_id))

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each was behind."""
        self._follow()  # a trainer may have gone back since
        number = self._number(batch_id)
        return read_staleness(self._path(batch_id), [one.version for one in self._told if one.batches > number])


class BufferBatches:
    """The batches of a buffer, made when they are asked for.

    Args:
        buffer: It.
        batch_size: How many examples; None: no batches are made.
    """

    def __init__(self, buffer: RolloutBuffer, batch_size: int | None) -> None:
        self._buffer, self._size = buffer, batch_size

    def __repr__(self) -> str:
        return repr(self._buffer)

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; made if it comes next; None while there are too few rollouts."""
        return self._buffer.batch_at(index, self._size)

    def read_batch(self, batch_id: str) -> Sequence[RLExample]:
        """Its examples."""
        return self._buffer.read_batch(batch_id)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each was behind."""
        return self._buffer.batch_staleness(batch_id)
