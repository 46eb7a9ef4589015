"""Encode pictures of rows as frames of videos, part by part; an interruption loses one part."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About
from mouse_core.errors import DataError
from mouse_core.files.reading import reading
from mouse_core.files.writing import make_folder, remove
from mouse_core.formats._files.jobs import Job, Part
from mouse_core.formats.pictures.changing import (
    FRAME,
    PictureEncoding,
    Pictures,
    PixelReader,
    pieces,
    said_after,
    with_features,
)
from mouse_core.video.index import index_video
from mouse_core.video.writing import VideoCodec, VideoWriter

_RATE = 30.0
# A file of frames is read as a whole where an index is made, and lost as a whole where it is damaged.
_MOST_BYTES = 200 * 10**6

Changed = Mapping[str, tuple[Pictures, PictureEncoding]]


def encoded_stream(stream: Any, changed: Changed, folder: Path, *, most_bytes: int, progress: bool) -> Any:
    """Return the same rows with the pictures of some columns as frames of videos, which are written first.

    Parts that an interrupted call wrote are kept.

    Args:
        stream: A ``RowStream``.
        changed: New encodings by column; only columns that become videos count.
        folder: Folder of the parts, rows and videos.
        most_bytes: About the largest size of a video.
        progress: Whether a bar shows the progress.

    Raises:
        ConfigError: The folder holds parts of another source, or with other options.
        DataError: The source is damaged.
        StorageError: Files cannot be written.
    """
    changed = {name: one for name, one in changed.items() if one[1].way == "video"}
    if not changed:
        return stream
    schema = stream.schema
    for name in changed:
        schema = schema.set(schema.get_field_index(name), pa.field(name, FRAME))
    frames_stay = any(one.type == FRAME and one.name not in changed for one in schema)
    schema, about = with_features(schema, changed), said_after(stream.about, changed, frames_stay=frames_stay)
    # Rows name videos that stay and videos that are encoded, so the source must not have a folder of this name.
    names = chain(["videos"], map("videos-{}".format, count(1)))
    roots = stream.image_folders()
    base = next(name for name in names if not any(os.path.lexists(os.path.join(root, name)) for root in roots))
    fingerprint = {
        "source": stream.path,
        "schema": str(stream.schema.remove_metadata()),
        "videos": {name: [str(kept.codec), *picture.shape] for name, (picture, kept) in changed.items()},
        "most_bytes": min(most_bytes, _MOST_BYTES),
        "base": base,
    }
    with Job(folder, "convert", fingerprint) as job:

        def begin(number: int, row: int) -> _PartWriter:
            first = len(about.videos) + sum(len(part.facts) for part in job.parts.values())
            return _PartWriter(folder, stream, changed, schema, base, number, row, first)

        cut = partial(pieces, pictures=[picture for picture, _ in changed.values()])
        try:
            with progress_bar("encoding", total=stream.rows, unit="rows", enabled=progress) as advance:
                if job.complete:
                    advance(job.rows)
                else:
                    most = min(most_bytes, _MOST_BYTES)
                    job.write_stream(stream, begin, most_bytes=most, advance=advance, cut=cut)
        finally:
            if not job.parts:
                remove(folder)
    parts = [*job.parts.values()]
    return stream.replace(
        schema=schema,
        batches=partial(_batches, folder, parts),
        about=about.replace(videos=(*about.videos, *(tuple(video) for part in parts for video in part.facts))),
        rows=job.rows,
        image_roots=(str(folder.resolve()), *roots),
    )


def _batches(folder: Path, parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        file = folder / next(iter(part.files))
        with reading(file), pa.OSFile(str(file)) as source:
            yield from pa.ipc.open_stream(source)


class _PartWriter:
    """Writes one part: an Arrow file of rows, and a video for each column of pictures.

    Args:
        folder: Folder of the job.
        stream: The source.
        changed: Columns that become videos.
        schema: Schema of the rows with frames.
        base: Folder of the videos in ``folder``.
        number: Number of the part.
        row: Number of the first row in the source.
        first: Number of the first video of the part among all videos.
    """

    def __init__(
        self,
        folder: Path,
        stream: Any,
        changed: Changed,
        schema: pa.Schema,
        base: str,
        number: int,
        row: int,
        first: int,
    ) -> None:
        self._folder, self._changed, self._schema = folder, changed, schema
        self._base, self._number, self._row, self._first = base, number, row, first
        self._reader, self._rate = PixelReader(stream), _rate(stream.about)
        self._writers: dict[str, VideoWriter] = {}
        self._name = f"rows/part-{number:05d}.arrow"
        make_folder(folder / "rows", sync=False)
        self._open = ExitStack()
        sink = self._open.enter_context(pa.OSFile(str(folder / self._name), "wb"))
        self._rows = self._open.enter_context(pa.ipc.new_stream(sink, schema))

    @property
    def bytes(self) -> int:
        """Size of the largest video so far."""
        return max((writer.bytes for writer in self._writers.values()), default=0)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, (picture, kept) in self._changed.items():
            pixels, there = self._reader.read(picture, columns[name], self._row)
            columns[name] = self._frames(name, picture, kept.codec or VideoCodec(), pixels, there)
        arrays = [columns[one.name].cast(one.type) for one in self._schema]
        self._rows.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._row += batch.num_rows

    def _frames(self, name: str, picture: Pictures, codec: VideoCodec, pixels: Any, there: Any) -> pa.Array:
        """Encode pictures; return the numbers of video and frame of each row."""
        video, frame = np.zeros(len(there), np.int32), np.zeros(len(there), np.int32)
        if there.any():
            if name not in self._writers:
                path = self._folder / self._video_path(name)
                make_folder(path.parent, sync=False)
                shape, dtype = picture.shape, picture.dtype
                self._writers[name] = VideoWriter(path, codec, shape, dtype=dtype, frames_per_second=self._rate)
            writer = self._writers[name]
            video[:] = self._first + list(self._writers).index(name)
            frame[there] = writer.frames + np.arange(there.sum())
            writer.write(pixels if there.all() else pixels[there])
        parts = [pa.array(values) for values in (video, frame)]
        return pa.StructArray.from_arrays(parts, fields=list(FRAME), mask=None if there.all() else pa.array(~there))

    def _video_path(self, column: str) -> str:
        """Path of the video of a column in the folder of the job."""
        names = [re.sub(r"[^\w-]", "_", name) for name in self._changed]
        place = list(self._changed).index(column)
        name = names[place] + (f"_{place}" if names.count(names[place]) > 1 else "")
        return f"{self._base}/{name}/chunk-{self._number // 1000:03d}/file-{self._number % 1000:03d}.mp4"

    def finish(self) -> tuple[list[str], list[list[str]]]:
        """Close the files; return their names, and path and digest of each video after counting its frames."""
        videos = []
        for writer in self._writers.values():
            writer.close()
            index = index_video(writer.path)
            if len(index) != writer.frames:
                raise DataError(f"{writer.path}: expected {writer.frames} frames, as were written, found {len(index)}")
            videos.append([Path(writer.path).relative_to(self._folder).as_posix(), index.digest])
        self._open.close()
        return [self._name, *(path for path, _ in videos)], videos

    def __enter__(self) -> _PartWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.discard()
        self._open.close()


def _rate(about: About) -> float:
    """Frames per second of the recording if there is one rate, else 30."""
    known = about.frames_per_second
    return known[0] if len(known) == 1 and known[0] < 1e4 else _RATE
