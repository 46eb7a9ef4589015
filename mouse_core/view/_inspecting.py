"""Inspects the shown rows in a background thread, which the first request starts."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from mouse_core.errors import MouseError
from mouse_core.formats.base import RowStream
from mouse_core.inspect import ColumnReport, Report, inspect
from mouse_core.inspect.report import facts, heading, tables

# Largest number of plots in a report on the page, and largest number of dimensions of a column in one plot.
_MOST_PLOTS, _MOST_DIMENSIONS = 96, 1024


class Inspection:
    """An inspection of a source: its report, and its state (not started, running, done or failed).

    Args:
        stream: A function that returns a new stream of the rows at each call.
        ignore: Codes of findings to leave out.
    """

    def __init__(self, stream: Callable[[], RowStream], ignore: Sequence[str] = ()) -> None:
        self._stream, self._ignore = stream, ignore
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.done = 0
        self.total: int | None = None
        self.report: Report | None = None
        self.error = ""

    @property
    def state(self) -> str:
        """The state of the inspection: "none", "running", "done" or "failed"."""
        if self._thread is not None and self._thread.is_alive():
            return "running"
        return "failed" if self.error else "none" if self.report is None else "done"

    def start(self) -> None:
        """Start the inspection, unless it is running."""
        if self.state == "running":
            return
        self.done, self.total, self.report, self.error = 0, None, None, ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="mouse-view-inspect")
        self._thread.start()

    def forget(self) -> None:
        """Delete the report, because it describes earlier rows."""
        self.report = None

    def wait(self) -> None:
        """Wait until the inspection has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop the inspection."""
        self._ended.set()
        self.wait()

    def _run(self) -> None:
        try:
            stream = self._stream()
            self.total = stream.rows
            self.report = inspect(stream.watched(self._count), ignore=self._ignore)
        except _Ended:
            pass
        except (MouseError, ImportError, OSError, MemoryError, pa.ArrowException) as error:
            self.error = " ".join(str(error).split()) or type(error).__name__

    def _count(self, rows: pa.RecordBatch) -> None:
        if self._ended.is_set():
            raise _Ended
        self.done += rows.num_rows

    def warnings(self) -> Counter[int]:
        """Return how many errors and warnings each episode has."""
        found = [] if self.report is None else self.report.warnings
        return Counter(number for one in found for number in {*one.episodes, one.episode} if number is not None)


class _Ended(Exception):
    """Exception that stops the inspection's thread after the viewer was closed."""


def report_content(report: Report) -> dict[str, Any]:
    """Convert a report to a JSON object for the page, with facts, findings, tables and plots."""
    return {
        "rows": report.rows,
        "heading": heading(report),
        "facts": facts(report, histograms=False),
        "findings": [asdict(one) for one in report.findings],
        "tables": [{"title": title, "head": head, "rows": rows} for title, head, rows in tables(report)],
        "plots": [plot for _, plot in zip(range(_MOST_PLOTS), _plots(report), strict=False)],
    }


def _plots(report: Report) -> Iterator[dict[str, Any]]:
    """Yield plots: histograms (``edges`` ``[n + 1]``, ``counts`` ``[n]``), counts by name, ranges by dimension."""
    if report.episodes is not None and report.episodes.count:
        for title, found in (("steps of episodes", report.episodes.lengths), ("returns", report.episodes.returns)):
            yield {"title": title, "edges": list(found.edges), "counts": list(found.counts)}
    actions = report.actions
    if actions is not None and actions.counts is not None:
        yield {"title": "actions", "names": list(actions.counts), "counts": list(actions.counts.values())}
    elif actions is not None and actions.places:
        yield from _of_places("action", actions.places, report)
    for column in report.columns:
        if column.name == "reward" or column.name.startswith("observation"):
            yield from _of_column(column, report)


def _of_column(column: ColumnReport, report: Report) -> Iterator[dict[str, Any]]:
    if column.places:
        yield from _of_places(column.name, column.places, report)
    elif column.histogram is not None and column.histogram["counts"]:
        yield {"title": column.name, **{key: list(column.histogram[key]) for key in ("edges", "counts")}}


def _of_places(name: str, places: Any, report: Report) -> Iterator[dict[str, Any]]:
    names = report.metadata.dimensions.get(name, ())
    histograms = [one for one in places.get("histograms", ()) if one]
    if "low" in places and len(places["low"]) > max(len(histograms), 1):
        shown = {key: [_finite(one) for one in places[key][:_MOST_DIMENSIONS]] for key in ("low", "mean", "high")}
        yield {"title": f"{name}: range and mean of dimensions", "names": list(names[:_MOST_DIMENSIONS]), **shown}
        return
    for dimension, one in enumerate(histograms):
        called = label(name, (dimension,), names) if "low" in places and len(histograms) > 1 else name
        yield {"title": called, "edges": list(one["edges"]), "counts": list(one["counts"])}


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def label(name: str, place: tuple[int, ...], names: Any = ()) -> str:
    """Return the label of a dimension of a column: ``action[1] elbow``."""
    (last,) = place[-1:] or (0,)
    called = f" {names[last]}" if len(place) == 1 and last < len(names) else ""
    return f"{name}[{','.join(map(str, place))}]{called}" if place else name
