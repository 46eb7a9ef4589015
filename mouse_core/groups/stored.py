"""The stored content of a rollout buffer: the index, batches, and rollouts, which are read when needed.

The index is a log of sealed groups, of batches, and of the rollouts that batches used. The index is read when a folder
is opened. With the index, the files need not be opened. The index also stores the order of the files, and the uids of
used rollouts, which stay known after old batch files are deleted. Files that the index does not list are read and added
to the index. Only the index contains the policy versions of ``set_policy_version``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.memo import memo
from mouse_core._base.threads import THREADS, in_order
from mouse_core.errors import ConfigError, DataError, MissingFieldError, MissingRowError, StoreWarning
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.files.reading import json_object, reading
from mouse_core.files.writing import remove, remove_leftovers, storing, write_file
from mouse_core.groups import files
from mouse_core.groups.records import (
    NO_COLUMNS,
    Columns,
    GroupKey,
    RLExample,
    RolloutRecord,
    common_columns,
    of_group,
)
from mouse_core.groups.waiting import RolloutCache

_UIDS = pa.list_(pa.string())
_NUMBERS = pa.list_(pa.int64())
# The columns of each kind of record.
_RECORDS = {
    "groups": pa.schema(
        {
            **dict.fromkeys(GroupKey._fields, pa.string()),
            "name": pa.string(),
            "number": pa.int64(),
            "uids": _UIDS,
            "created": pa.list_(pa.float64()),
            "rewards": pa.list_(pa.float64()),
            "tokens": _NUMBERS,
            "declared": pa.int64(),
            "untrained": _NUMBERS,
            "first": pa.int64(),
        }
    ),
    "batches": pa.schema({"name": pa.string(), "uids": _UIDS}),
    "version": pa.schema({"version": pa.string(), "sealed": pa.int64()}),
    "declared": pa.schema({"json": pa.string()}),
    "gone": pa.schema({"name": pa.string()}),
}


class StoredBatch(NamedTuple):
    """The index entry of a stored batch.

    Args:
        name: The name of the batch's file.
        uids: The uids of the rollouts that the batch used.
    """

    name: str
    uids: tuple[str, ...]

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self.name.split("_")[1]


class VersionChange(NamedTuple):
    """The index entry of a call of ``set_policy_version``.

    Args:
        version: The version that became the latest version.
        sealed: The number of groups that were sealed before the call. If the trainer went back to ``version``, those
            groups that have a later version are lost.
    """

    version: str
    sealed: int


@dataclass
class Index:
    """The content of the index.

    Args:
        parts: The groups whose files exist, in the order of sealing.
        batches: The batches in the order of storing, including batches whose files were deleted.
        changes: The changes of the policy version, in order.
        declared: The declared columns.
        gone: Names of missing files of groups.
    """

    parts: list[files.GroupFile] = field(default_factory=list)
    batches: list[StoredBatch] = field(default_factory=list)
    changes: list[VersionChange] = field(default_factory=list)
    declared: Columns = NO_COLUMNS
    gone: set[str] = field(default_factory=set)


# ---------------------------------------------------------------------- records


def encode(kind: str, *columns: Sequence[Any]) -> bytes:
    """Return a record of the log: the columns of ``_RECORDS[kind]``."""
    schema = _RECORDS[kind]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return kind.encode() + b"\n" + bytes(pa.RecordBatch.from_arrays(arrays, schema=schema).serialize())


def encode_parts(parts: Sequence[files.GroupFile]) -> bytes:
    """Return the record of sealed groups."""
    names = _RECORDS["groups"].names[len(GroupKey._fields) :]
    keys = zip(*(part.key for part in parts), strict=True)
    return encode("groups", *keys, *([getattr(part, name) for part in parts] for name in names))


def _decode(records: Sequence[bytes]) -> Index:
    index = Index()
    for record in records:
        kind, _, body = record.partition(b"\n")
        schema = _RECORDS.get(kind.decode(errors="replace"))
        if schema is None:
            raise DataError(f"index: expected a record of a kind among {list(_RECORDS)}, found {kind!r:.80}")
        rows = pa.ipc.read_record_batch(pa.py_buffer(body), schema)
        columns = [_tuples(one) if pa.types.is_list(one.type) else one.to_pylist() for one in rows.columns]
        if kind == b"groups":
            index.parts += map(files.GroupFile, map(GroupKey, *columns[:3]), *columns[3:])
        elif kind == b"batches":
            index.batches += map(StoredBatch, *columns)
        elif kind == b"version":
            index.changes += map(VersionChange, *columns)
        elif kind == b"declared":
            index.declared = Columns.from_json(columns[0][0], "index")
        else:
            index.gone.update(columns[0])
    return index


def _tuples(lists: pa.Array) -> list[Any]:
    """Return lists as tuples. Converting one flat Arrow array is several times as fast as converting many short
    arrays.
    """
    values = tuple(lists.flatten().to_pylist())
    return [values[begin:end] for begin, end in pairwise(accumulate(lists.value_lengths().to_pylist(), initial=0))]


# ---------------------------------------------------------------------- log and files


def index_path(root: Path) -> Path:
    """Return the path of the log."""
    return root / files.STATE / "index.log"


def open_index(root: Path) -> tuple[Index, Log]:
    """Return the index of a folder, and the log to append to. Only the folder's one writer may call this function.

    Raises:
        DataError: The log, or a file that is not in the log, is damaged.
        StorageError: The folder cannot be read.
    """
    log = Log(index_path(root))
    try:
        index, parts, batches, gone = _compare(root, log.records, clean=True)
        if parts:
            log.append(encode_parts(parts), sync=False)
        if batches:
            log.append(encode("batches", *zip(*batches, strict=True)), sync=True)
        if gone:
            log.append(encode("gone", gone), sync=False)
        if (declared := files.read_declared(root)) != index.declared:
            log.append(encode("declared", [declared.to_json()]), sync=True)
    except BaseException:
        log.close()
        raise
    log.records = []
    return index, log


def _compare(
    root: Path, records: Sequence[bytes], *, clean: bool
) -> tuple[Index, list[files.GroupFile], list[StoredBatch], list[str]]:
    """Compare the index with the files; return the corrected index, the groups and batches that the index lacked, and
    the files that are missing.
    """
    index = _decode(records)
    declared = files.read_declared(root)
    files.refuse_missing(root, declared, index.declared, max((part.declared for part in index.parts), default=0))
    with storing(f"folder {root}"):
        present = _files(root, clean=clean)
        stored = present.pop(files.BATCHES, [])
    there = {(folder, name) for folder, names in present.items() for name in names if name.startswith("part-")}
    by_place = {(files.folder_name(part.key.environment), part.name, part.first): part for part in index.parts}
    parts = [part for place, part in by_place.items() if place[:2] in there]
    unknown = sorted(there.difference(place[:2] for place in by_place))
    with ThreadPoolExecutor(THREADS) as pool:
        groups = in_order(
            pool, partial(files.find_parts, declared=declared), [root / folder / name for folder, name in unknown]
        )
        found = sorted(chain.from_iterable(groups), key=lambda part: (part.number, part.name, part.first))
    files.refuse_missing(root, declared, NO_COLUMNS, max((part.declared for part in found), default=0))
    gone = sorted({"/".join(place[:2]) for place in by_place if place[:2] not in there} - index.gone)
    if gone:
        warnings.warn(
            f"rollouts {root}: expected all files of sealed groups, found {len(gone)} missing, {gone[0]} first; their "
            "groups are left out",
            StoreWarning,
            stacklevel=4,
        )
    # The last files before a crash may not be in the log.
    parts = sorted([*parts, *found], key=lambda part: part.number) if found else parts
    known = {batch.name for batch in index.batches}
    new = [
        StoredBatch(name, _used(root / files.BATCHES / name))
        for name in sorted(stored, key=lambda name: (name.rpartition("_")[2].zfill(40), name))
        if name.startswith("batch_") and name not in known
    ]
    return replace(index, parts=parts, batches=[*index.batches, *new]), found, new, gone


def _files(root: Path, *, clean: bool) -> dict[str, list[str]]:
    """Return the names of Parquet files by folder; with ``clean``, remove unfinished files."""
    found: dict[str, list[str]] = {}
    with os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for folder in folders:
        if clean:
            remove_leftovers(root / folder, only_writer=True)
        # A folder can be removed in the meantime.
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(root / folder)
            found[folder] = [name for name in names if name.endswith(".parquet") and not name.startswith(".")]
    return found


# ---------------------------------------------------------------------- batches

# Keys of the metadata of a batch's file. The time distinguishes two batches of the same rollouts.
_METADATA, _COLUMNS, _TIME = b"mouse_batch_metadata", b"mouse_batch_columns", b"mouse_batch_time"
_STALENESS = b"mouse_batch_staleness"
# The uids of the rollouts that a batch used, if its examples have no uids.
_USED = b"mouse_batch_rollouts"


def _used(path: Path) -> tuple[str, ...]:
    """Return the uids of the rollouts that a batch used, from its file."""
    rows, metadata = files.read_part(path, lambda found, _: files.EXAMPLES, ["rollout_uid"])
    if _USED not in metadata:
        return tuple(filter(None, rows.column(0).to_pylist()))
    with reading(path):
        return tuple(map(str, json.loads(metadata[_USED])))


class BatchFiles:
    """The stored batches of a folder. A subclass fills ``_stored``, the batches.

    Args:
        root: The buffer's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stored: list[StoredBatch] = []

    def batch_at(self, index: int) -> str | None:
        """Return the id of the batch with the index ``index``; None if this batch does not exist yet."""
        return self._stored[index].batch_id if index < len(self._stored) else None

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """Return a stored batch.

        Raises:
            MissingFieldError: The batch does not exist.
            DataError: The batch's file is damaged.
            StorageError: The batch's file cannot be read.
        """
        path = self._find(batch_id)
        rows, metadata = files.read_part(path, lambda _, metadata: files.examples_with(_declared(path, metadata)))
        return files.table_to_examples(rows, _declared(path, metadata))

    def batch_metadata(self, batch_id: str) -> dict[str, Any]:
        """Return the batch maker's metadata of a stored batch; raises the errors of ``read_batch``."""
        path = self._find(batch_id)
        return dict(json_object(path, files.read_metadata(path).get(_METADATA, b"{}")))

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """Return how many versions each example was behind the newest version when its batch was created, ``[B]``; NaN
        if unknown.

        The newest version is the version that ``set_policy_version`` set last; if it was never called, the newest
        version of all added rollouts. The distance is the difference of the two versions if they are numeric, else the
        number of later versions that were seen.

        Raises:
            MissingFieldError, DataError, StorageError: See ``read_batch``.
        """
        path = self._find(batch_id)
        metadata = files.read_metadata(path)
        with reading(path):
            return np.array(json.loads(metadata[_STALENESS]), np.float64)

    def _find(self, batch_id: str) -> Path:
        """Return the path of a batch's file."""
        stored = list(self._stored)
        for batch in reversed(stored):
            if batch.batch_id == batch_id:
                return self._root / files.BATCHES / batch.name
        raise MissingFieldError(f"batch: expected the id of one of {len(stored)} stored batches, found {batch_id!r}")


def _declared(path: Path, metadata: Mapping[bytes, bytes]) -> Columns:
    return Columns.from_json(metadata[_COLUMNS], f"batch {path}") if _COLUMNS in metadata else NO_COLUMNS


class FolderBatches(BatchFiles):
    """Reads the stored batches of a folder that another process owns, without changes.

    Args:
        root: The folder, which possibly does not exist yet.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._position = 0

    def __repr__(self) -> str:
        return f"the folder {str(self._root)!r}, which has {len(self._stored)}"

    def batch_at(self, index: int) -> str | None:
        """Return the id of the batch with the index ``index``; None if the log does not contain this batch yet."""
        if index >= len(self._stored):
            # The index of a batch is final only when the batch is in the log.
            records, self._position = follow_log(index_path(self._root), self._position)
            self._stored += _decode([record for record in records if record.startswith(b"batches\n")]).batches
        return super().batch_at(index)


def write_batch(
    root: Path,
    log: Log,
    batch: Sequence[RLExample],
    metadata: Mapping[str, Any],
    uids: tuple[str, ...],
    behind: Sequence[float | None],
    *,
    compression: str,
    sync: bool,
) -> StoredBatch:
    """Write a batch to a file and to the log of the index. Only the folder's one writer may call this function.

    Args:
        root: The folder.
        log: The log of the index.
        batch: The examples.
        metadata: The batch maker's metadata of the batch.
        uids: The uids of the rollouts that the batch used.
        behind: The number of versions that each example is behind the newest version.
        compression: The codec of pages.
        sync: Whether to wait for the disk.

    Raises:
        StorageError: The batch cannot be written; the batch then does not exist.
    """
    noted = {_METADATA: json.dumps(dict(metadata), default=_plain).encode(), _TIME: str(time.time_ns()).encode()}
    noted[_STALENESS] = json.dumps(list(behind)).encode()
    if uids != tuple(example.rollout_uid for example in batch):
        noted[_USED] = json.dumps(uids).encode()
    declared = common_columns(batch)
    if declared:
        noted[_COLUMNS] = declared.to_json().encode()
    rows = pa.Table.from_batches([files.examples_to_table(batch, declared)])
    batch_id, content = files.encode_part(rows, compression, noted)
    stored = StoredBatch(f"batch_{batch_id}_{int(time.time())}.parquet", uids)
    path = root / files.BATCHES / stored.name
    try:
        write_file(path, content, sync=sync, only_writer=True)
        # After a crash here, the file exists, and a restart adds it to the log. The log must contain every batch,
        # because it keeps the uids of the rollouts when the file is deleted.
        log.append(encode("batches", [stored.name], [stored.uids]), sync=sync)
    except BaseException:
        remove(path)
        raise
    return stored


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy values to numbers and lists, other values to text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


# Number of groups that a thread reads at a time.
_GROUPS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A sealed group: its indexed properties, and its rollouts, which are read from its file.

    Args:
        root: The buffer's folder.
        part: The properties of the group and of its file.
        cache: The cache of rollouts in memory.
    """

    root: Path = field(repr=False)
    part: files.GroupFile
    cache: RolloutCache | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> GroupKey:
        """The environment, problem and policy version of the rollouts."""
        return self.part.key

    @property
    def uids(self) -> tuple[str, ...]:
        """The uids of the rollouts."""
        return self.part.uids

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The rewards of the rollouts; None for an unknown reward."""
        return self.part.rewards

    @property
    def group_uid(self) -> str:
        """The group's uid, which is unique even among groups of one problem and version. The rollouts of the group have
        this uid as ``group_uid``.
        """
        return self.part.place

    @property
    def path(self) -> Path:
        """The path of the Parquet file, which groups that were sealed together may share."""
        return self.part.path(self.root)

    def read(self) -> list[RolloutRecord]:
        """Read the rollouts of the group from its file.

        Raises:
            DataError: The file is damaged; the message names it.
            StorageError: The file cannot be read.
        """
        return files.read_groups([self.part], self.root)[0]


def read_ahead(groups: Sequence[StoredGroup]) -> Iterator[list[RolloutRecord]]:
    """Yield the rollouts of each group, in order, while threads read the next groups.

    Raises:
        DataError: A file is damaged; the message names it.
        StorageError: A file cannot be read.
    """

    def read(some: Sequence[StoredGroup]) -> list[list[RolloutRecord]]:
        return files.read_groups([group.part for group in some], some[0].root)

    pieces = [groups[first : first + _GROUPS_AT_ONCE] for first in range(0, len(groups), _GROUPS_AT_ONCE)]
    with ThreadPoolExecutor(THREADS) as pool:
        yield from chain.from_iterable(in_order(pool, read, pieces))


def read_wanted(
    wanted: Sequence[tuple[StoredGroup, Sequence[int], Sequence[int]]],
) -> list[list[RolloutRecord]]:
    """Return the requested rollouts of groups, from memory or from the groups' files.

    Args:
        wanted: For each group, the positions of the rollouts to return, and the positions of the rollouts to keep in
            memory if the file is read.

    Raises:
        DataError, StorageError: See ``read_ahead``.
    """
    found: list[list[RolloutRecord]] = []
    missing = []
    for number, (group, places, _) in enumerate(wanted):
        there = [None if group.cache is None else group.cache.get(group.uids[place]) for place in places]
        known = [of_group(rollout, group.group_uid) for rollout in there if rollout is not None]
        found.append(known if len(known) == len(places) else [])
        if len(known) < len(places):
            missing.append(number)
    missing.sort(key=lambda number: wanted[number][0].group_uid)  # groups of one file are read together
    for number, rollouts in zip(missing, read_ahead([wanted[number][0] for number in missing]), strict=True):
        group, places, others = wanted[number]
        found[number] = [rollouts[place] for place in places]
        if group.cache is not None:
            group.cache.put(rollouts[place] for place in others)
    return found


class StoredRollouts(Sequence[RolloutRecord]):
    """A sequence of the rollouts of sealed groups, in the order of sealing; a file is read when one of its rollouts is
    accessed.

    The sequence does not change when more groups are sealed.

    Args:
        root: The buffer's folder.
        parts: The groups' files.
        environment, policy_version, example_id: See ``open_rollouts``.

    Raises:
        MissingFieldError: See ``open_rollouts``.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[files.GroupFile],
        environment: str | None = None,
        policy_version: Wanted = None,
        example_id: Wanted = None,
    ) -> None:
        if environment is not None:
            known = sorted({part.key.environment for part in parts})
            if environment not in known:
                raise MissingFieldError(f"environment: expected one of {known}, found {environment!r}")
            parts = [part for part in parts if part.key.environment == environment]
        for name, wanted in (("policy_version", policy_version), ("example_id", example_id)):
            if wanted is not None:
                single = isinstance(wanted, str | int | np.integer)
                texts = {str(one) for one in ([wanted] if single else wanted)}  # type: ignore[union-attr]
                parts = [part for part in parts if getattr(part.key, name) in texts]
        self._root, self._parts = root, list(parts)
        self._ends = np.cumsum([len(part.uids) for part in parts], dtype=np.int64)
        self._last: dict[int, list[RolloutRecord]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"StoredRollouts({len(self)} rollouts in {len(self._parts)} groups of {str(self._root)!r})"

    @overload
    def __getitem__(self, index: int) -> RolloutRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[RolloutRecord]: ...
    def __getitem__(self, index: int | slice) -> RolloutRecord | list[RolloutRecord]:
        """Return one rollout, or for a slice a list of rollouts.

        Raises:
            IndexError: The rollout does not exist.
            DataError: The rollout's file is damaged; the message names the file.
            StorageError: The file cannot be read.
        """
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = int(index) + (len(self) if index < 0 else 0)
        if not 0 <= row < len(self):
            raise IndexError(f"rollouts: expected an index in {-len(self)}..{len(self) - 1}, found {index}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        last = self._last
        if number not in last:
            numbers = self._by_file[self._parts[number].path(self._root)]
            read = files.read_groups([self._parts[other] for other in numbers], self._root)
            self._last = last = dict(zip(numbers, read, strict=True))
        return last[number][row - int(self._ends[number])]  # counted from the end of the group

    def __iter__(self) -> Iterator[RolloutRecord]:
        return (self[row] for row in range(len(self)))

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """Return a rollout by its uid; only the file of its group is read.

        Raises:
            MissingRowError: The sequence does not contain the rollout.
            DataError, StorageError: See ``__getitem__``.
        """
        if rollout_uid not in self._by_uid:
            raise MissingRowError(f"rollouts: expected the uid of one of {len(self)}, found {rollout_uid!r:.100}")
        return self[self._by_uid[rollout_uid]]

    @memo
    def _by_file(self) -> dict[Path, list[int]]:
        found: dict[Path, list[int]] = {}
        for number, part in enumerate(self._parts):
            found.setdefault(part.path(self._root), []).append(number)
        return found

    @memo
    def _by_uid(self) -> dict[str, int]:
        return {uid: row for row, uid in enumerate(self.uids)}

    @memo
    def groups(self) -> list[StoredGroup]:
        """The sealed groups that contain these rollouts, in the order of sealing."""
        return [StoredGroup(self._root, part) for part in self._parts]

    @memo
    def environments(self) -> list[str]:
        """The names of the environments, in alphabetical order."""
        return sorted({part.key.environment for part in self._parts})

    @memo
    def uids(self) -> list[str]:
        """The rollouts' uids; no file is read."""
        return [uid for part in self._parts for uid in part.uids]


Wanted = str | int | Collection[str | int] | None
"""A value or several values to select by; None: no selection."""


def open_rollouts(
    root_path: str | Path,
    *,
    environment: str | None = None,
    policy_version: Wanted = None,
    example_id: Wanted = None,
) -> StoredRollouts:
    """Open the sealed rollouts in a ``RolloutBuffer``'s folder, also while another process adds rollouts.

    Args:
        root_path: The folder.
        environment: The environment of the rollouts; None: all environments.
        policy_version, example_id: One value or several values; only rollouts with one of these values are included.
            None: all rollouts.

    Returns:
        A sequence of ``RolloutRecord``; a file is read when one of its rollouts is accessed.

    Raises:
        ConfigError: The folder does not exist.
        MissingFieldError: The environment does not exist.
        DataError: A file is damaged, or a missing file held data that exist in no other file; the message names the
            file.
        StorageError: The folder cannot be read.

    Warns:
        StoreWarning: Files of groups are missing; their rollouts are left out.
    """
    root = Path(root_path)
    if not root.is_dir():
        raise ConfigError(f"root_path: expected the folder of a RolloutBuffer, found none at {str(root)!r}")
    # The folder is not changed; another process may be writing.
    index, *_ = _compare(root, read_log(index_path(root)), clean=False)
    return StoredRollouts(root, index.parts, environment, policy_version, example_id)
