"""PPO on CartPole, in PyTorch or in JAX: a script to copy and change.

    python examples/ppo_cartpole.py
    python examples/ppo_cartpole.py --framework jax

Poles are balanced by many carts at once, rollouts are kept by mouse-data, and the policy is judged by gymnasium's own
CartPole-v1, where 500 is the best that there is. In PyTorch the carts run in NumPy and `mouse_torch.RolloutStorage`
keeps the rows; in JAX carts, rollouts and updates are one compiled function around `mouse_jax.rollout_storage`.

PPO: Schulman et al., "Proximal policy optimization algorithms", 2017. The cart and the pole: Barto, Sutton and
Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", 1983.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium as gym
    import jax
    import jax.numpy as jnp
    import optax
    import torch
    from torch import nn
except ImportError as error:
    raise SystemExit(f"ppo_cartpole.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core.rollouts import MiniBatch, RolloutField, Transition
from mouse_jax import rollout_storage
from mouse_torch import RolloutStorage

ENVS = 32  # N: carts
STEPS = 64  # T: steps of a rollout
MINI_BATCHES = 4
EPOCHS = 6
DISCOUNT, LAM = 0.99, 0.95
CLIP, ENTROPY, VALUE = 0.2, 0.005, 0.5
LEARNING_RATE = 1.5e-3
MAX_GRADIENT = 0.5
HIDDEN = 64
TIME_LIMIT = 500
PLAYED_EPISODES = 50
PLAYING_SEED = 1_000_000  # far from the seeds of training

#: What a row holds, besides its reward and done. Actions are the numbers 0 and 1.
FIELDS = {
    "observations": (4,),
    "actions": RolloutField((), "int64"),
    "values": (),
    "actions_log_prob": (),
}

Policy = Callable[[NDArray[np.float32]], NDArray[Any]]


# ---------------------------------------------------------------------- the carts


def move(xp: Any, states: Any, actions: Any) -> Any:
    """Where carts are after 0.02 s of a push of 10 N to the left (0) or right (1), in NumPy or JAX.

    A state is the cart's position and velocity, and the pole's angle and angular velocity, [N, 4].
    """
    position, velocity, angle, turning = (states[:, part] for part in range(4))
    push = xp.where(actions == 1, 10.0, -10.0)
    sine, cosine = xp.sin(angle), xp.cos(angle)
    # A cart of 1 kg, a pole of 0.1 kg whose middle is 0.5 m away.
    inner = (push + 0.05 * turning**2 * sine) / 1.1
    angular = (9.8 * sine - cosine * inner) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
    linear = inner - 0.05 * angular * cosine / 1.1
    moved = (position + 0.02 * velocity, velocity + 0.02 * linear, angle + 0.02 * turning, turning + 0.02 * angular)
    return xp.stack(moved, axis=1)


def has_fallen(xp: Any, states: Any) -> Any:
    """Whether carts are off their track, or poles more than 12 degrees from upright, [N]."""
    return (xp.abs(states[:, 0]) > 2.4) | (xp.abs(states[:, 2]) > np.pi / 15)


class Stepped(NamedTuple):
    """What a step led to: the final observations too, which the next ones replace where an episode ends."""

    observations: Any
    terminated: Any
    truncated: Any
    final_observations: Any


class Carts:
    """Carts in NumPy, each of which begins anew as soon as its episode ends."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.states = self.begin()
        self.ages = np.zeros(ENVS, np.int64)

    def begin(self) -> NDArray[np.float32]:
        """States in which episodes begin."""
        return self.random.uniform(-0.05, 0.05, (ENVS, 4)).astype(np.float32)

    def step(self, actions: NDArray[Any]) -> Stepped:
        """Move all carts; every step earns 1."""
        moved = move(np, self.states, actions).astype(np.float32)
        self.ages += 1
        terminated = has_fallen(np, moved)
        truncated = ~terminated & (self.ages >= TIME_LIMIT)
        ended = terminated | truncated
        self.ages[ended] = 0
        self.states = np.where(ended[:, None], self.begin(), moved)
        return Stepped(self.states, terminated, truncated, moved)


# ---------------------------------------------------------------------- PyTorch


class Agent(nn.Module):
    """Scores of the two actions, and the value of an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = self.network(2, 0.01), self.network(1, 1.0)

    def network(self, outputs: int, scale: float) -> nn.Sequential:
        """Two hidden layers; the last layer begins small, so that both actions are about equally likely."""
        layers = [nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs)]
        for layer, gain in zip(layers, (2**0.5, 2**0.5, scale), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    def forward(self, observations: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        """Distributions of actions, and values [N]."""
        actions = torch.distributions.Categorical(logits=self.actor(observations))
        return actions, self.critic(observations)[:, 0]


def collect(agent: Agent, carts: Carts, storage: RolloutStorage) -> None:
    """Fill the storage with a rollout, and compute its returns."""
    time_outs, final_values = [], []
    storage.clear()
    with torch.no_grad():
        for _ in range(STEPS):
            observations = torch.from_numpy(carts.states)
            distribution, values = agent(observations)
            actions = distribution.sample()
            stepped = carts.step(actions.numpy())
            storage.add_transitions(
                Transition(
                    observations=observations,
                    actions=actions,
                    values=values,
                    actions_log_prob=distribution.log_prob(actions),
                    rewards=torch.ones(ENVS),
                    dones=torch.from_numpy(stepped.terminated | stepped.truncated),
                )
            )
            # A cart that ran out of time would have gone on: what follows is worth what its last observation is.
            time_outs.append(torch.from_numpy(stepped.truncated))
            final_values.append(agent(torch.from_numpy(stepped.final_observations))[1])
        last_values = agent(torch.from_numpy(carts.states))[1]
    storage.compute_returns(
        last_values, DISCOUNT, LAM, time_outs=torch.stack(time_outs), final_values=torch.stack(final_values)
    )


def update(agent: Agent, optimizer: torch.optim.Optimizer, storage: RolloutStorage) -> None:
    """Go through the rollout some times."""
    for batch in storage.mini_batch_generator(MINI_BATCHES, EPOCHS):
        distribution, values = agent(batch["observations"])
        ratio = torch.exp(distribution.log_prob(batch["actions"]) - batch["actions_log_prob"][:, 0])
        advantages = batch["advantages"][:, 0]
        gain = torch.minimum(ratio * advantages, ratio.clip(1.0 - CLIP, 1.0 + CLIP) * advantages).mean()
        error = ((values - batch["returns"][:, 0]) ** 2).mean()
        loss = VALUE * error - gain - ENTROPY * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT)
        optimizer.step()


def train_in_torch(iterations: int, seed: int) -> Policy:
    """Train, and return the policy that takes the likelier action."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the network is far too small for more
    agent, carts = Agent(), Carts(seed)
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-5)
    storage = RolloutStorage(ENVS, STEPS, FIELDS, seed)
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1.0 - iteration / iterations)
        collect(agent, carts, storage)
        update(agent, optimizer, storage)

    def act(observations: NDArray[np.float32]) -> NDArray[Any]:
        with torch.no_grad():
            return agent.actor(torch.from_numpy(observations)).argmax(dim=1).numpy()  # type: ignore[no-any-return]

    return act


# ---------------------------------------------------------------------- JAX

Parameters = dict[str, list[dict[str, jax.Array]]]


def initial_parameters(key: jax.Array) -> Parameters:
    """Both networks, as above."""
    parameters: Parameters = {}
    for name, outputs, scale in (("actor", 2, 0.01), ("critic", 1, 1.0)):
        sizes = ((4, HIDDEN, 2**0.5), (HIDDEN, HIDDEN, 2**0.5), (HIDDEN, outputs, scale))
        parameters[name] = []
        for inputs, width, gain in sizes:
            key, own = jax.random.split(key)
            weights = jax.nn.initializers.orthogonal(gain)(own, (inputs, width))
            parameters[name].append({"weights": weights, "bias": jnp.zeros(width)})
    return parameters


def output(layers: list[dict[str, jax.Array]], values: jax.Array) -> jax.Array:
    """What a network says, [N, outputs]."""
    for layer in layers[:-1]:
        values = jnp.tanh(values @ layer["weights"] + layer["bias"])
    return values @ layers[-1]["weights"] + layers[-1]["bias"]


def values_of(parameters: Parameters, observations: jax.Array) -> jax.Array:
    """Values, [N]."""
    return output(parameters["critic"], observations)[:, 0]


@partial(jax.tree_util.register_dataclass, data_fields=["states", "ages", "key"], meta_fields=[])
@dataclass(frozen=True)
class JaxCarts:
    """Carts in JAX: their states, the ages of their episodes, and the key of what comes next."""

    states: jax.Array
    ages: jax.Array
    key: jax.Array


def begin(key: jax.Array) -> jax.Array:
    """States in which episodes begin."""
    return jax.random.uniform(key, (ENVS, 4), minval=-0.05, maxval=0.05)


def step_carts(carts: JaxCarts, actions: jax.Array) -> tuple[JaxCarts, Stepped]:
    """Move all carts; every step earns 1."""
    moved, ages = move(jnp, carts.states, actions), carts.ages + 1
    terminated = has_fallen(jnp, moved)
    truncated = ~terminated & (ages >= TIME_LIMIT)
    ended = terminated | truncated
    key, own = jax.random.split(carts.key)
    states = jnp.where(ended[:, None], begin(own), moved)
    return JaxCarts(states, jnp.where(ended, 0, ages), key), Stepped(states, terminated, truncated, moved)


def loss_of(parameters: Parameters, batch: MiniBatch) -> jax.Array:
    """PPO's loss of a mini-batch."""
    scores = jax.nn.log_softmax(output(parameters["actor"], batch["observations"]))
    log_prob = jnp.take_along_axis(scores, batch["actions"][:, None], axis=1)
    ratio = jnp.exp(log_prob - batch["actions_log_prob"])
    gain = jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * batch["advantages"])
    error = (values_of(parameters, batch["observations"]) - batch["returns"][:, 0]) ** 2
    entropy = -(jnp.exp(scores) * scores).sum(axis=1)
    return VALUE * error.mean() - gain.mean() - ENTROPY * entropy.mean()


def train_in_jax(iterations: int, seed: int) -> Policy:
    """Train, and return the policy that takes the likelier action."""
    updates = iterations * EPOCHS * MINI_BATCHES
    schedule = optax.linear_schedule(LEARNING_RATE, 0.0, max(updates, 1))
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT), optax.adam(schedule, eps=1e-5))

    @partial(jax.jit, donate_argnums=0)
    def iterate(state: Any) -> Any:
        """One rollout, and the updates on it: a single compiled function, in which nothing returns to Python."""
        parameters, optimizer_state, carts, rollout = state

        def act(carry: Any, _: None) -> Any:
            carts, rollout = carry
            key, own = jax.random.split(carts.key)
            observations = carts.states
            scores = jax.nn.log_softmax(output(parameters["actor"], observations))
            actions = jax.random.categorical(own, scores)
            carts, stepped = step_carts(JaxCarts(carts.states, carts.ages, key), actions)
            transition = Transition(
                observations=observations,
                actions=actions,
                values=values_of(parameters, observations),
                actions_log_prob=jnp.take_along_axis(scores, actions[:, None], axis=1),
                rewards=jnp.ones(ENVS),
                dones=stepped.terminated | stepped.truncated,
            )
            final_values = values_of(parameters, stepped.final_observations)
            return (carts, rollout_storage.append(rollout, transition)), (stepped.truncated, final_values)

        start = (carts, rollout_storage.clear(rollout))
        (carts, rollout), (time_outs, final_values) = jax.lax.scan(act, start, length=STEPS)
        last_values = values_of(parameters, carts.states)
        rollout = rollout_storage.compute_returns(
            rollout, last_values, DISCOUNT, LAM, time_outs=time_outs, final_values=final_values
        )

        def learn(carry: Any, rows: jax.Array) -> Any:
            parameters, optimizer_state = carry
            gradients = jax.grad(loss_of)(parameters, rollout_storage.mini_batch(rollout, rows))
            changes, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
            return (optax.apply_updates(parameters, changes), optimizer_state), None

        def epoch(carry: Any, number: jax.Array) -> Any:
            return jax.lax.scan(learn, carry, rollout_storage.permutation(rollout, number).reshape(MINI_BATCHES, -1))

        (parameters, optimizer_state), _ = jax.lax.scan(epoch, (parameters, optimizer_state), jnp.arange(EPOCHS))
        return parameters, optimizer_state, carts, rollout_storage.advance(rollout, EPOCHS)

    for_parameters, for_states, for_carts = jax.random.split(jax.random.key(seed), 3)
    parameters = initial_parameters(for_parameters)
    carts = JaxCarts(begin(for_states), jnp.zeros(ENVS, jnp.int32), for_carts)
    state = (parameters, optimizer.init(parameters), carts, rollout_storage.init(ENVS, STEPS, FIELDS, seed))
    for _ in range(iterations):
        state = iterate(state)
    best = jax.jit(lambda observations: output(state[0]["actor"], observations).argmax(axis=1))
    return lambda observations: np.asarray(best(observations))


# ---------------------------------------------------------------------- playing


def play(act: Policy, episodes: int = PLAYED_EPISODES) -> NDArray[np.float64]:
    """Let the policy play gymnasium's CartPole, and return what each episode earned."""
    returns = np.zeros(episodes)
    environment = gym.make("CartPole-v1")
    for episode in range(episodes):
        observation, _ = environment.reset(seed=PLAYING_SEED + episode)
        ended = False
        while not ended:
            observation, reward, terminated, truncated, _ = environment.step(int(act(observation[None])[0]))
            returns[episode] += float(reward)
            ended = terminated or truncated
    environment.close()
    return returns


def main() -> None:
    """Train, play, and print the figures."""
    parser = argparse.ArgumentParser(description="PPO on CartPole, with rollouts kept by mouse-data.")
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch", help="what to train in")
    parser.add_argument("--iterations", type=int, default=120, help="rollouts of 2,048 steps")
    parser.add_argument("--episodes", type=int, default=PLAYED_EPISODES, help="episodes to play")
    parser.add_argument("--seed", type=int, default=0, help="of the carts, the policy and the mini-batches")
    options = parser.parse_args()

    began = time.perf_counter()
    act = {"torch": train_in_torch, "jax": train_in_jax}[options.framework](options.iterations, options.seed)
    elapsed = time.perf_counter() - began
    print(f"steps: {options.iterations * ENVS * STEPS}")
    print(f"steps per second: {options.iterations * ENVS * STEPS / elapsed:.0f}")
    returns = play(act, options.episodes)
    print(f"return: {returns.mean():.1f}")
    print(f"lowest return: {returns.min():.0f}")


if __name__ == "__main__":
    main()
