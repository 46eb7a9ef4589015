"""Read Gen-DGRL's episodes of Procgen, one file each, in a folder or a tar archive.

An episode is a dict of ``observations`` (T + 1 pictures, channels first), ``actions``, ``rewards`` and ``dones`` (T
each), in an npz file, or, as the published archives have it, a pickled dict in an npy file. Its name says when it was
recorded, its number, its length, the seed of its level and its return: ``20230313T133237_4_77_12_10.00.npz``.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats._files.npz import NpyRows, npy_header
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    Columns,
    named_action,
    named_observation,
    one_each,
)
from mouse_core.formats.columns.pickled import pickled_arrays
from mouse_core.formats.columns.transitions import check_final, done_codes, episode_rows

__all__ = ["read_gen_dgrl"]

_NEEDED = ("observations", "actions", "rewards", "dones")
_NAME = re.compile(r".*_(?P<number>\d+)_(?P<length>\d+)_(?P<seed>-?\d+)_(?P<sum>-?[\d.]+)\.np[yz]")
# An episode of Procgen has at most some thousand steps, of 12 kB.
_MOST_BYTES = 1 << 30


def read_gen_dgrl(path: str | os.PathLike[str], *, final: str | None = None, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Read episodes of Gen-DGRL: ``observation_image`` (channels last), ``action``, ``reward``, ``done``.

    The last row of an episode has ``done`` 1 if ``dones`` is set, which Procgen does at time limits too, else 2.
    ``metadata_level_seed`` is the seed of the level, from the name of the file. A pickle that holds anything but arrays
    of numbers raises a DataError, and no function that it names is called.

    Args:
        path: A tar archive (``.tar``, ``.tar.xz``, ``.tar.gz``), a folder, or a file of one episode.
        final: Has no effect, because the last observations are stored.
        batch_rows: At most how many rows a batch has.

    Raises:
        ConfigError: No episode is found.
        DataError: A file is damaged or holds no episode; the message names it.
    """
    check_batch_rows(batch_rows)
    root = Path(path)
    check_final(final, where=str(root), needed=False)
    if not root.exists():
        raise ConfigError(f"{root}: expected an archive, a folder or a file of episodes, found none")
    with reading(root):
        first = next(_episodes(root), None)
    if first is None:
        raise ConfigError(f"{root}: expected episodes, files .npz or .npy, found none")

    def rows() -> Iterator[Columns]:
        return (block for episode in _episodes(root) for block in _blocks(episode, batch_rows))

    notes = ("An episode that Procgen cut off after its time limit is not told from one that terminated: done is 1.",)
    return RowStream.of_columns(root, "gen_dgrl", next(_blocks(first, 2)), rows, notes=notes)


def _blocks(rows: Columns, most: int) -> Iterator[Columns]:
    """Yield the rows of an episode, at most 32 MB at a time."""
    n = len(rows["done"])
    size = rows_at_once(sum(values.nbytes for values in rows.values()) // n, most=most)
    for first in range(0, n, size):
        yield {name: values[first : first + size] for name, values in rows.items()}


def _episodes(root: Path) -> Iterator[Columns]:
    for where, name, data in _contents(root):
        with reading(where):
            yield _rows(_arrays(name, data, where), name, where)


def _contents(root: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the place, the name and the bytes of each file."""
    check_inside([], root)
    if root.is_dir():
        for file in sorted(root.iterdir()):
            if _is_episode(file.name, str(root)) and not file.is_dir():
                check_inside([file], root)
                yield str(file), file.name, _bytes(file.open("rb"), file.stat().st_size, str(file))
    elif root.suffix in (".npy", ".npz"):
        yield str(root), root.name, _bytes(root.open("rb"), root.stat().st_size, str(root))
    else:
        with tarfile.open(root, "r|*") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.isdir() or not _is_episode(name, str(root)):
                    continue
                held = archive.extractfile(member) if member.isfile() else None
                if held is None:
                    raise damaged(root, f"{member.name!r}: expected a file, found a link or a device")
                yield f"{root}, {member.name}", name, _bytes(held, member.size, f"{root}, {member.name}")


def _is_episode(name: str, where: str) -> bool:
    if name.startswith("."):
        return False
    if not name.endswith((".npy", ".npz")):
        raise damaged(where, f"expected episodes, files .npz or .npy, found {name!r}")
    return True


def _bytes(file: IO[bytes], size: int, where: str) -> bytes:
    with file:
        if size > _MOST_BYTES:
            raise damaged(where, f"expected an episode of at most {_MOST_BYTES >> 20} MB, found {size >> 20} MB")
        return file.read(size)


def _arrays(name: str, data: bytes, where: str) -> Columns:
    if name.endswith(".npz"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                raise DataError(f"expected an episode of at most {_MOST_BYTES >> 20} MB, found a larger one")
            found = {}
            for member in archive.infolist():
                with archive.open(member) as file:
                    array = NpyRows(file, where=f"{where}, {member.filename}")
                    found[member.filename.removesuffix(".npy")] = array.read(len(array))
                    array.end()
            return found
    file = io.BytesIO(data)
    shape, _, dtype = npy_header(file, where)
    if shape != () or dtype != np.dtype(object):
        raise DataError(f"expected a dict of arrays, found an array {list(shape)} of {dtype}")
    return pickled_arrays(file.read(), where=where)


def _rows(arrays: Columns, name: str, where: str) -> Columns:
    missing = [key for key in _NEEDED if key not in arrays]
    if missing:
        raise DataError(f"{where}: expected arrays {list(_NEEDED)}, found no {missing} among {list(arrays)[:12]}")
    steps = len(arrays["rewards"])
    for key, values in arrays.items():
        wanted = steps + (key == "observations")
        if not steps or not values.ndim or len(values) != wanted:
            raise DataError(f"{where}: {key}: expected {wanted} values of {steps} steps, found {list(values.shape)}")
    last = np.arange(steps) == steps - 1
    ended = one_each(arrays, "dones") != 0
    if (ended & ~last).any():
        raise DataError(f"{where}: dones: expected one at the end alone, found one at step {int(ended.argmax())}")
    actions = arrays["actions"]
    actions = actions[:, 0] if actions.ndim == 2 and actions.shape[1] == 1 else actions
    arriving = named_action(actions) | {
        "reward": one_each(arrays, "rewards"),
        "done": done_codes(ended, last),
    }
    for key in arrays.keys() - set(_NEEDED):
        arriving[f"metadata_{key}"] = arrays[key]
    seen = named_observation(_pictures(arrays["observations"]))
    if match := _NAME.fullmatch(name):
        seen["metadata_level_seed"] = np.full(steps + 1, int(match["seed"]), np.int64)
    return episode_rows(seen, arriving)


def _pictures(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert pictures to uint8 with channels last; return other observations unchanged."""
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        return values
    whole = values.astype(np.uint8)
    if values.dtype != np.uint8 and not np.array_equal(whole, values):
        return values
    return np.ascontiguousarray(np.moveaxis(whole, 1, -1))
