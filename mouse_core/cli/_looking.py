"""The subcommands ``inspect`` and ``view``, which show the contents of recorded data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mouse_core._base.progress import aligned
from mouse_core.cli import _data as data

# ---------------------------------------------------------------------- mouse inspect


def declare_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse inspect``."""
    data.add_source(parser)
    data.add_alignment(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print all figures as JSON")
    add("--strict", action="store_true", help="status 1 if there are errors or warnings")
    add(
        "--ignore",
        action="extend",
        type=data.names,
        metavar="CODE[,CODE]",
        default=[],
        help="do not report findings with these codes; may be given several times",
    )


def run_inspect(chosen: argparse.Namespace) -> int:
    """Show the contents of recorded data of any format, and warn about common faults.

    examples:
      mouse inspect recordings                          a folder of save_to_disk, Minari, RLDS, LeRobot, TED, ...
      mouse inspect halfcheetah.hdf5 --final mark       D4RL lacks the last observation of every episode
      mouse inspect pick.mcap                           the topics of an MCAP file or a bag of ROS 2
      mouse inspect pick.mcap --format layout.yaml      the topics that a layout converts to columns, on one clock
      mouse inspect recordings --strict                 status 1 for warnings, for scripts
      mouse inspect robot --final drop                  unreadable episodes of a LeRobotDataset, and the reasons
      mouse inspect recordings --strict --ignore saturated,duplicate-episodes
      mouse inspect recordings --json > report.json

    status: 0 no faults, 1 errors or warnings with --strict, 2 unusable data
    """
    from mouse_core.formats.base import embedded
    from mouse_core.formats.opening import is_lerobot, place
    from mouse_core.inspect import inspect, show

    if chosen.format is None and _show_topics(chosen.source):
        return 0
    root, known = place(chosen.source, chosen.format)
    # The report names all broken episodes.
    chosen.skip_broken = known in (None, "lerobot") and isinstance(root, Path) and is_lerobot(root)
    stream = data.open_source(chosen)
    if chosen.image_root:
        # Files that rows name by path are checked only on request.
        stream = embedded(stream)
    report = inspect(stream, ignore=chosen.ignore, progress=data.wants_bar())
    if chosen.json:
        print(report.to_json(), end="")  # noqa: T201
    else:
        show(report, viewer=data.viewer_of(chosen))
    return 1 if chosen.strict and report.warnings else 0


def _show_topics(source: str) -> bool:
    """Print the topics of a robot recording; return False if the source is not a robot recording."""
    from mouse_core.formats.opening import is_recording
    from mouse_core.formats.robot_logs import topics_in

    if not is_recording(Path(source)):
        return False
    rows = [
        (one.name, one.type, one.encoding, f"{one.messages:,}", f"{one.seconds:.3f}", f"{one.rate:.4g}")
        for one in topics_in(source)
    ]
    print("\n".join(aligned([("topic", "type", "encoding", "messages", "seconds", "a second"), *rows], left=2)))  # noqa: T201
    print("\nTo convert topics to columns on one clock, write a layout: --format layout.yaml")  # noqa: T201
    return True


# ---------------------------------------------------------------------- mouse view


def declare_view(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse view``."""
    data.add_source(parser, hub=True)
    add = parser.add_argument
    add("more", metavar="SOURCE", nargs="*", help="more sources, to compare with the first")
    data.add_alignment(parser)
    add("--no-browser", action="store_true", help="print the address without opening a browser")
    add("--port", type=int, default=0, metavar="N", help="the port of the server (any free port)")
    add("--at", default="", metavar="PLACE", help="the place to show first: the part after # in the page's address")


def run_view(chosen: argparse.Namespace) -> int:
    """Show recorded data of any format in a browser: every episode, step by step.

    examples:
      mouse view recordings                             a folder of save_to_disk, Minari, RLDS, LeRobot, TED, ...
      mouse view runs/expert runs/beginner              two datasets side by side
      mouse view runs/collect                           a store that is being written: new rows are shown
      mouse view recordings --at 'd=recordings&e=12&s=40'   a place copied from the page's address
      mouse view recordings --no-browser --port 8000    for a connection by ssh -L 8000:127.0.0.1:8000

    The page is served only on this machine, at a secret address, until Ctrl-C.

    status: 0 ended, 2 unusable data
    """
    import webbrowser

    from mouse_core.view import view
    from mouse_core.view.opening import opened_store

    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        sources = [chosen.source, *chosen.more]
        how = {**data.how_to_read(chosen), "alignment": chosen.alignment}
        how["final"] = chosen.final or "mark"  # the page shows the other data, and names the missing part
        stores = [stack.enter_context(opened_store(source, progress=data.wants_bar(), **how)) for source in sources]
        viewer = stack.enter_context(view(*stores, names=[_name(source) for source in sources], port=chosen.port))
        address = viewer.url + (f"#{chosen.at.removeprefix('#')}" if chosen.at else "")
        print(address, flush=True)  # noqa: T201
        if not chosen.no_browser and not webbrowser.open(address):
            print("mouse view: no browser was found; open the address in one", file=sys.stderr)  # noqa: T201
        try:
            viewer.wait()
        except KeyboardInterrupt:
            return 0
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (sent by a closing terminal) like Ctrl-C, so that temporary files are removed."""
    import signal
    import threading

    def end(number: int, _: Any) -> None:
        raise KeyboardInterrupt

    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        known = []
    before = [(number, signal.signal(number, end)) for number in known]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _name(source: str) -> str:
    """Return the name under which a source is shown: the last component of its path or address, without passwords and
    tokens.
    """
    from mouse_core.remote.clients import is_url, public_url

    shown = public_url(source) if is_url(source) else source
    return shown.rstrip("/").rpartition("/")[2] or shown
