"""TED, the format of TorchRL: steps with a root and a ``next``, in memory-mapped folders and HDF5 files; without torch.

The layouts are those of TorchRL's storages and checkpoints: steps as they are, flat and nested. ``TED2Flat`` and its
kin turn one into the other in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import step_begins
from mouse_core.errors import DataError, SchemaError
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.named import Columns, is_image, named_action, named_observation
from mouse_core.formats.columns.transitions import TransitionRows, done_codes, transition_rows
from mouse_core.formats.ted._reading import Key, StepBlock, Trajectories, has_next, opened, steps_of

_LOOKED_AT = 1024
_FLAGS = {("done",), ("terminated",), ("truncated",)}


def read_ted(path: str | os.PathLike[str], *, one_hot: bool | None = None, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Read steps of TED: a folder that ``TensorDict.memmap`` wrote, a checkpoint of a TorchRL buffer, or an HDF5 file.

    All layouts are recognised: steps as they are, flat (``TED2Flat``) and nested (``TED2Nested``, ``H5Split``). A ring
    that is full is read from its oldest step on, and places that were never used are left out. Of several environments,
    one follows the other.

    What stands at the root and in ``next`` belongs to a row's observation: ``observation`` becomes the standard column,
    a key such as ``pixels`` becomes ``observation_pixels`` (``observation_image`` if it is the only picture). Other
    keys become ``metadata_<key>``. Done is 1 where ``terminated``, else 2 where ``truncated``. Pickled values are not
    opened.

    Args:
        path: The folder or file.
        one_hot: Whether actions are one-hot vectors and become numbers; by default if the first 1,024 are.
        batch_rows: How many rows a batch has, about.

    Raises:
        ConfigError: Nothing there, or a TensorDict of a kind that is not read.
        SchemaError: No steps of TED: no reward, action or done; or trajectories of ManiSkill, whose groups have
            the same names.
        DataError: The data are damaged; names the file.
    """
    root = Path(path)
    with opened(root) as found:
        layout = "nested" if isinstance(found, Trajectories) else "steps with next" if has_next(found) else "flat"
        first = next(steps_of(found, batch_rows=_LOOKED_AT), None)
    if first is None:
        raise SchemaError(f"{root}: expected steps, found none")
    naming = _Naming(root, first, one_hot)
    observations, following, arriving = naming.columns(first)
    rows = TransitionRows(final=None, where=str(root))
    return RowStream.of_columns(
        root,
        "ted",
        rows.add(observations, arriving, np.zeros(len(first.begins), bool), following),
        partial(_rows, root, naming, batch_rows),
        notes=("one-hot actions were read as the numbers of the actions",) if naming.one_hot else (),
        metadata={"layout": layout},
    )


def _rows(root: Path, naming: _Naming, batch_rows: int) -> Iterator[Columns]:
    def parts() -> Iterator[tuple[Any, ...]]:
        ended = True
        for piece in steps_of(found, batch_rows=batch_rows):
            observations, following, arriving = naming.columns(piece)
            ends = naming.ends(piece)
            begins = piece.begins | step_begins(ends, ended)
            ended = bool(ends[-1])
            yield observations, arriving, begins, following

    with opened(root) as found:
        yield from transition_rows(parts(), final=None, where=str(root))


class _Naming:
    """The column for each key.

    Args:
        root: The path of the data, for error messages.
        piece: The first steps.
        one_hot: See ``read_ted``.
    """

    def __init__(self, root: Path, piece: StepBlock, one_hot: bool | None) -> None:
        self.where = str(root)
        others = _beside(piece)
        names = {key[0] for key in (*piece.root, *others)}
        for name in ("action", "reward"):
            if name not in names:
                found = [".".join(key) for key in (*piece.root, *others)]
                raise SchemaError(f"{root}: expected {name!r} among the steps, found {found}")
        if not _FLAGS & others.keys():
            raise SchemaError(f"{root}: expected next.done, found {['.'.join(key) for key in others]}")
        pictures = [key for key, values in piece.root.items() if is_image(values)]
        self._picture = pictures[0] if len(pictures) == 1 else None
        self.one_hot = _is_one_hot(others.get(("action",))) if one_hot is None else one_hot

    def columns(self, piece: StepBlock) -> tuple[Columns, Columns, Columns]:
        """Columns of the observation left, of the one arrived at, and of what arrived."""
        arriving: Columns = {}
        for key, values in _beside(piece).items():
            if key in _FLAGS:
                continue
            if key == ("action",):
                arriving |= named_action(self._numbers(values) if self.one_hot else values)
            elif key == ("reward",):
                arriving["reward"] = self._single(values, "reward")
            elif key[0] == "action":
                arriving["_".join(key)] = values
            else:
                name = "_".join(key)
                arriving[name if name.startswith("metadata_") else f"metadata_{name}"] = values
        flags, ended = self._flags(piece), self.ends(piece)
        truncated = flags.get("truncated", np.zeros_like(ended))
        arriving["done"] = done_codes(
            flags.get("terminated", ended & ~truncated), truncated if "truncated" in flags else ended
        )
        first = [name for name in ("action", "reward", "done") if name in arriving]
        order = {name: arriving[name] for name in (*first, *sorted(arriving.keys() - set(first)))}
        return self._seen(piece.root), self._seen(piece.following), order

    def ends(self, piece: StepBlock) -> npt.NDArray[np.bool_]:
        """Whether a trajectory ends with a step."""
        ended: npt.NDArray[np.bool_] = np.logical_or.reduce(list(self._flags(piece).values()))
        return ended

    def _flags(self, piece: StepBlock) -> dict[str, npt.NDArray[np.bool_]]:
        return {
            key[0]: self._single(values, key[0]).astype(bool) for key, values in _beside(piece).items() if key in _FLAGS
        }

    def _seen(self, arrays: dict[Key, npt.NDArray[Any]]) -> Columns:
        columns: Columns = {}
        for key, values in arrays.items():
            if key == ("step_count",):
                continue  # episode_step says the same
            if key == ("observation",):
                columns |= named_observation(values)
            elif key == self._picture:
                columns["observation_image"] = values
            elif key[0].startswith(("observation", "metadata")):
                columns["_".join(key)] = values
            else:
                columns["_".join(("observation", *key))] = values
        return columns

    def _single(self, values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        if values.size != len(values):
            raise SchemaError(f"{self.where}: {name}: expected one number a step, found {list(values.shape[1:])}")
        return values.reshape(len(values))

    def _numbers(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if values.ndim != 2 or not _is_one_hot(values):
            raise DataError(
                f"{self.where}: action: expected one-hot vectors, as the first ones are, found others; read them as "
                "vectors with one_hot=False"
            )
        return np.asarray(values.argmax(axis=1).astype(np.int64))


def _is_one_hot(values: npt.NDArray[Any] | None) -> bool:
    if values is None or values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "biu" or not len(values):
        return False
    return bool(((values == 0) | (values == 1)).all() and (values.astype(np.int64).sum(axis=1) == 1).all())


def _beside(piece: StepBlock) -> dict[Key, npt.NDArray[Any]]:
    """Return ``other`` of a block by keys without ``next``, and without done flags at the root, which are False."""
    return {key[1:] if key[0] == "next" else key: values for key, values in piece.other.items() if key not in _FLAGS}
