"""Convert recorded data of any size to a dataset on disk; a conversion is resumable and verified by digests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import link_or_copy, make_folder
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats.base import (
    RowDigest,
    RowStream,
    ShardWriter,
    dataset_schema,
    describe,
    embedded,
    in_place,
    join_parquet_files,
    link_parts,
    rows_digest,
)
from mouse_core.formats.columns import check_size
from mouse_core.formats.jobs import Job, job_folder
from mouse_core.formats.opening import open as open_rows
from mouse_core.formats.pictures import by_column, changed_stream, encoded_stream, pictures_of
from mouse_core.metadata import DatasetMetadata
from mouse_core.store.disk.folder import Manifest, Sealed, new_identity, write_manifest
from mouse_core.store.disk.segments import LAYOUTS, MOST_BYTES, one_batch, write_segment
from mouse_core.store.evidence import FirstRows
from mouse_core.video.frames import carry_videos


class SegmentWriter:
    """Writes one sealed segment of a store; its rows stay in memory until ``finish``.

    Args:
        folder: The folder of the store; segments lie in its folder ``segments``.
        number: Number of the segment.
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
        """Write the file; return its name and its entry for the manifest. Without rows no file is written."""
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
    """Link the segments of a job into ``result``, an empty folder, and write the manifest that names them.

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
_ENCODED = "encoded"


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Args:
        path: Path of the new dataset.
        rows: Number of rows.
        digest: Digest of all rows, in the source and in the result; see ``rows_digest``.
        shards: Number of files.
        resumed_rows: Number of rows that an earlier, interrupted call had written.
        pictures: One sentence for each new encoding of a column of pictures, and one about the videos of the result.
    """

    path: str
    rows: int
    digest: str
    shards: int
    resumed_rows: int
    pictures: tuple[str, ...] = ()


def convert(
    stream: RowStream,
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    images: str | Sequence[str] | Mapping[str, str] | None = None,
    layout: str | None = None,
    shard_bytes: int | str = "500MB",
    progress: bool = False,
) -> Conversion:
    """Write all rows to ``target``; the memory needed does not grow with the number of rows.

    Files are written to a folder ``.NAME.converting`` beside the target. When all rows are written, they are read back.
    If their digest equals the digest of the source, the folder is renamed to the target. After an interruption the same
    call resumes: it compares the finished files with the source and keeps them.

    If rows refer to images by path, the images are written into the rows and are part of the digest. If rows refer to
    frames of videos, the result gets hard links to the videos, or copies if the file system has no links.

    ``images="raw"`` and ``"png"`` keep every pixel. Each new encoding as JPEG, or as a video that is not ``lossless``,
    changes pixels.

    Args:
        stream: The rows and their metadata. If the data state no alignment, the result states none. Rewards at the
            first rows of episodes contradict the alignment "arrived" and raise an ``AlignmentWarning``.
        target: A folder, or a file whose name ends in ``.parquet``; nothing may exist there.
        to: "arrow" (a folder for ``datasets.load_from_disk``), "parquet", or "store" (a folder for
            ``DatasetStore.open``). By default Parquet for a target that ends in ``.parquet``, a store if ``layout`` is
            set, and else Arrow.
        images: Encoding of pictures, for all columns of pictures or by column: "raw" pixels, "png", "jpeg:95", or
            "video:h264:gop=2" with options of ``mouse_core.video.VideoCodec`` for frames of videos; "video" leaves
            frames of videos as they are and encodes others. By default pictures stay as they are. A named column that
            no field reads gets a field of images.
        layout: Layout of the files of a store, "columns" or "windows"; see ``DatasetStore.open``.
        shard_bytes: Approximate size of each file, in bytes or as ``"500MB"`` or ``"1GiB"``; at most 64 MB in a store.
        progress: Whether bars show the progress.

    Raises:
        ConfigError: One of these:

            - ``target`` exists, or its name ends like a file of another type
            - options contradict each other
            - an unfinished conversion of another source has this target, or another process is writing it
            - the source changed between interruption and resumption
            - ``images`` is set for rows without pictures, or for videos in one Parquet file
        ImportError: Videos need PyAV, which is not installed.
        StorageError: Files cannot be written; the next call resumes.
        DataError: The source is damaged; a row refers to a file that is no image or is outside the permitted folders;
            or the result differs from the source.
        SchemaError: ``datasets`` has no type for a column.
    """
    wanted = {} if images is None else by_column(images)
    if any(encoding.way == "video" and encoding.codec is None for encoding in wanted.values()):
        stream = in_place(stream)
    stream = embedded(stream)
    changed = pictures_of(stream, wanted) if wanted else {}
    path = Path(target)
    single = path.suffix == ".parquet"
    kind = to or ("parquet" if single else "store" if layout else "arrow")
    _check_options(path, kind, layout, single=single)
    shard_bytes = check_size("shard_bytes (--max-shard-size)", shard_bytes)
    with job_folder(path, "converting", "convert") as folder:
        prepared = changed_stream(stream, changed)
        if single and (prepared.metadata.videos or any(encoding.way == "video" for _, encoding in changed.values())):
            raise ConfigError(f"{path}: expected a folder for rows with videos, found the name of one file")
        prepared = encoded_stream(prepared, changed, folder / _ENCODED, most_bytes=shard_bytes, progress=progress)
        ways = [f"{picture.name}: {encoding.shown()}" for picture, encoding in changed.values()]
        first_rows, is_store = FirstRows(), kind == "store"
        schema, metadata = dataset_schema(prepared.schema, prepared.metadata, prepared.path), prepared.metadata
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

        def begin(number: int, _: int) -> ShardWriter | SegmentWriter:
            if is_store:
                return SegmentWriter(folder, number, schema, layout or "columns")
            return ShardWriter(folder, number, kind, schema)

        with Job(folder, "convert", fingerprint, beside=[_ENCODED]) as job:
            resumed = job.rows
            if not (job.complete and "digest" in job.facts):
                source_digest, most_bytes = (
                    RowDigest(prepared.schema),
                    min(shard_bytes, MOST_BYTES) if is_store else shard_bytes,
                )
                with progress_bar("converting", total=prepared.rows, unit="rows", enabled=progress) as advance:
                    job.write_stream(prepared, begin, most_bytes=most_bytes, advance=advance, digest=source_digest)
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
                join_parquet_files([folder / name for name in names], result, schema)
            else:
                counts = link_parts(folder, result, names, kind)
                if kind == "arrow":
                    describe(result, schema, metadata, counts, digest)
            if metadata.videos:
                size = carry_videos(metadata.videos, prepared.image_folders(), result)
                ways.append(f"{len(metadata.videos)} videos in the result, {size / 1e6:,.1f} MB")
            with progress_bar("verifying", total=rows, unit="rows", enabled=progress) as advance:
                read = open_rows(result, format="store" if is_store else "rows").watched(first_rows.add)
                found = rows_digest(read.watched(lambda batch: advance(batch.num_rows)))
            if found != digest:
                job.discard()
                raise DataError(
                    f"{result}: expected rows with the digest of the source, {digest}, found {found}: what was written "
                    "is not what was read; nothing was kept"
                )
            job.finish(result, path)
    if stream.alignment == "arrived":
        first_rows.warn_of_rewards(stream.path, stacklevel=2)
    return Conversion(str(path), rows, digest, 1 if single else shards, resumed, tuple(ways))


def _check_options(path: Path, kind: str, layout: str | None, *, single: bool) -> None:
    """Raise ConfigError if the target and the options contradict each other."""
    if kind not in _KINDS or (single and kind != "parquet"):
        raise ConfigError(f"to: expected one of {list(_KINDS)} that goes with {path.name!r}, found {kind!r}")
    if layout is not None and layout not in LAYOUTS:
        raise ConfigError(f"layout: expected one of {list(LAYOUTS)}, found {layout!r}")
    if layout is not None and kind != "store":
        raise ConfigError(
            f"layout: expected none, or a store to write, for only the files of a store have one, found {layout!r} for "
            f"{kind!r}; leave out --to, and give a folder as target (--to store)"
        )
    if not single:
        check_folder_name(path, wanted="the name of a folder, or of a file that ends in .parquet")
