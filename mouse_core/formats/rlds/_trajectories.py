"""RLDS episodes as trajectories: pairs of adjacent steps, as users of TF-Agents know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, EpisodeError, SchemaError
from mouse_core.formats.columns.steps import (
    FLAGS,
    as_arrays,
    check_episodes,
    check_features,
    episode_parts,
    flag,
    iterate_steps,
    leaf,
)
from mouse_core.nested import flatten, map_tree, path_of, structure_of, unflatten
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
        """Return a copy with other values for some fields."""
        return self._replace(**fields)


def to_tensor_specs(spec: Trajectory, *, outer_dims: Sequence[int | None] = ()) -> Any:
    """Convert the result of ``create_trajectory_data_spec`` to TensorFlow's specs, for TF-Agents and Reverb.

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
        SchemaError: A value is no ``FieldSpec``.
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

    def tensor_spec(path: str, value: Any) -> Any:
        if not isinstance(value, FieldSpec):
            raise SchemaError(f"{path}: expected a FieldSpec, found {value!r:.100}")
        dtype = tf.string if value.dtype.kind == "O" else tf.as_dtype(value.dtype)
        shape = (*outer_dims, *value.shape)
        if path == "discount" and BoundedTensorSpec is not None:
            return BoundedTensorSpec(shape, dtype, minimum=0.0, maximum=1.0, name="discount")
        return tf.TensorSpec(shape, dtype, name="step_type" if path in ("step_type", "next_step_type") else None)

    return (TFTrajectory or Trajectory)(**_mapped(tensor_spec, spec._asdict()))


def _mapped(change: Callable[[str, Any], Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with every leaf changed; ``change`` is given its path, such as "observation/arm/0", and the leaf."""
    leaves = {key: change("/".join(map(str, path_of(key))), leaf) for key, leaf in flatten(tree).items()}
    return dict(unflatten(structure_of(tree), leaves))


def spec_of(step: Mapping[str, Any], info: Any) -> Trajectory:
    """A trajectory of ``FieldSpec``, for a step and what a policy says of it."""

    def spec(path: str, value: Any) -> FieldSpec:
        array = leaf(value)
        return FieldSpec(path, array.dtype, array.shape)

    given = {name: step[name] for name in ("observation", "action", "reward", "discount")}
    types = {"step_type": np.int32(MID), "next_step_type": np.int32(MID)}
    return Trajectory(**_mapped(spec, {**given, **types, "policy_info": info}))


def expected_by(observer: Any) -> tuple[Any, int]:
    """Return the spec that an observer declares, or None, and the number of leading axes in its shapes."""
    ask = getattr(observer, "get_table_signature", None)
    if callable(ask):
        return ask(), 1
    for name in ("data_spec", "spec"):
        spec = getattr(observer, name, None)
        if spec is not None and (hasattr(spec, "_fields") or isinstance(spec, Mapping)):
            return spec, 0
    return None, 0


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the contents of a mapping, named tuple, tuple or list by name or position; None for a leaf."""
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, tuple | list) and not hasattr(value, "dtype"):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else None


def _shown(value: Any) -> str:
    """The structure of a value in words."""
    if isinstance(value, Mapping) or hasattr(value, "_asdict"):
        return str(sorted(_parts(value) or ()))
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    array = leaf(value)
    return f"{array.dtype} {list(array.shape)}"


def check_trajectory(expected: Any, found: Trajectory, *, outer: int, where: str, free_info: bool) -> None:
    """Raise SchemaError where a trajectory is not what an observer expects.

    Args:
        expected: Nested specs.
        found: The trajectory.
        outer: How many axes the specs have in front.
        where: What a message calls the trajectory.
        free_info: Whether ``policy_info`` may be anything where ``()`` is expected.
    """
    if free_info and _parts((_parts(expected) or {}).get("policy_info")) == {}:
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
    wanted = _parts(expected)
    if wanted is None:
        _compare_leaf(expected, found, path, outer=outer, where=where)
        return
    has = _parts(found)
    if has is None or has.keys() != wanted.keys():
        raise _differs(path, _shown(expected), found, where)
    for name, spec in wanted.items():
        _compare(spec, has[name], f"{path}/{name}" if path else str(name), outer=outer, where=where)


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
    return SchemaError(f"observer: {path or 'trajectory'}: expected {wanted}, found {_shown(found)} in {where}")


PolicyInfo = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


def create_trajectory_data_spec(rlds_data: Iterable[Any]) -> Trajectory:
    """Return the data spec of the trajectories of RLDS episodes.

    Args:
        rlds_data: An iterable of episodes; of a generator the first episode is used up.

    Returns:
        A ``Trajectory`` with a ``FieldSpec`` (name, dtype, shape) in place of every value, and ``()`` as
        ``policy_info``.

    Raises:
        DataError: There are no steps. The error is also a ValueError.
        MissingFieldError: The first step lacks features; the message names them. It is a ValueError too.
    """
    first, _ = _peek(rlds_data)
    return spec_of(first, ())


def convert_rlds_to_trajectories(
    rlds_data: Iterable[Any], policy_info_fn: PolicyInfo | None = None
) -> Iterator[Trajectory]:
    """RLDS episodes as trajectories: pairs of adjacent steps, over the ends of episodes.

    The steps of all episodes are one sequence, and one step of type first, of zeros, comes after them, so there are as
    many trajectories as steps. A step is of type 0 where ``is_first`` is set, else 2 where ``is_last`` is set, else 1.
    An episode of a single step gives types (2, 2). ``discount`` is 0.0 at a step that is last and terminal, else as
    given.

    Args:
        rlds_data: An iterable of episodes. An episode is a mapping with ``steps``: an iterable of steps, or features
            stacked to ``[n, ...]``. A step has ``observation``, ``action``, ``reward``, ``discount``, ``is_first``,
            ``is_last`` and ``is_terminal``; observations and actions may be nested.
        policy_info_fn: Gives ``policy_info`` for a step and the step after it; by default ``()``.

    Returns:
        An iterator, which takes the episodes as they are asked for.

    Raises:
        DataError: There are no steps (at once).
        MissingFieldError: A step lacks features (at once for the first step).
        EpisodeError: A terminal step that is not last, a step that is not last before a first one, or a last one that
            is not before a first one. All trajectories before that pair have been given by then.

    Examples:
        >>> step = {"observation": 0.5, "action": 1, "reward": 1.0, "discount": 1.0, "is_terminal": False}
        >>> steps = [step | {"is_first": True, "is_last": False}, step | {"is_first": False, "is_last": True}]
        >>> pairs = convert_rlds_to_trajectories([{"steps": steps}])
        >>> [(int(pair.step_type), int(pair.next_step_type)) for pair in pairs]
        [(0, 2), (2, 0)]
    """
    _, steps = _peek(rlds_data)
    return _pairs(steps, policy_info_fn)


def push_rlds_to_reverb(
    rlds_data: Iterable[Any],
    observer: Callable[[Trajectory], Any],
    policy_info_fn: PolicyInfo | None = None,
) -> int:
    """Hand the trajectories of RLDS episodes to an observer, one by one.

    Args:
        rlds_data: As in ``convert_rlds_to_trajectories``.
        observer: Any callable that takes a trajectory. Where it says what it expects, by ``get_table_signature()`` as
            TF-Agents' Reverb observers do (its first axis is that of the sequence), or in an attribute ``data_spec`` or
            ``spec``, every trajectory is compared with that before it is handed over: structure, dtypes and shapes. A
            Reverb table without a signature takes anything.
        policy_info_fn: As in ``convert_rlds_to_trajectories``. Where ``()`` is expected as ``policy_info``, what the
            function gives is handed over all the same, as TF-Agents does.

    Returns:
        How many trajectories were handed over.

    Raises:
        SchemaError: A trajectory does not match what the observer expects; the message names the field. It is a
            ValueError. It and what comes after it was not handed over: where it is the first one, nothing was.
        DataError, MissingFieldError, EpisodeError: As ``convert_rlds_to_trajectories``; what came before the faulty
            pair has been handed over, and nothing after it.
    """
    _, steps = _peek(rlds_data)
    expected, outer = expected_by(observer)
    pushed = 0
    for trajectory in _pairs(steps, policy_info_fn):
        if expected is not None:
            free = policy_info_fn is not None
            check_trajectory(expected, trajectory, outer=outer, where=f"trajectory {pushed}", free_info=free)
        observer(trajectory)
        pushed += 1
    return pushed


Step = tuple[Mapping[str, Any], int, int]


def _flattened(rlds_data: Iterable[Any]) -> Iterator[Step]:
    for number, episode in enumerate(rlds_data):
        where = f"episode {number}"
        steps, _ = episode_parts(episode, where)
        for index, step in enumerate(iterate_steps(steps, where)):
            check_features(step, where=f"{where}, step {index}")
            yield step, number, index


def _peek(rlds_data: Iterable[Any]) -> tuple[Mapping[str, Any], Iterator[Step]]:
    """The first step, and all steps."""
    check_episodes(rlds_data)
    steps = _flattened(rlds_data)
    first = next(steps, None)
    if first is None:
        raise DataError("rlds_data: expected episodes with steps, found none")
    return first[0], chain([first], steps)


def _pairs(steps: Iterator[Step], policy_info_fn: PolicyInfo | None) -> Iterator[Trajectory]:
    current = next(steps)
    for following in steps:
        yield _pair(current, following[0], policy_info_fn)
        current = following
    padding = dict(map_tree(_zeros, current[0])) | {"is_first": np.True_}
    yield _pair(current, padding, policy_info_fn)


def _pair(current: Step, following: Mapping[str, Any], policy_info_fn: PolicyInfo | None) -> Trajectory:
    step, episode, number = current
    where = f"episode {episode}, step {number}"
    first, last, terminal = (flag(step[name], where=f"{where}, {name}") for name in FLAGS)
    next_first = flag(following["is_first"], where=f"the step after {where}, is_first")
    next_last = flag(following["is_last"], where=f"the step after {where}, is_last")
    for wrong, problem in (
        (terminal and not last, "expected a terminal step to be the last one, found is_terminal without is_last"),
        (next_first and not last, "expected the last step before a first one, found is_last not set"),
        (last and not next_first, "expected a first step after the last one, found is_first not set"),
    ):
        if wrong:
            raise EpisodeError(f"{where}: {problem}", episode=episode, step=number)
    step_type = _type(first, last)
    next_type = _type(next_first, next_last)
    if step_type == FIRST and next_type == FIRST:
        step_type = next_type = LAST
    discount = leaf(step["discount"])
    return Trajectory(
        step_type=np.int32(step_type),
        observation=as_arrays(step["observation"]),
        action=as_arrays(step["action"]),
        policy_info=() if policy_info_fn is None else policy_info_fn(step, following),
        next_step_type=np.int32(next_type),
        reward=as_arrays(step["reward"]),
        discount=np.zeros_like(discount) if terminal and last else discount,
    )


def _type(first: bool, last: bool) -> int:
    return FIRST if first else LAST if last else MID


def _zeros(value: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = leaf(value)
    return np.full(array.shape, "", dtype=object) if array.dtype.kind == "O" else np.zeros_like(array)
