"""Inspection of recorded data: statistics of columns, episodes, returns and actions, and findings of common faults."""

from mouse_core.inspect._run import inspect
from mouse_core.inspect.report import ActionsReport, ColumnReport, Distribution, EpisodesReport, Finding, Report, show

__all__ = [
    "ActionsReport",
    "ColumnReport",
    "Distribution",
    "EpisodesReport",
    "Finding",
    "Report",
    "inspect",
    "show",
]
