"""Reads LeRobotDatasets of versions 3 and 2: Parquet files, episodes and camera videos."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import check_seconds
from mouse_core._base.memo import memo
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout
from mouse_core.formats.columns import check_final, rows_at_once, transition_rows
from mouse_core.formats.lerobot._meta import (
    INDEX,
    TIME,
    Description,
    Floats,
    FrameFile,
    Frames,
    Int64s,
    Videos,
    allowance,
    base_of,
    check_action,
    read_description,
)
from mouse_core.formats.rows import open_parquet, parquet_batches

_MOST_SAID = 20


class Looking:
    """Checks all episodes before reading; the findings are sorted by episode.

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
        #: Rows whose time differs from their number divided by the rate; their episodes; and the first in words.
        self.untimely, self.of_untimely, self.first_untimely = 0, 0, ""
        for file in frames.episodes.files:
            self._look(file)
        there = np.flatnonzero(frames.episodes.lengths)
        if len(there) and all(place in self.broken for place in there.tolist()):
            said = "; ".join(dict.fromkeys(self.broken.values()))
            raise DataError(f"{root}: expected an episode that can be read, found none: {said:.1000}")

    def _look(self, frame_file: FrameFile) -> None:
        """Check the episodes of a file of frames."""
        name, first, stop, numbers = frame_file
        file, rows, episodes = self._root / name, np.array(numbers), self._frames.episodes
        everything = [place for place in range(first, stop) if episodes.lengths[place]]
        try:
            found = _table(file)
            if self._skip and found.num_rows > len(rows):  # these rows belong to an unfinished episode
                found = found.slice(0, len(rows))
            if found.num_rows != len(rows):
                raise damaged(file, f"expected {len(rows)} frames, as meta/episodes has it, found {found.num_rows}")
            for place, why in self._frames.unlike(found, rows, file):
                self._break(place, str(damaged(file, why)))
            times = self._frames.times(found, file)
        except (DataError, ConfigError) as error:
            for place in everything:
                self._break(place, str(error), error)
            return
        episode, number = episodes.places(rows)
        untimed = np.flatnonzero(~np.isfinite(times))
        for row in untimed[np.unique(episode[untimed], return_index=True)[1]].tolist():
            self._break(int(episode[row]), f"{file}: expected a {TIME} of frame {number[row]}, found {times[row]}")
        if self._skip:
            try:
                self._look_at_values(file, rows)
            except (DataError, ConfigError) as error:
                for place in everything:
                    self._break(place, str(error), error)
        whole = ~np.isin(episode, list(self.broken))
        self._time(episode[whole], number[whole], times[whole])
        for key in self._cameras:
            for place, why, cause in self._videos.find(key, rows[whole], episode[whole], times[whole]):
                self._break(place, why, cause, key)

    def _look_at_values(self, file: Path, rows: Int64s) -> None:
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
                self._break(place, str(damaged(file, why, at=frames.episodes.called(some, row))))

    def _time(self, episode: Int64s, number: Int64s, times: Floats) -> None:
        """Find rows whose times do not fit the constant rate of the recording."""
        rate = self._frames.described.frames_per_second
        off = np.flatnonzero(np.abs(times - number / rate) > allowance(times, 1 / rate, rate))
        self.untimely += len(off)
        self.of_untimely += len(np.unique(episode[off]))
        if len(off) and not self.first_untimely:
            index, at = self._frames.episodes.index[episode[off[0]]], off[0]
            self.first_untimely = f"frame {number[at]} of episode {index}, at {times[at]:.4f} s"

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield the faults: for each a code, a severity, and a sentence."""
        for place in sorted(self.broken)[:_MOST_SAID]:
            yield "broken-episode", "error", f"episode {self._frames.episodes.index[place]}: {self.broken[place]}"
        if len(self.broken) > _MOST_SAID:
            yield "broken-episode", "error", f"{len(self.broken) - _MOST_SAID} more episodes cannot be read"
        if self.untimely:
            yield (
                "off-rate",
                "warning",
                f"{TIME}: {self.untimely:,} rows of {self.of_untimely:,} episodes were not recorded at the time that "
                f"their frame number and fps ({self._frames.described.frames_per_second:g}) give, "
                f"first {self.first_untimely}",
            )

    def _break(self, place: int, why: str, cause: Exception | None = None, key: str = "") -> None:
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
        raise damaged(file, "expected a file of frames, as meta/episodes has it, found none")
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
    """Read a LeRobotDataset of version 3 or 2.

    The format has a frame for each action, and no observation after the last action.

    Columns of observations (``observation.state``, ``observation.images.<name>``) and ``action`` keep their names.
    ``next.reward`` and ``next.done`` become ``reward`` and ``done``; other columns become ``metadata_<name>``. ``done``
    is 2 where ``next.truncated`` is set, else 1 where ``next.done`` is set, and 2 at other ends of episodes. Without
    ``next.reward``, ``reward`` is 0. Images in Parquet stay encoded.

    Rows refer to frames of the original videos by ``{video, frame}``; a batch decodes the frames that it needs
    (``mouse_core.video``). This function searches the video frame at each row's "timestamp". A missing frame raises a
    DataError.

    Depth images and grey images of more than 8 bits keep the recorded numbers, uint16, in a column with the name of the
    camera. Columns of the type "language" become JSON texts. The stream's ``metadata`` contain ``tasks`` (texts by the
    numbers in ``metadata_task_index``), and the dataset's ``info`` and ``stats``.

    Args:
        path: The dataset's folder.
        final: Treatment of the last action of an episode, whose next observation is not stored: "drop" or "mark".
        cameras: Whether to read images; videos need the extra ``video``.
        skip_broken: Whether to leave out broken episodes: rows, times or frames are missing, shapes differ from the
            features, or files are damaged. ``notes`` name these episodes. All files are read first, and all frames are
            decoded. Of an interrupted recording, all complete episodes are read.
        tolerance: Largest distance in seconds between a video frame and a row's "timestamp", like LeRobot's
            ``tolerance_s``; by default 0.0001, plus the rounding of the numbers.
        batch_rows: Approximate number of rows of a batch; fewer if rows are large.

    Raises:
        ConfigError: The path has no dataset, the format has another version, or ``final`` is missing.
        SchemaError: There is no feature ``action``, or its type cannot be read.
        DataError: A file is damaged; the message names the file.
    """
    root = Path(path)
    if tolerance is not None:
        check_seconds("tolerance (--tolerance)", tolerance)
    check_inside((root / "meta").rglob("*"), root)
    described = read_description(root, skip_broken=skip_broken)
    check_final(final, where=str(root))
    check_action(described, str(root))
    frames = Frames(str(root), described, final=final, cameras=cameras)
    check_inside((root / file.name for file in described.episodes.files), root)
    recorded = [key for key in frames.pictures if described.features[key].dtype == "video"]
    metadata, notes = frames.metadata(), [*_notes(described)]
    found = Videos(root, described, recorded, decode=skip_broken, tolerance=tolerance)
    faults: tuple[tuple[str, str, str], ...] = ()
    if skip_broken or recorded:
        looked = Looking(root, frames, found, recorded, skip_broken=skip_broken)
        broken, faults = looked.broken, tuple(looked.faults())
        frames.skipped = frozenset(broken)
        found.settle(frames.skipped)
        notes += described.lost
        notes += (
            f"episode {described.episodes.index[place]} is left out: {why}" for place, why in sorted(broken.items())
        )
    reader = _Reader(root, frames, batch_rows, found, cut=skip_broken)
    lengths = np.delete(described.episodes.lengths, [*frames.skipped])
    metadata = metadata.replace(
        fields=frames.fields({**frames.encoded, **frames.codes}), videos=found.files if recorded else ()
    )
    return RowStream(
        path=str(root),
        format="lerobot",
        schema=reader.schema,
        batches=partial(_Reader.batches, reader),
        episodes=len(lengths),
        rows=int(lengths.sum() + np.count_nonzero(lengths) * (final == "mark")),
        notes=tuple(notes),
        format_metadata={name: dict(getattr(described, name)) for name in ("info", "tasks", "stats")},
        faults=faults,
        metadata=in_stored_layout(metadata, reader.schema),
        image_roots=(os.path.realpath(base_of(root)),),
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
    """Reads all frames in order.

    Args:
        root: The dataset's folder.
        frames: The conversion of frames to rows.
        batch_rows: See ``read_lerobot``.
        videos: The videos.
        cut: Whether frames after the last episode of a file are left out.
    """

    def __init__(self, root: Path, frames: Frames, batch_rows: int, videos: Videos, *, cut: bool) -> None:
        self.root, self.frames, self.videos, self.cut = root, frames, videos, cut
        features = [one for one in frames.described.features.values() if one.dtype not in ("video", "image")]
        self.batch_rows = rows_at_once(8 * sum(math.prod(one.shape) for one in features), most=batch_rows)

    @memo
    def schema(self) -> pa.Schema:
        """Columns of every batch."""
        files = self._files()
        if not files:
            raise damaged(self.root / "data", "expected frames, found none")
        first = self.root / files[0].name
        with reading(first), open_parquet(first) as opened:
            types = opened.schema_arrow
        return self.frames.schema(types, first)

    def _files(self) -> list[FrameFile]:
        """Return the files of frames that contain episodes to read. Raise DataError if a file is missing."""
        lengths, skipped = self.frames.episodes.lengths, self.frames.skipped
        files = [
            one
            for one in self.frames.episodes.files
            if any(lengths[place] and place not in skipped for place in range(one.first, one.stop))
        ]
        for one in files:
            if not (self.root / one.name).is_file():
                raise damaged(self.root / one.name, "expected a file of frames, as meta/episodes has it, found none")
        return files

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        frames, schema, where = self.frames, self.schema, str(self.root)
        ordinal = -1  # episode of the last row so far
        parts = (
            (frames.seen(columns), frames.brought(columns, last), begins) for columns, begins, last in self._pieces()
        )
        for made in transition_rows(parts, final=frames.final, where=where):
            numbers = ordinal + np.cumsum(made["episode_step"] == 0)
            if len(numbers):
                ordinal = int(numbers[-1])
                yield frames.batch(frames.numbered(made, numbers), schema, where=where)

    def _pieces(self) -> Iterator[tuple[Columns, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
        """Yield frames by feature, and two masks: frames that begin an episode, and frames that end an episode."""
        frames, skipped = self.frames, np.array(sorted(self.frames.skipped), np.int64)
        episodes = frames.episodes
        names = dict.fromkeys([*frames.stored, *INDEX])
        for name, _, _, numbers in self._files():
            file, row, end = self.root / name, numbers.start, numbers.stop
            for batch in parquet_batches(file, self.batch_rows, columns=list(names)):
                if self.cut:
                    batch = batch.slice(0, end - row)
                if row + batch.num_rows > end:
                    more = row + batch.num_rows - end
                    raise damaged(file, f"expected no frames after the last episode, found {more}")
                rows = np.arange(row, row + batch.num_rows)
                row += batch.num_rows
                episode, number = episodes.places(rows)
                if len(skipped) and (left := np.isin(episode, skipped)).any():
                    batch, rows, episode, number = (
                        batch.filter(pa.array(~left)),
                        *(one[~left] for one in (rows, episode, number)),
                    )
                if not len(rows):
                    continue
                frames.check(batch, rows, file)
                called = partial(episodes.called, rows)
                pictures = frames.images(batch, frames.encoded, file, called)
                pictures |= {key: self.videos.codes(key, rows) for key in frames.codes}
                columns = frames.columns(batch, pictures, file, called=called)
                yield columns, number == 0, number == episodes.lengths[episode] - 1
            if row < end:
                (place,), (number,) = episodes.places(np.array([row]))
                wanted = f"{episodes.lengths[place]} frames of episode {episodes.index[place]}"
                raise damaged(file, f"expected {wanted}, found {number}")
