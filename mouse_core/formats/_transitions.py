"""From transitions (T of them) to rows (T+1): where most conversions go wrong, done in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats._columns import MISSING, Columns

FINAL = ("drop", "mark")


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
        self._held: tuple[Columns, Columns, npt.NDArray[np.bool_]] | None = None
        self._last: Columns | None = None
        self._begun = False
        self.episodes = 0

    def add(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: npt.NDArray[np.bool_],
        following: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Columns:
        """Rows for some transitions; without ``following`` the last transition waits for its successor.

        Args:
            observations: Columns of the observation that a transition leaves, ``[T, ...]``.
            arriving: Columns that the transition brings: ``action``, ``reward``, ``done``, metadata, ``[T, ...]``.
            begins: Whether an episode begins with this transition, ``[T]``. The first of all always begins one.
            following: The columns of ``observations``, of the observation that the transition leads to. Where they
                differ from the next transition's, the recording is not continuous, and an episode begins there too.

        Returns:
            Columns of rows; empty arrays where all is held back.

        Raises:
            ConfigError: An episode's final observation is missing and no ``final`` was chosen.
            DataError: Columns of differing lengths.
        """
        lengths = {len(values) for part in (observations, arriving, following or {}) for values in part.values()}
        if len(lengths | {len(begins)}) > 1:
            raise DataError(f"{self._where}: expected columns of one length, found lengths {sorted(lengths)}")
        begins = np.array(begins, dtype=bool)
        if following is not None:
            return self._with_following(observations, arriving, begins, following)
        observations, arriving = dict(observations), dict(arriving)
        if self._held is not None:
            held_observations, held_arriving, held_begins = self._held
            observations = self._joined(held_observations, observations)
            arriving = self._joined(held_arriving, arriving)
            begins = np.concatenate([held_begins, begins])
        if len(begins) and not self._begun:
            begins[0] = self._begun = True
        # To see whether a transition is the last one of its episode takes its successor; "drop" must also know
        # whether the successor is.
        return self._take(observations, arriving, begins, max(len(begins) - (2 if self._final == "drop" else 1), 0))

    def finish(self) -> Columns | None:
        """Rows for the transitions that waited, of which the last ends its episode; None where none did."""
        if self._held is None or not len(self._held[2]):
            return None
        observations, arriving, begins = self._held
        return self._take(observations, arriving, begins, len(begins))

    def _take(self, observations: Columns, arriving: Columns, begins: npt.NDArray[np.bool_], ready: int) -> Columns:
        """Rows for the first ``ready`` transitions; the others are held back."""
        last = np.concatenate([begins[1:], np.ones(1, bool)])[: len(begins)]
        missing = last[:ready]
        if missing.any() and self._final is None:
            check_final(None, where=self._where)
        # Where all are taken, what follows the last one is not known; what stands there is not used.
        whole = ready == len(begins)
        following = {
            name: np.roll(values, -1, axis=0) if whole else values[1 : ready + 1]
            for name, values in observations.items()
        }
        now = {name: values[:ready] for name, values in observations.items()}
        brought = {name: values[:ready] for name, values in arriving.items()}
        if self._final == "drop" and "done" in brought:
            stops = ~missing & np.concatenate([last[1:], np.zeros(1, bool)])[:ready]
            brought["done"] = np.where(stops & (brought["done"] == 0), 2, brought["done"])
        self._held = (
            {name: values[ready:].copy() for name, values in observations.items()},
            {name: values[ready:].copy() for name, values in arriving.items()},
            begins[ready:].copy(),
        )
        return self._layout(now, brought, begins[:ready], following, missing)

    def _joined(self, held: Columns, values: Mapping[str, npt.NDArray[Any]]) -> Columns:
        for name, array in values.items():
            if name not in held or held[name].shape[1:] != array.shape[1:]:
                wanted = list(held[name].shape[1:]) if name in held else "no such column"
                raise DataError(f"{self._where}: column {name!r}: expected {wanted}, found {list(array.shape[1:])}")
        return {name: np.concatenate([held[name], array]) for name, array in values.items()}

    def _with_following(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: npt.NDArray[np.bool_],
        following: Mapping[str, npt.NDArray[Any]],
    ) -> Columns:
        if len(begins):
            for name, values in observations.items():
                begins[1:] |= _differ(following[name][:-1], values[1:])
                if self._last is not None:
                    begins[:1] |= _differ(self._last[name], values[:1])
            if not self._begun:
                begins[0] = self._begun = True
            self._last = {name: values[-1:].copy() for name, values in following.items()}
        return self._layout(observations, arriving, begins, following, None)

    def _layout(
        self,
        observations: Mapping[str, npt.NDArray[Any]],
        arriving: Mapping[str, npt.NDArray[Any]],
        begins: npt.NDArray[np.bool_],
        following: Mapping[str, npt.NDArray[Any]],
        missing: npt.NDArray[np.bool_] | None,
    ) -> Columns:
        """Lay rows out: every transition gives the row that it leads to, and before the first of an episode its start.

        ``missing`` says which transitions lead to an observation that is not stored; None where all are.
        """
        n = len(begins)
        kept = np.ones(n, bool)
        if missing is not None and self._final == "drop":
            kept = ~missing
        # Row of what transition j leads to: the rows of those before it, and the starts up to and including its own.
        starts_at = np.cumsum(begins) - 1
        leads_to = np.cumsum(kept) - 1 + np.cumsum(begins)
        start_rows = leads_to[begins] - kept[begins]
        count = int(kept.sum() + begins.sum())
        leads_to = leads_to[kept]
        rows: Columns = {}
        for name, values in arriving.items():
            rows[name] = placeholder(values, count)
            rows[name][leads_to] = values[kept]
        for name, values in observations.items():
            rows[name] = placeholder(values, count)
            rows[name][start_rows] = values[begins]
            rows[name][leads_to] = following[name][kept]
            if missing is not None and self._final == "mark":
                rows[name][leads_to[missing]] = placeholder(values)
        if missing is not None and self._final == "mark":
            rows[MISSING] = np.zeros(count, np.int64)
            rows[MISSING][leads_to[missing]] = 1
        rows["episode_step"] = self._steps(begins, starts_at, kept, leads_to, count)
        self.episodes += int(begins.sum())
        return rows

    def _steps(
        self,
        begins: npt.NDArray[np.bool_],
        starts_at: npt.NDArray[np.int64],
        kept: npt.NDArray[np.bool_],
        leads_to: npt.NDArray[np.int64],
        count: int,
    ) -> npt.NDArray[np.int64]:
        n = len(begins)
        steps = np.zeros(count, np.int64)
        if n:
            first = np.flatnonzero(begins)
            origin = np.where(starts_at >= 0, first[starts_at] if len(first) else 0, -self._step)
            number = np.arange(n) - origin + 1
            steps[leads_to] = number[kept]
            self._step = int(number[-1])
        return steps


def _differ(ones: npt.NDArray[Any], others: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether rows differ, NaN being equal to NaN."""
    unequal = ones != others
    if ones.dtype.kind == "f":
        unequal &= ~(np.isnan(ones) & np.isnan(others))
    return np.asarray(unequal.any(axis=tuple(range(1, unequal.ndim))) if unequal.ndim > 1 else unequal)
