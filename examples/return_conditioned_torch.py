"""The return-conditioned sequence model in PyTorch; see `return_conditioned.py`."""

from __future__ import annotations

from typing import Any

import lunar_lander
import numpy as np
from numpy.typing import NDArray
from return_conditioned import BATCHES, RETURN_SCALE, SEQUENCE_LENGTH, Scores

try:
    import torch
    from tensordict import TensorDict
    from torch import nn
except ImportError as error:
    raise SystemExit(f"return_conditioned_torch.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core.store import Store
from mouse_torch import PrefetchBatchifier

WIDTH, HEADS, LAYERS = 64, 4, 2
LEARNING_RATE = 1e-3


class Policy(nn.Module):
    """Returns [B, S], observations [B, S, 8] and previous actions [B, S] to scores of actions, [B, S, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(1 + lunar_lander.OBSERVATION_SIZE + lunar_lander.ACTIONS, WIDTH)
        self.place = nn.Embedding(SEQUENCE_LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, lunar_lander.ACTIONS)

    def forward(self, returns: torch.Tensor, observation: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Score the actions."""
        before = nn.functional.one_hot(previous, lunar_lander.ACTIONS)
        steps = torch.cat([returns[..., None] / RETURN_SCALE, observation, before], dim=-1).float()
        length = steps.shape[1]
        tokens = self.step(steps) + self.place.weight[:length]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        return self.scores(self.blocks(tokens, mask=causal, is_causal=True))


def cloning_loss(policy: Any, batch: TensorDict) -> torch.Tensor:
    """How badly the policy predicts the actions that leave the observations of a batch (cross-entropy)."""
    scores = policy(batch["returns_to_go"], batch["obs_continuous"], batch["previous_action"])
    losses = nn.functional.cross_entropy(scores.flatten(0, 1), batch["action"].flatten(), reduction="none")
    counts = (batch["mask"] & batch["action_mask"][..., 0]).flatten()
    return losses[counts].mean()


def train(store: Store, *, steps: int, seed: int) -> tuple[Scores, list[float]]:
    """Train a policy; how it scores actions, and the loss at each step."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(steps, 2))
    losses = []
    with PrefetchBatchifier(store, seed=seed, **BATCHES) as loader:
        for _ in lunar_lander.progress(range(steps), description="training", total=steps):
            loss = cloning_loss(policy, loader.next_batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))

    @torch.no_grad()
    def scores(*steps: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(policy(*map(torch.from_numpy, steps)))

    return scores, losses
