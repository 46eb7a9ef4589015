"""The subcommands that look at recorded data and move them: ``inspect``, ``convert`` and ``push``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mouse_core.formats.base import RowStream

_NETWORK = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests")

INSPECT_EXAMPLES = """examples:
  mouse inspect recordings                          a folder of save_to_disk, Minari, RLDS, LeRobot, TED, ...
  mouse inspect halfcheetah.hdf5 --final mark       D4RL lacks the last observation of every episode
  mouse inspect recordings --html report.html       a page with plots, to open in a browser or on a phone
  mouse inspect recordings --strict                 status 1 where there are warnings, for scripts
  mouse inspect recordings --strict --ignore no-truncation

status: 0 fine, 1 warnings with --strict, 2 data that cannot be used"""

CONVERT_EXAMPLES = """examples:
  mouse convert ~/.minari/datasets/D4RL/door/human-v2 door      a folder for datasets.load_from_disk
  mouse convert halfcheetah.hdf5 halfcheetah.parquet --final drop
  mouse convert recordings parts --to parquet --shard-size 200MB

After an interruption the same command goes on where it was. The result is read back and compared with the source.

status: 0 converted and verified, 2 data or a target that cannot be used"""

PUSH_EXAMPLES = """examples:
  mouse push recordings your-org/your-dataset
  mouse push recordings your-org/your-dataset --dry-run         check everything and send nothing
  mouse push halfcheetah.hdf5 your-org/halfcheetah --final mark --private

status: 0 pushed, 2 data that cannot be used, or the Hub refused"""


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a file or folder of any format that is read")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="what the source is, where not recognised: d4rl, dopamine, lerobot, minari, ogbench, rows, ted, tfds",
    )
    parser.add_argument(
        "--final",
        choices=("drop", "mark"),
        help="what to do where the observation that an episode ends in was not stored: leave out the transition that "
        "leads to it, or mark it as missing",
    )
    parser.add_argument("--split", action="append", metavar="NAME", help="only this split; may be given several times")


def _open(chosen: argparse.Namespace) -> RowStream:
    from mouse_core import formats

    return formats.open(chosen.source, format=chosen.format, final=chosen.final, splits=chosen.split)


def _wants_bar() -> bool:
    return sys.stderr.isatty()


# ---------------------------------------------------------------------- mouse inspect


def declare_inspect(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse inspect``."""
    _add_source(parser)
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page with plots, which needs nothing besides itself"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file; - prints them instead")
    parser.add_argument("--strict", action="store_true", help="status 1 if there are warnings")
    parser.add_argument(
        "--ignore",
        action="append",
        metavar="CODE",
        default=[],
        help="say nothing about this; may be given several times",
    )


def run_inspect(chosen: argparse.Namespace) -> int:
    """Run ``mouse inspect``."""
    from mouse_core.inspect import inspect, show, to_html

    report = inspect(_open(chosen), ignore=chosen.ignore, progress=_wants_bar())
    if chosen.json == "-":
        print(report.to_json(), end="")  # noqa: T201
    else:
        show(report)
    if chosen.json not in (None, "-"):
        _write(chosen.json, report.to_json())
    if chosen.html:
        _write(chosen.html, to_html(report))
        print(f"\nwrote {chosen.html}", file=sys.stderr)  # noqa: T201
    return 1 if chosen.strict and report.warnings else 0


def _write(file: str, text: str) -> None:
    from mouse_core.errors import ConfigError

    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error


# ---------------------------------------------------------------------- mouse convert


def declare_convert(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse convert``."""
    _add_source(parser)
    parser.add_argument("target", metavar="TARGET", help="a new folder, or a new file that ends in .parquet")
    parser.add_argument("--to", choices=("arrow", "parquet"), help="what to write; Arrow, if the target does not say")
    parser.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default="500MB", help="how large the files of a folder are (500MB)"
    )


def run_convert(chosen: argparse.Namespace) -> int:
    """Run ``mouse convert``."""
    from mouse_core.formats.converting import convert

    stream = _open(chosen)
    done = convert(stream, chosen.target, to=chosen.to, shard_bytes=chosen.shard_size, progress=_wants_bar())
    for note in stream.notes:
        print(f"note: {note}")  # noqa: T201
    resumed = f", {done.resumed_rows:,} of them before an interruption" if done.resumed_rows else ""
    files = "file" if done.shards == 1 else "files"
    print(f"{done.path}: {done.rows:,} rows in {done.shards} {files}{resumed}")  # noqa: T201
    print(f"verified: source and result have the digest {done.digest}")  # noqa: T201
    return 0


def _size(text: str) -> int:
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}
    number = text.rstrip("bBiIkKmMgG ")
    unit = text[len(number) :].strip().lower()
    try:
        value = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 1GiB, found {text!r}")
    return value


# ---------------------------------------------------------------------- mouse push


def declare_push(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse push``."""
    _add_source(parser)
    parser.add_argument("repo_id", metavar="REPO_ID", help="namespace/name on the Hub; made if it is not there")
    parser.add_argument("--as-split", metavar="NAME", help="the split that a source without splits becomes (train)")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="push to this branch (main)")
    parser.add_argument("--message", metavar="TEXT", help="the commit's message")
    parser.add_argument("--shard-size", metavar="SIZE", type=_size, default="500MB", help="how large files are (500MB)")
    parser.add_argument("--keep-other-splits", action="store_true", help="leave the dataset's other splits as they are")
    parser.add_argument("--dry-run", action="store_true", help="write and check everything, and send nothing")


def run_push(chosen: argparse.Namespace) -> int:
    """Run ``mouse push``."""
    import tempfile

    from mouse_core.hub import push_to_hub

    with tempfile.TemporaryDirectory(prefix="mouse-push-") as folder:
        pushed = _refusals_as_errors(
            push_to_hub,
            _stores(chosen, folder),
            repo_id=chosen.repo_id,
            private=chosen.private,
            revision=chosen.revision,
            commit_message=chosen.message,
            max_shard_size=chosen.shard_size,
            keep_other_splits=chosen.keep_other_splits,
            progress=_wants_bar(),
            dry_run=chosen.dry_run,
        )
    rows = ", ".join(f"{name}: {count:,} rows" for name, count in pushed.splits.items())
    did = "would push" if chosen.dry_run else "pushed"
    print(f"{did} {pushed.repo_id} at {pushed.revision}: {rows}; {len(pushed.shards)} files")  # noqa: T201
    if pushed.commit_url:
        print(pushed.commit_url)  # noqa: T201
    return 0


def _stores(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The source's splits as stores; what is not a dataset on disk is converted to one first."""
    from mouse_core import formats
    from mouse_core.formats.converting import convert
    from mouse_core.store import DatasetStore

    stream = _open(chosen)
    splits: Sequence[str] = list(stream.metadata.get("splits", ())) if stream.format in ("datasets", "parquet") else ()
    if chosen.split:
        splits = [name for name in splits if name in chosen.split]
    parts = {}
    if len(splits) > 1:
        parts = {name: formats.open(chosen.source, format=chosen.format, splits=[name]) for name in splits}
    else:
        parts = {chosen.as_split or (splits[0] if splits else "train"): stream}
    stores = {}
    for name, part in parts.items():
        import datasets

        target = Path(folder) / name
        convert(part, target, progress=_wants_bar())
        stores[name] = DatasetStore(alignment=part.alignment).from_dataset(datasets.load_from_disk(str(target)))
    return stores


def _refusals_as_errors(call: Any, *arguments: Any, **options: Any) -> Any:
    """Call, and turn what the Hub or the way to it refuses into an error of one line."""
    from mouse_core.errors import ConfigError, MouseError

    try:
        return call(*arguments, **options)
    except MouseError:
        raise
    except Exception as error:
        # The Hub's client lets through what the library below it raises when there is no connection.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in _NETWORK:
            raise
        shown = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the Hub: {shown}") from error
