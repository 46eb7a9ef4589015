"""Rollouts from a small transformer in Flax NNX, and GRPO on them; see `rollouts_from_a_model.py`.

python examples/rollouts_from_a_model_flax.py --steps 100
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rollouts_from_a_model import LENGTH, PROMPT_LENGTH, VOCABULARY, Floats, Tokens, main

try:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"rollouts_from_a_model_flax.py needs {error.name}: pip install 'mouse-data[study]'") from error

from mouse_core.groups import RLExample
from mouse_jax import global_mean
from mouse_jax.groups import pad

WIDTH, HEADS, CLIP, LEARNING_RATE = 32, 2, 0.2, 3e-3


class Transformer(nnx.Module):
    """One layer of attention and one of each token: tokens ``[B, L]`` to scores of the next, ``[B, L, tokens]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Embed(len(VOCABULARY), WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.scores = nnx.Linear(WIDTH, len(VOCABULARY), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Score the next tokens."""
        hidden = self.token(tokens) + self.place(jnp.arange(tokens.shape[1]))
        hidden = hidden + self.attention(hidden, mask=nnx.make_causal_mask(tokens))
        return self.scores(hidden + self.narrow(nnx.relu(self.wide(hidden))))


def logprobs_of(network: Transformer, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of tokens given those before them, ``[B, L]``; 0 of the first, which has none before it."""
    found = -optax.softmax_cross_entropy_with_integer_labels(network(tokens[:, :-1]), tokens[:, 1:])
    return jnp.pad(found, ((0, 0), (1, 0)))


@nnx.jit
def generate(network: Transformer, tokens: jax.Array, noise: jax.Array) -> jax.Array:
    """Tokens ``[B, LENGTH]`` whose first are prompts, continued."""

    def one(place: int, tokens: jax.Array) -> jax.Array:
        # Tokens that are not written yet are behind, where nothing looks.
        scores = jax.nn.log_softmax(network(tokens)[:, place - 1])
        return tokens.at[:, place].set((scores + noise[:, place - PROMPT_LENGTH]).argmax(1).astype(tokens.dtype))

    return jax.lax.fori_loop(PROMPT_LENGTH, LENGTH, one, tokens)


@nnx.jit
def train_step(network: Transformer, optimizer: nnx.Optimizer[Any], batch: dict[str, jax.Array]) -> jax.Array:
    """One step of the clipped objective of GRPO (Shao et al., 2024); the divergence is in the rewards."""

    def loss_of(network: Transformer) -> jax.Array:
        ratio = jnp.exp(logprobs_of(network, batch["tokens"]) - batch["generator_log_probs"])
        advantage = batch["advantage"]
        objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return global_mean(-objective, batch["loss_mask"])

    loss, gradients = nnx.value_and_grad(loss_of)(network)
    optimizer.update(network, gradients)
    return loss


class Model:
    """The transformer that is trained, and the reference that it was."""

    def __init__(self, seed: int) -> None:
        self.network, self.reference = Transformer(nnx.Rngs(seed)), Transformer(nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.network, optax.adam(LEARNING_RATE), wrt=nnx.Param)
        self.scored = nnx.jit(logprobs_of)

    def generate(self, prompts: Tokens, noise: Floats) -> Tokens:
        """Continue prompts; see ``rollouts_from_a_model.Model``."""
        tokens = np.zeros((len(prompts), LENGTH), np.int32)
        tokens[:, :PROMPT_LENGTH] = prompts
        return np.asarray(generate(self.network, tokens, noise))

    def logprobs(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Log-probabilities now and in the beginning."""
        return np.asarray(self.scored(self.network, tokens)), np.asarray(self.scored(self.reference, tokens))

    def step(self, examples: Sequence[RLExample]) -> float:
        """One step on a batch."""
        return float(train_step(self.network, self.optimizer, pad(examples, LENGTH)))


if __name__ == "__main__":
    main(Model)
