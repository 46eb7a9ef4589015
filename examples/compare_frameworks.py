"""The same study in PyTorch and in JAX: one network, one optimiser, one stream of batches.

    python examples/compare_frameworks.py

Whoever compares frameworks wants to compare frameworks, not data loaders. Here a recurrent Q-network is
written twice, in PyTorch and in Flax NNX. Both begin with the same weights, which are copied across; both
take the same steps of Adam; and both are given the same batches, which one digest for both streams proves. What
is left is arithmetic: the loss curves agree to rounding for hundreds of steps, then part, and the plot shows
when. docs/guides/comparing-frameworks.md shows the picture and says why.

The network reads windows of the recording as they are (an observation, and the action, reward and end that led
to it), remembers with a GRU, and learns by Q-learning with a target network; a conservative term (Kumar et
al., "Conservative Q-Learning for Offline Reinforcement Learning", 2020) keeps the values of actions that
nobody recorded from running away.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import gymnasium as gym
import jax
import jax.numpy as jnp
import lunar_lander
import matplotlib
import numpy as np
import optax
import torch
from flax import nnx
from numpy.typing import NDArray
from tensordict import TensorDict

import mouse_jax
import mouse_torch
from mouse_core import DatasetStore
from mouse_core.testing import stream_digest

HIDDEN = 64
ROW = lunar_lander.OBSERVATION_SIZE + lunar_lander.ACTIONS + 2  # observation, action that led to it, reward, end
LEARNING_RATE = 3e-3
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
DISCOUNT = 0.99
REWARD_SCALE = 0.1
CONSERVATIVE = 0.5
TARGET_RATE = 0.01  # by which the target network follows, each step

#: What both loaders are asked for. float32 is what the networks compute in.
BATCHES: dict[str, Any] = {
    "sequence_length": 32,
    "batch_size": 16,
    "fields": ("action", "reward", "done", "time", "obs_continuous"),
    "dtypes": {"obs_continuous": "float32"},
}


# ---------------------------------------------------------------------- the data


def record(*, episodes: int, seed: int) -> DatasetStore:
    """Record episodes of gymnasium's own pilot, who acts at random now and then."""
    store = DatasetStore()
    environment = gym.make(lunar_lander.ENVIRONMENT)
    for episode in lunar_lander.progress(range(episodes), description="recording", total=episodes):
        noise = lunar_lander.NOISE_LEVELS[episode % len(lunar_lander.NOISE_LEVELS)]
        for row in lunar_lander.record_episode(environment, noise=noise, seed=seed * episodes + episode):
            store.append(row)
    environment.close()
    return store


def stream_digests(store: DatasetStore, *, batches: int, **options: Any) -> dict[str, str]:
    """The digest of the first batches that each framework is given.

    Args:
        store: where batches come from.
        batches: how many.
        options: arguments of both loaders.

    Returns:
        32 hexadecimal digits for "PyTorch" and for "JAX": the same, if the batches are.
    """
    digests = {}
    for framework, package in {"PyTorch": mouse_torch, "JAX": mouse_jax}.items():
        with package.PrefetchBatchifier(store, **options) as loader:
            digests[framework] = stream_digest(loader, batches)
    return digests


# ---------------------------------------------------------------------- PyTorch


class TorchQNetwork(torch.nn.Module):
    """Rows [B, S, ROW] to the value of each action that could leave them, [B, S, ACTIONS]."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(ROW, HIDDEN)
        self.memory = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.value = torch.nn.Linear(HIDDEN, lunar_lander.ACTIONS)
        # Flax's cell has one bias where PyTorch's has two that are added: this one stays zero.
        self.memory.bias_hh_l0.requires_grad_(False).zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Read windows from their beginning on."""
        remembered, _ = self.memory(torch.nn.functional.silu(self.encode(rows)))
        return self.value(remembered)


def torch_loss(network: torch.nn.Module, target: torch.nn.Module, batch: TensorDict) -> torch.Tensor:
    """The loss of a batch [B, S]; see ``jax_loss``, line by line."""
    action = torch.nn.functional.one_hot(batch["action"], lunar_lander.ACTIONS).float()
    reward = REWARD_SCALE * batch["reward"]
    ended = (batch["done"] > 0).float()
    rows = torch.cat([batch["obs_continuous"], action, reward[..., None], ended[..., None]], dim=-1)

    values = network(rows)[:, :-1]
    with torch.no_grad():
        best = target(rows)[:, 1:].amax(dim=-1)
    alive = (batch["done"][:, 1:] != 1).float()
    goal = reward[:, 1:] + DISCOUNT * alive * best
    chosen = (values * action[:, 1:]).sum(dim=-1)
    error = (chosen - goal) ** 2 + CONSERVATIVE * (torch.logsumexp(values, dim=-1) - chosen)
    counts = (batch["time"][:, 1:] != 0).float()
    return (error * counts).sum() / counts.sum()


# ---------------------------------------------------------------------- JAX


class FlaxQNetwork(nnx.Module):
    """Rows [B, S, ROW] to the value of each action that could leave them, [B, S, ACTIONS]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encode = nnx.Linear(ROW, HIDDEN, rngs=rngs)
        self.memory = nnx.RNN(nnx.GRUCell(HIDDEN, HIDDEN, rngs=rngs))
        self.value = nnx.Linear(HIDDEN, lunar_lander.ACTIONS, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Read windows from their beginning on."""
        return self.value(self.memory(nnx.silu(self.encode(rows))))


def jax_loss(network: nnx.Module, target: nnx.Module, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The loss of a batch [B, S] of the recording."""
    action = jax.nn.one_hot(batch["action"], lunar_lander.ACTIONS)
    reward = REWARD_SCALE * batch["reward"]
    ended = (batch["done"] > 0).astype(jnp.float32)
    rows = jnp.concatenate([batch["obs_continuous"], action, reward[..., None], ended[..., None]], axis=-1)

    # The alignment. Row t holds the observation at t and the action, reward and end that *led to* it. The
    # action that leaves observation t, and what it earned, therefore stand in row t+1.
    values = network(rows)[:, :-1]
    best = jax.lax.stop_gradient(target(rows)[:, 1:].max(axis=-1))
    # Only a terminal end (1) is worth nothing more. A truncated one (2) would have gone on.
    alive = (batch["done"][:, 1:] != 1).astype(jnp.float32)
    goal = reward[:, 1:] + DISCOUNT * alive * best
    chosen = (values * action[:, 1:]).sum(axis=-1)
    error = (chosen - goal) ** 2 + CONSERVATIVE * (jax.nn.logsumexp(values, axis=-1) - chosen)
    # Where row t+1 is the first of an episode, no action leads from row t to it.
    counts = (batch["time"][:, 1:] != 0).astype(jnp.float32)
    return (error * counts).sum() / counts.sum()


def copy_weights(source: FlaxQNetwork, destination: TorchQNetwork) -> None:
    """Give the PyTorch network the weights of the Flax network."""
    weights = {
        "encode.weight": source.encode.kernel[...].T,
        "encode.bias": source.encode.bias[...],
        "memory.weight_ih_l0": source.memory.cell.dense_i.kernel[...].T,
        "memory.bias_ih_l0": source.memory.cell.dense_i.bias[...],
        "memory.weight_hh_l0": source.memory.cell.dense_h.kernel[...].T,
        "memory.bias_hh_l0": jnp.zeros(3 * HIDDEN),
        "value.weight": source.value.kernel[...].T,
        "value.bias": source.value.bias[...],
    }
    destination.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in weights.items()})


# ---------------------------------------------------------------------- training


@dataclass
class Run:
    """What one framework's training gave: losses, and where the time went."""

    losses: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    waiting: float = 0.0

    def figures(self) -> dict[str, str]:
        """The figures to print, by name."""
        # The first step compiles, or warms up, and is left out.
        return {
            "steps per second": f"{(len(self.losses) - 1) / self.elapsed:.0f}",
            "waiting for data": f"{100.0 * self.waiting / self.elapsed:.1f} %",
            "final loss": f"{np.mean(self.losses[-50:]):.4f}",
        }


def run(loader: Any, step: Callable[[Any], float], *, steps: int, description: str) -> Run:
    """Take training steps, one a batch."""
    result = Run([step(loader.next_batch())])
    began = time.perf_counter()
    for _ in lunar_lander.progress(range(steps - 1), description=description, total=steps - 1):
        asked = time.perf_counter()
        batch = loader.next_batch()
        result.waiting += time.perf_counter() - asked
        result.losses.append(step(batch))
    result.elapsed = time.perf_counter() - began
    return result


def train_torch(network: TorchQNetwork, store: DatasetStore, *, steps: int, seed: int) -> Run:
    """Train the network in place."""
    target = copy.deepcopy(network)
    trained = [weights for weights in network.parameters() if weights.requires_grad]
    adam = torch.optim.Adam(trained, LEARNING_RATE, betas=(ADAM["b1"], ADAM["b2"]), eps=ADAM["eps"])

    def step(batch: TensorDict) -> float:
        loss = torch_loss(network, target, batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow += TARGET_RATE * (fast - slow)
        return loss.item()

    with mouse_torch.PrefetchBatchifier(store, seed=seed, **BATCHES) as loader:
        return run(loader, step, steps=steps, description="PyTorch")


def train_jax(network: FlaxQNetwork, store: DatasetStore, *, steps: int, seed: int) -> Run:
    """Train the network in place."""
    target = nnx.clone(network)
    adam = nnx.Optimizer(network, optax.adam(LEARNING_RATE, **ADAM), wrt=nnx.Param)

    @nnx.jit
    def compiled(
        network: FlaxQNetwork, target: FlaxQNetwork, adam: nnx.Optimizer[Any], batch: dict[str, jax.Array]
    ) -> jax.Array:
        loss, gradients = nnx.value_and_grad(jax_loss)(network, target, batch)
        adam.update(network, gradients)
        fast, slow = nnx.state(network, nnx.Param), nnx.state(target, nnx.Param)
        nnx.update(target, jax.tree.map(lambda slow, fast: slow + TARGET_RATE * (fast - slow), slow, fast))
        return loss

    def step(batch: dict[str, jax.Array]) -> float:
        return float(compiled(network, target, adam, batch))

    with mouse_jax.PrefetchBatchifier(store, seed=seed, **BATCHES) as loader:
        return run(loader, step, steps=steps, description="JAX")


# ---------------------------------------------------------------------- the comparison


def relative_difference(left: list[float], right: list[float]) -> NDArray[np.float64]:
    """How far two loss curves are apart at each step, by the larger of the two losses."""
    a, b = np.array(left), np.array(right)
    return np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))


def parting(difference: NDArray[np.float64], tolerance: float) -> int:
    """The first step at which two curves differ by more than the tolerance; their length if there is none."""
    beyond = np.flatnonzero(difference > tolerance)
    return int(beyond[0]) if len(beyond) else len(difference)


def save_plot(path: Path, runs: Mapping[str, Run], difference: NDArray[np.float64]) -> None:
    """Draw both loss curves above their difference and save the picture."""
    matplotlib.use("Agg")  # draws into files, and needs no screen
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    above.set(title="One recurrent Q-network, one stream of batches", ylabel="loss")
    for (name, result), (style, width) in zip(runs.items(), (("-", 3.0), ("-", 1.0)), strict=True):
        losses = np.array(result.losses)
        over = max(1, len(losses) // 100)  # a running mean shows the trend under the noise of single batches
        smooth = np.convolve(losses, np.ones(over) / over, mode="valid")
        above.plot(np.arange(len(smooth)) + over // 2, smooth, style, label=name, linewidth=width)
    above.legend()
    below.set(xlabel="training step", ylabel="relative difference", yscale="log")
    there = difference > 0.0  # losses that are equal to the last bit have no place on this scale
    below.plot(np.flatnonzero(there), difference[there], ".", markersize=2, color="C2")
    epsilon = float(np.finfo(np.float32).eps)
    below.axhline(epsilon, color="grey", linewidth=0.8)
    below.annotate(
        "rounding of float32", (1.0, epsilon), (-4, -12), ("axes fraction", "data"), "offset points", ha="right"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Record, train twice, compare, and print the figures."""
    parser = argparse.ArgumentParser(description="One study in PyTorch and in JAX, on the same batches.")
    parser.add_argument("--seed", type=int, default=0, help="of the recording, the weights and the batches")
    parser.add_argument("--episodes", type=int, default=60, help="episodes to record")
    parser.add_argument("--dataset", type=Path, help="a saved dataset to train on, instead of recording")
    parser.add_argument("--steps", type=int, default=2000, help="training steps, one batch each")
    parser.add_argument("--output", type=Path, default=Path("out/compare_frameworks"), help="folder for the plot")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small gains nothing from more

    if options.dataset is None:
        store = record(episodes=options.episodes, seed=options.seed)
    else:
        store = DatasetStore().from_dataset(datasets.load_from_disk(str(options.dataset)))
    print(f"steps recorded: {len(store)}")

    digests = stream_digests(store, batches=options.steps, seed=options.seed, **BATCHES)
    for framework, digest in digests.items():
        print(f"digest {framework}: {digest}")
    print(f"digests agree: {'yes' if len(set(digests.values())) == 1 else 'no'}")

    flax_network, torch_network = FlaxQNetwork(nnx.Rngs(options.seed)), TorchQNetwork()
    copy_weights(flax_network, torch_network)
    runs = {
        "PyTorch": train_torch(torch_network, store, steps=options.steps, seed=options.seed),
        "JAX": train_jax(flax_network, store, steps=options.steps, seed=options.seed),
    }
    for framework, result in runs.items():
        for name, value in result.figures().items():
            print(f"{name}, {framework}: {value}")

    difference = relative_difference(runs["PyTorch"].losses, runs["JAX"].losses)
    print(f"difference of the first loss: {difference[0]:.1e}")
    print(f"largest difference of the first 100 losses: {difference[:100].max():.1e}")
    for tolerance in (1e-5, 1e-4, 1e-3, 1e-2):
        print(f"losses agree to {tolerance:.0e}: for {parting(difference, tolerance)} steps")

    plot = options.output / "compare_frameworks.png"
    save_plot(plot, runs, difference)
    print(f"plot: {plot}")


if __name__ == "__main__":
    main()
