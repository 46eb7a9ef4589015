"""The manifest of a folder of write-once files, with the number of rows, size and digest of each file.

The manifest is an additional entry in the file ``state.json`` of ``datasets``; ``datasets`` ignores this entry::

    "_mouse": {"rows": 603, "digest": "...",
               "files": {NAME: {"rows": 603, "bytes": 30416, "digest": "...", "schema": "..."}},
               "own_digest": "..."}

``verify`` compares the digest of all bytes. When an Arrow file is opened, the digest of its schema is compared, because
another schema interprets the same bytes as other values.

A Parquet file that this package writes contains digests between the last page and the footer, where readers ignore
them. A program that rewrites the file does not copy the digests::

    mouse_data file DIGEST footer DIGEST mouse_data

The first digest covers all other bytes of the file. The second digest covers the bytes after this digest: the footer,
the length of the footer, and the magic number.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mouse_core.errors import DataError
from mouse_core.files.checksum import DIGEST_DIGITS, check, digest, file_digest
from mouse_core.files.reading import damaged, read_json_object, reading

_STATE, _INFO, _KEY = "state.json", "dataset_info.json", "_mouse"
# The mark before the metadata of an Arrow message, and the largest size of a schema.
_PREFIX_BYTES, _MOST_SCHEMA = 8, 64 << 20
_SEAL = b"mouse_data file %b footer %b mouse_data\n"
_SEAL_FORM = re.compile(
    rb"mouse_data file ([0-9a-f]{%d}) footer ([0-9a-f]{%d}) mouse_data\n" % (DIGEST_DIGITS, DIGEST_DIGITS)
)
_SEAL_BYTES = len(_SEAL) - 4 + 2 * DIGEST_DIGITS
# The start and the end of the digests' text; a bit flip damages at most one of them.
_SEAL_ENDS = (b"mouse_data file ", b" mouse_data\n")
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class ManifestFile:
    """The entry of a file in a manifest.

    Args:
        bytes: Size of the file in bytes.
        digest: Digest of all bytes.
        rows: Number of rows; None if the file contains metadata instead of rows.
        schema: Digest of the schema at the beginning of an Arrow file; see ``_schema_digest``.
    """

    bytes: int
    digest: str
    rows: int | None = None
    schema: str | None = None


@dataclass(frozen=True)
class FilesManifest:
    """The content of a folder's manifest.

    Args:
        rows: Number of rows in all files.
        digest: Digest of all rows; see ``formats.rows_digest``.
        files: The entries of files by name.
        own_digest: Digest of the ``state.json`` that contains the manifest, computed without this digest.
    """

    rows: int
    digest: str
    files: Mapping[str, ManifestFile]
    own_digest: str


def add_manifest(folder: Path, rows: Mapping[str, int], digest: str) -> None:
    """Add the manifest of a folder to its ``state.json``.

    Args:
        folder: The folder, which is complete except for the manifest.
        rows: Number of rows of each file, by name.
        digest: Digest of all rows; see ``formats.rows_digest``.
    """
    sizes: dict[str, int | None] = {**rows, _INFO: None}
    files = {name: asdict(_measured(folder / name, count)) for name, count in sizes.items()}
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    state[_KEY] = {"rows": sum(rows.values()), "digest": digest, "files": files}
    state[_KEY]["own_digest"] = _own_digest(state)
    (folder / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")


def read_manifest(folder: Path) -> FilesManifest | None:
    """Return the manifest of a folder; None if the folder has no manifest.

    Raises:
        DataError: The manifest is damaged.
    """
    if not (folder / _STATE).is_file():
        return None
    found = read_json_object(folder / _STATE).get(_KEY)
    if found is None:
        return None
    with reading(folder / _STATE):
        files = {str(name): ManifestFile(**entries) for name, entries in found["files"].items()}
        for file in files.values():
            if type(file.bytes) is not int or type(file.rows) not in (int, type(None)):
                raise DataError(f"expected a number of bytes and a number of rows, found {file!r:.200}")
        return FilesManifest(int(found["rows"]), str(found["digest"]), files, str(found["own_digest"]))


def _schema_digest(file: Path) -> str:
    """Return the digest of the first message of an Arrow stream: a mark, the schema's length and the schema."""
    with file.open("rb") as stream:
        begin = stream.read(_PREFIX_BYTES)
        return digest(begin + stream.read(min(int.from_bytes(begin[4:], "little"), _MOST_SCHEMA)))


def check_schemas(files: Collection[Path]) -> None:
    """Compare the schemas of Arrow files with the manifests of their folders.

    Raises:
        DataError: A file's schema differs from the written schema.
    """
    manifests = {folder: read_manifest(folder) for folder in {file.parent: None for file in files}}
    for file in files:
        manifest = manifests[file.parent]
        if manifest is not None and file.name in manifest.files and file.suffix == ".arrow":
            with reading(file):
                known, found = manifest.files[file.name].schema, _schema_digest(file)
                if known is not None and known != found:
                    raise damaged(file, f"expected a schema with the checksum {known}, found the checksum {found}")


def check_counts(rows: Mapping[Path, int]) -> None:
    """Compare the numbers of rows and sizes of files with the manifests of their folders.

    Args:
        rows: How many rows were found in each file.

    Raises:
        DataError: The rows or the size of a file differ from the manifest, or the manifest does not name a file.
    """
    for folder in {file.parent: None for file in rows}:
        manifest = read_manifest(folder)
        if manifest is None:
            continue
        here = {file.name: file for file in rows if file.parent == folder}
        written = {name: known for name, known in manifest.files.items() if known.rows is not None}
        if written.keys() != here.keys():
            raise damaged(folder / _STATE, f"expected the files {list(written)} as written, found {sorted(here)}")
        for name, file in here.items():
            for unit, known, found in (
                ("rows", written[name].rows, rows[file]),
                ("bytes", written[name].bytes, file.stat().st_size),
            ):
                if known != found:
                    raise damaged(file, f"expected {known} {unit}, as written, found {found}")


def check_bytes(folder: Path, manifest: FilesManifest, advance: Callable[[int], None]) -> list[str]:
    """Compare every byte of a folder's files with its manifest.

    Args:
        folder: The folder.
        manifest: The manifest of the folder.
        advance: Function that is called with the number of bytes read.

    Returns:
        One message for each file that differs.
    """
    wrong = []
    if _own_digest(read_json_object(folder / _STATE)) != manifest.own_digest:
        wrong.append(f"{folder / _STATE}: expected the content that was written, found other content")
    for name, known in manifest.files.items():
        file = folder / name
        try:
            if Path(name).name != name or not file.is_file():
                raise damaged(file, "expected a file, found none")
            found = _measured(file, known.rows, advance)
            if found.bytes != known.bytes:
                raise damaged(file, f"expected {known.bytes} bytes, found {found.bytes}")
            check(file, "the file", known.digest, found.digest)
        except DataError as error:
            wrong.append(str(error))
    return wrong


# ---------------------------------------------------------------------- Parquet


def add_parquet_checksum(file: Path) -> None:
    """Add digests of the content of a Parquet file to the file.

    Args:
        file: The complete file, under a temporary name.
    """
    begins = _footer_begins(file)
    assert begins is not None  # the writer has just written the file
    with file.open("r+b") as stream:
        stream.seek(begins)
        tail = stream.read()
        whole = file_digest(stream, begins, tail)
        stream.seek(begins)
        stream.write(_SEAL % (whole.encode(), digest(tail).encode()) + tail)


def check_parquet_checksum(file: Path, advance: Callable[[int], None] | None = None) -> bool:
    """Compare a Parquet file with the digests that it contains.

    Args:
        file: The file.
        advance: Function that is called with the number of read bytes, while the complete file is compared; None: only
            the footer is compared.

    Returns:
        Whether the file contains digests.

    Raises:
        DataError: The bytes differ from the written bytes.
    """
    begins = _footer_begins(file)
    if begins is None or begins < _SEAL_BYTES:
        return False
    with file.open("rb") as stream:
        stream.seek(begins - _SEAL_BYTES)
        found, tail = stream.read(_SEAL_BYTES), stream.read()
        if not (found.startswith(_SEAL_ENDS[0]) or found.endswith(_SEAL_ENDS[1])):
            return False
        match = _SEAL_FORM.fullmatch(found)
        if match is None:
            raise damaged(file, "expected the checksums that were written, found other content")
        check(file, "the footer", match[2].decode(), digest(tail))
        if advance is not None:
            check(file, "the file", match[1].decode(), file_digest(stream, begins - _SEAL_BYTES, tail, advance))
    return True


def _footer_begins(file: Path) -> int | None:
    """Return the offset of a Parquet footer, computed from the last bytes of the file; None if these bytes are
    invalid."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size < 3 * len(_MAGIC):
            return None
        stream.seek(size - 8)
        last = stream.read(8)
    begins = size - 8 - int.from_bytes(last[:4], "little")
    return begins if last[4:] == _MAGIC and begins >= len(_MAGIC) else None


def _measured(file: Path, rows: int | None, advance: Callable[[int], None] = lambda count: None) -> ManifestFile:
    with file.open("rb") as stream:
        found = file_digest(stream, advance=advance)
    return ManifestFile(file.stat().st_size, found, rows, _schema_digest(file) if file.suffix == ".arrow" else None)


def _own_digest(state: Mapping[str, Any]) -> str:
    entries = {name: value for name, value in state[_KEY].items() if name != "own_digest"}
    return digest(json.dumps({**state, _KEY: entries}, sort_keys=True).encode())
