"""Columns of video frames.

A row refers to a frame by video index and frame index; a batch decodes all its frames at once.

The column type is ``struct<video: int32, frame: int32>``: ``video`` is an index into the dataset's list of files
(``DatasetMetadata.videos``), ``frame`` is the index of the frame in the order of display. The value is null in a row
without a frame.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.dtypes import RowError, convert
from mouse_core.errors import DataError, SchemaError
from mouse_core.files.writing import StrPath, link_or_copy, storing
from mouse_core.images.files import find_video
from mouse_core.metadata import read_metadata
from mouse_core.video.decoding import Crop, Decoder, FrameDecoder
from mouse_core.video.index import SUFFIX, VideoIndex, index_video

# Each index maps a file; Linux allows a process about 65,000 maps.
_MOST_INDEXES = 4096
_MOST_THREADS = 8
# Suffixes of MP4 files.
_SUFFIXES = (".mp4", ".m4v", ".mov")


class VideoFiles:
    """The videos of a dataset by index; all columns and threads share a decoder.

    Args:
        files: For each video, the path relative to the folder of the dataset, and the digest of the video's index.
    """

    def __init__(self, files: Sequence[tuple[str, str]]) -> None:
        self.files = tuple(files)
        self._lock = ProcessLock()  # a thread may hold this lock when the process forks
        self._held: OrderedDict[tuple[int, tuple[str, ...]], VideoIndex] = OrderedDict()

    def __eq__(self, other: object) -> bool:
        return self.files == other.files if isinstance(other, VideoFiles) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return VideoFiles, (self.files,)

    def __str__(self) -> str:
        return f"of {len(self.files)} videos {self.digest}"

    @memo
    def digest(self) -> str:
        """The digest of all videos, 32 hexadecimal digits; it does not depend on the paths of the files."""
        return hashlib.sha256("".join(f"{digest} " for _, digest in self.files).encode()).hexdigest()[:32]

    @memo
    def _decoder(self) -> FrameDecoder:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return FrameDecoder(threads=min(_MOST_THREADS, processors))

    def index(self, number: int, roots: Sequence[str]) -> VideoIndex:
        """Return the index of a video.

        Args:
            number: Index of the video.
            roots: The folders (absolute, without links) in which videos are allowed.

        Raises:
            DataError: No video has the index ``number``, or the video's file is outside of ``roots`` or differs from
                the listed digest.
        """
        key = number, tuple(roots)
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found
        if not 0 <= number < len(self.files):
            raise DataError(
                f"expected a video index from 0 to {len(self.files) - 1}, as listed in the dataset, found {number}"
            )
        path, digest = self.files[number]
        found = index_video(find_video(path, roots))
        if found.digest != digest:
            raise DataError(f"{found.path}: expected a video with the digest {digest}, found {found.digest}")
        with self._lock:
            self._held[key] = found
            if len(self._held) > _MOST_INDEXES:
                self._held.popitem(last=False)
        return found

    def shape_of(self, value: dict[str, Any], roots: Sequence[str], crop: Crop | None = None) -> tuple[int, int, int]:
        """Return the shape ``(H, W, C)`` of the frame of a row, or of the frame's crop; C is 1 for greys, else 3."""
        index = self.index(-1 if value["video"] is None else value["video"], roots)
        height, width = (index.height, index.width) if crop is None else crop[2:]
        return height, width, 1 if index.pixel_format.startswith("gray") else 3

    def fill(
        self,
        runs: Sequence[tuple[pa.Array, int, Sequence[str]]],
        shape: tuple[int, ...],
        out: npt.NDArray[Any],
        *,
        fill: float | None,
        pixel: np.dtype[Any],
        crop: Crop | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """Decode the frames of rows into rows of ``out``; frames that depend on the same key frame are read together.

        Args:
            runs: Runs of rows. Each run consists of some rows of a column, the index of the first of these rows in
                ``out``, and the allowed folders of videos.
            shape: ``(H, W, C)`` of a frame.
            out: ``[rows, H * W * C]`` of any dtype, C-contiguous.
            fill: Pixel value for rows that are null; if ``fill`` is None, a null raises an error.
            pixel: The dtype of pixels, uint8 or uint16.
            crop: Part of each frame, ``(top, left, height, width)``, that is resized to ``shape``.
            decoder: The decoder; by default a ``FrameDecoder`` with one thread for each processor.

        Raises:
            RowError: A row is null and ``fill`` is None, or an index is below 0.
            DataError: A frame does not exist, or cannot be decoded; the message names the file.
        """
        decoder = self._decoder if decoder is None else decoder
        which, frames = np.full(len(out), -1), np.full(len(out), -1)
        indexes: list[VideoIndex] = []
        for rows, values, roots in _joined(runs):
            video, frame, there = _numbers(values)
            if not there.all():
                if fill is None:
                    raise RowError(int(rows[~there][0]), "expected a frame, found null")
                out[rows[~there]] = fill
            wrong = there & ((frame < 0) | (video < 0))
            if wrong.any():
                found = f"frame {frame[wrong][0]} of video {video[wrong][0]}"
                raise RowError(int(rows[wrong][0]), f"expected indices of 0 or more, found {found}")
            numbers, place = np.unique(video[there], return_inverse=True)
            which[rows[there]] = len(indexes) + place.reshape(-1)
            frames[rows[there]] = frame[there]
            indexes += [self.index(number, roots) for number in numbers.tolist()]
        if out.dtype == pixel:
            pixels = out.reshape(len(out), *shape)
            decoder.decode(indexes, which, frames, pixels, crop=crop, resize=True)
            return
        decoded = np.zeros((len(out), *shape), pixel)
        decoder.decode(indexes, which, frames, decoded, crop=crop, resize=True)
        rows = np.flatnonzero(frames >= 0)
        out[rows] = convert(decoded[rows].reshape(len(rows), out.shape[1]), out.dtype)


def _joined(
    runs: Sequence[tuple[pa.Array, int, Sequence[str]]],
) -> Iterator[tuple[npt.NDArray[np.int64], pa.Array, Sequence[str]]]:
    """Join runs whose videos are in the same folders; yield the joined runs and their rows of ``out``."""
    by_roots: dict[tuple[str, ...], list[tuple[pa.Array, int]]] = {}
    for values, first, roots in runs:
        by_roots.setdefault(tuple(roots), []).append((values, first))
    for folders, some in by_roots.items():
        arrays = [values for values, _ in some]
        lengths = np.array([len(values) for values in arrays])
        before = np.cumsum(lengths) - lengths
        rows = np.repeat(np.array([first for _, first in some]) - before, lengths) + np.arange(lengths.sum())
        yield rows, pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0], folders


def _numbers(values: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the video index and the frame index of each row, and a mask that is True for rows that are not null."""
    found, there = [], np.asarray(values.is_valid())
    for name in ("video", "frame"):
        column = values.field(name)
        there = there & np.asarray(column.is_valid())
        found.append(column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    return found[0], found[1], there


def videos_of(dataset: Any) -> VideoFiles:
    """Return the videos of a dataset. The dataset may have any type that ``metadata.read_metadata`` accepts.

    Raises:
        SchemaError: The dataset lists no videos.
    """
    files = read_metadata(dataset).videos
    if not files:
        raise SchemaError(
            "expected a list of videos in the metadata (DatasetMetadata(videos=...)), because a column has video "
            "frames, found none"
        )
    return VideoFiles(files)


def carry_videos(videos: Sequence[tuple[str, str]], roots: Sequence[str], folder: StrPath) -> int:
    """Link or copy the videos of a dataset and their indexes into another folder, at the same relative paths.

    Videos are hard-linked, which needs no space. Videos are copied if the file system has no links, or if the folder is
    on another file system. Each video is compared with its listed digest.

    Args:
        videos: Paths and digests, as in ``metadata.DatasetMetadata.videos``.
        roots: The allowed folders (absolute, without links) of the videos.
        folder: The folder to which videos and indexes are linked or copied.

    Returns:
        The total size of the videos in bytes.

    Raises:
        DataError: A video is missing, is outside of ``roots``, has another digest, or does not end in a suffix of MP4
            files.
        StorageError: The folder cannot be written.
    """
    files, total = VideoFiles(videos), 0
    for number, (path, _) in enumerate(videos):
        if not path.lower().endswith(_SUFFIXES):
            raise DataError(f"expected videos that end in one of {list(_SUFFIXES)}, found {path!r}")
        found, target = files.index(number, roots), os.path.join(folder, path)
        with storing(f"video {target}"):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            for end in ("", SUFFIX):
                if os.path.isfile(f"{found.path}{end}") and not os.path.lexists(f"{target}{end}"):
                    link_or_copy(f"{found.path}{end}", f"{target}{end}")
            total += os.stat(target).st_size
    return total
