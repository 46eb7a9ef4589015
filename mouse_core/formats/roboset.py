"""RoboSet's HDF5 files, as RoboHive logs them: a group a trial, ``Trial0`` and so on, of arrays of one length.

RoboHive has logged in two ways. Of late a row holds an observation, the reward, done and infos that *came with*
it, and the action that is taken on it; one row more holds the observation that the trial ends in, its action NaN.
Before, reward, done and infos were those that the row's action brought, and the last observation was not kept.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.reading import check_inside
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged, reading
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import Columns, named_action, named_observation, ordered, schema_of, to_batches
from mouse_core.formats.columns.transitions import TransitionRows, check_final, done_codes, episode_rows
from mouse_core.spec import check_list

__all__ = ["read_roboset"]

_TRIAL = re.compile(r"(?:Trial|Rollout)(\d{1,9})")
_NEEDED = ("observations", "actions", "rewards", "done")


def read_roboset(
    path: str | os.PathLike[str],
    *,
    final: str | None = None,
    batch_rows: int = BATCH_ROWS,
    leave_out: Sequence[str] = (),
) -> RowStream:
    """Trials of RoboSet (RoboHive) as rows, each trial an episode.

    Where a trial's last action is NaN, its last row is the observation that it ends in, and rewards, done and infos
    belong to the row that they stand in; else they are what the row's action brought. ``notes`` say which it is.
    ``done`` is 1 at the end of a trial whose last flag says so, else 2; the flags as they were logged are
    ``metadata_done``, for some trials go on after one. All other arrays (``time``, ``env_infos/...``) become
    ``metadata_<name>``; ``metadata_seed`` is the number of the file and ``metadata_episode`` that of the trial.

    Args:
        path: A file, or a folder of files that end in ``.h5``, which are read in the order of their names.
        final: What becomes of a trial's last transition where its last observation was not kept: "drop" or "mark".
        batch_rows: At most how many rows a batch has.
        leave_out: Arrays and groups to leave out, by path (``"env_infos/obs_dict"``), pictures among them.

    Raises:
        ConfigError: Nothing of this kind there; ``final`` is needed and was not chosen.
        DataError: A damaged file; trials of several layouts; the message names file and trial.
        SchemaError: Trials of different arrays, or two arrays whose paths make the same name of a column.
        ImportError: h5py is not installed.
    """
    check_batch_rows(batch_rows)
    out = check_list("leave_out", leave_out)
    files = _files(Path(path))
    with H5File(files[0]) as file:
        first = next(_trials(file, 0, out), None)
        if first is None:
            raise ConfigError(f"{files[0]}: expected trials, groups 'Trial0' and so on, found {file.names()[:8]}")
        layout = _Layout(first.keys(), first.closed(file))
        check_final(final, where=str(path), needed=not layout.closed)
        with reading(first.where):
            columns = _first_rows(first, file, layout)
            rows = TransitionRows(final=final, where=first.where)
            if not layout.closed:
                columns = rows.add(*columns)
            schema = schema_of(ordered(columns))
    said = "led to the observation of their row" if layout.closed else "were brought by the action of their row"
    notes = [f"The last action of a trial is {'NaN' if layout.closed else 'a number'}: rewards and done {said}."]
    if layout.closed:
        notes.append("The reward that was logged when a trial began is left out, as no action led to it.")
    if out:
        notes.append(f"Left out, as asked for: {', '.join(out)}.")

    def batches() -> Iterator[pa.RecordBatch]:
        return to_batches(_rows(files, layout, final, batch_rows, out), schema, where=str(path))

    return RowStream(
        os.fspath(path), "roboset", schema, batches, notes=tuple(notes), metadata={"files": [*map(str, files)]},
        about=About("arrived"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Layout:
    """What all trials have in common: their arrays, and whether the observation that one ends in is among its rows."""

    keys: tuple[str, ...]
    closed: bool


@dataclass(frozen=True)
class _Trial:
    """One trial: its file's number and its own, and its arrays by path."""

    path: str
    name: str
    seed: int
    arrays: dict[str, dict[str, Any]]
    length: int

    @property
    def where(self) -> str:
        return f"{self.path}, {self.name}"

    @property
    def row_bytes(self) -> int:
        return sum(math.prod(part["shape"][1:]) * np.dtype(part["dtype"]).itemsize for part in self.arrays.values())

    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.arrays))

    def closed(self, file: H5File) -> bool:
        """Whether its last action is NaN all through, as none is taken on the last observation."""
        keys = [key for key in self.arrays if key.split("/")[0] == "actions"]
        last = file.read([(f"/{self.name}/{key}", self.length - 1, self.length) for key in keys])
        return self.length > 1 and all(values.dtype.kind == "f" and bool(np.isnan(values).all()) for values in last)

    def read(self, file: H5File, first: int, end: int) -> Columns:
        values = file.read([(f"/{self.name}/{key}", first, end) for key in self.arrays])
        return dict(zip(self.arrays, values, strict=True))


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    files = sorted(root.glob("*.h5")) if root.is_dir() else []
    if not files:
        raise ConfigError(f"{root}: expected a file of RoboSet, or a folder of files .h5, found none")
    check_inside(files, root)
    return files


def _trials(file: H5File, seed: int, leave_out: Sequence[str]) -> Iterator[_Trial]:
    """The trials of a file, in the order of their numbers."""
    names = sorted((name for name in file.names() if _TRIAL.fullmatch(name)), key=lambda name: int(_number(name)))
    for start in range(0, len(names), 64):
        some = names[start : start + 64]
        for name, tree in zip(some, file.trees([f"/{name}" for name in some]), strict=True):
            yield _trial(file.path, name, seed, tree, leave_out)


def _number(name: str) -> str:
    return re.sub(r"\D", "", name)


def _check_rows(part: Any, rows: int, path: str, name: str, key: str) -> None:
    if part["kind"] != "number" or part["shape"][:1] != [rows]:
        raise damaged(
            path,
            f"{name}/{key}: expected {rows} rows of numbers, found {part['kind']} of shape {part['shape']}; "
            f"where that is no damage, leave_out=[{key!r}] of read_roboset reads the rest",
        )


def _trial(path: str, name: str, seed: int, tree: Any, leave_out: Sequence[str]) -> _Trial:
    found = {"/".join(keys): part for keys, part in leaves(tree)}
    arrays = {
        key: part
        for key, part in found.items()
        if not any(key == out or key.startswith(f"{out}/") for out in leave_out)
    }
    missing = [key for key in _NEEDED if key not in {path.split("/")[0] for path in arrays}]
    if missing:
        raise damaged(path, f"{name}: expected arrays {list(_NEEDED)}, found no {missing} among {list(arrays)[:20]}")
    shape = arrays.get("rewards", {"shape": []})["shape"]
    if not shape or not shape[0]:
        raise damaged(path, f"{name}/rewards: expected a number for each of at least one row, found shape {shape}")
    for key, part in arrays.items():
        _check_rows(part, shape[0], path, name, key)
    columns = {key.replace("/", "_"): key for key in arrays}
    if len(columns) < len(arrays):
        same = sorted(arrays.keys() - columns.values())
        raise SchemaError(f"{path}: expected paths that make different names of columns, found {same} twice")
    return _Trial(path, name, seed, arrays, shape[0])


def _rows(
    files: Sequence[Path], layout: _Layout, final: str | None, batch_rows: int, leave_out: Sequence[str]
) -> Iterator[Columns]:
    for seed, path in enumerate(files):
        with H5File(path) as file:
            for trial in _trials(file, seed, leave_out):
                _check_alike(trial, file, layout)
                size = rows_at_once(trial.row_bytes, most=batch_rows)
                make = _closed_rows if layout.closed else partial(_open_rows, final=final)
                with reading(trial.where):
                    yield from make(trial, file, size)


def _check_alike(trial: _Trial, file: H5File, layout: _Layout) -> None:
    if trial.keys() != layout.keys:
        differing = sorted(set(trial.keys()) ^ set(layout.keys))
        raise SchemaError(f"{trial.where}: expected the arrays of the first trial, found others: {differing[:8]}")
    if trial.closed(file) != layout.closed:
        wanted = "NaN" if layout.closed else "a number"
        raise damaged(
            trial.path, f"{trial.name}/actions: expected a last action that is {wanted}, as in the first trial"
        )


def _first_rows(trial: _Trial, file: H5File, layout: _Layout) -> Any:
    if layout.closed:
        return next(_closed_rows(trial, file, 2))
    return (*_transitions(trial, trial.read(file, 0, 1), 0), np.ones(1, bool))


def _closed_rows(trial: _Trial, file: H5File, size: int) -> Iterator[Columns]:
    """Rows of a trial that holds the observation it ends in: the action is of the row before, all else of the row."""
    action: Columns | None = None
    for first in range(0, trial.length, size):
        end = min(first + size, trial.length)
        values = trial.read(file, first, end)
        actions = named_action(_nested(values, "actions"))
        before = {name: part[:-1] for name, part in actions.items()}
        if action is not None:
            before = {name: np.concatenate([action[name], part]) for name, part in before.items()}
        action = {name: part[-1:] for name, part in actions.items()}
        skip = 1 if first == 0 else 0
        brought = {"reward": _single(values, "rewards"), "done": _ends(trial, values, first)}
        arriving = before | {name: part[skip:] for name, part in brought.items()}
        yield episode_rows(_seen(trial, values) | _beside(values, ("done",)), arriving, begins=first)


def _open_rows(trial: _Trial, file: H5File, size: int, *, final: str | None) -> Iterator[Columns]:
    """Rows of a trial that lacks the observation it ends in."""
    rows = TransitionRows(final=final, where=trial.where)
    for first in range(0, trial.length, size):
        values = trial.read(file, first, min(first + size, trial.length))
        begins = np.arange(first, first + len(values["rewards"])) == 0
        yield rows.add(*_transitions(trial, values, first), begins)
    if (rest := rows.finish()) is not None:
        yield rest


def _transitions(trial: _Trial, values: Columns, first: int) -> tuple[Columns, Columns]:
    arriving = named_action(_nested(values, "actions"))
    arriving |= {"reward": _single(values, "rewards"), "done": _ends(trial, values, first)}
    return _seen(trial, values), arriving | _beside(values, ("done",))


def _seen(trial: _Trial, values: Columns) -> Columns:
    """What belongs to the observation whatever the layout."""
    count = len(values["rewards"])
    numbers = {"metadata_seed": trial.seed, "metadata_episode": int(_number(trial.name))}
    time = {"metadata_time": values["time"]} if "time" in values else {}
    seen = named_observation(_nested(values, "observations"))
    return seen | time | {name: np.full(count, number, np.int64) for name, number in numbers.items()}


def _beside(values: Columns, flags: Sequence[str]) -> Columns:
    return {
        f"metadata_{key.replace('/', '_')}": array
        for key, array in values.items()
        if key in flags or key.split("/")[0] not in (*_NEEDED, "time")
    }


def _ends(trial: _Trial, values: Columns, first: int) -> npt.NDArray[np.int64]:
    """Codes: the end of a trial is terminal where its last flag says so, else it was cut off there."""
    flags = _single(values, "done") != 0
    last = np.arange(first, first + len(flags)) == trial.length - 1
    return done_codes(flags & last, last)


def _single(values: Columns, key: str) -> npt.NDArray[Any]:
    array = values[key]
    return array.reshape(len(array)) if array.size == len(array) else array


def _nested(values: Columns, key: str) -> Any:
    """An array, or the arrays of a group by path."""
    prefix = f"{key}/"
    parts = {path.removeprefix(prefix).replace("/", "_"): values[path] for path in values if path.startswith(prefix)}
    return values.get(key, parts or None)
