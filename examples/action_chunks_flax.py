"""Learn to say sixteen actions at a time, as ACT does, with Flax NNX: a script to copy and change.

    python examples/action_chunks_flax.py

A teacher reaches for targets with an arm. A small transformer sees the last two observations and predicts the next
sixteen actions (Zhao et al., 2023, without the style variable), then reaches by itself. ``windows=`` says which rows;
``examples/action_chunks_torch.py`` trains on the same batches with PyTorch. With ``--video FOLDER`` it
sees two frames of a camera instead, which lie in a video.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import reaching

try:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"action_chunks_flax.py needs {error.name}: pip install 'mouse-data[study]'") from error

from mouse_jax import PrefetchBatchifier, global_mean

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
WIDTH = 64

Batch = dict[str, jax.Array]


class Layer(nnx.Module):
    """Tokens [B, T, 64] that look at each other."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """What they become."""
        tokens = tokens + self.attention(self.first(tokens))
        return tokens + self.narrow(nnx.relu(self.wide(self.second(tokens))))


class ChunkPolicy(nnx.Module):
    """Observations [B, 2, 10], or frames [B, 2, 32 * 32 * 3] of bytes, to chunks of actions [B, 16, 2]."""

    def __init__(self, rngs: nnx.Rngs, size: int = reaching.OBSERVATION_SIZE) -> None:
        self.wide = nnx.Linear(size, 4 * WIDTH, rngs=rngs)
        self.seen = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        places = len(reaching.SEEN) + reaching.CHUNK
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (places, WIDTH)))
        self.one, self.two = Layer(rngs), Layer(rngs)
        self.said = nnx.Linear(WIDTH, reaching.ACTION_SIZE, rngs=rngs)

    def __call__(self, observation: jax.Array) -> jax.Array:
        """Predict the actions."""
        if observation.dtype == jnp.uint8:
            observation = observation.reshape(*observation.shape[:2], -1) / 255
        seen = self.seen(nnx.relu(self.wide(observation)))
        asked = jnp.zeros((len(seen), reaching.CHUNK, WIDTH))  # a token for each action, which has its place alone
        tokens = jnp.concatenate([seen, asked], axis=1) + self.places[...]
        return self.said(self.two(self.one(tokens))[:, -reaching.CHUNK :])


def chunk_loss(policy: ChunkPolicy, batch: Batch) -> jax.Array:
    """How far the predicted actions are from the teacher's, on average over those that there are."""
    # The alignment is settled by `windows=`: action k of the chunk was taken k steps after the anchor was seen.
    seen = "obs_image" if "obs_image" in batch else "obs_continuous"
    error = jnp.abs(policy(batch[seen]) - batch["action"])
    # Near the end of an episode a chunk has fewer actions. The mask is that of the actions, not of observations, which
    # repeat the first one at the beginning.
    return global_mean(error, batch["action_mask"])


@nnx.jit
def train_step(policy: ChunkPolicy, optimizer: nnx.Optimizer[Any], batch: Batch) -> jax.Array:
    """Take one step of gradient descent, in place, and return the loss."""
    loss, gradients = nnx.value_and_grad(chunk_loss)(policy, batch)
    optimizer.update(policy, gradients)
    return loss


def main() -> None:
    """Record, train, and reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--video", type=Path, help="a folder: film the teacher into it, and learn from two frames")
    chosen = parser.parse_args()
    if chosen.video is None:
        field, dtype, size = "obs_continuous", "float32", reaching.OBSERVATION_SIZE
        store, see = reaching.record(chosen.episodes, chosen.seed), reaching.Arms.observe
    else:
        field, dtype, size = "obs_image", "uint8", 3 * reaching.SIDE**2
        store, see = reaching.filmed(chosen.video, chosen.episodes, chosen.seed), reaching.Arms.film
    policy = ChunkPolicy(nnx.Rngs(chosen.seed), size)
    predict = nnx.jit(lambda policy, observation: policy(observation))

    def act(observation: reaching.Floats) -> reaching.Floats:
        return np.asarray(predict(policy, observation))

    print(f"reached untrained: {reaching.reached(act, see=see):.2f}")
    optimizer = nnx.Optimizer(
        policy, optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, chosen.steps)), wrt=nnx.Param
    )
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
            losses.append(train_step(policy, optimizer, loader.next_batch()))
        print(f"batches: {loader.digest}")
    print(f"final loss: {np.mean(losses[-50:]):.4f}")
    print(f"reached: {reaching.reached(act, see=see):.2f}")


if __name__ == "__main__":
    main()
