"""Pictures of a study: drawn by matplotlib as SVG, coloured by the page's style, with no text but numbers.

Names stand in the page around a picture, as text that is escaped there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mouse_study._page.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

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
    """Neighbouring points as one, so that at most so many are left.

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
