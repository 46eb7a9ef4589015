"""The ``mouse`` command."""

from mouse_core.cli.main import main

__all__ = ["main"]
