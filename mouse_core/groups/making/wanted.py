"""Which groups of a problem are wanted, where policies of several versions answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.groups.types.versions import version_order

OLDER_GROUPS = ("drop", "until_as_large", "keep")
"""What becomes of a problem's group of an older policy version when rollouts of a newer one come."""

Problem = tuple[str, str]


@dataclass(slots=True)
class _Group:
    version: str
    order: tuple[Any, ...]
    number: int
    count: int = 0


class WantedGroups:
    """The groups that are wanted of each problem: those of its latest policy version, and others as is chosen.

    Args:
        older: One of ``OLDER_GROUPS``.

    Raises:
        ConfigError: Something else.
    """

    def __init__(self, older: str) -> None:
        if older not in OLDER_GROUPS:
            raise ConfigError(f"older_groups: expected one of {list(OLDER_GROUPS)}, found {older!r}")
        self._older = older
        self._groups: dict[Problem, list[_Group]] = {}
        self._next = 0

    def count_in(self, problem: Problem, version: str, count: int = 1) -> tuple[int | None, list[int]]:
        """Let so many rollouts come.

        Returns:
            The number of their group, a new one if need be, or None if it is not wanted; and the numbers of the groups
            that are no longer wanted.
        """
        groups = self._groups.setdefault(problem, [])
        place = next((place for place, one in enumerate(groups) if one.version == version), len(groups))
        if place == len(groups):
            order = version_order(version)
            if self._older != "keep" and groups and order < groups[-1].order:
                return None, []
            groups.append(_Group(version, order, self._next))
            self._next += 1
        own = groups[place]
        own.count += count
        if self._older == "keep" or not place:
            return own.number, []
        # Unless all are kept, versions stand in their order, of equal ones the one that came last behind.
        gone = [one for one in groups[:place] if self._older == "drop" or one.count <= own.count]
        self._groups[problem] = [one for one in groups if one not in gone]
        return own.number, [one.number for one in gone]

    def drop(self, unwanted: Callable[[str], bool]) -> list[int]:
        """Drop the groups of all versions that a function names; their numbers."""
        gone = []
        for problem, groups in list(self._groups.items()):
            gone += [one.number for one in groups if unwanted(one.version)]
            kept = [one for one in groups if not unwanted(one.version)]
            if kept:
                self._groups[problem] = kept
            else:
                del self._groups[problem]
        return gone
