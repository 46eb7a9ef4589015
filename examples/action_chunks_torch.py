"""Learn to say sixteen actions at a time, as ACT does, with PyTorch: a script to copy and change.

    python examples/action_chunks_torch.py

A teacher reaches for targets with an arm. A small transformer sees the last two observations and predicts the next
sixteen actions (Zhao et al., 2023, without the style variable), then reaches by itself. ``windows=`` says which rows;
``examples/action_chunks_flax.py`` trains on the same batches with JAX. With ``--video FOLDER`` it
sees two frames of a camera instead, which lie in a video.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import reaching

try:
    import torch
    from tensordict import TensorDict
    from torch import nn
except ImportError as error:
    raise SystemExit(f"action_chunks_torch.py needs {error.name}: pip install 'mouse-data[torch]'") from error

from mouse_torch import PrefetchBatchifier, global_mean

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WIDTH = 64


class ChunkPolicy(nn.Module):
    """Observations [B, 2, 10], or frames [B, 2, 32 * 32 * 3] of bytes, to chunks of actions [B, 16, 2]."""

    def __init__(self, size: int = reaching.OBSERVATION_SIZE) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Linear(size, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.places = nn.Parameter(0.1 * torch.randn(len(reaching.SEEN) + reaching.CHUNK, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.said = nn.Linear(WIDTH, reaching.ACTION_SIZE)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Predict the actions."""
        is_film = observation.dtype == torch.uint8
        seen = self.seen(observation.flatten(2).float() / 255 if is_film else observation)
        asked = seen.new_zeros(len(seen), reaching.CHUNK, WIDTH)  # a token for each action, which has its place alone
        tokens = torch.cat([seen, asked], dim=1) + self.places
        chunk: torch.Tensor = self.said(self.layers(tokens)[:, -reaching.CHUNK :])
        return chunk


def chunk_loss(policy: ChunkPolicy, batch: TensorDict) -> torch.Tensor:
    """How far the predicted actions are from the teacher's, on average over those that there are."""
    # The alignment is settled by `windows=`: action k of the chunk was taken k steps after the anchor was seen.
    seen = "obs_image" if "obs_image" in batch.keys() else "obs_continuous"  # noqa: SIM118
    error = (policy(batch[seen]) - batch["action"]).abs()
    # Near the end of an episode a chunk has fewer actions. The mask is that of the actions, not of observations, which
    # repeat the first one at the beginning.
    return global_mean(error, batch["action_mask"])


def main() -> None:
    """Record, train, and reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--video", type=Path, help="a folder: film the teacher into it, and learn from two frames")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    if chosen.video is None:
        field, dtype, size = "obs_continuous", "float32", reaching.OBSERVATION_SIZE
        store, see = reaching.record(chosen.episodes, chosen.seed), reaching.Arms.observe
    else:
        field, dtype, size = "obs_image", "uint8", 3 * reaching.SIDE**2
        store, see = reaching.filmed(chosen.video, chosen.episodes, chosen.seed), reaching.Arms.film
    policy = ChunkPolicy(size)

    def act(observation: reaching.Floats) -> reaching.Floats:
        with torch.no_grad():
            return policy(torch.from_numpy(observation)).numpy()

    print(f"reached untrained: {reaching.reached(act, see=see):.2f}")
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
    losses = []
    with PrefetchBatchifier(
        store,
        batch_size=BATCH_SIZE,
        seed=chosen.seed,
        windows={field: reaching.SEEN, "action": range(reaching.CHUNK)},
        fields=[field, "action"],
        dtypes={field: dtype},
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
    print(f"reached: {reaching.reached(act, see=see):.2f}")


if __name__ == "__main__":
    main()
