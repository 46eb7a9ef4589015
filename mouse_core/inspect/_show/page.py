"""A report as one web page that needs nothing besides itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import column_type
from mouse_core.inspect._samples import Sample
from mouse_core.inspect._show.pictures import picture_columns, thumbnail
from mouse_core.inspect._show.svg import bar_chart, histogram, ranges, short
from mouse_core.inspect.report import ColumnReport, Distribution, Report
from mouse_core.inspect.text import COLUMN_HEAD, column_cells, number, said

# What the browser may load: nothing but what stands in the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STRIP = 12
_FEWEST_FRAMES = 24
_PICTURE_BYTES = 1_000_000
_MOST_VALUES = 64
_MOST_SMALL = 16


def to_html(report: Report) -> str:
    """The report as a page: plots, findings, a few images, and episodes to step through.

    The page holds everything it shows; it can be mailed, or opened from a folder. Texts of the data are escaped, and
    the page forbids the browser to load anything from elsewhere.
    """
    pictures = picture_columns(report.samples[0].rows.schema) if report.samples else []
    shown = [_Shown(sample, pictures, arrived=report.alignment == "arrived") for sample in report.samples]
    body = [
        _header(report),
        "<main>",
        _findings(report),
        _episodes(report),
        _steps(report),
        _strips(shown),
        _player(shown),
        _columns(report),
        "</main>",
        "<footer>Made by <code>mouse inspect</code>. This page loads nothing from anywhere.</footer>",
        _scripts(shown),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.source)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>\n{_beside('page.css')}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _beside(name: str) -> str:
    """The page's style or script, which hold no reference to anything outside of it."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- sections


def _header(report: Report) -> str:
    figures = [("rows", f"{report.rows:,}")]
    if report.episodes is not None:
        episodes = report.episodes
        figures += [("episodes", f"{episodes.count:,}"), ("transitions", f"{episodes.transitions:,}")]
        figures += [("mean length", short(_rounded(episodes.lengths.mean)))]
        figures += [("mean return", short(_rounded(episodes.returns.mean)))]
    figures.append(("warnings", str(len(report.warnings))))
    items = "".join(f"<li><b>{escape(value)}</b><span>{name}</span></li>" for name, value in figures)
    lines = "".join(f'<p class="dim">{escape(line)}</p>' for line in said(report))
    return (
        f'<header><h1>{escape(report.source)}</h1><p class="dim">{escape(report.format)} · alignment '
        f"<b>{report.alignment}</b>: {escape(report.alignment_found)}</p>{lines}<ul class=figures>{items}</ul></header>"
    )


def _findings(report: Report) -> str:
    items = [
        f'<div class="finding {finding.level}"><b>{escape(finding.code)}</b> {escape(finding.message)}</div>'
        for finding in report.findings
    ]
    if not report.warnings:
        items.insert(0, '<div class="finding good">No warnings.</div>')
    return _section("findings", "Findings", "".join(items))


def _episodes(report: Report) -> str:
    episodes = report.episodes
    if episodes is None or not episodes.count:
        return ""
    cards = [
        _distribution("Episode lengths", episodes.lengths, "steps"),
        _distribution("Returns", episodes.returns, "reward"),
    ]
    reward = report.column("reward")
    if reward is not None and reward.histogram is not None:
        cards.append(_card("Rewards", f"{_range(reward)}; a step", histogram(**reward.histogram, label="Rewards")))
    names = {"0": "0 alive", "1": "1 terminal", "2": "2 truncated"}
    codes = {names.get(code, f"{code} unknown"): count for code, count in episodes.done_codes.items()}
    ends = f"{episodes.terminated:,} terminated, {episodes.truncated:,} truncated, {episodes.open:,} without an end"
    cards.append(_card("Done codes", f"{ends}; found by {episodes.found_by}", bar_chart(codes, label="Done codes")))
    return _section("episodes", "Episodes", _cards(cards))


def _steps(report: Report) -> str:
    """How actions are used, and the ranges of observations."""
    cards = [*_actions(report), *_observations(report)]
    return _section("ranges", "Actions and observations", _cards(cards)) if cards else ""


def _actions(report: Report) -> Iterator[str]:
    actions = report.actions
    if actions is None:
        return
    if actions.counts is not None:
        chart = bar_chart(actions.counts, label="How often each action was taken")
        about = f"{len(actions.counts)} different ones; an episode's first row does not count"
        yield _card("Action use", about, chart)
        return
    places = actions.places or {}
    for place, bars in enumerate(places.get("histograms", [])[:_MOST_SMALL]):
        if bars:
            title = f"action[{place}]" if "low" in places else "action"
            yield _card(title, "", histogram(**bars, label=f"Use of {title}", height=120))
    if "low" in places and len(places["low"]) > _MOST_SMALL:
        yield _card("Action ranges", _KEY, ranges(places, label="Ranges of actions"))


_KEY = "From the lowest to the highest value; the thick part is the mean, give or take a standard deviation."


def _observations(report: Report) -> Iterator[str]:
    for column in report.columns:
        if not column.name.startswith("observation"):
            continue
        if column.places:
            width = len(column.places["low"])
            chart = ranges(column.places, label=f"Ranges of {column.name}")
            about = _KEY + (f" The first {_MOST_VALUES} of {width}." if width > _MOST_VALUES else "")
            yield _card(f"{column.name}: ranges", about, chart)
        elif column.histogram is not None:
            chart = histogram(**column.histogram, label=f"Values of {column.name}")
            yield _card(column.name, _range(column), chart)


def _columns(report: Report) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMN_HEAD)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in column_cells(column)) for column in report.columns)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _section("columns", "Columns", f'<div class="scroll" tabindex="0">{table}</div>')


def _section(name: str, title: str, content: str) -> str:
    return f"<section id={name}><h2>{title}</h2>{content}</section>"


def _cards(cards: Iterable[str]) -> str:
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(title: str, about: str, content: str) -> str:
    described = f"<p>{escape(about)}</p>" if about else ""
    return f'<div class="card"><h3>{escape(title)}</h3>{described}{content}</div>'


def _distribution(title: str, numbers: Distribution, unit: str) -> str:
    about = ""
    if numbers.low is not None:
        highest, middle = short(_rounded(numbers.high)), short(numbers.quantiles[2])
        about = f"{short(numbers.low)} to {highest}, median {middle} ({unit} an episode)"
    return _card(title, about, histogram(numbers.edges, numbers.counts, label=title))


def _range(column: ColumnReport) -> str:
    return f"{number(column.low)} to {number(column.high)}, mean {number(column.mean)}"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


# ---------------------------------------------------------------------- episodes to look at


class _Shown:
    """A sample, made ready for the page: plain values, and small images of some of its steps.

    Args:
        sample: The episode.
        pictures: Names of the columns with images.
        arrived: Whether the reward of the first row belongs to no transition.
    """

    def __init__(self, sample: Sample, pictures: Sequence[str], *, arrived: bool) -> None:
        self.sample = sample
        rows, places = sample.rows, sample.places
        self.trace = {"places": sample.places.tolist(), "sums": _sums(sample, arrived=arrived)}
        self.sums = self.trace["sums"]
        self.said = []
        if sample.gap is not None:
            first, last = sample.gap
            self.said.append(f"Steps {first:,} to {last:,} are left out here, and the curve has a gap there.")
        if pictures:
            chosen = _frames(rows, pictures)
            if len(chosen) < rows.num_rows:
                self.said.append(f"Pictures of {len(chosen):,} of {rows.num_rows:,} steps are here.")
            rows = pa.concat_tables([rows.slice(place, 1) for place in chosen.tolist()])
            places, self.sums = places[chosen], [self.sums[place] for place in chosen]
        self.places = [int(place) for place in places]
        self.images = {name: [thumbnail(value.as_py()) for value in rows.column(name)] for name in pictures}
        names = [name for name in rows.schema.names if name not in pictures]
        self.steps = [{name: _simple(value) for name, value in row.items()} for row in rows.select(names).to_pylist()]
        self.title = (
            f"{sample.label}: episode {sample.number:,}, {sample.transitions:,} steps, return {short(sample.total)}"
        )

    def data(self) -> dict[str, Any]:
        """What the script needs."""
        return {
            "transitions": self.sample.transitions,
            "places": self.places,
            "steps": self.steps,
            "sums": self.sums,
            "trace": self.trace,
            "said": " ".join(self.said),
            "images": self.images,
            "vector": self._vector(),
        }

    def _vector(self) -> dict[str, Any] | None:
        """The first column of observations that are vectors, with the range they have in this episode."""
        for field in self.sample.rows.schema:
            kind = column_type(field.type)
            if field.name.startswith("observation") and kind.kind == "list" and kind.depth == 1:
                rows = [
                    [_finite(value) for value in (step.get(field.name) or [])][:_MOST_VALUES] for step in self.steps
                ]
                known = [value for row in rows for value in row if value is not None]
                low, high = (min([0.0, *known]), max([0.0, *known]))
                return {"name": field.name, "rows": rows, "low": low, "high": high}
        return None


def _sums(sample: Sample, *, arrived: bool) -> list[float | None]:
    """The reward so far at every row that was kept; before a gap counted from the beginning, after it from the end.

    None where it is not known, or infinite.
    """
    rewards = np.asarray(sample.rows.column("reward").to_numpy(), np.float64).copy()
    if arrived:
        rewards[:1] = 0.0  # as in the return
    head = len(rewards) if sample.gap is None else sample.gap[0]
    before = np.cumsum(rewards[:head])
    following = np.cumsum(rewards[:head:-1])[::-1]
    after = sample.total - np.append(following, 0.0)[: len(rewards) - head]
    sums: list[float] = [*before.tolist(), *after.tolist()]
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in sums]


def _frames(rows: pa.Table, pictures: Sequence[str]) -> npt.NDArray[np.int64]:
    """Which rows are shown, so that their pictures do not make the page large."""
    each = sum(len(thumbnail(rows.column(name)[rows.num_rows // 2].as_py()) or "") for name in pictures)
    most = int(np.clip(_PICTURE_BYTES // max(each, 1), _FEWEST_FRAMES, rows.num_rows))
    return _spread(rows.num_rows, most)


def _spread(count: int, most: int) -> npt.NDArray[np.int64]:
    """At most so many of the numbers from 0 to below ``count``, evenly spread; of 5 in 3 they are 0, 2 and 4."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _simple(value: Any) -> Any:
    """A value as JSON has it: long lists cut, numbers without a JSON sign as texts, bytes as their number."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return f"array of {len(value)} rows"
        return [_simple(item) for item in value[:_MOST_VALUES]]
    if isinstance(value, dict):
        return {str(key): _simple(item) for key, item in value.items()}
    if value is None or isinstance(value, int | str):
        return value[:500] if isinstance(value, str) else value
    return str(value)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _strips(shown: Sequence[_Shown]) -> str:
    strips = []
    for episode in shown:
        for name, images in episode.images.items():
            chosen = _spread(len(images), _STRIP).tolist()
            figures = "".join(_figure(images[place], name, episode.places[place]) for place in chosen)
            title = f"{name}, {episode.title}" if len(episode.images) > 1 else episode.title
            strips.append(_card(title, " ".join(episode.said), f'<div class="strip" tabindex="0">{figures}</div>'))
    return _section("images", "Images", f'<div class="strips">{"".join(strips)}</div>') if strips else ""


def _figure(address: str | None, name: str, place: int) -> str:
    if address is None:
        return ""
    return (
        f'<figure><img src="{address}" alt="{escape(name)} at step {place}"><figcaption>{place}</figcaption></figure>'
    )


def _player(shown: Sequence[_Shown]) -> str:
    if not shown:
        return ""
    options = "".join(f'<option value="{at}">{escape(episode.title)}</option>' for at, episode in enumerate(shown))
    player = (
        f'<div class="controls"><select id="pick" aria-label="Episode">{options}</select></div>'
        '<div class="controls"><button id="back" aria-label="Previous step">‹</button>'
        '<button id="play" aria-pressed="false">Play</button><button id="next" aria-label="Next step">›</button>'
        '<input id="slide" type="range" min="0" value="0" aria-label="Step"><span id="where" class="dim"></span></div>'
        '<div class="player"><div class="card"><div id="frames"></div><dl id="facts"></dl></div>'
        '<div class="card"><h3>Reward so far</h3><p id="said"></p><svg id="trace" viewBox="0 0 300 152" role="img" '
        'aria-label="Sum of rewards up to this step"></svg></div>'
        '<div class="card" id="vector"><h3 id="vector-name"></h3><svg id="values" viewBox="0 0 300 152" role="img" '
        'aria-label="The observation at this step"></svg></div></div>'
    )
    return _section("player", "Step through an episode", player)


def _scripts(shown: Sequence[_Shown]) -> str:
    if not shown:
        return ""
    data = json.dumps([episode.data() for episode in shown], allow_nan=False, separators=(",", ":"))
    # Nothing in the data can end the element it stands in.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="steps">{data}</script><script>\n{_beside("page.js")}</script>'
