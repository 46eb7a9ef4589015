"""A program that records into a folder and says which steps it has taken; it is killed by `test_record_killed`.

python -m tests.core.record_killed FOLDER single|vector mark|cut SEED
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np

from mouse_core import DatasetStore
from mouse_core.record import Recorder, VectorRecorder
from tests.core.formats.recording import Counting


class Walk(Counting):
    """Episodes whose numbers say which recording they are of, and which environment's."""

    def __init__(self, lengths: list[int], first: int) -> None:
        super().__init__(lengths)
        self.episode = first - 1
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)

    def _observe(self) -> Any:
        return np.array([self._count, self.episode, self.time], np.float64)


def main(folder: str, kind: str, on_interrupted: str, seed: str) -> None:
    random = np.random.default_rng(int(seed))
    first = int(seed) * 1000
    store = DatasetStore.open(folder, "a", sync="none")

    def world(number: int) -> Walk:
        return Walk(random.integers(1, 150, 50).tolist(), first + number * 100)

    env: Any
    if kind == "single":
        env = Recorder(world(0), store, on_interrupted=on_interrupted)
    else:
        worlds = [world(number) for number in range(3)]
        envs = gym.vector.SyncVectorEnv([lambda one=one: one for one in worlds])
        env = VectorRecorder(envs, store, on_interrupted=on_interrupted)
    step = 0
    observations, _ = env.reset()
    action = np.zeros(env.action_space.shape)
    while True:
        _say(observations)
        observations, _, terminated, _, _ = env.step(action)
        step += 1
        if step % 20 == 0:
            store.flush()
        if kind == "single" and terminated:
            _say(observations)
            observations, _ = env.reset()


def _say(observations: np.ndarray) -> None:
    """Which rows the recorder has taken."""
    for _, episode, time in np.atleast_2d(observations).astype(int).tolist():
        print(episode, time, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
