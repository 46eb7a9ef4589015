"""The subcommand ``upload``: a store's folder to object storage."""

from __future__ import annotations

import argparse

from mouse_core.cli._data import positive, wants_bar


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
    from mouse_core.store.elsewhere import Uploaded, follow, upload

    def said(done: Uploaded) -> None:
        files = "file" if done.files == 1 else "files"
        line = f"{done.url}: {done.rows:,} rows; sent {done.files} {files}, {done.sent_bytes:,} bytes"
        print(line + (f"; {done.waiting:,} rows are not sealed yet" if done.waiting else ""), flush=True)  # noqa: T201

    if chosen.follow:
        follow(chosen.folder, chosen.url, seconds=chosen.every, said=said)
    else:
        said(upload(chosen.folder, chosen.url, progress=wants_bar()))
    return 0
