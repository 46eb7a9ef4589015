"""Tools for benchmarks. ``interleave`` measures ``Contender`` objects in turns; ``plain_copies`` is the lower bound."""

from mouse_core._base.progress import progress_bar
from mouse_core.bench.floor import Pieces, pieces_of, plain_copies
from mouse_core.bench.measuring import Contender, Timing, interleave, machine, private_memory, steady

__all__ = [
    "Contender",
    "Pieces",
    "Timing",
    "interleave",
    "machine",
    "pieces_of",
    "plain_copies",
    "private_memory",
    "progress_bar",
    "steady",
]
