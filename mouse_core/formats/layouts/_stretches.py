"""Find the episodes of a file, or the stretches of consecutive rows that hold several episodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.files.reading import check_inside, damaged
from mouse_core.formats.layouts._arrays import (
    Array,
    Lengths,
    arrays_of,
    lengths_of,
    natural_key,
    rows_of,
)
from mouse_core.formats.layouts._trees import Tree
from mouse_core.formats.layouts.layout import TreeLayout

_AT_ONCE = 64
# Of a file that says where its episodes end, and of a ring.
_MOST_ENDS = 1 << 27


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of a file.

    Args:
        arrays: The arrays that hold the rows.
        first: The first row.
        steps: The number of transitions.
        closed: Whether one more row holds the last observation.
        whole: Whether the rows are one episode.
        where: The file and episode that messages name.
        layout: The layout, with the alignment of these rows.
        constants: Metadata with one value for all rows, by name: the task, the numbers of file and episode.
    """

    arrays: Sequence[Array]
    first: int
    steps: int
    closed: bool
    whole: bool
    where: str
    layout: TreeLayout
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marked(self) -> bool:
        """Whether each row is an observation, and ``is_last`` marks the last one of each episode."""
        roles = {array.role for array in self.arrays}
        return "is_last" in roles and "next_observation" not in roles

    def columns(self) -> set[tuple[str, str]]:
        """The role and name of each column."""
        return {(array.role, array.name) for array in self.arrays} | {("metadata", name) for name in self.constants}


def files_of(root: Path, layout: TreeLayout, suffixes: Sequence[str]) -> list[Path]:
    """The files to read, in the order of the numbers in their names.

    Raises:
        ConfigError: No file is found.
        DataError: A link leads out of the folder.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    if root.is_file():
        return [root]
    if layout.files is not None:
        found = [file for file in root.glob(layout.files) if not file.name.startswith(".")]
    else:
        found = [file for file in root.iterdir() if file.suffix in suffixes and not file.name.startswith(".")]
    check_inside(found, root)
    if not found:
        wanted = f"files {layout.files}" if layout.files else f"files of {list(suffixes)}"
        raise ConfigError(f"{root}: expected {wanted}, found none")
    return sorted(found, key=lambda file: natural_key(file.name))


def stretches_of(file: Tree, layout: TreeLayout, number: int = 0) -> Iterator[Stretch]:
    """Yield all stretches of a file in order, including episodes without steps.

    Args:
        file: The open file.
        layout: The layout of the file.
        number: The number of the file, counted from 0.

    Raises:
        DataError: The file is damaged, or has another layout.
        ConfigError: The file has no episode at the paths of the layout.
    """
    leads = [path for path in layout.leads() if "*" in path]
    if leads:
        yield from _starred(file, layout, leads[0], number)
        return
    (arrays,), (task,) = arrays_of(file, layout, [""]), _tasks_of(file, layout, [""])
    constants = _constants(layout, task, number)
    if layout.one_a_file:
        lengths = lengths_of(arrays, layout, None, file.path)
        yield Stretch(arrays, 0, lengths.steps, lengths.closed, True, file.path, layout, constants)
        return
    rows = lengths_of(arrays, layout, None, file.path)
    if not rows.steps:
        raise damaged(file.path, "expected at least one step, found arrays of no rows")
    if rows.closed:
        raise damaged(file.path, "expected as many observations as actions in arrays that hold several episodes")
    if layout.episode_ends is not None:
        for stretch in _between(file, layout, layout.episode_ends, arrays, rows):
            yield replace(stretch, constants=constants)
    elif layout.ring is not None:
        for place, (first, stop) in enumerate(_rings(file, layout.ring, rows.steps)):
            where = f"{file.path}, stretch {place}"
            yield Stretch(arrays, first, stop - first, False, False, where, layout, constants)
    else:
        yield Stretch(arrays, 0, rows.steps, False, False, file.path, layout, constants)


def _starred(file: Tree, layout: TreeLayout, lead: str, number: int) -> Iterator[Stretch]:
    parts = lead.removesuffix("?").split("/")
    place = next(index for index, part in enumerate(parts) if "*" in part)
    before, _, after = parts[place].partition("*")
    pattern = re.compile(f"{re.escape(before)}({layout.episodes or '.+'}){re.escape(after)}")
    matches = [pattern.fullmatch(name) for name in file.names("/" + "/".join(parts[:place]))]
    stars = sorted((match[1] for match in matches if match), key=natural_key)
    if not stars:
        raise ConfigError(f"{file.path}: expected episodes {lead}, found none")
    outgoing = replace(layout, alignment="outgoing")
    for start in range(0, len(stars), _AT_ONCE):
        some = stars[start : start + _AT_ONCE]
        tasks = _tasks_of(file, layout, some)
        for star, arrays, task in zip(some, arrays_of(file, layout, some), tasks, strict=True):
            where = f"{file.path}, {before}{star}{after}"
            said = outgoing if layout.nan_action and not _ends_in_nan(file, arrays) else layout
            lengths = lengths_of(arrays, said, None, where)
            constants = _constants(layout, task, number, star)
            yield Stretch(arrays, 0, lengths.steps, lengths.closed, True, where, said, constants)


def _ends_in_nan(file: Tree, arrays: Sequence[Array]) -> bool:
    """Whether all parts of the last action are NaN: no action is taken on the last observation."""
    actions = [array for array in arrays if array.role == "action"]
    if any(array.rows < 2 for array in actions):
        return False
    last = rows_of(file, [(array, array.rows - 1, array.rows) for array in actions])
    return all(values.dtype.kind == "f" and bool(np.isnan(values).all()) for values in last)


def _tasks_of(file: Tree, layout: TreeLayout, stars: Sequence[str]) -> list[str | None]:
    """The task of each episode, from the first path of the layout that leads to a text; None if no path does.

    Raises:
        DataError: An attribute is no JSON, or its keys lead to a value that is no text.
    """
    found: list[str | None] = [None] * len(stars)
    for path in layout.tasks():
        lacking = [number for number, task in enumerate(found) if task is None]
        group, _, said = path.partition("@")
        name, *keys = said.split("/")
        places = [group.replace("*", stars[number]) for number in lacking]
        values = file.attributes([(place, name) for place in places])
        for number, place, value in zip(lacking, places, values, strict=True):
            if value is not None:
                found[number] = _task(value, keys, f"{file.path}, {place}@{name}")
    return found


def _task(value: Any, keys: Sequence[str], where: str) -> str | None:
    if keys:
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise damaged(where, f"expected JSON, found {value!r:.80}") from error
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "".join(value)  # as LIBERO reads it
    if not isinstance(value, str):
        raise damaged(where, f"expected a text that says the task, found {value!r:.80}")
    return value


def _constants(layout: TreeLayout, task: str | None, number: int, star: str = "") -> dict[str, Any]:
    """Metadata with one value for all rows of an episode, by name."""
    found: dict[str, Any] = {} if task is None else {"task": task}
    for name, kind in (layout.numbers or {}).items():
        found[name] = number if kind == "file" else int(re.sub(r"\D", "", star) or 0)
    return found


def _between(file: Tree, layout: TreeLayout, path: str, arrays: Sequence[Array], rows: Lengths) -> Iterator[Stretch]:
    ends = _numbers(file, path)
    total = rows.steps + rows.closed
    if not len(ends) or (np.diff(ends, prepend=0) < 0).any() or ends[-1] != total:
        raise damaged(
            file.path,
            f"{path}: expected ascending numbers up to {total}, the number of rows, found {len(ends)}, "
            f"the last {ends[-1:].tolist()}",
        )
    for number, (first, stop) in enumerate(zip(np.append(0, ends[:-1]).tolist(), ends.tolist(), strict=True)):
        where = f"{file.path}, episode {number}"
        lengths = lengths_of(arrays, layout, stop - first, where)
        yield Stretch(arrays, first, lengths.steps, lengths.closed, True, where, layout)


def _rings(file: Tree, ring: Mapping[str, str], rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges ``[first, stop)`` of rows, for each ring in the order in which its rows were written.

    A ring of 5 rows from row 10 on, full, whose last written row is 11: rows 12..14, which are the oldest, and 10..11.
    """
    last = _numbers(file, ring["last"])
    offsets = _numbers(file, ring["offsets"]) if "offsets" in ring else last[:0]
    offsets = offsets if len(offsets) else np.zeros(1, np.int64)
    sizes = _numbers(file, ring["sizes"]) if "sizes" in ring else last[:0]
    if not len(sizes):
        (root,) = file.find(["/"])
        size, following = ((root or {}).get("attributes", {}).get(ring.get(name, "")) for name in ("size", "next"))
        if not isinstance(size, int):
            raise damaged(
                file.path, f"expected the attribute {ring.get('size')!r}, a number of rows, found {size!r:.80}"
            )
        sizes = np.array([size])
        if isinstance(following, int) and size > 0:  # row 0, of a full ring of 5: 4 was written last
            last = np.array([(following - 1) % size])
    ends = np.append(offsets[1:], rows)
    right = len(last) == len(sizes) == len(offsets) and (np.diff(offsets, prepend=0, append=rows) >= 0).all()
    if not right or (sizes < 0).any() or (sizes > ends - offsets).any():
        raise damaged(
            file.path,
            f"expected rings within {rows} rows, found {sizes[:4].tolist()} rows from {offsets[:4].tolist()} on, "
            f"last {last[:4].tolist()}",
        )
    for first, end, size, newest in zip(*(part.tolist() for part in (offsets, ends, sizes, last)), strict=True):
        if size and not first <= newest < first + size:
            raise damaged(file.path, f"expected the last row between {first} and {first + size - 1}, found {newest}")
        if size == end - first and newest + 1 < end:
            yield newest + 1, end
            yield first, newest + 1
        elif size:
            yield first, first + size


def _numbers(file: Tree, path: str) -> npt.NDArray[np.int64]:
    """Read an array of whole numbers ``[n]``; return an empty one if the path is optional and leads nowhere."""
    (tree,) = file.find([path.removesuffix("?")])
    if tree is None and path.endswith("?"):
        return np.zeros(0, np.int64)
    shape: Any = tree["shape"] if tree is not None and tree["kind"] == "number" else None
    if tree is None or shape is None or len(shape) != 1 or shape[0] > _MOST_ENDS or tree["dtype"][1] not in "iu":
        raise damaged(file.path, f"{path}: expected whole numbers, found {tree and (tree['kind'], tree['shape'])}")
    return file.read([(path.removesuffix("?"), 0, shape[0])])[0].astype(np.int64)
