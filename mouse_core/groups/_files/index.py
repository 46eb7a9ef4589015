"""What has been sealed and which rollouts batches have used: a log that is read when a folder is opened.

The files are what counts. The log only saves opening all of them, remembers the order in which they came, and keeps
the ledger of used rollouts when old batch files are deleted. Files that it does not know are read and added to it. It
alone says which version was told to be the latest, and which rollouts were given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mouse_core._base.threads import THREADS, in_order
from mouse_core.errors import DataError, StoreWarning
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.files.writing import remove_leftovers, storing
from mouse_core.groups._files.arrow import EXAMPLES
from mouse_core.groups._files.declared import read_declared, refuse_missing
from mouse_core.groups._files.names import BATCHES, STATE, folder_name
from mouse_core.groups._files.part import GroupFile
from mouse_core.groups._files.parts import find_parts, read_metadata, read_part, read_table
from mouse_core.groups.types.columns import NO_COLUMNS, Columns
from mouse_core.groups.types.records import GroupKey

USED = b"mouse_batch_rollouts"
"""In a batch's file the uids of the rollouts it has used, where its examples do not say."""

_UIDS = pa.list_(pa.string())
_PARTS = pa.schema(
    {
        "environment": pa.string(),
        "example_id": pa.string(),
        "policy_version": pa.string(),
        "name": pa.string(),
        "number": pa.int64(),
        "uids": _UIDS,
        "created": pa.list_(pa.float64()),
        "rewards": pa.list_(pa.float64()),
        "tokens": pa.list_(pa.int64()),
        "turns": pa.list_(pa.int64()),
        "declared": pa.int64(),
        "nbytes": pa.int64(),
        "untrained": pa.list_(pa.int64()),
        "earned": pa.list_(pa.int64()),
        "columns": pa.string(),
        "first": pa.int64(),
    }
)
_GIVEN_UP = pa.schema({"uid": pa.string()})
_READY = pa.schema({"place": pa.string()})
_STORED = pa.schema({"name": pa.string(), "uids": _UIDS})


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch that was stored.

    Args:
        name: The name of its file.
        uids: Of the rollouts it used.
    """

    name: str
    uids: tuple[str, ...]

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self.name.split("_")[1]


def encode_parts(parts: Sequence[GroupFile]) -> bytes:
    """A record of the log that says that groups were sealed."""
    columns: list[Sequence[Any]] = [*zip(*(part.key for part in parts), strict=True)]
    columns += [[getattr(part, name) for part in parts] for name in _PARTS.names[3:]]
    return b"D" + _encoded(columns, _PARTS)


def encode_ready(parts: Sequence[GroupFile]) -> bytes:
    """A record of the log that says that groups have all they waited for, in this order."""
    return b"R" + _encoded([[part.place for part in parts]], _READY)


def encode_batches(batches: Sequence[StoredBatch]) -> bytes:
    """A record of the log that says that batches were stored."""
    return b"B" + _encoded([[batch.name for batch in batches], [batch.uids for batch in batches]], _STORED)


def encode_version(version: str, sealed: int) -> bytes:
    """A record of the log that says which version is the latest, and how many groups were sealed before."""
    return b"W" + sealed.to_bytes(8, "little") + version.encode()


def encode_declared(declared: Columns) -> bytes:
    """A record of the log that says which columns the folder has."""
    return b"N" + declared.to_json().encode()


def encode_gone(names: Sequence[str]) -> bytes:
    """A record of the log that says which files of groups are known to be gone."""
    return b"X" + _encoded([names], _READY)


def encode_given_up(uids: Sequence[str]) -> bytes:
    """A record of the log that says which rollouts were given up."""
    return b"U" + _encoded([uids], _GIVEN_UP)


def _encoded(columns: Sequence[Sequence[Any]], schema: pa.Schema) -> bytes:
    arrays = [pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)]
    return bytes(pa.RecordBatch.from_arrays(arrays, schema=schema).serialize())


def _columns(record: bytes, schema: pa.Schema) -> list[list[Any]]:
    rows = pa.ipc.read_record_batch(pa.py_buffer(record[1:]), schema)
    return [_tuples(column) if pa.types.is_list(column.type) else column.to_pylist() for column in rows.columns]


def _tuples(lists: pa.Array) -> list[Any]:
    """Lists as tuples. Arrow makes Python objects of one flat array several times as fast as of many short ones."""
    values = tuple(lists.flatten().to_pylist())
    return [values[begin:end] for begin, end in pairwise(accumulate(lists.value_lengths().to_pylist(), initial=0))]


class Told(NamedTuple):
    """A version that was said to be the latest.

    Args:
        version: The version.
        sealed: How many groups were sealed before; those of later versions are lost.
        batches: How many batches were stored before.
    """

    version: str
    sealed: int
    batches: int


@dataclass
class Index:
    """What is noted of a folder.

    Args:
        parts: The groups whose files are there, in the order they were sealed.
        batches: In the order they were stored, those included whose files were deleted.
        ready: Places of the files of groups that had waited for columns and have them, in the order they became ready.
        told: The versions that were said to be the latest, in order.
        given_up: Uids of rollouts that nobody waits for any more.
        declared: The folder's columns.
        gone: The files of groups that are known to be gone.
    """

    parts: list[GroupFile] = field(default_factory=list)
    batches: list[StoredBatch] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)
    declared: Columns = NO_COLUMNS
    gone: set[str] = field(default_factory=set)


def _decode(records: Sequence[bytes]) -> Index:
    index = Index()
    for record in records:
        kind = record[:1]
        if kind == b"D":
            environments, examples, versions, *others = _columns(record, _PARTS)
            index.parts += map(GroupFile, map(GroupKey, environments, examples, versions), *others)
        elif kind == b"R":
            index.ready += _columns(record, _READY)[0]
        elif kind == b"B":
            index.batches += map(StoredBatch, *_columns(record, _STORED))
        elif kind == b"W":
            sealed = int.from_bytes(record[1:9], "little")
            index.told.append(Told(record[9:].decode(), sealed, len(index.batches)))
        elif kind == b"N":
            index.declared = Columns.from_json(record[1:], "index")
        elif kind == b"X":
            index.gone.update(_columns(record, _READY)[0])
        elif kind == b"U":
            index.given_up.update(_columns(record, _GIVEN_UP)[0])
        else:
            raise DataError(f"index: expected a record of groups or of batches, found one of kind {kind!r}")
    return index


def index_path(root: Path) -> Path:
    """Where the log is."""
    return root / STATE / "index.log"


def open_index(root: Path) -> tuple[Index, Log]:
    """What a folder holds, and the log to go on with. Only the folder's one writer may call this.

    Raises:
        DataError: The log or a file that it does not know is damaged.
        StorageError: The folder cannot be read.
    """
    log = Log(index_path(root), noted=True)
    try:
        index, parts, batches, gone = _compare(root, log.records, clean=True)
        if parts:
            log.append(encode_parts(parts), sync=False)
        if batches:
            log.append(encode_batches(batches), sync=True)
        if gone:
            log.append(encode_gone(gone), sync=False)
        if (declared := read_declared(root)) != index.declared:
            log.append(encode_declared(declared), sync=True)
    except BaseException:
        log.close()
        raise
    log.records = []
    return index, log


def read_index(root: Path) -> Index:
    """What a folder holds now; nothing is changed, and another process may be writing.

    Raises:
        DataError, StorageError: As ``open_index``.
    """
    return _compare(root, read_log(index_path(root)), clean=False)[0]


def follow_batches(root: Path, position: int = 0) -> tuple[Index, int]:
    """The batches and versions that were noted in a folder's log from a position on, and where to read on.

    Nothing is changed. Only what is in the log has its number for good.

    Raises:
        DataError, StorageError: As ``open_index``.
    """
    records, position = follow_log(index_path(root), position)
    return _decode([record for record in records if record[:1] in b"BVW"]), position


def _compare(
    root: Path, records: Sequence[bytes], *, clean: bool
) -> tuple[Index, list[GroupFile], list[StoredBatch], list[str]]:
    """The index that agrees with the files; the groups and batches that the log did not know; which files are gone."""
    index = _decode(records)
    declared = read_declared(root)
    refuse_missing(root, declared, index.declared, max((part.declared for part in index.parts), default=0))
    with storing(f"folder {root}"):
        files = _files(root, clean=clean)
        stored = files.pop(BATCHES, [])
    there = {(folder, name) for folder, names in files.items() for name in names if name.startswith("part-")}
    by_place = {(folder_name(part.key.environment), part.name, part.first): part for part in index.parts}
    parts = [part for place, part in by_place.items() if place[:2] in there]
    unknown = sorted(there.difference(place[:2] for place in by_place))
    find = partial(find_parts, declared=declared)
    with ThreadPoolExecutor(THREADS) as pool:
        groups = in_order(pool, find, [root / folder / name for folder, name in unknown])
        found = sorted(chain.from_iterable(groups), key=lambda part: (part.number, part.name, part.first))
    refuse_missing(root, declared, NO_COLUMNS, max((part.declared for part in found), default=0))
    gone = sorted({"/".join(place[:2]) for place in by_place if place[:2] not in there} - index.gone)
    if gone:
        warnings.warn(
            f"rollouts {root}: expected all files of sealed groups, found {len(gone)} gone, {gone[0]} first; their "
            "groups are left out",
            StoreWarning,
            stacklevel=4,
        )
    # What was written last before a crash may be in a file and not yet in the log.
    parts = sorted([*parts, *found], key=lambda part: part.number) if found else parts
    names = {batch.name for batch in index.batches}
    new = [
        StoredBatch(name, _used(root / BATCHES / name))
        for name in sorted(stored, key=_stored_at)
        if name.startswith("batch_") and name not in names
    ]
    return replace(index, parts=parts, batches=[*index.batches, *new]), found, new, gone


def _used(path: Path) -> tuple[str, ...]:
    """The uids of the rollouts that a batch has used, from its file."""
    content = read_part(path)
    examples = read_table(path, EXAMPLES, content).column("rollout_uid").to_pylist()
    noted = read_metadata(path, content).get(USED)
    return tuple(json.loads(noted) if noted else filter(None, examples))


def _stored_at(name: str) -> tuple[str, str]:
    return name.rpartition("_")[2].zfill(40), name


def _files(root: Path, *, clean: bool) -> dict[str, list[str]]:
    """Names of the Parquet files by folder; what was never finished is removed if ``clean``."""
    found: dict[str, list[str]] = {}
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for folder in folders:
        if clean:
            remove_leftovers(root / folder, only_writer=True)
        # A folder that is no longer there has no files.
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(root / folder)
            found[folder] = [name for name in names if name.endswith(".parquet") and not name.startswith(".")]
    return found
