"""Columns for the observations and actions of an environment, and the metadata of a recording.

Columns have the names that ``DatasetStore.add_episode`` and the readers of formats use, so recorded rows equal rows
that are read from Minari or RLDS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core.dtypes import convert, refuse_hidden
from mouse_core.errors import ConfigError, DataError
from mouse_core.metadata import DatasetMetadata, Recording
from mouse_core.nested import path_of
from mouse_core.spec import Alignment, Bounded, Categorical, Composite, NonTensor, check_choice, check_dtype
from mouse_core.store.fields import array_type, fields_of_steps

Infos = Iterable[str] | Mapping[str, Any]
"""The type of ``infos``: the names of infos, or a mapping from names to dtypes."""

# Largest number of bounds that are listed individually.
_MOST_BOUNDS = 1024
# Simulators that environments use; their versions are recorded if they are loaded.
_SIMULATORS = ("mujoco", "Box2D", "ale_py", "dm_control", "pybullet", "brax")


def metadata_of(
    recording: Recording, observations: list[Column], actions: list[Column], alignment: Alignment
) -> DatasetMetadata:
    """Return the metadata of the rows that a recorder appends."""
    columns = {one.name: one for one in (*observations, *actions)}
    types = {name: one.arrow_type for name, one in columns.items() if one.kind != "text"}
    return DatasetMetadata(
        alignment,
        environments=[] if recording.environment is None else [recording.environment],
        fields=fields_of_steps(types, columns),
        max_action_dim=number_of_actions(actions),
        recordings=[recording],
        layout="stored",
    )


def recording_of_gymnasium(env: Any, observation: Any, action: Any, policy: str | None) -> Recording:
    """Return the description of a recording from a gymnasium environment or a vector of environments.

    Args:
        env: The environment.
        observation, action: The specs of an observation and an action of one environment.
        policy: The name of the policy.
    """
    spec = env.spec
    return Recording(
        environment=None if spec is None else spec.id,
        policy=policy,
        spec=_spec(spec),
        observation_space=_described(observation),
        action_space=_described(action),
        versions=_versions("gymnasium", env.unwrapped),
    )


def recording_of_dm_env(env: Any, observation: Any, action: Any, policy: str | None) -> Recording:
    """Return the description of a recording from a dm_env environment. The environment is named by its task or class,
    because dm_env environments have no id.
    """
    task = getattr(env, "task", None)
    names = [getattr(env, "name", None), None if task is None else type(task).__name__, type(env).__name__]
    return Recording(
        environment=next(name for name in names if isinstance(name, str) and name),
        policy=policy,
        observation_space=_described(observation),
        action_space=_described(action),
        versions=_versions("dm_env", env, task),
    )


def _described(spec: Any) -> dict[str, Any]:
    """Return a spec as JSON. If a leaf has more than 1024 different bounds, the JSON contains only its lowest and its
    highest bound.
    """
    leaves = {}
    for key, one in spec.leaves().items() if isinstance(spec, Composite) else [((), spec)]:
        many = isinstance(one, Bounded) and one.limits is None and one.low.size > _MOST_BOUNDS
        leaves[key] = replace(one, low=one.low.min(), high=one.high.max()) if many else one
    described: dict[str, Any] = (spec.with_fields(leaves) if isinstance(spec, Composite) else leaves[()]).to_json()
    return described


def named_policy(policy: Any) -> str | None:
    """Return the name of a policy: the text itself if a text is passed, the module and name of a function, or the class
    of another object.
    """
    if policy is None or isinstance(policy, str):
        return policy
    named = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{named.__module__}.{named.__qualname__}"


def _spec(spec: Any) -> dict[str, Any]:
    """Return the spec of an environment as JSON; values that JSON lacks are replaced by their ``repr``."""
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
            continue  # no distribution has the module's name
    return found


def check_infos(infos: Infos) -> dict[str, np.dtype[Any] | None]:
    """Check ``infos``, and return the dtype of each info by name; raises ConfigError."""
    if isinstance(infos, str) or not isinstance(infos, Iterable):
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


Row = dict[str, Any]

IMAGES = ("raw", "png")
# Integers up to this bound count as codes of discrete actions.
_MOST_CODES = 1 << 20


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether a shape is the shape of an image: ``[H, W]``, or ``[H, W, C]`` with C up to 4."""
    return len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)


@dataclass(frozen=True)
class Column:
    """The column for one value (a number, an array, a text) of an observation or an action.

    Args:
        name: The name of the column.
        keys: The nested keys of the value, outermost first; empty if the observation is a single value.
        spec: The spec of the value.
        convert: A function that returns the value to store. The result is a copy, because environments reuse their
            arrays.
        as_png: Whether the values are images to store as PNG.
    """

    name: str
    keys: tuple[str, ...]
    spec: Any
    convert: Callable[[Any], Any] = str
    as_png: bool = False

    @property
    def kind(self) -> str:
        """The kind of the value: "text", "whole" for a single integer, or "array" for numbers of any shape."""
        if isinstance(self.spec, NonTensor):
            return "text"
        return "whole" if not self.spec.shape and self.spec.dtype.kind in "iu" else "array"

    @property
    def is_image(self) -> bool:
        """Whether the value is an image: uint8 ``[H, W]``, or ``[H, W, C]`` with C up to 4."""
        return self.spec.dtype == np.uint8 and is_picture(self.spec.shape)

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of a column of numbers or images."""
        if self.as_png:
            return pa.struct({"bytes": pa.binary(), "path": pa.string()})
        return array_type(self.spec.dtype, self.spec.shape)

    def __str__(self) -> str:
        if self.kind == "array":
            return f"{self.spec.dtype} {list(self.spec.shape)}"
        return "a whole number" if self.kind == "whole" else "a text"


def observation_columns(spec: Any, images: str, *, declared: bool = False) -> list[Column]:
    """Return the columns of observations: ``observation``, or ``observation.<key>`` for nested observations.

    Args:
        spec: The spec of an observation.
        images: "raw" or "png".
        declared: Whether arrays are converted to the dtypes of ``spec``; otherwise arrays keep their dtype.
    """
    check_choice("images", images, IMAGES)
    return _columns("observation", spec, declared=declared, png=images == "png")


def action_columns(spec: Any) -> list[Column]:
    """Return the columns of actions in the dtypes of ``spec``: ``action``, or ``action.<key>`` for nested actions."""
    return _columns("action", spec, declared=True, png=False)


def _columns(whole: str, spec: Any, *, declared: bool, png: bool) -> list[Column]:
    """Return a column for each leaf of a spec."""
    leaves = spec.leaves() if isinstance(spec, Composite) else {(): spec}
    columns: dict[str, Column] = {}
    for key, leaf in leaves.items():
        keys = tuple(map(str, path_of(key))) if key else ()
        one = Column(".".join((whole, *keys)), keys, leaf)
        if one.name in columns:
            raise ConfigError(f"{one.name}: when keys are joined by '.', two parts of a step get this name")
        make = _as_png if png and one.is_image else _conversion(one, leaf.dtype if declared else None)
        columns[one.name] = replace(one, convert=make, as_png=make is _as_png)
    return [*columns.values()]


def placeholder(columns: list[Column]) -> Row:
    """Return the placeholder action of the first row of an episode: zeros, or empty text."""
    return {one.name: one.convert("" if one.kind == "text" else one.spec.zeros()) for one in columns}


def number_of_actions(actions: list[Column]) -> int | None:
    """Return the number of discrete actions if actions are integers from 0 to a known bound; else None."""
    if len(actions) != 1 or actions[0].name != "action" or actions[0].kind != "whole":
        return None
    spec = actions[0].spec
    if isinstance(spec, Categorical):
        return spec.n
    is_code = isinstance(spec, Bounded) and 0 <= int(spec.low) <= int(spec.high) < _MOST_CODES
    return int(spec.high) + 1 if is_code else None


# ---------------------------------------------------------------------- values


def _whole(value: Any, *, dtype: np.dtype[Any]) -> Any:
    return dtype.type(index(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value))


def _as_png(value: Any) -> dict[str, Any]:
    from mouse_core.images import encode_png

    refuse_hidden(value)
    return {"bytes": encode_png(value), "path": None}


def _as_array(value: Any, *, dtype: Any, shape: tuple[int, ...], floats: Any) -> Any:
    """Copy an array to a dtype and a shape. If ``dtype`` is None, the dtype is kept; but if ``floats`` is given,
    integers are converted to the dtype ``floats``.
    """
    refuse_hidden(value)
    made = np.array(value)
    if dtype is not None:
        made = convert(made, dtype)
    elif floats is not None and made.dtype.kind in "biu":
        made = convert(made, floats)  # some environments return zeros without a dtype at reset
    return made if made.shape == shape else made.reshape(shape)


def _conversion(column: Column, dtype: Any) -> Callable[[Any], Any]:
    """Return the function that converts and copies a value of a spec."""
    if column.kind != "array":
        return partial(_whole, dtype=column.spec.dtype) if column.kind == "whole" else str
    spec = column.spec
    return partial(_as_array, dtype=dtype, shape=spec.shape, floats=spec.dtype if spec.dtype.kind == "f" else None)


def values_of(columns: list[Column], value: Any, number: int | None = None) -> Row:
    """Convert an observation or action to a dict from column names to values.

    Args:
        columns: The columns.
        value: An observation or action, or the stacked observations or actions of several environments, as in
            gymnasium.
        number: The index of the environment in a stack.

    Raises:
        DataError: A value does not fit its column.
    """
    row: Row = {}
    for column in columns:
        try:
            part = value
            for key in column.keys:
                part = part[int(key)] if isinstance(part, tuple | list) else part[key]
            row[column.name] = column.convert(part if number is None else part[number])
        except (TypeError, ValueError, OverflowError, KeyError, IndexError) as error:
            found = f"{value!r:.80} ({error})"
            raise DataError(f"column {column.name!r}: expected {column}, found {found}") from error
    return row
