"""Environments of other packages, where these are installed, as those of gymnasium that see one vector."""

import importlib
from typing import Any

import gymnasium
import numpy as np

# What they are registered by.
_PACKAGES = ("minigrid", "gymnasium_robotics", "highway_env", "metaworld")

FURTHER = (
    "AdroitHandDoor-v1",
    "AdroitHandHammer-v1",
    "AdroitHandPen-v1",
    "AntMaze_UMaze-v5",
    "FetchPickAndPlace-v4",
    "FetchPush-v4",
    "FetchReach-v4",
    "FetchSlide-v4",
    "FrankaKitchen-v1",
    "HandManipulateBlock-v1",
    "HandReach-v3",
    "PointMaze_Medium-v3",
    "PointMaze_UMaze-v3",
    "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-Empty-8x8-v0",
    "MiniGrid-FourRooms-v0",
    "MiniGrid-LavaGapS5-v0",
    "highway-fast-v0",
    "merge-v0",
    "parking-v0",
    *(f"metaworld:{name}-v3" for name in ("door-open", "hammer", "pick-place", "reach")),
    *(
        f"dm_control:{name}"
        for name in (
            "acrobot:swingup",
            "ball_in_cup:catch",
            "cartpole:balance",
            "cheetah:run",
            "finger:spin",
            "fish:swim",
            "hopper:hop",
            "humanoid:walk",
            "manipulator:bring_ball",
            "pendulum:swingup",
            "point_mass:easy",
            "reacher:easy",
            "stacker:stack_2",
            "swimmer:swimmer6",
            "walker:walk",
        )
    ),
)


class _Suite(gymnasium.Env[Any, Any]):
    """A task of dm_control's suite."""

    def __init__(self, domain: str, task: str) -> None:
        suite = importlib.import_module("dm_control.suite")
        self._task = suite.load(domain, task, task_kwargs={"random": 0})
        actions = self._task.action_spec()
        low, high = actions.minimum.astype(np.float32), actions.maximum.astype(np.float32)
        self.action_space = gymnasium.spaces.Box(low, high, actions.shape, np.float32)
        seen = _vector(self._task.reset())
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, seen.shape, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._task.task._random = np.random.RandomState(seed)
        return _vector(self._task.reset()), {}

    def step(self, action: Any) -> Any:
        found = self._task.step(action)
        return _vector(found), float(found.reward or 0), False, found.last(), {}


def _vector(step: Any) -> Any:
    return np.concatenate([np.ravel(values) for values in step.observation.values()]).astype(np.float32)


def make(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """An environment by its name.

    Raises:
        ImportError: What has it is not installed.
        gymnasium.error.Error: There is none, or something that it needs is not installed.
    """
    package, _, rest = name.partition(":")
    if package == "dm_control":
        return _Suite(*rest.split(":"))
    for module in _PACKAGES if name in FURTHER else ():
        try:
            gymnasium.register_envs(importlib.import_module(module))
        except ImportError:
            continue
    if package == "metaworld":
        return gymnasium.make("Meta-World/MT1", env_name=rest, seed=0)
    environment = gymnasium.make(name, **options)
    if name.startswith("MiniGrid"):
        environment = gymnasium.wrappers.FilterObservation(environment, ["image", "direction"])
    space = environment.observation_space
    if isinstance(space, gymnasium.spaces.Discrete) or (
        isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1
    ):
        return environment
    return gymnasium.wrappers.FlattenObservation(environment) if name in FURTHER else environment
