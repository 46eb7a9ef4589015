"""The signs by which formats are told apart. Each looks at names, or at the beginning of a file, and never fails."""

from __future__ import annotations

import gzip
import lzma
import re
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from mouse_core.errors import MouseError
from mouse_core.files.reading import read_json_object
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats._files.on_disk import BAG, DREAMERV3, MCAP, is_zarr, npz_names

_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOST_JSON = 64 << 20
_MOST_NAMES = 8
_MOST_FOLDERS = 1000
_MOST_HEADER = 1 << 16
_EPISODE = re.compile(r"(?!\.).*\d{8}T\d{6}_\d+_\d+_-?\d+_-?[\d.]+\.np[yz]")
_RELATION = re.compile(rb"^\s*@relation\s", re.IGNORECASE | re.MULTILINE)
_RLLIB = re.compile(rb'\s*\{\s*"type"\s*:\s*"(SampleBatch|MultiAgentBatch)"')
_TELLING = ("data", "_meta", "observations")
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
_ARCHIVES = (".tar", ".gz", ".tgz", ".xz", ".txz")


def contents(path: Path) -> str:
    """What lies at a path, in a few words, for whoever expected something else there."""
    names = hdf5_names(path)
    if names is None and not path.is_dir():
        return f"a file of {path.stat().st_size:,} bytes"
    kind = "a folder" if names is None else "an HDF5 file"
    try:
        found = (
            sorted(file.name for file in path.iterdir())
            if names is None
            else sorted(name for name in names if "/" not in name)
        )
    except OSError as error:
        return f"{kind} that cannot be read ({error.strerror})"
    if not found:
        return f"{kind} of nothing"
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return f"{kind} of {found[:_MOST_NAMES]}{more}"


def is_lerobot(path: Path) -> bool:
    """A folder with LeRobot's description."""
    return (path / "meta" / "info.json").is_file()


def is_minari(path: Path) -> bool:
    """A folder of Minari, or the folder ``data`` in it."""
    for folder in (path, path / "data"):
        if (folder / "main_data.hdf5").is_file():
            return True
        described = _json(folder / "metadata.json")
        if "data_format" in described or "minari_version" in described or "total_episodes" in described:
            return True
    return False


def is_tfds(path: Path) -> bool:
    """A folder of TFDS, or one above it that holds versions."""
    if not path.is_dir():
        return False
    depths = ("", "*/", "*/*/", "*/*/*/")
    described = (file for depth in depths for file in path.glob(f"{depth}features.json"))
    return any((file.parent / "dataset_info.json").is_file() for file in islice(described, _MOST_FOLDERS))


def is_memmap(path: Path) -> bool:
    """A folder that ``TensorDict.memmap`` wrote, or a TorchRL buffer that holds one."""
    return any(
        "tensordict" in str(_json(folder / "meta.json").get("_type", ""))
        or ((folder / "meta.json").is_file() and any(folder.glob("*.memmap")))
        or (folder / "checkpoint.h5").is_file()
        for folder in (path, path / "storage")
    )


def is_dopamine(path: Path) -> bool:
    """A folder with Dopamine's checkpoints of its replay buffer, or one such file."""
    folder = path / "replay_logs" if (path / "replay_logs").is_dir() else path
    names = [path.name] if path.is_file() else [file.name for file in folder.glob("*.gz")] if folder.is_dir() else []
    return any(re.fullmatch(r"(\$store\$_|add_count|invalid_range)\w*_ckpt\.\d+\.gz", name) for name in names)


def is_roboset(path: Path) -> bool:
    """A folder of HDF5 files of trials that RoboHive logged."""
    first = min(path.glob("*.h5"), default=None) if path.is_dir() else None
    return first is not None and is_roboset_file(hdf5_names(first) or ())


def is_roboset_file(names: Sequence[str]) -> bool:
    """Trials of RoboHive, by the names in an HDF5 file."""
    return any(re.fullmatch(r"(Trial|Rollout)\d+", name) for name in names)


def is_dreamerv3(path: Path) -> bool:
    """A folder of pieces of DreamerV3's replay, or one of them, by their names."""
    names = (file.name for file in islice(path.glob("*.npz"), _MOST_NAMES)) if path.is_dir() else [path.name]
    return any(DREAMERV3.fullmatch(name) for name in names)


def is_recording(path: Path) -> bool:
    """An MCAP file or one of rosbag2, a bag of ROS 2, or a folder of such."""
    if not path.is_dir():
        return path.suffix in (".mcap", ".db3") or _begins(path, MCAP)
    below = (one for one in islice(path.iterdir(), _MOST_FOLDERS) if not one.name.startswith("."))
    return _is_bag(path) or any(one.suffix == ".mcap" or (one.is_dir() and _is_bag(one)) for one in below)


def _is_bag(folder: Path) -> bool:
    """Whether rosbag2 described what is in a folder, or files of it lie beside a description."""
    if not (folder / BAG).is_file():
        return False
    if any(folder.glob("*.db3")):
        return True
    try:
        with (folder / BAG).open("rb") as file:
            return b"rosbag2_bagfile_information" in file.read(_MOST_HEADER)
    except OSError:
        return False


def is_gen_dgrl(path: Path) -> bool:
    """A folder or archive of Gen-DGRL's episodes, or one of them, by their names."""
    if path.is_dir():
        return any(_EPISODE.fullmatch(file.name) for file in islice(path.glob("*.np[yz]"), _MOST_NAMES))
    if path.suffix not in _ARCHIVES or not path.is_file():
        return bool(_EPISODE.fullmatch(path.name))
    with (
        suppress(OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error),
        tarfile.open(path, "r|*") as archive,
    ):
        files = (member for member in islice(archive, _MOST_NAMES) if member.isfile())
        return any(_EPISODE.fullmatch(PurePosixPath(member.name).name) for member in files)
    return False


def is_openml(path: Path) -> bool:
    """A file of ARFF, or a folder of OpenML's client."""
    if path.is_dir():
        return (path / "description.xml").is_file() and any(path.glob("dataset*"))
    if path.suffix not in (".arff", ".gz") or not path.is_file():
        return False
    with suppress(*_UNREADABLE):
        opened: Any = gzip.open if _begins(path, b"\x1f\x8b") else open
        with opened(path, "rb") as file:
            return _RELATION.search(file.read(_MOST_HEADER)) is not None
    return False


def is_rllib(path: Path) -> bool:
    """A file whose first line is one of RLlib's, or a folder of such."""
    if path.is_dir():
        first = min(path.glob("*.json"), default=None)
        return first is not None and first.is_file() and is_rllib(first)
    if path.suffix not in (".json", ".jsonl") or not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as stream:
        return _RLLIB.match(stream.read(_MOST_HEADER)) is not None
    return False


def is_minari_file(names: Sequence[str]) -> bool:
    """Minari, by the names in an HDF5 file."""
    return any(re.fullmatch(r"episode_\d+", name) for name in names)


def layout_of(names: Sequence[str]) -> str | None:
    """The name of the layout that a tree of arrays has, by the names in it and below them; None: none that has one."""
    tops = {name.split("/")[0] for name in names}
    if any(re.fullmatch(r"data/demo_\d+", name) for name in names):
        return "robomimic"
    if "meta/episode_ends" in names and any(name.startswith("data/") for name in names):
        return "diffusion_policy"
    trajectory = {name.split("/")[1] for name in names if re.fullmatch(r"traj_\d+/.+", name)}
    if "actions" in trajectory and "done" not in trajectory:
        return "maniskill"
    if {"_meta/obs", "_meta/act"} <= set(names):
        return "tianshou"
    if {"columns", "num_episodes"} <= tops and tops & {"observations_0", "observations_0_0"}:
        return "d3rlpy"
    if {"action", "reward"} <= tops:
        if {"observation", "discount"} <= tops:
            return "drqv2"
        if "image" in tops and tops & {"discount", "is_terminal"}:
            return "dreamer"
    return "aloha" if "action" in tops and "observations/qpos" in names else None


def names_of_arrays(path: Path) -> list[str]:
    """What lies in a zarr group, an npz file, or the first such or HDF5 file of a folder, and in the groups of it."""
    if is_zarr(path):
        if path.is_dir():
            return [f"{name}/{inner.name}" for name in ("data", "meta") for inner in path.glob(f"{name}/*")]
        return list({"/".join(name.split("/")[:2]) for name in npz_names(path)})
    if is_dreamerv3(path):  # whose arrays may be called as those of episodes are
        return []
    if not path.is_dir():
        return [name.removesuffix(".npy") for name in npz_names(path)]
    for pattern in ("*.hdf5", "*.h5", "*.npz"):
        files = (file for file in path.glob(pattern) if file.name != "main_data.hdf5" and not file.name.startswith("."))
        if (first := min(files, default=None)) is not None:
            return hdf5_names(first) or names_of_arrays(first)
    return []


def is_ted_file(names: Sequence[str]) -> bool:
    """What TensorDict writes, by the names in an HDF5 file."""
    if layout_of(names) is not None:
        return False
    return "next" in names or any(re.fullmatch(r"traj_\d+", name) for name in names) or {"done", "shift"} <= set(names)


def is_d4rl(names: Sequence[str]) -> bool:
    """D4RL, by the names in an HDF5 file; one that cannot be looked into is taken for it, whose reader says why."""
    return not names or bool({"observations", "actions", "rewards", "terminals"} & set(names))


def is_ogbench(path: Path) -> bool:
    """A file of ``numpy.savez``, and no episode of another library's."""
    if layout_of(names_of_arrays(path)) is not None:
        return False
    return path.suffix == ".npz" or "observations.npy" in npz_names(path)


def _json(file: Path) -> Mapping[str, Any]:
    with suppress(MouseError):
        return read_json_object(file, most_bytes=_MOST_JSON)
    return {}


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def hdf5_names(path: Path) -> list[str] | None:
    """What lies in an HDF5 file, and in groups of it that tell whose it is; None where it is no such file.

    Nothing where it cannot be looked into.
    """
    if not path.is_file() or not (_begins(path, _HDF5) or path.suffix in (".h5", ".hdf5")):
        return None
    try:
        # In a process of its own: the file may be damaged.
        with H5File(path) as file:
            names = file.names()
            below = [name for name in names if name in _TELLING or name.startswith("traj_")][:2]
            return names + [f"{name}/{inner}" for name in below for inner in file.names(f"/{name}")]
    except (MouseError, ImportError):
        return []
