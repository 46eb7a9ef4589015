"""Layouts: where observations, actions, rewards and ends of episodes lie in a tree of arrays, in Python or YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.reading import read_bytes, reading
from mouse_core.spec import check_list

VERSION = 1
"""Version of YAML files that hold a layout."""

SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1 << 18
FLAGS = ("terminated", "truncated", "is_last")
_RING = ("size", "sizes", "last", "offsets", "next")

Layout = TypeVar("Layout")
Paths = str | Sequence[str] | Mapping[str, str] | None


class Aligned:
    """The properties that every layout has: the alignment of an action with its effect, and the end of episodes.

    A layout has ``alignment``, "outgoing" or "arrived" for all roles or a mapping from roles, and ``ending``.
    """

    alignment: str | Mapping[str, str]
    ending: str
    moved: ClassVar[tuple[str, ...]] = ("action", "reward")
    """Roles of which ``alignment`` speaks where it is one text."""

    def check_alignment(self, *others: str) -> None:
        """Raise ConfigError for an alignment of other roles than ``moved`` and ``others``, or an unknown ending."""
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
        """Roles whose values stand in the row of the observation that they led to."""
        if isinstance(self.alignment, Mapping):
            return frozenset(role for role, value in self.alignment.items() if value == "arrived")
        return frozenset(self.moved if self.alignment == "arrived" else ())


@dataclass(frozen=True, kw_only=True)
class TreeLayout(Aligned):
    """The positions of episode parts in a tree of arrays: groups and arrays of HDF5, zarr and npz files.

    A path names an array, or a group, which stands for all arrays below it that no other path of the layout names. In
    all paths ``*`` stands for the name of an episode. A path that ends in ``?`` is optional. Several paths are a list,
    whose arrays are called by the last names of their paths, or a mapping from names; one name may be empty, as the
    name of a single path is.

    An episode is a name that ``*`` stands for; or a file (``one_a_file``); or ends where ``episode_ends`` or
    ``is_last`` says; else where ``terminated`` or ``truncated`` is set. If an episode has one observation more than
    actions, the last one is the observation that the episode ends in.

    Args:
        observation: Values ``[T, ...]`` or ``[T + 1, ...]``.
        action: Values ``[T, ...]``; the action of a last row that leads nowhere is left out.
        reward: A number a step. Without it rewards are 0.
        terminated: A flag a step, or one an episode: the episode ended by itself. ``"not discount"`` is set where
            ``discount`` is 0. Of several paths, any may be set.
        truncated: A flag a step, or one an episode: the episode was cut off.
        next_observation: The observation that a step led to. Of an episode whose end the layout says, only the last is
            read.
        metadata: Further columns, ``metadata_<name>``: a value a step.
        other_metadata: Whether all other arrays of an episode become metadata, too. An array that has one value for all
            rows is left out; one of another length is an error.
        action_metadata: Paths of metadata that belong to the action of their row, beside those whose names begin with
            ``action``, ``policy`` or ``log_prob``.
        numbers: Metadata that count: a mapping from names to "file", the number of the file; to "*", the digits in the
            name of the episode; or to a regular expression whose only group is a number in the name of the file.
        leave_out: Paths of arrays and groups that are not read.
        task: Where attributes hold the task of an episode, which becomes the column ``metadata_task``: the path of a
            group, ``@``, the attribute's name and, if it holds JSON, the keys in it, as
            ``"data@problem_info/language_instruction"``. Of several paths the first that leads to a text counts.
        episodes: A regular expression that ``*`` has to match.
        nan_action: Whether the last action of an episode may be NaN. If it is, the last row holds the observation that
            the episode ends in. If it is a number, the alignment is "outgoing" instead of ``alignment``.
        episode_ends: An array of ascending row numbers, each one behind the last row of an episode.
        is_last: A flag a row, set in the last row of each episode; of several paths the first that is there. With next
            observations, that row is the last transition. Without them, it holds the observation that the episode ends
            in. ``terminated`` and ``truncated`` then say only how an episode ended.
        episode_steps: The number of steps after which the environment cut episodes off, if no ``truncated`` is stored.
        ring: How a ring of rows is filled: paths of ``last`` (the row that was written last), ``sizes`` (numbers of
            rows) and ``offsets`` (first rows of several rings). Without ``sizes``, ``size`` is the name of an attribute
            that holds the number of rows, and ``next`` of one that holds the row to be written next, which overrides
            ``last``.
        one_a_file: Whether each file is an episode.
        files: A pattern of the files of a folder, as ``"episode_*.hdf5"``. They are read in the order of the numbers in
            their names; the files of a tar archive in the order of the archive.
        pictures: An array, or a group of arrays, of observations that may be encoded. PNG and JPEG files are decoded
            from bytes ``[T, L]`` with zeros behind them, from strings of bytes or of no type (``np.void``) ``[T]``, and
            from groups with an array of bytes for each step, in the order of the numbers in their names.
            ``[T, H, W, C]`` are pixels; of ``[T, C, H, W]`` whole numbers up to 255 of any type are.
        alignment: Whether a row's action, reward and flags leave the observation of their row ("outgoing") or led to it
            ("arrived"); or a mapping with ``action``, ``reward``, ``terminated``, ``truncated`` and ``metadata``.
        ending: How an episode ended if no flag is set: "truncated" (done 2) or "terminal" (done 1).
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
    episodes: str | None = None
    nan_action: bool = False
    episode_ends: str | None = None
    is_last: Paths = None
    episode_steps: int | None = None
    ring: Mapping[str, str] | None = None
    one_a_file: bool = False
    files: str | None = None
    pictures: str | None = None
    alignment: str | Mapping[str, str] = "outgoing"
    ending: str = "truncated"

    def __post_init__(self) -> None:
        if self.task is not None and "task" in self.roles().get("metadata", {}):
            raise SchemaError("layout: expected one path to the column metadata_task, found task and metadata")
        for problem in chain(self._problems(), self._problems_of_episodes()):
            raise ConfigError(f"layout: {problem}")
        self.check_alignment("metadata")

    def _problems(self) -> Iterator[str]:
        """What is wrong with single arguments."""
        if self.observation is None and self.action is None:
            yield "expected a path of observation or of action, found neither"
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
        if _groups_of(self.episodes or "") < 0:
            yield f"episodes: expected a regular expression, found {self.episodes!r:.80}"
        for said in numbers.values():
            if said not in ("file", "*") and _groups_of(said) != 1:
                yield f"numbers: expected 'file', '*' or a regular expression with a group, found {said!r:.80}"
        for name, path in (self.ring or {}).items():
            if name not in _RING or not isinstance(path, str) or not path:
                yield f"ring: expected paths of some of {list(_RING)}, found {name!r}: {path!r}"
        if self.ring is not None and ("last" not in self.ring or not {"sizes", "size"} & set(self.ring)):
            yield f"ring: expected paths of last and of sizes, found {list(self.ring)}"
        for name in ("files", "episode_ends", "pictures"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                yield f"{name}: expected a text, found {value!r:.80}"
        if self.episode_steps is not None and not (isinstance(self.episode_steps, int) and self.episode_steps > 0):
            yield f"episode_steps: expected a positive number, found {self.episode_steps!r}"
        if self.files is not None and "/" in self.files:
            yield f"files: expected names of files in the folder, found {self.files!r}"

    def _problems_of_episodes(self) -> Iterator[str]:
        """What is wrong with what says where episodes begin and end."""
        starred = any("*" in path for paths in self.roles().values() for path in paths.values())
        ways = [starred, self.one_a_file, *(way is not None for way in (self.episode_ends, self.is_last, self.ring))]
        if sum(ways) > 1:
            yield (
                "expected one of '*' in paths, one_a_file, episode_ends, is_last and ring, found several: each says "
                "what an episode is"
            )
        if not starred and (self.episodes is not None or self.nan_action or "*" in (self.numbers or {}).values()):
            yield "expected '*' in paths, with episodes, nan_action or the number of an episode"
        if starred and (unlike := [path for path in self.leads() if "*" not in path]):
            yield f"expected '*' in the paths of observation and action, found {unlike}"
        if not any(ways[:3]):
            if self.terminated is None and self.truncated is None and self.is_last is None:
                yield (
                    "expected what says where episodes end: '*' in paths, one_a_file, episode_ends, is_last, "
                    "terminated or truncated"
                )
            if self.arrived():
                yield "alignment: expected 'outgoing' where flags alone say where episodes end"

    def roles(self) -> dict[str, dict[str, str]]:
        """Paths by role and name; a role with one path has the empty name."""
        found = {}
        for role in ("observation", "action", "reward", *FLAGS, "next_observation", "metadata"):
            value = getattr(self, role)
            if value is not None:
                found[role] = _named(role, value)
        return found

    def tasks(self) -> list[str]:
        """Paths of attributes that hold the task of an episode."""
        return [self.task] if isinstance(self.task, str) else [*(self.task or ())]

    def leads(self) -> list[str]:
        """Paths of actions and observations."""
        roles = self.roles()
        return [path for role in ("action", "observation") for path in roles.get(role, {}).values()]

    def may_be_files(self, path: str) -> bool:
        """Whether an array lies at ``pictures``, and may hold encoded pictures."""
        return self.pictures is not None and _is_at(self.pictures, path)

    def moves(self, path: str) -> bool:
        """Whether ``action_metadata`` names an array, or a group above it."""
        return any(_is_at(place, path) for place in self.action_metadata)

    def leaves_out(self, path: str) -> bool:
        """Whether ``leave_out`` names an array, or a group above it."""
        return any(_is_at(place, path) for place in self.leave_out)

    @property
    def whole(self) -> bool:
        """Whether the layout says where episodes end without flags."""
        return self.one_a_file or self.episode_ends is not None or any("*" in path for path in self.leads())

    def group(self) -> str:
        """Path of the group that holds an episode; empty if that is the whole file."""
        lead = next((path.split("/") for path in self.leads() if "*" in path), [])
        return "/".join(lead[: 1 + next((place for place, part in enumerate(lead) if "*" in part), -1)])


def _is_at(place: str, path: str) -> bool:
    """Whether ``path`` equals ``place`` or lies below it; ``*`` in ``place`` stands for any name."""
    pattern = re.escape(place.removesuffix("?").strip("/")).replace(r"\*", "[^/]+")
    return re.match(f"{pattern}(/|$)", path.strip("/")) is not None


def _named(role: str, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return dict(value)
    if isinstance(value, Sequence) and value and all(isinstance(path, str) for path in value):
        names = [path.rstrip("?").split("/")[-1] for path in value]
        if len(set(names)) < len(names):
            raise SchemaError(f"layout: {role}: expected paths with different last names, found {list(value)}")
        return dict(zip(names, value, strict=True))
    raise ConfigError(
        f"layout: {role}: expected a path, some paths, or a mapping of names to paths, found {value!r:.80}"
    )


def _groups_of(pattern: Any) -> int:
    """The number of groups of a regular expression; -1 for what is none."""
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
    """Return a layout from a mapping of its arguments, or from a YAML file with these and ``version: 1``.

    Raises:
        ConfigError: An argument that is not known or of no use, no such file, or one of a newer version.
        DataError: A file that is no YAML.
        ImportError: PyYAML, which ``datasets`` brings along, is not installed.
    """
    return loaded(TreeLayout, source)


def loaded(kind: type[Layout], source: Layout | Mapping[str, Any] | str | os.PathLike[str]) -> Layout:
    """Return a layout of a kind, as ``load_layout`` does.

    Args:
        kind: A dataclass of keyword arguments.
        source: One of it, its arguments, or a YAML file of these.
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
        raise ConfigError(f"{where}: expected some of {known}, found {others[:8]}")
    try:
        return kind(**said)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {str(error).partition('__init__() ')[2] or error}") from error


def _yaml(file: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("layouts in YAML need PyYAML: pip install pyyaml") from error
    text = read_bytes(file, most_bytes=_MOST_BYTES)
    with reading(file):
        found = yaml.safe_load(text.decode("utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a mapping, found {type(found).__name__}")
    return found


_D3RLPY_PARTS = 32
LAYOUTS: Mapping[str, TreeLayout] = MappingProxyType(
    {
        # robomimic 0.3 to 0.5, MimicGen, LIBERO and Isaac Lab. `dones` may be set before the end.
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
            # RoboCasa has a task for each episode, LIBERO for each file.
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
        # Cameras as pixels, or as JPEG where the recorder compressed them.
        "aloha": TreeLayout(
            observation="observations",
            action="action",
            metadata=["base_action?"],
            one_a_file=True,
            files="episode_*.hdf5",
            pictures="observations/images",
        ),
        # Each of the infos must have a value for each row; a shorter one is damage.
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
        # Observations that are tuples have an array for each part, with its number.
        "d3rlpy": TreeLayout(
            observation={"": "observations_*?", **{str(k): f"observations_*_{k}?" for k in range(_D3RLPY_PARTS)}},
            action="actions_*",
            reward="rewards_*",
            terminated="terminated_*",
        ),
        # Diffusion Policy's ReplayBuffer, and UMI's, whose actions are poses that the observations hold.
        "diffusion_policy": TreeLayout(
            observation="data",
            action="data/action?",
            reward="data/reward?",
            episode_ends="meta/episode_ends",
        ),
        # A row for every observation; "compact" files mark its last one with valids 0. "Regular" files are transitions.
        # Tasks of OGBench set masks to 0 where they are solved, which ends no trajectory.
        "ogbench": TreeLayout(
            observation="observations",
            action="actions",
            reward="rewards?",
            terminated="not masks?",
            is_last=["not valids?", "terminals"],
            next_observation="next_observations?",
            other_metadata=True,
        ),
        # Episodes in npz files: action, reward and discount led to the observation of their row; row 0 has none.
        "drqv2": TreeLayout(
            observation="observation",
            action="action",
            reward="reward",
            terminated="not discount",
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # Dreamer and DreamerV2. Those of V3 are pieces of streams, which `formats.dreamerv3` reads.
        "dreamer": TreeLayout(
            observation="image",
            action="action",
            reward="reward",
            terminated=["is_terminal?", "not discount?"],
            alignment="arrived",
            one_a_file=True,
            files="*.npz",
        ),
        # RoboHive logs what came with an observation beside it, and the action taken on it; before, what the action
        # brought, and no last observation. Trials go on after some of the flags.
        "roboset": TreeLayout(
            observation="*/observations",
            action="*/actions",
            reward="*/rewards",
            terminated="*/done",
            metadata={"time": "*/time?", "done": "*/done"},
            other_metadata=True,
            action_metadata=["*/done", "*/env_infos"],
            numbers={"seed": "file", "episode": "*"},
            episodes=r"(?:Trial|Rollout)\d{1,9}",
            nan_action=True,
            alignment={"reward": "arrived", "terminated": "arrived", "metadata": "arrived"},
            files="*.h5",
        ),
        # Procgen's; time limits are terminal there. A file's name says when it was recorded, its number, its length,
        # the seed of its level and its return: 20230313T133237_4_77_12_10.00.npz. Archives have pickled dicts.
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
        "tianshou": TreeLayout(
            observation="_meta/obs",
            action="_meta/act",
            reward="_meta/rew",
            terminated="_meta/terminated",
            truncated="_meta/truncated",
            next_observation="_meta/obs_next?",
            # Buffers of `from_data` have 0 in `last_index`, whatever was written last.
            ring={
                "size": "_size",
                "next": "_insertion_idx",
                "sizes": "_lengths?",
                "last": "last_index",
                "offsets": "_offset?",
            },
        ),
    }
)
"""The layouts that have a name: "aloha" (ACT), "d3rlpy", "d4rl", "diffusion_policy" (UMI), "dreamer" (V2), "drqv2"
(V-D4RL), "gen_dgrl" (Procgen), "maniskill", "ogbench", "robomimic" (MimicGen, LIBERO, Isaac Lab), "roboset" (RoboHive)
and "tianshou"."""
