"""Whether every byte of a store's folder is what was written, and a folder without what is not."""

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
from mouse_core.store.disk.tail import TailFile, TailReader
from mouse_core.store.snapshot import Snapshot

ASIDE = "damaged"
"""The folder, in that of a store, that ``repair`` puts damaged files into."""


@dataclass(frozen=True)
class Checked:
    """Result of checking the files of a store.

    Args:
        rows: How many are whole.
        files: How many were looked at.
        wrong: What is wrong with each that is damaged, by its name in the folder.
        not_flushed: How many rows are written behind those, and not shown to readers yet.
    """

    rows: int
    files: int
    wrong: dict[str, str]
    not_flushed: int = 0


@dataclass(frozen=True)
class Repaired:
    """Result of repairing a store's folder.

    Args:
        path: The folder.
        rows: How many are there now.
        dropped_rows: How many are not any more, as far as it is known.
        said: What was done, a sentence each; empty where all was whole.
    """

    path: str
    rows: int
    dropped_rows: int
    said: tuple[str, ...]


def check_store(folder: Path, *, progress: bool = False) -> Checked:
    """Read all files of a store's folder, and hold them against the checksums that were noted when they were written.

    Args:
        folder: The folder; somebody may be writing to it.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store.
        DataError: The manifest is damaged, without which nothing is known of the other files.
        StorageError: The system cannot read a file now.
    """
    read = ReadFolder(folder)
    manifest, not_flushed = read.manifest, 0

    def check(number: int, sealed: Sealed) -> None:
        _table(folder, manifest, number, verify=True).validate(full=True)

    found = check_sealed(manifest, check, lambda sealed: str(folder / sealed.name), progress=progress)
    rows, wrong = found.rows, found.wrong
    for tail in manifest.tails:
        try:
            reader = TailReader(folder / tail.name, identity=tail.identity)
            rows += reader.committed()
            not_flushed += reader.not_flushed()
            reader.close()
        except StorageError:
            raise  # of a system that has no room for another open file: nothing is known of this one
        except MouseError as error:
            wrong[tail.name] = str(error)
    # Until here nobody may remove what the manifest names.
    read.close()
    return Checked(rows, len(manifest.segments) + len(manifest.tails), wrong, not_flushed)


def check_sealed(
    manifest: Manifest, check: Callable[[int, Sealed], None], label: Callable[[Sealed], str], *, progress: bool
) -> Checked:
    """Check every sealed file of a store, wherever it lies.

    Args:
        manifest: The manifest of the store.
        check: Reads a file, given its number and its entry, and raises an error where it is not what was written.
        label: Returns the path or address of a file, for messages.
        progress: Whether a bar shows how far it is.

    Raises:
        StorageError: A file cannot be read now.
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


# ---------------------------------------------------------------------- without what is damaged


def repair(path: str | os.PathLike[str], *, dry_run: bool = False, progress: bool = False) -> Repaired:
    """Make a store of what is whole in a folder.

    Files that are damaged are put into a folder ``damaged`` beside the others. Rows behind a gap follow, from the first
    on that an episode begins with, so that no window goes across it; the rest of the broken episode is dropped, too. A
    manifest that is lost or damaged is put back from its copy.

    Args:
        path: The folder; nobody may be writing to it, also where all is whole.
        dry_run: Whether nothing is changed, and only what would be is said.
        progress: Whether a bar shows how far it is.

    Raises:
        ConfigError: There is no store, or another process writes to it.
        DataError: The manifest is damaged, and so is its copy; nothing is known of the other files without them.
        StorageError: The folder cannot be written; it is as it was.
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
    """Put the copy of a manifest in its place if that is lost or damaged; what was done.

    Files that the copy does not name may hold rows that came after it: they are put aside, and not removed.
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
        raise damaged(copy, f"expected a copy of the manifest, found none; the manifest: {wrong}")
    content = copy.read_bytes()
    known = parse_manifest(copy, content)
    said = [f"{wrong.partition(';')[0]}: its copy {COPY} of {len(known.segments)} sealed files takes its place"]
    with storing(f"store {folder}"):
        lock = Held(folder / LOCK, f"store {folder}")
        try:
            for name, number in files_of(folder).items():
                if number not in known.file_numbers():
                    said.append(f"{folder / name}: the copy does not name it; it is put into {ASIDE}")
                    if not dry_run:
                        make_folder(folder / ASIDE)
                        os.replace(folder / name, folder / ASIDE / Path(name).name)
            if not dry_run:
                write_file(folder / NAME, content, only_writer=True)
        finally:
            lock.close()
    return tuple(said)


class _Repair:
    """A folder without the files that something is wrong with.

    Args:
        written: The folder.
        wrong: What is wrong with each, by its name.
        dry_run: See ``repair``.
    """

    def __init__(self, written: WrittenFolder, wrong: dict[str, str], dry_run: bool) -> None:
        self.written, self.folder, self.wrong, self.dry_run = written, written.path, wrong, dry_run
        self.before = written.manifest
        # Rows get other numbers: who reads the store before must not go on with them.
        self.after = replace(self.before, segments=(), tails=(), identity=new_identity())
        self.said: list[str] = []
        self.dropped, self.after_gap = 0, False

    def run(self) -> Repaired:
        """Write what is to be written again, and have a manifest of what is whole."""
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
        """Seal the rows of a file that was appended to, those that are whole; how many there were.

        Args:
            tail: The file.
            first: How many rows were before it in the store.
        """
        path = self.folder / tail.name
        if tail.name not in self.wrong:
            file = TailFile.recover(path, identity=tail.identity)
            rows = file.extent.count
            self._add(file.extent.to_table(rows), None, path)
            file.close()
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
            self.said.append(f"{self.wrong[tail.name]}: all of its {at:,} rows are whole")
        # There may have been more.
        self.after_gap = True
        return known or 0

    def _drop_of(self, tail: Tail, first: int, rows: int | None) -> None:
        """Say that rows of a file are dropped, from that on which has the number ``first`` in the store."""
        lost = "its rows, of which it is not known how many they are,"
        if rows is not None:
            lost = f"{rows:,} rows, from row {first:,} of the store on,"
            self.dropped += rows
        if rows != 0:
            self.said.append(f"{self.wrong[tail.name]}: {lost} are dropped")
            self.after_gap = True

    def _add(self, table: pa.Table, sealed: Sealed | None, path: Path) -> None:
        """Take the rows of a file, behind a gap from the first on that an episode begins with."""
        first = _first_episode(table, self.before) if self.after_gap else 0
        if first:
            self.said.append(f"{path}: its first {first:,} rows, the rest of a broken episode, are dropped")
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
        """Give damaged files another name, under which they stay when the manifest does not name them."""
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
    """The first row that an episode begins with, as far as rows say so; all rows if none does."""
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
    # Row 0 is the first of any rows, whether an episode begins there or goes on.
    return int(starts[1]) if len(starts) > 1 else table.num_rows
