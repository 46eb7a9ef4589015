"""Stored batches: files, and the ledger of the rollouts they used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.digest import StreamDigest
from mouse_core.errors import MissingFieldError, StorageError
from mouse_core.files.log import Log
from mouse_core.files.writing import remove, write_file
from mouse_core.groups._files.arrow import examples_to_table, examples_with, table_to_examples
from mouse_core.groups._files.index import USED, StoredBatch, Told, encode_batches
from mouse_core.groups._files.names import BATCHES
from mouse_core.groups._files.parts import (
    digest_of,
    encode_table,
    read_metadata,
    read_part,
    read_table,
    writing_options,
)
from mouse_core.groups.types.columns import NO_COLUMNS, Columns, common_columns
from mouse_core.groups.types.example import RLExample
from mouse_core.groups.types.versions import Versions

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
