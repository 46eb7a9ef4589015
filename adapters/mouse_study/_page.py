"""The page of a study: one file that shows the records of its runs, and loads nothing.

The parts in order: the style; the numbers of groups of runs; pictures, drawn by matplotlib as SVG in the colours of the
page, with no text but numbers, as names are escaped text in the page around them; and the page itself.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from html import escape
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mouse_core.files.writing import write_file
from mouse_study.comparing import TOLERANCES, Pair, pairs, verdict
from mouse_study.results import Results, Run
from mouse_study.statistics import Band, band, meaning, probability_above, profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: So many frameworks have a colour of their own.
COLOURS = 6

STYLE = """
:root { color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --ink: #1c2430; --dim: #5d6b7c; --line: #dfe4ea; --grid: #e4e9ef;
  --warn: #8a5200; --warn-back: #fff4de; --good: #216b40; --good-back: #e7f5ec;
  --c0: #d1495b; --c1: #2e6fb7; --c2: #3a8a4f; --c3: #8d5bb5; --c4: #b9770e; --c5: #50707f;
  --wait: #d98c2b; --first: #8a7fb8; --compute: #3b7fb0; --rest: #b4bec9; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --card: #1b2128; --ink: #e5eaf0; --dim: #9aa7b5; --line: #2e3742; --grid: #2a323c;
  --warn: #f3c069; --warn-back: #33290f; --good: #84d3a2; --good-back: #14301f;
  --c0: #f2808c; --c1: #79b0ee; --c2: #7cc98d; --c3: #c39ae6; --c4: #edb458; --c5: #9dbccb;
  --wait: #e6a653; --first: #a99ddb; --compute: #67a9da; --rest: #4b5764; } }
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
.said { border-radius: 10px; padding: 10px 14px; margin: 14px 0 0; max-width: none; font-weight: 600;
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
.bars { font-size: .88rem; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 14px; margin: 0 0 12px; display: grid; gap: 4px 12px; grid-template-columns: minmax(0, 1fr) max-content; }
.bars span { overflow-wrap: anywhere; }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; grid-column: 1 / -1; margin: 0 0 8px; }
.bar i { display: block; height: 100%; }
.wait { background: var(--wait); } .first { background: var(--first); } .compute { background: var(--compute); }
.rest { background: var(--rest); }
footer { margin-top: 36px; padding: 16px; color: var(--dim); font-size: .85rem; }
@media (max-width: 560px) { h2 { margin-top: 30px; } }
"""


Floats = NDArray[np.float64]
Series = Mapping[str, tuple[NDArray[np.int64], Floats]]

#: What says where time and memory went; all other names are values of the training.
COSTS = ("wait", "compute", "memory", "setup")
#: The last tenth of what a run recorded counts as its end.
_END = 10


@dataclass(frozen=True)
class Group:
    """The runs of one variant in one framework, which only their seeds tell apart.

    Attributes:
        variant: the variant.
        framework: the framework.
        colour: the framework's place among all.
        runs: all of them, by seed.
    """

    variant: str
    framework: str
    colour: int
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """The runs that finished: statistics are over these."""
        return tuple(run for run in self.runs if run.status == "done")


@dataclass(frozen=True)
class Times:
    """The time of one run by part, in seconds.

    Attributes:
        wait: waiting for batches, after the first step.
        compute: computing steps, after the first step.
        first: the first step, including compilation and other one-time work.
        rest: everything outside steps: start, evaluations, checkpoints.
        per_second: steps per second after the first, waiting included; None for fewer than two steps.
    """

    wait: float
    compute: float
    first: float
    rest: float
    per_second: float | None


def groups(results: Results) -> list[Group]:
    """The runs by variant and framework, in the order of their names, whatever the order of the runs is."""
    frameworks = sorted({run.framework for run in results.runs})
    found = []
    for variant in sorted({run.variant for run in results.runs}):
        for place, framework in enumerate(frameworks):
            runs = [run for run in results.runs if (run.variant, run.framework) == (variant, framework)]
            if runs:
                found.append(Group(variant, framework, place, tuple(sorted(runs, key=lambda run: run.seed))))
    return found


def trained_names(results: Results) -> list[str]:
    """The names of values of the training: the loss, then evaluations, then what else there is."""
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
    """Return the final value of each run: the mean of the last tenth of its recorded values, at least one.

    For 300 losses it is the mean of the last 30, for 5 evaluations the last one. Runs without values are left out.
    """
    found = [series[run.run][1] for run in runs if run.run in series]
    with np.errstate(over="ignore", invalid="ignore"):
        ends = [values[-max(1, len(values) // _END) :].mean() for values in found if len(values)]
    return np.array(ends, np.float64)


def pooled(members: Sequence[Group], series: Series) -> Band | None:
    """The band over all variants of a framework, which are the strata; None where a variant has no finished run."""
    strata = [final_values(group.done, series) for group in members]
    return band(strata) if strata and all(len(stratum) for stratum in strata) else None


def times(run: Run, wait: Series, compute: Series) -> Times:
    """Return the time of a run by part.

    Args:
        run: the run.
        wait: the recorded waiting times.
        compute: the recorded computing times.
    """
    waited, computed = (series[run.run][1] if run.run in series else np.empty(0) for series in (wait, compute))
    first = run.first_step_seconds if run.first_step_seconds is not None else float(computed[:1].sum())
    first = first if math.isfinite(first) else 0.0
    waited, computed = (np.where(np.isfinite(values), values, 0.0) for values in (waited, computed))
    after = float(waited[1:].sum()), float(computed[1:].sum())
    steps = len(computed) - 1
    return Times(
        wait=after[0],
        compute=after[1],
        first=first,
        rest=max(0.0, run.seconds - first - sum(after)) if math.isfinite(run.seconds) else 0.0,
        per_second=steps / sum(after) if steps > 0 and sum(after) > 0.0 else None,
    )


#: Values this large are not drawn: matplotlib subtracts them from each other.
BEYOND = 1e100

# Colours that stand for those of the style, which differ with light and dark.
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
    "xtick.color": _GRID,
    "xtick.labelcolor": _DIM,
    "ytick.color": _GRID,
    "ytick.labelcolor": _DIM,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 11,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Line:
    """A curve with or without a band around it.

    Attributes:
        x: where its points lie, ``[n]``.
        y: their values.
        colour: the number of its colour.
        low: the lower edge of the band.
        high: the upper edge.
        dashed: whether it is of a run that did not finish.
    """

    x: NDArray[Any]
    y: Floats
    colour: int
    low: Floats | None = None
    high: Floats | None = None
    dashed: bool = False
    dots: bool = field(default=False, kw_only=True)


def colour(place: int) -> str:
    """The style's colour of a framework, by its place among all."""
    return f"var(--c{place % COLOURS})"


def curves(
    lines: Sequence[Line], *, label: str, across: str = "step", logarithmic: bool = False, mark: float | None = None
) -> str:
    """Curves over their bands.

    Args:
        lines: the first one lies lowest, and is the widest, so that curves that are equal are seen as two.
        label: what the picture shows, for who cannot see it; plain text.
        across: what is under it.
        logarithmic: whether values are shown by their order of magnitude.
        mark: a value to draw a line at.

    Returns:
        An ``svg`` element.
    """

    lines = [_drawable(line) for line in lines]

    def draw(axes: Axes) -> None:
        most = max((line.colour for line in lines), default=0)
        for line in lines:
            shade = f"#0100{line.colour % COLOURS:02x}"
            width = 1.2 if line.dashed else 3.0 - 1.8 * line.colour / max(1, most)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=shade, alpha=0.18, linewidth=0)
            if line.dots:
                axes.plot(line.x, line.y, ".", color=shade, markersize=2.5)
            else:
                style = (0, (3, 2)) if line.dashed else "-"
                alone = "o" if len(line.x) < 2 else None
                axes.plot(line.x, line.y, linestyle=style, marker=alone, markersize=4, color=shade, linewidth=width)
        if logarithmic:
            from matplotlib.ticker import FuncFormatter, NullFormatter

            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\u2212")))
            axes.yaxis.set_minor_formatter(NullFormatter())
        if mark is not None:
            axes.axhline(mark, color=_DIM, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlabel(across)

    return _svg(draw, label)


def _drawable(line: Line) -> Line:
    """The line without values that no axis can hold."""

    def kept(values: Floats) -> Floats:
        return np.where(np.abs(values) < BEYOND, values, np.nan)

    low, high = (None if edge is None else kept(edge) for edge in (line.low, line.high))
    return replace(line, y=kept(line.y), low=low, high=high)


def profiles(lines: Sequence[Line], *, label: str) -> str:
    """Performance profiles: for each value the share of runs above it, as steps."""

    def draw(axes: Axes) -> None:
        most = max((line.colour for line in lines), default=0)
        for line in lines:
            shade = f"#0100{line.colour % COLOURS:02x}"
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=shade, alpha=0.18, linewidth=0, step="post")
            width = 3.0 - 1.8 * line.colour / max(1, most)
            axes.step(line.x, line.y, where="post", color=shade, linewidth=width)
        axes.set_ylim(-0.03, 1.03)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])

    return _svg(draw, label)


def _svg(draw: Callable[[Axes], None], label: str) -> str:
    from html import escape

    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=(5.2, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', text)
    inside = text[text.index(">") + 1 : text.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r"#0[12]00[0-9a-f]{2}", lambda found: f"var({_NAMES[found[0]]})", inside)
    inside = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", inside)
    box = view[1] if view else "0 0 374 216"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(label, quote=True)}">{inside}</svg>'


def with_names(picture: str, place: int) -> str:
    """The picture with names of its own for its parts, so that several can stand in one page."""
    picture = re.sub(r'\bid="', f'id="p{place}-', picture)
    return re.sub(r'(url\(|href=")#', rf"\1#p{place}-", picture)


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    # matplotlib's own settings, not the user's; but a backend, once set, is not set back.
    own = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    with matplotlib.rc_context(cast("Any", own | _SETTINGS)):
        yield


# ---------------------------------------------------------------------- many points to few


def thinned(x: NDArray[np.int64], values: Floats, most: int, *, largest: bool = False) -> tuple[Floats, Floats, int]:
    """Merge neighbouring points, so that at most the given number of points is left.

    Of 7 points and at most 3, points 0 to 2, 3 to 5 and 6 become one each.

    Args:
        x: where they lie, ``[n]``.
        values: ``[..., n]``.
        most: points to keep.
        largest: the largest of those that become one, instead of their mean.

    Returns:
        x, values, and how many points became one.
    """
    size = max(1, -(-len(x) // most))
    firsts = np.arange(0, len(x), size)
    if size == 1:
        return x.astype(np.float64), values, 1
    counts = np.diff([*firsts, len(x)])
    places = np.add.reduceat(x.astype(np.float64), firsts) / counts
    if largest:
        return places, np.maximum.reduceat(values, firsts, axis=-1), size
    return places, np.add.reduceat(values, firsts, axis=-1) / counts, size


_LONGEST = 2000
_MOST_ROWS = 400


def text(said: object, most: int = _LONGEST) -> str:
    """Anything as text of the page: nothing in it is markup, and what is far too long is cut."""
    # A lone surrogate, which JSON may hold, cannot be written as UTF-8.
    plain = str(said).encode("utf-8", "replace").decode()
    plain = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in plain)
    return escape(plain if len(plain) <= most else f"{plain[:most]}… ({len(plain):,} characters)", quote=True)


def number(value: object, digits: int = 4) -> str:
    """A number in a few characters; a dash for None."""
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
    """A time in the unit that fits."""
    if value is None or not math.isfinite(value):
        return number(value)
    if value < 1.0:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def megabytes(value: float | None) -> str:
    """Bytes as MiB."""
    return number(value) if value is None or not math.isfinite(value) else f"{value / 2**20:,.0f} MiB"


def interval(found: Band) -> str:
    """The edges of a band; a dash where it has none."""
    if found.low is None or found.high is None:
        return "–"
    return f"{number(float(found.low))} to {number(float(found.high))}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int, classes: Sequence[str] = ()) -> str:
    """A table that scrolls for itself where the window is narrow.

    Args:
        head: plain texts.
        rows: cells, which are markup already.
        texts: how many columns from the left hold text; the others hold numbers.
        classes: more classes for the columns, by place.
    """
    every = list(rows)
    kinds = [("text" if place < texts else "") for place in range(len(head))]
    kinds = [f"{kind} {more}".strip() for kind, more in zip(kinds, [*classes, *[""] * len(head)], strict=False)]
    top = "".join(f'<th class="{kind}">{text(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in every[:_MOST_ROWS]
    )
    left = len(every) - _MOST_ROWS
    more = f'<p class="dim small">{left:,} more rows are not shown.</p>' if left > 0 else ""
    inside = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>{more}'


_MOST_CARDS = 24


class Cards:
    """Pictures in cards; each picture's parts are named by its number in the page."""

    def __init__(self) -> None:
        self._pictures = 0

    def grid(self, cards: Sequence[tuple[str, str, str]]) -> str:
        """Cards side by side.

        Args:
            cards: for each its title (plain text), the picture, and what is under it (markup).
        """
        shown = []
        for title, picture, below in cards[:_MOST_CARDS]:
            self._pictures += 1
            head = f"<h3>{text(title)}</h3>" if title else ""
            shown.append(f'<div class="card">{head}{with_names(picture, self._pictures)}{below}</div>')
        left = len(cards) - _MOST_CARDS
        more = f'<p class="dim small">{left} more pictures are not shown.</p>' if left > 0 else ""
        return f'<div class="cards{" one" if len(shown) == 1 else ""}">{"".join(shown)}</div>{more}'


def legend(members: Iterable[Group]) -> str:
    """Return the HTML legend of frameworks and their colours."""
    return legend_of(dict.fromkeys((group.framework, group.colour) for group in members))


def legend_of(said: Iterable[tuple[str, int]]) -> str:
    """Return an HTML legend for pairs of a name and a colour number."""
    items = "".join(f'<li><i style="background:{colour(place)}"></i>{text(name)}</li>' for name, place in said)
    return f'<ul class="legend">{items}</ul>'


def by_variant(members: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Groups of one variant together."""
    variants = dict.fromkeys(group.variant for group in members)
    return [(variant, [group for group in members if group.variant == variant]) for variant in variants]


def title(name: str) -> str:
    """A name as a heading."""
    return name[:1].upper() + name[1:]


def costs(results: Results, members: Sequence[Group]) -> str:
    """Time and memory beside each other."""
    wait, compute = results.series("wait"), results.series("compute")
    rows, bars = [], []
    for group in members:
        its = [run for run in group.runs if run.status != "failed" and run.steps]
        if its:
            found = [times(run, wait, compute) for run in its]
            mean = {part: float(np.mean([getattr(one, part) for one in found])) for part in _PARTS}
            bars.append((group, mean))
            rows.append((text(group.variant), text(group.framework), *_cells(its, found, mean)))
    most = max((sum(mean.values()) for _, mean in bars), default=0.0)
    if not rows:
        return ""
    head = (
        *("variant", "framework", "runs", "steps a second", "waiting", "waited", "computed", "first step"),
        *("compiling", "in all", "peak memory"),
    )
    shown = "".join(_bar(group, mean, most) for group, mean in bars)
    words = "".join(f'<li><i class="{part}"></i>{said}</li>' for part, said in _PARTS.items())
    return (
        '<section id="costs"><h2>Time and memory</h2><p class="dim">Means over the runs, memory the largest. Times are '
        "of the machine that the runs were on and of what else it did. The first step, which compiles or warms up, is "
        f'not counted in steps a second.</p><ul class="legend">{words}</ul><div class="bars">{shown}</div>'
        f"{table(head, rows, texts=2)}</section>"
    )


def _cells(its: Sequence[Run], found: Sequence[Times], mean: Mapping[str, float]) -> tuple[str, ...]:
    """Return the table cells of a group of runs, without its names."""
    rates = [one.per_second for one in found if one.per_second is not None]
    in_steps = mean["wait"] + mean["compute"]
    return (
        number(len(its)),
        number(float(np.median(rates)), 3) if rates else "–",
        f"{100 * mean['wait'] / in_steps:.1f}%" if in_steps else "–",
        *(seconds(mean[part]) for part in ("wait", "compute", "first")),
        seconds(_mean(run.compile_seconds for run in its)),
        seconds(_mean(run.seconds for run in its)),
        megabytes(max((run.peak_memory for run in its if run.peak_memory is not None), default=None)),
    )


_PARTS = {
    "wait": "waiting for batches",
    "compute": "computing",
    "first": "first step",
    "rest": "start, evaluations and all else",
}


def _bar(group: Group, mean: Mapping[str, float], most: float) -> str:
    parts = "".join(
        f'<i class="{part}" style="width:{100 * mean[part] / most if most else 0:.2f}%"></i>' for part in _PARTS
    )
    name = f"{text(group.variant)} · {text(group.framework)}"
    return f'<span>{name}</span><span>{seconds(sum(mean.values()))}</span><div class="bar">{parts}</div>'


def runs(results: Results) -> str:
    """Every run: how it ended, on what, with what."""
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
        for run in sorted(results.runs, key=lambda run: (run.variant, run.framework, run.seed))
    ]
    head = ("run", "status", "fingerprint", "digest", "steps", "in all", "peak memory")
    return (
        f'<section id="runs"><h2>Runs</h2>{errors}{table(head, every, texts=4)}'
        f"<h3>Versions and machines</h3>{_places(results.runs)}</section>"
    )


def _places(every: Sequence[Run]) -> str:
    """Versions and machines, a row each, and what the runs of each framework had."""
    frameworks = sorted({run.framework for run in every})
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in every:
        for kind, said in (("version", run.versions), ("machine", run.machine)):
            for name, value in said.items():
                held = found.setdefault((kind, str(name)), {}).setdefault(run.framework, [])
                if str(value) not in held:
                    held.append(str(value))
    rows = [
        (text(name), *(text(", ".join(held.get(framework, ["–"]))) for framework in frameworks))
        for (_, name), held in sorted(found.items(), key=lambda item: (item[0][0] != "version", item[0][1]))
    ]
    return table(("", *frameworks), rows, texts=1 + len(frameworks), classes=("", *["long"] * len(frameworks)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


_MOST_POINTS = 150
_THRESHOLDS = 121
# Relative difference of two ends that may be rounding: runs that are one training do not end above each other.
_TIE = 1e-6


def learning(results: Results, members: Sequence[Group], cards: Cards) -> str:
    """Curves of all that the training recorded."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        shown = [_curves_card(name, variant, its, series) for variant, its in by_variant(members)]
        parts.append(f"<h2>{text(title(name))}</h2>{legend(members)}{cards.grid([card for card in shown if card])}")
    fewest = min((len(group.done) for group in members), default=0)
    return f'<section id="curves">{"".join(parts)}<p class="dim small">{_how_bands(fewest)}</p></section>'


def _curves_card(name: str, variant: str, members: Sequence[Group], series: Series) -> tuple[str, str, str] | None:
    lines, notes, size = [], [], 1
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
                lines.append(Line(steps, values, group.colour, dashed=True))
    if not lines:
        return None
    if any(line.dashed for line in lines):
        notes.append("Dashed: runs that did not finish, which no band counts.")
    if size > 1:
        notes.append(f"Each point is the mean of {size} steps.")
    picture = curves(lines, label=f"{name} of {variant} by step", logarithmic=_spans_decades(lines))
    return variant, picture, f"<p>{' '.join(notes)}</p>" if notes else ""


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Whether values are all above 0 and spread so far that only their order of magnitude can be shown."""
    values = np.concatenate([part for line in lines for part in (line.y, line.low, line.high) if part is not None])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool(values.min() > 0.0) and bool(values.max() > 100.0 * values.min())


def _how_bands(fewest: int) -> str:
    return (
        "Lines are interquartile means over seeds (with fewer than four seeds, means). A band is a bootstrap interval "
        f"of 95%: seeds are drawn again and again from those that there are, within their variant. {meaning(fewest)}"
    )


def ends(results: Results, members: Sequence[Group], cards: Cards) -> str:
    """Render final values: a table and performance profiles for each recorded name."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        rows = [_end_row(group, series) for group in members]
        rows += _pooled_rows(members, series)
        head = ("variant", "framework", "runs", "IQM", "95% band", "lowest", "highest")
        parts.append(f"<h3>{text(title(name))}</h3>{table(head, rows, texts=2)}")
        parts.append(_probabilities(members, series))
        shown = [_profile_card(name, variant, its, series) for variant, its in by_variant(members)]
        found = [card for card in shown if card]
        if found:
            parts.append(legend(members) + cards.grid(found))
    return (
        '<section id="ends"><h2>Where the runs ended</h2><p class="dim">The end of a run is the mean of the last tenth '
        "of the values that it recorded. The interquartile mean (IQM) leaves out the lowest and the highest quarter of "
        "the runs; a performance profile shows, for each value, the share of runs that ended above it."
        f"</p>{''.join(parts)}</section>"
    )


def _end_row(group: Group, series: Series) -> tuple[str, ...]:
    values = final_values(group.done, series)
    counted = f"{len(values)} of {len(group.runs)}" if len(values) < len(group.runs) else number(len(values))
    if not len(values):
        return (text(group.variant), text(group.framework), counted, *["–"] * 4)
    found = band([values])
    spread = (number(float(values.min())), number(float(values.max())))
    return (text(group.variant), text(group.framework), counted, number(float(found.value)), interval(found), *spread)


def _pooled_rows(members: Sequence[Group], series: Series) -> list[tuple[str, ...]]:
    """Over all variants, which are the strata, where there are several."""
    variants = len(by_variant(members))
    rows: list[tuple[str, ...]] = []
    for framework in sorted({group.framework for group in members}):
        its = [group for group in members if group.framework == framework]
        found = pooled(its, series) if variants > 1 and len(its) == variants else None
        if found is not None:
            values = np.concatenate([final_values(group.done, series) for group in its])
            spread = (number(float(values.min())), number(float(values.max())))
            cells = (number(len(values)), number(float(found.value)), interval(found), *spread)
            rows.append(("<i>all variants</i>", text(framework), *cells))
    return rows


def _probabilities(members: Sequence[Group], series: Series) -> str:
    """Render the probability that a run of one framework ends above a run of the other."""
    said = []
    for variant, its in by_variant(members):
        for left, right in combinations(its, 2):
            ones, others = final_values(left.done, series), final_values(right.done, series)
            if min(len(ones), len(others)) < 2 or np.isnan(ones).any() or np.isnan(others).any():
                continue
            cells = (text(variant), text(left.framework), text(right.framework))
            share = f"{100 * probability_above(ones, others, tie=_TIE):.0f}%"
            said.append((*cells, share, number(len(ones) * len(others))))
    if not said:
        return ""
    head = ("variant", "a run of", "ends above one of", "how often", "pairs of runs")
    return f'{table(head, said, texts=3)}<p class="dim small">Ends that differ by a millionth at most count half.</p>'


def _profile_card(name: str, variant: str, members: Sequence[Group], series: Series) -> tuple[str, str, str] | None:
    ended = [final_values(group.done, series) for group in members]
    finite = np.concatenate([values[np.abs(values) < BEYOND] for values in ended])
    if max(map(len, ended)) < 2 or not len(finite) or finite.min() == finite.max():
        return None  # of single runs there is no profile
    margin = 0.05 * (finite.max() - finite.min())
    edges: Floats = np.linspace(finite.min() - margin, finite.max() + margin, _THRESHOLDS)
    lines = []
    for group, values in zip(members, ended, strict=True):
        if len(values):
            found = band([values], profile(edges))
            lines.append(Line(edges, found.value, group.colour, found.low, found.high))
    picture = profiles(lines, label=f"share of runs of {variant} whose {name} ended above each value")
    return f"{variant}: share of runs that ended above", picture, ""


_MOST_DOTS = 300
_MOST_PAIRS = 400
_ROUNDING = float(np.finfo(np.float32).eps)


def parting(found: Sequence[Pair], members: Sequence[Group], name: str, cards: Cards) -> str:
    """Render the distance between paired runs by step, and the step at which they diverge."""
    compared = [pair for pair in found if len(pair.steps)]
    if not compared:
        return ""
    found_cards = [
        _card(variant, [pair for pair in compared if pair.left.variant == variant], name)
        for variant, _ in by_variant(members)
    ]
    shown = [card for card in found_cards if card]
    rows = [_row(pair) for pair in compared]
    beyond = (f"> {tolerance:g}" for tolerance in TOLERANCES)
    head = ("variant", "seed", "runs", "steps", "at the first", *beyond, "largest")
    return (
        f'<section id="parting"><h2>When each pair parts</h2><p class="dim">How far two runs are apart in '
        f"{text(name)}, as a share of the larger value, and the first step at which it is more. Until the curves part "
        "the two are one training, computed twice; after that they are two samples of it, to be compared like two "
        "seeds.</p>"
        f"{cards.grid(shown) if shown else ''}{table(head, rows, texts=3)}</section>"
    )


def _card(variant: str, its: Sequence[Pair], name: str) -> tuple[str, str, str] | None:
    """Render the distance between a variant's paired runs by step; None if all pairs agree."""
    # Beyond so many pairs they are a cloud, in which no colour is told from another.
    several = len(its) <= COLOURS
    found = [thinned(pair.steps, pair.difference, _MOST_DOTS, largest=True) for pair in its]
    lines = [Line(steps, values, place * several, dots=True) for place, (steps, values, _) in enumerate(found)]
    if not any(((line.y > 0.0) & (line.y < BEYOND)).any() for line in lines):
        return None
    picture = curves(lines, label=f"relative difference of {name}, {variant}", logarithmic=True, mark=_ROUNDING)
    words = legend_of((_pair_words(pair), place) for place, pair in enumerate(its)) if several else ""
    size = max(size for _, _, size in found)
    each = f" Each point is the largest of {size} steps." if size > 1 else ""
    said = f"Dashed: rounding of float32. Where two values are equal there is no point.{each}"
    return variant, picture, f"{words}<p>{said}</p>"


def _row(pair: Pair) -> tuple[str, ...]:
    steps = (pair.parts(tolerance) for tolerance in TOLERANCES)
    return (
        text(pair.left.variant),
        number(pair.left.seed),
        f"{text(pair.left.framework)} and {text(pair.right.framework)}",
        number(len(pair.steps)),
        number(float(pair.difference[0]), 2),
        *("never" if step is None else number(step) for step in steps),
        number(float(pair.difference.max()), 2),
    )


def _pair_words(pair: Pair) -> str:
    return f"seed {pair.left.seed}: {pair.left.framework} and {pair.right.framework}"


def same_data(found: Sequence[Pair]) -> str:
    """Pair by pair: what was proven of the data."""
    if not found:
        return ""
    items = [
        f"<li>{_answer(pair)} · {text(pair.left.variant)}, {text(_pair_words(pair))}"
        f'<p class="dim small">{text(pair.same_data.said)}.</p></li>'
        for pair in found[:_MOST_PAIRS]
    ]
    left = len(found) - _MOST_PAIRS
    more = f'<p class="dim small">{left:,} more pairs are not shown.</p>' if left > 0 else ""
    return (
        '<section id="same-data"><h2>Same data</h2><p class="dim">Each run digests all that the study gives it: names, '
        "shapes and values of all batches, every value to its last bit. Equal digests over the same number of steps "
        f"prove equal data, whatever the runs are called; what a training reads elsewhere is not seen.</p>"
        f'<ul class="pairs">{"".join(items)}</ul>{more}</section>'
    )


def _answer(pair: Pair) -> str:
    if pair.same_data.proven:
        return '<b class="yes">proven</b>'
    return '<b class="no">not proven</b>'


# What the browser may load: nothing but the style that stands in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(results: Results) -> str:
    """A study as one web page that needs nothing besides itself.

    It is a pure function of the results: the same ones give the same page, byte for byte, with the same version of
    matplotlib. Texts are escaped, and the page forbids the browser to load anything or to run a script.

    Args:
        results: what was recorded; of runs that are not finished, too.

    Returns:
        The page.
    """
    members, cards = groups(results), Cards()
    name = next(iter(trained_names(results)), "loss")
    found = pairs(results, name)
    data = verdict(found, results.missing)
    body = [
        _header(results),
        f'<p class="said {"good" if data.proven else "warning"}">{text(data.said)}</p></header>',
        "<main>",
        learning(results, members, cards),
        ends(results, members, cards),
        parting(found, members, name, cards),
        same_data(found),
        costs(results, members),
        runs(results),
        "</main>",
        "<footer>Made by <code>mouse study</code>. This page loads nothing from anywhere.</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(results.name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{STYLE}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _header(results: Results) -> str:
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
    items = "".join(f"<li><b>{number(value)}</b><span>{name}</span></li>" for name, value in figures)
    return (
        f'<header><h1>{text(results.name)}</h1><p class="dim">A study: '
        f"{text(', '.join(sorted({run.framework for run in every})) or 'no runs')}</p>"
        f'<ul class="figures">{items}</ul>'
    )


def page(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the page of a study; see ``to_html``.

    Args:
        results: what ``read`` or ``Study.run`` gave.
        path: where to; a folder gets ``page.html``.

    Returns:
        The file.

    Raises:
        StorageError: it cannot be written; what was there still is.
    """
    file = Path(path) / "page.html" if Path(path).is_dir() else Path(path)
    write_file(file, to_html(results).encode())
    return file
