"""How thorough a run is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """How thorough a run is.

    Args:
        folder: For datasets and the peers' copies of them.
        rounds: Turns of a fast contender.
        budget: Seconds that a contender may take in a table, about.
        rows: Steps of the datasets of numbers.
        images: Steps of the datasets of images.
        cores: Cores this process may use.
        quick: Whether to leave out what takes long.
    """

    folder: Path
    rounds: int
    budget: float
    rows: int
    images: int
    cores: int
    quick: bool
