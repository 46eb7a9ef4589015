"""How fast batches of a dataset are on this machine, in every framework; and what a benchmark of one's own needs.

``bench`` measures and gives a ``BenchReport``. A benchmark names what it compares as ``Contender``s and measures them
in turns with ``interleave``; ``plain_copies`` is the floor to hold them against.
"""

from mouse_core._base.progress import progress_bar
from mouse_core.bench.advice import Line, advise
from mouse_core.bench.floor import ColumnAddresses, Pieces, plain_copies
from mouse_core.bench.frameworks import PACKAGES
from mouse_core.bench.measuring import Contender, Timing, interleave, machine, private_memory, steady
from mouse_core.bench.opening import Opened, mixed, open_data
from mouse_core.bench.own import bench_own
from mouse_core.bench.replaying import bench_replay
from mouse_core.bench.running import FLOOR, SOURCE, BenchReport, FirstBatches, bench

__all__ = [
    "FLOOR",
    "PACKAGES",
    "SOURCE",
    "BenchReport",
    "ColumnAddresses",
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
    "plain_copies",
    "private_memory",
    "progress_bar",
    "steady",
]
