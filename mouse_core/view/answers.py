"""Answers the requests of the viewer's page with JSON objects and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import ColumnType, column_type, fixed_shape, is_list
from mouse_core._arrow.dense import plain
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ChangedError, ConfigError, DataError
from mouse_core.formats.columns import MISSING, travels_with_action
from mouse_core.images.pixels import check_image, decode_image, encode_png
from mouse_core.sampling import Seconds
from mouse_core.sampling.plan import Plan
from mouse_core.spec import check_choice
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot
from mouse_core.view.opening import Query, Shown, shortest

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

# ---------------------------------------------------------------------- curves

# Number of values that are read at a time.
_VALUES = 1 << 22


@dataclass(frozen=True)
class Curve:
    """The points of a curve.

    Args:
        steps: The steps of the points, int64 ``[n]``, ascending.
        values: The values of the points, float64 ``[n]``; NaN where the curve has a gap.
    """

    steps: Int64s
    values: Floats


def thinned(read: Callable[[int, int], Floats], begin: int, end: int, buckets: int, width: int = 1) -> list[Curve]:
    """Return the curves of some columns over the steps ``begin .. end - 1``; each curve is reduced to a few points per
    bucket.

    The steps are divided into ``buckets`` ranges of equal length. In each bucket, the steps with the smallest and the
    largest value are kept. So the kept points have the same range as the complete curve. Values that are not finite
    (NaN, infinite) are gaps; in each bucket, the first and the last gap are kept. If there are few steps, all steps are
    kept.

    Args:
        read: A function that takes ``first`` and ``last``, and returns the values of the steps ``first .. last - 1``,
            float64 ``[n, columns]``.
        begin, end: The first step, and the step after the last step.
        buckets: Number of buckets, at least 1; usually about the width of the plot in pixels.
        width: Number of values that are read for each step, which determines how many steps are read at a time.
    Returns:
        A curve for each column.
    """
    count = end - begin
    if count <= 3 * buckets:
        values = _finite(read(begin, end))
        steps = np.arange(begin, begin + len(values))
        return [Curve(steps, column) for column in values.T]
    edges = begin + np.arange(buckets + 1) * count // buckets
    most = max(_VALUES // width, 1)
    places: list[Int64s] = []
    found: list[Floats] = []
    at = 0
    while at < buckets:
        upto = max(int(edges.searchsorted(edges[at] + most, side="right")) - 1, at + 1)
        values = _finite(read(int(edges[at]), int(edges[upto])))
        for one in range(at, upto):
            first, last = int(edges[one] - edges[at]), int(edges[one + 1] - edges[at])
            kept = _marked(values[first:last])
            places.append(kept + int(edges[one]))
            found.append(np.take_along_axis(values[first:last], kept, axis=0))
        at = upto
    points = zip(np.concatenate(places).T, np.concatenate(found).T, strict=True)
    return [_unique(np.asarray(at), np.asarray(value)) for at, value in points]


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _marked(values: Floats) -> Int64s:
    """Return the steps of the smallest value, the largest value, the first gap and the last gap, sorted.

    The result is int64 ``[4, columns]``.
    """
    gaps = np.isnan(values)
    low = np.where(gaps, np.inf, values).argmin(axis=0)
    high = np.where(gaps, -np.inf, values).argmax(axis=0)
    # Without a gap, the place of the smallest value is used instead.
    some = gaps.any(axis=0)
    first = np.where(some, gaps.argmax(axis=0), low)
    last = np.where(some, len(values) - 1 - gaps[::-1].argmax(axis=0), low)
    marked: Int64s = np.sort(np.stack([low, high, first, last]), axis=0)
    return marked


def _unique(steps: Int64s, values: Floats) -> Curve:
    kept = np.append(True, steps[1:] > steps[:-1])
    return Curve(steps[kept], values[kept])


# ---------------------------------------------------------------------- columns


def kind_of(kind: ColumnType) -> str:
    """Return how a column is displayed: as "numbers", "image" or "text"."""
    if kind.kind in ("image", "video") or (kind.kind == "list" and kind.depth in (2, 3) and kind.value_type == "uint8"):
        return "image"
    return "numbers" if kind.kind in ("scalar", "list") else "text"


def described(snapshot: Snapshot, dimensions: Mapping[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
    """Return the name, type, kind, width and dimension names of every column; columns of standard fields come first.

    Args:
        snapshot: The rows.
        dimensions: Names of dimensions, by column. The names of a column are ignored if there are more or fewer names
            than dimensions.
    """
    types = stored_types(snapshot.segments)
    fields = {reader.spec.column: reader for reader in snapshot.readers.values()}
    first = [name for name in ("reward", "action", "observation") if name in types]
    ordered = [*first, *(name for name in fields if name in types and name not in first)]
    ordered += [name for name in types if name not in ordered]
    found = []
    for name in ordered:
        kind = kind_of(column_type(types[name]))
        shape = fixed_shape(types[name])
        if kind == "numbers" and shape is None and name in fields:
            shape = tuple(fields[name].spec.shape)
        if kind == "numbers" and shape is None:
            rows = read_numbers(snapshot, name, 0, min(snapshot.num_rows, 1))
            shape = (rows.shape[1],)
        names = list((dimensions or {}).get(name, ()))
        found.append(
            {
                "name": name,
                "type": str(types[name])[:120],
                "kind": kind,
                "shape": list(shape or ()),
                "width": prod(shape or ()) if kind == "numbers" else 0,
                "names": names if len(names) == prod(shape or ()) else [],
            }
        )
    for name, reader in snapshot.readers.items():
        # Fields of images without a column of images, such as frames of videos.
        if reader.spec.image_shape is not None and not any(
            one["name"] == reader.spec.column and one["kind"] == "image" for one in found
        ):
            found.append({"name": name, "type": "image", "kind": "image", "shape": [], "width": 0, "names": []})
    return found


def tables(snapshot: Snapshot, begin: int, end: int) -> Iterator[pa.Table]:
    """Yield rows ``begin .. end - 1`` as tables, one for each segment."""
    at = 0
    for segment in snapshot.segments:
        first, last = max(begin - at, 0), min(end - at, segment.num_rows)
        if first < last:
            yield segment.take(first, last - first)
        at += segment.num_rows


def read_numbers(snapshot: Snapshot, name: str, begin: int, end: int) -> Floats:
    """Return a column of numbers in rows ``begin .. end - 1``, float64 ``[n, width]``; missing values are NaN.

    Placeholder values in rows without a recorded observation also become NaN. The width equals the length of the
    longest row.
    """
    found = _read(snapshot, name, begin, end)
    if is_filler(snapshot, name):
        found[_read(snapshot, MISSING, begin, end)[:, 0] == 1] = np.nan
    return found


def read_dimensions(snapshot: Snapshot, name: str, dims: Sequence[int], start: int, first: int, last: int) -> Floats:
    """Return some dimensions of a column in the steps ``first .. last - 1``, ``[n, dims]``; step 0 is the row
    ``start``. A dimension that does not exist is NaN in every step.
    """
    values = read_numbers(snapshot, name, start + first, start + last)
    wanted = np.asarray(dims)
    found = np.full((len(values), len(wanted)), np.nan)
    exists = wanted < values.shape[1]
    found[:, exists] = values[:, wanted[exists]]
    return found


def is_filler(snapshot: Snapshot, name: str) -> bool:
    """Whether a column has placeholder values, which have no meaning, in rows without a recorded observation."""
    own = name.removeprefix("metadata_").removeprefix("info.")
    beside = own != name and not travels_with_action(own)
    return MISSING in stored_types(snapshot.segments) and name != MISSING and (beside or name.startswith("observation"))


def _read(snapshot: Snapshot, name: str, begin: int, end: int) -> Floats:
    parts: list[Floats] = []
    for table in tables(snapshot, begin, end):
        if name not in table.schema.names:
            parts.append(np.full((table.num_rows, 1), np.nan))
            continue
        parts += [_as_numbers(chunk) for chunk in table.column(name).chunks if len(chunk)]
    width = max((part.shape[1] for part in parts), default=0)
    found = np.full((sum(len(part) for part in parts), width), np.nan)
    at = 0
    for part in parts:
        found[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return found


def _as_numbers(array: pa.Array) -> Floats:
    """Convert a column of numbers or nested lists of numbers to ``[n, width]``; nulls and missing values become NaN.

    For example, ``[[1, 2], null]`` and ``[[3]]`` become the rows ``[1, 2]`` and ``[3, NaN]``.
    """
    array = plain(array)
    ends = np.arange(len(array) + 1)  # first value of each row among the values of the innermost lists
    while is_list(array.type):
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[ends]
        array = plain(array.flatten())
    lengths = np.diff(ends)
    width = int(lengths.max(initial=0))
    found = np.full((len(lengths), width), np.nan)
    found[np.arange(width) < lengths[:, None]] = _scalars(array)
    return found


def _scalars(array: pa.Array) -> Floats:
    """Convert a one-dimensional array to float64; nulls and values that are not numbers become NaN."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return np.full(len(array), np.nan)
    return array.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- images

# Largest number of pixels of an image.
_MOST_PIXELS = 1 << 24
_SIGNS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def picture(snapshot: Snapshot, name: str, row: int) -> tuple[bytes, str]:
    """Return an image of a step, as the bytes of a PNG or JPEG file and the media type of the file.

    Args:
        snapshot: The rows.
        name: A column of images (encoded, or uint8 ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``), or a field of images,
            for example of video frames.
        row: The row of the step.

    Raises:
        ConfigError: The column ``name`` does not exist, or the row has no image.
        DataError: The image cannot be decoded, is too large, or is outside of the allowed folders.
    """
    try:
        return _picture(snapshot, name, row)
    except DataError as error:
        raise DataError(f"{name}: {error} in row {row}") from error


def _picture(snapshot: Snapshot, name: str, row: int) -> tuple[bytes, str]:
    types = stored_types(snapshot.segments)
    if name not in types or column_type(types[name]).kind == "video":
        return png(_of_field(snapshot, name, row)), "image/png"
    value = snapshot.rows([row], {name}).get(name, [None])[0]
    if value is None or (isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") is None):
        raise ConfigError(f"{name}: expected an image, found none in row {row}")
    if isinstance(value, Mapping | bytes):
        return _encoded(value, _roots(snapshot, row))
    return png(np.asarray(value, np.uint8)), "image/png"


def png(pixels: npt.NDArray[Any]) -> bytes:
    """Return pixels as a PNG: ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``. If the array is a stack of frames, only the
    last frame is used. If numbers exceed 255, as for depth, all numbers are scaled so that the largest number is white.

    Raises:
        DataError: The array has another shape.
    """
    if pixels.ndim == 3 and pixels.shape[0] <= 4 < pixels.shape[2]:
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or not pixels.size or pixels.shape[0] * pixels.shape[1] > _MOST_PIXELS:
        raise DataError(f"expected an image of at most {_MOST_PIXELS} pixels, found an array {list(pixels.shape)}")
    if pixels.shape[2] not in (1, 3, 4):
        pixels = pixels[:, :, -1:]
    pixels = np.nan_to_num(pixels) if pixels.dtype.kind == "f" else pixels
    if pixels.dtype != np.uint8 and (pixels.max() > 255 or pixels.min() < 0):
        pixels = np.clip(pixels, 0, None) / max(float(pixels.max()), 1e-300) * 255
    return encode_png(np.ascontiguousarray(pixels.astype(np.uint8)))


def _encoded(value: Mapping[str, Any] | bytes, roots: tuple[str, ...]) -> tuple[bytes, str]:
    held = value.get("bytes") if isinstance(value, Mapping) else value
    kind = next((kind for sign, kind in _SIGNS.items() if held is not None and held.startswith(sign)), None)
    if kind is not None and held is not None:
        check_image({"bytes": held, "path": None}, None)
        if kind == "image/jpeg" or held[24] <= 8:  # bits per channel: with more bits, the largest value becomes white
            return bytes(held), kind
    try:
        pixels = decode_image(value, image_roots=roots, max_pixels=_MOST_PIXELS)
    except DataError:
        pixels = decode_image(value, image_roots=roots, max_pixels=_MOST_PIXELS, dtype=np.int64)
    return png(pixels), "image/png"


def _of_field(snapshot: Snapshot, name: str, row: int) -> npt.NDArray[Any]:
    readers = {one.spec.column: one for one in snapshot.readers.values() if one.spec.image_shape is not None}
    reader = snapshot.readers.get(name) or readers.get(name)
    if reader is None or reader.spec.image_shape is None:
        raise ConfigError(f"expected a column or a field of images, found {name!r:.80}")
    return snapshot.stored(reader.spec.name, np.array([row])).reshape(reader.spec.image_shape)


def _roots(snapshot: Snapshot, row: int) -> tuple[str, ...]:
    """Return the folders from which the images that a row names by path may be read."""
    for segment in snapshot.segments:
        if row < segment.num_rows:
            return tuple(segment.image_roots)
        row -= segment.num_rows
    return ()


# ---------------------------------------------------------------------- answers


def shown_value(value: Any) -> list[str]:
    """Return a step's value as texts of limited length, one text for each dimension."""
    if isinstance(value, list):
        found = [text for item in value[:_MOST_VALUES] for text in shown_value(item)]
        return found[:_MOST_VALUES]
    if isinstance(value, bytes):
        return [f"{len(value):,} bytes"]
    if isinstance(value, float):
        return [f"{value:.7g}"]
    if isinstance(value, Mapping) or not isinstance(value, str | int | None):
        return [f"{value!r}"[:_MOST_CHARACTERS]]
    return ["" if value is None else str(value)[:_MOST_CHARACTERS]]


_MOST_VALUES = 1024
_MOST_CHARACTERS = 4000


Asked = dict[str, str]
"""The query of a request: values by name."""

# Largest number of dimensions of a field that are shown.
_MOST_DIMENSIONS = 64
# Largest size of a window in bytes.
_MOST_BYTES = 1 << 29
_MOST_ROWS = 500
# Number of rows and columns in the grid of a plot; each cell has at most one point.
_ACROSS, _UP = 120, 60
_MOST_TASKS = 1000


def whole(asked: Asked, name: str, default: int, least: int, most: int) -> int:
    """Return an integer value from the query of a request.

    Raises:
        ConfigError: The value is not an integer in ``least .. most``.
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


def window(shown: Shown, asked: Asked) -> dict[str, Any]:
    """Return a window of a batch: the values of each field by step and dimension, and the masks.

    Raises:
        ConfigError: The batch or the window does not exist.
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
        "said": repr(source)[:400],
    }


def window_picture(shown: Shown, asked: Asked) -> bytes:
    """Return the pixels of an image field at a step of a window, as a PNG.

    Raises:
        ConfigError: The field, batch, window or step does not exist.
    """
    source, index, number, view = _window_of(shown, asked)
    name = asked.get("field", "")
    spec = source.spec.fields.get(name)
    if spec is None or spec.image_shape is None:
        raise ConfigError(f"field: expected a field of images, found {name!r:.80}")
    values = _window(source, source.plan(index), number, view)[name][0]
    steps = values.reshape(-1, *spec.image_shape)
    return png(steps[whole(asked, "step", 0, 0, len(steps) - 1)])


def _window_of(shown: Shown, asked: Asked) -> tuple[BatchSource, int, int, int]:
    source = shown.batches
    if source is None:
        raise ConfigError(f"{shown.name}: expected a source of batches, found a store; view(store, source) shows both")
    index = whole(asked, "index", 0, 0, (1 << 62) - 1)
    windows = len(source.plan(index).starts)
    number = whole(asked, "window", 0, 0, windows - 1)
    return source, index, number, whole(asked, "view", 0, 0, source.views - 1)


def _window(source: BatchSource, plan: Plan, number: int, view: int) -> dict[str, Any]:
    """Return the fields of one window of a planned batch, ``[1, ...]``; their values equal the window's values in the
    batch.
    """
    if source.packed is not False:
        raise ConfigError("batches: expected padded windows, found packed windows, which this page cannot show")
    # A user's function may read all windows of a batch, so it needs the complete batch; all other stages change each
    # window independently.
    alone = source.batch_plan.map is None
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
    """Return the offsets of each field from the anchor, in steps or seconds; {} if all fields have the same window."""
    around = source.batch_plan.windows
    if around is None:
        return {}
    found: dict[str, list[float]] = {}
    for name, some in around.offsets.items():
        found[name] = [float(one) for one in (some.offsets if isinstance(some, Seconds) else some)]
    return found


def _columns(values: npt.NDArray[Any], has_steps: bool) -> list[list[float | None]]:
    """Return the first few dimensions of a window's field; each dimension is a list with one number per step. NaN and
    infinity become None.
    """
    flat = values.reshape(values.shape[0] if has_steps and values.ndim else 1, -1)[:, :_MOST_DIMENSIONS]
    return [finite(column) for column in flat.astype(np.float64).T]


def finite(values: npt.NDArray[Any]) -> list[float | None]:
    """Return numbers for JSON; NaN and infinity become None."""
    found: Any = values.astype(object)
    found[~np.isfinite(values)] = None
    listed: list[float | None] = found.tolist()
    return listed


def _steps(mask: npt.NDArray[Any]) -> list[bool]:
    flat = mask.reshape(mask.shape[0] if mask.ndim else 1, -1)
    found: npt.NDArray[Any] = np.asarray(flat.any(axis=1))
    return [bool(one) for one in found]


def _episode_at(shown: Shown, row: int) -> dict[str, int]:
    """Return the episode of a row, and the index of the row in the episode."""
    starts = shown.listed().values("start")
    number = int(starts.searchsorted(row, side="right")) - 1
    return {"episode": number, "step": row - int(starts[number])}


class Answers:
    """Computes the viewer's answers about the shown stores; each answer has a name.

    Args:
        shown: The stores.
    """

    def __init__(self, shown: Sequence[Shown]) -> None:
        self._shown = shown

    # A dict that the object keeps would refer to the object, so a closed viewer would keep its stores until the next
    # garbage collection.
    @property
    def known(self) -> Mapping[str, Callable[[Asked], Any]]:
        """Functions for the answers that are JSON objects, by name."""
        return {
            "sources": self.sources,
            "episodes": self.episodes,
            "points": self.points,
            "episode": self.episode,
            "curves": self.curves,
            "step": self.step,
            "window": lambda asked: window(self._at(asked), asked),
        }

    @property
    def pictures(self) -> Mapping[str, Callable[[Asked], tuple[bytes, str]]]:
        """Functions for the answers that are files with a media type, by name."""
        return {
            "image": self.image,
            "window-image": lambda asked: (window_picture(self._at(asked), asked), "image/png"),
        }

    def _at(self, asked: Asked) -> Shown:
        return self._shown[whole(asked, "source", 0, 0, len(self._shown) - 1)]

    def sources(self, asked: Asked) -> Any:
        """Include the rows that were appended since the last refresh, and return the title and the columns of each
        source.
        """
        found = []
        for one in self._shown:
            one.refresh()
            rows = one.snapshot
            fields = rows.config.fields
            metadata = one.store.metadata
            found.append(
                {
                    "name": one.name,
                    "rows": rows.num_rows,
                    "generation": one.generation,
                    "alignment": rows.alignment,
                    "batches": one.batches is not None,
                    "columns": described(rows, metadata.dimensions) if rows.num_rows else [],
                    "tasks": [*metadata.tasks.values()][:_MOST_TASKS],
                    "done": list(fields["done"].labels) if "done" in fields else [],
                    "reward": rows.readers["reward"].spec.column if "reward" in rows.readers else None,
                }
            )
        return {"sources": found}

    # ------------------------------------------------------------------ episodes

    def episodes(self, asked: Asked) -> Any:
        """Return some rows of the sorted and filtered list of episodes."""
        one = self._at(asked)
        first = whole(asked, "first", 0, 0, 1 << 60)
        count = whole(asked, "count", 100, 0, _MOST_ROWS)
        episodes = one.listed()
        order = episodes.order(query_of(asked))
        names = [name for name in episodes.names if name != "start"]
        values = [_listed(episodes.values(name)[order[first : first + count]]) for name in names]
        return {
            "generation": one.generation,
            "total": len(episodes),
            "matched": len(order),
            "columns": names,
            "texts": [name for name in names if episodes.values(name).dtype == object],
            "episodes": [list(row) for row in zip(*values, strict=True)],
        }

    def points(self, asked: Asked) -> Any:
        """Return two columns of the filtered episodes as points of a plot; the number of points is limited.

        If several episodes are in the same cell of the plot, only the first episode becomes a point. A text is drawn at
        its index among the sorted texts of the column, and the answer contains these texts.
        """
        episodes = self._at(asked).listed()
        order = np.sort(episodes.order(query_of(asked)))
        (x, x_texts), (y, y_texts) = (
            _axis(episodes.values(asked.get(name, "") or "episode")[order]) for name in ("x", "y")
        )
        color = asked.get("color", "")
        kept = spread(x, y)
        return {
            "matched": len(order),
            "episodes": order[kept].tolist(),
            "x": finite(x[kept]),
            "y": finite(y[kept]),
            "texts": {"x": x_texts, "y": y_texts},
            "colors": _listed(episodes.values(color)[order[kept]]) if color else None,
        }

    def episode(self, asked: Asked) -> Any:
        """Return the row of the list of episodes for the episode with a given index; None if there is no such
        episode.
        """
        episodes = self._at(asked).listed()
        number = whole(asked, "episode", 0, 0, 1 << 60)
        if number >= len(episodes):
            return {"episode": None, "episodes": len(episodes)}
        values = {name: _listed(episodes.values(name)[number : number + 1])[0] for name in episodes.names}
        return {"episode": values, "episodes": len(episodes)}

    # ------------------------------------------------------------------ steps

    def _rows(self, asked: Asked) -> tuple[Shown, int, int]:
        one = self._at(asked)
        if whole(asked, "generation", one.generation, 0, 1 << 60) != one.generation:
            raise ChangedError(
                f"{one.name}: expected the rows of the page, found different rows, because some rows were dropped"
            )
        rows = one.snapshot.num_rows
        begin = whole(asked, "begin", 0, 0, max(rows - 1, 0))
        return one, begin, whole(asked, "end", begin + 1, begin + 1, rows)

    def curves(self, asked: Asked) -> Any:
        """Return curves of some dimensions of a column over a range of rows. The curves have few points, but show all
        spikes and gaps.

        Step 0 is the row ``begin``. In the query, ``from`` is the first visible step, and ``to`` is the step after the
        last visible step.
        """
        one, begin, end = self._rows(asked)
        name = asked.get("column", "")
        known = {column["name"]: column for column in described(one.snapshot) if column["kind"] == "numbers"}
        check_choice("column", name, known)
        width = max(int(known[name]["width"]), 1)
        dims = [whole({"dim": text}, "dim", 0, 0, 1 << 20) for text in asked.get("dims", "0").split(",")]
        if len(dims) > _MOST_DIMENSIONS:
            raise ConfigError(f"dims: expected at most {_MOST_DIMENSIONS} dimensions, found {len(dims)}")
        low = whole(asked, "from", 0, 0, end - begin - 1)
        high = whole(asked, "to", end - begin, low + 1, end - begin)
        read = partial(read_dimensions, one.snapshot, name, dims, begin)
        found = thinned(read, low, high, whole(asked, "points", 800, 1, 8000), width)
        return {
            "column": name,
            "curves": [
                {"dim": dim, "steps": curve.steps.tolist(), "values": finite(curve.values)}
                for dim, curve in zip(dims, found, strict=True)
            ],
        }

    def step(self, asked: Asked) -> Any:
        """Return the values of a row, as texts by column, without images."""
        one, row, _ = self._rows(asked)
        columns = [column for column in described(one.snapshot) if column["kind"] != "image"]
        values = one.snapshot.rows([row], {column["name"] for column in columns})
        return {
            "row": row,
            "values": [
                {"name": column["name"], "texts": shown_value(values.get(column["name"], [None])[0])}
                for column in columns
            ],
        }

    def image(self, asked: Asked) -> tuple[bytes, str]:
        """Return an image of a row, as the bytes of a file and the media type of the file."""
        one, row, _ = self._rows(asked)
        return picture(one.snapshot, asked.get("column", ""), row)


def query_of(asked: Asked) -> Query:
    """Parse the query of a list of episodes: ``sort``, ``down``, ``low.NAME``, ``high.NAME`` and ``has.NAME``."""
    limits: dict[str, dict[str, str]] = {"low": {}, "high": {}, "has": {}}
    for name, text in asked.items():
        kind, dot, column = name.partition(".")
        if dot and kind in limits and text:
            limits[kind][column] = text
    return Query(asked.get("sort", "") or "episode", asked.get("down", "") == "1", **limits)


def spread(x: Floats, y: Floats) -> Int64s:
    """Return the indices of the points to draw: the first point in each cell of a grid, ascending."""
    (there,) = np.nonzero(np.isfinite(x) & np.isfinite(y))
    if len(there) <= _ACROSS * _UP // 2:
        return there
    place = _cells(x[there], _ACROSS) * _UP + _cells(y[there], _UP)
    _, first = np.unique(place, return_index=True)
    kept: Int64s = np.sort(there[first])
    return kept


def _cells(values: Floats, count: int) -> Int64s:
    low, high = float(values.min()), float(values.max())
    if not high > low:
        return np.zeros(len(values), np.int64)
    # Halved, because the difference of two numbers may be infinite.
    place = (values / 2 - low / 2) / (high / 2 - low / 2) * count
    return np.minimum(place.astype(np.int64), count - 1)


def _axis(values: npt.NDArray[Any]) -> tuple[Floats, list[str] | None]:
    """Return numbers unchanged, and texts as indices among the sorted texts.

    If there are few texts, also return the sorted texts.
    """
    if values.dtype != object:
        return values.astype(np.float64), None
    texts, places = np.unique(np.array([shortest(value) for value in values.tolist()], np.str_), return_inverse=True)
    return places.astype(np.float64), texts.tolist() if len(texts) <= _MOST_TASKS else None


def _listed(values: npt.NDArray[Any]) -> list[Any]:
    return finite(values) if values.dtype.kind == "f" else values.tolist()
