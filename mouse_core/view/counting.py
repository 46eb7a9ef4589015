"""Counts the episodes of a snapshot, one block of rows at a time; sorts and filters episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import step_begins, sums_by_episode
from mouse_core.errors import ConfigError
from mouse_core.formats.columns import MISSING
from mouse_core.spec import check_choice, codes_called
from mouse_core.store.snapshot import Snapshot
from mouse_core.view.columns import Singles, is_filler, single_columns

Int64s = npt.NDArray[np.int64]

OWN = ("episode", "start", "length", "return", "done")
"""Names of the columns that every list of episodes has."""

_BLOCK, _WINDOW = 1 << 17, 1 << 12
_ORDERS_KEPT = 8


@dataclass(frozen=True)
class Query:
    """The filter and the order of a list of episodes.

    Args:
        sort: The column by which episodes are sorted.
        down: Whether the largest values come first.
        low, high: Smallest and largest allowed value by column, as numbers or texts; for ``done`` also the label of a
            code. An episode without a value does not pass a filter.
        has: Texts by column that the value of the column must contain (case is ignored). Numbers are compared in their
            shortest text form.
    """

    sort: str = "episode"
    down: bool = False
    low: Mapping[str, float | str] = field(default_factory=dict)
    high: Mapping[str, float | str] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which the result of the query is cached."""
        limits = (tuple(sorted(one.items())) for one in (self.low, self.high, self.has))
        return (self.sort, self.down, *limits)


class EpisodeList:
    """The counted episodes of a snapshot: their first rows, lengths, returns and ends.

    Each call of ``advance`` reads rows for a limited time, so that the page can show the first episodes while other
    episodes are counted. After all rows are counted, the values equal the result of ``Store.episodes``.

    Args:
        snapshot: The rows.
        tasks: The texts of tasks, by number.
        block: Number of rows that are read together.
    """

    def __init__(self, snapshot: Snapshot, tasks: Mapping[int, str] | None = None, *, block: int = _BLOCK) -> None:
        self._tasks, self._block = tasks or {}, block
        self._begin(snapshot)

    def _begin(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.counted = 0
        self._starts: list[Int64s] = []
        self._sums: list[npt.NDArray[np.float64]] = []
        self._ends: list[Int64s] = []
        # For the last episode, which may continue in the next row: its return so far, and the done code and step number
        # of its last row.
        self._sum, self._code, self._ended, self._time = 0.0, 0, True, -1
        self._made: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        self._orders: dict[tuple[Any, ...], Int64s] = {}
        self._singles = Singles(self._tasks)

    def take(self, snapshot: Snapshot) -> bool:
        """Replace the snapshot by a later snapshot; return whether the counted episodes are still valid."""
        before = self.snapshot
        if snapshot is before:
            return True
        grown = snapshot.config == before.config and (snapshot.begins_as(before) or not before.num_rows)
        if not grown:
            self._begin(snapshot)
            return False
        self.snapshot = snapshot
        return True

    @property
    def is_whole(self) -> bool:
        """Whether all rows were counted."""
        return self.counted >= self.snapshot.num_rows

    def advance(self, seconds: float) -> None:
        """Count at least one block of rows, and more blocks until about ``seconds`` have passed.

        Raises:
            DataError: A value is outside the bounds of its field.
        """
        until = time.monotonic() + seconds
        while not self.is_whole:
            self._count(self.counted, min(self.counted + self._block, self.snapshot.num_rows))
            if time.monotonic() >= until:
                return

    def _count(self, begin: int, end: int) -> None:
        rows, n = self.snapshot, end - begin
        # Short windows lie within one record batch more often than one long window.
        length = _WINDOW if n % _WINDOW == 0 else n
        at = np.arange(begin, end, length)
        readers = rows.readers
        alive = codes_called(rows.config.fields["done"], "alive") or (0,)
        codes, times = (
            rows.stored(name, at, length).astype(np.int64) if name in readers else np.full(n, none)
            for name, none in (("done", 0), ("time", -1))
        )
        stops = ~np.isin(codes, alive) if "done" in readers else np.full(n, "time" not in readers)
        breaks = step_begins(stops, self._ended, times=times, time_before=self._time)
        before = np.concatenate([[self._time], times[:-1]])
        breaks[0] |= begin == 0
        for row in rows.recording_starts:
            # An episode continues from one block to the next only if its step numbers do: 7 after 6.
            if begin <= row < end and not 0 <= before[row - begin] == times[row - begin] - 1:
                breaks[row - begin] = True
        (starts,) = np.nonzero(breaks)
        reward = np.zeros(n)
        if self._has_returns:
            reward = rows.stored("reward", at, length, np.dtype(np.float64))
            if rows.alignment == "arrived":
                reward[starts] = 0
        sums, _ = sums_by_episode(breaks, reward, self._sum, int(begin > 0))
        before_codes = np.concatenate([[self._code], codes[:-1]])
        self._starts.append(starts + begin)
        self._sums.append(sums[:-1])
        # Each new episode ends the previous one, except the very first episode.
        self._ends.append(before_codes[starts][int(begin == 0) :])
        self._sum, self._code = float(sums[-1]), int(codes[-1])
        self._ended, self._time = bool(stops[-1]), int(times[-1])
        self.counted = end

    # ------------------------------------------------------------------ what was counted

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the counted columns, ``[n]`` each. The last episode has the values that were counted so far."""
        if self._made is not None and self._made[0] == self.counted:
            return self._made[1]
        none = np.zeros(0, np.int64)
        starts = np.concatenate([none, *self._starts])
        # The parts are joined once, so that repeated calls are cheap.
        self._starts = [starts]
        self._sums, self._ends = [np.concatenate([np.zeros(0), *self._sums])], [np.concatenate([none, *self._ends])]
        open_sum, open_end = ([self._sum], [self._code]) if len(starts) else ([], [])
        found = {
            "episode": np.arange(len(starts)),
            "start": starts,
            "length": np.diff(starts, append=self.counted),
            "return": np.concatenate([self._sums[0], open_sum]),
            "done": np.concatenate([self._ends[0], np.array(open_end, np.int64)]),
        }
        self._made = (self.counted, found)
        self._orders = {}
        return found

    def __len__(self) -> int:
        return len(self.columns()["start"])

    @property
    def _has_returns(self) -> bool:
        """Whether rewards are single numbers."""
        reward = self.snapshot.readers.get("reward")
        return reward is not None and not reward.spec.shape

    def names(self) -> list[str]:
        """Return the columns for sorting and filtering: the counted columns, then columns with single values."""
        own = [name for name in OWN if name != "return" or self._has_returns]
        return own + [name for name in single_columns(self.snapshot, self._tasks) if name not in own]

    def values(self, name: str, numbers: Int64s | None = None) -> npt.NDArray[Any]:
        """Return the values of a column for all episodes, or for the episodes with the indices ``numbers``.

        Returns:
            Numbers, float64 ``[n]``, with NaN for missing values; or texts ``[n]``, with None for missing values. For a
                column with a value in every row, the value of an episode is the last value that is not null in the rows
                of the episode.

        Raises:
            ConfigError: The column does not exist.
        """
        own = self.columns()
        if name in own:
            return own[name] if numbers is None else own[name][numbers]
        check_choice("column", name, self.names())
        last = own["start"] + own["length"] - 1
        if is_filler(self.snapshot, name):
            lacking = self._singles.of_all(self.snapshot, MISSING, last) == 1
            last = last - (lacking & (own["length"] > 1))
        if numbers is None:
            return self._singles.of_all(self.snapshot, name, last)
        return self._singles.of_some(self.snapshot, name, last[numbers])

    def order(self, query: Query) -> Int64s:
        """Return the indices of the episodes that pass the filter of a query, in the query's order.

        Episodes without a value are last.

        Raises:
            ConfigError: A column does not exist, or a limit for a numeric column is not a number.
        """
        self.columns()
        known = self._orders.get(query.key)
        if known is not None:
            return known
        kept = np.ones(len(self), np.bool_)
        for name, text in query.has.items():
            kept &= _contains(self.values(name), text)
        for limits, meets in ((query.low, np.greater_equal), (query.high, np.less_equal)):
            for name, limit in limits.items():
                values = self.values(name)
                if values.dtype == object:
                    shown = np.array([shortest(value) for value in values.tolist()], np.str_)
                    kept &= (shown != "") & meets(shown, str(limit))
                else:
                    kept &= meets(values, self._limit(name, limit))
        (found,) = np.nonzero(kept)
        order = _sorted(found, self.values(query.sort), query.down)
        while len(self._orders) >= _ORDERS_KEPT:
            self._orders.pop(next(iter(self._orders)))
        self._orders[query.key] = order
        return order

    def _limit(self, name: str, given: float | str) -> float:
        labels = list(self.snapshot.config.fields["done"].labels) if name == "done" else []
        try:
            return labels.index(str(given)) if given in labels else float(given)
        except ValueError:
            wanted = f"a number or one of {labels}" if labels else "a number"
            raise ConfigError(f"{name}: expected {wanted} as a limit, found {given!r:.80}") from None


def _contains(values: npt.NDArray[Any], text: str) -> npt.NDArray[np.bool_]:
    wanted = text.casefold()
    shown = {value: wanted in shortest(value).casefold() for value in set(values.tolist())}
    return np.array([shown[value] for value in values.tolist()], np.bool_)


def shortest(value: Any) -> str:
    """Return a value as text: integers without a decimal point, missing values as an empty text."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _sorted(found: Int64s, values: npt.NDArray[Any], down: bool) -> Int64s:
    chosen = values[found]
    if chosen.dtype == object:
        missing = np.array([value is None for value in chosen.tolist()], np.bool_)
        texts = np.array(["" if value is None else value for value in chosen.tolist()], np.str_)
        _, ranks = np.unique(texts, return_inverse=True)
    else:
        missing = np.isnan(chosen) if chosen.dtype.kind == "f" else np.zeros(len(chosen), np.bool_)
        ranks = np.where(missing, 0, chosen)
    # Stable in both directions: equal episodes stay in the order of the store.
    order = np.lexsort((found, -ranks if down else ranks, missing))
    result: Int64s = found[order]
    return result
