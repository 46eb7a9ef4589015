"""Draw the rooms of the house and who imports whom: `python -m scripts.draw_house` writes docs/assets/house.svg.

Each room stands above the rooms that it imports from; arrows are read from the imports, and those that a detour over
other rooms replaces are left out. A test holds the file to what this script draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from scripts.draw_pictures import ASSETS, BLUE, GREY, SOFT, VIOLET, WIDTH, Picture
from scripts.house import ADAPTERS, arrows, necessary, storeys

BOX_WIDTH, BOX_HEIGHT, STOREY_HEIGHT = 108, 30, 66
LEFT, RIGHT, TOP = 96, WIDTH - 20, 56
# Between the middles of neighbours at least: two rooms, a room and a passage, two passages.
ROOM_GAP, MIXED_GAP, PASSAGE_GAP = BOX_WIDTH + 18, BOX_WIDTH / 2 + 14, 16
SWEEPS = 40
# How many times more it counts for a passage that it is straight.
STRAIGHT = 3


class Place(NamedTuple):
    """A place on a floor: a room, or where arrows to a room below pass through the floor."""

    floor: int
    room: str
    passage: bool = False


Storeys = list[list[Place]]
# Which places of the floor below a place is linked to.
Links = Mapping[Place, Sequence[Place]]


def house() -> Picture:
    """The rooms, floor by floor, with the adapters on top."""
    rooms = storeys()
    places, below = with_passages([*map(sorted, rooms), sorted(ADAPTERS)], necessary(arrows()))
    above: dict[Place, list[Place]] = {place: [] for storey in places for place in storey}
    for place, others in below.items():
        for other in others:
            above[other].append(place)
    places = untangled(places, below, above)
    middle = middles(places, below, above)
    top = [TOP + STOREY_HEIGHT * (len(places) - 1 - floor) for floor in range(len(places))]

    picture = Picture(
        WIDTH,
        TOP + STOREY_HEIGHT * len(places) - (STOREY_HEIGHT - BOX_HEIGHT) + 20,
        "The rooms of mouse_core and the adapters, floor by floor, and arrows from each room down to the rooms that it "
        "imports from.",
    )
    picture.text(20, 32, "Who imports whom: arrows only ever point down", size=15, anchor="start", bold=True)
    for floor, y in enumerate(top):
        name = f"floor {floor}" if floor < len(rooms) else "adapters"
        picture.text(20, y + 20, name, size=12, colour=SOFT, anchor="start")
    for place, others in below.items():
        for other in others:
            picture.path(_link(place, other, middle, top), arrow=not other.passage, colour=SOFT)
    for place, x in middle.items():
        if not place.passage:
            colour = VIOLET if place.room in ADAPTERS else GREY if place.room.startswith("_") else BLUE
            picture.box(x - BOX_WIDTH / 2, top[place.floor], BOX_WIDTH, BOX_HEIGHT, colour)
            picture.text(x, top[place.floor] + 20, place.room, size=13, mono=True)
    return picture


def with_passages(rooms: Sequence[Sequence[str]], arrows: Mapping[str, set[str]]) -> tuple[Storeys, Links]:
    """Places floor by floor, and the links that arrows are made of, which only join neighbouring floors.

    An arrow from `cli` on floor 3 to `spec` on floor 1 is two links: from `cli` to a passage to `spec` on floor 2, and
    from there to `spec`. All arrows to `spec` that pass floor 2 share that passage.
    """
    storeys = [[Place(floor, name) for name in names] for floor, names in enumerate(rooms)]
    floor_of = {place.room: place.floor for storey in storeys for place in storey}
    below: dict[Place, list[Place]] = {place: [] for storey in storeys for place in storey}
    for name, goals in sorted(arrows.items()):
        for goal in sorted(goals):
            ends = Place(floor_of[name], name), Place(floor_of[goal], goal)
            passages = [Place(floor, goal, passage=True) for floor in range(ends[0].floor - 1, ends[1].floor, -1)]
            for passage in passages:
                if passage not in below:
                    below[passage] = []
                    storeys[passage.floor].append(passage)
            for upper, lower in pairwise([ends[0], *passages, ends[1]]):
                if lower not in below[upper]:
                    below[upper].append(lower)
    return storeys, below


def untangled(storeys: Storeys, below: Links, above: Links) -> Storeys:
    """The same floors, their places in an order in which few links cross.

    Floor by floor, up and down again, places are sorted by where those that they are linked to stand on average; the
    best of all orders that come up is kept.
    """
    best, fewest = storeys, _crossings(storeys, below)
    for sweep in range(SWEEPS):
        links = below if sweep % 2 == 0 else above
        storeys = [list(storey) for storey in storeys]
        for floor in range(1, len(storeys)) if sweep % 2 == 0 else range(len(storeys) - 2, -1, -1):
            neighbours = storeys[floor - 1 if sweep % 2 == 0 else floor + 1]
            rank = {place: (number + 0.5) / len(neighbours) for number, place in enumerate(neighbours)}
            own = {place: (number + 0.5) / len(storeys[floor]) for number, place in enumerate(storeys[floor])}
            storeys[floor].sort(key=lambda place: _mean([rank[other] for other in links[place]], own[place]))
        crossings = _crossings(storeys, below)
        if crossings < fewest:
            best, fewest = storeys, crossings
    return best


def _crossings(storeys: Storeys, below: Links) -> int:
    """How many pairs of links cross: those whose ends stand in one order above and in the other below."""
    rank = {place: number for storey in storeys for number, place in enumerate(storey)}
    return sum(
        (rank[upper] - rank[other]) * (rank[lower] - rank[beside]) < 0
        for storey in storeys
        for upper, other in combinations(storey, 2)
        for lower in below[upper]
        for beside in below[other]
    )


def middles(storeys: Storeys, below: Links, above: Links) -> dict[Place, float]:
    """Where the middle of each place is: near those that it is linked to, and apart from its neighbours."""
    middle: dict[Place, float] = {}
    for storey in storeys:
        middle |= _apart(storey, [(LEFT + RIGHT) / 2] * len(storey))
    for sweep in range(SWEEPS):
        for storey in storeys if sweep % 2 == 0 else reversed(storeys):
            middle |= _apart(storey, [_wish(place, (*below[place], *above[place]), middle) for place in storey])
    return middle


def _wish(place: Place, others: Sequence[Place], middle: Mapping[Place, float]) -> float:
    """Where a place wishes to be: in the middle of those it is linked to, a passage rather below another passage."""
    straight = [other for other in others if place.passage and other.passage]
    return _mean([middle[other] for other in (*others, *straight * STRAIGHT)], middle[place])


def _apart(storey: Sequence[Place], wished: Sequence[float]) -> dict[Place, float]:
    """As near as possible to where the places of a floor wish to be, in their order and as far apart as they must.

    Take away what the gaps before each place add up to, and what is left must only never fall; wishes that do are
    averaged. For gaps of 10 and wishes of 50, 40 and 90, what is left is 50, 30 and 70, averaged 40, 40 and 70, and
    with the gaps 40, 50 and 90.
    """
    gaps = [0.0]
    for left, right in pairwise(storey):
        kinds = left.passage + right.passage
        gaps.append(gaps[-1] + (ROOM_GAP, MIXED_GAP, PASSAGE_GAP)[kinds])
    groups: list[list[float]] = []
    for wish, gap in zip(wished, gaps, strict=True):
        groups.append([wish - gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    lowest = LEFT + (0 if storey[0].passage else BOX_WIDTH / 2)
    highest = RIGHT - gaps[-1] - (0 if storey[-1].passage else BOX_WIDTH / 2)
    assert lowest <= highest, f"floor {storey[0].floor} is too full for the picture's width"
    rising = [min(max(_mean(group), lowest), highest) for group in groups for _ in group]
    return {place: round(x + gap, 1) for place, x, gap in zip(storey, rising, gaps, strict=True)}


def _mean(values: Sequence[float], otherwise: float = 0.0) -> float:
    return sum(values) / len(values) if values else otherwise


def _link(upper: Place, lower: Place, middle: Mapping[Place, float], top: Sequence[float]) -> str:
    """The path of a link: through the upper floor where it is a passage there, then down to the lower floor."""
    x1, y1 = middle[upper], top[upper.floor] + BOX_HEIGHT
    x2, y2 = middle[lower], top[lower.floor]
    through = f"M{x1:g},{y1 - BOX_HEIGHT:g} L{x1:g},{y1:g}" if upper.passage else f"M{x1:g},{y1:g}"
    bend = (y2 - y1) / 2
    return f"{through} C{x1:g},{y1 + bend:g} {x2:g},{y2 - bend:g} {x2:g},{y2:g}"


def main() -> None:
    """Write the picture."""
    (ASSETS / "house.svg").write_text(house().svg(), encoding="utf-8")
    print(ASSETS / "house.svg")


if __name__ == "__main__":
    main()
