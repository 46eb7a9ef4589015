"""Values of late columns as they lie in the log and in files: uids, and beside each the value of one column.

A record of the log is the version in one byte, then for each column the length of its name (4 bytes, little-endian),
the name, the length of an Arrow record batch (8 bytes) and the batch. Another one, which begins with a byte 0, names
files that are there, as JSON. A file is Parquet,
`.late/<column>/late-<uuid>.parquet`; its name is a digest of its content, and the version stands in its metadata. A
value is a number; a list, where the column has a shape; or the values of all tokens, or turns, of the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.writing import storing
from mouse_core.groups._files.arrow import declared_field, declared_values
from mouse_core.groups._files.names import LATE
from mouse_core.groups._files.parts import digest_of, encode_table, read_table, writing_options
from mouse_core.groups.types.columns import Columns, RolloutColumn

_VERSION = 1
_NOTED = b"mouse_late_version"
_FILES = b"\0"


@dataclass(frozen=True)
class Chunk:
    """Values of a late column for some rollouts.

    Args:
        column: The column.
        uids: Of the rollouts.
        values: One for each, as Arrow has them.
    """

    column: RolloutColumn
    uids: Sequence[str]
    values: pa.Array

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return int(self.values.nbytes) + sum(map(len, self.uids))

    def rows(self) -> pa.RecordBatch:
        """Uids and values beside each other."""
        uids = pa.array(self.uids, pa.string())
        return pa.RecordBatch.from_arrays([uids, self.values], schema=late_schema(self.column))

    def take(self, rows: Sequence[int]) -> Chunk:
        """Some of them."""
        return Chunk(self.column, [self.uids[row] for row in rows], self.values.take(pa.array(rows, pa.int64())))

    def cut(self, nbytes: int) -> Iterator[Chunk]:
        """The same in chunks of about so many bytes."""
        count = max(1, -(-self.nbytes // nbytes))
        ends = [len(self.uids) * place // count for place in range(count + 1)]
        for begin, end in pairwise(ends):
            if begin < end:
                yield Chunk(self.column, self.uids[begin:end], self.values.slice(begin, end - begin))


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one column as one."""
    uids = [uid for chunk in chunks for uid in chunk.uids]
    return Chunk(chunks[0].column, uids, pa.concat_arrays([chunk.values for chunk in chunks]))


def late_schema(column: RolloutColumn) -> pa.Schema:
    """The columns of a file."""
    uid = pa.field("rollout_uid", pa.string(), nullable=False)
    return pa.schema([uid, declared_field(column, of_example=True)])


def values_of(column: RolloutColumn, rows: pa.Array) -> list[npt.NDArray[Any]]:
    """The values as arrays.

    Raises:
        DataError: Some are missing, or of another shape.
    """
    found = [value for value in declared_values(column, rows, of_example=True) if value is not None]
    if len(found) < len(rows):
        raise DataError(f"column {column.name!r}: expected a value for each rollout, found one without")
    return found


# ---------------------------------------------------------------------- records of the log


def encode_record(chunks: Iterable[Chunk]) -> bytes:
    """Chunks as a record of the log."""
    pieces = [bytes([_VERSION])]
    for chunk in chunks:
        name, rows = chunk.column.name.encode(), bytes(chunk.rows().serialize())
        pieces += [len(name).to_bytes(4, "little"), name, len(rows).to_bytes(8, "little"), rows]
    return b"".join(pieces)


def decode_record(record: bytes, declared: Columns, path: Path) -> list[Chunk]:
    """What ``encode_record`` wrote.

    Raises:
        DataError: Something else, or of a newer version, or of a column that was not declared; it names ``path``.
    """
    _check_version(record[:1].hex(), path)
    chunks, place = [], 1
    try:
        while place < len(record):
            size = int.from_bytes(record[place : place + 4], "little")
            name = record[place + 4 : place + 4 + size].decode()
            place += 4 + size
            size = int.from_bytes(record[place : place + 8], "little")
            column = declared[name]
            rows = pa.ipc.read_record_batch(pa.py_buffer(record[place + 8 : place + 8 + size]), late_schema(column))
            chunks.append(Chunk(column, rows.column(0).to_pylist(), rows.column(1)))
            place += 8 + size
    except (pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"log {path}: expected values of late columns that were declared, found: {error}") from error
    return chunks


def encode_files(paths: Iterable[Path]) -> bytes:
    """Files, by their columns, as a record of the log: without it nobody would miss one."""
    return _FILES + json.dumps([[path.parent.name, path.name] for path in paths]).encode()


def decode_files(record: bytes) -> set[tuple[str, str]] | None:
    """The columns and names of files that ``encode_files`` wrote; None: it is another record."""
    return {(column, name) for column, name in json.loads(record[1:])} if record[:1] == _FILES else None


def _check_version(said: str, path: Path) -> None:
    try:
        version = int(said, 16)
    except ValueError:
        version = 0
    if version != _VERSION:
        raise DataError(
            f"late columns {path}: expected them of version {_VERSION}, found {said!r}"
            + (": a newer release wrote them" if version > _VERSION else "")
        )


# ---------------------------------------------------------------------- files


def encode_file(chunk: Chunk, compression: str) -> tuple[str, memoryview]:
    """The name of a file, and its content."""
    rows = pa.Table.from_batches([chunk.rows()])
    options = writing_options(rows.schema, compression, Columns([chunk.column]))
    content = encode_table(rows, options, {_NOTED: f"{_VERSION:x}".encode()})
    return f"late-{digest_of(content)}.parquet", content


def late_folder(root: Path, column: RolloutColumn) -> Path:
    """Where the files of a column are."""
    return root / LATE / column.name


def late_paths(root: Path, column: RolloutColumn) -> list[Path]:
    """The files of a column."""
    folder = late_folder(root, column)
    with storing(f"folder {folder}"):
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" and path.name[0] != ".")


def read_uids(path: Path) -> list[str]:
    """Whose values a file has; these are not read.

    Raises:
        DataError: It is not what was written, or of a newer version.
        StorageError: It cannot be read.
    """
    import pyarrow.parquet as pq

    with storing(f"late columns {path}"):
        source = pa.OSFile(str(path))
    try:
        with source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            said = (file.metadata.metadata or {}).get(_NOTED, b"")
            _check_version(said.decode(errors="replace"), path)
            uids: list[str] = file.read(["rollout_uid"], use_threads=False).column(0).to_pylist()
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise DataError(f"late columns {path}: expected them as written, found damage: {error}") from error
    return uids


def read_values(path: Path, column: RolloutColumn) -> list[npt.NDArray[Any]]:
    """The values of a file.

    Raises:
        DataError: It is not what was written.
        StorageError: It cannot be read.
    """
    rows = read_table(path, late_schema(column), columns=[column.name]).column(0).combine_chunks()
    return values_of(column, rows)


def checked_chunk(column: RolloutColumn, given: Any, counts: Sequence[int] | None) -> Chunk:
    """Values by uid as a chunk.

    Args:
        column: The column.
        given: A dict of them.
        counts: How many tokens or turns each of the rollouts has; None where there is one value for a rollout.

    Raises:
        DataError: Another shape or type, or values that the dtype or the column does not have; the message names the
            rollout.
    """
    uids, items = list(given), list(given.values())
    where = f"add_column {column.name!r}"
    flat = _flat(column, items, counts)
    total = len(items) if counts is None else sum(counts)
    try:
        if flat is None:
            raise DataError(f"{where}: expected values by uid")
        flat = column.taken(flat, total, where)
    except DataError:
        # One of them is not as it should be: which one?
        own: Sequence[int | None] = [None] * len(uids) if counts is None else counts
        each = [
            column.taken(item, count, f"{where}, rollout {uid!r}")
            for uid, item, count in zip(uids, items, own, strict=True)
        ]
        flat = np.concatenate([value[None] if counts is None else value for value in each])
    kind = late_schema(column).field(1).type
    values = pa.array(flat.reshape(-1))
    if pa.types.is_list(kind):
        size = int(np.prod(column.shape))
        ends = np.cumsum([0, *(counts or [1] * len(uids))]) * size
        if ends[-1] > np.iinfo(np.int32).max:
            raise DataError(f"{where}: expected fewer than 2**31 values at once, found {ends[-1]}")
        values = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, type=kind)
    return Chunk(column, uids, values)


def _flat(column: RolloutColumn, items: Sequence[Any], counts: Sequence[int] | None) -> npt.NDArray[Any] | None:
    """All values behind each other, if they are as they should be or that is still to be seen."""
    try:
        if counts is None:
            flat = np.array(items)
        else:
            arrays = list(map(np.asarray, items))
            if [array.shape[:1] for array in arrays] != [(count,) for count in counts]:
                return None
            if len({array.dtype for array in arrays}) > 1:
                return None
            flat = np.concatenate(arrays)
    except (ValueError, TypeError, RuntimeError):
        return None
    flat.flags.writeable = False  # nobody else has it, so it need not be copied
    return flat
