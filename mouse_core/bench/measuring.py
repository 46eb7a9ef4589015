"""Measuring calls against each other on a machine that may be busy: interleaved, in equal slices of time.

Contenders take turns within one run, in a new order every round, and are compared round by round: whatever slows the
machine down for a while slows all of them down. A contender is charged the processor time of this process where that
is less than the wall clock, so that other work on the machine does not count; one that has processes of its own, or is
measured for how it waits, is charged the wall clock.
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
    """Something to measure.

    Args:
        name: Its name.
        call: Does the work of one batch; is given consecutive numbers.
        kind: "floor", "ours" or "peer".
        wall: Whether it is charged the wall clock in any case.
        ahead: How many batches it works ahead, which must be done before another is measured.
        multiple: Batches that are only measured together, because work is shared among them.
        before: Called before each slice, unmeasured.
        after: Called after each slice, unmeasured.
    """

    name: str
    call: Callable[[int], Any]
    kind: str = "peer"
    wall: bool = False
    ahead: int = 0
    multiple: int = 1
    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None


def steady(contender: Contender, waiting: int) -> Contender:
    """A contender that works ahead, as one whose slices begin with nothing ready, and are charged what they take.

    Args:
        contender: What works ahead.
        waiting: How many batches it is told to have ready.
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
                return  # this one had to be waited for

    return replace(contender, ahead=waiting, before=drain)


@dataclass(frozen=True)
class Timing:
    """The measured times of one contender.

    Args:
        contender: The contender.
        seconds: Seconds per batch, float64 ``[rounds]``; NaN in rounds without the contender.
        wall: Wall-clock seconds per batch, of the same shape.
    """

    contender: Contender
    seconds: npt.NDArray[np.float64]
    wall: npt.NDArray[np.float64]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the seconds a batch."""
        return _quartiles(self.seconds)

    @property
    def median(self) -> float:
        """Median of the seconds a batch."""
        return self.quartiles[1]

    def ratio(self, other: Timing) -> tuple[float, float, float]:
        """Quartiles of how many times the other's time this one takes, round by round."""
        return _quartiles(self.seconds / other.seconds)


@dataclass
class _Turn:
    contender: Contender
    calls: int
    cost: float = 0.0
    every: int = 1
    next_index: int = 0
    seconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    slice_seconds: float = 0.008,
    budget_seconds: float = 2.0,
) -> list[Timing]:
    """Measure contenders in turns.

    Args:
        contenders: What to measure; the first takes part in every round, so that all others can be compared with it.
        rounds: How many turns a fast one has, at least 3; fewer if the first is slow.
        slice_seconds: How long a turn lasts, about.
        budget_seconds: About how long a contender may take in all; slow ones have fewer turns, but at least 3.
    """
    order = random.Random(0)
    turns = [_prepare(contender, slice_seconds) for contender in contenders]
    rounds = _affordable(turns[0], rounds, budget_seconds)
    for turn in turns:
        turn.every = rounds // _affordable(turn, rounds, budget_seconds)
    for number in range(rounds):
        # Slow ones are spread over the rounds, not all in the same.
        present = [turn for place, turn in enumerate(turns) if (number + place) % turn.every == 0]
        order.shuffle(present)
        for turn in present:
            seconds, wall = _take(turn)
            missing = number - len(turn.seconds)
            turn.seconds += [math.nan] * missing + [seconds]
            turn.wall += [math.nan] * missing + [wall]
    return [Timing(turn.contender, _padded(turn.seconds, rounds), _padded(turn.wall, rounds)) for turn in turns]


def _prepare(contender: Contender, slice_seconds: float) -> _Turn:
    turn = _Turn(contender, contender.multiple)
    slice_wall, around = _take_once(turn)  # compiles, opens, touches
    if slice_wall + around < _LONG_SECONDS:
        slice_wall, around = _take_once(turn)
    repeats = max(1, round(slice_seconds / slice_wall))
    turn.calls = repeats * contender.multiple
    turn.cost = around + repeats * slice_wall
    return turn


def _take_once(turn: _Turn) -> tuple[float, float]:
    """Seconds of the calls of a slice, and of what stands around them."""
    began = time.perf_counter()
    inside = max(_take(turn)[1] * turn.calls, 1e-9)
    return inside, time.perf_counter() - began - inside


def _affordable(turn: _Turn, rounds: int, budget_seconds: float) -> int:
    return min(rounds, max(3, int(budget_seconds / turn.cost)))


def _take(turn: _Turn) -> tuple[float, float]:
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
        # What it still does must not be charged to the next.
        time.sleep(_SETTLE_SECONDS + contender.ahead * wall / turn.calls)
    return (wall if contender.wall else min(wall, cpu)) / turn.calls, wall / turn.calls


def _padded(values: list[float], rounds: int) -> npt.NDArray[np.float64]:
    return np.array(values + [math.nan] * (rounds - len(values)))


def _quartiles(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan, math.nan
    low, middle, high = np.percentile(known, [25, 50, 75]).tolist()
    return low, middle, high


def private_memory() -> int | None:
    """Bytes of anonymous memory that this process holds (RssAnon); None where the system does not say."""
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
