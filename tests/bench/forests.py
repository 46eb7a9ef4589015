"""Forests of rollouts beside TorchRL's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from mouse_core.trees import Forest
from tests.bench.results import Figure, Settings, Table, compare, contenders

WIDTH, LENGTH, STARTS = 17, 100, 10

Rollouts = list[dict[str, Any]]


def tables(settings: Settings) -> list[Table]:
    """Episodes that begin at a few observations, added one by one and all at once; and the tree of one of these."""
    transitions = min(settings.rows, 10_000)  # of which TorchRL takes 5 s
    rollouts = recorded(transitions // LENGTH)
    together = _joined(rollouts)
    forest, root = _ours(rollouts), {"observation": rollouts[0]["observation"][0]}
    building: dict[str, Callable[[int], Any]] = {
        "NumPy copying observations twice": lambda _: (
            together["observation"].copy(),
            together["next"]["observation"].copy(),
        ),
        "mouse Forest, an episode at a time": lambda _: _ours(rollouts),
        "mouse Forest, all at once": lambda _: _ours([together]),
    }
    looking: dict[str, Callable[[int], Any]] = {"mouse Forest": lambda _: forest.get_tree(root)}
    with suppress(ImportError):
        build, look = _torchrl(rollouts)
        filled = build()
        building["TorchRL MCTSForest, an episode at a time"] = lambda _: build()
        looking["TorchRL MCTSForest"] = lambda _: look(filled)
    what = f"{transitions:,} transitions, observations of {WIDTH} float32"
    tree = f"Forests: the compact tree of {transitions // STARTS:,} transitions"
    return [
        compare(settings, "forest-build", f"Forests: {what}", contenders(building, first="floor")),
        compare(settings, "forest-tree", tree, contenders(looking)),
    ]


def figures(settings: Settings) -> list[Figure]:
    """Memory of a node of a forest with the edge that leads there, observation and action included."""
    forest = _ours([_joined(recorded(min(settings.rows, 100_000) // LENGTH))])
    return [Figure("forest-memory", "a forest's memory for a node and its edge", forest.nbytes / forest.num_nodes, "B")]


def recorded(episodes: int) -> Rollouts:
    """Episodes of transitions, each of which begins at one of a few observations."""
    random = np.random.default_rng(0)
    starts = random.normal(size=(STARTS, WIDTH)).astype(np.float32)
    rollouts = []
    for number in range(episodes):
        seen = random.normal(size=(LENGTH + 1, WIDTH)).astype(np.float32)
        seen[0] = starts[number % STARTS]
        done = np.arange(LENGTH)[:, None] == LENGTH - 1
        reward = np.ones((LENGTH, 1), np.float32)
        after = {"observation": seen[1:], "reward": reward, "done": done, "terminated": done}
        action = random.normal(size=(LENGTH, 2)).astype(np.float32)
        rollouts.append({"observation": seen[:-1], "action": action, "next": after})
    return rollouts


def _joined(rollouts: Rollouts) -> dict[str, Any]:
    first = rollouts[0]
    return {
        name: _joined([rollout[name] for rollout in rollouts])
        if isinstance(first[name], dict)
        else np.concatenate([rollout[name] for rollout in rollouts])
        for name in first
    }


def _ours(rollouts: Rollouts) -> Forest:
    forest = Forest()
    for rollout in rollouts:
        forest.extend(rollout)
    return forest


def _torchrl(rollouts: Rollouts) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    from tensordict import TensorDict

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    from torchrl.data import MCTSForest

    given = [TensorDict(rollout, [LENGTH]) for rollout in rollouts]

    def build() -> Any:
        forest = MCTSForest(max_size=LENGTH * len(rollouts) + 1)
        for rollout in given:
            forest.extend(rollout)
        return forest

    return build, lambda forest: forest.get_tree(given[0][0])
