"""A DQN in one compiled program, environments, replay and learning, whose replay is an argument; after PureJaxRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mouse_core.replay import NextView
from mouse_jax import device

ENVIRONMENTS = 10
CAPACITY = 10_000  # rows, of all environments together
BATCH_SIZE = 128
LEARNING_STARTS = 1_000  # rows
TARGET_EVERY = 50  # time steps
LEARNING_RATE = 5e-4
DISCOUNT = 0.99
EXPLORED = 0.4  # of all time steps, until the share of random actions is at its least
LEAST_EXPLORATION = 0.05
SIZES = (4, 120, 84, 2)

# ---------------------------------------------------------------------- the environment

STEPS_OF_EPISODE = 500


class CartPole(NamedTuple):
    """A pole on a cart, as in Barto, Sutton and Anderson (1983), with the numbers of gymnasium's CartPole-v1."""

    position: jax.Array
    speed: jax.Array
    angle: jax.Array
    turning: jax.Array
    steps: jax.Array

    @property
    def observation(self) -> jax.Array:
        """What is seen, float32 ``[4]``."""
        return jnp.stack(self[:4])


def reset(key: jax.Array) -> CartPole:
    """The pole upright, nearly."""
    return CartPole(*jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0))


def step(pole: CartPole, action: jax.Array, key: jax.Array) -> tuple[CartPole, jax.Array]:
    """The next state, already of a new episode where one has ended, and whether it has: 1 fallen, 2 out of time."""
    gravity, cart, mass, half_length, seconds = 9.8, 1.0, 0.1, 0.5, 0.02
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(pole.angle), jnp.cos(pole.angle)
    pushed = (force + mass * half_length * pole.turning**2 * sine) / (cart + mass)
    turned = (gravity * sine - cosine * pushed) / (half_length * (4 / 3 - mass * cosine**2 / (cart + mass)))
    sped = pushed - mass * half_length * turned * cosine / (cart + mass)
    after = CartPole(
        pole.position + seconds * pole.speed,
        pole.speed + seconds * sped,
        pole.angle + seconds * pole.turning,
        pole.turning + seconds * turned,
        pole.steps + 1,
    )
    fallen = (jnp.abs(after.position) > 2.4) | (jnp.abs(after.angle) > 12 * 2 * jnp.pi / 360)
    done = jnp.where(fallen, 1, jnp.where(after.steps >= STEPS_OF_EPISODE, 2, 0)).astype(jnp.int8)
    fresh = reset(key)
    return jax.tree.map(lambda new, old: jnp.where(done > 0, new, old), fresh, after), done


# ---------------------------------------------------------------------- the replay


class Memory(NamedTuple):
    """A replay, as the training uses it.

    Attributes:
        init: An empty one, of a seed and an example row.
        add: It with one time step of rows, ``[env, ...]``.
        sample: Transitions ``[b, ...]``, of it, the number of the time step, and a random key.
    """

    init: Callable[[Any, Any], Any]
    add: Callable[[Any, Any], Any]
    sample: Callable[[Any, Any, Any], dict[str, Any]]


def on_device() -> Memory:
    """Ours. Observations are stored once: ``NextView`` reads the row behind each that is drawn."""

    def init(seed: Any, example: Any) -> device.Replay:
        return device.init(
            example, CAPACITY, batch_size=BATCH_SIZE, num_envs=ENVIRONMENTS, transform=NextView(), seed=seed
        )

    def sample(replay: device.Replay, number: Any, key: Any) -> dict[str, Any]:
        batch = device.sample(replay, number)
        after = batch["next"]
        # The observation that a cut-off episode ended with is not stored; its last step is masked.
        return {
            "observation": batch["observation"],
            "action": batch["action"],
            "reward": after["reward"],
            "goes_on": after["done"] != 1,
            "next": after["observation"],
            "mask": batch["mask"],
        }

    return Memory(init, device.add, sample)


def of_flashbax() -> Memory:
    """flashbax's flat buffer, which stores pairs of rows."""
    import flashbax

    buffer = flashbax.make_flat_buffer(
        max_length=CAPACITY,
        min_length=LEARNING_STARTS,
        sample_batch_size=BATCH_SIZE,
        add_sequences=False,
        add_batch_size=ENVIRONMENTS,
    )

    def sample(state: Any, number: Any, key: Any) -> Any:
        pair = buffer.sample(state, key).experience
        return {
            **{name: pair.first[name] for name in ("observation", "action", "reward")},
            "goes_on": pair.first["done"] != 1,
            "next": pair.second["observation"],
            "mask": pair.first["done"] != 2,
        }

    return Memory(lambda seed, row: buffer.init(row), buffer.add, sample)


# ---------------------------------------------------------------------- the training

Parameters = list[tuple[jax.Array, jax.Array]]
optimizer = optax.adam(LEARNING_RATE)


def initial(key: jax.Array) -> Parameters:
    """The layers of a network, as torch.nn.Linear begins: uniform in 1 / sqrt(inputs)."""
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        (jax.random.uniform(one, (inputs, outputs), minval=-1, maxval=1) / inputs**0.5, jnp.zeros(outputs))
        for one, inputs, outputs in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def values_of(parameters: Parameters, observations: jax.Array) -> jax.Array:
    """Values of the actions, ``[n, 2]``."""
    hidden = observations
    for weights, bias in parameters[:-1]:
        hidden = jax.nn.relu(hidden @ weights + bias)
    weights, bias = parameters[-1]
    return hidden @ weights + bias


def loss_of(parameters: Parameters, target: Parameters, batch: dict[str, Any]) -> jax.Array:
    """How wrong the network is about transitions."""
    best = values_of(target, batch["next"]).max(axis=-1)
    goal = batch["reward"] + DISCOUNT * batch["goes_on"] * best
    chosen = jnp.take_along_axis(values_of(parameters, batch["observation"]), batch["action"][:, None], axis=1)[:, 0]
    return (jnp.square(chosen - goal) * batch["mask"]).mean()


class Run(NamedTuple):
    """All that a training has."""

    parameters: Parameters
    target: Parameters
    optimizer: Any
    replay: Any
    poles: CartPole
    key: jax.Array


def train(seed: Any, *, steps: int, memory: Memory) -> tuple[Run, dict[str, jax.Array]]:
    """A training of so many time steps of all environments, and how it went: ``[steps]`` each.

    ``steps`` of an episode and ``ended`` say how long those that ended at a time step were, and how many; ``loss`` is 0
    before there is any.
    """
    first, second, key = jax.random.split(jax.random.key(seed), 3)
    parameters = initial(first)
    poles = jax.vmap(reset)(jax.random.split(second, ENVIRONMENTS))
    example = {"observation": jnp.zeros(4), "action": jnp.int32(0), "reward": jnp.float32(0), "done": jnp.int8(0)}
    began = Run(parameters, parameters, optimizer.init(parameters), memory.init(seed, example), poles, key)

    def act(run: Run, number: jax.Array) -> tuple[Run, Any]:
        key, choosing, exploring, resetting = jax.random.split(run.key, 4)
        observations = jax.vmap(lambda pole: pole.observation)(run.poles)
        share = jnp.maximum(LEAST_EXPLORATION, 1 - number / (EXPLORED * steps))
        at_random = jax.random.uniform(choosing, (ENVIRONMENTS,)) < share
        anything = jax.random.randint(exploring, (ENVIRONMENTS,), 0, SIZES[-1])
        actions = jnp.where(at_random, anything, values_of(run.parameters, observations).argmax(axis=-1))
        poles, done = jax.vmap(step)(run.poles, actions, jax.random.split(resetting, ENVIRONMENTS))
        rows = {
            "observation": observations,
            "action": actions.astype(jnp.int32),
            "reward": jnp.ones(ENVIRONMENTS),
            "done": done,
        }
        lengths = jnp.where(done > 0, run.poles.steps + 1, 0).sum()
        run = run._replace(replay=memory.add(run.replay, rows), poles=poles, key=key)
        return run, {"steps": lengths, "ended": (done > 0).sum()}

    def learn(run: Run, number: jax.Array) -> tuple[Any, jax.Array]:
        batch = memory.sample(run.replay, number, jax.random.fold_in(run.key, 1))
        loss, gradients = jax.value_and_grad(loss_of)(run.parameters, run.target, batch)
        updates, state = optimizer.update(gradients, run.optimizer)
        return (optax.apply_updates(run.parameters, updates), state), loss

    def turn(run: Run, number: jax.Array) -> tuple[Run, Any]:
        run, figures = act(run, number)
        # What chooses does not depend on the seed, so that it stays a choice under jax.vmap; nor is the replay in it,
        # which would be copied.
        starts = (number + 1) * ENVIRONMENTS >= LEARNING_STARTS
        none = (run.parameters, run.optimizer), jnp.float32(0)
        (parameters, state), loss = jax.lax.cond(starts, lambda: learn(run, number), lambda: none)
        copied = number % TARGET_EVERY == 0
        target = jax.tree.map(lambda new, old: jnp.where(copied, new, old), parameters, run.target)
        return run._replace(parameters=parameters, optimizer=state, target=target), figures | {"loss": loss}

    return jax.lax.scan(turn, began, jnp.arange(steps, dtype=jnp.uint32))
