"""Reads replay buffers of Dopamine and the DQN Replay Dataset, which are gzipped NumPy arrays of a ring buffer.

Row t of the buffer has an observation (one frame), the action taken on it, and the resulting reward and terminal flag.
The final frame of an episode is not stored. Before every episode, Dopamine inserts rows of zeros as padding for the
first stacks of frames; these rows are not steps, so the reader leaves them out.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, done_codes
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats import columns
from mouse_core.formats._files.npz import NpyRows
from mouse_core.formats.base import BATCH_ROWS, RowStream

__all__ = ["read_dopamine"]

_STORES = ("observation", "action", "reward", "terminal")
# Converting a piece takes eight times its memory.
_PIECE_BYTES = 4 << 20
_NAME = re.compile(r"\$store\$_(\w+?)_ckpt\.(\d{1,12})\.gz")


def read_dopamine(
    path: str | os.PathLike[str],
    *,
    final: str | None = None,
    batch_rows: int = BATCH_ROWS,
    stack_size: int = 4,
) -> RowStream:
    """Read checkpoints of a replay buffer as rows, starting with the oldest transition.

    ``done`` is 1 where ``terminal`` is set. Dopamine also sets ``terminal`` at the end of truncated episodes, so these
    episodes have ``done`` 1 instead of 2. Further arrays (``$store$_<name>_ckpt``) become ``metadata_<name>`` and move
    with the action.

    Args:
        path: The folder with ``$store$_observation_ckpt.<number>.gz`` and so on; a folder that contains this folder as
            ``replay_logs``; or one of the files, to read only the checkpoint with its number.
        final: Treatment of the last transition of every episode, whose next frame is not stored: "drop" or "mark".
        batch_rows: Largest number of transitions of a batch.
        stack_size: Number of frames of the agent's observation; ``stack_size - 1`` rows of zeros before an episode are
            padding. With 1, no row is treated as padding.

    Raises:
        ConfigError: The files do not exist, or ``final`` was not chosen.
        DataError: A file is damaged.
    """
    if batch_rows < 1 or stack_size < 1:
        raise ConfigError(f"batch_rows, stack_size: expected positive integers, found {batch_rows!r}, {stack_size!r}")
    found = _checkpoints(Path(path))
    if not found:
        raise ConfigError(f"{path}: expected files $store$_observation_ckpt.<number>.gz, found none")
    numbers = sorted(found)
    columns.check_final(final, where=os.fspath(path))
    parts = [_Checkpoint(number, found[number]) for number in numbers]
    name = os.fspath(path)

    def rows(some: list[_Checkpoint], size: int, stack: int) -> Iterator[Columns]:
        return columns.transition_rows(_parts(some, size, stack), final=final, where=name)

    notes = ["Terminal states and time limits are one flag in this format; both are done 1."]
    absent = sorted(set(range(min(numbers), max(numbers))) - set(found))
    if absent:
        notes.append(f"Missing checkpoints: {', '.join(map(str, absent[:20]))}.")
    first, every = next(rows(parts[:1], 1, 1)), partial(rows, parts, batch_rows, stack_size)
    return RowStream.of_columns(name, "dopamine", first, every, notes=tuple(notes))


def _checkpoints(path: Path) -> dict[int, dict[str, Path]]:
    """Return the files of every checkpoint by array name.

    If the path is a file, only the checkpoint of this file is returned.
    """
    if path.is_file():
        number = re.search(r"_ckpt\.(\d{1,12})\.gz$", path.name)
        siblings = _checkpoints(path.parent)
        return {int(number[1]): siblings[int(number[1])]} if number and int(number[1]) in siblings else {}
    folder = path / "replay_logs" if (path / "replay_logs").is_dir() else path
    found: dict[int, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _NAME.fullmatch(file.name):
            found.setdefault(int(match[2]), {})[match[1]] = file
    check_inside((file for files in found.values() for file in files.values()), path)
    stores = {store for files in found.values() for store in files} | set(_STORES if found else ())
    for checkpoint, files in found.items():
        # If some checkpoints lack an array, its column would have gaps.
        missing = sorted(stores - files.keys())
        if missing:
            raise damaged(folder, f"checkpoint {checkpoint}: expected stores {sorted(stores)}, found no {missing}")
    return found


@dataclass(frozen=True)
class _Checkpoint:
    """The files of one checkpoint, by the name of the stored array."""

    number: int
    files: dict[str, Path]

    def added(self) -> int | None:
        """Return how many transitions were added to the ring buffer since its creation; None if the checkpoint does not
        store this count.
        """
        file = self.files["observation"].with_name(f"add_count_ckpt.{self.number}.gz")
        if not file.exists():
            return None
        with reading(file), gzip.open(file) as stream:
            rows = NpyRows(stream, where=str(file))
            count = int(rows.read(1).reshape(-1)[0])
            rows.end()
            if count < 0:
                raise damaged(file, f"expected a count, found {count}")
            return count

    def pieces(self, size: int) -> Iterator[Columns]:
        """Yield the transitions from the oldest to the newest."""
        added, capacity = self.added(), self.capacity()
        if added is not None and added < capacity:
            yield from self._range(0, added, size)
            return
        oldest = (added or 0) % capacity
        yield from self._range(oldest, capacity, size)
        if oldest:
            yield from self._range(0, oldest, size, again=True)

    def capacity(self) -> int:
        """Return the capacity of the ring in transitions."""
        lengths = {}
        for store, file in self.files.items():
            with reading(file), gzip.open(file) as stream:
                lengths[store] = len(NpyRows(stream, where=str(file)))
        if len(set(lengths.values())) > 1 or not lengths["action"]:
            raise damaged(self.files["action"], f"expected arrays of equal length, found {lengths}")
        return lengths["action"]

    def _range(self, start: int, stop: int, size: int, *, again: bool = False) -> Iterator[Columns]:
        with ExitStack() as stack:
            arrays = {}
            for store, file in self.files.items():
                with reading(file):
                    stream = stack.enter_context(gzip.open(file))
                    arrays[store] = NpyRows(stream, where=str(file))
                    arrays[store].skip(start)
            width = sum(array.row_bytes for array in arrays.values())
            size = columns.rows_at_once(width, most=size, budget=_PIECE_BYTES)
            for place in range(start, stop, size):
                values = {}
                for store, array in arrays.items():
                    with reading(self.files[store], at=f"rows from {place}"):
                        values[store] = array.read(min(size, stop - place))
                yield values
            for store, array in arrays.items():
                # The CRC is at the end of a file. If a ring has two ranges, reading the first range continues to the
                # end.
                if not again:
                    with reading(self.files[store]):
                        array.skip(len(array) - array.place)
                        array.end()


def _parts(
    checkpoints: list[_Checkpoint], batch_rows: int, stack_size: int
) -> Iterator[tuple[Columns, Columns, npt.NDArray[np.bool_]]]:
    """Yield the arguments of ``TransitionRows.add`` for all transitions in order, without padding."""
    padding = _Padding(stack_size - 1)
    previous: int | None = None
    for checkpoint in checkpoints:
        added, count = checkpoint.added(), 0
        for values in checkpoint.pieces(batch_rows):
            # Two checkpoints follow each other without a gap if as many transitions as a full ring were added between
            # them.
            gap = not count and (previous is None or added is None or added != previous + checkpoint.capacity())
            count += len(values["terminal"])
            yield _part(*padding.take(values, gap))
        previous = added
    yield _part(*padding.take(None, False))


def _part(values: Columns, begins: npt.NDArray[np.bool_]) -> tuple[Columns, Columns, npt.NDArray[np.bool_]]:
    arriving = columns.named("action", values["action"])
    arriving["reward"] = columns.one_each(values, "reward")
    arriving["done"] = done_codes(columns.one_each(values, "terminal"))
    arriving |= {f"metadata_{store}": array for store, array in values.items() if store not in _STORES}
    return columns.named("observation", values["observation"]), arriving, begins


# Marks of rows: an episode ended at the row before, so padding may begin here; an episode begins here.
_CHECK, _BEGIN = 1, 2


class _Padding:
    """Removes the rows of zeros before an episode, and marks where episodes begin.

    With padding of 2, rows ``a b(end) 0 0 c d`` become ``a b c d``, and episodes begin at a and c. Until the next rows
    are known, the last two rows are not returned, because the next rows determine whether they are padding: fewer than
    ``count`` rows of zeros are not padding.

    Args:
        count: Number of rows of zeros before an episode; fewer rows of zeros are not padding.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: Columns | None = None
        self._marks = np.zeros(0, np.int8)
        self._next = 0

    def take(self, values: Columns | None, gap: bool) -> tuple[Columns, npt.NDArray[np.bool_]]:
        """Return rows without padding, and whether an episode begins at each row; up to ``count`` rows are kept for the
        next call.

        Args:
            values: The next rows; None at the end.
            gap: Whether rows are missing between the previous rows and these rows.
        """
        marks = self._marks
        if values is not None:
            ended = columns.one_each(values, "terminal").astype(bool)
            fresh = np.concatenate([[False], ended[:-1]]) * np.int8(_CHECK)
            fresh[0] = max(self._next, _CHECK if gap else 0)
            self._next = _CHECK if ended[-1] else 0
            marks = np.concatenate([marks, fresh.astype(np.int8)])
            if self._held is not None:
                values = {name: np.concatenate([self._held[name], array]) for name, array in values.items()}
        joined = self._held if values is None else values
        if joined is None:
            raise DataError("expected rows, found none")
        total = len(marks)
        ready = total if values is None else max(total - self._count, 0)
        kept = np.ones(total, bool)
        for place in np.flatnonzero(marks[:ready] == _CHECK).tolist():
            marks[place] = _BEGIN
            stop = place + self._count
            if self._count and stop <= total and not any(array[place:stop].any() for array in joined.values()):
                kept[place:stop] = False
                ready = max(ready, stop)
                marks[stop : stop + 1] = _BEGIN
        given = {name: array[:ready][kept[:ready]] for name, array in joined.items()}
        begins = marks[:ready][kept[:ready]] == _BEGIN
        self._held = {name: array[ready:].copy() for name, array in joined.items()}
        self._marks = marks[ready:]
        return given, begins
