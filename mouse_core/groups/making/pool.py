"""Rollouts to draw from, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.groups.making.functions.scoring import Advantage, checked_worth
from mouse_core.groups.making.members import Members, Piece

# A maker without rollouts is small where it is sent to another process.
_FIRST_ROWS = 64
# Rows of more groups than these that have left do not wait for the next batch.
_MOST_LEFT = 4096
_COLUMNS: dict[str, Any] = {
    "reward": np.float64,
    "advantage": np.float64,
    "weight": np.float64,
    "group": np.int64,
    "environment": np.int64,
    "version": np.int64,
    "serial": np.int64,
    "arrival": np.int64,
    "created": np.float64,
    "tokens": np.int64,
    "uses": np.int64,
    "present": np.bool_,
    "place": np.int64,
    "piece": np.object_,
}


class Pool:
    """The rollouts of groups of which some can be drawn, in the order they came.

    One that has left keeps its reward while others of its group are there. A group of which all have left leaves the
    pool, and is there again, with all its rollouts, when another one of it comes.

    Args:
        advantage: What they are worth.
    """

    def __init__(self, advantage: Advantage) -> None:
        self._advantage = advantage
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(_FIRST_ROWS, dtype) for name, dtype in _COLUMNS.items()
        }
        self._count = 0
        self._left: set[int] = set()  # numbers of groups whose rows are no longer wanted
        self._is_sorted = self._is_scored = True

    def __len__(self) -> int:
        return self._count

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Where arrays come through shared memory they cannot be written to.
        self.__dict__.update(state, _columns={name: np.array(values) for name, values in state["_columns"].items()})

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of every row, ``[n]``: "present" is whether one has not left, "serial" its number among all that
        came, and "arrival" that among those of its environment.
        """
        return self._columns[name][: self._count]

    # ------------------------------------------------------------------ groups

    def add(self, pieces: Sequence[Piece], environment: int, version: int) -> None:
        """Add rollouts of one group.

        Args:
            pieces: They.
            environment, version: The numbers of these.
        """
        if len(self._left) > _MOST_LEFT:
            self.settle()
        for piece in pieces:
            if piece.members is not None and piece.members.number in self._left:
                self.settle()
            self._add(piece, environment, version)

    def _add(self, piece: Piece, environment: int, version: int) -> None:
        members, part, places = piece.members, piece.part, piece.places
        assert members is not None
        begin, end = self._count, self._count + len(places)
        if end > len(self._columns["reward"]):
            more = max(end, 2 * len(self._columns["reward"])) - len(self._columns["reward"])
            self._columns = {
                name: np.concatenate([old, np.zeros(more, old.dtype)]) for name, old in self._columns.items()
            }
        self._is_sorted &= not begin or bool(self._columns["serial"][begin - 1] < piece.serial)
        present = set(piece.present)
        values: dict[str, Any] = {
            "reward": [piece.rewards[place] for place in places],
            "created": [part.created[place] for place in places],
            "tokens": [part.tokens[place] for place in places],
            "uses": [piece.uses.get(place, 0) for place in places],
            "present": [place in present for place in places],
            "place": places,
            "serial": [piece.serial + place for place in places],
            "arrival": [piece.arrival + place for place in places],
        }
        # One row is what comes of rollouts that are in no file; NumPy takes it faster as a number.
        rows: Any = begin if end == begin + 1 else slice(begin, end)
        for name, several in values.items():
            self._columns[name][rows] = several[0] if end == begin + 1 else several
        same = {"weight": 1.0, "group": members.number, "environment": environment, "version": version, "piece": piece}
        for name, value in same.items():
            self._columns[name][rows] = value
        self._count = end
        members.present += len(present)
        self._is_scored = False

    def release(self, row: int) -> None:
        """Let a rollout leave; its reward still counts."""
        piece, place = self._columns["piece"][row], int(self._columns["place"][row])
        if self._columns["present"][row]:
            self._columns["present"][row] = False
            piece.let_go([place])
            piece.members.present -= 1
            if not piece.members.present:
                self._left.add(piece.members.number)

    def row_of(self, serial: int) -> int:
        """The row of a rollout."""
        if not self._is_sorted:
            self.settle()
        return int(np.searchsorted(self.column("serial"), serial))

    def drop(self, members: Members) -> None:
        """Forget a group."""
        if members.present:
            members.present = 0
            self._left.add(members.number)

    def settle(self) -> None:
        """Let go of the rows of groups that have left, and put others that were there before where they were."""
        rows: npt.NDArray[Any] | None = None
        if self._left:
            gone = np.isin(self.column("group"), np.fromiter(self._left, np.int64))
            rows = np.flatnonzero(~gone) if gone.any() else None
            self._left.clear()
        if not self._is_sorted:
            rows = np.arange(self._count) if rows is None else rows
            rows = rows[np.argsort(self.column("serial")[rows])]
            self._is_sorted = True
        if rows is not None:
            for values in self._columns.values():
                values[: len(rows)] = values[rows]
            self._columns["piece"][len(rows) : self._count] = None
            self._count = len(rows)
            self._is_scored = False

    def scored(self) -> npt.NDArray[np.float64]:
        """The advantage of every row, float64 ``[n]``."""
        if not self._is_scored:
            worth = checked_worth(self._advantage, self.column("reward"), self.column("group"))
            self._columns["advantage"][: self._count] = worth
            self._is_scored = True
        return self.column("advantage")
