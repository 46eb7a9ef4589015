"""OGBench's npz files: flat arrays in one of three layouts.

As downloaded, a file has a row for every observation, T+1 of them a trajectory, and ``terminals`` is 1 at the last one,
whose action leads nowhere. ``ogbench`` makes two others of it, which people save: with ``next_observations``, T
transitions a trajectory; and "compact", T+1 rows with ``valids`` 0 at the last one and ``terminals`` 1 at the last two.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError
from mouse_core.formats._files.npy import NpyRows
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged, reading
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    Columns,
    named_action,
    named_observation,
    one_each,
    ordered,
    schema_of,
    to_batches,
    travels_with_action,
)
from mouse_core.formats.columns.transitions import check_final, one_later, step_numbers, transition_rows

__all__ = ["read_ogbench"]

_NEEDED = ("observations", "actions", "terminals")
_NEXT = "next_observations"
_SPECIAL = (*_NEEDED, "rewards", "masks", "valids", _NEXT)


def read_ogbench(
    path: str | os.PathLike[str], *, final: str | None = None, batch_rows: int = BATCH_ROWS, ending: str = "truncated"
) -> RowStream:
    """An OGBench file as rows, whichever layout it has.

    Trajectories of OGBench are recordings of a given length, so the last row of each has ``done`` 2; ``masks``, if
    there, make it 1 where they are 0. Without ``rewards`` the column ``reward`` is 0, since OGBench gives rewards by
    task and not by file. ``qpos``, ``qvel`` and other arrays become ``metadata_<key>``, and stay with their
    observation.

    Args:
        path: The file.
        final: Not needed, the last observations are there; accepted so that all readers take it.
        batch_rows: At most how many rows of the file go into a batch.
        ending: What the end of a trajectory is: "truncated" (done 2), or "terminal" (done 1) for files in which
            ``terminals`` mean that.

    Raises:
        ConfigError: No such file, or an unknown ``ending``.
        DataError: A damaged file, or none of OGBench.
    """
    check_batch_rows(batch_rows)
    if ending not in ("truncated", "terminal"):
        raise ConfigError(f"ending: expected one of ['truncated', 'terminal'], found {ending!r}")
    name = os.fspath(path)
    check_final(final, where=name, needed=False)
    with _opened(name) as arrays:
        shapes = _checked(arrays, name)
        layout = "regular" if _NEXT in arrays else "compact" if "valids" in arrays else "raw"
    code = 2 if ending == "truncated" else 1
    notes = [f"Layout {layout!r}; the end of a trajectory is taken as {ending}."]
    if "rewards" not in shapes:
        notes.append("The file has no rewards: the column reward is 0.")

    def parts() -> Iterator[Columns]:
        with _opened(name) as arrays:
            width = sum(array.row_bytes for array in arrays.values())
            size = rows_at_once(width, most=batch_rows)
            for _ in range(0, len(arrays["actions"]), size):
                yield {key: array.read(size) for key, array in arrays.items()}
            for array in arrays.values():
                array.end()

    make = _regular_rows if layout == "regular" else _observation_rows

    def batches() -> Iterator[pa.RecordBatch]:
        return to_batches(make(parts(), code, layout, name), schema, where=name)

    with reading(name):
        schema = schema_of(ordered(next(make(parts(), code, layout, name))))
    return RowStream(name, "ogbench", schema, batches, notes=tuple(notes), metadata=shapes, about=About("arrived"))


@contextmanager
def _opened(path: str) -> Iterator[dict[str, NpyRows]]:
    """The arrays of an npz file, each at its beginning."""
    with reading(path), ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        arrays: dict[str, NpyRows] = {}
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            # Whatever writes npz files writes arrays, each once; anything else would be a column that is not read.
            if key == member.filename or key in arrays:
                raise damaged(path, f"expected arrays of different names, found {member.filename!r} besides")
            arrays[key] = NpyRows(stack.enter_context(archive.open(member)), where=f"{path}, {key}")
        yield arrays


def _checked(arrays: dict[str, NpyRows], path: str) -> dict[str, Any]:
    """The shapes of all arrays, after leaving out those that are not of a row each."""
    missing = [key for key in _NEEDED if key not in arrays]
    if missing:
        raise damaged(path, f"expected arrays {list(_NEEDED)}, found no {missing} among {list(arrays)[:20]}")
    shapes = {key: list(array.shape) for key, array in arrays.items()}
    count = len(arrays["actions"])
    if not count or any(shape[:1] != [count] for shape in shapes.values()):
        raise damaged(path, f"expected arrays of one length, found shapes {shapes}")
    return shapes


def _arriving(values: Columns, ended: npt.NDArray[np.bool_], code: int) -> Columns:
    """What an action brings, in the row of that action."""
    arriving = named_action(values["actions"])
    arriving["reward"] = one_each(values, "rewards") if "rewards" in values else np.zeros(len(ended), np.float32)
    done = np.where(ended, code, 0)
    if "masks" in values:
        done = np.where(ended & (one_each(values, "masks") == 0), 1, done)
    arriving["done"] = done.astype(np.int64)
    return arriving | _metadata(values, moving=True)


def _metadata(values: Columns, *, moving: bool) -> Columns:
    """What else there is: that which moves with the action, or that which stays with the observation."""
    return {
        f"metadata_{key}": array
        for key, array in values.items()
        if key not in _SPECIAL and travels_with_action(key) == moving
    }


def _observation_rows(parts: Iterator[Columns], code: int, layout: str, path: str) -> Iterator[Columns]:
    """Rows of files with T+1 observations a trajectory: what an action brings moves to the next row."""
    before: Columns = {}
    begins, step = True, 0
    for values in parts:
        last = one_each(values, "terminals") != 0 if layout == "raw" else one_each(values, "valids") == 0
        count = len(last)
        starts = np.concatenate([[begins], last[:-1]])
        # The action whose transition ends the trajectory is that of the row before the last one; whether it is so
        # is seen in the last one.
        arriving = _arriving(values, np.zeros(count, bool), code)
        masks = {"masks": one_each(values, "masks") == 0} if "masks" in values else {}
        rows = one_later({**arriving, **masks}, before, starts)
        terminal = rows.pop("masks", np.zeros(count, bool))
        rows["done"] = np.where(last & ~starts, np.where(terminal, 1, code), 0).astype(np.int64)
        rows["episode_step"] = step_numbers(starts, step)
        step, begins = int(rows["episode_step"][-1]) + 1, bool(last[-1])
        yield rows | named_observation(values["observations"]) | _metadata(values, moving=False)


def _regular_rows(parts: Iterator[Columns], code: int, layout: str, path: str) -> Iterator[Columns]:
    """Rows of files with T transitions a trajectory and the observations that they lead to."""

    def transitions() -> Iterator[tuple[Any, ...]]:
        ended = True
        for values in parts:
            last = one_each(values, "terminals") != 0
            starts = np.concatenate([[ended], last[:-1]])
            ended = bool(last[-1])
            observations, following = named_observation(values["observations"]), named_observation(values[_NEXT])
            yield observations, _arriving(values, last, code), starts, following, _metadata(values, moving=False)

    return transition_rows(transitions(), final=None, where=path)
