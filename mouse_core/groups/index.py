"""Stored batches: files, and the ledger of the rollouts they used."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.threads import THREADS, in_order
from mouse_core.digest import StreamDigest
from mouse_core.errors import DataError, MissingFieldError, StorageError, StoreWarning
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.files.writing import remove, remove_leftovers, storing, write_file
from mouse_core.groups.arrow import EXAMPLES, examples_to_table, examples_with, table_to_examples
from mouse_core.groups.columns import NO_COLUMNS, Columns, common_columns
from mouse_core.groups.files import (
    BATCHES,
    STATE,
    GroupFile,
    digest_of,
    encode_table,
    find_parts,
    folder_name,
    read_declared,
    read_metadata,
    read_part,
    read_table,
    refuse_missing,
    writing_options,
)
from mouse_core.groups.records import GroupKey, RLExample
from mouse_core.groups.versions import Versions

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
    log = Log(index_path(root))
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


_METADATA, _COLUMNS = b"mouse_batch_metadata", b"mouse_batch_columns"
_STALENESS = b"mouse_batch_staleness"
_DIGEST, _BATCHES = b"mouse_batches_digest", "batches"
# Two batches may be of the same rollouts and are two batches all the same.
_TIME = b"mouse_batch_time"


class BatchFiles:
    """The batches of a folder. Its one writer sees to it that only one thread at a time stores one.

    Args:
        root: The buffer's folder.
        stored: Those there are, in order; new ones are added to the list.
        told: The versions that were said to be the latest, in order; others add new ones to the list.
        log: Where new ones are noted.
        compression: Of the pages.
        sync: Whether to wait until all is on the disk.
        digest: Digests a batch with its number, where a digest of all is to run along; each file has that of the ones
            up to it.
    """

    def __init__(
        self,
        root: Path,
        stored: list[StoredBatch],
        told: list[Told],
        log: Log,
        *,
        compression: str,
        sync: bool,
        digest: Callable[[int, Sequence[RLExample]], StreamDigest] | None = None,
    ) -> None:
        self.stored, self._told = stored, told
        self._folder = root / BATCHES
        self._log, self._compression, self._sync = log, compression, sync
        self._digest_of = digest
        self.digest = None if digest is None else self._noted_digest()

    def store(
        self,
        batch: Sequence[RLExample],
        metadata: Mapping[str, Any],
        uids: tuple[str, ...],
        behind: Sequence[float | None],
    ) -> str:
        """Write a batch; its id.

        Args:
            batch: What it is made of.
            metadata: What is to be known of it.
            uids: Of the rollouts it has used.
            behind: How far each example's version is behind the newest.

        Raises:
            StorageError: It cannot be written; there is no such batch then.
        """
        noted = {_METADATA: json.dumps(dict(metadata), default=_plain).encode(), _TIME: str(time.time_ns()).encode()}
        noted[_STALENESS] = json.dumps(list(behind)).encode()
        digest, number = self.digest, len(self.stored)
        if digest is not None and self._digest_of is not None:
            digest += self._digest_of(number, batch)
            noted[_DIGEST] = json.dumps({**digest.state_dict(), _BATCHES: number + 1}).encode()
        if uids != tuple(example.rollout_uid for example in batch):
            noted[USED] = json.dumps(uids).encode()
        declared = common_columns(batch)
        if declared:
            noted[_COLUMNS] = declared.to_json().encode()
        rows = pa.Table.from_batches([examples_to_table(batch, declared)])
        content = encode_table(rows, writing_options(rows.schema, self._compression, declared), noted)
        batch_id = str(digest_of(content))
        name = f"batch_{batch_id}_{int(time.time())}.parquet"
        stored = StoredBatch(name, uids)
        try:
            write_file(self._folder / name, content, sync=self._sync, only_writer=True)
            # A crash here leaves the file, and a restart that does not find it in the log adds it. The log is what
            # still knows the rollouts when the file has been deleted, so there is no batch without it.
            self._log.append(encode_batches([stored]), sync=self._sync)
        except BaseException:
            remove(self._folder / name)
            raise
        self.stored.append(stored)
        self.digest = digest
        return batch_id

    def _noted_digest(self) -> StreamDigest:
        """The digest of all that was stored, as the last file has it; of nothing where that one has none or is gone."""
        try:
            noted = json.loads(read_metadata(self._folder / self.stored[-1].name)[_DIGEST])
            return StreamDigest.from_state(noted) if noted[_BATCHES] == len(self.stored) else StreamDigest()
        except (IndexError, KeyError, StorageError):
            return StreamDigest()

    def read(self, batch_id: str) -> list[RLExample]:
        """A batch.

        Raises:
            MissingFieldError: There is no such batch.
            DataError: Its file is damaged.
            StorageError: It cannot be read.
        """
        return read_examples(self._path(batch_id))

    def metadata(self, batch_id: str) -> dict[str, Any]:
        """What was stored with a batch.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read``.
        """
        found: dict[str, Any] = json.loads(read_metadata(self._path(batch_id)).get(_METADATA, b"{}"))
        return found

    def staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each example of a batch is behind the newest version; see ``read_staleness``.

        Raises:
            MissingFieldError, DataError, StorageError: As ``read``.
        """
        path = self._path(batch_id)
        number = next(number for number, batch in enumerate(list(self.stored)) if batch.batch_id == batch_id)
        return read_staleness(path, [one.version for one in list(self._told) if one.batches > number])

    def _path(self, batch_id: str) -> Path:
        names = {batch.batch_id: batch.name for batch in list(self.stored)}
        if batch_id not in names:
            raise MissingFieldError(f"batch: expected the id of one of {len(names)} stored batches, found {batch_id!r}")
        return self._folder / names[batch_id]


def read_examples(path: Path) -> list[RLExample]:
    """The batch of a file.

    Raises:
        DataError: It is damaged.
        StorageError: It cannot be read.
    """
    content = read_part(path)
    said = read_metadata(path, content).get(_COLUMNS)
    declared = NO_COLUMNS if said is None else Columns.from_json(said, f"batch {path}")
    return table_to_examples(read_table(path, examples_with(declared), content), declared)


def read_staleness(path: Path, told: Sequence[str] = ()) -> npt.NDArray[np.float64]:
    """How many versions older than the newest each example was, when the batch of a file was made; NaN: not known.

    Where a trainer has gone back behind an example's version since, it is how many versions it and the newest are apart
    along both lines: see ``Versions.parted``.

    Args:
        path: The file.
        told: The versions that were said to be the latest since the batch was made, in order.

    Raises:
        DataError, StorageError: As ``read_examples``.
    """
    noted = read_metadata(path).get(_STALENESS)
    # It may have been stored before this was noted.
    behind = np.full(len(read_examples(path)), np.nan) if noted is None else np.array(json.loads(noted), np.float64)
    if told:
        versions = Versions(told)
        versions.tell(told[-1])
        for place, example in enumerate(read_examples(path)):
            apart = versions.parted(example.policy_version, told) if example.policy_version else None
            behind[place] = behind[place] if apart is None else apart
    return behind


def _plain(value: Any) -> Any:
    """What JSON can say of a value: NumPy's as numbers and lists, all else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
