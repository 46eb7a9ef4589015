"""Converts an episode from a simulator to columns of a store.

The keys of nested observations become parts of column names: ``{"image": ..., "arm": {"angle": ...}}`` becomes the
columns ``observation.image`` and ``observation.arm.angle``; a single array becomes the column ``observation``. Actions
and infos become the columns ``action...`` and ``info...``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import fixed_shape
from mouse_core.columns.appended import as_array
from mouse_core.columns.episode_rows import Columns, agent_codes, done_codes, episode_rows
from mouse_core.dtypes import convert, is_hidden
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.metadata import DatasetMetadata
from mouse_core.nested import flatten, object_array, path_of, stack
from mouse_core.spec import Alignment
from mouse_core.store.fields import array_type, fields_of_steps

PARTS = ("observations", "actions", "rewards", "terminated", "truncated", "infos")
# Minari's names of two parts.
_FLAGS = {"terminations": "terminated", "truncations": "truncated"}
_RESERVED = ("observation", "action", "reward", "done", "agent_done", "episode_step", "info")


def parts_of(episode: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of an episode by name (see ``PARTS``), and the columns that have only one value for all rows of
    the episode.

    Args:
        episode: A mapping of parts, an object with parts as attributes, or None.
        given: Further parts of the episode, by name.

    Raises:
        ConfigError: ``episode`` is not an episode, or a part is given twice.
        MissingFieldError: Observations, actions or rewards are missing.
    """
    if isinstance(episode, Mapping):
        found = dict(episode)
    else:
        found = {name: getattr(episode, name) for name in (*PARTS, *_FLAGS) if hasattr(episode, name)}
        if episode is not None and not found:
            raise ConfigError(
                f"add_episode: expected a mapping or an object with {list(PARTS)}, found {type(episode).__name__}"
                + (
                    "; add_episodes takes several"
                    if isinstance(episode, Iterable) and not isinstance(episode, str)
                    else ""
                )
            )
    pairs = [(_FLAGS.get(name, name), value) for part in (found, given) for name, value in part.items()]
    parts = dict(pairs)
    if len(parts) < len(pairs):
        raise ConfigError(f"add_episode: expected each part once, found {[name for name, _ in pairs]}")
    missing = [name for name in PARTS[:3] if parts.get(name) is None]
    if missing:
        raise MissingFieldError(
            f"add_episode: expected observations, actions and rewards, found {list(parts)}: {missing} missing"
        )
    return parts


def episode_columns(
    parts: Mapping[str, Any], alignment: Alignment | None, declared: Mapping[str, pa.Field]
) -> tuple[dict[str, Any], Alignment, frozenset[str]]:
    """Convert the parts of an episode to columns of rows.

    Args:
        parts: See ``parts_of``.
        alignment: The alignment of the rows. If None, the alignment is "arrived" if the observations include the
            episode's final observation, else "outgoing".
        declared: The declared columns of the store. Values of declared columns can have any type.

    Returns:
        A tuple of three: a dict from the name of each column to an array ``[rows, ...]`` or a list of texts; the
        alignment; and the names of the additional columns whose values belong to transitions.

    Raises:
        DataError: Parts contradict each other, or values are neither numbers nor texts.
        SchemaError: Two parts of the episode have the same column name.
    """
    rewards = _rewards(parts["rewards"], declared.get("reward"))
    count = len(rewards)
    observations = _leaves("observations", parts["observations"], declared)
    sizes = {_shown("observations", name): len(values) for name, values in observations.items()}
    length = next(iter(sizes.values()))
    if not count or length not in (count, count + 1) or len({*sizes.values()}) > 1:
        raise DataError(
            "observations and rewards: expected as many observations as rewards, or one more with the final "
            f"observation, and equally many in all parts, found {sizes} and {count} rewards"
            if count
            else "rewards: expected at least one transition, found none"
        )
    if alignment == "arrived" and length == count:
        raise DataError(
            f"observations: expected {count + 1} rows for {count} rewards in a store of alignment 'arrived', "
            f"found {count}: the final observation of the episode is missing; a store of alignment 'outgoing' does "
            "not need the final observation"
        )
    alignment = alignment or ("arrived" if length > count else "outgoing")
    transitions = _leaves("actions", parts["actions"], declared)
    _check_rows("actions", transitions, {count}, count)
    given = parts.get("infos")
    is_empty = given is None or (isinstance(given, Mapping | list) and not any(given))
    infos = {} if is_empty else _leaves("infos", given, declared)
    _check_rows("infos", infos, {count, count + 1}, count)
    with_actions = {name: values for name, values in infos.items() if len(values) == count}
    own = frozenset({*transitions, *with_actions} - {"action"})
    transitions |= {"reward": rewards, **_ends(parts, rewards), **with_actions}
    observations |= {name: values for name, values in infos.items() if name not in with_actions}
    if alignment == "outgoing":
        observations = {name: values[:count] for name, values in observations.items()}
    rows: dict[str, Any] = episode_rows(observations, transitions, alignment=alignment)
    rows = {name: values.tolist() if values.dtype == object else values for name, values in rows.items()}
    for name, value in parts.items():
        if name not in PARTS:
            rows[name] = _repeated(name, value, len(rows["done"]), declared.get(name))
    return rows, alignment, own


def episode_metadata(
    columns: Mapping[str, Any], alignment: Alignment, transitions: frozenset[str], declared: Mapping[str, pa.Field]
) -> DatasetMetadata:
    """Return the metadata for the columns that ``episode_columns`` returned, including fields for the columns that the
    layout "stored" does not deliver.

    A declared column gets no field if it holds bytes, or if its rows differ in length.
    """
    types: dict[str, pa.DataType] = {}
    for name, values in columns.items():
        kind = declared[name].type if name in declared else None
        if kind is None and isinstance(values, np.ndarray):
            types[name] = array_type(values.dtype, values.shape[1:])
        elif kind not in (None, pa.binary(), pa.large_binary()) and fixed_shape(kind) is not None:
            types[name] = kind
    return DatasetMetadata(alignment, layout="stored", fields=fields_of_steps(types, columns, transitions))


def _shown(part: str, column: str) -> str:
    """Return the name of a nested array in error messages: ``observations['image']`` for the column
    ``observation.image``.
    """
    _, *keys = column.split(".")
    return part + "".join(f"[{key!r}]" for key in keys)


def _leaves(part: str, value: Any, declared: Mapping[str, pa.Field]) -> Columns:
    """Return the arrays of a nested part by column. If a part is a list, the list holds one value for each step; this
    value can be a dict.
    """
    column = part.removesuffix("s")

    def is_list(tree: Any) -> bool:
        return isinstance(tree, list)

    try:
        if is_list(value) and value and all(isinstance(step, Mapping) for step in value):
            # Values of declared columns may be None in some steps, and may differ in length.
            names = dict.fromkeys(name for step in value for name in step if f"{column}.{name}" in declared)
            others = [{name: one for name, one in step.items() if name not in names} for step in value]
            value = {name: [step.get(name) for step in value] for name in names}
            value |= stack(others) if any(others) else {}
        leaves = flatten(value, leaf=is_list)
    except (SchemaError, DataError) as error:
        raise type(error)(f"{part}: {error}") from error
    columns: Columns = {}
    for key, leaf in leaves.items():
        name = ".".join((column, *map(str, path_of(key))))
        if name in columns:
            raise SchemaError(
                f"{part}: expected different column names, found two values of a step for the column {name!r}"
            )
        columns[name] = _array(_shown(part, name), leaf, declared.get(name))
    return columns


def _array(label: str, value: Any, declared: pa.Field | None) -> npt.NDArray[Any]:
    """Convert numbers or texts ``[n, ...]`` of any framework to an array; other values of declared columns become
    objects.
    """
    is_list, shape = isinstance(value, list | tuple), () if declared is None else fixed_shape(declared.type)
    try:
        # NumPy's own arrays of texts lose the zeros at their ends.
        as_they_are = is_list and (shape is None or (value and isinstance(value[0], str | bytes)))
        array = object_array(value, (len(value),)) if as_they_are else _of_any_framework(value)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        if declared is None or not is_list:
            raise DataError(
                f"{label}: expected an array of numbers or texts with one row for each step: {error}"
            ) from error
        array = object_array([None if is_hidden(one) else as_array(one) for one in value], (len(value),))
    if array.ndim and array.dtype.kind not in "biufO":
        array = object_array(list(array), (len(array),))
    is_text = array.dtype == object and array.ndim == 1 and all(isinstance(one, str | bytes) for one in array)
    if not array.ndim or not (is_text or declared is not None or array.dtype.kind in "biuf"):
        found = f"{array.dtype} {list(array.shape)}"
        raise DataError(f"{label}: expected an array of numbers or texts with one row for each step, found {found}")
    return array


def _of_any_framework(value: Any) -> npt.NDArray[Any]:
    """Convert an array of any framework to NumPy, with the array protocol, or with DLPack if the array lacks that
    protocol.
    """
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        value = np.from_dlpack(value)
    return as_array(value)


def _rewards(value: Any, declared: pa.Field | None) -> npt.NDArray[Any]:
    """Return rewards as an array ``[T, ...]``; ``[T, 1]`` becomes ``[T]`` unless the column is declared.

    Integers become float32, because later rewards can have fractions.
    """
    array = _array("rewards", value, declared)
    if declared is not None:
        return array
    if array.ndim > 3 or array.dtype == object or (len(array) and not array.size):
        raise DataError(f"rewards: expected numbers [T], [T, K] or [T, A, K], found {array.dtype} {list(array.shape)}")
    array = array.reshape(len(array)) if array.size == len(array) else array
    return array.astype(array.dtype if array.dtype.kind == "f" else np.float32)


def _check_rows(part: str, columns: Columns, wanted: set[int], count: int) -> None:
    for name, values in columns.items():
        if len(values) not in wanted:
            rows = " or ".join(map(str, sorted(wanted)))
            raise DataError(f"{_shown(part, name)}: expected {rows} rows for {count} rewards, found {len(values)}")


def _ends(parts: Mapping[str, Any], rewards: npt.NDArray[Any]) -> Columns:
    """Return the done code of each transition, and the done code of each agent if agents end separately.

    A single flag applies to the last transition. Flags ``[T]`` apply to all agents.
    """
    count, flags = len(rewards), {}
    for name in ("terminated", "truncated"):
        value = parts.get(name)
        try:
            given = np.zeros((), np.bool_) if value is None else _of_any_framework(value)
            given = given if given.ndim else np.append(np.zeros(count - 1, np.bool_), given)
            flags[name] = convert(given.reshape(len(given), prod(given.shape[1:])), np.dtype(np.bool_))
        except (ValueError, TypeError, RuntimeError, BufferError) as error:
            raise DataError(f"{name}: expected flags: {error}") from error
        if len(given) != count:
            raise DataError(f"{name}: expected one flag, or {count} flags for {count} rewards, found {len(given)}")
        _check_last(name, np.logical_and.reduce(flags[name], axis=1))
    agents = {name: flag.shape[1] for name, flag in flags.items() if flag.shape[1] != 1}
    if not agents:
        return {"done": done_codes(*(flag[:, 0] for flag in flags.values()))}
    agents |= {"rewards": rewards.shape[1]} if rewards.ndim > 1 else {}
    if len({*agents.values()}) > 1:
        raise DataError(f"add_episode: expected the same number of agents in rewards and flags, found {agents}")
    codes = agent_codes(*np.broadcast_arrays(*flags.values()))
    ended = (codes != 0).all(axis=1)
    _check_last("terminated, truncated", ended)
    return {"done": done_codes(ended & ~(codes == 2).any(), ended), "agent_done": codes}


def _check_last(name: str, ended: npt.NDArray[np.bool_]) -> None:
    """Raise DataError if a flag says that an episode ended before its last transition."""
    early = np.flatnonzero(ended[:-1])
    if len(early):
        raise DataError(
            f"{name}: expected True only at the last of {len(ended)} steps, found True at step {early[0]}; "
            "add_episodes takes several episodes, one after the other"
        )


def _repeated(name: str, value: Any, count: int, declared: pa.Field | None) -> Any:
    """Repeat a value that belongs to the whole episode, once for each row of the episode."""
    if name.split(".")[0] in _RESERVED:
        raise SchemaError(f"add_episode: expected parts {list(PARTS)}, or columns with other names, found {name!r}")
    if value is None or isinstance(value, str | bytes) or declared is not None:
        return [value] * count
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: expected one number or text for the episode, found {type(value).__name__} {list(array.shape)}; "
            "pass values for each step as observations or infos"
        )
    return np.full(count, array)
