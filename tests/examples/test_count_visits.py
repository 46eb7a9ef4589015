"""Counting visits reaches what actions at random do not."""

import pytest

pytest.importorskip("gymnasium")

from examples import count_visits


def test_a_bonus_for_what_was_seldom_seen_finds_the_goal() -> None:
    found = count_visits.explore(150, seed=0)
    assert found.goals > 0
    assert found.states == len(found.visits)
    assert int(found.visits.values().sum()) == 150 * 16
    without = count_visits.explore(150, bonus=0, seed=0)
    assert without.goals == 0
    assert without.states < found.states
