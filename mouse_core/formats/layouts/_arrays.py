"""Find the arrays of an episode, or of a file, that a layout names; check their lengths, types and shapes."""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import damaged, reading
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats._files.npz import NpzTree, npy_header
from mouse_core.formats._files.on_disk import ZARR, is_zarr
from mouse_core.formats.columns.named import travels_with_action
from mouse_core.formats.columns.pickled import pickled_arrays
from mouse_core.formats.layouts.layout import FLAGS, TreeLayout

HDF5 = (".hdf5", ".h5")
ARCHIVES = (".tar", ".gz", ".tgz", ".xz", ".txz")
_MOST_BYTES = 1 << 30  # of a file in an archive, and of a pickle


Tree = H5File | NpzTree
"""An open file or folder of groups and arrays."""


class ZarrTree(H5File):
    """A zarr group of version 2 or 3, open for reading.

    Args:
        path: A folder or a zip file.

    Raises:
        ImportError: The package zarr is not installed.
        ConfigError: The group does not exist.
        DataError: The group is damaged.
    """

    child = Path(__file__).with_name("zarr_child.py")
    library = "zarr"
    called = "zarr"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._absent: dict[str, tuple[int, int]] = {}
        super().__init__(path)

    @staticmethod
    def check(path: str) -> None:
        """Raise ConfigError if the path holds no zarr group."""
        if not is_zarr(Path(path)):
            raise ConfigError(f"{path}: expected a zarr group, a folder or zip file with {ZARR[0]} or {ZARR[1]}")

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Description of the group or array at each path; None if nothing lies there."""
        found = super().find(paths)
        for path, tree in zip(paths, found, strict=True):
            if tree and tree.get("absent"):
                self._absent[path] = (tree["absent"], tree["chunks"])
        return found

    @property
    def notes(self) -> list[str]:
        """Notes on missing chunks of the arrays that ``find`` returned; zarr writes no chunk of fill values."""
        return [
            f"{path}: {absent} of {chunks} chunks are not there and are read as the fill value."
            for path, (absent, chunks) in self._absent.items()
        ]


def _open(path: Path) -> Any:
    if is_zarr(path):
        return ZarrTree(path)
    if path.suffix == ".npy":
        with reading(path), path.open("rb") as file:
            return _in_memory(str(path), file, path.stat().st_size)
    is_npz = path.suffix == ".npz" or (path.suffix not in HDF5 and zipfile.is_zipfile(path))
    return NpzTree(path) if is_npz else H5File(path)


def _in_memory(where: str, file: IO[bytes], size: int) -> NpzTree:
    """The arrays of an npz file, or of a dict that ``numpy.save`` pickled, read as data."""
    if size > _MOST_BYTES:
        raise damaged(where, f"expected a file of at most {_MOST_BYTES >> 20} MB, found {size >> 20} MB")
    held = io.BytesIO(file.read(size))
    if where.endswith(".npy"):
        shape, _, dtype = npy_header(held, where)
        if shape != () or dtype != np.dtype(object):
            raise DataError(f"{where}: expected a dict of arrays, found an array {list(shape)} of {dtype}")
        arrays, held = pickled_arrays(held.read(), where=where), io.BytesIO()
        np.savez(held, **arrays)  # type: ignore[arg-type]
    return NpzTree(where, held)


def _members(archive: Path) -> Generator[NpzTree]:
    with reading(archive), tarfile.open(archive, "r|*") as members:
        for member in members:
            name, where = PurePosixPath(member.name).name, f"{archive}, {member.name}"
            if member.isdir() or name.startswith("."):
                continue
            held = members.extractfile(member) if member.isfile() else None
            if held is None or not name.endswith((".npy", ".npz")):
                raise damaged(where, "expected a file .npz or .npy, found something else")
            yield _in_memory(where, held, member.size)


def open_each(files: Sequence[Path]) -> Generator[Tree]:
    """Open the files, and the files in archives, in turn; a file stays open until the next one is requested."""
    with ExitStack() as stack:
        file: Any = None
        for path in files:
            if path.suffix in ARCHIVES:
                yield from stack.enter_context(closing(_members(path)))
                continue
            if type(file) is H5File and path.suffix in HDF5:
                file.another(path)
            else:
                stack.close()
                file = stack.enter_context(closing(_open(path)))
            yield file


_OBSERVED = ("observation", "next_observation")
_PICTURE_BYTES = 1 << 20  # of one of any size, about


@dataclass(frozen=True)
class Array:
    """An array of a tree, and the column that it becomes.

    Args:
        path: The path of the array in the tree.
        role: The argument of ``TreeLayout`` that names it.
        name: The name of the column behind its role; empty if the role has one array.
        rows: The number of rows; -1 for a single value.
        row_bytes: About how many bytes a row takes.
        moves: Whether it is metadata that belongs to the action of its row.
        frames: If each row is an array of bytes by itself: the names of these arrays below ``path``, in order, and
            their sizes in bytes.
    """

    path: str
    role: str
    name: str
    rows: int
    row_bytes: int
    moves: bool = False
    frames: tuple[tuple[str, int], ...] = ()


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sort key of names by the numbers in them: demo_2 comes before demo_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def arrays_of(file: Tree, layout: TreeLayout, stars: Sequence[str]) -> list[list[Array]]:
    """Return the arrays of each episode that the layout names.

    Args:
        file: The open file.
        layout: The paths.
        stars: For each episode the text that ``*`` stands for.

    Raises:
        DataError: A path leads nowhere, or to data that no column can hold.
        SchemaError: Two arrays have one name.
    """
    named = [(role, name, path) for role, paths in layout.roles().items() for name, path in paths.items()]
    asked = [[_plain(path).replace("*", star) for _, _, path in named] for star in stars]
    found = iter(file.find([path for paths in asked for path in paths]))
    groups = [layout.group().replace("*", star) for star in stars]
    whole: Any = iter(file.find([f"/{group}" for group in groups]) if layout.other_metadata else [None] * len(stars))
    return [
        _arrays(file, layout, named, paths, [next(found) for _ in paths], group, next(whole) or {})
        for paths, group in zip(asked, groups, strict=True)
    ]


def _plain(path: str) -> str:
    return path.removeprefix("not ").removesuffix("?")


def _arrays(
    file: Tree,
    layout: TreeLayout,
    named: Sequence[tuple[str, str, str]],
    paths: Sequence[str],
    trees: Sequence[Any],
    group: str,
    whole: Mapping[str, Any],
) -> list[Array]:
    found: list[Array] = []
    for (role, name, written), path, tree in zip(named, paths, trees, strict=True):
        if tree is None or (tree["kind"] == "group" and not any(True for _ in leaves(tree))):
            if written.endswith("?"):
                continue
            what = "none" if tree is None else "a group of nothing"
            raise damaged(file.path, f"{path}: expected an array or a group of them for {role}, found {what}")
        if layout.leaves_out(path) or (role == "is_last" and any(array.role == role for array in found)):
            continue
        if role == "metadata" and not name and tree["kind"] != "group":
            name = path.split("/")[-1]
        if tree["kind"] != "group" or _is_frames(tree, path, role, layout):
            found.append(_array(file.path, path, role, name, tree, layout))
            continue
        if role in ("reward", *FLAGS):
            raise damaged(file.path, f"{path}: expected an array for {role}, found a group of {[*tree['items']][:8]}")
        for keys, part in _below(tree, path, role, layout):
            below = "/".join((path, *keys))
            if below not in paths and not layout.leaves_out(below):
                parts = (name, *keys) if name else keys
                found.append(_array(file.path, below, role, "/".join(parts), part, layout))
    for keys, part in leaves(whole):
        path = "/".join((group, *keys)).lstrip("/")
        is_named = any(path == other or path.startswith(f"{other}/") for other in paths)
        if part["shape"] and part["kind"] != "empty" and not is_named and not layout.leaves_out(path):
            found.append(_array(file.path, path, "metadata", "/".join(keys), part, layout))
    wanted = [path for (role, _, _), path in zip(named, paths, strict=True) if role == "observation"]
    if wanted and not any(array.role == "observation" for array in found):
        raise damaged(file.path, f"expected observations in {' or '.join(wanted[:3])}, found none")
    columns = [(array.role, array.name) for array in found]
    if len(set(columns)) < len(columns):
        same = sorted({"_".join(column) for column in columns if columns.count(column) > 1})
        raise SchemaError(f"{file.path}: expected paths that make different names of columns, found {same[:8]} twice")
    seen, following = ({name for other, name in columns if other == role} for role in _OBSERVED)
    if following and seen != following:
        raise SchemaError(f"{file.path}: expected next observations {sorted(seen)[:8]}, found {sorted(following)[:8]}")
    return found


def _below(tree: Mapping[str, Any], path: str, role: str, layout: TreeLayout) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of a group as ``leaves`` does, with each group of encoded pictures as one leaf."""
    for name, item in tree["items"].items():
        if item["kind"] != "group" or _is_frames(item, f"{path}/{name}", role, layout):
            yield (name,), item
        else:
            yield from (((name, *keys), part) for keys, part in _below(item, f"{path}/{name}", role, layout))


def _is_frames(tree: Mapping[str, Any], path: str, role: str, layout: TreeLayout) -> bool:
    """Whether a group holds pictures: one array of bytes for each step, with names that differ by a number."""
    if role not in _OBSERVED or not layout.may_be_files(path):
        return False
    parts = tree["items"].values()
    single = all(
        part["kind"] != "group" and ((len(part["shape"]) == 1 and part["dtype"] == "|u1") or _is_opaque(part, ndim=0))
        for part in parts
    )
    return single and {re.sub(r"\d+", "#", name).count("#") for name in tree["items"]} == {1}


def _is_opaque(part: Mapping[str, Any], *, ndim: int) -> bool:
    """Whether values are bytes of no type (``np.void``)."""
    return part["kind"] == "other" and part["dtype"].startswith("|V") and len(part["shape"]) == ndim


def rows_of(file: Tree, items: Sequence[tuple[Array, int, int]]) -> list[npt.NDArray[Any]]:
    """Read rows ``[first, end)`` of several arrays. Byte strings of any length become arrays of objects."""
    asked: list[tuple[str, int, int]] = []
    for array, first, end in items:
        each = [(f"/{array.path}/{name}", 0, size) for name, size in array.frames[first:end]]
        asked += each if array.frames else [(f"/{array.path}", first, end)]
    read = iter(file.read(asked))
    found = []
    for array, first, end in items:
        rows = np.empty(len(array.frames[first:end]), object)
        for row in range(len(rows)):
            rows[row] = next(read).tobytes()
        found.append(rows if array.frames else next(read))
    return found


def _array(where: str, path: str, role: str, name: str, part: Mapping[str, Any], layout: TreeLayout) -> Array:
    moves = role == "metadata" and (travels_with_action(name) or travels_with_action(name.replace("/", "_")))
    moves = moves or layout.moves(path)
    name = name.replace("/", "_")
    wanted = ("number", "text") if role in (*_OBSERVED, "metadata", "action") else ("number",)
    if part["kind"] == "group":
        names = sorted(part["items"], key=natural_key)
        frames = tuple((name, math.prod(part["items"][name]["shape"])) for name in names)
        return Array(path, role, name, len(frames), _PICTURE_BYTES, frames=frames)
    files = role in _OBSERVED and layout.may_be_files(path)
    ragged = part["kind"] == "ragged" and part["dtype"] == "uint8"
    if part["kind"] not in wanted and not (files and (ragged or _is_opaque(part, ndim=1))):
        raise damaged(
            where,
            f"{path}: expected numbers for {role}, found {part['kind']} {part['dtype']} of shape {part['shape']}"
            + _hint(role, path, layout),
        )
    shape = part["shape"]
    # A text may be of any length.
    width = np.dtype(part["dtype"]).itemsize if part["kind"] == "number" else 256
    if files and part["kind"] != "number":
        width = _PICTURE_BYTES
    elif role in _OBSERVED and part["dtype"] == "|u1" and len(shape) == 2:
        width *= 20  # pictures that are encoded, maybe
    return Array(path, role, name, shape[0] if shape else -1, math.prod(shape[1:]) * width, moves)


def _hint(role: str, path: str, layout: TreeLayout) -> str:
    """Remedy for metadata that cannot be read; empty for other roles."""
    group = layout.group()
    below = path.split("/")[len(group.split("/")) if group else 0 :]
    place = "/".join([group, *below]).lstrip("/")
    return f"; where that is no damage, leave_out=[{place!r}] reads the rest" if role == "metadata" else ""


def flags_of(array: Array, values: npt.NDArray[Any], layout: TreeLayout) -> npt.NDArray[np.bool_]:
    """Flags ``[n]``: whether values are not 0, or are 0 if the path of the layout begins with "not"."""
    is_set = values.reshape(-1).astype(bool)
    return ~is_set if layout.roles()[array.role][array.name].startswith("not ") else is_set


def lengths_of(arrays: Sequence[Array], layout: TreeLayout, *, where: str) -> tuple[int, bool]:
    """Return the steps of an episode, maybe 0, and whether its last observation is there; compare all lengths.

    Args:
        arrays: All arrays of the episode.
        layout: The layout, which says which arrays arrived.
        where: The file and episode that messages name.

    Raises:
        DataError: Two arrays have lengths that contradict each other.
    """

    def length(role: str) -> int | None:
        return next((array.rows for array in arrays if array.role == role), None)

    seen, acted = length("observation"), length("action")
    arrived = layout.arrived() & {array.role for array in arrays}
    if seen is not None and arrived:
        steps, closed = max(seen - 1, 0), seen > 0
    elif seen is None or acted is None:
        steps, closed = seen if acted is None and seen is not None else acted or 0, False
    else:
        steps, closed = acted, seen == acted + 1
    if min(seen or 0, acted or 0) < 0:  # single values
        raise damaged(where, f"expected at least one step, found {seen} observations and {acted} actions")
    for array in arrays:
        single = array.rows in (-1, 1) and array.role in ("terminated", "truncated") and layout.whole
        if array.role == "observation" or array.role in arrived:
            wanted = [steps + closed]
        else:
            wanted = [steps, steps + 1] if closed and array.role != "next_observation" else [steps]
        if not single and array.rows not in wanted:
            raise damaged(
                where,
                f"{array.path}: expected {' or '.join(map(str, wanted))} rows, as there are steps, found "
                f"{max(array.rows, 0)}" + _hint(array.role, array.path, layout),
            )
    return steps, closed


Types = dict[tuple[str, str], np.dtype[Any]]


def cast_like_first(values: dict[Array, npt.NDArray[Any]], types: Types, where: str) -> dict[Array, npt.NDArray[Any]]:
    """Cast the values of an episode to the types of the first episode; some recorders change types between episodes.

    Args:
        values: The values by array. Numbers are cast; flags and texts are not.
        types: The types of the first episode, by role and name. New arrays are added.
        where: The file and episode that messages name.

    Raises:
        DataError: The type of the first episode cannot hold a value.
    """
    cast = {}
    for array, part in values.items():
        wanted = types.setdefault((array.role, array.name), part.dtype)
        numbers = wanted.kind in "biuf" and part.dtype.kind in "biuf" and array.role not in ("terminated", "truncated")
        if numbers and part.dtype != wanted:
            if not _holds(wanted, part):
                raise damaged(
                    where,
                    f"{array.path}: expected {wanted} as in the first episode, found {part.dtype} and values that "
                    f"{wanted} does not have; save that array of all episodes in one type",
                )
            part = part.astype(wanted)
        cast[array] = part
    return cast


def _holds(wanted: np.dtype[Any], values: npt.NDArray[Any]) -> bool:
    """Whether a numeric type can hold all values."""
    if not values.size or values.dtype.kind == "b":
        return True
    if wanted.kind in "iu" and values.dtype.kind in "iu":
        bounds = np.iinfo(wanted)
        return bounds.min <= int(values.min()) and int(values.max()) <= bounds.max
    if wanted.kind != "f":
        return False
    if values.dtype.kind in "iu":  # all up to 2 ** 24 are a float32's
        most = 1 << np.finfo(wanted).nmant + 1
        return -most <= int(values.min()) and int(values.max()) <= most
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(wanted).astype(values.dtype), values, equal_nan=True)


def check_shapes(columns: Mapping[str, npt.NDArray[Any]], known: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise DataError if a column has another shape than in ``known``; new columns are added to ``known``."""
    for name, values in columns.items():
        shape = known.setdefault(name, values.shape[1:])
        if values.dtype != object and values.shape[1:] != shape:
            found = f"{list(values.shape[1:])}; all episodes of a column have one"
            raise damaged(where, f"column {name!r}: expected shape {list(shape)} a step, found {found}")
