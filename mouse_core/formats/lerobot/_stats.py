"""Statistics of features as LeRobot keeps them: of every episode, and of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.formats.columns.named import Columns

Stats = dict[str, npt.NDArray[Any]]

_SHARES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
# Of larger pictures every so many pixels count, as many as leave about so many a side.
_LARGE, _KEPT = 300, 150


class EpisodeStats:
    """Counts one episode, whose numbers are held meanwhile, but for pixels.

    Args:
        pictures: The features that are pictures.
    """

    def __init__(self, pictures: Iterable[str]) -> None:
        self._pictures = set(pictures)
        self._held: dict[str, list[npt.NDArray[Any]]] = {}
        self._pixels: dict[str, npt.NDArray[np.int64]] = {}
        self._frames = 0

    def add(self, frames: Columns) -> None:
        """Take in frames, ``[n, ...]`` by feature; texts count for nothing."""
        for key, values in frames.items():
            if key in self._pictures:
                self._pixels[key] = self._pixels.get(key, 0) + _counted(values)
            elif values.dtype.kind in "biuf":
                self._held.setdefault(key, []).append(values)
        self._frames += len(next(iter(frames.values())))

    def result(self) -> dict[str, Stats]:
        """min, max, mean, std, count and quantiles by feature; of pictures ``[C, 1, 1]``, bytes from 0 to 1."""
        found = {key: _of_numbers(np.concatenate(parts)) for key, parts in self._held.items()}
        for key, counts in self._pixels.items():
            found[key] = _of_pixels(counts, self._frames)
        return found


def _of_numbers(values: npt.NDArray[Any]) -> Stats:
    numbers = values.astype(np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    kept = values if values.dtype.kind != "b" else values.astype(np.int64)
    low, high = kept.min(axis=0), kept.max(axis=0)
    found = {
        "min": low.reshape(numbers.shape[1:]),
        "max": high.reshape(numbers.shape[1:]),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
    }
    quantiles = np.quantile(numbers, list(_SHARES.values()), axis=0)
    return found | dict(zip(_SHARES, quantiles, strict=True))


def _counted(pixels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each value came in each channel, ``[C, values]``."""
    step = max(pixels.shape[1:3])
    step = 1 if step < _LARGE else step // _KEPT
    small, values = pixels[:, ::step, ::step], int(np.iinfo(pixels.dtype).max) + 1
    channels = (np.bincount(small[..., k].ravel(), minlength=values) for k in range(pixels.shape[3]))
    return np.stack(list(channels))


def _of_pixels(counts: npt.NDArray[np.int64], frames: int) -> Stats:
    values = np.arange(counts.shape[1]) / (255.0 if counts.shape[1] == 256 else 1.0)
    total = counts.sum(axis=1)
    mean = counts @ values / total
    there = counts > 0
    ends = np.cumsum(counts, axis=1)
    found = {
        "min": values[there.argmax(axis=1)],
        "max": values[counts.shape[1] - 1 - there[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt((counts * (values - mean[:, None]) ** 2).sum(axis=1) / total),
    }
    for name, share in _SHARES.items():
        ranks = share * (total - 1)
        found[name] = values[[np.searchsorted(end, rank, side="right") for end, rank in zip(ends, ranks, strict=True)]]
    return {name: one[:, None, None] for name, one in found.items()} | {"count": np.array([frames])}


def aggregated(episodes: Iterable[Mapping[str, Stats]]) -> dict[str, Stats]:
    """The statistics of all episodes: exact but for quantiles, which are the mean of theirs, as LeRobot has it."""
    total: dict[str, Stats] = {}
    for episode in episodes:
        for key, new in episode.items():
            total[key] = new if key not in total else _together(total[key], new)
    return total


def _together(one: Stats, other: Stats) -> Stats:
    count = one["count"] + other["count"]
    share = other["count"] / count
    change = other["mean"] - one["mean"]
    squares = one["std"] ** 2 * (1 - share) + other["std"] ** 2 * share + change**2 * share * (1 - share)
    found = {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + change * share,
        "std": np.sqrt(squares),
        "count": count,
    }
    return found | {name: one[name] + (other[name] - one[name]) * share for name in _SHARES}
