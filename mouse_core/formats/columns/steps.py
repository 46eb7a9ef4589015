"""Convert RLDS episodes, whose steps are iterated or stacked, to stacks of steps; and convert rows to RLDS steps.

An RLDS step holds an observation, and the action, reward and discount that follow it. A row of this library holds an
observation, and the action and reward that led to it. So writing RLDS moves actions and rewards one row back: the
actions 0, a, b of three rows become a, b, 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, placeholder
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.formats.columns.named import MISSING, is_single, travels_with_action
from mouse_core.nested import map_tree

FLAGS = ("is_first", "is_last", "is_terminal")
FEATURES = ("observation", "action", "reward", "discount", *FLAGS)
"""The features of every RLDS step."""

# Prefix of columns with features of an episode, repeated in every row of the episode.
_EPISODE = "metadata_episode_"


@dataclass(frozen=True)
class Stack:
    """Consecutive steps of one episode.

    Args:
        values: Features of the steps, each stacked to ``[n, ...]``; nested ones are mappings.
        count: Number of steps.
        episode: Number of the episode, from 0.
        first: Number of the first of these steps in its episode.
        last: Whether the episode ends with these steps.
        about: Features of the episode beside its steps.
    """

    values: Mapping[str, Any]
    count: int
    episode: int
    first: int
    last: bool
    about: Mapping[str, Any]


def episode_parts(episode: Any, where: str) -> tuple[Any, Mapping[str, Any]]:
    """Split an episode into its steps and its other features.

    Args:
        episode: A mapping with ``steps``, a mapping of stacked features, or an iterable of steps.
        where: Name of the episode for messages.

    Raises:
        DataError: The episode is none of these.
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
        steps, about = episode_parts(episode, where)
        if isinstance(steps, Mapping):
            stacked = as_arrays(steps)
            count = stacked_length(stacked, where)
            for first in range(0, count, size):
                stop = min(first + size, count)
                yield Stack(at(stacked, slice(first, stop)), stop - first, number, first, stop == count, about)
            continue
        first, remaining = 0, iterate_steps(steps, where)
        pending = list(islice(remaining, size))
        while pending:
            following = list(islice(remaining, 1))  # empty if the episode ends here
            yield Stack(stack(pending, where, first), len(pending), number, first, not following, about)
            first, pending = first + size, following and [*following, *islice(remaining, size - 1)]


def stack(steps: list[Any], where: str, first: int) -> Any:
    """Stack steps, or nested values of steps, leaf by leaf; ``first`` is the number of the first step, for errors."""
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
                f"{where}, step {index}: expected a value of shape {list(arrays[0].shape)}, as in the steps before, "
                f"found {list(array.shape)}"
            )
    return np.stack(arrays)


def leaf(value: Any) -> Any:
    """Convert a value of a step to an array; a text becomes an array of objects."""
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
    """Return one step, or a slice of steps, of stacked values."""
    return map_tree(lambda values: values[index], stacked)


def stacked_length(stacked: Any, where: str) -> int:
    """Return the number of steps of stacked features.

    Raises:
        DataError: Features have different lengths, or belong to a single step.
    """
    lengths: set[int] = set()
    map_tree(lambda values: lengths.add(len(values) if values.ndim else -1), stacked)
    if isinstance(stacked, Mapping) and getattr(stacked.get("is_first"), "ndim", 1) == 0:
        raise DataError(
            f"{where}: expected an iterable of steps, or features stacked to [n, ...], found features of a single step"
        )
    if len(lengths) != 1 or -1 in lengths:
        raise DataError(
            f"{where}: expected stacked features of one length, found lengths {sorted(lengths)} (-1: a single value)"
        )
    return lengths.pop()


def check_features(step: Mapping[str, Any], *, where: str, wanted: tuple[str, ...] = FEATURES) -> None:
    """Raise MissingFieldError, which names the missing features, if a step lacks any in ``wanted``."""
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


def rlds_steps(columns: Columns, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the rows of an episode to stacked RLDS steps and features of the episode; see ``write_rlds``."""
    rest = dict(columns)
    missing = rest.pop(MISSING, np.zeros(1, np.int64))
    observations = _pop_columns(rest, lambda name: name.split("_")[0] == "observation")
    actions = _pop_columns(rest, lambda name: name.split("_")[0] == "action")
    if not observations or not actions or "reward" not in rest:
        raise DataError(f"episode {number}: expected columns of observation, action and reward, found {list(rest)}")
    done, reward, discount = rest.pop("done"), rest.pop("reward"), rest.pop("metadata_discount", None)
    about = _pop_columns(rest, lambda name: _is_of_episode(name, rest[name]))
    extras = {name.removeprefix("metadata_"): values for name, values in rest.items()}
    of_transition = _pop_columns(extras, travels_with_action)
    step = np.arange(len(done))
    last = step == len(done) - 1
    steps: dict[str, Any] = {
        "observation": _without_prefix(observations, "observation"),
        "action": map_tree(_from_next_row, _without_prefix(actions, "action")),
        "reward": _from_next_row(reward),
        "discount": _discount_from_next_row(discount, done),
        **{name: _from_next_row(values) for name, values in of_transition.items()},
        **extras,
        "is_first": step == 0,
        "is_last": last,
        "is_terminal": last & (done == 1),
    }
    if missing[-1] and done[-1] != 1:
        # The last row has only the action and reward of the step before it; its own observation was not recorded. So
        # it is no step. (After a terminal step it stays, since RLDS ignores the observation of a terminal step.)
        steps = at(steps, slice(None, -1))
    return steps, {name.removeprefix(_EPISODE): values[0] for name, values in about.items()}


def _pop_columns(columns: Columns, wanted: Callable[[str], bool]) -> Columns:
    """Remove the columns whose names ``wanted`` accepts from ``columns``, and return them."""
    return {name: columns.pop(name) for name in [name for name in columns if wanted(name)]}


def _is_of_episode(name: str, values: npt.NDArray[Any]) -> bool:
    """Whether a column holds a feature of an episode: it has the prefix, and the same value in all rows."""
    if not name.startswith(_EPISODE) or name.removeprefix(_EPISODE) in ("", "steps", "observation", "is_first"):
        return False
    same = values[:1] == values
    if values.dtype.kind == "f":
        same = same | (np.isnan(values[:1]) & np.isnan(values))
    return bool(np.all(same))


def _from_next_row(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return for each row the value of the next row, and zeros for the last row: 1 2 3 becomes 2 3 0."""
    return np.concatenate([values[1:], placeholder(values)])


def _discount_from_next_row(discount: npt.NDArray[Any] | None, done: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    if discount is None:
        discount = np.where(done == 1, 0.0, 1.0).astype(np.float32)
    shifted = _from_next_row(discount)
    if done[-1] != 1:
        # The episode was truncated, so its last step gets the discount of the step before instead of 0.
        shifted[-1] = discount[-1] if len(done) > 1 else 1
    return shifted


def _without_prefix(columns: Columns, prefix: str) -> Any:
    """Return the only column, or a dict of the columns by their names without the prefix."""
    if is_single(columns, prefix):
        return next(iter(columns.values()))
    return {name.removeprefix(f"{prefix}_"): values for name, values in columns.items()}
