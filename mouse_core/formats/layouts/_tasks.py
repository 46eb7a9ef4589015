"""What an episode is to do, as text, where attributes of its group, or of one above it, say it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mouse_core.files.reading import damaged
from mouse_core.formats.layouts._arrays import Tree
from mouse_core.formats.layouts.layout import TreeLayout


def tasks_of(file: Tree, layout: TreeLayout, stars: Sequence[str]) -> list[str | None]:
    """The task of some episodes: that of the first path of the layout that leads to one; None where none does.

    Raises:
        DataError: What should be JSON is none, or leads to what is no text.
    """
    found: list[str | None] = [None] * len(stars)
    for path in layout.tasks():
        lacking = [number for number, task in enumerate(found) if task is None]
        group, _, said = path.partition("@")
        name, *keys = said.split("/")
        places = [group.replace("*", stars[number]) for number in lacking]
        values = file.attributes([(place, name) for place in places])
        for number, place, value in zip(lacking, places, values, strict=True):
            if value is not None:
                found[number] = _task(value, keys, f"{file.path}, {place}@{name}")
    return found


def _task(value: Any, keys: Sequence[str], where: str) -> str | None:
    if keys:
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise damaged(where, f"expected JSON, found {value!r:.80}") from error
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "".join(value)  # as LIBERO reads it
    if not isinstance(value, str):
        raise damaged(where, f"expected a text that says the task, found {value!r:.80}")
    return value
