"""Statistics in files: LeRobot's ``meta/stats.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError
from mouse_core.files.reading import damaged, read_json_object
from mouse_core.files.writing import make_folder, storing, write_file
from mouse_core.statistics.counting import Counted, Floats, Layout, Moments, PartialMoments

_JSON = "stats.json"
# Fields whose features have other names in LeRobot.
_KEYS = {"reward": "next.reward", "done": "next.done"}
_FIELDS = {key: name for name, key in _KEYS.items()}
_MOMENTS = ("mean", "std", "min", "max")


def save(parts: Mapping[str, PartialMoments], found: Mapping[str, Any], folder: Path) -> None:
    """Write the file, as described in ``Statistics.save``. ``found`` has the ``FieldStatistics`` of each field."""
    file = folder / "meta" / _JSON
    stats = dict(read_json_object(file)) if file.is_file() else {}
    stats |= {_KEYS.get(name, name): _entry(found[name], parts[name]) for name in parts}
    text = json.dumps(_without_nan(stats), indent=2, allow_nan=False).encode()
    with storing(str(file)):
        make_folder(folder / "meta")
        write_file(file, text)


def _without_nan(said: Any) -> Any:
    """Return a value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(said, Mapping):
        return {key: _without_nan(one) for key, one in said.items()}
    if isinstance(said, list):
        return [_without_nan(one) for one in said]
    return None if isinstance(said, float) and not np.isfinite(said) else said


def _entry(found: Any, part: PartialMoments) -> dict[str, Any]:
    """Return ``FieldStatistics`` in LeRobot's layout: single numbers as ``[1]``, images as ``[C, 1, 1]`` in 0..1.

    Dimensions without counted numbers have NaN and infinities, which the file stores as null.
    """
    shape = part.layout.shape or (1,)
    values = {name: getattr(found, name) for name in _MOMENTS}
    values |= {_quantile_key(share): quantile for share, quantile in found.quantiles.items()}
    if found.is_image:
        shape = (*shape, 1, 1)
        values = {name: one / 255 for name, one in values.items()}
    entry = {name: one.reshape(shape).tolist() for name, one in values.items()}
    return {**entry, "count": [int(found.count.max(initial=0))]} if part.has_count else entry


def _quantile_key(share: float) -> str:
    """Return the key of a quantile: "q01" for 0.01, "q2.5" for 0.025."""
    percent = round(share * 100, 9)
    return f"q{int(percent):02d}" if percent == int(percent) else f"q{percent}"


# ---------------------------------------------------------------------- reading


def load(folder: Path) -> tuple[dict[str, PartialMoments], int]:
    """Read a file that ``save`` or LeRobot wrote; return the statistics by field, and the largest number of rows that
    were counted for a field.

    Raises:
        ConfigError: The folder has no such file.
        DataError: The file is damaged.
    """
    file = folder / "meta" / _JSON
    if not file.is_file():
        raise ConfigError(f"{folder}: expected meta/{_JSON}, found none")
    parts = {_FIELDS.get(key, key): _part_of(file, key, entry) for key, entry in read_json_object(file).items()}
    rows = (int(one.all.moments.count.max(initial=0)) for one in parts.values() if one.has_count)
    return parts, max(rows, default=0)


def _part_of(file: Path, key: str, entry: Any) -> PartialMoments:
    """Read a feature of LeRobot's file; its quantiles cannot be updated with more rows."""
    values, said, count = _numbers_of(file, key, entry)
    nothing = _where_nothing_counted(file, key, values, said)
    shape = values["mean"].shape
    is_image = shape[1:] == (1, 1)
    if is_image:
        values = {name: 255 * one for name, one in values.items()}
        said = {share: 255 * one for share, one in said.items()}
        shape = shape[:1]
    elif shape == (1,) and not key.startswith(("action", "obs")):
        shape = ()  # LeRobot's shape for single numbers
    moments = Moments(int(np.prod(shape, dtype=np.int64)))
    mean, std, low, high = (values[name].reshape(-1) for name in _MOMENTS)
    number = 1 if count is None else count  # at least 1, for a deviation
    moments.count = np.where(nothing, 0, number)
    moments.mean, moments.squares = np.where(nothing, 0, mean), np.where(nothing, 0, std**2 * number)
    moments.low, moments.high = np.where(nothing, np.inf, low), np.where(nothing, -np.inf, high)
    quantiles = {share: one.reshape(shape) for share, one in said.items()}
    counted = Counted(moments, None)
    return PartialMoments(Layout(shape, 1, ""), None, counted, is_image, quantiles, has_count=count is not None)


def _where_nothing_counted(
    file: Path, key: str, values: Mapping[str, Floats], said: Mapping[float, Floats]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the dimensions in which all statistics are null, ``[width]``. In all other dimensions, check
    that no statistic is null.
    """
    there = np.stack([np.isfinite(one).reshape(-1) for one in (*values.values(), *said.values())])
    wrong = (there.any(axis=0) & ~there.all(axis=0)) | (values["std"].reshape(-1) < 0)
    if wrong.any():
        found = {name: float(one.reshape(-1)[wrong.argmax()]) for name, one in values.items()}
        where = f"in dimension {wrong.argmax()}"
        raise damaged(
            file, f"{key}: expected only numbers or null, and deviations of at least 0, found {found} {where}"
        )
    return np.asarray(~there.any(axis=0))


def _numbers_of(file: Path, key: str, entry: Any) -> tuple[dict[str, Floats], dict[float, Floats], int | None]:
    """Return moments by name and quantiles by share, all of the same shape, and the count (None for LeRobot 2.0)."""
    try:
        values = {name: np.asarray(entry[name], np.float64) for name in _MOMENTS}
        (count,) = entry.get("count", [None])
        said = {share: np.asarray(entry[name], np.float64) for name in entry if (share := _share_of(name)) is not None}
    except UNREADABLE as error:
        raise damaged(file, f"{key}: expected {', '.join(_MOMENTS)}, found {error!r:.80}") from error
    shape = values["mean"].shape
    is_count = count is None or (isinstance(count, int | float) and 0 <= count < 2**53)
    if any(one.shape != shape for one in (*values.values(), *said.values())) or not is_count:
        raise damaged(file, f"{key}: expected numbers of equal shape, and a count, found {shape} and {count!r:.40}")
    return values, said, count


def _share_of(name: str) -> float | None:
    """Return the share that a key names: 0.01 for "q01"; None if the key does not name a quantile."""
    return float(name[1:]) / 100 if re.fullmatch(r"q\d{1,2}(\.\d+)?|q100", name) else None
