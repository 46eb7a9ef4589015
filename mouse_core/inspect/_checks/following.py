"""Checks of consecutive rows, over all rows: clocks advance, and pictures of cameras change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.values import UInt64s
from mouse_core.inspect._checks.finding import MOST, Finding, Places, some
from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s

_CLOCK = re.compile(r"(.*_)?time_?stamps?(_(s|ms|us|ns|sec|seconds))?|(metadata_|observation_)?time")
# Buckets of durations: four for each power of two.
_FINE, _BUCKETS, _MIDDLE = 4, 1024, 512
_JUMP = 4.0
_OFTEN = 0.02
_FROZEN, _FROZEN_NOTED = 20, 10


def is_clock(name: str) -> bool:
    """Whether a column's name says that it holds the time."""
    return _CLOCK.fullmatch(name) is not None


class Clock:
    """Durations between the rows of a column of times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last = np.nan
        self._backwards = 0
        self._back = Places()
        # The longest durations, and the episode and step that each led to.
        self._longest = np.zeros((0, 3))
        self._counts = np.zeros(_BUCKETS, np.int64)

    def add(self, times: Floats, start: Bools, episode: Int64s, step: Int64s) -> None:
        """Take in rows, ``[n]`` of everything; NaN where there is no time."""
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
        """Findings for times that decrease and for durations much longer than the others."""
        if self._backwards:
            message = f"{self.name}: goes back in {self._backwards:,} rows within episodes"
            found = self._back.told(Finding("time-backwards", "warning", message, self.name))
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
                f"{self.name}: {jumps:,} of {total:,} steps take {_JUMP:g} times as long as usual (about {usual:.3g}), "
                f"up to {longest:.4g} in episode {episode:.0f}, step {step:.0f}: are rows missing?"
            )
            level = "warning" if jumps < _OFTEN * total else "note"
            where = some(self._longest[_buckets(self._longest[:, 0]) >= first, 1].astype(np.int64))
            yield Finding("time-jumps", level, message, self.name, None, None, int(episode), int(step), where)


def _buckets(durations: Floats) -> Int64s:
    """The bucket of each duration, which is above 0."""
    return np.asarray(np.clip(np.round(_FINE * np.log2(durations)) + _MIDDLE, 0, _BUCKETS - 1), np.int64)


class Camera:
    """Lengths of stretches in which pictures of a camera stay equal while other observations change."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: Any = None
        self._last_other: Any = None
        self._run = 0
        self._run_at = (0, 0)
        self._runs = np.zeros(4096, np.int64)
        # The longest of them: how long, episode and step.
        self._longest: list[tuple[int, int, int]] = []

    def add(self, pictures: UInt64s, others: UInt64s, start: Bools, episode: Int64s, step: Int64s) -> None:
        """Take in hashes of the pictures and of all else that is seen."""
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
        """Finding for a stretch in which pictures stay equal for much longer than in other stretches."""
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
            f"{self.name}: the picture stays the same for {longest:,} steps, from episode {episode}, step {step}, "
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
    """Statistics that data bring along and that are those of other rows.

    Args:
        said: Mean, ``std``, ``min`` and ``max`` by column.
        known: What was counted: ``mean``, ``deviation``, ``low`` and ``high`` by column, ``[width]`` each.
    """
    for name, numbers in known.items():
        found = {
            key: _numbers(said.get(name, {}).get(key), len(numbers["mean"])) for key in ("mean", "std", "min", "max")
        }
        for place in range(len(numbers["mean"])):
            reason = _contradiction({key: one[place] for key, one in found.items() if one is not None}, numbers, place)
            if reason is not None:
                where = f"{name}[{place}]" if len(numbers["mean"]) > 1 else name
                message = f"{where}: the statistics that the data bring along say {reason}: of which rows are they?"
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
        return f"a mean of {said['mean']:g}, and it is {mean:g}"
    if "std" in said and deviation > room and not 1 / 1.5 < said["std"] / deviation < 1.5:
        return f"a deviation of {said['std']:g}, and it is {deviation:g}"
    if "min" in said and low < said["min"] - room:
        return f"a minimum of {said['min']:g}, and there is {low:g}"
    if "max" in said and high > said["max"] + room:
        return f"a maximum of {said['max']:g}, and there is {high:g}"
    return None
