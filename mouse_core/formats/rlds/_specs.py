"""Trajectories, what they hold, and whether they are what an observer expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mouse_core.errors import SchemaError
from mouse_core.formats.columns.steps import leaf
from mouse_core.spec import FieldSpec

FIRST, MID, LAST = 0, 1, 2
"""Types of steps."""


class Trajectory(NamedTuple):
    """A step and what it leads to; every field is an array, a scalar, or a mapping of them.

    It has the fields and methods of TF-Agents' trajectories, and what takes those takes these.

    Args:
        step_type: 0 where an episode begins, 2 where it ends, else 1.
        observation: What was seen at the step.
        action: What was done on seeing it.
        policy_info: What the policy said of it, or ``()``.
        next_step_type: The type of the step after it.
        reward: What the action brought.
        discount: What future rewards are multiplied with; 0 at a terminal step.
    """

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any

    def is_first(self) -> Any:
        """Whether an episode begins with the step."""
        return self.step_type == FIRST

    def is_mid(self) -> Any:
        """Whether neither the step nor the one after it begins or ends an episode."""
        return (self.step_type == MID) & (self.next_step_type == MID)

    def is_last(self) -> Any:
        """Whether the step after it ends the episode."""
        return self.next_step_type == LAST

    def is_boundary(self) -> Any:
        """Whether the step itself ends the episode, so that what follows is of another one."""
        return self.step_type == LAST

    def replace(self, **fields: Any) -> Trajectory:
        """The same with other values for some fields."""
        return self._replace(**fields)


def to_tensor_specs(spec: Trajectory, *, outer_dims: Sequence[int | None] = ()) -> Any:
    """What ``create_trajectory_data_spec`` says, as TensorFlow's specs, for TF-Agents and Reverb.

    Args:
        spec: A trajectory of ``FieldSpec``, nested or not; ``replace(policy_info=...)`` gives it what a
            ``policy_info_fn`` adds.
        outer_dims: Axes in front of every shape: ``(None,)`` for ``reverb.Table(signature=...)``, whose items are
            sequences; none for ``ReverbReplayBuffer(data_spec=...)``.

    Returns:
        A trajectory of ``tf.TensorSpec``. Where TF-Agents is installed it is one of TF-Agents, with the names and
        bounds that TF-Agents gives ``step_type`` and ``discount``, and equal to what its own function makes of the same
        data.

    Raises:
        ImportError: TensorFlow is not installed.
        SchemaError: Something that is no ``FieldSpec``.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError("to_tensor_specs needs TensorFlow: pip install tensorflow") from error
    try:
        from tf_agents.specs import BoundedTensorSpec
        from tf_agents.trajectories import Trajectory as TFTrajectory
    except ImportError:
        BoundedTensorSpec = TFTrajectory = None

    def convert(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {name: convert(item, f"{path}/{name}") for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(convert(item, f"{path}/{index}") for index, item in enumerate(value))
        if not isinstance(value, FieldSpec):
            raise SchemaError(f"{path}: expected a FieldSpec, found {value!r:.100}")
        dtype = tf.string if value.dtype.kind == "O" else tf.as_dtype(value.dtype)
        shape = (*outer_dims, *value.shape)
        if path == "discount" and BoundedTensorSpec is not None:
            return BoundedTensorSpec(shape, dtype, minimum=0.0, maximum=1.0, name="discount")
        return tf.TensorSpec(shape, dtype, name="step_type" if path in ("step_type", "next_step_type") else None)

    made = {name: convert(value, name) for name, value in spec._asdict().items()}
    return (TFTrajectory or Trajectory)(**made)


def spec_of(step: Mapping[str, Any], info: Any) -> Trajectory:
    """A trajectory of ``FieldSpec``, for a step and what a policy says of it."""

    def spec(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: spec(f"{name}/{key}", item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(spec(f"{name}/{index}", item) for index, item in enumerate(value))
        array = leaf(value)
        return FieldSpec(name, array.dtype, array.shape)

    return Trajectory(
        step_type=FieldSpec("step_type", np.dtype(np.int32), ()),
        observation=spec("observation", step["observation"]),
        action=spec("action", step["action"]),
        policy_info=spec("policy_info", info),
        next_step_type=FieldSpec("next_step_type", np.dtype(np.int32), ()),
        reward=spec("reward", step["reward"]),
        discount=spec("discount", step["discount"]),
    )


def expected_by(observer: Any) -> tuple[Any, int]:
    """What an observer says that it expects, or None; and how many axes its shapes have in front."""
    ask = getattr(observer, "get_table_signature", None)
    if callable(ask):
        return ask(), 1
    for name in ("data_spec", "spec"):
        spec = getattr(observer, name, None)
        if spec is not None and (hasattr(spec, "_fields") or isinstance(spec, Mapping)):
            return spec, 0
    return None, 0


def _fields(value: Any) -> Mapping[str, Any]:
    """What is in a mapping or a named tuple, by name; nothing where it is neither."""
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    return value if isinstance(value, Mapping) else {}


def _is_nothing(value: Any) -> bool:
    return isinstance(value, tuple | list) and not len(value)


def check_trajectory(expected: Any, found: Trajectory, *, outer: int, where: str, free_info: bool) -> None:
    """Raise SchemaError where a trajectory is not what an observer expects.

    Args:
        expected: Nested specs.
        found: The trajectory.
        outer: How many axes the specs have in front.
        where: What a message calls the trajectory.
        free_info: Whether ``policy_info`` may be anything where ``()`` is expected.
    """
    if free_info and _is_nothing(_fields(expected).get("policy_info")):
        found = found.replace(policy_info=())
    _compare(expected, found, "", outer=outer, where=where)


def _compare(expected: Any, found: Any, path: str, *, outer: int, where: str) -> None:
    """Raise SchemaError where values differ from nested specs in structure, dtype or shape.

    Args:
        expected: Anything with ``dtype`` and ``shape``, in mappings and tuples. A size of None is any.
        found: Values.
        path: Of both within the trajectory.
        outer: How many axes the specs have in front.
        where: What a message calls the trajectory.
    """
    if hasattr(expected, "_asdict") or isinstance(expected, Mapping):
        wanted, has = _fields(expected), _fields(found)
        if set(wanted) != set(has):
            raise _differs(path, str(sorted(wanted)), found, where)
        for name, spec in wanted.items():
            _compare(spec, has[name], f"{path}/{name}" if path else str(name), outer=outer, where=where)
    elif not hasattr(expected, "dtype") and isinstance(expected, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(expected):
            raise _differs(path, f"{len(expected)} values", found, where)
        for index, spec in enumerate(expected):
            _compare(spec, found[index], f"{path}/{index}", outer=outer, where=where)
    else:
        _compare_leaf(expected, found, path, outer=outer, where=where)


def _compare_leaf(expected: Any, found: Any, path: str, *, outer: int, where: str) -> None:
    dtype = np.dtype(getattr(expected.dtype, "as_numpy_dtype", expected.dtype))
    shape = _shape(expected, path, outer)
    wanted = f"{dtype} {'of any shape' if shape is None else list(shape)}"
    if isinstance(found, Mapping | tuple):
        raise _differs(path, wanted, found, where)
    array = leaf(found)
    fits = shape is None or len(shape) == array.ndim
    fits = fits and all(size in (None, has) for size, has in zip(shape or (), array.shape, strict=False))
    if dtype != array.dtype or not fits:
        raise _differs(path, wanted, array, where)


def _shape(spec: Any, path: str, outer: int) -> tuple[int | None, ...] | None:
    """The shape of one value, or None where it may be any."""
    if getattr(spec.shape, "rank", 0) is None:
        return None
    shape = tuple(spec.shape)
    if len(shape) < outer:
        raise SchemaError(
            f"observer: {path}: expected a table signature whose shapes begin with the axis of the sequence, found "
            f"{list(shape)}; to_tensor_specs(spec, outer_dims=(None,)) makes one"
        )
    return shape[outer:]


def _differs(path: str, wanted: str, found: Any, where: str) -> SchemaError:
    if isinstance(found, Mapping) or hasattr(found, "_asdict"):
        shown = str(sorted(_fields(found)))
    elif isinstance(found, tuple | list):
        shown = f"{len(found)} values"
    else:
        array = leaf(found)
        shown = f"{array.dtype} {list(array.shape)}"
    return SchemaError(f"observer: {path or 'trajectory'}: expected {wanted}, found {shown} in {where}")
