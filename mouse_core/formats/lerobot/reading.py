"""Reads LeRobotDatasets of version 3: times of video frames, frames, metadata (in the folder ``meta``), episodes and
rows.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import column_type, fixed_shape
from mouse_core._base.checks import check_seconds
from mouse_core._base.memo import memo
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats import columns
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout
from mouse_core.formats.pictures import FRAME, IMAGE, encoded_images, image_column, unreadable_images
from mouse_core.formats.rows import open_parquet, parquet_batches
from mouse_core.images.files import find_video
from mouse_core.metadata import DatasetMetadata
from mouse_core.spec import Field
from mouse_core.video.decoding import undecodable
from mouse_core.video.index import LARGEST_SIDE, VideoIndex, index_video

Floats = npt.NDArray[np.float64]

# Largest distance in seconds between a time and its frame that LeRobot allows.
_TOLERANCE = 1e-4


def allowance(times: Floats, tick: float, frames_per_second: float, tolerance: float | None = None) -> Floats:
    """Return the allowed difference in seconds between the time of a row and the time of its video frame.

    Args:
        times: Times in seconds, with float32 precision.
        tick: Unit of the video's times in seconds. For example, at 30 frames per second, times are rounded with a tick
            of 1/1000 s, and exact with a tick of 1/15360 s.
        frames_per_second: Frames per second of the recording.
        tolerance: The tolerance that the caller chose, in seconds; by default LeRobot's value.
    """
    ticks = 1 / (frames_per_second * tick)
    rounded = tick / 2 if abs(ticks - round(ticks)) > 1e-6 * ticks else 0.0
    allowed = (_TOLERANCE if tolerance is None else tolerance) + rounded + np.abs(times) * 2.0**-23
    # The default is always so small that no neighbouring frame fits.
    return np.minimum(allowed, 0.25 / frames_per_second) if tolerance is None else allowed


def nearest(shown: Floats, times: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the frame that is nearest to each time.

    ``shown`` holds the times of the frames, ascending.
    """
    behind = np.clip(np.searchsorted(shown, times), 1, max(1, len(shown) - 1))
    return np.where(times - shown[behind - 1] <= shown[behind % len(shown)] - times, behind - 1, behind % len(shown))


def frame_shape(shape: object, names: object, where: str) -> tuple[int, int, int]:
    """Return the shape of frames as ``(H, W, C)``, given a shape in any order and the names of its dimensions.

    Raises:
        DataError: The shape is not a shape of images.
    """
    sizes = list(shape) if isinstance(shape, list) else []
    if len(sizes) != 3 or not all(isinstance(size, int) and 0 < size <= LARGEST_SIDE for size in sizes):
        raise DataError(f"{where}: expected a shape [height, width, channels], found {shape!r:.80}")
    first = str(names[0]) if isinstance(names, list) and names else ""
    channels_first = first.startswith("channel") or (sizes[0] in (1, 3) and sizes[2] not in (1, 3))
    height, width, channels = (*sizes[1:], sizes[0]) if channels_first else sizes
    if channels not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels, found {channels}")
    return height, width, channels


# Video number and frame number as one code: (video + 1) * 2**32 + frame. The code 0 means no frame.
_FRAMES = 1 << 32


class Videos:
    """The videos of a dataset, and the video frame of each row.

    The time of a frame in its video is the start time of the episode in the video, plus the row's "timestamp".

    Args:
        root: The dataset's folder.
        described: The metadata.
        cameras: The features with videos.
        decode: Whether to decode all frames. If True, a frame that cannot be decoded counts as missing.
        tolerance: See ``allowance``.
    """

    def __init__(
        self, root: Path, described: Description, cameras: Sequence[str], *, decode: bool, tolerance: float | None
    ) -> None:
        self._root, self._described, self._tolerance, self._decode = root, described, tolerance, decode
        videos = described.episodes.videos
        self._names = sorted({name for key in cameras for name, _ in videos[key]})
        places = {name: place for place, name in enumerate(self._names)}
        # By camera: for each episode the number of its video, and the time at which the episode begins in it.
        self._where = {
            key: (np.array([places[name] for name, _ in videos[key]]), np.array([begin for _, begin in videos[key]]))
            for key in cameras
        }
        # By camera: for each frame of the dataset, the number of its video * _FRAMES + its frame in the video.
        self._found = {key: np.zeros(int(described.episodes.lengths.sum()), np.int64) for key in cameras}
        self._undecodable: dict[int, dict[int, str]] = {}
        self._digests: dict[int, str] = {}
        self._failed: dict[int, Exception] = {}
        self._last: dict[str, tuple[int, VideoIndex, Floats]] = {}
        self._number = np.arange(len(self._names))

    def find(
        self, key: str, rows: Int64s, episode: Int64s, times: Floats
    ) -> Iterator[tuple[int, str, Exception | None]]:
        """Find the video frames of a camera. For each episode with a missing frame, yield three values: the position of
        the episode, the reason, and the error of the video file or None.

        Args:
            key: The camera.
            rows: Index of each row among all frames of the dataset.
            episode: For each row, the position of the row's episode among all episodes.
            times: Time of each row in its episode, in seconds.
        """
        of, begins = (values[episode] for values in self._where[key])
        for video in np.unique(of).tolist():
            mine = np.flatnonzero(of == video)
            try:
                index, shown = self._opened(key, video)
            except (DataError, ConfigError) as error:
                yield from ((place, str(error), error) for place in np.unique(episode[mine]).tolist())
                continue
            self._digests[video] = index.digest
            wanted, rate = begins[mine] + times[mine], self._described.frames_per_second
            found = nearest(shown, wanted)
            self._found[key][rows[mine]] = video * _FRAMES + found
            away = np.abs(shown[found] - wanted)
            lost = np.flatnonzero(away > allowance(wanted, float(index.time_base), rate, self._tolerance))
            # For each episode, the frame with the largest distance in time.
            lost = lost[np.argsort(-away[lost], kind="stable")]
            places, first = np.unique(episode[mine[lost]], return_index=True)
            for place, at in zip(places.tolist(), lost[first].tolist(), strict=True):
                enough = f"{np.ceil(away[at] * 1e4 + 1) / 1e4:g}"
                hint = f"; tolerance={enough} (--tolerance) allows it" if away[at] < 1 / rate else ""
                yield (
                    place,
                    f"{index.path}: expected a frame at {wanted[at]:.4f} s, found the nearest at "
                    f"{shown[found[at]]:.4f} s ({len(shown)} frames){hint}",
                    None,
                )
            if self._decode:
                if video not in self._undecodable:
                    self._undecodable[video] = undecodable(index)
                broken = self._undecodable[video]
                for at in np.flatnonzero(np.isin(found, list(broken))).tolist():
                    yield int(episode[mine[at]]), broken[int(found[at])], None

    def settle(self, skipped: Collection[int]) -> None:
        """Assign an index to each video of the kept episodes; ``files`` lists only these videos."""
        there = self._described.episodes.lengths > 0
        there[list(skipped)] = False
        used = {number for of, _ in self._where.values() for number in np.unique(of[there]).tolist()}
        self._number[sorted(used)] = np.arange(len(used))
        self._used = sorted(used)

    @property
    def files(self) -> list[tuple[str, str]]:
        """Path and digest of each video, as in ``DatasetMetadata.videos``."""
        return [(self._below(self._names[place]), self._digests[place]) for place in self._used]

    def codes(self, key: str, rows: Int64s) -> Int64s:
        """Return the codes of rows whose frames ``find`` has found; ``frames_column`` converts the codes to a
        column.
        """
        video, frame = np.divmod(self._found[key][rows], _FRAMES)
        return np.asarray((self._number[video] + 1) * _FRAMES + frame)

    def _opened(self, key: str, video: int) -> tuple[VideoIndex, Floats]:
        """Open a video; return its index and the times of its frames."""
        if video in self._failed:
            raise self._failed[video]
        last = self._last.get(key)
        if last is None or last[0] != video:
            try:
                path = find_video(self._below(self._names[video]), [os.path.realpath(base_of(self._root))])
                index, shape = index_video(path), self._described.features[key].shape
                if (index.height, index.width) != shape[:2]:
                    found = f"{index.height}x{index.width}"
                    raise damaged(index.path, f"expected frames of {shape[0]}x{shape[1]}, found {found}")
            except (DataError, ConfigError) as error:
                self._failed[video] = error
                raise
            last = self._last[key] = video, index, index.times
        return last[1], last[2]

    def _below(self, name: str) -> str:
        return os.path.relpath(self._root / name, base_of(self._root))


def base_of(root: Path) -> Path:
    """Return the folder that contains all files of the dataset, including the targets of links.

    For a dataset in the Hub's cache, return the folder that contains "snapshots" and "blobs".
    """
    above = root.absolute().parent
    return above.parent if above.name == "snapshots" and (above.parent / "blobs").is_dir() else root


def frames_column(codes: Int64s) -> pa.StructArray:
    """Return the column ``{video, frame}`` from the codes that ``Videos.codes`` returned."""
    none = codes == 0
    parts = [pa.array(part.astype(np.int32), mask=none) for part in (codes // _FRAMES - 1, codes % _FRAMES)]
    return pa.StructArray.from_arrays(parts, fields=list(FRAME))


INDEX = ("episode_index", "frame_index", "index")
"""Names of the columns with the episode number and the frame number."""
TIME = "timestamp"
"""Name of the column with the time of a row in its episode, in seconds; the row's video frames have this time."""

_TEXTS = ("image", "language", "string")
_ENDINGS = ("next.reward", "next.done", "next.truncated")
_Path = str | os.PathLike[str]


class Frames:
    """Converts frames of a LeRobotDataset to rows.

    Args:
        where: Name of the dataset for error messages.
        described: The metadata of the dataset.
        final: "drop" or "mark".
        cameras: Whether to read images.
    """

    def __init__(
        self,
        where: str,
        described: Description,
        *,
        final: str | None,
        cameras: bool,
    ) -> None:
        self.where, self.described, self.final = where, described, final
        self.episodes = described.episodes
        #: Positions of episodes that are left out.
        self.skipped: frozenset[int] = frozenset()
        kinds = ("video", "image") if cameras else ()
        self.pictures = [key for key, feature in described.features.items() if feature.dtype in kinds]
        self.stored = [
            key
            for key, feature in described.features.items()
            if feature.dtype != "video" and (feature.dtype != "image" or cameras) and key not in INDEX
        ]

    def schema(self, types: pa.Schema, file: _Path) -> pa.Schema:
        """Return the schema of rows, from the types of a file's columns and the shapes in the metadata."""
        for name in (*self.stored, *INDEX):
            if name not in types.names:
                raise damaged(file, f"expected a column {name!r}, found {types.names[:40]}")
        features = self.described.features
        pictures = dict.fromkeys(self.pictures, np.zeros(1, np.int64))
        keys = [key for key in self.stored if key not in pictures]
        batch = pa.record_batch([_example(features[key], types.field(key).type) for key in keys], names=keys)
        found = self.columns(batch, {}, file, keys)
        frames = {key: pictures[key] if key in pictures else found[key] for key in self.stored} | pictures
        one = np.ones(1, bool)
        *_, made = columns.transition_rows(
            [(self.seen(frames), self.brought(frames, one), one)], final=self.final, where=""
        )
        numbers = columns.schema_of(self.numbered(made, np.zeros(len(made["episode_step"]), np.int64)))
        return columns.typed(columns.typed(numbers, self.encoded.values(), IMAGE), self.codes.values(), FRAME)

    def unreadable_images(self, batch: pa.RecordBatch, key: str) -> Iterator[tuple[int, str]]:
        """Yield the index of each row whose image of the camera is missing or has a wrong shape, and the reason."""
        feature = self.described.features[key]
        return unreadable_images(batch.column(key), key, feature.shape, pixel(feature))  # type: ignore[arg-type]

    def images(self, batch: pa.RecordBatch, keys: Iterable[str], file: _Path, called: Callable[[int], str]) -> Columns:
        """Return the image files of cameras as bytes; raise DataError, naming file and row, for an invalid image."""
        for key in keys:
            for row, why in self.unreadable_images(batch, key):
                raise damaged(file, why, at=called(row))
        return {key: encoded_images(batch.column(key)) for key in keys}

    def batch(self, rows: Columns, schema: pa.Schema, *, where: str) -> pa.RecordBatch:
        """Return a record batch with the types of ``schema``, including images and video frames.

        If the observation of a row is missing, the duration of one frame is added to the row's time.
        """
        if columns.MISSING in rows and (clock := f"metadata_{TIME}") in rows:
            late = rows[columns.MISSING].reshape(rows[clock].shape) / self.described.frames_per_second
            rows = {**rows, clock: (rows[clock] + late).astype(rows[clock].dtype)}
        plain = columns.typed(
            columns.typed(schema, self.encoded.values(), pa.binary()), self.codes.values(), pa.int64()
        )
        made = columns.to_batch(rows, plain, where=where).columns
        for place, field in enumerate(schema):
            if field.type == IMAGE:
                files = made[place]
                missing = pc.equal(pc.binary_length(files), 0)
                made[place] = image_column(pc.if_else(missing, None, files) if pc.any(missing).as_py() else files)
            elif field.type == FRAME:
                made[place] = frames_column(made[place].to_numpy())
        return pa.RecordBatch.from_arrays(made, schema=schema)

    @memo
    def encoded(self) -> dict[str, str]:
        """Names of columns of image files, by feature. Before the call of ``batch``, these columns hold the bytes of
        the files.
        """
        return {key: column_of(key) for key in self.pictures if self.described.features[key].dtype == "image"}

    @memo
    def codes(self) -> dict[str, str]:
        """Names of columns of video frames, by feature. Before the call of ``batch``, these columns hold codes of
        frames.
        """
        return {key: column_of(key) for key in self.pictures if self.described.features[key].dtype == "video"}

    def unlike(self, batch: pa.RecordBatch, rows: npt.NDArray[np.int64], file: _Path) -> Iterator[tuple[int, str]]:
        """Yield the index of each episode whose frame numbers differ from the expected numbers ``rows``, and the
        reason.
        """
        index, (episode, number) = self.episodes.index, self.episodes.places(rows)
        found = [_indices(batch, name, file) for name in INDEX[:2]]
        wrong = np.flatnonzero((found[0] != index[episode]) | (found[1] != number))
        _, first = np.unique(episode[wrong], return_index=True)
        for row in wrong[first].tolist():
            yield (
                int(episode[row]),
                f"expected frame {number[row]} of episode {index[episode[row]]}, found frame {found[1][row]} of "
                f"episode {found[0][row]}",
            )

    @staticmethod
    def times(batch: pa.RecordBatch, file: _Path) -> npt.NDArray[np.float64]:
        """Return the recording time of each row, in seconds since its episode began; NaN if unknown."""
        if TIME not in batch.schema.names:
            return np.full(batch.num_rows, np.nan)
        column = batch.column(TIME)
        numbers = columns.read_values(column.fill_null(np.nan) if pa.types.is_floating(column.type) else column).numbers
        if numbers is None or numbers.size != batch.num_rows:
            raise damaged(file, f"{TIME}: expected a number of seconds in each row, found {column.type}")
        return np.asarray(numbers.reshape(batch.num_rows), np.float64)

    def unreadable(self, batch: pa.RecordBatch, keys: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Yield the index of each row with a value whose shape differs from the feature's shape, and the reason."""
        for key in keys:
            feature, column = self.described.features[key], batch.column(key)
            values = columns.read_values(column)
            if values.kind.kind not in ("scalar", "list") or feature.dtype in _TEXTS or _fits(values, feature):
                continue
            for row in range(len(column)):
                one = columns.read_values(column.slice(row, 1))
                if not _fits(one, feature):
                    found = "null" if one.present is not None else f"{one.inner_nulls} nulls"
                    found = found if one.nulls else f"shape {list(one.shape or ())}"
                    yield row, f"{key}: expected {feature.dtype} {list(feature.shape)}, found {found}"

    def columns(
        self,
        batch: pa.RecordBatch,
        pictures: Columns,
        file: _Path,
        keys: Sequence[str] | None = None,
        *,
        called: Callable[[int], str] = lambda row: "",
    ) -> Columns:
        """Convert rows of a file to arrays, by feature.

        Args:
            batch: Rows of a file.
            pictures: Images by feature, which are added to the result.
            file: The file, for error messages.
            keys: The features; None stands for all features that are stored in files of frames.
            called: A function that returns the name of a row, for error messages.
        """
        frames: Columns = {}
        for key in self.stored if keys is None else keys:
            feature = self.described.features[key]
            if feature.dtype == "image":  # given in `pictures`
                continue
            values = columns.read_values(batch.column(key))
            if feature.dtype == "language":
                texts = [json.dumps(value, ensure_ascii=False, default=str) for value in batch.column(key).to_pylist()]
                frames[key] = np.array(texts, dtype=object)
                continue
            if values.kind.kind == "other" and pa.types.is_string(values.array.type):
                frames[key] = np.array(values.array.to_pylist(), dtype=object)
                continue
            for row, why in self.unreadable(batch, [key]):
                raise damaged(file, why, at=called(row))
            if values.numbers is None:
                raise damaged(file, f"{key}: expected {feature.dtype} {list(feature.shape)}, found {values.array.type}")
            frames[key] = values.numbers
        return frames | pictures

    # ------------------------------------------------------------------ columns

    def seen(self, frames: Columns) -> Columns:
        """Return the columns of observations, and the metadata columns that belong to observations."""
        seen: Columns = {}
        for key, values in frames.items():
            if is_action(key):
                continue
            if key in self.pictures or not key.startswith("next."):
                seen[column_of(key)] = values
        state = seen.get("observation.state")
        return seen if state is None or state.ndim > 1 else {**seen, "observation.state": state[:, None]}

    def brought(self, frames: Columns, last: npt.NDArray[np.bool_]) -> Columns:
        """Return the columns of actions and of their results. ``last`` is a mask of the last frames of episodes."""
        brought: Columns = {key: values for key, values in frames.items() if is_action(key)}
        action = brought.get("action")
        if action is not None and action.ndim == 1 and action.dtype.kind == "f":
            brought["action"] = action[:, None]
        brought["reward"] = frames.get("next.reward", np.zeros(len(last), np.float32)).reshape(len(last))
        brought["done"] = _done_codes(frames, last)
        for key, values in frames.items():
            if key.startswith("next.") and key not in (*_ENDINGS, *self.pictures):
                brought[column_of(key)] = values
        return brought

    def numbered(self, rows: Columns, ordinals: npt.NDArray[np.int64]) -> Columns:
        """Return the rows with an added column of episode numbers; ``ordinals`` are indices in ``_numbers``."""
        return {**rows, "metadata_episode_index": self._numbers[np.clip(ordinals, 0, len(self._numbers) - 1)]}

    @memo
    def _numbers(self) -> npt.NDArray[np.int64]:
        """The numbers of the episodes that have rows."""
        # With final="drop", an episode of one frame has no transition, only its first row.
        there = self.episodes.lengths > 0
        there[list(self.skipped)] = False
        return self.episodes.index[there]

    def metadata(self) -> DatasetMetadata:
        """Return the dataset's metadata, except fields and videos."""
        described = self.described
        robot = described.info.get("robot_type")
        return DatasetMetadata(
            "arrived",
            tasks=described.tasks,
            dimensions=dimensions(described),
            frames_per_second=[described.frames_per_second],
            robots=[robot] if isinstance(robot, str) else [],
        )

    def fields(self, pictures: Mapping[str, str]) -> list[Field]:
        """Return fields that decode the columns of image files and video frames, by feature; a null becomes zeros."""
        made = []
        for key, column in pictures.items():
            feature = self.described.features[key]
            # For colours, the shape comes from the files; a field with another shape would resize frames.
            shape = feature.shape if feature.shape[2] == 1 else None
            dtype = "uint16" if feature.wide else None
            made.append(Field(column, dtype=dtype, shape=shape, image=True, fill=0, flat=False))
        return made


def _example(feature: Feature, data_type: pa.DataType) -> pa.Array:
    """Return an example value with the type and shape of a feature, as files store it."""
    shape = fixed_shape(data_type)
    while isinstance(data_type, pa.BaseExtensionType):  # features of several dimensions, written by datasets
        data_type = data_type.storage_type
    kind = column_type(data_type)
    value: Any = None
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        value = ""
    elif kind.kind in ("scalar", "list") and feature.dtype != "language":
        value = np.zeros((shape or feature.shape) if kind.depth else (), kind.dtype).tolist()
    try:
        return pa.array([value], data_type)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.nulls(1, data_type)  # reading the file later raises the error


def _fits(values: columns.Values, feature: Feature) -> bool:
    """Whether all rows have the shape of their feature. A single number also fits a shape with one element."""
    if values.nulls or values.numbers is None:
        return False
    return values.shape == feature.shape or (values.shape, feature.shape) == ((), (1,)) or not values.rows


def _indices(batch: pa.RecordBatch, name: str, file: _Path) -> npt.NDArray[np.int64]:
    column = batch.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise damaged(file, f"{name}: expected whole numbers, found {column.type}")
    return np.asarray(column.to_numpy(zero_copy_only=False).astype(np.int64))


def pixel(feature: Feature) -> np.dtype[Any]:
    """Return the dtype of a camera's pixels."""
    return np.dtype(np.uint16 if feature.wide else np.uint8)


def _done_codes(frames: Columns, last: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return done codes: 2 for truncated frames, else 1 for done frames, else 2 for the last frame of an episode."""
    flags = [frames.get(key, np.zeros(len(last), bool)) for key in ("next.done", "next.truncated")]
    done, truncated = (values.reshape(len(last)).astype(bool) for values in flags)
    return np.where(truncated, 2, np.where(done, 1, np.where(last, 2, 0))).astype(np.int64)


Int64s = npt.NDArray[np.int64]

_INDICES = ("episode_index", "length", "data/chunk_index", "data/file_index")
_MOST = 2**48
_KILLED = "; if the recording was interrupted, skip_broken=True (--skip-broken) reads its complete episodes"


@dataclass(frozen=True)
class Feature:
    """A feature of the dataset.

    Args:
        key: Name of the feature in LeRobot.
        dtype: "float32", "video", "image", "string", "language" and so on.
        shape: Shape of a value; ``(H, W, C)`` for images.
        wide: Whether images have 16 bits per pixel, such as depth images and grey images of more than 8 bits.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    wide: bool = False


class FrameFile(NamedTuple):
    """A file of frames.

    Args:
        name: Path of the file, below the dataset's folder.
        first, stop: Index of the file's first episode among all episodes, and the index after its last episode.
        rows: The range of frame numbers in the file.
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
        lengths: Number of frames of each episode, int64 ``[n]``.
        files: The files of frames, in the order of episodes.
        videos: For each camera and episode, the path of the video (below the dataset's folder) and the time in seconds
            at which the episode begins in the video.
    """

    index: Int64s
    lengths: Int64s
    files: Sequence[FrameFile]
    videos: Mapping[str, Sequence[tuple[str, float]]]

    @memo
    def ends(self) -> Int64s:
        """Cumulative number of frames at the end of each episode, int64 ``[n]``."""
        return np.cumsum(self.lengths)

    def places(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Return, for each frame, the index of its episode, and the frame's index in the episode.

        Example: with episodes of 2 and 3 frames, the frames 1 2 3 are in the episodes 0 1 1, with the indices 1 0 1.
        """
        episode = np.searchsorted(self.ends, rows, side="right")
        return episode, rows - (self.ends - self.lengths)[episode]

    def called(self, rows: Int64s, row: int) -> str:
        """Return, for error messages, a name of the frame with the index ``rows[row]``."""
        (place,), (number,) = self.places(rows[row : row + 1])
        return f"frame {number} of episode {self.index[place]}"


@dataclass(frozen=True)
class Description:
    """The metadata of a dataset.

    Args:
        features: The features by key.
        frames_per_second: Rate of the recording.
        episodes: The episodes.
        tasks: A dict from the number of each task to its text.
        stats: Content of ``meta/stats.json``.
        info: Content of ``meta/info.json``.
        lost: A sentence for each file or entry of the metadata that could not be read.
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
        skip_broken: Whether to leave out episodes without metadata, or with files that cannot be read.

    Raises:
        ConfigError: The folder has no dataset, or the dataset has an unsupported version of the format.
        DataError: The metadata are damaged; the message names the file.
    """
    file = root / "meta" / "info.json"
    if not file.is_file():
        raise ConfigError(f"{root}: expected meta/info.json of a LeRobotDataset, found none")
    info = read_json_object(file)
    version = str(info.get("codebase_version"))
    if not re.fullmatch(r"v3\.\d+", version):
        raise ConfigError(
            f"{file}: expected codebase_version v3.0, found {version!r:.40}; LeRobot's script "
            "convert_dataset_v21_to_v30 converts version 2.1"
        )
    rate = _rate(info.get("fps"), file)
    described = info.get("features")
    if not isinstance(described, Mapping) or not described:
        raise damaged(file, f"expected features by name, found {described!r:.40}")
    features = {key: _feature(key, entry, file) for key, entry in described.items()}
    cameras = [key for key, feature in features.items() if feature.dtype == "video"]
    lost: list[str] = []
    failed = lost if skip_broken else None
    episodes = _episodes(root, cameras, failed)
    for name, found in (("total_episodes", len(episodes.index)), ("total_frames", int(episodes.lengths.sum()))):
        if info.get(name, found) != found:
            why = f"expected {name} of {found}, as in meta/episodes, found {info[name]!r:.40}"
            if not skip_broken:
                raise damaged(file, f"{why}{_KILLED}")
            lost.append(f"{file}: {why}: episodes and frames that are not listed are left out")
    stats = root / "meta" / "stats.json"
    return Description(
        features, rate, episodes, _tasks(root), read_json_object(stats) if stats.is_file() else {}, info, tuple(lost)
    )


def check_action(described: Description, where: str) -> None:
    """Raise SchemaError if no feature is an action."""
    if not any(map(is_action, described.features)):
        raise SchemaError(f"{where}: expected a feature 'action', found {list(described.features)}")


def dimensions(described: Description) -> dict[str, list[str]]:
    """Return the names of the dimensions of each column."""
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
    """Whether a feature is an action or a part of an action."""
    return key == "action" or key.startswith("action.")


def column_of(key: str) -> str:
    """Return the name of the column for a feature."""
    return key if key.startswith("observation") or is_action(key) else f"metadata_{key}"


def feature_of(column: str) -> str:
    """Return the feature for a column name."""
    if column == "observation":
        return "observation.state"
    for prefix in ("observation_images_", "observation_", "action_"):
        if column.startswith(prefix):
            return prefix.replace("_", ".") + column.removeprefix(prefix)
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
    """Whether, according to the metadata of a camera, its images have more than 8 bits per pixel."""
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
    read: dict[str, list[Any]] = {name: [] for name in wanted}
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
                read[name] += some[name]
    if not read["episode_index"]:
        raise damaged(folder, "expected Parquet files with episodes, found none")
    return read


def _episodes(root: Path, cameras: Sequence[str], failed: list[str] | None) -> Episodes:
    """Return the episodes in the order of their numbers."""
    folder, places = root / "meta" / "episodes", ("chunk_index", "file_index", "from_timestamp")
    wanted = [*_INDICES, *(f"videos/{camera}/{name}" for camera in cameras for name in places)]
    read = _columns_of_episodes(folder, wanted, failed)
    found = zip(*(read[name] for name in _INDICES[2:]), strict=True)
    data = [_file("data", chunk, file, "parquet") for chunk, file in found]
    videos = {}
    for camera in cameras:
        found = zip(*(read[f"videos/{camera}/{name}"] for name in places), strict=True)
        videos[camera] = [(_file(f"videos/{camera}", chunk, file, "mp4"), begin) for chunk, file, begin in found]
    order = np.argsort(np.array(read["episode_index"]), kind="stable")
    numbers, counts = (np.array(read[name], np.int64)[order] for name in _INDICES[:2])
    if (numbers[1:] == numbers[:-1]).any():
        raise damaged(folder, "expected every episode once, found an episode twice")
    there, ends = np.flatnonzero(counts), np.cumsum(counts)
    names = [data[place] for place in order[there].tolist()]
    cuts = [place for place in range(len(names)) if not place or names[place] != names[place - 1]]
    if len({names[cut] for cut in cuts}) < len(cuts):
        raise damaged(
            folder, "expected episodes with consecutive indices in each file, found other episodes between them"
        )
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


def _numbers(batch: pa.RecordBatch, name: str, file: Path) -> list[Any]:
    if name not in batch.schema.names:
        raise damaged(file, f"expected a column {name!r}, found {batch.schema.names[:20]}")
    column = batch.column(name)
    whole = pa.types.is_integer(column.type)
    if column.null_count or not (whole or (name.endswith("timestamp") and pa.types.is_floating(column.type))):
        raise damaged(file, f"{name}: expected numbers, found {column.type} with {column.null_count} nulls")
    values: list[Any] = column.to_pylist()
    if any(not 0 <= value < _MOST for value in values):
        raise damaged(file, f"{name}: expected numbers of 0 or more, found {min(values)} to {max(values)}")
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


def numbered(folder: Path, suffix: str) -> list[Path]:
    """Return the files ``chunk-NNN/file-NNN`` in a folder, in the order of their numbers."""
    found = {}
    with reading(folder):
        for file in folder.glob(f"chunk-*/file-*{suffix}"):
            match = re.fullmatch(r"chunk-(\d+)/file-(\d+)", file.relative_to(folder).with_suffix("").as_posix())
            if match:
                found[int(match[1]), int(match[2]), file] = file
    return [found[key] for key in sorted(found)]


_MOST_FAULTS = 20


class EpisodeCheck:
    """Checks all episodes before rows are read.

    Args:
        root: The dataset's folder.
        frames: The conversion of frames to rows.
        videos: The videos of cameras.
        cameras: The features with videos.
        skip_broken: Whether broken episodes are left out; otherwise a broken episode raises an error.

    Raises:
        ImportError: A video has no index yet, and PyAV is not installed.
        DataError: An episode lacks rows, times or frames, or its files are damaged or missing; the message names file
            and episode. With ``skip_broken``, the error is raised only if all episodes are broken.
    """

    def __init__(self, root: Path, frames: Frames, videos: Videos, cameras: list[str], *, skip_broken: bool) -> None:
        self._root, self._frames, self._videos, self._cameras = root, frames, videos, cameras
        self._skip = skip_broken
        #: The reason for each broken episode, by position.
        self.broken: dict[int, str] = {}
        #: The number of rows whose time is not the frame number divided by the rate, the number of their episodes, and
        #: a text that names the first of these rows.
        self.untimely, self.of_untimely, self.first_untimely = 0, 0, ""
        for file in frames.episodes.files:
            self._check_file(file)
        there = np.flatnonzero(frames.episodes.lengths)
        if len(there) and all(place in self.broken for place in there.tolist()):
            said = "; ".join(dict.fromkeys(self.broken.values()))
            raise DataError(f"{root}: expected an episode that can be read, found none: {said:.1000}")

    def _check_file(self, frame_file: FrameFile) -> None:
        """Check the episodes of a file of frames."""
        name, first, stop, numbers = frame_file
        file, rows, episodes = self._root / name, np.array(numbers), self._frames.episodes
        everything = [place for place in range(first, stop) if episodes.lengths[place]]
        try:
            found = _table(file)
            if self._skip and found.num_rows > len(rows):  # these rows belong to an unfinished episode
                found = found.slice(0, len(rows))
            if found.num_rows != len(rows):
                raise damaged(file, f"expected {len(rows)} frames, as meta/episodes states, found {found.num_rows}")
            for place, why in self._frames.unlike(found, rows, file):
                self._mark_broken(place, str(damaged(file, why)))
            times = self._frames.times(found, file)
        except (DataError, ConfigError) as error:
            for place in everything:
                self._mark_broken(place, str(error), error)
            return
        episode, number = episodes.places(rows)
        untimed = np.flatnonzero(~np.isfinite(times)) if self._cameras else np.zeros(0, np.int64)
        for row in untimed[np.unique(episode[untimed], return_index=True)[1]].tolist():
            self._mark_broken(
                int(episode[row]), f"{file}: expected a {TIME} of frame {number[row]}, found {times[row]}"
            )
        if self._skip:
            try:
                self._check_values(file, rows)
            except (DataError, ConfigError) as error:
                for place in everything:
                    self._mark_broken(place, str(error), error)
        whole = ~np.isin(episode, list(self.broken))
        self._check_times(episode[whole], number[whole], times[whole])
        for key in self._cameras:
            for place, why, cause in self._videos.find(key, rows[whole], episode[whole], times[whole]):
                self._mark_broken(place, why, cause, key)

    def _check_values(self, file: Path, rows: Int64s) -> None:
        """Find episodes of a file whose values do not have the shapes of their features."""
        frames, begin = self._frames, 0
        for batch in parquet_batches(file, BATCH_ROWS, columns=frames.stored):
            batch = batch.slice(0, len(rows) - begin)
            some = rows[begin : begin + len(batch)]
            begin += len(batch)
            wrong = [frames.unreadable(batch, frames.stored)]
            wrong += [frames.unreadable_images(batch, key) for key in frames.encoded]
            for row, why in chain(*wrong):
                place = int(frames.episodes.places(some[row : row + 1])[0][0])
                self._mark_broken(place, str(damaged(file, why, at=frames.episodes.called(some, row))))

    def _check_times(self, episode: Int64s, number: Int64s, times: Floats) -> None:
        """Find rows whose times contradict the constant rate of the recording."""
        rate = self._frames.described.frames_per_second
        off = np.flatnonzero(np.abs(times - number / rate) > allowance(times, 1 / rate, rate))
        self.untimely += len(off)
        self.of_untimely += len(np.unique(episode[off]))
        if len(off) and not self.first_untimely:
            index, at = self._frames.episodes.index[episode[off[0]]], off[0]
            self.first_untimely = f"frame {number[at]} of episode {index}, at {times[at]:.4f} s"

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield a code, a severity and a sentence for each fault."""
        for place in sorted(self.broken)[:_MOST_FAULTS]:
            yield "broken-episode", "error", f"episode {self._frames.episodes.index[place]}: {self.broken[place]}"
        if len(self.broken) > _MOST_FAULTS:
            yield "broken-episode", "error", f"{len(self.broken) - _MOST_FAULTS} more episodes cannot be read"
        if self.untimely:
            yield (
                "off-rate",
                "warning",
                f"{TIME}: {self.untimely:,} rows of {self.of_untimely:,} episodes have other times than their frame "
                f"number and fps ({self._frames.described.frames_per_second:g}) give; "
                f"the first is {self.first_untimely}",
            )

    def _mark_broken(self, place: int, why: str, cause: Exception | None = None, key: str = "") -> None:
        """Record a broken episode; raise DataError instead if broken episodes are not left out."""
        if not self._skip:
            index = self._frames.episodes.index[place]
            raise DataError(
                f"{why}; {f'frames of {key} in ' if key else ''}episode {index} cannot be read"
                f"{' in place' if key else ''}: skip_broken=True leaves out such episodes"
            ) from cause
        self.broken.setdefault(place, why)


def _table(file: Path) -> pa.RecordBatch:
    """Read a file's columns of frame numbers and episode numbers, and the column of times if there is one."""
    if not file.is_file():
        raise damaged(file, "expected a file of frames, as meta/episodes states, found none")
    with reading(file), open_parquet(file) as opened:
        names = [*INDEX, *({TIME} & set(opened.schema_arrow.names))]
    batches = list(parquet_batches(file, 64 * BATCH_ROWS, columns=names))
    table = pa.Table.from_batches(batches) if batches else pa.table({name: pa.array([], pa.int64()) for name in names})
    (found,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    return found


def read_lerobot(
    path: str | os.PathLike[str],
    *,
    final: str | None = None,
    cameras: bool = True,
    skip_broken: bool = False,
    tolerance: float | None = None,
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read a LeRobotDataset of version 3. The package LeRobot can convert datasets of version 2.1 to version 3.

    The format has one frame for each action, and does not store the observation after the last action.

    Columns of observations (``observation.state``, ``observation.images.<name>``) and ``action`` keep their names.
    ``next.reward`` and ``next.done`` become ``reward`` and ``done``; other columns become ``metadata_<name>``. ``done``
    is 2 where ``next.truncated`` is set, else 1 where ``next.done`` is set, and 2 at other ends of episodes. Without
    ``next.reward``, ``reward`` is 0. Images in Parquet stay encoded.

    Rows refer to frames of the original videos by ``{video, frame}``; a batch decodes the frames that it needs
    (``mouse_core.video``). This function searches for the video frame at each row's "timestamp". A missing frame raises
    a DataError.

    Depth images and grey images of more than 8 bits keep the recorded numbers, uint16, in a column with the name of the
    camera. Columns of the type "language" become JSON texts. The stream's ``metadata`` contain ``tasks`` (a dict from
    the numbers in ``metadata_task_index`` to texts), and the dataset's ``info`` and ``stats``.

    Args:
        path: The dataset's folder.
        final: Treatment of the last action of an episode, whose next observation is not stored: "drop" or "mark".
        cameras: Whether to read images; videos need the extra ``video``.
        skip_broken: Whether to leave out broken episodes: rows, times or frames are missing, shapes differ from the
            features, or files are damaged. ``notes`` name these episodes. All files are read first, and all frames are
            decoded. If the recording was interrupted, all of its complete episodes are read.
        tolerance: Largest distance in seconds between a video frame and a row's "timestamp", like LeRobot's
            ``tolerance_s``; by default 0.0001, plus the rounding error of the stored times.
        batch_rows: Approximate number of rows of a batch; fewer if rows are large.

    Raises:
        ConfigError: The path has no dataset, the format has another version, or ``final`` is missing.
        SchemaError: The dataset has no feature ``action``, or the type of this feature cannot be read.
        DataError: A file is damaged; the message names the file.
    """
    root = Path(path)
    if tolerance is not None:
        check_seconds("tolerance (--tolerance)", tolerance)
    check_inside((root / "meta").rglob("*"), root)
    described = read_description(root, skip_broken=skip_broken)
    columns.check_final(final, where=str(root))
    check_action(described, str(root))
    frames = Frames(str(root), described, final=final, cameras=cameras)
    check_inside((root / file.name for file in described.episodes.files), root)
    recorded = [key for key in frames.pictures if described.features[key].dtype == "video"]
    metadata, notes = frames.metadata(), [*_notes(described)]
    found = Videos(root, described, recorded, decode=skip_broken, tolerance=tolerance)
    checked = EpisodeCheck(root, frames, found, recorded, skip_broken=skip_broken)
    frames.skipped = frozenset(checked.broken)
    found.settle(frames.skipped)
    episodes = described.episodes
    notes += described.lost
    notes += (f"episode {episodes.index[place]} is left out: {why}" for place, why in sorted(checked.broken.items()))
    lengths = np.delete(episodes.lengths, [*frames.skipped])
    kept = {*np.flatnonzero(episodes.lengths).tolist()} - frames.skipped
    files = [file for file in episodes.files if not kept.isdisjoint(range(file.first, file.stop))]
    if not files:
        raise damaged(root / "data", "expected frames, found none")
    first = root / files[0].name
    with reading(first), open_parquet(first) as opened:
        schema = frames.schema(opened.schema_arrow, first)
    metadata = metadata.replace(fields=frames.fields({**frames.encoded, **frames.codes}), videos=found.files)
    return RowStream(
        path=str(root),
        format="lerobot",
        schema=schema,
        batches=partial(_batches, root, frames, files, found, schema, batch_rows),
        rows=int(lengths.sum() + np.count_nonzero(lengths) * (final == "mark")),
        notes=tuple(notes),
        format_metadata={name: dict(getattr(described, name)) for name in ("info", "tasks", "stats")},
        faults=tuple(checked.faults()),
        metadata=in_stored_layout(metadata, schema),
        image_roots=(os.path.realpath(base_of(root)),),
    )


def _notes(described: Description) -> Iterator[str]:
    if "next.reward" not in described.features:
        yield "there is no next.reward: all rewards are 0"
    if "next.done" not in described.features:
        yield "there is no next.done: every episode counts as truncated where it ends"
    elif "next.truncated" not in described.features:
        yield "next.done does not distinguish terminal and truncated episodes: all count as terminal"
    for key, feature in described.features.items():
        if feature.wide:
            yield f"{key} holds numbers of 16 bits as they were recorded; meta/info.json says what they stand for"
        if feature.dtype == "language":
            yield f"{key} is JSON text"


def _batches(
    root: Path, frames: Frames, files: Sequence[FrameFile], videos: Videos, schema: pa.Schema, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield all rows in order."""
    ordinal = -1  # episode of the last row so far
    parts = (
        (frames.seen(part), frames.brought(part, last), begins)
        for part, begins, last in _pieces(root, frames, files, videos, batch_rows)
    )
    for made in columns.transition_rows(parts, final=frames.final, where=str(root)):
        numbers = ordinal + np.cumsum(made["episode_step"] == 0)
        if len(numbers):
            ordinal = int(numbers[-1])
            yield frames.batch(frames.numbered(made, numbers), schema, where=str(root))


def _pieces(
    root: Path, frames: Frames, files: Sequence[FrameFile], videos: Videos, batch_rows: int
) -> Iterator[tuple[Columns, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """Yield frames by feature, and two masks: frames that begin an episode, and frames that end an episode."""
    features = [one for one in frames.described.features.values() if one.dtype not in ("video", "image")]
    most = columns.rows_at_once(8 * sum(math.prod(one.shape) for one in features), most=batch_rows)
    episodes, skipped = frames.episodes, np.array(sorted(frames.skipped), np.int64)
    for name, _, _, numbers in files:
        row = numbers.start
        for batch in parquet_batches(root / name, most, columns=[*dict.fromkeys([*frames.stored, *INDEX])]):
            batch = batch.slice(0, numbers.stop - row)  # without the frames of an unfinished episode
            rows = np.arange(row, row + batch.num_rows)
            row += batch.num_rows
            keep = ~np.isin(episodes.places(rows)[0], skipped)
            if not keep.all():
                batch, rows = batch.filter(pa.array(keep)), rows[keep]
            if not len(rows):
                continue
            episode, number = episodes.places(rows)
            called = partial(episodes.called, rows)
            pictures = frames.images(batch, frames.encoded, root / name, called)
            pictures |= {key: videos.codes(key, rows) for key in frames.codes}
            part = frames.columns(batch, pictures, root / name, called=called)
            yield part, number == 0, number == episodes.lengths[episode] - 1
