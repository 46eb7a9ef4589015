"""preprocess: write what a function makes of all rows to a new dataset, in parallel; an interrupted call goes on."""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from mouse_core._base.processes import results
from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About, read_about, with_about
from mouse_core.errors import AlignmentWarning, ConfigError, DataError, MouseError, WorkerError
from mouse_core.formats._files.jobs import NOTE, Job, Part, check_rows, check_same, job_folder, read_note
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats._files.shards import ShardWriter, dataset_schema, describe, link_parts
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.columns.embedding import embedded
from mouse_core.formats.columns.named import Columns, from_arrow, to_arrow
from mouse_core.formats.function_identity import identity, pickled
from mouse_core.formats.opening import open
from mouse_core.formats.rows import read_rows
from mouse_core.spec import check_count, check_list
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

__all__ = ["Preprocessed", "preprocess"]

_MADE = "preprocessed.json"
_BLOCK_BYTES = 64 << 20
# So that 8 processes have 4 blocks each of rows that are small; as many for any number of processes, which may be
# another one when a call goes on.
_LEAST_BLOCKS, _FEW_ROWS = 32, 1_000


@dataclass(frozen=True)
class Preprocessed:
    """What became of a dataset.

    Args:
        path: Where the new one is: a folder for ``datasets.load_from_disk`` and ``formats.open``.
        rows: How many rows it has.
        digest: Of all of them; see ``rows_digest``.
        resumed_rows: Rows that a call before had made already.
        reopened: Whether all was there, and nothing was computed.
    """

    path: str
    rows: int
    digest: str
    resumed_rows: int = 0
    reopened: bool = False

    def to_store(self, **options: Any) -> DatasetStore:
        """The new dataset as a store, by reference; ``options`` as ``DatasetStore`` takes them."""
        return open(self.path).to_store(**options)


def preprocess(
    rows: Any,
    function: Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    num_workers: int = 0,
    version: str = "",
    block_rows: int | None = None,
    progress: bool = False,
) -> Preprocessed:
    """Write what a function makes of every row to a new dataset, which says of itself what the old one does.

    The function is called with the columns of some whole episodes, ``{name: array [n, ...]}``, encoded images as
    pixels, and returns a dict of columns ``[n, ...]`` of the same rows: those that are new or other than before; None
    for one that is to be left out. All others are taken over as they are stored. It must be pure: blocks are made in
    any order and, after an interruption, again. What it is given is read-only.

    Blocks are files of a folder ``.NAME.preprocessing`` beside ``path``, which becomes ``path`` when all is there and
    was read back. After an interruption at any moment the same call goes on where it was, with any ``num_workers``.
    When all is there, and rows and function are the same, nothing is done; all rows are read to see that they are. Of
    images that rows name by path the path counts. The same function is one of the same name,
    code and arguments, which reads the same of its module, functions and classes as well. Of installed packages the
    code of functions counts, and the names of classes: change ``version`` when they change.

    Args:
        rows: A store, a view of one or a snapshot; a ``RowStream``, or a path that ``formats.open`` opens; or a
            ``datasets.Dataset`` or ``pyarrow.Table``. Derived fields are columns like the others.
        function: What can be pickled: defined with ``def`` at the top of a module, with ``functools.partial`` of it for
            arguments, or an object of such a class.
        path: The folder of the new dataset.
        columns: Those that the function is given; by default all.
        num_workers: Processes that run it; 0: the calling one does. They are started afresh, so a script needs
            ``if __name__ == "__main__":``.
        version: Of what the function does, a text; needed where it reads what cannot be pickled, as a lock.
        block_rows: About how many rows a block has, in whole episodes; by default as many as take 64 MB, or a 32nd of
            all rows where that is less (but 1,000). With another number unfinished work begins anew.
        progress: Whether a bar shows how far it is.

    Returns:
        Where the new dataset is; ``to_store()`` opens it.

    Raises:
        ConfigError: A function that cannot be pickled, no rows, an option out of range, another dataset or unfinished
            work at ``path`` that is not of these rows and this function, or another process at work on it.
        WorkerError: The function raised an error, which is chained, or a process was ended.
        DataError: Rows that cannot be arrays, or a function that returns something else than columns of these rows.
        StorageError: It cannot be written; what was made so far is there for the next call. Where the disk is full that
            may lack the blocks that were made last, which could not be noted.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder")
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    names = None if columns is None else check_list("columns", columns)
    snapshot, about = _snapshot_of(rows)
    schema = pa.schema(list(stored_types(snapshot.segments).items()))
    for name in names or ():
        if name not in schema.names:
            raise ConfigError(f"columns: expected some of {schema.names}, found {name!r}")
    made_of = {
        "rows": f"{len(snapshot)} rows {snapshot.fingerprint}",
        "columns of the rows": str(schema.remove_metadata()),
        "metadata of the rows": about.to_json(),
        **identity(function, version),
        "columns": names,
    }
    work = Work(snapshot, schema, pickled(function), names, about, target)
    if (target / _MADE).is_file():
        return _reopened(target, made_of, work)
    blocks = [(number, *edges) for number, edges in enumerate(pairwise(_edges(snapshot, schema, block_rows)))]
    with (
        job_folder(target, "preprocessing", "preprocess") as folder,
        Job(folder, "preprocess", made_of, in_order=False) as job,
    ):
        if not {(number, part.first, part.first + part.rows) for number, part in job.parts.items()} <= {*blocks}:
            job.begin_anew()
        job.check_rows(work.source_digest)
        resumed = job.rows
        with progress_bar("preprocessing", total=len(snapshot), unit="rows", enabled=progress) as advance:
            advance(resumed)
            _make_parts(job, replace(work, folder=folder), blocks, num_workers, advance)
        made = _noted_schema(job.facts)
        parts, whole = [job.parts[number] for number, _, _ in blocks], RowDigest(made)
        for part in parts:
            digest = quick_digest(made)
            file = folder / next(iter(part.files))
            for batch in read_rows(file):
                digest.update(batch)
                whole.update(batch)
            if digest.hexdigest() != part.facts:
                file.unlink()
                raise DataError(f"{file}: expected the rows that were written, found others; call again")
        job.facts["digest"] = whole.hexdigest()
        job.save()
        result = job.result_folder()
        counts = link_parts(folder, result, {name: part.rows for part in parts for name in part.files}, "arrow")
        describe(result, dataset_schema(made, about, "preprocess"), about, counts, whole.hexdigest())
        shutil.copyfile(folder / NOTE, result / _MADE)
        job.finish(result, target)
    return Preprocessed(str(target), len(snapshot), whole.hexdigest(), resumed)


def _make_parts(
    job: Job, work: Work, blocks: Sequence[tuple[int, int, int]], num_workers: int, advance: Callable[[int], None]
) -> None:
    """Write the parts that are missing. The first one says which columns there are."""
    todo = [block for block in blocks if block[0] not in job.parts]
    made = _noted_schema(job.facts) if job.parts else None
    workers, ahead = min(num_workers, len(todo)), 2 * num_workers or 1
    with closing(results(work.run, todo, workers, "preprocess", ahead=ahead, in_order=False)) as done:
        for (number, begin, end), (part, schema) in done:
            where = _called(begin, end)
            if made is None:
                (table,) = ([*read_rows(work.folder / name)] for name in part.files)
                _check_opens(pa.Table.from_batches(table), work.about, where)
                made, job.facts["schema"] = schema, base64.b64encode(schema.serialize()).decode()
            elif schema != made:
                raise DataError(f"{where}: expected columns as the first rows have them, {_in_words(made, schema)}")
            job.add(part, number)
            advance(part.rows)


def _noted_schema(facts: Mapping[str, Any]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(facts["schema"])))


def _snapshot_of(rows: Any) -> tuple[Snapshot, About]:
    """The snapshot of whatever rows are given as, and what they say of themselves."""
    if isinstance(rows, str | os.PathLike):
        rows = open(rows)
    if isinstance(rows, RowStream):
        rows = rows.to_store()
    elif not isinstance(rows, Store | Snapshot):
        said = read_about(rows, where="rows").alignment if isinstance(rows, pa.Table) or hasattr(rows, "info") else None
        rows = DatasetStore(alignment=said).from_dataset(rows)
    if isinstance(rows, Snapshot):
        snapshot, about = rows, About("outgoing" if rows.alignment == "outgoing" else None)
    else:
        snapshot, about = rows.snapshot(), rows.about
    if snapshot.has_shares:
        raise ConfigError(
            "rows: expected those of a member of a mixture, found the mixture, whose shares would be lost"
        )
    if not len(snapshot):
        raise ConfigError("rows: expected some, found none")
    return snapshot, about


def _edges(snapshot: Snapshot, schema: pa.Schema, block_rows: int | None) -> list[int]:
    """The first row of each block, and the end: where episodes begin, about so many rows apart."""
    if block_rows is None:
        some = stored_rows(snapshot, 0, min(len(snapshot), 256), schema)
        share = max(_FEW_ROWS, -(-len(snapshot) // _LEAST_BLOCKS))
        block_rows = max(1, min(_BLOCK_BYTES * len(some) // max(some.nbytes, 1), share))
    check_count("block_rows", block_rows)
    starts = snapshot.episode_starts
    wanted = np.arange(0, len(snapshot), block_rows)
    # The last block takes what is left of the rows.
    edges = starts[np.searchsorted(starts, wanted, side="right") - 1]
    return [*dict.fromkeys(edges.tolist()), len(snapshot)]


def _reopened(target: Path, made_of: Mapping[str, Any], work: Work) -> Preprocessed:
    """Return what an earlier call made of the same rows and function."""
    others = f"preprocess: {str(target)!r} was made", "give another path, or delete it"
    noted, parts, facts, _ = read_note(target / _MADE, others[1])
    check_same(noted, made_of, *others)
    if sum(part.rows for part in parts.values()) != len(work.snapshot):
        raise DataError(f"{target / _MADE}: expected parts of {len(work.snapshot)} rows, found {parts}")
    check_rows(parts, work.source_digest, *others)
    rows = read_rows(target).rows or 0
    return Preprocessed(str(target), rows, str(facts.get("digest")), rows, reopened=True)


# ---------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Work:
    """What is done with every block of rows.

    Args:
        snapshot: The rows.
        schema: Schema of the columns that all rows have.
        function: The pickled function.
        columns: The columns that the function is given; None: all.
        about: Metadata of the new rows.
        folder: Folder of the files.
    """

    snapshot: Snapshot
    schema: pa.Schema
    function: bytes
    columns: tuple[str, ...] | None
    about: About
    folder: Path

    def run(self, block: tuple[int, int, int]) -> tuple[Part, pa.Schema]:
        """Write what the function makes of a block, given by number, first row and end; return the part and its schema.

        Raises:
            WorkerError: The function raises an error.
            DataError: Rows that the function cannot be given, or it returns something else than columns of these rows.
            OSError: The file cannot be written.
        """
        number, begin, end = block
        where = _called(begin, end)
        source = stored_rows(self.snapshot, begin, end, self.schema)
        table = _with_images(source, self.snapshot, where)
        given = {name: _values(table, name, where) for name in self.columns or table.schema.names}
        function = pickle.loads(self.function)
        try:
            returned = function(dict(given))
        except Exception as error:  # of code that is not ours
            raise WorkerError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        table = _replaced(table, given, returned, where)
        schema = dataset_schema(table.schema, self.about, "preprocess")
        with ShardWriter(self.folder, number, "arrow", schema) as writer:
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                writer.write(batch)
            names, _ = writer.finish()
        part = Part.written(self.folder, names, begin, end - begin, contents(source), contents(table))
        return part, table.schema

    def source_digest(self, part: Part) -> str:
        """Return the digest of the rows of a part as the source has them now."""
        return contents(stored_rows(self.snapshot, part.first, part.first + part.rows, self.schema))


def _called(begin: int, end: int) -> str:
    return f"preprocess: rows {begin}..{end - 1}"


def stored_rows(snapshot: Snapshot, begin: int, end: int, schema: pa.Schema) -> pa.Table:
    """Rows ``begin .. end - 1`` as a table in one piece; columns that a part of the store lacks are null in it."""
    parts, first = [], 0
    for segment in snapshot.segments:
        low, high = max(begin - first, 0), min(end - first, segment.num_rows)
        first += segment.num_rows
        if low >= high:
            continue
        table = segment.take(low, high - low)
        parts.append(pa.table([_column(table, field) for field in schema], schema=schema))
    return pa.concat_tables(parts).combine_chunks()


def contents(table: pa.Table) -> str:
    """A digest of what some rows hold, whatever Arrow's encoding of them; of images by path, of the path."""
    digest = quick_digest(table.schema)
    for batch in table.to_batches():
        digest.update(batch)
    return digest.hexdigest()


def quick_digest(schema: pa.Schema) -> RowDigest:
    """What tells rows from others that came by chance, many times as fast as SHA-256."""
    return RowDigest(schema, xxhash.xxh3_128)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.schema.names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    # Not cast where nothing changes: pyarrow's cast breaks slices of structs that hold nulls throughout.
    return column if column.type == field.type else column.cast(field.type)


def _with_images(table: pa.Table, snapshot: Snapshot, where: str) -> pa.Table:
    """The rows with the images that they name by path, which means nothing elsewhere."""
    roots = tuple(dict.fromkeys(root for segment in snapshot.segments for root in segment.image_roots))
    stream = RowStream(where, "rows", table.schema, lambda: iter(table.to_batches()), image_roots=roots)
    inside = embedded(stream)
    return table if inside is stream else pa.Table.from_batches(list(inside), table.schema).combine_chunks()


def _values(table: pa.Table, name: str, where: str) -> npt.NDArray[Any]:
    try:
        values = from_arrow(table.column(name), where=f"{where}: column {name!r}")
    except MouseError as error:
        raise DataError(f"{error}; columns=[...] names those that the function is given") from error
    # Changes in place would be lost for some types and not for others, as what comes back untouched stays as stored.
    values.flags.writeable = False
    return values


def _replaced(table: pa.Table, given: Columns, returned: Any, where: str) -> pa.Table:
    """The rows with the columns that a function returned in their places, or behind the others."""
    if not isinstance(returned, Mapping):
        raise DataError(f"{where}: expected a function that returns a dict of columns, found {returned!r:.80}")
    for name, values in returned.items():
        if not isinstance(name, str):
            raise DataError(f"{where}: expected names of columns, found {name!r:.80}")
        place = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(place) if place >= 0 else table
        elif values is not given.get(name):  # what comes back untouched stays as it is stored
            array = np.asarray(values)
            if array.shape[:1] != (table.num_rows,):
                raise DataError(
                    f"{where}: expected {table.num_rows} rows of column {name!r}, as many as the function was given, "
                    f"found an array of shape {list(array.shape)}"
                )
            column = to_arrow(array, where=f"{where}: column {name!r}")
            table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return table


def _check_opens(table: pa.Table, about: About, where: str) -> None:
    """Raise the error with which a store refuses such rows, before all of them are made."""
    if {"action", "reward", "done"} <= {*table.schema.names}:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AlignmentWarning)  # the source has said it, where it was opened
                store = DatasetStore(alignment=about.alignment).from_dataset(with_about(table, about))
            len(store.snapshot().spec)
        except MouseError as error:
            raise DataError(f"{where}: expected rows that a store takes: {error}") from error


def _in_words(wanted: pa.Schema, found: pa.Schema) -> str:
    types = {field.name: field.type for field in wanted}, {field.name: field.type for field in found}
    differing = [name for name in dict.fromkeys([*types[0], *types[1]]) if types[0].get(name) != types[1].get(name)]
    name = differing[0] if differing else wanted.names[0]
    return f"{name!r} of {types[0].get(name, 'no values')}, found {types[1].get(name, 'none')}"
