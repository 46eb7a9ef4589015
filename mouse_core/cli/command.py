"""The interface of ``mouse`` commands, and the discovery of commands in other packages.

A package adds commands by entry points of the group ``mouse_core.commands``, named like the commands. Each entry
point refers to a pair of functions, a ``Command``::

    [project.entry-points."mouse_core.commands"]
    study = "mouse_study.command:STUDY"

``mouse`` looks them up for an unknown command, or for its help.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mouse_core.errors import ConfigError

GROUP = "mouse_core.commands"
"""The group of entry points."""

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
"""Two functions: the first declares the command's arguments, the second runs it and returns the exit status.

What the second one's docstring says is the command's help. It imports what it needs, so that ``mouse --help`` costs
nothing.
"""


def others() -> dict[str, Command]:
    """The commands of other packages by name; one that cannot be loaded says why where it is run."""
    from importlib.metadata import entry_points

    return {entry.name: _loaded(entry) for entry in entry_points(group=GROUP)}


def _loaded(entry: Any) -> Command:
    try:
        declare, run = found = entry.load()
        if not (callable(declare) and callable(run)):
            raise ConfigError(f"{entry.value}: expected two functions, found {found!r:.80}")
    except Exception as error:  # of a package that is not ours, or not all there
        return _missing(error)
    return declare, run


def _missing(why: Exception) -> Command:
    said = " ".join(str(why).split()) or type(why).__name__

    def declare(parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # whatever stands behind it, options and --help too, is no error of its own
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)

    def run(chosen: argparse.Namespace) -> int:
        raise ImportError(said) from why

    run.__doc__ = f"(cannot be used: {said})".replace("%", "%%")
    return declare, run
