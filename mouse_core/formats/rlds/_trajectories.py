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
    """A step and the type of its successor; every field is an array, a scalar, or a mapping of them.

    It has the fields and methods of TF-Agents' trajectories.

    Args:
        step_type: 0 at the beginning of an episode, 2 at the end, else 1.
        observation: The observation at the step.
        action: The action that follows the observation.
        policy_info: Values of the policy for the action, or ``()``.
        next_step_type: The type of the next step.
        reward: The reward of the action.
        discount: Factor of future rewards; 0 at a terminal step.
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
        """Whether neither the step nor the next one begins or ends an episode."""
        return (self.step_type == MID) & (self.next_step_type == MID)

    def is_last(self) -> Any:
        """Whether the next step ends the episode."""
        return self.next_step_type == LAST

    def is_boundary(self) -> Any:
        """Whether the step ends the episode, so that the next step belongs to another one."""
        return self.step_type == LAST

    def replace(self, **fields: Any) -> Trajectory:
        """Return a copy with other values for some fields."""
        return self._replace(**fields)


def to_tensor_specs(spec: Trajectory, *, outer_dims: Sequence[int | None] = ()) -> Any:
    """Convert the result of ``create_trajectory_data_spec`` to TensorFlow's specs, for TF-Agents and Reverb.

    Args:
        spec: A trajectory of ``FieldSpec``, nested or not; ``replace(policy_info=...)`` adds the specs of a
            ``policy_info_fn``.
        outer_dims: Axes in front of every shape: ``(None,)`` for ``reverb.Table(signature=...)``, whose items are
            sequences; none for ``ReverbReplayBuffer(data_spec=...)``.

    Returns:
        A trajectory of ``tf.TensorSpec``. With TF-Agents installed, it equals the result of TF-Agents' own function for
        the same data, with its names and bounds of ``step_type`` and ``discount``.

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
    """Return the tree with every leaf changed; ``change`` takes the path of a leaf and the leaf."""
    leaves = {key: change("/".join(map(str, path_of(key))), leaf) for key, leaf in flatten(tree).items()}
    return dict(unflatten(structure_of(tree), leaves))


def spec_of(step: Mapping[str, Any], info: Any) -> Trajectory:
    """Return a trajectory of ``FieldSpec``, for a step and values of a policy."""

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


def _leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested values by path, such as "observation/arm/0"."""
    return {"/".join(map(str, path_of(key))): value for key, value in flatten(tree).items()}


def check_trajectory(expected: Any, found: Trajectory, *, outer: int, where: str, free_info: bool) -> None:
    """Raise SchemaError if a trajectory differs from an observer's spec.

    Args:
        expected: Nested specs: values with ``dtype`` and ``shape``; a size of None is any.
        found: The trajectory.
        outer: Number of leading axes of the specs.
        where: Name of the trajectory for messages.
        free_info: Whether ``policy_info`` may hold any values if ``()`` is expected.
    """
    wanted, has = _leaves(expected), _leaves(found)
    if free_info and not any(path.startswith("policy_info") for path in wanted):
        has = {path: value for path, value in has.items() if not path.startswith("policy_info")}
    if wanted.keys() != has.keys():
        lacking, others = sorted(wanted.keys() - has.keys()), sorted(has.keys() - wanted.keys())
        raise SchemaError(f"observer: expected {lacking}, found {others or 'nothing'} instead in {where}")
    for path, spec in wanted.items():
        dtype = np.dtype(getattr(spec.dtype, "as_numpy_dtype", spec.dtype))
        shape, array = _shape(spec, path, outer), leaf(has[path])
        fits = shape is None or len(shape) == array.ndim
        fits = fits and all(size in (None, one) for size, one in zip(shape or (), array.shape, strict=False))
        if dtype != array.dtype or not fits:
            sizes = "of any shape" if shape is None else list(shape)
            raise SchemaError(
                f"observer: {path}: expected {dtype} {sizes}, found {array.dtype} {list(array.shape)} in {where}"
            )


def _shape(spec: Any, path: str, outer: int) -> tuple[int | None, ...] | None:
    """Return the shape of one value; None: any shape."""
    if getattr(spec.shape, "rank", 0) is None:
        return None
    shape = tuple(spec.shape)
    if len(shape) < outer:
        raise SchemaError(
            f"observer: {path}: expected a table signature whose shapes begin with the axis of the sequence, found "
            f"{list(shape)}; to_tensor_specs(spec, outer_dims=(None,)) makes one"
        )
    return shape[outer:]


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
    """Convert RLDS episodes to trajectories: pairs of adjacent steps, across the ends of episodes.

    The steps of all episodes are one sequence, and one step of type first, of zeros, comes after them, so there are as
    many trajectories as steps. A step is of type 0 where ``is_first`` is set, else 2 where ``is_last`` is set, else 1.
    An episode of a single step gives types (2, 2). ``discount`` is 0.0 at a step that is last and terminal, else as
    given.

    Args:
        rlds_data: An iterable of episodes. An episode is a mapping with ``steps``: an iterable of steps, or features
            stacked to ``[n, ...]``. A step has ``observation``, ``action``, ``reward``, ``discount``, ``is_first``,
            ``is_last`` and ``is_terminal``; observations and actions may be nested.
        policy_info_fn: Returns ``policy_info`` for a step and the next step; by default ``()``.

    Returns:
        An iterator, which reads episodes when their trajectories are requested.

    Raises:
        DataError: There are no steps (at once).
        MissingFieldError: A step lacks features (at once for the first step).
        EpisodeError: A terminal step that is not last, a step that is not last before a first one, or a last one that
            is not before a first one. All trajectories before that pair were yielded.

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
    """Pass the trajectories of RLDS episodes to an observer, one by one.

    Args:
        rlds_data: As in ``convert_rlds_to_trajectories``.
        observer: Any callable that takes a trajectory. It may declare a spec, by ``get_table_signature()`` as Reverb
            observers of TF-Agents do (with the axis of the sequence in front), or in an attribute ``data_spec`` or
            ``spec``. Then structure, dtypes and shapes of every trajectory are compared with it first. A Reverb table
            without a signature takes anything.
        policy_info_fn: As in ``convert_rlds_to_trajectories``. An observer that expects ``()`` as ``policy_info`` gets
            the result of the function all the same, as with TF-Agents.

    Returns:
        The number of trajectories.

    Raises:
        SchemaError: A trajectory differs from the observer's spec; the message names the field. It is a ValueError. The
            observer got all trajectories before this one.
        DataError, MissingFieldError, EpisodeError: As ``convert_rlds_to_trajectories``. The observer got all
            trajectories before the faulty pair.
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
    """Return the first step, and all steps."""
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
