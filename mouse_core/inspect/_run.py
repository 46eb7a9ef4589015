"""Inspecting: one pass over the rows, and what it amounts to."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core._base.progress import progress_bar
from mouse_core.errors import MouseError
from mouse_core.files.reading import read_json_object
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.blocks import blocks
from mouse_core.formats.sources import stream_of
from mouse_core.inspect._checks.finding import Finding, sorted_by_level
from mouse_core.inspect._checks.following import about_statistics
from mouse_core.inspect._findings import findings
from mouse_core.inspect._scan import Scan
from mouse_core.inspect.layout import costs, layout_of
from mouse_core.inspect.report import ActionsReport, ColumnReport, Report
from mouse_core.store.views import Store


def inspect(stream: RowStream | Store, *, ignore: Collection[str] = (), progress: bool = False) -> Report:
    """Look through recorded steps once, in memory that does not grow with them.

    Of a LeRobotDataset what can be read is looked at; episodes that cannot be are findings.

    Args:
        stream: The rows; ``mouse_core.formats.open`` gives them for a path. Or a store, as a view of one is.
        ignore: Codes of findings that are known and fine.
        progress: Whether a bar shows how far it is.

    Returns:
        What was found. ``show`` prints it, ``mouse_core.view.to_html`` makes a page of it.

    Raises:
        DataError: The data are damaged.
        SchemaError: Two columns of one name.
    """
    if isinstance(stream, Store):
        stream = stream_of(stream)
    notes = [Finding("reader", "note", text) for text in stream.notes]
    stream = stream if stream.mended is None else stream.mended()
    arrived = stream.alignment == "arrived"
    found = Scan(stream.schema, arrived=arrived)
    with (
        progress_bar("inspecting", total=stream.rows, unit="rows", enabled=progress) as advance,
        np.errstate(all="ignore"),  # infinities and huge values are counted, not warned about
    ):
        for block in blocks(stream):
            found.add(block)
            advance(block.num_rows)
    columns, episodes, actions = found.results()
    if stream.about.spec is not None:
        specs = {name: one.to_json() for name, one in stream.about.spec.items()}
        columns = [replace(column, spec=specs.get(column.name)) for column in columns]
    said = findings(
        columns,
        episodes,
        actions,
        arrived=arrived,
        rows=found.rows,
        places=found.all_places(),
        extremes=found.watch.at_extreme,
    )
    with np.errstate(all="ignore"):
        said += _watched(found, stream, columns, actions)
    said += [Finding(*fault) for fault in stream.faults]
    notes += [Finding(code, "note", text) for code, text in costs(layout_of(stream), stream.path)]
    return Report(
        source=stream.path,
        format=stream.format,
        alignment=stream.alignment,
        alignment_found=_alignment(stream, found),
        rows=found.rows,
        columns=columns,
        episodes=episodes,
        actions=actions,
        findings=sorted_by_level([finding for finding in said + notes if finding.code not in ignore]),
        about=json.loads(stream.about.to_json()),
    )


def _watched(
    found: Scan, stream: RowStream, columns: Sequence[ColumnReport], actions: ActionsReport | None
) -> Iterator[Finding]:
    """Findings of the checks that look at every row."""
    hashes, lengths = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    if found.episodes is not None:
        hashes, lengths = found.episodes.all_of_them()
    splits = stream.metadata.get("split_rows", {})
    yield from found.watch.findings(stream.about.dimensions, hashes=hashes, lengths=lengths, splits=splits)
    yield from _about_statistics(stream, columns, actions)


def _about_statistics(
    stream: RowStream, columns: Sequence[ColumnReport], actions: ActionsReport | None
) -> Iterator[Finding]:
    """Statistics that came with the data, beside what was counted."""
    said = stream.metadata.get("stats") or _saved_statistics(stream.path)
    if not isinstance(said, Mapping):
        return
    stated = {_column_of(str(key)): one for key, one in said.items() if isinstance(one, Mapping)}
    seen = {one.name: one.places for one in columns if one.name.startswith(("action", "observation"))}
    found = list(about_statistics(stated, _counted(seen)))
    # Whether those of actions count the placeholders of first rows depends on who counted.
    taken = list(about_statistics(stated, _counted({"action": actions.places if actions is not None else None})))
    yield from (one for one in found if one.column != "action" or taken or not actions)


def _counted(places: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Mean, deviation and range of columns of vectors, of which each place has some."""
    numbers = ("mean", "deviation", "low", "high")
    return {
        name: {key: np.asarray(one[key], np.float64) for key in numbers}
        for name, one in places.items()
        if one is not None and one.get("mean") and None not in one["mean"]
    }


def _saved_statistics(path: str) -> Any:
    """Return the statistics that ``mouse stats --save`` wrote into the dataset's folder, if any."""
    file = Path(path) / "meta" / "stats.json"
    try:
        return read_json_object(file) if file.is_file() else None
    except (MouseError, OSError, ValueError):
        return None  # no statistics that anybody could use


def _column_of(key: str) -> str:
    """The column that a feature of LeRobot's becomes."""
    return key.removesuffix(".state").replace(".", "_")


def _alignment(stream: RowStream, found: Scan) -> str:
    """Return the source of the alignment, and whether the rows agree with it."""
    if stream.format not in ("datasets", "parquet"):
        how = f"the {stream.format} reader lays rows out like this"
    elif stream.about.alignment is not None:
        how = "the data say so"
    else:
        how = "taken for granted, for the data do not say"
    if found.episodes is None or not found.rows:
        return f"{how}; without reward and done the rows cannot be checked"
    at_start = bool(found.episodes.anomalies["reward-at-start"])
    agree = {
        ("arrived", True): "rewards where episodes begin speak against it",
        ("arrived", False): "no reward stands where an episode begins",
        ("outgoing", True): "first rows hold a reward",
        ("outgoing", False): "no first row holds a reward",
    }
    return f"{how}; {agree[stream.alignment, at_start]}"
