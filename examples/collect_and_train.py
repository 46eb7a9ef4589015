"""One process records, another one trains on what is there so far.

    python examples/collect_and_train.py runs/cartpole

The collector acts in CartPole by a rule that a random choice disturbs, and flushes after every episode. The trainer,
which begins before the collector ends, refreshes its loader between epochs and learns to act as the rule does. Kill the
collector and start it again: no row that was flushed is lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import numpy as np

try:
    import gymnasium
    import torch
except ImportError as error:
    raise SystemExit(f"collect_and_train.py needs {error.name}: pip install 'mouse-data[record,torch]'") from error

from mouse_core import DatasetStore
from mouse_core.record import Recorder
from mouse_torch import PrefetchBatchifier


def collect(folder: Path, episodes: int) -> None:
    """Record episodes, each of which a reader sees when it is over."""
    with DatasetStore.open(folder, "a") as store:
        env = Recorder(gymnasium.make("CartPole-v1", max_episode_steps=100), store)
        draw = np.random.default_rng(len(store))
        for seed in range(episodes):
            observation, _ = env.reset(seed=seed)
            over = False
            while not over:
                lean = observation[2] + 0.3 * observation[3]
                action = int(lean > 0) if draw.random() < 0.9 else int(draw.integers(2))
                observation, _, terminated, truncated, _ = env.step(action)
                over = terminated or truncated
            store.flush()


def train(folder: Path, collector: multiprocessing.Process, most_epochs: int) -> float:
    """Learn the action from the observation before it, until the collector is done; the loss of the last epoch."""
    while not (folder / "manifest.json").exists() or len(DatasetStore.open(folder)) < 256:
        time.sleep(0.05)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    store, loss = DatasetStore.open(folder), torch.tensor(0.0)
    with PrefetchBatchifier(store, 8, 16) as loader:
        for epoch in range(most_epochs):
            for batch in loader:
                observation, action = batch["observation"][:, :-1], batch["action"][:, 1:].long()
                begins = batch["time"][:, 1:] == 0  # the action there is a placeholder
                losses = torch.nn.functional.cross_entropy(
                    policy(observation).flatten(0, 1), action.flatten(), reduction="none"
                )
                loss = losses[~begins.flatten()].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: {loader.state_dict()['rows']} rows, loss {loss.item():.3f}")
            if not collector.is_alive():
                break
            loader.refresh()
    return loss.item()


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=1000)
    chosen = parser.parse_args()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(chosen.folder, chosen.episodes))
    collector.start()
    print(f"final loss: {train(chosen.folder, collector, chosen.epochs):.3f}")
    collector.join()
    print(f"rows: {len(DatasetStore.open(chosen.folder))}")


if __name__ == "__main__":
    main()
