"""Looking through a LeRobotDataset before it is read: which episodes lack rows, times or frames, and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.formats._files.parquet import open_parquet, parquet_batches
from mouse_core.formats._files.video import Floats, allowance
from mouse_core.formats.base import BATCH_ROWS, damaged, reading
from mouse_core.formats.lerobot._frames import INDEX, TIME, Frames
from mouse_core.formats.lerobot._videos import Int64s, Videos

_MOST_SAID = 20


class Looking:
    """What is wrong with episodes, by their place among all.

    Args:
        root: The dataset's folder.
        frames: What its frames are as rows.
        videos: Where those of cameras are.
        cameras: The features whose videos count.
        skip_broken: Whether broken episodes are to be left out; one is an error otherwise.

    Raises:
        ImportError: A video is not indexed yet, and PyAV is not installed.
        DataError: An episode lacks rows, times or frames, or its files are damaged, or not there; names file and
            episode. With ``skip_broken`` only where all do.
    """

    def __init__(self, root: Path, frames: Frames, videos: Videos, cameras: list[str], *, skip_broken: bool) -> None:
        self._root, self._frames, self._videos, self._cameras = root, frames, videos, cameras
        self._skip = skip_broken
        #: Why episodes cannot be read.
        self.broken: dict[int, str] = {}
        #: Rows, and episodes of them, that were not recorded when their number and the rate say; the first in words.
        self.untimely, self.of_untimely, self.first_untimely = 0, 0, ""
        for name, first, stop in frames.files:
            self._look(root / name, first, stop)
        there = np.flatnonzero(frames.lengths)
        if len(there) and all(place in self.broken for place in there.tolist()):
            said = "; ".join(dict.fromkeys(self.broken.values()))
            raise DataError(f"{root}: expected an episode that can be read, found none: {said:.1000}")

    def _look(self, file: Path, first: int, stop: int) -> None:
        """Look through the episodes of a file of frames."""
        everything = [place for place in range(first, stop) if self._frames.lengths[place]]
        begin = int(self._frames.ends[first] - self._frames.lengths[first])
        rows = np.arange(begin, int(self._frames.ends[stop - 1]))
        try:
            found = _table(file)
            if self._skip and found.num_rows > len(rows):  # of episodes that were not finished
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
        episode, number = self._frames.places(rows)
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
            for place, why, cause in self._videos.missing(key, episode[whole], times[whole]):
                self._break(place, why, cause, key)

    def _look_at_values(self, file: Path, rows: Int64s) -> None:
        """Look for episodes of a file whose values are not what their features say."""
        frames, begin = self._frames, 0
        images = frames.held_images()
        for batch in parquet_batches(file, BATCH_ROWS, columns=frames.stored):
            batch = batch.slice(0, len(rows) - begin)
            some = rows[begin : begin + len(batch)]
            begin += len(batch)
            wrong = [frames.unreadable(batch, frames.stored)]
            wrong += [held.unreadable(batch.column(key)) for key, held in images.items()]
            for row, why in chain(*wrong):
                place = int(frames.places(some[row : row + 1])[0][0])
                self._break(place, str(damaged(file, why, at=frames.called(some, row))))

    def _time(self, episode: Int64s, number: Int64s, times: Floats) -> None:
        """Look for rows whose times are not those of a steady recording."""
        rate = self._frames.described.frames_per_second
        off = np.flatnonzero(np.abs(times - number / rate) > allowance(times, 1 / rate, rate))
        self.untimely += len(off)
        self.of_untimely += len(np.unique(episode[off]))
        if len(off) and not self.first_untimely:
            index, at = self._frames.index[episode[off[0]]], off[0]
            self.first_untimely = f"frame {number[at]} of episode {index}, at {times[at]:.4f} s"

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """What is wrong: a code, how bad it is, and a sentence."""
        for place in sorted(self.broken)[:_MOST_SAID]:
            yield "broken-episode", "error", f"episode {self._frames.index[place]}: {self.broken[place]}"
        if len(self.broken) > _MOST_SAID:
            yield "broken-episode", "error", f"{len(self.broken) - _MOST_SAID} more episodes cannot be read"
        if self.untimely:
            yield (
                "off-rate",
                "warning",
                f"{TIME}: {self.untimely:,} rows of {self.of_untimely:,} episodes were not recorded when their number "
                f"and fps ({self._frames.described.frames_per_second:g}) say, first {self.first_untimely}",
            )

    def _break(self, place: int, why: str, cause: Exception | None = None, key: str = "") -> None:
        if not self._skip:
            index = self._frames.index[place]
            raise DataError(
                f"{why}; {f'frames of {key} in ' if key else ''}episode {index} cannot be read"
                f"{' in place' if key else ''}: skip_broken=True leaves out such episodes"
                + (", and videos='pixels' decodes all videos in turn" if key and cause is not None else "")
            ) from cause
        self.broken.setdefault(place, why)


def _table(file: Path) -> pa.RecordBatch:
    """What rows of a file say of which frame they are, and when it was recorded, if they say it."""
    if not file.is_file():
        raise damaged(file, "expected a file of frames, as meta/episodes has it, found none")
    with reading(file), open_parquet(file) as opened:
        names = [*INDEX, *({TIME} & set(opened.schema_arrow.names))]
    batches = list(parquet_batches(file, 64 * BATCH_ROWS, columns=names))
    table = pa.Table.from_batches(batches) if batches else pa.table({name: pa.array([], pa.int64()) for name in names})
    (found,) = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
    return found
