"""Train a policy on recorded experience with Flax NNX and optax: a script to copy and change.

    python examples/flax_offline.py
    python examples/flax_offline.py --dataset path/to/dataset

Without a dataset it records one first: LunarLander, flown by gymnasium's own pilot, who acts at random now and
then. The policy learns to predict the pilot's actions (behaviour cloning) from batches that arrive as JAX
arrays on the device, and then flies. The policy and its place in the stream of batches are saved in one orbax
checkpoint; started again with the same output folder, the script goes on from there.
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
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"flax_offline.py needs {error.name}: pip install 'mouse-data[demo]' orbax-checkpoint") from error

from mouse_core import DatasetStore
from mouse_jax import PrefetchBatchifier

SEQUENCE_LENGTH = 64  # S: steps in a window
BATCH_SIZE = 32  # B: windows in a batch
LEARNING_RATE = 3e-3
HIDDEN = 64
SAVED_EVERY = 500  # training steps
PLAYED_EPISODES = 20
PLAYING_SEED = 1_000_000  # far from the seeds of the recording: the policy is judged on terrain it never saw

Batch = dict[str, jax.Array]


class Policy(nnx.Module):
    """Observations [..., 8] to one score for each action, [..., 4]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(lunar_lander.OBSERVATION_SIZE, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.third = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.scores = nnx.Linear(HIDDEN, lunar_lander.ACTIONS, rngs=rngs)

    def __call__(self, observation: jax.Array) -> jax.Array:
        """Score the actions."""
        hidden = nnx.silu(self.first(observation))
        hidden = nnx.silu(self.second(hidden))
        return self.scores(nnx.silu(self.third(hidden)))


def cloning_loss(policy: Policy, batch: Batch) -> jax.Array:
    """How badly the policy predicts the recorded actions of a batch [B, S] (cross-entropy)."""
    # The alignment. Row t holds the observation at t and the action that *led to* it. The action that the pilot
    # chose when it saw observation t therefore stands in row t+1.
    scores = policy(batch["obs_continuous"][:, :-1])  # [B, S-1, 4]
    action = batch["action"][:, 1:]  # [B, S-1]
    # Windows run on across the ends of episodes. Where row t+1 is the first of an episode (time 0), its action is
    # a placeholder that no observation led to. Under `jit` shapes are fixed, so such pairs get the weight 0.
    counts = batch["time"][:, 1:] != 0  # [B, S-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, action)
    return jnp.where(counts, losses, 0.0).sum() / counts.sum()


@nnx.jit
def train_step(policy: Policy, optimizer: nnx.Optimizer[Any], batch: Batch) -> jax.Array:
    """Take one step of gradient descent, in place, and return the loss."""
    loss, gradients = nnx.value_and_grad(cloning_loss)(policy, batch)
    optimizer.update(policy, gradients)
    return loss


def open_dataset(path: Path) -> DatasetStore:
    """Open a dataset that was saved to disk, whatever its size: it is referred to, not loaded."""
    opened = datasets.load_from_disk(path)
    store = DatasetStore()
    store.from_dataset(opened)
    return store


class Checkpoints:
    """Saves and restores a training: its networks, and its place in the stream of batches."""

    def __init__(self, folder: Path, policy: Policy, optimizer: nnx.Optimizer[Any], loader: PrefetchBatchifier) -> None:
        self.manager = ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
        self.parts = (policy, optimizer)
        self.loader = loader

    def save(self, step: int) -> None:
        """Save what there is after so many steps; the writing goes on in the background."""
        model = ocp.args.StandardSave(nnx.state(self.parts))
        # Plain numbers: a JSON file, which does not depend on how many processes or devices there are.
        batches = ocp.args.JsonSave(self.loader.state_dict())
        self.manager.save(step, args=ocp.args.Composite(model=model, batches=batches))

    def restore(self) -> int:
        """Go on from the last checkpoint, if there is one; return the number of steps taken until then."""
        step = self.manager.latest_step()
        if step is None:
            return 0
        model = ocp.args.StandardRestore(nnx.state(self.parts))
        wanted = ocp.args.Composite(model=model, batches=ocp.args.JsonRestore())
        restored = self.manager.restore(step, args=wanted)
        nnx.update(self.parts, restored.model)
        self.loader.load_state_dict(restored.batches)
        return step


def train(policy: Policy, store: DatasetStore, folder: Path, *, steps: int, seed: int) -> dict[str, str]:
    """Train the policy in place, from the last checkpoint on if there is one; return the figures to print."""
    schedule = optax.cosine_onecycle_schedule(max(steps, 4), LEARNING_RATE)
    optimizer = nnx.Optimizer(policy, optax.adam(schedule), wrt=nnx.Param)
    losses: list[jax.Array] = []
    waiting = 0.0
    with PrefetchBatchifier(
        store,
        sequence_length=SEQUENCE_LENGTH,
        batch_size=BATCH_SIZE,
        seed=seed,
        fields=("obs_continuous", "action", "time"),  # only these are read; one that is missing is an error
    ) as loader:  # on several devices: sharding=NamedSharding(mesh, P("data"))
        checkpoints = Checkpoints(folder, policy, optimizer, loader)
        rest = range(checkpoints.restore(), steps)
        start = time.perf_counter()
        for step in lunar_lander.progress(rest, description="training", total=len(rest)):
            asked = time.perf_counter()
            batch = loader.next_batch()
            waiting += time.perf_counter() - asked

            losses.append(train_step(policy, optimizer, batch))
            if len(losses) == 1:
                losses[0].block_until_ready()  # compiled; what follows is measured
                start, waiting = time.perf_counter(), 0.0
            else:
                # JAX computes in its own time. Waiting for the loss before the last keeps it at work, and keeps
                # the batches that it has not yet read from piling up.
                losses[-2].block_until_ready()
            if (step + 1) % SAVED_EVERY == 0 or step + 1 == steps:
                checkpoints.save(step + 1)
        jax.block_until_ready(losses)
        elapsed = time.perf_counter() - start
        checkpoints.manager.close()
    figures = {"training steps": f"{len(losses)}"}
    if len(losses) > 1:
        figures["final loss"] = f"{np.mean(losses[-100:]):.3f}"
        figures["batches per second"] = f"{(len(losses) - 1) / elapsed:.0f}"
        figures["waiting for data"] = f"{100.0 * waiting / elapsed:.1f} %"
    return figures


def play(policy: Policy) -> NDArray[np.float64]:
    """Let the policy fly, always taking its most probable action, and return what each episode earned."""
    best = nnx.jit(lambda policy, observation: policy(observation).argmax(axis=-1))

    def act(observations: NDArray[np.float32]) -> NDArray[Any]:
        return np.asarray(best(policy, observations))

    return lunar_lander.play(act, episodes=PLAYED_EPISODES, seed=PLAYING_SEED)


def main() -> None:
    """Record or open, train, play, and print the figures."""
    parser = argparse.ArgumentParser(description="Train a policy on recorded experience with Flax NNX.")
    parser.add_argument("--dataset", type=Path, help="folder of a dataset saved to disk; by default one is recorded")
    parser.add_argument("--episodes", type=int, default=150, help="episodes to record")
    parser.add_argument("--steps", type=int, default=2000, help="training steps, one batch each")
    parser.add_argument("--seed", type=int, default=0, help="of the recording, the policy and the batches")
    parser.add_argument("--output", type=Path, default=Path("out/flax_offline"), help="folder for the checkpoint")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    if options.dataset is None:
        store = lunar_lander.record(episodes=options.episodes, seed=options.seed)
    else:
        store = open_dataset(options.dataset)
    print(f"steps recorded: {len(store)}")

    policy = Policy(nnx.Rngs(options.seed))
    print(f"return untrained: {play(policy).mean():.1f}")
    checkpoint = options.output / "checkpoint"
    figures = train(policy, store, checkpoint, steps=options.steps, seed=options.seed)
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(f"return trained: {play(policy).mean():.1f}")
    print(f"checkpoint: {checkpoint}")


if __name__ == "__main__":
    main()
