"""Writes the viewer's page as a single file that contains its data, scripts and style."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, MouseError
from mouse_core.inspect import Finding, Report, inspect
from mouse_core.store.views import Store
from mouse_core.view._answers import Answers
from mouse_core.view._inspecting import report_content
from mouse_core.view.columns import read_dimensions
from mouse_core.view.opening import Shown, shown_of
from mouse_core.view.pictures import picture, shown, small
from mouse_core.view.thinning import thinned
from mouse_core.view.viewer import plotly_script

Int64s = npt.NDArray[np.int64]

MOST_EPISODES = 10
"""Largest number of embedded episodes."""

# Number of kept episodes with findings, in addition to the first, best, median, worst, shortest and longest episode.
_MOST_MATCHES = 4


def chosen(
    lengths: Int64s, returns: npt.NDArray[np.float64] | None, findings: Sequence[Finding] = ()
) -> dict[int, list[str]]:
    """Return the indices of the episodes to embed, and the reasons: a few typical episodes, and episodes with findings.

    If there are at most ``MOST_EPISODES`` episodes, all episodes are embedded.

    Args:
        lengths: Number of rows of every episode, ``[n]``.
        returns: Returns of the episodes; None without rewards.
        findings: The findings, most severe first.
    """
    found: dict[int, list[str]] = {}

    def keep(number: int, why: str) -> None:
        reasons = found.setdefault(number, [])
        if why not in reasons:
            reasons.append(why)

    if len(lengths):
        keep(0, "first")
        (known,) = np.nonzero(np.isfinite(returns)) if returns is not None else (np.zeros(0, np.int64),)
        if returns is not None and len(known):
            order = known[np.argsort(returns[known], kind="stable")]
            for why, place in (("highest return", -1), ("median return", (len(order) - 1) // 2), ("lowest return", 0)):
                keep(int(order[place]), why)
        keep(int(np.argmin(lengths)), "shortest")
        keep(int(np.argmax(lengths)), "longest")
    room = len(found) + _MOST_MATCHES
    for finding in findings:
        number = finding.episode
        if number is not None and 0 <= number < len(lengths) and (number in found or len(found) < room):
            keep(number, finding.code)
    for number in range(len(lengths) if len(lengths) <= MOST_EPISODES else 0):
        found.setdefault(number, [])
    return dict(sorted(found.items()))


def spread(count: int, most: int, also: Iterable[int] = ()) -> Int64s:
    """Return up to ``most`` evenly spaced indices below ``count``, and the indices in ``also``, ascending.

    For example, with ``count=5`` and ``most=3``, the indices are 0, 2 and 4.
    """
    found = np.linspace(0, count - 1, min(max(most, 1), count)).round().astype(np.int64)
    return np.unique(np.concatenate([found, np.array([one for one in also if 0 <= one < count], np.int64)]))


def shares(widths: Sequence[int], most: int) -> list[int]:
    """Return how many dimensions of each column to keep: at least one for each column, and at most ``most`` in total.

    For example, with the widths 3, 10 and 1,000 and ``most=100``, the result is 3, 10 and 62: only the widest column
    loses dimensions.
    """
    limit = max(widths, default=0)
    while limit > 1 and sum(min(width, limit) for width in widths) > most:
        limit //= 2
    return [min(width, limit) for width in widths]


Column = dict[str, Any]

# Approximate largest size in bytes of each part of a page: the list, curves, values of steps, and images.
_LIST, _CURVES, _STEPS, _PICTURES = 1_000_000, 3_000_000, 2_000_000, 2_000_000
# Approximate bytes of a stretch of a thinned curve.
_STRETCH = 30
_MOST_LISTED, _MOST_STEPS, _MOST_PICTURES = 4000, 500, 48
_MOST_COLUMNS, _MOST_CURVES, _MOST_CAMERAS = 200, 4096, 8
_MOST_TASKS, _MOST_FOUND, _MOST_NAMED = 100, 500, 200
# Largest number of characters of a text.
_CELL, _VALUE = 100, 200
# Name of the list's column with the reason for keeping an episode.
_KEPT = "kept"


def stored(one: Shown, report: Report, *, command: str, files: bool) -> dict[str, Any]:
    """Return the content of a page about a store: an object for JSON, of bounded size.

    Args:
        one: The shown store.
        report: The report of the inspection.
        command: The command that shows all episodes.
        files: Whether to open images that rows name by path.
    """
    assert one.inspection is not None
    one.inspection.report = report
    (source,) = Answers([one]).sources({})["sources"]
    while not one.episodes.is_whole:
        one.episodes.advance(1.0)
    one.episodes.mark(one.inspection.warnings())
    own = one.episodes.columns()
    returns = own["return"] if "return" in one.episodes.names() else None
    reasons = chosen(own["length"], returns, report.findings)
    columns, left_out = _columns(source["columns"], _MOST_CURVES // max(len(reasons), 1))
    listed = _list(one, reasons)
    keeper = _Keeper(one, columns, len(reasons), files)
    named = [(finding.episode, finding.step) for finding in report.findings]
    kept = [
        keeper.episode(number, listed["columns"], [step for at, step in named if at == number and step is not None])
        for number in reasons
    ]
    source["columns"], source["tasks"] = columns, [task[:_CELL] for task in source["tasks"][:_MOST_TASKS]]
    source["stored"] = {
        "episodes": len(kept),
        "sort": _KEPT if len(kept) < listed["total"] else "",
        "said": _sentences([*_about(listed, kept), *left_out, *keeper.missing()]),
        "command": command,
    }
    return {"sources": [source], "list": listed, "kept": kept, "findings": _findings(report)}


def report_alone(report: Report, *, name: str, command: str, why: str) -> dict[str, Any]:
    """Return the content of a page that shows a report without rows.

    Args:
        report: The report.
        name: The name of the rows.
        command: The command that shows the rows.
        why: The reason why the page has no rows.
    """
    nothing = {"columns": ["episode"], "texts": [], "episodes": [], "rows": report.rows, "total": 0}
    source = {"name": name, "rows": report.rows, "generation": 0, "alignment": report.alignment, "batches": False}
    source |= {"columns": [], "tasks": [], "inspected": "done", "done": [], "reward": None}
    source["stored"] = {"episodes": 0, "sort": "", "said": _sentences([why]), "command": command}
    return {"sources": [source], "list": nothing, "kept": [], "findings": _findings(report)}


def _about(listed: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return sentences that state which episodes are embedded and which are not."""
    total = listed["total"]
    if len(kept) < total:
        yield f"{len(kept):,} of {total:,} episodes are here step by step, as the column {_KEPT} says."
    else:
        yield "All episodes are here step by step." if kept else "There are no episodes."
    if any(episode["thinned"] for episode in kept):
        yield (
            "Long ones are thinned: curves keep the least and the largest value of each stretch, the cursor some steps."
        )
    if len(listed["episodes"]) < total:
        yield f"The list has {len(listed['episodes']):,} of {total:,} episodes, evenly spread."


def _sentences(some: Sequence[str]) -> str:
    return " ".join(one for one in (*some, "This page loads nothing from anywhere.") if one)


def _findings(report: Report) -> dict[str, Any]:
    found = report_content(report)
    found["findings"] = [{**one, "episodes": one["episodes"][:_MOST_NAMED]} for one in found["findings"][:_MOST_FOUND]]
    found["tables"] = [{**table, "rows": table["rows"][:_MOST_FOUND]} for table in found["tables"]]
    return {"state": "done", "done": report.rows, "total": report.rows, "error": "", "report": found}


def _columns(described: Sequence[Column], most: int) -> tuple[list[Column], list[str]]:
    """Return the kept columns with their kept dimensions, and notes about columns and dimensions that are left out."""
    kept = list(described[:_MOST_COLUMNS])
    numbers = [column for column in kept if column["kind"] == "numbers"]
    widths = shares([max(column["width"], 1) for column in numbers], most)
    pairs = zip(numbers, widths, strict=True)
    cut: dict[str, int] = {column["name"]: width for column, width in pairs if width < column["width"]}
    said = [
        f"Of {column['name']} the first {cut[column['name']]:,} of {column['width']:,} dimensions are here."
        for column in numbers
        if column["name"] in cut
    ]
    if len(kept) < len(described):
        said.append(f"The first {len(kept):,} of {len(described):,} columns are here.")
    return [_narrowed(column, cut.get(column["name"], int(column["width"]))) for column in kept], said


def _narrowed(column: Column, width: int) -> Column:
    return {**column, "width": width, "names": [str(name)[:_CELL] for name in column["names"][:width]]}


# ---------------------------------------------------------------------- the list


def _list(one: Shown, kept: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the list of episodes; if there are very many episodes, return only a part of the list."""
    episodes = one.episodes
    names = [name for name in episodes.names() if name not in ("start", _KEPT)][:_MOST_COLUMNS]
    total = len(episodes)
    numbers = spread(total, _MOST_LISTED, kept) if total else np.zeros(0, np.int64)
    while True:
        columns = {name: _cells(episodes.values(name, numbers)) for name in names}
        why = [", ".join(kept.get(number, ())) or None for number in numbers.tolist()]
        columns = {"episode": columns.pop("episode"), _KEPT: why, **columns}
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        size = len(json.dumps(rows))
        if size <= _LIST or len(numbers) <= len(kept) + 1:
            break
        numbers = spread(total, len(numbers) * _LIST // (2 * size), kept)
    texts = [name for name, values in columns.items() if any(isinstance(value, str) for value in values)]
    return {"columns": [*columns], "texts": texts, "episodes": rows, "rows": one.snapshot.num_rows, "total": total}


def _cells(values: npt.NDArray[Any]) -> list[Any]:
    if values.dtype.kind == "f":
        return _rounded(values)
    return [value[:_CELL] if isinstance(value, str) else value for value in values.tolist()]


def _rounded(values: npt.NDArray[np.float64]) -> list[float | int | None]:
    """Return integers unchanged, and floats rounded to six digits; NaN and infinity become None."""
    return [_short(value) if value - value == 0 else None for value in values.tolist()]


def _short(value: float) -> float | int:
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.6g}")


# ---------------------------------------------------------------------- episodes


class _Keeper:
    """Converts episodes of a store to the content of the page.

    Args:
        one: The shown store.
        columns: The columns to keep, with their kept dimensions.
        count: Number of kept episodes; each gets an equal share of the available bytes.
        files: Whether to open images that rows name by path.
    """

    def __init__(self, one: Shown, columns: Sequence[Column], count: int, files: bool) -> None:
        self._one, self._snapshot, self._files = one, one.snapshot, files
        self._numbers = [column for column in columns if column["kind"] == "numbers"]
        self._texts = [column for column in columns if column["kind"] != "image"]
        self._cameras = [column["name"] for column in columns if column["kind"] == "image"]
        self._count = max(count, 1)
        width = sum(max(column["width"], 1) for column in self._numbers)
        self._stretches = max(_CURVES // self._count // max(width, 1) // _STRETCH, 20)
        self._pictures = dict.fromkeys(self._cameras[:_MOST_CAMERAS], 0)

    def missing(self) -> list[str]:
        """Return the note on images that are not embedded."""
        none = [name for name in self._cameras if not self._pictures.get(name)]
        named = f"{', '.join(none[:4])}{' and others' if len(none) > 4 else ''}"
        return [f"Pictures of {named} are not here: they lie in other files, or cannot be read."] if none else []

    def episode(self, number: int, names: Sequence[str], also: Sequence[int]) -> dict[str, Any]:
        """Return the content of an episode: its row in the list, curves, values of steps, and images.

        Args:
            number: The index of the episode.
            names: Columns of the list.
            also: Steps that are always kept.
        """
        at = np.array([number])
        values = {name: _cells(self._one.episodes.values(name, at))[0] for name in (*names, "start") if name != _KEPT}
        begin, length = int(values["start"]), int(values["length"])
        curves = {column["name"]: self._curves(column, begin, length) for column in self._numbers}
        steps, texts = self._steps(begin, length, also[:_MOST_PICTURES])
        some = len(steps) < length
        return {
            "episode": values,
            "thinned": some or any(curve["steps"] is not None for one in curves.values() for curve in one),
            "curves": curves,
            "steps": steps.tolist() if some else None,
            "columns": [column["name"] for column in self._texts],
            "values": texts,
            "pictures": {name: self._strip(name, begin, steps) for name in self._pictures},
        }

    def _curves(self, column: Column, begin: int, length: int) -> list[dict[str, Any]]:
        width = max(column["width"], 1)
        read = partial(read_dimensions, self._snapshot, column["name"], range(width), begin)
        found = thinned(read, 0, length, self._stretches, width)
        return [
            {
                "steps": None if len(curve.steps) == length else curve.steps.tolist(),
                "values": _rounded(curve.values),
            }
            for curve in found
        ]

    def _steps(self, begin: int, length: int, also: Sequence[int]) -> tuple[npt.NDArray[np.int64], list[Any]]:
        """Return the embedded steps, and their values as texts by column."""
        each = len(json.dumps(self._values(begin, [0])))
        most = int(np.clip(_STEPS // self._count // each, 2, _MOST_STEPS))
        steps = spread(length, most, also)
        parts = [steps[at : at + 64].tolist() for at in range(0, len(steps), 64)]
        return steps, [texts for part in parts for texts in self._values(begin, part)]

    def _values(self, begin: int, steps: Sequence[int]) -> list[list[list[str]]]:
        values = self._snapshot.rows([begin + step for step in steps], {column["name"] for column in self._texts})
        nothing = [None] * len(steps)
        return [
            [
                [text[:_VALUE] for text in shown(values.get(column["name"], nothing)[at])[: max(column["width"], 1)]]
                for column in self._texts
            ]
            for at in range(len(steps))
        ]

    def _strip(self, name: str, begin: int, steps: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Return the images of some steps, as data URLs."""
        each = len(self._address(name, begin + int(steps[len(steps) // 2])) or "")
        room = _PICTURES // self._count // len(self._pictures) // max(each, 1)
        some = steps[spread(len(steps), int(np.clip(room, 2, _MOST_PICTURES)))].tolist()
        found = [self._address(name, begin + step) for step in some]
        self._pictures[name] += sum(one is not None for one in found)
        return {"steps": some, "files": found}

    def _address(self, name: str, row: int) -> str | None:
        try:
            encoded, kind = small(picture(self._snapshot, name, row, files=self._files)[0])
        except (MouseError, ImportError, OSError):
            return None
        return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


_PAGE = Path(__file__).with_name("page")
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class) (\w+)", re.MULTILINE)
# Policy of the page: the browser runs only the two scripts with these digests, and loads nothing. Plotly sets styles.
_POLICY = (
    "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def check_plotly() -> None:
    """Raise ImportError, which names the package to install, if Plotly is missing."""
    plotly_script()


def to_html(
    store: Store | None,
    report: Report | None = None,
    *,
    name: str = "store",
    command: str = "",
    files: bool = False,
    why: str = "",
) -> str:
    """Return the viewer's page as a single HTML file, with some episodes of a store and the findings of an inspection.

    The file loads nothing from other files or hosts, so it can be mailed, or opened from a folder. If there are many
    episodes, the file contains up to ten: the first episode, the episodes with the highest, median and lowest return,
    the shortest and the longest episode, and episodes with findings. Curves of long episodes have fewer points. Plotly
    takes 5 MB of the file, and the data take at most 8 MB. The browser runs only the scripts of the page; texts of the
    data are never run as scripts.

    Args:
        store: The store. With None, only the report is shown.
        report: The report of ``inspect``. With None, the store is inspected.
        name: Name of the store on the page.
        command: The command that shows all episodes, such as ``mouse view recordings``; the page states this command.
        files: Whether to include images that rows name by path, and frames of videos. Set this only if the paths in the
            data do not lead to private files.
        why: The reason why the page has only a report.

    Raises:
        ConfigError: Neither a store nor a report is given.
        DataError: The data are damaged.
        ImportError: Plotly, which draws the plots, is not installed: it comes with the extra ``view``.
    """
    plotly = plotly_script().read_text(encoding="utf-8")
    command = command or "mouse view"
    if isinstance(store, Store):
        (one,) = shown_of([(name, store)])
        held = stored(one, inspect(store) if report is None else report, command=command, files=files)
    elif store is None and report is not None:
        held = report_alone(report, name=name, command=command, why=why)
    else:
        raise ConfigError(f"to_html: expected a store, or only a report, found {type(store).__name__}")
    # Escaped, so that no text ends the element that contains it.
    data = json.dumps(held, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    scripts = [_inline(plotly), _inline(_bundled())]
    title = escape(name.encode("utf-8", "replace").decode())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>\n{(_PAGE / 'view.css').read_text(encoding='utf-8')}</style></head>\n"
        f"<body><noscript>This page is made of scripts.</noscript>\n"
        f'<script type="application/json" id="stored">{data}</script>\n'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _POLICY.format(digests=" ".join(f"'sha256-{digest}'" for digest in digests))


def _inline(script: str) -> str:
    """Convert a script for embedding.

    Its text cannot end the HTML element, and the browser computes the same digest.
    """
    lines = script.replace("\r\n", "\n").replace("\r", "\n").replace("<!--", "<\\!--")
    return re.sub(r"</(?=script)", r"<\\/", lines, flags=re.IGNORECASE)


def _bundled() -> str:
    """Join the page's modules to a single script.

    Each module becomes a function that returns its exports; imported modules are first.
    """
    made: dict[str, str] = {}

    def add(name: str) -> None:
        text = (_PAGE / f"{name}.js").read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(text):
            if other not in made:
                add(other)
        exported = ", ".join(found for _, found in _EXPORT.findall(text))
        text = _IMPORT.sub(r"const \1 = module_\2;", _EXPORT.sub(r"\1 \2", text))
        made[name] = f"const module_{name} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"

    add("view")
    return "\n".join(['(() => {\n"use strict";', *made.values(), "})();"])
