"""What is noted of files when they are written, and held against them when they are opened or verified.

It stands in ``state.json`` beside what ``datasets`` keeps there, which passes over it::

    "_mouse": {"rows": 603, "digest": "...",
               "files": {NAME: {"rows": 603, "bytes": 30416, "digest": "...", "schema": "..."}},
               "own_digest": "..."}

The digest of all bytes is compared by ``verify``. The one of an Arrow file's schema is compared whenever the file is
opened: under another schema the same bytes are other values.

A Parquet file that is written here carries it in itself, between its last page and its footer, where no reader looks
and what rewrites the file does not take it along::

    mouse_data file DIGEST footer DIGEST mouse_data

The first is of the whole file apart from these bytes, the second of all that stands behind them: the footer, its length
and the magic number.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import (
    DIGEST_DIGITS,
    check,
    digest,
    file_digest,
    json_with_digest,
    read_json_with_digest,
)
from mouse_core.files.reading import damaged, read_json_object, reading
from mouse_core.files.writing import write_file

_STATE, _INFO, _KEY = "state.json", "dataset_info.json", "_mouse"
# What stands before the metadata of a message of Arrow's, and how large a schema is at most.
_PREFIX_BYTES, _MOST_SCHEMA = 8, 64 << 20
_SEAL = b"mouse_data file %b footer %b mouse_data\n"
_SEAL_FORM = re.compile(rb"mouse_data file ([0-9a-f]{32}) footer ([0-9a-f]{32}) mouse_data\n")
_SEAL_BYTES = len(_SEAL) - 4 + 2 * DIGEST_DIGITS
# A flip may hit one of the two, but then not the other.
_SEAL_ENDS = (b"mouse_data file ", b" mouse_data\n")
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class NotedFile:
    """What one file is known to be.

    Args:
        bytes: Its size.
        digest: Of its bytes.
        rows: How many it holds; None where it is a description.
        schema: Digest of the schema that an Arrow file begins with; see ``schema_digest``.
    """

    bytes: int
    digest: str
    rows: int | None = None
    schema: str | None = None


@dataclass(frozen=True)
class Noted:
    """What a folder is known to hold.

    Args:
        rows: In all files.
        digest: Of all rows; see ``rows_digest``. None where it was not known.
        files: By name.
        own_digest: Of the description in which this stands, apart from itself.
    """

    rows: int
    digest: str | None
    files: Mapping[str, NotedFile]
    own_digest: str


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
    state[_KEY]["own_digest"] = _own_digest(state)
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
        return Noted(int(found["rows"]), digest, files, str(found["own_digest"]))


def schema_digest(content: bytes) -> str:
    """The digest of the message that an Arrow stream begins with: a mark, the schema's length and the schema.

    Args:
        content: The beginning of the stream, with the whole message.
    """
    return digest(content[: _PREFIX_BYTES + int.from_bytes(content[4:_PREFIX_BYTES], "little")])


def _schema_in(file: Path) -> str:
    with file.open("rb") as stream:
        begin = stream.read(_PREFIX_BYTES)
        return schema_digest(begin + stream.read(min(int.from_bytes(begin[4:], "little"), _MOST_SCHEMA)))


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
        raise damaged(file, f"expected a schema with the checksum {known} as was written, found {found}")


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
    if _own_digest(read_json_object(folder / _STATE)) != about.own_digest:
        wrong.append(f"{folder / _STATE}: expected what was written there, found something else")
    for name, known in about.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            wrong.append(f"{file}: expected a file, found none")
            continue
        found = _measured(file, advance)
        if found["bytes"] != known.bytes:
            wrong.append(f"{file}: expected {known.bytes} bytes, found {found['bytes']}")
        elif found["digest"] != known.digest:
            wrong.append(f"{file}: expected the checksum {known.digest}, found {found['digest']}")
    return wrong


# ---------------------------------------------------------------------- what can be found out again


def write_note(file: Path, said: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object with its checksum, in the place of what was there.

    Raises:
        StorageError: It cannot be written.
    """
    write_file(file, json_with_digest(said, indent=1), sync=sync)


def read_note(file: Path) -> dict[str, Any]:
    """What ``write_note`` wrote; nothing where there is none, or where it is damaged: it is to be found out again."""
    try:
        return read_json_with_digest(file)
    except (DataError, ConfigError):
        return {}


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
        whole = file_digest(stream, begins, tail)
        stream.seek(begins)
        stream.write(_SEAL % (whole.encode(), digest(tail).encode()) + tail)


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
        check(file, "the footer", match[2].decode(), digest(tail))
        if advance is not None:
            check(file, "the file", match[1].decode(), file_digest(stream, begins - _SEAL_BYTES, tail, advance))
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


def _measured(file: Path, advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        found = {"bytes": size, "digest": file_digest(stream, advance=advance)}
    return found | ({"schema": _schema_in(file)} if file.suffix == ".arrow" else {})


def _own_digest(state: Mapping[str, Any]) -> str:
    about = {name: value for name, value in state[_KEY].items() if name != "own_digest"}
    return digest(json.dumps({**state, _KEY: about}, sort_keys=True).encode())
