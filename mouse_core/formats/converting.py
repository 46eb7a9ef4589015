"""Converting recorded data of any size into a dataset on disk: resumable, and verified against the source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.locking import alone
from mouse_core.files.writing import check_nothing_at, make_folder, put_in_place, storing, write_file
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats._files.shards import (
    Shard,
    ShardWriter,
    begin_result,
    dataset_schema,
    describe,
    finish_names,
    keep_only,
    merged,
)
from mouse_core.formats.base import RowDigest, RowStream, rows_digest
from mouse_core.formats.columns.blocks import blocks, check_size
from mouse_core.formats.columns.digest import DigestedRows
from mouse_core.formats.columns.embedding import embedded
from mouse_core.formats.opening import open as open_rows
from mouse_core.formats.pictures.changing import changed_stream
from mouse_core.formats.pictures.encoding import encoded_stream
from mouse_core.formats.pictures.kept import PictureEncoding, Pictures, by_column, pictures_of
from mouse_core.formats.sources import in_place
from mouse_core.store.disk.manifest import Manifest, Sealed, new_identity, write_manifest
from mouse_core.store.disk.segments import LAYOUTS, MOST_BYTES, one_batch, write_segment
from mouse_core.store.evidence import FirstRows
from mouse_core.video.frames import carry_videos


class SegmentWriter:
    """Writes one sealed segment, whose rows are held until it is whole.

    Args:
        folder: Where, in a folder ``segments`` that is made.
        number: Which it is.
        schema: Of the rows; batches are cast to it.
        layout: See ``DatasetStore.open``.
    """

    def __init__(self, folder: Path, number: int, schema: pa.Schema, layout: str) -> None:
        self._folder, self._number, self._layout = folder, number, layout
        self._schema = schema.remove_metadata()
        self._held: list[pa.Table] = []
        self.rows = self.bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._held.append(pa.Table.from_batches([batch]).cast(self._schema))
        self.rows += batch.num_rows
        self.bytes += batch.nbytes

    def finish(self, digest: str) -> Shard:
        """Write the file, and see to it that it is on the disk; of no rows there is none."""
        if not self.rows:
            return Shard("segments", 0, 0, digest)
        make_folder(self._folder / "segments")
        sealed, _ = write_segment(self._folder, self._number, pa.concat_tables(self._held), self._layout)
        said = list(sealed._replace(appended=False))
        return Shard(sealed.name, sealed.rows, sealed.bytes, digest, said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.clear()


def finish_store(work: Path, result: Path, shards: Sequence[Shard], schema: pa.Schema, about: About) -> None:
    """Link segments into ``result``, without a copy where possible, and write the manifest that names them.

    Args:
        work: Where they are.
        result: An empty folder.
        shards: What ``SegmentWriter`` wrote.
        schema: What it was given.
        about: What the rows say of themselves.
    """
    (result / "segments").mkdir()
    manifest = Manifest(about, next_number=len(shards), identity=new_identity())
    if not any(shard.rows for shard in shards):
        manifest, _ = manifest.with_schema(one_batch(schema.empty_table()).schema)
    for shard in shards:
        if shard.sealed is None:
            continue
        try:
            os.link(work / shard.name, result / shard.name)
        except OSError:  # a file system without links
            shutil.copyfile(work / shard.name, result / shard.name)
        with pa.memory_map(str(work / shard.name)) as source:
            manifest, number = manifest.with_schema(pa.ipc.open_file(source).schema)
        sealed = Sealed(*shard.sealed)
        sealed = sealed._replace(schema=number, nulls=tuple(sealed.nulls))
        manifest = replace(manifest, segments=(*manifest.segments, sealed))
    write_manifest(result, manifest)


_KINDS = ("arrow", "parquet", "store")
_JOB, _LOCK, _ENCODED = "job.json", "lock", "encoded"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Args:
        path: Where the rows are now.
        rows: How many there are.
        digest: Of all rows, in the source and in the result; see ``rows_digest``.
        shards: How many files.
        resumed_rows: Rows that an interrupted conversion had written already.
        pictures: What became of pictures, and of videos that rows name frames of, a sentence each.
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
    """Write all rows to ``target``, in memory that does not grow with them.

    Files are written in a folder ``.NAME.converting`` beside the target, which becomes the target when all is there
    and its rows, read back, have the digest that they had in the source. After an interruption at any moment the same
    call goes on where it was: what was written is checked against the source and kept.

    Images that rows name by path are written into the rows; the digest is that of the rows with them. Videos that rows
    name frames of lie in the result, too: linked, and copied where the file system has no links.

    With ``images="raw"`` and ``"png"`` every pixel stays what it is. JPEG and videos lose some, each time that they are
    made, apart from ``lossless`` ones.

    Args:
        stream: The rows. What they say of themselves is written with them; an alignment that is only taken for granted
            stays that, and rewards where episodes begin, which speak against it, are an ``AlignmentWarning``.
        target: A folder, or a file whose name ends in ``.parquet``. There must be nothing yet.
        to: "arrow" (a folder for ``datasets.load_from_disk``), "parquet", or "store" (one for ``DatasetStore.open``);
            by default Arrow, Parquet for a target of that name, and a store where ``layout`` is given.
        images: How pictures are kept: "raw" pixels, "png", "jpeg:95", or frames of videos, "video:h264:gop=2" with what
            ``mouse_core.video.VideoCodec`` has; "video" leaves frames of videos as they are and encodes others. For all
            columns of pictures, or by column; by default they stay what they are. Each such column gets a field of
            images, where none reads it.
        layout: How rows of a store lie in its files, "columns" or "windows"; see ``DatasetStore.open``.
        shard_bytes: About how large the files of a folder are, in bytes or like ``"500MB"`` or ``"1GiB"``; those of a
            store at most 64 MB.
        progress: Whether bars show how far it is.

    Raises:
        ConfigError: Something is at ``target``, or it has the name of a file of another type; an option that cannot be
            used, an unfinished conversion of another source there, or another process at work on the same target.
            ``images`` for rows without pictures; videos for one Parquet file.
        ImportError: PyAV is not installed, for videos.
        StorageError: It cannot be written; what was written so far is there for the next call.
        DataError: The source is damaged, or changed between interruption and resumption; a row names an image that is
            none or lies in no folder in which it may; or the result differs from the source.
        SchemaError: Types that a dataset cannot have.
    """
    wanted = {} if images is None else by_column(images)
    if any(kept.way == "video" and kept.codec is None for kept in wanted.values()):
        stream = in_place(stream)
    stream = embedded(stream)
    changed = pictures_of(stream, wanted) if wanted else {}
    path = Path(target)
    single = path.suffix == ".parquet"
    kind = to or ("parquet" if single else "store" if layout else "arrow")
    _check_options(path, kind, layout, single=single)
    shard_bytes = check_size("shard_bytes (--max-shard-size)", shard_bytes)
    work = path.with_name(f".{path.name}.converting")
    check_nothing_at(path, "convert")
    with storing(f"convert: {str(path)!r}"):
        make_folder(work)
        with alone(work / _LOCK, "convert"):
            made = changed_stream(stream, changed)
            if single and (made.about.videos or any(kept.way == "video" for _, kept in changed.values())):
                raise ConfigError(f"{path}: expected a folder for rows with videos, found the name of one file")
            shards: list[Shard] = []
            try:
                made = encoded_stream(made, changed, work / _ENCODED, most_bytes=shard_bytes, progress=progress)
                ways = [_sentence(one) for one in changed.values()]
                job = _Job(work, made, kind, layout or "columns", shard_bytes, ways)
                shards = job.shards
                done = job.run(path, single=single, progress=progress)
            finally:
                # Without a shard or a video there is nothing to go on from.
                if not shards and not (work / _ENCODED).exists() and not (work / _JOB).exists():
                    shutil.rmtree(work, ignore_errors=True)
    done = replace(done, pictures=(*ways, *done.pictures))
    if stream.alignment == "arrived":
        job.first.warn_of_rewards(stream.path, stacklevel=2)
    return done


def _check_options(path: Path, kind: str, layout: str | None, *, single: bool) -> None:
    """Raise ConfigError unless a target and options go together."""
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


def _sentence(one: tuple[Pictures, PictureEncoding]) -> str:
    """What became of a column of pictures."""
    picture, kept = one
    if kept.way == "video":
        lost = "" if kept.codec and kept.codec.lossless else ", which loses some of what they were"
        return f"{picture.name}: frames of videos, {kept.codec}{lost}"
    return f"{picture.name}: {f'jpeg of quality {kept.quality}, which loses some' if kept.way == 'jpeg' else kept.way}"


class _Job:
    """One conversion, and what of it is done: shards, each with the digest of the source's rows in it.

    Args:
        work: The folder it happens in.
        stream: The source.
        kind: "arrow", "parquet" or "store".
        layout: Of a store.
        shard_bytes: When a shard is full.
        ways: What becomes of pictures.
    """

    def __init__(
        self, work: Path, stream: RowStream, kind: str, layout: str, shard_bytes: int, ways: Sequence[str]
    ) -> None:
        self.work, self.stream, self.kind, self.layout = work, stream, kind, layout
        self.shard_bytes = min(shard_bytes, MOST_BYTES) if kind == "store" else shard_bytes
        self.schema = dataset_schema(stream.schema, stream.about, stream.path)
        self.first = FirstRows()
        self.about = {
            "source": os.path.abspath(stream.path),
            "format": stream.format,
            "schema": str(stream.schema.remove_metadata()),
            "alignment": stream.alignment,
            "says": stream.about.to_json(),
            "kind": kind,
            "shard_bytes": shard_bytes,
        } | ({"layout": layout} if kind == "store" else {})
        self.about |= {"images": list(ways)} if ways else {}
        self.shards: list[Shard] = []
        self.digest: str | None = None
        self._load()

    def run(self, path: Path, *, single: bool, progress: bool) -> Conversion:
        """Do what is left to do."""
        resumed = sum(shard.rows for shard in self.shards)
        if self.digest is None:
            with progress_bar("converting", total=self.stream.rows, unit="rows", enabled=progress) as advance:
                self._write(advance)
        rows = sum(shard.rows for shard in self.shards)
        folder = begin_result(self.work)
        result = folder / path.name if single else folder
        if self.kind == "store":
            finish_store(self.work, result, self.shards, self.schema, self.stream.about)
        elif single:
            merged([self.work / shard.name for shard in self.shards], result, self.schema)
        else:
            counts = finish_names(self.work, result, self.shards, self.kind)
            if self.kind == "arrow":
                describe(result, self.schema, self.stream.about, counts, str(self.digest))
        said = self._carry(result)
        with progress_bar("verifying", total=rows, unit="rows", enabled=progress) as advance:
            self._verify(result, advance)
        put_in_place(result, path)
        shutil.rmtree(self.work, ignore_errors=True)
        return Conversion(str(path), rows, str(self.digest), 1 if single else len(self.shards), resumed, said)

    def _carry(self, result: Path) -> tuple[str, ...]:
        """Have the videos in the result that rows name frames of."""
        videos = self.stream.about.videos
        if not videos:
            return ()
        size = carry_videos(videos, self.stream.image_folders(), result)
        return (f"{len(videos)} videos in the result, {size / 1e6:,.1f} MB",)

    def _write(self, advance: Callable[[int], None]) -> None:
        """Write the shards that are missing; those that are there must hold the source's rows."""
        whole = RowDigest(self.stream.schema)
        source = DigestedRows(blocks(self.stream), whole, advance)
        for shard in self.shards:
            if source.digest_of(shard.rows, self.stream.schema) != shard.digest:
                raise DataError(
                    f"{self.stream.path}: expected the rows that an interrupted conversion has read, found others; "
                    f"delete {str(self.work)!r} to begin anew"
                )
        while True:
            with self._writer() as writer:
                digest = RowDigest(self.stream.schema)
                for batch in source.following():
                    digest.update(batch)
                    writer.write(batch)
                    if writer.bytes >= self.shard_bytes:
                        break
                if not writer.rows and self.shards:
                    break
                self.shards.append(writer.finish(digest.hexdigest()))
            self._save()
        try:
            self.stream.check_digest(whole.hexdigest())
        except DataError:
            shutil.rmtree(self.work, ignore_errors=True)
            raise
        self.digest = whole.hexdigest()
        self._save()

    def _writer(self) -> ShardWriter | SegmentWriter:
        number = len(self.shards)
        if self.kind == "store":
            return SegmentWriter(self.work, number, self.schema, self.layout)
        return ShardWriter(self.work, number, self.kind, self.schema)

    def _verify(self, result: Path, advance: Callable[[int], None]) -> None:
        found = (
            open_rows(result, format="store" if self.kind == "store" else "rows")
            .watched(lambda batch: advance(batch.num_rows))
            .watched(self.first.add)
        )
        digest = rows_digest(found)
        if digest != self.digest:
            shutil.rmtree(self.work, ignore_errors=True)
            raise DataError(
                f"{result}: expected rows with the digest of the source, {self.digest}, found {digest}: what was "
                "written is not what was read; nothing was kept"
            )

    def _load(self) -> None:
        """Take over what an interrupted conversion left behind, if it is of the same source and kind."""
        fresh: dict[str, Any] = {"about": self.about, "shards": [], "digest": None}
        file = self.work / _JOB
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else fresh
        except ValueError as error:
            raise DataError(f"{file}: cannot be read: {error}; delete the folder to begin anew") from error
        if found["about"] != self.about:
            differing = sorted(key for key in self.about if found["about"].get(key) != self.about[key])
            raise ConfigError(
                f"convert: an unfinished conversion of something else is in {str(self.work)!r}: it differs in "
                f"{', '.join(differing)}; finish it, or delete the folder"
            )
        written = [Shard(**shard) for shard in found["shards"]]
        keep_only(self.work, {shard.name for shard in written} | {_JOB, _LOCK, _ENCODED})
        # What a crash of the machine took along is written again, and all after it.
        self.shards = list(takewhile(lambda shard: shard.is_in(self.work), written))
        self.digest = found["digest"] if len(self.shards) == len(written) else None

    def _save(self) -> None:
        state = {"about": self.about, "shards": [vars(shard) for shard in self.shards], "digest": self.digest}
        write_file(self.work / _JOB, json.dumps(state).encode(), only_writer=True)
