"""Recognises the format of recorded data, and opens data by a path, an address, or the id of a library's dataset."""

from __future__ import annotations

import importlib
import inspect
import lzma
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, MouseError, SchemaError
from mouse_core.files.reading import damaged, naming, read_json_object
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats._files.on_disk import BAG, DREAMERV3, MCAP, is_there, is_zarr, npz_names
from mouse_core.formats.base import BATCH_ROWS, RowStream, as_stream
from mouse_core.images.files import check_roots
from mouse_core.remote.clients import is_url, public_url
from mouse_core.spec import Alignment, check_alignment, check_choice
from mouse_core.store.disk.folder import looks_like_store

# Packages whose errors mean that a server is unreachable.
_NETWORK = ("google", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3")


@contextmanager
def _downloading(name: str, whom: str, *, where: str, by_hand: str, install: str) -> Iterator[Any]:
    """Context manager that yields the library which downloads a dataset. The library's output is printed to stderr, and
    errors of the library are raised as a ConfigError.

    Args:
        name: Name of the module.
        whom: Name of the library for error messages.
        where: A text for error messages that names the dataset and the folders that were searched.
        by_hand: The command with which a user can download the dataset.
        install: Arguments of ``pip install`` for the library and its requirements.

    Raises:
        ConfigError: The library raises an error, or its server cannot be reached.
        ImportError: The library, or one of its requirements, is not installed.
    """
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{where}; to download it: pip install {install} ({error})") from error
    try:
        with redirect_stdout(sys.stderr):  # stdout is for the command's own output, which a program may read
            yield library
    except MouseError:
        raise
    except ImportError as error:
        needs = f"{whom} needs a package to download it: pip install {install} ({_line(error)})"
        raise ImportError(f"{where}; {needs}") from error
    except Exception as error:
        known = isinstance(error, OSError | ValueError | LookupError | AssertionError)
        if not known and type(error).__module__.split(".")[0] not in _NETWORK:
            raise
        raise ConfigError(
            f"{where}, and {whom} did not download it: {_line(error)}; with a connection, run {by_hand}"
        ) from error


def _line(error: Exception) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".;")[:300] if lines else type(error).__name__


def _hub_folder(name: str, *, scheme: str = "hf", cache: Path | None = None) -> Path:
    """Return the folder of a dataset of the Hub, with all its files; see ``located``.

    Args:
        name: Name of the dataset, with or without ``@revision``.
        scheme: Prefix of the id.
        cache: The folder that is searched and used for downloads, unless the cache of the Hub's client has the dataset.
    """
    repo_id, at, revision = name.partition("@")
    if repo_id.count("/") > 1:
        raise ConfigError(f"{scheme}:{name}: expected namespace/name, or namespace/name@revision, found {name!r:.200}")
    where = f"{scheme}:{name}: not complete in the Hub's cache"
    by_hand, install = f"`hf download --repo-type dataset {repo_id}`", "'mouse-data[remote]'"
    with _downloading("huggingface_hub", "the Hub", where=where, by_hand=by_hand, install=install) as hub:
        if (Path(hub.constants.HF_HUB_CACHE) / f"datasets--{repo_id.replace('/', '--')}").is_dir():
            cache = None
        return Path(
            hub.snapshot_download(
                repo_id, repo_type="dataset", revision=revision if at else None, cache_dir=cache and str(cache)
            )
        )


def _lerobot_folder(name: str) -> Path:
    """Return the folder of a LeRobotDataset, in LeRobot's folder or in the cache of the Hub."""
    said = os.environ.get("HF_LEROBOT_HOME")
    home = Path(said) if said else Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "lerobot"
    if "@" not in name and (home / name / "meta" / "info.json").is_file():
        return home / name
    return _hub_folder(name, scheme="lerobot", cache=home / "hub")


_MINARI_VERSION = re.compile(r"-v\d+$")


def _minari_folder(name: str) -> Path:
    """Return the folder of a dataset of Minari; see ``located``."""
    said = os.environ.get("MINARI_DATASETS_PATH")
    folder = (Path(said) if said else Path.home() / ".minari" / "datasets") / name
    if not (folder / "data").exists():
        if not _MINARI_VERSION.search(name):  # Minari does not define which dataset is the newest
            raise ConfigError(
                f"minari:{name}: not in {folder}; to download it: expected a version after the name, as in {name}-v0"
            )
        where, by_hand = f"minari:{name}: not in {folder}", f"`minari download {name}`"
        with _downloading("minari", "Minari", where=where, by_hand=by_hand, install="'minari[hf,hdf5]'") as minari:
            minari.download_dataset(name)
    return folder


ID_SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "minari": "minari:D4RL/pointmaze/umaze-v2, a dataset of Minari",
        "lerobot": "lerobot:namespace/name or lerobot:namespace/name@revision, a LeRobotDataset on the Hub",
        "hf": "hf:namespace/name or hf:namespace/name@revision, a dataset of the Hub in any supported format",
    }
)
"""Prefixes of dataset ids; for each prefix, an example and the kind of dataset."""

_FOLDERS = {"minari": _minari_folder, "lerobot": _lerobot_folder, "hf": _hub_folder}
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*(@[\w./+-]+)?")


def is_id(source: Any) -> bool:
    """Whether a source is the id of a dataset: a text that begins with one of ``ID_SCHEMES`` and a colon.

    A text with ``//`` after the colon is an address, not an id. A ``Path`` is never an id.
    """
    if not isinstance(source, str):
        return False
    scheme, colon, name = source.partition(":")
    return bool(colon) and scheme in ID_SCHEMES and not name.startswith("//")


def located(source: str) -> tuple[Path, str | None]:
    """Return the folder of a dataset, and the name of its format if the id determines the format.

    The folder is in the cache of the dataset's library. If the dataset is missing there, the library downloads it.

    Args:
        source: An id, for which ``is_id`` is true.

    Raises:
        ConfigError: The library does not know the dataset. Or a file or folder has the same name as the id. Or the
            dataset is not in the cache and could not be downloaded; the message states the searched folders and the
            reason.
        ImportError: The dataset is not in the cache, and the library is not installed; the message names the packages
            to install.
    """
    scheme, _, name = source.partition(":")
    if not _NAME.fullmatch(name) or ".." in re.split(r"[/@]", name):
        raise ConfigError(f"{source}: expected an id as {ID_SCHEMES[scheme]}, found {name!r:.200}")
    if os.path.lexists(source):
        raise ConfigError(
            f"{source}: expected a dataset's id or a path, found an id that is also the name of a file or folder; "
            f"for the file or folder, write {os.path.join('.', source)!r}"
        )
    return _FOLDERS[scheme](name), None if scheme == "hf" else scheme


_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOST_JSON = 64 << 20
_MOST_NAMES = 8
_MOST_FOLDERS = 1000
_MOST_HEADER = 1 << 16
_EPISODE = re.compile(r"(?!\.).*\d{8}T\d{6}_\d+_\d+_-?\d+_-?[\d.]+\.np[yz]")
_TELLING = ("data", "observations")
_ARCHIVES = (".tar", ".gz", ".tgz", ".xz", ".txz")


def contents(path: Path) -> str:
    """Describe the file or folder at a path in a few words, for an error message."""
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
    """Whether a folder contains the metadata of a LeRobotDataset."""
    return (path / "meta" / "info.json").is_file()


def is_minari(path: Path) -> bool:
    """Whether a path is a folder of Minari, or the folder ``data`` in it."""
    for folder in (path, path / "data"):
        if (folder / "main_data.hdf5").is_file():
            return True
        described = _json(folder / "metadata.json")
        if "data_format" in described or "minari_version" in described or "total_episodes" in described:
            return True
    return False


def is_tfds(path: Path) -> bool:
    """Whether a path is a folder of TFDS, or a folder of its versions."""
    if not path.is_dir():
        return False
    depths = ("", "*/", "*/*/", "*/*/*/")
    described = (file for depth in depths for file in path.glob(f"{depth}features.json"))
    return any((file.parent / "dataset_info.json").is_file() for file in islice(described, _MOST_FOLDERS))


def is_memmap(path: Path) -> bool:
    """Whether a path is a folder that ``TensorDict.memmap`` wrote, or a TorchRL buffer that contains such a folder."""
    return any(
        "tensordict" in str(_json(folder / "meta.json").get("_type", ""))
        or ((folder / "meta.json").is_file() and any(folder.glob("*.memmap")))
        or (folder / "checkpoint.h5").is_file()
        for folder in (path, path / "storage")
    )


def is_dopamine(path: Path) -> bool:
    """Whether a path is a folder of checkpoints of Dopamine's replay buffer, or a file of such a checkpoint."""
    folder = path / "replay_logs" if (path / "replay_logs").is_dir() else path
    names = [path.name] if path.is_file() else [file.name for file in folder.glob("*.gz")] if folder.is_dir() else []
    return any(re.fullmatch(r"(\$store\$_|add_count|invalid_range)\w*_ckpt\.\d+\.gz", name) for name in names)


def is_dreamerv3(path: Path) -> bool:
    """Whether a path is a folder of chunks of DreamerV3's replay, or a chunk; only file names are checked."""
    names = (file.name for file in islice(path.glob("*.npz"), _MOST_NAMES)) if path.is_dir() else [path.name]
    return any(DREAMERV3.fullmatch(name) for name in names)


def is_recording(path: Path) -> bool:
    """Whether a path is an MCAP file, a file or bag of rosbag2, or a folder of such files or bags."""
    if not path.is_dir():
        return path.suffix in (".mcap", ".db3") or _begins(path, MCAP)
    below = (one for one in islice(path.iterdir(), _MOST_FOLDERS) if not one.name.startswith("."))
    return _is_bag(path) or any(one.suffix == ".mcap" or (one.is_dir() and _is_bag(one)) for one in below)


def _is_bag(folder: Path) -> bool:
    """Whether a folder has metadata of rosbag2."""
    with suppress(OSError):
        if (folder / BAG).is_file():
            with (folder / BAG).open("rb") as file:
                return b"rosbag2_bagfile_information" in file.read(_MOST_HEADER)
    return False


def is_gen_dgrl(path: Path) -> bool:
    """Whether a path is a folder, archive or file of Gen-DGRL's episodes; only file names are checked."""
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


def names_of_arrays(path: Path) -> list[str]:
    """Return the names in a zarr group, in an npz file, or in the first HDF5 or npz file of a folder."""
    if is_zarr(path):
        if path.is_dir():
            return [f"{name}/{inner.name}" for name in ("data", "meta") for inner in path.glob(f"{name}/*")]
        return list({"/".join(name.split("/")[:2]) for name in npz_names(path)})
    if is_dreamerv3(path):  # its arrays may have the same names as arrays of episodes
        return []
    if not path.is_dir():
        return [name.removesuffix(".npy") for name in npz_names(path)]
    for pattern in ("*.hdf5", "*.h5", "*.npz"):
        files = (file for file in path.glob(pattern) if file.name != "main_data.hdf5" and not file.name.startswith("."))
        if (first := min(files, default=None)) is not None:
            return hdf5_names(first) or names_of_arrays(first)
    return []


def is_ogbench(path: Path) -> bool:
    """Whether a path is a file that ``numpy.savez`` wrote, which is the file type of OGBench."""
    return path.suffix == ".npz" or "observations.npy" in npz_names(path)


def _json(file: Path) -> Mapping[str, Any]:
    with suppress(MouseError):
        return read_json_object(file, most_bytes=_MOST_JSON)
    return {}


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():  # opening a pipe would block
        return False
    try:
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def hdf5_names(path: Path) -> list[str] | None:
    """Return the names in an HDF5 file and in groups that identify its writer; None if the file is not HDF5.

    The list is empty if the file cannot be opened.
    """
    if not path.is_file() or not (_begins(path, _HDF5) or path.suffix in (".h5", ".hdf5")):
        return None
    try:
        # Another process reads the file, since it may be damaged.
        with H5File(path) as file:
            names = file.names()
            below = [name for name in names if name in _TELLING or name.startswith("traj_")][:2]
            return names + [f"{name}/{inner}" for name in below for inner in file.names(f"/{name}")]
    except (MouseError, ImportError):
        return []


@dataclass(frozen=True)
class _Format:
    """A format that can be recognised; its reader is ``mouse_core.formats.<name>.read_<name>``.

    Args:
        name: Name of the format, for the argument ``format``.
        sign: Description of the mark that identifies the format.
        is_there: A function that returns whether the data at a path have this format; None for a format that is
            recognised by names in a tree of arrays.
        names: Regular expressions, separated by spaces; each expression must match the beginning of a name in the tree.
        lacks: A regular expression that must not match any name in the tree.
        hdf5: Whether the tree is an HDF5 file.
        layout: The layout for ``read_layouts``; None for a format with its own reader.
    """

    name: str
    sign: str
    is_there: Callable[[Path], bool] | None = None
    names: str = ""
    lacks: str = "(?!)"
    hdf5: bool = False
    layout: Any = None

    def is_among(self, names: Sequence[str]) -> bool:
        """Whether the names in a tree of arrays identify this format."""
        known = {*names, *(name.split("/")[0] for name in names)}
        lacking = not any(re.fullmatch(self.lacks, name) for name in known)
        return lacking and all(any(re.fullmatch(one, name) for name in known) for one in self.names.split())


def _layout(name: str, sign: str, names: str = "", **options: Any) -> _Format:
    return _Format(name, sign, names=names, layout=name, **options)


# Formats are tried in this order; formats with a distinct mark come before formats with only a suffix.
_FORMATS = (
    _Format("store", "manifest.json of a store that DatasetStore.open made", looks_like_store),
    _Format("lerobot", "meta/info.json with a codebase_version", is_lerobot),
    _Format("minari", "main_data.hdf5, or metadata.json of Minari, below data/", is_minari),
    _Format("tfds", "features.json and dataset_info.json of TFDS (RLDS)", is_tfds),
    _Format("ted", "meta.json of a memory-mapped TensorDict", is_memmap),
    _Format("dopamine", "files $store$_action_ckpt.N.gz", is_dopamine),
    _Format("robot_logs", "MCAP files, or bags of ROS 2 (metadata.yaml)", is_recording),
    _Format("dreamerv3", "npz files TIME-ID-FOLLOWING-LENGTH, pieces of DreamerV3's replay", is_dreamerv3),
    _layout("gen_dgrl", "episodes DATE_NUMBER_LENGTH_SEED_RETURN.npz or .npy, also in a tar", is_there=is_gen_dgrl),
    _Format("openml", "a Parquet table, only with format='openml'", lambda path: False),
    _Format("rows", "Arrow or Parquet files, or a folder of save_to_disk", is_there),
    _layout("roboset", "an HDF5 file with groups TrialN, or a folder of such files", r"(Trial|Rollout)\d+"),
    _layout("robomimic", "an HDF5 file with data/demo_N, or a folder of such files", r"data/demo_\d+"),
    _layout("diffusion_policy", "a zarr group with meta/episode_ends and data", "meta/episode_ends data/.*"),
    _layout("maniskill", "HDF5 files with traj_N/actions", r"traj_\d+/actions", lacks=r"traj_\d+/done"),
    _layout("drqv2", "npz files of single observations and discounts", "observation action reward discount"),
    _layout("dreamer", "npz files with image, action and reward", "image action reward discount|is_terminal"),
    _layout("aloha", "HDF5 files with action and observations/qpos", "action observations/qpos"),
    _Format("minari", "an HDF5 file with groups episode_N", names=r"episode_\d+", hdf5=True),
    _Format("ted", "an HDF5 file with 'next', or with groups traj_N", names=r"next|traj_\d+", hdf5=True),
    _Format("ted", "an HDF5 file with done and shift", names="done shift", hdf5=True),
    _layout("d4rl", "an HDF5 file with observations", "observations|actions|rewards|terminals", hdf5=True),
    _layout("ogbench", "an npz file with observations and actions", is_there=is_ogbench),
)


def open(
    path: str | os.PathLike[str],
    *,
    format: str | Any = None,
    final: str | None = None,
    splits: Sequence[str] | None = None,
    alignment: Alignment | None = None,
    batch_rows: int = BATCH_ROWS,
    image_roots: Iterable[str | os.PathLike[str]] = (),
    **options: Any,
) -> RowStream:
    """Read recorded data of any format that this library reads, as a stream of record batches.

    To open the same data as a store, call ``DatasetStore.open`` with the same options.

    Args:
        path: A file or folder; an address, as for ``DatasetStore.open``; or the id of another library's dataset. An id
            begins with one of ``formats.ID_SCHEMES``, for example ``"minari:D4RL/door/human-v2"``. The dataset is
            opened in the library's cache; if the dataset is missing there, the library downloads it.
        format: Name of the format, required if the format is not recognised: "dopamine", "dreamerv3", "lerobot",
            "minari", "openml", "rows" (datasets on disk, Arrow, Parquet), "store" (``DatasetStore.open``), "ted" or
            "tfds"; one of ``layouts.LAYOUTS`` ("aloha", "d4rl", "diffusion_policy", "dreamer", "drqv2",
            "gen_dgrl", "maniskill", "ogbench", "robomimic", "roboset"); or a ``layouts.TreeLayout``. For recordings of
            robots (MCAP, bags of ROS 2), a ``robot_logs.TopicLayout``. A layout can also be passed as a mapping of its
            arguments, or as a YAML file with its arguments.
        final: Treatment of an episode's last transition, for formats that do not store the final observation: "drop" or
            "mark".
        splits: Names of the splits to read, if the format has splits.
        alignment: Whether a row's action, reward and done belong to the transition before the row's observation
            ("arrived") or after it ("outgoing"). Required only if the data do not state the alignment; the value
            becomes part of the metadata.
        batch_rows: Largest number of rows of a batch.
        image_roots: Further allowed folders of images: an image whose path is in a row must lie in one of these folders
            or in a folder of the data.
        **options: Options of the format's reader.

    Returns:
        The rows as a stream.

    Raises:
        ConfigError: The path does not exist; the format is unknown or not recognised (the message lists the marks of
            formats); the reader has no such option; the dataset of an id could not be downloaded; or the id is also the
            name of a file or folder.
        ImportError: A library for downloading or reading is not installed.
        DataError: The data are damaged.
        SchemaError: The alignment contradicts the data or the format.
    """
    roots = check_roots(image_roots, where="image_roots (--image-root)")
    if alignment is not None:
        check_alignment(alignment)
    if format is not None and (not isinstance(format, str) or format.endswith((".yaml", ".yml"))):
        root = place(path, None)[0]
        module = "robot_logs" if isinstance(root, Path) and is_recording(root) else "layouts"
        found = _Format(module, "a layout", bool, layout=format)
    else:
        root, format = place(path, format)
        found = _format_at(root, format)
    module = found.name if found.layout is None or found.name == "robot_logs" else "layouts"
    options |= {} if found.layout is None else {"layout": found.layout}
    reader = getattr(importlib.import_module(f"mouse_core.formats.{module}"), f"read_{module}")
    takes = inspect.signature(reader).parameters
    if splits is not None and "splits" not in takes:
        raise ConfigError(f"{root}: splits: expected None, as {found.name} data have no splits, found {list(splits)}")
    options |= {"splits": splits} if splits is not None else {}
    options |= {"final": final} if final is not None and "final" in takes else {}
    for option, of in (
        ("skip_broken", "a LeRobotDataset"),
        ("tolerance", "a LeRobotDataset"),
        ("last_step", "RLDS data of TFDS"),
    ):
        if option in options and option not in takes:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{root}: {option} ({flag}): expected {of}, found {found.name} data")
    try:
        with naming(os.fspath(root)):
            opened: RowStream = reader(root, batch_rows=batch_rows, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(f"{root}: {error}") from error
    if roots:
        opened = opened.replace(image_roots=(*opened.image_roots, *roots))
    if opened.rows is not None:
        kept = {name: getattr(opened, name) for name in ("mapped", "opened", "noted")}
        opened = opened.replace(batches=partial(_all_rows, opened), **kept)
    if alignment is None:
        return opened
    stated = opened.metadata.alignment
    if stated not in (None, alignment):
        who = (
            "declared in the data's metadata"
            if found.name in ("rows", "store")
            else f"the {found.name} reader returns it"
        )
        raise SchemaError(f"{root}: alignment: expected {stated!r}, as {who}, found {alignment!r}")
    return opened.replace(metadata=opened.metadata.replace(alignment=alignment))


def save(rows: Any, path: str | os.PathLike[str], format: str | None = None, **options: Any) -> None:
    """Write rows in a format that ``DatasetStore.open`` opens; see ``Store.save``.

    Args:
        rows: A ``RowStream``, a store or a view.
        path: The folder or file to write.
        format: "arrow", "parquet", "store", "lerobot" or "ted". The default is "parquet" for a path that ends in
            ``.parquet``, else "arrow".
        **options: For "arrow", "parquet" and "store", options of ``formats.converting.convert``. For other formats,
            options of the format's writer, such as ``lerobot.write_lerobot``.

    Raises:
        ConfigError: The format is unknown, or has no such option.
    """
    check_choice("format", format, (None, *_KINDS, *_WRITTEN))
    source = as_stream(rows)
    if format is None and not options and not os.fspath(path).endswith(".parquet"):
        source.save(path)
        return
    if format in _WRITTEN:
        writer = getattr(importlib.import_module(f"mouse_core.formats.{format}"), f"write_{format}")
    else:
        writer = partial(importlib.import_module("mouse_core.formats.converting").convert, to=format)
    try:
        writer(source, path, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


_KINDS, _WRITTEN = ("arrow", "parquet", "store"), ("lerobot", "ted")


def place(path: str | os.PathLike[str], name: str | None) -> tuple[Any, str | None]:
    """Return two values for a path, address or id: the location of the data, and the name of the format, if the format
    is known.
    """
    if not is_id(path):
        return (path if is_url(path) else Path(path)), name
    folder, known = located(str(path))
    if name not in (None, known) and known is not None:
        raise ConfigError(f"{path}: format: expected {known!r}, the format of the id, found {name!r}")
    return folder, known or name


def _format_at(root: Any, name: str | None) -> _Format:
    """Return the format with the given name; if no name is given, return the format that is recognised at the path."""
    names = {one.name: one for one in reversed(_FORMATS)}
    if is_url(root):
        if name not in (None, "store", "rows"):
            raise ConfigError(f"{public_url(root)}: format: expected 'rows' or 'store' for remote data, found {name!r}")
        return names["store"]
    if not root.exists():
        scheme = re.match(r"([a-z]\w+):(?!//)", str(root))
        ids = f"; ids of datasets begin with one of {list(ID_SCHEMES)} and a colon" if scheme else ""
        raise ConfigError(f"{root}: expected a file or folder, found none{ids}")
    if not root.is_file() and not root.is_dir():  # opening a pipe would block
        raise ConfigError(f"{root}: expected a regular file or a folder, found neither")
    if name is not None and name not in names:
        raise ConfigError(f"format: expected one of {sorted(names)}, found {name!r}")
    found = names[name] if name is not None else _recognised(root)
    if found is None and root.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{root}: expected recorded data, found a pickle file, which can run any code when it is loaded. If you "
            "trust the file, load it with the library that wrote it, and save its arrays with numpy.savez; the guide "
            "on formats shows this for buffers of Stable-Baselines3"
        )
    if found is None:
        raise ConfigError(
            f"{root}: no format recognised in {contents(root)}; looked for "
            + "; ".join(f"{one.name}: {one.sign}" for one in _FORMATS)
        )
    return found


def _all_rows(stream: RowStream) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream; raise DataError if their number of rows differs from ``stream.rows``."""
    found = 0
    for batch in stream:
        found += batch.num_rows
        yield batch
    if found != stream.rows:
        raise damaged(stream.path, f"expected {stream.rows} rows, as declared in the data's metadata, found {found}")


def _recognised(root: Path) -> _Format | None:
    names, beside = hdf5_names(root), names_of_arrays(root)
    layouts = (one for one in _FORMATS if one.is_there is None and not one.hdf5 and one.is_among(names or beside))
    found = [*islice(layouts, 1), *(one for one in _FORMATS if one.is_there is not None and one.is_there(root))]
    # An HDF5 file that cannot be read counts as D4RL, whose reader raises the error.
    found += [
        one for one in _FORMATS if one.hdf5 and (one.is_among(names) if names else names == [] and one.name == "d4rl")
    ]
    if root.is_dir() and len({one.name for one in found}) > 1:
        # With two formats at one path, reading only the first would leave out the data of the other.
        raise ConfigError(
            f"{root}: expected data of one format, found signs of several: "
            + "; ".join(f"{one.name}: {one.sign}" for one in found)
            + "; choose a format with format= (--format), or move the other files to another folder"
        )
    return found[0] if found else None
