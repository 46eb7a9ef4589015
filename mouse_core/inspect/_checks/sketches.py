"""Episodes that repeat others nearly, and those that lie in two splits, told from a few numbers of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.values import UInt64s
from mouse_core.inspect._checks.finding import Finding
from mouse_core.inspect._checks.places import some
from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s

# Sums over an episode of what is seen, weighed by waves: two mixtures of the dimensions by four waves.
_MIXTURES, _WAVES = 2, 4
_PERIOD = 4096
_SHORTEST = 6
_FEWEST, _NEIGHBOURS = 3, 8
# As near as this, of what episodes differ by, and so many times nearer than others are.
_NEAR, _NEARER = 0.01, 100.0
_NEARER_ON_A_LINE, _SPREAD_OUT = 1000.0, 0.3
# The share of episodes that is no coincidence.
_MANY = 0.05


class Sketches:
    """Adds up, row by row, a few numbers for each episode that lie near each other where two are nearly alike."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        waves = np.arange(_PERIOD)[:, None] * random.uniform(0.05, 1.5, _WAVES) + random.uniform(0, 6.28, _WAVES)
        self._waves = np.cos(waves)
        self._weights: dict[str, Floats] = {}
        self._middles: dict[str, Floats] = {}
        self._random = random
        self._open = np.zeros(_MIXTURES * _WAVES)
        self._rows = 0
        self._kept: list[Floats] = []
        self._lengths: list[Int64s] = []
        self.usable = True

    def add(self, numbers: Mapping[str, npt.NDArray[np.floating]], start: Bools, step: Int64s) -> None:
        """Take in rows: columns of floats, which rows begin an episode, and the number of each in its episode."""
        if not numbers or (self._weights and self._weights.keys() != numbers.keys()):
            self.usable = False
        if not self.usable or not len(start):
            return
        mixed = np.zeros((len(start), _MIXTURES))
        for name, found in numbers.items():
            flat = found.reshape(len(found), -1)
            if name not in self._weights:
                self._scales_of(name, flat)
            if flat.shape[1] != len(self._middles[name]):
                self.usable = False
                return
            # In the type of the rows: half of the time, and near is near enough.
            away = (flat - self._middles[name].astype(flat.dtype)) @ self._weights[name].astype(flat.dtype)
            mixed += np.nan_to_num(away, nan=0.0, posinf=0.0, neginf=0.0)
        waved = (mixed[:, :, None] * self._waves[step % _PERIOD][:, None, :]).reshape(len(start), -1)
        begins = np.flatnonzero(start)
        edges = begins if len(begins) and begins[0] == 0 else np.append(0, begins)
        sums = np.add.reduceat(waved, edges, axis=0)
        lengths = np.diff(np.append(edges, len(start)))
        if not (len(begins) and begins[0] == 0):
            sums[0] += self._open
            lengths[0] += self._rows
        elif self._rows:
            sums, lengths = np.concatenate([self._open[None], sums]), np.append(self._rows, lengths)
        self._keep(sums[:-1], lengths[:-1])
        self._open, self._rows = sums[-1], int(lengths[-1])

    def _scales_of(self, name: str, flat: npt.NDArray[np.floating]) -> None:
        """Middle and scale by the first rows, so that each dimension counts; which ones they are matters little."""
        finite = np.where(np.isfinite(flat), flat, 0.0).astype(np.float64)
        self._middles[name] = np.median(finite, axis=0)
        scale = np.abs(finite - self._middles[name]).mean(axis=0)
        weights = self._random.normal(size=(flat.shape[1], _MIXTURES))
        self._weights[name] = weights / np.where(scale > 0, scale, np.inf)[:, None]

    def _keep(self, sums: Floats, lengths: Int64s) -> None:
        self._kept.append((sums / np.sqrt(lengths)[:, None]).astype(np.float32))
        self._lengths.append(lengths)

    def findings(self, hashes: UInt64s) -> Iterator[Finding]:
        """Pairs of episodes that are nearly, but not exactly alike; ``hashes`` of their rows, by episode."""
        if not self.usable or not self._rows:
            return
        lengths = np.append(np.concatenate([*self._lengths, np.zeros(0, np.int64)]), self._rows)
        last = (self._open / np.sqrt(self._rows))[None].astype(np.float32)
        pairs, certain = _near(np.concatenate([*self._kept, last]), lengths.astype(np.int64), hashes)
        if not len(pairs):
            return
        later = np.unique(pairs.max(axis=1))
        first = int(pairs[0].min()), int(pairs[0].max())
        many = len(later) >= max(1 if certain else 3, _MANY * len(lengths))
        level = "warning" if many else "note"
        message = (
            f"{len(later):,} of {len(lengths):,} episodes are nearly the same as another one, such as episode "
            f"{first[1]} as episode {first[0]}: were they recorded again with noise, or rounded?"
        )
        yield Finding("near-duplicates", level, message, None, None, None, first[1], 0, some(later))


def _near(sketches: Floats, lengths: Int64s, hashes: UInt64s) -> tuple[Int64s, bool]:
    """Pairs of episodes of one length that lie near each other, and whether chance brings none together.

    Neighbours are looked for among those next to each other by length and by one number of the sketch, three times.
    """
    count = len(lengths)
    nothing = np.zeros((0, 2), np.int64)
    if count < _FEWEST or len(hashes) != count or not np.isfinite(sketches).all():
        return nothing, False
    low, high = np.quantile(sketches, [0.1, 0.9], axis=0)
    scaled = sketches / np.where(high > low, (high - low) / 2.56, np.inf)
    nearest = np.full((count, 3 * 2 * _NEIGHBOURS), np.inf, np.float32)
    which = np.zeros(nearest.shape, np.int64)
    for turn in range(3):
        order = np.lexsort((scaled[:, 3 * turn % scaled.shape[1]], lengths))
        for apart in range(1, _NEIGHBOURS + 1):
            one, other = order[:-apart], order[apart:]
            away = np.sqrt(((scaled[one] - scaled[other]) ** 2).mean(axis=1))
            # Exact copies are told elsewhere, and of short episodes there are not so many different ones.
            fits = (lengths[one] == lengths[other]) & (hashes[one] != hashes[other]) & (lengths[one] >= _SHORTEST)
            place = 2 * (_NEIGHBOURS * turn + apart - 1)
            nearest[one, place], which[one, place] = np.where(fits, away, np.inf), other
            nearest[other, place + 1], which[other, place + 1] = np.where(fits, away, np.inf), one
    best = nearest.argmin(axis=1)
    least = nearest[np.arange(count), best]
    others = np.where(np.isfinite(nearest), nearest, np.nan)
    with np.errstate(all="ignore"):
        usual = np.array(_medians(others))
    known = np.isfinite(usual)
    if not known.any():
        # No others of their length: near is near.
        usual = np.where(np.isfinite(least), 1.0, np.nan)
    middle = float(np.nanmedian(usual)) if np.isfinite(usual).any() else 0.0
    certain = middle > _SPREAD_OUT
    usual = np.where(np.isfinite(least), np.maximum(np.nan_to_num(usual), middle), np.inf)
    # Few episodes say little about how near chance brings two of them.
    nearer = _NEARER if certain and count >= _NEIGHBOURS else _NEARER_ON_A_LINE
    near = (least < _NEAR) & (least * nearer < usual)
    found = np.flatnonzero(near)
    return np.stack([found, which[found, best[found]]], axis=1), certain


def _medians(rows: Floats) -> Floats:
    """The median of what is there in each row; NaN where nothing is."""
    ordered = np.sort(rows, axis=1)  # NaN come last
    count = np.isfinite(rows).sum(axis=1)
    found = ordered[np.arange(len(rows)), np.maximum(count // 2, 0).clip(max=rows.shape[1] - 1)]
    return np.where(count > 1, found, np.nan)


def about_splits(hashes: UInt64s, lengths: Int64s, first_rows: Int64s, splits: Mapping[str, int]) -> Iterator[Finding]:
    """Episodes that are in two splits.

    Args:
        hashes, lengths, first_rows: Of each episode.
        splits: How many rows each split has, in their order.
    """
    if len(splits) < 2:
        return
    names, ends = list(splits), np.cumsum(list(splits.values()))
    split = np.searchsorted(ends, first_rows, side="right")
    known: dict[int, int] = {}
    shared: dict[tuple[int, int], list[int]] = {}
    for episode in np.flatnonzero(lengths >= _SHORTEST).tolist():
        first = known.setdefault(int(hashes[episode]), int(split[episode]))
        if first != split[episode]:
            shared.setdefault((first, int(split[episode])), []).append(episode)
    for (first, second), episodes in shared.items():
        message = (
            f"{len(episodes):,} of the episodes of the split {names[second]!r} are in {names[first]!r}, too, such as "
            f"episode {episodes[0]}: what is held out has been trained on"
        )
        where = some(episodes)
        yield Finding("splits-share-episodes", "warning", message, None, None, None, episodes[0], 0, where)
