"""Resumable jobs: work in parts, in a folder beside the result.

A job writes its parts into a folder beside its target. The note ``job.json`` lists the parts with the checksums of
their files, and the fingerprint of the job: everything that decides about the result. After an interruption at any
moment, a job with the same fingerprint keeps each part whose files are whole, and writes the others::

    rows                    the result, once it is complete
    .rows.converting/
        lock                held by the process that works on the job
        job.json            {"fingerprint": {...}, "parts": {"0": {...}, "1": {...}}, "facts": {...}, "complete": false}
        part-00000.arrow    a part that the note lists
        part-00002.arrow    a part that an interruption cut; the next run removes it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import file_digest
from mouse_core.files.locking import Held
from mouse_core.files.reading import read_json_object
from mouse_core.files.writing import (
    check_nothing_at,
    make_folder,
    put_in_place,
    remove,
    replacing,
    storing,
    sync_files,
    sync_folders,
)
from mouse_core.formats.base import DigestedRows, RowDigest
from mouse_core.formats.columns import blocks

NOTE, _LOCK = "job.json", "lock"
# Writing notes takes at most this share of the time, so that many small parts do not rewrite a long note each.
_SHARE = 1 / 20


@dataclass(frozen=True)
class Part:
    """Rows that a job has finished.

    Args:
        first: Number of the first row in the source.
        rows: Number of rows of the source.
        digest: Digest of these rows as the source has them.
        files: Checksums (xxh3, 128 bits) of the files by name.
        facts: What else the job needs to know of the part, as JSON.
    """

    first: int
    rows: int
    digest: str
    files: Mapping[str, str]
    facts: Any = None

    @classmethod
    def written(cls, folder: Path, names: Iterable[str], first: int, rows: int, digest: str, facts: Any = None) -> Self:
        """Return a part after its files, in ``folder``, have reached the disk."""
        files = {name: folder / name for name in names}
        sync_files([*files.values()])
        sync_folders(file.parent for file in files.values())
        return cls(first, rows, digest, {name: _checksum(file) for name, file in files.items()}, facts)

    def is_in(self, folder: Path) -> bool:
        """Whether all files of the part lie in ``folder`` as they were written."""
        return all((folder / name).is_file() and _checksum(folder / name) == one for name, one in self.files.items())


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream)


class PartWriter(Protocol):
    """Writes one part of a job that reads a stream."""

    @property
    def bytes(self) -> int:
        """Size of the part so far."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    def finish(self) -> tuple[Iterable[str], Any]:
        """Complete the files; return their names and the part's ``facts``."""


@contextmanager
def job_folder(target: Path, kind: str, what: str) -> Iterator[Path]:
    """Lock the folder ``.NAME.KIND`` beside ``target``; remove it afterwards if no note of a job lies in it.

    Args:
        target: Path of the result.
        kind: The end of the folder's name, as "converting".
        what: The function that runs the job; begins messages.

    Raises:
        ConfigError: Something is at ``target``, or another process works on the job.
        StorageError: Files cannot be written.
    """
    check_nothing_at(target, what)
    folder = target.with_name(f".{target.name}.{kind}")
    with storing(f"{what}: {str(target)!r}"):
        make_folder(folder)
        with Held(folder / _LOCK, what):
            try:
                yield folder
            finally:
                if not any(folder.rglob(NOTE)):
                    remove(folder)


class Job:
    """The parts of a job; a context manager that saves the note at the end, after an error too.

    Args:
        folder: The folder of the parts.
        what: The function that runs the job; begins messages.
        fingerprint: Everything that decides about the result, by name.
        in_order: Whether a part needs all parts before it.
        beside: Names in the folder that belong to others.

    Attributes:
        parts: Finished parts by number.
        facts: What the job notes of all parts together, as JSON.
        complete: Whether no part is missing.

    Raises:
        ConfigError: The folder holds the parts of a job with another fingerprint.
        DataError: The note is damaged.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        fingerprint: Mapping[str, Any],
        *,
        in_order: bool = True,
        beside: Iterable[str] = (),
    ) -> None:
        self.folder, self.fingerprint = folder, dict(fingerprint)
        self._others = f"{what}: unfinished work is in {str(folder)!r},", "finish it, or delete the folder"
        self.parts: dict[int, Part] = {}
        self.facts: dict[str, Any] = {}
        self.complete = False
        self._saved, self._seconds = 0.0, 0.0
        make_folder(folder, sync=False)
        if (folder / NOTE).exists():
            advice = f"delete the folder {str(folder)!r}, and call again"
            noted, parts, facts, complete = read_note(folder / NOTE, advice)
            check_same(noted, fingerprint, *self._others)
            chosen = takewhile if in_order else filter
            self.parts = dict(chosen(lambda item: item[1].is_in(folder), parts.items()))
            self.facts = facts
            self.complete = complete and len(self.parts) == len(parts)
        kept = (NOTE, _LOCK, *beside, *(name for part in self.parts.values() for name in part.files))
        # The deepest paths come first, so that a folder is empty when its turn comes. The name of an index of a video
        # begins with the name of the video.
        for path in sorted(folder.rglob("*"), reverse=True):
            if not path.relative_to(folder).as_posix().startswith(kept):
                with suppress(OSError):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    @property
    def rows(self) -> int:
        """Rows of the source in all parts."""
        return sum(part.rows for part in self.parts.values())

    def begin_anew(self) -> None:
        """Remove all parts."""
        for part in self.parts.values():
            for name in part.files:
                remove(self.folder / name)
        self.parts, self.facts, self.complete = {}, {}, False

    def add(self, part: Part, number: int | None = None) -> None:
        """Add a part, by default behind the others; save the note unless that would take too much of the time."""
        self.parts[len(self.parts) if number is None else number] = part
        if time.monotonic() >= self._saved + self._seconds / _SHARE:
            self.save()

    def save(self) -> None:
        """Write the note; an OSError is raised where that fails."""
        began = time.monotonic()
        parts = {str(number): vars(part) for number, part in self.parts.items()}
        note = {"fingerprint": self.fingerprint, "parts": parts, "facts": self.facts, "complete": self.complete}
        with replacing(self.folder / NOTE, only_writer=True) as partial:
            partial.write_text(json.dumps(note), encoding="utf-8")
        self._saved = time.monotonic()
        self._seconds = self._saved - began

    def result_folder(self) -> Path:
        """Return a new empty folder for the result."""
        folder = self.folder / "result"
        remove(folder)
        folder.mkdir()
        return folder

    def finish(self, result: Path, target: Path) -> None:
        """Give the result its name, and remove all else of the job."""
        put_in_place(result, target)
        self.discard()

    def discard(self) -> None:
        """Remove all of the job."""
        remove(self.folder)
        self.parts = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if self.parts:
            # The first error counts, as on a full disk.
            with suppress(*(() if kind is None else (OSError,))):
                self.save()

    def check_rows(self, digest_of: Callable[[Part], str]) -> None:
        """Raise ConfigError unless the source still has the rows of all parts.

        Args:
            digest_of: Returns the digest of the rows of a part as the source has them now.
        """
        check_rows(self.parts, digest_of, *self._others)

    def write_stream(
        self,
        stream: Any,
        begin: Callable[[int, int], AbstractContextManager[PartWriter]],
        *,
        most_bytes: int,
        advance: Callable[[int], None],
        digest: RowDigest | None = None,
        cut: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = iter,
    ) -> None:
        """Write the rows of a stream in parts; compare the rows of parts that are there already.

        Args:
            stream: The ``RowStream`` that is read.
            begin: Begins the part of a number, whose first row in the source has another number.
            most_bytes: Size at which a part is full.
            advance: Called with numbers of rows that were read.
            digest: Takes in all rows.
            cut: Cuts batches into smaller ones.

        Raises:
            ConfigError: The source has other rows than a part.
        """
        source = DigestedRows(blocks(stream), digest, advance)
        self.check_rows(lambda part: source.digest_of(part.rows, stream.schema))
        following = cut(source.following())
        while not self.complete:
            with begin(len(self.parts), self.rows) as writer:
                read = RowDigest(stream.schema)
                for batch in following:
                    read.update(batch)
                    writer.write(batch)
                    if writer.bytes >= most_bytes:
                        break
                else:
                    self.complete = True
                if read.rows or not self.parts:
                    names, facts = writer.finish()
                    self.add(Part.written(self.folder, names, self.rows, read.rows, read.hexdigest(), facts))


def check_rows(parts: Mapping[int, Part], digest_of: Callable[[Part], str], where: str, remedy: str) -> None:
    """Raise ConfigError, naming rows, unless the source still has the rows of some parts."""
    for part in parts.values():
        if digest_of(part) != part.digest:
            some = f"some of {part.first}..{part.first + part.rows - 1}"
            raise ConfigError(f"{where} of something else: it differs in rows, {some}; {remedy}")


def read_note(file: Path, advice: str) -> tuple[dict[str, Any], dict[int, Part], dict[str, Any], bool]:
    """Return fingerprint, parts, facts and completeness of a job.

    Raises:
        DataError: The file holds something else; the message ends in ``advice``.
    """
    try:
        found = read_json_object(file)
        parts = {int(number): Part(**part) for number, part in found["parts"].items()}
        return dict(found["fingerprint"]), parts, dict(found["facts"]), bool(found["complete"])
    except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: expected the note of a job, found something else ({error}); {advice}") from error


def check_same(noted: Mapping[str, Any], fingerprint: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise ConfigError, naming the differences, unless the fingerprints of two jobs are equal."""
    wanted = json.loads(json.dumps(dict(fingerprint)))
    differing = [name for name, value in wanted.items() if noted.get(name) != value]
    differing += [name for name in noted if name not in wanted]
    if differing:
        raise ConfigError(f"{where} of something else: it differs in {', '.join(differing)}; {remedy}")
