"""DreamerV3's replay: pieces of streams of steps, an npz file each, whose name says which piece goes on behind it.

A step holds an observation, the reward that came with it, and the action that was taken on it then.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats._files.h5 import leaves
from mouse_core.formats._files.on_disk import DREAMERV3
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import (
    Columns,
    named_action,
    named_observation,
    one_each,
    ordered,
    schema_of,
    to_batches,
)
from mouse_core.formats.columns.transitions import one_later, step_numbers
from mouse_core.formats.layouts._trees import NpzTree

__all__ = ["read_dreamerv3"]

_FLAGS = ("is_first", "is_last", "is_terminal")
# Where a step was stored, and what the environment was told besides its action.
_LEFT_OUT = ("stepid", "consec", "reset")


@dataclass(frozen=True)
class _Piece:
    """A file: when it was begun, its name and that of the piece behind it, and how many steps it has."""

    path: Path
    time: str
    name: str
    following: str
    length: int


def read_dreamerv3(
    path: str | os.PathLike[str], *, actions: Sequence[str] = (), batch_rows: int = BATCH_ROWS
) -> RowStream:
    """The replay of DreamerV3 as rows: streams one after the other, by the time at which they begin.

    ``done`` is 1 at a step that is last and terminal, 2 at others that are last, before one that is first, and where a
    stream stops. A stream whose beginning was removed begins with an episode that lacks its own. Keys with a slash,
    which are states of a model, are ``metadata_<key>``.

    Args:
        path: The folder, with files ``TIME-ID-FOLLOWING-LENGTH.npz``, or one such file.
        actions: The keys of actions, where they are others than those that begin with "action".
        batch_rows: At most how many rows a batch has.

    Raises:
        ConfigError: No such files, or no such keys.
        DataError: A damaged file, one whose length is not that of its name, or pieces that follow themselves.
        SchemaError: Files of different arrays.
    """
    check_batch_rows(batch_rows)
    root = Path(path)
    streams = _streams(root)
    first = streams[0][0]
    with closing(NpzTree(first.path)) as file:
        keys = _keys(file)
        _check_keys(file, keys, actions)
    schema = schema_of(next(_rows([[first]], keys, actions, 1)))

    def batches() -> Iterator[pa.RecordBatch]:
        return to_batches(_rows(streams, keys, actions, batch_rows), schema, where=str(root))

    count = sum(piece.length for stream in streams for piece in stream)
    pieces = sum(map(len, streams))
    notes = [f"{pieces} files are {len(streams)} streams; where one stops, the episode is taken as truncated."]
    return RowStream(
        os.fspath(path), "dreamerv3", schema, batches, rows=count, notes=tuple(notes), about=About("arrived")
    )


def _streams(root: Path) -> list[list[_Piece]]:
    """The pieces of each stream, in their order."""
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    files = [root] if root.is_file() else [one for one in sorted(root.glob("*.npz")) if DREAMERV3.fullmatch(one.name)]
    check_inside(files, root)
    pieces: dict[str, _Piece] = {}
    for file in files:
        match = DREAMERV3.fullmatch(file.name)
        if match is None:
            continue
        time, name, following, length = match.groups()
        if name in pieces:
            raise damaged(file, f"expected pieces of different names, found another one of {pieces[name].path.name}")
        pieces[name] = _Piece(file, time, name, following, int(length))
    pieces = {name: piece for name, piece in pieces.items() if piece.length}
    if not pieces:
        raise ConfigError(f"{root}: expected files TIME-ID-FOLLOWING-LENGTH.npz with steps, found none")
    followed = Counter(piece.following for piece in pieces.values() if piece.following in pieces)
    if twice := [pieces[name].path.name for name, count in followed.items() if count > 1]:
        raise damaged(
            root, f"expected pieces that follow one other piece each, found {twice[:4]}, which follow several"
        )
    heads = sorted((one for name, one in pieces.items() if name not in followed), key=lambda one: (one.time, one.name))
    streams = []
    for head in heads:
        stream = [head]
        while (found := pieces.pop(stream[-1].following, None)) is not None:
            stream.append(found)
        pieces.pop(head.name, None)
        streams.append(stream)
    if pieces:
        some = sorted(piece.path.name for piece in pieces.values())
        raise damaged(root, f"expected streams that begin somewhere, found {some[:4]}, which follow each other")
    return streams


def _keys(file: NpzTree) -> dict[str, tuple[Any, ...]]:
    """The arrays of a file, and the shape and dtype of a step's value."""
    (tree,) = file.find(["/"])
    found = {"/".join(path): part for path, part in leaves(tree or {"items": {}})}
    keys = {}
    for name, part in found.items():
        if name in _LEFT_OUT:
            continue
        if part["kind"] != "number" or not part["shape"]:
            raise damaged(file.path, f"{name}: expected a number a step or more, found {part['kind']} {part['shape']}")
        keys[name] = (tuple(part["shape"][1:]), part["dtype"])
    return keys


def _check_keys(file: NpzTree, keys: Mapping[str, Any], actions: Sequence[str]) -> None:
    missing = [name for name in (*_FLAGS, "reward", *actions) if name not in keys]
    if missing or not any(_is_action(name, actions) for name in keys):
        raise ConfigError(
            f"{file.path}: expected arrays {[*_FLAGS, 'reward', *(actions or ['action'])]}, found {sorted(keys)[:20]}"
        )


def _is_action(name: str, actions: Sequence[str]) -> bool:
    return name in actions if actions else name.startswith("action")


def _rows(
    streams: Sequence[Sequence[_Piece]], keys: Mapping[str, Any], actions: Sequence[str], batch_rows: int
) -> Iterator[Columns]:
    size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in keys.values())
    most = rows_at_once(size, most=batch_rows)
    for stream in streams:
        before: Columns = {}
        step, ended = 0, True
        for number, piece in enumerate(stream):
            with closing(NpzTree(piece.path)) as file, reading(piece.path):
                flags = _flags(file, piece, keys)
                after = _begins(stream[number + 1]) if number + 1 < len(stream) else True
                ends = flags["is_last"] | np.append(flags["is_first"][1:], after)
                begins = np.append(ended, ends[:-1])
                ended = bool(ends[-1])
                done = np.where(ends, np.where(flags["is_last"] & flags["is_terminal"], 1, 2), 0)
                for first in range(0, piece.length, most):
                    part = slice(first, min(first + most, piece.length))
                    names = [name for name in keys if name not in _FLAGS]
                    found = file.read([(name, part.start, part.stop) for name in names])
                    values = dict(zip(names, found, strict=True))
                    rows = one_later(_actions(values, actions), before, begins[part])
                    reward = one_each(values, "reward")
                    rows["reward"] = np.where(begins[part], 0, reward).astype(reward.dtype)
                    rows["done"] = done[part].astype(np.int64)
                    rows |= _seen(values, actions)
                    rows["episode_step"] = step_numbers(begins[part], step)
                    step = int(rows["episode_step"][-1]) + 1
                    yield ordered(rows)


def _flags(file: NpzTree, piece: _Piece, keys: Mapping[str, Any]) -> dict[str, npt.NDArray[np.bool_]]:
    there = _keys(file)
    if there != dict(keys):
        others = sorted(name for name in there.keys() | keys.keys() if there.get(name) != keys.get(name))
        raise SchemaError(f"{file.path}: expected the arrays of the first file, found others: {others[:8]}")
    flags = dict(zip(_FLAGS, file.read([(name, 0, piece.length + 1) for name in _FLAGS]), strict=True))
    for name, values in flags.items():
        if values.shape != (piece.length,):
            raise damaged(
                file.path,
                f"{name}: expected {piece.length} steps, as its name has it, found shape {list(values.shape)}",
            )
    return {name: values.astype(bool) for name, values in flags.items()}


def _begins(piece: _Piece) -> bool:
    """Whether a piece begins with the first step of an episode."""
    with closing(NpzTree(piece.path)) as file, reading(piece.path):
        (value,) = file.read([("is_first", 0, 1)])
        return bool(value.reshape(-1)[0])


def _actions(values: Mapping[str, Any], actions: Sequence[str]) -> Columns:
    found = {name: part for name, part in values.items() if _is_action(name, actions)}
    if len(found) == 1:
        return named_action(next(iter(found.values())))
    return named_action({name.removeprefix("action").lstrip("_") or "action": part for name, part in found.items()})


def _seen(values: Mapping[str, Any], actions: Sequence[str]) -> Columns:
    found, beside = {}, {}
    for name, part in values.items():
        if "/" in name or name.startswith("log_"):
            beside[f"metadata_{name.replace('/', '_')}"] = part
        elif name != "reward" and not _is_action(name, actions):
            found[name] = part
    return named_observation(next(iter(found.values())) if len(found) == 1 else found) | beside
