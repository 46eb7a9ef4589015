"""The ``mouse`` command, and what a command of another package is."""

from mouse_core.cli.command import GROUP, Command
from mouse_core.cli.main import main

__all__ = ["GROUP", "Command", "main"]
