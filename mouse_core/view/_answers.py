"""Answers the requests of the viewer's page with JSON objects and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.errors import ChangedError, ConfigError
from mouse_core.sampling import Seconds
from mouse_core.sampling.plan import Plan
from mouse_core.spec import check_choice
from mouse_core.view.columns import described, read_dimensions
from mouse_core.view.listing import Query, shortest
from mouse_core.view.opening import Shown
from mouse_core.view.pictures import picture, png
from mouse_core.view.pictures import shown as shown_value
from mouse_core.view.thinning import thinned

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


def spread(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the indices of the points to draw: the first point in each cell of a grid, ascending."""
    (there,) = np.nonzero(np.isfinite(x) & np.isfinite(y))
    if len(there) <= _ACROSS * _UP // 2:
        return there
    place = _cells(x[there], _ACROSS) * _UP + _cells(y[there], _UP)
    _, first = np.unique(place, return_index=True)
    kept: npt.NDArray[np.int64] = np.sort(there[first])
    return kept


def _cells(values: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    low, high = float(values.min()), float(values.max())
    if not high > low:
        return np.zeros(len(values), np.int64)
    # Halved, because the difference of two numbers may be infinite.
    place = (values / 2 - low / 2) / (high / 2 - low / 2) * count
    return np.minimum(place.astype(np.int64), count - 1)


def _axis(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], list[str] | None]:
    """Return numbers unchanged, and texts as indices among the sorted texts.

    If there are few texts, also return the sorted texts.
    """
    if values.dtype != object:
        return values.astype(np.float64), None
    texts, places = np.unique(np.array([shortest(value) for value in values.tolist()], np.str_), return_inverse=True)
    return places.astype(np.float64), texts.tolist() if len(texts) <= _MOST_TASKS else None


def _listed(values: npt.NDArray[Any]) -> list[Any]:
    return finite(values) if values.dtype.kind == "f" else values.tolist()
