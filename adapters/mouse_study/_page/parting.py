"""Pairs of runs that only their framework tells apart: were they given the same data, and when do they part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mouse_study._page.cards import Cards, by_variant, legend_of
from mouse_study._page.groups import Group
from mouse_study._page.html import number, table, text
from mouse_study._page.pictures import BEYOND, Line, curves, thinned
from mouse_study._page.style import COLOURS
from mouse_study.comparing import TOLERANCES, Pair

_MOST_DOTS = 300
_MOST_PAIRS = 400
_ROUNDING = float(np.finfo(np.float32).eps)


def parting(found: Sequence[Pair], members: Sequence[Group], name: str, cards: Cards) -> str:
    """How far pairs of runs are apart, and since when."""
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
    """How far the pairs of a variant are apart by step; None where they nowhere are."""
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
