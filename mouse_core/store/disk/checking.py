"""Checks every byte of a store's folder, and repairs a folder by moving damaged files to a subfolder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from mouse_core._arrow.dense import DENSE_BYTES, DenseBudget
from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError, MouseError, StorageError
from mouse_core.files.locking import Held
from mouse_core.files.reading import damaged
from mouse_core.files.writing import make_folder, storing, sync_folders, write_file
from mouse_core.store._intake import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import (
    COPY,
    LOCK,
    NAME,
    Manifest,
    ReadFolder,
    Sealed,
    Tail,
    WrittenFolder,
    files_of,
    looks_like_store,
    new_identity,
    parse_manifest,
)
from mouse_core.store.disk.segments import SealedFile, write_segment
from mouse_core.store.disk.tail import TailReader
from mouse_core.store.snapshot import Snapshot

ASIDE = "damaged"
"""Name of the subfolder that ``repair`` moves damaged files to."""


@dataclass(frozen=True)
class Checked:
    """Result of checking the files of a store.

    Args:
        rows: Number of undamaged rows.
        files: Number of files that were checked.
        wrong: The error of each damaged file, by file name.
    """

    rows: int
    files: int
    wrong: dict[str, str]


@dataclass(frozen=True)
class Repaired:
    """Result of repairing a store's folder.

    Args:
        path: The folder.
        rows: Number of rows after the repair.
        dropped_rows: Number of rows that are known to be lost.
        said: A sentence for each repair step; empty if the store was undamaged.
    """

    path: str
    rows: int
    dropped_rows: int
    said: tuple[str, ...]


def check_store(folder: Path, *, progress: bool = False) -> Checked:
    """Read all files of a store's folder, and compare the files with the checksums that were computed when the files
    were written.

    Args:
        folder: The folder. Another process can write to the folder during the check.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: The folder holds no store.
        DataError: The manifest is damaged; without a manifest, the other files cannot be checked.
        StorageError: A file cannot be read at present.
    """
    read = ReadFolder(folder)
    manifest = read.manifest

    def check(number: int, sealed: Sealed) -> None:
        _table(folder, manifest, number, verify=True).validate(full=True)

    found = check_sealed(manifest, check, lambda sealed: str(folder / sealed.name), progress=progress)
    rows, wrong = found.rows, found.wrong
    for tail in manifest.tails:
        try:
            reader = TailReader(folder / tail.name, identity=tail.identity)
            rows += reader.committed()
            reader.close()
        except StorageError:
            raise  # the system has no room for another open file, so the state of this file is unknown
        except MouseError as error:
            wrong[tail.name] = str(error)
    # The lease has kept the manifest's files until here.
    read.close()
    return Checked(rows, len(manifest.segments) + len(manifest.tails), wrong)


def check_sealed(
    manifest: Manifest, check: Callable[[int, Sealed], None], label: Callable[[Sealed], str], *, progress: bool
) -> Checked:
    """Check every sealed file of a store, local or remote.

    Args:
        manifest: The manifest of the store.
        check: Function that reads a file, given its number and its manifest entry, and raises an error if the content
            differs from the content that was written.
        label: Function that returns the path or address of a file, for messages.
        progress: Whether to show a progress bar.

    Raises:
        StorageError: A file cannot be read at present.
    """
    rows, wrong, total = 0, dict[str, str](), sum(one.bytes for one in manifest.segments)
    with progress_bar("verifying", total=total, unit="bytes", enabled=progress and total > 0) as advance:
        for number, sealed in enumerate(manifest.segments):
            try:
                check(number, sealed)
                rows += sealed.rows
            except StorageError:
                raise
            except (MouseError, pa.ArrowException) as error:
                where = label(sealed)
                wrong[sealed.name] = str(error) if where in str(error) else f"{where}: {error}"
            advance(sealed.bytes)
    return Checked(rows, len(manifest.segments), wrong)


def _table(folder: Path, manifest: Manifest, number: int, *, verify: bool = False) -> pa.Table:
    sealed = manifest.segments[number]
    return SealedFile(folder, sealed, manifest.schemas[sealed.schema], manifest.firsts()[number], verify=verify).table


# ---------------------------------------------------------------------- repair


def repair(path: str | os.PathLike[str], *, dry_run: bool = False, progress: bool = False) -> Repaired:
    """Restore a store from the undamaged files of a folder.

    Damaged files are moved to the subfolder ``damaged``. After a gap, the rest of the incomplete episode is dropped, so
    no window crosses the gap; rows from the next episode on are kept. A lost or damaged manifest is restored from its
    copy.

    Args:
        path: The folder. No other process may write to the folder.
        dry_run: Whether to report the steps without changing any file.
        progress: Whether to show a progress bar.

    Raises:
        ConfigError: The folder holds no store, or another process writes to it.
        DataError: The manifest and its copy are damaged; without a manifest, the other files cannot be interpreted.
        StorageError: The folder cannot be written; the folder is unchanged.
    """
    folder = Path(path)
    said = _manifest_again(folder, dry_run)
    if said and dry_run:
        return Repaired(str(path), parse_manifest(folder / COPY, (folder / COPY).read_bytes()).rows, 0, said)
    ReadFolder(folder).close()
    written = WrittenFolder(folder)
    try:
        found = check_store(folder, progress=progress)
        if not found.wrong:
            return Repaired(str(path), found.rows, 0, said)
        done = _Repair(written, found.wrong, dry_run).run()
        return replace(done, said=(*said, *done.said))
    finally:
        written.close()


def _manifest_again(folder: Path, dry_run: bool) -> tuple[str, ...]:
    """Restore a lost or damaged manifest from its copy; return a sentence for each step.

    Files that the copy does not name possibly hold newer rows, so these files are moved aside, not removed.
    """
    if not looks_like_store(folder):
        return ()
    try:
        ReadFolder(folder).close()
    except DataError as error:
        wrong = str(error)
    else:
        return ()
    copy = folder / COPY
    if not copy.is_file():
        raise damaged(copy, f"expected a copy of the manifest, found none; error of the manifest: {wrong}")
    content = copy.read_bytes()
    known = parse_manifest(copy, content)
    said = [
        f"{wrong.partition(';')[0]}: the copy {COPY}, which lists {len(known.segments)} sealed files, "
        "replaces the manifest"
    ]
    with storing(f"store {folder}"):
        lock = Held(folder / LOCK, f"store {folder}")
        try:
            for name, number in files_of(folder).items():
                if number not in known.file_numbers():
                    said.append(
                        f"{folder / name}: the copy of the manifest does not list this file; "
                        f"the file is moved to {ASIDE}"
                    )
                    if not dry_run:
                        make_folder(folder / ASIDE)
                        os.replace(folder / name, folder / ASIDE / Path(name).name)
            if not dry_run:
                write_file(folder / NAME, content, only_writer=True)
        finally:
            lock.close()
    return tuple(said)


class _Repair:
    """The repair of a folder: builds a store from all undamaged files.

    Args:
        written: The folder.
        wrong: The error of each damaged file, by name.
        dry_run: See ``repair``.
    """

    def __init__(self, written: WrittenFolder, wrong: dict[str, str], dry_run: bool) -> None:
        self.written, self.folder, self.wrong, self.dry_run = written, written.path, wrong, dry_run
        self.before = written.manifest
        # The repair renumbers rows, so readers that opened the store before must not continue.
        self.after = replace(self.before, segments=(), tails=(), identity=new_identity())
        self.said: list[str] = []
        self.dropped, self.after_gap = 0, False

    def run(self) -> Repaired:
        """Rewrite rows where necessary, and replace the manifest by a manifest of the undamaged files."""
        for number, one in enumerate(self.before.segments):
            if one.name in self.wrong:
                self.said.append(f"{self.wrong[one.name]}: its {one.rows:,} rows are dropped")
                self.dropped, self.after_gap = self.dropped + one.rows, True
            elif self.after_gap:
                self._add(_table(self.folder, self.before, number), one, self.folder / one.name)
            else:
                self.after = replace(self.after, segments=(*self.after.segments, one))
        first = self.before.rows
        for tail in self.before.tails:
            first += self._take_tail(tail, first)
        if not self.dry_run:
            self._put_aside()
            self.written.replace(self.after)
            self.written.clean()
        return Repaired(str(self.folder), self.after.rows, self.dropped, tuple(self.said))

    def _take_tail(self, tail: Tail, first: int) -> int:
        """Seal the undamaged rows of a tail file, and return how many rows were sealed.

        Args:
            tail: The file.
            first: Number of rows of the store before the file.
        """
        path = self.folder / tail.name
        if tail.name not in self.wrong:
            reader = TailReader(path, identity=tail.identity)
            rows = reader.left()
            self._add(reader.extent(rows).to_table(rows), None, path)
            reader.close()
            return rows
        known, at, said, tables = tail.rows, 0, len(self.said), []
        with suppress(ConfigError, DataError, pa.ArrowException):
            reader = TailReader(path, identity=tail.identity)
            known = reader.told_of() if known is None else known
            tables = [(one, reader.extent(one.stop).to_table(one.stop).slice(one.start)) for one in reader.whole()]
        for there, table in tables:
            self._drop_of(tail, first + at, there.start - at)
            self._add(table, None, path)
            at = there.stop
        self._drop_of(tail, first + at, None if known is None else known - at)
        if len(self.said) == said:
            self.said.append(f"{self.wrong[tail.name]}: all of its {at:,} rows are undamaged")
        # The tail file may have held more rows.
        self.after_gap = True
        return known or 0

    def _drop_of(self, tail: Tail, first: int, rows: int | None) -> None:
        """Record that the rows of a file are dropped; ``first`` is the index in the store of the file's first row."""
        lost = "an unknown number of rows"
        if rows is not None:
            lost = f"{rows:,} rows, from row {first:,} of the store on,"
            self.dropped += rows
        if rows != 0:
            self.said.append(f"{self.wrong[tail.name]}: {lost} are dropped")
            self.after_gap = True

    def _add(self, table: pa.Table, sealed: Sealed | None, path: Path) -> None:
        """Add the rows of a file. After a gap, the rows before the first start of an episode are left out."""
        first = _first_episode(table, self.before) if self.after_gap else 0
        if first:
            self.said.append(f"{path}: its first {first:,} rows, the rest of an incomplete episode, are dropped")
            self.dropped += first
        if first == table.num_rows:
            return
        self.after_gap = False
        if first or sealed is None:
            sealed = self._written_again(table.slice(first))
        self.after = replace(self.after, segments=(*self.after.segments, sealed))

    def _written_again(self, table: pa.Table) -> Sealed:
        if self.dry_run:
            return Sealed(0, table.num_rows, 0, "", 0)
        sealed, schema = write_segment(self.folder, self.written.take_number(), table, self.before.layout)
        self.after, which = self.after.with_schema(schema)
        return sealed._replace(schema=which)

    def _put_aside(self) -> None:
        """Rename damaged files, so that they are kept although the manifest does not name them."""
        with storing(f"store {self.folder}"):
            make_folder(self.folder / ASIDE)
            for file in self._damaged():
                os.link(file, self.folder / ASIDE / file.name)
            sync_folders([self.folder / ASIDE])

    def _damaged(self) -> Iterator[Path]:
        for name in self.wrong:
            path = self.folder / name
            for file in path.parent.glob(f"{path.stem}.*"):
                if not (self.folder / ASIDE / file.name).exists():
                    yield file


def _first_episode(table: pa.Table, manifest: Manifest) -> int:
    """Return the index of the first row that is known to begin an episode; the number of rows if no such row is
    known.
    """
    segment, dims = Segment(table), {"max_action_dim": None, "max_obs_continuous_dim": None}
    try:
        schema = StoreSchema((), dims, None, ()).merged([segment], [("the manifest", manifest.metadata)])
        snapshot = Snapshot([segment], schema.config(), budget=DenseBudget(DENSE_BYTES))
        if not {"time", "done"} & snapshot.readers.keys():
            return 0
        starts = snapshot.episode_starts
        if "time" in snapshot.readers and snapshot.stored("time", starts[:1])[0] == 0:
            return 0
    except (MouseError, ValueError):
        return 0
    # The table does not show whether row 0 begins an episode or continues one, so row 0 is skipped.
    return int(starts[1]) if len(starts) > 1 else table.num_rows
