"""Pieces of the page: texts that stay texts, numbers, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from mouse_study.statistics import Band

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
