"""Terminal output: text, and a progress bar for long work."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

WIDTH = 110
"""Number of characters in a line if the output is not a terminal, for example a file or a pipe."""


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return a table as lines of text: the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def item(text: str) -> str:
    """Render a list item, wrapped to the width of the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return textwrap.fill(f"- {text}", width, subsequent_indent="  ")


@contextmanager
def progress_bar(
    description: str, *, total: int | None, unit: str, enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show the progress of some work on stderr, with tqdm.

    Args:
        description: A description of the work.
        total: Number of units; None if unknown.
        unit: Name of the unit ("steps", "files").
        enabled: Whether progress is shown; if False, no bar library is imported.

    Yields:
        A function, to be called with the number of units that were completed since its previous call.
    """
    if not enabled:
        yield lambda count: None
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc=description, unit=f" {unit}") as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
