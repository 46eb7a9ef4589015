"""What is in recorded data: columns, episodes, returns, actions, and what usually goes wrong in them."""

from mouse_core.inspect._run import inspect
from mouse_core.inspect._show.page import to_html
from mouse_core.inspect._show.text import show
from mouse_core.inspect.report import Actions, Column, Distribution, Episodes, Finding, Report

__all__ = ["Actions", "Column", "Distribution", "Episodes", "Finding", "Report", "inspect", "show", "to_html"]
