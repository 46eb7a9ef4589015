"""The arguments that select a command's data, and the subcommand ``convert``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mouse_core.errors import ConfigError

if TYPE_CHECKING:
    from mouse_core.formats.base import RowStream
    from mouse_core.formats.converting import Conversion


def add_source(parser: argparse.ArgumentParser, *, hub: bool = False) -> None:
    """Add the arguments that select the data of a command, and the reading options."""
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


def names(text: str) -> list[str]:
    """Parse names separated by commas, for argparse."""
    return [name.strip() for name in text.split(",") if name.strip()]


def add_alignment(parser: argparse.ArgumentParser) -> None:
    """Add the argument that states the alignment of rows."""
    parser.add_argument(
        "--alignment",
        choices=("arrived", "outgoing"),
        help="if the source does not state its alignment: whether the action, reward and done of a row precede the "
        "row's observation (arrived) or follow it (outgoing); by default arrived is assumed, and not stored",
    )


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


# ---------------------------------------------------------------------- mouse convert


def declare_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mouse convert``."""
    add_source(parser)
    add_alignment(parser)
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


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """Add the argument that sets the size of files."""
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="the largest size of a file (500MB; for a LeRobotDataset 100MB)"
    )


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
