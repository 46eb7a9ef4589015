"""Which rows around an anchor a field delivers: ``windows=`` of sources and loaders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError

Holes = Literal["refuse", "mask"]

_FURTHEST = 1 << 31


@dataclass(frozen=True)
class Seconds:
    """Offsets in seconds: of each the row of the anchor's episode whose time stamp is nearest.

    Args:
        offsets: Seconds from the anchor's time stamp, K of them, in any order.
        tolerance: How far a row's time stamp may be from the time that is asked for, in seconds, and beyond that as
            far as two numbers of the stamps' stored dtype are from each other at that time: float32 has 0.00012 s after
            1,024 s.
        clock: The field whose values are time stamps, in seconds; they do not go back within an episode.
        holes: What is done where rows are missing in the midst of an episode, so that none is near enough: "refuse"
            is a DataError, "mask" pads with the nearest row, as beyond the episode's ends.

    Raises:
        ConfigError: Offsets that are no numbers, a tolerance below 0, an unknown ``holes``.

    Example:
        >>> Seconds([-0.1, 0.0]).offsets
        (-0.1, 0.0)
    """

    offsets: tuple[float, ...]
    tolerance: float = 1e-4
    clock: str = "timestamp"
    holes: Holes = "refuse"

    def __init__(
        self,
        offsets: Iterable[float],
        tolerance: float = 1e-4,
        clock: str = "timestamp",
        holes: Holes = "refuse",
    ) -> None:
        numbers = _listed("Seconds", offsets)
        if not all(_is_number(number) and math.isfinite(number) for number in (*numbers, tolerance)):
            raise ConfigError(f"Seconds: expected numbers of seconds, found {numbers!r} within {tolerance!r}")
        if tolerance < 0:
            raise ConfigError(f"Seconds: expected a tolerance from 0, found {tolerance!r}")
        if holes not in get_args(Holes):
            raise ConfigError(f"Seconds: expected holes among {list(get_args(Holes))}, found {holes!r}")
        object.__setattr__(self, "offsets", tuple(map(float, numbers)))
        object.__setattr__(self, "tolerance", float(tolerance))
        object.__setattr__(self, "clock", clock)
        object.__setattr__(self, "holes", holes)


Offsets = tuple[int, ...] | Seconds


@dataclass(frozen=True)
class FieldWindows:
    """What a source is asked for with ``windows=``, checked.

    Args:
        offsets: By field, rows or seconds from the anchor, K of them.
        pad: What a field becomes where no row is: True, the row of the episode that is next to it; False, nothing, as
            there are no such anchors; a number, which all its values are.
        batch_dims: How many axes a batch has before those of a field: 1, ``[B]``, or 2, ``[B, S]``.
    """

    offsets: Mapping[str, Offsets]
    pad: bool | float
    batch_dims: int

    @property
    def fill(self) -> float | None:
        """What all values become where no row is; None: those of the row next to it."""
        return None if isinstance(self.pad, bool) else self.pad

    def count(self, name: str) -> int:
        """How many rows of a field are delivered for an anchor, K."""
        offsets = self.offsets[name]
        return len(offsets.offsets if isinstance(offsets, Seconds) else offsets)

    @property
    def runs(self) -> int:
        """How many runs of rows are read for an anchor, over all fields."""
        found = (
            len(one.offsets) if isinstance(one, Seconds) else len(runs_of(one)[0]) for one in self.offsets.values()
        )
        return sum(found)

    def identity(self, name: str) -> str:
        """What decides about the rows of a field with offsets, in words."""
        offsets = self.offsets[name]
        shown = repr(offsets) if isinstance(offsets, Seconds) else f"offsets {_shown(offsets)}"
        return f"{shown}, pad={self.pad!r}, of [{', '.join('BS'[: self.batch_dims])}]"

    def reach(self, shifts: Mapping[str, int]) -> tuple[int, int]:
        """How many rows of an anchor's episode its fields need before it, and how many behind it.

        Args:
            shifts: By field how many rows after the anchor the one at offset 0 lies.

        Raises:
            ConfigError: Nobody knows how many rows seconds are.
        """
        before = behind = 0
        for name, offsets in self.offsets.items():
            if isinstance(offsets, Seconds):
                raise ConfigError(
                    f"pad: expected True or a number with windows[{name!r}] in seconds, found False; batches have "
                    f"{name}_mask"
                )
            before = max(before, -min(offsets))
            behind = max(behind, max(offsets) + shifts[name])
        return before, behind


def field_windows(windows: Any, pad: Any, batch_dims: int) -> FieldWindows:
    """What ``windows=`` and ``pad=`` say, checked.

    Raises:
        ConfigError: No mapping of names to offsets, no offsets, or something else than True, False or a number.
    """
    if not isinstance(windows, Mapping):
        raise ConfigError(f"windows: expected offsets by field, as in {{'action': range(8)}}, found {windows!r:.80}")
    pad = True if pad is None else pad
    if not isinstance(pad, bool | int | float | np.number):
        raise ConfigError(f"pad: expected True, False or a number, found {pad!r}")
    try:
        pad = pad if isinstance(pad, bool) else float(pad)
    except OverflowError:
        raise ConfigError("pad: expected a number that a float holds, found a larger one") from None
    return FieldWindows({name: _offsets_of(name, offsets) for name, offsets in windows.items()}, pad, batch_dims)


def mask_of(name: str) -> str:
    """What the field is called that says which rows of ``name`` are there."""
    return f"{name}_mask"


def runs_of(offsets: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
    """Offsets as runs of equally many that follow each other: the first of each, and how many.

    Offsets -4, -3, -2, -1, 0, 1 are one run of 6. Of -4, -3, 0, 1, 2, 3 two and four follow each other, so they are
    three runs of 2, which begin at -4, 0 and 2. Of -4, 0, 2 each is a run.
    """
    breaks = [0, *(place for place, (one, next_) in enumerate(pairwise(offsets), 1) if next_ != one + 1), len(offsets)]
    unit = math.gcd(*(end - begin for begin, end in pairwise(breaks)))
    return np.array(offsets[::unit], np.int64), unit


def _offsets_of(name: Any, offsets: Any) -> Offsets:
    if isinstance(offsets, Seconds):
        return offsets
    where = f"windows[{name!r}]"
    listed = _listed(where, offsets)
    for offset in listed:
        if not is_whole(offset) or abs(int(offset)) >= _FURTHEST:
            hint = "; Seconds([...]) takes seconds" if isinstance(offset, float) else ""
            raise ConfigError(f"{where}: expected numbers of rows as integers, found {offset!r}{hint}")
    return tuple(int(offset) for offset in listed)


def _listed(where: str, offsets: Any) -> tuple[Any, ...]:
    # Sets have no order, and mappings are something else.
    if isinstance(offsets, str | bytes | Set | Mapping) or not isinstance(offsets, Iterable):
        hint = f"; write [{offsets!r}]" if _is_number(offsets) else ""
        raise ConfigError(f"{where}: expected a list of offsets, found {offsets!r:.80}{hint}")
    listed = tuple(offsets)
    if not listed:
        raise ConfigError(f"{where}: expected at least one offset, found none")
    return listed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _shown(offsets: tuple[int, ...]) -> str:
    """Offsets in words: those that follow each other as the first and the last."""
    # Counted first: what lies between two offsets may be more than memory holds.
    counted = offsets[-1] - offsets[0] + 1 == len(offsets) > 2
    if counted and offsets == tuple(range(offsets[0], offsets[-1] + 1)):
        return f"{offsets[0]}..{offsets[-1]}"
    return ", ".join(map(str, offsets))
