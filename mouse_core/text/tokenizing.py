"""tokenize: texts become a store of tokens, once for the same texts, tokenizer and recipe."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mouse_core._base.processes import results
from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.checksum import cached_json, json_with_digest
from mouse_core.files.locking import FileLock
from mouse_core.files.writing import make_folder, remove, storing, write_file
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.converting import convert
from mouse_core.formats.function_identity import digest_of
from mouse_core.spec import check_count
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.text._sources import Source, source_of
from mouse_core.text.encoding import Encoder, known
from mouse_core.text.recipes import InRow, Recipe, fields_of

# Chunks that wait for each worker.
_AHEAD = 4


def encoded(
    batches: Iterator[pa.RecordBatch], recipe: Recipe, encode: Encoder, num_workers: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a recipe makes of each batch, in order; the first error ends the iterator.

    Args:
        batches: Texts, taken a few batches ahead.
        recipe: The recipe.
        encode: The tokenizer.
        num_workers: Number of processes; 0: one thread, so that no tokenizer is called twice at a time.

    Raises:
        ConfigError: Recipe or tokenizer cannot be given to processes.
        WorkerError: A process ended early.
    """
    if num_workers:
        try:
            pickle.dumps((recipe, encode))
        except Exception as error:  # whatever the pickling of somebody's object raises
            raise ConfigError(
                f"num_workers: expected a tokenizer and recipe that can be pickled, found: {error}"
            ) from error
    ahead = 1 + _AHEAD * max(num_workers, 1)
    work = partial(_rows, recipe, encode)
    for _, rows in results(work, _numbered(batches), num_workers, "tokenize", ahead=ahead, in_order=True):
        yield rows


def _numbered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches with the number of their first row."""
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


# Of what lies in a folder: stores of another version have other names, and are never taken for those of this one.
_VERSION = 1
_SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class Tokenized:
    """The result of tokenising texts.

    Args:
        path: The folder of the store, for ``DatasetStore.open``.
        rows: The number of rows.
        texts: The number of texts, including those that a recipe left out.
        reopened: Whether the store existed already, so that nothing was tokenised.
        left_out: The number of texts that the recipe left out, if each becomes a row or an episode.
    """

    path: str
    rows: int
    texts: int
    reopened: bool = False
    left_out: int = 0

    def to_store(self, **options: Any) -> DatasetStore:
        """The tokens as a store, memory-mapped; ``options`` as ``DatasetStore.open`` takes them."""
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
    """Tokenise texts into a store on disk, or find the one that was made of the same texts before.

    In ``folder`` each combination of texts, tokenizer and recipe has a store of its own, whose name is a digest of
    them: where one of them changes another store is made, and the old one stays until somebody deletes it. A store is
    whole or not there; after an interruption at any moment the same call goes on, and keeps the files that are done.
    Several processes that want the same store wait for the one that makes it.

    All texts are read to know them again, but files whose names, sizes and times are those of the last call: then
    nothing is read but the store, which takes milliseconds.

    Tokenising runs beside reading and writing, a few hundred texts a call, of which a few wait at a time: memory does
    not grow with the texts. Fast tokenizers use all cores by themselves; ``num_workers`` is for slow ones.

    Args:
        source: Texts, or dicts of them by column, in a list or whatever else can be iterated over more than once; a
            ``datasets.Dataset``, a ``pyarrow.Table``; or the path of a file of JSON lines (``.jsonl``), of texts, one a
            line (``.txt``), of either with ``.gz`` or ``.zst`` behind its name, of a Parquet or Arrow file, of a folder
            of such, or of what ``datasets`` saved. Empty lines are left out.
        tokenizer: A ``tokenizers.Tokenizer``, of whose own truncation and padding only the side that is cut off, and
            the id of padding, count; the path of its JSON file, or of a folder with a ``tokenizer.json``, as
            ``transformers`` saves it (whose ``tokenizer_config.json`` says which tokens pad and end texts); or what is
            called as tokenizers of ``transformers`` are: ``tokenizer(texts, truncation=True,
            max_length=L)["input_ids"]``.
        folder: Where stores are kept; made where it is missing.
        recipe: ``Texts``, ``Prompts``, ``Pairs``, ``Tokens``, those of ``mouse_core.text.chat``, or one of your own.
        split: Of files that have some, the one to read; by default all.
        num_workers: Processes that tokenise; 0: a thread of this one. They are started afresh, so a script needs
            ``if __name__ == "__main__":``.
        version: A text that is part of the digest, for what is not seen otherwise. A function is known by its code, its
            defaults, what it closes over and what it reads of its module, functions and classes as well; an object by
            its class, with all that its functions read, and by what it is pickled as; a recipe of one's own by its
            class and its ``repr``. Of installed packages the code of functions counts, and the names of classes; what
            is imported by a call does not. What cannot be pickled, as a lock or a file, needs a version.
        progress: Whether a bar shows how far it is.

    Returns:
        Where the store is; ``to_store()`` opens it.

    Raises:
        ConfigError: No such file, something that is no tokenizer, or what can be iterated over only once; no id for
            padding; a tokenizer that is not known again without a ``version``.
        DataError: A damaged file; a row without a text, or a column that is missing; no row at all.
        WorkerError: A process that tokenised was ended.
        ImportError: A file of a tokenizer, and ``tokenizers`` is not installed.
        StorageError: It cannot be written; what was made so far is there for the next call.
    """
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe: expected Texts, Prompts, Pairs, Tokens or one of your own, found {recipe!r:.80}")
    root = Path(folder)
    identity, load = known(tokenizer, version)
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
            reopened = target.is_dir()  # others may have made it
            if not reopened:
                _make(texts, digest, load(), target, recipe, num_workers, progress)
    # Where a process was killed when the store had its name already.
    remove(_unfinished(target))
    store = DatasetStore.open(target, verify=False)
    beside = root / f"{name}.json"
    if (left_out := cached_json(beside).get("left out")) is None:
        left_out = max(count - (store.episodes.num_rows if "done" in recipe.schema.names else len(store)), 0)
        write_file(beside, json_with_digest({**made_of, "source": texts.name, "left out": left_out}))
    return Tokenized(str(target), len(store), count, reopened, left_out)


def _of_ones_own(recipe: Recipe, version: str) -> str:
    """Return a digest of a user-defined recipe's class; "" for this library's recipes."""
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
            raise DataError(
                f"{source.name}: expected texts that stay as they are, found others when they were read again"
            )
        if not rows:
            left_out = ", all of which were left out" if read.rows else ""
            raise DataError(f"{source.name}: expected texts that become rows, found none among {read.rows}{left_out}")

    about = About(fields=fields_of(recipe))
    stream = RowStream(path=source.name, format="text", schema=recipe.schema, batches=batches, about=about)
    try:
        convert(stream, target, to="store", shard_bytes=_SHARD_BYTES, progress=progress)
    except DataError:
        # Of texts that are mended the store has another name: nothing goes on from here.
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
    """Return the number of texts and their digest: from a cache, if they are unchanged files."""
    if source.stamp is None:
        return _digest_of(source, recipe)
    asked = json.dumps([os.path.abspath(source.name), split, str(recipe.columns)])
    note = root / f".texts-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    stamp = source.stamp()
    found = cached_json(note) if stamp else {}
    if found.get("version") == _VERSION and found.get("stamp") == stamp:
        return int(found["texts"]), str(found["texts_digest"])
    texts, digest = _digest_of(source, recipe)
    # What changed while it was read, or just before, is read again the next time.
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
