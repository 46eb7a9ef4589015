"""Where the records of TFRecord shards begin, and how many steps each has: found once, and kept in a mapped file.

The shards' frames are walked from head to head, and of every record only the flags are read, so that the pictures in it
are stepped over. Numbers, texts and pictures are found, and read, when rows of their record are wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import DataError, SchemaError
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import replacing
from mouse_core.formats._files.crc32c import masked_crc32c
from mouse_core.formats._files.on_disk import kept_beside
from mouse_core.formats.tfds._example import Read, feature_places, parse_feature
from mouse_core.formats.tfds._features import Split

_VERSION, _KEY = 1, b"mouse_records"
_SCHEMA = pa.schema([("shard", pa.int32()), ("offset", pa.int64()), ("length", pa.int64()), ("steps", pa.int64())])
OPEN = -1
_SHOWN_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class Records:
    """The records of some shards, in their order.

    Args:
        files: The shards.
        shard: Which of them each record lies in, int32 ``[n]``.
        offset: Where its data begin there, int64 ``[n]``.
        length: How many bytes they are, int64 ``[n]``.
        steps: How many steps it has, int64 ``[n]``; -1 less where the last of them is not ``is_last``, so that 5 such
            steps are -6.
    """

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    def where(self, record: int) -> str:
        """What messages call a record: its shard, its number in it, and where it is."""
        shard = int(self.shard[record])
        number = record - int(np.searchsorted(self.shard, shard))
        return f"{self.files[shard]}, record {number} at byte {int(self.offset[record]) - 12}"


def index_records(folder: Path, splits: Sequence[Split]) -> Records:
    """The records of some splits: as they were found before, where no shard has changed, else found now and kept.

    They are kept in ".mouse" in the dataset's folder, and where that is only read in the folder of caches
    (``remote.mirror.cache_folder``). A shard has changed where its size or the time of its last change has.

    Raises:
        DataError: A shard is damaged; the message names it and the record.
        SchemaError: The index was written by a newer version of this library.
    """
    files = tuple(file for split in splits for file in split.files)
    said = [_said(file) for file in files]
    name = hashlib.sha256(json.dumps([file.name for file in files]).encode()).hexdigest()[:8]
    place = kept_beside(folder, "tfds") / f"records-{name}.index.arrow"
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


_Known = dict[tuple[str, int, int], npt.NDArray[np.int64]]
"""By name, size and time of a shard: offset, length and steps of each record, int64 ``[n, 3]``."""


def _said(file: Path) -> tuple[str, int, int]:
    with reading(file):
        found = file.stat()
    return file.name, found.st_size, found.st_mtime_ns


def _made(files: Sequence[Path], said: Sequence[tuple[str, int, int]], known: Mapping[Any, Any]) -> _Known:
    found: _Known = {}
    total = sum(size for one in said if one not in known for size in [one[1]])
    shown = total > _SHOWN_BYTES and sys.stderr.isatty()
    with progress_bar("indexing", total=total, unit="bytes", enabled=shown) as advance:
        for file, one in zip(files, said, strict=True):
            if one in known:
                found[one] = known[one]
            else:
                found[one] = np.array(_scanned(file, one[1]), np.int64).reshape(-1, 3)
                advance(one[1])
    return found


def _scanned(path: Path, size: int) -> list[tuple[int, int, int]]:
    """Each record of a shard: where its data begin, their length, and how many steps they have."""
    found: list[tuple[int, int, int]] = []
    place = 0
    with reading(path), path.open("rb", buffering=0) as file:
        while place < size:
            at = f"record {len(found)} at byte {place}"
            head = os.pread(file.fileno(), 12, place)
            if len(head) < 12:
                raise damaged(path, f"expected 12 bytes of a record's head, found {len(head)}", at=at)
            length, expected = struct.unpack("<QI", head)
            if masked_crc32c(head[:8]) != expected:
                raise damaged(path, "the CRC of the record's length does not match", at=at)
            if length > size - place - 16:
                raise damaged(path, f"expected a record of {length} bytes, found the file's end", at=at)
            with reading(path, at=at):
                found.append((place + 12, length, steps_of(reader(file.fileno(), place + 12), length)))
            place += 16 + length
    return found


def reader(file: int, begin: int) -> Read:
    """What reads a record, by places in it."""

    def read(first: int, stop: int) -> bytes:
        found = os.pread(file, stop - first, begin + first)
        if len(found) != stop - first:
            raise DataError(f"expected {stop - first} bytes at byte {begin + first}, found {len(found)}")
        return found

    return read


def steps_of(read: Read, length: int) -> int:
    """How many steps a record has; see ``Records``."""
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


def _write(place: Path, known: _Known) -> None:
    whole = np.concatenate([*known.values(), np.zeros((0, 3), np.int64)])
    shard = np.repeat(np.arange(len(known), dtype=np.int32), [len(some) for some in known.values()])
    columns = [pa.array(shard), *(pa.array(np.ascontiguousarray(column)) for column in whole.T)]
    shards = json.dumps(list(known)).encode()
    told = {_KEY: str(_VERSION).encode(), b"shards": shards, b"digest": _digest(shards, [shard, *whole.T])}
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(place, sync=False) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, _SCHEMA.with_metadata(told)) as writer,
        ):
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA.with_metadata(told)))


def _digest(shards: bytes, columns: Sequence[npt.NDArray[Any]]) -> bytes:
    whole = hashlib.sha256(shards)
    for column in columns:
        whole.update(np.ascontiguousarray(column).data)
    return whole.hexdigest().encode()


def _read(place: Path) -> _Known:
    """What is kept; nothing where there is none that is whole."""
    if not place.is_file():
        return {}
    try:
        with reading(place), pa.memory_map(str(place)) as source:
            opened = pa.ipc.open_file(source)
            said = opened.schema.metadata or {}
            version = int(said.get(_KEY, b"0"))
            if version > _VERSION:
                raise SchemaError(
                    f"{place}: expected an index of version {_VERSION} at most, found version {version}; it was "
                    "written by a newer mouse-data"
                )
            if version != _VERSION or not opened.schema.equals(_SCHEMA) or opened.num_record_batches != 1:
                return {}
            shard, *columns = (column.to_numpy(zero_copy_only=True) for column in opened.get_batch(0).columns)
            if _digest(said[b"shards"], [shard, *columns]) != said[b"digest"]:
                return {}
            names = [tuple(one) for one in json.loads(said[b"shards"])]
            whole = np.stack(columns, axis=1) if len(shard) else np.zeros((0, 3), np.int64)
            ends = np.searchsorted(shard, np.arange(len(names) + 1))
            found = {name: whole[ends[at] : ends[at + 1]] for at, name in enumerate(names)}
    except DataError:
        return {}
    return found if all(map(_fits, found, found.values())) else {}


def _fits(shard: Any, records: npt.NDArray[np.int64]) -> bool:
    """Whether no record leads out of its shard."""
    offset, length, _ = records.T
    return bool((offset >= 12).all() and (length >= 0).all() and (length <= shard[1] - offset - 4).all())
