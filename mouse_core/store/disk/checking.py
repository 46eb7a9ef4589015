"""Whether every byte of a store's folder is what was written, and a folder without what is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import with_about
from mouse_core.errors import DataError, MouseError
from mouse_core.files.writing import make_folder, storing, sync_folders
from mouse_core.store.disk.folder import ReadFolder, WrittenFolder
from mouse_core.store.disk.manifest import Manifest, Sealed
from mouse_core.store.disk.sealed import SealedFile, write_segment
from mouse_core.store.disk.tail import TailReader

ASIDE = "damaged"
"""The folder, in that of a store, that ``repair`` puts damaged files into."""


@dataclass(frozen=True)
class Checked:
    """What was found in a store's folder.

    Args:
        rows: How many are whole.
        files: How many were looked at.
        wrong: What is wrong with each that is damaged, by its name in the folder.
    """

    rows: int
    files: int
    wrong: dict[str, str]


@dataclass(frozen=True)
class Repaired:
    """What became of a store's folder.

    Args:
        path: The folder.
        rows: How many are there now.
        dropped_rows: How many are not.
        said: What was done, a sentence each; empty where all was whole.
    """

    path: str
    rows: int
    dropped_rows: int
    said: tuple[str, ...]


def check_store(folder: Path, *, progress: bool = False) -> Checked:
    """Read all files of a store's folder, and hold them against the digests that were noted when they were written.

    Args:
        folder: The folder; somebody may be writing to it.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store.
        DataError: The manifest is damaged, without which nothing is known of the other files.
    """
    read = ReadFolder(folder)
    try:
        return _checked(folder, read.manifest, progress)
    finally:
        read.close()


def _checked(folder: Path, manifest: Manifest, progress: bool) -> Checked:
    rows, wrong = 0, {}
    total = sum(one.bytes for one in manifest.segments)
    with progress_bar("verifying", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        for one in manifest.segments:
            reason = _wrong_with(folder, manifest, one)
            if reason:
                wrong[one.name] = reason
            rows += 0 if reason else one.rows
            advance(one.bytes)
    for name in manifest.tail_names:
        try:
            rows += TailReader(folder / name).committed()
        except MouseError as error:
            wrong[name] = str(error)
    return Checked(rows, len(manifest.segments) + len(manifest.tails), wrong)


def _wrong_with(folder: Path, manifest: Manifest, sealed: Sealed) -> str:
    """What is wrong with a sealed segment, in words; empty if nothing is."""
    try:
        SealedFile(folder, sealed, manifest.schemas[sealed.schema], verify=True).table.validate(full=True)
    except (MouseError, pa.ArrowException) as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------- without what is damaged


def repair(path: str | os.PathLike[str], *, dry_run: bool = False, progress: bool = False) -> Repaired:
    """Make a store of what is whole in a folder.

    Files that are damaged are put into a folder ``damaged`` beside the others. Rows behind a gap follow, from the first
    on that an episode begins with, so that no window goes across it; the rest of the broken episode is dropped, too.

    Args:
        path: The folder; nobody may be writing to it.
        dry_run: Whether nothing is changed, and only what would be is said.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store, or another process writes to it.
        DataError: The manifest is damaged, without which nothing is known of the other files.
        StorageError: The folder cannot be written; it is as it was.
    """
    folder = Path(path)
    found = check_store(folder, progress=progress)
    if not found.wrong:
        return Repaired(str(path), found.rows, 0, ())
    written = WrittenFolder(folder)
    try:
        return _without(written, found.wrong, dry_run)
    finally:
        written.close()


def _without(written: WrittenFolder, wrong: dict[str, str], dry_run: bool) -> Repaired:
    """The folder without the files that something is wrong with."""
    before, folder = written.manifest, written.path
    said, segments, number, dropped, after_gap = [], [], written.new_number(), 0, False
    for one in before.segments:
        if one.name in wrong:
            said.append(f"{wrong[one.name]}: its {one.rows:,} rows are dropped")
            dropped, after_gap = dropped + one.rows, True
            continue
        kept = one
        if after_gap:
            first = _first_episode(folder, before, one)
            if first:
                said.append(f"{folder / one.name}: its first {first:,} rows, the rest of a broken episode, are dropped")
                dropped += first
            after_gap = first == one.rows
            if not first:
                pass
            elif after_gap:
                continue
            elif not dry_run:
                kept = _rest_of(folder, before, one, first, number)
                number += 1
            else:
                kept = one._replace(rows=one.rows - first)
        segments.append(kept)
    tails = tuple(tail for tail, name in zip(before.tails, before.tail_names, strict=True) if name not in wrong)
    said += [f"{wrong[name]}: its rows are dropped" for name in before.tail_names if name in wrong]
    # The number grows, as readers may still look at the files that are named no more.
    after = replace(before, segments=tuple(segments), tails=tails, next_number=number + 1)
    if not dry_run:
        _put_aside(folder, wrong)
        written.replace(after)
        written.remove_unnamed()
    rows = after.rows + sum(TailReader(folder / name).committed() for name in after.tail_names)
    return Repaired(str(folder), rows, dropped, tuple(said))


def _put_aside(folder: Path, names: dict[str, str]) -> None:
    """Give damaged files another place, under which the manifest does not name them."""
    with storing(f"store {folder}"):
        make_folder(folder / ASIDE)
        for name in names:
            if (folder / name).exists():
                os.link(folder / name, folder / ASIDE / Path(name).name)
        sync_folders([folder / ASIDE])


def _first_episode(folder: Path, manifest: Manifest, sealed: Sealed) -> int:
    """The first row of a segment that an episode begins with, as far as that can be told; all rows where none does."""
    from mouse_core.store.dataset_store import DatasetStore

    table = SealedFile(folder, sealed, manifest.schemas[sealed.schema], verify=False).table
    try:
        snapshot = DatasetStore().from_dataset(with_about(table, manifest.about)).snapshot()
        starts = snapshot.episode_starts.tolist()
        readers = snapshot.readers
        if "time" not in readers and "done" not in readers:
            return 0
        begins_one = "time" in readers and int(snapshot.stored("time", snapshot.episode_starts[:1])[0]) == 0
    except (MouseError, ValueError):
        return 0
    # Row 0 is the first of any rows, whether an episode begins there or goes on.
    return 0 if begins_one else int(starts[1]) if len(starts) > 1 else sealed.rows


def _rest_of(folder: Path, manifest: Manifest, sealed: Sealed, first: int, number: int) -> Sealed:
    """A segment from some row on, in a file of its own."""
    table = SealedFile(folder, sealed, manifest.schemas[sealed.schema], verify=False).table
    rest, _ = write_segment(folder, number, table.slice(first))
    return rest._replace(schema=sealed.schema, appended=sealed.appended)
