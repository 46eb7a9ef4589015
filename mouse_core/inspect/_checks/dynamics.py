"""Which row's action the observations answer to: the one that the alignment names, or one a row off.

How the observation changes, ``y = o[t+1] - o[t]``, is fitted linearly by ``o[t]``, ``o[t-1]`` and the actions of three
rows: that which the alignment says led to ``o[t+1]`` (``stated``), of the row before it (``earlier``) and of the row
after it (``later``). Of rows that are right, ``earlier`` says nothing that is not in the rest, whatever the policy is,
as observations and the action that was taken are all that a step depends on. ``later`` may: a policy chooses it by
looking at ``o[t+1]``. So an earlier action that explains more is evidence by itself, a later one only where ``stated``
explains nothing although it is not merely a function of what was seen.

Gains are of held-out rows: the share of the squared error that goes away when a block of actions is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.inspect._checks.finding import Finding
from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s, Sampled, SampledColumn, quantiles

FEWEST = 400
_MOST_STEPS = 16_384
_MOST_CODES = 24
_MOST_DIMENSIONS = 48
_RIDGE = 1e-4
_BLOCKS = ("earlier", "stated", "later")
# What an action explains at least, and an earlier one, which may do a little where observations do not say it all.
_EXPLAINS, _EARLIER_EXPLAINS, _ALONE = 0.02, 0.05, 5.0
# The stated action explains nothing if it explains less than this share of what the later one does.
_NOTHING = 0.5
# From this share of its variance on, an action may be all a function of what is seen; where what was seen before
# explains this share of the rest, the action is what led from there to here.
_FUNCTION_OF_SEEN, _LED_HERE = 0.7, 0.8
# Of some episodes among others, which may be those of another policy, less is enough.
_FUNCTION_IN_SOME = 0.4
_FEWEST_EPISODES = 6
_FEWEST_THAT_TELL = 150
_FEWEST_ODD, _OBEYED = 3, 0.5
_FEWEST_IN_EPISODE = 5


@dataclass(frozen=True)
class _Steps:
    """Transitions: ``seen`` ``[n, p]``, ``changes`` ``[n, q]``, ``actions`` by block, and the episode of each."""

    seen: Floats
    changes: Floats
    actions: dict[str, Floats]
    episode: Int64s
    place: Int64s

    def where(self, chosen: Bools) -> _Steps:
        actions = {name: found[chosen] for name, found in self.actions.items()}
        return _Steps(self.seen[chosen], self.changes[chosen], actions, self.episode[chosen], self.place[chosen])

    def __len__(self) -> int:
        return len(self.episode)


def about_dynamics(sampled: Sampled, *, arrived: bool) -> Iterator[Finding]:
    """Findings about actions that stand a row off, in all episodes or in some."""
    steps = _steps_of(sampled, arrived=arrived)
    if steps is None:
        return
    gains = _gains(steps)
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
        usual, found = _gains(rest), _verdict(_gains(there), there, _FUNCTION_IN_SOME)
        if found != other or _verdict(usual, rest) != "stated" or len(odd) < _FEWEST_ODD:
            continue
        if _obeyed(rest, there, other) >= _OBEYED * usual["stated"]:
            share = f"{len(odd)} of {len(np.unique(steps.episode))} episodes that were sampled, such as {int(odd[0])}"
            yield _finding(other, share, there, sampled, arrived)
            return


def _finding(code: str, where: str, steps: _Steps, sampled: Sampled, arrived: bool) -> Finding:
    episode, step = sampled.where(int(steps.place[0]))
    off = "before" if code == "earlier" else "after"
    rows = "led to its observation" if arrived else "leaves its observation"
    said = {True: "'outgoing'", False: "'arrived'"}[arrived]
    hint = f", as it does in rows that are {said}" if (code == "earlier") == arrived else ""
    gains = _gains(steps)
    message = (
        f"in {where}, changes of the observation answer to the action of the row {off} the one whose action "
        f"{rows} (it explains {gains[code]:.0%} of what is left, the other {max(gains['stated'], 0):.0%}): "
        f"actions may stand one row too {'early' if code == 'earlier' else 'late'}{hint}"
    )
    return Finding("misaligned-actions", "warning", f"action: {message}", "action", None, None, episode, step)


def _steps_of(sampled: Sampled, *, arrived: bool) -> _Steps | None:
    observations = [column for name, column in sampled.columns.items() if name.startswith("observation")]
    action = sampled.columns.get("action")
    if action is None or not observations or len(sampled.row) < FEWEST or not np.isfinite(action.values).any():
        return None
    sampled = sampled.thinned(_MOST_STEPS)
    action, observations = sampled.columns["action"], [sampled.columns[column.name] for column in observations]
    seen = _scaled(np.concatenate([_vectors(column) for column in observations], axis=1))
    taken = _blocks_of(action)
    if taken is None or not seen.shape[1]:
        return None
    if seen.shape[1] > _MOST_DIMENSIONS:
        seen = seen[:, np.linspace(0, seen.shape[1] - 1, _MOST_DIMENSIONS).astype(int)]
    # o[t-1], o[t] and o[t+1] and, of "arrived" rows, also that of row t+2, which the later action stands in.
    rows = np.arange(1, len(sampled.row) - (2 if arrived else 1))
    last = rows + (2 if arrived else 1)
    fits = (sampled.row[last] - sampled.row[rows - 1] == last - rows + 1) & (
        sampled.episode[last] == sampled.episode[rows - 1]
    )
    rows = rows[fits]
    if len(rows) < FEWEST:
        return None
    stated = rows + int(arrived)
    actions = {name: taken[stated + offset] for name, offset in zip(_BLOCKS, (-1, 0, 1), strict=True)}
    whole = np.all([np.isfinite(found).all(axis=1) for found in actions.values()], axis=0)
    around = np.concatenate([seen[rows], seen[rows - 1]], axis=1)
    changes = np.clip(_scaled(seen[rows + 1] - seen[rows]), -4, 4)
    whole &= np.isfinite(around).all(axis=1) & np.isfinite(changes).all(axis=1)
    steps = _Steps(around, changes, actions, sampled.episode[rows], rows).where(whole)
    width = around.shape[1] + 3 * taken.shape[1]
    return steps if len(steps) >= max(FEWEST, 3 * width) and changes.shape[1] else None


def _vectors(column: SampledColumn) -> Floats:
    """Numbers as they are; codes of a few states also as flags."""
    values = column.values
    if column.continuous or column.width > 1:
        return values
    codes = np.unique(values[np.isfinite(values)])
    if len(codes) > _MOST_CODES:
        return values
    return np.concatenate([values, (values == codes[None, 1:]).astype(np.float64)], axis=1)


def _scaled(values: Floats) -> Floats:
    """Of mean 0 and deviation 1, by the middle of the values, without dimensions that do not change."""
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(all="ignore"):
        mean = np.nanmean(finite, axis=0)
        low, high = quantiles(values, (0.005, 0.995))
        deviation = np.nanstd(np.clip(finite, low, high), axis=0)
        keeps = np.isfinite(deviation) & (deviation > 1e-12 * np.maximum(np.abs(mean), 1e-9))
        return np.asarray(np.clip((finite[:, keeps] - mean[keeps]) / deviation[keeps], -10, 10))


def _blocks_of(action: SampledColumn) -> Floats | None:
    """Actions as regressors: flags of discrete ones, numbers of others; NaN where a row only holds a place."""
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


# ---------------------------------------------------------------------- fits


class _Fits:
    """Held-out squared errors of every choice of blocks, by two folds of stretches of rows."""

    def __init__(self, steps: _Steps) -> None:
        self.parts = [np.ones((len(steps), 1)), steps.seen, *(steps.actions[name] for name in _BLOCKS)]
        edges = np.cumsum([0, *(part.shape[1] for part in self.parts)])
        self.columns = {name: np.arange(edges[n + 2], edges[n + 3]) for n, name in enumerate(_BLOCKS)}
        self.always = np.arange(edges[2])
        table = np.concatenate(self.parts, axis=1)
        stretch = np.cumsum(np.diff(steps.place, prepend=steps.place[0]) > 1) // 2 + steps.place // 97
        folds = [stretch % 2 == 0, stretch % 2 == 1]
        self.fits = [(table[fold].T @ table[fold], table[fold].T @ steps.changes[fold]) for fold in folds]
        self.squares = [(steps.changes[fold] ** 2).sum(axis=0) for fold in folds]

    def error(self, names: tuple[str, ...]) -> Floats:
        """Of each change, when it is fitted by what was seen and by these blocks."""
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
    """The weights of a ridge regression."""
    size = max(float(gram[0, 0]), 1.0)
    return np.asarray(np.linalg.solve(gram + _RIDGE * size * np.eye(len(gram)), product))


def _gains(steps: _Steps) -> dict[str, float]:
    """What each block explains beyond the others; ``stated`` and ``earlier`` beyond each other alone, too."""
    fits = _Fits(steps)
    errors = {names: fits.error(names) for size in range(4) for names in combinations(_BLOCKS, size)}
    all_of_it = errors[_BLOCKS]
    # The changes that actions say most about.
    best = np.argsort(all_of_it / errors[()])[: max(1, min(3, len(all_of_it)))]

    def gain(without: tuple[str, ...], added: str) -> float:
        more = tuple(name for name in _BLOCKS if name in without or name == added)
        return float((1 - errors[more] / errors[without])[best].mean())

    return {
        "earlier": gain(("stated",), "earlier"),
        "stated": gain(("earlier",), "stated"),
        "later": gain(("earlier", "stated"), "later"),
        "stated besides later": gain(("earlier", "later"), "stated"),
        "all": float((1 - all_of_it / errors[()])[best].mean()),
        "earlier besides all": gain(("stated", "later"), "earlier"),
    }


def _verdict(gains: dict[str, float], steps: _Steps, function_of_seen: float = _FUNCTION_OF_SEEN) -> str:
    """Which block the changes answer to; "unknown" where that cannot be told."""
    if min(_unlike_the_rest(steps.actions["stated"]), _unlike_the_rest(steps.changes)) < _FEWEST_THAT_TELL:
        return "unknown"
    earlier = min(gains["earlier"], gains["earlier besides all"])
    stated = gains["stated besides later"]
    now, both = _explained_by_seen(steps)
    alone = earlier >= _EXPLAINS and earlier >= _ALONE * gains["stated"] and now < _FUNCTION_OF_SEEN
    if alone or (earlier >= _EARLIER_EXPLAINS and earlier >= gains["stated"]):
        return "earlier"
    if gains["stated"] >= _EXPLAINS and stated >= _NOTHING * gains["later"]:
        return "stated"
    if gains["later"] < _EXPLAINS or stated >= _NOTHING * gains["later"]:
        return "unknown"
    led_here = 1 - (1 - both) / max(1 - now, 1e-9)
    return "later" if now < function_of_seen or led_here > _LED_HERE else "unknown"


def _unlike_the_rest(rows: Floats) -> int:
    """How many rows are not the usual one: that of an action that is always taken, or of nothing that changes."""
    return int((rows != np.median(rows, axis=0)).any(axis=1).sum())


def _explained_by_seen(steps: _Steps) -> tuple[float, float]:
    """The share of the stated actions' variance that is linear in ``o[t]``, and in ``o[t]`` and ``o[t-1]``."""
    actions = steps.actions["stated"]
    actions = actions - actions.mean(axis=0)
    squares = float((actions**2).sum())
    found = []
    for width in (steps.seen.shape[1] // 2, steps.seen.shape[1]):
        table = np.concatenate([np.ones((len(steps), 1)), steps.seen[:, :width]], axis=1)
        product = table.T @ actions
        found.append(float((solved(table.T @ table, product) * product).sum() / squares) if squares else 1.0)
    return found[0], found[1]


# ---------------------------------------------------------------------- some episodes


def _obeyed(rest: _Steps, there: _Steps, other: str) -> float:
    """What ``other`` actions explain of some episodes beyond the stated ones, by the weights of the other episodes.

    The machine is the same, so that they do as much where rows are shifted. Where a few episodes are merely odd, as
    those in which an arm is held by a wall, they do not.
    """
    table = np.concatenate([np.ones((len(rest), 1)), rest.seen, rest.actions["stated"]], axis=1)
    weights = solved(table.T @ table, table.T @ rest.changes)
    errors = {}
    for name in ("stated", other):
        fitted = np.concatenate([np.ones((len(there), 1)), there.seen, there.actions[name]], axis=1) @ weights
        errors[name] = ((there.changes - fitted) ** 2).sum(axis=0)
    ratios = np.sort(errors[other] / np.maximum(errors["stated"], 1e-12))
    return float(1 - ratios[: max(1, min(3, len(ratios)))].mean())


def _episodes_that_prefer(steps: _Steps, other: str) -> npt.NDArray[Any] | None:
    """Episodes whose changes are fitted better by ``other`` than by what is stated; None where it is few or all."""
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
