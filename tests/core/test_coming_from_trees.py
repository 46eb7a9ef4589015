"""The lines on trees in docs/reference/coming-from.md: each number has its test here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import trees

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from.md"


def test_every_line_has_a_test() -> None:
    numbers = re.findall(r"^\| (N\d\d) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 0
    assert {part for name in globals() for part in re.findall(r"N\d\d", name)} == set(numbers)


def steps_to(*states: int, action: int = 0) -> dict[str, Any]:
    """A rollout in TED through these observations."""
    at = np.array(states)
    return {"observation": at[:-1], "action": np.full(len(at) - 1, action), "next": {"observation": at[1:]}}


def test_N01_N02_N03_N04_forests() -> None:
    forest = trees.Forest()
    forest.extend(steps_to(0, 1, 2))
    forest.extend({"observation": 0, "action": 0, "next": {"observation": 5}}, batch_dims=0)
    forest.extend({"observation": [0, 1], "action": [0, 0], "done": [0, 1], "left out": [0, 0]})
    children = forest.get_children({"observation": 0})
    assert children["next"]["observation"].tolist() == [1, 5]
    assert children["count"].tolist() == [2, 1]
    assert "left out" not in children


def test_N05_N06_N07_N08_N09_N10_N11_N12_trees() -> None:
    forest = trees.Forest()
    forest.extend(steps_to(0, 1, 2, 1))
    forest.extend(steps_to(1, 4, action=3))
    tree = forest.get_tree({"observation": 0})
    assert list(tree.valid_paths()) == [(0, 0), (0, 1)]
    assert (tree.max_length(), tree.num_vertices(), tree.num_vertices(count_repeat=True)) == (2, 3, 4)
    assert tree.rollout_from_path((0, 0))["observation"].tolist() == [0, 1, 2]
    assert len(forest.get_tree({"observation": 0}, max_depth=1)) == 2
    assert tree.children(tree.vertex_at((0,))).tolist() == [1, 2]
    assert tree.observation(2)["observation"] == 4
    assert tree.index({"observation": np.array([4, 2])}).tolist() == [2, -1]
    assert tree.contains({"observation": np.array([1])}).all()
    assert (tree.parents(2).tolist(), tree.leaving(0).tolist(), tree.counts.tolist()) == ([1], [0], [1, 1, 1])
    assert tree.rollout(2)["action"].tolist() == [3]
    assert tree.values()[0].tolist() == [0, 0, 0]
    assert tree.to_string(lambda tree, edge: edge) == "(0,) 0\n (0, 0) 1\n (0, 1) 2"


def test_N13_scores_of_a_search_are_left_to_mctx() -> None:
    assert trees.__all__ == ["Forest", "Steps", "Tree"]
