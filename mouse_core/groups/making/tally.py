"""Numbers for a log: how many rollouts and groups came, and what those are like that are there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from mouse_core.groups.making.members import Members, Piece


class Tally:
    """Counts what comes to a batch maker, by environment."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    @property
    def environments(self) -> list[str]:
        """Of all that came, in order."""
        return list(self._counts)

    def count(self, piece: Piece, members: Members | None, was_equal: bool | None) -> None:
        """Count rollouts.

        Args:
            piece: They.
            members: Their group, where it is wanted.
            was_equal: Whether all of it had earned the same before they came; None: none of it was scored.
        """
        counts = self._counts.setdefault(piece.part.key.environment, Counter())
        counts["rollouts"] += len(piece.part.uids) - piece.given_up
        if members is not None and not members.is_empty:
            counts["groups"] += was_equal is None
            counts["groups_equal"] += members.is_equal - bool(was_equal)

    def summary(self, groups: Iterable[Members], behind: Callable[[str], int]) -> dict[str, float]:
        """Of all that came, and behind the name of each environment, where there are several, of that; NaN of nothing.

        Args:
            groups: Those that are there.
            behind: How many versions a version is behind.
        """
        found: dict[str, float] = {}
        values: dict[str, dict[str, list[float]]] = {
            name: {"reward": [], "tokens": [], "staleness": []} for name in self._counts
        }
        for members in groups:
            for piece in members.pieces:
                own = values[piece.part.key.environment]
                own["reward"] += [piece.rewards[place] or 0.0 for place in piece.places]
                present = piece.present
                own["tokens"] += [piece.part.tokens[place] for place in present]
                own["staleness"] += [behind(members.version)] * len(present)
        whole = sum(self._counts.values(), Counter())
        names = ("reward", "tokens", "staleness")
        together = {name: [one for own in values.values() for one in own[name]] for name in names}
        parts = [("", whole, together)]
        if len(self._counts) > 1:
            parts += [(f"{name}/", counts, values[name]) for name, counts in self._counts.items()]
        for prefix, counts, own in parts:
            found |= {f"{prefix}{what}": counts[what] for what in ("rollouts", "groups", "groups_equal")}
            found[f"{prefix}groups_equal_share"] = counts["groups_equal"] / max(counts["groups"], 1)
            for what, numbers in own.items():
                array = np.array(numbers, np.float64)
                for call in ("mean", "std", "min", "max"):
                    found[f"{prefix}{what}_{call}"] = float(getattr(array, call)()) if len(array) else math.nan
        return found
