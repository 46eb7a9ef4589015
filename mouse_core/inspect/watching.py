"""Checks that look at every row while rows pass by, and their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import sums_by_episode
from mouse_core.formats.columns import MISSING, UInt64s, Values
from mouse_core.formats.columns import combine_hashes as combined
from mouse_core.inspect.dimensions import about_dimensions, about_parts
from mouse_core.inspect.dynamics import Camera, Clock, about_dynamics, is_clock
from mouse_core.inspect.report import Finding, capped, some
from mouse_core.inspect.sampling import Bools, Floats, Int64s, RowSample

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
        sums, lengths = sums_by_episode(start, waved, self._open, self._rows)
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


_MOST_OF_A_CODE = 5


class Watch:
    """Fed with one block of rows after the other; what it keeps grows by a few numbers an episode.

    Args:
        arrived: Whether a row's action led to its observation.
    """

    def __init__(self, *, arrived: bool) -> None:
        self._arrived = arrived
        self._sample = RowSample()
        self._sketches = Sketches()
        self._clocks: dict[str, Clock] = {}
        self._cameras: dict[str, Camera] = {}
        self._rows = 0

    def add(
        self,
        values: Mapping[str, Values],
        hashes: Mapping[str, UInt64s],
        start: Bools | None,
        episode: Int64s,
        step: Int64s,
        bounds: Mapping[str, tuple[Floats, Floats]],
    ) -> None:
        """Take in some rows.

        Args:
            values, hashes: Their columns.
            start: Which begin an episode; None where that is not known.
            episode: The number of each row's episode.
            step: The number of each in its episode.
            bounds: See ``RowSample.add``.
        """
        count = len(step)
        if not count:
            return
        begins = np.zeros(count, bool) if start is None else start
        missing = missing_rows(values)
        self._add_sample(values, start, episode, step, missing, bounds)
        if start is not None:
            self._add_sketches(values, start, step, missing)
        for name, found in values.items():
            if is_clock(name) and found.numbers is not None and found.shape in ((), (1,)):
                times = found.numbers.reshape(-1).astype(np.float64)
                if missing is not None:
                    times[missing] = np.nan
                self._clocks.setdefault(name, Clock(name)).add(times, begins, episode, step)
        self._add_cameras(values, hashes, begins, episode, step)
        self._rows += count

    def _add_sample(
        self,
        values: Mapping[str, Values],
        start: Bools | None,
        episode: Int64s,
        step: Int64s,
        missing: Bools | None,
        bounds: Mapping[str, tuple[Floats, Floats]],
    ) -> None:
        numbers = {
            name: found.numbers
            for name, found in values.items()
            if found.numbers is not None and found.shape is not None and _is_looked_at(name)
        }
        real = {}
        if self._arrived and start is not None:  # first rows hold a place where nothing was done yet
            real = {name: ~start for name in numbers if name.startswith("action") or name == "reward"}
        if missing is not None:
            real |= {name: ~missing for name in numbers if name.startswith("observation")}
        known = {name: found for name, found in bounds.items() if name not in real or name == "action"}
        self._sample.add(numbers, row=self._rows, episode=episode, step=step, real=real, bounds=known)

    def _add_sketches(self, values: Mapping[str, Values], start: Bools, step: Int64s, missing: Bools | None) -> None:
        numbers: dict[str, Any] = {}
        for name, found in values.items():
            if name.startswith("observation") and found.kind.value_type in ("float", "double"):
                if found.numbers is None or found.shape is None:
                    self._sketches.usable = False
                    return
                numbers[name] = found.numbers
                if missing is not None and missing.any():
                    numbers[name] = np.where(missing.reshape(-1, *[1] * len(found.shape)), np.nan, found.numbers)
        self._sketches.add(numbers, start, step)

    def _add_cameras(
        self, values: Mapping[str, Values], hashes: Mapping[str, UInt64s], start: Bools, episode: Int64s, step: Int64s
    ) -> None:
        seen = [name for name in values if name.startswith("observation") and name != MISSING]
        for name in seen:
            if not _is_camera(values[name]):
                continue
            others = [hashes[other] for other in seen if other != name]
            if others:
                camera = self._cameras.setdefault(name, Camera(name))
                camera.add(hashes[name], combined(others, len(step)), start, episode, step)

    def at_extreme(self, finding: Finding, dimension: int | None, which: str) -> Finding:
        """A finding with the place at which a dimension of its column, or any, is at its ``"low"`` or ``"high"``."""
        known = self._sample.extremes.get(finding.column or "")
        if known is None:
            return finding
        if dimension is None:
            dimension = int(known.low.argmin() if which == "low" else known.high.argmax())
        episode, step = (known.low_at if which == "low" else known.high_at)[dimension].tolist()
        place = dimension if len(known.low) > 1 else None
        return replace(finding, dimension=place, episode=episode, step=step, episodes=(episode,))

    def findings(
        self,
        names: Mapping[str, Sequence[str]],
        *,
        hashes: UInt64s,
        lengths: Int64s,
        splits: Mapping[str, int],
    ) -> Iterator[Finding]:
        """Return the findings, at most a few of a code for each column.

        Args:
            names: Of dimensions, by column.
            hashes, lengths: Of all episodes, lengths in rows.
            splits: Rows of each split, in their order.
        """
        sampled = self._sample.result(self._rows, names)
        found = list(about_dimensions(sampled))
        # Episodes with outliers reach further, which has been said.
        told = {(one.column, one.dimension, "scale-by-episode") for one in found if one.code == "outlier"}
        found += (one for one in about_parts(sampled) if (one.column, one.dimension, one.code) not in told)
        found += about_dynamics(sampled, arrived=self._arrived)
        yield from capped(found, _MOST_OF_A_CODE)
        yield from self._sketches.findings(hashes)
        yield from about_splits(hashes, lengths, np.cumsum(lengths) - lengths, splits)
        for clock in self._clocks.values():
            yield from clock.findings()
        for camera in self._cameras.values():
            yield from camera.findings()


def _is_looked_at(name: str) -> bool:
    return name == "reward" or (name.startswith(("action", "observation")) and name != MISSING)


def _is_camera(values: Values) -> bool:
    if values.kind.kind == "image":
        return True
    return values.kind.value_type == "uint8" and values.shape is not None and len(values.shape) >= 2


def missing_rows(values: Mapping[str, Values]) -> npt.NDArray[np.bool_] | None:
    """Rows whose observation the source did not store; None where that is not said."""
    found = values.get(MISSING)
    if found is None or found.numbers is None or found.shape != ():
        return None
    return np.asarray(found.numbers != 0)
