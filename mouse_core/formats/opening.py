"""Opening recorded data without saying what format they are in."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.formats import _recognising as signs
from mouse_core.formats._files.on_disk import is_there
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged
from mouse_core.formats.ids import ID_SCHEMES, is_id, located
from mouse_core.images.files import check_roots
from mouse_core.remote.clients import is_url, open_client, public_url
from mouse_core.spec import Alignment, check_alignment
from mouse_core.store.disk.manifest import NAME, looks_like_store


@dataclass(frozen=True)
class _Format:
    """A format that can be recognised: ``name`` is read by ``read_<name>`` of ``mouse_core.formats.<name>``.

    Args:
        name: For ``format=``.
        sign: What is looked for, in words.
        is_there: Whether it is found at a path; of HDF5 files, among the names in it.
        hdf5: Whether it is recognised by the names in an HDF5 file.
        layout: What ``read_layouts`` reads it by, where it is no format with a reader of its own.
    """

    name: str
    sign: str
    is_there: Callable[[Any], bool]
    hdf5: bool = False
    layout: Any = None


def _of_layout(name: str, sign: str) -> _Format:
    return _Format(name, sign, lambda _: False, layout=name)  # by signs.layout_of, for all of them at once


# In the order in which they are tried: what has a sign of its own comes before what only has a suffix.
_FORMATS = (
    _Format("store", "manifest.json of a store that DatasetStore.open made", looks_like_store),
    _Format("lerobot", "meta/info.json with a codebase_version", signs.is_lerobot),
    _Format("minari", "main_data.hdf5, or metadata.json of Minari, below data/", signs.is_minari),
    _Format("tfds", "features.json and dataset_info.json of TFDS (RLDS)", signs.is_tfds),
    _Format("ted", "meta.json of a memory-mapped TensorDict", signs.is_memmap),
    _Format("dopamine", "files $store$_action_ckpt.N.gz", signs.is_dopamine),
    _Format("roboset", "a folder of HDF5 files with groups TrialN", signs.is_roboset, layout="roboset"),
    _Format("topics", "MCAP files, or bags of ROS 2 (metadata.yaml, db3 files)", signs.is_recording),
    _Format("dreamerv3", "npz files TIME-ID-FOLLOWING-LENGTH, pieces of DreamerV3's replay", signs.is_dreamerv3),
    _Format("rllib", "JSON lines of RLlib, each a SampleBatch or MultiAgentBatch", signs.is_rllib),
    _Format("gen_dgrl", "episodes DATE_NUMBER_LENGTH_SEED_RETURN.npz or .npy, also in a tar", signs.is_gen_dgrl),
    _Format("openml", "an ARFF file, or a folder with description.xml and a dataset", signs.is_openml),
    _Format("rows", "Arrow or Parquet files, or a folder of save_to_disk", is_there),
    _Format("roboset", "an HDF5 file with groups TrialN", signs.is_roboset_file, hdf5=True, layout="roboset"),
    _Format("minari", "an HDF5 file with groups episode_N", signs.is_minari_file, hdf5=True),
    _of_layout("robomimic", "an HDF5 file with data/demo_N, or a folder of such"),
    _of_layout("maniskill", "an HDF5 file with traj_N/actions, or a folder of such"),
    _of_layout("diffusion_policy", "a zarr group with meta/episode_ends and data"),
    _of_layout("drqv2", "npz files with observation, action, reward and discount"),
    _of_layout("dreamer", "npz files with image, action, reward and discount or is_terminal"),
    _of_layout("tianshou", "an HDF5 file with _meta/obs and _meta/act"),
    _of_layout("d3rlpy", "an HDF5 file with columns, num_episodes and observations_0"),
    _of_layout("aloha", "a folder of HDF5 files with action and observations/qpos, or one of them"),
    _Format("ted", "an HDF5 file with 'next', or with groups traj_N", signs.is_ted_file, hdf5=True),
    _Format("d4rl", "an HDF5 file with observations and actions", signs.is_d4rl, hdf5=True, layout="d4rl"),
    _Format("ogbench", "an npz file with observations and actions", signs.is_ogbench, layout="ogbench"),
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
    """Open recorded data of any format that this library reads.

    Args:
        path: A file or folder; an address, as ``DatasetStore.open`` takes it; or the id of a dataset in other
            libraries, a text that begins with one of ``formats.ID_SCHEMES`` (``"minari:D4RL/door/human-v2"``): it is
            opened in that library's cache, and downloaded by that library where it is not there.
        format: The format's name, for what is not recognised: "dopamine", "dreamerv3", "gen_dgrl", "lerobot",
            "minari", "openml", "rllib", "rows" (datasets on disk, Arrow, Parquet), "store"
            (``DatasetStore.open``), "ted" or "tfds"; one of ``layouts.LAYOUTS`` ("aloha", "d3rlpy", "d4rl",
            "diffusion_policy", "dreamer", "drqv2", "maniskill", "ogbench", "robomimic", "roboset", "tianshou"); or a
            ``layouts.TreeLayout``, of recordings of robots (MCAP, bags of ROS 2) a ``topics.TopicLayout``, its
            arguments as a mapping, or a YAML file of these.
        final: "drop" or "mark", for formats that lack the observation that an episode ends in.
        splits: Names of the splits to read, where the format has some.
        alignment: Which transition a row's action, reward and done belong to, for rows that do not say it: "arrived" or
            "outgoing". They say it from then on.
        batch_rows: How many rows a batch has, at most.
        image_roots: Folders in which images may lie that rows name by path, beside those that the data lie in.
        **options: Passed on to the format's reader.

    Returns:
        The rows as a stream.

    Raises:
        ConfigError: Nothing there, a format that is not known or not recognised (the message says what was looked
            for), or an option that the reader does not take. An id whose dataset is not there and was not
            downloaded, or that is the name of a file or folder, too.
        ImportError: A library that would download, or read, is not installed.
        DataError: The data are damaged.
        SchemaError: Another alignment than the data say, or than a format has.
    """
    roots = check_roots(image_roots, where="image_roots (--image-root)")
    if alignment is not None:
        check_alignment(alignment)
    if format is not None and (not isinstance(format, str) or format.endswith((".yaml", ".yml"))):
        root = place(path, None)[0]
        module = "topics" if isinstance(root, Path) and signs.is_recording(root) else "layouts"
        found = _Format(module, "a layout", bool, layout=format)
    else:
        root, format = place(path, format)
        found = _format_at(root, format, options)
    module = found.name if found.layout is None or found.name == "topics" else "layouts"
    options |= {} if found.layout is None else {"layout": found.layout}
    reader = getattr(importlib.import_module(f"mouse_core.formats.{module}"), f"read_{module}")
    takes = inspect.signature(reader).parameters
    if splits is not None and "splits" not in takes:
        raise ConfigError(f"{root}: splits: {found.name} data have none, found {list(splits)}")
    options |= {"splits": splits} if splits is not None else {}
    options |= {"final": final} if final is not None and "final" in takes else {}
    for option, of in (
        ("skip_broken", "a LeRobotDataset"),
        ("tolerance", "a LeRobotDataset"),
        ("last_step", "RLDS, as TFDS keeps it"),
    ):
        if option in options and option not in takes:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{root}: {option} ({flag}): expected {of}, found {found.name} data")
    try:
        opened: RowStream = reader(root, batch_rows=batch_rows, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(f"{root}: {error}") from error
    if roots:
        opened = opened.replace(image_roots=roots)
    if opened.rows is not None:
        kept = {name: getattr(opened, name) for name in ("mapped", "opened", "mended", "noted")}
        opened = opened.replace(batches=partial(_all_rows, opened), **kept)
    return opened if alignment is None else _with_alignment(opened, alignment, root, found)


def place(path: str | os.PathLike[str], name: str | None) -> tuple[Any, str | None]:
    """Where data lie that are asked for by path, address or id, and the name of their format as far as it is known."""
    if not is_id(path):
        return (path if is_url(path) else Path(path)), name
    here = located(str(path))
    if name not in (None, here.format) and here.format is not None:
        raise ConfigError(f"{path}: format: expected {here.format!r}, as the id says, found {name!r}")
    return here.folder, here.format or name


def _format_at(root: Any, name: str | None, options: Mapping[str, Any]) -> _Format:
    """The format of that name, or the one that is recognised."""
    if is_url(root):
        return _format_elsewhere(root, name, options)
    if not root.exists():
        scheme = re.match(r"([a-z]\w+):(?!//)", str(root))
        ids = f"; ids of datasets begin with one of {list(ID_SCHEMES)} and a colon" if scheme else ""
        raise ConfigError(f"{root}: expected a file or folder, found none{ids}")
    if not root.is_file() and not root.is_dir():  # a pipe would be waited for
        raise ConfigError(f"{root}: expected a regular file or a folder, found neither")
    names = {one.name: one for one in reversed(_FORMATS)}
    if name is not None and name not in names:
        raise ConfigError(f"format: expected one of {sorted(names)}, found {name!r}")
    found = names[name] if name is not None else _recognised(root)
    if found is None and root.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{root}: expected recorded data, found a pickle, which is a program and is not run here; where you trust "
            "it, load it with the library that wrote it and save its arrays with numpy.savez: the guide on formats has "
            "five lines for buffers of Stable-Baselines3"
        )
    if found is None:
        raise ConfigError(
            f"{root}: no format recognised in {signs.contents(root)}; looked for "
            + "; ".join(f"{one.name}: {one.sign}" for one in _FORMATS)
        )
    return found


def _format_elsewhere(url: str, name: str | None, options: Mapping[str, Any]) -> _Format:
    """That of what is elsewhere: a LeRobotDataset, or what a store is opened of."""
    known = {one.name: one for one in _FORMATS if one.name in ("store", "lerobot", "rows")}
    if name is not None:
        if name not in known:
            raise ConfigError(f"{public_url(url)}: format: expected one of {sorted(known)} elsewhere, found {name!r}")
        return known["lerobot" if name == "lerobot" else "store"]
    client = open_client(url, options.get("storage_options"))
    is_lerobot = not url.endswith(".parquet") and not client.exists(NAME) and client.exists("meta/info.json")
    return known["lerobot" if is_lerobot else "store"]


def _with_alignment(opened: RowStream, alignment: Alignment, root: Path, found: _Format) -> RowStream:
    stated = opened.about.alignment
    if stated not in (None, alignment):
        who = "the data say" if found.name in ("rows", "store") else f"the {found.name} reader lays rows out"
        raise SchemaError(f"{root}: alignment: expected {stated!r}, as {who}, found {alignment!r}")
    return opened.replace(alignment=alignment)


def _all_rows(stream: RowStream) -> Iterator[pa.RecordBatch]:
    """The batches; that they are fewer rows, or more, than the data say of themselves is an error."""
    found = 0
    for batch in stream:
        found += batch.num_rows
        yield batch
    if found != stream.rows:
        raise damaged(stream.path, f"expected {stream.rows} rows as the data say of themselves, found {found}")


def _recognised(root: Path) -> _Format | None:
    names, beside = signs.hdf5_names(root), signs.names_of_arrays(root)
    layout = signs.layout_of(names or beside)
    found = [one for one in _FORMATS if not one.hdf5 and one.is_there(root)]
    found += [one for one in _FORMATS if one.hdf5 and names is not None and one.is_there(names)]
    found = [one for one in _FORMATS if layout is not None and one.layout == layout] + found
    if root.is_dir() and len({one.name for one in found}) > 1:
        # Taking the first would leave out what the others would have read.
        raise ConfigError(
            f"{root}: expected data of one format, found signs of several: "
            + "; ".join(f"{one.name}: {one.sign}" for one in found)
            + "; say which one is meant with format (--format), or move the others elsewhere"
        )
    return found[0] if found else None
