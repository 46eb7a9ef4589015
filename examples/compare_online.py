"""Online training with replay in PyTorch and in JAX: do both learn from the same experience, and for how long.

    python examples/compare_online.py
    python examples/compare_online.py --replay both

A training that acts chooses its own data: as soon as rounding lets one framework take another action, the two learn
from different experience, and no comparison of single runs means anything. So this study has two variants. In float64
rounding is small enough that both frameworks act alike to the end: their digests are equal over all batches, which
shows the two implementations to be one algorithm. In float32, which is what people train with, they part somewhere, and
only their evaluations can be compared, over seeds.

Eight environments write into a replay buffer, and a Q-network learns from what is drawn of it. The buffer's draws
depend on its seed and on what was written, in both frameworks alike, on the host and on the device: ``--replay``
chooses. An environment is not saved, so a run that is killed begins again. docs/guides/comparing-frameworks.md says
how to read what is found.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from itertools import count, groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import online_dqn
from numpy.typing import NDArray

try:
    import gymnasium as gym
    import jax
    import jax.numpy as jnp
    import optax
    import torch
    from flax import nnx
    from tensordict import TensorDict
except ImportError as error:
    raise SystemExit(f"compare_online.py needs {error.name}: pip install 'mouse-data[demo]'") from error

import mouse_jax.device
import mouse_torch.device
from mouse_core.replay import ArrayStorage, Compose, LinearSchedule, NextView, NStep
from mouse_study import Context, Results, Study, Training, pairs
from mouse_study.divergence import transfer

HIDDEN = 64
BATCH_SIZE = 64
BUFFER_SIZE = 50_000  # rows, of all environments together
LEARNING_STARTS = 500  # rows
LEARNING_RATE = 1e-3
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
DISCOUNT = 0.99
STEPS = 3  # of a transition
TARGET_RATE = 0.01  # by which the target network follows, each step
EXPLORATION = LinearSchedule(1.0, 0.05, 1_000)  # the share of random actions, by steps of all environments
EVALUATED_EPISODES = 20


class Learner(Protocol):
    """What acting and evaluating ask of a framework."""

    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The best actions [n] for observations [n, 4]."""
        ...


# ---------------------------------------------------------------------- PyTorch


class TorchNetwork(torch.nn.Module):
    """Observations [n, 4] to the value of each action, [n, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(online_dqn.OBSERVATION_SIZE, HIDDEN)
        self.second = torch.nn.Linear(HIDDEN, HIDDEN)
        self.value = torch.nn.Linear(HIDDEN, online_dqn.ACTIONS)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Values of the actions."""
        hidden = torch.relu(self.first(observations))
        return self.value(torch.relu(self.second(hidden)))


class TorchLearner:
    """The network and its update in PyTorch."""

    def __init__(self, weights: FlaxNetwork, dtype: torch.dtype) -> None:
        self.network = TorchNetwork().to(dtype)
        transfer(weights, self.network)
        self.target = copy.deepcopy(self.network)
        self.adam = torch.optim.Adam(
            self.network.parameters(), LEARNING_RATE, betas=(ADAM["b1"], ADAM["b2"]), eps=ADAM["eps"]
        )

    @torch.no_grad()
    def act(self, observations: NDArray[Any]) -> NDArray[Any]:
        """The best actions."""
        return self.network(torch.from_numpy(observations)).argmax(dim=-1).numpy()

    def update(self, batch: TensorDict) -> torch.Tensor:
        """Take a step of gradient descent on a batch; see ``JaxLearner``, line by line."""
        after = batch["next"]
        with torch.no_grad():
            best = self.network(after["observation"]).argmax(dim=-1, keepdim=True)
            value = self.target(after["observation"]).gather(1, best)[:, 0]
            goal = after["reward"] + batch["discount"] * (after["done"] != 1) * value
        chosen = self.network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
        loss = (batch["mask"] * (chosen - goal) ** 2).mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
                slow += TARGET_RATE * (fast - slow)
        return loss


# ---------------------------------------------------------------------- JAX


class FlaxNetwork(nnx.Module):
    """Observations [n, 4] to the value of each action, [n, 2]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(online_dqn.OBSERVATION_SIZE, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.value = nnx.Linear(HIDDEN, online_dqn.ACTIONS, rngs=rngs)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """Values of the actions."""
        hidden = nnx.relu(self.first(observations))
        return self.value(nnx.relu(self.second(hidden)))


@nnx.jit
def best_action(network: FlaxNetwork, observations: jax.Array) -> jax.Array:
    """The best actions."""
    return network(observations).argmax(axis=-1)


@nnx.jit
def jax_step(
    network: FlaxNetwork, target: FlaxNetwork, adam: nnx.Optimizer[Any], batch: Mapping[str, Any]
) -> jax.Array:
    """Take a step of gradient descent on a batch."""
    after = batch["next"]
    # The network chooses the next action, the target network values it (double Q-learning).
    best = network(after["observation"]).argmax(axis=-1)[:, None]
    value = jnp.take_along_axis(target(after["observation"]), best, axis=1)[:, 0]
    goal = after["reward"] + batch["discount"] * (after["done"] != 1) * value

    def loss_of(network: FlaxNetwork) -> jax.Array:
        chosen = jnp.take_along_axis(network(batch["observation"]), batch["action"][:, None], axis=1)[:, 0]
        # Rows that no whole transition leaves count for nothing.
        return (batch["mask"] * (chosen - goal) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(network)
    adam.update(network, gradients)
    fast, slow = nnx.state(network, nnx.Param), nnx.state(target, nnx.Param)
    nnx.update(target, jax.tree.map(lambda slow, fast: slow + TARGET_RATE * (fast - slow), slow, fast))
    return loss


class JaxLearner:
    """The network and its update in JAX."""

    def __init__(self, network: FlaxNetwork) -> None:
        self.network, self.target = network, nnx.clone(network)
        self.adam = nnx.Optimizer(network, optax.adam(LEARNING_RATE, **ADAM), wrt=nnx.Param)

    def act(self, observations: NDArray[Any]) -> NDArray[Any]:
        """The best actions."""
        return np.asarray(best_action(self.network, observations))

    def update(self, batch: Mapping[str, Any]) -> jax.Array:
        """Take a step of gradient descent on a batch."""
        return jax_step(self.network, self.target, self.adam, batch)


# ---------------------------------------------------------------------- replay, of which each run has one

Write = Callable[[Mapping[str, Any]], Any]
Draw = Callable[[], Any]


def replay_of(context: Context, dtype: Any) -> tuple[Write, Draw]:
    """How rows of a time step are written, and how a batch of transitions is drawn: the same one in all four."""
    shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "seed": context.seed}
    shared["transform"] = Compose(NextView(takes="arrived"), NStep(STEPS, DISCOUNT))
    if not context.framework.endswith("-device"):
        package: Any = mouse_torch if context.kind == "torch" else mouse_jax
        buffer = package.ReplayBuffer(storage=ArrayStorage(BUFFER_SIZE, ndim=2, alignment="arrived"), **shared)
        return buffer.append, buffer.sample

    # What a replay on a device holds is known before the first row.
    row = {"observation": np.zeros(4, dtype), "action": np.int64(0), "reward": dtype(0), "done": np.int8(0)}
    shared |= {"num_envs": online_dqn.ENVIRONMENTS, "alignment": "arrived"}
    if context.kind == "torch":
        module = mouse_torch.device.Replay(row, BUFFER_SIZE, **shared)
        return module.extend, module.sample

    # In JAX it is a value: who writes has another one, in the same memory.
    replay = mouse_jax.device.init(row, BUFFER_SIZE, **shared)
    add, sample = jax.jit(mouse_jax.device.add, donate_argnums=0), jax.jit(mouse_jax.device.sample)
    numbers = count()

    def write(rows: Mapping[str, Any]) -> None:
        nonlocal replay
        replay = add(replay, rows)

    return write, lambda: sample(replay, next(numbers))


# ---------------------------------------------------------------------- acting, which knows no framework


def acting(context: Context, learner: Learner, write: Write, draw: Draw, dtype: Any) -> Callable[[], Any]:
    """A function that takes a step in all environments, writes what it led to, and draws a batch of transitions."""
    random = np.random.default_rng(context.seed)
    environments = gym.make_vec(online_dqn.ENVIRONMENT, num_envs=online_dqn.ENVIRONMENTS, vectorization_mode="sync")
    shown, _ = environments.reset(seed=context.seed)
    nothing = np.zeros(online_dqn.ENVIRONMENTS)
    taken = 0

    def keep(actions: NDArray[Any], rewards: NDArray[Any], terminated: Any, truncated: Any) -> None:
        rows = online_dqn.rows_of(shown, actions, rewards, terminated, truncated)
        write(rows | {"observation": rows["observation"].astype(dtype), "reward": rows["reward"].astype(dtype)})

    def step() -> None:
        nonlocal shown, taken
        at_random = random.random(len(shown)) < EXPLORATION(taken)
        choices = random.integers(online_dqn.ACTIONS, size=len(shown))
        actions = np.where(at_random, choices, learner.act(shown.astype(dtype)))
        shown, rewards, terminated, truncated, _ = environments.step(actions)
        keep(actions, rewards, terminated, truncated)
        taken += 1

    # Nothing led to the first observations: their action is a placeholder.
    keep(nothing, nothing, nothing, nothing)

    def next_batch() -> Any:
        step()
        while (taken + 1) * online_dqn.ENVIRONMENTS < LEARNING_STARTS:
            step()
        return draw()

    return next_batch


def train(context: Context) -> Training:
    """Act and learn in the framework of this run; both begin with the weights that Flax makes of the seed."""
    wide = context.options["dtype"] == "float64"
    jax.config.update("jax_enable_x64", wide)
    dtype = np.float64 if wide else np.float32
    network = FlaxNetwork(nnx.Rngs(context.seed))
    # The same weights in both precisions.
    nnx.update(network, jax.tree.map(lambda weights: weights.astype(dtype), nnx.state(network)))
    learner: Any = JaxLearner(network)
    if context.kind == "torch":
        learner = TorchLearner(network, torch.float64 if wide else torch.float32)
    write, draw = replay_of(context, dtype)

    def evaluate() -> float:
        class Playing:
            def act(self, observations: NDArray[Any]) -> NDArray[Any]:
                return learner.act(observations.astype(dtype))

        return float(online_dqn.play(Playing(), episodes=EVALUATED_EPISODES, seed=online_dqn.PLAYING_SEED).mean())

    return Training(learner.update, batches=acting(context, learner, write, draw, dtype), evaluate=evaluate)


# ---------------------------------------------------------------------- the study


REPLAYS = {
    "host": ("torch", "jax"),
    "device": ("torch-device", "jax-device"),
    "both": ("torch", "jax", "torch-device", "jax-device"),
}
"""Which programs are compared, by where their replay lies."""


def declare(*, steps: int, seeds: int, replay: str = "host") -> Study:
    """The study: everything that is held fixed, and what is compared."""
    return Study(
        name="compare-online",
        frameworks=dict.fromkeys(REPLAYS[replay], train),
        variants={"float64": {"dtype": "float64"}, "float32": {"dtype": "float32"}},
        seeds=range(seeds),
        steps=steps,
        evaluate_every=max(1, steps // 10),
    )


def report(results: Results) -> None:
    """Print whether the runs of a seed had the same data and how long their losses agree, and what each run earned."""
    evaluations = results.series("evaluation")
    alike = groupby(pairs(results), lambda pair: (pair.left.variant, pair.left.seed))
    for (variant, seed), found in ((key, list(group)) for key, group in alike):
        proven = sum(pair.same_data.proven for pair in found)
        some = f", but for {proven} of {len(found)} pairs" if proven else ""
        print(f"same data, {variant}, seed {seed}: {'proven' if proven == len(found) else 'not proven' + some}")
        parted = [pair.parts(1e-3) for pair in found]
        fewest = min(len(pair.steps) if step is None else step for pair, step in zip(found, parted, strict=True))
        print(f"losses agree to 1e-03, {variant}, seed {seed}: for {fewest} steps")
        for run in results.runs:
            if (run.variant, run.seed) == (variant, seed):
                earned = " ".join(f"{value:.0f}" for value in evaluations[run.run][1])
                print(f"evaluations, {variant}, seed {seed}, {run.framework}: {earned}")


def main() -> None:
    """Train, compare, and print the figures."""
    parser = argparse.ArgumentParser(description="One DQN in PyTorch and in JAX, on the same draws of replay.")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each framework and precision")
    parser.add_argument("--steps", type=int, default=2000, help="steps of all environments, with a batch each")
    parser.add_argument(
        "--replay", choices=[*REPLAYS], default="host", help="where it lies; both compares four programs"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("out/compare_online"), help="folder of the study")
    options = parser.parse_args()

    study = declare(steps=options.steps, seeds=options.seeds, replay=options.replay)
    results = study.run(options.output, jobs=options.jobs)
    report(results)
    print(f"page: {results.page(options.output)}")


if __name__ == "__main__":
    main()
