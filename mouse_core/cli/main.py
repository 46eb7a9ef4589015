"""The command ``mouse``: its parser, and its commands.

Each command is a pair of functions. ``declare_NAME`` adds the arguments to a parser, and ``run_NAME`` runs the command
and returns the exit status. The docstring of ``run_NAME`` is the text of ``mouse NAME --help``.
"""

from __future__ import annotations

import argparse
import html
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mouse_core._base.progress import aligned
from mouse_core.errors import AlignmentWarning, ConfigError, MouseError

if TYPE_CHECKING:
    from mouse_core.formats.base import RowStream
    from mouse_core.formats.converting import Conversion

_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0;url={0}"><a href="{0}">mouse view</a>'
GROUP = "mouse_core.commands"
"""The group of entry points for commands of other packages."""

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
"""The two functions of a command: the first declares the arguments, and the second runs the command and returns the
exit status.

The docstring of the second function is the help of the command. Only the second function imports the modules of the
command, so that ``mouse --help`` starts fast.
"""


def others() -> dict[str, Command]:
    """Return the commands of other packages by name. If a command cannot be loaded, the returned command prints the
    reason when it is run.
    """
    from importlib.metadata import entry_points

    return {entry.name: _loaded(entry) for entry in entry_points(group=GROUP)}


def _loaded(entry: Any) -> Command:
    try:
        declare, run = found = entry.load()
        if not (callable(declare) and callable(run)):
            raise ConfigError(f"{entry.value}: expected two functions, found {found!r:.80}")
    except Exception as error:  # the other package is broken or incomplete
        return _missing(error)
    return declare, run


def _missing(why: Exception) -> Command:
    said = " ".join(str(why).split()) or type(why).__name__

    def declare(parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # all arguments behind the command, including --help, belong to that command
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)

    def run(chosen: argparse.Namespace) -> int:
        raise ImportError(said) from why

    run.__doc__ = f"(cannot be used: {said})".replace("%", "%%")
    return declare, run


# ---------------------------------------------------------------------- arguments of several commands


def add_source(parser: argparse.ArgumentParser, *, hub: bool = False, alignment: bool = True) -> None:
    """Add the arguments that select the data of a command, the reading options, and the alignment of rows."""
    more = ", or namespace/name of a dataset on the Hub" if hub else ""
    ids = "a dataset of a library by its id: minari:NAME, lerobot:NAME or hf:NAME"
    add = parser.add_argument
    add("source", metavar="SOURCE", help=f"a file or folder of any format, an address, {ids}{more}")
    kinds = "d4rl, minari, robomimic, rows and others, or a YAML file with the layout of arrays or topics"
    add("--format", metavar="NAME", help=f"the format of the source, if it is not recognised: {kinds}")
    add(
        "--final",
        choices=("drop", "mark"),
        help="for episodes whose final observation was not stored: drop the last transition, or mark the observation "
        "as missing",
    )
    add(
        "--last-step",
        choices=("observation", "transition"),
        help="for RLDS (TFDS, Open X): whether the last step of an episode is only an observation, as RLDS defines it, "
        "or has a valid action and reward too",
    )
    add(
        "--tolerance",
        type=float,
        metavar="SECONDS",
        help="for a LeRobotDataset: the largest difference between the time of a row and of its video frame (0.0001)",
    )
    add("--split", action="append", metavar="NAME", help="only this split; may be given several times")
    add(
        "--image-root",
        action="append",
        metavar="DIR",
        default=[],
        help="a further folder from which rows may read images by path; may be given several times",
    )
    if alignment:
        add(
            "--alignment",
            choices=("arrived", "outgoing"),
            help="if the source does not state its alignment: whether the action, reward and done of a row precede the "
            "row's observation (arrived) or follow it (outgoing); by default arrived is assumed, and not stored",
        )


def names(text: str) -> list[str]:
    """Parse names separated by commas, for argparse."""
    return [name.strip() for name in text.split(",") if name.strip()]


def how_to_read(chosen: argparse.Namespace) -> dict[str, Any]:
    """Convert the reading options that ``add_source`` added to arguments of ``formats.open``."""
    said = {
        "format": chosen.format,
        "final": chosen.final,
        "splits": chosen.split,
        "image_roots": chosen.image_root,
    }
    return said | {name: value for name in ("last_step", "tolerance") if (value := getattr(chosen, name)) is not None}


def viewer_of(chosen: argparse.Namespace) -> list[str]:
    """Return the ``mouse view`` command for the same data with the same reading options, as a list of words."""
    words = ["mouse", "view", chosen.source]
    for name in ("format", "final", "last_step", "tolerance", "split", "alignment", "image_root"):
        given = getattr(chosen, name)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def open_source(chosen: argparse.Namespace) -> RowStream:
    """Return the rows that the command's arguments select."""
    from mouse_core import formats

    more: dict[str, Any] = {"skip_broken": True} if getattr(chosen, "skip_broken", False) else {}
    return formats.open(chosen.source, alignment=chosen.alignment, **how_to_read(chosen), **more)


def wants_bar() -> bool:
    """Whether to show a progress bar: True if stderr is a terminal."""
    return sys.stderr.isatty()


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """Add the argument that sets the size of files."""
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="the largest size of a file (500MB; for a LeRobotDataset 100MB)"
    )


# ---------------------------------------------------------------------- mouse inspect


def declare_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse inspect``."""
    add_source(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print all figures as JSON")
    add("--strict", action="store_true", help="status 1 if there are errors or warnings")
    add(
        "--ignore",
        action="extend",
        type=names,
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
    stream = open_source(chosen)
    if chosen.image_root:
        # Files that rows name by path are checked only on request.
        stream = embedded(stream)
    report = inspect(stream, ignore=chosen.ignore, progress=wants_bar())
    if chosen.json:
        print(report.to_json(), end="")  # noqa: T201
    else:
        show(report, viewer=viewer_of(chosen))
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
    add_source(parser, hub=True)
    add = parser.add_argument
    add("more", metavar="SOURCE", nargs="*", help="more sources, to compare with the first")
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
    import tempfile
    import webbrowser

    from mouse_core.view import view
    from mouse_core.view.opening import opened_store

    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        sources = [chosen.source, *chosen.more]
        how = {**how_to_read(chosen), "alignment": chosen.alignment}
        how["final"] = chosen.final or "mark"  # the page shows the other data, and names the missing part
        stores = [stack.enter_context(opened_store(source, progress=wants_bar(), **how)) for source in sources]
        viewer = stack.enter_context(view(*stores, names=[_name(source) for source in sources], port=chosen.port))
        address = viewer.url + (f"#{chosen.at.removeprefix('#')}" if chosen.at else "")
        print(address, flush=True)  # noqa: T201
        if not chosen.no_browser:
            # The arguments of a browser, which all users of this machine can read, do not contain the token.
            page = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mouse-view-")), "view.html")
            page.write_text(_REDIRECT.format(html.escape(address)), encoding="utf-8")
            if not webbrowser.open(page.as_uri()):
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


# ---------------------------------------------------------------------- mouse convert


def declare_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse convert``."""
    add_source(parser)
    add = parser.add_argument
    add("target", metavar="TARGET", help="a new folder, or a new file that ends in .parquet")
    text = (
        "a folder for datasets.load_from_disk, Parquet, a folder for DatasetStore.open, or a LeRobotDataset of version "
        "3; by default parquet if TARGET ends in .parquet, store with --layout, otherwise arrow"
    )
    add("--to", choices=("arrow", "parquet", "store", "lerobot"), help=text)
    add(
        "--layout",
        choices=("columns", "windows"),
        help="write a store whose files hold whole columns one after another, or groups of 128 to 256 rows, which need "
        "fewer reads if the data are larger than memory or remote",
    )
    add(
        "--images",
        action="append",
        metavar="[COLUMN=]HOW",
        help="store images as raw pixels, png (both lossless) or jpeg:95; with --to lerobot as frames of videos: "
        "video:h264:gop=2 (or hevc, av1; and crf=23, pix_fmt=yuv444p, preset=medium or lossless), png or jpeg:95; "
        "may be given once for each column",
    )
    add(
        "--skip-broken",
        action="store_true",
        help="omit episodes of a LeRobotDataset that lack rows or frames or cannot be decoded, and print their numbers",
    )
    add("--fps", type=float, metavar="N", help="frames a second of the new LeRobotDataset (the source's, or 30)")
    add("--task", metavar="TEXT", help="the task of the new LeRobotDataset, if the source names none")
    add_shard_size(parser)


def run_convert(chosen: argparse.Namespace) -> int:
    """Convert recorded data of any format into a dataset on disk, verified against the source.

    examples:
      mouse convert minari:D4RL/door/human-v2 door           a folder for datasets.load_from_disk
      mouse convert halfcheetah.hdf5 halfcheetah.parquet --final drop
      mouse convert recordings parts --to parquet --max-shard-size 200MB
      mouse convert transitions.parquet rows --alignment outgoing   rows with the action that follows the observation
      mouse convert pick.mcap rows --format layout.yaml      topics of a robot as columns, on one clock
      mouse convert recordings store --layout windows        a folder for DatasetStore.open, larger than memory
      mouse convert recordings small --images jpeg:95        images as JPEG, which loses detail
      mouse convert robot pixels --final drop --images png   frames of videos as lossless images
      mouse convert recordings robot --to lerobot --fps 10   LeRobot version 3, images as videos
      mouse convert robot rows --final drop --skip-broken    the readable episodes of a LeRobotDataset

    After an interruption the same command resumes. The result is read back and compared with the source.

    status: 0 converted and verified, 2 unusable data or target
    """
    stream = open_source(chosen)
    done = _written(stream, chosen)
    for note in stream.notes:
        print(f"note: {note}")  # noqa: T201
    for sentence in done.pictures:
        print(f"images: {sentence}")  # noqa: T201
    resumed = f", {done.resumed_rows:,} of them before an interruption" if done.resumed_rows else ""
    files = "file" if done.shards == 1 else "files"
    stated = "" if stream.metadata.alignment else " (assumed; neither the source nor the result states it)"
    print(f"alignment: {stream.alignment}{stated}")  # noqa: T201
    what = "frames" if chosen.to == "lerobot" else "rows"
    both = "frames, read back, have" if chosen.to == "lerobot" else "source and result have"
    print(f"{done.path}: {done.rows:,} {what} in {done.shards} {files}{resumed}")  # noqa: T201
    print(f"verified: {both} the digest {done.digest}")  # noqa: T201
    return 0


def _written(stream: RowStream, chosen: argparse.Namespace) -> Conversion:
    """Write the rows in the format that the arguments select, and return a text that describes the result."""
    shard_bytes = chosen.max_shard_size or ("100MB" if chosen.to == "lerobot" else "500MB")
    if chosen.to != "lerobot":
        from mouse_core.formats.converting import convert

        for name in ("fps", "task"):
            if getattr(chosen, name) is not None:
                raise ConfigError(f"--{name}: expected --to lerobot with this option, found --to {chosen.to}")
        asked = {"to": chosen.to, "images": chosen.images, "layout": chosen.layout}
        return convert(stream, chosen.target, **asked, shard_bytes=shard_bytes, progress=wants_bar())
    from mouse_core.formats.lerobot import write_lerobot

    if chosen.layout is not None:
        raise ConfigError(f"--layout: expected no layout with --to lerobot, found {chosen.layout}")
    asked = {"images": chosen.images or "video", "frames_per_second": chosen.fps, "task": chosen.task}
    return write_lerobot(stream, chosen.target, **asked, shard_bytes=shard_bytes, progress=wants_bar())


# ---------------------------------------------------------------------- mouse push


def declare_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse push``."""
    add_source(parser)
    add = parser.add_argument
    add("repo_id", metavar="REPO_ID", help="namespace/name on the Hub; created if missing")
    add("--as-split", metavar="NAME", help="the name of the split of a source without splits (train)")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--revision", metavar="BRANCH", help="push to this branch (main)")
    add("--commit-message", metavar="TEXT", help="the commit's message")
    add_shard_size(parser)
    add("--dry-run", action="store_true", help="write and check all files without sending them")


def run_push(chosen: argparse.Namespace) -> int:
    """Publish recorded data of any format on the Hugging Face Hub.

    examples:
      mouse push recordings your-org/your-dataset
      mouse push recordings your-org/your-dataset --dry-run         check everything and send nothing
      mouse push halfcheetah.hdf5 your-org/halfcheetah --final mark --private

    status: 0 pushed, 2 unusable data, or an error of the Hub
    """
    import tempfile

    from mouse_core.hub import push_to_hub
    from mouse_core.view.opening import refusals_as_errors

    with tempfile.TemporaryDirectory(prefix="mouse-push-") as folder:
        pushed = refusals_as_errors(
            push_to_hub,
            _stores(chosen, folder),
            repo_id=chosen.repo_id,
            private=chosen.private,
            revision=chosen.revision,
            commit_message=chosen.commit_message,
            max_shard_size=chosen.max_shard_size or "500MB",
            progress=wants_bar(),
            dry_run=chosen.dry_run,
        )
    rows = ", ".join(f"{name}: {count:,} rows" for name, count in pushed.splits.items())
    did = "would push" if chosen.dry_run else "pushed"
    print(f"{did} {pushed.repo_id} at {pushed.revision}: {rows}; {len(pushed.shards)} files")  # noqa: T201
    if pushed.commit_url:
        print(pushed.commit_url)  # noqa: T201
    return 0


def _stores(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Convert each split of the source to a dataset in ``folder``, and return the splits as stores by name."""
    from mouse_core import formats
    from mouse_core.errors import AlignmentWarning
    from mouse_core.formats.converting import convert
    from mouse_core.store.dataset_store import DatasetStore

    stream = open_source(chosen)
    splits: Sequence[str] = (
        list(stream.format_metadata.get("splits", ())) if stream.format in ("datasets", "parquet") else ()
    )
    if chosen.split:
        splits = [name for name in splits if name in chosen.split]
    parts = {}
    if len(splits) > 1:
        options = {"format": chosen.format, "alignment": chosen.alignment, "image_roots": chosen.image_root}
        parts = {name: formats.open(chosen.source, splits=[name], **options) for name in splits}
    else:
        parts = {chosen.as_split or (splits[0] if splits else "train"): stream}
    stores = {}
    for name, part in parts.items():
        target = Path(folder) / name
        convert(part, target, progress=wants_bar())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AlignmentWarning)  # convert has already printed the message
            stores[name] = DatasetStore.open(target)
    return stores


# ---------------------------------------------------------------------- mouse upload


def declare_upload(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse upload``."""
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="the folder of a store, which may be written meanwhile")
    add("url", metavar="URL", help="s3://bucket/runs, gs://, az:// or file:///; a place without other data")


def run_upload(chosen: argparse.Namespace) -> int:
    """Send a store's folder to object storage, where DatasetStore.open reads it by its address.

    examples:
      mouse upload runs/collect s3://bucket/runs/collect
      watch -n 30 mouse upload runs/collect gs://bucket/collect     while another process writes the folder

    Files that exist at the address are not sent again, and the manifest is sent last, so that a concurrent reader sees
    the store either before or after the upload. Rows are sent once they are sealed; closing the store seals all rows.
    Credentials come from the environment or a profile, as for other programs that use the storage.

    status: 0 sent, 2 the store cannot be sent, or another store is there
    """
    from mouse_core.store.remote import upload

    done = upload(chosen.folder, chosen.url, progress=wants_bar())
    files = "file" if done.files == 1 else "files"
    line = f"{done.url}: {done.rows:,} rows; sent {done.files} {files}, {done.sent_bytes:,} bytes"
    print(line + (f"; {done.waiting:,} rows are not sealed yet" if done.waiting else ""))  # noqa: T201
    return 0


# ---------------------------------------------------------------------- mouse verify


def declare_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse verify``."""
    add_source(parser, alignment=False)
    parser.add_argument(
        "--digest", metavar="HEX", help="the expected digest of the rows, as mouse convert or verify printed it"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="status 1 if neither a digest nor the checksums of all files were compared",
    )


def run_verify(chosen: argparse.Namespace) -> int:
    """Check recorded data of any format for damage, and name the damaged file.

    examples:
      mouse verify recordings                           written by mouse convert, which records a checksum for each file
      mouse verify halfcheetah.hdf5 --final drop --digest 5f0c...
      mouse verify recordings --strict                  status 1 if there are no checksums to compare, for scripts
      mouse verify runs/collect                         the folder of a DatasetStore.open, also while it is written

    status: 0 undamaged, 1 with --strict if some data have no checksum or digest, 2 damaged or unusable data
    """
    from mouse_core.formats.verifying import verify

    found = verify(chosen.source, digest=chosen.digest, progress=wants_bar(), **how_to_read(chosen))
    digest = f", digest {found.digest}" if found.digest else ""
    print(f"{found.path}: {found.rows:,} rows{digest}")  # noqa: T201
    if found.compared and not found.left:
        said = f"verified: {found.compared}"
    elif found.compared:
        said = (
            f"verified in part: {found.compared}; {found.left} have no checksums; --digest compares names, types and "
            "values with an earlier digest"
        )
    else:
        said = (
            "not verified: all rows could be read, but the data have no checksums, so a changed value is not detected; "
            "--digest compares the rows with an earlier digest"
        )
    print(said)  # noqa: T201
    return 1 if chosen.strict and (found.left or not found.compared) else 0


# ---------------------------------------------------------------------- mouse repair


def declare_repair(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse repair``."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a store that no process is writing")
    parser.add_argument("--dry-run", action="store_true", help="print the changes without making them")


def run_repair(chosen: argparse.Namespace) -> int:
    """Repair the folder of a store: keep the undamaged rows, and move damaged files aside.

    examples:
      mouse repair runs/collect --dry-run               print which rows would be dropped
      mouse repair runs/collect                         damaged files go into runs/collect/damaged

    After a damaged file, rows are kept from the first row of the next episode on. A lost or damaged manifest is
    restored from its copy.

    status: 0 undamaged or repaired, 2 not repairable, or a process is writing the store
    """
    from mouse_core.store.disk.checking import repair

    done = repair(chosen.folder, dry_run=chosen.dry_run, progress=wants_bar())
    for line in done.said:
        print(line)  # noqa: T201
    if not done.said:
        print(f"{done.path}: {done.rows:,} rows, all undamaged; nothing was changed")  # noqa: T201
    else:
        would = "would be kept" if chosen.dry_run else "are undamaged"
        print(f"{done.path}: {done.rows:,} rows {would}")  # noqa: T201
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The arguments after ``mouse``; by default the arguments of the process.

    Returns:
        The exit status:

        - 0: done
        - 1: ``mouse inspect --strict`` found warnings, or ``mouse verify --strict`` found data without checksums
        - 2: an error that the user can correct, printed in one line; or no command was given, and the commands were
          listed
        - 130: interrupted from the keyboard
    """
    parser = argparse.ArgumentParser(
        prog="mouse",
        description="Recorded experience for reinforcement learning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = list(sys.argv[1:] if arguments is None else arguments)
    more = {} if asked[:1] and asked[0] in _COMMANDS else others()
    for name, (declare, run) in (
        _COMMANDS | more | _COMMANDS
    ).items():  # commands of other packages cannot replace these
        purpose, _, examples = (getdoc(run) or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=purpose[:1].lower() + purpose[1:].removesuffix("."),
            description=purpose,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        declare(command)
        command.set_defaults(run=run)
    chosen = parser.parse_args(arguments)
    if chosen.version:
        print(f"mouse-data {_version()}")  # noqa: T201
        return 0
    if chosen.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _short_warnings(chosen.command):
            status: int = chosen.run(chosen)
    except KeyboardInterrupt:
        print(f"mouse {chosen.command}: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except (MouseError, OSError, ImportError) as error:
        message = " ".join(str(error).split()).removeprefix(f"{chosen.command}: ")
        print(f"mouse {chosen.command}: {message}", file=sys.stderr)  # noqa: T201
        return 2
    return status


@contextmanager
def _short_warnings(command: str) -> Iterator[None]:
    """Print each warning about the data once, without the line of source code that Python adds."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, AlignmentWarning):
            python(message, category, *where, **more)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"mouse {command}: warning: {message}", file=sys.stderr)  # noqa: T201

    with warnings.catch_warnings():
        warnings.simplefilter("always", AlignmentWarning)
        python, warnings.showwarning = warnings.showwarning, show
        yield


_EXAMPLES = """examples:
  mouse inspect recordings
  mouse view recordings
  mouse convert halfcheetah.hdf5 halfcheetah --final mark
  mouse verify halfcheetah
  mouse push halfcheetah your-org/halfcheetah
  mouse upload runs/cartpole s3://bucket/cartpole

mouse COMMAND --help describes a command."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a slow import

    try:
        return version("mouse-data")
    except PackageNotFoundError:  # used from a source folder without installation
        return "of a source folder"


_COMMANDS: dict[str, Command] = {
    "inspect": (declare_inspect, run_inspect),
    "view": (declare_view, run_view),
    "convert": (declare_convert, run_convert),
    "verify": (declare_verify, run_verify),
    "repair": (declare_repair, run_repair),
    "push": (declare_push, run_push),
    "upload": (declare_upload, run_upload),
}

if __name__ == "__main__":
    sys.exit(main())
