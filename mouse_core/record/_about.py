"""Metadata of environments for a store: ids, specs, spaces, versions, policies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mouse_core.about.dataset import About
from mouse_core.about.recording import Recording
from mouse_core.errors import ConfigError
from mouse_core.record._columns import Column, fields_of, number_of_actions
from mouse_core.spec import Alignment, check_dtype

Infos = Iterable[str] | Mapping[str, Any] | bool
"""Names of infos, or dtypes by name; True: all numbers and arrays that come with the first step."""

# Bounds are listed one by one up to so many; of more only the lowest and the highest are said.
_MOST_BOUNDS = 1024
# Simulators below environments: their versions count where they are loaded.
_SIMULATORS = ("mujoco", "Box2D", "ale_py", "dm_control", "pybullet", "brax")


def about_of(recording: Recording, observations: list[Column], actions: list[Column], alignment: Alignment) -> About:
    """The metadata of the rows that a recorder appends."""
    return About(
        alignment,
        environments=[] if recording.environment is None else [recording.environment],
        fields=fields_of(observations, actions),
        max_action_dim=number_of_actions(actions),
        recordings=[recording],
    )


def recording_of_gymnasium(env: Any, observation_space: Any, action_space: Any, policy: str | None) -> Recording:
    """Describe a recording from one gymnasium environment or a vector of them."""
    spec = env.spec
    return Recording(
        environment=None if spec is None else spec.id,
        policy=policy,
        spec=_spec(spec),
        observation_space=described_space(observation_space),
        action_space=described_space(action_space),
        versions=_versions("gymnasium", env.unwrapped),
    )


def recording_of_dm_env(env: Any, policy: str | None) -> Recording:
    """Describe a recording from a dm_env environment, named by its task or class, since it has no id."""
    task = getattr(env, "task", None)
    names = [getattr(env, "name", None), None if task is None else type(task).__name__, type(env).__name__]
    return Recording(
        environment=next(name for name in names if isinstance(name, str) and name),
        policy=policy,
        observation_space=_described_spec(env.observation_spec()),
        action_space=_described_spec(env.action_spec()),
        versions=_versions("dm_env", env, task),
    )


def named_policy(policy: Any) -> str | None:
    """The name of a policy: a text itself, the module and name of a function, or the class of an object."""
    if policy is None or isinstance(policy, str):
        return policy
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"


def _spec(spec: Any) -> dict[str, Any]:
    """The spec of an environment as JSON, with the ``repr`` of other values."""
    if spec is None:
        return {}
    try:
        said = json.loads(spec.to_json())
        json.dumps(said, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # kwargs with functions or arrays in them
        said = {"id": spec.id, "kwargs": {name: repr(value)[:200] for name, value in spec.kwargs.items()}}
    return dict(said)


def _versions(interface: str, *parts: Any) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    packages = {cls.__module__.split(".")[0] for part in parts if part is not None for cls in type(part).__mro__}
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in (interface, "numpy", "mouse-data", *sorted(packages), *_SIMULATORS):
        if name in _SIMULATORS and name not in sys.modules:
            continue
        try:
            found.setdefault(name, version(name))
        except (PackageNotFoundError, ValueError):
            continue  # a module that no distribution is called after
    return found


# ---------------------------------------------------------------------- spaces and specs as JSON


def described_space(space: Any) -> dict[str, Any]:
    """Return a gymnasium space as JSON: ``{"type": "Box", "dtype": "float32", "shape": [4], "low": ...}``.

    Bounds that are equal everywhere become one number. An infinite bound is the text "inf" or "-inf".
    """
    kind = type(space).__name__
    said: dict[str, Any] = {"type": kind}
    if kind in ("Dict", "Tuple"):
        inside = space.spaces
        parts = {str(name): described_space(part) for name, part in inside.items()} if kind == "Dict" else None
        return said | {"subspaces": parts if parts is not None else [described_space(part) for part in inside]}
    if kind == "Discrete":
        return said | {"n": int(space.n), "start": int(space.start)}
    if kind == "Text":
        return said | {"min_length": int(space.min_length), "max_length": int(space.max_length)}
    said |= {"dtype": str(space.dtype), "shape": [int(size) for size in space.shape]}
    if kind == "Box":
        said |= {"low": _bound(space.low, np.min), "high": _bound(space.high, np.max)}
    if kind == "MultiDiscrete":
        said |= {"nvec": _bound(space.nvec, np.max)}
    return said


def _described_spec(spec: Any) -> dict[str, Any]:
    """A spec of dm_env as JSON has it."""
    if isinstance(spec, Mapping):
        return {"type": "Dict", "subspaces": {str(name): _described_spec(part) for name, part in spec.items()}}
    if isinstance(spec, list | tuple):
        return {"type": "Tuple", "subspaces": [_described_spec(part) for part in spec]}
    said: dict[str, Any] = {"type": type(spec).__name__, "dtype": np.dtype(spec.dtype).name}
    said["shape"] = [int(size) for size in spec.shape]
    for name, bound, outermost in (("minimum", "low", np.min), ("maximum", "high", np.max)):
        if getattr(spec, name, None) is not None:
            said[bound] = _bound(np.asarray(getattr(spec, name)), outermost)
    return said


def _bound(values: Any, outermost: Any) -> Any:
    """Bounds as one number where all are equal, else as lists; of very many only the outermost."""
    if not values.size:
        return []
    if values.size > _MOST_BOUNDS or (values == values.flat[0]).all():
        values = outermost(values)
    return _plain(values.tolist())


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def check_infos(infos: Infos) -> dict[str, np.dtype[Any] | None] | None:
    """Names of infos with the dtypes that they are kept in, or ConfigError; None: all that come with the first step."""
    if infos is True:
        return None
    if isinstance(infos, str | bool) or not isinstance(infos, Iterable):
        raise ConfigError(
            f"infos: expected names of infos, found {infos!r}; write a list, such as infos=['x_position', 'episode/r']"
        )
    names = list(infos)
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ConfigError(f"infos: expected different names of infos, found {names!r:.200}")
    dtypes = infos if isinstance(infos, Mapping) else dict.fromkeys(names)
    return {
        name: None if dtype is None else check_dtype(dtype, where=f"infos[{name!r}]") for name, dtype in dtypes.items()
    }


def numbers_in(info: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """The names of numbers, and arrays of numbers, in an info, with the kinds of their dtypes, such as "f".

    Of a vector of environments the masks are left out.
    """
    for name, value in info.items():
        if not isinstance(name, str) or not name or name.startswith("_"):
            continue
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{within}{name}/")
        elif isinstance(value, bool | int | float | np.generic | np.ndarray):
            kind = np.asarray(value).dtype.kind
            if kind in "biuf":
                yield within + name, kind
