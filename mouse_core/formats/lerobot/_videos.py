"""The mapping from every frame of a LeRobotDataset to a video and a frame in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged
from mouse_core.formats._files.video import Floats, allowance, missed, nearest
from mouse_core.formats.lerobot._meta import Description, Feature, Int64s
from mouse_core.formats.pictures import FRAME
from mouse_core.images.files import find_video
from mouse_core.video.decoding import FrameDecoder, undecodable
from mouse_core.video.index import VideoIndex, index_video

# A video and a frame as one number: (video + 1) * 2**32 + frame. 0 is no frame.
_FRAMES = 1 << 32


class Videos:
    """The videos of a dataset; the index of a video is read, or made, when the first frame of it is searched.

    The time of a frame in its video is the time at which the episode begins there, plus the row's "timestamp".

    Args:
        root: The dataset's folder.
        described: The metadata.
        cameras: The features with videos.
        decode: Whether to decode all frames, and count frames that cannot be decoded as missing.
        tolerance: See ``allowance``.
    """

    def __init__(
        self,
        root: Path,
        described: Description,
        cameras: Sequence[str],
        *,
        decode: bool = False,
        tolerance: float | None = None,
    ) -> None:
        self._root, self._described, self._tolerance = root, described, tolerance
        videos = described.episodes.videos
        self._names = sorted({name for key in cameras for name, _ in videos[key]})
        places = {name: place for place, name in enumerate(self._names)}
        # By camera: for each episode the number of its video, and the time at which the episode begins there.
        self._where = {
            key: (np.array([places[name] for name, _ in videos[key]]), np.array([begin for _, begin in videos[key]]))
            for key in cameras
        }
        self._decode, self._undecodable = decode, dict[int, dict[int, str]]()
        self._digests: dict[int, str] = {}
        self._failed: dict[int, Exception] = {}
        self._held: dict[str, tuple[int, VideoIndex, Floats]] = {}
        self._decoder = FrameDecoder()
        self._number = np.arange(len(self._names))

    def missing(self, key: str, episode: Int64s, times: Floats) -> Iterator[tuple[int, str, Exception | None]]:
        """Yield the position of each episode that lacks a frame of a camera, the reason, and the error of a file.

        Args:
            key: The camera.
            episode: Position of the episode of each frame.
            times: Time of each frame in its episode, in seconds.
        """
        of = self._where[key][0][episode]
        for video in np.unique(of).tolist():
            mine = np.flatnonzero(of == video)
            try:
                index, shown = self._opened(key, video)
            except (DataError, ConfigError) as error:
                yield from ((place, str(error), error) for place in np.unique(episode[mine]).tolist())
                continue
            self._digests[video] = index.digest
            wanted, found, there = self._found(key, episode[mine], times[mine], index, shown)
            lost = np.flatnonzero(~there)
            # For each episode the frame with the largest distance.
            lost = lost[np.argsort(-np.abs(shown[found[lost]] - wanted[lost]), kind="stable")]
            places, first = np.unique(episode[mine[lost]], return_index=True)
            for place, at in zip(places.tolist(), lost[first].tolist(), strict=True):
                rate = self._described.frames_per_second
                why = missed(wanted[at], shown[found[at]], rate, f" ({len(shown)} frames)")
                yield place, f"{index.path}: {why}", None
            if self._decode:
                if video not in self._undecodable:
                    self._undecodable[video] = undecodable(index)
                broken = self._undecodable[video]
                for at in np.flatnonzero(np.isin(found, list(broken))).tolist():
                    yield int(episode[mine[at]]), broken[int(found[at])], None

    def settle(self, skipped: Collection[int]) -> None:
        """Number the videos of the episodes that are not left out; ``files`` lists only these."""
        there = self._described.episodes.lengths > 0
        there[list(skipped)] = False
        used = {number for of, _ in self._where.values() for number in np.unique(of[there]).tolist()}
        self._number[sorted(used)] = np.arange(len(used))
        self._used = sorted(used)

    @property
    def files(self) -> list[tuple[str, str]]:
        """Path and digest of each video, as in ``about.About``."""
        return [(self._below(self._names[place]), self._digests[place]) for place in self._used]

    def codes(self, key: str, episode: Int64s, times: Floats) -> Int64s:
        """Return the numbers of frames for ``frames_column``; arguments as in ``missing``."""
        made = np.empty(len(times), np.int64)
        for run, video, _, found in self._runs(key, episode, times):
            made[run] = (self._number[video] + 1) * _FRAMES + found
        return made

    def pixels(self, key: str, episode: Int64s, times: Floats) -> npt.NDArray[Any]:
        """Return the pixels of frames, ``[n, H, W, C]``; arguments as in ``missing``."""
        feature = self._described.features[key]
        made = np.zeros((len(times), *feature.shape), np.uint16 if feature.wide else np.uint8)
        for run, _, index, found in self._runs(key, episode, times):
            self._decoder.decode([index], np.zeros(len(found), np.int64), found, made[run])
        return made

    def _runs(self, key: str, episode: Int64s, times: Floats) -> Iterator[tuple[slice, int, VideoIndex, Int64s]]:
        """Yield runs of frames of one video: slice of the frames, video, index, and numbers of frames in the video."""
        of = self._where[key][0][episode]
        cuts = (np.flatnonzero(of[1:] != of[:-1]) + 1).tolist()
        for first, stop in zip([0, *cuts], [*cuts, len(of)], strict=True):
            if stop > first:
                run, video = slice(first, stop), int(of[first])
                index, shown = self._opened(key, video)
                yield run, video, index, self._found(key, episode[run], times[run], index, shown)[1]

    def _found(
        self, key: str, episode: Int64s, times: Floats, index: VideoIndex, shown: Floats
    ) -> tuple[Floats, Int64s, npt.NDArray[np.bool_]]:
        """Return the wanted times in a video, the nearest frames, and whether these are within the tolerance."""
        wanted = self._where[key][1][episode] + times
        found = nearest(shown, wanted)
        rate = self._described.frames_per_second
        allowed = allowance(wanted, float(index.time_base), rate, self._tolerance)
        return wanted, found, np.abs(shown[found] - wanted) <= allowed

    def _opened(self, key: str, video: int) -> tuple[VideoIndex, Floats]:
        """Return the index of a video, and the times of its frames."""
        if video in self._failed:
            raise self._failed[video]
        held = self._held.get(key)
        if held is None or held[0] != video:
            try:
                index = index_video(
                    find_video(self._below(self._names[video]), [os.path.realpath(base_of(self._root))])
                )
                _check_shape(index, self._described.features[key])
            except (DataError, ConfigError) as error:
                self._failed[video] = error
                raise
            held = self._held[key] = video, index, index.times
        return held[1], held[2]

    def _below(self, name: str) -> str:
        return os.path.relpath(self._root / name, base_of(self._root))


def base_of(root: Path) -> Path:
    """Return the folder of all files: the dataset, or in the Hub's cache the folder of snapshot and blobs."""
    above = root.absolute().parent
    return above.parent if above.name == "snapshots" and (above.parent / "blobs").is_dir() else root


def _check_shape(index: VideoIndex, feature: Feature) -> None:
    if (index.height, index.width) != feature.shape[:2]:
        wanted = "x".join(map(str, feature.shape[:2]))
        raise damaged(index.path, f"expected frames of {wanted}, found {index.height}x{index.width}")


def frames_column(codes: Int64s) -> pa.StructArray:
    """Return the column ``{video, frame}`` of numbers from ``Videos.codes``."""
    none = codes == 0
    parts = [pa.array(part.astype(np.int32), mask=none) for part in (codes // _FRAMES - 1, codes % _FRAMES)]
    return pa.StructArray.from_arrays(parts, fields=list(FRAME))
