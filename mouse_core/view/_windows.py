"""Windows as a batch has them: augmented, padded, with masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.augment import AugmentMaskProbConfig, AugmentTokensConfig
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ConfigError
from mouse_core.sampling.offsets import Seconds
from mouse_core.sampling.plan import Plan
from mouse_core.view.opening import Shown
from mouse_core.view.rows.pictures import png

_MOST_STEPS = 4096
_MOST_WINDOWS = 4096
# Of wider fields the first dimensions are shown.
_MOST_DIMENSIONS = 64
# A window that takes more bytes is not made.
_MOST_BYTES = 1 << 29
_KEPT = 4
_SAMPLINGS = ("random", "last", "sequential", "batch", "blocks")
_BOUNDARIES = ("stream", "episode", "task")


def source_of(shown: Shown, asked: dict[str, str]) -> BatchSource:
    """The source of batches that is shown: as it was given, or made as the page asks.

    Raises:
        ConfigError: Options that no source takes.
    """
    if shown.batches is not None:
        return shown.batches
    length, size = whole(asked, "length", 32, 1, _MOST_STEPS), whole(asked, "size", 8, 1, _MOST_WINDOWS)
    seed = whole(asked, "seed", 0, 0, (1 << 63) - 1)
    sampling = _one_of(asked, "sampling", _SAMPLINGS)
    boundary = _one_of(asked, "boundary", _BOUNDARIES)
    masked = _share(asked, "mask")
    key = (length, size, seed, sampling, boundary, masked)
    with shown.lock:
        known = shown.made.get(key)
    if known is None:
        augment = None
        if masked:
            prob = AugmentMaskProbConfig(**dict.fromkeys(AugmentMaskProbConfig.__dataclass_fields__, masked))
            augment = AugmentTokensConfig(mask_prob=prob, deliver_masks=True)
        options: dict[str, Any] = {"boundary": boundary, "augment": augment}
        known = BatchSource(
            shown.snapshot, sequence_length=length, batch_size=size, seed=seed, sampling=sampling, **options
        )
        with shown.lock:
            while len(shown.made) >= _KEPT:
                shown.made.pop(next(iter(shown.made)))
            shown.made[key] = known
    return known


def whole(asked: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """A whole number that a page asks with.

    Raises:
        ConfigError: Something else, or beyond ``least .. most``.
    """
    text = asked.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ConfigError(f"{name}: expected a whole number in {least}..{most}, found {text!r:.80}")
    return value


def _share(asked: dict[str, str], name: str) -> float:
    text = asked.get(name, "") or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}: expected a number in 0..1, found {text!r:.80}")
    return value


def _one_of(asked: dict[str, str], name: str, known: tuple[str, ...]) -> str:
    value = asked.get(name, "") or known[0]
    if value not in known:
        raise ConfigError(f"{name}: expected one of {list(known)}, found {value!r:.80}")
    return value


def window(shown: Shown, asked: dict[str, str]) -> dict[str, Any]:
    """One window of a batch: every field's values by step and dimension, which steps are there, and which are masked.

    Raises:
        ConfigError: A batch or a window that there is not.
    """
    source, index, number, view = _window_of(shown, asked)
    plan = source.plan(index)
    batch, offsets = _window(source, plan, number, view), _offsets(source)
    mask = batch.get("mask")
    fields = []
    for name, values in batch.items():
        spec = source.spec.fields.get(name)
        if name == "mask" or name.endswith("_mask") or not isinstance(values, np.ndarray) or values.ndim < 1:
            continue
        one = values[0]
        image = spec is not None and spec.image_shape is not None
        masked = batch.get(f"{name}_mask")
        fields.append(
            {
                "name": name,
                "dtype": str(values.dtype),
                "shape": list(values.shape[1:]),
                "image": image,
                "values": [] if image else _columns(one, name in offsets or source.spec.batch_dims > 1),
                "masked": None if masked is None else _steps(masked[0]),
                "offsets": offsets.get(name),
            }
        )
    start = int(plan.starts[number])
    return {
        "index": index,
        "batches": len(source),
        "windows": len(plan.starts),
        "window": number,
        "views": source.views,
        "start": start,
        "episode": _episode_at(shown, start),
        "length": source.sequence_length,
        "there": None if mask is None else _steps(mask[0]),
        "fields": fields,
        "given": shown.batches is not None,
        "said": repr(source)[:400],
    }


def window_picture(shown: Shown, asked: dict[str, str]) -> bytes:
    """The pixels of an image field at a step of a window, as a PNG.

    Raises:
        ConfigError: No such field, batch, window or step.
    """
    source, index, number, view = _window_of(shown, asked)
    name = asked.get("field", "")
    spec = source.spec.fields.get(name)
    if spec is None or spec.image_shape is None:
        raise ConfigError(f"field: expected a field of images, found {name!r:.80}")
    values = _window(source, source.plan(index), number, view)[name][0]
    steps = values.reshape(-1, *spec.image_shape)
    return png(steps[whole(asked, "step", 0, 0, len(steps) - 1)])


def _window_of(shown: Shown, asked: dict[str, str]) -> tuple[BatchSource, int, int, int]:
    source = source_of(shown, asked)
    index = whole(asked, "index", 0, 0, (1 << 62) - 1)
    windows = len(source.plan(index).starts)
    number = whole(asked, "window", 0, 0, windows - 1)
    return source, index, number, whole(asked, "view", 0, 0, source.views - 1)


def _window(source: BatchSource, plan: Plan, number: int, view: int) -> dict[str, Any]:
    """The fields of one window of a plan, ``[1, ...]``, as they are in the batch."""
    if source.packed is not False:
        raise ConfigError("batches: expected windows side by side, found packed ones, which this page does not show")
    # A function of the user's may look at all windows of a batch; all else becomes of each what it would alone.
    alone = source._chosen.map is None
    nbytes = source.layout(1 if alone else plan).nbytes * source.views
    if nbytes > _MOST_BYTES:
        raise ConfigError(
            f"batches: expected a window of at most {_MOST_BYTES:,} bytes, found {nbytes:,}; ask for fewer steps"
        )
    at = slice(number, number + 1)
    if alone:
        lengths = None if plan.lengths is None else plan.lengths[at]
        plan = Plan(plan.starts[at], plan.length, plan.key, plan.global_size, plan.first + number, lengths)
    batch: Any = source.gather(plan)
    found = batch[view] if isinstance(batch, tuple) else batch
    return dict(found) if alone else {name: values[at] for name, values in found.items()}


def _offsets(source: BatchSource) -> dict[str, list[float]]:
    """Of windows by field, which steps around the anchor, or seconds, each field has; nothing for others."""
    around = source._chosen.windows
    if around is None:
        return {}
    found: dict[str, list[float]] = {}
    for name, some in around.offsets.items():
        found[name] = [float(one) for one in (some.offsets if isinstance(some, Seconds) else some)]
    return found


def _columns(values: npt.NDArray[Any], has_steps: bool) -> list[list[float | None]]:
    """The first dimensions of a window's field, each step by step; None for what is no finite number."""
    flat = values.reshape(values.shape[0] if has_steps and values.ndim else 1, -1)[:, :_MOST_DIMENSIONS]
    return [finite(column) for column in flat.astype(np.float64).T]


def finite(values: npt.NDArray[Any]) -> list[float | None]:
    """Numbers as JSON has them: None for those that are not finite."""
    found: Any = values.astype(object)
    found[~np.isfinite(values)] = None
    listed: list[float | None] = found.tolist()
    return listed


def _steps(mask: npt.NDArray[Any]) -> list[bool]:
    flat = mask.reshape(mask.shape[0] if mask.ndim else 1, -1)
    found: npt.NDArray[Any] = np.asarray(flat.any(axis=1))
    return [bool(one) for one in found]


def _episode_at(shown: Shown, row: int) -> dict[str, int] | None:
    """The episode that a row is in, and the row's step in it, where it was counted so far."""
    with shown.lock:
        starts = shown.episodes.columns()["start"]
        counted = shown.episodes.counted
    if not 0 <= row < counted:
        return None
    number = int(starts.searchsorted(row, side="right")) - 1
    return {"episode": number, "step": row - int(starts[number])}
