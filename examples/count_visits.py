"""Exploration by counting: a bonus for states that were seldom seen, in a map of rows.

FrozenLake pays nothing until the goal is reached, and ends in a hole, so that actions at random hardly ever get there.
Q-learning with a bonus of 1 / sqrt(visits) for the state that an action leads to (Strehl and Littman, "An analysis of
model-based interval estimation for Markov decision processes", 2008) does. Both the visits and the values of the
actions are `RowMap`s, which ask nothing about how many states there are.

    python examples/count_visits.py
    python examples/count_visits.py --bonus 0
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    raise SystemExit(f"count_visits.py needs {error.name}: pip install 'mouse-data[record]'") from error

from mouse_core.maps import RowMap

ACTIONS = 4
DISCOUNT = 0.95


@dataclass(frozen=True)
class Found:
    """What a run found.

    Args:
        states: How many states were seen.
        goals: How many episodes reached the goal.
        first: After how many steps the first one did; None: none.
        visits: Visits by state.
    """

    states: int
    goals: int
    first: int | None
    visits: RowMap


def explore(steps: int, *, bonus: float = 1.0, envs: int = 16, seed: int = 0) -> Found:
    """Act in so many environments side by side, and learn from each step.

    Args:
        steps: How many, in each environment.
        bonus: For a state that was never seen; of one seen n times a sqrt(n + 1)th.
        envs: How many environments.
        seed: Of the environments, and of what is drawn.
    """
    world = gymnasium.make_vec(
        "FrozenLake-v1",
        envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        map_name="8x8",
        is_slippery=False,
    )
    random = np.random.default_rng(seed)
    visits, values = RowMap(), RowMap()
    unknown = np.full(ACTIONS, bonus / (1 - DISCOUNT))  # what an action is worth at most, until it is known better
    observations, _ = world.reset(seed=seed)
    here, rows = {"state": observations.copy()}, np.arange(envs)
    goals, first = 0, None
    for step in range(steps):
        visits.accumulate(here, 1)
        worth = values.get(here, unknown)  # [envs, actions]
        # The best action; of several that are as good, any.
        action = (worth + random.uniform(0, 1e-6, worth.shape)).argmax(axis=1)
        action = np.where(random.random(envs) < 0.05, random.integers(ACTIONS, size=envs), action)
        observations, reward, terminated, truncated, _ = world.step(action)
        there = {"state": observations.copy()}
        novelty = bonus / np.sqrt(1 + visits.get(there, 0))
        later = values.get(there, unknown).max(axis=1)
        # Where an episode is over, what comes next is another one's first state.
        target = reward + np.where(terminated | truncated, 0, novelty + DISCOUNT * later)
        worth[rows, action] += 0.3 * (target - worth[rows, action])
        values[here] = worth
        goals += int(reward.sum())
        first = step if first is None and reward.any() else first
        here = there
    world.close()
    return Found(len(visits), goals, first, visits)


def main() -> None:
    """Explore, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--bonus", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    found = explore(chosen.steps, bonus=chosen.bonus, seed=chosen.seed)
    when = "never" if found.first is None else f"{found.goals} times, first after {found.first} steps"
    print(f"{found.states} states seen, the goal reached {when}")
    most = np.argsort(-found.visits.values())[:3]
    for state, visits in zip(found.visits.rows(most)["state"], found.visits.values(most), strict=True):
        print(f"state {state}: {visits} visits")


if __name__ == "__main__":
    main()
