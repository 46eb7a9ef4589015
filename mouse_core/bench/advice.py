"""Recommendations for a loader, derived from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mouse_core.batches.source import BatchSource
from mouse_core.sampling import BlockWindows

# A setting counts as better if it is faster by more than this factor.
_NOTICEABLE = 1.1


@dataclass(frozen=True)
class Line:
    """Figures of one way to get batches.

    Args:
        name: Name of the way.
        framework: "numpy", "torch" or "jax"; empty for the floor and for ``source[i]``.
        workers: Number of threads of the loader; None without a loader.
        batches_per_second: Median number of batches per second.
        gigabytes_per_second: Delivered gigabytes per second; for the floor, copied ones.
        floor_share: Median of the floor's time divided by this way's time; None without a floor.
        milliseconds: Lower quartile, median and upper quartile of the milliseconds per batch.
    """

    name: str
    framework: str
    workers: int | None
    batches_per_second: float
    gigabytes_per_second: float
    floor_share: float | None
    milliseconds: tuple[float, float, float]


def advise(
    lines: Sequence[Line],
    source: BatchSource,
    *,
    decoding: float | None,
    faults: int,
    indexed: bool,
    layout: Sequence[str] = (),
) -> list[str]:
    """Return recommendations as sentences, the most important first.

    Args:
        lines: The measured ways to get batches.
        source: The source of the batches.
        decoding: The share of the time for decoding images.
        faults: Number of pages that were read from disk during the measurement.
        indexed: Whether the dataset has an indices mapping, as after shuffle, filter or select.
        layout: Sentences about costs of the layout of the files.
    """
    advice = workers_for_each(lines)
    if decoding is not None and decoding > 0.5:
        images = source.batch_size * source.sequence_length
        milliseconds = min(line.milliseconds[1] for line in lines if line.framework)
        advice.append(
            f"Decoding dominates: {decoding:.0%} of the time, at best {1e3 * images / milliseconds:,.0f} images/s. "
            "Where disk space allows, store pixels (Array3D of uint8) instead of encoded images, or read fewer frames."
        )
    advice += _wider(source)
    if indexed:
        advice.append(
            "The dataset has an indices mapping (after shuffle, filter or select), so a window is gathered row by row: "
            "Dataset.flatten_indices() and save_to_disk write it out in order."
        )
    advice += layout
    if faults > 100 and not layout:
        advice.append(
            f"{faults:,} pages came from the disk while measuring: the data does not fit into memory, or was not read "
            "before. Run it again; if that stays so, the disk is the limit: choose fields, and take longer windows."
        )
    if faults > 100 and not isinstance(source.sampler, BlockWindows):
        pool = BlockWindows(source.sequence_length, source.batch_size).pool(source.snapshot)
        if pool.block > 1:  # otherwise the pool has room for all windows, or windows are long
            advice.append(f'sampling="blocks" reads long stretches of rows instead of windows here and there: {pool}.')
    return advice


def _wider(source: BatchSource) -> list[str]:
    wider = [
        f"{name}={np.dtype(spec.stored_dtype)}"
        for name, spec in source.spec.items()
        if spec.stored_dtype.itemsize < spec.dtype.itemsize and spec.shape
    ]
    options = " ".join(f"--dtype {dtype}" for dtype in wider)
    said = "Some fields are delivered wider than they are stored. Unless you need that:"
    return [f"{said} {options} (in a loader, dtypes={{...}})."] if wider else []


def workers_for_each(lines: Sequence[Line]) -> list[str]:
    """Recommend a number of workers, in one sentence for each framework, since costs differ."""
    frameworks = list(dict.fromkeys(line.framework for line in lines if line.framework))
    found = [_workers([line for line in lines if line.framework == name]) for name in frameworks]
    return found if len(found) == 1 else [f"{name}: {one}" for name, one in zip(frameworks, found, strict=True)]


def drawing(alone: Line, ahead: Line | None = None) -> str:
    """Recommend, in one or two sentences, whether to prefetch draws from a replay buffer.

    Args:
        alone: The measured ``sample()``.
        ahead: The measured loader over the buffer; None if none was measured.
    """
    _, middle, high = alone.milliseconds
    takes = f"{middle:.3g} ms of a training step (three quarters of the time {high:.3g} ms)"
    least = middle if ahead is None else max(middle, ahead.milliseconds[1])
    return (
        f"{alone.framework}: sample() takes {takes}. PrefetchBatchifier(buffer, num_workers=1) draws meanwhile, from "
        f"the rows of some batches before: worth it where steps take longer than {least:.3g} ms, and that outside of "
        "Python, as on an accelerator."
    )


def _workers(loaders: Sequence[Line]) -> str:
    best = min(line.milliseconds[1] for line in loaders)
    # The smallest number of workers that is about as fast as the best, but at least one, which works while the caller
    # trains.
    threaded = sorted((line for line in loaders if line.workers), key=lambda line: line.milliseconds[1]) or loaders[:1]
    good = [line for line in threaded if line.milliseconds[1] < best * _NOTICEABLE]
    chosen = min(good or threaded[:1], key=lambda line: line.workers or 0)
    workers = chosen.workers or 0
    _, middle, high = chosen.milliseconds
    prefetch = workers + (2 if high < 2 * middle else 4)
    return (
        f"num_workers={workers}, prefetch={prefetch}: a training step that takes longer than {middle:.3g} ms "
        f"(three quarters of the time {high:.3g} ms) never waits for data."
    )
