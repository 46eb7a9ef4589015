"""Stores that read TFRecord shards in place: a record is a chunk, of which only wanted rows and pictures are read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import DataError, StateError, StorageError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.reading import damaged, reading
from mouse_core.formats._files.on_disk import kept_beside
from mouse_core.formats._files.tfrecord import masked_crc32c, record_places
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.columns.named import to_batch, travels_with_action
from mouse_core.formats.columns.steps import Stack
from mouse_core.formats.columns.transitions import check_final
from mouse_core.formats.pictures import image_column
from mouse_core.formats.rlds.reading import stack_rows
from mouse_core.formats.tfds._features import (
    Feature,
    Leaf,
    Read,
    Split,
    decode_leaf,
    feature_places,
    parse_feature,
    value_places,
)
from mouse_core.images.pixels import encode_png
from mouse_core.nested import nest
from mouse_core.remote.client import ObjectInfo
from mouse_core.store.remote.files import ArrowFile, Asking
from mouse_core.store.remote.parquet import DecodedFiles

STEPS = "steps/"
_ABOUT_NUMBERS = 64


def episode_pieces(
    features: Mapping[str, Feature], number: int, leaves: Mapping[str, Leaf], batch_rows: int
) -> Iterator[Stack]:
    """Yield the steps of an episode, in pieces of at most ``batch_rows``.

    Args:
        features: The features of the record.
        number: Number of the episode.
        leaves: The leaves to read.
        batch_rows: See ``read_tfds``.
    """
    count = len(features.get(f"{STEPS}is_first", ()))
    of_episode = [leaf for leaf in leaves.values() if not is_of_step(leaf) and repeatable(leaf)]
    about = _nest({leaf.name: decode_leaf(leaf, features, None) for leaf in of_episode})
    steps = {leaf.name.removeprefix(STEPS): leaf for leaf in leaves.values() if is_of_step(leaf)}
    # What has to be decoded is decoded piece by piece.
    encoded = {name: leaf for name, leaf in steps.items() if is_encoded(leaf)}
    whole = {name: decode_leaf(leaf, features, count) for name, leaf in steps.items() if name not in encoded}
    size = rows_at_once(sum(map(_step_bytes, encoded.values())), most=batch_rows)
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        values = {name: array[part] for name, array in whole.items()}
        values |= {name: decode_leaf(leaf, features, count, part) for name, leaf in encoded.items()}
        ordered = {name: values[name] for name in steps}
        yield Stack(_nest(ordered), part.stop - first, number, first, part.stop == count, about)


def _step_bytes(leaf: Leaf) -> int:
    """Return about how many bytes the value of a step takes after decoding."""
    return math.prod(size or 256 for size in leaf.shape) * np.dtype(leaf.dtype).itemsize


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    return nest({tuple(path.split("/")): value for path, value in flat.items()})


def is_encoded(leaf: Leaf) -> bool:
    """Whether the values of a leaf have to be decoded one by one."""
    return leaf.kind == "image" or leaf.encoding != "none"


def is_of_step(leaf: Leaf) -> bool:
    """Whether each step has a value of its own."""
    return leaf.name.startswith(STEPS)


def is_column(leaf: Leaf) -> bool:
    """Whether a feature can be a column: one value a step, or one sequence of values."""
    return leaf.kind != "other" and leaf.ragged - is_of_step(leaf) <= 1


def repeatable(leaf: Leaf) -> bool:
    """Whether a feature of an episode is small enough to be repeated in all its rows."""
    numbers = math.prod(size or 1 << 20 for size in leaf.shape)
    return not leaf.ragged and leaf.kind != "image" and numbers <= _ABOUT_NUMBERS


_VERSION = 1
OPEN = -1
_SHOWN_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some shards, in their order.

    Args:
        files: The shards.
        shard: Number of the shard of each record, int32 ``[n]``.
        offset: First byte of its data in the shard, int64 ``[n]``.
        length: Number of bytes of its data, int64 ``[n]``.
        steps: Number of steps, int64 ``[n]``. Without ``is_last`` at the last step, ``count`` steps are
            ``-1 - count``: 5 such steps are -6.
    """

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    def where(self, record: int) -> str:
        """Return the name of a record for messages: its shard, its number in it, and its position."""
        shard = int(self.shard[record])
        number = record - int(np.searchsorted(self.shard, shard))
        return f"{self.files[shard]}, record {number} at byte {int(self.offset[record]) - 12}"


def index_records(folder: Path, splits: Sequence[Split]) -> Records:
    """Return the records of some splits, from an index; shards that changed are scanned, and the index is written.

    The index lies in ".mouse" in the folder of the dataset, or, if that is read-only, in the folder of caches
    (``remote.mirror.cache_folder``). A shard has changed if its size or modification time has.

    Raises:
        DataError: A shard is damaged; the message names it and the record.
    """
    files = tuple(file for split in splits for file in split.files)
    said = [_said(file) for file in files]
    name = hashlib.sha256(json.dumps([file.name for file in files]).encode()).hexdigest()[:8]
    place = kept_beside(folder, "tfds") / f"records-{name}.index"
    known = _read(place)
    if list(known) != said:
        known = _made(files, said, known)
        _write(place, known)
    lengths = [length for split in splits for length in (split.lengths or [None] * len(split.files))]
    for file, one, expected in zip(files, said, lengths, strict=True):
        if expected is not None and len(known[one]) != expected:
            raise damaged(file, f"expected {expected} records, found {len(known[one])}")
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(known[one]) for one in said])
    whole = np.concatenate([known[one] for one in said]) if said else np.zeros((0, 3), np.int64)
    return Records(files, shard, *(np.ascontiguousarray(column) for column in whole.T))


_Bounds = dict[tuple[str, int, int], npt.NDArray[np.int64]]
"""By name, size and time of a shard: offset, length and steps of each record, int64 ``[n, 3]``."""


def _said(file: Path) -> tuple[str, int, int]:
    with reading(file):
        found = file.stat()
    return file.name, found.st_size, found.st_mtime_ns


def _made(files: Sequence[Path], said: Sequence[tuple[str, int, int]], known: Mapping[Any, Any]) -> _Bounds:
    found: _Bounds = {}
    total = sum(size for _, size, _ in {*said} - {*known})
    shown = total > _SHOWN_BYTES and sys.stderr.isatty()
    with progress_bar("indexing", total=total, unit="bytes", enabled=shown) as advance:
        for file, one in zip(files, said, strict=True):
            if one in known:
                found[one] = known[one]
            else:
                found[one] = _scanned(file)
                advance(one[1])
    return found


def _scanned(path: Path) -> npt.NDArray[np.int64]:
    """Return offset, length and number of steps of each record of a shard, int64 ``[n, 3]``."""
    found = []
    with reading(path), path.open("rb", buffering=0) as file:
        for begin, length, at in record_places(path, file):
            with reading(path, at=at):
                found.append((begin, length, steps_of(reader(file.fileno(), begin), length)))
    return np.array(found, np.int64).reshape(-1, 3)


def reader(file: int, begin: int) -> Read:
    """Return the function that reads bytes of a record by their positions in it."""

    def read(first: int, stop: int) -> bytes:
        found = os.pread(file, stop - first, begin + first)
        if len(found) != stop - first:
            raise DataError(f"expected {stop - first} bytes at byte {begin + first}, found {len(found)}")
        return found

    return read


def steps_of(read: Read, length: int) -> int:
    """Return the number of steps of a record; see ``Records``."""
    places = feature_places(read, length)
    flags = {}
    for name in ("steps/is_first", "steps/is_last"):
        if name not in places:
            raise DataError(f"feature {name!r}: expected it, found {sorted(places)[:20]}")
        flags[name] = parse_feature(read(*places[name]))
    first, last = flags.values()
    if len(first) != len(last):
        raise DataError(f"expected as many is_last as is_first, {len(first)}, found {len(last)}")
    return OPEN - len(first) if len(last) and not last[-1] else len(first)


def _write(place: Path, known: _Bounds) -> None:
    shards = [[*shard, len(records)] for shard, records in known.items()]
    records = np.concatenate([*known.values(), np.zeros((0, 3), np.int64)])
    with suppress(OSError, StorageError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(place, {"version": _VERSION, "shards": shards, "records": records}, sync=False)


def _read(place: Path) -> _Bounds:
    """Read the index; return an empty one if there is none that is whole and of this version."""
    try:
        state = read_checkpoint(place)
    except (StateError, StorageError):
        return {}
    if state["version"] != _VERSION:
        return {}
    stops = np.cumsum([count for *_, count in state["shards"]])
    found = zip(state["shards"], np.split(state["records"], stops[:-1]), strict=True)
    return {(name, size, time): records for (name, size, time, _), records in found}


# The positions of the features of so many records stay in memory, and so many shards stay open.
_MOST_KNOWN, _MOST_OPEN = 1 << 12, 64


def image_columns(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Return the features that are pictures of steps, by the names of their columns."""
    found = {}
    for name, leaf in leaves.items():
        first, *rest = name.removeprefix("steps/").split("/")
        single = leaf.kind == "image" and leaf.dtype == "uint8" and is_of_step(leaf) and leaf.ragged == 1
        if not single or first == "action" or travels_with_action(first):
            continue
        prefix = "observation" if first == "observation" else f"metadata_{first}"
        found["_".join([prefix, *rest]) if rest or first != "observation" else "observation_image"] = name
    return found


class RecordFiles(DecodedFiles):
    """Records of shards; see ``DecodedFiles``. Numbers and texts of a record are decoded together, and kept.

    Args:
        records: The records.
        leaves: Features of the records.
        schema: The columns; pictures are image files.
        final, last_step: See ``read_tfds``.
        verify: Whether to compare the CRC of a record when its rows are first read, which reads the whole record.

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
        self.records, self._leaves, self._final = records, leaves, final
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
        opened = lru_cache(_MOST_OPEN)(lambda shard: records.files[shard].open("rb", buffering=0))
        verified = np.full(len(records.steps), not verify)
        self._record_at = lru_cache(_MOST_KNOWN)(partial(_record_at, records, opened, verified))

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
        return image_column(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFiles, self._again


def _record_at(
    records: Records, opened: Callable[[int], IO[bytes]], verified: npt.NDArray[np.bool_], record: int
) -> _Known:
    """Return the positions of the features of a record; compare its CRC unless it is verified."""
    begin, length = int(records.offset[record]), int(records.length[record])

    def read(first: int, stop: int) -> bytes:
        file = opened(int(records.shard[record]))  # stays open as long as this name, whatever the cache drops
        return reader(file.fileno(), begin)(first, stop)

    if not verified[record]:
        data = read(0, length)
        if masked_crc32c(data) != int.from_bytes(read(length, length + 4), "little"):
            raise DataError(f"the CRC of the record's {length} bytes does not match")
        verified[record] = True
    return _Known(read, feature_places(read, length))


def _seen(piece: Stack) -> Stack:
    """Return a piece with a mapping of observations, also if all observations are pictures."""
    return replace(piece, values={"observation": {}, **piece.values})


class _Known:
    """The positions of the features of a record.

    Args:
        read: Returns bytes of the record.
        places: First byte and end of each feature.
    """

    def __init__(self, read: Callable[[int, int], bytes], places: Mapping[str, tuple[int, int]]) -> None:
        self.read, self.places = read, places
        self._values: dict[str, Sequence[tuple[int, int]]] = {}

    def values(self, name: str) -> Sequence[tuple[int, int]]:
        """Return first byte and end of each byte string of a feature."""
        if name not in self._values:
            if name not in self.places:
                raise DataError(f"feature {name!r}: expected it, found {sorted(self.places)[:20]}")
            self._values[name] = value_places(self.read, *self.places[name])
        return self._values[name]
