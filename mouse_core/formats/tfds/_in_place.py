"""Stores whose rows stay in TFRecord shards: a record is a chunk, of which is read what a batch wants."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense_copies import DenseBudget
from mouse_core._base.locks import ProcessLock
from mouse_core.about.dataset import About
from mouse_core.errors import DataError
from mouse_core.files.reading import reading
from mouse_core.formats._files.crc32c import masked_crc32c
from mouse_core.formats.columns.named import to_batch, travels_with_action
from mouse_core.formats.columns.steps import Stack
from mouse_core.formats.columns.transitions import check_final
from mouse_core.formats.rlds.reading import stack_rows
from mouse_core.formats.tfds._episodes import episode_pieces, is_of_step
from mouse_core.formats.tfds._example import feature_places, parse_feature, value_places
from mouse_core.formats.tfds._features import Leaf
from mouse_core.formats.tfds._index import OPEN, Records, reader
from mouse_core.images.pixels import encode_png
from mouse_core.remote.client import ObjectInfo
from mouse_core.store.disk.manifest import Manifest
from mouse_core.store.disk.reading import settled
from mouse_core.store.elsewhere.asking import Asking
from mouse_core.store.elsewhere.files import ArrowFile
from mouse_core.store.elsewhere.parquet import DecodedFiles
from mouse_core.store.elsewhere.rows import ReadOnlyRows
from mouse_core.store.elsewhere.segment import ElsewhereSegment

ENCODED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Pictures as they were recorded, which are decoded in the batches that have them."""
# Of so many records it is kept where their features lie, and so many shards stay open.
_MOST_KNOWN, _MOST_OPEN = 1 << 12, 64


def image_columns(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """The features that are pictures of a step's observation, by the names of their columns."""
    found = {}
    for name, leaf in leaves.items():
        first, *rest = name.removeprefix("steps/").split("/")
        single = leaf.kind == "image" and leaf.dtype == "uint8" and is_of_step(leaf) and leaf.ragged == 1
        if not single or first == "action" or travels_with_action(first):
            continue
        prefix = "observation" if first == "observation" else f"metadata_{first}"
        found["_".join([prefix, *rest]) if rest or first != "observation" else "observation_image"] = name
    return found


class RecordRows(ReadOnlyRows):
    """The rows of an RLDS dataset in TFRecord shards; they are what they were when they were opened.

    Args:
        folder: The dataset's folder.
        told: What the store was told of the rows, which are to fit.
        budget: Of the memory for dense copies.
        files: Reads them.
    """

    def __init__(self, folder: str, told: Any, budget: DenseBudget, files: RecordFiles) -> None:
        super().__init__(folder, told, budget)
        self._again = folder, told, budget, files
        self.schema = settled(told, Manifest(About("arrived"), (files.schema,)), folder)
        self.segments[:] = [ElsewhereSegment(files, self.schema.image_roots, (object(), 0))]
        self.count = self.segments[0].num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordRows, self._again


class RecordFiles(DecodedFiles):
    """Records of shards; see ``DecodedFiles``. Numbers and texts of a record are decoded together, and kept.

    Args:
        records: Where they are.
        leaves: Their features.
        schema: The columns, of which pictures are ``ENCODED``.
        final, last_step: As for ``read_tfds``.
        verify: Whether the CRC of a record is compared when its rows are first read, for which all of it is read.

    Raises:
        ConfigError: The last observation of an episode is missing, and ``final`` was not chosen.
    """

    fetched_by = None

    def __init__(
        self,
        records: Records,
        leaves: Mapping[str, Leaf],
        schema: pa.Schema,
        final: str | None,
        last_step: str,
        verify: bool,
    ) -> None:
        self._again = records, leaves, schema, final, last_step, verify
        self._last_step = last_step
        self.records, self._leaves, self._final, self._verify = records, leaves, final, verify
        self._images = image_columns(leaves)
        self._numbers = {name: leaf for name, leaf in leaves.items() if name not in self._images.values()}
        is_open = records.steps <= OPEN
        steps = np.where(is_open, OPEN - records.steps, records.steps)
        if last_step == "transition":
            is_open = steps > 0
        if is_open.any() and final is None:
            check_final(None, where=records.where(int(is_open.argmax())))
        # Those without steps have no rows.
        self._record = np.flatnonzero(steps > 0)
        self._steps, self._is_open = steps, is_open
        rows = (steps + (is_open & (final == "mark")))[self._record]
        ends = np.searchsorted(records.shard[self._record], np.arange(len(records.files) + 1))
        files = [
            ArrowFile(ObjectInfo(os.fspath(path), 0, ""), rows[ends[at] : ends[at + 1]])
            for at, path in enumerate(records.files)
        ]
        super().__init__(None, files, schema)  # type: ignore[arg-type]
        self._opened: OrderedDict[int, IO[bytes]] = OrderedDict()
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._right = np.zeros(len(records.steps), bool)
        self._know = ProcessLock()

    def named(self, chunk: int, reader: Asking[Any]) -> Asking[Any]:
        """See ``Files``."""
        try:
            return (yield from reader)
        except DataError as error:
            record = int(self._record[chunk])
            path = self.records.files[int(self.records.shard[record])]
            if str(path) in str(error):
                raise
            raise DataError(f"{self.records.where(record)}: {error}") from error

    def decode(self, chunk: int, name: str) -> pa.Array:
        """See ``DecodedFiles``."""
        record = int(self._record[chunk])
        where = self.records.where(record)
        with reading(where):
            known = self._record_at(record)
            features = {
                one: parse_feature(known.read(*place))
                for one, place in known.places.items()
                if one not in self._images.values()
            }
            count = int(self._steps[record])
            pieces = [_seen(piece) for piece in episode_pieces(features, record, self._numbers, count)]
            if sum(piece.count for piece in pieces) != count:
                raise DataError(f"expected {count} steps, found {sum(piece.count for piece in pieces)}")
            schema = pa.schema([field for field in self.schema if field.name not in self._images])
            made = [
                to_batch(columns, schema, where=where)
                for columns, _ in stack_rows(iter(pieces), final=self._final, path=where, last_step=self._last_step)
            ]
        whole = {one: pa.concat_arrays([batch.column(one) for batch in made]) for one in schema.names}
        for other in schema.names:
            if other != name:
                self.kept((chunk, other), partial(whole.get, other))
        return whole[name]

    def rows(self, chunk: int, name: str, row: int, count: int) -> Asking[pa.Array]:
        """See ``Files``."""
        if name not in self._images:
            return (yield from super().rows(chunk, name, row, count))
        yield from ()
        return self._pictures(chunk, name, row, row + count)

    def column(self, chunk: int, name: str) -> Asking[pa.Array]:
        """See ``Files``."""
        if name not in self._images:
            return (yield from super().column(chunk, name))
        yield from ()
        return self._pictures(chunk, name, 0, int(self.starts[chunk + 1] - self.starts[chunk]))

    def _pictures(self, chunk: int, name: str, row: int, stop: int) -> pa.Array:
        record = int(self._record[chunk])
        leaf = self._leaves[self._images[name]]
        with reading(self.records.where(record)):
            known = self._record_at(record)
            places = known.values(leaf.name)
            if len(places) != self._steps[record]:
                raise DataError(f"feature {leaf.name!r}: expected {self._steps[record]} values, found {len(places)}")
            found = [known.read(*place) for place in places[row:stop]]
            if stop > len(places):
                # The row that marks that an observation is missing; other pictures repeat the row before.
                shape = [size or 1 for size in leaf.shape] or [1, 1, 3]
                missing = name.startswith("observation")
                found.append(encode_png(np.zeros(shape, np.uint8)) if missing else known.read(*places[-1]))
        return pa.StructArray.from_arrays(
            [pa.array(found, pa.binary()), pa.nulls(len(found), pa.string())], fields=list(ENCODED)
        )

    def _record_at(self, record: int) -> _Known:
        """Where the features of a record lie; its CRC is compared the first time."""
        with self._know:
            if record in self._known:
                self._known.move_to_end(record)
                return self._known[record]
            begin, length = int(self.records.offset[record]), int(self.records.length[record])
            read = self._reader(int(self.records.shard[record]), begin)
            if self._verify and not self._right[record]:
                data = read(0, length)
                if masked_crc32c(data) != int.from_bytes(read(length, length + 4), "little"):
                    raise DataError(f"the CRC of the record's {length} bytes does not match")
                self._right[record] = True
            found = self._known[record] = _Known(read, feature_places(read, length))
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
            return found

    def _reader(self, shard: int, begin: int) -> Callable[[int, int], bytes]:
        def read(first: int, stop: int) -> bytes:
            with self._know:
                if shard not in self._opened:
                    self._opened[shard] = self.records.files[shard].open("rb", buffering=0)
                self._opened.move_to_end(shard)
                file = self._opened[shard]
                while len(self._opened) > _MOST_OPEN:
                    self._opened.popitem(last=False)
            return reader(file.fileno(), begin)(first, stop)

        return read

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFiles, self._again


def _seen(piece: Stack) -> Stack:
    """A piece that has observations, be there no others than pictures."""
    return replace(piece, values={"observation": {}, **piece.values})


class _Known:
    """Where the features of a record lie.

    Args:
        read: Gives bytes of it.
        places: Of each feature.
    """

    def __init__(self, read: Callable[[int, int], bytes], places: Mapping[str, tuple[int, int]]) -> None:
        self.read, self.places = read, places
        self._values: dict[str, Sequence[tuple[int, int]]] = {}

    def values(self, name: str) -> Sequence[tuple[int, int]]:
        """Where each of a feature's byte strings lies."""
        if name not in self._values:
            if name not in self.places:
                raise DataError(f"feature {name!r}: expected it, found {sorted(self.places)[:20]}")
            self._values[name] = value_places(self.read, *self.places[name])
        return self._values[name]
