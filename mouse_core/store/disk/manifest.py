"""The manifest of a store's folder: which files its rows lie in, in which order, and what is known of them.

It is one JSON file that is replaced, never edited, so whoever reads it sees one state of the store. It begins with the
digest of its own text, as ``files.checksum.json_with_digest`` writes it::

    {"digest": "5f0c...", "mouse_store": {"format": 1, "metadata": {...}, "schemas": [...], "segments": {...}, ...}}

What is known of segments stands in lists, an entry a segment, so that ten thousand of them are read in 20 ms::

    "segments": {"number": [3, 4], "rows": [65536, 65536], "bytes": [...], ...}
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, starmap
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mouse_core._base.identity import common_start
from mouse_core._base.memo import memo
from mouse_core.errors import DataError, StorageError
from mouse_core.files.checksum import check_json, has_json_digest, json_with_digest
from mouse_core.files.reading import MOST_JSON, damaged, reading
from mouse_core.files.writing import write_file
from mouse_core.metadata import DatasetMetadata

NAME = "manifest.json"
"""Name of the manifest in a store's folder."""

COPY = f"{NAME}.bak"
"""Name of the copy that ``mouse repair`` puts in the place of a lost or damaged manifest."""

LOCK = "lock"
"""Name of the file that the one writer locks."""

FORMAT = 1
"""The version of the form."""

_KEY = "mouse_store"
_LISTS = ("number", "rows", "bytes", "digest", "schema", "appended", "batch_rows", "stride", "load")
# A longer manifest than others of our files: a million segments.
MOST_BYTES = 8 * MOST_JSON
"""Most bytes of a manifest."""


class Sealed(NamedTuple):
    """A sealed segment: an Arrow file, which is never changed.

    Args:
        number: Which its name has; those of a store only grow, and none is used for two files.
        rows: How many it holds.
        bytes: The size of the file.
        digest: Of the file's bytes; of a file of many record batches, of the bytes behind them, which hold a checksum
            of each; see ``files.ipc.summed``.
        schema: Which of the manifest's schemas it has.
        appended: Whether its rows were appended to the store, and are not those of a dataset.
        nulls: Columns that have no value at all in it.
        batch_rows: How many rows a record batch has, the last maybe fewer; 0: it is all in one.
        stride: How many bytes after each other record batches of all those rows begin, where each has its values as far
            behind its beginning as the others; 0: that is not so.
        load: Of the rows of a dataset, which one it was: rows of another one do not go on from them. Numbers are the
            same where the rows themselves say so. 0 for rows that were appended.
    """

    number: int
    rows: int
    bytes: int
    digest: str
    schema: int
    appended: bool = True
    nulls: tuple[str, ...] = ()
    batch_rows: int = 0
    stride: int = 0
    load: int = 0

    @property
    def name(self) -> str:
        """The file's name in the store's folder."""
        return f"segments/{self.number:06d}.arrow"


class Tail(NamedTuple):
    """A file of appended rows that are not sealed yet.

    Args:
        number: Which its name has; see ``Sealed``.
        schema: Which of the manifest's schemas its rows have.
        rows: How many it holds, where no more come; None: it is appended to.
        identity: What its head says that no other file's does.
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
    """One state of a store.

    Args:
        metadata: What the rows say of themselves.
        schemas: Names and Arrow types of columns, of which each segment has one.
        segments: The sealed ones, in the order of their rows.
        tails: The files of rows behind them that are not sealed yet; at most the last is appended to.
        dropped: How many rows there were before the first segment that are not kept any more.
        next_number: Which no file has yet, nor any that was there before.
        identity: What no other store has: another one whose rows have other numbers, made anew or repaired, has
            another; "" of none yet.
    """

    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    schemas: tuple[pa.Schema, ...] = ()
    segments: tuple[Sealed, ...] = ()
    tails: tuple[Tail, ...] = ()
    dropped: int = 0
    next_number: int = 0
    identity: str = ""

    @memo
    def lists(self) -> dict[str, list[Any]]:
        """Entries of the segments, as lists by attribute."""
        columns = zip(*self.segments, strict=True) if self.segments else ((),) * len(Sealed._fields)
        known = dict(zip(Sealed._fields, columns, strict=True))
        return {name: list(known[name]) for name in _LISTS}

    @property
    def rows(self) -> int:
        """Number of rows in sealed segments."""
        return sum(one.rows for one in self.segments)

    @property
    def layout(self) -> str:
        """The layout of the newest segment, "columns" if there is none; see ``store.disk.segments``."""
        return "windows" if self.segments and self.segments[-1].batch_rows else "columns"

    def firsts(self) -> list[int]:
        """Return the rows before each segment, dropped ones included: of (40, 30, 30), 0, 40 and 70."""
        rows = (one.rows for one in self.segments[:-1])
        return list(accumulate(rows, initial=self.dropped)) if self.segments else []

    def file_numbers(self) -> set[int]:
        """The numbers of all files."""
        return {one.number for one in self.segments} | {one.number for one in self.tails}

    def with_schema(self, schema: pa.Schema) -> tuple[Manifest, int]:
        """Return the manifest with a schema among its schemas, and the number of the schema."""
        bare = bare_schema(schema)
        for number, known in enumerate(self.schemas):
            if known.equals(bare):
                return self, number
        return replace(self, schemas=(*self.schemas, bare)), len(self.schemas)

    def with_schemas(self, segments: Sequence[Sealed], schemas: tuple[pa.Schema, ...]) -> tuple[Manifest, list[Sealed]]:
        """Return the manifest with the schemas of segments, and the segments with its numbers for them."""
        known, numbered = self, []
        for one in segments:
            known, which = known.with_schema(schemas[one.schema])
            numbered.append(one._replace(schema=which))
        return known, numbered

    def to_bytes(self) -> bytes:
        """The text of the file."""
        said = {
            "format": FORMAT,
            "metadata": self.metadata.to_json(),
            "schemas": [base64.b64encode(schema.serialize()).decode() for schema in self.schemas],
            "segments": self.lists,
            "nulls": {str(one.number): list(one.nulls) for one in self.segments if one.nulls},
            "tails": [list(tail) for tail in self.tails],
            "dropped": self.dropped,
            "next_number": self.next_number,
            "identity": self.identity,
        }
        return json_with_digest({_KEY: said})


def bare_schema(schema: pa.Schema) -> pa.Schema:
    """Names and types alone."""
    return pa.schema([pa.field(one.name, one.type) for one in schema])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in the place of the one there is, and wait until it is on the disk.

    Raises:
        StorageError: It cannot be written; the one before is still there.
    """
    content = manifest.to_bytes()
    write_file(folder / NAME, content, only_writer=True)
    # Nobody waits for it, and nobody is told where there is no room.
    with suppress(StorageError):
        write_file(folder / COPY, content, sync=False, only_writer=True)


def is_store(folder: Path) -> bool:
    """Whether a folder looks like that of a store; never fails."""
    if not (folder / NAME).is_file():  # a pipe would be waited for
        return False
    try:
        with (folder / NAME).open("rb") as stream:
            head = stream.read(128)
    except OSError:
        return False
    return has_json_digest(head) and _KEY.encode() in head


def looks_like_store(folder: Path) -> bool:
    """Whether a folder is that of a store, be it whole or not; never fails."""
    files = any((folder / name).is_file() for name in (NAME, COPY, LOCK))
    return is_store(folder) or (files and (folder / "segments").is_dir())


def parse_manifest(file: str | Path, text: bytes, before: Manifest | None = None) -> Manifest:
    """The manifest that a file's text is.

    Args:
        file: The path or address of the file, for messages.
        text: What it holds.
        before: An earlier state of the store, of which most segments may still be there.

    Raises:
        DataError: It is damaged, or a newer release wrote it.
    """
    with reading(file):
        if len(text) > MOST_BYTES:
            raise damaged(file, f"expected at most {MOST_BYTES} bytes, found {len(text)}")
        said = _checked(file, text)
        try:
            return _manifest_of(said, before or Manifest())
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, pa.ArrowException) as error:
            raise damaged(file, f"expected what a store writes, found {error!r:.200}") from error


def _checked(file: str | Path, text: bytes) -> dict[str, Any]:
    """Return the content of a manifest whose digest is right and whose version is known."""
    try:
        whole = json.loads(text)
        said = whole[_KEY]
        version = said["format"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        what = "text that is none" if text.strip(b"\0 \n") else "an empty file"
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
    return f"mouse repair {folder} puts the copy {COPY} in its place"


def _manifest_of(said: Mapping[str, Any], before: Manifest) -> Manifest:
    schemas = tuple(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in said["schemas"])
    lists = {name: said["segments"][name] for name in _LISTS}
    tails = tuple(Tail(*tail) for tail in said["tails"])
    dropped, next_number = said["dropped"], said["next_number"]
    _check_counts([dropped, next_number])
    same = _known(lists, before)
    new = {name: values[same:] for name, values in lists.items()}
    _check_files(new, tails, next_number, len(schemas), before.lists["number"][:same])
    _check_counts([*new["batch_rows"], *new["stride"], *new["load"]])
    new["nulls"] = [tuple(map(str, said["nulls"].get(str(number), ()))) for number in new["number"]]
    of_each = zip(*(new[name] for name in Sealed._fields), strict=True)
    segments = (*before.segments[:same], *starmap(Sealed, of_each))
    metadata = DatasetMetadata.from_json(said["metadata"], label="the manifest")
    identities = [said["identity"], *(tail.identity for tail in tails)]
    if {*map(type, identities)} != {str}:
        raise DataError(f"expected identities that are texts, found {identities}")
    manifest = Manifest(metadata, schemas, segments, tails, dropped, next_number, identities[0])
    manifest.__dict__["lists"] = lists
    return manifest


def _known(lists: Mapping[str, list[Any]], before: Manifest) -> int:
    """Return how many first segments equal those before: comparing ten thousand takes 1 ms."""
    same = common_start(before.lists["number"], lists["number"])
    return same if all(values[:same] == before.lists[name][:same] for name, values in lists.items()) else 0


def new_identity() -> str:
    """Return an identity that no store has yet."""
    return os.urandom(8).hex()


def check_identity(folder: str | Path, known: str, found: str) -> None:
    """Raise DataError if a folder's store is another one than was known; "" is any."""
    if known and known != found:
        raise DataError(
            f"store {folder}: expected the store {known} that rows were read from, found {found or 'another'}, which "
            "was made in its place or repaired; open it again"
        )


def _check_files(
    lists: Mapping[str, list[Any]], tails: Sequence[Tail], next_number: int, schemas: int, others: list[int]
) -> None:
    """Raise DataError unless what is said of files can be so, beside segments of the numbers ``others`` that are known.

    List by list, as they may be long.
    """
    numbers = [*lists["number"], *(tail.number for tail in tails)]
    known = [*lists["schema"], *(tail.schema for tail in tails)]
    _check_counts(numbers)
    _check_counts([*lists["rows"], *lists["bytes"]], lowest=1)
    _check_counts(known)
    _check_counts([tail.rows for tail in tails if tail.rows is not None])
    numbers += others
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= next_number:
        raise DataError(f"expected files of different numbers below {next_number}")
    if max(known, default=-1) >= schemas or not {*map(type, lists["digest"])} <= {str}:
        raise DataError("expected segments of a known schema and digest")


def _check_counts(counts: Sequence[Any], *, lowest: int = 0) -> None:
    if counts and ({*map(type, counts)} != {int} or min(counts) < lowest or max(counts) >= 1 << 62):
        raise DataError(f"expected whole numbers from {lowest} on")
