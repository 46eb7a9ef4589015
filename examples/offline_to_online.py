"""From recorded to fresh experience: a Q-network learns from a data set, then from that and its own episodes.

    python examples/offline_to_online.py

A clumsy player has recorded episodes of a pole on a cart. The network learns from these alone at first, and acts then:
its episodes are written to a second store. A ``Mixture`` makes one stream of both, and its ``Schedule`` says by the
number of the batch which share of the transitions is recorded, and which is fresh: all of them, three quarters, half.

A transition is a window by field: an observation and the one behind it, with the action, the reward and the end of the
step between them. ``windows=`` knows in which row these stand, and ``action_mask`` says where no step leaves an
observation, since the episode ended there.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium as gym
    import torch
    from tensordict import TensorDict
    from torch import nn
except ImportError as error:
    raise SystemExit(f"offline_to_online.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core import DatasetStore
from mouse_core.mixtures import Mixture, Schedule
from mouse_core.record import record
from mouse_torch import PrefetchBatchifier

ENVIRONMENT, OBSERVATION_SIZE, ACTIONS = "CartPole-v1", 4, 2
RECORDED_EPISODES = 50
CLUMSINESS = 0.7  # the share of random actions in what is recorded
EXPLORATION = 0.05  # the same in what the network plays
DISCOUNT = 0.97
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
TARGET_EVERY = 100  # updates
HIDDEN = 64
LARGEST = (2.4, 3.0, 0.21, 3.0)  # about, of an observation; the network begins as if these were 1

TRANSITIONS: dict[str, Any] = {
    "batch_size": BATCH_SIZE,
    "windows": {"obs_continuous": [0, 1], "action": [0], "reward": [0], "done": [0]},
    "dtypes": {"obs_continuous": "float32"},
}

Act = Callable[[NDArray[np.float32]], int]


class Learner:
    """A Q-network and its update."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # so small a network is fastest so
        layers = (nn.Linear(OBSERVATION_SIZE, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, ACTIONS))
        with torch.no_grad():
            layers[0].weight /= torch.tensor(LARGEST)
        self.network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE)
        self.updates = 0

    @torch.no_grad()
    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The best actions [n] for observations [n, 4]."""
        return self.network(torch.from_numpy(observations)).argmax(dim=-1).numpy()

    def update(self, batch: TensorDict) -> float:
        """Take a step of gradient descent on transitions [b]; return their mean error."""
        before, after = batch["obs_continuous"].unbind(dim=1)
        with torch.no_grad():
            # The network chooses the next action, the target network values it (double Q-learning).
            best = self.network(after).argmax(dim=-1, keepdim=True)
            value = self.target(after).gather(1, best)[:, 0]
            goal = batch["reward"][:, 0] + DISCOUNT * (batch["done"][:, 0] != 1) * value
        chosen = self.network(before).gather(1, batch["action"])[:, 0]
        losses = nn.functional.smooth_l1_loss(chosen, goal, reduction="none")
        loss = losses[batch["action_mask"][:, 0]].mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % TARGET_EVERY == 0:
            self.target.load_state_dict(self.network.state_dict())
        return float(loss.detach())


def clumsy(observation: NDArray[np.float32]) -> int:
    """Push to where the pole leans and falls."""
    return int(observation[2] + observation[3] > 0)


def episode_of(environment: gym.Env[Any, Any], act: Act, share: float, random: np.random.Generator) -> dict[str, Any]:
    """Play an episode, a share of it at random: its rows, each with what led to it."""
    observation, _ = environment.reset(seed=int(random.integers(1 << 31)))
    rows: list[tuple[Any, ...]] = [(observation, 0, 0.0, 0)]
    while not rows[-1][3]:
        action = int(random.integers(ACTIONS)) if random.random() < share else act(rows[-1][0])
        observation, reward, terminated, truncated, _ = environment.step(action)
        rows.append((observation, action, reward, 1 if terminated else 2 * truncated))
    names = ("observation", "action", "reward", "done")
    return dict(zip(names, map(np.asarray, zip(*rows, strict=True)), strict=True))


def play(learner: Learner) -> float:
    """The mean return of 30 episodes in which the best action is always taken, far from the seeds of training."""
    played = record(ENVIRONMENT, lambda seen: int(learner.act(seen[None])[0]), episodes=30, seed=1_000_000)
    return float(played.episodes["return"].to_numpy().mean())


def shares_by_batch(offline: int, online: int) -> Schedule:
    """Recorded transitions alone, then three quarters of them, and from the middle of acting on one half."""
    return Schedule({0: [1, 0], offline: [3, 1], offline + online // 2: [1, 1]})


def train(*, offline: int, online: int, seed: int) -> tuple[Learner, dict[str, float]]:
    """Learn from so many batches before acting, and from one for each step of acting; figures of it."""
    random = np.random.default_rng(seed)
    environment = gym.make(ENVIRONMENT)
    recorded, fresh = DatasetStore(), DatasetStore()
    for _ in range(RECORDED_EPISODES):
        recorded.extend(episode_of(environment, clumsy, CLUMSINESS, random))
    figures = {"return recorded": float(recorded.episodes["return"].to_numpy().mean())}
    learner = Learner(seed)
    mixture = Mixture({"recorded": recorded, "fresh": fresh}, weights=shares_by_batch(offline, online))
    codes = []
    with PrefetchBatchifier(mixture, seed=seed, **TRANSITIONS) as loader:
        for _ in range(offline):
            learner.update(loader.next_batch())
        figures["return offline"] = play(learner)
        steps = 0
        while steps < online:
            rows = episode_of(environment, lambda seen: int(learner.act(seen[None])[0]), EXPLORATION, random)
            fresh.extend(rows)
            loader.refresh()
            for _ in range(min(len(rows["reward"]) - 1, online - steps)):
                batch = loader.next_batch()
                codes.append(batch["member"].numpy())
                learner.update(batch)
                steps += 1
    environment.close()
    figures["rows recorded"], figures["rows fresh"] = len(recorded), len(fresh)
    figures["share of fresh transitions"] = float(np.mean(codes))
    figures["return online"] = play(learner)
    return learner, figures


def main() -> None:
    """Train, and print the figures."""
    parser = argparse.ArgumentParser(description="Learn from recorded episodes, then from recorded and fresh ones.")
    parser.add_argument("--offline", type=int, default=1_000, help="batches before acting")
    parser.add_argument("--online", type=int, default=2_000, help="steps of acting, with a batch each")
    parser.add_argument("--seed", type=int, default=0, help="of the network, the episodes and the draws")
    options = parser.parse_args()
    _, figures = train(offline=options.offline, online=options.online, seed=options.seed)
    for name, value in figures.items():
        print(f"{name}: {value:g}" if "rows" in name else f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
