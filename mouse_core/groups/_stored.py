"""What a RolloutBuffer says of the batches it has stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.groups._folder import Folder
from mouse_core.groups.types.example import RLExample


class StoredInBuffer:
    """A buffer's stored batches."""

    _folder: Folder
    _lock: ProcessLock

    @property
    def batches(self) -> list[str]:
        """The ids of all stored batches, in order; old files may have been deleted since."""
        with self._lock:
            return [batch.batch_id for batch in self._folder.batches.stored]

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """A stored batch.

        Raises:
            MissingFieldError: There is no such batch.
            DataError: Its file is damaged.
            StorageError: It cannot be read.
        """
        return self._folder.batches.read(batch_id)

    def batch_metadata(self, batch_id: str) -> dict[str, Any]:
        """What the batch maker said of a stored batch.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.metadata(batch_id)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How many versions older than the newest the examples of a batch were when it was made, ``[B]``; NaN: unknown.

        The newest is that of all rollouts that had been added. Numbers are subtracted; of other versions those between
        are counted.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read_batch``.
        """
        return self._folder.batches.staleness(batch_id)
