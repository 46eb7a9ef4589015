"""Sealed segments as the files of a conversion, which are a store's folder in the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.files.writing import make_folder
from mouse_core.formats._files.shards import Shard
from mouse_core.store.disk.manifest import Manifest, Sealed, new_identity, write_manifest
from mouse_core.store.disk.sealed import one_batch, write_segment


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
