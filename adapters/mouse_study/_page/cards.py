"""Pictures in cards, and what stands above them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mouse_study._page.groups import Group
from mouse_study._page.html import text
from mouse_study._page.pictures import colour, with_names

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
