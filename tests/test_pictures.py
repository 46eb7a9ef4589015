"""The pictures of README and docs are what scripts draw, from the windows that sources plan and from the imports."""

from functools import cache
from xml.etree import ElementTree

import pytest

from scripts.draw_house import house
from scripts.draw_pictures import ASSETS, pictures

# The one of figures is drawn by what measures them.
NAMES = sorted({path.name for path in ASSETS.glob("*.svg")} - {"benchmarks.svg", "benchmarks-history.svg"})


@cache
def drawn() -> dict[str, str]:
    return {**pictures(), "house.svg": house().svg()}


def test_each_picture_is_drawn_by_a_script() -> None:
    assert sorted(drawn()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_up_to_date(name: str) -> None:
    found = (ASSETS / name).read_text(encoding="utf-8")
    assert found == drawn()[name], f"{name} is out of date: run python -m scripts.draw_pictures and scripts.draw_house"


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_whole(name: str) -> None:
    root = ElementTree.fromstring(drawn()[name])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        assert 0 <= float(element.get("x", 0)) <= width
        assert 0 <= float(element.get("y", 0)) <= height
    assert root.findtext("{http://www.w3.org/2000/svg}title")
