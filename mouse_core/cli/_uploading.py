"""The subcommands that send data elsewhere: ``push`` to the Hub, ``upload`` of a store's folder to object storage."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mouse_core.cli._data import add_alignment, add_shard_size, add_source, open_source, positive, wants_bar
from mouse_core.errors import ConfigError

# ---------------------------------------------------------------------- mouse push


def declare_push(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse push``."""
    add_source(parser)
    add_alignment(parser)
    parser.add_argument("repo_id", metavar="REPO_ID", help="namespace/name on the Hub; made if it is not there")
    parser.add_argument("--as-split", metavar="NAME", help="the split that a source without splits becomes (train)")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="push to this branch (main)")
    parser.add_argument("--commit-message", metavar="TEXT", help="the commit's message")
    add_shard_size(parser)
    parser.add_argument("--keep-other-splits", action="store_true", help="leave the dataset's other splits as they are")
    text = "push statistics beside the rows, as LeRobot has them: those saved in a folder, or of the rows"
    parser.add_argument("--statistics", nargs="?", const="", metavar="FOLDER", help=text)
    parser.add_argument("--dry-run", action="store_true", help="write and check everything, and send nothing")


def run_push(chosen: argparse.Namespace) -> int:
    """Publish recorded data of any format on the Hugging Face Hub.

    examples:
      mouse push recordings your-org/your-dataset
      mouse push recordings your-org/your-dataset --dry-run         check everything and send nothing
      mouse push halfcheetah.hdf5 your-org/halfcheetah --final mark --private
      mouse push recordings your-org/your-dataset --statistics      with those of "train", or the only split

    status: 0 pushed, 2 data that cannot be used, or the Hub refused
    """
    import tempfile

    from mouse_core.bench.opening import refusals_as_errors
    from mouse_core.hub import push_to_hub

    with tempfile.TemporaryDirectory(prefix="mouse-push-") as folder:
        stores = _stores(chosen, folder)
        pushed = refusals_as_errors(
            push_to_hub,
            stores,
            statistics=None if chosen.statistics is None else _statistics(chosen.statistics, stores),
            repo_id=chosen.repo_id,
            private=chosen.private,
            revision=chosen.revision,
            commit_message=chosen.commit_message,
            max_shard_size=chosen.max_shard_size or "500MB",
            keep_other_splits=chosen.keep_other_splits,
            progress=wants_bar(),
            dry_run=chosen.dry_run,
        )
    rows = ", ".join(f"{name}: {count:,} rows" for name, count in pushed.splits.items())
    did = "would push" if chosen.dry_run else "pushed"
    print(f"{did} {pushed.repo_id} at {pushed.revision}: {rows}; {len(pushed.shards)} files")  # noqa: T201
    if pushed.commit_url:
        print(pushed.commit_url)  # noqa: T201
    return 0


def _statistics(folder: str, stores: dict[str, Any]) -> Any:
    """Load the statistics to push from a folder; for "", compute them over the split "train" or the only split."""
    from mouse_core.statistics import Statistics, statistics

    if folder:
        return Statistics.load(folder)
    if len(stores) > 1 and "train" not in stores:
        raise ConfigError(f"--statistics: expected one split, or 'train' among {list(stores)}; give a folder")
    return statistics(stores["train" if "train" in stores else next(iter(stores))], progress=wants_bar())


def _stores(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The source's splits as stores; what is not a dataset on disk is converted to one first."""
    from mouse_core import formats
    from mouse_core.errors import AlignmentWarning
    from mouse_core.formats.converting import convert

    stream = open_source(chosen)
    splits: Sequence[str] = list(stream.metadata.get("splits", ())) if stream.format in ("datasets", "parquet") else ()
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
            warnings.simplefilter("ignore", AlignmentWarning)  # convert has said it
            stores[name] = formats.open(target).to_store()
    return stores


# ---------------------------------------------------------------------- mouse upload


def declare_upload(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse upload``."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a DatasetStore.open, also while it is written")
    parser.add_argument("url", metavar="URL", help="s3://bucket/runs, gs://, az:// or file:///; nothing else is there")
    parser.add_argument("--follow", action="store_true", help="go on, and send what is sealed later, until interrupted")
    parser.add_argument(
        "--every", type=positive, default=30, metavar="SECONDS", help="with --follow: between two looks (30)"
    )


def run_upload(chosen: argparse.Namespace) -> int:
    """Send a store's folder to object storage, where DatasetStore.open reads it by its address.

    examples:
      mouse upload runs/collect s3://bucket/runs/collect
      mouse upload runs/collect gs://bucket/collect --follow        while the folder is written

    Files that are there already are not sent again, and the manifest comes last: who reads meanwhile sees the store as
    it was, or as it is then. Rows that are not sealed yet wait until they are, as they are when the store is closed.
    Who asks is said by the environment or a profile, as for other programs that use the storage.

    status: 0 sent, 2 a store that cannot be sent, or another one is there, 130 --follow was interrupted
    """
    from mouse_core.store.remote import Uploaded, follow, upload

    def said(done: Uploaded) -> None:
        files = "file" if done.files == 1 else "files"
        line = f"{done.url}: {done.rows:,} rows; sent {done.files} {files}, {done.sent_bytes:,} bytes"
        print(line + (f"; {done.waiting:,} rows are not sealed yet" if done.waiting else ""), flush=True)  # noqa: T201

    if chosen.follow:
        follow(chosen.folder, chosen.url, seconds=chosen.every, said=said)
    else:
        said(upload(chosen.folder, chosen.url, progress=wants_bar()))
    return 0
