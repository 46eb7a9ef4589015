"""The search that plays tic-tac-toe: it loses to nobody."""

from __future__ import annotations

import numpy as np
import pytest

from examples import tree_search


@pytest.mark.slow
def test_it_loses_to_no_reply_when_it_moves_second() -> None:
    found = tree_search.results(begins=False, searches=600)
    assert found["lost"] == 0
    assert found["won"] > 100


@pytest.mark.slow
def test_it_loses_to_no_reply_when_it_begins() -> None:
    found = tree_search.results(begins=True, searches=600)
    assert found["lost"] == 0
    assert found["won"] > 50


def test_too_few_searches_lose() -> None:
    """So that the tests above say something."""
    assert tree_search.results(begins=False, searches=10)["lost"] > 0


def test_the_rules() -> None:
    board = np.array([[1, 1, 0, -1, -1, 0, 0, 0, 0]], np.int8)
    after = tree_search.play(board, np.array([2], np.int32))
    assert after[0].tolist() == [-1, -1, -1, 1, 1, 0, 0, 0, 0]
    assert tree_search.lost(after).all()
    assert len(tree_search.every_reply(board)) == 5
