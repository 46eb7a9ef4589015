"""Measuring by turns: who takes part when, what is charged, and what is compared with what."""

import time
from dataclasses import replace

import numpy as np

from tests.bench.measuring import Contender, Timing, interleave, steady


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_every_contender_gets_consecutive_numbers() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    interleave([Contender(name, seen[name].append, multiple=4) for name in seen], rounds=3, slice_seconds=1e-12)
    for numbers in seen.values():
        assert numbers == list(range(len(numbers)))
        assert len(numbers) == (2 + 3) * 4


def test_slow_contenders_take_part_in_few_rounds_and_are_compared_in_those() -> None:
    calls: list[int] = []

    def slow(number: int) -> None:
        calls.append(number)
        busy(0.004)

    fast, late = interleave(
        [Contender("fast", lambda number: busy(0.0005)), Contender("slow", slow)],
        rounds=30,
        slice_seconds=0.001,
        budget_seconds=0.02,
    )
    assert np.isfinite(fast.seconds).all()
    assert 3 <= np.isfinite(late.seconds).sum() <= 10
    assert np.isfinite(late.ratio(fast)).all()


def test_waiting_counts_for_those_charged_the_wall_clock() -> None:
    def sleep(number: int) -> None:
        time.sleep(0.002)

    busy_alone, by_wall = interleave(
        [Contender("processor", sleep), Contender("wall", sleep, wall=True)], rounds=3, slice_seconds=0.002
    )
    assert busy_alone.median < 0.002 <= by_wall.median


def test_before_and_after_stand_around_every_slice_and_ratios_are_taken_by_round() -> None:
    log: list[str] = []
    contender = Contender(
        "c", lambda number: log.append("call"), before=lambda: log.append("in"), after=lambda: log.append("out")
    )
    interleave([contender], rounds=3, slice_seconds=1e-9)
    assert log == ["in", "call", "out"] * 5
    slow = np.array([1.0, 10.0] * 5)  # the machine was ten times slower in every other round, for both
    assert Timing(contender, 2 * slow).ratio(Timing(contender, slow)) == (2.0, 2.0, 2.0)


def test_what_works_ahead_begins_each_slice_with_nothing_ready() -> None:
    log: list[str] = []
    ready = 0

    def call(number: int) -> None:
        nonlocal ready
        log.append("ready" if ready else "waited")
        if ready:
            ready -= 1
        else:
            time.sleep(0.001)

    def refill() -> None:
        nonlocal ready
        ready = 3  # one more than it was told to have
        log.append("|")

    contender = replace(steady(Contender("c", call), waiting=2), after=refill)
    interleave([contender], rounds=4, slice_seconds=1e-12)
    slices = "".join({"ready": "r", "waited": "w"}.get(entry, entry) for entry in log).split("|")
    assert all(entry.startswith("rrrw") for entry in slices[1:-1])
    assert all(entry.endswith("w") for entry in slices[:-1])  # the call that was measured
