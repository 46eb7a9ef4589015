"""A viewer of stores: a page of this machine, for a browser or a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from mouse_core.batches.source import BatchSource
from mouse_core.store.views import Store
from mouse_core.view._answers import Answers
from mouse_core.view._server import Server
from mouse_core.view.opening import Shown, shown_of


class Viewer:
    """A page that shows stores, until it is closed; ``view`` makes one.

    In a notebook it is shown in the cell's output.

    Args:
        server: What answers the page.
        height: How high a notebook shows it, in pixels.
    """

    def __init__(self, server: Server, height: int = 800) -> None:
        self._server = server
        self._height = height

    @property
    def url(self) -> str:
        """The page's address, with a token that nobody can guess. Who has it can read what is shown."""
        return self._server.url

    def wait(self) -> None:
        """Wait until the viewer is closed, or the user interrupts it from the keyboard.

        Raises:
            KeyboardInterrupt: It was interrupted.
        """
        self._server.wait()

    def close(self) -> None:
        """Stop showing."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Viewer({self.url!r})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        style = f"width:100%;height:{self._height}px;border:0"
        return f'<iframe src="{html.escape(self.url)}" style="{style}" title="mouse view"></iframe>'


def view(
    *stores: Store | BatchSource,
    names: tuple[str, ...] | list[str] = (),
    port: int = 0,
    height: int = 800,
    inspect: bool = False,
) -> Viewer:
    """Show stores on a page of this machine: their episodes, step by step, and windows as batches have them.

    Only what is looked at is read, so stores of any size open at once; of those that grow the page shows what comes.
    The page is served on the loopback interface, to be read only, and nothing is loaded from anywhere else.

    Args:
        *stores: Stores, views of stores, mixtures, or a ``BatchSource``, whose own batches are shown: augmented,
            padded, with their masks and offsets.
        names: What to call them.
        port: The port; 0: any that is free.
        height: How high a notebook shows the page, in pixels.
        inspect: Whether to look for what is wrong with the rows at once, beside the page, which else does so when it is
            asked to; all rows are read for it.

    Returns:
        The viewer, whose ``url`` is for a browser; a notebook shows it where it is a cell's last line.

    Raises:
        ConfigError: No store, or something else.
        ImportError: Plotly, which draws the plots, is not installed: it comes with the extra ``view``.
        OSError: The port is taken.

    Example:
        >>> from mouse_core.testing import example_store
        >>> with view(example_store()) as viewer:  # doctest: +SKIP
        ...     print(viewer.url)
    """
    called = [*names, *(f"store {place + 1}" for place in range(len(names), len(stores)))]
    shown = shown_of(zip(called, stores, strict=False))
    return viewer_of(shown, port=port, height=height, inspect=inspect)


def viewer_of(shown: Sequence[Shown], *, port: int = 0, height: int = 800, inspect: bool = False) -> Viewer:
    """A viewer of what is opened already; see ``view``."""
    viewer = Viewer(Server(Answers(shown), port=port, framed=True), height)
    for one in shown if inspect else ():
        if one.inspection is not None:
            one.inspection.start()
    return viewer
