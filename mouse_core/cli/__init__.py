"""The ``mouse`` command, and what a command of another package is."""

from mouse_core.cli.main import GROUP, Command, main

__all__ = ["GROUP", "Command", "main"]
