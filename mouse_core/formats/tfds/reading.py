"""RLDS datasets as TensorFlow Datasets keeps them, read without TensorFlow.

A folder holds ``dataset_info.json`` and ``features.json``, and files of records: TFRecord or ArrayRecord. A record is
an episode: a tf.train.Example with the values of all its steps one after the other.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
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

from mouse_core._base.checks import check_count
from mouse_core._base.progress import progress_bar
from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError, StateError, StorageError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import making
from mouse_core.formats._files.on_disk import kept_beside
from mouse_core.formats._files.tfrecord import READERS, masked_crc32c, record_places
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import check_batch_rows, rows_at_once
from mouse_core.formats.columns.named import is_image, to_batch, travels_with_action
from mouse_core.formats.columns.steps import Stack, rlds_steps
from mouse_core.formats.columns.transitions import check_final
from mouse_core.formats.pictures import IMAGE, image_column
from mouse_core.formats.rlds import check_last_step, first_batch, last_step_notes, stack_rows
from mouse_core.formats.sources import episodes_of
from mouse_core.formats.tfds._features import (
    Feature,
    Leaf,
    Read,
    Split,
    decode_leaf,
    feature_places,
    parse_example,
    parse_feature,
    parse_features,
    parse_info,
    value_places,
)
from mouse_core.images.pixels import encode_png
from mouse_core.nested import nest
from mouse_core.remote.client import ObjectInfo
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.remote.files import ArrowFile, Asking
from mouse_core.store.remote.rows import DecodedFiles, FileRows

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


# What is looked at to see whether a last step holds a transition.
_BROUGHT = re.compile(r"steps/(is_first|is_last|reward|action(/.*)?)$")


def read_tfds(
    path: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    final: str | None = None,
    last_step: str = "observation",
    batch_rows: int = BATCH_ROWS,
) -> RowStream:
    """Read an RLDS dataset of TFDS as rows, with the columns of ``mouse_core.formats.rlds.read_rlds``.

    Pictures are decoded. The CRCs of TFRecord files are verified.

    ``to_store()`` of TFRecord files gives a store whose rows stay there: where records begin
    is found once, and kept; a record is read when a batch wants rows of it, and of its pictures those that the batch
    has, which are decoded then. The CRC of a record is compared when it is first read, for which all of it is.

    Args:
        path: The folder with ``features.json``, or a folder above it that holds no other dataset.
        splits: Names of the splits to read, in this order; by default all, one after the other.
        final: See ``read_rlds``; needed for episodes whose steps end without ``is_last``, and for transitions.
        last_step: See ``read_rlds``: "transition" if the action and the reward of the last step of an episode count.
        batch_rows: Most rows of a batch.

    Returns:
        The rows; ``metadata`` is the content of ``dataset_info.json``.

    Raises:
        ConfigError: The folder holds no RLDS dataset of TFDS, a split is unknown, or files have another format.
        DataError: A file is damaged; the message names file and record.
        ImportError: The files are ArrayRecord and its package is not installed.
    """
    check_last_step(last_step, final, where=os.fspath(path))
    check_batch_rows(batch_rows)
    folder, described, leaves, info, kind, chosen = _described(path, splits)

    def pieces(leaves: Mapping[str, Leaf] = leaves) -> Iterator[Stack]:
        return _pieces(chosen, kind, leaves, batch_rows)

    schema = first_batch(pieces(), final=final, path=str(folder), last_step=last_step).schema
    notes = _notes(described, str(info.get("name", "")))
    if last_step == "observation":
        notes += last_step_notes(pieces({name: leaf for name, leaf in leaves.items() if _BROUGHT.match(name)}))

    def batches() -> Iterator[pa.RecordBatch]:
        for columns, where in stack_rows(pieces(), final=final, path=str(folder), last_step=last_step):
            yield to_batch(columns, schema, where=where)

    lengths = [length for split in chosen for length in (split.lengths or (-1,))]
    return RowStream(
        os.fspath(path),
        "tfds",
        schema,
        batches,
        episodes=None if -1 in lengths else sum(lengths),
        notes=notes,
        metadata=info,
        opened=partial(store_of, path, splits=splits, final=final, last_step=last_step) if kind == "tfrecord" else None,
        about=About("arrived"),
    )


def store_of(
    path: str | os.PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    final: str | None = None,
    last_step: str = "observation",
    verify: bool = True,
    make: Callable[..., DatasetStore] = DatasetStore,
    **options: Any,
) -> DatasetStore:
    """Return a store of a dataset that reads its TFRecord shards in place; see ``read_tfds``.

    Args:
        path, splits, final, last_step: See ``read_tfds``.
        verify: Whether to compare the CRC of a record when its rows are first read, which reads the whole record once.
        make: Makes the store.
        **options: Options of the store.

    Raises:
        ConfigError: As in ``read_tfds``, or the files are no TFRecord.
    """
    folder, _, leaves, _, kind, chosen = _described(path, splits)
    if kind != "tfrecord":
        raise ConfigError(
            f"{folder}: expected TFRecord files, whose rows can stay where they are, found {kind}; formats.open reads "
            "them, and mouse convert makes a store of them"
        )
    schema = read_tfds(path, splits=splits, final=final, last_step=last_step).schema
    pictures = image_columns(leaves)
    schema = pa.schema([pa.field(one.name, IMAGE) if one.name in pictures else one for one in schema])
    store = make(**options)
    files = RecordFiles(index_records(folder, chosen), leaves, schema, final, last_step, verify)
    store._rows = FileRows(str(folder), store._rows.schema, store._rows.budget, files, About("arrived"))
    return store


def _described(path: str | os.PathLike[str], splits: str | Sequence[str] | None) -> tuple[Any, ...]:
    """Return folder, features, features that are columns, metadata, format of files and splits of a dataset."""
    folder = _folder(Path(path))
    described = parse_features(folder / "features.json")
    leaves = {name: leaf for name, leaf in described.items() if is_column(leaf)}
    if f"{STEPS}is_first" not in leaves or f"{STEPS}reward" not in leaves:
        raise ConfigError(f"{folder}: expected an RLDS dataset with a feature 'steps', found {sorted(leaves)[:12]}")
    info, kind, found = parse_info(folder)
    return folder, described, leaves, info, kind, _chosen(found, splits, folder)


def _folders(path: Path) -> list[Path]:
    """Return the folders of datasets at or below ``path``: versions, and configurations with versions."""
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        files = sorted(path.glob(f"{depth}features.json"))
        if found := [file.parent for file in files if (file.parent / "dataset_info.json").is_file()]:
            return found
    return []


def _folder(path: Path) -> Path:
    found = _folders(path)
    if len(found) != 1:
        shown = f"{len(found)}: {[str(folder) for folder in found[:4]]}" if found else "none"
        raise ConfigError(f"{path}: expected a folder with features.json and dataset_info.json, found {shown}")
    check_inside([found[0] / "features.json", found[0] / "dataset_info.json"], path)
    return found[0]


def _chosen(found: list[Split], names: str | Sequence[str] | None, folder: Path) -> list[Split]:
    by_name = {split.name: split for split in found}
    chosen = [names] if isinstance(names, str) else list(by_name if names is None else names)
    for name in chosen:
        if name not in by_name:
            raise ConfigError(f"{folder}: splits: expected some of {list(by_name)}, found {name!r}")
    return [by_name[name] for name in chosen]


def _notes(leaves: Mapping[str, Leaf], name: str) -> tuple[str, ...]:
    notes = []
    if name.startswith("d4rl_"):
        notes.append("TFDS ends every episode of its D4RL datasets with the last observation of the whole dataset.")
    rounded = [leaf.name for leaf in leaves.values() if leaf.dtype == "float64" and not is_encoded(leaf)]
    if rounded:
        notes.append(f"TFDS stores {rounded} as 32-bit floats, though declared as float64.")
    unlike = [leaf.name for leaf in leaves.values() if not is_column(leaf)]
    if unlike:
        notes.append(f"{unlike} cannot be columns (videos, sounds, sequences in sequences): left out.")
    large = [leaf.name for leaf in leaves.values() if is_column(leaf) and not (is_of_step(leaf) or repeatable(leaf))]
    if large:
        notes.append(f"{large} belong to whole episodes and are too large to be repeated in every row: left out.")
    return tuple(notes)


def _pieces(splits: list[Split], kind: str, leaves: Mapping[str, Leaf], batch_rows: int) -> Iterator[Stack]:
    """Yield all episodes of some splits, in pieces."""
    number = 0
    for split in splits:
        for index, file in enumerate(split.files):
            count = 0
            for record, at in READERS[kind](file):
                with reading(file, at=at):
                    yield from episode_pieces(parse_example(record), number, leaves, batch_rows)
                number += 1
                count += 1
            if split.lengths is not None and count != split.lengths[index]:
                raise damaged(file, f"expected {split.lengths[index]} records, found {count}")


def write_tfds(
    rows: Any,
    path: str | os.PathLike[str],
    *,
    name: str = "rlds",
    version: str = "1.0.0",
    split: str = "train",
    episodes_per_file: int = 1000,
) -> None:
    """Write rows as an RLDS dataset in ArrayRecord files, through TFDS; ``tfds.builder_from_directory`` opens it.

    Pictures are written as PNG, and float64 values are encoded, so nothing is rounded.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.
        path: The folder of the dataset; nothing may exist there.
        name: Name of the dataset.
        version: Version of the dataset, three numbers.
        split: Name of the split.
        episodes_per_file: Number of episodes in a file.

    Raises:
        ConfigError: Something is at ``path``, or another process is writing it.
        StorageError: Files cannot be written; nothing is left.
        DataError: There are no rows, or values are null.
        ImportError: tensorflow-datasets or array_record is not installed.
    """
    try:
        import tensorflow_datasets as library
    except ImportError as error:
        raise ImportError("writing needs TFDS: pip install tensorflow-datasets array_record") from error
    check_count("episodes_per_file", episodes_per_file)
    with making(path, "write_tfds") as partial:
        writer = None
        names: set[str] = set()
        for number, columns in enumerate(episodes_of(rows)):
            steps, features_alone = rlds_steps(columns, number)
            about = {name: np.asarray([value]) for name, value in features_alone.items()}
            if writer is None:
                identity = library.core.dataset_info.DatasetIdentity(
                    name=name, version=library.core.Version(version), data_dir=str(partial), module_name=""
                )
                features = {"steps": library.features.Dataset(_features(library, steps)), **_features(library, about)}
                info = library.core.DatasetInfo(builder=identity, features=library.features.FeaturesDict(features))
                writer = library.core.SequentialWriter(
                    info, max_examples_per_shard=episodes_per_file, file_format="array_record"
                )
                writer.initialize_splits([split])
                names = set(about)
            elif set(about) != names:
                name = min(set(about) ^ names)
                raise DataError(
                    f"episode {number}: metadata_episode_{name}: expected it to be the same in all rows of an episode, "
                    "in every episode or in none, found some of both"
                )
            whole = {name: values[0] for name, values in _encoded(about).items()}
            writer.add_examples({split: [{"steps": _encoded(steps), **whole}]})
        if writer is None:
            raise DataError("write_tfds: expected rows, found none")
        writer.close_all()
        _finish(partial)


def _finish(folder: Path) -> None:
    """Raise DataError unless the metadata that TFDS wrote list files of episodes."""
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    if not any(split.get("shardLengths") for split in info.get("splits", ())):
        raise DataError(f"{folder}: expected files of episodes, found none")


def _features(library: Any, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of TFDS for the steps of the first episode."""
    found: dict[str, Any] = {}
    for name, value in steps.items():
        if isinstance(value, Mapping):
            found[name] = library.features.FeaturesDict(_features(library, value))
        elif value.dtype.kind in "OSU":
            found[name] = library.features.Text()
        elif is_image(value):
            shape = value.shape[1:] if value.ndim == 4 else (*value.shape[1:], 1)
            found[name] = library.features.Image(shape=shape, dtype=np.uint8, encoding_format="png")
        else:
            encoding = "zlib" if value.dtype == np.float64 else "none"
            found[name] = library.features.Tensor(shape=value.shape[1:], dtype=value.dtype.type, encoding=encoding)
    return found


def _encoded(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return steps in the form that TFDS takes without TensorFlow: pictures as files."""
    found: dict[str, Any] = {}
    for name, value in steps.items():
        if isinstance(value, Mapping):
            found[name] = _encoded(value)
        elif value.dtype.kind not in "OSU" and is_image(value):
            found[name] = [io.BytesIO(encode_png(picture)) for picture in value]
        else:
            found[name] = list(value)
    return found
