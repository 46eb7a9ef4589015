"""preprocess: what a function makes of all rows, as a new dataset: in parallel, resumable, opened again when done."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError, WorkerError
from mouse_core.files.locking import alone
from mouse_core.files.reading import read_json_object
from mouse_core.files.writing import check_nothing_at, make_folder, put_in_place, storing, write_file
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats._files.shards import Shard, dataset_schema, describe, finish_names
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.opening import open
from mouse_core.formats.preprocessing._blocks import Work, begin_worker, run_block, stored_rows, stored_schema
from mouse_core.formats.preprocessing._function import identity, pickled
from mouse_core.formats.rows import read_rows
from mouse_core.spec import check_count, check_list
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.views import Store

Rows = Mapping[str, npt.NDArray[Any]]

_JOB, _LOCK, _MADE = "job.json", "lock", "preprocessed.json"
_BLOCK_BYTES = 64 << 20
# What is done is noted so often, in seconds: as much is done again after a kill, and a block of each process.
_NOTED = 0.5


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
    any order and, after an interruption, again. What it is given may be read-only.

    Blocks are files of a folder ``.NAME.preprocessing`` beside ``path``, which becomes ``path`` when all is there and
    was read back. After an interruption at any moment the same call goes on where it was, with any ``num_workers``.
    When all is there, and rows and function are the same, nothing is done. The same function is one of the same name,
    text and arguments; what it calls is not looked at, so change ``version`` when that changes.

    Args:
        rows: A store, a view of one or a snapshot; a ``RowStream``, or a path that ``formats.open`` opens; or a
            ``datasets.Dataset`` or ``pyarrow.Table``. Derived fields are columns like the others.
        function: What can be pickled: defined with ``def`` at the top of a module, with ``functools.partial`` of it for
            arguments, or an object of such a class.
        path: The folder of the new dataset.
        columns: Those that the function is given; by default all.
        num_workers: Processes that run it; 0: the calling one does. They are started afresh, so a script needs
            ``if __name__ == "__main__":``.
        version: Of what the function does, a text.
        block_rows: About how many rows a block has, in whole episodes; by default as many as take 64 MB.
        progress: Whether a bar shows how far it is.

    Returns:
        Where the new dataset is; ``to_store()`` opens it.

    Raises:
        ConfigError: A function that cannot be pickled, no rows, an option out of range, another dataset or unfinished
            work at ``path`` that is not of these rows and this function, or another process at work on it.
        WorkerError: The function raised an error, which is chained, or a process was ended.
        DataError: Rows that cannot be arrays, or a function that returns something else than columns of these rows.
        StorageError: It cannot be written; what was made so far is there for the next call.
    """
    target = Path(path)
    check_folder_name(target, wanted="the name of a folder")
    what = {"num_workers": check_count("num_workers", num_workers, 0)}
    if not isinstance(version, str):
        raise ConfigError(f"version: expected a text, found {version!r}")
    names = None if columns is None else check_list("columns", columns)
    snapshot, about = _snapshot_of(rows)
    schema = stored_schema(snapshot)
    for name in names or ():
        if name not in schema.names:
            raise ConfigError(f"columns: expected some of {schema.names}, found {name!r}")
    made_of = {
        "rows": f"{len(snapshot)} rows {snapshot.fingerprint}",
        "columns of the rows": str(schema.remove_metadata()),
        "what the rows say of themselves": about.to_json(),
        **identity(function, version),
        "columns": json.dumps(names),
    }
    if (target / _MADE).is_file():
        return _reopened(target, made_of)
    check_nothing_at(target, "preprocess")
    edges = _edges(snapshot, schema, block_rows)
    work_folder = target.with_name(f".{target.name}.preprocessing")
    work = Work(snapshot, schema, pickled(function), names, about, work_folder)
    with storing(f"preprocess: {str(path)!r}"):
        make_folder(work_folder)
        with alone(work_folder / _LOCK, "preprocess"):
            job = _Job(work, edges, made_of)
            try:
                return job.run(target, progress=progress, **what)
            finally:
                # Without a block there is nothing to go on from.
                if not job.shards:
                    shutil.rmtree(work_folder, ignore_errors=True)


def _snapshot_of(rows: Any) -> tuple[Any, Any]:
    """The snapshot of whatever rows are given as, and what they say of themselves."""
    from mouse_core.formats.base import RowStream
    from mouse_core.store.snapshot import Snapshot

    if isinstance(rows, str | os.PathLike):
        rows = open(rows)
    if isinstance(rows, RowStream):
        rows = rows.to_store()
    elif not isinstance(rows, Store | Snapshot):
        rows = DatasetStore().from_dataset(rows)
    if isinstance(rows, Snapshot):
        from mouse_core.about.dataset import About

        snapshot, about = rows, About("outgoing" if rows.alignment == "outgoing" else None)
    else:
        snapshot, about = rows.snapshot(), rows.about
    if not len(snapshot):
        raise ConfigError("rows: expected some, found none")
    return snapshot, about


def _edges(snapshot: Any, schema: pa.Schema, block_rows: int | None) -> list[int]:
    """The first row of each block, and the end: where episodes begin, about so many rows apart."""
    if block_rows is None:
        some = stored_rows(snapshot, 0, min(len(snapshot), 256), schema)
        block_rows = max(1, _BLOCK_BYTES * len(some) // max(some.nbytes, 1))
    check_count("block_rows", block_rows)
    starts = snapshot.episode_starts
    wanted = np.arange(0, len(snapshot), block_rows)
    # The last block takes what is left of the rows.
    edges = starts[np.searchsorted(starts, wanted, side="right") - 1]
    return [*dict.fromkeys(edges.tolist()), len(snapshot)]


def _reopened(target: Path, made_of: Mapping[str, str]) -> Preprocessed:
    """What an earlier call made, if it is of the same rows and function."""
    found = read_json_object(target / _MADE)
    _check_same(found.get("made of"), made_of, f"{str(target)!r} was made", "give another path, or delete it")
    rows = read_rows(target).rows
    return Preprocessed(str(target), int(rows or 0), str(found.get("digest")), int(rows or 0), reopened=True)


def _check_same(found: Any, made_of: Mapping[str, str], what: str, remedy: str) -> None:
    known = found if isinstance(found, dict) else {}
    differing = [key for key, value in made_of.items() if known.get(key) != value]
    if differing:
        raise ConfigError(f"preprocess: {what} of something else: it differs in {', '.join(differing)}; {remedy}")


class _Job:
    """One run over all rows, and what of it is done.

    Args:
        work: What is done with each block.
        edges: The first row of each, and the end.
        made_of: What decides about the result.
    """

    def __init__(self, work: Work, edges: list[int], made_of: Mapping[str, str]) -> None:
        self.work, self.edges, self.made_of = work, edges, made_of
        self._noted = 0.0
        self.shards: dict[int, Shard] = {}
        self.schema: pa.Schema | None = None
        self._load()

    def run(self, target: Path, *, num_workers: int, progress: bool) -> Preprocessed:
        """Do what is left to do."""
        resumed = sum(shard.rows for shard in self.shards.values())
        total = self.edges[-1]
        with progress_bar("preprocessing", total=total, unit="rows", enabled=progress) as advance:
            advance(resumed)
            self._run_blocks(num_workers, advance)
        digest = self._finish(target)
        return Preprocessed(str(target), total, digest, resumed)

    def _run_blocks(self, num_workers: int, advance: Callable[[int], None]) -> None:
        todo = [number for number in range(len(self.edges) - 1) if number not in self.shards]
        try:
            with _pool(self.work, min(num_workers, len(todo))) as submit:
                # The first block says what columns there are.
                first = 1 if self.schema is None else 0
                for numbers in (todo[:first], todo[first:]):
                    for shard, schema, number in self._done(numbers, submit, 2 * num_workers or 1):
                        self.shards[number], self.schema = shard, self.schema or schema
                        advance(shard.rows)
                        if time.monotonic() > self._noted + _NOTED:
                            self._save()
        finally:
            if self.shards:
                self._save()

    def _done(
        self, numbers: Sequence[int], submit: Callable[..., Future[Any]], ahead: int
    ) -> Iterator[tuple[Shard, pa.Schema, int]]:
        """Blocks as they are done, in any order; so many are under way."""
        left = iter(numbers)
        under_way: dict[Future[Any], int] = {}
        while True:
            for number in islice(left, ahead - len(under_way)):
                begin, end = self.edges[number : number + 2]
                under_way[submit(number, begin, end, self.schema)] = number
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                number = under_way.pop(future)
                try:
                    shard, schema = future.result()
                except BrokenProcessPool as error:
                    raise WorkerError(
                        "preprocess: a process ended in the middle of its work: it was killed, as for memory (fewer "
                        "num_workers, or smaller block_rows, take less), or could not begin, as where a script lacks "
                        "if __name__ == '__main__': or the function stands in no module"
                    ) from error
                yield shard, schema, number

    def _finish(self, target: Path) -> str:
        """Read back what was written, and give it its place; the digest of all rows."""
        assert self.schema is not None
        work = self.work.folder
        shards = [self.shards[number] for number in sorted(self.shards)]
        whole = RowDigest(self.schema)
        for shard in shards:
            digest = RowDigest(self.schema)
            for batch in read_rows(work / shard.name):
                digest.update(batch)
                whole.update(batch)
            if digest.hexdigest() != shard.digest:
                (work / shard.name).unlink()
                raise DataError(f"{work / shard.name}: expected the rows that were written, found others; call again")
        result = work / "result"
        shutil.rmtree(result, ignore_errors=True)
        result.mkdir()
        counts = finish_names(work, result, shards, "arrow")
        schema = dataset_schema(self.schema, self.work.about, "preprocess")
        describe(result, schema, self.work.about, counts, whole.hexdigest())
        made = {"made of": dict(self.made_of), "digest": whole.hexdigest()}
        (result / _MADE).write_text(json.dumps(made, indent=2), encoding="utf-8")
        put_in_place(result, target)
        shutil.rmtree(work, ignore_errors=True)
        return whole.hexdigest()

    def _load(self) -> None:
        """Take over what an interrupted call of the same rows and function left behind."""
        folder = self.work.folder
        found: dict[str, Any] = {}
        if (folder / _JOB).exists():
            found = dict(read_json_object(folder / _JOB))
            remedy = "finish it, or delete the folder"
            _check_same(found.get("made of"), self.made_of, f"unfinished work is in {str(folder)!r},", remedy)
            if found["edges"] == self.edges:
                self.schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["schema"])))
                shards = {int(number): Shard(**shard) for number, shard in found["shards"].items()}
                self.shards = {number: shard for number, shard in shards.items() if self._is_there(shard)}
        kept = {shard.name for shard in self.shards.values()} | {_JOB, _LOCK}
        for item in folder.iterdir():
            if item.is_dir():
                shutil.rmtree(item, ignore_errors=True)
            elif item.name not in kept:
                item.unlink()

    def _is_there(self, shard: Shard) -> bool:
        file = self.work.folder / shard.name
        return file.is_file() and file.stat().st_size == shard.bytes

    def _save(self) -> None:
        assert self.schema is not None
        state = {
            "made of": dict(self.made_of),
            "edges": self.edges,
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "shards": {str(number): vars(shard) for number, shard in self.shards.items()},
        }
        write_file(self.work.folder / _JOB, json.dumps(state).encode(), only_writer=True)
        self._noted = time.monotonic()


@contextmanager
def _pool(work: Work, num_workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """A function that has blocks made, by so many processes, or by this one."""
    if not num_workers:
        yield lambda *block: _at_once(work.run, *block)
        return
    # Forking a process with threads of Arrow's and of frameworks may hang.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=begin_worker, initargs=(pickle.dumps(work),))
    try:
        yield lambda *block: pool.submit(run_block, *block)
    finally:
        pool.shutdown(cancel_futures=True)


def _at_once(run: Callable[..., Any], *block: Any) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(run(*block))
    except Exception as error:  # which result() raises again
        done.set_exception(error)
    return done
