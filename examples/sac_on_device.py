"""Swing up a thousand pendulums with SAC in torch: environments, replay and networks on one device.

    python examples/sac_on_device.py --compiled
    python examples/sac_on_device.py --compiled --device cuda

Nothing is fetched from the device while it learns: the environments are tensors, what they give is written into a
replay there, and batches are drawn from it there. Acting, with the step of the environments and the write, is compiled
as a whole, and so is drawing; the losses are, too.

The pendulum has the dynamics of gymnasium's Pendulum-v1 (its reward too), and an episode is cut off after 200 steps.
Observations are stored once: ``NextView`` reads the row behind each that is drawn. The observation that an episode
ended with is not stored, so its last step is masked.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from typing import Any

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise SystemExit(f"sac_on_device.py needs {error.name}: pip install 'mouse-data[torch]'") from error

from mouse_core.replay import NextView
from mouse_torch.device import Replay

ENVIRONMENTS = 64
STEPS_OF_EPISODE = 200
CAPACITY = 1_600  # time steps of each environment
BATCH_SIZE = 256
LEARNING_STARTS = 20  # time steps
DISCOUNT = 0.98
TARGET_RATE = 0.01
LEARNING_RATE = 1e-3
HIDDEN = 128
TORQUE = 2.0


class Pendulums(nn.Module):
    """Pendulums side by side, each at its own step of its episode."""

    angle: Tensor
    speed: Tensor
    steps: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("angle", (torch.rand(count) * 2 - 1) * math.pi)
        self.register_buffer("speed", torch.rand(count) * 2 - 1)
        # Not all episodes end at once.
        self.register_buffer("steps", torch.randint(0, STEPS_OF_EPISODE, (count,)))

    def observations(self) -> Tensor:
        """What is seen, float32 ``[env, 3]``."""
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], -1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and 2 where an episode was cut off, ``[env]``; another has begun there then."""
        torque = action.clamp(-1, 1) * TORQUE
        upright = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        reward = -(upright**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        speed = (self.speed + (15.0 * self.angle.sin() + 3.0 * torque) * 0.05).clamp(-8, 8)
        angle = self.angle + speed * 0.05
        over = self.steps + 1 >= STEPS_OF_EPISODE
        self.angle.copy_(torch.where(over, (torch.rand_like(angle) * 2 - 1) * math.pi, angle))
        self.speed.copy_(torch.where(over, torch.rand_like(speed) * 2 - 1, speed))
        self.steps.copy_(torch.where(over, 0, self.steps + 1))
        return reward, (over * 2).to(torch.int8)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class Agent(nn.Module):
    """A policy, two critics and their targets, and how much randomness is worth (Haarnoja et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = network(3, 2)
        self.critics = nn.ModuleList([network(4, 1), network(4, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in ``[-1, 1]``, and the logarithms of their densities, ``[n]``."""
        mean, log_scale = self.policy(observations).unbind(-1)
        log_scale = log_scale.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + noise * log_scale.exp()
        density = -0.5 * noise**2 - log_scale - 0.5 * math.log(2 * math.pi)
        return raw.tanh(), density - 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))

    def critic_loss(self, batch: Any) -> Tensor:
        """How wrong the critics are about transitions."""
        after = batch["next"]
        with torch.no_grad():
            action, density = self.act(after["observation"])
            value = _least(self.targets, after["observation"], action) - self.log_temperature.exp() * density
            goal = after["reward"] + DISCOUNT * (after["done"] != 1) * value
        inputs = torch.cat([batch["observation"], batch["action"][:, None]], -1)
        errors = sum((critic(inputs)[:, 0] - goal) ** 2 for critic in self.critics)
        return (errors * batch["mask"]).mean()

    def policy_loss(self, batch: Any) -> Tensor:
        """What the policy, and the worth of randomness, are to lessen."""
        action, density = self.act(batch["observation"])
        temperature = self.log_temperature.exp()
        worth = _least(self.critics, batch["observation"], action) - temperature.detach() * density
        return (-worth - temperature * (density.detach() - 1)).mean()  # an entropy of -1 is aimed at


def _least(critics: Any, observations: Tensor, actions: Tensor) -> Tensor:
    inputs = torch.cat([observations, actions[:, None]], -1)
    one, other = (critic(inputs)[:, 0] for critic in critics)
    return torch.minimum(one, other)


def train(steps: int, *, device: str = "cpu", compiled: bool = False, seed: int = 0) -> tuple[Replay, Tensor]:
    """A training of so many time steps, with an update at each; the replay, and rewards a step, ``[steps]``."""
    torch.manual_seed(seed)
    pendulums, agent = Pendulums(ENVIRONMENTS).to(device), Agent().to(device)
    row = {"observation": torch.zeros(3), "action": 0.0, "reward": 0.0, "done": torch.zeros((), dtype=torch.int8)}
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_envs": ENVIRONMENTS, "transform": NextView()}
    replay = Replay(row, CAPACITY * ENVIRONMENTS, **options, seed=seed, device=device)
    critics = torch.optim.Adam(agent.critics.parameters(), LEARNING_RATE)
    policy = torch.optim.Adam([*agent.policy.parameters(), agent.log_temperature], LEARNING_RATE)

    def play() -> Tensor:
        with torch.no_grad():
            observations = pendulums.observations()
            action, _ = agent.act(observations)
            reward, done = pendulums.step(action)
            replay.extend({"observation": observations, "action": action, "reward": reward, "done": done})
            return reward.mean()

    def as_is(function: Any) -> Any:
        return function

    make = (lambda function: torch.compile(function, fullgraph=True)) if compiled else as_is
    play, draw = make(play), make(replay.sample)
    critic_loss, policy_loss = make(agent.critic_loss), make(agent.policy_loss)
    rewards = torch.zeros(steps, device=device)
    for step in range(steps):
        rewards[step] = play()
        if step < LEARNING_STARTS:
            continue
        batch = draw()
        for loss, optimizer in ((critic_loss, critics), (policy_loss, policy)):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        with torch.no_grad():
            for target, own in zip(agent.targets.parameters(), agent.critics.parameters(), strict=True):
                target.lerp_(own, TARGET_RATE)
    return replay, rewards


def main() -> None:
    """Train, and say how it went."""
    parser = argparse.ArgumentParser(description="SAC on pendulums, all on one device")
    parser.add_argument("--steps", type=int, default=2_000, help="time steps of all environments")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.perf_counter()
    _, rewards = train(chosen.steps, device=chosen.device, compiled=chosen.compiled, seed=chosen.seed)
    part = max(1, chosen.steps // 10)
    first, last = (float(some.mean()) * STEPS_OF_EPISODE for some in (rewards[:part], rewards[-part:]))
    print(f"{time.perf_counter() - began:.0f} s; an episode's return was {first:.0f} at first, {last:.0f} at the end")


if __name__ == "__main__":
    main()
