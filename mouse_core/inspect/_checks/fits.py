"""Linear fits of steps: what actions say of how observations change, and what observations say of actions.

All are of held-out rows: a gain is the share of the squared error that goes away when a block of actions is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s

BLOCKS = ("earlier", "stated", "later")
"""Actions of three rows: the one before that which led to the next observation, this one, and the one after it."""
_RIDGE = 1e-4


@dataclass(frozen=True)
class Steps:
    """Transitions.

    Args:
        seen: ``o[t]`` and ``o[t-1]``, ``[n, 2 * p]``.
        changes: ``o[t+1] - o[t]``, ``[n, q]``.
        actions: By block, ``[n, width]``.
        episode: Of each.
        place: Which of the sampled rows has ``o[t]``.
    """

    seen: Floats
    changes: Floats
    actions: dict[str, Floats]
    episode: Int64s
    place: Int64s

    @property
    def now(self) -> Floats:
        """``o[t]``, ``[n, p]``."""
        return self.seen[:, : self.seen.shape[1] // 2]

    def where(self, chosen: Bools) -> Steps:
        actions = {name: found[chosen] for name, found in self.actions.items()}
        return Steps(self.seen[chosen], self.changes[chosen], actions, self.episode[chosen], self.place[chosen])

    def __len__(self) -> int:
        return len(self.episode)


def _folds(steps: Steps) -> list[Bools]:
    """Two halves of the steps, in stretches that lie side by side."""
    stretch = np.cumsum(np.diff(steps.place, prepend=steps.place[0]) > 1) // 2 + steps.place // 97
    return [stretch % 2 == 0, stretch % 2 == 1]


class _Fits:
    """Held-out squared errors of every choice of blocks, by two folds of stretches of rows."""

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


def gains_of(steps: Steps) -> dict[str, float]:
    """What each block explains beyond the others; ``stated`` and ``earlier`` beyond each other alone, too."""
    fits = _Fits(steps)
    errors = {names: fits.error(names) for size in range(4) for names in combinations(BLOCKS, size)}
    all_of_it = errors[BLOCKS]
    # The changes that actions say most about.
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
    """The share of each block's actions that ``o[t]`` and ``o[t+1]`` leave unexplained, the mean of all dimensions'."""
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
    """The share of the stated actions' variance that is linear in ``o[t]``."""
    actions = steps.actions["stated"]
    actions = actions - actions.mean(axis=0)
    squares = float((actions**2).sum())
    table = np.concatenate([np.ones((len(steps), 1)), steps.now], axis=1)
    product = table.T @ actions
    return float((solved(table.T @ table, product) * product).sum() / squares) if squares else 1.0
