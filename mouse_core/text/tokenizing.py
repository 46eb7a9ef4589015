"""Tokenises texts (files, datasets, tables, iterables) into a store on disk; an existing store is opened."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._base.processes import results
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import cached_json, json_with_digest
from mouse_core.files.locking import FileLock
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import make_folder, remove, storing, write_file
from mouse_core.formats.base import RowDigest, RowStream
from mouse_core.formats.converting import convert
from mouse_core.formats.jobs import digest_of
from mouse_core.formats.rows import read_rows
from mouse_core.metadata import DatasetMetadata
from mouse_core.spec import check_count
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.text.recipes import JSON, Encoder, InRow, Recipe, encoder_of, fields_of, identity_of

CHUNK = 512
"""Number of texts that are passed to one call of the tokenizer."""
# A file that changed within this number of seconds before it was recorded may change again in the same clock tick of
# the file system.
_TICK = 2.0

_OF_JSON, _COMPRESSED = (".jsonl", ".ndjson"), (".gz", ".zst")
# Largest length of a line; longer lines are not text, and may come from a small compressed file.
_LONGEST_LINE = 256 << 20

_Columns = Mapping[str, pa.DataType]


@dataclass(frozen=True)
class Source:
    """Texts that can be read more than once.

    Args:
        name: The name of the texts in error messages.
        batches: A function that returns a new iterator over record batches with the columns that a recipe reads.
        stamp: A value that changes when the files change, and is computed without reading the files; None if a change
            can be detected only by reading the texts.
    """

    name: str
    batches: Callable[[], Iterator[pa.RecordBatch]]
    stamp: Callable[[], list[Any]] | None = None


def source_of(texts: Any, columns: _Columns, split: str | None) -> Source:
    """Return a source for texts of any supported type; see ``tokenize``.

    Raises:
        ConfigError: The type is not supported, or the texts can be iterated over only once.
    """
    if isinstance(texts, str | os.PathLike):
        return _of_path(Path(texts), columns, split)
    if split is not None:
        raise ConfigError(
            f"split: when the source is not a path, expected None, found {split!r} and a {type(texts).__name__}"
        )
    if isinstance(texts, pa.Table):
        return Source("the table", partial(_checked, "the table", columns, partial(_of_table, texts)))
    if hasattr(texts, "with_format") and hasattr(texts, "cache_files"):
        return _of_dataset(texts, columns)
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ConfigError(
            "source: expected texts or dicts to iterate over, a datasets.Dataset, a pyarrow.Table, or the path of JSON "
            f"lines, Parquet or Arrow files, found {type(texts).__name__}"
        )
    if iter(texts) is texts:
        raise ConfigError(
            f"source: expected texts that can be read twice, to identify and to tokenise them, found "
            f"{type(texts).__name__}, which can be read only once; pass a list, a file or a dataset"
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
            raise ConfigError(f"split: expected None, because {name!r} has no splits, found {split!r}")
        return Source(name, partial(_of_objects, name, columns, _Lines(lines)), stamp=stamp)

    def batches() -> Iterator[pa.RecordBatch]:
        stream = read_rows(path, splits=None if split is None else [split], batch_rows=CHUNK)
        yield from _checked(name, columns, partial(iter, stream))

    return Source(name, batches, stamp=stamp)


def _stamp_of(paths: Iterable[Path]) -> list[Any]:
    """Return names, sizes and times of files.

    The list is empty if a file changed just now, because a later change may then leave the time of the file unchanged.
    """
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
    """Return the files of JSON lines; raise ConfigError if the folder also has other files."""
    lines = [file for file in files if _suffix(file) in _OF_JSON]
    others = [file.name for file in files if file not in lines and not file.name.startswith(".")]
    if lines and others:
        raise ConfigError(f"source: expected only files of JSON lines in {name!r}, found also {others[:5]}")
    return lines


def _suffix(file: Path) -> str:
    """Return the suffix of a file; for a compressed file, the suffix in front of the compression's suffix."""
    return Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix


class _Lines:
    """Reads the objects in files of JSON lines; empty lines are left out."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)

    def __iter__(self) -> Iterator[Any]:
        for path in self._paths:
            # With "detect", the suffix of a file's name determines the compression.
            with reading(path), pa.input_stream(path, compression="detect") as raw:
                file = io.BufferedReader(raw)
                for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), b""), 1):
                    if not line.strip():
                        continue
                    if len(line) == _LONGEST_LINE:
                        raise damaged(path, f"expected less than {_LONGEST_LINE} bytes", at=f"line {number}")
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise damaged(path, f"expected JSON, found: {error}", at=f"line {number}") from error


# ---------------------------------------------------------------------- datasets and tables


def _of_dataset(dataset: Any, columns: _Columns) -> Source:
    files = [Path(one["filename"]) for one in dataset.cache_files]

    def stamp() -> list[Any]:
        found = _stamp_of(files)
        return [dataset._fingerprint, *found] if found else []

    def rows() -> Iterator[pa.RecordBatch]:
        # Only the requested columns, in the order of an indices mapping.
        wanted = [name for name in columns if name in dataset.column_names]
        chosen = dataset.select_columns(wanted).with_format("arrow") if wanted else dataset.with_format("arrow")
        for table in chosen.iter(CHUNK):
            check_rows(table, f"the dataset {dataset._fingerprint}", whole=False)
            yield from table.combine_chunks().to_batches()

    name = f"the dataset {dataset._fingerprint}"  # also identifies the recorded texts
    return Source(name, partial(_checked, name, columns, rows), stamp if files else None)


def _of_table(table: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from table.to_batches(max_chunksize=CHUNK)


def _checked(name: str, columns: _Columns, batches: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most ``CHUNK`` rows, with ``columns`` cast to their types."""
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
    """Convert values to JSON. Null fields of structs are left out, because Arrow adds all keys to every struct."""
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
    # The conversion through integers raises an error for fractions, which would be truncated.
    return pa.array(values).cast(wanted) if pa.types.is_integer(wanted) else pa.array(values, wanted)


def _of_objects(name: str, columns: _Columns, objects: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Convert objects (dicts, or texts if one column is read) to record batches.

    Raises:
        DataError: An object has another type, a row lacks a required value, or a column exists in no row.
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
        raise DataError(
            f"{name}: expected a column {missing!r}, found none in {row} rows; the first row has {keys!s:.200}"
        )


# Number of chunks that wait for each worker.
_AHEAD = 4


def encoded(
    batches: Iterator[pa.RecordBatch], recipe: Recipe, encode: Encoder, num_workers: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a recipe creates from each batch, in order. The first error is raised and ends the iterator.

    Args:
        batches: Batches of texts; a few batches are read in advance.
        recipe: The recipe.
        encode: The tokenizer.
        num_workers: Number of processes. With 0, a single thread calls the tokenizer.

    Raises:
        ConfigError: The recipe or the tokenizer cannot be pickled, so it cannot be sent to processes.
        WorkerError: A process ended early.
    """
    if num_workers:
        try:
            pickle.dumps((recipe, encode))
        except Exception as error:  # pickling a custom object may raise any error
            raise ConfigError(
                f"num_workers: expected a tokenizer and recipe that can be pickled, found: {error}"
            ) from error
    ahead = 1 + _AHEAD * max(num_workers, 1)
    work = partial(_rows, recipe, encode)
    for _, rows in results(work, _numbered(batches), num_workers, "tokenize", ahead=ahead, in_order=True):
        yield rows


def _numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each batch together with the index of its first row, as pairs ``(index, batch)``."""
    row = 0
    for batch in batches:
        yield row, batch
        row += batch.num_rows


def _rows(recipe: Recipe, encode: Encoder, numbered: tuple[int, pa.RecordBatch]) -> pa.RecordBatch:
    row, batch = numbered
    try:
        return recipe.rows(batch, encode)
    except InRow as error:
        raise DataError(f"row {row + error.row}: {error.message}") from error


# The version of the stores: stores of another version have other names, and are never reused.
_VERSION = 1
_SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class Tokenized:
    """The result of tokenising texts.

    Args:
        path: The folder of the store, for ``DatasetStore.open``.
        rows: The number of rows.
        texts: The number of texts, including texts that the recipe left out.
        reopened: Whether the store existed already, so that nothing was tokenised.
        left_out: The number of texts that the recipe left out, for recipes that convert each text to a row or an
            episode.
    """

    path: str
    rows: int
    texts: int
    reopened: bool = False
    left_out: int = 0

    def to_store(self, **options: Any) -> DatasetStore:
        """Return the tokens as a memory-mapped store; ``options`` are passed to ``DatasetStore.open``."""
        return DatasetStore.open(self.path, **options)


def tokenize(
    source: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    recipe: Recipe,
    *,
    split: str | None = None,
    num_workers: int = 0,
    version: str = "",
    progress: bool = False,
) -> Tokenized:
    """Tokenise texts into a store on disk, or return the existing store of the same texts.

    In ``folder``, each combination of texts, tokenizer and recipe has a separate store, whose name is a digest of all
    three. If the texts, the tokenizer or the recipe change, a new store is created; the old store stays until you
    delete it. An incomplete store is never opened. After an interruption, the same call continues and keeps the
    finished files. If several processes make the same call, one process creates the store, and the others wait.

    Each call of ``tokenize`` reads all texts to compute the digest. If the names, sizes and times of files are the same
    as in the last call, the files are not read again, and the call takes milliseconds.

    Tokenising runs in parallel with reading and writing, in blocks of a few hundred texts. Only a few blocks are
    queued, so memory does not grow with the number of texts. Fast tokenizers use all cores; ``num_workers`` is for slow
    tokenizers.

    Args:
        source: Texts, or dicts of texts by column, in a list or another iterable that can be iterated over more than
            once; a ``datasets.Dataset``; a ``pyarrow.Table``; or a path. A path names a file of JSON lines
            (``.jsonl``, also compressed, ``.gz`` or ``.zst``), a Parquet or Arrow file, a folder of such files, or a
            folder saved by ``datasets``. Empty lines are left out.
        tokenizer: A ``tokenizers.Tokenizer`` (of its truncation and padding options, only the truncated side and the id
            of padding are used); or a callable like the tokenizers of ``transformers``: ``tokenizer(texts,
            truncation=True, max_length=L)["input_ids"]``.
        folder: The folder of the stores; created if it is missing.
        recipe: ``Texts``, ``Prompts``, ``Pairs``, ``Tokens``, a recipe of ``mouse_core.text.chat``, or a custom recipe.
        split: The split to read, if the files have splits; by default all splits.
        num_workers: The number of processes that tokenise. With 0, a thread of this process tokenises. Each process
            imports the main module, so a script needs ``if __name__ == "__main__":``.
        version: A text that is part of the digest. Change ``version`` after a change that the digest does not detect.
            The digest of a function covers its code, its defaults, its closure, and the globals, functions and classes
            of its module that it uses. The digest of an object covers its class, everything that its methods use, and
            its pickle; the digest of a custom recipe covers its class and its ``repr``. Of installed packages, the
            digest covers only the code of functions and the names of classes; imports inside of a function are ignored.
            ``version`` is required for objects that cannot be pickled, such as a lock or a file.
        progress: Whether to show a progress bar.

    Returns:
        The location of the store; ``to_store()`` opens the store.

    Raises:
        ConfigError: A file does not exist; ``tokenizer`` is not a tokenizer; ``source`` can be iterated over only once;
            the id for padding is unknown; or the tokenizer cannot be identified and ``version`` is empty.
        DataError: A file is damaged, a row has no text, a column is missing, or the source has no row.
        WorkerError: A worker process ended early.
        StorageError: The store cannot be written; the next call continues with the finished files.
    """
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe: expected Texts, Prompts, Pairs, Tokens or your own recipe, found {recipe!r:.80}")
    root = Path(folder)
    identity = identity_of(tokenizer, version)
    texts = source_of(source, recipe.columns, split)
    with storing(f"tokenize: {str(folder)!r}"):
        make_folder(root)
        count, digest = _known_texts(texts, root, recipe, split)
    made_of = {
        "version": _VERSION,
        "texts": digest,
        "tokenizer": identity,
        "recipe": f"{type(recipe).__module__}.{recipe!r}{_of_ones_own(recipe, version)}",
        "said": version,
    }
    name = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    target = root / name
    reopened = target.is_dir()
    if not reopened:
        with FileLock(root / f".{name}.lock"):
            reopened = target.is_dir()  # another process may have created the store
            if not reopened:
                _make(texts, digest, encoder_of(tokenizer), target, recipe, num_workers, progress)
    # A process may have been killed after the store got its final name.
    remove(_unfinished(target))
    store = DatasetStore.open(target, verify=False)
    beside = root / f"{name}.json"
    if (left_out := cached_json(beside).get("left out")) is None:
        left_out = max(count - (store.episodes.num_rows if "done" in recipe.schema.names else len(store)), 0)
        write_file(beside, json_with_digest({**made_of, "source": texts.name, "left out": left_out}))
    return Tokenized(str(target), len(store), count, reopened, left_out)


def _of_ones_own(recipe: Recipe, version: str) -> str:
    """Return a digest of the class of a user-defined recipe; "" for recipes of this library."""
    kind = type(recipe)
    return "" if kind.__module__.startswith("mouse_core.") else f" {digest_of(kind, version, 'recipe')}"


def _make(
    source: Source, digest: str, encode: Encoder, target: Path, recipe: Recipe, num_workers: int, progress: bool
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        rows, read = 0, _digest_like(recipe)
        for batch in encoded(_watched(source.batches(), read), recipe, encode, num_workers):
            rows += batch.num_rows
            yield batch
        if read.hexdigest() != digest:
            raise DataError(f"{source.name}: expected the same texts at the second reading, found different texts")
        if not rows:
            left_out = ", all of which were left out" if read.rows else ""
            raise DataError(f"{source.name}: expected texts that become rows, found none in {read.rows} rows{left_out}")

    metadata = DatasetMetadata(fields=fields_of(recipe))
    stream = RowStream(path=source.name, format="text", schema=recipe.schema, batches=batches, metadata=metadata)
    try:
        convert(stream, target, to="store", shard_bytes=_SHARD_BYTES, progress=progress)
    except DataError:
        # After the texts are corrected, the store has another name, so no later call would continue from these files.
        remove(_unfinished(target))
        raise


def _unfinished(target: Path) -> Path:
    """Return the path where ``convert`` writes an unfinished store."""
    return target.with_name(f".{target.name}.converting")


def _watched(batches: Iterator[pa.RecordBatch], digest: RowDigest) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        digest.update(batch)
        yield batch


# ---------------------------------------------------------------------- which texts these are


def _known_texts(source: Source, root: Path, recipe: Recipe, split: str | None) -> tuple[int, str]:
    """Return how many texts there are, and the digest of the texts. If the files are unchanged, both values are read
    from a cache.
    """
    if source.stamp is None:
        return _digest_of(source, recipe)
    asked = json.dumps([os.path.abspath(source.name), split, str(recipe.columns)])
    note = root / f".texts-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    stamp = source.stamp()
    found = cached_json(note) if stamp else {}
    if found.get("version") == _VERSION and found.get("stamp") == stamp:
        return int(found["texts"]), str(found["texts_digest"])
    texts, digest = _digest_of(source, recipe)
    # Files that changed during the read, or just before, are read again by the next call.
    if stamp and source.stamp() == stamp:
        said = {"version": _VERSION, "stamp": stamp, "texts": texts, "texts_digest": digest}
        write_file(note, json_with_digest(said), sync=False)
    return texts, digest


def _digest_of(source: Source, recipe: Recipe) -> tuple[int, str]:
    digest = _digest_like(recipe)
    for _ in _watched(source.batches(), digest):
        pass
    return digest.rows, digest.hexdigest()


def _digest_like(recipe: Recipe) -> RowDigest:
    return RowDigest(pa.schema(list(recipe.columns.items())))
