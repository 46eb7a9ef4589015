"""Writes recorded data to a new dataset, either unchanged or after a function changed the rows.

A repeated call resumes interrupted work.
"""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.processes import results
from mouse_core._base.progress import progress_bar
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import AlignmentWarning, ConfigError, DataError, MouseError, WorkerError
from mouse_core.files.checksum import RunningDigest
from mouse_core.files.writing import link_or_copy, make_folder
from mouse_core.formats import base
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats.columns import blocks, check_size, from_arrow, to_arrow
from mouse_core.formats.jobs import NOTE, Job, Part, check_rows, check_same, identity, locked_job, pickled, read_note
from mouse_core.formats.opening import open as open_rows
from mouse_core.formats.pictures import by_column, changed_stream, pictures_of
from mouse_core.formats.rows import read_rows
from mouse_core.formats.store import as_schema
from mouse_core.metadata import DatasetMetadata, read_metadata, with_metadata
from mouse_core.spec import check_count, check_list
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.disk.folder import Manifest, Sealed, new_identity, write_manifest
from mouse_core.store.disk.segments import LAYOUTS, MOST_BYTES, one_batch, write_segment
from mouse_core.store.evidence import FirstRows
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store
from mouse_core.video.frames import carry_videos


class SegmentWriter:
    """Writes one sealed segment of a store; its rows stay in memory until ``finish``.

    Args:
        folder: The folder of the store, which contains the folder ``segments``.
        number: Index of the segment.
        schema: Schema of the rows; batches are cast to it.
        layout: See ``DatasetStore.open``.
    """

    def __init__(self, folder: Path, number: int, schema: pa.Schema, layout: str) -> None:
        self._folder, self._number, self._layout = folder, number, layout
        self._schema = schema.remove_metadata()
        self._tables: list[pa.Table] = []
        self.bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        self._tables.append(pa.Table.from_batches([batch]).cast(self._schema))
        self.bytes += batch.nbytes

    def finish(self) -> tuple[list[str], Any]:
        """Write the file, and return its name and its entry for the manifest. Without rows, no file is written."""
        if not self._tables:
            return [], None
        make_folder(self._folder / "segments")
        sealed, _ = write_segment(self._folder, self._number, pa.concat_tables(self._tables), self._layout)
        return [sealed.name], list(sealed._replace(appended=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tables.clear()


def finish_store(job: Job, result: Path, schema: pa.Schema, metadata: DatasetMetadata) -> None:
    """Create links to the segments of a job in ``result``, an empty folder, and write the manifest that lists the
    segments.

    Args:
        job: The job, whose parts ``SegmentWriter`` wrote.
        result: The empty folder.
        schema: Schema of all rows.
        metadata: Metadata of the rows.
    """
    (result / "segments").mkdir()
    manifest = Manifest(metadata, next_number=len(job.parts), identity=new_identity())
    if not job.rows:
        manifest, _ = manifest.with_schema(one_batch(schema.empty_table()).schema)
    for part in job.parts.values():
        for name in part.files:
            link_or_copy(job.folder / name, result / name)
            with pa.memory_map(str(job.folder / name)) as source:
                manifest, number = manifest.with_schema(pa.ipc.open_file(source).schema)
            sealed = Sealed(*part.facts)
            sealed = sealed._replace(schema=number, nulls=tuple(sealed.nulls))
            manifest = replace(manifest, segments=(*manifest.segments, sealed))
    write_manifest(result, manifest)


_KINDS = ("arrow", "parquet", "store")


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``, ``preprocess`` and ``write_lerobot``.

    Args:
        path: Path of the new dataset.
        rows: Number of rows.
        digest: Digest of all rows; see ``rows_digest``.
        resumed_rows: Number of rows that an earlier, interrupted call had written.
        shards: Number of files.
        pictures: A sentence for each column of images with a new encoding, and a sentence about the videos of the
            result.
        reopened: Whether the dataset was already complete, so that the call computed nothing.
    """

    path: str
    rows: int
    digest: str
    resumed_rows: int = 0
    shards: int = 1
    pictures: tuple[str, ...] = ()
    reopened: bool = False

    def to_store(self, **options: Any) -> DatasetStore:
        """Return a store that refers to the files of the new dataset; ``options`` are passed to ``DatasetStore``."""
        return open_rows(self.path).to_store(**options)


def convert(
    stream: base.RowStream,
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    images: str | Sequence[str] | Mapping[str, str] | None = None,
    layout: str | None = None,
    shard_bytes: int | str = "500MB",
    progress: bool = False,
) -> Conversion:
    """Write all rows to ``target``, in bounded memory.

    Files are written to a folder ``.NAME.converting`` next to the target. When all rows are written, they are read
    back. If the digest of the written rows equals the digest of the source, the folder is renamed to the target. After
    an interruption, the same call resumes: it keeps the finished files after comparing them with the source.

    If rows refer to images by path, the images are written into the rows and are part of the digest. If rows refer to
    frames of videos, the result gets hard links to the videos, or copies if the file system has no links.

    ``images="raw"`` and ``"png"`` keep every pixel. Pixels change each time images are encoded as JPEG.

    Args:
        stream: The rows and their metadata. If the data state no alignment, the result states no alignment. Nonzero
            rewards at the first rows of episodes contradict the alignment "arrived" and cause an ``AlignmentWarning``.
        target: A folder, or a file whose name ends in ``.parquet``; nothing may exist there.
        to: "arrow" (a folder for ``datasets.load_from_disk``), "parquet", or "store" (a folder for
            ``DatasetStore.open``). The default is "parquet" for a target that ends in ``.parquet``, "store" if
            ``layout`` is set, and "arrow" otherwise.
        images: Encoding of images, for all columns of images or by column: "raw" pixels, "png" or "jpeg:95". By default
            images and frames of videos stay unchanged. If ``images`` names a column that no field reads, a field of
            images is added for the column. ``write_lerobot`` writes images as videos.
        layout: Layout of the files of a store, "columns" or "windows"; see ``DatasetStore.open``.
        shard_bytes: Approximate size of each file, in bytes or as ``"500MB"`` or ``"1GiB"``; at most 64 MB in a store.
        progress: Whether to show progress bars.

    Raises:
        ConfigError: One of these:

            - ``target`` exists, or its suffix belongs to another type of file
            - options contradict each other
            - an unfinished conversion of another source has the same target, or another process is writing to the
              target
            - the source changed between interruption and resumption
            - ``images`` is set for rows without images, or the rows have videos and ``target`` is a file
        ImportError: Reading frames of videos needs PyAV, which is not installed.
        StorageError: Files cannot be written; a repeated call resumes.
        DataError: The source is damaged, a row refers to a file that is not an image or is outside of the allowed
            folders, or the result differs from the source.
        SchemaError: ``datasets`` has no type for a column.
    """
    wanted = {} if images is None else by_column(images)
    if any(encoding.way == "video" for encoding in wanted.values()):
        raise ConfigError(
            f"images: expected raw, png or jpeg, found {images!r}; only LeRobotDatasets store images as videos: "
            "save(path, 'lerobot'), or --to lerobot"
        )
    stream = base.embedded(stream)
    changed = pictures_of(stream, wanted) if wanted else {}
    path = Path(target)
    single = path.suffix == ".parquet"
    kind = to or ("parquet" if single else "store" if layout else "arrow")
    _check_options(path, kind, layout, single=single)
    shard_bytes = check_size("shard_bytes (--max-shard-size)", shard_bytes)
    prepared = changed_stream(stream, changed)
    if single and prepared.metadata.videos:
        raise ConfigError(f"{path}: expected a folder for rows with videos, found the name of a single file")
    ways = [f"{picture.name}: {encoding.shown()}" for picture, encoding in changed.values()]
    first_rows, is_store = FirstRows(), kind == "store"
    schema, metadata = base.dataset_schema(prepared.schema, prepared.metadata, prepared.path), prepared.metadata
    fingerprint = {
        "source": os.path.abspath(prepared.path),
        "format": prepared.format,
        "schema": str(prepared.schema.remove_metadata()),
        "metadata": metadata.to_json(),
        "kind": kind,
        "shard_bytes": shard_bytes,
        "layout": layout or "columns",
        "images": [*ways],
    }

    with locked_job(path, "converting", "convert", fingerprint) as job:

        def begin(number: int) -> base.ShardWriter | SegmentWriter:
            if is_store:
                return SegmentWriter(job.folder, number, schema, layout or "columns")
            return base.ShardWriter(job.folder, number, kind, schema)

        resumed = job.rows
        if not (job.complete and "digest" in job.facts):
            source_digest = base.RowDigest(prepared.schema)
            most_bytes = min(shard_bytes, MOST_BYTES) if is_store else shard_bytes
            with progress_bar("converting", total=prepared.rows, unit="rows", enabled=progress) as advance:

                def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
                    source_digest.update(batch)
                    advance(batch.num_rows)
                    return batch

                _write_parts(job, map(seen, blocks(prepared)), prepared.schema, begin, most_bytes)
            job.facts["digest"] = source_digest.hexdigest()
            job.save()
        digest, rows, shards = str(job.facts["digest"]), job.rows, len(job.parts)
        try:
            prepared.check_digest(digest)
        except DataError:
            job.discard()
            raise
        result = job.result_folder()
        names = {name: part.rows for part in job.parts.values() for name in part.files}
        if is_store:
            finish_store(job, result, schema, metadata)
        elif single:
            result = result / path.name
            base.join_parquet_files([job.folder / name for name in names], result, schema)
        else:
            counts = base.link_parts(job.folder, result, names, kind)
            if kind == "arrow":
                base.describe(result, schema, metadata, counts, digest)
        if metadata.videos:
            size = carry_videos(metadata.videos, prepared.image_folders(), result)
            ways.append(f"{len(metadata.videos)} videos in the result, {size / 1e6:,.1f} MB")
        with progress_bar("verifying", total=rows, unit="rows", enabled=progress) as advance:
            read = open_rows(result, format="store" if is_store else "rows").watched(first_rows.add)
            found = base.rows_digest(read.watched(lambda batch: advance(batch.num_rows)))
        if found != digest:
            job.discard()
            raise DataError(
                f"{result}: expected rows with the digest of the source, {digest}, found {found}: the written rows "
                "differ from the rows that were read; nothing was kept"
            )
        job.finish(result, path)
    if stream.alignment == "arrived":
        first_rows.warn_of_rewards(stream.path, stacklevel=2)
    return Conversion(str(path), rows, digest, resumed, 1 if single else shards, tuple(ways))


def _write_parts(
    job: Job,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    begin: Callable[[int], base.ShardWriter | SegmentWriter],
    most_bytes: int,
) -> None:
    """Write rows in parts of about ``most_bytes``.

    A finished part is not written again; its digest is compared with the rows.

    Args:
        job: The job.
        batches: The rows.
        schema: Schema of the rows.
        begin: A function that takes the index of a part, and returns a writer for the part.
        most_bytes: Size at which a part is complete.

    Raises:
        ConfigError: The source differs from the rows of a finished part.
    """
    rest: list[pa.RecordBatch] = []  # the rows of a batch behind the last finished part

    def digest_of(part: Part) -> str:
        digest = base.RowDigest(schema)
        while digest.rows < part.rows and (batch := rest.pop() if rest else next(batches, None)) is not None:
            left = part.rows - digest.rows
            digest.update(batch.slice(0, left))
            if left < batch.num_rows:
                rest.append(batch.slice(left))
        return digest.hexdigest()

    job.check_rows(digest_of)
    following = chain(rest, batches)
    while not job.complete:
        with begin(len(job.parts)) as writer:
            read = base.RowDigest(schema)
            for batch in following:
                read.update(batch)
                writer.write(batch)
                if writer.bytes >= most_bytes:
                    break
            else:
                job.complete = True
            if read.rows or not job.parts:
                names, facts = writer.finish()
                job.add(Part.written(job.folder, names, job.rows, read.rows, read.hexdigest(), facts))


def _check_options(path: Path, kind: str, layout: str | None, *, single: bool) -> None:
    """Raise ConfigError if the target and the options contradict each other."""
    if kind not in _KINDS or (single and kind != "parquet"):
        raise ConfigError(f"to: expected one of {list(_KINDS)} that fits the name {path.name!r}, found {kind!r}")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"layout: expected one of {list(LAYOUTS)}, found {layout!r}")
    if layout is not None and kind != "store":
        raise ConfigError(
            f"layout: expected None unless a store is written, as only stores have a layout, found {layout!r} for "
            f"{kind!r}; to write a store, leave out --to and give a folder as target, or pass --to store"
        )
    if not single:
        check_folder_name(path, wanted="the name of a folder, or of a file that ends in .parquet")


_MADE = "preprocessed.json"
_BLOCK_BYTES = 64 << 20
# Number of blocks for small rows: 4 for each of 8 processes. It does not depend on the number of processes, since a
# resumed call may use another number.
_LEAST_BLOCKS, _FEW_ROWS = 32, 1_000


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
) -> Conversion:
    """Apply a function to all rows and write the result to a new dataset, with the metadata of the old dataset.

    The function receives the columns of some complete episodes, ``{name: array [n, ...]}``; encoded images are decoded
    to pixels. The function returns a dict of new and changed columns ``[n, ...]`` for the same rows; the value None
    removes a column. All other columns are copied in their stored form. The received arrays are read-only. The function
    must be pure, because blocks are computed in any order, and again after an interruption.

    Blocks are written to a folder ``.NAME.preprocessing`` next to ``path``. When all blocks are complete and were read
    back, the folder is renamed to ``path``. After an interruption at any moment the same call resumes, with any
    ``num_workers``. If ``path`` already has the result for the same rows and function, nothing is computed; all rows
    are read to compare them. Images that rows name by path are compared by path. Two functions are equal if their
    names, code, arguments, and all values, functions and classes that they read from their modules are equal. For
    installed packages, only the code of functions and the names of classes are compared: change ``version`` when the
    packages change.

    Args:
        rows: A store, a view or a snapshot; a ``RowStream``, or a path that ``formats.open`` opens; or a
            ``datasets.Dataset`` or ``pyarrow.Table``. Derived fields count as columns.
        function: A function that can be pickled: a function defined with ``def`` at the top of a module, a
            ``functools.partial`` of such a function, or a callable object whose class is defined at the top of a
            module.
        path: The folder of the new dataset.
        columns: Columns that the function receives; by default all columns.
        num_workers: Number of processes that call the function; with 0, a thread of this process calls it. Processes
            are spawned, so a script needs ``if __name__ == "__main__":``.
        version: A text that you change when the result of the function changes. ``version`` is required for a function
            that uses an object that cannot be pickled, such as a lock.
        block_rows: Approximate number of rows of a block, which consists of complete episodes. The default is
            the number of rows in 64 MB, or 1/32 of all rows (at least 1,000) if that is smaller. If ``block_rows``
            changes, unfinished work starts again.
        progress: Whether to show a progress bar.

    Returns:
        The path and size of the new dataset; ``to_store()`` opens it.

    Raises:
        ConfigError: The function cannot be pickled, there are no rows, or an option is out of range; ``path`` has
            another dataset, or unfinished work with other rows or another function; or another process is working on
            ``path``.
        WorkerError: The function raised an error, which is the cause of the WorkerError, or a process ended early.
        DataError: Rows cannot be converted to arrays, or the function does not return a dict of columns for the same
            rows.
        StorageError: Files cannot be written; a repeated call resumes. On a full disk, the last blocks can be lost.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder")
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    names = None if columns is None else check_list("columns", columns)
    snapshot, metadata = _snapshot_of(rows)
    schema = pa.schema(list(stored_types(snapshot.segments).items()))
    for name in names or ():
        if name not in schema.names:
            raise ConfigError(f"columns: expected names among {schema.names}, found {name!r}")
    made_of = {
        "rows": f"{len(snapshot)} rows {snapshot.fingerprint}",
        "columns of the rows": str(schema.remove_metadata()),
        "metadata of the rows": metadata.to_json(),
        **identity(function, version),
        "columns": names,
    }
    work = Work(snapshot, schema, pickled(function), names, metadata, target)
    if (target / _MADE).is_file():
        return _reopened(target, made_of, work)
    blocks = [(number, *edges) for number, edges in enumerate(pairwise(_edges(snapshot, schema, block_rows)))]
    with locked_job(target, "preprocessing", "preprocess", made_of, in_order=False) as job:
        if not {(number, part.first, part.first + part.rows) for number, part in job.parts.items()} <= {*blocks}:
            job.begin_anew()
        job.check_rows(work.source_digest)
        resumed = job.rows
        with progress_bar("preprocessing", total=len(snapshot), unit="rows", enabled=progress) as advance:
            advance(resumed)
            _make_parts(job, replace(work, folder=job.folder), blocks, num_workers, advance)
        made = _noted_schema(job.facts)
        parts, whole = [job.parts[number] for number, _, _ in blocks], base.RowDigest(made)
        for part in parts:
            digest = quick_digest(made)
            file = job.folder / next(iter(part.files))
            for batch in read_rows(file):
                digest.update(batch)
                whole.update(batch)
            if digest.hexdigest() != part.facts:
                file.unlink()
                raise DataError(f"{file}: expected the rows that were written, found different rows; call again")
        job.facts["digest"] = whole.hexdigest()
        job.save()
        result = job.result_folder()
        counts = base.link_parts(
            job.folder, result, {name: part.rows for part in parts for name in part.files}, "arrow"
        )
        base.describe(result, base.dataset_schema(made, metadata, "preprocess"), metadata, counts, whole.hexdigest())
        shutil.copyfile(job.folder / NOTE, result / _MADE)
        job.finish(result, target)
    return Conversion(str(target), len(snapshot), whole.hexdigest(), resumed, len(counts))


def _make_parts(
    job: Job, work: Work, blocks: Sequence[tuple[int, int, int]], num_workers: int, advance: Callable[[int], None]
) -> None:
    """Write the missing parts of the job. The first finished part determines the columns of all parts."""
    todo = [block for block in blocks if block[0] not in job.parts]
    made = _noted_schema(job.facts) if job.parts else None
    workers, ahead = min(num_workers, len(todo)), 2 * num_workers or 1
    with closing(results(work.run, todo, workers, "preprocess", ahead=ahead, in_order=False)) as done:
        for (number, begin, end), (part, schema) in done:
            where = _called(begin, end)
            if made is None:
                (table,) = ([*read_rows(work.folder / name)] for name in part.files)
                _check_opens(pa.Table.from_batches(table), work.metadata, where)
                made, job.facts["schema"] = schema, base64.b64encode(schema.serialize()).decode()
            elif schema != made:
                raise DataError(f"{where}: expected the columns of the first rows, {_in_words(made, schema)}")
            job.add(part, number)
            advance(part.rows)


def _noted_schema(facts: Mapping[str, Any]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(facts["schema"])))


def _snapshot_of(rows: Any) -> tuple[Snapshot, DatasetMetadata]:
    """Return the snapshot and the metadata of ``rows``, in any form that ``preprocess`` takes."""
    if isinstance(rows, str | os.PathLike):
        rows = open_rows(rows)
    if isinstance(rows, base.RowStream):
        rows = rows.to_store()
    elif not isinstance(rows, Store | Snapshot):
        said = (
            read_metadata(rows, label="rows").alignment if isinstance(rows, pa.Table) or hasattr(rows, "info") else None
        )
        rows = DatasetStore(alignment=said).from_dataset(rows)
    snapshot = rows if isinstance(rows, Snapshot) else rows.snapshot()
    if snapshot.has_shares:
        raise ConfigError(
            "rows: expected the rows of a member of a mixture, found a mixture, whose weights cannot be saved"
        )
    if not len(snapshot):
        raise ConfigError("rows: expected at least one row, found none")
    return snapshot, rows.metadata


def _edges(snapshot: Snapshot, schema: pa.Schema, block_rows: int | None) -> list[int]:
    """Return the index of each block's first row, followed by the total number of rows.

    A block consists of complete episodes, about ``block_rows`` rows.
    """
    if block_rows is None:
        some = stored_rows(snapshot, 0, min(len(snapshot), 256), schema)
        share = max(_FEW_ROWS, -(-len(snapshot) // _LEAST_BLOCKS))
        block_rows = max(1, min(_BLOCK_BYTES * len(some) // max(some.nbytes, 1), share))
    check_count("block_rows", block_rows)
    starts = snapshot.episode_starts
    wanted = np.arange(0, len(snapshot), block_rows)
    # The last block takes the remaining rows.
    edges = starts[np.searchsorted(starts, wanted, side="right") - 1]
    return [*dict.fromkeys(edges.tolist()), len(snapshot)]


def _reopened(target: Path, made_of: Mapping[str, Any], work: Work) -> Conversion:
    """Return the result of an earlier call; raise ConfigError if the call had other rows or another function."""
    others = f"preprocess: {str(target)!r} was made", "give another path, or delete it"
    noted, parts, facts, _ = read_note(target / _MADE, others[1])
    check_same(noted, made_of, *others)
    if sum(part.rows for part in parts.values()) != len(work.snapshot):
        raise DataError(f"{target / _MADE}: expected parts of {len(work.snapshot)} rows, found {parts}")
    check_rows(parts, work.source_digest, *others)
    rows = read_rows(target).rows or 0
    return Conversion(str(target), rows, str(facts.get("digest")), rows, len(parts), reopened=True)


# ---------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Work:
    """The inputs that all blocks of a call of ``preprocess`` share.

    Args:
        snapshot: The rows.
        schema: Schema of the columns that all rows have.
        function: The pickled function.
        columns: The columns that the function receives; None for all.
        metadata: Metadata of the new rows.
        folder: Folder of the files.
    """

    snapshot: Snapshot
    schema: pa.Schema
    function: bytes
    columns: tuple[str, ...] | None
    metadata: DatasetMetadata
    folder: Path

    def run(self, block: tuple[int, int, int]) -> tuple[Part, pa.Schema]:
        """Compute and write the result for one block, given the block's index, its first row and the row after its last
        row. Return the part and its schema.

        Raises:
            WorkerError: The function raised an error.
            DataError: Rows cannot be passed to the function, or the function does not return a dict of columns for the
                same rows.
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
        except Exception as error:  # the user's code may raise any error
            raise WorkerError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        table = _replaced(table, given, returned, where)
        schema = base.dataset_schema(table.schema, self.metadata, "preprocess")
        with base.ShardWriter(self.folder, number, "arrow", schema) as writer:
            for batch in table.to_batches(max_chunksize=base.BATCH_ROWS):
                writer.write(batch)
            names, _ = writer.finish()
        part = Part.written(self.folder, names, begin, end - begin, contents(source), contents(table))
        return part, table.schema

    def source_digest(self, part: Part) -> str:
        """Return the digest of the rows of a part, computed from the current content of the source."""
        return contents(stored_rows(self.snapshot, part.first, part.first + part.rows, self.schema))


def _called(begin: int, end: int) -> str:
    return f"preprocess: rows {begin}..{end - 1}"


def stored_rows(snapshot: Snapshot, begin: int, end: int, schema: pa.Schema) -> pa.Table:
    """Return rows ``begin .. end - 1`` as one table; a column that does not exist in a segment is null in the rows of
    this segment.
    """
    parts, first = [], 0
    for segment in snapshot.segments:
        low, high = max(begin - first, 0), min(end - first, segment.num_rows)
        first += segment.num_rows
        if low >= high:
            continue
        parts.append(as_schema(segment.take(low, high - low), schema))
    return pa.concat_tables(parts).combine_chunks()


def contents(table: pa.Table) -> str:
    """Return a digest of the values of a table, independent of Arrow's encoding.

    If a row names an image by path, the digest covers only the path.
    """
    digest = quick_digest(table.schema)
    for batch in table.to_batches():
        digest.update(batch)
    return digest.hexdigest()


def quick_digest(schema: pa.Schema) -> base.RowDigest:
    """Return a digest of rows that detects accidental changes; it is computed many times as fast as SHA-256."""
    return base.RowDigest(schema, RunningDigest)


def _with_images(table: pa.Table, snapshot: Snapshot, where: str) -> pa.Table:
    """Return the rows; an image that a row names by path is replaced by the bytes of the image file."""
    roots = tuple(dict.fromkeys(root for segment in snapshot.segments for root in segment.image_roots))
    stream = base.RowStream(where, "rows", table.schema, lambda: iter(table.to_batches()), image_roots=roots)
    inside = base.embedded(stream)
    return table if inside is stream else pa.Table.from_batches(list(inside), table.schema).combine_chunks()


def _values(table: pa.Table, name: str, where: str) -> npt.NDArray[Any]:
    try:
        values = from_arrow(table.column(name), where=f"{where}: column {name!r}")
    except MouseError as error:
        raise DataError(f"{error}; columns=[...] names the columns that the function receives") from error
    # Read-only, because changes in place would be lost for some types: unchanged columns keep their stored form.
    values.flags.writeable = False
    return values


def _replaced(table: pa.Table, given: Columns, returned: Any, where: str) -> pa.Table:
    """Return the rows; changed and new columns come from the dict that the user's function returned.

    Changed columns keep their positions; new columns are last.
    """
    if not isinstance(returned, Mapping):
        raise DataError(f"{where}: expected a function that returns a dict of columns, found {returned!r:.80}")
    for name, values in returned.items():
        if not isinstance(name, str):
            raise DataError(f"{where}: expected names of columns, found {name!r:.80}")
        place = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(place) if place >= 0 else table
        elif values is not given.get(name):  # an unchanged column keeps its stored form
            array = np.asarray(values)
            if array.shape[:1] != (table.num_rows,):
                raise DataError(
                    f"{where}: expected {table.num_rows} rows of column {name!r}, as the function received, "
                    f"found an array of shape {list(array.shape)}"
                )
            column = to_arrow(array, where=f"{where}: column {name!r}")
            table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return table


def _check_opens(table: pa.Table, metadata: DatasetMetadata, where: str) -> None:
    """Raise DataError if a store cannot open rows of this form; the check runs before most rows are computed."""
    if {"action", "reward", "done"} <= {*table.schema.names}:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AlignmentWarning)  # opening the source gave this warning already
                store = DatasetStore(alignment=metadata.alignment).from_dataset(with_metadata(table, metadata))
            len(store.snapshot().spec)
        except MouseError as error:
            raise DataError(f"{where}: expected rows that a store accepts: {error}") from error


def _in_words(wanted: pa.Schema, found: pa.Schema) -> str:
    types = {field.name: field.type for field in wanted}, {field.name: field.type for field in found}
    differing = [name for name in dict.fromkeys([*types[0], *types[1]]) if types[0].get(name) != types[1].get(name)]
    name = differing[0] if differing else wanted.names[0]
    return f"{name!r} of {types[0].get(name, 'no values')}, found {types[1].get(name, 'none')}"
