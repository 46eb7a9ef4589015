"""The ``mouse`` command, and the interface for commands of other packages."""

from mouse_core.cli.main import GROUP, Command, main

__all__ = ["GROUP", "Command", "main"]
