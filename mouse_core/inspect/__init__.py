"""Inspection of recorded data: columns, episodes, returns, actions, and findings of what usually goes wrong."""

from mouse_core.inspect._checks.finding import Finding
from mouse_core.inspect._run import inspect
from mouse_core.inspect.report import ActionsReport, ColumnReport, Distribution, EpisodesReport, Report
from mouse_core.inspect.text import show

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
