"""Compares the speed of calls on a machine that may be busy, by interleaving the calls in equal slices of time.

Contenders take turns within a run, in a new order every round, and are compared round by round, so that a slow phase of
the machine affects all contenders. The time of a contender is the processor time of this process or the wall-clock
time, whichever is less, so that other work on the machine does not count. If a contender uses other processes, or if
its waiting times matter, its time is the wall-clock time.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SETTLE_SECONDS = 0.01
_LONG_SECONDS = 1.0


@dataclass(frozen=True)
class Contender:
    """A call to measure.

    Args:
        name: Name of the contender.
        call: A function that does the work of one batch; it is called with the consecutive indices of batches.
        kind: "floor", "ours" or "peer".
        wall: Whether the time of the contender is always the wall-clock time.
        ahead: Number of batches that the contender prepares in advance. These batches are finished before another
            contender is measured.
        multiple: Number of batches that are measured together, because they share work.
        before: A function that is called before each slice, outside of the measurement.
        after: A function that is called after each slice, outside of the measurement.
    """

    name: str
    call: Callable[[int], Any]
    kind: str = "peer"
    wall: bool = False
    ahead: int = 0
    multiple: int = 1
    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None


def in_turn(call: Callable[..., Any], *arguments: Sequence[Any]) -> Callable[[int], Any]:
    """Return a function of the index of a batch that calls ``call`` with the elements at this index, modulo the length.

    Args:
        call: The function.
        arguments: For each argument of ``call``, its values in turn, all of the same number.
    """
    values = list(zip(*arguments, strict=True))
    return lambda number: call(*values[number % len(values)])


def steady(contender: Contender, waiting: int) -> Contender:
    """Return a copy of a contender that prepares batches in advance; its slices begin without prepared batches.

    Args:
        contender: The contender that prepares batches in advance.
        waiting: Number of batches that the contender may prepare in advance.
    """

    longest = 0.0

    def drain() -> None:
        nonlocal longest
        for taken in range(2 * waiting + 4):
            began = time.perf_counter()
            contender.call(0)
            seconds = time.perf_counter() - began
            longest = max(longest, seconds)
            if taken >= waiting and seconds > longest / 5:
                return  # the measured call had to wait for this batch

    return replace(contender, ahead=waiting, before=drain)


@dataclass(frozen=True)
class Timing:
    """The measured times of a contender.

    Args:
        contender: The contender.
        seconds: Seconds per batch, float64 ``[rounds]``; NaN in rounds in which the contender was not measured.
    """

    contender: Contender
    seconds: npt.NDArray[np.float64]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the seconds per batch."""
        return quartiles_of(self.seconds)

    @property
    def median(self) -> float:
        """Median of the seconds per batch."""
        return self.quartiles[1]

    def ratio(self, other: Timing) -> tuple[float, float, float]:
        """Return the quartiles over rounds of the ratio of this contender's time to the time of ``other``."""
        return quartiles_of(self.seconds / other.seconds)


@dataclass
class _Turn:
    contender: Contender
    calls: int
    cost: float = 0.0
    every: int = 1
    next_index: int = 0
    seconds: list[float] = field(default_factory=list)


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    slice_seconds: float = 0.008,
    budget_seconds: float = 2.0,
) -> list[Timing]:
    """Measure contenders in turns.

    Args:
        contenders: The contenders. The first contender is measured in every round, so that all others can be compared
            with it.
        rounds: Number of rounds, at least 3. There are fewer rounds if the first contender is slow.
        slice_seconds: Approximate length of a turn in seconds.
        budget_seconds: Approximate total time of each contender in seconds. Slow contenders have fewer turns, but at
            least 3.
    """
    order = random.Random(0)
    turns = [_prepare(contender, slice_seconds) for contender in contenders]
    rounds = _affordable(turns[0], rounds, budget_seconds)
    for turn in turns:
        turn.every = rounds // _affordable(turn, rounds, budget_seconds)
    for number in range(rounds):
        # Turns of slow contenders are spread over the rounds.
        present = [turn for place, turn in enumerate(turns) if (number + place) % turn.every == 0]
        order.shuffle(present)
        for turn in present:
            turn.seconds += [math.nan] * (number - len(turn.seconds)) + [_take(turn)[0]]
    return [
        Timing(turn.contender, np.array(turn.seconds + [math.nan] * (rounds - len(turn.seconds)))) for turn in turns
    ]


def _prepare(contender: Contender, slice_seconds: float) -> _Turn:
    turn = _Turn(contender, contender.multiple)
    slice_wall, around = _take_once(turn)  # the first call may compile and open files
    if slice_wall + around < _LONG_SECONDS:
        slice_wall, around = _take_once(turn)
    repeats = max(1, round(slice_seconds / slice_wall))
    turn.calls = repeats * contender.multiple
    turn.cost = around + repeats * slice_wall
    return turn


def _take_once(turn: _Turn) -> tuple[float, float]:
    """Measure a slice; return the seconds of its calls, and the seconds of the work before and after the calls."""
    began = time.perf_counter()
    inside = max(_take(turn)[1] * turn.calls, 1e-9)
    return inside, time.perf_counter() - began - inside


def _affordable(turn: _Turn, rounds: int, budget_seconds: float) -> int:
    return min(rounds, max(3, int(budget_seconds / turn.cost)))


def _take(turn: _Turn) -> tuple[float, float]:
    """Measure a slice; return the seconds per batch, and the wall-clock seconds per batch."""
    contender, first = turn.contender, turn.next_index
    if contender.before is not None:
        contender.before()
    call, numbers = contender.call, range(first, first + turn.calls)
    cpu, wall = time.process_time(), time.perf_counter()
    for number in numbers:
        call(number)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    turn.next_index += turn.calls
    if contender.after is not None:
        contender.after()
    if contender.ahead:
        # Its remaining work must not count for the next contender.
        time.sleep(_SETTLE_SECONDS + contender.ahead * wall / turn.calls)
    return (wall if contender.wall else min(wall, cpu)) / turn.calls, wall / turn.calls


def quartiles_of(values: npt.ArrayLike) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the values that are not NaN."""
    known = np.asarray(values)[~np.isnan(values)]
    low, middle, high = np.percentile(known, [25, 50, 75]).tolist() if len(known) else [math.nan] * 3
    return low, middle, high


def private_memory() -> int | None:
    """Return the anonymous memory of this process in bytes (RssAnon); None if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def machine() -> dict[str, str]:
    """Describe this machine: system, processor, cores that this process may use, memory and load."""
    import platform

    found = {"system": f"{platform.system()} {platform.release()}", "processor": platform.machine()}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
        found["processor"] = model or found["processor"]
    found["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError, AttributeError):  # not every system reports these
        found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
        found["load average"] = " ".join(f"{load:.1f}" for load in os.getloadavg())
    return found
