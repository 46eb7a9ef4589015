"""Writes LeRobotDatasets of version 3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core._base.progress import progress_bar
from mouse_core._base.threads import THREADS
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import check_nothing_at, making
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats.base import BATCH_ROWS, RowDigest, RowStream, as_stream, embedded, overlapping_pieces
from mouse_core.formats.columns import MISSING, check_size, to_arrow
from mouse_core.formats.converting import Conversion
from mouse_core.formats.lerobot.reading import feature_of, is_action
from mouse_core.formats.pictures import (
    PictureEncoding,
    Pictures,
    by_column,
    changed_stream,
    image_column,
    pictures_of,
)
from mouse_core.formats.rows import parquet_batches
from mouse_core.metadata import DatasetMetadata
from mouse_core.statistics.counting import Moments
from mouse_core.video.index import SUFFIX, index_video
from mouse_core.video.writing import VideoWriter

Stats = dict[str, npt.NDArray[Any]]

_SHARES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
# Of images with a side of 300 or more pixels, only every k-th pixel is used, so that a side has about 150 pixels.
_LARGE, _KEPT = 300, 150


class EpisodeStats:
    """Computes statistics of an episode.

    All numbers of the episode stay in memory. For images, only the number of occurrences of each pixel value stays in
    memory.

    Args:
        pictures: The features that are images.
    """

    def __init__(self, pictures: Iterable[str]) -> None:
        self._pictures = set(pictures)
        self._held: dict[str, list[npt.NDArray[Any]]] = {}
        self._pixels: dict[str, npt.NDArray[np.int64]] = {}
        self._frames = 0

    def add(self, frames: Columns) -> None:
        """Add frames, ``[n, ...]`` by feature; texts are ignored."""
        for key, values in frames.items():
            if key in self._pictures:
                self._pixels[key] = self._pixels.get(key, 0) + _counted(values)
            elif values.dtype.kind in "biuf":
                self._held.setdefault(key, []).append(values)
        self._frames += len(next(iter(frames.values())))

    def result(self) -> dict[str, Stats]:
        """Return min, max, mean, std, count and quantiles by feature.

        The statistics of images have the shape ``[C, 1, 1]``, for pixels scaled to 0..1.
        """
        found = {key: _of_numbers(np.concatenate(parts)) for key, parts in self._held.items()}
        for key, counts in self._pixels.items():
            found[key] = _of_pixels(counts, self._frames)
        return found


def _of_numbers(values: npt.NDArray[Any]) -> Stats:
    numbers = values.astype(np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    kept = values if values.dtype.kind != "b" else values.astype(np.int64)
    low, high = kept.min(axis=0), kept.max(axis=0)
    found = {
        "min": low.reshape(numbers.shape[1:]),
        "max": high.reshape(numbers.shape[1:]),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
    }
    quantiles = np.quantile(numbers, list(_SHARES.values()), axis=0)
    return found | dict(zip(_SHARES, quantiles, strict=True))


def _counted(pixels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return how often each value occurs in each channel, ``[C, values]``."""
    step = max(pixels.shape[1:3])
    step = 1 if step < _LARGE else step // _KEPT
    small, values = pixels[:, ::step, ::step], int(np.iinfo(pixels.dtype).max) + 1
    channels = (np.bincount(small[..., k].ravel(), minlength=values) for k in range(pixels.shape[3]))
    return np.stack(list(channels))


def _of_pixels(counts: npt.NDArray[np.int64], frames: int) -> Stats:
    moments, ends = Moments(len(counts)), np.cumsum(counts, axis=1)
    moments.add_counts(counts)
    found = {"min": moments.low, "max": moments.high, "mean": moments.mean, "std": moments.deviation}
    for name, share in _SHARES.items():
        found[name] = np.array([np.searchsorted(end, share * (end[-1] - 1), side="right") for end in ends])
    scale = 255.0 if counts.shape[1] == 256 else 1.0
    return {name: one[:, None, None] / scale for name, one in found.items()} | {"count": np.array([frames])}


def aggregated(episodes: Iterable[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Combine the statistics of all episodes.

    Quantiles are averaged over episodes, as in LeRobot. All other statistics are exact.
    """
    total: dict[str, Stats] = {}
    for episode in episodes:
        for key, new in episode.items():
            total[key] = new if key not in total else _together(total[key], new)
    return total


def _together(one: Stats, other: Stats) -> Stats:
    count = one["count"] + other["count"]
    share = other["count"] / count
    change = other["mean"] - one["mean"]
    squares = one["std"] ** 2 * (1 - share) + other["std"] ** 2 * share + change**2 * share * (1 - share)
    found = {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + change * share,
        "std": np.sqrt(squares),
        "count": count,
    }
    return found | {name: one[name] + (other[name] - one[name]) * share for name in _SHARES}


_RATE = 30.0
_CHUNK = 1000
# LeRobot's columns of episode, frame and time numbers, and the columns of rows with the same numbers.
_NUMBERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_OWN = {f"metadata_{name}" for name in _NUMBERS}


def write_lerobot(
    rows: Any,
    path: str | os.PathLike[str],
    *,
    images: str | Sequence[str] | Mapping[str, str] = "video",
    frames_per_second: float | None = None,
    robot_type: str | None = None,
    task: str | None = None,
    shard_bytes: int | str = "100MB",
    progress: bool = False,
) -> Conversion:
    """Write rows as a LeRobotDataset, version 3, which LeRobot and ``read_lerobot`` open.

    An episode of T transitions has T+1 rows and becomes T frames. A frame is an observation and the action after it,
    with ``next.reward``, ``next.done`` and ``next.truncated`` of the action. LeRobot cannot store an episode's last
    observation, so this observation is left out; ``read_lerobot(final="mark")`` returns zeros in place of this
    observation.

    Columns whose names are LeRobot's feature names keep these names. ``observation`` becomes ``observation.state``,
    ``observation_images_top`` becomes ``observation.images.top``, ``observation_<name>`` becomes
    ``observation.<name>``, ``action_<name>`` becomes ``action.<name>``, and ``metadata_<name>`` becomes ``<name>``.
    Frames and episodes are numbered from 0. Texts of tasks and names of dimensions come from the metadata. Statistics
    of each episode and of all episodes are computed as in LeRobot, but from all images; LeRobot uses a sample of the
    images.

    The files are written to a temporary folder. When all frames were read back and compared, this folder is renamed to
    ``path``.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset`` or a ``pyarrow.Table``, of alignment
            "arrived".
        path: The dataset's folder; nothing may exist there.
        images: Encoding of images, for all columns of images or by column: "png", "jpeg:95", or "video:h264:gop=2" with
            options of ``mouse_core.video.VideoCodec``. Only "png" and
            ``lossless`` videos keep every pixel.
        frames_per_second: Rate of the recording; by default the rate in the metadata of the rows, or 30 if the metadata
            have no rate.
        robot_type: Name of the robot; by default the robot in the metadata.
        task: Text of the task for rows without a task; by default the name of their environment.
        shard_bytes: Approximate largest size of a file of frames; videos can be twice as large.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: ``path`` exists, another process is writing it, or an option is invalid.
        StorageError: Files cannot be written; partial files are removed.
        SchemaError: The rows have the alignment "outgoing".
        DataError: A value is null, a row before the end of an episode is marked as missing, or only some rows have a
            column.
        ImportError: Images become videos, and PyAV is not installed.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder to write")
    check_nothing_at(target, "write_lerobot")
    most = check_size("shard_bytes (--max-shard-size)", shard_bytes)
    stream = embedded(as_stream(rows))
    metadata = stream.metadata
    if frames_per_second is None and len(metadata.frames_per_second) > 1:
        raise ConfigError(
            "frames_per_second (--fps): expected rows with the same rate, found the rates "
            f"{[*metadata.frames_per_second]} per second; pass one of these rates, or write the rows of each rate "
            "separately"
        )
    rate = float(next(iter(metadata.frames_per_second), _RATE) if frames_per_second is None else frames_per_second)
    if not 0 < rate < 1e4:
        raise ConfigError(f"frames_per_second (--fps): expected a positive number, found {rate!r:.40}")
    stream, cameras = _with_pixels(stream, images)
    task = task or next(iter(metadata.environments), "task")
    robots = metadata.robots if robot_type is None else (robot_type,)
    with making(target, "write_lerobot") as folder, _Writer(folder, metadata, cameras, rate, task, most) as writer:
        with progress_bar("writing", total=stream.rows, unit="rows", enabled=progress) as advance:
            writer.write(stream.watched(lambda batch: advance(batch.num_rows)))
        if not writer.episodes:
            raise DataError("write_lerobot: expected episodes of at least two rows, found none")
        writer.write_meta(robots[0] if len(robots) == 1 else None)
        digest = writer.checked()
    said = [f"{key}: {kept.shown()}" for key, (_, _, kept) in cameras.items()]
    if writer.left:
        said.append(f"{writer.left} episodes of one row are left out, as they have no transition")
    if len(robots) > 1:
        said.append(f"robot_type is left out: expected one robot, found {', '.join(robots)}")
    if frames_per_second is None and not metadata.frames_per_second:
        said.append(f"{rate:g} frames a second are assumed, as the source does not say how many there were")
    return Conversion(str(target), writer.frames, digest, 0, writer.count, tuple(said))


def _with_pixels(stream: RowStream, images: Any) -> tuple[RowStream, dict[str, tuple[str, Pictures, PictureEncoding]]]:
    """Return two values: the rows, with images as pixels; and a dict from the feature of each camera to its column,
    image shape, dtype and encoding.
    """
    wanted = by_column(images)
    raw = [name for name, kept in wanted.items() if kept.way == "raw"]
    if raw:
        raise ConfigError("images: expected videos, png or jpeg, the image formats of LeRobot, found 'raw'")
    # Frames of videos are decoded as well, because LeRobot stores the frames of an episode in sequence.
    try:
        found = pictures_of(stream, wanted)
    except ConfigError:
        if images != "video":
            raise
        found = {}
    pixels = {name: (picture, PictureEncoding("raw")) for name, (picture, _) in found.items()}
    cameras = {_key(name, picture=True): (name, picture, kept) for name, (picture, kept) in found.items()}
    return changed_stream(stream.watched(partial(_check_pictures, list(found))), pixels, fill=True), cameras


def _check_pictures(columns: Sequence[str], batch: pa.RecordBatch) -> None:
    """Raise DataError if a row lacks an image, but the row's observation is not marked as missing."""
    marked = batch.column(MISSING).fill_null(0) if MISSING in batch.schema.names else None
    seen = pa.nulls(batch.num_rows).is_null() if marked is None else pc.equal(marked, 0)
    for name in columns:
        lost = pc.and_(batch.column(name).is_null(), seen)
        if pc.any(lost).as_py():
            raise DataError(
                f"column {name!r}: expected an image in every row, found {pc.sum(lost)} rows without an image"
            )


class _Writer:
    """Writes a new dataset, episode by episode; an episode is never split across files.

    Args:
        root: The dataset's folder.
        metadata: The metadata of the rows.
        cameras: See ``_with_pixels``.
        rate: Frames per second.
        task: Text of the task for rows without a task.
        most_bytes: Approximate largest size of a file of frames; a video can be twice as large.
    """

    def __init__(
        self,
        root: Path,
        metadata: DatasetMetadata,
        cameras: Mapping[str, tuple[str, Pictures, PictureEncoding]],
        rate: float,
        task: str,
        most_bytes: int,
    ) -> None:
        self.root, self.metadata, self.cameras, self.rate, self.most_bytes = root, metadata, cameras, rate, most_bytes
        texts = dict(metadata.tasks) or {0: task}
        self.tasks = {number: place for place, number in enumerate(texts)}
        self.texts = list(texts.values())
        self.features: dict[str, dict[str, Any]] = {}
        self.columns: dict[str, str] = {}  # by feature
        self.episodes: list[dict[str, Any]] = []
        self.stats: list[dict[str, Stats]] = []
        self.frames = self.left = 0
        # The open episode: its number of frames, their tasks, and the time at which it begins in each video.
        self._length, self._tasks, self._begins = 0, set[int](), dict[str, int]()
        self._counted = EpisodeStats(cameras)
        self._data: Any = None
        self._sink: Any = None
        self._numbers = {"data": -1, "videos": -1}
        self._videos: dict[str, VideoWriter] = {}
        self._written: dict[str, int] = {}  # frames by video
        self._names: list[str] = []
        self._digest = RowDigest()
        self._schema: Any = None
        self._open = ExitStack()
        self._pool = self._open.enter_context(ThreadPoolExecutor(THREADS))

    @property
    def count(self) -> int:
        """Number of files of frames and of videos."""
        return len(self._names) + len(self._written)

    # ------------------------------------------------------------------ episodes

    def write(self, rows: RowStream) -> None:
        """Write all episodes."""
        begun = False
        for begins, frames in _frames_of(rows):
            if begins and begun:
                self._end_episode()
            begun = True
            if frames:
                numbered = self._numbered(frames)
                self._check_features(numbered)
                self._counted.add(numbered)
                self._write_frames(numbered)
        if begun:
            self._end_episode()
        self._close_data()
        self._close_videos()

    def _end_episode(self) -> None:
        """Record the end of an episode; an episode of a single row has no frame and is left out."""
        length, counted = self._length, self._counted
        self._length, self._counted = 0, EpisodeStats(self.cameras)
        if not length:
            self.left += 1
            return
        episode = {
            "episode_index": len(self.episodes),
            "tasks": [self.texts[number] for number in sorted(self._tasks)],
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + length,
            "length": length,
            **_place("data", self._numbers["data"]),
        }
        for key, begin in self._begins.items():
            episode |= _place(f"videos/{key}", self._numbers["videos"])
            episode[f"videos/{key}/from_timestamp"] = begin / self.rate
            episode[f"videos/{key}/to_timestamp"] = (begin + length) / self.rate
        self.episodes.append(episode)
        self.stats.append(counted.result())
        self.frames += length

    def _numbered(self, frames: Columns) -> Columns:
        """Return frames by feature, and add LeRobot's columns: the index of the episode, the index of the frame, and
        the time.
        """
        done = frames.pop("done")
        count, index = len(done), self._length + np.arange(len(done))
        task = frames.pop("metadata_task_index", np.full(count, next(iter(self.tasks))))
        unknown = [number for number in np.unique(task).tolist() if number not in self.tasks]
        if unknown:
            raise DataError(
                f"write_lerobot: expected rows with the tasks {list(self.tasks)} of the metadata, found {unknown}"
            )
        found, pictures = {}, {column for column, _, _ in self.cameras.values()}
        for name, values in frames.items():
            key = _key(name, picture=name in pictures)
            if name in _OWN:
                continue
            if key in found or key in _NUMBERS:
                raise DataError(
                    f"write_lerobot: column {name!r}: expected a feature name that is not used yet, found {key!r} twice"
                )
            found[key], self.columns[key] = values, name
        found |= {"next.done": done != 0, "next.truncated": done == 2}
        found["next.reward"] = found["next.reward"].astype(np.float32)
        for key, (_, picture, _) in self.cameras.items():
            found[key] = found[key].reshape(count, *picture.shape)
        places = np.array([self.tasks[number] for number in task.reshape(count).tolist()], np.int64)
        return found | {
            "timestamp": (index / self.rate).astype(np.float32),
            "frame_index": index,
            "episode_index": np.full(count, len(self.episodes)),
            "index": self.frames + index,
            "task_index": places,
        }

    def _check_features(self, frames: Columns) -> None:
        """Raise DataError unless frames have the same features as the first frames."""
        found = {key: self._feature(key, values) for key, values in frames.items()}
        if not self.features:
            if not any(map(is_action, found)):
                raise DataError(f"write_lerobot: expected a column 'action', found {list(found)}")
            self.features = found
        if found != self.features:
            differing = sorted(key for key in found.keys() | self.features if found.get(key) != self.features.get(key))
            shown = {key: found[key]["shape"] if key in found else "none" for key in differing}
            raise DataError(
                f"write_lerobot: {differing}: expected the same features in all episodes, found shapes {shown}"
            )

    def _feature(self, key: str, values: npt.NDArray[Any]) -> dict[str, Any]:
        if key in self.cameras:
            _, picture, kept = self.cameras[key]
            kind = "video" if kept.way == "video" else "image"
            return {"dtype": kind, "shape": list(picture.shape), "names": ["height", "width", "channels"]}
        if values.dtype.kind not in "biufOSU" or (values.dtype.kind in "OSU" and values.ndim != 1):
            raise DataError(f"write_lerobot: {key}: expected numbers or texts, found {values.dtype}")
        dtype = "string" if values.dtype.kind in "OSU" else values.dtype.name
        names = self.metadata.dimensions.get(self.columns.get(key, key))
        return {"dtype": dtype, "shape": list(values.shape[1:]) or [1], "names": None if names is None else list(names)}

    # ------------------------------------------------------------------ files of frames and videos

    def _write_frames(self, frames: Columns) -> None:
        """Write frames of the episode, ``[n, ...]`` by feature."""
        if not self._length:
            self._begin_episode()
        columns: dict[str, pa.Array] = {}
        for key, values in frames.items():
            kept = self.cameras[key][2] if key in self.cameras else None
            if kept is None:
                inner = () if values.shape[1:] == (1,) else values.shape[1:]
                columns[key] = to_arrow(values.reshape(len(values), *inner), where=key)
            elif kept.way == "video":
                self._video(key, kept, values).write(values)
            else:
                columns[key] = image_column(list(self._pool.map(kept.encoder(values.dtype), values)))
        batch = pa.RecordBatch.from_pydict(columns)
        if self._data is None:
            path = self._path("data", self._numbers["data"], "parquet")
            self._sink = self._open.enter_context(pa.OSFile(str(path), "wb"))
            self._data = pq.ParquetWriter(self._sink, batch.schema, compression="zstd", write_page_checksum=True)
            self._open.callback(_discard, self._data)
            self._names.append(path.relative_to(self.root).as_posix())
        self._schema = batch.schema
        self._digest.update(batch)
        self._data.write_batch(batch)
        self._tasks |= set(frames["task_index"].tolist())
        self._length += batch.num_rows

    def _begin_episode(self) -> None:
        """Begin an episode; if the open files are large, begin new files."""
        self._tasks = set()
        if self._data is None or self._sink.tell() >= self.most_bytes:
            self._close_data()
            self._numbers["data"] += 1
        if any(video.bytes >= 2 * self.most_bytes for video in self._videos.values()) or self._numbers["videos"] < 0:
            self._close_videos()
            self._numbers["videos"] += 1
        self._begins = {key: video.frames for key, video in self._videos.items()}

    def _video(self, key: str, kept: PictureEncoding, values: npt.NDArray[Any]) -> VideoWriter:
        if key not in self._videos:
            path = self._path(f"videos/{key}", self._numbers["videos"], "mp4")
            assert kept.codec is not None
            shape, dtype = values.shape[1:], values.dtype
            writer = VideoWriter(path, kept.codec, shape, dtype=dtype, frames_per_second=self.rate)
            self._videos[key] = writer
            self._open.callback(writer.discard)
            self._begins[key] = 0
        return self._videos[key]

    def _path(self, folder: str, number: int, suffix: str) -> Path:
        path = self.root / folder / f"chunk-{number // _CHUNK:03d}/file-{number % _CHUNK:03d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _close_data(self) -> None:
        if self._data is not None:
            self._data.close()
            self._sink.close()
        self._data = None

    def _close_videos(self) -> None:
        for video in self._videos.values():
            video.close()
            self._written[video.path] = video.frames
        self._videos = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    # ------------------------------------------------------------------ metadata

    def write_meta(self, robot_type: str | None) -> None:
        """Write the folder ``meta``."""
        self._index_videos()
        rate = int(self.rate) if self.rate == int(self.rate) else self.rate
        videos = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        has_videos = any(feature["dtype"] == "video" for feature in self.features.values())
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": len(self.episodes),
            "total_frames": self.frames,
            "total_tasks": len(self.texts),
            "chunks_size": _CHUNK,
            "data_files_size_in_mb": max(1, self.most_bytes // 10**6),
            "video_files_size_in_mb": max(1, 2 * self.most_bytes // 10**6),
            "fps": rate,
            "splits": {"train": f"0:{len(self.episodes)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": videos if has_videos else None,
            "features": self.features,
        }
        total = aggregated(self.stats)
        stats = {key: {name: one.tolist() for name, one in some.items()} for key, some in total.items()}
        rows = []
        for episode, some in zip(self.episodes, self.stats, strict=True):
            row = {**episode, **_place("meta/episodes", 0)}
            for key, one in some.items():
                row |= {f"stats/{key}/{name}": values.tolist() for name, values in one.items()}
            rows.append(row)
        meta = self.root / "meta"
        episodes = self._path("meta/episodes", 0, "parquet")
        (meta / "info.json").write_text(json.dumps(info, indent=4, ensure_ascii=False), encoding="utf-8")
        (meta / "stats.json").write_text(json.dumps(stats, indent=4), encoding="utf-8")
        pq.write_table(pa.Table.from_pylist(rows), episodes, write_page_checksum=True)
        import pandas  # type: ignore[import-untyped]

        tasks = pa.Table.from_pandas(pandas.DataFrame({"task_index": range(len(self.texts))}, index=self.texts))
        pq.write_table(tasks, meta / "tasks.parquet", write_page_checksum=True)

    def _index_videos(self) -> None:
        """Index every video, and add LeRobot's description of each camera's videos to the camera's feature."""
        for path, frames in self._written.items():
            index = index_video(path)
            if len(index) != frames:
                raise DataError(f"{path}: expected {frames} frames, as were written, found {len(index)}")
            key = Path(path).relative_to(self.root / "videos").parts[0]
            grey = index.pixel_format.startswith("gray")
            self.features[key]["info"] = {
                "video.height": index.height,
                "video.width": index.width,
                "video.codec": index.codec,
                "video.pix_fmt": index.pixel_format,
                "video.is_depth_map": grey and index.pixel_format != "gray",
                "video.fps": int(self.rate) if self.rate == int(self.rate) else self.rate,
                "video.channels": 1 if grey else 3,
                "has_audio": False,
            }

    def checked(self) -> str:
        """Read all frames back, and return their digest.

        Raises:
            DataError: The frames in the files differ from the frames that were written.
        """
        found, wanted = RowDigest(self._schema), self._digest.hexdigest()
        for name in self._names:
            for batch in parquet_batches(self.root / name, BATCH_ROWS, columns=self._schema.names):
                found.update(batch)
        if found.hexdigest() != wanted:
            raise DataError(f"{self.root}: expected frames with the digest {wanted}, found {found.hexdigest()}")
        for path in self.root.rglob(f"*{SUFFIX}"):
            path.unlink()  # readers create their own index
        return wanted


def _place(name: str, number: int) -> dict[str, int]:
    return {f"{name}/chunk_index": number // _CHUNK, f"{name}/file_index": number % _CHUNK}


def _discard(writer: Any) -> None:
    """Close a file, even if the file is incomplete."""
    with suppress(OSError, pa.ArrowException):
        writer.close()


def _frames_of(rows: RowStream) -> Iterator[tuple[bool, Columns]]:
    """Yield frames in pieces; with each piece, yield whether an episode begins with the piece.

    A piece without a complete frame has no columns.

    An episode with observations 0 1 2 and actions a b has the rows (0, -) (1, a) (2, b), and the frames (0, a) (1, b).
    """
    for begins, columns in overlapping_pieces(rows):
        if columns.get(MISSING, np.zeros(1))[:-1].any():
            raise DataError(
                "write_lerobot: expected at most the last observation of an episode to be marked as missing, found "
                "earlier observations that are marked"
            )
        frames = {name: values[1:] if _brought(name) else values[:-1] for name, values in columns.items()}
        frames.pop(MISSING, None)
        yield begins, frames if len(frames["done"]) else {}


def _key(column: str, *, picture: bool = False) -> str:
    """Return the feature name for a column name."""
    key = "observation.image" if picture and column == "observation" else feature_of(column)
    if os.path.basename(key) != key or key in ("", ".", ".."):  # the feature is also the name of a folder of videos
        raise DataError(f"write_lerobot: column {column!r}: expected the name of a feature, found {key!r:.80}")
    return key


def _brought(name: str) -> bool:
    """Whether a column belongs to the transition that led to its row."""
    return name in ("reward", "done", "action") or name.startswith(("action_", "action.", "metadata_next."))
