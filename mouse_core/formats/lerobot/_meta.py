"""The metadata of a LeRobotDataset, from its folder ``meta``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import is_whole
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import damaged, json_object, read_bytes, read_json_object, reading
from mouse_core.formats._files.parquet import parquet_batches
from mouse_core.formats._files.video import frame_shape

Int64s = npt.NDArray[np.int64]

_INDICES = ("episode_index", "length", "data/chunk_index", "data/file_index")
_MOST = 2**48
# A line for each episode.
_MOST_LINES = 256 << 20
_KILLED = "; of a recording that was killed, skip_broken=True (--skip-broken) reads the episodes that are whole"


@dataclass(frozen=True)
class Feature:
    """A feature of the dataset.

    Args:
        key: Name of the feature in LeRobot.
        dtype: "float32", "video", "image", "string", "language" and so on.
        shape: Shape of a value; of pictures ``(H, W, C)``.
        wide: Whether pictures have 16 bits a pixel: depth, or greys of more than 8 bits.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    wide: bool = False


class FrameFile(NamedTuple):
    """A file of frames.

    Args:
        name: Path of the file, below the dataset's folder.
        first, stop: Position of its first episode among all episodes, and of the one behind its last.
        rows: The frames in the file, by their numbers among all frames.
    """

    name: str
    first: int
    stop: int
    rows: range


@dataclass(frozen=True, eq=False)
class Episodes:
    """The episodes, ordered by their numbers.

    Args:
        index: Number of each episode, int64 ``[n]``.
        lengths: Number of frames of each, int64 ``[n]``.
        files: The files of frames, in the order of episodes.
        videos: For each camera and episode the path of the video, below the dataset's folder, and the time in seconds
            at which the episode begins there.
    """

    index: Int64s
    lengths: Int64s
    files: Sequence[FrameFile]
    videos: Mapping[str, Sequence[tuple[str, float]]]

    @memo
    def ends(self) -> Int64s:
        """Number of frames up to the end of each episode, int64 ``[n]``."""
        return np.cumsum(self.lengths)

    def places(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Return the episode position of each frame, and the frame's number in that episode.

        For episodes of 2 and 3 frames, frames 1 2 3 are in the episodes 0 1 1, with the numbers 1 0 1.
        """
        episode = np.searchsorted(self.ends, rows, side="right")
        return episode, rows - (self.ends - self.lengths)[episode]

    def called(self, rows: Int64s, row: int) -> str:
        """Return the name of frame ``rows[row]`` for error messages."""
        (place,), (number,) = self.places(rows[row : row + 1])
        return f"frame {number} of episode {self.index[place]}"


@dataclass(frozen=True)
class Description:
    """The metadata of a dataset.

    Args:
        features: The features by key.
        frames_per_second: Rate of the recording.
        episodes: The episodes.
        tasks: Texts of tasks by number.
        stats: Content of ``meta/stats.json``.
        info: Content of ``meta/info.json``.
        lost: A sentence for each part of the metadata that could not be read.
    """

    features: Mapping[str, Feature]
    frames_per_second: float
    episodes: Episodes
    tasks: Mapping[int, str]
    stats: Mapping[str, Any]
    info: Mapping[str, Any]
    lost: tuple[str, ...] = ()


def read_description(root: Path, *, skip_broken: bool = False) -> Description:
    """Read and check the metadata.

    Args:
        root: The dataset's folder.
        skip_broken: Whether episodes that ``meta`` does not list, or in files that cannot be read, are left out.

    Raises:
        ConfigError: The folder holds no dataset, or one of another version of the format.
        DataError: The metadata are damaged; the message names the file.
    """
    file = root / "meta" / "info.json"
    if not file.is_file():
        raise ConfigError(f"{root}: expected meta/info.json of a LeRobotDataset, found none")
    info = read_json_object(file)
    version = str(info.get("codebase_version"))
    if not re.fullmatch(r"v(2\.[01]|3\.\d+)", version):
        raise ConfigError(
            f"{file}: expected codebase_version v3.0, v2.1 or v2.0, found {version!r:.40}; LeRobot converts older "
            "datasets to these"
        )
    is_old = version.startswith("v2")
    rate = _rate(info.get("fps"), file)
    described = info.get("features")
    if not isinstance(described, Mapping) or not described:
        raise damaged(file, f"expected features by name, found {described!r:.40}")
    features = {key: _feature(key, entry, file) for key, entry in described.items()}
    cameras = [key for key, feature in features.items() if feature.dtype == "video"]
    lost: list[str] = []
    failed = lost if skip_broken else None
    episodes = _listed_episodes(root, cameras, info) if is_old else _episodes(root, cameras, failed)
    for name, found in (("total_episodes", len(episodes.index)), ("total_frames", int(episodes.lengths.sum()))):
        if info.get(name, found) != found:
            why = f"expected {name} of {found}, as in meta/episodes, found {info[name]!r:.40}"
            if not skip_broken:
                raise damaged(file, f"{why}{_KILLED}")
            lost.append(f"{file}: {why}: what is not listed is left out")
    stats = root / "meta" / "stats.json"
    tasks = _listed_tasks(root) if is_old else _tasks(root)
    return Description(
        features, rate, episodes, tasks, read_json_object(stats) if stats.is_file() else {}, info, tuple(lost)
    )


def check_action(described: Description, where: str) -> None:
    """Raise SchemaError where no feature is an action."""
    if not any(map(is_action, described.features)):
        raise SchemaError(f"{where}: expected a feature 'action', found {list(described.features)}")


def bytes_a_frame(described: Description, pictures: Container[str] | None = None) -> int:
    """Return the bytes of a frame in memory, with all pictures, or those of some features."""
    total = 0
    for key, feature in described.features.items():
        picture = feature.dtype in ("video", "image")
        if not picture or pictures is None or key in pictures:
            total += math.prod(feature.shape) * (1 if picture else 8)
    return total


def dimensions(described: Description) -> dict[str, list[str]]:
    """Return the dataset's names for the dimensions of columns, by column."""
    found = {}
    for key, feature in described.features.items():
        names = described.info["features"][key].get("names")
        if isinstance(names, Mapping) and len(names) == 1:  # {"motors": ["shoulder", "elbow"]}
            (names,) = names.values()
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not listed or len(names) != math.prod(feature.shape) or key.startswith("next."):
            continue
        found[column_of(key)] = [*names]
    return found


def is_action(key: str) -> bool:
    """Whether a feature is an action or a part of one."""
    return key == "action" or key.startswith("action.")


def column_of(key: str) -> str:
    """Return the column of a feature; of pictures, ``Frames.picture_column`` does."""
    if key == "observation.state":
        return "observation"
    column = key.replace(".", "_")
    return column if key.startswith("observation") or is_action(key) else f"metadata_{column}"


def feature_of(column: str) -> str:
    """Return the feature of a column whose feature the rows do not name."""
    if column == "observation":
        return "observation.state"
    for prefix in ("observation_images_", "observation_", "action_", "metadata_next_"):
        if column.startswith(prefix):
            return prefix.removeprefix("metadata_").replace("_", ".") + column.removeprefix(prefix)
    return {"reward": "next.reward", "done": "next.done"}.get(column, column.removeprefix("metadata_"))


def _feature(key: object, entry: object, file: Path) -> Feature:
    if not isinstance(key, str) or not key or os.path.basename(key) != key or key in (".", ".."):
        raise damaged(file, f"expected the name of a feature, found {key!r:.80}")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("dtype"), str):
        raise damaged(file, f"feature {key!r}: expected a dtype, found {entry!r:.80}")
    shape = entry.get("shape")
    if entry["dtype"] in ("video", "image"):
        found = frame_shape(shape, entry.get("names"), f"{file}: feature {key!r}")
        return Feature(key, entry["dtype"], found, wide=_is_wide(entry, found))
    if entry["dtype"] == "language":
        return Feature(key, entry["dtype"], ())
    if not isinstance(shape, list) or not all(isinstance(size, int) and 0 <= size < 2**31 for size in shape):
        raise damaged(file, f"feature {key!r}: expected a shape, found {shape!r:.80}")
    return Feature(key, entry["dtype"], tuple(shape))


def _is_wide(entry: Mapping[str, Any], shape: tuple[int, int, int]) -> bool:
    """Whether a camera's metadata say that a pixel has more than 8 bits."""
    said = {**entry}
    for name in ("info", "video_info"):
        said |= entry[name] if isinstance(entry.get(name), Mapping) else {}
    said = {str(name).removeprefix("video."): value for name, value in said.items()}
    grey = re.match(r"gray(\d+)", str(said.get("pix_fmt", "")))
    deep = int(grey[1]) > 8 if grey else said.get("is_depth_map") is True
    return deep and shape[2] == 1


def _rate(fps: Any, file: Path) -> float:
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise damaged(file, f"expected fps as a positive number, found {fps!r:.40}")
    return float(fps)


def _columns_of_episodes(folder: Path, wanted: Sequence[str], failed: list[str] | None) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    for file in numbered(folder, ".parquet"):
        try:
            batches = parquet_batches(file, 1 << 14, columns=wanted)
            found = [{name: _numbers(batch, name, file) for name in wanted} for batch in batches]
        except DataError as error:
            if failed is None:
                raise DataError(f"{error}{_KILLED}") from error
            failed.append(f"episodes are left out: {error}")
            continue
        for some in found:
            for name in wanted:
                columns[name] += some[name]
    if not columns["episode_index"]:
        raise damaged(folder, "expected Parquet files with episodes, found none")
    return columns


def _episodes(root: Path, cameras: Sequence[str], failed: list[str] | None) -> Episodes:
    folder, places = root / "meta" / "episodes", ("chunk_index", "file_index", "from_timestamp")
    wanted = [*_INDICES, *(f"videos/{camera}/{name}" for camera in cameras for name in places)]
    columns = _columns_of_episodes(folder, wanted, failed)
    found = zip(*(columns[name] for name in _INDICES[2:]), strict=True)
    data = [_file("data", chunk, file, "parquet") for chunk, file in found]
    videos = {}
    for camera in cameras:
        found = zip(*(columns[f"videos/{camera}/{name}"] for name in places), strict=True)
        videos[camera] = [(_file(f"videos/{camera}", chunk, file, "mp4"), begin) for chunk, file, begin in found]
    return _ordered(folder, columns["episode_index"], columns["length"], data, videos)


def _ordered(
    where: Path,
    index: Sequence[int],
    lengths: Sequence[int],
    data: Sequence[str],
    videos: Mapping[str, Sequence[tuple[str, float]]],
) -> Episodes:
    """Return episodes in the order of their numbers.

    Args:
        where: Name of the metadata for messages.
        index, lengths: Number of each episode, and of its frames.
        data: The file with the frames of each.
        videos: See ``Episodes``.
    """
    order = np.argsort(np.array(index), kind="stable")
    numbers, counts = np.array(index, np.int64)[order], np.array(lengths, np.int64)[order]
    if (numbers[1:] == numbers[:-1]).any():
        raise damaged(where, "expected every episode once, found one twice")
    there, ends = np.flatnonzero(counts), np.cumsum(counts)
    names = [data[place] for place in order[there].tolist()]
    cuts = [place for place in range(len(names)) if not place or names[place] != names[place - 1]]
    if len({names[cut] for cut in cuts}) < len(cuts):
        raise damaged(where, "expected files of episodes that follow each other, found others")
    firsts = there[cuts].tolist()
    stops = [*firsts[1:], len(counts)]
    files = [
        FrameFile(names[cut], first, stop, range(int(ends[first] - counts[first]), int(ends[stop - 1])))
        for cut, first, stop in zip(cuts, firsts, stops, strict=True)
    ]
    ordered = {camera: [places[place] for place in order.tolist()] for camera, places in videos.items()}
    return Episodes(numbers, counts, files, ordered)


def _file(folder: str, chunk: int, file: int, suffix: str) -> str:
    return f"{folder}/chunk-{chunk:03d}/file-{file:03d}.{suffix}"


def _listed_episodes(root: Path, cameras: Sequence[str], info: Mapping[str, Any]) -> Episodes:
    """Return the episodes of version 2, each of which has files of its own."""
    file = root / "meta" / "episodes.jsonl"
    size = info.get("chunks_size", 1000)
    if not is_whole(size) or size < 1:
        raise damaged(root / "meta" / "info.json", f"expected chunks_size from 1 on, found {size!r:.40}")
    entries = _lines(file, ("episode_index", "length"))
    if not entries:
        raise damaged(file, "expected episodes, found none")
    index = [entry["episode_index"] for entry in entries]
    names = [(f"chunk-{number // size:03d}", f"episode_{number:06d}") for number in index]
    return _ordered(
        file,
        index,
        [entry["length"] for entry in entries],
        [f"data/{chunk}/{name}.parquet" for chunk, name in names],
        {camera: [(f"videos/{chunk}/{camera}/{name}.mp4", 0.0) for chunk, name in names] for camera in cameras},
    )


def _lines(file: Path, numbers: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the lines of a file; the entries ``numbers`` of each are whole numbers from 0 on."""
    entries = []
    for place, line in enumerate(read_bytes(file, most_bytes=_MOST_LINES).splitlines()):
        if line.strip():
            entry = json_object(file, line)
            for name in numbers:
                if not is_whole(entry.get(name)) or not 0 <= entry[name] < _MOST:
                    raise damaged(
                        file, f"expected {name} from 0 on, found {entry.get(name)!r:.40}", at=f"line {place + 1}"
                    )
            entries.append(entry)
    return entries


def _numbers(batch: pa.RecordBatch, name: str, file: Path) -> list[Any]:
    if name not in batch.schema.names:
        raise damaged(file, f"expected a column {name!r}, found {batch.schema.names[:20]}")
    column = batch.column(name)
    whole = pa.types.is_integer(column.type)
    if column.null_count or not (whole or (name.endswith("timestamp") and pa.types.is_floating(column.type))):
        raise damaged(file, f"{name}: expected numbers, found {column.type} with {column.null_count} nulls")
    values: list[Any] = column.to_pylist()
    if any(not 0 <= value < _MOST for value in values):
        raise damaged(file, f"{name}: expected numbers from 0 on, found {min(values)} to {max(values)}")
    return values


def _tasks(root: Path) -> dict[int, str]:
    file = root / "meta" / "tasks.parquet"
    tasks: dict[int, str] = {}
    if not file.is_file():
        return tasks
    for batch in parquet_batches(file, 1 << 14):
        texts = [field.name for field in batch.schema if field.type in (pa.string(), pa.large_string())]
        if not texts:
            raise damaged(file, f"expected tasks as texts, found columns {batch.schema.names}")
        numbers = _numbers(batch, "task_index", file)
        tasks |= dict(zip(numbers, batch.column(texts[0]).to_pylist(), strict=True))
    return tasks


def _listed_tasks(root: Path) -> dict[int, str]:
    """Return the tasks of version 2."""
    file = root / "meta" / "tasks.jsonl"
    entries = _lines(file, ("task_index",)) if file.is_file() else []
    return {entry["task_index"]: str(entry.get("task", "")) for entry in entries}


def numbered(folder: Path, suffix: str) -> list[Path]:
    """Return the files ``chunk-NNN/file-NNN`` in a folder, in the order of their numbers."""
    found = {}
    with reading(folder):
        for file in folder.glob(f"chunk-*/file-*{suffix}"):
            match = re.fullmatch(r"chunk-(\d+)/file-(\d+)", file.relative_to(folder).with_suffix("").as_posix())
            if match:
                found[int(match[1]), int(match[2]), file] = file
    return [found[key] for key in sorted(found)]
