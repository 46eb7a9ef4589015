"""Finding of an inspection: a code, a severity, a sentence and places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

# Of more episodes than these the first are named.
MOST = 1000


def some(episodes: npt.NDArray[np.int64] | Iterable[int]) -> tuple[int, ...]:
    """Numbers of episodes, each once, ascending; of very many the first."""
    found = episodes if isinstance(episodes, np.ndarray) else np.array(list(episodes), np.int64)
    return tuple(np.unique(found)[:MOST].tolist())


class Places:
    """Fed with places in their order.

    Args:
        column: The column that they are of; None: of none.
    """

    def __init__(self, column: str | None = None) -> None:
        self.column = column
        self._first: tuple[int, int] | None = None
        self._episodes: list[int] = []
        self._dimensions: set[int] = set()

    def add(
        self,
        episode: npt.NDArray[np.int64],
        step: npt.NDArray[np.int64],
        dimensions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take in places, ``[n]`` each; ``dimensions`` of the column that it is so in, each once."""
        if not len(episode):
            return
        if self._first is None:
            self._first = int(episode[0]), int(step[0])
        if dimensions is not None:
            self._dimensions.update(dimensions[: 2 - len(self._dimensions)].tolist())
        if len(self._episodes) < MOST:
            last = self._episodes[-1] if self._episodes else -1
            self._episodes += [number for number in np.unique(episode).tolist() if number > last]

    def told(self, finding: Finding) -> Finding:
        """Return the finding with its places."""
        if self._first is None:
            return finding
        (dimension,) = self._dimensions if len(self._dimensions) == 1 else (finding.dimension,)
        episode, step = self._first
        return replace(finding, dimension=dimension, episode=episode, step=step, episodes=tuple(self._episodes[:MOST]))


LEVELS = ("error", "warning", "note")
_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    """Something that a reader of the data should know.

    Args:
        code: A short name, the same in every version: "no-truncation".
        level: "error" where rows cannot be used as they are, "warning" where they are most likely wrong, both of which
            count under ``--strict``, or "note".
        message: A sentence or two.
        column: The column that it is about; None where it is about none, or several.
        dimension: Which place of the column's rows, from 0; None where it is about the whole of them.
        name: What the data call this dimension; None where they do not say.
        episode: An episode in which it is so, from 0; None where that is not known.
        step: A step of that episode, from 0.
        episodes: All episodes in which it is so, ascending, as far as they were looked at, and the first 1,000 of very
            many; none where that is not known.
    """

    code: str
    level: str
    message: str
    column: str | None = None
    dimension: int | None = None
    name: str | None = None
    episode: int | None = None
    step: int | None = None
    episodes: tuple[int, ...] = ()

    @property
    def place(self) -> str | None:
        """Place of the finding for ``mouse view --at``: ``"e=12&s=40"``; None if no episode is known."""
        if self.episode is None:
            return None
        return f"e={self.episode}" if self.step is None else f"e={self.episode}&s={self.step}"


def sorted_by_level(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; in their order otherwise."""
    return sorted(findings, key=lambda item: LEVELS.index(item.level))


def ratio(number: float) -> str:
    """Format a factor in at most nine characters: ``3,210``, ``1.2e+16``."""
    return f"{number:,.0f}" if number < 1e6 else f"{number:.2g}"


def called(column: str, dimension: int | None, width: int, names: Sequence[str] | None = None) -> str:
    """A column or one dimension of it, as messages call it: ``observation[3] (elbow)``."""
    if dimension is None or width <= 1:
        return column
    said = f" ({names[dimension]})" if names is not None and dimension < len(names) else ""
    return f"{column}[{dimension}]{said}"


def of_dimension(
    code: str,
    level: str,
    message: str,
    column: Any,
    dimension: int | None,
    where: tuple[int | None, int | None] = (None, None),
    episodes: tuple[int, ...] = (),
) -> Finding:
    """A finding about a dimension of a column, whose name begins the message.

    Args:
        code, level, message: As in ``Finding``.
        column: With ``name``, ``width`` and ``names``, those of its dimensions.
        dimension: Which one.
        where: Episode and step.
        episodes: All that it is in; by default the one of ``where``.
    """
    names = column.names if column.names is not None and dimension is not None else None
    found = Finding(code, level, f"{called(column.name, dimension, column.width, names)}: {message}", column.name)
    name = names[dimension] if names is not None and dimension is not None and dimension < len(names) else None
    place = dimension if column.width > 1 else None
    if not episodes and where[0] is not None:
        episodes = (where[0],)
    return replace(found, dimension=place, name=name, episode=where[0], step=where[1], episodes=episodes)


def capped(findings: Sequence[Finding], most: int) -> list[Finding]:
    """At most so many of a code and column; the last of them says how many more there are."""
    kept: list[Finding] = []
    count: dict[tuple[str, str | None], int] = {}
    for item in findings:
        key = item.code, item.column
        count[key] = count.get(key, 0) + 1
        if count[key] <= most:
            kept.append(item)
    for place, item in enumerate(kept):
        more = count[item.code, item.column] - most
        last = not any((other.code, other.column) == (item.code, item.column) for other in kept[place + 1 :])
        if more > 0 and last:
            kept[place] = replace(item, message=f"{item.message}; and {more} more of {item.column} likewise")
    return kept


def warning(code: str, message: str, column: str | None = None) -> Finding:
    """A warning without a place."""
    return Finding(code, "warning", message, column)


def error(code: str, message: str, column: str | None = None) -> Finding:
    """An error without a place."""
    return Finding(code, "error", message, column)


def note(code: str, message: str, column: str | None = None) -> Finding:
    """A note without a place."""
    return Finding(code, "note", message, column)


def counted(number: int, noun: str) -> str:
    """A number and what it counts: ``1 row``, ``2,000 rows``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """The noun, in its plural unless there is one."""
    return noun if number == 1 else f"{noun}s"


def listed(items: Sequence[object]) -> str:
    """The first few of some things, and how many more there are."""
    shown = ", ".join(repr(item) for item in items[:_SHOWN])
    return shown + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
