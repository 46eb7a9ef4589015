"""Samplers of single rows: with and without replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, StateError
from mouse_core.randomness import Key
from mouse_core.replay.protocols import Draw, Storage, Write
from mouse_core.replay.samplers._common import Epochs, check_state

Int64s = npt.NDArray[np.int64]


class RandomSampler:
    """Rows drawn uniformly and independently of each other, from all there are."""

    needs_order = False

    def __repr__(self) -> str:
        return "RandomSampler()"

    def wrote(self, storage: Storage, write: Write) -> None:
        """Nothing is kept."""

    def reset(self, storage: Storage) -> None:
        """Nothing is kept."""

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """``batch_size`` slots, each of all rows with the same probability.

        Raises:
            ConfigError: The storage is empty.
        """
        return Draw(key.integers(_rows(storage), batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept.

        Raises:
            StateError: The state is of another sampler.
        """
        check_state(state, {}, {}, self)


class SamplerWithoutReplacement(Epochs):
    """Epochs in which every row comes once; the next draw after an epoch begins another.

    An epoch that is under way ends when the number of rows changes. While it does not, as in a ring that is full, a
    row that is written takes the place of the one it overwrites.

    Args:
        drop_last: Whether rows that do not fill a batch at the end of an epoch are left out; otherwise they come as a
            short batch.
        shuffle: Whether an epoch has an order of its own, a new one each time; otherwise the oldest row comes first.
    """

    needs_order = False

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__(bool(drop_last), bool(shuffle))
        self._oldest = 0  # the slot of the epoch's oldest row

    def __repr__(self) -> str:
        return f"SamplerWithoutReplacement(drop_last={self.drop_last}, shuffle={self.shuffle})"

    def wrote(self, storage: Storage, write: Write) -> None:
        """Rows were written; the next draw sees whether there are more than before."""

    def reset(self, storage: Storage) -> None:
        """The rows may all be others: the next draw begins an epoch."""
        self._forget()

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """The epoch's next ``batch_size`` slots, or those left of it.

        Raises:
            ConfigError: There are fewer rows than ``batch_size``.
        """
        rows = _rows(storage)
        if batch_size > rows:
            raise ConfigError(
                f"sample: expected at most {rows} rows in a batch without replacement, as many as there are, "
                f"found batch_size {batch_size}"
            )
        if self._begins(key, rows, rows, batch_size):
            self._oldest = storage.written % storage.capacity if rows == storage.capacity else 0
        positions = self._take(key, rows, batch_size)
        return Draw(positions if self.shuffle else (positions + self._oldest) % rows)

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch the sampler is: plain values."""
        return {"config": repr(self), **self._epoch("rows"), "oldest": self._oldest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the epoch in which ``state`` was taken.

        Raises:
            StateError: The state is of another sampler, or damaged.
        """
        kinds = dict.fromkeys(("rows", "position", "began", "oldest", "ran_out"), int)
        values = check_state(state, {"config": repr(self)}, kinds, self)
        if values["position"] > values["rows"]:
            raise StateError(f"sampler: expected a position up to {values['rows']}, found {values['position']}")
        self._go_on(values, "rows")
        self._oldest = values["oldest"]


def _rows(storage: Storage) -> int:
    rows = len(storage)
    if not rows:
        raise ConfigError("sample: expected rows, found an empty buffer")
    return rows
