"""The same study in PyTorch and in JAX: one network, one optimiser, one stream of batches.

    python examples/compare_frameworks.py

Whoever compares frameworks wants to compare frameworks, not data loaders. Here a recurrent Q-network is
written twice, in PyTorch and in Flax NNX. Both begin with the same weights, which are copied across; both
take the same steps of Adam; and both are given the same batches, which their digests prove. What
is left is arithmetic: the loss curves agree to rounding for hundreds of steps, then part, and the page shows
when. docs/guides/comparing-frameworks.md says why.

The networks, losses and optimisers are this file's; ``mouse_study.Study`` runs and times them, each in a process of
its own, and records what they were given. The study itself is the ten lines of ``declare``.

The network reads windows of the recording as they are (an observation, and the action, reward and end that led
to it), remembers with a GRU, and learns by Q-learning with a target network; a conservative term (Kumar et
al., "Conservative Q-Learning for Offline Reinforcement Learning", 2020) keeps the values of actions that
nobody recorded from running away.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lunar_lander
import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    import torch
    from flax import nnx
    from tensordict import TensorDict
except ImportError as error:
    raise SystemExit(f"compare_frameworks.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core import formats
from mouse_study import Context, Results, Study, Training, pairs
from mouse_study.divergence import transfer

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


# ---------------------------------------------------------------------- training


def train_torch(context: Context) -> Training:
    """Train the network in PyTorch, beginning with the weights that Flax makes of the seed."""
    network = TorchQNetwork()
    transfer(FlaxQNetwork(nnx.Rngs(context.seed)), network)
    target = copy.deepcopy(network)
    trained = [weights for weights in network.parameters() if weights.requires_grad]
    adam = torch.optim.Adam(trained, LEARNING_RATE, betas=(ADAM["b1"], ADAM["b2"]), eps=ADAM["eps"])

    def step(batch: TensorDict) -> torch.Tensor:
        loss = torch_loss(network, target, batch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow += TARGET_RATE * (fast - slow)
        return loss

    return Training(step, state=[network, target, adam])


def train_jax(context: Context) -> Training:
    """Train the network in JAX."""
    network = FlaxQNetwork(nnx.Rngs(context.seed))
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

    return Training(lambda batch: compiled(network, target, adam, batch), state=[network, target, adam])


# ---------------------------------------------------------------------- the study


def declare(*, data: Path, steps: int, seeds: list[int]) -> Study:
    """The study: everything that is held fixed, and the two that are compared."""
    return Study(
        name="compare-frameworks",
        frameworks={"torch": train_torch, "jax": train_jax},
        seeds=seeds,
        steps=steps,
        store=data,
        batches=BATCHES,
        checkpoint_every=500,
    )


def report(results: Results) -> None:
    """Print what was found, of the first seed."""
    waits, computes, losses = (results.series(name) for name in ("wait", "compute", "loss"))
    pair = pairs(results)[0]
    for run in (pair.right, pair.left):
        print(f"digest {run.framework}: {run.digest}")
    print(f"same data: {'proven' if pair.same_data.proven else 'not proven'}")
    for run in (pair.right, pair.left):
        wait, compute = waits[run.run][1][1:].sum(), computes[run.run][1][1:].sum()  # the first step compiles
        print(f"steps per second, {run.framework}: {(run.steps - 1) / (wait + compute):.0f}")
        print(f"waiting for data, {run.framework}: {100.0 * wait / (wait + compute):.1f} %")
        print(f"final loss, {run.framework}: {np.mean(losses[run.run][1][-50:]):.4f}")
    print(f"difference of the first loss: {pair.difference[0]:.1e}")
    print(f"largest difference of the first 100 losses: {pair.difference[:100].max():.1e}")
    for tolerance in (1e-5, 1e-4, 1e-3, 1e-2):
        parts = pair.parts(tolerance)
        print(f"losses agree to {tolerance:.0e}: for {len(pair.steps) if parts is None else parts} steps")


def main() -> None:
    """Record, train twice, compare, and print the figures."""
    parser = argparse.ArgumentParser(description="One study in PyTorch and in JAX, on the same batches.")
    parser.add_argument("--seed", type=int, default=0, help="of the recording, and the first of the runs")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each framework")
    parser.add_argument("--episodes", type=int, default=60, help="episodes to record")
    parser.add_argument("--dataset", type=Path, help="a saved dataset to train on, instead of recording")
    parser.add_argument("--steps", type=int, default=2000, help="training steps, one batch each")
    parser.add_argument("--output", type=Path, default=Path("out/compare_frameworks"), help="folder of the study")
    options = parser.parse_args()

    data = options.dataset or options.output / f"recorded-{options.episodes}-{options.seed}"
    if options.dataset is None and not data.exists():
        lunar_lander.record(episodes=options.episodes, seed=options.seed).to_dataset().save_to_disk(data)
    seeds = list(range(options.seed, options.seed + options.seeds))
    recorded = formats.open(data).to_store().snapshot()
    print(f"steps recorded: {len(recorded)}")
    # A folder holds one study: with other data or steps it is another one.
    folder = options.output / f"{recorded.fingerprint[:8]}-{options.steps}"
    results = declare(data=data, steps=options.steps, seeds=seeds).run(folder)
    report(results)
    print(f"page: {results.page(folder)}")


if __name__ == "__main__":
    main()
