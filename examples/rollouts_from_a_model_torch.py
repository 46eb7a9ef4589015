"""Rollouts from a small transformer in torch, and GRPO on them; see `rollouts_from_a_model.py`.

python examples/rollouts_from_a_model_torch.py --steps 100
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from rollouts_from_a_model import LENGTH, PROMPT_LENGTH, VOCABULARY, Floats, Tokens, main

try:
    import torch
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention
except ImportError as error:
    raise SystemExit(f"rollouts_from_a_model_torch.py needs {error.name}: pip install 'mouse-data[torch]'") from error

from mouse_core.groups import RLExample
from mouse_torch import global_mean
from mouse_torch.groups import pad

WIDTH, HEADS, CLIP, LEARNING_RATE = 32, 2, 0.2, 3e-3


class Transformer(torch.nn.Module):
    """One layer of attention and one of each token: tokens ``[B, L]`` to scores of the next, ``[B, L, tokens]``."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(len(VOCABULARY), WIDTH)
        self.place = torch.nn.Embedding(LENGTH, WIDTH)
        self.attended, self.mixed = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.scores = torch.nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next tokens."""
        count, length = tokens.shape
        hidden = self.token(tokens) + self.place(torch.arange(length))
        parts = self.attended(hidden).view(count, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(count, length, WIDTH)
        hidden = hidden + self.mixed(mixed)
        return self.scores(hidden + self.narrow(torch.relu(self.wide(hidden))))


def logprobs_of(network: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens given those before them, ``[B, L]``; 0 of the first, which has none before it."""
    scores = network(tokens[:, :-1])
    found = -cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
    return torch.nn.functional.pad(found, (1, 0))


class Model:
    """The transformer that is trained, and the reference that it was."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = Transformer()
        self.reference = deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)

    @torch.no_grad()
    def generate(self, prompts: Tokens, noise: Floats) -> Tokens:
        """Continue prompts; see ``rollouts_from_a_model.Model``."""
        tokens, drawn = torch.from_numpy(prompts).long(), torch.from_numpy(noise)
        for place in range(LENGTH - PROMPT_LENGTH):
            scores = self.network(tokens)[:, -1].log_softmax(-1)
            tokens = torch.cat([tokens, (scores + drawn[:, place]).argmax(1, keepdim=True)], dim=1)
        return tokens.int().numpy()

    @torch.no_grad()
    def logprobs(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Log-probabilities now and in the beginning."""
        given = torch.from_numpy(tokens).long()
        return logprobs_of(self.network, given).numpy(), logprobs_of(self.reference, given).numpy()

    def step(self, examples: Sequence[RLExample]) -> float:
        """One step of the clipped objective of GRPO (Shao et al., 2024); the divergence is in the rewards."""
        batch = pad(examples, LENGTH)
        ratio = torch.exp(logprobs_of(self.network, batch["tokens"].long()) - batch["generator_log_probs"])
        advantage = batch["advantage"]
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = global_mean(-objective, batch["loss_mask"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Model)
