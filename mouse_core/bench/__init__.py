"""Benchmarks of a dataset's batches in every framework, and tools for custom benchmarks.

``bench`` measures and returns a ``BenchReport``. A custom benchmark describes its candidates as ``Contender``s, and
measures them in turns with ``interleave``; ``plain_copies`` is the lower bound for comparison.
"""

from mouse_core._base.progress import progress_bar
from mouse_core.bench.advice import Line, advise
from mouse_core.bench.floor import Pieces, pieces_of, plain_copies
from mouse_core.bench.measuring import Contender, Timing, interleave, machine, private_memory, steady
from mouse_core.bench.opening import Opened, mixed, open_data
from mouse_core.bench.running import FLOOR, PACKAGES, SOURCE, BenchReport, FirstBatches, bench, bench_own, bench_replay

__all__ = [
    "FLOOR",
    "PACKAGES",
    "SOURCE",
    "BenchReport",
    "Contender",
    "FirstBatches",
    "Line",
    "Opened",
    "Pieces",
    "Timing",
    "advise",
    "bench",
    "bench_own",
    "bench_replay",
    "interleave",
    "machine",
    "mixed",
    "open_data",
    "pieces_of",
    "plain_copies",
    "private_memory",
    "progress_bar",
    "steady",
]
