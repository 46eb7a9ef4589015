"""Writes the page of a study: one HTML file that shows the records of its runs, and loads no other files.

The parts of this module are, in order: the style; the numbers of groups of runs; plots, drawn by matplotlib as SVG in
the colours of the page; texts and tables; and the sections of the page. The only text in plots is numbers; names are
shown as escaped text around the plots.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from html import escape
from itertools import combinations, count, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mouse_core.files.writing import write_file
from mouse_study.comparing import TOLERANCES, Pair, pairs, verdict
from mouse_study.results import Results, Run
from mouse_study.statistics import Band, band, meaning, probability_above

STYLE = """
:root { color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --ink: #1c2430; --dim: #5d6b7c; --line: #dfe4ea; --grid: #e4e9ef;
  --warn: #8a5200; --warn-back: #fff4de; --good: #216b40; --good-back: #e7f5ec;
  --c0: #d1495b; --c1: #2e6fb7; --c2: #3a8a4f; --c3: #8d5bb5; --c4: #b9770e; --c5: #50707f; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --card: #1b2128; --ink: #e5eaf0; --dim: #9aa7b5; --line: #2e3742; --grid: #2a323c;
  --warn: #f3c069; --warn-back: #33290f; --good: #84d3a2; --good-back: #14301f;
  --c0: #f2808c; --c1: #79b0ee; --c2: #7cc98d; --c3: #c39ae6; --c4: #edb458; --c5: #9dbccb; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main, header, footer { max-width: 1180px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 28px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 38px 0 10px; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 22px 0 8px; font-weight: 600; overflow-wrap: anywhere; }
.card h3 { margin: 0 0 6px; }
p { margin: 0 0 10px; max-width: 80ch; overflow-wrap: anywhere; }
.dim { color: var(--dim); } .small { font-size: .88rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; padding: 0; list-style: none; }
.figures li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  flex: 1 1 auto; min-width: 96px; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--dim); font-size: .85rem; }
.verdict { border-radius: 10px; padding: 10px 14px; margin: 14px 0 0; max-width: none; font-weight: 600;
  font-size: 1.05rem; }
.good { background: var(--good-back); border-left: 4px solid var(--good); }
.warning { background: var(--warn-back); border-left: 4px solid var(--warn); }
.yes { color: var(--good); } .no { color: var(--warn); }
.pairs { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 0 14px; margin: 0;
  list-style: none; max-height: 80vh; overflow-y: auto; }
.pairs li { padding: 10px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.pairs li:last-child { border-bottom: 0; } .pairs p { margin: 2px 0 0; max-width: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; padding: 0; list-style: none;
  font-size: .88rem; }
.legend li { overflow-wrap: anywhere; min-width: 0; }
.legend i { display: inline-block; width: 16px; height: 10px; border-radius: 3px; margin-right: 6px; }
.cards { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); margin: 0 0 12px; }
.cards.one { grid-template-columns: minmax(0, 640px); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px; min-width: 0; }
.card p { font-size: .85rem; color: var(--dim); margin: 6px 0 0; }
svg { display: block; width: 100%; height: auto;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); margin: 0 0 12px; max-height: 80vh; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
thead th { color: var(--dim); font-weight: 600; position: sticky; top: 0; background: var(--card); }
.text { text-align: left; max-width: 44ch; overflow-wrap: anywhere; }
td.text { min-width: 9ch; } td.long { white-space: normal; min-width: 30ch; }
footer { margin-top: 36px; padding: 16px; color: var(--dim); font-size: .85rem; }
@media (max-width: 560px) { h2 { margin-top: 30px; } }
"""

#: The number of frameworks with different colours.
COLOURS = 6

Floats = NDArray[np.float64]
Series = Mapping[str, tuple[NDArray[np.int64], Floats]]

#: Recorded names of time and memory; all other names are values of the training.
COSTS = ("wait", "compute", "memory", "setup")
#: The last tenth (1 / 10) of a run's recorded values counts as its end.
_END = 10


@dataclass(frozen=True)
class Group:
    """The runs of one variant in one framework, which differ in their seeds.

    Attributes:
        variant: the variant.
        framework: the framework.
        colour: the framework's index among all frameworks.
        runs: all of the runs, by seed.
    """

    variant: str
    framework: str
    colour: int
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """The finished runs; statistics use only these."""
        return tuple(run for run in self.runs if run.status == "done")


def groups(results: Results) -> list[Group]:
    """Return the runs grouped by variant and framework, sorted by name, whatever the order of ``runs`` is."""
    frameworks = sorted({run.framework for run in results.runs})
    found = groupby(sorted(results.runs, key=attrgetter("variant", "framework", "seed")), attrgetter(*_NAMES_OF_GROUP))
    return [Group(variant, name, frameworks.index(name), tuple(runs)) for (variant, name), runs in found]


_NAMES_OF_GROUP = ("variant", "framework")


def by_variant(members: Iterable[Group]) -> list[tuple[str, list[Group]]]:
    """Return the groups of each variant."""
    return [(variant, list(own)) for variant, own in groupby(members, attrgetter("variant"))]


def trained_names(results: Results) -> list[str]:
    """Return the names of the values that the training recorded: the loss, then evaluations, then all other names."""
    names = [name for name in results.names if name not in COSTS]
    return sorted(names, key=lambda name: (name != "loss", not name.startswith("eval"), name))


def curve(group: Group, series: Series) -> tuple[NDArray[np.int64], Floats] | None:
    """Return the steps ``[n]`` that all finished runs of a group recorded, and their values ``[runs, n]``; or None."""
    found = [series[run.run] for run in group.done if run.run in series]
    if not found:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in found])
    if not len(steps):
        return None
    return steps, np.stack([values[np.isin(its, steps)][: len(steps)] for its, values in found])


def final_values(runs: Sequence[Run], series: Series) -> Floats:
    """Return the final value of each run: the mean of the last tenth of its recorded values, at least of the last
    value.

    For 300 losses, the final value is the mean of the last 30 losses; for 5 evaluations, it is the last evaluation.
    Runs without values are left out.
    """
    found = [series[run.run][1] for run in runs if run.run in series]
    with np.errstate(over="ignore", invalid="ignore"):
        ends = [values[-max(1, len(values) // _END) :].mean() for values in found if len(values)]
    return np.array(ends, np.float64)


def times(run: Run, wait: Series, compute: Series) -> tuple[float, float, float, float | None]:
    """Return the times of a run in seconds, from its recorded waiting and computing times.

    Returns:
        Four numbers: the waiting time after the first step; the computing time after the first step; the time of the
        first step, including compilation and other one-time work; and the steps per second after the first step,
        including waiting, or None for fewer than two steps.
    """
    waited, computed = (series[run.run][1] if run.run in series else np.empty(0) for series in (wait, compute))
    first = run.first_step_seconds if run.first_step_seconds is not None else float(computed[:1].sum())
    waited, computed = (np.where(np.isfinite(values), values, 0.0) for values in (waited, computed))
    after = float(waited[1:].sum()), float(computed[1:].sum())
    steps = len(computed) - 1
    rate = steps / sum(after) if steps > 0 and sum(after) > 0.0 else None
    return *after, first if math.isfinite(first) else 0.0, rate


def thinned(x: NDArray[np.int64], values: Floats, most: int, *, largest: bool = False) -> tuple[Floats, Floats, int]:
    """Merge neighbouring points, so that at most ``most`` points are left.

    Example: with 7 points and ``most`` 3, the points 0 to 2, 3 to 5, and 6 become one point each.

    Args:
        x: the positions of the points, ``[n]``.
        values: the values, ``[..., n]``.
        most: the number of points to keep.
        largest: whether merged points become their maximum, in place of their mean.

    Returns:
        x, values, and the number of points that were merged into one.
    """
    size = max(1, -(-len(x) // most))
    firsts = np.arange(0, len(x), size)
    counts = np.diff([*firsts, len(x)])
    positions = np.add.reduceat(x.astype(np.float64), firsts) / counts
    if largest:
        return positions, np.maximum.reduceat(values, firsts, axis=-1), size
    return positions, np.add.reduceat(values, firsts, axis=-1) / counts, size


# ---------------------------------------------------------------------- pictures

#: Values this large are not drawn: matplotlib subtracts them from each other.
BEYOND = 1e100

# Placeholders for the colours of the style, which differ in light and dark mode.
_INK, _DIM, _GRID, _CARD = "#020001", "#020002", "#020003", "#020004"
_NAMES = {_INK: "--ink", _DIM: "--dim", _GRID: "--grid", _CARD: "--card"}
_NAMES |= {f"#0100{place:02x}": f"--c{place}" for place in range(COLOURS)}
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "mouse_study",
    "svg.fonttype": "none",
    "text.color": _DIM,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _DIM,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.useoffset": False,
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), _GRID),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), _DIM),
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 11,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Line:
    """A curve, with or without a band.

    Attributes:
        x: the horizontal positions of the curve's points, ``[n]``.
        y: the values of the points.
        colour: the index of its colour.
        low: the lower edge of the band.
        high: the upper edge.
        style: "line", "dashed" for a run that did not finish, or "dots".
    """

    x: NDArray[Any]
    y: Floats
    colour: int
    low: Floats | None = None
    high: Floats | None = None
    style: str = "line"


def picture(
    lines: Sequence[Line],
    *,
    label: str,
    across: str = "",
    logarithmic: bool = False,
    mark: float | None = None,
) -> str:
    """Return a plot of curves with their bands as an ``svg`` element.

    Args:
        lines: the curves; the first curve is drawn below the others and widest, so that two equal curves are both
            visible.
        label: the description of the plot for screen readers, plain text.
        across: the label of the horizontal axis.
        logarithmic: whether the value axis is logarithmic.
        mark: a value at which a line is drawn.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    # matplotlib's default settings replace the user's settings; the backend is kept, because it cannot be restored.
    settings = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    with matplotlib.rc_context(cast("Any", settings | _SETTINGS)):
        figure = Figure(figsize=(5.2, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        last = max([1, *(line.colour for line in lines)])
        for line in lines:
            color = f"#0100{line.colour % COLOURS:02x}"
            y, low, high = (
                None if values is None else np.where(np.abs(values) < BEYOND, values, np.nan)
                for values in (line.y, line.low, line.high)
            )
            if low is not None and high is not None:
                axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
            styles: dict[str, dict[str, Any]] = {
                "line": {"linewidth": 3.0 - 1.8 * line.colour / last},
                "dashed": {"linewidth": 1.2, "linestyle": (0, (3, 2))},
                "dots": {"linestyle": "none", "marker": ".", "markersize": 2.5},
            }
            options: dict[str, Any] = ({"marker": "o", "markersize": 4} if len(line.x) < 2 else {}) | styles[line.style]
            axes.plot(line.x, cast("Any", y), color=color, **options)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\u2212")))
            axes.yaxis.set_minor_formatter(NullFormatter())
        if mark is not None:
            axes.axhline(mark, color=_DIM, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlabel(across)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', svg)
    inside = svg[svg.index(">") + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r"#0[12]00[0-9a-f]{2}", lambda found: f"var({_NAMES[found[0]]})", inside)
    inside = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", inside)
    box = view[1] if view else "0 0 374 216"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label, quote=True)}">{inside}</svg>'


def with_unique_ids(page: str) -> str:
    """Return a page in which the ids of each plot begin with the plot's index."""
    numbers = count(1)

    def renamed(svg: re.Match[str]) -> str:
        number = next(numbers)
        found = re.sub(r'\bid="', f'id="p{number}-', svg[0])
        return re.sub(r'(url\(|href=")#', rf"\1#p{number}-", found)

    return re.sub(r"<svg .*?</svg>", renamed, page, flags=re.DOTALL)


# ---------------------------------------------------------------------- texts, tables, cards

_LONGEST = 2000
_MOST_ROWS, _MOST_CARDS = 400, 24


def text(value: object) -> str:
    """Return a value as escaped text of the page; very long texts are cut."""
    # A lone surrogate, which JSON may contain, cannot be written as UTF-8.
    plain = str(value).encode("utf-8", "replace").decode()
    plain = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in plain)
    cut = f"{plain[:_LONGEST]}… ({len(plain):,} characters)"
    return escape(plain if len(plain) <= _LONGEST else cut, quote=True)


def number(value: object, digits: int = 4) -> str:
    """Return a number in a few characters; a dash for None."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, int) and abs(value) < 10_000_000:
        return f"{value:,}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def seconds(value: float | None) -> str:
    """Return a time in a suitable unit."""
    if value is None or not math.isfinite(value):
        return number(value)
    if value < 1.0:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def megabytes(value: float | None) -> str:
    """Return bytes as MiB."""
    return number(value) if value is None or not math.isfinite(value) else f"{value / 2**20:,.0f} MiB"


def interval(found: Band) -> str:
    """Return the edges of a band; a dash without edges."""
    if found.low is None or found.high is None:
        return "–"
    return f"{number(float(found.low))} to {number(float(found.high))}"


def _more(count: int, most: int, what: str) -> str:
    """Return a note about the elements that are not shown, if there are more than ``most`` elements."""
    return f'<p class="dim small">{count - most:,} more {what} are not shown.</p>' if count > most else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int, classes: Sequence[str] = ()) -> str:
    """Return a table, which scrolls in a narrow window.

    Args:
        head: plain texts for the first row.
        rows: cells of HTML.
        texts: how many columns, from the left, contain text; the other columns contain numbers.
        classes: additional classes of the columns, in their order.
    """
    kinds = [("text " * (place < texts) + "".join(classes[place : place + 1])).strip() for place in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(cells, kinds, strict=True)
        return "<tr>" + "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for cell, kind in pairs) + "</tr>"

    body = "".join(line("td", row) for row in rows[:_MOST_ROWS])
    inside = f"<table><thead>{line('th', list(map(text, head)))}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>{_more(len(rows), _MOST_ROWS, "rows")}'


Card = tuple[str, str, str]
"""A title (plain text), a plot, and the HTML below it."""


def grid(cards: Iterable[Card | None]) -> str:
    """Return plots side by side; "" without a plot."""
    found = [card for card in cards if card is not None]
    shown = [f'<div class="card"><h3>{text(title)}</h3>{svg}{below}</div>' for title, svg, below in found[:_MOST_CARDS]]
    one = " one" if len(shown) == 1 else ""
    more = _more(len(found), _MOST_CARDS, "pictures")
    return f'<div class="cards{one}">{"".join(shown)}</div>{more}' if shown else ""


def legend(names: Iterable[tuple[str, int]]) -> str:
    """Return the legend for pairs of a name and the index of a colour."""
    items = "".join(
        f'<li><i style="background:var(--c{place % COLOURS})"></i>{text(name)}</li>' for name, place in names
    )
    return f'<ul class="legend">{items}</ul>'


def _frameworks(members: Iterable[Group]) -> Iterable[tuple[str, int]]:
    """Return the frameworks and their colours, for a legend."""
    return dict.fromkeys((group.framework, group.colour) for group in members)


def section(name: str, title: str, lead: str, *parts: str) -> str:
    """Return a section of the page; ``lead`` is the HTML of its first paragraph."""
    return f'<section id="{name}"><h2>{title}</h2><p class="dim">{lead}</p>{"".join(parts)}</section>'


# ---------------------------------------------------------------------- curves and final values

_MOST_POINTS = 150
# Relative difference of two final values up to which they count as equal, as it may be due to rounding.
_TIE = 1e-6


def learning(results: Results, members: Sequence[Group]) -> str:
    """Return the section with the curves of all recorded values of the training."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        cards = grid(_curves_card(name, variant, own, series) for variant, own in by_variant(members))
        parts.append(f"<h2>{text(name[:1].upper() + name[1:])}</h2>{legend(_frameworks(members))}{cards}")
    fewest = min((len(group.done) for group in members), default=0)
    note = (
        "Lines are interquartile means over seeds (with fewer than four seeds, means). A band is a bootstrap interval "
        f"of 95%: seeds are drawn again and again from those that there are, within their variant. {meaning(fewest)}"
    )
    return f'<section id="curves">{"".join(parts)}<p class="dim small">{note}</p></section>'


def _curves_card(name: str, variant: str, members: Sequence[Group], series: Series) -> Card | None:
    lines, size = [], 1
    for group in members:
        found = curve(group, series)
        if found is not None:
            steps, values, points = thinned(*found, _MOST_POINTS)
            bands = band([values])
            lines.append(Line(steps, bands.value, group.colour, bands.low, bands.high))
            size = max(size, points)
        for run in group.runs:
            if run.status != "done" and run.run in series:
                steps, values, _ = thinned(*series[run.run], _MOST_POINTS)
                lines.append(Line(steps, values, group.colour, style="dashed"))
    if not lines:
        return None
    dashed = any(line.style == "dashed" for line in lines)
    notes = ["Dashed: runs that did not finish, which no band counts."] * dashed
    notes += [f"Each point is the mean of {size} steps."] * (size > 1)
    label = f"{name} of {variant} by step"
    svg = picture(lines, label=label, across="step", logarithmic=_spans_decades(lines))
    return variant, svg, f"<p>{' '.join(notes)}</p>" if notes else ""


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Whether the axis must be logarithmic: all values are above 0, and the largest value is more than 100 times the
    smallest."""
    values = np.concatenate([part for line in lines for part in (line.y, line.low, line.high) if part is not None])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool(values.min() > 0.0) and bool(values.max() > 100.0 * values.min())


def ends(results: Results, members: Sequence[Group]) -> str:
    """Return the section of final values, with tables for each recorded name."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        rows = [_end_row(text(group.variant), text(group.framework), [group], series) for group in members]
        variants = by_variant(members)
        for framework, _ in _frameworks(members):
            own = [group for group in members if group.framework == framework]
            # The variants are strata, if each has a finished run.
            if len(own) == len(variants) > 1 and all(len(final_values(group.done, series)) for group in own):
                rows.append(_end_row("<i>all variants</i>", text(framework), own, series))
        head = ("variant", "framework", "runs", "IQM", "95% band", "lowest", "highest")
        parts += [f"<h3>{text(name[:1].upper() + name[1:])}</h3>{table(head, rows, texts=2)}"]
        parts.append(_probabilities(members, series))
    return section(
        "ends",
        "Where the runs ended",
        "The end of a run is the mean of the last tenth of the values that it recorded. The interquartile mean (IQM) "
        "leaves out the lowest and the highest quarter of the runs.",
        *parts,
    )


def _end_row(variant: str, framework: str, strata: Sequence[Group], series: Series) -> tuple[str, ...]:
    """Return the table row of final values for some groups of one framework."""
    found = [final_values(group.done, series) for group in strata]
    values, total = np.concatenate(found), sum(len(group.runs) for group in strata)
    single = len(strata) == 1 and len(values) < total
    counted = f"{len(values)} of {total}" if single else number(len(values))
    if not len(values):
        return (variant, framework, counted, *["–"] * 4)
    bands = band(found)
    spread = (number(float(values.min())), number(float(values.max())))
    return (variant, framework, counted, number(float(bands.value)), interval(bands), *spread)


def _probabilities(members: Sequence[Group], series: Series) -> str:
    """Return the probabilities that a run of one framework ends above a run of another framework."""
    rows = []
    for variant, own in by_variant(members):
        for left, right in combinations(own, 2):
            ones, others = final_values(left.done, series), final_values(right.done, series)
            if min(len(ones), len(others)) < 2 or np.isnan(ones).any() or np.isnan(others).any():
                continue
            share = f"{100 * probability_above(ones, others, tie=_TIE):.0f}%"
            rows.append(
                (*map(text, (variant, left.framework, right.framework)), share, number(len(ones) * len(others)))
            )
    if not rows:
        return ""
    head = ("variant", "a run of", "ends above one of", "how often", "pairs of runs")
    return f'{table(head, rows, texts=3)}<p class="dim small">Ends that differ by a millionth at most count half.</p>'


# ---------------------------------------------------------------------- pairs of runs

_MOST_DOTS, _MOST_PAIRS = 300, 400
_ROUNDING = float(np.finfo(np.float32).eps)


def divergence(found: Sequence[Pair], members: Sequence[Group], name: str) -> str:
    """Return the section of the distance between paired runs at each step, and the step at which they diverge."""
    compared = [pair for pair in found if len(pair.steps)]
    if not compared:
        return ""
    cards = grid(
        _distance_card(variant, [pair for pair in compared if pair.left.variant == variant], name)
        for variant, _ in by_variant(members)
    )
    rows = []
    for pair in compared:
        steps = (pair.parts(tolerance) for tolerance in TOLERANCES)
        rows.append(
            (
                text(pair.left.variant),
                number(pair.left.seed),
                f"{text(pair.left.framework)} and {text(pair.right.framework)}",
                number(len(pair.steps)),
                number(float(pair.difference[0]), 2),
                *("never" if step is None else number(step) for step in steps),
                number(float(pair.difference.max()), 2),
            )
        )
    beyond = (f"> {tolerance:g}" for tolerance in TOLERANCES)
    head = ("variant", "seed", "runs", "steps", "at the first", *beyond, "largest")
    return section(
        "parting",
        "When each pair parts",
        f"How far two runs are apart in {text(name)}, as a share of the larger value, and the first step at which it "
        "is more. Until the curves part the two are one training, computed twice; after that they are two samples of "
        "it, to be compared like two seeds.",
        cards,
        table(head, rows, texts=3),
    )


def _distance_card(variant: str, own: Sequence[Pair], name: str) -> Card | None:
    """Return a plot of the distance between a variant's paired runs at each step; None if all pairs agree."""
    # With too many pairs, colours cannot be distinguished.
    several = len(own) <= COLOURS
    found = [thinned(pair.steps, pair.difference, _MOST_DOTS, largest=True) for pair in own]
    lines = [Line(steps, values, place * several, style="dots") for place, (steps, values, _) in enumerate(found)]
    if not any(((line.y > 0.0) & (line.y < BEYOND)).any() for line in lines):
        return None
    label = f"relative difference of {name}, {variant}"
    svg = picture(lines, label=label, across="step", logarithmic=True, mark=_ROUNDING)
    names = legend((_names_of(pair), place) for place, pair in enumerate(own)) if several else ""
    size = max(size for _, _, size in found)
    each = f" Each point is the largest of {size} steps." if size > 1 else ""
    note = f"Dashed: rounding of float32. Where two values are equal there is no point.{each}"
    return variant, svg, f"{names}<p>{note}</p>"


def _names_of(pair: Pair) -> str:
    return f"seed {pair.left.seed}: {pair.left.framework} and {pair.right.framework}"


def same_data(found: Sequence[Pair]) -> str:
    """Return the section that states, for each pair, whether both runs received the same data, and the reason."""
    if not found:
        return ""
    answers = {True: '<b class="yes">proven</b>', False: '<b class="no">not proven</b>'}
    items = [
        f"<li>{answers[pair.same_data.proven]} · {text(pair.left.variant)}, {text(_names_of(pair))}"
        f'<p class="dim small">{text(pair.same_data.reason)}.</p></li>'
        for pair in found[:_MOST_PAIRS]
    ]
    return section(
        "same-data",
        "Same data",
        "Each run digests all that the study gives it: names, shapes and values of all batches, every value to its "
        "last bit. Equal digests over the same number of steps prove equal data, whatever the runs are called; what a "
        "training reads elsewhere is not seen.",
        f'<ul class="pairs">{"".join(items)}</ul>{_more(len(found), _MOST_PAIRS, "pairs")}',
    )


# ---------------------------------------------------------------------- costs and runs


def costs(results: Results, members: Sequence[Group]) -> str:
    """Return the section with the time and memory of each group; "" if no run took a step."""
    wait, compute = results.series("wait"), results.series("compute")
    rows = []
    for group in members:
        runs = [run for run in group.runs if run.status != "failed" and run.steps]
        if runs:
            *parts, every_rate = zip(*(times(run, wait, compute) for run in runs), strict=True)
            waited, computed, first = (float(np.mean(part)) for part in parts)
            rates = [rate for rate in every_rate if rate is not None]
            rows.append(
                (
                    text(group.variant),
                    text(group.framework),
                    number(len(runs)),
                    number(float(np.median(rates)), 3) if rates else "–",
                    f"{100 * waited / (waited + computed):.1f}%" if waited + computed else "–",
                    *map(seconds, (waited, computed, first)),
                    seconds(_mean(run.compile_seconds for run in runs)),
                    seconds(_mean(run.seconds for run in runs)),
                    megabytes(max((run.peak_memory for run in runs if run.peak_memory is not None), default=None)),
                )
            )
    head = (
        *("variant", "framework", "runs", "steps a second", "waiting", "waited", "computed", "first step"),
        *("compiling", "in all", "peak memory"),
    )
    lead = (
        "Means over the runs, memory the largest. Times are of the machine that the runs were on and of what else it "
        "did. The first step, which compiles or warms up, is not counted in steps a second."
    )
    return section("costs", "Time and memory", lead, table(head, rows, texts=2)) if rows else ""


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def runs(results: Results) -> str:
    """Return the section of all runs: their status, data and costs; errors; versions and machines."""
    failed = [run for run in results.runs if run.status == "failed"]
    errors = ""
    if failed:
        rows = [(text(run.run), number(run.steps), f"<code>{text(run.error or 'no message')}</code>") for run in failed]
        errors = f"<h3>Failures</h3>{table(('run', 'steps', 'error'), rows, texts=3, classes=('', '', 'long'))}"
    every = [
        (
            text(run.run),
            text(run.status),
            f"<code>{text(run.fingerprint or '–')}</code>",
            f"<code>{text(run.digest or '–')}</code>",
            f"{number(run.steps)} of {number(results.steps)}",
            seconds(run.seconds),
            megabytes(run.peak_memory),
        )
        for run in sorted(results.runs, key=attrgetter("variant", "framework", "seed"))
    ]
    head = ("run", "status", "fingerprint", "digest", "steps", "in all", "peak memory")
    return (
        f'<section id="runs"><h2>Runs</h2>{errors}{table(head, every, texts=4)}'
        f"<h3>Versions and machines</h3>{_machines(results.runs)}</section>"
    )


def _machines(every: Sequence[Run]) -> str:
    """Return a table row for each version and each property of machines, with the values in the runs of each
    framework."""
    frameworks = sorted({run.framework for run in every})
    found: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for run in every:
        for kind, values in (("version", run.versions), ("machine", run.machine)):
            for name, value in values.items():
                found.setdefault((kind, str(name)), {}).setdefault(run.framework, {})[str(value)] = None
    rows = [
        (text(name), *(text(", ".join(own.get(framework, "–"))) for framework in frameworks))
        for (_, name), own in sorted(found.items(), key=lambda item: (item[0][0] != "version", item[0][1]))
    ]
    return table(("", *frameworks), rows, texts=1 + len(frameworks), classes=("", *["long"] * len(frameworks)))


# ---------------------------------------------------------------------- the page

# The browser may use only the style in the page, and load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(results: Results) -> str:
    """Return a study as a single web page that loads no other files.

    The page is a pure function of the results: with one version of matplotlib, the same results give the same page,
    byte for byte. Texts are escaped, and the page forbids the browser to load anything or to run a script.

    Args:
        results: the recorded results, including the results of unfinished runs.
    """
    members = groups(results)
    name = next(iter(trained_names(results)), "loss")
    found = pairs(results, name)
    data = verdict(found, results.missing)
    every = results.runs
    figures = [
        ("variants", len({run.variant for run in every})),
        ("frameworks", len({run.framework for run in every})),
        ("seeds", len({run.seed for run in every})),
        ("steps a run", results.steps),
        ("runs done", sum(run.status == "done" for run in every)),
    ]
    unfinished = {status: sum(run.status == status for run in every) for status in ("partial", "failed")}
    figures += [(f"runs {status}", count) for status, count in unfinished.items() if count]
    items = "".join(f"<li><b>{number(value)}</b><span>{label}</span></li>" for label, value in figures)
    frameworks = text(", ".join(sorted({run.framework for run in every})) or "no runs")
    body = [
        f'<header><h1>{text(results.name)}</h1><p class="dim">A study: {frameworks}</p>',
        f'<ul class="figures">{items}</ul>',
        f'<p class="verdict {"good" if data.proven else "warning"}">{text(data.reason)}</p></header><main>',
        learning(results, members),
        ends(results, members),
        divergence(found, members, name),
        same_data(found),
        costs(results, members),
        runs(results),
        "</main><footer>Made by <code>mouse study</code>. This page loads nothing from anywhere.</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(results.name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{STYLE}</style></head>\n<body>{with_unique_ids(''.join(body))}</body></html>\n"
    )


def page(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the page of a study; see ``to_html``.

    Args:
        results: the results of ``read`` or ``Study.run``.
        path: the file; or a folder, in which ``page.html`` is written.

    Returns:
        The file.

    Raises:
        StorageError: The file cannot be written; an existing file is unchanged.
    """
    file = Path(path) / "page.html" if Path(path).is_dir() else Path(path)
    write_file(file, to_html(results).encode())
    return file
