"""What the examples of action chunks share: an arm, a teacher who reaches with it, and how a policy is judged.

Nothing here knows PyTorch or JAX. The arm has two joints in a plane. Its motors take speeds, which they follow with
some delay, and every episode has another target to reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mouse_core import DatasetStore, Field, formats
from mouse_core.formats.lerobot import write_lerobot

OBSERVATION_SIZE = 10  # cosines and sines of the joints, their speeds, the fingertip, and the target
ACTION_SIZE = 2  # speeds asked of the joints, in -1..1
STEPS = 60  # of an episode at most
SIDE = 32  # pixels of a frame, and three colours
FPS = 10
NEAR = 0.08  # so near to the target the episode ends
CHUNK = 16  # actions that a policy says at a time
SEEN = (-1, 0)  # the observations that it sees: the last one and this one

Floats = NDArray[np.float32]
Policy = Callable[[Floats], Floats]


class Arms:
    """So many arms that are moved together."""

    def __init__(self, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.angle = random.uniform(-np.pi, np.pi, (count, 2))
        self.speed = np.zeros((count, 2))
        radius, around = random.uniform(0.5, 1.8, count), random.uniform(-np.pi, np.pi, count)
        self.target = radius[:, None] * np.stack([np.cos(around), np.sin(around)], axis=1)

    def tip(self) -> NDArray[np.float64]:
        """Where the fingertips are, [n, 2]: both links are one long."""
        both = np.cumsum(self.angle, axis=1)
        return np.stack([np.cos(both).sum(axis=1), np.sin(both).sum(axis=1)], axis=1)

    def observe(self) -> Floats:
        """What a policy sees, [n, 10]."""
        parts = [np.cos(self.angle), np.sin(self.angle), self.speed, self.tip(), self.target]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def film(self) -> NDArray[np.uint8]:
        """What a camera sees, [n, 32, 32, 3]: the first link in red, the second in green, the target in blue."""
        frames = np.zeros((len(self.angle), SIDE, SIDE, 3), np.uint8)
        first, tip = np.stack([np.cos(self.angle[:, 0]), np.sin(self.angle[:, 0])], axis=1), self.tip()
        along = np.linspace(0, 1, 12)[:, None, None]
        every = np.arange(len(frames))
        parts = [along * first, first + along * (tip - first), np.stack([self.target] * 2)]
        for color, points in enumerate(parts):
            for place in np.clip((points + 2.1) / 4.2 * SIDE, 1, SIDE - 2).astype(int):
                for near in (0, 1):  # two pixels wide
                    frames[every, place[:, 1] + near, place[:, 0], color] = 255
                    frames[every, place[:, 1], place[:, 0] + near, color] = 255
        return frames

    def step(self, action: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Ask for speeds, [n, 2]; which arms are at their targets then, [n]."""
        self.speed += 0.5 * (np.clip(action, -1, 1) - self.speed)
        self.angle += 0.15 * self.speed
        near: NDArray[np.bool_] = np.linalg.norm(self.target - self.tip(), axis=1) < NEAR
        return near

    def teach(self) -> Floats:
        """What the teacher asks for, [n, 2]: the fingertip straight to the target, by damped least squares."""
        first, both = self.angle[:, 0], self.angle.sum(axis=1)
        across = np.stack([-np.sin(both), np.cos(both)], axis=1)  # how the tip moves with the second joint
        along = across + np.stack([-np.sin(first), np.cos(first)], axis=1)  # and with the first
        jacobian = np.stack([along, across], axis=2)
        damped = jacobian @ jacobian.transpose(0, 2, 1) + 0.05 * np.eye(2)
        wanted = np.linalg.solve(damped, (self.target - self.tip())[:, :, None])
        speeds = (jacobian.transpose(0, 2, 1) @ wanted)[:, :, 0]
        limited: Floats = np.clip(3 * speeds, -1, 1).astype(np.float32)
        return limited


def record(
    episodes: int, seed: int, column: str = "observation", see: Callable[[Arms], NDArray[Any]] = Arms.observe
) -> DatasetStore:
    """Episodes of the teacher as rows: an observation, and the action, reward and done that *led to* it.

    An episode of T transitions is T+1 rows. Nothing led to the first one, so its action is a placeholder.

    Args:
        episodes: How many.
        seed: Of where the arms and their targets are.
        column: What observations are called.
        see: What they are.
    """
    store = DatasetStore(fields=[Field(column, image=True)] if see is Arms.film else ())
    for episode in range(episodes):
        arm = Arms(1, seed + episode)
        rows = [(see(arm)[0], np.zeros(ACTION_SIZE, np.float32), 0.0, 0)]
        while rows[-1][-1] == 0:
            action = arm.teach()
            near = bool(arm.step(action)[0])
            done = 1 if near else 2 if len(rows) == STEPS else 0
            rows.append((see(arm)[0], action[0], float(near), done))
        seen, taken, reward, done_codes = (np.array(values) for values in zip(*rows, strict=True))
        store.extend(
            {
                column: seen,
                "action": taken,
                "reward": reward,
                "done": done_codes,
                "episode_step": np.arange(len(rows)),
            }
        )
    return store


def filmed(folder: Path, episodes: int, seed: int) -> DatasetStore:
    """The teacher's episodes as a robot's recording has them, a LeRobotDataset with one camera; made if it is not.

    A frame has the action that was taken on it. Frames stay in their video: batches decode those they have.
    """
    if not folder.exists():
        rows = record(episodes, seed, "observation_images_top", Arms.film)
        write_lerobot(rows, folder, images="video:h264:gop=2:crf=18", frames_per_second=FPS, task="reach")
    return formats.open(folder, final="drop").to_store()


def reached(
    policy: Policy, arms: int = 64, seed: int = 1_000_000, see: Callable[[Arms], NDArray[Any]] = Arms.observe
) -> float:
    """How many of some arms, from 0 to 1, a policy brings to targets that it never saw.

    At every step the policy says a chunk, so that up to ``CHUNK`` chunks say something of one step: their mean is
    taken, in which older ones count more, as Zhao et al. (2023) do ("temporal ensembling").

    Args:
        policy: From the last observations [n, 2, 10], or two frames, to chunks of actions [n, 16, 2].
        arms: How many.
        seed: Of where they and their targets are.
        see: What the policy sees of them.
    """
    moved = Arms(arms, seed)
    there = np.zeros(arms, np.bool_)
    before = see(moved)
    chunks: deque[Floats] = deque(maxlen=CHUNK)  # the latest comes first
    for _ in range(STEPS):
        now = see(moved)
        chunks.appendleft(policy(np.stack([before, now], axis=1)))
        said = np.stack([chunk[:, age] for age, chunk in enumerate(chunks)])
        weights = np.exp(-0.1 * np.arange(len(said))[::-1])
        there |= moved.step(np.tensordot(weights / weights.sum(), said, axes=1))
        before = now
    return float(there.mean())
