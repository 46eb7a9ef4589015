"""Reads the replay of DreamerV3.

A stream of steps is a chain of npz files ("chunks"); the name of each file contains the name of the next chunk.

A step has an observation, the reward that arrived with the observation, and the action taken after the observation. The
file ``T1-aaa-bbb-1024.npz`` is chunk aaa with 1024 steps, and chunk bbb continues its stream.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns
from mouse_core.episodes import step_begins
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats import columns
from mouse_core.formats._files.h5 import leaves
from mouse_core.formats._files.npz import NpzTree
from mouse_core.formats._files.on_disk import DREAMERV3
from mouse_core.formats.base import BATCH_ROWS, RowStream

__all__ = ["read_dreamerv3"]

_FLAGS = ("is_first", "is_last", "is_terminal")
# These arrays are not read: identifiers of steps, and inputs of the environment other than the action.
_LEFT_OUT = ("stepid", "consec", "reset")


class _Chunk(NamedTuple):
    """A file of a stream.

    The file name consists of the time of the first step, the name of the chunk, the name of the next chunk, and the
    number of steps.
    """

    time: str
    name: str
    following: str
    length: int
    path: Path


def read_dreamerv3(
    path: str | os.PathLike[str], *, actions: Sequence[str] = (), batch_rows: int = BATCH_ROWS
) -> RowStream:
    """Read the replay of DreamerV3, one stream after another; streams are ordered by the times of their first steps.

    ``done`` is 1 at a step with ``is_last`` and ``is_terminal``. ``done`` is 2 at other steps with ``is_last``, at a
    step before a step with ``is_first``, and at the end of a stream. If the first chunks of a stream were deleted, the
    first episode of the stream is incomplete. Keys with a slash, which hold states of a model, become columns
    ``metadata_<key>``.

    Args:
        path: The folder, with files ``TIME-ID-FOLLOWING-LENGTH.npz``, or one such file.
        actions: The keys of actions; by default all keys that begin with "action".
        batch_rows: Largest number of rows of a batch.

    Raises:
        ConfigError: No file of this kind is found, or a key is missing.
        DataError: A file is damaged, its length differs from the length in its name, or the links of chunks form a
            circle.
        SchemaError: Files have different arrays.
    """
    columns.check_batch_rows(batch_rows)
    root = Path(path)
    streams = _find_streams(root)
    first = streams[0][0]
    with closing(NpzTree(first.path)) as file:
        keys = _array_types(file)
    acting = [name for name in keys if (name in actions if actions else name.startswith("action"))]
    if not acting or not {*_FLAGS, "reward", *actions} <= keys.keys():
        wanted = [*_FLAGS, "reward", *(actions or ["action"])]
        raise ConfigError(f"{first.path}: expected arrays {wanted}, found {sorted(keys)[:20]}")
    count = sum(chunk.length for stream in streams for chunk in stream)
    chunks = sum(map(len, streams))
    notes = [f"{chunks} files are {len(streams)} streams; the last episode of a stream counts as truncated."]
    example = next(_read_rows([[first]], keys, acting, 1))
    rows = partial(_read_rows, streams, keys, acting, batch_rows)
    return RowStream.of_columns(root, "dreamerv3", example, rows, rows=count, notes=tuple(notes))


def _find_streams(root: Path) -> list[list[_Chunk]]:
    """Return the chunks of each stream, in order."""
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    files = [root] if root.is_file() else sorted(root.glob("*.npz"))
    matches = {file: match for file in files if (match := DREAMERV3.fullmatch(file.name))}
    check_inside(matches, root)
    chunks: dict[str, _Chunk] = {}
    for file, match in matches.items():
        time, name, following, length = match.groups()
        if name in chunks:
            raise damaged(file, f"expected chunks of different names, found the name of {chunks[name].path.name} twice")
        chunks[name] = _Chunk(time, name, following, int(length), file)
    chunks = {name: chunk for name, chunk in chunks.items() if chunk.length}
    if not chunks:
        raise ConfigError(f"{root}: expected files TIME-ID-FOLLOWING-LENGTH.npz with steps, found none")
    followed = Counter(chunk.following for chunk in chunks.values() if chunk.following in chunks)
    if twice := [chunks[name].path.name for name, count in followed.items() if count > 1]:
        raise damaged(
            root,
            f"expected each chunk to follow at most one other chunk, found {twice[:4]}, which follow several chunks",
        )
    # A chunk that no other chunk links to begins a stream. Chunks that remain at the end form a circle.
    streams = []
    for head in sorted(chunks[name] for name in chunks.keys() - followed.keys()):
        stream = [chunks.pop(head.name)]
        while (following_chunk := chunks.pop(stream[-1].following, None)) is not None:
            stream.append(following_chunk)
        streams.append(stream)
    if chunks:
        circle = sorted(chunk.path.name for chunk in chunks.values())
        raise damaged(
            root, f"expected streams with a first chunk, found a circle of chunks that follow each other: {circle[:4]}"
        )
    return streams


def _array_types(file: NpzTree) -> dict[str, tuple[Any, ...]]:
    """Return the shape and dtype of one step of each array, by the name of the array."""
    (tree,) = file.find(["/"])
    keys = {}
    for path, array in leaves(tree or {"items": {}}):
        name = "/".join(path)
        if name in _LEFT_OUT:
            continue
        if array["kind"] != "number" or not array["shape"]:
            raise damaged(
                file.path, f"{name}: expected one or more numbers per step, found {array['kind']} {array['shape']}"
            )
        keys[name] = (tuple(array["shape"][1:]), array["dtype"])
    return keys


def _read_rows(
    streams: Sequence[Sequence[_Chunk]], keys: Mapping[str, Any], acting: Sequence[str], batch_rows: int
) -> Iterator[Columns]:
    """Yield the columns of all streams in batches.

    A row has the action that led to its observation, so the action of each step moves to the next row. ``previous``
    carries the last action from one batch to the next of the same stream; ``step`` and ``ended`` carry the state of the
    episode.
    """
    size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in keys.values())
    most = columns.rows_at_once(size, most=batch_rows)
    names = [name for name in keys if name not in _FLAGS]
    for stream in streams:
        previous: Columns = {}
        step, ended = 0, True
        for number, chunk in enumerate(stream):
            with closing(NpzTree(chunk.path)) as file, reading(chunk.path):
                is_first, is_last, is_terminal = _read_flags(file, chunk, keys)
                next_begins = _begins_episode(stream[number + 1]) if number + 1 < len(stream) else True
                ends = is_last | np.append(is_first[1:], next_begins)
                begins = step_begins(ends, ended)
                ended = bool(ends[-1])
                done = np.where(ends, np.where(is_last & is_terminal, 1, 2), 0)
                for first in range(0, chunk.length, most):
                    part = slice(first, min(first + most, chunk.length))
                    arrays = file.read([(name, part.start, part.stop) for name in names])
                    values = dict(zip(names, arrays, strict=True))
                    rows = columns.one_later(_actions(values, acting), previous, begins[part])
                    reward = columns.one_each(values, "reward")
                    rows["reward"] = np.where(begins[part], 0, reward).astype(reward.dtype)
                    rows["done"] = done[part].astype(np.int64)
                    rows |= _observations({name: values[name] for name in names if name not in ("reward", *acting)})
                    rows["episode_step"] = columns.step_numbers(begins[part], step)
                    step = int(rows["episode_step"][-1]) + 1
                    yield rows


def _read_flags(file: NpzTree, chunk: _Chunk, keys: Mapping[str, Any]) -> list[npt.NDArray[np.bool_]]:
    """Read the flags of all steps of a chunk; raise SchemaError if the chunk has other arrays than the first file."""
    found = _array_types(file)
    if found != dict(keys):
        others = sorted(name for name in found.keys() | keys.keys() if found.get(name) != keys.get(name))
        raise SchemaError(f"{file.path}: expected the arrays of the first file, found different arrays: {others[:8]}")
    flags = file.read([(name, 0, chunk.length + 1) for name in _FLAGS])
    for name, values in zip(_FLAGS, flags, strict=True):
        if values.shape != (chunk.length,):
            raise damaged(
                file.path,
                f"{name}: expected {chunk.length} steps, as in the file's name, found shape {list(values.shape)}",
            )
    return [values.astype(bool) for values in flags]


def _begins_episode(chunk: _Chunk) -> bool:
    """Whether a chunk begins with the first step of an episode."""
    with closing(NpzTree(chunk.path)) as file, reading(chunk.path):
        (value,) = file.read([("is_first", 0, 1)])
        return bool(value.reshape(-1)[0])


def _actions(values: Columns, acting: Sequence[str]) -> Columns:
    """Return the columns of actions: the column "action" if there is a single key of actions, else one column for each
    key.
    """
    if len(acting) == 1:
        return columns.named("action", values[acting[0]])
    return columns.named(
        "action", {name.removeprefix("action").lstrip("_") or "action": values[name] for name in acting}
    )


def _observations(values: Columns) -> Columns:
    """Return the columns of observations and of metadata. Metadata are keys with a slash or the prefix "log_"."""
    observations, metadata = {}, {}
    for name, array in values.items():
        if "/" in name or name.startswith("log_"):
            metadata[f"metadata_{name.replace('/', '_')}"] = array
        else:
            observations[name] = array
    alone = next(iter(observations.values())) if len(observations) == 1 else observations
    return columns.named("observation", alone) | metadata
