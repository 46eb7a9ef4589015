"""Sources of texts: files, datasets, tables and Python iterables, as record batches of the columns to read."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.formats.rows import read_rows

JSON = pa.json_()
"""The type of columns whose values have any shape, as chats do: each is its JSON, and a text one in quotes."""
CHUNK = 512
"""How many texts are tokenised in one call."""
# A file that changed so many seconds before it was noted may change again in the same tick of the file system's clock.
_TICK = 2.0

_OF_JSON, _OF_TEXT, _COMPRESSED = (".jsonl", ".ndjson"), (".txt",), (".gz", ".zst")
# A longer line is no text, and may come of a small compressed file.
_LONGEST_LINE = 256 << 20

_Columns = Mapping[str, pa.DataType]


@dataclass(frozen=True)
class Source:
    """Texts that can be read more than once.

    Args:
        name: What messages call them.
        batches: Gives a new iterator over record batches of the columns that were asked for.
        stamp: What says of files, without reading them, whether they are as they were; None where nothing does.
    """

    name: str
    batches: Callable[[], Iterator[pa.RecordBatch]]
    stamp: Callable[[], list[Any]] | None = None


def source_of(texts: Any, columns: _Columns, split: str | None) -> Source:
    """Texts of any kind; see ``tokenize``.

    Raises:
        ConfigError: Nothing of these kinds, or what can be iterated over once.
    """
    if isinstance(texts, str | os.PathLike):
        return _of_path(Path(texts), columns, split)
    if split is not None:
        raise ConfigError(f"split: expected one for a path alone, found {split!r} for {type(texts).__name__}")
    if isinstance(texts, pa.Table):
        return Source("the table", partial(_checked, "the table", columns, partial(_of_table, texts)))
    if hasattr(texts, "with_format") and hasattr(texts, "cache_files"):
        return _of_dataset(texts, columns)
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ConfigError(
            "source: expected texts or dicts to iterate over, a datasets.Dataset, a pyarrow.Table, or the path of JSON "
            f"lines, texts, Parquet or Arrow files, found {type(texts).__name__}"
        )
    if iter(texts) is texts:
        raise ConfigError(
            f"source: expected texts that can be read twice, to know them again and to tokenise them, found "
            f"{type(texts).__name__}, which can be read once; give a list, a file or a dataset"
        )
    return Source("the texts", partial(_of_objects, "the texts", columns, texts))


# ---------------------------------------------------------------------- files


def _of_path(path: Path, columns: _Columns, split: str | None) -> Source:
    if not path.exists():
        raise ConfigError(f"source: expected a file or folder, found nothing at {str(path)!r}")
    name = str(path)
    stamp = partial(_stamp_of, [path])
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if lines := _of_lines(files, name):
        if split is not None:
            raise ConfigError(f"split: expected one for files that have some, found {split!r} for {name!r}")
        return Source(name, partial(_of_objects, name, columns, _Lines(lines)), stamp=stamp)

    def batches() -> Iterator[pa.RecordBatch]:
        stream = read_rows(path, splits=None if split is None else [split], batch_rows=CHUNK)
        yield from _checked(name, columns, partial(iter, stream))

    return Source(name, batches, stamp=stamp)


def _stamp_of(paths: Iterable[Path]) -> list[Any]:
    """Names, sizes and times of files, and whether all changed long enough ago to be told by these."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found: list[Any] = []
    for file in files:
        if file.is_file():
            state = file.stat()
            if time.time() < state.st_mtime + _TICK:
                return []
            found.append([str(file.absolute()), state.st_size, state.st_mtime_ns])
    return found


def _of_lines(files: list[Path], name: str) -> list[Path]:
    """Files of lines; none where others lie there, beside which a text is no more than a note.

    Raises:
        ConfigError: Others lie beside files of JSON lines.
    """
    seen = [file for file in files if not file.name.startswith(".")]
    lines = [file for file in files if _suffix(file) in _OF_JSON]
    if not lines and seen and all(_suffix(file) in _OF_TEXT for file in seen):
        return seen
    others = [file.name for file in seen if file not in lines]
    if lines and others:
        raise ConfigError(f"source: expected files of JSON lines alone in {name!r}, found also {others[:5]}")
    return lines


def _suffix(file: Path) -> str:
    """Return a file's suffix before the suffix of its compression."""
    return Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix


class _Lines:
    """The objects of files of JSON lines, or the lines of texts; empty lines are left out."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)

    def __iter__(self) -> Iterator[Any]:
        for path in self._paths:
            read = json.loads if _suffix(path) in _OF_JSON else _text_of
            # With "detect" a name's end says how it is compressed.
            with reading(path), pa.input_stream(path, compression="detect") as raw:
                file = io.BufferedReader(raw)
                for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), 1):
                    if not line.strip():
                        continue
                    if len(line) == _LONGEST_LINE:
                        raise damaged(path, f"expected less than {_LONGEST_LINE} bytes", at=f"line {number}")
                    try:
                        yield read(line)
                    except (ValueError, RecursionError) as error:
                        what = "UTF-8" if read is _text_of else "JSON"
                        raise damaged(path, f"expected {what}, found: {error}", at=f"line {number}") from error


def _text_of(line: bytes) -> str:
    return line.decode("utf-8-sig").rstrip("\r\n")


# ---------------------------------------------------------------------- datasets and tables


def _of_dataset(dataset: Any, columns: _Columns) -> Source:
    files = [Path(one["filename"]) for one in dataset.cache_files]

    def stamp() -> list[Any]:
        found = _stamp_of(files)
        return [dataset._fingerprint, *found] if found else []

    def rows() -> Iterator[pa.RecordBatch]:
        # Only the columns that are read, in the order of an indices mapping.
        wanted = [name for name in columns if name in dataset.column_names]
        chosen = dataset.select_columns(wanted).with_format("arrow") if wanted else dataset.with_format("arrow")
        for table in chosen.iter(CHUNK):
            check_rows(table, f"the dataset {dataset._fingerprint}", whole=False)
            yield from table.combine_chunks().to_batches()

    name = f"the dataset {dataset._fingerprint}"  # by which it is noted, too
    return Source(name, partial(_checked, name, columns, rows), stamp if files else None)


def _of_table(table: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from table.to_batches(max_chunksize=CHUNK)


def _checked(name: str, columns: _Columns, batches: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Batches of at most ``CHUNK`` rows, of these columns in these types."""
    row = 0
    for whole in batches():
        for begin in range(0, whole.num_rows, CHUNK):
            batch = whole.slice(begin, CHUNK)
            check_rows(batch, f"{name}, rows from {row} on", whole=False)
            made = []
            for column, wanted in columns.items():
                if column not in batch.schema.names:
                    raise DataError(f"{name}: expected a column {column!r}, found {batch.schema.names}")
                found = batch[column]
                if wanted == JSON:
                    made.append(_as_json(found))
                    continue
                if found.null_count:
                    first = row + found.is_null().to_pylist().index(True)
                    raise DataError(f"{name}: expected a value in column {column!r}, found none in row {first}")
                if pa.types.is_string(wanted) and not _is_text(found.type):
                    raise DataError(f"{name}: expected text in column {column!r}, found {found.type}")
                try:
                    made.append(found.cast(wanted))
                except pa.ArrowException as error:
                    raise DataError(
                        f"{name}: column {column!r}, rows {row}..{row + len(batch) - 1}: {error}"
                    ) from error
            yield pa.RecordBatch.from_arrays(made, schema=pa.schema(list(columns.items())))
            row += len(batch)


def _as_json(found: pa.Array) -> pa.Array:
    """Values as JSON; of structs what is null is left out, as every row has all keys."""
    if isinstance(found.type, pa.JsonType):
        return found.storage.cast(pa.string()).cast(JSON)
    return _array_of([_without_nulls(one) for one in found.to_pylist()], JSON)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_text(found: pa.DataType) -> bool:
    value = found.value_type if pa.types.is_dictionary(found) else found
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value))


# ---------------------------------------------------------------------- objects of Python


def _array_of(values: list[Any], wanted: pa.DataType) -> pa.Array:
    if wanted == JSON:
        said = [None if one is None else json.dumps(one, ensure_ascii=False) for one in values]
        return pa.array(said, pa.string()).cast(JSON)
    # Of integers the detour refuses fractions, which would be cut off.
    return pa.array(values).cast(wanted) if pa.types.is_integer(wanted) else pa.array(values, wanted)


def _of_objects(name: str, columns: _Columns, objects: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Texts, where one column is read, or dicts.

    Raises:
        DataError: Neither; a row without what a column has to have; no row that has a column.
    """
    alone = next(iter(columns)) if len(columns) == 1 else None
    kind = list if alone is not None and columns[alone] == JSON else str
    row, rest, unseen = 0, iter(objects), set(columns)
    keys: list[Any] = []
    while chunk := list(islice(rest, CHUNK)):
        values: dict[str, list[Any]] = {column: [] for column in columns}
        for number, one in enumerate(chunk, row):
            if alone is not None and isinstance(one, kind):
                values[alone].append(one)
                unseen.discard(alone)
                continue
            if not isinstance(one, Mapping):
                wanted = f"a {'text' if kind is str else 'list'} or a dict" if alone else "a dict"
                raise DataError(f"{name}: expected {wanted}, found {one!r:.80} in row {number}")
            keys = keys or list(one)
            unseen.difference_update(one)
            for column, wanted_type in columns.items():
                value = one.get(column)
                is_text = pa.types.is_string(wanted_type)
                if wanted_type != JSON and (value is None or (is_text and not isinstance(value, str))):
                    raise DataError(
                        f"{name}: expected {'text' if is_text else wanted_type} in column "
                        f"{column!r}, found {value!r:.80} in row {number}"
                    )
                values[column].append(value)
        try:
            arrays = [_array_of(values[column], wanted_type) for column, wanted_type in columns.items()]
        except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(f"{name}: rows {row}..{row + len(chunk) - 1}: {error}") from error
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(columns.items())))
        row += len(chunk)
    if row and unseen:
        missing = next(column for column in columns if column in unseen)
        raise DataError(f"{name}: expected a column {missing!r}, found none in {row} rows; the first has {keys!s:.200}")
