"""D4RL's HDF5 files: flat arrays of transitions, with terminals and timeouts kept apart.

Row t of a file is a transition: an observation, the action taken on it, and what that brought. An episode ends where
``terminals`` or ``timeouts`` is set. The observation it ends in is in the file only if there are ``next_observations``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged, reading
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    Columns,
    named_action,
    named_observation,
    ordered,
    schema_of,
    to_batches,
    travels_with_action,
)
from mouse_core.formats.columns.transitions import check_final, done_codes, transition_rows
from mouse_core.spec import check_list

__all__ = ["read_d4rl"]

_NEEDED = ("observations", "actions", "rewards", "terminals")
_NEXT = "next_observations"
# All arrays below the one say something of every transition, those below the other of the whole.
_INFOS, _ABOUT = "infos", "metadata/"


def read_d4rl(
    path: str | os.PathLike[str],
    *,
    final: str | None = None,
    batch_rows: int = BATCH_ROWS,
    episode_steps: int | None = None,
    leave_out: Sequence[str] = (),
) -> RowStream:
    """A D4RL file as rows.

    ``done`` is 1 where ``terminals`` is set, also with a timeout, and 2 where only ``timeouts`` is. ``infos/<key>`` and
    other arrays become ``metadata_infos_<key>`` and ``metadata_<key>``: those whose names begin with ``action``,
    ``policy`` or ``log_prob`` move with the action, the others stay with their observation, and are NaN (0 for
    whole numbers) where an episode ends. Single values, and the group ``metadata``, are no columns; a note says which
    were left out. Any other array without a value for every transition may be a damaged column, and is an error. Where
    ``next_observations`` are there and are not the next row's observations although no flag is set, a new episode
    begins, so that nothing is lost.

    Args:
        path: The file.
        final: What becomes of the last transition of an episode where there are no ``next_observations``: "drop"
            leaves it out, "mark" keeps it with a missing observation.
        batch_rows: At most how many transitions go into a batch.
        episode_steps: For files without ``timeouts``: after how many steps the environment cut episodes off.
        leave_out: Arrays and groups that are no columns, by path (``"infos/starts"``).

    Raises:
        ConfigError: No such file; ``final`` is needed and was not chosen.
        DataError: A damaged file, or none of D4RL; the message names the array.
        SchemaError: Two arrays whose paths make the same name of a column.
        ImportError: h5py is not installed.
    """
    check_batch_rows(batch_rows)
    if episode_steps is not None and episode_steps < 1:
        raise ConfigError(f"episode_steps: expected a positive number, found {episode_steps!r}")
    name = os.fspath(path)
    with H5File(path) as file:
        arrays, about, left = _arrays(file, check_list("leave_out", leave_out))
        check_final(final, where=name, needed=_NEXT not in {key.split("/")[0] for key in arrays})
        count = arrays["rewards"]["shape"][0]
        schema = schema_of(ordered(next(transition_rows(_parts(file, arrays, 1, 1, None), final=final, where=name))))
    notes = [f"Left out, as they have no value a transition: {', '.join(left)}."] if left else []
    if "timeouts" not in arrays:
        cut = f"episodes were taken to be cut off after {episode_steps} steps."
        unseen = "where an episode was cut off cannot be seen, unless episode_steps says it."
        notes.append(f"The file has no timeouts: {cut if episode_steps else unseen}")

    def batches() -> Iterator[pa.RecordBatch]:
        limit = episode_steps if "timeouts" not in arrays else None
        width = sum(math.prod(part["shape"][1:]) * np.dtype(part["dtype"]).itemsize for part in arrays.values())
        with H5File(path) as file:
            parts = _parts(file, arrays, count, rows_at_once(width, most=batch_rows), limit)
            yield from to_batches(transition_rows(parts, final=final, where=name), schema, where=name)

    return RowStream(name, "d4rl", schema, batches, notes=tuple(notes), metadata=about, about=About("arrived"))


def _arrays(file: H5File, leave_out: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any], list[str]]:
    """All arrays of one value a transition, by path, what else the file says, and what of it was no array of these."""
    (tree,) = file.trees(["/"])
    found = {"/".join(path): part for path, part in leaves(tree)}
    groups = {path.split("/")[0] for path in found}
    missing = [key for key in _NEEDED if key not in groups]
    if missing:
        raise damaged(file.path, f"expected arrays {list(_NEEDED)}, found no {missing} among {list(found)[:20]}")
    shape = found.get("rewards", {"shape": []})["shape"]
    if not shape or not shape[0]:
        raise damaged(file.path, f"rewards: expected a number for each of at least one transition, found shape {shape}")
    arrays: dict[str, dict[str, Any]] = {}
    about, left = dict(tree["attributes"]), []
    for key, part in found.items():
        if _is_column(file.path, key, part, shape[0], leave_out):
            arrays[key] = part
        else:
            about[key] = part["shape"]
            left.append(key if not key.startswith(_ABOUT) else _ABOUT[:-1])
    names = {key.replace("/", "_"): key for key in arrays}
    if len(names) < len(arrays):
        same = sorted(arrays.keys() - names.values())
        raise SchemaError(f"{file.path}: expected paths that make different names of columns, found {same} twice")
    return arrays, about, list(dict.fromkeys(left))


def _is_column(path: str, key: str, part: Mapping[str, Any], count: int, leave_out: Sequence[str]) -> bool:
    """Whether an array has a value for every transition; what should and has not is a damaged column.

    Raises:
        DataError: It should.
    """
    group = key.split("/")[0]
    known = group in (*_NEEDED, "timeouts", _NEXT)
    if not known and (key.startswith(_ABOUT) or any(key == name or key.startswith(f"{name}/") for name in leave_out)):
        return False
    if part["shape"] and part["shape"][0] == count and part["kind"] in (("number",) if known else ("number", "text")):
        return True
    if not known and group != _INFOS and (not part["shape"] or part["kind"] == "empty"):
        return False  # one value for the whole file
    raise damaged(
        path,
        f"{key}: expected {count} rows of numbers, found {part['kind']} of shape {part['shape']}"
        + ("" if known else f"; where that is no damage, leave_out=[{key!r}] of read_d4rl reads the rest"),
    )


class _Steps:
    """Counts the steps of episodes, where only their number says when one was cut off."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._since = 0
        self._ended = True

    def begins(self, ended: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Where episodes begin, given where they end."""
        begins = np.concatenate([[self._ended], ended[:-1]])
        self._ended = bool(ended[-1])
        return begins

    def cut(self, terminal: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Where episodes are cut off: each after so many steps without an end."""
        cut = np.zeros(len(terminal), bool)
        if self._limit is None:
            return cut
        for index, over in enumerate(terminal.tolist()):
            self._since += 1
            if over or self._since == self._limit:
                cut[index] = not over
                self._since = 0
        return cut


_Part = tuple[Columns, Columns, npt.NDArray[np.bool_], Columns | None, Columns]


def _parts(
    file: H5File, arrays: Mapping[str, Any], count: int, size: int, episode_steps: int | None
) -> Iterator[_Part]:
    """What ``TransitionRows.add`` takes, for ``size`` of the first ``count`` transitions at a time."""
    steps = _Steps(episode_steps)
    for start in range(0, count, size):
        stop = min(start + size, count)
        read = file.read([(f"/{key}", start, stop) for key in arrays])
        with reading(file.path, at=f"rows {start}..{stop - 1}"):
            part = _part(dict(zip(arrays, read, strict=True)), steps)
        yield part


def _part(values: Columns, steps: _Steps) -> _Part:
    terminal = _flags(values["terminals"])
    cut = _flags(values["timeouts"]) if "timeouts" in values else steps.cut(terminal)
    arriving = named_action(_nested(values, "actions"))
    reward = values["rewards"]
    arriving["reward"] = reward[:, 0] if reward.ndim == 2 and reward.shape[1] == 1 else reward
    arriving["done"] = done_codes(terminal, cut)
    after = _nested(values, _NEXT)
    following = None if after is None else named_observation(after)
    beside: Columns = {}
    for key, array in values.items():
        if key.split("/")[0] not in (*_NEEDED, "timeouts", _NEXT):
            target = arriving if travels_with_action(key) else beside
            target["metadata_" + key.replace("/", "_")] = array
    observations = named_observation(_nested(values, "observations"))
    return observations, arriving, steps.begins(terminal | cut), following, beside


def _flags(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return values.reshape(len(values)).astype(bool)


def _nested(values: Columns, key: str) -> Any:
    """An array, or the arrays of a group by path; None where there is neither."""
    prefix = f"{key}/"
    parts = {path.removeprefix(prefix).replace("/", "_"): values[path] for path in values if path.startswith(prefix)}
    return values.get(key, parts or None)
