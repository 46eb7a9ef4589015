"""How fast batches of a dataset are on this machine, in every framework."""

from mouse_core.bench.running import FLOOR, PACKAGES, SOURCE, FirstBatches, Line, Report, bench

__all__ = ["FLOOR", "PACKAGES", "SOURCE", "FirstBatches", "Line", "Report", "bench"]
