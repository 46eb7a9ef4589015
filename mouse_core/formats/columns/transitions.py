"""From transitions (T of them) to rows (T+1): where most conversions go wrong, done in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats.columns.named import MISSING, Columns

FINAL = ("drop", "mark")
Bools = npt.NDArray[np.bool_]


def check_final(final: str | None, *, where: str, needed: bool = True) -> str | None:
    """Return ``final`` if it is a choice that can be used, and explain both where it is needed and absent.

    Args:
        final: What the caller chose: "drop", "mark" or None.
        where: What the message names, usually the file.
        needed: Whether the source lacks the observation that an episode ends in.

    Raises:
        ConfigError: An unknown choice, or none where one is needed.
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


def done_codes(terminated: npt.ArrayLike, truncated: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
    """Codes from two flags: 1 where an episode terminated (also where both are set), 2 where truncated, else 0."""
    ended = np.asarray(terminated).astype(bool)
    if truncated is None:
        return ended.astype(np.int64)
    return np.where(ended, 1, np.where(np.asarray(truncated).astype(bool), 2, 0)).astype(np.int64)


def placeholder(values: npt.NDArray[Any], count: int = 1) -> npt.NDArray[Any]:
    """``count`` rows of zeros (or empty text) that fit under ``values`` ``[n, ...]``."""
    if values.dtype.kind in "OSU":
        empty: Any = b"" if len(values) and isinstance(values[0], bytes) else ""
        return np.full((count, *values.shape[1:]), empty, dtype=object)
    return np.zeros((count, *values.shape[1:]), values.dtype)


def one_later(values: Columns, before: Columns, begins: Bools) -> Columns:
    """What each action brought, in the row behind the action's; zeros (or empty text) where an episode begins.

    Actions 5 6 7, behind an action 4 and with begins of 0 0 1, become 4 5 0.

    Args:
        values: In the rows of the actions, ``[n, ...]``.
        before: What stood in the last row of the piece before this one, ``[1, ...]``; is now that of this one.
        begins: Whether an episode begins with a row, ``[n]``.

    Raises:
        DataError: Another shape than before in the same episode.
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
    """How many rows of its episode come before each row, int64 ``[n]``.

    After 3 rows of an episode that goes on, ``begins`` of 0 0 1 0 1 gives 3 4 0 1 0.

    Args:
        begins: Whether an episode begins with a row, ``[n]``.
        before: How many rows there were of the episode that goes on.
    """
    first = np.flatnonzero(begins)
    latest = np.cumsum(begins) - 1  # which of the rows that begin an episode is the latest; -1: it began before
    origin = np.where(latest >= 0, first[latest] if len(first) else 0, -before)
    return (np.arange(len(begins)) - origin).astype(np.int64)


def episode_rows(
    observations: Mapping[str, npt.NDArray[Any]], arriving: Mapping[str, npt.NDArray[Any]], *, begins: int = 0
) -> Columns:
    """Rows of one episode, or of a piece of one, whose source has one observation more than it has actions.

    Args:
        observations: Columns that belong to the observation, ``[n, ...]``: rows ``begins .. begins + n - 1``.
        arriving: Columns that a transition brought. For a piece that begins the episode (``begins == 0``) there are
            ``n - 1``, and a placeholder row of zeros is put before them; else ``n``, from the transition that led to
            the piece's first row. ``done`` is among them.
        begins: The number of the piece's first row in its episode.

    Returns:
        All columns, ``[n, ...]`` each, and ``episode_step``.
    """
    n = len(next(iter(observations.values()))) if observations else len(next(iter(arriving.values()))) + (begins == 0)
    rows = {
        name: np.concatenate([placeholder(values), values]) if begins == 0 else values
        for name, values in arriving.items()
    }
    rows |= observations
    rows["episode_step"] = np.arange(begins, begins + n, dtype=np.int64)
    return rows


class TransitionRows:
    """Turns a stream of transitions, in the order they happened, into rows of the convention of stores.

    A transition is an observation, and what arrived after the action taken on it. ``add`` takes any number of them,
    from any number of episodes, and an episode may be spread over calls; ``finish`` gives the rows still held back.

    Args:
        final: What happens where the observation that an episode ends in is not stored ("drop" or "mark"); unused where
            ``following`` is given.
        where: What messages name.
    """

    def __init__(self, *, final: str | None, where: str) -> None:
        self._final = final
        self._where = where
        self._step = 0
        self._begun = False
        self._held: dict[str, Columns] | None = None
        self._last: Columns | None = None
        self.episodes = 0

    def add(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: Bools,
        following: Mapping[str, npt.NDArray[Any]] | None = None,
        beside: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Columns:
        """Rows for some transitions; the last ones wait for their successors, where these matter.

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
            Columns of rows; empty arrays where all is held back.

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
        self._check_lengths(parts)
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
        """Rows for the transitions that waited, of which the last ends its episode; None where none did."""
        if self._held is None or not len(self._held["begins"]["begins"]):
            return None
        return self._take(self._held, len(self._held["begins"]["begins"]))

    def _check_lengths(self, parts: dict[str, Columns]) -> None:
        lengths = {len(values) for part in parts.values() for values in part.values()}
        if len(lengths) > 1:
            raise DataError(f"{self._where}: expected columns of one length, found lengths {sorted(lengths)}")

    def _mark_begins(self, parts: dict[str, Columns]) -> None:
        """An episode begins also with the very first transition, and where the one before led to something else."""
        begins = parts["begins"]["begins"]
        for name, values in parts["following"].items():
            begins[1:] |= differ(values[:-1], parts["observations"][name][1:])
            if self._last is not None:
                begins[:1] |= differ(self._last[name], parts["observations"][name][:1])
        if len(begins) and not self._begun:
            begins[0] = self._begun = True

    def _take(self, parts: dict[str, Columns], ready: int) -> Columns:
        """Rows for the first ``ready`` transitions; the others are held back."""
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
        self.episodes += int(begins.sum())
        return rows


def transition_rows(parts: Iterable[tuple[Any, ...]], *, final: str | None, where: str) -> Iterator[Columns]:
    """Rows for all transitions, which come in parts: each is what ``TransitionRows.add`` takes."""
    rows = TransitionRows(final=final, where=where)
    for part in parts:
        yield rows.add(*part)
    rest = rows.finish()
    if rest is not None:
        yield rest


def _next(columns: Columns, ready: int) -> Columns:
    """What stands one later, for the first ``ready``; after the last of all nothing is known, and anything stands."""
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
