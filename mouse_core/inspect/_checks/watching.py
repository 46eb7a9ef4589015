"""Checks that look at every row while rows pass by, and their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.named import MISSING
from mouse_core.formats.columns.values import UInt64s, Values, combined
from mouse_core.inspect._checks.dimensions import about_dimensions
from mouse_core.inspect._checks.dynamics import about_dynamics
from mouse_core.inspect._checks.finding import Finding, capped
from mouse_core.inspect._checks.following import Camera, Clock, is_clock
from mouse_core.inspect._checks.parts import about_parts
from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s, RowSample
from mouse_core.inspect._checks.sketches import Sketches, about_splits

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
