"""Plots as inline SVG: histograms, bars and ranges, drawn for a width that a phone has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH = 300
_HEIGHT = 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 8, 18, 26
_ROW = 22
_MOST_ROWS = 64
_MOST_BARS = 32


def histogram(edges: Sequence[float], counts: Sequence[int], *, label: str, height: int = _HEIGHT) -> str:
    """Counts over a range of numbers.

    Args:
        edges, counts: See ``Histogram.bars``.
        label: What is counted, for those who cannot see it.
        height: Of the picture, in its own units; it is 300 wide.
    """
    if not counts:
        return '<p class="none">nothing to show</p>'
    highest = max(counts)
    bottom = height - _BOTTOM
    room = _WIDTH - _LEFT - _RIGHT
    step = room / len(counts)
    parts = [_grid(bottom, highest)]
    for place, count in enumerate(counts):
        tall = (bottom - _TOP) * count / highest
        if not count:
            continue
        tall = max(tall, 1.0)
        span = short(edges[place]) if len(counts) == 1 else f"{short(edges[place])} to {short(edges[place + 1])}"
        wide = min(step, 48.0)
        x = _LEFT + place * step + (step - wide) / 2
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{bottom - tall:.1f}" width="{max(wide - 0.8, 0.8):.1f}" '
            f'height="{tall:.1f}"><title>{span}: {count:,}</title></rect>'
        )
    if edges[0] == edges[-1]:
        parts.append(_text(_WIDTH / 2, height - 8, short(edges[0]), "middle"))
    else:
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
            value = edges[0] + (edges[-1] - edges[0]) * share
            value = 0.0 if abs(value) < 2e-3 * (edges[-1] - edges[0]) else value
            parts.append(_text(_LEFT + room * share, height - 8, short(value), anchor))
    return _svg(height, label, parts)


def bar_chart(values: Mapping[str, int], *, label: str) -> str:
    """Counts by name, a row each, with shares; of more than 32 the last ones are one row together.

    Args:
        values: Counts by name.
        label: What is counted.
    """
    items = [(name, count, "bar") for name, count in values.items()]
    if len(items) > _MOST_BARS:
        rest = sum(count for _, count, _ in items[_MOST_BARS - 1 :])
        items = [*items[: _MOST_BARS - 1], (f"{len(items) - _MOST_BARS + 1} others", rest, "bar other")]
    total, highest = max(1, sum(values.values())), max([1, *(count for _, count, _ in items)])
    names = min(120, 14 + max([1, *(7 * len(name) for name, _, _ in items)]))
    room = _WIDTH - names - 104
    parts = []
    for place, (name, count, kind) in enumerate(items):
        y = 6 + place * _ROW
        parts.append(_text(names - 8, y + 13, _cut(name, 16), "end"))
        wide = max(room * count / highest, 1.0 if count else 0.0)
        parts.append(f'<rect class="{kind}" x="{names}" y="{y + 2}" width="{wide:.1f}" height="14" rx="2"/>')
        parts.append(_text(names + wide + 6, y + 13, f"{count:,} ({share_text(count / total)})", "start", "dim"))
    return _svg(12 + _ROW * len(items), label, parts)


def ranges(places: Mapping[str, Any], *, label: str) -> str:
    """From the lowest to the highest value of every place of vectors, with mean and standard deviation.

    Where the places differ much in size, the axis is drawn by ``asinh``, so that the small ones can be seen too.

    Args:
        places: ``low``, ``high``, ``mean`` and ``deviation``, a value for every place each.
        label: What is shown.
    """
    rows = zip(places["low"], places["high"], places["mean"], places["deviation"], strict=True)
    known = [(place, *row) for place, row in enumerate(rows) if row[0] is not None][:_MOST_ROWS]
    if not known:
        return '<p class="none">nothing to show</p>'
    low, high = min(row[1] for row in known), max(row[2] for row in known)
    spans = sorted(max(abs(row[1]), abs(row[2])) for row in known)
    middle = spans[len(spans) // 2] or 1.0
    bent = spans[-1] > 50 * middle or spans[-1] > 50 * (next((span for span in spans if span), 1.0))

    def bend(value: float) -> float:
        return math.asinh(value / (middle / 10 or 1.0)) if bent else value

    first, last = bend(low), bend(high)
    left, right = 44, _WIDTH - 8

    def at(value: float) -> float:
        value = min(max(value, low), high)
        return left + (right - left) * ((bend(value) - first) / (last - first) if last > first else 0.5)

    bottom = 8 + _ROW * len(known)
    parts = []
    if low < 0 < high:
        parts.append(f'<line class="zero" x1="{at(0):.1f}" x2="{at(0):.1f}" y1="4" y2="{bottom}"/>')
    for row, (place, least, most, mean, deviation) in enumerate(known):
        y = 8 + row * _ROW + 8
        about = f"{place}: {short(least)} to {short(most)}, mean {short(mean)}, deviation {short(deviation)}"
        x1, x2 = at(least), at(most)
        parts.append(_text(left - 8, y + 4, _cut(str(place), 6), "end"))
        parts.append(
            f'<g><title>{escape(about)}</title><line class="span" x1="{x1:.1f}" x2="{max(x2, x1 + 1):.1f}" y1="{y}" '
            f'y2="{y}"/><rect class="bar" x="{at(mean - deviation):.1f}" y="{y - 4}" '
            f'width="{max(at(mean + deviation) - at(mean - deviation), 1.0):.1f}" height="8" rx="2"/>'
            f'<line class="mean" x1="{at(mean):.1f}" x2="{at(mean):.1f}" y1="{y - 6}" y2="{y + 6}"/></g>'
        )
    parts.append(_text(left, bottom + 16, short(low), "start"))
    parts.append(_text(right, bottom + 16, short(high), "end"))
    if bent:
        parts.append(_text((left + right) / 2, bottom + 16, "asinh scale", "middle", "dim"))
    return _svg(bottom + 24, label, parts)


def short(value: float | None) -> str:
    """A number in few characters."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.3g}"


def share_text(share: float) -> str:
    """A share in percent; one that is small is not nothing."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _grid(bottom: float, highest: int) -> str:
    return (
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_TOP}" y2="{_TOP}"/>'
        + _text(_WIDTH - _RIGHT, _TOP - 5, f"{highest:,}", "end", "dim")
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
