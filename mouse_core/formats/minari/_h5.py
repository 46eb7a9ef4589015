"""Minari's HDF5 storage as pieces of episodes, straight from the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.base import damaged, reading
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.minari._pieces import BUDGET, KNOWN, Piece, picture_bytes, plain_text, sampled, shaped, subspace

EPISODES_AT_ONCE = 32


def h5_pieces(
    path: Path, metadata: Mapping[str, Any], spaces: Mapping[str, Any], *, rows: int, infos: bool, sample: int = 0
) -> Iterator[Piece]:
    """Pieces of all episodes of an HDF5 file.

    Args:
        path: The file.
        metadata: The content of ``metadata.json``.
        spaces: The spaces of ``observations`` and ``actions``, None where not known.
        rows: At most how many rows a piece has.
        infos: Whether to read infos.
        sample: Take the first rows of so many episodes only, evenly spaced.
    """
    with H5File(path) as file:
        numbers = sorted(int(match[1]) for name in file.names() if (match := re.fullmatch(r"episode_(\d{1,15})", name)))
        total = metadata.get("total_episodes", len(numbers))
        if numbers != list(range(len(numbers))) or len(numbers) != total:
            raise damaged(
                path, f"expected episodes 0..{total - 1}, found {len(numbers)} up to {max(numbers, default=-1)}"
            )
        numbers = sampled(len(numbers), sample)
        for start in range(0, len(numbers), EPISODES_AT_ONCE):
            some = numbers[start : start + EPISODES_AT_ONCE]
            trees = file.trees([f"/episode_{number}" for number in some])
            yield from _h5_group(file, some, trees, spaces, rows, infos, bool(sample))


def _h5_group(
    file: H5File,
    numbers: list[int],
    trees: list[dict[str, Any]],
    spaces: Mapping[str, Any],
    rows: int,
    infos: bool,
    only_first: bool,
) -> Iterator[Piece]:
    """Pieces of some episodes; short ones are asked for together."""
    waiting: list[tuple[_H5Episode, int, int]] = []
    size = 0
    for number, tree in zip(numbers, trees, strict=True):
        episode = _H5Episode(file.path, number, tree, spaces, infos)
        step = rows_at_once(episode.row_bytes, most=rows)
        for begin in range(0, episode.length + 1, step):
            stop = min(begin + step, episode.length + 1)
            waiting.append((episode, begin, stop))
            size += (stop - begin) * episode.row_bytes
            if size >= BUDGET // 2:
                yield from _h5_read(file, waiting)
                waiting, size = [], 0
            if only_first:
                break
    yield from _h5_read(file, waiting)


def _h5_read(file: H5File, waiting: list[tuple[_H5Episode, int, int]]) -> Iterator[Piece]:
    asked = [episode.items(begin, stop) for episode, begin, stop in waiting]
    values = iter(file.read([item for items in asked for item in items]))
    for (episode, begin, _), items in zip(waiting, asked, strict=True):
        yield episode.piece(begin, list(islice(values, len(items))))


class _H5Episode:
    """One episode's datasets: how many rows they hold, and where."""

    def __init__(self, path: str, number: int, tree: dict[str, Any], spaces: Mapping[str, Any], infos: bool) -> None:
        self._path = path
        self._number = number
        self._where = f"episode {number}"
        parts = tree.get("items", {})
        missing = [name for name in KNOWN if name not in parts]
        if missing:
            raise damaged(path, f"expected {list(KNOWN)}, found no {missing} among {list(parts)}", at=self._where)
        self.about = {key: value for key, value in tree["attributes"].items() if key == "seed"}
        options = {key[8:]: value for key, value in tree["attributes"].items() if key.startswith("options/")}
        if options:
            self.about["options"] = json.dumps(options, sort_keys=True)
        self._tree = {name: part for name, part in parts.items() if infos or name != "infos"}
        self._spaces = spaces
        rewards = parts["rewards"]
        if rewards["kind"] != "number" or len(rewards["shape"]) != 1:
            raise damaged(
                path, f"rewards: expected one number a step, found shape {rewards.get('shape')}", at=self._where
            )
        self.length = int(rewards["shape"][0])
        self._leaves: list[tuple[str, dict[str, Any], int]] = []
        self.row_bytes = picture_bytes(spaces)
        self._collect()

    def _collect(self) -> None:
        for path, part in leaves({"items": self._tree}):
            here, first = f"/{'/'.join(path)}", path[0]
            if first not in (*KNOWN, "infos") and (part["kind"] == "empty" or not part["shape"]):
                continue  # a single value says nothing of steps
            length = part["shape"][0] if part["shape"] else None
            wanted = {self.length, self.length + 1} if first not in KNOWN else {self.length + (first == "observations")}
            if length not in wanted or part["kind"] == "other":
                raise damaged(
                    self._path,
                    f"{here[1:]}: expected {sorted(wanted)} rows of numbers or text beside {self.length} rewards, "
                    f"found {part['kind']} {part['dtype']} {part['shape']}"
                    + ("; infos=False reads the rest" if first == "infos" else ""),
                    at=self._where,
                )
            self._leaves.append((here, part, length))
            width = int(np.prod(part["shape"][1:], dtype=np.float64))
            self.row_bytes += width * (np.dtype(part["dtype"]).itemsize if part["kind"] == "number" else 64)

    def items(self, begin: int, stop: int) -> list[tuple[str, int, int]]:
        """What to read for rows ``begin`` up to ``stop``."""
        shifts = [(path, length == self.length) for path, _, length in self._leaves]
        return [(f"/episode_{self._number}{path}", max(begin - shift, 0), stop - shift) for path, shift in shifts]

    def piece(self, begin: int, values: list[npt.NDArray[Any]]) -> Piece:
        """The piece that these values make."""
        by_path = {path: value for (path, _, _), value in zip(self._leaves, values, strict=True)}
        shifted = {path for path, _, length in self._leaves if length == self.length}
        with reading(self._path, at=self._where):
            nested = {key: _nested(self._tree[key], by_path, f"/{key}", self._spaces.get(key)) for key in KNOWN}
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for path, value in by_path.items():
            if path.split("/")[1] not in KNOWN:
                parts[path in shifted][path[1:]] = plain_text(value)
        observations = nested.pop("observations")
        return Piece(self._number, begin, observations, nested, *parts, self.about)


def _nested(tree: Mapping[str, Any], values: Mapping[str, Any], path: str, space: Any) -> Any:
    """Values of a subtree, nested as the space says; groups ``_index_<i>`` are tuples."""
    if tree["kind"] == "group":
        names = list(tree["items"])
        parts = {}
        for name, item in tree["items"].items():
            index = name.removeprefix("_index_") if space is None or space["type"] == "Tuple" else name
            inner = subspace(space, index, f"{path}/{name}")
            parts[index] = _nested(item, values, f"{path}/{name}", inner)
        if space is not None and space["type"] == "Dict":
            return {name: parts[name] for name in space["subspaces"] if name in parts} | parts
        if names and all(name.startswith("_index_") for name in names):
            return tuple(parts[str(index)] for index in range(len(parts)))
        return parts
    if path not in values:
        raise DataError(f"{path[1:]}: expected one value a step, found a single one")
    return shaped(values[path], space, where=path[1:])
