"""Pictures of rows as frames of videos that are written here, part by part, so that an interruption costs one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import read_json_object, reading
from mouse_core.files.writing import make_folder, remove, sync_files, sync_folders, write_file
from mouse_core.formats.columns.blocks import blocks
from mouse_core.formats.columns.digest import DigestedRows, RowDigest
from mouse_core.formats.pictures.changing import FRAME, PixelReader, pieces, with_features
from mouse_core.formats.pictures.kept import PictureEncoding, Pictures, said_after
from mouse_core.video.index import SUFFIX, index_video
from mouse_core.video.writing import VideoCodec, VideoWriter

_JOB = "job.json"
_RATE = 30.0
# A file of frames is read as a whole where an index is made, and lost as a whole where it is damaged.
_MOST_BYTES = 200 * 10**6


@dataclass(frozen=True)
class _Part:
    """Consecutive rows, and the videos of their frames.

    Args:
        rows: How many.
        digest: Of them as they were in the source.
        file: The Arrow file that they are in, with frames for pictures.
        videos: Of each its path and digest.
        sha256: Of the bytes of each file, by its name.
    """

    rows: int
    digest: str
    file: str
    videos: list[list[str]]
    sha256: dict[str, str]

    def is_in(self, folder: Path) -> bool:
        """Whether all files are there as they were written: what is read of them gets other checksums."""
        return all((folder / name).is_file() and _sha256(folder / name) == one for name, one in self.sha256.items())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def encoded_stream(
    stream: Any,
    changed: Mapping[str, tuple[Pictures, PictureEncoding]],
    folder: Path,
    *,
    most_bytes: int,
    progress: bool,
) -> Any:
    """The same rows with the pictures of some columns as frames of videos, which are written first.

    What an interrupted call has written is held against the source and kept.

    Args:
        stream: A ``RowStream``.
        changed: What becomes of which columns; only those that are to be videos count.
        folder: Where rows and videos are written, by one process at a time.
        most_bytes: About how large a video is at most.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: What was written there is of another source, or with other options.
        DataError: The source is damaged, or changed since.
        StorageError: No room; what was written so far is there for the next call.
    """
    changed = {name: one for name, one in changed.items() if one[1].way == "video"}
    if not changed:
        return stream
    job = _Encoding(stream, changed, folder, min(most_bytes, _MOST_BYTES))
    try:
        with progress_bar("encoding", total=stream.rows, unit="rows", enabled=progress) as advance:
            job.run(advance)
    finally:
        if not job.parts:  # nothing to go on from
            remove(folder)
    return stream.replace(
        schema=job.schema,
        batches=job.batches,
        about=job.about.replace(
            videos=(*job.about.videos, *(tuple(video) for part in job.parts for video in part.videos))
        ),
        rows=sum(part.rows for part in job.parts),
        image_roots=(str(folder.resolve()), *stream.image_folders()),
    )


class _Encoding:
    """See ``encoded_stream``."""

    def __init__(
        self, stream: Any, changed: Mapping[str, tuple[Pictures, PictureEncoding]], folder: Path, most_bytes: int
    ) -> None:
        self.stream, self.changed, self.folder, self.most_bytes = stream, changed, folder, most_bytes
        schema = stream.schema
        for name in changed:
            schema = schema.set(schema.get_field_index(name), pa.field(name, FRAME))
        self.schema = with_features(schema, changed)
        frames_stay = any(one.type == FRAME and one.name not in changed for one in schema)
        self.about = said_after(stream.about, changed, frames_stay=frames_stay)
        # No name that the source has, be it of videos that stay or of those that are encoded: rows are read with both.
        folders = stream.image_folders()
        names = chain(["videos"], map("videos-{}".format, count(1)))
        self.base = next(name for name in names if not any(os.path.lexists(os.path.join(one, name)) for one in folders))
        self.parts: list[_Part] = []
        self.done = False
        self.said = {
            "source": stream.path,
            "schema": str(stream.schema.remove_metadata()),
            "ways": {name: [str(kept.codec), *picture.shape] for name, (picture, kept) in changed.items()},
            "most_bytes": most_bytes,
            "base": self.base,
        }
        self._load()

    def run(self, advance: Callable[[int], None]) -> None:
        """Write the parts that are missing; those that are there must hold the source's rows."""
        if self.done:
            advance(sum(part.rows for part in self.parts))
            return
        source = DigestedRows(blocks(self.stream), None, advance)
        for part in self.parts:
            if source.digest_of(part.rows, self.stream.schema) != part.digest:
                raise DataError(
                    f"{self.stream.path}: expected the rows that an interrupted conversion has read, found others; "
                    f"delete {str(self.folder)!r} to begin anew"
                )
        begun = sum(part.rows for part in self.parts)
        following = pieces(source.following(), [picture for picture, _ in self.changed.values()])
        ended = False
        while not ended:
            with _PartWriter(self, len(self.parts)) as writer:
                ended = True
                for first, piece in following:
                    writer.write(begun + first, piece)
                    if writer.bytes >= self.most_bytes:
                        ended = False
                        break
                if writer.rows or not self.parts:
                    self.parts.append(writer.finish())
            self.done = ended
            self._save()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows that were written."""
        for part in self.parts:
            with reading(self.folder / part.file), pa.OSFile(str(self.folder / part.file)) as source:
                yield from pa.ipc.open_stream(source)

    def video_path(self, column: str, number: int) -> str:
        """Where the video of a column lies below the folder, of the part of that number."""
        names = [re.sub(r"[^\w-]", "_", name) for name in self.changed]
        name = names[list(self.changed).index(column)]
        name += f"_{list(self.changed).index(column)}" if names.count(name) > 1 else ""
        return f"{self.base}/{name}/chunk-{number // 1000:03d}/file-{number % 1000:03d}.mp4"

    def frames_per_second(self) -> float:
        """Of the recording, as far as it is known."""
        known = self.stream.about.frames_per_second
        return known[0] if len(known) == 1 and known[0] < 1e4 else _RATE

    def _load(self) -> None:
        """Take over what an interrupted call left behind, and remove what it had not finished."""
        make_folder(self.folder, sync=False)
        file = self.folder / _JOB
        if file.is_file():
            found = read_json_object(file)
            if found.get("said") != json.loads(json.dumps(self.said)):
                raise ConfigError(
                    f"convert: an unfinished conversion of something else, or to other videos, is in "
                    f"{str(self.folder)!r}; finish it, or delete the folder"
                )
            with reading(file):
                written = [_Part(**part) for part in found["parts"]]
            self.parts = list(takewhile(lambda part: part.is_in(self.folder), written))
            self.done = bool(found["done"]) and len(self.parts) == len(written)
        kept = {_JOB, *(name for part in self.parts for name in part.sha256)}
        for one in sorted(self.folder.rglob("*")):
            name = one.relative_to(self.folder).as_posix()
            if one.is_file() and name.removesuffix(SUFFIX) not in kept:
                remove(one)

    def _save(self) -> None:
        state = {"said": self.said, "parts": [vars(part) for part in self.parts], "done": self.done}
        write_file(self.folder / _JOB, json.dumps(state).encode(), only_writer=True)


class _PartWriter:
    """Writes one part.

    Args:
        job: What it is a part of.
        number: Which.
    """

    def __init__(self, job: _Encoding, number: int) -> None:
        self._job, self._number = job, number
        self._reader, self._digest = PixelReader(job.stream), RowDigest(job.stream.schema)
        self._first = len(job.about.videos) + sum(len(part.videos) for part in job.parts)
        self._writers: dict[str, VideoWriter] = {}
        self._name = f"rows/part-{number:05d}.arrow"
        make_folder(job.folder / "rows", sync=False)
        self._open = ExitStack()
        sink = self._open.enter_context(pa.OSFile(str(job.folder / self._name), "wb"))
        self._rows = self._open.enter_context(pa.ipc.new_stream(sink, job.schema))
        self.rows = 0

    @property
    def bytes(self) -> int:
        """Of the largest video so far."""
        return max((writer.bytes for writer in self._writers.values()), default=0)

    def write(self, first: int, batch: pa.RecordBatch) -> None:
        """Add rows, of which the first has that number in the source."""
        self._digest.update(batch)
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, (picture, kept) in self._job.changed.items():
            pixels, there = self._reader.read(picture, columns[name], first)
            columns[name] = self._frames(name, picture, kept.codec or VideoCodec(), pixels, there)
        arrays = [columns[one.name].cast(one.type) for one in self._job.schema]
        self._rows.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._job.schema))
        self.rows += batch.num_rows

    def _frames(self, name: str, picture: Pictures, codec: VideoCodec, pixels: Any, there: Any) -> pa.Array:
        """Encode pictures; the numbers of their frames."""
        video, frame = np.zeros(len(there), np.int32), np.zeros(len(there), np.int32)
        if there.any():
            if name not in self._writers:
                path = self._job.folder / self._job.video_path(name, self._number)
                make_folder(path.parent, sync=False)
                rate = self._job.frames_per_second()
                shape, dtype = picture.shape, picture.dtype
                self._writers[name] = VideoWriter(path, codec, shape, dtype=dtype, frames_per_second=rate)
            writer = self._writers[name]
            video[:] = self._first + list(self._writers).index(name)
            frame[there] = writer.frames + np.arange(there.sum())
            writer.write(pixels if there.all() else pixels[there])
        parts = [pa.array(values) for values in (video, frame)]
        return pa.StructArray.from_arrays(parts, fields=list(FRAME), mask=None if there.all() else pa.array(~there))

    def finish(self) -> _Part:
        """Close the files, hold the videos against what went into them, and see to it that all are on the disk."""
        folder, videos, paths = self._job.folder, [], [self._name]
        for writer in self._writers.values():
            writer.close()
            index = index_video(writer.path)
            if len(index) != writer.frames:
                raise DataError(f"{writer.path}: expected {writer.frames} frames, as were written, found {len(index)}")
            paths.append(Path(writer.path).relative_to(folder).as_posix())
            videos.append([paths[-1], index.digest])
        self._open.close()
        files = [folder / name for name in paths]
        sync_files(files)
        sync_folders(file.parent for file in files)
        sha256 = {name: _sha256(file) for name, file in zip(paths, files, strict=True)}
        return _Part(self.rows, self._digest.hexdigest(), self._name, videos, sha256)

    def __enter__(self) -> _PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.discard()
        self._open.close()
