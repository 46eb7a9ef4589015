"""Steps of TED out of files: memory-mapped folders and HDF5, in whichever layout, in bounded pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core.errors import SchemaError
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats.base import damaged
from mouse_core.formats.ted._tensordict import read_folder, read_json

Key = tuple[str, ...]
Arrays = dict[Key, npt.NDArray[Any]]
_DONE = {("done",), ("terminated",), ("truncated",)}
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """Some steps, in the order they happened.

    Args:
        root, following: What stands at the root and in ``next``, both by the same keys.
        other: What stands at one of them alone, and the done flags of ``next``.
        begins: Whether a trajectory is known to begin with a step.
    """

    root: Arrays
    following: Arrays
    other: Arrays
    begins: npt.NDArray[np.bool_]


class Entries(Protocol):
    """Where arrays are."""

    name: str

    def shape(self, key: Key) -> tuple[int, ...]:
        """``[n, ...]`` of an entry."""
        ...

    def keys(self) -> Sequence[Key]:
        """All entries."""
        ...

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """Rows ``first..end - 1`` of some entries."""
        ...

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """The same of one environment, ``dimensions`` being time and those over environments."""
        ...

    def about(self) -> Mapping[str, Any]:
        """Values that are no arrays."""
        ...


class FolderEntries:
    """A memory-mapped folder, or a TorchRL buffer's checkpoint that holds one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        folder = path if (path / "meta.json").is_file() else path / "storage"
        self._found = read_folder(folder)
        self._about = {key[0]: value for key, value in self._found.others.items() if len(key) == 1}
        self._about["_batch"] = self._found.batch
        # What TorchRL writes beside: how many places of the ring are used, and where its cursor stands.
        if (folder / "storage_metadata.json").is_file():
            self._about["_len"] = read_json(folder / "storage_metadata.json").get("len")
        if (folder.parent / "writer" / "metadata.json").is_file():
            self._about["_cursor"] = read_json(folder.parent / "writer" / "metadata.json").get("cursor")

    def keys(self) -> Sequence[Key]:
        """See ``Entries``."""
        return list(self._found.arrays)

    def shape(self, key: Key) -> tuple[int, ...]:
        """See ``Entries``."""
        return self._found.arrays[key].shape

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return [self._found.arrays[key].read(first, end) for key in keys]

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return [self._found.arrays[key].read_lane(first, end, dimensions, lane) for key in keys]

    def about(self) -> Mapping[str, Any]:
        """See ``Entries``."""
        return self._about


class FileEntries:
    """A group of an HDF5 file.

    Args:
        file: The open file.
        tree: What lies in the group; see ``H5File.trees``.
        place: The group's path.
    """

    def __init__(self, file: H5File, tree: Mapping[str, Any], place: str) -> None:
        self.name = file.path
        self._file = file
        self._place = place
        self._found: dict[Key, Mapping[str, Any]] = {}
        self._about: dict[str, Any] = {}
        self._collect(tree, ())

    def _collect(self, tree: Mapping[str, Any], path: Key) -> None:
        for name, item in tree.get("items", {}).items():
            if item["kind"] == "group":
                self._collect(item, (*path, name))
            elif item["kind"] == "number" and (item["shape"] and (path or not name.startswith("_"))):
                self._found[*path, name] = item
            elif item["kind"] == "number" and not path:
                values = self._file.read([(f"{self._place}/{name}", 0, 1 << 20)])[0]
                self._about[name] = values.reshape(item["shape"]).tolist()
            elif item["kind"] != "text" or item["shape"]:
                # Left out, it would be a column that vanished.
                raise damaged(
                    self.name,
                    f"{'/'.join((*path, name))}: expected numbers for every step, found {item['kind']} {item['shape']}",
                )

    def keys(self) -> Sequence[Key]:
        """See ``Entries``."""
        return list(self._found)

    def shape(self, key: Key) -> tuple[int, ...]:
        """See ``Entries``."""
        return tuple(self._found[key]["shape"])

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return self._file.read([("/".join((self._place, *key)), first, end) for key in keys])

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """See ``Entries``. All environments are read, for a file of chunks is."""
        return [
            values.reshape(len(values), -1, *values.shape[dimensions:])[:, lane]
            for values in self.read(keys, first, end)
        ]

    def about(self) -> Mapping[str, Any]:
        """See ``Entries``."""
        return self._about


# ---------------------------------------------------------------------- layouts


def pieces(entries: Entries, *, batch_rows: int) -> Iterator[Piece]:
    """All steps in the order they happened, environment by environment.

    Args:
        entries: Where they are.
        batch_rows: How many steps a piece has, at most.

    Raises:
        SchemaError: No steps of TED.
        DataError: Arrays of lengths that do not go together.
    """
    if any(key[0] == "next" for key in entries.keys()):  # noqa: SIM118
        yield from _steps(entries, batch_rows)
    else:
        yield from _flat(entries, batch_rows)


def layout_of(entries: Entries) -> str:
    """The layout in words."""
    return "steps with next" if any(key[0] == "next" for key in entries.keys()) else "flat"  # noqa: SIM118


def _steps(entries: Entries, batch_rows: int) -> Iterator[Piece]:
    keys = list(entries.keys())
    inside = {key[1:] for key in keys if key[0] == "next"}
    root = {key for key in keys if key[0] != "next"}
    flag = next((key for key in (("done",), ("terminated",), ("truncated",)) if key in inside), None)
    if flag is None:
        raise SchemaError(f"{entries.name}: expected next.done, found {_shown(keys)}")
    shape = entries.shape(("next", *flag))
    shape = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
    for key in keys:
        if entries.shape(key)[: len(shape)] != shape:
            raise damaged(
                entries.name, f"{'.'.join(key)}: expected {list(shape)} steps, found {list(entries.shape(key))}"
            )
    n = shape[0] if shape else 0
    about = entries.about()
    lanes = math.prod(shape[1:])
    # TorchRL counts the places of all environments.
    length = _number(about.get("_len"), n * lanes, entries.name, "len")
    used = n if length is None else length // max(1, lanes)
    cursor = _number(about.get("_cursor"), n, entries.name, "cursor") or 0
    order = [(cursor, used), (0, cursor)] if used == n and 0 < cursor < n else [(0, used)]
    both = sorted((root & inside) - _DONE)
    other = [*sorted(root - inside - _DONE), *(("next", *key) for key in sorted((inside - root) | (inside & _DONE)))]
    wanted = [*both, *(("next", *key) for key in both), *other]
    size = _piece(entries, wanted, batch_rows)
    for lane in range(lanes):
        fresh = True
        for first, stop in order:
            for begin in range(first, stop, size):
                end = min(begin + size, stop)
                if len(shape) == 1:
                    read = entries.read(wanted, begin, end)
                else:
                    read = entries.read_lane(wanted, begin, end, len(shape), lane)
                begins = np.zeros(end - begin, bool)
                begins[0], fresh = fresh, False
                found = dict(zip(wanted, read, strict=True))
                yield Piece(
                    {key: found[key] for key in both},
                    {key: found["next", *key] for key in both},
                    {key[1:] if key[0] == "next" else key: found[key] for key in other},
                    begins,
                )


def _flat(entries: Entries, batch_rows: int) -> Iterator[Piece]:
    keys = list(entries.keys())
    if ("done",) not in keys:
        raise SchemaError(f"{entries.name}: expected 'next', or 'done' of the flat layout, found {_shown(keys)}")
    steps = entries.shape(("done",))[0]
    about = entries.about()
    shape = about.get("_storage_shape") or [steps]
    shape = [shape] if isinstance(shape, int) else list(shape)
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) != steps:
        raise damaged(entries.name, f"_storage_shape: expected the shape of {steps} steps, found {shape!r}")
    full = bool(about.get("is_full", True))
    n, lanes = shape[0], steps // shape[0]
    shift = _number(about.get("shift"), n, entries.name, "shift")
    used = n if full or shift is None else shift
    length = _number(about.get("_len"), steps, entries.name, "len")
    used = used if length is None else min(used, length // lanes)
    if not used:
        return
    done = entries.read([("done",)], 0, steps)[0].reshape(steps, -1)
    if done.shape[1] != 1:
        raise damaged(entries.name, f"done: expected one flag a step, found {list(done.shape)}")
    ends = done[:, 0].astype(bool).reshape(lanes, n).copy()
    ends[:, (n if full else used) - 1] = True
    widths = n + ends.sum(axis=1)
    total = int(widths.sum())
    both: list[Key] = []
    other: list[Key] = []
    for key in keys:
        rows = entries.shape(key)[0]
        if rows not in (steps, total):
            raise damaged(
                entries.name,
                f"{'.'.join(key)}: expected {steps} entries, one a step, or {total}, one an observation, found {rows}",
            )
        (both if rows == total else other).append(key)
    size = _piece(entries, [*both, *other], batch_rows)
    starts = np.concatenate([[0], np.cumsum(widths)])
    for lane in range(lanes):
        before = np.concatenate([[0], np.cumsum(ends[lane])])
        for begin in range(0, used, size):
            end = min(begin + size, used)
            places = np.arange(begin, end) + before[begin:end]
            low, high = int(places[0]), int(places[-1]) + 2
            offset = int(starts[lane])
            seen = entries.read(both, offset + low, offset + high)
            rest = entries.read(other, lane * n + begin, lane * n + end)
            begins = np.concatenate([[begin == 0 or ends[lane][begin - 1]], ends[lane][begin : end - 1]])
            yield Piece(
                {key: values[places - low] for key, values in zip(both, seen, strict=True)},
                {key: values[places - low + 1] for key, values in zip(both, seen, strict=True)},
                dict(zip(other, rest, strict=True)),
                np.asarray(begins, bool),
            )


def trajectory(entries: Entries, *, batch_rows: int) -> Iterator[Piece]:
    """The steps of one trajectory of the nested layout, of which every observation is there once."""
    keys = list(entries.keys())
    if ("done",) not in keys:
        raise SchemaError(f"{entries.name}: expected 'done' in every trajectory, found {_shown(keys)}")
    steps = entries.shape(("done",))[0]
    both = [key for key in keys if entries.shape(key)[0] == steps + 1]
    other = [key for key in keys if entries.shape(key)[0] == steps]
    if len(both) + len(other) < len(keys) or (not both and steps):
        shapes = {".".join(key): list(entries.shape(key)) for key in keys}
        raise damaged(
            entries.name, f"expected {steps} steps and {steps + 1} observations in a trajectory, found {shapes}"
        )
    size = _piece(entries, keys, batch_rows)
    for begin in range(0, steps, size):
        end = min(begin + size, steps)
        seen = entries.read(both, begin, end + 1)
        begins = np.zeros(end - begin, bool)
        begins[0] = begin == 0
        yield Piece(
            {key: values[:-1] for key, values in zip(both, seen, strict=True)},
            {key: values[1:] for key, values in zip(both, seen, strict=True)},
            dict(zip(other, entries.read(other, begin, end), strict=True)),
            begins,
        )


def _piece(entries: Entries, keys: Sequence[Key], batch_rows: int) -> int:
    """How many steps are read at a time: no more than asked for, and no more than some megabytes."""
    each = sum(8 * math.prod(entries.shape(key)[1:]) for key in keys)
    return max(1, min(batch_rows, _PIECE_BYTES // max(1, each)))


def _number(value: Any, most: int, name: str, what: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise damaged(name, f"{what}: expected a number in 0..{most}, found {json.dumps(value, default=str)[:50]}")
    return value


def _shown(keys: Sequence[Key]) -> list[str]:
    return [".".join(key) for key in keys]
