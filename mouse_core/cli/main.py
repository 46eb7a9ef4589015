"""The command ``mouse``: its parser, and most of its commands.

Each command is a pair of functions. ``declare_NAME`` adds the arguments to a parser, and ``run_NAME`` runs the command
and returns the exit status. The docstring of ``run_NAME`` is the text of ``mouse NAME --help``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import getdoc
from pathlib import Path
from typing import Any

from mouse_core.cli import _data as data
from mouse_core.cli._data import (
    add_alignment,
    add_shard_size,
    add_source,
    how_to_read,
    open_source,
    wants_bar,
)
from mouse_core.cli._looking import declare_inspect, declare_view, run_inspect, run_view
from mouse_core.errors import AlignmentWarning, ConfigError, MouseError

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


# ---------------------------------------------------------------------- mouse push


def declare_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse push``."""
    add_source(parser)
    add_alignment(parser)
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
    add_source(parser)
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
    "convert": (data.declare_convert, data.run_convert),
    "verify": (declare_verify, run_verify),
    "repair": (declare_repair, run_repair),
    "push": (declare_push, run_push),
    "upload": (declare_upload, run_upload),
}

if __name__ == "__main__":
    sys.exit(main())
