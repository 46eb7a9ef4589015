"""What tables of replay on a device have in common: where it is, and who takes part."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from mouse_core.bench import Contender, interleave
from tests.bench.results import Table, table_of
from tests.bench.settings import Settings


def table_on(
    settings: Settings, key: str, title: str, contenders: Iterable[Contender | str], *, device: str
) -> list[Table]:
    """The table of some contenders, or none where there are none; texts among them are notes.

    Args:
        settings: How thorough it is.
        key: Of the table, after ``on-device-``.
        title: What is measured.
        contenders: The first is the reference.
        device: "cpu", or what else it runs on. There all are charged the wall clock, for who waits for a device takes
            no processor time.
    """
    given = list(contenders)
    notes = [one for one in given if isinstance(one, str)]
    taking_part = [replace(one, wall=device != "cpu") for one in given if isinstance(one, Contender)]
    if not taking_part:
        print(*notes, sep="\n")
        return []
    for one in taking_part:
        # A first call that compiles for more than a second would have turns of one call each, which finds caches cold.
        one.call(0)
    measured = interleave(taking_part, rounds=settings.rounds, budget_seconds=settings.budget * 2)
    place = "" if device == "cpu" else "gpu-"
    return [table_of(f"on-device-{place}{key}", f"{title} ({device})", measured, notes=notes)]


def peer(package: str, name: str, make: Callable[[], Callable[[int], Any]]) -> Iterator[Contender | str]:
    """Somebody else's, or a note that says why it is not there."""
    if importlib.util.find_spec(package) is None:
        yield f"{name}: not measured, as {package} is not installed here"
        return
    try:
        call = make()
        call(0)
    except Exception as error:
        yield f"{name}: not measured: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        return
    yield Contender(name, call)
