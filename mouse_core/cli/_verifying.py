"""The subcommands ``verify`` and ``repair``: whether recorded data are what was written, and what is whole of them."""

from __future__ import annotations

import argparse

from mouse_core.cli._data import add_source, how_to_read, wants_bar

# ---------------------------------------------------------------------- mouse verify


def declare_verify(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse verify``."""
    add_source(parser)
    parser.add_argument(
        "--digest", metavar="HEX", help="what the digest of the rows must be, as mouse convert or verify printed it"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="status 1 if neither checksums of all that is read nor a digest were compared",
    )


def run_verify(chosen: argparse.Namespace) -> int:
    """Say whether recorded data of any format are what was written, and which file is damaged.

    examples:
      mouse verify recordings                           written by mouse convert: every file has its SHA-256 noted
      mouse verify halfcheetah.hdf5 --final drop --digest 5f0c...
      mouse verify recordings --strict                  status 1 where there is nothing to compare with, for scripts
      mouse verify runs/collect                         the folder of a DatasetStore.open, also while it is written

    status: 0 whole, 1 nothing to compare with (or not for all) and --strict, 2 damaged, or data that cannot be used
    """
    from mouse_core.formats.verifying import verify

    found = verify(chosen.source, digest=chosen.digest, progress=wants_bar(), **how_to_read(chosen))
    digest = f", digest {found.digest}" if found.digest else ""
    print(f"{found.path}: {found.rows:,} rows{digest}")  # noqa: T201
    if found.not_flushed:
        print(  # noqa: T201
            f"{found.not_flushed:,} rows more are written and not flushed: readers see them after the writer's next "
            "flush(), or once the folder was opened with mode 'a'"
        )
    if found.compared and not found.left:
        said = f"verified: {found.compared}"
    elif found.compared:
        said = (
            f"verified in part: {found.compared}; {found.left} not, as nothing was noted of them; --digest compares "
            "names, types and values with a digest from before"
        )
    else:
        said = (
            "not verified: read to the end, but nothing was noted of these data and their format keeps no checksums, "
            "so that a changed value is not seen; --digest compares them with a digest from before"
        )
    print(said)  # noqa: T201
    return 1 if chosen.strict and (found.left or not found.compared) else 0


# ---------------------------------------------------------------------- mouse repair


def declare_repair(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse repair``."""
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a DatasetStore.open that nobody is writing")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")


def run_repair(chosen: argparse.Namespace) -> int:
    """Make a store of what is whole in a folder in which files are damaged.

    examples:
      mouse repair runs/collect --dry-run               what would be dropped
      mouse repair runs/collect                         damaged files go into runs/collect/damaged

    Rows behind a damaged file are kept from the first on that an episode begins with. A manifest that is lost or
    damaged is put back from its copy.

    status: 0 whole, or whole now, 2 what cannot be repaired, or what somebody is writing, whole or not
    """
    from mouse_core.store.disk.checking import repair

    done = repair(chosen.folder, dry_run=chosen.dry_run, progress=wants_bar())
    for line in done.said:
        print(line)  # noqa: T201
    if not done.said:
        print(f"{done.path}: {done.rows:,} rows, all whole; nothing was done")  # noqa: T201
    else:
        would = "would stay" if chosen.dry_run else "are whole"
        print(f"{done.path}: {done.rows:,} rows {would}")  # noqa: T201
    return 0
