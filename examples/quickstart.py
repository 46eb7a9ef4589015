"""From recorded experience to a trained policy, in one file.

    python examples/quickstart.py

1. record   a clumsy pilot lands a space ship; every step goes into a ``DatasetStore``, by a ``Recorder``
2. reopen   the dataset is written to disk and opened again, by reference: nothing is loaded into memory
3. train    a policy learns from windows ``TensorDict[B, S]`` that a loader prefetches
4. play     the trained policy flies, and the figures are printed, one ``name: value`` a line

The pilot is gymnasium's own heuristic, which acts at random in none, a fifth or three fifths of its steps,
depending on the episode. The policy learns to predict the pilot's action (behaviour cloning). The random
actions are part of the recording, but they differ from visit to visit, while the heuristic's do not:
so the *most probable* action is the heuristic's nearly everywhere, and the policy, which always takes
that one, flies much better than what it learnt from. A return of 200 or more is a good landing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import datasets
import lunar_lander
import numpy as np
from numpy.typing import NDArray

try:
    import torch
    from tensordict import TensorDict
    from torch import nn
except ImportError as error:
    raise SystemExit(f"quickstart.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core import DatasetStore
from mouse_torch import PrefetchBatchifier

SEQUENCE_LENGTH = 64  # S: steps in a window
BATCH_SIZE = 32  # B: windows in a batch
LEARNING_RATE = 1e-2
HIDDEN = 64
PLAYED_EPISODES = 20
PLAYING_SEED = 1_000_000  # far from the seeds of the recording: the policy is judged on terrain it never saw


def make_policy() -> nn.Module:
    """Build a small network from observations [..., 8] to one score for each action [..., 4]."""
    return nn.Sequential(
        nn.Linear(lunar_lander.OBSERVATION_SIZE, HIDDEN),
        nn.SiLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.SiLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.SiLU(),
        nn.Linear(HIDDEN, lunar_lander.ACTIONS),
    )


def cloning_loss(policy: nn.Module, batch: TensorDict) -> torch.Tensor:
    """Measure how badly the policy predicts the recorded actions of a batch [B, S] (cross-entropy)."""
    # The alignment. Row t holds the observation at t and the action that *led to* it. The action that the
    # pilot chose when it saw observation t therefore stands in row t+1. Pairing the two within one row
    # would teach the policy what has already happened: the loss falls nearly as far, and the ship crashes.
    observation = batch["obs_continuous"][:, :-1]  # [B, S-1, 8]
    action = batch["action"][:, 1:]  # [B, S-1]

    # Windows are stretches of the recording and run on across the ends of episodes. Where row t+1 is the
    # first of an episode (time 0), its action is a placeholder and row t belongs to the episode
    # before, whose last observation no action leaves. Such pairs teach nothing and are left out.
    same_episode = batch["time"][:, 1:] != 0  # [B, S-1]

    return nn.functional.cross_entropy(policy(observation[same_episode]), action[same_episode])


def train(policy: nn.Module, store: DatasetStore, *, steps: int, seed: int) -> tuple[list[float], dict[str, float]]:
    """Train the policy in place; return the loss of every step and the figures of speed."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(steps, 2))
    losses = []
    waiting = 0.0
    with PrefetchBatchifier(
        store,
        sequence_length=SEQUENCE_LENGTH,
        batch_size=BATCH_SIZE,
        seed=seed,
        fields=("obs_continuous", "action", "time"),  # only these are read; one that is missing is an error
        dtypes={"obs_continuous": "float32"},  # what the network computes in; the default is float64
    ) as loader:
        start = time.perf_counter()
        for _ in lunar_lander.progress(range(steps), description="training", total=steps):
            asked = time.perf_counter()
            batch = loader.next_batch()
            waiting += time.perf_counter() - asked

            loss = cloning_loss(policy, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            del batch  # so that freeing it is not counted as waiting for the next one
        elapsed = time.perf_counter() - start
    return losses, {"batches per second": steps / elapsed, "waiting for data": 100.0 * waiting / elapsed}


def play(policy: nn.Module) -> NDArray[np.float64]:
    """Let the policy fly, always taking its most probable action, and return what each episode earned."""

    @torch.no_grad()
    def act(observations: NDArray[np.float32]) -> NDArray[Any]:
        actions: NDArray[Any] = policy(torch.from_numpy(observations)).argmax(dim=-1).numpy()
        return actions

    return lunar_lander.play(act, episodes=PLAYED_EPISODES, seed=PLAYING_SEED)


def main() -> None:
    """Do all four parts and print the figures."""
    parser = argparse.ArgumentParser(description="Record, reopen, train, play.")
    parser.add_argument("--seed", type=int, default=0, help="of the recording, the policy and the batches")
    parser.add_argument("--episodes", type=int, default=300, help="episodes to record")
    parser.add_argument("--steps", type=int, default=3000, help="training steps, one batch each")
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="folder for the results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # a network this small gains nothing from more; they are left to the loader
    datasets.disable_progress_bars()  # one kind of bar is enough

    # 1. Record.
    recording = lunar_lander.record(episodes=options.episodes, seed=options.seed)
    recorded = recording.episodes["return"].to_pylist()
    print(f"episodes recorded: {len(recorded)}")
    print(f"steps recorded: {len(recording)}")

    # 2. Write the dataset and open it again. Whoever has a dataset already starts here.
    folder = options.output / "dataset"
    recording.to_dataset().save_to_disk(folder)
    store = DatasetStore().from_dataset(datasets.load_from_disk(folder))
    print(f"dataset: {folder}")

    # 3. Train.
    policy = make_policy()
    untrained = play(policy)
    losses, speed = train(policy, store, steps=options.steps, seed=options.seed)
    print(f"training steps: {len(losses)}")
    print(f"final loss: {np.mean(losses[-100:]):.3f}")
    print(f"batches per second: {speed['batches per second']:.0f}")
    print(f"waiting for data: {speed['waiting for data']:.1f} %")

    # 4. Play.
    trained = play(policy)
    print(f"return recorded: {np.mean(recorded):.1f}")
    print(f"return untrained: {untrained.mean():.1f}")
    print(f"return trained: {trained.mean():.1f}")

    plot = options.output / "quickstart.png"
    levels = lunar_lander.NOISE_LEVELS
    pilots = {f"recorded,\nnoise {level}": recorded[i :: len(levels)] for i, level in enumerate(levels)}
    returns = pilots | {"untrained": untrained, "trained": trained}
    lunar_lander.save_plot(plot, returns=returns, losses={"cross-entropy": losses})
    print(f"plot: {plot}")


if __name__ == "__main__":
    main()
