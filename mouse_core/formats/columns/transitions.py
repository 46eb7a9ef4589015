"""Lay streams of transitions out as rows; ``mouse_core.columns.episode_rows`` does so for a whole episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, placeholder
from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.columns.named import MISSING

FINAL = ("drop", "mark")
Bools = npt.NDArray[np.bool_]


def check_final(final: str | None, *, where: str, needed: bool = True) -> str | None:
    """Return ``final`` after checking it; the error explains both choices if one is needed and missing.

    Args:
        final: "drop", "mark" or None.
        where: Prefix of the message, usually the file.
        needed: Whether the source lacks the observation that an episode ends in.

    Raises:
        ConfigError: An unknown choice, or None where a choice is needed.
    """
    if final is not None and final not in FINAL:
        raise ConfigError(f"final: expected one of {list(FINAL)} or None, found {final!r}")
    if needed and final is None:
        raise ConfigError(
            f"{where}: the observation that an episode ends in is not stored there, so choose: final='drop' leaves out "
            "the last transition of every episode, its reward and its ending included, and the rows say truncated "
            f"(done 2) where they stop; final='mark' keeps it, with zeros as the last observation and a column "
            f"{MISSING!r} that is 1 there"
        )
    return final


def one_later(values: Columns, before: Columns, begins: Bools) -> Columns:
    """Move values one row later: from the row of an action to the next row; zeros (or empty texts) begin an episode.

    Actions 5 6 7, behind an action 4 and with begins of 0 0 1, become 4 5 0.

    Args:
        values: Values in the rows of the actions, ``[n, ...]``.
        before: Values of the last row of the piece before, ``[1, ...]``; replaced by those of this piece.
        begins: Whether an episode begins with a row, ``[n]``.

    Raises:
        DataError: The shape changes within an episode.
    """
    later: Columns = {}
    for name, array in values.items():
        head = placeholder(array) if begins[0] else before[name]
        if head.shape[1:] != array.shape[1:]:
            raise DataError(f"{name}: expected shape {list(head.shape[1:])}, found {list(array.shape[1:])}")
        later[name] = np.concatenate([head, array[:-1]])
        later[name][begins] = placeholder(array)
        before[name] = array[-1:].copy()
    return later


def step_numbers(begins: Bools, before: int = 0) -> npt.NDArray[np.int64]:
    """Return the number of rows before each row in its episode, int64 ``[n]``.

    After 3 rows of an episode that continues, ``begins`` of 0 0 1 0 1 gives 3 4 0 1 0.

    Args:
        begins: Whether an episode begins with a row, ``[n]``.
        before: The number of earlier rows of the episode that continues.
    """
    first = np.flatnonzero(begins)
    latest = np.cumsum(begins) - 1  # which of the rows that begin an episode is the latest; -1: it began before
    origin = np.where(latest >= 0, first[latest] if len(first) else 0, -before)
    return (np.arange(len(begins)) - origin).astype(np.int64)


class TransitionRows:
    """Turns transitions, in the order they happened, into rows with alignment "arrived".

    A transition is an observation, an action, and the values that arrived after the action. ``add`` takes any number of
    transitions of any number of episodes; an episode may go on in the next call. ``finish`` returns the last rows.

    Args:
        final: What becomes of the last transition of an episode whose last observation is not stored ("drop" or
            "mark"); unused with ``following``.
        where: Prefix of messages.
    """

    def __init__(self, *, final: str | None, where: str) -> None:
        self._final = final
        self._where = where
        self._step = 0
        self._begun = False
        self._held: dict[str, Columns] | None = None
        self._last: Columns | None = None

    def add(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: Bools,
        following: Mapping[str, npt.NDArray[Any]] | None = None,
        beside: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Columns:
        """Return rows for some transitions; the last transitions are held if they need their successors.

        Args:
            observations: Columns of the observation that a transition leaves, ``[T, ...]``.
            arriving: Columns that the transition brings: ``action``, ``reward``, ``done``, metadata, ``[T, ...]``.
            begins: Whether an episode begins with this transition, ``[T]``. The first of all always begins one.
            following: The columns of ``observations``, of the observation that the transition leads to. Where they
                differ from the next transition's, the recording is not continuous, and an episode begins there too.
            beside: Columns that stay with the observation that a transition leaves, and of which nothing is known where
                an episode ends: fractions are NaN there. Whole numbers and texts repeat the row before, and so does
                ``metadata_*`` among ``observations`` where the last observation is missing: a task stays what it was.

        Returns:
            Columns of rows; empty arrays if all transitions are held.

        Raises:
            ConfigError: An episode's final observation is missing and no ``final`` was chosen.
            DataError: Columns of differing lengths or shapes.
        """
        parts: dict[str, Columns] = {
            "observations": dict(observations),
            "arriving": dict(arriving),
            "following": dict(following or {}),
            "beside": dict(beside or {}),
            "begins": {"begins": np.array(begins, dtype=bool)},
        }
        lengths = {len(values) for part in parts.values() for values in part.values()}
        if len(lengths) > 1:
            raise DataError(f"{self._where}: expected columns of one length, found lengths {sorted(lengths)}")
        if self._held is not None:
            parts = {name: self._joined(self._held[name], part) for name, part in parts.items()}
        self._mark_begins(parts)
        count = len(parts["begins"]["begins"])
        # To see whether a transition is the last one of its episode takes its successor; "drop" must also know
        # whether the successor is.
        waiting = 2 if self._final == "drop" else 1
        if parts["following"]:
            # Nothing waits where all is known already.
            waiting = 1 if parts["beside"] else 0
            if count and not waiting:
                self._last = {name: values[-1:].copy() for name, values in parts["following"].items()}
        return self._take(parts, max(count - waiting, 0))

    def finish(self) -> Columns | None:
        """Return rows for the held transitions, of which the last ends its episode; None if none is held."""
        if self._held is None or not len(self._held["begins"]["begins"]):
            return None
        return self._take(self._held, len(self._held["begins"]["begins"]))

    def _mark_begins(self, parts: dict[str, Columns]) -> None:
        """Mark the first transition of all, and each whose observation the transition before did not lead to."""
        begins = parts["begins"]["begins"]
        for name, values in parts["following"].items():
            begins[1:] |= differ(values[:-1], parts["observations"][name][1:])
            if self._last is not None:
                begins[:1] |= differ(self._last[name], parts["observations"][name][:1])
        if len(begins) and not self._begun:
            begins[0] = self._begun = True

    def _take(self, parts: dict[str, Columns], ready: int) -> Columns:
        """Return rows for the first ``ready`` transitions, and hold the others."""
        flags = parts["begins"]["begins"]
        ends = np.concatenate([flags[1:], np.ones(1, bool)])[: len(flags)]
        last = ends[:ready]
        known = bool(parts["following"])
        if last.any() and self._final is None and not known:
            check_final(None, where=self._where)
        self._held = {
            name: {column: values[ready:].copy() for column, values in part.items()} for name, part in parts.items()
        }
        now = {name: {column: values[:ready] for column, values in part.items()} for name, part in parts.items()}
        brought = now["arriving"]
        kept = np.ones(ready, bool)
        if self._final == "drop" and not known:
            kept = ~last
            if "done" in brought:
                stops = kept & np.concatenate([ends[1:], np.zeros(1, bool)])[:ready]
                brought["done"] = np.where(stops & (brought["done"] == 0), 2, brought["done"])
        # What belongs to the row that a transition leads to.
        then = {
            "observations": now["following"] if known else _next(parts["observations"], ready),
            "beside": _next(parts["beside"], ready),
        }
        return self._layout(now, then, kept, last, known)

    def _joined(self, held: Columns, values: Columns) -> Columns:
        for name in held.keys() - values.keys():
            raise DataError(f"{self._where}: column {name!r}: expected it as in the rows before, found no such column")
        for name, array in values.items():
            if name not in held or held[name].shape[1:] != array.shape[1:]:
                wanted = list(held[name].shape[1:]) if name in held else "no such column"
                raise DataError(f"{self._where}: column {name!r}: expected {wanted}, found {list(array.shape[1:])}")
        return {name: np.concatenate([held[name], array]) for name, array in values.items()}

    def _layout(
        self, now: dict[str, Columns], then: dict[str, Columns], kept: Bools, last: Bools, known: bool
    ) -> Columns:
        """Lay rows out: each transition gives the row that it leads to, and before the first of an episode its start.

        ``kept`` says which transitions have a row, ``last`` which end an episode, ``known`` whether the observations
        that those lead to are there; ``then`` holds what belongs to the row a transition leads to.
        """
        begins = now["begins"]["begins"]
        # Row of what transition j leads to: the rows of those before it, and the starts up to and including its own.
        # Two episodes of two transitions are six rows; begins is 1 0 1 0, and if all are kept, the transitions lead to
        # rows 1 2 4 5, and the episodes start in rows 0 and 3.
        leads_to = np.cumsum(kept) - 1 + np.cumsum(begins)
        start_rows = leads_to[begins] - kept[begins]
        count = int(kept.sum() + begins.sum())
        ends_at = leads_to[last & kept]
        leads_to = leads_to[kept]
        rows: Columns = {}
        for name, values in now["arriving"].items():
            rows[name] = placeholder(values, count)
            rows[name][leads_to] = values[kept]
        for part, following in then.items():
            for name, values in now[part].items():
                rows[name] = placeholder(values, count)
                rows[name][start_rows] = values[begins]
                rows[name][leads_to] = following[name][kept]
                if part == "beside" and values.dtype.kind == "f":
                    rows[name][ends_at] = np.nan
                elif part == "beside" or (not known and name.startswith("metadata_")):
                    rows[name][ends_at] = values[last & kept]
                elif not known:
                    rows[name][ends_at] = placeholder(values)
        if self._final == "mark" and not known:
            rows[MISSING] = np.zeros(count, np.int64)
            rows[MISSING][ends_at] = 1
        rows["episode_step"] = np.zeros(count, np.int64)
        if len(begins):
            numbers = step_numbers(begins, self._step) + 1  # row 0 is the one that the first transition leaves
            rows["episode_step"][leads_to] = numbers[kept]
            self._step = int(numbers[-1])
        return rows


def transition_rows(parts: Iterable[tuple[Any, ...]], *, final: str | None, where: str) -> Iterator[Columns]:
    """Yield rows for all transitions; each part holds the arguments of ``TransitionRows.add``."""
    rows = TransitionRows(final=final, where=where)
    for part in parts:
        yield rows.add(*part)
    rest = rows.finish()
    if rest is not None:
        yield rest


def _next(columns: Columns, ready: int) -> Columns:
    """Return the next row of each of the first ``ready`` rows; the row after the last one is arbitrary."""
    return {
        name: values[1 : ready + 1] if ready < len(values) else np.roll(values, -1, axis=0)
        for name, values in columns.items()
    }


def differ(ones: npt.NDArray[Any], others: npt.NDArray[Any]) -> Bools:
    """Whether rows differ, NaN being equal to NaN."""
    unequal = ones != others
    if ones.dtype.kind == "f":
        unequal &= ~(np.isnan(ones) & np.isnan(others))
    return np.asarray(unequal.any(axis=tuple(range(1, unequal.ndim))))
