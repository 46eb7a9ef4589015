"""What is noted of files when they are written, and held against them when they are opened or verified.

It stands in ``state.json`` beside what ``datasets`` keeps there, which passes over it::

    "_mouse": {"rows": 603, "digest": "...",
               "files": {NAME: {"rows": 603, "bytes": 30416, "sha256": "...", "schema": "..."}},
               "sha256": "..."}

The SHA-256 of all bytes is compared by ``verify``. The one of an Arrow file's schema is compared whenever the file is
opened: under another schema the same bytes are other values.

A Parquet file that is written here carries it in itself, between its last page and its footer, where no reader looks
and what rewrites the file does not take it along::

    mouse_data file SHA256 footer SHA256 mouse_data

The first is of the whole file apart from these bytes, the second of all that stands behind them: the footer, its length
and the magic number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged, read_json_object, reading
from mouse_core.files.writing import write_file

_STATE, _INFO, _KEY = "state.json", "dataset_info.json", "_mouse"
_PIECE = 8 << 20
# What stands before the metadata of a message of Arrow's, and how large a schema is at most.
_PREFIX_BYTES, _MOST_SCHEMA = 8, 64 << 20
_SEAL = b"mouse_data file %b footer %b mouse_data\n"
_SEAL_FORM = re.compile(rb"mouse_data file ([0-9a-f]{64}) footer ([0-9a-f]{64}) mouse_data\n")
_SEAL_BYTES = len(_SEAL) - 4 + 128
# A flip may hit one of the two, but then not the other.
_SEAL_ENDS = (b"mouse_data file ", b" mouse_data\n")
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class NotedFile:
    """What one file is known to be.

    Args:
        bytes: Its size.
        sha256: Of its bytes.
        rows: How many it holds; None where it is a description.
        schema: The SHA-256 of the schema that an Arrow file begins with; see ``schema_sha256``.
    """

    bytes: int
    sha256: str
    rows: int | None = None
    schema: str | None = None


@dataclass(frozen=True)
class Noted:
    """What a folder is known to hold.

    Args:
        rows: In all files.
        digest: Of all rows; see ``rows_digest``. None where it was not known.
        files: By name.
        sha256: Of the description in which this stands, apart from itself.
    """

    rows: int
    digest: str | None
    files: Mapping[str, NotedFile]
    sha256: str


def note(folder: Path, rows: Mapping[str, int], digest: str | None) -> None:
    """Add to the ``state.json`` of a folder what lies there.

    Args:
        folder: Complete apart from this.
        rows: How many each file holds, by name.
        digest: Of all rows; None where it is not known.
    """
    sizes: dict[str, int | None] = {**rows, _INFO: None}
    files = {name: {"rows": count, **_measured(folder / name)} for name, count in sizes.items()}
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    state[_KEY] = {"rows": sum(rows.values()), "digest": digest, "files": files}
    state[_KEY]["sha256"] = _own_digest(state)
    (folder / _STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")


def noted(folder: Path) -> Noted | None:
    """What is noted of a folder; None where nothing is.

    Raises:
        DataError: The note is damaged.
    """
    if not (folder / _STATE).is_file():
        return None
    return noted_in(read_json_object(folder / _STATE), folder / _STATE)


def noted_in(state: Mapping[str, Any], where: str | Path) -> Noted | None:
    """What is noted in a ``state.json`` that was read, which messages call ``where``; None where nothing is.

    Raises:
        DataError: The note is damaged.
    """
    found = state.get(_KEY)
    if found is None:
        return None
    with reading(where):
        files = {str(name): NotedFile(**about) for name, about in found["files"].items()}
        for file in files.values():
            if type(file.bytes) is not int or type(file.rows) not in (int, type(None)):
                raise DataError(f"expected numbers of bytes and rows, found {file!r:.200}")
        digest = None if found["digest"] is None else str(found["digest"])
        return Noted(int(found["rows"]), digest, files, str(found["sha256"]))


def schema_sha256(content: bytes) -> str:
    """The SHA-256 of the message that an Arrow stream begins with: a mark, the schema's length and the schema.

    Args:
        content: The beginning of the stream, with the whole message.
    """
    return hashlib.sha256(content[: _PREFIX_BYTES + int.from_bytes(content[4:_PREFIX_BYTES], "little")]).hexdigest()


def _schema_in(file: Path) -> str:
    with file.open("rb") as stream:
        begin = stream.read(_PREFIX_BYTES)
        return schema_sha256(begin + stream.read(min(int.from_bytes(begin[4:], "little"), _MOST_SCHEMA)))


def check_schemas(files: Iterable[Path]) -> None:
    """Hold the schemas of Arrow files against what is noted of them.

    Raises:
        DataError: Another schema than was written.
    """
    known: dict[Path, Noted | None] = {}
    for file in files:
        about = known[file.parent] = known[file.parent] if file.parent in known else noted(file.parent)
        if about is None or file.name not in about.files or file.suffix != ".arrow":
            continue
        with reading(file):
            check_schema(file, about.files[file.name].schema, _schema_in(file))


def check_schema(file: Any, known: str | None, found: str) -> None:
    """Raise DataError unless the digest of a file's schema is the one that is noted, where one is."""
    if known is not None and known != found:
        raise damaged(file, f"expected a schema with the SHA-256 {known} as was written, found {found}")


def check_counts(rows: Mapping[Path, int]) -> None:
    """Hold the rows and sizes of files, which are known by now, against what is noted of them.

    Args:
        rows: How many were found in each file.

    Raises:
        DataError: Another number than was written, or a file that was not.
    """
    for folder in {file.parent: None for file in rows}:
        about = noted(folder)
        if about is None:
            continue
        here = {file.name: file for file in rows if file.parent == folder}
        written = {name: known for name, known in about.files.items() if known.rows is not None}
        if written.keys() != here.keys():
            raise damaged(folder / _STATE, f"expected the files {list(written)} as written, found {sorted(here)}")
        for name, file in here.items():
            known, size = written[name], file.stat().st_size
            if rows[file] != known.rows:
                raise damaged(file, f"expected {known.rows} rows as were written, found {rows[file]}")
            if size != known.bytes:
                raise damaged(file, f"expected {known.bytes} bytes as were written, found {size}")


def check_bytes(folder: Path, about: Noted, advance: Callable[[int], None]) -> list[str]:
    """Hold every byte of the files of a folder against what is noted of them.

    Args:
        folder: Where they are.
        about: What is noted.
        advance: Called with the number of bytes read.

    Returns:
        What is wrong, a sentence a file.
    """
    wrong = []
    if _own_digest(read_json_object(folder / _STATE)) != about.sha256:
        wrong.append(f"{folder / _STATE}: expected what was written there, found something else")
    for name, known in about.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            wrong.append(f"{file}: expected a file, found none")
            continue
        found = _measured(file, advance)
        if found["bytes"] != known.bytes:
            wrong.append(f"{file}: expected {known.bytes} bytes, found {found['bytes']}")
        elif found["sha256"] != known.sha256:
            wrong.append(f"{file}: expected the SHA-256 {known.sha256}, found {found['sha256']}")
    return wrong


# ---------------------------------------------------------------------- what can be found out again


def write_note(file: Path, said: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object with its checksum, in the place of what was there.

    Raises:
        StorageError: It cannot be written.
    """
    write_file(file, json.dumps({**said, "sha256": _sha256_of(said)}, indent=1).encode(), sync=sync)


def read_note(file: Path) -> dict[str, Any]:
    """What ``write_note`` wrote; nothing where there is none, or where it is damaged: it is to be found out again."""
    try:
        said = dict(read_json_object(file))
    except (DataError, ConfigError):
        return {}
    return said if said.pop("sha256", None) == _sha256_of(said) else {}


def _sha256_of(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- Parquet


def seal(file: Path) -> None:
    """Write into a Parquet file what its bytes are.

    Args:
        file: Complete, under a name at which nobody looks for it yet.
    """
    begins = _footer_begins(file)
    assert begins is not None  # a writer has written it
    with file.open("r+b") as stream:
        stream.seek(begins)
        tail = stream.read()
        whole = _digest_of(stream, begins, tail, lambda count: None)
        stream.seek(begins)
        stream.write(_SEAL % (whole, hashlib.sha256(tail).hexdigest().encode()) + tail)


def check_seal(file: Path, advance: Callable[[int], None] | None = None) -> bool:
    """Hold a Parquet file against the seal that was written into it.

    Args:
        file: It.
        advance: Called with the number of bytes read, of the whole file; None compares the footer alone.

    Returns:
        Whether there is a seal.

    Raises:
        DataError: Other bytes than were written.
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
            raise damaged(file, "expected the checksums that were written into it, found something else")
        footer = hashlib.sha256(tail).hexdigest().encode()
        if footer != match[2]:
            raise damaged(file, f"expected a footer with the SHA-256 {match[2].decode()}, found {footer.decode()}")
        if advance is not None:
            whole = _digest_of(stream, begins - _SEAL_BYTES, tail, advance)
            if whole != match[1]:
                raise damaged(file, f"expected the SHA-256 {match[1].decode()}, found {whole.decode()}")
    return True


def _footer_begins(file: Path) -> int | None:
    """Where the footer of a Parquet file begins, as its last bytes say; None where they cannot be right."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size < 3 * len(_MAGIC):
            return None
        stream.seek(size - 8)
        last = stream.read(8)
    begins = size - 8 - int.from_bytes(last[:4], "little")
    return begins if last[4:] == _MAGIC and begins >= len(_MAGIC) else None


def _digest_of(stream: IO[bytes], end: int, tail: bytes, advance: Callable[[int], None]) -> bytes:
    """The SHA-256 of a file up to ``end``, and ``tail`` behind it."""
    whole = hashlib.sha256()
    stream.seek(0)
    while piece := stream.read(min(_PIECE, end - stream.tell())):
        whole.update(piece)
        advance(len(piece))
    whole.update(tail)
    return whole.hexdigest().encode()


def _measured(file: Path, advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        found = {"bytes": size, "sha256": _digest_of(stream, size, b"", advance).decode()}
    return found | ({"schema": _schema_in(file)} if file.suffix == ".arrow" else {})


def _own_digest(state: Mapping[str, Any]) -> str:
    about = {name: value for name, value in state[_KEY].items() if name != "sha256"}
    return hashlib.sha256(json.dumps({**state, _KEY: about}, sort_keys=True).encode()).hexdigest()
