"""Which frame of which video every frame of a LeRobotDataset is, checked against the frames that are there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged
from mouse_core.formats.lerobot._meta import Description, Feature
from mouse_core.images.files import find_video
from mouse_core.spec import Field
from mouse_core.video.index import VideoIndex, index_video

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FRAME = pa.struct([("video", pa.int32()), ("frame", pa.int32())])
# A video and a frame as one number, on the way to rows: 0, which rows have that show nothing, is no frame.
_FRAMES = 1 << 32


class Videos:
    """The videos of a dataset, each of which is indexed, or its index read, when this is made.

    Args:
        root: The dataset's folder.
        described: What it says of itself.
        cameras: The features whose videos count.
        skip_broken: Whether episodes that lack frames are left out; one is an error otherwise.

    Raises:
        ImportError: A video is not indexed yet, and PyAV is not installed.
        DataError: An episode lacks frames, or its video is damaged, or not there; names file and episode.
    """

    def __init__(self, root: Path, described: Description, cameras: Sequence[str], *, skip_broken: bool) -> None:
        self._root, self._described, self._cameras = root, described, cameras
        self._length = np.array(described.episodes.length, np.int64)
        names = sorted({name for key in cameras for name, _ in described.episodes.videos[key]})
        self._number = {name: number for number, name in enumerate(names)}
        self._digests = [""] * len(names)
        self._times: tuple[str, Floats] = ("", np.zeros(0))
        #: Why episodes are left out, by their place among all.
        self.broken: dict[int, str] = {}
        for key in cameras:
            self._check(key, skip_broken)

    @property
    def files(self) -> list[tuple[str, str]]:
        """The videos as ``about.About`` lists them."""
        return [(self._below(name), digest) for name, digest in zip(self._number, self._digests, strict=True)]

    def fields(self, columns: Mapping[str, str]) -> list[Field]:
        """How batches have the frames of columns, by feature: rows that show nothing are zeros."""
        made = []
        for key, column in columns.items():
            feature = self._described.features[key]
            name, dtype, bounds = column, "uint16" if feature.wide else None, None
            if column == "observation_image":  # which has a standard field
                name, dtype, bounds = "obs_image", "int64", (0, 255)
            # Of colours the shape is that of the files, and another one that is asked for has them resized.
            shape = feature.shape if feature.shape[2] == 1 else None
            made.append(Field(name, column, dtype=dtype, bounds=bounds, shape=shape, image=True, fill=0))
        return made

    def codes(self, key: str, place: int, numbers: Int64s) -> Int64s:
        """Frames of an episode, by its place among all, as numbers that ``column_of`` takes."""
        name, begin = self._described.episodes.videos[key][place]
        if name != self._times[0]:
            self._times = name, self._index(name).times
        found, _ = self._found(self._times[1], begin + numbers / self._described.frames_per_second)
        return (self._number[name] + 1) * _FRAMES + found

    def _check(self, key: str, skip_broken: bool) -> None:
        """Look for all frames of a camera, video by video."""
        episodes, by_file = self._described.episodes, dict[str, list[int]]()
        for place, (name, _) in enumerate(episodes.videos[key]):
            if self._length[place]:
                by_file.setdefault(name, []).append(place)
        for name, places in by_file.items():
            try:
                index = self._index(name)
                _check_shape(index, self._described.features[key])
            except (DataError, ConfigError) as error:
                self._break(places, key, str(error), skip_broken, error)
                continue
            self._digests[self._number[name]] = index.digest
            times, lengths = index.times, self._length[places]
            ends = np.cumsum(lengths)
            number = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
            begins = np.array([episodes.videos[key][place][1] for place in places])
            wanted = np.repeat(begins, lengths) + number / self._described.frames_per_second
            _, there = self._found(times, wanted)
            for first in np.flatnonzero(~there):
                at = int(np.searchsorted(ends, first, side="right"))
                if places[at] not in self.broken:
                    why = f"{index.path}: expected a frame at {wanted[first]:.3f} s, found none ({len(times)} frames)"
                    self._break([places[at]], key, why, skip_broken)

    def _break(
        self, places: Sequence[int], key: str, why: str, skip_broken: bool, cause: Exception | None = None
    ) -> None:
        index = self._described.episodes.index
        if not skip_broken:
            raise DataError(
                f"{why}; frames of {key} in episode {index[places[0]]} cannot be read in place: skip_broken=True "
                "leaves out such episodes, and videos='pixels' decodes all videos in turn"
            ) from cause
        for place in places:
            self.broken.setdefault(place, f"episode {index[place]} is left out: {why}")

    def _index(self, name: str) -> VideoIndex:
        return index_video(find_video(self._below(name), [os.path.realpath(base_of(self._root))]))

    def _below(self, name: str) -> str:
        return os.path.relpath(self._root / name, base_of(self._root))

    def _found(self, times: Floats, wanted: Floats) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """The first frame from half a period before each time on, and whether it is no more than half a period late."""
        half = 0.5 / self._described.frames_per_second
        found = np.searchsorted(times, wanted - half)
        there = found < len(times)
        there[there] = times[found[there]] <= wanted[there] + half
        return found, there


def base_of(root: Path) -> Path:
    """The folder that all files lie in: the dataset's, or where it is a snapshot in the Hub's cache, which has links to
    its files, that of both.
    """
    above = root.absolute().parent
    return above.parent if above.name == "snapshots" and (above.parent / "blobs").is_dir() else root


def _check_shape(index: VideoIndex, feature: Feature) -> None:
    if (index.height, index.width) != feature.shape[:2]:
        wanted = "x".join(map(str, feature.shape[:2]))
        raise damaged(index.path, f"expected frames of {wanted}, found {index.height}x{index.width}")


def with_frames(schema: pa.Schema, columns: Iterable[str]) -> pa.Schema:
    """A schema of which some columns are frames."""
    named = set(columns)
    return pa.schema([pa.field(one.name, FRAME) if one.name in named else one for one in schema])


def column_of(codes: Int64s) -> pa.StructArray:
    """Frames as a column of rows has them."""
    none = codes == 0
    parts = [pa.array(part.astype(np.int32), mask=none) for part in (codes // _FRAMES - 1, codes % _FRAMES)]
    return pa.StructArray.from_arrays(parts, fields=list(FRAME))
