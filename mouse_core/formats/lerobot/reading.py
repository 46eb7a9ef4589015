"""LeRobotDataset, version 3: Parquet files, episodes and camera videos."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import SchemaError
from mouse_core.formats._files.parquet import parquet_batches
from mouse_core.formats._files.video import Camera
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.columns.named import Columns, named_action, named_observation, schema_of, to_batch
from mouse_core.formats.columns.transitions import check_final, transition_rows
from mouse_core.formats.columns.values import read_values
from mouse_core.formats.lerobot._meta import Description, Feature, numbered, read_description
from mouse_core.images.pixels import decode_into

_INDEX = ("episode_index", "frame_index", "index")
_ENDINGS = ("next.reward", "next.done", "next.truncated")
_PIECE_BYTES = 16 << 20


def read_lerobot(
    path: str | os.PathLike[str], *, final: str | None = None, cameras: bool = True, batch_rows: int = BATCH_ROWS
) -> RowStream:
    """Read a LeRobotDataset, which stores a frame for every action, but not the one that the last action led to.

    ``observation.state`` becomes ``observation``, a single camera ``observation_image``, several
    ``observation_images_<name>``; ``action``, ``next.reward`` and ``next.done`` become the standard columns, others
    ``metadata_<name>``. Done is 1 where ``next.done`` (2 where also ``next.truncated``), and 2 where an episode
    ends without. Where there is no ``next.reward``, reward is 0. Every frame of a video is decoded once, in order.

    Depth and greys of more than 8 bits are the numbers that were recorded, uint16, in a column of the camera's name: a
    ``Field`` of one's own reads it. Columns of language are JSON text. What the robot was to do is ``tasks`` in the
    stream's ``metadata``, texts by the numbers in ``metadata_task_index``; ``info`` and ``stats`` are there as stored.

    Args:
        path: The dataset's folder.
        final: "drop" or "mark": what to do about the observation that an episode ends in.
        cameras: Whether to read pictures; videos need the extra ``video``.
        batch_rows: How many rows a batch has, about; fewer where they are large.

    Raises:
        ConfigError: Nothing there, another version of the format, or ``final`` was not chosen.
        SchemaError: No feature ``action``, or one of a type that is not read.
        DataError: Something is damaged; names the file.
    """
    root = Path(path)
    described = read_description(root)
    check_final(final, where=str(root))
    if not any(key == "action" or key.startswith("action.") for key in described.features):
        raise SchemaError(f"{root}: expected a feature 'action', found {list(described.features)}")
    reader = _Reader(root, described, final=final, cameras=cameras, batch_rows=batch_rows)
    return RowStream(
        path=str(root),
        format="lerobot",
        schema=reader.schema(),
        batches=partial(_Reader.batches, reader),
        episodes=len(described.episodes.index),
        rows=sum(length + (final == "mark") for length in described.episodes.length if length),
        notes=tuple(_notes(described)),
        metadata={name: dict(getattr(described, name)) for name in ("info", "tasks", "stats")},
        about=About("arrived", tasks=described.tasks),
    )


def _notes(described: Description) -> Iterator[str]:
    if "next.reward" not in described.features:
        yield "there is no next.reward: all rewards are 0"
    if "next.done" not in described.features:
        yield "there is no next.done: every episode counts as truncated where it ends"
    elif "next.truncated" not in described.features:
        yield "next.done does not tell terminal states from truncated episodes: all count as terminal"
    for key, feature in described.features.items():
        if feature.wide:
            yield f"{key} holds numbers of 16 bits as they were recorded; meta/info.json says what they stand for"
        if feature.dtype == "language":
            yield f"{key} is JSON text"


class _Reader:
    """Turns frames into rows.

    Args:
        root, final, cameras, batch_rows: As for ``read_lerobot``.
        described: What the dataset says of itself.
    """

    def __init__(
        self, root: Path, described: Description, *, final: str | None, cameras: bool, batch_rows: int
    ) -> None:
        self.root = root
        self.described = described
        self.final = final
        kinds = ("video", "image") if cameras else ()
        self.pictures = [key for key, feature in described.features.items() if feature.dtype in kinds]
        self.stored = [
            key
            for key, feature in described.features.items()
            if feature.dtype != "video" and (feature.dtype != "image" or cameras) and key not in _INDEX
        ]
        each = sum(
            math.prod(feature.shape) * (1 if feature.dtype in ("video", "image") else 8)
            for feature in described.features.values()
        )
        self.batch_rows = rows_at_once(each, most=batch_rows, budget=_PIECE_BYTES)

    def schema(self) -> pa.Schema:
        """The columns of every batch, from the first frame's types and the described shapes."""
        file = next(iter(numbered(self.root / "data", ".parquet")), None)
        if file is None:
            raise damaged(self.root / "data", "expected Parquet files, found none")
        batch = next(parquet_batches(file, 2, columns=[*self.stored, *_INDEX]), None)
        if batch is None or not batch.num_rows:
            raise damaged(file, "expected frames, found none")
        batch = batch.slice(0, 1)
        features = self.described.features
        pictures = {key: np.zeros((1, *features[key].shape), _pixel(features[key])) for key in self.pictures}
        frames = self._frames(batch, pictures, file)
        part = self._seen(frames), self._brought(frames, np.ones(1, bool)), np.ones(1, bool)
        *_, made = transition_rows([part], final=self.final, where=str(self.root))
        return schema_of(self._numbered(made, np.zeros(len(made["episode_step"]), np.int64)))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows."""
        schema, where = self.schema(), str(self.root)
        ordinal = -1  # of the episode of the last row so far
        with ExitStack() as opened:
            cameras = {key: opened.enter_context(closing(camera)) for key, camera in self._cameras()}
            parts = (
                (self._seen(frames), self._brought(frames, last), begins)
                for frames, begins, last in self._pieces(cameras)
            )
            for made in transition_rows(parts, final=self.final, where=where):
                numbers = ordinal + np.cumsum(made["episode_step"] == 0)
                if len(numbers):
                    ordinal = int(numbers[-1])
                    yield to_batch(self._numbered(made, numbers), schema, where=where)

    def _cameras(self) -> Iterator[tuple[str, Camera]]:
        for key in self.pictures:
            feature = self.described.features[key]
            if feature.dtype == "video":
                yield key, Camera(key, feature.shape, self.described.frames_per_second, wide=feature.wide)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ frames

    def _pieces(
        self, cameras: dict[str, Camera]
    ) -> Iterator[tuple[Columns, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
        """Frames, whether an episode begins with one, and whether it ends with one; no piece spans two episodes."""
        episodes = self.described.episodes
        index, lengths = np.array(episodes.index, np.int64), np.array(episodes.length, np.int64)
        ends = np.cumsum(lengths)
        row = 0  # frames so far
        for file in numbered(self.root / "data", ".parquet"):
            for batch in parquet_batches(file, self.batch_rows, columns=[*self.stored, *_INDEX]):
                if row + batch.num_rows > ends[-1]:
                    more = row + batch.num_rows - int(ends[-1])
                    raise damaged(file, f"expected no frames after the last episode, found {more}")
                # Of episodes of 2 and 3 frames, frames 1 2 3 are of the episodes 0 1 1, of which they are 1 0 1.
                rows = np.arange(row, row + batch.num_rows)
                episode = np.searchsorted(ends, rows, side="right")
                number = rows - (ends - lengths)[episode]
                found = [self._indices(batch, name, file) for name in ("episode_index", "frame_index")]
                unequal = (found[0] != index[episode]) | (found[1] != number)
                if unequal.any():
                    wrong = int(np.argmax(unequal))
                    raise damaged(
                        file,
                        f"expected frame {number[wrong]} of episode {index[episode[wrong]]}, found frame "
                        f"{found[1][wrong]} of episode {found[0][wrong]}",
                    )
                for first, stop in pairwise([0, *(np.flatnonzero(number[1:] == 0) + 1), batch.num_rows]):
                    place, here = int(episode[first]), number[first:stop]
                    pictures = {key: self._video(camera, place, here) for key, camera in cameras.items()}
                    frames = self._frames(batch.slice(first, stop - first), pictures, file)
                    yield frames, here == 0, here == lengths[place] - 1
                row += batch.num_rows
        if row < ends[-1]:
            place = int(np.searchsorted(ends, row, side="right"))
            raise damaged(
                self.root / "data",
                f"expected {lengths[place]} frames of episode {index[place]}, found {row - (ends - lengths)[place]}",
            )

    @staticmethod
    def _indices(batch: pa.RecordBatch, name: str, file: Path) -> npt.NDArray[np.int64]:
        column = batch.column(name)
        if not pa.types.is_integer(column.type) or column.null_count:
            raise damaged(file, f"{name}: expected whole numbers, found {column.type}")
        return np.asarray(column.to_numpy(zero_copy_only=False).astype(np.int64))

    def _video(self, camera: Camera, place: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        chunk, number, begin = self.described.episodes.videos[camera.name][place]
        file = self.root / "videos" / camera.name / f"chunk-{chunk:03d}" / f"file-{number:03d}.mp4"
        return camera.take(file, begin + numbers / self.described.frames_per_second)

    def _frames(self, batch: pa.RecordBatch, pictures: Columns, file: Path) -> Columns:
        """Values by feature."""
        frames: Columns = {}
        for key in self.stored:
            feature = self.described.features[key]
            values = read_values(batch.column(key))
            if feature.dtype == "image":
                frames[key] = self._decoded(values.array, feature, file)
                continue
            if feature.dtype == "language":
                texts = [json.dumps(value, ensure_ascii=False, default=str) for value in batch.column(key).to_pylist()]
                frames[key] = np.array(texts, dtype=object)
                continue
            if values.kind.kind == "other" and pa.types.is_string(values.array.type):
                frames[key] = np.array(values.array.to_pylist(), dtype=object)
                continue
            shape, stored = list(feature.shape), batch.column(key).type
            if values.numbers is None or values.shape is None:
                raise damaged(file, f"{key}: expected {feature.dtype} {shape}, found {stored}")
            if values.shape != feature.shape and (values.shape, shape) != ((), [1]):
                raise damaged(file, f"{key}: expected shape {shape}, found {list(values.shape)}")
            frames[key] = values.numbers
        return frames | pictures

    @staticmethod
    def _decoded(array: pa.Array, feature: Feature, file: Path) -> npt.NDArray[Any]:
        found = np.empty((len(array), *feature.shape), _pixel(feature))
        for row, value in enumerate(array.to_pylist()):
            # Files that a path names are not opened: a dataset must not reach outside of its folder.
            encoded = value.get("bytes") if isinstance(value, dict) else value
            try:
                decode_into(encoded if isinstance(encoded, bytes) else b"", found[row])
            except ValueError as error:
                raise damaged(file, f"{feature.key}: {error}", at=f"row {row}") from error
        return found

    # ------------------------------------------------------------------ columns

    def _seen(self, frames: Columns) -> Columns:
        """Columns of the observation that a frame shows, and what stays with it."""
        seen: Columns = {}
        for key, values in frames.items():
            name = key.replace(".", "_")
            if _is_action(key):
                continue
            if key in self.pictures:
                single = len(self.pictures) == 1 and not self.described.features[key].wide
                seen["observation_image" if single else name] = values
            elif key == "observation.state":
                seen |= named_observation(values if values.ndim > 1 else values[:, None])
            elif not key.startswith("next."):
                seen[name if key.startswith("observation") else f"metadata_{name}"] = values
        return seen

    def _brought(self, frames: Columns, last: npt.NDArray[np.bool_]) -> Columns:
        """Columns of what a frame's action brought."""
        brought: Columns = {}
        for key in filter(_is_action, frames):
            brought |= named_action(frames[key]) if key == "action" else {key.replace(".", "_"): frames[key]}
        brought["reward"] = frames.get("next.reward", np.zeros(len(last), np.float32)).reshape(len(last))
        brought["done"] = _done_codes(frames, last)
        for key, values in frames.items():
            if key.startswith("next.") and key not in (*_ENDINGS, *self.pictures):
                brought[f"metadata_{key.replace('.', '_')}"] = values
        return brought

    def _numbered(self, rows: Columns, ordinals: npt.NDArray[np.int64]) -> Columns:
        """The same with the number of each row's episode, which its first and last row have too."""
        index = np.array(self.described.episodes.index, np.int64)
        lengths = np.array(self.described.episodes.length)
        # With final="drop" an episode of one frame has no transition left; it still has its first row.
        index = index[lengths > 0]
        return {**rows, "metadata_episode_index": index[np.clip(ordinals, 0, max(len(index) - 1, 0))]}


def _pixel(feature: Feature) -> np.dtype[Any]:
    return np.dtype(np.uint16 if feature.wide else np.uint8)


def _is_action(key: str) -> bool:
    return key == "action" or key.startswith("action.")


def _done_codes(frames: Columns, last: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """2 where a frame says truncated, else 1 where it says done, else 2 where its episode ends with it."""
    flags = [frames.get(key, np.zeros(len(last), bool)) for key in ("next.done", "next.truncated")]
    done, truncated = (values.reshape(len(last)).astype(bool) for values in flags)
    return np.where(truncated, 2, np.where(done, 1, np.where(last, 2, 0))).astype(np.int64)
