"""preprocess: what a function makes of all rows, as a new dataset: in parallel, resumable, opened again when done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About, read_about
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.locking import alone
from mouse_core.files.reading import read_json_object
from mouse_core.files.writing import check_nothing_at, make_folder, storing
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats.base import RowStream
from mouse_core.formats.opening import open
from mouse_core.formats.preprocessing._blocks import Work, stored_rows
from mouse_core.formats.preprocessing._job import MADE, Job, check_same, check_sources
from mouse_core.formats.preprocessing.function import identity, pickled
from mouse_core.formats.rows import read_rows
from mouse_core.spec import check_count, check_list
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

_LOCK = "lock"
_BLOCK_BYTES = 64 << 20
# So that 8 processes have 4 blocks each of rows that are small; as many for any number of processes, which may be
# another one when a call goes on.
_LEAST_BLOCKS, _FEW_ROWS = 32, 1_000


@dataclass(frozen=True)
class Preprocessed:
    """What became of a dataset.

    Args:
        path: Where the new one is: a folder for ``datasets.load_from_disk`` and ``formats.open``.
        rows: How many rows it has.
        digest: Of all of them; see ``rows_digest``.
        resumed_rows: Rows that a call before had made already.
        reopened: Whether all was there, and nothing was computed.
    """

    path: str
    rows: int
    digest: str
    resumed_rows: int = 0
    reopened: bool = False

    def to_store(self, **options: Any) -> DatasetStore:
        """The new dataset as a store, by reference; ``options`` as ``DatasetStore`` takes them."""
        return open(self.path).to_store(**options)


def preprocess(
    rows: Any,
    function: Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    num_workers: int = 0,
    version: str = "",
    block_rows: int | None = None,
    progress: bool = False,
) -> Preprocessed:
    """Write what a function makes of every row to a new dataset, which says of itself what the old one does.

    The function is called with the columns of some whole episodes, ``{name: array [n, ...]}``, encoded images as
    pixels, and returns a dict of columns ``[n, ...]`` of the same rows: those that are new or other than before; None
    for one that is to be left out. All others are taken over as they are stored. It must be pure: blocks are made in
    any order and, after an interruption, again. What it is given is read-only.

    Blocks are files of a folder ``.NAME.preprocessing`` beside ``path``, which becomes ``path`` when all is there and
    was read back. After an interruption at any moment the same call goes on where it was, with any ``num_workers``.
    When all is there, and rows and function are the same, nothing is done; all rows are read to see that they are. Of
    images that rows name by path the path counts. The same function is one of the same name,
    code and arguments, which reads the same of its module, functions and classes as well. Of installed packages the
    code of functions counts, and the names of classes: change ``version`` when they change.

    Args:
        rows: A store, a view of one or a snapshot; a ``RowStream``, or a path that ``formats.open`` opens; or a
            ``datasets.Dataset`` or ``pyarrow.Table``. Derived fields are columns like the others.
        function: What can be pickled: defined with ``def`` at the top of a module, with ``functools.partial`` of it for
            arguments, or an object of such a class.
        path: The folder of the new dataset.
        columns: Those that the function is given; by default all.
        num_workers: Processes that run it; 0: the calling one does. They are started afresh, so a script needs
            ``if __name__ == "__main__":``.
        version: Of what the function does, a text; needed where it reads what cannot be pickled, as a lock.
        block_rows: About how many rows a block has, in whole episodes; by default as many as take 64 MB, or a 32nd of
            all rows where that is less (but 1,000). With another number unfinished work begins anew.
        progress: Whether a bar shows how far it is.

    Returns:
        Where the new dataset is; ``to_store()`` opens it.

    Raises:
        ConfigError: A function that cannot be pickled, no rows, an option out of range, another dataset or unfinished
            work at ``path`` that is not of these rows and this function, or another process at work on it.
        WorkerError: The function raised an error, which is chained, or a process was ended.
        DataError: Rows that cannot be arrays, or a function that returns something else than columns of these rows.
        StorageError: It cannot be written; what was made so far is there for the next call. Where the disk is full that
            may lack what was made in the last half second, of which it could not be noted that it is there.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder")
    check_count("num_workers", num_workers, 0)
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    names = None if columns is None else check_list("columns", columns)
    snapshot, about = _snapshot_of(rows)
    schema = pa.schema(list(stored_types(snapshot.segments).items()))
    for name in names or ():
        if name not in schema.names:
            raise ConfigError(f"columns: expected some of {schema.names}, found {name!r}")
    work_folder = target.with_name(f".{target.name}.preprocessing")
    work = Work(snapshot, schema, pickled(function), names, about, work_folder)
    made_of = {
        "rows": f"{len(snapshot)} rows {snapshot.fingerprint}",
        "columns of the rows": str(schema.remove_metadata()),
        "what the rows say of themselves": about.to_json(),
        **identity(function, version),
        "columns": json.dumps(names),
    }
    if (target / MADE).is_file():
        return _reopened(target, made_of, work)
    check_nothing_at(target, "preprocess")
    edges = _edges(snapshot, schema, block_rows)
    with storing(f"preprocess: {str(path)!r}"):
        make_folder(work_folder)
        with alone(work_folder / _LOCK, "preprocess"):
            job = Job(work, edges, made_of)
            resumed = job.rows_done
            try:
                digest = job.run(target, num_workers=num_workers, progress=progress)
            finally:
                # Without a block there is nothing to go on from.
                if not job.shards:
                    shutil.rmtree(work_folder, ignore_errors=True)
    return Preprocessed(str(target), len(snapshot), digest, resumed)


def _snapshot_of(rows: Any) -> tuple[Snapshot, About]:
    """The snapshot of whatever rows are given as, and what they say of themselves."""
    if isinstance(rows, str | os.PathLike):
        rows = open(rows)
    if isinstance(rows, RowStream):
        rows = rows.to_store()
    elif not isinstance(rows, Store | Snapshot):
        said = read_about(rows, where="rows").alignment if isinstance(rows, pa.Table) or hasattr(rows, "info") else None
        rows = DatasetStore(alignment=said).from_dataset(rows)
    if isinstance(rows, Snapshot):
        snapshot, about = rows, About("outgoing" if rows.alignment == "outgoing" else None)
    else:
        snapshot, about = rows.snapshot(), rows.about
    if snapshot.has_shares:
        raise ConfigError(
            "rows: expected those of a member of a mixture, found the mixture, whose shares would be lost"
        )
    if not len(snapshot):
        raise ConfigError("rows: expected some, found none")
    return snapshot, about


def _edges(snapshot: Snapshot, schema: pa.Schema, block_rows: int | None) -> list[int]:
    """The first row of each block, and the end: where episodes begin, about so many rows apart."""
    if block_rows is None:
        some = stored_rows(snapshot, 0, min(len(snapshot), 256), schema)
        share = max(_FEW_ROWS, -(-len(snapshot) // _LEAST_BLOCKS))
        block_rows = max(1, min(_BLOCK_BYTES * len(some) // max(some.nbytes, 1), share))
    check_count("block_rows", block_rows)
    starts = snapshot.episode_starts
    wanted = np.arange(0, len(snapshot), block_rows)
    # The last block takes what is left of the rows.
    edges = starts[np.searchsorted(starts, wanted, side="right") - 1]
    return [*dict.fromkeys(edges.tolist()), len(snapshot)]


def _reopened(target: Path, made_of: Mapping[str, str], work: Work) -> Preprocessed:
    """What an earlier call made, if it is of the same rows and function."""
    found = read_json_object(target / MADE)
    what, remedy = f"{str(target)!r} was made", "give another path, or delete it"
    check_same(found.get("made of"), made_of, what, remedy)
    try:
        edges, sources = [int(edge) for edge in found["edges"]], dict(enumerate(found["sources"]))
        blocks = dict(enumerate(pairwise(edges)))
        if len(blocks) != len(sources) or edges[:1] != [0] or edges[-1] != len(work.snapshot):
            raise ValueError(f"{len(sources)} digests of rows up to {edges[-1:]}")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{target / MADE}: expected what preprocess notes, found something else ({error})") from error
    check_sources(work, blocks, sources, what, remedy)
    rows = read_rows(target).rows
    return Preprocessed(str(target), int(rows or 0), str(found.get("digest")), int(rows or 0), reopened=True)
