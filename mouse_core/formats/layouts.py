"""Reads trees of arrays in HDF5, zarr and npz files as rows.

A layout names the arrays that hold actions, rewards and so on.

The last observation of an episode is stored if the episode has one observation more than actions, or if the file has an
array of next observations. If the last observation is not stored, ``final`` determines the treatment of the last
transition.

The parts of this module in order: layouts in Python or YAML, layouts with a name, trees and their arrays, episodes, and
the reader.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tarfile
import warnings
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, done_codes
from mouse_core.dtypes import RowError, convert
from mouse_core.episodes import step_begins
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import check_inside, damaged, read_bytes, reading, yaml_object
from mouse_core.formats import columns
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats._files.npz import NpzTree, npy_header, pickled_arrays
from mouse_core.formats._files.on_disk import ZARR, is_zarr
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.images.pixels import decode_image
from mouse_core.spec import check_list

VERSION = 1
"""Format version of YAML files that contain a layout."""

SUFFIXES = (".yaml", ".yml")
_MOST_YAML = 1 << 18
FLAGS = ("terminated", "truncated", "is_last")

Layout = TypeVar("Layout")
Paths = str | Sequence[str] | Mapping[str, str] | None


class Aligned:
    """Base class of layouts: the alignment of actions and their results, and how episodes end.

    A layout has the attributes ``ending`` and ``alignment``. ``alignment`` is "outgoing" or "arrived" for all roles, or
    a mapping from roles to "outgoing" or "arrived".
    """

    alignment: str | Mapping[str, str]
    ending: str
    moved: ClassVar[tuple[str, ...]] = ("action", "reward")
    """Roles to which ``alignment`` applies if ``alignment`` is a single text."""

    def check_alignment(self, *others: str) -> None:
        """Raise ConfigError if ``alignment`` has a role outside of ``moved`` and ``others``.

        An unknown ``ending`` also raises a ConfigError.
        """
        if self.ending not in ("truncated", "terminal"):
            raise ConfigError(f"layout: ending: expected 'truncated' or 'terminal', found {self.ending!r}")
        roles = [*self.moved, *others]
        said = self.alignment if isinstance(self.alignment, Mapping) else dict.fromkeys(self.moved, self.alignment)
        for role, value in said.items():
            if role not in roles or value not in ("outgoing", "arrived"):
                raise ConfigError(
                    f"layout: alignment: expected 'outgoing' or 'arrived', for all or for some of {roles}, found "
                    f"{role!r}: {value!r}"
                )

    def arrived(self) -> frozenset[str]:
        """Roles with the alignment "arrived": each value is stored in the row of the next observation."""
        if isinstance(self.alignment, Mapping):
            return frozenset(role for role, value in self.alignment.items() if value == "arrived")
        return frozenset(self.moved if self.alignment == "arrived" else ())


@dataclass(frozen=True, kw_only=True)
class TreeLayout(Aligned):
    """The paths of observations, actions and other roles in a tree of groups and arrays (HDF5, zarr and npz files).

    A path names an array or a group. A group stands for all arrays below it that no other path of the layout names. In
    all paths ``*`` stands for the name of an episode. A path that ends in ``?`` is optional. Several paths are given as
    a list or a mapping. In a list, the last part of a path is the name of its array. A mapping maps names to paths. One
    name in a mapping can be empty: the array at its path gets the same column name as an array at a single path.

    If paths contain ``*``, an episode consists of all arrays whose paths have the same name in place of ``*``. With
    ``one_a_file``, each file is an episode. Without ``*`` and ``one_a_file``, episodes end at the rows that
    ``episode_ends`` or ``is_last`` mark or, without these two arguments, where ``terminated`` or ``truncated`` is set.
    If an episode has one observation more than actions, the last observation is the final observation of the episode.

    Args:
        observation: Values ``[T, ...]`` or ``[T + 1, ...]``.
        action: Values ``[T, ...]``. An action in the last row of an episode is left out if no observation follows it.
        reward: A number for each step. Without this argument, rewards are 0.
        terminated: A flag for each step or for each episode. The flag states that the episode reached a terminal state.
            The path ``"not discount"`` gives a flag that is set where the array ``discount`` is 0. With several paths,
            the flag is set where the array at one or more of the paths is set.
        truncated: A flag for each step or for each episode. The flag states that the episode was truncated.
        next_observation: The observation after each step. If the layout determines the ends of episodes, only the last
            value of each episode is read.
        metadata: Arrays with a value for each step, which become columns ``metadata_<name>``.
        other_metadata: Whether all other arrays of an episode become metadata, too. An array with a single value is
            left out; an array whose length fits neither steps nor observations raises an error.
        action_metadata: Paths of metadata that belong to the action of their row. Metadata whose names begin with
            ``action``, ``policy`` or ``log_prob`` always belong to the action.
        numbers: Metadata that are numbers: a mapping from the name of each number to its source. "file" is the index of
            the file; "*" is the number in the name of the episode; a regular expression with one group finds the number
            in the name of the file.
        leave_out: Paths of arrays and groups that are not read.
        task: Path of the attribute with the task of an episode, for the column ``metadata_task``. The path consists of
            the path of a group, ``@``, the attribute's name and, if the attribute contains JSON, keys in the JSON, such
            as ``"data@problem_info/language_instruction"``. Of several paths, the first path with a text is used.
        nan_action: Whether the last action of an episode can be NaN. If the last action is NaN, the last row has the
            episode's final observation. If the last action is a number, the alignment of the episode is "outgoing"
            instead of ``alignment``.
        episode_ends: An array of ascending row indices: for each episode, the index of the row after its last row.
        is_last: A flag for each row, which is set in the last row of each episode. Of several paths, the first existing
            path is used. If the layout has ``next_observation``, the last row is the last transition; otherwise, the
            last row has the episode's final observation. With ``is_last``, ``terminated`` and ``truncated`` determine
            only how an episode ended.
        episode_steps: The number of steps after which the environment truncated episodes, for files without
            ``truncated``.
        one_a_file: Whether each file is an episode.
        files: A pattern of the files of a folder, such as ``"episode_*.hdf5"``. Files are read in the order of the
            numbers in their names; files in a tar archive are read in the order of the archive.
        pictures: Path of observations that can be encoded images: an array or a group of arrays. PNG and JPEG files are
            decoded from bytes ``[T, L]`` padded with zeros, and from strings of bytes ``[T]``. Arrays ``[T, H, W, C]``
            are pixels. Arrays ``[T, C, H, W]`` are pixels if they have whole numbers up to 255, of any type.
        alignment: Whether a row's action, reward and flags belong to the transition after the row's observation
            ("outgoing") or before it ("arrived"). One value for all, or a mapping with the keys ``action``, ``reward``,
            ``terminated``, ``truncated`` and ``metadata``.
        ending: The kind of end of an episode in which neither ``terminated`` nor ``truncated`` is set: "truncated"
            (``done`` 2) or "terminal" (``done`` 1).
    """

    moved: ClassVar[tuple[str, ...]] = ("action", "reward", "terminated", "truncated")
    observation: Paths = None
    action: Paths = None
    reward: str | None = None
    terminated: Paths = None
    truncated: Paths = None
    next_observation: Paths = None
    metadata: Paths = None
    other_metadata: bool = False
    action_metadata: Sequence[str] = ()
    numbers: Mapping[str, str] | None = None
    leave_out: Sequence[str] = ()
    task: str | Sequence[str] | None = None
    nan_action: bool = False
    episode_ends: str | None = None
    is_last: Paths = None
    episode_steps: int | None = None
    one_a_file: bool = False
    files: str | None = None
    pictures: str | None = None
    alignment: str | Mapping[str, str] = "outgoing"
    ending: str = "truncated"

    def __post_init__(self) -> None:
        if self.task is not None and "task" in self.roles().get("metadata", {}):
            raise SchemaError("layout: expected metadata_task to be set by only one of task= and metadata=, found both")
        for problem in chain(self._problems(), self._problems_of_episodes()):
            raise ConfigError(f"layout: {problem}")
        self.check_alignment("metadata")

    def _problems(self) -> Iterator[str]:
        """Yield an error message for each argument that is invalid regardless of the other arguments."""
        if self.observation is None and self.action is None:
            yield "expected a path for observation or action, found neither"
        for role, paths in self.roles().items():
            for path in paths.values():
                yield from _problems_of_path(role, path)
        for option in ("leave_out", "action_metadata"):
            for path in check_list(f"layout: {option}", getattr(self, option)):
                yield from _problems_of_path(option, path)
        for path in self.tasks():
            group, sign, said = path.partition("@") if isinstance(path, str) else ("", "", "")
            if not sign or not all(said.split("/")):
                yield f"task: expected a group and an attribute as 'data@task', found {path!r:.80}"
            yield from _problems_of_path("task", group) if group else ()
            if "*" in group and not any("*" in lead for lead in self.leads()):
                yield f"task: expected no '*', as observation and action have none, found {path!r}"
        numbers: Any = self.numbers or {}
        if not isinstance(numbers, Mapping):
            yield f"numbers: expected a mapping of names, found {numbers!r:.80}"
        for said in numbers.values():
            if said not in ("file", "*") and _groups_of(said) != 1:
                yield f"numbers: expected 'file', '*' or a regular expression with a group, found {said!r:.80}"
        for name in ("files", "episode_ends", "pictures"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                yield f"{name}: expected a text, found {value!r:.80}"
        if self.episode_steps is not None and not (isinstance(self.episode_steps, int) and self.episode_steps > 0):
            yield f"episode_steps: expected a positive number, found {self.episode_steps!r}"
        if self.files is not None and "/" in self.files:
            yield f"files: expected names of files in the folder, found {self.files!r}"

    def _problems_of_episodes(self) -> Iterator[str]:
        """Yield an error message for each invalid argument among the arguments that determine where episodes begin and
        end.
        """
        starred = any("*" in path for paths in self.roles().values() for path in paths.values())
        ways = [starred, self.one_a_file, *(way is not None for way in (self.episode_ends, self.is_last))]
        if sum(ways) > 1:
            yield (
                "expected only one of '*' in paths, one_a_file, episode_ends and is_last, found several: each of these "
                "defines where episodes begin and end"
            )
        if not starred and (self.nan_action or "*" in (self.numbers or {}).values()):
            yield "expected '*' in paths, because nan_action or numbers with '*' are set"
        if starred and (unlike := [path for path in self.leads() if "*" not in path]):
            yield f"expected '*' in the paths of observation and action, found {unlike}"
        if not any(ways[:3]):
            if self.terminated is None and self.truncated is None and self.is_last is None:
                yield (
                    "expected an argument that defines where episodes end: '*' in paths, one_a_file, episode_ends, "
                    "is_last, terminated or truncated"
                )
            if self.arrived():
                yield "alignment: expected 'outgoing' if only flags define where episodes end"

    def roles(self) -> dict[str, dict[str, str]]:
        """Paths by role and name; if a role has a single path, the name of this path is empty."""
        found = {}
        for role in ("observation", "action", "reward", *FLAGS, "next_observation", "metadata"):
            value = getattr(self, role)
            if value is not None:
                found[role] = _paths_by_name(role, value)
        return found

    def tasks(self) -> list[str]:
        """Paths of attributes with the task of an episode."""
        return [self.task] if isinstance(self.task, str) else [*(self.task or ())]

    def leads(self) -> list[str]:
        """Paths of actions and observations; if these paths contain ``*``, they determine the names of episodes."""
        roles = self.roles()
        return [path for role in ("action", "observation") for path in roles.get(role, {}).values()]

    def may_be_files(self, path: str) -> bool:
        """Whether the array is at a path of ``pictures``, so that it can contain encoded images."""
        return self.pictures is not None and _is_at(self.pictures, path)

    def leaves_out(self, path: str) -> bool:
        """Whether ``leave_out`` names an array, or a group above it."""
        return any(_is_at(place, path) for place in self.leave_out)

    @property
    def whole(self) -> bool:
        """Whether the layout determines where episodes end without using the flags ``terminated`` and ``truncated``."""
        return self.one_a_file or self.episode_ends is not None or any("*" in path for path in self.leads())

    def group(self) -> str:
        """Path of the group that contains an episode; empty if the file is an episode."""
        lead = next((path.split("/") for path in self.leads() if "*" in path), [])
        return "/".join(lead[: 1 + next((place for place, part in enumerate(lead) if "*" in part), -1)])


def _is_at(place: str, path: str) -> bool:
    """Whether ``path`` equals ``place`` or lies below it; ``*`` in ``place`` stands for any name."""
    pattern = re.escape(place.removesuffix("?").strip("/")).replace(r"\*", "[^/]+")
    return re.match(f"{pattern}(/|$)", path.strip("/")) is not None


def _paths_by_name(role: str, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return dict(value)
    if isinstance(value, Sequence) and value and all(isinstance(path, str) for path in value):
        names = [path.rstrip("?").split("/")[-1] for path in value]
        if len(set(names)) < len(names):
            raise SchemaError(f"layout: {role}: expected paths that end in different names, found {list(value)}")
        return dict(zip(names, value, strict=True))
    raise ConfigError(
        f"layout: {role}: expected a path, some paths, or a mapping of names to paths, found {value!r:.80}"
    )


def _groups_of(pattern: Any) -> int:
    """Return how many groups a regular expression has; -1 for an invalid expression."""
    try:
        return re.compile(pattern).groups
    except (re.error, TypeError):
        return -1


def _problems_of_path(role: str, path: Any) -> Iterator[str]:
    parts = path.removeprefix("not ").removesuffix("?").split("/") if isinstance(path, str) else [""]
    if any(part in ("", ".", "..") for part in parts):
        yield f"{role}: expected a path as 'data/demo_*/obs', found {path!r:.80}"
    if sum(part.count("*") for part in parts) > 1:
        yield f"{role}: expected at most one '*', found {path!r:.80}"
    if path.startswith("not ") and role not in FLAGS:
        yield f"{role}: expected a path without 'not', found {path!r:.80}"


def load_layout(source: TreeLayout | Mapping[str, Any] | str | os.PathLike[str]) -> TreeLayout:
    """Return a layout from a mapping of its arguments, or from a YAML file with these arguments and ``version: 1``.

    Raises:
        ConfigError: An argument is unknown or has no effect, the file does not exist, or the ``version`` in the file is
            not 1.
        DataError: The file is not valid YAML.
        ImportError: PyYAML, a requirement of ``datasets``, is not installed.
    """
    return loaded(TreeLayout, source)


def loaded(kind: type[Layout], source: Layout | Mapping[str, Any] | str | os.PathLike[str]) -> Layout:
    """Return a layout of the class ``kind``, as ``load_layout`` does.

    Args:
        kind: The class of the layout, a dataclass with keyword arguments.
        source: A layout of this class, a mapping of its arguments, or a YAML file with them.
    """
    if isinstance(source, kind):
        return source
    where, said = "layout", source
    if isinstance(source, str | os.PathLike):
        where = os.fspath(source)
        said = _yaml(Path(where))
        version = said.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            raise ConfigError(
                f"{where}: version: expected {VERSION}, found {version!r}"
                + (", of a newer mouse-data" if isinstance(version, int) and version > VERSION else "")
            )
    if not isinstance(said, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {type(said).__name__}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if others := [name for name in said if name not in known]:
        raise ConfigError(f"{where}: expected only entries of {known}, found {others[:8]}")
    try:
        return kind(**said)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('layout: ')}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {str(error).partition('__init__() ')[2] or error}") from error


def _yaml(file: Path) -> dict[str, Any]:
    try:
        return dict(yaml_object(file, read_bytes(file, most_bytes=_MOST_YAML)))
    except ImportError as error:
        raise ImportError("layouts in YAML need PyYAML: pip install pyyaml") from error


LAYOUTS: Mapping[str, TreeLayout] = MappingProxyType(
    {
        # robomimic 0.3 to 0.5, MimicGen, LIBERO and Isaac Lab. `dones` may be set before the end of an episode.
        "robomimic": TreeLayout(
            observation="data/demo_*/obs",
            action="data/demo_*/actions",
            reward="data/demo_*/rewards?",
            terminated="data/demo_*/dones?",
            next_observation="data/demo_*/next_obs?",
            metadata={
                "dones": "data/demo_*/dones?",
                "states": "data/demo_*/states?",
                "robot_states": "data/demo_*/robot_states?",
                "datagen_info": "data/demo_*/datagen_info?",
            },
            # RoboCasa has a task for each episode, LIBERO has one for each file.
            task=["data/demo_*@ep_meta/lang", "data@problem_info/language_instruction"],
        ),
        "maniskill": TreeLayout(
            observation="traj_*/obs",
            action="traj_*/actions",
            reward="traj_*/rewards?",
            terminated="traj_*/terminated?",
            truncated="traj_*/truncated?",
            metadata={
                "success": "traj_*/success?",
                "fail": "traj_*/fail?",
                "env_states": "traj_*/env_states?",
            },
        ),
        # Cameras as pixels, or as JPEG files if the recorder compressed them.
        "aloha": TreeLayout(
            observation="observations",
            action="action",
            metadata=["base_action?"],
            one_a_file=True,
            files="episode_*.hdf5",
            pictures="observations/images",
        ),
        # Each array of infos must have a value for each row; shorter arrays are damaged.
        "d4rl": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards",
            terminated="terminals",
            truncated="timeouts?",
            next_observation="next_observations?",
            metadata={"infos": "infos?"},
            other_metadata=True,
            leave_out=["metadata"],
        ),
        # Diffusion Policy's ReplayBuffer, and UMI's, in which actions are poses that are part of the observations.
        "diffusion_policy": TreeLayout(
            observation="data",
            action="data/action?",
            reward="data/reward?",
            episode_ends="meta/episode_ends",
        ),
        # In "compact" files each observation has a row, and valids 0 marks the last one. "Regular" files contain
        # transitions. Tasks of OGBench set masks to 0 where the task is solved; this does not end a trajectory.
        "ogbench": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards?",
            terminated="not masks?",
            is_last=["not valids?", "terminals"],
            next_observation="next_observations?",
            other_metadata=True,
        ),
        # Episodes in npz files: action, reward and discount led to the observation of their row; row 0 has no valid
        # ones.
        "drqv2": TreeLayout(
            observation="observation",
            action="action",
            reward="reward",
            terminated="not discount",
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # Dreamer and DreamerV2. Files of V3 are pieces of streams, which `formats.dreamerv3` reads.
        "dreamer": TreeLayout(
            observation="image",
            action="action",
            reward="reward",
            terminated=["is_terminal?", "not discount?"],
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # RoboHive logs in each row an observation, the values that came with it, and the action taken on it. Older
        # versions log the results of the action instead, and no last observation. Trials may continue after a flag.
        "roboset": TreeLayout(
            observation="*/observations",
            action="*/actions",
            reward="*/rewards",
            terminated="*/done",
            metadata={"time": "*/time?", "done": "*/done"},
            other_metadata=True,
            action_metadata=["*/done", "*/env_infos"],
            numbers={"seed": "file", "episode": "*"},
            nan_action=True,
            alignment={"reward": "arrived", "terminated": "arrived", "metadata": "arrived"},
            files="*.h5",
        ),
        # Procgen, in which time limits count as terminal. A file's name has the time of recording, the number, the
        # length, the level's seed and the return: 20230313T133237_4_77_12_10.00.npz. Archives have pickled dicts.
        "gen_dgrl": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards",
            terminated="dones",
            other_metadata=True,
            action_metadata=["*"],
            numbers={"level_seed": r"_(-?\d+)_-?[\d.]+\.np[yz]$"},
            one_a_file=True,
            files="*.np[yz]",
            pictures="observations",
        ),
    }
)
"""The layouts that have a name: "aloha" (ACT), "d4rl", "diffusion_policy" (UMI), "dreamer" (V2), "drqv2"
(V-D4RL), "gen_dgrl" (Procgen), "maniskill", "ogbench", "robomimic" (MimicGen, LIBERO, Isaac Lab) and "roboset"
(RoboHive)."""


HDF5 = (".hdf5", ".h5")
ARCHIVES = (".tar", ".gz", ".tgz", ".xz", ".txz")
_MOST_BYTES = 1 << 30  # size of a file in an archive, and of a pickle


Tree = H5File | NpzTree
"""An open tree of groups and arrays, in a file or folder."""


class ZarrTree(H5File):
    """A zarr group of version 2 or 3, open for reading.

    Args:
        path: A folder or a zip file.

    Raises:
        ImportError: The package zarr is not installed.
        ConfigError: The group does not exist.
        DataError: The group is damaged.
    """

    child = Path(__file__).parent / "_files" / "zarr_child.py"
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
        """Return the description of the group or array at each path; None if a path does not exist."""
        found = super().find(paths)
        for path, tree in zip(paths, found, strict=True):
            if tree and tree.get("absent"):
                self._absent[path] = (tree["absent"], tree["chunks"])
        return found

    @property
    def notes(self) -> list[str]:
        """Return notes about chunks that are missing in the arrays that ``find`` returned.

        Missing chunks of a zarr array are read as the fill value.
        """
        return [
            f"{path}: {absent} of {chunks} chunks are missing and are read as the fill value."
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
    """Return the arrays of an npz file, or of a dict that ``numpy.save`` pickled, without running pickled code."""
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
    """Open files, and files in archives, one after another. A file is closed when the next file is requested."""
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
_PICTURE_BYTES = 1 << 20  # approximate size if the element size is unknown


@dataclass(frozen=True)
class Array:
    """An array of a tree, and the column that it becomes.

    Args:
        path: The path of the array in the tree.
        role: The argument of ``TreeLayout`` that names the array.
        name: The part of the column name that follows the role; empty if the role has a single array.
        rows: The number of rows; -1 for a single value.
        row_bytes: Approximate size of a row in bytes.
        moves: Whether the array is metadata of the action, which moves to the next row together with the action.
    """

    path: str
    role: str
    name: str
    rows: int
    row_bytes: int
    moves: bool = False


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return the key that sorts names by the numbers in them, so that demo_2 is before demo_10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def arrays_of(file: Tree, layout: TreeLayout, stars: Sequence[str]) -> list[list[Array]]:
    """Return, for each episode, the arrays that the layout names.

    Args:
        file: The open file.
        layout: The paths.
        stars: For each episode, the name that replaces ``*`` in paths.

    Raises:
        DataError: A path does not exist, or its data cannot be a column.
        SchemaError: Two arrays have the same name.
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
            what = "none" if tree is None else "an empty group"
            raise damaged(file.path, f"{path}: expected an array or a group of arrays for {role}, found {what}")
        if layout.leaves_out(path) or (role == "is_last" and any(array.role == role for array in found)):
            continue
        if role == "metadata" and not name and tree["kind"] != "group":
            name = path.split("/")[-1]
        if tree["kind"] != "group":
            found.append(_array(file.path, path, role, name, tree, layout))
            continue
        if role in ("reward", *FLAGS):
            raise damaged(file.path, f"{path}: expected an array for {role}, found a group of {[*tree['items']][:8]}")
        for keys, part in leaves(tree):
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
    places = [(array.role, array.name) for array in found]
    if len(set(places)) < len(places):
        same = sorted({"_".join(column) for column in places if places.count(column) > 1})
        raise SchemaError(f"{file.path}: expected paths that give different column names, found {same[:8]} twice")
    seen, following = ({name for other, name in places if other == role} for role in _OBSERVED)
    if following and seen != following:
        raise SchemaError(
            f"{file.path}: expected next observations named {sorted(seen)[:8]}, found {sorted(following)[:8]}"
        )
    return found


def _array(where: str, path: str, role: str, name: str, part: Mapping[str, Any], layout: TreeLayout) -> Array:
    moves = role == "metadata" and (
        columns.travels_with_action(name) or columns.travels_with_action(name.replace("/", "_"))
    )
    moves = moves or any(_is_at(place, path) for place in layout.action_metadata)
    name = columns.metadata_column(name) if role == "metadata" else name.replace("/", ".")
    wanted = ("number", "text") if role in (*_OBSERVED, "metadata", "action") else ("number",)
    files = role in _OBSERVED and layout.may_be_files(path)
    ragged = part["kind"] == "ragged" and part["dtype"] == "uint8"
    if part["kind"] not in wanted and not (files and ragged):
        raise damaged(
            where,
            f"{path}: expected numbers for {role}, found {part['kind']} {part['dtype']} of shape {part['shape']}"
            + _hint(role, path, layout),
        )
    shape = part["shape"]
    # A text may have any length.
    width = np.dtype(part["dtype"]).itemsize if part["kind"] == "number" else 256
    if files and part["kind"] != "number":
        width = _PICTURE_BYTES
    elif role in _OBSERVED and part["dtype"] == "|u1" and len(shape) == 2:
        width *= 20  # possibly encoded images
    return Array(path, role, name, shape[0] if shape else -1, math.prod(shape[1:]) * width, moves)


def _hint(role: str, path: str, layout: TreeLayout) -> str:
    """Return the remedy for an error message about an unreadable array of metadata; "" for other roles."""
    group = layout.group()
    below = path.split("/")[len(group.split("/")) if group else 0 :]
    place = "/".join([group, *below]).lstrip("/")
    return f"; if the data are not damaged, leave_out=[{place!r}] reads the rest" if role == "metadata" else ""


def lengths_of(arrays: Sequence[Array], layout: TreeLayout, *, where: str) -> tuple[int, bool]:
    """Return how many steps an episode has, and whether its last observation is stored.

    Check the lengths of all arrays.

    Args:
        arrays: All arrays of the episode.
        layout: The layout, which states the alignment of each role.
        where: The file and episode, for error messages.

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
                f"{array.path}: expected {' or '.join(map(str, wanted))} rows, one for each step, found "
                f"{max(array.rows, 0)}" + _hint(array.role, array.path, layout),
            )
    return steps, closed


Types = dict[tuple[str, str], np.dtype[Any]]


def cast_like_first(values: dict[Array, npt.NDArray[Any]], types: Types, where: str) -> dict[Array, npt.NDArray[Any]]:
    """Convert the values of an episode to the types of the first episode, as ``dtypes.convert`` does.

    Args:
        values: The values by array. Numbers are converted; flags and texts are not.
        types: The types of the first episode, by role and name. The function adds the types of new arrays.
        where: The file and episode, for error messages.

    Raises:
        DataError: A value does not fit the type of the first episode.
    """
    cast = {}
    for array, part in values.items():
        wanted = types.setdefault((array.role, array.name), part.dtype)
        if {wanted.kind, part.dtype.kind} <= set("biuf") and array.role not in ("terminated", "truncated"):
            try:
                part = convert(part, wanted)
            except RowError as error:
                fix = "save that array with the same type in all episodes"
                raise damaged(
                    where, f"{array.path}: expected {wanted} as in the first episode: {error}; {fix}"
                ) from error
        cast[array] = part
    return cast


def check_shapes(given: Mapping[str, npt.NDArray[Any]], known: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise DataError if the shape of a column differs from its shape in ``known``; add new columns to ``known``."""
    for name, values in given.items():
        shape = known.setdefault(name, values.shape[1:])
        if values.dtype != object and values.shape[1:] != shape:
            found = f"{list(values.shape[1:])}; a column has the same shape in all episodes"
            raise damaged(where, f"column {name!r}: expected shape {list(shape)} per step, found {found}")


_AT_ONCE = 64
# Number of episodes of a file.
_MOST_ENDS = 1 << 27


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a file.

    Args:
        arrays: The arrays from which the rows are read.
        first: The first row.
        steps: The number of transitions.
        closed: Whether the last observation is also stored, so that there is one more row than transitions.
        whole: Whether the rows are all rows of exactly one episode.
        where: The file and episode, for error messages.
        layout: The layout, with the alignment of these rows.
        constants: Metadata with a single value for all rows, by name: the task, and the numbers of the file and the
            episode.
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
        """Whether every row is an observation and ``is_last`` marks the last row of each episode."""
        roles = {array.role for array in self.arrays}
        return "is_last" in roles and "next_observation" not in roles

    def columns(self) -> set[tuple[str, str]]:
        """The role and name of each column."""
        return {(array.role, array.name) for array in self.arrays} | {("metadata", name) for name in self.constants}


def files_of(root: Path, layout: TreeLayout, suffixes: Sequence[str]) -> list[Path]:
    """Return the files to read, in the order of the numbers in their names.

    Raises:
        ConfigError: No file is found.
        DataError: A link points outside of the folder.
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


def row_ranges(file: Tree, layout: TreeLayout, number: int = 0) -> Iterator[RowRange]:
    """Yield a ``RowRange`` for each range of consecutive rows of a file in order, including episodes without steps.

    Args:
        file: The open file.
        layout: The layout of the file.
        number: The index of the file.

    Raises:
        DataError: The file is damaged, or does not fit the layout.
        ConfigError: The file has no episode at the paths of the layout.
    """
    leads = [path for path in layout.leads() if "*" in path]
    if leads:
        yield from _starred(file, layout, leads[0], number)
        return
    (arrays,), (task,) = arrays_of(file, layout, [""]), _tasks_of(file, layout, [""])
    constants = _constants(layout, task, number, file.path)
    if layout.one_a_file:
        yield RowRange(arrays, 0, *lengths_of(arrays, layout, where=file.path), True, file.path, layout, constants)
        return
    rows, is_closed = lengths_of(arrays, layout, where=file.path)
    if not rows:
        raise damaged(file.path, "expected at least one step, found arrays without rows")
    if is_closed:
        raise damaged(
            file.path,
            "expected equal numbers of observations and actions in arrays with several episodes",
        )
    if layout.episode_ends is not None:
        ends = _numbers(file, layout.episode_ends)
        if not len(ends) or (np.diff(ends, prepend=0) < 0).any() or ends[-1] != rows:
            raise damaged(
                file.path,
                f"{layout.episode_ends}: expected ascending indices, the last equal to the number of rows, {rows}, "
                f"found {len(ends)} indices, the last {ends[-1:].tolist()}",
            )
        for place, (first, stop) in enumerate(pairwise([0, *ends.tolist()])):
            where = f"{file.path}, episode {place}"
            yield RowRange(arrays, first, stop - first, False, True, where, layout, constants)
    else:
        yield RowRange(arrays, 0, rows, False, False, file.path, layout, constants)


def _starred(file: Tree, layout: TreeLayout, lead: str, number: int) -> Iterator[RowRange]:
    parts = lead.removesuffix("?").split("/")
    place = next(index for index, part in enumerate(parts) if "*" in part)
    before, _, after = parts[place].partition("*")
    pattern = re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
    matches = [pattern.fullmatch(name) for name in file.names("/" + "/".join(parts[:place]))]
    stars = sorted((match[1] for match in matches if match), key=natural_key)
    if not stars:
        raise ConfigError(f"{file.path}: expected episodes at {lead}, found none")
    outgoing = replace(layout, alignment="outgoing")
    for start in range(0, len(stars), _AT_ONCE):
        some = stars[start : start + _AT_ONCE]
        tasks = _tasks_of(file, layout, some)
        for star, arrays, task in zip(some, arrays_of(file, layout, some), tasks, strict=True):
            where = f"{file.path}, {before}{star}{after}"
            said = outgoing if layout.nan_action and not _ends_in_nan(file, arrays) else layout
            constants = _constants(layout, task, number, file.path, star)
            yield RowRange(arrays, 0, *lengths_of(arrays, said, where=where), True, where, said, constants)


def _ends_in_nan(file: Tree, arrays: Sequence[Array]) -> bool:
    """Whether all values of the last action are NaN, which means that no action follows the last observation."""
    actions = [array for array in arrays if array.role == "action"]
    if any(array.rows < 2 for array in actions):
        return False
    last = file.read([(f"/{array.path}", array.rows - 1, array.rows) for array in actions])
    return all(values.dtype.kind == "f" and bool(np.isnan(values).all()) for values in last)


def _tasks_of(file: Tree, layout: TreeLayout, stars: Sequence[str]) -> list[str | None]:
    """Return the task of each episode, from the first path of the layout where a text is found; None without a text.

    Raises:
        DataError: An attribute is not valid JSON, or the value at its keys is not a text.
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
        value = "".join(value)  # as LIBERO names tasks
    if not isinstance(value, str):
        raise damaged(where, f"expected the task as a text, found {value!r:.80}")
    return value


def _constants(layout: TreeLayout, task: str | None, number: int, path: str, star: str = "") -> dict[str, Any]:
    """Return, by name, the metadata that have a single value for all rows of an episode."""
    found: dict[str, Any] = {} if task is None else {"task": task}
    for name, kind in (layout.numbers or {}).items():
        if kind in ("file", "*"):
            found[name] = number if kind == "file" else int(re.sub(r"\D", "", star) or 0)
        elif match := re.search(kind, path):
            found[name] = int(match[1])
    return found


def _numbers(file: Tree, path: str) -> npt.NDArray[np.int64]:
    """Read an array of integers ``[n]``."""
    (tree,) = file.find([path])
    shape: Any = tree["shape"] if tree is not None and tree["kind"] == "number" else None
    if tree is None or shape is None or len(shape) != 1 or shape[0] > _MOST_ENDS or tree["dtype"][1] not in "iu":
        raise damaged(file.path, f"{path}: expected integers, found {tree and (tree['kind'], tree['shape'])}")
    return file.read([(path, 0, shape[0])])[0].astype(np.int64)


_SUFFIXES = (*HDF5, ".npz", ".npy", ".zarr", ".zip")


def read_layouts(
    path: str | os.PathLike[str],
    *,
    layout: TreeLayout | Mapping[str, Any] | str | os.PathLike[str],
    final: str | None = None,
    batch_rows: int = BATCH_ROWS,
    leave_out: Sequence[str] = (),
    **changes: Any,
) -> RowStream:
    """Read the arrays of an HDF5 file, npz file or zarr group (version 2 or 3, a folder or zip), or of several files.

    A dict of arrays that ``numpy.save`` pickled is read without calling the functions that the pickle names.

    The last row of an episode has ``done`` 1 if ``terminated`` is set in the last step, 2 if only ``truncated`` is set
    there, and otherwise the code of the layout's ``ending``. If the layout determines the ends of episodes, flags in
    earlier steps are ignored. Without rewards the column ``reward`` is 0. Metadata whose names begin with ``action``,
    ``policy`` or ``log_prob`` move to the next row together with the action; other metadata stay in their row. If the
    last observation is missing, its row has NaN for float metadata, and the integers and texts of the previous row.
    Episodes without steps are left out; a warning at the end states how many. Numbers are cast to the types of the
    first episode.

    Args:
        path: A file; a folder of files, which are read in the order of the numbers in their names; or a tar archive of
            npz and npy files, compressed or not.
        layout: A ``TreeLayout``, its arguments as a mapping, a YAML file with them, or a name in ``LAYOUTS``.
        final: Treatment of the last transition of an episode whose last observation was not stored: "drop" or "mark".
        batch_rows: Largest number of rows of a batch.
        leave_out: Paths of arrays and groups that are not read, in addition to ``leave_out`` of the layout.
        **changes: Arguments that override arguments of the layout, such as ``ending="terminal"``.

    Raises:
        ConfigError: The layout is invalid, no file is found, or ``final`` is needed and missing.
        DataError: A file is damaged, does not fit the layout, or contains a link to another file; or a number
            does not fit the type of the first episode. The message names file, episode and array.
        SchemaError: Episodes have different arrays, or two arrays have the same column name.
        ImportError: h5py, or zarr for a zarr group, is not installed.
    """
    columns.check_batch_rows(batch_rows)
    name, said = _layout(layout)
    said = replace(said, leave_out=[*said.leave_out, *check_list("leave_out", leave_out)], **changes)
    root = Path(path)
    files = [root] if is_zarr(root) else files_of(root, said, _SUFFIXES)
    with closing(open_each(files)) as trees:
        file, first = _first(trees, said, str(root))
        known = _is_known(first)
        columns.check_final(final, where=str(root), needed=not known)
        with reading(first.where):
            rows = columns.TransitionRows(final=final, where=first.where)
            some = next(_rows_of(file, first, 1, {}, rows))
        notes = [*file.notes] if isinstance(file, ZarrTree) else []
        if unnamed := _unnamed(file, said, first):
            shown = f"{unnamed[:8]}" + (f" and {len(unnamed) - 8} others" if len(unnamed) > 8 else "")
            why = (
                "have no value for each row, or are to be left out"
                if said.other_metadata
                else "have no place in the layout"
            )
            notes.append(f"Left out: {shown}, which {why}.")
    if said.nan_action:
        closed = "NaN: rewards, flags and metadata belong to the observation of their row"
        open_end = "a number: rewards and flags belong to the action of their row"
        notes.append(f"The last action of an episode is {closed if first.closed else open_end}.")
    if not any(array.role == "reward" for array in first.arrays):
        notes.append("There are no rewards: reward is 0.")
    if (first.whole or said.is_last) and not any(array.role in ("terminated", "truncated") for array in first.arrays):
        notes.append(f"No flag states how episodes ended: their ends count as {said.ending}.")

    def every() -> Iterator[Columns]:
        empty: list[str] = []
        yield from _rows(files, said, first, final, batch_rows, empty)
        if empty:
            count = "an episode" if len(empty) == 1 else f"{len(empty)} episodes"
            warnings.warn(f"{root}: {count} without steps left out, the first is {empty[0]}", stacklevel=2)

    if not first.whole and said.truncated is not None and not any(array.role == "truncated" for array in first.arrays):
        cut = f"are truncated after {said.episode_steps} steps"
        unseen = "that were truncated are not recognised; episode_steps sets the number of steps of such episodes"
        absent = [path.removesuffix("?") for path in said.roles()["truncated"].values()]
        notes.append(f"There are no {', '.join(absent)}: episodes {cut if said.episode_steps else unseen}.")
    return RowStream.of_columns(root, name, some, every, notes=tuple(notes))


def _first(trees: Iterator[Tree], layout: TreeLayout, where: str) -> tuple[Tree, RowRange]:
    """Return the first ``RowRange`` with a step, and its file."""
    count = 0
    for number, file in enumerate(trees):
        for row_range in row_ranges(file, layout, number):
            if row_range.steps:
                return file, row_range
            count += 1
    raise damaged(where, f"expected an episode with a step, found {count} episodes without steps")


def _unnamed(file: Tree, layout: TreeLayout, first: RowRange) -> list[str]:
    """For the first episode, return the paths of the arrays that the layout does not name."""
    group = layout.group()
    if group in layout.leads():
        return []  # the arrays of an episode have no separate group
    base = first.arrays[0].path.split("/")[: len(group.split("/")) if group else 0]
    flags = layout.roles().get("is_last", {}).values()
    others = [layout.episode_ends, *(path.removeprefix("not ") for path in flags)]
    named = {array.path for array in first.arrays} | {path.removesuffix("?") for path in others if path}
    try:
        (tree,) = file.find(["/" + "/".join(base)])
    except DataError:  # an unread array in another part of the file
        return []
    return sorted({"/".join((*base, *keys)) for keys, _ in leaves(tree or {})} - named)


def _layout(layout: Any) -> tuple[str, TreeLayout]:
    if isinstance(layout, str) and layout in LAYOUTS:
        return layout, LAYOUTS[layout]
    if isinstance(layout, str) and not layout.endswith((".yaml", ".yml")):
        raise ConfigError(f"layout: expected one of {list(LAYOUTS)}, or a YAML file, found {layout!r}")
    return "layouts", load_layout(layout)


def _is_known(row_range: RowRange) -> bool:
    """Whether the last observations of episodes are stored."""
    return row_range.closed or row_range.marked or any(array.role == "next_observation" for array in row_range.arrays)


def _rows(
    files: Sequence[Path], layout: TreeLayout, like: RowRange, final: str | None, batch_rows: int, empty: list[str]
) -> Iterator[Columns]:
    wanted = like.columns()
    shapes: dict[str, tuple[int, ...]] = {}
    types: Types = {}
    with closing(open_each(files)) as trees:
        for number, file in enumerate(trees):
            rows = columns.TransitionRows(final=final, where=file.path)
            for row_range in row_ranges(file, layout, number):
                if not row_range.steps:
                    empty.append(row_range.where)
                    continue
                if others := sorted(wanted ^ row_range.columns()):
                    raise SchemaError(
                        f"{row_range.where}: expected the arrays of the first episode, found {others[:8]}"
                    )
                if _is_known(row_range) != _is_known(like):
                    wish = "one observation more than actions" if like.closed else "as many observations as actions"
                    if layout.nan_action:
                        wish = f"a last action that is {'NaN' if like.closed else 'a number'}"
                    raise damaged(row_range.where, f"expected {wish}, as in the first episode")
                size = columns.rows_at_once(sum(array.row_bytes for array in row_range.arrays), most=batch_rows)
                with reading(row_range.where):
                    for part in _rows_of(file, row_range, size, types, rows):
                        check_shapes(part, shapes, row_range.where)
                        yield part
            if (rest := rows.finish()) is not None:
                yield rest
            if isinstance(file, NpzTree):
                file.finish(others=layout.other_metadata)


def _rows_of(
    file: Tree, row_range: RowRange, size: int, types: Types, rows: columns.TransitionRows
) -> Iterator[Columns]:
    """Yield the rows of a ``RowRange`` in pieces of ``size`` transitions; ``rows`` can hold the last rows back until a
    later call.
    """
    if row_range.marked:
        yield from _marked_rows(file, row_range, size, types)
    else:
        yield from (rows.add(*part) for part in _parts(file, row_range, size, types))


_Part = tuple[Columns, Columns, npt.NDArray[np.bool_], Columns | None, Columns]


def _parts(file: Tree, row_range: RowRange, size: int, types: Types) -> Iterator[_Part]:
    """Yield the arguments of ``TransitionRows.add``, for ``size`` transitions at a time."""
    ended, since = True, 0
    for start in range(0, row_range.steps, size):
        stop = min(start + size, row_range.steps)
        values = cast_like_first(_read(file, row_range, start, stop), types, row_range.where)
        count = stop - start
        flags = [_flags(row_range, values, role, count, start) for role in ("terminated", "truncated")]
        most = row_range.layout.episode_steps
        if most is not None and not any(array.role == "truncated" for array in values):
            flags[1], since = _cut(flags[0], most, since)
        done = done_codes(*flags)
        if row_range.whole:
            done = np.where(np.arange(start, stop) == row_range.steps - 1, _ending(done, row_range.layout), 0)
            begins = np.arange(start, stop) == 0
        else:
            if any(array.role == "is_last" for array in values):
                last = _flags(row_range, values, "is_last", count, start)
                done = np.where(last, _ending(done, row_range.layout), 0)
            begins = step_begins(done != 0, ended)
            ended = bool(done[-1])
        values = {array: _pixels(array, part, row_range.layout) for array, part in values.items()}
        yield _part(row_range, values, done, begins)


def _cut(terminated: npt.NDArray[np.bool_], most: int, since: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Return flags that truncate episodes after ``most`` steps, and how many steps the unfinished episode has.

    ``since`` is the number of earlier steps of the episode that continues. With ``most=3`` and ``since=1``, the end
    flags 0 0 1 0 give the flags 0 1 0 0, and the unfinished episode has 1 step.
    """
    cut = np.zeros(len(terminated), bool)
    for step, is_over in enumerate(terminated.tolist()):
        since += 1
        if is_over or since == most:
            cut[step], since = not is_over, 0
    return cut, since


def _ending(codes: npt.NDArray[np.int64], layout: TreeLayout) -> npt.NDArray[np.int64]:
    """Return the done codes of last steps; the layout's ``ending`` replaces the code 0."""
    return np.where(codes == 0, 1 if layout.ending == "terminal" else 2, codes)


def _marked_rows(file: Tree, row_range: RowRange, size: int, types: Types) -> Iterator[Columns]:
    """Yield the rows of a ``RowRange`` in which every row is an observation; results of an action move to the next row.

    For example, ``is_last`` of 0 0 1 0 1 marks two episodes, of 3 and 2 rows; the actions and rewards of rows 2 and 4
    are not used.
    """
    before: Columns = {}
    begins, step = True, 0
    for start in range(0, row_range.steps, size):
        values = cast_like_first(
            _read(file, row_range, start, min(start + size, row_range.steps)), types, row_range.where
        )
        count = min(size, row_range.steps - start)
        ended, cut, last = (_flags(row_range, values, role, count, start) for role in FLAGS)
        starts = step_begins(last, begins)
        values = {array: _pixels(array, part, row_range.layout) for array, part in values.items()}
        seen, arriving, _, _, beside = _part(row_range, values, done_codes(ended, cut), starts)
        rows = columns.one_later(arriving, before, starts)
        rows["done"] = np.where(last & ~starts, _ending(rows["done"], row_range.layout), 0)
        rows["episode_step"] = columns.step_numbers(starts, step)
        step, begins = int(rows["episode_step"][-1]) + 1, bool(last[-1])
        yield rows | seen | beside


def _read(file: Tree, row_range: RowRange, start: int, stop: int) -> dict[Array, npt.NDArray[Any]]:
    """Read the transitions ``[start, stop)``. Arrays that include the last observation have one more value."""
    arrived = row_range.layout.arrived()
    items = []
    for array in row_range.arrays:
        first, end = start, stop
        if array.role in arrived and array.role != "metadata":
            first, end = start + 1, stop + 1
        elif array.role == "next_observation" and row_range.whole:
            # Only an episode's last next observation differs from the observations.
            first, end = (stop - 1, stop) if stop == row_range.steps else (stop, stop)
        elif _reaches(array, row_range):
            end = stop + 1
        if array.rows in (-1, 1) and array.role in ("terminated", "truncated"):
            first, end = -row_range.first, 1 - row_range.first  # one value for the episode
        if array.role == "observation" and row_range.whole and not row_range.closed and _is_known(row_range):
            end = min(stop + 1, row_range.steps)
        items.append((array, row_range.first + first, row_range.first + end))
    read = file.read([(f"/{array.path}", first, end) for array, first, end in items])
    for array, item, values in zip(row_range.arrays, items, read, strict=True):
        if values.ndim and len(values) != item[2] - item[1]:
            raise damaged(row_range.where, f"{array.path}: expected rows up to {item[2]}, found {len(values)} rows")
    return dict(zip(row_range.arrays, read, strict=True))


def _pixels(array: Array, values: npt.NDArray[Any], layout: TreeLayout) -> npt.NDArray[Any]:
    """Decode images and move their channels last; return other observations unchanged."""
    if array.role not in ("observation", "next_observation"):
        return values
    files = layout.may_be_files(array.path)
    if files and values.ndim == 4 and values.dtype != np.uint8 and values.shape[1] in (1, 3):
        whole = values.astype(np.uint8)
        values = whole if np.array_equal(whole, values) else values
    if values.dtype != np.uint8 and not (files and values.dtype == object):
        return values
    if values.ndim == 4 and values.shape[1] in (1, 3) and values.shape[3] > 4:
        return np.ascontiguousarray(np.moveaxis(values, 1, -1))
    if not files or values.ndim > 2:
        return values
    try:
        # The last byte of JPEG and PNG files is not zero, so zeros at the end are padding.
        pixels = [decode_image(bytes(row).rstrip(b"\0")) for row in values]
    except ValueError as error:
        raise DataError(f"{array.path}: {error}") from error
    if others := sorted({picture.shape for picture in pixels if picture.shape != pixels[0].shape}):
        raise DataError(
            f"{array.path}: expected images of shape {list(pixels[0].shape)}, found shape {list(others[0])}"
        )
    return np.stack(pixels) if pixels else np.zeros((0, 1, 1, 3), np.uint8)


def _reaches(array: Array, row_range: RowRange) -> bool:
    """Whether an array has a value for the last observation of an episode."""
    if array.role == "metadata":
        stays = not array.moves or "metadata" in row_range.layout.arrived()
        return row_range.closed and array.rows != row_range.steps and stays
    return row_range.closed and array.role == "observation"


def _flags(
    row_range: RowRange, values: Mapping[Array, npt.NDArray[Any]], role: str, count: int, start: int
) -> npt.NDArray[np.bool_]:
    found = np.zeros(count, bool)
    for array, flags in values.items():
        if array.role == role:
            inverted = row_range.layout.roles()[array.role][array.name].startswith("not ")
            said = flags.reshape(-1).astype(bool) ^ inverted
            if len(said) == 1 and row_range.whole:  # one value for the episode
                found[-1] |= bool(said[0]) and start + count == row_range.steps
            elif len(said) == count:
                found |= said
            else:
                raise damaged(
                    row_range.where, f"{array.path}: expected one flag per step, found shape {list(flags.shape)}"
                )
    return found


def _part(row_range: RowRange, values: Mapping[Array, Any], done: npt.NDArray[Any], begins: Any) -> _Part:
    count = len(done)
    seen = _named("observation", values)
    arriving = {
        name: part[:, 0] if part.dtype.kind in "iu" and part.ndim == 2 and part.shape[1] == 1 else part
        for name, part in _named("action", values).items()  # whole numbers [n, 1] are discrete actions [n]
    }
    reward = next((part for array, part in values.items() if array.role == "reward"), np.zeros(count))
    arriving["reward"] = reward.reshape(count) if reward.size == count else reward
    arriving["done"] = done
    beside: Columns = {}
    for array, part in values.items():
        if array.role == "metadata":
            group = seen if _reaches(array, row_range) else arriving if array.moves else beside
            group[array.name] = part
    following = _named("next_observation", values)
    if row_range.closed:
        following = {name: part[1:] for name, part in seen.items()}
    elif following and row_range.whole:
        following = {name: np.concatenate([part[1:], following[name]]) for name, part in seen.items()}
    seen = {name: part[:count] for name, part in seen.items()}
    for name, value in row_range.constants.items():
        for group in (seen, following) if following else (beside,):
            group[f"metadata_{name}"] = np.full(count, value, object if isinstance(value, str) else np.int64)
    return seen, arriving, begins, following or None, beside


def _named(role: str, values: Mapping[Array, Any]) -> Columns:
    """Return the arrays of a role by column name."""
    found = {array.name: part for array, part in values.items() if array.role == role}
    whole = role.removeprefix("next_")
    return columns.named(whole, found[""] if [*found] == [""] else found) if found else {}


__all__ = ["LAYOUTS", "TreeLayout", "load_layout", "read_layouts"]
