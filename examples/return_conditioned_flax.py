"""The return-conditioned sequence model in Flax NNX; see `return_conditioned.py`."""

from __future__ import annotations

from typing import Any

import lunar_lander
import numpy as np
from numpy.typing import NDArray
from return_conditioned import BATCHES, RETURN_SCALE, SEQUENCE_LENGTH, Scores

try:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"return_conditioned_flax.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core.store import Store
from mouse_jax import PrefetchBatchifier

WIDTH, HEADS, LAYERS = 64, 4, 2
LEARNING_RATE = 1e-3


class Block(nnx.Module):
    """Attention to the steps before, and two layers for each step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array, causal: jax.Array) -> jax.Array:
        """Tokens [B, S, WIDTH] to tokens."""
        tokens = tokens + self.attention(self.first(tokens), mask=causal)
        return tokens + self.narrow(nnx.gelu(self.wide(self.second(tokens))))


class Policy(nnx.Module):
    """Returns [B, S], observations [B, S, 8] and previous actions [B, S] to scores of actions, [B, S, 4]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.step = nnx.Linear(1 + lunar_lander.OBSERVATION_SIZE + lunar_lander.ACTIONS, WIDTH, rngs=rngs)
        self.place = nnx.Embed(SEQUENCE_LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.scores = nnx.Linear(WIDTH, lunar_lander.ACTIONS, rngs=rngs)

    def __call__(self, returns: jax.Array, observation: jax.Array, previous: jax.Array) -> jax.Array:
        """Score the actions."""
        before = jax.nn.one_hot(previous, lunar_lander.ACTIONS)
        steps = jnp.concatenate([returns[..., None] / RETURN_SCALE, observation, before], axis=-1)
        length = steps.shape[1]
        tokens = self.step(steps.astype(jnp.float32)) + self.place(jnp.arange(length))
        causal = nnx.make_causal_mask(jnp.ones(returns.shape))
        for block in self.blocks:
            tokens = block(tokens, causal)
        return self.scores(self.norm(tokens))


def cloning_loss(policy: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """How badly the policy predicts the actions that leave the observations of a batch (cross-entropy)."""
    scores = policy(batch["returns_to_go"], batch["obs_continuous"], batch["previous_action"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["action"][..., 0])
    counts = batch["mask"] & batch["action_mask"][..., 0]
    return jnp.where(counts, losses, 0.0).sum() / counts.sum()


@nnx.jit
def train_step(policy: Policy, optimizer: nnx.Optimizer[Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Take one step of gradient descent, in place, and return the loss."""
    loss, gradients = nnx.value_and_grad(cloning_loss)(policy, batch)
    optimizer.update(policy, gradients)
    return loss


def train(store: Store, *, steps: int, seed: int) -> tuple[Scores, list[float]]:
    """Train a policy; how it scores actions, and the loss at each step."""
    policy = Policy(nnx.Rngs(seed))
    schedule = optax.cosine_onecycle_schedule(max(steps, 4), LEARNING_RATE)
    optimizer = nnx.Optimizer(policy, optax.adamw(schedule, weight_decay=1e-2), wrt=nnx.Param)
    losses = []
    with PrefetchBatchifier(store, seed=seed, **BATCHES) as loader:
        for _ in lunar_lander.progress(range(steps), description="training", total=steps):
            losses.append(float(train_step(policy, optimizer, loader.next_batch())))
    forward = nnx.jit(lambda policy, *steps: policy(*steps))

    def scores(*steps: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(forward(policy, *steps))

    return scores, losses
