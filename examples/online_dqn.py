"""Learn to balance a pole while acting: a DQN with prioritised n-step replay, in PyTorch or in JAX.

    python examples/online_dqn.py --framework torch
    python examples/online_dqn.py --framework jax

Eight environments write into one replay buffer, and a Q-network learns from what is drawn from it. The buffer is the
same for both frameworks, and so are its draws; only the network and its update are written twice. Training ends when
the greedy policy earns 475 of the 500 points of an episode on average, which counts as solved.

Observations are stored once: a row holds the observation at t and what led to it ("arrived"), and the reset of an
environment is a row, too. ``NextView`` makes transitions of these rows when they are read, and ``NStep`` makes of these
others of three steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import lunar_lander
import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium as gym
except ImportError as error:
    raise SystemExit(f"online_dqn.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core.replay import ArrayStorage, Compose, LinearSchedule, NextView, NStep, PrioritizedSampler

ENVIRONMENT = "CartPole-v1"
OBSERVATION_SIZE, ACTIONS = 4, 2
GOOD_ENOUGH = 495.0  # in an evaluation; then 475, which counts as solved, are earned in other episodes, too

ENVIRONMENTS = 8
DISCOUNT = 0.99
STEPS = 3  # of a transition
BUFFER_SIZE = 50_000  # rows, of all environments together
BATCH_SIZE = 128
UPDATES = 2  # after each step of all environments
LEARNING_STARTS = 1_000  # rows
TARGET_EVERY = 100  # updates
LEARNING_RATE = 1e-3
HIDDEN = 128
EXPLORATION = LinearSchedule(1.0, 0.04, 1_000)  # the share of random actions, by steps of all environments
EVALUATED_EVERY = 250  # steps of all environments
EVALUATED_EPISODES = 50
PLAYED_EPISODES = 100
PLAYING_SEED = 1_000_000  # far from the seeds of training

Floats = NDArray[np.floating[Any]]


class Learner(Protocol):
    """What the loop asks of a framework."""

    def make_buffer(self, **options: Any) -> Any:
        """A replay buffer that gives what ``update`` takes."""
        ...

    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The best actions [n] for observations [n, 4]."""
        ...

    def update(self, batch: Any) -> Floats:
        """Take a step of gradient descent on a batch [b]; return how wrong the network was about each transition."""
        ...

    def copy_target(self) -> None:
        """Let the target network be what the network is."""
        ...


# ---------------------------------------------------------------------- PyTorch


def torch_learner(seed: int) -> Learner:
    """The network and its update in PyTorch."""
    import copy

    try:
        import torch
        from tensordict import TensorDict
        from torch import nn
    except ImportError as error:
        raise SystemExit(f"online_dqn.py needs {error.name}: pip install 'mouse-data[torch]'") from error

    import mouse_torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small a network is fastest so

    class TorchLearner:
        def __init__(self) -> None:
            self.network = nn.Sequential(
                nn.Linear(OBSERVATION_SIZE, HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, ACTIONS),
            )
            self.target = copy.deepcopy(self.network)
            self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE)

        def make_buffer(self, **options: Any) -> mouse_torch.ReplayBuffer:
            return mouse_torch.ReplayBuffer(**options)

        @torch.no_grad()
        def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
            return self.network(torch.from_numpy(observations)).argmax(dim=-1).numpy()

        def update(self, batch: TensorDict) -> Floats:
            after = batch["next"]
            with torch.no_grad():
                # The network chooses the next action, the target network values it (double Q-learning).
                best = self.network(after["observation"]).argmax(dim=-1, keepdim=True)
                value = self.target(after["observation"]).gather(1, best)[:, 0]
                goal = after["reward"] + batch["discount"] * (after["done"] != 1) * value
            chosen = self.network(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
            # Rows that no whole transition leaves count for nothing.
            weight = batch["priority_weight"] * batch["mask"]
            weight /= weight.max()
            loss = (weight * nn.functional.smooth_l1_loss(chosen, goal, reduction="none")).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return ((chosen.detach() - goal).abs() * batch["mask"]).numpy()

        def copy_target(self) -> None:
            self.target.load_state_dict(self.network.state_dict())

    return TorchLearner()


# ---------------------------------------------------------------------- JAX


def jax_learner(seed: int) -> Learner:
    """The network and its update in JAX."""
    try:
        import jax
        import jax.numpy as jnp
        import optax
    except ImportError as error:
        raise SystemExit(f"online_dqn.py needs {error.name}: pip install 'mouse-data[jax]' optax") from error

    import mouse_jax

    Parameters = list[tuple[jax.Array, jax.Array]]
    optimizer = optax.adam(LEARNING_RATE)

    def values_of(parameters: Parameters, observations: jax.Array) -> jax.Array:
        hidden = observations
        for weights, bias in parameters[:-1]:
            hidden = jax.nn.relu(hidden @ weights + bias)
        weights, bias = parameters[-1]
        return hidden @ weights + bias

    @jax.jit
    def best_action(parameters: Parameters, observations: jax.Array) -> jax.Array:
        return values_of(parameters, observations).argmax(axis=-1)

    @jax.jit
    def step(parameters: Parameters, target: Parameters, state: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        after = batch["next"]
        # The network chooses the next action, the target network values it (double Q-learning).
        best = values_of(parameters, after["observation"]).argmax(axis=-1)[:, None]
        value = jnp.take_along_axis(values_of(target, after["observation"]), best, axis=1)[:, 0]
        goal = after["reward"] + batch["discount"] * (after["done"] != 1) * value

        def loss_of(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
            chosen = jnp.take_along_axis(values_of(parameters, batch["observation"]), batch["action"][:, None], axis=1)
            error = chosen[:, 0] - goal
            # Rows that no whole transition leaves count for nothing.
            weight = batch["priority_weight"] * batch["mask"]
            weight /= weight.max()
            return (weight * optax.losses.huber_loss(error)).mean(), jnp.abs(error) * batch["mask"]

        (_, errors), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, errors

    class JaxLearner:
        def __init__(self) -> None:
            sizes = (OBSERVATION_SIZE, HIDDEN, HIDDEN, ACTIONS)
            keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
            # As torch.nn.Linear begins: uniform in 1 / sqrt(inputs).
            self.parameters: Parameters = [
                (jax.random.uniform(key, (inputs, outputs), minval=-1, maxval=1) / inputs**0.5, jnp.zeros(outputs))
                for key, inputs, outputs in zip(keys, sizes[:-1], sizes[1:], strict=True)
            ]
            self.target = self.parameters
            self.state = optimizer.init(self.parameters)

        def make_buffer(self, **options: Any) -> mouse_jax.ReplayBuffer:
            return mouse_jax.ReplayBuffer(**options)

        def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
            return np.asarray(best_action(self.parameters, observations))

        def update(self, batch: dict[str, Any]) -> Floats:
            self.parameters, self.state, errors = step(self.parameters, self.target, self.state, batch)
            return np.asarray(errors)

        def copy_target(self) -> None:
            self.target = self.parameters

    return JaxLearner()


LEARNERS: dict[str, Callable[[int], Learner]] = {"torch": torch_learner, "jax": jax_learner}


# ---------------------------------------------------------------------- the loop, which knows no framework


@dataclass
class Progress:
    """How far a training has come: its evaluations by the steps taken until then, and what it cost."""

    steps: int
    updates: int
    returns: list[tuple[int, float]]
    errors: list[float]
    seconds: float


def train(learner: Learner, *, steps: int, seed: int) -> Progress:
    """Act and learn for so many steps, or until the pole is balanced; return how it went."""
    random = np.random.default_rng(seed)
    buffer = learner.make_buffer(
        storage=ArrayStorage(BUFFER_SIZE, ndim=2, alignment="arrived"),
        sampler=PrioritizedSampler(alpha=0.6, beta=LinearSchedule(0.4, 1.0, 20_000), eps=0.01),
        transform=Compose(NextView(takes="arrived"), NStep(STEPS, DISCOUNT)),
        batch_size=BATCH_SIZE,
        seed=seed,
    )
    environments = gym.make_vec(ENVIRONMENT, num_envs=ENVIRONMENTS, vectorization_mode="sync")
    observations, _ = environments.reset(seed=seed)
    # Nothing led to the first observations: their action is a placeholder.
    nothing = np.zeros(ENVIRONMENTS)
    buffer.append(rows_of(observations, nothing, nothing, nothing, nothing))
    progress = Progress(0, 0, [], [], 0.0)
    began = time.perf_counter()
    for number in lunar_lander.progress(
        range(1, steps // ENVIRONMENTS + 1), description="learning", total=steps // ENVIRONMENTS
    ):
        at_random = random.random(ENVIRONMENTS) < EXPLORATION(number)
        actions = np.where(at_random, random.integers(ACTIONS, size=ENVIRONMENTS), learner.act(observations))
        # An environment that has ended is reset by its next step: then a row holds the first observation of a new
        # episode, with reward 0, and its action led to nothing.
        observations, rewards, terminated, truncated, _ = environments.step(actions)
        buffer.append(rows_of(observations, actions, rewards, terminated, truncated))
        progress.steps += ENVIRONMENTS
        if len(buffer) < LEARNING_STARTS:
            continue
        for _ in range(UPDATES):
            batch = buffer.sample()
            errors = learner.update(batch)
            buffer.update_priority(batch["index"], errors)
            progress.errors.append(float(errors.mean()))
            progress.updates += 1
            if progress.updates % TARGET_EVERY == 0:
                learner.copy_target()
        if number % EVALUATED_EVERY == 0:
            earned = play(learner, episodes=EVALUATED_EPISODES, seed=PLAYING_SEED // 2).mean()
            progress.returns.append((progress.steps, float(earned)))
            if earned >= GOOD_ENOUGH:
                break
    environments.close()
    progress.seconds = time.perf_counter() - began
    return progress


def rows_of(
    observations: NDArray[Any], actions: NDArray[Any], rewards: NDArray[Any], terminated: Any, truncated: Any
) -> dict[str, NDArray[Any]]:
    """A row for each environment: what it shows now, and what led to it."""
    return {
        "observation": observations.astype(np.float32),
        "action": actions.astype(np.int64),
        "reward": rewards.astype(np.float32),
        "done": np.where(terminated, 1, np.where(truncated, 2, 0)).astype(np.int8),
    }


def play(learner: Learner, *, episodes: int, seed: int) -> NDArray[np.float64]:
    """Play whole episodes side by side, always taking the best action; return what each earned."""
    environments = gym.make_vec(ENVIRONMENT, num_envs=episodes, vectorization_mode="sync")
    observations, _ = environments.reset(seed=seed)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, dtype=bool)
    while playing.any():
        observations, rewards, terminated, truncated, _ = environments.step(learner.act(observations))
        returns += np.where(playing, rewards, 0.0)
        playing &= ~(terminated | truncated)
    environments.close()
    return returns


def main() -> None:
    """Train, play, and print the figures."""
    parser = argparse.ArgumentParser(description="Learn to balance a pole with prioritised n-step replay.")
    parser.add_argument("--framework", choices=sorted(LEARNERS), default="torch")
    parser.add_argument("--steps", type=int, default=100_000, help="most steps to take in all environments together")
    parser.add_argument("--seed", type=int, default=0, help="of the network, the exploration and the draws")
    options = parser.parse_args()

    learner = LEARNERS[options.framework](options.seed)
    print(f"return untrained: {play(learner, episodes=PLAYED_EPISODES, seed=PLAYING_SEED).mean():.1f}")
    progress = train(learner, steps=options.steps, seed=options.seed)
    print(f"steps taken: {progress.steps}")
    print(f"updates: {progress.updates}")
    print(f"updates per second: {progress.updates / progress.seconds:.0f}")
    if progress.errors:
        print(f"final error: {np.mean(progress.errors[-100:]):.3f}")
    print(f"evaluations: {' '.join(f'{earned:.0f}' for _, earned in progress.returns) or 'none'}")
    print(f"return trained: {play(learner, episodes=PLAYED_EPISODES, seed=PLAYING_SEED).mean():.1f}")


if __name__ == "__main__":
    main()
