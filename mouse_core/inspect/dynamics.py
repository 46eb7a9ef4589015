"""Checks of the order in time: that clocks advance, that camera images change, and that each action is stored in the
correct row.

A linear fit predicts the change of the observation, ``y = o[t+1] - o[t]``, from ``o[t]``, ``o[t-1]`` and the actions of
three rows: the action that led to ``o[t+1]`` according to the alignment (``stated``), the action one row before
(``earlier``), and the action one row after (``later``). In correct rows, ``earlier`` adds no information for any
policy, because a step depends only on observations and on the action that was taken. ``later`` can add information,
because a policy chooses the later action from ``o[t+1]``. If ``earlier`` explains the changes better than ``stated``,
the actions are shifted by a row.

A shift to the later action is detected by a reverse fit, which predicts each action from ``o[t]`` and ``o[t+1]``. The
action taken between the two observations was chosen from ``o[t]`` and led to ``o[t+1]``, so these observations contain
all information about this action. An action that was chosen from ``o[t+1]`` is predicted worse, because the two
observations contain no information about the noise of the policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.inspect.report import MOST, Finding, Places, some
from mouse_core.inspect.sampling import Bools, Floats, Int64s, Sampled, SampledColumn, UInt64s, quantiles

_CLOCK = re.compile(r"(.*[._])?time_?stamps?(_(s|ms|us|ns|sec|seconds))?|(metadata_|observation[._])?time")
# Durations are counted in four buckets for each power of two.
_FINE, _BUCKETS, _MIDDLE = 4, 1024, 512
_JUMP = 4.0
_OFTEN = 0.02
_FROZEN, _FROZEN_NOTED = 20, 10


def is_clock(name: str) -> bool:
    """Whether a column is a clock, judged by the name of the column."""
    return _CLOCK.fullmatch(name) is not None


class Clock:
    """Counts the durations between consecutive rows of a column of times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last = np.nan
        self._backwards = 0
        self._back = Places()
        # The longest durations, and the episode and step at the end of each.
        self._longest = np.zeros((0, 3))
        self._counts = np.zeros(_BUCKETS, np.int64)

    def add(self, times: Floats, start: Bools, episode: Int64s, step: Int64s) -> None:
        """Add rows; each argument is an array ``[n]``, with NaN for a missing time."""
        passed = np.diff(times, prepend=self._last)
        self._last = float(times[-1])
        passed[start | ~np.isfinite(passed)] = np.nan
        back = np.flatnonzero(passed < 0)
        self._backwards += len(back)
        self._back.add(episode[back], step[back])
        forward = passed[passed > 0]
        if not len(forward):
            return
        self._counts += np.bincount(_buckets(forward), minlength=_BUCKETS)
        least = self._longest[-1, 0] if len(self._longest) == MOST else 0.0
        longer = np.flatnonzero(passed > least)
        found = np.stack([passed[longer], episode[longer], step[longer]], axis=1)
        found = np.concatenate([self._longest, found])
        self._longest = found[np.argsort(-found[:, 0], kind="stable")][:MOST]

    def findings(self) -> Iterator[Finding]:
        """Yield findings about times that decrease, and about durations that are much longer than all others."""
        if self._backwards:
            message = f"{self.name}: decreases in {self._backwards:,} rows within episodes"
            found = self._back.with_places(Finding("time-backwards", "warning", message, self.name))
            yield replace(found, message=f"{message}, first in episode {found.episode}, step {found.step}")
        total = int(self._counts.sum())
        if not total:
            return
        middle = int(np.searchsorted(np.cumsum(self._counts), total / 2))
        first = middle + int(_FINE * np.log2(_JUMP))
        jumps = int(self._counts[first:].sum())
        if jumps:
            usual = 2.0 ** ((middle - _MIDDLE) / _FINE)
            longest, episode, step = self._longest[0].tolist()
            message = (
                f"{self.name}: {jumps:,} of {total:,} steps take at least {_JUMP:g} times the usual {usual:.3g}, "
                f"up to {longest:.4g} in episode {episode:.0f}, step {step:.0f}; rows are probably missing"
            )
            level = "warning" if jumps < _OFTEN * total else "note"
            where = some(self._longest[_buckets(self._longest[:, 0]) >= first, 1].astype(np.int64))
            yield Finding("time-jumps", level, message, self.name, None, None, int(episode), int(step), where)


def _buckets(durations: Floats) -> Int64s:
    """Return the index of the histogram bucket of each duration; durations must be above 0."""
    return np.asarray(np.clip(np.round(_FINE * np.log2(durations)) + _MIDDLE, 0, _BUCKETS - 1), np.int64)


class Camera:
    """Measures how long the images of a camera stay equal while other observations change."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: Any = None
        self._last_other: Any = None
        self._run = 0
        self._run_at = (0, 0)
        self._runs = np.zeros(4096, np.int64)
        # The longest stretch: its length, episode and step.
        self._longest: list[tuple[int, int, int]] = []

    def add(self, pictures: UInt64s, others: UInt64s, start: Bools, episode: Int64s, step: Int64s) -> None:
        """Add the hash of each row's image, and the hash of each row's other observations."""
        same, moved = _same(pictures, self._last), ~_same(others, self._last_other)
        self._last, self._last_other = pictures[-1], others[-1]
        frozen = same & moved & ~start
        edges = np.flatnonzero(np.diff(np.concatenate([[0], frozen.view(np.int8), [0]])))
        begins, ends = edges[::2], edges[1::2]
        if self._run and not (len(begins) and begins[0] == 0):
            self._close()
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin or not self._run:
                self._run_at = int(episode[begin]), int(step[begin])
            self._run += end - begin
            if end < len(frozen):
                self._close()

    def _close(self) -> None:
        self._runs[min(self._run, len(self._runs) - 1)] += 1
        if self._run >= _FROZEN_NOTED:
            self._longest.append((self._run, *self._run_at))
        if len(self._longest) > 2 * MOST:
            self._longest = _longest_first(self._longest)[:MOST]
        self._run = 0

    def findings(self) -> Iterator[Finding]:
        """Yield a finding if images stay equal over many consecutive rows, for much longer than in all other rows."""
        if self._run:
            self._close()
        if not self._longest:
            return
        found = _longest_first(self._longest)
        longest, episode, step = found[0]
        long = max(_FROZEN_NOTED, longest // 4)
        usual = int(np.searchsorted(np.cumsum(self._runs[:long]), 0.9 * self._runs[:long].sum()))
        rare = self._runs[long:].sum() <= max(3, 0.1 * self._runs.sum())
        if longest < 5 * max(usual, 1):
            return
        level = "warning" if longest >= _FROZEN and rare else "note"
        message = (
            f"{self.name}: the image is equal for {longest:,} steps, from episode {episode}, step {step}, "
            "while other observations change"
        )
        where = some(number for length, number, _ in found if length >= long)
        yield Finding("frozen-camera", level, message, self.name, None, None, episode, step, where)


def _longest_first(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return sorted(runs, key=lambda run: -run[0])


def _same(hashes: UInt64s, before: Any) -> npt.NDArray[np.bool_]:
    first = hashes[:1] + np.uint64(1) if before is None else np.array([before], np.uint64)
    return np.asarray(hashes == np.concatenate([first, hashes[:-1]]))


def about_statistics(
    said: Mapping[str, Mapping[str, Any]], known: Mapping[str, Mapping[str, Floats]]
) -> Iterator[Finding]:
    """Yield findings about stored statistics that differ from the statistics computed from the rows.

    Args:
        said: Stored ``mean``, ``std``, ``min`` and ``max`` by column.
        known: Computed ``mean``, ``deviation``, ``low`` and ``high`` by column, ``[width]`` each.
    """
    for name, numbers in known.items():
        found = {
            key: _numbers(said.get(name, {}).get(key), len(numbers["mean"])) for key in ("mean", "std", "min", "max")
        }
        for place in range(len(numbers["mean"])):
            reason = _contradiction({key: one[place] for key, one in found.items() if one is not None}, numbers, place)
            if reason is not None:
                where = f"{name}[{place}]" if len(numbers["mean"]) > 1 else name
                message = f"{where}: the stored statistics state {reason}: they were probably computed from other rows"
                yield Finding("statistics-contradict", "warning", message, name, place if where != name else None)
                break


def _numbers(found: Any, width: int) -> Floats | None:
    try:
        array = np.asarray(found, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return None
    return array if len(array) == width and np.isfinite(array).all() else None


def _contradiction(said: Mapping[str, float], numbers: Mapping[str, Floats], place: int) -> str | None:
    mean, deviation = float(numbers["mean"][place]), float(numbers["deviation"][place])
    low, high = float(numbers["low"][place]), float(numbers["high"][place])
    room = 0.01 * (high - low) + 1e-6 * max(abs(low), abs(high)) + 1e-9
    if "mean" in said and abs(said["mean"] - mean) > 0.25 * deviation + room:
        return f"the mean {said['mean']:g}, the rows have {mean:g}"
    if "std" in said and deviation > room and not 1 / 1.5 < said["std"] / deviation < 1.5:
        return f"the deviation {said['std']:g}, the rows have {deviation:g}"
    if "min" in said and low < said["min"] - room:
        return f"the minimum {said['min']:g}, the rows have {low:g}"
    if "max" in said and high > said["max"] + room:
        return f"the maximum {said['max']:g}, the rows have {high:g}"
    return None


BLOCKS = ("earlier", "stated", "later")
"""Names of blocks of actions. The blocks contain the stated action, the action of the row before it, and the action of
the row after it.
"""
_RIDGE = 1e-4


@dataclass(frozen=True)
class Steps:
    """The transitions from which the fits are computed.

    Args:
        seen: The observations ``o[t]`` and ``o[t-1]``, ``[n, 2 * p]``.
        changes: ``o[t+1] - o[t]``, ``[n, q]``.
        actions: Actions by block, ``[n, width]``.
        episode: The episode of each transition.
        place: The index of the sampled row that contains ``o[t]``.
    """

    seen: Floats
    changes: Floats
    actions: dict[str, Floats]
    episode: Int64s
    place: Int64s

    @property
    def now(self) -> Floats:
        """The observations ``o[t]``, ``[n, p]``."""
        return self.seen[:, : self.seen.shape[1] // 2]

    def where(self, chosen: Bools) -> Steps:
        """Return the transitions that a mask or an array of indices selects."""
        actions = {name: found[chosen] for name, found in self.actions.items()}
        return Steps(self.seen[chosen], self.changes[chosen], actions, self.episode[chosen], self.place[chosen])

    def __len__(self) -> int:
        return len(self.episode)


def _folds(steps: Steps) -> list[Bools]:
    """Return two halves of the steps; each half consists of every second segment of adjacent rows."""
    stretch = np.cumsum(np.diff(steps.place, prepend=steps.place[0]) > 1) // 2 + steps.place // 97
    return [stretch % 2 == 0, stretch % 2 == 1]


class _Fits:
    """The squared errors of fits on held-out rows, for each selection of blocks of actions."""

    def __init__(self, steps: Steps) -> None:
        self.parts = [np.ones((len(steps), 1)), steps.seen, *(steps.actions[name] for name in BLOCKS)]
        edges = np.cumsum([0, *(part.shape[1] for part in self.parts)])
        self.columns = {name: np.arange(edges[n + 2], edges[n + 3]) for n, name in enumerate(BLOCKS)}
        self.always = np.arange(edges[2])
        table = np.concatenate(self.parts, axis=1)
        folds = _folds(steps)
        self.fits = [(table[fold].T @ table[fold], table[fold].T @ steps.changes[fold]) for fold in folds]
        self.squares = [(steps.changes[fold] ** 2).sum(axis=0) for fold in folds]

    def error(self, names: tuple[str, ...]) -> Floats:
        """Return the residual of each change after a fit from the observations and these blocks of actions."""
        columns = np.concatenate([self.always, *(self.columns[name] for name in names)])
        total: Any = 0.0
        for fitted, held in ((0, 1), (1, 0)):
            weights = solved(*_chosen(self.fits[fitted], columns))
            gram, product = _chosen(self.fits[held], columns)
            total = total + self.squares[held] - 2 * (weights * product).sum(axis=0)
            total = total + (weights * (gram @ weights)).sum(axis=0)
        return np.asarray(np.maximum(total, 1e-12))


def _chosen(fit: tuple[Floats, Floats], columns: Int64s) -> tuple[Floats, Floats]:
    return fit[0][np.ix_(columns, columns)], fit[1][columns]


def solved(gram: Floats, product: Floats) -> Floats:
    """Return the fitted weights of a ridge regression."""
    size = max(float(gram[0, 0]), 1.0)
    return np.asarray(np.linalg.solve(gram + _RIDGE * size * np.eye(len(gram)), product))


def gains_of(steps: Steps) -> dict[str, float]:
    """Return, by name, a share of the squared error of a fit: the share that disappears if a block of actions is added
    to other blocks.

    For example, "earlier" is the share that ``earlier`` explains in addition to ``stated``, and "all" is the share that
    all three blocks explain.
    """
    fits = _Fits(steps)
    errors = {names: fits.error(names) for size in range(4) for names in combinations(BLOCKS, size)}
    all_of_it = errors[BLOCKS]
    # Uses only the changes that actions explain best.
    best = np.argsort(all_of_it / errors[()])[: max(1, min(3, len(all_of_it)))]

    def gain(without: tuple[str, ...], added: str) -> float:
        more = tuple(name for name in BLOCKS if name in without or name == added)
        return float((1 - errors[more] / errors[without])[best].mean())

    return {
        "earlier": gain(("stated",), "earlier"),
        "stated": gain(("earlier",), "stated"),
        "later": gain(("earlier", "stated"), "later"),
        "stated besides later": gain(("earlier", "later"), "stated"),
        "all": float((1 - all_of_it / errors[()])[best].mean()),
        "earlier besides all": gain(("stated", "later"), "earlier"),
    }


def left_by_pair(steps: Steps) -> dict[str, float]:
    """Return, for each block of actions, the share of variance that a fit from ``o[t]`` and ``o[t+1]`` leaves
    unexplained, averaged over dimensions.
    """
    table = np.concatenate([np.ones((len(steps), 1)), steps.now, steps.changes], axis=1)
    folds = _folds(steps)
    fits = [table[fold].T @ table[fold] for fold in folds]
    found = {}
    for name, actions in steps.actions.items():
        error: Any = 0.0
        total: Any = 0.0
        for fitted, held in ((0, 1), (1, 0)):
            weights = solved(fits[fitted], table[folds[fitted]].T @ actions[folds[fitted]])
            error = error + ((actions[folds[held]] - table[folds[held]] @ weights) ** 2).sum(axis=0)
            total = total + ((actions[folds[held]] - actions[folds[fitted]].mean(axis=0)) ** 2).sum(axis=0)
        shares = np.clip(error / np.maximum(total, 1e-12), 1e-4, 1.0)
        found[name] = float(np.exp(np.log(shares).mean()))
    return found


def explained_by_seen(steps: Steps) -> float:
    """Return the share of the variance of the stated actions that a linear fit from ``o[t]`` explains."""
    actions = steps.actions["stated"]
    actions = actions - actions.mean(axis=0)
    squares = float((actions**2).sum())
    table = np.concatenate([np.ones((len(steps), 1)), steps.now], axis=1)
    product = table.T @ actions
    return float((solved(table.T @ table, product) * product).sum() / squares) if squares else 1.0


FEWEST = 400
_MOST_STEPS = 16_384
_MOST_CODES = 24
_MOST_DIMENSIONS = 48
# Smallest gain that counts, for an action and for an earlier action (which gains a little if observations are
# incomplete); and the smallest ratio of gains that shows an earlier action clearly.
_EXPLAINS, _EARLIER_EXPLAINS, _ALONE = 0.02, 0.05, 5.0
# If the stated action's gain is below this share of the later action's gain, the stated action explains nothing. The
# later action was then taken between ``o[t]`` and ``o[t+1]`` if these observations leave clearly less of it
# unexplained: by more than chance for this number of steps, and by still more if the policy is almost a function of the
# observations.
_NOTHING, _NEXT_TO_NOTHING, _CHANCE, _CHANCE_OF_POLICY = 0.5, 0.35, 0.05, 0.15
# If the action is not such a function, this ratio alone suffices: observations may show the step before, as stacked
# frames do.
_NO_FUNCTION_OF_SEEN, _MUCH_LESS = 0.5, 0.87
# A stated action also counts as shifted if observations predict less than this share of it, relative to the later
# action.
_UNKNOWN = 0.2
# Slow machines still respond to the stated action when the later action has begun to act, so the observations predict
# both about equally well. If the observations explain less than this share of the stated action, the later action is
# not a policy's response to them.
_FUNCTION_OF_SEEN, _ABOUT_AS_MUCH, _THE_REST = 0.7, 1.3, 0.5
# If only some episodes are checked, which may come from another policy, a lower share suffices.
_FUNCTION_IN_SOME = 0.4
_FEWEST_EPISODES = 4
_FEWEST_THAT_TELL, _FEWEST_LIVELY = 150, 100
_FEWEST_ODD, _OBEYED = 2, 0.5
_FEWEST_IN_EPISODE = 5


def about_dynamics(sampled: Sampled, *, arrived: bool) -> Iterator[Finding]:
    """Yield findings about actions that are stored one row too early or too late, in all episodes or in some
    episodes.
    """
    steps = _steps_of(sampled, arrived=arrived)
    if steps is None:
        return
    gains = gains_of(steps)
    code = _verdict(gains, steps)
    if code != "stated" and code != "unknown":
        yield _finding(code, "all episodes that were sampled", steps, sampled, arrived)
        return
    if gains["all"] < _EXPLAINS:
        return
    for other in ("earlier", "later"):
        odd = _episodes_that_prefer(steps, other)
        if odd is None:
            continue
        chosen = np.isin(steps.episode, odd)
        there, rest = steps.where(chosen), steps.where(~chosen)
        if min(len(there), len(rest)) < FEWEST // 2:
            continue
        usual, found = gains_of(rest), _verdict(gains_of(there), there, _FUNCTION_IN_SOME)
        if found != other or _verdict(usual, rest) != "stated" or len(odd) < _FEWEST_ODD:
            continue
        if _obeyed(rest, there, other) >= _OBEYED * usual["stated"]:
            share = f"{len(odd)} of {len(np.unique(steps.episode))} sampled episodes, such as episode {int(odd[0])}"
            yield _finding(other, share, there, sampled, arrived)
            return


def _finding(code: str, where: str, steps: Steps, sampled: Sampled, arrived: bool) -> Finding:
    episode, step = sampled.where(int(steps.place[0]))
    off = "before" if code == "earlier" else "after"
    rows = "precedes the observation" if arrived else "follows the observation"
    said = {True: "'outgoing'", False: "'arrived'"}[arrived]
    hint = f", as in rows with the alignment {said}" if (code == "earlier") == arrived else ""
    gains = gains_of(steps)
    message = (
        f"in {where}, the action one row {off} the action that {rows} explains more of the change of the observation "
        f"({gains[code]:.0%} of the remaining variance, in place of {max(gains['stated'], 0):.0%}): actions are "
        f"probably one row too {'early' if code == 'earlier' else 'late'}{hint}"
    )
    found = Finding("misaligned-actions", "warning", f"action: {message}", "action")
    return replace(found, episode=episode, step=step, episodes=some(steps.episode))


def _steps_of(sampled: Sampled, *, arrived: bool) -> Steps | None:
    observations = [column for name, column in sampled.columns.items() if name.startswith("observation")]
    action = sampled.columns.get("action")
    if action is None or not observations or len(sampled.row) < FEWEST or not np.isfinite(action.values).any():
        return None
    sampled = sampled.thinned(_MOST_STEPS)
    action, observations = sampled.columns["action"], [sampled.columns[column.name] for column in observations]
    seen = _lively(_scaled(np.concatenate([_vectors(column) for column in observations], axis=1)))
    taken = _blocks_of(action)
    if taken is None or not seen.shape[1]:
        return None
    if seen.shape[1] > _MOST_DIMENSIONS:
        seen = seen[:, np.linspace(0, seen.shape[1] - 1, _MOST_DIMENSIONS).astype(int)]
    # Rows with o[t-1], o[t] and o[t+1]; for "arrived" rows also row t+2, which has the later action.
    rows = np.arange(1, len(sampled.row) - (2 if arrived else 1))
    last = rows + (2 if arrived else 1)
    fits = (sampled.row[last] - sampled.row[rows - 1] == last - rows + 1) & (
        sampled.episode[last] == sampled.episode[rows - 1]
    )
    rows = rows[fits]
    if len(rows) < FEWEST:
        return None
    stated = rows + int(arrived)
    actions = {name: taken[stated + offset] for name, offset in zip(BLOCKS, (-1, 0, 1), strict=True)}
    whole = np.all([np.isfinite(found).all(axis=1) for found in actions.values()], axis=0)
    around = np.concatenate([seen[rows], seen[rows - 1]], axis=1)
    changes = _lively(np.clip(_scaled(seen[rows + 1] - seen[rows]), -4, 4))
    whole &= np.isfinite(around).all(axis=1) & np.isfinite(changes).all(axis=1)
    steps = Steps(around, changes, actions, sampled.episode[rows], rows).where(whole)
    width = around.shape[1] + 3 * taken.shape[1]
    return steps if len(steps) >= max(FEWEST, 3 * width) and changes.shape[1] else None


def _vectors(column: SampledColumn) -> Floats:
    """Return the values of a column; for integer codes of a few states, also return one-hot flags."""
    values = column.values
    if column.continuous or column.width > 1:
        return values
    codes = np.unique(values[np.isfinite(values)])
    if len(codes) > _MOST_CODES:
        return values
    return np.concatenate([values, (values == codes[None, 1:]).astype(np.float64)], axis=1)


def _scaled(values: Floats) -> Floats:
    """Scale values to mean 0 and standard deviation 1; leave out constant dimensions. Outliers are clipped before the
    standard deviation is computed.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(all="ignore"):
        mean = np.nanmean(finite, axis=0)
        low, high = quantiles(values, (0.005, 0.995))
        deviation = np.nanstd(np.clip(finite, low, high), axis=0)
        keeps = np.isfinite(deviation) & (deviation > 1e-12 * np.maximum(np.abs(mean), 1e-9))
        return np.asarray(np.clip((finite[:, keeps] - mean[keeps]) / deviation[keeps], -10, 10))


def _lively(values: Floats) -> Floats:
    """Return the dimensions that vary in many rows; a dimension that varies in few rows would dominate a fit."""
    squares = np.clip(np.where(np.isfinite(values), values, 0.0), -4, 4) ** 2
    rows = squares.sum(axis=0) ** 2 / np.maximum((squares**2).sum(axis=0), 1e-12)  # for equally distant rows
    return values[:, rows >= min(_FEWEST_LIVELY, 0.1 * len(values))]


def _blocks_of(action: SampledColumn) -> Floats | None:
    """Return actions as regressors: discrete actions as flags, other actions as numbers; placeholder rows are NaN."""
    if action.continuous or action.width > 1:
        if action.width > _MOST_DIMENSIONS:
            return None
        scaled = _scaled(action.values)
        return scaled if scaled.shape[1] else None
    codes = np.unique(action.values[np.isfinite(action.values)])
    if not 2 <= len(codes) <= _MOST_CODES:
        return None
    flags: Floats = (action.values == codes[None, 1:]).astype(np.float64)
    flags[~np.isfinite(action.values[:, 0])] = np.nan
    return flags


# ---------------------------------------------------------------------- verdicts


def _verdict(gains: Mapping[str, float], steps: Steps, function_of_seen: float = _FUNCTION_OF_SEEN) -> str:
    """Return the block of actions that explains the changes, or "unknown" if no block clearly explains them."""
    if min(_unlike_the_rest(steps.actions["stated"]), _unlike_the_rest(steps.changes)) < _FEWEST_THAT_TELL:
        return "unknown"
    stated, later = gains["stated"], gains["later"]
    earlier = min(gains["earlier"], gains["earlier besides all"])
    now, left = explained_by_seen(steps), left_by_pair(steps)
    policy = now >= _FUNCTION_OF_SEEN
    chance, least = (_CHANCE_OF_POLICY,) * 2 if policy else (_CHANCE, _CHANCE / 2)
    alone = earlier >= _EXPLAINS and earlier >= _ALONE * stated and not policy
    more = earlier >= _EARLIER_EXPLAINS and earlier >= stated and left["earlier"] < (1 - least) * left["stated"]
    if more or (alone and left["earlier"] < left["stated"]):
        return "earlier"
    if later >= _EXPLAINS:
        ratio = left["later"] / left["stated"]
        less = ratio < 1 - max(chance, 3 / math.sqrt(len(steps)))
        unknown = 1 - left["stated"] < _UNKNOWN * (1 - left["later"])
        much_less = ratio < _MUCH_LESS and stated < later and now < _NO_FUNCTION_OF_SEEN
        slow = now < function_of_seen and stated < _NEXT_TO_NOTHING * later
        slow &= ratio < (_ABOUT_AS_MUCH if later >= _THE_REST else 1.0)
        if (less and (stated < _NOTHING * later or unknown)) or (stated < _NOTHING * later and slow) or much_less:
            return "later"
    is_clear = stated >= _EXPLAINS and gains["stated besides later"] >= _NOTHING * later
    return "stated" if is_clear else "unknown"


def _unlike_the_rest(rows: Floats) -> int:
    """Return the number of rows that differ from the median row; the result is 0 for a constant action or
    observation.
    """
    return int((rows != np.median(rows, axis=0)).any(axis=1).sum())


# ---------------------------------------------------------------------- some episodes


def _obeyed(rest: Steps, there: Steps, other: str) -> float:
    """Return how much better ``other`` actions explain changes than the stated actions do, in held-out episodes.

    The robot is the same in all episodes, so the gain is equally large in every episode with shifted rows. In episodes
    that are only unusual, for example because a wall blocks an arm, the gain is smaller.
    """
    table = np.concatenate([np.ones((len(rest), 1)), rest.seen, rest.actions["stated"]], axis=1)
    weights = solved(table.T @ table, table.T @ rest.changes)
    errors = {}
    for name in ("stated", other):
        fitted = np.concatenate([np.ones((len(there), 1)), there.seen, there.actions[name]], axis=1) @ weights
        errors[name] = ((there.changes - fitted) ** 2).sum(axis=0)
    ratios = np.sort(errors[other] / np.maximum(errors["stated"], 1e-12))
    return float(1 - ratios[: max(1, min(3, len(ratios)))].mean())


def _episodes_that_prefer(steps: Steps, other: str) -> Int64s | None:
    """Return the episodes whose changes fit ``other`` better than the stated actions; None if very few or nearly all
    episodes do.
    """
    names, inverse, counts = np.unique(steps.episode, return_inverse=True, return_counts=True)
    enough = counts >= _FEWEST_IN_EPISODE
    if enough.sum() < _FEWEST_EPISODES:
        return None
    tables = {
        name: np.concatenate([np.ones((len(steps), 1)), steps.seen, steps.actions[name]], axis=1)
        for name in ("stated", other)
    }
    weights: dict[str, Floats] = dict.fromkeys(tables, np.ones(len(steps)))
    prefers = np.zeros(len(names), bool)
    for _ in range(4):
        errors = {}
        for name, table in tables.items():
            chosen = weights[name] > 0
            fitted = solved(table[chosen].T @ table[chosen], table[chosen].T @ steps.changes[chosen])
            errors[name] = ((steps.changes - table @ fitted) ** 2).sum(axis=1)
        better = np.bincount(inverse, errors["stated"] - errors[other])
        prefers = better > 0
        if min(prefers[enough].sum(), (~prefers)[enough].sum()) < 2:
            return None
        weights = {"stated": np.asarray((~prefers)[inverse], float), other: np.asarray(prefers[inverse], float)}
    chosen = prefers & enough
    return names[chosen] if chosen.any() else None
