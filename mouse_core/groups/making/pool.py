"""Rollouts to draw from, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.groups.making.scoring import Advantage, checked_worth
from mouse_core.groups.types.records import RolloutRecord

_FIRST_ROWS = 1024
_COLUMNS: dict[str, Any] = {
    "reward": np.float64,
    "advantage": np.float64,
    "group": np.int64,
    "environment": np.int64,
    "version": np.int64,
    "arrival": np.int64,
    "created": np.float64,
    "tokens": np.int64,
    "present": np.bool_,
}


class Pool:
    """Rollouts in the order they came. One that has left keeps its reward while its group is there.

    Args:
        advantage: What they are worth.
    """

    def __init__(self, advantage: Advantage) -> None:
        self._advantage = advantage
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(_FIRST_ROWS, dtype) for name, dtype in _COLUMNS.items()
        }
        self.uids: list[str] = []
        self.records: list[RolloutRecord | None] = []
        self.nbytes = 0
        self._oldest = 0
        self._is_to_be_scored = False

    def __len__(self) -> int:
        return len(self.records)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Where arrays come through shared memory they cannot be written to.
        self.__dict__.update(state, _columns={name: np.array(values) for name, values in state["_columns"].items()})

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of every row, ``[n]``: "present" is whether one has not left, "arrival" its number among those of
        its environment.
        """
        return self._columns[name][: len(self)]

    def add(self, uid: str, record: RolloutRecord | None, **values: float) -> None:
        """Add a rollout; one without a record only counts for what the others of its group are worth.

        Args:
            uid: Its uid.
            record: It.
            values: "reward", "group", "environment", "version" and "arrival".
        """
        row = len(self)
        if row == len(self._columns["reward"]):
            self._columns = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self._columns.items()}
        columns = self._columns
        for name, value in values.items():
            columns[name][row] = value
        columns["present"][row] = record is not None
        columns["created"][row] = 0.0 if record is None else record.created
        columns["tokens"][row] = 0 if record is None else sum(len(turn.tokens) for turn in record.turns)
        self.uids.append(uid)
        self.records.append(record)
        self.nbytes += 0 if record is None else nbytes_of(record)
        self._is_to_be_scored = True

    def release(self, row: int) -> None:
        """Let a rollout leave; its reward still counts."""
        record = self.records[row]
        if record is not None:
            self.nbytes -= nbytes_of(record)
            self.records[row] = None
            self._columns["present"][row] = False

    def shrink(self, nbytes: int) -> int:
        """Let the oldest rollouts leave until the others take at most so many bytes; how many left."""
        left = 0
        while self.nbytes > nbytes:
            left += self.records[self._oldest] is not None
            self.release(self._oldest)
            self._oldest += 1
        return left

    def drop(self, groups: set[int]) -> list[str]:
        """Forget all about some groups; the uids of their rollouts."""
        if not groups:
            return []
        gone = np.isin(self.column("group"), np.fromiter(groups, np.int64))
        rows = np.flatnonzero(gone).tolist()
        for row in rows:
            self.release(row)
        uids = [self.uids[row] for row in rows]
        kept = np.flatnonzero(~gone)
        for values in self._columns.values():
            values[: len(kept)] = values[kept]
        self.uids = [self.uids[row] for row in kept.tolist()]
        self.records = [self.records[row] for row in kept.tolist()]
        self._oldest = 0
        self._is_to_be_scored = True
        return uids

    def scored(self) -> npt.NDArray[np.float64]:
        """The advantage of every row, float64 ``[n]``."""
        if self._is_to_be_scored:
            worth = checked_worth(self._advantage, self.column("reward"), self.column("group"))
            self._columns["advantage"][: len(self)] = worth
            self._is_to_be_scored = False
        return self.column("advantage")


def nbytes_of(record: RolloutRecord) -> int:
    """About how many bytes a rollout takes, with its columns, which may well be most of it."""
    turns = sum(8 * len(turn.tokens) + len(turn.message) for turn in record.turns)
    columns = [*record.columns.values(), *(values for turn in record.turns for values in turn.columns.values())]
    return turns + sum(np.asarray(values).nbytes for values in columns)
