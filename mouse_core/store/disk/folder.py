"""A store's folder: its manifest, the readers' locks on states of the folder, and the lock and files of its one writer.

The manifest lists the files of rows, in order, with their metadata. The manifest is one JSON file. A writer always
replaces the complete file, so a reader sees one state of the store. The file begins with the digest of the manifest's
text, as ``files.checksum.json_with_digest`` writes it::

    {"digest": "5f0c...", "mouse_store": {"format": 1, "metadata": {...}, "schemas": [...], "segments": [...], ...}}

Each segment is a list of the values of ``Sealed``::

    "segments": [[3, 65536, 4194304, "9a1e...", 0, true, 0, 0, 0, []], [4, 65536, ...], ...]

A reader opens a file only when a batch needs rows of the file, possibly long after the reader read the manifest.
Therefore a writer that drops old rows or merges files removes a file only when no reader has locked a state that names
the file. The number of a state is ``next_number`` of the state's manifest; this number grows whenever a file is
dropped::

    state 7 names the files 4, 5, 6     a reader locks byte 7 of the file "readers"
    state 9 names the file 8            file 8 holds the rows of the files 4, 5 and 6. Readers of the states 5..7, 6..7
                                        and 7..7 may need these three files; byte 7 is locked, so all three files stay
    the reader reads state 9            the reader locks byte 9 and unlocks byte 7; the three files are removed

The locks of readers are shared locks that belong to open files (``F_OFD_SETLK`` of Linux). Therefore the system
releases a lock when the reader's process ends, for any reason. Readers need no write permission for the folder. On a
system without such locks, files are removed at once, and opening a removed file raises an error.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mouse_core._base.checks import UNREADABLE
from mouse_core.errors import ConfigError, DataError, StorageError
from mouse_core.files import writing
from mouse_core.files.checksum import check_json, has_json_digest, json_with_digest
from mouse_core.files.locking import Descriptor, Held, is_at
from mouse_core.files.log import Log
from mouse_core.files.reading import MOST_JSON, check_inside, damaged, reading
from mouse_core.metadata import DatasetMetadata

NAME = "manifest.json"
"""Name of the manifest in a store's folder."""

COPY = f"{NAME}.bak"
"""Name of the manifest's copy, from which ``mouse repair`` restores a lost or damaged manifest."""

LOCK = "lock"
"""Name of the lock file of the folder's one writer."""

FORMAT = 1
"""The version of the manifest's format."""

_KEY = "mouse_store"
# A manifest may be longer than other metadata files: this size is enough for a million segments.
MOST_BYTES = 8 * MOST_JSON
"""Largest size of a manifest in bytes."""


class Sealed(NamedTuple):
    """A sealed segment: an Arrow file, which never changes.

    Args:
        number: Number in the file's name; numbers increase, and no number is used twice.
        rows: Number of rows.
        bytes: The size of the file.
        digest: Digest of the file's trailer: the bytes after the record batches, which contain a checksum of each page;
            see ``files.ipc``.
        schema: Index of the segment's schema in the manifest's schemas.
        appended: Whether the rows were appended to the store, not taken from a dataset.
        batch_rows: Number of rows of each record batch; the last record batch can have fewer rows. If the number is 0,
            all rows are in one record batch.
        stride: Distance in bytes between the starts of consecutive full record batches. The distance is 0 unless all
            distances are equal, and the offsets of values in all full record batches are equal.
        load: Identifier of the dataset that the rows were taken from; an episode never continues in rows with another
            identifier. Datasets whose rows mark the ends of episodes share an identifier. 0 for appended rows.
        body: Size in bytes of the file's body: the bytes before the trailer.
        nulls: Names of columns whose values are all null in the file.
    """

    number: int
    rows: int
    bytes: int
    digest: str
    schema: int
    appended: bool = True
    batch_rows: int = 0
    stride: int = 0
    load: int = 0
    body: int = 0
    nulls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name in the store's folder."""
        return f"segments/{self.number:06d}.arrow"

    @property
    def step(self) -> int:
        """Number of rows of each record batch; the last record batch can have fewer rows."""
        return self.batch_rows or self.rows


class Tail(NamedTuple):
    """The manifest's entry for a file of appended rows that are not sealed yet.

    Args:
        number: Number in the file's name; see ``Sealed``.
        schema: Index of the rows' schema in the manifest's schemas.
        rows: Number of rows, if the file is closed for new rows; None: rows are still appended.
        identity: The unique identity in the file's head.
    """

    number: int
    schema: int
    rows: int | None = None
    identity: str = ""

    @property
    def name(self) -> str:
        """The file's name in the store's folder."""
        return f"tail-{self.number:06d}.rows"


@dataclass(frozen=True)
class Manifest:
    """The files and metadata of one state of a store.

    Args:
        metadata: The metadata of the rows.
        schemas: Names and Arrow types of columns; each segment refers to one of these schemas.
        columns: The declared columns.
        segments: The sealed segments, in the order of their rows.
        tails: The files of later rows that are not sealed yet; rows are appended only to the last of these files.
        dropped: Number of dropped rows before the first segment.
        next_number: The number of the next file; the numbers of all earlier files are smaller.
        identity: The identity of the store. A store that is created again or repaired gets a new identity, since the
            indices of its rows have changed. "" means no identity yet.
    """

    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    schemas: tuple[pa.Schema, ...] = ()
    columns: pa.Schema = field(default_factory=partial(pa.schema, ()))
    segments: tuple[Sealed, ...] = ()
    tails: tuple[Tail, ...] = ()
    dropped: int = 0
    next_number: int = 0
    identity: str = ""

    @property
    def rows(self) -> int:
        """Number of rows in sealed segments."""
        return sum(one.rows for one in self.segments)

    @property
    def layout(self) -> str:
        """The layout of the newest segment; "columns" if there are no segments. See ``store.disk.segments``."""
        return "windows" if self.segments and self.segments[-1].batch_rows else "columns"

    def firsts(self) -> list[int]:
        """Return, for each segment, the number of rows before the segment, including dropped rows. Example: segments of
        40, 30 and 30 rows give 0, 40 and 70.
        """
        rows = (one.rows for one in self.segments[:-1])
        return list(accumulate(rows, initial=self.dropped)) if self.segments else []

    def file_numbers(self) -> set[int]:
        """The numbers of all files."""
        return {one.number for one in self.segments} | {one.number for one in self.tails}

    def with_schema(self, schema: pa.Schema) -> tuple[Manifest, int]:
        """Return the manifest, to which ``schema`` is added if the manifest lacks it, and the index of ``schema``."""
        bare = bare_schema(schema)
        for number, known in enumerate(self.schemas):
            if known.equals(bare):
                return self, number
        return replace(self, schemas=(*self.schemas, bare)), len(self.schemas)

    def with_schemas(self, segments: Sequence[Sealed], schemas: tuple[pa.Schema, ...]) -> tuple[Manifest, list[Sealed]]:
        """Add the schemas of ``segments``; return the manifest, and the segments with the indices of their schemas."""
        known, numbered = self, []
        for one in segments:
            known, which = known.with_schema(schemas[one.schema])
            numbered.append(one._replace(schema=which))
        return known, numbered

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        said = {
            "format": FORMAT,
            "metadata": self.metadata.to_json(),
            "schemas": [base64.b64encode(schema.serialize()).decode() for schema in self.schemas],
            "columns": base64.b64encode(self.columns.serialize()).decode(),
            "segments": self.segments,
            "tails": self.tails,
            "dropped": self.dropped,
            "next_number": self.next_number,
            "identity": self.identity,
        }
        return json_with_digest({_KEY: said})


def bare_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with only names and types."""
    return pa.schema([pa.field(one.name, one.type) for one in schema])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder, and wait until the new manifest is on disk.

    Raises:
        StorageError: The manifest cannot be written; the previous manifest is unchanged.
    """
    content = manifest.to_bytes()
    writing.write_file(folder / NAME, content, only_writer=True)
    # The copy is not synced, and a full disk raises no error here.
    with suppress(StorageError):
        writing.write_file(folder / COPY, content, sync=False, only_writer=True)


def is_store(folder: Path) -> bool:
    """Whether a folder has a store's manifest; no error is raised in any case."""
    if not (folder / NAME).is_file():  # opening a pipe would block
        return False
    try:
        with (folder / NAME).open("rb") as stream:
            head = stream.read(128)
    except OSError:
        return False
    return has_json_digest(head) and _KEY.encode() in head


def looks_like_store(folder: Path) -> bool:
    """Whether a folder belongs to a store, even if the store is damaged; no error is raised in any case."""
    files = any((folder / name).is_file() for name in (NAME, COPY, LOCK))
    return is_store(folder) or (files and (folder / "segments").is_dir())


def parse_manifest(file: str | Path, text: bytes) -> Manifest:
    """Parse the text of a manifest.

    Args:
        file: The path or address of the file, for messages.
        text: The content of the file.

    Raises:
        DataError: The text is damaged, or a newer release wrote it.
    """
    with reading(file):
        if len(text) > MOST_BYTES:
            raise damaged(file, f"expected at most {MOST_BYTES} bytes, found {len(text)}")
        said = _checked(file, text)
        try:
            return _manifest_of(said)
        except (pa.ArrowException, *UNREADABLE) as error:
            raise damaged(file, f"expected the content of a manifest, found {error!r:.200}") from error


def _checked(file: str | Path, text: bytes) -> dict[str, Any]:
    """Check the digest and the version of a manifest, and return its content."""
    try:
        whole = json.loads(text)
        said = whole[_KEY]
        version = said["format"]
    except UNREADABLE as error:
        what = "another text" if text.strip(b"\0 \n") else "an empty file"
        raise damaged(
            file, f"expected the manifest of a store, found {what}; {repair_hint(os.path.dirname(file))}"
        ) from error
    if type(version) is int and version > FORMAT:
        raise damaged(
            file, f"expected version {FORMAT} at most, found version {version}, which a newer mouse-data wrote"
        )
    check_json(file, text, repair_hint(os.path.dirname(file)))
    if type(version) is not int or version < 1:
        raise damaged(file, f"expected version {FORMAT}, found {version!r:.80}")
    return dict(said)


def repair_hint(folder: str | Path) -> str:
    """Return the remedy for a lost or damaged manifest."""
    if "://" in str(folder):
        return "mouse upload sends it again"
    return f"mouse repair {folder} restores the manifest from the copy {COPY}"


def _manifest_of(said: Mapping[str, Any]) -> Manifest:
    columns, *schemas = map(_schema, [said["columns"], *said["schemas"]])
    segments = tuple(Sealed._make((*one[:-1], tuple(map(str, one[-1])))) for one in said["segments"])
    tails = tuple(Tail(*tail) for tail in said["tails"])
    dropped, next_number = said["dropped"], said["next_number"]
    _check_counts([dropped, next_number])
    _check_files(segments, tails, next_number, len(schemas))
    metadata = DatasetMetadata.from_json(said["metadata"], label="the manifest")
    identities = [said["identity"], *(tail.identity for tail in tails)]
    if {*map(type, identities)} != {str}:
        raise DataError(f"expected identities that are texts, found {identities}")
    return Manifest(metadata, tuple(schemas), columns, segments, tails, dropped, next_number, identities[0])


def _schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def new_identity() -> str:
    """Return a new, unique identity."""
    return os.urandom(8).hex()


def check_identity(folder: str | Path, known: str, found: str) -> None:
    """Raise DataError if a folder's store has another identity than ``known``; "" accepts any identity."""
    if known and known != found:
        raise DataError(
            f"store {folder}: expected the store with the identity {known}, found {found or 'another store'}; the "
            "store was created again or repaired; open it again"
        )


def _check_files(segments: Sequence[Sealed], tails: Sequence[Tail], next_number: int, schemas: int) -> None:
    """Raise DataError unless the entries of files are consistent.

    Each check handles all segments at once, because there can be ten thousand segments.
    """
    columns = zip(*segments, strict=True) if segments else ((),) * len(Sealed._fields)
    lists: dict[str, Sequence[Any]] = dict(zip(Sealed._fields, columns, strict=True))
    numbers = [*lists["number"], *(tail.number for tail in tails)]
    known = [*lists["schema"], *(tail.schema for tail in tails)]
    _check_counts(numbers)
    _check_counts([*lists["rows"], *lists["bytes"]], lowest=1)
    _check_counts([*known, *lists["batch_rows"], *lists["stride"], *lists["load"], *lists["body"]])
    _check_counts([tail.rows for tail in tails if tail.rows is not None])
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= next_number:
        raise DataError(f"expected files with different numbers, all less than {next_number}, found {numbers[:9]}")
    if max(known, default=-1) >= schemas or not {*map(type, lists["digest"])} <= {str}:
        raise DataError(f"expected segments with a schema index below {schemas} and a digest that is text")


def _check_counts(counts: Sequence[Any], *, lowest: int = 0) -> None:
    if counts and ({*map(type, counts)} != {int} or min(counts) < lowest or max(counts) >= 1 << 62):
        raise DataError(f"expected integers of at least {lowest}, found other values")


READERS = "readers"
"""Name of the file in a store's folder that readers lock."""

# Fields of Linux's ``flock``: type, whence, start, length, process. 16 bits, 16 bits, then 64 bits with native
# alignment.
_LOCK = "hhqqi4x"


def _can_lock() -> bool:
    return hasattr(fcntl, "F_OFD_SETLK")


class Lease(Descriptor):
    """A reader's lock on one state of a folder; the lock is held while this object exists.

    A forked child shares the lock, and holds the lock until the child ends.

    Args:
        folder: The store's folder; None: no lock is taken.
        state: ``next_number`` of the state's manifest.
    """

    def __init__(self, folder: Path | None = None, state: int = 0) -> None:
        if folder is not None and _can_lock():
            # A folder that was copied, or created on another system, may have no file to lock: its readers hold no
            # lock.
            try:
                self._file = os.open(folder / READERS, os.O_RDONLY)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, state, 1, 0))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # without a lease, rows may be dropped under a reader
                    with writing.storing(f"store {folder}"):
                        raise

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process takes no lock of its own: the files exist as long as the sender keeps its object.
        return Lease, ()


class Shared:
    """A lease that the files of one state share; replacing the lease moves all these files to a later state at once.

    Args:
        lease: The first lease.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


class Unneeded:
    """Removes files that the manifest no longer names. Each file is removed when no reader has locked a state that
    names the file.

    Args:
        folder: The store's folder. The file that readers lock is created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._readers = Descriptor(os.open(folder / READERS, os.O_RDWR | os.O_CREAT, 0o644))
        self._files: dict[Path, tuple[int, int]] = {}

    def add(self, file: Path, number: int, state: int) -> None:
        """Register a file for removal.

        Args:
            file: The file.
            number: The number of the file; states with this number or a smaller number did not name the file.
            state: The last state that named the file.
        """
        self._files.setdefault(file, (number + 1, state))

    def remove_free(self) -> None:
        """Remove the files that no reader needs."""
        for file, states in list(self._files.items()):
            if self.is_free(*states):
                writing.remove(file)
                del self._files[file]

    def is_free(self, first: int, last: int) -> bool:
        """Whether no reader has locked a state in ``first..last``."""
        if first > last or not _can_lock():
            return True
        try:
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, first, last + 1 - first, 0)
            found = fcntl.fcntl(self._readers.file, fcntl.F_OFD_GETLK, asked)
        except OSError:  # a file system without such locks
            return True
        return bool(struct.unpack(_LOCK, found)[0] == fcntl.F_UNLCK)

    def forget(self) -> None:
        """Forget all registered files without removing them, because the folder was replaced, and another writer can
        use the same file names.
        """
        self._files.clear()

    def close(self) -> None:
        """Remove the files that no reader needs; the folder's next writer removes the other files."""
        self.remove_free()
        self._readers.close()


CLIENTS = "clients.log"
"""Name of the log that records which client sent which rows; see ``collect.shared``."""
# Names of files that a writer creates; after a crash, some may exist that no manifest names.
_OURS = re.compile(r"tail-(\d{6,})\..*|(\d{6,})\.arrow")
_SEGMENTS = "segments"


@contextmanager
def repairable(folder: Path) -> Iterator[None]:
    """Context manager that appends the command for a repair to errors about damaged files."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; mouse repair {folder} keeps the undamaged rows") from error


class ReadFolder(Descriptor):
    """A folder opened for reading: its current manifest, which is read again when a writer replaced it.

    Args:
        path: The folder.

    Attributes:
        lease: Lock on the manifest's state; the manifest's files exist while the lease is referenced.

    Raises:
        ConfigError: The folder holds no store.
        DataError: The manifest is lost or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path / NAME)
        self.manifest, self.lease = Manifest(), Lease()
        # The identity of the manifest file that was read; the file stays open.
        self._number: tuple[int, int] | None = None
        # Looked up before the manifest: a writer creates this folder and its lock first, then the manifest, then the
        # copy and files of rows.
        had_one, being_made = (path / COPY).exists() or bool(files_of(path)), (path / LOCK).exists()
        if not (path / NAME).exists():
            if had_one:
                raise damaged(path / NAME, f"expected the manifest of a store, found none; {repair_hint(path)}")
            if being_made:
                raise ConfigError(
                    f"{path}: expected a store ({NAME}), found a folder whose writer has not created the store yet"
                )
            what = (
                "nothing" if not path.exists() else (_shown(path) or "an empty folder") if path.is_dir() else "a file"
            )
            # No store is created in a folder with other files.
            makes = not path.exists() or (path.is_dir() and all(map(_is_ours, os.listdir(path))))
            remedy = f"{str(path)!r}, 'a') makes one" if makes else f"{str(path)!r}) reads other formats"
            if not (path / NAME).exists():  # created meanwhile
                raise ConfigError(
                    f"{path}: expected a folder with a store ({NAME}), found {what}; DatasetStore.open({remedy}"
                )
        check_inside([path / NAME, path / READERS], path)
        self.look()

    def look(self) -> bool:
        """Read the manifest if it was replaced, and return whether it was replaced. Raises DataError if the new
        manifest belongs to another store.

        The manifest file that was read stays open, so no new file can get the same inode number, and every replacement
        is detected.
        """
        if self._is_read():
            return False
        # Until the lease is taken, the writer may remove files that a manifest names.
        while True:
            self._read()
            self.lease = Lease(self.path, self.manifest.next_number)
            if self._is_read():
                return True

    def _is_read(self) -> bool:
        """Whether the manifest file is still the file that was read."""
        try:
            there = os.stat(self._name)
        except OSError as error:
            with writing.storing(f"manifest {self._name}"):
                raise error
        return self._file >= 0 and (there.st_dev, there.st_ino) == self._number

    def _read(self) -> None:
        file = self.path / NAME
        with writing.storing(f"manifest {file}"):
            opened = os.open(file, os.O_RDONLY)
        try:
            with reading(file), os.fdopen(os.dup(opened), "rb") as stream:
                manifest = parse_manifest(file, stream.read())
        except BaseException:
            os.close(opened)
            raise
        try:
            check_identity(self.path, self.manifest.identity, manifest.identity)
        except BaseException:
            os.close(opened)
            raise
        self.close()
        there = os.fstat(opened)
        self._file, self._number, self.manifest = opened, (there.st_dev, there.st_ino), manifest


class WrittenFolder:
    """A folder opened for writing, with the writer's lock.

    Args:
        path: The folder; created if it is missing.

    Raises:
        ConfigError: Another writer has opened the folder, or the folder holds files that do not belong to a store.
        DataError: The manifest is damaged, or is missing although files of rows exist.
        StorageError: The folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock_path, self._manifest_path = path, str(path / LOCK), str(path / NAME)
        self.manifest = Manifest()
        # The number of the next file, and the lock that guards it.
        self._next, self._numbers = 0, threading.Lock()
        # Whether the manifest on disk may differ from the manifest in memory.
        self._is_doubted = False
        file = path / NAME
        with writing.storing(f"store {path}"):
            if not file.exists():
                writing.make_folder(path)
                if any(not _is_ours(name) for name in os.listdir(path)):
                    raise ConfigError(
                        f"{path}: expected a folder with a store, or an empty folder, found {_shown(path)}"
                    )
            self._lock = Held(path / LOCK, f"store {path}")
            writing.make_folder(path / _SEGMENTS, sync=False)  # the manifest waits for its final name
        try:
            with writing.storing(f"store {path}"):
                self._unneeded = Unneeded(path)
            if file.exists():
                with reading(file):
                    self.manifest = parse_manifest(file, file.read_bytes())
                self.remove_unnamed()
            else:
                # A store's first file is its manifest: if other files exist, the manifest was lost, and the files must
                # not be.
                rows = sorted(files_of(path))
                if rows:
                    raise damaged(
                        file, f"expected the manifest of the rows in {rows[:4]}, found none; {repair_hint(path)}"
                    )
                writing.remove_leftovers(path, only_writer=True)
                self.replace(Manifest(identity=new_identity()))
            self.lease = Lease(path, self.manifest.next_number)
        except BaseException:
            self._lock.close()
            raise

    def replace(self, manifest: Manifest) -> None:
        """Replace the manifest on disk; see ``write_manifest``. A later call of ``clean`` removes the files that the
        manifest no longer names.

        Raises:
            StorageError: The manifest cannot be written. The folder has the previous manifest or possibly the new one;
                see ``may_name``.
        """
        before = self.manifest
        self.check_there()
        if self._is_doubted:
            write_manifest(self.path, before)
            self._is_doubted = False
        manifest = replace(manifest, next_number=max(self._next, before.next_number))
        dropped = before.file_numbers() - manifest.file_numbers()
        if dropped and manifest.next_number == before.next_number:
            # Readers of the previous state may need these files, so the two states need different numbers.
            manifest = replace(manifest, next_number=manifest.next_number + 1)
        if manifest.segments is not before.segments:
            self.sync_clients()
        try:
            write_manifest(self.path, manifest)
        except BaseException:
            self._put_back(before)
            # The next attempt writes these rows to other files.
            for one in () if self._is_doubted else {*manifest.segments} - {*before.segments}:
                writing.remove(self.path / one.name)
            raise
        self.manifest = manifest
        if manifest.next_number != before.next_number:
            self.lease = Lease(self.path, manifest.next_number)
        for name, number in files_of(self.path).items() if dropped else ():
            if number in dropped:
                self._unneeded.add(self.path / name, number, before.next_number)

    def _put_back(self, before: Manifest) -> None:
        """Write the previous manifest again, after the new manifest was renamed but could not be synced."""
        self._is_doubted = True
        with suppress(OSError, StorageError):
            if (self.path / NAME).read_bytes() != before.to_bytes():
                write_manifest(self.path, before)
            self._is_doubted = False

    def may_name(self, number: int) -> bool:
        """Whether the manifest on disk possibly names a file that the manifest in memory does not name."""
        return self._is_doubted or number in self.manifest.file_numbers()

    def clean(self) -> None:
        """Remove files that the manifest no longer names and no reader needs."""
        if self._is_there():
            self._unneeded.remove_free()

    def check_there(self) -> None:
        """Raise StorageError if the folder was removed, moved, or replaced by another writer's folder."""
        if not self._is_there():
            found = "another folder" if os.path.exists(self.path) else "none"
            raise StorageError(
                f"store {self.path}: expected the folder that was opened for writing, found {found} at this path; if "
                "the folder was moved, its rows are in the moved folder; if it was removed, its rows are lost"
            )

    def have_manifest(self) -> None:
        """Write the manifest again if its file was removed, because rows cannot be found without a manifest.

        Raises:
            StorageError: The manifest cannot be written.
        """
        if not os.path.exists(self._manifest_path):
            self.check_there()
            write_manifest(self.path, self.manifest)

    def _is_there(self) -> bool:
        # A closed folder writes nothing.
        return self._lock.file < 0 or is_at(self._lock_path, self._lock.file)

    def take_number(self) -> int:
        """Return a new file number, larger than all earlier numbers.

        Raises:
            StorageError: The folder is missing or was replaced, so a file of this number can belong to another writer.
        """
        self.check_there()
        with self._numbers:
            number = max(self._next, self.manifest.next_number)
            self._next = number + 1
            return number

    def remove_unnamed(self) -> None:
        """Remove files that no manifest names: the remains of a crash, and sealed, merged or dropped files."""
        writing.remove_leftovers(self.path, only_writer=True)
        writing.remove_leftovers(self.path / _SEGMENTS, only_writer=True)
        named = self.manifest.file_numbers()
        unnamed = {name: number for name, number in files_of(self.path).items() if number not in named}
        if unnamed:
            # The previous writer may have ended before its manifest was on the disk, where an older manifest names
            # these files.
            with writing.storing(f"store {self.path}"):
                writing.sync_folders([self.path])
        for name, number in unnamed.items():
            self._unneeded.add(self.path / name, number, self.manifest.next_number - 1)
        self._unneeded.remove_free()

    def sync_clients(self) -> None:
        """Sync the log of clients before rows are synced. Otherwise, after a power cut, a client could send rows that
        are already on disk a second time.

        Raises:
            StorageError: The log cannot be synced.
        """
        with writing.storing(f"log {self.path / CLIENTS}"), suppress(FileNotFoundError):
            writing.sync_files([self.path / CLIENTS])

    def note_opened(self, rows: int) -> None:
        """Write into the log of clients how many rows, including dropped rows, had been written when the folder was
        opened.

        Example: a crash preserved only 60 of a client's 100 rows, and the owner appends a 61st row before the client
        reconnects. The record shows that the 61st row does not come from the client.

        Raises:
            StorageError: The number cannot be written; the folder is released.
        """
        if not (self.path / CLIENTS).exists():
            return
        record = json.dumps({"opened": rows}).encode()
        try:
            log = Log(self.path / CLIENTS)
            try:
                if log.records[-1:] != [record]:
                    log.append(record, sync=True)
            finally:
                log.close()
        except DataError:
            return  # the server of the clients reports the error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the writer's lock."""
        if not self._is_there():
            self._unneeded.forget()
        self._unneeded.close()
        self._lock.close()


def files_of(folder: Path) -> dict[str, int]:
    """Return the files of rows in a store's folder by their numbers, including files that the manifest does not
    name.
    """
    found: dict[str, int] = {}
    for part in ("", _SEGMENTS):
        try:
            names = os.listdir(folder / part)
        except FileNotFoundError:
            continue
        matches = {os.path.join(part, name): _OURS.fullmatch(name) for name in names}
        found |= {name: int(match[1] or match[2]) for name, match in matches.items() if match}
    return found


def _is_ours(name: str) -> bool:
    return name in (LOCK, READERS, _SEGMENTS, COPY) or name.startswith(f".{NAME}") or _OURS.fullmatch(name) is not None


def _shown(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if not _is_ours(name))[:8]
