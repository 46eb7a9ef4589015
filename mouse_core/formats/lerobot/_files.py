"""The files of a LeRobotDataset as it is written: frames, videos, episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core._base.threads import THREADS
from mouse_core.errors import DataError
from mouse_core.formats._files.parquet import parquet_batches
from mouse_core.formats.base import BATCH_ROWS
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.columns.named import Columns, to_arrow
from mouse_core.formats.lerobot._stats import Stats
from mouse_core.formats.pictures.changing import IMAGE
from mouse_core.formats.pictures.kept import Kept
from mouse_core.images.pixels import encode_jpeg, encode_png
from mouse_core.video.index import SUFFIX, index_video
from mouse_core.video.writing import VideoWriter


class Files:
    """Writes episodes one after the other; none is in two files.

    Args:
        root: The dataset's folder.
        rate: Frames a second.
        most_bytes: How large a file of frames gets, about, and a video twice as large.
    """

    CHUNK: ClassVar[int] = 1000

    def __init__(self, root: Path, rate: float, most_bytes: int) -> None:
        self.root, self.rate, self.most_bytes = root, rate, most_bytes
        #: Frames of the episode that is being written, and their tasks.
        self.length = 0
        self.tasks: list[npt.NDArray[np.int64]] = []
        self._data: Any = None
        self._sink: Any = None
        self._numbers = {"data": -1, "videos": -1}
        self._videos: dict[str, VideoWriter] = {}
        self._begins: dict[str, int] = {}
        self._written: dict[str, int] = {}  # videos that are whole, with their frames
        self._names: list[str] = []
        self._digest: RowDigest | None = None
        self._open = ExitStack()
        self._pool = self._open.enter_context(ThreadPoolExecutor(THREADS))

    @property
    def count(self) -> int:
        """How many files of frames and videos there are."""
        return len(self._names) + len(self._written)

    @staticmethod
    def schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
        """The columns of files of frames."""
        fields = []
        for key, feature in features.items():
            if feature["dtype"] == "video":
                continue
            data_type = IMAGE if feature["dtype"] == "image" else pa.string()
            if feature["dtype"] not in ("image", "string"):
                data_type = pa.from_numpy_dtype(np.dtype(feature["dtype"]))
                for size in reversed(feature["shape"] if feature["shape"] != [1] else []):
                    data_type = pa.list_(data_type, size)
            fields.append(pa.field(key, data_type))
        return pa.schema(fields)

    def write(self, frames: Columns, kept: Mapping[str, Kept]) -> None:
        """Add frames of the episode, ``[n, ...]`` by feature."""
        if not self.length:
            self._begin()
        columns: dict[str, pa.Array] = {}
        for key, values in frames.items():
            if key not in kept:
                columns[key] = to_arrow(values.reshape(len(values), *_inner(values)), where=key)
            elif kept[key].way == "video":
                self._video(key, kept[key], values).write(values)
            else:
                columns[key] = self._images(kept[key], values)
        batch = pa.RecordBatch.from_pydict(columns)
        if self._data is None:
            path = self._path("data", self._numbers["data"], "parquet")
            self._sink = self._open.enter_context(pa.OSFile(str(path), "wb"))
            self._data = pq.ParquetWriter(self._sink, batch.schema, compression="zstd", write_page_checksum=True)
            self._open.callback(_discard, self._data)
            self._names.append(path.relative_to(self.root).as_posix())
        self._digest = self._digest or RowDigest(batch.schema)
        self._digest.update(batch)
        self._data.write_batch(batch)
        self.tasks.append(frames["task_index"])
        self.length += batch.num_rows

    def _begin(self) -> None:
        """Begin an episode, and new files where those that are open are large."""
        self.tasks = []
        if self._data is None or self._sink.tell() >= self.most_bytes:
            self._close_data()
            self._numbers["data"] += 1
        if any(video.bytes >= 2 * self.most_bytes for video in self._videos.values()) or self._numbers["videos"] < 0:
            self._close_videos()
            self._numbers["videos"] += 1
        self._begins = {key: video.frames for key, video in self._videos.items()}

    def _video(self, key: str, kept: Kept, values: npt.NDArray[Any]) -> VideoWriter:
        if key not in self._videos:
            path = self._path(f"videos/{key}", self._numbers["videos"], "mp4")
            assert kept.codec is not None
            shape, dtype = values.shape[1:], values.dtype
            writer = VideoWriter(path, kept.codec, shape, dtype=dtype, frames_per_second=self.rate)
            self._videos[key] = writer
            self._open.callback(writer.discard)
            self._begins[key] = 0
        return self._videos[key]

    def _images(self, kept: Kept, values: npt.NDArray[Any]) -> pa.Array:
        png = partial(encode_png, dtype=values.dtype)
        encoded = list(self._pool.map(png if kept.way == "png" else partial(encode_jpeg, quality=kept.quality), values))
        parts = [pa.array(encoded, pa.binary()), pa.nulls(len(encoded), pa.string())]
        return pa.StructArray.from_arrays(parts, fields=list(IMAGE))

    def end_episode(self) -> dict[str, Any] | None:
        """Where the episode's frames are; None where it has none."""
        if not self.length:
            return None
        place: dict[str, Any] = {"length": self.length, **self._place("data", self._numbers["data"])}
        for key, begin in self._begins.items():
            place |= self._place(f"videos/{key}", self._numbers["videos"])
            place[f"videos/{key}/from_timestamp"] = begin / self.rate
            place[f"videos/{key}/to_timestamp"] = (begin + self.length) / self.rate
        self.length = 0
        return place

    def _place(self, name: str, number: int) -> dict[str, int]:
        return {f"{name}/chunk_index": number // self.CHUNK, f"{name}/file_index": number % self.CHUNK}

    def _path(self, folder: str, number: int, suffix: str) -> Path:
        place = f"chunk-{number // self.CHUNK:03d}/file-{number % self.CHUNK:03d}.{suffix}"
        path = self.root / folder / place
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

    def close(self, schema: pa.Schema) -> str:
        """Write what is still open; the digest of all frames."""
        self._close_data()
        self._close_videos()
        return (self._digest or RowDigest(schema)).hexdigest()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    # ------------------------------------------------------------------ what is said of them

    def videos_about(self) -> dict[str, dict[str, Any]]:
        """What LeRobot says of the videos of a camera, by feature; each was looked through."""
        found: dict[str, dict[str, Any]] = {}
        for path, frames in self._written.items():
            index = index_video(path)
            if len(index) != frames:
                raise DataError(f"{path}: expected {frames} frames, as were written, found {len(index)}")
            key = Path(path).relative_to(self.root / "videos").parts[0]
            grey = index.pixel_format.startswith("gray")
            found[key] = {
                "video.height": index.height,
                "video.width": index.width,
                "video.codec": index.codec,
                "video.pix_fmt": index.pixel_format,
                "video.is_depth_map": grey and index.pixel_format != "gray",
                "video.fps": int(self.rate) if self.rate == int(self.rate) else self.rate,
                "video.channels": 1 if grey else 3,
                "has_audio": False,
            }
        return found

    def write_meta(
        self, episodes: Sequence[Mapping[str, Any]], stats: Sequence[Mapping[str, Stats]], tasks: Sequence[str]
    ) -> None:
        """Write the tables of episodes, with their statistics, and of tasks."""
        folder = self.root / "meta" / "episodes" / "chunk-000"
        folder.mkdir(parents=True)
        rows = []
        for episode, some in zip(episodes, stats, strict=True):
            row = {**episode, **self._place("meta/episodes", 0)}
            for key, one in some.items():
                row |= {f"stats/{key}/{name}": values.tolist() for name, values in one.items()}
            rows.append(row)
        pq.write_table(pa.Table.from_pylist(rows), folder / "file-000.parquet", write_page_checksum=True)
        import pandas  # type: ignore[import-untyped]

        table = pa.Table.from_pandas(pandas.DataFrame({"task_index": range(len(tasks))}, index=list(tasks)))
        pq.write_table(table, self.root / "meta" / "tasks.parquet", write_page_checksum=True)

    def check(self, schema: pa.Schema, digest: str) -> None:
        """Raise DataError unless the files of frames, read back, have what was written."""
        found = RowDigest(schema)
        for name in self._names:
            for batch in parquet_batches(self.root / name, BATCH_ROWS, columns=schema.names):
                found.update(batch)
        if found.hexdigest() != digest:
            raise DataError(f"{self.root}: expected frames with the digest {digest}, found {found.hexdigest()}")
        for path in self.root.rglob(f"*{SUFFIX}"):
            path.unlink()  # whoever opens the dataset has one of their own


def _discard(writer: Any) -> None:
    """Close a file whatever is in it by now."""
    with suppress(OSError, pa.ArrowException):
        writer.close()


def _inner(values: npt.NDArray[Any]) -> tuple[int, ...]:
    """The shape of a value; one number is a number."""
    return () if values.shape[1:] == (1,) else values.shape[1:]
