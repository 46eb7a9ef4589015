"""Learn to say sixteen actions at a time, as ACT does, with PyTorch: a script to copy and change.

    python examples/action_chunks_torch.py

A teacher reaches for targets with an arm. A small transformer sees the last two observations and predicts the next
sixteen actions (Zhao et al., 2023, without the style variable), then reaches by itself. ``windows=`` says which rows;
``examples/action_chunks_flax.py`` trains on the same batches with JAX.
"""

from __future__ import annotations

import argparse

import numpy as np
import reaching
import torch
from tensordict import TensorDict
from torch import nn

from mouse_torch import PrefetchBatchifier, global_mean

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WIDTH = 64


class ChunkPolicy(nn.Module):
    """Observations [B, 2, 10] to chunks of actions [B, 16, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(reaching.OBSERVATION_SIZE, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(len(reaching.SEEN) + reaching.CHUNK, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.said = nn.Linear(WIDTH, reaching.ACTION_SIZE)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Predict the actions."""
        seen = self.seen(observation)
        asked = seen.new_zeros(len(seen), reaching.CHUNK, WIDTH)  # a token for each action, which has its place alone
        tokens = torch.cat([seen, asked], dim=1) + self.places
        chunk: torch.Tensor = self.said(self.layers(tokens)[:, -reaching.CHUNK :])
        return chunk


def chunk_loss(policy: ChunkPolicy, batch: TensorDict) -> torch.Tensor:
    """How far the predicted actions are from the teacher's, on average over those that there are."""
    # The alignment is settled by `windows=`: action k of the chunk was taken k steps after the anchor was seen.
    error = (policy(batch["obs_continuous"]) - batch["action"]).abs()
    # Near the end of an episode a chunk has fewer actions. The mask is that of the actions, not of observations, which
    # repeat the first one at the beginning.
    return global_mean(error, batch["action_mask"])


def main() -> None:
    """Record, train, and reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    store = reaching.record(chosen.episodes, chosen.seed)
    policy = ChunkPolicy()

    def act(observation: reaching.Floats) -> reaching.Floats:
        with torch.no_grad():
            return policy(torch.from_numpy(observation)).numpy()

    print(f"reached untrained: {reaching.reached(act):.2f}")
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
    losses = []
    with PrefetchBatchifier(
        store,
        batch_size=BATCH_SIZE,
        seed=chosen.seed,
        windows={"obs_continuous": reaching.SEEN, "action": range(reaching.CHUNK)},
        fields=["obs_continuous", "action"],
        dtypes={"obs_continuous": "float32"},
        digest=True,
    ) as loader:
        for _ in range(chosen.steps):
            loss = chunk_loss(policy, loader.next_batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"batches: {loader.digest}")
    print(f"final loss: {np.mean(losses[-50:]):.4f}")
    print(f"reached: {reaching.reached(act):.2f}")


if __name__ == "__main__":
    main()
