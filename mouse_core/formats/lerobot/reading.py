"""Reads LeRobotDatasets of version 3: Parquet files, episodes and camera videos."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.checks import check_seconds
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
                raise damaged(file, f"expected {len(rows)} frames, as meta/episodes states, found {found.num_rows}")
            for place, why in self._frames.unlike(found, rows, file):
                self._break(place, str(damaged(file, why)))
            times = self._frames.times(found, file)
        except (DataError, ConfigError) as error:
            for place in everything:
                self._break(place, str(error), error)
            return
        episode, number = episodes.places(rows)
        untimed = np.flatnonzero(~np.isfinite(times)) if self._cameras else np.zeros(0, np.int64)
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
        for place in sorted(self.broken)[:_MOST_SAID]:
            yield "broken-episode", "error", f"episode {self._frames.episodes.index[place]}: {self.broken[place]}"
        if len(self.broken) > _MOST_SAID:
            yield "broken-episode", "error", f"{len(self.broken) - _MOST_SAID} more episodes cannot be read"
        if self.untimely:
            yield (
                "off-rate",
                "warning",
                f"{TIME}: {self.untimely:,} rows of {self.of_untimely:,} episodes have other times than their frame "
                f"number and fps ({self._frames.described.frames_per_second:g}) give; "
                f"the first is {self.first_untimely}",
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
    check_final(final, where=str(root))
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
        (frames.seen(columns), frames.brought(columns, last), begins)
        for columns, begins, last in _pieces(root, frames, files, videos, batch_rows)
    )
    for made in transition_rows(parts, final=frames.final, where=str(root)):
        numbers = ordinal + np.cumsum(made["episode_step"] == 0)
        if len(numbers):
            ordinal = int(numbers[-1])
            yield frames.batch(frames.numbered(made, numbers), schema, where=str(root))


def _pieces(
    root: Path, frames: Frames, files: Sequence[FrameFile], videos: Videos, batch_rows: int
) -> Iterator[tuple[Columns, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """Yield frames by feature, and two masks: frames that begin an episode, and frames that end an episode."""
    features = [one for one in frames.described.features.values() if one.dtype not in ("video", "image")]
    most = rows_at_once(8 * sum(math.prod(one.shape) for one in features), most=batch_rows)
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
            columns = frames.columns(batch, pictures, root / name, called=called)
            yield columns, number == 0, number == episodes.lengths[episode] - 1
