"""Converts episodes of RLDS to rows, rows to RLDS, and RLDS to trajectories of TF-Agents (pairs of adjacent steps).

A step holds an observation, the action taken on it, and the reward of the action; the last step of an episode holds
only an observation. N steps of RLDS become N rows, and each action moves to the next row. In many datasets of Open X,
the last step has an action and a reward too, but the observation after them is missing. For such data, use
``last_step="transition"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import check_choice
from mouse_core.columns.episode_rows import Columns, done_codes, placeholder
from mouse_core.errors import ConfigError, DataError, EpisodeError, MissingFieldError, SchemaError
from mouse_core.files.reading import reading
from mouse_core.formats import columns
from mouse_core.formats.base import BATCH_ROWS, RowStream, episodes_of, in_stored_layout
from mouse_core.metadata import DatasetMetadata
from mouse_core.nested import flatten, map_tree, path_of, structure_of, unflatten
from mouse_core.spec import FieldSpec

FLAGS = ("is_first", "is_last", "is_terminal")
FEATURES = ("observation", "action", "reward", "discount", *FLAGS)
"""Names of the features that every RLDS step has."""

# Prefix of columns with features of an episode, which are repeated in every row of the episode.
_EPISODE = "metadata_episode_"


@dataclass(frozen=True)
class Stack:
    """Consecutive steps of one episode.

    Args:
        values: Features of the steps, each stacked to ``[n, ...]``; nested features are mappings.
        count: Number of steps.
        episode: Index of the episode.
        first: The index in the episode of the first of these steps.
        last: Whether these steps include the last step of the episode.
        of_episode: Features of the episode, except its steps.
    """

    values: Mapping[str, Any]
    count: int
    episode: int
    first: int
    last: bool
    of_episode: Mapping[str, Any]


def episode_parts(episode: Any, where: str) -> tuple[Any, Mapping[str, Any]]:
    """Split an episode into its steps and its further features.

    Args:
        episode: A mapping with ``steps``, a mapping of stacked features, or an iterable of steps.
        where: Name of the episode for error messages.

    Raises:
        DataError: The episode has another form.
    """
    if isinstance(episode, Mapping):
        if "steps" in episode:
            return episode["steps"], {name: value for name, value in episode.items() if name != "steps"}
        if "is_first" in episode or "observation" in episode:
            return episode, {}
        raise DataError(f"{where}: expected 'steps' among its features, found {list(episode)}")
    if isinstance(episode, Iterable) and not isinstance(episode, str | bytes):
        return episode, {}
    raise DataError(f"{where}: expected a mapping with 'steps', found {type(episode).__name__}")


def iterate_steps(steps: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield steps one by one, from an iterable of steps or from stacked features."""
    if isinstance(steps, Mapping):
        stacked = as_arrays(steps)
        for index in range(stacked_length(stacked, where)):
            yield at(stacked, index)
        return
    for index, step in enumerate(steps):
        if not isinstance(step, Mapping):
            raise DataError(f"{where}, step {index}: expected a mapping, found {type(step).__name__}")
        yield step


def stacks(episodes: Iterable[Any], size: int, path: str) -> Iterator[Stack]:
    """Yield the steps of episodes in stacks of at most ``size`` steps; an episode without steps yields no stack."""
    for number, episode in enumerate(episodes):
        where = f"{path}, episode {number}"
        steps, of_episode = episode_parts(episode, where)
        if isinstance(steps, Mapping):
            stacked = as_arrays(steps)
            count = stacked_length(stacked, where)
            for first in range(0, count, size):
                stop = min(first + size, count)
                yield Stack(at(stacked, slice(first, stop)), stop - first, number, first, stop == count, of_episode)
            continue
        first, remaining = 0, iterate_steps(steps, where)
        pending = list(islice(remaining, size))
        while pending:
            following = list(islice(remaining, 1))  # empty if the episode ends here
            yield Stack(stack(pending, where, first), len(pending), number, first, not following, of_episode)
            first, pending = first + size, following and [*following, *islice(remaining, size - 1)]


def stack(steps: list[Any], where: str, first: int) -> Any:
    """Stack steps, or nested values of steps, leaf by leaf.

    ``first`` is the index of the first step, for error messages.
    """
    if isinstance(steps[0], Mapping):
        names = list(steps[0])
        for index, step in enumerate(steps, first):
            if not isinstance(step, Mapping) or step.keys() != steps[0].keys():
                found = list(step) if isinstance(step, Mapping) else type(step).__name__
                raise MissingFieldError(f"{where}, step {index}: expected features {names}, found {found}")
        return {name: stack([step[name] for step in steps], where, first) for name in steps[0]}
    if isinstance(steps[0], tuple):
        return tuple(stack(list(items), where, first) for items in zip(*steps, strict=True))
    arrays = [leaf(value) for value in steps]
    for index, array in enumerate(arrays, first):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{where}, step {index}: expected a value of shape {list(arrays[0].shape)}, as in the earlier steps, "
                f"found {list(array.shape)}"
            )
    return np.stack(arrays)


def leaf(value: Any) -> Any:
    """Convert a value of a step to an array; texts become arrays of objects."""
    if isinstance(value, str | bytes):
        array = np.empty((), dtype=object)
        array[()] = value
        return array
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


def as_arrays(values: Any) -> Any:
    """Convert each leaf of nested values to an array."""
    return map_tree(leaf, values)


def at(stacked: Any, index: int | slice) -> Any:
    """Return the stacked values of a step, or of a slice of steps."""
    return map_tree(lambda values: values[index], stacked)


def stacked_length(stacked: Any, where: str) -> int:
    """Return the number of steps of stacked features.

    Raises:
        DataError: Features have different lengths, or are not stacked.
    """
    lengths: set[int] = set()
    map_tree(lambda values: lengths.add(len(values) if values.ndim else -1), stacked)
    if isinstance(stacked, Mapping) and getattr(stacked.get("is_first"), "ndim", 1) == 0:
        raise DataError(
            f"{where}: expected an iterable of steps, or features stacked to [n, ...], found features of a single step"
        )
    if len(lengths) != 1 or -1 in lengths:
        raise DataError(
            f"{where}: expected stacked features of equal length, found lengths {sorted(lengths)} (-1: a single value)"
        )
    return lengths.pop()


def check_features(step: Mapping[str, Any], *, where: str, wanted: tuple[str, ...] = FEATURES) -> None:
    """Raise MissingFieldError if a step lacks a feature in ``wanted``; the message names the missing features."""
    missing = [name for name in wanted if name not in step]
    if missing:
        raise MissingFieldError(f"{where}: expected features {list(wanted)}, found no {missing} among {list(step)}")


def flag(value: Any, *, where: str) -> bool:
    """Convert a flag of a step to a bool."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise DataError(f"{where}: expected a single true or false, found {array!r:.80}")
    return bool(array.reshape(())[()])


def check_episodes(episodes: Any) -> None:
    """Raise ConfigError if ``episodes`` cannot be iterated over."""
    if isinstance(episodes, str | bytes | Mapping) or not isinstance(episodes, Iterable):
        raise ConfigError(f"expected an iterable of RLDS episodes, found {type(episodes).__name__}")


def _steps_of(rows: Columns, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the rows of an episode to stacked RLDS steps, and to features of the episode; see ``write_rlds``."""
    rest = dict(rows)
    missing = rest.pop(columns.MISSING, np.zeros(1, np.int64))
    observations = _pop_columns(rest, lambda name: columns.belongs_to(name, "observation"))
    actions = _pop_columns(rest, lambda name: columns.belongs_to(name, "action"))
    if not observations or not actions or "reward" not in rest:
        raise DataError(f"episode {number}: expected columns of observation, action and reward, found {list(rest)}")
    done, reward, discount = rest.pop("done"), rest.pop("reward"), rest.pop("metadata_discount", None)
    of_episode = _pop_columns(rest, lambda name: _is_of_episode(name, rest[name]))
    extras = {name.removeprefix("metadata_"): values for name, values in rest.items()}
    of_transition = _pop_columns(extras, columns.travels_with_action)
    step = np.arange(len(done))
    last = step == len(done) - 1
    steps: dict[str, Any] = {
        "observation": columns.nested(observations, "observation"),
        "action": map_tree(_from_next_row, columns.nested(actions, "action")),
        "reward": _from_next_row(reward),
        "discount": _discount_from_next_row(discount, done),
        **{name: _from_next_row(values) for name, values in of_transition.items()},
        **extras,
        "is_first": step == 0,
        "is_last": last,
        "is_terminal": last & (done == 1),
    }
    if missing[-1] and done[-1] != 1:
        # The observation of the last row was not recorded; the row has only the action and reward of the step before
        # it. So it is no step. (After a terminal step it remains, since RLDS ignores the observation of a terminal
        # step.)
        steps = at(steps, slice(None, -1))
    return steps, {name.removeprefix(_EPISODE): values[0] for name, values in of_episode.items()}


def _pop_columns(held: Columns, wanted: Callable[[str], bool]) -> Columns:
    """Remove from ``held`` all columns whose names ``wanted`` accepts, and return the removed columns."""
    return {name: held.pop(name) for name in [name for name in held if wanted(name)]}


def _is_of_episode(name: str, values: npt.NDArray[Any]) -> bool:
    """Whether a column is a feature of an episode: its name has the prefix, and all rows have the same value."""
    if not name.startswith(_EPISODE) or name.removeprefix(_EPISODE) in ("", "steps", "observation", "is_first"):
        return False
    same = values[:1] == values
    if values.dtype.kind == "f":
        same = same | (np.isnan(values[:1]) & np.isnan(values))
    return bool(np.all(same))


def _from_next_row(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return, for each row, the value of the next row, and zeros for the last row. For example, 1 2 3 becomes 2 3 0."""
    return np.concatenate([values[1:], placeholder(values)])


def _discount_from_next_row(discount: npt.NDArray[Any] | None, done: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    if discount is None:
        discount = np.where(done == 1, 0.0, 1.0).astype(np.float32)
    shifted = _from_next_row(discount)
    if done[-1] != 1:
        # The episode was truncated, so its last step gets the discount of the previous step instead of 0.
        shifted[-1] = discount[-1] if len(done) > 1 else 1
    return shifted


__all__ = [
    "Trajectory",
    "convert_rlds_to_trajectories",
    "create_trajectory_data_spec",
    "push_rlds_to_reverb",
    "read_rlds",
    "to_tensor_specs",
    "write_rlds",
]


def read_rlds(
    episodes: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    final: str | None = None,
    last_step: str = "observation",
    batch_rows: int = BATCH_ROWS,
    path: str = "RLDS episodes",
) -> RowStream:
    """Read episodes of RLDS as rows.

    ``done`` is 1 at a last step that is terminal, and 2 at other last steps. Observations become the column
    ``observation``, or columns ``observation.<key>`` if observations are nested. Actions become ``action`` or
    ``action.<key>``. ``discount`` becomes ``metadata_discount``, other features of steps become ``metadata_<key>``, and
    features of an episode become ``metadata_episode_<key>`` in each row of the episode. Features whose names begin with
    ``action``, ``policy`` or ``log_prob`` move to the next row with the action; all other features stay in the row of
    their step.

    Args:
        episodes: An iterable of episodes that can be iterated over repeatedly, such as a list; or a function that
            returns an iterable of episodes, such as a generator function. Episodes have the form that
            ``convert_rlds_to_trajectories`` accepts.
        final: How to store the last action of an episode whose steps end without ``is_last``. The observation after
            this action is missing: "drop" omits the action, and "mark" adds a row of zeros for the observation. By
            default such an episode raises an error.
        last_step: What the last step of an episode contains. With "observation", as RLDS defines it, the action and
            reward of the last step have no meaning and are omitted. With "transition", as in many datasets of Open X
            and in DROID, this action and reward are valid, and the observation after them is missing (see ``final``).
        batch_rows: Largest number of rows of a batch.
        path: Name of the source for error messages.

    Raises:
        ConfigError: ``episodes`` is not iterable, ``final`` or ``last_step`` is unknown, or ``last_step`` is
            "transition" without ``final``.
        DataError: There are no steps, or steps have values of different shapes or types. Raised while iterating:
            EpisodeError if steps of an episode contradict each other, and ConfigError if its last observation is
            missing.
        MissingFieldError: Steps lack required features.
    """
    check_last_step(last_step, final, where=path)
    columns.check_batch_rows(batch_rows)
    given = episodes if callable(episodes) else lambda: _again(episodes, path)
    piece = next(stacks(given(), batch_rows, path), None)
    pieces = [] if piece is None else [piece]
    first = first_batch(iter(pieces), final=final, path=path, last_step=last_step)
    notes = last_step_notes(iter(pieces)) if last_step == "observation" else ()

    def batches() -> Iterator[pa.RecordBatch]:
        for values, where in stack_rows(stacks(given(), batch_rows, path), final=final, path=path, last_step=last_step):
            yield columns.to_batch(values, first.schema, where=where)

    return RowStream(
        path,
        "rlds",
        first.schema,
        batches,
        notes=notes,
        metadata=in_stored_layout(DatasetMetadata("arrived"), first.schema),
    )


def check_last_step(last_step: str, final: str | None, *, where: str) -> None:
    """Raise ConfigError if an option is unknown, or if ``last_step`` is "transition" without ``final``."""
    check_choice("last_step", last_step, ("observation", "transition"))
    columns.check_final(final, where=where, needed=last_step == "transition")


def last_step_notes(pieces: Iterator[Stack]) -> tuple[str, ...]:
    """Return a note if the first episode's last step has an action and a reward, which are undefined in RLDS.

    Args:
        pieces: Pieces of episodes with flags, actions and rewards; only pieces of the first episode are used.
    """
    for piece in pieces:
        if piece.last:
            last = {name: np.asarray(value)[-1] for name, value in columns.flatten("", piece.values).items()}
            brought = [name for name in last if name == "_reward" or f"{name}_".startswith("_action_")]
            holds = any(last[name].dtype.kind in "biuf" and np.any(last[name]) for name in brought)
            if not holds or not np.any(last["_is_last"]):
                return ()
            return (
                f"The last step of the first episode holds the reward {np.sum(last['_reward']):g} and an "
                "action. RLDS defines neither of them, so both are left out in every episode. In many datasets of Open "
                "X and in DROID both are valid: pass last_step='transition' (--last-step) to keep them.",
            )
    return ()


def _again(episodes: Iterable[Any], path: str) -> Iterator[Any]:
    """Yield episodes. Raise ConfigError if the episodes, or the steps of an episode, are a generator, because a
    generator can be read only once.
    """
    check_episodes(episodes)
    hint = "can be read only once; pass lists, or a function that makes the episodes"
    if isinstance(episodes, Iterator):
        raise ConfigError(f"{path}: a generator {hint}")
    for number, episode in enumerate(episodes):
        if isinstance(episode.get("steps") if isinstance(episode, Mapping) else episode, Iterator):
            raise ConfigError(f"{path}, episode {number}: its steps are a generator, which {hint}")
        yield episode


def first_batch(
    pieces: Iterator[Stack], *, final: str | None, path: str, last_step: str = "observation"
) -> pa.RecordBatch:
    """Return the first rows, from which the schema of all rows is derived.

    Raises:
        DataError: There are no rows.
    """
    # Reading the rows later checks whether episodes are complete.
    rows = stack_rows(pieces, final=final or "mark", path=path, last_step=last_step)
    first, where = next(rows, (None, path))
    if first is None:
        raise DataError(f"{path}: expected episodes with steps, found none")
    if final != "mark":
        first.pop(columns.MISSING, None)
    return columns.to_batch(first, None, where=where)


def stack_rows(
    pieces: Iterator[Stack], *, final: str | None, path: str, last_step: str = "observation"
) -> Iterator[tuple[Columns, str]]:
    """Yield, for each piece of an episode, its rows and its name for error messages.

    Args:
        pieces: The pieces, from ``stacks``.
        final, last_step: See ``read_rlds``.
        path: Name of the source for error messages.
    """
    before: Columns = {}
    for piece in pieces:
        where = f"{path}, episode {piece.episode}"
        with reading(path, at=f"episode {piece.episode}"):
            check_features(
                piece.values,
                where=f"{where}, step {piece.first}",
                wanted=tuple(name for name in FEATURES if name != "discount"),
            )
            flags = _flags(piece, where)
            staying, leaving = _split(piece)
            arriving = columns.one_later(leaving, before, flags["is_first"])
            if piece.first == 0 and "metadata_discount" in arriving:
                arriving["metadata_discount"][0] = 1
            done = done_codes(flags["is_terminal"] & flags["is_last"], flags["is_last"])
            joined = arriving | {"done": done} | staying
            joined["episode_step"] = piece.first + np.arange(piece.count)
            if final == "mark":
                joined[columns.MISSING] = np.zeros(piece.count, np.int64)
            if piece.last and (last_step == "transition" or not flags["is_last"][-1]):
                columns.check_final(final, where=where)
                joined = _ended(joined, before, staying, final)
            # The step number of the row before, if the next piece belongs to the same episode.
            before |= {name: values[-1:][: not piece.last] for name, values in staying.items() if _is_clock(name)}
        yield columns.ordered(joined), where


def _ended(rows: Columns, before: Columns, staying: Columns, final: str | None) -> Columns:
    """Return the last rows of an episode in which the observation after the last action is missing."""
    code = int(rows["done"][-1])  # done code of the last step; 0 if ``is_last`` is not set
    if final == "drop":
        rows["done"][-1] = 2 if len(rows["done"]) > 1 or rows["episode_step"][0] else 0
        return rows
    rows["done"][-1] = 0
    more = dict(before)
    for name, values in staying.items():
        more[name] = values[-1:] if name.startswith("metadata_") else placeholder(values)
        if _is_clock(name):  # the episode continues unchanged
            latest = np.concatenate([before.get(name, values[:0]), values])[-2:]
            more[name] = latest[-1:] + np.diff(latest) if len(latest) == 2 else latest
    more |= {"done": np.array([code]), "episode_step": rows["episode_step"][-1:] + 1}
    more[columns.MISSING] = np.ones(1, np.int64)
    return {name: np.concatenate([values, more[name]]) for name, values in rows.items()}


def _is_clock(name: str) -> bool:
    return name.startswith("metadata_") and name.endswith("timestamp")


def _flags(piece: Stack, where: str) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the flags of a piece.

    Raise EpisodeError unless ``is_first`` is only at the start, and ``is_last`` and ``is_terminal`` are only at the
    end.
    """
    flags = {name: np.asarray(piece.values[name]).reshape(piece.count, -1) for name in FLAGS}
    for name, values in flags.items():
        if values.shape[1] != 1 or values.dtype.kind not in "biuf":
            raise DataError(f"{where}: {name}: expected one boolean per step, found {values.dtype}")
        flags[name] = values[:, 0].astype(bool)
    first = np.zeros(piece.count, bool)
    first[0] = piece.first == 0
    end = np.zeros(piece.count, bool)
    end[-1] = piece.last
    for wrong, problem in (
        (flags["is_first"] != first, "expected is_first at the first step and nowhere else"),
        (flags["is_last"] & ~end, "expected is_last at the last step only"),
        (flags["is_terminal"] & ~flags["is_last"], "expected is_terminal only where is_last is set"),
    ):
        if wrong.any():
            step = piece.first + int(wrong.argmax())
            raise EpisodeError(f"{where}, step {step}: {problem}", episode=piece.episode, step=step)
    return flags


def _split(piece: Stack) -> tuple[Columns, Columns]:
    """Return the columns that stay in the row of their step, and the columns whose values move to the next row."""
    staying: Columns = columns.named("observation", piece.values["observation"])
    leaving: Columns = columns.named("action", piece.values["action"])
    leaving |= {"reward": _one_each(piece.values["reward"], "reward")}
    if "discount" in piece.values:
        leaving["metadata_discount"] = _one_each(piece.values["discount"], "discount")
    for key, value in piece.values.items():
        if key not in FEATURES:
            (leaving if columns.travels_with_action(str(key)) else staying).update(
                columns.flatten(f"metadata_{key}", value)
            )
    for name, value in columns.flatten("metadata_episode", dict(piece.of_episode)).items():
        array = np.asarray(value)
        if array.dtype.kind in "SUO" and not array.ndim:
            staying[name] = np.full(piece.count, array.item(), object)
        else:
            staying[name] = np.broadcast_to(array, (piece.count, *array.shape))
    return staying, leaving


def _one_each(value: Any, name: str) -> npt.NDArray[Any]:
    values = np.asarray(value)
    if values.shape not in ((len(values),), (len(values), 1)) or values.dtype.kind not in "biuf":
        raise DataError(f"{name}: expected one number per step, found {values.dtype} {list(values.shape[1:])}")
    return values.reshape(len(values))


def write_rlds(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield rows as episodes of RLDS. At most one episode is in memory at a time.

    ``metadata_discount`` becomes ``discount``. Without this column, the discount is 0 at the action before a terminal
    step, else 1. Rows have no action after the last step of an episode, so the action, the reward and all metadata of
    the action are zeros in the last step. The discount of a last step is 0 if the step is terminal. If the step is
    truncated, its discount equals the discount of the step before, or 1 if there is no step before. RLDS has no
    unfinished episodes: an episode whose last row has ``done`` 0 is written as truncated.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset`` or a ``pyarrow.Table``.

    Yields:
        Episodes ``{"steps": [...]}``. A step is a mapping of NumPy values. Columns ``observation.<key>`` become a
            mapping with the keys ``<key>``. ``metadata_<key>`` becomes ``<key>``. If all rows of an episode have the
            same value, ``metadata_episode_<key>`` becomes ``<key>`` of the episode.

    Raises:
        ConfigError, SchemaError, DataError: Reading ``rows`` failed, or rows are marked as having no observation.
    """
    for number, episode in enumerate(episodes_of(rows)):
        stacked, of_episode = _steps_of(episode, number)
        yield {"steps": [at(stacked, index) for index in range(len(stacked["is_first"]))], **of_episode}


# ---------------------------------------------------------------------- trajectories of TF-Agents


FIRST, MID, LAST = 0, 1, 2
"""Types of steps: first, middle and last step of an episode."""


class Trajectory(NamedTuple):
    """A step and the type of the next step. Each field is an array, a scalar, or a mapping of arrays and scalars.

    The class has the fields and methods of TF-Agents' trajectories.

    Args:
        step_type: 0 at the beginning of an episode, 2 at the end, else 1.
        observation: The observation at the step.
        action: The action that follows the observation.
        policy_info: Further outputs of the policy for the action, or ``()``.
        next_step_type: The type of the next step.
        reward: The reward of the action.
        discount: Factor by which later rewards are multiplied; 0 at a terminal step.
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
        """Whether this step and the next step are both in the middle of an episode."""
        return (self.step_type == MID) & (self.next_step_type == MID)

    def is_last(self) -> Any:
        """Whether the next step ends the episode."""
        return self.next_step_type == LAST

    def is_boundary(self) -> Any:
        """Whether the step ends the episode, so that the next step belongs to another episode."""
        return self.step_type == LAST

    def replace(self, **fields: Any) -> Trajectory:
        """Return a copy with other values for some fields."""
        return self._replace(**fields)


def to_tensor_specs(spec: Trajectory, *, outer_dims: Sequence[int | None] = ()) -> Any:
    """Convert the result of ``create_trajectory_data_spec`` to TensorFlow's specs, for TF-Agents and Reverb.

    Args:
        spec: A trajectory of ``FieldSpec``, nested or not; ``replace(policy_info=...)`` adds the specs of a
            ``policy_info_fn``.
        outer_dims: Sizes of axes that are added before every shape. Use ``(None,)`` for
            ``reverb.Table(signature=...)``, whose items are sequences, and ``()`` for
            ``ReverbReplayBuffer(data_spec=...)``.

    Returns:
        A trajectory of ``tf.TensorSpec``. If TF-Agents is installed, the result equals the result of TF-Agents'
            function for the same data, including names, and bounds of ``step_type`` and ``discount``.

    Raises:
        ImportError: TensorFlow is not installed.
        SchemaError: A value is not a ``FieldSpec``.
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
    """Replace every leaf of a tree by ``change(path, leaf)``, and return the new tree."""
    leaves = {key: change("/".join(map(str, path_of(key))), leaf) for key, leaf in flatten(tree).items()}
    return dict(unflatten(structure_of(tree), leaves))


def spec_of(step: Mapping[str, Any], info: Any) -> Trajectory:
    """Return a trajectory of ``FieldSpec`` for a step and the ``policy_info`` of a policy."""

    def spec(path: str, value: Any) -> FieldSpec:
        array = leaf(value)
        return FieldSpec(path, array.dtype, array.shape)

    given = {name: step[name] for name in ("observation", "action", "reward", "discount")}
    types = {"step_type": np.int32(MID), "next_step_type": np.int32(MID)}
    return Trajectory(**_mapped(spec, {**given, **types, "policy_info": info}))


def expected_by(observer: Any) -> tuple[Any, int]:
    """Return the spec that an observer declares (or None), and the number of leading axes in its shapes."""
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
        expected: Nested specs: values with ``dtype`` and ``shape``; a size of None matches any size.
        found: The trajectory.
        outer: Number of leading axes of the specs.
        where: Name of the trajectory for error messages.
        free_info: Whether any ``policy_info`` is accepted if ``()`` is expected.
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
    """Return the shape of a value without leading axes; None stands for any shape."""
    if getattr(spec.shape, "rank", 0) is None:
        return None
    shape = tuple(spec.shape)
    if len(shape) < outer:
        raise SchemaError(
            f"observer: {path}: expected a table signature whose shapes begin with the axis of the sequence, found "
            f"{list(shape)}; to_tensor_specs(spec, outer_dims=(None,)) makes such a signature"
        )
    return shape[outer:]


PolicyInfo = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


def create_trajectory_data_spec(rlds_data: Iterable[Any]) -> Trajectory:
    """Return the data spec of the trajectories of RLDS episodes.

    Args:
        rlds_data: An iterable of episodes; the first episode of a generator is consumed.

    Returns:
        A ``Trajectory`` with a ``FieldSpec`` (name, dtype, shape) in place of every value, and ``()`` as
        ``policy_info``.

    Raises:
        DataError: There are no steps. The error is also a ValueError.
        MissingFieldError: The first step lacks features; the message names them. The error is also a ValueError.
    """
    first, _ = _first_step(rlds_data)
    return spec_of(first, ())


def convert_rlds_to_trajectories(
    rlds_data: Iterable[Any], policy_info_fn: PolicyInfo | None = None
) -> Iterator[Trajectory]:
    """Convert RLDS episodes to trajectories: pairs of adjacent steps, across the ends of episodes.

    The steps of all episodes form one sequence. A step of zeros with type 0 (first) is appended, so there are as many
    trajectories as steps. A step has type 0 if ``is_first`` is set, else 2 if ``is_last`` is set, else 1. ``discount``
    is 0.0 at a step that is last and terminal, else the given discount.

    Args:
        rlds_data: An iterable of episodes. An episode is a mapping with ``steps``: an iterable of steps, or features
            stacked to ``[n, ...]``. A step has ``observation``, ``action``, ``reward``, ``discount``, ``is_first``,
            ``is_last`` and ``is_terminal``; observations and actions can be nested.
        policy_info_fn: A function that takes a step and the next step, and returns ``policy_info``; by default ``()``.

    Returns:
        An iterator over trajectories, which reads an episode when its trajectories are requested.

    Raises:
        DataError: There are no steps. Raised at the call.
        MissingFieldError: A step lacks features. For the first step, the error is raised at the call.
        EpisodeError: A terminal step is not a last step, the step before a first step is not a last step, or the step
            after a last step is not a first step. All trajectories before the faulty pair were yielded.

    Examples:
        >>> step = {"observation": 0.5, "action": 1, "reward": 1.0, "discount": 1.0, "is_terminal": False}
        >>> steps = [step | {"is_first": True, "is_last": False}, step | {"is_first": False, "is_last": True}]
        >>> pairs = convert_rlds_to_trajectories([{"steps": steps}])
        >>> [(int(pair.step_type), int(pair.next_step_type)) for pair in pairs]
        [(0, 2), (2, 0)]
    """
    _, steps = _first_step(rlds_data)
    return _pairs(steps, policy_info_fn)


def push_rlds_to_reverb(
    rlds_data: Iterable[Any],
    observer: Callable[[Trajectory], Any],
    policy_info_fn: PolicyInfo | None = None,
) -> int:
    """Convert RLDS episodes to trajectories, and call an observer with each trajectory.

    Args:
        rlds_data: An iterable of episodes, as in ``convert_rlds_to_trajectories``.
        observer: Any callable that takes a trajectory. The observer can declare a spec: by a method
            ``get_table_signature()``, like Reverb observers of TF-Agents (with the sequence axis in front), or by an
            attribute ``data_spec`` or ``spec``. If there is a spec, the structure, dtypes and shapes of every
            trajectory are compared with the spec before the call. A Reverb table without a signature accepts any
            trajectory.
        policy_info_fn: As in ``convert_rlds_to_trajectories``. An observer that expects ``()`` as ``policy_info`` still
            receives the result of the function, as with TF-Agents.

    Returns:
        The number of trajectories.

    Raises:
        SchemaError: A trajectory differs from the observer's spec; the message names the field. The error is also a
            ValueError. The observer has received all earlier trajectories.
        DataError, MissingFieldError, EpisodeError: An error of ``convert_rlds_to_trajectories``. The observer has
            received all trajectories before the faulty pair.
    """
    _, steps = _first_step(rlds_data)
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


def _first_step(rlds_data: Iterable[Any]) -> tuple[Mapping[str, Any], Iterator[Step]]:
    """Return the first step, and an iterator over all steps, including the first."""
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
        (terminal and not last, "expected is_last at a terminal step, found is_terminal without is_last"),
        (next_first and not last, "expected is_last, because the next step has is_first, found is_last not set"),
        (last and not next_first, "expected is_first at the step after a last step, found is_first not set"),
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
