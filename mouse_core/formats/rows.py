"""Rows as this library keeps them: datasets on disk, Arrow and Parquet files, read without trusting a byte of them."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.formats._parquet import open_parquet, parquet_batches
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged, reading
from mouse_core.spec import check_alignment

_SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?")
_SUFFIXES = (".arrow", ".parquet")
_MARK = "mouse_alignment:"
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# What a description may take.
_MOST_JSON = 64 << 20
# A batch as it lies in a file may be of any size; it is handed on in pieces of about this many bytes.
_BATCH_BYTES = 16 << 20
# After so many bytes pages of a mapped file are let go; looking at the head of a batch brings in about so many.
_RELEASED = 64 << 20
_TOUCHED = 128 << 10


def read_rows(
    path: str | os.PathLike[str], *, splits: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
) -> RowStream:
    """Read a folder that ``save_to_disk`` wrote, an Arrow or Parquet file, or a folder of such files.

    Every record batch is validated before anything looks into it, and page checksums of Parquet files are verified
    where there are any. Arrow files carry no checksums: damage that leaves a value a value is not seen.

    Args:
        path: The file or folder. A folder of files with names such as ``train-00000-of-00002.parquet``, also inside a
            folder ``data``, has splits.
        splits: Names of the splits to read, in this order; by default all.
        batch_rows: How many rows a batch has, at most.

    Raises:
        ConfigError: Nothing there, nothing of this kind, or a split that is not there.
        DataError: A file is damaged.
        SchemaError: Files whose columns do not fit together, or that state different alignments.
    """
    root = Path(path)
    found = _files_by_split(root)
    for name in splits or ():
        if name not in found:
            raise ConfigError(f"split: expected one of {list(found)}, found {name!r}")
    files = [file for name in splits or found for file in found[name]]
    schemas = {file: _schema_of(file) for file in files}
    schema = _common(schemas)
    alignments = {file: _declared(file, schemas[file]) for file in files}
    stated = {file: name for file, name in alignments.items() if name is not None}
    if len(set(stated.values())) > 1:
        raise SchemaError(
            f"{root}: expected one alignment, found { ({str(file): name for file, name in stated.items()}) }"
        )
    declared = next(iter(stated.values()), None)
    return RowStream(
        path=str(root),
        format="datasets" if any(file.suffix == ".arrow" for file in files) else "parquet",
        schema=schema,
        batches=partial(_batches, files, schema, batch_rows),
        alignment=check_alignment(declared or "arrived"),
        rows=sum(_count(file) for file in files),
        metadata={
            "splits": {name: [str(file) for file in found[name]] for name in found},
            "alignment_declared": declared,
        },
    )


def is_rows(path: Path) -> bool:
    """Whether ``read_rows`` is meant for what lies there."""
    try:
        return bool(_files_by_split(path))
    except ConfigError:
        return False
    except DataError:
        return True


# ---------------------------------------------------------------------- which files


def _files_by_split(root: Path) -> dict[str, list[Path]]:
    if root.is_file() and root.suffix in _SUFFIXES:
        return {"train": [root]}
    if (root / "dataset_dict.json").is_file():
        listed = read_json_object(root / "dataset_dict.json").get("splits")
        if not isinstance(listed, list) or not listed:
            raise damaged(root / "dataset_dict.json", f"expected the names of splits, found {listed!r}")
        names = [_plain_name(name, root / "dataset_dict.json") for name in listed]
        return {name: _saved_files(root / name) for name in names}
    if (root / "state.json").is_file():
        name = read_json_object(root / "state.json").get("_split")
        return {name if isinstance(name, str) and name else "train": _saved_files(root)}
    for folder in (root, root / "data"):
        files = sorted(file for file in folder.glob("*") if file.suffix in _SUFFIXES) if folder.is_dir() else []
        if files:
            splits: dict[str, list[Path]] = {}
            for file in files:
                match = _SHARD.fullmatch(file.stem)
                splits.setdefault(match["split"] if match else "train", []).append(file)
            return splits
    raise ConfigError(f"{root}: expected Arrow or Parquet files, found none")


def _saved_files(folder: Path) -> list[Path]:
    state = read_json_object(folder / "state.json")
    if state.get("_indices_data_files"):
        raise ConfigError(f"{folder}: expected a dataset without an indices mapping; save it with flatten_indices()")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise damaged(folder / "state.json", "expected _data_files as a list of files")
    files = [folder / _plain_name(entry.get("filename"), folder / "state.json") for entry in listed]
    for file in files:
        if not file.is_file():
            raise damaged(folder / "state.json", f"expected the file {file.name!r} that it names, found none")
    return files


def _plain_name(name: object, file: Path) -> str:
    # A dataset must not reach for files outside of its folder.
    if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name or "\\" in name:
        raise damaged(file, f"expected the name of a file in the same folder, found {name!r}")
    return name


def read_json_object(file: Path) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        DataError: The file is damaged, or holds something else.
    """
    with reading(file):
        if file.stat().st_size > _MOST_JSON:
            raise damaged(file, f"expected at most {_MOST_JSON} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, Mapping):
        raise damaged(file, f"expected a JSON object, found {type(found).__name__}")
    return found


# ---------------------------------------------------------------------- schemas


def _schema_of(file: Path) -> pa.Schema:
    with reading(file):
        if file.suffix == ".parquet":
            schema = open_parquet(file).schema_arrow
        else:
            with _mapped(file) as (source, _):
                schema = _reader(source).schema
        str(schema)  # names that are no text show here
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError(f"{file}: expected columns of different names, found {schema.names}")
    return schema


def _common(schemas: Mapping[Path, pa.Schema]) -> pa.Schema:
    first_file, first = next(iter(schemas.items()))
    for file, schema in schemas.items():
        if schema.names != first.names:
            raise SchemaError(f"{file}: expected the columns of {first_file.name}, {first.names}, found {schema.names}")
        for ours, theirs in zip(first, schema, strict=True):
            if ours.type != theirs.type:
                raise SchemaError(
                    f"{file}: column {ours.name!r}: expected {ours.type} as in {first_file.name}, found {theirs.type}"
                )
    return first


def _declared(file: Path, schema: pa.Schema) -> str | None:
    """The alignment that the file, or the description of its dataset, states."""
    stated = (schema.metadata or {}).get(b"mouse_alignment")
    if stated is not None:
        return _checked(stated.decode(errors="replace"), file)
    info = file.parent / "dataset_info.json"
    if file.suffix == ".arrow" and info.is_file():
        for line in str(read_json_object(info).get("description", "")).splitlines():
            if line.startswith(_MARK):
                return _checked(line[len(_MARK) :].strip(), info)
    return None


def _checked(stated: str, file: Path) -> str:
    if stated not in ("arrived", "outgoing"):
        raise damaged(file, f"expected the alignment 'arrived' or 'outgoing', found {stated!r}")
    return stated


# ---------------------------------------------------------------------- rows


def _batches(files: Sequence[Path], schema: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for file in files:
        read = parquet_batches if file.suffix == ".parquet" else _arrow_batches
        for batch in read(file, batch_rows):
            if not batch.schema.equals(schema):
                batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            yield from _pieces(batch, batch_rows)


def _arrow_batches(file: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    with reading(file), _mapped(file) as (source, release):
        reader = _reader(source)
        for number, read in enumerate(_each(reader)):
            with reading(file, at=f"record batch {number}"):
                batch = read()
                if batch is None:
                    return
                batch.validate(full=True)
                _check_size(batch, file, number)
            yield batch
            release(batch.nbytes)


@contextmanager
def _mapped(file: Path) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """A file mapped into memory, and a function to say that so many bytes of it have been read.

    Pages that were read count as the process's memory until they are let go, which the function does now and then.
    """
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    seen = 0

    def release(count: int) -> None:
        nonlocal seen
        seen += count
        if seen >= _RELEASED and hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)
            seen = 0

    # The mapping ends when the last batch that lies in it is gone.
    yield pa.BufferReader(pa.py_buffer(mapped)), release


def _each(reader: Any) -> Iterator[Any]:
    """Functions that read one record batch each; the last gives None."""
    if isinstance(reader, pa.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield partial(reader.get_batch, number)
        yield lambda: None
        return

    def following() -> pa.RecordBatch | None:
        try:
            return reader.read_next_batch()
        except StopIteration:
            return None

    while True:
        yield following


def _reader(source: Any) -> Any:
    """A reader of the stream format, which ``datasets`` writes, or of the file format."""
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    if not is_file:
        # Whoever finished a stream wrote this; without it a file that was cut between batches would seem whole.
        source.seek(max(source.size() - len(_END_OF_STREAM), 0))
        if source.read() != _END_OF_STREAM:
            raise DataError("expected an Arrow stream that ends with its end mark; it was cut or never finished")
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _check_size(batch: pa.RecordBatch, file: Path, number: int) -> None:
    # Columns of type null take no room whatever length they claim.
    if all(pa.types.is_null(data_type) for data_type in batch.schema.types) and batch.num_rows > 1 << 32:
        raise damaged(file, f"expected rows, found {batch.num_rows} without a value", at=f"record batch {number}")


def _pieces(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    each = max(1, batch.nbytes // max(1, batch.num_rows))
    most = max(1, min(batch_rows, _BATCH_BYTES // each))
    for first in range(0, batch.num_rows, most):
        yield batch.slice(first, most)


def _count(file: Path) -> int:
    with reading(file):
        if file.suffix == ".parquet":
            return int(open_parquet(file).metadata.num_rows)
        rows = 0
        with _mapped(file) as (source, release):
            for read in _each(_reader(source)):
                batch = read()
                if batch is None:
                    break
                rows += batch.num_rows
                release(_TOUCHED)
        return rows
